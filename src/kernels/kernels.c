/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.c - which kernels run on this machine.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pthread.h>
#include <stdlib.h>

static bool always(void) { return true; }

#if defined(__x86_64__)
/* Not every compiler's __builtin_cpu_supports knows this one. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const struct nib_isa nib_isas[] = {
    { "scalar", always, &nib_kernels_scalar },
#if defined(__x86_64__)
    { "avx2", has_avx2, &nib_kernels_avx2 },
    { "avx512", has_avx512, &nib_kernels_avx512 },
#elif defined(__aarch64__)
    { "neon", always, &nib_kernels_neon },
#endif
    { NULL, NULL, NULL },
};

const char *nib_kernels_up_to(const char *cap, struct nib_kernels *out)
{
    const char *name = NULL;
    *out = (struct nib_kernels){ .absmax = { NULL } };
    for (const struct nib_isa *isa = nib_isas; isa->name; isa++) {
        if (cap && name && strcmp(cap, name) == 0 && strcmp(cap, isa->name) != 0)
            break;
        if (!isa->present())
            continue;
#define X(operation, count)             \
    for (int i = 0; i < (count); i++)   \
        if (isa->kernels->operation[i]) \
            out->operation[i] = isa->kernels->operation[i];
        NIB_KERNELS(X)
        NIB_PRODUCT_KERNELS(X)
#undef X
        name = isa->name;
    }
    return name;
}

static struct nib_kernels best;
static const char *best_name;

static void merge(void) { best_name = nib_kernels_up_to(getenv("NIB_MAX_ISA"), &best); }

static pthread_once_t merged = PTHREAD_ONCE_INIT;

const struct nib_kernels *nib_kernels_best(void)
{
    (void)pthread_once(&merged, merge);
    return &best;
}

const char *nib_isa(void)
{
    (void)pthread_once(&merged, merge);
    return best_name;
}
