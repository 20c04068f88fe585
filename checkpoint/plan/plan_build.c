/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_build.c - from what becomes of every weight to the tensors of the output. All plans go through here: they differ
 * in the actions of their rows.
 */
#include "plan/plan.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

struct maker {
    nib_plan *plan;
    uint32_t *order;           /* source tensors, as they lie */
    uint32_t *by_data, *first; /* weights by their data tensor: by_data[first[t]..first[t + 1] - 1] */
    struct keyed *keyed;       /* weights in sets */
    size_t n_keyed;
    uint32_t *group;  /* of each source weight that is quantized */
    uint32_t *stack;  /* of plan->restored, by source tensor: data of its members, and their biases */
    uint32_t *placed; /* GGUF from other files: experts by the tensor they go to, and by their numbers in it */
    size_t n_placed;
};

static void destroy_maker(struct maker *m)
{
    nib_free(m->order);
    nib_free(m->by_data);
    nib_free(m->first);
    nib_free(m->keyed);
    nib_free(m->group);
    nib_free(m->stack);
    nib_free(m->placed);
}

/* ---- Stacks of experts ---- */

/* Whether the matrices of a tensor are written as one stack, as the source has them. */
static bool stays_whole(const struct maker *m, uint32_t tensor)
{
    const nib_plan *plan = m->plan;
    const uint32_t begin = m->first[tensor], end = m->first[tensor + 1];
    if (begin == end || plan->in->weights[m->by_data[begin]].index < 0)
        return false;
    const nib_action action = plan->rows[m->by_data[begin]].action;
    for (uint32_t i = begin; i < end; i++)
        if (plan->rows[m->by_data[i]].action != action)
            return false;
    if (action == NIB_ACTION_KEEP) /* it is written anew, scaled */
        return nib_plan_columns(plan, m->by_data[begin]) || nib_plan_divisors(plan, m->by_data[end - 1]);
    if (!nib_ck_keeps_stacks(plan->in))
        return false;
    return action == NIB_ACTION_DEQUANTIZE || (action != NIB_ACTION_KEEP && nib_ck_stack_layout(plan->format));
}

/* ---- Sets ---- */

/* Weights with equal keys share a tensor scale, and are quantized together or not at all. */
struct keyed {
    const char *key;
    uint32_t weight;
};

static int by_key(const void *left, const void *right)
{
    const struct keyed *a = left, *b = right;
    const int order = strcmp(a->key, b->key);
    return order ? order : a->weight < b->weight ? -1 : a->weight > b->weight;
}

/* One of ModelOpt's stacks has one tensor scale; elsewhere it is what servers fuse. llama.cpp fuses nothing. */
static nib_status find_keys(struct maker *m)
{
    nib_plan *plan = m->plan;
    const nib_checkpoint *in = plan->in;
    const bool stacks = nib_ck_stack_layout(plan->format) && nib_ck_keeps_stacks(in);
    m->keyed = nib_alloc((in->n_weights + 1) * sizeof *m->keyed);
    if (!m->keyed)
        return no_memory();
    for (uint32_t i = 0; i < in->n_weights; i++) {
        char buffer[1024];
        const struct nib_ck_weight *w = &in->weights[i];
        const char *key = NULL;
        if (stacks && w->index >= 0)
            key = nib_plan_string(plan, "[%s", in->tensors[w->tensor[NIB_ROLE_DATA]].name);
        else if (!plan->gguf && nib_ck_fused_key(w->name, buffer, sizeof buffer))
            key = nib_plan_string(plan, "%s", buffer);
        else
            continue;
        if (!key)
            return no_memory();
        m->keyed[m->n_keyed++] = (struct keyed){ key, i };
    }
    qsort(m->keyed, m->n_keyed, sizeof *m->keyed, by_key);
    return NIB_OK;
}

static size_t end_of_set(const struct maker *m, size_t begin)
{
    size_t end = begin + 1;
    while (end < m->n_keyed && !strcmp(m->keyed[begin].key, m->keyed[end].key))
        end++;
    return end;
}

/* Servers reject a fused matrix of which one part is quantized and another is not. */
static nib_status keep_whole_sets(struct maker *m)
{
    nib_plan *plan = m->plan;
    for (size_t begin = 0, end; begin < m->n_keyed; begin = end) {
        uint32_t kept = NIB_NONE;
        end = end_of_set(m, begin);
        for (size_t i = begin; i < end; i++)
            if (!nib_plan_is_quantized(plan, m->keyed[i].weight))
                kept = m->keyed[i].weight;
        for (size_t i = begin; i < end && kept != NIB_NONE && nib_ck_formats[plan->format].fused; i++) {
            struct nib_out_row *row = &plan->rows[m->keyed[i].weight];
            if (!nib_plan_is_quantized(plan, m->keyed[i].weight))
                continue;
            row->action = nib_plan_keep_action(plan, &plan->in->weights[m->keyed[i].weight]);
            row->raised = plan->rows[kept].raised;
            row->reason = nib_plan_string(plan, "servers fuse it with %s, which stays", plan->in->weights[kept].name);
            if (!row->reason)
                return no_memory();
        }
    }
    return NIB_OK;
}

