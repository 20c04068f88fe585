/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_codec.c - the small number formats against values worked out in double, code by code and tie by tie.
 */
#include "test.h"

#include <fenv.h>
#include <float.h>
#include <math.h>

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include "format/codec.h"

/* ---- The formats, described once more: sign, exponent and mantissa as the literature has them ---- */

struct codec {
    const char *name;
    nib_dtype dtype;
    int exponent_bits, mantissa_bits, bias;
    uint32_t finite;   /* magnitudes below this code are finite */
    uint32_t infinity; /* the code of infinity, 0 if there is none */
    bool saturates;    /* too large, and infinity, becomes the largest finite value */
    uint32_t (*encode)(float x);
    float (*decode)(uint32_t code);
};

#define WRAP(name, type)                                                        \
    static uint32_t encode_##name(float x) { return nib_##name##_from_f32(x); } \
    static float decode_##name(uint32_t c) { return nib_f32_from_##name((type)c); }
WRAP(e2m1, uint8_t)
WRAP(e4m3, uint8_t)
WRAP(e5m2, uint8_t)
WRAP(e8m0, uint8_t)
WRAP(bf16, uint16_t)
WRAP(f16, uint16_t)

static const struct codec codecs[] = {
    { "e2m1", NIB_E2M1, 2, 1, 1, 8, 0, true, encode_e2m1, decode_e2m1 },
    { "e4m3", NIB_E4M3, 4, 3, 7, 0x7F, 0, true, encode_e4m3, decode_e4m3 },
    { "e5m2", NIB_E5M2, 5, 2, 15, 0x7C, 0x7C, true, encode_e5m2, decode_e5m2 },
    { "bf16", NIB_BF16, 8, 7, 127, 0x7F80, 0x7F80, false, encode_bf16, decode_bf16 },
    { "f16", NIB_F16, 5, 10, 15, 0x7C00, 0x7C00, false, encode_f16, decode_f16 },
};
enum { CODECS = sizeof codecs / sizeof *codecs };

static uint32_t sign_bit(const struct codec *c) { return 1u << (c->exponent_bits + c->mantissa_bits); }

/* The value of a magnitude; of the first that is not finite, what it would be if the format went on. */
static double value_of(const struct codec *c, uint32_t magnitude)
{
    const int exponent = (int)(magnitude >> c->mantissa_bits);
    const int mantissa = (int)(magnitude & ((1u << c->mantissa_bits) - 1));
    if (exponent == 0)
        return ldexp(mantissa, 1 - c->bias - c->mantissa_bits);
    return ldexp(mantissa + (1 << c->mantissa_bits), exponent - c->bias - c->mantissa_bits);
}

/* Nearest by distance, ties to the even code. IEEE's overflow is the same rule, with infinity in the place of the value
 * that would come next. */
static uint32_t oracle(const struct codec *c, float x)
{
    const uint32_t sign = signbit(x) ? sign_bit(c) : 0, last = c->saturates ? c->finite - 1 : c->finite;
    const double m = fabs((double)x);
    uint32_t low = 0, high = last; /* value(low) <= m, and m < value(high + 1) as far as there is one */
    while (low < high) {
        const uint32_t middle = (low + high + 1) / 2;
        if (value_of(c, middle) <= m)
            low = middle;
        else
            high = middle - 1;
    }
    if (low == last)
        return low | sign;
    const double below = m - value_of(c, low), above = value_of(c, low + 1) - m;
    return (below < above || (below == above && low % 2 == 0) ? low : low + 1) | sign;
}

static void check_encode(const struct codec *c, float x)
{
    const uint32_t want = oracle(c, x), got = c->encode(x);
    CHECK_THAT(want == got, "%s of %a: %x, not %x", c->name, (double)x, got, want);
}

/* A value, its two FP32 neighbors, and their negatives. */
static void check_around(const struct codec *c, float x)
{
    const float near[3] = { x, nextafterf(x, INFINITY), nextafterf(x, -INFINITY) };
    for (int i = 0; i < 3; i++) {
        check_encode(c, near[i]);
        check_encode(c, -near[i]);
    }
}

