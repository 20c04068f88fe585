/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gptq_scalar.c - the reference for GPTQ: one product and one difference at a time, in the order of k.
 */
#include "kernels/kernels.h"

#define DEFINE_SUBTRACT(name, type)                                                                          \
    static void name(void *results, int64_t c_stride, const void *left, int64_t a_stride, const void *right, \
                     int64_t b_stride, int64_t m, int64_t n, int64_t k)                                      \
    {                                                                                                        \
        type *c = results;                                                                                   \
        const type *a = left, *b = right;                                                                    \
        for (int64_t i = 0; i < m; i++)                                                                      \
            for (int64_t p = 0; p < k; p++)                                                                  \
                for (int64_t j = 0; j < n; j++)                                                              \
                    c[i * c_stride + j] = c[i * c_stride + j] - a[p * a_stride + i] * b[p * b_stride + j];   \
    }

DEFINE_SUBTRACT(subtract_f32, float)
DEFINE_SUBTRACT(subtract_f64, double)

static void round_column(float *w, const float *factors, const float *decode_factors, float pivot, int64_t n,
                         uint8_t *codes)
{
    for (int64_t r = 0; r < n; r++) {
        const uint8_t code = nib_e2m1_from_f32(w[r] * factors[r]);
        const float q = nib_f32_from_e2m1(code) * decode_factors[r];
        codes[r] = (uint8_t)(code | (w[r] == 0 ? NIB_CODE_OF_ZERO : 0));
        w[r] = (w[r] - q) / pivot;
    }
}

const struct nib_kernels nib_gptq_scalar = {
    .subtract = { [NIB_F32] = subtract_f32, [NIB_F64] = subtract_f64 },
    .round_column = { [NIB_NVFP4] = round_column },
};
