/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quantize_overrides.c - amaxes and tensor scales that the caller brings, and those reduced over ranks.
 */
#include "test_modes.h"

/* ---- Given numbers ---- */

static nib_overrides given_amax(const float *row, const float *col)
{
    return (nib_overrides){ .bytes = sizeof(nib_overrides), .amax = { row, col } };
}

static nib_overrides given_tensor_scale(const float *row, const float *col)
{
    return (nib_overrides){ .bytes = sizeof(nib_overrides), .tensor_scale = { row, col } };
}

/* The found amax, given back, changes nothing; nor does the tensor scale that came of it. */
static void given_as_found(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    nib_tensor *found = quantize(q, x, NULL);
    const float *row = (const void *)bytes_of(found, NIB_ROW_TENSOR_SCALE),
                *col = (const void *)bytes_of(found, NIB_COL_TENSOR_SCALE);
    const nib_overrides tensor_scale = given_tensor_scale(row, col);
    nib_tensor *again = quantize(q, x, &tensor_scale);
    CHECK_SAME(found, again);
    nib_tensor_destroy(again);
    if (q->tensor_scale_rule == NIB_TENSOR_SCALE_RULE_DIALECT && q->rounding != NIB_ROUND_STOCHASTIC_UNBIASED) {
        const nib_overrides amax = given_amax(row, col);
        again = quantize(q, x, &amax);
        CHECK_SAME(found, again);
        nib_tensor_destroy(again);
    }
    if (!q->row_scaled && !q->rht) { /* one number serves both */
        const nib_overrides one = test_below(2) ? given_tensor_scale(row, NULL) : given_tensor_scale(NULL, col);
        again = quantize(q, x, &one);
        CHECK_SAME(found, again);
        nib_tensor_destroy(again);
    }
    nib_tensor_destroy(found);
}

TEST(the_found_number_given_back) { for_all(given_as_found); }

/* Quantizing with an amax that is given is quantizing a tensor with one more element of that size. */
TEST(a_given_amax_stands_for_absent_data)
{
    const int64_t rows = 32, cols = 64;
    for (int mode = 0; mode < MODES; mode++) {
        const nib_quantizer q = mode_of(mode);
        if (q.row_scaled || q.rht)
            continue;
        const nib_array more = random_matrix(NORMAL, NIB_F32, rows + 16, cols);
        ((float *)more.data)[rows * cols] = 99;
        nib_array x = more;
        x.shape[0] = rows;
        const float amax = 99;
        const nib_overrides overrides = test_below(2) ? given_amax(&amax, NULL) : given_amax(NULL, &amax);
        nib_tensor *whole = quantize(&q, &more, NULL), *part = quantize(&q, &x, &overrides);
        snprintf(where, sizeof where, "%s", mode_names[mode]);
        CHECK_BYTES(bytes_of(whole, NIB_ROW_DATA), bytes_of(part, NIB_ROW_DATA), rows * cols / 2);
        CHECK_THAT(same_part(whole, NIB_ROW_TENSOR_SCALE, part, NIB_ROW_TENSOR_SCALE), "%s: row tensor scale", where);
        CHECK_THAT(same_part(whole, NIB_COL_TENSOR_SCALE, part, NIB_COL_TENSOR_SCALE), "%s: column tensor scale",
                   where);
        nib_tensor_destroy(whole);
        nib_tensor_destroy(part);
        free(more.data);
    }
}

