/* SPDX-License-Identifier: Apache-2.0 */
/*
 * buffer.c - reference-counted bytes on a device.
 */
#include "base/device.h"

struct nib_buffer {
    atomic_size_t references;
    void *data;
    size_t bytes;
    nib_device *device; /* NULL: the default host */
    bool owned;         /* the memory came from the device and goes back to it */
    void (*release)(void *context);
    void *context;
};

static nib_status create(nib_buffer buffer, nib_buffer **out)
{
    nib_buffer *created = nib_alloc(sizeof *created);
    if (!created)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a buffer");
    *created = buffer;
    atomic_init(&created->references, 1);
    nib_device_retain(created->device);
    *out = created;
    return NIB_OK;
}

nib_status nib_buffer_borrow(void *data, size_t bytes, nib_device *device, void (*release)(void *context),
                             void *context, nib_buffer **out)
{
    NIB_REQUIRE(out);
    if (!data && bytes)
        return nib_fail(NIB_ERR_ARG, "nib_buffer_borrow: data is NULL but has %zu bytes", bytes);
    return create(
        (nib_buffer){ .data = data, .bytes = bytes, .device = device, .release = release, .context = context }, out);
}

nib_status nib_buffer_create(size_t bytes, nib_device *device, nib_buffer **out)
{
    NIB_REQUIRE(out);
    nib_device *const on = nib_device_of(device);
    void *data = NULL;
    TRY(on->ops->allocate(on, bytes, &data));
    const nib_status status =
        create((nib_buffer){ .data = data, .bytes = bytes, .device = device, .owned = true }, out);
    if (status)
        on->ops->free(on, data);
    return status;
}

nib_buffer *nib_buffer_retain(nib_buffer *buffer)
{
    if (buffer)
        atomic_fetch_add_explicit(&buffer->references, 1, memory_order_relaxed);
    return buffer;
}

void nib_buffer_release(nib_buffer *buffer)
{
    /* acq_rel: whoever frees must see every write made through the other references. */
    if (!buffer || atomic_fetch_sub_explicit(&buffer->references, 1, memory_order_acq_rel) != 1)
        return;
    nib_device *const on = nib_device_of(buffer->device);
    if (buffer->owned)
        on->ops->free(on, buffer->data);
    if (buffer->release)
        buffer->release(buffer->context);
    nib_device_release(buffer->device);
    nib_free(buffer);
}

bool nib_buffer_is_shared(const nib_buffer *buffer)
{
    return atomic_load_explicit(&buffer->references, memory_order_acquire) > 1;
}

void *nib_buffer_data(const nib_buffer *buffer) { return buffer ? buffer->data : NULL; }

size_t nib_buffer_bytes(const nib_buffer *buffer) { return buffer ? buffer->bytes : 0; }

nib_device *nib_buffer_device(const nib_buffer *buffer) { return buffer ? buffer->device : NULL; }
