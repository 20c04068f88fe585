/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rules.h - every formula that decides a byte, once, for C11, for C++17 and for CUDA.
 *
 * From an amax to the tensor scale, to a block's scale, to the factor of its elements, to their codes, and back. The
 * reference kernels and the table of dialects (dialect.c) are made of these functions; the vector kernels compute the
 * same in their own way and are compared with the reference. docs/numerics.md has the formulas in words.
 *
 * All values are FP32 and every operation rounds once, in the order written: which byte comes out depends on it.
 * Compile without contraction (-ffp-contract=off, nvcc -fmad=false), with subnormals and IEEE division (no fast math).
 * Nothing here calls through a pointer or needs a library, so that a kernel on a device calls the functions of its
 * dialect by their names.
 *
 * Words: `scale` multiplies the data on the way in and `scale_inv`, its inverse, on the way out, as in
 * TransformerEngine. A tensor keeps its tensor scale as an amax, as a multiplier (scale_inv) or as a divisor (scale).
 */
#ifndef NIB_RULES_H
#define NIB_RULES_H

#include <float.h>
#include <stdbool.h>

#include "format/codec.h"
#include "format/philox.h"
#include "nib.h"

/* The elements of an NVFP4 block, and of one RHT. */
enum { NIB_BLOCK = 16 };

/* The choices within a dialect, fixed for a whole tensor. */
struct nib_rules {
    nib_tensor_scale tensor_scale; /* what the tensor keeps */
    nib_dtype element;             /* what a code is */
    float element_max;             /* its largest value */
    float full_scale;              /* what the largest magnitude becomes, block scale included */
    bool pow2;            /* scales are powers of two: a kept multiplier rounded up, a float8 scale rounded down */
    bool no_tensor_scale; /* there is no tensor scale */
    nib_mx_rule mx_rule;
    float amax_epsilon;
    nib_dtype input; /* some dialects compute in the input's dtype */
};

/* What a tensor scale (one per tensor, or per line) comes to, worked out once before its blocks. */
struct nib_scaler {
    float tensor_scale; /* as the tensor keeps it */
    float amax;         /* te: the largest magnitude, or what the kept multiplier makes of it */
    float scale;        /* multiplier of the data; set before prepare where the dialect has a scale_of */
    float scale_inv;    /* its inverse */
    float block;        /* what a block's amax is multiplied with or divided by */
};

/* How elements become E2M1 to nearest; all false is te's rule. */
struct nib_element_rule {
    bool divides;         /* elements are divided by the factor instead of multiplied */
    bool drops_zero_sign; /* -0 is code 0: the sign comes from x < 0 */
    bool keeps_nan_sign;  /* a negative NaN is -6 */
};

/* A block's scale as the bits that are stored: a code, or a float's. */
typedef uint32_t nib_scale_bits;

/* ---- Values in memory ---- */

/* Element i of an array of F32, BF16 or F16, as FP32: exact. */
NIB_INLINE float nib_load_value(const void *x, int64_t i, nib_dtype dtype)
{
    if (dtype == NIB_F32)
        return ((const float *)x)[i];
    const uint16_t code = ((const uint16_t *)x)[i];
    return dtype == NIB_BF16 ? nib_f32_from_bf16(code) : nib_f32_from_f16(code);
}

/* One value in the dtype of an output, rounded once. Results have one NaN, whatever the processor makes of 0 times an
 * infinite factor. */
NIB_INLINE void nib_store_value(void *out, nib_dtype dtype, float value)
{
    const float y = nib_quiet(value);
    const uint16_t half = dtype == NIB_BF16 ? nib_bf16_from_f32(y) : nib_f16_from_f32(y);
    memcpy(out, dtype == NIB_F32 ? (const void *)&y : (const void *)&half, dtype == NIB_F32 ? 4 : 2);
}

