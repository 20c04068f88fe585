/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_model.c - any bytes as one of the files that come with a model: its tokenizer, in three forms, its model card, its
 * advice for sampling, from all of which a GGUF file is planned; and as the provenance by which a plan puts together what
 * another took apart. The first byte says which, and the family of the model.
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "fuzz_directory.h"

#define LAYER "model.layers.0."
static const struct put_tensor llama[] = {
    { "model.embed_tokens.weight", NIB_BF16, 2, { 8, 64 }, 0x3c },
    { "model.norm.weight", NIB_F32, 1, { 64 }, 0x3f },
    { LAYER "input_layernorm.weight", NIB_F32, 1, { 64 }, 0x3f },
    { LAYER "self_attn.q_proj.weight", NIB_BF16, 2, { 64, 64 }, 0x3c },
    { LAYER "mlp.up_proj.weight", NIB_BF16, 2, { 64, 64 }, 0x3c },
};
static const struct put_tensor experts[] = {
    { LAYER "mlp.experts.0.gate_proj.weight_packed", NIB_U8, 2, { 16, 8 }, 0x21 },
    { LAYER "mlp.experts.0.gate_proj.weight_scale", NIB_E4M3, 2, { 16, 1 }, 0x38 },
    { LAYER "mlp.experts.0.gate_proj.weight_global_scale", NIB_F32, 1, { 1 }, 0x42 },
    { LAYER "mlp.experts.0.up_proj.weight_packed", NIB_U8, 2, { 16, 8 }, 0x21 },
    { LAYER "mlp.experts.0.up_proj.weight_scale", NIB_E4M3, 2, { 16, 1 }, 0x38 },
    { LAYER "mlp.experts.0.up_proj.weight_global_scale", NIB_F32, 1, { 1 }, 0x42 },
    { LAYER "mlp.experts.0.gate_proj.bias", NIB_BF16, 1, { 16 }, 0x3c },
    { LAYER "mlp.experts.0.up_proj.bias", NIB_BF16, 1, { 16 }, 0x3c },
    { "h.0.attn.c_attn.weight_packed", NIB_U8, 2, { 16, 8 }, 0x21 },
    { "h.0.attn.c_attn.weight_scale", NIB_E4M3, 2, { 16, 1 }, 0x38 },
    { "h.0.attn.c_attn.weight_global_scale", NIB_F32, 1, { 1 }, 0x42 },
};

#define SIZES                                                                                                \
    "\"hidden_size\": 64, \"intermediate_size\": 64, \"num_hidden_layers\": 1, \"num_attention_heads\": 4, " \
    "\"num_key_value_heads\": 4, \"vocab_size\": 8, \"max_position_embeddings\": 64"
#define TOKENIZER                                                                                          \
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\"]}, " \
    "\"pre_tokenizer\": {\"type\": \"ByteLevel\"}}"

/* The families differ in what they make of a tokenizer. */
static const char *const families[] = { "llama", "mistral", "qwen2", "gemma3_text" };
enum { FAMILIES = sizeof families / sizeof *families };
static const char *const names[] = { "tokenizer.json",     "tokenizer_config.json",  "tokenizer.model",
                                     "README.md",          "generation_config.json", "special_tokens_map.json",
                                     "chat_template.jinja" };
enum { NAMES = sizeof names / sizeof *names };

/* A GGUF file of the directory, planned only: its keys are part of the plan. */
static void try_gguf(const nib_checkpoint *c)
{
    nib_plan *plan = NULL;
    const nib_status status = nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_GGUF, NIB_F32, &plan);
    walk_plan(status, plan);
}

static void try_as(size_t name, int family, const uint8_t *bytes, size_t count)
{
    static const char *places[FAMILIES];
    static nib_checkpoint *models[FAMILIES]; /* a plan reads what lies beside weights, not the opening of them */
    static size_t before[FAMILIES]; /* what an earlier input left */
    char text[512];
    const char *place = places[family];
    if (!place) {
        place = places[family] = make_directory();
        put_tensors(place, "model.safetensors", llama, sizeof llama / sizeof *llama);
        snprintf(text, sizeof text, "{\"model_type\": \"%s\", " SIZES "}", families[family]);
        put_file(place, "config.json", text, strlen(text));
        require(!nib_checkpoint_open(place, &models[family]), "a good directory");
    } else if (before[family] != name) {
        snprintf(text, sizeof text, "%s/%s", place, names[before[family]]);
        unlink(text);
    }
    before[family] = name;
    snprintf(text, sizeof text, "%s/%s", place, names[0]);
    if (name == 2)
        unlink(text);
    else if (name != 0 && access(text, F_OK))
        put_file(place, names[0], TOKENIZER, strlen(TOKENIZER));
    put_file(place, names[name], bytes, count);
    try_gguf(models[family]);
}

/* In config.json; what is no object there is not looked at. */
static void try_provenance(const uint8_t *bytes, size_t count)
{
    static const char begin[] = "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\"}, \"nib\": ";
    static const char *place;
    char *config = malloc(sizeof begin + count + 1);
    require(config != NULL, "memory");
    memcpy(config, begin, sizeof begin - 1);
    memcpy(config + sizeof begin - 1, bytes, count);
    config[sizeof begin - 1 + count] = '}';
    if (!place) {
        place = make_directory();
        put_tensors(place, "model.safetensors", experts, sizeof experts / sizeof *experts);
    }
    put_file(place, "config.json", config, sizeof begin + count);
    free(config);
    try_directory(place);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    if (count == 0)
        return 0;
    const size_t which = bytes[0] % (NAMES + 1);
    if (which < NAMES)
        try_as(which, bytes[0] / (NAMES + 1) % FAMILIES, bytes + 1, count - 1);
    else
        try_provenance(bytes + 1, count - 1);
    return 0;
}
