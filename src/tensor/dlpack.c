/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlpack.c - plain arrays and parts of tensors to and from DLPack, without a copy.
 *
 * The structs below are DLPack's binary interface, of both generations, under names of our own: nib_dlpack.h only
 * forward-declares the two that have a tag, so that it goes together with whatever dlpack.h a program includes.
 */
#include "nib_dlpack.h"
#include "tensor/tensor.h"

enum { HOST = 1, CUDA_HOST = 3, ROCM_HOST = 11 }; /* device types whose memory the CPU can read */
enum {
    INT = 0,
    UINT = 1,
    FLOAT = 2,
    BFLOAT = 4,
    COMPLEX = 5,
    BOOL = 6,
    E4M3FN = 10,
    E4M3FNUZ = 11,
    E5M2 = 12,
    E5M2FNUZ = 13,
    E8M0FNU = 14
};
enum { READ_ONLY = 1, MAJOR_VERSION = 1, MINOR_VERSION = 1 }; /* 1.1 has the 8-bit floats */

struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* strides NULL: C order */
    uint64_t byte_offset;
};

struct DLManagedTensor {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct DLManagedTensor *self);
};

struct DLManagedTensorVersioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    struct dl_tensor tensor;
};

static const struct {
    uint8_t code, bits;
    nib_dtype dtype;
} dtypes[] = {
    { UINT, 8, NIB_U8 },           { INT, 8, NIB_I8 },     { INT, 16, NIB_I16 },
    { UINT, 16, NIB_U16 },         { INT, 32, NIB_I32 },   { UINT, 32, NIB_U32 },
    { INT, 64, NIB_I64 },          { UINT, 64, NIB_U64 },  { FLOAT, 16, NIB_F16 },
    { FLOAT, 32, NIB_F32 },        { FLOAT, 64, NIB_F64 }, { BFLOAT, 16, NIB_BF16 },
    { COMPLEX, 64, NIB_C64 },      { BOOL, 8, NIB_BOOL },  { E4M3FN, 8, NIB_E4M3 },
    { E4M3FNUZ, 8, NIB_E4M3FNUZ }, { E5M2, 8, NIB_E5M2 },  { E5M2FNUZ, 8, NIB_E5M2FNUZ },
    { E8M0FNU, 8, NIB_E8M0 },
};

/* ---- In ---- */

static nib_status dtype_of(const struct dl_tensor *in, nib_dtype *out)
{
    for (size_t i = 0; in->lanes == 1 && i < sizeof dtypes / sizeof *dtypes; i++)
        if (dtypes[i].code == in->code && dtypes[i].bits == in->bits) {
            *out = dtypes[i].dtype;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_DTYPE, "DLPack type code %d with %d bits and %d lanes is not one that nib has",
                    (int)in->code, (int)in->bits, (int)in->lanes);
}

/* Whether a tensor is where the caller says. */
static nib_status check_place(const struct dl_tensor *in, const nib_device *device)
{
    const bool of_host = in->device_type == HOST || in->device_type == CUDA_HOST || in->device_type == ROCM_HOST;
    if (nib_device_is_host(device) ? of_host
                                   : in->device_type == device->ops->dlpack_type && in->device_id == device->ordinal)
        return NIB_OK;
    return nib_fail(NIB_ERR_DEVICE, "a DLPack tensor on device type %d, id %d, is not on %s", (int)in->device_type,
                    (int)in->device_id, nib_device_name(device));
}

