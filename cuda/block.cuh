/* SPDX-License-Identifier: Apache-2.0 */
/*
 * block.cuh - the sixteen elements of a block in a thread's registers: to codes and back.
 *
 * The formulas are those of format/rules.h. Where a device has a shorter way to the same bits it is here, and
 * test_cuda.c compares it with the host; everything above this header only moves data.
 *
 * Compile with -fmad=false and without fast math: codes come out of subnormal floats.
 */
#ifndef NIB_CUDA_BLOCK_CUH
#define NIB_CUDA_BLOCK_CUH

#include "job.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define DEV static __device__ __forceinline__
#define DEV_MEMBER __device__ __forceinline__ /* of a class, behind its static */
#define NIB_MEMBER __host__ __device__ __forceinline__

/* a has no signs: then two of these are one instruction of three operands. */
DEV uint32_t max_magnitudes(uint32_t a, uint32_t b)
{
    __nv_bfloat162 x, y;
    memcpy(&x, &a, 4), memcpy(&y, &b, 4);
    x = __hmax2_nan(x, __habs2(y)); /* |y| is on the floating-point pipe: the integer one is the busy one */
    memcpy(&a, &x, 4);
    return a;
}
/* a has no NaN. */
DEV uint32_t max_numbers(uint32_t a, uint32_t b)
{
    __nv_bfloat162 x, y;
    memcpy(&x, &a, 4), memcpy(&y, &b, 4);
    x = __hmax2(x, __habs2(y));
    memcpy(&a, &x, 4);
    return a;
}
DEV uint32_t bf16_pair(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t r;
    memcpy(&r, &pair, 4);
    return r;
}
DEV uint32_t f16_pair(float low, float high)
{
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t r;
    memcpy(&r, &pair, 4);
    return r;
}
DEV float f32_of_f16(uint16_t code) { return __half2float(__ushort_as_half(code)); }
/* A NaN loses against any other value. */
DEV float larger(float a, float b) { return fmaxf(a, b); }
DEV float smaller(float a, float b) { return fminf(a, b); }
/* x is neither negative nor NaN. */
DEV uint32_t e4m3_of(float x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
#else
    return nib_e4m3_from_f32(x);
#endif
}
DEV uint32_t max_of_warp(uint32_t value) { return __reduce_max_sync(~0u, value); }
DEV bool speaks_for_warp(int thread) { return thread % 32 == 0; }
#else
#include "shim.h"
#define DEV static inline
#define DEV_MEMBER inline
#define NIB_MEMBER inline
#endif

DEV uint32_t divide(uint32_t n, const nib_cuda_divider &d)
{
    return (uint32_t)(((uint64_t)__umulhi(n, d.multiplier) + n) >> d.shift);
}

/* ---- Values ---- */

/* BF16 stays packed: half the registers, and maxima of pairs. */
template <nib_dtype D> struct values {
    float x[NIB_BLOCK];
};
template <> struct values<NIB_BF16> {
    uint32_t w[NIB_BLOCK / 2];
};

template <nib_dtype D> DEV int element_bytes() { return D == NIB_F32 ? 4 : 2; }

DEV float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
DEV float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

/* Four words of packed values as elements first.. of a block. */
template <nib_dtype D> DEV void unpack_quad(values<D> &v, int first, const uint4 &q)
{
    const uint32_t w[4] = { q.x, q.y, q.z, q.w };
    NIB_UNROLL
    for (int i = 0; i < 4; i++) {
        if constexpr (D == NIB_BF16)
            v.w[first / 2 + i] = w[i];
        else if constexpr (D == NIB_F32)
            v.x[first + i] = __uint_as_float(w[i]);
        else
            v.x[first + 2 * i] = f32_of_f16((uint16_t)w[i]),
                            v.x[first + 2 * i + 1] = f32_of_f16((uint16_t)(w[i] >> 16));
    }
}

template <nib_dtype D> DEV void set_zero(values<D> &v)
{
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if constexpr (D == NIB_BF16)
            v.w[i / 2] = 0;
        else
            v.x[i] = 0;
    }
}

