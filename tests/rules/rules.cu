/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rules.cu - every function of codec.h, philox.h and rules.h on random blocks: one line per part, a hash of all results.
 *
 * tests/hygiene.py compiles this file as C11, as C++17 and by nvcc, and the lines must be the same. By nvcc the blocks
 * are computed on a device; where there is none the program says so and exits with 77.
 */
#include <stdio.h>
#include <stdlib.h>

#include "format/rules.h"

enum { BLOCKS = 1 << 15 };
enum { CODECS, TENSOR_SCALES, TE, OTHER_DIALECTS, FLOAT8, MX, ELEMENTS, RANDOM, RHT, FOUR_OVER_SIX, SWEEP, PARTS };

struct block {
    uint32_t index;
    uint32_t random[NIB_BLOCK];
    float x[NIB_BLOCK], amax, tensor_amax;
    nib_dtype input;
    struct nib_rules rules;
    uint32_t *hash; /* of the part that is computed */
};

NIB_INLINE void mix(const struct block *b, uint32_t value) { *b->hash = (*b->hash ^ value) * 16777619u; }
NIB_INLINE void mix_float(const struct block *b, float value) { mix(b, nib_bits(nib_quiet(value))); }
NIB_INLINE void mix_double(const struct block *b, double value)
{
    uint64_t bits = 0; /* of any NaN */
    if (value == value)
        memcpy(&bits, &value, sizeof bits);
    mix(b, (uint32_t)bits);
    mix(b, (uint32_t)(bits >> 32));
}
NIB_INLINE void mix_block(const struct block *b, const float x[NIB_BLOCK])
{
    for (int i = 0; i < NIB_BLOCK; i++)
        mix_float(b, x[i]);
}

/* Most blocks have values around 1, some of them few bits, so that there are ties; some have any bits at all. */
NIB_INLINE float some_value(uint32_t bits, uint32_t index)
{
    if (index % 8 == 7)
        return nib_float(bits);
    const uint32_t kept = index % 2 ? 0x807FFFFFu : 0x80600000u;
    return nib_float((bits & kept) | (120 + (bits >> 23 & 7)) << 23);
}

NIB_INLINE void make_block(struct block *b, uint32_t index)
{
    b->index = index;
    nib_random_block(NIB_ROUND_STOCHASTIC_24, 20261115, 0, index, 0, b->random);
    b->input = index % 3 == 0 ? NIB_F32 : index % 3 == 1 ? NIB_BF16 : NIB_F16;
    b->amax = 0;
    for (int i = 0; i < NIB_BLOCK; i++) {
        uint32_t words[4];
        nib_random_words(index, 1, (uint32_t)i, nib_random_column(index, i % 2), words);
        b->x[i] = nib_round_to(b->input, some_value(words[0], index));
        b->amax = nib_fmax(b->amax, nib_abs(b->x[i]));
    }
    b->tensor_amax = index % 16 == 15 ? b->x[0] * 0.0f : b->amax * nib_abs(some_value(b->random[0] << 8, index));
    b->rules.tensor_scale = index % 5 < 3 ? NIB_TENSOR_SCALE_AMAX : NIB_TENSOR_SCALE_MULTIPLIER;
    b->rules.element = NIB_E2M1;
    b->rules.element_max = 6;
    b->rules.full_scale = index % 7 ? 2688 : 1536;
    b->rules.pow2 = index % 5 == 3;
    b->rules.no_tensor_scale = index % 11 == 0;
    b->rules.mx_rule = index % 2 ? NIB_MX_CEIL : NIB_MX_FLOOR;
    b->rules.amax_epsilon = index % 4 ? 0 : 1e-3f;
    b->rules.input = b->input;
}

