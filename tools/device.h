/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.h - devices by name: the host, and GPUs through libnib_cuda, which is loaded when one is asked for.
 */
#ifndef NIB_TOOL_DEVICE_H
#define NIB_TOOL_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "nib.h"

/* The calls of nib_cuda.h that the tool makes. */
struct cuda_calls {
    nib_status (*count)(int *count);
    nib_status (*describe)(int ordinal, char *text, size_t bytes);
    nib_status (*create_stream)(int ordinal, nib_device **out);
    nib_status (*synchronize)(nib_device *device);
    nib_status (*measure)(nib_device *device, nib_status (*enqueue)(void *context), void *context, int repetitions,
                          double *seconds);
};

/* NULL where libnib_cuda cannot be loaded; `why` says what is missing. NIB_CUDA_LIBRARY in the environment names the
 * file. It stays loaded. */
const struct cuda_calls *device_cuda(char *why, size_t bytes);

/* "host", "cuda" (the first GPU) or "cuda:N". False after a message of `command`. */
bool device_open(const char *command, const char *name, int threads, nib_device **out);

#endif
