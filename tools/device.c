/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - devices by name, for commands that take --device.
 */
#include "device.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

/* Of this version: the device's functions are private to it. */
#define LIBRARY "libnib_cuda.so." STRING(NIB_VERSION_MAJOR) "." STRING(NIB_VERSION_MINOR)

/* A function by its name; ISO C has no conversion from what dlsym returns. */
static bool find(void *library, const char *name, void *call)
{
    void *const symbol = dlsym(library, name);
    memcpy(call, &symbol, sizeof symbol);
    return symbol != NULL;
}

const struct cuda_calls *device_cuda(char *why, size_t bytes)
{
    static struct cuda_calls calls;
    static bool loaded;
    if (loaded)
        return &calls;
    const char *const named = getenv("NIB_CUDA_LIBRARY"), *const path = named && *named ? named : LIBRARY;
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, bytes, "%s (it is built with -DNIB_CUDA=ON; NIB_CUDA_LIBRARY can name it)", dlerror());
        return NULL;
    }
    loaded = find(library, "nib_cuda_count", &calls.count) && find(library, "nib_cuda_describe", &calls.describe) &&
             find(library, "nib_cuda_create_stream", &calls.create_stream) &&
             find(library, "nib_cuda_synchronize", &calls.synchronize) &&
             find(library, "nib_cuda_measure", &calls.measure);
    if (!loaded)
        snprintf(why, bytes, "%s is not nib's library of this version", path);
    return loaded ? &calls : NULL;
}

bool device_open(const char *command, const char *name, int threads, nib_device **out)
{
    nib_status status;
    char why[1024], *end = NULL;
    if (!name || strcmp(name, "host") == 0) {
        status = nib_host_create(threads, out);
    } else {
        const bool cuda = strncmp(name, "cuda", 4) == 0 && (name[4] == 0 || name[4] == ':');
        const long ordinal = cuda && name[4] ? strtol(name + 5, &end, 10) : 0;
        if (!cuda || (end && (*end || end == name + 5 || ordinal < 0 || ordinal > 1023))) {
            cli_error("%s: there is no device '%s'; a device is host, cuda or cuda:N", command, name);
            return false;
        }
        const struct cuda_calls *const calls = device_cuda(why, sizeof why);
        if (!calls) {
            cli_error("%s: --device %s needs libnib_cuda: %s", command, name, why);
            return false;
        }
        status = calls->create_stream((int)ordinal, out);
    }
    if (status)
        cli_error("%s: %s", command, nib_last_error());
    return status == NIB_OK;
}
