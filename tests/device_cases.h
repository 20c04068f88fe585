/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device_cases.h - tensors of every kind, twice: on the host, and on a device whose memory the host cannot touch; and that
 * both are the same. Wants _GNU_SOURCE.
 */
#ifndef NIB_DEVICE_CASES_H
#define NIB_DEVICE_CASES_H

#include "test_directory.h"

#include <math.h>

#include "base/device.h"
#include "fake_device.h"
#include "tensor/tensor.h"

/* ---- Kinds of tensors ---- */

enum kind {
    LINES,
    SQUARE,
    ROW_SCALED,
    RHT,
    RHT_ROWWISE,
    STOCHASTIC_8,
    STOCHASTIC_24,
    UNBIASED,
    FOUR_OVER_SIX,
    FOUR_OVER_SIX_SQUARE,
    SWEEP,
    SWIZZLED,
    EXACT,
    GIST,
    TORCHAO,
    MODELOPT,
    COMPRESSED_TENSORS,
    FLOAT8,
    FLOAT8_E5M2,
    MXFP8,
    MXFP8_SQUARE,
    MXFP8_SWIZZLED,
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_LINES,
    MXFP4,
    KINDS
};

static inline nib_format format_of(enum kind kind)
{
    return kind < FLOAT8            ? NIB_NVFP4
           : kind <= FLOAT8_E5M2    ? NIB_FLOAT8
           : kind <= MXFP8_SWIZZLED ? NIB_MXFP8
           : kind < MXFP4           ? NIB_FLOAT8_BLOCK
                                    : NIB_MXFP4;
}

static inline nib_quantizer quantizer_of(enum kind kind)
{
    nib_quantizer q;
    CHECK_OK(nib_quantizer_init_format(&q, format_of(kind)));
    const bool square = kind == SQUARE || kind == FOUR_OVER_SIX_SQUARE;
    if (square || kind == MXFP8_SQUARE)
        q.block_dims[0] = q.block_dims[1];
    if (kind == FLOAT8_BLOCK_LINES)
        q.block_dims[0] = 1;
    q.row_scaled = kind == ROW_SCALED;
    q.rht = kind == RHT || kind == RHT_ROWWISE;
    q.rht_rowwise = kind == RHT_ROWWISE;
    q.rounding = kind == STOCHASTIC_8    ? NIB_ROUND_STOCHASTIC_8
                 : kind == STOCHASTIC_24 ? NIB_ROUND_STOCHASTIC_24
                 : kind == UNBIASED      ? NIB_ROUND_STOCHASTIC_UNBIASED
                                         : NIB_ROUND_NEAREST;
    q.seed = 12345;
    q.scale_rule = kind == FOUR_OVER_SIX || kind == FOUR_OVER_SIX_SQUARE ? NIB_SCALE_4OVER6
                   : kind == SWEEP                                       ? NIB_SCALE_SWEEP
                                                                         : NIB_SCALE_RTN;
    q.swizzled = kind == SWIZZLED || kind == MXFP8_SWIZZLED;
    if (kind == EXACT)
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT;
    if (kind >= GIST && kind <= COMPRESSED_TENSORS)
        q.dialect = (nib_dialect)(NIB_DIALECT_GIST + (kind - GIST));
    if (kind == FLOAT8_E5M2)
        q.element = NIB_E5M2;
    return q;
}

/* ---- The same values on the host and on the device ---- */

enum layout { CONTIGUOUS, GAPS, REVERSED, TRANSPOSED, LAYOUTS };

struct setting {
    enum kind kind;
    nib_quantizer q;
    nib_dtype dtype;
    enum layout layout;
    int rank;
    int64_t shape[NIB_MAX_RANK];
    nib_device *device;
    nib_array host_x, x;
    nib_tensor *host, *t;
};

/* An array of the host, with memory of its own, of that layout; its elements are zeros. */
static inline nib_array make_array(nib_dtype dtype, int rank, const int64_t *shape, enum layout layout)
{
    nib_array array = { .dtype = dtype, .rank = rank };
    int64_t stride = 1;
    const size_t size = (size_t)nib_dtype_bits(dtype) / 8;
    for (int k = 0; k < rank; k++) {
        const int dim = layout == TRANSPOSED ? k : rank - 1 - k;
        array.shape[dim] = shape[dim];
        array.strides[dim] = stride;
        stride *= shape[dim] + (layout == GAPS && k == 0 ? 3 : 0);
    }
    array.bytes = (size_t)stride * size;
    if (layout == REVERSED && rank && shape[0] > 0) {
        array.offset = (size_t)((shape[0] - 1) * array.strides[0]) * size;
        array.strides[0] = -array.strides[0];
    }
    array.data = malloc(array.bytes + 1);
    if (!array.data)
        exit(2);
    memset(array.data, 0, array.bytes);
    return array;
}

static inline void fill_array(nib_array *array)
{
    const size_t n = array->bytes / ((size_t)nib_dtype_bits(array->dtype) / 8);
    float *values = malloc(n * sizeof *values + 1);
    for (size_t i = 0; i < n; i++)
        values[i] = test_normal() * (test_below(8) ? 1.0f : 40.0f);
    CHECK_OK(nib_encode(array->dtype, values, n, array->data));
    free(values);
}

static inline void open_setting(struct setting *s)
{
    s->device = fake_create(0);
    s->host_x = make_array(s->dtype, s->rank, s->shape, s->layout);
    fill_array(&s->host_x);
    s->x = fake_array(s->device, &s->host_x);
    s->host = s->t = NULL;
    CHECK_OK(nib_quantize(&s->q, &s->host_x, NULL, &s->host));
    CHECK_OK(nib_quantize(&s->q, &s->x, NULL, &s->t));
}

