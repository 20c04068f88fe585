/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test.h - the whole harness: a list of tests, CHECK, a seeded generator, guarded memory.
 *
 *     TEST(name) { CHECK(1 + 1 == 2); }
 *     TEST_MAIN
 *
 * A program runs its tests (or those whose name holds the argument), prints a line for each that does not pass and
 * ends with `N passed, M failed, K skipped`. NIB_SEED=n replaces the seed; it is printed with every failure.
 */
#ifndef NIB_TEST_H
#define NIB_TEST_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nib.h"
#include "nib_dlpack.h"
#include "nib_file.h"
#include "nib_reference.h"
#include "nib_shard.h"
#include "sanitized.h" /* which takes time, memory and stack of its own */

struct test {
    const char *name;
    void (*run)(void);
};

/* Unused where a program has a main of its own. */
__attribute__((unused)) static struct test test_list[256];
__attribute__((unused)) static int test_count, test_failures;
__attribute__((unused)) static const char *test_skip_reason;
static uint64_t test_seed = 20261115, test_state;

/* splitmix64: every test starts from the same seed, so that one alone sees the same numbers. */
static inline uint64_t test_random(void)
{
    uint64_t z = test_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline int64_t test_below(int64_t n) { return (int64_t)(test_random() % (uint64_t)n); }

/* Uniform in [0, 1). */
static inline double test_uniform(void) { return (double)(test_random() >> 11) * 0x1p-53; }

/* About N(0, 1): twelve uniforms. Enough for data; not for tests of a distribution. */
static inline float test_normal(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += test_uniform();
    return (float)sum;
}

static inline int64_t elements_in(int rank, const int64_t *shape)
{
    int64_t n = 1;
    for (int i = 0; i < rank; i++)
        n *= shape[i];
    return n;
}

__attribute__((format(printf, 3, 4))) static inline void test_fail(const char *file, int line, const char *format, ...)
{
    test_failures++;
    if (test_failures > 20) /* one fault can fail a whole loop */
        return;
    fprintf(stderr, "  %s:%d: ", file, line);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, " (seed %llu)\n", (unsigned long long)test_seed);
}

/* The host with so many threads, for the life of the program. */
static inline nib_device *host_of(int threads)
{
    static nib_device *hosts[16];
    if (!hosts[threads] && nib_host_create(threads, &hosts[threads])) {
        test_fail(__FILE__, __LINE__, "a host of %d threads: %s", threads, nib_last_error());
        exit(2);
    }
    return hosts[threads];
}

#define CHECK(condition)                                        \
    do {                                                        \
        if (!(condition))                                       \
            test_fail(__FILE__, __LINE__, "%s", #condition);    \
    } while (0)

/* The same with words of its own. */
#define CHECK_THAT(condition, ...)                       \
    do {                                                 \
        if (!(condition))                                \
            test_fail(__FILE__, __LINE__, __VA_ARGS__);  \
    } while (0)

#define CHECK_OK(call)                                                                                        \
    do {                                                                                                      \
        nib_status check_status = (call);                                                                     \
        if (check_status)                                                                                     \
            test_fail(__FILE__, __LINE__, "%s: %s: %s", #call, nib_status_name(check_status), nib_last_error()); \
    } while (0)

/* The documented status, and a message with this in it. */
#define CHECK_FAILS(call, status, words)                                                                         \
    do {                                                                                                         \
        nib_status check_status = (call);                                                                        \
        if (check_status != (status))                                                                            \
            test_fail(__FILE__, __LINE__, "%s: %s, not %s", #call, nib_status_name(check_status), #status);      \
        else if (!strstr(nib_last_error(), words))                                                               \
            test_fail(__FILE__, __LINE__, "%s: \"%s\" does not say \"%s\"", #call, nib_last_error(), words);     \
    } while (0)

#define CHECK_BYTES(a, b, n)                                                                                 \
    do {                                                                                                     \
        const uint8_t *check_a = (const uint8_t *)(a), *check_b = (const uint8_t *)(b);                      \
        for (size_t check_i = 0; check_i < (size_t)(n); check_i++)                                           \
            if (check_a[check_i] != check_b[check_i]) {                                                      \
                test_fail(__FILE__, __LINE__, "%s != %s at byte %zu of %zu: %02x, %02x", #a, #b, check_i,    \
                          (size_t)(n), check_a[check_i], check_b[check_i]);                                  \
                break;                                                                                       \
            }                                                                                                \
    } while (0)

#define SKIP(reason)                 \
    do {                             \
        test_skip_reason = (reason); \
        return;                      \
    } while (0)

#define TEST(name)                                                                                \
    static void test_##name(void);                                                                \
    __attribute__((constructor)) static void register_##name(void)                                \
    {                                                                                             \
        test_list[test_count++] = (struct test){ #name, test_##name };                            \
    }                                                                                             \
    static void test_##name(void)

/* Memory that ends (or begins) at a page nobody may touch. Freed with the process. */
static inline void *test_guarded(size_t bytes, bool at_end)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (bytes + page) / page * page;
    char *memory = mmap(NULL, inner + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) || mprotect(memory + page + inner, page, PROT_NONE)) {
        fprintf(stderr, "no guarded memory\n");
        exit(2);
    }
    return at_end ? memory + page + inner - bytes : memory + page;
}

#define TEST_MAIN                                                                                          \
    int main(int argc, char **argv)                                                                        \
    {                                                                                                      \
        int passed = 0, failed = 0, skipped = 0;                                                           \
        if (getenv("NIB_SEED"))                                                                            \
            test_seed = strtoull(getenv("NIB_SEED"), NULL, 0);                                             \
        for (int i = 0; i < test_count; i++) {                                                             \
            if (argc > 1 && !strstr(test_list[i].name, argv[1]))                                           \
                continue;                                                                                  \
            test_failures = 0, test_skip_reason = NULL, test_state = test_seed;                            \
            test_list[i].run();                                                                            \
            if (test_failures)                                                                             \
                failed++, fprintf(stderr, "FAILED %s (%d checks)\n", test_list[i].name, test_failures);    \
            else if (test_skip_reason)                                                                     \
                skipped++, fprintf(stderr, "skipped %s: %s\n", test_list[i].name, test_skip_reason);       \
            else                                                                                           \
                passed++;                                                                                  \
        }                                                                                                  \
        printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);                             \
        return failed != 0;                                                                                \
    }

#endif