/* n elements that lie `stride` elements apart; what is missing is 0. */
template <nib_dtype D> DEV void load_strided(values<D> &v, const char *at, int64_t stride, int n)
{
    set_zero(v);
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if (i >= n)
            continue;
        if constexpr (D == NIB_BF16)
            v.w[i / 2] |= (uint32_t)((const uint16_t *)at)[i * stride] << 16 * (i % 2);
        else if constexpr (D == NIB_F32)
            v.x[i] = ((const float *)at)[i * stride];
        else
            v.x[i] = f32_of_f16(((const uint16_t *)at)[i * stride]);
    }
}

/* A block as it lies in memory. */
template <nib_dtype D> struct raw_block {
    uint4 q[D == NIB_F32 ? 4 : 2];
};

/* n elements side by side, what is missing 0; `aligned`: from a multiple of 16 bytes on. */
template <nib_dtype D> DEV void load_raw(raw_block<D> &raw, const char *at, int n, bool aligned)
{
    constexpr int quads = D == NIB_F32 ? 4 : 2;
    if (n == NIB_BLOCK && aligned) {
        NIB_UNROLL
        for (int i = 0; i < quads; i++)
            raw.q[i] = ((const uint4 *)at)[i];
        return;
    }
    uint32_t w[4 * quads];
    NIB_UNROLL
    for (int i = 0; i < 4 * quads; i++) {
        if constexpr (D == NIB_F32) {
            w[i] = i < n ? ((const uint32_t *)at)[i] : 0;
        } else {
            w[i] = 2 * i < n ? ((const uint16_t *)at)[2 * i] : 0;
            w[i] |= 2 * i + 1 < n ? (uint32_t)((const uint16_t *)at)[2 * i + 1] << 16 : 0;
        }
    }
    NIB_UNROLL
    for (int i = 0; i < quads; i++)
        raw.q[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
}

template <nib_dtype D> DEV void unpack(values<D> &v, const raw_block<D> &raw)
{
    NIB_UNROLL
    for (int i = 0; i < (D == NIB_F32 ? 4 : 2); i++)
        unpack_quad(v, i * (16 / element_bytes<D>()), raw.q[i]);
}

template <nib_dtype D> DEV void load_line(values<D> &v, const char *at, int n, bool aligned)
{
    raw_block<D> raw;
    load_raw(raw, at, n, aligned);
    unpack(v, raw);
}

template <nib_dtype D> DEV void to_floats(const values<D> &v, float (&x)[NIB_BLOCK])
{
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if constexpr (D == NIB_BF16)
            x[i] = i % 2 ? high_half(v.w[i / 2]) : low_half(v.w[i / 2]);
        else
            x[i] = v.x[i];
    }
}

/* The factor of a block that has an infinity, whose scale is the largest there is, is 0 where the tensor scale is near the
 * largest float: such a product is a NaN, and a NaN has no sign. */
enum { LARGEST_SCALE = 0x7E };

/* The largest magnitude of packed BF16, as its bits. NaNs do not count: they become +Inf, which has a NaN's code, +6, and
 * infinities lose their sign where factors[LARGEST_SCALE] is 0; NULL: the caller sees to those. */
template <int N> DEV uint32_t absmax_pairs(uint32_t (&w)[N], const float *factors)
{
    uint32_t pair = 0;
    NIB_UNROLL
    for (int i = 0; i < N; i++)
        pair = max_magnitudes(pair, w[i]);
    uint32_t m = max(pair & 0xFFFFu, pair >> 16);
    if (m >= 0x7F80u) { /* an infinity or a NaN: rare */
        const uint32_t least = factors && !(factors[LARGEST_SCALE] > 0) ? 0x7F80u : 0x7F81u; /* that has no sign */
        m = 0;
        NIB_UNROLL
        for (int i = 0; i < N; i++) {
            const uint32_t low = w[i] & 0x7FFFu, high = w[i] >> 16 & 0x7FFFu;
            m = max(m, max(low > 0x7F80u ? 0 : low, high > 0x7F80u ? 0 : high));
            w[i] = (low >= least ? 0x7F80u : w[i] & 0xFFFFu) | (high >= least ? 0x7F80u : w[i] >> 16) << 16;
        }
    }
    return m;
}

