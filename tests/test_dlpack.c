/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_dlpack.c - arrays, buffers and parts of tensors through DLPack, against the binary interface as written down
 * in dlpack_structs.h.
 */
#include "dlpack_structs.h"
#include "test_tensors.h"

enum { CPU = 1, CUDA = 2, CUDA_HOST = 3, ROCM = 10, ROCM_HOST = 11, CUDA_MANAGED = 13 };
enum { READ_ONLY = 1, IS_COPIED = 2 };

/* Codes by DLPack's enum. */
static const struct {
    int code, bits;
    nib_dtype dtype;
} dtypes[] = {
    { 0, 8, NIB_I8 },    { 0, 16, NIB_I16 },  { 0, 32, NIB_I32 },      { 0, 64, NIB_I64 },      { 1, 8, NIB_U8 },
    { 1, 16, NIB_U16 },  { 1, 32, NIB_U32 },  { 1, 64, NIB_U64 },      { 2, 16, NIB_F16 },      { 2, 32, NIB_F32 },
    { 2, 64, NIB_F64 },  { 4, 16, NIB_BF16 }, { 5, 64, NIB_C64 },      { 6, 8, NIB_BOOL },      { 10, 8, NIB_E4M3 },
    { 12, 8, NIB_E5M2 }, { 14, 8, NIB_E8M0 }, { 11, 8, NIB_E4M3FNUZ }, { 13, 8, NIB_E5M2FNUZ },
};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

/* ---- Helpers ---- */

static int deleted, deleted_versioned;

static void delete (DLManagedTensor *self)
{
    deleted++;
    CHECK(self->manager_ctx == &deleted);
}

static void delete_versioned(DLManagedTensorVersioned *self)
{
    deleted_versioned++;
    CHECK(self->manager_ctx == &deleted_versioned);
}

/* A float tensor on the CPU that both generations can carry. */
static DLTensor tensor_over(void *data, int ndim, int64_t *shape, int64_t *strides)
{
    return (DLTensor){ data, { CPU, 0 }, ndim, { 2, 32, 1 }, shape, strides, 0 };
}

static DLManagedTensor managed_of(DLTensor tensor) { return (DLManagedTensor){ tensor, &deleted, delete }; }

static DLManagedTensorVersioned versioned_of(DLTensor tensor)
{
    return (DLManagedTensorVersioned){ { 1, 0 }, &deleted_versioned, delete_versioned, 0, tensor };
}

/* Both generations must say the same; gives the array and returns the status. */
static nib_status array_from(DLTensor tensor, nib_array *out)
{
    const DLManagedTensor managed = managed_of(tensor);
    const DLManagedTensorVersioned versioned = versioned_of(tensor);
    nib_array a, b;
    memset(&a, 0x5A, sizeof a);
    memset(&b, 0x5A, sizeof b);
    const nib_status first = nib_array_from_dlpack(&managed, NULL, &a),
                     second = nib_array_from_dlpack_versioned(&versioned, NULL, &b);
    CHECK(first == second);
    CHECK_BYTES(&a, &b, sizeof a);
    if (first) {
        nib_array untouched;
        memset(&untouched, 0x5A, sizeof untouched);
        CHECK_BYTES(&a, &untouched, sizeof a);
        CHECK(*nib_last_error());
    }
    *out = a;
    CHECK(deleted == 0 && deleted_versioned == 0); /* a view takes nothing over */
    return first;
}

static const void *first_element(const nib_array *array) { return (const char *)array->data + array->offset; }

static void reset(void) { deleted = deleted_versioned = 0; }

/* ---- In: arrays ---- */

