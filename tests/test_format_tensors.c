/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_format_tensors.c - tensors of Float8, MXFP8, blockwise Float8 and MXFP4 through every call that takes one:
 * updates, usages, saving, copies, views, files.
 */
#include "test_kinds.h"

/* ---- Quantize into ---- */

TEST(quantize_into_a_tensor_that_exists)
{
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *before = NULL;
        CHECK_OK(nib_tensor_clone(t, &before));
        x = matrix(66, 100);
        const float yes = 1, no = 0;
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, &yes, t));
        CHECK_KIND(k, equal(t, before)); /* nothing happened */

        nib_buffer *buffers[NIB_PART_COUNT];
        for (int part = 0; part < NIB_PART_COUNT; part++)
            buffers[part] = nib_tensor_buffer(t, (nib_part)part);
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, &no, t));
        nib_tensor *direct = quantize(&q, &x, NULL);
        CHECK_KIND(k, equal(t, direct) && !equal(t, before));
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_KIND(k, nib_tensor_buffer(t, (nib_part)part) == buffers[part]); /* in place */

        /* With one usage, then with both again. */
        for (int usages = 1; usages <= 3; usages++) {
            q.rowwise = usages & 1, q.columnwise = usages >> 1;
            CHECK_OK(nib_quantize_into(&q, &x, NULL, NULL, t));
            nib_tensor *alone = quantize(&q, &x, NULL);
            CHECK_KIND(k, equal(t, alone));
            nib_tensor_destroy(alone);
        }
        CHECK_KIND(k, equal(t, direct));

        const nib_array other = matrix(66, 101);
        CHECK_FAILS(nib_quantize_into(NULL, &other, NULL, NULL, t), NIB_ERR_SHAPE, "shape");
        nib_tensor_destroy(t);
        nib_tensor_destroy(before);
        nib_tensor_destroy(direct);
    }
}

/* A view goes on decoding what it shares, also when the tensor it came from gives up one of its copies: of the one that
 * is dropped no code was written, so its values must stay; the other is as it was or as it is, never half of each. It
 * matters where both usages have one tensor scale. */
TEST(views_survive_a_change_of_usage)
{
    static float old[64 * 96];
    FOR_KINDS(k)
    for (int keep = 0; keep < 2; keep++) {
        nib_quantizer q = quantizer(k);
        nib_array x = matrix(64, 96);
        nib_tensor *t = quantize(&q, &x, NULL), *view = NULL;
        CHECK_OK(nib_tensor_view(t, 2, x.shape, &view));
        dequantize(view, (nib_usage)!keep, NIB_F32, decoded);
        dequantize(view, (nib_usage)keep, NIB_F32, old);
        for (int64_t i = 0; i < 64 * 96; i++)
            inputs[i] *= 3;
        q.rowwise = keep == NIB_ROWWISE, q.columnwise = keep == NIB_COLUMNWISE;
        CHECK_OK(nib_quantize_into(&q, &x, NULL, NULL, t));
        dequantize(view, (nib_usage)!keep, NIB_F32, decoded_too);
        CHECK_THAT(memcmp(decoded, decoded_too, sizeof old) == 0, "%s, copy %d of a view: [0] from %g to %g", k->name,
                   !keep, (double)decoded[0], (double)decoded_too[0]);
        dequantize(view, (nib_usage)keep, NIB_F32, decoded);
        dequantize(t, (nib_usage)keep, NIB_F32, decoded_too);
        CHECK_THAT(memcmp(decoded, decoded_too, sizeof old) == 0 || memcmp(decoded, old, sizeof old) == 0,
                   "%s, copy %d of a view: [0] is %g, neither %g nor %g", k->name, keep, (double)decoded[0],
                   (double)old[0], (double)decoded_too[0]);
        nib_tensor_destroy(view);
        nib_tensor_destroy(t);
    }
}

/* ---- Usages ---- */

