/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_neon.h - products in four lanes; included once for every AArch64 processor, and once for those with dot products
 * of bytes (PRODUCT_SDOT). Bytes are signed on both sides, so that weights need no correction.
 */
#define PRODUCT_DOT VI

#ifndef NIB_PRODUCT_NEON_H
#define NIB_PRODUCT_NEON_H

enum { PRODUCT_ROWS = 8, PRODUCT_VECTORS = 2 };

SIMD VI vi_pair_sums(VI a, VI b) { return vpaddq_s32(a, b); }
SIMD VI vi_even_words(VI a, VI b) { return vuzp1q_s32(a, b); }
SIMD VI vi_odd_words(VI a, VI b) { return vuzp2q_s32(a, b); }
SIMD void vi_transpose_quarters(VI v[1]) { (void)v; }

SIMD VI signed_weights(VI codes)
{
    static const int8_t values[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    const uint8x16_t low = vandq_u8(vreinterpretq_u8_s32(codes), vdupq_n_u8(15));
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(values), low));
}

/* Four products of bytes to each lane: 12 * 128 * 2 stays within 16 bits. */
SIMD VI add_products(VI dot, VI weights, VI x)
{
    const int8x16_t a = vreinterpretq_s8_s32(weights), b = vreinterpretq_s8_s32(x);
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vpadalq_s16(dot, vpaddq_s16(low, high));
}

#endif

PRODUCT_SIMD VI PRODUCT(weights)(VI codes) { return signed_weights(codes); }

PRODUCT_SIMD VI PRODUCT(dot_start)(VI correction)
{
    (void)correction;
    return vi_set1(0);
}

PRODUCT_SIMD VI PRODUCT(dot_step)(VI dot, VI weights, VI x)
{
#ifdef PRODUCT_SDOT
    return vdotq_s32(dot, vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(x));
#else
    return add_products(dot, weights, x);
#endif
}

PRODUCT_SIMD VI PRODUCT(dot_end)(VI dot, VI correction)
{
    (void)correction;
    return dot;
}

/* Two blocks are too few to be worth more than the general way. */
PRODUCT_SIMD bool PRODUCT(row_scales)(const uint8_t *s, int64_t stride, VF out[2])
{
    (void)s, (void)stride, (void)out;
    return false;
}

#include "kernels/simd_product.h"
