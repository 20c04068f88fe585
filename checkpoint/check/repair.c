/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repair.c - the plan of a repair: what a check found and what can be put right without the original.
 *
 * Codes are never touched. Weights that servers fuse get the tensor scale of the one that has the largest
 * multiplier, and each block scale makes up for the difference, rounded to E4M3; scales that were stored as their
 * inverse are inverted; activations get the scale of their group, or 1. The configuration is made anew from the tensors
 * where something was wrong with it, and kept as it is otherwise.
 */
#include "check/check.h"
#include "format/codec.h"
#include "plan/plan.h"

/* What a check says is to be done. */
struct repair {
    struct nib_checking k;
    nib_plan *plan;
    size_t repairable;             /* findings */
    bool configuration;            /* among them ones of it */
    float *tensor_scales, *inputs; /* of each weight, as they will be written */
    const uint8_t **maps;          /* of each weight's scales, or NULL */
    bool *with_input;
    bool all_inputs; /* a configuration that is made anew says of all weights that activations are quantized */
};

static nib_status no_memory(const struct repair *r)
{
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory for the plan", r->k.c->path);
}

static int note(void *context, const nib_finding *finding)
{
    struct repair *r = context;
    r->repairable += finding->repairable != 0;
    r->configuration |=
        finding->repairable && (strncmp(finding->id, "config", 6) == 0 || strncmp(finding->id, "hf-", 3) == 0 ||
                                strncmp(finding->id, "head-", 5) == 0);
    return 0;
}

static bool is_divisor(const struct repair *r, size_t i) { return r->k.weights[i].kind == NIB_TENSOR_SCALE_DIVISOR; }

/* Whether x stands for a larger multiplier than y. */
static bool is_larger(bool divisors, float x, float y) { return divisors ? x < y : x > y; }

/* Weights whose own tensors can be written anew. */
static bool can_write(const struct repair *r, size_t i)
{
    return r->k.weights[i].nvfp4 && r->k.c->weights[i].index < 0 && nib_check_is_writable(&r->k, i);
}

static bool has_tensor_scale(const struct repair *r, size_t i)
{
    const struct nib_check_weight *x = &r->k.weights[i];
    return can_write(r, i) && (x->tensor_scale_good || x->tensor_scale_inverted);
}

/* A stack of experts is one tensor with one tensor scale: its codes and block scales are copied, and a tensor of its own
 * takes the place of a tensor scale that is wrong or missing. */
static bool is_stack(const struct repair *r, size_t i)
{
    return r->k.weights[i].nvfp4 && r->k.c->weights[i].index >= 0 && nib_check_is_writable(&r->k, i);
}

/* ---- Tensor scales ---- */

/* Scale bytes times a factor, to nearest. What was not zero does not become zero. */
static const uint8_t *scale_map(struct repair *r, float factor)
{
    uint8_t *map = nib_plan_memory(r->plan, 256);
    for (int i = 0; map && i < 256; i++) {
        const uint8_t scaled = nib_e4m3_from_f32(nib_f32_from_e4m3((uint8_t)i) * factor);
        map[i] = (i & 0x7F) == 0x7F ? (uint8_t)i : (scaled & 0x7F) || !(i & 0x7F) ? scaled : (uint8_t)(scaled | 1);
    }
    return map;
}

/* Every scale 1, as ModelOpt has it for a block of zeros. */
static const uint8_t *ones_map(struct repair *r)
{
    uint8_t *map = nib_plan_memory(r->plan, 256);
    if (map)
        memset(map, 0x38, 256);
    return map;
}

static nib_status own_values(struct repair *r, size_t i)
{
    const struct nib_ck_weight *w = &r->k.c->weights[i];
    const struct nib_check_weight *x = &r->k.weights[i];
    r->tensor_scales[i] = x->tensor_scale_inverted ? 1 / x->tensor_scale : x->tensor_scale;
    if (x->all_nan) {
        r->tensor_scales[i] = 1;
        if (!(r->maps[i] = ones_map(r)))
            return no_memory(r);
    }
    r->with_input[i] = w->tensor[NIB_ROLE_INPUT] != NIB_NONE || nib_check_wants_input(&r->k, w->name);
    r->inputs[i] = x->input_good ? x->input : x->input_inverted ? 1 / x->input : 0;
    return NIB_OK;
}

