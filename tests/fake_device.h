/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_device.h - a device whose memory nobody can touch but its own operations.
 *
 * Its memory is pages without access, which every operation opens, does what the host does, and closes again: a layer
 * above the seam (base/device.h) that follows a pointer into it crashes. Under AddressSanitizer it is poisoned instead,
 * which asks nothing of the kernel. Pages nobody may ever touch lie on both sides (a few poisoned bytes there), and what
 * lies between data and page is seen to be untouched when the memory goes. Operations see to it that pointers are of the
 * device (or of the host) where they should be, and abort otherwise.
 *
 * The n-th operation from now on fails by fake_fail_at, and fake_ops has the device's own table: an operation that is
 * set to NULL is one that the device does not have.
 */
#ifndef NIB_FAKE_DEVICE_H
#define NIB_FAKE_DEVICE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/device.h"
#include "base/threads.h"
#include "format/format.h"
#include "kernels/product.h"
#include "sanitized.h"
#if SANITIZED
#include <sanitizer/asan_interface.h>
#endif

enum { FAKE_DLPACK_TYPE = 12 }; /* kDLExtDev */
enum { FAKE_OPERATIONS = sizeof(struct nib_device_ops) / sizeof(void *), FAKE_FILLER = 0xA5 };

struct fake_device {
    nib_device base;
    struct nib_device_ops ops;
    atomic_long calls, fail_at; /* calls so far; which of them fails, 0 for none */
    atomic_long by_operation[FAKE_OPERATIONS];
};

struct fake_memory {
    char *pages, *data;
    size_t inner; /* bytes between the two pages that guard them */
    size_t bytes;
    int ordinal;
    struct fake_memory *next;
};

static pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_memory *fake_memories;
static int fake_depth; /* operations in progress, of all threads */
static atomic_long fake_live_devices, fake_live_memories;

/* What is still there, of memory and devices. */
static inline long fake_live(void) { return fake_live_devices + fake_live_memories; }

static inline struct fake_device *fake_of(nib_device *device) { return (struct fake_device *)device; }
static inline struct nib_device_ops *fake_ops(nib_device *device) { return &fake_of(device)->ops; }
static inline long fake_calls(nib_device *device) { return fake_of(device)->calls; }

/* The n-th call from now on fails, or none where n is 0. */
static inline void fake_fail_at(nib_device *device, long n)
{
    fake_of(device)->fail_at = n ? fake_of(device)->calls + n : 0;
}

__attribute__((noreturn)) static inline void fake_abort(const char *what)
{
    fprintf(stderr, "fake device: %s\n", what);
    abort();
}

/* ---- Doors ---- */

#if SANITIZED
static inline size_t fake_page(void) { return 64; }

/* What is beside the data stays poisoned as long as the memory is there. */
static inline void fake_set_access(const struct fake_memory *memory, bool open)
{
    if (open)
        __asan_unpoison_memory_region(memory->data, memory->bytes);
    else
        __asan_poison_memory_region(memory->data, memory->bytes);
}

static inline void *fake_map(size_t bytes)
{
    void *memory;
    return posix_memalign(&memory, 64, bytes) ? NULL : memory;
}

static inline void fake_unmap(void *memory, size_t bytes)
{
    (void)bytes;
    free(memory);
}

/* From its first byte to its last, at both ends of its life. */
static inline void fake_set_pages(const struct fake_memory *memory, bool open)
{
    if (open)
        __asan_unpoison_memory_region(memory->pages, memory->inner + 2 * fake_page());
    else
        __asan_poison_memory_region(memory->pages, memory->inner + 2 * fake_page());
}
#else
static inline size_t fake_page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static inline void fake_set_access(const struct fake_memory *memory, bool open)
{
    if (mprotect(memory->pages + fake_page(), memory->inner, open ? PROT_READ | PROT_WRITE : PROT_NONE))
        fake_abort("mprotect failed");
}

