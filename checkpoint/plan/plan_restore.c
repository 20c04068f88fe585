/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_restore.c - what a plan takes apart, and how another puts it together again.
 *
 * Readers of packed experts want a module for each, where many checkpoints have one tensor for all; and the matrices of
 * some families lie transposed. A plan that writes such a tensor otherwise notes in provenance how it lay, one entry for
 * all layers:
 *
 *     "restore": [{"tensor": ".experts.gate_up_proj", "experts": ".experts", "parts": ["gate_proj", "up_proj"],
 *                  "transposed": true, "interleaved": true},
 *                 {"matrix": "c_attn"}]                         which was [inputs, outputs]
 *     "dtype": "F32"                                             which config.json does not say
 *
 * Dequantizing goes by it. Provenance is a file's own word and may be anything: what does not fit the tensors that are
 * there is left alone.
 */
#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>

/* A family has two or three; each is looked for in every name. */
enum { MOST_RULES = 16 };

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

/* ---- Taking apart ---- */

static nib_status add_note(nib_plan *plan, json_t *note)
{
    if (!plan->restore)
        plan->restore = json_array();
    if (!note || !plan->restore) {
        json_decref(note);
        return no_memory();
    }
    for (size_t i = 0; i < json_array_size(plan->restore); i++)
        if (json_equal(json_array_get(plan->restore, i), note)) {
            json_decref(note);
            return NIB_OK;
        }
    return json_array_append_new(plan->restore, note) ? no_memory() : NIB_OK;
}

static nib_status note_matrix(nib_plan *plan, const char *name)
{
    return add_note(plan, json_pack("{s:s}", "matrix", name));
}

/* parts[1] is NULL where there is one. */
static nib_status note_stack(nib_plan *plan, const char *tensor, const char *experts, const char *const parts[2],
                             bool transposed, bool interleaved)
{
    json_t *names = parts[1] ? json_pack("[s, s]", parts[0], parts[1]) : json_pack("[s]", parts[0]);
    return add_note(plan, json_pack("{s:s, s:s, s:o, s:b, s:b}", "tensor", tensor, "experts", experts, "parts", names,
                                    "transposed", (int)transposed, "interleaved", (int)interleaved));
}

nib_status nib_plan_note_cut(nib_plan *plan, const struct nib_ck_weight *w)
{
    const nib_checkpoint *in = plan->in;
    const struct nib_ck_tensor *t = &in->tensors[w->tensor[NIB_ROLE_DATA]];
    const char *dot = strrchr(w->name, '.');
    if (w->index < 0)
        return w->transposed ? note_matrix(plan, dot ? dot + 1 : w->name) : NIB_OK;
    if (w->format != NIB_CHECKPOINT_FORMAT_PLAIN || t->ggml_type >= 0)
        return NIB_OK; /* MXFP4 does not come back, and GGUF has no such names */
    struct nib_ck_stack stack;
    bool is;
    TRY(nib_ck_stack_of(in, t->name, t->rank, t->shape, &is, &stack));
    if (!is)
        return NIB_OK;
    return note_stack(plan, t->name + stack.prefix_bytes, stack.prefix, stack.parts, stack.transposed,
                      stack.interleaved);
}

/* Older models have no dtype in config.json: of F32 weights plain ones would come back in BF16. */
void nib_plan_note_dtype(nib_plan *plan)
{
    const nib_checkpoint *in = plan->in;
    const nib_dtype said = nib_ck_config_dtype(in), nominal = nib_ck_nominal_dtype(in);
    nib_dtype dtype = NIB_DTYPE_COUNT;
    for (size_t i = 0; i < in->n_weights; i++) {
        const nib_dtype own = in->weights[i].format == NIB_CHECKPOINT_FORMAT_PLAIN ? in->weights[i].dtype : nominal;
        if (plan->rows[i].action == NIB_ACTION_KEEP)
            continue;
        if (dtype != NIB_DTYPE_COUNT && dtype != own)
            return; /* of several there is none to note */
        dtype = own;
    }
    if (dtype != said && plan->format != NIB_CHECKPOINT_FORMAT_PLAIN)
        plan->noted_dtype = dtype;
}

/* What the input's own provenance says. */
static const json_t *notes_of(const nib_plan *plan) { return json_object_get(plan->in->notes, "restore"); }

