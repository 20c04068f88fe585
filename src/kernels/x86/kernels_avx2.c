/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_avx2.c - eight lanes: AVX2, FMA and F16C.
 */
#if defined(__x86_64__)

#include "kernels/kernels.h"
#include "kernels/x86/lanes_avx2.h"

/* a0 b0 a1 b1 ... as 64 bytes. */
SIMD void vi_store_pairs(uint8_t *p, VI a, VI b)
{
    const VI low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
    _mm256_storeu_si256((void *)p, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((void *)(p + 32), _mm256_permute2x128_si256(low, high, 0x31));
}

SIMD void vi_store_low_bytes(uint8_t *p, VI v)
{
    const VI pick =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const VI bytes = _mm256_shuffle_epi8(v, pick);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64((void *)p, both);
}

/* Adding a large enough value rounds a to its grid, and leaves the code in the low bits: below 2 the grid is halves
 * (2^22), from 2 it is ones (2^23, plus 2 since code 4 is 2), from 4 twos (2^24, plus 8). The low bits of the exponent
 * pick the value. */
SIMD VI e2m1_bits(VF a)
{
    const VF grids = _mm256_setr_ps(0x1p23f + 2, 0x1p24f + 8, 0, 0x1p22f, 0x1p23f + 2, 0x1p24f + 8, 0, 0x1p22f);
    const VI exponent = vi_srl(vi_of(vf_max(a, vf_set1(1.0f))), 23);
    return vi_of(vf_add(a, _mm256_permutevar_ps(grids, exponent)));
}

/* ---- Largest magnitude ---- */

SIMD float largest_lane(VF m)
{
    __m128 low = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    low = _mm_max_ps(low, _mm_movehl_ps(low, low));
    return _mm_cvtss_f32(_mm_max_ss(low, _mm_movehdup_ps(low)));
}

SLOT float absmax_f32(const void *x, int64_t n)
{
    const float *values = x;
    const VF mask = vf_of(vi_set1(0x7FFFFFFF));
    VF m[4] = { vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0) };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) /* a NaN gives the second operand, which is never one */
            m[k] = vf_max(_mm256_and_ps(vf_load(values + i + 8 * k), mask), m[k]);
    float largest = largest_lane(vf_max(vf_max(m[0], m[1]), vf_max(m[2], m[3])));
    for (; i < n; i++) {
        const float a = nib_abs(values[i]);
        largest = a > largest ? a : largest;
    }
    return largest;
}

enum { WORDS = 16 };
SIMD VI vw_load(const uint16_t *p) { return _mm256_loadu_si256((const void *)p); }
SIMD VI vw_set1(int word) { return _mm256_set1_epi16((short)word); }
SIMD VI vw_max(VI a, VI b) { return _mm256_max_epi16(a, b); }
SIMD VI vw_up_to(VI a, VI limit) { return vi_andnot(_mm256_cmpgt_epi16(a, limit), a); }
SIMD bool vw_any_above(VI a, VI limit) { return _mm256_movemask_epi8(_mm256_cmpgt_epi16(a, limit)) != 0; }

#include "kernels/x86/absmax.h"

SIMD float absmax_row(const void *x, int64_t n, nib_dtype dtype)
{
    return dtype == NIB_F32 ? absmax_f32(x, n) : dtype == NIB_BF16 ? absmax_bf16(x, n) : absmax_f16(x, n);
}

#include "kernels/simd.h"
#include "kernels/simd_panels.h"

/* ---- Rows (rows.h) ---- */

/* The largest 32-bit lane of each of eight vectors. */
SIMD VI largest_of_each(const VI m[8])
{
    VI halves[4], quarters[2];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) halves[i] =
        vi_max(_mm256_unpacklo_epi32(m[2 * i], m[2 * i + 1]), _mm256_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) quarters[i] =
        vi_max(_mm256_unpacklo_epi64(halves[2 * i], halves[2 * i + 1]),
               _mm256_unpackhi_epi64(halves[2 * i], halves[2 * i + 1]));
    return vi_max(_mm256_permute2x128_si256(quarters[0], quarters[1], 0x20),
                  _mm256_permute2x128_si256(quarters[0], quarters[1], 0x31));
}

