/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gptq.c - the factor of a Hessian and GPTQ by it: bit for bit against their definitions, by every instruction set
 * and number of threads; what they are good for; and what they reject.
 */
#include <fenv.h>
#include <float.h>

#include "test_modes.h"

#include "tensor/gptq.h"
#include "tensor/tensor.h"

/* ---- Every instruction set ---- */

enum { MOST_ISAS = 8 };
static struct isa {
    const char *name;
    struct nib_kernels kernels;
} isas[MOST_ISAS];

static int find_isas(void)
{
    struct nib_kernels merged = { .absmax = { NULL } };
    int n = 0;
    for (const struct nib_isa *isa = nib_isas; isa->name && n < MOST_ISAS; isa++)
        if (isa->kernels->round_column[NIB_NVFP4] && isa->present()) {
            memcpy(merged.subtract, isa->kernels->subtract, sizeof merged.subtract);
            memcpy(merged.round_column, isa->kernels->round_column, sizeof merged.round_column);
            isas[n++] = (struct isa){ isa->name, merged };
        }
    return n;
}

static const int thread_counts[] = { 1, 2, 7 };

/* ---- Hessians ---- */

static size_t packed(int64_t n) { return (size_t)(n * (n + 1) / 2); }

static float *place(float *hessian, int64_t n, int64_t i, int64_t j)
{
    return hessian + (i < j ? i * n - i * (i - 1) / 2 + j - i : j * n - j * (j - 1) / 2 + i - j);
}

/* The mean of x x^T over tokens x = A z, z normal; a few channels get no input. */
static float *random_hessian(int64_t n, int64_t tokens, int64_t dead)
{
    float *h = calloc(packed(n), sizeof *h), *a = malloc((size_t)(n * n) * sizeof *a);
    double *x = malloc((size_t)n * sizeof *x), *sums = calloc(packed(n), sizeof *sums);
    for (int64_t i = 0; i < n * n; i++)
        a[i] = test_normal();
    for (int64_t t = 0; t < tokens; t++) {
        memset(x, 0, (size_t)n * sizeof *x);
        for (int64_t k = 0; k < n; k++) {
            const float z = test_normal();
            for (int64_t i = 0; i < n; i++)
                x[i] += (double)(z * a[k * n + i]);
        }
        for (int64_t i = 0; i < dead; i++)
            x[i * n / dead] = 0;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = i; j < n; j++)
                sums[i * n - i * (i - 1) / 2 + j - i] += x[i] * x[j];
    }
    for (size_t i = 0; i < packed(n); i++)
        h[i] = (float)(sums[i] / (double)tokens);
    free(a), free(x), free(sums);
    return h;
}

static float *unit_hessian(int64_t n)
{
    float *h = calloc(packed(n), sizeof *h);
    for (int64_t i = 0; i < n; i++)
        *place(h, n, i, i) = 1;
    return h;
}

/* ---- Definitions ---- */

/* U by the words of docs/numerics.md, element by element. */
static void define_factor(float *h, int64_t n, double damp, int32_t *order, float *u)
{
    double *l = calloc((size_t)(n * n), sizeof *l), *x = calloc((size_t)(n * n), sizeof *x), sum = 0;
    int64_t live = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t before = 0;
        for (int64_t i = 0; i < n; i++)
            before += *place(h, n, i, i) > *place(h, n, k, k) || (*place(h, n, i, i) == *place(h, n, k, k) && i < k);
        order[before] = (int32_t)k;
        sum += (double)*place(h, n, k, k);
        live += *place(h, n, k, k) > 0;
    }
    const double mean = live ? sum / (double)live : 1;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j++) {
            double s = (double)*place(h, n, order[n - 1 - i], order[n - 1 - j]);
            if (i == j)
                s = (s > 0 ? s : mean) + damp * mean;
            for (int64_t k = 0; k < j; k++)
                s = s - l[i * n + k] * l[j * n + k];
            l[i * n + j] = i == j ? sqrt(s) : s / l[j * n + j];
        }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j++) {
            double s = i == j;
            for (int64_t k = j; k < i; k++)
                s = s - l[i * n + k] * x[k * n + j];
            x[i * n + j] = s / l[i * n + i];
        }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            u[i * n + j] = (float)x[(n - 1 - i) * n + n - 1 - j];
    free(l), free(x);
}

