/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_errors_memory.c - what every public call does without memory.
 *
 * Built with NIB_TEST_WRAP_ALLOC and -Wl,--wrap=aligned_alloc,--wrap=realloc it fails every allocation once.
 */
#define _GNU_SOURCE
#include "test_alloc.h"
#include "test_directory.h"
#include "test_untouched.h"

#ifdef NIB_TEST_WRAP_ALLOC

/* The call with its first allocation failing, then its second, and so on until it goes through, which takes `least` or
 * more. Where it fails `untouched` must hold. */
#define EVERY_ALLOCATION(least, call, untouched)                                                              \
    do {                                                                                                      \
        int every_n = 0;                                                                                      \
        nib_status every_status;                                                                              \
        do {                                                                                                  \
            allocations_left = every_n++;                                                                     \
            every_status = (call);                                                                            \
            allocations_left = -1;                                                                            \
            if (every_status)                                                                                 \
                CHECK_THAT(every_status == NIB_ERR_MEMORY && *nib_last_error() && (untouched),                \
                           "%s without allocation %d: %s: %s", #call, every_n, nib_status_name(every_status), \
                           nib_last_error());                                                                 \
        } while (every_status == NIB_ERR_MEMORY && every_n < 1000);                                           \
        CHECK_THAT(!every_status && every_n > (least), "%s: %d allocations", #call, every_n - 1);             \
    } while (0)

/* And a call that makes none. */
#define NO_ALLOCATION(call)    \
    do {                       \
        allocations_left = 0;  \
        CHECK_OK(call);        \
        allocations_left = -1; \
    } while (0)

/* Whether a tensor is as it was, down to which buffers it has. */
static nib_buffer *buffers_before[NIB_PART_COUNT];
static nib_tensor *tensor_before;

static void remember(const nib_tensor *t)
{
    nib_tensor_destroy(tensor_before);
    tensor_before = t ? clone_of(t) : NULL;
    for (int part = 0; t && part < NIB_PART_COUNT; part++)
        buffers_before[part] = nib_tensor_buffer(t, (nib_part)part);
}

static bool as_before(const nib_tensor *t)
{
    nib_metadata a = { .bytes = sizeof a }, b = { .bytes = sizeof b };
    CHECK_OK(nib_tensor_get_metadata(t, &a));
    CHECK_OK(nib_tensor_get_metadata(tensor_before, &b));
    for (int part = 0; part < NIB_PART_COUNT; part++)
        if (nib_tensor_buffer(t, (nib_part)part) != buffers_before[part])
            return false;
    return equal(t, tensor_before) && nib_quantizer_equal(a.quantizer, b.quantizer);
}

static int released;

TEST(allocations_fail_in_buffers)
{
    nib_buffer *buffer = UNTOUCHED;
    EVERY_ALLOCATION(2, nib_buffer_create(100, NULL, &buffer), buffer == UNTOUCHED);
    nib_buffer_release(buffer);
    buffer = UNTOUCHED;
    released = 0;
    EVERY_ALLOCATION(1, nib_buffer_borrow(sentinel, 1, NULL, count_release, &released, &buffer),
                     buffer == UNTOUCHED && !released);
    CHECK(released == 0);
    struct DLManagedTensor *managed = UNTOUCHED;
    struct DLManagedTensorVersioned *versioned = UNTOUCHED;
    static float x[4];
    const nib_array array = array_of(x, NIB_F32, DIMS(4));
    EVERY_ALLOCATION(1, nib_array_to_dlpack(&array, buffer, &managed), managed == UNTOUCHED);
    EVERY_ALLOCATION(1, nib_array_to_dlpack_versioned(&array, buffer, &versioned), versioned == UNTOUCHED);
    nib_buffer_release(buffer); /* the two have a reference each */
    CHECK(released == 0);
    buffer = UNTOUCHED;
    EVERY_ALLOCATION(1, nib_buffer_from_dlpack(managed, NULL, &buffer), buffer == UNTOUCHED && !released);
    nib_buffer_release(buffer);
    buffer = UNTOUCHED;
    EVERY_ALLOCATION(1, nib_buffer_from_dlpack_versioned(versioned, NULL, &buffer), buffer == UNTOUCHED && !released);
    nib_buffer_release(buffer);
    CHECK(released == 1); /* both deleters ran, and each gave up its reference */
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16));
    buffer = UNTOUCHED;
    managed = UNTOUCHED;
    versioned = UNTOUCHED;
    EVERY_ALLOCATION(1, nib_tensor_to_dlpack(t, NIB_ROW_DATA, &managed), managed == UNTOUCHED);
    EVERY_ALLOCATION(1, nib_tensor_to_dlpack_versioned(t, NIB_ROW_DATA, &versioned), versioned == UNTOUCHED);
    nib_tensor_destroy(t);
    CHECK_OK(nib_buffer_from_dlpack(managed, NULL, &buffer));
    nib_buffer_release(buffer);
    CHECK_OK(nib_buffer_from_dlpack_versioned(versioned, NULL, &buffer));
    nib_buffer_release(buffer);
    CHECK_NO_LEAKS();
}

