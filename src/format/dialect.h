/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dialect.h - whose arithmetic: the table that says which functions of rules.h make a dialect of a format.
 *
 * A dialect answers a few questions, one function each, and is one row.
 */
#ifndef NIB_DIALECT_H
#define NIB_DIALECT_H

#include "base/base.h"
#include "format/rules.h"

struct nib_dialect_facts {
    const char *name;
    nib_tensor_scale tensor_scale;
    bool fixed;            /* 1xB blocks, rtn, nearest, one tensor scale per tensor: the peer defines nothing else */
    float min_block_scale; /* NVFP4, where it is fixed: what block_scale raises smaller scales to; 0: nothing */
    struct nib_element_rule elements;
    /* From the amax to the tensor scale; or, where what is kept is the inverse of the scale, to that scale. Both NULL:
     * no tensor scale. */
    float (*tensor_scale_of)(float amax, const struct nib_rules *rules);
    float (*scale_of)(float amax, const struct nib_rules *rules);
    /* Before the blocks of a tensor scale; scaler->tensor_scale (and scale, where there is a scale_of) is set. */
    void (*prepare)(struct nib_scaler *scaler, const struct nib_rules *rules);
    /* A block's scale; NULL where there are none. */
    nib_scale_bits (*block_scale)(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules);
    /* What its elements are multiplied with (or divided by). */
    float (*factor)(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                    const struct nib_rules *rules);
    /* What its decoded codes are multiplied with. */
    float (*decode_factor)(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules);
};

/* The dialects of each format; a row without functions is one that the format does not have. */
NIB_PRIVATE extern const struct nib_dialect_facts nib_nvfp4_dialects[NIB_DIALECT_COUNT];
extern const struct nib_dialect_facts nib_float8_dialects[NIB_DIALECT_COUNT];
extern const struct nib_dialect_facts nib_float8_block_dialects[NIB_DIALECT_COUNT];
extern const struct nib_dialect_facts nib_mx_dialects[NIB_DIALECT_COUNT];

#endif
