/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_cuda.h - nib bench on a GPU.
 */
#ifndef NIB_BENCH_CUDA_H
#define NIB_BENCH_CUDA_H

#include <stdint.h>
#include <stdlib.h>

#include "cli.h"
#include "nib.h"

struct bench_cuda_options {
    const char *device;
    bool json, quick;
    char **filters; /* NULL at the end; none: everything */
};

enum cli_exit bench_cuda(const struct bench_cuda_options *options);

/* Values that are always the same (bench_operations.c), to be freed; NULL without memory. */
void *bench_values(nib_dtype dtype, int64_t n);

#endif
