/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tensor.c - shapes of parts, creation, quantizing into a tensor that exists, and buffers.
 *
 * Built with NIB_TEST_WRAP_ALLOC it also counts allocations.
 */
#include "test_alloc.h"
#include "test_variants.h"

#include <math.h>

/* ---- Shapes ---- */

TEST(part_shapes)
{
    static const struct {
        int rank;
        int64_t shape[NIB_MAX_RANK], rows, cols;
    } cases[] = {
        { 1, { 1 }, 1, 1 },
        { 1, { 33 }, 1, 33 },
        { 1, { 0 }, 1, 0 },
        { 2, { 128, 64 }, 128, 64 },
        { 2, { 129, 65 }, 129, 65 },
        { 2, { 0, 16 }, 0, 16 },
        { 2, { 16, 0 }, 16, 0 },
        { 3, { 2, 3, 5 }, 6, 5 },
        { 4, { 2, 0, 3, 16 }, 0, 16 },
        { 5, { 1, 2, 3, 4, 5 }, 24, 5 },
        { 6, { 1, 1, 2, 1, 3, 48 }, 6, 48 },
        { 7, { 2, 2, 2, 2, 2, 2, 17 }, 64, 17 },
        { 8, { 1, 2, 1, 3, 1, 2, 11, 31 }, 132, 31 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int row_scaled = 0; row_scaled < 2; row_scaled++) {
            const int64_t m = cases[i].rows, k = cases[i].cols;
            nib_quantizer q = usages(1, 1);
            q.row_scaled = (uint8_t)row_scaled;
            nib_tensor *t = NULL;
            CHECK_OK(nib_tensor_create(&q, NIB_BF16, cases[i].rank, cases[i].shape, NULL, &t));
            const nib_metadata meta = metadata_of(t);
            CHECK(meta.rank == cases[i].rank && meta.rows == m && meta.cols == k && meta.dtype == NIB_BF16);
            CHECK_BYTES(meta.shape, cases[i].shape, sizeof meta.shape);
            const int64_t wanted[NIB_PART_COUNT][2] = {
                { 0 }, /* keeps the leading dims: below */
                { k, (m + 1) / 2 },
                { round_up(m, 128), round_up((k + 15) / 16, 4) },
                { round_up(k, 128), round_up((m + 15) / 16, 4) },
                { row_scaled ? m : 1 },
                { row_scaled ? k : 1 },
            };
            for (int part = 0; part < NIB_PART_COUNT; part++) {
                int rank = -1;
                int64_t shape[NIB_MAX_RANK] = { -1 }, elements = 1;
                nib_array view = { 0 };
                CHECK_OK(nib_part_shape(&q, (nib_part)part, cases[i].rank, cases[i].shape, &rank, shape));
                CHECK_OK(nib_tensor_part(t, (nib_part)part, &view));
                CHECK(rank == (part == 0 ? cases[i].rank : part < NIB_ROW_TENSOR_SCALE ? 2 : 1));
                for (int d = 0; d < rank; d++) {
                    const int64_t row_data = d == rank - 1 ? (k + 1) / 2 : cases[i].shape[d];
                    CHECK(shape[d] == (part == 0 ? row_data : wanted[part][d]));
                    elements *= shape[d];
                }
                const bool tensor_scale = part >= NIB_ROW_TENSOR_SCALE;
                CHECK(view.dtype == (tensor_scale ? NIB_F32 : part >= NIB_ROW_SCALE ? NIB_E4M3 : NIB_U8));
                CHECK(view.rank == rank && view.data == bytes_of(t, (nib_part)part) && view.offset == 0);
                CHECK_BYTES(view.shape, shape, (size_t)rank * sizeof *shape);
                CHECK(view.bytes == (size_t)elements * (tensor_scale ? 4 : 1) &&
                      view.bytes == size_of(t, (nib_part)part));
                CHECK((uintptr_t)view.data % 64 == 0);
            }
            nib_tensor_destroy(t);
        }
}

/* ---- Creation ---- */

TEST(create_is_zero)
{
    for (int i = 0; i < VARIANTS; i++) {
        nib_quantizer q;
        const char *name = variant(i, &q);
        nib_tensor *t = NULL;
        CHECK_OK(nib_tensor_create(&q, NIB_F16, DIMS(3, 16, 32), NULL, &t));
        const nib_metadata m = metadata_of(t);
        const float tensor_scale = m.tensor_scale == NIB_TENSOR_SCALE_AMAX ? 0.0f : 1.0f;
        CHECK_THAT(m.rowwise == q.rowwise && m.columnwise == q.columnwise, "%s", name);
        CHECK(m.format == NIB_NVFP4 && m.dtype == NIB_F16 && nib_quantizer_equal(m.quantizer, &q));
        CHECK_THAT(m.tensor_scale == (q.tensor_scale_rule ? NIB_TENSOR_SCALE_MULTIPLIER
                                      : q.dialect == NIB_DIALECT_GIST || q.dialect == NIB_DIALECT_COMPRESSED_TENSORS
                                          ? NIB_TENSOR_SCALE_DIVISOR
                                      : q.dialect == NIB_DIALECT_TORCHAO ? NIB_TENSOR_SCALE_MULTIPLIER
                                                                         : NIB_TENSOR_SCALE_AMAX),
                   "%s: tensor scale %d", name, (int)m.tensor_scale);
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            const bool there = part % 2 ? q.columnwise : q.rowwise;
            nib_array view = { .rank = 99 };
            CHECK(there == (nib_tensor_buffer(t, (nib_part)part) != NULL));
            if (!there) {
                CHECK_FAILS(nib_tensor_part(t, (nib_part)part, &view), NIB_ERR_USAGE,
                            part % 2 ? "no columnwise usage" : "no rowwise usage");
                CHECK(view.rank == 99);
                continue;
            }
            const uint8_t *bytes = bytes_of(t, (nib_part)part);
            for (size_t b = 0; part < NIB_ROW_TENSOR_SCALE && b < size_of(t, (nib_part)part); b++)
                CHECK(bytes[b] == 0);
            for (size_t b = 0; part >= NIB_ROW_TENSOR_SCALE && b < size_of(t, (nib_part)part) / 4; b++)
                CHECK(((const float *)(const void *)bytes)[b] == tensor_scale);
        }
        for (int usage = 0; usage < 2; usage++)
            if (usage ? q.columnwise : q.rowwise) {
                float *y = values_of(t, (nib_usage)usage);
                for (int j = 0; j < 3 * 16 * 32; j++)
                    CHECK(y[j] == 0);
                free(y);
            }
        nib_tensor_destroy(t);
    }
}

