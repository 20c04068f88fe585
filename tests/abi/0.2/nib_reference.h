/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_reference.h - what other implementations can be compared with: codecs, matrices, layouts of codes and scales, the
 * reference GEMM.
 *
 * All of it runs on the host only; raw pointers are host memory.
 */
#ifndef NIB_REFERENCE_H
#define NIB_REFERENCE_H

#include "nib.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Codecs ---------------------------------------------------------------------------------------------- */

/* Encode n floats as dtype (E2M1, E4M3, E5M2, E8M0, BF16, F16, F32), or decode them. Rounding is to nearest even
 * and saturates to the largest finite value (BF16, F16: to infinity, as IEEE 754 has it); E8M0 becomes the power of
 * two at or above |x|. E2M1 is packed: (n + 1) / 2 bytes, a missing last nibble is 0. */
NIB_API nib_status nib_encode(nib_dtype dtype, const float *x, size_t n, void *out);
NIB_API nib_status nib_decode(nib_dtype dtype, const void *codes, size_t n, float *out);

/* ---- Matrices and layouts -------------------------------------------------------------------------------- */

/* H[i][j] = (-1)^popcount(i & j) / 4 */
NIB_API void nib_hadamard_matrix(float out[256]);
/* R[i][j] = sign(i) H[i][j] in BF16 (exact): y = x R */
NIB_API void nib_rht_matrix(uint16_t sign_mask, uint16_t out[256]);
/* The value of each code: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives */
NIB_API void nib_e2m1_values(float out[16]);
/* One block of Philox4x32-10, the generator behind stochastic rounding */
NIB_API void nib_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Scales of a [rows, cols] matrix between row-major (stride bytes a row) and 128x4 tiles of
 * roundup(rows, 128) * roundup(cols, 4) bytes. Padding is written as zero. */
NIB_API nib_status nib_swizzle_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t stride, uint8_t *out);
NIB_API nib_status nib_unswizzle_scales(const uint8_t *tiles, int64_t rows, int64_t cols, int64_t stride, uint8_t *out);

/* nib_gemm as it is defined, one output at a time and written to be read. For operands of which both are NVFP4 these are
 * the bits of TransformerEngine's reference. */
NIB_API nib_status nib_gemm_reference(const nib_operand *a, const nib_operand *b, const nib_gemm_options *options,
                                      const nib_array *y);

/* Packed codes of a [rows, cols] matrix, [rows, ceil(cols/2)] bytes, to [cols, ceil(rows/2)]; missing nibbles are 0. */
NIB_API nib_status nib_transpose_packed(const uint8_t *codes, int64_t rows, int64_t cols, uint8_t *out);
/* Scales of 16x16 blocks of a [rows, cols] matrix: from `rows` lines, in_stride bytes apart, to `cols` lines of
 * ceil(rows/16) scales, out_stride bytes apart, each filled up with zeros. */
NIB_API nib_status nib_transpose_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t in_stride,
                                        uint8_t *out, int64_t out_stride);

#ifdef __cplusplus
}
#endif

#endif /* NIB_REFERENCE_H */
