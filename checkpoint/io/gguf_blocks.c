/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_blocks.c - the nibbles of NVFP4 and MXFP4 between the order of safetensors and that of GGUF, 16 at a time.
 *
 * Sixteen elements are a word of 64 bits, element j its nibble j. GGUF wants nibble 2j to be element j and nibble 2j+1
 * element j+8: a perfect shuffle of the two halves, which is three exchanges of neighbors.
 */
#include "io/gguf.h"

/* Exchange the bits of `mask` with those `distance` above them. */
static inline uint64_t exchange(uint64_t word, uint64_t mask, int distance)
{
    const uint64_t differ = (word >> distance ^ word) & mask;
    return word ^ differ ^ differ << distance;
}

static inline uint64_t interleave(uint64_t word)
{
    word = exchange(word, 0x00000000FFFF0000u, 16);
    word = exchange(word, 0x0000FF000000FF00u, 8);
    return exchange(word, 0x00F000F000F000F0u, 4);
}

static inline uint64_t separate(uint64_t word)
{
    word = exchange(word, 0x00F000F000F000F0u, 4);
    word = exchange(word, 0x0000FF000000FF00u, 8);
    return exchange(word, 0x00000000FFFF0000u, 16);
}

enum { SUB_BYTES = 8 };

/* A byte with bit 7, or one that gets it by adding 1 to its low seven bits. */
static inline bool all_plain(uint32_t scales)
{
    return !((scales | ((scales & 0x7F7F7F7Fu) + 0x01010101u)) & 0x80808080u);
}

/* The rare block with a negative scale or a NaN among its four. */
static size_t join_odd(uint8_t *block)
{
    size_t odd = 0;
    for (int i = 0; i < NIB_GGUF_NVFP4_SCALES; i++) {
        const uint8_t scale = block[i];
        if (scale < 0x7F)
            continue;
        odd++;
        block[i] = scale & 0x7F;
        for (int j = 0; block[i] < 0x7F && j < SUB_BYTES; j++)
            block[NIB_GGUF_NVFP4_SCALES + i * SUB_BYTES + j] ^= 0x88;
    }
    return odd;
}

size_t nib_gguf_nvfp4_join(const void *codes, const void *scales, size_t blocks, void *out)
{
    const uint8_t *code = codes, *scale = scales;
    uint8_t *block = out;
    size_t odd = 0;
    for (size_t n = 0; n < blocks; n++) {
        uint64_t words[4];
        uint32_t four;
        memcpy(words, code, sizeof words);
        memcpy(&four, scale, sizeof four);
        for (int i = 0; i < 4; i++)
            words[i] = interleave(words[i]);
        memcpy(block, &four, sizeof four);
        memcpy(block + sizeof four, words, sizeof words);
        if (!all_plain(four))
            odd += join_odd(block);
        code += NIB_GGUF_NVFP4_CODES;
        scale += NIB_GGUF_NVFP4_SCALES;
        block += NIB_GGUF_NVFP4_BYTES;
    }
    return odd;
}

static size_t split_odd(uint8_t *scales)
{
    size_t odd = 0;
    for (int i = 0; i < NIB_GGUF_NVFP4_SCALES; i++) {
        if (scales[i] < 0x7F)
            continue;
        odd++;
        scales[i] &= 0x7F;
        if (scales[i] == 0x7F)
            scales[i] = 0;
    }
    return odd;
}

size_t nib_gguf_nvfp4_split(const void *in, size_t blocks, void *codes, void *scales)
{
    const uint8_t *block = in;
    uint8_t *code = codes, *scale = scales;
    size_t odd = 0;
    for (size_t n = 0; n < blocks; n++) {
        uint64_t words[4];
        uint32_t four;
        memcpy(&four, block, sizeof four);
        memcpy(words, block + sizeof four, sizeof words);
        for (int i = 0; i < 4; i++)
            words[i] = separate(words[i]);
        memcpy(code, words, sizeof words);
        memcpy(scale, &four, sizeof four);
        if (!all_plain(four))
            odd += split_odd(scale);
        code += NIB_GGUF_NVFP4_CODES;
        scale += NIB_GGUF_NVFP4_SCALES;
        block += NIB_GGUF_NVFP4_BYTES;
    }
    return odd;
}

/* The halves of a block of 32 are whole words: pair their lower and their upper parts. */
void nib_gguf_mxfp4_join(const void *codes, const void *scales, size_t blocks, void *out)
{
    const uint8_t *code = codes, *scale = scales;
    uint8_t *block = out;
    for (size_t n = 0; n < blocks; n++) {
        uint64_t words[2];
        memcpy(words, code, sizeof words);
        const uint64_t lower = interleave((words[0] & UINT32_MAX) | words[1] << 32);
        const uint64_t upper = interleave(words[0] >> 32 | (words[1] >> 32) << 32);
        block[0] = scale[n];
        memcpy(block + 1, &lower, sizeof lower);
        memcpy(block + 1 + sizeof lower, &upper, sizeof upper);
        code += NIB_GGUF_MXFP4_CODES;
        block += NIB_GGUF_MXFP4_BYTES;
    }
}

void nib_gguf_mxfp4_split(const void *in, size_t blocks, void *codes, void *scales)
{
    const uint8_t *block = in;
    uint8_t *code = codes, *scale = scales;
    for (size_t n = 0; n < blocks; n++) {
        uint64_t lower, upper;
        scale[n] = block[0];
        memcpy(&lower, block + 1, sizeof lower);
        memcpy(&upper, block + 1 + sizeof lower, sizeof upper);
        lower = separate(lower);
        upper = separate(upper);
        const uint64_t words[2] = { (lower & UINT32_MAX) | upper << 32, lower >> 32 | (upper >> 32) << 32 };
        memcpy(code, words, sizeof words);
        code += NIB_GGUF_MXFP4_CODES;
        block += NIB_GGUF_MXFP4_BYTES;
    }
}