TEST(a_given_level_is_kept_as_it_is)
{
    fill_tables();
    const float tensor_scales[] = { 3.7f, 0.001f, 12345.6f };
    for (int d = 0; d < NIB_DIALECT_COUNT; d++)
        for (int i = 0; i < COUNT(tensor_scales); i++) {
            nib_quantizer q = mode_of(RTN);
            q.dialect = (nib_dialect)d;
            const nib_array x = random_matrix(NORMAL, NIB_F32, 20, 40);
            const nib_overrides overrides = given_tensor_scale(&tensor_scales[i], NULL);
            nib_tensor *t = quantize(&q, &x, &overrides);
            CHECK(usage_of(t, NIB_ROWWISE).tensor_scales[0] == tensor_scales[i] &&
                  usage_of(t, NIB_COLUMNWISE).tensor_scales[0] == tensor_scales[i]);
            nib_tensor_destroy(t);
            free(x.data);
        }
    /* Unbiased rounding enlarges amaxes, a given one too, but not a finished tensor scale. */
    nib_quantizer q = mode_of(SR_UNBIASED);
    const nib_array x = random_matrix(NORMAL, NIB_F32, 16, 16);
    const float number_given = 16;
    const nib_overrides amax = given_amax(&number_given, NULL), tensor_scale = given_tensor_scale(&number_given, NULL);
    nib_tensor *a = quantize(&q, &x, &amax), *b = quantize(&q, &x, &tensor_scale);
    CHECK(usage_of(a, NIB_ROWWISE).tensor_scales[0] == 17 && usage_of(b, NIB_ROWWISE).tensor_scales[0] == 16);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free(x.data);
}

/* gist's own formulas with the caller's global scale: s = e4m3(amax / 6 * g), code = e2m1(x * (g / s)). */
TEST(gist_with_the_callers_global_scale)
{
    fill_tables();
    nib_quantizer q = mode_of(RTN);
    q.dialect = NIB_DIALECT_GIST;
    const float g = 448 * 6 / 7.3f;
    const nib_overrides overrides = given_tensor_scale(&g, NULL);
    const nib_array x = random_matrix(NORMAL, NIB_F32, 20, 50);
    const float *values = x.data;
    nib_tensor *t = quantize(&q, &x, &overrides);
    const struct usage c = usage_of(t, NIB_ROWWISE);
    for (int64_t line = 0; line < 20; line++)
        for (int64_t i = 0; i < 50; i++) {
            float amax = 0;
            for (int64_t j = i / 16 * 16; j < 50 && j < i / 16 * 16 + 16; j++)
                amax = fmaxf(amax, fabsf(values[line * 50 + j]));
            const uint8_t scale = e4m3_code(amax / 6.0f * g);
            CHECK(scale_at(&c, line, i / 16) == scale);
            CHECK(code_at(&c, line, i) == nearest_code(values[line * 50 + i] * (g / e4m3[scale])));
        }
    nib_tensor_destroy(t);
    free(x.data);
}

/* Each line of a row-scaled copy is a tensor of its own. */
TEST(row_scaled_lines_are_tensors_of_their_own)
{
    const int64_t rows = 23, cols = 50;
    const nib_array x = random_matrix(HEAVY, NIB_F32, rows, cols);
    nib_quantizer q = mode_of(ROW_SCALED), plain = mode_of(RTN);
    nib_tensor *t = quantize(&q, &x, NULL);
    for (int which = 0; which < 2; which++) {
        const nib_array view = which ? transposed_view(&x) : x, matrix = contiguous_copy(&view);
        const struct usage c = usage_of(t, (nib_usage)which);
        for (int64_t line = 0; line < c.lines; line++) {
            nib_array one = matrix;
            one.shape[0] = 1, one.offset = (size_t)(line * c.length) * sizeof(float);
            nib_tensor *alone = quantize(&plain, &one, NULL);
            const struct usage a = usage_of(alone, NIB_ROWWISE);
            CHECK(a.tensor_scales[0] == c.tensor_scales[line]);
            CHECK_BYTES(a.codes, c.codes + line * c.code_stride, c.code_stride);
            CHECK_BYTES(a.scales, c.scales + line * c.scale_stride, c.scale_stride);
            nib_tensor_destroy(alone);
        }
        free(matrix.data);
    }
    nib_tensor_destroy(t);
    free(x.data);
}

