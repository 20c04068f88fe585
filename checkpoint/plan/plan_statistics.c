/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_statistics.c - which entry of a file of statistics belongs to which weight, and what a plan makes of it: the mean
 * squares that weigh a sweep, and scales of activations.
 */
#include "plan/plan.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "format/codec.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

nib_status nib_plan_open_statistics(nib_plan *plan, const char *path)
{
    TRY(nib_statistics_open(path, &plan->statistics));
    plan->digests = nib_alloc_zeroed(nib_statistics_count(plan->statistics) * sizeof *plan->digests);
    if (!plan->digests ||
        json_object_set_new(plan->options, "statistics_xxh3", json_string(nib_statistics_hash(plan->statistics))))
        return no_memory();
    return NIB_OK;
}

/* ---- Names ---- */

struct alias {
    char name[96];
    uint32_t entry;
};

struct search {
    nib_plan *plan;
    const struct nib_statistics *statistics;
    bool gguf;             /* the checkpoint has llama.cpp's names */
    struct alias *aliases; /* and the file has not: its entries by the names that they have there */
    size_t n_aliases;
};

static int by_name(const void *left, const void *right)
{
    return strcmp(((const struct alias *)left)->name, ((const struct alias *)right)->name);
}

static nib_status start_search(struct search *s)
{
    const size_t n = nib_statistics_count(s->statistics);
    if (!s->gguf || nib_statistics_of_gguf(s->statistics))
        return NIB_OK;
    s->aliases = nib_alloc(n * sizeof *s->aliases);
    if (!s->aliases)
        return no_memory();
    for (size_t i = 0; i < n; i++) {
        char name[64];
        int64_t expert;
        if (nib_ck_llama_name(nib_statistics_at(s->statistics, i).name, name, sizeof name, &expert)) {
            struct alias *alias = &s->aliases[s->n_aliases++];
            alias->entry = (uint32_t)i;
            snprintf(alias->name, sizeof alias->name, expert < 0 ? "%s" : "%s.%lld", name, (long long)expert);
        }
    }
    qsort(s->aliases, s->n_aliases, sizeof *s->aliases, by_name);
    return NIB_OK;
}

static bool look_up(const struct search *s, const char *name, uint32_t *entry)
{
    struct alias key;
    size_t index;
    if (s->aliases) {
        snprintf(key.name, sizeof key.name, "%s", name);
        const struct alias *found = bsearch(&key, s->aliases, s->n_aliases, sizeof key, by_name);
        *entry = found ? found->entry : NIB_NONE;
        return found != NULL;
    }
    if (!nib_statistics_find(s->statistics, name, &index))
        return false;
    *entry = (uint32_t)index;
    return true;
}

/* An expert's name without its number: "mlp.experts.up_proj", "blk.0.ffn_up_exps". -1: it is none. */
static int64_t without_number(const char *name, char *out, size_t bytes)
{
    const char *at = strstr(name, ".experts."), *digits = at ? at + strlen(".experts.") : strstr(name, "_exps.");
    if (!at && digits)
        digits += strlen("_exps.");
    if (!digits || *digits < '0' || *digits > '9')
        return -1;
    char *end;
    const long long number = strtoll(digits, &end, 10);
    if (*end && *end != '.')
        return -1;
    /* One of the two dots goes with the number. */
    const int n = snprintf(out, bytes, "%.*s%s", (int)(digits - name) - 1, name, end);
    return n > 0 && (size_t)n < bytes ? number : -1;
}

/* Gate and up that are one matrix elsewhere. */
static bool joined_name(const char *name, char *out, size_t bytes)
{
    static const struct {
        const char *end, *joined;
    } ends[] = { { ".gate_proj", ".gate_up_proj" },
                 { ".up_proj", ".gate_up_proj" },
                 { ".ffn_gate_exps", ".ffn_gate_up_exps" },
                 { ".ffn_up_exps", ".ffn_gate_up_exps" } };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (nib_ck_ends_with(name, ends[i].end)) {
            const int n =
                snprintf(out, bytes, "%.*s%s", (int)(strlen(name) - strlen(ends[i].end)), name, ends[i].joined);
            return n > 0 && (size_t)n < bytes;
        }
    return false;
}

