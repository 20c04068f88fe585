/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kinds.h - the formats beside NVFP4: `kinds` has a row per format, element and block shape. What the parts of a
 * tensor mean is written down once more here (value_at), and everything is measured by it. The bytes themselves are for
 * check_formats.py.
 */
#ifndef NIB_TEST_KINDS_H
#define NIB_TEST_KINDS_H

#include <math.h>

#include "test_tensors.h"

/* ---- The formats ---- */

struct kind {
    const char *name;
    nib_format format;
    nib_dtype element;
    int rows, block; /* block_dims */
};

static const struct kind kinds[] = {
    { "float8 e4m3", NIB_FLOAT8, NIB_E4M3, 0, 0 },
    { "float8 e5m2", NIB_FLOAT8, NIB_E5M2, 0, 0 },
    { "mxfp8 e4m3 1x32", NIB_MXFP8, NIB_E4M3, 1, 32 },
    { "mxfp8 e5m2 1x32", NIB_MXFP8, NIB_E5M2, 1, 32 },
    { "mxfp8 e4m3 32x32", NIB_MXFP8, NIB_E4M3, 32, 32 },
    { "mxfp8 e5m2 32x32", NIB_MXFP8, NIB_E5M2, 32, 32 },
    { "float8_block e4m3 1x128", NIB_FLOAT8_BLOCK, NIB_E4M3, 1, 128 },
    { "float8_block e5m2 1x128", NIB_FLOAT8_BLOCK, NIB_E5M2, 1, 128 },
    { "float8_block e4m3 128x128", NIB_FLOAT8_BLOCK, NIB_E4M3, 128, 128 },
    { "float8_block e5m2 128x128", NIB_FLOAT8_BLOCK, NIB_E5M2, 128, 128 },
    { "mxfp4 1x32", NIB_MXFP4, NIB_E2M1, 1, 32 },
};

#define FOR_KINDS(k) for (const struct kind *k = kinds; k < kinds + sizeof kinds / sizeof *kinds; k++)

static inline bool is_mx(const struct kind *k) { return k->format == NIB_MXFP8 || k->format == NIB_MXFP4; }
static inline bool has_blocks(const struct kind *k) { return k->block != 0; }

/* Whether the columnwise usage follows from the rowwise one. */
static inline bool derives(const struct kind *k) { return k->rows != 1; }

static inline nib_quantizer quantizer(const struct kind *k)
{
    nib_quantizer q;
    CHECK_OK(nib_quantizer_init_format(&q, k->format));
    q.element = k->element;
    q.block_dims[0] = k->rows;
    q.block_dims[1] = k->block;
    return q;
}

/* A failure within a loop over kinds names the one. */
#define CHECK_KIND(k, condition) CHECK_THAT(condition, "%s: %s", (k)->name, #condition)

/* ---- Data ---- */

enum { MAX_ELEMENTS = 1 << 19 };

/* Not every test has a use for all of them. */
__attribute__((unused)) static float inputs[MAX_ELEMENTS], decoded[MAX_ELEMENTS], decoded_too[MAX_ELEMENTS];

/* A matrix of random numbers of mixed size in `numbers`. */
static inline nib_array matrix(int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows * cols; i++)
        inputs[i] = ldexpf(test_normal(), (int)test_below(12) - 6);
    return array_of(inputs, NIB_F32, 2, (const int64_t[]){ rows, cols });
}

/* ---- What the bytes mean ---- */

/* By exponent and mantissa, not by the library's tables. */
static inline float code_value(nib_dtype element, unsigned code)
{
    const int mantissa_bits = element == NIB_E4M3   ? 3
                              : element == NIB_E5M2 ? 2
                                                    : 1,
              bits = element == NIB_E2M1 ? 4 : 8,
              bias = element == NIB_E4M3   ? 7
                     : element == NIB_E5M2 ? 15
                                           : 1;
    const unsigned magnitude = code & ((1u << (bits - 1)) - 1), mantissa = magnitude & ((1u << mantissa_bits) - 1);
    const int exponent = (int)(magnitude >> mantissa_bits);
    float value = exponent ? ldexpf((float)(mantissa + (1u << mantissa_bits)), exponent - bias - mantissa_bits)
                           : ldexpf((float)mantissa, 1 - bias - mantissa_bits);
    if (element == NIB_E4M3 && magnitude == 0x7F)
        value = NAN;
    if (element == NIB_E5M2 && magnitude >= 0x7C)
        value = magnitude == 0x7C ? INFINITY : NAN;
    return code >> (bits - 1) & 1 ? -value : value;
}

