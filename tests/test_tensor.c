/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tensor.c - the life of a tensor: creation, updates, usages, saving, views, slices, comparison, layouts.
 *
 * Built with NIB_TEST_WRAP_ALLOC it also counts allocations.
 */
#include "test_alloc.h"
#include "test_tensors.h"

#include <math.h>

#include "tensor/tensor.h"

/* ---- Helpers ---- */

static nib_quantizer quantizer_of(const nib_tensor *t) { return *metadata_of(t).quantizer; }

static nib_quantizer square(int rowwise, int columnwise)
{
    nib_quantizer q = usages(rowwise, columnwise);
    q.block_dims[0] = 16;
    return q;
}

/* All values as [M, K], from one usage. */
static float *values_of(const nib_tensor *t, nib_usage from)
{
    const nib_metadata m = metadata_of(t);
    float *y = malloc((size_t)(m.rows * m.cols + 1) * sizeof *y);
    const nib_array out = array_of(y, NIB_F32, DIMS(m.rows, m.cols));
    CHECK_OK(nib_dequantize_rows(t, from, 0, m.rows, &out));
    return y;
}

/* Every scale that stands for no block is 0. */
static void check_padding(const nib_tensor *t)
{
    const nib_metadata m = metadata_of(t);
    for (int usage = 0; usage < 2; usage++) {
        const uint8_t *scales = bytes_of(t, usage ? NIB_COL_SCALE : NIB_ROW_SCALE);
        if (!(usage ? m.columnwise : m.rowwise))
            continue;
        const int64_t lines = usage ? m.cols : m.rows, blocks = ((usage ? m.rows : m.cols) + 15) / 16;
        const int64_t stride = round_up(blocks, 4);
        for (int64_t line = 0; line < round_up(lines, 128); line++)
            for (int64_t block = line < lines ? blocks : 0; block < stride; block++)
                if (scales[scale_place(line, block, stride, m.quantizer->swizzled)]) {
                    CHECK_THAT(false, "copy %d: padding at (%d, %d) is not 0", usage, (int)line, (int)block);
                    return;
                }
    }
}

/* The kinds of tensors that there are. Those with an RHT need whole blocks. */
enum { VARIANTS = 21 };

static const char *variant(int i, nib_quantizer *q)
{
    static const char *const names[VARIANTS] = {
        "both",         "rowwise",    "columnwise", "16x16",       "16x16 rowwise", "16x16 columnwise", "swizzled",
        "16x16 tiled",  "row-scaled", "rs rowwise", "rs swizzled", "rht",           "rht both",         "exact",
        "power of two", "4over6",     "gist",       "torchao",     "compressed-t.", "stochastic",       "16x16 unbiased"
    };
    const bool rowwise = i != 2 && i != 5, columnwise = i != 1 && i != 4 && i != 9;
    *q = usages(rowwise, columnwise);
    q->block_dims[0] = i == 3 || i == 4 || i == 5 || i == 7 || i == 20 ? 16 : 1;
    q->swizzled = i == 6 || i == 7 || i == 10;
    q->row_scaled = i == 8 || i == 9 || i == 10;
    q->rht = i == 11 || i == 12;
    q->rht_rowwise = i == 12;
    q->tensor_scale_rule = i == 13   ? NIB_TENSOR_SCALE_RULE_EXACT
                           : i == 14 ? NIB_TENSOR_SCALE_RULE_POW2
                                     : NIB_TENSOR_SCALE_RULE_DIALECT;
    if (i == 15)
        q->scale_rule = NIB_SCALE_4OVER6, q->e4m3_max = 256;
    q->dialect = i == 16   ? NIB_DIALECT_GIST
                 : i == 17 ? NIB_DIALECT_TORCHAO
                 : i == 18 ? NIB_DIALECT_COMPRESSED_TENSORS
                           : NIB_DIALECT_TE;
    q->rounding = i == 19 ? NIB_ROUND_STOCHASTIC_24 : i == 20 ? NIB_ROUND_STOCHASTIC_UNBIASED : NIB_ROUND_NEAREST;
    q->seed = 77;
    return names[i];
}

static bool whole_blocks_only(const nib_quantizer *q) { return q->rht || q->rht_rowwise; }

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
            CHECK_FAILS(nib_tensor_from_buffers(&q, NIB_F32, DIMS(48, 32), parts, NIB_PART_COUNT, &out), NIB_ERR_SHAPE, message);
            nib_buffer_release(odd);
        }
        char unaligned[8];
        if (part < NIB_ROW_TENSOR_SCALE)
            continue;
        char *at = unaligned + 1 + ((uintptr_t)unaligned % 4 == 3); /* not a multiple of 4 */
        CHECK_OK(nib_buffer_borrow(at, 4, NULL, NULL, NULL, &odd));
        parts[part] = odd;
        CHECK_FAILS(nib_tensor_from_buffers(&q, NIB_F32, DIMS(48, 32), parts, NIB_PART_COUNT, &out), NIB_ERR_ARG, "aligned");
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
            CHECK_OK(nib_buffer_borrow(n ? tensor_scale : NULL, (size_t)n * (part >= NIB_ROW_TENSOR_SCALE ? 4 : 1), NULL,
                                       NULL, NULL, &parts[part]));
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

/* ---- Usages ---- */

/* Every state of a tensor against every request, 1x16 and 16x16, compact and swizzled. */
TEST(update_usage_states)
{
    float *x = normals(48 * 32);
    for (int kind = 0; kind < 4; kind++)
        for (int has = 0; has < 4; has++)
            for (int rowwise = -1; rowwise <= 1; rowwise++)
                for (int columnwise = -1; columnwise <= 1; columnwise++) {
                    const bool tiles = kind & 1, swizzled = kind >> 1, row = has & 1, col = has >> 1;
                    nib_quantizer q = tiles ? square(row, col) : usages(row, col);
                    q.swizzled = swizzled;
                    nib_tensor *t = quantize_f32(&q, x, DIMS(3, 16, 32)), *before = clone_of(t);
                    const bool want_row = rowwise < 0 ? row : rowwise, want_col = columnwise < 0 ? col : columnwise;
                    const bool build = want_col && !col;
                    const bool possible = (!want_row || row) && (!build || (row && tiles && !swizzled));
                    const nib_status status = nib_tensor_update_usage(t, rowwise, columnwise);
                    CHECK_THAT(status == (possible ? NIB_OK : NIB_ERR_USAGE), "kind %d has %d request %d %d: %s", kind,
                               has, rowwise, columnwise, nib_status_name(status));
                    int now_row = -1, now_col = -1;
                    CHECK_OK(nib_tensor_get_usages(t, &now_row, &now_col));
                    const nib_metadata m = metadata_of(t);
                    CHECK(now_row == m.rowwise && now_col == m.columnwise);
                    CHECK(now_row == m.quantizer->rowwise && now_col == m.quantizer->columnwise);
                    if (possible) {
                        nib_quantizer wanted = q;
                        wanted.rowwise = want_row, wanted.columnwise = want_col;
                        nib_tensor *fresh = quantize_f32(&wanted, x, DIMS(3, 16, 32));
                        CHECK(equal(t, fresh));
                        check_padding(t);
                        nib_tensor_destroy(fresh);
                    } else {
                        CHECK(equal(t, before));
                        const char *words = want_row && !row ? "no rowwise usage"
                                            : !row           ? "does not have"
                                            : !tiles         ? "quantize again"
                                                             : "unswizzle";
                        CHECK_THAT(strstr(nib_last_error(), words), "%s", nib_last_error());
                    }
                    nib_tensor_destroy(before);
                    nib_tensor_destroy(t);
                }
    free(x);
}

