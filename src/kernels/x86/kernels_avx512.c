/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_avx512.c - sixteen lanes: AVX-512 F, BW, VL and DQ.
 */
#if defined(__x86_64__)

#include "kernels/kernels.h"
#include "kernels/x86/lanes_avx512.h"

/* a0 b0 a1 b1 ... as 128 bytes. */
SIMD void vi_store_pairs(uint8_t *p, VI a, VI b)
{
    const VI low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
    const VI first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
             second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(p + 64, _mm512_permutex2var_epi64(low, second, high));
}

SIMD void vi_store_low_bytes(uint8_t *p, VI v) { _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(v)); }

/* As in kernels_avx2.c: a value that rounds to the grid of a's range. */
SIMD VI e2m1_bits(VF a)
{
    const VF grids = _mm512_broadcast_f32x4(_mm_setr_ps(0x1p23f + 2, 0x1p24f + 8, 0, 0x1p22f));
    const VI exponent = vi_srl(vi_of(vf_max(a, vf_set1(1.0f))), 23);
    return vi_of(vf_add(a, _mm512_permutevar_ps(grids, exponent)));
}

/* ---- Largest magnitude ---- */

SLOT float absmax_f32(const void *x, int64_t n)
{
    const float *values = x;
    const VI mask = vi_set1(0x7FFFFFFF);
    VF m[4] = { vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0) };
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) /* a NaN gives the second operand, which is never one */
            m[k] = vf_max(vf_of(vi_and(vi_of(vf_load(values + i + 16 * k)), mask)), m[k]);
    float largest = largest_lane(vf_max(vf_max(m[0], m[1]), vf_max(m[2], m[3])));
    for (; i < n; i++) {
        const float a = nib_abs(values[i]);
        largest = a > largest ? a : largest;
    }
    return largest;
}

enum { WORDS = 32 };
SIMD VI vw_load(const uint16_t *p) { return _mm512_loadu_si512(p); }
SIMD VI vw_set1(int word) { return _mm512_set1_epi16((short)word); }
SIMD VI vw_max(VI a, VI b) { return _mm512_max_epi16(a, b); }
SIMD VI vw_up_to(VI a, VI limit) { return _mm512_maskz_mov_epi16(_mm512_cmple_epi16_mask(a, limit), a); }
SIMD bool vw_any_above(VI a, VI limit) { return _mm512_cmpgt_epi16_mask(a, limit) != 0; }

#include "kernels/x86/absmax.h"

SIMD float absmax_row(const void *x, int64_t n, nib_dtype dtype)
{
    return dtype == NIB_F32 ? absmax_f32(x, n) : dtype == NIB_BF16 ? absmax_bf16(x, n) : absmax_f16(x, n);
}

#include "kernels/simd.h"
#include "kernels/simd_panels.h"

/* ---- Rows (rows.h), with a vector per block ---- */

/* The larger magnitude, positive. */
SIMD VF larger_magnitude(VF a, VF b) { return _mm512_range_ps(a, b, 0xB); }

/* Two halves of a vector from two places. */
SIMD VF join_halves(const char *low, const char *high)
{
    const __m512d first = _mm512_castpd256_pd512(_mm256_loadu_pd((const void *)low));
    return _mm512_castpd_ps(_mm512_insertf64x4(first, _mm256_loadu_pd((const void *)high), 1));
}

/* The bits of the amaxes of eight blocks from x on and of eight from `next` on, if there is no NaN. Halves of two blocks
 * share a vector, which costs no shuffle, and maxima of magnitudes run on either port; they drop NaNs, which are noticed
 * apart and then show in the result. */
