/* SPDX-License-Identifier: Apache-2.0 */
/*
 * formats.c - the table of docs/formats.md: what each format costs in bits and in accuracy.
 *
 * Every format quantizes the same 1024 x 1024 numbers of three distributions and is measured by the ratio of signal to
 * quantization noise. The numbers come from a generator and a seed of our own, so that the table can be made again.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdint.h>

#include "measure.h"

enum { ROWS = 1024, COLS = 1024, N = ROWS * COLS, SEED = 20261115 };

static float x[N], y[N];
static uint64_t state;

/* ---- Distributions ---- */

/* Uniform in (0, 1), by splitmix64. */
static double uniform(void)
{
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) * 0x1p-53;
}

static double normal(void) { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()); }

static double laplace(void)
{
    const double u = uniform() - 0.5;
    return u < 0 ? log1p(2 * u) : -log1p(-2 * u);
}

/* A normal number over the root of the mean of three squared ones. */
static double student_t3(void)
{
    const double z = normal(), a = normal(), b = normal(), c = normal();
    return z / sqrt((a * a + b * b + c * c) / 3);
}

static const struct distribution {
    const char *name;
    double (*draw)(void);
} distributions[] = { { "Gaussian", normal }, { "Laplace", laplace }, { "Student t, 3 d.o.f.", student_t3 } };

enum { DISTRIBUTIONS = sizeof distributions / sizeof *distributions };

/* ---- Formats ---- */

/* What is not named is 0: rtn, ceil, scales of any value. */
static const struct row {
    const char *name, *scale;
    nib_format format;
    nib_dtype element;
    int block[2];
    nib_scale_rule rule;
    nib_mx_rule mx;
    int pow2;
} rows[] = {
    { "NVFP4, rtn", "E4M3, FP32 amax", NIB_NVFP4, NIB_E2M1, { 1, 16 }, .rule = NIB_SCALE_RTN },
    { "NVFP4, rtn", "E4M3, FP32 amax", NIB_NVFP4, NIB_E2M1, { 16, 16 }, .rule = NIB_SCALE_RTN },
    { "NVFP4, four over six", "E4M3, FP32 amax", NIB_NVFP4, NIB_E2M1, { 1, 16 }, .rule = NIB_SCALE_4OVER6 },
    { "NVFP4, sweep", "E4M3, FP32 amax", NIB_NVFP4, NIB_E2M1, { 1, 16 }, .rule = NIB_SCALE_SWEEP },
    { "MXFP4, ceil", "E8M0", NIB_MXFP4, NIB_E2M1, { 1, 32 }, .mx = NIB_MX_CEIL },
    { "MXFP4, floor", "E8M0", NIB_MXFP4, NIB_E2M1, { 1, 32 }, .mx = NIB_MX_FLOOR },
    { "MXFP8 E4M3, ceil", "E8M0", NIB_MXFP8, NIB_E4M3, { 1, 32 }, .mx = NIB_MX_CEIL },
    { "MXFP8 E4M3, floor", "E8M0", NIB_MXFP8, NIB_E4M3, { 1, 32 }, .mx = NIB_MX_FLOOR },
    { "MXFP8 E4M3, ceil", "E8M0", NIB_MXFP8, NIB_E4M3, { 32, 32 }, .mx = NIB_MX_CEIL },
    { "MXFP8 E5M2, ceil", "E8M0", NIB_MXFP8, NIB_E5M2, { 1, 32 }, .mx = NIB_MX_CEIL },
    { "MXFP8 E5M2, floor", "E8M0", NIB_MXFP8, NIB_E5M2, { 1, 32 }, .mx = NIB_MX_FLOOR },
    { "Float8 E4M3", "FP32", NIB_FLOAT8, NIB_E4M3, { 0, 0 }, .pow2 = 0 },
    { "Float8 E5M2", "FP32", NIB_FLOAT8, NIB_E5M2, { 0, 0 }, .pow2 = 0 },
    { "Blockwise Float8 E4M3", "FP32", NIB_FLOAT8_BLOCK, NIB_E4M3, { 1, 128 }, .pow2 = 0 },
    { "Blockwise Float8 E4M3", "FP32, 2^n", NIB_FLOAT8_BLOCK, NIB_E4M3, { 1, 128 }, .pow2 = 1 },
    { "Blockwise Float8 E4M3", "FP32", NIB_FLOAT8_BLOCK, NIB_E4M3, { 128, 128 }, .pow2 = 0 },
    { "Blockwise Float8 E4M3", "FP32, 2^n", NIB_FLOAT8_BLOCK, NIB_E4M3, { 128, 128 }, .pow2 = 1 },
    { "Blockwise Float8 E5M2", "FP32", NIB_FLOAT8_BLOCK, NIB_E5M2, { 1, 128 }, .pow2 = 0 },
    { "Blockwise Float8 E5M2", "FP32", NIB_FLOAT8_BLOCK, NIB_E5M2, { 128, 128 }, .pow2 = 0 },
};

