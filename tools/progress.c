/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L

#include "progress.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Names come from files that anyone may have written: nothing of them may command the terminal. */
static void put_name(const char *name)
{
    enum { MOST = 48 };
    const size_t length = strlen(name);
    const char *from = length > MOST ? name + length - MOST : name;
    for (; *from; from++)
        fputc((unsigned char)*from < 0x20 || *from == 0x7F ? '?' : *from, stderr);
}

static int show(void *context, const nib_progress *progress)
{
    struct progress *p = context;
    const double time = now();
    if (p->phase != progress->phase) {
        p->phase = progress->phase;
        p->began = time;
    }
    if (time - p->last < 0.1)
        return 0;
    p->last = time;
    const double share = progress->total ? (double)progress->done / (double)progress->total : 0;
    const double spent = time - p->began;
    fprintf(stderr, "\r\033[K%s %3.0f%%", progress->phase, 100 * share);
    if (share > 0.01 && spent > 1)
        fprintf(stderr, "  %.0f s left", ceil(spent / share - spent));
    if (progress->tensor) {
        fputs("  ", stderr);
        put_name(progress->tensor);
    }
    fflush(stderr);
    p->drawn = true;
    return 0;
}

void progress_begin(struct progress *progress, nib_job *job, int32_t threads, bool quiet)
{
    *progress = (struct progress){ .shown = !quiet && isatty(STDERR_FILENO) };
    nib_job_init(job);
    job->threads = threads;
    if (progress->shown) {
        job->progress = show;
        job->context = progress;
    }
}

void progress_end(struct progress *progress)
{
    if (progress->drawn)
        fputs("\r\033[K", stderr);
    progress->drawn = false;
}
