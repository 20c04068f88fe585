/* SPDX-License-Identifier: Apache-2.0 */
/*
 * os.h - every operating-system call of the library, and the floating-point environment.
 */
#ifndef NIB_OS_H
#define NIB_OS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/base.h"

/* The arithmetic of the specification: round to nearest even, subnormals kept. Another library may have set the
 * calling thread differently, so that every entry point that computes, and every worker thread, brackets its work:
 *     const nib_fpenv saved = nib_fpenv_enter();  ...  nib_fpenv_leave(saved); */
typedef uint64_t nib_fpenv;
NIB_PRIVATE nib_fpenv nib_fpenv_enter(void);
NIB_PRIVATE void nib_fpenv_leave(nib_fpenv saved);

/* False in a child after fork: the pool of worker threads did not survive it. */
NIB_PRIVATE bool nib_threads_usable(void);

/* How many threads there can be at a time, at most so many: they are started, the caller's but one, and end. */
int nib_os_start_threads(int threads);

/* Let another thread have the processor. */
NIB_PRIVATE void nib_os_yield(void);

/* Whether this process may use the processor's tiles: asks for them, once. x86-64 only. */
bool nib_os_allow_amx(void);
/* Whether the processor multiplies vectors of bytes. AArch64 only. */
bool nib_os_has_sdot(void);

/* Files. `path` is for the message. A descriptor is >= 0. */
NIB_PRIVATE nib_status nib_os_open_read(const char *path, int *fd, uint64_t *bytes);
NIB_PRIVATE nib_status nib_os_read_at(int fd, const char *path, uint64_t offset, void *out,
                                      size_t bytes); /* all of it or IO */
/* Create PATH.tmp-PID-N in the same directory, PATH's name shortened where this is too long; *temporary is freed by the caller with nib_free. */
NIB_PRIVATE nib_status nib_os_create_temporary(const char *path, int *fd, char **temporary);
NIB_PRIVATE nib_status nib_os_write_at(int fd, const char *path, uint64_t offset, const void *data, size_t bytes);
/* Have the system begin to write these bytes to the disk, so that a sync at the end waits for less. No more than a hint. */
NIB_PRIVATE void nib_os_start_writing(int fd, uint64_t offset, size_t bytes);
/* Sync the file, close it, rename it to `path`. The name may not last until its directory is synced. */
NIB_PRIVATE nib_status nib_os_complete(int fd, const char *temporary, const char *path);
/* The same, and sync the directory. */
NIB_PRIVATE nib_status nib_os_publish(int fd, const char *temporary, const char *path);
/* Give a new file its size, and set its room aside where the system can; what is not written reads as zeros. */
NIB_PRIVATE nib_status nib_os_allocate(int fd, const char *path, uint64_t bytes);
NIB_PRIVATE void nib_os_close(int fd);
NIB_PRIVATE void nib_os_remove(const char *path);            /* where nothing depends on it */
NIB_PRIVATE nib_status nib_os_remove_file(const char *path); /* fine if absent */

/* What tells a file from another one, or from itself after a change. */
struct nib_os_identity {
    uint64_t bytes, device, inode;
    int64_t seconds, nanoseconds; /* of the last change of its data */
};
NIB_PRIVATE nib_status nib_os_identity(const char *path, struct nib_os_identity *out);
/* Create or open a file, not a link, and lock it against other processes, until it is closed; *busy where another has it. */
NIB_PRIVATE nib_status nib_os_lock(const char *path, int *fd, bool *busy);

/* Directories. A path may end in a slash. */
NIB_PRIVATE bool nib_os_is_directory(const char *path);
NIB_PRIVATE bool nib_os_is_special(const char *path); /* neither a file nor a directory: a pipe, a socket, a device */
NIB_PRIVATE bool nib_os_exists(const char *path);     /* anything, a dangling link too */
NIB_PRIVATE bool nib_os_is_absent(const char *path);  /* for sure: not where it cannot be told */
/* What is there itself, not what a link leads to. */
enum nib_os_kind { NIB_OS_NOTHING, NIB_OS_FILE, NIB_OS_DIRECTORY, NIB_OS_OTHER };
NIB_PRIVATE enum nib_os_kind nib_os_kind_of(const char *path);
NIB_PRIVATE bool nib_os_is_own_directory(const char *path);
NIB_PRIVATE bool nib_os_is_own_file(const char *path);
/* Its parent must be there, and is synced; no error if it is there already, and *made (or NULL) is false. */
NIB_PRIVATE nib_status nib_os_make_directory(const char *path, bool *made);
/* With everything in it; links are not followed; fine if absent. */
NIB_PRIVATE nib_status nib_os_remove_directory(const char *path);
NIB_PRIVATE nib_status nib_os_remove_any(const char *path); /* a directory as above, or whatever is there */
NIB_PRIVATE void nib_os_remove_empty_directory(const char *path);
/* Names in a directory, each to `each` until that fails, in no order, without "." and "..". */
NIB_PRIVATE nib_status nib_os_list(const char *path, nib_status (*each)(void *context, const char *name),
                                   void *context);
NIB_PRIVATE nib_status nib_os_rename(const char *from, const char *to); /* replaces what is there */
NIB_PRIVATE nib_status nib_os_sync_directory(const char *path);
NIB_PRIVATE nib_status nib_os_sync_parent(const char *path); /* the directory that the name is in */
/* The path without links, "." and ".."; where it is not there yet, that of its parent with the last name behind it.
 * Freed with nib_free. */
NIB_PRIVATE nib_status nib_os_real_path(const char *path, char **out);
/* Bytes that may still be written where a directory is; UINT64_MAX where the file system does not say. */
NIB_PRIVATE uint64_t nib_os_free_bytes(const char *directory);
NIB_PRIVATE int nib_os_processors(void); /* that this process may run on */

#endif
