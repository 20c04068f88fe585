/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd_gptq.h - the kernels of GPTQ for vectors of GPTQ_BYTES bytes, by the compiler's own vector types.
 *
 * Whoever includes it defines
 *     GPTQ_SLOT   how a function is declared: target attributes, static
 *     GPTQ_BYTES  of a vector
 *     GPTQ_ROWS, GPTQ_VECTORS   of a block of results in registers
 * and gets subtract_f32, subtract_f64 and round_column.
 *
 * Every result is a chain of its own, so that lanes do not change what comes out: nothing here adds across lanes, and
 * nothing may be contracted.
 */
#include "kernels/kernels.h"

typedef float gptq_f32 __attribute__((vector_size(GPTQ_BYTES), aligned(4), may_alias));
typedef double gptq_f64 __attribute__((vector_size(GPTQ_BYTES), aligned(8), may_alias));
typedef int32_t gptq_i32 __attribute__((vector_size(GPTQ_BYTES), aligned(4), may_alias));

enum { WIDE = 8, F32_LANES = GPTQ_BYTES / 4 };

/* A block of `rows` x `vectors` results stays in registers for all k. */
#define DEFINE_BLOCK(name, type, vector, rows, vectors)                                                              \
    GPTQ_SLOT void name(type *c, int64_t c_stride, const type *a, int64_t a_stride, const type *b, int64_t b_stride, \
                        int64_t k)                                                                                   \
    {                                                                                                                \
        enum { LANES = GPTQ_BYTES / sizeof(type) };                                                                  \
        vector sums[rows][vectors];                                                                                  \
        _Pragma("GCC unroll 16") for (int i = 0; i < (rows); i++)                                                    \
            _Pragma("GCC unroll 16") for (int v = 0; v < (vectors); v++) sums[i][v] =                                \
                *(const vector *)(c + i * c_stride + v * LANES);                                                     \
        for (int64_t p = 0; p < k; p++, a += a_stride, b += b_stride) {                                              \
            vector y[vectors];                                                                                       \
            _Pragma("GCC unroll 16") for (int v = 0; v < (vectors); v++) y[v] = *(const vector *)(b + v * LANES);    \
            _Pragma("GCC unroll 16") for (int i = 0; i < (rows); i++)                                                \
                _Pragma("GCC unroll 16") for (int v = 0; v < (vectors); v++) sums[i][v] = sums[i][v] - a[i] * y[v];  \
        }                                                                                                            \
        _Pragma("GCC unroll 16") for (int i = 0; i < (rows); i++)                                                    \
                _Pragma("GCC unroll 16") for (int v = 0; v < (vectors); v++) *                                       \
            (vector *)(c + i * c_stride + v * LANES) = sums[i][v];                                                   \
    }

/* One row alone has chains enough where it is wide. */
#define DEFINE_SUBTRACT(name, type, vector)                                                                     \
    DEFINE_BLOCK(name##_block, type, vector, GPTQ_ROWS, GPTQ_VECTORS)                                           \
    DEFINE_BLOCK(name##_wide, type, vector, 1, WIDE)                                                            \
    DEFINE_BLOCK(name##_row, type, vector, 1, GPTQ_VECTORS)                                                     \
    GPTQ_SLOT void name(void *results, int64_t c_stride, const void *left, int64_t a_stride, const void *right, \
                        int64_t b_stride, int64_t m, int64_t n, int64_t k)                                      \
    {                                                                                                           \
        enum { LANES = GPTQ_BYTES / sizeof(type), STEP = GPTQ_VECTORS * LANES };                                \
        type *c = results;                                                                                      \
        const type *a = left, *b = right;                                                                       \
        int64_t i = 0;                                                                                          \
        for (; i + GPTQ_ROWS <= m; i += GPTQ_ROWS)                                                              \
            for (int64_t j = 0; j < n; j += STEP)                                                               \
                name##_block(c + i * c_stride + j, c_stride, a + i, a_stride, b + j, b_stride, k);              \
        for (; i < m; i++) {                                                                                    \
            int64_t j = 0;                                                                                      \
            for (; j + WIDE * LANES <= n; j += WIDE * LANES)                                                    \
                name##_wide(c + i * c_stride + j, c_stride, a + i, a_stride, b + j, b_stride, k);               \
            for (; j < n; j += STEP)                                                                            \
                name##_row(c + i * c_stride + j, c_stride, a + i, a_stride, b + j, b_stride, k);                \
        }                                                                                                       \
    }

DEFINE_SUBTRACT(subtract_f32, float, gptq_f32)
DEFINE_SUBTRACT(subtract_f64, double, gptq_f64)

/* The borders between magnitudes of E2M1; a tie goes to the even code, so that every other one is passed by what equals
 * it. A NaN passes all: its code is 7 without a sign. */
GPTQ_SLOT void round_column(float *w, const float *factors, const float *decode_factors, float pivot, int64_t n,
                            uint8_t *codes)
{
    static const float above[4] = { 0.25f, 1.25f, 2.5f, 5 }, from[3] = { 0.75f, 1.75f, 3.5f };
    static const float step_above[4] = { 0.5f, 0.5f, 1, 2 }, step_from[3] = { 0.5f, 0.5f, 1 };
    const gptq_i32 sign_bit = (gptq_i32){ 0 } + INT32_MIN, one = (gptq_i32){ 0 } + 1;
    for (int64_t r = 0; r < n; r += F32_LANES) {
        const gptq_f32 x = *(const gptq_f32 *)(w + r), y = x * *(const gptq_f32 *)(factors + r);
        const gptq_i32 bits = (gptq_i32)y, sign = bits & sign_bit & (gptq_i32)(y == y);
        const gptq_f32 size = (gptq_f32)(bits & ~sign_bit);
        gptq_i32 code = { 0 };
        gptq_f32 value = { 0 };
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
        {
            const gptq_i32 passed = ~(gptq_i32)(size <= above[i]);
            code += passed & one;
            value += (gptq_f32)(passed & (gptq_i32)((gptq_f32){ 0 } + step_above[i]));
        }
        _Pragma("GCC unroll 4") for (int i = 0; i < 3; i++)
        {
            const gptq_i32 passed = ~(gptq_i32)(size < from[i]);
            code += passed & one;
            value += (gptq_f32)(passed & (gptq_i32)((gptq_f32){ 0 } + step_from[i]));
        }
        const gptq_f32 q = (gptq_f32)((gptq_i32)value | sign) * *(const gptq_f32 *)(decode_factors + r);
        code |= ((sign >> 28) & (one * 8)) | ((gptq_i32)(x == 0) & (one * NIB_CODE_OF_ZERO));
        *(gptq_f32 *)(w + r) = (x - q) / pivot;
        for (int i = 0; i < F32_LANES; i++)
            codes[r + i] = (uint8_t)code[i];
    }
}

#define GPTQ_KERNELS \
    .subtract = { [NIB_F32] = subtract_f32, [NIB_F64] = subtract_f64 }, .round_column = { [NIB_NVFP4] = round_column }