NIB_INLINE void codecs(const struct block *b)
{
    for (int i = 0; i < NIB_BLOCK; i++) {
        const float x = b->x[i];
        const uint8_t byte = (uint8_t)b->random[i];
        const uint16_t half = (uint16_t)b->random[i];
        mix(b, nib_e2m1_from_f32(x) | (uint32_t)nib_e4m3_from_f32(x) << 8 | (uint32_t)nib_e5m2_from_f32(x) << 16 |
                   (uint32_t)nib_e8m0_from_f32(x) << 24);
        mix(b, nib_bf16_from_f32(x) | (uint32_t)nib_f16_from_f32(x) << 16);
        mix_float(b, nib_f32_from_e2m1(byte & 15));
        mix_float(b, nib_f32_from_e4m3(byte));
        mix_float(b, nib_f32_from_e5m2(byte));
        mix_float(b, nib_f32_from_e8m0(byte));
        mix_float(b, nib_f32_from_bf16(half));
        mix_float(b, nib_f32_from_f16(half));
        const float factor = b->x[(i + 1) % NIB_BLOCK], addend = b->x[(i + 2) % NIB_BLOCK] * nib_float(byte << 23);
        mix_float(b, nib_fma(x, factor, addend));
        mix_double(b, nib_fma_to_odd(x, factor, addend));
        uint32_t words[4];
        nib_philox_block(b->random, b->random + 4, words);
        mix(b, words[i % 4]);
        mix_float(b, nib_f32_from_minifloat(byte & 31, 2, 3));
        mix(b, nib_is_nan(x) ? 0 : nib_minifloat_magnitude(x, 4, 6));
        float stored[2] = { 0, 0 };
        nib_store_value(&stored[1], b->input, x);
        mix_float(b, nib_load_value(stored, b->input == NIB_F32 ? 1 : 2, b->input));
    }
}

NIB_INLINE void tensor_scales(const struct block *b)
{
    const float unbiased = nib_unbiased_amax(b->tensor_amax);
    mix_float(b, nib_te_tensor_scale(unbiased, &b->rules));
    mix_float(b, nib_te_tensor_scale(b->tensor_amax, &b->rules));
    mix_float(b, nib_gist_tensor_scale(b->tensor_amax, &b->rules));
    mix_float(b, nib_torchao_tensor_scale(b->tensor_amax, &b->rules));
    mix_float(b, nib_modelopt_tensor_scale(b->tensor_amax, &b->rules));
    mix_float(b, nib_ct_tensor_scale(b->tensor_amax, &b->rules));
    mix_float(b, nib_float8_scale(b->tensor_amax, &b->rules));
    mix_float(b, nib_scale_inv(b->tensor_amax, &b->rules));
    mix_float(b, nib_round_up_to_pow2(nib_fmax(nib_fmin(b->amax, 1e30f), FLT_MIN)));
}

NIB_INLINE struct nib_scaler te_scaler(const struct block *b)
{
    struct nib_scaler scaler;
    scaler.tensor_scale = nib_te_tensor_scale(b->tensor_amax, &b->rules);
    nib_te_prepare(&scaler, &b->rules);
    return scaler;
}

/* Codes by te's rule under a scale. */
NIB_INLINE void te_codes(const struct block *b, nib_scale_bits scale, const struct nib_scaler *scaler,
                         uint8_t out[NIB_BLOCK])
{
    const float factor = nib_te_factor(scale, b->amax, scaler, &b->rules);
    for (int i = 0; i < NIB_BLOCK; i++)
        out[i] = nib_e2m1_from_f32(b->x[i] * factor);
}

NIB_INLINE void te(const struct block *b)
{
    const struct nib_scaler scaler = te_scaler(b);
    const nib_scale_bits scale = nib_at_least((uint8_t)nib_te_block_scale(b->amax, &scaler, &b->rules), b->index % 4);
    uint8_t codes[NIB_BLOCK];
    mix(b, scale << 8 | nib_te_unbiased_block_scale(b->amax, &scaler));
    mix_float(b, scaler.amax);
    mix_float(b, scaler.scale);
    mix_float(b, scaler.scale_inv);
    te_codes(b, scale, &scaler, codes);
    const float factor = nib_nvfp4_decode_factor(scale, scaler.tensor_scale, &b->rules);
    for (int i = 0; i < NIB_BLOCK; i++) {
        mix(b, codes[i]);
        mix_float(b, nib_f32_from_e2m1(codes[i]) * factor);
    }
}

