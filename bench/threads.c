/* SPDX-License-Identifier: Apache-2.0 */
/*
 * threads.c - from which size on several threads pay: threads [PAUSE IN MICROSECONDS].
 *
 * Tensors from a few thousand elements up are quantized and decoded by one thread and by 2, 4, ... as many as OpenMP
 * has, in turn, and the faster calls are compared. For each number of threads the smallest size is printed from which on it is
 * always at least a tenth faster than one. With a pause between calls the workers have gone to sleep and must be woken;
 * without, they are still waiting for work.
 *
 * The library does not start threads below its own limit: bench/threads.sh builds it without one.
 */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>

#include "measure.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }
#endif

enum { COLUMNS = 512, LEAST_ROWS = 16, SIZES = 9, RUNS = 100, MOST_COUNTS = 8 };

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- What is timed ---- */

enum { QUANTIZE, QUANTIZE_BF16, BOTH_RHT, STOCHASTIC, SWEEP, MXFP8, DECODE, OPERATIONS };

static const char *const names[OPERATIONS] = { "quantize rows, F32",   "quantize rows, BF16", "both usages, RHT, F32",
                                               "stochastic rows, F32", "sweep, BF16",         "MXFP8 rows, BF16",
                                               "dequantize, F32" };

static nib_quantizer options_of(int operation)
{
    nib_quantizer q;
    require(operation == MXFP8 ? nib_quantizer_init_format(&q, NIB_MXFP8) : (nib_quantizer_init(&q), NIB_OK));
    q.columnwise = q.rht = operation == BOTH_RHT;
    q.rounding = operation == STOCHASTIC ? NIB_ROUND_STOCHASTIC_8 : NIB_ROUND_NEAREST;
    q.scale_rule = operation == SWEEP ? NIB_SCALE_SWEEP : NIB_SCALE_RTN;
    return q;
}

static long pause_between; /* microseconds */

/* Microseconds of one call, of which a tenth are faster, of calls that take turns over `counts`. A thread that another
 * program keeps from its core costs its team milliseconds: the slower half would tell of that program. */
static void time_all(int operation, int64_t rows, const int *counts, int n, void *x, double *out)
{
    static double times[MOST_COUNTS][RUNS];
    static float amax = 4;
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, &amax } };
    const int64_t shape[2] = { rows, COLUMNS };
    const nib_dtype dtype = operation == QUANTIZE_BF16 || operation == SWEEP || operation == MXFP8 ? NIB_BF16 : NIB_F32;
    nib_array array;
    nib_tensor *t = NULL;
    nib_quantizer q = options_of(operation);
    require(nib_array_init(&array, x, dtype, 2, shape));
    require(nib_quantize(&q, &array, NULL, &t));
    nib_device *hosts[MOST_COUNTS];
    for (int i = 0; i < n; i++)
        require(nib_host_create(counts[i], &hosts[i]));
    for (int run = -2; run < RUNS; run++)
        for (int i = 0; i < n; i++) {
            array.device = hosts[i];
            if (pause_between)
                (void)nanosleep(&(struct timespec){ .tv_nsec = 1000 * pause_between }, NULL);
            const double start = now();
            require(operation == DECODE
                        ? nib_dequantize(t, NIB_ROWWISE, &array)
                        : nib_quantize_into(NULL, &array, operation == MXFP8 ? NULL : &overrides, NULL, t));
            if (run >= 0)
                times[i][run] = (now() - start) * 1e6;
        }
    for (int i = 0; i < n; i++) {
        nib_device_release(hosts[i]);
        qsort(times[i], RUNS, sizeof **times, by_value);
        out[i] = times[i][RUNS / 10];
    }
    nib_tensor_destroy(t);
}

int main(int argc, char **argv)
{
    pause_between = argc > 1 ? atol(argv[1]) % 1000000 : 0;
    int counts[MOST_COUNTS] = { 1 }, n = 1;
    for (int threads = 2; threads <= omp_get_max_threads() && n < MOST_COUNTS; threads *= 2)
        counts[n++] = threads;
    const size_t most = (size_t)COLUMNS * LEAST_ROWS << (SIZES - 1);
    float *x = malloc(most * sizeof *x);
    if (!x)
        return 1;
    printf("%s, pause %ld us; elements: microseconds of 1 thread (ratio of 2, 4, ... to it)\n", nib_isa(),
           pause_between);
    for (int operation = 0; operation < OPERATIONS; operation++) {
        int64_t from[MOST_COUNTS] = { 0 };
        printf("%s\n", names[operation]);
        for (int size = 0; size < SIZES; size++) {
            const int64_t rows = (int64_t)LEAST_ROWS << size, elements = rows * COLUMNS;
            double us[MOST_COUNTS];
            for (size_t i = 0; i < most; i++) /* a decode writes here */
                x[i] = (float)((i * 2654435761u >> 8 & 0xFFFF) / 16384.0 - 2);
            time_all(operation, rows, counts, n, x, us);
            printf("%9lld: %9.1f", (long long)elements, us[0]);
            for (int i = 1; i < n; i++) {
                printf("  %5.2f", us[0] / us[i]);
                if (us[0] < 1.1 * us[i])
                    from[i] = 0;
                else if (!from[i])
                    from[i] = elements;
            }
            printf("\n");
        }
        for (int i = 1; i < n; i++)
            if (from[i])
                printf("  %d threads from %lld elements on, %lld each\n", counts[i], (long long)from[i],
                       (long long)from[i] / counts[i]);
            else
                printf("  %d threads never\n", counts[i]);
    }
    free(x);
    return 0;
}
