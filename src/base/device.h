/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.h - the seam between what a call means and where it runs.
 *
 * Everything above this header asks a device for memory, for copies and for operations on whole matrices, and never
 * follows a pointer into a tensor or an array itself; src/tensor/host.c is the host. A device from outside
 * (libnib_cuda, the one of the tests) fills in the same table.
 *
 * Operations get arguments that were checked, all of this device, and the device object whose threads or stream they
 * run on. They may be asynchronous, unless it says "waits": then they return when the result is there. Those on memory
 * are always there; of the others a NULL one is an operation that the device does not have, and nib_device_supports
 * says so to the caller before anything is touched.
 */
#ifndef NIB_DEVICE_H
#define NIB_DEVICE_H

#include <stdatomic.h>

#include "base/base.h"

struct nib_geometry;       /* format/format.h: the sizes of a tensor */
struct nib_usage_geometry; /* those of one usage */
struct nib_usage_memory;   /* format/format.h: where the parts of one usage lie */
struct nib_product;        /* kernels/product.h: two operands, and what becomes of their product */

struct nib_device_ops {
    const char *kind;                    /* "host", "cuda": what the names of its devices begin with */
    int32_t dlpack_type;                 /* DLPack's number for such memory */
    void (*destroy)(nib_device *device); /* of the last reference */

    /* ---- Memory ---- */
    nib_status (*allocate)(nib_device *device, size_t bytes, void **out); /* zeroed, aligned to 64; never NULL for 0 */
    void (*free)(nib_device *device, void *memory);
    nib_status (*write)(nib_device *device, void *to, const void *host, size_t bytes);  /* has read `host` on return */
    nib_status (*read)(nib_device *device, void *host, const void *from, size_t bytes); /* waits */
    nib_status (*copy)(nib_device *device, void *to, const void *from, size_t bytes);   /* may overlap */
    nib_status (*zero)(nib_device *device, void *memory, size_t bytes);

    /* ---- Values to codes and back: quantize.h has the contracts. With an amax_comm, quantize and fake_quantize
     * come to nib_agree whatever happens to them: the other ranks are there already. ---- */
    nib_status (*check_quantization)(
        nib_device *device, const nib_quantizer *q, const nib_overrides *overrides,
        const struct nib_geometry *geometry); /* options and what a caller brings; NULL if quantize takes all */
    nib_status (*quantize)(nib_device *device, const nib_quantizer *q, const nib_array *x,
                           const nib_overrides *overrides, const float *noop, const struct nib_geometry *geometry,
                           const struct nib_usage_memory *memory); /* of both usages */
    nib_status (*find_amaxes)(nib_device *device, const nib_quantizer *q, const nib_array *x,
                              const struct nib_geometry *geometry,
                              float *const amax[2]); /* of the usages that q wants, or NULL */
    nib_status (*fake_quantize)(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                const nib_overrides *overrides, const struct nib_geometry *geometry, nib_usage usage,
                                const nib_array *out); /* q wants that usage alone */
    nib_status (*dequantize)(nib_device *device, const nib_quantizer *q, const struct nib_geometry *geometry,
                             nib_usage from, const struct nib_usage_memory *memory, int64_t first, int64_t count,
                             const nib_array *out);
    /* Whether a no-op flag, a value on the device, is 1.0f; asked where it decides what a call does before it launches
     * anything. Waits. *set is written on success alone. */
    nib_status (*is_set)(nib_device *device, const float *flag, bool *set);
    bool weighs; /* quantize knows nib_overrides.importance */

    /* ---- Products, one after the other; none is touched where there is no memory for one ---- */
    nib_status (*product)(nib_device *device, const struct nib_product *products, size_t n);

    /* ---- Codes and scales from place to place: layout.h has the contracts ---- */
    /* n floats on the device become `value`, bit for bit; n may be 0. What was enqueued before still sees the old ones. */
    nib_status (*fill)(nib_device *device, float *values, int64_t n, float value);
    nib_status (*build_columnwise)(nib_device *device, const nib_quantizer *q, const struct nib_geometry *geometry,
                                   const struct nib_usage_memory *rowwise, const struct nib_usage_memory *columnwise);
    nib_status (*copy_rectangle)(nib_device *device, const nib_quantizer *q, const struct nib_usage_geometry *from,
                                 const struct nib_usage_memory *source, int64_t line, int64_t first,
                                 const struct nib_usage_geometry *to, const struct nib_usage_memory *target);
    nib_status (*repack_scales)(nib_device *device, const struct nib_usage_geometry *from, const void *source,
                                const struct nib_usage_geometry *to, void *target);
    nib_status (*swizzle)(nib_device *device, const struct nib_usage_geometry *plain, const void *from, void *tiles);
    nib_status (*unswizzle)(nib_device *device, const struct nib_usage_geometry *plain, const void *tiles, void *to);
    nib_status (*equal)(nib_device *device, const struct nib_usage_geometry *geometry, const struct nib_usage_memory *a,
                        const struct nib_usage_memory *b, bool *equal); /* waits */
};

struct nib_device {
    const struct nib_device_ops *ops;
    atomic_size_t references;
    int ordinal;
    int threads;   /* the host: how many, 0 for OpenMP's default */
    char name[32]; /* "host", "cuda:0" */
    void *scratch; /* the host: memory of products, kept from one to the next; whoever sets the flag has it */
    size_t scratch_bytes;
    atomic_flag scratch_taken;
};

/* The host, in src/tensor/host.c: nothing in base/ knows what its operations do. */
extern const struct nib_device_ops nib_host_ops;

/* Fill in a device with one reference; name is "KIND", or "KIND:ORDINAL" where ordinal is not negative. */
NIB_PRIVATE void nib_device_init(nib_device *device, const struct nib_device_ops *ops, int ordinal);

/* The device itself or, for NULL, the host with OpenMP's default of threads. */
nib_device *nib_device_of(nib_device *device);

bool nib_device_is_host(const nib_device *device);

/* Whether memory of one is memory of the other: the same operations and ordinal, whatever the stream or the threads. */
bool nib_device_same(const nib_device *a, const nib_device *b);

/* DEVICE unless both are the same; `what` and `other` name the two in the message. */
nib_status nib_check_same_device(const char *what, const nib_device *a, const char *other, const nib_device *b);

/* UNSUPPORTED where a call that works on host memory alone is passed something of another device. */
nib_status nib_check_host(const char *call, const nib_device *device);

/* UNSUPPORTED where the device does not have an operation: TRY(NIB_DEVICE_HAS(device, swizzle)). */
#define NIB_DEVICE_HAS(device, operation) nib_device_supports(device, (device)->ops->operation != NULL, #operation)
nib_status nib_device_supports(const nib_device *device, bool has, const char *operation);

/* Bytes between any two devices, or within one; waits for the one that is read where they differ. */
nib_status nib_device_move(nib_device *to_device, void *to, nib_device *from_device, const void *from, size_t bytes);

/* ---- Arrays, of which only the device knows what is in them ---- */

/* Whether elements follow one another in C's order; an array without any has no gaps. */
bool nib_array_is_contiguous(const nib_array *array);

static inline char *nib_array_first(const nib_array *array) { return (char *)array->data + array->offset; }

#endif
