/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_known_answers.c - published vectors, worked examples of every rule, and what must hold whatever the data is.
 *
 * The vectors come from other implementations and from NVIDIA's headers; they go through the public API wherever it
 * shows the number in question.
 */
#include "test_tensors.h"

#include <float.h>
#include <math.h>

#include "format/codec.h"
#include "format/dialect.h"
#include "kernels/kernels.h"
#include "format/philox.h"

/* ---- Helpers ---- */

/* The tensor of a [rows, cols] matrix; amax NULL: its own. */
static nib_tensor *quantize_matrix(const nib_quantizer *q, nib_dtype dtype, const void *x, int64_t rows, int64_t cols,
                                   const float *amax)
{
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { amax, amax } };
    const nib_array array = array_of((void *)(uintptr_t)x, dtype, DIMS(rows, cols));
    return quantize(q, &array, &overrides);
}

static float tensor_scale(const nib_tensor *t, nib_part which)
{
    float value;
    memcpy(&value, bytes_of(t, which), sizeof value);
    return value;
}

/* One block: its scale and its eight bytes. */
static void check_block(const nib_quantizer *q, nib_dtype dtype, const void *x, const float *amax, uint8_t scale,
                        const uint8_t data[8])
{
    nib_tensor *t = quantize_matrix(q, dtype, x, 1, 16, amax);
    CHECK_THAT(bytes_of(t, NIB_ROW_SCALE)[0] == scale, "scale %02x, not %02x", bytes_of(t, NIB_ROW_SCALE)[0], scale);
    CHECK_BYTES(bytes_of(t, NIB_ROW_DATA), data, 8);
    nib_tensor_destroy(t);
    /* The same block as a column. */
    nib_quantizer columns = *q;
    columns.rowwise = 0, columns.columnwise = 1;
    t = quantize_matrix(&columns, dtype, x, 16, 1, amax);
    CHECK_THAT(bytes_of(t, NIB_COL_SCALE)[0] == scale, "column's scale %02x, not %02x", bytes_of(t, NIB_COL_SCALE)[0],
               scale);
    CHECK_BYTES(bytes_of(t, NIB_COL_DATA), data, 8);
    nib_tensor_destroy(t);
}

/* What an amax comes to in the dialect te. */
static struct nib_scaler te_scaler(float amax)
{
    const nib_quantizer q = usages(1, 0);
    const struct nib_rules rules = nib_rules_of(&q, NIB_F32);
    struct nib_scaler scaler = { .tensor_scale = amax };
    nib_nvfp4_dialects[NIB_DIALECT_TE].prepare(&scaler, &rules);
    return scaler;
}

/* What a block's elements are multiplied with, and what its codes are. */
static float te_factor(uint8_t scale, const struct nib_scaler *scaler)
{
    const nib_quantizer q = usages(1, 0);
    const struct nib_rules rules = nib_rules_of(&q, NIB_F32);
    return nib_nvfp4_dialects[NIB_DIALECT_TE].factor(scale, 0, scaler, &rules);
}

static float te_decode(uint8_t scale, float amax)
{
    const nib_quantizer q = usages(1, 0);
    const struct nib_rules rules = nib_rules_of(&q, NIB_F32);
    return nib_nvfp4_dialects[NIB_DIALECT_TE].decode_factor(scale, amax, &rules);
}

#define CHECK_BITS(x, bits) CHECK_THAT(nib_bits(x) == (bits), "%s is %08x, not %08x", #x, nib_bits(x), (unsigned)(bits))

/* ---- Encodings ---- */

TEST(encodings)
{
    static const struct {
        float x;
        uint8_t code;
    } e4m3[] = {
        { 0x1p-10f, 0x00 },  { 0x1.000002p-10f, 0x01 },
        { 0x1.8p-9f, 0x02 }, { 2.5f * 0x1p-9f, 0x02 },
        { 0x1p-6f, 0x08 },   { 7.5f * 0x1p-9f, 0x08 },
        { 1.0625f, 0x38 },   { 1.1875f, 0x3A },
        { 248, 0x78 },       { 448, 0x7E },
        { 449, 0x7E },       { 464, 0x7E },
        { 480, 0x7E },       { INFINITY, 0x7E },
        { NAN, 0x7F },
    };
    for (size_t i = 0; i < sizeof e4m3 / sizeof *e4m3; i++) {
        uint8_t code;
        CHECK_OK(nib_encode(NIB_E4M3, &e4m3[i].x, 1, &code));
        CHECK_THAT(code == e4m3[i].code, "e4m3 of %a: %02x, not %02x", (double)e4m3[i].x, code, e4m3[i].code);
    }
    const float pair[2] = { 0.5f, 6 };
    uint8_t byte;
    CHECK_OK(nib_encode(NIB_E2M1, pair, 2, &byte));
    CHECK(byte == 0x71);

    float values[16];
    static const float want[8] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };
    nib_e2m1_values(values);
    for (int i = 0; i < 8; i++) {
        CHECK(values[i] == want[i] && values[i + 8] == -want[i]);
        CHECK(!signbit(values[i]) && signbit(values[i + 8]));
    }
    nib_e2m1_values(NULL);
}

/* ---- Block V: {0, -0, .1, -.2, .3, -.4, .5, -.6, .7, -.8, .9, -1, 1.25, -1.5, 1.75, -2} in BF16 ---- */

static const uint16_t v[16] = { 0x0000, 0x8000, 0x3DCD, 0xBE4D, 0x3E9A, 0xBECD, 0x3F00, 0xBF1A,
                                0x3F33, 0xBF4D, 0x3F66, 0xBF80, 0x3FA0, 0xBFC0, 0x3FE0, 0xC000 };
static const uint8_t v_data[8] = { 0x80, 0x91, 0xA2, 0xC3, 0xC4, 0xD5, 0xE6, 0xF7 };
static const float three = 3;

TEST(block_v_plain)
{
    const nib_quantizer q = usages(1, 0);
    check_block(&q, NIB_BF16, v, &three, 0x79, v_data);

    /* The same numbers as F32: the widening is exact. */
    float wide[16];
    CHECK_OK(nib_decode(NIB_BF16, v, 16, wide));
    check_block(&q, NIB_F32, wide, &three, 0x79, v_data);

    const struct nib_scaler scaler = te_scaler(3);
    CHECK_BITS(scaler.scale, 0x44600000);
    CHECK_BITS(scaler.scale_inv, 0x3A924925);
    CHECK_BITS(scaler.block, 0x43155556);
    CHECK_BITS(2.0f * scaler.block, 0x43955556);
    CHECK_BITS(nib_f32_from_e4m3(0x79) * scaler.scale_inv, 0x3EA4924A);
    CHECK_BITS(te_factor(0x79, &scaler), 0x40471C71);
    CHECK_BITS(te_decode(0x79, 3), 0x3EA49249);
}

