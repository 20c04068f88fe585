/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_formats.c - Float8, MXFP8, blockwise Float8 and MXFP4 through every call that takes a tensor.
 *
 * Most tests run over `kinds`, one row per format, element and block shape. What the parts of a tensor mean is written
 * down once more here (value_at), and everything is measured by it. The bytes themselves are for check_formats.py.
 */
#include "test_tensors.h"

#include <float.h>
#include <math.h>

#include "tensor/quantize.h"

/* ---- The formats ---- */

struct kind {
    const char *name;
    nib_format format;
    nib_dtype element;
    int rows, block; /* block_dims */
};

static const struct kind kinds[] = {
    { "float8 e4m3", NIB_FLOAT8, NIB_E4M3, 0, 0 },
    { "float8 e5m2", NIB_FLOAT8, NIB_E5M2, 0, 0 },
    { "mxfp8 e4m3 1x32", NIB_MXFP8, NIB_E4M3, 1, 32 },
    { "mxfp8 e5m2 1x32", NIB_MXFP8, NIB_E5M2, 1, 32 },
    { "mxfp8 e4m3 32x32", NIB_MXFP8, NIB_E4M3, 32, 32 },
    { "mxfp8 e5m2 32x32", NIB_MXFP8, NIB_E5M2, 32, 32 },
    { "float8_block e4m3 1x128", NIB_FLOAT8_BLOCK, NIB_E4M3, 1, 128 },
    { "float8_block e5m2 1x128", NIB_FLOAT8_BLOCK, NIB_E5M2, 1, 128 },
    { "float8_block e4m3 128x128", NIB_FLOAT8_BLOCK, NIB_E4M3, 128, 128 },
    { "float8_block e5m2 128x128", NIB_FLOAT8_BLOCK, NIB_E5M2, 128, 128 },
    { "mxfp4 1x32", NIB_MXFP4, NIB_E2M1, 1, 32 },
};

#define FOR_KINDS(k) for (const struct kind *k = kinds; k < kinds + sizeof kinds / sizeof *kinds; k++)

static bool is_mx(const struct kind *k) { return k->format == NIB_MXFP8 || k->format == NIB_MXFP4; }
static bool has_blocks(const struct kind *k) { return k->block != 0; }

/* Whether the columnwise usage follows from the rowwise one. */
static bool derives(const struct kind *k) { return k->rows != 1; }

static nib_quantizer quantizer(const struct kind *k)
{
    nib_quantizer q;
    CHECK_OK(nib_quantizer_init_format(&q, k->format));
    q.element = k->element;
    q.block_dims[0] = k->rows;
    q.block_dims[1] = k->block;
    return q;
}

/* A failure within a loop over kinds names the one. */
#define CHECK_KIND(k, condition) CHECK_THAT(condition, "%s: %s", (k)->name, #condition)

/* ---- Data ---- */

enum { MAX_ELEMENTS = 1 << 19 };

static float inputs[MAX_ELEMENTS], decoded[MAX_ELEMENTS], decoded_too[MAX_ELEMENTS];

/* A matrix of random numbers of mixed size in `numbers`. */
static nib_array matrix(int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows * cols; i++)
        inputs[i] = ldexpf(test_normal(), (int)test_below(12) - 6);
    return array_of(inputs, NIB_F32, 2, (const int64_t[]){ rows, cols });
}

/* ---- What the bytes mean ---- */

/* By exponent and mantissa, not by the library's tables. */
static float code_value(nib_dtype element, unsigned code)
{
    const int mantissa_bits = element == NIB_E4M3 ? 3 : element == NIB_E5M2 ? 2 : 1,
              bits = element == NIB_E2M1 ? 4 : 8, bias = element == NIB_E4M3 ? 7 : element == NIB_E5M2 ? 15 : 1;
    const unsigned magnitude = code & ((1u << (bits - 1)) - 1), mantissa = magnitude & ((1u << mantissa_bits) - 1);
    const int exponent = (int)(magnitude >> mantissa_bits);
    float value = exponent ? ldexpf((float)(mantissa + (1u << mantissa_bits)), exponent - bias - mantissa_bits)
                           : ldexpf((float)mantissa, 1 - bias - mantissa_bits);
    if (element == NIB_E4M3 && magnitude == 0x7F)
        value = NAN;
    if (element == NIB_E5M2 && magnitude >= 0x7C)
        value = magnitude == 0x7C ? INFINITY : NAN;
    return code >> (bits - 1) & 1 ? -value : value;
}

/* One copy of a tensor: its codes, its scales (Float8: its tensor scale) and the size of the matrix. */
struct usage {
    const struct kind *k;
    nib_usage which;
    const uint8_t *codes;
    nib_array scales;
    int64_t rows, cols;
};

static struct usage usage_of(const struct kind *k, const nib_tensor *t, nib_usage which)
{
    const nib_metadata m = metadata_of(t);
    struct usage c = { .k = k, .which = which, .rows = m.rows, .cols = m.cols };
    c.codes = nib_buffer_data(nib_tensor_buffer(t, which == NIB_ROWWISE ? NIB_ROW_DATA : NIB_COL_DATA));
    CHECK_OK(nib_tensor_part(t,
                             !has_blocks(k)         ? NIB_ROW_TENSOR_SCALE
                             : which == NIB_ROWWISE ? NIB_ROW_SCALE
                                                    : NIB_COL_SCALE,
                             &c.scales));
    return c;
}

static unsigned code_at(const struct usage *c, int64_t row, int64_t col)
{
    const bool transposed = c->which == NIB_COLUMNWISE && c->k->format != NIB_MXFP8;
    const int64_t line = transposed ? col : row, i = transposed ? row : col, length = transposed ? c->rows : c->cols;
    if (c->k->element == NIB_E2M1)
        return c->codes[line * ((length + 1) / 2) + i / 2] >> 4 * (i % 2) & 15;
    return c->codes[line * length + i];
}

/* Where the scale of an element lies in the (row-major, padded) matrix of scales. */
static void scale_index(const struct kind *k, nib_usage usage, int64_t row, int64_t col, int64_t at[2])
{
    const int64_t line = usage == NIB_ROWWISE ? row : col, block = (usage == NIB_ROWWISE ? col : row) / k->block;
    at[0] = line, at[1] = block;
    if (k->format == NIB_MXFP8 && usage == NIB_COLUMNWISE)
        at[0] = block, at[1] = line;
    if (k->format == NIB_FLOAT8_BLOCK) {
        at[0] = k->rows == 1 ? block : line / 128;
        at[1] = k->rows == 1 ? line : block;
    }
}

static float scale_at(const struct usage *c, int64_t row, int64_t col)
{
    if (!has_blocks(c->k))
        return *(const float *)c->scales.data;
    int64_t at[2];
    scale_index(c->k, c->which, row, col, at);
    const int64_t i = at[0] * c->scales.shape[1] + at[1];
    if (c->k->format == NIB_FLOAT8_BLOCK)
        return ((const float *)c->scales.data)[i];
    const uint8_t e8m0 = ((const uint8_t *)c->scales.data)[i];
    return e8m0 == 255 ? NAN : ldexpf(1, e8m0 - 127);
}

static float value_at(const struct usage *c, int64_t row, int64_t col)
{
    return code_value(c->k->element, code_at(c, row, col)) * scale_at(c, row, col);
}

/* That every value of a copy is what its parts say. */
static void check_values(const struct kind *k, const nib_tensor *t, nib_usage usage)
{
    const struct usage c = usage_of(k, t, usage);
    dequantize(t, usage, NIB_F32, decoded);
    for (int64_t i = 0; i < c.rows * c.cols; i++) {
        const float expected = value_at(&c, i / c.cols, i % c.cols);
        if (memcmp(&expected, &decoded[i], sizeof expected)) {
            CHECK_THAT(false, "%s, copy %d: [%lld, %lld] is %a, not %a", k->name, (int)usage, (long long)(i / c.cols),
                       (long long)(i % c.cols), (double)decoded[i], (double)expected);
            return;
        }
    }
}

/* The last one has rows of scales without padding, of tiles too. */
static const int64_t shapes[][2] = { { 256, 384 }, { 64, 96 }, { 33, 45 },   { 1, 5 },     { 5, 1 },    { 1, 1 },
                                     { 7, 300 },   { 200, 7 }, { 129, 257 }, { 2100, 40 }, { 256, 512 } };

#define FOR_SHAPES(s) for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)

/* ---- Tables and sizes ---- */

TEST(formats_have_names_and_defaults)
{
    static const struct {
        const char *name;
        nib_dtype element;
        int rows, block, pow2;
    } defaults[] = { { "nvfp4", NIB_E2M1, 1, 16, 0 },
                     { "float8", NIB_E4M3, 0, 0, 0 },
                     { "mxfp8", NIB_E4M3, 1, 32, 0 },
                     { "float8_block", NIB_E4M3, 128, 128, 1 },
                     { "mxfp4", NIB_E2M1, 1, 32, 0 } };
    CHECK(nib_format_count() >= NIB_FORMAT_COUNT);
    for (int i = 0; i < NIB_FORMAT_COUNT; i++) {
        nib_format format = NIB_FORMAT_COUNT;
        nib_quantizer q;
        CHECK(strcmp(nib_format_name((nib_format)i), defaults[i].name) == 0);
        CHECK_OK(nib_format_from_name(defaults[i].name, &format));
        CHECK((int)format == i);
        CHECK_OK(nib_quantizer_init_format(&q, format));
        CHECK(q.rowwise && q.columnwise && q.block_dims[0] == defaults[i].rows && q.block_dims[1] == defaults[i].block);
        CHECK(q.pow2_scales == defaults[i].pow2 && q.mx_rule == NIB_MX_CEIL && q.amax_epsilon == 0);
        CHECK_OK(nib_quantizer_check(&q, NULL));
        nib_tensor *t = NULL;
        CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, (const int64_t[]){ 32, 32 }, NULL, &t));
        CHECK(metadata_of(t).element == defaults[i].element);
        nib_tensor_destroy(t);
    }
    nib_quantizer q;
    nib_format format;
    CHECK(nib_format_name((nib_format)nib_format_count()) == NULL && nib_format_name((nib_format)-1) == NULL);
    CHECK_FAILS(nib_format_from_name("float9", &format), NIB_ERR_ARG, "float9");
    CHECK_FAILS(nib_quantizer_init_format(&q, (nib_format)99), NIB_ERR_ARG, "99");
    CHECK_FAILS(nib_quantizer_init_format(NULL, NIB_FLOAT8), NIB_ERR_ARG, "NULL");
}

