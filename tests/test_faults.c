/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_faults.c - a system that fails: the n-th call to it fails, is interrupted or does only half, for every n of every
 * kind of output. Then there is the whole output or the old one, or what a run with resume makes the whole one of; an
 * error names a file; and no descriptor stays open. With NIB_CAMPAIGN every n, otherwise fewer of the later ones.
 *
 * NIB_TEST_WRAP_CALLS
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "test_outputs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/file.h>

/* ---- Calls that fail ---- */

enum call { OPEN, CLOSE, READ, WRITE, RESIZE, SYNC, RENAME, MKDIR, REMOVE, FACTS, LIST, LOCK, CALLS };

enum fault { FAILS, FULL, FULL_FROM_HERE, INTERRUPTED, HALF, FAULTS };

static const struct {
    const char *name;
    unsigned calls; /* that it can happen to */
    int error;
} faults[FAULTS] = {
#define IS(call) (1u << (call))
    [FAILS] = { "EIO", (1u << CALLS) - 1, EIO },
    [FULL] = { "ENOSPC", IS(OPEN) | IS(WRITE) | IS(RESIZE) | IS(SYNC) | IS(CLOSE) | IS(RENAME) | IS(MKDIR), ENOSPC },
    [FULL_FROM_HERE] = { "ENOSPC from here on", IS(WRITE) | IS(RESIZE) | IS(SYNC), ENOSPC },
    [INTERRUPTED] = { "EINTR", IS(OPEN) | IS(READ) | IS(WRITE) | IS(RESIZE) | IS(SYNC) | IS(CLOSE) | IS(LOCK), EINTR },
    [HALF] = { "half of it", IS(READ) | IS(WRITE), 0 },
};

enum { MOST_CALLS = 8192 };
static bool counting;
static int n_calls, fault_at = -1; /* the call that the fault happens to */
static enum fault fault;
static uint8_t calls[MOST_CALLS];
static char unsaved[512]; /* the file for writing whose close failed */

/* Counts a call below the test's directory; true: it is to fail. */
static bool happens(enum call call)
{
    if (!counting)
        return false;
    const int n = n_calls++;
    if (n < MOST_CALLS)
        calls[n] = (uint8_t)call;
    const bool now = n == fault_at || (fault == FULL_FROM_HERE && fault_at >= 0 && n > fault_at);
    if (!now || !(faults[fault].calls & IS(call)))
        return false;
    errno = faults[fault].error;
    return true;
}

#define REAL(type, name, ...) type __real_##name(__VA_ARGS__)
REAL(int, openat, int, const char *, int, ...);
REAL(int, close, int);
REAL(ssize_t, pread, int, void *, size_t, off_t);
REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
REAL(int, ftruncate, int, off_t);
REAL(int, fallocate, int, int, off_t, off_t);
REAL(int, rename, const char *, const char *);
REAL(int, mkdir, const char *, mode_t);
REAL(int, rmdir, const char *);
REAL(int, unlinkat, int, const char *, int);
REAL(int, fstat, int, struct stat *);
REAL(int, stat, const char *, struct stat *);
REAL(int, lstat, const char *, struct stat *);
REAL(DIR *, opendir, const char *);
REAL(struct dirent *, readdir, DIR *);
REAL(int, flock, int, int);

/* Another run's, which begins as soon as this one has seen that there is none. */
static int other_lock = -1;
static bool other_begins;

/* Removes the same directories, a moment before; or as soon as this one has seen that they are no files. */
static bool other_removes, other_removes_early;

static void take_lock_between(const char *path)
{
    if (!other_begins)
        return;
    other_begins = false;
    other_lock = __real_openat(AT_FDCWD, path, O_RDWR | O_CREAT | O_EXCL, 0666);
    CHECK(other_lock >= 0 && __real_flock(other_lock, LOCK_EX | LOCK_NB) == 0);
}

static const char *hidden; /* the end of a path that cannot be looked at */

static bool ends_with(const char *path, const char *end)
{
    const size_t n = strlen(path), m = strlen(end);
    return n >= m && !strcmp(path + n - m, end);
}