/* A value rounded to a dtype that is computed in. */
NIB_INLINE float nib_round_to(nib_dtype dtype, float x)
{
    if (dtype == NIB_BF16)
        return nib_f32_from_bf16(nib_bf16_from_f32(x));
    return dtype == NIB_F16 ? nib_f32_from_f16(nib_f16_from_f32(x)) : x;
}

/* ---- Tensor scales ---- */

/* Up to the next power of two, by the bits: x is positive and normal. */
NIB_INLINE float nib_round_up_to_pow2(float x)
{
    const uint32_t bits = nib_bits(x);
    return nib_float((bits & 0x7FFFFFu) ? (bits & 0x7F800000u) + 0x00800000u : bits);
}

/* Unbiased rounding must not clip, so that the tensor scale, too, is that of data 1/16 larger. */
NIB_INLINE float nib_unbiased_amax(float amax) { return nib_fmin(amax * (17.0f / 16.0f), FLT_MAX); }

/* Any tensor scale of NVFP4 as a multiplier of the decoded data, where no order of operations is prescribed. */
NIB_INLINE float nib_scale_inv(float tensor_scale, const struct nib_rules *rules)
{
    if (rules->tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return tensor_scale / rules->full_scale;
    return rules->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER ? tensor_scale : 1.0f / tensor_scale;
}

/* The factor of a block's decoded codes, by what the tensor scale is (nib_tensor_scale in nib.h). */
NIB_INLINE float nib_nvfp4_decode_factor(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    const float s = nib_f32_from_e4m3((uint8_t)scale);
    if (rules->tensor_scale == NIB_TENSOR_SCALE_AMAX) /* left to right, so s * amax may overflow, as TE's does */
        return s * tensor_scale * (1.0f / rules->full_scale);
    return rules->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER ? s * tensor_scale : s / tensor_scale;
}

/* ---- te: TransformerEngine ---- */

/* The amax itself; or a checkpoint's multiplier, which must be normal, since loaders divide by it. For a tensor of
 * zeros that is 1, what an amax of 0 stands for below. */
NIB_INLINE float nib_te_tensor_scale(float amax, const struct nib_rules *rules)
{
    if (rules->tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return amax;
    if (amax == 0)
        return 1;
    const float g = nib_fmax(amax / rules->full_scale, FLT_MIN);
    return rules->pow2 ? nib_round_up_to_pow2(g) : g;
}

/* scale = min(full_scale / amax, FLT_MAX), 1 where there is nothing to scale; a multiplier is made an amax first. */
NIB_INLINE void nib_te_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    const bool multiplier = rules->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER, pow2 = multiplier && rules->pow2;
    const float amax = multiplier ? scaler->tensor_scale * rules->full_scale : scaler->tensor_scale;
    /* For a power of two both forms have one value, but the first cannot overflow on the way. nib_fmin also makes
     * FLT_MAX of a NaN. */
    float scale = nib_fmin(pow2 ? 1.0f / scaler->tensor_scale : rules->full_scale / amax, FLT_MAX);
    if (amax == 0 || scale == 0) /* nothing to scale, or an infinite amax */
        scale = 1;
    scaler->amax = pow2 ? nib_fmin(amax, FLT_MAX) : amax;
    scaler->scale = scale;
    scaler->scale_inv = 1.0f / scale;
    scaler->block = scale * (1.0f / 6.0f); /* 1/6 is 0x3E2AAAAB */
}

/* E4M3 of amax * (scale * 1/6), in this order. */
NIB_INLINE nib_scale_bits nib_te_block_scale(float block_amax, const struct nib_scaler *scaler,
                                             const struct nib_rules *rules)
{
    (void)rules;
    return nib_e4m3_from_f32(nib_fmin(block_amax * scaler->block, FLT_MAX));
}

/* So large that no element of the block is clipped: a scale 1/16 larger than wanted survives rounding down to E4M3's 3
 * bits of mantissa; below the smallest normal, where the bits are fewer, it is rounded up instead. */
NIB_INLINE nib_scale_bits nib_te_unbiased_block_scale(float block_amax, const struct nib_scaler *scaler)
{
    const float wanted = nib_fmin(block_amax * scaler->block, FLT_MAX) * (17.0f / 16.0f);
    if (!(wanted < 0x1p-6f))
        return nib_e4m3_from_f32(wanted);
    const float units = wanted * 0x1p9f;
    const uint8_t below = (uint8_t)units;
    return (uint8_t)(below + ((float)below < units));
}

/* 1 / (s * scale_inv). A scale of 0 gives FLT_MAX: the codes of a block that underflowed are +-6, and decode to 0 all
 * the same. */
NIB_INLINE float nib_te_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                               const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return nib_fmin(1.0f / (nib_f32_from_e4m3((uint8_t)scale) * scaler->scale_inv), FLT_MAX);
}

