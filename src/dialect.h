/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dialect.h - whose arithmetic: from an amax to the tensor's level, to a block's scale, to an element's code.
 *
 * Every dialect answers four questions, one function each, and stands in one row of a table. All numbers are FP32 and every
 * operation rounds once, in the order written: which byte comes out depends on it.
 */
#ifndef NIB_DIALECT_H
#define NIB_DIALECT_H

#include "base.h"

/* The choices within a dialect, fixed for a whole tensor. */
struct nib_rules {
    nib_level level;   /* what the tensor keeps */
    float full_scale;  /* 6 * e4m3_max: what the largest magnitude becomes */
    bool pow2;         /* the kept decode scale is rounded up to a power of two */
    bool single_level; /* there is no tensor scale */
    nib_dtype input;   /* some dialects compute in the input's dtype */
};

/* What a level (one per tensor, or per line) comes to, worked out once before its blocks. */
struct nib_scaler {
    float level;
    float amax;   /* te: the largest magnitude, or what the kept decode scale makes of it */
    float encode; /* multiplier of the data on the way in */
    float decode; /* its inverse, on the way out */
    float block;  /* what a block's amax is multiplied with or divided by */
};

struct nib_dialect_facts {
    const char *name;
    nib_level level;
    bool plain;           /* only 1x16 blocks, rtn, nearest, one level per tensor: peers define nothing else */
    bool divides;         /* elements are divided by the factor instead of multiplied */
    bool drops_zero_sign; /* -0 is code 0: the sign comes from x < 0 */
    bool keeps_nan_sign;  /* a negative NaN is -6 */
    float (*level_of)(float amax, const struct nib_rules *rules);
    void (*prepare)(struct nib_scaler *scaler, const struct nib_rules *rules); /* scaler->level is set */
    uint8_t (*block_scale)(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules);
    float (*factor)(uint8_t scale, const struct nib_scaler *scaler);
};

extern const struct nib_dialect_facts nib_dialects[NIB_DIALECT_COUNT];

/* The rules that a quantiser's options come to, for data of a dtype. */
struct nib_rules nib_rules_of(const nib_quantizer *q, nib_dtype input);

/* The factor of a block when it is decoded (nib_level in nib.h). */
float nib_decode_factor(uint8_t scale, float level, nib_level kind, float full_scale);

/* A tensor's level as a plain multiplier, where the exact order of operations is not prescribed. */
float nib_decode_scale(float level, nib_level kind, float full_scale);

#endif
