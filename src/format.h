/* SPDX-License-Identifier: Apache-2.0 */
/*
 * format.h - the table of formats, and the sizes that follow from a row of it.
 */
#ifndef NIB_FORMAT_H
#define NIB_FORMAT_H

#include "base.h"

struct nib_format_facts {
    const char *name;
    nib_dtype element; /* what a code is */
    nib_dtype scale;   /* what a block's scale is */
    int block;         /* elements that share a scale, along the quantised axis */
    bool square;       /* block x block tiles may share one scale instead */
    int scale_lines;   /* scale rows are padded to a multiple of this, */
    int scale_columns; /* and scale columns to a multiple of that */
    int min_rank;
};

extern const struct nib_format_facts nib_formats[NIB_FORMAT_COUNT];

/* The largest block of any format, for scratch memory. */
enum { NIB_MAX_BLOCK = 16 };

/* One copy of a tensor seen as lines of codes: rowwise, line r is row r; columnwise, line c is column c. */
struct nib_copy_geometry {
    int64_t lines, length;             /* lines, and elements in each */
    int64_t code_stride;               /* bytes of codes per line */
    int64_t blocks;                    /* scales per line */
    int64_t scale_lines, scale_stride; /* padded: rows of scales, and scales in each */
    int64_t levels;                    /* per-tensor numbers: 1, or one per line */
    int64_t code_bytes, scale_bytes, level_bytes;
};

struct nib_geometry {
    int64_t rows, cols; /* M, K */
    struct nib_copy_geometry copy[2];
};

/* Checks rank, dims and every product. */
nib_status nib_geometry_of(const nib_quantizer *q, int rank, const int64_t *shape, struct nib_geometry *out);

/* Byte of the scale of (line, block): row-major, or in 128 x 4 tiles of 512 bytes in which 32 rows interleave. */
static inline int64_t nib_scale_offset(int64_t line, int64_t block, int64_t stride, bool swizzled)
{
    if (!swizzled)
        return line * stride + block;
    return (line / 128 * (stride / 4) + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4;
}

#endif
