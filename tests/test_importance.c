/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_importance.c - the importance of channels: how it is made, what it does to the sweep, and where it is rejected.
 */
#include <float.h>

#include "test_modes.h"

enum { MOST = 700 };

static nib_quantizer sweep_quantizer(void)
{
    nib_quantizer q = usages(1, 0);
    q.scale_rule = NIB_SCALE_SWEEP;
    return q;
}

static nib_overrides weights(const float *importance, int64_t n)
{
    return (nib_overrides){ .bytes = sizeof(nib_overrides), .importance = importance, .importance_count = n };
}

/* ---- From mean squares ---- */

TEST(mean_squares_become_relative)
{
    const float squares[] = { 1, 2, 3, 10 }, wanted[] = { 0.25f, 0.5f, 0.75f, 2.5f };
    float got[4];
    CHECK_OK(nib_importance_normalize(squares, 4, got));
    CHECK_BYTES(got, wanted, sizeof wanted);
    float third[3] = { 1, 0, 0 }; /* in place; a quotient that FP32 does not have, and the floor */
    const float wanted_third[] = { 3, 1e-6f, 1e-6f };
    CHECK_OK(nib_importance_normalize(third, 3, third));
    CHECK_BYTES(third, wanted_third, sizeof third);
    float tenth[10] = { 7 };
    for (int i = 1; i < 10; i++)
        tenth[i] = 0.1f;
    double sum = 7;
    for (int i = 1; i < 10; i++)
        sum += (double)0.1f;
    const float wanted_tenth[] = { (float)(7 / (sum / 10)), (float)((double)0.1f / (sum / 10)) };
    CHECK_OK(nib_importance_normalize(tenth, 10, tenth));
    CHECK_BYTES(tenth, wanted_tenth, sizeof wanted_tenth);
}

/* Blocks of zeros have no data, nor has a tail; a single zero among others is small. */
TEST(blocks_without_data_count_one)
{
    float squares[40] = { 0 }, got[40];
    squares[3] = 5;
    CHECK_OK(nib_importance_normalize(squares, 40, got));
    for (int i = 0; i < 40; i++)
        CHECK(got[i] == (i == 3 ? 40.0f : i < 16 ? 1e-6f : 1.0f));
    squares[3] = 0;
    squares[39] = FLT_MIN / 4; /* a subnormal is data */
    CHECK_OK(nib_importance_normalize(squares, 40, got));
    for (int i = 0; i < 40; i++)
        CHECK(got[i] == (i == 39 ? 40.0f : i >= 32 ? 1e-6f : 1.0f));
    squares[39] = -0.0f;
    CHECK_OK(nib_importance_normalize(squares, 40, got));
    for (int i = 0; i < 40; i++)
        CHECK(got[i] == 1.0f);
    for (int i = 0; i < 40; i++)
        squares[i] = FLT_MAX; /* their sum is no float */
    CHECK_OK(nib_importance_normalize(squares, 40, got));
    for (int i = 0; i < 40; i++)
        CHECK(got[i] == 1.0f);
}

TEST(mean_squares_that_are_rejected)
{
    const struct {
        float value;
        const char *why;
    } cases[] = { { NAN, "is a NaN" },
                  { -NAN, "is a NaN" },
                  { INFINITY, "infinite" },
                  { -INFINITY, "negative" },
                  { -1e-45f, "negative" } };
    float squares[33], out[33];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int at = 0; at < 33; at += 16) {
            char name[40];
            for (int k = 0; k < 33; k++)
                squares[k] = 1, out[k] = 7;
            squares[at] = cases[i].value;
            snprintf(name, sizeof name, "mean square %d", at);
            CHECK_FAILS(nib_importance_normalize(squares, 33, out), NIB_ERR_ARG, name);
            CHECK_FAILS(nib_importance_normalize(squares, 33, out), NIB_ERR_ARG, cases[i].why);
            for (int k = 0; k < 33; k++)
                CHECK(out[k] == 7);
        }
    CHECK_FAILS(nib_importance_normalize(squares, 0, out), NIB_ERR_SHAPE, "at least one");
    CHECK_FAILS(nib_importance_normalize(squares, -1, out), NIB_ERR_SHAPE, "-1");
    CHECK_FAILS(nib_importance_normalize(NULL, 1, out), NIB_ERR_ARG, "squares");
    CHECK_FAILS(nib_importance_normalize(squares, 1, NULL), NIB_ERR_ARG, "out");
}

