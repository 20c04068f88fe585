/* SPDX-License-Identifier: Apache-2.0 */
/*
 * os.c - Linux on x86-64 and aarch64.
 */
#define _GNU_SOURCE /* flock, sync_file_range */
#include "base/os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

/* ---- Floating-point environment ---- */

#if defined(__x86_64__)

/* MXCSR: all exceptions masked, nearest, neither FTZ (bit 15) nor DAZ (bit 6). */
enum { DEFAULT_MXCSR = 0x1F80 };

nib_fpenv nib_fpenv_enter(void)
{
    const nib_fpenv saved = _mm_getcsr();
    _mm_setcsr(DEFAULT_MXCSR);
    return saved;
}

void nib_fpenv_leave(nib_fpenv saved) { _mm_setcsr((unsigned)saved); }

#elif defined(__aarch64__)

/* FPCR 0: nearest, no flush to zero, no default NaN, no traps. */
nib_fpenv nib_fpenv_enter(void)
{
    nib_fpenv saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((nib_fpenv)0));
    return saved;
}

void nib_fpenv_leave(nib_fpenv saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved)); }

#else
#error "nib knows the floating-point control of x86-64 and aarch64 only"
#endif

/* ---- What the system lets a processor do ---- */

#if defined(__x86_64__)

static bool amx_allowed;

static void ask_for_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, of asm/prctl.h since Linux 5.16 */
    amx_allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

bool nib_os_allow_amx(void)
{
    static pthread_once_t asked = PTHREAD_ONCE_INIT;
    (void)pthread_once(&asked, ask_for_amx);
    return amx_allowed;
}

#elif defined(__aarch64__)

bool nib_os_has_sdot(void)
{
    enum { DOT_PRODUCTS = 1 << 20 }; /* HWCAP_ASIMDDP */
    return getauxval(AT_HWCAP) & DOT_PRODUCTS;
}

#endif

/* ---- Threads and fork ---- */

static atomic_bool forked;

static void note_fork(void) { atomic_store(&forked, true); }

/* At load time, because the application may have started OpenMP's pool before it first calls us. */
__attribute__((constructor)) static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, note_fork); }

bool nib_threads_usable(void) { return !atomic_load(&forked); }

void nib_os_yield(void) { (void)sched_yield(); }

/* The largest stack that the environment asks OpenMP to give a thread, in KiB unless it says otherwise; 0: none. */
static size_t openmp_stack(void)
{
    static const char *const names[] = { "OMP_STACKSIZE", "GOMP_STACKSIZE", "KMP_STACKSIZE" };
    size_t most = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        static const char units[] = "bkmgt";
        const char *const text = getenv(names[i]);
        char *end = NULL;
        const unsigned long long number = text ? strtoull(text, &end, 10) : 0;
        while (end && (*end == ' ' || *end == '\t'))
            end++;
        const char *const unit = end && *end ? strchr(units, *end | 0x20) : NULL;
        const int shift = unit ? 10 * (int)(unit - units) : 10;
        if (number <= SIZE_MAX >> shift && (size_t)number << shift > most)
            most = (size_t)number << shift;
    }
    return most;
}

struct chain {
    int started, wanted;
    pthread_attr_t attributes;
};

/* Each starts the next one and waits for its end: then all are there at a time, and no list of them is needed. */
static void *start_next(void *context)
{
    struct chain *chain = context;
    pthread_t next;
    if (++chain->started < chain->wanted && !pthread_create(&next, &chain->attributes, start_next, chain))
        pthread_join(next, NULL);
    return NULL;
}

int nib_os_start_threads(int threads)
{
    struct chain chain = { .wanted = threads };
    if (pthread_attr_init(&chain.attributes))
        return 1;
    (void)pthread_attr_setstacksize(&chain.attributes, openmp_stack()); /* too small a one changes nothing */
    (void)start_next(&chain);
    (void)pthread_attr_destroy(&chain.attributes);
    return chain.started;
}

/* ---- Files ---- */

/* strerror_r returns the text with glibc's own declarations, and a number with those of POSIX (musl). */
static const char *text_of_string(const char *text, const char *buffer) { return text ? text : buffer; }
static const char *text_of_number(int failed, const char *buffer) { return failed ? "an unknown error" : buffer; }
#define TEXT_OF(result, buffer) _Generic((result), int : text_of_number, default : text_of_string)(result, buffer)

static nib_status io_error(const char *path, const char *what)
{
    char buffer[128] = "";
    const char *reason = TEXT_OF(strerror_r(errno, buffer, sizeof buffer), buffer);
    (void)text_of_string, (void)text_of_number; /* one of them is not used */
    return nib_fail(NIB_ERR_IO, "%s: %s: %s", path, what, reason);
}

