/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gemm.c - nib_gemm_reference bit for bit against its definition, over every kind of operand.
 *
 * The definition: one FP32 accumulator per output, acc += (sa * sb) * dot in the order of the blocks; then the two
 * tensor scales in one factor, f32(f32(amax_a * amax_b) / f32(36 * ma * mb)) or, with decode scales, f32(ga * gb); and y =
 * f32(factor * acc).
 */
#include "test_tensors.h"

#include <math.h>

/* ---- Operands unpacked by hand ---- */

/* The value of an E4M3 code that is not a NaN. */
static double e4m3(uint8_t code)
{
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

static double e2m1(int code)
{
    static const double magnitudes[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

struct operand {
    int64_t lines, length, blocks;
    double *codes;        /* [lines][length] */
    double *scales;       /* [lines][blocks] */
    float *tensor_scales; /* [lines] */
    nib_tensor_scale tensor_scale;
    float e4m3_max;
};

static struct operand unpack(const nib_tensor *t, nib_usage usage)
{
    const nib_metadata m = metadata_of(t);
    struct operand o = { .lines = usage ? m.cols : m.rows,
                         .length = usage ? m.rows : m.cols,
                         .tensor_scale = m.tensor_scale };
    o.blocks = (o.length + 15) / 16;
    o.e4m3_max = (float)m.quantizer->e4m3_max;
    o.codes = calloc((size_t)(o.lines * o.length + 1), sizeof *o.codes);
    o.scales = calloc((size_t)(o.lines * o.blocks + 1), sizeof *o.scales);
    o.tensor_scales = calloc((size_t)(o.lines + 1), sizeof *o.tensor_scales);
    const uint8_t *data = nib_buffer_data(nib_tensor_buffer(t, usage ? NIB_COL_DATA : NIB_ROW_DATA));
    const uint8_t *scale = nib_buffer_data(nib_tensor_buffer(t, usage ? NIB_COL_SCALE : NIB_ROW_SCALE));
    const float *tensor_scale =
        nib_buffer_data(nib_tensor_buffer(t, usage ? NIB_COL_TENSOR_SCALE : NIB_ROW_TENSOR_SCALE));
    const int64_t stride = round_up(o.blocks, 4);
    for (int64_t i = 0; i < o.lines; i++) {
        for (int64_t k = 0; k < o.length; k++)
            o.codes[i * o.length + k] = e2m1(data[i * ((o.length + 1) / 2) + k / 2] >> (k % 2 ? 4 : 0) & 15);
        for (int64_t b = 0; b < o.blocks; b++)
            o.scales[i * o.blocks + b] = e4m3(scale[scale_place(i, b, stride, m.quantizer->swizzled)]);
        o.tensor_scales[i] = tensor_scale[m.quantizer->row_scaled ? i : 0];
    }
    return o;
}

static void discard(struct operand *o)
{
    free(o->codes);
    free(o->scales);
    free(o->tensor_scales);
}

static float decode_scale(const struct operand *o, int64_t line)
{
    return o->tensor_scale == NIB_TENSOR_SCALE_AMAX         ? o->tensor_scales[line] / (6.0f * o->e4m3_max)
           : o->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER ? o->tensor_scales[line]
                                                            : 1.0f / o->tensor_scales[line];
}

/* One output. */
static float product_of(const struct operand *a, int64_t i, const struct operand *b, int64_t j)
{
    float acc = 0;
    for (int64_t block = 0; block < a->blocks; block++) {
        double dot = 0; /* exact in FP32, so that double changes nothing */
        for (int64_t k = 16 * block; k < a->length && k < 16 * block + 16; k++)
            dot += a->codes[i * a->length + k] * b->codes[j * b->length + k];
        const double term = a->scales[i * a->blocks + block] * b->scales[j * b->blocks + block] * dot;
        CHECK((double)(float)term == term);
        acc += (float)term;
    }
    if (a->tensor_scale == NIB_TENSOR_SCALE_AMAX && b->tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return a->tensor_scales[i] * b->tensor_scales[j] / (36.0f * a->e4m3_max * b->e4m3_max) * acc;
    return decode_scale(a, i) * decode_scale(b, j) * acc;
}

/* The product of two usages against the definition: plain, then with alpha and on top of what is there. */
static void check_product(const char *what, const nib_tensor *ta, nib_usage ca, const nib_tensor *tb, nib_usage cb)
{
    struct operand a = unpack(ta, ca), b = unpack(tb, cb);
    const size_t n = (size_t)(a.lines * b.lines);
    float *y = malloc((n + 1) * sizeof *y), *before = malloc((n + 1) * sizeof *before);
    float *products = malloc((n + 1) * sizeof *products);
    nib_array out = { 0 };
    CHECK(a.length == b.length);
    for (int64_t i = 0; i < a.lines; i++)
        for (int64_t j = 0; j < b.lines; j++)
            products[i * b.lines + j] = product_of(&a, i, &b, j);
    CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(a.lines, b.lines)));
    static const float alphas[] = { 1, -0.5f, 0, 4 }; /* no rounding depends on where such factors come in */
    for (int accumulate = 0; accumulate < 2; accumulate++)
        for (size_t k = 0; k < sizeof alphas / sizeof *alphas; k++) {
            for (size_t i = 0; i < n; i++)
                before[i] = y[i] = accumulate ? test_normal() : NAN; /* what is not added to is not read */
            CHECK_OK(reference_product(ta, ca, tb, cb, alphas[k], accumulate, &out));
            for (size_t i = 0; i < n; i++) {
                const float product = products[i] * alphas[k], wanted = accumulate ? product + before[i] : product;
                if (memcmp(&wanted, &y[i], sizeof wanted) && !(wanted == 0 && y[i] == 0)) {
                    CHECK_THAT(false, "%s: output %zu is %a, not %a", what, i, (double)y[i], (double)wanted);
                    break;
                }
            }
        }
    free(y);
    free(before);
    free(products);
    discard(&a);
    discard(&b);
}

/* ---- The definition ---- */

/* Every pair of copies, inner sizes with and without tails. */
TEST(usages)
{
    static const int64_t inner[] = { 1, 2, 15, 16, 17, 33, 64, 100 };
    const nib_quantizer q = default_quantizer();
    for (size_t s = 0; s < sizeof inner / sizeof *inner; s++)
        for (int ca = 0; ca < 2; ca++)
            for (int cb = 0; cb < 2; cb++) {
                nib_tensor *a = ca ? some(&q, DIMS(inner[s], 9)) : some(&q, DIMS(9, inner[s]));
                nib_tensor *b = cb ? some(&q, DIMS(inner[s], 13)) : some(&q, DIMS(13, inner[s]));
                check_product("copies", a, (nib_usage)ca, b, (nib_usage)cb);
                nib_tensor_destroy(a);
                nib_tensor_destroy(b);
            }
}

/* NIB_EITHER is the rowwise usage where there is one. */
TEST(either)
{
    nib_quantizer both = default_quantizer(), col = default_quantizer();
    col.rowwise = 0;
    nib_tensor *a = some(&both, DIMS(8, 32)), *b = some(&col, DIMS(32, 8));
    float y[64], z[64];
    nib_array out, out2;
    CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(8, 8)));
    CHECK_OK(nib_array_init(&out2, z, NIB_F32, DIMS(8, 8)));
    CHECK_OK(reference_product(a, NIB_EITHER, b, NIB_EITHER, 1, 0, &out));
    CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_COLUMNWISE, 1, 0, &out2));
    CHECK_BYTES(y, z, sizeof y);
    CHECK_FAILS(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 1, 0, &out), NIB_ERR_USAGE, "no rowwise usage");
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

