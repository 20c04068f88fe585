/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_dlpack.c - any fields of a DLPack tensor: accepted exactly where a model in wide integers says so, with the memory
 * that it says; read where that memory is there; taken over once and deleted once; and the same after a way out and in.
 */
#define _GNU_SOURCE
#include <stdbool.h>

#include "nib_dlpack.h"
#include "dlpack_structs.h"
#include "fuzz.h"

static int deleted;
static void delete_plain(struct DLManagedTensor *self) { deleted += self->manager_ctx == &deleted; }
static void delete_versioned(struct DLManagedTensorVersioned *self) { deleted += self->manager_ctx == &deleted; }

/* Code and bits in one value, as a table of its own; what is not in it is no dtype of nib's. */
static int bytes_of(int code, int bits)
{
    static const int known[] = { 0x008, 0x010, 0x020, 0x040, 0x108, 0x110, 0x120, 0x140, 0x210, 0x220,
                                 0x240, 0x410, 0x540, 0x608, 0xa08, 0xb08, 0xc08, 0xd08, 0xe08 };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i] == (code << 8 | bits))
            return bits / 8;
    return 0;
}

/* ---- What an input is ---- */

enum { MEMORY = 4096, MOST = 10 }; /* dims: two more than nib takes */
static _Alignas(64) uint8_t memory[MEMORY];

struct drawn {
    DLTensor tensor;
    int64_t shape[MOST], strides[MOST];
    uint32_t major;
    uint64_t flags;
};

/* Small values mostly, of either sign where that makes sense, now and then any 64 bits. */
static int64_t draw_dim(struct draws *d, int low)
{
    const int kind = draw(d, 8);
    if (kind == 7)
        return (int64_t)draw_bytes(d, 8);
    if (kind == 6)
        return (int64_t)1 << draw(d, 63);
    return draw(d, 40) - low;
}

static void draw_tensor(struct draws *d, struct drawn *out)
{
    static const uint8_t codes[] = { 0, 1, 2, 4, 5, 6, 10, 11, 12, 13, 14, 3, 255 }, widths[] = { 8, 16, 32, 64, 4, 0 };
    static const int32_t places[] = { 1, 1, 1, 1, 3, 11, 2, 13, 0, -1 };
    const uint32_t major = draw(d, 16) ? 1 : (uint32_t)draw_bytes(d, 4);
    *out = (struct drawn){ .major = major, .flags = (uint64_t)draw(d, 4) };
    DLTensor *t = &out->tensor;
    t->device.device_type = places[draw(d, (int)sizeof places / 4)];
    t->device.device_id = draw(d, 3);
    t->dtype.code = codes[draw(d, (int)sizeof codes)];
    t->dtype.bits = widths[draw(d, (int)sizeof widths)];
    t->dtype.lanes = (uint16_t)(draw(d, 8) ? 1 : draw_bytes(d, 2));
    const int rank = draw(d, 16);
    t->ndim = rank <= MOST ? rank : rank == 11 ? -1 : rank - 12;
    for (int i = 0; i < t->ndim; i++)
        out->shape[i] = draw_dim(d, 1);
    t->shape = draw(d, 32) ? out->shape : NULL;
    t->strides = draw(d, 2) ? out->strides : NULL;
    for (int i = 0; t->strides && i < t->ndim; i++)
        out->strides[i] = draw_dim(d, 20);
    t->data = draw(d, 16) ? memory : NULL;
    t->byte_offset = draw(d, 8) ? (uint64_t)draw(d, 256) * 8 : draw_bytes(d, 8);
}

/* ---- The model ---- */

__extension__ typedef __int128 wide;
#define LARGEST (INT64_MAX / 16) /* elements of any array */

struct expected {
    bool accepted, contiguous;
    int64_t elements;
    wide first, end; /* addresses */
    int64_t strides[MOST];
};

static struct expected model_of(const DLTensor *t)
{
    struct expected e = { .accepted = true, .contiguous = true, .elements = 1 };
    const int size = t->dtype.lanes == 1 ? bytes_of(t->dtype.code, t->dtype.bits) : 0;
    e.accepted &= (t->device.device_type == 1 || t->device.device_type == 3 || t->device.device_type == 11) && size > 0;
    e.accepted &= t->ndim >= 0 && t->ndim <= NIB_MAX_RANK && (t->ndim == 0 || t->shape);
    if (!e.accepted)
        return e;
    wide product = 1, low = 0, high = 0;
    bool empty = false;
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] < 0)
            e.accepted = false;
        else if (t->shape[i] == 0)
            empty = true;
        else if (product <= LARGEST) /* the others' product must fit, even where one is 0 */
            product *= t->shape[i];
    e.accepted &= product <= LARGEST;
    if (!e.accepted)
        return e;
    e.elements = empty ? 0 : (int64_t)product;
    int64_t step = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        e.strides[i] = t->strides ? t->strides[i] : step;
        e.contiguous &= empty || t->shape[i] == 1 || e.strides[i] == step;
        step *= t->shape[i] ? t->shape[i] : 1;
        const wide reach = (wide)(t->shape[i] - 1) * e.strides[i] * size;
        low += !empty && reach < 0 ? reach : 0;
        high += !empty && reach > 0 ? reach : 0;
    }
    if (empty)
        return e;
    const wide origin = (wide)(uintptr_t)t->data + t->byte_offset;
    e.first = origin + low;
    e.end = origin + high + size;
    e.accepted &= t->data && e.first >= 0 && e.end <= UINTPTR_MAX && e.end - e.first <= INT64_MAX;
    e.accepted &= origin % size == 0;
    return e;
}

