/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steps_neon.h - what simd_transpose.h and simd_generic.h want of NEON.
 */

/* ---- Bytes in pieces of 16 ---- */

#define VB_PIECES 1
typedef uint8x16_t VB;

SIMD VB vb_load(const uint8_t *p) { return vld1q_u8(p); }
SIMD VB vb_set1(char byte) { return vdupq_n_u8((uint8_t)byte); }
SIMD VB vb_and(VB a, VB b) { return vandq_u8(a, b); }
SIMD VB vb_or(VB a, VB b) { return vorrq_u8(a, b); }
SIMD VB vb_nibble_up(VB a) { return vshlq_n_u8(a, 4); }
SIMD VB vb_nibble_down(VB a) { return vshrq_n_u8(a, 4); }
SIMD VB vb_zip_low_8(VB a, VB b) { return vzip1q_u8(a, b); }
SIMD VB vb_zip_high_8(VB a, VB b) { return vzip2q_u8(a, b); }
SIMD VB vb_zip_low_16(VB a, VB b)
{
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
SIMD VB vb_zip_high_16(VB a, VB b)
{
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
SIMD VB vb_zip_low_32(VB a, VB b)
{
    return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
SIMD VB vb_zip_high_32(VB a, VB b)
{
    return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

SIMD void vb_store_pieces(uint8_t *p, int64_t apart, VB v)
{
    (void)apart;
    vst1q_u8(p, v);
}

/* ---- Steps of 32 values ---- */

SIMD float vf_largest(VF v) { return vmaxvq_f32(v); }

SIMD VI vi_is_nan(VF v) { return vreinterpretq_s32_u32(vmvnq_u32(vceqq_f32(v, v))); }

SIMD VF vf_quiet(VF v) { return vbslq_f32(vceqq_f32(v, v), v, vf_of(vi_set1(0x7FC00000))); }

SIMD uint8x16_t bytes_of_four(const VI code[4])
{
    const uint16x8_t first = vuzp1q_u16(vreinterpretq_u16_s32(code[0]), vreinterpretq_u16_s32(code[1]));
    const uint16x8_t second = vuzp1q_u16(vreinterpretq_u16_s32(code[2]), vreinterpretq_u16_s32(code[3]));
    return vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
}

SIMD void store_step_codes(uint8_t *p, const VI code[8])
{
    vst1q_u8(p, bytes_of_four(code));
    vst1q_u8(p + 16, bytes_of_four(code + 4));
}

SIMD void store_step_nibbles(uint8_t *p, const VI code[8])
{
    const uint8x16_t a = bytes_of_four(code), b = bytes_of_four(code + 4);
    vst1q_u8(p, vsliq_n_u8(vuzp1q_u8(a, b), vuzp2q_u8(a, b), 4));
}

/* E2M1 values are exact in BF16, the upper half of FP32: two tables give its two bytes. */
SIMD void load_step_e2m1(const uint8_t *p, VF v[8])
{
    static const uint8_t high_bytes[16] = { 0,    0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                            0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0 };
    static const uint8_t low_bytes[16] = {
        0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0, 0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0
    };
    const uint8x16_t bytes = vld1q_u8(p), even = vandq_u8(bytes, vdupq_n_u8(15)), odd = vshrq_n_u8(bytes, 4);
    const uint8x16_t spread[2] = { vzip1q_u8(even, odd), vzip2q_u8(even, odd) };
    UNROLL
    for (int i = 0; i < 2; i++) {
        const uint8x16_t h = vqtbl1q_u8(vld1q_u8(high_bytes), spread[i]),
                         l = vqtbl1q_u8(vld1q_u8(low_bytes), spread[i]);
        const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(l, h)), b = vreinterpretq_u16_u8(vzip2q_u8(l, h));
        v[4 * i] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(a), 16));
        v[4 * i + 1] = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(a), 16));
        v[4 * i + 2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16));
        v[4 * i + 3] = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(b), 16));
    }
}

/* Shifted by 7 a byte has its sign twice, and once where an exponent's highest bit would be. */
SIMD void load_step_halves(const uint8_t *p, VF v[8], bool e5m2)
{
    UNROLL
    for (int i = 0; i < 4; i++) {
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p + 8 * i)));
        const int16x8_t halves =
            e5m2 ? vshlq_n_s16(wide, 8) : vandq_s16(vshlq_n_s16(wide, 7), vdupq_n_s16((int16_t)0xBF80));
        v[2 * i] = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(halves)));
        v[2 * i + 1] = vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(halves)));
    }
}

/* Looking costs here what it would save. */
SIMD bool step_has_nan(const VF v[8])
{
    (void)v;
    return true;
}

SIMD bool step_has_byte(const uint8_t *p, uint8_t least)
{
    const uint8x16_t mask = vdupq_n_u8(0x7F);
    return vmaxvq_u8(vmaxq_u8(vandq_u8(vld1q_u8(p), mask), vandq_u8(vld1q_u8(p + 16), mask))) >= least;
}

SIMD void store_step(char *p, nib_dtype dtype, const VF v[8], bool exact, bool stream)
{
    (void)exact, (void)stream; /* there is no store around the caches that would be worth it */
    UNROLL
    for (int i = 0; i < 8; i++)
        store_four(p + 4 * i * (dtype == NIB_F32 ? 4 : 2), dtype, v[i]);
}

SIMD void stores_are_seen(void) {}