/* What GPTQ makes of one row whose blocks have these factors. */
static void define_row(const float *weights, int64_t n, const int32_t *order, const float *u, const float *e,
                       const float *f, uint8_t *codes)
{
    float *w = malloc((size_t)n * sizeof *w);
    for (int64_t j = 0; j < n; j++)
        w[j] = weights[order[j]];
    for (int64_t j = 0; j < n; j++) {
        const int32_t c = order[j];
        const float now = w[j] == 0 ? copysignf(0, weights[c]) : w[j];
        codes[c] = f[c / 16] == 0 ? (uint8_t)(signbit(now) ? 8 : 0) : nib_e2m1_from_f32(now * e[c / 16]);
        const float q = nib_f32_from_e2m1(codes[c]) * f[c / 16], r = (w[j] - q) / u[j * n + j];
        for (int64_t k = j + 1; k < n; k++)
            w[k] = w[k] - r * u[j * n + k];
    }
    free(w);
}

/* The tensor that is expected of t, made of x. */
static nib_tensor *define_gptq(const nib_tensor *t, const float *x, const int32_t *order, const float *u)
{
    nib_tensor *out = clone_of(t);
    const struct nib_usage_geometry *g = &t->geometry.usage[NIB_ROWWISE];
    const struct nib_usage_memory memory = nib_tensor_memory(out, NIB_ROWWISE);
    const struct nib_rules rules = nib_rules_of(&t->q, NIB_F32);
    const int64_t n = g->length;
    float *e = malloc((size_t)(2 * g->blocks + 2) * sizeof *e), *f = e + g->blocks;
    uint8_t *codes = malloc((size_t)n + 1);
    for (int64_t r = 0; r < g->lines; r++) {
        struct nib_scaler scaler = { .tensor_scale = memory.tensor_scales[t->q.row_scaled ? r : 0] };
        bool finite = true;
        nib_te_prepare(&scaler, &rules);
        for (int64_t i = 0; i < n; i++)
            finite &= isfinite(x[r * n + i]) != 0;
        for (int64_t b = 0; b < g->blocks; b++) {
            const nib_scale_bits s = nib_scale_load(g, memory.scales, r, b);
            e[b] = nib_te_factor(s, 0, &scaler, &rules);
            f[b] = s ? nib_nvfp4_decode_factor(s, scaler.tensor_scale, &rules) : 0;
        }
        if (finite)
            define_row(x + r * n, n, order, u, e, f, codes);
        for (int64_t i = 0; i < n && finite; i++)
            nib_code_store(g, memory.codes, r, i, codes[i]);
    }
    free(e), free(codes);
    return out;
}

/* ---- Bits ---- */

TEST(a_factor_has_the_bits_of_its_definition)
{
    static const int64_t sizes[] = { 1, 2, 15, 16, 17, 64, 127, 128, 129, 200, 350, 520 };
    const int count = find_isas();
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int64_t n = sizes[s];
        const size_t bytes = (size_t)(n * n) * sizeof(float);
        float *h = random_hessian(n, n / 2 + 1, n > 20 ? 3 : 0), *wanted = malloc(bytes), *u = malloc(bytes);
        int32_t *wanted_order = malloc((size_t)n * 4), *order = malloc((size_t)n * 4);
        define_factor(h, n, 0.1, wanted_order, wanted);
        for (int i = 0; i < count; i++)
            for (size_t t = 0; t < sizeof thread_counts / sizeof *thread_counts; t++) {
                double damped = 0;
                memset(u, 0x55, bytes);
                CHECK_OK(nib_factorize(host_of(thread_counts[t]), &isas[i].kernels, h, n, 0.1, order, u, &damped));
                CHECK(damped == 0.1);
                CHECK_BYTES(order, wanted_order, (size_t)n * 4);
                CHECK_THAT(!memcmp(u, wanted, bytes), "%s, %d threads, %d columns: U differs", isas[i].name,
                           thread_counts[t], (int)n);
            }
        free(h), free(wanted), free(u), free(wanted_order), free(order);
    }
}