/* The largest magnitude of a block. */
template <nib_dtype D> DEV float absmax(values<D> &v, const float *factors)
{
    if constexpr (D == NIB_BF16) {
        return __uint_as_float(absmax_pairs(v.w, factors) << 16);
    } else {
        float m = 0;
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK; i++)
            m = larger(m, fabsf(v.x[i]));
        return m;
    }
}

/* ---- The RHT ---- */

/* nib_rht_forward without its rounding. The products are exact, so that adding them in one operation rounds as adding
 * them in two does; `signs` has the quarter, too, where it comes first. */
template <nib_dtype D> DEV void rht_sums(float (&x)[NIB_BLOCK], const float *signs)
{
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i += 2) {
        const float a = __fmul_rn(x[i], signs[i]), b = x[i + 1], s = signs[i + 1];
        x[i] = __fmaf_rn(b, s, a);
        x[i + 1] = __fmaf_rn(b, -s, a);
    }
    NIB_UNROLL
    for (int stride = 2; stride < NIB_BLOCK; stride *= 2) {
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK; i++)
            if (!(i & stride)) {
                const float a = x[i], b = x[i + stride];
                x[i] = __fadd_rn(a, b);
                x[i + stride] = __fsub_rn(a, b);
            }
    }
    if (D == NIB_F32) {
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK; i++)
            x[i] = __fmul_rn(x[i], 0.25f);
    }
}

/* Floats of a dtype, transformed and rounded as values of it. */
template <nib_dtype D> DEV void rht_of(float (&x)[NIB_BLOCK], const float *signs, values<D> &v)
{
    rht_sums<D>(x, signs);
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if constexpr (D == NIB_BF16) {
            if (i % 2 == 0)
                v.w[i / 2] = bf16_pair(x[i], x[i + 1]);
        } else {
            v.x[i] = x[i];
        }
    }
}

template <nib_dtype D> DEV void rht(values<D> &v, const float *signs)
{
    float x[NIB_BLOCK];
    to_floats(v, x);
    rht_of(x, signs, v);
}

/* ---- Scales ---- */

/* What follows from an amax. */
DEV float tensor_scale_from(float amax, bool unbiased, const nib_rules &rules)
{
    return nib_te_tensor_scale(unbiased ? nib_unbiased_amax(amax) : amax, &rules);
}

DEV nib_scaler scaler_of(float tensor_scale, const nib_rules &rules)
{
    nib_scaler scaler = {};
    scaler.tensor_scale = tensor_scale;
    nib_te_prepare(&scaler, &rules);
    return scaler;
}

enum { NEAREST = 0, STOCHASTIC_8 = 8, STOCHASTIC_24 = 24 };

template <int ROUND>
DEV uint32_t block_scale(float amax, const nib_scaler &scaler, nib_rounding rounding, uint8_t floor_code)
{
    if (ROUND == STOCHASTIC_24 && rounding == NIB_ROUND_STOCHASTIC_UNBIASED)
        return nib_at_least((uint8_t)nib_te_unbiased_block_scale(amax, &scaler), floor_code);
    const uint32_t scale = e4m3_of(smaller(__fmul_rn(amax, scaler.block), FLT_MAX));
    return max(scale, (uint32_t)floor_code);
}

/* ---- Codes ---- */

/* m >= 0 to E2M1, ties to even, as code << 22: what is left of c + m * 2^-126 without c, whose last bit is worth one step
 * of m's binade, is a subnormal (or barely normal) float of those bits. Beyond 6 it is larger, in order; so is a NaN. */
DEV uint32_t nearest_code(float m)
{
    const float c = __int_as_float(max((__float_as_int(m) & 0x7F800000) - (104 << 23), 23 << 23));
    return __float_as_uint(__fsub_rn(__fmaf_rn(m, 0x1p-126f, c), c));
}
/* The same cut off at 1/256 of a step, and r of those more; the caller drops what is below a step. */
DEV uint32_t stochastic_code_8(float m, uint32_t r)
{
    const float c = __int_as_float(max((__float_as_int(m) & 0x7F800000) - (112 << 23), 15 << 23));
    const uint32_t t = __float_as_uint(__fmaf_rz(m, 0x1p-126f, c)) + r;
    return __float_as_uint(__fsub_rn(__uint_as_float(t), c));
}
/* In fixed point. */
DEV uint32_t stochastic_code_24(float y, uint32_t r)
{
    const float m = smaller(y, 6.0f);
    const int e = max((__float_as_int(m) >> 23) - 127, 0);
    const uint32_t fixed = __float2uint_rz(__fmul_rn(m, __int_as_float((127 + 25 - e) << 23)));
    return min(((fixed + r) >> 24) + 2 * (uint32_t)e, 7u) << 22;
}

