/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.h - long work as a user sees it: one line that is written over on a terminal, now and then a line elsewhere.
 */
#ifndef NIB_PROGRESS_H
#define NIB_PROGRESS_H

#include <stdbool.h>

#include "nib_checkpoint.h"

struct progress {
    bool shown;    /* nobody asked for quiet */
    bool terminal; /* standard error is one */
    bool drawn;    /* a line stands there now */
    const char *phase;
    double began, last; /* seconds: of the phase, of the last line */
};

/* A job that shows how far it is. */
void progress_begin(struct progress *progress, nib_job *job, int32_t threads, bool quiet);
/* Take the line away; called before anything else is written. */
void progress_end(struct progress *progress);

/* From now on an interrupt asks the job to stop and clean up; a second one ends the program at once. */
void progress_catch_interrupts(void);
bool progress_interrupted(void);

/* Seconds of a clock that only goes forward. */
double progress_clock(void);

#endif