/* A square root keeps all bits: two channels with the same input are told apart by a damping of two units in the last
 * place of 1, and L is { 1 + 2^-52, 0; 1 - 2^-52, 2^-25 }. */
TEST(a_damping_of_the_last_bits_counts)
{
    const float h[] = { 1, 1, 1 }, wanted[] = { 0x1p25f, -0x1p25f, 0, 1 };
    int32_t order[2];
    float u[4];
    double damped = 0;
    CHECK_OK(nib_gptq_factorize(h, 2, 0x1p-51, NULL, order, u, &damped));
    CHECK(damped == 0x1p-51 && order[0] == 0 && order[1] == 1);
    CHECK_BYTES(u, wanted, sizeof u);
}

struct factor {
    int32_t *order;
    float *u, *h;
};

static struct factor factor_of(float *h, int64_t n)
{
    struct factor f = { malloc((size_t)n * 4), malloc((size_t)(n * n) * 4), h };
    CHECK_OK(nib_gptq_factorize(h, n, 0.1, NULL, f.order, f.u, NULL));
    return f;
}

static void free_factor(struct factor f) { free(f.order), free(f.u), free(f.h); }

static nib_quantizer sweep(bool floor)
{
    nib_quantizer q = usages(1, 0);
    q.scale_rule = NIB_SCALE_SWEEP;
    q.min_block_scale = floor ? 0x1p-6f : 0;
    return q;
}

static void check_case(const nib_array *x, const nib_quantizer *q, struct factor f, int count)
{
    float *values = floats_of(x);
    nib_tensor *before = quantize(q, x, NULL), *wanted = define_gptq(before, values, f.order, f.u);
    for (int i = 0; i < count; i++)
        for (size_t t = 0; t < sizeof thread_counts / sizeof *thread_counts; t++) {
            nib_tensor *got = clone_of(before);
            const struct nib_usage_memory memory = nib_tensor_memory(got, NIB_ROWWISE);
            CHECK_OK(nib_gptq_usage(host_of(thread_counts[t]), &isas[i].kernels, &got->q, x, &got->geometry, &memory,
                                    f.order, f.u));
            CHECK_THAT(equal(wanted, got), "%s, %d threads, %d x %d: codes differ", isas[i].name, thread_counts[t],
                       (int)x->shape[0], (int)x->shape[1]);
            nib_tensor_destroy(got);
        }
    nib_tensor_destroy(before);
    nib_tensor_destroy(wanted);
    free(values);
}

TEST(codes_have_the_bits_of_their_definition)
{
    static const int64_t sizes[][2] = { { 1, 1 }, { 3, 16 }, { 5, 17 }, { 33, 127 }, { 130, 200 }, { 300, 300 } };
    const int count = find_isas();
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int64_t n = sizes[s][1];
        const struct factor f = factor_of(random_hessian(n, n / 2 + 1, n > 20 ? 2 : 0), n);
        for (int kind = 0; kind < KINDS; kind++) {
            nib_quantizer q = sweep(kind % 2);
            const nib_array x = random_matrix((enum kind)kind, dtypes[kind % 3], sizes[s][0], n);
            q.tensor_scale_rule = (nib_tensor_scale_rule)test_below(NIB_TENSOR_SCALE_RULE_COUNT);
            q.row_scaled = (uint8_t)test_below(2);
            q.swizzled = (uint8_t)test_below(2);
            check_case(&x, &q, f, count);
            free(x.data);
        }
        free_factor(f);
    }
}