/* ---- What it does ---- */

static void for_shapes(void (*check)(const nib_quantizer *q, const nib_array *x, enum kind kind))
{
    static const int64_t sizes[][2] = {
        { 1, 1 }, { 3, 16 }, { 5, 17 }, { 9, 256 }, { 2, 300 }, { 40, 530 }, { 3, MOST }
    };
    nib_quantizer q = sweep_quantizer();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
            for (int kind = 0; kind < KINDS; kind++) {
                const nib_array x = random_matrix((enum kind)kind, dtypes[d], sizes[i][0], sizes[i][1]);
                q.tensor_scale_rule = (nib_tensor_scale_rule)test_below(NIB_TENSOR_SCALE_RULE_COUNT);
                q.row_scaled = (uint8_t)test_below(2);
                q.swizzled = (uint8_t)test_below(2);
                check(&q, &x, (enum kind)kind);
                free(x.data);
            }
}

static void ones_change_nothing(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    float ones[MOST];
    for (int i = 0; i < MOST; i++)
        ones[i] = 1;
    const nib_overrides overrides = weights(ones, x->shape[1]);
    nib_tensor *plain = quantize(q, x, NULL), *weighted = quantize(q, x, &overrides);
    CHECK_SAME(plain, weighted);
    CHECK_OK(nib_quantize_into(NULL, x, &overrides, NULL, plain));
    CHECK_SAME(plain, weighted);
    nib_tensor_destroy(plain);
    nib_tensor_destroy(weighted);
}

TEST(ones_give_the_plain_sweep) { for_shapes(ones_change_nothing); }

/* The sum of squared errors of row r, weighted, in FP64. */
static double weighted_error(const float *x, const float *y, const float *h, int64_t cols)
{
    double sum = 0;
    for (int64_t k = 0; k < cols; k++)
        sum += ((double)x[k] - (double)y[k]) * ((double)x[k] - (double)y[k]) * (double)h[k];
    return sum;
}

/* Less is lost where it counts than by a sweep that does not know. */
static void weighs_errors(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    if (kind != NORMAL || x->dtype == NIB_F16)
        return;
    const int64_t rows = x->shape[0], cols = x->shape[1];
    float h[MOST];
    for (int64_t k = 0; k < cols; k++)
        h[k] = ldexpf(1, (int)test_below(12));
    CHECK_OK(nib_importance_normalize(h, cols, h));
    const nib_overrides overrides = weights(h, cols);
    nib_tensor *plain = quantize(q, x, NULL), *weighted = quantize(q, x, &overrides);
    float *values = floats_of(x), *a = malloc((size_t)(rows * cols) * 4), *b = malloc((size_t)(rows * cols) * 4);
    const nib_array out_a = array_of(a, NIB_F32, 2, x->shape), out_b = array_of(b, NIB_F32, 2, x->shape);
    CHECK_OK(nib_dequantize(plain, NIB_ROWWISE, &out_a));
    CHECK_OK(nib_dequantize(weighted, NIB_ROWWISE, &out_b));
    double before = 0, after = 0;
    for (int64_t r = 0; r < rows; r++) {
        before += weighted_error(values + r * cols, a + r * cols, h, cols);
        after += weighted_error(values + r * cols, b + r * cols, h, cols);
    }
    CHECK(after <= before * (1 + 1e-6));
    if (rows * cols > 1000)
        CHECK(after < before * 0.95);
    free(values), free(a), free(b);
    nib_tensor_destroy(plain);
    nib_tensor_destroy(weighted);
}

TEST(errors_count_by_importance) { for_shapes(weighs_errors); }