/* The transpose of 16x16 tiles is what quantizing directly gives, tails and random rounding too. */
TEST(update_usage_builds_the_direct_copy)
{
    static const int64_t shapes[][2] = { { 16, 16 }, { 1, 16 }, { 33, 17 }, { 130, 70 },
                                         { 5, 300 }, { 0, 16 }, { 16, 0 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int rounding = 0; rounding < NIB_ROUNDING_COUNT; rounding++)
            for (int keep = 0; keep < 2; keep++) {
                nib_quantizer row = square(1, 0), direct = square(keep, 1);
                row.rounding = direct.rounding = (nib_rounding)rounding;
                row.seed = direct.seed = 11;
                float *x = normals(shapes[s][0] * shapes[s][1]);
                nib_tensor *t = quantize_f32(&row, x, 2, shapes[s]), *fresh = quantize_f32(&direct, x, 2, shapes[s]);
                nib_tensor *view = NULL;
                CHECK_OK(nib_tensor_view(t, 2, shapes[s], &view));
                CHECK_OK(nib_tensor_update_usage(t, keep, 1));
                CHECK_THAT(equal(t, fresh), "shape %zu rounding %d keep %d", s, rounding, keep);
                CHECK_BYTES(bytes_of(t, NIB_COL_SCALE), bytes_of(fresh, NIB_COL_SCALE), size_of(t, NIB_COL_SCALE));
                CHECK(metadata_of(view).rowwise && !metadata_of(view).columnwise);
                nib_tensor_destroy(view);
                nib_tensor_destroy(fresh);
                nib_tensor_destroy(t);
                free(x);
            }
}

TEST(set_quantizer)
{
    for (int i = 0; i < VARIANTS; i++)
        for (int j = 0; j < VARIANTS; j++) {
            nib_quantizer q, q2;
            const char *from = variant(i, &q), *to = variant(j, &q2);
            nib_tensor *t = NULL, *u = NULL;
            CHECK_OK(nib_tensor_create(&q, NIB_F32, DIMS(16, 16), NULL, &t));
            CHECK_OK(nib_tensor_create(&q2, NIB_F32, DIMS(16, 16), NULL, &u));
            const bool same = q.swizzled == q2.swizzled && q.row_scaled == q2.row_scaled && q.rht == q2.rht &&
                              q.rht_rowwise == q2.rht_rowwise && q.block_dims[0] == q2.block_dims[0] &&
                              q.e4m3_max == q2.e4m3_max && metadata_of(t).tensor_scale == metadata_of(u).tensor_scale;
            const int usages[2] = { metadata_of(t).rowwise, metadata_of(t).columnwise };
            if (same) {
                CHECK_OK(nib_tensor_set_quantizer(t, &q2));
            } else {
                CHECK_FAILS(nib_tensor_set_quantizer(t, &q2), NIB_ERR_MISMATCH, "another meaning");
            }
            const nib_metadata m = metadata_of(t);
            CHECK_THAT(nib_quantizer_equal(m.quantizer, same ? &q2 : &q), "%s to %s", from, to);
            CHECK(m.rowwise == usages[0] && m.columnwise == usages[1]); /* for later updates only */
            nib_tensor_destroy(u);
            nib_tensor_destroy(t);
        }
    nib_quantizer q = usages(1, 1);
    q.rht = 1;
    nib_tensor *t = some(&q, DIMS(16, 16));
    q.rht_sign_mask ^= 1;
    CHECK_FAILS(nib_tensor_set_quantizer(t, &q), NIB_ERR_MISMATCH, "another meaning");
    q.rht_sign_mask ^= 1;
    q.amax_comm = nib_comm_serial();
    q.offset = 44;
    CHECK_OK(nib_tensor_set_quantizer(t, &q));
    CHECK(!quantizer_of(t).amax_comm && quantizer_of(t).offset == 44);
    nib_tensor_destroy(t);
    q = usages(1, 0); /* without an RHT the mask means nothing */
    t = some(&q, DIMS(5, 5));
    q.rht_sign_mask = 0;
    q.columnwise = 1;
    CHECK_OK(nib_tensor_set_quantizer(t, &q));
    float *x = normals(25);
    const nib_array array = array_of(x, NIB_F32, DIMS(5, 5));
    CHECK_OK(nib_quantize_into(NULL, &array, NULL, NULL, t)); /* the later update makes the copy */
    CHECK(metadata_of(t).columnwise);
    free(x);
    nib_tensor_destroy(t);
}

/* ---- Save and restore ---- */

TEST(save_and_restore)
{
    for (int i = 0; i < VARIANTS; i++) {
        nib_quantizer q;
        const char *name = variant(i, &q);
        nib_tensor *t = some(&q, DIMS(48, 32)), *before = clone_of(t);
        nib_buffer *buffers[NIB_PART_COUNT], *saved[NIB_PART_COUNT + 2];
        for (int part = 0; part < NIB_PART_COUNT; part++)
            buffers[part] = nib_tensor_buffer(t, (nib_part)part);
        size_t saved_count = 0;
        CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &saved_count));
        CHECK(saved_count == NIB_PART_COUNT);
        CHECK_BYTES(saved, buffers, sizeof buffers); /* the order of nib_part, NULL where absent */
        const nib_metadata m = metadata_of(t);
        CHECK(!m.rowwise && !m.columnwise && m.rows == 48 && m.cols == 32 && nib_quantizer_equal(m.quantizer, &q));
        CHECK_FAILS(
            nib_dequantize(
                t, NIB_EITHER,
                &(nib_array){
                    .data = buffers, .bytes = sizeof buffers, .dtype = NIB_F32, .rank = 2, .shape = { 48, 32 } }),
            NIB_ERR_SHAPE, "stride 0");
        size_t used = 99;
        for (size_t n = 0; n < NIB_PART_COUNT; n++) {
            CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, n, &used), NIB_ERR_ARG, "6 buffers");
            CHECK(used == 99 && !metadata_of(t).rowwise && !metadata_of(t).columnwise);
        }
        saved[6] = saved[7] = NULL;
        CHECK_OK(nib_tensor_restore_from_saved(t, saved, NIB_PART_COUNT + i % 3, &used)); /* from the front of a list */
        CHECK(used == NIB_PART_COUNT);
        CHECK_THAT(equal(t, before), "%s", name);
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK(nib_tensor_buffer(t, (nib_part)part) == buffers[part]);
        CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, NIB_PART_COUNT, &used), NIB_ERR_USAGE, "still has data");
        CHECK(equal(t, before));
        nib_tensor_destroy(before);
        nib_tensor_destroy(t);
    }
}

TEST(restore_checks_buffers)
{
    const nib_quantizer q = usages(1, 1);
    nib_tensor *t = some(&q, DIMS(48, 32)), *other = some(&q, DIMS(48, 64));
    nib_buffer *saved[NIB_PART_COUNT], *bad[NIB_PART_COUNT];
    size_t used = 99, saved_count = 0;
    CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &saved_count));
    CHECK(saved_count == NIB_PART_COUNT);
    for (int part = 0; part < NIB_ROW_TENSOR_SCALE; part++) {
        memcpy(bad, saved, sizeof bad);
        bad[part] = nib_tensor_buffer(other, (nib_part)part);
        if (nib_buffer_bytes(bad[part]) != nib_buffer_bytes(saved[part]))
            CHECK_FAILS(nib_tensor_restore_from_saved(t, bad, NIB_PART_COUNT, &used), NIB_ERR_SHAPE,
                        "bytes instead of");
        bad[part] = NULL;
        CHECK_FAILS(nib_tensor_restore_from_saved(t, bad, NIB_PART_COUNT, &used), NIB_ERR_USAGE, "usage has");
    }
    CHECK(used == 99 && !nib_tensor_buffer(t, NIB_ROW_DATA));
    /* One copy alone goes, and an absent count too. */
    memcpy(bad, saved, sizeof bad);
    bad[NIB_COL_DATA] = bad[NIB_COL_SCALE] = bad[NIB_COL_TENSOR_SCALE] = NULL;
    CHECK_OK(nib_tensor_restore_from_saved(t, bad, NIB_PART_COUNT, NULL));
    CHECK(metadata_of(t).rowwise && !metadata_of(t).columnwise);
    for (int part = 1; part < NIB_PART_COUNT; part += 2)
        nib_buffer_release(saved[part]);
    nib_tensor_destroy(other);
    nib_tensor_destroy(t);
}

TEST(save_and_restore_a_mixed_list)
{
    const nib_quantizer both = usages(1, 1), row = usages(1, 0);
    float *x = normals(64);
    nib_item items[5] = { { .array = array_of(x, NIB_F32, DIMS(8, 8)) },
                          { .tensor = some(&both, DIMS(16, 16)) },
                          { .array = array_of(x, NIB_U8, DIMS(3)) },
                          { .tensor = some(&row, DIMS(4, 32)) },
                          { .array = array_of(NULL, NIB_BF16, DIMS(0)) } };
    nib_item before[5];
    memcpy(before, items, sizeof items);
    nib_tensor *clones[2] = { clone_of(items[1].tensor), clone_of(items[3].tensor) };
    nib_saved saved[20];
    size_t count = 99, used = 99;
    CHECK_OK(nib_saved_count(items, 5, &count));
    CHECK(count == 15);
    CHECK_OK(nib_saved_count(items, 0, &count));
    CHECK(count == 0);
    count = 99;
    memset(saved, 0x5A, sizeof saved);
    for (size_t capacity = 0; capacity < 15; capacity++)
        CHECK_FAILS(nib_prepare_for_saving(items, 5, saved, capacity, &count), NIB_ERR_ARG, "15 entries");
    CHECK(count == 99 && *(char *)saved == 0x5A && memcmp(items, before, sizeof items) == 0);
    CHECK(equal(items[1].tensor, clones[0]) && equal(items[3].tensor, clones[1]));

    CHECK_OK(nib_prepare_for_saving(items, 5, saved, 20, &count));
    CHECK(count == 15);
    static const int kinds[15] = { -1, 0, 1, 2, 3, 4, 5, -1, 0, 1, 2, 3, 4, 5, -1 }; /* -1: a plain array */
    for (int i = 0; i < 15; i++) {
        const bool absent = i >= 8 && i < 14 && kinds[i] % 2; /* the second tensor is rowwise only */
        CHECK_THAT((saved[i].buffer != NULL) == (kinds[i] >= 0 && !absent), "entry %d", i);
        CHECK(kinds[i] < 0 || !saved[i].array.data);
    }
    CHECK(saved[0].array.data == x && saved[0].array.rank == 2 && saved[7].array.dtype == NIB_U8);
    CHECK(saved[14].array.rank == 1 && saved[14].array.shape[0] == 0);
    CHECK(items[1].tensor == before[1].tensor && !metadata_of(items[1].tensor).rowwise && !items[0].array.data);

    /* Whatever is rejected moves nothing, also what came before the fault. */
    for (size_t n = 0; n < 15; n++)
        CHECK_FAILS(nib_restore_from_saved(items, 5, saved, n, &used), NIB_ERR_ARG, "15 entries");
    nib_buffer *kept = saved[12].buffer;
    saved[12].buffer = NULL;
    CHECK_FAILS(nib_restore_from_saved(items, 5, saved, 15, &used), NIB_ERR_USAGE, "rowwise usage has");
    saved[12].buffer = saved[8].buffer;
    CHECK_FAILS(nib_restore_from_saved(items, 5, saved, 15, &used), NIB_ERR_SHAPE, "bytes instead of");
    saved[12].buffer = kept;
    CHECK(used == 99 && !metadata_of(items[1].tensor).rowwise && !items[0].array.data);

    CHECK_OK(nib_restore_from_saved(items, 5, saved, 20, &used));
    CHECK(used == 15);
    CHECK(equal(items[1].tensor, clones[0]) && equal(items[3].tensor, clones[1]));
    for (int i = 0; i < 5; i += 2) {
        CHECK(!items[i].tensor);
        CHECK_BYTES(&items[i].array, &before[i].array, sizeof before[i].array);
    }
    CHECK_FAILS(nib_restore_from_saved(items, 5, saved, 15, &used), NIB_ERR_USAGE, "still has data");
    CHECK(equal(items[1].tensor, clones[0]));
    for (int i = 1; i < 5; i += 2) {
        nib_tensor_destroy(items[i].tensor);
        nib_tensor_destroy(clones[i / 2]);
    }
    free(x);
}

