/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_avx512.c - sixteen lanes: AVX-512 F, BW, VL and DQ.
 */
#if defined(__x86_64__)

#include <immintrin.h>

#include "../codec.h"
#include "../kernels.h"

#define SIMD __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"), always_inline)) static inline
#define SLOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))) static

#define VL 16
typedef __m512 VF;
typedef __m512i VI;

/* ---- Operations ---- */

SIMD VF vf_load(const float *p) { return _mm512_loadu_ps(p); }
SIMD void vf_store(float *p, VF v) { _mm512_storeu_ps(p, v); }
SIMD VI vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
SIMD VF vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
SIMD VF vf_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
SIMD VF vf_set1(float x) { return _mm512_set1_ps(x); }
SIMD VI vi_set1(int x) { return _mm512_set1_epi32(x); }
SIMD VI vi_of(VF v) { return _mm512_castps_si512(v); }
SIMD VF vf_of(VI v) { return _mm512_castsi512_ps(v); }
SIMD VF vf_add(VF a, VF b) { return _mm512_add_ps(a, b); }
SIMD VF vf_sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
SIMD VF vf_mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
SIMD VF vf_div(VF a, VF b) { return _mm512_div_ps(a, b); }
SIMD VF vf_min(VF a, VF b) { return _mm512_min_ps(a, b); }
SIMD VF vf_max(VF a, VF b) { return _mm512_max_ps(a, b); }
SIMD VF vf_from(VI v) { return _mm512_cvtepi32_ps(v); }
SIMD VI vi_round(VF v) { return _mm512_cvtps_epi32(v); }
SIMD VI vi_truncate(VF v) { return _mm512_cvttps_epi32(v); }
SIMD VI vi_add(VI a, VI b) { return _mm512_add_epi32(a, b); }
SIMD VI vi_sub(VI a, VI b) { return _mm512_sub_epi32(a, b); }
SIMD VI vi_and(VI a, VI b) { return _mm512_and_si512(a, b); }
SIMD VI vi_andnot(VI a, VI b) { return _mm512_andnot_si512(a, b); }
SIMD VI vi_or(VI a, VI b) { return _mm512_or_si512(a, b); }
SIMD VI vi_xor(VI a, VI b) { return _mm512_xor_si512(a, b); }
SIMD VI vi_min(VI a, VI b) { return _mm512_min_epi32(a, b); }
SIMD VI vi_max(VI a, VI b) { return _mm512_max_epi32(a, b); }
SIMD VI vi_equal(VI a, VI b) { return _mm512_movm_epi32(_mm512_cmpeq_epi32_mask(a, b)); }
SIMD VI vi_lane_numbers(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
#define vi_sll(v, n) _mm512_slli_epi32(v, n)
#define vi_srl(v, n) _mm512_srli_epi32(v, n)

/* x where a < b, y elsewhere and for NaNs. */
SIMD VI vi_select_less(VF a, VF b, VI x, VI y)
{
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

/* The 64-bit products of all lanes with one number, in two halves. */
SIMD void vi_multiply_wide(VI a, uint32_t b, VI *high, VI *low)
{
    const VI factor = vi_set1((int)b), even = _mm512_mul_epu32(a, factor);
    const VI odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    *low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

/* 4x4 within 128-bit pieces, then the pieces. */
SIMD void vf_transpose(VF v[16])
{
    VF t[16], u[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2)
    {
        t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4)
    {
        u[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
        u[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 4; i++)
    {
        const VF a = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xDD);
        const VF c = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88),
                 d = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xDD);
        v[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        v[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(a, c, 0xDD);
        v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
    }
}

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

/* As in kernels_avx2.c: a number that rounds to the grid of a's range. */
SIMD VI e2m1_bits(VF a)
{
    const VF grids = _mm512_broadcast_f32x4(_mm_setr_ps(0x1p23f + 2, 0x1p24f + 8, 0, 0x1p22f));
    const VI exponent = vi_srl(vi_of(vf_max(a, vf_set1(1.0f))), 23);
    return vi_of(vf_add(a, _mm512_permutevar_ps(grids, exponent)));
}

/* ---- Largest magnitude ---- */

SLOT float absmax_f32(const void *x, int64_t n)
{
    const float *numbers = x;
    const VI mask = vi_set1(0x7FFFFFFF);
    VF m[4] = { vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0) };
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) /* a NaN gives the second operand, which is never one */
            m[k] = vf_max(vf_of(vi_and(vi_of(vf_load(numbers + i + 16 * k)), mask)), m[k]);
    float largest = _mm512_reduce_max_ps(vf_max(vf_max(m[0], m[1]), vf_max(m[2], m[3])));
    for (; i < n; i++) {
        const float a = nib_abs(numbers[i]);
        largest = a > largest ? a : largest;
    }
    return largest;
}

/* Magnitudes of 16-bit floats order as integers; those above infinity are NaNs and count as 0. */
SIMD uint16_t absmax_16(const uint16_t *numbers, int64_t n, int infinity)
{
    const VI mask = _mm512_set1_epi16(0x7FFF), limit = _mm512_set1_epi16((short)infinity);
    VI m[4] = { vi_set1(0), vi_set1(0), vi_set1(0), vi_set1(0) };
    int64_t i = 0;
    for (; i + 128 <= n; i += 128)
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)
        {
            const VI a = vi_and(_mm512_loadu_si512(numbers + i + 32 * k), mask);
            m[k] = _mm512_mask_max_epu16(m[k], _mm512_cmple_epu16_mask(a, limit), m[k], a);
        }
    uint16_t lanes[32], largest = 0;
    _mm512_storeu_si512(lanes, _mm512_max_epu16(_mm512_max_epu16(m[0], m[1]), _mm512_max_epu16(m[2], m[3])));
    for (int k = 0; k < 32; k++)
        largest = lanes[k] > largest ? lanes[k] : largest;
    for (; i < n; i++) {
        const uint16_t a = numbers[i] & 0x7FFF;
        largest = a <= infinity && a > largest ? a : largest;
    }
    return largest;
}

SLOT float absmax_bf16(const void *x, int64_t n) { return nib_f32_from_bf16(absmax_16(x, n, 0x7F80)); }
SLOT float absmax_f16(const void *x, int64_t n) { return nib_f32_from_f16(absmax_16(x, n, 0x7C00)); }

SIMD float absmax_row(const void *x, int64_t n, nib_dtype dtype)
{
    return dtype == NIB_F32 ? absmax_f32(x, n) : dtype == NIB_BF16 ? absmax_bf16(x, n) : absmax_f16(x, n);
}

#include "../simd.h"
#include "../simd_panels.h"

/* ---- Rows to nearest: as in kernels_avx2.c, with a vector per block ---- */

#define STRIP_STEP 16

/* The largest lane of each of sixteen vectors. */
SIMD VF largest_of_each(const VF m[16])
{
    VF pairs[8], quads[4], halves[2];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) pairs[i] =
        vf_max(_mm512_unpacklo_ps(m[2 * i], m[2 * i + 1]), _mm512_unpackhi_ps(m[2 * i], m[2 * i + 1]));
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) quads[i] =
        vf_max(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
               _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xEE));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) halves[i] =
        vf_max(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
               _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xDD));
    return vf_max(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

/* The amaxes of STRIP_STEP blocks from b on, of n in all: those that are not there are the last one again. Numbers that
 * are not FP32 are widened on the way. */
SIMD VF strip_absmax(const void *x, int b, int n, bool whole, nib_dtype dtype, float *widened)
{
    VF m[16];
    _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++)
    {
        const int at = (whole || b + k < n ? b + k : n - 1) * BLOCK;
        const VF v = load_numbers(x, at, dtype);
        if (dtype != NIB_F32)
            vf_store(widened + at, v);
        m[k] = vf_max(absolute(v), vf_set1(0)); /* NaNs give way */
    }
    return largest_of_each(m);
}