TEST(array_dtypes)
{
    reset();
    static uint64_t memory[6];
    for (int code = 0; code < 20; code++)
        for (int bits = 0; bits <= 128; bits++) {
            DLTensor tensor = tensor_over(memory, 2, (int64_t[]){ 2, 3 }, NULL);
            tensor.dtype.code = (uint8_t)code;
            tensor.dtype.bits = (uint8_t)bits;
            int row = 0;
            while (row < DTYPES && (dtypes[row].code != code || dtypes[row].bits != bits))
                row++;
            nib_array array;
            if (row == DTYPES) {
                CHECK_FAILS(array_from(tensor, &array), NIB_ERR_DTYPE, "type code");
                continue;
            }
            CHECK_OK(array_from(tensor, &array));
            CHECK(array.dtype == dtypes[row].dtype && array.rank == 2 && array.shape[0] == 2 && array.shape[1] == 3);
            CHECK(array.strides[0] == 3 && array.strides[1] == 1); /* NULL is C order */
            CHECK(first_element(&array) == memory && array.bytes == (size_t)(6 * bits / 8));
        }
    for (int lanes = 0; lanes < 5; lanes++) {
        DLTensor tensor = tensor_over(memory, 1, (int64_t[]){ 2 }, NULL);
        tensor.dtype.lanes = (uint16_t)lanes;
        nib_array array;
        if (lanes == 1) {
            CHECK_OK(array_from(tensor, &array));
        } else {
            CHECK_FAILS(array_from(tensor, &array), NIB_ERR_DTYPE, "lanes");
        }
    }
}