/* An input that a function saves twice is still one tensor. */
TEST(save_one_tensor_twice)
{
    const nib_quantizer q = usages(1, 1);
    nib_item items[2] = { { .tensor = some(&q, DIMS(16, 16)) } };
    items[1].tensor = items[0].tensor;
    nib_tensor *before = clone_of(items[0].tensor);
    nib_saved saved[12];
    size_t count = 0, used = 0;
    if (nib_prepare_for_saving(items, 2, saved, 12, &count) == NIB_OK)
        CHECK_OK(nib_restore_from_saved(items, 2, saved, count, &used));
    CHECK(equal(items[0].tensor, before)); /* rejected, or given back */
    nib_tensor_destroy(before);
    nib_tensor_destroy(items[0].tensor);
}

TEST(clear_keeps_the_rest)
{
    const nib_quantizer q = usages(1, 1);
    nib_tensor *t = some(&q, DIMS(2, 8, 16)), *view = NULL;
    CHECK_OK(nib_tensor_view(t, DIMS(16, 16), &view));
    nib_tensor_clear(t);
    const nib_metadata m = metadata_of(t);
    CHECK(!m.rowwise && !m.columnwise && m.rank == 3 && m.shape[1] == 8 && m.dtype == NIB_F32);
    CHECK(nib_quantizer_equal(m.quantizer, &q) && metadata_of(view).rowwise);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        CHECK(!nib_tensor_buffer(t, (nib_part)part));
    float *y = normals(256), first = y[0];
    const nib_array out = array_of(y, NIB_F32, DIMS(2, 8, 16));
    CHECK_FAILS(nib_dequantize(t, NIB_EITHER, &out), NIB_ERR_USAGE, "no data");
    CHECK_FAILS(nib_dequantize(t, NIB_ROWWISE, &out), NIB_ERR_USAGE, "no rowwise usage");
    CHECK_FAILS(nib_dequantize(t, NIB_COLUMNWISE, &out), NIB_ERR_USAGE, "no columnwise usage");
    CHECK(y[0] == first);
    nib_tensor_clear(t);
    CHECK_OK(nib_quantize_into(NULL, &out, NULL, NULL, t)); /* an update brings it back */
    CHECK(metadata_of(t).rowwise && metadata_of(t).columnwise);
    free(y);
    nib_tensor_destroy(view);
    nib_tensor_destroy(t);
}

/* ---- Clone, copy, zero ---- */

TEST(clone_is_deep)
{
    for (int i = 0; i < VARIANTS; i++) {
        nib_quantizer q;
        const char *name = variant(i, &q);
        nib_tensor *t = some(&q, DIMS(3, 16, 32)), *usage = clone_of(t), *second = clone_of(t);
        const nib_metadata a = metadata_of(t), b = metadata_of(usage);
        CHECK_THAT(equal(t, usage), "%s", name);
        CHECK(a.rank == b.rank && a.dtype == b.dtype && nib_quantizer_equal(a.quantizer, b.quantizer));
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            if (!nib_tensor_buffer(t, (nib_part)part))
                continue;
            CHECK(bytes_of(usage, (nib_part)part) != bytes_of(t, (nib_part)part));
            CHECK_BYTES(bytes_of(usage, (nib_part)part), bytes_of(t, (nib_part)part), size_of(t, (nib_part)part));
            memset(bytes_of(usage, (nib_part)part), 0x11, size_of(t, (nib_part)part));
            CHECK_THAT(equal(t, second), "%s: part %d is shared", name, part);
        }
        nib_tensor_destroy(second);
        nib_tensor_destroy(t);
        nib_tensor_destroy(usage);
    }
    const nib_quantizer q = usages(1, 1);
    nib_tensor *t = some(&q, DIMS(4, 4)), *usage = NULL;
    nib_tensor_clear(t);
    CHECK_OK(nib_tensor_clone(t, &usage));
    CHECK(equal(t, usage) && !metadata_of(usage).rowwise);
    nib_tensor_destroy(usage);
    nib_tensor_destroy(t);
}

TEST(copy_goes_in_place)
{
    for (int i = 0; i < VARIANTS; i++) {
        nib_quantizer q;
        const char *name = variant(i, &q);
        nib_tensor *src = some(&q, DIMS(48, 32)), *dst = some(&q, DIMS(48, 32)), *view = NULL;
        CHECK(!equal(src, dst));
        CHECK_OK(nib_tensor_view(dst, DIMS(48, 32), &view));
        CHECK_OK(nib_tensor_copy(dst, src));
        CHECK_THAT(equal(src, dst) && equal(view, src), "%s", name);
        CHECK(nib_tensor_buffer(dst, NIB_ROW_DATA) == nib_tensor_buffer(view, NIB_ROW_DATA));
        CHECK_OK(nib_tensor_copy(dst, dst));
        CHECK_OK(nib_tensor_copy(dst, view));
        CHECK(equal(src, dst));
        nib_tensor_destroy(view);
        nib_tensor_destroy(dst);
        nib_tensor_destroy(src);
    }
}

TEST(copy_mismatches)
{
    const nib_quantizer both = usages(1, 1), row = usages(1, 0), col = usages(0, 1), none = usages(0, 0);
    nib_tensor *dst = some(&both, DIMS(48, 32)), *before = clone_of(dst);
    for (int i = 0; i < VARIANTS; i++) { /* those of another meaning */
        nib_quantizer q;
        const char *name = variant(i, &q);
        nib_tensor *src = some(&q, DIMS(48, 32));
        const bool other = q.swizzled || q.row_scaled || q.rht || q.block_dims[0] == 16 || q.e4m3_max == 256 ||
                           metadata_of(src).tensor_scale != NIB_TENSOR_SCALE_AMAX;
        if (other) {
            CHECK_FAILS(nib_tensor_copy(dst, src), NIB_ERR_MISMATCH, "differ in");
            CHECK_THAT(equal(dst, before), "%s", name);
        }
        nib_tensor_destroy(src);
    }
    static const int64_t shapes[][2] = { { 32, 48 }, { 48, 16 }, { 96, 16 }, { 49, 32 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        nib_tensor *src = some(&both, 2, shapes[s]);
        CHECK_FAILS(nib_tensor_copy(dst, src), NIB_ERR_MISMATCH, "48 x 32");
        nib_tensor_destroy(src);
    }
    nib_quantizer mask = both; /* the sign mask counts where there is a transform */
    mask.rht = 1;
    nib_tensor *a = some(&mask, DIMS(16, 16));
    mask.rht_sign_mask = 0;
    nib_tensor *b = some(&mask, DIMS(16, 16));
    CHECK_FAILS(nib_tensor_copy(a, b), NIB_ERR_MISMATCH, "RHT");
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);

    const nib_quantizer *sources[] = { &both, &row, &col, &none }, *targets[] = { &both, &row, &col, &none };
    for (int s = 0; s < 4; s++)
        for (int d = 0; d < 4; d++) {
            nib_tensor *src = some(sources[s], DIMS(16, 32)), *to = some(targets[d], DIMS(16, 32));
            nib_tensor *old = clone_of(to);
            const bool stale_row = targets[d]->rowwise && !sources[s]->rowwise;
            const bool stale_col = targets[d]->columnwise && !sources[s]->columnwise;
            if (stale_row || stale_col) {
                CHECK_FAILS(nib_tensor_copy(to, src), NIB_ERR_USAGE, stale_row ? "rowwise" : "columnwise");
                CHECK(equal(to, old));
            } else {
                CHECK_OK(nib_tensor_copy(to, src));
                for (int part = 0; part < NIB_PART_COUNT; part++)
                    if (nib_tensor_buffer(to, (nib_part)part))
                        CHECK_BYTES(bytes_of(to, (nib_part)part), bytes_of(src, (nib_part)part),
                                    size_of(to, (nib_part)part));
                CHECK(metadata_of(to).rowwise == targets[d]->rowwise); /* it gains no copy */
                CHECK(metadata_of(to).columnwise == targets[d]->columnwise);
            }
            nib_tensor_destroy(old);
            nib_tensor_destroy(to);
            nib_tensor_destroy(src);
        }
    nib_tensor_destroy(before);
    nib_tensor_destroy(dst);
}