/* Padded and valid shapes of every part, for M = 2 * 70 = 140 and K = 201. */
TEST(parts_have_the_documented_shapes)
{
    const int64_t shape[3] = { 2, 70, 201 }, M = 140, K = 201;
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const bool packed = k->element == NIB_E2M1, square = k->rows > 1;
        const int64_t b = k->block ? k->block : 1, mb = round_up(M, b) / b, kb = round_up(K, b) / b, k2 = packed ? 101 : 201;
        const bool mx8 = k->format == NIB_MXFP8;
        struct {
            int rank;
            int64_t padded[3], valid[3];
        } expected[NIB_PART_COUNT] = {
            [NIB_ROW_DATA] = { 3, { 2, 70, k2 }, { 2, 70, k2 } },
            [NIB_COL_DATA] = { 2, { K, packed ? 70 : M }, { K, packed ? 70 : M } },
            [NIB_ROW_SCALE] = { 2, { round_up(M, 128), round_up(kb, 4) }, { M, kb } },
            [NIB_COL_SCALE] = { 2, { round_up(K, 128), round_up(mb, 4) }, { K, mb } },
        };
        if (mx8) { /* not transposed */
            expected[NIB_COL_DATA].rank = 3;
            memcpy(expected[NIB_COL_DATA].padded, shape, sizeof shape);
            memcpy(expected[NIB_COL_DATA].valid, shape, sizeof shape);
            const int64_t padded[2] = { round_up(mb, 4), round_up(K, 128) }, valid[2] = { mb, K };
            memcpy(expected[NIB_COL_SCALE].padded, padded, sizeof padded);
            memcpy(expected[NIB_COL_SCALE].valid, valid, sizeof valid);
        } else if (k->format == NIB_FLOAT8_BLOCK) {
            const int64_t row[2][2] = { { kb, M }, { mb, kb } }, col[2][2] = { { mb, K }, { kb, mb } };
            for (int i = 0; i < 2; i++) {
                expected[NIB_ROW_SCALE].valid[i] = row[square][i];
                expected[NIB_COL_SCALE].valid[i] = col[square][i];
                expected[NIB_ROW_SCALE].padded[i] = i ? round_up(row[square][i], 4) : row[square][i];
                expected[NIB_COL_SCALE].padded[i] = i ? round_up(col[square][i], 4) : col[square][i];
            }
        } else if (!has_blocks(k)) {
            expected[NIB_ROW_SCALE].rank = expected[NIB_COL_SCALE].rank = 0;
            expected[NIB_ROW_TENSOR_SCALE].rank = 1;
            expected[NIB_ROW_TENSOR_SCALE].padded[0] = expected[NIB_ROW_TENSOR_SCALE].valid[0] = 1;
        }
        const nib_array x = array_of(inputs, NIB_F32, 3, shape);
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            int rank = 0;
            int64_t got[NIB_MAX_RANK] = { 0 };
            nib_array array = { 0 };
            if (!expected[part].rank) {
                CHECK_FAILS(nib_part_shape(&q, (nib_part)part, 3, shape, &rank, got), NIB_ERR_USAGE, "no such part");
                CHECK_FAILS(nib_part_valid_shape(&q, (nib_part)part, 3, shape, &rank, got), NIB_ERR_USAGE,
                            "no such part");
                CHECK_FAILS(nib_tensor_part(t, (nib_part)part, &array), NIB_ERR_USAGE, "no such part");
                CHECK_KIND(k, nib_tensor_buffer(t, (nib_part)part) == NULL);
                continue;
            }
            const size_t bytes = (size_t)expected[part].rank * sizeof *got;
            CHECK_OK(nib_part_shape(&q, (nib_part)part, 3, shape, &rank, got));
            CHECK_THAT(rank == expected[part].rank && memcmp(got, expected[part].padded, bytes) == 0,
                       "%s: part %d is [%lld, %lld, %lld]", k->name, part, (long long)got[0], (long long)got[1],
                       (long long)got[2]);
            CHECK_OK(nib_part_valid_shape(&q, (nib_part)part, 3, shape, &rank, got));
            CHECK_THAT(rank == expected[part].rank && memcmp(got, expected[part].valid, bytes) == 0,
                       "%s: part %d is [%lld, %lld, %lld] without padding", k->name, part, (long long)got[0],
                       (long long)got[1], (long long)got[2]);
            CHECK_OK(nib_tensor_part(t, (nib_part)part, &array));
            CHECK_KIND(k, array.rank == rank && memcmp(array.shape, expected[part].padded, bytes) == 0);
            const nib_dtype scale = is_mx(k) ? NIB_E8M0 : NIB_F32;
            CHECK_KIND(k, array.dtype == (part < NIB_ROW_SCALE ? NIB_U8 : part < NIB_ROW_TENSOR_SCALE ? scale : NIB_F32));
            CHECK_KIND(k, nib_buffer_bytes(nib_tensor_buffer(t, (nib_part)part)) == array.bytes);
        }
        nib_tensor_destroy(t);
    }
}

/* Whatever a buffer held: quantizing into it leaves zeros between the scales and their padded size. */
TEST(padding_is_zero)
{
    FOR_KINDS(k)
    {
        if (!has_blocks(k))
            continue;
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(33, 45);
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int part = NIB_ROW_SCALE; part <= NIB_COL_SCALE; part++)
            memset(nib_buffer_data(nib_tensor_buffer(t, (nib_part)part)), 0x5A,
                   nib_buffer_bytes(nib_tensor_buffer(t, (nib_part)part)));
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
        for (int part = NIB_ROW_SCALE; part <= NIB_COL_SCALE; part++) {
            nib_array scales;
            int rank;
            int64_t valid[NIB_MAX_RANK];
            CHECK_OK(nib_tensor_part(t, (nib_part)part, &scales));
            CHECK_OK(nib_part_valid_shape(&q, (nib_part)part, 2, x.shape, &rank, valid));
            const int64_t width = nib_dtype_bits(scales.dtype) / 8, row_bytes = scales.shape[1] * width;
            for (int64_t i = 0; i < scales.shape[0]; i++)
                for (int64_t j = i < valid[0] ? valid[1] * width : 0; j < row_bytes; j++)
                    CHECK_KIND(k, ((const uint8_t *)scales.data)[i * row_bytes + j] == 0);
        }
        nib_tensor_destroy(t);
    }
}

TEST(metadata_says_what_a_tensor_is)
{
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        const nib_array x = matrix(64, 96);
        q.amax_comm = k->format == NIB_FLOAT8 ? nib_comm_serial() : NULL;
        nib_tensor *t = quantize(&q, &x, NULL);
        const nib_metadata m = metadata_of(t);
        CHECK_KIND(k, m.format == k->format && m.dtype == NIB_F32 && m.element == k->element && m.rank == 2);
        CHECK_KIND(k, m.rows == 64 && m.cols == 96 && m.rowwise && m.columnwise && m.columnwise_valid);
        CHECK_KIND(k, m.tensor_scale == (has_blocks(k) ? NIB_TENSOR_SCALE_NONE : NIB_TENSOR_SCALE_MULTIPLIER));
        CHECK_KIND(k, m.quantizer->amax_comm == NULL && nib_quantizer_equal(m.quantizer, &q));
        nib_tensor_destroy(t);
        CHECK_KIND(k, nib_is_quantizable(&q, 2, (const int64_t[]){ 256, 384 }));
        CHECK_KIND(k, nib_is_quantizable(&q, 2, (const int64_t[]){ 256, 385 }) == !has_blocks(k));
        CHECK_KIND(k, nib_is_quantizable(&q, 1, (const int64_t[]){ 256 }) == !has_blocks(k));
        CHECK_KIND(k, nib_is_requantization_safe(&q));
        nib_quantizer other = q;
        other.element = 0; /* the default element and its name are the same */
        CHECK_KIND(k, nib_quantizer_equal(&q, &other) == (k->element != NIB_E5M2));
        CHECK_KIND(k, (nib_quantizer_hash(&q) == nib_quantizer_hash(&other)) == (k->element != NIB_E5M2));
        other = q;
        other.amax_epsilon = 1;
        CHECK_KIND(k, !nib_quantizer_equal(&q, &other));
        other = q;
        other.pow2_scales ^= 1;
        CHECK_KIND(k, !nib_quantizer_equal(&q, &other));
        other = q;
        other.mx_rule = NIB_MX_FLOOR;
        CHECK_KIND(k, !nib_quantizer_equal(&q, &other));
    }
}

/* ---- Values ---- */

TEST(values_are_code_times_scale)
{
    FOR_KINDS(k)
    FOR_SHAPES(s)
    {
        for (int option = 0; option < 2; option++) {
            nib_quantizer q = quantizer(k);
            if (is_mx(k))
                q.mx_rule = option ? NIB_MX_FLOOR : NIB_MX_CEIL;
            else
                q.pow2_scales = (uint8_t)option;
            const nib_array x = matrix(shapes[s][0], shapes[s][1]);
            nib_tensor *t = quantize(&q, &x, NULL);
            check_values(k, t, NIB_ROWWISE);
            check_values(k, t, NIB_COLUMNWISE);
            nib_tensor_destroy(t);
        }
    }
}

/* One column holds the values of one row, so that its columnwise codes, whichever way they lie, are the row's. */
TEST(one_column_is_coded_as_one_row)
{
    static const int64_t lengths[] = { 1, 2, 31, 32, 33, 64, 127, 129, 300, 1025 };
    FOR_KINDS(k)
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const nib_quantizer q = quantizer(k);
        const int64_t n = lengths[i];
        const nib_array row = matrix(1, n), column = array_of(inputs, NIB_F32, 2, (const int64_t[]){ n, 1 });
        nib_tensor *a = quantize(&q, &row, NULL), *b = quantize(&q, &column, NULL);
        const size_t bytes = (size_t)(k->element == NIB_E2M1 ? (n + 1) / 2 : n);
        const struct usage rowwise = usage_of(k, a, NIB_ROWWISE), columnwise = usage_of(k, b, NIB_COLUMNWISE);
        CHECK_THAT(memcmp(rowwise.codes, columnwise.codes, bytes) == 0, "%s: %lld x 1", k->name, (long long)n);
        for (int64_t e = 0; e < n; e++)
            CHECK_KIND(k, scale_at(&rowwise, 0, e) == scale_at(&columnwise, e, 0));
        dequantize(a, NIB_ROWWISE, NIB_F32, decoded_too);
        dequantize(b, NIB_COLUMNWISE, NIB_F32, decoded);
        CHECK_THAT(memcmp(decoded, decoded_too, (size_t)n * sizeof *decoded) == 0, "%s: %lld x 1", k->name,
                   (long long)n);
        nib_tensor_destroy(a), nib_tensor_destroy(b);
    }
}

/* Half a step of the element's grid, at worst: 2^-4, 2^-3 or 2^-2 of a value, or of the smallest normal code. */
TEST(values_are_near_the_data)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const int64_t M = 130, K = 140;
        const nib_array x = matrix(M, K);
        nib_tensor *t = quantize(&q, &x, NULL);
        const float relative = k->element == NIB_E4M3 ? 0x1p-4f : k->element == NIB_E5M2 ? 0x1p-3f : 0x1p-2f,
                    smallest = k->element == NIB_E4M3 ? 0x1p-6f : k->element == NIB_E5M2 ? 0x1p-14f : 1.0f;
        for (int usage = 0; usage < 2; usage++) {
            const struct usage c = usage_of(k, t, (nib_usage)usage);
            dequantize(t, (nib_usage)usage, NIB_F32, decoded);
            for (int64_t i = 0; i < M * K; i++) {
                const float scale = scale_at(&c, i / K, i % K);
                const float bound = relative * fmaxf(fabsf(inputs[i]), smallest * scale) * 1.0001f;
                CHECK_THAT(fabsf(decoded[i] - inputs[i]) <= bound, "%s: %g became %g, with a scale of %g", k->name,
                           (double)inputs[i], (double)decoded[i], (double)scale);
            }
        }
        nib_tensor_destroy(t);
    }
}

TEST(dequantize_to_every_dtype_and_stride)
{
    static uint16_t half[MAX_ELEMENTS], expected[MAX_ELEMENTS];
    const int64_t M = 45, K = 70, shape[3] = { 5, 9, 70 };
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        (void)matrix(M, K);
        const nib_array x = array_of(inputs, NIB_F32, 3, shape);
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int usage = 0; usage < 2; usage++) {
            dequantize(t, (nib_usage)usage, NIB_F32, decoded);
            for (int dtype = NIB_F16; dtype <= NIB_BF16; dtype++) {
                const nib_array y = array_of(half, (nib_dtype)dtype, 3, shape);
                CHECK_OK(nib_dequantize(t, (nib_usage)usage, &y));
                CHECK_OK(nib_encode((nib_dtype)dtype, decoded, (size_t)(M * K), expected));
                CHECK_BYTES(half, expected, (size_t)(M * K) * sizeof *half);
            }
            /* Columns backwards, the outer dims exchanged in memory. */
            nib_array y = array_of(decoded_too, NIB_F32, 3, shape);
            y.strides[0] = K, y.strides[1] = 5 * K, y.strides[2] = -1;
            y.offset = (size_t)(K - 1) * sizeof(float);
            CHECK_OK(nib_dequantize(t, (nib_usage)usage, &y));
            for (int64_t i = 0; i < M * K; i++) {
                const int64_t a = i / (9 * K), b = i / K % 9, c = i % K;
                CHECK_KIND(k, decoded_too[b * 5 * K + a * K + K - 1 - c] == decoded[i]);
            }
            /* Some rows, wherever they begin. */
            for (int64_t first = 0; first <= M; first += 7) {
                const int64_t count = test_below(M - first + 1), rows_shape[2] = { count, K };
                const nib_array rows = array_of(decoded_too, NIB_F32, 2, rows_shape);
                CHECK_OK(nib_dequantize_rows(t, (nib_usage)usage, first, count, &rows));
                CHECK_BYTES(decoded_too, decoded + first * K, (size_t)(count * K) * sizeof(float));
            }
        }
        nib_array y = array_of(decoded, NIB_F32, 2, (const int64_t[]){ M, K });
        CHECK_FAILS(nib_dequantize(t, NIB_ROWWISE, &y), NIB_ERR_SHAPE, "");
        y = array_of(decoded, NIB_I32, 3, shape);
        CHECK_FAILS(nib_dequantize(t, NIB_ROWWISE, &y), NIB_ERR_DTYPE, "I32");
        nib_tensor_destroy(t);
    }
}