/* ---- Codes and values ---- */

TEST(every_code_has_its_value)
{
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        for (uint32_t code = 0; code < 2 * sign_bit(c); code++) {
            const uint32_t magnitude = code & (sign_bit(c) - 1);
            const float got = c->decode(code);
            if (magnitude == c->infinity && c->infinity) {
                CHECK_THAT(isinf(got), "%s %x is %a", c->name, code, (double)got);
            } else if (magnitude >= c->finite) {
                CHECK_THAT(isnan(got), "%s %x is %a", c->name, code, (double)got);
            } else {
                CHECK_THAT(fabs((double)got) == value_of(c, magnitude), "%s %x is %a", c->name, code, (double)got);
            }
            CHECK_THAT(!signbit(got) == !(code & sign_bit(c)), "%s %x has the wrong sign", c->name, code);
        }
    }
    for (int code = 0; code < 255; code++)
        CHECK(decode_e8m0((uint32_t)code) == (float)ldexp(1, code - 127));
    CHECK(isnan(decode_e8m0(255)));
}

/* The largest and smallest of each, so that the description above is not wrong in the same way as the code. */
TEST(landmarks)
{
    CHECK(decode_e2m1(7) == 6 && decode_e2m1(1) == 0.5f);
    CHECK(decode_e4m3(0x7E) == 448 && decode_e4m3(1) == 0x1p-9f && decode_e4m3(8) == 0x1p-6f && decode_e4m3(0x38) == 1);
    CHECK(decode_e5m2(0x7B) == 57344 && decode_e5m2(1) == 0x1p-16f && decode_e5m2(4) == 0x1p-14f);
    CHECK(decode_bf16(0x7F7F) == 0x1.FEp127f && decode_bf16(1) == 0x1p-133f && decode_bf16(0x3F80) == 1);
    CHECK(decode_f16(0x7BFF) == 65504 && decode_f16(1) == 0x1p-24f && decode_f16(0x400) == 0x1p-14f);
    CHECK(decode_e8m0(0) == 0x1p-127f && decode_e8m0(127) == 1 && decode_e8m0(254) == 0x1p127f);
    CHECK(isinf(decode_e5m2(0x7C)) && isinf(decode_bf16(0xFF80)) && isinf(decode_f16(0x7C00)));
}

/* Signed zeros too. Only e5m2's infinities come back as something else: they saturate. */
TEST(encoding_undoes_decoding)
{
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        for (uint32_t code = 0; code < 2 * sign_bit(c); code++) {
            const uint32_t magnitude = code & (sign_bit(c) - 1);
            uint32_t want = code;
            if (isnan(c->decode(code)))
                continue;
            if (magnitude >= c->finite && c->saturates)
                want = (c->finite - 1) | (code & sign_bit(c));
            CHECK_THAT(c->encode(c->decode(code)) == want, "%s %x comes back as %x", c->name, code,
                       c->encode(c->decode(code)));
        }
    }
    for (uint32_t code = 0; code < 256; code++)
        CHECK(encode_e8m0(decode_e8m0(code)) == code);
}

TEST(ties_and_their_neighbours)
{
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        const uint32_t last = c->saturates ? c->finite - 1 : c->finite;
        for (uint32_t low = 0; low < last; low++) {
            const double middle = (value_of(c, low) + value_of(c, low + 1)) / 2;
            CHECK((double)(float)middle == middle);
            CHECK_THAT(c->encode((float)middle) == low + low % 2, "%s: the tie above %x", c->name, low);
            check_around(c, (float)middle);
            check_around(c, (float)value_of(c, low));
        }
    }
}