/* Two elements: nibbles in bits 12..15 and 28..31. `sign` has their signs in bits 15 and 31. */
template <int ROUND> DEV uint32_t encode_pair(float m0, float m1, uint32_t sign, uint32_t r0, uint32_t r1)
{
    const uint32_t c0 = ROUND == NEAREST        ? nearest_code(m0)
                        : ROUND == STOCHASTIC_8 ? stochastic_code_8(m0, r0)
                                                : stochastic_code_24(m0, r0);
    const uint32_t c1 = ROUND == NEAREST        ? nearest_code(m1)
                        : ROUND == STOCHASTIC_8 ? stochastic_code_8(m1, r1)
                                                : stochastic_code_24(m1, r1);
    uint32_t pair = __vminu2(__byte_perm(c0, c1, 0x7632), 0x01C001C0u) << 6;
    if (ROUND == STOCHASTIC_8)
        pair &= 0x70007000u;
    return pair | (sign & 0x80008000u);
}

/* Elements 8 * half.. under a factor that is positive, as eight nibbles. `random` has the words of Philox: for 8 bits the
 * four of the block, for 24 bits those of these elements. */
template <int ROUND, nib_dtype D>
DEV uint32_t encode_half(const values<D> &v, int half, float factor, const uint32_t *random)
{
    uint32_t q[4];
    NIB_UNROLL
    for (int i = 0; i < 4; i++) {
        const int at = 8 * half + 2 * i;
        float x0, x1;
        uint32_t sign;
        if constexpr (D == NIB_BF16) {
            sign = v.w[at / 2];
            x0 = low_half(sign), x1 = high_half(sign);
        } else {
            x0 = v.x[at], x1 = v.x[at + 1];
            const uint32_t b0 = x0 == x0 ? __float_as_uint(x0) : 0, b1 = x1 == x1 ? __float_as_uint(x1) : 0;
            sign = __byte_perm(b0, b1, 0x7632); /* a NaN has no sign */
        }
        uint32_t r0 = 0, r1 = 0;
        if (ROUND == STOCHASTIC_8) {
            const uint32_t word = random[2 * half + i / 2];
            r0 = __byte_perm(word, 0, 0x4440 + 2 * (i % 2)), r1 = __byte_perm(word, 0, 0x4441 + 2 * (i % 2));
        }
        if (ROUND == STOCHASTIC_24)
            r0 = random[2 * i] >> 8, r1 = random[2 * i + 1] >> 8;
        q[i] = encode_pair<ROUND>(__fmul_rn(fabsf(x0), factor), __fmul_rn(fabsf(x1), factor), sign, r0, r1);
    }
    const uint32_t r01 = (q[0] >> 8) + q[1], r23 = (q[2] >> 8) + q[3]; /* bytes 0 2 1 3 and 4 6 5 7, in high nibbles */
    return __byte_perm(r01, r23, 0x5410) >> 4 | __byte_perm(r01, r23, 0x7632);
}

/* nib_random_words with the rounds' keys made beforehand: kernel parameters are operands of instructions. */
DEV void random_words(const nib_cuda_quantization &job, uint64_t offset, uint32_t line, uint32_t column,
                      uint32_t (&out)[4])
{
    uint32_t c0 = (uint32_t)offset, c1 = (uint32_t)(offset >> 32), c2 = line, c3 = column;
    NIB_UNROLL
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ job.keys[2 * round];
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ job.keys[2 * round + 1];
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Infinities without their sign: what absmax does not do for other dtypes, nor where scales are tried. */
template <nib_dtype D> DEV void drop_infinite_signs(values<D> &v)
{
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if constexpr (D == NIB_BF16) {
            const uint32_t half = v.w[i / 2] >> 16 * (i % 2) & 0xFFFFu;
            v.w[i / 2] = half == 0xFF80u ? v.w[i / 2] ^ 0x8000u << 16 * (i % 2) : v.w[i / 2];
        } else {
            v.x[i] = __float_as_uint(v.x[i]) == 0xFF800000u ? -v.x[i] : v.x[i];
        }
    }
}