NIB_INLINE void other_dialects(const struct block *b)
{
    struct nib_scaler scaler;
    scaler.tensor_scale = nib_gist_tensor_scale(b->tensor_amax, &b->rules);
    nib_divisor_prepare(&scaler, &b->rules);
    nib_scale_bits scale = nib_gist_block_scale(b->amax, &scaler, &b->rules);
    mix(b, scale);
    mix_float(b, nib_gist_factor(scale, b->amax, &scaler, &b->rules));
    scaler.tensor_scale = nib_torchao_tensor_scale(b->tensor_amax, &b->rules);
    nib_torchao_prepare(&scaler, &b->rules);
    scale = nib_torchao_block_scale(b->amax, &scaler, &b->rules);
    mix(b, scale);
    mix_float(b, nib_torchao_factor(scale, b->amax, &scaler, &b->rules));
    scaler.tensor_scale = nib_modelopt_tensor_scale(b->tensor_amax, &b->rules);
    nib_modelopt_prepare(&scaler, &b->rules);
    scale = nib_modelopt_block_scale(b->amax, &scaler, &b->rules);
    mix(b, scale);
    mix_float(b, nib_modelopt_factor(scale, b->amax, &scaler, &b->rules));
    scaler.tensor_scale = nib_ct_tensor_scale(b->tensor_amax, &b->rules);
    nib_divisor_prepare(&scaler, &b->rules);
    scale = nib_ct_block_scale(b->amax, &scaler, &b->rules);
    mix(b, scale);
    mix_float(b, nib_ct_factor(scale, b->amax, &scaler, &b->rules));
}

NIB_INLINE void float8(const struct block *b)
{
    struct nib_scaler scaler;
    scaler.scale = nib_float8_limited_scale(b->amax, nib_largest_of(b->input), &b->rules);
    nib_no_prepare(&scaler, &b->rules);
    const nib_scale_bits scale = nib_float8_block_scale(b->amax, &scaler, &b->rules);
    mix_float(b, nib_float8_factor(0, 0, &scaler, &b->rules));
    mix_float(b, nib_float8_decode_factor(0, scaler.scale, &b->rules));
    mix_float(b, nib_float8_block_factor(scale, b->amax, &scaler, &b->rules));
    mix_float(b, nib_float8_block_decode_factor(scale, 0, &b->rules));
}

NIB_INLINE void mx(const struct block *b)
{
    const nib_scale_bits scale = nib_mx_block_scale(b->amax, NULL, &b->rules);
    mix(b, scale);
    mix_float(b, nib_mx_factor(scale, b->amax, NULL, &b->rules));
    mix_float(b, nib_mx_decode_factor(scale, 0, &b->rules));
}

NIB_INLINE void elements(const struct block *b)
{
    struct nib_element_rule rule;
    rule.divides = b->index % 2;
    rule.drops_zero_sign = b->index % 3 == 0;
    rule.keeps_nan_sign = b->index % 5 == 0;
    for (int i = 0; i < NIB_BLOCK; i++) {
        const float y = nib_scaled(b->x[i], i % 4 ? 1.5f : 0.0f, rule.divides);
        mix(b, nib_e2m1_nearest(b->x[i], y, &rule));
    }
}

NIB_INLINE void random_rounding(const struct block *b)
{
    for (int rounding = NIB_ROUND_STOCHASTIC_8; rounding <= NIB_ROUND_STOCHASTIC_UNBIASED; rounding++) {
        const int bits = nib_random_bits((nib_rounding)rounding);
        uint32_t random[NIB_BLOCK];
        nib_random_block((nib_rounding)rounding, b->index, ~(uint64_t)1, b->index,
                         nib_random_column(b->index, b->index % 2), random);
        for (int i = 0; i < NIB_BLOCK; i++)
            mix(b, random[i] << 4 | nib_e2m1_stochastic(b->x[i], random[i], bits));
    }
}

NIB_INLINE void rht(const struct block *b)
{
    float x[NIB_BLOCK];
    memcpy(x, b->x, sizeof x);
    nib_rht_forward(x, (uint16_t)b->random[0], b->input);
    mix_block(b, x);
    nib_rht_inverse(x, (uint16_t)b->random[0]);
    mix_block(b, x);
    nib_rht_signs(x, (uint16_t)b->random[1]);
    nib_rht_butterflies(x);
    mix_block(b, x);
}

NIB_INLINE void four_over_six(const struct block *b)
{
    const struct nib_scaler scaler = te_scaler(b);
    for (int i = 0; i < 8; i++) { /* to 4 and to 6, both errors, exact and fast */
        const uint8_t scale = nib_4over6_scale(b->amax, i & 1, &scaler, (uint8_t)(b->index % 4));
        uint8_t codes[NIB_BLOCK];
        te_codes(b, scale, &scaler, codes);
        mix(b, scale);
        mix_float(b, nib_4over6_error(b->x, codes, NIB_BLOCK, scale, &scaler, &b->rules,
                                      i & 2 ? NIB_ERROR_MAE : NIB_ERROR_MSE, i & 4));
    }
    float x[NIB_BLOCK];
    memcpy(x, b->x, sizeof x);
    mix_float(b, nib_tree_sum(x));
}