static size_t bytes_before_expert(const char *name)
{
    const char *const at = strstr(name, ".experts.");
    return at ? (size_t)(at - name) + strlen(".experts.") : 0;
}

/* The first weight of each weight's set. Servers fuse all experts of a layer too, though not under one tensor scale; they
 * stand side by side, since weights are in the order of their names. */
static void find_sets(const struct maker *m, uint32_t *set)
{
    const nib_checkpoint *in = m->plan->in;
    for (uint32_t i = 0; i < in->n_weights; i++)
        set[i] = i;
    for (size_t begin = 0, end; begin < m->n_keyed; begin = end) {
        end = end_of_set(m, begin);
        for (size_t i = begin; i < end; i++)
            set[m->keyed[i].weight] = m->keyed[begin].weight;
    }
    for (uint32_t i = 1; i < in->n_weights; i++) {
        const size_t bytes = bytes_before_expert(in->weights[i].name);
        if (bytes && !strncmp(in->weights[i - 1].name, in->weights[i].name, bytes))
            set[i] = set[i - 1];
    }
}

/* Of every set of which one is FP8 or stays for what it is worth, the rest too: nothing fuses with another format. */
static void raise_rest(nib_plan *plan, const uint32_t *set, uint8_t *fp8, uint8_t *plain)
{
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        fp8[set[i]] |= plan->rows[i].action == NIB_ACTION_FP8;
        plain[set[i]] |= plan->rows[i].raised;
    }
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        if (!nib_plan_is_quantized(plan, i))
            continue;
        if (plain[set[i]])
            nib_plan_leave_plain(plan, i, "servers fuse it with what stays");
        else if (fp8[set[i]])
            plan->rows[i].action = NIB_ACTION_FP8;
    }
}

/* What lists name and a budget is spent on, by whole sets. */
static nib_status raise_sets(struct maker *m)
{
    nib_plan *plan = m->plan;
    const size_t n = plan->in->n_weights + 1;
    uint32_t *set = nib_alloc(n * sizeof *set);
    uint8_t *any = nib_alloc_zeroed(2 * n);
    nib_status status = set && any ? NIB_OK : no_memory();
    if (!status) {
        find_sets(m, set);
        status = nib_plan_spend_budget(plan, set);
    }
    if (!status)
        raise_rest(plan, set, any, any + n);
    nib_free(set);
    nib_free(any);
    return status;
}

/* The matrices of a tensor of GGUF have one type: they change together or not at all. */
static nib_status keep_whole(struct maker *m, const uint32_t *weights, size_t n)
{
    nib_plan *plan = m->plan;
    uint32_t kept = NIB_NONE;
    for (size_t i = 0; i < n; i++)
        if (plan->rows[weights[i]].action != NIB_ACTION_QUANTIZE)
            kept = weights[i];
    for (size_t i = 0; i < n && kept != NIB_NONE; i++) {
        struct nib_out_row *row = &plan->rows[weights[i]];
        if (row->action != NIB_ACTION_QUANTIZE)
            continue;
        row->action = nib_plan_keep_action(plan, &plan->in->weights[weights[i]]);
        row->reason = nib_plan_string(plan, "it is in one tensor with %s, which stays", plan->in->weights[kept].name);
        if (!row->reason)
            return no_memory();
    }
    return NIB_OK;
}

/* How many of m->placed, from `first` on, go to one tensor. */
static size_t placed_experts(const struct maker *m, size_t first)
{
    const struct nib_gguf_place *places = m->plan->places;
    size_t n = 1;
    while (first + n < m->n_placed && !strcmp(places[m->placed[first]].name, places[m->placed[first + n]].name))
        n++;
    return n;
}

/* All experts of a tensor must be there, alike. */
static nib_status check_placed(const struct maker *m, size_t first, size_t n)
{
    const nib_checkpoint *in = m->plan->in;
    const struct nib_ck_weight *model = &in->weights[m->placed[first]];
    for (size_t i = 0; i < n; i++) {
        const struct nib_ck_weight *w = &in->weights[m->placed[first + i]];
        const int64_t expert = m->plan->places[m->placed[first + i]].expert;
        if (expert != (int64_t)i)
            return nib_fail(NIB_ERR_DATA, "%s: expert %zu is missing beside %s", in->path, i, nib_quote(w->name).text);
        if (w->rows != model->rows || w->cols != model->cols || w->format != model->format)
            return nib_fail(NIB_ERR_DATA, "%s: weight %s has another shape or format than its first expert", in->path,
                            nib_quote(w->name).text);
    }
    return NIB_OK;
}

/* Experts in the order of the tensors that they go to. Weights are in the order of their numbers already. */
static nib_status sort_placed(struct maker *m)
{
    const nib_plan *plan = m->plan;
    if (!plan->places)
        return NIB_OK;
    struct keyed *keyed = nib_alloc((plan->in->n_weights + 1) * sizeof *keyed);
    m->placed = nib_alloc(plan->in->n_weights * sizeof *m->placed);
    if (!keyed || !m->placed) {
        nib_free(keyed);
        return no_memory();
    }
    for (uint32_t i = 0; i < plan->in->n_weights; i++)
        if (plan->places[i].expert >= 0)
            keyed[m->n_placed++] = (struct keyed){ plan->places[i].name, i };
    qsort(keyed, m->n_placed, sizeof *keyed, by_key);
    for (size_t i = 0; i < m->n_placed; i++)
        m->placed[i] = keyed[i].weight;
    nib_free(keyed);
    for (size_t i = 0, n; i < m->n_placed; i += n) {
        n = placed_experts(m, i);
        TRY(check_placed(m, i, n));
    }
    return NIB_OK;
}

