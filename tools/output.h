/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.h - a file that gets its name when it is complete and on the disk: a report, a plot. Whatever goes wrong, what
 * had the name before stays.
 */
#ifndef NIB_OUTPUT_H
#define NIB_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

struct output {
    const char *path;
    char *temporary; /* what the file is called until then */
    FILE *file;
};

/* Whether such a file can be made. It is tried, beside a file that may be there already, and taken away again: who may
 * write where cannot be asked otherwise. Long work is not begun for a file that cannot be written in the end. 0, or a
 * code for output_reason, which may be an errno. */
int output_try(const char *path);

/* Both return 0 or a code, and leave nothing behind if it is not 0. The second gives the name if what was written is
 * `good`; where it is not, and no error of the system says why, that was for want of memory. */
int output_open(struct output *out, const char *path);
int output_close(struct output *out, bool good);

const char *output_reason(int code);

/* The directory that a path lies in: with its slash, or ".". False where `bytes` are too few. */
bool output_parent(const char *path, char *parent, size_t bytes);

#endif