/* The seven ties of E2M1, as the table of the format has them. */
TEST(e2m1_thresholds)
{
    static const float at[7] = { 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f };
    static const uint8_t code[7] = { 0, 2, 2, 4, 4, 6, 6 };
    for (int i = 0; i < 7; i++) {
        CHECK(encode_e2m1(at[i]) == code[i] && encode_e2m1(-at[i]) == (code[i] | 8u));
        CHECK(encode_e2m1(nextafterf(at[i], 0)) == (uint32_t)i && encode_e2m1(nextafterf(at[i], 9)) == (uint32_t)i + 1);
    }
}

/* ---- The ends of the range ---- */

TEST(saturation)
{
    static const float large[] = { 6.1f, 7, 449, 464, 480, 512, 57345, 61440, 65504, 1e30f, FLT_MAX, INFINITY };
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        const double top = value_of(c, c->finite - 1);
        check_around(c, (float)top);
        for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
            check_encode(c, large[i]);
            check_encode(c, -large[i]);
            if ((double)large[i] > top && c->saturates)
                CHECK_THAT(c->encode(-large[i]) == ((c->finite - 1) | sign_bit(c)), "%s of %g", c->name, -large[i]);
        }
    }
    CHECK(encode_e4m3(464) == 0x7E && encode_e4m3(480) == 0x7E && encode_e4m3(INFINITY) == 0x7E);
    CHECK(encode_e5m2(INFINITY) == 0x7B && encode_e5m2(-1e30f) == 0xFB);
    /* IEEE's two: half a unit past the largest is where infinity begins. */
    CHECK(encode_bf16(FLT_MAX) == 0x7F80 && encode_bf16(0x1.FEFFFEp127f) == 0x7F7F &&
          encode_bf16(0x1.FFp127f) == 0x7F80);
    CHECK(encode_f16(65519.996f) == 0x7BFF && encode_f16(65520) == 0x7C00 && encode_f16(-INFINITY) == 0xFC00);
}

TEST(underflow)
{
    static const float small[] = { 0, FLT_MIN, 0x1p-149f, 0x1p-127f, 1e-45f, 1e-40f, 1e-38f, 1e-20f };
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        const float least = (float)value_of(c, 1);
        check_around(c, least / 2);
        check_around(c, least * 1.5f);
        CHECK(c->encode(least / 2) == 0 && c->encode(-least / 2) == sign_bit(c));
        CHECK(c->encode(nextafterf(least / 2, 1)) == 1);
        for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
            check_encode(c, small[i]);
            check_encode(c, -small[i]);
        }
    }
    CHECK(encode_e4m3(0x1p-10f) == 0 && encode_e4m3(0x1.8p-9f) == 2);
}

TEST(nan)
{
    static const uint32_t patterns[] = { 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FA00000, 0x7F80FFFF, 0x7FC01234 };
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        for (uint32_t sign = 0; sign < 2; sign++) {
            const uint32_t bits = patterns[i] | sign << 31;
            const float x = nib_float(bits);
            CHECK(encode_e2m1(x) == 7);
            CHECK(encode_e4m3(x) == 0x7F);
            CHECK(encode_e5m2(x) == 0x7F);
            CHECK(encode_e8m0(x) == 0xFF);
            CHECK(encode_f16(x) == (0x7E00 | sign << 15));
            /* Quiet, with sign and payload: a payload of low bits only must not become infinity. */
            CHECK(encode_bf16(x) == (bits >> 16 | 0x40));
        }
    for (uint32_t code = 0; code < 65536; code++) {
        if (isnan(decode_f16(code)))
            CHECK(isnan(decode_f16(encode_f16(decode_f16(code)))));
        if (isnan(decode_bf16(code)))
            CHECK(encode_bf16(decode_bf16(code)) == (code | 0x40));
    }
    CHECK(isnan(decode_e4m3(0x7F)) && isnan(decode_e4m3(0xFF)));
}

/* ---- E8M0 rounds up ---- */

static uint32_t e8m0_oracle(float x)
{
    for (int code = 0; code < 254; code++)
        if (ldexp(1, code - 127) >= fabs((double)x))
            return (uint32_t)code;
    return 254;
}

