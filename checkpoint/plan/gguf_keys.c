/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_keys.c - the keys of a GGUF file that is made from a directory: hyperparameters out of config.json, with the
 * defaults that transformers gives each family, and what names and sizes say of the model.
 */
#include "plan/gguf_keys.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/gguf.h"

/* ---- config.json ---- */

const json_t *nib_plan_setting(const nib_plan *plan, const char *key)
{
    const json_t *const places[] = { json_object_get(plan->in->config, "text_config"), plan->in->config };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const json_t *value = json_object_get(places[i], key);
        if (value && !json_is_null(value))
            return value;
    }
    return NULL;
}

double nib_json_number(const json_t *object, const char *key, double otherwise)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

/* What transformers takes where config.json does not say. 0: there is none. */
static const struct defaults {
    int64_t positions, kv_heads, head_dim, sliding_window, experts, experts_used, expert_size;
    double epsilon, theta, local_theta;
} defaults[NIB_FAMILY_COUNT] = {
    [NIB_FAMILY_LLAMA] = { .positions = 2048, .epsilon = 1e-6, .theta = 1e4 },
    [NIB_FAMILY_MISTRAL] = { .positions = 131072, .kv_heads = 8, .epsilon = 1e-6, .theta = 1e4 },
    [NIB_FAMILY_QWEN2] = { .positions = 32768, .kv_heads = 32, .epsilon = 1e-6, .theta = 1e4 },
    [NIB_FAMILY_QWEN3] = { .positions = 32768, .kv_heads = 32, .head_dim = 128, .epsilon = 1e-6, .theta = 1e4 },
    [NIB_FAMILY_QWEN3_MOE] = { .positions = 32768,
                               .kv_heads = 4,
                               .experts = 128,
                               .experts_used = 8,
                               .expert_size = 768,
                               .epsilon = 1e-6,
                               .theta = 1e4 },
    [NIB_FAMILY_GEMMA3] = { .positions = 131072,
                            .kv_heads = 4,
                            .head_dim = 256,
                            .sliding_window = 4096,
                            .epsilon = 1e-6,
                            .theta = 1e6,
                            .local_theta = 1e4 },
    [NIB_FAMILY_GPT_OSS] = { .positions = 131072,
                             .kv_heads = 8,
                             .head_dim = 64,
                             .sliding_window = 128,
                             .experts = 128,
                             .experts_used = 4,
                             .epsilon = 1e-5,
                             .theta = 150000 },
};

static const struct defaults *defaults_of(const nib_plan *plan) { return &defaults[nib_ck_family(plan->architecture)]; }

/* An integer by one of its names; `otherwise` below 0: it must be there. */
static nib_status integer_of(const nib_plan *plan, const char *const *names, int64_t otherwise, int64_t *out)
{
    for (int i = 0; i < 2 && names[i]; i++) {
        const json_t *value = nib_plan_setting(plan, names[i]);
        if (!value)
            continue;
        if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > UINT32_MAX)
            return nib_fail(NIB_ERR_DATA, "%s: config.json: %s is no count", plan->in->path, names[i]);
        *out = json_integer_value(value);
        return NIB_OK;
    }
    *out = otherwise;
    return otherwise >= 0
               ? NIB_OK
               : nib_fail(NIB_ERR_DATA, "%s: config.json has no %s, which a GGUF file needs", plan->in->path, names[0]);
}

static int64_t setting_or(const nib_plan *plan, const char *key, int64_t otherwise)
{
    const json_t *value = nib_plan_setting(plan, key);
    return json_is_integer(value) ? json_integer_value(value) : otherwise;
}

int64_t nib_plan_head_dim(const nib_plan *plan)
{
    const int64_t heads = setting_or(plan, "num_attention_heads", 0), own = setting_or(plan, "head_dim", 0);
    if (own > 0)
        return own;
    if (defaults_of(plan)->head_dim)
        return defaults_of(plan)->head_dim;
    return heads > 0 ? setting_or(plan, "hidden_size", 0) / heads : 0;
}

const json_t *nib_plan_rope(const nib_plan *plan, const char *layers)
{
    const json_t *rope = nib_plan_setting(plan, "rope_parameters");
    const json_t *of_layers = json_object_get(rope, layers);
    if (json_is_object(of_layers))
        return of_layers;
    return rope ? rope : nib_plan_setting(plan, "rope_scaling");
}

/* ---- Hyperparameters ---- */

struct keys {
    nib_plan *plan;
    nib_gguf_plan *out;
};