TEST(block_v_dequantized)
{
    static const uint32_t want[16] = { 0x00000000, 0x80000000, 0x3E249249, 0xBE249249, 0x3EA49249, 0xBEA49249,
                                       0x3EF6DB6E, 0xBF249249, 0x3F249249, 0xBF249249, 0x3F76DB6E, 0xBF76DB6E,
                                       0x3FA49249, 0xBFA49249, 0x3FF6DB6E, 0xBFF6DB6E };
    nib_quantizer q = usages(1, 0);
    nib_tensor *t = quantize_matrix(&q, NIB_BF16, v, 1, 16, &three);
    float y[16];
    uint16_t bf16[16], f16[16], half[16];
    dequantize(t, NIB_ROWWISE, NIB_F32, y);
    CHECK_BYTES(y, want, sizeof want);
    dequantize(t, NIB_ROWWISE, NIB_BF16, half);
    CHECK_OK(nib_encode(NIB_BF16, y, 16, bf16));
    CHECK_BYTES(half, bf16, sizeof bf16);
    dequantize(t, NIB_ROWWISE, NIB_F16, half);
    CHECK_OK(nib_encode(NIB_F16, y, 16, f16));
    CHECK_BYTES(half, f16, sizeof f16);
    nib_tensor_destroy(t);

    q = usages(0, 1);
    t = quantize_matrix(&q, NIB_BF16, v, 16, 1, &three);
    dequantize(t, NIB_COLUMNWISE, NIB_F32, y);
    CHECK_BYTES(y, want, sizeof want);
    nib_tensor_destroy(t);
}

TEST(block_v_transformed)
{
    static const uint16_t want[16] = { 0xBF4C, 0xBFC6, 0xBE33, 0x3F60, 0x3D4E, 0x3F4D, 0x3F83, 0xBFD0,
                                       0x3FAD, 0x3F66, 0x3EA6, 0xBEA6, 0xBE9A, 0xBE80, 0xBFBD, 0x3F96 };
    float x[16];
    uint16_t got[16];
    CHECK_OK(nib_decode(NIB_BF16, v, 16, x));
    nib_rht_forward(x, NIB_RHT_SIGN_MASK, NIB_BF16);
    CHECK_OK(nib_encode(NIB_BF16, x, 16, got));
    CHECK_BYTES(got, want, sizeof want);

    /* A transformed usage is the plain copy of what was transformed, amax included. */
    nib_quantizer columns = usages(0, 1), rows = usages(1, 0), untransformed = usages(1, 0);
    columns.rht = rows.rht_rowwise = 1;
    nib_tensor *column = quantize_matrix(&columns, NIB_BF16, v, 16, 1, NULL);
    nib_tensor *row = quantize_matrix(&rows, NIB_BF16, v, 1, 16, NULL);
    nib_tensor *model = quantize_matrix(&untransformed, NIB_BF16, want, 1, 16, NULL);
    CHECK_BITS(tensor_scale(column, NIB_COL_TENSOR_SCALE), 0x3FD00000);
    CHECK_BITS(tensor_scale(row, NIB_ROW_TENSOR_SCALE), 0x3FD00000);
    CHECK_BYTES(bytes_of(column, NIB_COL_DATA), bytes_of(model, NIB_ROW_DATA), 8);
    CHECK_BYTES(bytes_of(row, NIB_ROW_DATA), bytes_of(model, NIB_ROW_DATA), 8);
    CHECK(bytes_of(column, NIB_COL_SCALE)[0] == bytes_of(model, NIB_ROW_SCALE)[0]);
    CHECK(bytes_of(row, NIB_ROW_SCALE)[0] == bytes_of(model, NIB_ROW_SCALE)[0]);
    nib_tensor_destroy(column);
    nib_tensor_destroy(row);
    nib_tensor_destroy(model);
}

TEST(block_v_four_over_six)
{
    static const uint8_t map4[8] = { 0x80, 0x90, 0xA1, 0xA2, 0xB3, 0xC4, 0xD4, 0xE6 };
    nib_quantizer q = usages(1, 0);
    q.scale_rule = NIB_SCALE_4OVER6;
    q.e4m3_max = 256;
    q.error_mode = NIB_ERROR_MAE;
    check_block(&q, NIB_BF16, v, &three, 0x78, map4);
    q.error_mode = NIB_ERROR_MSE;
    check_block(&q, NIB_BF16, v, &three, 0x78, map4);
    q.e4m3_max = 448;
    q.error_mode = NIB_ERROR_MAE;
    check_block(&q, NIB_BF16, v, &three, 0x79, v_data);
}

/* What the per-tensor number means decides how a block is decoded: here a decode scale and an encode scale of 3. */
TEST(block_v_by_level)
{
    static const struct {
        nib_dialect dialect;
        nib_tensor_scale tensor_scale;
    } rows[] = { { NIB_DIALECT_TE, NIB_TENSOR_SCALE_MULTIPLIER },
                 { NIB_DIALECT_TORCHAO, NIB_TENSOR_SCALE_MULTIPLIER },
                 { NIB_DIALECT_MODELOPT, NIB_TENSOR_SCALE_MULTIPLIER },
                 { NIB_DIALECT_GIST, NIB_TENSOR_SCALE_DIVISOR },
                 { NIB_DIALECT_COMPRESSED_TENSORS, NIB_TENSOR_SCALE_DIVISOR } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static const int64_t shape[2] = { 1, 16 };
        nib_quantizer q = usages(1, 0);
        q.dialect = rows[i].dialect;
        q.tensor_scale_rule = q.dialect == NIB_DIALECT_TE ? NIB_TENSOR_SCALE_RULE_EXACT : NIB_TENSOR_SCALE_RULE_DIALECT;
        nib_tensor *t = NULL;
        nib_metadata meta = { .bytes = sizeof meta };
        float y[16];
        CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, shape, NULL, &t));
        CHECK_OK(nib_tensor_get_metadata(t, &meta));
        CHECK(meta.tensor_scale == rows[i].tensor_scale);
        memcpy(bytes_of(t, NIB_ROW_DATA), v_data, 8);
        memcpy(bytes_of(t, NIB_ROW_TENSOR_SCALE), &three, sizeof three);
        bytes_of(t, NIB_ROW_SCALE)[0] = 0x2B; /* 0.34375 */
        dequantize(t, NIB_ROWWISE, NIB_F32, y);
        const float factor = rows[i].tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER ? 0.34375f * three : 0.34375f / three;
        float codes[16];
        CHECK_OK(nib_decode(NIB_E2M1, v_data, 16, codes));
        for (int k = 0; k < 16; k++)
            CHECK_BITS(y[k], nib_bits(codes[k] * factor));
        nib_tensor_destroy(t);
    }
}

