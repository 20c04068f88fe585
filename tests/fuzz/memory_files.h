/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_files.h - a file system of a few small files in memory, below MEMORY_ROOT: for targets that write and read so
 * many of them that the kernel would take half of their time. Everything else goes to the system.
 *
 * A target that says NIB_TEST_WRAP_MEMORY is linked with -Wl,--wrap for each call here, which are all that base/os.c
 * makes of files. What it does is what Linux does, as far as one process with one thread can tell: files without a name
 * live as long as somebody has them open, a directory that is not empty is not removed, a lock excludes others.
 */
#ifndef NIB_MEMORY_FILES_H
#define NIB_MEMORY_FILES_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define MEMORY_ROOT "/nib-memory"
enum { MEMORY_FIRST = 1 << 20, MEMORY_FDS = 64, MEMORY_NODES = 128, MEMORY_NAME = 96, MEMORY_LISTINGS = 8 };

/* A file or a directory; 0 is the root. */
struct memory_node {
    bool taken, directory;
    int parent;         /* -1: without a name */
    int opened, locked; /* descriptors; the one that has the lock, + 1 */
    char name[MEMORY_NAME];
    uint8_t *data;
    size_t bytes, room;
    uint64_t number, changed;
};
static struct memory_node memory_nodes[MEMORY_NODES] = { { .taken = true, .directory = true, .opened = 1 } };
static struct memory_fd {
    bool taken;
    int node, access;
} memory_fds[MEMORY_FDS];
static struct memory_listing {
    bool taken;
    int fd, next;
    struct dirent entry;
} memory_listings[MEMORY_LISTINGS];
static uint64_t memory_clock;

#define MEMORY_REAL(type, name, ...) type __real_##name(__VA_ARGS__)
MEMORY_REAL(int, openat, int, const char *, int, ...);
MEMORY_REAL(int, close, int);
MEMORY_REAL(ssize_t, pread, int, void *, size_t, off_t);
MEMORY_REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
MEMORY_REAL(int, ftruncate, int, off_t);
MEMORY_REAL(int, fallocate, int, int, off_t, off_t);
MEMORY_REAL(int, fsync, int);
MEMORY_REAL(int, sync_file_range, int, off64_t, off64_t, unsigned);
MEMORY_REAL(int, flock, int, int);
MEMORY_REAL(int, fstat, int, struct stat *);
MEMORY_REAL(int, stat, const char *, struct stat *);
MEMORY_REAL(int, lstat, const char *, struct stat *);
MEMORY_REAL(int, rename, const char *, const char *);
MEMORY_REAL(int, mkdir, const char *, mode_t);
MEMORY_REAL(int, rmdir, const char *);
MEMORY_REAL(int, unlink, const char *);
MEMORY_REAL(int, unlinkat, int, const char *, int);
MEMORY_REAL(DIR *, opendir, const char *);
MEMORY_REAL(DIR *, fdopendir, int);
MEMORY_REAL(struct dirent *, readdir, DIR *);
MEMORY_REAL(int, closedir, DIR *);
MEMORY_REAL(int, dirfd, DIR *);
MEMORY_REAL(char *, realpath, const char *, char *);
MEMORY_REAL(int, statvfs, const char *, struct statvfs *);

static inline void memory_demand(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "files in memory: %s\n", what);
        abort();
    }
}

static inline int memory_error(int error)
{
    errno = error;
    return -1;
}

/* ---- Names ---- */

static inline bool memory_has(const char *path)
{
    const size_t n = sizeof MEMORY_ROOT - 1;
    return !strncmp(path, MEMORY_ROOT, n) && (path[n] == '/' || !path[n]);
}

static inline int memory_child(int directory, const char *name, size_t n)
{
    for (int i = 1; i < MEMORY_NODES; i++)
        if (memory_nodes[i].taken && memory_nodes[i].parent == directory && !strncmp(memory_nodes[i].name, name, n) &&
            !memory_nodes[i].name[n])
            return i;
    return -1;
}

struct memory_place {
    int directory, node; /* -1: there is none of that name */
    char name[MEMORY_NAME];
};