static nib_status put_count(const struct keys *k, const char *key, int64_t value)
{
    char name[128];
    snprintf(name, sizeof name, "%s.%s", k->plan->architecture->gguf, key);
    return nib_gguf_put_integer(k->out, name, NIB_GGUF_KIND_U32, value);
}

static nib_status put_number(const struct keys *k, const char *key, double value)
{
    char name[128];
    snprintf(name, sizeof name, "%s.%s", k->plan->architecture->gguf, key);
    return nib_gguf_put_float(k->out, name, (float)value);
}

static nib_status put_word(const struct keys *k, const char *key, const char *value)
{
    char name[128];
    snprintf(name, sizeof name, "%s.%s", k->plan->architecture->gguf, key);
    return nib_gguf_put_string(k->out, name, value);
}

static nib_status put_counts(const struct keys *k)
{
    const struct defaults *d = defaults_of(k->plan);
    const enum nib_family family = nib_ck_family(k->plan->architecture);
    const int64_t heads = setting_or(k->plan, "num_attention_heads", -1);
    const bool is_llama = family == NIB_FAMILY_LLAMA || family == NIB_FAMILY_MISTRAL;
    const struct {
        const char *key, *names[2];
        int64_t otherwise;
        bool wanted;
    } rows[] = {
        { "block_count", { "num_hidden_layers" }, -1, true },
        { "context_length", { "max_position_embeddings" }, d->positions, true },
        { "embedding_length", { "hidden_size" }, -1, true },
        { "feed_forward_length", { "intermediate_size" }, -1, true },
        { "attention.head_count", { "num_attention_heads" }, -1, true },
        { "attention.head_count_kv", { "num_key_value_heads" }, d->kv_heads ? d->kv_heads : heads, true },
        { "vocab_size", { "vocab_size" }, -1, is_llama },
        { "attention.sliding_window", { "sliding_window" }, d->sliding_window, d->sliding_window > 0 },
        { "expert_count", { "num_experts", "num_local_experts" }, d->experts, d->experts > 0 },
        { "expert_used_count", { "num_experts_per_tok", "experts_per_token" }, d->experts_used, d->experts > 0 },
        { "expert_feed_forward_length", { "moe_intermediate_size" }, d->expert_size, d->expert_size > 0 },
        { "expert_feed_forward_length", { "intermediate_size" }, -1, family == NIB_FAMILY_GPT_OSS },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int64_t value = 0;
        if (!rows[i].wanted)
            continue;
        TRY(integer_of(k->plan, rows[i].names, rows[i].otherwise, &value));
        TRY(put_count(k, rows[i].key, value));
    }
    const bool says = is_llama || d->head_dim || nib_plan_setting(k->plan, "head_dim");
    const int64_t head_dim = nib_plan_head_dim(k->plan);
    if (says && (head_dim < 1 || head_dim > UINT32_MAX))
        return nib_fail(NIB_ERR_DATA, "%s: config.json: a head of %lld is none", k->plan->in->path,
                        (long long)head_dim);
    if (says) {
        TRY(put_count(k, "attention.key_length", head_dim));
        TRY(put_count(k, "attention.value_length", head_dim));
    }
    return is_llama ? put_count(k, "rope.dimension_count", head_dim) : NIB_OK;
}

/* Positions that are stretched beyond what the model was trained on. */
static nib_status put_rope_scaling(const struct keys *k, const json_t *rope)
{
    static const struct {
        const char *name, *key;
    } numbers[] = { { "extrapolation_factor", "rope.scaling.yarn_ext_factor" },
                    { "attention_factor", "rope.scaling.yarn_attn_factor" },
                    { "beta_fast", "rope.scaling.yarn_beta_fast" },
                    { "beta_slow", "rope.scaling.yarn_beta_slow" } };
    const char *type = json_string_value(json_object_get(rope, "rope_type"));
    if (!type)
        type = json_string_value(json_object_get(rope, "type"));
    const json_t *factor = json_object_get(rope, "factor");
    const bool yarn = type && !strcmp(type, "yarn"), linear = type && !strcmp(type, "linear");
    if (!json_is_number(factor) || (!yarn && !linear))
        return NIB_OK;
    TRY(put_word(k, "rope.scaling.type", type));
    TRY(put_number(k, "rope.scaling.factor", json_number_value(factor)));
    if (linear)
        return NIB_OK;
    const double trained = nib_json_number(
        rope, "original_max_position_embeddings",
        (double)setting_or(k->plan, "original_max_position_embeddings",
                           setting_or(k->plan, "max_position_embeddings", defaults_of(k->plan)->positions)));
    TRY(put_count(k, "rope.scaling.original_context_length", (int64_t)trained));
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const json_t *value = json_object_get(rope, numbers[i].name);
        if (json_is_number(value))
            TRY(put_number(k, numbers[i].key, json_number_value(value)));
    }
    return NIB_OK;
}

