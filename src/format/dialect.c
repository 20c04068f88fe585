/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dialect.c - the table of dialects.
 */
#include "format/dialect.h"

#include <float.h>

#include "format/codec.h"

static const float one_sixth = 1.0f / 6.0f; /* 0x3E2AAAAB */

/* ---- te: TransformerEngine ---- */

/* Up to the next power of two, by the bits: x is positive and normal. */
static float round_up_to_pow2(float x)
{
    const uint32_t bits = nib_bits(x);
    return nib_float((bits & 0x7FFFFFu) ? (bits & 0x7F800000u) + 0x00800000u : bits);
}

static float te_tensor_scale(float amax, const struct nib_rules *rules)
{
    if (rules->tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return amax;
    /* A checkpoint's decode scale must be a normal number, since loaders take its reciprocal. For a tensor of zeros
     * that is 1, the scale that an amax of 0 stands for below. */
    if (amax == 0)
        return 1;
    const float g = nib_fmax(amax / rules->full_scale, FLT_MIN);
    return rules->pow2 ? round_up_to_pow2(g) : g;
}

static void te_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    const bool decode = rules->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER;
    const float amax = decode ? scaler->tensor_scale * rules->full_scale : scaler->tensor_scale;
    /* For a power of two both forms are the same number, but the second cannot overflow on the way. nib_fmin also turns
     * a NaN into FLT_MAX. */
    float encode = nib_fmin(decode && rules->pow2 ? 1.0f / scaler->tensor_scale : rules->full_scale / amax, FLT_MAX);
    if (amax == 0 || encode == 0) /* nothing to scale, or an infinite amax */
        encode = 1;
    scaler->amax = decode && rules->pow2 ? nib_fmin(amax, FLT_MAX) : amax;
    scaler->encode = encode;
    scaler->decode = 1.0f / encode;
    scaler->block = encode * one_sixth;
}

static nib_scale_bits te_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    return nib_e4m3_from_f32(nib_fmin(block_amax * scaler->block, FLT_MAX));
}

/* A scale of 0 gives FLT_MAX: the codes of a block that underflowed are +-6, and decode to 0 all the same. */
static float te_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                       const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return nib_fmin(1.0f / (nib_f32_from_e4m3((uint8_t)scale) * scaler->decode), FLT_MAX);
}

/* ---- gist ---- */

/* The tensor scale is the encode scale. PyTorch divides a number by a tensor as reciprocal times number: two roundings. */
static float gist_tensor_scale(float amax, const struct nib_rules *rules) { return (1.0f / amax) * rules->full_scale; }

static void gist_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->encode = scaler->tensor_scale;
}

static nib_scale_bits gist_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    return nib_e4m3_from_f32(block_amax / 6.0f * scaler->encode);
}

static float gist_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                         const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    const float s = nib_f32_from_e4m3((uint8_t)scale);
    return scaler->encode / (s < 1e-12f ? 1e-12f : s);
}

/* ---- torchao ---- */

static float torchao_tensor_scale(float amax, const struct nib_rules *rules)
{
    return rules->no_tensor_scale ? 1.0f : amax / rules->full_scale;
}

static void torchao_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->decode = scaler->tensor_scale;
    scaler->encode = 1.0f / scaler->tensor_scale;
}

/* Between the smallest normal scale and the largest; a NaN (0/0 in a tensor of zeros) stays one. */
static nib_scale_bits torchao_block_scale(float block_amax, const struct nib_scaler *scaler,
                                          const struct nib_rules *rules)
{
    (void)rules;
    const float s = block_amax / 6.0f / scaler->decode;
    return nib_e4m3_from_f32(s < 0x1p-6f ? 0x1p-6f : s);
}

static float torchao_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                            const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return scaler->encode / nib_f32_from_e4m3((uint8_t)scale);
}

/* ---- modelopt ---- */

static float modelopt_tensor_scale(float amax, const struct nib_rules *rules) { return amax / rules->full_scale; }

static void modelopt_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->decode = scaler->tensor_scale;
    scaler->block = 6.0f * scaler->tensor_scale;
}

static nib_scale_bits modelopt_block_scale(float block_amax, const struct nib_scaler *scaler,
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

static float modelopt_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                             const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return nib_f32_from_e4m3((uint8_t)scale) * scaler->decode;
}