/* Leading dims are rows. */
TEST(higher_ranks)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *a = some(&q, DIMS(24, 32)), *b = some(&q, DIMS(6, 32)), *view = NULL;
    CHECK_OK(nib_tensor_view(a, DIMS(2, 3, 4, 32), &view));
    check_product("rank 4", view, NIB_ROWWISE, b, NIB_ROWWISE);
    nib_tensor_destroy(view);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

/* Every kind of tensor on each side: tensor scales, row scaling, layouts, block shapes. */
enum { KINDS = 11 };

static const char *kind(int i, nib_quantizer *q)
{
    static const char *const names[KINDS] = { "amax",         "swizzled", "row-scaled", "row-scaled swizzled",
                                              "exact",        "pow2",     "gist",       "torchao",
                                              "compressed-t", "4over6",   "16x16" };
    *q = default_quantizer();
    q->swizzled = i == 1 || i == 3;
    q->row_scaled = i == 2 || i == 3;
    q->tensor_scale_rule = i == 4   ? NIB_TENSOR_SCALE_RULE_EXACT
                           : i == 5 ? NIB_TENSOR_SCALE_RULE_POW2
                                    : NIB_TENSOR_SCALE_RULE_DIALECT;
    q->dialect = i == 6   ? NIB_DIALECT_GIST
                 : i == 7 ? NIB_DIALECT_TORCHAO
                 : i == 8 ? NIB_DIALECT_COMPRESSED_TENSORS
                          : NIB_DIALECT_TE;
    if (i == 9)
        q->scale_rule = NIB_SCALE_4OVER6, q->e4m3_max = 256;
    q->block_dims[0] = i == 10 ? 16 : 1;
    return names[i];
}

