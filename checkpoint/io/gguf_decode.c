/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_decode.c - values of GGML's blocks, as ggml itself computes them: one product or one product and one sum, each
 * rounded to FP32, of what a block's scales give once.
 *
 * Of the two nibbles of a byte the low one always comes first, but its neighbor is 16 or 32 elements later. Scales of
 * the types with a K are themselves integers of 4 or 6 bits beside one F16 per 256 elements.
 */
#include "io/gguf.h"

#include "format/codec.h"

static float half_at(const uint8_t *bytes)
{
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
    return nib_f32_from_f16(bits);
}

static uint32_t word_at(const uint8_t *bytes)
{
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

/* ---- Blocks of 32 ---- */

enum { HALF = 16 };

static void decode_q4_0(const uint8_t *block, float *out)
{
    const float d = half_at(block);
    for (int i = 0; i < HALF; i++) {
        out[i] = d * (float)((block[2 + i] & 15) - 8);
        out[i + HALF] = d * (float)((block[2 + i] >> 4) - 8);
    }
}

static void decode_q4_1(const uint8_t *block, float *out)
{
    const float d = half_at(block), least = half_at(block + 2);
    for (int i = 0; i < HALF; i++) {
        out[i] = d * (float)(block[4 + i] & 15) + least;
        out[i + HALF] = d * (float)(block[4 + i] >> 4) + least;
    }
}

static void decode_q5_0(const uint8_t *block, float *out)
{
    const float d = half_at(block);
    const uint32_t fifth = word_at(block + 2);
    for (int i = 0; i < HALF; i++) {
        out[i] = d * (float)((int)((block[6 + i] & 15u) | (fifth >> i & 1) << 4) - 16);
        out[i + HALF] = d * (float)((int)(block[6 + i] >> 4 | (fifth >> (i + HALF) & 1) << 4) - 16);
    }
}

static void decode_q5_1(const uint8_t *block, float *out)
{
    const float d = half_at(block), least = half_at(block + 2);
    const uint32_t fifth = word_at(block + 4);
    for (int i = 0; i < HALF; i++) {
        out[i] = d * (float)((block[8 + i] & 15u) | (fifth >> i & 1) << 4) + least;
        out[i + HALF] = d * (float)(block[8 + i] >> 4 | (fifth >> (i + HALF) & 1) << 4) + least;
    }
}

static void decode_q8_0(const uint8_t *block, float *out)
{
    const float d = half_at(block);
    for (int i = 0; i < 2 * HALF; i++)
        out[i] = d * (float)(int8_t)block[2 + i];
}

/* The codes of the types IQ4 are not evenly spaced. */
static const int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

static void decode_iq4(const uint8_t *codes, float d, float *out)
{
    for (int i = 0; i < HALF; i++) {
        out[i] = d * (float)iq4_values[codes[i] & 15];
        out[i + HALF] = d * (float)iq4_values[codes[i] >> 4];
    }
}

static void decode_iq4_nl(const uint8_t *block, float *out) { decode_iq4(block + 2, half_at(block), out); }

/* ---- Blocks of 256 ---- */

enum { SUPER = 256 };

/* Scale and minimum of sub-block i of the eight of Q4_K and Q5_K: 6 bits each, in 12 bytes. */
static void six_bits(const uint8_t *packed, int i, int *scale, int *least)
{
    if (i < 4) {
        *scale = packed[i] & 63;
        *least = packed[i + 4] & 63;
    } else {
        *scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
        *least = packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
    }
}

static void decode_q2_k(const uint8_t *block, float *out)
{
    const uint8_t *scales = block, *codes = block + 16;
    const float d = half_at(block + 80), dmin = half_at(block + 82);
    for (int i = 0; i < SUPER; i++) {
        const uint8_t scale = scales[i / 16];
        const int code = codes[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
        out[i] = d * (float)(scale & 15) * (float)code - dmin * (float)(scale >> 4);
    }
}

static void decode_q3_k(const uint8_t *block, float *out)
{
    const uint8_t *high = block, *codes = block + 32, *packed = block + 96;
    const float d = half_at(block + 108);
    for (int i = 0; i < SUPER; i++) {
        const int s = i / 16; /* scales: 4 bits in the first 8 bytes, the other 2 in the last 4 */
        const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
        const int scale = (low | (packed[8 + s % 4] >> (2 * (s / 4)) & 3) << 4) - 32;
        const int code = codes[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
        const int third = high[i % 32] >> (i / 32) & 1;
        out[i] = d * (float)scale * (float)(code - (third ? 0 : 4));
    }
}

static void decode_q4_k(const uint8_t *block, float *out)
{
    const float d = half_at(block), dmin = half_at(block + 2);
    const uint8_t *codes = block + 16;
    for (int i = 0; i < 8; i++) {
        int scale, least;
        six_bits(block + 4, i, &scale, &least);
        const float factor = d * (float)scale, below = dmin * (float)least;
        for (int j = 0; j < 32; j++)
            out[32 * i + j] = factor * (float)(codes[i / 2 * 32 + j] >> (4 * (i % 2)) & 15) - below;
    }
}

static void decode_q5_k(const uint8_t *block, float *out)
{
    const float d = half_at(block), dmin = half_at(block + 2);
    const uint8_t *high = block + 16, *codes = block + 48;
    for (int i = 0; i < 8; i++) {
        int scale, least;
        six_bits(block + 4, i, &scale, &least);
        const float factor = d * (float)scale, below = dmin * (float)least;
        for (int j = 0; j < 32; j++) {
            const int code = (codes[i / 2 * 32 + j] >> (4 * (i % 2)) & 15) | (high[j] >> i & 1) << 4;
            out[32 * i + j] = factor * (float)code - below;
        }
    }
}

static void decode_q6_k(const uint8_t *block, float *out)
{
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    const float d = half_at(block + 208);
    for (int i = 0; i < SUPER; i++) {
        const int part = i / 128, quarter = i / 32 % 4, j = i % 32;
        const int nibble = low[part * 64 + quarter % 2 * 32 + j] >> (4 * (quarter / 2)) & 15;
        const int code = (nibble | (high[part * 32 + j] >> (2 * quarter) & 3) << 4) - 32;
        out[i] = d * (float)(int8_t)scales[i / 16] * (float)code;
    }
}

static void decode_iq4_xs(const uint8_t *block, float *out)
{
    const float d = half_at(block);
    const unsigned high = (unsigned)block[2] | (unsigned)block[3] << 8;
    for (int i = 0; i < 8; i++) {
        const int scale = (int)((block[4 + i / 2] >> (4 * (i % 2)) & 15u) | (high >> (2 * i) & 3) << 4) - 32;
        decode_iq4(block + 8 + 16 * i, d * (float)scale, out + 32 * i);
    }
}

/* ---- The table ---- */

static void (*const decoders[])(const uint8_t *block, float *out) = {
    [NIB_GGUF_Q4_0] = decode_q4_0, [NIB_GGUF_Q4_1] = decode_q4_1,     [NIB_GGUF_Q5_0] = decode_q5_0,
    [NIB_GGUF_Q5_1] = decode_q5_1, [NIB_GGUF_Q8_0] = decode_q8_0,     [NIB_GGUF_Q2_K] = decode_q2_k,
    [NIB_GGUF_Q3_K] = decode_q3_k, [NIB_GGUF_Q4_K] = decode_q4_k,     [NIB_GGUF_Q5_K] = decode_q5_k,
    [NIB_GGUF_Q6_K] = decode_q6_k, [NIB_GGUF_IQ4_NL] = decode_iq4_nl, [NIB_GGUF_IQ4_XS] = decode_iq4_xs,
};

void nib_gguf_decode(uint32_t type, const void *in, size_t blocks, float *out)
{
    const struct nib_gguf_type_facts *facts = nib_gguf_type_facts(type);
    const uint8_t *block = in;
    for (size_t i = 0; i < blocks; i++, block += facts->bytes, out += facts->elements)
        decoders[type](block, out);
}
