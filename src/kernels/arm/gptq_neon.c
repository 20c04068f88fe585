/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gptq_neon.c - the kernels of GPTQ, four values at a time.
 */
#include "kernels/kernels.h"

#if defined(__aarch64__)

#define GPTQ_SLOT static
#define GPTQ_BYTES 16
#define GPTQ_ROWS 4
#define GPTQ_VECTORS 4

#include "kernels/simd_gptq.h"

const struct nib_kernels nib_gptq_neon = { GPTQ_KERNELS };

#endif