SIMD VI amax_bits_f32(const char *x, const char *next)
{
    __mmask16 values = 0xFFFF;
    VF m[8]; /* blocks i and i + 8 */
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
    {
        const VF a = join_halves(x + 64 * i, next + 64 * i), b = join_halves(x + 64 * i + 32, next + 64 * i + 32);
        values = _mm512_mask_cmp_ps_mask(values, a, b, _CMP_ORD_Q);
        m[i] = larger_magnitude(a, b);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) m[i] =
        vf_max(_mm512_unpacklo_ps(m[2 * i], m[2 * i + 1]), _mm512_unpackhi_ps(m[2 * i], m[2 * i + 1]));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    {
        const __m512d a = _mm512_castps_pd(m[2 * i]), b = _mm512_castps_pd(m[2 * i + 1]);
        m[i] = vf_max(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const VF all = vf_max(_mm512_shuffle_f32x4(m[0], m[1], 0x88), _mm512_shuffle_f32x4(m[0], m[1], 0xDD));
    const VF blocks = _mm512_shuffle_f32x4(all, all, 0xD8);
    return _mm512_mask_mov_epi32(vi_set1(0x7FFFFFFF), values, vi_of(blocks));
}

/* Blocks of 16-bit values, two to a vector: magnitudes order as integers, NaNs above infinity. */
SIMD VI amax_bits_16(const char *x, const char *next, nib_dtype dtype)
{
    const VI mask = _mm512_set1_epi16(0x7FFF);
    VI m[8];
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) m[k] =
        vi_and(_mm512_loadu_si512(k < 4 ? x + 64 * k : next + 64 * (k - 4)), mask);
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) m[i] =
        vw_max(_mm512_unpacklo_epi16(m[2 * i], m[2 * i + 1]), _mm512_unpackhi_epi16(m[2 * i], m[2 * i + 1]));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) m[i] =
        vw_max(_mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]), _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
    const VI both = vw_max(_mm512_unpacklo_epi64(m[0], m[1]), _mm512_unpackhi_epi64(m[0], m[1]));
    const VI all = vw_max(both, _mm512_shuffle_i32x4(both, both, 0xB1)); /* even blocks, then odd ones */
    if (dtype == NIB_BF16) {                                             /* the upper words of FP32 */
        const VI places = _mm512_setr_epi32(0x00000000, 0x00100000, 0x00010000, 0x00110000, 0x00020000, 0x00120000,
                                            0x00030000, 0x00130000, 0x00040000, 0x00140000, 0x00050000, 0x00150000,
                                            0x00060000, 0x00160000, 0x00070000, 0x00170000);
        return _mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, places, all);
    }
    const __m128i even = _mm512_castsi512_si128(all), odd = _mm512_extracti32x4_epi32(all, 2);
    return vi_of(_mm512_cvtph_ps(_mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd))));
}

SIMD VI amax_bits(const char *x, const char *next, nib_dtype dtype)
{
    return dtype == NIB_F32 ? amax_bits_f32(x, next) : amax_bits_16(x, next, dtype);
}

/* 64 times the code of y, less 2^15 if y is negative: the code is in bits 6 to 8 of a lane and the sign in bit 15 and all
 * above. As in e2m1_bits a sum rounds y, but the power of two in it is made from y's own; 32619 is there so that
 * 64 times the sum's lower half, as a signed integer, and its upper half once come to the code. It counts twice, which is
 * even, as ties want it. */
SIMD VI code_of(VF y)
{
    const VF larger = _mm512_range_ps(y, vf_set1(1.0f), 3); /* the larger magnitude, with y's sign */
    const VF power = vf_of(vi_and(vi_of(larger), vi_set1((int)0xFF800000u)));
    const VI sum = vi_of(vf_multiply_add(power, vf_set1(0x1p22f + 32619), y)); /* the product is exact */
    return _mm512_madd_epi16(sum, vi_set1(1 << 16 | 64));
}

/* The words of two vectors from code_of, as codes of four bits: 16 bits hold both. Pieces of 128 bits have four elements
 * of the first vector and then four of the second. */
SIMD VI pack_codes(VI first, VI second)
{
    const VI bytes = _mm512_srli_epi16(_mm512_packs_epi32(first, second), 6); /* the code, and 2 if it is negative */
    return _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(4 << 8 | 1));
}

/* Two vectors of words from code_of, packed: each word of one and that of the other, as two codes in its lower byte. */
SIMD VI join_codes(VI low, VI high)
{
    const VI both = vi_or(_mm512_srli_epi16(low, 6), _mm512_srli_epi16(high, 2)); /* signs in the upper byte */
    return _mm512_maddubs_epi16(both, _mm512_set1_epi16(4 << 8 | 1));
}

