/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gptq_avx512.c - the kernels of GPTQ, sixteen values at a time.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)

#define GPTQ_SLOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) static
#define GPTQ_BYTES 64
#define GPTQ_ROWS 4
#define GPTQ_VECTORS 4

#include "kernels/simd_gptq.h"

const struct nib_kernels nib_gptq_avx512 = { GPTQ_KERNELS };

#endif
