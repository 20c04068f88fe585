/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.h - long work as a user sees it: one line that is written over on a terminal, nothing elsewhere.
 */
#ifndef NIB_PROGRESS_H
#define NIB_PROGRESS_H

#include <stdbool.h>

#include "nib_checkpoint.h"

struct progress {
    bool shown; /* standard error is a terminal and nobody asked for quiet */
    bool drawn; /* a line stands there now */
    const char *phase;
    double began, last; /* seconds */
};

/* A job that shows how far it is. */
void progress_begin(struct progress *progress, nib_job *job, int32_t threads, bool quiet);
/* Take the line away; called before anything else is written. */
void progress_end(struct progress *progress);

#endif
