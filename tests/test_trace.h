/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_trace.h - what the library does to the files below one directory, step by step; every state of them that a power
 * cut may leave; and calls that fail at a given step.
 *
 * A test that says NIB_TEST_WRAP_FILES is linked with -Wl,--wrap for each call here. Names that were changed by another
 * call show in trace_compare, which every test must make.
 */
#ifndef NIB_TEST_TRACE_H
#define NIB_TEST_TRACE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

#include "test.h"

enum { TRACE_STEPS = 4096, TRACE_NAMES = 1024, TRACE_NAME_BYTES = 96, TRACE_ENTRIES = 256, TRACE_FDS = 1024 };
enum { TRACE_CHANGES = 4096 };

/* MAKE: a file, whose data is not on disk even while it has none. */
enum trace_kind { TRACE_WRITE, TRACE_SYNC, TRACE_MAKE, TRACE_MKDIR, TRACE_UNLINK, TRACE_RENAME };

/* A name in a directory; dir -1: not below the root, name -1: the directory itself. */
struct trace_place {
    int dir, name;
};

/* Files and directories have numbers, as on disk: they keep them whatever they are called. The root is 0. */
struct trace_step {
    enum trace_kind kind;
    int file;
    struct trace_place place, to;
};

/* What a call made of a file's data: bytes at an offset; without bytes, a size of `offset`, exactly or at least. */
struct trace_change {
    int step, file;
    size_t offset, bytes;
    char *data;
    bool exact;
};

struct trace_tree {
    int n;
    struct trace_entry {
        struct trace_place place;
        int file;
    } entries[TRACE_ENTRIES];
};

static char trace_root[128], trace_names[TRACE_NAMES][TRACE_NAME_BYTES];
static struct trace_step trace_steps[TRACE_STEPS];
static struct trace_tree trace_before, trace_now;
static int trace_n_names, trace_n_steps, trace_n_files, trace_fds[TRACE_FDS];
static bool trace_on;
/* For a test that wants them: the changes of all writes. */
static struct trace_change trace_changes[TRACE_CHANGES];
static int trace_n_changes;
static bool trace_keeps_data;
static pthread_mutex_t trace_mutex = PTHREAD_MUTEX_INITIALIZER;
/* Steps until one fails, and with trace_dead all that come after it, as if the process had been killed; -1: none. */
static int trace_left = -1;
static bool trace_dead;
/* How many steps came before the first that failed since the start, or -1. */
static int trace_failed;

static int trace_bounded(int n, int most, const char *what)
{
    if (n < most)
        return n;
    fprintf(stderr, "a trace has more %s than %d\n", what, most);
    exit(2);
}

/* ---- Names ---- */

static int trace_name(const char *text, size_t bytes)
{
    for (int i = 0; i < trace_n_names; i++)
        if (strlen(trace_names[i]) == bytes && !memcmp(trace_names[i], text, bytes))
            return i;
    const int name = trace_bounded(trace_n_names++, TRACE_NAMES, "names");
    memcpy(trace_names[name], text, (size_t)trace_bounded((int)bytes, TRACE_NAME_BYTES, "bytes of a name"));
    trace_names[name][bytes] = '\0';
    return name;
}

static bool trace_same(struct trace_place a, struct trace_place b) { return a.dir == b.dir && a.name == b.name; }

static struct trace_entry *trace_entry(struct trace_tree *tree, struct trace_place place)
{
    for (int i = 0; i < tree->n; i++)
        if (trace_same(tree->entries[i].place, place))
            return &tree->entries[i];
    return NULL;
}

/* The file of that name, or -1. */
static int trace_find(const struct trace_tree *tree, struct trace_place place)
{
    for (int i = 0; i < tree->n; i++)
        if (trace_same(tree->entries[i].place, place))
            return tree->entries[i].file;
    return place.name < 0 ? place.dir : -1;
}

static void trace_put(struct trace_tree *tree, struct trace_place place, int file)
{
    struct trace_entry *entry = trace_entry(tree, place);
    if (!entry)
        entry = &tree->entries[trace_bounded(tree->n++, TRACE_ENTRIES, "files")];
    *entry = (struct trace_entry){ place, file };
}

static void trace_drop(struct trace_tree *tree, struct trace_place place)
{
    struct trace_entry *entry = trace_entry(tree, place);
    if (entry)
        *entry = tree->entries[--tree->n];
}

