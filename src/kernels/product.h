/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product.h - products of lines of codes: what they consist of, the formulas of docs/numerics.md 14, and the slots of
 * instruction sets.
 *
 * Every kind of product adds one term per block (or per value) to one FP32 accumulator per output, in the order of k. A
 * term's sum of codes is an integer and exact, whatever the order within the block; so an instruction set is free in how
 * it computes them, as long as the lanes of its vectors are outputs.
 */
#ifndef NIB_PRODUCT_H
#define NIB_PRODUCT_H

#include "format/format.h"

enum nib_product_kind {
    NIB_PRODUCT_NVFP4 = 0, /* two NVFP4 usages: blocks of 16, E4M3 scales */
    NIB_PRODUCT_MXFP4,     /* two MXFP4 usages: blocks of 32, E8M0 scales */
    NIB_PRODUCT_FIXED,     /* an NVFP4 usage by plain values in block fixed point */
    NIB_PRODUCT_VALUES,    /* any other pair, as decoded values */
    NIB_PRODUCT_KINDS
};

/* Lines that are multiplied: a usage of a tensor (q set), or rows of plain values. */
struct nib_side {
    int64_t lines, length;
    const nib_quantizer *q;
    nib_usage usage;
    const struct nib_usage_geometry *geometry;
    struct nib_usage_memory memory;
    struct nib_rules rules;
    const void *values; /* plain: the first element of line `origin` */
    nib_dtype dtype;
    int64_t origin;
    int64_t line_stride, element_stride; /* plain: in elements */
};

/* Where products go: y = ((alpha * c) * acc + bias) + beta * y. Strides are in elements. */
struct nib_product_output {
    void *y; /* element (0, 0) */
    nib_dtype dtype;
    int64_t row_stride, col_stride;
    float alpha, beta;
    const void *bias; /* NULL: none */
    nib_dtype bias_dtype;
    int64_t bias_row, bias_col; /* from row to row of y, and from column to column: one of them is 0 */
};

struct nib_product {
    enum nib_product_kind kind;
    struct nib_side a, b; /* rows and columns of y; kind FIXED: a is the plain one */
    struct nib_product_output out;
};

/* ---- Formulas ---- */

/* Elements that share a term. */
static inline int64_t nib_product_block(enum nib_product_kind kind) { return kind == NIB_PRODUCT_MXFP4 ? 32 : 16; }

/* The exponent of a block of plain values: the smallest e, -100 or more, with amax < 2^e. amax is finite. */
static inline int nib_fixed_exponent(float amax)
{
    const int e = (int)(nib_bits(amax) >> 23) - 126;
    return e < -100 ? -100 : e;
}

static inline float nib_pow2(int exponent) { return nib_float((uint32_t)(exponent + 127) << 23); }

/* A value in units of 2^(e - 14), to nearest even: at most 2^14 in magnitude. Adding and taking away 1.5 * 2^23 rounds. */
static inline int32_t nib_fixed_value(float x, int e)
{
    return (int32_t)((x * nib_pow2(14 - e) + 0x1.8p23f) - 0x1.8p23f);
}

/* What a block's dot product (of doubled codes and fixed values) and its scale are multiplied with; NaN for a block that
 * has a NaN or an infinity. */
static inline float nib_fixed_factor(int e, bool finite) { return finite ? nib_pow2(e - 15) : nib_float(0x7FC00000u); }

/* ---- What both sides' tensor scales come to ---- */

/* Two amaxes: their product, and one division. Otherwise the product of two multipliers, of which a side without a tensor
 * scale (NULL) has none. */
