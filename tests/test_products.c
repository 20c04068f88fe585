/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_products.c - nib_gemm bit for bit against nib_gemm_reference, by every instruction set of the machine; and the
 * reference against its definition, where test_gemm.c does not go: options, MXFP4, plain values, decoded values.
 */
#include "test_tensors.h"

#include <float.h>
#include <math.h>
#include <pthread.h>

#include "tensor/product.h"
#if defined(__x86_64__)
#include "tiles.h"
#endif

/* ---- Every instruction set ---- */

/* One for each line of the list that has kernels of products: those of the lines above where it has none of its own. */
enum { MOST_ISAS = 8 };
static struct isa {
    const char *name;
    struct nib_kernels kernels;
} isas[MOST_ISAS];
static int isa_count;

static void find_isas(void)
{
    struct nib_kernels merged = { .absmax = { NULL } };
    for (const struct nib_isa *isa = nib_isas; isa->name && isa_count < MOST_ISAS; isa++) {
        bool found = false;
        for (int i = 0; i < NIB_PRODUCT_SLOTS && isa->present(); i++)
            if (isa->kernels->multiply[i]) {
                merged.multiply[i] = isa->kernels->multiply[i];
                merged.pack_rows[i] = isa->kernels->pack_rows[i];
                found = true;
            }
        if (found)
            isas[isa_count++] = (struct isa){ isa->name, merged };
    }
#if defined(__x86_64__)
    if (isa_count && isa_count < MOST_ISAS && strcmp(isas[isa_count - 1].name, "avx512") == 0) {
        merged.multiply[NIB_PRODUCT_TILES] = software_products_amx.multiply[NIB_PRODUCT_TILES];
        merged.pack_rows[NIB_PRODUCT_TILES] = software_products_amx.pack_rows[NIB_PRODUCT_TILES];
        isas[isa_count++] = (struct isa){ "tiles in software", merged };
    }
#endif
}

static size_t element_bytes(nib_dtype dtype) { return (size_t)nib_dtype_bits(dtype) / 8; }

/* Random finite values of any dtype. */
static void fill(void *data, nib_dtype dtype, int64_t n)
{
    float *x = normals(n);
    CHECK_OK(nib_encode(dtype, x, (size_t)n, data));
    free(x);
}

static int64_t lines_of(const nib_operand *o)
{
    if (o->array)
        return o->array->shape[0];
    return o->usage == NIB_COLUMNWISE ? metadata_of(o->tensor).cols : metadata_of(o->tensor).rows;
}

/* The product by the reference and by every instruction set, on one thread and on several. y lies between guards in rows
 * of its own stride. */
static void check_bits(const char *what, const nib_operand *a, const nib_operand *b, const nib_gemm_options *options,
                       nib_dtype dtype)
{
    const int64_t m = lines_of(a), n = lines_of(b), stride = n + 3;
    const size_t bytes = (size_t)(m * stride) * element_bytes(dtype);
    char *before = malloc(bytes + 1), *wanted = malloc(bytes + 1), *got = malloc(bytes + 1);
    if (!isa_count)
        find_isas();
    fill(before, dtype, m * stride);
    memcpy(wanted, before, bytes);
    nib_array y = array_of(wanted, dtype, DIMS(m, n));
    y.strides[0] = stride;
    y.bytes = bytes;
    CHECK_OK(nib_gemm_reference(a, b, options, &y));
    y.data = got;
    for (int i = 1; i < isa_count; i++)
        for (int threads = 1; threads <= 3; threads += 2) {
            struct nib_product product;
            memcpy(got, before, bytes);
            CHECK_OK(nib_product_load(a, b, options, &y, &product));
            CHECK_OK(nib_products(host_of(threads), &isas[i].kernels, &product, 1));
            if (memcmp(got, wanted, bytes)) {
                int64_t at = 0;
                while (!memcmp(got + (size_t)at * element_bytes(dtype), wanted + (size_t)at * element_bytes(dtype),
                               element_bytes(dtype)))
                    at++;
                CHECK_THAT(false, "%s, %s, %d threads: %lld x %lld, output (%lld, %lld) differs", what, isas[i].name,
                           threads, (long long)m, (long long)n, (long long)(at / stride), (long long)(at % stride));
            }
        }
    free(before);
    free(wanted);
    free(got);
}

static nib_gemm_options defaults(void)
{
    nib_gemm_options o;
    nib_gemm_options_init(&o);
    return o;
}

static nib_operand rowwise(const nib_tensor *t) { return (nib_operand){ t, NULL, NIB_ROWWISE }; }
static nib_operand columnwise(const nib_tensor *t) { return (nib_operand){ t, NULL, NIB_COLUMNWISE }; }
static nib_operand plain(const nib_array *x) { return (nib_operand){ NULL, x, NIB_ROWWISE }; }

/* A usage of [lines, k] over random values. */
static nib_operand operand_of(const nib_quantizer *q, nib_usage usage, int64_t lines, int64_t k)
{
    if (usage == NIB_COLUMNWISE)
        return columnwise(some(q, DIMS(k, lines)));
    return rowwise(some(q, DIMS(lines, k)));
}

static void discard(nib_operand *o) { nib_tensor_destroy((nib_tensor *)(uintptr_t)o->tensor); }