/* nib.h: tensors of the same shape; the same matrix of another rank is another shape. */
TEST(copy_wants_the_same_shape)
{
    const nib_quantizer q = usages(1, 1);
    nib_tensor *a = some(&q, DIMS(2, 8, 16)), *b = some(&q, DIMS(16, 16)), *before = clone_of(a);
    CHECK_FAILS(nib_tensor_copy(a, b), NIB_ERR_MISMATCH, "");
    CHECK(equal(a, before));
    nib_tensor_destroy(before);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

TEST(zero_goes_in_place)
{
    for (int i = 0; i < VARIANTS; i++) {
        nib_quantizer q;
        const char *name = variant(i, &q);
        nib_tensor *t = some(&q, DIMS(48, 32)), *view = NULL, *fresh = NULL;
        CHECK_OK(nib_tensor_view(t, DIMS(48, 32), &view));
        CHECK_OK(nib_tensor_create(&q, NIB_F32, DIMS(48, 32), NULL, &fresh));
        CHECK_OK(nib_tensor_zero(t));
        CHECK_THAT(equal(t, fresh) && equal(view, fresh), "%s", name);
        nib_tensor_destroy(fresh);
        nib_tensor_destroy(view);
        nib_tensor_destroy(t);
    }
}

/* ---- View and reshape ---- */

TEST(view_changes_the_rank)
{
    static const struct {
        int rank;
        int64_t shape[NIB_MAX_RANK], resolved[NIB_MAX_RANK];
    } shapes[] = {
        { 2, { 48, 32 }, { 48, 32 } },
        { 2, { -1, 32 }, { 48, 32 } },
        { 2, { 48, -1 }, { 48, 32 } },
        { 3, { 3, 16, 32 }, { 3, 16, 32 } },
        { 3, { 4, -1, 32 }, { 4, 12, 32 } },
        { 3, { -1, 1, 32 }, { 48, 1, 32 } },
        { 8, { 2, 2, 2, 1, 2, 1, 3, 32 }, { 2, 2, 2, 1, 2, 1, 3, 32 } },
        { 8, { 2, 2, 2, -1, 2, 1, 3, 32 }, { 2, 2, 2, 1, 2, 1, 3, 32 } },
    };
    for (int i = 0; i < VARIANTS; i++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int reshape = 0; reshape < 2; reshape++) {
                nib_quantizer q;
                const char *name = variant(i, &q);
                nib_tensor *t = some(&q, DIMS(6, 8, 32)), *view = NULL;
                CHECK_OK((reshape ? nib_tensor_reshape : nib_tensor_view)(t, shapes[s].rank, shapes[s].shape, &view));
                const nib_metadata m = metadata_of(view);
                CHECK(m.rank == shapes[s].rank && m.dtype == NIB_F32 && m.rows == 48 && m.cols == 32);
                CHECK_BYTES(m.shape, shapes[s].resolved, sizeof m.shape);
                CHECK(nib_quantizer_equal(m.quantizer, &q));
                for (int part = 0; part < NIB_PART_COUNT; part++)
                    CHECK_THAT(nib_tensor_buffer(t, (nib_part)part) == nib_tensor_buffer(view, (nib_part)part), "%s",
                               name);
                CHECK_OK(nib_tensor_zero(view)); /* seen through the other */
                const nib_usage usage = q.rowwise ? NIB_ROWWISE : NIB_COLUMNWISE;
                float *y = values_of(t, usage);
                for (int j = 0; j < 48 * 32; j++)
                    CHECK(y[j] == 0);
                free(y);
                nib_tensor_destroy(t); /* the view lives on */
                y = values_of(view, usage);
                free(y);
                nib_tensor_destroy(view);
            }
}

TEST(view_changes_the_last_dim)
{
    static const struct {
        int64_t from[2], to[2];
        bool shared; /* the scales lie alike: no padding within rows, and as many rows of them */
    } cases[] = {
        { { 256, 64 }, { 128, 128 }, true }, { { 128, 128 }, { 256, 64 }, true }, { { 128, 128 }, { 64, 256 }, false },
        { { 384, 64 }, { 96, 256 }, false }, { { 64, 64 }, { 32, 128 }, false },  { { 16, 16 }, { 1, 256 }, false },
        { { 1, 256 }, { 16, 16 }, false },   { { 6, 32 }, { 4, 48 }, false },     { { 512, 64 }, { 128, 256 }, true },
        { { 130, 64 }, { 65, 128 }, true },  { { 256, 32 }, { 128, 64 }, false }, { { 0, 64 }, { 0, 128 }, true },
        { { 200, 48 }, { 150, 64 }, false }, { { 150, 64 }, { 200, 48 }, false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int decode = 0; decode < 2; decode++) {
            nib_quantizer q = usages(1, 0);
            q.tensor_scale_rule = decode ? NIB_TENSOR_SCALE_RULE_EXACT : NIB_TENSOR_SCALE_RULE_DIALECT;
            nib_tensor *t = some(&q, 2, cases[i].from), *view = NULL, *reshaped = NULL;
            const size_t n = (size_t)(cases[i].from[0] * cases[i].from[1]);
            float *y = values_of(t, NIB_ROWWISE);
            if (cases[i].shared) {
                CHECK_OK(nib_tensor_view(t, 2, cases[i].to, &view));
            } else {
                CHECK_FAILS(nib_tensor_view(t, 2, cases[i].to, &view), NIB_ERR_SHAPE, "padded differently");
                CHECK(!view);
            }
            CHECK_OK(nib_tensor_reshape(t, 2, (int64_t[]){ cases[i].to[0], n ? -1 : cases[i].to[1] }, &reshaped));
            CHECK_THAT((nib_tensor_buffer(t, NIB_ROW_SCALE) == nib_tensor_buffer(reshaped, NIB_ROW_SCALE)) ==
                           cases[i].shared,
                       "case %zu", i);
            for (int part = NIB_ROW_DATA; part <= NIB_ROW_TENSOR_SCALE;
                 part += NIB_ROW_TENSOR_SCALE) /* all are shared, or none */
                CHECK((nib_tensor_buffer(t, (nib_part)part) == nib_tensor_buffer(reshaped, (nib_part)part)) ==
                      cases[i].shared);
            for (nib_tensor *which = reshaped; which; which = which == reshaped ? view : NULL) {
                float *seen = values_of(which, NIB_ROWWISE);
                CHECK_BYTES(seen, y, n * sizeof *y);
                check_padding(which);
                CHECK(metadata_of(which).rows == cases[i].to[0] && metadata_of(which).cols == cases[i].to[1]);
                free(seen);
            }
            free(y);
            nib_tensor_destroy(view);
            nib_tensor_destroy(reshaped);
            nib_tensor_destroy(t);
        }
}

TEST(view_refusals)
{
    static const struct {
        int rank;
        int64_t shape[9];
        const char *words;
    } bad[] = {
        { 2, { -1, -1 }, "only one dim" },
        { 3, { -1, 16, -1 }, "only one dim" },
        { 2, { -1, 17 }, "768 elements" },
        { 2, { -1, 0 }, "768 elements" },
        { 2, { 24, 31 }, "768 elements" },
        { 2, { 0, 32 }, "768 elements" },
        { 1, { 767 }, "768 elements" },
        { 0, { 0 }, "768 elements" },
        { 2, { 24, -2 }, "dim 1 is -2" },
        { 2, { -3, -256 }, "dim 0 is -3" },
        { 3, { INT64_C(1) << 40, INT64_C(1) << 40, 1 }, "too large" },
        { 9, { 1, 1, 1, 1, 1, 1, 1, 24, 32 }, "rank 9" },
        { -1, { 0 }, "rank -1" },
        { INT32_MIN, { 0 }, "rank -2147483648" },
        { INT32_MAX, { 0 }, "rank 2147483647" },
    };
    nib_quantizer q = usages(1, 0);
    nib_tensor *t = some(&q, DIMS(24, 32)), *const untouched = (nib_tensor *)&q, *out = untouched;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_FAILS(nib_tensor_view(t, bad[i].rank, bad[i].shape, &out), NIB_ERR_SHAPE, bad[i].words);
        CHECK_FAILS(nib_tensor_reshape(t, bad[i].rank, bad[i].shape, &out), NIB_ERR_SHAPE, bad[i].words);
    }
    CHECK_FAILS(nib_tensor_view(t, 2, NULL, &out), NIB_ERR_ARG, "shape is NULL");
    CHECK_FAILS(nib_tensor_reshape(t, 2, NULL, &out), NIB_ERR_ARG, "shape is NULL");
    CHECK_FAILS(nib_tensor_view(t, DIMS(32, 24), &out), NIB_ERR_SHAPE, "multiples of 16, not from 32 to 24");
    CHECK_FAILS(nib_tensor_reshape(t, DIMS(32, 24), &out), NIB_ERR_SHAPE, "multiples of 16, not from 32 to 24");
    nib_tensor_destroy(t);
    t = some(&q, DIMS(32, 24));
    CHECK_FAILS(nib_tensor_reshape(t, DIMS(24, 32), &out), NIB_ERR_SHAPE, "multiples of 16, not from 24 to 32");
    nib_tensor_destroy(t);
    t = some(&q, DIMS(1));
    CHECK_FAILS(nib_tensor_view(t, 0, NULL, &out), NIB_ERR_SHAPE, "at least rank 1");
    nib_tensor_destroy(t);

    /* The last dim, with what forbids it to change. */
    static const struct {
        int kind;
        nib_status status;
        const char *words;
    } fixed[] = { { 0, NIB_ERR_USAGE, "columnwise usage" },
                  { 1, NIB_ERR_USAGE, "columnwise usage" },
                  { 2, NIB_ERR_SHAPE, "16x16" },
                  { 3, NIB_ERR_SHAPE, "swizzled" },
                  { 4, NIB_ERR_SHAPE, "amax per row" } };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        q = usages(fixed[i].kind != 1, fixed[i].kind < 2);
        q.block_dims[0] = fixed[i].kind == 2 ? 16 : 1;
        q.swizzled = fixed[i].kind == 3;
        q.row_scaled = fixed[i].kind == 4;
        t = some(&q, DIMS(256, 64));
        CHECK_FAILS(nib_tensor_view(t, DIMS(128, 128), &out), fixed[i].status, fixed[i].words);
        CHECK_FAILS(nib_tensor_reshape(t, DIMS(128, 128), &out), fixed[i].status, fixed[i].words);
        nib_tensor_destroy(t);
    }
    CHECK(out == untouched);
}