TEST(usages_are_built_where_they_follow)
{
    FOR_KINDS(k)
    FOR_SHAPES(s)
    {
        nib_quantizer q = quantizer(k);
        const nib_array x = matrix(shapes[s][0], shapes[s][1]);
        nib_tensor *both = quantize(&q, &x, NULL);
        q.columnwise = 0;
        nib_tensor *t = quantize(&q, &x, NULL);
        int rowwise = -1, columnwise = -1;
        CHECK_OK(nib_tensor_get_usages(t, &rowwise, &columnwise));
        CHECK_KIND(k, rowwise == 1 && columnwise == 0 && !metadata_of(t).columnwise_valid);
        const nib_array y = array_of(decoded, NIB_F32, 2, x.shape);
        CHECK_FAILS(nib_dequantize(t, NIB_COLUMNWISE, &y), NIB_ERR_USAGE, "columnwise");
        if (derives(k)) {
            CHECK_OK(nib_tensor_update_usage(t, 1, 1));
            CHECK_KIND(k, equal(t, both));
            CHECK_OK(nib_tensor_update_usage(t, 0, 1)); /* the columnwise usage stands alone */
            check_values(k, t, NIB_COLUMNWISE);
            CHECK_OK(nib_dequantize(t, NIB_EITHER, &y));
            CHECK_FAILS(nib_tensor_update_usage(t, 1, -1), NIB_ERR_USAGE, "rowwise");
            CHECK_KIND(k, metadata_of(t).quantizer->rowwise == 0 && metadata_of(t).quantizer->columnwise == 1);
        } else {
            CHECK_FAILS(nib_tensor_update_usage(t, 1, 1), NIB_ERR_USAGE, "scales of its own");
            CHECK_OK(nib_tensor_get_usages(t, &rowwise, &columnwise));
            CHECK_KIND(k, rowwise == 1 && columnwise == 0);
        }
        CHECK_OK(nib_tensor_update_usage(t, 0, 0));
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_KIND(k, nib_tensor_buffer(t, (nib_part)part) == NULL);
        CHECK_FAILS(nib_dequantize(t, NIB_EITHER, &y), NIB_ERR_USAGE, "no data");

        /* Columnwise only, from the start. */
        q.rowwise = 0, q.columnwise = 1;
        nib_tensor *col = quantize(&q, &x, NULL);
        CHECK_OK(nib_tensor_update_usage(both, 0, -1));
        CHECK_KIND(k, equal(both, col));
        check_values(k, col, NIB_COLUMNWISE);
        nib_tensor_destroy(col);
        nib_tensor_destroy(both);
        nib_tensor_destroy(t);
    }
}

TEST(a_columnwise_copy_can_be_invalid)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(66, 100);
        const nib_array y = array_of(decoded, NIB_F32, 2, x.shape);
        nib_tensor *t = quantize(&q, &x, NULL), *clean = NULL, *usage = NULL;
        CHECK_OK(nib_tensor_clone(t, &clean));
        /* Another writer changes a rowwise code and says so. */
        uint8_t *codes = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_DATA));
        codes[5] ^= 3;
        CHECK_OK(nib_tensor_invalidate_columnwise(t));
        CHECK_KIND(k, metadata_of(t).columnwise && !metadata_of(t).columnwise_valid);
        CHECK_FAILS(nib_dequantize(t, NIB_COLUMNWISE, &y), NIB_ERR_USAGE, "not valid");
        CHECK_OK(nib_dequantize(t, NIB_EITHER, &y));
        check_values(k, t, NIB_ROWWISE);
        CHECK_OK(nib_tensor_clone(t, &usage)); /* the flag goes along */
        CHECK_KIND(k, !metadata_of(usage).columnwise_valid && equal(usage, t));
        CHECK_OK(nib_tensor_copy(usage, clean));
        CHECK_KIND(k, metadata_of(usage).columnwise_valid && equal(usage, clean));
        CHECK_OK(nib_tensor_copy(usage, t));
        CHECK_KIND(k, !metadata_of(usage).columnwise_valid);
        if (derives(k)) {
            CHECK_OK(nib_tensor_update_usage(t, -1, 1));
            CHECK_KIND(k, metadata_of(t).columnwise_valid);
            check_values(k, t, NIB_ROWWISE);
            memcpy(decoded_too, decoded, 66 * 100 * sizeof(float));
            check_values(k, t, NIB_COLUMNWISE);
            CHECK_BYTES(decoded, decoded_too, 66 * 100 * sizeof(float));
        } else {
            CHECK_FAILS(nib_tensor_update_usage(t, -1, 1), NIB_ERR_USAGE, "quantize again");
            CHECK_KIND(k, !metadata_of(t).columnwise_valid);
        }
        CHECK_OK(nib_tensor_invalidate_columnwise(t));
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
        CHECK_KIND(k, metadata_of(t).columnwise_valid && equal(t, clean));
        CHECK_OK(nib_tensor_update_usage(t, 0, 1));
        CHECK_OK(nib_tensor_invalidate_columnwise(t)); /* the only copy there is */
        CHECK_KIND(k, metadata_of(t).columnwise_valid);
        nib_tensor_destroy(t);
        nib_tensor_destroy(clean);
        nib_tensor_destroy(usage);
    }
}