static nib_quantizer format(nib_format f)
{
    nib_quantizer q;
    CHECK_OK(nib_quantizer_init_format(&q, f));
    return q;
}

/* Every bit pattern as a scale, NaNs among them where wanted, and codes of every kind. */
static void scramble(nib_tensor *t, bool nans)
{
    for (int part = NIB_ROW_DATA; part <= NIB_COL_SCALE; part++) {
        nib_array view;
        nib_buffer *buffer = nib_tensor_buffer(t, (nib_part)part);
        if (!buffer || nib_tensor_part(t, (nib_part)part, &view))
            continue;
        uint8_t *bytes = nib_buffer_data(buffer);
        for (size_t i = 0; i < nib_buffer_bytes(buffer); i++) {
            bytes[i] = (uint8_t)test_random();
            const bool nan = view.dtype == NIB_E8M0 ? bytes[i] == 255 : (bytes[i] & 0x7F) == 0x7F;
            if (part >= NIB_ROW_SCALE && nan && (!nans || test_below(8)))
                bytes[i] ^= 0x25;
        }
    }
}

/* ---- Bits ---- */

/* Rows from one to a few panels, odd columns and lengths. */
TEST(sizes)
{
    static const int64_t rows[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 33, 64, 130 };
    static const int64_t columns[] = { 1, 7, 16, 31, 32, 33, 50, 65, 100 };
    static const int64_t lengths[] = { 1, 15, 16, 17, 31, 64, 100, 127, 128, 129, 250, 300, 512, 513, 1090 };
    const nib_quantizer nvfp4 = default_quantizer(), mxfp4 = format(NIB_MXFP4);
    for (int i = 0; i < COUNT(rows) * 3; i++) {
        const int64_t m = rows[i % COUNT(rows)], n = columns[test_below(COUNT(columns))];
        const int64_t k = lengths[test_below(COUNT(lengths))];
        nib_operand a = operand_of(&nvfp4, (nib_usage)test_below(2), m, k),
                    b = operand_of(&nvfp4, (nib_usage)(i % 2), n, k);
        check_bits("nvfp4", &a, &b, NULL, NIB_F32);
        float *x = normals(m * k);
        const nib_array array = array_of(x, NIB_F32, DIMS(m, k));
        const nib_operand values = plain(&array);
        check_bits("nvfp4 by plain", &values, &b, NULL, NIB_F32);
        check_bits("plain by nvfp4", &b, &values, NULL, NIB_F32);
        discard(&a);
        a = operand_of(&mxfp4, (nib_usage)test_below(2), m, k);
        check_bits("mxfp4 by plain", &a, &values, NULL, NIB_F32);
        check_bits("mxfp4 by nvfp4", &a, &b, NULL, NIB_F32);
        discard(&b);
        b = operand_of(&mxfp4, (nib_usage)(i % 2), n, k);
        check_bits("mxfp4", &a, &b, NULL, NIB_F32);
        discard(&a);
        discard(&b);
        free(x);
    }
}

/* More rows than are packed at a time, and rows of many panels. */
TEST(many_rows)
{
    const nib_quantizer q = default_quantizer();
    nib_operand a = operand_of(&q, NIB_ROWWISE, 1030, 20), b = operand_of(&q, NIB_ROWWISE, 3, 20),
                c = operand_of(&q, NIB_ROWWISE, 2, 20), d = operand_of(&q, NIB_COLUMNWISE, 70, 1030),
                e = operand_of(&q, NIB_ROWWISE, 1, 1030), f = operand_of(&q, NIB_ROWWISE, 35, 4130),
                g = operand_of(&q, NIB_ROWWISE, 400, 4130), h = operand_of(&q, NIB_ROWWISE, 530, 4130),
                i = operand_of(&q, NIB_ROWWISE, 3, 4130), j = operand_of(&q, NIB_ROWWISE, 1030, 16);
    check_bits("many rows", &a, &b, NULL, NIB_F32);
    check_bits("many columns", &c, &a, NULL, NIB_F32);
    check_bits("long lines", &d, &d, NULL, NIB_F32);
    check_bits("a long line", &e, &d, NULL, NIB_F32);
    check_bits("more of k than is packed at a time", &f, &g, NULL, NIB_BF16);
    check_bits("more rows than are packed at a time", &h, &i, NULL, NIB_F32);
    check_bits("many pages of y", &j, &j, NULL, NIB_BF16);
    discard(&j);
    discard(&a), discard(&b), discard(&c), discard(&d), discard(&e), discard(&f), discard(&g), discard(&h), discard(&i);
}