/* The amaxes of eight blocks of 16-bit values, as FP32: a vector is a block, and magnitudes order as integers, NaNs
 * above infinity. */
SIMD VF amax_16_of_eight(const char *x, nib_dtype dtype)
{
    const VI mask = _mm256_set1_epi16(0x7FFF);
    VI m[8];
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) m[k] =
        _mm256_and_si256(_mm256_loadu_si256((const void *)(x + 32 * k)), mask);
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) m[i] =
        vw_max(_mm256_unpacklo_epi16(m[2 * i], m[2 * i + 1]), _mm256_unpackhi_epi16(m[2 * i], m[2 * i + 1]));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) m[i] =
        vw_max(_mm256_unpacklo_epi32(m[2 * i], m[2 * i + 1]), _mm256_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
    const VI both = vw_max(_mm256_unpacklo_epi64(m[0], m[1]), _mm256_unpackhi_epi64(m[0], m[1]));
    const __m128i all = _mm_max_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    if (dtype == NIB_F16)
        return _mm256_cvtph_ps(all);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(all), 16));
}

/* The bits of the amaxes of eight blocks; `next` is for wider vectors. */
SIMD VI amax_bits(const char *x, const char *next, nib_dtype dtype)
{
    (void)next;
    if (dtype != NIB_F32)
        return _mm256_castps_si256(amax_16_of_eight(x, dtype));
    const VI mask = vi_set1(0x7FFFFFFF);
    VI m[8];
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++)
    {
        const VI low = _mm256_loadu_si256((const void *)(x + 64 * k));
        const VI high = _mm256_loadu_si256((const void *)(x + 64 * k + 32));
        m[k] = vi_max(vi_and(low, mask), vi_and(high, mask));
    }
    return largest_of_each(m);
}

/* Each vector has a code in the lower word of a lane and a value's upper half, for its sign, in the upper one. Two of
 * them are a block. Packing to bytes saturates, so that a sign is 0x80; with it, 16 times a code of four bits is a sum of
 * products, and so is a pair of codes. Packing works within 128-bit halves, which are woven together in the end. */
SIMD void store_signed_codes(uint8_t *out, const VI v[8])
{
    const VI wanted = _mm256_set1_epi16((short)0x8007), nibble = _mm256_set1_epi16(1 << 8 | 16);
    const VI pair = vi_set1(16 << 16 | 1);
    VI bytes[4];
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++)
    {
        const VI code = _mm256_maddubs_epi16(vi_and(_mm256_packs_epi16(v[2 * b], v[2 * b + 1]), wanted), nibble);
        bytes[b] = _mm256_madd_epi16(code, pair);
    }
    const VI low = _mm256_srli_epi16(_mm256_packus_epi32(bytes[0], bytes[1]), 4);
    const VI high = _mm256_srli_epi16(_mm256_packus_epi32(bytes[2], bytes[3]), 4);
    const VI packed = _mm256_packus_epi16(low, high);
    const __m128i first = _mm256_castsi256_si128(packed), second = _mm256_extracti128_si256(packed, 1);
    _mm_storeu_si128((void *)out, _mm_unpacklo_epi16(first, second));
    _mm_storeu_si128((void *)(out + 16), _mm_unpackhi_epi16(first, second));
}

SIMD VI with_upper_half(VI code, VF x) { return _mm256_blend_epi16(code, vi_of(x), 0xAA); }

SIMD VI code_bits(VF a, VF factor, bool clamp)
{
    const VF y = vf_mul(a, factor);
    return e2m1_bits(clamp ? vf_min(y, vf_set1(6.0f)) : y);
}

