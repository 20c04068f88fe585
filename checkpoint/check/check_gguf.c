/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_gguf.c - what a GGUF file lacks that llama.cpp needs: keys, tensors and the tokenizer of its architecture, and
 * tensor scales in places where it does not look for them.
 */
#include "check/check.h"

#include <stdio.h>

#include "file/json.h"
#include "io/gguf.h"
#include "model/architectures.h"

#define FAMILY(name) (1u << NIB_FAMILY_##name)
#define ALL ((1u << NIB_FAMILY_COUNT) - 1)

/* Families of an architecture, by its name: two share "llama". 0: nib does not know what it needs. */
static uint32_t families_of(const char *architecture)
{
    uint32_t families = 0;
    for (int i = 0; i < NIB_FAMILY_COUNT && architecture; i++)
        if (!strcmp(nib_architectures[i].gguf, architecture))
            families |= 1u << i;
    return families;
}

static bool has_key(const struct nib_checking *k, const char *format, const char *word)
{
    char key[128];
    size_t index;
    snprintf(key, sizeof key, format, word);
    return nib_gguf_find_key(k->c->files[0].gguf, key, &index);
}

static nib_status check_keys(struct nib_checking *k, uint32_t families)
{
    static const struct {
        const char *key;
        uint32_t families;
    } needed[] = {
        { "%s.block_count", ALL },
        { "%s.context_length", ALL },
        { "%s.embedding_length", ALL },
        { "%s.feed_forward_length", ALL & ~(FAMILY(QWEN3_MOE) | FAMILY(GPT_OSS)) },
        { "%s.expert_feed_forward_length", FAMILY(QWEN3_MOE) | FAMILY(GPT_OSS) },
        { "%s.expert_count", FAMILY(QWEN3_MOE) | FAMILY(GPT_OSS) },
        { "%s.expert_used_count", FAMILY(QWEN3_MOE) | FAMILY(GPT_OSS) },
        { "%s.attention.head_count", ALL },
        { "%s.attention.layer_norm_rms_epsilon", ALL },
        { "%s.attention.sliding_window", FAMILY(GPT_OSS) },
    };
    const char *architecture = k->c->architecture;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        char key[128];
        snprintf(key, sizeof key, needed[i].key, architecture);
        if ((needed[i].families & families) && !has_key(k, needed[i].key, architecture))
            TRY(nib_check_found(k, NIB_FAULT_GGUF_KEY, key, "there is no such key"));
    }
    return NIB_OK;
}

static bool has_tensor(const struct nib_checking *k, const char *format, long long layer, const char *name)
{
    char full[96];
    snprintf(full, sizeof full, format, layer, name);
    return nib_ck_find_tensor(k->c, full) != NIB_NONE;
}

/* Any one of the names of a row will do: matrices may be fused, and some models have experts. */
static nib_status check_layer(struct nib_checking *k, uint32_t families, long long layer)
{
    static const struct {
        const char *names[2];
        uint32_t families;
    } needed[] = {
        { { "attn_norm" }, ALL },
        { { "attn_q", "attn_qkv" }, ALL },
        { { "attn_k", "attn_qkv" }, ALL },
        { { "attn_v", "attn_qkv" }, ALL },
        { { "attn_output" }, ALL },
        { { "attn_q_norm" }, FAMILY(QWEN3) | FAMILY(QWEN3_MOE) | FAMILY(GEMMA3) },
        { { "attn_k_norm" }, FAMILY(QWEN3) | FAMILY(QWEN3_MOE) | FAMILY(GEMMA3) },
        { { "post_attention_norm" }, FAMILY(GEMMA3) | FAMILY(GPT_OSS) },
        { { "post_ffw_norm" }, FAMILY(GEMMA3) },
        { { "attn_sinks" }, FAMILY(GPT_OSS) },
        { { "ffn_norm" }, ALL & ~FAMILY(GPT_OSS) },
        { { "ffn_up", "ffn_up_exps" }, ALL },
        { { "ffn_gate", "ffn_gate_exps" }, ALL },
        { { "ffn_down", "ffn_down_exps" }, ALL },
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        char name[96];
        const char *const *names = needed[i].names;
        if (!(needed[i].families & families) || has_tensor(k, "blk.%lld.%s.weight", layer, names[0]) ||
            (names[1] && has_tensor(k, "blk.%lld.%s.weight", layer, names[1])))
            continue;
        snprintf(name, sizeof name, "blk.%lld.%s.weight", layer, names[0]);
        TRY(nib_check_found(k, NIB_FAULT_GGUF_TENSOR, name, "there is no such tensor"));
    }
    return NIB_OK;
}

