/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quantize.c - what must hold for every quantized tensor, whatever the data: symmetries, error bounds, tensor
 * scales, threads. The exact bytes are the business of the golden files; here each rule is stated a second time, by
 * itself.
 */
#include "test_modes.h"

#include <float.h>
#include <math.h>

#include "tensor/quantize.h"

/* ---- Symmetries ---- */

static nib_array negated(const nib_array *x)
{
    nib_array minus = contiguous_copy(x);
    for (int64_t i = 0; i < elements_in(x->rank, x->shape); i++)
        ((uint8_t *)minus.data)[(i + 1) * element_bytes(x->dtype) - 1] ^= 0x80;
    return minus;
}

/* A sum of a transform that cancels is +0 whichever the signs, so that a zero code says nothing there. */
static void check_mirrored(const nib_tensor *a, const nib_tensor *b, nib_usage which, bool transformed)
{
    const struct usage ca = usage_of(a, which), cb = usage_of(b, which);
    for (int64_t line = 0; line < ca.lines; line++)
        for (int64_t i = 0; i < ca.length; i++) {
            const int code = code_at(&ca, line, i), mirror = code_at(&cb, line, i);
            if (code != (mirror ^ 8) && !(transformed && (code | mirror) % 8 == 0)) {
                CHECK_THAT(false, "%s: line %lld element %lld: %d and %d", where, (long long)line, (long long)i, code,
                           mirror);
                return;
            }
        }
}

static void sign_symmetry(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    const nib_array minus = negated(x);
    nib_tensor *a = quantize(q, x, NULL), *b = quantize(q, &minus, NULL);
    for (int part = NIB_ROW_SCALE; part < NIB_PART_COUNT; part++)
        CHECK_THAT(same_part(a, (nib_part)part, b, (nib_part)part), "%s: part %d", where, part);
    check_mirrored(a, b, NIB_ROWWISE, q->rht_rowwise);
    check_mirrored(a, b, NIB_COLUMNWISE, q->rht);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free(minus.data);
}

TEST(the_sign_of_the_data_is_the_sign_of_the_codes) { for_all(sign_symmetry); }

/* modelopt and compressed-tensors take the sign from x < 0, so that -0 and +0 are both code 0. */
TEST(sign_of_zero_in_the_dialects)
{
    fill_tables();
    const float x[16] = { -0.0f, 0.0f, -6.0f, 6.0f, -1e-9f, 1e-9f };
    const int with_sign[NIB_DIALECT_COUNT] = {
        [NIB_DIALECT_TE] = 8, [NIB_DIALECT_GIST] = 8, [NIB_DIALECT_TORCHAO] = 8
    };
    for (int d = 0; d < NIB_DIALECT_COUNT; d++) {
        nib_quantizer q = mode_of(RTN);
        q.dialect = (nib_dialect)d;
        const nib_array array = matrix_from(x, NIB_F32, 1, 16);
        nib_tensor *t = quantize(&q, &array, NULL);
        const struct usage c = usage_of(t, NIB_ROWWISE);
        CHECK_THAT(code_at(&c, 0, 0) == with_sign[d], "%s: -0 is %d", nib_dialect_name(q.dialect), code_at(&c, 0, 0));
        CHECK(code_at(&c, 0, 1) == 0 && code_at(&c, 0, 2) == 15 && code_at(&c, 0, 3) == 7);
        CHECK(code_at(&c, 0, 4) == 8 && code_at(&c, 0, 5) == 0);
        nib_tensor_destroy(t);
        free(array.data);
    }
}

/* Every formula is homogeneous in the data: a power of two passes through to the tensor scale as long as nothing leaves
 * the range of FP32 (and, for F16, of F16). */