TEST(quantize_copies_its_quantizer)
{
    nib_quantizer q = usages(1, 1);
    q.amax_comm = nib_comm_serial();
    q.seed = 5;
    nib_tensor *t = some(&q, DIMS(5, 7, 33));
    q.seed = 6;
    q.rowwise = 0;
    const nib_metadata m = metadata_of(t);
    CHECK(m.bytes == sizeof m && m.rank == 3 && m.rows == 35 && m.cols == 33 && m.dtype == NIB_F32);
    CHECK(m.quantizer->seed == 5 && m.quantizer->rowwise);
    CHECK(!m.quantizer->amax_comm); /* a communicator never stays */
    check_padding(t);
    nib_tensor_destroy(t);
}

/* Any nonzero flag means on, and neither shows afterwards. */
TEST(flags_are_normalised)
{
    nib_quantizer q = usages(255, 2), one = usages(1, 1);
    q.swizzled = 4;
    one.swizzled = 1;
    float *x = normals(32 * 32);
    nib_tensor *a = quantize_f32(&q, x, DIMS(32, 32)), *b = quantize_f32(&one, x, DIMS(32, 32));
    CHECK(equal(a, b) && nib_quantizer_equal(&q, &one));
    CHECK(quantizer_of(a).rowwise == 1 && quantizer_of(a).swizzled == 1);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free(x);
}