TEST(kinds)
{
    nib_tensor *a[KINDS], *b[KINDS];
    const char *names[KINDS];
    for (int i = 0; i < KINDS; i++) {
        nib_quantizer q;
        names[i] = kind(i, &q);
        a[i] = some(&q, DIMS(11, 38));
        b[i] = some(&q, DIMS(38, 11)); /* its columnwise usage has the same form as a's rowwise one */
    }
    for (int i = 0; i < KINDS; i++)
        for (int j = 0; j < KINDS; j++) {
            char what[80];
            snprintf(what, sizeof what, "%s by %s", names[i], names[j]);
            check_product(what, a[i], NIB_ROWWISE, a[j], NIB_ROWWISE);
            check_product(what, a[i], NIB_ROWWISE, b[j], NIB_COLUMNWISE);
            check_product(what, b[i], NIB_COLUMNWISE, b[j], NIB_COLUMNWISE);
        }
    for (int i = 0; i < KINDS; i++) {
        nib_tensor_destroy(a[i]);
        nib_tensor_destroy(b[i]);
    }
}

/* More lines than one swizzled tile has. */
TEST(many_tiles)
{
    nib_quantizer q = default_quantizer();
    for (int swizzled = 0; swizzled < 2; swizzled++) {
        q.swizzled = (uint8_t)swizzled;
        nib_tensor *a = some(&q, DIMS(150, 200)), *b = some(&q, DIMS(140, 200));
        check_product("tiles", a, NIB_ROWWISE, b, NIB_ROWWISE);
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
}

/* The arithmetic is the product: against the dequantized matrices in double. */
TEST(is_the_product)
{
    for (int i = 0; i < KINDS; i++) {
        nib_quantizer q;
        const char *name = kind(i, &q);
        enum { M = 20, N = 12, K = 90 };
        nib_tensor *a = some(&q, DIMS(M, K)), *b = some(&q, DIMS(N, K));
        static float xa[M * K], xb[N * K], y[M * N];
        nib_array da, db, out;
        CHECK_OK(nib_array_init(&da, xa, NIB_F32, DIMS(M, K)));
        CHECK_OK(nib_array_init(&db, xb, NIB_F32, DIMS(N, K)));
        CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(M, N)));
        CHECK_OK(nib_dequantize(a, NIB_ROWWISE, &da));
        CHECK_OK(nib_dequantize(b, NIB_ROWWISE, &db));
        CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 0.3f, 0, &out));
        for (int r = 0; r < M; r++)
            for (int c = 0; c < N; c++) {
                double sum = 0, size = 0;
                for (int k = 0; k < K; k++) {
                    sum += (double)xa[r * K + k] * xb[c * K + k];
                    size += fabs((double)xa[r * K + k] * xb[c * K + k]);
                }
                /* six roundings across blocks, and fewer than ten in tensor scales, alpha and dequantization */
                CHECK_THAT(fabs(y[r * N + c] - (double)0.3f * sum) <= 16 * 0x1p-24 * size, "%s (%d, %d)", name, r, c);
            }
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
}

