/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_gemm.c - nib bench --gemm: how fast products are, beside what the processor multiplies and the memory gives.
 *
 * One thread is timed by its processor time, so that what else runs on the machine does not count; several by the clock.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "bench.h"

/* ---- Time ---- */

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static clockid_t clock_for(int threads) { return threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC; }

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median time of a call, after one that does not count. */
static double time_of(void (*call)(void *context), void *context, int threads, bool quick)
{
    enum { MOST = 200 };
    double times[MOST];
    const double enough = quick ? 0.01 : 0.4;
    int n = 0;
    call(context);
    for (double spent = 0; n < MOST && (spent < enough || n < 3); n++) {
        const double start = seconds(clock_for(threads));
        call(context);
        times[n] = seconds(clock_for(threads)) - start;
        spent += times[n];
    }
    qsort(times, (size_t)n, sizeof *times, by_value);
    return times[n / 2];
}

/* ---- What the machine can do ---- */

enum { PEAK_CHAINS = 12, PEAK_STEPS = 20000 };

/* Twelve sums that do not wait for one another; the result must be wanted by somebody. */
#define PEAK_LOOP(vector, set1, add, fma)                                                            \
    const vector x = set1(1e-3f);                                                                    \
    vector sums[PEAK_CHAINS], all = set1(0);                                                         \
    for (int i = 0; i < PEAK_CHAINS; i++)                                                            \
        sums[i] = set1(0);                                                                           \
    for (int k = 0; k < PEAK_STEPS; k++)                                                             \
        _Pragma("GCC unroll 12") for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = fma(sums[i], x, x); \
    for (int i = 0; i < PEAK_CHAINS; i++)                                                            \
        all = add(all, sums[i]);

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void peak_avx512(void *out)
{
    PEAK_LOOP(__m512, _mm512_set1_ps, _mm512_add_ps, _mm512_fmadd_ps)
    _mm512_storeu_ps(out, all);
}

__attribute__((target("avx2,fma"))) static void peak_avx2(void *out)
{
    PEAK_LOOP(__m256, _mm256_set1_ps, _mm256_add_ps, _mm256_fmadd_ps)
    _mm256_storeu_ps(out, all);
}
#elif defined(__aarch64__)
#define FUSED(a, b, c) vfmaq_f32(c, a, b)
static void peak_neon(void *out)
{
    PEAK_LOOP(float32x4_t, vdupq_n_f32, vaddq_f32, FUSED)
    vst1q_f32(out, all);
}
#endif

/* FP32 multiplications and additions of one thread, per second, in vectors as wide as the kernels' may be; 0 where nobody
 * knows how to ask. */
static double fma_peak(bool quick)
{
    float out[16];
    void (*loop)(void *) = NULL;
    int lanes = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && strcmp(nib_isa(), "avx2") != 0)
        loop = peak_avx512, lanes = 16;
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        loop = peak_avx2, lanes = 8;
#elif defined(__aarch64__)
    loop = peak_neon, lanes = 4;
#endif
    return loop ? 2.0 * PEAK_CHAINS * PEAK_STEPS * lanes / time_of(loop, out, 1, quick) : 0;
}

struct reading {
    char *memory;
    int64_t bytes;
    int threads;
};

static void read_all(void *context)
{
    const struct reading *r = context;
    bench_run_stream(BENCH_READ, r->memory, NULL, r->bytes, r->threads);
}

/* ---- Products ---- */

/* Weights that are multiplied in turn, so many that no cache holds them. */
struct weights {
    nib_tensor **tensors;
    int n;
    int64_t bytes; /* of each: codes and scales */
};

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* A tensor of random codes, and of scales from 2^-3 to 2^6. */
static nib_status random_tensor(int64_t rows, int64_t cols, uint64_t *state, nib_tensor **out)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    const nib_status status = nib_tensor_create(&q, NIB_F32, 2, (const int64_t[]){ rows, cols }, NULL, out);
    if (status)
        return status;
    nib_buffer *const codes = nib_tensor_buffer(*out, NIB_ROW_DATA), *const scales =
                                                                         nib_tensor_buffer(*out, NIB_ROW_SCALE);
    uint64_t *const words = nib_buffer_data(codes);
    uint8_t *const bytes = nib_buffer_data(scales);
    for (size_t i = 0; i < nib_buffer_bytes(codes) / sizeof *words; i++)
        words[i] = next_random(state);
    for (size_t i = 0; i < nib_buffer_bytes(scales); i++)
        bytes[i] = (uint8_t)(0x20 + next_random(state) % 0x48);
    *(float *)nib_buffer_data(nib_tensor_buffer(*out, NIB_ROW_TENSOR_SCALE)) = 1;
    return NIB_OK;
}

