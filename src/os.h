/* SPDX-License-Identifier: Apache-2.0 */
/*
 * os.h - every operating-system call of the library, and the floating-point environment.
 */
#ifndef NIB_OS_H
#define NIB_OS_H

#include <stdbool.h>
#include <stdint.h>

#include "base.h"

/* The arithmetic of the specification: round to nearest even, subnormals kept. Another library may have set the
 * calling thread differently, so that every entry point that computes, and every worker thread, brackets its work:
 *     const nib_fpenv saved = nib_fpenv_enter();  ...  nib_fpenv_leave(saved); */
typedef uint64_t nib_fpenv;
nib_fpenv nib_fpenv_enter(void);
void nib_fpenv_leave(nib_fpenv saved);

/* False in a child after fork: the pool of worker threads did not survive it. */
bool nib_threads_usable(void);

/* Files. `path` is for the sentence. A descriptor is >= 0. */
nib_status nib_os_open_read(const char *path, int *fd, uint64_t *bytes);
nib_status nib_os_read_at(int fd, const char *path, uint64_t offset, void *out, size_t bytes); /* all of it or IO */
/* Create PATH.tmp-PID-N in the same folder; *temporary is freed by the caller with nib_free. */
nib_status nib_os_create_temporary(const char *path, int *fd, char **temporary);
nib_status nib_os_write_at(int fd, const char *path, uint64_t offset, const void *data, size_t bytes);
/* Sync the file, close it, rename it to `path`, sync the folder. */
nib_status nib_os_publish(int fd, const char *temporary, const char *path);
void nib_os_close(int fd);
void nib_os_remove(const char *path);

#endif