TEST(no_elements)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *a = some(&q, DIMS(3, 0)), *b = some(&q, DIMS(2, 0)), *c = some(&q, DIMS(0, 16)),
               *d = some(&q, DIMS(5, 16));
    float y[6] = { 9, 9, 9, 9, 9, 9 };
    nib_array out;
    CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(3, 2)));
    CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 1, 1, &out));
    CHECK(y[0] == 9 && y[5] == 9);
    CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 1, 0, &out));
    CHECK(y[0] == 0 && y[5] == 0); /* a sum of nothing */
    CHECK_OK(nib_array_init(&out, NULL, NIB_F32, DIMS(0, 5)));
    CHECK_OK(reference_product(c, NIB_ROWWISE, d, NIB_ROWWISE, 1, 0, &out));
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    nib_tensor_destroy(c);
    nib_tensor_destroy(d);
}

/* ---- Outputs and threads ---- */

/* A line ends with its last block: what lies behind its scales is not looked at. */
TEST(scales_of_the_next_line)
{
    enum { K = 64 }; /* four blocks: no padding between lines of scales */
    const nib_quantizer q = usages(1, 0);
    float y[4] = { 0 };
    nib_tensor *a = some(&q, DIMS(2, K));
    const nib_array out = array_of(y, NIB_F32, DIMS(2, 2));
    bytes_of(a, NIB_ROW_SCALE)[4] = 0x7F; /* the first of the second line: a NaN */
    CHECK_OK(reference_product(a, NIB_ROWWISE, a, NIB_ROWWISE, 1, 0, &out));
    CHECK(isfinite(y[0]) && isnan(y[1]) && isnan(y[2]) && isnan(y[3]));
    nib_tensor_destroy(a);
}

TEST(strided_outputs)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *a = some(&q, DIMS(5, 48)), *b = some(&q, DIMS(7, 48));
    float y[35], wide[200];
    nib_array out, strided;
    CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(5, 7)));
    CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 1, 0, &out));
    static const int64_t forms[][3] = { { 20, 2, 0 }, { 1, 5, 0 }, { -20, 1, 80 }, { 3, -21, 126 }, { -7, -1, 34 } };
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        for (int i = 0; i < 200; i++)
            wide[i] = 99;
        strided = out;
        strided.data = wide;
        strided.bytes = sizeof wide;
        strided.strides[0] = forms[f][0];
        strided.strides[1] = forms[f][1];
        strided.offset = (size_t)forms[f][2] * sizeof(float);
        CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 1, 0, &strided));
        int written = 0;
        for (int i = 0; i < 200; i++)
            written += wide[i] != 99;
        CHECK(written == 35);
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 7; j++)
                CHECK(wide[forms[f][2] + i * forms[f][0] + j * forms[f][1]] == y[i * 7 + j]);
    }
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

TEST(threads)
{
    enum { M = 67, N = 45, K = 130 }; /* enough work for seven */
    float *xa = normals(M * K), *xb = normals(N * K), y[2][M * N];
    for (int i = 0; i < 2; i++) {
        nib_quantizer q = default_quantizer();
        nib_tensor *a = quantize_f32(&q, xa, DIMS(M, K)), *b = quantize_f32(&q, xb, DIMS(N, K));
        nib_array out;
        CHECK_OK(nib_array_init(&out, y[i], NIB_F32, DIMS(M, N)));
        out.device = host_of(i ? 7 : 1);
        CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 1.7f, 0, &out));
        CHECK_OK(reference_product(a, NIB_ROWWISE, b, NIB_ROWWISE, 0.1f, 1, &out));
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
    CHECK_BYTES(y[0], y[1], sizeof y[0]);
    free(xa);
    free(xb);
}

/* ---- Transformed operands ---- */

/* The transform is orthogonal, so that the product of two transformed copies is the product. Its distance from the
 * exact one follows from the format: with s <= 17/16 amax/6 as a block's scale (E4M3 rounds by at most 1/16), an
 * element errs by at most s, half of the largest step or the most that is clipped; a block of 16 thus by at most 4 s <=
 * 0.71 amax <= 0.71 of its length, and by Cauchy and Schwarz each pair of blocks by (0.71 + 0.71 + 0.71^2) times the
 * product of their lengths. */
