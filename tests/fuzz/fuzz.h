/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz.h - what every fuzz target has: a demand whose failure is a finding, a file in memory, and with NIB_FUZZ_MAIN the
 * program that replays the files it is given. Wants _GNU_SOURCE.
 */
#ifndef NIB_FUZZ_H
#define NIB_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nib.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static inline void require(int condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "%s: %s\n", what, nib_last_error());
        abort();
    }
}

/* Choices made by the bytes of an input, for targets that draw calls from it. At its end everything is 0. Never two draws among
 * the arguments of one call or the values of one list: C leaves their order to the compiler, and an input means one thing. */
struct draws {
    const uint8_t *bytes;
    size_t left;
};

static inline uint64_t draw_bytes(struct draws *d, size_t count)
{
    uint64_t value = 0;
    const size_t n = count < d->left ? count : d->left;
    memcpy(&value, d->bytes, n);
    d->bytes += n;
    d->left -= n;
    return value;
}

/* One of 0..n-1, by one byte. */
static inline int draw(struct draws *d, int n) { return (int)(draw_bytes(d, 1) % (uint64_t)n); }

/* The path of a file with these bytes, which is gone when the descriptor is closed. */
static inline int put_in_memory(const uint8_t *bytes, size_t count, char path[64])
{
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    require(fd >= 0 && write(fd, bytes, count) == (ssize_t)count, "a file in memory");
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

#ifdef NIB_FUZZ_MAIN
#include <time.h>

enum { LONGEST = 1 << 24, LONGEST_MUTANT = 1 << 14 };

/* The input that is being tried, in a file that outlives a crash. */
static uint8_t *mutant;
static size_t mutant_bytes;

static void make_mutant_file(char path[256])
{
    const char *tmp = getenv("TMPDIR");
    snprintf(path, 256, "%s/nib-fuzz-mutant-%d", tmp && *tmp ? tmp : "/tmp", (int)getpid());
    FILE *file = fopen(path, "w+b");
    require(file && !ftruncate(fileno(file), LONGEST_MUTANT), "a file for inputs");
    mutant = mmap(NULL, LONGEST_MUTANT, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    require(mutant != MAP_FAILED, "its memory");
    fclose(file);
}

static uint64_t next_random(void)
{
    static uint64_t state = 20261116;
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    return z ^ z >> 31;
}

/* Bytes changed, taken out, or repeated. */
static void mutate(void)
{
    for (uint64_t n = 1 + next_random() % 4; n > 0 && mutant_bytes > 0; n--) {
        const size_t at = next_random() % mutant_bytes, rest = mutant_bytes - at;
        size_t count = 1 + next_random() % (rest < 16 ? rest : 16);
        switch (next_random() % 4) {
        case 0:
            mutant[at] ^= (uint8_t)(1u << next_random() % 8);
            break;
        case 1:
            mutant[at] = (uint8_t)next_random();
            break;
        case 2:
            memmove(mutant + at, mutant + at + count, rest - count);
            mutant_bytes -= count;
            break;
        default:
            count = mutant_bytes + count > LONGEST_MUTANT ? 0 : count;
            memmove(mutant + at + count, mutant + at, rest);
            mutant_bytes += count;
            break;
        }
    }
}

/* A short run without a fuzzer, where NIB_FUZZ_MS says for how long: mutants of the files, one after the other. */
static void run_mutants(int argc, char **argv)
{
    struct timespec begin, now;
    char path[256];
    const char *wanted = getenv("NIB_FUZZ_MS");
    if (!wanted || argc < 2)
        return;
    make_mutant_file(path);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        FILE *file = fopen(argv[1 + next_random() % (uint64_t)(argc - 1)], "rb");
        require(file != NULL, "a file of the corpus");
        mutant_bytes = fread(mutant, 1, LONGEST_MUTANT, file);
        fclose(file);
        mutate();
        LLVMFuzzerTestOneInput(mutant, mutant_bytes);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 < atol(wanted));
    unlink(path);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        uint8_t *bytes = malloc(LONGEST);
        if (!file || !bytes) {
            fprintf(stderr, "cannot read %s\n", argv[i]);
            return 1;
        }
        const size_t count = fread(bytes, 1, LONGEST, file);
        fclose(file);
        LLVMFuzzerTestOneInput(bytes, count);
        free(bytes);
    }
    run_mutants(argc, argv);
    printf("%d passed, 0 failed, 0 skipped\n", argc - 1);
    return 0;
}
#endif

#endif