TEST(view_without_data)
{
    const nib_quantizer q = usages(1, 0);
    nib_tensor *t = some(&q, DIMS(24, 32)), *view = NULL;
    nib_tensor_clear(t);
    CHECK_OK(nib_tensor_view(t, DIMS(48, 16), &view));
    CHECK(metadata_of(view).rows == 48 && !metadata_of(view).rowwise);
    nib_tensor_destroy(view);
    CHECK_FAILS(nib_tensor_view(t, DIMS(32, 24), &view), NIB_ERR_SHAPE, "multiples of 16");
    nib_tensor_destroy(t);
}

/* Without elements the number of rows can change: every buffer must still have the size that the shape wants. */
TEST(view_without_elements)
{
    static const int64_t from[][2] = { { 4, 0 }, { 0, 16 }, { 0, 0 } };
    static const int64_t to[][2] = { { 7, 0 }, { 0, 32 }, { 0, 16 }, { 16, 0 }, { 2000, 0 }, { 0, 0 } };
    for (int row_scaled = 0; row_scaled < 2; row_scaled++)
        for (int both = 1; both < 4; both++)
            for (size_t i = 0; i < 3; i++)
                for (size_t j = 0; j < 6; j++)
                    for (int reshape = 0; reshape < 2; reshape++) {
                        nib_quantizer q = usages(both & 1, both >> 1);
                        q.row_scaled = (uint8_t)row_scaled;
                        nib_tensor *t = NULL, *view = NULL;
                        CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, from[i], NULL, &t));
                        const nib_status status = (reshape ? nib_tensor_reshape : nib_tensor_view)(t, 2, to[j], &view);
                        CHECK(status == NIB_OK || status == NIB_ERR_SHAPE || status == NIB_ERR_USAGE);
                        for (int part = 0; !status && part < NIB_PART_COUNT; part++) {
                            nib_array array = { 0 };
                            if (!nib_tensor_buffer(view, (nib_part)part))
                                continue;
                            CHECK_OK(nib_tensor_part(view, (nib_part)part, &array));
                            CHECK_THAT(
                                array.bytes == size_of(view, (nib_part)part),
                                "[%d, %d] as [%d, %d], row_scaled %d: part %d takes %zu bytes of a buffer of %zu",
                                (int)from[i][0], (int)from[i][1], (int)to[j][0], (int)to[j][1], row_scaled, part,
                                array.bytes, size_of(view, (nib_part)part));
                        }
                        nib_tensor_destroy(view);
                        nib_tensor_destroy(t);
                    }
}

/* ---- Slice, split, rows ---- */

/* The slice that quantizing these rows by the whole's numbers gives. */
static nib_tensor *slice_by_hand(const nib_tensor *t, const nib_quantizer *q, const float *x, int64_t first,
                                 int64_t count)
{
    const nib_metadata m = metadata_of(t);
    const float *row = (const float *)(const void *)bytes_of(t, NIB_ROW_TENSOR_SCALE);
    nib_overrides overrides = { .bytes = sizeof overrides };
    overrides.tensor_scale[NIB_ROWWISE] = row && q->row_scaled ? row + first : row;
    overrides.tensor_scale[NIB_COLUMNWISE] = (const float *)(const void *)bytes_of(t, NIB_COL_TENSOR_SCALE);
    float none;
    const nib_array part =
        array_of(count ? (void *)(uintptr_t)(x + first * m.cols) : &none, NIB_F32, DIMS(count, m.cols));
    nib_tensor *out = NULL;
    CHECK_OK(nib_quantize(q, &part, &overrides, &out));
    return out;
}