/* BF16 is split into even and odd elements, which is a shift and a mask, and a pair of codes is then in one lane. */
SIMD void code_four_blocks_bf16(uint8_t *out, const char *x, const float *factors, const uint8_t *scales, bool clamp)
{
    const VI magnitudes = vi_set1(0x7FFF7FFF), upper = vi_set1((int)0xFFFF0000u), sign = _mm256_set1_epi16(8);
    const VI pair = vi_set1(16 << 16 | 1);
    VI bytes[4];
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++)
    {
        const VF f = _mm256_broadcast_ss(factors + scales[b]);
        const VI values = _mm256_loadu_si256((const void *)(x + 32 * b)), a = vi_and(values, magnitudes);
        const VI even = code_bits(vf_of(vi_sll(a, 16)), f, clamp), odd = code_bits(vf_of(vi_and(a, upper)), f, clamp);
        const VI codes = _mm256_blend_epi16(even, vi_sll(odd, 16), 0xAA);
        const VI signs = vi_and(_mm256_srli_epi16(values, 12), sign);
        bytes[b] = _mm256_madd_epi16(vi_or(codes, signs), pair);
    }
    const VI packed =
        _mm256_packus_epi16(_mm256_packus_epi32(bytes[0], bytes[1]), _mm256_packus_epi32(bytes[2], bytes[3]));
    const VI order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((void *)out, _mm256_permutevar8x32_epi32(packed, order));
}

/* Four blocks of 16 values to 32 bytes; `factors` has one for each scale. */
SIMD void code_four_blocks(uint8_t *out, const char *x, nib_dtype dtype, const float *factors, const uint8_t *scales,
                           bool clamp)
{
    if (dtype == NIB_BF16) {
        code_four_blocks_bf16(out, x, factors, scales, clamp);
        return;
    }
    VI v[8];
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++)
    {
        const VF value = load_values(x, 8 * k, dtype);
        const VF factor = _mm256_broadcast_ss(factors + scales[k / 2]);
        v[k] = with_upper_half(code_bits(absolute(value), factor, clamp), value);
    }
    store_signed_codes(out, v);
}

SIMD void code_group(uint8_t *out, const char *x, nib_dtype dtype, const float *factors, const uint8_t *scales,
                     bool clamp)
{
    code_four_blocks(out, x, dtype, factors, scales, clamp);
    code_four_blocks(out + 32, x + 4 * BLOCK * (dtype == NIB_F32 ? 4 : 2), dtype, factors, scales + 4, clamp);
}

SIMD void code_four_randomly(uint8_t *out, const char *x, nib_dtype dtype, const float *factor, const uint8_t *random)
{
    VI v[8];
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++)
    {
        const VF value = load_values(x, 8 * k, dtype);
        const VI r = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(random + 8 * k)));
        v[k] = with_upper_half(stochastic_code(absolute(value), _mm256_broadcast_ss(factor + k / 2), r), value);
    }
    store_signed_codes(out, v);
}

SIMD void code_group_randomly(uint8_t *out, const char *x, nib_dtype dtype, const float *factor, const uint8_t *random)
{
    code_four_randomly(out, x, dtype, factor, random);
    code_four_randomly(out + 32, x + 4 * BLOCK * (dtype == NIB_F32 ? 4 : 2), dtype, factor + 4, random + 4 * BLOCK);
}

/* Half of eight blocks each, in an order in which they come out of store_random side by side. */
SIMD VI random_order(int half)
{
    return half ? _mm256_setr_epi32(4, 0, 6, 0, 5, 0, 7, 0) : _mm256_setr_epi32(0, 0, 2, 0, 1, 0, 3, 0);
}

SIMD void store_random(uint8_t *out, VI first, VI second)
{
    _mm256_store_si256((void *)out, _mm256_unpacklo_epi64(first, second));
    _mm256_store_si256((void *)(out + 32), _mm256_unpackhi_epi64(first, second));
}

#define SWEEPS 0
#include "kernels/x86/rows.h"

/* ---- Columns (columns.h) ---- */

SIMD VI column_larger_words(VI a, VI b) { return _mm256_max_epi16(a, b); }