/* A floor for E4M3 codes: positive ones are in the order of their values. */
NIB_INLINE uint8_t nib_at_least(uint8_t code, uint8_t floor_code) { return code < floor_code ? floor_code : code; }

/* ---- gist ---- */

/* The divisor. PyTorch divides a Python float by a tensor as reciprocal times float: two roundings. */
NIB_INLINE float nib_gist_tensor_scale(float amax, const struct nib_rules *rules)
{
    return (1.0f / amax) * rules->full_scale;
}

/* A kept divisor is the scale: also what compressed-tensors does. */
NIB_INLINE void nib_divisor_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->scale = scaler->tensor_scale;
}

/* E4M3 of amax / 6 * scale. */
NIB_INLINE nib_scale_bits nib_gist_block_scale(float block_amax, const struct nib_scaler *scaler,
                                               const struct nib_rules *rules)
{
    (void)rules;
    return nib_e4m3_from_f32(block_amax / 6.0f * scaler->scale);
}

/* scale / max(s, 1e-12); a NaN stays one. */
NIB_INLINE float nib_gist_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                                 const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    const float s = nib_f32_from_e4m3((uint8_t)scale);
    return scaler->scale / (s < 1e-12f ? 1e-12f : s);
}

/* ---- torchao and modelopt ---- */

/* amax / full_scale, a multiplier, where torchao has one. */
NIB_INLINE float nib_torchao_tensor_scale(float amax, const struct nib_rules *rules)
{
    return rules->no_tensor_scale ? 1.0f : amax / rules->full_scale;
}

/* A kept multiplier is scale_inv. */
NIB_INLINE void nib_torchao_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->scale_inv = scaler->tensor_scale;
    scaler->scale = 1.0f / scaler->tensor_scale;
}

/* Between the smallest normal scale and the largest; a NaN (0/0 in a tensor of zeros) stays one. */
NIB_INLINE nib_scale_bits nib_torchao_block_scale(float block_amax, const struct nib_scaler *scaler,
                                                  const struct nib_rules *rules)
{
    (void)rules;
    const float s = block_amax / 6.0f / scaler->scale_inv;
    return nib_e4m3_from_f32(s < 0x1p-6f ? 0x1p-6f : s);
}

/* scale / s. */
NIB_INLINE float nib_torchao_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                                    const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return scaler->scale / nib_f32_from_e4m3((uint8_t)scale);
}

/* amax / full_scale, a multiplier. */
NIB_INLINE float nib_modelopt_tensor_scale(float amax, const struct nib_rules *rules)
{
    return amax / rules->full_scale;
}

/* A kept multiplier is scale_inv; blocks are divided by 6 of it. */
NIB_INLINE void nib_modelopt_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->scale_inv = scaler->tensor_scale;
    scaler->block = 6.0f * scaler->tensor_scale;
}

/* E4M3 of amax / (6 * scale_inv), at least 2^-9, and 1 for a block of zeros. */
NIB_INLINE nib_scale_bits nib_modelopt_block_scale(float block_amax, const struct nib_scaler *scaler,
                                                   const struct nib_rules *rules)
{
    (void)rules;
    const float s = block_amax / scaler->block;
    if (nib_is_nan(s)) /* 0/0, a tensor of zeros: the peer writes the NaN that x86 makes, sign and all */
        return 0xFF;
    if (s == 0)
        return 0x38; /* 1.0 */
    return nib_e4m3_from_f32(nib_fmax(s, 0x1p-9f));
}