/* Neither strides nor panels nor the arithmetic that another library left behind matter. */
TEST(the_same_codes_from_any_layout)
{
    const int64_t rows = 70, cols = 96;
    const struct factor f = factor_of(random_hessian(cols, 2 * cols, 0), cols);
    const nib_quantizer q = sweep(true);
    nib_array x = random_matrix(NORMAL, NIB_BF16, cols, rows), view = transposed_view(&x);
    nib_array plain = contiguous_copy(&view);
    float *values = floats_of(&plain), amax = 0;
    for (int64_t i = 0; i < rows * cols; i++)
        amax = fmaxf(amax, fabsf(values[i]));
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, NULL } };
    nib_tensor *wanted = quantize(&q, &plain, NULL), *got = quantize(&q, &view, NULL), *part = NULL, *slice = NULL;
    CHECK_OK(nib_gptq(&plain, f.order, f.u, cols, wanted));
    const int mode = fegetround();
    float *u = malloc((size_t)(cols * cols) * sizeof *u);
    fesetround(FE_UPWARD);
    CHECK_OK(nib_gptq_factorize(f.h, cols, 0.1, NULL, f.order, u, NULL));
    CHECK_OK(nib_gptq(&view, f.order, f.u, cols, got));
    fesetround(mode);
    CHECK_BYTES(u, f.u, (size_t)(cols * cols) * sizeof *u);
    free(u);
    CHECK_SAME(wanted, got);
    nib_array panel = plain;
    panel.shape[0] = 9;
    panel.offset = (size_t)(50 * cols * 2);
    CHECK_OK(nib_quantize(&q, &panel, &overrides, &part));
    CHECK_OK(nib_gptq(&panel, f.order, f.u, cols, part));
    CHECK_OK(nib_tensor_slice(wanted, 50, 9, &slice));
    CHECK_SAME(part, slice);
    nib_tensor_destroy(wanted), nib_tensor_destroy(got), nib_tensor_destroy(part), nib_tensor_destroy(slice);
    free(x.data), free(plain.data), free(values);
    free_factor(f);
}

/* ---- What it is ---- */

/* Without correlations there is nothing to make up for: the codes are those of the quantization, negative zeros too. */
TEST(a_unit_hessian_changes_nothing)
{
    static const int64_t sizes[][2] = { { 1, 1 }, { 5, 17 }, { 40, 130 }, { 33, 300 } };
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int64_t n = sizes[s][1];
        const struct factor f = factor_of(unit_hessian(n), n), none = factor_of(calloc(packed(n), sizeof(float)), n);
        for (int kind = 0; kind < KINDS; kind++)
            for (int rule = 0; rule < NIB_TENSOR_SCALE_RULE_COUNT; rule++) {
                nib_quantizer q = sweep(true);
                q.tensor_scale_rule = (nib_tensor_scale_rule)rule;
                const nib_array x = random_matrix((enum kind)kind, dtypes[kind % 3], sizes[s][0], n);
                nib_tensor *before = quantize(&q, &x, NULL), *after = clone_of(before);
                CHECK_OK(nib_gptq(&x, f.order, f.u, n, after));
                CHECK_SAME(before, after);
                CHECK_OK(nib_gptq(&x, none.order, none.u, n, after));
                CHECK_SAME(before, after);
                nib_tensor_destroy(before), nib_tensor_destroy(after);
                free(x.data);
            }
        free_factor(f), free_factor(none);
    }
}

/* tr(D H D^T), where D is what the codes are off by. */
static double loss_of(const nib_tensor *t, const float *x, float *h, int64_t rows, int64_t n)
{
    float *y = malloc((size_t)(rows * n) * sizeof *y);
    double loss = 0;
    dequantize(t, NIB_ROWWISE, NIB_F32, y);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++)
                loss += ((double)y[r * n + i] - (double)x[r * n + i]) * (double)*place(h, n, i, j) *
                        ((double)y[r * n + j] - (double)x[r * n + j]);
    free(y);
    return loss;
}

