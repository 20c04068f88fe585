/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dialect.c - the table of dialects.
 */
#include "dialect.h"

#include <float.h>

#include "codec.h"

static const float one_sixth = 1.0f / 6.0f; /* 0x3E2AAAAB */

/* ---- te: TransformerEngine ---- */

/* Up to the next power of two, by the bits: x is positive and normal. */
static float round_up_to_pow2(float x)
{
    const uint32_t bits = nib_bits(x);
    return nib_float((bits & 0x7FFFFFu) ? (bits & 0x7F800000u) + 0x00800000u : bits);
}

static float te_level(float amax, const struct nib_rules *rules)
{
    if (rules->level == NIB_LEVEL_AMAX)
        return amax;
    /* A checkpoint's decode scale must be a normal number, since loaders take its reciprocal. For a tensor of zeros that is
     * 1, the scale that an amax of 0 stands for below. */
    if (amax == 0)
        return 1;
    const float g = nib_fmax(amax / rules->full_scale, FLT_MIN);
    return rules->pow2 ? round_up_to_pow2(g) : g;
}

static void te_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    const float amax = rules->level == NIB_LEVEL_AMAX ? scaler->level : scaler->level * rules->full_scale;
    float encode = nib_fmin(rules->full_scale / amax, FLT_MAX); /* nib_fmin also turns a NaN into FLT_MAX */
    if (amax == 0 || encode == 0)                               /* nothing to scale, or an infinite amax */
        encode = 1;
    scaler->amax = amax;
    scaler->encode = encode;
    scaler->decode = 1.0f / encode;
    scaler->block = encode * one_sixth;
}

static uint8_t te_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    return nib_e4m3_from_f32(nib_fmin(block_amax * scaler->block, FLT_MAX));
}

/* A scale of 0 gives FLT_MAX: the codes of a block that underflowed are +-6, and decode to 0 all the same. */
static float te_factor(uint8_t scale, const struct nib_scaler *scaler)
{
    return nib_fmin(1.0f / (nib_f32_from_e4m3(scale) * scaler->decode), FLT_MAX);
}

/* ---- gist ---- */

/* The level is the encode scale. PyTorch divides a number by a tensor as reciprocal times number: two roundings. */
static float gist_level(float amax, const struct nib_rules *rules) { return (1.0f / amax) * rules->full_scale; }

static void gist_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->encode = scaler->level;
}

static uint8_t gist_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    return nib_e4m3_from_f32(block_amax / 6.0f * scaler->encode);
}

static float gist_factor(uint8_t scale, const struct nib_scaler *scaler)
{
    const float s = nib_f32_from_e4m3(scale);
    return scaler->encode / (s < 1e-12f ? 1e-12f : s);
}

/* ---- torchao ---- */

static float torchao_level(float amax, const struct nib_rules *rules)
{
    return rules->single_level ? 1.0f : amax / rules->full_scale;
}

static void torchao_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->decode = scaler->level;
    scaler->encode = 1.0f / scaler->level;
}

/* Between the smallest normal scale and the largest; a NaN (0/0 in a tensor of zeros) stays one. */
static uint8_t torchao_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    const float s = block_amax / 6.0f / scaler->decode;
    return nib_e4m3_from_f32(s < 0x1p-6f ? 0x1p-6f : s);
}

static float torchao_factor(uint8_t scale, const struct nib_scaler *scaler)
{
    return scaler->encode / nib_f32_from_e4m3(scale);
}

/* ---- modelopt ---- */

static float modelopt_level(float amax, const struct nib_rules *rules) { return amax / rules->full_scale; }

static void modelopt_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->decode = scaler->level;
    scaler->block = 6.0f * scaler->level;
}

static uint8_t modelopt_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    const float s = block_amax / scaler->block;
    if (nib_is_nan(s)) /* 0/0, a tensor of zeros: the peer writes the NaN that x86 makes, sign and all */
        return 0xFF;
    if (s == 0)
        return 0x38; /* 1.0 */
    return nib_e4m3_from_f32(nib_fmax(s, 0x1p-9f));
}

static float modelopt_factor(uint8_t scale, const struct nib_scaler *scaler)
{
    return nib_f32_from_e4m3(scale) * scaler->decode;
}

/* ---- compressed-tensors ---- */

static float round_to(nib_dtype dtype, float x)
{
    if (dtype == NIB_BF16)
        return nib_f32_from_bf16(nib_bf16_from_f32(x));
    return dtype == NIB_F16 ? nib_f32_from_f16(nib_f16_from_f32(x)) : x;
}