/* A transformed usage is transformed back: the inverse of what the plain copy of the same bytes decodes to. */
TEST(block_v_transformed_back)
{
    nib_quantizer rows = usages(1, 0);
    rows.rht_rowwise = 1;
    nib_tensor *t = quantize_matrix(&rows, NIB_BF16, v, 1, 16, NULL);
    float y[16], want[16];
    CHECK_OK(nib_decode(NIB_E2M1, bytes_of(t, NIB_ROW_DATA), 16, want));
    const float factor = te_decode(bytes_of(t, NIB_ROW_SCALE)[0], tensor_scale(t, NIB_ROW_TENSOR_SCALE));
    for (int i = 0; i < 16; i++)
        want[i] *= factor;
    nib_kernels_scalar.inverse_rht[NIB_F32](want, want, 16, NIB_RHT_SIGN_MASK);
    dequantize(t, NIB_ROWWISE, NIB_F32, y);
    CHECK_BYTES(y, want, sizeof y);
    nib_tensor_destroy(t);
}

/* ---- Zero, too small, too large, not a number ---- */

TEST(zero_block)
{
    static const float amaxes[2] = { 0, 3 };
    static const uint8_t want[8] = { 0x80 };
    uint16_t x[16] = { 0, 0x8000 };
    const nib_quantizer q = usages(1, 0);
    for (int i = 0; i < 2; i++) {
        check_block(&q, NIB_BF16, x, &amaxes[i], 0x00, want);
        const struct nib_scaler scaler = te_scaler(amaxes[i]);
        CHECK_BITS(te_factor(0, &scaler), 0x7F7FFFFF);
    }
    CHECK_BITS(te_scaler(0).scale, 0x3F800000);
}

/* A block whose scale rounds to zero keeps codes of 6, as in TE: they decode to zeros. */
TEST(underflowed_block)
{
    static const uint8_t want[8] = { 0xF0, 0xF7, 0xF7, 0xF7, 0xF7, 0xF7, 0xF7, 0xF7 };
    const float hundred = 100;
    float x[16], y[16];
    uint16_t half[16];
    for (int i = 0; i < 16; i++)
        x[i] = i == 0 ? 0 : (i % 2 ? -1 : 1) * (float)(1e-6 * (i + 1));
    CHECK_OK(nib_encode(NIB_BF16, x, 16, half));
    const nib_quantizer q = usages(1, 0);
    check_block(&q, NIB_BF16, half, &hundred, 0x00, want);
    CHECK_BITS(nib_f32_from_bf16((uint16_t)(half[15] & 0x7FFF)) * te_scaler(100).block, 0x3896147B);

    nib_tensor *t = quantize_matrix(&q, NIB_BF16, half, 1, 16, &hundred);
    dequantize(t, NIB_ROWWISE, NIB_F32, y);
    for (int i = 0; i < 16; i++)
        CHECK(y[i] == 0 && !signbit(y[i]) == !(i % 2));
    nib_tensor_destroy(t);
}

TEST(largest_floats)
{
    static const uint8_t want[8] = { 0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77 };
    float x[16], y[16];
    for (int i = 0; i < 16; i++)
        x[i] = FLT_MAX;
    const nib_quantizer q = usages(1, 0);
    check_block(&q, NIB_F32, x, NULL, 0x7E, want);
    const struct nib_scaler scaler = te_scaler(FLT_MAX);
    CHECK_BITS(scaler.scale, 0x05280001);
    CHECK_BITS(scaler.block, 0x03E00002);
    CHECK_BITS(scaler.scale_inv, 0x79C30C30);
    CHECK_BITS(FLT_MAX * scaler.block, 0x43E00001);
    CHECK_BITS(te_factor(0x7E, &scaler), 0x00C00001);

    /* 448 * FLT_MAX comes first on the way back. */
    nib_tensor *t = quantize_matrix(&q, NIB_F32, x, 1, 16, NULL);
    CHECK(tensor_scale(t, NIB_ROW_TENSOR_SCALE) == FLT_MAX);
    dequantize(t, NIB_ROWWISE, NIB_F32, y);
    for (int i = 0; i < 16; i++)
        CHECK(y[i] == INFINITY);
    nib_tensor_destroy(t);
}

TEST(infinite_amax)
{
    static const uint8_t want[8] = { 0x87, 0x77 };
    const float x[16] = { INFINITY, -1, NAN, 3000 };
    const nib_quantizer q = usages(1, 0);
    check_block(&q, NIB_F32, x, NULL, 0x7E, want); /* found in the data */
    const float infinity = INFINITY;
    check_block(&q, NIB_F32, x, &infinity, 0x7E, want);
    const struct nib_scaler scaler = te_scaler(INFINITY);
    CHECK_BITS(scaler.scale, 0x3F800000);
    CHECK_BITS(te_factor(0x7E, &scaler), 0x3B124925);

    /* A block without the infinity is then scaled by 1: 3000 / 6 saturates, 6 * 4 does not. */
    static const uint8_t tame[8] = { 0xE7, 0x00 };
    const float other[16] = { 24, -16 };
    check_block(&q, NIB_F32, other, &infinity, 0x48, tame);
}

/* NaNs count in no amax and become +6, whatever their sign; a block of nothing else has scale 0. */
TEST(nan_elements)
{
    float x[32];
    for (int i = 0; i < 32; i++)
        x[i] = i % 2 ? nib_float(0xFFC00000) : nib_float(0x7F800001);
    x[3] = -3, x[4] = 1.5f, x[5] = 0;
    const nib_quantizer q = usages(1, 1);
    nib_tensor *t = quantize_matrix(&q, NIB_F32, x, 2, 16, NULL);
    static const uint8_t want[16] = { 0x77, 0xF7, 0x05, 0x77, 0x77, 0x77, 0x77, 0x77,
                                      0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77 };
    CHECK(tensor_scale(t, NIB_ROW_TENSOR_SCALE) == 3 && tensor_scale(t, NIB_COL_TENSOR_SCALE) == 3);
    CHECK_BYTES(bytes_of(t, NIB_ROW_DATA), want, 16);
    CHECK(bytes_of(t, NIB_ROW_SCALE)[0] == 0x7E && bytes_of(t, NIB_ROW_SCALE)[4] == 0);
    for (int column = 0; column < 16; column++) {
        const uint8_t got = bytes_of(t, NIB_COL_DATA)[column], code = column == 3 ? 0x7F : column == 5 ? 0x70 : 0x77;
        CHECK_THAT(got == code, "column %d: %02x, not %02x", column, got, code);
    }
    nib_tensor_destroy(t);

    for (int i = 0; i < 32; i++)
        x[i] = NAN;
    t = quantize_matrix(&q, NIB_F32, x, 2, 16, NULL);
    CHECK_BITS(tensor_scale(t, NIB_ROW_TENSOR_SCALE), 0);
    for (int i = 0; i < 16; i++)
        CHECK(bytes_of(t, NIB_ROW_DATA)[i] == 0x77);
    nib_tensor_destroy(t);
}