static void scaling_by_two(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    if (kind == TINY || kind == LARGE)
        return;
    const int k = x->dtype == NIB_F16 ? (int)test_below(4) : (int)test_below(30) - 15;
    float *values = floats_of(x);
    for (int64_t i = 0; i < elements_in(x->rank, x->shape); i++)
        values[i] = ldexpf(values[i], k);
    const nib_array scaled = matrix_from(values, x->dtype, x->shape[0], x->shape[1]);
    nib_tensor *a = quantize(q, x, NULL), *b = quantize(q, &scaled, NULL);
    for (int part = 0; part < NIB_ROW_TENSOR_SCALE; part++)
        CHECK_THAT(same_part(a, (nib_part)part, b, (nib_part)part), "%s times 2^%d: part %d", where, k, part);
    for (int which = 0; which < 2; which++) {
        const struct usage ca = usage_of(a, (nib_usage)which), cb = usage_of(b, (nib_usage)which);
        for (int64_t line = 0; line < (ca.per_line ? ca.lines : 1); line++) {
            const float tensor_scale = ca.tensor_scales[line], wanted = ldexpf(tensor_scale, k);
            /* Without data there is no amax to scale: 0 stays, and the decode scale of zeros is 1. */
            CHECK_THAT(cb.tensor_scales[line] == wanted || (tensor_scale == 1 && cb.tensor_scales[line] == 1),
                       "%s times 2^%d: %a", where, k, tensor_scale);
        }
    }
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free(scaled.data);
    free(values);
}

TEST(a_power_of_two_changes_only_the_level) { for_all(scaling_by_two); }

/* With 16x16 blocks both usages hold the same numbers, random ones included. Four-over-six sums its errors along
 * lines, so that the copies may decide differently. */
TEST(square_blocks_give_the_transpose)
{
    fill_tables();
    for (int s = 0; s < COUNT(shapes); s++)
        for (int rounding = 0; rounding < NIB_ROUNDING_COUNT; rounding++)
            for (int d = 0; d < COUNT(dtypes); d++) {
                nib_quantizer q = mode_of(SQUARE);
                q.rounding = (nib_rounding)rounding;
                const nib_array x = random_matrix(HEAVY, dtypes[d], shapes[s][0], shapes[s][1]);
                nib_tensor *t = quantize(&q, &x, NULL);
                const struct usage row = usage_of(t, NIB_ROWWISE), col = usage_of(t, NIB_COLUMNWISE);
                int wrong = row.tensor_scales[0] != col.tensor_scales[0];
                for (int64_t r = 0; r < row.lines; r++)
                    for (int64_t c = 0; c < row.length; c++)
                        wrong += code_at(&row, r, c) != code_at(&col, c, r) ||
                                 scale_at(&row, r, c / 16) != scale_at(&col, c, r / 16);
                CHECK_THAT(wrong == 0, "%lldx%lld rounding %d: %d differ", (long long)shapes[s][0],
                           (long long)shapes[s][1], rounding, wrong);
                nib_tensor_destroy(t);
                free(x.data);
            }
}

/* Columnwise of x is rowwise of its transpose, be that a view or a copy. The random numbers of the two are different
 * by design. */
static void columnwise_is_rowwise_of_transpose(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    if (q->rounding != NIB_ROUND_NEAREST)
        return;
    const nib_array view = transposed_view(x), usage = contiguous_copy(&view);
    nib_tensor *t = quantize(q, x, NULL), *v = quantize(q, &view, NULL), *c = quantize(q, &usage, NULL);
    CHECK_SAME(v, c);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        CHECK_THAT(same_part(t, (nib_part)part, v, (nib_part)(part ^ 1)), "%s: part %d", where, part);
    nib_tensor_destroy(t);
    nib_tensor_destroy(v);
    nib_tensor_destroy(c);
    free(usage.data);
}

TEST(columnwise_of_x_is_rowwise_of_its_transpose) { for_all(columnwise_is_rowwise_of_transpose); }

/* ---- Errors ---- */

/*
 * With F = s * tensor scale / full_scale exact, the element's multiplier is 1/F within 4 roundings (2688/amax, its
 * inverse, times s, its inverse), y within 5; decoding gives code * F within 4 (s * amax, 1/2688, their product, times
 * the code). So |decoded - x| <= F * (half_step + (4 * 6 + 5 * 6.4) U) and 64 U covers it.
 */
