/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quantize.c - what must hold for every quantized tensor, whatever the data: symmetries, error bounds, layouts,
 * given numbers, rejections. The exact bytes are the business of the golden files; here each rule is stated a second
 * time, by itself.
 */
#define _GNU_SOURCE
#include "test_codes.h"

#include <float.h>
#include <math.h>

#include "tensor/quantize.h"

/* What the loops are at, for the messages. */
static char where[256];

/* ---- Data ---- */

enum kind { NORMAL, HEAVY, TIES, TINY, ZEROS, LARGE, KINDS };
static const char *const kind_names[] = { "normal", "heavy", "ties", "tiny", "zeros", "large" };
static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };

/* Numbers that every dtype can hold without overflow; TINY are subnormal in the dtype, LARGE near its end. */
static float number(enum kind kind, nib_dtype dtype)
{
    static const float ties[] = { 0, .25f, .5f, .75f, 1, 1.25f, 1.5f, 1.75f, 2, 2.5f, 3, 3.5f, 4, 5, 6, 6 };
    const float normal = test_normal();
    switch (kind) {
    case HEAVY:
        return ldexpf(normal, (int)test_below(20) - 12);
    case TIES:
        return normal < 0 ? -ties[test_below(16)] : ties[test_below(16)];
    case TINY:
        return ldexpf(normal, dtype == NIB_F16 ? -18 : -130);
    case ZEROS:
        return test_below(8) ? copysignf(0, normal) : normal;
    case LARGE:
        return normal / 6 * (dtype == NIB_F16 ? 60000.0f : 0x1p127f);
    default:
        return normal;
    }
}

static int element_bytes(nib_dtype dtype) { return nib_dtype_bits(dtype) / 8; }

/* A contiguous array in memory of its own: free(array.data). */
static nib_array array_from(const float *x, nib_dtype dtype, int rank, const int64_t *shape)
{
    int64_t n = 1;
    for (int i = 0; i < rank; i++)
        n *= shape[i];
    nib_array array = { 0 };
    void *memory = malloc((size_t)(n * element_bytes(dtype) + 1));
    CHECK_OK(nib_encode(dtype, x, (size_t)n, memory));
    CHECK_OK(nib_array_init(&array, memory, dtype, rank, shape));
    return array;
}

static nib_array matrix_from(const float *x, nib_dtype dtype, int64_t rows, int64_t cols)
{
    return array_from(x, dtype, 2, (const int64_t[]){ rows, cols });
}

/* Every third block of a row is zero when kind is ZEROS. */
static nib_array random_matrix(enum kind kind, nib_dtype dtype, int64_t rows, int64_t cols)
{
    float *x = malloc((size_t)(rows * cols + 1) * sizeof *x);
    for (int64_t i = 0; i < rows * cols; i++)
        x[i] = kind == ZEROS && i % cols / 16 % 3 == 0 ? 0 : number(kind, dtype);
    const nib_array array = matrix_from(x, dtype, rows, cols);
    free(x);
    return array;
}

/* The values of a contiguous array, to be freed. */
static float *floats_of(const nib_array *array)
{
    const size_t n = (size_t)elements_in(array->rank, array->shape);
    float *x = malloc((n + 1) * sizeof *x);
    CHECK_OK(nib_decode(array->dtype, (char *)array->data + array->offset, n, x));
    return x;
}

static char *element_at(const nib_array *array, int64_t index)
{
    int64_t offset = 0;
    for (int i = array->rank - 1; i >= 0; i--) {
        offset += index % array->shape[i] * array->strides[i];
        index /= array->shape[i];
    }
    return (char *)array->data + array->offset + offset * element_bytes(array->dtype);
}

/* The same elements one after another. */
static nib_array contiguous_copy(const nib_array *array)
{
    const int64_t n = elements_in(array->rank, array->shape);
    const int bytes = element_bytes(array->dtype);
    char *memory = malloc((size_t)(n * bytes + 1));
    for (int64_t i = 0; i < n; i++)
        memcpy(memory + i * bytes, element_at(array, i), (size_t)bytes);
    nib_array usage = { 0 };
    CHECK_OK(nib_array_init(&usage, memory, array->dtype, array->rank, array->shape));
    return usage;
}

