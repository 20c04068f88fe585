/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tensors.h - arrays, quantizers and tensors for tests, in one call each: what fails is a failed check.
 */
#ifndef NIB_TEST_TENSORS_H
#define NIB_TEST_TENSORS_H

#include "test.h"

/* A rank and a shape, as two arguments. */
#define DIMS(...) \
    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* ---- Arrays ---- */

static inline nib_array array_of(void *data, nib_dtype dtype, int rank, const int64_t *shape)
{
    nib_array array = { 0 };
    CHECK_OK(nib_array_init(&array, data, dtype, rank, shape));
    return array;
}

/* Normals, and every 29th of them large. */
static inline float *normals(int64_t n)
{
    float *x = malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = test_normal() * (i % 29 == 0 ? 8.0f : 1.0f);
    return x;
}

/* ---- Quantizers ---- */

static inline nib_quantizer default_quantizer(void)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    return q;
}

/* Flags as they are: any nonzero one means on. */
static inline nib_quantizer usages(int rowwise, int columnwise)
{
    nib_quantizer q = default_quantizer();
    q.rowwise = (uint8_t)rowwise;
    q.columnwise = (uint8_t)columnwise;
    return q;
}

/* ---- Tensors ---- */

static inline nib_tensor *quantize(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides)
{
    nib_tensor *t = NULL;
    CHECK_OK(nib_quantize(q, x, overrides, &t));
    if (!t)
        exit(2); /* no test makes sense without it */
    return t;
}

static inline nib_tensor *quantize_f32(const nib_quantizer *q, const float *x, int rank, const int64_t *shape)
{
    const nib_array array = array_of((void *)(uintptr_t)x, NIB_F32, rank, shape);
    return quantize(q, &array, NULL);
}

/* A tensor of normals, with the values themselves thrown away. */
static inline nib_tensor *some_of(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape)
{
    const int64_t n = elements_in(rank, shape);
    float *x = normals(n);
    void *encoded = malloc((size_t)(n + 1) * sizeof *x);
    CHECK_OK(nib_encode(dtype, x, (size_t)n, encoded));
    const nib_array array = array_of(encoded, dtype, rank, shape);
    nib_tensor *t = quantize(q, &array, NULL);
    free(x);
    free(encoded);
    return t;
}

static inline nib_tensor *some(const nib_quantizer *q, int rank, const int64_t *shape)
{
    return some_of(q, NIB_F32, rank, shape);
}

static inline nib_tensor *clone_of(const nib_tensor *t)
{
    nib_tensor *clone = NULL;
    CHECK_OK(nib_tensor_clone(t, &clone));
    return clone;
}

static inline bool equal(const nib_tensor *a, const nib_tensor *b)
{
    int same = -1;
    CHECK_OK(nib_tensor_equal(a, b, &same));
    CHECK(same == 0 || same == 1);
    return same == 1;
}

static inline nib_metadata metadata_of(const nib_tensor *t)
{
    nib_metadata metadata = { .bytes = sizeof metadata };
    CHECK_OK(nib_tensor_get_metadata(t, &metadata));
    return metadata;
}

static inline void dequantize(const nib_tensor *t, nib_usage from, nib_dtype dtype, void *out)
{
    const nib_metadata m = metadata_of(t);
    const nib_array array = array_of(out, dtype, m.rank, m.shape);
    CHECK_OK(nib_dequantize(t, from, &array));
}

/* alpha * A B^T, or that on top of y. */
static inline nib_status reference_product(const nib_tensor *a, nib_usage a_usage, const nib_tensor *b,
                                           nib_usage b_usage, float alpha, int accumulate, const nib_array *y)
{
    nib_gemm_options options;
    nib_gemm_options_init(&options);
    options.alpha = alpha;
    options.beta = accumulate ? 1 : 0;
    return nib_gemm_reference(&(nib_operand){ a, NULL, a_usage }, &(nib_operand){ b, NULL, b_usage }, &options, y);
}

/* ---- Parts ---- */

static inline uint8_t *bytes_of(const nib_tensor *t, nib_part part)
{
    return nib_buffer_data(nib_tensor_buffer(t, part));
}

static inline size_t size_of(const nib_tensor *t, nib_part part)
{
    return nib_buffer_bytes(nib_tensor_buffer(t, part));
}

/* Where the scale of (line, block) lies, written down once more. Swizzled: tiles of 128 lines by 4 blocks, 32 lines
 * interleaved. */
static inline size_t scale_place(int64_t line, int64_t block, int64_t stride, bool swizzled)
{
    if (!swizzled)
        return (size_t)(line * stride + block);
    const int64_t tile = line / 128 * (stride / 4) + block / 4, within = line % 128;
    return (size_t)(tile * 512 + within % 32 * 16 + within / 32 * 4 + block % 4);
}

/* For a borrowed buffer: how often it was released. */
static inline void count_release(void *count) { ++*(int *)count; }

#endif