/* ---- Save and restore ---- */

TEST(save_and_restore)
{
    static const nib_part orders[NIB_FORMAT_COUNT][NIB_PART_COUNT] = {
        [NIB_FLOAT8] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_TENSOR_SCALE },
        [NIB_MXFP8] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE },
        [NIB_FLOAT8_BLOCK] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE },
        [NIB_MXFP4] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE },
    };
    FOR_KINDS(k)
    for (int usages = 1; usages <= 3; usages++) {
        nib_quantizer q = quantizer(k);
        q.rowwise = usages & 1, q.columnwise = usages >> 1;
        const nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *kept = NULL;
        CHECK_OK(nib_tensor_clone(t, &kept));
        nib_buffer *parts[NIB_PART_COUNT], *saved[NIB_PART_COUNT + 1] = { NULL };
        for (int part = 0; part < NIB_PART_COUNT; part++)
            parts[part] = nib_tensor_buffer(t, (nib_part)part);
        size_t n = 0, used = 0;
        CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &n));
        CHECK_KIND(k, n == (has_blocks(k) ? 4u : 3u));
        for (size_t i = 0; i < n; i++) {
            const nib_part part = orders[k->format][i];
            const bool there = part == NIB_ROW_TENSOR_SCALE || (part % 2 ? q.columnwise : q.rowwise);
            CHECK_THAT(saved[i] == parts[part] && (saved[i] != NULL) == there, "%s: entry %zu", k->name, i);
            CHECK_KIND(k, nib_tensor_buffer(t, part) == NULL);
        }
        CHECK_KIND(k, metadata_of(t).rows == 66 && !metadata_of(t).rowwise && !metadata_of(t).columnwise);
        CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, n - 1, &used), NIB_ERR_ARG, "left");
        CHECK_OK(nib_tensor_restore_from_saved(t, saved, NIB_PART_COUNT + 1, &used));
        CHECK_KIND(k, used == n && equal(t, kept));
        CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, n, &used), NIB_ERR_USAGE, "still has data");
        nib_tensor_destroy(t);
        nib_tensor_destroy(kept);
    }
}

/* A copy without its scale or tensor scale, or with one of another size, is not a copy. */
TEST(what_is_restored_is_checked)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *back = NULL;
        nib_buffer *saved[NIB_PART_COUNT], *small = NULL;
        size_t n = 0, used = 0;
        CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &n));
        CHECK_OK(nib_buffer_create(1, NULL, &small));
        for (size_t i = 0; i < n; i++) {
            nib_buffer *const whole = saved[i];
            saved[i] = NULL;
            const bool data_of_two =
                !has_blocks(k) && i < 2; /* Float8's tensor scale then serves the other usage alone */
            const nib_status status = nib_tensor_restore_from_saved(t, saved, n, &used);
            CHECK_THAT(status == (data_of_two ? NIB_OK : NIB_ERR_USAGE), "%s: without entry %zu: %s", k->name, i,
                       nib_status_name(status));
            if (!status)
                CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &n));
            saved[i] = small;
            CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, n, &used), NIB_ERR_SHAPE, "");
            saved[i] = whole;
        }
        nib_buffer *parts[NIB_PART_COUNT] = { saved[0], saved[1] };
        for (size_t i = 2; i < n; i++)
            parts[has_blocks(k) ? i : NIB_ROW_TENSOR_SCALE] = saved[i];
        CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, 2, x.shape, parts, NIB_PART_COUNT, &back));
        CHECK_OK(nib_tensor_restore_from_saved(t, saved, n, &used));
        CHECK_KIND(k, equal(t, back));
        nib_buffer_release(small);
        nib_tensor_destroy(t);
        nib_tensor_destroy(back);
    }
}

