/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tensor_views.c - views, slices and splits, and dequantizing some of the rows.
 */
#include "test_variants.h"

#include "tensor/matrix.h"
#include "tensor/tensor.h"

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
                    if (bordered && first < last && (first % 16 || (last % 16 && last != rows))) {
                        CHECK_FAILS(nib_tensor_slice(t, first, last - first, &slice), NIB_ERR_SHAPE, "block borders");
                        CHECK(!slice);
                        continue;
                    }
                    CHECK_OK(nib_tensor_slice(t, first, last - first, &slice));
                    const nib_metadata m = metadata_of(slice);
                    CHECK(m.rank == 2 && m.rows == last - first && m.cols == cols && m.dtype == NIB_F32);
                    CHECK(m.rowwise == q.rowwise && m.columnwise == q.columnwise && m.quantizer->origin[0] == (bordered ? first / 16 * 16 : first));
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
        CHECK_OK(nib_tensor_split(t, cuts[i], 5, pieces)); /* the last of the first is empty, behind row 37 */
        float *y = values_of(t, NIB_EITHER), *at = y;
        for (int p = 0; p < 5; p++) {
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

/* ---- Arrays ---- */

/* What lies in rows at equal distances is read where it is, whatever its rank and whatever stands behind its dims. */
TEST(even_rows_are_read_in_place)
{
    static const struct {
        int rank;
        int64_t shape[4], strides[4];
        bool direct;
        int64_t step; /* from row to row */
    } cases[] = {
        { 1, { 64 }, { 1 }, true, 0 },
        { 2, { 3, 64 }, { 64, 1 }, true, 64 },
        { 2, { 3, 64 }, { 100, 1 }, true, 100 },
        { 2, { 3, 64 }, { 1, 3 }, false, 0 },
        { 3, { 2, 3, 64 }, { 192, 64, 1 }, true, 64 },
        { 3, { 1, 3, 64 }, { 7, 64, 1 }, true, 64 },
        { 3, { 2, 1, 64 }, { 80, 7, 1 }, true, 80 },
        { 3, { 2, 3, 64 }, { 200, 64, 1 }, false, 0 },
        { 4, { 2, 2, 2, 32 }, { 128, 64, 32, 1 }, true, 32 },
        { 4, { 2, 2, 2, 32 }, { 64, 128, 32, 1 }, false, 0 },
    };
    static float data[1024];
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        nib_array x = array_of(data, NIB_F32, cases[i].rank, cases[i].shape);
        memcpy(x.strides, cases[i].strides, sizeof cases[i].strides);
        for (int d = x.rank; d < NIB_MAX_RANK; d++)
            x.shape[d] = x.strides[d] = 3;
        const int64_t cols = x.shape[x.rank - 1];
        const struct matrix m = matrix_of(&x, elements_in(x.rank, x.shape) / cols, cols);
        CHECK_THAT(is_direct(&m) == cases[i].direct, "case %d", i);
        CHECK_THAT(!cases[i].step || m.row_stride == cases[i].step, "case %d: rows are %lld apart", i,
                   (long long)m.row_stride);
    }
}

TEST_MAIN
