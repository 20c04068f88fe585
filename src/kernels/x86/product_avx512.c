/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_avx512.c - products in sixteen lanes, by AVX-512's dot products and permutations of bytes; and in tiles.
 */
#if defined(__x86_64__)

#include "kernels/x86/lanes_avx512.h"

#define PRODUCT(name) name##_vnni
#define VNNI_TARGET target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,fma,f16c")
#define PRODUCT_SIMD __attribute__((VNNI_TARGET, always_inline)) static inline
#define PRODUCT_SLOT __attribute__((VNNI_TARGET)) static
#define PRODUCT_DOT VI
enum { PRODUCT_ROWS = 8, PRODUCT_VECTORS = 2 };

/* The permutation looks at six bits of each byte: the table is there four times, so that the upper two do not matter. */
PRODUCT_SIMD VI weights_vnni(VI codes)
{
    const VI values = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm512_permutexvar_epi8(codes, values);
}

PRODUCT_SIMD VI dot_start_vnni(VI correction) { return correction; }
PRODUCT_SIMD VI dot_step_vnni(VI dot, VI weights, VI x) { return _mm512_dpbusd_epi32(dot, weights, x); }
PRODUCT_SIMD VI dot_end_vnni(VI dot, VI correction)
{
    (void)correction;
    return dot;
}

SIMD VI vi_even_words(VI a, VI b) { return vi_of(_mm512_shuffle_ps(vf_of(a), vf_of(b), 0x88)); }
SIMD VI vi_odd_words(VI a, VI b) { return vi_of(_mm512_shuffle_ps(vf_of(a), vf_of(b), 0xDD)); }
SIMD VI vi_pair_sums(VI a, VI b) { return vi_add(vi_even_words(a, b), vi_odd_words(a, b)); }

SIMD void vi_transpose_quarters(VI v[4])
{
    const VI a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
    const VI c = _mm512_shuffle_i32x4(v[0], v[1], 0xEE), d = _mm512_shuffle_i32x4(v[2], v[3], 0xEE);
    v[0] = _mm512_shuffle_i32x4(a, b, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, b, 0xDD);
    v[2] = _mm512_shuffle_i32x4(c, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(c, d, 0xDD);
}

/* The scales of eight blocks of sixteen columns: eight bytes of each column, then sixteen of each block, four blocks in a
 * vector. */
PRODUCT_SIMD void load_scale_bytes_vnni(const uint8_t *s, int64_t stride, VI out[2])
{
    VI low = _mm512_setzero_si512(), high = low;
    const VI spread = _mm512_setr_epi64(0x3830282018100800, 0x7870686058504840, 0x3931292119110901, 0x7971696159514941,
                                        0x3A322A221A120A02, 0x7A726A625A524A42, 0x3B332B231B130B03, 0x7B736B635B534B43);
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
    {
        long long words[2];
        memcpy(&words[0], s + i * stride, 8);
        memcpy(&words[1], s + (i + 8) * stride, 8);
        low = _mm512_mask_set1_epi64(low, (__mmask8)(1 << i), words[0]);
        high = _mm512_mask_set1_epi64(high, (__mmask8)(1 << i), words[1]);
    }
    out[0] = _mm512_permutex2var_epi8(low, spread, high);
    out[1] = _mm512_permutex2var_epi8(low, _mm512_add_epi8(spread, _mm512_set1_epi8(4)), high);
}

PRODUCT_SIMD bool row_scales_vnni(const uint8_t *s, int64_t stride, VF out[8])
{
    VI bytes[2];
    load_scale_bytes_vnni(s, stride, bytes);
    if (_mm512_cmpgt_epu8_mask(_mm512_max_epu8(bytes[0], bytes[1]), _mm512_set1_epi8(0x7E)))
        return false;
#define HALVES(v, i) _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm512_extracti32x4_epi32(v, i)), 7))
    out[0] = HALVES(bytes[0], 0), out[1] = HALVES(bytes[0], 1), out[2] = HALVES(bytes[0], 2);
    out[3] = HALVES(bytes[0], 3), out[4] = HALVES(bytes[1], 0), out[5] = HALVES(bytes[1], 1);
    out[6] = HALVES(bytes[1], 2), out[7] = HALVES(bytes[1], 3);
#undef HALVES
    return true;
}

#include "kernels/simd_product.h"

const struct nib_kernels nib_products_avx512 = { PRODUCT_SLOTS };

/* Tiles need an instruction of AVX-512's F16, which all processors with tiles have, but not every compiler's assembler. */
#if __has_include(<avx512fp16intrin.h>)
#include "kernels/x86/product_amx.h"
#else
const struct nib_kernels nib_products_amx = { .multiply = { NULL } };
#endif

#else
typedef int nib_no_products_avx512; /* a translation unit may not be empty */
#endif
