/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steps_avx2.h - what simd_transpose.h and simd_generic.h want of AVX2.
 */

/* ---- Bytes in pieces of 16 ---- */

#define VB_PIECES 2
typedef __m256i VB;

SIMD VB vb_load(const uint8_t *p) { return _mm256_loadu_si256((const void *)p); }
SIMD VB vb_set1(char byte) { return _mm256_set1_epi8(byte); }
SIMD VB vb_and(VB a, VB b) { return _mm256_and_si256(a, b); }
SIMD VB vb_or(VB a, VB b) { return _mm256_or_si256(a, b); }
SIMD VB vb_nibble_up(VB a) { return _mm256_slli_epi16(_mm256_and_si256(a, vb_set1(0x0F)), 4); }
SIMD VB vb_nibble_down(VB a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), vb_set1(0x0F)); }
SIMD VB vb_zip_low_8(VB a, VB b) { return _mm256_unpacklo_epi8(a, b); }
SIMD VB vb_zip_high_8(VB a, VB b) { return _mm256_unpackhi_epi8(a, b); }
SIMD VB vb_zip_low_16(VB a, VB b) { return _mm256_unpacklo_epi16(a, b); }
SIMD VB vb_zip_high_16(VB a, VB b) { return _mm256_unpackhi_epi16(a, b); }
SIMD VB vb_zip_low_32(VB a, VB b) { return _mm256_unpacklo_epi32(a, b); }
SIMD VB vb_zip_high_32(VB a, VB b) { return _mm256_unpackhi_epi32(a, b); }

SIMD void vb_store_pieces(uint8_t *p, int64_t apart, VB v)
{
    _mm_storeu_si128((void *)p, _mm256_castsi256_si128(v));
    _mm_storeu_si128((void *)(p + apart), _mm256_extracti128_si256(v, 1));
}

/* ---- Steps of 32 values ---- */

SIMD float vf_largest(VF v) { return largest_lane(v); }

SIMD VI vi_is_nan(VF v) { return vi_of(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)); }

SIMD VF vf_quiet(VF v) { return _mm256_blendv_ps(v, vf_of(vi_set1(0x7FC00000)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q)); }

/* Packing works within 128-bit halves: in the end they are woven together. */
SIMD __m256i step_bytes(const VI code[4])
{
    const VI bytes = _mm256_packus_epi16(_mm256_packus_epi32(code[0], code[1]), _mm256_packus_epi32(code[2], code[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

SIMD void store_step_codes(uint8_t *p, const VI code[4]) { _mm256_storeu_si256((void *)p, step_bytes(code)); }

SIMD void store_step_nibbles(uint8_t *p, const VI code[4])
{
    const __m256i pairs = _mm256_maddubs_epi16(step_bytes(code), _mm256_set1_epi16(16 << 8 | 1));
    const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
    _mm_storeu_si128((void *)p, _mm_packus_epi16(low, high));
}

/* E2M1 values are exact in BF16, the upper half of FP32: two tables give its two bytes. */
SIMD void load_step_e2m1(const uint8_t *p, VF v[4])
{
    const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                                                   (char)0x80, (char)0xBF, (char)0xBF, (char)0xBF,
                                                                   (char)0xC0, (char)0xC0, (char)0xC0, (char)0xC0));
    const __m256i low =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0, 0, 0,
                                                  (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0));
    const __m128i bytes = _mm_loadu_si128((const void *)p), nibble = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, nibble), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
    const __m256i spread = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
    const __m256i h = _mm256_shuffle_epi8(high, spread), l = _mm256_shuffle_epi8(low, spread);
    const __m256i first = _mm256_unpacklo_epi8(l, h), second = _mm256_unpackhi_epi8(l, h);
    v[0] = vf_of(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(first)), 16));
    v[1] = vf_of(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(second)), 16));
    v[2] = vf_of(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(first, 1)), 16));
    v[3] = vf_of(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(second, 1)), 16));
}

/* Shifted by 7 a byte has its sign twice, and once where an exponent's highest bit would be. */
SIMD void load_step_halves(const uint8_t *p, VF v[4], bool e5m2)
{
    for (int i = 0; i < 2; i++) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(p + 16 * i)));
        const __m256i halves = e5m2 ? _mm256_slli_epi16(wide, 8)
                                    : _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBF80));
        v[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        v[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
}

SIMD bool step_has_nan(const VF v[4])
{
    const VF first = _mm256_cmp_ps(v[0], v[1], _CMP_UNORD_Q), second = _mm256_cmp_ps(v[2], v[3], _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(first, second)) != 0;
}

SIMD bool step_has_byte(const uint8_t *p, uint8_t least)
{
    const __m256i bytes = _mm256_and_si256(_mm256_loadu_si256((const void *)p), _mm256_set1_epi8(0x7F));
    return _mm256_movemask_epi8(_mm256_cmpgt_epi8(bytes, _mm256_set1_epi8((char)(least - 1)))) != 0;
}

/* The upper halves of rounded FP32, in the lower ones. */
SIMD VI bf16_halves(VF v, bool exact)
{
    const VI bits = vi_of(v), odd = vi_and(vi_srl(bits, 16), vi_set1(1));
    return vi_srl(exact ? bits : vi_add(bits, vi_add(odd, vi_set1(0x7FFF))), 16);
}

SIMD void store_step(char *p, nib_dtype dtype, const VF v[4], bool exact, bool stream)
{
    if (dtype == NIB_F32) {
        UNROLL
        for (int i = 0; i < 4; i++)
            store_vector(p + 32 * i, vi_of(v[i]), stream);
        return;
    }
    UNROLL
    for (int i = 0; i < 4; i += 2) {
        const __m256i halves =
            dtype == NIB_BF16 ? _mm256_permute4x64_epi64(
                                    _mm256_packus_epi32(bf16_halves(v[i], exact), bf16_halves(v[i + 1], exact)), 0xD8)
                              : _mm256_set_m128i(_mm256_cvtps_ph(v[i + 1], 0), _mm256_cvtps_ph(v[i], 0));
        store_vector(p + 16 * i, halves, stream);
    }
}

SIMD void stores_are_seen(void) { _mm_sfence(); }
