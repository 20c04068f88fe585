/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_neon.c - four lanes: the Advanced SIMD that every AArch64 processor has.
 */
#if defined(__aarch64__)

#include "kernels/kernels.h"
#include "kernels/arm/lanes_neon.h"

/* a0 b0 a1 b1 ... as 32 bytes. */
SIMD void vi_store_pairs(uint8_t *p, VI a, VI b)
{
    vst1q_u8(p, vreinterpretq_u8_s32(vzip1q_s32(a, b)));
    vst1q_u8(p + 16, vreinterpretq_u8_s32(vzip2q_s32(a, b)));
}

SIMD void vi_store_low_bytes(uint8_t *p, VI v)
{
    const uint16x4_t halves = vmovn_u32(vreinterpretq_u32_s32(v));
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    memcpy(p, &bytes, sizeof bytes);
}

/* Adding a large enough value rounds a to its grid, and leaves the code in the low bits. It is p * 2^22, where p is
 * the power of two at or below max(a, 1), and as many units more as the code of p exceeds p / (p / 2): 2 log2 p. */
SIMD VI e2m1_bits(VF a)
{
    const VI p = vi_and(vi_of(vf_max(a, vf_set1(1.0f))), vi_set1(0x7F800000));
    return vi_of(vf_add(a, vf_of(vi_add(vi_add(p, vi_srl(p, 22)), vi_set1((22 << 23) - 254)))));
}

/* ---- Largest magnitude ---- */

static float absmax_f32(const void *x, int64_t n)
{
    const float *values = x;
    VF m[4] = { vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0) };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int k = 0; k < 4; k++)
            m[k] = vf_max(vabsq_f32(vf_load(values + i + 4 * k)), m[k]);
    float largest = vmaxvq_f32(vf_max(vf_max(m[0], m[1]), vf_max(m[2], m[3])));
    for (; i < n; i++) {
        const float a = nib_abs(values[i]);
        largest = a > largest ? a : largest;
    }
    return largest;
}

/* Magnitudes of 16-bit floats order as integers; those above infinity are NaNs and count as 0. */
SIMD uint16_t absmax_16(const uint16_t *values, int64_t n, uint16_t infinity)
{
    const uint16x8_t mask = vdupq_n_u16(0x7FFF), limit = vdupq_n_u16(infinity);
    uint16x8_t m[4] = { vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0) };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 4; k++) {
            const uint16x8_t a = vandq_u16(vld1q_u16(values + i + 8 * k), mask);
            m[k] = vmaxq_u16(m[k], vandq_u16(vcleq_u16(a, limit), a));
        }
    uint16_t largest = vmaxvq_u16(vmaxq_u16(vmaxq_u16(m[0], m[1]), vmaxq_u16(m[2], m[3])));
    for (; i < n; i++) {
        const uint16_t a = values[i] & 0x7FFF;
        largest = a <= infinity && a > largest ? a : largest;
    }
    return largest;
}

static float absmax_bf16(const void *x, int64_t n) { return nib_f32_from_bf16(absmax_16(x, n, 0x7F80)); }
static float absmax_f16(const void *x, int64_t n) { return nib_f32_from_f16(absmax_16(x, n, 0x7C00)); }

SIMD float absmax_row(const void *x, int64_t n, nib_dtype dtype)
{
    return dtype == NIB_F32 ? absmax_f32(x, n) : dtype == NIB_BF16 ? absmax_bf16(x, n) : absmax_f16(x, n);
}

#include "kernels/simd.h"
#include "kernels/simd_panels.h"

static void absmax_lines(const struct nib_panel *panel, const struct nib_coding *coding, float *out)
{
    absmax_lines_lanes(panel, coding, out);
}

/* ---- Back ---- */

enum { DECODE_STEP = VL }; /* blocks */

/* What the codes of four blocks are multiplied with. False where one is not finite: the reference then
 * knows best. */
SIMD bool decode_factors(const uint8_t *scales, float tensor_scale, const struct nib_rules *rules,
                         float out[DECODE_STEP])
{
    const int32_t codes[DECODE_STEP] = { scales[0], scales[1], scales[2], scales[3] };
    const VI code = vi_load(codes);
    const VF s = f32_of_e4m3(code), lv = vf_set1(tensor_scale);
    const VF f = rules->tensor_scale == NIB_TENSOR_SCALE_AMAX ? vf_mul(vf_mul(s, lv), vf_set1(1.0f / rules->full_scale))
                 : rules->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER ? vf_mul(s, lv)
                                                                      : vf_div(s, lv);
    vf_store(out, f);
    const uint32x4_t ordinary = vandq_u32(vcleq_s32(code, vi_set1(0x7E)), vcleq_f32(absolute(f), vf_set1(FLT_MAX)));
    return vminvq_u32(ordinary) != 0;
}