static int open_with(int at_fd, const char *path, int flags, va_list arguments)
{
    const mode_t mode = flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0;
    if (hidden && ends_with(path, hidden)) {
        errno = EACCES;
        return -1;
    }
    return happens(OPEN) ? -1 : __real_openat(at_fd, path, flags, mode);
}

int __wrap_open(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const int fd = open_with(AT_FDCWD, path, flags, arguments);
    va_end(arguments);
    return fd;
}

int __wrap_openat(int at_fd, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const int fd = open_with(at_fd, path, flags, arguments);
    va_end(arguments);
    return fd;
}

/* Linux closes it whatever it says. */
int __wrap_close(int fd)
{
    const bool fails = happens(CLOSE);
    const int error = errno;
    struct stat facts; /* nobody misses what is in a file without a name, such as a lock that was removed */
    if (fails && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && __real_fstat(fd, &facts) == 0 && facts.st_nlink) {
        char link[32];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        const ssize_t length = readlink(link, unsaved, sizeof unsaved - 1);
        unsaved[length < 0 ? 0 : length] = '\0';
    }
    const int result = __real_close(fd);
    errno = fails ? error : errno;
    return fails ? -1 : result;
}

ssize_t __wrap_pread(int fd, void *to, size_t bytes, off_t offset)
{
    const bool here = happens(READ);
    if (here && fault == HALF)
        return __real_pread(fd, to, (bytes + 1) / 2, offset);
    return here ? -1 : __real_pread(fd, to, bytes, offset);
}

ssize_t __wrap_pwrite(int fd, const void *from, size_t bytes, off_t offset)
{
    const bool here = happens(WRITE);
    if (here && fault == HALF)
        return __real_pwrite(fd, from, (bytes + 1) / 2, offset);
    return here ? -1 : __real_pwrite(fd, from, bytes, offset);
}

/* A sync is not passed on: a test has no power cut to fear, and less time. */
int __wrap_fsync(int fd) { return (void)fd, happens(SYNC) ? -1 : 0; }
int __wrap_fallocate(int fd, int mode, off_t first, off_t bytes)
{
    return happens(RESIZE) ? -1 : __real_fallocate(fd, mode, first, bytes);
}
int __wrap_ftruncate(int fd, off_t bytes) { return happens(RESIZE) ? -1 : __real_ftruncate(fd, bytes); }
int __wrap_rename(const char *from, const char *to) { return happens(RENAME) ? -1 : __real_rename(from, to); }
int __wrap_mkdir(const char *path, mode_t mode) { return happens(MKDIR) ? -1 : __real_mkdir(path, mode); }
int __wrap_rmdir(const char *path)
{
    if (other_removes)
        (void)__real_rmdir(path);
    other_removes = false;
    return happens(REMOVE) ? -1 : __real_rmdir(path);
}
int __wrap_unlink(const char *path) { return happens(REMOVE) ? -1 : __real_unlinkat(AT_FDCWD, path, 0); }
int __wrap_fstat(int fd, struct stat *out) { return happens(FACTS) ? -1 : __real_fstat(fd, out); }
int __wrap_stat(const char *path, struct stat *out) { return happens(FACTS) ? -1 : __real_stat(path, out); }
int __wrap_lstat(const char *path, struct stat *out)
{
    const bool fails = hidden && ends_with(path, hidden);
    const int result = fails ? -1 : __real_lstat(path, out), error = fails ? EACCES : errno;
    if (result < 0 && ends_with(path, "/lock"))
        take_lock_between(path);
    errno = error;
    return result;
}
DIR *__wrap_opendir(const char *path) { return happens(LIST) ? NULL : __real_opendir(path); }
struct dirent *__wrap_readdir(DIR *listing) { return happens(LIST) ? NULL : __real_readdir(listing); }
int __wrap_flock(int fd, int operation) { return happens(LOCK) ? -1 : __real_flock(fd, operation); }

int __wrap_unlinkat(int at_fd, const char *path, int flags)
{
    if (other_removes && flags & AT_REMOVEDIR)
        (void)__real_unlinkat(at_fd, path, flags);
    const int result = happens(REMOVE) ? -1 : __real_unlinkat(at_fd, path, flags), error = errno;
    if (other_removes_early && result < 0 && error == EISDIR)
        (void)__real_unlinkat(at_fd, path, AT_REMOVEDIR);
    errno = error;
    return result;
}