static nib_array transposed_view(const nib_array *x)
{
    nib_array view = *x;
    view.shape[0] = x->shape[1], view.shape[1] = x->shape[0];
    view.strides[0] = x->strides[1], view.strides[1] = x->strides[0];
    return view;
}

/* ---- Tensors ---- */

static bool same_part(const nib_tensor *a, nib_part pa, const nib_tensor *b, nib_part pb)
{
    const nib_buffer *x = nib_tensor_buffer(a, pa), *y = nib_tensor_buffer(b, pb);
    if (!x || !y)
        return !x && !y;
    return nib_buffer_bytes(x) == nib_buffer_bytes(y) &&
           memcmp(nib_buffer_data(x), nib_buffer_data(y), nib_buffer_bytes(x)) == 0;
}

/* Every byte of every buffer, padding included. */
static bool same_tensor(const nib_tensor *a, const nib_tensor *b)
{
    bool same = a && b;
    for (int part = 0; same && part < NIB_PART_COUNT; part++)
        same = same_part(a, (nib_part)part, b, (nib_part)part);
    return same;
}

#define CHECK_SAME(a, b) CHECK_THAT(same_tensor(a, b), "%s: %s and %s differ", where, #a, #b)

/* What a code of 1 stands for, not rounded. */
static double factor_at(const struct usage *c, const nib_quantizer *q, int64_t line, int64_t block)
{
    const double tensor_scale = tensor_scale_at(c, line), s = e4m3[scale_at(c, line, block)];
    return q->tensor_scale_rule == NIB_TENSOR_SCALE_RULE_DIALECT ? s * tensor_scale / (6.0 * q->e4m3_max)
                                                                 : s * tensor_scale;
}

/* ---- Modes ---- */

enum mode {
    RTN,
    FOUR_MAE,
    FOUR_MSE_256,
    FOUR_FAST,
    SWEEP,
    SWEEP_EXACT,
    SR_8,
    SR_24,
    SR_UNBIASED,
    RHT,
    RHT_SR,
    ROW_SCALED,
    ROW_SCALED_FOUR,
    ROW_SCALED_SR,
    SQUARE,
    SQUARE_FOUR,
    SQUARE_SR,
    SWIZZLED,
    POW2,
    FLOOR,
    MODES
};
static const char *const mode_names[] = { "rtn",
                                          "4over6",
                                          "4over6 mse 256",
                                          "4over6 fast",
                                          "sweep",
                                          "sweep exact",
                                          "sr8",
                                          "sr24",
                                          "unbiased",
                                          "rht",
                                          "rht sr",
                                          "row-scaled",
                                          "row-scaled 4over6",
                                          "row-scaled sr",
                                          "16x16",
                                          "16x16 4over6",
                                          "16x16 sr",
                                          "swizzled",
                                          "pow2",
                                          "floor" };

static nib_quantizer mode_of(int mode)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.seed = 0x123456789ABCDEFu, q.offset = 77;
    if (mode == FOUR_MAE || mode == FOUR_MSE_256 || mode == FOUR_FAST || mode == ROW_SCALED_FOUR || mode == SQUARE_FOUR)
        q.scale_rule = NIB_SCALE_4OVER6;
    if (mode == FOUR_MSE_256)
        q.error_mode = NIB_ERROR_MSE, q.e4m3_max = 256;
    q.fast_error = mode == FOUR_FAST;
    if (mode == SWEEP || mode == SWEEP_EXACT)
        q.scale_rule = NIB_SCALE_SWEEP;
    if (mode == SWEEP_EXACT)
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT;
    if (mode == SR_8 || mode == ROW_SCALED_SR || mode == SQUARE_SR)
        q.rounding = NIB_ROUND_STOCHASTIC_8;
    if (mode == SR_24 || mode == RHT_SR)
        q.rounding = NIB_ROUND_STOCHASTIC_24;
    if (mode == SR_UNBIASED)
        q.rounding = NIB_ROUND_STOCHASTIC_UNBIASED;
    q.rht = q.rht_rowwise = mode == RHT || mode == RHT_SR;
    q.row_scaled = mode == ROW_SCALED || mode == ROW_SCALED_FOUR || mode == ROW_SCALED_SR;
    if (mode == SQUARE || mode == SQUARE_FOUR || mode == SQUARE_SR)
        q.block_dims[0] = 16;
    q.swizzled = mode == SWIZZLED;
    if (mode == POW2)
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    if (mode == FLOOR)
        q.min_block_scale = 0.875f;
    return q;
}