static nib_status keep_whole_stacks(struct maker *m)
{
    const nib_plan *plan = m->plan;
    for (size_t t = 0; t < plan->in->n_tensors && plan->gguf && !plan->places; t++)
        TRY(keep_whole(m, m->by_data + m->first[t], m->first[t + 1] - m->first[t]));
    for (size_t i = 0, n; i < m->n_placed; i += n) {
        n = placed_experts(m, i);
        TRY(keep_whole(m, m->placed + i, n));
    }
    return NIB_OK;
}

/* Formats other than NVFP4 go with the configuration that described them: what stays becomes plain values. In a GGUF
 * file every tensor says itself what it is. */
nib_action nib_plan_keep_action(const nib_plan *plan, const struct nib_ck_weight *w)
{
    if (plan->gguf &&
        (plan->in->tensors[w->tensor[NIB_ROLE_DATA]].ggml_type >= 0 || w->format == NIB_CHECKPOINT_FORMAT_MXFP4))
        return NIB_ACTION_KEEP;
    const bool plain = w->format == NIB_CHECKPOINT_FORMAT_PLAIN || nib_ck_is_nvfp4(w->format);
    return plain ? NIB_ACTION_KEEP : NIB_ACTION_DEQUANTIZE;
}

static nib_status add_group(struct maker *m, uint32_t weight, uint32_t *group)
{
    nib_plan *plan = m->plan;
    struct nib_out_group *groups = nib_grow(plan->groups, &plan->groups_capacity, plan->n_groups + 1, sizeof *groups);
    if (!groups)
        return no_memory();
    plan->groups = groups;
    const struct nib_ck_weight *w = &plan->in->weights[weight];
    groups[plan->n_groups] = (struct nib_out_group){ .first = NIB_NONE,
                                                     .dtype = nib_ck_exact_dtype(w),
                                                     .mxfp4 = w->format == NIB_CHECKPOINT_FORMAT_MXFP4,
                                                     .unit = plan->rows[weight].unit };
    *group = (uint32_t)plan->n_groups++;
    return NIB_OK;
}

/* Weights of a set have the same activations: the largest amax that any of its members has in the file counts. */
static nib_status raise_input(const struct maker *m, uint32_t weight, struct nib_out_group *group)
{
    const char *name = m->plan->in->weights[weight].name;
    const json_t *value = json_object_get(m->plan->amaxes, name);
    if (!value)
        return NIB_OK;
    const double amax = json_is_number(value) ? json_number_value(value) : 0;
    if (!(amax >= FLT_MIN && amax <= FLT_MAX))
        return nib_fail(NIB_ERR_ARG, "the activations file: the amax of %s is not a positive number in FP32's range",
                        nib_quote(name).text);
    group->input_amax = (float)amax > group->input_amax ? (float)amax : group->input_amax;
    return NIB_OK;
}

static nib_status make_groups(struct maker *m)
{
    nib_plan *plan = m->plan;
    const size_t n = plan->in->n_weights;
    m->group = nib_alloc((n + 1) * sizeof *m->group);
    if (!m->group)
        return no_memory();
    for (size_t i = 0; i < n; i++)
        m->group[i] = NIB_NONE;
    for (size_t begin = 0, end; begin < m->n_keyed; begin = end) {
        uint32_t group = NIB_NONE, members = 0, name = NIB_NONE;
        end = end_of_set(m, begin);
        for (size_t i = begin; i < end; i++) {
            const uint32_t weight = m->keyed[i].weight;
            if (plan->rows[weight].action != NIB_ACTION_QUANTIZE)
                continue;
            if (members++ == 0) {
                TRY(add_group(m, weight, &group));
                name = weight;
            }
            struct nib_out_group *g = &plan->groups[group];
            const struct nib_ck_weight *w = &plan->in->weights[weight];
            if (nib_ck_exact_dtype(w) != g->dtype)
                g->dtype = NIB_F32;
            g->mxfp4 &= w->format == NIB_CHECKPOINT_FORMAT_MXFP4;
            m->group[weight] = group;
            TRY(raise_input(m, weight, g));
        }
        for (size_t i = begin; i < end && members > 1; i++)
            if (m->group[m->keyed[i].weight] != NIB_NONE)
                plan->rows[m->keyed[i].weight].group_name = name;
    }
    for (uint32_t i = 0; i < n; i++)
        if (plan->rows[i].action == NIB_ACTION_QUANTIZE && m->group[i] == NIB_NONE) {
            TRY(add_group(m, i, &m->group[i]));
            TRY(raise_input(m, i, &plan->groups[m->group[i]]));
        }
    for (size_t i = 0; i < n; i++) {
        const bool asked = plan->amaxes && plan->rows[i].action == NIB_ACTION_QUANTIZE;
        if (asked && !(plan->groups[m->group[i]].input_amax > 0))
            return nib_fail(NIB_ERR_ARG, "the activations file has no amax for %s: add it, or leave the module out",
                            nib_quote(plan->in->weights[i].name).text);
    }
    return NIB_OK;
}

