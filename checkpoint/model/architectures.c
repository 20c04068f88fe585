/* SPDX-License-Identifier: Apache-2.0 */
/*
 * architectures.c - tables of the families that nib writes as GGUF, after llama.cpp's converter.
 */
#include "model/architectures.h"

#include <stdio.h>
#include <stdlib.h>

#include "io/names.h"
#include "model/folds.h"

const struct nib_architecture nib_architectures[NIB_FAMILY_COUNT] = {
    [NIB_FAMILY_LLAMA] = { { "llama" }, "llama", .permuted = true },
    [NIB_FAMILY_MISTRAL] = { { "mistral" }, "llama", .permuted = true },
    [NIB_FAMILY_QWEN2] = { { "qwen2" }, "qwen2", .permuted = false },
    [NIB_FAMILY_QWEN3] = { { "qwen3" }, "qwen3", .permuted = false },
    [NIB_FAMILY_QWEN3_MOE] = { { "qwen3_moe" }, "qwen3moe", .permuted = false },
    [NIB_FAMILY_GEMMA3] = { { "gemma3", "gemma3_text" }, "gemma3", .norm_shift = 1 },
    [NIB_FAMILY_GPT_OSS] = { { "gpt_oss" }, "gpt-oss", .expert_biases = true },
};

#define FAMILY(name) (1u << NIB_FAMILY_##name)
#define SANDWICH (FAMILY(GEMMA3) | FAMILY(GPT_OSS)) /* a norm of their own behind attention */
#define MIXTURE (FAMILY(QWEN3_MOE) | FAMILY(GPT_OSS))
#define HEAD_NORMS (FAMILY(QWEN3) | FAMILY(QWEN3_MOE) | FAMILY(GEMMA3))
#define ALL ((1u << NIB_FAMILY_COUNT) - 1)

/* Modules without what stands before them, "model.layers.N." or "model.". */
static const struct row {
    const char *module, *gguf;
    uint32_t families;
} layer_rows[] = {
    { "input_layernorm", "attn_norm", ALL },
    { "self_attn.q_proj", "attn_q", ALL },
    { "self_attn.k_proj", "attn_k", ALL },
    { "self_attn.v_proj", "attn_v", ALL },
    { "self_attn.o_proj", "attn_output", ALL },
    { "self_attn.q_norm", "attn_q_norm", HEAD_NORMS },
    { "self_attn.k_norm", "attn_k_norm", HEAD_NORMS },
    { "self_attn.sinks", "attn_sinks", FAMILY(GPT_OSS) },
    { "post_attention_layernorm", "ffn_norm", ALL & ~SANDWICH },
    { "post_attention_layernorm", "post_attention_norm", SANDWICH },
    { "pre_feedforward_layernorm", "ffn_norm", FAMILY(GEMMA3) },
    { "post_feedforward_layernorm", "post_ffw_norm", FAMILY(GEMMA3) },
    { "mlp.gate_proj", "ffn_gate", ALL & ~FAMILY(GPT_OSS) },
    { "mlp.up_proj", "ffn_up", ALL & ~FAMILY(GPT_OSS) },
    { "mlp.down_proj", "ffn_down", ALL & ~FAMILY(GPT_OSS) },
    { "mlp.gate", "ffn_gate_inp", FAMILY(QWEN3_MOE) },
    { "mlp.router", "ffn_gate_inp", FAMILY(GPT_OSS) },
    { "mlp.experts.gate_proj", "ffn_gate_exps", MIXTURE },
    { "mlp.experts.up_proj", "ffn_up_exps", MIXTURE },
    { "mlp.experts.down_proj", "ffn_down_exps", MIXTURE },
}, model_rows[] = {
    { "model.embed_tokens", "token_embd", ALL },
    { "model.norm", "output_norm", ALL },
    { "lm_head", "output", ALL },
};

/* Parts that are no language model, and leftovers that nobody reads. */
static const char *const skipped[] = {
    "vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.",
    "visual.",       "model.visual."
};
static const char *const skipped_ends[] = { ".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias" };

