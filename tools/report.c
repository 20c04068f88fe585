/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.c - the numbers of a report, and the report as JSON. report_html.c draws the page.
 */
#define _POSIX_C_SOURCE 200809L

#include "report.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "output.h"
#include "report_html.h"
#include "text.h"

/* ---- Numbers ---- */

/* Details are large: only the worst keep theirs. Returns a place for them, or REPORT_NONE. */
static size_t place_for_details(struct report *r, double sqnr)
{
    if (!r->details && !(r->details = malloc(REPORT_DETAILS * sizeof *r->details))) {
        r->no_memory = true;
        return REPORT_NONE;
    }
    if (r->n_details < REPORT_DETAILS)
        return r->n_details++;
    size_t best = 0;
    for (size_t i = 1; i < REPORT_DETAILS; i++)
        if (r->rows[r->detailed[i]].sqnr >= r->rows[r->detailed[best]].sqnr)
            best = i;
    if (r->rows[r->detailed[best]].sqnr <= sqnr)
        return REPORT_NONE;
    r->rows[r->detailed[best]].detail = REPORT_NONE;
    return best;
}

static void add_sums(struct report *r, const nib_weight_stats *s)
{
    for (int i = 0; i < 16; i++)
        r->codes[i] += s->codes[i];
    for (int i = 0; i < 256; i++)
        r->scales[i] += s->scales[i];
    if (s->error_squares == 0)
        return;
    r->changed++;
    r->sum_squares += s->sum_squares;
    r->error_squares += s->error_squares;
    r->elements += s->elements;
    r->zeroed += s->zeroed;
    r->clipped += s->clipped;
    r->underflowed += s->underflowed;
    r->blocks += s->blocks;
}

static int collect(void *context, const nib_compared *compared)
{
    struct report *r = context;
    const nib_weight_stats *s = compared->stats;
    if (r->n == r->capacity) {
        const size_t capacity = r->capacity ? 2 * r->capacity : 256;
        struct report_row *rows = realloc(r->rows, capacity * sizeof *rows);
        if (!rows) {
            r->no_memory = true;
            return 1;
        }
        r->rows = rows;
        r->capacity = capacity;
    }
    struct report_row *row = &r->rows[r->n];
    *row = (struct report_row){
        .name = compared->name,
        .rows = compared->rows,
        .cols = compared->cols,
        .format_a = compared->format_a,
        .format_b = compared->format_b,
        .sqnr = nib_stats_sqnr(s),
        .relative = s->error_squares > 0 ? sqrt(s->error_squares / s->sum_squares) : 0,
        .max_error = s->max_error,
        .amax = s->amax,
        .zeroed = s->zeroed,
        .clipped = s->clipped,
        .underflowed = s->underflowed,
        .elements = s->elements,
        .blocks = s->blocks,
        .detail = s->error_squares > 0 ? place_for_details(r, nib_stats_sqnr(s)) : REPORT_NONE,
    };
    if (row->detail != REPORT_NONE) {
        r->details[row->detail] = *s;
        r->detailed[row->detail] = r->n;
    }
    r->n++;
    add_sums(r, s);
    return r->no_memory;
}

nib_status report_collect(struct report *report, const nib_checkpoint *original, const nib_checkpoint *quantized,
                          const nib_job *job)
{
    *report = (struct report){ .a = original, .b = quantized };
    report->facts_a.bytes = report->facts_b.bytes = sizeof report->facts_a;
    nib_status status = nib_checkpoint_get_facts(original, &report->facts_a);
    if (!status)
        status = nib_checkpoint_get_facts(quantized, &report->facts_b);
    if (!status)
        status = nib_checkpoint_compare(original, quantized, job, collect, report, &report->only_a, &report->only_b);
    return status;
}

void report_free(struct report *report)
{
    free(report->rows);
    free(report->details);
    report->rows = NULL;
    report->details = NULL;
    report->n = report->capacity = 0;
}

static int compare_rows(const void *a, const void *b)
{
    const struct report_row *x = *(const struct report_row *const *)a, *y = *(const struct report_row *const *)b;
    const int order = (x->sqnr > y->sqnr) - (x->sqnr < y->sqnr);
    return order ? order : (x > y) - (x < y);
}

const struct report_row **report_worst(const struct report *report)
{
    const struct report_row **worst = malloc((report->n + 1) * sizeof *worst);
    if (!worst)
        return NULL;
    size_t n = 0;
    for (size_t i = 0; i < report->n; i++)
        if (report->rows[i].sqnr < INFINITY)
            worst[n++] = &report->rows[i];
    qsort(worst, n, sizeof *worst, compare_rows);
    worst[n] = NULL;
    return worst;
}

