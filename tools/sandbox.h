/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sandbox.h - what a command may touch, once it reads files that anyone may have written.
 *
 * A command names its operands and enters, before it opens the first of them and before it has threads: from then on the
 * kernel lets it read its inputs, write its outputs and nothing else (Landlock), and it opens no socket and starts no
 * program (seccomp). docs/security.md has the whole. Where the kernel has less, the command runs with less.
 */
#ifndef NIB_SANDBOX_H
#define NIB_SANDBOX_H

#include <stdbool.h>
#include <stddef.h>

enum sandbox_use {
    SANDBOX_CHECKPOINT,       /* read: a directory and what its links name, or a file and the files beside it */
    SANDBOX_FILE,             /* read: this file alone */
    SANDBOX_OUTPUT_DIRECTORY, /* read and write all in it; it is made if it is not there: a rule needs something to hold */
    SANDBOX_OUTPUT_FILE       /* read and write all in its directory: it gets its name by a rename there */
};

struct sandbox_path {
    const char *path; /* NULL: not given */
    enum sandbox_use use;
};

/* Set where a command cannot do with a sandbox: why, for sandbox_state. NULL otherwise. */
extern const char *sandbox_waived;

/* Once. False where NIB_SANDBOX=require and it cannot be, or that word is unknown: the command must end. */
bool sandbox_enter(const struct sandbox_path *paths, size_t n);

/* Before the process ends: an output directory that was made and is empty goes again. */
void sandbox_leave(void);

/* "Landlock 7, seccomp", or what is missing and why: of what is entered, and before that of what the kernel has. */
const char *sandbox_state(void);

#endif