nib_status nib_os_open_read(const char *path, int *fd, uint64_t *bytes)
{
    const int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang us */
    if (opened < 0)
        return io_error(path, "cannot open");
    struct stat facts;
    if (fstat(opened, &facts) < 0) {
        nib_status status = io_error(path, "cannot stat");
        close(opened);
        return status;
    }
    if (!S_ISREG(facts.st_mode)) {
        close(opened);
        return nib_fail(NIB_ERR_IO, "%s: not a regular file", path);
    }
    *fd = opened;
    *bytes = (uint64_t)facts.st_size;
    return NIB_OK;
}

nib_status nib_os_read_at(int fd, const char *path, uint64_t offset, void *out, size_t bytes)
{
    if (offset > (uint64_t)INT64_MAX - bytes)
        return nib_fail(NIB_ERR_IO, "%s: offset %llu is beyond any file", path, (unsigned long long)offset);
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = pread(fd, (char *)out + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return io_error(path, "cannot read");
        if (got == 0)
            return nib_fail(NIB_ERR_IO, "%s: ends at byte %llu although it was longer when opened", path,
                            (unsigned long long)(offset + done));
        done += (size_t)got;
    }
    return NIB_OK;
}

/* The name may be as long as the system takes: then only its beginning is in the temporary one, up to where a character
 * of UTF-8 begins, as some file systems take no others. */
static size_t shortened(const char *path)
{
    enum { SHORT = 64 };
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t n = strlen(name);
    if (n > SHORT)
        for (n = SHORT; n > 0 && ((unsigned char)name[n] & 0xC0) == 0x80;)
            n--;
    return (size_t)(name - path) + n;
}

nib_status nib_os_create_temporary(const char *path, int *fd, char **temporary)
{
    static atomic_uint counter;
    size_t kept = strlen(path);
    const size_t bytes = kept + 48;
    char *name = nib_alloc(bytes);
    if (!name)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for a temporary name", path);
    for (;;) {
        snprintf(name, bytes, "%.*s.tmp-%ld-%u", (int)kept, path, (long)getpid(), atomic_fetch_add(&counter, 1));
        *fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (*fd >= 0)
            break;
        if (errno == ENAMETOOLONG && shortened(path) < kept) {
            kept = shortened(path);
        } else if (errno != EEXIST) { /* left over by a killed process of the same id: take the next name */
            nib_status status = io_error(path, "cannot create a temporary file beside it");
            nib_free(name);
            return status;
        }
    }
    *temporary = name;
    return NIB_OK;
}