static inline void close_setting(struct setting *s)
{
    nib_tensor_destroy(s->host);
    nib_tensor_destroy(s->t);
    fake_free(s->device, s->x.data);
    free(s->host_x.data);
    nib_device_release(s->device);
    CHECK_THAT(fake_live() == 0, "kind %d: %ld things of the device are left", (int)s->kind, fake_live());
}

static inline struct setting setting_of(enum kind kind, nib_dtype dtype, int rank, const int64_t *shape)
{
    struct setting s = { .kind = kind, .q = quantizer_of(kind), .dtype = dtype, .rank = rank };
    memcpy(s.shape, shape, (size_t)rank * sizeof *shape);
    return s;
}

/* Whole blocks, tails, a rank of 3, next to nothing, nothing. */
static const struct {
    int rank;
    int64_t shape[3];
} shapes[] = { { 2, { 48, 80 } }, { 2, { 33, 50 } }, { 3, { 2, 16, 64 } }, { 2, { 1, 3 } }, { 2, { 0, 32 } } };
enum { SHAPES = sizeof shapes / sizeof *shapes };

static inline void for_settings(void (*run)(struct setting *s))
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    for (int kind = 0; kind < KINDS; kind++)
        for (int shape = 0; shape < SHAPES; shape++)
            for (int dtype = 0; dtype < 3; dtype++) {
                struct setting s = setting_of((enum kind)kind, dtypes[dtype], shapes[shape].rank, shapes[shape].shape);
                s.layout = (enum layout)((kind + shape + dtype) % LAYOUTS);
                const nib_array like = { .dtype = s.dtype,
                                         .rank = s.rank,
                                         .shape = { s.shape[0], s.shape[1], s.shape[2] } };
                if (nib_quantizer_check(&s.q, &like))
                    continue; /* the RHT and rows that are no multiple of 16 */
                open_setting(&s);
                run(&s);
                close_setting(&s);
                if (test_failures)
                    fprintf(stderr, "  in kind %d, shape %d, dtype %d, layout %d\n", kind, shape, (int)s.dtype,
                            (int)s.layout);
                if (test_failures)
                    return;
            }
}

static inline float *upload_floats(const struct setting *s, const float *values, int64_t n)
{
    return fake_upload(s->device, values, (size_t)n * sizeof *values, sizeof *values);
}

/* ---- Comparing ---- */

static inline void check_metadata(const nib_tensor *a, const nib_tensor *b)
{
    nib_metadata of_a = { .bytes = sizeof of_a }, of_b = { .bytes = sizeof of_b };
    CHECK_OK(nib_tensor_get_metadata(a, &of_a));
    CHECK_OK(nib_tensor_get_metadata(b, &of_b));
    CHECK(nib_quantizer_equal(of_a.quantizer, of_b.quantizer));
    of_a.quantizer = of_b.quantizer = NULL;
    CHECK_BYTES(&of_a, &of_b, sizeof of_a);
}

/* One tensor on the host, and what should be the same on a device. */
static inline void check_same(const nib_tensor *host, const nib_tensor *t, const nib_device *device)
{
    nib_tensor *back = NULL;
    if (!host || !t) {
        CHECK(!host && !t);
        return;
    }
    CHECK(nib_device_same(nib_tensor_device(t), device));
    CHECK_OK(nib_tensor_to(t, NULL, &back));
    CHECK(nib_device_is_host(nib_tensor_device(back)));
    check_metadata(host, back);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        nib_buffer *const of_host = nib_tensor_buffer(host, (nib_part)part),
                          *const of_t = nib_tensor_buffer(t, (nib_part)part),
                          *const of_back = nib_tensor_buffer(back, (nib_part)part);
        CHECK(!of_host == !of_t && !of_host == !of_back);
        if (!of_host || !of_t || !of_back)
            continue;
        CHECK(nib_device_same(nib_buffer_device(of_t), device) && nib_device_is_host(nib_buffer_device(of_back)));
        CHECK(nib_buffer_bytes(of_host) == nib_buffer_bytes(of_back));
        CHECK_BYTES(nib_buffer_data(of_host), nib_buffer_data(of_back), nib_buffer_bytes(of_host));
        nib_array view = { 0 };
        CHECK_OK(nib_tensor_part(t, (nib_part)part, &view));
        CHECK(nib_device_same(view.device, device) && view.data == nib_buffer_data(of_t));
    }
    nib_tensor_destroy(back);
}

/* The same status on either; what came of it is compared. */
#define CHECK_BOTH(on_host, on_device)                                                               \
    do {                                                                                             \
        const nib_status both_host = (on_host), both_device = (on_device);                           \
        CHECK_THAT(both_host == both_device, "%s: %s on the host, %s on the device: %s", #on_device, \
                   nib_status_name(both_host), nib_status_name(both_device), nib_last_error());      \
    } while (0)

static inline void check_and_destroy(nib_tensor *host, nib_tensor *t, const nib_device *device)
{
    check_same(host, t, device);
    nib_tensor_destroy(host);
    nib_tensor_destroy(t);
}

/* ---- Files ---- */

static inline const char *path_of(const char *name)
{
    static char path[128];
    make_directory();
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static inline nib_status write_file(const char *path, const nib_tensor *t)
{
    nib_writer *writer = NULL;
    TRY(nib_writer_create(path, &writer));
    nib_status status = nib_writer_declare_tensor(writer, "w", t);
    if (!status)
        status = nib_writer_write_tensor(writer, "w", t);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    return status;
}

#endif
