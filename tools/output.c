/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L

#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NO_MEMORY = -1, NO_FILE = -2 };

const char *output_reason(int code)
{
    return code == NO_MEMORY ? "no memory" : code == NO_FILE ? "it is not a regular file" : strerror(code);
}

static char *temporary_name(const char *path)
{
    const size_t bytes = strlen(path) + 32;
    char *const name = malloc(bytes);
    if (name)
        snprintf(name, bytes, "%s.tmp-%ld", path, (long)getpid());
    return name;
}

/* A rename would put a file in the place of a pipe that somebody reads, and cannot in that of a directory. Nothing is
 * called "", but a temporary file beside it could be made. */
static int check_place(const char *path)
{
    struct stat there;
    if (!*path)
        return ENOENT;
    if (stat(path, &there) != 0 || S_ISREG(there.st_mode))
        return 0;
    return S_ISDIR(there.st_mode) ? EISDIR : NO_FILE;
}

int output_try(const char *path)
{
    const int there = check_place(path);
    if (there)
        return there;
    char *const name = temporary_name(path);
    if (!name)
        return NO_MEMORY;
    const int fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), code = fd < 0 ? errno : 0;
    if (fd >= 0) {
        close(fd);
        unlink(name);
    }
    free(name);
    return code;
}

int output_open(struct output *out, const char *path)
{
    *out = (struct output){ .path = path };
    const int there = check_place(path);
    if (there)
        return there;
    out->temporary = temporary_name(path);
    if (!out->temporary)
        return NO_MEMORY;
    out->file = fopen(out->temporary, "w");
    const int code = errno;
    if (out->file) {
        errno = 0; /* what it is when the file is closed is about this file */
        return 0;
    }
    free(out->temporary);
    return code;
}

bool output_parent(const char *path, char *parent, size_t bytes)
{
    const char *const slash = strrchr(path, '/');
    const int length = slash ? (int)(slash - path) + 1 : 1;
    return (size_t)snprintf(parent, bytes, "%.*s", length, slash ? path : ".") < bytes;
}

/* A rename lasts when its directory is on the disk. File systems that cannot sync one keep it otherwise. */
static bool sync_parent(const char *path)
{
    char directory[4096];
    if (!output_parent(path, directory, sizeof directory))
        return true; /* no such path can be opened */
    const int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool good = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL);
    if (fd >= 0)
        close(fd);
    return good;
}

int output_close(struct output *out, bool good)
{
    good = good && !ferror(out->file) && fflush(out->file) == 0 && fsync(fileno(out->file)) == 0;
    good &= fclose(out->file) == 0;
    good = good && rename(out->temporary, out->path) == 0 && sync_parent(out->path);
    const int code = good ? 0 : errno ? errno : NO_MEMORY;
    if (!good)
        remove(out->temporary);
    free(out->temporary);
    return code;
}