static nib_status share_tensor_scale(struct repair *r, const struct nib_check_member *first, size_t n)
{
    size_t largest = NIB_NONE;
    for (size_t i = 0; i < n; i++) {
        const size_t w = first[i].weight;
        if (has_tensor_scale(r, w) &&
            (largest == NIB_NONE || is_larger(is_divisor(r, w), r->tensor_scales[w], r->tensor_scales[largest])))
            largest = w;
    }
    for (size_t i = 0; i < n && largest != NIB_NONE; i++) {
        const size_t w = first[i].weight;
        if (r->k.weights[w].all_nan && can_write(r, w))
            r->tensor_scales[w] = r->tensor_scales[largest];
        if (!has_tensor_scale(r, w) || r->tensor_scales[w] == r->tensor_scales[largest])
            continue;
        const float ratio = is_divisor(r, w) ? r->tensor_scales[largest] / r->tensor_scales[w]
                                             : r->tensor_scales[w] / r->tensor_scales[largest];
        if (!(r->maps[w] = scale_map(r, ratio)))
            return no_memory(r);
        r->tensor_scales[w] = r->tensor_scales[largest];
    }
    return NIB_OK;
}

/* ---- Activations ---- */

/* Where one weight has a scale of activations and the configuration is made anew, all get one. */
static void spread_inputs(struct repair *r)
{
    const nib_checkpoint *c = r->k.c;
    bool any = false;
    for (size_t i = 0; i < c->n_weights; i++)
        any |= can_write(r, i) ? r->with_input[i] : is_stack(r, i) && c->weights[i].tensor[NIB_ROLE_INPUT] != NIB_NONE;
    r->all_inputs = any && r->configuration;
    for (size_t i = 0; i < c->n_weights && r->all_inputs; i++)
        r->with_input[i] |= can_write(r, i);
}

/* The largest of the group: too large a scale costs small activations, too small a one clips. */
static void share_input(struct repair *r, const struct nib_check_member *first, size_t n)
{
    float shared = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t w = first[i].weight;
        if (can_write(r, w) && r->inputs[w] > 0 && (shared == 0 || is_larger(is_divisor(r, w), r->inputs[w], shared)))
            shared = r->inputs[w];
    }
    for (size_t i = 0; i < n; i++)
        if (can_write(r, first[i].weight) && r->with_input[first[i].weight])
            r->inputs[first[i].weight] = shared > 0 ? shared : 1;
}

static nib_status choose_values(struct repair *r)
{
    const nib_checkpoint *c = r->k.c;
    struct nib_check_groups groups;
    for (size_t i = 0; i < c->n_weights; i++)
        if (can_write(r, i))
            TRY(own_values(r, i));
    spread_inputs(r);
    TRY(nib_check_members(c, &groups));
    nib_status status = NIB_OK;
    for (size_t i = 0, end; !status && i < groups.n && nib_ck_formats[r->plan->format].fused; i = end) {
        end = nib_check_group_end(&groups, i);
        status = share_tensor_scale(r, &groups.members[i], end - i);
        share_input(r, &groups.members[i], end - i);
    }
    nib_check_free_members(&groups);
    for (size_t i = 0; i < c->n_weights; i++)
        if (can_write(r, i) && r->with_input[i] && !(r->inputs[i] > 0))
            r->inputs[i] = 1;
    return status;
}

/* ---- Rows and tensors ---- */

/* Whether what would be written differs from what is there. */
static bool changes(const struct repair *r, size_t i)
{
    const struct nib_check_weight *x = &r->k.weights[i];
    const bool has_input = r->k.c->weights[i].tensor[NIB_ROLE_INPUT] != NIB_NONE;
    if (!can_write(r, i))
        return false;
    return r->maps[i] || r->tensor_scales[i] != x->tensor_scale ||
           (r->with_input[i] && (!has_input || r->inputs[i] != x->input));
}