/* ---- Activations ---- */

/* Which norm a module's input comes from, as far as names tell: beside the module, or in its layer. */
static const struct norm_rule {
    const char *last;
    bool in_layer;
    const char *norms[2]; /* the first that is there */
} norm_rules[] = {
    { "q_proj", true, { "input_layernorm" } },
    { "k_proj", true, { "input_layernorm" } },
    { "v_proj", true, { "input_layernorm" } },
    { "qkv_proj", true, { "input_layernorm" } },
    { "q_a_proj", true, { "input_layernorm" } },
    { "kv_a_proj_with_mqa", true, { "input_layernorm" } },
    { "q_b_proj", false, { "q_a_layernorm" } },
    { "kv_b_proj", false, { "kv_a_layernorm" } },
    { "in_proj_qkv", true, { "input_layernorm" } },
    { "in_proj_z", true, { "input_layernorm" } },
    { "gate_proj", true, { "pre_feedforward_layernorm", "post_attention_layernorm" } },
    { "up_proj", true, { "pre_feedforward_layernorm", "post_attention_layernorm" } },
    { "gate_up_proj", true, { "pre_feedforward_layernorm", "post_attention_layernorm" } },
    { "w1", true, { "pre_feedforward_layernorm", "post_attention_layernorm" } },
    { "w3", true, { "pre_feedforward_layernorm", "post_attention_layernorm" } },
};

/* Families whose norms multiply with 1 + gamma. */
static const char *const plus_one[] = { "gemma", "qwen3_next", "qwen3_5" };

static bool has_plus_one(const nib_checkpoint *in)
{
    for (size_t i = 0; i < sizeof plus_one / sizeof *plus_one; i++)
        if (!strncmp(in->model_type, plus_one[i], strlen(plus_one[i])))
            return true;
    return false;
}

/* Bytes of "model.layers.3" in "model.layers.3.mlp.up_proj"; 0 where there is no layer. */
static int layer_bytes(const char *name)
{
    const char *layers = strstr(name, "layers.");
    if (!layers)
        return 0;
    const char *end = layers + strlen("layers.");
    end += strspn(end, "0123456789");
    return (int)(end - name);
}

static uint32_t norm_of(const nib_checkpoint *in, const struct nib_ck_weight *w)
{
    const char *dot = strrchr(w->name, '.'), *last = dot ? dot + 1 : w->name;
    for (size_t i = 0; i < sizeof norm_rules / sizeof *norm_rules; i++) {
        const struct norm_rule *rule = &norm_rules[i];
        if (strcmp(last, rule->last) != 0)
            continue;
        const int prefix = rule->in_layer ? layer_bytes(w->name) : (int)(last - w->name) - 1;
        for (int n = 0; n < 2 && rule->norms[n] && prefix > 0; n++) {
            char name[1024];
            const int length = snprintf(name, sizeof name, "%.*s.%s.weight", prefix, w->name, rule->norms[n]);
            const uint32_t tensor =
                length > 0 && (size_t)length < sizeof name ? nib_ck_find_tensor(in, name) : NIB_NONE;
            if (tensor == NIB_NONE)
                continue;
            const struct nib_ck_tensor *t = &in->tensors[tensor];
            const bool computes = t->dtype == NIB_F32 || t->dtype == NIB_BF16 || t->dtype == NIB_F16;
            if (t->rank == 1 && t->shape[0] == w->cols && computes)
                return tensor;
        }
    }
    return NIB_NONE;
}

/* ---- Tensors ---- */

static void note_bytes_out(struct maker *m, size_t before, uint32_t weight, uint32_t sharers)
{
    uint64_t bytes = 0;
    for (size_t i = before; i < m->plan->n_tensors; i++)
        bytes += m->plan->tensors[i].bytes;
    m->plan->rows[weight].bytes_out = bytes / sharers;
}

/* About what a weight will take, to decide whether it fits in the current file. */
static uint64_t coming_bytes(const struct nib_out_weight *w)
{
    const uint64_t elements = (uint64_t)w->source.rows * (uint64_t)w->source.cols;
    const bool values = w->action == NIB_ACTION_DEQUANTIZE || w->action == NIB_ACTION_KEEP;
    if (w->action == NIB_ACTION_FP8)
        return elements + (uint64_t)w->source.rows * sizeof(float);
    return values ? elements * (uint64_t)nib_dtypes[w->dtype].bits / 8 : elements / 16 * 9 + 8;
}