/* Row-scaled vectors must be given for each usage: one does not serve the other. */
TEST(row_scaled_vectors_are_given_per_copy)
{
    const int64_t rows = 32, cols = 32;
    const nib_array x = random_matrix(NORMAL, NIB_F32, rows, cols);
    const nib_quantizer q = mode_of(ROW_SCALED);
    float large[32];
    for (int i = 0; i < 32; i++)
        large[i] = 100 + (float)i;
    nib_tensor *found = quantize(&q, &x, NULL);
    const nib_overrides overrides = given_amax(large, NULL);
    nib_tensor *t = quantize(&q, &x, &overrides);
    CHECK_BYTES(bytes_of(t, NIB_ROW_TENSOR_SCALE), large, sizeof large);
    CHECK(same_part(t, NIB_COL_TENSOR_SCALE, found, NIB_COL_TENSOR_SCALE) &&
          same_part(t, NIB_COL_DATA, found, NIB_COL_DATA));
    nib_tensor_destroy(t);
    nib_tensor_destroy(found);
    free(x.data);
}

/* A number that is negative is a mistake; a negative zero is a zero. */
TEST(given_numbers_are_not_negative)
{
    static const float bad[] = { -1, -1e-45f, -INFINITY };
    const nib_array x = random_matrix(NORMAL, NIB_F32, 2, 16);
    const nib_quantizer q = mode_of(RTN);
    nib_tensor *t = NULL;
    for (int i = 0; i < COUNT(bad); i++) {
        const nib_overrides amax = given_amax(&bad[i], NULL), tensor_scale = given_tensor_scale(NULL, &bad[i]);
        CHECK_FAILS(nib_quantize(&q, &x, &amax, &t), NIB_ERR_ARG, "rowwise amax 0 is negative");
        CHECK_FAILS(nib_quantize(&q, &x, &tensor_scale, &t), NIB_ERR_ARG, "columnwise tensor scale 0 is negative");
    }
    CHECK(!t);
    const float zeros[] = { 0, -0.0f };
    for (int kind = 0; kind < 2; kind++) {
        const nib_overrides plus = kind ? given_tensor_scale(&zeros[0], NULL) : given_amax(&zeros[0], NULL),
                            minus = kind ? given_tensor_scale(&zeros[1], NULL) : given_amax(&zeros[1], NULL);
        nib_tensor *a = quantize(&q, &x, &plus), *b = quantize(&q, &x, &minus);
        CHECK(same_part(a, NIB_ROW_DATA, b, NIB_ROW_DATA) && same_part(a, NIB_ROW_SCALE, b, NIB_ROW_SCALE));
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
    free(x.data);
}

TEST(given_must_say_its_size)
{
    const nib_array x = random_matrix(NORMAL, NIB_F32, 2, 16);
    const nib_quantizer q = mode_of(RTN);
    const nib_overrides overrides = { .bytes = 3 };
    nib_tensor *t = NULL;
    CHECK_FAILS(nib_quantize(&q, &x, &overrides, &t), NIB_ERR_ARG, "bytes");
    CHECK(!t);
    free(x.data);
}

/* ---- Communicators ---- */

/* The other of two ranks, whose numbers are known. */
struct peer {
    const float *inputs;
    int calls;
    size_t n;
    nib_status answer;
};

static nib_status peer_max(void *context, float *values, size_t n)
{
    struct peer *peer = context;
    peer->calls++;
    peer->n = n;
    for (size_t i = 0; i < n && !peer->answer; i++)
        values[i] = fmaxf(values[i], peer->inputs[i]);
    return peer->answer;
}

static nib_comm comm_of(struct peer *peer)
{
    return (
        nib_comm){ .bytes = sizeof(nib_comm), .context = peer, .rank = 0, .size = 2, .allreduce_max_f32 = peer_max };
}

/* Both copies in one call; the result is that of a given amax which is the larger one. */
TEST(amaxes_are_reduced_once)
{
    const int64_t rows = 48, cols = 32;
    const nib_array x = random_matrix(HEAVY, NIB_BF16, rows, cols);
    for (int mode = 0; mode < MODES; mode++) {
        nib_quantizer q = mode_of(mode), plain = q;
        float inputs[80], wanted[80];
        struct peer peer = { .inputs = inputs };
        const nib_comm comm = comm_of(&peer);
        const size_t n = q.row_scaled ? (size_t)(rows + cols) : 2;
        for (size_t i = 0; i < n; i++)
            inputs[i] = q.row_scaled ? fabsf(number(HEAVY, NIB_BF16)) : 1000;
        plain.rounding = NIB_ROUND_NEAREST, plain.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_DIALECT;
        nib_tensor *own = quantize(&plain, &x, NULL); /* its tensor scales are the amaxes */
        const size_t rows_n = q.row_scaled ? (size_t)rows : 1;
        for (size_t i = 0; i < n; i++)
            wanted[i] = fmaxf(inputs[i], i < rows_n ? usage_of(own, NIB_ROWWISE).tensor_scales[i]
                                                    : usage_of(own, NIB_COLUMNWISE).tensor_scales[i - rows_n]);
        const nib_overrides overrides = given_amax(wanted, wanted + rows_n);
        nib_tensor *expected = quantize(&q, &x, &overrides);
        q.amax_comm = &comm;
        nib_tensor *t = quantize(&q, &x, NULL);
        snprintf(where, sizeof where, "%s", mode_names[mode]);
        CHECK_SAME(t, expected);
        CHECK_THAT(peer.calls == 1 && peer.n == n, "%s: %d calls, the last of %zu", where, peer.calls, peer.n);
        nib_metadata facts = { .bytes = sizeof facts };
        CHECK_OK(nib_tensor_get_metadata(t, &facts));
        CHECK(!facts.quantizer->amax_comm);
        nib_tensor_destroy(t);

        const nib_overrides small = given_amax(wanted, NULL); /* still reduced */
        peer = (struct peer){ .inputs = wanted };
        t = quantize(&q, &x, &small);
        CHECK_SAME(t, expected);
        CHECK(peer.calls == 1);
        nib_tensor_destroy(t);

        const nib_overrides tensor_scale =
            given_tensor_scale((const void *)bytes_of(expected, NIB_ROW_TENSOR_SCALE),
                               (const void *)bytes_of(expected, NIB_COL_TENSOR_SCALE)); /* finished: not reduced */
        peer = (struct peer){ .inputs = inputs };
        t = quantize(&q, &x, &tensor_scale);
        CHECK_SAME(t, expected);
        CHECK_THAT(peer.calls == 0, "%s: %d calls although the tensor scales are finished", where, peer.calls);
        nib_tensor_destroy(t);
        nib_tensor_destroy(own);
        nib_tensor_destroy(expected);
    }
    free(x.data);
}

TEST(a_failed_reduction_leaves_the_tensor_alone)
{
    const nib_array x = random_matrix(NORMAL, NIB_F32, 32, 48), other = random_matrix(NORMAL, NIB_F32, 32, 48);
    for (int mode = 0; mode < MODES; mode++) {
        nib_quantizer q = mode_of(mode);
        nib_tensor *t = quantize(&q, &x, NULL), *before = NULL, *none = NULL;
        CHECK_OK(nib_tensor_clone(t, &before));
        struct peer peer = { .answer = NIB_ERR_IO };
        const nib_comm comm = comm_of(&peer);
        q.amax_comm = &comm;
        CHECK_FAILS(nib_quantize_into(&q, &other, NULL, NULL, t), NIB_ERR_COMM, "over 2 ranks failed: NIB_ERR_IO");
        CHECK_FAILS(nib_quantize(&q, &other, NULL, &none), NIB_ERR_COMM, "failed");
        CHECK(!none && peer.calls == 2);
        snprintf(where, sizeof where, "%s", mode_names[mode]);
        CHECK_SAME(t, before);
        nib_tensor_destroy(t);
        nib_tensor_destroy(before);
    }
    free(x.data);
    free(other.data);
}

TEST(the_serial_communicator_changes_nothing)
{
    const nib_array x = random_matrix(NORMAL, NIB_F32, 32, 48);
    nib_quantizer q = mode_of(RTN);
    nib_tensor *a = quantize(&q, &x, NULL);
    q.amax_comm = nib_comm_serial();
    nib_tensor *b = quantize(&q, &x, NULL);
    snprintf(where, sizeof where, "serial");
    CHECK_SAME(a, b);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free(x.data);
}

TEST(noop_is_exactly_one)
{
    const nib_array x = random_matrix(NORMAL, NIB_F32, 32, 48), other = random_matrix(NORMAL, NIB_F32, 32, 48);
    const nib_quantizer q = mode_of(RTN);
    nib_tensor *t = quantize(&q, &x, NULL), *before = quantize(&q, &x, NULL), *after = quantize(&q, &other, NULL);
    CHECK_OK(nib_quantize_into(&q, &other, NULL, &(float){ 1 }, t));
    snprintf(where, sizeof where, "noop");
    CHECK_SAME(t, before);
    CHECK_OK(nib_quantize_into(&q, &other, NULL, &(float){ nextafterf(1, 2) }, t));
    CHECK_SAME(t, after);
    nib_tensor_destroy(t);
    nib_tensor_destroy(before);
    nib_tensor_destroy(after);
    free(x.data);
    free(other.data);
}

/* ---- Without a tensor ---- */

/* Fake quantization is quantize and dequantize; into another array, and in place. */
static void fake_as_both(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    nib_tensor *t = quantize(q, x, NULL);
    nib_array y = contiguous_copy(x), expected = contiguous_copy(x);
    for (int usage = 0; usage < 2; usage++) {
        nib_quantizer other = *q;
        other.rowwise = other.columnwise = (uint8_t)test_below(2); /* does not matter */
        CHECK_OK(nib_dequantize(t, (nib_usage)usage, &expected));
        memset(y.data, 0x5A, y.bytes);
        CHECK_OK(nib_fake_quantize(&other, x, NULL, (nib_usage)usage, &y));
        CHECK_THAT(memcmp(y.data, expected.data, y.bytes) == 0, "%s: fake quantization of usage %d", where, usage);
        memcpy(y.data, x->data, y.bytes);
        CHECK_OK(nib_fake_quantize(q, &y, NULL, (nib_usage)usage, &y));
        CHECK_THAT(memcmp(y.data, expected.data, y.bytes) == 0, "%s: in place, usage %d", where, usage);
    }
    nib_tensor_destroy(t);
    free(y.data);
    free(expected.data);
}

TEST(fake_quantization) { for_all(fake_as_both); }

TEST(fake_quantization_of_nothing)
{
    const nib_array no_rows = array_of(NULL, NIB_F32, DIMS(0, 32)), no_cols = array_of(NULL, NIB_F32, DIMS(32, 0));
    for (int mode = 0; mode < MODES; mode++)
        for (int usage = 0; usage < 2; usage++) {
            const nib_quantizer q = mode_of(mode);
            CHECK_OK(nib_fake_quantize(&q, &no_rows, NULL, (nib_usage)usage, &no_rows));
            CHECK_OK(nib_fake_quantize(&q, &no_cols, NULL, (nib_usage)usage, &no_cols));
        }
}

TEST(fake_quantization_that_is_rejected)
{
    const nib_array x = random_matrix(NORMAL, NIB_F32, 16, 32), half = random_matrix(NORMAL, NIB_BF16, 16, 32),
                    wide = random_matrix(NORMAL, NIB_F32, 32, 16);
    nib_quantizer q = mode_of(RTN);
    const nib_array before = contiguous_copy(&wide);
    CHECK_FAILS(nib_fake_quantize(&q, &x, NULL, NIB_EITHER, &x), NIB_ERR_ARG, "not of 2");
    CHECK_FAILS(nib_fake_quantize(&q, &x, NULL, NIB_ROWWISE, &half), NIB_ERR_MISMATCH, "dtype or shape");
    CHECK_FAILS(nib_fake_quantize(&q, &x, NULL, NIB_ROWWISE, &wide), NIB_ERR_MISMATCH, "dtype or shape");
    CHECK_FAILS(nib_fake_quantize(&q, &x, NULL, NIB_ROWWISE, NULL), NIB_ERR_ARG, "out");
    CHECK_FAILS(nib_fake_quantize(&q, NULL, NULL, NIB_ROWWISE, &x), NIB_ERR_ARG, "x");
    q.rht = 1, q.block_dims[0] = 16;
    CHECK_FAILS(nib_fake_quantize(&q, &wide, NULL, NIB_ROWWISE, &wide), NIB_ERR_MODE, "16x16");
    CHECK_BYTES(before.data, wide.data, wide.bytes);
    free(x.data), free(half.data), free(wide.data), free(before.data);
}

/* What quantizing looks for: its tensor scale, where that is an amax as it is. */
static void amaxes_as_found(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    if (q->tensor_scale_rule != NIB_TENSOR_SCALE_RULE_DIALECT || q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED)
        return;
    nib_tensor *t = quantize(q, x, NULL);
    static float amax[2][8192];
    const size_t bytes[2] = { nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE)),
                              nib_buffer_bytes(nib_tensor_buffer(t, NIB_COL_TENSOR_SCALE)) };
    memset(amax, 0x5A, sizeof amax);
    CHECK_OK(nib_amax(q, x, (float *const[2]){ amax[0], amax[1] }));
    CHECK_BYTES(amax[0], bytes_of(t, NIB_ROW_TENSOR_SCALE), bytes[0]);
    CHECK_BYTES(amax[1], bytes_of(t, NIB_COL_TENSOR_SCALE), bytes[1]);
    memset(amax, 0x5A, sizeof amax);
    CHECK_OK(nib_amax(q, x, (float *const[2]){ NULL, amax[1] }));
    CHECK_BYTES(amax[1], bytes_of(t, NIB_COL_TENSOR_SCALE), bytes[1]);
    nib_tensor_destroy(t);
}