/* ---- Weights one by one ---- */

/* Parts of a model whose layers have names of their own, or the same names again. */
static const struct part {
    const char *in_name, *word;
} parts[] = {
    { "shared_expert", "shared " }, { "experts.", "experts " }, { "visual.", "vision " },
    { "vision_", "vision " },       { "audio_", "audio " },     { "mtp.", "mtp " },
};

/* Last words of a name that say nothing alone. */
static bool is_vague(const char *word, size_t length)
{
    static const char *const vague[] = { "dense", "linear", "proj", "projection", "fc", "out", "output", "conv" };
    for (size_t i = 0; i < sizeof vague / sizeof *vague; i++)
        if (strlen(vague[i]) == length && strncmp(word, vague[i], length) == 0)
            return true;
    return false;
}

int report_split_name(const char *name, char *kind, size_t bytes)
{
    int layer = -1;
    const char *last = name, *within = name, *prefix = "";
    for (const char *part = name; part; part = strchr(part, '.') ? strchr(part, '.') + 1 : NULL) {
        char *end;
        const long number = strtol(part, &end, 10);
        const bool is_number = end != part && (*end == '.' || !*end);
        if (is_number && layer < 0 && number >= 0 && number < 100000)
            layer = (int)number;
        if (is_number && *end)
            within = end + 1;
        if (!is_number)
            last = part;
    }
    for (size_t i = 0; !*prefix && i < sizeof parts / sizeof *parts; i++)
        prefix = strstr(name, parts[i].in_name) ? parts[i].word : "";
    const size_t length = strcspn(last, ".");
    const char *const start = is_vague(last, length) && within < last ? within : last;
    size_t n = (size_t)snprintf(kind, bytes, "%s%.*s", prefix, (int)(last + length - start), start);
    if (n >= bytes) { /* cut, but not within a character */
        for (n = bytes - 1; n > 0 && ((unsigned char)kind[n - 1] & 0xC0) == 0x80;)
            n--;
        kind[n && (unsigned char)kind[n - 1] >= 0xC0 ? n - 1 : n] = 0;
    }
    return layer;
}

/* What can be seen of a weight that both have, where no plan says it. */
static void look_at(struct report_item *item)
{
    const struct report_row *row = item->row;
    item->reason = "";
    item->kept = row->sqnr == INFINITY;
    item->fate = item->kept                       ? row->format_a == row->format_b ? "unchanged" : "converted"
                 : row->format_a == row->format_b ? "changed"
                                                  : nib_checkpoint_format_name(row->format_b);
}

static uint64_t stored_bytes(const nib_checkpoint *checkpoint, const char *name)
{
    nib_weight w = { .bytes = sizeof w };
    size_t index;
    return nib_checkpoint_find_weight(checkpoint, name, &index) || nib_checkpoint_get_weight(checkpoint, index, &w)
               ? 0
               : w.stored_bytes;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct report_item *)a)->name, ((const struct report_item *)b)->name);
}

/* What changed, the worst first; then what did not, by name. */
static int compare_items(const void *a, const void *b)
{
    const struct report_item *x = a, *y = b;
    const double left = x->row ? x->row->sqnr : INFINITY, right = y->row ? y->row->sqnr : INFINITY;
    if (left != right && !isnan(left) && !isnan(right))
        return left < right ? -1 : 1;
    return strcmp(x->name, y->name);
}

static void take_plan(struct report_item *item, const nib_plan_row *row)
{
    static const char *const fates[NIB_ACTION_COUNT] = { "quantized", "converted", "dequantized",
                                                         "repaired",  "kept",      "FP8" };
    item->fate = *row->reason ? fates[NIB_ACTION_KEEP] : fates[row->action];
    item->reason = row->reason;
    item->kept = *row->reason || row->action == NIB_ACTION_KEEP;
    item->rows = row->rows;
    item->cols = row->cols;
    item->before = row->bytes_in;
    item->after = row->bytes_out;
}

/* Weights that one alone has in this shape, where they are as many as the comparison counted: it may know a weight by
 * two names. */
