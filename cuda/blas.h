/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blas.h - dense products by cuBLASLt, which is loaded when the first one is asked for: libnib_cuda does not need it.
 */
#ifndef NIB_CUDA_BLAS_H
#define NIB_CUDA_BLAS_H

#include "device.h"

/* So much memory may a product work in. */
enum { NIB_CUDA_BLAS_BYTES = 32 << 20 };

/* Lines of values, whose elements are side by side. */
struct nib_cuda_blas_side {
    const void *data;
    int64_t lines, stride; /* from line to line, in elements */
    const void *scales;    /* swizzled ones: data is E2M1 codes */
};

/* y[i][j] = alpha * sum over k of major[j][k] * minor[i][k] + beta * y[i][j] + bias[j]: elements along j are side by
 * side. */
struct nib_cuda_blas_product {
    struct nib_cuda_blas_side major, minor;
    nib_dtype dtype; /* of both, where they are no codes */
    int64_t length;
    const float *alpha, *beta; /* on the device */
    const void *bias;          /* of y's dtype; may be NULL */
    void *y;
    nib_dtype y_dtype;
    int64_t stride;  /* of y, from i to i + 1 */
    void *workspace; /* of NIB_CUDA_BLAS_BYTES */
};

/* Whether there is a cuBLASLt for this GPU. */
bool nib_cuda_blas_serves(const struct nib_cuda_device *d);

/* *done is false where the library has no product for this; then nothing was enqueued. UNSUPPORTED where there is no
 * cuBLASLt. The device is the current one. */
nib_status nib_cuda_blas_multiply(struct nib_cuda_device *d, const struct nib_cuda_blas_product *product, bool *done);

#endif