TEST(e8m0_takes_the_power_above)
{
    for (int exponent = -149; exponent <= 127; exponent++) {
        const float power = (float)ldexp(1, exponent);
        const float near[4] = { power, nextafterf(power, INFINITY), nextafterf(power, 0), power * 1.5f };
        for (int i = 0; i < 4; i++) {
            CHECK_THAT(encode_e8m0(near[i]) == e8m0_oracle(near[i]), "e8m0 of %a: %u", (double)near[i],
                       encode_e8m0(near[i]));
            CHECK(encode_e8m0(-near[i]) == encode_e8m0(near[i]));
        }
    }
    CHECK(encode_e8m0(0.0f) == 0 && encode_e8m0(-0.0f) == 0 && encode_e8m0(FLT_MAX) == 254);
    CHECK(encode_e8m0(INFINITY) == 254 && encode_e8m0(-INFINITY) == 254);
    for (int i = 0; i < 200000; i++) {
        const float x = nib_float((uint32_t)test_random());
        if (!isnan(x))
            CHECK_THAT(encode_e8m0(x) == e8m0_oracle(x), "e8m0 of %a", (double)x);
    }
}

/* ---- Random bits ---- */

TEST(random_bits)
{
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        for (int i = 0; i < 1000000; i++) {
            uint32_t bits = (uint32_t)test_random();
            if (i % 4) { /* mostly where the format has values: uniform bits are nearly always too large or too small */
                const int low = 126 - c->bias - c->mantissa_bits, high = 129 + (1 << c->exponent_bits) - c->bias;
                const int64_t exponent = low + test_below(high - low);
                bits = (bits & 0x807FFFFF) | (uint32_t)(exponent < 0 ? 0 : exponent > 254 ? 254 : exponent) << 23;
            }
            if (i % 8 == 1) /* few bits: ties */
                bits &= 0xFFFFFFFFu << (22 - c->mantissa_bits);
            const float x = nib_float(bits);
            if (!isnan(x))
                check_encode(c, x);
        }
    }
}

/* ---- a * b + c in one rounding ---- */

/* A value whose sums with a product are exact, a tie, just off one, or lost in it. */
static float addend_near(float product)
{
    const int distance = (int)test_below(60) - 30;
    const uint32_t kept = 0xFFFFFFFFu << test_below(24);
    const float near = nib_float(nib_bits(ldexpf(product, distance)) & kept);
    return test_below(2) ? near : -near;
}

static float factor_near_one(void)
{
    const uint32_t kept = 0xFFFFFFFFu << test_below(24);
    return nib_float(((uint32_t)test_random() & 0x807FFFFFu & kept) | (uint32_t)(120 + test_below(16)) << 23);
}