TEST(allocations_fail_in_tensors)
{
    static float x[1024];
    for (int i = 0; i < 1024; i++)
        x[i] = test_normal();
    const nib_array array = array_of(x, NIB_F32, DIMS(32, 32));
    nib_tensor *t = UNTOUCHED, *out = UNTOUCHED;
    for (int kind = 0; kind < 5; kind++) {
        nib_quantizer q = default_quantizer();
        q.rht = kind == 1;
        q.row_scaled = kind == 2;
        q.block_dims[0] = kind == 3 ? 16 : 1;
        q.swizzled = kind == 4;
        t = UNTOUCHED;
        EVERY_ALLOCATION(13, nib_quantize(&q, &array, NULL, &t), t == UNTOUCHED);
        out = UNTOUCHED;
        EVERY_ALLOCATION(13, nib_tensor_create(&q, NIB_F32, DIMS(32, 32), NULL, &out), out == UNTOUCHED);
        nib_tensor_destroy(out);
        out = UNTOUCHED;
        EVERY_ALLOCATION(13, nib_tensor_clone(t, &out), out == UNTOUCHED);
        nib_tensor_destroy(out);
        out = UNTOUCHED;
        EVERY_ALLOCATION(1, nib_tensor_view(t, DIMS(2, 16, 32), &out), out == UNTOUCHED);
        nib_tensor_destroy(out);
        out = UNTOUCHED;
        EVERY_ALLOCATION(13, nib_tensor_slice(t, 16, 16, &out), out == UNTOUCHED);
        nib_tensor_destroy(out);
        nib_tensor *pieces[2] = { UNTOUCHED, UNTOUCHED };
        EVERY_ALLOCATION(27, nib_tensor_split(t, (int64_t[]){ 16, 16 }, 2, pieces),
                         pieces[0] == UNTOUCHED && pieces[1] == UNTOUCHED);
        nib_tensor_destroy(pieces[0]);
        nib_tensor_destroy(pieces[1]);

        NO_ALLOCATION(nib_quantize_into(NULL, &array, NULL, NULL, t));
        nib_quantizer changed = q;
        changed.swizzled = !q.swizzled;
        remember(t);
        EVERY_ALLOCATION(12, nib_quantize_into(&changed, &array, NULL, NULL, t), as_before(t));
        remember(t);
        if (q.swizzled)
            EVERY_ALLOCATION(4, nib_tensor_swizzle(t), as_before(t));
        else
            EVERY_ALLOCATION(4, nib_tensor_unswizzle(t), as_before(t));
        CHECK_OK(nib_tensor_update_usage(t, 1, 0));
        remember(t);
        EVERY_ALLOCATION(6, nib_quantize_into(&q, &array, NULL, NULL, t), as_before(t)); /* a copy comes back */
        CHECK_OK(nib_tensor_update_usage(t, 1, 0));
        if (kind == 3) {
            remember(t);
            EVERY_ALLOCATION(6, nib_tensor_update_usage(t, 0, 1), as_before(t));
            CHECK(!nib_tensor_buffer(t, NIB_ROW_DATA));
        }
        nib_tensor_destroy(t);
        CHECK_NO_LEAKS();
    }
    nib_quantizer q = default_quantizer();
    q.columnwise = 0;
    t = some(&q, DIMS(16, 16));
    out = UNTOUCHED;
    remember(t);
    EVERY_ALLOCATION(3, nib_tensor_reshape(t, DIMS(8, 32), &out), out == UNTOUCHED && as_before(t));
    nib_tensor_destroy(out);
    out = UNTOUCHED;
    nib_buffer *parts[NIB_PART_COUNT];
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = nib_tensor_buffer(t, (nib_part)part);
    EVERY_ALLOCATION(1, nib_tensor_from_buffers(&q, NIB_F32, DIMS(16, 16), parts, NIB_PART_COUNT, &out),
                     out == UNTOUCHED);
    nib_tensor_destroy(out);
    nib_tensor_destroy(t);
    remember(NULL);
    CHECK_NO_LEAKS();
}

