/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shim.h - enough of CUDA for kernels to be compiled as C++ and run on the host, thread by thread.
 *
 * Kernels are functions of a thread's index over the memory that a thread block shares, cut where its threads wait for one
 * another (kernels.cuh). So a host runs them as they are: all threads through the first phase, then all through the
 * second. What a device's instruction does is written here once more, in plain C.
 */
#ifndef NIB_CUDA_SHIM_H
#define NIB_CUDA_SHIM_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "format/codec.h"

#define __device__
#define __forceinline__ inline
#define __align__(n) alignas(n)

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y) { return { x, y }; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return { x, y, z, w }; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
/* Without the processor's subnormals, as which kernels make codes: on Intel one of them takes as long as a hundred other results. The
 * difference is exact where it is subnormal, and elsewhere a double of it rounds to what the difference itself rounds to. */
static inline float __fsub_rn(float a, float b)
{
    const double difference = (double)a - (double)b, size = fabs(difference);
    const bool subnormal = size < 0x1p-126;
    const uint32_t steps = (uint32_t)(int32_t)((subnormal ? size : 0) * 0x1p149);
    const uint32_t normal = nib_bits((float)(subnormal ? 1 : difference));
    return nib_float(subnormal ? steps | (signbit(difference) ? 0x80000000u : 0) : normal);
}
#ifdef __FMA__
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
static inline float __fmaf_rn(float a, float b, float c) { return nib_fma(a, b, c); }
#endif
/* Without the processor's mode of rounding: a compiler may move other arithmetic to where it is another. */
static inline float __fmaf_rz(float a, float b, float c)
{
    const double sum = nib_fma_to_odd(a, b, c);
    const float nearest = (float)sum;
    return fabs((double)nearest) > fabs(sum) ? nib_float(nib_bits(nearest) - 1) : nearest;
}
static inline uint32_t __float2uint_rz(float x) { return (uint32_t)x; }
static inline uint32_t __float_as_uint(float x) { return nib_bits(x); }
static inline int __float_as_int(float x) { return (int)nib_bits(x); }
static inline float __uint_as_float(uint32_t x) { return nib_float(x); }
static inline float __int_as_float(int x) { return nib_float((uint32_t)x); }
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }

static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++)
        r |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
static inline uint32_t __vminu2(uint32_t a, uint32_t b)
{
    return min(a & 0xFFFFu, b & 0xFFFFu) | min(a >> 16, b >> 16) << 16;
}
/* The larger magnitudes of two pairs of BF16, of which a has no signs; a NaN wins. */
static inline uint32_t max_magnitudes(uint32_t a, uint32_t b)
{
    b &= 0x7FFF7FFFu;
    return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;
}
/* The same, but a NaN loses. */
static inline uint32_t max_numbers(uint32_t a, uint32_t b)
{
    const uint32_t low = (b & 0x7FFFu) > 0x7F80u ? 0 : b & 0x7FFFu,
                   high = (b >> 16 & 0x7FFFu) > 0x7F80u ? 0 : b >> 16 & 0x7FFFu;
    return max_magnitudes(a, low | high << 16);
}
static inline uint32_t bf16_pair(float low, float high)
{
    return nib_bf16_from_f32(low) | (uint32_t)nib_bf16_from_f32(high) << 16;
}
static inline uint32_t f16_pair(float low, float high)
{
    return nib_f16_from_f32(low) | (uint32_t)nib_f16_from_f32(high) << 16;
}
static inline float f32_of_f16(uint16_t code) { return nib_f32_from_f16(code); }
static inline float larger(float a, float b) { return nib_fmax(a, b); }
static inline float smaller(float a, float b) { return nib_fmin(a, b); }
static inline uint32_t e4m3_of(float x) { return nib_e4m3_from_f32(x); }

static inline uint32_t atomicMax(uint32_t *at, uint32_t value)
{
    const uint32_t old = *at;
    *at = max(old, value);
    return old;
}
static inline uint32_t atomicAdd(uint32_t *at, uint32_t value)
{
    const uint32_t old = *at;
    *at += value;
    return old;
}
static inline uint32_t atomicExch(uint32_t *at, uint32_t value)
{
    const uint32_t old = *at;
    *at = value;
    return old;
}
static inline uint32_t atomicCAS(uint32_t *at, uint32_t expected, uint32_t value)
{
    const uint32_t old = *at;
    *at = old == expected ? value : old;
    return old;
}
static inline void __threadfence() {}
static inline void __syncwarp() {} /* within a phase lanes do not wait for what others write */
/* Kernels that this thread has begun, from 1 on. */
extern thread_local uint64_t shim_launches;

/* Lanes are one after the other: each counts for itself. */
static inline uint32_t max_of_warp(uint32_t value) { return value; }
static inline bool speaks_for_warp(int) { return true; }

#endif
