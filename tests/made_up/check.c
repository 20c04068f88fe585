/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - a format from outside the library goes through every call as the built-in ones do.
 *
 * Linked with a library that tests/cli/made_up.sh built with made_up.h. Knows the format by its name only.
 */
#include "test_tensors.h"

#include <math.h>

static float values[1 << 16], decoded[1 << 16], decoded_too[1 << 16];

static nib_quantizer quantizer(void)
{
    nib_format format = NIB_NVFP4;
    nib_quantizer q;
    CHECK_OK(nib_format_from_name("madeup8", &format));
    CHECK_OK(nib_quantizer_init_format(&q, format));
    return q;
}

static nib_array matrix(int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows * cols; i++)
        values[i] = ldexpf(test_normal(), (int)test_below(12) - 6);
    return array_of(values, NIB_F32, 2, (const int64_t[]){ rows, cols });
}

TEST(the_table_has_one_more_row)
{
    const nib_quantizer q = quantizer();
    CHECK(nib_format_count() == NIB_FORMAT_COUNT + 1 && (int)q.format == NIB_FORMAT_COUNT);
    CHECK(strcmp(nib_format_name(q.format), "madeup8") == 0);
    CHECK(q.block_dims[0] == 1 && q.block_dims[1] == 8 && q.rowwise && q.columnwise && !q.pow2_scales);
    const int64_t shape[3] = { 2, 5, 21 }, expected[4][3] = { { 2, 5, 21 }, { 21, 10 }, { 16, 4 }, { 24, 2 } };
    const int ranks[4] = { 3, 2, 2, 2 };
    for (int part = 0; part < 4; part++) {
        int rank = 0;
        int64_t got[NIB_MAX_RANK] = { 0 };
        CHECK_OK(nib_part_shape(&q, (nib_part)part, 3, shape, &rank, got));
        CHECK_THAT(rank == ranks[part] && memcmp(got, expected[part], (size_t)rank * sizeof *got) == 0, "part %d",
                   part);
    }
    nib_quantizer other = q;
    other.block_dims[1] = 16;
    CHECK_FAILS(nib_quantizer_check(&other, NULL), NIB_ERR_ARG, "madeup8");
    other = q;
    other.element = NIB_E5M2;
    CHECK_FAILS(nib_quantizer_check(&other, NULL), NIB_ERR_DTYPE, "madeup8");
    other = q;
    other.rht = 1;
    CHECK_FAILS(nib_quantizer_check(&other, NULL), NIB_ERR_MODE, "madeup8");
    other = q;
    other.swizzled = 1;
    CHECK_FAILS(nib_quantizer_check(&other, NULL), NIB_ERR_MODE, "swizzled");
    other = q;
    other.dialect = NIB_DIALECT_GIST;
    CHECK_FAILS(nib_quantizer_check(&other, NULL), NIB_ERR_MODE, "madeup8");
}

/* Values are code times scale, from either usage; nothing is clipped. */
TEST(quantize_and_dequantize)
{
    static const int64_t shapes[][2] = { { 64, 96 }, { 33, 45 }, { 1, 5 }, { 5, 1 }, { 7, 300 }, { 0, 8 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        nib_quantizer q = quantizer();
        const int64_t M = shapes[s][0], K = shapes[s][1];
        nib_array x = matrix(M, K);
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int usage = 0; usage < 2; usage++) {
            nib_array codes, scales;
            CHECK_OK(nib_tensor_part(t, usage ? NIB_COL_DATA : NIB_ROW_DATA, &codes));
            CHECK_OK(nib_tensor_part(t, usage ? NIB_COL_SCALE : NIB_ROW_SCALE, &scales));
            CHECK(scales.dtype == NIB_E5M2);
            dequantize(t, (nib_usage)usage, NIB_F32, decoded);
            for (int64_t i = 0; i < M * K; i++) {
                const int64_t line = usage ? i % K : i / K, at = usage ? i / K : i % K, length = usage ? M : K;
                const uint8_t *code_at = (const uint8_t *)codes.data + line * length + at,
                              *scale_at = (const uint8_t *)scales.data + line * scales.shape[1] + at / 8;
                float code = 0, scale = 0;
                CHECK_OK(nib_decode(NIB_E4M3, code_at, 1, &code));
                CHECK_OK(nib_decode(NIB_E5M2, scale_at, 1, &scale));
                CHECK(decoded[i] == code * scale && fabsf(values[i]) <= 448.001f * scale);
                CHECK(fabsf(decoded[i] - values[i]) <= 0.0626f * fabsf(values[i]) + 0x1p-10f * scale);
            }
        }
        x.device = host_of(5);
        nib_tensor *again = quantize(&q, &x, NULL);
        CHECK(equal(t, again));
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, again));
        CHECK(equal(t, again));
        nib_tensor_destroy(again);
        nib_tensor_destroy(t);
    }
}