SIMD void largest_of_squares(VI *amax, nib_dtype dtype)
{
    (void)dtype;
    amax[0] = amax[1] = vi_largest_everywhere(vi_max(amax[0], amax[1]));
}

/* Row i; of words, the even or odd ones. */
SIMD VF column_row(float (*x)[VL], int i, bool words, int odd)
{
    const VI v = vi_of(vf_load(x[i]));
    return vf_of(!words ? v : odd ? vi_and(v, vi_set1((int)0xFFFF0000u)) : vi_sll(v, 16));
}

/* Eight rows of codes as words: in each 128-bit half, rows 0 to 3 of its four columns, then rows 4 to 7. Signs and codes
 * are packed as in store_signed_codes. */
SIMD VI eight_rows(float (*x)[VL], bool words, int odd, VF factor)
{
    const VI wanted = _mm256_set1_epi16((short)0x8007), nibble = _mm256_set1_epi16(1 << 8 | 16);
    VI codes[4];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        const VF a = column_row(x, i, words, odd), b = column_row(x, i + 4, words, odd);
        const VI packed = _mm256_packs_epi16(with_upper_half(code_bits(absolute(a), factor, false), a),
                                             with_upper_half(code_bits(absolute(b), factor, false), b));
        codes[i] = _mm256_maddubs_epi16(vi_and(packed, wanted), nibble); /* 16 times a code */
    }
    const VI low = vi_or(_mm256_srli_epi16(codes[0], 4), codes[1]);
    const VI high = vi_or(_mm256_srli_epi16(codes[2], 4), codes[3]);
    return vi_or(low, _mm256_slli_epi16(high, 8));
}

/* Eight columns of sixteen rows, eight bytes for each in the order of lane_at. */
SIMD void column_codes(uint8_t *out, float (*x)[VL], bool words, int odd, VF factor)
{
    const VI order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const VI first = _mm256_shuffle_epi8(eight_rows(x, words, odd, factor), order);
    const VI second = _mm256_shuffle_epi8(eight_rows(x + 8, words, odd, factor), order);
    _mm256_store_si256((void *)out, _mm256_unpacklo_epi32(first, second));
    _mm256_store_si256((void *)(out + 32), _mm256_unpackhi_epi32(first, second));
}

/* Four vectors of four times eight bytes, transposed. */
SIMD void transpose_codes(const uint8_t *in, size_t stride, VI out[4])
{
    VI a[4];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        const uint8_t *const from = in + (size_t)(i % 2) * stride + i / 2 * 16;
        a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128((const void *)from)),
                                       _mm_load_si128((const void *)(from + 2 * stride)), 1);
    }
    out[0] = _mm256_unpacklo_epi64(a[0], a[1]);
    out[1] = _mm256_unpackhi_epi64(a[0], a[1]);
    out[2] = _mm256_unpacklo_epi64(a[2], a[3]);
    out[3] = _mm256_unpackhi_epi64(a[2], a[3]);
}

SIMD void store_whole(uint8_t *out, VI v) { _mm256_storeu_si256((void *)out, v); }

/* Amaxes are taken over bits, where NaNs are above infinity. */
struct column_amax {
    VI bits[2];
};

SIMD void column_amax_of(struct column_amax *amax, int i, VF a, VF b)
{
    const VI first = vi_of(absolute(a)), second = vi_of(absolute(b));
    amax->bits[0] = i ? vi_max(first, amax->bits[0]) : first;
    amax->bits[1] = i ? vi_max(second, amax->bits[1]) : second;
}

SIMD VI column_amax_bits(const struct column_amax *amax) { return vi_max(amax->bits[0], amax->bits[1]); }

SIMD VF column_bf16(VF x) { return round_to_bf16(x); }

#include "kernels/x86/columns.h"

/* ---- Back ---- */

SIMD void store_vector(void *p, __m256i v, bool stream)
{
    if (stream)
        _mm256_stream_si256(p, v);
    else
        _mm256_storeu_si256(p, v);
}

