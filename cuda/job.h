/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.h - what kernels are told: plain data that device.c fills in, launch.cu passes on and kernels read.
 */
#ifndef NIB_CUDA_JOB_H
#define NIB_CUDA_JOB_H

#include "format/format.h"
#include "kernels/product.h"

/* n / d for n < 2^32 by a product: what a device would need twenty instructions for. */
struct nib_cuda_divider {
    uint32_t multiplier, shift, divisor; /* of device.c's divider_of */
};

/* One usage of a tensor of NVFP4. */
struct nib_cuda_usage {
    uint8_t *codes, *scales;
    float *tensor_scales; /* of the tensor */
    const float *source;  /* where they are read: there, or the caller's, which are copied on the way */
    struct nib_usage_geometry g;
    uint32_t origin_line, origin_block; /* of the usage in the whole, for the random stream */
    bool rht;
    bool wide;   /* codes can be read and written eight bytes at a time */
    bool words;  /* scales can be written four at a time */
    bool words8; /* or even eight */
};

/* Values to codes of one usage or both, or to what the codes of one stand for. */
struct nib_cuda_quantization {
    const void *x; /* rows of a matrix, row_stride elements apart, whose elements are side by side */
    int64_t rows, cols, row_stride;
    nib_dtype dtype;
    bool aligned;   /* every row begins at a multiple of 16 bytes */
    bool square;    /* 16x16 blocks */
    bool one_scale; /* both usages have the same tensor scale */
    bool per_line;
    bool reverse; /* begin at the end, which the pass before has left in the cache */
    bool wanted[2];
    bool fast_error;
    uint8_t floor_code;
    struct nib_rules rules;
    nib_scale_rule scale_rule;
    nib_error_mode error_mode;
    nib_rounding rounding;
    uint16_t sign_mask;
    float signs[NIB_BLOCK]; /* of the RHT, with the quarter where that comes first */
    uint32_t keys[20];      /* of Philox's rounds */
    uint64_t seed, offset;
    const uint64_t *offset_at; /* overrides it; may be NULL */
    const float *noop;         /* may be NULL */
    const float *importance;   /* of columns, for the sweep of rows; may be NULL */
    struct nib_cuda_usage usage[2];
    void *out; /* fake quantization: rows like those of x, instead of codes */
    int64_t out_stride;
    bool out_aligned;
    /* What a launch has its part of. */
    int64_t first_line, line_count; /* rows: lines of the padded scales */
    struct nib_cuda_divider by_line;
};

/* The amaxes of a matrix: of the values as they are, and of a transformed usage. */
struct nib_cuda_amax {
    const void *x;
    int64_t rows, cols, row_stride;
    nib_dtype dtype;
    bool aligned;
    bool aligned_start; /* the first row does */
    nib_usage usage;    /* that the lines are of, where lines matter */
    bool rht, per_line;
    bool wanted[2]; /* by usage: [0] as they are, [1] transformed columns */
    float signs[NIB_BLOCK];
    struct nib_rules rules;
    bool unbiased;
    const float *noop;
    float *to[2][2];   /* where the tensor scale of each goes; may be NULL */
    float *lines;      /* per_line: raised by every block, zero before */
    float *seen[2];    /* raised to the amax; may be NULL */
    bool raw;          /* amaxes, not tensor scales */
    uint32_t *tickets; /* ticket and maximum for each: zero before, and after */
    struct nib_cuda_divider by_line;
};

/* Tensor scales from amaxes that are there: one, or one per line. With `seen` a single thread does all of it. */
struct nib_cuda_finish {
    const float *from;
    float *to; /* NULL: only what is seen */
    int64_t n;
    struct nib_rules rules;
    bool unbiased;
    float *seen;
    const float *noop;
};

struct nib_cuda_dequantization {
    struct nib_cuda_usage usage;
    nib_usage from;
    struct nib_rules rules;
    bool per_line;
    uint16_t sign_mask;
    int64_t first, rows, cols; /* of the matrix */
    nib_dtype dtype;
    void *out;
    int64_t out_stride;
    bool out_aligned;
    int64_t first_item, item_count;
    struct nib_cuda_divider by_line;
};

/* An array of any strides, and the same without gaps. */
struct nib_cuda_gather {
    void *strided, *plain;
    int64_t shape[NIB_MAX_RANK], strides[NIB_MAX_RANK];
    int rank, bytes;
    bool scatter;
};

/* Where products go, and what their sums are multiplied with: tensor scales never come to the host. */
struct nib_cuda_side_scale {
    const float *values; /* NULL: none */
    bool per_line;
    struct nib_rules rules;
};
struct nib_cuda_scaled_output {
    struct nib_product_output out;
    struct nib_cuda_side_scale side[2];
};

/* At most 16 rows of plain values by lines of codes, 32 of 16 bits where they are whole. */
struct nib_cuda_few_rows {
    struct nib_cuda_usage weight;
    const void *x;
    nib_dtype dtype;
    int64_t rows, row_stride, element_stride;
    bool whole;      /* what few_rows calls WHOLE */
    bool many_lines; /* enough for all processors, four thread blocks of 16 each */
    struct nib_cuda_scaled_output to;
};

/* Words that a library's product reads. */
struct nib_cuda_factors {
    float one, zero, alpha, beta;
};
struct nib_cuda_product_factors {
    struct nib_cuda_scaled_output of;
    struct nib_cuda_factors *to;
};

/* Sums, rows of them side by side, or NULL: zeros. */
struct nib_cuda_product_output {
    const float *sums;
    int64_t columns;
    struct nib_cuda_scaled_output to;
};

/* Two usages, or the scales of one, and what is asked about them: see layout.cuh. */
struct nib_cuda_layout {
    struct nib_usage_geometry from, to;
    struct nib_usage_memory source, target;
    int64_t line, first, block;
    uint32_t *differs;
};

/* Bytes in sixteens, from a multiple of 16 on. */
struct nib_cuda_copy {
    void *to;
    const void *from;
    int64_t quads;
};

struct nib_cuda_bytes {
    const uint8_t *a, *b;
    uint32_t *differs;
};

struct nib_cuda_fill {
    float *values;
    float value;
};

#endif