NIB_INLINE void sweep(const struct block *b)
{
    const struct nib_scaler scaler = te_scaler(b);
    const int rtn = (int)nib_te_block_scale(b->amax, &scaler, &b->rules);
    float squares[NIB_BLOCK], importance[NIB_BLOCK];
    for (int i = 0; i < NIB_BLOCK; i++)
        squares[i] = b->index % 8 == 0 ? 0 : nib_fmin(nib_abs(b->x[NIB_BLOCK - 1 - i]), FLT_MAX);
    nib_importance_block(squares, NIB_BLOCK, nib_importance_mean(squares, NIB_BLOCK), importance);
    for (int i = 0; i < NIB_BLOCK; i++)
        mix_float(b, importance[i]);
    for (int i = 0; i < NIB_SWEEP_CANDIDATES; i++) {
        const int code = rtn + nib_sweep_offset(i);
        if (!nib_sweep_allows(code, rtn, (uint8_t)(b->index % 4)))
            continue;
        uint8_t codes[NIB_BLOCK];
        te_codes(b, (nib_scale_bits)code, &scaler, codes);
        mix(b, (uint32_t)code);
        mix_float(b, nib_sweep_error(b->x, codes, 1 + (int)(b->index % NIB_BLOCK), (uint8_t)code,
                                     nib_scale_inv(scaler.tensor_scale, &b->rules)));
        mix_float(b, nib_weighted_sweep_error(b->x, codes, 1 + (int)(b->index % NIB_BLOCK), (uint8_t)code,
                                              nib_scale_inv(scaler.tensor_scale, &b->rules), importance));
    }
}

NIB_INLINE void compute(uint32_t index, uint32_t out[PARTS])
{
    struct block b;
    make_block(&b, index);
    for (int part = 0; part < PARTS; part++)
        out[part] = index;
    b.hash = &out[CODECS], codecs(&b);
    b.hash = &out[TENSOR_SCALES], tensor_scales(&b);
    b.hash = &out[TE], te(&b);
    b.hash = &out[OTHER_DIALECTS], other_dialects(&b);
    b.hash = &out[FLOAT8], float8(&b);
    b.hash = &out[MX], mx(&b);
    b.hash = &out[ELEMENTS], elements(&b);
    b.hash = &out[RANDOM], random_rounding(&b);
    b.hash = &out[RHT], rht(&b);
    b.hash = &out[FOUR_OVER_SIX], four_over_six(&b);
    b.hash = &out[SWEEP], sweep(&b);
}

#ifdef __CUDACC__

static __global__ void compute_all(uint32_t *out)
{
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    compute(index, out + index * PARTS);
}

static int run(uint32_t *out)
{
    const size_t bytes = sizeof(uint32_t) * BLOCKS * PARTS;
    uint32_t *device = NULL;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("there is no CUDA device\n");
        return 77;
    }
    cudaError_t error = cudaMalloc((void **)&device, bytes);
    if (!error) {
        compute_all<<<BLOCKS / 128, 128>>>(device);
        error = cudaGetLastError();
    }
    if (!error)
        error = cudaMemcpy(out, device, bytes, cudaMemcpyDeviceToHost);
    if (error)
        printf("%s\n", cudaGetErrorString(error));
    cudaFree(device);
    return error ? 1 : 0;
}

#else

static int run(uint32_t *out)
{
    for (uint32_t index = 0; index < BLOCKS; index++)
        compute(index, out + index * PARTS);
    return 0;
}

#endif

int main(void)
{
    static const char *const names[PARTS] = { "codecs",   "tensor scales", "te",  "other dialects", "float8", "mx",
                                              "elements", "random",        "rht", "four over six",  "sweep" };
    static uint32_t out[BLOCKS * PARTS];
    const int status = run(out);
    if (status)
        return status;
    for (int part = 0; part < PARTS; part++) {
        uint32_t hash = 2166136261u;
        for (uint32_t index = 0; index < BLOCKS; index++)
            hash = (hash ^ out[index * PARTS + (uint32_t)part]) * 16777619u;
        printf("%s %08x\n", names[part], (unsigned)hash);
    }
    return 0;
}
