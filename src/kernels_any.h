/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_any.h - reading a panel element by element, and the kernels for every format that a row of the table describes.
 */
#ifndef NIB_KERNELS_ANY_H
#define NIB_KERNELS_ANY_H

#include "codec.h"
#include "kernels.h"

static inline float nib_panel_element(const struct nib_panel *panel, int64_t row, int64_t col)
{
    const int64_t i = row * panel->stride + col;
    if (panel->dtype == NIB_F32)
        return ((const float *)panel->x)[i];
    const uint16_t code = ((const uint16_t *)panel->x)[i];
    return panel->dtype == NIB_BF16 ? nib_f32_from_bf16(code) : nib_f32_from_f16(code);
}

static inline int64_t nib_panel_lines(const struct nib_panel *panel, nib_copy copy)
{
    return copy == NIB_ROWWISE ? panel->rows : panel->cols;
}

static inline int64_t nib_panel_length(const struct nib_panel *panel, nib_copy copy)
{
    return copy == NIB_ROWWISE ? panel->cols : panel->rows;
}

nib_quantize_fn nib_quantize_any;
nib_decode_fn nib_decode_any;
nib_block_scale_fn nib_block_scale_any;
nib_encode_fn nib_encode_any;

#endif