/* Sixteen codes. SIGNED: infinities have lost their signs, where they must. */
template <int ROUND, bool SIGNED, nib_dtype D>
DEV uint2 encode(const nib_cuda_quantization &job, const values<D> &values_in, float factor, uint64_t offset,
                 uint32_t line, uint32_t column)
{
    values<D> v = values_in;
    if (!SIGNED && !(factor > 0)) /* rare: a tensor scale near the largest float, given by a caller */
        drop_infinite_signs(v);
    uint32_t codes[2];
    if (ROUND == STOCHASTIC_24) {
        NIB_UNROLL
        for (int half = 0; half < 2; half++) {
            uint32_t random[8], words[4];
            NIB_UNROLL
            for (int quad = 0; quad < 2; quad++) {
                random_words(job, offset + (uint64_t)(2 * half + quad), line, column, words);
                NIB_UNROLL
                for (int i = 0; i < 4; i++)
                    random[4 * quad + i] = words[i];
            }
            codes[half] = encode_half<ROUND>(v, half, factor, random);
        }
    } else {
        uint32_t words[4] = { 0, 0, 0, 0 };
        if (ROUND == STOCHASTIC_8)
            random_words(job, offset, line, column, words);
        codes[0] = encode_half<ROUND>(v, 0, factor, words);
        codes[1] = encode_half<ROUND>(v, 1, factor, words);
    }
    return make_uint2(codes[0], codes[1]);
}

/* ---- Back ---- */

DEV bool is_finite(float f) { return (__float_as_uint(f) & 0x7F800000u) != 0x7F800000u; }

/* Nibble i times a finite factor; 0 and overflow included. */
DEV float decode(uint32_t codes, int i, float factor)
{
    const uint32_t magnitude = (i < 6 ? codes << (22 - 4 * i) : codes >> (4 * i - 22)) & 0x01C00000u;
    const float y = __fmul_rn(__fmul_rn(__uint_as_float(magnitude), 0x1p126f), factor);
    return __uint_as_float(__float_as_uint(y) ^ (codes << (28 - 4 * i) & 0x80000000u));
}
/* Any factor: results have one NaN, and it is not the device's. */
DEV float decode_any(uint32_t codes, int i, float factor)
{
    return nib_quiet(__fmul_rn(nib_f32_from_e2m1((uint8_t)(codes >> 4 * i & 15)), factor));
}

/* N values from as many nibbles. */
template <int N> DEV void decode_some(uint32_t codes, float factor, float (&y)[N])
{
    if (is_finite(factor)) {
        NIB_UNROLL
        for (int i = 0; i < N; i++)
            y[i] = decode(codes, i, factor);
    } else {
        NIB_UNROLL
        for (int i = 0; i < N; i++)
            y[i] = decode_any(codes, i, factor);
    }
}

DEV void decode_block(uint2 codes, float factor, float (&y)[NIB_BLOCK])
{
    float low[8], high[8];
    decode_some(codes.x, factor, low);
    decode_some(codes.y, factor, high);
    NIB_UNROLL
    for (int i = 0; i < 8; i++)
        y[i] = low[i], y[8 + i] = high[i];
}

/* What E2M1 makes of y >= 0, ties to even: the sum with c, whose last bit is worth one step of y's binade, is rounded to
 * steps. Beyond 6 it is 6, and so for a NaN. */
DEV float nearest_value(float y)
{
    const float m = smaller(y, 6.0f);
    const float c = __int_as_float(max((__float_as_int(m) & 0x7F800000) + (22 << 23), (127 + 22) << 23));
    return __fsub_rn(__fadd_rn(m, c), c);
}

/* Values under a factor, and back under a finite one: what decode_some makes of encode's codes. */
template <nib_dtype D, int N> DEV void round_values(float (&y)[N], float factor, float decode_factor)
{
    NIB_UNROLL
    for (int i = 0; i < N; i++) {
        const uint32_t sign = D == NIB_BF16 || y[i] == y[i] ? __float_as_uint(y[i]) & 0x80000000u : 0;
        const float value = __fmul_rn(nearest_value(__fmul_rn(fabsf(y[i]), factor)), decode_factor);
        y[i] = __uint_as_float(__float_as_uint(value) | sign);
    }
}

