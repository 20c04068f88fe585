/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host.c - the host as a device: its memory, and the operations of quantize.h and layout.h behind the seam.
 */
#include "base/device.h"
#include "format/codec.h"
#include "tensor/layout.h"
#include "tensor/product.h"
#include "tensor/quantize.h"

/* ---- Life ---- */

static void destroy(nib_device *device)
{
    nib_free(device->scratch);
    nib_free(device);
}

nib_status nib_host_create(int threads, nib_device **out)
{
    NIB_REQUIRE(out);
    if (threads < 0)
        return nib_fail(NIB_ERR_ARG, "threads is 0 or more, not %d", threads);
    nib_device *device = nib_alloc(sizeof *device);
    if (!device)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a device");
    nib_device_init(device, &nib_host_ops, -1);
    device->threads = threads;
    *out = device;
    return NIB_OK;
}

/* ---- Memory ---- */

static nib_status allocate(nib_device *device, size_t bytes, void **out)
{
    (void)device;
    void *memory = nib_alloc_zeroed(bytes);
    if (!memory)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a buffer of %zu bytes", bytes);
    *out = memory;
    return NIB_OK;
}

static void free_memory(nib_device *device, void *memory)
{
    (void)device;
    nib_free(memory);
}

static nib_status copy(nib_device *device, void *to, const void *from, size_t bytes)
{
    (void)device;
    if (bytes)
        memmove(to, from, bytes);
    return NIB_OK;
}

static nib_status zero(nib_device *device, void *memory, size_t bytes)
{
    (void)device;
    if (bytes) /* an empty borrowed buffer may be NULL */
        memset(memory, 0, bytes);
    return NIB_OK;
}

/* ---- Values to codes and back ---- */

/* By the bits, so that a caller's flush-to-zero does not matter. A NaN is neither. */
static bool is_negative(float x) { return nib_bits(x) > 0x80000000u && !nib_is_nan(x); }
static bool is_positive(float x) { return nib_bits(x) - 1 < 0x7F800000u; }

/* Overrides are magnitudes and multipliers: a negative one is a mistake. (A NaN is left to the kernels.) */
static nib_status check_quantization(nib_device *device, const nib_quantizer *q, const nib_overrides *overrides,
                                     const struct nib_geometry *geometry)
{
    (void)device, (void)q;
    for (int64_t i = 0; overrides->importance && i < overrides->importance_count; i++)
        if (!is_positive(overrides->importance[i]) || overrides->importance[i] > FLT_MAX)
            return nib_fail(NIB_ERR_ARG,
                            "importance %lld is not positive and finite: nib_importance_normalize makes it so",
                            (long long)i);
    if (overrides->scale && !is_positive(*overrides->scale))
        return nib_fail(NIB_ERR_ARG, "the overriding scale is not positive");
    for (int usage = 0; usage < 2; usage++) {
        const float *const amaxes = overrides->amax[usage], *const scales = overrides->tensor_scale[usage];
        const int64_t count = amaxes || scales ? geometry->usage[usage].tensor_scales : 0;
        for (int64_t i = 0; i < count; i++) {
            const bool amax = amaxes && is_negative(amaxes[i]);
            if (amax || (scales && is_negative(scales[i])))
                return nib_fail(NIB_ERR_ARG, "the overriding %s %s %lld is negative", usage ? "columnwise" : "rowwise",
                                amax ? "amax" : "tensor scale", (long long)i);
        }
    }
    return NIB_OK;
}

static nib_status is_set(nib_device *device, const float *flag, bool *set)
{
    (void)device;
    *set = *flag == 1.0f;
    return NIB_OK;
}

/* The options with the random offset that the caller brings, if any. */
static nib_quantizer with_offset_of(const nib_quantizer *q, const nib_overrides *overrides)
{
    nib_quantizer own = *q;
    if (overrides->offset)
        own.offset = *overrides->offset;
    return own;
}

static nib_status quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                           const nib_overrides *overrides, const float *noop, const struct nib_geometry *geometry,
                           const struct nib_usage_memory *memory)
{
    if (noop && *noop == 1.0f)
        return NIB_OK;
    const nib_quantizer with_offset = with_offset_of(q, overrides);
    return nib_quantize_usages(device, &with_offset, x, overrides, geometry, memory);
}

static nib_status find_amaxes(nib_device *device, const nib_quantizer *q, const nib_array *x,
                              const struct nib_geometry *geometry, float *const amax[2])
{
    const size_t bytes[2] = { (size_t)geometry->usage[0].tensor_scales_bytes,
                              (size_t)geometry->usage[1].tensor_scales_bytes };
    float few[2], *side_by_side = few;
    if (q->row_scaled)
        side_by_side = nib_alloc(bytes[0] + bytes[1]);
    if (!side_by_side)
        return nib_fail(NIB_ERR_MEMORY, "no memory for amaxes");
    nib_find_amaxes(device, q, x, geometry, side_by_side);
    if (amax[NIB_ROWWISE])
        memcpy(amax[NIB_ROWWISE], side_by_side, bytes[0]);
    if (amax[NIB_COLUMNWISE])
        memcpy(amax[NIB_COLUMNWISE], side_by_side + (q->rowwise ? bytes[0] / sizeof(float) : 0), bytes[1]);
    if (side_by_side != few)
        nib_free(side_by_side);
    return NIB_OK;
}