static void check_half_step(const nib_quantizer *q, const nib_tensor *t, nib_usage which, const float *x, int64_t cols)
{
    const struct usage c = usage_of(t, which);
    const double slack = 64 * U;
    for (int64_t line = 0; line < c.lines; line++)
        for (int64_t i = 0; i < c.length; i++) {
            if (scale_at(&c, line, i / 16) < 8) /* subnormal: too coarse for any promise */
                continue;
            const double value = which == NIB_ROWWISE ? x[line * cols + i] : x[i * cols + line];
            const double f = factor_at(&c, q, line, i / 16), decoded = e2m1[code_at(&c, line, i)] * f;
            if (!(fabs(decoded - value) <= f * (half_step(value / f) + slack))) {
                CHECK_THAT(false, "%s: copy %d line %lld element %lld: %a became %a, factor %a", where, (int)which,
                           (long long)line, (long long)i, value, decoded, f);
                return;
            }
        }
}

static void half_step_error(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    /* The sweep may clip on purpose, stochastic rounding takes the farther neighbor, and the ends of FP32 clamp. */
    const bool ends = x->dtype != NIB_F16 && (kind == TINY || kind == LARGE);
    if (q->scale_rule == NIB_SCALE_SWEEP || q->rounding != NIB_ROUND_NEAREST || q->rht || q->swizzled || ends)
        return;
    float *values = floats_of(x);
    nib_tensor *t = quantize(q, x, NULL);
    check_half_step(q, t, NIB_ROWWISE, values, x->shape[1]);
    check_half_step(q, t, NIB_COLUMNWISE, values, x->shape[1]);
    nib_tensor_destroy(t);
    free(values);
}

TEST(the_error_is_at_most_half_a_step) { for_all(half_step_error); }

/* A block's largest code is 6 and survives the round trip within BF16's precision, far less than the rounding of E4M3
 * forgives: so scales and codes come out again. TransformerEngine promises the codes for U[0, 1). */
static void check_idempotent(nib_dtype dtype, int64_t rows, int64_t cols, int mode)
{
    nib_quantizer q = mode_of(mode);
    q.columnwise = 0;
    float *x = malloc((size_t)(rows * cols) * sizeof *x);
    for (int64_t i = 0; i < rows * cols; i++)
        x[i] = (float)test_uniform();
    for (int which = 0; which < 2; which++) {
        nib_quantizer_set_usage(&q, which == NIB_ROWWISE, which == NIB_COLUMNWISE);
        const nib_array array = matrix_from(x, dtype, rows, cols), back = contiguous_copy(&array);
        nib_tensor *a = quantize(&q, &array, NULL);
        CHECK_OK(nib_dequantize(a, NIB_EITHER, &back));
        nib_tensor *b = quantize(&q, &back, NULL);
        for (int part = which; part < NIB_ROW_TENSOR_SCALE; part += 2)
            CHECK_THAT(same_part(a, (nib_part)part, b, (nib_part)part), "%lldx%lld %s %s: part %d", (long long)rows,
                       (long long)cols, nib_dtype_name(dtype), mode_names[mode], part);
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
        free(array.data);
        free(back.data);
    }
    free(x);
}

TEST(quantizing_what_was_dequantized_changes_nothing)
{
    const int64_t sizes[][2] = { { 304, 304 }, { 256, 272 }, { 16, 16 }, { 32, 1024 }, { 128, 128 } };
    const int modes[] = { RTN, ROW_SCALED, SQUARE, SWIZZLED, POW2 };
    for (int s = 0; s < COUNT(sizes); s++)
        for (int m = 0; m < COUNT(modes); m++) {
            check_idempotent(NIB_F32, sizes[s][0], sizes[s][1], modes[m]);
            check_idempotent(NIB_BF16, sizes[s][0], sizes[s][1], modes[m]);
        }
}

/* The root of the sum of squared errors of one block of a copy, in double. */
static double block_error(const struct usage *c, double f, const float *x, int64_t cols, nib_usage which, int64_t line,
                          int64_t block)
{
    double sum = 0;
    for (int64_t i = 16 * block; i < 16 * block + 16 && i < c->length; i++) {
        const double value = which == NIB_ROWWISE ? x[line * cols + i] : x[i * cols + line];
        const double d = e2m1[code_at(c, line, i)] * f - value;
        sum += d * d;
    }
    return sqrt(sum);
}