TEST(save_a_mixed_list)
{
    enum { N = sizeof kinds / sizeof *kinds };
    nib_item items[N + 1] = { 0 };
    nib_tensor *kept[N] = { NULL };
    size_t count = 0, used = 0, expected = 1;
    for (int i = 0; i < N; i++) {
        const nib_quantizer q = quantizer(&kinds[i]);
        const nib_array x = matrix(33, 65);
        items[i + (i >= 4)].tensor = quantize(&q, &x, NULL);
        CHECK_OK(nib_tensor_clone(items[i + (i >= 4)].tensor, &kept[i]));
        expected += has_blocks(&kinds[i]) ? 4 : 3;
    }
    items[4].array = array_of(inputs, NIB_F32, 1, (const int64_t[]){ 7 });
    nib_saved saved[64];
    CHECK_OK(nib_saved_count(items, N + 1, &count));
    CHECK(count == expected);
    CHECK_FAILS(nib_prepare_for_saving(items, N + 1, saved, expected - 1, &count), NIB_ERR_ARG, "space for");
    CHECK_OK(nib_prepare_for_saving(items, N + 1, saved, 64, &count));
    CHECK(count == expected && items[4].array.data == NULL);
    CHECK_OK(nib_restore_from_saved(items, N + 1, saved, count, &used));
    CHECK(used == expected && items[4].array.data == inputs && items[4].array.shape[0] == 7);
    for (int i = 0; i < N; i++) {
        CHECK_KIND(&kinds[i], equal(items[i + (i >= 4)].tensor, kept[i]));
        nib_tensor_destroy(items[i + (i >= 4)].tensor);
        nib_tensor_destroy(kept[i]);
    }
}

/* ---- Clone, copy, compare, zero ---- */

TEST(clone_copy_equal_zero)
{
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        nib_array x = matrix(66, 100);
        nib_tensor *a = quantize(&q, &x, NULL), *b = NULL;
        CHECK_OK(nib_tensor_clone(a, &b));
        CHECK_KIND(k, equal(a, b));
        for (int part = 0; part < NIB_PART_COUNT; part++) /* every byte that means something is compared */
            if (nib_tensor_buffer(b, (nib_part)part)) {
                uint8_t *bytes = nib_buffer_data(nib_tensor_buffer(b, (nib_part)part));
                CHECK_KIND(k, bytes != nib_buffer_data(nib_tensor_buffer(a, (nib_part)part)));
                bytes[0] ^= 1;
                CHECK_THAT(!equal(a, b), "%s: part %d", k->name, part);
                bytes[0] ^= 1;
                nib_array scales;
                CHECK_OK(nib_tensor_part(b, (nib_part)part, &scales));
                int rank;
                int64_t valid[NIB_MAX_RANK];
                CHECK_OK(nib_part_valid_shape(&q, (nib_part)part, 2, x.shape, &rank, valid));
                if (rank == 2 && valid[1] < scales.shape[1]) { /* and padding is not */
                    bytes[scales.shape[1] * (nib_dtype_bits(scales.dtype) / 8) - 1] ^= 1;
                    CHECK_KIND(k, equal(a, b));
                }
            }
        x = matrix(66, 100);
        nib_tensor *c = quantize(&q, &x, NULL);
        CHECK_KIND(k, !equal(a, c));
        CHECK_OK(nib_tensor_copy(b, c));
        CHECK_KIND(k, equal(b, c));

        /* A target with one usage takes it; a source with one does not fill two. */
        CHECK_OK(nib_tensor_update_usage(b, 1, 0));
        CHECK_OK(nib_tensor_copy(b, a));
        check_values(k, b, NIB_ROWWISE);
        dequantize(a, NIB_ROWWISE, NIB_F32, decoded_too);
        CHECK_BYTES(decoded, decoded_too, 66 * 100 * sizeof(float));
        CHECK_FAILS(nib_tensor_copy(a, b), NIB_ERR_USAGE, "columnwise");

        /* Another element, block shape or format is another meaning. */
        FOR_KINDS(other)
        {
            const nib_quantizer p = quantizer(other);
            nib_tensor *d = quantize(&p, &x, NULL);
            if (other != k) {
                CHECK_KIND(k, !equal(c, d));
                CHECK_FAILS(nib_tensor_copy(c, d), NIB_ERR_MISMATCH, "differ");
            } else {
                CHECK_OK(nib_tensor_copy(c, d));
            }
            nib_tensor_destroy(d);
        }
        const nib_array small = matrix(65, 100);
        nib_tensor *e = quantize(&q, &small, NULL);
        CHECK_FAILS(nib_tensor_copy(c, e), NIB_ERR_MISMATCH, "65 x 100");
        /* How scales are chosen is not what they mean. */
        nib_quantizer chosen = q;
        if (is_mx(k))
            chosen.mx_rule = NIB_MX_FLOOR;
        else
            chosen.pow2_scales ^= 1, chosen.amax_epsilon = 1;
        CHECK_OK(nib_tensor_set_quantizer(c, &chosen));
        if (k->element != NIB_E2M1) {
            chosen.element = k->element == NIB_E4M3 ? NIB_E5M2 : NIB_E4M3;
            CHECK_FAILS(nib_tensor_set_quantizer(c, &chosen), NIB_ERR_MISMATCH, "meaning");
        }

        CHECK_OK(nib_tensor_zero(c));
        for (int usage = 0; usage < 2; usage++) {
            check_values(k, c, (nib_usage)usage);
            for (int64_t i = 0; i < 66 * 100; i++)
                CHECK_KIND(k, decoded[i] == 0 && !signbit(decoded[i]));
        }
        if (!has_blocks(k))
            CHECK_KIND(k, *(float *)nib_buffer_data(nib_tensor_buffer(c, NIB_ROW_TENSOR_SCALE)) == 1);
        nib_tensor *fresh = NULL;
        CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, x.shape, NULL, &fresh));
        CHECK_KIND(k, equal(c, fresh));
        nib_tensor_destroy(fresh);
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
        nib_tensor_destroy(c);
        nib_tensor_destroy(e);
    }
}