NIB_INLINE float nib_joint_scale(const float *a, const struct nib_rules *rules_a, const float *b,
                                 const struct nib_rules *rules_b)
{
    if (a && b && rules_a->tensor_scale == NIB_TENSOR_SCALE_AMAX && rules_b->tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return *a * *b / (rules_a->full_scale * rules_b->full_scale);
    if (a && b)
        return nib_scale_inv(*a, rules_a) * nib_scale_inv(*b, rules_b);
    return a ? nib_scale_inv(*a, rules_a) : b ? nib_scale_inv(*b, rules_b) : 1;
}

/* A line's tensor scale; NULL where products have no use for one. */
static inline const float *nib_side_tensor_scale(const struct nib_side *side, int64_t line)
{
    const bool has = side->q && side->memory.tensor_scales;
    return has ? &side->memory.tensor_scales[side->q->row_scaled ? line : 0] : NULL;
}

static inline float nib_product_scale(const struct nib_product *p, int64_t i, int64_t j)
{
    if (p->kind == NIB_PRODUCT_VALUES)
        return 1;
    return nib_joint_scale(nib_side_tensor_scale(&p->a, i), &p->a.rules, nib_side_tensor_scale(&p->b, j), &p->b.rules);
}

static inline bool nib_side_is_row_scaled(const struct nib_side *side)
{
    return side->q && side->memory.tensor_scales && side->q->row_scaled;
}

/* ---- Outputs ---- */

NIB_INLINE void *nib_output_at(const struct nib_product_output *out, int64_t i, int64_t j)
{
    return (char *)out->y + (i * out->row_stride + j * out->col_stride) * (out->dtype == NIB_F32 ? 4 : 2);
}

NIB_INLINE float nib_output_bias(const struct nib_product_output *out, int64_t i, int64_t j)
{
    return nib_load_value(out->bias, i * out->bias_row + j * out->bias_col, out->bias_dtype);
}

/* One output from its accumulator; scale is nib_product_scale of it. */
NIB_INLINE void nib_output_store(const struct nib_product_output *out, int64_t i, int64_t j, float scale, float acc)
{
    void *const y = nib_output_at(out, i, j);
    float value = (out->alpha * scale) * acc;
    if (out->bias)
        value = value + nib_output_bias(out, i, j);
    if (out->beta != 0)
        value = value + out->beta * nib_load_value(y, 0, out->dtype);
    nib_store_value(y, out->dtype, value);
}

/* One output as it is defined: the reference (scalar/product_scalar.c). Sides of kind VALUES are plain. */
float nib_product_accumulate(const struct nib_product *p, int64_t i, int64_t j);

/* ---- Kernels ---- */

/* The most columns of a panel, and what rows are packed in multiples of, for every instruction set. */
enum { NIB_PANEL_COLUMNS = 32, NIB_PACKED_ROWS = 32 };

/* Columns that are packed for tiles at a time, so that rows which come from far away serve many, and how much of k: what the
 * second-level cache holds beside the rows. */
enum { NIB_TILES_COLUMNS = 64, NIB_TILES_K = 4096 };

/* Slots: the kinds of product, and what is faster where its conditions hold. */
enum {
    NIB_PRODUCT_ROW_NVFP4 = NIB_PRODUCT_KINDS, /* few rows: codes of b, whose scales are row-major, are read in place */
    NIB_PRODUCT_ROW_FIXED,
    NIB_PRODUCT_TILES, /* kind NVFP4, many rows */
    NIB_PRODUCT_SLOTS
};

/* Rows of side a that are in work. */
struct nib_row_range {
    int64_t first, count;
};

/* Rows of the range from `row` (counted in it, a multiple of NIB_PACKED_ROWS) on, NIB_PACKED_ROWS or what is left, into
 * `packed`, which has space for the range, as the `multiply` of the same slot wants them. A slot without this function
 * takes no packed rows. */
typedef void nib_pack_rows_fn(const struct nib_product *p, struct nib_row_range range, int64_t row, void *packed);

/* Columns first..first+count-1 of a range of rows, which were packed. `scratch` is the thread's own. count is at most
 * NIB_PANEL_COLUMNS, NIB_TILES_COLUMNS of tiles, and of any size for a slot that reads codes in place. */
typedef void nib_multiply_fn(const struct nib_product *p, struct nib_row_range range, const void *packed, int64_t first,
                             int64_t count, void *scratch);

/* Elements of a line in packed form, and bytes: of a packed row of any slot, and of a thread's panel. */
static inline int64_t nib_packed_length(int64_t length) { return nib_round_up(length, 128); }
static inline int64_t nib_packed_row_bytes(int64_t length) { return nib_packed_length(length) * 4 + 1024; }
static inline int64_t nib_panel_bytes(int64_t length) { return NIB_PANEL_COLUMNS * nib_packed_length(length) * 4; }

/* A thread's scratch for tiles: columns in BF16, and accumulators where k is cut. */
static inline int64_t nib_tiles_bytes(int64_t length, int64_t rows)
{
    const int64_t k = nib_min(nib_packed_length(length), NIB_TILES_K);
    return NIB_TILES_COLUMNS * (2 * k + (length > k ? nib_round_up(rows, NIB_PACKED_ROWS) * 4 : 0));
}

#endif