TEST(array_strides)
{
    reset();
    static float memory[64];
    static const struct {
        int rank;
        int64_t shape[3], strides[3];
        int start, low, high; /* in floats from memory: the first element, the lowest, the highest */
    } cases[] = {
        { 2, { 4, 8 }, { 8, 1 }, 0, 0, 31 },
        { 2, { 4, 8 }, { 1, 4 }, 0, 0, 31 },
        { 2, { 4, 8 }, { -8, 1 }, 24, 0, 31 },
        { 2, { 4, 8 }, { -8, -1 }, 31, 0, 31 },
        { 2, { 4, 8 }, { 8, -1 }, 7, 0, 31 },
        { 1, { 5 }, { -3 }, 20, 8, 20 },
        { 1, { 1 }, { -99999 }, 3, 3, 3 },
        { 2, { 4, 8 }, { 0, 1 }, 2, 2, 9 },
        { 3, { 2, 3, 4 }, { -12, 4, -1 }, 15, 0, 23 },
        { 0, { 0 }, { 0 }, 5, 5, 5 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int by_offset = 0; by_offset < 2; by_offset++) { /* the start in data, or in byte_offset */
            int64_t shape[3], strides[3];
            memcpy(shape, cases[i].shape, sizeof shape);
            memcpy(strides, cases[i].strides, sizeof strides);
            DLTensor tensor = tensor_over(memory + (by_offset ? 0 : cases[i].start), cases[i].rank, shape, strides);
            tensor.byte_offset = by_offset ? (uint64_t)cases[i].start * sizeof(float) : 0;
            nib_array array = { 0 };
            CHECK_OK(array_from(tensor, &array));
            CHECK_THAT(first_element(&array) == memory + cases[i].start, "case %zu", i);
            CHECK_THAT(array.data == memory + cases[i].low &&
                           array.bytes == (size_t)(cases[i].high - cases[i].low + 1) * sizeof(float),
                       "case %zu", i);
            CHECK_BYTES(array.strides, strides, (size_t)cases[i].rank * sizeof *strides);
        }
    /* And values come through it: the reversed rows of a quantization. */
    for (int i = 0; i < 64; i++)
        memory[i] = test_normal();
    DLTensor tensor = tensor_over(memory + 48, 2, (int64_t[]){ 4, 16 }, (int64_t[]){ -16, 1 });
    nib_array reversed, forward;
    float usage[64];
    for (int i = 0; i < 64; i++)
        usage[i] = memory[(3 - i / 16) * 16 + i % 16];
    CHECK_OK(array_from(tensor, &reversed));
    CHECK_OK(nib_array_init(&forward, usage, NIB_F32, DIMS(4, 16)));
    nib_quantizer q;
    nib_quantizer_init(&q);
    nib_tensor *a = NULL, *b = NULL;
    int equal = 0;
    CHECK_OK(nib_quantize(&q, &reversed, NULL, &a));
    CHECK_OK(nib_quantize(&q, &forward, NULL, &b));
    CHECK_OK(nib_tensor_equal(a, b, &equal));
    CHECK(equal);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

TEST(array_refusals)
{
    reset();
    static float memory[8];
    nib_array array;
    static const int devices[] = { 0, -1, CUDA, 4, 5, 7, 8, 9, ROCM, 12, CUDA_MANAGED, 14, 15, 16, 17 };
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        DLTensor tensor = tensor_over(memory, 1, (int64_t[]){ 8 }, NULL);
        tensor.device.device_type = devices[i];
        CHECK_FAILS(array_from(tensor, &array), NIB_ERR_DEVICE, "is not on host");
    }
    static const int hosts[] = { CPU, CUDA_HOST, ROCM_HOST };
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        DLTensor tensor = tensor_over(memory, 1, (int64_t[]){ 8 }, NULL);
        tensor.device = (DLDevice){ hosts[i], 3 };
        CHECK_OK(array_from(tensor, &array));
    }
    const struct {
        DLTensor tensor;
        nib_status status;
        const char *words;
    } bad[] = {
        { tensor_over(memory, -1, (int64_t[]){ 8 }, NULL), NIB_ERR_SHAPE, "rank -1" },
        { tensor_over(memory, 9, (int64_t[]){ 1, 1, 1, 1, 1, 1, 1, 1, 1 }, NULL), NIB_ERR_SHAPE, "rank 9" },
        { tensor_over(memory, 1, NULL, NULL), NIB_ERR_ARG, "shape is NULL" },
        { tensor_over(memory, 2, (int64_t[]){ 2, -1 }, NULL), NIB_ERR_SHAPE, "dim 1 is -1" },
        { tensor_over(memory, 2, (int64_t[]){ INT64_C(1) << 40, INT64_C(1) << 40 }, NULL), NIB_ERR_SHAPE, "too large" },
        { tensor_over(NULL, 1, (int64_t[]){ 8 }, NULL), NIB_ERR_ARG, "data is NULL" },
        { tensor_over((char *)memory + 1, 1, (int64_t[]){ 1 }, NULL), NIB_ERR_ARG, "aligned" },
        { tensor_over(memory, 1, (int64_t[]){ 3 }, (int64_t[]){ INT64_MAX / 2 }), NIB_ERR_SHAPE, "too far" },
        { tensor_over(memory, 1, (int64_t[]){ 3 }, (int64_t[]){ INT64_MIN / 2 }), NIB_ERR_SHAPE, "too far" },
        { tensor_over(memory, 2, (int64_t[]){ 3, 3 }, (int64_t[]){ INT64_C(1) << 59, INT64_C(1) << 59 }), NIB_ERR_SHAPE,
          "too far" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const nib_status status = array_from(bad[i].tensor, &array);
        CHECK_THAT(status == bad[i].status && strstr(nib_last_error(), bad[i].words), "case %zu: %s: %s", i,
                   nib_status_name(status), nib_last_error());
    }
    DLTensor odd = tensor_over(memory, 1, (int64_t[]){ 1 }, NULL);
    odd.byte_offset = 2;
    CHECK_FAILS(array_from(odd, &array), NIB_ERR_ARG, "aligned");
    /* Without elements neither memory nor strides matter. */
    DLTensor empty = tensor_over(NULL, 2, (int64_t[]){ 0, 3 }, (int64_t[]){ INT64_MAX, INT64_MIN });
    CHECK_OK(array_from(empty, &array));
    CHECK(array.shape[0] == 0 && array.shape[1] == 3);
}

/* Strides that reach far up and far down: each fits into 64 bits, and what lies between them does not. */
TEST(array_reaches_both_ways)
{
    reset();
    static float memory[8];
    nib_array array;
    DLTensor tensor = tensor_over(memory, 2, (int64_t[]){ 2, 2 }, (int64_t[]){ INT64_C(1) << 60, -(INT64_C(1) << 60) });
    CHECK_FAILS(array_from(tensor, &array), NIB_ERR_SHAPE, "a DLPack tensor");
    tensor = tensor_over(memory, 1, (int64_t[]){ 2 }, (int64_t[]){ INT64_MAX });
    tensor.dtype = (DLDataType){ 1, 8, 1 };
    CHECK_FAILS(array_from(tensor, &array), NIB_ERR_SHAPE, "a DLPack tensor");
    tensor = tensor_over(memory, 1, (int64_t[]){ 2 }, (int64_t[]){ INT64_MIN });
    tensor.dtype = (DLDataType){ 1, 8, 1 };
    CHECK_FAILS(array_from(tensor, &array), NIB_ERR_SHAPE, "a DLPack tensor");
}

TEST(array_versions)
{
    reset();
    static float memory[8];
    DLManagedTensorVersioned versioned = versioned_of(tensor_over(memory, 1, (int64_t[]){ 8 }, NULL));
    nib_array array = { .rank = 99 };
    nib_buffer *const untouched = (nib_buffer *)memory, *buffer = untouched;
    for (uint32_t major = 0; major < 5; major++) {
        versioned.version = (DLPackVersion){ major, 3 };
        if (major == 1)
            continue;
        array.rank = 99;
        CHECK_FAILS(nib_array_from_dlpack_versioned(&versioned, NULL, &array), NIB_ERR_UNSUPPORTED, ".3");
        CHECK_FAILS(nib_buffer_from_dlpack_versioned(&versioned, NULL, &buffer), NIB_ERR_UNSUPPORTED, ".3");
        CHECK(array.rank == 99 && buffer == untouched);
    }
    versioned.version = (DLPackVersion){ 1, 99 }; /* minor versions only add */
    CHECK_OK(nib_array_from_dlpack_versioned(&versioned, NULL, &array));
    versioned.flags = READ_ONLY; /* a view may be an input; a buffer is there to be written */
    CHECK_OK(nib_array_from_dlpack_versioned(&versioned, NULL, &array));
    CHECK_FAILS(nib_buffer_from_dlpack_versioned(&versioned, NULL, &buffer), NIB_ERR_ARG, "read-only");
    CHECK(buffer == untouched && deleted_versioned == 0);
    versioned.flags = IS_COPIED;
    CHECK_OK(nib_buffer_from_dlpack_versioned(&versioned, NULL, &buffer));
    nib_buffer_release(buffer);
    CHECK(deleted_versioned == 1);
}

/* ---- In: buffers ---- */

TEST(buffer_takes_over)
{
    static float memory[24];
    for (int generation = 0; generation < 2; generation++)
        for (int offset = 0; offset < 2; offset++) {
            reset();
            DLTensor tensor = tensor_over(memory, 3, (int64_t[]){ 2, 1, 8 }, offset ? (int64_t[]){ 8, 77, 1 } : NULL);
            tensor.byte_offset = offset ? 8 * sizeof(float) : 0;
            DLManagedTensor managed = managed_of(tensor);
            DLManagedTensorVersioned versioned = versioned_of(tensor);
            nib_buffer *buffer = NULL;
            if (generation)
                CHECK_OK(nib_buffer_from_dlpack_versioned(&versioned, NULL, &buffer));
            else
                CHECK_OK(nib_buffer_from_dlpack(&managed, NULL, &buffer));
            CHECK(nib_buffer_data(buffer) == memory + (offset ? 8 : 0) &&
                  nib_buffer_bytes(buffer) == 16 * sizeof(float));
            nib_buffer_retain(buffer);
            nib_buffer_release(buffer);
            CHECK(deleted == 0 && deleted_versioned == 0);
            nib_buffer_release(buffer);
            CHECK(deleted == !generation && deleted_versioned == generation);
        }
    reset(); /* a producer with nothing to free has no deleter */
    DLManagedTensor managed = managed_of(tensor_over(memory, 1, (int64_t[]){ 24 }, NULL));
    DLManagedTensorVersioned versioned = versioned_of(managed.dl_tensor);
    managed.deleter = NULL;
    versioned.deleter = NULL;
    nib_buffer *buffer = NULL;
    CHECK_OK(nib_buffer_from_dlpack(&managed, NULL, &buffer));
    nib_buffer_release(buffer);
    CHECK_OK(nib_buffer_from_dlpack_versioned(&versioned, NULL, &buffer));
    nib_buffer_release(buffer);
    managed = managed_of(tensor_over(NULL, 2, (int64_t[]){ 0, 5 }, NULL)); /* and an empty one has no memory */
    CHECK_OK(nib_buffer_from_dlpack(&managed, NULL, &buffer));
    CHECK(nib_buffer_bytes(buffer) == 0 && deleted == 0);
    nib_buffer_release(buffer);
    CHECK(deleted == 1);
}

TEST(buffer_refusals_delete_nothing)
{
    reset();
    static float memory[16];
    const DLTensor bad[] = {
        tensor_over(memory, 2, (int64_t[]){ 2, 4 }, (int64_t[]){ 1, 2 }), /* Fortran order */
        tensor_over(memory, 2, (int64_t[]){ 2, 4 }, (int64_t[]){ 8, 1 }), /* gaps */
        tensor_over(memory, 2, (int64_t[]){ 2, 4 }, (int64_t[]){ 4, 2 }), /* overlaps */
        tensor_over(memory + 8, 1, (int64_t[]){ 4 }, (int64_t[]){ -1 }),  /* backwards */
        tensor_over(memory, 1, (int64_t[]){ 4 }, (int64_t[]){ 0 }),       /* one element four times */
    };
    nib_buffer *const untouched = (nib_buffer *)memory, *buffer = untouched;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        DLManagedTensor managed = managed_of(bad[i]);
        DLManagedTensorVersioned versioned = versioned_of(bad[i]);
        CHECK_FAILS(nib_buffer_from_dlpack(&managed, NULL, &buffer), NIB_ERR_SHAPE, "C-contiguous");
        CHECK_FAILS(nib_buffer_from_dlpack_versioned(&versioned, NULL, &buffer), NIB_ERR_SHAPE, "C-contiguous");
    }
    DLManagedTensor managed = managed_of(tensor_over(memory, 1, (int64_t[]){ 4 }, NULL));
    managed.dl_tensor.device.device_type = CUDA;
    DLManagedTensorVersioned versioned = versioned_of(managed.dl_tensor);
    CHECK_FAILS(nib_buffer_from_dlpack(&managed, NULL, &buffer), NIB_ERR_DEVICE, "device type 2");
    CHECK_FAILS(nib_buffer_from_dlpack_versioned(&versioned, NULL, &buffer), NIB_ERR_DEVICE, "device type 2");
    managed.dl_tensor.device.device_type = CPU;
    managed.dl_tensor.dtype.bits = 7;
    CHECK_FAILS(nib_buffer_from_dlpack(&managed, NULL, &buffer), NIB_ERR_DTYPE, "7 bits");
    CHECK_FAILS(nib_buffer_from_dlpack(NULL, NULL, &buffer), NIB_ERR_ARG, "managed is NULL");
    CHECK_FAILS(nib_buffer_from_dlpack_versioned(NULL, NULL, &buffer), NIB_ERR_ARG, "managed is NULL");
    CHECK_FAILS(nib_buffer_from_dlpack(&managed, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_buffer_from_dlpack_versioned(&versioned, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK(buffer == untouched && deleted == 0 && deleted_versioned == 0);
}

/* Buffers from DLPack are a tensor's memory: its updates are seen on the other side. */
TEST(tensor_over_dlpack_memory)
{
    reset();
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    static uint8_t codes[16 * 8], scales[128 * 4];
    static float tensor_scale[1];
    DLTensor tensors[3] = { tensor_over(codes, 2, (int64_t[]){ 16, 8 }, NULL),
                            tensor_over(scales, 2, (int64_t[]){ 128, 4 }, NULL),
                            tensor_over(tensor_scale, 1, (int64_t[]){ 1 }, NULL) };
    tensors[0].dtype = tensors[1].dtype = (DLDataType){ 1, 8, 1 };
    DLManagedTensor managed[3];
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    for (int i = 0; i < 3; i++) {
        managed[i] = managed_of(tensors[i]);
        CHECK_OK(nib_buffer_from_dlpack(&managed[i], NULL, &parts[2 * i]));
    }
    nib_tensor *t = NULL, *fresh = NULL;
    CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, DIMS(16, 16), parts, NIB_PART_COUNT, &t));
    for (int i = 0; i < 3; i++)
        nib_buffer_release(parts[2 * i]);
    float x[256];
    for (int i = 0; i < 256; i++)
        x[i] = test_normal();
    nib_array array;
    CHECK_OK(nib_array_init(&array, x, NIB_F32, DIMS(16, 16)));
    CHECK_OK(nib_quantize_into(NULL, &array, NULL, NULL, t));
    CHECK_OK(nib_quantize(&q, &array, NULL, &fresh));
    CHECK_BYTES(codes, nib_buffer_data(nib_tensor_buffer(fresh, NIB_ROW_DATA)), sizeof codes);
    CHECK_BYTES(scales, nib_buffer_data(nib_tensor_buffer(fresh, NIB_ROW_SCALE)), sizeof scales);
    CHECK_BYTES(tensor_scale, nib_buffer_data(nib_tensor_buffer(fresh, NIB_ROW_TENSOR_SCALE)), sizeof tensor_scale);
    CHECK(deleted == 0);
    nib_tensor_destroy(t);
    CHECK(deleted == 3);
    nib_tensor_destroy(fresh);
}

/* ---- Out ---- */

/* What both generations carry, given back through the deleter of the one that was made. */
struct exported {
    DLManagedTensor *plain;
    DLManagedTensorVersioned *versioned;
    const DLTensor *tensor;
};

static void finish(struct exported *e)
{
    if (e->plain)
        e->plain->deleter(e->plain);
    if (e->versioned)
        e->versioned->deleter(e->versioned);
}

static struct exported export_array(const nib_array *array, nib_buffer *owner, int generation)
{
    struct exported e = { NULL, NULL, NULL };
    if (generation) {
        CHECK_OK(nib_array_to_dlpack_versioned(array, owner, &e.versioned));
        CHECK(e.versioned->version.major == 1 && e.versioned->flags == 0);
        e.tensor = &e.versioned->dl_tensor;
    } else {
        CHECK_OK(nib_array_to_dlpack(array, owner, &e.plain));
        e.tensor = &e.plain->dl_tensor;
    }
    return e;
}

static struct exported export_part(const nib_tensor *t, nib_part part, int generation)
{
    struct exported e = { NULL, NULL, NULL };
    if (generation) {
        CHECK_OK(nib_tensor_to_dlpack_versioned(t, part, &e.versioned));
        CHECK(e.versioned->version.major == 1 && e.versioned->flags == 0);
        e.tensor = &e.versioned->dl_tensor;
    } else {
        CHECK_OK(nib_tensor_to_dlpack(t, part, &e.plain));
        e.tensor = &e.plain->dl_tensor;
    }
    return e;
}

TEST(arrays_go_out)
{
    static uint64_t memory[24];
    for (int generation = 0; generation < 2; generation++)
        for (int i = 0; i < DTYPES; i++) {
            nib_array array = { .data = memory, .bytes = sizeof memory, .dtype = dtypes[i].dtype, .rank = 3 };
            memcpy(array.shape, (int64_t[]){ 2, 3, 4 }, 3 * sizeof(int64_t));
            memcpy(array.strides, (int64_t[]){ 1, -8, 2 }, 3 * sizeof(int64_t));
            array.offset = 16 * (size_t)dtypes[i].bits / 8;
            struct exported e = export_array(&array, NULL, generation);
            CHECK((char *)e.tensor->data + e.tensor->byte_offset == (char *)memory + array.offset);
            CHECK(e.tensor->device.device_type == CPU && e.tensor->device.device_id == 0 && e.tensor->ndim == 3);
            CHECK(e.tensor->dtype.code == dtypes[i].code && e.tensor->dtype.bits == dtypes[i].bits);
            CHECK(e.tensor->dtype.lanes == 1);
            CHECK_BYTES(e.tensor->shape, array.shape, 3 * sizeof(int64_t));
            CHECK_BYTES(e.tensor->strides, array.strides, 3 * sizeof(int64_t));
            nib_array back = { 0 }; /* and in again: the same elements */
            if (generation)
                CHECK_OK(nib_array_from_dlpack_versioned(e.versioned, NULL, &back));
            else
                CHECK_OK(nib_array_from_dlpack(e.plain, NULL, &back));
            CHECK(first_element(&back) == first_element(&array) && back.dtype == array.dtype);
            finish(&e);
        }
}

TEST(arrays_keep_their_owner)
{
    for (int generation = 0; generation < 2; generation++)
        for (int owner_first = 0; owner_first < 2; owner_first++) {
            float memory[4] = { 1, 2, 3, 4 };
            int released = 0;
            nib_buffer *owner = NULL;
            nib_array array;
            CHECK_OK(nib_buffer_borrow(memory, sizeof memory, NULL, count_release, &released, &owner));
            CHECK_OK(nib_array_init(&array, memory, NIB_F32, DIMS(4)));
            struct exported e = export_array(&array, owner, generation);
            if (owner_first) {
                nib_buffer_release(owner);
                CHECK(released == 0 && ((const float *)e.tensor->data)[3] == 4);
                finish(&e);
            } else {
                finish(&e);
                CHECK(released == 0);
                nib_buffer_release(owner);
            }
            CHECK(released == 1);
        }
}

TEST(arrays_that_do_not_go_out)
{
    float memory[4];
    int released = 0;
    nib_buffer *owner = NULL;
    CHECK_OK(nib_buffer_borrow(memory, sizeof memory, NULL, count_release, &released, &owner));
    DLManagedTensor *const untouched = (DLManagedTensor *)(void *)memory, *out = untouched;
    DLManagedTensorVersioned *const untouched2 = (DLManagedTensorVersioned *)(void *)memory, *out2 = untouched2;
    nib_array good;
    CHECK_OK(nib_array_init(&good, memory, NIB_F32, DIMS(4)));
    struct {
        nib_array array;
        nib_status status;
        const char *words;
    } bad[5] = { { good, NIB_ERR_DTYPE, "F4" },
                 { good, NIB_ERR_DTYPE, "unknown dtype" },
                 { good, NIB_ERR_SHAPE, "rank 9" },
                 { good, NIB_ERR_SHAPE, "leave its 16 bytes" },
                 { good, NIB_ERR_ARG, "data is NULL" } };
    bad[0].array.dtype = NIB_E2M1;
    bad[1].array.dtype = NIB_DTYPE_COUNT;
    bad[2].array.rank = 9;
    bad[3].array.shape[0] = 5;
    bad[4].array.data = NULL;
    for (size_t i = 0; i < 5; i++) {
        CHECK_FAILS(nib_array_to_dlpack(&bad[i].array, owner, &out), bad[i].status, bad[i].words);
        CHECK_FAILS(nib_array_to_dlpack_versioned(&bad[i].array, owner, &out2), bad[i].status, bad[i].words);
    }
    CHECK_FAILS(nib_array_to_dlpack(NULL, owner, &out), NIB_ERR_ARG, "array is NULL");
    CHECK_FAILS(nib_array_to_dlpack(&good, owner, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_array_to_dlpack_versioned(NULL, owner, &out2), NIB_ERR_ARG, "array is NULL");
    CHECK_FAILS(nib_array_to_dlpack_versioned(&good, owner, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK(out == untouched && out2 == untouched2);
    nib_buffer_release(owner);
    CHECK(released == 1); /* nothing was retained on the way */
}

TEST(parts_go_out)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    for (int row_scaled = 0; row_scaled < 2; row_scaled++)
        for (int generation = 0; generation < 2; generation++)
            for (int tensor_first = 0; tensor_first < 2; tensor_first++) {
                float x[3 * 5 * 33];
                for (size_t i = 0; i < sizeof x / sizeof *x; i++)
                    x[i] = test_normal();
                nib_array array;
                nib_tensor *t = NULL;
                q.row_scaled = (uint8_t)row_scaled;
                CHECK_OK(nib_array_init(&array, x, NIB_F32, DIMS(3, 5, 33)));
                CHECK_OK(nib_quantize(&q, &array, NULL, &t));
                struct exported e[NIB_PART_COUNT];
                for (int part = 0; part < NIB_PART_COUNT; part++) {
                    nib_array view = { 0 };
                    e[part] = export_part(t, (nib_part)part, generation);
                    const DLTensor *tensor = e[part].tensor;
                    CHECK_OK(nib_tensor_part(t, (nib_part)part, &view));
                    /* No copy; the true shape; codes and scales as bytes. */
                    CHECK((char *)tensor->data + tensor->byte_offset == (char *)view.data && tensor->ndim == view.rank);
                    CHECK_BYTES(tensor->shape, view.shape, (size_t)view.rank * sizeof(int64_t));
                    CHECK_BYTES(tensor->strides, view.strides, (size_t)view.rank * sizeof(int64_t));
                    CHECK(tensor->dtype.code == (part < NIB_ROW_TENSOR_SCALE ? 1 : 2) && tensor->dtype.lanes == 1);
                    CHECK(tensor->dtype.bits == (part < NIB_ROW_TENSOR_SCALE ? 8 : 32));
                    CHECK(tensor->device.device_type == CPU);
                }
                const float tensor_scale = *(const float *)e[NIB_ROW_TENSOR_SCALE].tensor->data;
                if (tensor_first) {
                    nib_tensor_destroy(t);
                    CHECK(*(const float *)e[NIB_ROW_TENSOR_SCALE].tensor->data == tensor_scale && tensor_scale > 0);
                    for (int part = 0; part < NIB_PART_COUNT; part++)
                        finish(&e[part]);
                } else {
                    for (int part = NIB_PART_COUNT - 1; part >= 0; part--)
                        finish(&e[part]);
                    CHECK(*(const float *)nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE)) == tensor_scale);
                    nib_tensor_destroy(t);
                }
            }
}

TEST(parts_that_do_not_go_out)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_create(&q, NIB_F32, DIMS(4, 16), NULL, &t));
    DLManagedTensor *const untouched = (DLManagedTensor *)(void *)&q, *out = untouched;
    DLManagedTensorVersioned *const untouched2 = (DLManagedTensorVersioned *)(void *)&q, *out2 = untouched2;
    CHECK_FAILS(nib_tensor_to_dlpack(t, NIB_COL_DATA, &out), NIB_ERR_USAGE, "no columnwise usage");
    CHECK_FAILS(nib_tensor_to_dlpack_versioned(t, NIB_COL_DATA, &out2), NIB_ERR_USAGE, "no columnwise usage");
    CHECK_FAILS(nib_tensor_to_dlpack(t, NIB_PART_COUNT, &out), NIB_ERR_ARG, "6 is not a part");
    CHECK_FAILS(nib_tensor_to_dlpack_versioned(t, (nib_part)-1, &out2), NIB_ERR_ARG, "-1 is not a part");
    CHECK_FAILS(nib_tensor_to_dlpack(NULL, NIB_ROW_DATA, &out), NIB_ERR_ARG, "t is NULL");
    CHECK_FAILS(nib_tensor_to_dlpack_versioned(NULL, NIB_ROW_DATA, &out2), NIB_ERR_ARG, "t is NULL");
    CHECK_FAILS(nib_tensor_to_dlpack(t, NIB_ROW_DATA, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_tensor_to_dlpack_versioned(t, NIB_ROW_DATA, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK(out == untouched && out2 == untouched2);
    nib_tensor_destroy(t);
    CHECK_OK(nib_tensor_create(&q, NIB_F32, DIMS(0, 16), NULL, &t)); /* without elements it goes */
    struct exported e = export_part(t, NIB_ROW_DATA, 1);
    CHECK(e.tensor->ndim == 2 && e.tensor->shape[0] == 0 && e.tensor->shape[1] == 8);
    nib_tensor_destroy(t);
    finish(&e);
}

TEST_MAIN
