/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_codes.h - a usage of an NVFP4 tensor by line and element, as the layout has it: codes, scales, tensor scales,
 * and what they are worth.
 */
#ifndef NIB_TEST_CODES_H
#define NIB_TEST_CODES_H

#include <math.h>

#include "test_tensors.h"

#define U 0x1p-24 /* unit roundoff of FP32: one rounding is a factor within 1 +- U */

static float e2m1[16], e4m3[256];

static inline void fill_tables(void)
{
    uint8_t codes[256];
    for (int i = 0; i < 256; i++)
        codes[i] = (uint8_t)i;
    nib_e2m1_values(e2m1);
    CHECK_OK(nib_decode(NIB_E4M3, codes, 256, e4m3));
}

static inline uint8_t e4m3_code(float x)
{
    uint8_t code = 0;
    CHECK_OK(nib_encode(NIB_E4M3, &x, 1, &code));
    return code;
}

struct usage {
    nib_usage which;
    int64_t lines, length, code_stride, scale_stride;
    const uint8_t *codes, *scales;
    const float *tensor_scales;
    bool per_line;
};

static inline struct usage usage_of(const nib_tensor *t, nib_usage which)
{
    const nib_metadata facts = metadata_of(t);
    const bool rowwise = which == NIB_ROWWISE;
    nib_array scales = { 0 };
    CHECK_OK(nib_tensor_part(t, rowwise ? NIB_ROW_SCALE : NIB_COL_SCALE, &scales));
    struct usage usage = { .which = which,
                           .lines = rowwise ? facts.rows : facts.cols,
                           .length = rowwise ? facts.cols : facts.rows,
                           .scale_stride = scales.shape[1],
                           .codes = bytes_of(t, rowwise ? NIB_ROW_DATA : NIB_COL_DATA),
                           .scales = bytes_of(t, rowwise ? NIB_ROW_SCALE : NIB_COL_SCALE),
                           .tensor_scales =
                               (const void *)bytes_of(t, rowwise ? NIB_ROW_TENSOR_SCALE : NIB_COL_TENSOR_SCALE),
                           .per_line = facts.quantizer->row_scaled };
    usage.code_stride = (usage.length + 1) / 2;
    return usage;
}

static inline int code_at(const struct usage *c, int64_t line, int64_t i)
{
    return c->codes[line * c->code_stride + i / 2] >> 4 * (i % 2) & 15;
}

static inline uint8_t scale_at(const struct usage *c, int64_t line, int64_t block)
{
    return c->scales[line * c->scale_stride + block];
}

static inline float tensor_scale_at(const struct usage *c, int64_t line)
{
    return c->tensor_scales[c->per_line ? line : 0];
}

/* Half the distance between the E2M1 values on both sides of y. Past 6 there is one side only; y stays below 7 because
 * a scale is at most 1/17 too small. */
static inline double half_step(double y) { return fabs(y) < 2 ? 0.25 : fabs(y) < 4 ? 0.5 : 1; }

/* By search, not by the library: the nearest magnitude, of two equally near ones the even code. Past 6 it is 6. */
static inline int nearest_code(double y)
{
    int best = 0;
    for (int code = 1; code < 8; code++) {
        const double d = fabs(e2m1[code] - fabs(y)), least = fabs(e2m1[best] - fabs(y));
        if (d < least || (d == least && code % 2 == 0))
            best = code;
    }
    return best | (signbit(y) ? 8 : 0);
}

#endif
