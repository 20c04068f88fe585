/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_errors.c - what every public call does with bad arguments: the documented status, a message, outputs untouched.
 * Quantizers are in test_errors_quantizer.c.
 */
#define _GNU_SOURCE
#include "test_directory.h"
#include "test_untouched.h"

#include <math.h>
#include <pthread.h>

/* ---- The message ---- */

TEST(status_names)
{
    static const char *const names[NIB_STATUS_COUNT] = {
        "NIB_OK",        "NIB_ERR_ARG",         "NIB_ERR_SHAPE",     "NIB_ERR_DTYPE", "NIB_ERR_MODE",
        "NIB_ERR_USAGE", "NIB_ERR_MISMATCH",    "NIB_ERR_MEMORY",    "NIB_ERR_COMM",  "NIB_ERR_IO",
        "NIB_ERR_DATA",  "NIB_ERR_UNSUPPORTED", "NIB_ERR_CANCELLED", "NIB_ERR_DEVICE"
    };
    for (int i = 0; i < NIB_STATUS_COUNT; i++)
        CHECK(strcmp(nib_status_name((nib_status)i), names[i]) == 0);
    CHECK(nib_status_name(NIB_STATUS_COUNT) && nib_status_name((nib_status)-1)); /* never NULL */
}

static void *error_in_a_thread(void *argument)
{
    nib_error error = { NIB_ERR_DATA, "x" };
    nib_get_error(&error);
    CHECK(error.status == NIB_OK && !*error.text && !*nib_last_error()); /* before any */
    CHECK_FAILS(nib_tensor_zero(NULL), NIB_ERR_ARG, "nib_tensor_zero: t is NULL");
    nib_get_error(&error);
    CHECK(error.status == NIB_ERR_ARG && strcmp(error.text, nib_last_error()) == 0);
    return argument;
}

TEST(the_last_error_is_a_threads_own)
{
    nib_format format = NIB_NVFP4;
    nib_error error;
    CHECK_FAILS(nib_format_from_name("what", &format), NIB_ERR_ARG, "\"what\"");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, error_in_a_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(strstr(nib_last_error(), "\"what\""));
    CHECK_OK(nib_format_from_name("nvfp4", &format)); /* a success leaves it */
    nib_get_error(&error);
    CHECK(error.status == NIB_ERR_ARG && strstr(error.text, "\"what\""));
    nib_get_error(NULL);
    char name[2000];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    CHECK_FAILS(nib_format_from_name(name, &format), NIB_ERR_ARG, "nnn");
    CHECK(strlen(nib_last_error()) == sizeof error.text - 1);
    CHECK_FAILS(nib_dialect_from_name(nib_last_error(), (nib_dialect[1]){ NIB_DIALECT_TE }), NIB_ERR_ARG, "nnn");

    /* It has its end, which says what is wrong, and no part of a character. */
    for (size_t ascii = 0; ascii < 4; ascii++) {
        nib_file *file = UNTOUCHED;
        memset(name, 'n', ascii);
        for (size_t i = ascii; i < sizeof name - 2; i += 2)
            memcpy(name + i, "\xC3\xA9", 3);
        CHECK_FAILS(nib_file_open(name, &file), NIB_ERR_IO, "\xC3\xA9: cannot open: File name too long");
        const char *const gap = strstr(nib_last_error(), "...");
        CHECK(gap && gap[-1] == '\xA9' && gap[3] == '\xC3' && strlen(nib_last_error()) >= sizeof error.text - 3);
    }
}

TEST(an_error_of_ones_own)
{
    nib_error error;
    CHECK_FAILS(nib_set_error(NIB_ERR_COMM, "the cable is out: 100%s"), NIB_ERR_COMM, "the cable is out: 100%s");
    CHECK_OK(nib_set_error(NIB_OK, "all is well"));
    nib_get_error(&error);
    CHECK(error.status == NIB_ERR_COMM && strcmp(error.text, "the cable is out: 100%s") == 0);
    CHECK_FAILS(nib_set_error(NIB_ERR_IO, NULL), NIB_ERR_IO, "NIB_ERR_IO");
    CHECK_FAILS(nib_set_error(NIB_ERR_DATA, nib_last_error()), NIB_ERR_DATA, "NIB_ERR_IO"); /* its own text */
}

/* Each status but NIB_OK by one call. */
TEST(every_status)
{
    nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16)), *other = some(&q, DIMS(32, 16)), *out = UNTOUCHED;
    nib_array part = { 0 }, array = array_of(sentinel, NIB_U8, DIMS(1));
    nib_file *file = UNTOUCHED;
    CHECK(nib_tensor_clone(NULL, &out) == NIB_ERR_ARG);
    CHECK(nib_tensor_slice(t, 1, 1, &out) == NIB_ERR_SHAPE);
    CHECK(nib_quantize(&q, &array, NULL, &out) == NIB_ERR_DTYPE);
    CHECK(nib_tensor_copy(t, other) == NIB_ERR_MISMATCH);
    CHECK_OK(nib_tensor_update_usage(t, 0, 1));
    CHECK(nib_tensor_part(t, NIB_ROW_DATA, &part) == NIB_ERR_USAGE);
    CHECK(nib_tensor_create(&q, NIB_F32, DIMS(INT64_C(1) << 30, INT64_C(1) << 28), NULL, &out) == NIB_ERR_MEMORY);
    const nib_comm comm = { .bytes = sizeof comm, .size = 2, .allreduce_max_f32 = reject };
    q.amax_comm = &comm;
    float x[16] = { 1 };
    array = array_of(x, NIB_F32, DIMS(16));
    CHECK(nib_quantize(&q, &array, NULL, &out) == NIB_ERR_COMM);
    q.amax_comm = NULL;
    q.row_scaled = 1;
    array = array_of(x, NIB_F32, DIMS(INT64_C(1) << 50, 0)); /* no loop over rows without a number for each */
    CHECK(nib_quantize(&q, &array, NULL, &out) == NIB_ERR_MEMORY);
    q.row_scaled = 0;
    q.e4m3_max = 256;
    CHECK(nib_quantizer_check(&q, NULL) == NIB_ERR_MODE);
    CHECK(nib_file_open("/no such file", &file) == NIB_ERR_IO);
    CHECK(nib_file_open("CMakeLists.txt", &file) == NIB_ERR_DATA); /* tests run at the top of the repository */
    struct {
        nib_quantizer q;
        char tail[8];
    } newer = { .q = default_quantizer(), .tail = "new" };
    newer.q.bytes = sizeof newer;
    CHECK(nib_quantizer_check(&newer.q, NULL) == NIB_ERR_UNSUPPORTED);
    CHECK(out == UNTOUCHED && file == UNTOUCHED);
    nib_tensor_destroy(other);
    nib_tensor_destroy(t);
}