/* Amaxes that only a caller can bring. */
TEST(odd_amaxes)
{
    const nib_quantizer q = usages(1, 0);
    const float x[16] = { 1, -2, 0.5f, 6 };

    /* Zero, with data that is not: the data is scaled by 1. */
    const float zero = 0;
    static const uint8_t by_one[8] = { 0xC2, 0x71 };
    check_block(&q, NIB_F32, x, &zero, 0x38, by_one);

    /* NaN: as if it were so small that the scale is at its limit. */
    const float nan = NAN;
    static const uint8_t clipped[8] = { 0xF7, 0x77 };
    check_block(&q, NIB_F32, x, &nan, 0x7E, clipped);
    CHECK_BITS(te_scaler(NAN).scale, 0x7F7FFFFF);

    /* Tiny: the inverse of the limit is subnormal and must not be flushed. */
    const struct nib_scaler scaler = te_scaler(1e-40f);
    CHECK_BITS(scaler.scale, 0x7F7FFFFF);
    CHECK_BITS(scaler.scale_inv, 0x00200000);
    static const uint8_t whole[8] = { 0xF7 }, lost[8] = { 0x80 };
    const float tiny[16] = { 1e-37f, -1e-37f }, tinier[16] = { 1e-40f, -1e-40f };
    check_block(&q, NIB_F32, tiny, NULL, 0x4B, whole);
    check_block(&q, NIB_F32, tinier, NULL, 0x03, lost); /* the multiplier of the elements is at its limit too */
}

/* ---- The order of operations: a block maximum on a midpoint of E4M3 tells it ---- */

TEST(operation_order)
{
    static const struct {
        uint32_t amax, block;
        uint8_t te, divided, torchao, modelopt;
    } rows[] = {
        { 0x41120000, 0x40DB0000, 0x7B, 0x7A, 0x7A, 0x7A }, { 0x40CC0000, 0x3E190000, 0x53, 0x52, 0x52, 0x52 },
        { 0x40920000, 0x3FDB0000, 0x73, 0x72, 0x72, 0x72 }, { 0x40C40000, 0x402F0000, 0x75, 0x74, 0x74, 0x74 },
        { 0x40A40000, 0x40760000, 0x7A, 0x7A, 0x7A, 0x7B }, { 0x40240000, 0x3F760000, 0x72, 0x72, 0x72, 0x73 },
    };
    int sixes = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const float amax = nib_float(rows[i].amax);
        uint16_t x[16] = { (uint16_t)(rows[i].block >> 16) };
        for (int k = 0; k < 3; k++) {
            static const nib_dialect dialects[3] = { NIB_DIALECT_TE, NIB_DIALECT_TORCHAO, NIB_DIALECT_MODELOPT };
            const uint8_t want = k == 0 ? rows[i].te : k == 1 ? rows[i].torchao : rows[i].modelopt;
            nib_quantizer q = usages(1, 0);
            q.dialect = dialects[k];
            nib_tensor *t = quantize_matrix(&q, NIB_BF16, x, 1, 16, &amax);
            CHECK_THAT(bytes_of(t, NIB_ROW_SCALE)[0] == want, "%s, row %zu: %02x, not %02x",
                       nib_dialect_name(q.dialect), i, bytes_of(t, NIB_ROW_SCALE)[0], want);
            nib_tensor_destroy(t);
        }
        /* Four-over-six divides by 6; its answer shows where it maps the maximum to 6. */
        for (int mode = 0; mode < NIB_ERROR_MODE_COUNT; mode++) {
            nib_quantizer q = usages(1, 0);
            q.scale_rule = NIB_SCALE_4OVER6;
            q.error_mode = (nib_error_mode)mode;
            nib_tensor *t = quantize_matrix(&q, NIB_BF16, x, 1, 16, &amax);
            if ((bytes_of(t, NIB_ROW_DATA)[0] & 15) == 7) {
                sixes++;
                CHECK_THAT(bytes_of(t, NIB_ROW_SCALE)[0] == rows[i].divided, "divided, row %zu: %02x, not %02x", i,
                           bytes_of(t, NIB_ROW_SCALE)[0], rows[i].divided);
            }
            nib_tensor_destroy(t);
        }
    }
    CHECK(sixes > 0);
}

/* ---- Philox ---- */

TEST(philox)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } rows[] = {
        { { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8 } },
        /* Random123's other two */
        { { 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF },
          { 0xFFFFFFFF, 0xFFFFFFFF },
          { 0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD } },
        { { 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344 },
          { 0xA4093822, 0x299F31D0 },
          { 0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1 } },
        /* TE's: seed 123, offset 321; the next four; sequence 1 */
        { { 321, 0, 0, 0 }, { 123, 0 }, { 0x0D66BE1E, 0xF65B4F7E, 0xA09F1036, 0x3D4E49C6 } },
        { { 322, 0, 0, 0 }, { 123, 0 }, { 0x5444566B, 0x691C9ACF, 0x9EFEDB51, 0xD543AD22 } },
        { { 321, 0, 1, 0 }, { 123, 0 }, { 0x239C9B88, 0xBDCB28D4, 0xFBCEBF48, 0xCA1FB972 } },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint32_t out[4], inside[4];
        nib_philox4x32(rows[i].counter, rows[i].key, out);
        nib_philox_block(rows[i].counter, rows[i].key, inside);
        CHECK_BYTES(out, rows[i].want, sizeof out);
        CHECK_BYTES(inside, rows[i].want, sizeof out);
    }
    uint32_t words[4] = { 0 };
    nib_philox4x32(NULL, words, words);
    nib_philox4x32(words, NULL, words);
    nib_philox4x32(words, words, NULL);
    CHECK(words[0] == 0);
}

/* ---- Swizzle ---- */