const struct nib_architecture *nib_ck_architecture(const nib_checkpoint *c)
{
    for (int i = 0; i < NIB_FAMILY_COUNT; i++)
        for (int j = 0; j < 2 && nib_architectures[i].model_types[j]; j++)
            if (!strcmp(c->model_type, nib_architectures[i].model_types[j]))
                return &nib_architectures[i];
    return NULL;
}

const char *nib_ck_architecture_names(char *text, size_t bytes)
{
    size_t used = 0;
    for (int i = 0; i < NIB_FAMILY_COUNT && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s",
                                 i == 0                      ? ""
                                 : i == NIB_FAMILY_COUNT - 1 ? " and "
                                                             : ", ",
                                 nib_architectures[i].model_types[0]);
    return text;
}

static bool is_skipped(const char *name)
{
    for (size_t i = 0; i < sizeof skipped / sizeof *skipped; i++)
        if (!strncmp(name, skipped[i], strlen(skipped[i])))
            return true;
    for (size_t i = 0; i < sizeof skipped_ends / sizeof *skipped_ends; i++)
        if (nib_ck_ends_with(name, skipped_ends[i]))
            return true;
    return false;
}

/* The name as the language model alone has it: "language_model." may stand first or behind "model.". */
static const char *own_name(const char *name, char *buffer, size_t bytes)
{
    static const char inner[] = "language_model.";
    const size_t n = strlen(inner), before = !strncmp(name, "model.", 6) ? 6 : 0;
    if (strncmp(name + before, inner, n) != 0)
        return name;
    snprintf(buffer, bytes, "%.*s%s", (int)before, name, name + before + n);
    return buffer;
}

/* Cut "experts.3." down to "experts.": the number, or -1. */
static int64_t take_expert(char *module)
{
    char *at = strstr(module, ".experts."), *end;
    if (!at || at[9] < '0' || at[9] > '9')
        return -1;
    const long long number = strtoll(at + 9, &end, 10);
    if (*end != '.' || number < 0)
        return -1;
    memmove(at + 9, end + 1, strlen(end));
    return number;
}

static const struct row *find_row(const struct row *rows, size_t n, const struct nib_architecture *a,
                                  const char *module)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(rows[i].module, module) && (rows[i].families >> nib_ck_family(a) & 1))
            return &rows[i];
    return NULL;
}

/* Name and expert of a module. */
static bool place_module(const struct nib_architecture *a, const char *name, struct nib_gguf_place *out)
{
    static const char layers[] = "model.layers.";
    char buffer[256], module[256];
    const char *own = own_name(name, buffer, sizeof buffer);
    const struct row *row;
    *out = (struct nib_gguf_place){ .part = ".weight", .expert = -1, .step = 1 };
    if (strlen(own) >= sizeof module)
        return false;
    if (strncmp(own, layers, strlen(layers)) != 0) {
        row = find_row(model_rows, sizeof model_rows / sizeof *model_rows, a, own);
        snprintf(out->name, sizeof out->name, "%s", row ? row->gguf : "");
        return row != NULL;
    }
    char *end;
    const char *digits = own + strlen(layers);
    const long long layer = *digits >= '0' && *digits <= '9' ? strtoll(digits, &end, 10) : -1;
    if (layer < 0 || *end != '.')
        return false;
    snprintf(module, sizeof module, "%s", end + 1);
    out->expert = take_expert(module);
    row = find_row(layer_rows, sizeof layer_rows / sizeof *layer_rows, a, module);
    if (!row || (out->expert >= 0) != (strstr(row->gguf, "_exps") != NULL))
        return false;
    snprintf(out->name, sizeof out->name, "blk.%lld.%s", layer, row->gguf);
    out->plain = nib_ck_ends_with(row->gguf, "_norm") || !strcmp(row->gguf, "ffn_gate_inp");
    return true;
}