static inline void *fake_map(size_t bytes)
{
    void *const memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static inline void fake_unmap(void *memory, size_t bytes) { munmap(memory, bytes); }
static inline void fake_set_pages(const struct fake_memory *memory, bool open) { fake_set_access(memory, open); }
#endif

static inline void fake_open(void)
{
    pthread_mutex_lock(&fake_lock);
    if (fake_depth++ == 0)
        for (const struct fake_memory *m = fake_memories; m; m = m->next)
            fake_set_access(m, true);
    pthread_mutex_unlock(&fake_lock);
}

static inline void fake_close(void)
{
    pthread_mutex_lock(&fake_lock);
    if (--fake_depth == 0)
        for (const struct fake_memory *m = fake_memories; m; m = m->next)
            fake_set_access(m, false);
    pthread_mutex_unlock(&fake_lock);
}

/* ---- Memory ---- */

/* NULL where there is none. Ends at the last page, as far as the alignment lets it. */
static inline void *fake_allocate(nib_device *device, size_t bytes, size_t alignment)
{
    const size_t page = fake_page(), taken = (bytes + alignment - 1) / alignment * alignment;
    struct fake_memory *memory = calloc(1, sizeof *memory);
    if (!memory || taken < bytes || taken > SIZE_MAX / 2) {
        free(memory);
        return NULL;
    }
    *memory = (struct fake_memory){ .inner = (taken + page) / page * page, .bytes = bytes, .ordinal = device->ordinal };
    memory->pages = fake_map(memory->inner + 2 * page);
    if (!memory->pages) {
        free(memory);
        return NULL;
    }
    memory->data = memory->pages + page + memory->inner - taken;
    fake_set_pages(memory, true);
    memset(memory->pages + page, FAKE_FILLER, memory->inner);
    memset(memory->data, 0, bytes);
    fake_set_pages(memory, false);
    pthread_mutex_lock(&fake_lock);
    if (fake_depth != 0)
        fake_set_access(memory, true);
    memory->next = fake_memories;
    fake_memories = memory;
    pthread_mutex_unlock(&fake_lock);
    fake_live_memories++;
    return memory->data;
}

static inline void fake_free(nib_device *device, void *data)
{
    pthread_mutex_lock(&fake_lock);
    struct fake_memory **link = &fake_memories;
    while (*link && (*link)->data != data)
        link = &(*link)->next;
    struct fake_memory *const memory = *link;
    if (!memory || memory->ordinal != device->ordinal)
        fake_abort("memory is freed that is not the device's");
    *link = memory->next;
    pthread_mutex_unlock(&fake_lock);
    fake_set_pages(memory, true);
    const char *const first = memory->pages + fake_page(), *const end = first + memory->inner;
    for (const char *at = first; at < end; at++)
        if ((at < memory->data || at >= memory->data + memory->bytes) && (unsigned char)*at != FAKE_FILLER)
            fake_abort("something was written beside its memory");
    fake_unmap(memory->pages, memory->inner + 2 * fake_page());
    free(memory);
    fake_live_memories--;
}

/* Whether memory is the device's, all of it: or else none of it is any device's. */
static inline bool fake_has(const nib_device *device, const void *data, size_t bytes)
{
    bool has = false;
    pthread_mutex_lock(&fake_lock);
    for (const struct fake_memory *m = fake_memories; m && !has; m = m->next) {
        const char *const at = data, *const end = m->data + m->bytes;
        if (at + bytes <= m->pages || at >= m->pages + m->inner + 2 * fake_page())
            continue;
        if (!device)
            fake_abort("host memory was wanted, and this is a device's");
        if (at < m->data || at > end || bytes > (size_t)(end - at) || m->ordinal != device->ordinal)
            fake_abort("a pointer leaves its memory, or is another device's");
        has = true;
    }
    pthread_mutex_unlock(&fake_lock);
    return has;
}

static inline void fake_want(const nib_device *device, const void *data, size_t bytes)
{
    if (data && bytes && !fake_has(device, data, bytes))
        fake_abort("a pointer that should be the device's is the host's");
}

static inline void fake_want_host(const void *data, size_t bytes)
{
    if (bytes)
        (void)fake_has(NULL, data, bytes);
}

static inline void fake_want_usage(const nib_device *device, const struct nib_usage_geometry *g,
                                   const struct nib_usage_memory *memory)
{
    fake_want(device, memory->codes, (size_t)g->data_bytes);
    fake_want(device, memory->scales, (size_t)g->scales_bytes);
    fake_want(device, memory->tensor_scales, (size_t)g->tensor_scales_bytes);
}

static inline void fake_want_array(const nib_device *device, const nib_array *array)
{
    if (!array->device || array->device->ordinal != device->ordinal)
        fake_abort("an array is of another device");
    fake_want(device, array->data, array->bytes);
}

static inline void fake_want_overrides(const nib_device *device, const nib_overrides *overrides,
                                       const struct nib_geometry *geometry)
{
    fake_want(device, overrides->scale, sizeof(float));
    fake_want(device, overrides->amax_seen, sizeof(float));
    fake_want(device, overrides->offset, sizeof *overrides->offset);
    fake_want(device, overrides->importance, (size_t)overrides->importance_count * sizeof(float));
    for (int usage = 0; usage < 2; usage++) {
        fake_want(device, overrides->amax[usage], (size_t)geometry->usage[usage].tensor_scales_bytes);
        fake_want(device, overrides->tensor_scale[usage], (size_t)geometry->usage[usage].tensor_scales_bytes);
    }
}

/* ---- Operations ---- */

static inline nib_status fake_enter(nib_device *device, size_t operation, const char *name)
{
    struct fake_device *const fake = fake_of(device);
    fake->by_operation[operation / sizeof(void *)]++;
    const long call = ++fake->calls;
    if (call == fake->fail_at)
        return nib_fail(NIB_ERR_DEVICE, "%s: %s failed, as it was told to", device->name, name);
    fake_open();
    return NIB_OK;
}

#define FAKE_ENTER(device, operation) fake_enter(device, offsetof(struct nib_device_ops, operation), #operation)
#define FAKE_RUN(device, operation, call)    \
    do {                                     \
        TRY(FAKE_ENTER(device, operation));  \
        const nib_status fake_status = call; \
        fake_close();                        \
        return fake_status;                  \
    } while (0)
/* The host's operation of the same name. */
#define FAKE_HOST(device, operation, ...) \
    FAKE_RUN(device, operation, nib_serial_host()->ops->operation(nib_serial_host(), __VA_ARGS__))

static inline void fake_destroy(nib_device *device)
{
    fake_live_devices--;
    free(device);
}

static inline nib_status fake_op_allocate(nib_device *device, size_t bytes, void **out)
{
    TRY(FAKE_ENTER(device, allocate));
    void *memory = fake_allocate(device, bytes, 64);
    fake_close();
    if (!memory)
        return nib_fail(NIB_ERR_MEMORY, "%s has no memory for %zu bytes", device->name, bytes);
    *out = memory;
    return NIB_OK;
}

static inline nib_status fake_op_write(nib_device *device, void *to, const void *host, size_t bytes)
{
    fake_want(device, to, bytes);
    fake_want_host(host, bytes);
    FAKE_HOST(device, write, to, host, bytes);
}

static inline nib_status fake_op_read(nib_device *device, void *host, const void *from, size_t bytes)
{
    fake_want(device, from, bytes);
    fake_want_host(host, bytes);
    FAKE_HOST(device, read, host, from, bytes);
}

static inline nib_status fake_op_copy(nib_device *device, void *to, const void *from, size_t bytes)
{
    fake_want(device, to, bytes);
    fake_want(device, from, bytes);
    FAKE_HOST(device, copy, to, from, bytes);
}

static inline nib_status fake_op_zero(nib_device *device, void *memory, size_t bytes)
{
    fake_want(device, memory, bytes);
    FAKE_HOST(device, zero, memory, bytes);
}

static inline nib_status fake_op_check_quantization(nib_device *device, const nib_quantizer *q,
                                                    const nib_overrides *overrides, const struct nib_geometry *geometry)
{
    fake_want_overrides(device, overrides, geometry);
    FAKE_HOST(device, check_quantization, q, overrides, geometry);
}

static inline nib_status fake_op_quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                          const nib_overrides *overrides, const float *noop,
                                          const struct nib_geometry *geometry, const struct nib_usage_memory *memory)
{
    fake_want_array(device, x);
    fake_want_overrides(device, overrides, geometry);
    fake_want(device, noop, sizeof *noop);
    for (int usage = 0; usage < 2; usage++)
        fake_want_usage(device, &geometry->usage[usage], &memory[usage]);
    nib_status status = FAKE_ENTER(device, quantize);
    if (status) /* the other ranks are waiting to hear of it */
        return nib_agree(q->amax_comm, status, 0);
    status = nib_serial_host()->ops->quantize(nib_serial_host(), q, x, overrides, noop, geometry, memory);
    fake_close();
    return status;
}

