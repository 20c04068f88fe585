/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lanes_avx2.h - vectors of eight lanes: AVX2, FMA and F16C. Of the operations that simd.h lists, those that products
 * need too.
 */
#ifndef NIB_LANES_AVX2_H
#define NIB_LANES_AVX2_H

#include <immintrin.h>
#include <stdbool.h>

#include "format/codec.h"

#define SIMD __attribute__((target("avx2,fma,f16c"), always_inline)) static inline
#define SLOT __attribute__((target("avx2,fma,f16c"))) static

#define VL 8
#define SUMS_APART 1
typedef __m256 VF;
typedef __m256i VI;

/* ---- Operations ---- */

SIMD VF vf_load(const float *p) { return _mm256_loadu_ps(p); }
SIMD void vf_store(float *p, VF v) { _mm256_storeu_ps(p, v); }
SIMD VI vi_load(const int32_t *p) { return _mm256_loadu_si256((const void *)p); }

/* E4M3 is F16 with a smaller exponent: 2^-8 of the value, and more than 448 times that for what is a NaN or negative. */
SIMD VF vf_load_scaled_e4m3(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)p)), 7));
}

SIMD VF vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
SIMD VF vf_load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
SIMD void vf_store_f16(uint16_t *p, VF v) { _mm_storeu_si128((void *)p, _mm256_cvtps_ph(v, 0)); }
SIMD void vi_store_halves(uint16_t *p, VI v) /* of lanes whose upper halves are 0 */
{
    _mm_storeu_si128((void *)p, _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
SIMD VF vf_set1(float x) { return _mm256_set1_ps(x); }
SIMD VI vi_set1(int x) { return _mm256_set1_epi32(x); }
SIMD VI vi_of(VF v) { return _mm256_castps_si256(v); }
SIMD VF vf_of(VI v) { return _mm256_castsi256_ps(v); }
SIMD VF vf_add(VF a, VF b) { return _mm256_add_ps(a, b); }
SIMD VF vf_sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
SIMD VF vf_mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
SIMD VF vf_div(VF a, VF b) { return _mm256_div_ps(a, b); }
SIMD VF vf_min(VF a, VF b) { return _mm256_min_ps(a, b); }
SIMD VF vf_max(VF a, VF b) { return _mm256_max_ps(a, b); }
SIMD VF vf_from(VI v) { return _mm256_cvtepi32_ps(v); }
SIMD VI vi_truncate(VF v) { return _mm256_cvttps_epi32(v); }
SIMD VI vi_add(VI a, VI b) { return _mm256_add_epi32(a, b); }
SIMD VI vi_sub(VI a, VI b) { return _mm256_sub_epi32(a, b); }
SIMD VI vi_and(VI a, VI b) { return _mm256_and_si256(a, b); }
SIMD VI vi_andnot(VI a, VI b) { return _mm256_andnot_si256(a, b); }
SIMD VI vi_or(VI a, VI b) { return _mm256_or_si256(a, b); }
SIMD VI vi_xor(VI a, VI b) { return _mm256_xor_si256(a, b); }
SIMD VI vi_min(VI a, VI b) { return _mm256_min_epi32(a, b); }
SIMD VI vi_max(VI a, VI b) { return _mm256_max_epi32(a, b); }
SIMD VI vi_equal(VI a, VI b) { return _mm256_cmpeq_epi32(a, b); }
SIMD VI vi_lane_indices(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
#define vi_sll(v, n) _mm256_slli_epi32(v, n)
#define vi_srl(v, n) _mm256_srli_epi32(v, n)

/* x where a < b, y elsewhere and for NaNs. */
SIMD VI vi_select_less(VF a, VF b, VI x, VI y)
{
    return vi_of(_mm256_blendv_ps(vf_of(y), vf_of(x), _mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}

/* The 64-bit products of all lanes with one factor, in two halves. */
SIMD void vi_multiply_wide(VI a, uint32_t b, VI *high, VI *low)
{
    const VI factor = vi_set1((int)b), even = _mm256_mul_epu32(a, factor);
    const VI odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

/* Of the lower halves of 64-bit lanes. */
SIMD VI vi_multiply_even(VI a, VI b) { return _mm256_mul_epu32(a, b); }
SIMD VI vi_upper_halves(VI a) { return _mm256_srli_epi64(a, 32); }
SIMD VI vi_join_halves(VI low, VI high) { return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA); }
SIMD VI vi_xor3(VI a, VI b, VI c) { return vi_xor(a, vi_xor(b, c)); }
SIMD bool vi_any_greater(VI a, VI b) { return _mm256_movemask_epi8(_mm256_cmpgt_epi32(a, b)) != 0; }

SIMD bool vf_all_less(VF a, VF b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) == 0xFF; }
SIMD VF vf_multiply_add(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
SIMD VF vf_multiply_sub(VF a, VF b, VF c) { return _mm256_fmsub_ps(a, b, c); }

SIMD VI vi_largest_everywhere(VI v)
{
    v = vi_max(v, _mm256_permute2x128_si256(v, v, 1));
    v = vi_max(v, _mm256_shuffle_epi32(v, 0x4E));
    return vi_max(v, _mm256_shuffle_epi32(v, 0xB1));
}

SIMD void vf_transpose(VF v[8])
{
    VF t[8], u[8];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i += 2)
    {
        t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i += 4)
    {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 4; i++)
    {
        v[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

#endif