/* ---- compressed-tensors ---- */

static float round_to(nib_dtype dtype, float x)
{
    if (dtype == NIB_BF16)
        return nib_f32_from_bf16(nib_bf16_from_f32(x));
    return dtype == NIB_F16 ? nib_f32_from_f16(nib_f16_from_f32(x)) : x;
}

/* The divisor, computed in the dtype of the weights by reciprocal and product. */
static float ct_tensor_scale(float amax, const struct nib_rules *rules)
{
    const float tiny = rules->input == NIB_F16 ? 0x1p-14f : FLT_MIN; /* smallest normal; BF16 has FP32's */
    const float reciprocal = round_to(rules->input, 1.0f / nib_fmax(amax, tiny));
    const float tensor_scale = round_to(rules->input, reciprocal * rules->full_scale);
    return tensor_scale <= FLT_MAX ? tensor_scale : 1.0f; /* for a NaN too */
}

static void ct_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->encode = scaler->tensor_scale;
}

static nib_scale_bits ct_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    const uint8_t scale = nib_e4m3_from_f32(scaler->encode * round_to(rules->input, block_amax / 6.0f));
    return scale ? scale : 0x20; /* 0.125 where it would be 0 */
}

static float ct_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                       const struct nib_rules *rules)
{
    (void)block_amax, (void)rules;
    return nib_f32_from_e4m3((uint8_t)scale) / scaler->encode;
}

/* The factor of a block when it is decoded (nib_tensor_scale in nib.h). */
static float nvfp4_decode(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    const float s = nib_f32_from_e4m3((uint8_t)scale);
    if (rules->tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return s * tensor_scale *
               (1.0f / rules->full_scale); /* left to right, so s * amax may overflow, as TE's does */
    return rules->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER ? s * tensor_scale : s / tensor_scale;
}

float nib_decode_scale(float tensor_scale, const struct nib_rules *rules)
{
    if (rules->tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return tensor_scale / rules->full_scale;
    return rules->tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER ? tensor_scale : 1.0f / tensor_scale;
}

const struct nib_dialect_facts nib_nvfp4_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_AMAX,
                         .tensor_scale_of = te_tensor_scale,
                         .prepare = te_prepare,
                         .block_scale = te_block_scale,
                         .factor = te_factor,
                         .decode = nvfp4_decode },
    [NIB_DIALECT_GIST] = { .name = "gist",
                           .tensor_scale = NIB_TENSOR_SCALE_DIVISOR,
                           .plain = true,
                           .keeps_nan_sign = true,
                           .tensor_scale_of = gist_tensor_scale,
                           .prepare = gist_prepare,
                           .block_scale = gist_block_scale,
                           .factor = gist_factor,
                           .decode = nvfp4_decode },
    [NIB_DIALECT_TORCHAO] = { .name = "torchao",
                              .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
                              .plain = true,
                              .tensor_scale_of = torchao_tensor_scale,
                              .prepare = torchao_prepare,
                              .block_scale = torchao_block_scale,
                              .factor = torchao_factor,
                              .decode = nvfp4_decode },
    [NIB_DIALECT_MODELOPT] = { .name = "modelopt",
                               .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
                               .plain = true,
                               .divides = true,
                               .drops_zero_sign = true,
                               .tensor_scale_of = modelopt_tensor_scale,
                               .prepare = modelopt_prepare,
                               .block_scale = modelopt_block_scale,
                               .factor = modelopt_factor,
                               .decode = nvfp4_decode },
    [NIB_DIALECT_COMPRESSED_TENSORS] = { .name = "compressed-tensors",
                                         .tensor_scale = NIB_TENSOR_SCALE_DIVISOR,
                                         .plain = true,
                                         .divides = true,
                                         .drops_zero_sign = true,
                                         .tensor_scale_of = ct_tensor_scale,
                                         .prepare = ct_prepare,
                                         .block_scale = ct_block_scale,
                                         .factor = ct_factor,
                                         .decode = nvfp4_decode },
};

/* ---- Float8: a scale per tensor, or per block of 128 ---- */