/* Rows through 257 of a tall tensor cross every kind of panel and block. */
TEST(dequantize_rows_across_blocks)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(400, 150);
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int usage = 0; usage < 2; usage++) {
            check_values(k, t, (nib_usage)usage);
            dequantize(t, (nib_usage)usage, NIB_F32, decoded);
            for (int i = 0; i < 12; i++) {
                const int64_t first = test_below(400), count = test_below(400 - first) + 1;
                const nib_array rows = array_of(decoded_too, NIB_F32, 2, (const int64_t[]){ count, 150 });
                CHECK_OK(nib_dequantize_rows(t, (nib_usage)usage, first, count, &rows));
                CHECK_BYTES(decoded_too, decoded + first * 150, (size_t)count * 150 * sizeof(float));
            }
        }
        nib_tensor_destroy(t);
    }
}

TEST(strided_input_gives_the_same_bytes)
{
    static float moved[2 * MAX_ELEMENTS];
    const int64_t M = 66, K = 137;
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(M, K);
        nib_tensor *expected = quantize(&q, &x, NULL);
        nib_array strided = array_of(moved, NIB_F32, 2, x.shape);
        strided.bytes = sizeof moved;
        static const int64_t strides[][3] = {
            { 1, 66, 0 }, { 2 * 137, 2, 0 }, { -137, 1, 65 * 137 }, { 137, -1, 136 }
        };
        for (size_t s = 0; s < sizeof strides / sizeof *strides; s++) {
            for (int64_t i = 0; i < M * K; i++)
                moved[strides[s][2] + i / K * strides[s][0] + i % K * strides[s][1]] = inputs[i];
            strided.strides[0] = strides[s][0], strided.strides[1] = strides[s][1];
            strided.offset = (size_t)strides[s][2] * sizeof(float);
            nib_tensor *t = quantize(&q, &strided, NULL);
            CHECK_THAT(equal(t, expected), "%s: strides %zu", k->name, s);
            nib_tensor_destroy(t);
        }
        nib_tensor_destroy(expected);
        /* One row, said many times. */
        nib_array repeated = array_of(inputs, NIB_F32, 2, (const int64_t[]){ 40, K });
        repeated.strides[0] = 0;
        nib_tensor *a = quantize(&q, &repeated, NULL);
        for (int64_t i = 1; i < 40; i++)
            memcpy(moved + i * K, inputs, (size_t)K * sizeof *moved);
        memcpy(moved, inputs, (size_t)K * sizeof *moved);
        const nib_array written_out = array_of(moved, NIB_F32, 2, (const int64_t[]){ 40, K });
        nib_tensor *b = quantize(&q, &written_out, NULL);
        CHECK_KIND(k, equal(a, b));
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
}

/* The same numbers in a narrower dtype are the same bytes, but for blockwise scales that overflow. */
TEST(input_dtypes_agree)
{
    static uint16_t half[MAX_ELEMENTS];
    const int64_t M = 70, K = 134;
    FOR_KINDS(k)
    for (int dtype = NIB_F16; dtype <= NIB_BF16; dtype++) {
        const nib_quantizer q = quantizer(k);
        (void)matrix(M, K);
        CHECK_OK(nib_encode((nib_dtype)dtype, inputs, (size_t)(M * K), half));
        CHECK_OK(nib_decode((nib_dtype)dtype, half, (size_t)(M * K), inputs));
        const nib_array narrow = array_of(half, (nib_dtype)dtype, 2, (const int64_t[]){ M, K }),
                        broad = array_of(inputs, NIB_F32, 2, (const int64_t[]){ M, K });
        nib_tensor *a = quantize(&q, &narrow, NULL), *b = quantize(&q, &broad, NULL);
        CHECK_KIND(k, !equal(a, b)); /* the nominal dtype is part of a tensor */
        for (int part = 0; part < NIB_PART_COUNT; part++)
            if (nib_tensor_buffer(a, (nib_part)part)) {
                const size_t bytes = nib_buffer_bytes(nib_tensor_buffer(a, (nib_part)part));
                CHECK_BYTES(nib_buffer_data(nib_tensor_buffer(a, (nib_part)part)),
                            nib_buffer_data(nib_tensor_buffer(b, (nib_part)part)), bytes);
            }
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
}

/* The largest finite input stands in for a scale that overflows, and only then: TransformerEngine's rule. F16 data
 * never makes one overflow, however small it is. */
TEST(blockwise_scales_are_limited_only_where_they_overflow)
{
    static const struct kind k = { "float8_block e4m3 1x128", NIB_FLOAT8_BLOCK, NIB_E4M3, 1, 128 };
    static const struct {
        nib_dtype dtype;
        float amax, scale;
    } cases[] = {
        { NIB_F16, 0x1p-24f, 448 * 0x1p24f }, { NIB_F16, 0x1p-10f, 448 * 0x1p10f },
        { NIB_BF16, 0x1p-110f, 448 * 0x1p110f }, { NIB_BF16, 0x1p-126f, 0x1.FEp127f },
        { NIB_F32, 0x1p-110f, 448 * 0x1p110f },  { NIB_F32, 0x1p-126f, FLT_MAX },
        { NIB_F32, 0x1p-149f, FLT_MAX },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int pow2 = 0; pow2 < 2; pow2++) {
            uint16_t half[5];
            float x[5] = { 0, cases[i].amax, 0, -cases[i].amax, 0 };
            nib_quantizer q = quantizer(&k);
            q.pow2_scales = (uint8_t)pow2;
            if (cases[i].dtype != NIB_F32)
                CHECK_OK(nib_encode(cases[i].dtype, x, 5, half));
            const nib_array array =
                array_of(cases[i].dtype == NIB_F32 ? (void *)x : half, cases[i].dtype, 1, (const int64_t[]){ 5 });
            nib_tensor *t = quantize(&q, &array, NULL);
            const float scale = pow2 ? ldexpf(1, (int)ilogbf(cases[i].scale)) : cases[i].scale;
            const float got = *(const float *)nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_SCALE));
            CHECK_THAT(got == 1.0f / scale, "%s, amax %a: a scale of 1/%a, not 1/%a", nib_dtype_name(cases[i].dtype),
                       (double)cases[i].amax, 1 / (double)got, (double)scale);
            check_values(&k, t, NIB_ROWWISE);
            nib_tensor_destroy(t);
        }
}

TEST(one_thread_equals_seven)
{
    enum { K = 520, M = 7 * NIB_ELEMENTS_PER_THREAD / K + 2 };
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        nib_array x = matrix(M, K);
        x.device = host_of(1);
        nib_tensor *one = quantize(&q, &x, NULL);
        x.device = host_of(7);
        nib_tensor *seven = quantize(&q, &x, NULL);
        CHECK_KIND(k, equal(one, seven));
        for (int usage = 0; usage < 2; usage++) {
            dequantize(one, (nib_usage)usage, NIB_F32, decoded);
            dequantize(seven, (nib_usage)usage, NIB_F32, decoded_too);
            CHECK_BYTES(decoded, decoded_too, (size_t)M * K * sizeof(float));
        }
        if (derives(k)) {
            CHECK_OK(nib_tensor_update_usage(seven, -1, 0));
            CHECK_OK(nib_tensor_update_usage(seven, -1, 1));
            CHECK_KIND(k, equal(one, seven));
        }
        nib_tensor_destroy(one);
        nib_tensor_destroy(seven);
    }
}

TEST(numbers_that_are_not_finite)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(130, 140);
        inputs[3] = NAN;
        inputs[140 * 64 + 70] = INFINITY;
        inputs[140 * 129 + 139] = -INFINITY;
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int usage = 0; usage < 2; usage++) {
            const struct usage c = usage_of(k, t, (nib_usage)usage);
            dequantize(t, (nib_usage)usage, NIB_F32, decoded);
            /* E2M1 has no NaN; infinity becomes the largest code, under whatever scale. */
            CHECK_KIND(k, k->element == NIB_E2M1 ? !isnan(decoded[3]) : isnan(decoded[3]));
            const unsigned largest = k->element == NIB_E4M3 ? 0x7E : k->element == NIB_E5M2 ? 0x7B : 7;
            const unsigned sign = k->element == NIB_E2M1 ? 8 : 0x80;
            CHECK_KIND(k, code_at(&c, 64, 70) == largest);
            CHECK_KIND(k, code_at(&c, 129, 139) == (largest | sign));
            if (!is_mx(k)) /* an infinite amax: scale 1 */
                CHECK_KIND(k, scale_at(&c, 64, 70) == 1);
            if (has_blocks(k)) /* a NaN does not count, nor does it spread beyond its element */
                CHECK_KIND(k, isfinite(decoded[2]) && isfinite(decoded[4]) && isfinite(decoded[140 + 3]));
        }
        nib_tensor_destroy(t);
    }
}

/* ---- Quantize into ---- */

TEST(quantize_into_a_tensor_that_exists)
{
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *before = NULL;
        CHECK_OK(nib_tensor_clone(t, &before));
        x = matrix(66, 100);
        const float yes = 1, no = 0;
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, &yes, t));
        CHECK_KIND(k, equal(t, before)); /* nothing happened */

        nib_buffer *buffers[NIB_PART_COUNT];
        for (int part = 0; part < NIB_PART_COUNT; part++)
            buffers[part] = nib_tensor_buffer(t, (nib_part)part);
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, &no, t));
        nib_tensor *direct = quantize(&q, &x, NULL);
        CHECK_KIND(k, equal(t, direct) && !equal(t, before));
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_KIND(k, nib_tensor_buffer(t, (nib_part)part) == buffers[part]); /* in place */

        /* With one usage, then with both again. */
        for (int usages = 1; usages <= 3; usages++) {
            q.rowwise = usages & 1, q.columnwise = usages >> 1;
            CHECK_OK(nib_quantize_into(&q, &x, NULL, NULL, t));
            nib_tensor *alone = quantize(&q, &x, NULL);
            CHECK_KIND(k, equal(t, alone));
            nib_tensor_destroy(alone);
        }
        CHECK_KIND(k, equal(t, direct));

        const nib_array other = matrix(66, 101);
        CHECK_FAILS(nib_quantize_into(NULL, &other, NULL, NULL, t), NIB_ERR_SHAPE, "shape");
        nib_tensor_destroy(t);
        nib_tensor_destroy(before);
        nib_tensor_destroy(direct);
    }
}

/* A view goes on decoding what it shares, also when the tensor it came from gives up one of its copies: of the one that
 * is dropped no code was written, so its values must stay; the other is as it was or as it is, never half of each. It
 * matters where both usages have one tensor scale. */
TEST(views_survive_a_change_of_usage)
{
    static float old[64 * 96];
    FOR_KINDS(k)
    for (int keep = 0; keep < 2; keep++) {
        nib_quantizer q = quantizer(k);
        nib_array x = matrix(64, 96);
        nib_tensor *t = quantize(&q, &x, NULL), *view = NULL;
        CHECK_OK(nib_tensor_view(t, 2, x.shape, &view));
        dequantize(view, (nib_usage)!keep, NIB_F32, decoded);
        dequantize(view, (nib_usage)keep, NIB_F32, old);
        for (int64_t i = 0; i < 64 * 96; i++)
            inputs[i] *= 3;
        q.rowwise = keep == NIB_ROWWISE, q.columnwise = keep == NIB_COLUMNWISE;
        CHECK_OK(nib_quantize_into(&q, &x, NULL, NULL, t));
        dequantize(view, (nib_usage)!keep, NIB_F32, decoded_too);
        CHECK_THAT(memcmp(decoded, decoded_too, sizeof old) == 0, "%s, copy %d of a view: [0] from %g to %g", k->name,
                   !keep, (double)decoded[0], (double)decoded_too[0]);
        dequantize(view, (nib_usage)keep, NIB_F32, decoded);
        dequantize(t, (nib_usage)keep, NIB_F32, decoded_too);
        CHECK_THAT(memcmp(decoded, decoded_too, sizeof old) == 0 || memcmp(decoded, old, sizeof old) == 0,
                   "%s, copy %d of a view: [0] is %g, neither %g nor %g", k->name, keep, (double)decoded[0],
                   (double)old[0], (double)decoded_too[0]);
        nib_tensor_destroy(view);
        nib_tensor_destroy(t);
    }
}

/* ---- Usages ---- */