/* Where a path leads from a directory; 0, or -1 and errno. */
static inline int memory_find(int from, const char *path, struct memory_place *out)
{
    *out = (struct memory_place){ .directory = memory_nodes[from].parent, .node = from };
    while (*path) {
        const size_t n = strcspn(path, "/");
        if (n == 0 || (n == 1 && *path == '.')) {
            path += n ? n : 1;
            continue;
        }
        memory_demand(n < MEMORY_NAME && !(n == 2 && !strncmp(path, "..", 2)), "a name");
        if (out->node < 0)
            return memory_error(ENOENT);
        if (!memory_nodes[out->node].directory)
            return memory_error(ENOTDIR);
        out->directory = out->node;
        memcpy(out->name, path, n);
        out->name[n] = '\0';
        out->node = memory_child(out->directory, path, n);
        path += n;
        if (*path == '/' && out->node >= 0 && !memory_nodes[out->node].directory)
            return memory_error(ENOTDIR);
    }
    return 0;
}

static inline int memory_find_path(const char *path, struct memory_place *out)
{
    return memory_find(0, path + sizeof MEMORY_ROOT - 1, out);
}

/* A node that is there. */
static inline int memory_existing(const char *path, struct memory_place *out)
{
    if (memory_find_path(path, out))
        return -1;
    return out->node < 0 ? memory_error(ENOENT) : out->node;
}

static inline int memory_make(const struct memory_place *place, bool directory)
{
    int i = 1;
    while (i < MEMORY_NODES && memory_nodes[i].taken)
        i++;
    memory_demand(i < MEMORY_NODES, "more than there is space for");
    struct memory_node *node = &memory_nodes[i];
    uint8_t *data = node->data;
    const size_t room = node->room;
    *node = (struct memory_node){ .taken = true,
                                  .directory = directory,
                                  .parent = place->directory,
                                  .data = data,
                                  .room = room,
                                  .number = ++memory_clock };
    memcpy(node->name, place->name, sizeof node->name);
    node->changed = memory_nodes[place->directory].changed = memory_clock;
    return i;
}

/* Its memory is for the next node here. */
static inline void memory_forget(int i)
{
    struct memory_node *node = &memory_nodes[i];
    if (node->parent < 0 && !node->opened)
        node->taken = false;
}

static inline void memory_unname(int i)
{
    memory_nodes[memory_nodes[i].parent].changed = ++memory_clock;
    memory_nodes[i].parent = -1;
    memory_forget(i);
}

static inline bool memory_empty(int directory)
{
    for (int i = 1; i < MEMORY_NODES; i++)
        if (memory_nodes[i].taken && memory_nodes[i].parent == directory)
            return false;
    return true;
}

/* ---- Descriptors ---- */

static inline struct memory_fd *memory_fd_of(int fd)
{
    if (fd < MEMORY_FIRST)
        return NULL;
    memory_demand(fd < MEMORY_FIRST + MEMORY_FDS && memory_fds[fd - MEMORY_FIRST].taken, "a descriptor that is closed");
    return &memory_fds[fd - MEMORY_FIRST];
}

static inline struct memory_node *memory_node_of(int fd) { return &memory_nodes[memory_fd_of(fd)->node]; }

static inline int memory_open(int from, const char *path, int flags)
{
    struct memory_place place;
    if (memory_find(from, path, &place))
        return -1;
    if (place.node < 0 && !(flags & O_CREAT))
        return memory_error(ENOENT);
    if (place.node >= 0 && flags & O_CREAT && flags & O_EXCL)
        return memory_error(EEXIST);
    if (place.node < 0)
        place.node = memory_make(&place, false);
    struct memory_node *node = &memory_nodes[place.node];
    if (node->directory && (flags & O_ACCMODE) != O_RDONLY)
        return memory_error(EISDIR);
    if (!node->directory && flags & O_DIRECTORY)
        return memory_error(ENOTDIR);
    if (flags & O_TRUNC)
        node->bytes = 0;
    int i = 0;
    while (i < MEMORY_FDS && memory_fds[i].taken)
        i++;
    memory_demand(i < MEMORY_FDS, "descriptors that nobody closes");
    memory_fds[i] = (struct memory_fd){ .taken = true, .node = place.node, .access = flags & O_ACCMODE };
    node->opened++;
    return MEMORY_FIRST + i;
}