static void check_fma(float a, float b, float c)
{
    const volatile float x = a, y = b, z = c;
    const volatile double odd = nib_fma_to_odd(a, b, c);
    const float want = fmaf(x, y, z), got = nib_fma(a, b, c);
    CHECK_THAT(isnan(want) ? isnan(got) : nib_bits(want) == nib_bits(got), "%a * %a + %a is %a, not %a", (double)a,
               (double)b, (double)c, (double)got, (double)want);
    static const int modes[] = { FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
    for (int i = 0; i < 3; i++) { /* what is rounded to odd can still be rounded any way */
        fesetround(modes[i]);
        const volatile float one_rounding = fmaf(x, y, z), two_roundings = (float)odd;
        fesetround(FE_TONEAREST);
        const float one = one_rounding, two = two_roundings;
        /* Sums of opposites are -0 where the mode is downward. */
        CHECK_THAT(isnan(one) ? isnan(two)
                   : one == 0 ? two == 0
                              : nib_bits(one) == nib_bits(two),
                   "mode %d: %a * %a + %a is %a, not %a", i, (double)a, (double)b, (double)c, (double)two, (double)one);
    }
}

TEST(fused_multiply_add)
{
    for (int i = 0; i < 300000; i++) {
        const float a = factor_near_one(), b = factor_near_one();
        check_fma(a, b, addend_near(a * b));
        const float small = ldexpf(a, -100 - (int)test_below(50)), large = ldexpf(a, (int)test_below(130));
        check_fma(small, b, addend_near(small * b));
        check_fma(large, b, addend_near(large * b));
        check_fma(nib_float((uint32_t)test_random()), nib_float((uint32_t)test_random()),
                  nib_float((uint32_t)test_random()));
    }
    const float special[] = { 0,        -0.0f,   1,        -1,       0x1p-149f, -0x1p-149f, FLT_MIN,
                              0x1p-75f, FLT_MAX, -FLT_MAX, INFINITY, -INFINITY, NAN };
    enum { SPECIAL = sizeof special / sizeof *special };
    for (int i = 0; i < SPECIAL * SPECIAL * SPECIAL; i++)
        check_fma(special[i % SPECIAL], special[i / SPECIAL % SPECIAL], special[i / SPECIAL / SPECIAL]);
}

/* ---- nib_encode and nib_decode ---- */

/* Whole ranges at once; nothing but the codes is written, nothing beyond the numbers is read. */
TEST(arrays)
{
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        const size_t codes = 2 * sign_bit(c), width = sign_bit(c) > 128 ? 2 : 1;
        for (size_t n = 1; n <= codes; n = n < 19 ? n + 1 : n * 2) {
            const size_t bytes = c->dtype == NIB_E2M1 ? (n + 1) / 2 : n * width;
            float *const x = test_guarded(n * sizeof *x, true), *const back = test_guarded(n * sizeof *x, true);
            uint8_t *const out = test_guarded(bytes, true);
            uint32_t *const used = calloc(n, sizeof *used);
            for (size_t i = 0; i < n; i++) {
                const uint32_t code = (uint32_t)(n == codes ? i : (size_t)test_below((int64_t)codes));
                used[i] = isfinite(c->decode(code)) ? code : 0;
                x[i] = c->decode(used[i]);
            }
            memset(out, 0xA5, bytes);
            CHECK_OK(nib_encode(c->dtype, x, n, out));
            CHECK_OK(nib_decode(c->dtype, out, n, back));
            CHECK_BYTES(x, back, n * sizeof *x);
            for (size_t i = 0; i < n; i++) {
                const uint32_t got = c->dtype == NIB_E2M1 ? (uint32_t)(out[i / 2] >> 4 * (i % 2) & 15)
                                     : width == 2         ? (uint32_t)(out[2 * i] | out[2 * i + 1] << 8)
                                                          : out[i];
                CHECK_THAT(got == used[i], "%s: element %zu of %zu", c->name, i, n);
            }
            if (c->dtype == NIB_E2M1 && n % 2)
                CHECK(out[bytes - 1] >> 4 == 0);
            free(used);
        }
    }
}