/* Where a path leads as things are now: from the root, or from a directory. */
static struct trace_place trace_place(int dir, const char *path)
{
    struct trace_place place = { dir, -1 };
    const size_t n = strlen(trace_root);
    if (path[0] == '/') {
        place.dir = strncmp(path, trace_root, n) || (path[n] && path[n] != '/') ? -1 : 0;
        path += n;
    }
    while (place.dir >= 0 && *(path += strspn(path, "/"))) {
        if (place.name >= 0)
            place.dir = trace_find(&trace_now, place);
        place.name = trace_name(path, strcspn(path, "/"));
        path += strcspn(path, "/");
    }
    return place;
}

/* ---- Steps ---- */

static void trace_apply(struct trace_tree *tree, const struct trace_step *step)
{
    if (step->kind == TRACE_UNLINK || step->kind == TRACE_RENAME)
        trace_drop(tree, step->place);
    if (step->kind == TRACE_MAKE || step->kind == TRACE_MKDIR || step->kind == TRACE_RENAME)
        trace_put(tree, step->kind == TRACE_RENAME ? step->to : step->place, step->file);
}

/* Writes of one file that follow each other are one step. */
static bool trace_goes_on(enum trace_kind kind, int file)
{
    const struct trace_step *last = trace_n_steps ? &trace_steps[trace_n_steps - 1] : NULL;
    return kind == TRACE_WRITE && last && last->kind == TRACE_WRITE && last->file == file;
}

static bool trace_fails(enum trace_kind kind, int file)
{
    const bool killed = trace_dead && trace_failed >= 0;
    if (trace_left < 0 || (!killed && (trace_goes_on(kind, file) || trace_left-- > 0)))
        return false;
    if (trace_failed < 0)
        trace_failed = trace_n_steps;
    if (trace_dead)
        trace_left = 0;
    errno = EIO;
    return true;
}

static void trace_step(struct trace_step step)
{
    if (trace_goes_on(step.kind, step.file))
        return;
    trace_steps[trace_bounded(trace_n_steps++, TRACE_STEPS, "steps")] = step;
    trace_apply(&trace_now, &step);
}

static void trace_keep(struct trace_change change, const void *data)
{
    change.step = trace_n_steps - 1;
    if (data) {
        change.data = malloc(change.bytes ? change.bytes : 1);
        memcpy(change.data, data, change.bytes);
    }
    trace_changes[trace_bounded(trace_n_changes++, TRACE_CHANGES, "writes")] = change;
}

/* Give what is there numbers, directories before what is in them. */
static void trace_import(const char *path, int dir)
{
    DIR *listing = opendir(path);
    for (struct dirent *item; listing && (item = readdir(listing));) {
        char inner[512];
        struct stat facts;
        if (!strcmp(item->d_name, ".") || !strcmp(item->d_name, ".."))
            continue;
        snprintf(inner, sizeof inner, "%s/%s", path, item->d_name);
        const int file = ++trace_n_files;
        trace_put(&trace_now, (struct trace_place){ dir, trace_name(item->d_name, strlen(item->d_name)) }, file);
        if (lstat(inner, &facts) == 0 && S_ISDIR(facts.st_mode))
            trace_import(inner, file);
    }
    if (listing)
        closedir(listing);
}

/* From now on, with all that is there taken as synced. */
static void trace_start(const char *root)
{
    snprintf(trace_root, sizeof trace_root, "%s", root);
    trace_n_names = trace_n_steps = trace_n_files = trace_now.n = 0;
    trace_failed = -1;
    while (trace_n_changes)
        free(trace_changes[--trace_n_changes].data);
    memset(trace_fds, -1, sizeof trace_fds);
    trace_import(root, 0);
    trace_before = trace_now;
    trace_on = true;
}

static bool trace_compare_entries(const char *path, int dir, const struct trace_tree *tree)
{
    int n = 0;
    bool same = true;
    DIR *listing = opendir(path);
    for (struct dirent *item; listing && (item = readdir(listing));) {
        char inner[512];
        struct stat facts;
        if (!strcmp(item->d_name, ".") || !strcmp(item->d_name, ".."))
            continue;
        snprintf(inner, sizeof inner, "%s/%s", path, item->d_name);
        const int file = trace_find(tree, (struct trace_place){ dir, trace_name(item->d_name, strlen(item->d_name)) });
        same &= file >= 0;
        n++;
        if (lstat(inner, &facts) == 0 && S_ISDIR(facts.st_mode))
            same &= trace_compare_entries(inner, file, tree);
    }
    if (listing)
        closedir(listing);
    for (int i = 0; i < tree->n; i++)
        n -= tree->entries[i].place.dir == dir;
    return same && n == 0;
}

/* Whether these are the names on disk. */
static bool trace_compare(const struct trace_tree *tree) { return trace_compare_entries(trace_root, 0, tree); }

