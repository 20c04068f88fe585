/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_errors_quantizer.c - every call that takes a quantizer rejects a bad one, and one for data that it does not
 * support.
 */
#include "test_untouched.h"

#include <math.h>

/* Every call that takes one, with a tensor that must stay as it is. */
static nib_tensor *kept;

static nib_status by_check(const nib_quantizer *q) { return nib_quantizer_check(q, NULL); }

static nib_status by_create(const nib_quantizer *q)
{
    nib_tensor *out = UNTOUCHED;
    const nib_status status = nib_tensor_create(q, NIB_F32, DIMS(16, 16), NULL, &out);
    CHECK(out == UNTOUCHED);
    return status;
}

static nib_status by_quantize(const nib_quantizer *q)
{
    static float x[256] = { 1, 2, 3 };
    nib_tensor *out = UNTOUCHED;
    const nib_array array = array_of(x, NIB_F32, DIMS(16, 16));
    const nib_status status = nib_quantize(q, &array, NULL, &out);
    CHECK(out == UNTOUCHED);
    return status;
}

static nib_status by_quantize_into(const nib_quantizer *q)
{
    static float x[256] = { 1, 2, 3 };
    const nib_array array = array_of(x, NIB_F32, DIMS(16, 16));
    return nib_quantize_into(q, &array, NULL, NULL, kept);
}

static nib_status by_from_buffers(const nib_quantizer *q)
{
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_tensor *out = UNTOUCHED;
    const nib_status status = nib_tensor_from_buffers(q, NIB_F32, DIMS(16, 16), parts, NIB_PART_COUNT, &out);
    CHECK(out == UNTOUCHED);
    return status;
}

static nib_status by_set_quantizer(const nib_quantizer *q) { return nib_tensor_set_quantizer(kept, q); }

static nib_status by_part_shape(const nib_quantizer *q)
{
    int rank = 99;
    int64_t shape[NIB_MAX_RANK] = { 99 };
    const nib_status status = nib_part_shape(q, NIB_ROW_DATA, DIMS(16, 16), &rank, shape);
    CHECK(rank == 99 && shape[0] == 99);
    return status;
}

static void check_quantizer(int line, const nib_quantizer *q, nib_status wanted, const char *words)
{
    static const struct {
        const char *what;
        nib_status (*call)(const nib_quantizer *q);
    } calls[] = { { "nib_quantizer_check", by_check },
                  { "nib_tensor_create", by_create },
                  { "nib_quantize", by_quantize },
                  { "nib_quantize_into", by_quantize_into },
                  { "nib_tensor_from_buffers", by_from_buffers },
                  { "nib_tensor_set_quantizer", by_set_quantizer },
                  { "nib_part_shape", by_part_shape } };
    const nib_quantizer good = default_quantizer();
    kept = some(&good, DIMS(16, 16));
    nib_tensor *before = clone_of(kept);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        if (!q && calls[i].call == by_quantize_into)
            continue; /* there NULL means the tensor's own */
        const nib_status status = calls[i].call(q);
        if (status != wanted || !strstr(nib_last_error(), words))
            test_fail(__FILE__, line, "%s: %s: %s", calls[i].what, nib_status_name(status), nib_last_error());
        nib_metadata m = { .bytes = sizeof m };
        CHECK_OK(nib_tensor_get_metadata(kept, &m));
        CHECK(equal(kept, before) && nib_quantizer_equal(m.quantizer, &good));
    }
    CHECK(!nib_is_quantizable(q, DIMS(16, 16)));
    nib_tensor_destroy(before);
    nib_tensor_destroy(kept);
}

