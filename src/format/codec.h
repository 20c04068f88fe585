/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.h - the small floating-point formats, to and from FP32, one value at a time.
 *
 *            sign exponent mantissa  bias  largest  specials
 *   E2M1      1      2        1       1       6     none
 *   E4M3      1      4        3       7     448     0x7F NaN; no infinity
 *   E5M2      1      5        2      15   57344     as IEEE
 *   E8M0      -      8        -     127   2^127     0xFF NaN; 0x00 is 2^-127, there is no zero
 *   BF16      1      8        7     127             as IEEE
 *   F16       1      5       10      15   65504     as IEEE
 *
 * Encoding rounds to nearest even. E2M1, E4M3 and E5M2 saturate, infinity included, since the hardware's .satfinite
 * does; BF16 and F16 overflow to infinity. Every function needs round-to-nearest and subnormals (os.h sees to
 * them) and compiles as C11, as C++17 and for a CUDA device.
 */
#ifndef NIB_CODEC_H
#define NIB_CODEC_H

#include <stdint.h>
#include <string.h>

/* Functions of headers that a device, too, compiles. A device keeps an array in registers only if every index is known,
 * so that loops over a block are marked. */
#if defined(__CUDACC__)
#define NIB_INLINE static __host__ __device__ __forceinline__
#else
#define NIB_INLINE static inline
#endif
#if defined(__CUDA_ARCH__)
#define NIB_UNROLL _Pragma("unroll")
#else
#define NIB_UNROLL
#endif

NIB_INLINE uint32_t nib_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

NIB_INLINE float nib_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

NIB_INLINE float nib_abs(float x) { return nib_float(nib_bits(x) & 0x7FFFFFFFu); }

NIB_INLINE int nib_is_nan(float x) { return (nib_bits(x) & 0x7FFFFFFFu) > 0x7F800000u; }

/* The smaller and the larger of two values; a NaN loses against any other. IEEE's minNum, without the math library. */
NIB_INLINE float nib_fmin(float a, float b) { return b < a || nib_is_nan(a) ? b : a; }
NIB_INLINE float nib_fmax(float a, float b) { return b > a || nib_is_nan(a) ? b : a; }

/* The sign of a NaN that arithmetic made depends on the processor: results have one NaN. */
NIB_INLINE float nib_quiet(float x) { return nib_is_nan(x) ? nib_float(0x7FC00000u) : x; }

/* a * b + c rounded to odd: the product of two floats is exact in double, and where the sum is not, its last bit is set.
 * So what is lost never decides how the sum becomes a float. */
NIB_INLINE double nib_fma_to_odd(float a, float b, float c)
{
    const double product = (double)a * (double)b, addend = (double)c;
    double sum = product + addend;
    const double part = sum - product, lost = (product - (sum - part)) + (addend - part);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (lost != 0 && !(bits & 1) && (bits >> 52 & 2047) != 2047) {
        bits += (lost > 0) == (sum > 0) ? 1 : (uint64_t)-1;
        memcpy(&sum, &bits, sizeof sum);
    }
    return sum;
}

/* The same in one rounding, to nearest, without the math library. */
NIB_INLINE float nib_fma(float a, float b, float c) { return (float)nib_fma_to_odd(a, b, c); }

/* ---- E2M1 ---- */

/* Each midpoint between two magnitudes counts once |x| is past it; where the upper neighbor is the even code, reaching
 * it is enough. A NaN is +6 and a negative zero keeps its sign, as in the hardware's cvt.rn.satfinite.e2m1x2. */