/* The RHT wants whole blocks; everything else takes any shape. */
static bool supports(const nib_quantizer *q, int64_t rows, int64_t cols)
{
    return (!q->rht || rows % 16 == 0) && (!q->rht_rowwise || cols % 16 == 0);
}

static const int64_t shapes[][2] = { { 1, 1 },   { 3, 5 },   { 17, 33 },   { 16, 16 }, { 40, 100 }, { 64, 48 },
                                     { 1, 300 }, { 300, 1 }, { 128, 272 }, { 33, 16 }, { 15, 257 }, { 1, 4096 } };

/* Call body for every shape, dtype, kind and mode that go together. */
static void for_all(void (*body)(const nib_quantizer *q, const nib_array *x, enum kind kind))
{
    fill_tables();
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < COUNT(dtypes); d++)
            for (int kind = 0; kind < KINDS; kind++)
                for (int mode = 0; mode < MODES; mode++) {
                    const nib_quantizer q = mode_of(mode);
                    /* The longer the tensor, the fewer of its combinations. */
                    if (!supports(&q, shapes[s][0], shapes[s][1]) || test_below(shapes[s][0] * shapes[s][1]) > 1500)
                        continue;
                    snprintf(where, sizeof where, "%lldx%lld %s %s %s", (long long)shapes[s][0],
                             (long long)shapes[s][1], nib_dtype_name(dtypes[d]), kind_names[kind], mode_names[mode]);
                    const nib_array x = random_matrix((enum kind)kind, dtypes[d], shapes[s][0], shapes[s][1]);
                    body(&q, &x, (enum kind)kind);
                    free(x.data);
                }
}

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

/* Every formula is homogeneous in the data: a power of two passes through to the tensor scale as long as nothing leaves the
 * range of FP32 (and, for F16, of F16). */
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

/* Half the distance between the E2M1 values on both sides of y. Past 6 there is one side only; y stays below 7 because
 * a scale is at most 1/17 too small. */
static double half_step(double y) { return fabs(y) < 2 ? 0.25 : fabs(y) < 4 ? 0.5 : 1; }