/* Four blocks of 16 numbers to 32 bytes. Packing works within 128-bit pieces: in the end every fourth pair of bytes is
 * one block's. */
SIMD void store_four_blocks(uint8_t *out, const float *x, const float *factor)
{
    VI codes[4];
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++)
    {
        const VF y = clamp_to_e2m1(vf_mul(vf_load(x + 16 * b), vf_set1(factor[b])));
        codes[b] = with_sign(e2m1_bits(absolute(y)), y);
    }
    const VI bytes =
        _mm512_packus_epi16(_mm512_packus_epi32(codes[0], codes[1]), _mm512_packus_epi32(codes[2], codes[3]));
    const __m256i packed = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(bytes, _mm512_set1_epi16(16 << 8 | 1)));
    const __m256i order = _mm256_setr_epi16(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm256_storeu_si256((void *)out, _mm256_permutexvar_epi16(order, packed));
}

/* ---- Back ---- */

#define DECODE_STEP 16

/* What the codes of sixteen blocks are multiplied with. False where one is not an ordinary number. */
SIMD bool decode_factors(const uint8_t *scales, float level, const struct nib_rules *rules, float *out)
{
    const VI code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)scales));
    const VF s = f32_of_e4m3(code), lv = vf_set1(level);
    const VF f = rules->level == NIB_LEVEL_AMAX     ? vf_mul(vf_mul(s, lv), vf_set1(1.0f / rules->full_scale))
                 : rules->level == NIB_LEVEL_DECODE ? vf_mul(s, lv)
                                                    : vf_div(s, lv);
    vf_store(out, f);
    return _mm512_cmpgt_epi32_mask(code, vi_set1(0x7E)) == 0 &&
           _mm512_cmp_ps_mask(absolute(f), vf_set1(FLT_MAX), _CMP_LE_OQ) == 0xFFFF;
}