static inline nib_status fake_op_find_amaxes(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                             const struct nib_geometry *geometry, float *const amax[2])
{
    fake_want_array(device, x);
    for (int usage = 0; usage < 2; usage++)
        fake_want(device, amax[usage], (size_t)geometry->usage[usage].tensor_scales_bytes);
    FAKE_HOST(device, find_amaxes, q, x, geometry, amax);
}

static inline nib_status fake_op_fake_quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                               const nib_overrides *overrides, const struct nib_geometry *geometry,
                                               nib_usage usage, const nib_array *out)
{
    fake_want_array(device, x);
    fake_want_array(device, out);
    fake_want_overrides(device, overrides, geometry);
    const nib_status status = FAKE_ENTER(device, fake_quantize);
    if (status) /* the other ranks are waiting to hear of it */
        return nib_agree(q->amax_comm, status, 0);
    const nib_status done =
        nib_serial_host()->ops->fake_quantize(nib_serial_host(), q, x, overrides, geometry, usage, out);
    fake_close();
    return done;
}

static inline nib_status fake_op_dequantize(nib_device *device, const nib_quantizer *q,
                                            const struct nib_geometry *geometry, nib_usage from,
                                            const struct nib_usage_memory *memory, int64_t first, int64_t count,
                                            const nib_array *out)
{
    fake_want_array(device, out);
    fake_want_usage(device, &geometry->usage[from], memory);
    FAKE_HOST(device, dequantize, q, geometry, from, memory, first, count, out);
}