/* ---- Power cuts ---- */

/* At the step that a check looks at: files with data that is not on disk. */
static bool trace_unsynced[TRACE_STEPS + TRACE_ENTRIES];

/* Which of the changes of names a power cut lets through that had not been synced: none, all, one alone, all but one,
 * or the first. */
static bool trace_survives(int choice, int change)
{
    const int which = (choice - 2) / 3;
    if (choice < 2)
        return choice == 1;
    return choice % 3 == 2 ? change == which : choice % 3 == 0 ? change != which : change <= which;
}

/* A rename is on disk with the directory of its new name. */
static int trace_sync(struct trace_tree *disk, const struct trace_step **pending, int n, int dir)
{
    int left = 0;
    for (int i = 0; i < n; i++)
        if ((pending[i]->kind == TRACE_RENAME ? pending[i]->to.dir : pending[i]->place.dir) == dir)
            trace_apply(disk, pending[i]);
        else
            pending[left++] = pending[i];
    return left;
}

/* Every state after each step from `first` on, and subsets that are drawn, with NIB_CAMPAIGN 1,000 of them. Returns what is on disk for certain in the end. */
static inline struct trace_tree
trace_cuts(int first, void (*check)(void *context, const struct trace_tree *tree, int step), void *context)
{
    static const struct trace_step *pending[TRACE_STEPS];
    const int subsets = getenv("NIB_CAMPAIGN") ? 1000 : 4;
    struct trace_tree disk = trace_before, tree;
    int n = 0;
    memset(trace_unsynced, 0, sizeof trace_unsynced);
    for (int i = 0; i < trace_n_steps; i++) {
        const struct trace_step *step = &trace_steps[i];
        if (step->kind == TRACE_SYNC)
            n = trace_sync(&disk, pending, n, step->file);
        else if (step->kind != TRACE_WRITE)
            pending[n++] = step;
        if (step->kind == TRACE_WRITE || step->kind == TRACE_MAKE || step->kind == TRACE_SYNC)
            trace_unsynced[step->file] = step->kind != TRACE_SYNC;
        const int chosen = 2 + 3 * n; /* of up to three changes these are all */
        for (int choice = 0; i >= first && choice < chosen + (n > 3 ? subsets : 0); choice++) {
            tree = disk;
            for (int j = 0; j < n; j++)
                if (choice < chosen ? trace_survives(choice, j) : test_below(2))
                    trace_apply(&tree, pending[j]);
            check(context, &tree, i);
        }
    }
    return disk;
}

static const char *trace_words(int step)
{
    static const char *const kinds[] = { "write", "sync", "create", "create", "remove", "rename" };
    static char text[32 + TRACE_NAME_BYTES];
    const struct trace_step *s = &trace_steps[step];
    const int name = s->kind == TRACE_RENAME ? s->to.name : s->place.name;
    snprintf(text, sizeof text, "step %d, %s %s", step, kinds[s->kind], name < 0 ? "the root" : trace_names[name]);
    return text;
}

/* ---- Calls ---- */

int __real_openat(int at, const char *path, int flags, ...);
int __real_close(int fd);
ssize_t __real_pwrite(int fd, const void *data, size_t bytes, off_t offset);
int __real_ftruncate(int fd, off_t bytes);
int __real_fallocate(int fd, int mode, off_t first, off_t bytes);
int __real_rename(const char *from, const char *to);
int __real_mkdir(const char *path, mode_t mode);
int __real_rmdir(const char *path);
int __real_unlinkat(int at, const char *path, int flags);

static struct trace_place trace_enter(int at, const char *path)
{
    pthread_mutex_lock(&trace_mutex);
    return trace_on ? trace_place(at < 0 ? -1 : trace_fds[at], path) : (struct trace_place){ -1, -1 };
}

static int trace_leave(int result)
{
    pthread_mutex_unlock(&trace_mutex);
    return result;
}

static int trace_open(int at, const char *path, int flags, mode_t mode)
{
    const struct trace_place place = trace_enter(at, path);
    int file = place.dir < 0 ? -1 : trace_find(&trace_now, place);
    const bool makes = place.dir >= 0 && file < 0 && (flags & O_CREAT);
    const int fd = makes && trace_fails(TRACE_MAKE, -1) ? -1 : __real_openat(at, path, flags, mode);
    if (fd >= 0 && makes) {
        file = ++trace_n_files;
        trace_step((struct trace_step){ TRACE_MAKE, file, place, { -1, -1 } });
    }
    if (fd >= 0)
        trace_fds[trace_bounded(fd, TRACE_FDS, "descriptors")] = file;
    return trace_leave(fd);
}