/* One copy of a tensor: its codes, its scales (Float8: its tensor scale) and the size of the matrix. */
struct usage {
    const struct kind *k;
    nib_usage which;
    const uint8_t *codes;
    nib_array scales;
    int64_t rows, cols;
};

static inline struct usage usage_of(const struct kind *k, const nib_tensor *t, nib_usage which)
{
    const nib_metadata m = metadata_of(t);
    struct usage c = { .k = k, .which = which, .rows = m.rows, .cols = m.cols };
    c.codes = nib_buffer_data(nib_tensor_buffer(t, which == NIB_ROWWISE ? NIB_ROW_DATA : NIB_COL_DATA));
    CHECK_OK(nib_tensor_part(t,
                             !has_blocks(k)         ? NIB_ROW_TENSOR_SCALE
                             : which == NIB_ROWWISE ? NIB_ROW_SCALE
                                                    : NIB_COL_SCALE,
                             &c.scales));
    return c;
}

static inline unsigned code_at(const struct usage *c, int64_t row, int64_t col)
{
    const bool transposed = c->which == NIB_COLUMNWISE && c->k->format != NIB_MXFP8;
    const int64_t line = transposed ? col : row, i = transposed ? row : col, length = transposed ? c->rows : c->cols;
    if (c->k->element == NIB_E2M1)
        return c->codes[line * ((length + 1) / 2) + i / 2] >> 4 * (i % 2) & 15;
    return c->codes[line * length + i];
}

/* Where the scale of an element lies in the (row-major, padded) matrix of scales. */
static inline void scale_index(const struct kind *k, nib_usage usage, int64_t row, int64_t col, int64_t at[2])
{
    const int64_t line = usage == NIB_ROWWISE ? row : col, block = (usage == NIB_ROWWISE ? col : row) / k->block;
    at[0] = line, at[1] = block;
    if (k->format == NIB_MXFP8 && usage == NIB_COLUMNWISE)
        at[0] = block, at[1] = line;
    if (k->format == NIB_FLOAT8_BLOCK) {
        at[0] = k->rows == 1 ? block : line / 128;
        at[1] = k->rows == 1 ? line : block;
    }
}

static inline float scale_at(const struct usage *c, int64_t row, int64_t col)
{
    if (!has_blocks(c->k))
        return *(const float *)c->scales.data;
    int64_t at[2];
    scale_index(c->k, c->which, row, col, at);
    const int64_t i = at[0] * c->scales.shape[1] + at[1];
    if (c->k->format == NIB_FLOAT8_BLOCK)
        return ((const float *)c->scales.data)[i];
    const uint8_t e8m0 = ((const uint8_t *)c->scales.data)[i];
    return e8m0 == 255 ? NAN : ldexpf(1, e8m0 - 127);
}

static inline float value_at(const struct usage *c, int64_t row, int64_t col)
{
    return code_value(c->k->element, code_at(c, row, col)) * scale_at(c, row, col);
}

/* That every value of a copy is what its parts say. */
static inline void check_values(const struct kind *k, const nib_tensor *t, nib_usage usage)
{
    const struct usage c = usage_of(k, t, usage);
    dequantize(t, usage, NIB_F32, decoded);
    for (int64_t i = 0; i < c.rows * c.cols; i++) {
        const float expected = value_at(&c, i / c.cols, i % c.cols);
        if (memcmp(&expected, &decoded[i], sizeof expected)) {
            CHECK_THAT(false, "%s, copy %d: [%lld, %lld] is %a, not %a", k->name, (int)usage, (long long)(i / c.cols),
                       (long long)(i % c.cols), (double)decoded[i], (double)expected);
            return;
        }
    }
}

/* The last one has rows of scales without padding, of tiles too. */
static const int64_t shapes[][2] = { { 256, 384 }, { 64, 96 }, { 33, 45 },   { 1, 5 },     { 5, 1 },    { 1, 1 },
                                     { 7, 300 },   { 200, 7 }, { 129, 257 }, { 2100, 40 }, { 256, 512 } };

#define FOR_SHAPES(s) for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)

static inline float tensor_scale_of(const nib_tensor *t)
{
    return *(const float *)nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE));
}

#endif