/* s * scale_inv, which elements are divided by. */
NIB_INLINE float nib_modelopt_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                                     const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return nib_f32_from_e4m3((uint8_t)scale) * scaler->scale_inv;
}

/* ---- compressed-tensors ---- */

/* The divisor, computed in the dtype of the weights by reciprocal and product; 1 where that overflows. */
NIB_INLINE float nib_ct_tensor_scale(float amax, const struct nib_rules *rules)
{
    const float tiny = rules->input == NIB_F16 ? 0x1p-14f : FLT_MIN; /* smallest normal; BF16 has FP32's */
    const float reciprocal = nib_round_to(rules->input, 1.0f / nib_fmax(amax, tiny));
    const float tensor_scale = nib_round_to(rules->input, reciprocal * rules->full_scale);
    return tensor_scale <= FLT_MAX ? tensor_scale : 1.0f; /* for a NaN too */
}

/* E4M3 of scale * (amax / 6 in the dtype of the weights), 0.125 where that would be 0. */
NIB_INLINE nib_scale_bits nib_ct_block_scale(float block_amax, const struct nib_scaler *scaler,
                                             const struct nib_rules *rules)
{
    const uint8_t scale = nib_e4m3_from_f32(scaler->scale * nib_round_to(rules->input, block_amax / 6.0f));
    return scale ? scale : 0x20;
}

/* s / scale, which elements are divided by. */
NIB_INLINE float nib_ct_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                               const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return nib_f32_from_e4m3((uint8_t)scale) / scaler->scale;
}

/* ---- Float8: a scale per tensor, or per block of 128 ---- */

/* The largest finite value of an input's dtype. */
NIB_INLINE float nib_largest_of(nib_dtype dtype)
{
    if (dtype == NIB_BF16)
        return nib_f32_from_bf16(0x7F7F);
    return dtype == NIB_F16 ? 65504.0f : FLT_MAX;
}

/* The multiplier that brings amax to the largest element. Where that overflows it is `limit`. */
NIB_INLINE float nib_float8_limited_scale(float amax, float limit, const struct nib_rules *rules)
{
    const float a = amax < rules->amax_epsilon ? rules->amax_epsilon : amax;
    if (!(a > 0 && a <= FLT_MAX)) /* zero, infinite or NaN */
        return 1.0f;
    const float quotient = rules->element_max / a, scale = quotient <= FLT_MAX ? quotient : limit;
    return rules->pow2 ? nib_float(nib_bits(scale) & 0xFF800000u) : scale; /* toward zero, so that nothing overflows */
}

/* The scale of a tensor, whose inverse is kept. */
NIB_INLINE float nib_float8_scale(float amax, const struct nib_rules *rules)
{
    return nib_float8_limited_scale(amax, FLT_MAX, rules);
}

/* Formats whose tensor scale, if any, is the scale as it stands. */
NIB_INLINE void nib_no_prepare(struct nib_scaler *scaler, const struct nib_rules *rules) { (void)scaler, (void)rules; }

NIB_INLINE float nib_float8_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                                   const struct nib_rules *rules)
{
    (void)scale, (void)block_amax, (void)rules;
    return scaler->scale;
}

NIB_INLINE float nib_float8_decode_factor(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    (void)scale, (void)rules;
    return tensor_scale;
}

/* Within blocks the scale is limited by what the input's dtype can hold. */
NIB_INLINE float nib_float8_block_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                                         const struct nib_rules *rules)
{
    (void)scale, (void)scaler;
    return nib_float8_limited_scale(block_amax, nib_largest_of(rules->input), rules);
}

