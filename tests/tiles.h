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

/* Of pairs, the first elements in one chain of fused products, the second ones in another; both to the accumulator. */
static void software_multiply(int c, int a, int b)
{
    for (int m = 0; m < software.config.rows[c]; m++)
        for (int n = 0; n < software.config.bytes[c] / 4; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < software.config.bytes[a] / 4; k++) {
                const uint32_t x = software.tile[a][m][k], y = software.tile[b][k][n];
                even = fmaf(software_float(x << 16), software_float(y << 16), even);
                odd = fmaf(software_float(x & 0xFFFF0000u), software_float(y & 0xFFFF0000u), odd);
            }
            const float sum = software_float(software.tile[c][m][n]) + (even + odd);
            memcpy(&software.tile[c][m][n], &sum, sizeof sum);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
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