nib_status nib_os_write_at(int fd, const char *path, uint64_t offset, const void *data, size_t bytes)
{
    if (offset > (uint64_t)INT64_MAX - bytes)
        return nib_fail(NIB_ERR_IO, "%s: offset %llu is beyond any file", path, (unsigned long long)offset);
    for (size_t done = 0; done < bytes;) {
        const ssize_t put = pwrite(fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return io_error(path, "cannot write");
        if (put == 0)
            return nib_fail(NIB_ERR_IO, "%s: the system writes no more bytes", path);
        done += (size_t)put;
    }
    return NIB_OK;
}

/* Whole pages: one that is shared with a neighbor would be written twice. */
void nib_os_start_writing(int fd, uint64_t offset, size_t bytes)
{
    enum { PAGE = 4096, WORTH = 64 << 10 };
    const uint64_t begin = (offset + PAGE - 1) / PAGE * PAGE, end = (offset + bytes) / PAGE * PAGE;
    if (bytes >= WORTH)
        (void)sync_file_range(fd, (off_t)begin, (off_t)(end - begin), SYNC_FILE_RANGE_WRITE);
}

/* The directory that holds a name, opened so that it can be synced: a rename lasts only once the directory is on disk. */
static nib_status open_directory(const char *path, int *fd)
{
    const char *slash = strrchr(path, '/');
    const size_t bytes = slash ? (size_t)(slash - path) + 1 : 1; /* "/" keeps its slash */
    char *directory = nib_alloc(bytes + 1);
    if (!directory)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for the name of its directory", path);
    memcpy(directory, slash ? path : ".", bytes);
    directory[bytes] = '\0';
    *fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const nib_status status = *fd < 0 ? io_error(directory, "cannot open the directory") : NIB_OK;
    nib_free(directory);
    return status;
}

/* Closes it, synced or not. Some file systems cannot sync a directory and report EINVAL: no more can be done for their
 * renames. */
static nib_status sync_directory(int fd, const char *path, const char *what)
{
    const nib_status status = fsync(fd) < 0 && errno != EINVAL ? io_error(path, what) : NIB_OK;
    close(fd);
    return status;
}

nib_status nib_os_complete(int fd, const char *temporary, const char *path)
{
    const nib_status status = fsync(fd) < 0 ? io_error(path, "cannot sync") : NIB_OK;
    if (close(fd) < 0 && !status)
        return io_error(path, "cannot close");
    if (!status && rename(temporary, path) < 0)
        return io_error(path, "cannot rename the finished file to this name");
    return status;
}

/* All that can fail comes before the rename, but for the directory's own sync: after that the new file is there whole, and
 * only a crash of the machine could still bring back the old state. */
nib_status nib_os_publish(int fd, const char *temporary, const char *path)
{
    int directory = -1;
    nib_status status = open_directory(path, &directory);
    if (status)
        nib_os_close(fd);
    else
        status = nib_os_complete(fd, temporary, path);
    if (!status)
        return sync_directory(directory, path, "is complete, but its directory cannot be synced");
    nib_os_close(directory);
    return status;
}

/* Blocks that are set aside save the system work at every write. A file system that cannot do this, as each says in its
 * own way, finds them as it goes. */
nib_status nib_os_allocate(int fd, const char *path, uint64_t bytes)
{
    if (bytes > (uint64_t)INT64_MAX)
        return nib_fail(NIB_ERR_IO, "%s: %llu bytes are more than any file has", path, (unsigned long long)bytes);
    if (!fallocate(fd, 0, 0, (off_t)bytes))
        return NIB_OK;
    if (errno == ENOSPC || errno == EDQUOT || errno == EIO)
        return io_error(path, "cannot set room for it aside");
    return ftruncate(fd, (off_t)bytes) < 0 ? io_error(path, "cannot set its size") : NIB_OK;
}

nib_status nib_os_identity(const char *path, struct nib_os_identity *out)
{
    struct stat facts;
    if (stat(path, &facts) < 0)
        return io_error(path, "cannot stat");
    *out = (struct nib_os_identity){ .bytes = (uint64_t)facts.st_size,
                                     .device = (uint64_t)facts.st_dev,
                                     .inode = (uint64_t)facts.st_ino,
                                     .seconds = facts.st_mtim.tv_sec,
                                     .nanoseconds = facts.st_mtim.tv_nsec };
    return NIB_OK;
}

/* A record lock would go when any descriptor of the file is closed; flock's goes with this one. Whoever had the lock
 * may have removed the file meanwhile: a lock on a file without a name excludes no other process. A link is not
 * followed: what it names would be created. */
nib_status nib_os_lock(const char *path, int *fd, bool *busy)
{
    *busy = false;
    for (;;) {
        const int opened = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (opened < 0)
            return io_error(path, "cannot create");
        struct stat mine, named;
        /* File systems without locks must do without. */
        if (flock(opened, LOCK_EX | LOCK_NB) < 0 && errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP) {
            *busy = errno == EWOULDBLOCK;
            const nib_status status = *busy ? NIB_OK : io_error(path, "cannot lock");
            close(opened);
            return status;
        }
        if (fstat(opened, &mine) == 0 && lstat(path, &named) == 0 && mine.st_ino == named.st_ino) {
            *fd = opened;
            return NIB_OK;
        }
        close(opened);
    }
}

void nib_os_close(int fd)
{
    if (fd >= 0)
        close(fd);
}

void nib_os_remove(const char *path) { (void)unlink(path); }

nib_status nib_os_remove_file(const char *path)
{
    return unlink(path) == 0 || errno == ENOENT ? NIB_OK : io_error(path, "cannot remove");
}

/* ---- Directories ---- */

bool nib_os_is_directory(const char *path)
{
    struct stat facts;
    return stat(path, &facts) == 0 && S_ISDIR(facts.st_mode);
}

bool nib_os_is_special(const char *path)
{
    struct stat facts;
    return stat(path, &facts) == 0 && !S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode);
}

bool nib_os_exists(const char *path)
{
    struct stat facts;
    return lstat(path, &facts) == 0;
}

bool nib_os_is_absent(const char *path)
{
    struct stat facts;
    return lstat(path, &facts) < 0 && (errno == ENOENT || errno == ENOTDIR);
}

enum nib_os_kind nib_os_kind_of(const char *path)
{
    struct stat facts;
    if (lstat(path, &facts) < 0)
        return NIB_OS_NOTHING;
    return S_ISREG(facts.st_mode) ? NIB_OS_FILE : S_ISDIR(facts.st_mode) ? NIB_OS_DIRECTORY : NIB_OS_OTHER;
}

bool nib_os_is_own_directory(const char *path)
{
    struct stat facts;
    return lstat(path, &facts) == 0 && S_ISDIR(facts.st_mode);
}

bool nib_os_is_own_file(const char *path)
{
    struct stat facts;
    return lstat(path, &facts) == 0 && S_ISREG(facts.st_mode);
}

/* Synced in its parent even if it was there: whoever made it may have been killed before the sync. But then the parent
 * may be one that we cannot open. */