/* ---- Names and small things ---- */

TEST(values_outside_enums)
{
    for (int i = -1; i < 2; i++) {
        CHECK(!nib_dtype_name((nib_dtype)(i < 0 ? -1 : NIB_DTYPE_COUNT + i)));
        CHECK(nib_dtype_bits((nib_dtype)(i < 0 ? -1 : NIB_DTYPE_COUNT + i)) == 0);
        CHECK(!nib_format_name((nib_format)(i < 0 ? -1 : NIB_FORMAT_COUNT + i)));
        CHECK(!nib_dialect_name((nib_dialect)(i < 0 ? -1 : NIB_DIALECT_COUNT + i)));
    }
    nib_format format = (nib_format)99;
    nib_dialect dialect = (nib_dialect)99;
    CHECK_FAILS(nib_format_from_name(NULL, &format), NIB_ERR_ARG, "name is NULL");
    CHECK_FAILS(nib_format_from_name("nvfp4", NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_format_from_name("", &format), NIB_ERR_ARG, "\"\"");
    CHECK_FAILS(nib_format_from_name("NVFP4", &format), NIB_ERR_ARG, "\"NVFP4\"");
    CHECK_FAILS(nib_dialect_from_name(NULL, &dialect), NIB_ERR_ARG, "name is NULL");
    CHECK_FAILS(nib_dialect_from_name("te", NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_dialect_from_name("te ", &dialect), NIB_ERR_ARG, "\"te \"");
    CHECK(format == (nib_format)99 && dialect == (nib_dialect)99);
    for (int i = 0; i < NIB_DIALECT_COUNT; i++) {
        CHECK_OK(nib_dialect_from_name(nib_dialect_name((nib_dialect)i), &dialect));
        CHECK((int)dialect == i);
    }
    for (int i = 0; i < NIB_DTYPE_COUNT; i++)
        CHECK(nib_dtype_name((nib_dtype)i) && nib_dtype_bits((nib_dtype)i) > 0);
    CHECK(nib_version() && strcmp(nib_version(), NIB_VERSION) == 0 && nib_isa() && *nib_isa());
}

TEST(codecs)
{
    float x[2] = { 1, 2 };
    uint64_t out[2] = { 7, 7 };
    for (int dtype = -1; dtype <= NIB_DTYPE_COUNT; dtype++) {
        const bool computes = dtype >= NIB_F32 && dtype <= NIB_E2M1;
        if (computes) {
            CHECK_FAILS(nib_encode((nib_dtype)dtype, NULL, 2, out), NIB_ERR_ARG, "NULL");
            CHECK_FAILS(nib_encode((nib_dtype)dtype, x, 2, NULL), NIB_ERR_ARG, "NULL");
            CHECK_FAILS(nib_decode((nib_dtype)dtype, NULL, 2, x), NIB_ERR_ARG, "NULL");
            CHECK_FAILS(nib_decode((nib_dtype)dtype, out, 2, NULL), NIB_ERR_ARG, "NULL");
            CHECK_OK(nib_encode((nib_dtype)dtype, x, 0, out)); /* no numbers: nothing to point at */
            CHECK_OK(nib_encode((nib_dtype)dtype, NULL, 0, NULL));
            CHECK_OK(nib_decode((nib_dtype)dtype, NULL, 0, NULL));
        } else {
            CHECK_FAILS(nib_encode((nib_dtype)dtype, x, 2, out), NIB_ERR_DTYPE, "not a dtype that is computed with");
            CHECK_FAILS(nib_decode((nib_dtype)dtype, out, 2, x), NIB_ERR_DTYPE, "not a dtype that is computed with");
        }
    }
    CHECK(out[0] == 7 && out[1] == 7 && x[0] == 1 && x[1] == 2);
}

TEST(buffers)
{
    nib_buffer *out = UNTOUCHED;
    CHECK_FAILS(nib_buffer_create(8, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_buffer_create(SIZE_MAX, NULL, &out), NIB_ERR_MEMORY, "no memory");
    CHECK_FAILS(nib_buffer_create(SIZE_MAX - 63, NULL, &out), NIB_ERR_MEMORY, "no memory");
    CHECK_FAILS(nib_buffer_create(SIZE_MAX / 4, NULL, &out), NIB_ERR_MEMORY, "no memory");
    CHECK_FAILS(nib_buffer_borrow(sentinel, 1, NULL, NULL, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_buffer_borrow(NULL, 1, NULL, NULL, NULL, &out), NIB_ERR_ARG, "data is NULL");
    CHECK(out == UNTOUCHED);
}

/* Calls without a status take NULL as well. */
TEST(calls_without_a_status)
{
    nib_quantizer_init(NULL);
    nib_hadamard_matrix(NULL);
    nib_rht_matrix(0, NULL);
    nib_e2m1_values(NULL);
    nib_philox4x32(NULL, NULL, NULL);
    nib_buffer_release(NULL);
    nib_tensor_destroy(NULL);
    nib_tensor_clear(NULL);
    nib_file_close(NULL);
    nib_writer_destroy(NULL);
    CHECK(!nib_buffer_retain(NULL) && !nib_buffer_data(NULL) && !nib_buffer_bytes(NULL));
    CHECK(!nib_tensor_buffer(NULL, NIB_ROW_DATA) && !nib_file_count(NULL) && !nib_file_metadata(NULL, "x"));
    CHECK(!nib_file_metadata_count(NULL));
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(4, 4));
    CHECK(!nib_tensor_buffer(t, NIB_PART_COUNT) && !nib_tensor_buffer(t, (nib_part)-1));
    nib_tensor_destroy(t);
}

/* ---- Arrays ---- */

TEST(array_init)
{
    static const struct {
        int rank;
        int64_t shape[9];
        nib_dtype dtype;
        nib_status status;
        const char *words;
    } bad[] = {
        { 9, { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, NIB_F32, NIB_ERR_SHAPE, "rank 9" },
        { -1, { 1 }, NIB_F32, NIB_ERR_SHAPE, "rank -1" },
        { INT32_MAX, { 1 }, NIB_F32, NIB_ERR_SHAPE, "rank" },
        { 2, { 4, -1 }, NIB_F32, NIB_ERR_SHAPE, "dim 1 is -1" },
        { 2, { INT64_MIN, 0 }, NIB_F32, NIB_ERR_SHAPE, "dim 0" },
        { 1, { INT64_MAX }, NIB_U8, NIB_ERR_SHAPE, "too large" },
        { 2, { INT64_C(1) << 32, INT64_C(1) << 32 }, NIB_U8, NIB_ERR_SHAPE, "too large" },
        { 3, { INT64_C(1) << 32, INT64_C(1) << 32, 0 }, NIB_U8, NIB_ERR_SHAPE, "too large" }, /* 0 hides no nonsense */
        { 3, { 0, INT64_C(1) << 32, INT64_C(1) << 32 }, NIB_U8, NIB_ERR_SHAPE, "too large" },
        { 1, { INT64_C(1) << 58 }, NIB_F64, NIB_ERR_SHAPE, "too many bytes" },
        { 1, { 4 }, NIB_E2M1, NIB_ERR_DTYPE, "F4" },
        { 1, { 4 }, NIB_E2M3, NIB_ERR_DTYPE, "F6_E2M3" },
        { 1, { 4 }, NIB_E3M2, NIB_ERR_DTYPE, "F6_E3M2" },
        { 1, { 4 }, NIB_DTYPE_COUNT, NIB_ERR_DTYPE, "unknown dtype 22" },
        { 1, { 4 }, (nib_dtype)-1, NIB_ERR_DTYPE, "unknown dtype -1" },
    };
    nib_array out, before;
    double memory[4];
    memset(&out, 0x5A, sizeof out);
    before = out;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(nib_array_init(&out, memory, bad[i].dtype, bad[i].rank, bad[i].shape), bad[i].status, bad[i].words);
    CHECK_FAILS(nib_array_init(NULL, memory, NIB_F32, DIMS(4)), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_array_init(&out, memory, NIB_F32, 1, NULL), NIB_ERR_ARG, "shape is NULL");
    CHECK_FAILS(nib_array_init(&out, NULL, NIB_F32, DIMS(4)), NIB_ERR_ARG, "data is NULL");
    CHECK_FAILS(nib_array_init(&out, (char *)memory + 2, NIB_F32, DIMS(4)), NIB_ERR_ARG, "aligned to 4");
    CHECK_BYTES(&out, &before, sizeof out);
    CHECK_OK(nib_array_init(&out, memory, NIB_F64, 0, NULL)); /* a scalar */
    CHECK(out.rank == 0 && out.bytes == 8);
    CHECK_OK(nib_array_init(&out, NULL, NIB_F64, DIMS(3, 0)));
    CHECK(out.bytes == 0);
}

/* Every way in which an array can lie, through every call that takes one. */
struct array_fault {
    const char *what;
    nib_status status;
    void (*apply)(nib_array *array);
};

static void rank_9(nib_array *a) { a->rank = 9; }
static void rank_negative(nib_array *a) { a->rank = -1; }
static void rank_least(nib_array *a) { a->rank = INT32_MIN; }
static void dim_negative(nib_array *a) { a->shape[1] = -16; }
static void dims_overflow(nib_array *a) { a->shape[0] = a->shape[1] = INT64_C(1) << 32; }
static void stride_up(nib_array *a) { a->strides[0] = 17; }
static void stride_far_up(nib_array *a) { a->strides[0] = INT64_MAX; }
static void stride_far_sum(nib_array *a) { a->strides[0] = a->strides[1] = INT64_MAX / 16; }
static void stride_down(nib_array *a) { a->strides[0] = -16; }
static void stride_little_down(nib_array *a) { a->strides[1] = -1; }
static void stride_far_down(nib_array *a) { a->strides[0] = INT64_MIN; }
static void offset_one(nib_array *a) { a->offset = 4; }
static void offset_beyond(nib_array *a) { a->offset = 4096; }
static void offset_max(nib_array *a) { a->offset = SIZE_MAX; }
static void offset_wraps(nib_array *a) { a->offset = SIZE_MAX - 3; }
static void bytes_short(nib_array *a) { a->bytes--; }
static void bytes_none(nib_array *a) { a->bytes = 0; }
static void bytes_max(nib_array *a) { a->bytes = SIZE_MAX; }
static void data_null(nib_array *a) { a->data = NULL; }
static void data_misaligned(nib_array *a) { a->data = (char *)a->data - 1; }
static void offset_misaligned(nib_array *a) { a->data = (char *)a->data - 4, a->offset = 2, a->bytes += 4; }
static void dtype_count(nib_array *a) { a->dtype = NIB_DTYPE_COUNT; }
static void dtype_negative(nib_array *a) { a->dtype = (nib_dtype)-1; }
static void dtype_packed(nib_array *a) { a->dtype = NIB_E2M1; }
static void dtype_integer(nib_array *a) { a->dtype = NIB_I32; }

static const struct array_fault faults[] = {
    { "rank 9", NIB_ERR_SHAPE, rank_9 },
    { "rank -1", NIB_ERR_SHAPE, rank_negative },
    { "least rank", NIB_ERR_SHAPE, rank_least },
    { "negative dim", NIB_ERR_SHAPE, dim_negative },
    { "dims overflow", NIB_ERR_SHAPE, dims_overflow },
    { "stride up", NIB_ERR_SHAPE, stride_up },
    { "stride far up", NIB_ERR_SHAPE, stride_far_up },
    { "strides far up together", NIB_ERR_SHAPE, stride_far_sum },
    { "stride down", NIB_ERR_SHAPE, stride_down },
    { "stride a little down", NIB_ERR_SHAPE, stride_little_down },
    { "stride far down", NIB_ERR_SHAPE, stride_far_down },
    { "offset by one", NIB_ERR_SHAPE, offset_one },
    { "offset beyond", NIB_ERR_SHAPE, offset_beyond },
    { "largest offset", NIB_ERR_SHAPE, offset_max },
    { "offset that wraps", NIB_ERR_SHAPE, offset_wraps },
    { "a byte too few", NIB_ERR_SHAPE, bytes_short },
    { "no bytes", NIB_ERR_SHAPE, bytes_none },
    { "more bytes than memory", NIB_ERR_SHAPE, bytes_max },
    { "no data", NIB_ERR_ARG, data_null },
    { "misaligned data", NIB_ERR_ARG, data_misaligned },
    { "misaligned offset", NIB_ERR_ARG, offset_misaligned },
    { "dtype too large", NIB_ERR_DTYPE, dtype_count },
    { "dtype -1", NIB_ERR_DTYPE, dtype_negative },
    { "packed dtype", NIB_ERR_DTYPE, dtype_packed },
    { "integers", NIB_ERR_DTYPE, dtype_integer },
};

static nib_tensor *fault_tensor;

static nib_status into_quantize(const nib_array *array)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *out = UNTOUCHED;
    const nib_status status = nib_quantize(&q, array, NULL, &out);
    CHECK(!status || out == UNTOUCHED);
    return status;
}

static nib_status into_quantize_into(const nib_array *array)
{
    nib_tensor *before = clone_of(fault_tensor);
    const nib_status status = nib_quantize_into(NULL, array, NULL, NULL, fault_tensor);
    CHECK(!status || equal(before, fault_tensor));
    nib_tensor_destroy(before);
    return status;
}

static nib_status into_dequantize(const nib_array *array) { return nib_dequantize(fault_tensor, NIB_EITHER, array); }

static nib_status into_dequantize_rows(const nib_array *array)
{
    return nib_dequantize_rows(fault_tensor, NIB_COLUMNWISE, 0, 4, array);
}

static nib_status into_gemm(const nib_array *array)
{
    return reference_product(fault_tensor, NIB_ROWWISE, fault_tensor, NIB_ROWWISE, 1, 0, array);
}

static nib_status into_dlpack(const nib_array *array)
{
    struct DLManagedTensor *out = UNTOUCHED;
    const nib_status status = nib_array_to_dlpack(array, NULL, &out);
    CHECK(out == UNTOUCHED);
    return status;
}

static nib_status into_dlpack_versioned(const nib_array *array)
{
    struct DLManagedTensorVersioned *out = UNTOUCHED;
    const nib_status status = nib_array_to_dlpack_versioned(array, NULL, &out);
    CHECK(out == UNTOUCHED);
    return status;
}

TEST(arrays)
{
    static const struct {
        const char *what;
        nib_status (*call)(const nib_array *array);
        bool takes_integers;
    } calls[] = {
        { "nib_quantize", into_quantize, false },
        { "nib_quantize_into", into_quantize_into, false },
        { "nib_dequantize", into_dequantize, false },
        { "nib_dequantize_rows", into_dequantize_rows, false },
        { "nib_gemm_reference", into_gemm, false },
        { "nib_array_to_dlpack", into_dlpack, true },
        { "nib_array_to_dlpack_versioned", into_dlpack_versioned, true },
    };
    const nib_quantizer q = default_quantizer();
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++) {
        /* [4, 16] floats between two others. */
        float memory[1 + 64 + 1], before[66];
        for (int i = 0; i < 66; i++)
            memory[i] = before[i] = 99;
        fault_tensor = some(&q, DIMS(4, 16));
        CHECK_FAILS(calls[c].call(NULL), NIB_ERR_ARG, "is NULL");
        for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
            if (calls[c].takes_integers && faults[i].apply == dtype_integer)
                continue;
            nib_array array = array_of(memory + 1, NIB_F32, DIMS(4, 16));
            faults[i].apply(&array);
            const nib_status status = calls[c].call(&array);
            CHECK_THAT(status == faults[i].status && *nib_last_error(), "%s, %s: %s: %s", calls[c].what, faults[i].what,
                       nib_status_name(status), nib_last_error());
        }
        CHECK_BYTES(memory, before, sizeof memory);
        nib_tensor_destroy(fault_tensor);
    }
}

/* Dims that do not meet two by two, but all together. */
TEST(outputs_that_overlap)
{
    const nib_quantizer q = default_quantizer();
    float memory[64];
    nib_tensor *t = some(&q, DIMS(2, 2, 2));
    nib_array array = array_of(memory, NIB_F32, DIMS(2, 2, 2));
    array.bytes = sizeof memory;
    array.strides[0] = 3, array.strides[1] = 2, array.strides[2] = 1;
    CHECK_FAILS(nib_dequantize(t, NIB_EITHER, &array), NIB_ERR_SHAPE, "stride 3 of dim 0");
    array.strides[0] = 4;
    CHECK_OK(nib_dequantize(t, NIB_EITHER, &array));
    nib_tensor_destroy(t);
}

TEST(array_copies)
{
    float from[6] = { 1, 2, 3, 4, 5, 6 }, to[6] = { 0 }, before[6] = { 0 };
    const nib_array x = array_of(from, NIB_F32, DIMS(2, 3));
    nib_array y = array_of(to, NIB_F32, DIMS(3, 2));
    CHECK_FAILS(nib_array_copy(&x, &y), NIB_ERR_MISMATCH, "dtype or shape");
    y = array_of(to, NIB_F32, DIMS(6));
    CHECK_FAILS(nib_array_copy(&x, &y), NIB_ERR_MISMATCH, "dtype or shape");
    y = array_of(to, NIB_I32, DIMS(2, 3));
    CHECK_FAILS(nib_array_copy(&x, &y), NIB_ERR_MISMATCH, "dtype or shape");
    CHECK_BYTES(to, before, sizeof to);
    y = array_of(to, NIB_F32, DIMS(2, 3));
    y.strides[0] = 1, y.strides[1] = 2; /* by columns */
    CHECK_OK(nib_array_copy(&x, &y));
    CHECK(to[0] == 1 && to[1] == 4 && to[2] == 2 && to[3] == 5 && to[4] == 3 && to[5] == 6);
}

/* Nothing steps by the stride of a dim of 1, nor by those of an array without elements: they can be anything. */
TEST(strides_that_are_not_stepped)
{
    const nib_quantizer q = default_quantizer();
    float memory[16];
    nib_tensor *t = some(&q, DIMS(1, 16));
    nib_array array = array_of(memory, NIB_F32, DIMS(1, 16));
    array.strides[0] = INT64_MIN;
    CHECK_OK(nib_dequantize(t, NIB_EITHER, &array));
    nib_tensor_destroy(t);
    t = NULL;
    array = array_of(memory, NIB_F32, DIMS(2, 2, 0));
    array.strides[0] = array.strides[1] = INT64_MAX;
    CHECK_OK(nib_quantize(&q, &array, NULL, &t));
    CHECK_OK(nib_dequantize(t, NIB_EITHER, &array));
    nib_tensor_destroy(t);
}

/* Shapes that are right in themselves and wrong for the call. */
TEST(wrong_shapes)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(2, 3, 16));
    static float memory[200];
    static const struct {
        int rank;
        int64_t shape[4];
    } shapes[] = { { 0, { 0 } },        { 1, { 96 } },       { 2, { 6, 16 } },       { 3, { 3, 2, 16 } },
                   { 3, { 2, 3, 15 } }, { 3, { 2, 3, 17 } }, { 4, { 1, 2, 3, 16 } }, { 3, { 2, 0, 16 } } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const nib_array out = array_of(memory, NIB_F32, shapes[i].rank, shapes[i].shape);
        CHECK_FAILS(nib_dequantize(t, NIB_ROWWISE, &out), NIB_ERR_SHAPE, "not the tensor's");
        CHECK_FAILS(nib_quantize_into(NULL, &out, NULL, NULL, t), NIB_ERR_SHAPE, "not the tensor's");
        if (i != 2)
            CHECK_FAILS(nib_dequantize_rows(t, NIB_ROWWISE, 0, 6, &out), NIB_ERR_SHAPE, "out must be [6, 16]");
    }
    static const int64_t bad[][2] = { { -1, 2 }, { 0, -1 }, { 0, 7 }, { 6, 1 }, { 7, 0 }, { INT64_MIN, 1 } };
    const nib_array rows = array_of(memory, NIB_F32, DIMS(2, 16));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(nib_dequantize_rows(t, NIB_ROWWISE, bad[i][0], bad[i][1], &rows), NIB_ERR_SHAPE, "of 6");
    for (int dim = 0; dim < 3; dim++) { /* several values to one place; one value may have any stride */
        nib_array out = array_of(memory, NIB_F32, DIMS(2, 3, 16));
        out.strides[dim] = 0;
        CHECK_FAILS(nib_dequantize(t, NIB_ROWWISE, &out), NIB_ERR_SHAPE, "stride 0 of dim");
    }
    for (int i = 0; i < 200; i++)
        CHECK(memory[i] == 0);
    nib_array out = array_of(memory, NIB_F32, DIMS(1, 16));
    out.strides[0] = 0;
    CHECK_OK(nib_dequantize_rows(t, NIB_ROWWISE, 3, 1, &out));
    for (int usage = -1; usage < 4; usage += usage < 0 ? 4 : 1)
        CHECK_FAILS(nib_dequantize_rows(t, (nib_usage)usage, 3, 1, &out), NIB_ERR_ARG, "is not a usage");
    nib_array scalar = array_of(memory, NIB_F32, 0, NULL);
    nib_tensor *none = UNTOUCHED;
    CHECK_FAILS(nib_quantize(&q, &scalar, NULL, &none), NIB_ERR_SHAPE, "at least rank 1");
    CHECK(none == UNTOUCHED);
    nib_tensor_destroy(t);
}

