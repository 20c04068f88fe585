/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run_plan.h - what all commands that write a checkpoint share: their options, the plan shown or carried out, and what
 * is said of it.
 */
#ifndef NIB_RUN_PLAN_H
#define NIB_RUN_PLAN_H

#include "cli.h"
#include "nib_checkpoint.h"

struct run_flags {
    bool dry_run, resume, force, quiet, verbose, json;
    int32_t threads;
    uint64_t max_memory;
    const char *report;
    const char *quantized_source; /* how the source was quantized already, for --json; NULL: it was not */
};

/* Rows of a table of options. */
#define RUN_OPTIONS(flags)                                                                                             \
    { 't', "threads", CLI_NUMBER, &(flags).threads, "N", "threads to use (default: one per processor)", 1, 1024 },     \
        { 0, "max-memory", CLI_BYTES, &(flags).max_memory, "SIZE", "memory for data (default 512Mi)", 0, 0 },          \
        { 'n', "dry-run", CLI_FLAG, &(flags).dry_run, NULL, "show the plan and the size of the output, write nothing", \
          0,   0 },                                                                                                    \
        { 0, "resume", CLI_FLAG, &(flags).resume, NULL, "go on where an earlier run was stopped", 0, 0 },              \
        { 'f', "force", CLI_FLAG, &(flags).force, NULL, "replace an output that exists", 0, 0 },                       \
        { 'q', "quiet", CLI_FLAG, &(flags).quiet, NULL, "only errors", 0, 0 },                                         \
        { 'v', "verbose", CLI_FLAG, &(flags).verbose, NULL, "a line for every weight", 0, 0 },                         \
    {                                                                                                                  \
        0, "json", CLI_FLAG, &(flags).json, NULL, "the plan and what came of it as JSON on standard output", 0, 0      \
    }

/* The communicator of all commands; NULL in the tool that runs alone. */
extern const nib_comm *run_comm;
extern bool run_entered; /* the ranks have met: a rank that fails before that must tell the others */

/* Carry a plan out, or show it; `done` is the verb of the summary ("quantized"). The plan stays the caller's. */
enum cli_exit run_plan(const struct cli_command *self, const nib_plan *plan, const char *out,
                       const struct run_flags *flags, const char *done);
/* Before the input is opened: what a command from IN to OUT may touch. False after a message. */
bool run_confine(const struct cli_command *self, const char *in, const char *out, bool as_file,
                 const struct run_flags *flags);
/* The output alone; `as_file`: it is one file whatever its name. */
struct sandbox_path run_output(const char *out, bool as_file, const struct run_flags *flags);
/* Whether an output of this name is a GGUF file. */
bool run_is_gguf(const char *path);
/* A message of the library as an error of the tool. */
enum cli_exit run_failed(const struct cli_command *self);
/* Open the input; a message is on stderr where that fails. */
nib_checkpoint *run_open(const struct cli_command *self, const char *path);

#endif
