/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lanes_neon.h - vectors of four lanes: Advanced SIMD. Of the operations that simd.h lists, those that products need too.
 */
#ifndef NIB_LANES_NEON_H
#define NIB_LANES_NEON_H

#include <arm_neon.h>
#include <stdbool.h>

#include "format/codec.h"

#define SIMD __attribute__((always_inline)) static inline
#define SLOT static

#define VL 4
#define SUMS_APART 0
typedef float32x4_t VF;
typedef int32x4_t VI;

/* ---- Operations ---- */

SIMD VF vf_load(const float *p) { return vld1q_f32(p); }
SIMD void vf_store(float *p, VF v) { vst1q_f32(p, v); }
SIMD VI vi_load(const int32_t *p) { return vld1q_s32(p); }
SIMD VF vf_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
SIMD VF vf_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
SIMD void vf_store_f16(uint16_t *p, VF v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
SIMD void vi_store_halves(uint16_t *p, VI v) { vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(v))); }
SIMD VF vf_set1(float x) { return vdupq_n_f32(x); }
SIMD VI vi_set1(int x) { return vdupq_n_s32(x); }
SIMD VI vi_of(VF v) { return vreinterpretq_s32_f32(v); }
SIMD VF vf_of(VI v) { return vreinterpretq_f32_s32(v); }
SIMD VF vf_add(VF a, VF b) { return vaddq_f32(a, b); }
SIMD VF vf_sub(VF a, VF b) { return vsubq_f32(a, b); }
SIMD VF vf_mul(VF a, VF b) { return vmulq_f32(a, b); }
SIMD VF vf_div(VF a, VF b) { return vdivq_f32(a, b); }
SIMD VF vf_multiply_add(VF a, VF b, VF c) { return vfmaq_f32(c, a, b); }
SIMD VF vf_multiply_sub(VF a, VF b, VF c) { return vfmaq_f32(vnegq_f32(c), a, b); }

/* By comparison: fminnm and fmaxnm give a NaN where the other operand is a signalling one. */
SIMD VF vf_min(VF a, VF b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
SIMD VF vf_max(VF a, VF b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

SIMD VF vf_from(VI v) { return vcvtq_f32_s32(v); }
SIMD VI vi_truncate(VF v) { return vcvtq_s32_f32(v); }
SIMD VI vi_add(VI a, VI b) { return vaddq_s32(a, b); }
SIMD VI vi_sub(VI a, VI b) { return vsubq_s32(a, b); }
SIMD VI vi_and(VI a, VI b) { return vandq_s32(a, b); }
SIMD VI vi_andnot(VI a, VI b) { return vbicq_s32(b, a); }
SIMD VI vi_or(VI a, VI b) { return vorrq_s32(a, b); }
SIMD VI vi_xor(VI a, VI b) { return veorq_s32(a, b); }
SIMD VI vi_min(VI a, VI b) { return vminq_s32(a, b); }
SIMD VI vi_max(VI a, VI b) { return vmaxq_s32(a, b); }
SIMD VI vi_equal(VI a, VI b) { return vreinterpretq_s32_u32(vceqq_s32(a, b)); }
#define vi_sll(v, n) vshlq_n_s32(v, n)
#define vi_srl(v, n) vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), n))

SIMD VI vi_lane_indices(void)
{
    static const int32_t values[VL] = { 0, 1, 2, 3 };
    return vi_load(values);
}

/* x where a < b, y elsewhere and for NaNs. */
SIMD VI vi_select_less(VF a, VF b, VI x, VI y) { return vbslq_s32(vcltq_f32(a, b), x, y); }

SIMD bool vf_all_less(VF a, VF b) { return vminvq_u32(vcltq_f32(a, b)) != 0; }

/* The 64-bit products of all lanes with one factor, in two halves. */
SIMD void vi_multiply_wide(VI a, uint32_t b, VI *high, VI *low)
{
    const uint32x4_t u = vreinterpretq_u32_s32(a);
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(u), b));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(u), b));
    *low = vreinterpretq_s32_u32(vuzp1q_u32(first, second));
    *high = vreinterpretq_s32_u32(vuzp2q_u32(first, second));
}

SIMD void vf_transpose(VF v[4])
{
    const float32x4x2_t a = vtrnq_f32(v[0], v[1]), b = vtrnq_f32(v[2], v[3]);
    v[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    v[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    v[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    v[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

#endif
