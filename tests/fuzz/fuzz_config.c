/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_config.c - any bytes as config.json of a directory with plain, stacked, packed (beside FP8), or FP8 and MXFP4 weights, or as
 * hf_quant_config.json, by the first byte: rejected with a message, or the checkpoint can be walked over and planned with.
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "fuzz_directory.h"

static const struct put_tensor plain[] = {
    { "lm_head.weight", NIB_F16, 2, { 32, 16 }, 0x3c },
    { "model.layers.0.input_layernorm.weight", NIB_F32, 1, { 16 }, 0x3f },
    { "model.layers.0.self_attn.q_proj.weight", NIB_F32, 2, { 16, 16 }, 0x3c },
    { "model.layers.0.mlp.experts.0.gate_proj.weight", NIB_BF16, 2, { 16, 24 }, 0x3c },
    { "model.layers.1.eh_proj.weight", NIB_BF16, 2, { 16, 32 }, 0x3c },
};
static const struct put_tensor stacked[] = {
    { "model.layers.0.mlp.experts.gate_up_proj", NIB_BF16, 3, { 2, 32, 64 }, 0x3b },
    { "model.layers.0.mlp.experts.down_proj", NIB_BF16, 3, { 2, 32, 32 }, 0x3b },
    { "model.layers.0.mlp.experts.gate_up_proj_bias", NIB_BF16, 2, { 2, 64 }, 0x3b },
};
static const struct put_tensor compressed[] = {
    { "model.layers.0.self_attn.q_proj.weight_packed", NIB_U8, 2, { 16, 32 }, 0x21 },
    { "model.layers.0.self_attn.q_proj.weight_scale", NIB_E4M3, 2, { 16, 4 }, 0x38 },
    { "model.layers.0.self_attn.q_proj.weight_global_scale", NIB_F32, 1, { 1 }, 0x42 },
    { "model.layers.0.self_attn.o_proj.weight", NIB_BF16, 2, { 16, 64 }, 0x3c },
    { "model.layers.0.mlp.down_proj.weight", NIB_E4M3, 2, { 16, 32 }, 0x38 },
    { "model.layers.0.mlp.down_proj.weight_scale", NIB_BF16, 2, { 16, 1 }, 0x3c },
};
static const struct put_tensor modelopt[] = {
    { "model.layers.0.self_attn.q_proj.weight", NIB_U8, 2, { 16, 32 }, 0x21 },
    { "model.layers.0.self_attn.q_proj.weight_scale", NIB_E4M3, 2, { 16, 4 }, 0x38 },
    { "model.layers.0.self_attn.q_proj.weight_scale_2", NIB_F32, 0, { 0 }, 0x3c },
    { "model.layers.0.mlp.experts.gate_up_proj", NIB_U8, 3, { 2, 32, 32 }, 0x21 },
    { "model.layers.0.mlp.experts.gate_up_proj_weight_scale", NIB_E4M3, 3, { 2, 4, 32 }, 0x38 },
    { "model.layers.0.mlp.experts.gate_up_proj_weight_scale_2", NIB_F32, 0, { 0 }, 0x3c },
    { "model.layers.0.mlp.down_proj.weight", NIB_E4M3, 2, { 16, 32 }, 0x38 },
    { "model.layers.0.mlp.down_proj.weight_scale", NIB_F32, 1, { 16 }, 0x3c },
};
static const struct put_tensor eight_and_four[] = {
    { "model.layers.0.self_attn.o_proj.weight", NIB_E4M3, 2, { 32, 64 }, 0x38 },
    { "model.layers.0.self_attn.o_proj.weight_scale_inv", NIB_F32, 2, { 1, 1 }, 0x3c },
    { "model.layers.0.mlp.experts.down_proj_blocks", NIB_U8, 4, { 2, 32, 2, 16 }, 0x21 },
    { "model.layers.0.mlp.experts.down_proj_scales", NIB_U8, 3, { 2, 32, 2 }, 0x7f },
};

#define FILE_OF(tensors)                          \
    {                                             \
        tensors, sizeof tensors / sizeof *tensors \
    }
static const struct {
    const struct put_tensor *tensors;
    size_t n;
} files[] = { FILE_OF(plain), FILE_OF(stacked), FILE_OF(compressed), FILE_OF(modelopt), FILE_OF(eight_and_four) };
enum { FILES = sizeof files / sizeof *files };

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char packed_by_modelopt[] = "{\"quantization_config\": {\"quant_method\": \"modelopt\"}}";
    static const char *places[FILES + 1];
    if (count == 0)
        return 0;
    const int i = bytes[0] % (FILES + 1), kind = i < FILES ? i : 3;
    if (!places[i]) {
        places[i] = make_directory();
        put_tensors(places[i], "model.safetensors", files[kind].tensors, files[kind].n);
        put_file(places[i], "config.json", packed_by_modelopt, strlen(packed_by_modelopt));
    }
    put_file(places[i], i < FILES ? "config.json" : "hf_quant_config.json", bytes + 1, count - 1);
    try_directory(places[i]);
    return 0;
}