static inline nib_status fake_op_is_set(nib_device *device, const float *flag, bool *set)
{
    fake_want(device, flag, sizeof *flag);
    FAKE_HOST(device, is_set, flag, set);
}

/* Plain values and outputs are seen to be the device's at their first element: the whole array is not handed down. */
static inline void fake_want_side(const nib_device *device, const struct nib_side *side)
{
    if (side->q)
        fake_want_usage(device, side->geometry, &side->memory);
    else if (side->lines && side->length)
        fake_want(device, side->values, 2);
}

static inline nib_status fake_op_product(nib_device *device, const struct nib_product *products, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fake_want_side(device, &products[i].a);
        fake_want_side(device, &products[i].b);
        if (!products[i].a.lines || !products[i].b.lines)
            continue;
        fake_want(device, products[i].out.y, 2);
        fake_want(device, products[i].out.bias, 2);
    }
    FAKE_HOST(device, product, products, n);
}

static inline nib_status fake_op_fill(nib_device *device, float *values, int64_t n, float value)
{
    fake_want(device, values, (size_t)n * sizeof *values);
    FAKE_HOST(device, fill, values, n, value);
}

static inline nib_status fake_op_build_columnwise(nib_device *device, const nib_quantizer *q,
                                                  const struct nib_geometry *geometry,
                                                  const struct nib_usage_memory *rowwise,
                                                  const struct nib_usage_memory *columnwise)
{
    fake_want_usage(device, &geometry->usage[NIB_ROWWISE], rowwise);
    fake_want_usage(device, &geometry->usage[NIB_COLUMNWISE], columnwise);
    FAKE_HOST(device, build_columnwise, q, geometry, rowwise, columnwise);
}

static inline nib_status fake_op_copy_rectangle(nib_device *device, const nib_quantizer *q,
                                                const struct nib_usage_geometry *from,
                                                const struct nib_usage_memory *source, int64_t line, int64_t first,
                                                const struct nib_usage_geometry *to,
                                                const struct nib_usage_memory *target)
{
    fake_want_usage(device, from, source);
    fake_want_usage(device, to, target);
    FAKE_HOST(device, copy_rectangle, q, from, source, line, first, to, target);
}