/* Forms of NVFP4: layouts, tensor scales, transforms, block shapes. */
TEST(forms)
{
    enum { FORMS = 9 };
    for (int i = 0; i < FORMS * 4; i++) {
        nib_quantizer q = default_quantizer(), p = default_quantizer();
        const int form = i % FORMS;
        q.swizzled = form == 1 || form == 3;
        q.row_scaled = form == 2 || form == 3;
        p.swizzled = i / FORMS % 2 == 1;
        p.row_scaled = i / FORMS / 2 == 1;
        q.tensor_scale_rule = form == 4 ? NIB_TENSOR_SCALE_RULE_EXACT : NIB_TENSOR_SCALE_RULE_DIALECT;
        q.dialect = form == 5 ? NIB_DIALECT_GIST : NIB_DIALECT_TE;
        q.block_dims[0] = form == 6 ? 16 : 1;
        q.rht = p.rht = form == 7;
        q.rht_rowwise = p.rht_rowwise = form == 7;
        if (form == 8)
            q.scale_rule = NIB_SCALE_4OVER6, q.e4m3_max = 256;
        const bool whole = form == 7; /* a transform takes whole blocks of both axes */
        const int64_t k = whole ? 160 : 150, n = whole ? 48 : 45;
        const int64_t m = (i % 4 == 3 ? 96 : 0) + (whole ? 16 : 1 + test_below(40)); /* tiles begin at 96 */
        nib_operand a = operand_of(&q, (nib_usage)(i % 2), m, k), b = operand_of(&p, (nib_usage)test_below(2), n, k);
        check_bits("forms", &a, &b, NULL, NIB_F32);
        check_bits("forms", &b, &a, NULL, NIB_F32);
        if (form != 7) {
            float *x = normals(3 * k);
            const nib_array array = array_of(x, NIB_F32, DIMS(3, k));
            const nib_operand values = plain(&array);
            check_bits("forms by plain", &values, &a, NULL, NIB_F32);
            check_bits("plain by forms", &a, &values, NULL, NIB_F32);
            free(x);
        }
        discard(&a);
        discard(&b);
    }
}

/* Scales of any bits: negative ones, and NaNs that reach their outputs alone. */
TEST(any_scale_byte)
{
    static const int64_t rows[] = { 1, 2, 9, 20, 100 };
    for (int i = 0; i < 4 * COUNT(rows); i++) {
        nib_quantizer q = i / COUNT(rows) % 2 ? format(NIB_MXFP4) : default_quantizer();
        q.swizzled = i / COUNT(rows) / 2 == 1;
        const int64_t m = rows[i % COUNT(rows)];
        nib_operand a = operand_of(&q, NIB_ROWWISE, m, 290), b = operand_of(&q, NIB_ROWWISE, 70, 290);
        float *x = normals(m * 290);
        const nib_array array = array_of(x, NIB_F32, DIMS(m, 290));
        const nib_operand values = plain(&array);
        for (int nans = 0; nans < 2; nans++) {
            scramble((nib_tensor *)(uintptr_t)a.tensor, nans && i % 2);
            scramble((nib_tensor *)(uintptr_t)b.tensor, nans);
            check_bits("scales of any bits", &a, &b, NULL, NIB_F32);
            check_bits("scales of any bits", &values, &b, NULL, NIB_F32);
        }
        discard(&a);
        discard(&b);
        free(x);
    }
}

/* Activations of zeros, subnormals, the largest values, NaNs and infinities, among others or alone. */
TEST(any_values)
{
    enum { M = 9, K = 200, N = 40 };
    static const uint32_t special[] = { 0,          0x80000000, 1,          0x80000001, 0x007FFFFF,
                                        0x00800000, 0x0DA24260, 0x7E967699, 0x7F7FFFFF, 0xFF7FFFFF,
                                        0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001 };
    const nib_quantizer q = default_quantizer();
    nib_operand b = operand_of(&q, NIB_ROWWISE, N, K);
    for (int i = 0; i < 4 * COUNT(special); i++) {
        const nib_dtype dtype = i % 3 == 0 ? NIB_F32 : i % 3 == 1 ? NIB_BF16 : NIB_F16;
        float *x = normals(M * K), value;
        char *encoded = malloc(M * K * sizeof *x);
        memcpy(&value, &special[i % COUNT(special)], sizeof value);
        for (int64_t at = 0; at < M * K; at++)
            if (i < COUNT(special) || test_below(i % 2 ? 10 : 100) == 0)
                x[at] = value;
            else if (i % 4 == 3)
                x[at] *= 0x1p-120f;
        CHECK_OK(nib_encode(dtype, x, M * K, encoded));
        const nib_array array = array_of(encoded, dtype, DIMS(i % 2 ? M : 1, K));
        const nib_operand a = plain(&array);
        check_bits("special values", &a, &b, NULL, NIB_F32);
        free(x);
        free(encoded);
    }
    discard(&b);
}

/* The other formats, and pairs of formats. */
TEST(decoded_values)
{
    static const nib_format formats[] = { NIB_FLOAT8, NIB_MXFP8, NIB_FLOAT8_BLOCK, NIB_MXFP4, NIB_NVFP4 };
    for (int i = 0; i < COUNT(formats); i++)
        for (int j = 0; j < COUNT(formats); j++) {
            const nib_quantizer p = format(formats[i]), q = format(formats[j]);
            const int64_t m = 1 + test_below(20), n = 1 + test_below(70), k = 1 + test_below(300);
            nib_operand a = operand_of(&p, (nib_usage)test_below(2), m, k),
                        b = operand_of(&q, (nib_usage)test_below(2), n, k);
            check_bits("decoded", &a, &b, NULL, NIB_F32);
            discard(&a);
            discard(&b);
        }
}