/*
 * The rtn scale is among the sweep's candidates, so its error cannot be smaller. Both errors were found in FP32: each
 * difference is off by at most 5 roundings of a number no larger than B = 12 rtn factors (seven codes up double a
 * scale), so that the root of the sum of 16 squares is off by at most 4 * 5 U B, on both sides, and by 8 roundings of
 * itself: 480 U factors, where 512 are allowed.
 */
TEST(the_sweep_errs_no_more_than_rtn)
{
    fill_tables();
    for (int round = 0; round < 24; round++) {
        const enum kind kind = (enum kind)(round % 3); /* NORMAL, HEAVY, TIES */
        const nib_dtype dtype = dtypes[round / 3 % 3];
        nib_quantizer q = mode_of(round % 2 ? SWEEP : SWEEP_EXACT), plain = q;
        plain.scale_rule = NIB_SCALE_RTN;
        const nib_array array = random_matrix(kind, dtype, 40, 333);
        float *x = floats_of(&array);
        nib_tensor *t = quantize(&q, &array, NULL), *r = quantize(&plain, &array, NULL);
        int better = 0;
        for (int which = 0; which < 2; which++) {
            const struct usage a = usage_of(t, (nib_usage)which), b = usage_of(r, (nib_usage)which);
            for (int64_t line = 0; line < a.lines; line++)
                for (int64_t block = 0; block * 16 < a.length; block++) {
                    const double fa = factor_at(&a, &q, line, block), fb = factor_at(&b, &q, line, block);
                    const double ea = block_error(&a, fa, x, 333, (nib_usage)which, line, block);
                    const double eb = block_error(&b, fb, x, 333, (nib_usage)which, line, block);
                    CHECK_THAT(ea <= eb * (1 + 16 * U) + 64 * U * 8 * fb, "round %d copy %d (%lld, %lld): %a > %a",
                               round, which, (long long)line, (long long)block, ea, eb);
                    better += ea < eb;
                }
        }
        CHECK(better > 100);
        nib_tensor_destroy(t);
        nib_tensor_destroy(r);
        free(x);
        free(array.data);
    }
}

/* With g = 2^-8 and a block maximum of 6 the scale is 256 and elements are coded as they are: on the middle of two
 * codes and just beside it. */
TEST(ties_go_to_the_even_code)
{
    fill_tables();
    const float middles[] = { 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5 };
    for (int d = 0; d < COUNT(dtypes); d++)
        for (int m = 0; m < COUNT(middles); m++) {
            const float beside = dtypes[d] == NIB_F32 ? 0x1p-20f : 0x1p-5f;
            const float x[16] = { 6, middles[m], -middles[m], middles[m] - beside, middles[m] + beside, -6 };
            nib_quantizer q = mode_of(POW2);
            const nib_array array = matrix_from(x, dtypes[d], 1, 16);
            nib_tensor *t = quantize(&q, &array, NULL);
            const struct usage c = usage_of(t, NIB_ROWWISE);
            CHECK(c.tensor_scales[0] == 0x1p-8f && e4m3[scale_at(&c, 0, 0)] == 256);
            for (int i = 0; i < 16; i++)
                CHECK_THAT(code_at(&c, 0, i) == nearest_code(x[i]), "%s: %a is code %d, not %d",
                           nib_dtype_name(dtypes[d]), x[i], code_at(&c, 0, i), nearest_code(x[i]));
            nib_tensor_destroy(t);
            free(array.data);
        }
}

/* Every scale and code of te's plain rule, each line below one rounding. BF16 data meets the middle of two scales
 * often enough for the order of the operations to show: amax * (encode * (1/6)), neither amax / 6 * encode nor amax *
 * (encode / 6). */