static void prepare_weight(const struct maker *m, uint32_t weight, struct nib_out_weight *w)
{
    const nib_plan *plan = m->plan;
    const struct nib_ck_weight *source = &plan->in->weights[weight];
    *w = (struct nib_out_weight){ .source = *source,
                                  .action = plan->rows[weight].action,
                                  .experts = 1,
                                  .dtype = source->dtype,
                                  .group = m->group ? m->group[weight] : NIB_NONE,
                                  .statistics = plan->rows[weight].input,
                                  .hessian = plan->rows[weight].hessian,
                                  .codes = plan->rows[weight].codes,
                                  .norm = NIB_NONE,
                                  .input = 1 };
    w->source.columns = nib_plan_columns(plan, weight);
    w->source.divisors = nib_plan_divisors(plan, weight);
    if (plan->gguf && w->action != NIB_ACTION_KEEP && w->action != NIB_ACTION_DEQUANTIZE)
        w->laying = NIB_LAY_GGUF;
    if (plan->dequantized_dtype != NIB_DTYPE_COUNT && w->action == NIB_ACTION_DEQUANTIZE)
        w->dtype = plan->dequantized_dtype;
    if (w->action == NIB_ACTION_QUANTIZE && plan->scheme == NIB_SCHEME_NVFP4) {
        const float amax = plan->groups[w->group].input_amax;
        w->norm = plan->activation == NIB_ACTIVATION_NORM ? norm_of(plan->in, source) : NIB_NONE;
        w->norm_plus_one = has_plus_one(plan->in);
        if (amax > 0) /* of a file, or of statistics */
            w->input = nib_plan_input_scale(plan, amax);
    }
    if (w->action == NIB_ACTION_DEQUANTIZE && !plan->gguf && nib_plan_was_transposed(plan, source))
        w->laying = NIB_LAY_STACK;
    w->as_in_source = w->action == NIB_ACTION_CONVERT;
    if (plan->places) {
        const struct nib_gguf_place *place = &plan->places[weight];
        w->name = place->name;
        w->source.head_rows = place->head_rows;
        w->dtype = place->plain ? NIB_F32 : plan->plain_dtype;
        if (w->action == NIB_ACTION_KEEP && source->format == NIB_CHECKPOINT_FORMAT_MXFP4)
            w->laying = NIB_LAY_MXFP4;
    }
}

float nib_plan_input_scale(const nib_plan *plan, float amax)
{
    const bool divisor = nib_ck_formats[plan->format].tensor_scale == NIB_TENSOR_SCALE_DIVISOR;
    return divisor ? 2688.0f / amax : amax / 2688.0f;
}

static void count_member(struct maker *m, const struct nib_out_weight *w)
{
    if (w->action != NIB_ACTION_QUANTIZE)
        return;
    struct nib_out_group *group = &m->plan->groups[w->group];
    if (group->first == NIB_NONE)
        group->first = (uint32_t)m->plan->n_weights - 1;
    group->members++;
}

static bool wants_input(const nib_plan *plan, const struct nib_out_weight *w)
{
    return w->action == NIB_ACTION_QUANTIZE ? plan->scheme == NIB_SCHEME_NVFP4
                                            : w->as_in_source && w->source.tensor[NIB_ROLE_INPUT] != NIB_NONE;
}

/* Scales of an expert's whole matrix, whose rows are those of its `parts` weights. */
static nib_status scale_expert(struct maker *m, const uint32_t *weights, uint32_t parts, struct nib_ck_weight *whole)
{
    nib_plan *plan = m->plan;
    float *rows = NULL;
    whole->columns = nib_plan_columns(plan, weights[0]);
    whole->divisors = NULL;
    for (uint32_t i = 0; i < parts; i++) {
        const struct nib_ck_weight *w = &plan->in->weights[weights[i]];
        const float *own = nib_plan_divisors(plan, weights[i]);
        if (!own)
            continue;
        if (!rows && !(rows = nib_plan_memory(plan, (size_t)whole->rows * sizeof *rows)))
            return no_memory();
        for (int64_t r = 0; r < whole->rows && !whole->divisors; r++)
            rows[r] = 1;
        whole->divisors = rows;
        for (int64_t r = 0; r < w->rows; r++)
            rows[w->row_first + r * w->row_step] = own[r];
    }
    return NIB_OK;
}

/* Each expert's whole matrix as one weight, beside the others in one tensor. */
static nib_status add_whole_stack(struct maker *m, uint32_t tensor)
{
    nib_plan *plan = m->plan;
    const uint32_t begin = m->first[tensor], end = m->first[tensor + 1];
    const size_t before = plan->n_tensors;
    struct nib_out_weight w;
    const int64_t experts = plan->in->tensors[tensor].shape[0];
    prepare_weight(m, m->by_data[begin], &w);
    w.source.rows = nib_ck_matrix_rows(plan->in, &w.source);
    w.source.row_first = 0;
    w.source.row_step = 1;
    w.laying = w.source.transposed || w.action != NIB_ACTION_KEEP ? NIB_LAY_STACK : NIB_LAY_ROWS;
    w.stacked = true;
    w.experts = experts;
    TRY(nib_plan_next(plan, plan->in->tensors[tensor].file, (uint64_t)experts * coming_bytes(&w)));
    for (int64_t e = 0; e < experts; e++) {
        w.source.index = w.index = e;
        const uint32_t parts = (end - begin) / (uint32_t)experts, *own = m->by_data + begin + (uint32_t)e * parts;
        const struct nib_out_row *row = &plan->rows[*own];
        TRY(scale_expert(m, own, parts, &w.source));
        w.statistics = row->input;
        w.hessian = row->hessian;
        TRY(nib_plan_add_weight(plan, &w, wants_input(plan, &w)));
        count_member(m, &w);
    }
    for (uint32_t i = begin; i < end; i++)
        note_bytes_out(m, before, m->by_data[i], end - begin);
    return NIB_OK;
}