TEST(save_and_restore)
{
    const nib_quantizer q = quantizer();
    const nib_array x = matrix(33, 45);
    nib_tensor *t = quantize(&q, &x, NULL), *kept = NULL;
    nib_buffer *saved[NIB_PART_COUNT];
    size_t n = 0, used = 0;
    CHECK_OK(nib_tensor_clone(t, &kept));
    CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &n));
    CHECK(n == 4 && nib_tensor_buffer(t, NIB_ROW_DATA) == NULL);
    CHECK_OK(nib_tensor_restore_from_saved(t, saved, n, &used));
    CHECK(used == 4 && equal(t, kept));
    CHECK_OK(nib_tensor_zero(t));
    CHECK(!equal(t, kept));
    CHECK_OK(nib_tensor_copy(t, kept));
    CHECK(equal(t, kept));
    CHECK_OK(nib_tensor_update_usage(t, 1, 0));
    CHECK_FAILS(nib_tensor_update_usage(t, 1, 1), NIB_ERR_USAGE, "1x8");
    CHECK_FAILS(nib_tensor_swizzle(t), NIB_ERR_UNSUPPORTED, "madeup8");
    nib_tensor_destroy(t);
    nib_tensor_destroy(kept);
}

TEST(views_and_slices)
{
    nib_quantizer q = quantizer();
    nib_array x = matrix(64, 32);
    nib_tensor *t = quantize(&q, &x, NULL), *view = NULL, *slice = NULL;
    const int64_t shape[3] = { 4, 16, 32 }, longer[2] = { 32, 64 };
    CHECK_OK(nib_tensor_view(t, 3, shape, &view));
    x = array_of(values, NIB_F32, 3, shape);
    nib_tensor *direct = quantize(&q, &x, NULL);
    CHECK(equal(view, direct));
    nib_tensor_destroy(view);
    nib_tensor_destroy(direct);

    CHECK_FAILS(nib_tensor_slice(t, 4, 8, &slice), NIB_ERR_SHAPE, "multiples of 8");
    CHECK_OK(nib_tensor_slice(t, 8, 24, &slice));
    x = array_of(values + 8 * 32, NIB_F32, 2, (const int64_t[]){ 24, 32 });
    direct = quantize(&q, &x, NULL);
    CHECK(equal(slice, direct));
    nib_tensor_destroy(slice);
    nib_tensor_destroy(direct);

    CHECK_OK(nib_tensor_update_usage(t, 1, 0));
    q.columnwise = 0;
    CHECK_OK(nib_tensor_view(t, 2, longer, &view));
    x = array_of(values, NIB_F32, 2, longer);
    direct = quantize(&q, &x, NULL);
    CHECK(equal(view, direct));
    dequantize(t, NIB_ROWWISE, NIB_F32, decoded);
    dequantize(view, NIB_ROWWISE, NIB_F32, decoded_too);
    CHECK_BYTES(decoded, decoded_too, 64 * 32 * sizeof(float));
    nib_tensor_destroy(view);
    nib_tensor_destroy(direct);
    nib_tensor_destroy(t);
}

TEST(write_and_read_back)
{
    char path[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/nib_made_up_%d.safetensors", tmp ? tmp : "/tmp", (int)getpid());
    const nib_quantizer q = quantizer();
    const nib_array x = matrix(33, 45);
    nib_tensor *t = quantize(&q, &x, NULL), *back = NULL;
    nib_writer *writer = NULL;
    nib_file *file = NULL;
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_declare_tensor(writer, "t", t));
    CHECK_OK(nib_writer_write_tensor(writer, "t", t));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_read_tensor(file, "t", NULL, &back));
    CHECK(equal(t, back));
    nib_file_close(file);
    unlink(path);
    nib_tensor_destroy(back);
    nib_tensor_destroy(t);
}

/* The others are as they were. */
TEST(the_built_in_formats_are_there)
{
    const nib_array x = matrix(64, 96);
    for (int format = 0; format < NIB_FORMAT_COUNT; format++) {
        nib_quantizer q;
        CHECK_OK(nib_quantizer_init_format(&q, (nib_format)format));
        nib_tensor *t = quantize(&q, &x, NULL);
        dequantize(t, NIB_ROWWISE, NIB_F32, decoded);
        nib_tensor_destroy(t);
    }
}

TEST_MAIN
