/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - what all devices have in common: names, references, which are the same, and copies between two of them.
 */
#include "base/device.h"
#include "base/threads.h"

#include <stdio.h>

void nib_device_init(nib_device *device, const struct nib_device_ops *ops, int ordinal)
{
    *device = (nib_device){ .ops = ops, .ordinal = ordinal };
    atomic_init(&device->references, 1);
    if (ordinal < 0)
        snprintf(device->name, sizeof device->name, "%s", ops->kind);
    else
        snprintf(device->name, sizeof device->name, "%s:%d", ops->kind, ordinal);
}

/* Never counted: the default is always there. */
static nib_device default_host = { .ops = &nib_host_ops, .ordinal = -1, .name = "host" };

static nib_device serial_host = { .ops = &nib_host_ops, .ordinal = -1, .threads = 1, .name = "host" };

nib_device *nib_serial_host(void) { return &serial_host; }

/* Those that are always there. */
static bool is_static(const nib_device *device) { return device == &default_host || device == &serial_host; }

nib_device *nib_device_of(nib_device *device) { return device ? device : &default_host; }

bool nib_device_is_host(const nib_device *device) { return !device || device->ops == &nib_host_ops; }

bool nib_device_same(const nib_device *a, const nib_device *b)
{
    if (nib_device_is_host(a) || nib_device_is_host(b))
        return nib_device_is_host(a) && nib_device_is_host(b);
    return a->ordinal == b->ordinal && strcmp(a->ops->kind, b->ops->kind) == 0;
}

const char *nib_device_name(const nib_device *device) { return device ? device->name : default_host.name; }

nib_device *nib_device_retain(nib_device *device)
{
    if (device && !is_static(device))
        atomic_fetch_add_explicit(&device->references, 1, memory_order_relaxed);
    return device;
}

void nib_device_release(nib_device *device)
{
    if (!device || is_static(device) || atomic_fetch_sub_explicit(&device->references, 1, memory_order_acq_rel) != 1)
        return;
    device->ops->destroy(device);
}

nib_status nib_check_same_device(const char *what, const nib_device *a, const char *other, const nib_device *b)
{
    if (nib_device_same(a, b))
        return NIB_OK;
    return nib_fail(NIB_ERR_DEVICE, "%s is on %s and %s on %s: a call takes one device (nib_tensor_to moves a tensor)",
                    what, nib_device_name(a), other, nib_device_name(b));
}

nib_status nib_check_host(const char *call, const nib_device *device)
{
    if (nib_device_is_host(device))
        return NIB_OK;
    return nib_fail(NIB_ERR_UNSUPPORTED, "%s does not run on %s: move the data to the host first (nib_tensor_to)", call,
                    device->name);
}

nib_status nib_device_supports(const nib_device *device, bool has, const char *operation)
{
    return has ? NIB_OK : nib_fail(NIB_ERR_UNSUPPORTED, "%s has no %s", device->name, operation);
}

/* Between two devices neither of which is the host, through a buffer of the host's. */
static nib_status bounce(nib_device *to_device, char *to, nib_device *from_device, const char *from, size_t bytes)
{
    enum { CHUNK = 1 << 20 };
    const size_t chunk = bytes < CHUNK ? bytes : CHUNK;
    void *buffer = nib_alloc(chunk);
    if (!buffer)
        return nib_fail(NIB_ERR_MEMORY, "no memory to copy from %s to %s", from_device->name, to_device->name);
    nib_status status = NIB_OK;
    for (size_t done = 0; done < bytes && !status; done += chunk) {
        const size_t n = bytes - done < chunk ? bytes - done : chunk;
        status = from_device->ops->read(from_device, buffer, from + done, n);
        if (!status)
            status = to_device->ops->write(to_device, to + done, buffer, n);
    }
    nib_free(buffer);
    return status;
}

nib_status nib_device_move(nib_device *to_device, void *to, nib_device *from_device, const void *from, size_t bytes)
{
    to_device = nib_device_of(to_device);
    from_device = nib_device_of(from_device);
    if (!bytes)
        return NIB_OK;
    if (nib_device_same(to_device, from_device))
        return to_device->ops->copy(to_device, to, from, bytes);
    if (nib_device_is_host(from_device))
        return to_device->ops->write(to_device, to, from, bytes);
    if (nib_device_is_host(to_device))
        return from_device->ops->read(from_device, to, from, bytes);
    return bounce(to_device, to, from_device, from, bytes);
}

/* ---- Arrays ---- */

bool nib_array_is_contiguous(const nib_array *array)
{
    int64_t stride = 1;
    for (int i = array->rank - 1; i >= 0 && array->bytes; i--) {
        if (array->shape[i] > 1 && array->strides[i] != stride)
            return false;
        stride *= array->shape[i];
    }
    return true;
}

/* The elements below dim `dim`, one by one. */
static void copy_elements(const nib_array *from, const char *source, const nib_array *to, char *target, int dim)
{
    const int64_t size = nib_dtypes[from->dtype].bits / 8;
    if (dim == from->rank) {
        memcpy(target, source, (size_t)size);
        return;
    }
    for (int64_t i = 0; i < from->shape[dim]; i++)
        copy_elements(from, source + i * from->strides[dim] * size, to, target + i * to->strides[dim] * size, dim + 1);
}

nib_status nib_array_copy(const nib_array *from, const nib_array *to)
{
    int64_t elements = 0;
    TRY(nib_check_array("from", from));
    TRY(nib_check_output("to", to));
    TRY(nib_check_shape("from", from->rank, from->shape, &elements));
    bool same = from->dtype == to->dtype && from->rank == to->rank;
    for (int i = 0; same && i < from->rank; i++)
        same = from->shape[i] == to->shape[i];
    if (!same)
        return nib_fail(NIB_ERR_MISMATCH, "nib_array_copy: the arrays differ in dtype or shape");
    if (!elements)
        return NIB_OK;
    if (nib_array_is_contiguous(from) && nib_array_is_contiguous(to))
        return nib_device_move(to->device, nib_array_first(to), from->device, nib_array_first(from),
                               (size_t)(elements * (nib_dtypes[from->dtype].bits / 8)));
    if (!nib_device_is_host(from->device) || !nib_device_is_host(to->device))
        return nib_fail(NIB_ERR_UNSUPPORTED, "nib_array_copy from %s to %s takes C-contiguous arrays",
                        nib_device_name(from->device), nib_device_name(to->device));
    copy_elements(from, nib_array_first(from), to, nib_array_first(to), 0);
    return NIB_OK;
}