static int64_t tile_offset(int64_t r, int64_t c, int64_t columns)
{
    return (r / 128 * ((columns + 3) / 4) + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

TEST(swizzle)
{
    static const struct {
        int64_t r, c, offset;
    } known[] = { { 0, 0, 0 },   { 1, 0, 16 },    { 32, 0, 4 },       { 0, 3, 3 },
                  { 0, 4, 512 }, { 127, 3, 511 }, { 128, 0, 512 * 3 } };
    enum { ROWS = 200, COLUMNS = 9, PADDED = 256 * 12 };
    uint8_t scales[ROWS * COLUMNS], tiles[PADDED];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        memset(scales, 0, sizeof scales);
        memset(tiles, 0xAA, sizeof tiles);
        scales[known[i].r * COLUMNS + known[i].c] = 0x5C;
        CHECK_OK(nib_swizzle_scales(scales, ROWS, COLUMNS, COLUMNS, tiles));
        for (int k = 0; k < PADDED; k++)
            CHECK_THAT(tiles[k] == (k == known[i].offset ? 0x5C : 0), "(%d, %d): byte %d", (int)known[i].r,
                       (int)known[i].c, k);
    }
}

/* Whole strips of tiles, parts of them, and rows with gaps between them. */
TEST(swizzle_many)
{
    static const int64_t shapes[][2] = { { 1, 1 },   { 31, 3 },   { 128, 4 },   { 129, 5 },   { 200, 9 },  { 97, 8 },
                                         { 0, 7 },   { 7, 0 },    { 128, 64 },  { 256, 130 }, { 300, 67 }, { 385, 200 },
                                         { 40, 64 }, { 128, 65 }, { 512, 256 }, { 5, 300 } };
    enum { MOST = 512 * 300, TILES = 512 * 304 };
    static uint8_t scales[MOST], tiles[TILES + 1], back[MOST];
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int64_t gap = 0; gap < 12; gap += 11) {
            const int64_t rows = shapes[i][0], columns = shapes[i][1], stride = columns + gap;
            const int64_t bytes = (rows + 127) / 128 * 128 * ((columns + 3) / 4 * 4);
            for (int k = 0; k < MOST; k++)
                scales[k] = (uint8_t)(test_random() | 1);
            memset(tiles, 0xAA, sizeof tiles);
            CHECK_OK(nib_swizzle_scales(scales, rows, columns, stride, tiles));
            int64_t wrong = 0, nonzero = 0;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < columns; c++)
                    wrong += tiles[tile_offset(r, c, columns)] != scales[r * stride + c];
            for (int64_t k = 0; k < bytes; k++)
                nonzero += tiles[k] != 0;
            CHECK(wrong == 0 && tiles[bytes] == 0xAA);
            CHECK(nonzero == rows * columns); /* padding is zero: the scales here are not */
            memset(back, 0xAA, sizeof back);
            CHECK_OK(nib_unswizzle_scales(tiles, rows, columns, stride, back));
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < stride; c++)
                    wrong += back[r * stride + c] != (c < columns ? scales[r * stride + c] : 0);
            CHECK(wrong == 0 && back[rows * stride] == 0xAA);
        }
}

/* A tensor made swizzled, and one swizzled afterwards. */
TEST(swizzled_tensor)
{
    enum { ROWS = 140, COLS = 100 };
    static float x[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++)
        x[i] = test_normal();
    nib_quantizer q = usages(1, 1);
    nib_tensor *compact = quantize_matrix(&q, NIB_F32, x, ROWS, COLS, NULL);
    q.swizzled = 1;
    nib_tensor *tiles = quantize_matrix(&q, NIB_F32, x, ROWS, COLS, NULL);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < (COLS + 15) / 16; c++)
            CHECK(bytes_of(tiles, NIB_ROW_SCALE)[tile_offset(r, c, 7)] == bytes_of(compact, NIB_ROW_SCALE)[r * 8 + c]);
    for (int r = 0; r < COLS; r++)
        for (int c = 0; c < (ROWS + 15) / 16; c++)
            CHECK(bytes_of(tiles, NIB_COL_SCALE)[tile_offset(r, c, 9)] == bytes_of(compact, NIB_COL_SCALE)[r * 12 + c]);
    nib_tensor *again;
    CHECK_OK(nib_tensor_clone(compact, &again));
    CHECK_OK(nib_tensor_swizzle(again));
    CHECK_BYTES(bytes_of(again, NIB_ROW_SCALE), bytes_of(tiles, NIB_ROW_SCALE), 256 * 8);
    CHECK_BYTES(bytes_of(again, NIB_COL_SCALE), bytes_of(tiles, NIB_COL_SCALE), 128 * 12);
    CHECK_OK(nib_tensor_unswizzle(again));
    CHECK_BYTES(bytes_of(again, NIB_ROW_SCALE), bytes_of(compact, NIB_ROW_SCALE), 256 * 8);
    CHECK_BYTES(bytes_of(again, NIB_COL_SCALE), bytes_of(compact, NIB_COL_SCALE), 128 * 12);
    nib_tensor_destroy(again);
    nib_tensor_destroy(tiles);
    nib_tensor_destroy(compact);
}

/* ---- Matrices ---- */

TEST(hadamard_matrix)
{
    float h[256];
    nib_hadamard_matrix(h);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            float dot = 0;
            for (int k = 0; k < 16; k++)
                dot += h[16 * i + k] * h[16 * j + k];
            CHECK(dot == (i == j));
            CHECK(h[16 * i + j] == (__builtin_popcount((unsigned)(i & j)) % 2 ? -0.25f : 0.25f));
        }
    nib_hadamard_matrix(NULL);
    nib_rht_matrix(0, NULL);
}

TEST(rht_matrix)
{
    static const uint16_t masks[] = { NIB_RHT_SIGN_MASK, 0, 0xFFFF, 0x1234 };
    static const char signs[] = "+++-+------+-+--";
    uint16_t codes[256];
    float r[256], h[256];
    nib_hadamard_matrix(h);
    nib_rht_matrix(NIB_RHT_SIGN_MASK, codes);
    CHECK(NIB_RHT_SIGN_MASK == 55272);
    for (int i = 0; i < 16; i++)
        CHECK(codes[16 * i] == (signs[i] == '+' ? 0x3E80 : 0xBE80));
    for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
        nib_rht_matrix(masks[m], codes);
        CHECK_OK(nib_decode(NIB_BF16, codes, 256, r));
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++) {
                float dot = 0;
                for (int k = 0; k < 16; k++)
                    dot += r[16 * i + k] * r[16 * j + k];
                CHECK(dot == (i == j));
                CHECK(r[16 * i + j] == (masks[m] >> i & 1 ? -1.0f : 1.0f) * h[16 * i + j]);
            }
        /* The butterflies are the product with it: exact for small integers. */
        static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
        for (int d = 0; d < 3; d++) {
            float x[16], y[16];
            for (int i = 0; i < 16; i++)
                y[i] = x[i] = (float)(test_below(9) - 4);
            nib_rht_forward(y, masks[m], dtypes[d]);
            for (int j = 0; j < 16; j++) {
                float sum = 0;
                for (int i = 0; i < 16; i++)
                    sum += x[i] * r[16 * i + j];
                CHECK(y[j] == sum);
            }
            nib_kernels_scalar.inverse_rht[NIB_F32](y, y, 16, masks[m]);
            for (int i = 0; i < 16; i++)
                CHECK(y[i] == x[i]);
        }
    }
}

/* ---- What holds whatever the data is ---- */

/* Every combination of block, copies and row scaling. */
static nib_quantizer variant(int i)
{
    nib_quantizer q = usages(i % 3 != 1, i % 3 != 2);
    if (i / 3 % 2)
        q.block_dims[0] = 16;
    else
        q.row_scaled = i / 6 % 2;
    q.swizzled = i / 12 % 2;
    return q;
}
enum { VARIANTS = 24 };

