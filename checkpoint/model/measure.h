/* SPDX-License-Identifier: Apache-2.0 */
/*
 * measure.h - what long calls share: their options and their progress (measure.c, which is the first of them).
 */
#ifndef NIB_MEASURE_H
#define NIB_MEASURE_H

#include "base/base.h"
#include "nib_checkpoint.h"

#define NIB_JOB_OLDEST NIB_UP_TO(nib_job, comm) /* the first version that is still served: 0.2 */

/* What a caller gave, with its defaults filled in. */
nib_status nib_ck_job(const char *what, const nib_job *overrides, nib_job *out);
/* Tell the caller how far it is; CANCELLED where it wants no more. */
nib_status nib_ck_report(const nib_job *job, const char *phase, const char *tensor, uint64_t done, uint64_t total);

#endif