/* Row numbers whose sum is larger than 64 bits hold. */
TEST(rows_that_overflow)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16)), *out = UNTOUCHED;
    static float memory[256];
    const nib_array rows = array_of(memory, NIB_F32, DIMS(16, 16));
    static const int64_t bad[][2] = {
        { INT64_MAX, 1 }, { 1, INT64_MAX }, { INT64_MAX, INT64_MAX }, { INT64_MIN, INT64_MIN }
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_FAILS(nib_tensor_slice(t, bad[i][0], bad[i][1], &out), NIB_ERR_SHAPE, "of 16");
        CHECK_FAILS(nib_dequantize_rows(t, NIB_ROWWISE, bad[i][0], bad[i][1], &rows), NIB_ERR_SHAPE, "of 16");
    }
    CHECK(out == UNTOUCHED);
    nib_tensor_destroy(t);
}

/* ---- Tensors ---- */

TEST(null_tensors)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16)), *before = clone_of(t), *out = UNTOUCHED;
    static float memory[256];
    const nib_array array = array_of(memory, NIB_F32, DIMS(16, 16));
    nib_array view = { .rank = 99 };
    nib_buffer *parts[NIB_PART_COUNT] = { NULL }, *saved[NIB_PART_COUNT] = { UNTOUCHED };
    nib_metadata metadata = { .bytes = sizeof metadata, .rank = 99 };
    nib_item item = { .tensor = t };
    nib_saved entries[NIB_PART_COUNT];
    int answer = 99, rank = 99;
    int64_t shape[NIB_MAX_RANK] = { 99 };
    size_t count = 99;
    NULLS(nib_quantize(NULL, &array, NULL, &out), "the quantizer");
    NULLS(nib_quantize(&q, NULL, NULL, &out), "x");
    NULLS(nib_quantize(&q, &array, NULL, NULL), "out");
    NULLS(nib_quantize_into(&q, NULL, NULL, NULL, t), "x");
    NULLS(nib_quantize_into(&q, &array, NULL, NULL, NULL), "t");
    NULLS(nib_dequantize(NULL, NIB_ROWWISE, &array), "t");
    NULLS(nib_dequantize(t, NIB_ROWWISE, NULL), "out");
    NULLS(nib_dequantize_rows(NULL, NIB_ROWWISE, 0, 16, &array), "t");
    NULLS(nib_dequantize_rows(t, NIB_ROWWISE, 0, 16, NULL), "out");
    NULLS(nib_tensor_create(NULL, NIB_F32, DIMS(4, 4), NULL, &out), "the quantizer");
    NULLS(nib_tensor_create(&q, NIB_F32, 2, NULL, NULL, &out), "shape");
    NULLS(nib_tensor_create(&q, NIB_F32, DIMS(4, 4), NULL, NULL), "out");
    NULLS(nib_tensor_from_buffers(NULL, NIB_F32, DIMS(4, 4), parts, NIB_PART_COUNT, &out), "the quantizer");
    NULLS(nib_tensor_from_buffers(&q, NIB_F32, 2, NULL, parts, NIB_PART_COUNT, &out), "shape");
    NULLS(nib_tensor_from_buffers(&q, NIB_F32, DIMS(4, 4), NULL, NIB_PART_COUNT, &out), "parts");
    NULLS(nib_tensor_from_buffers(&q, NIB_F32, DIMS(4, 4), parts, NIB_PART_COUNT, NULL), "out");
    NULLS(nib_tensor_get_metadata(NULL, &metadata), "t");
    NULLS(nib_tensor_get_metadata(t, NULL), "out");
    NULLS(nib_tensor_part(NULL, NIB_ROW_DATA, &view), "t");
    NULLS(nib_tensor_part(t, NIB_ROW_DATA, NULL), "out");
    NULLS(nib_tensor_get_usages(NULL, &answer, &answer), "t");
    NULLS(nib_tensor_update_usage(NULL, 1, 1), "t");
    NULLS(nib_tensor_set_quantizer(NULL, &q), "t");
    NULLS(nib_tensor_set_quantizer(t, NULL), "the quantizer");
    NULLS(nib_tensor_prepare_for_saving(NULL, saved, NIB_PART_COUNT, &(size_t){ 0 }), "t");
    NULLS(nib_tensor_prepare_for_saving(t, NULL, NIB_PART_COUNT, &(size_t){ 0 }), "out");
    NULLS(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, NULL), "n");
    NULLS(nib_tensor_restore_from_saved(NULL, parts, NIB_PART_COUNT, &count), "t");
    NULLS(nib_tensor_restore_from_saved(t, NULL, NIB_PART_COUNT, &count), "saved");
    NULLS(nib_saved_count(NULL, 1, &count), "items");
    NULLS(nib_saved_count(&item, 1, NULL), "count");
    NULLS(nib_prepare_for_saving(NULL, 1, entries, NIB_PART_COUNT, &count), "items");
    NULLS(nib_prepare_for_saving(&item, 1, NULL, NIB_PART_COUNT, &count), "saved");
    NULLS(nib_prepare_for_saving(&item, 1, entries, NIB_PART_COUNT, NULL), "count");
    NULLS(nib_restore_from_saved(NULL, 1, entries, NIB_PART_COUNT, &count), "items");
    NULLS(nib_restore_from_saved(&item, 1, NULL, NIB_PART_COUNT, &count), "saved");
    NULLS(nib_tensor_clone(NULL, &out), "t");
    NULLS(nib_tensor_clone(t, NULL), "out");
    NULLS(nib_tensor_copy(NULL, t), "dst");
    NULLS(nib_tensor_copy(t, NULL), "src");
    NULLS(nib_tensor_zero(NULL), "t");
    NULLS(nib_tensor_view(NULL, DIMS(16, 16), &out), "t");
    NULLS(nib_tensor_view(t, 2, NULL, &out), "shape");
    NULLS(nib_tensor_view(t, DIMS(16, 16), NULL), "out");
    NULLS(nib_tensor_reshape(NULL, DIMS(16, 16), &out), "t");
    NULLS(nib_tensor_reshape(t, 2, NULL, &out), "shape");
    NULLS(nib_tensor_reshape(t, DIMS(16, 16), NULL), "out");
    NULLS(nib_tensor_slice(NULL, 0, 16, &out), "t");
    NULLS(nib_tensor_slice(t, 0, 16, NULL), "out");
    NULLS(nib_tensor_split(NULL, (int64_t[]){ 16 }, 1, &out), "t");
    NULLS(nib_tensor_split(t, NULL, 1, &out), "counts");
    NULLS(nib_tensor_split(t, (int64_t[]){ 16 }, 1, NULL), "out");
    NULLS(nib_tensor_equal(NULL, t, &answer), "a");
    NULLS(nib_tensor_equal(t, NULL, &answer), "b");
    NULLS(nib_tensor_equal(t, t, NULL), "equal");
    NULLS(nib_tensor_swizzle(NULL), "t");
    NULLS(nib_tensor_unswizzle(NULL), "t");
    NULLS(nib_tensor_rebind_rowwise(NULL, nib_tensor_buffer(t, NIB_ROW_DATA)), "t");
    NULLS(nib_tensor_rebind_rowwise(t, NULL), "buffer");
    NULLS(nib_part_shape(NULL, NIB_ROW_DATA, DIMS(4, 4), &rank, shape), "the quantizer");
    NULLS(nib_part_shape(&q, NIB_ROW_DATA, 2, NULL, &rank, shape), "shape");
    NULLS(nib_part_shape(&q, NIB_ROW_DATA, DIMS(4, 4), NULL, shape), "out_rank");
    NULLS(nib_part_shape(&q, NIB_ROW_DATA, DIMS(4, 4), &rank, NULL), "out_shape");
    NULLS(reference_product(NULL, NIB_ROWWISE, t, NIB_ROWWISE, 1, 0, &array), "a");
    NULLS(reference_product(t, NIB_ROWWISE, NULL, NIB_ROWWISE, 1, 0, &array), "b");
    NULLS(reference_product(t, NIB_ROWWISE, t, NIB_ROWWISE, 1, 0, NULL), "y");
    const nib_operand operand = { t, NULL, NIB_ROWWISE };
    NULLS(nib_gemm(NULL, &operand, NULL, &array), "a");
    NULLS(nib_gemm(&operand, NULL, NULL, &array), "b");
    NULLS(nib_gemm(&operand, &operand, NULL, NULL), "y");
    NULLS(nib_gemm_grouped(NULL, &operand, NULL, &array, 1), "a");
    NULLS(nib_gemm_grouped(&operand, NULL, NULL, &array, 1), "b");
    NULLS(nib_gemm_grouped(&operand, &operand, NULL, NULL, 1), "y");
    NULLS(nib_gemm_options_init_sized(NULL, sizeof(nib_gemm_options)), "options");
    CHECK_FAILS(nib_swizzle_scales(NULL, 1, 1, 1, (uint8_t *)memory), NIB_ERR_ARG, "is NULL");
    CHECK_FAILS(nib_swizzle_scales((uint8_t *)memory, 1, 1, 1, NULL), NIB_ERR_ARG, "is NULL");
    CHECK_FAILS(nib_unswizzle_scales(NULL, 1, 1, 1, (uint8_t *)memory), NIB_ERR_ARG, "is NULL");
    CHECK_FAILS(nib_unswizzle_scales((uint8_t *)memory, 1, 1, 1, NULL), NIB_ERR_ARG, "is NULL");
    const struct DLManagedTensor *managed = UNTOUCHED;
    const struct DLManagedTensorVersioned *versioned = UNTOUCHED;
    NULLS(nib_array_from_dlpack(NULL, NULL, &view), "managed");
    NULLS(nib_array_from_dlpack(managed, NULL, NULL), "out");
    NULLS(nib_array_from_dlpack_versioned(NULL, NULL, &view), "managed");
    NULLS(nib_array_from_dlpack_versioned(versioned, NULL, NULL), "out");
    NULLS(nib_buffer_from_dlpack(NULL, NULL, &saved[0]), "managed");
    NULLS(nib_buffer_from_dlpack_versioned(NULL, NULL, &saved[0]), "managed");
    NULLS(nib_tensor_to_dlpack(NULL, NIB_ROW_DATA, (struct DLManagedTensor **)&out), "t");
    NULLS(nib_tensor_to_dlpack(t, NIB_ROW_DATA, NULL), "out");
    NULLS(nib_tensor_to_dlpack_versioned(NULL, NIB_ROW_DATA, (struct DLManagedTensorVersioned **)&out), "t");
    NULLS(nib_tensor_to_dlpack_versioned(t, NIB_ROW_DATA, NULL), "out");
    for (int part = -1; part <= NIB_PART_COUNT; part += NIB_PART_COUNT + 1) {
        CHECK_FAILS(nib_tensor_part(t, (nib_part)part, &view), NIB_ERR_ARG, "is not a part");
        CHECK_FAILS(nib_part_shape(&q, (nib_part)part, DIMS(4, 4), &rank, shape), NIB_ERR_ARG, "is not a part");
    }
    for (int usage = -1; usage <= 3; usage += 4)
        CHECK_FAILS(nib_dequantize(t, (nib_usage)usage, &array), NIB_ERR_ARG, "is not a usage");
    static const int usages[][2] = { { 2, 1 }, { 1, 2 }, { -2, 1 }, { 0, -2 }, { INT32_MAX, INT32_MIN } };
    for (size_t i = 0; i < sizeof usages / sizeof *usages; i++)
        CHECK_FAILS(nib_tensor_update_usage(t, usages[i][0], usages[i][1]), NIB_ERR_ARG, "a usage is 1, 0, or -1");
    metadata.bytes = 0;
    CHECK_FAILS(nib_tensor_get_metadata(t, &metadata), NIB_ERR_ARG, "bytes is 0");
    metadata.bytes = sizeof metadata - 1;
    CHECK_FAILS(nib_tensor_get_metadata(t, &metadata), NIB_ERR_ARG, "set it to sizeof");
    CHECK(out == UNTOUCHED && view.rank == 99 && saved[0] == UNTOUCHED && metadata.rank == 99 && answer == 99);
    CHECK(rank == 99 && shape[0] == 99 && count == 99 && equal(t, before));
    for (int i = 0; i < 256; i++)
        CHECK(memory[i] == 0);
    CHECK_OK(nib_tensor_get_usages(t, NULL, NULL));
    nib_tensor_destroy(before);
    nib_tensor_destroy(t);
}

