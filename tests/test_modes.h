/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_modes.h - matrices of every kind of data, quantizers of every mode, and all that go together.
 */
#ifndef NIB_TEST_MODES_H
#define NIB_TEST_MODES_H

#include <math.h>

#include "test_codes.h"

/* What the loops are at, for the messages. */
static char where[256];

/* ---- Data ---- */

enum kind { NORMAL, HEAVY, TIES, TINY, ZEROS, LARGE, KINDS };
static const char *const kind_names[] = { "normal", "heavy", "ties", "tiny", "zeros", "large" };
static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };

/* Numbers that every dtype can hold without overflow; TINY are subnormal in the dtype, LARGE near its end. */
static inline float number(enum kind kind, nib_dtype dtype)
{
    static const float ties[] = { 0, .25f, .5f, .75f, 1, 1.25f, 1.5f, 1.75f, 2, 2.5f, 3, 3.5f, 4, 5, 6, 6 };
    const float normal = test_normal();
    switch (kind) {
    case HEAVY:
        return ldexpf(normal, (int)test_below(20) - 12);
    case TIES:
        return normal < 0 ? -ties[test_below(16)] : ties[test_below(16)];
    case TINY:
        return ldexpf(normal, dtype == NIB_F16 ? -18 : -130);
    case ZEROS:
        return test_below(8) ? copysignf(0, normal) : normal;
    case LARGE:
        return normal / 6 * (dtype == NIB_F16 ? 60000.0f : 0x1p127f);
    default:
        return normal;
    }
}

static inline int element_bytes(nib_dtype dtype) { return nib_dtype_bits(dtype) / 8; }

/* A contiguous array in memory of its own: free(array.data). */
static inline nib_array array_from(const float *x, nib_dtype dtype, int rank, const int64_t *shape)
{
    int64_t n = 1;
    for (int i = 0; i < rank; i++)
        n *= shape[i];
    nib_array array = { 0 };
    void *memory = malloc((size_t)(n * element_bytes(dtype) + 1));
    CHECK_OK(nib_encode(dtype, x, (size_t)n, memory));
    CHECK_OK(nib_array_init(&array, memory, dtype, rank, shape));
    return array;
}

static inline nib_array matrix_from(const float *x, nib_dtype dtype, int64_t rows, int64_t cols)
{
    return array_from(x, dtype, 2, (const int64_t[]){ rows, cols });
}

/* Every third block of a row is zero when kind is ZEROS. */
static inline nib_array random_matrix(enum kind kind, nib_dtype dtype, int64_t rows, int64_t cols)
{
    float *x = malloc((size_t)(rows * cols + 1) * sizeof *x);
    for (int64_t i = 0; i < rows * cols; i++)
        x[i] = kind == ZEROS && i % cols / 16 % 3 == 0 ? 0 : number(kind, dtype);
    const nib_array array = matrix_from(x, dtype, rows, cols);
    free(x);
    return array;
}

/* The values of a contiguous array, to be freed. */
static inline float *floats_of(const nib_array *array)
{
    const size_t n = (size_t)elements_in(array->rank, array->shape);
    float *x = malloc((n + 1) * sizeof *x);
    CHECK_OK(nib_decode(array->dtype, (char *)array->data + array->offset, n, x));
    return x;
}

static inline char *element_at(const nib_array *array, int64_t index)
{
    int64_t offset = 0;
    for (int i = array->rank - 1; i >= 0; i--) {
        offset += index % array->shape[i] * array->strides[i];
        index /= array->shape[i];
    }
    return (char *)array->data + array->offset + offset * element_bytes(array->dtype);
}

/* The same elements one after another. */
static inline nib_array contiguous_copy(const nib_array *array)
{
    const int64_t n = elements_in(array->rank, array->shape);
    const int bytes = element_bytes(array->dtype);
    char *memory = malloc((size_t)(n * bytes + 1));
    for (int64_t i = 0; i < n; i++)
        memcpy(memory + i * bytes, element_at(array, i), (size_t)bytes);
    nib_array usage = { 0 };
    CHECK_OK(nib_array_init(&usage, memory, array->dtype, array->rank, array->shape));
    return usage;
}

static inline nib_array transposed_view(const nib_array *x)
{
    nib_array view = *x;
    view.shape[0] = x->shape[1], view.shape[1] = x->shape[0];
    view.strides[0] = x->strides[1], view.strides[1] = x->strides[0];
    return view;
}

/* ---- Tensors ---- */

static inline bool same_part(const nib_tensor *a, nib_part pa, const nib_tensor *b, nib_part pb)
{
    const nib_buffer *x = nib_tensor_buffer(a, pa), *y = nib_tensor_buffer(b, pb);
    if (!x || !y)
        return !x && !y;
    return nib_buffer_bytes(x) == nib_buffer_bytes(y) &&
           memcmp(nib_buffer_data(x), nib_buffer_data(y), nib_buffer_bytes(x)) == 0;
}

/* Every byte of every buffer, padding included. */
static inline bool same_tensor(const nib_tensor *a, const nib_tensor *b)
{
    bool same = a && b;
    for (int part = 0; same && part < NIB_PART_COUNT; part++)
        same = same_part(a, (nib_part)part, b, (nib_part)part);
    return same;
}

