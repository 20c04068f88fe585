/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dialect.c - the table of dialects.
 */
#include "format/dialect.h"

const struct nib_dialect_facts nib_nvfp4_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_AMAX,
                         .tensor_scale_of = nib_te_tensor_scale,
                         .prepare = nib_te_prepare,
                         .block_scale = nib_te_block_scale,
                         .factor = nib_te_factor,
                         .decode_factor = nib_nvfp4_decode_factor },
    [NIB_DIALECT_GIST] = { .name = "gist",
                           .tensor_scale = NIB_TENSOR_SCALE_DIVISOR,
                           .fixed = true,
                           .elements = { .keeps_nan_sign = true },
                           .tensor_scale_of = nib_gist_tensor_scale,
                           .prepare = nib_divisor_prepare,
                           .block_scale = nib_gist_block_scale,
                           .factor = nib_gist_factor,
                           .decode_factor = nib_nvfp4_decode_factor },
    [NIB_DIALECT_TORCHAO] = { .name = "torchao",
                              .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
                              .fixed = true,
                              .min_block_scale = 0x1p-6f,
                              .tensor_scale_of = nib_torchao_tensor_scale,
                              .prepare = nib_torchao_prepare,
                              .block_scale = nib_torchao_block_scale,
                              .factor = nib_torchao_factor,
                              .decode_factor = nib_nvfp4_decode_factor },
    [NIB_DIALECT_MODELOPT] = { .name = "modelopt",
                               .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
                               .fixed = true,
                               .min_block_scale = 0x1p-9f,
                               .elements = { .divides = true, .drops_zero_sign = true },
                               .tensor_scale_of = nib_modelopt_tensor_scale,
                               .prepare = nib_modelopt_prepare,
                               .block_scale = nib_modelopt_block_scale,
                               .factor = nib_modelopt_factor,
                               .decode_factor = nib_nvfp4_decode_factor },
    [NIB_DIALECT_COMPRESSED_TENSORS] = { .name = "compressed-tensors",
                                         .tensor_scale = NIB_TENSOR_SCALE_DIVISOR,
                                         .fixed = true,
                                         .elements = { .divides = true, .drops_zero_sign = true },
                                         .tensor_scale_of = nib_ct_tensor_scale,
                                         .prepare = nib_divisor_prepare,
                                         .block_scale = nib_ct_block_scale,
                                         .factor = nib_ct_factor,
                                         .decode_factor = nib_nvfp4_decode_factor },
};

const struct nib_dialect_facts nib_float8_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
                         .scale_of = nib_float8_scale,
                         .prepare = nib_no_prepare,
                         .factor = nib_float8_factor,
                         .decode_factor = nib_float8_decode_factor },
};

const struct nib_dialect_facts nib_float8_block_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_NONE,
                         .prepare = nib_no_prepare,
                         .block_scale = nib_float8_block_scale,
                         .factor = nib_float8_block_factor,
                         .decode_factor = nib_float8_block_decode_factor },
};

const struct nib_dialect_facts nib_mx_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_NONE,
                         .prepare = nib_no_prepare,
                         .block_scale = nib_mx_block_scale,
                         .factor = nib_mx_factor,
                         .decode_factor = nib_mx_decode_factor },
};

/* ---- Names: those of NVFP4's rows, which has them all ---- */

const char *nib_dialect_name(nib_dialect dialect)
{
    return (unsigned)dialect < NIB_DIALECT_COUNT ? nib_nvfp4_dialects[dialect].name : NULL;
}

nib_status nib_dialect_from_name(const char *name, nib_dialect *out)
{
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    for (int i = 0; i < NIB_DIALECT_COUNT; i++)
        if (strcmp(name, nib_nvfp4_dialects[i].name) == 0) {
            *out = (nib_dialect)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_ARG, "there is no dialect \"%s\"", name);
}