TEST(described_sizes_are_allocated_sizes)
{
    static const int64_t shapes[][3] = { { 1, 1, 0 },    { 3, 5, 0 },    { 16, 16, 0 }, { 17, 33, 0 },
                                         { 128, 64, 0 }, { 130, 80, 0 }, { 0, 16, 0 },  { 16, 0, 0 },
                                         { 2, 3, 31 },   { 2, 64, 48 },  { 1, 1, 1 },   { 300, 7, 129 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < VARIANTS; i++) {
            const int rank = s < 8 ? 2 : 3;
            const int64_t *const shape = shapes[s], k = shape[rank - 1], m = rank == 2 ? shape[0] : shape[0] * shape[1];
            const nib_quantizer q = variant(i);
            const int64_t tensor_scales[2] = { q.row_scaled ? m : 1, q.row_scaled ? k : 1 };
            const int64_t want[NIB_PART_COUNT][2] = {
                [NIB_ROW_DATA] = { m, (k + 1) / 2 },
                [NIB_COL_DATA] = { k, (m + 1) / 2 },
                [NIB_ROW_SCALE] = { (m + 127) / 128 * 128, ((k + 15) / 16 + 3) / 4 * 4 },
                [NIB_COL_SCALE] = { (k + 127) / 128 * 128, ((m + 15) / 16 + 3) / 4 * 4 },
                [NIB_ROW_TENSOR_SCALE] = { 1, tensor_scales[0] },
                [NIB_COL_TENSOR_SCALE] = { 1, tensor_scales[1] },
            };
            nib_tensor *t = NULL;
            CHECK_OK(nib_tensor_create(&q, NIB_BF16, rank, shape, NULL, &t));
            for (int p = 0; t && p < NIB_PART_COUNT; p++) {
                const int columnwise = p == NIB_COL_DATA || p == NIB_COL_SCALE || p == NIB_COL_TENSOR_SCALE;
                const bool is_tensor_scale = p == NIB_ROW_TENSOR_SCALE || p == NIB_COL_TENSOR_SCALE;
                int out_rank = -1;
                int64_t out[NIB_MAX_RANK], elements = 1;
                CHECK_OK(nib_part_shape(&q, (nib_part)p, rank, shape, &out_rank, out));
                CHECK(out_rank == (is_tensor_scale ? 1 : p == NIB_ROW_DATA ? rank : 2));
                for (int d = 0; d < out_rank; d++)
                    elements *= out[d];
                CHECK(elements == want[p][0] * want[p][1] && out[out_rank - 1] == want[p][1]);
                const nib_buffer *const buffer = nib_tensor_buffer(t, (nib_part)p);
                CHECK((buffer != NULL) == (columnwise ? q.columnwise : q.rowwise));
                if (!buffer)
                    continue;
                nib_array view;
                CHECK(nib_buffer_bytes(buffer) == (size_t)elements * (is_tensor_scale ? 4 : 1));
                CHECK_OK(nib_tensor_part(t, (nib_part)p, &view));
                CHECK(view.rank == out_rank && memcmp(view.shape, out, sizeof *out * (size_t)out_rank) == 0);
                CHECK(view.bytes == nib_buffer_bytes(buffer) && view.data == nib_buffer_data(buffer));
                CHECK(view.dtype == (is_tensor_scale                          ? NIB_F32
                                     : p == NIB_ROW_DATA || p == NIB_COL_DATA ? NIB_U8
                                                                              : NIB_E4M3));
            }
            nib_tensor_destroy(t);
        }
}

static float *random_matrix(int64_t rows, int64_t cols)
{
    float *const x = calloc((size_t)(rows * cols) + 1, sizeof *x);
    for (int64_t i = 0; i < rows * cols; i++)
        x[i] = test_normal() * (test_below(16) ? 1.0f : 50.0f);
    return x;
}

TEST(saving_keeps_pointers)
{
    float *const x = random_matrix(33, 47);
    for (int i = 0; i < VARIANTS; i++) {
        const nib_quantizer q = variant(i);
        nib_tensor *t = quantize_matrix(&q, NIB_F32, x, 33, 47, NULL);
        nib_buffer *before[NIB_PART_COUNT], *saved[NIB_PART_COUNT];
        void *data[NIB_PART_COUNT];
        for (int p = 0; p < NIB_PART_COUNT; p++) {
            before[p] = nib_tensor_buffer(t, (nib_part)p);
            data[p] = before[p] ? nib_buffer_data(before[p]) : NULL;
        }
        size_t saved_count = 0;
        CHECK_OK(nib_tensor_prepare_for_saving(t, saved, NIB_PART_COUNT, &saved_count));
        CHECK(saved_count == NIB_PART_COUNT);
        for (int p = 0; p < NIB_PART_COUNT; p++)
            CHECK(saved[p] == before[p] && !nib_tensor_buffer(t, (nib_part)p));
        size_t used = 0;
        CHECK_OK(nib_tensor_restore_from_saved(t, saved, NIB_PART_COUNT, &used));
        CHECK(used == NIB_PART_COUNT);
        for (int p = 0; p < NIB_PART_COUNT; p++) {
            CHECK(nib_tensor_buffer(t, (nib_part)p) == before[p]);
            CHECK(!before[p] || nib_buffer_data(before[p]) == data[p]);
        }
        nib_tensor_destroy(t);
    }
    free(x);
}

static const int64_t odd_shapes[][2] = { { 16, 16 }, { 32, 48 }, { 128, 64 }, { 1, 1 },   { 3, 5 },
                                         { 17, 33 }, { 15, 16 }, { 40, 100 }, { 130, 2 }, { 144, 272 } };
enum { ODD_SHAPES = sizeof odd_shapes / sizeof *odd_shapes };

TEST(columnwise_from_rowwise_is_the_direct_one)
{
    for (int s = 0; s < ODD_SHAPES; s++) {
        const int64_t rows = odd_shapes[s][0], cols = odd_shapes[s][1];
        float *const x = random_matrix(rows, cols);
        for (int stochastic = 0; stochastic < 2; stochastic++) {
            nib_quantizer q = usages(1, 0);
            q.block_dims[0] = 16;
            q.rounding = stochastic ? NIB_ROUND_STOCHASTIC_24 : NIB_ROUND_NEAREST;
            q.seed = 5;
            nib_tensor *built = quantize_matrix(&q, NIB_F32, x, rows, cols, NULL), *direct, *alone;
            q.columnwise = 1;
            direct = quantize_matrix(&q, NIB_F32, x, rows, cols, NULL);
            q.rowwise = 0;
            alone = quantize_matrix(&q, NIB_F32, x, rows, cols, NULL);
            CHECK_OK(nib_tensor_update_usage(built, -1, 1));
            int equal = 0;
            CHECK_OK(nib_tensor_equal(built, direct, &equal));
            CHECK_THAT(equal, "%d x %d", (int)rows, (int)cols);
            static const nib_part columnwise[3] = { NIB_COL_DATA, NIB_COL_SCALE, NIB_COL_TENSOR_SCALE };
            for (int p = 0; p < 3; p++) {
                const size_t bytes = nib_buffer_bytes(nib_tensor_buffer(built, columnwise[p]));
                CHECK_BYTES(bytes_of(built, columnwise[p]), bytes_of(direct, columnwise[p]), bytes);
                CHECK_BYTES(bytes_of(alone, columnwise[p]), bytes_of(direct, columnwise[p]), bytes);
            }
            nib_tensor_destroy(built);
            nib_tensor_destroy(direct);
            nib_tensor_destroy(alone);
        }
        free(x);
    }
}

/* The columnwise usage of a tensor as the rowwise usage of another: its columnwise usage is where we began. */
TEST(transposing_twice_is_identity)
{
    for (int s = 0; s < ODD_SHAPES; s++) {
        const int64_t rows = odd_shapes[s][0], cols = odd_shapes[s][1], turned[2] = { cols, rows };
        float *const x = random_matrix(rows, cols);
        nib_quantizer q = usages(1, 0);
        q.block_dims[0] = 16;
        nib_tensor *t = quantize_matrix(&q, NIB_F32, x, rows, cols, NULL), *transposed = NULL;
        CHECK_OK(nib_tensor_update_usage(t, 1, 1));
        nib_buffer *const parts[NIB_PART_COUNT] = { [NIB_ROW_DATA] = nib_tensor_buffer(t, NIB_COL_DATA),
                                                    [NIB_ROW_SCALE] = nib_tensor_buffer(t, NIB_COL_SCALE),
                                                    [NIB_ROW_TENSOR_SCALE] =
                                                        nib_tensor_buffer(t, NIB_COL_TENSOR_SCALE) };
        CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, 2, turned, parts, NIB_PART_COUNT, &transposed));
        CHECK_OK(nib_tensor_update_usage(transposed, 1, 1));
        CHECK_BYTES(bytes_of(transposed, NIB_COL_DATA), bytes_of(t, NIB_ROW_DATA), rows * ((cols + 1) / 2));
        CHECK_BYTES(bytes_of(transposed, NIB_COL_SCALE), bytes_of(t, NIB_ROW_SCALE),
                    nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_SCALE)));
        CHECK(tensor_scale(transposed, NIB_COL_TENSOR_SCALE) == tensor_scale(t, NIB_ROW_TENSOR_SCALE));
        nib_tensor_destroy(transposed);
        nib_tensor_destroy(t);
        free(x);
    }
}

