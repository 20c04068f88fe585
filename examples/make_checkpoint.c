/* SPDX-License-Identifier: Apache-2.0 */
/*
 * make_checkpoint.c - writes checkpoints as Hugging Face's are, with made-up weights: tensors under the names and in the
 * shapes of a family of models, config.json with its keys, shards with an index, a tokenizer too small to be of use.
 * A 3 GB tensor takes no more memory than a small one, and the same options always give the same bytes.
 *
 *     make_checkpoint --family llama --layers 4 --shards 2 FOLDER
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <nib.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "nib_file.h"
#include "nib_reference.h"
static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("make_checkpoint: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static void need(nib_status status)
{
    if (status)
        die("%s", nib_last_error());
}

/* ---- Numbers --------------------------------------------------------------------------------------------- */

/* What a tensor holds. Elements are drawn from a table of 65536 equally likely ones, 16 random bits for each. */
enum fill {
    FILL_WEIGHT, /* the distribution, times the tensor's size; the outermost of the table are outliers */
    FILL_NORM,   /* near 1 */
    FILL_FP8,    /* the distribution over the range of E4M3 */
    FILL_SCALE,  /* positive, within a factor of 2 of each other */
    FILL_BITS,   /* any bits: codes of 4 */
    FILL_POWER,  /* E8M0 within 8 binades */
};

enum { TABLE = 1 << 16, OUTLIERS = 2 };
static const double OUTLIER = 4, FP8_UNIT = 60;

static double quantiles[TABLE]; /* of the distribution, standard deviation 1 */

static void make_quantiles(bool laplace)
{
    double z = 0;
    for (int i = TABLE / 2; i < TABLE; i++) {
        const double upper = (TABLE - i - 0.5) / TABLE; /* the share above it */
        if (laplace) {
            z = -log(2 * upper) / sqrt(2);
        } else { /* Newton's steps, from the quantile before */
            for (int step = 0; step < 4; step++)
                z += (0.5 * erfc(z / sqrt(2)) - upper) / (exp(-z * z / 2) / sqrt(2 * acos(-1)));
        }
        quantiles[i] = i >= TABLE - OUTLIERS ? OUTLIER * z : z;
        quantiles[TABLE - 1 - i] = -quantiles[i];
    }
}

static uint64_t mix(uint64_t x) /* splitmix64 */
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static uint64_t hash(const char *text, uint64_t seed)
{
    for (; *text; text++)
        seed = mix(seed ^ (uint8_t)*text);
    return seed;
}

/* ---- The model ------------------------------------------------------------------------------------------- */

struct tensor {
    char *name;
    nib_dtype dtype;
    int rank;
    int64_t shape[4];
    enum fill fill;
    double size;
    double tail; /* the power of numbers that are drawn: 1 as they are, more for heavier tails */
    int shard;
    uint64_t bytes;
};

struct model {
    const struct family *family;
    const char *directory;
    uint64_t seed;
    int64_t layers, hidden, intermediate, experts, heads, kv_heads, head_dim, vocab, shards, small;
    nib_dtype dtype;
    bool laplace, tied, varied;
    struct tensor *tensors;
    size_t count, room;
    const char *wide[16]; /* NAME:ROWSxCOLS */
    size_t n_wide;
};

struct family {
    const char *name, *about, *model_type, *architecture;
    const char *prefix; /* of what is not lm_head */
    const char *head;   /* lm_head's name */
    void (*layer)(struct model *m, const char *at, int64_t layer);
    void (*rest)(struct model *m);                     /* vision, MTP; may be NULL */
    void (*config)(const struct model *m, FILE *file); /* its own keys, each with a comma before it */
    bool nested;                                       /* the model of language is in text_config */
    bool fp8;                                          /* linear layers of the body are FP8 in blocks of 128 x 128 */
};