TEST(slices)
{
    static const int64_t shapes[][2] = { { 48, 32 }, { 37, 21 }, { 16, 16 }, { 150, 80 }, { 5, 3 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < VARIANTS; i++) {
            nib_quantizer q;
            const char *name = variant(i, &q);
            const int64_t rows = shapes[s][0], cols = shapes[s][1];
            if (whole_blocks_only(&q) && (rows % 16 || cols % 16))
                continue;
            float *x = normals(rows * cols);
            nib_tensor *t = quantize_f32(&q, x, 2, shapes[s]);
            for (int64_t first = 0; first <= rows; first += rows > 50 ? 8 : rows > 16 ? 4 : 1)
                for (int64_t last = first; last <= rows; last += last + 8 <= rows ? 8 : 1) {
                    nib_tensor *slice = NULL;
                    const bool bordered = q.columnwise || q.block_dims[0] == 16;
                    if (bordered && (first % 16 || (last % 16 && last != rows))) {
                        CHECK_FAILS(nib_tensor_slice(t, first, last - first, &slice), NIB_ERR_SHAPE, "block borders");
                        CHECK(!slice);
                        continue;
                    }
                    CHECK_OK(nib_tensor_slice(t, first, last - first, &slice));
                    const nib_metadata m = metadata_of(slice);
                    CHECK(m.rank == 2 && m.rows == last - first && m.cols == cols && m.dtype == NIB_F32);
                    CHECK(m.rowwise == q.rowwise && m.columnwise == q.columnwise && m.quantizer->origin[0] == first);
                    nib_tensor *wanted = slice_by_hand(t, m.quantizer, x, first, last - first);
                    CHECK_THAT(equal(slice, wanted), "%s %d x %d: rows %d to %d", name, (int)rows, (int)cols,
                               (int)first, (int)last);
                    check_padding(slice);
                    for (int usage = 0; usage < 2; usage++)
                        if (usage ? q.columnwise : q.rowwise) {
                            float *a = values_of(t, (nib_usage)usage), *b = values_of(slice, (nib_usage)usage);
                            CHECK_BYTES(b, a + first * cols, (size_t)(m.rows * cols) * sizeof *a);
                            free(a);
                            free(b);
                        }
                    for (int part = 0; part < NIB_PART_COUNT; part++) /* bytes are copied */
                        CHECK(!nib_tensor_buffer(t, (nib_part)part) ||
                              nib_tensor_buffer(t, (nib_part)part) != nib_tensor_buffer(slice, (nib_part)part));
                    nib_tensor_destroy(wanted);
                    nib_tensor_destroy(slice);
                }
            nib_tensor_destroy(t);
            free(x);
        }
}

/* A slice is of the matrix, whatever the rank; and slices of slices know their place. */
TEST(slice_of_a_slice)
{
    nib_quantizer q = usages(1, 1);
    q.rounding = NIB_ROUND_STOCHASTIC_8;
    q.seed = 3;
    q.origin[0] = 64;
    nib_tensor *t = some(&q, DIMS(4, 16, 32)), *outer = NULL, *inner = NULL, *direct = NULL;
    CHECK_OK(nib_tensor_slice(t, 16, 48, &outer));
    CHECK_OK(nib_tensor_slice(outer, 16, 16, &inner));
    CHECK_OK(nib_tensor_slice(t, 32, 16, &direct));
    CHECK(equal(inner, direct) && quantizer_of(inner).origin[0] == 96 && quantizer_of(direct).origin[0] == 96);
    nib_tensor_destroy(t);
    nib_tensor_destroy(outer);
    nib_tensor_destroy(inner);
    nib_tensor_destroy(direct);
}

TEST(slice_refusals)
{
    const nib_quantizer q = usages(1, 0);
    nib_tensor *t = some(&q, DIMS(40, 16)), *const untouched = (nib_tensor *)&t, *out = untouched;
    static const int64_t bad[][2] = { { -1, 1 }, { 0, -1 },  { 0, 41 },       { 40, 1 },
                                      { 41, 0 }, { 41, -1 }, { INT64_MIN, 0 } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(nib_tensor_slice(t, bad[i][0], bad[i][1], &out), NIB_ERR_SHAPE, "of 40");
    CHECK(out == untouched);
    nib_tensor_destroy(t);
}

/* The border matters where a columnwise usage is, not where one is wished for. */
TEST(slice_looks_at_what_is_there)
{
    nib_quantizer q = usages(1, 0);
    q.rht = 1;
    nib_tensor *t = some(&q, DIMS(32, 16)), *slice = NULL;
    q.columnwise = 1;
    CHECK_OK(nib_tensor_set_quantizer(t, &q));
    CHECK_OK(nib_tensor_slice(t, 3, 5, &slice));
    nib_tensor_destroy(slice);
    nib_tensor_destroy(t);
}

/* An origin is only used for random numbers, so that nearest takes any: a slice of it must not overflow. */
TEST(slice_with_a_far_origin)
{
    nib_quantizer q = usages(1, 0);
    q.origin[0] = INT64_MAX - 1;
    nib_tensor *t = some(&q, DIMS(8, 16)), *slice = NULL;
    const nib_status status = nib_tensor_slice(t, 4, 4, &slice);
    CHECK(status == NIB_OK || status == NIB_ERR_SHAPE);
    if (!status)
        CHECK(quantizer_of(slice).origin[0] >= 0);
    nib_tensor_destroy(slice);
    nib_tensor_destroy(t);
}

TEST(splits)
{
    const nib_quantizer both = usages(1, 1), row = usages(1, 0);
    float *x = normals(37 * 20);
    for (int i = 0; i < 2; i++) {
        nib_tensor *t = quantize_f32(i ? &row : &both, x, DIMS(37, 20)), *pieces[5];
        static const int64_t cuts[2][5] = { { 16, 0, 16, 5, 0 }, { 1, 7, 0, 28, 1 } };
        if (i == 0) { /* the last, empty piece would begin at row 37 */
            CHECK_FAILS(nib_tensor_split(t, cuts[0], 5, pieces), NIB_ERR_SHAPE, "block borders");
            CHECK_OK(nib_tensor_split(t, cuts[0], 4, pieces));
        } else {
            CHECK_OK(nib_tensor_split(t, cuts[1], 5, pieces));
        }
        float *y = values_of(t, NIB_EITHER), *at = y;
        for (int p = 0; p < 4 + i; p++) {
            float *z = values_of(pieces[p], NIB_EITHER);
            CHECK(metadata_of(pieces[p]).rows == cuts[i][p]);
            CHECK_BYTES(z, at, (size_t)cuts[i][p] * 20 * sizeof *z);
            at += cuts[i][p] * 20;
            free(z);
            nib_tensor_destroy(pieces[p]);
        }
        free(y);
        nib_tensor *const untouched = (nib_tensor *)&row;
        for (int p = 0; p < 5; p++)
            pieces[p] = untouched;
        static const int64_t bad[][3] = { { 16, 16, 6 }, { 16, 16, 4 }, { 38, -1, 0 }, { INT64_MAX, INT64_MAX, 39 } };
        for (size_t b = 0; b < sizeof bad / sizeof *bad; b++)
            CHECK_FAILS(nib_tensor_split(t, bad[b], 3, pieces), NIB_ERR_SHAPE, b < 2 ? "the tensor 37" : "row count");
        if (i == 0)
            CHECK_FAILS(nib_tensor_split(t, (int64_t[]){ 16, 10, 11 }, 3, pieces), NIB_ERR_SHAPE, "block borders");
        CHECK_FAILS(nib_tensor_split(t, cuts[0], 0, pieces), NIB_ERR_SHAPE, "0 rows");
        for (int p = 0; p < 5; p++)
            CHECK(pieces[p] == untouched);
        nib_tensor_destroy(t);
    }
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_create(&both, NIB_F32, DIMS(0, 16), NULL, &t));
    nib_tensor *none[1];
    CHECK_OK(nib_tensor_split(t, (int64_t[]){ 0 }, 0, none));
    nib_tensor_destroy(t);
    free(x);
}

/* Panels of the output hold pieces of many lines of a copy: line by line it is the scalar kernels' result. */
TEST(dequantize_equals_lines_by_the_scalar_kernels)
{
    static const int64_t shapes[][2] = { { 560, 80 }, { 300, 33 }, { 35, 560 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < VARIANTS; i++) {
            nib_quantizer q;
            const char *name = variant(i, &q);
            const int64_t rows = shapes[s][0], cols = shapes[s][1];
            if (whole_blocks_only(&q) && (rows % 16 || cols % 16))
                continue;
            nib_tensor *t = some(&q, 2, shapes[s]);
            for (int usage = 0; usage < 2; usage++) {
                if (!(usage ? q.columnwise : q.rowwise))
                    continue;
                float *y = values_of(t, (nib_usage)usage), line[560];
                uint8_t scales[35];
                const struct nib_usage_geometry *g = &t->geometry.usage[usage];
                const struct nib_usage_memory memory = nib_tensor_memory(t, (nib_usage)usage);
                const struct nib_coding coding = nib_coding_of(&t->q, (nib_usage)usage, NIB_F32);
                bool same = true;
                for (int64_t l = 0; l < g->lines; l++) {
                    for (int64_t b = 0; b < g->blocks; b++)
                        scales[b] = (uint8_t)nib_scale_load(g, memory.scales, l, b);
                    nib_kernels_scalar.decode[NIB_NVFP4](line, NIB_F32, memory.codes + l * g->line_stride, scales,
                                                         g->length, memory.tensor_scales[q.row_scaled ? l : 0], &coding,
                                                         false);
                    if (coding.rht)
                        nib_kernels_scalar.inverse_rht[NIB_F32](line, line, g->length, coding.sign_mask);
                    for (int64_t k = 0; k < g->length; k++)
                        same &= !memcmp(&y[usage ? k * cols + l : l * cols + k], &line[k], sizeof *line);
                }
                CHECK_THAT(same, "%s usage %d of %d x %d", name, usage, (int)rows, (int)cols);
                free(y);
            }
            nib_tensor_destroy(t);
        }
}

TEST(dequantize_rows_at_any_cut)
{
    static const int64_t shapes[][2] = { { 48, 32 }, { 37, 21 }, { 16, 272 }, { 3, 5 }, { 560, 32 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < VARIANTS; i++) {
            nib_quantizer q;
            const char *name = variant(i, &q);
            const int64_t rows = shapes[s][0], cols = shapes[s][1];
            if (whole_blocks_only(&q) && (rows % 16 || cols % 16))
                continue;
            nib_tensor *t = some(&q, 2, shapes[s]);
            for (int usage = 0; usage < 2; usage++) {
                if (!(usage ? q.columnwise : q.rowwise))
                    continue;
                float *y = values_of(t, (nib_usage)usage), *z = malloc((size_t)(rows * cols + 2) * sizeof *z);
                const nib_array all = array_of(z, NIB_F32, 2, shapes[s]);
                CHECK_OK(nib_dequantize(t, (nib_usage)usage, &all));
                CHECK_BYTES(y, z, (size_t)(rows * cols) * sizeof *y);
                for (int64_t first = 0; first <= rows; first += rows > 100 ? 71 : cols > 100 ? 3 : 1)
                    for (int64_t count = 0; count <= rows - first; count += rows > 100 ? 97 : cols > 100 ? 5 : 1) {
                        const nib_array out = array_of(z + 1, NIB_F32, DIMS(count, cols));
                        z[0] = z[1 + count * cols] = 99;
                        CHECK_OK(nib_dequantize_rows(t, (nib_usage)usage, first, count, &out));
                        if (memcmp(z + 1, y + first * cols, (size_t)(count * cols) * sizeof *y) || z[0] != 99 ||
                            z[1 + count * cols] != 99)
                            CHECK_THAT(false, "%s usage %d: rows %d, %d of %d", name, usage, (int)first, (int)count,
                                       (int)rows);
                    }
                free(y);
                free(z);
            }
            nib_tensor_destroy(t);
        }
}

/* NIB_EITHER takes the rowwise usage when it is there. */
TEST(dequantize_either)
{
    float *x = normals(16 * 16);
    for (int has = 1; has < 4; has++) {
        const nib_quantizer q = usages(has & 1, has >> 1);
        nib_tensor *t = quantize_f32(&q, x, DIMS(16, 16));
        float *either = values_of(t, NIB_EITHER), *one = values_of(t, has & 1 ? NIB_ROWWISE : NIB_COLUMNWISE);
        CHECK_BYTES(either, one, 256 * sizeof *one);
        free(either);
        free(one);
        nib_tensor_destroy(t);
    }
    free(x);
}

/* Other dtypes and strides than the plain ones, negative ones too. */
TEST(dequantize_outputs)
{
    const nib_quantizer q = usages(1, 1);
    nib_tensor *t = some(&q, DIMS(3, 5, 19));
    float *y = values_of(t, NIB_ROWWISE), strided[3 * 5 * 19 * 2];
    nib_array out = { .data = strided, .bytes = sizeof strided, .dtype = NIB_F32, .rank = 3, .shape = { 3, 5, 19 } };
    out.strides[0] = 2; /* [19][5][3] with gaps, columns reversed */
    out.strides[1] = 6;
    out.strides[2] = -30;
    out.offset = 18 * 30 * sizeof(float);
    for (size_t i = 0; i < sizeof strided / sizeof *strided; i++)
        strided[i] = 99;
    CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &out));
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 5; j++)
            for (int k = 0; k < 19; k++)
                CHECK(strided[(18 - k) * 30 + j * 6 + i * 2] == y[(i * 5 + j) * 19 + k]);
    for (size_t i = 1; i < sizeof strided / sizeof *strided; i += 2)
        CHECK(strided[i] == 99);
    for (int dtype = 0; dtype < NIB_DTYPE_COUNT; dtype++) {
        if (nib_dtype_bits((nib_dtype)dtype) % 8)
            continue;
        static uint64_t memory[3 * 5 * 19];
        const nib_array to = array_of(memory, (nib_dtype)dtype, DIMS(3, 5, 19));
        if (dtype == NIB_F32 || dtype == NIB_BF16 || dtype == NIB_F16) {
            uint64_t wanted[3 * 5 * 19];
            CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &to));
            CHECK_OK(nib_encode((nib_dtype)dtype, y, 3 * 5 * 19, wanted));
            CHECK_BYTES(memory, wanted, 3 * 5 * 19 * (size_t)nib_dtype_bits((nib_dtype)dtype) / 8);
        } else {
            CHECK_FAILS(nib_dequantize(t, NIB_ROWWISE, &to), NIB_ERR_DTYPE, nib_dtype_name((nib_dtype)dtype));
        }
    }
    free(y);
    nib_tensor_destroy(t);
}