/* ---- What is there ---- */

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001B3;
    return hash;
}

/* Names and bytes below a path, whatever their order; 0: there is nothing. */
static uint64_t state_of(const char *path, int *partial)
{
    struct stat facts;
    if (stat(path, &facts) != 0)
        return 0;
    const char *slash = strrchr(path, '/');
    uint64_t sum = hash_bytes(0xCBF29CE484222325, slash, strlen(slash));
    if (!S_ISDIR(facts.st_mode)) {
        size_t count;
        char *bytes = get_file(path, &count);
        sum = hash_bytes(sum, bytes, count);
        free(bytes);
        return sum;
    }
    DIR *listing = opendir(path);
    for (struct dirent *item; listing && (item = readdir(listing));) {
        char inner[512];
        if (!strcmp(item->d_name, ".") || !strcmp(item->d_name, ".."))
            continue;
        *partial += !strncmp(item->d_name, ".nib-", 5);
        snprintf(inner, sizeof inner, "%s/%s", path, item->d_name);
        sum += state_of(inner, partial) * 31;
    }
    closedir(listing);
    return sum;
}

/* Of an output; *partial: what else is left of a run. */
static uint64_t output_state(const char *out, int *partial)
{
    char beside[64];
    struct stat facts;
    *partial = 0;
    snprintf(beside, sizeof beside, "%s.nib-partial", out);
    const uint64_t state = state_of(at(out), partial);
    *partial += stat(at(beside), &facts) == 0;
    return state;
}

/* ---- Runs ---- */

static const nib_run_options force = { .bytes = sizeof force, .force = 1 },
                             resume = { .bytes = sizeof resume, .force = 1, .resume = 1 };

/* With a fault at call n; -1: without. */
static void begin_faults(int n, enum fault what)
{
    fault_at = n;
    fault = what;
    n_calls = 0;
    *unsaved = '\0';
    counting = true;
}

static void end_faults(void)
{
    counting = false;
    fault_at = -1;
}

static nib_status run_with(enum kind kind, bool other, const nib_run_options *options, int n, enum fault what)
{
    begin_faults(n, what);
    const nib_status status = make(kind, other, outputs[kind].out, options);
    end_faults();
    return status;
}

enum before { NOTHING, OLD, STOPPED };

/* STOPPED: in the middle of another run of the same kind. */
static void start_from(enum kind kind, enum before before, int stop)
{
    clear(outputs[kind].out);
    if (before == OLD)
        CHECK_OK(make(kind, true, outputs[kind].out, NULL));
    if (before == STOPPED)
        CHECK(run_with(kind, false, NULL, stop, FAILS) != NIB_OK);
}

static void check_fault(enum kind kind, enum before before, int stop, int n, enum fault what, uint64_t whole)
{
    static const char *const names[CALLS] = { "open",   "close", "read",   "write", "resize", "sync",
                                              "rename", "mkdir", "remove", "stat",  "list",   "lock" };
    char where[128];
    int partial, left;
    snprintf(where, sizeof where, "%s over %s: call %d, %s, %s", outputs[kind].what,
             before == NOTHING ? "nothing"
             : before == OLD   ? "another"
                               : "a stopped run",
             n, names[calls[n]], faults[what].name);
    start_from(kind, before, stop);
    const uint64_t old = output_state(outputs[kind].out, &left);
    const int open_before = entries("/proc/self/fd");
    const nib_status status = run_with(kind, false, before == STOPPED ? &resume : &force, n, what);
    CHECK_THAT(entries("/proc/self/fd") == open_before, "%s: a descriptor stays open", where);
    const uint64_t state = output_state(outputs[kind].out, &partial);
    if (!status) {
        CHECK_THAT(!*unsaved, "%s: what is written to %s may be lost, and nobody hears of it", where, unsaved);
        CHECK_THAT(state == whole && !partial, "%s: it says that all is well, and it is not", where);
        return;
    }
    /* Where a stat fails a name may be taken for one that is not there, or no directory's. */
    CHECK_THAT((status == NIB_ERR_IO || calls[n] == FACTS) && strstr(nib_last_error(), directory), "%s: %s: %s", where,
               nib_status_name(status), nib_last_error());
    CHECK_THAT(what != HALF && !(what == INTERRUPTED && (IS(calls[n]) & (IS(READ) | IS(WRITE)))),
               "%s: what can be tried again is: %s", where, nib_last_error());
    CHECK_THAT(state == whole || state == old || partial, "%s: neither the old output nor the new one", where);
    CHECK_THAT(make(kind, false, outputs[kind].out, &resume) == NIB_OK, "%s: then: %s", where, nib_last_error());
    CHECK_THAT(output_state(outputs[kind].out, &partial) == whole && !partial, "%s: then another output", where);
}