/* Four vectors of words that are codes, to bytes that hold two: in each piece of 128 bits four bytes of every vector. */
SIMD VI pair_codes(const VI words[4])
{
    const VI pair = _mm512_set1_epi16(16 << 8 | 1);
    const VI low = _mm512_maddubs_epi16(_mm512_packus_epi16(words[0], words[1]), pair);
    const VI high = _mm512_maddubs_epi16(_mm512_packus_epi16(words[2], words[3]), pair);
    return _mm512_packus_epi16(low, high);
}

/* Eight blocks, two to a vector as pack_codes leaves them. */
SIMD void store_blocks(uint8_t *out, const VI words[4])
{
    const VI order = _mm512_setr_epi32(0x00080000, 0x00180010, 0x00090001, 0x00190011, 0x000A0002, 0x001A0012,
                                       0x000B0003, 0x001B0013, 0x000C0004, 0x001C0014, 0x000D0005, 0x001D0015,
                                       0x000E0006, 0x001E0016, 0x000F0007, 0x001F0017);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, pair_codes(words)));
}

SIMD VF clamped(VF y, bool clamp)
{
    return clamp ? _mm512_range_ps(y, vf_set1(6.0f), 2) : y; /* the smaller magnitude, with y's sign */
}

/* BF16 lies two blocks to a vector. The even elements, shifted, and the odd ones, masked, are FP32, and their codes are
 * already in the lanes of the bytes that they share. */
SIMD VI code_pairs_bf16(const char *x, const float *factors, const uint8_t *scales, bool clamp)
{
    VI even[2], odd[2];
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    {
        const VI values = _mm512_loadu_si512(x + 64 * i);
        const VF f = _mm512_mask_mov_ps(vf_set1(factors[scales[2 * i]]), 0xFF00, vf_set1(factors[scales[2 * i + 1]]));
        const VF lower = vf_of(vi_sll(values, 16)), upper = vf_of(vi_and(values, vi_set1((int)0xFFFF0000u)));
        even[i] = code_of(clamped(vf_mul(lower, f), clamp));
        odd[i] = code_of(clamped(vf_mul(upper, f), clamp));
    }
    return join_codes(_mm512_packs_epi32(even[0], even[1]), _mm512_packs_epi32(odd[0], odd[1]));
}

SIMD void code_group_bf16(uint8_t *out, const char *x, const float *factors, const uint8_t *scales, bool clamp)
{
    const VI order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const VI bytes = _mm512_packus_epi16(code_pairs_bf16(x, factors, scales, clamp),
                                         code_pairs_bf16(x + 128, factors, scales + 4, clamp));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, bytes));
}

/* Eight blocks of 16 values to 64 bytes; `factors` has one for each scale. */
SIMD void code_group(uint8_t *out, const char *x, nib_dtype dtype, const float *factors, const uint8_t *scales,
                     bool clamp)
{
    if (dtype == NIB_BF16) {
        code_group_bf16(out, x, factors, scales, clamp);
        return;
    }
    VI words[4];
    _Pragma("GCC unroll 4") for (int p = 0; p < 4; p++)
    {
        const VF a = vf_mul(load_values(x, BLOCK * 2 * p, dtype), vf_set1(factors[scales[2 * p]]));
        const VF b = vf_mul(load_values(x, BLOCK * (2 * p + 1), dtype), vf_set1(factors[scales[2 * p + 1]]));
        words[p] = pack_codes(code_of(clamped(a, clamp)), code_of(clamped(b, clamp)));
    }
    store_blocks(out, words);
}

SIMD void code_group_randomly(uint8_t *out, const char *x, nib_dtype dtype, const float *factor, const uint8_t *random)
{
    VI words[4];
    _Pragma("GCC unroll 4") for (int p = 0; p < 4; p++)
    {
        VI codes[2];
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
        {
            const int b = 2 * p + i;
            const VF value = load_values(x, BLOCK * b, dtype);
            const VI r = _mm512_cvtepu8_epi32(_mm_load_si128((const void *)(random + BLOCK * b)));
            const VI code = stochastic_code(absolute(value), vf_set1(factor[b]), r);
            codes[i] = vi_merge(code, _mm512_rol_epi32(vi_of(value), 4), vi_set1(8)); /* the sign */
        }
        words[p] = _mm512_packs_epi32(codes[0], codes[1]);
    }
    store_blocks(out, words);
}

