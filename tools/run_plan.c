/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run_plan.c - a plan shown or carried out, and what is said of it.
 */
#include "nib_shard.h"
#include "run_plan.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "progress.h"
#include "text.h"

const nib_comm *run_comm;
bool run_entered;

enum cli_exit run_failed(const struct cli_command *self)
{
    const bool silent = cli_silent;
    char rank[32] = "";
    if (silent && run_comm && strncmp(nib_last_error(), "another ", 8) != 0) { /* whoever failed says so itself */
        snprintf(rank, sizeof rank, "rank %d: ", run_comm->rank);
        cli_silent = false;
    }
    cli_error("%s: %s%s", self->name, rank, nib_last_error());
    cli_silent = silent;
    return CLI_FAILED;
}

nib_checkpoint *run_open(const struct cli_command *self, const char *path)
{
    nib_checkpoint *checkpoint = NULL;
    if (nib_checkpoint_open(path, &checkpoint))
        (void)run_failed(self);
    return checkpoint;
}

static bool ends_with(const char *path, const char *end)
{
    const size_t n = strlen(path), m = strlen(end);
    return n > m && !strcmp(path + n - m, end);
}

bool run_is_gguf(const char *path) { return ends_with(path, ".gguf"); }

/* A name of safetensors may become either: that depends on the input, which is not open yet. */
struct sandbox_path run_output(const char *out, bool as_file, const struct run_flags *flags)
{
    as_file |= run_is_gguf(out) || ends_with(out, ".safetensors");
    return (struct sandbox_path){ flags->dry_run ? NULL : out,
                                  as_file ? SANDBOX_OUTPUT_FILE : SANDBOX_OUTPUT_DIRECTORY };
}

bool run_confine(const struct cli_command *self, const char *in, const char *out, bool as_file,
                 const struct run_flags *flags)
{
    const struct sandbox_path paths[] = { { in, SANDBOX_CHECKPOINT }, run_output(out, as_file, flags) };
    return cli_confine(self, paths, sizeof paths / sizeof *paths);
}

static const char *const actions[NIB_ACTION_COUNT] = { "quantize", "convert", "dequantize", "repair", "keep", "fp8" };

/* ---- Words ---- */

/* Reasons with how many weights have them, the most frequent first. */
struct reasons {
    struct {
        const char *reason;
        size_t count;
    } each[64];
    size_t n;
};

static void count_reason(struct reasons *reasons, const char *reason)
{
    size_t i = 0;
    while (i < reasons->n && strcmp(reasons->each[i].reason, reason) != 0)
        i++;
    if (i == sizeof reasons->each / sizeof *reasons->each)
        i--; /* the last one stands for what no longer fits */
    if (i == reasons->n)
        reasons->each[reasons->n++].reason = reason;
    reasons->each[i].count++;
}

static void show_reasons(const nib_plan *plan, size_t weights)
{
    struct reasons reasons = { .n = 0 };
    nib_plan_row row = { .bytes = sizeof row };
    for (size_t i = 0; i < weights && !nib_plan_get_row(plan, i, &row); i++)
        if (*row.reason)
            count_reason(&reasons, row.reason);
    for (size_t shown = 0; shown < reasons.n; shown++) {
        size_t most = 0;
        for (size_t i = 1; i < reasons.n; i++)
            if (reasons.each[i].count > reasons.each[most].count)
                most = i;
        cli_print("  %zu kept: %s", reasons.each[most].count, reasons.each[most].reason);
        reasons.each[most].count = 0;
    }
}

static void show_rows(const nib_plan *plan, size_t weights)
{
    nib_plan_row row = { .bytes = sizeof row };
    char in[32], out[32];
    for (size_t i = 0; i < weights && !nib_plan_get_row(plan, i, &row); i++)
        cli_print("%-10s  %s  [%lld, %lld]  %s -> %s%s%s%s%s%s%s%s%s%s%s", actions[row.action], row.name,
                  (long long)row.rows, (long long)row.cols, text_bytes(row.bytes_in, in, sizeof in),
                  text_bytes(row.bytes_out, out, sizeof out), *row.reason ? "  " : "", row.reason,
                  *row.group && strcmp(row.group, row.name) != 0 ? "  scale of " : "",
                  strcmp(row.group, row.name) != 0 ? row.group : "", *row.statistics ? "  statistics: " : "",
                  row.statistics, *row.fold ? "  folded into: " : "", row.fold, *row.gptq ? "  gptq: " : "", row.gptq);
}