/* DLPack does not say how much memory there is: take what shape and strides reach. */
static nib_status array_of(const struct dl_tensor *in, nib_device *device, nib_array *out)
{
    nib_array array = { .rank = in->rank, .device = device };
    TRY(check_place(in, device));
    TRY(dtype_of(in, &array.dtype));
    int64_t elements = 0, low = 0, high = 0;
    TRY(nib_check_shape("a DLPack tensor", in->rank, in->shape, &elements));
    const int64_t size = nib_dtypes[array.dtype].bits / 8;
    int64_t stride = 1;
    for (int i = in->rank - 1; i >= 0; i--) {
        array.shape[i] = in->shape[i];
        array.strides[i] = in->strides ? in->strides[i] : stride;
        stride *= in->shape[i] ? in->shape[i] : 1;
        int64_t reach;
        if (elements && (!nib_mul(in->shape[i] - 1, array.strides[i], &reach) || !nib_mul(reach, size, &reach) ||
                         !nib_add(reach < 0 ? low : high, reach, reach < 0 ? &low : &high)))
            return nib_fail(NIB_ERR_SHAPE, "a DLPack tensor: stride %lld of dim %d reaches too far",
                            (long long)array.strides[i], i);
    }
    if (elements) {
        int64_t span;
        const uintptr_t first = (uintptr_t)in->data + in->byte_offset;
        if (!in->data)
            return nib_fail(NIB_ERR_ARG, "a DLPack tensor's data is NULL");
        if (in->byte_offset > UINTPTR_MAX - (uintptr_t)in->data)
            return nib_fail(NIB_ERR_SHAPE, "a DLPack tensor: byte_offset %llu reaches beyond any memory",
                            (unsigned long long)in->byte_offset);
        if (low == INT64_MIN || !nib_add(high, -low, &span) || !nib_add(span, size, &span) || first < (uintptr_t)-low ||
            first > UINTPTR_MAX - (uintptr_t)high - (uintptr_t)size)
            return nib_fail(NIB_ERR_SHAPE, "a DLPack tensor: its strides reach beyond any memory");
        array.data = (void *)(first - (uintptr_t)-low);
        array.offset = (size_t)-low;
        array.bytes = (size_t)span;
    }
    TRY(nib_check_array("a DLPack tensor", &array));
    *out = array;
    return NIB_OK;
}

static nib_status check_version(const struct DLManagedTensorVersioned *managed)
{
    if (managed->major != MAJOR_VERSION)
        return nib_fail(NIB_ERR_UNSUPPORTED, "DLPack version %u.%u", (unsigned)managed->major,
                        (unsigned)managed->minor);
    return NIB_OK;
}

nib_status nib_array_from_dlpack(const struct DLManagedTensor *managed, nib_device *device, nib_array *out)
{
    NIB_REQUIRE(managed);
    NIB_REQUIRE(out);
    return array_of(&managed->tensor, device, out);
}

nib_status nib_array_from_dlpack_versioned(const struct DLManagedTensorVersioned *managed, nib_device *device,
                                           nib_array *out)
{
    NIB_REQUIRE(managed);
    NIB_REQUIRE(out);
    TRY(check_version(managed));
    return array_of(&managed->tensor, device, out);
}

static nib_status contiguous_bytes(const struct dl_tensor *in, nib_device *device, nib_array *out)
{
    TRY(array_of(in, device, out));
    return nib_array_is_contiguous(out)
               ? NIB_OK
               : nib_fail(NIB_ERR_SHAPE, "a DLPack tensor that becomes a buffer must be C-contiguous");
}

static void release_managed(void *context)
{
    struct DLManagedTensor *managed = context;
    if (managed->deleter)
        managed->deleter(managed);
}

static void release_versioned(void *context)
{
    struct DLManagedTensorVersioned *managed = context;
    if (managed->deleter)
        managed->deleter(managed);
}

nib_status nib_buffer_from_dlpack(struct DLManagedTensor *managed, nib_device *device, nib_buffer **out)
{
    NIB_REQUIRE(managed);
    NIB_REQUIRE(out);
    nib_array array = { 0 };
    TRY(contiguous_bytes(&managed->tensor, device, &array));
    return nib_buffer_borrow(array.data, array.bytes, device, release_managed, managed, out);
}

nib_status nib_buffer_from_dlpack_versioned(struct DLManagedTensorVersioned *managed, nib_device *device,
                                            nib_buffer **out)
{
    NIB_REQUIRE(managed);
    NIB_REQUIRE(out);
    nib_array array = { 0 };
    TRY(check_version(managed));
    if (managed->flags & READ_ONLY)
        return nib_fail(NIB_ERR_ARG, "a read-only DLPack tensor cannot become a buffer, which updates write to");
    TRY(contiguous_bytes(&managed->tensor, device, &array));
    return nib_buffer_borrow(array.data, array.bytes, device, release_versioned, managed, out);
}