/* Half of sixteen blocks each, in an order in which they come out of store_random side by side. */
SIMD VI random_order(int half)
{
    return half ? _mm512_setr_epi32(8, 0, 12, 0, 9, 0, 13, 0, 10, 0, 14, 0, 11, 0, 15, 0)
                : _mm512_setr_epi32(0, 0, 4, 0, 1, 0, 5, 0, 2, 0, 6, 0, 3, 0, 7, 0);
}

SIMD void store_random(uint8_t *out, VI first, VI second)
{
    _mm512_store_si512(out, _mm512_unpacklo_epi64(first, second));
    _mm512_store_si512(out + 64, _mm512_unpackhi_epi64(first, second));
}

#define SWEEPS 1
#include "kernels/x86/rows.h"

/* ---- Columns (columns.h) ---- */

/* The largest magnitudes, without NaNs, which are noted beside them. Four, so that none waits long for another. */
struct column_amax {
    VF largest[4];
    __mmask16 ordered[4];
};

SIMD void column_amax_of(struct column_amax *amax, int i, VF a, VF b)
{
    const VF larger = larger_magnitude(a, b);
    amax->largest[i % 4] = i < 4 ? larger : larger_magnitude(amax->largest[i % 4], larger);
    amax->ordered[i % 4] =
        i < 4 ? _mm512_cmp_ps_mask(a, b, _CMP_ORD_Q) : _mm512_mask_cmp_ps_mask(amax->ordered[i % 4], a, b, _CMP_ORD_Q);
}

SIMD VI column_amax_bits(const struct column_amax *amax)
{
    const VF first = larger_magnitude(amax->largest[0], amax->largest[1]);
    const VF second = larger_magnitude(amax->largest[2], amax->largest[3]);
    const __mmask16 ordered = amax->ordered[0] & amax->ordered[1] & amax->ordered[2] & amax->ordered[3];
    return _mm512_mask_mov_epi32(vi_set1(0x7FFFFFFF), ordered, vi_of(larger_magnitude(first, second)));
}

SIMD VI column_larger_words(VI a, VI b) { return _mm512_max_epi16(a, b); }

/* round_to_bf16 without a shift. */
SIMD VF column_bf16(VF x)
{
    const VI bits = vi_of(x), up = vi_add(bits, vi_set1(0x7FFF));
    const __mmask16 odd = _mm512_test_epi32_mask(bits, vi_set1(0x10000));
    return vf_of(vi_and(_mm512_mask_add_epi32(up, odd, up, vi_set1(1)), vi_set1((int)0xFFFF0000u)));
}

/* A tile of 16x16 is a vector, or, of BF16, half of the even columns and half of the odd ones. */
SIMD void largest_of_squares(VI *amax, nib_dtype dtype)
{
    if (dtype != NIB_BF16) {
        amax[0] = vi_largest_everywhere(amax[0]);
        return;
    }
    VI m = vi_max(amax[0], amax[1]);
    m = vi_max(m, _mm512_shuffle_i32x4(m, m, 0xB1));
    m = vi_max(m, _mm512_shuffle_epi32(m, 0x4E));
    amax[0] = amax[1] = vi_max(m, _mm512_shuffle_epi32(m, 0xB1));
}

/* Row i times the factor; of words, the even or odd ones. */
SIMD VF column_row(float (*x)[VL], int i, bool words, int odd, VF factor)
{
    const VI v = vi_of(vf_load(x[i]));
    return vf_mul(vf_of(!words ? v : odd ? vi_and(v, vi_set1((int)0xFFFF0000u)) : vi_sll(v, 16)), factor);
}

