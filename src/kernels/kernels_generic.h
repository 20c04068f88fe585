/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_generic.h - reading a panel element by element, and the kernels for every format that a row of the table
 * describes.
 */
#ifndef NIB_KERNELS_GENERIC_H
#define NIB_KERNELS_GENERIC_H

#include "format/codec.h"
#include "kernels/kernels.h"

static inline float nib_panel_element(const struct nib_panel *panel, int64_t row, int64_t col)
{
    const int64_t i = row * panel->stride + col;
    if (panel->dtype == NIB_F32)
        return ((const float *)panel->x)[i];
    const uint16_t code = ((const uint16_t *)panel->x)[i];
    return panel->dtype == NIB_BF16 ? nib_f32_from_bf16(code) : nib_f32_from_f16(code);
}

static inline int64_t nib_panel_lines(const struct nib_panel *panel, nib_usage usage)
{
    return usage == NIB_ROWWISE ? panel->rows : panel->cols;
}

static inline int64_t nib_panel_length(const struct nib_panel *panel, nib_usage usage)
{
    return usage == NIB_ROWWISE ? panel->cols : panel->rows;
}

/* One number in the dtype of an output. Results have one NaN, whatever the processor makes of 0 times an infinite
 * factor. */
static inline void nib_store_number(void *out, nib_dtype dtype, float number)
{
    const float y = nib_quiet(number);
    const uint16_t half = dtype == NIB_BF16 ? nib_bf16_from_f32(y) : nib_f16_from_f32(y);
    memcpy(out, dtype == NIB_F32 ? (const void *)&y : (const void *)&half, dtype == NIB_F32 ? 4 : 2);
}

nib_quantize_fn nib_quantize_generic;
nib_decode_fn nib_decode_generic;
nib_transpose_fn nib_transpose_nibbles, nib_transpose_bytes, nib_transpose_halves, nib_transpose_words;

#endif
