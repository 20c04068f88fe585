/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_neon.c - products in four lanes, with and without dot products of bytes.
 */
#if defined(__aarch64__)

#include "kernels/arm/lanes_neon.h"

#define PRODUCT(name) name##_neon
#define PRODUCT_SIMD SIMD
#define PRODUCT_SLOT SLOT
#include "kernels/arm/product_neon.h"

const struct nib_kernels nib_products_neon = { PRODUCT_SLOTS };

#undef PRODUCT
#undef PRODUCT_SIMD
#undef PRODUCT_SLOT
#define PRODUCT(name) name##_sdot
#define PRODUCT_SDOT
#if defined(__clang__)
#define SDOT_TARGET target("dotprod")
#else
#define SDOT_TARGET target("arch=armv8.2-a+dotprod")
#endif
#define PRODUCT_SIMD __attribute__((SDOT_TARGET, always_inline)) static inline
#define PRODUCT_SLOT __attribute__((SDOT_TARGET)) static
#include "kernels/arm/product_neon.h"

const struct nib_kernels nib_products_sdot = { PRODUCT_SLOTS };

#else
typedef int nib_no_products_neon; /* a translation unit may not be empty */
#endif