/* ---- Putting together ---- */

/* An entry of the list, understood. */
struct rule {
    const char *tensor, *experts, *parts[2];
    int64_t n;
    bool transposed, interleaved;
};

static bool read_rule(const json_t *note, struct rule *out)
{
    const json_t *parts = json_object_get(note, "parts");
    *out = (struct rule){ .tensor = json_string_value(json_object_get(note, "tensor")),
                          .experts = json_string_value(json_object_get(note, "experts")),
                          .n = (int64_t)json_array_size(parts),
                          .transposed = json_is_true(json_object_get(note, "transposed")),
                          .interleaved = json_is_true(json_object_get(note, "interleaved")) };
    for (size_t i = 0; i < 2; i++)
        out->parts[i] = json_string_value(json_array_get(parts, i));
    return out->tensor && *out->tensor && out->experts && *out->experts && (out->n == 1 || out->n == 2) &&
           out->parts[0] && (out->n == 1 || out->parts[1]);
}

/* What is not understood stays behind: who knows what it would do to the next reader. */
nib_status nib_plan_carry_notes(nib_plan *plan)
{
    const json_t *notes = notes_of(plan);
    for (size_t i = 0; i < json_array_size(notes) && i < MOST_RULES; i++) {
        const json_t *note = json_array_get(notes, i);
        const char *matrix = json_string_value(json_object_get(note, "matrix"));
        struct rule rule;
        if (matrix)
            TRY(note_matrix(plan, matrix));
        else if (read_rule(note, &rule))
            TRY(note_stack(plan, rule.tensor, rule.experts, rule.parts, rule.transposed, rule.interleaved));
    }
    return NIB_OK;
}

/* A weight that is part of an expert by some rule. */
struct member {
    const char *base; /* of its name: the first base_bytes */
    size_t base_bytes;
    int64_t expert, part;
    uint32_t weight;
};

/* "BASE" ".experts" ".3" ".up_proj" */
static bool is_member(const struct rule *rule, const char *name, struct member *out)
{
    const char *last = strrchr(name, '.'), *digits = last;
    if (!last || digits == name)
        return false;
    while (digits > name && digits[-1] >= '0' && digits[-1] <= '9')
        digits--;
    const size_t before = strlen(rule->experts), length = (size_t)(last - digits);
    if (length == 0 || length > 6 || (size_t)(digits - name) < before + 1 || digits[-1] != '.' ||
        memcmp(digits - 1 - before, rule->experts, before) != 0 || (length > 1 && *digits == '0'))
        return false;
    *out = (struct member){ .base = name, .base_bytes = (size_t)(digits - 1 - name) - before, .part = -1 };
    out->expert = strtol(digits, NULL, 10);
    for (int64_t i = 0; i < rule->n; i++)
        if (!strcmp(last + 1, rule->parts[i]))
            out->part = i;
    return out->part >= 0;
}

static int by_base(const void *left, const void *right)
{
    const struct member *a = left, *b = right;
    const size_t common = a->base_bytes < b->base_bytes ? a->base_bytes : b->base_bytes;
    const int order = memcmp(a->base, b->base, common);
    if (order || a->base_bytes != b->base_bytes)
        return order ? order : a->base_bytes < b->base_bytes ? -1 : 1;
    if (a->expert != b->expert)
        return a->expert < b->expert ? -1 : 1;
    return a->part < b->part ? -1 : a->part > b->part;
}

static bool same_base(const struct member *a, const struct member *b)
{
    return a->base_bytes == b->base_bytes && memcmp(a->base, b->base, a->base_bytes) == 0;
}

/* Every part of every expert once, and all of one shape. */
static bool is_complete(const nib_checkpoint *in, const struct rule *rule, const struct member *members, size_t n)
{
    const struct nib_ck_weight *first = &in->weights[members[0].weight];
    for (size_t i = 0; i < n; i++) {
        const struct nib_ck_weight *w = &in->weights[members[i].weight];
        if (members[i].expert != (int64_t)i / rule->n || members[i].part != (int64_t)i % rule->n || w->index >= 0 ||
            w->transposed || w->rows != first->rows || w->cols != first->cols)
            return false;
    }
    return n % (size_t)rule->n == 0;
}

