/* SPDX-License-Identifier: Apache-2.0 */
/*
 * panels.c - the work of a run: outputs cut into panels of rows or bytes, and the order in which they are taken.
 */
#include "run/panels.h"

#include <stdlib.h>

enum {
    COPY_BYTES = 1 << 20,       /* at a time: what a core's second cache about holds */
    GPTQ_ROWS = 64,             /* a panel has a multiple of them where codes are chosen by GPTQ */
    MOST_PANEL_BYTES = 16 << 20 /* more does not help, even where rows run down a stack's columns */
};

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for a panel of weights"); }

void nib_run_panels_free(struct nib_run_panels *panels)
{
    nib_free(panels->list);
    nib_free(panels->stages);
}

/* ---- Stages ---- */

static nib_status add_panel(struct nib_run_panels *panels, struct nib_run_panel panel)
{
    struct nib_run_panel *list = nib_grow(panels->list, &panels->capacity, panels->n + 1, sizeof *list);
    if (!list)
        return no_memory();
    panels->list = list;
    list[panels->n++] = panel;
    return NIB_OK;
}

/* The stage of a weight's panels. */
static nib_status find_stage(struct nib_run_panels *panels, const struct nib_out_weight *w, uint32_t *stage)
{
    *stage = panels->n_stages ? (uint32_t)panels->n_stages - 1 : 0;
    if (panels->n_stages && w->hessian == NIB_NONE)
        return NIB_OK;
    for (size_t i = panels->n_stages; i-- > 0;)
        if (panels->stages[i].hessian == w->hessian && panels->stages[i].columns == w->source.columns) {
            *stage = (uint32_t)i;
            return NIB_OK;
        }
    struct nib_run_stage *stages =
        nib_grow(panels->stages, &panels->stages_capacity, panels->n_stages + 1, sizeof *stages);
    if (!stages)
        return no_memory();
    panels->stages = stages;
    *stage = (uint32_t)panels->n_stages;
    stages[panels->n_stages++] = (struct nib_run_stage){ .hessian = w->hessian, .columns = w->source.columns };
    return NIB_OK;
}

nib_status nib_run_panels_sort(struct nib_run_panels *panels)
{
    struct nib_run_panel *from = nib_alloc((panels->n + 1) * sizeof *from);
    if (!from)
        return no_memory();
    for (size_t i = 0; i < panels->n; i++) {
        from[i] = panels->list[i];
        panels->stages[from[i].stage].end++;
    }
    size_t at = 0;
    for (size_t i = 0; i < panels->n_stages; i++) {
        const size_t count = panels->stages[i].end;
        panels->stages[i].begin = panels->stages[i].end = at;
        at += count;
    }
    for (size_t i = 0; i < panels->n; i++)
        panels->list[panels->stages[from[i].stage].end++] = from[i];
    nib_free(from);
    return NIB_OK;
}

/* The dtype in which a weight's rows are read. */
static nib_dtype reading_dtype(const nib_plan *plan, const struct nib_out_weight *w)
{
    switch (w->action) {
    case NIB_ACTION_QUANTIZE:
        return plan->groups[w->group].dtype;
    case NIB_ACTION_FP8:
        return NIB_F32;
    case NIB_ACTION_DEQUANTIZE:
    case NIB_ACTION_KEEP:
        return w->dtype;
    default:
        return NIB_BF16;
    }
}

uint64_t nib_run_panel_bytes(const nib_plan *plan, const struct nib_run_panel *panel)
{
    if (panel->tensor != NIB_NONE)
        return (uint64_t)panel->count;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    const int bits = nib_ck_formats[w->source.format].bits;
    return (uint64_t)panel->count * (uint64_t)w->source.cols *
           (uint64_t)(bits ? bits : nib_dtypes[w->source.dtype].bits) / 8;
}

/* Spread the panels of tensors, which come first and are hardly more than written, among those of weights, which take
 * time: only one thread at a time can write to a file, and others that want to would wait for it. */
static nib_status spread(struct nib_run_panels *panels, const nib_plan *plan, size_t first, size_t weights)
{
    const size_t n = panels->n - first, tensors = weights - first;
    struct nib_run_panel *to = panels->list + first, *from = nib_alloc((n + 1) * sizeof *from);
    struct kind {
        const struct nib_run_panel *next, *end;
        double taken, bytes; /* of input */
    } kinds[2] = { { from, from + tensors, 0, 0 }, { from + tensors, from + n, 0, 0 } };
    if (!from)
        return no_memory();
    memcpy(from, to, n * sizeof *from);
    for (size_t i = 0; i < n; i++)
        kinds[i >= tensors].bytes += (double)nib_run_panel_bytes(plan, &from[i]);
    for (size_t i = 0; i < n; i++) {
        const struct kind *a = &kinds[0], *b = &kinds[1];
        const bool second = a->next == a->end || (b->next < b->end && b->taken * a->bytes <= a->taken * b->bytes);
        struct kind *kind = &kinds[second];
        kind->taken += (double)nib_run_panel_bytes(plan, kind->next);
        to[i] = *kind->next++;
    }
    nib_free(from);
    return NIB_OK;
}