TEST(allocations_fail_in_fake_quantization)
{
    static float x[32 * 48], y[32 * 48], before[32 * 48];
    static const int64_t shapes[][2] = { { 32, 48 }, { 0, 48 }, { 32, 0 } };
    const nib_quantizer q = default_quantizer();
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        x[i] = test_normal(), before[i] = 7;
    for (int usage = NIB_ROWWISE; usage <= NIB_COLUMNWISE; usage++)
        for (int i = 0; i < 3; i++) {
            const nib_array in = array_of(x, NIB_F32, 2, shapes[i]), out = array_of(y, NIB_F32, 2, shapes[i]);
            memcpy(y, before, sizeof y);
            EVERY_ALLOCATION(2, nib_fake_quantize(&q, &in, NULL, (nib_usage)usage, &out), !memcmp(y, before, sizeof y));
            CHECK((memcmp(y, before, sizeof y) == 0) == (i > 0));
        }
    CHECK_NO_LEAKS();
}

TEST(allocations_fail_in_saving)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16)), *before = clone_of(t);
    nib_buffer *saved[NIB_PART_COUNT];
    size_t used = 99;
    NO_ALLOCATION(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &(size_t){ 0 }));
    EVERY_ALLOCATION(0, nib_tensor_restore_from_saved(t, saved, NIB_PART_COUNT, &used),
                     used == 99 && !nib_tensor_buffer(t, NIB_ROW_DATA));
    CHECK(equal(t, before));
    nib_item items[3] = { { .tensor = t },
                          { .array = array_of(sentinel, NIB_U8, DIMS(1)) },
                          { .tensor = clone_of(t) } };
    nib_saved entries[13];
    size_t count = 0;
    NO_ALLOCATION(nib_prepare_for_saving(items, 3, entries, 13, &count));
    used = 99;
    EVERY_ALLOCATION(0, nib_restore_from_saved(items, 3, entries, count, &used),
                     used == 99 && !nib_tensor_buffer(t, NIB_ROW_DATA) &&
                         !nib_tensor_buffer(items[2].tensor, NIB_ROW_DATA) && !items[1].array.data);
    CHECK(used == 13 && equal(t, before) && equal(items[2].tensor, before));
    nib_tensor_destroy(items[2].tensor);
    nib_tensor_destroy(before);
    nib_tensor_destroy(t);
    CHECK_NO_LEAKS();
}

TEST(calls_that_need_no_memory)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16)), *other = some(&q, DIMS(16, 16));
    static float y[256];
    const nib_array array = array_of(y, NIB_F32, DIMS(16, 16));
    nib_buffer *home = NULL;
    nib_metadata m = { .bytes = sizeof m };
    nib_array view;
    int same;
    CHECK_OK(nib_buffer_create(128, NULL, &home));
    NO_ALLOCATION(nib_dequantize(t, NIB_ROWWISE, &array));
    NO_ALLOCATION(nib_dequantize(t, NIB_COLUMNWISE, &array));
    NO_ALLOCATION(nib_dequantize_rows(t, NIB_COLUMNWISE, 0, 16, &array));
    NO_ALLOCATION(reference_product(t, NIB_ROWWISE, other, NIB_ROWWISE, 1, 0, &array));
    NO_ALLOCATION(nib_tensor_copy(t, other));
    NO_ALLOCATION(nib_tensor_equal(t, other, &same));
    NO_ALLOCATION(nib_tensor_zero(other));
    NO_ALLOCATION(nib_tensor_rebind_rowwise(t, home));
    NO_ALLOCATION(nib_tensor_get_metadata(t, &m));
    NO_ALLOCATION(nib_tensor_part(t, NIB_ROW_DATA, &view));
    NO_ALLOCATION(nib_tensor_set_quantizer(t, &q));
    NO_ALLOCATION(nib_tensor_update_usage(t, 1, 0));
    NO_ALLOCATION(nib_quantize_into(&q, &array, NULL, &(float){ 1 }, t));
    nib_buffer_release(home);
    nib_tensor_destroy(t);
    nib_tensor_destroy(other);
}