/* Rows of q and k go by heads, and so do their biases. */
static bool place_heads(const nib_checkpoint *c, const struct nib_architecture *a, int64_t rows,
                        struct nib_gguf_place *out)
{
    const bool q = nib_ck_ends_with(out->name, ".attn_q"), k = nib_ck_ends_with(out->name, ".attn_k");
    if (!a->permuted || (!q && !k))
        return true;
    const int64_t heads = nib_ck_config_int(c, "num_attention_heads", 0);
    const int64_t own = q ? heads : nib_ck_config_int(c, "num_key_value_heads", heads);
    if (own < 1 || rows % (2 * own))
        return false;
    out->head_rows = rows / own;
    return true;
}

bool nib_ck_place_weight(const nib_checkpoint *c, const struct nib_architecture *a, const char *weight, int64_t rows,
                         struct nib_gguf_place *out)
{
    if (is_skipped(weight)) {
        *out = (struct nib_gguf_place){ .expert = -1 };
        return true;
    }
    return place_module(a, weight, out) && place_heads(c, a, rows, out);
}

/* Biases of stacks, [E, N]: gate and up alternate. */
static int place_expert_biases(const struct nib_architecture *a, const char *name, struct nib_gguf_place out[2])
{
    static const struct {
        const char *end, *parts[2];
    } stacks[] = { { "experts.gate_up_proj_bias", { "experts.0.gate_proj", "experts.0.up_proj" } },
                   { "experts.down_proj_bias", { "experts.0.down_proj", NULL } } };
    for (size_t i = 0; a->expert_biases && i < sizeof stacks / sizeof *stacks; i++) {
        char module[256];
        const int parts = stacks[i].parts[1] ? 2 : 1;
        if (!nib_ck_ends_with(name, stacks[i].end))
            continue;
        for (int part = 0; part < parts; part++) {
            const int n = snprintf(module, sizeof module, "%.*s%s", (int)(strlen(name) - strlen(stacks[i].end)), name,
                                   stacks[i].parts[part]);
            if (n < 0 || (size_t)n >= sizeof module || !place_module(a, module, &out[part]))
                return -1;
            out[part].part = ".bias";
            out[part].expert = -1;
            out[part].first = part;
            out[part].step = parts;
        }
        return parts;
    }
    return -1;
}

int nib_ck_place_tensor(const nib_checkpoint *c, const struct nib_architecture *a, const char *tensor, int64_t rows,
                        struct nib_gguf_place out[2])
{
    static const char *const parts[] = { ".weight", ".bias", "" };
    char module[256];
    if (is_skipped(tensor))
        return 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!nib_ck_ends_with(tensor, parts[i]) || strlen(tensor) >= sizeof module)
            continue;
        snprintf(module, sizeof module, "%.*s", (int)(strlen(tensor) - strlen(parts[i])), tensor);
        if (!place_module(a, module, &out[0]) || out[0].expert >= 0)
            continue;
        const bool norm = out[0].plain && strstr(out[0].name, "norm");
        if (*parts[i])
            out[0].part = parts[i];
        out[0].shift = norm || !strcmp(out[0].name, "output_norm") ? a->norm_shift : 0;
        return place_heads(c, a, rows, &out[0]) ? 1 : -1;
    }
    return place_expert_biases(a, tensor, out);
}

/* Architectures in which llama.cpp multiplies with the tensor scale of feed-forward weights; in all others it has no
 * place for one there, and would compute with weights that are thousands of times too large. */
static const char *const scaled[] = { "llama",      "mistral3",       "qwen3",      "qwen3moe",   "qwen35", "qwen35moe",
                                      "qwen3next",  "cohere2",        "cohere2moe", "deepseek32", "gemma4", "glm-dsa",
                                      "nemotron_h", "nemotron_h_moe", "mellum",     "nanbeige" };

bool nib_ck_ignores_scale(const char *architecture, const char *weight)
{
    if (!strstr(weight, ".ffn_") || strstr(weight, "ffn_gate_inp"))
        return false;
    for (size_t i = 0; i < sizeof scaled / sizeof *scaled; i++)
        if (!strcmp(architecture, scaled[i]))
            return false;
    return true;
}

