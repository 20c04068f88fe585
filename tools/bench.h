/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h - what the files of `nib bench` share: operations, plain memory loops, the machine, results, and the plot.
 */
#ifndef NIB_BENCH_H
#define NIB_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "nib.h"

/* ---- Operations (bench_operations.c) ---- */

struct bench_operation {
    const char *name;
    nib_format format;
    nib_dtype dtype;                                                         /* of the plain side */
    enum { BENCH_QUANTIZE, BENCH_WHOLE, BENCH_DEQUANTIZE, BENCH_AMAX } what; /* whole: the amax is looked for too */
    uint8_t rowwise, columnwise, rht, square, row_scaled, swizzled;
    nib_rounding rounding;
    nib_scale_rule rule;
    bool weighted; /* by the importance of columns */
    bool main;     /* also by shape, by size and by threads */
};

extern const struct bench_operation bench_operations[];
extern const int bench_operation_count;

/* A call of an operation, and its memory. It begins with the operation and zeros. */
struct bench_call {
    const struct bench_operation *operation;
    nib_quantizer q;
    nib_device *host; /* with its threads */
    nib_array plain;
    void *values; /* that it made itself */
    nib_tensor *tensor;
    nib_overrides overrides;
    float amax[2];
    float *importance;
};

/* Makes the memory, on values that are always the same, and runs it once. To be closed whatever comes of it. With `beside`,
 * a call of the same dtype and shape that stays open for longer, it uses the values of that one where they lie: of two
 * blocks of memory one may be a third slower than the other, for as long as the process lives. */
nib_status bench_call_open(struct bench_call *call, int64_t rows, int64_t cols, int threads,
                           const struct bench_call *beside);
nib_status bench_call_run(struct bench_call *call);
void bench_call_close(struct bench_call *call);

/* Memory that begins with a page. */
void *bench_allocate(int64_t bytes);

/* ---- Memory and the machine ---- */

/* Bytes that a loop reads and writes for each 256 elements; multiples of 8. */
enum { BENCH_CHUNK = 256 };

struct bench_traffic {
    int passes_before; /* how often the input is only read, before it is read and written from */
    int in, out;
    bool stream; /* write around the caches */
};

/* The least that can be done with this traffic: read everything, write something. */
void bench_floor(const struct bench_traffic *traffic, const void *in, void *out, int64_t chunks, int threads);

enum bench_stream { BENCH_READ, BENCH_WRITE, BENCH_STREAM_WRITE, BENCH_COPY, BENCH_STREAMS };
extern const char *const bench_stream_names[BENCH_STREAMS];

/* Once over so many bytes; a copy counts what it reads and what it writes. */
void bench_run_stream(enum bench_stream stream, const void *in, void *out, int64_t bytes, int threads);

double bench_now(void);

/* As the system calls its processor. */
void bench_machine_name(char *name, size_t bytes);

/* How many the process was given: more threads than these would only take turns. */
int bench_processors(void);

/* What one thread does is measured on one processor, where nothing moves it to a cold cache; more threads get all that the
 * process was given. Threads that start later inherit it, and so do children. */
void bench_bind(int threads);

/* Bytes that could be had without swapping, within the limit of a container too; INT64_MAX: nobody knows. */
int64_t bench_free_memory(void);

/* ---- Products (bench_gemm.c) ---- */

enum { BENCH_GEMM_MOST_ROWS = 512, BENCH_GEMM_RESULTS = 20, BENCH_GEMM_BARS = 5 };

struct bench_gemm_options {
    int64_t rows, cols; /* of the weight */
    int threads;        /* more than one: measured besides one */
    bool quick;
};

/* Activations in NVFP4 (W4A4), or plain (W4A16), by an NVFP4 weight. */
struct bench_gemm_result {
    bool plain;
    int64_t rows; /* M */
    int threads;
    double seconds, bytes, flops; /* of a call; bytes are the weight's */
};

struct bench_gemm_report {
    double fma;     /* FP32 operations per second of one thread; 0: not known */
    double read[2]; /* bytes per second, of one thread and of all */
    struct bench_gemm_result results[BENCH_GEMM_RESULTS];
    int n;
};

struct bench_gemm_bar {
    const char *what;
    double value, floor, goal;
};

nib_status bench_gemm(const struct bench_gemm_options *options, struct bench_gemm_report *report);
int bench_gemm_bars(const struct bench_gemm_report *report, bool intel, struct bench_gemm_bar bars[BENCH_GEMM_BARS]);

/* ---- Results ---- */

struct bench_result {
    const char *operation;
    const char *part;  /* "shape", "size" or "threads": which part of the report this is for */
    const char *model; /* where the shape comes from */
    int64_t rows, cols;
    int threads;
    double bytes;          /* read and written, as the floor does it */
    double median, spread; /* seconds of a call, and the distance of the quartiles as a share of it */
    double floor;          /* seconds of the loop that reads and writes the same bytes */
    double scalar;         /* how often faster than the scalar kernels; 0: not known */
};

static inline double bench_rate(const struct bench_result *r) { return (double)(r->rows * r->cols) / r->median * 1e-9; }

/* Throughput against size, and against threads. 0, or a code for output_reason. */
int bench_write_svg(const char *path, const struct bench_result *results, size_t n);

#endif