TEST(quantizers)
{
    nib_quantizer q;
    check_quantizer(__LINE__, NULL, NIB_ERR_ARG, "is NULL");
#define BAD(field, value, status, words)              \
    do {                                              \
        q = default_quantizer();                      \
        q.field = (value);                            \
        check_quantizer(__LINE__, &q, status, words); \
    } while (0)
    BAD(bytes, 0, NIB_ERR_ARG, "quantizer->bytes");
    BAD(bytes, sizeof q - 1, NIB_ERR_ARG, "quantizer->bytes");
    BAD(format, NIB_FORMAT_COUNT, NIB_ERR_ARG, "format 5");
    BAD(format, (nib_format)-1, NIB_ERR_ARG, "format -1");
    BAD(dialect, NIB_DIALECT_COUNT, NIB_ERR_ARG, "dialect 5");
    BAD(dialect, (nib_dialect)-1, NIB_ERR_ARG, "dialect -1");
    BAD(scale_rule, NIB_SCALE_RULE_COUNT, NIB_ERR_ARG, "scale_rule 3");
    BAD(scale_rule, (nib_scale_rule)-1, NIB_ERR_ARG, "scale_rule -1");
    BAD(error_mode, NIB_ERROR_MODE_COUNT, NIB_ERR_ARG, "error_mode 2");
    BAD(tensor_scale_rule, NIB_TENSOR_SCALE_RULE_COUNT, NIB_ERR_ARG, "tensor_scale_rule 3");
    BAD(rounding, NIB_ROUNDING_COUNT, NIB_ERR_ARG, "rounding 4");
    BAD(rounding, (nib_rounding)INT32_MIN, NIB_ERR_ARG, "rounding -2147483648");
    BAD(block_dims[0], 0, NIB_ERR_ARG, "0x16");
    BAD(block_dims[0], 2, NIB_ERR_ARG, "2x16");
    BAD(block_dims[0], INT32_MIN, NIB_ERR_ARG, "x16");
    BAD(block_dims[1], 32, NIB_ERR_ARG, "1x32");
    BAD(e4m3_max, 0, NIB_ERR_ARG, "e4m3_max");
    BAD(e4m3_max, 449, NIB_ERR_ARG, "not 449");
    BAD(origin[0], -1, NIB_ERR_ARG, "origin (-1, 0)");
    BAD(origin[1], INT64_MIN, NIB_ERR_ARG, "origin");
    BAD(min_block_scale, -1, NIB_ERR_ARG, "min_block_scale");
    BAD(min_block_scale, 0.3f, NIB_ERR_ARG, "min_block_scale");
    BAD(min_block_scale, 0x1p-10f, NIB_ERR_ARG, "min_block_scale");
    BAD(min_block_scale, 449, NIB_ERR_ARG, "min_block_scale");
    BAD(min_block_scale, INFINITY, NIB_ERR_ARG, "min_block_scale");
    BAD(min_block_scale, NAN, NIB_ERR_ARG, "min_block_scale");
    BAD(e4m3_max, 256, NIB_ERR_MODE, "four-over-six");
    BAD(no_tensor_scale, 1, NIB_ERR_MODE, "torchao");
    const nib_comm good = *nib_comm_serial();
    nib_comm comm[6] = { good, good, good, good, good, good };
    comm[0].bytes = 0;
    comm[1].bytes--;
    comm[2].allreduce_max_f32 = NULL;
    comm[3].size = 0;
    comm[4].rank = -1;
    comm[5].rank = 1;
    for (int i = 0; i < 6; i++)
        BAD(amax_comm, &comm[i], NIB_ERR_ARG, "amax_comm");
#undef BAD
    struct {
        nib_quantizer q;
        char tail[64];
    } newer = { .q = default_quantizer() };
    newer.q.bytes = sizeof newer;
    CHECK_OK(nib_quantizer_check(&newer.q, NULL)); /* fields that are 0 ask for nothing */
    for (size_t i = 0; i < sizeof newer.tail; i += 9) {
        newer.tail[i] = 1;
        check_quantizer(__LINE__, &newer.q, NIB_ERR_UNSUPPORTED, NIB_VERSION);
        newer.tail[i] = 0;
    }
    CHECK_FAILS(nib_quantizer_set_usage(NULL, 1, 1), NIB_ERR_ARG, "q is NULL");
    CHECK_FAILS(nib_quantizer_set_usage(&newer.q, 2, 1), NIB_ERR_ARG, "2 and 1");
}