TEST(usages_are_built_where_they_follow)
{
    FOR_KINDS(k)
    FOR_SHAPES(s)
    {
        nib_quantizer q = quantizer(k);
        const nib_array x = matrix(shapes[s][0], shapes[s][1]);
        nib_tensor *both = quantize(&q, &x, NULL);
        q.columnwise = 0;
        nib_tensor *t = quantize(&q, &x, NULL);
        int rowwise = -1, columnwise = -1;
        CHECK_OK(nib_tensor_get_usages(t, &rowwise, &columnwise));
        CHECK_KIND(k, rowwise == 1 && columnwise == 0 && !metadata_of(t).columnwise_valid);
        const nib_array y = array_of(decoded, NIB_F32, 2, x.shape);
        CHECK_FAILS(nib_dequantize(t, NIB_COLUMNWISE, &y), NIB_ERR_USAGE, "columnwise");
        if (derives(k)) {
            CHECK_OK(nib_tensor_update_usage(t, 1, 1));
            CHECK_KIND(k, equal(t, both));
            CHECK_OK(nib_tensor_update_usage(t, 0, 1)); /* the columnwise usage stands alone */
            check_values(k, t, NIB_COLUMNWISE);
            CHECK_OK(nib_dequantize(t, NIB_EITHER, &y));
            CHECK_FAILS(nib_tensor_update_usage(t, 1, -1), NIB_ERR_USAGE, "rowwise");
            CHECK_KIND(k, metadata_of(t).quantizer->rowwise == 0 && metadata_of(t).quantizer->columnwise == 1);
        } else {
            CHECK_FAILS(nib_tensor_update_usage(t, 1, 1), NIB_ERR_USAGE, "scales of its own");
            CHECK_OK(nib_tensor_get_usages(t, &rowwise, &columnwise));
            CHECK_KIND(k, rowwise == 1 && columnwise == 0);
        }
        CHECK_OK(nib_tensor_update_usage(t, 0, 0));
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_KIND(k, nib_tensor_buffer(t, (nib_part)part) == NULL);
        CHECK_FAILS(nib_dequantize(t, NIB_EITHER, &y), NIB_ERR_USAGE, "no data");

        /* Columnwise only, from the start. */
        q.rowwise = 0, q.columnwise = 1;
        nib_tensor *col = quantize(&q, &x, NULL);
        CHECK_OK(nib_tensor_update_usage(both, 0, -1));
        CHECK_KIND(k, equal(both, col));
        check_values(k, col, NIB_COLUMNWISE);
        nib_tensor_destroy(col);
        nib_tensor_destroy(both);
        nib_tensor_destroy(t);
    }
}

TEST(a_columnwise_copy_can_be_invalid)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(66, 100);
        const nib_array y = array_of(decoded, NIB_F32, 2, x.shape);
        nib_tensor *t = quantize(&q, &x, NULL), *clean = NULL, *usage = NULL;
        CHECK_OK(nib_tensor_clone(t, &clean));
        /* Another writer changes a rowwise code and says so. */
        uint8_t *codes = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_DATA));
        codes[5] ^= 3;
        CHECK_OK(nib_tensor_invalidate_columnwise(t));
        CHECK_KIND(k, metadata_of(t).columnwise && !metadata_of(t).columnwise_valid);
        CHECK_FAILS(nib_dequantize(t, NIB_COLUMNWISE, &y), NIB_ERR_USAGE, "not valid");
        CHECK_OK(nib_dequantize(t, NIB_EITHER, &y));
        check_values(k, t, NIB_ROWWISE);
        CHECK_OK(nib_tensor_clone(t, &usage)); /* the flag goes along */
        CHECK_KIND(k, !metadata_of(usage).columnwise_valid && equal(usage, t));
        CHECK_OK(nib_tensor_copy(usage, clean));
        CHECK_KIND(k, metadata_of(usage).columnwise_valid && equal(usage, clean));
        CHECK_OK(nib_tensor_copy(usage, t));
        CHECK_KIND(k, !metadata_of(usage).columnwise_valid);
        if (derives(k)) {
            CHECK_OK(nib_tensor_update_usage(t, -1, 1));
            CHECK_KIND(k, metadata_of(t).columnwise_valid);
            check_values(k, t, NIB_ROWWISE);
            memcpy(decoded_too, decoded, 66 * 100 * sizeof(float));
            check_values(k, t, NIB_COLUMNWISE);
            CHECK_BYTES(decoded, decoded_too, 66 * 100 * sizeof(float));
        } else {
            CHECK_FAILS(nib_tensor_update_usage(t, -1, 1), NIB_ERR_USAGE, "quantize again");
            CHECK_KIND(k, !metadata_of(t).columnwise_valid);
        }
        CHECK_OK(nib_tensor_invalidate_columnwise(t));
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
        CHECK_KIND(k, metadata_of(t).columnwise_valid && equal(t, clean));
        CHECK_OK(nib_tensor_update_usage(t, 0, 1));
        CHECK_OK(nib_tensor_invalidate_columnwise(t)); /* the only copy there is */
        CHECK_KIND(k, metadata_of(t).columnwise_valid);
        nib_tensor_destroy(t);
        nib_tensor_destroy(clean);
        nib_tensor_destroy(usage);
    }
}

/* ---- Save and restore ---- */

TEST(save_and_restore)
{
    static const nib_part orders[NIB_FORMAT_COUNT][NIB_PART_COUNT] = {
        [NIB_FLOAT8] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_TENSOR_SCALE },
        [NIB_MXFP8] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE },
        [NIB_FLOAT8_BLOCK] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE },
        [NIB_MXFP4] = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE },
    };
    FOR_KINDS(k)
    for (int usages = 1; usages <= 3; usages++) {
        nib_quantizer q = quantizer(k);
        q.rowwise = usages & 1, q.columnwise = usages >> 1;
        const nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *kept = NULL;
        CHECK_OK(nib_tensor_clone(t, &kept));
        nib_buffer *parts[NIB_PART_COUNT], *saved[NIB_PART_COUNT + 1] = { NULL };
        for (int part = 0; part < NIB_PART_COUNT; part++)
            parts[part] = nib_tensor_buffer(t, (nib_part)part);
        size_t n = 0, used = 0;
        CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &n));
        CHECK_KIND(k, n == (has_blocks(k) ? 4u : 3u));
        for (size_t i = 0; i < n; i++) {
            const nib_part part = orders[k->format][i];
            const bool there = part == NIB_ROW_TENSOR_SCALE || (part % 2 ? q.columnwise : q.rowwise);
            CHECK_THAT(saved[i] == parts[part] && (saved[i] != NULL) == there, "%s: entry %zu", k->name, i);
            CHECK_KIND(k, nib_tensor_buffer(t, part) == NULL);
        }
        CHECK_KIND(k, metadata_of(t).rows == 66 && !metadata_of(t).rowwise && !metadata_of(t).columnwise);
        CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, n - 1, &used), NIB_ERR_ARG, "left");
        CHECK_OK(nib_tensor_restore_from_saved(t, saved, NIB_PART_COUNT + 1, &used));
        CHECK_KIND(k, used == n && equal(t, kept));
        CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, n, &used), NIB_ERR_USAGE, "still has data");
        nib_tensor_destroy(t);
        nib_tensor_destroy(kept);
    }
}

/* A copy without its scale or tensor scale, or with one of another size, is not a copy. */
TEST(what_is_restored_is_checked)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *back = NULL;
        nib_buffer *saved[NIB_PART_COUNT], *small = NULL;
        size_t n = 0, used = 0;
        CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &n));
        CHECK_OK(nib_buffer_create(1, NULL, &small));
        for (size_t i = 0; i < n; i++) {
            nib_buffer *const whole = saved[i];
            saved[i] = NULL;
            const bool data_of_two = !has_blocks(k) && i < 2; /* Float8's tensor scale then serves the other usage alone */
            const nib_status status = nib_tensor_restore_from_saved(t, saved, n, &used);
            CHECK_THAT(status == (data_of_two ? NIB_OK : NIB_ERR_USAGE), "%s: without entry %zu: %s", k->name, i,
                       nib_status_name(status));
            if (!status)
                CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &n));
            saved[i] = small;
            CHECK_FAILS(nib_tensor_restore_from_saved(t, saved, n, &used), NIB_ERR_SHAPE, "");
            saved[i] = whole;
        }
        nib_buffer *parts[NIB_PART_COUNT] = { saved[0], saved[1] };
        for (size_t i = 2; i < n; i++)
            parts[has_blocks(k) ? i : NIB_ROW_TENSOR_SCALE] = saved[i];
        CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, 2, x.shape, parts, NIB_PART_COUNT, &back));
        CHECK_OK(nib_tensor_restore_from_saved(t, saved, n, &used));
        CHECK_KIND(k, equal(t, back));
        nib_buffer_release(small);
        nib_tensor_destroy(t);
        nib_tensor_destroy(back);
    }
}

TEST(save_a_mixed_list)
{
    enum { N = sizeof kinds / sizeof *kinds };
    nib_item items[N + 1] = { 0 };
    nib_tensor *kept[N] = { NULL };
    size_t count = 0, used = 0, expected = 1;
    for (int i = 0; i < N; i++) {
        const nib_quantizer q = quantizer(&kinds[i]);
        const nib_array x = matrix(33, 65);
        items[i + (i >= 4)].tensor = quantize(&q, &x, NULL);
        CHECK_OK(nib_tensor_clone(items[i + (i >= 4)].tensor, &kept[i]));
        expected += has_blocks(&kinds[i]) ? 4 : 3;
    }
    items[4].array = array_of(inputs, NIB_F32, 1, (const int64_t[]){ 7 });
    nib_saved saved[64];
    CHECK_OK(nib_saved_count(items, N + 1, &count));
    CHECK(count == expected);
    CHECK_FAILS(nib_prepare_for_saving(items, N + 1, saved, expected - 1, &count), NIB_ERR_ARG, "space for");
    CHECK_OK(nib_prepare_for_saving(items, N + 1, saved, 64, &count));
    CHECK(count == expected && items[4].array.data == NULL);
    CHECK_OK(nib_restore_from_saved(items, N + 1, saved, count, &used));
    CHECK(used == expected && items[4].array.data == inputs && items[4].array.shape[0] == 7);
    for (int i = 0; i < N; i++) {
        CHECK_KIND(&kinds[i], equal(items[i + (i >= 4)].tensor, kept[i]));
        nib_tensor_destroy(items[i + (i >= 4)].tensor);
        nib_tensor_destroy(kept[i]);
    }
}

/* ---- Clone, copy, compare, zero ---- */

