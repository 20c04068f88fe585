/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.c - which kernels run on this machine.
 */
#include "kernels/kernels.h"

#include "base/os.h"

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

/* Dot products and permutations of bytes: in all that have AVX-512 since Ice Lake and Zen 4. */
static bool has_vnni(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}

/* The processor's word, and the system's, which must save the tiles of a thread: it is asked for its permission, and where
 * it rejects that the sets above serve. */
static bool has_amx(void)
{
    enum { AMX_BF16 = 1 << 22, AVX512_FP16 = 1 << 23, AMX_TILE = 1 << 24, ALL = AMX_BF16 | AVX512_FP16 | AMX_TILE };
    unsigned a, b, c, d;
    return has_vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & ALL) == ALL && nib_os_allow_amx();
}
#endif

const struct nib_isa nib_isas[] = {
    { "scalar", always, &nib_kernels_scalar },
    { "scalar", always, &nib_gptq_scalar },
#if defined(__x86_64__)
    { "avx2", has_avx2, &nib_kernels_avx2 },
    { "avx2", has_avx2, &nib_products_avx2 },
    { "avx2", has_avx2, &nib_gptq_avx2 },
    { "avx512", has_avx512, &nib_kernels_avx512 },
    { "avx512", has_avx512, &nib_gptq_avx512 },
    { "avx512", has_vnni, &nib_products_avx512 },
    { "amx", has_amx, &nib_products_amx },
#elif defined(__aarch64__)
    { "neon", always, &nib_kernels_neon },
    { "neon", always, &nib_products_neon },
    { "neon", always, &nib_gptq_neon },
    { "neon", nib_os_has_sdot, &nib_products_sdot },
#endif
    { NULL, NULL, NULL },
};

static struct nib_kernels best;
static const char *best_name;

static void merge(void)
{
    const char *cap = getenv("NIB_MAX_ISA");
    for (const struct nib_isa *isa = nib_isas; isa->name; isa++) {
        if (cap && best_name && strcmp(cap, best_name) == 0 && strcmp(cap, isa->name) != 0)
            break; /* a name may have several lines */
        if (!isa->present())
            continue;
#define X(operation, count)             \
    for (int i = 0; i < (count); i++)   \
        if (isa->kernels->operation[i]) \
            best.operation[i] = isa->kernels->operation[i];
        NIB_KERNELS(X)
        NIB_PRODUCT_KERNELS(X)
        NIB_GPTQ_KERNELS(X)
#undef X
        best_name = isa->name;
    }
}

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