TEST(quantize_without_elements)
{
    static const int64_t shapes[][2] = { { 0, 16 }, { 16, 0 }, { 0, 0 }, { 0, 5 }, { 5, 0 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < VARIANTS; i++) {
            nib_quantizer q;
            const char *name = variant(i, &q);
            if (whole_blocks_only(&q) && (shapes[s][0] % 16 || shapes[s][1] % 16))
                continue;
            if (q.dialect == NIB_DIALECT_GIST)
                continue; /* its tensor scale of nothing is infinite */
            nib_array x = array_of(NULL, NIB_F32, 2, shapes[s]);
            nib_tensor *t = NULL, *u = NULL;
            CHECK_OK(nib_quantize(&q, &x, NULL, &t));
            CHECK_OK(nib_dequantize(t, NIB_EITHER, &x));
            const nib_array none = array_of(NULL, NIB_F32, DIMS(0, shapes[s][1]));
            CHECK_OK(nib_dequantize_rows(t, NIB_EITHER, shapes[s][0], 0, &none));
            CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
            CHECK_OK(nib_tensor_slice(t, 0, shapes[s][0], &u));
            CHECK_THAT(equal(t, u), "%s", name);
            nib_tensor_destroy(u);
            u = clone_of(t);
            CHECK_OK(nib_tensor_copy(u, t));
            CHECK_OK(nib_tensor_zero(u));
            CHECK_OK(nib_tensor_swizzle(u));
            CHECK_OK(nib_tensor_unswizzle(u));
            nib_tensor_destroy(u);
            nib_tensor_destroy(t);
        }
}

/* ---- Quantize into ---- */

TEST(quantize_into_writes_in_place)
{
    float *x = normals(48 * 32), *x2 = normals(48 * 32);
    static const int64_t shapes[][2] = { { 48, 32 }, { 37, 21 } };
    for (int i = 0; i < 2 * VARIANTS; i++) {
        nib_quantizer q;
        const char *name = variant(i / 2, &q);
        const int64_t *shape = shapes[i % 2];
        if (whole_blocks_only(&q) && i % 2)
            continue;
        nib_tensor *t = quantize_f32(&q, x, 2, shape), *fresh = quantize_f32(&q, x2, 2, shape), *view = NULL;
        CHECK_OK(nib_tensor_view(t, DIMS(1, shape[0], shape[1]), &view));
        nib_buffer *before[NIB_PART_COUNT];
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            before[part] = nib_tensor_buffer(t, (nib_part)part);
            if (before[part]) /* nothing of what was there shines through, in missing elements and padding neither */
                memset(nib_buffer_data(before[part]), 0xFF, nib_buffer_bytes(before[part]));
        }
        const nib_array array = array_of(x2, NIB_F32, 2, shape);
        CHECK_OK(nib_quantize_into(i % 4 < 2 ? &q : NULL, &array, NULL, NULL, t));
        CHECK_THAT(equal(t, fresh), "%s: not as a new one", name);
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            CHECK_THAT(nib_tensor_buffer(t, (nib_part)part) == before[part], "%s: part %d moved", name, part);
            CHECK(nib_tensor_buffer(view, (nib_part)part) == before[part]);
        }
        float *seen = values_of(view, NIB_EITHER), *wanted = values_of(fresh, NIB_EITHER);
        CHECK_BYTES(seen, wanted, (size_t)(shape[0] * shape[1]) * sizeof *seen);
        check_padding(t);
        free(seen);
        free(wanted);
        nib_tensor_destroy(view);
        nib_tensor_destroy(fresh);
        nib_tensor_destroy(t);
    }
    free(x);
    free(x2);
}

