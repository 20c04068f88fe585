/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lanes_avx512.h - vectors of sixteen lanes: AVX-512 F, BW, VL and DQ. Of the operations that simd.h lists, those that
 * products need too.
 */
#ifndef NIB_LANES_AVX512_H
#define NIB_LANES_AVX512_H

#include <immintrin.h>
#include <stdbool.h>

#include "format/codec.h"

#define SIMD __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"), always_inline)) static inline
#define SLOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))) static

#define VL 16
#define SUMS_APART 0
typedef __m512 VF;
typedef __m512i VI;

/* ---- Operations ---- */

SIMD VF vf_load(const float *p) { return _mm512_loadu_ps(p); }
SIMD void vf_store(float *p, VF v) { _mm512_storeu_ps(p, v); }
SIMD VI vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }

/* E4M3 is F16 with a smaller exponent: 2^-8 of the value, and more than 448 times that for what is a NaN or negative. */
SIMD VF vf_load_scaled_e4m3(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p)), 7));
}

SIMD VF vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
SIMD VF vf_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
SIMD void vf_store_f16(uint16_t *p, VF v) { _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(v, 0)); }
SIMD void vi_store_halves(uint16_t *p, VI v) { _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(v)); }
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
SIMD VI vi_lane_indices(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
#define vi_sll(v, n) _mm512_slli_epi32(v, n)
#define vi_srl(v, n) _mm512_srli_epi32(v, n)

/* x where a < b, y elsewhere and for NaNs. */
SIMD VI vi_select_less(VF a, VF b, VI x, VI y)
{
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

/* The 64-bit products of all lanes with one factor, in two halves. */
SIMD void vi_multiply_wide(VI a, uint32_t b, VI *high, VI *low)
{
    const VI factor = vi_set1((int)b), even = _mm512_mul_epu32(a, factor);
    const VI odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    *low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

/* Of the lower halves of 64-bit lanes. */
SIMD VI vi_multiply_even(VI a, VI b) { return _mm512_mul_epu32(a, b); }
SIMD VI vi_upper_halves(VI a) { return _mm512_srli_epi64(a, 32); }
SIMD VI vi_join_halves(VI low, VI high) { return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(high, 32)); }
SIMD VI vi_xor3(VI a, VI b, VI c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
SIMD bool vi_any_greater(VI a, VI b) { return _mm512_cmpgt_epi32_mask(a, b) != 0; }
SIMD float largest_lane(VF m) { return _mm512_reduce_max_ps(m); }

SIMD bool vf_all_less(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) == 0xFFFF; }
SIMD VF vf_multiply_add(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
SIMD VF vf_multiply_sub(VF a, VF b, VF c) { return _mm512_fmsub_ps(a, b, c); }
SIMD VI vi_largest_everywhere(VI v) { return vi_set1(_mm512_reduce_max_epi32(v)); }

/* Bits of b where those of mask are set, of a elsewhere. */
SIMD VI vi_merge(VI a, VI b, VI mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xD8); }

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

#endif