/* The same, back through the RHT where there was one. Results are quiet. */
DEV void decode_slowly(uint2 codes, float factor, bool rht, uint16_t sign_mask, float (&y)[NIB_BLOCK])
{
    decode_block(codes, factor, y);
    if (!rht)
        return;
    nib_rht_inverse(y, sign_mask);
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++)
        y[i] = nib_quiet(y[i]);
}

/* One value of a line, by nib_store_value's rule; y is quiet. */
template <nib_dtype D> DEV void store_one(char *at, int64_t i, float y)
{
    if constexpr (D == NIB_F32)
        ((float *)at)[i] = y;
    else
        ((uint16_t *)at)[i] = D == NIB_BF16 ? nib_bf16_from_f32(y) : nib_f16_from_f32(y);
}

template <nib_dtype D> DEV uint32_t pack_pair(float low, float high)
{
    return D == NIB_BF16 ? bf16_pair(low, high) : f16_pair(low, high);
}

/* Elements of a line, n of them; `fast`: all of them, from a multiple of 16 bytes on, and none is a NaN, which the
 * device's own conversions would make another one. */
template <nib_dtype D, int N> DEV void store_line(char *at, const float (&y)[N], int n, bool fast)
{
    if (fast) {
        constexpr int step = D == NIB_F32 ? 4 : 8;
        NIB_UNROLL
        for (int i = 0; i < N; i += step) {
            uint4 q;
            if constexpr (D == NIB_F32)
                q = make_uint4(__float_as_uint(y[i]), __float_as_uint(y[i + 1]), __float_as_uint(y[i + 2]),
                               __float_as_uint(y[i + 3]));
            else
                q = make_uint4(pack_pair<D>(y[i], y[i + 1]), pack_pair<D>(y[i + 2], y[i + 3]),
                               pack_pair<D>(y[i + 4], y[i + 5]), pack_pair<D>(y[i + 6], y[i + 7]));
            *(uint4 *)(at + i * element_bytes<D>()) = q;
        }
        return;
    }
    NIB_UNROLL
    for (int i = 0; i < N; i++)
        if (i < n)
            store_one<D>(at, i, y[i]);
}

/* Down a column, from row `skip` of the block on. */
template <nib_dtype D> DEV void store_strided(char *at, int64_t stride, const float (&y)[NIB_BLOCK], int skip, int n)
{
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if (i >= skip && i < n)
            store_one<D>(at, i * stride, y[i]);
    }
}

/* Codes of a block, n elements of them. */
DEV void store_codes(const nib_cuda_usage &u, int64_t line, int64_t block, uint2 codes, int n)
{
    uint8_t *const at = u.codes + line * u.g.line_stride + block * (NIB_BLOCK / 2);
    if (n == NIB_BLOCK && u.wide) {
        *(uint2 *)at = codes;
        return;
    }
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK / 2; i++)
        if (2 * i < n)
            at[i] = (uint8_t)((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
}

DEV uint2 load_codes(const nib_cuda_usage &u, int64_t line, int64_t block, int n)
{
    const uint8_t *const at = u.codes + line * u.g.line_stride + block * (NIB_BLOCK / 2);
    if (n == NIB_BLOCK && u.wide)
        return *(const uint2 *)at;
    uint32_t half[2] = { 0, 0 };
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK / 2; i++)
        if (2 * i < n)
            half[i / 4] |= (uint32_t)at[i] << 8 * (i % 4);
    return make_uint2(half[0], half[1]);
}

/* Where the scale of (line, block) is: rows of scales, or tiles of 128 x 4. */
DEV int64_t scale_index(const nib_usage_geometry &g, int64_t line, int64_t block)
{
    if (!g.swizzled)
        return line * g.scale_line + block;
    const uint32_t l = (uint32_t)line & 127, b = (uint32_t)block & 3;
    return (line / 128 * (g.scale_line / 4) + block / 4) * 512 + (l % 32 * 16 + l / 32 * 4 + b);
}

#endif