/* A name as it is, and joined. */
static bool look_up_both(const struct search *s, const char *name, uint32_t *entry)
{
    char joined[1024];
    return look_up(s, name, entry) || (joined_name(name, joined, sizeof joined) && look_up(s, joined, entry));
}

/* By the tensor that a stack of experts lies in, which may have a name of its own. */
static bool look_up_stack(const struct search *s, const struct nib_ck_weight *w, uint32_t *entry, int64_t *expert)
{
    static const char suffix[] = ".weight";
    char name[1024];
    if (w->index < 0 || w->tensor[NIB_ROLE_DATA] == NIB_NONE)
        return false;
    const int n = snprintf(name, sizeof name, "%s", s->plan->in->tensors[w->tensor[NIB_ROLE_DATA]].name);
    if (n < 0 || (size_t)n >= sizeof name)
        return false;
    if (nib_ck_ends_with(name, suffix))
        name[strlen(name) - strlen(suffix)] = 0;
    *expert = w->index;
    return look_up(s, name, entry);
}

/* By the checkpoint's names, by those that transformers has for them, by llama.cpp's. */
static bool find_entry(const struct search *s, const struct nib_ck_weight *w, uint32_t *entry, int64_t *expert)
{
    char stem[1024], other[1024];
    *expert = -1;
    if (look_up(s, w->name, entry)) {
        if (nib_statistics_at(s->statistics, *entry).slices > 1) /* nib's own: each expert names the input of all */
            *expert = without_number(w->name, stem, sizeof stem);
        return true;
    }
    if (look_up_stack(s, w, entry, expert))
        return true;
    *expert = without_number(w->name, stem, sizeof stem);
    if (look_up_both(s, *expert < 0 ? w->name : stem, entry))
        return true;
    if (nib_ck_reader_name(s->plan->in, *expert < 0 ? w->name : stem, other, sizeof other) &&
        look_up_both(s, other, entry))
        return true;
    return !s->gguf && nib_ck_llama_name(w->name, other, sizeof other, expert) && look_up_both(s, other, entry);
}

/* ---- Entries ---- */

static nib_status fit_entry(const nib_plan *plan, uint32_t entry, int64_t expert, const struct nib_ck_weight *w,
                            struct nib_plan_input *out)
{
    const struct nib_statistic found = nib_statistics_at(plan->statistics, entry);
    const int64_t slices = found.slices ? found.slices : expert < 0 ? 1 : found.values / w->cols;
    if (slices < 1 || found.values % w->cols || found.values / w->cols != slices || (slices > 1 && expert >= slices) ||
        (slices > 1 && expert < 0))
        return nib_fail(NIB_ERR_DATA,
                        "%s: %s has %lld values in %lld slices, which do not fit %s with its %lld inputs: they are "
                        "statistics of another model",
                        nib_statistics_path(plan->statistics), nib_quote(found.name).text, (long long)found.values,
                        (long long)slices, nib_quote(w->name).text, (long long)w->cols);
    *out = (struct nib_plan_input){ .entry = (uint32_t)nib_statistics_same(plan->statistics, entry),
                                    .slices = slices,
                                    .slice = slices > 1 ? expert : 0 };
    return NIB_OK;
}

/* The inputs of down are each expert's own, in sizes of their own. */
static bool is_down(const char *name)
{
    return nib_ck_ends_with(name, "down_proj") || nib_ck_ends_with(name, ".w2") || strstr(name, "ffn_down");
}

static double mean_of(const float *values, int64_t n)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++)
        sum += (double)values[k];
    return sum / (double)n;
}

