/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.c - nib compare: how far two checkpoints are from each other, weight by weight, and why.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "progress.h"
#include "report.h"
#include "text.h"

struct options {
    bool json, quiet;
    int32_t top, threads;
    const char *report;
};

static double percent(int64_t part, int64_t whole) { return whole ? 100 * (double)part / (double)whole : 0; }

static void print_rows(const struct report *r, const struct report_row **worst, int32_t top)
{
    char db[32], shape[48];
    size_t n = 0;
    cli_print("%8s %9s %11s %8s %8s %8s  %-16s %s", "dB", "rel. L2", "max. error", "zeroed", "clipped", "underfl.",
              "shape", "weight");
    for (; worst[n] && (!top || n < (size_t)top); n++) {
        const struct report_row *row = worst[n];
        snprintf(shape, sizeof shape, "%" PRId64 "x%" PRId64, row->rows, row->cols);
        cli_print("%8s %9.5f %11.5g %7.2f%% %7.3f%% %7.2f%%  %-16s %s", text_db(row->sqnr, db, sizeof db),
                  row->relative, row->max_error, percent(row->zeroed, row->elements),
                  percent(row->clipped, row->elements), percent(row->underflowed, row->blocks), shape, row->name);
    }
    if (r->changed > n)
        cli_print("and %zu better ones; --top 0 lists all", r->changed - n);
}

static void print_totals(const struct report *r, const struct report_row **worst)
{
    char overall[32], median[32], least[32];
    cli_print("%zu weights compared, %zu of them differ, %zu are the same", r->n, r->changed, r->n - r->changed);
    if (r->changed)
        cli_print("signal to noise %s dB over all that differ; median %s, worst %s (%s)",
                  text_db(10 * log10(r->sum_squares / r->error_squares), overall, sizeof overall),
                  text_db(worst[r->changed / 2]->sqnr, median, sizeof median),
                  text_db(worst[0]->sqnr, least, sizeof least), worst[0]->name);
    if (r->only_a || r->only_b)
        cli_print("%zu weights are only in the first, %zu only in the second", r->only_a, r->only_b);
}

static char *value_text(json_t *value)
{
    return json_is_null(value) ? NULL : json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
}

/* One run, in a line: the command and its options. */
static void print_run(const char *which, const char *provenance)
{
    char line[2048];
    const char *key;
    json_t *run = json_loads(provenance, 0, NULL), *value;
    const char *version = json_string_value(json_object_get(run, "version")),
               *command = json_string_value(json_object_get(run, "command"));
    size_t used = (size_t)snprintf(line, sizeof line, "the %s was made by nib %s, %s", which, version ? version : "?",
                                   command ? command : "?");
    json_object_foreach(json_object_get(run, "options"), key, value)
    {
        char *text = json_is_string(value) ? NULL : value_text(value);
        const bool empty = json_is_array(value) && json_array_size(value) == 0;
        if (!empty && used < sizeof line)
            used += (size_t)snprintf(line + used, sizeof line - used, ", %s %s", key,
                                     text                    ? text
                                     : json_is_string(value) ? json_string_value(value)
                                                             : "");
        free(text);
    }
    cli_print("%s", line);
    json_decref(run);
}

/* Two runs of nib are compared by what they noted; of one alone it is said how it was made. */
static void print_reasons(const struct report *r)
{
    const char *a = r->facts_a.provenance, *b = r->facts_b.provenance;
    if (!a || !b) {
        if (a || b)
            print_run(a ? "first" : "second", a ? a : b);
        return;
    }
    json_t *differences = report_differences(a, b), *entry;
    size_t i;
    cli_print(json_array_size(differences) ? "they were made differently:"
                                           : "both were made by the same command from the same files");
    json_array_foreach(differences, i, entry)
    {
        char *left = value_text(json_object_get(entry, "a")), *right = value_text(json_object_get(entry, "b"));
        cli_print("  %s: %s in the first, %s in the second", json_string_value(json_object_get(entry, "option")),
                  left ? left : "nothing", right ? right : "nothing");
        free(left);
        free(right);
    }
    json_decref(differences);
}