TEST(rebind_the_rowwise_codes)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(33, 65);
        nib_tensor *t = quantize(&q, &x, NULL), *kept = NULL;
        CHECK_OK(nib_tensor_clone(t, &kept));
        nib_buffer *home = NULL;
        CHECK_OK(nib_buffer_create(nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_DATA)), NULL, &home));
        CHECK_OK(nib_tensor_rebind_rowwise(t, home));
        CHECK_KIND(k, nib_tensor_buffer(t, NIB_ROW_DATA) == home && equal(t, kept));
        nib_buffer_release(home);
        nib_tensor_destroy(t);

        /* A view from before stays as it was, or sees whole updates; never codes of one and a tensor scale of the
         * other. */
        nib_tensor *view = NULL;
        CHECK_OK(nib_tensor_clone(kept, &t));
        CHECK_OK(nib_tensor_view(t, 2, x.shape, &view));
        CHECK_OK(nib_buffer_create(nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_DATA)), NULL, &home));
        CHECK_OK(nib_tensor_rebind_rowwise(t, home));
        nib_buffer_release(home);
        for (int i = 0; i < 33 * 65; i++)
            inputs[i] *= -3;
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
        for (int usage = 0; usage < 2; usage++) {
            dequantize(view, (nib_usage)usage, NIB_F32, decoded);
            for (int which = 0, same = 0; which < 2; which++) {
                dequantize(which ? t : kept, (nib_usage)usage, NIB_F32, decoded_too);
                same |= memcmp(decoded, decoded_too, 33 * 65 * sizeof(float)) == 0;
                CHECK_THAT(same || !which, "%s, copy %d of a view: [0] is %g", k->name, usage, (double)decoded[0]);
            }
        }
        nib_tensor_destroy(view);
        nib_tensor_destroy(t);
        nib_tensor_destroy(kept);
    }
}

/* ---- Views and slices ---- */

static void check_same_values(const struct kind *k, const nib_tensor *a, const nib_tensor *b, nib_usage usage)
{
    const nib_metadata m = metadata_of(a);
    dequantize(a, usage, NIB_F32, decoded);
    dequantize(b, usage, NIB_F32, decoded_too);
    CHECK_THAT(memcmp(decoded, decoded_too, (size_t)(m.rows * m.cols) * sizeof(float)) == 0, "%s: values differ",
               k->name);
}

TEST(views_of_the_same_length)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *view = NULL, *direct = NULL;
        const int64_t shape[4] = { 3, 2, 11, 100 }, open[3] = { -1, 33, 100 };
        CHECK_OK(nib_tensor_view(t, 4, shape, &view));
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_KIND(k, nib_tensor_buffer(view, (nib_part)part) == nib_tensor_buffer(t, (nib_part)part));
        x = array_of(inputs, NIB_F32, 4, shape);
        direct = quantize(&q, &x, NULL);
        CHECK_KIND(k, equal(view, direct));
        check_same_values(k, t, view, NIB_ROWWISE);
        check_same_values(k, t, view, NIB_COLUMNWISE);
        nib_tensor_destroy(view);
        CHECK_OK(nib_tensor_view(t, 3, open, &view));
        CHECK_KIND(k, metadata_of(view).shape[0] == 2);
        /* What is written through one is seen through the other. */
        x = matrix(66, 100);
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
        check_same_values(k, t, view, NIB_COLUMNWISE);
        nib_tensor_destroy(view);
        CHECK_FAILS(nib_tensor_view(t, 2, (const int64_t[]){ 67, 100 }, &view), NIB_ERR_SHAPE, "6600");
        nib_tensor_destroy(t);
        nib_tensor_destroy(direct);
    }
}

