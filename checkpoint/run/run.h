/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.h - a run of a plan: what its files share.
 */
#ifndef NIB_RUN_H
#define NIB_RUN_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/os.h"
#include "plan/plan.h"

struct nib_run {
    const nib_plan *plan;
    nib_job job;
    nib_run_options options;
    int threads;
    uint64_t memory; /* of each thread, for data */

    /* The folder of the run (stage.c). */
    char *out;      /* as given, without a slash at the end */
    bool as_file;   /* the output is one file */
    char *partial;  /* everything is in it until the end */
    char *finished; /* what that is called while it is removed */
    char *fresh;    /* what will be moved: partial/new */
    int lock;
    bool made_out; /* the output folder is this run's */
    char fingerprint[33];

    /* What the survey finds (survey.c). */
    struct nib_os_identity *identities; /* of input files, when the run began */
    struct nib_hash *hashes;
    float *amaxes; /* of groups; MXFP4: 2^k of the largest block scale that has something in it */
    float *levels; /* of groups, as the packing stores them */

    /* Threads. */
    pthread_mutex_t mutex;
    atomic_bool stop;
    nib_status status;
    char sentence[512];
    const char *phase;
    uint64_t done, total;
};

/* ---- Threads (run.c) ---- */

/* Call body(context, item) for items 0..n-1 on the run's threads. The first failure stops all. */
nib_status nib_run_parallel(struct nib_run *run, size_t n, nib_status (*body)(void *context, size_t item),
                            void *context);
void nib_run_begin_phase(struct nib_run *run, const char *phase, uint64_t total);
/* So many bytes of the phase are done. CANCELLED where the caller wants that. */
nib_status nib_run_progress(struct nib_run *run, const char *tensor, uint64_t bytes);

/* What a packing keeps per tensor: a divisor or a multiplier. */
nib_level nib_run_level_kind(nib_packing packing);
/* A level in another sense. Powers of two, which is what quantising here gives by default, lose nothing. */
float nib_run_translate(float level, nib_level from, nib_level to, int32_t e4m3_max);

/* ---- The second pass (write.c) ---- */

nib_status nib_run_write(struct nib_run *run, const char *provenance);

/* ---- The first pass (survey.c) ---- */

nib_status nib_run_survey(struct nib_run *run);
/* That no input file has changed since the run began. */
nib_status nib_run_check_sources(const struct nib_run *run);

/* ---- The folder (stage.c) ---- */

enum nib_stage_left {
    NIB_STAGE_OPEN = 0, /* nothing, or some of it: go on */
    NIB_STAGE_COMPLETE, /* all is there, but not all under its final name */
    NIB_STAGE_DONE      /* there is nothing left to do */
};
/* Checks the place of the output, makes the folder, locks it, and looks at what an earlier run left. */
nib_status nib_stage_open(struct nib_run *run, const char *out, enum nib_stage_left *left);
/* Everything is in partial/new: give it its names. */
nib_status nib_stage_publish(struct nib_run *run);
/* After a failure: what stays for a resume, or nothing. */
void nib_stage_close(struct nib_run *run, nib_status status);
/* A small file, complete or not at all. */
nib_status nib_stage_write(const char *path, const void *bytes, size_t count);
char *nib_stage_path(const char *folder, const char *name); /* NULL without memory */
/* Files of the input folder that go along: tokenizer, licence ... */
nib_status nib_stage_copy_others(struct nib_run *run);

/* Whether a group is nothing but zeros and gets the level 1 instead of what the dialect makes of it. */
bool nib_run_is_nothing(const nib_plan *plan, float amax);

#endif