static void add(struct model *m, nib_dtype dtype, enum fill fill, double size, const int64_t *shape, int rank,
                const char *format, ...)
{
    char name[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    if (m->count == m->room) {
        m->room = m->room ? 2 * m->room : 1024;
        m->tensors = realloc(m->tensors, m->room * sizeof *m->tensors);
    }
    struct tensor *t = &m->tensors[m->count++];
    *t = (struct tensor){ .dtype = dtype, .fill = fill, .size = size, .rank = rank, .tail = 1 };
    t->name = strdup(name);
    if (m->varied && fill == FILL_WEIGHT)
        t->tail = 1 + (double)(hash(name, m->seed) % 8) / 8;
    t->bytes = (uint64_t)nib_dtype_bits(dtype) / 8;
    for (int i = 0; i < rank; i++) {
        t->shape[i] = shape[i];
        t->bytes *= (uint64_t)shape[i];
    }
}

#define SHAPE(...) (const int64_t[]){ __VA_ARGS__ }, (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t))

struct name {
    char text[256];
};

static struct name join(const char *format, ...)
{
    struct name out;
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(out.text, sizeof out.text, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof out.text)
        die("a name of %d bytes is too long", length);
    return out;
}

static void linear_of(struct model *m, bool fp8, int64_t n, int64_t k, const char *module)
{
    const double size = 1 / sqrt((double)k);
    if (!fp8) {
        add(m, m->dtype, FILL_WEIGHT, size, SHAPE(n, k), "%s.weight", module);
        return;
    }
    add(m, NIB_E4M3, FILL_FP8, 1, SHAPE(n, k), "%s.weight", module);
    add(m, NIB_F32, FILL_SCALE, size / FP8_UNIT, SHAPE((n + 127) / 128, (k + 127) / 128), "%s.weight_scale_inv",
        module);
}

static void linear(struct model *m, int64_t n, int64_t k, const char *parent, const char *name)
{
    linear_of(m, m->family->fp8, n, k, join("%s.%s", parent, name).text);
}

/* One that stays in high precision even in an FP8 model. */
static void plain(struct model *m, int64_t n, int64_t k, const char *parent, const char *name)
{
    linear_of(m, false, n, k, join("%s.%s", parent, name).text);
}

static void norm(struct model *m, int64_t n, const char *parent, const char *name)
{
    add(m, m->dtype, FILL_NORM, 1, SHAPE(n), "%s.%s.weight", parent, name);
}

static void bias(struct model *m, int64_t n, const char *parent, const char *name)
{
    add(m, m->dtype, FILL_WEIGHT, 0.02, SHAPE(n), "%s.%s", parent, name);
}

static void norms_of_layer(struct model *m, const char *at)
{
    norm(m, m->hidden, at, "input_layernorm");
    norm(m, m->hidden, at, "post_attention_layernorm");
}

static void attention(struct model *m, const char *at, bool with_norms, bool with_biases)
{
    const struct name attn = join("%s.self_attn", at);
    const int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    linear(m, q, m->hidden, attn.text, "q_proj");
    linear(m, kv, m->hidden, attn.text, "k_proj");
    linear(m, kv, m->hidden, attn.text, "v_proj");
    linear(m, m->hidden, q, attn.text, "o_proj");
    if (with_norms) {
        norm(m, m->head_dim, attn.text, "q_norm");
        norm(m, m->head_dim, attn.text, "k_norm");
    }
    if (with_biases) {
        bias(m, q, attn.text, "q_proj.bias");
        bias(m, kv, attn.text, "k_proj.bias");
        bias(m, kv, attn.text, "v_proj.bias");
        bias(m, m->hidden, attn.text, "o_proj.bias");
    }
}

static void mlp(struct model *m, const char *at, int64_t intermediate, const char *const names[3])
{
    linear(m, intermediate, m->hidden, at, names[0]);
    linear(m, intermediate, m->hidden, at, names[1]);
    linear(m, m->hidden, intermediate, at, names[2]);
}

static const char *const gate_up_down[3] = { "gate_proj", "up_proj", "down_proj" };
static const char *const w1_w3_w2[3] = { "w1", "w3", "w2" };

static void experts(struct model *m, const char *at, const char *const names[3])
{
    for (int64_t e = 0; e < m->experts; e++)
        mlp(m, join("%s.experts.%" PRId64, at, e).text, m->intermediate, names);
}

/* Stacks of experts: [E, 2I, H] and [E, H, I], or with the last two dims exchanged. */
static void stacks(struct model *m, const char *at, bool transposed)
{
    const int64_t e = m->experts, h = m->hidden, i = m->intermediate;
    const double size_h = 1 / sqrt((double)h), size_i = 1 / sqrt((double)i);
    if (transposed) {
        add(m, m->dtype, FILL_WEIGHT, size_h, SHAPE(e, h, 2 * i), "%s.experts.gate_up_proj", at);
        add(m, m->dtype, FILL_WEIGHT, size_i, SHAPE(e, i, h), "%s.experts.down_proj", at);
    } else {
        add(m, m->dtype, FILL_WEIGHT, size_h, SHAPE(e, 2 * i, h), "%s.experts.gate_up_proj", at);
        add(m, m->dtype, FILL_WEIGHT, size_i, SHAPE(e, h, i), "%s.experts.down_proj", at);
    }
}

/* ---- Families -------------------------------------------------------------------------------------------- */

static void llama_layer(struct model *m, const char *at, int64_t layer)
{
    (void)layer;
    norms_of_layer(m, at);
    attention(m, at, false, false);
    mlp(m, join("%s.mlp", at).text, m->intermediate, gate_up_down);
}

static void llama_config(const struct model *m, FILE *file)
{
    (void)m;
    fputs(", \"attention_bias\": false, \"mlp_bias\": false, \"pretraining_tp\": 1", file);
}

static void mixtral_layer(struct model *m, const char *at, int64_t layer)
{
    (void)layer;
    norms_of_layer(m, at);
    attention(m, at, false, false);
    const struct name moe = join("%s.block_sparse_moe", at);
    plain(m, m->experts, m->hidden, moe.text, "gate");
    experts(m, moe.text, w1_w3_w2);
}

static void mixtral_config(const struct model *m, FILE *file)
{
    fprintf(file,
            ", \"num_local_experts\": %" PRId64 ", \"num_experts_per_tok\": 2, \"sliding_window\": null"
            ", \"output_router_logits\": false, \"router_aux_loss_coef\": 0.02",
            m->experts);
}

static void qwen3_moe_layer(struct model *m, const char *at, int64_t layer)
{
    (void)layer;
    norms_of_layer(m, at);
    attention(m, at, true, false);
    const struct name moe = join("%s.mlp", at);
    plain(m, m->experts, m->hidden, moe.text, "gate");
    experts(m, moe.text, gate_up_down);
}

static void qwen3_moe_config(const struct model *m, FILE *file)
{
    fprintf(file,
            ", \"attention_bias\": false, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [], \"norm_topk_prob\": true"
            ", \"num_experts\": %" PRId64 ", \"num_experts_per_tok\": 2, \"moe_intermediate_size\": %" PRId64,
            m->experts, m->intermediate);
}

/* Dense layers as Llama's, and experts in the last but one. Its type is one that may mix them. */
static int64_t layer_of_experts(const struct model *m) { return m->layers > 1 ? m->layers - 2 : 0; }

static void demo_layer(struct model *m, const char *at, int64_t layer)
{
    norms_of_layer(m, at);
    attention(m, at, true, false);
    const struct name moe = join("%s.mlp", at);
    if (layer == layer_of_experts(m)) {
        plain(m, m->experts, m->hidden, moe.text, "gate");
        experts(m, moe.text, gate_up_down);
    } else {
        mlp(m, moe.text, m->intermediate, gate_up_down);
    }
}

static void demo_config(const struct model *m, FILE *file)
{
    fputs(", \"attention_bias\": false, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [", file);
    bool first = true;
    for (int64_t layer = 0; layer < m->layers; layer++)
        if (layer != layer_of_experts(m)) {
            fprintf(file, "%s%" PRId64, first ? "" : ", ", layer);
            first = false;
        }
    fprintf(file,
            "], \"norm_topk_prob\": true, \"num_experts\": %" PRId64
            ", \"num_experts_per_tok\": 2, \"moe_intermediate_size\": %" PRId64,
            m->experts, m->intermediate);
}

static void qwen3_vl_layer(struct model *m, const char *at, int64_t layer)
{
    (void)layer;
    norms_of_layer(m, at);
    attention(m, at, true, false);
    const struct name moe = join("%s.mlp", at);
    plain(m, m->experts, m->hidden, moe.text, "gate");
    stacks(m, moe.text, true);
}

static void qwen_vision(struct model *m)
{
    const char *block = "model.visual.blocks.0";
    norm(m, 64, block, "norm1");
    plain(m, 192, 64, block, "attn.qkv");
    plain(m, 64, 64, block, "attn.proj");
    plain(m, 128, 64, block, "mlp.linear_fc1");
    plain(m, 64, 128, block, "mlp.linear_fc2");
    plain(m, m->hidden, 256, "model.visual.merger", "linear_fc2");
}

static void qwen3_5_layer(struct model *m, const char *at, int64_t layer)
{
    norms_of_layer(m, at);
    if (layer % 4 == 3) {
        attention(m, at, true, false);
    } else {
        const struct name gdn = join("%s.linear_attn", at);
        const int64_t key = m->kv_heads * m->head_dim, value = m->heads * m->head_dim;
        linear(m, 2 * key + value, m->hidden, gdn.text, "in_proj_qkv");
        linear(m, value, m->hidden, gdn.text, "in_proj_z");
        linear(m, m->heads, m->hidden, gdn.text, "in_proj_b");
        linear(m, m->heads, m->hidden, gdn.text, "in_proj_a");
        linear(m, m->hidden, value, gdn.text, "out_proj");
        norm(m, m->head_dim, gdn.text, "norm");
        add(m, m->dtype, FILL_WEIGHT, 0.5, SHAPE(2 * key + value, 1, 4), "%s.conv1d.weight", gdn.text);
        bias(m, m->heads, gdn.text, "A_log");
        bias(m, m->heads, gdn.text, "dt_bias");
    }
    const struct name moe = join("%s.mlp", at);
    plain(m, m->experts, m->hidden, moe.text, "gate");
    plain(m, 1, m->hidden, moe.text, "shared_expert_gate");
    stacks(m, moe.text, false);
    mlp(m, join("%s.shared_expert", moe.text).text, m->intermediate, gate_up_down);
}

static void qwen3_5_rest(struct model *m)
{
    qwen_vision(m);
    norm(m, m->hidden, "mtp", "pre_fc_norm_hidden");
    plain(m, m->hidden, 2 * m->hidden, "mtp", "fc");
    attention(m, "mtp.layers.0", true, false);
}

static void qwen_stack_config(const struct model *m, FILE *file)
{
    fprintf(file,
            ", \"attention_bias\": false, \"num_experts\": %" PRId64
            ", \"num_experts_per_tok\": 2, \"moe_intermediate_size\": %" PRId64,
            m->experts, m->intermediate);
}

static void qwen3_5_config(const struct model *m, FILE *file)
{
    qwen_stack_config(m, file);
    fprintf(file,
            ", \"shared_expert_intermediate_size\": %" PRId64 ", \"full_attention_interval\": 4"
            ", \"linear_conv_kernel_dim\": 4, \"linear_key_head_dim\": %" PRId64 ", \"linear_num_key_heads\": %" PRId64
            ", \"linear_value_head_dim\": %" PRId64 ", \"linear_num_value_heads\": %" PRId64 ", \"layer_types\": [",
            m->intermediate, m->head_dim, m->kv_heads, m->head_dim, m->heads);
    for (int64_t layer = 0; layer < m->layers; layer++)
        fprintf(file, "%s\"%s_attention\"", layer ? ", " : "", layer % 4 == 3 ? "full" : "linear");
    fputc(']', file);
}

static void llama4_layer(struct model *m, const char *at, int64_t layer)
{
    (void)layer;
    norms_of_layer(m, at);
    attention(m, at, false, false);
    const struct name moe = join("%s.feed_forward", at);
    plain(m, m->experts, m->hidden, moe.text, "router");
    stacks(m, moe.text, true);
    mlp(m, join("%s.shared_expert", moe.text).text, m->intermediate, gate_up_down);
}

static void llama4_vision(struct model *m)
{
    plain(m, 64, 588, "vision_model.patch_embedding", "linear");
    plain(m, 64, 64, "vision_model.model.layers.0.self_attn", "q_proj");
    plain(m, m->hidden, 64, "multi_modal_projector", "linear_1");
}

static void llama4_config(const struct model *m, FILE *file)
{
    fprintf(file,
            ", \"num_local_experts\": %" PRId64 ", \"num_experts_per_tok\": 1, \"interleave_moe_layer_step\": 1"
            ", \"intermediate_size_mlp\": %" PRId64 ", \"attention_bias\": false",
            m->experts, 2 * m->intermediate);
}

static void gpt_oss_common(struct model *m, const char *at, const char *moe)
{
    norms_of_layer(m, at);
    attention(m, at, false, true);
    add(m, m->dtype, FILL_WEIGHT, 1, SHAPE(m->heads), "%s.self_attn.sinks", at);
    plain(m, m->experts, m->hidden, moe, "router");
    bias(m, m->experts, moe, "router.bias");
    add(m, m->dtype, FILL_WEIGHT, 0.02, SHAPE(m->experts, 2 * m->intermediate), "%s.experts.gate_up_proj_bias", moe);
    add(m, m->dtype, FILL_WEIGHT, 0.02, SHAPE(m->experts, m->hidden), "%s.experts.down_proj_bias", moe);
}

static void gpt_oss_layer(struct model *m, const char *at, int64_t layer)
{
    (void)layer;
    const struct name moe = join("%s.mlp", at);
    gpt_oss_common(m, at, moe.text);
    stacks(m, moe.text, true);
}

static void gpt_oss_mxfp4_layer(struct model *m, const char *at, int64_t layer)
{
    (void)layer;
    const int64_t e = m->experts, h = m->hidden, i = m->intermediate;
    const struct name moe = join("%s.mlp", at);
    gpt_oss_common(m, at, moe.text);
    add(m, NIB_U8, FILL_BITS, 1, SHAPE(e, 2 * i, h / 32, 16), "%s.experts.gate_up_proj_blocks", moe.text);
    add(m, NIB_U8, FILL_POWER, 1, SHAPE(e, 2 * i, h / 32), "%s.experts.gate_up_proj_scales", moe.text);
    add(m, NIB_U8, FILL_BITS, 1, SHAPE(e, h, i / 32, 16), "%s.experts.down_proj_blocks", moe.text);
    add(m, NIB_U8, FILL_POWER, 1, SHAPE(e, h, i / 32), "%s.experts.down_proj_scales", moe.text);
}

static void gpt_oss_config(const struct model *m, FILE *file)
{
    fprintf(file,
            ", \"attention_bias\": true, \"num_local_experts\": %" PRId64
            ", \"num_experts_per_tok\": 2, \"experts_per_token\": 2, \"sliding_window\": 128, \"swiglu_limit\": 7.0"
            ", \"layer_types\": [",
            m->experts);
    for (int64_t layer = 0; layer < m->layers; layer++)
        fprintf(file, "%s\"%s_attention\"", layer ? ", " : "", layer % 2 ? "full" : "sliding");
    fputc(']', file);
}

static void gpt_oss_mxfp4_config(const struct model *m, FILE *file)
{
    gpt_oss_config(m, file);
    fputs(", \"quantization_config\": {\"quant_method\": \"mxfp4\", \"modules_to_not_convert\": "
          "[\"model.layers.*.self_attn\", \"model.layers.*.mlp.router\", \"model.embed_tokens\", \"lm_head\"]}",
          file);
}

enum { ROPE = 16 }; /* of DeepSeek's heads: the part with positions */

static void mla_layer(struct model *m, const char *at, bool dense)
{
    norms_of_layer(m, at);
    const struct name attn = join("%s.self_attn", at);
    const int64_t low = m->hidden / 2 / 16 * 16, value = m->heads * m->head_dim;
    linear(m, low, m->hidden, attn.text, "q_a_proj");
    norm(m, low, attn.text, "q_a_layernorm");
    linear(m, m->heads * (m->head_dim + ROPE), low, attn.text, "q_b_proj");
    linear(m, low + ROPE, m->hidden, attn.text, "kv_a_proj_with_mqa");
    norm(m, low, attn.text, "kv_a_layernorm");
    linear(m, 2 * value, low, attn.text, "kv_b_proj");
    linear(m, m->hidden, value, attn.text, "o_proj");
    const struct name moe = join("%s.mlp", at);
    if (dense) {
        mlp(m, moe.text, 2 * m->intermediate, gate_up_down);
        return;
    }
    plain(m, m->experts, m->hidden, moe.text, "gate");
    add(m, NIB_F32, FILL_WEIGHT, 0.1, SHAPE(m->experts), "%s.gate.e_score_correction_bias", moe.text);
    experts(m, moe.text, gate_up_down);
    mlp(m, join("%s.shared_experts", moe.text).text, m->intermediate, gate_up_down);
}

static void deepseek_layer(struct model *m, const char *at, int64_t layer) { mla_layer(m, at, layer == 0); }

static void deepseek_mtp(struct model *m)
{
    const struct name layer = join("model.layers.%" PRId64, m->layers);
    const char *at = layer.text;
    norm(m, m->hidden, at, "enorm");
    norm(m, m->hidden, at, "hnorm");
    plain(m, m->hidden, 2 * m->hidden, at, "eh_proj");
    norm(m, m->hidden, at, "shared_head.norm");
    mla_layer(m, at, false);
}

static void deepseek_config(const struct model *m, FILE *file)
{
    const int64_t low = m->hidden / 2 / 16 * 16;
    fprintf(file,
            ", \"attention_bias\": false, \"n_routed_experts\": %" PRId64 ", \"n_shared_experts\": 1"
            ", \"num_experts_per_tok\": 2, \"moe_intermediate_size\": %" PRId64 ", \"first_k_dense_replace\": 1"
            ", \"moe_layer_freq\": 1, \"n_group\": 1, \"topk_group\": 1, \"norm_topk_prob\": true"
            ", \"routed_scaling_factor\": 2.5, \"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\""
            ", \"q_lora_rank\": %" PRId64 ", \"kv_lora_rank\": %" PRId64 ", \"qk_nope_head_dim\": %" PRId64
            ", \"qk_rope_head_dim\": %d, \"v_head_dim\": %" PRId64 ", \"num_nextn_predict_layers\": 1",
            m->experts, m->intermediate, low, low, m->head_dim, ROPE, m->head_dim);
    if (m->family->fp8)
        fputs(", \"quantization_config\": {\"activation_scheme\": \"dynamic\", \"fmt\": \"e4m3\", \"quant_method\": "
              "\"fp8\", \"weight_block_size\": [128, 128]}",
              file);
}

static const struct family families[] = {
    { "llama", "dense", "llama", "LlamaForCausalLM", "model", "lm_head", llama_layer, NULL, llama_config, false,
      false },
    { "demo", "Llama-like layers, experts in the last but one", "qwen3_moe", "Qwen3MoeForCausalLM", "model", "lm_head",
      demo_layer, NULL, demo_config, false, false },
    { "mixtral", "experts as w1, w2, w3", "mixtral", "MixtralForCausalLM", "model", "lm_head", mixtral_layer, NULL,
      mixtral_config, false, false },
    { "qwen3-moe", "experts one by one", "qwen3_moe", "Qwen3MoeForCausalLM", "model", "lm_head", qwen3_moe_layer, NULL,
      qwen3_moe_config, false, false },
    { "qwen3-vl-moe", "experts in stacks [E, H, 2I], vision", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
      "model.language_model", "lm_head", qwen3_vl_layer, qwen_vision, qwen_stack_config, true, false },
    { "qwen3.5-moe", "experts in stacks [E, 2I, H], linear attention, vision, MTP", "qwen3_5_moe",
      "Qwen3_5MoeForConditionalGeneration", "model.language_model", "lm_head", qwen3_5_layer, qwen3_5_rest,
      qwen3_5_config, true, false },
    { "llama4", "experts in stacks [E, H, 2I], a shared one, vision", "llama4", "Llama4ForConditionalGeneration",
      "language_model.model", "language_model.lm_head", llama4_layer, llama4_vision, llama4_config, true, false },
    { "gpt-oss", "experts in stacks [E, H, 2I], interleaved, with biases", "gpt_oss", "GptOssForCausalLM", "model",
      "lm_head", gpt_oss_layer, NULL, gpt_oss_config, false, false },
    { "gpt-oss-mxfp4", "the same in MXFP4", "gpt_oss", "GptOssForCausalLM", "model", "lm_head", gpt_oss_mxfp4_layer,
      NULL, gpt_oss_mxfp4_config, false, false },
    { "deepseek", "MLA, experts one by one, MTP", "deepseek_v3", "DeepseekV3ForCausalLM", "model", "lm_head",
      deepseek_layer, deepseek_mtp, deepseek_config, false, false },
    { "deepseek-fp8", "the same in FP8, blocks of 128 x 128", "deepseek_v3", "DeepseekV3ForCausalLM", "model",
      "lm_head", deepseek_layer, deepseek_mtp, deepseek_config, false, true },
};

static void make_model(struct model *m)
{
    const struct family *f = m->family;
    plain(m, m->vocab, m->hidden, f->prefix, "embed_tokens");
    for (int64_t layer = 0; layer < m->layers; layer++)
        f->layer(m, join("%s.layers.%" PRId64, f->prefix, layer).text, layer);
    norm(m, m->hidden, f->prefix, "norm");
    if (f->rest)
        f->rest(m);
    for (int64_t i = 0; i < m->small; i++) {
        const struct name at = join("%s.layers.0.mlp.adapters.experts.%" PRId64, f->prefix, i / 3);
        plain(m, 16, 256, at.text, gate_up_down[i % 3]);
    }
    for (size_t i = 0; i < m->n_wide; i++) {
        int64_t rows = 0, cols = 0;
        const char *colon = strrchr(m->wide[i], ':');
        if (!colon || colon - m->wide[i] > 200 || sscanf(colon, ":%" SCNd64 "x%" SCNd64, &rows, &cols) != 2 ||
            rows < 1 || cols < 1)
            die("--linear takes NAME:ROWSxCOLS, not %s", m->wide[i]);
        linear_of(m, false, rows, cols, join("%.*s", (int)(colon - m->wide[i]), m->wide[i]).text);
    }
    if (!m->tied)
        linear_of(m, false, m->vocab, m->hidden, f->head);
}

/* About as many bytes in each shard, in the order of the tensors; but keys and the second halves of MLPs go to the next
 * one, so that what servers fuse is spread over files, as it can be in real checkpoints. */
static void deal(struct model *m)
{
    uint64_t total = 0, before = 0;
    for (size_t i = 0; i < m->count; i++)
        total += m->tensors[i].bytes;
    for (size_t i = 0; i < m->count; i++) {
        struct tensor *t = &m->tensors[i];
        int64_t shard = (int64_t)((double)before / (double)(total ? total : 1) * (double)m->shards);
        if (strstr(t->name, ".k_proj.weight") || strstr(t->name, ".experts.1.up_proj.weight"))
            shard++;
        t->shard = (int)(shard % m->shards);
        before += t->bytes;
    }
}

/* ---- Files ----------------------------------------------------------------------------------------------- */

/* Every value that 16 random bits can stand for, as the file has it. */
static void make_table(const struct tensor *t, void *table)
{
    static float values[TABLE];
    double squares = 0;
    for (int i = 0; i < TABLE; i++)
        squares += pow(fabs(quantiles[i]), 2 * t->tail);
    const double unit = t->tail == 1 ? 1 : sqrt(TABLE / squares);
    for (int i = 0; i < TABLE; i++) {
        const double z = t->tail == 1 ? quantiles[i] : copysign(pow(fabs(quantiles[i]), t->tail) * unit, quantiles[i]);
        double v = 0;
        switch (t->fill) {
        case FILL_WEIGHT:
            v = z * t->size;
            break;
        case FILL_NORM:
            v = 1 + 0.1 * z;
            break;
        case FILL_FP8:
            v = fmax(-448, fmin(448, z * FP8_UNIT));
            break;
        case FILL_SCALE:
            v = t->size * exp2((i + 0.5) / TABLE - 0.5);
            break;
        case FILL_BITS:
            ((uint8_t *)table)[i] = (uint8_t)i;
            break;
        case FILL_POWER:
            ((uint8_t *)table)[i] = (uint8_t)(116 + i % 8);
            break;
        }
        values[i] = (float)v;
    }
    if (t->fill != FILL_BITS && t->fill != FILL_POWER)
        need(nib_encode(t->dtype, values, TABLE, table));
}

#define DRAW(type)                                                                  \
    for (size_t w = 0; w < words; w++) {                                            \
        const uint64_t r = mix(key + first + w);                                    \
        for (size_t j = 0; j < 4; j++)                                              \
            ((type *)out)[4 * w + j] = ((const type *)table)[r >> 16 * j & 0xFFFF]; \
    }

/* Four elements per word of the generator, from word `first` on. */
static void draw(const void *table, size_t element, uint64_t key, uint64_t first, size_t words, void *out)
{
    if (element == 1)
        DRAW(uint8_t)
    else if (element == 2)
        DRAW(uint16_t)
    else
        DRAW(uint32_t)
}

static void write_shard(const struct model *m, int shard, const char *path)
{
    enum { WORDS = 1 << 17 };
    static uint32_t table[TABLE];
    static uint32_t data[4 * WORDS];
    const struct tensor *last = NULL; /* whose table it is */
    nib_writer *writer = NULL;
    need(nib_writer_create(path, &writer));
    need(nib_writer_metadata(writer, "format", "pt"));
    for (size_t i = 0; i < m->count; i++)
        if (m->tensors[i].shard == shard)
            need(nib_writer_declare(writer, m->tensors[i].name, m->tensors[i].dtype, m->tensors[i].rank,
                                    m->tensors[i].shape));
    for (size_t i = 0; i < m->count; i++) {
        const struct tensor *t = &m->tensors[i];
        if (t->shard != shard)
            continue;
        if (!last || last->fill != t->fill || last->dtype != t->dtype || last->size != t->size || last->tail != t->tail)
            make_table(t, table);
        last = t;
        const size_t element = (size_t)nib_dtype_bits(t->dtype) / 8;
        const uint64_t key = hash(t->name, m->seed);
        for (uint64_t at = 0; at < t->bytes; at += 4 * WORDS * element) {
            const uint64_t left = t->bytes - at, most = 4 * WORDS * element;
            const size_t bytes = (size_t)(left < most ? left : most);
            draw(table, element, key, at / element / 4, (bytes / element + 3) / 4, data);
            need(nib_writer_write(writer, t->name, at, data, bytes));
        }
    }
    need(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

static FILE *create(const struct model *m, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", m->directory, name);
    FILE *file = fopen(path, "w");
    if (!file)
        die("%s: %s", path, strerror(errno));
    return file;
}

static void finish(FILE *file, const char *name)
{
    if (ferror(file) | fclose(file))
        die("%s: %s", name, strerror(errno));
}

static void write_text(const struct model *m, const char *name, const char *text)
{
    FILE *file = create(m, name);
    fputs(text, file);
    finish(file, name);
}

static void shard_name(const struct model *m, int shard, char *room, size_t bytes)
{
    if (m->shards == 1)
        snprintf(room, bytes, "model.safetensors");
    else
        snprintf(room, bytes, "model-%05d-of-%05d.safetensors", shard + 1, (int)m->shards);
}

static void write_index(const struct model *m)
{
    uint64_t total = 0;
    for (size_t i = 0; i < m->count; i++)
        total += m->tensors[i].bytes;
    FILE *file = create(m, "model.safetensors.index.json");
    fprintf(file, "{\n  \"metadata\": {\n    \"total_size\": %" PRIu64 "\n  },\n  \"weight_map\": {\n", total);
    for (size_t i = 0; i < m->count; i++) {
        char name[64];
        shard_name(m, m->tensors[i].shard, name, sizeof name);
        fprintf(file, "    \"%s\": \"%s\"%s\n", m->tensors[i].name, name, i + 1 < m->count ? "," : "");
    }
    fputs("  }\n}\n", file);
    finish(file, "model.safetensors.index.json");
}

static void write_config(const struct model *m)
{
    const struct family *f = m->family;
    const char *dtype = m->dtype == NIB_BF16 ? "bfloat16" : m->dtype == NIB_F16 ? "float16" : "float32";
    /* DeepSeek's MLPs are wider than its experts, every head has keys, and its size is what is rotated. */
    const bool mla = f->config == deepseek_config;
    FILE *file = create(m, "config.json");
    fprintf(file, "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"torch_dtype\": \"%s\", ", f->architecture,
            f->model_type, dtype);
    if (f->nested)
        fprintf(file, "\"tie_word_embeddings\": %s, \"text_config\": {\"model_type\": \"%s_text\", ",
                m->tied ? "true" : "false", f->model_type);
    fprintf(file,
            "\"hidden_size\": %" PRId64 ", \"intermediate_size\": %" PRId64 ", \"num_hidden_layers\": %" PRId64
            ", \"num_attention_heads\": %" PRId64 ", \"num_key_value_heads\": %" PRId64 ", \"head_dim\": %" PRId64
            ", \"vocab_size\": %" PRId64 ", \"hidden_act\": \"silu\", \"max_position_embeddings\": 2048"
            ", \"rms_norm_eps\": 1e-05, \"rope_theta\": 10000.0, \"attention_dropout\": 0.0"
            ", \"initializer_range\": 0.02, \"tie_word_embeddings\": %s, \"use_cache\": true"
            ", \"bos_token_id\": 1, \"eos_token_id\": 2",
            m->hidden, m->intermediate * (mla ? 2 : 1), m->layers, m->heads, mla ? m->heads : m->kv_heads,
            mla ? ROPE : m->head_dim, m->vocab, m->tied ? "true" : "false");
    f->config(m, file);
    if (f->nested)
        fprintf(file, "}, \"vision_config\": {\"hidden_size\": 64, \"depth\": 1, \"num_heads\": 4}");
    fputs("}\n", file);
    finish(file, "config.json");
}

static const char *const tokenizer =
    "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [{\"id\": 0, \"content\": "
    "\"<unk>\", "
    "\"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": true}, {\"id\": "
    "1, "
    "\"content\": \"<s>\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
    "\"special\": "
    "true}, {\"id\": 2, \"content\": \"</s>\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
    "\"normalized\": false, \"special\": true}], \"normalizer\": null, \"pre_tokenizer\": {\"type\": \"ByteLevel\", "
    "\"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": true}, \"post_processor\": null, \"decoder\": "
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": true, \"use_regex\": true}, \"model\": "
    "{\"type\": \"BPE\", \"dropout\": null, \"unk_token\": \"<unk>\", \"continuing_subword_prefix\": null, "
    "\"end_of_word_suffix\": null, \"fuse_unk\": false, \"vocab\": {\"<unk>\": 0, \"<s>\": 1, \"</s>\": 2, \"a\": 3, "
    "\"b\": 4, \"ab\": 5}, \"merges\": [\"a b\"]}}\n";

static void write_directory(struct model *m)
{
    char path[4096], name[64];
    if (mkdir(m->directory, 0777) && errno != EEXIST)
        die("%s: %s", m->directory, strerror(errno));
    snprintf(path, sizeof path, "%s/config.json", m->directory);
    struct stat there;
    if (!stat(path, &there))
        die("%s is there already: remove the directory, or name another one", path);
    for (int shard = 0; shard < m->shards; shard++) {
        shard_name(m, shard, name, sizeof name);
        snprintf(path, sizeof path, "%s/%s", m->directory, name);
        write_shard(m, shard, path);
    }
    if (m->shards > 1)
        write_index(m);
    write_text(m, "generation_config.json",
               "{\"_from_model_config\": true, \"bos_token_id\": 1, \"eos_token_id\": 2}\n");
    write_text(m, "tokenizer.json", tokenizer);
    write_text(m, "tokenizer_config.json",
               "{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"bos_token\": \"<s>\", \"eos_token\": \"</s>\", "
               "\"unk_token\": \"<unk>\"}\n");
    write_config(m); /* last: it says that the directory is complete */
}

/* ---- Command line ---------------------------------------------------------------------------------------- */

static const struct number {
    const char *name, *about;
    size_t offset;
    int64_t usual, least, most;
} values[] = {
    { "--layers", "layers", offsetof(struct model, layers), 2, 1, 10000 },
    { "--hidden", "size of a token", offsetof(struct model, hidden), 256, 16, 1 << 20 },
    { "--intermediate", "size within an MLP or an expert", offsetof(struct model, intermediate), 512, 16, 1 << 24 },
    { "--experts", "experts of a layer that has some", offsetof(struct model, experts), 4, 1, 1 << 20 },
    { "--heads", "heads of attention", offsetof(struct model, heads), 4, 1, 1 << 16 },
    { "--kv-heads", "of keys and values", offsetof(struct model, kv_heads), 2, 1, 1 << 16 },
    { "--head-dim", "size of a head; 0: hidden / heads", offsetof(struct model, head_dim), 0, 0, 1 << 16 },
    { "--vocab", "rows of the embedding", offsetof(struct model, vocab), 512, 3, 1 << 24 },
    { "--shards", "files", offsetof(struct model, shards), 1, 1, 99999 },
    { "--small", "so many layers of 16 x 256 besides, to make the index long", offsetof(struct model, small), 0, 0,
      10000000 },
    { "--seed", "of all numbers", offsetof(struct model, seed), 1, 0, INT64_MAX },
};
enum { NUMBERS = sizeof values / sizeof *values, FAMILIES = sizeof families / sizeof *families };

static void help(void)
{
    puts("usage: make_checkpoint [OPTION]... FOLDER\n\n"
         "Write a checkpoint with made-up weights, as Hugging Face's are. The same options give the same bytes.\n\n"
         "  --family NAME         the first of these without it:");
    for (int i = 0; i < FAMILIES; i++)
        printf("                          %-14s %s\n", families[i].name, families[i].about);
    for (int i = 0; i < NUMBERS; i++)
        printf("  %-14s N      %s (%" PRId64 ")\n", values[i].name, values[i].about, values[i].usual);
    puts("  --dtype bf16|f16|f32  of what is not quantized (bf16)\n"
         "  --laplace             weights from Laplace's distribution instead of Gauss's\n"
         "  --varied              some weights have heavier tails than others, as real ones do\n"
         "  --tied                no lm_head: the embedding is used for it\n"
         "  --linear NAME:RxC     one more linear layer of R x C; may be repeated\n"
         "  --help\n\n"
         "examples:\n"
         "  make_checkpoint --family demo --layers 4 --shards 2 /tmp/model\n"
         "  make_checkpoint --linear model.layers.0.mlp.wide:32768x49152 /tmp/with-a-3-GB-tensor");
}

static void take_number(struct model *m, const struct number *n, const char *text)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (*end || end == text || errno || value < n->least || value > n->most)
        die("%s takes a number from %" PRId64 " to %" PRId64 ", not %s", n->name, n->least, n->most, text);
    *(int64_t *)((char *)m + n->offset) = value;
}

static void parse(struct model *m, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i];
        int which = 0;
        if (!strcmp(option, "--help")) {
            help();
            exit(0);
        }
        if (option[0] != '-') {
            if (m->directory)
                die("one directory at a time, not %s and %s", m->directory, option);
            m->directory = option;
            continue;
        }
        if (!strcmp(option, "--laplace") || !strcmp(option, "--tied") || !strcmp(option, "--varied")) {
            *(option[2] == 'l' ? &m->laplace : option[2] == 't' ? &m->tied : &m->varied) = true;
            continue;
        }
        const char *value = i + 1 < argc ? argv[++i] : NULL;
        if (!value)
            die("%s: nothing follows it, or it is not known; --help has all options", option);
        while (which < NUMBERS && strcmp(option, values[which].name))
            which++;
        if (which < NUMBERS) {
            take_number(m, &values[which], value);
        } else if (!strcmp(option, "--family")) {
            for (m->family = families; m->family < families + FAMILIES && strcmp(m->family->name, value); m->family++)
                continue;
            if (m->family == families + FAMILIES)
                die("no family %s; --help has all of them", value);
        } else if (!strcmp(option, "--dtype")) {
            m->dtype = !strcmp(value, "bf16") ? NIB_BF16 : !strcmp(value, "f16") ? NIB_F16 : NIB_F32;
            if (m->dtype == NIB_F32 && strcmp(value, "f32"))
                die("--dtype takes bf16, f16 or f32, not %s", value);
        } else if (!strcmp(option, "--linear")) {
            if (m->n_wide == sizeof m->wide / sizeof *m->wide)
                die("--linear: %zu times is the most", m->n_wide);
            m->wide[m->n_wide++] = value;
        } else {
            die("no option %s; --help has all of them", option);
        }
    }
}