static bool print_json(const struct report *r, const struct report_row **worst, int32_t top)
{
    json_t *rows = json_array();
    for (size_t i = 0; rows && worst[i] && (!top || i < (size_t)top); i++)
        json_array_append_new(rows, report_row_json(worst[i]));
    const double sqnr = r->changed ? 10 * log10(r->sum_squares / r->error_squares) : INFINITY;
    return text_print(text_report(
        "compare",
        json_pack("{s:o, s:o, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "a", text_json(r->facts_a.path), "b",
                  text_json(r->facts_b.path), "compared", (json_int_t)r->n, "changed", (json_int_t)r->changed, "only_a",
                  (json_int_t)r->only_a, "only_b", (json_int_t)r->only_b, "sqnr_db", text_number(sqnr), "differences",
                  report_differences(r->facts_a.provenance, r->facts_b.provenance), "worst", rows)));
}

static enum cli_exit show(const struct report *r, const struct options *options)
{
    if (r->n == 0) {
        cli_error("compare: %s and %s have no weight in common", r->facts_a.path, r->facts_b.path);
        return CLI_FAILED;
    }
    const struct report_row **worst = report_worst(r);
    bool good = worst != NULL;
    if (good && options->json) {
        good = print_json(r, worst, options->top);
    } else if (good) {
        if (!options->quiet && r->changed)
            print_rows(r, worst, options->top);
        print_totals(r, worst);
        print_reasons(r);
    }
    free(worst);
    if (!good)
        cli_error("compare: no memory for the report");
    else if (options->report)
        good = report_write(r, NULL, options->report);
    return good ? CLI_FINE : CLI_FAILED;
}

static enum cli_exit compare(const char *path_a, const char *path_b, const struct options *options)
{
    nib_checkpoint *a = NULL, *b = NULL;
    struct report report = { 0 };
    struct progress progress;
    nib_job job;
    enum cli_exit result = CLI_FAILED;
    progress_begin(&progress, &job, options->threads, options->quiet || options->json);
    const bool good =
        !nib_checkpoint_open(path_a, &a) && !nib_checkpoint_open(path_b, &b) && !report_collect(&report, a, b, &job);
    progress_end(&progress);
    if (good)
        result = show(&report, options);
    else
        cli_error("compare: %s", report.no_memory ? "no memory for the report" : nib_last_error());
    report_free(&report);
    nib_checkpoint_close(a);
    nib_checkpoint_close(b);
    return result;
}

static enum cli_exit run_compare(const struct cli_command *self, int argc, char **argv)
{
    struct options o = { .top = 20 };
    const struct cli_option options[] = {
        { 0, "top", CLI_NUMBER, &o.top, "N", "list the N worst weights, by default 20; 0: all", 0, INT32_MAX },
        { 0, "report", CLI_TEXT, &o.report, "FILE", "also write FILE.html, a page to look at, or FILE.json", 0, 0 },
        { 0, "json", CLI_FLAG, &o.json, NULL, "print a report in JSON", 0, 0 },
        { 'q', "quiet", CLI_FLAG, &o.quiet, NULL, "print the totals only", 0, 0 },
        { 't', "threads", CLI_NUMBER, &o.threads, "N", "use N threads; 0: one for each processor", 0, 4096 },
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 2) {
        cli_error("compare: takes two directories or files, not %d", argc - first);
        return CLI_FAILED;
    }
    if (o.report && !report_can_write(o.report, argv[first], argv[first + 1], false))
        return CLI_FAILED;
    const struct sandbox_path paths[] = { { argv[first], SANDBOX_CHECKPOINT },
                                          { argv[first + 1], SANDBOX_CHECKPOINT },
                                          { o.report, SANDBOX_OUTPUT_FILE } };
    if (!cli_confine(self, paths, sizeof paths / sizeof *paths))
        return CLI_FAILED;
    return compare(argv[first], argv[first + 1], &o);
}

const struct cli_command cli_compare = {
    "compare", "A B", "measure how far two checkpoints are apart, weight by weight",
    "Compare the weights that two checkpoints have in common, whatever their checkpoint formats; A is\n"
    "taken for the truth, so that it may be the original of B. Lists the worst first: the\n"
    "signal to noise in decibels, the error's share by L2 norm, the largest error, how many\n"
    "values became zero, how many lie beyond what their block can hold, and how many\n"
    "blocks have values and a scale below 2^-6. Says how the two were made, or what was\n"
    "done differently, where nib made them.\n"
    "\n"
    "  nib compare Qwen3-8B Qwen3-8B-NVFP4\n"
    "  nib compare --top 0 --report q.html Qwen3-8B Qwen3-8B-NVFP4\n",
    run_compare
};
