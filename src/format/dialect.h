/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dialect.h - whose arithmetic: from an amax to the tensor's tensor scale, to a block's scale, to an element's code.
 *
 * A dialect of a format answers a few questions, one function each, and stands in one row of a table. All numbers are
 * FP32 and every operation rounds once, in the order written: which byte comes out depends on it.
 */
#ifndef NIB_DIALECT_H
#define NIB_DIALECT_H

#include "base/base.h"

/* The choices within a dialect, fixed for a whole tensor. */
struct nib_rules {
    nib_tensor_scale tensor_scale; /* what the tensor keeps */
    nib_dtype element;             /* what a code is */
    float element_max;             /* its largest value */
    float full_scale;              /* what the largest magnitude becomes, block scale included */
    bool pow2;            /* scales are powers of two: a kept decode scale rounded up, a float8 scale rounded down */
    bool no_tensor_scale; /* there is no tensor scale */
    nib_mx_rule mx_rule;
    float amax_epsilon;
    nib_dtype input; /* some dialects compute in the input's dtype */
};

/* What a tensor scale (one per tensor, or per line) comes to, worked out once before its blocks. */
struct nib_scaler {
    float tensor_scale;
    float amax;   /* te: the largest magnitude, or what the kept decode scale makes of it */
    float encode; /* multiplier of the data on the way in; set before prepare where there is an encode_of */
    float decode; /* its inverse, on the way out */
    float block;  /* what a block's amax is multiplied with or divided by */
};

/* A block's scale as the bits that are stored: a code, or a float's. */
typedef uint32_t nib_scale_bits;

struct nib_dialect_facts {
    const char *name;
    nib_tensor_scale tensor_scale;
    bool plain;           /* 1xB blocks, rtn, nearest, one tensor scale per tensor: the peer defines nothing else */
    bool divides;         /* elements are divided by the factor instead of multiplied */
    bool drops_zero_sign; /* -0 is code 0: the sign comes from x < 0 */
    bool keeps_nan_sign;  /* a negative NaN is -6 */
    /* From the amax to the tensor scale; or, where the tensor scale is the inverse of a multiplier, to that multiplier. NULL: no
     * tensor scale. */
    float (*tensor_scale_of)(float amax, const struct nib_rules *rules);
    float (*encode_of)(float amax, const struct nib_rules *rules);
    /* Before the blocks of a tensor scale; scaler->tensor scale (and encode) are set. */
    void (*prepare)(struct nib_scaler *scaler, const struct nib_rules *rules);
    /* A block's scale; NULL where there are none. */
    nib_scale_bits (*block_scale)(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules);
    /* What its elements are multiplied with (or divided by). */
    float (*factor)(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                    const struct nib_rules *rules);
    /* What its codes are multiplied with when they are decoded. */
    float (*decode)(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules);
};

/* The dialects of each format; a row without functions is one that the format does not have. */
extern const struct nib_dialect_facts nib_nvfp4_dialects[NIB_DIALECT_COUNT];
extern const struct nib_dialect_facts nib_float8_dialects[NIB_DIALECT_COUNT];
extern const struct nib_dialect_facts nib_float8_block_dialects[NIB_DIALECT_COUNT];
extern const struct nib_dialect_facts nib_mx_dialects[NIB_DIALECT_COUNT];

/* A tensor's tensor scale as a plain multiplier, where the exact order of operations is not prescribed. */
float nib_decode_scale(float tensor_scale, const struct nib_rules *rules);

#endif
