/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gptq_avx2.c - the kernels of GPTQ, eight values at a time.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)

#define GPTQ_SLOT __attribute__((target("avx2"))) static
#define GPTQ_BYTES 32
#define GPTQ_ROWS 4
#define GPTQ_VECTORS 2

#include "kernels/simd_gptq.h"

const struct nib_kernels nib_gptq_avx2 = { GPTQ_KERNELS };

#endif
