/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repair.c - nib repair: a checkpoint again, without what can be put right, and what is left to say about it.
 */
#include "commands.h"
#include "progress.h"
#include "run_plan.h"

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

/* What a check says of the result. */
static enum cli_exit look_back(const struct cli_command *self, const char *out, const struct run_flags *flags)
{
    struct left left = { 0 };
    struct progress progress;
    nib_job job;
    nib_checkpoint *checkpoint = run_open(self, out);
    if (!checkpoint)
        return CLI_FAILED;
    progress_begin(&progress, &job, flags->threads, flags->quiet);
    const nib_status status = nib_checkpoint_check(checkpoint, NULL, &job, count, &left);
    progress_end(&progress);
    nib_checkpoint_close(checkpoint);
    if (status)
        return run_failed(self);
    if (left.errors + left.warnings == 0)
        return CLI_FINE;
    cli_error("repair: %s: %zu errors and %zu warnings are left, for which the original is needed; see nib check", out,
              left.errors, left.warnings);
    return CLI_NO;
}

static enum cli_exit repair(const struct cli_command *self, const char *in, const char *out,
                            const struct run_flags *flags)
{
    nib_plan *plan = NULL;
    nib_checkpoint *checkpoint = run_open(self, in);
    if (!checkpoint)
        return CLI_FAILED;
    const nib_status status = nib_plan_repair(checkpoint, &plan);
    enum cli_exit result;
    if (status) {
        (void)run_failed(self);
        result = status == NIB_ERR_MODE ? CLI_NO : CLI_FAILED; /* there is nothing to repair */
    } else {
        result = run_plan(self, plan, out, flags, "repaired");
    }
    nib_plan_destroy(plan);
    nib_checkpoint_close(checkpoint);
    return result == CLI_FINE && !flags->dry_run ? look_back(self, out, flags) : result;
}

static enum cli_exit run_repair(const struct cli_command *self, int argc, char **argv)
{
    struct run_flags flags = { .threads = 0 };
    const struct cli_option options[] = {
        RUN_OPTIONS(flags),
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 2) {
        cli_error("repair: takes an input and an output, not %d operands; see nib repair --help", argc - first);
        return CLI_FAILED;
    }
    if (!run_confine(self, argv[first], argv[first + 1], false, &flags))
        return CLI_FAILED;
    return repair(self, argv[first], argv[first + 1], &flags);
}

const struct cli_command cli_repair = {
    "repair", "IN OUT", "write a checkpoint again without the faults that can be put right",
    "Write the checkpoint IN again as OUT, without what nib check calls repairable. Weights\n"
    "that servers fuse get one tensor scale, and their block scales make up for it;\n"
    "scales that were stored as their inverse are inverted; missing scales of activations\n"
    "become those of their group, or 1; the configuration is made from the tensors. Codes\n"
    "are never changed. Ends with what a check says of OUT.\n"
    "\n"
    "Exit status: 0 if OUT has no errors and no warnings; 1 if some are left, or if there\n"
    "was nothing to repair; 2 if it could not be done.\n"
    "\n"
    "  nib repair broken fixed && nib check fixed --against original\n",
    run_repair
};