/* Every change of usages, from every one. */
TEST(quantize_into_changes_usages)
{
    float *x = normals(32 * 48), *x2 = normals(32 * 48);
    const nib_array array = array_of(x2, NIB_F32, DIMS(32, 48));
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            const nib_quantizer q = usages(from & 1, from >> 1), q2 = usages(to & 1, to >> 1);
            nib_tensor *t = quantize_f32(&q, x, DIMS(32, 48)), *fresh = quantize_f32(&q2, x2, DIMS(32, 48)),
                       *view = NULL;
            nib_tensor *old = clone_of(t);
            CHECK_OK(nib_tensor_view(t, DIMS(32, 48), &view));
            CHECK_OK(nib_quantize_into(&q2, &array, NULL, NULL, t));
            CHECK(equal(t, fresh));
            for (int part = 0; part < NIB_PART_COUNT; part++) {
                const int bit = part % 2 ? 2 : 1;
                nib_buffer *mine = nib_tensor_buffer(t, (nib_part)part);
                CHECK((mine != NULL) == ((to & bit) != 0));
                CHECK((nib_tensor_buffer(view, (nib_part)part) != NULL) == ((from & bit) != 0));
                if (from & to & bit)
                    CHECK(mine == nib_tensor_buffer(view, (nib_part)part));
                else if (from & bit) /* dropped here, and as it was there */
                    CHECK_BYTES(bytes_of(view, (nib_part)part), bytes_of(old, (nib_part)part),
                                size_of(old, (nib_part)part));
            }
            const nib_metadata m = metadata_of(t);
            CHECK(nib_quantizer_equal(m.quantizer, &q2) && m.rowwise == q2.rowwise && m.columnwise == q2.columnwise);
            nib_tensor_destroy(old);
            nib_tensor_destroy(view);
            nib_tensor_destroy(fresh);
            nib_tensor_destroy(t);
        }
    free(x);
    free(x2);
}

/* Where the bytes come to mean something else a view keeps the old ones and goes on decoding them. */
TEST(quantize_into_changes_meaning)
{
    float *x = normals(48 * 32), *x2 = normals(48 * 32);
    const nib_array array = array_of(x2, NIB_F32, DIMS(48, 32));
    for (int i = 0; i < VARIANTS; i++)
        for (int j = 0; j < VARIANTS; j++) {
            nib_quantizer q, q2;
            const char *from = variant(i, &q), *to = variant(j, &q2);
            const nib_quantizer before = q;
            const bool stays = q.swizzled == q2.swizzled && q.row_scaled == q2.row_scaled && q.rht == q2.rht &&
                               q.rht_rowwise == q2.rht_rowwise && q.block_dims[0] == q2.block_dims[0] &&
                               q.e4m3_max == q2.e4m3_max;
            nib_tensor *t = quantize_f32(&q, x, DIMS(48, 32)), *fresh = quantize_f32(&q2, x2, DIMS(48, 32)),
                       *view = NULL;
            CHECK_OK(nib_tensor_view(t, DIMS(48, 32), &view));
            nib_tensor *old = clone_of(t);
            if (stays && metadata_of(t).tensor_scale == metadata_of(fresh).tensor_scale) {
                nib_tensor_destroy(view); /* the tests above have these */
            } else {
                CHECK_OK(nib_quantize_into(&q2, &array, NULL, NULL, t));
                CHECK_THAT(equal(t, fresh), "%s to %s", from, to);
                CHECK_THAT(equal(view, old), "%s to %s: the view changed", from, to);
                const nib_quantizer viewed = quantizer_of(view), now = quantizer_of(t);
                CHECK(nib_quantizer_equal(&viewed, &before) && nib_quantizer_equal(&now, &q2));
                nib_tensor_destroy(view);
            }
            nib_tensor_destroy(old);
            nib_tensor_destroy(fresh);
            nib_tensor_destroy(t);
        }
    free(x);
    free(x2);
}

#ifdef NIB_TEST_WRAP_ALLOC
/* What a training step or a server repeats: quantizing into a tensor that is there, and back. Large enough for several
 * threads, whose work needs no memory either. */
