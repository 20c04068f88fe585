/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tensor_copies.c - tensors saved and restored, cloned, copied, zeroed and compared.
 */
#include "test_variants.h"

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
    saved[13].array.data = x;
    CHECK_FAILS(nib_restore_from_saved(items, 5, saved, 15, &used), NIB_ERR_ARG, "entry 13 is a plain array");
    saved[13].array.data = NULL;
    saved[14].buffer = kept;
    CHECK_FAILS(nib_restore_from_saved(items, 5, saved, 15, &used), NIB_ERR_ARG, "entry 14 is a part of a tensor");
    saved[14].buffer = NULL;
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

TEST_MAIN
