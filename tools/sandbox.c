/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sandbox.c - Landlock and seccomp by their system calls: the headers of a distribution know fewer versions than the
 * kernels it runs on, and the filter is a list of calls, for which libseccomp would be one more dependency.
 *
 * The filter rejects what nib never does instead of allowing what it does: libc, OpenMP and the allocator may call
 * anything else tomorrow.
 */
#define _GNU_SOURCE
#include "sandbox.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *sandbox_waived;

static char state[512];

static bool say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What sandbox_state gives. False, for callers that end with it. */
static bool say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(state, sizeof state, format, arguments);
    va_end(arguments);
    return false;
}

#if defined(__linux__)

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

/* ---- Landlock ---- */

/* linux/landlock.h of ABI 6; the numbers of the calls are the same on every processor. */
enum { CREATE_RULESET = 444, ADD_RULE = 445, RESTRICT_SELF = 446 };
enum { ASK_VERSION = 1, PATH_BENEATH = 1 };
struct ruleset {
    uint64_t fs, net, scoped;
};
struct __attribute__((packed)) beneath {
    uint64_t access;
    int32_t fd;
};

enum {
    EXECUTE = 1 << 0,
    WRITE_FILE = 1 << 1,
    READ_FILE = 1 << 2,
    READ_DIR = 1 << 3,
    REMOVE_DIR = 1 << 4,
    REMOVE_FILE = 1 << 5,
    MAKE_DIR = 1 << 7,
    MAKE_REG = 1 << 8,
    FIRST_OF_ALL = (1 << 13) - 1, /* the above, and devices, sockets, FIFOs and links to make */
    REFER = 1 << 13,              /* rename between directories */
    TRUNCATE = 1 << 14,
    IOCTL_DEV = 1 << 15,
    BIND_TCP = 1 << 0,
    CONNECT_TCP = 1 << 1,
    ABSTRACT_SOCKETS = 1 << 0,
    SIGNALS = 1 << 1,

    OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV, /* the others mean nothing for a file */
    READ = READ_FILE | READ_DIR,
    WRITE = READ | WRITE_FILE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER
};

/* What each ABI of Landlock added. Whatever is named here is denied but for the rules. */
static const struct ruleset added[] = {
    { .fs = FIRST_OF_ALL },                   /* 1: Linux 5.13 */
    { .fs = REFER },                          /* 2: 5.19 */
    { .fs = TRUNCATE },                       /* 3: 6.2 */
    { .net = BIND_TCP | CONNECT_TCP },        /* 4: 6.7 */
    { .fs = IOCTL_DEV },                      /* 5: 6.10 */
    { .scoped = ABSTRACT_SOCKETS | SIGNALS }, /* 6: 6.12 */
};

enum { ABIS = sizeof added / sizeof *added, ABI_TO_RENAME = 2 };

/* Read by libc, OpenMP and jansson: how many processors, how much memory, where randomness is. */
static const char *const system_files[] = {
    "/dev/null",     "/dev/urandom",  "/sys/devices/system/cpu",       "/proc/stat",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/sys/vm/overcommit_memory"
};

/* LLVM's OpenMP says in shared memory that it is there, and takes that back at the end; without, it aborts. */
extern void __kmpc_fork_call(void) __attribute__((weak));
enum { IN_SHARED_MEMORY = READ_FILE | WRITE_FILE | TRUNCATE | MAKE_REG | REMOVE_FILE };

struct rules {
    int set;
    uint64_t handled; /* of files */
};

static int landlock_version(void) { return (int)syscall(CREATE_RULESET, NULL, 0, ASK_VERSION); }

/* A path that has gone since, or was never there, needs no rule. */
static bool allow(const struct rules *rules, const char *path, uint64_t access)
{
    struct stat facts;
    const int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR || errno == ELOOP;
    bool good = fstat(fd, &facts) == 0;
    if (good && !S_ISDIR(facts.st_mode))
        access &= OF_FILES;
    const struct beneath rule = { .access = access & rules->handled, .fd = fd };
    if (good && rule.access)
        good = syscall(ADD_RULE, rules->set, PATH_BENEATH, &rule, 0) == 0;
    const int code = errno;
    close(fd);
    errno = code;
    return good;
}

/* The directory that a name is in, as the library finds it too. */
static bool parent_of(const char *path, char *out)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    while (n > 0 && path[n - 1] != '/')
        n--;
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n >= PATH_BYTES) {
        errno = ENAMETOOLONG;
        return false;
    }
    snprintf(out, PATH_BYTES, "%.*s", n ? (int)n : 1, n ? path : ".");
    return true;
}

/* Files of a directory, one by one: links, as a cache of the Hugging Face hub has them, or, `all`, everything that is no
 * directory and not hidden. */