/* Neither the strides of the input nor the threads matter. */
TEST(the_same_bytes_from_any_layout)
{
    const int64_t rows = 530, cols = 300;
    const nib_quantizer q = sweep_quantizer();
    float h[300];
    for (int k = 0; k < 300; k++)
        h[k] = (float)(1 + test_below(1000));
    const nib_overrides overrides = weights(h, cols);
    nib_array x = random_matrix(NORMAL, NIB_BF16, cols, rows), view = transposed_view(&x);
    nib_array plain = contiguous_copy(&view);
    nib_tensor *wanted = quantize(&q, &plain, &overrides), *got = quantize(&q, &view, &overrides);
    CHECK_SAME(wanted, got);
    nib_tensor_destroy(got);
    nib_array faked = contiguous_copy(&plain), values = contiguous_copy(&plain);
    CHECK_OK(nib_fake_quantize(&q, &plain, &overrides, NIB_ROWWISE, &faked));
    CHECK_OK(nib_dequantize(wanted, NIB_ROWWISE, &values));
    CHECK_BYTES(faked.data, values.data, values.bytes);
    CHECK_FAILS(nib_fake_quantize(&q, &plain, &overrides, NIB_COLUMNWISE, &faked), NIB_ERR_MODE, "rowwise");
    free(faked.data);
    free(values.data);
    nib_device *host = NULL;
    CHECK_OK(nib_host_create(7, &host));
    plain.device = host;
    got = quantize(&q, &plain, &overrides);
    CHECK_SAME(wanted, got);
    nib_tensor_destroy(got);
    nib_tensor_destroy(wanted);
    nib_device_release(host);
    free(x.data);
    free(plain.data);
}

/* ---- Where it is rejected ---- */

TEST(what_it_does_not_go_with)
{
    float h[33];
    for (int k = 0; k < 33; k++)
        h[k] = 1;
    const nib_array x = random_matrix(NORMAL, NIB_F32, 16, 32);
    const nib_overrides good = weights(h, 32);
    nib_tensor *t = NULL;
    nib_quantizer q = sweep_quantizer();
    q.scale_rule = NIB_SCALE_RTN;
    CHECK_FAILS(nib_quantize(&q, &x, &good, &t), NIB_ERR_MODE, "scale rule");
    q.scale_rule = NIB_SCALE_4OVER6;
    CHECK_FAILS(nib_quantize(&q, &x, &good, &t), NIB_ERR_MODE, "scale rule");
    q = sweep_quantizer();
    q.columnwise = 1;
    CHECK_FAILS(nib_quantize(&q, &x, &good, &t), NIB_ERR_MODE, "rowwise usage alone");
    q.rowwise = 0;
    CHECK_FAILS(nib_quantize(&q, &x, &good, &t), NIB_ERR_MODE, "rowwise usage alone");
    q = sweep_quantizer();
    q.rht_rowwise = 1;
    CHECK_FAILS(nib_quantize(&q, &x, &good, &t), NIB_ERR_MODE, "RHT");
    CHECK_OK(nib_quantizer_init_format(&q, NIB_MXFP8));
    q.columnwise = 0;
    CHECK_FAILS(nib_quantize(&q, &x, &good, &t), NIB_ERR_MODE, "scale rule");
    q = sweep_quantizer();
    for (int64_t n = 31; n <= 33; n += 2) {
        const nib_overrides wrong = weights(h, n);
        CHECK_FAILS(nib_quantize(&q, &x, &wrong, &t), NIB_ERR_SHAPE, "32 columns");
    }
    const nib_overrides none = weights(NULL, 32), negative = weights(h, -32);
    CHECK_FAILS(nib_quantize(&q, &x, &none, &t), NIB_ERR_ARG, "no importance");
    CHECK_FAILS(nib_quantize(&q, &x, &negative, &t), NIB_ERR_SHAPE, "-32");
    static const float bad[] = { 0, -0.0f, -1, NAN, INFINITY };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        h[31] = bad[i];
        CHECK_FAILS(nib_quantize(&q, &x, &good, &t), NIB_ERR_ARG, "importance 31");
    }
    CHECK(!t);
    free(x.data);
}

TEST_MAIN