nib_status nib_os_make_directory(const char *path, bool *made)
{
    const bool is_new = mkdir(path, 0777) == 0;
    int parent;
    if (made)
        *made = is_new;
    if (!is_new && (errno != EEXIST || !nib_os_is_directory(path)))
        return io_error(path, "cannot make this directory");
    const nib_status status = open_directory(path, &parent);
    if (status)
        return is_new ? status : NIB_OK;
    return sync_directory(parent, path, "cannot sync its directory");
}

nib_status nib_os_list(const char *path, nib_status (*each)(void *context, const char *name), void *context)
{
    DIR *directory = opendir(path);
    if (!directory)
        return io_error(path, "cannot open the directory");
    nib_status status = NIB_OK;
    while (!status) {
        errno = 0;
        const struct dirent *entry = readdir(directory);
        if (!entry) {
            status = errno ? io_error(path, "cannot read the directory") : NIB_OK;
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = each(context, entry->d_name);
    }
    closedir(directory);
    return status;
}

/* What is in a directory is removed by its descriptor, so that no memory for names is needed: this must not fail halfway.
 * It recurses once per level of directories, which only this process has made. */
static nib_status remove_entries(int fd, const char *path)
{
    DIR *directory = fdopendir(fd);
    if (!directory) {
        const nib_status status = io_error(path, "cannot read the directory");
        close(fd);
        return status;
    }
    nib_status status = NIB_OK;
    for (const struct dirent *entry; !status && (entry = readdir(directory));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
            unlinkat(dirfd(directory), entry->d_name, 0) == 0 || errno == ENOENT)
            continue;
        const int inner = openat(dirfd(directory), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (inner < 0 && errno == ENOENT)
            continue;
        if (inner < 0)
            status = io_error(path, "cannot remove what is in it");
        else
            status = remove_entries(inner, path);
        if (!status && unlinkat(dirfd(directory), entry->d_name, AT_REMOVEDIR) < 0 && errno != ENOENT)
            status = io_error(path, "cannot remove what is in it");
    }
    closedir(directory);
    return status;
}

nib_status nib_os_remove_any(const char *path)
{
    return nib_os_is_own_directory(path) ? nib_os_remove_directory(path) : nib_os_remove_file(path);
}

nib_status nib_os_remove_directory(const char *path)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? NIB_OK : io_error(path, "cannot open the directory");
    TRY(remove_entries(fd, path));
    return rmdir(path) < 0 && errno != ENOENT ? io_error(path, "cannot remove this directory") : NIB_OK;
}

void nib_os_remove_empty_directory(const char *path) { (void)rmdir(path); }

nib_status nib_os_rename(const char *from, const char *to)
{
    return rename(from, to) < 0 ? io_error(to, "cannot rename the finished file to this name") : NIB_OK;
}

nib_status nib_os_sync_directory(const char *path)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? io_error(path, "cannot open the directory") : sync_directory(fd, path, "cannot sync the directory");
}

nib_status nib_os_sync_parent(const char *path)
{
    int fd;
    TRY(open_directory(path, &fd));
    return sync_directory(fd, path, "cannot sync its directory");
}

nib_status nib_os_real_path(const char *path, char **out)
{
    char *real = realpath(path, NULL), *parent = NULL;
    const char *rest = "";
    size_t length = strlen(path);
    if (!real && errno == ENOENT) {
        while (length > 1 && path[length - 1] == '/')
            length--;
        size_t slash = length;
        while (slash > 0 && path[slash - 1] != '/')
            slash--;
        parent = nib_alloc(slash + 2);
        if (!parent)
            return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its name", path);
        memcpy(parent, slash ? path : ".", slash ? slash : 1);
        parent[slash ? slash : 1] = '\0';
        real = realpath(parent, NULL);
        rest = path + slash;
        length -= slash;
    }
    if (!real) {
        const nib_status status = io_error(path, "there is no such place");
        nib_free(parent);
        return status;
    }
    const size_t bytes = strlen(real) + length + 2;
    char *copy = nib_alloc(bytes);
    if (copy)
        snprintf(copy, bytes, "%s%s%.*s", real, *rest && strcmp(real, "/") != 0 ? "/" : "", (int)(*rest ? length : 0),
                 rest);
    nib_free(parent);
    free(real);
    if (!copy)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its name", path);
    *out = copy;
    return NIB_OK;
}

uint64_t nib_os_free_bytes(const char *directory)
{
    struct statvfs facts;
    uint64_t bytes;
    if (statvfs(directory, &facts) < 0 || facts.f_blocks == 0 ||
        __builtin_mul_overflow((uint64_t)facts.f_bavail, (uint64_t)facts.f_frsize, &bytes))
        return UINT64_MAX;
    return bytes;
}

int nib_os_processors(void)
{
    const long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count < 1 ? 1 : count > 1024 ? 1024 : (int)count;
}