static void add_alone(struct report_items *out, const struct report *r, bool first)
{
    const nib_checkpoint *const one = first ? r->a : r->b, *const other = first ? r->b : r->a;
    const size_t weights = first ? r->facts_a.weights : r->facts_b.weights, before = out->n;
    nib_weight w = { .bytes = sizeof w }, like = { .bytes = sizeof like };
    size_t index;
    for (size_t i = 0; i < weights && !nib_checkpoint_get_weight(one, i, &w); i++)
        if (nib_checkpoint_find_weight(other, w.name, &index) || nib_checkpoint_get_weight(other, index, &like) ||
            like.rows != w.rows || like.cols != w.cols)
            out->items[out->n++] = (struct report_item){ .name = w.name,
                                                         .fate = first ? "only in the first" : "only in the second",
                                                         .reason = "",
                                                         .kept = true,
                                                         .rows = w.rows,
                                                         .cols = w.cols,
                                                         .before = first ? w.stored_bytes : 0,
                                                         .after = first ? 0 : w.stored_bytes };
    if (out->n - before != (first ? r->only_a : r->only_b))
        out->n = before;
}

static void add_plan(struct report_items *out, const nib_plan *plan, size_t rows)
{
    const size_t compared = out->n;
    nib_plan_row row = { .bytes = sizeof row };
    qsort(out->items, compared, sizeof *out->items, compare_names);
    for (size_t i = 0; i < rows && !nib_plan_get_row(plan, i, &row); i++) {
        const struct report_item key = { .name = row.name };
        struct report_item *item = bsearch(&key, out->items, compared, sizeof key, compare_names);
        if (!item) {
            item = &out->items[out->n++];
            *item = key;
        }
        take_plan(item, &row);
    }
}