TEST(te_by_its_formulas)
{
    fill_tables();
    const int64_t rows = 256, cols = 512;
    const nib_array array = random_matrix(HEAVY, NIB_BF16, rows, cols);
    const nib_quantizer q = mode_of(ROW_SCALED);
    float *x = floats_of(&array);
    nib_tensor *t = quantize(&q, &array, NULL);
    const struct usage c = usage_of(t, NIB_ROWWISE);
    int wrong = 0;
    for (int64_t line = 0; line < rows; line++) {
        const float encode = 2688.0f / c.tensor_scales[line], decode = 1.0f / encode, by = encode * (1.0f / 6.0f);
        for (int64_t block = 0; block < cols / 16; block++) {
            const float *values = x + line * cols + 16 * block;
            float amax = 0;
            for (int i = 0; i < 16; i++)
                amax = fmaxf(amax, fabsf(values[i]));
            const uint8_t scale = e4m3_code(amax * by);
            const float product = e4m3[scale] * decode, multiplier = fminf(1.0f / product, FLT_MAX);
            wrong += scale_at(&c, line, block) != scale;
            for (int i = 0; i < 16; i++)
                wrong += code_at(&c, line, 16 * block + i) != nearest_code(values[i] * multiplier);
        }
    }
    CHECK_THAT(wrong == 0, "%d scales and codes differ", wrong);
    nib_tensor_destroy(t);
    free(x);
    free(array.data);
}

/* The error of a block had it this scale. */
static double error_with_scale(const struct usage *c, const nib_quantizer *q, const float *x, int64_t line,
                               int64_t block, uint8_t scale)
{
    const double f = e4m3[scale] * (double)tensor_scale_at(c, line) / (6.0 * q->e4m3_max);
    double sum = 0;
    for (int64_t i = 16 * block; i < 16 * block + 16 && i < c->length; i++) {
        const double value = x[line * c->length + i], d = fabs(e2m1[nearest_code(value / f)] * f - value);
        sum += q->error_mode == NIB_ERROR_MAE ? d : d * d;
    }
    return sum;
}

/*
 * The block has the scale of one of the two candidates, and no larger an error than with the other. An element near
 * the middle of two codes may go either way here, at a difference of 16 U of its factor; the sums are off by 16
 * additions and by 16 elements of at most 8 roundings of 8 F each.
 */
static void check_four_over_six(const nib_quantizer *q, enum kind kind)
{
    const int64_t rows = 24, cols = 200;
    const nib_array array = random_matrix(kind, NIB_BF16, rows, cols);
    float *x = floats_of(&array);
    nib_tensor *t = quantize(q, &array, NULL);
    const struct usage c = usage_of(t, NIB_ROWWISE);
    int fours = 0, sixes = 0;
    for (int64_t line = 0; line < rows; line++)
        for (int64_t block = 0; block * 16 < cols; block++) {
            float amax = 0;
            for (int64_t i = 16 * block; i < 16 * block + 16 && i < cols; i++)
                amax = fmaxf(amax, fabsf(x[line * cols + i]));
            const float encode = 6.0f * (float)q->e4m3_max / tensor_scale_at(&c, line), base = amax / 6.0f * encode;
            const uint8_t six = e4m3_code(fminf(base, 448)), four = e4m3_code(fminf(base * 1.5f, 448));
            const uint8_t scale = scale_at(&c, line, block);
            CHECK_THAT(scale == six || scale == four, "scale %d is neither %d nor %d", scale, six, four);
            if (scale < 8)
                continue;
            const double f = e4m3[six > four ? six : four] * (double)tensor_scale_at(&c, line) / (6.0 * q->e4m3_max);
            const double slack = q->error_mode == NIB_ERROR_MAE ? 16 * 64 * U * f : 16 * 64 * U * f * 2 * f;
            const double mine = error_with_scale(&c, q, x, line, block, scale);
            CHECK_THAT(mine <= error_with_scale(&c, q, x, line, block, six) * (1 + 32 * U) + slack &&
                           mine <= error_with_scale(&c, q, x, line, block, four) * (1 + 32 * U) + slack,
                       "line %lld block %lld: the other scale errs less", (long long)line, (long long)block);
            fours += scale != six, sixes += scale == six;
        }
    CHECK_THAT(fours > 10 && sixes > 10, "%d blocks to 4, %d to 6", fours, sixes);
    nib_tensor_destroy(t);
    free(x);
    free(array.data);
}