static nib_quantizer quantizer_of(const struct row *row)
{
    nib_quantizer q;
    require(nib_quantizer_init_format(&q, row->format));
    q.columnwise = 0;
    q.element = row->element;
    q.block_dims[0] = row->block[0];
    q.block_dims[1] = row->block[1];
    q.scale_rule = row->rule;
    q.error_mode = NIB_ERROR_MSE;
    q.e4m3_max = row->rule == NIB_SCALE_4OVER6 ? 256 : 448;
    q.pow2_scales = (uint8_t)row->pow2;
    q.mx_rule = row->mx;
    return q;
}

/* SQNR in dB, and the bits that an element takes with its share of scales. */
static double measure(const struct row *row, double *bits)
{
    const nib_quantizer q = quantizer_of(row);
    nib_array in, out;
    nib_tensor *t = NULL;
    require(nib_array_init(&in, x, NIB_F32, 2, (const int64_t[]){ ROWS, COLS }));
    require(nib_array_init(&out, y, NIB_F32, 2, (const int64_t[]){ ROWS, COLS }));
    require(nib_quantize(&q, &in, NULL, &t));
    require(nib_dequantize(t, NIB_ROWWISE, &out));
    size_t bytes = 0;
    for (int part = 0; part < NIB_PART_COUNT; part++)
        if (nib_tensor_buffer(t, (nib_part)part))
            bytes += nib_buffer_bytes(nib_tensor_buffer(t, (nib_part)part));
    nib_tensor_destroy(t);
    *bits = 8.0 * (double)bytes / N;
    double signal = 0, noise = 0;
    for (int i = 0; i < N; i++) {
        signal += (double)x[i] * x[i];
        noise += ((double)y[i] - x[i]) * ((double)y[i] - x[i]);
    }
    return 10 * log10(signal / noise);
}

int main(void)
{
    enum { COUNT = sizeof rows / sizeof *rows };
    double sqnr[COUNT][DISTRIBUTIONS], bits[COUNT];
    for (int d = 0; d < DISTRIBUTIONS; d++) {
        state = SEED;
        for (int i = 0; i < N; i++)
            x[i] = (float)distributions[d].draw();
        for (int r = 0; r < COUNT; r++)
            sqnr[r][d] = measure(&rows[r], &bits[r]);
    }
    printf("| format | block | scale | bits per element |");
    for (int d = 0; d < DISTRIBUTIONS; d++)
        printf(" %s |", distributions[d].name);
    printf("\n|---|---|---|---:|---:|---:|---:|\n");
    for (int r = 0; r < COUNT; r++) {
        printf("| %s | ", rows[r].name);
        if (rows[r].block[1])
            printf("%dx%d", rows[r].block[0], rows[r].block[1]);
        else
            printf("tensor");
        printf(" | %s | %.3f |", rows[r].scale, bits[r]);
        for (int d = 0; d < DISTRIBUTIONS; d++)
            printf(" %.2f |", sqnr[r][d]);
        printf("\n");
    }
    return 0;
}
