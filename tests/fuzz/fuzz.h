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

/* The path of a file with these bytes, which is gone when the descriptor is closed. */
static inline int put_in_memory(const uint8_t *bytes, size_t count, char path[64])
{
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    require(fd >= 0 && write(fd, bytes, count) == (ssize_t)count, "a file in memory");
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

#ifdef NIB_FUZZ_MAIN
int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        uint8_t *bytes = malloc(1 << 24);
        if (!file || !bytes) {
            fprintf(stderr, "cannot read %s\n", argv[i]);
            return 1;
        }
        const size_t count = fread(bytes, 1, 1 << 24, file);
        fclose(file);
        LLVMFuzzerTestOneInput(bytes, count);
        free(bytes);
    }
    printf("%d passed, 0 failed, 0 skipped\n", argc - 1);
    return 0;
}
#endif

#endif
