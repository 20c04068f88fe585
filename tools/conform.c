/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conform.c - nib conform: check files of vectors that other implementations made, and report.
 *
 * A case passes, differs, or is bad: it says something that is not understood, or lacks a tensor. So is a file that
 * cannot be read, has no case, or has a tensor that no case uses. Bad is not "no": the question could not be asked.
 */
#define _POSIX_C_SOURCE 200809L

#include <fnmatch.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "conform.h"
#include "device.h"
#include "nib_file.h"
#include "text.h"

struct options {
    bool verbose, quiet, json;
    const char *glob;
    int32_t threads;
    const char *where;  /* --device */
    nib_device *device; /* that, or the host with so many threads */
};

struct totals {
    size_t passed, failed, bad_files, selected, unsupported;
};

/* The report on one file. */
struct report {
    const struct options *options;
    const char *path;
    const char *label; /* how lines on stdout name the file */
    size_t cases, failed, unsupported;
    bool bad;
    json_t *failures, *errors; /* with --json */
    bool incomplete;           /* something could not be added to them */
};

/* ---- Reporting ---------------------------------------------------------------------------------------- */

static void append(struct report *report, json_t *list, json_t *object)
{
    if (!object || json_array_append_new(list, object) != 0)
        report->incomplete = true;
}

static void note_bad(struct report *report, const char *name, const char *message)
{
    report->bad = true;
    if (report->options->json)
        append(report, report->errors,
               json_pack("{s:o, s:o}", "case", name ? text_json(name) : json_null(), "error", text_json(message)));
}

/* `name` NULL: a fact about the whole file. */
static void report_bad(struct report *report, const char *name, const char *message)
{
    if (name)
        cli_error("%s: case '%.256s': %s", report->path, name, message);
    else
        cli_error("%s: %s", report->path, message);
    note_bad(report, name, message);
}

/* With --json it is said of all at once. */
static void report_no_memory(struct report *report)
{
    report->incomplete = true;
    if (!report->options->json)
        report_bad(report, NULL, "out of memory");
}

static void report_difference(struct report *report, const char *name, const struct conform_result *result)
{
    char index[256] = "", expected[16], got[16];
    json_t *const list = report->options->json ? json_array() : NULL;
    report->incomplete |= report->options->json && !list;
    for (int i = 0; i < result->rank; i++) {
        const size_t used = strlen(index);
        snprintf(index + used, sizeof index - used, "%s%" PRId64, i ? ", " : "", result->index[i]);
        if (list)
            append(report, list, json_integer(result->index[i]));
    }
    snprintf(expected, sizeof expected, "0x%0*" PRIX32, result->digits, result->expected);
    snprintf(got, sizeof got, "0x%0*" PRIX32, result->digits, result->got);
    report->failed++;
    if (list)
        append(report, report->failures,
               json_pack("{s:o, s:s, s:o, s:s, s:s}", "case", text_json(name), "tensor", result->tensor, "index", list,
                         "expected", expected, "got", got));
    else if (!report->options->quiet && !report->options->json)
        cli_print("%s: %.256s: %s[%s]: expected %s, got %s", report->label, name, result->tensor, index, expected, got);
}

static bool report_begin(struct report *report, const struct options *options, const char *path)
{
    const char *const slash = strrchr(path, '/');
    *report = (struct report){ .options = options, .path = path, .label = slash && slash[1] ? slash + 1 : path };
    if (!options->json)
        return true;
    report->failures = json_array();
    report->errors = json_array();
    return report->failures && report->errors;
}

static bool report_end(struct report *report, struct totals *totals, json_t *all)
{
    totals->failed += report->failed;
    totals->bad_files += report->bad;
    if (all) {
        json_t *const object = json_pack("{s:o, s:I, s:I, s:I, s:b, s:o, s:o}", "file", text_json(report->path),
                                         "cases", (json_int_t)report->cases, "failed", (json_int_t)report->failed,
                                         "unsupported", (json_int_t)report->unsupported, "bad", (int)report->bad,
                                         "failures", report->failures, "errors", report->errors);
        return object && json_array_append_new(all, object) == 0 && !report->incomplete;
    }
    char unsupported[64] = "";
    if (report->unsupported)
        snprintf(unsupported, sizeof unsupported, ", %zu not supported", report->unsupported);
    if (!report->options->quiet)
        cli_print("%s: %zu cases, %zu failed%s%s", report->label, report->cases, report->failed, unsupported,
                  report->bad ? ", bad file" : "");
    return true;
}