SIMD void store_four(char *out, nib_dtype dtype, VF v)
{
    if (dtype == NIB_F32)
        vst1q_u8((uint8_t *)out, vreinterpretq_u8_f32(v));
    else if (dtype == NIB_BF16)
        vst1_u8((uint8_t *)out, vreinterpret_u8_u16(vshrn_n_u32(vreinterpretq_u32_f32(round_to_bf16(v)), 16)));
    else
        vst1_u8((uint8_t *)out, vreinterpret_u8_f16(vcvt_f16_f32(v)));
}

/* E2M1 values are exact in BF16, the upper half of FP32: two tables give its two bytes. */
SIMD void decode_block(char *out, nib_dtype dtype, const uint8_t *codes, float factor)
{
    static const uint8_t high_bytes[16] = { 0,    0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                            0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0 };
    static const uint8_t low_bytes[16] = {
        0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0, 0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0
    };
    const uint8x8_t bytes = vld1_u8(codes);
    const uint8x8x2_t spread = vzip_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4));
    const uint8x16_t index = vcombine_u8(spread.val[0], spread.val[1]);
    const uint8x16_t high = vqtbl1q_u8(vld1q_u8(high_bytes), index), low = vqtbl1q_u8(vld1q_u8(low_bytes), index);
    const uint16x8_t halves[2] = { vreinterpretq_u16_u8(vzip1q_u8(low, high)),
                                   vreinterpretq_u16_u8(vzip2q_u8(low, high)) };
    const int size = dtype == NIB_F32 ? 4 : 2;
    UNROLL
    for (int i = 0; i < 2; i++) {
        const VF first = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves[i]), 16));
        const VF second = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(halves[i]), 16));
        store_four(out + 8 * i * size, dtype, vmulq_n_f32(first, factor));
        store_four(out + (8 * i + 4) * size, dtype, vmulq_n_f32(second, factor));
    }
}

/* Groups of DECODE_STEP blocks; what is left, and factors that are not finite, by the reference. */
SIMD void decode_as(char *y, nib_dtype dtype, const uint8_t *codes, const uint8_t *scales, int64_t n,
                    float tensor_scale, const struct nib_coding *coding)
{
    const int size = dtype == NIB_F32 ? 4 : 2;
    nib_decode_fn *const reference = nib_kernels_scalar.decode[NIB_NVFP4];
    int64_t i = 0;
    for (; i + DECODE_STEP * BLOCK <= n; i += DECODE_STEP * BLOCK) {
        float factor[DECODE_STEP];
        if (!decode_factors(scales + i / BLOCK, tensor_scale, &coding->rules, factor)) {
            reference(y + i * size, dtype, codes + i / 2, scales + i / BLOCK, DECODE_STEP * BLOCK, tensor_scale, coding,
                      false);
            continue;
        }
        for (int b = 0; b < DECODE_STEP; b++)
            decode_block(y + (i + b * BLOCK) * size, dtype, codes + i / 2 + b * 8, factor[b]);
    }
    if (i < n)
        reference(y + i * size, dtype, codes + i / 2, scales + i / BLOCK, n - i, tensor_scale, coding, false);
}

/* There is no store around the caches that would be worth it. */
static void decode_nvfp4(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                         float tensor_scale, const struct nib_coding *coding, bool stream)
{
    (void)stream;
    if (dtype == NIB_F32)
        decode_as(y, NIB_F32, codes, scales, n, tensor_scale, coding);
    else if (dtype == NIB_BF16)
        decode_as(y, NIB_BF16, codes, scales, n, tensor_scale, coding);
    else
        decode_as(y, NIB_F16, codes, scales, n, tensor_scale, coding);
}

#include "kernels/arm/steps_neon.h"

#include "kernels/simd_transpose.h"

#include "kernels/simd_generic.h"
#include "kernels/arm/rows.h"

const struct nib_kernels nib_kernels_neon = {
    .absmax = { [NIB_F32] = absmax_f32, [NIB_BF16] = absmax_bf16, [NIB_F16] = absmax_f16 },
    .absmax_lines = { [NIB_GENERIC_FORMAT] = absmax_lines },
    .quantize = { [NIB_NVFP4] = quantize_nvfp4, NIB_QUANTIZE_GENERIC },
    .decode = { [NIB_NVFP4] = decode_nvfp4, NIB_DECODE_GENERIC },
    .inverse_rht = { NIB_INVERSE_RHT_ALL },
    .transpose = { NIB_TRANSPOSE_ALL },
};

#else
typedef int nib_no_neon; /* a translation unit may not be empty */
#endif