/* How many weights are folded (or have codes by GPTQ), and why others are not. */
static void show_fold(const nib_plan *plan, size_t weights, bool gptq)
{
    struct reasons reasons = { .n = 0 };
    nib_plan_row row = { .bytes = sizeof row };
    size_t done = 0;
    for (size_t i = 0; i < weights && !nib_plan_get_row(plan, i, &row); i++) {
        const char *text = gptq ? row.gptq : row.fold;
        if (!strncmp(text, "none", 4))
            count_reason(&reasons, text);
        done += *text && strncmp(text, "none", 4) != 0;
    }
    if (done)
        cli_print(gptq ? "  %zu with codes by GPTQ" : "  %zu folded", done);
    for (size_t i = 0; i < reasons.n; i++)
        cli_print(gptq ? "  %zu with codes by GPTQ: %s" : "  %zu folded into %s", reasons.each[i].count,
                  reasons.each[i].reason);
}

/* Weights with statistics of their input, and why others have none. */
static void show_statistics(const nib_plan *plan, size_t weights)
{
    struct reasons reasons = { .n = 0 };
    nib_plan_row row = { .bytes = sizeof row };
    size_t found = 0;
    double fewest = 0, most = 0;
    for (size_t i = 0; i < weights && !nib_plan_get_row(plan, i, &row); i++) {
        if (!strncmp(row.statistics, "none", 4))
            count_reason(&reasons, row.statistics);
        else if (*row.statistics) {
            fewest = !found || row.tokens < fewest ? row.tokens : fewest;
            most = row.tokens > most ? row.tokens : most;
            found++;
        }
    }
    if (found && fewest < most)
        cli_print("  %zu with statistics of %.0f to %.0f tokens", found, fewest, most);
    else if (found)
        cli_print("  %zu with statistics of %.0f tokens", found, most);
    for (size_t i = 0; i < reasons.n; i++)
        cli_print("  %zu with statistics: %s", reasons.each[i].count, reasons.each[i].reason);
}

static void show_summary(const nib_plan *plan, const nib_plan_facts *facts, const struct run_flags *flags,
                         const char *done, double seconds)
{
    char in[32], out[32], rate[64] = "", bits[80] = "";
    if (flags->verbose) {
        cli_print("sandbox: %s", sandbox_state());
        show_rows(plan, facts->rows);
    }
    if (!flags->dry_run && seconds > 0.05) {
        char speed[32];
        snprintf(rate, sizeof rate, " in %.1f s, %s/s", seconds,
                 text_bytes((uint64_t)((double)facts->bytes_in / seconds), speed, sizeof speed));
    }
    if (facts->changed_elements)
        snprintf(bits, sizeof bits, ", %.2f bits per weight (%.2f over the whole model)",
                 text_bits(facts->changed_bytes_out, facts->changed_elements),
                 text_bits(facts->tensor_bytes_out, facts->elements));
    cli_print("%s%s %zu of %zu weights%s: %s in %zu file%s -> %s in %zu file%s%s", flags->dry_run ? "would be " : "",
              done, facts->changed, facts->weights, bits, text_bytes(facts->bytes_in, in, sizeof in), facts->files_in,
              facts->files_in == 1 ? "" : "s", text_bytes(facts->bytes_out, out, sizeof out), facts->files_out,
              facts->files_out == 1 ? "" : "s", rate);
    show_reasons(plan, facts->rows);
    show_statistics(plan, facts->weights);
    show_fold(plan, facts->weights, false);
    show_fold(plan, facts->weights, true);
    if (*facts->note)
        cli_print("note: %s", facts->note);
}

/* ---- JSON ---- */