/*
 * With F = s * tensor scale / full_scale exact, the element's multiplier is 1/F within 4 roundings (2688/amax, its inverse,
 * times s, its inverse), y within 5; decoding gives code * F within 4 (s * amax, 1/2688, their product, times the
 * code). So |decoded - x| <= F * (half_step + (4 * 6 + 5 * 6.4) U) and 64 U covers it.
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

/* By search, not by the library: the nearest magnitude, of two equally near ones the even code. Past 6 it is 6. */
static int nearest_code(double y)
{
    int best = 0;
    for (int code = 1; code < 8; code++) {
        const double d = fabs(e2m1[code] - fabs(y)), least = fabs(e2m1[best] - fabs(y));
        if (d < least || (d == least && code % 2 == 0))
            best = code;
    }
    return best | (signbit(y) ? 8 : 0);
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

/* ---- Layouts ---- */

static void check_layout(const char *name, const nib_array *view)
{
    const nib_array plain = contiguous_copy(view);
    const int64_t cols = view->shape[view->rank - 1], rows = cols ? elements_in(view->rank, view->shape) / cols : 0;
    for (int mode = 0; mode < MODES; mode++) {
        const nib_quantizer q = mode_of(mode);
        if (!supports(&q, rows, cols))
            continue;
        snprintf(where, sizeof where, "%s %s", name, mode_names[mode]);
        nib_tensor *a = quantize(&q, view, NULL), *b = quantize(&q, &plain, NULL);
        CHECK_SAME(a, b);
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
    free(plain.data);
}

/* Rows alone are cut otherwise than columns, columns of FP32 that are many otherwise than few, and all otherwise where they
 * must be copied: here from every second element of a row, and back into such. */
TEST(rows_wider_than_a_panel_leave_no_trace_of_it)
{
    static const int64_t wide_shapes[][2] = { { 3, 66013 }, { 40, 4144 }, { 1, 140000 }, { 17, 8192 }, { 48, 33120 } };
    for (size_t s = 0; s < sizeof wide_shapes / sizeof *wide_shapes; s++)
        for (int both = 0; both < 2; both++)
            for (int mode = 0; mode < MODES; mode++) {
                const int64_t rows = wide_shapes[s][0], cols = wide_shapes[s][1];
                nib_quantizer q = mode_of(mode);
                q.columnwise = (uint8_t)both;
                if (nib_quantizer_check(&q, NULL) || !supports(&q, rows, cols))
                    continue;
                snprintf(where, sizeof where, "%s, %lld rows of %lld%s", mode_names[mode], (long long)rows,
                         (long long)cols, both ? ", both" : "");
                const nib_array wide = random_matrix(HEAVY, both ? NIB_F32 : dtypes[mode % 3], rows, 2 * cols);
                nib_array view = wide;
                view.shape[1] = cols;
                view.strides[1] = 2;
                const nib_array plain = contiguous_copy(&view);
                nib_tensor *a = quantize(&q, &view, NULL), *b = quantize(&q, &plain, NULL);
                CHECK_SAME(a, b);
                CHECK_OK(nib_dequantize(a, NIB_ROWWISE, &view));
                CHECK_OK(nib_dequantize(a, NIB_ROWWISE, &plain));
                const nib_array back = contiguous_copy(&view);
                CHECK_THAT(memcmp(back.data, plain.data, plain.bytes) == 0, "%s: decoded otherwise", where);
                nib_tensor_destroy(a);
                nib_tensor_destroy(b);
                free(back.data);
                free(plain.data);
                free(wide.data);
            }
}

/* A view of [5, 4, 6, 320] elements: every stride has a factor and an offset of its own. */
static nib_array sliced(nib_array base, int64_t rows, int64_t cols)
{
    const int64_t shape[4] = { 2, 2, rows / 4, cols }, start[4] = { 1, 0, 1, 3 }, step[4] = { 2, 3, 1, 2 };
    for (int i = 0; i < 4; i++) {
        base.offset += (size_t)(start[i] * base.strides[i] * element_bytes(base.dtype));
        base.shape[i] = shape[i];
        base.strides[i] *= step[i];
    }
    return base;
}

static void check_layouts(nib_dtype dtype)
{
    nib_array x = random_matrix(HEAVY, dtype, 48, 320);
    const nib_array base = x;
    x = transposed_view(&base);
    check_layout("transposed", &x);

    x = base;
    x.offset = (size_t)(elements_in(x.rank, x.shape) - 1) * (size_t)element_bytes(dtype);
    x.strides[0] = -x.strides[0], x.strides[1] = -1;
    check_layout("backwards", &x);
    x.offset = (size_t)(319 * element_bytes(dtype)), x.strides[0] = -x.strides[0];
    check_layout("columns backwards", &x);

    x = base;
    x.strides[0] = 0;
    check_layout("one row", &x);
    x = base;
    x.strides[1] = 0;
    check_layout("one column", &x);
    x.strides[0] = 0;
    check_layout("one number", &x);

    x = base;
    x.shape[1] = 33, x.strides[1] = 9, x.offset = (size_t)(7 * element_bytes(dtype));
    check_layout("every ninth", &x);
    x = base;
    x.shape[1] = 100, x.offset = (size_t)(21 * element_bytes(dtype));
    check_layout("columns 21 to 120", &x);

    nib_array four = base;
    four.rank = 4;
    memcpy(four.shape, (const int64_t[]){ 4, 4, 3, 320 }, 4 * sizeof(int64_t));
    memcpy(four.strides, (const int64_t[]){ 3840, 960, 320, 1 }, 4 * sizeof(int64_t));
    check_layout("rank 4", &four);
    x = sliced(four, 8, 150);
    check_layout("slice of rank 4", &x);
    x.strides[0] = -x.strides[0], x.offset += (size_t)(-x.strides[0] * element_bytes(dtype));
    check_layout("slice of rank 4, first dim backwards", &x);
    x = four;
    x.strides[1] = 0;
    check_layout("rank 4, second dim repeated", &x);
    x = four;
    x.shape[0] = 1, x.strides[0] = 12345, x.shape[2] = 1,
    x.strides[2] = -99; /* strides of single entries mean nothing */
    check_layout("rank 4 with single entries", &x);
    free(base.data);
}

TEST(strides_do_not_matter)
{
    for (int d = 0; d < COUNT(dtypes); d++)
        check_layouts(dtypes[d]);
}

TEST(rank_one_is_a_row)
{
    const nib_array row = random_matrix(NORMAL, NIB_BF16, 1, 100);
    nib_array flat = row;
    flat.rank = 1, flat.shape[0] = 100, flat.strides[0] = 1;
    const nib_quantizer q = mode_of(RTN);
    nib_tensor *a = quantize(&q, &row, NULL), *b = quantize(&q, &flat, NULL);
    snprintf(where, sizeof where, "rank 1");
    CHECK_SAME(a, b);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free(row.data);
}

/* An array in memory that ends where it ends (or begins where it begins), which may be read but not written. */
static nib_array guarded_copy(const nib_array *x, bool at_end)
{
    nib_array usage = *x;
    usage.data = test_guarded(x->bytes, at_end);
    memcpy(usage.data, x->data, x->bytes);
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)usage.data / page * page;
    CHECK(mprotect((void *)first, ((uintptr_t)usage.data + x->bytes - first + page - 1) / page * page, PROT_READ) == 0);
    return usage;
}

TEST(nothing_beside_the_input_is_read_and_nothing_in_it_written)
{
    const int64_t sizes[][2] = { { 1, 1 }, { 3, 5 }, { 17, 33 }, { 16, 256 }, { 15, 257 }, { 48, 16 }, { 32, 544 } };
    for (int s = 0; s < COUNT(sizes); s++)
        for (int d = 0; d < COUNT(dtypes); d++) {
            const nib_array x = random_matrix(HEAVY, dtypes[d], sizes[s][0], sizes[s][1]);
            for (int end = 0; end < 2; end++) {
                const nib_array guarded = guarded_copy(&x, end);
                check_layout("guarded", &guarded);
                const nib_array view = transposed_view(&guarded);
                check_layout("guarded, transposed", &view);
            }
            free(x.data);
        }
}

/* A tensor over memory full of junk that ends at a guard page. */
static nib_tensor *junk_tensor(const nib_quantizer *q, nib_dtype dtype, int64_t rows, int64_t cols)
{
    const int64_t shape[2] = { rows, cols };
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_tensor *t = NULL;
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        int rank;
        int64_t part_shape[NIB_MAX_RANK];
        CHECK_OK(nib_part_shape(q, (nib_part)part, 2, shape, &rank, part_shape));
        size_t bytes = part >= NIB_ROW_TENSOR_SCALE ? sizeof(float) : 1;
        for (int i = 0; i < rank; i++)
            bytes *= (size_t)part_shape[i];
        void *memory = test_guarded(bytes, true);
        memset(memory, 0xAA, bytes);
        CHECK_OK(nib_buffer_borrow(memory, bytes, NULL, NULL, NULL, &parts[part]));
    }
    CHECK_OK(nib_tensor_from_buffers(q, dtype, 2, shape, parts, NIB_PART_COUNT, &t));
    for (int part = 0; part < NIB_PART_COUNT; part++)
        nib_buffer_release(parts[part]);
    return t;
}

