/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quantizer.c - questions about quantizers: what they support, equality, hashes, usages.
 */
#include "test_variants.h"

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
