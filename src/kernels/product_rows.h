/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_rows.h - how rows are packed for panels, and what the kernels of instruction sets share.
 */
#ifndef NIB_PRODUCT_ROWS_H
#define NIB_PRODUCT_ROWS_H

#include "kernels/kernels.h"

/* Rows that are packed side by side; what weights are stored too large by where a product of bytes wants them unsigned. */
enum { NIB_GROUP_ROWS = 8, NIB_WEIGHT_BIAS = 12 };

/* Bytes of a block of eight rows. */
static inline int64_t nib_row_record(int planes, int block) { return planes * NIB_GROUP_ROWS * block + 64; }

/* Of 15 bits: value - 256 * high is a signed byte too. */
static inline int nib_high_byte(int32_t value) { return (value + 128) >> 8; }

/* A block of plain values in fixed point, missing ones 0, and its factor. */
void nib_fixed_block(const struct nib_side *side, int64_t line, int64_t first, int32_t q[NIB_BLOCK], float *factor);

/* A block of NVFP4 codes as twice their values, and a quarter of its scale. */
void nib_code_block(const struct nib_side *side, int64_t line, int64_t first, int32_t q[NIB_BLOCK], float *factor);

/* By the kind of product. */
nib_pack_rows_fn nib_pack_block_rows, nib_pack_fixed_rows, nib_pack_value_rows;

/* Where the scale of (line, block) is, of a format with one for each: nib_scale_index without its division. */
static inline const uint8_t *nib_side_scales(const struct nib_side *side, int64_t line, int64_t block)
{
    const struct nib_usage_geometry *g = side->geometry;
    const uint8_t *const scales = side->memory.scales;
    return scales + (g->swizzled ? nib_scale_index(g, line, block) : line * g->scale_line + block);
}

/* The scales of four blocks of a line, of which `block` is a multiple, as bytes; anything where there is no block. Lines of
 * scales are padded to whole words. */
static inline uint32_t nib_four_scales(const struct nib_side *side, int64_t line, int64_t block)
{
    uint32_t word;
    memcpy(&word, nib_side_scales(side, line, block), sizeof word);
    return word;
}

#endif