static double setting_number(const nib_plan *plan, const char *key, double otherwise)
{
    const json_t *value = nib_plan_setting(plan, key);
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

static nib_status put_numbers(const struct keys *k)
{
    const nib_plan *plan = k->plan;
    const struct defaults *d = defaults_of(plan);
    const json_t *rope = nib_plan_rope(plan, "full_attention"), *local = nib_plan_rope(plan, "sliding_attention");
    const json_t *cap = nib_plan_setting(plan, "final_logit_softcapping");
    TRY(put_number(k, "attention.layer_norm_rms_epsilon", setting_number(plan, "rms_norm_eps", d->epsilon)));
    TRY(put_rope_scaling(k, rope));
    TRY(put_number(k, "rope.freq_base",
                   nib_json_number(rope, "rope_theta", setting_number(plan, "rope_theta", d->theta))));
    if (d->local_theta > 0) {
        const double otherwise = setting_number(plan, "rope_local_base_freq", d->local_theta);
        TRY(put_number(k, "rope.freq_base_swa",
                       local == rope ? otherwise : nib_json_number(local, "rope_theta", otherwise)));
    }
    return json_is_number(cap) && json_number_value(cap) != 0
               ? put_number(k, "final_logit_softcapping", json_number_value(cap))
               : NIB_OK;
}

/* ---- What generation_config.json recommends ---- */

static nib_status put_sampling(const struct keys *k)
{
    static const struct {
        const char *names[2], *key;
        bool integer;
    } rows[] = {
        { { "top_k" }, "top_k", true },
        { { "top_p" }, "top_p", false },
        { { "min_p" }, "min_p", false },
        { { "xtc_probability" }, "xtc_probability", false },
        { { "xtc_threshold" }, "xtc_threshold", false },
        { { "temperature" }, "temp", false },
        { { "penalty_last_n" }, "penalty_last_n", true },
        { { "penalty_repeat", "repetition_penalty" }, "penalty_repeat", false },
        { { "mirostat" }, "mirostat", true },
        { { "mirostat_tau" }, "mirostat_tau", false },
        { { "mirostat_eta" }, "mirostat_eta", false },
    };
    json_t *config = NULL;
    if (nib_ck_read_object(k->plan->in, "generation_config.json", &config) || !config)
        return NIB_OK; /* it is advice: one that cannot be read is none */
    nib_status status = NIB_OK;
    for (size_t i = 0; i < sizeof rows / sizeof *rows && !status; i++) {
        char key[64];
        const json_t *value = json_object_get(config, rows[i].names[0]);
        if (!value && rows[i].names[1])
            value = json_object_get(config, rows[i].names[1]);
        snprintf(key, sizeof key, "general.sampling.%s", rows[i].key);
        if (rows[i].integer && json_is_integer(value) && llabs(json_integer_value(value)) <= INT32_MAX)
            status = nib_gguf_put_integer(k->out, key, NIB_GGUF_KIND_I32, json_integer_value(value));
        else if (!rows[i].integer && json_is_number(value))
            status = nib_gguf_put_float(k->out, key, (float)json_number_value(value));
    }
    json_decref(config);
    return status;
}

/* ---- The whole ---- */

static nib_status put_all(const struct keys *k)
{
    TRY(nib_gguf_put_string(k->out, "general.architecture", k->plan->architecture->gguf));
    TRY(nib_gguf_put_string(k->out, "general.type", "model"));
    TRY(put_sampling(k));
    TRY(nib_plan_put_names(k->plan, k->out));
    TRY(put_counts(k));
    TRY(put_numbers(k));
    return nib_plan_put_tokenizer(k->plan, k->out);
}

nib_status nib_plan_make_keys(nib_plan *plan)
{
    TRY(nib_gguf_plan_create("model.gguf", &plan->keys));
    const struct keys k = { plan, plan->keys };
    const nib_status status = put_all(&k);
    return status == NIB_ERR_ARG ? nib_fail(NIB_ERR_DATA, "%s: %s", plan->in->path, nib_last_error()) : status;
}