static bool allow_entries(const struct rules *rules, const char *directory, bool all)
{
    char path[PATH_BYTES];
    struct stat facts;
    DIR *const stream = opendir(directory);
    bool good = true;
    if (!stream)
        return true; /* and the reader will say so */
    for (const struct dirent *entry; good && (entry = readdir(stream));) {
        const bool may_be_link = entry->d_type == DT_LNK || entry->d_type == DT_UNKNOWN;
        if (all ? entry->d_name[0] == '.' : !may_be_link || !strcmp(entry->d_name, "..") || !strcmp(entry->d_name, "."))
            continue;
        if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) < sizeof path &&
            stat(path, &facts) == 0 && S_ISREG(facts.st_mode))
            good = allow(rules, path, READ_FILE);
    }
    closedir(stream);
    return good;
}

/* refs/ of the hub's cache says which of the snapshots/ is meant. */
static bool allow_checkpoint(const struct rules *rules, const char *path)
{
    char near[PATH_BYTES];
    struct stat facts;
    if (stat(path, &facts) < 0)
        return false;
    if (S_ISDIR(facts.st_mode))
        return allow(rules, path, READ) && allow_entries(rules, path, false) &&
               ((size_t)snprintf(near, sizeof near, "%s/../refs", path) >= sizeof near || allow(rules, near, READ));
    return allow(rules, path, READ_FILE) && parent_of(path, near) && allow(rules, near, READ_DIR) &&
           allow_entries(rules, near, true);
}

static char made[PATH_BYTES]; /* the output directory, where it was not there */

static bool make_output(const char *path)
{
    if (strlen(path) >= sizeof made) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (mkdir(path, 0777) == 0)
        strcpy(made, path);
    else if (errno != EEXIST)
        return false;
    return true;
}

/* An output directory's own parent is synced, and an empty one is removed from there. */
static bool allow_use(const struct rules *rules, const struct sandbox_path *p)
{
    char parent[PATH_BYTES];
    switch (p->use) {
    case SANDBOX_CHECKPOINT:
        return allow_checkpoint(rules, p->path);
    case SANDBOX_FILE:
        return access(p->path, F_OK) == 0 && allow(rules, p->path, READ_FILE);
    case SANDBOX_OUTPUT_DIRECTORY:
        return make_output(p->path) && parent_of(p->path, parent) && allow(rules, parent, READ_DIR | REMOVE_DIR) &&
               allow(rules, p->path, WRITE);
    case SANDBOX_OUTPUT_FILE:
        return parent_of(p->path, parent) && access(parent, F_OK) == 0 && allow(rules, parent, WRITE);
    }
    return false;
}

static bool writes(const struct sandbox_path *paths, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (paths[i].path && (paths[i].use == SANDBOX_OUTPUT_DIRECTORY || paths[i].use == SANDBOX_OUTPUT_FILE))
            return true;
    return false;
}

/* The rules, not yet in force: -1 where they cannot be, and why is said. */
static int make_rules(const struct sandbox_path *paths, size_t n, int version)
{
    struct ruleset handled = { 0 };
    for (int i = 0; i < version && i < ABIS; i++) {
        handled.fs |= added[i].fs;
        handled.net |= added[i].net;
        handled.scoped |= added[i].scoped;
    }
    const struct rules rules = { (int)syscall(CREATE_RULESET, &handled, sizeof handled, 0), handled.fs };
    bool good = rules.set >= 0;
    const char *at = "Landlock";
    for (size_t i = 0; good && i < sizeof system_files / sizeof *system_files; i++)
        good = allow(&rules, system_files[i], READ);
    if (good && __kmpc_fork_call)
        good = allow(&rules, "/dev/shm", IN_SHARED_MEMORY);
    for (size_t i = 0; good && i < n; i++)
        if (paths[i].path) {
            at = paths[i].path;
            good = allow_use(&rules, &paths[i]);
        }
    if (good)
        return rules.set;
    say("none: %s: %s", at, strerror(errno));
    if (rules.set >= 0)
        close(rules.set);
    return -1;
}

/* ---- seccomp ---- */

static const int denied[] = {
    /* the network, and what would reach it unfiltered */
    SYS_socket,
    SYS_connect,
    SYS_bind,
    SYS_listen,
    SYS_accept,
    SYS_accept4,
    SYS_io_uring_setup,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    /* other programs and processes */
    SYS_execve,
    SYS_execveat,
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_kill,
    SYS_tkill,
    SYS_rt_sigqueueinfo,
    SYS_pidfd_send_signal,
    SYS_pidfd_open,
    SYS_kcmp,
    SYS_setns,
    SYS_unshare,
    /* the kernel */
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    SYS_reboot,
    SYS_swapon,
    SYS_swapoff,
    SYS_acct,
    SYS_quotactl,
    /* the file system's shape, and files without their path */
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_open_by_handle_at,
    SYS_fsopen,
    SYS_fsmount,
    SYS_move_mount,
    SYS_open_tree,
};

/* Requests that put characters into the terminal of whoever started nib. */
static const unsigned terminal_requests[] = { TIOCSTI, TIOCLINUX };