TEST(four_over_six_takes_the_better_of_two)
{
    fill_tables();
    const int modes[] = { FOUR_MAE, FOUR_MSE_256, FOUR_FAST, ROW_SCALED_FOUR };
    for (int m = 0; m < COUNT(modes); m++)
        for (int kind = NORMAL; kind <= HEAVY; kind++) {
            const nib_quantizer q = mode_of(modes[m]);
            check_four_over_six(&q, (enum kind)kind);
        }
}

/* ---- Tensor scales ---- */

/* value = code * (s * g), one rounding each. */
static void check_decoded_by_g(const nib_tensor *t, const struct usage *c, float g, int64_t rows, int64_t cols)
{
    float *y = malloc((size_t)(rows * cols) * sizeof *y);
    nib_array out = { 0 };
    CHECK_OK(nib_array_init(&out, y, NIB_F32, 2, (const int64_t[]){ rows, cols }));
    CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &out));
    for (int64_t i = 0; i < rows * cols; i++) {
        const float f = e4m3[scale_at(c, i / cols, i % cols / 16)] * g,
                    wanted = e2m1[code_at(c, i / cols, i % cols)] * f;
        CHECK_THAT(y[i] == wanted, "%s: element %lld is %a, not %a", where, (long long)i, y[i], wanted);
    }
    free(y);
}

static void check_decode_scale(const nib_array *x, nib_scale_rule rule, int32_t e4m3_max)
{
    nib_quantizer q = mode_of(RTN);
    q.scale_rule = rule, q.e4m3_max = e4m3_max;
    nib_tensor *kept = quantize(&q, x, NULL);
    const float amax = usage_of(kept, NIB_ROWWISE).tensor_scales[0], exact = amax / (6.0f * (float)e4m3_max);
    for (int pow2 = 0; pow2 < 2; pow2++) {
        q.tensor_scale_rule = pow2 ? NIB_TENSOR_SCALE_RULE_POW2 : NIB_TENSOR_SCALE_RULE_EXACT;
        nib_tensor *t = quantize(&q, x, NULL);
        const struct usage c = usage_of(t, NIB_ROWWISE);
        const float g = c.tensor_scales[0];
        int exponent;
        nib_metadata facts = { .bytes = sizeof facts };
        CHECK_OK(nib_tensor_get_metadata(t, &facts));
        CHECK(facts.tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER && usage_of(t, NIB_COLUMNWISE).tensor_scales[0] == g);
        if (amax == 0)
            CHECK_THAT(g == 1, "%s: g of zeros is %a", where, g);
        else if (exact < FLT_MIN)
            CHECK_THAT(g == FLT_MIN, "%s: g is %a", where, g); /* loaders take its reciprocal */
        else if (pow2)
            CHECK_THAT(frexpf(g, &exponent) == 0.5f && g >= exact && g < 2 * exact, "%s: g %a for %a", where, g, exact);
        else
            CHECK_THAT(g == exact, "%s: g is %a, not %a", where, g, exact);
        check_decoded_by_g(t, &c, g, x->shape[0], x->shape[1]);
        nib_tensor_destroy(t);
    }
    nib_tensor_destroy(kept);
}

TEST(decode_scales)
{
    fill_tables();
    for (int kind = 0; kind < KINDS; kind++)
        for (int d = 0; d < COUNT(dtypes); d++) {
            const nib_array x = random_matrix((enum kind)kind, dtypes[d], 23, 70);
            snprintf(where, sizeof where, "%s %s", kind_names[kind], nib_dtype_name(dtypes[d]));
            check_decode_scale(&x, NIB_SCALE_RTN, 448);
            check_decode_scale(&x, NIB_SCALE_SWEEP, 448);
            check_decode_scale(&x, NIB_SCALE_4OVER6, 256);
            free(x.data);
        }
    float zeros[32] = { 0 };
    nib_array x = { 0 };
    CHECK_OK(nib_array_init(&x, zeros, NIB_F32, 2, (const int64_t[]){ 2, 16 }));
    snprintf(where, sizeof where, "zeros only");
    check_decode_scale(&x, NIB_SCALE_RTN, 448);
}