/* A stack of GGUF, whose matrices are in one tensor. */
static nib_status add_gguf_stack(struct maker *m, const uint32_t *weights, size_t n)
{
    nib_plan *plan = m->plan;
    const size_t before = plan->n_tensors;
    for (size_t i = 0; i < n; i++) {
        struct nib_out_weight w;
        prepare_weight(m, weights[i], &w);
        w.name = w.name ? w.name : nib_ck_stack_name(plan, &w);
        if (!w.name)
            return no_memory();
        w.stacked = true;
        w.experts = (int64_t)n;
        w.index = (int64_t)i;
        TRY(nib_plan_next(plan, 0, coming_bytes(&w)));
        TRY(nib_plan_add_weight(plan, &w, wants_input(plan, &w)));
        count_member(m, &w);
    }
    for (size_t i = 0; i < n; i++)
        note_bytes_out(m, before, weights[i], (uint32_t)n);
    return NIB_OK;
}

/* A stack cut into its matrices, or the one matrix that a tensor is. */
static nib_status add_matrices(struct maker *m, uint32_t tensor)
{
    nib_plan *plan = m->plan;
    if (plan->gguf && plan->in->tensors[tensor].ggml_type >= 0 && plan->in->tensors[tensor].rank == 3)
        return add_gguf_stack(m, m->by_data + m->first[tensor], m->first[tensor + 1] - m->first[tensor]);
    for (uint32_t i = m->first[tensor]; i < m->first[tensor + 1]; i++) {
        struct nib_out_weight w;
        const size_t before = plan->n_tensors;
        if (plan->places && (!*plan->places[m->by_data[i]].name || plan->places[m->by_data[i]].expert >= 0))
            continue; /* not written, or with the other experts */
        prepare_weight(m, m->by_data[i], &w);
        if (plan->format != NIB_CHECKPOINT_FORMAT_PLAIN && !plan->gguf)
            TRY(nib_plan_note_cut(plan, &w.source));
        TRY(nib_plan_next(plan, plan->in->tensors[tensor].file, coming_bytes(&w)));
        TRY(nib_plan_add_weight(plan, &w, wants_input(plan, &w)));
        count_member(m, &w);
        note_bytes_out(m, before, m->by_data[i], 1);
    }
    return NIB_OK;
}

static bool any_changes(const struct maker *m, uint32_t tensor)
{
    const nib_plan *plan = m->plan;
    for (uint32_t i = m->first[tensor]; i < m->first[tensor + 1]; i++) {
        const uint32_t weight = m->by_data[i];
        if (plan->rows[weight].action != NIB_ACTION_KEEP || nib_plan_columns(plan, weight) ||
            nib_plan_divisors(plan, weight))
            return true;
    }
    return false;
}

/* The stack whose biases these are, if it is cut: "experts.gate_up_proj_bias" [E, N]. */
static uint32_t cut_stack_of_bias(const struct maker *m, const struct nib_ck_tensor *t)
{
    const size_t length = strlen(t->name), suffix = strlen("_bias");
    if (t->rank != 2 || length <= suffix || strcmp(t->name + length - suffix, "_bias") != 0)
        return NIB_NONE;
    for (int i = 0; i < NIB_CHECKPOINT_FORMAT_COUNT * NIB_CK_LAYOUTS; i++) {
        const struct nib_ck_layout *layout = &nib_ck_formats[i / NIB_CK_LAYOUTS].layouts[i % NIB_CK_LAYOUTS];
        char name[1024];
        if (layout->stacking != NIB_STACK_EXPERTS && layout->stacking != NIB_STACK_BLOCKS)
            continue;
        const int n =
            snprintf(name, sizeof name, "%.*s%s", (int)(length - suffix), t->name, layout->suffixes[NIB_ROLE_DATA]);
        const uint32_t tensor = n > 0 && (size_t)n < sizeof name ? nib_ck_find_tensor(m->plan->in, name) : NIB_NONE;
        if (tensor != NIB_NONE && any_changes(m, tensor) && !stays_whole(m, tensor) &&
            m->plan->in->weights[m->by_data[m->first[tensor]]].index >= 0)
            return tensor;
    }
    return NIB_NONE;
}

