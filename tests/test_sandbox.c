/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sandbox.c - what the tool may and may not do once it is in its sandbox, on this kernel and on older ones, which
 * the wrapped syscall() plays: it says another version of Landlock, and rejects what that version would not know.
 *
 * Whoever enters never leaves: every case is a child. CMakeLists.txt looks for NIB_TEST_WRAP_KERNEL.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "sandbox.h"
#include "test.h"
#include "test_directory.h"

/* ---- A kernel that may be older ---- */

enum { NEWEST = 1 << 20, CREATE_RULESET = 444, ADD_RULE = 445, RESTRICT_SELF = 446 };
static int landlock_abi = NEWEST; /* 0: none */
static bool seccomp_known = true;

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

/* The rights of files up to each ABI, and whether it knows the network and scopes. */
static const uint64_t known_rights[] = { 0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF, 0xFFFF };

static bool knows(const uint64_t *attributes, size_t bytes)
{
    const int abi = landlock_abi > 6 ? 6 : landlock_abi;
    const uint64_t net = bytes > 8 ? attributes[1] : 0, scoped = bytes > 16 ? attributes[2] : 0;
    return !(attributes[0] & ~known_rights[abi]) && (abi >= 4 || !net) && (abi >= 6 || !scoped);
}

long __wrap_syscall(long number, ...)
{
    va_list list;
    long a[4]; /* no call has more */
    va_start(list, number);
    for (int i = 0; i < 4; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    const bool of_landlock = number >= CREATE_RULESET && number <= RESTRICT_SELF;
    if ((of_landlock && landlock_abi == 0) || (number == SYS_seccomp && !seccomp_known)) {
        errno = ENOSYS;
        return -1;
    }
    if (number == CREATE_RULESET && (int)a[2] == 0 && !knows((const uint64_t *)a[0], (size_t)a[1])) {
        errno = EINVAL;
        return -1;
    }
    const long result = __real_syscall(number, a[0], a[1], a[2], a[3]);
    return number == CREATE_RULESET && (int)a[2] == 1 && result > landlock_abi ? landlock_abi : result;
}

static int kernel_abi(void) { return (int)__real_syscall(CREATE_RULESET, NULL, 0, 1); }

/* ---- Children ---- */

/* The layout of the Hugging Face hub's cache beside things that are nobody's business. */
static void make_tree(void)
{
    static const char *const directories[] = { "hub",     "hub/blobs", "hub/refs", "hub/snapshots", "hub/snapshots/c",
                                               "private", "alone",     "alone/in", "there" };
    static const char *const files[] = { "hub/blobs/b",    "hub/refs/main", "hub/snapshots/c/config.json",
                                         "private/key",    "alone/m.gguf",  "alone/m.json",
                                         "alone/.secret",  "alone/in/x",    "imatrix",
                                         "hub/blobs/other" };
    empty_directory();
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
        CHECK(mkdir(at(directories[i]), 0777) == 0);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        put_text(files[i], "x");
    CHECK(symlink("../../blobs/b", at("hub/snapshots/c/model.safetensors")) == 0);
    CHECK(symlink("/nowhere/at/all", at("hub/snapshots/c/dangling")) == 0);
    setenv("NIB_SANDBOX", "on", 1);
}

/* The versions that are played need a kernel that has them all. */
#define NEED_LANDLOCK()                                            \
    do {                                                           \
        if (kernel_abi() < 6)                                      \
            SKIP("this kernel has no Landlock, or not all of it"); \
        make_tree();                                               \
    } while (0)

/* The lines of a child's case that do not hold; they are printed by it. */
static int wrong;
#define HOLDS(condition)                                                                                \
    do {                                                                                                \
        if (!(condition)) {                                                                             \
            printf("  line %d: %s (%s; %s)\n", __LINE__, #condition, strerror(errno), sandbox_state()); \
            fflush(stdout);                                                                             \
            wrong++;                                                                                    \
        }                                                                                               \
    } while (0)

static void in_child(void (*body)(void))
{
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        wrong = 0;
        body();
        _exit(wrong != 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static bool reads(const char *name)
{
    const int fd = open(at(name), O_RDONLY);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static bool denied(bool done, int code) { return !done && errno == code; }

static bool makes(const char *name)
{
    const int fd = open(at(name), O_RDWR | O_CREAT, 0666);
    const bool good = fd >= 0 && ftruncate(fd, 1) == 0;
    if (fd >= 0)
        close(fd);
    return good;
}

/* ---- Files ---- */

static void enter_as_quantize(void)
{
    const struct sandbox_path paths[] = { { at("hub/snapshots/c"), SANDBOX_CHECKPOINT },
                                          { at("out"), SANDBOX_OUTPUT_DIRECTORY },
                                          { NULL, SANDBOX_FILE },
                                          { at("imatrix"), SANDBOX_FILE } };
    HOLDS(sandbox_enter(paths, 4));
}

static void check_files(void)
{
    enter_as_quantize();
    HOLDS(strncmp(sandbox_state(), "Landlock ", 9) == 0 && strstr(sandbox_state(), ", seccomp"));
    HOLDS(reads("hub/snapshots/c/config.json") && reads("hub/snapshots/c/model.safetensors"));
    HOLDS(reads("imatrix") && reads("/dev/urandom"));
    HOLDS(denied(reads("private/key"), EACCES) && denied(reads("hub/blobs/other"), EACCES));
    HOLDS(denied(reads("/etc/passwd"), EACCES) && denied(reads("/proc/self/environ"), EACCES));
    HOLDS(makes("out/a") && mkdir(at("out/d"), 0777) == 0 && rename(at("out/a"), at("out/d/a")) == 0);
    HOLDS(truncate(at("out/d/a"), 0) == 0 && unlink(at("out/d/a")) == 0 && rmdir(at("out/d")) == 0);
    HOLDS(denied(makes("beside"), EACCES) && denied(makes("imatrix"), EACCES));
    HOLDS(denied(makes("hub/snapshots/c/new"), EACCES) && denied(makes("hub/snapshots/c/config.json"), EACCES));
    HOLDS(denied(unlink(at("private/key")) == 0, EACCES) && denied(truncate(at("private/key"), 0) == 0, EACCES));
    HOLDS(denied(symlink("/etc", at("out/etc")) == 0, EACCES));
    sandbox_leave();
    HOLDS(access(at("out"), F_OK) < 0); /* it was made for the rule, and is empty */
}

/* A name in a directory that has other things too. */
static void check_file_beside_others(void)
{
    const struct sandbox_path paths[] = { { at("alone/m.gguf"), SANDBOX_CHECKPOINT },
                                          { at("there/out.gguf"), SANDBOX_OUTPUT_FILE } };
    HOLDS(sandbox_enter(paths, 2));
    HOLDS(reads("alone/m.gguf") && reads("alone/m.json") && reads("alone"));
    HOLDS(denied(reads("alone/.secret"), EACCES) && denied(reads("alone/in/x"), EACCES));
    HOLDS(mkdir(at("there/out.gguf.partial"), 0777) == 0 && makes("there/out.gguf.partial/x"));
    HOLDS(rename(at("there/out.gguf.partial/x"), at("there/out.gguf")) == 0 && unlink(at("there/out.gguf")) == 0);
    HOLDS(denied(makes("alone/m.gguf"), EACCES) && denied(makes("private/new"), EACCES));
}

/* Who names the directory of snapshots is told which of them refs/main means. */
static void check_snapshots(void)
{
    const struct sandbox_path path = { at("hub/snapshots"), SANDBOX_CHECKPOINT };
    HOLDS(sandbox_enter(&path, 1) && reads("hub/refs/main") && denied(reads("hub/blobs/b"), EACCES));
}

/* An output directory that was there stays, whatever is in it. */
static void check_output_that_exists(void)
{
    const struct sandbox_path path = { at("there"), SANDBOX_OUTPUT_DIRECTORY };
    HOLDS(sandbox_enter(&path, 1) && makes("there/file") && unlink(at("there/file")) == 0);
    sandbox_leave();
    HOLDS(access(at("there"), F_OK) == 0);
}

TEST(files)
{
    NEED_LANDLOCK();
    in_child(check_files);
    in_child(check_file_beside_others);
    in_child(check_snapshots);
    in_child(check_output_that_exists);
}

/* ---- The rest of the system ---- */

static void *read_in_thread(void *context)
{
    *(bool *)context = denied(reads("/etc/passwd"), EACCES) && denied(socket(AF_INET, SOCK_STREAM, 0) >= 0, EPERM);
    return NULL;
}

static void check_calls(void)
{
    char *const words[] = { "true", NULL };
    bool confined = false;
    pthread_t thread;
    enter_as_quantize();
    HOLDS(denied(socket(AF_INET, SOCK_STREAM, 0) >= 0, EPERM) && denied(socket(AF_INET6, SOCK_DGRAM, 0) >= 0, EPERM));
    HOLDS(denied(socket(AF_UNIX, SOCK_STREAM, 0) >= 0, EPERM));
    HOLDS(denied(execv("/bin/true", words) >= 0, EPERM));
    HOLDS(denied(kill(getppid(), 0) == 0, EPERM));
    HOLDS(denied(__real_syscall(SYS_io_uring_setup, 1, NULL) >= 0, EPERM));
    HOLDS(denied(__real_syscall(SYS_ptrace, 0, 0, 0, 0) >= 0, EPERM));
    HOLDS(denied(ioctl(0, TIOCSTI, "x") == 0, EPERM));
#if defined(__x86_64__)
    HOLDS(denied(__real_syscall(0x40000000 | SYS_getpid) >= 0, EPERM));
#endif
    HOLDS(pthread_create(&thread, NULL, read_in_thread, &confined) == 0 && pthread_join(thread, NULL) == 0 && confined);
    HOLDS(getpid() > 0 && sysconf(_SC_NPROCESSORS_ONLN) > 0);
    sandbox_leave();
}

TEST(calls)
{
    NEED_LANDLOCK();
    in_child(check_calls);
}

/* ---- Older kernels ---- */

static void check_abi(void)
{
    char state[64];
    const int shown = landlock_abi < kernel_abi() ? landlock_abi : kernel_abi();
    const struct sandbox_path path = { at("hub/snapshots/c"), SANDBOX_CHECKPOINT };
    HOLDS(sandbox_enter(&path, 1));
    snprintf(state, sizeof state, "Landlock %d, %s", shown, seccomp_known ? "seccomp" : "no seccomp");
    HOLDS(strncmp(sandbox_state(), state, strlen(state)) == 0);
    HOLDS(reads("hub/snapshots/c/model.safetensors") && denied(reads("private/key"), EACCES));
    HOLDS((socket(AF_INET, SOCK_STREAM, 0) < 0) == seccomp_known);
}

/* Outputs are renamed between directories, for which ABI 1 has no right. */
static void check_abi_of_outputs(void)
{
    enter_as_quantize();
    HOLDS(landlock_abi > 1 ? strncmp(sandbox_state(), "Landlock ", 9) == 0
                           : strncmp(sandbox_state(), "seccomp, no Landlock: ", 22) == 0);
    HOLDS(access(at("out"), F_OK) == 0 || mkdir(at("out"), 0777) == 0);
    HOLDS(makes("out/a") && mkdir(at("out/d"), 0777) == 0 && rename(at("out/a"), at("out/d/a")) == 0);
    HOLDS(unlink(at("out/d/a")) == 0 && rmdir(at("out/d")) == 0 && rmdir(at("out")) == 0);
    HOLDS(reads("private/key") == (landlock_abi < 2) && socket(AF_INET, SOCK_STREAM, 0) < 0);
}

static void check_without_landlock(void)
{
    const struct sandbox_path path = { at("hub/snapshots/c"), SANDBOX_CHECKPOINT };
    HOLDS(strcmp(sandbox_state(), "seccomp, no Landlock: Function not implemented") == 0);
    HOLDS(sandbox_enter(&path, 1));
    HOLDS(strcmp(sandbox_state(), "seccomp, no Landlock: Function not implemented") == 0);
    HOLDS(reads("private/key") && denied(socket(AF_INET, SOCK_STREAM, 0) >= 0, EPERM));
}

static void check_without_anything(void)
{
    const struct sandbox_path path = { at("hub/snapshots/c"), SANDBOX_CHECKPOINT };
    HOLDS(sandbox_enter(&path, 1) && strncmp(sandbox_state(), "none: no seccomp, no Landlock", 29) == 0);
    HOLDS(reads("private/key"));
}

static void check_requirement_fails(void)
{
    const struct sandbox_path path = { at("hub/snapshots/c"), SANDBOX_CHECKPOINT };
    HOLDS(!sandbox_enter(&path, 1));
}

TEST(older_kernels)
{
    NEED_LANDLOCK();
    for (landlock_abi = 1; landlock_abi <= 7; landlock_abi++) {
        in_child(check_abi);
        in_child(check_abi_of_outputs);
    }
    landlock_abi = 0;
    in_child(check_without_landlock);
    in_child(check_abi_of_outputs);
    setenv("NIB_SANDBOX", "require", 1);
    in_child(check_requirement_fails);
    setenv("NIB_SANDBOX", "on", 1);
    seccomp_known = false;
    in_child(check_without_anything);
    landlock_abi = NEWEST;
    in_child(check_abi);
    setenv("NIB_SANDBOX", "require", 1);
    in_child(check_requirement_fails);
    setenv("NIB_SANDBOX", "on", 1);
    seccomp_known = true;
}

/* ---- Switched off, or in vain ---- */

static void check_off(void)
{
    enter_as_quantize();
    HOLDS(strcmp(sandbox_state(), "none: NIB_SANDBOX=off") == 0 && reads("private/key") && access(at("out"), F_OK) < 0);
}

static void check_unknown_word(void)
{
    HOLDS(!sandbox_enter(NULL, 0) && strstr(sandbox_state(), "on, off or require, not 'onn'"));
}

static void check_waived(void)
{
    sandbox_waived = "of a reason";
    enter_as_quantize();
    HOLDS(strcmp(sandbox_state(), "none: of a reason") == 0 && reads("private/key"));
}

/* The command ends with its own message about what is not there; the hub's caches may be looked at for it. */
static void check_missing(void)
{
    const struct sandbox_path missing = { at("hub/none"), SANDBOX_CHECKPOINT }, file = { at("no.dat"), SANDBOX_FILE },
                              out = { at("no/out"), SANDBOX_OUTPUT_DIRECTORY },
                              report = { at("no/r.html"), SANDBOX_OUTPUT_FILE };
    const struct sandbox_path *const each[] = { &missing, &file, &out, &report };
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        HOLDS(sandbox_enter(each[i], 1) && strncmp(sandbox_state(), "none: ", 6) == 0);
        HOLDS(strstr(sandbox_state(), "No such file") && reads("private/key"));
    }
}

TEST(without)
{
    NEED_LANDLOCK();
    setenv("NIB_SANDBOX", "off", 1);
    in_child(check_off);
    setenv("NIB_SANDBOX", "onn", 1);
    in_child(check_unknown_word);
    setenv("NIB_SANDBOX", "on", 1);
    in_child(check_waived);
    in_child(check_missing);
    setenv("NIB_SANDBOX", "require", 1);
    in_child(check_files);
}

TEST_MAIN
