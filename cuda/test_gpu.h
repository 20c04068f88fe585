/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gpu.h - a GPU for tests, and memory of it: over cuda/shim the host is one.
 */
#ifndef NIB_TEST_GPU_H
#define NIB_TEST_GPU_H

#include <cuda_runtime_api.h>

#include "nib_cuda.h"
#include "test.h"

#ifndef NIB_CUDA_SHIM
#define NIB_CUDA_SHIM 0
#endif

static nib_device *gpu; /* with a stream of its own; NULL: there is none */

__attribute__((constructor)) static void find_gpu(void)
{
    int count = 0;
    if (nib_cuda_count(&count) == NIB_OK && count > 0 && nib_cuda_create_stream(0, &gpu))
        fprintf(stderr, "cuda:0 does not work: %s\n", nib_last_error());
}

#define NEEDS_GPU \
    if (!gpu)     \
    SKIP("there is no GPU")

/* ---- Memory of the GPU ---- */

static nib_array bytes_at(void *data, size_t bytes, nib_device *device)
{
    nib_array a = { 0 };
    CHECK_OK(nib_array_init(&a, data, NIB_U8, 1, (const int64_t[]){ (int64_t)bytes }));
    a.device = device;
    return a;
}

static void upload(void *to, const void *from, size_t bytes)
{
    const nib_array a = bytes_at((void *)(uintptr_t)from, bytes, NULL), b = bytes_at(to, bytes, gpu);
    CHECK_OK(nib_array_copy(&a, &b));
}

static void download(void *to, const void *from, size_t bytes)
{
    const nib_array a = bytes_at((void *)(uintptr_t)from, bytes, gpu), b = bytes_at(to, bytes, NULL);
    CHECK_OK(nib_array_copy(&a, &b));
}

/* Memory that holds something, `skew` bytes behind an aligned address. */
struct memory {
    nib_buffer *buffer;
    char *data;
    size_t bytes;
};

static struct memory memory_of(const void *content, size_t bytes, size_t skew)
{
    struct memory m = { .bytes = bytes };
    CHECK_OK(nib_buffer_create(bytes + skew + 64, gpu, &m.buffer));
    m.data = (char *)nib_buffer_data(m.buffer) + skew;
    void *filler = malloc(bytes + 1);
    memset(filler, 0xA5, bytes + 1);
    upload(m.data, content ? content : filler, bytes);
    free(filler);
    return m;
}

static void release(struct memory *m)
{
    nib_buffer_release(m->buffer);
    m->buffer = NULL;
}

#endif