static void check_close(const nib_tensor *a, nib_usage ca, const float *xa, const nib_tensor *b, nib_usage cb,
                        const float *xb, int64_t m, int64_t n, int64_t k)
{
    float *y = malloc((size_t)(m * n) * sizeof *y);
    nib_array out = { 0 };
    CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(m, n)));
    CHECK_OK(reference_product(a, ca, b, cb, 1, 0, &out));
    double error = 0, size = 0;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double exact = 0, bound = 0;
            for (int64_t k0 = 0; k0 < k; k0 += 16) {
                double la = 0, lb = 0;
                for (int64_t l = k0; l < k0 + 16; l++) {
                    const double va = ca ? xa[l * m + i] : xa[i * k + l], vb = cb ? xb[l * n + j] : xb[j * k + l];
                    exact += va * vb;
                    la += va * va;
                    lb += vb * vb;
                }
                bound += (2 * 0.71 + 0.71 * 0.71) * sqrt(la * lb);
            }
            CHECK_THAT(fabs(y[i * n + j] - exact) <= bound, "(%d, %d): %g, exactly %g", (int)i, (int)j,
                       (double)y[i * n + j], exact);
            error += pow(y[i * n + j] - exact, 2);
            size += bound * bound;
        }
    CHECK(error < 0.02 * size); /* on the whole far within what a single one may err */
    free(y);
}

TEST(transformed)
{
    enum { M = 40, N = 24, K = 96 };
    float *xa = normals(K * M), *xb = normals(K * N), *xc = normals(M * K);
    static const uint16_t masks[] = { NIB_RHT_SIGN_MASK, 0, 0xFFFF };
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++)
        for (int swizzled = 0; swizzled < 2; swizzled++) {
            nib_quantizer q = default_quantizer();
            q.rht = 1;
            q.rht_sign_mask = masks[i];
            q.swizzled = (uint8_t)swizzled;
            nib_tensor *a = quantize_f32(&q, xa, DIMS(K, M)), *b = quantize_f32(&q, xb, DIMS(K, N));
            check_product("transformed", a, NIB_COLUMNWISE, b, NIB_COLUMNWISE);
            check_close(a, NIB_COLUMNWISE, xa, b, NIB_COLUMNWISE, xb, M, N, K);
            /* A rowwise usage that is transformed, too, goes with them. */
            q.rht = q.columnwise = 0;
            q.rht_rowwise = 1;
            nib_tensor *c = quantize_f32(&q, xc, DIMS(M, K));
            check_product("transformed rowwise", c, NIB_ROWWISE, b, NIB_COLUMNWISE);
            check_close(c, NIB_ROWWISE, xc, b, NIB_COLUMNWISE, xb, M, N, K);
            nib_tensor_destroy(a);
            nib_tensor_destroy(b);
            nib_tensor_destroy(c);
        }
    free(xa);
    free(xb);
    free(xc);
}

TEST(transformed_mismatches)
{
    nib_quantizer none = default_quantizer(), te = default_quantizer(), other = default_quantizer(),
                  rows = default_quantizer();
    te.rht = other.rht = rows.rht_rowwise = 1;
    other.rht_sign_mask ^= 0x10;
    nib_tensor *t[4] = { some(&none, DIMS(32, 32)), some(&te, DIMS(32, 32)), some(&other, DIMS(32, 32)),
                         some(&rows, DIMS(32, 32)) };
    /* The mask of each usage; -1 where it is not transformed. */
    const int masks[4][2] = {
        { -1, -1 }, { -1, NIB_RHT_SIGN_MASK }, { -1, NIB_RHT_SIGN_MASK ^ 0x10 }, { NIB_RHT_SIGN_MASK, -1 }
    };
    float y[32 * 32];
    nib_array out;
    CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(32, 32)));
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            y[0] = 99;
            const nib_status status =
                reference_product(t[i / 2], (nib_usage)(i % 2), t[j / 2], (nib_usage)(j % 2), 1, 0, &out);
            const bool agree = masks[i / 2][i % 2] == masks[j / 2][j % 2];
            CHECK_THAT(status == (agree ? NIB_OK : NIB_ERR_MISMATCH), "%d, %d: %s", i, j, nib_status_name(status));
            CHECK(agree || (y[0] == 99 && strstr(nib_last_error(), "transformed")));
        }
    for (int i = 0; i < 4; i++)
        nib_tensor_destroy(t[i]);
}

