/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - nib check: what is wrong with a checkpoint, one line for each finding.
 *
 * Errors and warnings make the answer no; hints alone do not, because what they point at may be meant. A checkpoint
 * that cannot even be opened for what is in it has one finding.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "nib_checkpoint.h"
#include "progress.h"
#include "text.h"

enum { SHOWN_OF_EACH = 3, MOST_KINDS = 128 };

struct findings {
    bool json, all, quiet;
    bool plain;   /* there is no NVFP4 weight */
    json_t *list; /* with --json */
    bool incomplete;
    size_t counts[NIB_SEVERITY_COUNT], repairable;
    struct {
        const char *id;
        nib_severity severity;
        size_t count;
    } kinds[MOST_KINDS];
    size_t n_kinds;
    struct progress progress;
};

static size_t *count_of(struct findings *f, const nib_finding *finding)
{
    size_t i = 0;
    while (i < f->n_kinds && strcmp(f->kinds[i].id, finding->id) != 0)
        i++;
    if (i == f->n_kinds && i < MOST_KINDS - 1) {
        f->kinds[f->n_kinds].id = finding->id;
        f->kinds[f->n_kinds++].severity = finding->severity;
    }
    return &f->kinds[i].count;
}

static int take(void *context, const nib_finding *finding)
{
    struct findings *f = context;
    size_t *count = count_of(f, finding);
    f->counts[finding->severity]++;
    f->repairable += finding->repairable != 0;
    ++*count;
    if (f->json) {
        json_t *object = json_pack(
            "{s:s, s:s, s:o, s:o, s:o, s:o, s:b}", "severity", nib_severity_name(finding->severity), "id", finding->id,
            "tensor", text_json(finding->tensor), "fact", text_json(finding->fact), "consequence",
            text_json(finding->consequence), "remedy", text_json(finding->remedy), "repairable", finding->repairable);
        if (!object || json_array_append_new(f->list, object) != 0)
            f->incomplete = true;
    } else if (!f->quiet && (f->all || *count <= SHOWN_OF_EACH)) {
        progress_end(&f->progress);
        cli_print("%s %s: %s: %s; %s; %s", nib_severity_name(finding->severity), finding->id, finding->tensor,
                  finding->fact, finding->consequence, finding->remedy);
    }
    return 0;
}

static const char *plural(size_t n) { return n == 1 ? "" : "s"; }

static void print_summary(const struct findings *f, const char *path)
{
    for (size_t i = 0; i < f->n_kinds && !f->quiet && !f->all; i++)
        if (f->kinds[i].count > SHOWN_OF_EACH)
            cli_print("%s %s: and %zu more; --all lists them", nib_severity_name(f->kinds[i].severity), f->kinds[i].id,
                      f->kinds[i].count - SHOWN_OF_EACH);
    const size_t errors = f->counts[NIB_SEVERITY_ERROR], warnings = f->counts[NIB_SEVERITY_WARNING],
                 hints = f->counts[NIB_SEVERITY_HINT];
    if (errors + warnings + hints == 0)
        cli_print(f->plain ? "%s: no findings, and no quantized weights" : "%s: no findings", path);
    else if (f->repairable)
        cli_print("%s: %zu error%s, %zu warning%s, %zu hint%s; nib repair takes care of %zu", path, errors,
                  plural(errors), warnings, plural(warnings), hints, plural(hints), f->repairable);
    else
        cli_print("%s: %zu error%s, %zu warning%s, %zu hint%s", path, errors, plural(errors), warnings,
                  plural(warnings), hints, plural(hints));
}

static bool print_json(const struct findings *f, const char *path, const char *against)
{
    json_t *fields =
        json_pack("{s:o, s:o, s:O, s:I, s:I, s:I, s:I}", "path", text_json(path), "against",
                  against ? text_json(against) : json_null(), "findings", f->list, "errors",
                  (json_int_t)f->counts[NIB_SEVERITY_ERROR], "warnings", (json_int_t)f->counts[NIB_SEVERITY_WARNING],
                  "hints", (json_int_t)f->counts[NIB_SEVERITY_HINT], "repairable", (json_int_t)f->repairable);
    json_t *report = text_report("check", fields);
    if (f->incomplete) {
        json_decref(report);
        report = NULL;
    }
    const bool good = text_print(report);
    if (!good)
        cli_error("check: no memory for the report");
    return good;
}