static nib_status add_repaired(struct repair *r, uint32_t weight)
{
    nib_plan *plan = r->plan;
    const struct nib_ck_weight *source = &r->k.c->weights[weight];
    struct nib_out_weight w = { .source = *source,
                                .action = NIB_ACTION_REPAIR,
                                .laying = NIB_LAY_ROWS,
                                .experts = 1,
                                .dtype = source->dtype,
                                .group = NIB_NONE,
                                .hessian = NIB_NONE,
                                .tensor_scale = r->tensor_scales[weight],
                                .scale_map = r->maps[weight],
                                .input = r->inputs[weight],
                                .norm = NIB_NONE };
    const size_t before = plan->n_tensors;
    TRY(nib_plan_next(plan, r->k.c->tensors[source->tensor[NIB_ROLE_DATA]].file, 0));
    TRY(nib_plan_add_weight(plan, &w, r->with_input[weight]));
    plan->rows[weight].bytes_out = 0;
    for (size_t i = before; i < plan->n_tensors; i++)
        plan->rows[weight].bytes_out += plan->tensors[i].bytes;
    return NIB_OK;
}

/* ---- Stacks ---- */

static bool misses_input(const struct repair *r, size_t i)
{
    const struct nib_ck_weight *w = &r->k.c->weights[i];
    return is_stack(r, i) && w->tensor[NIB_ROLE_INPUT] == NIB_NONE &&
           (r->all_inputs || nib_check_wants_input(&r->k, r->k.c->tensors[w->tensor[NIB_ROLE_DATA]].name));
}

/* What a tensor scale of a stack becomes; false: it is copied. One for each expert is not touched. */
static bool new_value(const struct repair *r, uint32_t tensor, float *value)
{
    const struct nib_ck_tensor *t = &r->k.c->tensors[tensor];
    if (t->weight == NIB_NONE || !is_stack(r, t->weight) || r->k.broken[tensor] || t->bytes > sizeof(float) ||
        t->dtype == NIB_DTYPE_COUNT)
        return false;
    const struct nib_ck_weight *w = &r->k.c->weights[t->weight];
    const struct nib_check_weight *x = &r->k.weights[t->weight];
    if (tensor == w->tensor[NIB_ROLE_TENSOR_SCALE] && x->tensor_scale_inverted) {
        *value = 1 / x->tensor_scale;
        return true;
    }
    if (tensor == w->tensor[NIB_ROLE_INPUT] && !x->input_good) {
        *value = x->input_inverted ? 1 / x->input : 1;
        return true;
    }
    return false;
}

static nib_status add_value(struct repair *r, const char *name, int64_t rank, const int64_t *shape, float value)
{
    uint32_t index;
    TRY(nib_plan_add_tensor(r->plan, name, NIB_F32, rank, shape, NIB_PRODUCE_VALUE, NIB_NONE, &index));
    r->plan->tensors[index].value = value;
    return NIB_OK;
}

/* A tensor that is no part of a weight that is written anew. */
static nib_status add_other(struct repair *r, uint32_t tensor)
{
    const nib_checkpoint *c = r->k.c;
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    float value;
    TRY(nib_plan_next(r->plan, t->file, 0));
    if (new_value(r, tensor, &value))
        return add_value(r, t->name, t->rank, t->shape, value);
    TRY(nib_plan_add_copy(r->plan, tensor));
    if (t->weight == NIB_NONE || c->weights[t->weight].tensor[NIB_ROLE_DATA] != tensor || !misses_input(r, t->weight))
        return NIB_OK;
    const char *suffix = nib_ck_stack_layout(r->plan->format)->suffixes[NIB_ROLE_INPUT];
    const char *name = nib_plan_string(r->plan, "%s%s", t->name, suffix);
    return name ? add_value(r, name, 0, NULL, 1) : no_memory(r);
}

static bool stack_changes(const struct repair *r, size_t i)
{
    const struct nib_ck_weight *w = &r->k.c->weights[i];
    float value;
    for (int role = NIB_ROLE_TENSOR_SCALE; role <= NIB_ROLE_INPUT; role++)
        if (w->index >= 0 && w->tensor[role] != NIB_NONE && new_value(r, w->tensor[role], &value))
            return true;
    return misses_input(r, i);
}