TEST(min_block_scale_is_a_floor)
{
    fill_tables();
    const float floors[] = { 0x1p-9f, 0x1p-6f, 0.875f, 448 };
    const int modes[] = { RTN, FOUR_MAE, SWEEP, SQUARE, SR_24, SR_UNBIASED, ROW_SCALED };
    for (int f = 0; f < COUNT(floors); f++)
        for (int m = 0; m < COUNT(modes); m++) {
            nib_quantizer q = mode_of(modes[m]);
            q.min_block_scale = floors[f];
            const nib_array x = random_matrix(ZEROS, NIB_F32, 24, 90);
            nib_tensor *t = quantize(&q, &x, NULL);
            int at_floor = 0;
            for (int which = 0; which < 2; which++) {
                const struct usage c = usage_of(t, (nib_usage)which);
                for (int64_t line = 0; line < c.lines; line++)
                    for (int64_t block = 0; block < (c.length + 15) / 16; block++) {
                        const float s = e4m3[scale_at(&c, line, block)];
                        CHECK_THAT(s >= floors[f], "%s: scale %a under the floor %a", mode_names[modes[m]], s,
                                   floors[f]);
                        at_floor += s == floors[f];
                    }
            }
            CHECK(at_floor > 0);
            nib_tensor_destroy(t);
            free(x.data);
        }
}

/* ---- Threads ---- */

TEST(bytes_do_not_depend_on_the_thread_count)
{
    const int64_t cols = 512, rows = 7 * NIB_ELEMENTS_PER_THREAD / cols; /* seven threads get work */
    for (int mode = 0; mode < MODES; mode++)
        for (int odd = 0; odd < 2; odd++) {
            nib_quantizer q = mode_of(mode);
            if (odd && q.rht)
                continue;
            nib_array x = random_matrix(HEAVY, dtypes[mode % 3], rows + 3 * odd, cols + 5 * odd);
            snprintf(where, sizeof where, "%s, odd %d", mode_names[mode], odd);
            x.device = host_of(1);
            nib_tensor *one = quantize(&q, &x, NULL);
            x.device = host_of(7);
            nib_tensor *seven = quantize(&q, &x, NULL);
            x.device = host_of(0);
            nib_tensor *some = quantize(&q, &x, NULL);
            CHECK_SAME(one, seven);
            CHECK_SAME(one, some);
            nib_tensor_destroy(one);
            nib_tensor_destroy(seven);
            nib_tensor_destroy(some);
            free(x.data);
        }
}

/* ---- Numbers that are none, and tensors without any ---- */

/* NaNs do not count in amaxes and become +6; the rest of their block is as if they were 0. */
TEST(nan_becomes_six)
{
    const int64_t rows = 20, cols = 70;
    for (int mode = 0; mode < MODES; mode++) {
        const nib_quantizer q = mode_of(mode);
        if (q.rht || q.swizzled || q.scale_rule != NIB_SCALE_RTN)
            continue;
        nib_array with = random_matrix(NORMAL, NIB_F32, rows, cols), without = contiguous_copy(&with);
        for (int64_t i = 0; i < rows * cols; i += 29) {
            ((float *)with.data)[i] = i % 2 ? NAN : -NAN;
            ((float *)without.data)[i] = 0;
        }
        nib_tensor *a = quantize(&q, &with, NULL), *b = quantize(&q, &without, NULL);
        int wrong = 0;
        for (int part = NIB_ROW_SCALE; part < NIB_PART_COUNT; part++)
            wrong += !same_part(a, (nib_part)part, b, (nib_part)part);
        for (int which = 0; which < 2; which++) {
            const struct usage ca = usage_of(a, (nib_usage)which), cb = usage_of(b, (nib_usage)which);
            for (int64_t i = 0; i < rows * cols; i++) {
                const int64_t line = which ? i % cols : i / cols, at = which ? i / cols : i % cols;
                wrong += code_at(&ca, line, at) != (i % 29 ? code_at(&cb, line, at) : 7);
            }
        }
        CHECK_THAT(wrong == 0, "%s: %d differ", mode_names[mode], wrong);
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
        free(with.data);
        free(without.data);
    }
}