static int compare_kinds(const void *a, const void *b)
{
    const struct report_kind *x = a, *y = b;
    if (x->before != y->before)
        return x->before > y->before ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Kinds are few; of a model that has more, the last stands for the rest. */
static bool sort_kinds(struct report_items *out, const struct report *r)
{
    enum { MOST = 64 };
    out->kinds = calloc(MOST, sizeof *out->kinds);
    if (!out->kinds)
        return false;
    out->others = (struct report_kind){ .name = "everything else",
                                        .elements = r->facts_a.elements,
                                        .before = r->facts_a.tensor_bytes,
                                        .after = r->facts_b.tensor_bytes };
    for (size_t i = 0; i < out->n; i++) {
        const struct report_item *item = &out->items[i];
        const uint64_t elements = item->before ? (uint64_t)(item->rows * item->cols) : 0;
        char name[sizeof out->kinds->name];
        size_t k = 0;
        (void)report_split_name(item->name, name, sizeof name);
        while (k < out->n_kinds && strcmp(out->kinds[k].name, name) != 0)
            k++;
        if (k == MOST)
            k--;
        if (k == out->n_kinds)
            strcpy(out->kinds[out->n_kinds++].name, k == MOST - 1 ? "others" : name);
        struct report_kind *kind = &out->kinds[k], *rest = &out->others;
        kind->weights++;
        kind->elements += elements;
        kind->before += item->before;
        kind->after += item->after;
        rest->elements -= elements < rest->elements ? elements : rest->elements;
        rest->before -= item->before < rest->before ? item->before : rest->before;
        rest->after -= item->after < rest->after ? item->after : rest->after;
    }
    qsort(out->kinds, out->n_kinds, sizeof *out->kinds, compare_kinds);
    return true;
}

bool report_list(const struct report *r, const nib_plan *plan, struct report_items *out)
{
    *out = (struct report_items){ .planned = plan != NULL, .plan.bytes = sizeof out->plan };
    if (plan && nib_plan_get_facts(plan, &out->plan))
        return false;
    out->items = calloc(r->n + out->plan.weights + r->facts_a.weights + r->facts_b.weights + 1, sizeof *out->items);
    if (!out->items)
        return false;
    for (size_t i = 0; i < r->n; i++) {
        const struct report_row *row = &r->rows[i];
        struct report_item *item = &out->items[out->n++];
        *item = (struct report_item){ .name = row->name, .rows = row->rows, .cols = row->cols, .row = row };
        look_at(item);
        if (!plan) {
            item->before = stored_bytes(r->a, row->name);
            item->after = stored_bytes(r->b, row->name);
        }
    }
    if (plan) {
        add_plan(out, plan, out->plan.weights);
    } else {
        add_alone(out, r, true);
        add_alone(out, r, false);
    }
    qsort(out->items, out->n, sizeof *out->items, compare_items);
    return sort_kinds(out, r);
}

void report_items_free(struct report_items *items)
{
    free(items->items);
    free(items->kinds);
}

/* ---- Why two differ ---- */

/* Every leaf of an object under its path: {"a": {"b": 1}} as "a.b". */
static void flatten(const json_t *value, const char *path, json_t *out)
{
    const char *key;
    json_t *inner;
    char below[1024];
    if (!json_is_object(value)) {
        json_object_set(out, path, (json_t *)value);
        return;
    }
    json_object_foreach((json_t *)value, key, inner)
    {
        snprintf(below, sizeof below, "%s%s%s", path, *path ? "." : "", key);
        flatten(inner, below, out);
    }
}

static json_t *flattened(const char *text)
{
    json_t *out = json_object(), *value = text ? json_loads(text, 0, NULL) : NULL;
    if (out && value)
        flatten(value, "", out);
    json_decref(value);
    return out;
}

static void note_difference(json_t *out, const char *key, json_t *a, json_t *b)
{
    json_array_append_new(
        out, json_pack("{s:s, s:O, s:O}", "option", key, "a", a ? a : json_null(), "b", b ? b : json_null()));
}

json_t *report_differences(const char *a, const char *b)
{
    json_t *left = flattened(a), *right = flattened(b), *out = json_array(), *value;
    const char *key;
    if (left && right && out) {
        json_object_foreach(left, key, value)
        {
            if (!json_equal(value, json_object_get(right, key)))
                note_difference(out, key, value, json_object_get(right, key));
        }
        json_object_foreach(right, key, value)
        {
            if (!json_object_get(left, key))
                note_difference(out, key, NULL, value);
        }
    }
    json_decref(left);
    json_decref(right);
    return out;
}

/* ---- JSON ---- */

static json_t *side_of(const nib_checkpoint_facts *facts)
{
    json_t *side = json_pack("{s:o, s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:o}", "path", text_json(facts->path), "format",
                             nib_checkpoint_format_name(facts->format), "model_type", text_json(facts->model_type),
                             "files", (json_int_t)facts->files, "weights", (json_int_t)facts->weights, "tensor_bytes",
                             (json_int_t)facts->tensor_bytes, "weight_elements", (json_int_t)facts->weight_elements,
                             "elements", (json_int_t)facts->elements, "bits_per_weight",
                             text_number(text_bits(facts->tensor_bytes, facts->elements)));
    json_t *provenance = facts->provenance ? json_loads(facts->provenance, 0, NULL) : NULL;
    if (side)
        json_object_set_new(side, "provenance", provenance ? provenance : json_null());
    return side;
}

static json_t *counts_of(const int64_t *counts, int n)
{
    json_t *list = json_array();
    for (int i = 0; list && i < n; i++)
        json_array_append_new(list, json_integer(counts[i]));
    return list;
}

json_t *report_row_json(const struct report_row *row)
{
    return json_pack("{s:o, s:[II], s:s, s:s, s:o, s:o, s:o, s:o, s:I, s:I, s:I, s:I, s:I}", "name",
                     text_json(row->name), "shape", (json_int_t)row->rows, (json_int_t)row->cols, "format_a",
                     nib_checkpoint_format_name(row->format_a), "format_b", nib_checkpoint_format_name(row->format_b),
                     "sqnr_db", text_number(row->sqnr), "relative_l2", text_number(row->relative), "max_error",
                     text_number(row->max_error), "amax", text_number(row->amax), "zeroed", (json_int_t)row->zeroed,
                     "clipped", (json_int_t)row->clipped, "underflowed_blocks", (json_int_t)row->underflowed,
                     "elements", (json_int_t)row->elements, "blocks", (json_int_t)row->blocks);
}

static json_t *places_of(const nib_worst *list, double total)
{
    json_t *places = json_array();
    for (int i = 0; places && i < NIB_WORST && list[i].error_squares > 0; i++)
        json_array_append_new(places, json_pack("{s:I, s:I, s:o, s:o}", "row", (json_int_t)list[i].row, "col",
                                                (json_int_t)list[i].col, "sqnr_db",
                                                text_number(10 * log10(list[i].sum_squares / list[i].error_squares)),
                                                "error_share", text_number(list[i].error_squares / total)));
    return places;
}

static json_t *item_of(const struct report *r, const struct report_item *item)
{
    char kind[64];
    const int layer = report_split_name(item->name, kind, sizeof kind);
    json_t *object = item->row ? report_row_json(item->row)
                               : json_pack("{s:o, s:[II]}", "name", text_json(item->name), "shape",
                                           (json_int_t)item->rows, (json_int_t)item->cols);
    json_t *more = json_pack("{s:s, s:o, s:o, s:o, s:I, s:I}", "fate", item->fate, "reason", text_json(item->reason),
                             "kind", text_json(kind), "layer", layer < 0 ? json_null() : json_integer(layer), "bytes_a",
                             (json_int_t)item->before, "bytes_b", (json_int_t)item->after);
    if (object && more)
        json_object_update(object, more);
    json_decref(more);
    const nib_weight_stats *s = item->row && item->row->detail != REPORT_NONE ? &r->details[item->row->detail] : NULL;
    if (object && s) {
        json_object_set_new(object, "code_counts", counts_of(s->codes, 16));
        json_object_set_new(object, "scale_counts", counts_of(s->scales, 256));
        json_object_set_new(object, "worst_rows", places_of(s->worst_rows, s->error_squares));
        json_object_set_new(object, "worst_blocks", places_of(s->worst_blocks, s->error_squares));
    }
    return object;
}

static json_t *kind_of(const struct report_kind *kind)
{
    return json_pack("{s:o, s:I, s:I, s:I, s:I}", "kind", text_json(kind->name), "weights", (json_int_t)kind->weights,
                     "elements", (json_int_t)kind->elements, "bytes_a", (json_int_t)kind->before, "bytes_b",
                     (json_int_t)kind->after);
}

static json_t *plan_of(const struct report_items *items)
{
    const nib_plan_facts *p = &items->plan;
    if (!items->planned)
        return json_null();
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "changed", (json_int_t)p->changed, "kept", (json_int_t)p->kept,
                     "groups", (json_int_t)p->groups, "bytes_in", (json_int_t)p->bytes_in, "bytes_out",
                     (json_int_t)p->bytes_out);
}