/* One slice of an entry, added to what all come to. */
static nib_status add_slice(const nib_plan *plan, const struct nib_plan_input *input, int64_t cols, bool down,
                            float *values, double *sums, double *weight, struct nib_statistics_digest *digest)
{
    float *largest = digest->largest;
    double tokens;
    TRY(nib_statistics_read_amaxes(plan->statistics, input->entry, input->slices, input->slice, cols, values,
                                   &digest->measured));
    for (int64_t k = 0; k < cols && digest->measured; k++)
        largest[k] = nib_fmax(largest[k], values[k]);
    TRY(nib_statistics_read(plan->statistics, input->entry, input->slices, input->slice, cols, values, &tokens));
    if (tokens == 0)
        return NIB_OK;
    for (int64_t k = 0; k < cols && !digest->measured; k++)
        largest[k] = nib_fmax(largest[k], NIB_AMAX_OF_RMS * sqrtf(values[k]));
    const double mean = mean_of(values, cols);
    const double share = down ? (mean > 0 ? 1 / mean : 0) : nib_statistics_counts_tokens(plan->statistics) ? tokens : 1;
    for (int64_t k = 0; k < cols; k++)
        sums[k] += (double)values[k] * share;
    *weight += down ? mean > 0 : share;
    digest->tokens += tokens;
    return NIB_OK;
}

/* What all slices of an entry come to, once. */
static nib_status digest_entry(nib_plan *plan, struct nib_plan_input input, int64_t cols)
{
    struct nib_statistics_digest *digest = &plan->digests[input.entry];
    if (digest->ready)
        return NIB_OK;
    const bool down = is_down(nib_statistics_at(plan->statistics, input.entry).name);
    float *values = nib_alloc((size_t)cols * sizeof *values);
    double *sums = nib_alloc_zeroed((size_t)cols * sizeof *sums), weight = 0;
    digest->largest = nib_plan_memory(plan, (size_t)cols * sizeof *digest->largest);
    nib_status status = values && sums && digest->largest ? NIB_OK : no_memory();
    for (int64_t k = 0; k < cols && !status; k++)
        digest->largest[k] = 0;
    for (input.slice = 0; input.slice < input.slices && !status; input.slice++)
        status = add_slice(plan, &input, cols, down, values, sums, &weight, digest);
    if (!status && input.slices > 1) {
        digest->pooled = nib_plan_memory(plan, (size_t)cols * sizeof *digest->pooled);
        status = digest->pooled ? NIB_OK : no_memory();
        for (int64_t k = 0; k < cols && !status; k++)
            digest->pooled[k] = weight > 0 ? (float)(sums[k] / weight) : 0;
    }
    digest->down = down;
    digest->ready = !status;
    nib_free(values);
    nib_free(sums);
    return status;
}

nib_status nib_plan_mean_squares(const nib_plan *plan, const struct nib_plan_input *input, int64_t cols, float *out,
                                 double *tokens)
{
    enum { PRIOR = 256 }; /* tokens that all experts together count for */
    const struct nib_statistics_digest *digest = &plan->digests[input->entry];
    TRY(nib_statistics_read(plan->statistics, input->entry, input->slices, input->slice, cols, out, tokens));
    if (!digest->pooled || (*tokens > 0 && !nib_statistics_counts_tokens(plan->statistics)))
        return NIB_OK;
    if (*tokens == 0) {
        memcpy(out, digest->pooled, (size_t)cols * sizeof *out);
        return NIB_OK;
    }
    const double own = *tokens, prior = PRIOR * (digest->down ? mean_of(out, cols) : 1);
    for (int64_t k = 0; k < cols; k++)
        out[k] = (float)((own * (double)out[k] + prior * (double)digest->pooled[k]) / (own + PRIOR));
    return NIB_OK;
}

float nib_plan_folded_square(float square, float scale)
{
    const double folded = (double)square / ((double)scale * (double)scale);
    return folded < (double)FLT_MAX ? (float)folded : FLT_MAX;
}

/* ---- Weights ---- */

static nib_status note_row(struct nib_out_row *row, const char *text)
{
    row->statistics = text;
    return text ? NIB_OK : no_memory();
}

static nib_status find_row(const struct search *s, size_t weight, float *scratch)
{
    nib_plan *plan = s->plan;
    const struct nib_ck_weight *w = &plan->in->weights[weight];
    struct nib_out_row *row = &plan->rows[weight];
    uint32_t entry;
    int64_t expert;
    if (!nib_plan_is_scaled(plan, weight)) /* of FP8 they decide what is folded */
        return NIB_OK;
    if (w->format == NIB_CHECKPOINT_FORMAT_MXFP4)
        return note_row(row, "none: its codes are taken over");
    if (!find_entry(s, w, &entry, &expert))
        return note_row(row, "none: it is not in the file");
    TRY(fit_entry(plan, entry, expert, w, &row->input));
    TRY(digest_entry(plan, row->input, w->cols));
    TRY(nib_plan_mean_squares(plan, &row->input, w->cols, scratch, &row->tokens));
    if (plan->digests[row->input.entry].tokens == 0) {
        row->input.entry = NIB_NONE;
        return note_row(row, "none: no token reached it");
    }
    if (row->tokens == 0)
        return note_row(row, "0 tokens: those of all experts instead");
    return note_row(row, nib_plan_string(plan, "%.0f %s", row->tokens,
                                         nib_statistics_counts_tokens(plan->statistics) ? "tokens" : "calls"));
}