/* ---- What nib makes of it ---- */

static void read_elements(const nib_array *array, const struct expected *e, const DLTensor *t)
{
    static uint8_t got[1 << 16];
    const int size = t->dtype.bits / 8;
    nib_array out;
    if (e->elements == 0 || e->first < (uintptr_t)memory || e->end > (uintptr_t)(memory + MEMORY) ||
        e->elements * size > (int64_t)sizeof got)
        return;
    require(!nib_array_init(&out, got, array->dtype, array->rank, array->shape), "an array");
    require(!nib_array_copy(array, &out), "reading it");
    for (int64_t n = 0; n < e->elements; n++) {
        const uint8_t *at = (uint8_t *)t->data + t->byte_offset;
        int64_t rest = n, reach = 0;
        for (int i = t->ndim - 1; i >= 0; i--) {
            reach += rest % t->shape[i] * e->strides[i];
            rest /= t->shape[i];
        }
        require(!memcmp(got + n * size, at + reach * size, (size_t)size), "an element");
    }
}

static bool same_array(const nib_array *a, const nib_array *b)
{
    bool same = a->dtype == b->dtype && a->rank == b->rank && a->device == b->device;
    same &= a->bytes == b->bytes && (!a->bytes || (char *)a->data + a->offset == (char *)b->data + b->offset);
    for (int i = 0; same && i < a->rank; i++)
        same = a->shape[i] == b->shape[i] && a->strides[i] == b->strides[i];
    return same;
}

static void send_back(const nib_array *array)
{
    struct DLManagedTensor *plain = NULL;
    struct DLManagedTensorVersioned *versioned = NULL;
    nib_array again, also;
    require(!nib_array_to_dlpack(array, NULL, &plain) && !nib_array_to_dlpack_versioned(array, NULL, &versioned),
            "out");
    if (array->bytes) { /* data NULL, which has no elements, would be another case */
        require(!nib_array_from_dlpack(plain, NULL, &again) && same_array(array, &again), "out and in");
        require(!nib_array_from_dlpack_versioned(versioned, NULL, &also) && same_array(array, &also), "the same, 1.x");
    }
    plain->deleter(plain);
    versioned->deleter(versioned);
}

static void take_over(struct DLManagedTensor *plain, struct DLManagedTensorVersioned *versioned,
                      const struct expected *e)
{
    nib_buffer *buffer = NULL;
    deleted = 0;
    const bool taken = !nib_buffer_from_dlpack(plain, NULL, &buffer);
    require(taken == (e->accepted && e->contiguous) && taken == (buffer != NULL) && deleted == 0, "a buffer");
    if (taken && e->elements)
        require(nib_buffer_data(buffer) == (void *)(uintptr_t)e->first &&
                    nib_buffer_bytes(buffer) == (size_t)(e->end - e->first),
                "its memory");
    nib_buffer_release(buffer);
    require(deleted == taken, "one deletion");
    buffer = NULL;
    deleted = 0;
    const bool also = !nib_buffer_from_dlpack_versioned(versioned, NULL, &buffer);
    require(also == (taken && versioned->version.major == 1 && !(versioned->flags & 1)), "a buffer of 1.x");
    nib_buffer_release(buffer);
    require(deleted == also, "one deletion of 1.x");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    struct draws d = { bytes, count };
    struct drawn drawn;
    if (!memory[1])
        for (int i = 0; i < MEMORY; i++)
            memory[i] = (uint8_t)(i * 167 + i / 256);
    draw_tensor(&d, &drawn);
    struct DLManagedTensor plain = { drawn.tensor, &deleted, delete_plain };
    struct DLManagedTensorVersioned versioned = {
        { drawn.major, 0 }, &deleted, delete_versioned, drawn.flags, drawn.tensor
    };
    const struct expected e = model_of(&drawn.tensor);
    nib_array array = { .rank = -7 }, also = { .rank = -7 };
    const nib_status status = nib_array_from_dlpack(&plain, NULL, &array);
    const nib_status second = nib_array_from_dlpack_versioned(&versioned, NULL, &also);
    require(!status == e.accepted, e.accepted ? "accepted by the model" : "rejected by the model");
    require(drawn.major == 1 ? second == status : second == NIB_ERR_UNSUPPORTED, "the same of 1.x");
    require(status || array.rank == drawn.tensor.ndim, "the rank");
    require(!status || (array.rank == -7 && also.rank == -7 && *nib_last_error()), "untouched");
    if (!status) {
        require(!e.elements || ((wide)(uintptr_t)array.data == e.first && array.bytes == (size_t)(e.end - e.first)),
                "the memory");
        read_elements(&array, &e, &drawn.tensor);
        send_back(&array);
    }
    take_over(&plain, &versioned, &e);
    return 0;
}