static bool write_json(FILE *file, const struct report *r, const struct report_items *items)
{
    json_t *rows = json_array(), *kinds = json_array();
    for (size_t i = 0; rows && i < items->n; i++)
        json_array_append_new(rows, item_of(r, &items->items[i]));
    for (size_t i = 0; kinds && i < items->n_kinds; i++)
        json_array_append_new(kinds, kind_of(&items->kinds[i]));
    if (kinds)
        json_array_append_new(kinds, kind_of(&items->others));
    const double sqnr = r->error_squares > 0 ? 10 * log10(r->sum_squares / r->error_squares) : INFINITY;
    json_t *report = text_report(
        "report", json_pack("{s:o, s:o, s:I, s:I, s:I, s:I, s:o, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "a",
                            side_of(&r->facts_a), "b", side_of(&r->facts_b), "compared", (json_int_t)r->n, "changed",
                            (json_int_t)r->changed, "only_a", (json_int_t)r->only_a, "only_b", (json_int_t)r->only_b,
                            "sqnr_db", text_number(sqnr), "zeroed", (json_int_t)r->zeroed, "clipped",
                            (json_int_t)r->clipped, "underflowed_blocks", (json_int_t)r->underflowed, "differences",
                            report_differences(r->facts_a.provenance, r->facts_b.provenance), "code_counts",
                            counts_of(r->codes, 16), "scale_counts", counts_of(r->scales, 256), "plan", plan_of(items),
                            "kinds", kinds, "weights", rows));
    const bool good = report && text_dump(file, report, JSON_INDENT(1));
    json_decref(report);
    return good;
}

/* ---- Files ---- */

static bool ends_with(const char *text, const char *end)
{
    const size_t a = strlen(text), b = strlen(end);
    return a > b && strcmp(text + a - b, end) == 0;
}

/* A path without what changes nothing: "./", "//", and slashes at the end. Returns its length. */
static size_t tidy_path(const char *path, char *out, size_t bytes)
{
    size_t n = 0;
    while (*path && n + 1 < bytes) {
        const bool start = n == 0 || out[n - 1] == '/';
        if (start && path[0] == '.' && (path[1] == '/' || !path[1]))
            path += 1 + (path[1] == '/');
        else if (n && start && *path == '/')
            path++;
        else
            out[n++] = *path++;
    }
    while (n > 1 && out[n - 1] == '/')
        n--;
    out[n] = 0;
    return n;
}

static bool same_directory(const char *a, const char *b)
{
    struct stat first, second;
    char left[4096], right[4096];
    if (stat(a, &first) == 0 && stat(b, &second) == 0)
        return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
    tidy_path(a, left, sizeof left);
    tidy_path(b, right, sizeof right);
    return strcmp(left, right) == 0;
}