TEST(errors_of_outputs_fall)
{
    enum { SEEDS = 100, ROWS = 64, COLS = 64 };
    double logs = 0;
    for (int seed = 0; seed < SEEDS; seed++) {
        const struct factor f = factor_of(random_hessian(COLS, 4 * COLS, 0), COLS);
        float importance[COLS];
        const nib_quantizer q = sweep(true);
        const nib_array x = random_matrix(NORMAL, NIB_F32, ROWS, COLS);
        for (int k = 0; k < COLS; k++)
            importance[k] = *place(f.h, COLS, k, k);
        CHECK_OK(nib_importance_normalize(importance, COLS, importance));
        const nib_overrides overrides = { .bytes = sizeof overrides,
                                          .importance = importance,
                                          .importance_count = COLS };
        nib_tensor *t = quantize(&q, &x, &overrides);
        const double before = loss_of(t, x.data, f.h, ROWS, COLS);
        CHECK_OK(nib_gptq(&x, f.order, f.u, COLS, t));
        const double after = loss_of(t, x.data, f.h, ROWS, COLS);
        CHECK_THAT(after < before, "seed %d: %g is not less than %g", seed, after, before);
        logs += log(after / before) / SEEDS;
        nib_tensor_destroy(t);
        free(x.data);
        free_factor(f);
    }
    CHECK_THAT(exp(logs) <= 0.8, "the mean is %.3f", exp(logs));
}

/* ---- Odd inputs ---- */

TEST(a_row_that_is_not_finite_stays)
{
    const int64_t rows = 40, cols = 48;
    const struct factor f = factor_of(random_hessian(cols, 100, 0), cols);
    const nib_quantizer q = sweep(true);
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    for (int i = 0; i < 3; i++) {
        nib_array x = random_matrix(NORMAL, NIB_F32, rows, cols);
        float *values = x.data, amax = 5;
        const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, NULL } };
        nib_tensor *clean = quantize(&q, &x, &overrides);
        CHECK_OK(nib_gptq(&x, f.order, f.u, cols, clean));
        values[7 * cols + 5] = bad[i];
        nib_tensor *before = quantize(&q, &x, &overrides), *after = clone_of(before), *wanted = NULL, *got = NULL;
        CHECK_OK(nib_gptq(&x, f.order, f.u, cols, after));
        CHECK_OK(nib_tensor_slice(before, 7, 1, &wanted));
        CHECK_OK(nib_tensor_slice(after, 7, 1, &got));
        CHECK_SAME(wanted, got);
        nib_tensor_destroy(wanted), nib_tensor_destroy(got);
        for (int64_t r = 0; r < rows; r++)
            CHECK(r == 7 || !memcmp(bytes_of(clean, NIB_ROW_DATA) + r * cols / 2,
                                    bytes_of(after, NIB_ROW_DATA) + r * cols / 2, (size_t)cols / 2));
        nib_tensor_destroy(clean), nib_tensor_destroy(before), nib_tensor_destroy(after);
        free(x.data);
    }
    free_factor(f);
}

/* Channels without input come last, by their indices, and nothing is made up for by them. */
TEST(dead_channels_come_last)
{
    enum { N = 40 };
    float *h = random_hessian(N, 80, 4);
    int32_t order[N];
    float u[N * N];
    CHECK_OK(nib_gptq_factorize(h, N, 0.1, NULL, order, u, NULL));
    for (int i = 0; i < 4; i++) {
        CHECK(order[N - 4 + i] == i * N / 4);
        for (int j = 0; j < N; j++)
            CHECK(j == N - 4 + i || u[(N - 4 + i) * N + j] == 0);
        for (int j = 0; j < N - 4 + i; j++)
            CHECK(u[j * N + N - 4 + i] == 0);
    }
    for (int i = 1; i < N; i++)
        CHECK(*place(h, N, order[i - 1], order[i - 1]) >= *place(h, N, order[i], order[i]));
    free(h);
}

/* Zeros of a block whose scale is 0 have the signs of its values; the errors go on. */
TEST(a_scale_of_zero)
{
    enum { N = 32 };
    float values[N], big = 1e30f;
    for (int i = 0; i < N; i++)
        values[i] = (i % 3 ? 1.0f : -1.0f) * (i < 16 ? 1 : 1e20f) * (1 + (float)i / 64);
    const nib_array x = array_of(values, NIB_F32, DIMS(1, N));
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &big, NULL } };
    const nib_quantizer q = sweep(false);
    const struct factor f = factor_of(unit_hessian(N), N);
    nib_tensor *t = quantize(&q, &x, &overrides);
    CHECK(bytes_of(t, NIB_ROW_SCALE)[0] == 0);
    CHECK_OK(nib_gptq(&x, f.order, f.u, N, t));
    for (int i = 0; i < 16; i++)
        CHECK((bytes_of(t, NIB_ROW_DATA)[i / 2] >> 4 * (i % 2) & 15) == (i % 3 ? 0 : 8));
    nib_tensor_destroy(t);
    free_factor(f);
}