static nib_status add_cut_biases(struct maker *m, uint32_t bias, uint32_t stack)
{
    nib_plan *plan = m->plan;
    const struct nib_ck_tensor *t = &plan->in->tensors[bias];
    TRY(nib_plan_next(plan, t->file, t->bytes));
    for (uint32_t i = m->first[stack]; i < m->first[stack + 1]; i++) {
        const struct nib_ck_weight *w = &plan->in->weights[m->by_data[i]];
        const char *name = nib_plan_string(plan, "%s.bias", w->name);
        uint32_t index;
        if (w->index >= t->shape[0] || w->row_first + (w->rows - 1) * w->row_step >= t->shape[1]) {
            char buffer[512];
            return nib_fail(NIB_ERR_DATA, "%s is [%lld, %lld], which does not fit its experts",
                            nib_ck_place(plan->in, bias, buffer, sizeof buffer), (long long)t->shape[0],
                            (long long)t->shape[1]);
        }
        TRY(nib_plan_add_tensor(plan, name, t->dtype, 1, &w->rows, NIB_PRODUCE_STRIDED, bias, &index));
        struct nib_out_tensor *out = &plan->tensors[index];
        out->first = w->index * t->shape[1] + w->row_first;
        out->step = w->row_step;
        out->count = w->rows;
    }
    return NIB_OK;
}

/* ---- Stacks that come back ---- */

static nib_status find_restored(struct maker *m)
{
    nib_plan *plan = m->plan;
    m->stack = nib_alloc((plan->in->n_tensors + 1) * sizeof *m->stack);
    if (!m->stack)
        return no_memory();
    for (size_t i = 0; i < plan->in->n_tensors; i++)
        m->stack[i] = NIB_NONE;
    if (plan->gguf)
        return NIB_OK; /* which has stacks of its own */
    if (plan->format != NIB_CHECKPOINT_FORMAT_PLAIN)
        return strcmp(plan->command, "quantize") ? nib_plan_carry_notes(plan) : NIB_OK;
    TRY(nib_plan_find_restored(plan));
    for (uint32_t s = 0; s < plan->n_restored; s++) {
        const struct nib_restored *stack = &plan->restored[s];
        for (int64_t i = 0; i < stack->experts * stack->parts; i++) {
            m->stack[plan->in->weights[stack->weights[i]].tensor[NIB_ROLE_DATA]] = s;
            if (stack->biases)
                m->stack[stack->biases[i]] = s;
        }
    }
    return NIB_OK;
}

static nib_status add_restored_biases(nib_plan *plan, const struct nib_restored *stack)
{
    const struct nib_ck_tensor *first = &plan->in->tensors[stack->biases[0]];
    const int64_t shape[2] = { stack->experts, stack->parts * first->shape[0] };
    const char *name = nib_plan_string(plan, "%s_bias", stack->name);
    uint32_t index;
    if (!name)
        return no_memory();
    TRY(nib_plan_next(plan, first->file,
                      (uint64_t)(shape[0] * shape[1]) * (uint64_t)nib_dtypes[first->dtype].bits / 8));
    TRY(nib_plan_add_tensor(plan, name, first->dtype, 2, shape, NIB_PRODUCE_JOINED, NIB_NONE, &index));
    plan->tensors[index].restored = stack;
    return NIB_OK;
}

/* All matrices of a stack, when the first tensor that belongs to it is met. */
static nib_status add_restored(struct maker *m, struct nib_restored *stack)
{
    nib_plan *plan = m->plan;
    const size_t before = plan->n_tensors;
    const int64_t n = stack->experts * stack->parts;
    if (stack->added)
        return NIB_OK;
    stack->added = true;
    for (int64_t e = 0; e < stack->experts; e++) {
        const uint32_t first = stack->weights[e * stack->parts];
        struct nib_out_weight w;
        prepare_weight(m, first, &w);
        w.action = NIB_ACTION_DEQUANTIZE;
        if (plan->dequantized_dtype != NIB_DTYPE_COUNT)
            w.dtype = plan->dequantized_dtype;
        w.name = stack->name;
        w.stacked = true;
        w.laying = stack->transposed ? NIB_LAY_STACK : NIB_LAY_ROWS;
        w.experts = stack->experts;
        w.index = e;
        w.interleaved = stack->interleaved;
        w.second = stack->parts == 2 ? &plan->in->weights[stack->weights[e * stack->parts + 1]] : NULL;
        w.source.rows *= stack->parts;
        if (e == 0)
            TRY(nib_plan_next(plan, plan->in->tensors[w.source.tensor[NIB_ROLE_DATA]].file,
                              (uint64_t)stack->experts * coming_bytes(&w)));
        TRY(nib_plan_add_weight(plan, &w, false));
    }
    for (int64_t i = 0; i < n; i++)
        note_bytes_out(m, before, stack->weights[i], (uint32_t)n);
    return stack->biases ? add_restored_biases(plan, stack) : NIB_OK;
}

/* The same where a GGUF file is made from other files: everything has another name, if not another form. */
static nib_status add_placed_outputs(struct maker *m, uint32_t tensor)
{
    nib_plan *plan = m->plan;
    if (m->first[tensor] < m->first[tensor + 1])
        return add_matrices(m, tensor);
    return plan->in->tensors[tensor].weight == NIB_NONE ? nib_plan_add_placed(plan, tensor) : NIB_OK;
}

static nib_status add_placed_stacks(struct maker *m)
{
    for (size_t i = 0, n; i < m->n_placed; i += n) {
        n = placed_experts(m, i);
        TRY(add_gguf_stack(m, m->placed + i, n));
    }
    return m->plan->places ? nib_plan_add_extra(m->plan) : NIB_OK;
}