static nib_status add_note(nib_plan *plan, const char *note)
{
    plan->note = note ? nib_plan_string(plan, "%s%s%s", plan->note, *plan->note ? "; " : "", note) : NULL;
    return plan->note ? NIB_OK : no_memory();
}

/* Weights that a server fuses have one input: where the file says otherwise, it is not what one thinks it is. */
static nib_status compare_fused(nib_plan *plan, float *a, float *b)
{
    size_t differ = 0, first = 0;
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        const struct nib_out_row *row = &plan->rows[i];
        const struct nib_out_row *other = row->group_name == NIB_NONE ? row : &plan->rows[row->group_name];
        const int64_t cols = plan->in->weights[i].cols;
        double tokens;
        if (row->input.entry == NIB_NONE || other->input.entry == NIB_NONE || row->input.entry == other->input.entry ||
            plan->in->weights[row->group_name].cols != cols)
            continue;
        TRY(nib_plan_mean_squares(plan, &row->input, cols, a, &tokens));
        TRY(nib_plan_mean_squares(plan, &other->input, cols, b, &tokens));
        bool same = true;
        for (int64_t k = 0; k < cols; k++)
            same &= nib_abs(a[k] - b[k]) <= 1e-3f * nib_fmax(a[k], b[k]);
        first = differ || same ? first : i;
        differ += !same;
    }
    return differ ? add_note(plan, nib_plan_string(plan,
                                                   "statistics of %zu weights differ from those of weights with the "
                                                   "same input, %s among them: is the file of this model?",
                                                   differ, plan->in->weights[first].name))
                  : NIB_OK;
}

/* Nothing found, or something missing where nothing may be. */
static nib_status check_found(const nib_plan *plan, bool strict)
{
    size_t found = 0, missing = 0, first = 0;
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        const struct nib_out_row *row = &plan->rows[i];
        const bool wanted =
            row->action == NIB_ACTION_QUANTIZE && plan->in->weights[i].format != NIB_CHECKPOINT_FORMAT_MXFP4;
        found += row->input.entry != NIB_NONE; /* of FP8 too: the file is of this model */
        if (!wanted)
            continue;
        first = missing || row->input.entry != NIB_NONE ? first : i;
        missing += row->input.entry == NIB_NONE;
    }
    const char *path = nib_statistics_path(plan->statistics);
    if (missing && !found)
        return nib_fail(NIB_ERR_DATA,
                        "%s: it has statistics for none of the %zu weights to quantize: it has %s, for one, and not %s",
                        path, missing, nib_quote(nib_statistics_at(plan->statistics, 0).name).text,
                        nib_quote(plan->in->weights[first].name).text);
    if (missing && strict)
        return nib_fail(NIB_ERR_DATA,
                        "%s: %zu weights to quantize have no statistics (%s): leave them out, or take "
                        "the rest as it is without --imatrix-strict",
                        path, missing, nib_quote(plan->in->weights[first].name).text);
    return NIB_OK;
}

/* ---- Activations ---- */

struct stem {
    char *name;
    uint32_t weight;
};

static int by_stem(const void *left, const void *right)
{
    return strcmp(((const struct stem *)left)->name, ((const struct stem *)right)->name);
}

