/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h - what the files of `nib bench` share: plain memory loops, the machine, results, and the plot.
 */
#ifndef NIB_BENCH_H
#define NIB_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

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

/* Throughput against size, and against threads. False if the file could not be written. */
bool bench_write_svg(const char *path, const struct bench_result *results, size_t n);

#endif