/* ---- Equality ---- */

TEST(equality)
{
    float *x = normals(48 * 32);
    nib_tensor *all[VARIANTS];
    for (int i = 0; i < VARIANTS; i++) {
        nib_quantizer q;
        variant(i, &q);
        all[i] = quantize_f32(&q, x, DIMS(48, 32));
    }
    for (int i = 0; i < VARIANTS; i++)
        for (int j = 0; j < VARIANTS; j++)
            if (abs(i - j) != (i == 13 || j == 13 ? 4 : i == 16 || j == 16 ? 2 : 99)) /* those may agree, and rightly */
                CHECK_THAT(equal(all[i], all[j]) == (i == j), "%d and %d", i, j);
    for (int i = 0; i < VARIANTS; i++) {
        nib_tensor *other = clone_of(all[i]);
        const nib_metadata m = metadata_of(other);
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            if (!nib_tensor_buffer(other, (nib_part)part))
                continue;
            const bool scale = part == NIB_ROW_SCALE || part == NIB_COL_SCALE;
            const int64_t lines = part % 2 ? 32 : 48, blocks = part % 2 ? 3 : 2; /* within [128, 4] */
            for (size_t b = 0; b < size_of(other, (nib_part)part); b++) {
                uint8_t *byte = bytes_of(other, (nib_part)part) + b;
                bool padding = false;
                if (scale) {
                    padding = true;
                    for (int64_t line = 0; line < lines && padding; line++)
                        for (int64_t block = 0; block < blocks; block++)
                            if (scale_place(line, block, 4, m.quantizer->swizzled) == b)
                                padding = false;
                    if (!padding && b % 7)
                        continue; /* a sample is enough */
                } else if (b % 11) {
                    continue;
                }
                *byte ^= 0x10;
                CHECK_THAT(equal(all[i], other) == padding, "variant %d part %d byte %zu", i, part, b);
                *byte ^= 0x10;
            }
        }
        nib_tensor_destroy(other);
    }
    for (int i = 0; i < VARIANTS; i++)
        nib_tensor_destroy(all[i]);
    free(x);
}

TEST(equality_of_shapes_dtypes_and_copies)
{
    const nib_quantizer both = usages(1, 1), row = usages(1, 0), col = usages(0, 1), none = usages(0, 0);
    nib_tensor *t[8] = { NULL };
    CHECK_OK(nib_tensor_create(&both, NIB_F32, DIMS(16, 16), NULL, &t[0]));
    CHECK_OK(nib_tensor_create(&both, NIB_BF16, DIMS(16, 16), NULL, &t[1]));
    CHECK_OK(nib_tensor_create(&both, NIB_F32, DIMS(1, 16, 16), NULL, &t[2]));
    CHECK_OK(nib_tensor_create(&both, NIB_F32, DIMS(16, 15), NULL, &t[3])); /* as many bytes */
    CHECK_OK(nib_tensor_create(&row, NIB_F32, DIMS(16, 16), NULL, &t[4]));
    CHECK_OK(nib_tensor_create(&col, NIB_F32, DIMS(16, 16), NULL, &t[5]));
    CHECK_OK(nib_tensor_create(&none, NIB_F32, DIMS(16, 16), NULL, &t[6]));
    CHECK_OK(nib_tensor_create(&both, NIB_F32, DIMS(256), NULL, &t[7]));
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++)
            CHECK_THAT(equal(t[i], t[j]) == (i == j), "%d and %d", i, j);
    /* What decides no bytes that are there is not looked at. */
    nib_quantizer q = both;
    q.seed = 9, q.rht_sign_mask = 1, q.scale_rule = NIB_SCALE_SWEEP;
    nib_tensor *other = NULL;
    CHECK_OK(nib_tensor_create(&q, NIB_F32, DIMS(16, 16), NULL, &other));
    CHECK(equal(t[0], other));
    nib_tensor_destroy(other);
    for (int i = 0; i < 8; i++)
        nib_tensor_destroy(t[i]);
}

/* ---- Swizzle ---- */

TEST(swizzle_and_back)
{
    static const int64_t shapes[][2] = { { 48, 32 }, { 16, 16 }, { 144, 80 }, { 300, 272 }, { 128, 64 }, { 37, 21 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < VARIANTS; i++) {
            nib_quantizer q;
            const char *name = variant(i, &q);
            const int64_t rows = shapes[s][0], cols = shapes[s][1];
            if (q.swizzled || (whole_blocks_only(&q) && (rows % 16 || cols % 16)))
                continue;
            float *x = normals(rows * cols);
            nib_tensor *t = quantize_f32(&q, x, 2, shapes[s]), *compact = clone_of(t), *view = NULL;
            q.swizzled = 1;
            nib_tensor *direct = quantize_f32(&q, x, 2, shapes[s]);
            CHECK_OK(nib_tensor_view(t, 2, shapes[s], &view));
            /* Padding that somebody has written to does not get through. */
            for (int usage = 0; usage < 2; usage++)
                if (nib_tensor_buffer(t, usage ? NIB_COL_SCALE : NIB_ROW_SCALE))
                    bytes_of(t, usage ? NIB_COL_SCALE
                                      : NIB_ROW_SCALE)[size_of(t, usage ? NIB_COL_SCALE : NIB_ROW_SCALE) - 1] |=
                        shapes[s][usage] % 128 ? 0x55 : 0;
            CHECK_OK(nib_tensor_unswizzle(t)); /* it is so already */
            CHECK(nib_tensor_buffer(t, NIB_ROW_SCALE) == nib_tensor_buffer(view, NIB_ROW_SCALE));
            CHECK_OK(nib_tensor_swizzle(t));
            CHECK_THAT(equal(t, direct), "%s %d x %d", name, (int)rows, (int)cols);
            check_padding(t);
            CHECK(quantizer_of(t).swizzled && !quantizer_of(view).swizzled);
            for (int usage = 0; usage < 2; usage++) {
                const nib_part scale = usage ? NIB_COL_SCALE : NIB_ROW_SCALE,
                               data = usage ? NIB_COL_DATA : NIB_ROW_DATA;
                if (!nib_tensor_buffer(t, scale))
                    continue;
                CHECK(nib_tensor_buffer(t, scale) != nib_tensor_buffer(view, scale));
                CHECK(nib_tensor_buffer(t, data) != nib_tensor_buffer(view, data)); /* no view shares half of a copy */
                const int64_t lines = usage ? cols : rows, blocks = ((usage ? rows : cols) + 15) / 16;
                const int64_t stride = round_up(blocks, 4);
                for (int64_t line = 0; line < lines; line++)
                    for (int64_t block = 0; block < blocks; block++)
                        CHECK(bytes_of(t, scale)[scale_place(line, block, stride, true)] ==
                              bytes_of(compact, scale)[line * stride + block]);
                float *a = values_of(t, (nib_usage)usage), *b = values_of(compact, (nib_usage)usage);
                float *c = values_of(view, (nib_usage)usage);
                CHECK_BYTES(a, b, (size_t)(rows * cols) * sizeof *a);
                CHECK_BYTES(c, b, (size_t)(rows * cols) * sizeof *a);
                free(a);
                free(b);
                free(c);
            }
            nib_buffer *same = nib_tensor_buffer(t, NIB_ROW_SCALE);
            CHECK_OK(nib_tensor_swizzle(t));
            CHECK(nib_tensor_buffer(t, NIB_ROW_SCALE) == same);
            CHECK_OK(nib_tensor_unswizzle(t));
            CHECK_THAT(equal(t, compact), "%s %d x %d", name, (int)rows, (int)cols);
            check_padding(t);
            nib_tensor_clear(t); /* without data only the flag changes */
            CHECK_OK(nib_tensor_swizzle(t));
            CHECK(quantizer_of(t).swizzled == 1);
            nib_tensor_destroy(direct);
            nib_tensor_destroy(view);
            nib_tensor_destroy(compact);
            nib_tensor_destroy(t);
            free(x);
        }
}

TEST(swizzle_plain_scales)
{
    static const int64_t sizes[][3] = { { 1, 1, 1 },    { 128, 4, 4 }, { 129, 5, 5 }, { 300, 17, 20 },
                                        { 31, 3, 100 }, { 256, 8, 9 }, { 0, 4, 4 },   { 4, 0, 0 } };
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int64_t rows = sizes[s][0], cols = sizes[s][1], stride = sizes[s][2];
        const size_t plain_bytes = (size_t)(rows * stride), tiled = (size_t)(round_up(rows, 128) * round_up(cols, 4));
        uint8_t *in = test_guarded(plain_bytes, true), *tiles = test_guarded(tiled, true);
        uint8_t *back = test_guarded(plain_bytes, true);
        for (size_t i = 0; i < plain_bytes; i++)
            in[i] = (uint8_t)(test_below(255) + 1);
        memset(tiles, 0x77, tiled);
        memset(back, 0x77, plain_bytes);
        CHECK_OK(nib_swizzle_scales(in, rows, cols, stride, tiles));
        size_t nonzero = 0;
        for (size_t i = 0; i < tiled; i++)
            nonzero += tiles[i] != 0;
        CHECK(nonzero == (size_t)(rows * cols));
        CHECK_OK(nib_unswizzle_scales(tiles, rows, cols, stride, back));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < stride; c++) {
                CHECK(back[r * stride + c] == (c < cols ? in[r * stride + c] : 0));
                if (c < cols)
                    CHECK(tiles[scale_place(r, c, round_up(cols, 4), true)] == in[r * stride + c]);
            }
    }
}