/* Where the files of a model are: it may be named by one of them. */
static bool model_directory(const char *path, char *directory, size_t bytes)
{
    struct stat there;
    return stat(path, &there) == 0 && !S_ISDIR(there.st_mode) ? output_parent(path, directory, bytes)
                                                              : (size_t)snprintf(directory, bytes, "%s", path) < bytes;
}

/* Whether a file is a report that nib made: near its beginning it says so. */
static bool is_report(const char *path)
{
    enum { BEGINNING = 32768 };
    char *const text = malloc(BEGINNING + 1);
    FILE *const file = text ? fopen(path, "r") : NULL;
    const char *const mark = ends_with(path, ".html") ? REPORT_TITLE : "\"command\": \"report\"";
    if (file) {
        text[fread(text, 1, BEGINNING, file)] = 0;
        fclose(file);
    }
    const bool found = file && strstr(text, mark);
    free(text);
    return found;
}

/* Whether a report of this name in the directory of a checkpoint would take the place of one of its files; of an input's
 * too where it is an output's, for a run copies them. What is no regular file is for output_try to tell. */
static bool replaces(const char *name, const char *directory, const char *a, const char *b)
{
    static const char *const own[] = { "config.json", "hf_quant_config.json", "model.safetensors.index.json" };
    const char *const checkpoints[] = { a, b };
    char models[2][4096], path[4096];
    struct stat there;
    for (int i = 0; i < 2; i++)
        if (!model_directory(checkpoints[i], models[i], sizeof models[i]))
            return false; /* nor can it be opened */
    const bool in_b = same_directory(directory, models[1]);
    if (!in_b && !same_directory(directory, models[0]))
        return false;
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strcmp(name, own[i]) == 0)
            return true;
    for (int i = 0; i < 1 + in_b; i++)
        if ((size_t)snprintf(path, sizeof path, "%s/%s", models[i], name) < sizeof path && stat(path, &there) == 0 &&
            S_ISREG(there.st_mode) && !is_report(path))
            return true;
    return false;
}

bool report_spares(const char *path, const char *read)
{
    struct stat report, file;
    if (!read || stat(path, &report) != 0 || stat(read, &file) != 0 || report.st_dev != file.st_dev ||
        report.st_ino != file.st_ino)
        return true;
    cli_error("the report %s would replace a file that is read: give it another name", path);
    return false;
}

bool report_can_write(const char *path, const char *a, const char *b, bool name_only)
{
    char directory[4096];
    const char *const slash = strrchr(path, '/');
    if (!ends_with(path, ".html") && !ends_with(path, ".json")) {
        cli_error("a report is FILE.html or FILE.json, not '%s'", path);
        return false;
    }
    if (!output_parent(path, directory, sizeof directory)) {
        cli_error("cannot write the report %s: %s", path, strerror(ENAMETOOLONG));
        return false;
    }
    if (replaces(slash ? slash + 1 : path, directory, a, b)) {
        cli_error("the report %s would replace a file of the checkpoint: give it another name", path);
        return false;
    }
    const int code = same_directory(path, b) ? EISDIR : name_only ? 0 : output_try(path);
    if (!code || (code == ENOENT && same_directory(directory, b))) /* the run will make it */
        return true;
    cli_error("cannot write the report %s: %s", path, output_reason(code));
    return false;
}

bool report_write(const struct report *report, const nib_plan *plan, const char *path)
{
    struct output out;
    int code = output_open(&out, path);
    if (!code) {
        struct report_items items;
        bool good = report_list(report, plan, &items);
        if (good)
            good = ends_with(path, ".json") ? write_json(out.file, report, &items)
                                            : report_write_html(out.file, report, &items);
        report_items_free(&items);
        code = output_close(&out, good && !text_lost_memory());
    }
    if (code)
        cli_error("cannot write the report %s: %s", path, output_reason(code));
    return !code;
}

bool report_make(const char *path, const nib_checkpoint *original, const nib_checkpoint *quantized,
                 const nib_plan *plan, const nib_job *job)
{
    struct report report;
    const nib_status status = report_collect(&report, original, quantized, job);
    if (status)
        cli_error("report: %s", report.no_memory ? "no memory" : nib_last_error());
    const bool good = !status && report_write(&report, plan, path);
    report_free(&report);
    return good;
}