/* Through codes of its own: the host gains nothing by leaving them out. */
static nib_status fake_quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                const nib_overrides *overrides, const struct nib_geometry *geometry, nib_usage usage,
                                const nib_array *out)
{
    const struct nib_usage_geometry *const g = &geometry->usage[usage];
    struct nib_usage_memory memory[2] = { 0 };
    struct nib_usage_memory *const own = &memory[usage];
    const nib_quantizer with_offset = with_offset_of(q, overrides);
    own->codes = nib_alloc((size_t)g->data_bytes);
    own->scales = g->scales_bytes ? nib_alloc((size_t)g->scales_bytes) : NULL;
    own->tensor_scales = g->tensor_scales_bytes ? nib_alloc((size_t)g->tensor_scales_bytes) : NULL;
    nib_status status = NIB_OK;
    if (!own->codes || (g->scales_bytes && !own->scales) || (g->tensor_scales_bytes && !own->tensor_scales))
        status = nib_agree(q->amax_comm, nib_fail(NIB_ERR_MEMORY, "no memory for the codes of a fake quantization"), 0);
    else
        status = nib_quantize_usages(device, &with_offset, x, overrides, geometry, memory);
    if (!status && geometry->rows && geometry->cols)
        nib_dequantize_usage(device, q, geometry, usage, own, 0, geometry->rows, out);
    nib_free(own->codes);
    nib_free(own->scales);
    nib_free(own->tensor_scales);
    return status;
}

static nib_status dequantize(nib_device *device, const nib_quantizer *q, const struct nib_geometry *geometry,
                             nib_usage from, const struct nib_usage_memory *memory, int64_t first, int64_t count,
                             const nib_array *out)
{
    nib_dequantize_usage(device, q, geometry, from, memory, first, count, out);
    return NIB_OK;
}

static nib_status product(nib_device *device, const struct nib_product *products, size_t n)
{
    return nib_products(device, nib_kernels_best(), products, n);
}

/* ---- Codes and scales from place to place ---- */

static nib_status fill(nib_device *device, float *values, int64_t n, float value)
{
    (void)device;
    for (int64_t i = 0; i < n; i++)
        values[i] = value;
    return NIB_OK;
}

static nib_status build_columnwise(nib_device *device, const nib_quantizer *q, const struct nib_geometry *geometry,
                                   const struct nib_usage_memory *rowwise, const struct nib_usage_memory *columnwise)
{
    nib_build_columnwise(device, q, geometry, rowwise, columnwise);
    return NIB_OK;
}

static nib_status copy_rectangle(nib_device *device, const nib_quantizer *q, const struct nib_usage_geometry *from,
                                 const struct nib_usage_memory *source, int64_t line, int64_t first,
                                 const struct nib_usage_geometry *to, const struct nib_usage_memory *target)
{
    (void)device;
    nib_copy_rectangle(q, from, source, line, first, to, target);
    return NIB_OK;
}

static nib_status repack_scales(nib_device *device, const struct nib_usage_geometry *from, const void *source,
                                const struct nib_usage_geometry *to, void *target)
{
    (void)device;
    nib_repack_scales(from, source, to, target);
    return NIB_OK;
}

static nib_status swizzle(nib_device *device, const struct nib_usage_geometry *plain, const void *from, void *tiles)
{
    nib_swizzle(device, plain, from, tiles);
    return NIB_OK;
}

static nib_status unswizzle(nib_device *device, const struct nib_usage_geometry *plain, const void *tiles, void *to)
{
    nib_unswizzle(device, plain, tiles, to);
    return NIB_OK;
}

static nib_status equal(nib_device *device, const struct nib_usage_geometry *geometry, const struct nib_usage_memory *a,
                        const struct nib_usage_memory *b, bool *out)
{
    (void)device;
    *out = nib_usages_equal(geometry, a, b);
    return NIB_OK;
}

const struct nib_device_ops nib_host_ops = {
    .kind = "host",
    .dlpack_type = 1, /* kDLCPU */
    .destroy = destroy,
    .allocate = allocate,
    .free = free_memory,
    .write = copy,
    .read = copy,
    .copy = copy,
    .zero = zero,
    .check_quantization = check_quantization,
    .weighs = true,
    .quantize = quantize,
    .find_amaxes = find_amaxes,
    .fake_quantize = fake_quantize,
    .dequantize = dequantize,
    .is_set = is_set,
    .product = product,
    .fill = fill,
    .build_columnwise = build_columnwise,
    .copy_rectangle = copy_rectangle,
    .repack_scales = repack_scales,
    .swizzle = swizzle,
    .unswizzle = unswizzle,
    .equal = equal,
};