SIMD void decode_block(char *out, nib_dtype dtype, const uint8_t *codes, float factor, bool stream)
{
    const VF values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m128i bytes = _mm_loadl_epi64((const void *)codes), nibble = _mm_set1_epi8(15);
    const __m128i spread =
        _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble), _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
    const VF y = vf_mul(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(spread), values), vf_set1(factor));
    if (dtype == NIB_F32) {
        if (stream)
            _mm512_stream_ps((float *)out, y);
        else
            _mm512_storeu_ps((float *)out, y);
        return;
    }
    const VI rounded = vi_add(vi_of(y), vi_add(vi_and(vi_srl(vi_of(y), 16), vi_set1(1)), vi_set1(0x7FFF)));
    const __m256i halves = dtype == NIB_BF16 ? _mm512_cvtepi32_epi16(vi_srl(rounded, 16)) : _mm512_cvtps_ph(y, 0);
    if (stream)
        _mm256_stream_si256((void *)out, halves);
    else
        _mm256_storeu_si256((void *)out, halves);
}

/* Every finite factor will do: the rounding above is the reference's. */
SIMD bool takes_factor(nib_dtype dtype, float factor)
{
    (void)dtype, (void)factor;
    return true;
}

SIMD void prepare_factors(float *factors, nib_dtype dtype) { (void)factors, (void)dtype; }

#include "rows.h"
#include "steps_avx512.h"

#include "../simd_transpose.h"

#include "../simd_any.h"

const struct nib_kernels nib_kernels_avx512 = {
    .absmax = { [NIB_F32] = absmax_f32, [NIB_BF16] = absmax_bf16, [NIB_F16] = absmax_f16 },
    .absmax_lines = { [NIB_ANY_FORMAT] = absmax_lines },
    .quantize = { [NIB_NVFP4] = quantize_nvfp4, NIB_QUANTIZE_ANY },
    .decode = { [NIB_NVFP4] = decode_nvfp4, NIB_DECODE_ANY },
    .inverse = { NIB_INVERSE_ALL },
    .transpose = { NIB_TRANSPOSE_ALL },
};

#else
typedef int nib_no_avx512; /* a translation unit may not be empty */
#endif