/* The scratch of products is the device's, and grows to what the largest needs. */
TEST(products_need_memory_once)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(48, 160)), *small = some(&q, DIMS(5, 32));
    const nib_operand large = { t, NULL, NIB_ROWWISE }, few = { small, NULL, NIB_ROWWISE };
    static float y[48 * 48];
    nib_array array = array_of(y, NIB_F32, DIMS(48, 48)), fewer = array_of(y, NIB_F32, DIMS(5, 5));
    nib_device *device = NULL;
    CHECK_OK(nib_host_create(1, &device));
    array.device = fewer.device = device;
    y[0] = y[48 * 48 - 1] = 99;
    allocations_left = 0;
    if (strcmp(nib_isa(), "scalar") != 0) /* which needs none */
        CHECK_FAILS(nib_gemm(&large, &large, NULL, &array), NIB_ERR_MEMORY, "scratch of a product");
    allocations_left = -1;
    CHECK(strcmp(nib_isa(), "scalar") == 0 || (y[0] == 99 && y[48 * 48 - 1] == 99));
    CHECK_OK(nib_gemm(&large, &large, NULL, &array));
    NO_ALLOCATION(nib_gemm(&large, &large, NULL, &array));
    NO_ALLOCATION(nib_gemm(&few, &few, NULL, &fewer));
    nib_device_release(device);
    nib_tensor_destroy(t);
    nib_tensor_destroy(small);
    CHECK_NO_LEAKS();
}

static nib_status write_whole(const nib_tensor *t)
{
    nib_writer *writer = NULL;
    nib_status status = nib_writer_create(at("errors.safetensors"), &writer);
    if (!status)
        status = nib_writer_declare_tensor(writer, "t", t);
    if (!status)
        status = nib_writer_write_tensor(writer, "t", t);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    return status;
}

TEST(allocations_fail_in_files)
{
    const char *const path = at("errors.safetensors");
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16)), *out = UNTOUCHED;
    nib_file *file = UNTOUCHED;
    EVERY_ALLOCATION(20, write_whole(t), true);
    EVERY_ALLOCATION(5, nib_file_open(path, &file), file == UNTOUCHED);
    EVERY_ALLOCATION(20, nib_file_read_tensor(file, "t", NULL, &out), out == UNTOUCHED);
    CHECK(equal(t, out));
    nib_tensor_destroy(out);
    nib_file_close(file);
    nib_tensor_destroy(t);
    CHECK_NO_LEAKS();
}

/* After a declaration that failed the writer is only fit to be destroyed: no file comes of it. */
TEST(declaration_without_memory)
{
    const char *const path = at("errors.safetensors");
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some(&q, DIMS(16, 16));
    unlink(path); /* of an earlier test */
    for (int n = 1; n < 8; n++) {
        nib_writer *writer = NULL;
        CHECK_OK(nib_writer_create(path, &writer));
        allocations_left = n - 1;
        const nib_status status = nib_writer_declare_tensor(writer, "t", t);
        allocations_left = -1;
        CHECK(status == NIB_OK || status == NIB_ERR_MEMORY);
        if (status)
            CHECK(nib_writer_write_tensor(writer, "t", t) != NIB_OK || nib_writer_commit(writer) != NIB_OK);
        nib_writer_destroy(writer);
        CHECK(!exists(path));
    }
    nib_tensor_destroy(t);
    CHECK_NO_LEAKS();
}

#else

TEST(allocations_fail) { SKIP("built without failing allocations"); }

#endif

TEST_MAIN