/* What is stored is the inverse, as FP32. */
NIB_INLINE nib_scale_bits nib_float8_block_scale(float block_amax, const struct nib_scaler *scaler,
                                                 const struct nib_rules *rules)
{
    return nib_bits(1.0f / nib_float8_block_factor(0, block_amax, scaler, rules));
}

NIB_INLINE float nib_float8_block_decode_factor(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    (void)tensor_scale, (void)rules;
    return nib_float(scale);
}

/* ---- MX: a power of two per block of 32 ---- */

/* The power of two at or above amax / element_max; or, by the floor rule, that of amax over that of element_max. */
NIB_INLINE nib_scale_bits nib_mx_block_scale(float block_amax, const struct nib_scaler *scaler,
                                             const struct nib_rules *rules)
{
    (void)scaler;
    if (rules->mx_rule == NIB_MX_CEIL)
        return nib_e8m0_from_f32(block_amax * (1.0f / rules->element_max));
    /* Exponent fields subtract as exponents do; a subnormal amax counts as 2^-127. */
    const int exponent = (int)(nib_bits(block_amax) >> 23), largest = (int)(nib_bits(rules->element_max) >> 23) - 127;
    return (nib_scale_bits)(exponent > largest ? exponent - largest : 0);
}

/* 2^-e by the bits; 2^127 has a subnormal inverse. */
NIB_INLINE float nib_mx_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                               const struct nib_rules *rules)
{
    (void)block_amax, (void)scaler, (void)rules;
    if (scale >= 254)
        return nib_float(scale == 254 ? 0x00400000u : 0x7FC00000u);
    return nib_float((254 - scale) << 23);
}

NIB_INLINE float nib_mx_decode_factor(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    (void)tensor_scale, (void)rules;
    return nib_f32_from_e8m0((uint8_t)scale);
}

/* ---- Elements ---- */

/* An element under its block's factor. */
NIB_INLINE float nib_scaled(float x, float factor, bool divides) { return divides ? x / factor : x * factor; }

/* To nearest; x is the element, y the scaled one. A NaN's sign is x's: that of one which arithmetic made depends on the
 * processor. */
NIB_INLINE uint8_t nib_e2m1_nearest(float x, float y, const struct nib_element_rule *rule)
{
    if (rule->drops_zero_sign && y == 0)
        return 0;
    if (rule->keeps_nan_sign && nib_is_nan(y))
        return (uint8_t)(7 | nib_bits(x) >> 31 << 3);
    return nib_e2m1_from_f32(y);
}

/* Random bits per element. */
NIB_INLINE int nib_random_bits(nib_rounding rounding) { return rounding == NIB_ROUND_STOCHASTIC_8 ? 8 : 24; }

/* Up with the probability that y's place between its two neighbors says, to 2^-bits; r is random, of that many bits.
 * From 6 on y is 6, and a NaN is +6. */
NIB_INLINE uint8_t nib_e2m1_stochastic(float y, uint32_t r, int bits)
{
    const float m = nib_abs(y);
    if (nib_is_nan(y))
        return 7;
    const uint8_t sign = (uint8_t)(nib_bits(y) >> 31 << 3);
    if (m >= 6.0f)
        return (uint8_t)(sign | 7);
    const float step = m >= 4.0f ? 2.0f : m >= 2.0f ? 1.0f : 0.5f;
    const int steps = (int)(m / step);
    const int code = m >= 4.0f ? steps + 4 : m >= 2.0f ? steps + 2 : steps; /* of the neighbor below */
    const float frac = (m - (float)steps * step) / step;                    /* exact */
    const uint32_t one = 1u << bits;
    return (uint8_t)(sign | (code + ((uint32_t)(frac * (float)one) + r >= one)));
}

/* ---- Random bits: Philox, by where the block lies ---- */

/* The last word of a block's counter: usages have random bits of their own, and the top bit marks the columnwise one.
 * But with square tiles the columnwise usage has the bits of the rowwise one, element by element, so that it stays the
 * transpose. */
