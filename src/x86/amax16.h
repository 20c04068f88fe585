/* SPDX-License-Identifier: Apache-2.0 */
/*
 * amax16.h - the amaxes of blocks of 16-bit numbers, for every x86 instruction set: a vector of 256 bits is a block, and
 * magnitudes order as integers, NaNs above infinity.
 */

SIMD __m256i larger_16(__m256i a, __m256i b) { return _mm256_max_epi16(a, b); }

/* Of eight blocks from x on, as FP32. */
SIMD __m256 amax_16_of_eight(const char *x, nib_dtype dtype)
{
    const __m256i mask = _mm256_set1_epi16(0x7FFF);
    __m256i m[8];
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) m[k] =
        _mm256_and_si256(_mm256_loadu_si256((const void *)(x + 32 * k)), mask);
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) m[i] =
        larger_16(_mm256_unpacklo_epi16(m[2 * i], m[2 * i + 1]), _mm256_unpackhi_epi16(m[2 * i], m[2 * i + 1]));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) m[i] =
        larger_16(_mm256_unpacklo_epi32(m[2 * i], m[2 * i + 1]), _mm256_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
    const __m256i both = larger_16(_mm256_unpacklo_epi64(m[0], m[1]), _mm256_unpackhi_epi64(m[0], m[1]));
    const __m128i all = _mm_max_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    if (dtype == NIB_F16)
        return _mm256_cvtph_ps(all);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(all), 16));
}