/* The codes of four blocks, one a byte: blocks 0 and 2 in the halves of the first vector, 1 and 3 in the second. */
SIMD void spread_codes(const uint8_t *codes, VI out[2])
{
    const VI bytes = _mm256_loadu_si256((const void *)codes), nibble = _mm256_set1_epi8(15);
    const VI low = vi_and(bytes, nibble), high = vi_and(_mm256_srli_epi16(bytes, 4), nibble);
    out[0] = _mm256_unpacklo_epi8(low, high);
    out[1] = _mm256_unpackhi_epi8(low, high);
}

/* A block from the upper halves of its values: elements 0 to 3 and 8 to 11 in the lower half, the others in the
 * upper. */
SIMD void store_wide(char *out, nib_dtype dtype, VI upper, VF factor, bool stream)
{
    const VI zero = _mm256_setzero_si256();
    const VF a = vf_mul(vf_of(_mm256_unpacklo_epi16(zero, upper)), factor);
    const VF b = vf_mul(vf_of(_mm256_unpackhi_epi16(zero, upper)), factor);
    if (dtype == NIB_F32) {
        store_vector(out, vi_of(a), stream);
        store_vector(out + 32, vi_of(b), stream);
        return;
    }
    if (dtype == NIB_BF16) {
        const VI low = vi_srl(vi_of(round_to_bf16(a)), 16), high = vi_srl(vi_of(round_to_bf16(b)), 16);
        store_vector(out, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8), stream);
        return;
    }
    store_vector(out, _mm256_set_m128i(_mm256_cvtps_ph(b, 0), _mm256_cvtps_ph(a, 0)), stream);
}

/* E2M1 values are exact in BF16, the upper half of FP32: two tables give its two bytes. */
SIMD void decode_four_wide(char *out, nib_dtype dtype, const uint8_t *codes, const float *factors, const uint8_t *which,
                           bool stream)
{
    const VI high = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, (char)0x80,
                                                              (char)0xBF, (char)0xBF, (char)0xBF, (char)0xC0,
                                                              (char)0xC0, (char)0xC0, (char)0xC0));
    const VI low =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0, 0, 0,
                                                  (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0));
    const VI order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7); /* so that what comes out is side by side */
    const int block_bytes = BLOCK * (dtype == NIB_F32 ? 4 : 2);
    VI spread[2], upper[4];
    spread_codes(codes, spread);
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    {
        const VI at = _mm256_permutevar8x32_epi32(spread[i], order);
        const VI h = _mm256_shuffle_epi8(high, at), l = _mm256_shuffle_epi8(low, at);
        upper[i] = _mm256_unpacklo_epi8(l, h);
        upper[i + 2] = _mm256_unpackhi_epi8(l, h);
    }
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++)
        store_wide(out + b * block_bytes, dtype, upper[b], _mm256_broadcast_ss(factors + which[b]), stream);
}

/* Four blocks by tables of their 16 values: of the lower bytes and of the upper ones, of blocks 0 and 2 and of blocks 1
 * and 3. */
SIMD void decode_four_by(char *out, const uint8_t *codes, const VI lower[2], const VI upper[2], bool stream)
{
    VI spread[2], block[4];
    spread_codes(codes, spread);
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    {
        const VI l = _mm256_shuffle_epi8(lower[i], spread[i]), h = _mm256_shuffle_epi8(upper[i], spread[i]);
        const VI first = _mm256_unpacklo_epi8(l, h), second = _mm256_unpackhi_epi8(l, h);
        block[i] = _mm256_permute2x128_si256(first, second, 0x20);
        block[i + 2] = _mm256_permute2x128_si256(first, second, 0x31);
    }
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++) store_vector(out + b * 32, block[b], stream);
}

