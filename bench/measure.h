/* SPDX-License-Identifier: Apache-2.0 */
/* measure.h - what the programs here share: the clock, and an end where a call fails. Wants _POSIX_C_SOURCE. */
#ifndef NIB_MEASURE_H
#define NIB_MEASURE_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nib.h"

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void require(nib_status status)
{
    if (!status)
        return;
    fprintf(stderr, "%s: %s\n", nib_status_name(status), nib_last_error());
    exit(1);
}

#endif