/* ---- Rows ---- */

static void choose_rows(struct repair *r)
{
    for (size_t i = 0; i < r->k.c->n_weights; i++) {
        struct nib_out_row *row = &r->plan->rows[i];
        if (changes(r, i) || stack_changes(r, i))
            row->action = NIB_ACTION_REPAIR;
        else
            row->reason = "nothing about it needs repair, or can be repaired";
    }
}

static nib_status add_tensors(struct repair *r)
{
    const nib_checkpoint *c = r->k.c;
    uint32_t *order = nib_alloc((c->n_tensors + 1) * sizeof *order);
    if (!order)
        return no_memory(r);
    nib_status status = nib_ck_order_by_place(c, order);
    for (size_t i = 0; !status && i < c->n_tensors; i++) {
        const struct nib_ck_tensor *t = &c->tensors[order[i]];
        const bool anew = t->weight != NIB_NONE && changes(r, t->weight);
        if (!anew)
            status = add_other(r, order[i]);
        else if (c->weights[t->weight].tensor[NIB_ROLE_DATA] == order[i])
            status = add_repaired(r, t->weight);
    }
    nib_free(order);
    return status;
}

/* ---- The plan ---- */

static nib_status choose_configuration(struct repair *r)
{
    const nib_checkpoint *c = r->k.c;
    for (size_t i = 0; i < c->n_weights; i++)
        if ((can_write(r, i) && r->with_input[i]) || misses_input(r, i) ||
            (is_stack(r, i) && c->weights[i].tensor[NIB_ROLE_INPUT] != NIB_NONE))
            r->plan->scheme = NIB_SCHEME_NVFP4;
    if (r->configuration)
        return NIB_OK; /* nib_plan_configure makes it from the rows */
    r->plan->config = c->config ? nib_ck_copy_json(c->config) : json_object();
    r->plan->hf_quant = c->hf_quant_config ? nib_ck_copy_json(c->hf_quant_config) : NULL;
    return r->plan->config && !r->plan->hf_quant == !c->hf_quant_config ? NIB_OK : no_memory(r);
}

static nib_status fill_plan(struct repair *r)
{
    const size_t n = r->k.c->n_weights + 1;
    r->tensor_scales = nib_alloc_zeroed(n * sizeof *r->tensor_scales);
    r->inputs = nib_alloc_zeroed(n * sizeof *r->inputs);
    r->maps = nib_alloc_zeroed(n * sizeof *r->maps);
    r->with_input = nib_alloc_zeroed(n);
    if (!r->tensor_scales || !r->inputs || !r->maps || !r->with_input)
        return no_memory(r);
    TRY(choose_values(r));
    choose_rows(r);
    TRY(choose_configuration(r));
    return add_tensors(r);
}

static nib_status make_plan(struct repair *r)
{
    const nib_checkpoint *in = r->k.c;
    TRY(nib_check_run(&r->k, "nib_plan_repair", NULL));
    if (!r->repairable)
        return nib_fail(NIB_ERR_MODE, "%s: a check finds nothing that can be repaired", in->path);
    char names[128];
    if (!nib_checkpoint_format_written_by(in->format, NIB_ACTION_REPAIR))
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s: it is %s, and repairs are for %s: convert it first", in->path,
                        nib_checkpoint_format_name(in->format),
                        nib_ck_written_names(NIB_ACTION_REPAIR, names, sizeof names));
    TRY(nib_plan_start(in, "repair", in->format, false, &r->plan));
    r->plan->keep_split = true;
    r->plan->quantized = true;
    return fill_plan(r);
}

nib_status nib_plan_repair(const nib_checkpoint *in, nib_plan **out)
{
    NIB_REQUIRE(in);
    NIB_REQUIRE(out);
    struct repair r = { .k = { .c = in, .each = note } };
    r.k.context = &r;
    nib_status status = make_plan(&r);
    nib_check_end(&r.k);
    nib_free(r.tensor_scales);
    nib_free(r.inputs);
    nib_free(r.maps);
    nib_free(r.with_input);
    if (!status)
        return nib_plan_finish(r.plan, out);
    nib_plan_destroy(r.plan);
    return status;
}