static float largest_of(nib_dtype dtype)
{
    if (dtype == NIB_BF16)
        return nib_f32_from_bf16(0x7F7F);
    return dtype == NIB_F16 ? 65504.0f : FLT_MAX;
}

/* The multiplier that brings amax to the largest element. Where that overflows it is `limit`. */
static float float8_scale(float amax, float limit, const struct nib_rules *rules)
{
    const float a = amax < rules->amax_epsilon ? rules->amax_epsilon : amax;
    if (!(a > 0 && a <= FLT_MAX)) /* zero, infinite or NaN */
        return 1.0f;
    const float quotient = rules->element_max / a, scale = quotient <= FLT_MAX ? quotient : limit;
    return rules->pow2 ? nib_float(nib_bits(scale) & 0xFF800000u) : scale; /* toward zero, so that nothing overflows */
}

static float float8_encode(float amax, const struct nib_rules *rules) { return float8_scale(amax, FLT_MAX, rules); }

static void nothing_to_prepare(struct nib_scaler *scaler, const struct nib_rules *rules) { (void)scaler, (void)rules; }

static float float8_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                           const struct nib_rules *rules)
{
    (void)scale, (void)block_amax, (void)rules;
    return scaler->encode;
}

static float float8_decode(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    (void)scale, (void)rules;
    return tensor_scale;
}

const struct nib_dialect_facts nib_float8_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER,
                         .encode_of = float8_encode,
                         .prepare = nothing_to_prepare,
                         .factor = float8_factor,
                         .decode = float8_decode },
};

/* Within blocks the scale is limited by what the input's dtype can hold. The decoder's inverse is what is stored. */
static float float8_block_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                                 const struct nib_rules *rules)
{
    (void)scale, (void)scaler;
    return float8_scale(block_amax, largest_of(rules->input), rules);
}

static nib_scale_bits float8_block_scale(float block_amax, const struct nib_scaler *scaler,
                                         const struct nib_rules *rules)
{
    return nib_bits(1.0f / float8_block_factor(0, block_amax, scaler, rules));
}

static float float8_block_decode(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    (void)tensor_scale, (void)rules;
    return nib_float(scale);
}

const struct nib_dialect_facts nib_float8_block_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_NONE,
                         .prepare = nothing_to_prepare,
                         .block_scale = float8_block_scale,
                         .factor = float8_block_factor,
                         .decode = float8_block_decode },
};

/* ---- MX: a power of two per block of 32 ---- */

static nib_scale_bits mx_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)scaler;
    if (rules->mx_rule == NIB_MX_CEIL)
        return nib_e8m0_from_f32(block_amax * (1.0f / rules->element_max));
    /* Exponent fields subtract as exponents do; a subnormal amax counts as 2^-127. */
    const int exponent = (int)(nib_bits(block_amax) >> 23), largest = (int)(nib_bits(rules->element_max) >> 23) - 127;
    return (nib_scale_bits)(exponent > largest ? exponent - largest : 0);
}

/* 2^-e by the bits; 2^127 has a subnormal inverse. */
static float mx_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                       const struct nib_rules *rules)
{
    (void)block_amax, (void)scaler, (void)rules;
    if (scale >= 254)
        return nib_float(scale == 254 ? 0x00400000u : 0x7FC00000u);
    return nib_float((254 - scale) << 23);
}

static float mx_decode(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    (void)tensor_scale, (void)rules;
    return nib_f32_from_e8m0((uint8_t)scale);
}

const struct nib_dialect_facts nib_mx_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_NONE,
                         .prepare = nothing_to_prepare,
                         .block_scale = mx_block_scale,
                         .factor = mx_factor,
                         .decode = mx_decode },
};

/* ---- Names: those of NVFP4's rows, which has them all ---- */

const char *nib_dialect_name(nib_dialect dialect)
{
    return (unsigned)dialect < NIB_DIALECT_COUNT ? nib_nvfp4_dialects[dialect].name : NULL;
}

nib_status nib_dialect_from_name(const char *name, nib_dialect *out)
{
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    for (int i = 0; i < NIB_DIALECT_COUNT; i++)
        if (strcmp(name, nib_nvfp4_dialects[i].name) == 0) {
            *out = (nib_dialect)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_ARG, "there is no dialect \"%s\"", name);
}