/* ---- Out ---- */

/* One allocation: the managed tensor, and the dims that it points to. */
struct exported {
    union {
        struct DLManagedTensor plain;
        struct DLManagedTensorVersioned versioned;
    } managed;
    nib_buffer *owner;
    int64_t shape[NIB_MAX_RANK], strides[NIB_MAX_RANK];
};

static void free_exported(struct exported *exported)
{
    nib_buffer_release(exported->owner);
    nib_free(exported);
}

static void delete_plain(struct DLManagedTensor *self) { free_exported(self->context); }
static void delete_versioned(struct DLManagedTensorVersioned *self) { free_exported(self->context); }

static nib_status export_array(const nib_array *array, nib_buffer *owner, struct dl_tensor *tensor,
                               struct exported **out)
{
    TRY(nib_check_array("array", array));
    size_t row = 0;
    while (row < sizeof dtypes / sizeof *dtypes && dtypes[row].dtype != array->dtype)
        row++;
    if (row == sizeof dtypes / sizeof *dtypes)
        return nib_fail(NIB_ERR_DTYPE, "DLPack has no type for %s", nib_dtypes[array->dtype].name);
    struct exported *exported = nib_alloc_zeroed(sizeof *exported);
    if (!exported)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a DLPack tensor");
    exported->owner = nib_buffer_retain(owner);
    memcpy(exported->shape, array->shape, sizeof array->shape);
    memcpy(exported->strides, array->strides, sizeof array->strides);
    *tensor = (struct dl_tensor){ .data = array->data,
                                  .device_type = nib_device_of(array->device)->ops->dlpack_type,
                                  .device_id = (int32_t)nib_max(nib_device_of(array->device)->ordinal, 0),
                                  .rank = array->rank,
                                  .code = dtypes[row].code,
                                  .bits = dtypes[row].bits,
                                  .lanes = 1,
                                  .shape = exported->shape,
                                  .strides = exported->strides,
                                  .byte_offset = array->offset };
    *out = exported;
    return NIB_OK;
}

nib_status nib_array_to_dlpack(const nib_array *array, nib_buffer *owner, struct DLManagedTensor **out)
{
    NIB_REQUIRE(out);
    struct dl_tensor tensor = { 0 };
    struct exported *exported = NULL;
    TRY(export_array(array, owner, &tensor, &exported));
    exported->managed.plain = (struct DLManagedTensor){ tensor, exported, delete_plain };
    *out = &exported->managed.plain;
    return NIB_OK;
}

nib_status nib_array_to_dlpack_versioned(const nib_array *array, nib_buffer *owner,
                                         struct DLManagedTensorVersioned **out)
{
    NIB_REQUIRE(out);
    struct dl_tensor tensor = { 0 };
    struct exported *exported = NULL;
    TRY(export_array(array, owner, &tensor, &exported));
    exported->managed.versioned =
        (struct DLManagedTensorVersioned){ MAJOR_VERSION, MINOR_VERSION, exported, delete_versioned, 0, tensor };
    *out = &exported->managed.versioned;
    return NIB_OK;
}

/* A part as it is exchanged: few readers know E4M3, so that scales leave as bytes. */
static nib_status exchanged_part(const nib_tensor *t, nib_part part, nib_array *out)
{
    TRY(nib_tensor_part(t, part, out));
    if (out->dtype != NIB_F32)
        out->dtype = NIB_U8;
    return NIB_OK;
}

nib_status nib_tensor_to_dlpack(const nib_tensor *t, nib_part part, struct DLManagedTensor **out)
{
    nib_array array = { 0 };
    TRY(exchanged_part(t, part, &array));
    return nib_array_to_dlpack(&array, t->parts[part], out);
}

nib_status nib_tensor_to_dlpack_versioned(const nib_tensor *t, nib_part part, struct DLManagedTensorVersioned **out)
{
    nib_array array = { 0 };
    TRY(exchanged_part(t, part, &array));
    return nib_array_to_dlpack_versioned(&array, t->parts[part], out);
}