TEST(quantizer_checks_inputs)
{
    nib_quantizer q = default_quantizer();
    nib_array x = { .dtype = NIB_F32, .rank = 2, .shape = { 5, 6 } }; /* no memory is looked at */
    CHECK_OK(nib_quantizer_check(&q, &x));
    for (int dtype = -1; dtype <= NIB_DTYPE_COUNT; dtype++) {
        x.dtype = (nib_dtype)dtype;
        if (dtype == NIB_F32 || dtype == NIB_BF16 || dtype == NIB_F16) {
            CHECK_OK(nib_quantizer_check(&q, &x));
        } else {
            CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_DTYPE, "F32, BF16 and F16");
            nib_tensor *out = UNTOUCHED;
            nib_buffer *none[NIB_PART_COUNT] = { NULL };
            CHECK_FAILS(nib_tensor_create(&q, (nib_dtype)dtype, DIMS(4, 4), NULL, &out), NIB_ERR_DTYPE,
                        "F32, BF16 and F16");
            CHECK_FAILS(nib_tensor_from_buffers(&q, (nib_dtype)dtype, DIMS(4, 4), none, NIB_PART_COUNT, &out),
                        NIB_ERR_DTYPE, "F32, BF16 and F16");
            CHECK(out == UNTOUCHED);
        }
    }
    x.dtype = NIB_F32;
    static const struct {
        int rank;
        int64_t shape[8];
        const char *words;
    } bad[] = { { 0, { 0 }, "at least rank 1" },
                { 9, { 0 }, "rank 9" },
                { -1, { 0 }, "rank -1" },
                { 2, { -1, 4 }, "dim 0 is -1" },
                { 2, { INT64_C(1) << 40, INT64_C(1) << 40 }, "too large" },
                { 2, { INT64_MAX, 1 }, "too large" },
                { 3, { 0, INT64_MAX, 16 }, "too large" } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int rank = 99;
        int64_t shape[NIB_MAX_RANK] = { 99 };
        nib_tensor *out = UNTOUCHED;
        nib_buffer *none[NIB_PART_COUNT] = { NULL };
        x.rank = bad[i].rank;
        memcpy(x.shape, bad[i].shape, sizeof x.shape);
        CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_SHAPE, bad[i].words);
        CHECK_FAILS(nib_tensor_create(&q, NIB_F32, bad[i].rank, bad[i].shape, NULL, &out), NIB_ERR_SHAPE, bad[i].words);
        CHECK_FAILS(nib_tensor_from_buffers(&q, NIB_F32, bad[i].rank, bad[i].shape, none, NIB_PART_COUNT, &out),
                    NIB_ERR_SHAPE, bad[i].words);
        CHECK_FAILS(nib_part_shape(&q, NIB_ROW_DATA, bad[i].rank, bad[i].shape, &rank, shape), NIB_ERR_SHAPE,
                    bad[i].words);
        CHECK(out == UNTOUCHED && rank == 99 && shape[0] == 99);
        CHECK(!nib_is_quantizable(&q, bad[i].rank, bad[i].shape));
    }
    x.rank = 2;
    memcpy(x.shape, (int64_t[]){ 17, 16 }, 2 * sizeof(int64_t));
    q.rht = 1;
    CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_SHAPE, "17 rows");
    q.rht = 0;
    q.rht_rowwise = 1;
    CHECK_OK(nib_quantizer_check(&q, &x));
    x.shape[1] = 17;
    CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_SHAPE, "17 columns");
    q = default_quantizer();
    q.rounding = NIB_ROUND_STOCHASTIC_8;
    q.origin[1] = 8;
    CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_SHAPE, "origin (0, 8)");
    q.origin[1] = 0;
    q.origin[0] = INT64_C(1) << 32;
    CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_SHAPE, "2^32 rows");
}

/* What a caller brings along: its size, and fields that this version does not have. */
TEST(overrides)
{
    float x[16] = { 1 }, amax = 3;
    const nib_quantizer q = default_quantizer();
    const nib_array array = array_of(x, NIB_F32, DIMS(16));
    struct {
        nib_overrides overrides;
        char tail[16];
    } newer = { .overrides = { .amax = { &amax, NULL } } };
    nib_tensor *t = some(&q, DIMS(16)), *before = clone_of(t), *out = UNTOUCHED;
    const size_t sizes[] = { 0, 1, sizeof newer.overrides - 1 };
    for (size_t i = 0; i < 3; i++) {
        newer.overrides.bytes = sizes[i];
        CHECK_FAILS(nib_quantize(&q, &array, &newer.overrides, &out), NIB_ERR_ARG, "overrides->bytes");
        CHECK_FAILS(nib_quantize_into(&q, &array, &newer.overrides, NULL, t), NIB_ERR_ARG, "overrides->bytes");
    }
    CHECK(out == UNTOUCHED && equal(t, before));
    newer.overrides.bytes = sizeof newer;
    CHECK_OK(nib_quantize(&q, &array, &newer.overrides, &out));
    nib_tensor_destroy(out);
    out = UNTOUCHED;
    newer.tail[3] = 1; /* something to heed that nobody here knows how to */
    CHECK_FAILS(nib_quantize(&q, &array, &newer.overrides, &out), NIB_ERR_UNSUPPORTED, "");
    CHECK_FAILS(nib_quantize_into(&q, &array, &newer.overrides, NULL, t), NIB_ERR_UNSUPPORTED, "");
    if (out != UNTOUCHED)
        nib_tensor_destroy(out);
    nib_tensor_destroy(before);
    nib_tensor_destroy(t);
}

TEST(a_reduction_that_fails)
{
    const nib_comm comm = { .bytes = sizeof comm, .rank = 1, .size = 3, .allreduce_max_f32 = reject };
    for (int row_scaled = 0; row_scaled < 2; row_scaled++) {
        nib_quantizer q = default_quantizer();
        q.amax_comm = &comm;
        q.row_scaled = (uint8_t)row_scaled;
        static float x[256] = { 1 };
        const nib_array array = array_of(x, NIB_F32, DIMS(16, 16));
        nib_tensor *out = UNTOUCHED;
        CHECK_FAILS(nib_quantize(&q, &array, NULL, &out), NIB_ERR_COMM, "3 ranks failed: NIB_ERR_COMM");
        CHECK(out == UNTOUCHED);
    }
}

TEST_MAIN