/* Every byte is written: tails, the nibble after an odd end, padding of scales. */
static void into_junk(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    if (elements_in(x->rank, x->shape) > 1500)
        return;
    nib_tensor *fresh = quantize(q, x, NULL), *junk = junk_tensor(q, x->dtype, x->shape[0], x->shape[1]);
    CHECK_OK(nib_quantize_into(NULL, x, NULL, NULL, junk));
    CHECK_SAME(fresh, junk);
    nib_tensor_destroy(fresh);
    nib_tensor_destroy(junk);
}

TEST(junk_in_the_buffers_does_not_shine_through) { for_all(into_junk); }

/* What lies past the last element is 0, in codes and in scales. */
static void check_padding(const nib_tensor *t, nib_usage which)
{
    const struct usage c = usage_of(t, which);
    int wrong = 0;
    for (int64_t line = 0; line < c.lines; line++)
        wrong += c.length % 2 && c.codes[line * c.code_stride + c.code_stride - 1] >> 4;
    for (int64_t line = 0; line < (c.lines + 127) / 128 * 128; line++)
        for (int64_t block = line < c.lines ? (c.length + 15) / 16 : 0; block < c.scale_stride; block++)
            wrong += scale_at(&c, line, block) != 0;
    CHECK_THAT(wrong == 0, "%s: %d places of padding are not 0", where, wrong);
}