static inline void memory_resize(struct memory_node *node, size_t bytes)
{
    memory_demand(bytes < 1 << 24, "a file that is not small");
    if (bytes > node->room) {
        node->room = 2 * bytes;
        node->data = realloc(node->data, node->room);
        memory_demand(node->data != NULL, "no memory");
    }
    if (bytes > node->bytes)
        memset(node->data + node->bytes, 0, bytes - node->bytes);
    node->bytes = bytes;
    node->changed = ++memory_clock;
}

/* ---- Calls with names ---- */

int __wrap_open(const char *path, int flags, ...);
int __wrap_openat(int at, const char *path, int flags, ...);

int __wrap_open(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0;
    va_end(arguments);
    return memory_has(path) ? memory_open(0, path + sizeof MEMORY_ROOT - 1, flags)
                            : __real_openat(AT_FDCWD, path, flags, mode);
}

int __wrap_openat(int at, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0;
    va_end(arguments);
    return memory_fd_of(at) ? memory_open(memory_fd_of(at)->node, path, flags) : __real_openat(at, path, flags, mode);
}

static inline int memory_remove(int from, const char *path, bool directory)
{
    struct memory_place place;
    if (memory_find(from, path, &place))
        return -1;
    if (place.node < 0)
        return memory_error(ENOENT);
    if (memory_nodes[place.node].directory != directory)
        return memory_error(directory ? ENOTDIR : EISDIR);
    if (directory && !memory_empty(place.node))
        return memory_error(ENOTEMPTY);
    memory_unname(place.node);
    return 0;
}

int __wrap_unlink(const char *path);
int __wrap_rmdir(const char *path);
int __wrap_unlinkat(int at, const char *path, int flags);
int __wrap_mkdir(const char *path, mode_t mode);
int __wrap_rename(const char *from, const char *to);

int __wrap_unlink(const char *path)
{
    return memory_has(path) ? memory_remove(0, path + sizeof MEMORY_ROOT - 1, false) : __real_unlink(path);
}

int __wrap_rmdir(const char *path)
{
    return memory_has(path) ? memory_remove(0, path + sizeof MEMORY_ROOT - 1, true) : __real_rmdir(path);
}

int __wrap_unlinkat(int at, const char *path, int flags)
{
    return memory_fd_of(at) ? memory_remove(memory_fd_of(at)->node, path, flags & AT_REMOVEDIR)
                            : __real_unlinkat(at, path, flags);
}

int __wrap_mkdir(const char *path, mode_t mode)
{
    struct memory_place place;
    if (!memory_has(path))
        return __real_mkdir(path, mode);
    if (memory_find_path(path, &place))
        return -1;
    if (place.node >= 0)
        return memory_error(EEXIST);
    memory_make(&place, true);
    return 0;
}

int __wrap_rename(const char *from, const char *to)
{
    struct memory_place source, target;
    if (!memory_has(from) || !memory_has(to)) {
        memory_demand(!memory_has(from) && !memory_has(to), "a rename from elsewhere");
        return __real_rename(from, to);
    }
    if (memory_existing(from, &source) < 0 || memory_find_path(to, &target))
        return -1;
    if (target.node == source.node)
        return 0;
    if (target.node >= 0) {
        if (memory_nodes[target.node].directory != memory_nodes[source.node].directory)
            return memory_error(memory_nodes[target.node].directory ? EISDIR : ENOTDIR);
        if (memory_nodes[target.node].directory && !memory_empty(target.node))
            return memory_error(ENOTEMPTY);
        memory_unname(target.node);
    }
    struct memory_node *node = &memory_nodes[source.node];
    memory_nodes[source.directory].changed = memory_nodes[target.directory].changed = ++memory_clock;
    node->parent = target.directory;
    memcpy(node->name, target.name, sizeof node->name);
    return 0;
}

