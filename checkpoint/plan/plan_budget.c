/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_budget.c - weights that are worth more than 4 bits: FP8 by rows instead of NVFP4, or as they are, as a list says, or
 * by a budget of bits.
 */
#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>

#define NVFP4_BITS 4.5 /* with the scales of blocks */

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

/* ---- A list ---- */

/* Whether experts are written as stacks, in which all matrices are of one form. */
static bool has_stacks(const nib_plan *plan)
{
    return nib_ck_stack_layout(plan->format) && nib_ck_keeps_stacks(plan->in);
}

void nib_plan_leave_plain(nib_plan *plan, size_t weight, const char *reason)
{
    plan->rows[weight].action = nib_plan_keep_action(plan, &plan->in->weights[weight]);
    plan->rows[weight].reason = reason;
    plan->rows[weight].raised = true;
}

static nib_status raise_row(nib_plan *plan, bool plain, struct nib_patterns *list, size_t weight)
{
    const struct nib_ck_weight *w = &plan->in->weights[weight];
    uint32_t which = NIB_NONE;
    if (plan->rows[weight].action != NIB_ACTION_QUANTIZE)
        return NIB_OK;
    TRY(nib_patterns_match(list, w->name, &which));
    if (which == NIB_NONE)
        return NIB_OK;
    if (has_stacks(plan) && w->index >= 0)
        return nib_fail(NIB_ERR_MODE, "%s is in a stack that stays whole, and cannot be %s", nib_quote(w->name).text,
                        plain ? "left out of it (--plain)" : "FP8 (--fp8)");
    if (plain)
        nib_plan_leave_plain(plan, weight, "it is to stay (--plain)");
    else
        plan->rows[weight].action = NIB_ACTION_FP8;
    return NIB_OK;
}

nib_status nib_plan_raise(nib_plan *plan, bool plain, const char *const *patterns, size_t n)
{
    struct nib_patterns *list;
    if (!n)
        return NIB_OK;
    if (plan->gguf && !plain)
        return nib_fail(NIB_ERR_MODE, "GGUF has no FP8: leave --fp8 out");
    TRY(nib_plan_check_patterns(plan->in, plain ? "plain" : "fp8", patterns, n, false));
    TRY(nib_patterns_create(patterns, n, &list));
    nib_status status = NIB_OK;
    for (size_t i = 0; i < plan->in->n_weights && !status; i++)
        status = raise_row(plan, plain, list, i);
    nib_patterns_destroy(list);
    return status;
}

/* ---- A budget ---- */

/* Weights that are chosen together: of one set, or one alone. */
struct unit {
    uint32_t set;     /* its first weight */
    int64_t layer;    /* -1: it is in none */
    double elements;  /* of all */
    double extra;     /* bits that it would take more */
    int64_t distance; /* from the nearer end */
};

/* The first number between dots. */
static int64_t layer_of(const char *name)
{
    for (const char *at = strchr(name, '.'); at; at = strchr(at + 1, '.')) {
        char *end;
        if (at[1] < '0' || at[1] > '9')
            continue;
        const long long number = strtoll(at + 1, &end, 10);
        if (*end == '.')
            return number;
    }
    return -1;
}

/* From the ends to the middle, the last layer before the first. */
static int by_distance(const void *left, const void *right)
{
    const struct unit *a = left, *b = right;
    if (a->distance != b->distance)
        return a->distance < b->distance ? -1 : 1;
    if (a->layer != b->layer)
        return a->layer > b->layer ? -1 : 1;
    return a->set < b->set ? -1 : a->set > b->set;
}

static size_t list_units(const nib_plan *plan, const uint32_t *set, bool plain, struct unit *units, uint32_t *at)
{
    size_t n = 0;
    int64_t last = 0;
    for (uint32_t i = 0; i < plan->in->n_weights; i++) {
        const struct nib_ck_weight *w = &plan->in->weights[i];
        const double elements = (double)w->rows * (double)w->cols;
        if (plan->rows[i].action != NIB_ACTION_QUANTIZE || (has_stacks(plan) && w->index >= 0))
            continue;
        if (at[set[i]] == NIB_NONE) {
            at[set[i]] = (uint32_t)n;
            units[n++] = (struct unit){ .set = set[i], .layer = layer_of(w->name) };
        }
        struct unit *unit = &units[at[set[i]]];
        unit->elements += elements;
        unit->extra += plain ? elements * (nib_dtypes[w->dtype].bits - NVFP4_BITS)
                             : elements * (8 - NVFP4_BITS) + 32.0 * (double)w->rows;
        last = nib_max(last, unit->layer);
    }
    for (size_t i = 0; i < n; i++)
        units[i].distance = units[i].layer < 0 ? INT64_MAX : nib_min(units[i].layer, last - units[i].layer);
    return n;
}

static nib_status spend(nib_plan *plan, const uint32_t *set, struct unit *units, uint32_t *at)
{
    const size_t n = list_units(plan, set, plan->budget_plain, units, at);
    double elements = 0, left = 0;
    for (size_t i = 0; i < n; i++)
        elements += units[i].elements;
    left = ((double)plan->budget - NVFP4_BITS) * elements;
    qsort(units, n, sizeof *units, by_distance);
    for (size_t i = 0; i < n; i++) {
        if (units[i].extra > left || units[i].layer < 0)
            continue;
        left -= units[i].extra;
        for (uint32_t w = 0; w < plan->in->n_weights; w++) {
            struct nib_out_row *row = &plan->rows[w];
            if (set[w] != units[i].set || row->action != NIB_ACTION_QUANTIZE)
                continue;
            if (plan->budget_plain)
                nib_plan_leave_plain(plan, w, "the budget has bits for it");
            else
                row->action = NIB_ACTION_FP8;
        }
    }
    const char *guess = "which weights have more than 4 bits is a guess, the first and the last layers: python -m "
                        "nib.calibrate --budget measures what each is worth";
    plan->note = nib_plan_string(plan, "%s%s%s", plan->note, *plan->note ? "; " : "", guess);
    return plan->note ? NIB_OK : no_memory();
}

nib_status nib_plan_spend_budget(nib_plan *plan, const uint32_t *set)
{
    const size_t n = plan->in->n_weights + 1;
    if (!(plan->budget > 0))
        return NIB_OK;
    struct unit *units = nib_alloc(n * sizeof *units);
    uint32_t *at = nib_alloc(n * sizeof *at);
    for (size_t i = 0; i < n && at; i++)
        at[i] = NIB_NONE;
    const nib_status status = units && at ? spend(plan, set, units, at) : no_memory();
    nib_free(units);
    nib_free(at);
    return status;
}