TEST(amaxes_alone)
{
    for_all(amaxes_as_found);
    nib_quantizer q;
    float amax[2] = { 7, 7 };
    const nib_array x = random_matrix(NORMAL, NIB_F32, 16, 32);
    CHECK_OK(nib_quantizer_init_format(&q, NIB_MXFP8));
    CHECK_FAILS(nib_amax(&q, &x, (float *const[2]){ amax, amax + 1 }), NIB_ERR_MODE, "no amax per tensor");
    CHECK_FAILS(nib_amax(&q, &x, NULL), NIB_ERR_ARG, "amax is NULL");
    CHECK(amax[0] == 7 && amax[1] == 7);
    free(x.data);
}

/* The offset that a caller brings replaces the quantizer's, and is not kept. */
TEST(a_given_offset)
{
    const nib_array x = random_matrix(NORMAL, NIB_BF16, 48, 80);
    nib_quantizer q = mode_of(SR_8), other = q;
    const uint64_t offset = 12345678901234u;
    const nib_overrides overrides = { .bytes = sizeof overrides, .offset = &offset };
    other.offset = offset;
    nib_tensor *given = quantize(&q, &x, &overrides), *wanted = quantize(&other, &x, NULL), *plain = quantize(&q, &x, NULL);
    CHECK_SAME(given, wanted);
    CHECK(!same_tensor(given, plain));
    nib_metadata m = { .bytes = sizeof m };
    CHECK_OK(nib_tensor_get_metadata(given, &m));
    CHECK(m.quantizer->offset == q.offset);
    nib_array y = contiguous_copy(&x), expected = contiguous_copy(&x);
    CHECK_OK(nib_fake_quantize(&q, &x, &overrides, NIB_COLUMNWISE, &y));
    CHECK_OK(nib_dequantize(wanted, NIB_COLUMNWISE, &expected));
    CHECK_BYTES(y.data, expected.data, y.bytes);
    nib_tensor_destroy(given), nib_tensor_destroy(wanted), nib_tensor_destroy(plain);
    free(x.data), free(y.data), free(expected.data);
}

TEST_MAIN