/* The codes that are not finite, which the arrays above leave out. */
TEST(arrays_of_specials)
{
    const float in[4] = { INFINITY, -INFINITY, nib_float(0xFFC00001), -0.0f };
    static const struct {
        nib_dtype dtype;
        uint8_t bytes[8];
        size_t count;
    } want[] = {
        { NIB_E2M1, { 0xF7, 0x87 }, 2 },
        { NIB_E4M3, { 0x7E, 0xFE, 0x7F, 0x80 }, 4 },
        { NIB_E5M2, { 0x7B, 0xFB, 0x7F, 0x80 }, 4 },
        { NIB_E8M0, { 0xFE, 0xFE, 0xFF, 0x00 }, 4 },
        { NIB_BF16, { 0x80, 0x7F, 0x80, 0xFF, 0xC0, 0xFF, 0x00, 0x80 }, 8 },
        { NIB_F16, { 0x00, 0x7C, 0x00, 0xFC, 0x00, 0xFE, 0x00, 0x80 }, 8 },
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        uint8_t out[8];
        CHECK_OK(nib_encode(want[i].dtype, in, 4, out));
        CHECK_BYTES(out, want[i].bytes, want[i].count);
    }
    /* F32 is a copy, bit for bit. */
    uint32_t out[4], back[4];
    CHECK_OK(nib_encode(NIB_F32, in, 4, out));
    CHECK_BYTES(out, in, sizeof in);
    CHECK_OK(nib_decode(NIB_F32, out, 4, (float *)back));
    CHECK_BYTES(back, in, sizeof in);

    uint8_t all[256];
    float values[256];
    for (int i = 0; i < 256; i++)
        all[i] = (uint8_t)i;
    CHECK_OK(nib_decode(NIB_E8M0, all, 256, values));
    for (int i = 0; i < 255; i++)
        CHECK((double)values[i] == ldexp(1, i - 127));
    CHECK(isnan(values[255]));
    CHECK_OK(nib_encode(NIB_E8M0, values, 256, all));
    for (int i = 0; i < 256; i++)
        CHECK(all[i] == i);
}

TEST(format)
{
    const float x[3] = { 0.5f, 6, -1.5f };
    uint8_t out[4] = { 0xEE, 0xEE, 0xEE, 0xEE };
    CHECK_OK(nib_encode(NIB_E2M1, x, 3, out));
    CHECK(out[0] == 0x71 && out[1] == 0x0B && out[2] == 0xEE);
    CHECK_OK(nib_encode(NIB_E2M1, x, 1, out));
    CHECK(out[0] == 0x01 && out[1] == 0x0B);
    float back[4] = { 9, 9, 9, 9 };
    const uint8_t bytes[2] = { 0x71, 0xFB };
    CHECK_OK(nib_decode(NIB_E2M1, bytes, 3, back));
    CHECK(back[0] == 0.5f && back[1] == 6 && back[2] == -1.5f && back[3] == 9);
}

