/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.h - what the files of libnib_cuda share: the device, and the operations of quantize.c.
 */
#ifndef NIB_CUDA_DEVICE_H
#define NIB_CUDA_DEVICE_H

#include <pthread.h>

#include "base/device.h"
#include "launch.h"
#include "nib_cuda.h"

/* Words of the GPU that a call needs while it runs. Calls on a stream follow one another and have the first of these;
 * a call that is captured has one of its own, since its graph may run beside anything. */
struct nib_cuda_place {
    uint32_t tickets[4]; /* nib_cuda_amax: zero between calls */
    float tensor_scale;  /* of a fake quantization */
    uint32_t flag[3];
    struct nib_cuda_factors factors; /* of a product */
};
/* So many of them at a time; all stay until the device goes. */
enum { NIB_CUDA_PLACES = 4096 };
struct nib_cuda_chunk {
    struct nib_cuda_chunk *before;
    struct nib_cuda_place *places; /* on the GPU */
    int taken;
};

struct nib_cuda_device {
    nib_device base;
    struct nib_cuda_queue queue;
    bool own_stream;
    int major;                    /* of the compute capability */
    struct nib_cuda_place *place; /* of calls that are not captured */
    pthread_mutex_t lock;         /* of the chunks */
    struct nib_cuda_chunk *chunks;
    nib_cuda_allocator allocator; /* of its functions either both or none */
    pthread_mutex_t turn;         /* of calls whose launches tell one another by the place, and of what follows */
    void *memory;                 /* that products work in; grown when one needs more */
    size_t memory_bytes;
};

static inline struct nib_cuda_device *nib_cuda_device_of(nib_device *device)
{
    return (struct nib_cuda_device *)device;
}

/* A place that no other call has. The stream may be in the middle of a capture. */
cudaError_t nib_cuda_take_place(struct nib_cuda_device *d, struct nib_cuda_place **out);

/* Memory for work on the stream, given back before the call returns. */
cudaError_t nib_cuda_borrow(const struct nib_cuda_device *d, size_t bytes, void **out);
cudaError_t nib_cuda_give_back(const struct nib_cuda_device *d, void *memory);

/* MEMORY or DEVICE with a message; forgets the runtime's last error. */
nib_status nib_cuda_status(const struct nib_cuda_device *d, const char *what, cudaError_t error);

/* Make a GPU the thread's current one, and undo that: leave after every enter, failed or not. */
cudaError_t nib_cuda_enter(int ordinal, int *before);
void nib_cuda_leave(int before);

/* A usage as kernels see it; source: where its tensor scales are read. */
struct nib_cuda_usage nib_cuda_usage_of(const struct nib_usage_geometry *g, const struct nib_usage_memory *memory,
                                        const float *source, bool rht);

/* Operations of the seam (product.c), and what they leave, before the device goes. */
nib_status nib_cuda_product(nib_device *device, const struct nib_product *products, size_t n);
void nib_cuda_product_close(struct nib_cuda_device *d);

/* Operations of the seam (quantize.c). */
nib_status nib_cuda_check_quantization(nib_device *device, const nib_quantizer *q, const nib_overrides *overrides,
                                       const struct nib_geometry *geometry);
nib_status nib_cuda_quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                             const nib_overrides *overrides, const float *noop, const struct nib_geometry *geometry,
                             const struct nib_usage_memory *memory);
nib_status nib_cuda_find_amaxes(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                const struct nib_geometry *geometry, float *const amax[2]);
nib_status nib_cuda_fake_quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                  const nib_overrides *overrides, const struct nib_geometry *geometry, nib_usage usage,
                                  const nib_array *out);
nib_status nib_cuda_dequantize(nib_device *device, const nib_quantizer *q, const struct nib_geometry *geometry,
                               nib_usage from, const struct nib_usage_memory *memory, int64_t first, int64_t count,
                               const nib_array *out);

#endif