static inline int memory_facts(int i, struct stat *out)
{
    const struct memory_node *node = &memory_nodes[i];
    *out = (struct stat){ .st_dev = 1,
                          .st_ino = node->number + 1,
                          .st_mode = node->directory ? S_IFDIR | 0755 : S_IFREG | 0644,
                          .st_nlink = node->parent >= 0,
                          .st_size = (off_t)node->bytes,
                          .st_mtim = { .tv_sec = (time_t)node->changed } };
    return 0;
}

int __wrap_stat(const char *path, struct stat *out);
int __wrap_lstat(const char *path, struct stat *out);
int __wrap_fstat(int fd, struct stat *out);
char *__wrap_realpath(const char *path, char *out);
int __wrap_statvfs(const char *path, struct statvfs *out);

int __wrap_stat(const char *path, struct stat *out)
{
    struct memory_place place;
    if (!memory_has(path))
        return __real_stat(path, out);
    return memory_existing(path, &place) < 0 ? -1 : memory_facts(place.node, out);
}

int __wrap_lstat(const char *path, struct stat *out)
{
    return memory_has(path) ? __wrap_stat(path, out) : __real_lstat(path, out);
}

int __wrap_fstat(int fd, struct stat *out)
{
    return memory_fd_of(fd) ? memory_facts(memory_fd_of(fd)->node, out) : __real_fstat(fd, out);
}

char *__wrap_realpath(const char *path, char *out)
{
    struct memory_place place;
    if (!memory_has(path))
        return __real_realpath(path, out);
    memory_demand(!out, "a path that is not allocated");
    if (memory_existing(path, &place) < 0)
        return NULL;
    char buffer[4096], *at = buffer + sizeof buffer - 1;
    *at = '\0';
    for (int i = place.node; i > 0; i = memory_nodes[i].parent) {
        const size_t n = strlen(memory_nodes[i].name);
        memory_demand((size_t)(at - buffer) > n + sizeof MEMORY_ROOT, "a long path");
        memcpy(at -= n, memory_nodes[i].name, n);
        *--at = '/';
    }
    at -= sizeof MEMORY_ROOT - 1;
    memcpy(at, MEMORY_ROOT, sizeof MEMORY_ROOT - 1);
    return strdup(at);
}

int __wrap_statvfs(const char *path, struct statvfs *out)
{
    if (!memory_has(path))
        return __real_statvfs(path, out);
    *out = (struct statvfs){ .f_bsize = 4096, .f_frsize = 4096, .f_blocks = 1 << 20, .f_bavail = 1 << 19 };
    return 0;
}

/* ---- Calls with descriptors ---- */

int __wrap_close(int fd);
ssize_t __wrap_pread(int fd, void *to, size_t bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *from, size_t bytes, off_t offset);
int __wrap_ftruncate(int fd, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t first, off_t bytes);
int __wrap_fsync(int fd);
int __wrap_sync_file_range(int fd, off64_t first, off64_t bytes, unsigned flags);
int __wrap_flock(int fd, int operation);

int __wrap_close(int fd)
{
    struct memory_fd *own = memory_fd_of(fd);
    if (!own)
        return __real_close(fd);
    struct memory_node *node = &memory_nodes[own->node];
    own->taken = false;
    node->opened--;
    node->locked = node->locked == fd + 1 ? 0 : node->locked;
    memory_forget(own->node);
    return 0;
}

ssize_t __wrap_pread(int fd, void *to, size_t bytes, off_t offset)
{
    if (!memory_fd_of(fd))
        return __real_pread(fd, to, bytes, offset);
    const struct memory_node *node = memory_node_of(fd);
    if (memory_fd_of(fd)->access == O_WRONLY)
        return memory_error(EBADF);
    if (node->directory)
        return memory_error(EISDIR);
    const size_t at = (size_t)offset, left = at < node->bytes ? node->bytes - at : 0, n = bytes < left ? bytes : left;
    if (n)
        memcpy(to, node->data + at, n);
    return (ssize_t)n;
}

ssize_t __wrap_pwrite(int fd, const void *from, size_t bytes, off_t offset)
{
    if (!memory_fd_of(fd))
        return __real_pwrite(fd, from, bytes, offset);
    struct memory_node *node = memory_node_of(fd);
    if (memory_fd_of(fd)->access == O_RDONLY)
        return memory_error(EBADF);
    memory_resize(node, bytes && (size_t)offset + bytes > node->bytes ? (size_t)offset + bytes : node->bytes);
    if (bytes)
        memcpy(node->data + offset, from, bytes);
    return (ssize_t)bytes;
}