nib_status nib_run_panels_cut(struct nib_run_panels *panels, const struct nib_run *run, uint32_t file,
                              size_t first_weight, size_t weights)
{
    const nib_plan *plan = run->plan;
    const struct nib_out_file *f = &plan->files[file];
    const size_t first = panels->n;
    uint32_t stage;
    TRY(find_stage(panels, &(struct nib_out_weight){ .hessian = NIB_NONE }, &stage));
    const uint64_t panel = run->memory / 2 < MOST_PANEL_BYTES ? run->memory / 2 : MOST_PANEL_BYTES;
    const int64_t chunk = (int64_t)(run->memory / 2 < COPY_BYTES ? run->memory / 2 : COPY_BYTES);
    for (uint32_t i = 0; i < f->tensors; i++) {
        const uint32_t tensor = f->first + i;
        const struct nib_out_tensor *t = &plan->tensors[tensor];
        if (t->producer == NIB_PRODUCE_WEIGHT)
            continue;
        const bool in_parts = t->producer == NIB_PRODUCE_COPY || t->producer == NIB_PRODUCE_CAST;
        const int64_t bytes = (int64_t)t->bytes, at_once = in_parts ? chunk / 4 * 4 : bytes;
        for (int64_t at = 0; at < bytes; at += at_once)
            TRY(add_panel(
                panels, (struct nib_run_panel){ file, NIB_NONE, tensor, at, nib_min(at_once, bytes - at), stage, 0 }));
    }
    const size_t of_weights = panels->n;
    for (size_t i = 0; i < weights; i++) {
        const uint32_t weight = (uint32_t)(first_weight + i);
        const struct nib_out_weight *w = &plan->weights[weight];
        int64_t rows = nib_ck_rows_for(plan->in, &w->source, reading_dtype(plan, w), panel);
        if (w->hessian != NIB_NONE) /* work for every thread: nobody goes on before all are done */
            rows = nib_min(rows, nib_round_up(nib_ceil_div(w->source.rows, run->threads), GPTQ_ROWS));
        TRY(find_stage(panels, w, &stage));
        for (int64_t row = 0; row < w->source.rows; row += rows)
            TRY(add_panel(panels, (struct nib_run_panel){ file, weight, NIB_NONE, row,
                                                          nib_min(rows, w->source.rows - row), stage, 0 }));
    }
    return spread(panels, plan, first, of_weights);
}

/* ---- Beside a scan ---- */

/* When a scan that goes along has come to it. What does not depend on one waits until its source has been read, so that
 * it is not read twice. */
static nib_status find_after(const nib_plan *plan, struct nib_scan *scan, struct nib_run_panel *panel)
{
    const bool of_weight = panel->weight != NIB_NONE;
    const struct nib_out_weight *w = of_weight ? &plan->weights[panel->weight] : NULL;
    const struct nib_out_tensor *t = of_weight ? NULL : &plan->tensors[panel->tensor];
    const bool computed = w && w->action == NIB_ACTION_QUANTIZE;
    if (t && t->producer != NIB_PRODUCE_COPY && t->producer != NIB_PRODUCE_CAST)
        return NIB_OK;
    TRY(nib_scan_end_of(scan, computed ? w->group : NIB_NONE, w ? w->source.tensor[NIB_ROLE_DATA] : t->source,
                        &panel->after));
    if (t && t->producer == NIB_PRODUCE_COPY)
        panel->after -= t->bytes - (uint64_t)(panel->first + panel->count);
    return NIB_OK;
}

static int by_after(const void *left, const void *right)
{
    const struct nib_run_panel *a = left, *b = right;
    const uint64_t keys[4][2] = { { a->after, b->after },
                                  { a->tensor, b->tensor },
                                  { a->weight, b->weight },
                                  { (uint64_t)a->first, (uint64_t)b->first } };
    for (int i = 0; i < 4; i++)
        if (keys[i][0] != keys[i][1])
            return keys[i][0] < keys[i][1] ? -1 : 1;
    return 0;
}

nib_status nib_run_panels_follow(struct nib_run_panels *panels, const nib_plan *plan, struct nib_scan *scan)
{
    for (size_t i = 0; i < panels->n; i++)
        TRY(find_after(plan, scan, &panels->list[i]));
    if (panels->n)
        qsort(panels->list, panels->n, sizeof *panels->list, by_after);
    return NIB_OK;
}