/* ---- Another home for the codes ---- */

TEST(rebind_rowwise)
{
    const nib_quantizer q = usages(1, 1), col = usages(0, 1);
    nib_tensor *source = some(&q, DIMS(33, 19)), *t = NULL, *view = NULL, *before = clone_of(source);
    const size_t bytes = size_of(source, NIB_ROW_DATA);
    CHECK(bytes == 33 * 10);
    int released[2] = { 0 };
    uint8_t *arena = malloc(bytes + 2), *old = malloc(bytes);
    memset(arena, 0xEE, bytes + 2);
    memcpy(old, bytes_of(source, NIB_ROW_DATA), bytes);
    nib_buffer *parts[NIB_PART_COUNT], *home = NULL, *first = NULL;
    CHECK_OK(nib_buffer_borrow(old, bytes, NULL, count_release, &released[0], &first));
    CHECK_OK(nib_buffer_borrow(arena + 1, bytes, NULL, count_release, &released[1], &home)); /* codes need no alignment */
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = part ? nib_tensor_buffer(source, (nib_part)part) : first;
    CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, DIMS(33, 19), parts, NIB_PART_COUNT, &t));
    nib_buffer_release(first);
    CHECK_OK(nib_tensor_view(t, DIMS(33, 19), &view));
    CHECK_OK(nib_tensor_rebind_rowwise(t, home));
    CHECK(nib_tensor_buffer(t, NIB_ROW_DATA) == home && bytes_of(t, NIB_ROW_DATA) == arena + 1);
    CHECK(equal(t, before) && equal(view, before) && arena[0] == 0xEE && arena[bytes + 1] == 0xEE);
    CHECK(bytes_of(view, NIB_ROW_DATA) == old && released[0] == 0);
    nib_tensor_destroy(view);
    CHECK(released[0] == 1);
    CHECK_OK(nib_tensor_rebind_rowwise(t, home)); /* to where it is */
    CHECK(equal(t, before));
    for (int off = -1; off <= 1; off += 2) {
        nib_buffer *wrong = NULL;
        CHECK_OK(nib_buffer_create(bytes + (size_t)off, NULL, &wrong));
        CHECK_FAILS(nib_tensor_rebind_rowwise(t, wrong), NIB_ERR_SHAPE, "take 330");
        nib_buffer_release(wrong);
    }
    CHECK(nib_tensor_buffer(t, NIB_ROW_DATA) == home && equal(t, before));
    nib_buffer_release(home);
    CHECK(released[1] == 0);
    nib_tensor_destroy(t);
    CHECK(released[1] == 1);
    t = some(&col, DIMS(33, 19));
    CHECK_FAILS(nib_tensor_rebind_rowwise(t, nib_tensor_buffer(source, NIB_ROW_DATA)), NIB_ERR_USAGE, "no rowwise");
    nib_tensor_destroy(t);
    nib_tensor_destroy(before);
    nib_tensor_destroy(source);
    free(arena);
    free(old);
}

/* ---- Questions about quantizers ---- */

TEST(is_quantizable)
{
    static const struct {
        int rank;
        int64_t shape[NIB_MAX_RANK];
        int answer;
    } cases[] = {
        { 2, { 16, 16 }, 1 },      { 2, { 32, 48 }, 1 },   { 2, { 15, 16 }, 0 },
        { 2, { 16, 15 }, 0 },      { 2, { 17, 32 }, 0 },   { 1, { 16 }, 0 },
        { 3, { 2, 8, 16 }, 1 },    { 3, { 3, 5, 16 }, 0 }, { 3, { 4, 4, 17 }, 0 },
        { 4, { 2, 2, 4, 32 }, 1 }, { 0, { 0 }, 0 },        { 9, { 16 }, 0 },
        { -1, { 16 }, 0 },         { 2, { -16, 16 }, 0 },  { 8, { 2, 1, 2, 1, 2, 1, 2, 16 }, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_quantizer q = usages(1, 1);
        CHECK_THAT(nib_is_quantizable(&q, cases[i].rank, cases[i].shape) == cases[i].answer, "case %zu", i);
        q.block_dims[0] = 16;
        CHECK(nib_is_quantizable(&q, cases[i].rank, cases[i].shape) == cases[i].answer);
        q.block_dims[0] = 1;
        q.row_scaled = 1;
        CHECK(nib_is_quantizable(&q, cases[i].rank, cases[i].shape) == 0);
    }
    nib_quantizer q = usages(1, 1);
    CHECK(!nib_is_quantizable(NULL, DIMS(16, 16)) && !nib_is_quantizable(&q, 2, NULL));
    q.e4m3_max = 3;
    CHECK(!nib_is_quantizable(&q, DIMS(16, 16)));
}

TEST(is_requantization_safe)
{
    nib_quantizer q = usages(1, 1);
    for (int rounding = 0; rounding < NIB_ROUNDING_COUNT; rounding++) {
        q.rounding = (nib_rounding)rounding;
        CHECK(nib_is_requantization_safe(&q) == (rounding == NIB_ROUND_NEAREST));
    }
    CHECK(!nib_is_requantization_safe(NULL));
}

TEST(quantizer_equality_and_hash)
{
    enum { FIELDS = 25 };
    nib_quantizer list[FIELDS + 1];
    int n = 0;
#define CHANGE(field, value)          \
    do {                              \
        nib_quantizer_init(&list[n]); \
        list[n++].field = (value);    \
    } while (0)
    CHANGE(seed, 0); /* as it comes */
    CHANGE(format, (nib_format)1);
    CHANGE(dialect, NIB_DIALECT_GIST);
    CHANGE(rowwise, 0);
    CHANGE(columnwise, 0);
    CHANGE(swizzled, 1);
    CHANGE(row_scaled, 1);
    CHANGE(rht, 1);
    CHANGE(rht_rowwise, 1);
    CHANGE(rht_sign_mask, 0);
    CHANGE(block_dims[0], 16);
    CHANGE(block_dims[1], 32);
    CHANGE(scale_rule, NIB_SCALE_SWEEP);
    CHANGE(error_mode, NIB_ERROR_MSE);
    CHANGE(fast_error, 1);
    CHANGE(no_tensor_scale, 1);
    CHANGE(e4m3_max, 256);
    CHANGE(tensor_scale_rule, NIB_TENSOR_SCALE_RULE_POW2);
    CHANGE(min_block_scale, 0.5f);
    CHANGE(rounding, NIB_ROUND_STOCHASTIC_8);
    CHANGE(seed, 1);
    CHANGE(seed, UINT64_C(1) << 63);
    CHANGE(offset, 1);
    CHANGE(origin[0], 1);
    CHANGE(origin[1], 1);
    CHANGE(offset, UINT64_C(1) << 32);
#undef CHANGE
    CHECK(n == FIELDS + 1);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            CHECK_THAT(nib_quantizer_equal(&list[i], &list[j]) == (i == j), "%d and %d", i, j);
            CHECK_THAT((nib_quantizer_hash(&list[i]) == nib_quantizer_hash(&list[j])) == (i == j), "%d and %d", i, j);
        }
    nib_quantizer q = list[0]; /* what decides no bytes */
    q.amax_comm = nib_comm_serial();
    CHECK(nib_quantizer_equal(&q, &list[0]) && nib_quantizer_hash(&q) == nib_quantizer_hash(&list[0]));
    memset(&q, 0xA5, sizeof q); /* nor does what lies between the fields */
    nib_quantizer_init(&q);
    CHECK(nib_quantizer_equal(&q, &list[0]) && nib_quantizer_hash(&q) == nib_quantizer_hash(&list[0]));
    CHECK(!nib_quantizer_equal(&q, NULL) && !nib_quantizer_equal(NULL, &q) && nib_quantizer_equal(NULL, NULL));
}

/* A floor of 0 is none, with either sign; whatever is taken gives the same bytes as what it is equal to in value. */
TEST(negative_zero_floor)
{
    nib_quantizer q = usages(1, 1), negative = q;
    negative.min_block_scale = -0.0f;
    float *x = normals(16 * 16);
    const nib_array array = array_of(x, NIB_F32, DIMS(16, 16));
    nib_tensor *t = quantize_f32(&q, x, DIMS(16, 16)), *u = NULL;
    const nib_status status = nib_quantize(&negative, &array, NULL, &u);
    CHECK(status == NIB_OK || status == NIB_ERR_ARG);
    if (!status)
        CHECK(equal(t, u));
    nib_tensor_destroy(t);
    nib_tensor_destroy(u);
    free(x);
}

TEST(set_usage)
{
    for (int rowwise = -2; rowwise <= 2; rowwise++)
        for (int columnwise = -2; columnwise <= 2; columnwise++) {
            nib_quantizer q = usages(1, 0);
            const nib_quantizer before = q;
            const nib_status status = nib_quantizer_set_usage(&q, rowwise, columnwise);
            if (rowwise < -1 || rowwise > 1 || columnwise < -1 || columnwise > 1) {
                CHECK(status == NIB_ERR_ARG && nib_quantizer_equal(&q, &before));
                continue;
            }
            CHECK(!status && q.rowwise == (rowwise < 0 ? 1 : rowwise) &&
                  q.columnwise == (columnwise < 0 ? 0 : columnwise));
        }
}

TEST_MAIN
