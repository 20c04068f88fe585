/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quantize_options.c - every combination of options, supported or rejected.
 */
#include "test_modes.h"

/* The documented list, each with its own words; NULL where the combination is taken. */
static const char *rejection(const nib_quantizer *q)
{
    const bool rht = q->rht || q->rht_rowwise, square = q->block_dims[0] == 16,
               random = q->rounding != NIB_ROUND_NEAREST;
    if (rht && square)
        return "RHT";
    if (q->scale_rule == NIB_SCALE_4OVER6 && (rht || random))
        return "four-over-six";
    if (q->scale_rule == NIB_SCALE_SWEEP && (square || random))
        return "sweep";
    if (q->row_scaled && square)
        return "one amax per row";
    if (q->e4m3_max == 256 && q->scale_rule != NIB_SCALE_4OVER6)
        return "e4m3_max 256";
    if (q->no_tensor_scale)
        return "torchao";
    return NULL;
}

static int next_digit(int *number, int base)
{
    const int digit = *number % base;
    *number /= base;
    return digit;
}

TEST(every_combination_is_taken_or_refused_by_the_list)
{
    nib_array x[COUNT(dtypes)];
    for (int d = 0; d < COUNT(dtypes); d++)
        x[d] = random_matrix(NORMAL, dtypes[d], 32, 32);
    const int total = 4 * 2 * 2 * 2 * 2 * 3 * 2 * 2 * 2 * 3 * 4;
    int taken = 0, rejected = 0;
    for (int i = 0; i < total; i++) {
        int rest = i;
        nib_quantizer q = mode_of(RTN);
        q.rowwise = (uint8_t)next_digit(&rest, 2), q.columnwise = (uint8_t)next_digit(&rest, 2);
        q.row_scaled = (uint8_t)next_digit(&rest, 2);
        q.rht = (uint8_t)next_digit(&rest, 2), q.rht_rowwise = (uint8_t)next_digit(&rest, 2);
        q.block_dims[0] = next_digit(&rest, 2) ? 16 : 1;
        q.scale_rule = (nib_scale_rule)next_digit(&rest, 3);
        q.error_mode = (nib_error_mode)next_digit(&rest, 2), q.fast_error = (uint8_t)next_digit(&rest, 2);
        q.e4m3_max = next_digit(&rest, 2) ? 256 : 448;
        q.tensor_scale_rule = (nib_tensor_scale_rule)next_digit(&rest, 3);
        q.rounding = (nib_rounding)next_digit(&rest, 4);
        q.swizzled = (uint8_t)test_below(2), q.min_block_scale = test_below(2) ? 0 : 0x1p-6f;
        q.no_tensor_scale = test_below(20) == 0;
        const nib_array *input = &x[test_below(COUNT(dtypes))];
        nib_tensor *t = NULL;
        const char *why = rejection(&q);
        if (why) {
            CHECK_FAILS(nib_quantize(&q, input, NULL, &t), NIB_ERR_MODE, why);
            CHECK_FAILS(nib_quantizer_check(&q, NULL), NIB_ERR_MODE, why);
            rejected++;
        } else {
            CHECK_OK(nib_quantizer_check(&q, input));
            CHECK_OK(nib_quantize(&q, input, NULL, &t));
            int rowwise = 2, columnwise = 2;
            CHECK_OK(nib_tensor_get_usages(t, &rowwise, &columnwise));
            CHECK(rowwise == q.rowwise && columnwise == q.columnwise);
            taken++;
        }
        nib_tensor_destroy(t);
    }
    CHECK(taken > 1000 && rejected > 1000);
    for (int d = 0; d < COUNT(dtypes); d++)
        free(x[d].data);
}

