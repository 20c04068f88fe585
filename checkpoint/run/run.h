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
    const struct nib_out_file **by_name; /* the plan's files */
    nib_job job;
    nib_run_options options;
    int threads;
    uint64_t memory; /* of each thread, for data: 64 KiB or more */

    /* The directory of the run (staging.c). */
    char *out;      /* as given, without a slash at the end */
    bool as_file;   /* the output is one file */
    char *partial;  /* everything is in it until the end */
    char *finished; /* what that is called while it is removed */
    char *fresh;    /* what will be moved: partial/new */
    int lock;
    bool made_out, made_partial; /* this run has made the directory: nothing of another is in it */
    char fingerprint[33];

    /* What the scan finds (scan.c). */
    struct nib_os_identity *identities; /* of input files, when the run began */
    struct nib_hash *hashes;
    float *amaxes;        /* of groups; MXFP4: 2^k of the largest block scale that has something in it */
    float *tensor_scales; /* of groups, as the checkpoint format stores them */

    /* Threads. */
    pthread_mutex_t mutex;
    atomic_bool stop;
    nib_status status;
    char message[512];
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
/* What whoever uses the result must know. */
nib_status nib_run_warn(struct nib_run *run, const char *warning);

/* A tensor scale in another sense. Powers of two, which is what quantizing here gives by default, lose nothing. */
float nib_run_translate(float tensor_scale, nib_tensor_scale from, nib_tensor_scale to, int32_t e4m3_max);

/* What an output may have beside its tensors, and whether it has it: the index, configurations, scales that were folded. */
enum { NIB_RUN_BESIDE = 4 };
extern const char *const nib_run_beside[NIB_RUN_BESIDE];
bool nib_run_writes(const nib_plan *plan, const char *name);

/* The file of the plan that has this name, or NULL. */
const struct nib_out_file *nib_run_file(const struct nib_run *run, const char *name);

/* Of a group whose amax is known. */
void nib_run_find_tensor_scale(struct nib_run *run, size_t group);

/* ---- GPTQ (factor.c) ---- */

struct nib_factor {
    int32_t *order;
    float *u;
    bool usable; /* there is one: the Hessian was positive definite */
};
/* Of a Hessian of the plan, whose input was divided by `columns` (NULL: it was not). */
nib_status nib_run_factorize(struct nib_run *run, uint32_t hessian, const float *columns, struct nib_factor *out);
void nib_run_free_factor(struct nib_factor *factor);

/* ---- The first pass (scan.c) ---- */

nib_status nib_run_scan(struct nib_run *run);

/* Both passes at once, where the output is one file of one file: its threads read on when nothing that is known is left
 * to be written, so that the input is read once, and while one waits for the disk another computes. */
struct nib_scan;
bool nib_scan_goes_along(const struct nib_run *run);
/* *out is closed by the caller, after a failure too. */
nib_status nib_scan_open(struct nib_run *run, struct nib_scan **out);
/* Where in the file all is known of a group; of NIB_NONE, where a tensor ends. */
nib_status nib_scan_end_of(const struct nib_scan *s, uint32_t group, uint32_t tensor, uint64_t *end);
uint64_t nib_scan_passed(const struct nib_scan *s);
/* What one thread has for it: zeros at first. Its memory is freed with nib_free. */
struct nib_scan_hand {
    unsigned char *memory;
    size_t next;
};
/* Read on. *any is false where that was all, and what others were reading has passed as well. */
nib_status nib_scan_read(struct nib_scan *s, struct nib_scan_hand *hand, bool *any);
/* The calling thread has failed: others must not wait for it. */
void nib_scan_give_up(struct nib_scan *s);
/* All has passed: what it comes to. */
nib_status nib_scan_finish(struct nib_scan *s);
void nib_scan_close(struct nib_scan *s);

/* That no input file has changed since the run began. */
nib_status nib_run_check_sources(const struct nib_run *run);

/* ---- The second pass (write.c) ---- */

/* With a scan that goes along, `provenance` is made when that has come to its end. */
nib_status nib_run_write(struct nib_run *run, struct nib_scan *scan, struct nib_text *provenance);

/* ---- The directory (staging.c) ---- */

enum nib_staging_left {
    NIB_STAGING_OPEN = 0, /* nothing, or some of it: go on */
    NIB_STAGING_COMPLETE, /* all is there, but not all under its final name */
    NIB_STAGING_DONE      /* there is nothing left to do */
};
/* Checks the place of the output, makes the directory, locks it, and looks at what an earlier run left. */
nib_status nib_staging_open(struct nib_run *run, const char *out, enum nib_staging_left *left);
/* Everything is in partial/new: give it its names. */
nib_status nib_staging_publish(struct nib_run *run);
/* After a failure: what stays for a resume, or nothing. */
void nib_staging_close(struct nib_run *run, nib_status status);
/* A small file, complete or not at all. Its directory is synced by the caller, who may have more to put there. */
nib_status nib_staging_write(const char *path, const void *bytes, size_t count);
char *nib_staging_path(const char *directory, const char *name); /* NULL without memory */
/* Files of the input directory that go along: tokenizer, license ... */
nib_status nib_staging_copy_others(struct nib_run *run);
/* Whether a file of this name goes along, and is there. */
nib_status nib_staging_goes_along(const struct nib_run *run, const char *name, bool *goes);

/* ---- What an earlier run left (left.c) ---- */

/* Whether a file is there whole: of the size and with the header that the plan has, given this provenance. Hashes that it
 * does not know yet may be any. */
nib_status nib_left_is_done(const nib_plan *plan, const struct nib_out_file *file, const char *path,
                            const char *provenance, bool *done);
/* Whether all files of the plan have their final names. */
nib_status nib_left_all_in_out(const struct nib_run *run, bool *done);
/* Whether all that the run writes is in partial/new or has its final name, and no more than names are missing. */
nib_status nib_left_is_whole(const struct nib_run *run, bool *whole);
/* Of partial/new only finished files of the plan stay; where all is there, also what else belongs to the output. */
nib_status nib_left_sweep(const struct nib_run *run, bool whole);

/* Whether a group gets the tensor scale 1 instead of what the dialect makes of its amax: it is nothing but zeros, or its
 * reader knows of no tensor scale. */
bool nib_run_is_unit(const nib_plan *plan, const struct nib_out_group *group, float amax);

#endif
