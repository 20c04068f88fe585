/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_memory.c - how fast this machine's memory is: loops that do nothing but read and write.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bench.h"
#include "nib.h"

double bench_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- Loops, for the baseline and for wider vectors ---- */

typedef uint64_t vector __attribute__((vector_size(32), aligned(8), may_alias));
typedef uint64_t wide_vector __attribute__((vector_size(64), aligned(8), may_alias));
typedef uint64_t word __attribute__((aligned(1), may_alias));

static volatile uint64_t sink; /* what was read must seem to be wanted */

/* Streaming stores of 16 bytes are in every x86-64; elsewhere they are plain. */
static inline void store_around(char *p, uint64_t bits)
{
#if defined(__x86_64__)
    _mm_stream_si128((__m128i *)(void *)p, _mm_set1_epi64x((long long)bits));
#else
    ((word *)(void *)p)[0] = ((word *)(void *)p)[1] = bits;
#endif
}

#define DEFINE_LOOPS(name, attributes, type)                                                                \
    attributes static inline uint64_t read_##name(const char *in, int64_t bytes, type *seen)                \
    {                                                                                                       \
        type a = *seen, b = { 0 }, c = { 0 }, d = { 0 };                                                    \
        const int64_t step = sizeof(type);                                                                  \
        int64_t i = 0;                                                                                      \
        uint64_t rest = 0;                                                                                  \
        for (; i + 4 * step <= bytes; i += 4 * step) {                                                      \
            a ^= *(const type *)(const void *)(in + i);                                                     \
            b ^= *(const type *)(const void *)(in + i + step);                                              \
            c ^= *(const type *)(const void *)(in + i + 2 * step);                                          \
            d ^= *(const type *)(const void *)(in + i + 3 * step);                                          \
        }                                                                                                   \
        for (; i + step <= bytes; i += step)                                                                \
            b ^= *(const type *)(const void *)(in + i);                                                     \
        for (; i + 8 <= bytes; i += 8)                                                                      \
            rest ^= *(const word *)(const void *)(in + i);                                                  \
        *seen = a ^ b ^ c ^ d;                                                                              \
        return rest;                                                                                        \
    }                                                                                                       \
    attributes static inline void write_##name(char *out, int64_t bytes, uint64_t bits)                     \
    {                                                                                                       \
        int64_t i = 0;                                                                                      \
        for (; i + 32 <= bytes; i += 32)                                                                    \
            *(vector *)(void *)(out + i) = (vector){ bits, bits, bits, bits };                              \
        for (; i + 8 <= bytes; i += 8)                                                                      \
            *(word *)(void *)(out + i) = bits;                                                              \
    }                                                                                                       \
    attributes static void pass_##name(const struct bench_traffic *t, const char *in, char *out, int64_t n) \
    {                                                                                                       \
        type seen = { 0 };                                                                                  \
        uint64_t rest = 0;                                                                                  \
        for (int64_t i = 0; i < n; i++, in += t->in, out += t->out) {                                       \
            const uint64_t bits = (uint64_t)i + 1; /* lines of zeros would be written faster than others */ \
            rest ^= read_##name(in, t->in, &seen);                                                          \
            if (!t->stream)                                                                                 \
                write_##name(out, t->out, bits);                                                            \
            for (int k = 0; t->stream && k < t->out; k += 16)                                               \
                store_around(out + k, bits);                                                                \
        }                                                                                                   \
        for (size_t k = 0; k < sizeof seen / 8; k++)                                                        \
            rest ^= seen[k];                                                                                \
        sink = rest;                                                                                        \
    }

#define NO_ATTRIBUTES
DEFINE_LOOPS(plain, NO_ATTRIBUTES, vector)
#if defined(__x86_64__)
#define WITH_AVX2 __attribute__((target("avx2")))
#define WITH_AVX512 __attribute__((target("avx512f")))
DEFINE_LOOPS(avx2, WITH_AVX2, vector)
DEFINE_LOOPS(avx512, WITH_AVX512, wide_vector) /* wider stores would be no faster */
#endif

/* With vectors as wide as those of the library's kernels: some processors read the cache faster with wider ones. */
static void pass(const struct bench_traffic *t, const char *in, char *out, int64_t n)
{
#if defined(__x86_64__)
    if (strcmp(nib_isa(), "avx512") == 0 || strcmp(nib_isa(), "amx") == 0) {
        pass_avx512(t, in, out, n);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        pass_avx2(t, in, out, n);
        return;
    }
#endif
    pass_plain(t, in, out, n);
}

/* ---- Threads: each takes a range ---- */

enum { MAX_THREADS = 256 };

struct share {
    struct bench_traffic traffic;
    const char *in;
    char *out;
    int64_t chunks;
};

static void *run_share(void *context)
{
    struct share *share = context;
    struct bench_traffic reading = share->traffic;
    reading.out = 0;
    for (int i = 0; i < share->traffic.passes_before; i++)
        pass(&reading, share->in, share->out, share->chunks);
    pass(&share->traffic, share->in, share->out, share->chunks);
    return NULL;
}

void bench_floor(const struct bench_traffic *traffic, const void *in, void *out, int64_t chunks, int threads)
{
    pthread_t thread[MAX_THREADS];
    struct share shares[MAX_THREADS];
    bool started[MAX_THREADS] = { false };
    const int n = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    int64_t first = 0;
    for (int i = 0; i < n; i++) {
        const int64_t end = chunks * (i + 1) / n;
        shares[i] = (struct share){ *traffic, (const char *)in + first * traffic->in,
                                    (char *)out + first * traffic->out, end - first };
        first = end;
        if (i > 0) /* the caller has a share of its own */
            started[i] = pthread_create(&thread[i], NULL, run_share, &shares[i]) == 0;
    }
    run_share(&shares[0]);
    for (int i = 1; i < n; i++)
        if (started[i])
            pthread_join(thread[i], NULL);
        else
            run_share(&shares[i]);
}

const char *const bench_stream_names[BENCH_STREAMS] = { "read", "write", "non-temporal write", "copy" };

void bench_run_stream(enum bench_stream stream, const void *in, void *out, int64_t bytes, int threads)
{
    enum { STEP = 4096 };
    static const struct bench_traffic traffic[BENCH_STREAMS] = { [BENCH_READ] = { 0, STEP, 0, false },
                                                                 [BENCH_WRITE] = { 0, 0, STEP, false },
                                                                 [BENCH_STREAM_WRITE] = { 0, 0, STEP, true },
                                                                 [BENCH_COPY] = { 0, STEP, STEP, false } };
    bench_floor(&traffic[stream], in, out, bytes / STEP, threads);
}
