/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_generic.h - reading a panel element by element, and the kernels for every format that a row of the table
 * describes.
 */
#ifndef NIB_KERNELS_GENERIC_H
#define NIB_KERNELS_GENERIC_H

#include "kernels/kernels.h"

static inline float nib_panel_element(const struct nib_panel *panel, int64_t row, int64_t col)
{
    return nib_load_value(panel->x, row * panel->stride + col, panel->dtype);
}

static inline int64_t nib_panel_lines(const struct nib_panel *panel, nib_usage usage)
{
    return usage == NIB_ROWWISE ? panel->rows : panel->cols;
}

static inline int64_t nib_panel_length(const struct nib_panel *panel, nib_usage usage)
{
    return usage == NIB_ROWWISE ? panel->cols : panel->rows;
}

nib_quantize_fn nib_quantize_generic;
nib_decode_fn nib_decode_generic;
nib_transpose_fn nib_transpose_nibbles, nib_transpose_bytes, nib_transpose_halves, nib_transpose_words;

#endif