TEST(clone_copy_equal_zero)
{
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        nib_array x = matrix(66, 100);
        nib_tensor *a = quantize(&q, &x, NULL), *b = NULL;
        CHECK_OK(nib_tensor_clone(a, &b));
        CHECK_KIND(k, equal(a, b));
        for (int part = 0; part < NIB_PART_COUNT; part++) /* every byte that means something is compared */
            if (nib_tensor_buffer(b, (nib_part)part)) {
                uint8_t *bytes = nib_buffer_data(nib_tensor_buffer(b, (nib_part)part));
                CHECK_KIND(k, bytes != nib_buffer_data(nib_tensor_buffer(a, (nib_part)part)));
                bytes[0] ^= 1;
                CHECK_THAT(!equal(a, b), "%s: part %d", k->name, part);
                bytes[0] ^= 1;
                nib_array scales;
                CHECK_OK(nib_tensor_part(b, (nib_part)part, &scales));
                int rank;
                int64_t valid[NIB_MAX_RANK];
                CHECK_OK(nib_part_valid_shape(&q, (nib_part)part, 2, x.shape, &rank, valid));
                if (rank == 2 && valid[1] < scales.shape[1]) { /* and padding is not */
                    bytes[scales.shape[1] * (nib_dtype_bits(scales.dtype) / 8) - 1] ^= 1;
                    CHECK_KIND(k, equal(a, b));
                }
            }
        x = matrix(66, 100);
        nib_tensor *c = quantize(&q, &x, NULL);
        CHECK_KIND(k, !equal(a, c));
        CHECK_OK(nib_tensor_copy(b, c));
        CHECK_KIND(k, equal(b, c));

        /* A target with one usage takes it; a source with one does not fill two. */
        CHECK_OK(nib_tensor_update_usage(b, 1, 0));
        CHECK_OK(nib_tensor_copy(b, a));
        check_values(k, b, NIB_ROWWISE);
        dequantize(a, NIB_ROWWISE, NIB_F32, decoded_too);
        CHECK_BYTES(decoded, decoded_too, 66 * 100 * sizeof(float));
        CHECK_FAILS(nib_tensor_copy(a, b), NIB_ERR_USAGE, "columnwise");

        /* Another element, block shape or format is another meaning. */
        FOR_KINDS(other)
        {
            const nib_quantizer p = quantizer(other);
            nib_tensor *d = quantize(&p, &x, NULL);
            if (other != k) {
                CHECK_KIND(k, !equal(c, d));
                CHECK_FAILS(nib_tensor_copy(c, d), NIB_ERR_MISMATCH, "differ");
            } else {
                CHECK_OK(nib_tensor_copy(c, d));
            }
            nib_tensor_destroy(d);
        }
        const nib_array small = matrix(65, 100);
        nib_tensor *e = quantize(&q, &small, NULL);
        CHECK_FAILS(nib_tensor_copy(c, e), NIB_ERR_MISMATCH, "65 x 100");
        /* How scales are chosen is not what they mean. */
        nib_quantizer chosen = q;
        if (is_mx(k))
            chosen.mx_rule = NIB_MX_FLOOR;
        else
            chosen.pow2_scales ^= 1, chosen.amax_epsilon = 1;
        CHECK_OK(nib_tensor_set_quantizer(c, &chosen));
        if (k->element != NIB_E2M1) {
            chosen.element = k->element == NIB_E4M3 ? NIB_E5M2 : NIB_E4M3;
            CHECK_FAILS(nib_tensor_set_quantizer(c, &chosen), NIB_ERR_MISMATCH, "meaning");
        }

        CHECK_OK(nib_tensor_zero(c));
        for (int usage = 0; usage < 2; usage++) {
            check_values(k, c, (nib_usage)usage);
            for (int64_t i = 0; i < 66 * 100; i++)
                CHECK_KIND(k, decoded[i] == 0 && !signbit(decoded[i]));
        }
        if (!has_blocks(k))
            CHECK_KIND(k, *(float *)nib_buffer_data(nib_tensor_buffer(c, NIB_ROW_TENSOR_SCALE)) == 1);
        nib_tensor *fresh = NULL;
        CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, x.shape, NULL, &fresh));
        CHECK_KIND(k, equal(c, fresh));
        nib_tensor_destroy(fresh);
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
        nib_tensor_destroy(c);
        nib_tensor_destroy(e);
    }
}

TEST(rebind_the_rowwise_codes)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(33, 65);
        nib_tensor *t = quantize(&q, &x, NULL), *kept = NULL;
        CHECK_OK(nib_tensor_clone(t, &kept));
        nib_buffer *home = NULL;
        CHECK_OK(nib_buffer_create(nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_DATA)), NULL, &home));
        CHECK_OK(nib_tensor_rebind_rowwise(t, home));
        CHECK_KIND(k, nib_tensor_buffer(t, NIB_ROW_DATA) == home && equal(t, kept));
        nib_buffer_release(home);
        nib_tensor_destroy(t);

        /* A view from before stays as it was, or sees whole updates; never codes of one and a tensor scale of the other. */
        nib_tensor *view = NULL;
        CHECK_OK(nib_tensor_clone(kept, &t));
        CHECK_OK(nib_tensor_view(t, 2, x.shape, &view));
        CHECK_OK(nib_buffer_create(nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_DATA)), NULL, &home));
        CHECK_OK(nib_tensor_rebind_rowwise(t, home));
        nib_buffer_release(home);
        for (int i = 0; i < 33 * 65; i++)
            inputs[i] *= -3;
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
        for (int usage = 0; usage < 2; usage++) {
            dequantize(view, (nib_usage)usage, NIB_F32, decoded);
            for (int which = 0, same = 0; which < 2; which++) {
                dequantize(which ? t : kept, (nib_usage)usage, NIB_F32, decoded_too);
                same |= memcmp(decoded, decoded_too, 33 * 65 * sizeof(float)) == 0;
                CHECK_THAT(same || !which, "%s, copy %d of a view: [0] is %g", k->name, usage, (double)decoded[0]);
            }
        }
        nib_tensor_destroy(view);
        nib_tensor_destroy(t);
        nib_tensor_destroy(kept);
    }
}

/* ---- Views and slices ---- */

static void check_same_values(const struct kind *k, const nib_tensor *a, const nib_tensor *b, nib_usage usage)
{
    const nib_metadata m = metadata_of(a);
    dequantize(a, usage, NIB_F32, decoded);
    dequantize(b, usage, NIB_F32, decoded_too);
    CHECK_THAT(memcmp(decoded, decoded_too, (size_t)(m.rows * m.cols) * sizeof(float)) == 0, "%s: values differ",
               k->name);
}

TEST(views_of_the_same_length)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        nib_array x = matrix(66, 100);
        nib_tensor *t = quantize(&q, &x, NULL), *view = NULL, *direct = NULL;
        const int64_t shape[4] = { 3, 2, 11, 100 }, open[3] = { -1, 33, 100 };
        CHECK_OK(nib_tensor_view(t, 4, shape, &view));
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_KIND(k, nib_tensor_buffer(view, (nib_part)part) == nib_tensor_buffer(t, (nib_part)part));
        x = array_of(inputs, NIB_F32, 4, shape);
        direct = quantize(&q, &x, NULL);
        CHECK_KIND(k, equal(view, direct));
        check_same_values(k, t, view, NIB_ROWWISE);
        check_same_values(k, t, view, NIB_COLUMNWISE);
        nib_tensor_destroy(view);
        CHECK_OK(nib_tensor_view(t, 3, open, &view));
        CHECK_KIND(k, metadata_of(view).shape[0] == 2);
        /* What is written through one is seen through the other. */
        x = matrix(66, 100);
        CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
        check_same_values(k, t, view, NIB_COLUMNWISE);
        nib_tensor_destroy(view);
        CHECK_FAILS(nib_tensor_view(t, 2, (const int64_t[]){ 67, 100 }, &view), NIB_ERR_SHAPE, "6600");
        nib_tensor_destroy(t);
        nib_tensor_destroy(direct);
    }
}

TEST(views_of_another_length)
{
    FOR_KINDS(k)
    {
        nib_quantizer q = quantizer(k);
        q.columnwise = 0;
        const bool lines = k->rows == 1 && k->format != NIB_FLOAT8_BLOCK; /* scales lie line after line */
        const nib_array x = matrix(128, 256);
        nib_tensor *t = quantize(&q, &x, NULL), *view = NULL;
        /* 128 x 8 and 256 x 4 scales: neither has padding. */
        const int64_t half[2] = { 256, 128 }, flat[1] = { 128 * 256 }, other[2] = { 64, 512 }, odd[2] = { 2048, 16 };
        if (lines || !has_blocks(k)) {
            CHECK_OK(nib_tensor_view(t, 2, half, &view));
            const nib_array as_half = array_of(inputs, NIB_F32, 2, half);
            nib_tensor *direct = quantize(&q, &as_half, NULL);
            CHECK_KIND(k, equal(view, direct));
            check_values(k, view, NIB_ROWWISE);
            nib_tensor_destroy(view);
            nib_tensor_destroy(direct);
        } else {
            CHECK_FAILS(nib_tensor_view(t, 2, half, &view), NIB_ERR_SHAPE, "last dim");
            CHECK_FAILS(nib_tensor_reshape(t, 2, half, &view), NIB_ERR_SHAPE, "last dim");
        }
        /* 64 lines are padded to 128, so that the scales must move; so are the 1 and 1024 of one line. */
        if (lines) {
            CHECK_FAILS(nib_tensor_view(t, 2, other, &view), NIB_ERR_SHAPE, "padded");
            CHECK_FAILS(nib_tensor_view(t, 1, flat, &view), NIB_ERR_SHAPE, "padded");
            CHECK_FAILS(nib_tensor_view(t, 2, odd, &view), NIB_ERR_SHAPE, "multiples of 32");
        }
        if (lines || !has_blocks(k))
            for (int i = 0; i < 2; i++) {
                const nib_array y = array_of(inputs, NIB_F32, i ? 1 : 2, i ? flat : other);
                nib_tensor *direct = quantize(&q, &y, NULL);
                CHECK_OK(nib_tensor_reshape(t, y.rank, y.shape, &view));
                CHECK_KIND(k, equal(view, direct));
                /* All is shared, or nothing. */
                CHECK_KIND(k, (nib_tensor_buffer(view, NIB_ROW_DATA) == nib_tensor_buffer(t, NIB_ROW_DATA)) == !lines);
                nib_tensor_destroy(view);
                nib_tensor_destroy(direct);
            }
        if (!has_blocks(k)) { /* Float8: any length */
            CHECK_OK(nib_tensor_view(t, 2, odd, &view));
            check_values(k, view, NIB_ROWWISE);
            nib_tensor_destroy(view);
        }
        nib_tensor_destroy(t);

        q.columnwise = 1;
        t = quantize(&q, &x, NULL);
        const nib_status status = nib_tensor_view(t, 2, half, &view);
        CHECK_KIND(k, status == (lines || !has_blocks(k) ? NIB_ERR_USAGE : NIB_ERR_SHAPE));
        nib_tensor_destroy(t);
    }
}

/* Rows of x from `first` as a tensor of their own. */
static nib_tensor *piece_of(const nib_quantizer *q, const nib_array *x, int64_t first, int64_t count,
                            const float *scale)
{
    nib_tensor *t = NULL;
    nib_overrides overrides = { .bytes = sizeof overrides, .scale = scale };
    const int64_t shape[2] = { count, x->shape[1] };
    const nib_array rows = array_of((float *)x->data + first * x->shape[1], NIB_F32, 2, shape);
    CHECK_OK(nib_quantize(q, &rows, scale ? &overrides : NULL, &t));
    return t;
}

/* Where a block lies within a piece, cutting before and after quantizing is the same. With one scale for the tensor
 * it is so when that scale is given. */
TEST(slices_are_what_the_piece_would_be)
{
    const float given_scale = 3.5f;
    FOR_KINDS(k)
    for (int usages = 1; usages <= 3; usages++) {
        nib_quantizer q = quantizer(k);
        q.rowwise = usages & 1, q.columnwise = usages >> 1;
        const float *scale = has_blocks(k) ? NULL : &given_scale;
        const nib_array x = matrix(300, 150);
        nib_tensor *t = piece_of(&q, &x, 0, 300, scale), *slice = NULL;
        const int64_t step = usages == 1 && k->rows <= 1 ? 1 : has_blocks(k) ? k->block : 1;
        for (int i = 0; i < 8; i++) {
            const int64_t first = test_below(300 / step) * step;
            int64_t count = i % 2 ? 300 - first : test_below((300 - first) / step + 1) * step;
            CHECK_OK(nib_tensor_slice(t, first, count, &slice));
            nib_tensor *direct = piece_of(&q, &x, first, count, scale);
            CHECK_THAT(equal(slice, direct), "%s: rows %lld to %lld", k->name, (long long)first,
                       (long long)(first + count));
            nib_tensor_destroy(slice);
            nib_tensor_destroy(direct);
        }
        if (step > 1) {
            CHECK_FAILS(nib_tensor_slice(t, 1, step, &slice), NIB_ERR_SHAPE, "block borders");
            CHECK_FAILS(nib_tensor_slice(t, 0, step - 1, &slice), NIB_ERR_SHAPE, "block borders");
        }
        CHECK_FAILS(nib_tensor_slice(t, 200, 101, &slice), NIB_ERR_SHAPE, "of 300");

        const int64_t counts[4] = { 128, 0, 128, 44 }, few[2] = { 128, 128 };
        nib_tensor *pieces[4] = { NULL };
        CHECK_OK(nib_tensor_split(t, counts, 4, pieces));
        for (int64_t i = 0, first = 0; i < 4; first += counts[i++]) {
            nib_tensor *direct = piece_of(&q, &x, first, counts[i], scale);
            CHECK_THAT(equal(pieces[i], direct), "%s: piece %lld", k->name, (long long)i);
            nib_tensor_destroy(direct);
            nib_tensor_destroy(pieces[i]);
        }
        CHECK_FAILS(nib_tensor_split(t, few, 2, pieces), NIB_ERR_SHAPE, "256 rows");
        nib_tensor_destroy(t);
    }
}

/* ---- Swizzle ---- */

