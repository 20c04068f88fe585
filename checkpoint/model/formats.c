/* SPDX-License-Identifier: Apache-2.0 */
/*
 * formats.c - the table of checkpoint formats. What a row cannot say yet becomes a field of the row, not a condition
 * elsewhere.
 */
#include "model/formats.h"

#include <stdio.h>

#include "base/base.h"
#include "file/json.h"
#include "io/gguf.h"
#include "model/read.h"

#define U8 NIB_DTYPE_BIT(NIB_U8)
#define E4M3 NIB_DTYPE_BIT(NIB_E4M3)
#define GGUF NIB_DTYPE_BIT(NIB_DTYPE_COUNT) /* the dtype of a tensor that only GGML has a type for */
#define DATA NIB_ROLE_BIT(NIB_ROLE_DATA)
#define SCALE NIB_ROLE_BIT(NIB_ROLE_SCALE)
#define TENSOR_SCALE NIB_ROLE_BIT(NIB_ROLE_TENSOR_SCALE)
#define INPUT NIB_ROLE_BIT(NIB_ROLE_INPUT)
#define PLAIN_TYPES (NIB_GGUF_BIT(NIB_GGUF_F32) | NIB_GGUF_BIT(NIB_GGUF_F16) | NIB_GGUF_BIT(NIB_GGUF_BF16))
#define WRITTEN(action) (1u << NIB_ACTION_##action)

