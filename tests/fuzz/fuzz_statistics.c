/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_statistics.c - any bytes as a file of statistics: rejected with a message, or every entry is found by its name and
 * gives mean squares that are finite and not negative.
 *
 * For libFuzzer; with NIB_FUZZ_MAIN a plain program that replays the files it is given.
 */
#define _GNU_SOURCE
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/statistics.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static void require(int condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "fuzz_statistics: %s: %s\n", what, nib_last_error());
        abort();
    }
}

static void walk(const struct nib_statistics *s)
{
    require(nib_statistics_count(s) > 0 && strlen(nib_statistics_hash(s)) == 32, "entries and a hash");
    for (size_t i = 0; i < nib_statistics_count(s); i++) {
        const struct nib_statistic entry = nib_statistics_at(s, i);
        size_t found;
        require(nib_statistics_find(s, entry.name, &found) && found == i, "finding a name");
        const int64_t slices = entry.slices ? entry.slices : 1, cols = entry.values / slices;
        require(cols > 0 && cols * slices == entry.values, "the size");
        float *out = malloc((size_t)cols * sizeof *out);
        double tokens = -1;
        require(out && !nib_statistics_read(s, i, slices, slices - 1, cols, out, &tokens), "reading it");
        require(tokens >= 0, "its tokens");
        for (int64_t k = 0; tokens > 0 && k < cols; k++)
            require(out[k] >= 0, "a mean square");
        require(nib_statistics_read(s, i, slices, slices, cols, out, &tokens) == NIB_ERR_DATA, "a slice too many");
        require(nib_statistics_read(s, i, slices, 0, cols + 1, out, &tokens) == NIB_ERR_DATA, "a channel too many");
        free(out);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    char path[64];
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    require(fd >= 0 && write(fd, bytes, count) == (ssize_t)count, "a file in memory");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct nib_statistics *s = NULL;
    const nib_status status = nib_statistics_open(path, &s);
    require(status == NIB_OK || status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED, "the status");
    require(!status == (s != NULL), "the output");
    require(!status || strlen(nib_last_error()) > strlen(path) + 2, "the message");
    if (s)
        walk(s);
    nib_statistics_close(s);
    close(fd);
    return 0;
}

#ifdef NIB_FUZZ_MAIN
int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        uint8_t *bytes = malloc(1 << 24);
        if (!file || !bytes) {
            fprintf(stderr, "fuzz_statistics: cannot read %s\n", argv[i]);
            return 1;
        }
        LLVMFuzzerTestOneInput(bytes, fread(bytes, 1, 1 << 24, file));
        free(bytes);
        fclose(file);
    }
    printf("%d passed, 0 failed, 0 skipped\n", argc - 1);
    return 0;
}
#endif