/* The divisor, computed in the dtype of the weights by reciprocal and product. */
static float ct_level(float amax, const struct nib_rules *rules)
{
    const float tiny = rules->input == NIB_F16 ? 0x1p-14f : FLT_MIN; /* smallest normal; BF16 has FP32's */
    const float reciprocal = round_to(rules->input, 1.0f / nib_fmax(amax, tiny));
    const float level = round_to(rules->input, reciprocal * rules->full_scale);
    return level <= FLT_MAX ? level : 1.0f; /* for a NaN too */
}

static void ct_prepare(struct nib_scaler *scaler, const struct nib_rules *rules)
{
    (void)rules;
    scaler->encode = scaler->level;
}

static uint8_t ct_block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_rules *rules)
{
    const uint8_t scale = nib_e4m3_from_f32(scaler->encode * round_to(rules->input, block_amax / 6.0f));
    return scale ? scale : 0x20; /* 0.125 where it would be 0 */
}

static float ct_factor(uint8_t scale, const struct nib_scaler *scaler)
{
    return nib_f32_from_e4m3(scale) / scaler->encode;
}

/* ---- The table ---- */

const struct nib_dialect_facts nib_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .level = NIB_LEVEL_AMAX,
                         .level_of = te_level,
                         .prepare = te_prepare,
                         .block_scale = te_block_scale,
                         .factor = te_factor },
    [NIB_DIALECT_GIST] = { .name = "gist",
                           .level = NIB_LEVEL_ENCODE,
                           .plain = true,
                           .keeps_nan_sign = true,
                           .level_of = gist_level,
                           .prepare = gist_prepare,
                           .block_scale = gist_block_scale,
                           .factor = gist_factor },
    [NIB_DIALECT_TORCHAO] = { .name = "torchao",
                              .level = NIB_LEVEL_DECODE,
                              .plain = true,
                              .level_of = torchao_level,
                              .prepare = torchao_prepare,
                              .block_scale = torchao_block_scale,
                              .factor = torchao_factor },
    [NIB_DIALECT_MODELOPT] = { .name = "modelopt",
                               .level = NIB_LEVEL_DECODE,
                               .plain = true,
                               .divides = true,
                               .drops_zero_sign = true,
                               .level_of = modelopt_level,
                               .prepare = modelopt_prepare,
                               .block_scale = modelopt_block_scale,
                               .factor = modelopt_factor },
    [NIB_DIALECT_COMPRESSED_TENSORS] = { .name = "compressed-tensors",
                                         .level = NIB_LEVEL_ENCODE,
                                         .plain = true,
                                         .divides = true,
                                         .drops_zero_sign = true,
                                         .level_of = ct_level,
                                         .prepare = ct_prepare,
                                         .block_scale = ct_block_scale,
                                         .factor = ct_factor },
};

const char *nib_dialect_name(nib_dialect dialect)
{
    return (unsigned)dialect < NIB_DIALECT_COUNT ? nib_dialects[dialect].name : NULL;
}

nib_status nib_dialect_from_name(const char *name, nib_dialect *out)
{
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    for (int i = 0; i < NIB_DIALECT_COUNT; i++)
        if (strcmp(name, nib_dialects[i].name) == 0) {
            *out = (nib_dialect)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_ARG, "there is no dialect \"%s\"", name);
}

struct nib_rules nib_rules_of(const nib_quantizer *q, nib_dtype input)
{
    const bool decode = q->tensor_scale != NIB_TENSOR_SCALE_DIALECT;
    return (struct nib_rules){ .level = decode ? NIB_LEVEL_DECODE : nib_dialects[q->dialect].level,
                               .full_scale = 6.0f * (float)q->e4m3_max,
                               .pow2 = q->tensor_scale == NIB_TENSOR_SCALE_POW2,
                               .single_level = q->single_level,
                               .input = input };
}

float nib_decode_factor(uint8_t scale, float level, nib_level kind, float full_scale)
{
    const float s = nib_f32_from_e4m3(scale);
    if (kind == NIB_LEVEL_AMAX)
        return s * level * (1.0f / full_scale); /* left to right, so s * amax may overflow, as TE's does */
    return kind == NIB_LEVEL_DECODE ? s * level : s / level;
}

float nib_decode_scale(float level, nib_level kind, float full_scale)
{
    if (kind == NIB_LEVEL_AMAX)
        return level / full_scale;
    return kind == NIB_LEVEL_DECODE ? level : 1.0f / level;
}