/* ---- Rejections ---- */

TEST(rejections)
{
    nib_quantizer q = default_quantizer(), row = default_quantizer();
    row.columnwise = 0;
    nib_tensor *a = some(&q, DIMS(4, 32)), *b = some(&row, DIMS(6, 32)), *c = some(&q, DIMS(6, 48)),
               *empty = some(&q, DIMS(4, 32));
    nib_tensor_clear(empty);
    float y[64];
    for (int i = 0; i < 64; i++)
        y[i] = 99;
    nib_array out, bad;
    CHECK_OK(nib_array_init(&out, y, NIB_F32, DIMS(4, 6)));
#define GEMM(a, ca, b, cb, y) reference_product(a, ca, b, cb, 1, 0, y)
    CHECK_FAILS(GEMM(NULL, NIB_ROWWISE, b, NIB_ROWWISE, &out), NIB_ERR_ARG, "a is NULL");
    CHECK_FAILS(GEMM(a, NIB_ROWWISE, NULL, NIB_ROWWISE, &out), NIB_ERR_ARG, "b is NULL");
    CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, NIB_ROWWISE, NULL), NIB_ERR_ARG, "y is NULL");
    CHECK_FAILS(GEMM(a, (nib_usage)3, b, NIB_ROWWISE, &out), NIB_ERR_ARG, "3 is not a usage");
    CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, (nib_usage)-1, &out), NIB_ERR_ARG, "-1 is not a usage");
    CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, NIB_COLUMNWISE, &out), NIB_ERR_USAGE, "no columnwise usage");
    CHECK_FAILS(GEMM(empty, NIB_EITHER, b, NIB_ROWWISE, &out), NIB_ERR_USAGE, "no data");
    CHECK_FAILS(GEMM(a, NIB_ROWWISE, c, NIB_ROWWISE, &out), NIB_ERR_MISMATCH, "32 and 48");
    CHECK_FAILS(GEMM(a, NIB_COLUMNWISE, b, NIB_ROWWISE, &out), NIB_ERR_MISMATCH, "4 and 32");
    for (int dtype = 0; dtype < NIB_DTYPE_COUNT; dtype++)
        if (dtype != NIB_F32 && dtype != NIB_BF16 && dtype != NIB_F16) {
            bad = out;
            bad.dtype = (nib_dtype)dtype;
            bad.bytes = sizeof y;
            CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, NIB_ROWWISE, &bad), NIB_ERR_DTYPE, nib_dtype_name((nib_dtype)dtype));
        }
    static const int64_t shapes[][3] = { { 6, 4, 2 }, { 4, 5, 2 }, { 24, 0, 1 }, { 0, 6, 2 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        CHECK_OK(nib_array_init(&bad, y, NIB_F32, (int)shapes[i][2], shapes[i]));
        CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, NIB_ROWWISE, &bad), NIB_ERR_SHAPE, "y must be [4, 6]");
    }
    CHECK_OK(nib_array_init(&bad, y, NIB_F32, DIMS(1, 4, 6)));
    CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, NIB_ROWWISE, &bad), NIB_ERR_SHAPE, "y must be [4, 6]");
    for (int i = 0; i < 2; i++) {
        bad = out;
        bad.strides[i] = 0;
        CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, NIB_ROWWISE, &bad), NIB_ERR_SHAPE, "stride 0");
    }
    bad = out;
    bad.bytes -= 1;
    CHECK_FAILS(GEMM(a, NIB_ROWWISE, b, NIB_ROWWISE, &bad), NIB_ERR_SHAPE, "leave its 95 bytes");
    for (int i = 0; i < 64; i++)
        CHECK(y[i] == 99);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    nib_tensor_destroy(c);
    nib_tensor_destroy(empty);
}

TEST_MAIN