/* Those tables from the roundings of four factors (lower half) and of 1.5 times them. */
SIMD void bf16_values(const float *roundings, VI lower[2], VI upper[2])
{
    const VI which = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, -1, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3));
    const VI other = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, -1, 8, 9, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11));
    const VI steps = _mm256_broadcastsi128_si256(_mm_setr_epi16(0, -0x80, 0, 0, 0x80, 0x80, 0x100, 0x100));
    const VI apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const VI signs = _mm256_broadcastsi128_si256(_mm_set_epi64x((long long)0x8080808080808080u, 0));
    const VI all = _mm256_cvtepu32_epi64(_mm_loadu_si128((const void *)roundings));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    {
        const VI values = _mm256_add_epi16(_mm256_shuffle_epi8(all, i ? other : which), steps);
        const VI table = _mm256_shuffle_epi8(values, apart);
        lower[i] = _mm256_unpacklo_epi64(table, table);
        upper[i] = vi_or(_mm256_unpackhi_epi64(table, table), signs);
    }
}

SIMD void decode_four_bf16(char *out, const uint8_t *codes, const float *roundings, bool stream)
{
    VI lower[2], upper[2];
    bf16_values(roundings, lower, upper);
    decode_four_by(out, codes, lower, upper, stream);
}

/* The lower bytes of a block's 16 values, then the upper ones. */
SIMD void make_bf16_values(uint16_t *values, const float *roundings, int n)
{
    for (int code = 0; code < n; code += 4) {
        VI lower[2], upper[2];
        bf16_values(roundings + code, lower, upper);
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
        {
            _mm256_store_si256((void *)(values + (code + i) * BLOCK),
                               _mm256_permute2x128_si256(lower[i], upper[i], 0x20));
            _mm256_store_si256((void *)(values + (code + i + 2) * BLOCK),
                               _mm256_permute2x128_si256(lower[i], upper[i], 0x31));
        }
    }
}

SIMD VI two_halves(const uint16_t *low, const uint16_t *high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128((const void *)low)),
                                   _mm_load_si128((const void *)high), 1);
}

/* By tables of the values of all scales. */
SIMD void decode_four_known(char *out, const uint8_t *codes, const uint16_t *values, const uint8_t *scales, bool stream)
{
    VI lower[2], upper[2];
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    {
        const uint16_t *const low = values + scales[i] * BLOCK, *const high = values + scales[i + 2] * BLOCK;
        lower[i] = two_halves(low, high);
        upper[i] = two_halves(low + 8, high + 8);
    }
    decode_four_by(out, codes, lower, upper, stream);
}

/* Whether 64 scales are all between `least` and 126. */
SIMD bool scales_within(const uint8_t *scales, uint8_t least)
{
    const VI from = _mm256_set1_epi8((char)least), limit = _mm256_set1_epi8((char)(126 - least));
    const VI a = _mm256_sub_epi8(_mm256_loadu_si256((const void *)scales), from);
    const VI b = _mm256_sub_epi8(_mm256_loadu_si256((const void *)(scales + 32)), from);
    const VI most = _mm256_max_epu8(a, b);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(most, limit), limit)) == -1;
}

#include "kernels/x86/slots.h"
#include "kernels/x86/steps_avx2.h"

#include "kernels/simd_transpose.h"

#include "kernels/simd_generic.h"

const struct nib_kernels nib_kernels_avx2 = {
    .absmax = { [NIB_F32] = absmax_f32, [NIB_BF16] = absmax_bf16, [NIB_F16] = absmax_f16 },
    .absmax_lines = { [NIB_GENERIC_FORMAT] = absmax_lines },
    .quantize = { [NIB_NVFP4] = quantize_nvfp4, NIB_QUANTIZE_GENERIC },
    .quantize_both = { [NIB_NVFP4] = quantize_both_nvfp4 },
    .decode = { [NIB_NVFP4] = decode_nvfp4, NIB_DECODE_GENERIC },
    .inverse_rht = { NIB_INVERSE_RHT_ALL },
    .transpose = { NIB_TRANSPOSE_ALL },
};

#else
typedef int nib_no_avx2; /* a translation unit may not be empty */
#endif