static void run_faults(enum kind kind, enum before before)
{
    static uint8_t usual[MOST_CALLS];
    const bool all = getenv("NIB_CAMPAIGN") != NULL;
    int partial;
    output_threads = 1;
    make_sources();
    start_from(kind, NOTHING, 0);
    CHECK_OK(run_with(kind, false, &force, -1, FAILS));
    int stop = n_calls - 1; /* at the last write: most of it is there */
    while (stop > 0 && calls[stop] != WRITE)
        stop--;
    const uint64_t whole = output_state(outputs[kind].out, &partial);
    CHECK(whole && !partial);
    start_from(kind, before, stop);
    CHECK_OK(run_with(kind, false, before == STOPPED ? &resume : &force, -1, FAILS));
    const int n = n_calls;
    CHECK_THAT(n < MOST_CALLS, "%d calls", n);
    CHECK_THAT(output_state(outputs[kind].out, &partial) == whole && !partial, "%s: another output",
               outputs[kind].what);
    memcpy(usual, calls, sizeof usual);
    for (enum fault what = 0; what < FAULTS; what++)
        for (int i = 0; i < n; i += all ? 1 : 1 + i / 8)
            if (faults[what].calls & IS(usual[i])) {
                memcpy(calls, usual, sizeof usual);
                check_fault(kind, before, stop, i, what, whole);
            }
}

TEST(faults_of_writers)
{
    for (enum kind kind = WRITER; kind <= GGUF_WRITER; kind++)
        run_faults(kind, OLD);
}

TEST(faults_over_nothing)
{
    for (enum kind kind = FILE_TO_FILE; kind < KINDS; kind++)
        run_faults(kind, NOTHING);
}

TEST(faults_over_another_output)
{
    run_faults(FILE_TO_FILE, OLD);
    run_faults(SHARDS, OLD);
    run_faults(REPAIR, OLD);
    run_faults(MIXED, OLD);
}

TEST(faults_of_resuming)
{
    run_faults(FILE_TO_FILE, STOPPED);
    run_faults(SHARDS, STOPPED);
    run_faults(GGUF, STOPPED);
}