TEST(views_of_another_length)
{
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        q.columnwise = 0;
        const bool lines = k->rows == 1 && k->format != NIB_FLOAT8_BLOCK; /* scales lie line after line */
        const nib_array x = matrix(128, 256);
        nib_tensor *t = quantize(&q, &x, NULL), *view = NULL;
        /* 128 x 8 and 256 x 4 scales: neither has padding. */
        const int64_t half[2] = { 256, 128 }, flat[1] = { 128 * 256 }, other[2] = { 64, 512 }, odd[2] = { 2048, 16 };
        if (lines || !has_blocks(k)) {
            CHECK_OK(nib_tensor_view(t, 2, half, &view));
            const nib_array as_half = array_of(inputs, NIB_F32, 2, half);
            nib_tensor *direct = quantize(&q, &as_half, NULL);
            CHECK_KIND(k, equal(view, direct));
            check_values(k, view, NIB_ROWWISE);
            nib_tensor_destroy(view);
            nib_tensor_destroy(direct);
        } else {
            CHECK_FAILS(nib_tensor_view(t, 2, half, &view), NIB_ERR_SHAPE, "last dim");
            CHECK_FAILS(nib_tensor_reshape(t, 2, half, &view), NIB_ERR_SHAPE, "last dim");
        }
        /* 64 lines are padded to 128, so that the scales must move; so are the 1 and 1024 of one line. */
        if (lines) {
            CHECK_FAILS(nib_tensor_view(t, 2, other, &view), NIB_ERR_SHAPE, "padded");
            CHECK_FAILS(nib_tensor_view(t, 1, flat, &view), NIB_ERR_SHAPE, "padded");
            CHECK_FAILS(nib_tensor_view(t, 2, odd, &view), NIB_ERR_SHAPE, "multiples of 32");
        }
        if (lines || !has_blocks(k))
            for (int i = 0; i < 2; i++) {
                const nib_array y = array_of(inputs, NIB_F32, i ? 1 : 2, i ? flat : other);
                nib_tensor *direct = quantize(&q, &y, NULL);
                CHECK_OK(nib_tensor_reshape(t, y.rank, y.shape, &view));
                CHECK_KIND(k, equal(view, direct));
                /* All is shared, or nothing. */
                CHECK_KIND(k, (nib_tensor_buffer(view, NIB_ROW_DATA) == nib_tensor_buffer(t, NIB_ROW_DATA)) == !lines);
                nib_tensor_destroy(view);
                nib_tensor_destroy(direct);
            }
        if (!has_blocks(k)) { /* Float8: any length */
            CHECK_OK(nib_tensor_view(t, 2, odd, &view));
            check_values(k, view, NIB_ROWWISE);
            nib_tensor_destroy(view);
        }
        nib_tensor_destroy(t);

        q.columnwise = 1;
        t = quantize(&q, &x, NULL);
        const nib_status status = nib_tensor_view(t, 2, half, &view);
        CHECK_KIND(k, status == (lines || !has_blocks(k) ? NIB_ERR_USAGE : NIB_ERR_SHAPE));
        nib_tensor_destroy(t);
    }
}

/* Rows of x from `first` as a tensor of their own. */
static nib_tensor *piece_of(const nib_quantizer *q, const nib_array *x, int64_t first, int64_t count,
                            const float *scale)
{
    nib_tensor *t = NULL;
    nib_overrides overrides = { .bytes = sizeof overrides, .scale = scale };
    const int64_t shape[2] = { count, x->shape[1] };
    const nib_array rows = array_of((float *)x->data + first * x->shape[1], NIB_F32, 2, shape);
    CHECK_OK(nib_quantize(q, &rows, scale ? &overrides : NULL, &t));
    return t;
}

/* Where a block lies within a piece, cutting before and after quantizing is the same. With one scale for the tensor
 * it is so when that scale is given. */
