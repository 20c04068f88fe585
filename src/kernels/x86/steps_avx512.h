/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steps_avx512.h - what simd_transpose.h and simd_generic.h want of AVX-512.
 */

/* ---- Bytes in pieces of 16 ---- */

#define VB_PIECES 4
typedef __m512i VB;

SIMD VB vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
SIMD VB vb_set1(char byte) { return _mm512_set1_epi8(byte); }
SIMD VB vb_and(VB a, VB b) { return _mm512_and_si512(a, b); }
SIMD VB vb_or(VB a, VB b) { return _mm512_or_si512(a, b); }
SIMD VB vb_nibble_up(VB a) { return _mm512_slli_epi16(_mm512_and_si512(a, vb_set1(0x0F)), 4); }
SIMD VB vb_nibble_down(VB a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), vb_set1(0x0F)); }
SIMD VB vb_zip_low_8(VB a, VB b) { return _mm512_unpacklo_epi8(a, b); }
SIMD VB vb_zip_high_8(VB a, VB b) { return _mm512_unpackhi_epi8(a, b); }
SIMD VB vb_zip_low_16(VB a, VB b) { return _mm512_unpacklo_epi16(a, b); }
SIMD VB vb_zip_high_16(VB a, VB b) { return _mm512_unpackhi_epi16(a, b); }
SIMD VB vb_zip_low_32(VB a, VB b) { return _mm512_unpacklo_epi32(a, b); }
SIMD VB vb_zip_high_32(VB a, VB b) { return _mm512_unpackhi_epi32(a, b); }

SIMD void vb_store_pieces(uint8_t *p, int64_t apart, VB v)
{
    _mm_storeu_si128((void *)p, _mm512_castsi512_si128(v));
    _mm_storeu_si128((void *)(p + apart), _mm512_extracti32x4_epi32(v, 1));
    _mm_storeu_si128((void *)(p + 2 * apart), _mm512_extracti32x4_epi32(v, 2));
    _mm_storeu_si128((void *)(p + 3 * apart), _mm512_extracti32x4_epi32(v, 3));
}

/* ---- Steps of 32 values ---- */

SIMD float vf_largest(VF v) { return _mm512_reduce_max_ps(v); }

SIMD VI vi_is_nan(VF v) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q)); }

SIMD VF vf_quiet(VF v)
{
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), vf_of(vi_set1(0x7FC00000)));
}

SIMD __m256i step_bytes(const VI code[2])
{
    return _mm256_set_m128i(_mm512_cvtepi32_epi8(code[1]), _mm512_cvtepi32_epi8(code[0]));
}

SIMD void store_step_codes(uint8_t *p, const VI code[2]) { _mm256_storeu_si256((void *)p, step_bytes(code)); }

SIMD void store_step_nibbles(uint8_t *p, const VI code[2])
{
    const __m256i pairs = _mm256_maddubs_epi16(step_bytes(code), _mm256_set1_epi16(16 << 8 | 1));
    _mm_storeu_si128((void *)p, _mm256_cvtepi16_epi8(pairs));
}

SIMD void load_step_e2m1(const uint8_t *p, VF v[2])
{
    const VF values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m128i bytes = _mm_loadu_si128((const void *)p), nibble = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, nibble), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
    v[0] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd)), values);
    v[1] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpackhi_epi8(even, odd)), values);
}

/* Shifted by 7 a byte has its sign twice, and once where an exponent's highest bit would be. */
SIMD void load_step_halves(const uint8_t *p, VF v[2], bool e5m2)
{
    for (int i = 0; i < 2; i++) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(p + 16 * i)));
        v[i] = _mm512_cvtph_ps(e5m2 ? _mm256_slli_epi16(wide, 8)
                                    : _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBF80)));
    }
}

SIMD bool step_has_nan(const VF v[2]) { return _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q) != 0; }

SIMD bool step_has_byte(const uint8_t *p, uint8_t least)
{
    const __m256i bytes = _mm256_and_si256(_mm256_loadu_si256((const void *)p), _mm256_set1_epi8(0x7F));
    return _mm256_cmpgt_epi8_mask(bytes, _mm256_set1_epi8((char)(least - 1))) != 0;
}

/* The upper halves of rounded FP32, in the lower ones. */
SIMD VI bf16_halves(VF v, bool exact)
{
    const VI bits = vi_of(v), odd = vi_and(vi_srl(bits, 16), vi_set1(1));
    return vi_srl(exact ? bits : vi_add(bits, vi_add(odd, vi_set1(0x7FFF))), 16);
}

SIMD void store_step(char *p, nib_dtype dtype, const VF v[2], bool exact, bool stream)
{
    UNROLL
    for (int i = 0; i < 2; i++) {
        if (dtype == NIB_F32) {
            if (stream)
                _mm512_stream_ps((float *)(void *)(p + 64 * i), v[i]);
            else
                _mm512_storeu_ps(p + 64 * i, v[i]);
            continue;
        }
        const __m256i halves =
            dtype == NIB_BF16 ? _mm512_cvtepi32_epi16(bf16_halves(v[i], exact)) : _mm512_cvtps_ph(v[i], 0);
        if (stream)
            _mm256_stream_si256((void *)(p + 32 * i), halves);
        else
            _mm256_storeu_si256((void *)(p + 32 * i), halves);
    }
}

SIMD void stores_are_seen(void) { _mm_sfence(); }