/* ---- One file ----------------------------------------------------------------------------------------- */

/* Returns whether the case used its tensors, so that one left over is a fault of its own. */
static bool check_case(struct report *report, struct totals *totals, struct conform_file *file, const char *name,
                       json_t *json)
{
    struct conform_case what;
    struct conform_result result = { .verdict = CONFORM_PASSED };
    if (conform_parse(json, &what, &result)) {
        what.device = report->options->device;
        what.moves = report->options->where && strcmp(report->options->where, "host") != 0;
        conform_run(&what, name, file, &result);
    }
    report->cases++;
    switch (result.verdict) {
    case CONFORM_PASSED:
        totals->passed++;
        if (report->options->verbose)
            cli_print("%s: %.256s: passed", report->label, name);
        return true;
    case CONFORM_DIFFERENT:
        report_difference(report, name, &result);
        return true;
    case CONFORM_UNSUPPORTED:
        totals->unsupported++;
        report->unsupported++;
        if (report->options->verbose)
            cli_print("%s: %.256s: not supported: %s", report->label, name, result.message);
        return false;
    case CONFORM_BAD:
        report_bad(report, name, result.message);
    }
    return false;
}

/* A case that did not use its tensors is null by now: it was not selected, or was bad for another reason. */
static bool may_be_unused(const json_t *cases, const char *tensor)
{
    const char *const slash = strrchr(tensor, '/');
    if (!slash)
        return false;
    const size_t length = (size_t)(slash - tensor);
    char *const name = malloc(length + 1);
    if (!name)
        return false;
    memcpy(name, tensor, length);
    name[length] = 0;
    const bool excused = json_is_null(json_object_get(cases, name));
    free(name);
    return excused;
}

static void check_unused(struct report *report, const struct conform_file *file, const json_t *cases)
{
    nib_entry entry;
    for (size_t i = 0; i < nib_file_count(file->file); i++) {
        if (file->claimed[i] || nib_file_entry(file->file, i, &entry) != NIB_OK || may_be_unused(cases, entry.name))
            continue;
        char message[512];
        snprintf(message, sizeof message, "no case uses its tensor '%.256s'", entry.name);
        report_bad(report, NULL, message);
        return; /* one says enough: there may be thousands */
    }
}

static json_t *read_cases(struct report *report, const nib_file *file)
{
    const char *const text = nib_file_metadata(file, "cases");
    char message[512];
    json_error_t error;
    if (!text) {
        report_bad(report, NULL, "it is no file of vectors: its metadata has no \"cases\"");
        return NULL;
    }
    json_t *const cases = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    if (text_lost_memory()) { /* jansson may call it anything, or leave out a character */
        report_no_memory(report);
        json_decref(cases);
        return NULL;
    }
    if (!cases) {
        snprintf(message, sizeof message, "its \"cases\" are not JSON: line %d, column %d: %s", error.line,
                 error.column, error.text);
        report_bad(report, NULL, message);
        return NULL;
    }
    if (json_is_object(cases) && json_object_size(cases) > 0)
        return cases;
    report_bad(report, NULL, json_is_object(cases) ? "it has no case" : "its \"cases\" are not a JSON object");
    json_decref(cases);
    return NULL;
}

static void check_cases(struct report *report, struct totals *totals, struct conform_file *file, json_t *cases)
{
    for (void *at = json_object_iter(cases); at; at = json_object_iter_next(cases, at)) {
        const char *const name = json_object_iter_key(at);
        const bool selected = !report->options->glob || fnmatch(report->options->glob, name, 0) == 0;
        totals->selected += selected;
        if (!selected || !check_case(report, totals, file, name, json_object_iter_value(at)))
            json_object_iter_set_new(cases, at, json_null());
    }
    check_unused(report, file, cases);
}