/* ---- llama.cpp's names, whatever the family ---- */

/* Ends of module names, the longer first where one is the other's end. Feed-forward weights have "_exps" behind them
 * where they are experts' and "_shexp" where they are shared ones'. */
static const struct llama_name {
    const char *end, *gguf;
} llama_names[] = {
    { "q_proj", "attn_q" },
    { "k_proj", "attn_k" },
    { "v_proj", "attn_v" },
    { "o_proj", "attn_output" },
    { "qkv_proj", "attn_qkv" },
    { "query_key_value", "attn_qkv" },
    { "attn.c_attn", "attn_qkv" },
    { "linear_attn.in_proj_qkv", "attn_qkv" },
    { "linear_attn.in_proj_z", "attn_gate" },
    { "linear_attn.out_proj", "ssm_out" },
    { "mixer.in_proj", "ssm_in" },
    { "mixer.out_proj", "ssm_out" },
    { "attn.c_proj", "attn_output" },
    { "self_attn.out_proj", "attn_output" },
    { "self_attn.dense", "attn_output" },
    { "attention.dense", "attn_output" },
    { "q_a_proj", "attn_q_a" },
    { "q_b_proj", "attn_q_b" },
    { "kv_a_proj_with_mqa", "attn_kv_a_mqa" },
    { "kv_b_proj", "attn_kv_b" },
    { "gate_proj", "ffn_gate" },
    { "up_proj", "ffn_up" },
    { "down_proj", "ffn_down" },
    { "gate_up_proj", "ffn_up" }, /* Phi-3's, which llama.cpp leaves in one */
    { "w1", "ffn_gate" },
    { "w3", "ffn_up" },
    { "w2", "ffn_down" },
    { "mlp.c_fc", "ffn_up" },
    { "mlp.c_proj", "ffn_down" },
    { "dense_h_to_4h", "ffn_up" },
    { "dense_4h_to_h", "ffn_down" },
    { "fc1", "ffn_up" },
    { "fc2", "ffn_down" },
};

/* Behind "layers.3." of a name: the number, and what follows it; NULL where there is none. */
static const char *behind_layer(const char *name, long long *layer)
{
    static const char *const words[] = { "layers.", "h.", "blocks." };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char *end;
        const char *at = strstr(name, words[i]);
        while (at && at != name && at[-1] != '.')
            at = strstr(at + 1, words[i]);
        if (!at || at[strlen(words[i])] < '0' || at[strlen(words[i])] > '9')
            continue;
        *layer = strtoll(at + strlen(words[i]), &end, 10);
        if (*end == '.')
            return end + 1;
    }
    return NULL;
}

bool nib_ck_llama_name(const char *module, char *name, size_t bytes, int64_t *expert)
{
    char rest[256];
    long long layer;
    const char *within = behind_layer(module, &layer);
    *expert = -1;
    if (!within) {
        const bool head = !strcmp(module, "lm_head");
        snprintf(name, bytes, "output");
        return head;
    }
    if (strlen(within) + 2 > sizeof rest)
        return false;
    snprintf(rest, sizeof rest, ".%s", within); /* a dot before every part */
    *expert = take_expert(rest);
    const bool experts = strstr(rest, ".experts."), shared = strstr(rest, ".shared_");
    for (size_t i = 0; i < sizeof llama_names / sizeof *llama_names; i++) {
        const size_t n = strlen(rest), m = strlen(llama_names[i].end);
        if (n <= m || rest[n - m - 1] != '.' || strcmp(rest + n - m, llama_names[i].end) != 0)
            continue;
        const bool feed_forward = !strncmp(llama_names[i].gguf, "ffn_", 4);
        const int used = snprintf(name, bytes, "blk.%lld.%s%s", layer, llama_names[i].gguf,
                                  feed_forward && experts  ? "_exps"
                                  : feed_forward && shared ? "_shexp"
                                                           : "");
        return (size_t)used < bytes;
    }
    return false;
}