TEST(slices_are_what_the_piece_would_be)
{
    const float given_scale = 3.5f;
    FOR_KINDS(k)
    for (int usages = 1; usages <= 3; usages++) {
        nib_quantizer q = quantizer(k);
        q.rowwise = usages & 1, q.columnwise = usages >> 1;
        const float *scale = has_blocks(k) ? NULL : &given_scale;
        const nib_array x = matrix(300, 150);
        nib_tensor *t = piece_of(&q, &x, 0, 300, scale), *slice = NULL;
        const int64_t step = usages == 1 && k->rows <= 1 ? 1 : has_blocks(k) ? k->block : 1;
        for (int i = 0; i < 8; i++) {
            const int64_t first = test_below(300 / step) * step;
            int64_t count = i % 2 ? 300 - first : test_below((300 - first) / step + 1) * step;
            CHECK_OK(nib_tensor_slice(t, first, count, &slice));
            nib_tensor *direct = piece_of(&q, &x, first, count, scale);
            CHECK_THAT(equal(slice, direct), "%s: rows %lld to %lld", k->name, (long long)first,
                       (long long)(first + count));
            nib_tensor_destroy(slice);
            nib_tensor_destroy(direct);
        }
        if (step > 1) {
            CHECK_FAILS(nib_tensor_slice(t, 1, step, &slice), NIB_ERR_SHAPE, "block borders");
            CHECK_FAILS(nib_tensor_slice(t, 0, step - 1, &slice), NIB_ERR_SHAPE, "block borders");
        }
        CHECK_FAILS(nib_tensor_slice(t, 200, 101, &slice), NIB_ERR_SHAPE, "of 300");

        const int64_t counts[4] = { 128, 0, 128, 44 }, few[2] = { 128, 128 };
        nib_tensor *pieces[4] = { NULL };
        CHECK_OK(nib_tensor_split(t, counts, 4, pieces));
        for (int64_t i = 0, first = 0; i < 4; first += counts[i++]) {
            nib_tensor *direct = piece_of(&q, &x, first, counts[i], scale);
            CHECK_THAT(equal(pieces[i], direct), "%s: piece %lld", k->name, (long long)i);
            nib_tensor_destroy(direct);
            nib_tensor_destroy(pieces[i]);
        }
        CHECK_FAILS(nib_tensor_split(t, few, 2, pieces), NIB_ERR_SHAPE, "256 rows");
        nib_tensor_destroy(t);
    }
}

/* ---- Swizzle ---- */

TEST(swizzle_and_back)
{
    FOR_KINDS(k)
    FOR_SHAPES(s)
    {
        nib_quantizer q = quantizer(k);
        const int64_t M = shapes[s][0], K = shapes[s][1];
        const nib_array x = matrix(M, K);
        nib_tensor *t = quantize(&q, &x, NULL), *plain = NULL, *direct = NULL;
        CHECK_OK(nib_tensor_clone(t, &plain));
        if (!is_mx(k)) {
            CHECK_FAILS(nib_tensor_swizzle(t), NIB_ERR_UNSUPPORTED, "swizzled");
            CHECK_OK(nib_tensor_unswizzle(t)); /* they are not */
            CHECK_KIND(k, equal(t, plain));
            q.swizzled = 1;
            CHECK_FAILS(nib_quantize(&q, &x, NULL, &direct), NIB_ERR_MODE, "swizzled");
            nib_tensor_destroy(t);
            nib_tensor_destroy(plain);
            continue;
        }
        CHECK_OK(nib_tensor_swizzle(t));
        CHECK_KIND(k, metadata_of(t).quantizer->swizzled && !equal(t, plain));
        for (int usage = 0; usage < 2; usage++) {
            const nib_part part = usage ? NIB_COL_SCALE : NIB_ROW_SCALE;
            const uint8_t *tiles = nib_buffer_data(nib_tensor_buffer(t, part)),
                          *scales = nib_buffer_data(nib_tensor_buffer(plain, part));
            const int64_t lines = usage ? K : M, blocks = ((usage ? M : K) + 31) / 32;
            nib_array shape;
            int64_t sum = 0, sum_plain = 0;
            CHECK_OK(nib_tensor_part(plain, part, &shape));
            for (int64_t line = 0; line < lines; line++)
                for (int64_t block = 0; block < blocks; block++) {
                    int64_t at[2];
                    scale_index(k, (nib_usage)usage, usage ? block * 32 : line, usage ? line : block * 32, at);
                    const uint8_t scale = scales[at[0] * shape.shape[1] + at[1]];
                    sum_plain += scale;
                    CHECK_KIND(k, tiles[scale_place(line, block, round_up(blocks, 4), true)] == scale);
                }
            for (size_t i = 0; i < nib_buffer_bytes(nib_tensor_buffer(t, part)); i++)
                sum += tiles[i];
            CHECK_KIND(k, sum == sum_plain); /* the rest is zero */
            check_same_values(k, plain, t, (nib_usage)usage);
        }
        q.swizzled = 1;
        direct = quantize(&q, &x, NULL);
        CHECK_KIND(k, equal(direct, t));
        if (derives(k)) {
            CHECK_OK(nib_tensor_update_usage(direct, 1, 0));
            CHECK_FAILS(nib_tensor_update_usage(direct, 1, 1), NIB_ERR_USAGE, "unswizzle");
        }
        CHECK_OK(nib_tensor_unswizzle(t));
        CHECK_KIND(k, equal(t, plain));
        nib_tensor_destroy(t);
        nib_tensor_destroy(plain);
        nib_tensor_destroy(direct);
    }
}

