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
#include "report_html.h"
#include "text.h"

/* ---- Numbers ---- */

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
    r->rows[r->n++] = (struct report_row){
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
    };
    for (int i = 0; i < 16; i++)
        r->codes[i] += s->codes[i];
    for (int i = 0; i < 256; i++)
        r->scales[i] += s->scales[i];
    if (s->error_squares == 0)
        return 0;
    r->changed++;
    r->sum_squares += s->sum_squares;
    r->error_squares += s->error_squares;
    r->elements += s->elements;
    r->zeroed += s->zeroed;
    r->clipped += s->clipped;
    r->underflowed += s->underflowed;
    r->blocks += s->blocks;
    return 0;
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
    report->rows = NULL;
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
    json_t *side = json_pack("{s:o, s:s, s:o, s:I, s:I, s:I, s:I}", "path", text_json(facts->path), "format",
                             nib_checkpoint_format_name(facts->format), "model_type", text_json(facts->model_type),
                             "files", (json_int_t)facts->files, "weights", (json_int_t)facts->weights, "tensor_bytes",
                             (json_int_t)facts->tensor_bytes, "weight_elements", (json_int_t)facts->weight_elements);
    json_t *provenance = facts->provenance ? json_loads(facts->provenance, 0, NULL) : NULL;
    if (side && provenance)
        json_object_set_new(side, "provenance", provenance);
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

static json_t *plan_of(const nib_plan *plan)
{
    static const char *const actions[NIB_ACTION_COUNT] = { "quantize", "convert", "dequantize", "repair", "keep" };
    nib_plan_facts facts = { .bytes = sizeof facts };
    if (!plan || nib_plan_get_facts(plan, &facts))
        return json_null();
    json_t *rows = json_array();
    for (size_t i = 0; rows && i < facts.weights; i++) {
        nib_plan_row row = { .bytes = sizeof row };
        if (nib_plan_get_row(plan, i, &row) == NIB_OK)
            json_array_append_new(rows, json_pack("{s:o, s:s, s:o, s:o, s:I, s:I}", "name", text_json(row.name),
                                                  "action", actions[row.action], "reason", text_json(row.reason),
                                                  "group", text_json(row.group), "bytes_in", (json_int_t)row.bytes_in,
                                                  "bytes_out", (json_int_t)row.bytes_out));
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:o}", "changed", (json_int_t)facts.changed, "kept",
                     (json_int_t)facts.kept, "groups", (json_int_t)facts.groups, "bytes_in", (json_int_t)facts.bytes_in,
                     "bytes_out", (json_int_t)facts.bytes_out, "rows", rows);
}

static bool write_json(FILE *file, const struct report *r, const nib_plan *plan)
{
    json_t *rows = json_array();
    for (size_t i = 0; rows && i < r->n; i++)
        json_array_append_new(rows, report_row_json(&r->rows[i]));
    const double sqnr = r->error_squares > 0 ? 10 * log10(r->sum_squares / r->error_squares) : INFINITY;
    json_t *report = json_pack(
        "{s:s, s:o, s:o, s:I, s:I, s:I, s:I, s:o, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "nib", nib_version(), "a",
        side_of(&r->facts_a), "b", side_of(&r->facts_b), "compared", (json_int_t)r->n, "changed",
        (json_int_t)r->changed, "only_a", (json_int_t)r->only_a, "only_b", (json_int_t)r->only_b, "sqnr_db",
        text_number(sqnr), "zeroed", (json_int_t)r->zeroed, "clipped", (json_int_t)r->clipped, "underflowed_blocks",
        (json_int_t)r->underflowed, "differences", report_differences(r->facts_a.provenance, r->facts_b.provenance),
        "code_counts", counts_of(r->codes, 16), "scale_counts", counts_of(r->scales, 256), "plan", plan_of(plan),
        "weights", rows);
    const bool good = report && json_dumpf(report, file, JSON_INDENT(1)) == 0 && fputc('\n', file) != EOF;
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
    if (stat(*a ? a : ".", &first) == 0 && stat(*b ? b : ".", &second) == 0)
        return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
    tidy_path(a, left, sizeof left);
    tidy_path(b, right, sizeof right);
    return strcmp(left, right) == 0;
}

/* Whether a report of this name in the directory of a checkpoint would take the place of one of its files. */
static bool replaces(const char *name, const char *directory, const char *a, const char *b)
{
    static const char *const own[] = { "config.json", "hf_quant_config.json", "model.safetensors.index.json" };
    const char *const checkpoints[] = { a, b };
    char path[4096];
    if (!same_directory(directory, a) && !same_directory(directory, b))
        return false;
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strcmp(name, own[i]) == 0)
            return true;
    for (int i = 0; i < 2 && ends_with(name, ".json"); i++)
        if ((size_t)snprintf(path, sizeof path, "%s/%s", checkpoints[i], name) < sizeof path && access(path, F_OK) == 0)
            return true;
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
    snprintf(directory, sizeof directory, "%.*s", slash ? (int)(slash - path) + 1 : 0, path);
    if (replaces(slash ? slash + 1 : path, directory, a, b)) {
        cli_error("the report %s would replace a file of the checkpoint: give it another name", path);
        return false;
    }
    const int code = name_only ? 0 : cli_try_file(path);
    if (!code || (code == ENOENT && same_directory(directory, b))) /* the run will make it */
        return true;
    cli_error("cannot write the report %s: %s", path, strerror(code));
    return false;
}

bool report_write(const struct report *report, const nib_plan *plan, const char *path)
{
    char *temporary = malloc(strlen(path) + 32);
    if (!temporary) {
        cli_error("%s: no memory for the report", path);
        return false;
    }
    sprintf(temporary, "%s.tmp-%ld", path, (long)getpid());
    FILE *file = fopen(temporary, "w");
    bool good = file != NULL;
    errno = good ? 0 : errno;
    if (good) {
        good = ends_with(path, ".json") ? write_json(file, report, plan) : report_write_html(file, report, plan);
        good &= !ferror(file) && fflush(file) == 0;
        good &= fclose(file) == 0;
        good = good && rename(temporary, path) == 0;
        if (!good)
            remove(temporary);
    }
    if (!good)
        cli_error("cannot write the report %s: %s", path, errno ? strerror(errno) : "no memory");
    free(temporary);
    return good;
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