static nib_status add_outputs(struct maker *m, uint32_t tensor)
{
    nib_plan *plan = m->plan;
    const struct nib_ck_tensor *t = &plan->in->tensors[tensor];
    if (m->stack[tensor] != NIB_NONE)
        return add_restored(m, &plan->restored[m->stack[tensor]]);
    if (plan->places)
        return add_placed_outputs(m, tensor);
    if (any_changes(m, tensor))
        return stays_whole(m, tensor) ? add_whole_stack(m, tensor) : add_matrices(m, tensor);
    /* Scales and the like of a weight that changes are made anew, or no longer needed. */
    if (m->first[tensor] == m->first[tensor + 1] && t->weight != NIB_NONE &&
        any_changes(m, plan->in->weights[t->weight].tensor[NIB_ROLE_DATA]))
        return NIB_OK;
    const uint32_t stack = cut_stack_of_bias(m, t);
    if (stack != NIB_NONE)
        return add_cut_biases(m, tensor, stack);
    TRY(nib_plan_next(plan, t->file, t->bytes));
    if (!plan->fold || !plan->fold->tensors[tensor])
        return nib_plan_add_copy(plan, tensor);
    uint32_t index;
    TRY(nib_plan_add_tensor(plan, t->name, t->dtype, t->rank, t->shape, NIB_PRODUCE_BYTES, tensor, &index));
    plan->tensors[index].data = plan->fold->tensors[tensor];
    return NIB_OK;
}

static nib_status sort_weights(struct maker *m)
{
    const nib_checkpoint *in = m->plan->in;
    m->order = nib_alloc((in->n_tensors + 1) * sizeof *m->order);
    m->by_data = nib_alloc((in->n_weights + 1) * sizeof *m->by_data);
    m->first = nib_alloc_zeroed((in->n_tensors + 2) * sizeof *m->first);
    if (!m->order || !m->by_data || !m->first)
        return no_memory();
    TRY(nib_ck_order_by_place(in, m->order));
    /* Counting sort; first[t + 1] is where the next weight of t goes, and ends as the begin of t + 1. */
    for (size_t i = 0; i < in->n_weights; i++)
        m->first[in->weights[i].tensor[NIB_ROLE_DATA] + 2]++;
    for (size_t t = 2; t < in->n_tensors + 2; t++)
        m->first[t] += m->first[t - 1];
    for (uint32_t i = 0; i < in->n_weights; i++)
        m->by_data[m->first[in->weights[i].tensor[NIB_ROLE_DATA] + 1]++] = i;
    return NIB_OK;
}

static nib_status check_diagnostics(const nib_checkpoint *in)
{
    for (size_t i = 0; i < in->n_diagnostics; i++)
        if (in->diagnostics[i].blocks)
            return nib_fail(NIB_ERR_DATA, "%s: %s: %s", in->path, nib_quote(in->diagnostics[i].subject).text,
                            in->diagnostics[i].fact);
    return NIB_OK;
}

static bool any_quantized(const nib_plan *plan)
{
    for (size_t i = 0; i < plan->in->n_weights; i++)
        if (nib_plan_is_quantized(plan, i))
            return true;
    return false;
}

static nib_status nothing_left(const nib_plan *plan)
{
    if (plan->in->n_weights == 0)
        return nib_fail(NIB_ERR_MODE, "%s: there is no weight in it that could be quantized", plan->in->path);
    return nib_fail(NIB_ERR_MODE, "%s: none of its %zu weights is left to quantize; %s, for one, stays: %s",
                    plan->in->path, plan->in->n_weights, nib_quote(plan->in->weights[0].name).text,
                    plan->rows[0].reason);
}

nib_status nib_plan_build(nib_plan *plan, nib_plan **out)
{
    struct maker m = { .plan = plan };
    nib_status status = check_diagnostics(plan->in);
    if (!status)
        status = sort_weights(&m);
    if (!status)
        status = sort_placed(&m);
    if (!status)
        status = keep_whole_stacks(&m);
    if (!status)
        status = find_keys(&m);
    if (!status)
        status = keep_whole_sets(&m);
    if (!status)
        status = raise_sets(&m);
    if (!status)
        status = make_groups(&m);
    if (!status)
        status = nib_plan_find_codes(plan);
    if (!status)
        status = nib_plan_find_statistics(plan);
    if (!status)
        status = nib_plan_find_hessians(plan);
    if (!status)
        status = nib_plan_fold(plan, m.group);
    if (!status)
        status = nib_plan_scale_activations(plan, m.group);
    if (!status && !strcmp(plan->command, "quantize") && !any_quantized(plan))
        status = nothing_left(plan);
    if (!status)
        status = find_restored(&m);
    if (!status)
        nib_plan_note_dtype(plan);
    for (size_t i = 0; i < plan->in->n_tensors && !status; i++)
        status = add_outputs(&m, m.order[i]);
    if (!status)
        status = add_placed_stacks(&m);
    destroy_maker(&m);
    if (status) {
        nib_plan_destroy(plan);
        return status;
    }
    return nib_plan_finish(plan, out);
}