int __wrap_ftruncate(int fd, off_t bytes)
{
    if (!memory_fd_of(fd))
        return __real_ftruncate(fd, bytes);
    memory_resize(memory_node_of(fd), (size_t)bytes);
    return 0;
}

int __wrap_fallocate(int fd, int mode, off_t first, off_t bytes)
{
    if (!memory_fd_of(fd))
        return __real_fallocate(fd, mode, first, bytes);
    struct memory_node *node = memory_node_of(fd);
    if (bytes <= 0)
        return memory_error(EINVAL);
    if ((size_t)(first + bytes) > node->bytes)
        memory_resize(node, (size_t)(first + bytes));
    return 0;
}

int __wrap_fsync(int fd) { return memory_fd_of(fd) ? 0 : __real_fsync(fd); }

int __wrap_sync_file_range(int fd, off64_t first, off64_t bytes, unsigned flags)
{
    return memory_fd_of(fd) ? 0 : __real_sync_file_range(fd, first, bytes, flags);
}

int __wrap_flock(int fd, int operation)
{
    if (!memory_fd_of(fd))
        return __real_flock(fd, operation);
    struct memory_node *node = memory_node_of(fd);
    memory_demand(operation == (LOCK_EX | LOCK_NB), "a lock that waits");
    if (node->locked && node->locked != fd + 1)
        return memory_error(EWOULDBLOCK);
    node->locked = fd + 1;
    return 0;
}

/* ---- Listings ---- */

DIR *__wrap_fdopendir(int fd);
DIR *__wrap_opendir(const char *path);
struct dirent *__wrap_readdir(DIR *listing);
int __wrap_closedir(DIR *listing);
int __wrap_dirfd(DIR *listing);

static inline struct memory_listing *memory_listing_of(DIR *listing)
{
    struct memory_listing *own = (struct memory_listing *)listing;
    return own >= memory_listings && own < memory_listings + MEMORY_LISTINGS ? own : NULL;
}

DIR *__wrap_fdopendir(int fd)
{
    if (!memory_fd_of(fd))
        return __real_fdopendir(fd);
    int i = 0;
    while (i < MEMORY_LISTINGS && memory_listings[i].taken)
        i++;
    memory_demand(i < MEMORY_LISTINGS, "listings that nobody closes");
    memory_listings[i].taken = true;
    memory_listings[i].fd = fd;
    memory_listings[i].next = 1;
    return (DIR *)&memory_listings[i];
}

DIR *__wrap_opendir(const char *path)
{
    if (!memory_has(path))
        return __real_opendir(path);
    const int fd = memory_open(0, path + sizeof MEMORY_ROOT - 1, O_RDONLY | O_DIRECTORY);
    return fd < 0 ? NULL : __wrap_fdopendir(fd);
}

struct dirent *__wrap_readdir(DIR *listing)
{
    struct memory_listing *own = memory_listing_of(listing);
    if (!own)
        return __real_readdir(listing);
    const int directory = memory_fd_of(own->fd)->node;
    while (own->next < MEMORY_NODES && !(memory_nodes[own->next].taken && memory_nodes[own->next].parent == directory))
        own->next++;
    if (own->next == MEMORY_NODES)
        return NULL;
    const struct memory_node *node = &memory_nodes[own->next++];
    own->entry.d_ino = node->number + 1;
    own->entry.d_type = node->directory ? DT_DIR : DT_REG;
    memcpy(own->entry.d_name, node->name, sizeof node->name);
    return &own->entry;
}

int __wrap_closedir(DIR *listing)
{
    struct memory_listing *own = memory_listing_of(listing);
    if (!own)
        return __real_closedir(listing);
    own->taken = false;
    return __wrap_close(own->fd);
}

int __wrap_dirfd(DIR *listing)
{
    const struct memory_listing *own = memory_listing_of(listing);
    return own ? own->fd : __real_dirfd(listing);
}

#endif
