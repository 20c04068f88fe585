/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiles.h - the kernels of tiles on processors that have none: the instructions in software, by Intel's manual. Everything
 * else of these kernels (packing, order, what is stored where) is as a processor with AMX runs it. Wants AVX-512 VNNI.
 */
#ifndef NIB_TEST_TILES_H
#define NIB_TEST_TILES_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

struct software_tiles {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    uint32_t tile[8][16][16];
};
static _Thread_local struct software_tiles software;

static void software_config(const void *config) { memcpy(&software.config, config, sizeof software.config); }
static void software_zero(int t) { memset(software.tile[t], 0, sizeof software.tile[t]); }

static void software_load(int t, const void *from, int64_t stride)
{
    software_zero(t);
    for (int i = 0; i < software.config.rows[t]; i++)
        memcpy(software.tile[t][i], (const char *)from + i * stride, software.config.bytes[t]);
}

static void software_store(int t, void *to, int64_t stride)
{
    for (int i = 0; i < software.config.rows[t]; i++)
        memcpy((char *)to + i * stride, software.tile[t][i], software.config.bytes[t]);
}

static float software_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* What is subnormal counts as 0. */
static float software_element(uint32_t bits) { return software_float(bits & 0x7F800000 ? bits : bits & 0x80000000); }

/* Of pairs, the first elements in one chain of fused products, the second ones in another; both to the accumulator. */
static void software_multiply(int c, int a, int b)
{
    for (int m = 0; m < software.config.rows[c]; m++)
        for (int n = 0; n < software.config.bytes[c] / 4; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < software.config.bytes[a] / 4; k++) {
                const uint32_t x = software.tile[a][m][k], y = software.tile[b][k][n];
                even = fmaf(software_element(x << 16), software_element(y << 16), even);
                odd = fmaf(software_element(x & 0xFFFF0000u), software_element(y & 0xFFFF0000u), odd);
            }
            const float sum = software_float(software.tile[c][m][n]) + (even + odd);
            memcpy(&software.tile[c][m][n], &sum, sizeof sum);
        }
}

/* Of halves, as AVX-512's F16 does it: what products need is exact. */
__attribute__((target("avx512f,f16c"))) static __m512i software_multiply_halves(__m512i a, __m512i b)
{
    __m256i half[2];
    for (int i = 0; i < 2; i++) {
        const __m512 x = _mm512_cvtph_ps(i ? _mm512_extracti64x4_epi64(a, 1) : _mm512_castsi512_si256(a));
        const __m512 y = _mm512_cvtph_ps(i ? _mm512_extracti64x4_epi64(b, 1) : _mm512_castsi512_si256(b));
        half[i] = _mm512_cvtps_ph(_mm512_mul_ps(x, y), 0);
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define multiply_halves software_multiply_halves
#define _tile_loadconfig software_config
#define _tile_release() memset(&software, 0, sizeof software)
#define _tile_zero software_zero
#define _tile_loadd software_load
#define _tile_stored software_store
#define _tile_dpbf16ps software_multiply
#define nib_products_avx512 software_products_avx512
#define nib_products_amx software_products_amx

#include "kernels/x86/product_avx512.c"

#undef nib_products_avx512
#undef nib_products_amx

#endif
