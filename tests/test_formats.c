/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_formats.c - Float8, MXFP8, blockwise Float8 and MXFP4: their tables, shapes and values, and what they reject.
 */
#include "test_kinds.h"

#include <float.h>
#include <math.h>

#include "tensor/quantize.h"

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
        const int64_t b = k->block ? k->block : 1, mb = round_up(M, b) / b, kb = round_up(K, b) / b,
                      k2 = packed ? 101 : 201;
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
            CHECK_KIND(k, array.dtype == (part < NIB_ROW_SCALE          ? NIB_U8
                                          : part < NIB_ROW_TENSOR_SCALE ? scale
                                                                        : NIB_F32));
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
        const float relative = k->element == NIB_E4M3   ? 0x1p-4f
                               : k->element == NIB_E5M2 ? 0x1p-3f
                                                        : 0x1p-2f,
                    smallest = k->element == NIB_E4M3   ? 0x1p-6f
                               : k->element == NIB_E5M2 ? 0x1p-14f
                                                        : 1.0f;
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
        { NIB_F16, 0x1p-24f, 448 * 0x1p24f },    { NIB_F16, 0x1p-10f, 448 * 0x1p10f },
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
        static const int32_t dims[][2] = { { 0, 0 },     { 1, 16 }, { 16, 16 }, { 1, 32 }, { 32, 32 }, { 1, 128 },
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

TEST_MAIN