/* Codes are read for their scale first, and again to be written. */
TEST(faults_of_reading_mxfp4)
{
    static uint8_t usual[MOST_CALLS], blocks[2][ROWS][2][16], scales[2][ROWS][2];
    const struct item items[] = { { "m.experts.gate_up_proj_blocks", NIB_U8, 4, { 2, ROWS, 2, 16 }, blocks },
                                  { "m.experts.gate_up_proj_scales", NIB_U8, 3, { 2, ROWS, 2 }, scales } };
    memset(blocks, 0x5B, sizeof blocks);
    memset(scales, 125, sizeof scales);
    CHECK(mkdir(at("mx"), 0777) == 0);
    put_tensors("mx/model.safetensors", items, 2);
    put_text(at("mx/config.json"), "{\"model_type\": \"gpt_oss\", \"hidden_size\": 64, \"intermediate_size\": 16}");
    nib_checkpoint *in = open_good(at("mx"));
    nib_plan *plan = NULL;
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    CHECK_OK(nib_plan_quantize(in, NULL, &plan));
    begin_faults(-1, FAILS);
    CHECK_OK(nib_plan_run(plan, at("nv"), &force, &job));
    end_faults();
    const int n = n_calls;
    memcpy(usual, calls, sizeof usual);
    for (int i = 0; i < n; i++)
        if (usual[i] == READ) {
            clear("nv");
            begin_faults(i, FAILS);
            const nib_status status = nib_plan_run(plan, at("nv"), &force, &job);
            end_faults();
            CHECK_THAT(status == NIB_ERR_IO, "call %d: %s", i, nib_status_name(status));
        }
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

TEST(a_lock_that_is_taken_meanwhile_stays)
{
    struct stat facts, named;
    make_sources();
    for (int forced = 0; forced < 2; forced++) {
        clear(outputs[SHARDS].out);
        other_begins = true;
        const nib_status status = make(SHARDS, false, outputs[SHARDS].out, forced ? &force : NULL);
        CHECK_FAILS(status, NIB_ERR_MODE, "another run is writing here");
        char path[64];
        snprintf(path, sizeof path, "%s/.nib-partial/lock", outputs[SHARDS].out);
        CHECK(fstat(other_lock, &facts) == 0 && stat(at(path), &named) == 0 && facts.st_ino == named.st_ino);
        /* Nor is what a run at work has made what a stopped one left. */
        CHECK_FAILS(make(SHARDS, false, outputs[SHARDS].out, NULL), NIB_ERR_MODE, "another run is writing here");
        CHECK(close(other_lock) == 0);
        CHECK_FAILS(run_with(SHARDS, false, NULL, -1, FAILS), NIB_ERR_MODE, "a run was stopped here");
        const uint8_t *const lock = memchr(calls, LOCK, (size_t)n_calls);
        CHECK(lock != NULL);
        CHECK_FAILS(run_with(SHARDS, false, NULL, (int)(lock - calls), FAILS), NIB_ERR_IO, "cannot lock");
        /* Without a lock no descriptor is closed: the first one is somebody else's. */
        CHECK(dup2(STDOUT_FILENO, STDIN_FILENO) == STDIN_FILENO && unlink(at(path)) == 0);
        CHECK_FAILS(make(SHARDS, false, outputs[SHARDS].out, NULL), NIB_ERR_MODE, "a run was stopped here");
        CHECK(fcntl(STDIN_FILENO, F_GETFD) >= 0);
    }
}

TEST(what_cannot_be_looked_at_is_not_absent)
{
    static const char *const names[] = { "/config.json", "/hf_quant_config.json", "/model.safetensors.index.json" };
    nib_checkpoint *in = NULL;
    make_sources();
    CHECK(mkdir(at("hidden"), 0777) == 0);
    put_tensors("hidden/model.safetensors", (const struct item[]){ { "m.weight", NIB_U8, 1, { 4 }, "abcd" } }, 1);
    put_text(at("hidden/model.safetensors.index.json"), "{\"weight_map\": {\"m.weight\": \"model.safetensors\"}}");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        hidden = names[i];
        const nib_status status = nib_checkpoint_open(at("hidden"), &in);
        hidden = NULL;
        CHECK_FAILS(status, NIB_ERR_IO, "Permission denied");
        CHECK_THAT(strstr(nib_last_error(), names[i]), "%s: %s", names[i], nib_last_error());
    }
    CHECK_OK(nib_checkpoint_open(at("hidden"), &in));
    nib_checkpoint_close(in);
}

TEST(a_directory_that_goes_meanwhile_is_removed)
{
    for (int i = 0; i < 3; i++) {
        CHECK(mkdir(at("going"), 0777) == 0 && mkdir(at("going/inner"), 0777) == 0);
        if (i == 1)
            put_text(at("going/inner/file"), "");
        other_removes = true;
        other_removes_early = i == 2;
        CHECK_OK(nib_os_remove_directory(at("going")));
        CHECK(!nib_os_exists(at("going")));
    }
    other_removes_early = false;
}

TEST(what_stays_in_a_directory_is_told)
{
    int first = 0;
    for (int round = 0; round < 2; round++) {
        CHECK(mkdir(at("kept"), 0777) == 0);
        put_text(at("kept/file"), "");
        begin_faults(round ? first : -1, FAILS);
        const nib_status status = nib_os_remove_directory(at("kept"));
        end_faults();
        if (round)
            CHECK_FAILS(status, NIB_ERR_IO, "kept: cannot remove what is in it");
        else
            CHECK_OK(status);
        while (first < n_calls && calls[first] != REMOVE)
            first++;
    }
}

TEST_MAIN