TEST(swizzle_and_back)
{
    FOR_KINDS(k)
    FOR_SHAPES(s)
    {
        nib_quantizer q = quantizer(k);
        const int64_t M = shapes[s][0], K = shapes[s][1];
        const nib_array x = matrix(M, K);
        nib_tensor *t = quantize(&q, &x, NULL), *plain = NULL, *direct = NULL;
        CHECK_OK(nib_tensor_clone(t, &plain));
        if (!is_mx(k)) {
            CHECK_FAILS(nib_tensor_swizzle(t), NIB_ERR_UNSUPPORTED, "swizzled");
            CHECK_OK(nib_tensor_unswizzle(t)); /* they are not */
            CHECK_KIND(k, equal(t, plain));
            q.swizzled = 1;
            CHECK_FAILS(nib_quantize(&q, &x, NULL, &direct), NIB_ERR_MODE, "swizzled");
            nib_tensor_destroy(t);
            nib_tensor_destroy(plain);
            continue;
        }
        CHECK_OK(nib_tensor_swizzle(t));
        CHECK_KIND(k, metadata_of(t).quantizer->swizzled && !equal(t, plain));
        for (int usage = 0; usage < 2; usage++) {
            const nib_part part = usage ? NIB_COL_SCALE : NIB_ROW_SCALE;
            const uint8_t *tiles = nib_buffer_data(nib_tensor_buffer(t, part)),
                          *scales = nib_buffer_data(nib_tensor_buffer(plain, part));
            const int64_t lines = usage ? K : M, blocks = ((usage ? M : K) + 31) / 32;
            nib_array shape;
            int64_t sum = 0, sum_plain = 0;
            CHECK_OK(nib_tensor_part(plain, part, &shape));
            for (int64_t line = 0; line < lines; line++)
                for (int64_t block = 0; block < blocks; block++) {
                    int64_t at[2];
                    scale_index(k, (nib_usage)usage, usage ? block * 32 : line, usage ? line : block * 32, at);
                    const uint8_t scale = scales[at[0] * shape.shape[1] + at[1]];
                    sum_plain += scale;
                    CHECK_KIND(k, tiles[scale_place(line, block, round_up(blocks, 4), true)] == scale);
                }
            for (size_t i = 0; i < nib_buffer_bytes(nib_tensor_buffer(t, part)); i++)
                sum += tiles[i];
            CHECK_KIND(k, sum == sum_plain); /* the rest is zero */
            check_same_values(k, plain, t, (nib_usage)usage);
        }
        q.swizzled = 1;
        direct = quantize(&q, &x, NULL);
        CHECK_KIND(k, equal(direct, t));
        if (derives(k)) {
            CHECK_OK(nib_tensor_update_usage(direct, 1, 0));
            CHECK_FAILS(nib_tensor_update_usage(direct, 1, 1), NIB_ERR_USAGE, "unswizzle");
        }
        CHECK_OK(nib_tensor_unswizzle(t));
        CHECK_KIND(k, equal(t, plain));
        nib_tensor_destroy(t);
        nib_tensor_destroy(plain);
        nib_tensor_destroy(direct);
    }
}

/* ---- Files and DLPack ---- */

TEST(write_and_read_back)
{
    char path[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/nib_formats_%d.safetensors", tmp ? tmp : "/tmp", (int)getpid());
    enum { N = sizeof kinds / sizeof *kinds };
    for (int usages = 1; usages <= 3; usages++) {
        nib_tensor *written[N], *back = NULL;
        nib_writer *writer = NULL;
        nib_file *file = NULL;
        char name[N][16];
        CHECK_OK(nib_writer_create(path, &writer));
        for (int i = 0; i < N; i++) {
            nib_quantizer q = quantizer(&kinds[i]);
            q.rowwise = usages & 1, q.columnwise = usages >> 1;
            q.swizzled = is_mx(&kinds[i]) && usages == 2;
            if (is_mx(&kinds[i]))
                q.mx_rule = NIB_MX_FLOOR;
            else
                q.amax_epsilon = 0.125f;
            (void)matrix(33, 65);
            const nib_array x = array_of(inputs, NIB_F32, 3, (const int64_t[]){ 3, 11, 65 });
            written[i] = quantize(&q, &x, NULL);
            if (usages == 3)
                CHECK_OK(nib_tensor_invalidate_columnwise(written[i]));
            snprintf(name[i], sizeof name[i], "t%d", i);
            CHECK_OK(nib_writer_declare_tensor(writer, name[i], written[i]));
        }
        for (int i = 0; i < N; i++)
            CHECK_OK(nib_writer_write_tensor(writer, name[i], written[i]));
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
        CHECK_OK(nib_file_open(path, &file));
        for (int i = 0; i < N; i++) {
            CHECK_OK(nib_file_read_tensor(file, name[i], NULL, &back));
            const nib_metadata a = metadata_of(written[i]), b = metadata_of(back);
            CHECK_KIND(&kinds[i], equal(written[i], back) && nib_quantizer_equal(a.quantizer, b.quantizer));
            CHECK_KIND(&kinds[i], a.columnwise_valid == b.columnwise_valid && a.element == b.element);
            nib_tensor_destroy(back);
            nib_tensor_destroy(written[i]);
        }
        nib_file_close(file);
        unlink(path);
    }
}

/* DLPack's binary interface before 1.0. */
struct DLManagedTensor {
    void *data;
    int32_t device_type, device_id, rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *context;
    void (*deleter)(struct DLManagedTensor *self);
};

TEST(parts_leave_through_dlpack)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(33, 65);
        nib_tensor *t = quantize(&q, &x, NULL);
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            struct DLManagedTensor *managed = NULL;
            nib_array array = { 0 };
            if (!nib_tensor_buffer(t, (nib_part)part)) {
                CHECK_FAILS(nib_tensor_to_dlpack(t, (nib_part)part, &managed), NIB_ERR_USAGE, "no such part");
                continue;
            }
            CHECK_OK(nib_tensor_to_dlpack(t, (nib_part)part, &managed));
            CHECK_OK(nib_tensor_part(t, (nib_part)part, &array));
            const bool floats = array.dtype == NIB_F32;
            CHECK_KIND(k, managed->data == array.data && managed->device_type == 1 && managed->rank == array.rank);
            CHECK_KIND(k, managed->code == (floats ? 2 : 1) && managed->bits == (floats ? 32 : 8));
            CHECK_KIND(k, managed->lanes == 1);
            for (int i = 0; i < array.rank; i++)
                CHECK_KIND(k, managed->shape[i] == array.shape[i] && managed->strides[i] == array.strides[i]);
            managed->deleter(managed);
        }
        /* The memory outlives the tensor. */
        struct DLManagedTensor *managed = NULL;
        CHECK_OK(nib_tensor_to_dlpack(t, NIB_ROW_DATA, &managed));
        const struct usage c = usage_of(k, t, NIB_ROWWISE);
        const unsigned first = code_at(&c, 0, 0);
        nib_tensor_destroy(t);
        CHECK_KIND(k, (*(uint8_t *)managed->data & (k->element == NIB_E2M1 ? 15u : 255u)) == first);
        managed->deleter(managed);
    }
}

/* ---- Small and empty ---- */

TEST(empty_tensors)
{
    static const int64_t empty[][3] = { { 0, 0, 0 }, { 2, 0, 96 }, { 2, 33, 0 }, { 0, 5, 7 } };
    FOR_KINDS(k)
    for (size_t s = 0; s < sizeof empty / sizeof *empty; s++)
        for (int rank = 1; rank <= 3; rank++) {
            const int64_t *shape = empty[s] + 3 - rank;
            int64_t elements = 1;
            for (int i = 0; i < rank; i++)
                elements *= shape[i];
            if (elements)
                continue;
            const nib_quantizer q = quantizer(k);
            const nib_array x = array_of(NULL, NIB_BF16, rank, shape), y = array_of(NULL, NIB_F32, rank, shape);
            nib_tensor *t = quantize(&q, &x, NULL), *usage = NULL;
            CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &y));
            CHECK_OK(nib_dequantize(t, NIB_COLUMNWISE, &y));
            for (int part = 0; part < NIB_PART_COUNT; part++) {
                nib_array array;
                if (nib_tensor_part(t, (nib_part)part, &array) == NIB_OK)
                    CHECK_KIND(k, array.bytes == nib_buffer_bytes(nib_tensor_buffer(t, (nib_part)part)));
            }
            CHECK_OK(nib_tensor_clone(t, &usage));
            CHECK_KIND(k, equal(t, usage));
            CHECK_OK(nib_quantize_into(NULL, &x, NULL, NULL, t));
            CHECK_KIND(k, equal(t, usage));
            CHECK_OK(nib_tensor_zero(usage));
            nib_tensor_destroy(usage);
            nib_tensor_destroy(t);
        }
}

TEST(rank_zero)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        float one = -2.75f, back = 0;
        const nib_array x = array_of(&one, NIB_F32, 0, NULL), y = array_of(&back, NIB_F32, 0, NULL);
        nib_tensor *t = NULL, *view = NULL;
        if (has_blocks(k)) {
            CHECK_FAILS(nib_quantize(&q, &x, NULL, &t), NIB_ERR_SHAPE, "rank 1");
            CHECK_FAILS(nib_tensor_create(&q, NIB_F32, 0, NULL, NULL, &t), NIB_ERR_SHAPE, "rank 1");
            CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_SHAPE, "rank 1");
            continue;
        }
        CHECK_OK(nib_quantizer_check(&q, &x));
        CHECK_OK(nib_quantize(&q, &x, NULL, &t));
        for (int usage = 0; usage < 2; usage++) {
            back = 0;
            CHECK_OK(nib_dequantize(t, (nib_usage)usage, &y));
            CHECK_KIND(k, fabsf(back - one) < 1e-6f); /* the largest is at the largest code */
        }
        int rank = -1;
        int64_t shape[NIB_MAX_RANK];
        CHECK_OK(nib_part_shape(&q, NIB_ROW_DATA, 0, NULL, &rank, shape));
        CHECK_KIND(k, rank == 0);
        CHECK_OK(nib_part_shape(&q, NIB_COL_DATA, 0, NULL, &rank, shape));
        CHECK_KIND(k, rank == 2 && shape[0] == 1 && shape[1] == 1);
        const nib_metadata m = metadata_of(t);
        CHECK_KIND(k, m.rank == 0 && m.rows == 1 && m.cols == 1);
        CHECK_OK(nib_tensor_view(t, 2, (const int64_t[]){ 1, 1 }, &view));
        nib_tensor_destroy(t);
        CHECK_OK(nib_tensor_view(view, 0, NULL, &t));
        check_values(k, t, NIB_COLUMNWISE);
        nib_tensor_destroy(view);
        CHECK_OK(nib_tensor_clone(t, &view));
        CHECK_KIND(k, equal(t, view));
        nib_tensor_destroy(view);
        nib_tensor_destroy(t);
        CHECK_OK(nib_tensor_create(&q, NIB_F32, 0, NULL, NULL, &t));
        nib_tensor_destroy(t);
    }
}

/* ---- What is rejected ---- */

static void check_rejected(const struct kind *k, const nib_quantizer *q, nib_status status, const char *what)
{
    const nib_array x = array_of(inputs, NIB_F32, 2, (const int64_t[]){ 32, 32 });
    nib_tensor *t = NULL;
    CHECK_THAT(nib_quantizer_check(q, NULL) == status, "%s with %s: %s: %s", k->name, what,
               nib_status_name(nib_quantizer_check(q, NULL)), nib_last_error());
    CHECK_KIND(k, nib_quantize(q, &x, NULL, &t) == status && !t);
    nib_tensor_destroy(t);
}

