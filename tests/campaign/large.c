/* SPDX-License-Identifier: Apache-2.0 */
/*
 * large.c - a tensor of more than 2^31 elements, whose input is one row repeated by a stride of 0.
 *
 * Stochastic rounding makes every line different, so that a place computed in 32 bits shows: sampled lines are
 * compared with a small tensor of the same lines, quantized with the same amax at their origin. Prints the figures.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nib.h"

enum { ROWS = 70000, COLS = 32768, BAND = 32 };

#define MUST(call)                                                                      \
    do {                                                                                \
        if ((call) != NIB_OK) {                                                         \
            fprintf(stderr, "large.c:%d: %s: %s\n", __LINE__, #call, nib_last_error()); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Rows of the tensor: all are the same memory. */
static nib_array rows_of(float *row, int64_t rows, int64_t first_col, int64_t cols)
{
    return (nib_array){ .data = row,
                        .bytes = COLS * sizeof *row,
                        .offset = (size_t)first_col * sizeof *row,
                        .dtype = NIB_F32,
                        .rank = 2,
                        .shape = { rows, cols },
                        .strides = { 0, 1 } };
}

static const uint8_t *bytes_at(const nib_tensor *t, nib_part part)
{
    return nib_buffer_data(nib_tensor_buffer(t, part));
}

/* Codes and scales of BAND lines of the large tensor against all lines of the small one, from element `first` on. */
static void compare(const nib_tensor *large, const nib_tensor *small, nib_usage copy, int64_t line0, int64_t first,
                    int64_t count)
{
    const int64_t length = copy == NIB_ROWWISE ? COLS : ROWS;
    const int64_t scale_stride = (length + 63) / 64 * 4, small_stride = (count + 63) / 64 * 4;
    const uint8_t *codes = bytes_at(large, NIB_ROW_DATA + copy), *scales = bytes_at(large, NIB_ROW_SCALE + copy);
    const uint8_t *few = bytes_at(small, NIB_ROW_DATA + copy), *few_scales = bytes_at(small, NIB_ROW_SCALE + copy);
    for (int64_t line = 0; line < BAND; line++)
        if (memcmp(codes + (line0 + line) * (length / 2) + first / 2, few + line * (count / 2), (size_t)count / 2) !=
                0 ||
            memcmp(scales + (line0 + line) * scale_stride + first / 16, few_scales + line * small_stride,
                   (size_t)count / 16) != 0) {
            fprintf(stderr, "copy %d: line %lld differs from the small tensor's\n", (int)copy,
                    (long long)(line0 + line));
            exit(1);
        }
}

/* A band of whole lines, quantized alone. */
static void check_band(const nib_quantizer *q, float *row, const nib_tensor *large, nib_usage copy, int64_t line0)
{
    nib_quantizer part = *q;
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { (const void *)bytes_at(large, NIB_ROW_TENSOR_SCALE + copy) } };
    const bool rowwise = copy == NIB_ROWWISE;
    part.origin[rowwise ? 0 : 1] = line0;
    const nib_array x = rowwise ? rows_of(row, BAND, 0, COLS) : rows_of(row, ROWS, line0, BAND);
    nib_tensor *small = NULL;
    MUST(nib_quantize(&part, &x, &overrides, &small));
    compare(large, small, copy, line0, 0, rowwise ? COLS : ROWS);
    nib_tensor_destroy(small);
}

/* The last rows, dequantized, are near the row that they came from: within a step of its block. */
static void check_values(const float *row, const nib_tensor *large, nib_usage copy)
{
    const int64_t shape[2] = { 3, COLS };
    float *y = malloc(3 * COLS * sizeof *y);
    nib_array out;
    MUST(nib_array_init(&out, y, NIB_F32, 2, shape));
    MUST(nib_dequantize_rows(large, copy, ROWS - 3, 3, &out));
    for (int64_t i = 0; i < 3 * COLS; i++) {
        const float d = y[i] - row[i % COLS];
        if (!(d * d <= 9)) { /* |row| <= 8, so a step is at most 2 * 8/6 * 17/16 */
            fprintf(stderr, "copy %d: element %lld of the last rows is %g, not near %g\n", (int)copy, (long long)i,
                    y[i], row[i % COLS]);
            exit(1);
        }
    }
    free(y);
}

static void check_copy(float *row, nib_usage copy)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    MUST(nib_quantizer_set_usage(&q, copy == NIB_ROWWISE, copy == NIB_COLUMNWISE));
    q.rounding = NIB_ROUND_STOCHASTIC_8;
    q.seed = 11;
    const nib_array x = rows_of(row, ROWS, 0, COLS);
    nib_tensor *t = NULL;
    const double start = seconds();
    MUST(nib_quantize(&q, &x, NULL, &t));
    const double took = seconds() - start;
    const int64_t lines = copy == NIB_ROWWISE ? ROWS : COLS;
    const int64_t bands[] = { 0, 65520, 65536, 32752, 16384, lines / 2 / 16 * 16, lines - BAND };
    int checked = 0;
    for (size_t i = 0; i < sizeof bands / sizeof *bands; i++)
        if (bands[i] + BAND <= lines) {
            check_band(&q, row, t, copy, bands[i]);
            checked += BAND;
        }
    check_values(row, t, copy);
    printf("%s: %lld elements, %zu bytes of codes, %.1f s (%.0f million elements/s, %s), %d lines compared\n",
           copy == NIB_ROWWISE ? "rowwise" : "columnwise", (long long)ROWS * COLS,
           nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_DATA + copy)), took, 1e-6 * ROWS * COLS / took, nib_isa(),
           checked);
    nib_tensor_destroy(t);
}

int main(void)
{
    float *row = malloc(COLS * sizeof *row);
    uint32_t state = 1;
    for (int i = 0; i < COLS; i++) {
        state = state * 1664525u + 1013904223u;
        row[i] = (float)(int32_t)state * 0x1p-28f; /* -8 .. 8 */
    }
    check_copy(row, NIB_ROWWISE);
    check_copy(row, NIB_COLUMNWISE);
    free(row);
    return 0;
}