TEST(hot_calls_allocate_nothing)
{
    enum { ROWS = 160, COLS = 4096 };
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    float *x = normals(ROWS * COLS), *y = malloc((size_t)(ROWS * COLS) * sizeof *y);
    for (int i = 0; i < VARIANTS + 3 * NIB_FORMAT_COUNT; i++)
        for (int d = 0; d < 3; d++) {
            nib_quantizer q;
            const char *name = i < VARIANTS ? variant(i, &q) : nib_format_name((nib_format)((i - VARIANTS) / 3));
            if (i >= VARIANTS) {
                CHECK_OK(nib_quantizer_init_format(&q, (nib_format)((i - VARIANTS) / 3)));
                q.rowwise = (i - VARIANTS) % 3 != 2, q.columnwise = (i - VARIANTS) % 3 != 1;
            }
            nib_array in = array_of(x, dtypes[d], DIMS(ROWS, COLS)), out = array_of(y, dtypes[d], DIMS(ROWS, COLS));
            in.device = out.device = host_of(3);
            nib_tensor *t = NULL;
            CHECK_OK(nib_tensor_create(&q, dtypes[d], DIMS(ROWS, COLS), NULL, &t));
            const long count = allocations;
            CHECK_OK(nib_quantize_into(NULL, &in, NULL, NULL, t));
            CHECK_OK(nib_quantize_into(&q, &in, NULL, NULL, t));
            in.strides[0] = 1, in.strides[1] = ROWS; /* and through a transposed array */
            CHECK_OK(nib_quantize_into(NULL, &in, NULL, NULL, t));
            for (int usage = 0; usage < 2; usage++)
                if (usage ? q.columnwise : q.rowwise)
                    CHECK_OK(nib_dequantize(t, (nib_usage)usage, &out));
            CHECK_THAT(allocations == count, "%s: %ld allocations", name, allocations - count);
            nib_tensor_destroy(t);
        }
    free(x);
    free(y);
}
#endif

TEST(quantize_into_noop)
{
    const nib_quantizer row = usages(1, 0), other = square(1, 1);
    nib_tensor *t = some(&row, DIMS(16, 48)), *before = clone_of(t);
    float *x = normals(16 * 48);
    const nib_array array = array_of(x, NIB_F32, DIMS(16, 48));
    const float one = 1;
#ifdef NIB_TEST_WRAP_ALLOC
    const long count = allocations;
#endif
    CHECK_OK(nib_quantize_into(&other, &array, NULL, &one, t)); /* another meaning, another copy: and yet nothing */
    CHECK_OK(nib_quantize_into(NULL, &array, NULL, &one, t));
#ifdef NIB_TEST_WRAP_ALLOC
    CHECK(allocations == count);
#endif
    CHECK(equal(t, before));
    const nib_quantizer kept = quantizer_of(t);
    CHECK(nib_quantizer_equal(&kept, &row));
    nib_tensor *fresh = quantize_f32(&row, x, DIMS(16, 48));
    const float flags[] = { 0, 0.5f, -1, 2, nextafterf(1, 2), nextafterf(1, 0), INFINITY, NAN };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        CHECK_OK(nib_tensor_copy(t, before));
        CHECK_OK(nib_quantize_into(NULL, &array, NULL, &flags[i], t));
        CHECK_THAT(equal(t, fresh), "flag %g", (double)flags[i]);
    }
    nib_tensor_destroy(fresh);
    nib_tensor_destroy(before);
    nib_tensor_destroy(t);
    free(x);
}

static nib_status reject(void *context, float *values, size_t n)
{
    (void)values, (void)n;
    (*(int *)context)++;
    return NIB_ERR_IO;
}

TEST(quantize_into_failures_change_nothing)
{
    int calls = 0;
    const nib_comm comm = { .bytes = sizeof comm, .context = &calls, .size = 2, .allreduce_max_f32 = reject };
    float *x = normals(32 * 32);
    const nib_array array = array_of(x, NIB_F32, DIMS(32, 32));
    for (int row_scaled = 0; row_scaled < 2; row_scaled++)
        for (int i = 0; i < 4; i++) {
            nib_quantizer q = usages(1, 0);
            q.row_scaled = (uint8_t)row_scaled;
            nib_tensor *t = some(&q, DIMS(32, 32)), *before = clone_of(t);
            nib_buffer *data = nib_tensor_buffer(t, NIB_ROW_DATA);
            q.amax_comm = &comm;
            q.columnwise = i & 1;
            q.swizzled = i >> 1;
            CHECK_FAILS(nib_quantize_into(&q, &array, NULL, NULL, t), NIB_ERR_COMM, "2 ranks failed: NIB_ERR_IO");
            CHECK(equal(t, before) && nib_tensor_buffer(t, NIB_ROW_DATA) == data && !quantizer_of(t).columnwise);
            q.amax_comm = NULL;
            const nib_array wrong = array_of(x, NIB_F32, DIMS(32, 16)), flat = array_of(x, NIB_F32, DIMS(1024));
            const nib_array deep = array_of(x, NIB_F32, DIMS(1, 32, 32)), bytes = array_of(x, NIB_U8, DIMS(32, 32));
            CHECK_FAILS(nib_quantize_into(&q, &wrong, NULL, NULL, t), NIB_ERR_SHAPE, "not the tensor's");
            CHECK_FAILS(nib_quantize_into(&q, &flat, NULL, NULL, t), NIB_ERR_SHAPE, "not the tensor's");
            CHECK_FAILS(nib_quantize_into(&q, &deep, NULL, NULL, t), NIB_ERR_SHAPE, "not the tensor's");
            CHECK_FAILS(nib_quantize_into(&q, &bytes, NULL, NULL, t), NIB_ERR_DTYPE, "U8");
            q.e4m3_max = 256;
            CHECK_FAILS(nib_quantize_into(&q, &array, NULL, NULL, t), NIB_ERR_MODE, "256");
            CHECK(equal(t, before));
            nib_tensor_destroy(before);
            nib_tensor_destroy(t);
        }
    CHECK(calls == 8);
    free(x);
}