/* ---- Files and DLPack ---- */

TEST(write_and_read_back)
{
    char path[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/nib_formats_%d.safetensors", tmp ? tmp : "/tmp", (int)getpid());
    enum { N = sizeof kinds / sizeof *kinds };
    for (int usages = 1; usages <= 3; usages++) {
        nib_tensor *written[N], *back = NULL;
        nib_writer *writer = NULL;
        nib_file *file = NULL;
        char name[N][16];
        CHECK_OK(nib_writer_create(path, &writer));
        for (int i = 0; i < N; i++) {
            nib_quantizer q = quantizer(&kinds[i]);
            q.rowwise = usages & 1, q.columnwise = usages >> 1;
            q.swizzled = is_mx(&kinds[i]) && usages == 2;
            if (is_mx(&kinds[i]))
                q.mx_rule = NIB_MX_FLOOR;
            else
                q.amax_epsilon = 0.125f;
            (void)matrix(33, 65);
            const nib_array x = array_of(inputs, NIB_F32, 3, (const int64_t[]){ 3, 11, 65 });
            written[i] = quantize(&q, &x, NULL);
            if (usages == 3)
                CHECK_OK(nib_tensor_invalidate_columnwise(written[i]));
            snprintf(name[i], sizeof name[i], "t%d", i);
            CHECK_OK(nib_writer_declare_tensor(writer, name[i], written[i]));
        }
        for (int i = 0; i < N; i++)
            CHECK_OK(nib_writer_write_tensor(writer, name[i], written[i]));
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
        CHECK_OK(nib_file_open(path, &file));
        for (int i = 0; i < N; i++) {
            CHECK_OK(nib_file_read_tensor(file, name[i], NULL, &back));
            const nib_metadata a = metadata_of(written[i]), b = metadata_of(back);
            CHECK_KIND(&kinds[i], equal(written[i], back) && nib_quantizer_equal(a.quantizer, b.quantizer));
            CHECK_KIND(&kinds[i], a.columnwise_valid == b.columnwise_valid && a.element == b.element);
            nib_tensor_destroy(back);
            nib_tensor_destroy(written[i]);
        }
        nib_file_close(file);
        unlink(path);
    }
}

/* DLPack's binary interface before 1.0. */
struct DLManagedTensor {
    void *data;
    int32_t device_type, device_id, rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *context;
    void (*deleter)(struct DLManagedTensor *self);
};

TEST(parts_leave_through_dlpack)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(33, 65);
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            struct DLManagedTensor *managed = NULL;
            nib_array array = { 0 };
            if (!nib_tensor_buffer(t, (nib_part)part)) {
                CHECK_FAILS(nib_tensor_to_dlpack(t, (nib_part)part, &managed), NIB_ERR_USAGE, "no such part");
                continue;
            }
            CHECK_OK(nib_tensor_to_dlpack(t, (nib_part)part, &managed));
            CHECK_OK(nib_tensor_part(t, (nib_part)part, &array));
            const bool floats = array.dtype == NIB_F32;
            CHECK_KIND(k, managed->data == array.data && managed->device_type == 1 && managed->rank == array.rank);
            CHECK_KIND(k, managed->code == (floats ? 2 : 1) && managed->bits == (floats ? 32 : 8));
            CHECK_KIND(k, managed->lanes == 1);
            for (int i = 0; i < array.rank; i++)
                CHECK_KIND(k, managed->shape[i] == array.shape[i] && managed->strides[i] == array.strides[i]);
            managed->deleter(managed);
        }
        /* The memory outlives the tensor. */
        struct DLManagedTensor *managed = NULL;
        CHECK_OK(nib_tensor_to_dlpack(t, NIB_ROW_DATA, &managed));
        const struct usage c = usage_of(k, t, NIB_ROWWISE);
        const unsigned first = code_at(&c, 0, 0);
        nib_tensor_destroy(t);
        CHECK_KIND(k, (*(uint8_t *)managed->data & (k->element == NIB_E2M1 ? 15u : 255u)) == first);
        managed->deleter(managed);
    }
}

TEST_MAIN