/* alpha, beta, bias and every dtype of everything. */
TEST(options)
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    static const float factors[] = { 0, 1, -0.37f, 3e38f, 1e-30f };
    enum { M = 101, N = 45, K = 70 };
    const nib_quantizer q = default_quantizer(), mxfp4 = format(NIB_MXFP4), mxfp8 = format(NIB_MXFP8);
    for (int i = 0; i < 90; i++) {
        const nib_quantizer *const kind = i % 4 == 2 ? &mxfp4 : i % 4 == 3 ? &mxfp8 : &q;
        float bias[M], *x = normals(M * K); /* M is the larger of both */
        char encoded[M * K * 4];
        nib_gemm_options o = defaults();
        const nib_dtype dtype = dtypes[i % 3], bias_dtype = dtypes[i / 3 % 3];
        nib_array b = array_of(bias, bias_dtype, DIMS(N)), values = array_of(encoded, dtypes[i / 9 % 3], DIMS(M, K));
        fill(bias, bias_dtype, M);
        CHECK_OK(nib_encode(values.dtype, x, M * K, encoded));
        o.alpha = factors[test_below(COUNT(factors))];
        o.beta = factors[test_below(COUNT(factors))];
        o.bias = i % 5 ? &b : NULL;
        nib_operand w = operand_of(kind, NIB_ROWWISE, N, K), t = operand_of(kind, NIB_ROWWISE, M, K);
        const nib_operand v = plain(&values);
        check_bits("options", i % 2 ? &t : &v, &w, &o, dtype);
        b.strides[0] = -1, b.offset = (N - 1) * element_bytes(bias_dtype);
        check_bits("a bias backwards", i % 2 ? &t : &v, &w, &o, dtype);
        if (i % 2 == 0) { /* the bias goes along the columns of y, whichever side is plain */
            b = array_of(bias, bias_dtype, DIMS(M));
            check_bits("a bias beside plain columns", &w, &v, &o, dtype);
        }
        discard(&w);
        discard(&t);
        free(x);
    }
}

/* Strides of every sign, in the input and in the output. */
TEST(strides)
{
    enum { M = 11, N = 37, K = 90, SPACE = 4 * M * K };
    const nib_quantizer q = default_quantizer();
    nib_operand b = operand_of(&q, NIB_ROWWISE, N, K);
    float *x = normals(SPACE), y[2][4 * M * N];
    nib_array a = array_of(x, NIB_F32, DIMS(M, K)), out = array_of(y[0], NIB_F32, DIMS(M, N));
    static const int64_t forms[][3] = {
        { K, 1, 0 }, { 2 * K, 2, 0 }, { 1, M, 0 }, { -K, 1, (M - 1) * K }, { 0, -1, K - 1 }
    };
    static const int64_t outs[][3] = { { N, 1, 0 }, { 1, M, 0 }, { 2 * N, 2, 0 }, { -N, -1, M * N - 1 } };
    a.bytes = SPACE * sizeof *x;
    out.bytes = sizeof y[0];
    for (int i = 0; i < COUNT(forms) * COUNT(outs); i++) {
        const int64_t *form = forms[i % COUNT(forms)], *to = outs[i / COUNT(forms)];
        a.strides[0] = form[0], a.strides[1] = form[1], a.offset = (size_t)form[2] * 4;
        out.strides[0] = to[0], out.strides[1] = to[1], out.offset = (size_t)to[2] * 4;
        for (int k = 0; k < 2; k++)
            for (int j = 0; j < COUNT(y[0]); j++)
                y[k][j] = 7;
        const nib_operand values = plain(&a);
        out.data = y[0];
        CHECK_OK(nib_gemm_reference(&values, &b, NULL, &out));
        out.data = y[1];
        CHECK_OK(nib_gemm(&values, &b, NULL, &out));
        CHECK_BYTES(y[0], y[1], sizeof y[0]);
    }
    discard(&b);
    free(x);
}

/* Nothing outside the operands is read, and nothing outside y is written: each ends where memory ends. Scales end
 * with the last line where lines are whole 128s. */
TEST(ends_of_memory)
{
    static const int64_t sizes[][3] = {
        { 1, 33, 70 }, { 2, 50, 290 }, { 1, 128, 128 }, { 1, 128, 40 }, { 5, 17, 33 }, { 40, 35, 161 }
    };
    for (int i = 0; i < COUNT(sizes) * 3; i++) {
        const int64_t m = sizes[i % COUNT(sizes)][0], n = sizes[i % COUNT(sizes)][1], k = sizes[i % COUNT(sizes)][2];
        nib_quantizer q = i / COUNT(sizes) == 1 ? format(NIB_MXFP4) : usages(1, 0);
        q.columnwise = 0;
        nib_tensor *t[2] = { some(&q, DIMS(m, k)), some(&q, DIMS(n, k)) };
        nib_operand o[2];
        for (int side = 0; side < 2; side++) {
            nib_buffer *parts[NIB_PART_COUNT] = { NULL };
            for (int part = 0; part < NIB_PART_COUNT; part++) {
                nib_buffer *from = nib_tensor_buffer(t[side], (nib_part)part);
                if (!from)
                    continue;
                void *guarded = test_guarded(nib_buffer_bytes(from), true);
                memcpy(guarded, nib_buffer_data(from), nib_buffer_bytes(from));
                CHECK_OK(nib_buffer_borrow(guarded, nib_buffer_bytes(from), NULL, NULL, NULL, &parts[part]));
            }
            nib_tensor *at_end = NULL;
            const nib_metadata meta = metadata_of(t[side]);
            CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, 2, meta.shape, parts, NIB_PART_COUNT, &at_end));
            for (int part = 0; part < NIB_PART_COUNT; part++)
                nib_buffer_release(parts[part]);
            nib_tensor_destroy(t[side]);
            o[side] = rowwise(at_end);
        }
        float *x = test_guarded((size_t)(m * k) * 2, true), *y = test_guarded((size_t)(m * n) * 4, true);
        fill(x, NIB_BF16, m * k);
        const nib_array values = array_of(x, NIB_BF16, DIMS(m, k)), out = array_of(y, NIB_F32, DIMS(m, n));
        const nib_operand v = plain(&values);
        check_bits("ends of memory", &o[0], &o[1], NULL, NIB_F32);
        check_bits("ends of memory, plain", &v, &o[1], NULL, NIB_F32);
        CHECK_OK(nib_gemm(&o[0], &o[1], NULL, &out));
        discard(&o[0]);
        discard(&o[1]);
    }
}