/* The biases of a stack's members; *found NULL where one has none that fits. */
static nib_status find_biases(nib_plan *plan, const struct member *members, size_t n, uint32_t **found)
{
    const nib_checkpoint *in = plan->in;
    uint32_t *biases = nib_plan_memory(plan, n * sizeof *biases);
    *found = NULL;
    if (!biases)
        return no_memory();
    for (size_t i = 0; i < n; i++) {
        char name[1024];
        const struct nib_ck_weight *w = &in->weights[members[i].weight];
        const int length = snprintf(name, sizeof name, "%s.bias", w->name);
        biases[i] = length > 0 && (size_t)length < sizeof name ? nib_ck_find_tensor(in, name) : NIB_NONE;
        const struct nib_ck_tensor *t = biases[i] == NIB_NONE ? NULL : &in->tensors[biases[i]];
        if (!t || t->rank != 1 || t->shape[0] != w->rows || t->dtype != in->tensors[biases[0]].dtype ||
            !(NIB_FLOAT_BITS & NIB_DTYPE_BIT(t->dtype)))
            return NIB_OK;
    }
    *found = biases;
    return NIB_OK;
}

static nib_status add_stack(nib_plan *plan, const struct rule *rule, const struct member *members, size_t n,
                            size_t *capacity)
{
    struct nib_restored *list = nib_grow(plan->restored, capacity, plan->n_restored + 1, sizeof *list);
    uint32_t *weights = nib_plan_memory(plan, n * sizeof *weights), *biases;
    const char *name = nib_plan_string(plan, "%.*s%s", (int)members->base_bytes, members->base, rule->tensor);
    if (list)
        plan->restored = list;
    if (!list || !weights || !name)
        return no_memory();
    TRY(find_biases(plan, members, n, &biases));
    for (size_t i = 0; i < n; i++)
        weights[i] = members[i].weight;
    list[plan->n_restored++] = (struct nib_restored){ .name = name,
                                                      .experts = (int64_t)n / rule->n,
                                                      .parts = rule->n,
                                                      .transposed = rule->transposed,
                                                      .interleaved = rule->interleaved && rule->n == 2,
                                                      .weights = weights,
                                                      .biases = biases };
    return NIB_OK;
}

static nib_status find_by_rule(nib_plan *plan, const struct rule *rule, struct member *members, size_t *capacity)
{
    const nib_checkpoint *in = plan->in;
    size_t n = 0;
    for (uint32_t i = 0; i < in->n_weights; i++)
        if (is_member(rule, in->weights[i].name, &members[n]))
            members[n++].weight = i;
    qsort(members, n, sizeof *members, by_base);
    for (size_t begin = 0, end; begin < n; begin = end) {
        bool coded = false; /* what is plain in all its parts was never cut */
        for (end = begin; end < n && same_base(&members[begin], &members[end]); end++)
            coded |= in->weights[members[end].weight].format != NIB_CHECKPOINT_FORMAT_PLAIN;
        if (coded && is_complete(in, rule, members + begin, end - begin))
            TRY(add_stack(plan, rule, members + begin, end - begin, capacity));
    }
    return NIB_OK;
}

nib_status nib_plan_find_restored(nib_plan *plan)
{
    const json_t *notes = notes_of(plan);
    struct member *members = nib_alloc((plan->in->n_weights + 1) * sizeof *members);
    nib_status status = members ? NIB_OK : no_memory();
    size_t capacity = 0;
    struct rule rule;
    for (size_t i = 0; !status && i < json_array_size(notes) && i < MOST_RULES; i++)
        if (read_rule(json_array_get(notes, i), &rule))
            status = find_by_rule(plan, &rule, members, &capacity);
    nib_free(members);
    return status;
}

bool nib_plan_was_transposed(const nib_plan *plan, const struct nib_ck_weight *w)
{
    const json_t *notes = notes_of(plan);
    const char *dot = strrchr(w->name, '.'), *last = dot ? dot + 1 : w->name;
    for (size_t i = 0; nib_ck_is_nvfp4(w->format) && w->index < 0 && i < json_array_size(notes) && i < MOST_RULES;
         i++) {
        const char *matrix = json_string_value(json_object_get(json_array_get(notes, i), "matrix"));
        if (matrix && !strcmp(matrix, last))
            return true;
    }
    return false;
}