/* The other fifteen elements of a block must not hear of the missing ones: a tail block equals one filled up with
 * zeros. */
static void tails(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    const int64_t rows = x->shape[0], cols = x->shape[1], wide = (cols + 15) / 16 * 16, high = (rows + 15) / 16 * 16;
    if (q->rounding != NIB_ROUND_NEAREST || q->swizzled || rows * cols > 5000)
        return;
    float *values = floats_of(x), *padded = calloc((size_t)(wide * high), sizeof *padded);
    for (int64_t i = 0; i < rows * cols; i++)
        padded[i / cols * wide + i % cols] = values[i];
    const nib_array large = matrix_from(padded, x->dtype, high, wide);
    nib_tensor *t = quantize(q, x, NULL), *p = quantize(q, &large, NULL);
    int wrong = 0;
    for (int which = 0; which < 2; which++) {
        const struct usage a = usage_of(t, (nib_usage)which), b = usage_of(p, (nib_usage)which);
        check_padding(t, (nib_usage)which);
        for (int64_t line = 0; line < a.lines; line++)
            for (int64_t i = 0; i < a.length; i++)
                wrong += code_at(&a, line, i) != code_at(&b, line, i) ||
                         scale_at(&a, line, i / 16) != scale_at(&b, line, i / 16);
    }
    CHECK_THAT(wrong == 0, "%s: %d elements differ from those of whole blocks", where, wrong);
    nib_tensor_destroy(t);
    nib_tensor_destroy(p);
    free(large.data);
    free(values);
    free(padded);
}

TEST(a_tail_is_a_block_filled_up_with_zeros) { for_all(tails); }