int __wrap_openat(int at, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0;
    va_end(arguments);
    return trace_open(at, path, flags, mode);
}

int __wrap_open(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0;
    va_end(arguments);
    return trace_open(AT_FDCWD, path, flags, mode);
}

int __wrap_close(int fd)
{
    pthread_mutex_lock(&trace_mutex);
    if (fd >= 0 && fd < TRACE_FDS)
        trace_fds[fd] = -1;
    return trace_leave(__real_close(fd));
}

/* One step that changes a file, or syncs it; false: it must fail. */
static bool trace_touch(enum trace_kind kind, int fd, struct trace_change change, const void *data)
{
    pthread_mutex_lock(&trace_mutex);
    const int file = trace_on ? trace_fds[fd] : -1;
    const bool fails = file >= 0 && trace_fails(kind, file);
    struct trace_place place = { -1, -1 };
    for (int i = 0; i < trace_now.n; i++)
        if (trace_now.entries[i].file == file)
            place = trace_now.entries[i].place;
    if (file >= 0 && !fails)
        trace_step((struct trace_step){ kind, file, place, { -1, -1 } });
    change.file = file;
    if (file >= 0 && !fails && kind == TRACE_WRITE && trace_keeps_data)
        trace_keep(change, data);
    pthread_mutex_unlock(&trace_mutex);
    return !fails;
}

ssize_t __wrap_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    const struct trace_change change = { .offset = (size_t)offset, .bytes = bytes };
    return trace_touch(TRACE_WRITE, fd, change, data) ? __real_pwrite(fd, data, bytes, offset) : -1;
}

int __wrap_fallocate(int fd, int mode, off_t first, off_t bytes)
{
    const struct trace_change change = { .offset = (size_t)(first + bytes) };
    return trace_touch(TRACE_WRITE, fd, change, NULL) ? __real_fallocate(fd, mode, first, bytes) : -1;
}

int __wrap_ftruncate(int fd, off_t bytes)
{
    const struct trace_change change = { .offset = (size_t)bytes, .exact = true };
    return trace_touch(TRACE_WRITE, fd, change, NULL) ? __real_ftruncate(fd, bytes) : -1;
}

/* Not passed on: a test has no power cut to fear, and less time. */
int __wrap_fsync(int fd) { return trace_touch(TRACE_SYNC, fd, (struct trace_change){ 0 }, NULL) ? 0 : -1; }

int __wrap_rename(const char *from, const char *to)
{
    const struct trace_place place = trace_enter(-1, from);
    const struct trace_place target = place.dir < 0 ? place : trace_place(-1, to);
    const int file = place.dir < 0 ? -1 : trace_find(&trace_now, place);
    const int result = file >= 0 && trace_fails(TRACE_RENAME, file) ? -1 : __real_rename(from, to);
    if (result == 0 && file >= 0)
        trace_step((struct trace_step){ TRACE_RENAME, file, place, target });
    return trace_leave(result);
}

int __wrap_mkdir(const char *path, mode_t mode)
{
    const struct trace_place place = trace_enter(-1, path);
    const bool makes = place.dir >= 0 && trace_find(&trace_now, place) < 0;
    const int result = makes && trace_fails(TRACE_MKDIR, -1) ? -1 : __real_mkdir(path, mode);
    if (result == 0 && makes)
        trace_step((struct trace_step){ TRACE_MKDIR, ++trace_n_files, place, { -1, -1 } });
    return trace_leave(result);
}

static int trace_unlink(int at, const char *path, int flags)
{
    const struct trace_place place = trace_enter(at, path);
    const int file = place.dir < 0 ? -1 : trace_find(&trace_now, place);
    struct stat facts;
    /* Of a directory that is taken for a file the system says so; that is no step. */
    const bool fits = file >= 0 && fstatat(at, path, &facts, AT_SYMLINK_NOFOLLOW) == 0 &&
                      S_ISDIR(facts.st_mode) == ((flags & AT_REMOVEDIR) != 0);
    const int result = fits && trace_fails(TRACE_UNLINK, file) ? -1 : __real_unlinkat(at, path, flags);
    if (result == 0 && file >= 0)
        trace_step((struct trace_step){ TRACE_UNLINK, file, place, { -1, -1 } });
    return trace_leave(result);
}

int __wrap_unlinkat(int at, const char *path, int flags) { return trace_unlink(at, path, flags); }
int __wrap_unlink(const char *path) { return trace_unlink(AT_FDCWD, path, 0); }
int __wrap_rmdir(const char *path) { return trace_unlink(AT_FDCWD, path, AT_REMOVEDIR); }

#endif
