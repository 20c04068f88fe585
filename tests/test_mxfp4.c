/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mxfp4.c - MXFP4 to NVFP4: exact where it can be, and reported where it cannot.
 */
#include "test_kinds.h"

#include <fenv.h>
#include <float.h>

static const struct kind mxfp4 = { "mxfp4", NIB_MXFP4, NIB_E2M1, 1, 32 };

/* An MXFP4 tensor with random codes, to be given its scales. */
static nib_tensor *random_mxfp4(int64_t rows, int64_t cols, uint8_t **codes, uint8_t **scales, int64_t *stride)
{
    nib_quantizer q = quantizer(&mxfp4);
    nib_tensor *t = NULL;
    nib_array part = { 0 };
    q.columnwise = 0;
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, (const int64_t[]){ rows, cols }, NULL, &t));
    *codes = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_DATA));
    *scales = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_SCALE));
    for (int64_t i = 0; i < rows * ((cols + 1) / 2); i++)
        (*codes)[i] = (uint8_t)test_random();
    for (int64_t i = 0; i < rows && cols % 2; i++)
        (*codes)[(i + 1) * ((cols + 1) / 2) - 1] &= 15; /* the nibble that stands for nothing */
    CHECK_OK(nib_tensor_part(t, NIB_ROW_SCALE, &part));
    *stride = part.shape[1];
    return t;
}

static void check_conversion_keeps_values(const nib_tensor *from, const nib_tensor *to)
{
    const nib_metadata m = metadata_of(from), n = metadata_of(to);
    CHECK(n.format == NIB_NVFP4 && n.tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER && n.dtype == m.dtype &&
          n.rank == m.rank);
    CHECK(n.rowwise && !n.columnwise && n.quantizer->tensor_scale_rule == NIB_TENSOR_SCALE_RULE_POW2);
    dequantize(from, NIB_ROWWISE, NIB_F32, decoded);
    dequantize(to, NIB_ROWWISE, NIB_F32, decoded_too);
    for (int64_t i = 0; i < m.rows * m.cols; i++)
        if (memcmp(&decoded[i], &decoded_too[i], sizeof(float)) && !(isnan(decoded[i]) && isnan(decoded_too[i]))) {
            CHECK_THAT(false, "[%lld, %lld]: %a became %a", (long long)(i / m.cols), (long long)(i % m.cols),
                       (double)decoded[i], (double)decoded_too[i]);
            return;
        }
    int exponent;
    CHECK(frexpf(tensor_scale_of(to), &exponent) == 0.5f && tensor_scale_of(to) >= FLT_MIN);
}

/* Scales within 2^17 of each other, anywhere in E8M0: the values stay, bit for bit. */
TEST(mxfp4_becomes_nvfp4)
{
    static const int64_t sizes[][2] = {
        { 64, 256 }, { 33, 45 }, { 1, 5 }, { 5, 1 }, { 3, 17 }, { 40, 100 }, { 2, 48 }
    };
    for (int base = 0; base <= 254; base += base < 40 ? 1 : 7)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            const int64_t rows = sizes[s][0], cols = sizes[s][1], blocks = (cols + 31) / 32;
            uint8_t *codes, *scales;
            int64_t stride;
            nib_tensor *from = random_mxfp4(rows, cols, &codes, &scales, &stride), *to = NULL;
            for (int64_t i = 0; i < rows * blocks; i++) {
                const int64_t e = base + test_below(18);
                scales[i / blocks * stride + i % blocks] = (uint8_t)(e < 254 ? e : 254);
            }
            CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
            check_conversion_keeps_values(from, to);
            nib_tensor_destroy(to);
            nib_conversion_report report = { .bytes = sizeof report };
            CHECK_OK(nib_tensor_swizzle(from)); /* where the scales lie is no matter */
            CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
            CHECK(report.blocks == rows * blocks && report.inexact == 0);
            check_conversion_keeps_values(from, to);
            nib_tensor_destroy(to);
            nib_tensor_destroy(from);
        }
}