NIB_INLINE uint32_t nib_random_column(int64_t block, bool columnwise)
{
    return (uint32_t)block | (columnwise ? 0x80000000u : 0);
}

/* The four words of one call; `line` and `column` are the block's place. */
NIB_INLINE void nib_random_words(uint64_t seed, uint64_t offset, uint32_t line, uint32_t column, uint32_t out[4])
{
    const uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    const uint32_t counter[4] = { (uint32_t)offset, (uint32_t)(offset >> 32), line, column };
    nib_philox_block(counter, key, out);
}

/* Those of a block's elements. 8-bit: one call, a byte each. 24-bit: four calls at offset + 0..3, a word's upper bits
 * each. */
NIB_INLINE void nib_random_block(nib_rounding rounding, uint64_t seed, uint64_t offset, uint32_t line, uint32_t column,
                                 uint32_t out[NIB_BLOCK])
{
    uint32_t words[4];
    if (rounding == NIB_ROUND_STOCHASTIC_8) {
        nib_random_words(seed, offset, line, column, words);
        for (int i = 0; i < NIB_BLOCK; i++)
            out[i] = words[i / 4] >> 8 * (i % 4) & 255;
        return;
    }
    for (int quad = 0; quad < NIB_BLOCK / 4; quad++) {
        nib_random_words(seed, offset + (uint64_t)quad, line, column, words);
        for (int i = 0; i < 4; i++)
            out[4 * quad + i] = words[i] >> 8;
    }
}

/* ---- The random Hadamard transform ---- */

/* At strides 1, 2, 4, 8: (a, b) to (a + b, a - b), a at the lower index. */
NIB_INLINE void nib_rht_butterflies(float x[NIB_BLOCK])
{
    NIB_UNROLL
    for (int stride = 1; stride < NIB_BLOCK; stride *= 2) {
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK; i++)
            if (!(i & stride)) {
                const float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
    }
}

/* Bit i of the mask changes the sign of x[i]. */
NIB_INLINE void nib_rht_signs(float x[NIB_BLOCK], uint16_t sign_mask)
{
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++)
        if (sign_mask >> i & 1)
            x[i] = -x[i];
}

/* One block, in place: signs, butterflies, a quarter. A quarter of a BF16 or F16 value is exact in FP32, so it comes
 * first and keeps the sums small; a quarter of an FP32 value may be subnormal, so it comes last. BF16 results are
 * rounded to BF16: amax and codes are those of the BF16 tensor that RHT would have written. */
NIB_INLINE void nib_rht_forward(float x[NIB_BLOCK], uint16_t sign_mask, nib_dtype input)
{
    nib_rht_signs(x, sign_mask);
    if (input != NIB_F32) {
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK; i++)
            x[i] *= 0.25f;
    }
    nib_rht_butterflies(x);
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if (input == NIB_F32)
            x[i] *= 0.25f;
        if (input == NIB_BF16)
            x[i] = nib_f32_from_bf16(nib_bf16_from_f32(x[i]));
    }
}

/* Back: the matrix is orthogonal, and symmetric but for the signs. */
NIB_INLINE void nib_rht_inverse(float x[NIB_BLOCK], uint16_t sign_mask)
{
    nib_rht_butterflies(x);
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++)
        x[i] *= 0.25f;
    nib_rht_signs(x, sign_mask);
}

/* ---- Four over six, and the sweep ---- */

/* Sixteen values as a tree: v[i] += v[i + 8], then at distance 4, 2, 1. */
NIB_INLINE float nib_tree_sum(float v[NIB_BLOCK])
{
    NIB_UNROLL
    for (int distance = NIB_BLOCK / 2; distance > 0; distance /= 2) {
        NIB_UNROLL
        for (int i = 0; i < distance; i++)
            v[i] += v[i + distance];
    }
    return v[0];
}