/* The nominal dtype is the tensor's, whatever it is updated from. */
TEST(quantize_into_keeps_the_nominal_dtype)
{
    const nib_quantizer q = usages(1, 1);
    float *x = normals(16 * 16);
    uint16_t half[16 * 16];
    CHECK_OK(nib_encode(NIB_BF16, x, 16 * 16, half));
    const nib_array array = array_of(half, NIB_BF16, DIMS(16, 16));
    nib_tensor *t = quantize_f32(&q, x, DIMS(16, 16)), *fresh = NULL;
    CHECK_OK(nib_quantize(&q, &array, NULL, &fresh));
    CHECK_OK(nib_quantize_into(NULL, &array, NULL, NULL, t));
    CHECK(metadata_of(t).dtype == NIB_F32 && metadata_of(fresh).dtype == NIB_BF16);
    CHECK_BYTES(bytes_of(t, NIB_ROW_DATA), bytes_of(fresh, NIB_ROW_DATA), size_of(t, NIB_ROW_DATA));
    CHECK_BYTES(bytes_of(t, NIB_COL_SCALE), bytes_of(fresh, NIB_COL_SCALE), size_of(t, NIB_COL_SCALE));
    nib_tensor_destroy(fresh);
    nib_tensor_destroy(t);
    free(x);
}

TEST(given_numbers)
{
    float *x = normals(32 * 16);
    const nib_array array = array_of(x, NIB_F32, DIMS(32, 16));
    const float amax = 9, tensor_scale = 7;
    nib_quantizer q = usages(1, 1);
    for (int one = 0; one < 2; one++) { /* one usage's number serves both */
        nib_overrides overrides = { .bytes = sizeof overrides };
        nib_tensor *t = NULL;
        overrides.amax[one] = &amax;
        CHECK_OK(nib_quantize(&q, &array, &overrides, &t));
        CHECK(*(float *)(void *)bytes_of(t, NIB_ROW_TENSOR_SCALE) == 9 &&
              *(float *)(void *)bytes_of(t, NIB_COL_TENSOR_SCALE) == 9);
        overrides.tensor_scale[1 - one] = &tensor_scale; /* and a tensor scale goes before an amax */
        CHECK_OK(nib_quantize_into(&q, &array, &overrides, NULL, t));
        CHECK(*(float *)(void *)bytes_of(t, NIB_ROW_TENSOR_SCALE) == 7 &&
              *(float *)(void *)bytes_of(t, NIB_COL_TENSOR_SCALE) == 7);
        nib_tensor_destroy(t);
    }
    q.rht = 1; /* two different sets of numbers: each usage has its own */
    nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, NULL } };
    nib_tensor *t = NULL;
    CHECK_OK(nib_quantize(&q, &array, &overrides, &t));
    CHECK(*(float *)(void *)bytes_of(t, NIB_ROW_TENSOR_SCALE) == 9 &&
          *(float *)(void *)bytes_of(t, NIB_COL_TENSOR_SCALE) != 9);
    nib_tensor_destroy(t);
    free(x);
}

/* ---- Buffers ---- */