/* What quantization made goes over as well, and a tensor of any rank. */
TEST(quantized_mxfp4_becomes_nvfp4)
{
    nib_quantizer q = quantizer(&mxfp4);
    for (int rule = 0; rule < 2; rule++) {
        q.mx_rule = (nib_mx_rule)rule;
        (void)matrix(66, 100);
        const nib_array x = array_of(inputs, NIB_F32, 3, (const int64_t[]){ 3, 22, 100 });
        nib_tensor *from = quantize(&q, &x, NULL), *to = NULL;
        CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
        check_conversion_keeps_values(from, to);
        CHECK(metadata_of(to).rank == 3);
        nib_tensor_destroy(to);
        CHECK_OK(nib_tensor_update_usage(from, 0, 1));
        CHECK_FAILS(nib_mxfp4_to_nvfp4(from, NULL, &to), NIB_ERR_USAGE, "rowwise");
        nib_tensor_destroy(from);
    }
    q = quantizer(&kinds[0]);
    const nib_array x = matrix(32, 32);
    nib_tensor *from = quantize(&q, &x, NULL), *to = NULL;
    CHECK_FAILS(nib_mxfp4_to_nvfp4(from, NULL, &to), NIB_ERR_MISMATCH, "float8");
    nib_tensor_destroy(from);
    CHECK_FAILS(nib_mxfp4_to_nvfp4(NULL, NULL, &to), NIB_ERR_ARG, "");
}

/* The caller's rounding mode changes nothing, and is there afterwards. */
TEST(a_conversion_leaves_the_rounding_mode)
{
    nib_quantizer q = quantizer(&mxfp4);
    const nib_array x = matrix(33, 45);
    nib_tensor *from = quantize(&q, &x, NULL), *to = NULL;
    const int mode = fegetround();
    volatile float one = 1, little = 0x1p-60f, sum;
    fesetround(FE_UPWARD);
    const nib_status status = nib_mxfp4_to_nvfp4(from, NULL, &to);
    sum = one + little;
    fesetround(mode);
    CHECK(sum > 1);
    CHECK_OK(status);
    check_conversion_keeps_values(from, to);
    nib_tensor_destroy(to);
    nib_tensor_destroy(from);
}

/* A block that lies `below` powers of two under the largest, with these codes in it, beside one of the largest. */
static nib_tensor *far_blocks(int largest, int below, const uint8_t *values, int n, int64_t rows)
{
    uint8_t *codes, *scales;
    int64_t stride;
    nib_tensor *t = random_mxfp4(rows, 96, &codes, &scales, &stride);
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; i < 3; i++)
            scales[row * stride + i] = (uint8_t)(i == 1 ? largest - below : largest);
        for (int i = 0; i < 16; i++) {
            const uint8_t low = values[test_below(n)], high = values[test_below(n)];
            codes[row * 48 + 16 + i] = (uint8_t)(low | high << 4);
        }
        codes[row * 48] = 0x77; /* 6, so that the first block has a value */
        codes[row * 48 + 16] = (uint8_t)(values[0] | values[0] << 4);
    }
    return t;
}

/* A scale that is too large by a power of two can be made up for by smaller codes: 1, 2, 3, 4 and 6 can be halved, 2, 4
 * and 6 once more, 4 a third time, and zeros for ever. Signs are kept. */