/* Experts of a layer have one scale: the largest, whether a token reached them or not. */
static nib_status level_experts(nib_plan *plan, float *amaxes)
{
    const size_t n = plan->in->n_weights;
    struct stem *stems = nib_alloc((n + 1) * sizeof *stems);
    size_t count = 0;
    if (!stems)
        return no_memory();
    nib_status status = NIB_OK;
    for (uint32_t i = 0; i < n && !status; i++) {
        char stem[1024];
        if (plan->rows[i].action != NIB_ACTION_QUANTIZE ||
            without_number(plan->in->weights[i].name, stem, sizeof stem) < 0)
            continue;
        stems[count] = (struct stem){ nib_alloc(strlen(stem) + 1), i };
        status = stems[count].name ? NIB_OK : no_memory();
        if (!status)
            memcpy(stems[count++].name, stem, strlen(stem) + 1);
    }
    qsort(stems, count, sizeof *stems, by_stem);
    for (size_t begin = 0, end; begin < count; begin = end) {
        float largest = 0;
        for (end = begin; end < count && !strcmp(stems[begin].name, stems[end].name); end++)
            largest = nib_fmax(largest, amaxes[stems[end].weight]);
        for (size_t i = begin; i < end; i++)
            amaxes[stems[i].weight] = largest;
    }
    for (size_t i = 0; i < count; i++)
        nib_free(stems[i].name);
    nib_free(stems);
    return status;
}

/* Too large costs little and too small ruins a model: few tokens count twice, and of mean squares alone the largest
 * stands for an amax of 32 times its root. */
static float amax_of(const nib_plan *plan, uint32_t weight)
{
    enum { ENOUGH = 16384 };
    const struct nib_statistics_digest *digest = &plan->digests[plan->rows[weight].input.entry];
    const float *columns = nib_plan_columns(plan, weight);
    float amax = 0;
    for (int64_t k = 0; k < plan->in->weights[weight].cols; k++)
        amax = nib_fmax(amax, columns ? digest->largest[k] / columns[k] : digest->largest[k]);
    return digest->measured && digest->tokens < ENOUGH ? 2 * amax : amax;
}

nib_status nib_plan_scale_activations(nib_plan *plan, const uint32_t *group)
{
    if (plan->scheme != NIB_SCHEME_NVFP4 || plan->activation != NIB_ACTIVATION_STATISTICS)
        return NIB_OK;
    const size_t n = plan->in->n_weights;
    float *amaxes = nib_alloc_zeroed((n + 1) * sizeof *amaxes);
    if (!amaxes)
        return no_memory();
    size_t missing = 0, first = 0;
    for (uint32_t i = 0; i < n; i++)
        if (plan->rows[i].input.entry != NIB_NONE)
            amaxes[i] = amax_of(plan, i);
    nib_status status = level_experts(plan, amaxes);
    for (size_t i = 0; i < n && !status; i++)
        if (group[i] != NIB_NONE && amaxes[i] >= FLT_MIN && amaxes[i] <= 0x1p100f)
            plan->groups[group[i]].input_amax = nib_fmax(plan->groups[group[i]].input_amax, amaxes[i]);
    for (size_t i = 0; i < n && !status; i++)
        if (group[i] != NIB_NONE && !(plan->groups[group[i]].input_amax > 0)) {
            first = missing ? first : i;
            missing++;
        }
    nib_free(amaxes);
    if (!status && missing)
        status = add_note(plan, nib_plan_string(plan,
                                                "activations of %zu weights have no statistics (%s for one): their "
                                                "scale is 1",
                                                missing, plan->in->weights[first].name));
    return status;
}

/* ---- All of it ---- */

nib_status nib_plan_find_statistics(nib_plan *plan)
{
    const nib_checkpoint *in = plan->in;
    struct search s = { .plan = plan, .statistics = plan->statistics, .gguf = in->n_files && in->files[0].gguf };
    int64_t widest = 1;
    if (!plan->statistics)
        return NIB_OK;
    for (size_t i = 0; i < in->n_weights; i++)
        widest = nib_max(widest, in->weights[i].cols);
    float *scratch = nib_alloc((size_t)widest * 2 * sizeof *scratch);
    nib_status status = scratch ? start_search(&s) : no_memory();
    for (size_t i = 0; i < in->n_weights && !status; i++)
        status = find_row(&s, i, scratch);
    if (!status)
        status = check_found(plan, plan->statistics_strict);
    if (!status)
        status = compare_fused(plan, scratch, scratch + widest);
    nib_free(s.aliases);
    nib_free(scratch);
    return status;
}