const struct nib_ck_format nib_ck_formats[NIB_CHECKPOINT_FORMAT_COUNT] = {
    [NIB_CHECKPOINT_FORMAT_PLAIN] = {
        .name = "plain",
        .layouts = { { { ".weight", NULL, NULL, NULL }, NIB_FLOAT_BITS, 0, 0, NIB_STACK_NONE, NIB_BY_NAME, 0 },
                     { { "", NULL, NULL, NULL }, NIB_FLOAT_BITS, 0, 0, NIB_STACK_EXPERTS, NIB_BY_NAME, 0 },
                     { { ".weight", NULL, NULL, NULL }, NIB_FLOAT_BITS, 0, PLAIN_TYPES, NIB_STACK_GGUF, NIB_BY_NAME, 0 } },
        .tensor_scale = NIB_TENSOR_SCALE_NONE,
        .columns = 1,
        .written_by = WRITTEN(DEQUANTIZE),
        .read_rows = nib_ck_plain_rows,
    },
    [NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS] = {
        .name = "compressed-tensors",
        .method = "compressed-tensors",
        .layouts = { { { ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale" },
                       U8, E4M3, 0, NIB_STACK_NONE, NIB_BY_NAME, DATA | TENSOR_SCALE | INPUT } },
        .tensor_scale = NIB_TENSOR_SCALE_DIVISOR,
        .tensor_scale_rank = 1,
        .fused = true,
        .bits = 4,
        .columns = 16,
        .written_by = WRITTEN(QUANTIZE) | WRITTEN(CONVERT) | WRITTEN(REPAIR),
        .read_codes = nib_ck_linear_codes,
        .read_rows = nib_ck_nvfp4_rows,
    },
    [NIB_CHECKPOINT_FORMAT_MODELOPT] = {
        .name = "modelopt",
        .method = "modelopt",
        .layouts = { { { ".weight", ".weight_scale", ".weight_scale_2", ".input_scale" },
                       U8, E4M3, 0, NIB_STACK_NONE, NIB_BY_METHOD, TENSOR_SCALE },
                     { { "", "_weight_scale", "_weight_scale_2", "_input_scale" },
                       U8, E4M3, 0, NIB_STACK_EXPERTS, NIB_BY_SCALE, SCALE | TENSOR_SCALE } },
        .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
        .fused = true,
        .bits = 4,
        .columns = 16,
        .written_by = WRITTEN(QUANTIZE) | WRITTEN(CONVERT) | WRITTEN(REPAIR),
        .read_codes = nib_ck_linear_codes,
        .read_rows = nib_ck_nvfp4_rows,
    },
    [NIB_CHECKPOINT_FORMAT_TORCHAO] = {
        .name = "torchao",
        .method = "torchao",
        .layouts = { { { "._weight_qdata", "._weight_scale", "._weight_per_tensor_scale",
                         "._weight_act_per_tensor_scale" },
                       U8, E4M3, 0, NIB_STACK_NONE, NIB_BY_NAME, DATA } },
        .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
        .tensor_scale_optional = true,
        .bits = 4,
        .columns = 16,
        .written_by = WRITTEN(CONVERT),
        .read_codes = nib_ck_linear_codes,
        .read_rows = nib_ck_nvfp4_rows,
    },
    [NIB_CHECKPOINT_FORMAT_GGUF] = {
        .name = "gguf",
        .layouts = { { { ".weight", NULL, ".scale", ".input_scale" },
                       GGUF, 0, NIB_GGUF_BIT(NIB_GGUF_NVFP4), NIB_STACK_GGUF, NIB_BY_NAME, 0 } },
        .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
        .tensor_scale_rank = 1,
        .tensor_scale_optional = true,
        .bits = 4,
        .columns = NIB_GGUF_NVFP4_ELEMENTS,
        .written_by = WRITTEN(QUANTIZE) | WRITTEN(CONVERT) | WRITTEN(DEQUANTIZE), /* the last as plain values */
        .read_codes = nib_ck_gguf_codes,
        .read_rows = nib_ck_nvfp4_rows,
    },
    [NIB_CHECKPOINT_FORMAT_NIB] = {
        .name = "nib",
        .layouts = { { { ".row_data", ".row_scale", ".row_tensor_scale", NULL },
                       U8, U8 | E4M3, 0, NIB_STACK_SAVED, NIB_BY_NAME, 0 },
                     { { ".col_data", ".col_scale", ".col_tensor_scale", NULL },
                       0, 0, 0, NIB_STACK_OTHER, NIB_BY_NAME, 0 },
                     { { ".col_data", ".col_scale", ".col_level", NULL }, /* nib 0.1 */
                       0, 0, 0, NIB_STACK_OTHER, NIB_BY_NAME, 0 } },
        .tensor_scale = NIB_TENSOR_SCALE_AMAX,
        .bits = 4,
        .columns = 1,
        .read_codes = nib_ck_linear_codes,
        .read_rows = nib_ck_nvfp4_rows,
    },
    [NIB_CHECKPOINT_FORMAT_MXFP4] = {
        .name = "mxfp4",
        .method = "mxfp4",
        .layouts = { { { "_blocks", "_scales", NULL, NULL }, U8, U8, 0, NIB_STACK_BLOCKS, NIB_BY_NAME, 0 },
                     /* compressed-tensors' mxfp4-pack-quantized differs from its NVFP4 by the scales alone */
                     { { ".weight_packed", ".weight_scale", NULL, NULL }, U8, U8, 0, NIB_STACK_NONE, NIB_BY_SCALE_DTYPE, 0 },
                     { { ".weight", NULL, NULL, NULL }, GGUF, 0, NIB_GGUF_BIT(NIB_GGUF_MXFP4), NIB_STACK_GGUF, NIB_BY_NAME, 0 } },
        .bits = 4,
        .tensor_scale = NIB_TENSOR_SCALE_NONE,
        .columns = 32,
        .read_rows = nib_ck_mxfp4_rows,
    },
    [NIB_CHECKPOINT_FORMAT_FP8_BLOCK] = {
        .name = "fp8-block",
        .method = "fp8",
        .layouts = { { { ".weight", ".weight_scale_inv", NULL, ".activation_scale" },
                       E4M3, NIB_FLOAT_BITS, 0, NIB_STACK_NONE, NIB_BY_SCALE, 0 } },
        .bits = 8,
        .tensor_scale = NIB_TENSOR_SCALE_NONE,
        .columns = 1,
        .read_rows = nib_ck_fp8_rows,
    },
    [NIB_CHECKPOINT_FORMAT_FP8] = {
        .name = "fp8",
        .method = "fbgemm_fp8", /* compressed-tensors and ModelOpt write it under their own */
        .layouts = { { { ".weight", ".weight_scale", NULL, ".input_scale" },
                       E4M3, NIB_FLOAT_BITS, 0, NIB_STACK_NONE, NIB_BY_SCALE_DTYPE, 0 } },
        .bits = 8,
        .tensor_scale = NIB_TENSOR_SCALE_NONE,
        .columns = 1,
        .read_rows = nib_ck_fp8_rows,
    },
    [NIB_CHECKPOINT_FORMAT_GGML] = {
        .name = "ggml",
        .layouts = { { { ".weight", NULL, NULL, NULL },
                       GGUF, 0, NIB_GGUF_DECODED, NIB_STACK_GGUF, NIB_BY_NAME, 0 } },
        .bits = 8, /* at most, and about */
        .tensor_scale = NIB_TENSOR_SCALE_NONE,
        .columns = 1,
        .read_rows = nib_ck_ggml_rows,
    },
};

const char *nib_checkpoint_format_name(nib_checkpoint_format format)
{
    return (unsigned)format < NIB_CHECKPOINT_FORMAT_COUNT ? nib_ck_formats[format].name : NULL;
}

nib_status nib_checkpoint_format_from_name(const char *name, nib_checkpoint_format *out)
{
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    for (int i = 0; i < NIB_CHECKPOINT_FORMAT_COUNT; i++)
        if (strcmp(name, nib_ck_formats[i].name) == 0) {
            *out = (nib_checkpoint_format)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_ARG, "there is no checkpoint format %s", nib_quote(name).text);
}

int nib_checkpoint_format_written_by(nib_checkpoint_format format, nib_action action)
{
    return (unsigned)format < NIB_CHECKPOINT_FORMAT_COUNT && (unsigned)action < NIB_ACTION_COUNT &&
           (nib_ck_formats[format].written_by >> action & 1);
}

const struct nib_ck_layout *nib_ck_stack_layout(nib_checkpoint_format format)
{
    for (int i = 0; i < NIB_CK_LAYOUTS; i++)
        if (nib_ck_formats[format].layouts[i].stacking == NIB_STACK_EXPERTS)
            return &nib_ck_formats[format].layouts[i];
    return NULL;
}

const char *nib_ck_suffix_name(const struct nib_ck_layout *layout, enum nib_ck_role role)
{
    const char *suffix = layout->suffixes[role];
    return suffix + (*suffix == '.');
}

const char *nib_ck_written_names(nib_action action, char *text, size_t bytes)
{
    int left = 0;
    size_t used = 0;
    for (int i = 0; i < NIB_CHECKPOINT_FORMAT_COUNT; i++)
        left += nib_checkpoint_format_written_by((nib_checkpoint_format)i, action);
    *text = 0;
    for (int i = 0; i < NIB_CHECKPOINT_FORMAT_COUNT && used < bytes; i++)
        if (nib_checkpoint_format_written_by((nib_checkpoint_format)i, action))
            used += (size_t)snprintf(text + used, bytes - used, "%s%s", nib_ck_formats[i].name,
                                     --left > 1  ? ", "
                                     : left == 1 ? " or "
                                                 : "");
    return text;
}