TEST(view_that_keeps_the_last_dim_shares)
{
    static const int64_t shapes[][3] = { { 6, 4, 33 }, { 2, 12, 33 }, { 24, 1, 33 }, { 3, -1, 33 } };
    float *const x = random_matrix(24, 33), *const other = random_matrix(24, 33);
    for (int i = 0; i < VARIANTS; i++) {
        const nib_quantizer q = variant(i);
        nib_tensor *t = quantize_matrix(&q, NIB_F32, x, 24, 33, NULL);
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            nib_tensor *view = NULL;
            CHECK_OK(nib_tensor_view(t, 3, shapes[s], &view));
            for (int p = 0; view && p < NIB_PART_COUNT; p++)
                CHECK(nib_tensor_buffer(view, (nib_part)p) == nib_tensor_buffer(t, (nib_part)p));
            nib_metadata meta = { .bytes = sizeof meta };
            CHECK_OK(nib_tensor_get_metadata(view, &meta));
            CHECK(meta.rank == 3 && meta.shape[0] == shapes[s][0] && meta.shape[2] == 33 && meta.rows == 24);
            /* What is quantized into the tensor is seen in the view. */
            const int64_t flat[2] = { 24, 33 };
            nib_array array;
            float y[24 * 33], z[24 * 33];
            CHECK_OK(nib_array_init(&array, s % 2 ? x : other, NIB_F32, 2, flat));
            CHECK_OK(nib_quantize_into(NULL, &array, NULL, NULL, t));
            dequantize(t, NIB_EITHER, NIB_F32, y);
            dequantize(view, NIB_EITHER, NIB_F32, z);
            CHECK_BYTES(y, z, sizeof y);
            nib_tensor_destroy(view);
        }
        nib_tensor_destroy(t);
    }
    free(x);
    free(other);
}

TEST(zero_amax_dequantizes_to_zeros_with_signs)
{
    static const nib_dtype dtypes[3] = { NIB_F32, NIB_BF16, NIB_F16 };
    enum { ROWS = 17, COLS = 35 };
    float x[ROWS * COLS];
    const float zero = 0;
    for (int overrides = 0; overrides < 2; overrides++) { /* zeros; and other numbers that a caller says are none */
        for (int i = 0; i < ROWS * COLS; i++)
            x[i] = overrides       ? (float)(1 + test_below(5)) * (test_below(2) ? -1.0f : 1.0f)
                   : test_below(2) ? -0.0f
                                   : 0.0f;
        for (int i = 0; i < VARIANTS; i++) {
            nib_quantizer q = variant(i);
            if (overrides && q.row_scaled)
                continue;
            nib_tensor *t = quantize_matrix(&q, NIB_F32, x, ROWS, COLS, overrides ? &zero : NULL);
            for (int usage = 0; usage < 2; usage++)
                for (int d = 0; d < 3; d++) {
                    uint8_t out[ROWS * COLS * 4];
                    if (!(usage == NIB_ROWWISE ? q.rowwise : q.columnwise))
                        continue;
                    dequantize(t, (nib_usage)usage, dtypes[d], out);
                    const size_t width = d == 0 ? 4 : 2;
                    for (size_t k = 0; k < ROWS * COLS; k++) {
                        uint8_t want[4] = { 0 };
                        want[width - 1] = signbit(x[k]) ? 0x80 : 0;
                        CHECK_THAT(memcmp(out + k * width, want, width) == 0, "variant %d, copy %d: element %zu", i,
                                   usage, k);
                    }
                }
            nib_tensor_destroy(t);
        }
    }
}