/* ---- What is rejected ---- */

/* In the first tile, and in the last, where other threads wait for it: the next try has the bytes of one that needs no other. */
TEST(tiles_that_are_not_positive_definite_are_tried_again)
{
    enum { N = 600 };
    const size_t bytes = (size_t)N * N * sizeof(float);
    float *wanted = malloc(bytes), *u = malloc(bytes);
    int32_t order[N];
    for (int k = 0; k < N; k += N - 2) {
        float *h = unit_hessian(N);
        *place(h, N, k, k + 1) = 3;
        CHECK_OK(nib_factorize(host_of(1), NULL, h, N, 10, order, wanted, &(double){ 0 }));
        for (size_t t = 0; t < sizeof thread_counts / sizeof *thread_counts; t++) {
            double damped = 0;
            CHECK_OK(nib_factorize(host_of(thread_counts[t]), NULL, h, N, 0.1, order, u, &damped));
            CHECK(damped == 10);
            CHECK_BYTES(u, wanted, bytes);
        }
        free(h);
    }
    free(wanted), free(u);
}

TEST(hessians_that_are_rejected)
{
    enum { N = 33 };
    int32_t order[N];
    float u[N * N];
    double damped = 7;
    static const struct {
        int row, col;
        float value;
        nib_status status;
        const char *words;
    } cases[] = { { 5, 9, NAN, NIB_ERR_ARG, "(5, 9) of the Hessian is a NaN" },
                  { 32, 32, INFINITY, NIB_ERR_ARG, "(32, 32) of the Hessian is infinite" },
                  { 0, 32, -INFINITY, NIB_ERR_ARG, "(0, 32) of the Hessian is infinite" },
                  { 4, 4, -1e-30f, NIB_ERR_ARG, "(4, 4) of the Hessian is negative" },
                  { 1, 2, 1000, NIB_ERR_DATA, "not positive definite" } };
    memset(order, 0x33, sizeof order), memset(u, 0x33, sizeof u);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float *h = unit_hessian(N);
        *place(h, N, cases[i].row, cases[i].col) = cases[i].value;
        CHECK_FAILS(nib_gptq_factorize(h, N, 0.1, NULL, order, u, &damped), cases[i].status, cases[i].words);
        free(h);
    }
    float *h = unit_hessian(N);
    static const double damps[] = { -0.1, NAN, INFINITY };
    for (int i = 0; i < 3; i++)
        CHECK_FAILS(nib_gptq_factorize(h, N, damps[i], NULL, order, u, &damped), NIB_ERR_ARG, "damping");
    CHECK_FAILS(nib_gptq_factorize(h, 0, 0.1, NULL, order, u, &damped), NIB_ERR_SHAPE, "not 0");
    CHECK_FAILS(nib_gptq_factorize(h, INT64_MAX, 0.1, NULL, order, u, &damped), NIB_ERR_SHAPE, "columns");
    CHECK_FAILS(nib_gptq_factorize(NULL, N, 0.1, NULL, order, u, &damped), NIB_ERR_ARG, "hessian");
    CHECK_FAILS(nib_gptq_factorize(h, N, 0.1, NULL, NULL, u, &damped), NIB_ERR_ARG, "order");
    CHECK_FAILS(nib_gptq_factorize(h, N, 0.1, NULL, order, NULL, &damped), NIB_ERR_ARG, "u is NULL");
    for (size_t i = 0; i < sizeof u; i++)
        CHECK(((char *)u)[i] == 0x33);
    for (size_t i = 0; i < sizeof order; i++)
        CHECK(((char *)order)[i] == 0x33);
    CHECK(damped == 7);
    *place(h, N, 1, 2) = 3; /* eigenvalues 4 and -2: 0.1 and 1 do not do, 10 does */
    CHECK_OK(nib_gptq_factorize(h, N, 0.1, NULL, order, u, &damped));
    CHECK(damped == 10);
    CHECK_FAILS(nib_gptq_factorize(h, N, 0, NULL, order, u, &damped), NIB_ERR_DATA, "not positive definite");
    *place(h, N, 1, 2) = 0;
    CHECK_OK(nib_gptq_factorize(h, N, 0, NULL, order, u, NULL));
    for (int i = 0; i < N; i++)
        CHECK(order[i] == i && u[i * N + i] == 1);
    free(h);
}