NIB_INLINE uint8_t nib_e2m1_from_f32(float x)
{
    const float m = nib_abs(x);
    const int magnitude =
        (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return nib_is_nan(x) ? 7 : (uint8_t)((unsigned)magnitude | nib_bits(x) >> 31 << 3);
}

NIB_INLINE float nib_f32_from_e2m1(uint8_t code)
{
    /* 2 bits of exponent: 0 is the subnormal pair {0, 0.5}, above it (1 + m/2) * 2^(e-1). */
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const float magnitude = exponent ? (float)((2 + mantissa) << (exponent - 1)) * 0.5f : (float)mantissa * 0.5f;
    return code & 8 ? -magnitude : magnitude;
}

/* ---- IEEE-like formats by their mantissa width and bias ---- */

/* |x| as a code, before any limit is applied; x is not a NaN. */
NIB_INLINE uint32_t nib_minifloat_magnitude(float x, int mantissa_bits, int bias)
{
    const uint32_t bits = nib_bits(x) & 0x7FFFFFFFu;
    const int exponent = (int)(bits >> 23) - 127, smallest = 1 - bias;
    if (exponent < smallest) {
        /* Subnormal: count units of 2^(smallest - mantissa_bits). Adding and taking away 2^23 rounds to an integer,
         * ties to even; rounding up to the first normal gives its code. */
        const float units = nib_abs(x) * nib_float((uint32_t)(127 + mantissa_bits - smallest) << 23);
        return (uint32_t)((units + 0x1p23f) - 0x1p23f);
    }
    const int dropped = 23 - mantissa_bits;
    const uint32_t half_up_to_even = (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return ((bits + half_up_to_even) >> dropped) - ((uint32_t)(127 - bias) << mantissa_bits);
}

NIB_INLINE float nib_f32_from_minifloat(uint32_t magnitude, int mantissa_bits, int bias)
{
    const uint32_t exponent = magnitude >> mantissa_bits;
    if (exponent == 0)
        return (float)magnitude * nib_float((uint32_t)(127 + 1 - bias - mantissa_bits) << 23);
    return nib_float((magnitude << (23 - mantissa_bits)) + ((uint32_t)(127 - bias) << 23));
}

/* ---- E4M3 and E5M2 ---- */

NIB_INLINE uint8_t nib_e4m3_from_f32(float x)
{
    if (nib_is_nan(x))
        return 0x7F;
    const uint32_t magnitude = nib_minifloat_magnitude(x, 3, 7);
    return (uint8_t)((magnitude < 0x7E ? magnitude : 0x7E) | nib_bits(x) >> 31 << 7);
}

NIB_INLINE float nib_f32_from_e4m3(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code >> 7) << 31;
    if ((code & 0x7F) == 0x7F)
        return nib_float(0x7FC00000u | sign);
    return nib_float(nib_bits(nib_f32_from_minifloat(code & 0x7F, 3, 7)) | sign);
}

NIB_INLINE uint8_t nib_e5m2_from_f32(float x)
{
    if (nib_is_nan(x))
        return 0x7F;
    const uint32_t magnitude = nib_minifloat_magnitude(x, 2, 15);
    return (uint8_t)((magnitude < 0x7B ? magnitude : 0x7B) | nib_bits(x) >> 31 << 7);
}

NIB_INLINE float nib_f32_from_e5m2(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code >> 7) << 31, magnitude = code & 0x7F;
    if (magnitude >= 0x7C) /* infinity, then NaNs */
        return nib_float((magnitude == 0x7C ? 0x7F800000u : 0x7FC00000u) | sign);
    return nib_float(nib_bits(nib_f32_from_minifloat(magnitude, 2, 15)) | sign);
}

/* ---- E8M0 ---- */

/* The power of two at or above |x|, within 2^-127 .. 2^127. */
NIB_INLINE uint8_t nib_e8m0_from_f32(float x)
{
    const uint32_t bits = nib_bits(x) & 0x7FFFFFFFu, exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    if (nib_is_nan(x))
        return 255;
    if (exponent >= 254)
        return 254;
    if (exponent == 0)
        return mantissa > 0x400000u; /* 0x00400000 is 2^-127 */
    return (uint8_t)(exponent + (mantissa != 0));
}

NIB_INLINE float nib_f32_from_e8m0(uint8_t code)
{
    if (code == 255)
        return nib_float(0x7FC00000u);
    return nib_float(code ? (uint32_t)code << 23 : 0x00400000u);
}

/* ---- BF16 and F16 ---- */

NIB_INLINE uint16_t nib_bf16_from_f32(float x)
{
    const uint32_t bits = nib_bits(x);
    if (nib_is_nan(x))
        return (uint16_t)(bits >> 16 | 0x40); /* quiet, its sign and payload kept */
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

NIB_INLINE float nib_f32_from_bf16(uint16_t code) { return nib_float((uint32_t)code << 16); }

NIB_INLINE uint16_t nib_f16_from_f32(float x)
{
    const uint32_t sign = nib_bits(x) >> 31 << 15;
    if (nib_is_nan(x))
        return (uint16_t)(0x7E00 | sign);
    const uint32_t magnitude = nib_minifloat_magnitude(x, 10, 15);
    return (uint16_t)((magnitude < 0x7C00 ? magnitude : 0x7C00) | sign);
}

NIB_INLINE float nib_f32_from_f16(uint16_t code)
{
    const uint32_t sign = (uint32_t)(code >> 15) << 31, magnitude = code & 0x7FFF;
    if (magnitude >= 0x7C00)
        return nib_float(0x7F800000u | (magnitude & 0x3FF) << 13 | sign);
    return nib_float(nib_bits(nib_f32_from_minifloat(magnitude, 10, 15)) | sign);
}

#endif