static inline nib_status fake_op_repack_scales(nib_device *device, const struct nib_usage_geometry *from,
                                               const void *source, const struct nib_usage_geometry *to, void *target)
{
    fake_want(device, source, (size_t)(from->scale_shape[0] * from->scale_shape[1] * from->scale_bytes));
    fake_want(device, target, (size_t)to->scales_bytes);
    FAKE_HOST(device, repack_scales, from, source, to, target);
}

static inline size_t fake_tile_bytes(const struct nib_usage_geometry *g)
{
    return (size_t)(nib_round_up(g->lines, 128) * nib_round_up(g->blocks, 4) * g->scale_bytes);
}

static inline nib_status fake_op_swizzle(nib_device *device, const struct nib_usage_geometry *plain, const void *from,
                                         void *tiles)
{
    fake_want(device, from, (size_t)plain->scales_bytes);
    fake_want(device, tiles, fake_tile_bytes(plain));
    FAKE_HOST(device, swizzle, plain, from, tiles);
}

static inline nib_status fake_op_unswizzle(nib_device *device, const struct nib_usage_geometry *plain,
                                           const void *tiles, void *to)
{
    fake_want(device, tiles, fake_tile_bytes(plain));
    fake_want(device, to, (size_t)plain->scales_bytes);
    FAKE_HOST(device, unswizzle, plain, tiles, to);
}

static inline nib_status fake_op_equal(nib_device *device, const struct nib_usage_geometry *geometry,
                                       const struct nib_usage_memory *a, const struct nib_usage_memory *b, bool *out)
{
    fake_want_usage(device, geometry, a);
    fake_want_usage(device, geometry, b);
    FAKE_HOST(device, equal, geometry, a, b, out);
}

static const struct nib_device_ops fake_device_ops = {
    .kind = "fake",
    .dlpack_type = FAKE_DLPACK_TYPE,
    .destroy = fake_destroy,
    .allocate = fake_op_allocate,
    .free = fake_free,
    .write = fake_op_write,
    .read = fake_op_read,
    .copy = fake_op_copy,
    .zero = fake_op_zero,
    .check_quantization = fake_op_check_quantization,
    .weighs = true,
    .quantize = fake_op_quantize,
    .find_amaxes = fake_op_find_amaxes,
    .fake_quantize = fake_op_fake_quantize,
    .dequantize = fake_op_dequantize,
    .is_set = fake_op_is_set,
    .product = fake_op_product,
    .fill = fake_op_fill,
    .build_columnwise = fake_op_build_columnwise,
    .copy_rectangle = fake_op_copy_rectangle,
    .repack_scales = fake_op_repack_scales,
    .swizzle = fake_op_swizzle,
    .unswizzle = fake_op_unswizzle,
    .equal = fake_op_equal,
};

/* ---- For tests ---- */

static inline nib_device *fake_create(int ordinal)
{
    struct fake_device *fake = calloc(1, sizeof *fake);
    if (!fake)
        fake_abort("no memory for a device");
    fake->ops = fake_device_ops;
    nib_device_init(&fake->base, &fake->ops, ordinal);
    fake_live_devices++;
    return &fake->base;
}

/* Values of the host on the device, and back; neither counts as an operation. fake_free takes back what upload gave. */
static inline void *fake_upload(nib_device *device, const void *host, size_t bytes, size_t alignment)
{
    void *data = fake_allocate(device, bytes, alignment);
    if (!data)
        fake_abort("no memory");
    fake_open();
    if (bytes)
        memcpy(data, host, bytes);
    fake_close();
    return data;
}

static inline void fake_download(nib_device *device, void *host, const void *data, size_t bytes)
{
    fake_want(device, data, bytes);
    fake_open();
    if (bytes)
        memcpy(host, data, bytes);
    fake_close();
}

/* An array on the device like one of the host, strides and all. */
static inline nib_array fake_array(nib_device *device, const nib_array *host)
{
    nib_array array = *host;
    array.data = fake_upload(device, host->data, host->bytes, (size_t)nib_dtypes[host->dtype].bits / 8);
    array.device = device;
    return array;
}

#endif