/* Codes of rows i and i + 1, and of those eight below: in each 128-bit piece words for four columns, twice. */
SIMD VI column_pairs(float (*x)[VL], int i, bool words, int odd, VF factor)
{
    const VI first = _mm512_packs_epi32(code_of(column_row(x, i, words, odd, factor)),
                                        code_of(column_row(x, i + 8, words, odd, factor)));
    const VI second = _mm512_packs_epi32(code_of(column_row(x, i + 1, words, odd, factor)),
                                         code_of(column_row(x, i + 9, words, odd, factor)));
    return join_codes(first, second);
}

/* Sixteen columns of sixteen rows, eight bytes for each in the order of lane_at. */
SIMD void column_codes(uint8_t *out, float (*x)[VL], bool words, int odd, VF factor)
{
    const VI order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15));
    const VI first =
        _mm512_packus_epi16(column_pairs(x, 0, words, odd, factor), column_pairs(x, 2, words, odd, factor));
    const VI second =
        _mm512_packus_epi16(column_pairs(x, 4, words, odd, factor), column_pairs(x, 6, words, odd, factor));
    const VI a = _mm512_shuffle_epi8(first, order), b = _mm512_shuffle_epi8(second, order);
    _mm512_store_si512(out, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(out + 64, _mm512_unpackhi_epi16(a, b));
}

/* Eight vectors of eight times eight bytes, transposed. */
SIMD void transpose_codes(const uint8_t *in, size_t stride, VI out[8])
{
    VI a[8], b[8];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
    {
        const uint8_t *const from = in + (size_t)(i % 4) * stride + i / 4 * 32;
        a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256((const void *)from)),
                                  _mm256_load_si256((const void *)(from + 4 * stride)), 1);
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i += 4)
    {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 1]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 2], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 2], a[i + 3]);
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i += 4) _Pragma("GCC unroll 2") for (int k = 0; k < 2; k++)
    {
        /* pieces of b[i+k]: blocks 01 of two lines, blocks 45; of b[i+k+2]: 23 and 67 */
        out[i + k] = _mm512_permutex2var_epi64(b[i + k], _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), b[i + k + 2]);
        out[i + k + 2] =
            _mm512_permutex2var_epi64(b[i + k], _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), b[i + k + 2]);
    }
}

SIMD void store_whole(uint8_t *out, VI v) { _mm512_storeu_si512(out, v); }

#include "kernels/x86/columns.h"

/* ---- Back ---- */

SIMD void store_half_vector(void *p, __m256i v, bool stream)
{
    if (stream)
        _mm256_stream_si256(p, v);
    else
        _mm256_storeu_si256(p, v);
}

SIMD void store_vector(void *p, VI v, bool stream)
{
    if (stream)
        _mm512_stream_si512(p, v);
    else
        _mm512_storeu_si512(p, v);
}

/* Blocks by a table of their values. The first half of the lanes has the first four bytes and the second the others,
 * each with its element's code in the lowest bits: no other bit of a place counts. */
SIMD void decode_four_wide(char *out, nib_dtype dtype, const uint8_t *codes, const float *factors, const uint8_t *which,
                           bool stream)
{
    const VF values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const VI shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++)
    {
        const VI first = _mm512_broadcastd_epi32(_mm_loadu_si32(codes + b * 8));
        const VI bytes = _mm512_mask_broadcastd_epi32(first, 0xFF00, _mm_loadu_si32(codes + b * 8 + 4));
        const VI at = _mm512_srlv_epi32(bytes, shifts);
        const VF y = _mm512_permutexvar_ps(at, vf_mul(values, vf_set1(factors[which[b]])));
        if (dtype == NIB_F32)
            store_vector(out + b * 64, vi_of(y), stream);
        else if (dtype == NIB_BF16)
            store_half_vector(out + b * 32, _mm512_cvtepi32_epi16(vi_srl(vi_of(round_to_bf16(y)), 16)), stream);
        else
            store_half_vector(out + b * 32, _mm512_cvtps_ph(y, 0), stream);
    }
}