enum {
    DENIED = sizeof denied / sizeof *denied,
    REQUESTS = sizeof terminal_requests / sizeof *terminal_requests,
    OF_X32 = 0x40000000 /* the bit of x86-64's second set of calls */
};

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#define ARCHITECTURE 0 /* one whose number is not here, where the filter would reject every call */
#endif

#define LOAD(field) \
    (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offsetof(struct seccomp_data, field))
#define UNLESS(test, value, skip) (struct sock_filter) BPF_JUMP(BPF_JMP | (test) | BPF_K, (uint32_t)(value), 0, skip)
#define DENY (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)
#define ALLOW (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

/* False, with errno, where the kernel does not have it. */
static bool enter_seccomp(void)
{
    struct sock_filter code[2 * (DENIED + REQUESTS) + 16], *p = code;
    if (!ARCHITECTURE) {
        errno = ENOSYS;
        return false;
    }
    *p++ = LOAD(arch);
    *p++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0);
    *p++ = DENY; /* another architecture's calls have other numbers */
    *p++ = LOAD(nr);
    *p++ = UNLESS(BPF_JGE, OF_X32, 1);
    *p++ = DENY;
    for (int i = 0; i < DENIED; i++) {
        *p++ = UNLESS(BPF_JEQ, denied[i], 1);
        *p++ = DENY;
    }
    *p++ = UNLESS(BPF_JEQ, SYS_ioctl, 2 * REQUESTS + 1);
    *p++ = LOAD(args[1]); /* its low half: nib is little-endian only */
    for (int i = 0; i < REQUESTS; i++) {
        *p++ = UNLESS(BPF_JEQ, terminal_requests[i], 1);
        *p++ = DENY;
    }
    *p++ = ALLOW;
    const struct sock_fprog program = { .len = (unsigned short)(p - code), .filter = code };
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

/* ---- Both ---- */

static bool has_seccomp(void)
{
    const uint32_t action = SECCOMP_RET_ERRNO;
    return syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0;
}

/* Whether both hold. A ruleset of ABI 1 cannot allow a rename between directories, which every output needs. */
static bool enter(const struct sandbox_path *paths, size_t n)
{
    const int version = landlock_version(), code = errno;
    const bool enough = version >= (writes(paths, n) ? ABI_TO_RENAME : 1);
    const int rules = enough ? make_rules(paths, n, version) : -1;
    if (enough && rules < 0)
        return false;
    const bool landlock =
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && rules >= 0 && syscall(RESTRICT_SELF, rules, 0) == 0;
    const int restricted = rules >= 0 ? errno : code;
    if (rules >= 0)
        close(rules);
    const bool seccomp = enter_seccomp();
    if (landlock && seccomp)
        say("Landlock %d, seccomp", version);
    else if (landlock)
        say("Landlock %d, no seccomp: %s", version, strerror(errno));
    else
        say("%s, no Landlock: %s", seccomp ? "seccomp" : "none: no seccomp",
            enough || version < 0 ? strerror(restricted) : "version 1 cannot rename");
    return landlock && seccomp;
}

static void describe(void)
{
    const int version = landlock_version();
    const char *const seccomp = has_seccomp() ? "seccomp" : "no seccomp";
    if (version > 0)
        say("Landlock %d, %s", version, seccomp);
    else
        say("%s, no Landlock: %s", seccomp, strerror(errno));
}

void sandbox_leave(void)
{
    if (*made)
        (void)rmdir(made);
    *made = 0;
}

#else

static bool enter(const struct sandbox_path *paths, size_t n)
{
    (void)paths, (void)n;
    return say("none: this system has no Landlock");
}

static void describe(void) { say("none: this system has no Landlock"); }

void sandbox_leave(void) {}

#endif

/* LeakSanitizer traces the process from a second one, and reports are made readable by a program that is started. */
#if defined(__SANITIZE_ADDRESS__)
#define BY_DEFAULT "off"
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#define BY_DEFAULT "off"
#endif
#endif
#ifndef BY_DEFAULT
#define BY_DEFAULT "on"
#endif

bool sandbox_enter(const struct sandbox_path *paths, size_t n)
{
    const char *const set = getenv("NIB_SANDBOX"), *const word = set && *set ? set : BY_DEFAULT;
    const bool required = strcmp(word, "require") == 0;
    if (!required && strcmp(word, "on") != 0 && strcmp(word, "off") != 0)
        return say("NIB_SANDBOX is on, off or require, not '%s'", word);
    bool entered = false;
    if (!strcmp(word, "off"))
        say("none: NIB_SANDBOX=off%s", set && *set ? "" : " in builds with sanitizers");
    else if (sandbox_waived)
        say("none: %s", sandbox_waived);
    else
        entered = enter(paths, n);
    return entered || !required;
}

const char *sandbox_state(void)
{
    if (!*state)
        describe();
    return state;
}