struct product_call {
    const struct weights *weights;
    nib_operand x;
    nib_array y;
    int turn;
    nib_status status;
};

static void multiply(void *context)
{
    struct product_call *const c = context;
    const nib_operand w = { c->weights->tensors[c->turn], NULL, NIB_ROWWISE };
    const nib_status status = nib_gemm(&c->x, &w, NULL, &c->y);
    c->turn = (c->turn + 1) % c->weights->n;
    c->status = c->status ? c->status : status;
}

struct gemm_bench {
    const struct bench_gemm_options *options;
    struct bench_gemm_report *report;
    struct weights weights;
    nib_tensor *codes; /* [GEMM_ROWS, cols]: its first rows are a view */
    float *values, *y;
    nib_device *hosts[2]; /* one thread, and all */
};

/* Rows of activations by all weights, on one thread or on all. */
static nib_status measure(struct gemm_bench *b, bool plain, int64_t rows, int all)
{
    const struct bench_gemm_options *o = b->options;
    struct product_call call = { .weights = &b->weights };
    nib_array values;
    nib_tensor *codes = NULL;
    nib_status status = nib_array_init(&values, b->values, NIB_F32, 2, (const int64_t[]){ rows, o->cols });
    if (!status)
        status = nib_array_init(&call.y, b->y, NIB_F32, 2, (const int64_t[]){ rows, o->rows });
    if (!status)
        status = nib_tensor_slice(b->codes, 0, rows, &codes);
    if (status)
        return status;
    call.x = plain ? (nib_operand){ NULL, &values, NIB_ROWWISE } : (nib_operand){ codes, NULL, NIB_ROWWISE };
    call.y.device = b->hosts[all];
    const int threads = all ? o->threads : 1;
    bench_bind(threads);
    const double time = time_of(multiply, &call, threads, o->quick);
    nib_tensor_destroy(codes);
    if (call.status)
        return call.status;
    b->report->results[b->report->n++] =
        (struct bench_gemm_result){ .plain = plain,
                                    .rows = rows,
                                    .threads = threads,
                                    .seconds = time,
                                    .bytes = (double)b->weights.bytes,
                                    .flops = 2.0 * (double)(rows * o->rows * o->cols) };
    return NIB_OK;
}

static nib_status prepare(struct gemm_bench *b)
{
    const struct bench_gemm_options *o = b->options;
    const int64_t enough = o->quick ? 1 << 20 : (int64_t)1 << 30;
    uint64_t state = 88172645463325252u;
    nib_status status = random_tensor(BENCH_GEMM_MOST_ROWS, o->cols, &state, &b->codes);
    b->weights.bytes = o->rows * o->cols / 2 + o->rows * o->cols / 16;
    const int n = (int)(enough / b->weights.bytes) + 1;
    b->weights.tensors = calloc((size_t)n, sizeof *b->weights.tensors);
    b->values = malloc((size_t)(BENCH_GEMM_MOST_ROWS * o->cols) * sizeof *b->values);
    b->y = calloc((size_t)(BENCH_GEMM_MOST_ROWS * o->rows), sizeof *b->y);
    if (!status && (!b->weights.tensors || !b->values || !b->y))
        status = nib_set_error(NIB_ERR_MEMORY, "no memory for the operands of products");
    for (; !status && b->weights.n < n; b->weights.n += !status)
        status = random_tensor(o->rows, o->cols, &state, &b->weights.tensors[b->weights.n]);
    for (int64_t i = 0; !status && i < BENCH_GEMM_MOST_ROWS * o->cols; i++)
        b->values[i] = (float)(int32_t)next_random(&state) * 0x1p-31f;
    if (!status)
        status = nib_host_create(1, &b->hosts[0]);
    if (!status)
        status = nib_host_create(o->threads, &b->hosts[1]);
    return status;
}

static void clean(struct gemm_bench *b)
{
    for (int i = 0; i < b->weights.n; i++)
        nib_tensor_destroy(b->weights.tensors[i]);
    nib_tensor_destroy(b->codes);
    nib_device_release(b->hosts[0]);
    nib_device_release(b->hosts[1]);
    free(b->weights.tensors);
    free(b->values);
    free(b->y);
}

