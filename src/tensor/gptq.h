/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gptq.h - GPTQ on the host: the factor of a Hessian (factorize.c), and codes that make up for one another's errors
 * (gptq.c). nib.h has the contracts; kernels NULL: the best of the machine.
 */
#ifndef NIB_GPTQ_H
#define NIB_GPTQ_H

#include "tensor/quantize.h"

NIB_PRIVATE nib_status nib_factorize(const nib_device *host, const struct nib_kernels *kernels, const float *hessian,
                                     int64_t n, double damp, int32_t *order, float *u, double *damped);

/* Where row i of a packed upper triangle begins: at its diagonal. */
static inline size_t nib_packed_row(int64_t n, int64_t i)
{
    return (size_t)i * (size_t)n - (size_t)i * ((size_t)i + 1) / 2 + (size_t)i;
}

/* Codes of the rowwise usage anew, under scales and tensor scales that are there. Everything is checked; on failure
 * (memory) nothing was written. */
NIB_PRIVATE nib_status nib_gptq_usage(const nib_device *host, const struct nib_kernels *kernels, const nib_quantizer *q,
                                      const nib_array *x, const struct nib_geometry *geometry,
                                      const struct nib_usage_memory *memory, const int32_t *order, const float *u);

/* The same for lines of scales without padding, as nib_quantize_lines leaves them. */
NIB_PRIVATE nib_status nib_gptq_lines(const nib_quantizer *q, const nib_array *x, const struct nib_usage_memory *memory,
                                      const int32_t *order, const float *u);

#endif
