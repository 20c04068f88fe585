/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L

#include "progress.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"
#include "text.h"

static volatile sig_atomic_t interrupted;

static void note_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

void progress_catch_interrupts(void)
{
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
    struct sigaction action = { .sa_handler = note_interrupt, .sa_flags = (int)SA_RESETHAND | SA_RESTART };
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        struct sigaction before;
        /* What the caller's shell ignores (nohup) stays ignored. */
        if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            (void)sigaction(signals[i], &action, NULL);
    }
}

bool progress_interrupted(void) { return interrupted != 0; }

double progress_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The end of it, where it is long. */
static void put_name(const char *name)
{
    enum { MOST = 40 };
    const size_t length = strlen(name);
    char text[MOST + 1];
    snprintf(text, sizeof text, "%s", length > MOST ? name + length - MOST : name);
    text_disarm(text);
    fputs(text, stderr);
}

static void put_duration(double seconds)
{
    const double left = ceil(seconds);
    if (left < 100)
        fprintf(stderr, "%.0f s", left);
    else if (left < 6000)
        fprintf(stderr, "%.0f min", ceil(left / 60));
    else
        fprintf(stderr, "%.1f h", left / 3600);
}

static void draw(struct progress *p, const nib_progress *progress, double time)
{
    const double share = progress->total ? (double)progress->done / (double)progress->total : 0;
    const double spent = time - p->began;
    char rate[32];
    fprintf(stderr, "%s%s %3.0f %%", p->terminal ? "\r\033[K" : "nib: ", progress->phase, 100 * share);
    if (spent > 0.5)
        fprintf(stderr, "  %s/s", text_bytes((uint64_t)((double)progress->done / spent), rate, sizeof rate));
    if (share > 0.01 && share < 1 && spent > 1) {
        fputs("  ", stderr);
        put_duration(spent / share - spent);
        fputs(" left", stderr);
    }
    if (progress->tensor && p->terminal) {
        fputs("  ", stderr);
        put_name(progress->tensor);
    }
    if (!p->terminal)
        fputc('\n', stderr);
    fflush(stderr);
    p->drawn = p->terminal;
}

static int show(void *context, const nib_progress *progress)
{
    struct progress *p = context;
    if (progress->warning) {
        progress_end(p);
        cli_error("warning: %s", progress->warning);
        return interrupted;
    }
    const double time = progress_clock(), pause = p->terminal ? 0.1 : 10;
    if (p->phase != progress->phase) {
        p->phase = progress->phase;
        p->began = time;
        p->last = p->terminal ? 0 : time;
    }
    if (p->shown && time - p->last >= pause) {
        p->last = time;
        draw(p, progress, time);
    }
    return interrupted;
}

void progress_begin(struct progress *progress, nib_job *job, int32_t threads, bool quiet)
{
    *progress = (struct progress){ .shown = !quiet, .terminal = isatty(STDERR_FILENO) != 0 };
    nib_job_init(job);
    job->threads = threads;
    job->progress = show;
    job->context = progress;
}

void progress_end(struct progress *progress)
{
    if (progress->drawn)
        fputs("\r\033[K", stderr);
    progress->drawn = false;
}