static nib_status measure_machine(struct gemm_bench *b)
{
    const struct bench_gemm_options *o = b->options;
    /* More than any cache holds: there are some of 300 MB. */
    struct reading reading = { .bytes = o->quick ? 1 << 22 : (int64_t)1 << 30, .threads = 1 };
    reading.memory = bench_allocate(reading.bytes);
    if (!reading.memory)
        return nib_set_error(NIB_ERR_MEMORY, "no memory to read");
    memset(reading.memory, 0x5A, (size_t)reading.bytes);
    bench_bind(1);
    b->report->fma = fma_peak(o->quick);
    b->report->read[0] = (double)reading.bytes / time_of(read_all, &reading, 1, o->quick);
    reading.threads = o->threads;
    bench_bind(o->threads);
    b->report->read[1] = (double)reading.bytes / time_of(read_all, &reading, o->threads, o->quick);
    free(reading.memory);
    return NIB_OK;
}

nib_status bench_gemm(const struct bench_gemm_options *options, struct bench_gemm_report *report)
{
    static const int64_t rows[] = { 1, 4, 16, 64, BENCH_GEMM_MOST_ROWS };
    struct gemm_bench b = { .options = options, .report = report };
    *report = (struct bench_gemm_report){ .n = 0 };
    nib_status status = measure_machine(&b);
    if (!status)
        status = prepare(&b);
    for (int all = 0; all < (options->threads > 1 ? 2 : 1); all++)
        for (int plain = 0; plain < 2; plain++)
            for (size_t i = 0; !status && i < sizeof rows / sizeof *rows; i++)
                status = measure(&b, plain, rows[i], all);
    clean(&b);
    return status;
}

/* ---- Bars ---- */

static const struct bench_gemm_result *find(const struct bench_gemm_report *r, bool plain, int64_t rows, bool all)
{
    const struct bench_gemm_result *found = NULL;
    for (int i = 0; i < r->n; i++)
        if (r->results[i].plain == plain && r->results[i].rows == rows && (r->results[i].threads > 1) == all)
            found = &r->results[i];
    return found;
}

static double flops(const struct bench_gemm_result *r) { return r ? r->flops / r->seconds : 0; }
static double bytes(const struct bench_gemm_result *r) { return r ? r->bytes / r->seconds : 0; }

/* What must hold, and what was shown to be reachable, by instruction set and maker: 512-bit units multiply bytes at two to
 * four times the rate of floats, and a maker's FMA peak says little about another's. AVX2 has no bar of the read bandwidth,
 * since there the processor is what one row waits for, and none of Intel's FMA peak. */
int bench_gemm_bars(const struct bench_gemm_report *r, bool intel, struct bench_gemm_bar bars[BENCH_GEMM_BARS])
{
    const struct bench_gemm_result *one = find(r, false, 1, false), *all = find(r, false, 1, true);
    const double many = flops(find(r, false, BENCH_GEMM_MOST_ROWS, false));
    const bool avx2 = strcmp(nib_isa(), "avx2") == 0;
    int n = 0;
    if (!avx2)
        bars[n++] =
            (struct bench_gemm_bar){ "W4A4, M = 1, one thread: of read bandwidth", bytes(one) / r->read[0], 0.75, 0.9 };
    if (all && !avx2)
        bars[n++] = (struct bench_gemm_bar){ "W4A4, M = 1, all threads: of read bandwidth", bytes(all) / r->read[1],
                                             0.6, 0.85 };
    bars[n++] =
        (struct bench_gemm_bar){ "W4A16, M = 1: of W4A4", bytes(find(r, true, 1, false)) / bytes(one), 0.75, 0.95 };
    if (r->fma > 0 && !(avx2 && intel))
        bars[n++] = (struct bench_gemm_bar){ "W4A4, M = 512, one thread: of the FP32 FMA peak", many / r->fma,
                                             avx2    ? 1.2
                                             : intel ? 1.0
                                                     : 2.0,
                                             avx2    ? 1.6
                                             : intel ? 2.0
                                                     : 2.8 };
    bars[n++] =
        (struct bench_gemm_bar){ "W4A4, M = 16: of M = 512", flops(find(r, false, 16, false)) / many, 0.5, 0.75 };
    return n;
}
