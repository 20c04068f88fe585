/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tensor_usages.c - usages built, dropped, swizzled and moved to another buffer.
 */
#include "test_variants.h"

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

/* -1 keeps what is there, whatever a quantizer asks of later updates. */
TEST(update_usage_keeps_what_is_there)
{
    for (int has = 0; has < 4; has++)
        for (int asked = 0; asked < 4; asked++) {
            nib_quantizer q = usages(has & 1, has >> 1);
            nib_tensor *t = some(&q, DIMS(16, 16)), *before = clone_of(t);
            q.rowwise = asked & 1, q.columnwise = asked >> 1;
            CHECK_OK(nib_tensor_set_quantizer(t, &q));
            CHECK_OK(nib_tensor_update_usage(t, -1, -1));
            CHECK(equal(t, before));
            CHECK(quantizer_of(t).rowwise == (has & 1) && quantizer_of(t).columnwise == has >> 1);
            nib_tensor_destroy(before);
            nib_tensor_destroy(t);
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
    CHECK_OK(
        nib_buffer_borrow(arena + 1, bytes, NULL, count_release, &released[1], &home)); /* codes need no alignment */
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

TEST_MAIN