/* The 16 values of each of two blocks, from the roundings of their factors (lower half) and of 1.5 times them. */
SIMD VI bf16_values(const float *roundings)
{
    const VI steps = _mm512_broadcast_i64x4(_mm256_setr_epi16(0, -0x80, 0, 0, 0x80, 0x80, 0x100, 0x100, (short)0x8000,
                                                              0x7F80, (short)0x8000, (short)0x8000, (short)0x8080,
                                                              (short)0x8080, (short)0x8100, (short)0x8100));
    const __m256i places = _mm256_setr_epi16(0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1);
    const VI which =
        _mm512_inserti64x4(_mm512_castsi256_si512(places), _mm256_add_epi16(places, _mm256_set1_epi16(2)), 1);
    const VI two = _mm512_castsi128_si512(_mm_loadl_epi64((const void *)roundings));
    return _mm512_add_epi16(_mm512_maskz_permutexvar_epi16(0xFEFEFEFEu, which, two), steps);
}

/* Two blocks, by a table of the values of both. A word of codes stands in four lanes, shifted to each of its codes. */
SIMD void decode_two(char *out, const uint8_t *codes, VI table, bool stream)
{
    const VI spread = _mm512_setr_epi32(0x01000100, 0x01000100, 0x03020302, 0x03020302, 0x05040504, 0x05040504,
                                        0x07060706, 0x07060706, 0x09080908, 0x09080908, 0x0B0A0B0A, 0x0B0A0B0A,
                                        0x0D0C0D0C, 0x0D0C0D0C, 0x0F0E0F0E, 0x0F0E0F0E);
    const VI shifts = _mm512_set1_epi64(0x000C000800040000);
    const VI second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const VI bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)codes));
    const VI at = _mm512_srlv_epi16(_mm512_shuffle_epi8(bytes, spread), shifts);
    const VI place = _mm512_ternarylogic_epi32(at, second, _mm512_set1_epi16(15), 0xEC); /* (a & c) | b */
    store_vector(out, _mm512_permutexvar_epi16(place, table), stream);
}

SIMD void decode_four_bf16(char *out, const uint8_t *codes, const float *roundings, bool stream)
{
    decode_two(out, codes, bf16_values(roundings), stream);
    decode_two(out + 64, codes + 16, bf16_values(roundings + 2), stream);
}

SIMD void make_bf16_values(uint16_t *values, const float *roundings, int n)
{
    for (int code = 0; code < n; code += 2)
        _mm512_store_si512(values + code * BLOCK, bf16_values(roundings + code));
}

/* By tables of the values of all scales. */
SIMD void decode_four_known(char *out, const uint8_t *codes, const uint16_t *values, const uint8_t *scales, bool stream)
{
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    {
        const __m256i first = _mm256_load_si256((const void *)(values + scales[2 * i] * BLOCK));
        const __m256i second = _mm256_load_si256((const void *)(values + scales[2 * i + 1] * BLOCK));
        decode_two(out + 64 * i, codes + 16 * i, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), stream);
    }
}

/* Whether 64 scales are all between `least` and 126. */
SIMD bool scales_within(const uint8_t *scales, uint8_t least)
{
    const VI above = _mm512_sub_epi8(_mm512_loadu_si512(scales), _mm512_set1_epi8((char)least));
    return _mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8((char)(126 - least))) == 0;
}

#include "kernels/x86/slots.h"
#include "kernels/x86/steps_avx512.h"

#include "kernels/simd_transpose.h"

#include "kernels/simd_generic.h"

const struct nib_kernels nib_kernels_avx512 = {
    .absmax = { [NIB_F32] = absmax_f32, [NIB_BF16] = absmax_bf16, [NIB_F16] = absmax_f16 },
    .absmax_lines = { [NIB_GENERIC_FORMAT] = absmax_lines },
    .quantize = { [NIB_NVFP4] = quantize_nvfp4, NIB_QUANTIZE_GENERIC },
    .quantize_both = { [NIB_NVFP4] = quantize_both_nvfp4 },
    .decode = { [NIB_NVFP4] = decode_nvfp4, NIB_DECODE_GENERIC },
    .inverse_rht = { NIB_INVERSE_RHT_ALL },
    .transpose = { NIB_TRANSPOSE_ALL },
};

#else
typedef int nib_no_avx512; /* a translation unit may not be empty */
#endif