#define CHECK_SAME(a, b) CHECK_THAT(same_tensor(a, b), "%s: %s and %s differ", where, #a, #b)

/* What a code of 1 stands for, not rounded. */
static inline double factor_at(const struct usage *c, const nib_quantizer *q, int64_t line, int64_t block)
{
    const double tensor_scale = tensor_scale_at(c, line), s = e4m3[scale_at(c, line, block)];
    return q->tensor_scale_rule == NIB_TENSOR_SCALE_RULE_DIALECT ? s * tensor_scale / (6.0 * q->e4m3_max)
                                                                 : s * tensor_scale;
}

/* ---- Modes ---- */

enum mode {
    RTN,
    FOUR_MAE,
    FOUR_MSE_256,
    FOUR_FAST,
    SWEEP,
    SWEEP_EXACT,
    SR_8,
    SR_24,
    SR_UNBIASED,
    RHT,
    RHT_SR,
    ROW_SCALED,
    ROW_SCALED_FOUR,
    ROW_SCALED_SR,
    SQUARE,
    SQUARE_FOUR,
    SQUARE_SR,
    SWIZZLED,
    POW2,
    FLOOR,
    MODES
};
static const char *const mode_names[] = { "rtn",
                                          "4over6",
                                          "4over6 mse 256",
                                          "4over6 fast",
                                          "sweep",
                                          "sweep exact",
                                          "sr8",
                                          "sr24",
                                          "unbiased",
                                          "rht",
                                          "rht sr",
                                          "row-scaled",
                                          "row-scaled 4over6",
                                          "row-scaled sr",
                                          "16x16",
                                          "16x16 4over6",
                                          "16x16 sr",
                                          "swizzled",
                                          "pow2",
                                          "floor" };

static inline nib_quantizer mode_of(int mode)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.seed = 0x123456789ABCDEFu, q.offset = 77;
    if (mode == FOUR_MAE || mode == FOUR_MSE_256 || mode == FOUR_FAST || mode == ROW_SCALED_FOUR || mode == SQUARE_FOUR)
        q.scale_rule = NIB_SCALE_4OVER6;
    if (mode == FOUR_MSE_256)
        q.error_mode = NIB_ERROR_MSE, q.e4m3_max = 256;
    q.fast_error = mode == FOUR_FAST;
    if (mode == SWEEP || mode == SWEEP_EXACT)
        q.scale_rule = NIB_SCALE_SWEEP;
    if (mode == SWEEP_EXACT)
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT;
    if (mode == SR_8 || mode == ROW_SCALED_SR || mode == SQUARE_SR)
        q.rounding = NIB_ROUND_STOCHASTIC_8;
    if (mode == SR_24 || mode == RHT_SR)
        q.rounding = NIB_ROUND_STOCHASTIC_24;
    if (mode == SR_UNBIASED)
        q.rounding = NIB_ROUND_STOCHASTIC_UNBIASED;
    q.rht = q.rht_rowwise = mode == RHT || mode == RHT_SR;
    q.row_scaled = mode == ROW_SCALED || mode == ROW_SCALED_FOUR || mode == ROW_SCALED_SR;
    if (mode == SQUARE || mode == SQUARE_FOUR || mode == SQUARE_SR)
        q.block_dims[0] = 16;
    q.swizzled = mode == SWIZZLED;
    if (mode == POW2)
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    if (mode == FLOOR)
        q.min_block_scale = 0.875f;
    return q;
}

/* The RHT wants whole blocks; everything else takes any shape. */
static inline bool supports(const nib_quantizer *q, int64_t rows, int64_t cols)
{
    return (!q->rht || rows % 16 == 0) && (!q->rht_rowwise || cols % 16 == 0);
}

static const int64_t shapes[][2] = { { 1, 1 },   { 3, 5 },   { 17, 33 },   { 16, 16 }, { 40, 100 }, { 64, 48 },
                                     { 1, 300 }, { 300, 1 }, { 128, 272 }, { 33, 16 }, { 15, 257 }, { 1, 4096 } };

/* Call body for every shape, dtype, kind and mode that go together. */
static inline void for_all(void (*body)(const nib_quantizer *q, const nib_array *x, enum kind kind))
{
    fill_tables();
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < COUNT(dtypes); d++)
            for (int kind = 0; kind < KINDS; kind++)
                for (int mode = 0; mode < MODES; mode++) {
                    const nib_quantizer q = mode_of(mode);
                    /* The longer the tensor, the fewer of its combinations. */
                    if (!supports(&q, shapes[s][0], shapes[s][1]) || test_below(shapes[s][0] * shapes[s][1]) > 1500)
                        continue;
                    snprintf(where, sizeof where, "%lldx%lld %s %s %s", (long long)shapes[s][0],
                             (long long)shapes[s][1], nib_dtype_name(dtypes[d]), kind_names[kind], mode_names[mode]);
                    const nib_array x = random_matrix((enum kind)kind, dtypes[d], shapes[s][0], shapes[s][1]);
                    body(&q, &x, (enum kind)kind);
                    free(x.data);
                }
}

#endif