static void swizzle_of_compact(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    nib_quantizer tiled = *q, compact = *q;
    tiled.swizzled = 1, compact.swizzled = 0;
    nib_tensor *a = quantize(&tiled, x, NULL), *b = quantize(&compact, x, NULL);
    for (int which = 0; which < 2; which++) {
        const struct usage c = usage_of(b, (nib_usage)which);
        const nib_part part = which == NIB_ROWWISE ? NIB_ROW_SCALE : NIB_COL_SCALE;
        const size_t bytes = nib_buffer_bytes(nib_tensor_buffer(b, part));
        uint8_t *tiles = malloc(bytes);
        memset(tiles, 0xAA, bytes);
        CHECK_OK(nib_swizzle_scales(c.scales, c.lines, (c.length + 15) / 16, c.scale_stride, tiles));
        CHECK_THAT(memcmp(tiles, bytes_of(a, part), bytes) == 0, "%s: swizzled copy %d", where, which);
        free(tiles);
    }
    CHECK(same_part(a, NIB_ROW_DATA, b, NIB_ROW_DATA) && same_part(a, NIB_COL_DATA, b, NIB_COL_DATA));
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

TEST(swizzled_scales_are_the_compact_ones_swizzled) { for_all(swizzle_of_compact); }

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

/* ---- What is rejected ---- */

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
    comm = comm_of(NULL), comm.rank = 2;
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

/* ---- Back ---- */

/* To a BF16 or F16 array is to F32, then rounded; and any layout gets the same values and nothing beside them. */
static void back(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    const int64_t rows = x->shape[0], cols = x->shape[1], n = rows * cols;
    nib_tensor *t = quantize(q, x, NULL);
    float *y = malloc((size_t)n * sizeof *y);
    uint16_t *halves = malloc((size_t)n * sizeof *halves), *wanted = malloc((size_t)n * sizeof *wanted);
    float *wide = malloc((size_t)(4 * n) * sizeof *wide);
    nib_array out = { 0 }, half = { 0 };
    CHECK_OK(nib_array_init(&out, y, NIB_F32, 2, x->shape));
    for (int which = 0; which < 2; which++) {
        CHECK_OK(nib_dequantize(t, (nib_usage)which, &out));
        for (int d = 1; d < COUNT(dtypes); d++) {
            CHECK_OK(nib_array_init(&half, halves, dtypes[d], 2, x->shape));
            CHECK_OK(nib_dequantize(t, (nib_usage)which, &half));
            CHECK_OK(nib_encode(dtypes[d], y, (size_t)n, wanted));
            CHECK_THAT(memcmp(wanted, halves, (size_t)n * 2) == 0, "%s: copy %d to %s", where, which,
                       nib_dtype_name(dtypes[d]));
        }
        /* Transposed, backwards, every other element of twice as many rows. */
        nib_array view = { .data = wide,
                           .bytes = (size_t)(4 * n) * sizeof *wide,
                           .dtype = NIB_F32,
                           .rank = 2,
                           .shape = { rows, cols },
                           .strides = { -2, -4 * rows } };
        view.offset = (size_t)((4 * rows * (cols - 1) + 2 * (rows - 1))) * sizeof *wide;
        for (int64_t i = 0; i < 4 * n; i++)
            wide[i] = 12345;
        CHECK_OK(nib_dequantize(t, (nib_usage)which, &view));
        int64_t wrong = 0, untouched = 0;
        for (int64_t i = 0; i < n; i++)
            wrong += memcmp(element_at(&view, i), &y[i], sizeof *y) != 0;
        for (int64_t i = 0; i < 4 * n; i++)
            untouched += wide[i] == 12345;
        CHECK_THAT(wrong == 0 && untouched == 3 * n, "%s: copy %d, %lld wrong in a view, %lld untouched", where, which,
                   (long long)wrong, (long long)untouched);
    }
    nib_tensor_destroy(t);
    free(y);
    free(halves);
    free(wanted);
    free(wide);
}

TEST(dequantize_to_any_layout_and_dtype) { for_all(back); }

/* f = (s * amax) * (1 / 2688), value = code * f: each step rounds once. */
static void decoded_values(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    if (q->tensor_scale_rule != NIB_TENSOR_SCALE_RULE_DIALECT || q->swizzled || q->rht)
        return;
    nib_tensor *t = quantize(q, x, NULL);
    float *y = malloc((size_t)elements_in(x->rank, x->shape) * sizeof *y);
    nib_array out = { 0 };
    CHECK_OK(nib_array_init(&out, y, NIB_F32, 2, x->shape));
    for (int which = 0; which < 2; which++) {
        const struct usage c = usage_of(t, (nib_usage)which);
        CHECK_OK(nib_dequantize(t, (nib_usage)which, &out));
        int wrong = 0;
        for (int64_t line = 0; line < c.lines; line++)
            for (int64_t i = 0; i < c.length; i++) {
                const float product = e4m3[scale_at(&c, line, i / 16)] * tensor_scale_at(&c, line);
                const float inverse_rht = 1.0f / (6.0f * (float)q->e4m3_max), f = product * inverse_rht;
                const float wanted = e2m1[code_at(&c, line, i)] * f;
                const float is = y[which == NIB_ROWWISE ? line * x->shape[1] + i : i * x->shape[1] + line];
                wrong += is != wanted && !(isnan(is) && isnan(wanted));
            }
        CHECK_THAT(wrong == 0, "%s: copy %d, %d values", where, which, wrong);
    }
    nib_tensor_destroy(t);
    free(y);
}

TEST(decoded_values_are_code_times_factor) { for_all(decoded_values); }

/* y[j] = sum of sign(i) x[i] H[i][j] / 4 in double, or back (H is symmetric and orthogonal). */
static void rht(const double x[16], double y[16], unsigned mask, bool inverse_rht)
{
    for (unsigned j = 0; j < 16; j++) {
        y[j] = 0;
        for (unsigned i = 0; i < 16; i++)
            y[j] += (__builtin_popcount(i & j) % 2 ? -0.25 : 0.25) * (!inverse_rht && mask >> i & 1 ? -x[i] : x[i]);
        if (inverse_rht && mask >> j & 1)
            y[j] = -y[j];
    }
}

/*
 * z = R x and its decoded form z' differ by at most half a step of z in each element (and by one rounding to BF16,
 * 2^-9 |z|, where the input is BF16; the butterflies themselves are 5 roundings of sums of at most 16 |x|). x' = R^T
 * z' then errs by at most a quarter of the sum of those, plus 5 roundings of the sum of 16 |z'| on the way back.
 */
static double inverse_bound(const double z[16], double f, double sum, nib_dtype dtype)
{
    double bound = 0;
    for (int j = 0; j < 16; j++)
        bound += f * (half_step(z[j] / f) + 64 * U) + (dtype == NIB_BF16 ? 0x1p-9 * fabs(z[j]) : 0);
    return bound / 4 + 10 * U * sum;
}

TEST(the_transform_comes_back)
{
    fill_tables();
    const int64_t rows = 64, cols = 48;
    for (int d = 0; d < COUNT(dtypes); d++)
        for (int masked = 0; masked < 2; masked++) {
            nib_quantizer q = mode_of(RHT);
            q.rht_sign_mask = masked ? NIB_RHT_SIGN_MASK : 0;
            const nib_array array = random_matrix(NORMAL, dtypes[d], rows, cols);
            float *x = floats_of(&array), *y = malloc((size_t)(rows * cols) * sizeof *y);
            nib_array out = { 0 };
            CHECK_OK(nib_array_init(&out, y, NIB_F32, 2, array.shape));
            nib_tensor *t = quantize(&q, &array, NULL);
            for (int which = 0; which < 2; which++) {
                CHECK_OK(nib_dequantize(t, (nib_usage)which, &out));
                const struct usage c = usage_of(t, (nib_usage)which);
                const int64_t along = which == NIB_ROWWISE ? 1 : cols, across = which == NIB_ROWWISE ? cols : 1;
                for (int64_t line = 0; line < c.lines; line++)
                    for (int64_t block = 0; block < c.length / 16; block++) {
                        double in[16], z[16], sum = 0;
                        for (int i = 0; i < 16; i++) {
                            in[i] = x[line * across + (16 * block + i) * along];
                            sum += fabs(in[i]) + 8 * factor_at(&c, &q, line, block);
                        }
                        rht(in, z, q.rht_sign_mask, false);
                        const double bound = inverse_bound(z, factor_at(&c, &q, line, block), sum, dtypes[d]);
                        for (int i = 0; i < 16; i++)
                            CHECK_THAT(fabs(y[line * across + (16 * block + i) * along] - in[i]) <= bound,
                                       "%s usage %d: %a became %a, bound %a", nib_dtype_name(dtypes[d]), which, in[i],
                                       y[line * across + (16 * block + i) * along], bound);
                    }
            }
            nib_tensor_destroy(t);
            free(x);
            free(y);
            free(array.data);
        }
}

/* One number of 24 * 2^m in a block becomes sixteen of +-6 * 2^m. With a power of two for g every step is exact, so
 * that exactly the data comes back. */
TEST(the_transform_of_small_integers_is_exact)
{
    const int64_t rows = 64, cols = 80;
    for (int d = 0; d < COUNT(dtypes); d++) {
        nib_quantizer q = mode_of(RHT);
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
        float *x = calloc((size_t)(rows * cols), sizeof *x);
        for (int64_t block = 0; block < rows / 16; block++)
            for (int64_t c = 0; c < cols; c++)
                x[(16 * block + test_below(16)) * cols + c] = ldexpf(test_below(2) ? 24 : -24, (int)test_below(4));
        q.rowwise = 0;
        const nib_array array = matrix_from(x, dtypes[d], rows, cols), out = contiguous_copy(&array);
        memset(out.data, 0xAA, out.bytes);
        nib_tensor *t = quantize(&q, &array, NULL);
        CHECK_OK(nib_dequantize(t, NIB_COLUMNWISE, &out));
        float *y = floats_of(&out);
        int wrong = 0;
        for (int64_t i = 0; i < rows * cols; i++)
            wrong += x[i] != y[i];
        CHECK_THAT(wrong == 0, "%s: %d of %lld", nib_dtype_name(dtypes[d]), wrong, (long long)(rows * cols));
        nib_tensor_destroy(t);
        free(x);
        free(y);
        free(array.data);
        free(out.data);
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