TEST(options_of_other_formats_are_refused)
{
    FOR_KINDS(k)
    {
        const nib_quantizer good = quantizer(k);
        nib_quantizer q;
#define REJECTED(change, status) (q = good, change, check_rejected(k, &q, status, #change))
        REJECTED(q.row_scaled = 1, NIB_ERR_MODE);
        REJECTED(q.rht = 1, NIB_ERR_MODE);
        REJECTED(q.rht_rowwise = 1, NIB_ERR_MODE);
        REJECTED(q.scale_rule = NIB_SCALE_4OVER6, NIB_ERR_MODE);
        REJECTED(q.scale_rule = NIB_SCALE_SWEEP, NIB_ERR_MODE);
        REJECTED(q.e4m3_max = 256, NIB_ERR_MODE);
        REJECTED((q.e4m3_max = 256, q.scale_rule = NIB_SCALE_4OVER6), NIB_ERR_MODE);
        REJECTED(q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT, NIB_ERR_MODE);
        REJECTED(q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2, NIB_ERR_MODE);
        REJECTED(q.min_block_scale = 0.5f, NIB_ERR_MODE);
        REJECTED(q.rounding = NIB_ROUND_STOCHASTIC_8, NIB_ERR_MODE);
        REJECTED(q.rounding = NIB_ROUND_STOCHASTIC_24, NIB_ERR_MODE);
        REJECTED(q.rounding = NIB_ROUND_STOCHASTIC_UNBIASED, NIB_ERR_MODE);
        REJECTED(q.no_tensor_scale = 1, NIB_ERR_MODE);
        for (int dialect = NIB_DIALECT_TE + 1; dialect < NIB_DIALECT_COUNT; dialect++)
            REJECTED(q.dialect = (nib_dialect)dialect, NIB_ERR_MODE);
        REJECTED((q.dialect = NIB_DIALECT_TORCHAO, q.no_tensor_scale = 1), NIB_ERR_MODE);

        /* Elements and blocks that the format does not have. */
        for (int dtype = 1; dtype < NIB_DTYPE_COUNT + 2; dtype++) {
            const bool float8 = dtype == NIB_E4M3 || dtype == NIB_E5M2;
            if (k->element == NIB_E2M1 ? dtype != NIB_E2M1 : !float8)
                REJECTED(q.element = (nib_dtype)dtype, NIB_ERR_DTYPE);
        }
        static const int32_t dims[][2] = { { 0, 0 },   { 1, 16 },  { 16, 16 },   { 1, 32 },  { 32, 32 }, { 1, 128 },
                                           { 128, 128 }, { 32, 1 }, { 128, 1 }, { 0, 32 }, { -1, 32 }, { 1, 0 } };
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
            const bool line = dims[i][0] == 1 && dims[i][1] == k->block,
                       square = dims[i][0] == k->block && dims[i][1] == k->block && k->format != NIB_MXFP4;
            if (!line && !square)
                REJECTED((q.block_dims[0] = dims[i][0], q.block_dims[1] = dims[i][1]), NIB_ERR_ARG);
        }

        /* And those of one another. */
        if (is_mx(k)) {
            REJECTED(q.pow2_scales = 1, NIB_ERR_MODE);
            REJECTED(q.amax_epsilon = 0.5f, NIB_ERR_MODE);
        } else {
            REJECTED(q.mx_rule = NIB_MX_FLOOR, NIB_ERR_MODE);
            REJECTED(q.swizzled = 1, NIB_ERR_MODE);
        }
        if (has_blocks(k))
            REJECTED(q.amax_comm = nib_comm_serial(), NIB_ERR_MODE);
        REJECTED(q.mx_rule = NIB_MX_RULE_COUNT, NIB_ERR_ARG);
        REJECTED(q.amax_epsilon = -1, NIB_ERR_ARG);
        REJECTED(q.amax_epsilon = NAN, NIB_ERR_ARG);
        REJECTED(q.amax_epsilon = INFINITY, NIB_ERR_ARG);
        REJECTED(q.format = (nib_format)nib_format_count(), NIB_ERR_ARG);
        CHECK_OK(nib_quantizer_check(&good, NULL));
    }
    static const struct kind nvfp4 = { "nvfp4", NIB_NVFP4, NIB_E2M1, 1, 16 };
    const nib_quantizer good = quantizer(&nvfp4);
    const struct kind *k = &nvfp4;
    nib_quantizer q;
    REJECTED(q.pow2_scales = 1, NIB_ERR_MODE);
    REJECTED(q.amax_epsilon = 1, NIB_ERR_MODE);
    REJECTED(q.mx_rule = NIB_MX_FLOOR, NIB_ERR_MODE);
    REJECTED(q.element = NIB_E4M3, NIB_ERR_DTYPE);
    REJECTED((q.block_dims[0] = 1, q.block_dims[1] = 32), NIB_ERR_ARG);
#undef REJECTED
}

TEST(there_is_no_reference_gemm)
{
    FOR_KINDS(k)
    {
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(32, 32), y = array_of(decoded, NIB_F32, 2, x.shape);
        nib_tensor *t = quantize(&q, &x, NULL);
        CHECK_FAILS(nib_gemm_reference(t, NIB_ROWWISE, t, NIB_ROWWISE, 1, 0, &y), NIB_ERR_UNSUPPORTED, "GEMM");
        nib_tensor_destroy(t);
    }
}

/* ---- Numbers that the caller brings ---- */

static float tensor_scale_of(const nib_tensor *t)
{
    return *(const float *)nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE));
}

TEST(float8_takes_given_numbers)
{
    FOR_KINDS(k)
    {
        if (has_blocks(k))
            continue;
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(33, 65);
        const float largest = k->element == NIB_E4M3 ? 448 : 57344;
        float amax = 0;
        for (int i = 0; i < 33 * 65; i++)
            amax = fmaxf(amax, fabsf(inputs[i]));
        nib_tensor *current = quantize(&q, &x, NULL), *t = NULL;
        CHECK_KIND(k, tensor_scale_of(current) == 1.0f / (largest / amax));

        /* An amax, in either place. */
        for (int usage = 0; usage < 2; usage++) {
            nib_overrides overrides = { .bytes = sizeof overrides };
            overrides.amax[usage] = &amax;
            CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
            CHECK_KIND(k, equal(t, current));
            nib_tensor_destroy(t);
        }
        const float twice = 2 * amax;
        nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &twice, NULL } };
        CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
        CHECK_KIND(k, tensor_scale_of(t) == 1.0f / (largest / twice));
        nib_tensor_destroy(t);

        /* The tensor scale itself, and the multiplier. */
        const float tensor_scale = 0.25f, scale = 4.0f;
        overrides = (nib_overrides){ .bytes = sizeof overrides, .tensor_scale = { &tensor_scale, NULL } };
        nib_tensor *by_level = NULL;
        CHECK_OK(nib_quantize(&q, &x, &overrides, &by_level));
        float seen = 0.5f;
        overrides = (nib_overrides){ .bytes = sizeof overrides, .scale = &scale, .amax_seen = &seen };
        CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
        CHECK_KIND(k, equal(t, by_level) && tensor_scale_of(t) == tensor_scale && seen == amax);
        check_values(k, t, NIB_ROWWISE);
        check_values(k, t, NIB_COLUMNWISE);
        seen = 2 * amax; /* raised only */
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, NULL, t));
        CHECK_KIND(k, seen == 2 * amax);
        seen = 0;
        const float noop = 1;
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, &noop, t));
        CHECK_KIND(k, seen == 0);
        overrides.scale = NULL; /* current scaling tells as well */
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, NULL, t));
        CHECK_KIND(k, seen == amax && equal(t, current));
        nib_tensor_destroy(t);
        nib_tensor_destroy(by_level);
        nib_tensor_destroy(current);
    }
}

static nib_status double_all(void *context, float *values, size_t n)
{
    ++*(int *)context;
    for (size_t i = 0; i < n; i++)
        values[i] *= 2;
    return NIB_OK;
}

TEST(float8_reduces_its_amax)
{
    int calls = 0;
    const nib_comm comm = { .bytes = sizeof comm, .context = &calls, .size = 2, .allreduce_max_f32 = double_all };
    nib_quantizer q = quantizer(&kinds[0]);
    const nib_array x = matrix(33, 65);
    nib_tensor *alone = quantize(&q, &x, NULL), *t = NULL;
    q.amax_comm = &comm;
    float seen = 0;
    nib_overrides overrides = { .bytes = sizeof overrides, .amax_seen = &seen };
    CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
    CHECK(calls == 1 && tensor_scale_of(t) == 2 * tensor_scale_of(alone)); /* both are exact: a power of two apart */
    float amax = 0;
    for (int i = 0; i < 33 * 65; i++)
        amax = fmaxf(amax, fabsf(inputs[i]));
    CHECK(seen == 2 * amax);
    nib_tensor_destroy(alone);
    nib_tensor_destroy(t);
}

/* A multiplier is Float8's alone. Elsewhere it would have to be obeyed or be rejected, not make up another tensor scale. */
TEST(a_given_scale_is_refused_elsewhere)
{
    nib_quantizer q;
    const nib_array x = matrix(32, 32);
    const float scale = 2;
    nib_overrides overrides = { .bytes = sizeof overrides, .scale = &scale };
    nib_quantizer_init(&q);
    nib_tensor *t = NULL;
    CHECK_FAILS(nib_quantize(&q, &x, &overrides, &t), NIB_ERR_MODE, "scale");
    nib_tensor_destroy(t);
    FOR_KINDS(k)
    {
        if (!has_blocks(k))
            continue;
        q = quantizer(k);
        t = NULL;
        CHECK_FAILS(nib_quantize(&q, &x, &overrides, &t), NIB_ERR_MODE, "scale");
        nib_tensor_destroy(t);
    }
}

/* ---- Delayed scaling ---- */

/* The rule, step by step. */
static void update_by_hand(float largest, bool most_recent, int margin, float *history, int n, float *scale)
{
    float amax = most_recent ? history[0] : 0;
    for (int i = 0; i < n && !most_recent; i++)
        if (history[i] > amax)
            amax = history[i];
    if (isfinite(amax) && amax > 0) {
        const float next = largest * ldexpf(1, -margin) / amax;
        *scale = isinf(next) ? FLT_MAX : next;
    }
    const float current = history[0]; /* to the end; the oldest, which came after it, is gone */
    for (int i = 1; i < n - 1; i++)
        history[i] = history[i + 1];
    history[n - 1] = current;
    history[0] = 0;
}

TEST(delayed_scaling_updates)
{
    static const float special[] = { 0, INFINITY, NAN, FLT_MAX, 0x1p-149f, 0x1p-126f, 1e-37f, 448, 57344, -1 };
    for (int i = 0; i < 4000; i++) {
        const nib_dtype element = i % 2 ? NIB_E4M3 : NIB_E5M2;
        const bool recent = i / 2 % 2;
        const int n = 1 + (int)test_below(9), margin = i % 3 ? 0 : (int)test_below(20) - 10;
        float history[9], expected[9], scale = 1.5f, expected_scale = 1.5f;
        for (int j = 0; j < n; j++)
            history[j] = test_below(4) ? ldexpf((float)test_uniform(), (int)test_below(60) - 30)
                                       : special[test_below(sizeof special / sizeof *special)];
        memcpy(expected, history, sizeof history);
        CHECK_OK(nib_delayed_scaling_update(element, recent ? NIB_AMAX_MOST_RECENT : NIB_AMAX_MAX, margin, history,
                                            (size_t)n, &scale));
        update_by_hand(element == NIB_E4M3 ? 448 : 57344, recent, margin, expected, n, &expected_scale);
        CHECK_THAT(memcmp(&scale, &expected_scale, sizeof scale) == 0, "%d: %a, not %a", i, (double)scale,
                   (double)expected_scale);
        CHECK_BYTES(history, expected, (size_t)n * sizeof *history);
    }
    float history[2] = { 1, 2 }, scale = 3;
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E2M1, NIB_AMAX_MAX, 0, history, 2, &scale), NIB_ERR_DTYPE, "E4M3");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_CHOICE_COUNT, 0, history, 2, &scale), NIB_ERR_ARG, "");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, (nib_amax_choice)-1, 0, history, 2, &scale), NIB_ERR_ARG, "");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 200, history, 2, &scale), NIB_ERR_ARG, "margin");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, history, 0, &scale), NIB_ERR_ARG, "no entries");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, NULL, 2, &scale), NIB_ERR_ARG, "history");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, history, 2, NULL), NIB_ERR_ARG, "scale");
    CHECK(history[0] == 1 && history[1] == 2 && scale == 3);
}

/* A training loop in small: each step quantizes with the scale that the steps before led to. */
TEST(delayed_scaling_in_a_loop)
{
    enum { WINDOW = 4, STEPS = 12 };
    nib_quantizer q = quantizer(&kinds[0]);
    float history[WINDOW] = { 0 }, scale = 1, amaxes[STEPS];
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, (const int64_t[]){ 48, 64 }, NULL, &t));
    for (int step = 0; step < STEPS; step++) {
        const nib_array x = matrix(48, 64);
        amaxes[step] = 0;
        for (int i = 0; i < 48 * 64; i++) {
            inputs[i] *= ldexpf(1, step % 5);
            amaxes[step] = fmaxf(amaxes[step], fabsf(inputs[i]));
        }
        nib_overrides overrides = { .bytes = sizeof overrides, .scale = &scale, .amax_seen = &history[0] };
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, NULL, t));
        CHECK(history[0] == amaxes[step] && tensor_scale_of(t) == 1.0f / scale);
        check_values(&kinds[0], t, NIB_ROWWISE);
        for (int i = 0; i < 48 * 64; i++) { /* what does not fit under an old scale is cut off */
            const float limit = 448 / scale;
            const float inside = fmaxf(fminf(inputs[i], limit), -limit);
            CHECK(fabsf(decoded[i] - inside) <= 0.0626f * fabsf(inside) + 0x1p-9f / scale);
        }
        CHECK_OK(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, history, WINDOW, &scale));
        float largest = 0;
        for (int i = step; i >= 0 && i > step - WINDOW; i--)
            largest = fmaxf(largest, amaxes[i]);
        CHECK(scale == 448 / largest && history[0] == 0 && history[WINDOW - 1] == amaxes[step]);
    }
    nib_tensor_destroy(t);
}

