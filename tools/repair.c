/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repair.c - nib repair: a checkpoint again, without what can be put right, and what is left to say about it.
 */
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "nib_checkpoint.h"
#include "progress.h"

struct options {
    bool dry_run, force, resume, quiet;
    int32_t threads;
};

struct left {
    size_t errors, warnings;
};

static int count(void *context, const nib_finding *finding)
{
    struct left *left = context;
    left->errors += finding->severity == NIB_SEVERITY_ERROR;
    left->warnings += finding->severity == NIB_SEVERITY_WARNING;
    return 0;
}

static void print_plan(const nib_plan *plan, bool quiet)
{
    nib_plan_facts facts = { .bytes = sizeof facts };
    nib_plan_row row = { .bytes = sizeof row };
    if (nib_plan_get_facts(plan, &facts))
        return;
    for (size_t i = 0; i < facts.weights && !quiet; i++)
        if (nib_plan_get_row(plan, i, &row) == NIB_OK && row.action == NIB_ACTION_REPAIR)
            cli_print("repair %s", row.name);
    cli_print("plan: %zu of %zu weights are written anew, their codes as they are", facts.changed, facts.weights);
}

/* What a check says of the result. */
static enum cli_exit look_back(const char *out, const struct options *o)
{
    nib_checkpoint *checkpoint;
    struct left left = { 0 };
    struct progress progress;
    nib_job job;
    if (nib_checkpoint_open(out, &checkpoint)) {
        cli_error("repair: %s", nib_last_error());
        return CLI_FAILED;
    }
    progress_begin(&progress, &job, o->threads, o->quiet);
    const nib_status status = nib_checkpoint_check(checkpoint, NULL, &job, count, &left);
    progress_end(&progress);
    nib_checkpoint_close(checkpoint);
    if (status) {
        cli_error("repair: %s", nib_last_error());
        return CLI_FAILED;
    }
    if (left.errors + left.warnings == 0) {
        cli_print("%s: nothing is left to repair", out);
        return CLI_FINE;
    }
    cli_print("%s: %zu errors and %zu warnings are left, for which the original is needed; see nib check", out,
              left.errors, left.warnings);
    return CLI_NO;
}

static enum cli_exit repair(const char *in, const char *out, const struct options *o)
{
    nib_checkpoint *checkpoint = NULL;
    nib_plan *plan = NULL;
    struct progress progress;
    nib_job job;
    nib_run_options run = { .bytes = sizeof run, .resume = o->resume, .force = o->force };
    nib_status status = nib_checkpoint_open(in, &checkpoint);
    if (!status)
        status = nib_plan_repair(checkpoint, &plan);
    if (!status) {
        print_plan(plan, o->quiet);
        if (!o->dry_run) {
            progress_begin(&progress, &job, o->threads, o->quiet);
            status = nib_plan_run(plan, out, &run, &job);
            progress_end(&progress);
        }
    }
    if (status)
        cli_error("repair: %s", nib_last_error());
    nib_plan_destroy(plan);
    nib_checkpoint_close(checkpoint);
    if (status)
        return status == NIB_ERR_MODE && !plan ? CLI_NO : CLI_FAILED;
    return o->dry_run ? CLI_FINE : look_back(out, o);
}

static enum cli_exit run_repair(const struct cli_command *self, int argc, char **argv)
{
    struct options o = { 0 };
    const struct cli_option options[] = {
        { 0, "dry-run", CLI_FLAG, &o.dry_run, NULL, "say what would be done, and write nothing", 0, 0 },
        { 0, "force", CLI_FLAG, &o.force, NULL, "replace an output that exists", 0, 0 },
        { 0, "resume", CLI_FLAG, &o.resume, NULL, "go on where an earlier run was stopped", 0, 0 },
        { 'q', "quiet", CLI_FLAG, &o.quiet, NULL, "print the summary only", 0, 0 },
        { 't', "threads", CLI_NUMBER, &o.threads, "N", "use N threads; 0: one for each processor", 0, 4096 },
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 2) {
        cli_error("repair: takes an input and an output, not %d operands", argc - first);
        return CLI_FAILED;
    }
    return repair(argv[first], argv[first + 1], &o);
}

const struct cli_command cli_repair = {
    "repair", "IN OUT", "write a checkpoint again without the faults that can be put right",
    "Write the checkpoint IN again as OUT, without what nib check calls repairable. Weights\n"
    "that servers fuse get one number per tensor, and their block scales make up for it;\n"
    "numbers that were stored as their inverse are inverted; missing numbers of activations\n"
    "become those of their group, or 1; the configuration is made from the tensors. Codes\n"
    "are never changed. Ends with what a check says of OUT.\n"
    "\n"
    "Exit status: 0 if OUT has no errors and no warnings; 1 if some are left, or if there\n"
    "was nothing to repair; 2 if it could not be done.\n"
    "\n"
    "  nib repair broken fixed && nib check fixed --against original\n",
    run_repair
};
