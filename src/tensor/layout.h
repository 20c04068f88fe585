/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.h - codes and scales from one place in memory to another.
 */
#ifndef NIB_LAYOUT_H
#define NIB_LAYOUT_H

#include "tensor/quantize.h"

/* The transpose of a matrix of codes, packed or a byte each. Strides are bytes from line to line. */
void nib_transpose_codes(const nib_quantizer *q, bool packed, const uint8_t *in, int64_t in_stride, int64_t rows,
                         int64_t cols, uint8_t *out, int64_t out_stride);

/* The scales of a copy, a byte each, from the layout `plain` (by line or by block) to tiles, whose padding becomes 0;
 * and back, where nothing but the scales is written. */
void nib_swizzle(const nib_quantizer *q, const struct nib_usage_geometry *plain, const uint8_t *from, uint8_t *tiles);
void nib_unswizzle(const nib_quantizer *q, const struct nib_usage_geometry *plain, const uint8_t *tiles, uint8_t *to);

#endif