static json_t *rows_as_json(const nib_plan *plan, size_t weights)
{
    json_t *list = json_array();
    nib_plan_row row = { .bytes = sizeof row };
    for (size_t i = 0; i < weights && list && !nib_plan_get_row(plan, i, &row); i++)
        if (json_array_append_new(
                list, json_pack("{s:o, s:s, s:o, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "name",
                                text_json(row.name), "action", actions[row.action], "reason", text_json(row.reason),
                                "rows", (json_int_t)row.rows, "cols", (json_int_t)row.cols, "bytes_in",
                                (json_int_t)row.bytes_in, "bytes_out", (json_int_t)row.bytes_out, "group",
                                text_json(row.group), "statistics", text_json(row.statistics), "tokens",
                                text_number(row.tokens), "fold", text_json(row.fold), "gptq", text_json(row.gptq)))) {
            json_decref(list);
            return NULL;
        }
    return list;
}

static bool print_json(const struct cli_command *self, const nib_plan *plan, const nib_plan_facts *facts,
                       const struct run_flags *flags, const char *out, double seconds)
{
    return text_print(text_report(
        self->name,
        json_pack(
            "{s:o, s:b, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:s, s:s, s:o}",
            "out", text_json(out), "dry_run", (int)flags->dry_run, "seconds", text_number(seconds), "weights",
            (json_int_t)facts->weights, "changed", (json_int_t)facts->changed, "kept", (json_int_t)facts->kept,
            "groups", (json_int_t)facts->groups, "files_in", (json_int_t)facts->files_in, "files_out",
            (json_int_t)facts->files_out, "bytes_in", (json_int_t)facts->bytes_in, "bytes_out",
            (json_int_t)facts->bytes_out, "tensor_bytes_out", (json_int_t)facts->tensor_bytes_out, "elements",
            (json_int_t)facts->elements, "changed_elements", (json_int_t)facts->changed_elements, "changed_bytes_out",
            (json_int_t)facts->changed_bytes_out, "bits_per_weight",
            text_number(text_bits(facts->tensor_bytes_out, facts->elements)), "changed_bits_per_weight",
            text_number(text_bits(facts->changed_bytes_out, facts->changed_elements)), "note", facts->note,
            "quantized_source", flags->quantized_source ? flags->quantized_source : "", "rows",
            rows_as_json(plan, facts->rows))));
}

/* ---- The run ---- */

/* A list in a plan, or a note in an output, may lack what there was no memory for. */
static bool is_whole(const struct cli_command *self, const char *what)
{
    if (text_lost_memory())
        cli_error("%s: out of memory: %s may not be whole", self->name, what);
    return !text_lost_memory();
}

enum cli_exit run_plan(const struct cli_command *self, const nib_plan *plan, const char *out,
                       const struct run_flags *flags, const char *done)
{
    nib_plan_facts facts = { .bytes = sizeof facts };
    nib_job job;
    struct progress progress;
    const nib_run_options options = { .bytes = sizeof options, .resume = flags->resume, .force = flags->force };
    nib_status status = nib_plan_get_facts(plan, &facts);
    const double began = progress_clock();
    if (!is_whole(self, "the plan"))
        return CLI_FAILED;
    if (!status && !flags->dry_run) {
        progress_catch_interrupts();
        progress_begin(&progress, &job, flags->threads, flags->quiet || cli_silent);
        job.max_memory = flags->max_memory;
        job.comm = run_comm;
        run_entered = true;
        status = nib_plan_run(plan, out, &options, &job);
        progress_end(&progress);
    }
    if (status == NIB_ERR_CANCELLED) {
        cli_error("%s: stopped; %s", self->name, flags->resume ? "--resume continues it" : "nothing was left behind");
        return CLI_FAILED;
    }
    if (status)
        return run_failed(self);
    if (!is_whole(self, out))
        return CLI_FAILED;
    if (cli_silent)
        return CLI_FINE;
    const double seconds = progress_clock() - began;
    if (flags->json && !print_json(self, plan, &facts, flags, out, seconds)) {
        cli_error("%s: no memory for the JSON", self->name);
        return CLI_FAILED;
    }
    if (!flags->json && !flags->quiet)
        show_summary(plan, &facts, flags, done, seconds);
    return CLI_FINE;
}