static nib_status check_tensors(struct nib_checking *k, uint32_t families)
{
    enum { MOST_LAYERS = 4096 };
    static const char *const needed[] = { "token_embd.weight", "output_norm.weight" };
    int64_t layers = 0;
    bool found;
    char key[128];
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (nib_ck_find_tensor(k->c, needed[i]) == NIB_NONE)
            TRY(nib_check_found(k, NIB_FAULT_GGUF_TENSOR, needed[i], "there is no such tensor"));
    snprintf(key, sizeof key, "%s.block_count", k->c->architecture);
    if (nib_gguf_get_integer(k->c->files[0].gguf, key, &layers, &found) || layers < 0 || layers > MOST_LAYERS)
        return nib_check_found(k, NIB_FAULT_GGUF_KEY, key, "it is no number of layers");
    for (int64_t layer = 0; layer < layers; layer++)
        TRY(check_layer(k, families, layer));
    return NIB_OK;
}

/* As many tokens as embeddings. */
static nib_status check_tokenizer(struct nib_checking *k)
{
    static const char *const needed[] = { "tokenizer.ggml.model", "tokenizer.ggml.tokens" };
    const nib_gguf *file = k->c->files[0].gguf;
    const uint32_t embeddings = nib_ck_find_tensor(k->c, "token_embd.weight");
    struct nib_gguf_value tokens;
    size_t index;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!nib_gguf_find_key(file, needed[i], &index))
            return nib_check_found(k, NIB_FAULT_GGUF_TOKENIZER, needed[i], "there is no such key");
    TRY(nib_gguf_value(file, index, &tokens));
    if (embeddings == NIB_NONE || k->c->tensors[embeddings].rank != 2 || tokens.kind != NIB_GGUF_KIND_ARRAY ||
        (int64_t)tokens.count == k->c->tensors[embeddings].shape[0])
        return NIB_OK;
    return nib_check_found(k, NIB_FAULT_GGUF_TOKENIZER, needed[1], "there are %llu tokens and %lld embeddings",
                           (unsigned long long)tokens.count, (long long)k->c->tensors[embeddings].shape[0]);
}

/* NVFP4 where llama.cpp multiplies without the tensor scale. */
static nib_status check_scales(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    for (size_t i = 0; i < c->n_weights; i++) {
        const struct nib_ck_weight *w = &c->weights[i];
        nib_tensor_scale kind;
        float scale = 1;
        if (!nib_ck_is_nvfp4(w->format) || w->index > 0 || !nib_ck_ignores_scale(c->architecture, w->name))
            continue;
        if (nib_ck_read_tensor_scale(c, w, &kind, &scale) || scale != 1)
            TRY(nib_check_found(k, NIB_FAULT_GGUF_SCALE_IGNORED, c->tensors[w->tensor[NIB_ROLE_DATA]].name,
                                "it is NVFP4 with a tensor scale of %.4g, in a model of %s", (double)scale,
                                nib_quote(c->architecture).text));
    }
    return NIB_OK;
}

nib_status nib_check_gguf(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    char *type = NULL;
    bool found = false;
    if (!c->n_files || !c->files[0].gguf)
        return NIB_OK;
    if (!c->architecture)
        return nib_check_found(k, NIB_FAULT_GGUF_KEY, "general.architecture", "there is no such key");
    TRY(check_scales(k));
    const uint32_t families = families_of(c->architecture);
    if (!families || nib_gguf_get_string(c->files[0].gguf, "general.type", &type, &found))
        return NIB_OK;
    const bool model = !found || !strcmp(type, "model"); /* an adapter has less */
    nib_free(type);
    if (!model)
        return NIB_OK;
    TRY(check_keys(k, families));
    TRY(check_tensors(k, families));
    return check_tokenizer(k);
}