TEST(arguments)
{
    static const nib_dtype others[] = { NIB_U8,  NIB_I16,  NIB_I32,  NIB_I64,      NIB_BOOL,
                                        NIB_I8,  NIB_U16,  NIB_U32,  NIB_U64,      NIB_F64,
                                        NIB_C64, NIB_E2M3, NIB_E3M2, NIB_E4M3FNUZ, NIB_E5M2FNUZ };
    float x[2] = { 1, 2 };
    uint8_t out[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    const uint8_t untouched[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        CHECK_FAILS(nib_encode(others[i], x, 2, out), NIB_ERR_DTYPE, nib_dtype_name(others[i]));
        CHECK_FAILS(nib_decode(others[i], out, 2, x), NIB_ERR_DTYPE, nib_dtype_name(others[i]));
    }
    CHECK_FAILS(nib_encode(NIB_DTYPE_COUNT, x, 2, out), NIB_ERR_DTYPE, "dtype");
    CHECK_FAILS(nib_encode((nib_dtype)-1, x, 2, out), NIB_ERR_DTYPE, "dtype");
    CHECK_FAILS(nib_decode((nib_dtype)1000, out, 2, x), NIB_ERR_DTYPE, "dtype");
    for (int dtype = 0; dtype < NIB_DTYPE_COUNT; dtype++) {
        if (nib_encode((nib_dtype)dtype, x, 0, out)) /* one of those above */
            continue;
        CHECK_OK(nib_encode((nib_dtype)dtype, NULL, 0, NULL));
        CHECK_OK(nib_decode((nib_dtype)dtype, NULL, 0, NULL));
        CHECK_FAILS(nib_encode((nib_dtype)dtype, NULL, 2, out), NIB_ERR_ARG, "NULL");
        CHECK_FAILS(nib_encode((nib_dtype)dtype, x, 2, NULL), NIB_ERR_ARG, "NULL");
        CHECK_FAILS(nib_decode((nib_dtype)dtype, NULL, 2, x), NIB_ERR_ARG, "NULL");
        CHECK_FAILS(nib_decode((nib_dtype)dtype, out, 2, NULL), NIB_ERR_ARG, "NULL");
    }
    CHECK_BYTES(out, untouched, sizeof out);
    CHECK(x[0] == 1 && x[1] == 2);
}

/* ---- Somebody else's arithmetic ---- */

/* Ties, subnormals and the ends of every format, where another mode would give another code. */
static size_t tricky(float *x)
{
    size_t n = 0;
    for (int k = 0; k < CODECS; k++) {
        const struct codec *c = &codecs[k];
        for (uint32_t low = 0; low + 1 < c->finite; low += c->finite > 256 ? 97 : 1) {
            const float middle = (float)((value_of(c, low) + value_of(c, low + 1)) / 2);
            x[n++] = middle;
            x[n++] = -nextafterf(middle, INFINITY);
            x[n++] = nextafterf(middle, 0);
        }
    }
    for (uint32_t bits = 1; bits < 0x00800000; bits = bits * 3 + 1) {
        x[n++] = nib_float(bits);
        x[n++] = nib_float(bits | 0x80000000);
    }
    x[n++] = FLT_MAX, x[n++] = -FLT_MAX, x[n++] = INFINITY, x[n++] = -0.0f;
    return n;
}

enum { MOST = 8192 };
static const nib_dtype computed[] = { NIB_E2M1, NIB_E4M3, NIB_E5M2, NIB_E8M0, NIB_BF16, NIB_F16, NIB_F32 };
enum { COMPUTED = sizeof computed / sizeof *computed };

struct results {
    uint8_t codes[COMPUTED][MOST * 4];
    float values[COMPUTED][MOST];
};

static void encode_all(const float *x, size_t n, struct results *out)
{
    for (int i = 0; i < COMPUTED; i++) {
        CHECK_OK(nib_encode(computed[i], x, n, out->codes[i]));
        CHECK_OK(nib_decode(computed[i], out->codes[i], n, out->values[i]));
    }
}

/* A mode of the calling thread; `control` reads what a mode sets, without the flags that arithmetic raises. */
#if defined(__x86_64__)
enum { MODES = 16 };
static const unsigned csr_modes = 0xE040; /* two bits of rounding, flush to zero, subnormals are zero */
static void set_mode(int mode)
{
    const unsigned rounding = (unsigned)mode & 3, flush = (unsigned)mode >> 2 & 1, zero = (unsigned)mode >> 3;
    _mm_setcsr((_mm_getcsr() & ~csr_modes) | rounding << 13 | flush << 15 | zero << 6);
}
static unsigned control(void) { return _mm_getcsr() & ~0x3Fu; }
#else
enum { MODES = 4 };
static void set_mode(int mode)
{
    static const int modes[MODES] = { FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
    fesetround(modes[mode]);
}
static unsigned control(void) { return (unsigned)fegetround(); }
#endif

TEST(modes_of_the_caller)
{
    static float x[MOST];
    static struct results want, got;
    const size_t n = tricky(x);
    CHECK(n <= MOST);
    encode_all(x, n, &want);
    const unsigned before = control();
    for (int mode = 0; mode < MODES; mode++) {
        memset(&got, 0, sizeof got);
        set_mode(mode);
        const unsigned set = control();
        encode_all(x, n, &got);
        const unsigned after = control();
        /* A failure must leave the mode alone too. */
        const nib_status status = nib_encode(NIB_F64, x, n, got.codes);
        const unsigned after_failure = control();
        set_mode(0);
        CHECK(status == NIB_ERR_DTYPE);
        CHECK_THAT(set == after && set == after_failure, "mode %d: %x, then %x and %x", mode, set, after,
                   after_failure);
        CHECK_THAT(memcmp(&want, &got, sizeof got) == 0, "mode %d gives other bytes", mode);
        CHECK(mode == 0 || set != before);
    }
    CHECK(control() == before);
}

TEST_MAIN