int main(int argc, char **argv)
{
    static struct model m = { .family = families, .dtype = NIB_BF16 };
    for (int i = 0; i < NUMBERS; i++)
        *(int64_t *)((char *)&m + values[i].offset) = values[i].usual;
    parse(&m, argc, argv);
    if (!m.directory) {
        help();
        return argc > 1;
    }
    if (!m.head_dim)
        m.head_dim = m.hidden / m.heads;
    if (!m.head_dim || m.heads % m.kv_heads)
        die("%" PRId64 " heads of %" PRId64 " and %" PRId64 " of keys do not fit together", m.heads, m.head_dim,
            m.kv_heads);
    if (m.hidden % 32 || m.intermediate % 32)
        die("--hidden and --intermediate take multiples of 32, not %" PRId64 " and %" PRId64, m.hidden, m.intermediate);
    make_quantiles(m.laplace);
    make_model(&m);
    deal(&m);
    write_directory(&m);
    uint64_t total = 0;
    for (size_t i = 0; i < m.count; i++) {
        total += m.tensors[i].bytes;
        free(m.tensors[i].name);
    }
    printf("%s: %s, %zu tensors, %.1f MB, %" PRId64 " %s\n", m.directory, m.family->model_type, m.count,
           (double)total * 1e-6, m.shards, m.shards == 1 ? "file" : "files");
    free(m.tensors);
    return 0;
}