TEST(values_outside_their_range)
{
    nib_quantizer good = mode_of(RTN), q;
#define REJECTED(change, status, words)                                      \
    do {                                                                     \
        q = good;                                                            \
        change;                                                              \
        CHECK_FAILS(nib_quantizer_check(&q, NULL), NIB_ERR_##status, words); \
    } while (0)
    REJECTED(q.format = NIB_FORMAT_COUNT, ARG, "format 5");
    REJECTED(q.dialect = NIB_DIALECT_COUNT, ARG, "dialect 5");
    REJECTED(q.dialect = (nib_dialect)-1, ARG, "dialect -1");
    REJECTED(q.scale_rule = NIB_SCALE_RULE_COUNT, ARG, "scale_rule 3");
    REJECTED(q.error_mode = NIB_ERROR_MODE_COUNT, ARG, "error_mode 2");
    REJECTED(q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_COUNT, ARG, "tensor_scale_rule 3");
    REJECTED(q.rounding = NIB_ROUNDING_COUNT, ARG, "rounding 4");
    REJECTED(q.e4m3_max = 0, ARG, "e4m3_max is 448 or 256, not 0");
    REJECTED(q.origin[0] = -1, ARG, "origin (-1, 0)");
    REJECTED(q.origin[1] = INT64_MIN, ARG, "outside the whole");
    REJECTED(q.block_dims[0] = 2, ARG, "not 2x16");
    REJECTED(q.block_dims[1] = 1, ARG, "not 1x1");
    REJECTED((q.block_dims[0] = 16, q.block_dims[1] = 1), ARG, "not 16x1");
    REJECTED(q.min_block_scale = 0.3f, ARG, "min_block_scale");
    REJECTED(q.min_block_scale = -1, ARG, "min_block_scale");
    REJECTED(q.min_block_scale = 449, ARG, "min_block_scale");
    REJECTED(q.min_block_scale = NAN, ARG, "min_block_scale");
    REJECTED(q.min_block_scale = 1e-40f, ARG, "min_block_scale");
    REJECTED(q.bytes = 8, ARG, "quantizer->bytes is 8");
#undef REJECTED
    CHECK_FAILS(nib_quantizer_check(NULL, NULL), NIB_ERR_ARG, "NULL");
    nib_comm comm = { .bytes = sizeof comm, .size = 2 };
    q = good, q.amax_comm = &comm;
    CHECK_FAILS(nib_quantizer_check(&q, NULL), NIB_ERR_ARG, "allreduce_max_f32");
    comm.allreduce_max_f32 = nib_comm_serial()->allreduce_max_f32, comm.rank = 2;
    CHECK_FAILS(nib_quantizer_check(&q, NULL), NIB_ERR_ARG, "rank 2 of 2");
}

/* -0 is no floor; it must not become a scale. */
TEST(a_floor_of_minus_zero)
{
    const nib_array x = random_matrix(NORMAL, NIB_F32, 16, 32);
    nib_quantizer q = mode_of(RTN);
    nib_tensor *plain = quantize(&q, &x, NULL), *t = NULL;
    q.min_block_scale = -0.0f;
    snprintf(where, sizeof where, "floor -0");
    if (nib_quantize(&q, &x, NULL, &t) == NIB_OK)
        CHECK_SAME(t, plain);
    nib_tensor_destroy(plain);
    nib_tensor_destroy(t);
    free(x.data);
}

TEST(a_newer_quantizer_is_taken_when_it_asks_for_nothing_new)
{
    struct {
        nib_quantizer q;
        uint64_t later;
    } newer = { mode_of(RTN), 0 };
    newer.q.bytes = sizeof newer;
    CHECK_OK(nib_quantizer_check(&newer.q, NULL));
    newer.later = 1;
    CHECK_FAILS(nib_quantizer_check(&newer.q, NULL), NIB_ERR_UNSUPPORTED, "does not have");
}

/* The other dialects fix every rule. */
TEST(options_that_only_te_has)
{
    for (int d = NIB_DIALECT_TE + 1; d < NIB_DIALECT_COUNT; d++)
        for (int mode = 0; mode < MODES; mode++) {
            nib_quantizer q = mode_of(mode);
            q.dialect = (nib_dialect)d;
            if (mode == RTN || mode == SWIZZLED)
                CHECK_OK(nib_quantizer_check(&q, NULL));
            else
                CHECK_FAILS(nib_quantizer_check(&q, NULL), NIB_ERR_MODE, "fixes every numeric rule");
            q = mode_of(RTN), q.dialect = (nib_dialect)d, q.no_tensor_scale = 1;
            CHECK((nib_quantizer_check(&q, NULL) == NIB_OK) == (d == NIB_DIALECT_TORCHAO));
        }
}

TEST(inputs_that_are_refused)
{
    const nib_array good = random_matrix(NORMAL, NIB_F32, 24, 40);
    nib_quantizer q = mode_of(RTN), rht = q;
    nib_tensor *t = NULL;
    nib_array x = good;
    x.dtype = NIB_F64, x.shape[1] = 20, x.strides[0] = 20;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_DTYPE, "not F64");
    x = good, x.strides[0]++;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_SHAPE, "leave its 3840 bytes");
    x = good, x.strides[1] = -1;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_SHAPE, "leave its");
    x = good, x.data = NULL;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_ARG, "NULL");
    x = good, x.rank = 0;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_SHAPE, "rank");
    x = good, x.rank = NIB_MAX_RANK + 1;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_SHAPE, "rank 9");
    x = good, x.shape[0] = -1;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_SHAPE, "dim 0 is -1");
    x = good, x.offset = 2, x.shape[0] = 1, x.shape[1] = 3;
    CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_ARG, "aligned");
    CHECK_FAILS(nib_quantize(&q, NULL, NULL, &t), NIB_ERR_ARG, "NULL");
    CHECK_FAILS(nib_quantize(&q, &good, NULL, NULL), NIB_ERR_ARG, "NULL");
    rht.rht = 1;
    CHECK_FAILS(nib_quantize(&rht, &good, NULL, &t), NIB_ERR_SHAPE, "24 rows");
    rht.columnwise = 0; /* the copy that is transformed is not wanted */
    CHECK_OK(nib_quantize(&rht, &good, NULL, &t));
    nib_tensor_destroy(t);
    t = NULL;
    rht.rht_rowwise = 1;
    CHECK_FAILS(nib_quantize(&rht, &good, NULL, &t), NIB_ERR_SHAPE, "40 columns");
    CHECK(!t);
    free(good.data);
}

TEST_MAIN
