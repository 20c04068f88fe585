/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_index.c - any bytes as model.safetensors.index.json of a directory with two shards and a file that belongs to
 * neither: rejected with a message, or the checkpoint can be walked over and planned with.
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "fuzz_directory.h"

static const char *fill_directory(void)
{
    static const struct put_tensor first[] = {
        { "model.embed_tokens.weight", NIB_BF16, 2, { 32, 16 }, 0x3c },
        { "model.layers.0.self_attn.q_proj.weight", NIB_BF16, 2, { 16, 16 }, 0x3c },
        { "model.layers.0.mlp.experts.gate_up_proj", NIB_BF16, 3, { 2, 32, 16 }, 0x3b },
    };
    static const struct put_tensor second[] = {
        { "model.layers.0.self_attn.k_proj.weight", NIB_BF16, 2, { 16, 16 }, 0x3d },
        { "model.norm.weight", NIB_BF16, 1, { 16 }, 0x3f },
    };
    static const struct put_tensor other[] = { { "a", NIB_F32, 0, { 0 }, 0 } };
    static const char config[] = "{\"model_type\": \"qwen3_5_moe\", \"text_config\": {\"hidden_size\": 16, "
                                 "\"moe_intermediate_size\": 16, \"num_hidden_layers\": 1}}";
    const char *directory = make_directory();
    put_tensors(directory, "model-00001-of-00002.safetensors", first, sizeof first / sizeof *first);
    put_tensors(directory, "model-00002-of-00002.safetensors", second, sizeof second / sizeof *second);
    put_tensors(directory, "other.safetensors", other, 1);
    put_file(directory, "config.json", config, strlen(config));
    return directory;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char *directory;
    if (!directory)
        directory = fill_directory();
    put_file(directory, "model.safetensors.index.json", bytes, count);
    try_directory(directory);
    return 0;
}