TEST(from_buffers_borrows)
{
    for (int i = 0; i < VARIANTS; i++) {
        nib_quantizer q;
        const char *name = variant(i, &q);
        nib_tensor *t = some(&q, DIMS(48, 32)), *mine = NULL, *second = NULL;
        nib_buffer *parts[NIB_PART_COUNT] = { NULL };
        int released[NIB_PART_COUNT] = { 0 };
        for (int part = 0; part < NIB_PART_COUNT; part++)
            if (nib_tensor_buffer(t, (nib_part)part))
                CHECK_OK(nib_buffer_borrow(bytes_of(t, (nib_part)part), size_of(t, (nib_part)part), NULL, count_release,
                                           &released[part], &parts[part]));
        CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, DIMS(48, 32), parts, NIB_PART_COUNT, &mine));
        CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, DIMS(48, 32), parts, NIB_PART_COUNT, &second));
        CHECK_THAT(equal(t, mine), "%s", name);
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            CHECK(nib_tensor_buffer(mine, (nib_part)part) == parts[part]);
            CHECK(bytes_of(mine, (nib_part)part) == bytes_of(t, (nib_part)part));
            nib_buffer_release(parts[part]); /* the tensors have references of their own */
        }
        CHECK_OK(nib_tensor_zero(mine)); /* the memory is the caller's own */
        CHECK_THAT(equal(t, second), "%s", name);
        nib_tensor_destroy(mine);
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK(released[part] == 0);
        nib_tensor_destroy(second);
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_THAT(released[part] == (parts[part] != NULL), "%s: part %d released %d times", name, part,
                       released[part]);
        nib_tensor_destroy(t);
    }
}

TEST(from_buffers_checks)
{
    const nib_quantizer q = usages(1, 1);
    nib_tensor *t = some(&q, DIMS(48, 32)), *const untouched = (nib_tensor *)&t, *out = untouched;
    static const char *const names[] = { "data", "scale", "tensor scale" };
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        nib_buffer *parts[NIB_PART_COUNT], *odd = NULL;
        char message[64];
        for (int i = 0; i < NIB_PART_COUNT; i++)
            parts[i] = nib_tensor_buffer(t, (nib_part)i);
        parts[part] = NULL;
        CHECK_FAILS(nib_tensor_from_buffers(&q, NIB_F32, DIMS(48, 32), parts, NIB_PART_COUNT, &out), NIB_ERR_USAGE,
                    part % 2 ? "columnwise usage" : "rowwise usage");
        CHECK(strstr(nib_last_error(), names[part / 2]));
        snprintf(message, sizeof message, "the %s %s buffer", part % 2 ? "columnwise" : "rowwise", names[part / 2]);
        for (int off = -1; off <= 1; off += 2) {
            CHECK_OK(nib_buffer_create(size_of(t, (nib_part)part) + (size_t)off, NULL, &odd));
            parts[part] = odd;
            CHECK_FAILS(nib_tensor_from_buffers(&q, NIB_F32, DIMS(48, 32), parts, NIB_PART_COUNT, &out), NIB_ERR_SHAPE,
                        message);
            nib_buffer_release(odd);
        }
        char unaligned[8];
        if (part < NIB_ROW_TENSOR_SCALE)
            continue;
        char *at = unaligned + 1 + ((uintptr_t)unaligned % 4 == 3); /* not a multiple of 4 */
        CHECK_OK(nib_buffer_borrow(at, 4, NULL, NULL, NULL, &odd));
        parts[part] = odd;
        CHECK_FAILS(nib_tensor_from_buffers(&q, NIB_F32, DIMS(48, 32), parts, NIB_PART_COUNT, &out), NIB_ERR_ARG,
                    "aligned");
        nib_buffer_release(odd);
    }
    CHECK(out == untouched);
    nib_buffer *none[NIB_PART_COUNT] = { NULL };
    CHECK_OK(nib_tensor_from_buffers(&q, NIB_BF16, DIMS(48, 32), none, NIB_PART_COUNT, &out));
    CHECK(!metadata_of(out).rowwise && !metadata_of(out).columnwise && !quantizer_of(out).rowwise);
    nib_tensor_destroy(out);
    nib_buffer *row[NIB_PART_COUNT] = { nib_tensor_buffer(t, NIB_ROW_DATA), NULL, nib_tensor_buffer(t, NIB_ROW_SCALE),
                                        NULL, nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE) };
    CHECK_OK(nib_tensor_from_buffers(&q, NIB_BF16, DIMS(48, 32), row, NIB_PART_COUNT, &out));
    CHECK(metadata_of(out).rowwise && !metadata_of(out).columnwise); /* usages follow the buffers */
    CHECK(quantizer_of(out).rowwise && !quantizer_of(out).columnwise);
    nib_tensor_destroy(out);
    nib_tensor_destroy(t);
}