/* An infinite amax encodes as 1; the block that holds it has the largest scale and the others lose nothing. */
TEST(infinity_leaves_other_blocks_alone)
{
    fill_tables();
    nib_array x = random_matrix(NORMAL, NIB_F32, 4, 64);
    float *values = x.data;
    values[5] = INFINITY, values[64 + 20] = -INFINITY;
    const nib_quantizer q = mode_of(RTN);
    nib_tensor *t = quantize(&q, &x, NULL);
    const struct usage c = usage_of(t, NIB_ROWWISE);
    CHECK(isinf(c.tensor_scales[0]));
    CHECK(code_at(&c, 0, 5) == 7 && code_at(&c, 1, 20) == 15);
    CHECK(scale_at(&c, 0, 0) == 0x7E && scale_at(&c, 1, 1) == 0x7E);
    for (int64_t line = 2; line < 4; line++)
        for (int64_t i = 0; i < 64; i++) {
            float amax = 0;
            for (int64_t j = i / 16 * 16; j < i / 16 * 16 + 16; j++)
                amax = fmaxf(amax, fabsf(values[line * 64 + j]));
            const uint8_t scale = e4m3_code(amax * (1.0f / 6.0f));
            CHECK(scale_at(&c, line, i / 16) == scale);
            CHECK(code_at(&c, line, i) == nearest_code(values[line * 64 + i] * (1 / e4m3[scale])));
        }
    nib_tensor_destroy(t);
    free(x.data);
}

/* Whatever the bits of the input, no option fails. */
TEST(any_bits_are_taken)
{
    for (int round = 0; round < 3; round++)
        for (int mode = 0; mode < MODES; mode++)
            for (int d = 0; d < COUNT(dtypes); d++) {
                const nib_quantizer q = mode_of(mode);
                nib_array x = random_matrix(NORMAL, dtypes[d], 32, 48);
                for (size_t i = 0; i < x.bytes; i++)
                    ((uint8_t *)x.data)[i] = (uint8_t)test_random();
                nib_tensor *t = quantize(&q, &x, NULL);
                const nib_array out = contiguous_copy(&x);
                CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &out));
                CHECK_OK(nib_dequantize(t, NIB_COLUMNWISE, &out));
                nib_tensor_destroy(t);
                free(x.data);
                free(out.data);
            }
}

TEST(tensors_without_elements)
{
    const struct {
        int rank;
        int64_t shape[3];
    } empty[] = { { 2, { 0, 16 } },    { 2, { 16, 0 } }, { 1, { 0 } },
                  { 3, { 4, 0, 32 } }, { 2, { 0, 0 } },  { 3, { 0, 7, 5 } } };
    for (int i = 0; i < COUNT(empty); i++)
        for (int mode = 0; mode < MODES; mode++) {
            const nib_quantizer q = mode_of(mode);
            nib_array x = { 0 }, out = { 0 };
            CHECK_OK(nib_array_init(&x, NULL, NIB_F32, empty[i].rank, empty[i].shape));
            int64_t rows = 1;
            for (int j = 0; j < empty[i].rank - 1; j++)
                rows *= empty[i].shape[j];
            if (!supports(&q, rows, empty[i].shape[empty[i].rank - 1]))
                continue;
            nib_tensor *t = quantize(&q, &x, NULL);
            CHECK_OK(nib_array_init(&out, NULL, NIB_BF16, empty[i].rank, empty[i].shape));
            CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &out));
            CHECK_OK(nib_dequantize(t, NIB_COLUMNWISE, &out));
            const nib_buffer *tensor_scale = nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE);
            for (size_t j = 0; j < nib_buffer_bytes(tensor_scale) / sizeof(float); j++) {
                const float wanted = q.tensor_scale_rule == NIB_TENSOR_SCALE_RULE_DIALECT ? 0 : 1;
                CHECK_THAT(((const float *)nib_buffer_data(tensor_scale))[j] == wanted, "%s: tensor scale",
                           mode_names[mode]);
            }
            nib_tensor_destroy(t);
        }
}

TEST_MAIN