TEST(tensors_that_are_rejected)
{
    enum { N = 32 };
    const struct factor f = factor_of(unit_hessian(N), N);
    const nib_array x = random_matrix(NORMAL, NIB_F32, 16, N), other = random_matrix(NORMAL, NIB_F32, 15, N);
    nib_quantizer modes[6];
    static const struct {
        nib_status status;
        const char *words;
    } wanted[6] = { { NIB_ERR_MODE, "dialect te" }, { NIB_ERR_MODE, "1x16" },           { NIB_ERR_MODE, "RHT" },
                    { NIB_ERR_MODE, "nearest" },    { NIB_ERR_USAGE, "rowwise usage" }, { NIB_ERR_MODE, "NVFP4" } };
    for (int i = 0; i < 6; i++)
        modes[i] = usages(1, i == 4);
    modes[0].dialect = NIB_DIALECT_TORCHAO;
    modes[1].block_dims[0] = 16;
    modes[2].rht_rowwise = 1;
    modes[3].rounding = NIB_ROUND_STOCHASTIC_24;
    CHECK_OK(nib_quantizer_init_format(&modes[5], NIB_MXFP4));
    modes[5].columnwise = 0;
    for (int i = 0; i < 6; i++) {
        nib_tensor *t = quantize(&modes[i], &x, NULL), *before = clone_of(t);
        CHECK_FAILS(nib_gptq(&x, f.order, f.u, N, t), wanted[i].status, wanted[i].words);
        CHECK(equal(t, before));
        nib_tensor_destroy(t), nib_tensor_destroy(before);
    }
    const nib_quantizer q = sweep(true);
    nib_tensor *t = quantize(&q, &x, NULL);
    CHECK_FAILS(nib_gptq(&other, f.order, f.u, N, t), NIB_ERR_MISMATCH, "shape");
    CHECK_FAILS(nib_gptq(&x, f.order, f.u, N - 1, t), NIB_ERR_MISMATCH, "31 columns");
    CHECK_FAILS(nib_gptq(NULL, f.order, f.u, N, t), NIB_ERR_ARG, "x is NULL");
    CHECK_FAILS(nib_gptq(&x, NULL, f.u, N, t), NIB_ERR_ARG, "order");
    CHECK_FAILS(nib_gptq(&x, f.order, NULL, N, t), NIB_ERR_ARG, "u is NULL");
    CHECK_FAILS(nib_gptq(&x, f.order, f.u, N, NULL), NIB_ERR_ARG, "t is NULL");
    static const int32_t orders[] = { -1, N, 0 };
    for (int i = 0; i < 3; i++) {
        f.order[3] = orders[i];
        CHECK_FAILS(nib_gptq(&x, f.order, f.u, N, t), NIB_ERR_ARG, "order[3]");
    }
    f.order[3] = 3;
    static const float pivots[] = { 0, -1, NAN, INFINITY };
    for (int i = 0; i < 4; i++) {
        f.u[3 * N + 3] = pivots[i];
        CHECK_FAILS(nib_gptq(&x, f.order, f.u, N, t), NIB_ERR_ARG, "u[3][3]");
    }
    static const float extremes[] = { FLT_MIN, FLT_MAX };
    for (int i = 0; i < 2; i++) {
        f.u[3 * N + 3] = extremes[i];
        CHECK_OK(nib_gptq(&x, f.order, f.u, N, t));
    }
    nib_tensor_destroy(t);
    free(x.data), free(other.data);
    free_factor(f);
}

TEST_MAIN