/* A buffer of no bytes may have no memory. */
TEST(from_buffers_of_nothing)
{
    for (int row_scaled = 0; row_scaled < 2; row_scaled++) {
        nib_quantizer q = usages(1, 1);
        q.row_scaled = (uint8_t)row_scaled;
        nib_buffer *parts[NIB_PART_COUNT] = { NULL };
        float tensor_scale[16] = { 0 };
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            int rank;
            int64_t shape[NIB_MAX_RANK], n = 1;
            CHECK_OK(nib_part_shape(&q, (nib_part)part, DIMS(0, 16), &rank, shape));
            for (int d = 0; d < rank; d++)
                n *= shape[d];
            CHECK_OK(nib_buffer_borrow(n ? tensor_scale : NULL, (size_t)n * (part >= NIB_ROW_TENSOR_SCALE ? 4 : 1),
                                       NULL, NULL, NULL, &parts[part]));
        }
        nib_tensor *t = NULL, *u = NULL, *empty = NULL;
        CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, DIMS(0, 16), parts, NIB_PART_COUNT, &t));
        CHECK_OK(nib_tensor_create(&q, NIB_F32, DIMS(0, 16), NULL, &empty));
        CHECK_OK(nib_tensor_zero(t));
        u = clone_of(t);
        CHECK(equal(t, u) && equal(t, empty));
        CHECK_OK(nib_tensor_copy(t, empty));
        CHECK_OK(nib_tensor_copy(empty, t));
        nib_tensor_destroy(u);
        u = NULL;
        CHECK_OK(nib_tensor_slice(t, 0, 0, &u));
        nib_tensor_destroy(u);
        CHECK_OK(nib_tensor_rebind_rowwise(t, nib_tensor_buffer(empty, NIB_ROW_DATA)));
        CHECK_OK(nib_tensor_swizzle(t));
        nib_array x = array_of(NULL, NIB_F32, DIMS(0, 16));
        CHECK_OK(nib_quantize_into(&q, &x, NULL, NULL, t));
        nib_tensor_destroy(empty);
        nib_tensor_destroy(t);
        for (int part = 0; part < NIB_PART_COUNT; part++)
            nib_buffer_release(parts[part]);
    }
}

TEST(buffers_count_their_references)
{
    int released = 0;
    char memory[3];
    nib_buffer *buffer = NULL;
    CHECK_OK(nib_buffer_borrow(memory, 3, NULL, count_release, &released, &buffer));
    CHECK(nib_buffer_data(buffer) == memory && nib_buffer_bytes(buffer) == 3 && nib_buffer_retain(buffer) == buffer);
    nib_buffer_release(buffer);
    CHECK(released == 0);
    nib_buffer_release(buffer);
    CHECK(released == 1);
    CHECK_OK(nib_buffer_create(100, NULL, &buffer));
    CHECK((uintptr_t)nib_buffer_data(buffer) % 64 == 0 && nib_buffer_bytes(buffer) == 100);
    for (int i = 0; i < 100; i++)
        CHECK(((char *)nib_buffer_data(buffer))[i] == 0);
    nib_buffer_release(buffer);
    CHECK_OK(nib_buffer_create(0, NULL, &buffer));
    CHECK(nib_buffer_bytes(buffer) == 0);
    nib_buffer_release(buffer);
    CHECK(!nib_buffer_retain(NULL) && !nib_buffer_data(NULL) && nib_buffer_bytes(NULL) == 0);
    nib_buffer_release(NULL);
    nib_tensor_destroy(NULL);
    nib_tensor_clear(NULL);
}

TEST_MAIN