/* ---- The same weight in two checkpoints ---- */

static bool is_gguf(const nib_checkpoint *c) { return c->n_files && c->files[0].gguf; }

static bool find_weight(const nib_checkpoint *c, const char *name, size_t *index)
{
    return nib_checkpoint_find_weight(c, name, index) == NIB_OK;
}

/* From other files to GGUF. */
static bool find_in_gguf(const nib_checkpoint *from, const nib_checkpoint *gguf, size_t *found, struct nib_ck_weight *w)
{
    const struct nib_architecture *a = nib_ck_architecture(from);
    struct nib_gguf_place place;
    char name[96];
    if (!a || !gguf->architecture || strcmp(a->gguf, gguf->architecture) != 0 ||
        !nib_ck_place_weight(from, a, w->name, w->rows, &place) || !*place.name)
        return false;
    snprintf(name, sizeof name, place.expert < 0 ? "%s" : "%s.%lld", place.name, (long long)place.expert);
    w->head_rows = place.head_rows;
    return find_weight(gguf, name, found);
}

/* And back: the name that the table has, behind whatever the model of text is called. */
static bool find_from_gguf(const char *name, const nib_checkpoint *to, size_t *found, struct nib_ck_weight *w)
{
    static const char *const prefixes[] = { "", "language_model.", "model.language_model." };
    const struct nib_architecture *a = nib_ck_architecture(to);
    long long layer = -1, expert = -1;
    char module[64];
    const bool in_layer = sscanf(name, "blk.%lld.%63[^.].%lld", &layer, module, &expert) >= 2;
    if (!in_layer)
        snprintf(module, sizeof module, "%s", name);
    const struct row *rows = in_layer ? layer_rows : model_rows;
    const size_t n = in_layer ? sizeof layer_rows / sizeof *layer_rows : sizeof model_rows / sizeof *model_rows;
    for (size_t i = 0; i < n && a; i++) {
        if (strcmp(rows[i].gguf, module) != 0 || !(rows[i].families >> nib_ck_family(a) & 1))
            continue;
        for (size_t p = 0; p < sizeof prefixes / sizeof *prefixes; p++) {
            char full[256], last[128];
            const char *dot = strrchr(rows[i].module, '.');
            struct nib_gguf_place place;
            if (expert >= 0 && dot)
                snprintf(last, sizeof last, "%.*s.%lld%s", (int)(dot - rows[i].module), rows[i].module, expert, dot);
            else
                snprintf(last, sizeof last, "%s", rows[i].module);
            const bool within = p == 2 && !in_layer && !strncmp(last, "model.", 6);
            if (in_layer)
                snprintf(full, sizeof full, "%s%slayers.%lld.%s", prefixes[p], p == 2 ? "" : "model.", layer, last);
            else
                snprintf(full, sizeof full, "%s%s", prefixes[p], last + (within ? 6 : 0));
            if (!find_weight(to, full, found) || !nib_ck_place_weight(to, a, full, to->weights[*found].rows, &place))
                continue;
            *w = to->weights[*found];
            w->head_rows = place.head_rows;
            return true;
        }
    }
    return false;
}

static bool find_counterpart(const nib_checkpoint *a, size_t index, const nib_checkpoint *b, size_t *found,
                             struct nib_ck_weight *wa, struct nib_ck_weight *wb)
{
    *wa = a->weights[index];
    if (find_weight(b, wa->name, found) || (is_gguf(b) && !is_gguf(a) && find_in_gguf(a, b, found, wa))) {
        *wb = b->weights[*found];
        return true;
    }
    return is_gguf(a) && !is_gguf(b) && find_from_gguf(wa->name, b, found, wb);
}

bool nib_ck_counterpart(const nib_checkpoint *a, size_t index, const nib_checkpoint *b, size_t *found,
                        struct nib_ck_weight *wa, struct nib_ck_weight *wb)
{
    if (!find_counterpart(a, index, b, found, wa, wb))
        return false;
    nib_ck_fold_alike(a, wa, b, wb);
    return true;
}