TEST(noop)
{
    enum { ROWS = 20, COLS = 40 };
    float *const x = random_matrix(ROWS, COLS), *const other = random_matrix(ROWS, COLS);
    const int64_t shape[2] = { ROWS, COLS };
    static const float values[] = { 1.0f, 0.5f, 0.0f, 1.0000001f, 0.99999994f, -1.0f, 2.0f };
    nib_array array;
    CHECK_OK(nib_array_init(&array, other, NIB_F32, 2, shape));
    for (int i = 0; i < VARIANTS; i++) {
        const nib_quantizer q = variant(i);
        nib_tensor *want[2] = { quantize_matrix(&q, NIB_F32, x, ROWS, COLS, NULL),
                                quantize_matrix(&q, NIB_F32, other, ROWS, COLS, NULL) };
        for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
            nib_tensor *t = quantize_matrix(&q, NIB_F32, x, ROWS, COLS, NULL);
            nib_buffer *before[NIB_PART_COUNT];
            for (int p = 0; p < NIB_PART_COUNT; p++)
                before[p] = nib_tensor_buffer(t, (nib_part)p);
            CHECK_OK(nib_quantize_into(NULL, &array, NULL, &values[k], t));
            for (int p = 0; p < NIB_PART_COUNT; p++) {
                CHECK(nib_tensor_buffer(t, (nib_part)p) == before[p]);
                if (before[p])
                    CHECK_BYTES(bytes_of(t, (nib_part)p), bytes_of(want[values[k] != 1.0f], (nib_part)p),
                                nib_buffer_bytes(before[p]));
            }
            nib_tensor_destroy(t);
        }
        /* Nothing happens: not even a copy that the quantizer wants and the tensor lacks is made. */
        if (q.rowwise && q.columnwise) {
            nib_quantizer rows = q;
            rows.columnwise = 0;
            nib_tensor *t = quantize_matrix(&rows, NIB_F32, x, ROWS, COLS, NULL);
            CHECK_OK(nib_quantize_into(&q, &array, NULL, &values[0], t));
            CHECK(!nib_tensor_buffer(t, NIB_COL_DATA));
            CHECK_OK(nib_quantize_into(&q, &array, NULL, &values[1], t));
            CHECK(nib_tensor_buffer(t, NIB_COL_DATA) != NULL);
            nib_tensor_destroy(t);
        }
        nib_tensor_destroy(want[0]);
        nib_tensor_destroy(want[1]);
    }
    free(x);
    free(other);
}

/* Two scales whose errors are so close that rounding decides between them: another arithmetic has another scale. Found
 * among 80 million blocks of normal values; the scales are those of the scalar kernel. */
TEST(sweeps_that_rounding_decides)
{
    static const struct {
        uint8_t scale;
        uint16_t x[16]; /* BF16 */
    } blocks[] = {
        { 0x7A,
          { 0x3F09, 0xBD1A, 0x3F7F, 0xBF86, 0x3FA0, 0x3FE0, 0x3B4D, 0x3EB1, 0x3E14, 0xBF93, 0x3F1E, 0xBEAE, 0xBF44,
            0xBE8A, 0xC01B, 0xBF3E } },
        { 0x75,
          { 0x3EEC, 0xBF0E, 0xBEB7, 0x3E1F, 0x3F7C, 0xBA4C, 0x3D11, 0x3FA9, 0x3FA9, 0x3E44, 0xBE92, 0xC012, 0x3EBD,
            0x3EB0, 0xBFC8, 0xBE4B } },
        { 0x79,
          { 0x3F40, 0x3E05, 0x3F1C, 0xBE80, 0x3F4D, 0x3E85, 0xC00C, 0x4008, 0x3F1D, 0x3F02, 0xBF2C, 0xBA66, 0x3FA9,
            0x3E9A, 0x3F86, 0x3FD3 } },
        { 0x79,
          { 0xBE83, 0xBF12, 0x3FBD, 0xBB65, 0xBF76, 0x3F69, 0x3F68, 0x3E83, 0xBFDB, 0xC00E, 0x3FBC, 0xBF94, 0x3ED1,
            0x3E6A, 0xBC5C, 0x3D82 } },
        { 0x78,
          { 0x3E91, 0x3FDC, 0x3E9B, 0x3F62, 0xBED0, 0x3E9B, 0x4000, 0xBEE8, 0xBEA8, 0x3F45, 0xBF1A, 0xBC41, 0xBC23,
            0x3EE6, 0x4002, 0xBF35 } },
        { 0x7C,
          { 0xBB73, 0xBFB2, 0x403D, 0xBDDF, 0x3F83, 0xBDF1, 0x3F25, 0xBF9A, 0xBFB7, 0x3D9D, 0x3F01, 0xC00A, 0x3EE4,
            0xBD82, 0xBF6F, 0x3EAE } },
        { 0x76,
          { 0xBF66, 0x3F93, 0xBF26, 0x3A09, 0x3FB3, 0x3ECC, 0xBE07, 0x3F49, 0xBF9E, 0x3EA7, 0xBD63, 0xBEAE, 0x3F69,
            0x3E1E, 0xBFDC, 0xBF04 } },
        { 0x77,
          { 0xBECB, 0x3F0B, 0xBF6C, 0x3F5A, 0x3E92, 0xBC67, 0x3F74, 0x3F6A, 0x3FF1, 0x3F9C, 0xBB96, 0xBFBA, 0xBDC5,
            0xBD85, 0xBF4C, 0x3E11 } },
        /* Here one of the two clips. Sixteenths of small integers. */
        { 0x7C,
          { 0x3F60, 0x4080, 0x0000, 0xBFD0, 0x3F60, 0x3F98, 0x3F88, 0xBFE0, 0xC000, 0xBFC8, 0x3F50, 0x3FD0, 0xC014,
            0xC010, 0x3F70, 0xBFD0 } },
        { 0x7A,
          { 0xBE00, 0xC008, 0xBFC8, 0xC014, 0xBF10, 0xBFF0, 0x4008, 0xC008, 0xBF88, 0x3FB0, 0xC014, 0x4080, 0xC060,
            0x3F30, 0x3F88, 0xC010 } },
    };
    enum { BLOCKS = sizeof blocks / sizeof *blocks, TIMES = 3 };
    static uint16_t x[TIMES * BLOCKS * 16];
    const float amax = 5.25f; /* a tensor scale of 2^-9 */
    nib_quantizer q = usages(1, 0);
    q.scale_rule = NIB_SCALE_SWEEP;
    q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    for (int b = 0; b < TIMES * BLOCKS; b++)
        memcpy(x + b * 16, blocks[b % BLOCKS].x, sizeof blocks->x);
    nib_tensor *t = quantize_matrix(&q, NIB_BF16, x, 1, TIMES * BLOCKS * 16, &amax);
    CHECK(tensor_scale(t, NIB_ROW_TENSOR_SCALE) == 0x1p-9f);
    for (int b = 0; b < TIMES * BLOCKS; b++)
        CHECK_THAT(bytes_of(t, NIB_ROW_SCALE)[b] == blocks[b % BLOCKS].scale, "block %d: %02x, not %02x", b,
                   bytes_of(t, NIB_ROW_SCALE)[b], blocks[b % BLOCKS].scale);
    nib_tensor_destroy(t);
}

TEST_MAIN