/* The scale that brings a tile's amax to 6, or to 4: a division by 6 here, unlike nib_te_block_scale. */
NIB_INLINE uint8_t nib_4over6_scale(float amax, bool four, const struct nib_scaler *scaler, uint8_t floor_code)
{
    const float base = amax / 6.0f * scaler->scale;
    return nib_at_least(nib_e4m3_from_f32(nib_fmin(four ? base * 1.5f : base, 448.0f)), floor_code);
}

/* The error of one line of n elements under a scale, in the order of the elements. `fast` compares scaled values. The
 * 16 lines of a square tile, 0 for a missing one, go through nib_tree_sum; four wins if its error is less. */
NIB_INLINE float nib_4over6_error(const float *x, const uint8_t *codes, int n, uint8_t scale,
                                  const struct nib_scaler *scaler, const struct nib_rules *rules, nib_error_mode mode,
                                  bool fast)
{
    const float s = nib_f32_from_e4m3(scale);
    float error = 0;
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if (i >= n)
            continue;
        const float product = nib_f32_from_e2m1(codes[i]) * s; /* exact */
        const float d = fast ? product - x[i] * scaler->scale : product * scaler->amax / rules->full_scale - x[i];
        error += mode == NIB_ERROR_MAE ? nib_abs(d) : d * d;
    }
    return error;
}

enum { NIB_SWEEP_CANDIDATES = 11 };

/* Scale codes that the sweep tries, as distances from the rtn code, in the order in which they win a tie: the nearest
 * first, the smaller of two first. */
NIB_INLINE int nib_sweep_offset(int i)
{
    static const int offsets[NIB_SWEEP_CANDIDATES] = { 0, -1, 1, -2, 2, -3, 3, 4, 5, 6, 7 };
    return offsets[i];
}

/* Whether a code may be tried: from the floor (1 without one; 0 only if the rtn code is 0) to 448. */
NIB_INLINE bool nib_sweep_allows(int code, int rtn, uint8_t floor_code)
{
    return code >= (rtn == 0 ? 0 : floor_code ? floor_code : 1) && code <= 0x7E;
}

/* The squared error of n elements under a scale, each times its importance (NULL: 1), as a tree in which missing elements
 * count 0; scale_inv is the tensor scale's (nib_scale_inv). A candidate wins if its error is less than that of all before
 * it. */
NIB_INLINE float nib_weighted_sweep_error(const float *x, const uint8_t *codes, int n, uint8_t scale, float scale_inv,
                                          const float *importance)
{
    const float f = nib_f32_from_e4m3(scale) * scale_inv;
    float e[NIB_BLOCK] = { 0 };
    NIB_UNROLL
    for (int i = 0; i < NIB_BLOCK; i++) {
        if (i >= n)
            continue;
        const float d = nib_f32_from_e2m1(codes[i]) * f - x[i];
        e[i] = d * d;
    }
    for (int i = 0; importance && i < n; i++)
        e[i] *= importance[i];
    return nib_tree_sum(e);
}

NIB_INLINE float nib_sweep_error(const float *x, const uint8_t *codes, int n, uint8_t scale, float scale_inv)
{
    return nib_weighted_sweep_error(x, codes, n, scale, scale_inv, NULL);
}

/* ---- Importance: mean squares of a weight's input channels, as factors of the sweep's errors ---- */

/* Their mean, summed in the order of the channels: FP64 holds the sum of any FP32 values. */
NIB_INLINE double nib_importance_mean(const float *squares, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)squares[i];
    return sum / (double)n;
}

/* The n channels of a block, or of the last one: relative to the mean, rounded once, and at least 1e-6, so that no
 * element is free to become anything. Where all are 0 nothing is known, and each counts 1. */
NIB_INLINE void nib_importance_block(const float *squares, int n, double mean, float *out)
{
    bool known = false;
    for (int i = 0; i < n; i++)
        known = known || squares[i] > 0;
    for (int i = 0; i < n; i++)
        out[i] = known ? nib_fmax((float)((double)squares[i] / mean), 1e-6f) : 1.0f;
}

#endif