/* ---- The definition ---- */

static double e2m1(int code)
{
    static const double magnitudes[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

static int code_of(const nib_tensor *t, int64_t line, int64_t k, int64_t length)
{
    const uint8_t *codes = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_DATA));
    return codes[line * ((length + 1) / 2) + k / 2] >> 4 * (k % 2) & 15;
}

static uint8_t scale_of(const nib_tensor *t, int64_t line, int64_t block, int64_t blocks)
{
    const uint8_t *scales = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_SCALE));
    return scales[line * round_up(blocks, 4) + block];
}

/* Terms of dot * 2^(ea + eb - 254) in long double, which has the range; each rounded to float once. */
TEST(mxfp4_by_its_definition)
{
    enum { M = 6, N = 5, K = 75, BLOCKS = 3 };
    for (int round = 0; round < 20; round++) {
        nib_quantizer q = format(NIB_MXFP4);
        q.columnwise = 0;
        nib_tensor *a = some(&q, DIMS(M, K)), *b = some(&q, DIMS(N, K));
        if (round > 3) { /* scales of any size, or within reach of the ends of FP32 together */
            scramble(a, round % 3 == 0);
            scramble(b, round % 3 == 0);
            for (int i = 0; i < M * 4 && round % 3 == 1; i++)
                bytes_of(a, NIB_ROW_SCALE)[i] = (uint8_t)(round % 2 ? 250 - test_below(9) : test_below(9));
            for (int i = 0; i < N * 4 && round % 3 == 1; i++)
                bytes_of(b, NIB_ROW_SCALE)[i] = (uint8_t)(round % 2 ? 126 + test_below(9) : 100 + test_below(9));
        }
        float y[M * N];
        const nib_array out = array_of(y, NIB_F32, DIMS(M, N));
        const nib_operand left = rowwise(a), right = rowwise(b);
        CHECK_OK(nib_gemm_reference(&left, &right, NULL, &out));
        for (int i = 0; i < M * N; i++) {
            float acc = 0;
            for (int64_t block = 0; block < BLOCKS; block++) {
                double dot = 0;
                for (int64_t k = 32 * block; k < 32 * block + 32 && k < K; k++)
                    dot += e2m1(code_of(a, i / N, k, K)) * e2m1(code_of(b, i % N, k, K));
                const int ea = scale_of(a, i / N, block, BLOCKS), eb = scale_of(b, i % N, block, BLOCKS);
                acc += ea == 255 || eb == 255 ? NAN : (float)ldexp(dot, ea + eb - 254);
            }
            CHECK_THAT(isnan(acc) ? isnan(y[i]) : acc == y[i], "output %d is %a, not %a", i, (double)y[i], (double)acc);
        }
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
}

/* Rounded to block fixed point by lrint on doubles, and added by the C library's fma. */
TEST(plain_values_by_their_definition)
{
    enum { M = 5, N = 7, K = 90, BLOCKS = 6 };
    for (int round = 0; round < 12; round++) {
        const nib_quantizer q = usages(1, 0);
        nib_tensor *w = some(&q, DIMS(N, K));
        float *x = normals(M * K), y[M * N];
        for (int i = 0; i < M * K; i++)
            x[i] = ldexpf(x[i], round % 3 == 0 ? 0 : (int)test_below(round % 3 == 1 ? 40 : 250) - 125);
        const float amax = *(const float *)nib_buffer_data(nib_tensor_buffer(w, NIB_ROW_TENSOR_SCALE));
        const nib_array values = array_of(x, NIB_F32, DIMS(M, K)), out = array_of(y, NIB_F32, DIMS(M, N));
        const nib_operand left = plain(&values), right = rowwise(w);
        CHECK_OK(nib_gemm_reference(&left, &right, NULL, &out));
        for (int i = 0; i < M * N; i++) {
            float acc = 0, s;
            for (int64_t block = 0; block < BLOCKS; block++) {
                double largest = 0, dot = 0;
                const int64_t end = 16 * block + 16 < K ? 16 * block + 16 : K;
                for (int64_t k = 16 * block; k < end; k++)
                    largest = fmax(largest, fabs((double)x[i / N * K + k]));
                int e = -100;
                while (!(largest < ldexp(1, e)))
                    e++;
                for (int64_t k = 16 * block; k < end; k++)
                    dot += 2 * e2m1(code_of(w, i % N, k, K)) * rint(ldexp(x[i / N * K + k], 14 - e));
                const uint8_t code = scale_of(w, i % N, block, BLOCKS);
                CHECK_OK(nib_decode(NIB_E4M3, &code, 1, &s));
                acc = fmaf((float)dot, ldexpf(s, e - 15), acc);
            }
            const float wanted = amax / 2688.0f * acc;
            CHECK_THAT(y[i] == wanted, "output %d is %a, not %a", i, (double)y[i], (double)wanted);
        }
        nib_tensor_destroy(w);
        free(x);
    }
}

/* Bounds of docs/numerics.md 14, against the product in double. */
TEST(bounds)
{
    enum { M = 6, N = 9, K = 333 };
    static const nib_format formats[] = { NIB_NVFP4, NIB_FLOAT8, NIB_MXFP8, NIB_FLOAT8_BLOCK, NIB_MXFP4 };
    static float x[M * K], w[N * K], y[M * N];
    const nib_array dx = array_of(x, NIB_F32, DIMS(M, K)), dw = array_of(w, NIB_F32, DIMS(N, K)),
                    out = array_of(y, NIB_F32, DIMS(M, N));
    for (int f = 0; f < COUNT(formats) * 2; f++) {
        const nib_quantizer q = format(formats[f / 2]);
        nib_tensor *a = some(&q, DIMS(M, K)), *b = some(&q, DIMS(N, K));
        nib_operand left = rowwise(a), right = rowwise(b);
        CHECK_OK(nib_dequantize(b, NIB_ROWWISE, &dw));
        if (f % 2) {
            fill(x, NIB_F32, M * K);
            left = plain(&dx);
        } else {
            CHECK_OK(nib_dequantize(a, NIB_ROWWISE, &dx));
        }
        CHECK_OK(nib_gemm(&left, &right, NULL, &out));
        for (int i = 0; i < M * N; i++) {
            double sum = 0, size = 0, rounding = 0;
            for (int k = 0; k < K; k++) {
                double largest = 0; /* of the block: what fixed point loses is at most 2^-14 of it */
                for (int l = k / 16 * 16; l < k / 16 * 16 + 16 && l < K; l++)
                    largest = fmax(largest, fabs((double)x[i / N * K + l]));
                sum += (double)x[i / N * K + k] * w[i % N * K + k];
                size += fabs((double)x[i / N * K + k] * w[i % N * K + k]);
                rounding += f == 1 ? largest * 0x1p-14 * fabs((double)w[i % N * K + k]) : 0;
            }
            /* one rounding per value at most, four of the factors, and three of each dequantized value here */
            CHECK_THAT(fabs(y[i] - sum) <= (K + 10) * 0x1p-24 * size + rounding, "%d: output %d is %g, exactly %g", f,
                       i, (double)y[i], sum);
        }
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
}

/* y = ((alpha * c) * acc + bias) + beta * y, and a sum that is not made leaves -0. */
TEST(options_by_their_definition)
{
    enum { N = 3 };
    const nib_quantizer q = usages(1, 0);
    nib_tensor *a = some(&q, DIMS(1, 40)), *b = some(&q, DIMS(N, 40));
    const nib_operand left = rowwise(a), right = rowwise(b);
    float acc[N], y[N] = { 1.5f, -2, 1e30f }, bias[N] = { 0.1f, 0.2f, 0.3f }, before[N];
    const nib_array products = array_of(acc, NIB_F32, DIMS(1, N)), out = array_of(y, NIB_F32, DIMS(1, N)),
                    add = array_of(bias, NIB_F32, DIMS(N));
    nib_gemm_options o = defaults();
    CHECK(o.bytes == sizeof o && o.alpha == 1 && o.beta == 0 && !o.bias);
    CHECK_OK(nib_gemm(&left, &right, &o, &products));
    memcpy(before, y, sizeof y);
    o.alpha = 4, o.beta = 0.7f, o.bias = &add; /* a power of two goes in anywhere */
    CHECK_OK(nib_gemm(&left, &right, &o, &out));
    for (int i = 0; i < N; i++)
        CHECK(y[i] == (4 * acc[i] + bias[i]) + 0.7f * before[i]);
    o = defaults();
    o.alpha = -0.0f;
    y[0] = NAN;
    CHECK_OK(nib_tensor_zero(a));
    CHECK_OK(nib_gemm(&left, &right, &o, &out)); /* -0 * 0 */
    CHECK(y[0] == 0 && signbit(y[0]) && signbit(y[2]));
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

/* ---- Calls ---- */

TEST(groups)
{
    enum { GROUPS = 5, K = 96, N = 40 };
    const nib_quantizer q = default_quantizer();
    nib_operand a[GROUPS], b[GROUPS];
    nib_array y[GROUPS];
    nib_gemm_options o = defaults();
    const nib_gemm_options *options[GROUPS] = { NULL, &o, NULL, &o, NULL };
    float memory[2][GROUPS][8 * N];
    o.alpha = 0.3f;
    for (int g = 0; g < GROUPS; g++) {
        a[g] = operand_of(&q, NIB_ROWWISE, g * 2, K); /* the first expert has no rows */
        b[g] = operand_of(&q, g % 2 ? NIB_COLUMNWISE : NIB_ROWWISE, N, K);
        y[g] = array_of(memory[0][g], NIB_F32, DIMS(g * 2, N));
    }
    memset(memory, 0, sizeof memory);
    CHECK_OK(nib_gemm_grouped(a, b, options, y, GROUPS));
    for (int g = 0; g < GROUPS; g++) {
        y[g].data = memory[1][g];
        CHECK_OK(nib_gemm_reference(&a[g], &b[g], options[g], &y[g]));
    }
    CHECK_BYTES(memory[0], memory[1], sizeof memory[0]);
    CHECK_OK(nib_gemm_grouped(NULL, NULL, NULL, NULL, 0));
    memset(memory, 0x55, sizeof memory); /* one that is rejected: none is touched */
    const nib_array good = y[GROUPS - 1];
    y[GROUPS - 1].shape[1]--;
    CHECK_FAILS(nib_gemm_grouped(a, b, NULL, y, GROUPS), NIB_ERR_SHAPE, "y must be [8, 40]");
    y[GROUPS - 1] = good;
    for (size_t i = 0; i < sizeof memory; i++)
        CHECK(((uint8_t *)memory)[i] == 0x55);
    for (int g = 0; g < GROUPS; g++) {
        discard(&a[g]);
        discard(&b[g]);
    }
}

TEST(rejections)
{
    nib_quantizer rht = default_quantizer();
    rht.rht = 1;
    const nib_quantizer q = default_quantizer(), mxfp8 = format(NIB_MXFP8);
    nib_operand a = operand_of(&q, NIB_ROWWISE, 4, 32), b = operand_of(&q, NIB_ROWWISE, 6, 32),
                t = operand_of(&rht, NIB_COLUMNWISE, 6, 32), f = operand_of(&mxfp8, NIB_ROWWISE, 6, 32);
    float x[4 * 32] = { 0 }, y[24], bias[8] = { 0 };
    for (int i = 0; i < 24; i++)
        y[i] = 99;
    nib_array values = array_of(x, NIB_F32, DIMS(4, 32)), out = array_of(y, NIB_F32, DIMS(4, 6)), bad;
    const nib_operand v = plain(&values), both = { a.tensor, &values, NIB_ROWWISE }, none = { NULL, NULL, NIB_ROWWISE };
    CHECK_FAILS(nib_gemm(&v, &v, NULL, &out), NIB_ERR_UNSUPPORTED, "both operands are plain");
    CHECK_FAILS(nib_gemm(&v, &t, NULL, &out), NIB_ERR_UNSUPPORTED, "transformed");
    CHECK_FAILS(nib_gemm(&a, &t, NULL, &out), NIB_ERR_MISMATCH, "transformed");
    CHECK_FAILS(nib_gemm(&both, &b, NULL, &out), NIB_ERR_ARG, "a is both a tensor and an array");
    CHECK_FAILS(nib_gemm(&a, &none, NULL, &out), NIB_ERR_ARG, "b is NULL");
    bad = values, bad.dtype = NIB_I32;
    nib_operand o = plain(&bad);
    CHECK_FAILS(nib_gemm(&o, &b, NULL, &out), NIB_ERR_DTYPE, "a is F32, BF16 or F16, not I32");
    bad = values, bad.rank = 1;
    CHECK_FAILS(nib_gemm(&o, &b, NULL, &out), NIB_ERR_SHAPE, "a must be a matrix");
    bad = values, bad.bytes--;
    CHECK_FAILS(nib_gemm(&o, &b, NULL, &out), NIB_ERR_SHAPE, "leave its 511 bytes");
    bad = values, bad.shape[1] = 31;
    CHECK_FAILS(nib_gemm(&o, &f, NULL, &out), NIB_ERR_MISMATCH, "31 and 32");
    nib_gemm_options options = defaults();
    nib_array add = array_of(bias, NIB_F32, DIMS(6));
    options.bias = &add;
    add.shape[0] = 5;
    CHECK_FAILS(nib_gemm(&a, &b, &options, &out), NIB_ERR_SHAPE, "the bias must be [6]");
    add = array_of(bias, NIB_U8, DIMS(6));
    CHECK_FAILS(nib_gemm(&a, &b, &options, &out), NIB_ERR_DTYPE, "the bias is F32, BF16 or F16, not U8");
    options.bias = NULL, options.bytes = 8;
    CHECK_FAILS(nib_gemm(&a, &b, &options, &out), NIB_ERR_ARG, "options->bytes is 8");
    CHECK_FAILS(nib_gemm_options_init_sized(&options, 8), NIB_ERR_ARG, "bytes is 8");
    bad = out, bad.strides[0] = 0;
    CHECK_FAILS(nib_gemm(&a, &b, NULL, &bad), NIB_ERR_SHAPE, "stride 0");
    for (int i = 0; i < 24; i++)
        CHECK(y[i] == 99);
    discard(&a), discard(&b), discard(&t), discard(&f);
}

/* Empty sides, and lines of no length. */
TEST(nothing)
{
    const nib_quantizer q = default_quantizer();
    nib_operand a = operand_of(&q, NIB_ROWWISE, 3, 0), b = operand_of(&q, NIB_ROWWISE, 2, 0),
                c = operand_of(&q, NIB_ROWWISE, 0, 48), d = operand_of(&q, NIB_ROWWISE, 5, 48);
    float y[6] = { 9, 9, 9, 9, 9, 9 }, bias[2] = { 3, 4 };
    nib_array out = array_of(y, NIB_F32, DIMS(3, 2)), add = array_of(bias, NIB_F32, DIMS(2)),
              x = array_of(y, NIB_F32, DIMS(3, 0));
    nib_gemm_options o = defaults();
    o.bias = &add, o.beta = 1;
    CHECK_OK(nib_gemm(&a, &b, &o, &out));
    CHECK(y[0] == 12 && y[5] == 13);
    const nib_operand v = plain(&x);
    CHECK_OK(nib_gemm(&v, &b, NULL, &out));
    CHECK(y[0] == 0 && y[5] == 0);
    out = array_of(NULL, NIB_F32, DIMS(0, 5));
    CHECK_OK(nib_gemm(&c, &d, NULL, &out));
    out = array_of(NULL, NIB_F32, DIMS(5, 0));
    CHECK_OK(nib_gemm(&d, &c, NULL, &out));
    discard(&a), discard(&b), discard(&c), discard(&d);
    for (int64_t m = 1; m < 70; m += 17) {
        a = operand_of(&q, NIB_ROWWISE, m, 0), b = operand_of(&q, NIB_ROWWISE, 65, 0);
        check_bits("no length", &a, &b, NULL, NIB_F32);
        o.bias = NULL;
        check_bits("no length, to what is there", &a, &b, &o, NIB_BF16);
        discard(&a), discard(&b);
    }
}

/* What a longer product has left in scratch, here factors that are no numbers, is none of a shorter one's. */
TEST(scratch_of_an_earlier_product)
{
    enum { LINES = 64, LONG = 512 };
    const nib_quantizer q = usages(1, 0);
    static float x[LONG];
    for (int i = 0; i < LONG; i++)
        x[i] = NAN;
    for (int64_t k = 64; k < LONG; k += 64) {
        const nib_array all = array_of(x, NIB_F32, DIMS(1, LONG));
        nib_operand longer = operand_of(&q, NIB_ROWWISE, LINES, LONG), shorter = operand_of(&q, NIB_ROWWISE, LINES, k);
        float *const numbers = malloc((size_t)k * sizeof *numbers);
        fill(numbers, NIB_F32, k);
        const nib_array few = array_of(numbers, NIB_F32, DIMS(1, k));
        const nib_operand left = plain(&all), v = plain(&few);
        check_bits("no numbers", &left, &longer, NULL, NIB_F32);
        check_bits("after no numbers", &v, &shorter, NULL, NIB_F32);
        free(numbers);
        discard(&longer), discard(&shorter);
    }
}

/* Without outputs nothing is computed, and no memory is asked for, however long the lines are. */
TEST(no_outputs_of_very_long_lines)
{
    const int64_t length = INT64_C(1) << 50;
    const nib_quantizer q = usages(1, 0);
    nib_operand a = operand_of(&q, NIB_ROWWISE, 0, length);
    const nib_array x = array_of(NULL, NIB_F32, DIMS(0, length)), out = array_of(NULL, NIB_F32, DIMS(0, 0));
    const nib_operand v = plain(&x);
    CHECK_OK(nib_gemm(&a, &a, NULL, &out));
    CHECK_OK(nib_gemm(&v, &a, NULL, &out));
    discard(&a);
}

/* Calls at the same time on one device: one has its scratch, the others their own. */

struct caller {
    nib_operand a, b;
    nib_device *device;
    float y[50 * 40], wanted[50 * 40];
    int faults;
};

static void *call_often(void *context)
{
    struct caller *c = context;
    nib_array out = { 0 };
    c->faults = nib_array_init(&out, c->y, NIB_F32, DIMS(50, 40)) != NIB_OK;
    out.device = c->device;
    for (int i = 0; i < 30; i++) {
        memset(c->y, 0, sizeof c->y);
        c->faults += nib_gemm(&c->a, &c->b, NULL, &out) != NIB_OK || memcmp(c->y, c->wanted, sizeof c->y) != 0;
    }
    return NULL;
}

TEST(at_the_same_time)
{
    enum { CALLERS = 4 };
    static struct caller callers[CALLERS];
    pthread_t threads[CALLERS];
    nib_device *device = NULL;
    const nib_quantizer q = default_quantizer();
    CHECK_OK(nib_host_create(1, &device));
    for (int i = 0; i < CALLERS; i++) {
        callers[i].a = operand_of(&q, NIB_ROWWISE, 50, 100 + 150 * i);
        callers[i].b = operand_of(&q, NIB_ROWWISE, 40, 100 + 150 * i);
        callers[i].device = device;
        const nib_array out = array_of(callers[i].wanted, NIB_F32, DIMS(50, 40));
        CHECK_OK(nib_gemm_reference(&callers[i].a, &callers[i].b, NULL, &out));
    }
    for (int i = 0; i < CALLERS; i++)
        CHECK(pthread_create(&threads[i], NULL, call_often, &callers[i]) == 0);
    for (int i = 0; i < CALLERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0 && callers[i].faults == 0);
        discard(&callers[i].a);
        discard(&callers[i].b);
    }
    nib_device_release(device);
}

TEST_MAIN