/* A checkpoint that breaks its format is a finding; one that cannot be read is not an answer. */
static bool is_finding(nib_status status) { return status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED; }

static nib_status check(struct findings *f, const char *path, const char *original, int32_t threads)
{
    nib_checkpoint *checkpoint = NULL, *against = NULL;
    nib_job job;
    nib_status status = nib_checkpoint_open(path, &checkpoint);
    if (is_finding(status)) {
        const nib_finding finding = { .bytes = sizeof finding,
                                      .severity = NIB_SEVERITY_ERROR,
                                      .id = "unreadable",
                                      .tensor = path,
                                      .fact = nib_last_error(),
                                      .consequence = "no loader can open it either",
                                      .remedy = "make or download it again" };
        take(f, &finding);
        return NIB_OK;
    }
    nib_checkpoint_facts facts = { .bytes = sizeof facts };
    if (!status)
        status = nib_checkpoint_get_facts(checkpoint, &facts);
    f->plain = facts.format == NIB_CHECKPOINT_FORMAT_PLAIN;
    if (!status && original)
        status = nib_checkpoint_open(original, &against);
    progress_begin(&f->progress, &job, threads, f->json || f->quiet);
    if (!status)
        status = nib_checkpoint_check(checkpoint, against, &job, take, f);
    progress_end(&f->progress);
    nib_checkpoint_close(against);
    nib_checkpoint_close(checkpoint);
    return status;
}

static enum cli_exit run_check(const struct cli_command *self, int argc, char **argv)
{
    struct findings f = { 0 };
    const char *original = NULL;
    int32_t threads = 0;
    const struct cli_option options[] = {
        { 0, "against", CLI_TEXT, &original, "PATH", "compare codes and scales with those of the original", 0, 0 },
        { 0, "all", CLI_FLAG, &f.all, NULL, "list every finding, not the first three of a kind", 0, 0 },
        { 0, "json", CLI_FLAG, &f.json, NULL, "print a report in JSON", 0, 0 },
        { 'q', "quiet", CLI_FLAG, &f.quiet, NULL, "print the last line only", 0, 0 },
        { 't', "threads", CLI_NUMBER, &threads, "N", "use N threads; 0: one for each processor", 0, 4096 },
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 1) {
        cli_error("check: takes one directory or file, not %d", argc - first);
        return CLI_FAILED;
    }
    const struct sandbox_path paths[] = { { argv[first], SANDBOX_CHECKPOINT }, { original, SANDBOX_CHECKPOINT } };
    if (!cli_confine(self, paths, sizeof paths / sizeof *paths))
        return CLI_FAILED;
    if (f.json && !(f.list = json_array())) {
        cli_error("check: no memory for the report");
        return CLI_FAILED;
    }
    enum cli_exit result = CLI_FAILED;
    if (check(&f, argv[first], original, threads)) {
        cli_error("check: %s", nib_last_error());
    } else {
        result = f.counts[NIB_SEVERITY_ERROR] + f.counts[NIB_SEVERITY_WARNING] ? CLI_NO : CLI_FINE;
        if (!f.json)
            print_summary(&f, argv[first]);
        else if (!print_json(&f, argv[first], original))
            result = CLI_FAILED;
    }
    json_decref(f.list);
    return result;
}

const struct cli_command cli_check = {
    "check", "PATH", "say what is wrong with an NVFP4 checkpoint",
    "Look for whatever makes a server reject an NVFP4 checkpoint or compute garbage with\n"
    "it: scales that are missing, infinite, unequal in layers that are fused, or inverted;\n"
    "shapes and dtypes; the configuration against the tensors; left-over files. Prints a\n"
    "line for each finding: severity, kind, tensor, fact, consequence, remedy.\n"
    "\n"
    "Exit status: 0 without errors and warnings, hints or not; 1 with one; 2 where the\n"
    "question could not be asked.\n"
    "\n"
    "  nib check Qwen3-8B-NVFP4\n"
    "  nib check Qwen3-8B-NVFP4 --against Qwen3-8B    # also what leaves no other trace\n",
    run_check
};