TEST(far_blocks_are_exact_where_their_codes_allow)
{
    static const struct {
        int below, n;
        uint8_t codes[6];
    } cases[] = {
        { 17, 6, { 1, 2, 3, 5, 7, 9 } },      /* all there are */
        { 18, 6, { 2, 4, 5, 6, 7, 0 } },      /* 1 2 3 4 6 */
        { 18, 6, { 10, 12, 13, 14, 15, 8 } }, /* and their negatives */
        { 19, 4, { 4, 6, 7, 0 } },            /* 2 4 6 become .5 1 1.5 */
        { 20, 2, { 6, 0 } },                  /* 4 becomes .5 */
        { 40, 2, { 0, 8 } },
        { 200, 2, { 0, 8 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_tensor *from = far_blocks(230, cases[i].below, cases[i].codes, cases[i].n, 4), *to = NULL;
        nib_conversion_report report = { .bytes = sizeof report };
        CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
        check_conversion_keeps_values(from, to);
        nib_tensor_destroy(to);
        CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
        CHECK(report.blocks == 12 && report.inexact == 0);
        nib_tensor_destroy(to);
        nib_tensor_destroy(from);
    }
}

/* Every distance that is too far is reported, down to those whose quotient no float can hold. */
TEST(far_blocks_are_reported)
{
    static const uint8_t odd[] = { 1, 3, 5, 7, 9 };
    for (int below = 18; below <= 254; below++) {
        nib_tensor *from = far_blocks(254, below, odd, 5, 20), *to = NULL;
        nib_conversion_report report = { .bytes = sizeof report };
        CHECK_THAT(nib_mxfp4_to_nvfp4(from, NULL, &to) == NIB_ERR_MISMATCH && !to,
                   "values %d powers of two below the largest are called exact", below);
        if (!to)
            CHECK(strstr(nib_last_error(), "20 of 60 blocks") && strstr(nib_last_error(), "line 0, block 1"));
        nib_tensor_destroy(to);
        CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
        CHECK_THAT(report.blocks == 60 && report.inexact == 20, "%d below: %lld of %lld", below,
                   (long long)report.inexact, (long long)report.blocks);
        for (int i = 0; i < 16 && report.inexact == 20; i++)
            CHECK(report.first[i].line == i && report.first[i].block == 1);
        /* The others are as they were, and these are near: within the smallest step, 2^-10 of the tensor's scale. */
        dequantize(from, NIB_ROWWISE, NIB_F32, decoded);
        dequantize(to, NIB_ROWWISE, NIB_F32, decoded_too);
        const float step = ldexpf(1, 254 - 127 - 8 - 9 - 1);
        for (int i = 0; i < 20 * 96; i++)
            CHECK_THAT(i % 96 / 32 == 1 ? fabsf(decoded_too[i] - decoded[i]) <= step / 2 : decoded_too[i] == decoded[i],
                       "%d below: %a became %a", below, (double)decoded[i], (double)decoded_too[i]);
        nib_tensor_destroy(to);
        nib_tensor_destroy(from);
    }
    nib_tensor *from = far_blocks(254, 30, odd, 5, 1), *to = NULL;
    nib_conversion_report report = { .bytes = sizeof report - 1 };
    CHECK_FAILS(nib_mxfp4_to_nvfp4(from, &report, &to), NIB_ERR_ARG, "bytes");
    nib_tensor_destroy(from);
}

TEST(zeros_and_nans_become_nvfp4)
{
    uint8_t *codes, *scales;
    int64_t stride;
    nib_tensor *from = random_mxfp4(6, 64, &codes, &scales, &stride), *to = NULL;
    for (int i = 0; i < 6 * 32; i++)
        codes[i] &= 0x88; /* zeros of both signs under scales of every size */
    for (int i = 0; i < 12; i++)
        scales[i / 2 * stride + i % 2] = (uint8_t)(i * 23);
    CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
    check_conversion_keeps_values(from, to);
    CHECK(tensor_scale_of(to) == 1);
    nib_tensor_destroy(to);
    nib_tensor_destroy(from);

    /* A NaN has no counterpart that means the same in every reader, so that it is reported; it stays a NaN. */
    from = random_mxfp4(4, 64, &codes, &scales, &stride);
    for (int i = 0; i < 8; i++)
        scales[i / 2 * stride + i % 2] = i == 3 || i == 4 ? 255 : 120;
    for (int i = 0; i < 4 * 32; i++)
        codes[i] |= 0x22;
    memset(codes + 2 * 32, 0, 16); /* zeros times a NaN are NaNs too */
    nib_conversion_report report = { .bytes = sizeof report };
    CHECK_FAILS(nib_mxfp4_to_nvfp4(from, NULL, &to), NIB_ERR_MISMATCH, "2 of 8 blocks");
    CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
    CHECK(report.inexact == 2 && report.first[0].line == 1 && report.first[0].block == 1);
    CHECK(report.first[1].line == 2 && report.first[1].block == 0);
    check_conversion_keeps_values(from, to);
    for (int i = 0; i < 4 * 64; i++)
        CHECK(isnan(decoded_too[i]) == (i / 32 == 3 || i / 32 == 4));
    nib_tensor_destroy(to);
    nib_tensor_destroy(from);

    /* Nothing at all. */
    from = random_mxfp4(0, 64, &codes, &scales, &stride);
    CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
    nib_tensor_destroy(to);
    nib_tensor_destroy(from);
}

TEST_MAIN