/* ---- MXFP4 to NVFP4 ---- */

static const struct kind mxfp4 = { "mxfp4", NIB_MXFP4, NIB_E2M1, 1, 32 };

/* An MXFP4 tensor with random codes, to be given its scales. */
static nib_tensor *random_mxfp4(int64_t rows, int64_t cols, uint8_t **codes, uint8_t **scales, int64_t *stride)
{
    nib_quantizer q = quantizer(&mxfp4);
    nib_tensor *t = NULL;
    nib_array part = { 0 };
    q.columnwise = 0;
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, (const int64_t[]){ rows, cols }, NULL, &t));
    *codes = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_DATA));
    *scales = nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_SCALE));
    for (int64_t i = 0; i < rows * ((cols + 1) / 2); i++)
        (*codes)[i] = (uint8_t)test_random();
    for (int64_t i = 0; i < rows && cols % 2; i++)
        (*codes)[(i + 1) * ((cols + 1) / 2) - 1] &= 15; /* the nibble that stands for nothing */
    CHECK_OK(nib_tensor_part(t, NIB_ROW_SCALE, &part));
    *stride = part.shape[1];
    return t;
}

static void check_conversion_keeps_values(const nib_tensor *from, const nib_tensor *to)
{
    const nib_metadata m = metadata_of(from), n = metadata_of(to);
    CHECK(n.format == NIB_NVFP4 && n.tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER && n.dtype == m.dtype && n.rank == m.rank);
    CHECK(n.rowwise && !n.columnwise && n.quantizer->tensor_scale_rule == NIB_TENSOR_SCALE_RULE_POW2);
    dequantize(from, NIB_ROWWISE, NIB_F32, decoded);
    dequantize(to, NIB_ROWWISE, NIB_F32, decoded_too);
    for (int64_t i = 0; i < m.rows * m.cols; i++)
        if (memcmp(&decoded[i], &decoded_too[i], sizeof(float)) && !(isnan(decoded[i]) && isnan(decoded_too[i]))) {
            CHECK_THAT(false, "[%lld, %lld]: %a became %a", (long long)(i / m.cols), (long long)(i % m.cols),
                       (double)decoded[i], (double)decoded_too[i]);
            return;
        }
    int exponent;
    CHECK(frexpf(tensor_scale_of(to), &exponent) == 0.5f && tensor_scale_of(to) >= FLT_MIN);
}

/* Scales within 2^17 of each other, anywhere in E8M0: the values stay, bit for bit. */
TEST(mxfp4_becomes_nvfp4)
{
    static const int64_t sizes[][2] = {
        { 64, 256 }, { 33, 45 }, { 1, 5 }, { 5, 1 }, { 3, 17 }, { 40, 100 }, { 2, 48 }
    };
    for (int base = 0; base <= 254; base += base < 40 ? 1 : 7)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            const int64_t rows = sizes[s][0], cols = sizes[s][1], blocks = (cols + 31) / 32;
            uint8_t *codes, *scales;
            int64_t stride;
            nib_tensor *from = random_mxfp4(rows, cols, &codes, &scales, &stride), *to = NULL;
            for (int64_t i = 0; i < rows * blocks; i++) {
                const int64_t e = base + test_below(18);
                scales[i / blocks * stride + i % blocks] = (uint8_t)(e < 254 ? e : 254);
            }
            CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
            check_conversion_keeps_values(from, to);
            nib_tensor_destroy(to);
            nib_conversion_report report = { .bytes = sizeof report };
            CHECK_OK(nib_tensor_swizzle(from)); /* where the scales lie is no matter */
            CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
            CHECK(report.blocks == rows * blocks && report.inexact == 0);
            check_conversion_keeps_values(from, to);
            nib_tensor_destroy(to);
            nib_tensor_destroy(from);
        }
}

/* What quantization made goes over as well, and a tensor of any rank. */
TEST(quantized_mxfp4_becomes_nvfp4)
{
    nib_quantizer q = quantizer(&mxfp4);
    for (int rule = 0; rule < 2; rule++) {
        q.mx_rule = (nib_mx_rule)rule;
        (void)matrix(66, 100);
        const nib_array x = array_of(inputs, NIB_F32, 3, (const int64_t[]){ 3, 22, 100 });
        nib_tensor *from = quantize(&q, &x, NULL), *to = NULL;
        CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
        check_conversion_keeps_values(from, to);
        CHECK(metadata_of(to).rank == 3);
        nib_tensor_destroy(to);
        CHECK_OK(nib_tensor_update_usage(from, 0, 1));
        CHECK_FAILS(nib_mxfp4_to_nvfp4(from, NULL, &to), NIB_ERR_USAGE, "rowwise");
        nib_tensor_destroy(from);
    }
    q = quantizer(&kinds[0]);
    const nib_array x = matrix(32, 32);
    nib_tensor *from = quantize(&q, &x, NULL), *to = NULL;
    CHECK_FAILS(nib_mxfp4_to_nvfp4(from, NULL, &to), NIB_ERR_MISMATCH, "float8");
    nib_tensor_destroy(from);
    CHECK_FAILS(nib_mxfp4_to_nvfp4(NULL, NULL, &to), NIB_ERR_ARG, "");
}

/* A block that lies `below` powers of two under the largest, with these codes in it, beside one of the largest. */
static nib_tensor *far_blocks(int largest, int below, const uint8_t *values, int n, int64_t rows)
{
    uint8_t *codes, *scales;
    int64_t stride;
    nib_tensor *t = random_mxfp4(rows, 96, &codes, &scales, &stride);
    for (int64_t row = 0; row < rows; row++) {
        for (int i = 0; i < 3; i++)
            scales[row * stride + i] = (uint8_t)(i == 1 ? largest - below : largest);
        for (int i = 0; i < 16; i++) {
            const uint8_t low = values[test_below(n)], high = values[test_below(n)];
            codes[row * 48 + 16 + i] = (uint8_t)(low | high << 4);
        }
        codes[row * 48] = 0x77; /* 6, so that the first block has a value */
        codes[row * 48 + 16] = (uint8_t)(values[0] | values[0] << 4);
    }
    return t;
}

/* A scale that is too large by a power of two can be made up for by smaller codes: 1, 2, 3, 4 and 6 can be halved, 2, 4
 * and 6 once more, 4 a third time, and zeros for ever. Signs are kept. */
TEST(far_blocks_are_exact_where_their_codes_allow)
{
    static const struct {
        int below, n;
        uint8_t codes[6];
    } cases[] = {
        { 17, 6, { 1, 2, 3, 5, 7, 9 } },      /* all there are */
        { 18, 6, { 2, 4, 5, 6, 7, 0 } },      /* 1 2 3 4 6 */
        { 18, 6, { 10, 12, 13, 14, 15, 8 } }, /* and their negatives */
        { 19, 4, { 4, 6, 7, 0 } },            /* 2 4 6 become .5 1 1.5 */
        { 20, 2, { 6, 0 } },                  /* 4 becomes .5 */
        { 40, 2, { 0, 8 } },
        { 200, 2, { 0, 8 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_tensor *from = far_blocks(230, cases[i].below, cases[i].codes, cases[i].n, 4), *to = NULL;
        nib_conversion_report report = { .bytes = sizeof report };
        CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
        check_conversion_keeps_values(from, to);
        nib_tensor_destroy(to);
        CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
        CHECK(report.blocks == 12 && report.inexact == 0);
        nib_tensor_destroy(to);
        nib_tensor_destroy(from);
    }
}

/* Every distance that is too far is reported, down to those whose quotient no float can hold. */
TEST(far_blocks_are_reported)
{
    static const uint8_t odd[] = { 1, 3, 5, 7, 9 };
    for (int below = 18; below <= 254; below++) {
        nib_tensor *from = far_blocks(254, below, odd, 5, 20), *to = NULL;
        nib_conversion_report report = { .bytes = sizeof report };
        CHECK_THAT(nib_mxfp4_to_nvfp4(from, NULL, &to) == NIB_ERR_MISMATCH && !to,
                   "values %d powers of two below the largest are called exact", below);
        if (!to)
            CHECK(strstr(nib_last_error(), "20 of 60 blocks") && strstr(nib_last_error(), "line 0, block 1"));
        nib_tensor_destroy(to);
        CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
        CHECK_THAT(report.blocks == 60 && report.inexact == 20, "%d below: %lld of %lld", below,
                   (long long)report.inexact, (long long)report.blocks);
        for (int i = 0; i < 16 && report.inexact == 20; i++)
            CHECK(report.first[i].line == i && report.first[i].block == 1);
        /* The others are as they were, and these are near: within the smallest step, 2^-10 of the tensor's scale. */
        dequantize(from, NIB_ROWWISE, NIB_F32, decoded);
        dequantize(to, NIB_ROWWISE, NIB_F32, decoded_too);
        const float step = ldexpf(1, 254 - 127 - 8 - 9 - 1);
        for (int i = 0; i < 20 * 96; i++)
            CHECK_THAT(i % 96 / 32 == 1 ? fabsf(decoded_too[i] - decoded[i]) <= step / 2 : decoded_too[i] == decoded[i],
                       "%d below: %a became %a", below, (double)decoded[i], (double)decoded_too[i]);
        nib_tensor_destroy(to);
        nib_tensor_destroy(from);
    }
    nib_tensor *from = far_blocks(254, 30, odd, 5, 1), *to = NULL;
    nib_conversion_report report = { .bytes = sizeof report - 1 };
    CHECK_FAILS(nib_mxfp4_to_nvfp4(from, &report, &to), NIB_ERR_ARG, "bytes");
    nib_tensor_destroy(from);
}

TEST(zeros_and_nans_become_nvfp4)
{
    uint8_t *codes, *scales;
    int64_t stride;
    nib_tensor *from = random_mxfp4(6, 64, &codes, &scales, &stride), *to = NULL;
    for (int i = 0; i < 6 * 32; i++)
        codes[i] &= 0x88; /* zeros of both signs under scales of every size */
    for (int i = 0; i < 12; i++)
        scales[i / 2 * stride + i % 2] = (uint8_t)(i * 23);
    CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
    check_conversion_keeps_values(from, to);
    CHECK(tensor_scale_of(to) == 1);
    nib_tensor_destroy(to);
    nib_tensor_destroy(from);

    /* A NaN has no counterpart that means the same in every reader, so that it is reported; it stays a NaN. */
    from = random_mxfp4(4, 64, &codes, &scales, &stride);
    for (int i = 0; i < 8; i++)
        scales[i / 2 * stride + i % 2] = i == 3 || i == 4 ? 255 : 120;
    for (int i = 0; i < 4 * 32; i++)
        codes[i] |= 0x22;
    memset(codes + 2 * 32, 0, 16); /* zeros times a NaN are NaNs too */
    nib_conversion_report report = { .bytes = sizeof report };
    CHECK_FAILS(nib_mxfp4_to_nvfp4(from, NULL, &to), NIB_ERR_MISMATCH, "2 of 8 blocks");
    CHECK_OK(nib_mxfp4_to_nvfp4(from, &report, &to));
    CHECK(report.inexact == 2 && report.first[0].line == 1 && report.first[0].block == 1);
    CHECK(report.first[1].line == 2 && report.first[1].block == 0);
    check_conversion_keeps_values(from, to);
    for (int i = 0; i < 4 * 64; i++)
        CHECK(isnan(decoded_too[i]) == (i / 32 == 3 || i / 32 == 4));
    nib_tensor_destroy(to);
    nib_tensor_destroy(from);

    /* Nothing at all. */
    from = random_mxfp4(0, 64, &codes, &scales, &stride);
    CHECK_OK(nib_mxfp4_to_nvfp4(from, NULL, &to));
    nib_tensor_destroy(to);
    nib_tensor_destroy(from);
}

TEST_MAIN