TEST(scales)
{
    uint8_t in[512], out[512];
    memset(out, 0x5A, sizeof out);
    static const int64_t bad[][3] = { { -1, 4, 4 },
                                      { 4, -1, 4 },
                                      { 4, 4, 3 },
                                      { 4, 4, -4 },
                                      { INT64_MAX, 4, 4 },
                                      { 4, INT64_MAX, INT64_MAX },
                                      { INT64_C(1) << 40, INT64_C(1) << 40, INT64_C(1) << 40 },
                                      { 2, 4, INT64_MAX } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_FAILS(nib_swizzle_scales(in, bad[i][0], bad[i][1], bad[i][2], out), NIB_ERR_SHAPE, "scales of");
        CHECK_FAILS(nib_unswizzle_scales(in, bad[i][0], bad[i][1], bad[i][2], out), NIB_ERR_SHAPE, "scales of");
    }
    for (size_t i = 0; i < sizeof out; i++)
        CHECK(out[i] == 0x5A);
}

/* ---- Files ---- */

TEST(files)
{
    const char *const path = at("errors.safetensors");
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16)), *out = UNTOUCHED;
    nib_writer *writer = UNTOUCHED;
    nib_file *file = UNTOUCHED;
    NULLS(nib_writer_create(NULL, &writer), "path");
    NULLS(nib_writer_create(path, NULL), "out");
    CHECK_FAILS(nib_writer_create("/no such directory/x", &writer), NIB_ERR_IO, "/no such directory/x");
    CHECK(writer == UNTOUCHED);
    CHECK_OK(nib_writer_create(path, &writer));
    NULLS(nib_writer_metadata(NULL, "k", "v"), "writer");
    NULLS(nib_writer_metadata(writer, NULL, "v"), "key");
    NULLS(nib_writer_metadata(writer, "k", NULL), "value");
    NULLS(nib_writer_declare(NULL, "n", NIB_U8, DIMS(1)), "writer");
    NULLS(nib_writer_declare(writer, NULL, NIB_U8, DIMS(1)), "name");
    NULLS(nib_writer_declare(writer, "n", NIB_U8, 1, NULL), "shape");
    CHECK_FAILS(nib_writer_declare(writer, "n", NIB_DTYPE_COUNT, DIMS(1)), NIB_ERR_DTYPE, "\"n\"");
    CHECK_FAILS(nib_writer_declare(writer, "n", NIB_U8, DIMS(-1)), NIB_ERR_SHAPE, "\"n\"");
    CHECK_FAILS(nib_writer_declare(writer, "n", NIB_U8, -1, NULL), NIB_ERR_SHAPE, "\"n\"");
    CHECK_FAILS(nib_writer_declare(writer, "n", NIB_F64, DIMS(INT64_MAX)), NIB_ERR_SHAPE, "\"n\"");
    CHECK_FAILS(nib_writer_declare(writer, "n", NIB_E2M1, DIMS(3)), NIB_ERR_SHAPE, "whole bytes");
    CHECK_FAILS(nib_writer_declare(writer, "", NIB_U8, DIMS(1)), NIB_ERR_ARG, "name");
    CHECK_FAILS(nib_writer_declare(writer, "\xFF", NIB_U8, DIMS(1)), NIB_ERR_ARG, "UTF-8");
    CHECK_FAILS(nib_writer_declare(writer, "__metadata__", NIB_U8, DIMS(1)), NIB_ERR_ARG, "reserves");
    NULLS(nib_writer_declare_tensor(NULL, "t", t), "writer");
    NULLS(nib_writer_declare_tensor(writer, NULL, t), "name");
    NULLS(nib_writer_declare_tensor(writer, "t", NULL), "t");
    CHECK_OK(nib_writer_declare(writer, "n", NIB_U8, DIMS(2)));
    CHECK_FAILS(nib_writer_declare(writer, "n", NIB_U8, DIMS(2)), NIB_ERR_ARG, "twice");
    CHECK_OK(nib_writer_declare_tensor(writer, "t", t));
    NULLS(nib_writer_write(NULL, "n", 0, "xy", 2), "writer");
    NULLS(nib_writer_write(writer, NULL, 0, "xy", 2), "name");
    NULLS(nib_writer_write(writer, "n", 0, NULL, 2), "data");
    CHECK_FAILS(nib_writer_write(writer, "m", 0, "xy", 2), NIB_ERR_ARG, "\"m\"");
    CHECK_FAILS(nib_writer_write(writer, "n", 1, "xy", 2), NIB_ERR_ARG, "not within its 2 bytes");
    CHECK_FAILS(nib_writer_write(writer, "n", UINT64_MAX, "xy", 2), NIB_ERR_ARG, "not within its 2 bytes");
    CHECK_FAILS(nib_writer_write(writer, "n", 0, "xy", SIZE_MAX), NIB_ERR_ARG, "not within its 2 bytes");
    NULLS(nib_writer_write_tensor(NULL, "t", t), "writer");
    NULLS(nib_writer_write_tensor(writer, NULL, t), "name");
    NULLS(nib_writer_write_tensor(writer, "t", NULL), "t");
    NULLS(nib_writer_commit(NULL), "writer");
    CHECK_OK(nib_writer_write(writer, "n", 0, "xy", 2));
    CHECK_OK(nib_writer_write_tensor(writer, "t", t));
    CHECK_OK(nib_writer_commit(writer)); /* what failed above has left no trace */
    CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, "only destroy");
    nib_writer_destroy(writer);

    NULLS(nib_file_open(NULL, &file), "path");
    NULLS(nib_file_open(path, NULL), "out");
    CHECK_FAILS(nib_file_open("", &file), NIB_ERR_IO, "cannot open");
    CHECK_FAILS(nib_file_open(directory, &file), NIB_ERR_IO, directory);
    CHECK(file == UNTOUCHED);
    CHECK_OK(nib_file_open(path, &file));
    CHECK(nib_file_count(file) == 7 && nib_file_metadata_count(file) == 1);
    nib_entry entry = { .rank = 99 };
    size_t index = 99;
    const char *key = "k", *value = "v";
    char bytes[2] = "z";
    NULLS(nib_file_entry(NULL, 0, &entry), "file");
    NULLS(nib_file_entry(file, 0, NULL), "out");
    CHECK_FAILS(nib_file_entry(file, 7, &entry), NIB_ERR_ARG, "no tensor 7");
    CHECK_FAILS(nib_file_entry(file, SIZE_MAX, &entry), NIB_ERR_ARG, path);
    NULLS(nib_file_find(NULL, "n", &index), "file");
    NULLS(nib_file_find(file, NULL, &index), "name");
    NULLS(nib_file_find(file, "n", NULL), "index");
    CHECK_FAILS(nib_file_find(file, "m", &index), NIB_ERR_ARG, "\"m\"");
    CHECK(!nib_file_metadata(file, NULL) && !nib_file_metadata(file, "m"));
    NULLS(nib_file_metadata_entry(NULL, 0, &key, &value), "file");
    NULLS(nib_file_metadata_entry(file, 0, NULL, &value), "key");
    NULLS(nib_file_metadata_entry(file, 0, &key, NULL), "value");
    CHECK_FAILS(nib_file_metadata_entry(file, 1, &key, &value), NIB_ERR_ARG, "no pair 1");
    NULLS(nib_file_read(NULL, 0, 0, bytes, 1), "file");
    NULLS(nib_file_read(file, 0, 0, NULL, 1), "out");
    CHECK_FAILS(nib_file_read(file, 7, 0, bytes, 1), NIB_ERR_ARG, "no tensor 7");
    CHECK_FAILS(nib_file_read(file, 0, 2, bytes, 1), NIB_ERR_ARG, "not within");
    CHECK_FAILS(nib_file_read(file, 0, UINT64_MAX, bytes, 2), NIB_ERR_ARG, "not within");
    CHECK_FAILS(nib_file_read(file, 0, 0, bytes, SIZE_MAX), NIB_ERR_ARG, "not within");
    NULLS(nib_file_read_tensor(NULL, "t", NULL, &out), "file");
    NULLS(nib_file_read_tensor(file, NULL, NULL, &out), "name");
    NULLS(nib_file_read_tensor(file, "t", NULL, NULL), "out");
    CHECK_FAILS(nib_file_read_tensor(file, "n", NULL, &out), NIB_ERR_ARG, "\"n\"");
    CHECK(out == UNTOUCHED && entry.rank == 99 && index == 99 && *key == 'k' && *value == 'v' && *bytes == 'z');
    nib_file_close(file);
    nib_tensor_destroy(t);
}

TEST_MAIN
