/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_avx2.c - products in eight lanes: sums of 16-bit pairs, which 4 * 2 * 24 * 128 does not leave.
 */
#if defined(__x86_64__)

#include "kernels/x86/lanes_avx2.h"

#define PRODUCT(name) name##_avx2
#define PRODUCT_SIMD SIMD
#define PRODUCT_SLOT SLOT
#define PRODUCT_DOT VI
enum { PRODUCT_ROWS = 4, PRODUCT_VECTORS = 1 };

SIMD VI weights_avx2(VI codes)
{
    const VI values = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16,
                                       18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(values, vi_and(codes, _mm256_set1_epi8(15)));
}

SIMD VI dot_start_avx2(VI correction)
{
    (void)correction;
    return _mm256_setzero_si256();
}
SIMD VI dot_step_avx2(VI dot, VI weights, VI x) { return _mm256_add_epi16(dot, _mm256_maddubs_epi16(weights, x)); }
SIMD VI dot_end_avx2(VI dot, VI correction) { return vi_add(_mm256_madd_epi16(dot, _mm256_set1_epi16(1)), correction); }

SIMD VI vi_pair_sums(VI a, VI b) { return _mm256_hadd_epi32(a, b); }
SIMD VI vi_even_words(VI a, VI b) { return vi_of(_mm256_shuffle_ps(vf_of(a), vf_of(b), 0x88)); }
SIMD VI vi_odd_words(VI a, VI b) { return vi_of(_mm256_shuffle_ps(vf_of(a), vf_of(b), 0xDD)); }

SIMD void vi_transpose_quarters(VI v[2])
{
    const VI first = _mm256_permute2x128_si256(v[0], v[1], 0x20);
    v[1] = _mm256_permute2x128_si256(v[0], v[1], 0x31);
    v[0] = first;
}

SIMD int32_t four_bytes(const uint8_t *p)
{
    int32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* E4M3 as F16: a word is four blocks of a column. */
SIMD bool row_scales_avx2(const uint8_t *s, int64_t stride, VF out[4])
{
    const VI words = _mm256_setr_epi32(
        four_bytes(s), four_bytes(s + stride), four_bytes(s + 2 * stride), four_bytes(s + 3 * stride),
        four_bytes(s + 4 * stride), four_bytes(s + 5 * stride), four_bytes(s + 6 * stride), four_bytes(s + 7 * stride));
    const VI most = _mm256_set1_epi8(0x7E);
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(words, most), most)) != -1)
        return false;
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++)
    {
        const VI half = vi_sll(vi_and(vi_srl(words, 8 * b), vi_set1(0x7F)), 7);
        out[b] = _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
    }
    return true;
}

#include "kernels/simd_product.h"

const struct nib_kernels nib_products_avx2 = { PRODUCT_SLOTS };

#else
typedef int nib_no_products_avx2; /* a translation unit may not be empty */
#endif
