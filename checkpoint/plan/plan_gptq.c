/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_gptq.c - which weights have their codes chosen by GPTQ: those with a Hessian of their input, of tokens enough.
 */
#include "plan/plan.h"

#include <stdio.h>

#include "base/os.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

nib_status nib_plan_open_hessians(nib_plan *plan, const char *statistics, const char *directory, float damp)
{
    char beside[4096];
    if (nib_statistics_of_gguf(plan->statistics))
        return nib_fail(NIB_ERR_MODE,
                        "%s: GPTQ needs Hessians, which nib.calibrate writes (--hessians); an imatrix has none",
                        statistics);
    snprintf(beside, sizeof beside, "%s.hessians", statistics);
    if (!directory && nib_os_is_directory(beside))
        directory = beside;
    TRY(nib_hessians_open(statistics, directory, &plan->hessians));
    if (!nib_hessians_count(plan->hessians))
        return nib_fail(NIB_ERR_DATA,
                        "%s: there are no Hessians in it%s%s, which GPTQ needs: nib.calibrate --hessians "
                        "writes them",
                        directory ? directory : statistics, directory ? "" : ", nor is there a directory ",
                        directory ? "" : beside);
    plan->damp = damp < 0 ? 0.1 : (double)damp;
    char text[32];
    snprintf(text, sizeof text, "%.9g", plan->damp);
    if (json_object_set_new(plan->options, "gptq_damp", json_string(text)) ||
        json_object_set_new(plan->options, "hessians_xxh3", json_string(nib_hessians_hash(plan->hessians))))
        return no_memory();
    return NIB_OK;
}

/* Where there are fewer, what they say of pairs of channels is more noise than fact, and codes chosen by it are worse than
 * without (docs/accuracy.md). An expert's input is like that of all, but of down only as far as it was seen. */
static double tokens_of(const nib_plan *plan, const struct nib_out_row *row, const struct nib_hessian *h)
{
    const struct nib_statistics_digest *digest = &plan->digests[row->input.entry];
    const double all = h->tokens >= 0 ? (double)h->tokens : digest->tokens;
    return digest->down && row->input.slices > 1 ? row->tokens : all;
}

static nib_status say(struct nib_out_row *row, const char *text)
{
    row->gptq = text;
    return text ? NIB_OK : no_memory();
}

static nib_status find_row(nib_plan *plan, size_t weight, size_t *found)
{
    struct nib_out_row *row = &plan->rows[weight];
    const struct nib_ck_weight *w = &plan->in->weights[weight];
    size_t index;
    if (row->action != NIB_ACTION_QUANTIZE || row->codes)
        return NIB_OK;
    if (row->input.entry == NIB_NONE)
        return say(row, "none: there are no statistics of its input");
    if (!nib_hessians_find(plan->hessians, nib_statistics_input(plan->statistics, row->input.entry), &index))
        return say(row, "none: there is no Hessian of its input");
    const struct nib_hessian h = nib_hessians_at(plan->hessians, index);
    if (h.cols != w->cols)
        return nib_fail(NIB_ERR_DATA, "%s: %s.hessian has %lld columns, and %s %lld inputs", h.path,
                        nib_quote(h.name).text, (long long)h.cols, nib_quote(w->name).text, (long long)w->cols);
    const double tokens = tokens_of(plan, row, &h);
    ++*found;
    if (tokens < NIB_GPTQ_TOKENS * (double)w->cols)
        return say(row, nib_plan_string(plan, "none: %.0f tokens, and %lld columns need %lld", tokens,
                                        (long long)w->cols, (long long)(NIB_GPTQ_TOKENS * w->cols)));
    row->hessian = (uint32_t)index;
    return say(row, nib_plan_string(plan, "%.0f tokens", tokens));
}

nib_status nib_plan_find_hessians(nib_plan *plan)
{
    size_t found = 0;
    if (!plan->hessians)
        return NIB_OK;
    for (size_t i = 0; i < plan->in->n_weights; i++)
        TRY(find_row(plan, i, &found));
    if (found)
        return NIB_OK;
    const struct nib_hessian first = nib_hessians_at(plan->hessians, 0);
    return nib_fail(NIB_ERR_DATA, "%s: there are Hessians for none of the weights to quantize: %s, for one", first.path,
                    nib_quote(first.name).text);
}