static void check_file(struct report *report, struct totals *totals)
{
    struct conform_file file = { 0 };
    if (nib_file_open(report->path, &file.file) != NIB_OK) {
        cli_error("%s", nib_last_error()); /* has the path */
        note_bad(report, NULL, nib_last_error());
        return;
    }
    json_t *const cases = read_cases(report, file.file);
    if (cases) {
        file.claimed = calloc(nib_file_count(file.file) + 1, 1);
        if (file.claimed)
            check_cases(report, totals, &file, cases);
        else
            report_no_memory(report);
    }
    free(file.claimed);
    json_decref(cases);
    nib_file_close(file.file);
}

/* ---- The command -------------------------------------------------------------------------------------- */

static enum cli_exit out_of_memory(void)
{
    cli_error("conform: out of memory");
    return CLI_FAILED;
}

static enum cli_exit check_files(const struct options *options, char **paths)
{
    struct totals totals = { 0 };
    json_t *const all = options->json ? json_array() : NULL;
    if (options->json && !all)
        return out_of_memory();
    for (; *paths; paths++) {
        struct report report;
        if (!report_begin(&report, options, *paths))
            return out_of_memory();
        check_file(&report, &totals);
        if (!report_end(&report, &totals, all))
            return out_of_memory();
    }
    if (all) {
        if (!text_print(all))
            return out_of_memory();
    } else {
        if (totals.unsupported)
            cli_print("%zu not supported on %s", totals.unsupported, nib_device_name(options->device));
        cli_print("%zu passed, %zu failed", totals.passed, totals.failed);
    }
    if (totals.bad_files == 0 && totals.selected == 0) {
        cli_error("conform: no case is called '%s'", options->glob ? options->glob : "");
        return CLI_FAILED;
    }
    return totals.bad_files ? CLI_FAILED : totals.failed ? CLI_NO : CLI_FINE;
}

/* A driver opens devices, loads libraries and keeps caches, each its own way. */
static bool confine(const struct cli_command *self, const struct options *options, char **files, int n)
{
    struct sandbox_path *const paths = calloc((size_t)n, sizeof *paths);
    if (!paths) {
        (void)out_of_memory();
        return false;
    }
    for (int i = 0; i < n; i++)
        paths[i] = (struct sandbox_path){ files[i], SANDBOX_FILE };
    if (options->where && strcmp(options->where, "host") != 0)
        sandbox_waived = "a GPU's driver needs devices, libraries and caches";
    const bool good = cli_confine(self, paths, (size_t)n);
    free(paths);
    return good;
}

static enum cli_exit run(const struct cli_command *self, int argc, char **argv)
{
    struct options options = { 0 };
    const struct cli_option table[] = {
        { 'v', "verbose", CLI_FLAG, &options.verbose, NULL, "list every case", 0, 0 },
        { 'q', "quiet", CLI_FLAG, &options.quiet, NULL, "print the last line only", 0, 0 },
        { 0, "json", CLI_FLAG, &options.json, NULL, "report in JSON", 0, 0 },
        { 0, "case", CLI_TEXT, &options.glob, "GLOB", "check only cases whose name matches", 0, 0 },
        { 't', "threads", CLI_NUMBER, &options.threads, "N", "use N threads; 0, the default, for all", 0, 1024 },
        { 0, "device", CLI_TEXT, &options.where, "NAME", "where to quantize: host, the default, cuda or cuda:N", 0, 0 },
        { 0 }
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, table, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (options.verbose + options.quiet + options.json > 1) {
        cli_error("conform: --verbose, --quiet and --json exclude each other");
        return CLI_FAILED;
    }
    if (first == argc) {
        cli_error("conform: no file is given; see nib conform --help");
        return CLI_FAILED;
    }
    if (!confine(self, &options, argv + first, argc - first))
        return CLI_FAILED;
    if (!device_open("conform", options.where, options.threads, &options.device))
        return CLI_FAILED;
    const enum cli_exit status = check_files(&options, argv + first);
    nib_device_release(options.device);
    return status;
}

const struct cli_command cli_conform = {
    "conform", "FILE...", "check that the library agrees with files of vectors",
    "Check files of vectors: safetensors files with inputs, what to do with them, and the bytes that\n"
    "another implementation made of them. Prints one line per file, the first difference of each case\n"
    "that fails, and a last line `N passed, M failed`. nib(1) describes the files. What a device other than the\n"
    "host does not do (another dialect than te, another format, products, casts) is counted as not supported.\n\n"
    "Exit status: 0 all cases pass, 1 a case failed, 2 a file is bad or cannot be read.\n",
    run
};
