/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_statistics.c - any bytes as a file of statistics: rejected with a message, or every entry is found by its name and
 * gives mean squares that are finite and not negative. Then as a file of Hessians, whose values are finite.
 */
#define _GNU_SOURCE
#include <float.h>

#include "io/hessians.h"
#include "io/statistics.h"
#include "fuzz.h"

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
            require(out[k] >= 0 && out[k] <= FLT_MAX, "a mean square");
        require(nib_statistics_read(s, i, slices, slices, cols, out, &tokens) == NIB_ERR_DATA, "a slice too many");
        require(nib_statistics_read(s, i, slices, 0, cols + 1, out, &tokens) == NIB_ERR_DATA, "a channel too many");
        free(out);
    }
}

static void walk_hessians(const char *path, size_t count)
{
    struct nib_hessians *h = NULL;
    const nib_status status = nib_hessians_open(path, NULL, &h);
    require(status == NIB_OK || status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED, "the status of Hessians");
    require(!status == (h != NULL), "the output of Hessians");
    require(!status || strlen(nib_last_error()) > strlen(path) + 2, "the message of Hessians");
    for (size_t i = 0; h && i < nib_hessians_count(h); i++) {
        const struct nib_hessian entry = nib_hessians_at(h, i);
        const size_t n = (size_t)entry.cols * (size_t)(entry.cols + 1) / 2;
        size_t found;
        require(nib_hessians_find(h, entry.name, &found) && found == i, "finding a Hessian");
        require(entry.cols > 0 && n <= count / sizeof(float) && entry.tokens >= -1, "the size of a Hessian");
        float *out = malloc(n * sizeof *out);
        require(out && !nib_hessians_read(h, i, out), "reading a Hessian");
        for (size_t k = 0; k < n; k++)
            require(out[k] >= -FLT_MAX && out[k] <= FLT_MAX, "a value of a Hessian");
        free(out);
    }
    nib_hessians_close(h);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    char path[64];
    const int fd = put_in_memory(bytes, count, path);
    struct nib_statistics *s = NULL;
    const nib_status status = nib_statistics_open(path, &s);
    require(status == NIB_OK || status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED, "the status");
    require(!status == (s != NULL), "the output");
    require(!status || strlen(nib_last_error()) > strlen(path) + 2, "the message");
    if (s)
        walk(s);
    nib_statistics_close(s);
    walk_hessians(path, count);
    close(fd);
    return 0;
}
