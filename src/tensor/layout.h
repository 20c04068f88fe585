/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.h - codes and scales from one place in host memory to another.
 */
#ifndef NIB_LAYOUT_H
#define NIB_LAYOUT_H

#include "base/threads.h"
#include "format/format.h"

/* The transpose of a matrix of codes, packed or a byte each. Strides are bytes from line to line. */
void nib_transpose_codes(const nib_device *host, bool packed, const uint8_t *in, int64_t in_stride, int64_t rows,
                         int64_t cols, uint8_t *out, int64_t out_stride);

/* The scales of a usage, a byte each, from the layout `plain` (by line or by block) to tiles, whose padding becomes 0;
 * and back, where nothing but the scales is written. */
void nib_swizzle(const nib_device *host, const struct nib_usage_geometry *plain, const uint8_t *from, uint8_t *tiles);
void nib_unswizzle(const nib_device *host, const struct nib_usage_geometry *plain, const uint8_t *tiles, uint8_t *to);

/* Scales that stand for no block become 0, whatever the buffer held. Swizzled: all scales become 0. */
void nib_zero_scale_padding(const struct nib_usage_geometry *g, void *scales);

/* The columnwise usage of square blocks, or of none, from the rowwise one. */
void nib_build_columnwise(const nib_device *host, const nib_quantizer *q, const struct nib_geometry *geometry,
                          const struct nib_usage_memory *rowwise, const struct nib_usage_memory *columnwise);

/* A rectangle of one usage: lines from `line`, elements from `first` (a block's first), as many as the target has. */
void nib_copy_rectangle(const nib_quantizer *q, const struct nib_usage_geometry *from,
                        const struct nib_usage_memory *source, int64_t line, int64_t first,
                        const struct nib_usage_geometry *to, const struct nib_usage_memory *target);

/* All scales, in the order of their lines, into lines of another length or padding. */
void nib_repack_scales(const struct nib_usage_geometry *from, const void *source, const struct nib_usage_geometry *to,
                       void *target);

/* Same codes, scales and tensor scales; padding of scales is ignored. */
bool nib_usages_equal(const struct nib_usage_geometry *g, const struct nib_usage_memory *a,
                      const struct nib_usage_memory *b);

#endif
