/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product.h - products on the host: what is behind the seam's `product`.
 */
#ifndef NIB_TENSOR_PRODUCT_H
#define NIB_TENSOR_PRODUCT_H

#include "base/threads.h"
#include "kernels/kernels.h"

/* What a call asks for, checked, with plain values on side a where they are rounded to block fixed point (gemm.c). */
nib_status nib_product_load(const nib_operand *a, const nib_operand *b, const nib_gemm_options *options,
                            const nib_array *y, struct nib_product *out);

/* Products one after the other, each shared by the threads, by the kernels of one table; bits do not depend on which. They
 * are checked. When this fails (memory) nothing was written. */
nib_status nib_products(nib_device *host, const struct nib_kernels *kernels, const struct nib_product *products,
                        size_t n);

/* Lines first..first+count-1 of a side as F32 rows, `stride` floats apart: what nib_dequantize gives for them. On this
 * thread (decode.c). */
void nib_decode_lines(const struct nib_side *side, int64_t first, int64_t count, float *out, int64_t stride);

#endif
