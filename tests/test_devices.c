/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_devices.c - everything that a tensor can do, on a device whose memory the host cannot touch: the results are the
 * host's, nothing above the seam follows a pointer, and what fails leaves things as they were.
 */
#define _GNU_SOURCE
#include "test_directory.h"

#include <math.h>

#include "base/device.h"
#include "fake_device.h"
#include "team.h"
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

static nib_format format_of(enum kind kind)
{
    return kind < FLOAT8            ? NIB_NVFP4
           : kind <= FLOAT8_E5M2    ? NIB_FLOAT8
           : kind <= MXFP8_SWIZZLED ? NIB_MXFP8
           : kind < MXFP4           ? NIB_FLOAT8_BLOCK
                                    : NIB_MXFP4;
}

static nib_quantizer quantizer_of(enum kind kind)
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
static nib_array make_array(nib_dtype dtype, int rank, const int64_t *shape, enum layout layout)
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

static void fill_array(nib_array *array)
{
    const size_t n = array->bytes / ((size_t)nib_dtype_bits(array->dtype) / 8);
    float *values = malloc(n * sizeof *values + 1);
    for (size_t i = 0; i < n; i++)
        values[i] = test_normal() * (test_below(8) ? 1.0f : 40.0f);
    CHECK_OK(nib_encode(array->dtype, values, n, array->data));
    free(values);
}

static void open_setting(struct setting *s)
{
    s->device = fake_create(0);
    s->host_x = make_array(s->dtype, s->rank, s->shape, s->layout);
    fill_array(&s->host_x);
    s->x = fake_array(s->device, &s->host_x);
    s->host = s->t = NULL;
    CHECK_OK(nib_quantize(&s->q, &s->host_x, NULL, &s->host));
    CHECK_OK(nib_quantize(&s->q, &s->x, NULL, &s->t));
}

static void close_setting(struct setting *s)
{
    nib_tensor_destroy(s->host);
    nib_tensor_destroy(s->t);
    fake_free(s->device, s->x.data);
    free(s->host_x.data);
    nib_device_release(s->device);
    CHECK_THAT(fake_live() == 0, "kind %d: %ld things of the device are left", (int)s->kind, fake_live());
}

static struct setting setting_of(enum kind kind, nib_dtype dtype, int rank, const int64_t *shape)
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

static void for_settings(void (*run)(struct setting *s))
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

/* ---- Comparing ---- */

static void check_metadata(const nib_tensor *a, const nib_tensor *b)
{
    nib_metadata of_a = { .bytes = sizeof of_a }, of_b = { .bytes = sizeof of_b };
    CHECK_OK(nib_tensor_get_metadata(a, &of_a));
    CHECK_OK(nib_tensor_get_metadata(b, &of_b));
    CHECK(nib_quantizer_equal(of_a.quantizer, of_b.quantizer));
    of_a.quantizer = of_b.quantizer = NULL;
    CHECK_BYTES(&of_a, &of_b, sizeof of_a);
}

/* One tensor on the host, and what should be the same on a device. */
static void check_same(const nib_tensor *host, const nib_tensor *t, const nib_device *device)
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

static void check_and_destroy(nib_tensor *host, nib_tensor *t, const nib_device *device)
{
    check_same(host, t, device);
    nib_tensor_destroy(host);
    nib_tensor_destroy(t);
}

/* ---- Quantize ---- */

static void run_quantize(struct setting *s)
{
    check_same(s->host, s->t, s->device);
    nib_quantizer q = s->q;
    q.amax_comm = nib_comm_serial();
    nib_tensor *host = NULL, *t = NULL;
    CHECK_BOTH(nib_quantize(&q, &s->host_x, NULL, &host), nib_quantize(&q, &s->x, NULL, &t));
    check_and_destroy(host, t, s->device);
}

TEST(quantize) { for_settings(run_quantize); }

/* Other values of the same shape, on both. */
struct values {
    nib_array host, on_device;
};

static struct values other_values(const struct setting *s, enum layout layout)
{
    struct values values = { .host = make_array(s->dtype, s->rank, s->shape, layout) };
    fill_array(&values.host);
    values.on_device = fake_array(s->device, &values.host);
    return values;
}

static void free_values(const struct setting *s, struct values *values)
{
    free(values->host.data);
    fake_free(s->device, values->on_device.data);
}

/* Quantizers that follow one another, each into what the one before left. */
static void run_quantize_into(struct setting *s)
{
    nib_tensor *host_view = NULL, *view = NULL;
    CHECK_OK(nib_tensor_view(s->host, s->rank, s->shape, &host_view));
    CHECK_OK(nib_tensor_view(s->t, s->rank, s->shape, &view));
    nib_quantizer chain[6];
    for (int i = 0; i < 6; i++)
        chain[i] = s->q;
    chain[1].columnwise = 0;
    chain[2].offset = 4;
    chain[3].swizzled = !s->q.swizzled;
    chain[4].rowwise = 0;
    for (int i = 0; i < 6; i++) {
        struct values x = other_values(s, (enum layout)(i % LAYOUTS));
        const nib_quantizer *q = i ? &chain[i] : NULL;
        CHECK_BOTH(nib_quantize_into(q, &x.host, NULL, NULL, s->host),
                   nib_quantize_into(q, &x.on_device, NULL, NULL, s->t));
        check_same(s->host, s->t, s->device);
        check_same(host_view, view, s->device);
        free_values(s, &x);
    }
    nib_tensor_destroy(host_view);
    nib_tensor_destroy(view);
}

TEST(quantize_into) { for_settings(run_quantize_into); }

/* A flag on the device, set or not, with buffers that stay, go and come, with options that change and a columnwise
 * usage that is not valid. */
static void run_noop(struct setting *s)
{
    for (int i = 0; i < 10; i++) {
        const float flag = i % 2 ? 1.0f : 0.5f;
        float *const on_device = fake_upload(s->device, &flag, sizeof flag, sizeof flag);
        nib_quantizer q = s->q;
        q.columnwise = i / 2 != 1;
        q.swizzled ^= i / 2 == 2 && nib_format_of(&q)->swizzles;
        q.seed += i / 2 == 3;
        if (i / 2 == 4)
            CHECK_BOTH(nib_tensor_invalidate_columnwise(s->host), nib_tensor_invalidate_columnwise(s->t));
        struct values x = other_values(s, CONTIGUOUS);
        CHECK_BOTH(nib_quantize_into(&q, &x.host, NULL, &flag, s->host),
                   nib_quantize_into(&q, &x.on_device, NULL, on_device, s->t));
        check_same(s->host, s->t, s->device);
        free_values(s, &x);
        fake_free(s->device, on_device);
    }
}

TEST(noop) { for_settings(run_noop); }

/* A flag that stops nothing is not waited for where only bytes change. */
TEST(noop_in_place_does_not_wait)
{
    struct setting s = setting_of(SQUARE, NIB_BF16, 2, shapes[0].shape);
    open_setting(&s);
    const float flag = 0;
    float *const on_device = fake_upload(s.device, &flag, sizeof flag, sizeof flag);
    fake_ops(s.device)->is_set = NULL;
    CHECK_OK(nib_quantize_into(NULL, &s.x, NULL, on_device, s.t));
    CHECK_OK(nib_quantize_into(&s.q, &s.x, NULL, on_device, s.t));
    check_same(s.host, s.t, s.device);
    fake_free(s.device, on_device);
    close_setting(&s);
}

/* ---- Overrides ---- */

static float *upload_floats(const struct setting *s, const float *values, int64_t n)
{
    return fake_upload(s->device, values, (size_t)n * sizeof *values, sizeof *values);
}

enum { OVERRIDES = 6 };

/* Which of the overrides, bit by bit, for a way to bring them. */
static void run_overrides_in(struct setting *s, int way)
{
    float values[2][512];
    const struct nib_geometry *g = &s->t->geometry;
    nib_overrides host = { .bytes = sizeof host }, on_device = { .bytes = sizeof on_device };
    float *memory[3] = { NULL }, seen = 0.25f, host_seen = seen, scale = 3.5f;
    for (int usage = 0; usage < 2; usage++) {
        const int64_t n = g->usage[usage].tensor_scales;
        for (int64_t i = 0; i < n; i++)
            values[usage][i] = 1.0f + (float)test_uniform();
        memory[usage] = upload_floats(s, values[usage], n);
        if (way == 0 || way == 3 || (way == 4 && usage == 0)) {
            host.amax[usage] = values[usage];
            on_device.amax[usage] = memory[usage];
        }
        if (way == 1) {
            host.tensor_scale[usage] = values[usage];
            on_device.tensor_scale[usage] = memory[usage];
        }
    }
    float *const device_scale = upload_floats(s, &scale, 1);
    if (way == 2) {
        host.scale = &scale;
        on_device.scale = device_scale;
    }
    memory[2] = upload_floats(s, &seen, 1);
    if (way >= 2) {
        host.amax_seen = &host_seen;
        on_device.amax_seen = memory[2];
    }
    nib_tensor *a = NULL, *b = NULL;
    CHECK_BOTH(nib_quantize(&s->q, &s->host_x, &host, &a), nib_quantize(&s->q, &s->x, &on_device, &b));
    check_and_destroy(a, b, s->device);
    CHECK_BOTH(nib_quantize_into(NULL, &s->host_x, &host, NULL, s->host),
               nib_quantize_into(NULL, &s->x, &on_device, NULL, s->t));
    check_same(s->host, s->t, s->device);
    fake_download(s->device, &seen, memory[2], sizeof seen);
    CHECK_BYTES(&seen, &host_seen, sizeof seen);
    for (int i = 0; i < 3; i++)
        fake_free(s->device, memory[i]);
    fake_free(s->device, device_scale);
}

static void run_overrides(struct setting *s)
{
    for (int way = 0; way < OVERRIDES; way++)
        run_overrides_in(s, way);
}

TEST(overrides) { for_settings(run_overrides); }

TEST(overrides_that_are_rejected)
{
    struct setting s = setting_of(LINES, NIB_BF16, 2, shapes[0].shape);
    open_setting(&s);
    const float negative = -1;
    float *const on_device = upload_floats(&s, &negative, 1);
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { on_device, on_device } };
    nib_tensor *out = NULL;
    CHECK_FAILS(nib_quantize(&s.q, &s.x, &overrides, &out), NIB_ERR_ARG, "is negative");
    CHECK_FAILS(nib_quantize_into(&s.q, &s.x, &overrides, NULL, s.t), NIB_ERR_ARG, "is negative");
    fake_open();
    *on_device = 1;
    fake_close();
    fake_ops(s.device)->check_overrides = NULL; /* a device need not look at them */
    CHECK_OK(nib_quantize(&s.q, &s.x, &overrides, &out));
    nib_tensor_destroy(out);
    fake_free(s.device, on_device);
    close_setting(&s);
}

/* ---- Dequantize ---- */

static void dequantize_both(struct setting *s, nib_usage from, nib_dtype dtype, enum layout layout, int64_t first,
                            int64_t count)
{
    const int64_t rows_shape[2] = { count, s->t->geometry.cols };
    nib_array host =
        count < 0 ? make_array(dtype, s->rank, s->shape, layout) : make_array(dtype, 2, rows_shape, layout);
    memset(host.data, 0x5A, host.bytes);
    nib_array out = fake_array(s->device, &host);
    if (count < 0)
        CHECK_BOTH(nib_dequantize(s->host, from, &host), nib_dequantize(s->t, from, &out));
    else
        CHECK_BOTH(nib_dequantize_rows(s->host, from, first, count, &host),
                   nib_dequantize_rows(s->t, from, first, count, &out));
    char *back = malloc(host.bytes + 1);
    fake_download(s->device, back, out.data, host.bytes);
    CHECK_BYTES(host.data, back, host.bytes);
    free(back);
    free(host.data);
    fake_free(s->device, out.data);
}

static void run_dequantize(struct setting *s)
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    const int64_t rows = s->t->geometry.rows;
    for (int usage = 0; usage < 3; usage++) {
        const nib_dtype dtype = dtypes[(usage + (int)s->kind) % 3];
        const enum layout layout = (enum layout)((usage + (int)s->dtype) % LAYOUTS);
        dequantize_both(s, (nib_usage)usage, dtype, layout, 0, -1);
        for (int64_t first = 0; first < rows; first += 7)
            dequantize_both(s, (nib_usage)usage, dtype, layout, first, nib_min(11, rows - first));
    }
}

TEST(dequantize) { for_settings(run_dequantize); }

/* ---- Create, zero, clone, copy, move ---- */

static void run_life(struct setting *s)
{
    nib_tensor *host = NULL, *t = NULL, *elsewhere = NULL;
    nib_device *const other = fake_create(1);
    CHECK_OK(nib_tensor_create(&s->q, s->dtype, s->rank, s->shape, NULL, &host));
    CHECK_OK(nib_tensor_create(&s->q, s->dtype, s->rank, s->shape, s->device, &t));
    check_same(host, t, s->device);
    CHECK_OK(nib_tensor_copy(host, s->host));
    CHECK_OK(nib_tensor_copy(t, s->t));
    check_same(s->host, t, s->device);
    CHECK_OK(nib_tensor_zero(host));
    CHECK_OK(nib_tensor_zero(t));
    check_and_destroy(host, t, s->device);
    CHECK_OK(nib_tensor_clone(s->t, &t));
    for (int part = 0; part < NIB_PART_COUNT; part++)
        CHECK(!nib_tensor_buffer(t, (nib_part)part) ||
              nib_tensor_buffer(t, (nib_part)part) != nib_tensor_buffer(s->t, (nib_part)part));
    check_same(s->host, t, s->device);
    CHECK_OK(nib_tensor_to(t, other, &elsewhere));
    check_same(s->host, elsewhere, other);
    nib_tensor_destroy(elsewhere);
    CHECK_OK(nib_tensor_to(s->host, other, &elsewhere));
    check_same(s->host, elsewhere, other);
    nib_tensor_clear(elsewhere);
    CHECK(nib_tensor_device(elsewhere) == other);
    nib_tensor_destroy(t);
    CHECK_OK(nib_tensor_to(elsewhere, s->device, &t)); /* one without data */
    CHECK(nib_tensor_device(t) == s->device);
    nib_tensor_destroy(t);
    nib_tensor_destroy(elsewhere);
    nib_device_release(other);
}

TEST(life) { for_settings(run_life); }

/* More bytes than are moved at a time, on the way from device to device. */
TEST(large_moves)
{
    struct setting s = setting_of(FLOAT8, NIB_BF16, 2, (const int64_t[2]){ 1031, 2047 });
    nib_device *const other = fake_create(3);
    nib_tensor *elsewhere = NULL;
    open_setting(&s);
    CHECK_OK(nib_tensor_to(s.t, other, &elsewhere));
    check_same(s.host, elsewhere, other);
    nib_tensor_destroy(elsewhere);
    nib_device_release(other);
    close_setting(&s);
}

/* Two objects for one device are the device. */
TEST(one_device)
{
    struct setting s = setting_of(SQUARE, NIB_BF16, 2, shapes[0].shape);
    open_setting(&s);
    nib_device *const twin = fake_create(0), *const other = fake_create(1);
    CHECK(nib_device_same(twin, s.device) && !nib_device_same(twin, other) && !nib_device_same(twin, NULL));
    CHECK(strcmp(nib_device_name(twin), "fake:0") == 0);
    CHECK(strcmp(nib_device_name(host_of(2)), "host") == 0 && strcmp(nib_device_name(NULL), "host") == 0);
    nib_tensor *t = NULL;
    int equal = 0;
    CHECK_OK(nib_tensor_to(s.t, twin, &t));
    CHECK_OK(nib_tensor_copy(t, s.t));
    CHECK_OK(nib_quantize_into(NULL, &s.x, NULL, NULL, t));
    CHECK_OK(nib_tensor_equal(t, s.t, &equal));
    CHECK(equal);
    nib_tensor_destroy(t);
    nib_device_release(twin);
    nib_device_release(other);
    close_setting(&s);
}

/* ---- Views, slices ---- */

static void run_views(struct setting *s)
{
    const int64_t elements = s->t->geometry.rows * s->t->geometry.cols;
    const struct {
        int rank;
        int64_t shape[4];
    } wanted[] = { { 2, { -1, s->shape[s->rank - 1] } },
                   { 3, { 1, -1, s->shape[s->rank - 1] } },
                   { 2, { -1, 16 } },
                   { 2, { -1, 64 } },
                   { 2, { -1, 160 } },
                   { 1, { elements } },
                   { 2, { 7, 7 } } };
    nib_quantizer rowwise = s->q;
    rowwise.columnwise = 0;
    for (int both = 0; both < 2; both++) {
        if (both) /* without the columnwise usage more of them are possible */
            CHECK_BOTH(nib_quantize_into(&rowwise, &s->host_x, NULL, NULL, s->host),
                       nib_quantize_into(&rowwise, &s->x, NULL, NULL, s->t));
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
            nib_tensor *host = NULL, *t = NULL;
            CHECK_BOTH(nib_tensor_view(s->host, wanted[i].rank, wanted[i].shape, &host),
                       nib_tensor_view(s->t, wanted[i].rank, wanted[i].shape, &t));
            check_and_destroy(host, t, s->device);
            host = t = NULL;
            CHECK_BOTH(nib_tensor_reshape(s->host, wanted[i].rank, wanted[i].shape, &host),
                       nib_tensor_reshape(s->t, wanted[i].rank, wanted[i].shape, &t));
            check_and_destroy(host, t, s->device);
        }
    }
}

TEST(views) { for_settings(run_views); }

static void run_slices(struct setting *s)
{
    const int64_t rows = s->t->geometry.rows;
    nib_quantizer rowwise = s->q;
    rowwise.columnwise = 0;
    for (int both = 0; both < 2; both++) {
        if (both)
            CHECK_BOTH(nib_quantize_into(&rowwise, &s->host_x, NULL, NULL, s->host),
                       nib_quantize_into(&rowwise, &s->x, NULL, NULL, s->t));
        static const int64_t cuts[][2] = { { 0, 16 }, { 16, 16 }, { 32, 1 }, { 16, 17 }, { 5, 9 }, { 0, 0 } };
        for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
            nib_tensor *host = NULL, *t = NULL;
            CHECK_BOTH(nib_tensor_slice(s->host, cuts[i][0], cuts[i][1], &host),
                       nib_tensor_slice(s->t, cuts[i][0], cuts[i][1], &t));
            check_and_destroy(host, t, s->device);
        }
        const int64_t counts[3] = { nib_min(16, rows), 0, rows - nib_min(16, rows) };
        nib_tensor *host[3] = { NULL }, *t[3] = { NULL };
        CHECK_BOTH(nib_tensor_split(s->host, counts, 3, host), nib_tensor_split(s->t, counts, 3, t));
        for (int i = 0; i < 3; i++)
            check_and_destroy(host[i], t[i], s->device);
    }
}

TEST(slices) { for_settings(run_slices); }

/* ---- Equality ---- */

static void run_equal(struct setting *s)
{
    nib_tensor *clone = NULL;
    int equal = -1;
    CHECK_OK(nib_tensor_clone(s->t, &clone));
    CHECK_OK(nib_tensor_equal(s->t, clone, &equal));
    CHECK(equal == 1);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        nib_buffer *const buffer = nib_tensor_buffer(clone, (nib_part)part);
        if (!nib_buffer_bytes(buffer) || s->t->geometry.rows * s->t->geometry.cols == 0)
            continue;
        fake_open();
        ((uint8_t *)nib_buffer_data(buffer))[0] ^= 1;
        fake_close();
        CHECK_OK(nib_tensor_equal(s->t, clone, &equal));
        CHECK_THAT(equal == 0, "part %d makes no difference", part);
        fake_open();
        ((uint8_t *)nib_buffer_data(buffer))[0] ^= 1;
        fake_close();
    }
    CHECK_OK(nib_tensor_equal(s->t, clone, &equal));
    CHECK(equal == 1);
    nib_tensor_destroy(clone);
}

TEST(equal) { for_settings(run_equal); }

/* ---- Usages, swizzle, rebind, options ---- */

static void run_usages(struct setting *s)
{
    static const int wanted[][2] = { { -1, -1 }, { 1, 0 }, { -1, 1 }, { 0, 1 }, { 1, 1 }, { 0, 0 } };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        nib_tensor *host = NULL, *t = NULL, *view = NULL, *host_view = NULL;
        CHECK_OK(nib_tensor_view(s->host, s->rank, s->shape, &host_view));
        CHECK_OK(nib_tensor_view(s->t, s->rank, s->shape, &view));
        CHECK_BOTH(nib_tensor_update_usage(s->host, wanted[i][0], wanted[i][1]),
                   nib_tensor_update_usage(s->t, wanted[i][0], wanted[i][1]));
        check_same(s->host, s->t, s->device);
        check_and_destroy(host_view, view, s->device);
        CHECK_OK(nib_tensor_clone(s->host, &host));
        CHECK_OK(nib_tensor_clone(s->t, &t));
        CHECK_BOTH(nib_tensor_invalidate_columnwise(host), nib_tensor_invalidate_columnwise(t));
        check_same(host, t, s->device);
        CHECK_BOTH(nib_tensor_update_usage(host, -1, 1), nib_tensor_update_usage(t, -1, 1));
        check_same(host, t, s->device);
        nib_tensor *const host_list[1] = { host }, *const list[1] = { t };
        CHECK_BOTH(nib_post_all_gather_processing(host_list, 1), nib_post_all_gather_processing(list, 1));
        check_and_destroy(host, t, s->device);
    }
}

TEST(usages) { for_settings(run_usages); }

static void run_swizzle(struct setting *s)
{
    nib_tensor *host_view = NULL, *view = NULL;
    CHECK_OK(nib_tensor_view(s->host, s->rank, s->shape, &host_view));
    CHECK_OK(nib_tensor_view(s->t, s->rank, s->shape, &view));
    for (int i = 0; i < 3; i++) {
        const bool swizzle = (i % 2 == 0) != s->q.swizzled;
        CHECK_BOTH((swizzle ? nib_tensor_swizzle : nib_tensor_unswizzle)(s->host),
                   (swizzle ? nib_tensor_swizzle : nib_tensor_unswizzle)(s->t));
        check_same(s->host, s->t, s->device);
        check_same(host_view, view, s->device);
    }
    nib_tensor_destroy(host_view);
    nib_tensor_destroy(view);
}

TEST(swizzle) { for_settings(run_swizzle); }

static void run_rebind(struct setting *s)
{
    const size_t bytes = nib_buffer_bytes(nib_tensor_buffer(s->t, NIB_ROW_DATA));
    nib_buffer *buffer = NULL;
    nib_tensor *view = NULL;
    CHECK_OK(nib_buffer_create(bytes, s->device, &buffer));
    CHECK_OK(nib_tensor_view(s->t, s->rank, s->shape, &view));
    if (s->kind < FLOAT8)
        CHECK_OK(nib_modify_nvfp4_rowwise_storage(s->t, buffer));
    else
        CHECK_OK(nib_tensor_rebind_rowwise(s->t, buffer));
    CHECK(nib_tensor_buffer(s->t, NIB_ROW_DATA) == buffer);
    nib_buffer_release(buffer);
    check_same(s->host, s->t, s->device);
    check_same(s->host, view, s->device);
    nib_quantizer q = s->q;
    q.offset += 8;
    CHECK_OK(nib_tensor_set_quantizer(s->t, &q));
    CHECK_OK(nib_tensor_set_quantizer(s->host, &q));
    check_same(s->host, s->t, s->device);
    nib_tensor_destroy(view);
}

TEST(rebind) { for_settings(run_rebind); }

/* ---- Save and restore, buffers ---- */

static void run_save(struct setting *s)
{
    nib_buffer *saved[NIB_PART_COUNT] = { NULL };
    size_t n = 0, used = 0;
    CHECK_OK(nib_tensor_prepare_for_saving(s->t, saved, NIB_PART_COUNT, &n));
    CHECK(nib_tensor_device(s->t) == s->device);
    CHECK_OK(nib_tensor_restore_from_saved(s->t, saved, n, &used));
    CHECK(used == n);
    check_same(s->host, s->t, s->device);
    nib_item items[2] = { { .tensor = s->t }, { .array = s->x } };
    nib_saved list[NIB_PART_COUNT + 1];
    CHECK_OK(nib_prepare_for_saving(items, 2, list, NIB_PART_COUNT + 1, &n));
    CHECK_OK(nib_restore_from_saved(items, 2, list, n, &used));
    CHECK(used == n && items[1].array.device == s->device && items[1].array.data == s->x.data);
    check_same(s->host, s->t, s->device);
    nib_buffer *parts[NIB_PART_COUNT];
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = nib_tensor_buffer(s->t, (nib_part)part);
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_from_buffers(&s->q, s->dtype, s->rank, s->shape, parts, NIB_PART_COUNT, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
}

TEST(save) { for_settings(run_save); }

/* What a format does not have is not looked at, wherever it is. */
TEST(parts_of_other_formats)
{
    struct setting s = setting_of(MXFP8, NIB_BF16, 2, shapes[0].shape);
    open_setting(&s);
    nib_buffer *parts[NIB_PART_COUNT], *stray = NULL;
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = nib_tensor_buffer(s.t, (nib_part)part);
    CHECK_OK(nib_buffer_create(4, NULL, &stray));
    parts[NIB_ROW_TENSOR_SCALE] = stray;
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_from_buffers(&s.q, s.dtype, s.rank, s.shape, parts, NIB_PART_COUNT, &t));
    check_same(s.host, t, s.device);
    nib_tensor_destroy(t);
    nib_buffer_release(stray);
    close_setting(&s);
}

/* ---- Files ---- */

static const char *path_of(const char *name)
{
    static char path[128];
    make_directory();
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static nib_status write_file(const char *path, const nib_tensor *t)
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

static void run_files(struct setting *s)
{
    const char *path = path_of("w.safetensors");
    nib_file *file = NULL;
    nib_tensor *t = NULL;
    CHECK_OK(write_file(path, s->t));
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_read_tensor(file, "w", s->device, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
    t = NULL;
    CHECK_OK(nib_file_read_tensor(file, "w", NULL, &t));
    check_same(s->host, t, NULL);
    nib_tensor_destroy(t);
    nib_file_close(file);
}

TEST(files) { for_settings(run_files); }

TEST(large_files)
{
    struct setting s = setting_of(FLOAT8, NIB_BF16, 2, (const int64_t[2]){ 1031, 2047 });
    open_setting(&s);
    run_files(&s);
    close_setting(&s);
}

/* ---- DLPack ---- */

struct dl_tensor { /* DLPack's, by its specification */
    void *data;
    int32_t device_type, device_id, rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct DLManagedTensor {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct DLManagedTensor *self);
};

struct DLManagedTensorVersioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    struct dl_tensor tensor;
};

/* The tensor's buffers through DLPack of one generation and back, as a tensor that shares them. */
static void exchange_parts(struct setting *s, bool versioned)
{
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_device *const other = fake_create(1);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        nib_array array = { 0 }, seen = { 0 };
        nib_buffer *none = NULL;
        if (!nib_tensor_buffer(s->t, (nib_part)part))
            continue;
        CHECK_OK(nib_tensor_part(s->t, (nib_part)part, &array));
        struct DLManagedTensor *plain = NULL;
        struct DLManagedTensorVersioned *newer = NULL;
        if (versioned)
            CHECK_OK(nib_tensor_to_dlpack_versioned(s->t, (nib_part)part, &newer));
        else
            CHECK_OK(nib_tensor_to_dlpack(s->t, (nib_part)part, &plain));
        const struct dl_tensor *const tensor = versioned ? &newer->tensor : &plain->tensor;
        CHECK(tensor->device_type == FAKE_DLPACK_TYPE && tensor->device_id == 0 && tensor->data == array.data);
        for (int i = 0; i < 2; i++) { /* not where it is said to be */
            nib_device *const wrong = i ? other : NULL;
            if (versioned) {
                CHECK_FAILS(nib_array_from_dlpack_versioned(newer, wrong, &seen), NIB_ERR_DEVICE, "device type 12");
                CHECK_FAILS(nib_buffer_from_dlpack_versioned(newer, wrong, &none), NIB_ERR_DEVICE, "id 0");
            } else {
                CHECK_FAILS(nib_array_from_dlpack(plain, wrong, &seen), NIB_ERR_DEVICE, "device type 12");
                CHECK_FAILS(nib_buffer_from_dlpack(plain, wrong, &none), NIB_ERR_DEVICE, "id 0");
            }
        }
        CHECK_OK(versioned ? nib_array_from_dlpack_versioned(newer, s->device, &seen)
                           : nib_array_from_dlpack(plain, s->device, &seen));
        CHECK(seen.device == s->device && (seen.data == array.data || !array.bytes) && seen.bytes == array.bytes);
        CHECK_OK(versioned ? nib_buffer_from_dlpack_versioned(newer, s->device, &parts[part])
                           : nib_buffer_from_dlpack(plain, s->device, &parts[part]));
    }
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_from_buffers(&s->q, s->dtype, s->rank, s->shape, parts, NIB_PART_COUNT, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        nib_buffer_release(parts[part]);
    nib_device_release(other);
}

static void run_dlpack(struct setting *s)
{
    exchange_parts(s, false);
    exchange_parts(s, true);
    struct DLManagedTensor *managed = NULL;
    nib_array x = { 0 };
    nib_tensor *t = NULL;
    CHECK_OK(nib_array_to_dlpack(&s->x, NULL, &managed));
    CHECK(managed->tensor.device_type == FAKE_DLPACK_TYPE);
    CHECK_OK(nib_array_from_dlpack(managed, s->device, &x));
    CHECK_OK(nib_quantize(&s->q, &x, NULL, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
    managed->deleter(managed);
    CHECK_OK(nib_array_to_dlpack(&s->host_x, NULL, &managed));
    CHECK_FAILS(nib_array_from_dlpack(managed, s->device, &x), NIB_ERR_DEVICE, "is not on fake:0");
    managed->deleter(managed);
}

TEST(dlpack) { for_settings(run_dlpack); }

/* ---- FSDP ---- */

static void run_fsdp(struct setting *s)
{
    nib_fsdp_parts host_parts = { .bytes = sizeof host_parts }, parts = { .bytes = sizeof parts };
    nib_tensor *host = NULL, *t = NULL;
    const nib_status status = nib_fsdp_extract(s->host, &host_parts);
    CHECK_BOTH(status, nib_fsdp_extract(s->t, &parts));
    if (status) {
        nib_quantizer rowwise = s->q;
        rowwise.columnwise = 0;
        CHECK_OK(nib_quantize_into(&rowwise, &s->host_x, NULL, NULL, s->host));
        CHECK_OK(nib_quantize_into(&rowwise, &s->x, NULL, NULL, s->t));
        CHECK_BOTH(nib_fsdp_extract(s->host, &host_parts), nib_fsdp_extract(s->t, &parts));
    }
    if (!host_parts.data.data)
        return;
    CHECK(nib_device_same(parts.data.device, s->device) && parts.tensor_scale == host_parts.tensor_scale);
    CHECK(!parts.scales.data || nib_device_same(parts.scales.device, s->device));
    const int64_t rows = s->t->geometry.rows;
    for (int i = 0; i < 2; i++) { /* new, then in place */
        CHECK_BOTH(nib_fsdp_assign(s->host, &host_parts, rows, &host), nib_fsdp_assign(s->t, &parts, rows, &t));
        check_same(host, t, s->device);
    }
    nib_tensor_destroy(host);
    nib_tensor_destroy(t);
}

TEST(fsdp) { for_settings(run_fsdp); }

/* ---- Plain arrays ---- */

TEST(array_copy)
{
    nib_device *const device = fake_create(0), *const other = fake_create(1);
    const int64_t shape[2] = { 6, 7 };
    nib_array host = make_array(NIB_F32, 2, shape, CONTIGUOUS), zeros = make_array(NIB_F32, 2, shape, CONTIGUOUS),
              gaps = make_array(NIB_F32, 2, shape, GAPS);
    fill_array(&host);
    nib_array a = fake_array(device, &zeros), b = fake_array(device, &zeros), c = fake_array(other, &zeros),
              strided = fake_array(device, &gaps);
    CHECK_OK(nib_array_copy(&host, &a));
    CHECK_OK(nib_array_copy(&a, &b));
    CHECK_OK(nib_array_copy(&b, &c));
    CHECK_OK(nib_array_copy(&c, &zeros));
    CHECK_BYTES(host.data, zeros.data, host.bytes);
    const long calls = fake_calls(device);
    CHECK_FAILS(nib_array_copy(&strided, &a), NIB_ERR_UNSUPPORTED, "C-contiguous");
    CHECK_FAILS(nib_array_copy(&a, &strided), NIB_ERR_UNSUPPORTED, "fake:0");
    CHECK_FAILS(nib_array_copy(&host, &strided), NIB_ERR_UNSUPPORTED, "from host to fake:0");
    CHECK_FAILS(nib_array_copy(&strided, &gaps), NIB_ERR_UNSUPPORTED, "from fake:0 to host");
    CHECK(fake_calls(device) == calls);
    fake_free(device, a.data);
    fake_free(device, b.data);
    fake_free(other, c.data);
    fake_free(device, strided.data);
    free(host.data);
    free(zeros.data);
    free(gaps.data);
    nib_device_release(device);
    nib_device_release(other);
    CHECK(fake_live() == 0);
}

TEST(buffers)
{
    nib_device *device = fake_create(7);
    nib_buffer *buffer = NULL, *borrowed = NULL;
    CHECK_OK(nib_buffer_create(100, device, &buffer));
    CHECK(nib_buffer_device(buffer) == device && (uintptr_t)nib_buffer_data(buffer) % 64 == 0);
    CHECK_OK(nib_buffer_borrow(nib_buffer_data(buffer), 10, device, NULL, NULL, &borrowed));
    nib_device_release(device); /* the buffers keep it */
    char bytes[100], zeros[100] = { 0 };
    fake_download(device, bytes, nib_buffer_data(buffer), sizeof bytes);
    CHECK_BYTES(bytes, zeros, sizeof bytes);
    nib_buffer_release(borrowed);
    nib_buffer_release(buffer);
    CHECK_THAT(fake_live() == 0, "%ld", fake_live());
}

/* ---- Two devices in one call ---- */

/* Where something is tried: one tensor on the host, one on fake:0, one on fake:1, and arrays of their shape. */
struct places {
    struct setting s;
    nib_device *other;
    nib_tensor *elsewhere;
    nib_array elsewhere_x;
    long calls;
};

static long calls_of(const struct places *p) { return fake_calls(p->s.device) + fake_calls(p->other); }

static void open_places(struct places *p, enum kind kind)
{
    p->s = setting_of(kind, NIB_F32, 2, (const int64_t[2]){ 48, 96 });
    open_setting(&p->s);
    p->other = fake_create(1);
    p->elsewhere = NULL;
    CHECK_OK(nib_tensor_to(p->s.t, p->other, &p->elsewhere));
    p->elsewhere_x = fake_array(p->other, &p->s.host_x);
    p->calls = calls_of(p);
}

/* Nothing was asked of the devices, and the tensors are what they were. */
static void close_places(struct places *p)
{
    CHECK(calls_of(p) == p->calls);
    check_same(p->s.host, p->s.t, p->s.device);
    check_same(p->s.host, p->elsewhere, p->other);
    nib_tensor_destroy(p->elsewhere);
    fake_free(p->other, p->elsewhere_x.data);
    nib_device_release(p->other);
    close_setting(&p->s);
}

#define CHECK_MIXED(call) CHECK_FAILS(call, NIB_ERR_DEVICE, "fake:")

/* x and a tensor that are not in one place, by which is where. */
static void check_mixed_pair(const nib_array *x, nib_tensor *t, const nib_tensor *u, const float *noop)
{
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { noop, noop } };
    int equal = 5;
    CHECK_MIXED(nib_quantize_into(NULL, x, NULL, NULL, t));
    CHECK_MIXED(nib_quantize_into(NULL, x, &overrides, noop, t));
    CHECK_MIXED(nib_dequantize(t, NIB_EITHER, x));
    CHECK_MIXED(nib_dequantize_rows(t, NIB_COLUMNWISE, 0, x->shape[0], x));
    CHECK_MIXED(nib_tensor_copy(t, u));
    CHECK_MIXED(nib_tensor_equal(t, u, &equal));
    CHECK(equal == 5);
    if (nib_is_nvfp4tensor(t)) {
        nib_array y = *x;
        y.shape[0] = y.shape[1] = y.strides[0] = 48;
        CHECK_MIXED(nib_dequantize_fp4_tensor(t, x));
        CHECK_MIXED(nib_modify_nvfp4_rowwise_storage(t, nib_tensor_buffer(u, NIB_ROW_DATA)));
        const nib_operand first = { t, NULL, NIB_ROWWISE }, second = { u, NULL, NIB_ROWWISE };
        CHECK_MIXED(nib_gemm_reference(&first, &second, NULL, &y));
        CHECK_MIXED(nib_gemm_reference(&first, &first, NULL, &y));
        CHECK_MIXED(nib_gemm(&first, &second, NULL, &y));
        CHECK_MIXED(nib_gemm(&first, &first, NULL, &y));
        CHECK_MIXED(nib_gemm_grouped(&first, &first, NULL, &y, 1));
    }
    CHECK_MIXED(nib_tensor_rebind_rowwise(t, nib_tensor_buffer(u, NIB_ROW_DATA)));
}

/* Buffers of two places as one tensor, or for a tensor of another place. */
static void check_mixed_buffers(const struct setting *s, nib_tensor *t, nib_tensor *u)
{
    nib_buffer *parts[NIB_PART_COUNT], *saved[NIB_PART_COUNT];
    nib_tensor *out = NULL;
    size_t n = 0;
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = nib_tensor_buffer(part == NIB_COL_DATA ? u : t, (nib_part)part);
    CHECK_MIXED(nib_tensor_from_buffers(&s->q, s->dtype, 2, s->shape, parts, NIB_PART_COUNT, &out));
    CHECK(!out);
    nib_tensor *cleared = NULL;
    CHECK_OK(nib_tensor_view(t, 2, s->shape, &cleared));
    nib_tensor_clear(cleared);
    CHECK_OK(nib_tensor_prepare_for_saving(u, saved, NIB_PART_COUNT, &n));
    CHECK_MIXED(nib_tensor_restore_from_saved(cleared, saved, n, NULL));
    nib_saved list[NIB_PART_COUNT] = { { 0 } };
    for (size_t i = 0; i < n; i++)
        list[i].buffer = saved[i];
    nib_item item = { .tensor = cleared };
    CHECK_MIXED(nib_restore_from_saved(&item, 1, list, n, NULL));
    CHECK_OK(nib_tensor_restore_from_saved(u, saved, n, NULL));
    nib_tensor_destroy(cleared);
}

TEST(mixed_devices)
{
    static const enum kind kinds[] = { LINES, SQUARE, FLOAT8, MXFP8, MXFP4 };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct places p;
        open_places(&p, kinds[i]);
        check_mixed_pair(&p.s.x, p.s.host, p.s.t, p.s.x.data);
        check_mixed_pair(&p.s.host_x, p.s.t, p.s.host, p.s.host_x.data);
        check_mixed_pair(&p.elsewhere_x, p.s.t, p.elsewhere, p.elsewhere_x.data);
        check_mixed_buffers(&p.s, p.s.t, p.s.host);
        check_mixed_buffers(&p.s, p.s.host, p.s.t);
        check_mixed_buffers(&p.s, p.elsewhere, p.s.t);
        close_places(&p);
    }
}

/* Nothing to do is no reason to take what is elsewhere. */
TEST(mixed_devices_without_elements)
{
    struct setting s = setting_of(LINES, NIB_F32, 2, (const int64_t[2]){ 0, 32 });
    open_setting(&s);
    CHECK_MIXED(nib_dequantize(s.t, NIB_ROWWISE, &s.host_x));
    CHECK_MIXED(nib_dequantize_rows(s.host, NIB_ROWWISE, 0, 0, &s.x));
    close_setting(&s);
}

TEST(mixed_devices_of_fsdp)
{
    struct places p;
    open_places(&p, SQUARE);
    nib_fsdp_parts host = { .bytes = sizeof host }, parts = { .bytes = sizeof parts };
    nib_tensor *out = NULL, *rowwise = NULL;
    CHECK_OK(nib_fsdp_extract(p.s.host, &host));
    CHECK_OK(nib_fsdp_extract(p.s.t, &parts));
    nib_quantizer q = p.s.q;
    q.columnwise = 0;
    CHECK_OK(nib_tensor_create(&q, p.s.dtype, 2, p.s.shape, p.s.device, &rowwise));
    p.calls = calls_of(&p);
    CHECK_MIXED(nib_fsdp_assign(p.s.host, &parts, 48, &out));
    CHECK_MIXED(nib_fsdp_assign(p.s.t, &host, 48, &out));
    CHECK_MIXED(nib_fsdp_assign(p.elsewhere, &parts, 48, &out));
    CHECK(!out);
    CHECK_MIXED(nib_fsdp_assign(p.s.t, &parts, 48, &p.s.host));
    CHECK_MIXED(nib_fsdp_assign(p.s.host, &host, 48, &p.s.t));
    CHECK_MIXED(nib_fsdp_assign(p.s.t, &host, 48, &rowwise));
    CHECK(!nib_tensor_has(rowwise, NIB_COLUMNWISE));
    host.scales.device = parts.scales.device;
    CHECK_MIXED(nib_fsdp_assign(p.s.host, &host, 48, &out));
    CHECK(calls_of(&p) == p.calls);
    nib_tensor_destroy(rowwise);
    close_places(&p);
}

/* ---- What runs on the host alone ---- */

/* Sharded casts and gathers with a parameter on the host and something of it on the device, or all of it. */
TEST(sharded_calls)
{
    struct places p;
    open_places(&p, SQUARE);
    struct setting *const s = &p.s;
    const nib_comm *const comm = nib_comm_serial();
    const int64_t n = 48 * 96, start = 0, bytes = n / 2;
    nib_array master = s->host_x, far = s->x, far_shard = s->x;
    master.rank = far.rank = far_shard.rank = 1;
    master.shape[0] = far.shape[0] = n;
    master.strides[0] = far.strides[0] = far_shard.strides[0] = 1;
    far_shard.dtype = NIB_U8;
    far_shard.shape[0] = bytes;
    float amaxes[18] = { 0 };
    int64_t rows = -1, cols = -1, first = -1, count = -1;
    uint8_t scales[18];
    const nib_array *const near_list[1] = { &master }, *const far_list[1] = { &far }, *const shards[1] = { &far_shard };
    const nib_master_options options = { .bytes = sizeof options, .row_shards = shards };
    nib_tensor *out = NULL;
#define CHECK_HOST_ONLY(call, name)                        \
    do {                                                   \
        CHECK_FAILS(call, NIB_ERR_UNSUPPORTED, name);      \
        CHECK(strstr(nib_last_error(), "fake:0") != NULL); \
    } while (0)
    CHECK_HOST_ONLY(nib_quantize_master_weights(&s->t, 1, far_list, 1, &start, 1, comm, NULL), "a sharded cast");
    CHECK_HOST_ONLY(nib_quantize_master_weights(&s->t, 1, near_list, 1, &start, 1, comm, NULL), "a sharded cast");
    CHECK_HOST_ONLY(nib_quantize_nvfp4_param_shard(&s->t, 1, far_list, 1, &start, 1, comm, NULL), "a sharded cast");
    CHECK_MIXED(nib_quantize_master_weights(&s->host, 1, far_list, 1, &start, 1, comm, NULL));
    CHECK_MIXED(nib_quantize_master_weights(&s->host, 1, near_list, 1, &start, 1, comm, &options));
    CHECK_MIXED(nib_quantize_nvfp4_param_shard(&s->host, 1, near_list, 1, &start, 1, comm, shards));
    CHECK_HOST_ONLY(nib_amax_grid(s->t, NIB_ROWWISE, &rows, &cols), "a sharded cast");
    CHECK_HOST_ONLY(nib_partial_amax(s->t, NIB_ROWWISE, &far, 0, amaxes), "a sharded cast");
    CHECK_MIXED(nib_partial_amax(s->host, NIB_ROWWISE, &far, 0, amaxes));
    CHECK_HOST_ONLY(nib_block_scales(s->t, NIB_ROWWISE, amaxes), "a sharded cast");
    CHECK_HOST_ONLY(nib_whole_blocks(s->t, NIB_ROWWISE, 0, 16, &first, &count), "a sharded cast");
    CHECK_HOST_ONLY(nib_partial_scales(s->t, NIB_ROWWISE, &far, 0, amaxes, scales), "a sharded cast");
    CHECK_HOST_ONLY(nib_chosen_scales(s->t, NIB_ROWWISE, amaxes, scales), "a sharded cast");
    CHECK_HOST_ONLY(nib_partial_cast(s->t, NIB_ROWWISE, &far, 0, amaxes, NULL), "a sharded cast");
    CHECK_MIXED(nib_partial_cast(s->host, NIB_ROWWISE, &far, 0, amaxes, NULL));
    CHECK_MIXED(nib_partial_cast(s->host, NIB_ROWWISE, &master, 0, amaxes, &far_shard));
    CHECK_HOST_ONLY(nib_all_gather_param(s->t, NIB_ROWWISE, 0, n, NULL, comm), "nib_all_gather_param ");
    CHECK_HOST_ONLY(nib_all_gather_param_bytes(s->t, NIB_ROWWISE, 0, n, NULL, comm), "nib_all_gather_param_bytes ");
    CHECK_MIXED(nib_all_gather_param(s->host, NIB_ROWWISE, 0, n, &far_shard, comm));
    CHECK_MIXED(nib_all_gather_param_bytes(s->host, NIB_ROWWISE, 0, n, &far_shard, comm));
    CHECK_HOST_ONLY(nib_all_gather_tensor(s->t, comm, &out), "nib_all_gather_tensor");
    CHECK(!out && rows == -1 && cols == -1 && first == -1 && count == -1);
    nib_byte_range range;
    CHECK_OK(nib_tensor_byte_range(s->t, NIB_ROWWISE, 3, 7, &range)); /* this one looks at no memory */
    CHECK(range.first == 1 && range.count == 4 && range.first_shared && !range.last_shared);
    close_places(&p);
}

TEST(groups_and_products)
{
    struct places p;
    open_places(&p, LINES);
    struct setting *const s = &p.s;
    const int64_t counts[2] = { 16, 32 };
    float amax[2] = { 5, 5 };
    float *const amaxes[2] = { amax, amax };
    nib_tensor *out[2] = { NULL }, *mxfp4 = NULL;
    nib_group *group = NULL;
    CHECK_HOST_ONLY(nib_split_quantize(&s->q, &s->x, counts, 2, out), "nib_split_quantize");
    CHECK_HOST_ONLY(nib_group_amax(&s->q, &s->x, counts, 2, amaxes), "nib_group_amax");
    CHECK(!out[0] && !out[1] && amax[0] == 5 && amax[1] == 5);
    CHECK_OK(nib_group_create(&s->q, s->dtype, counts, 2, 96, &group));
    CHECK_HOST_ONLY(nib_group_quantize(group, &s->x, NULL), "nib_group_quantize");
    nib_group_destroy(group);
    nib_array y = s->x;
    y.shape[0] = y.shape[1] = y.strides[0] = 48;
    const nib_operand operand = { s->t, NULL, NIB_ROWWISE };
    CHECK_HOST_ONLY(nib_gemm_reference(&operand, &operand, NULL, &y), "nib_gemm_reference");
    nib_quantizer q = quantizer_of(MXFP4);
    CHECK_OK(nib_quantize(&q, &s->x, NULL, &mxfp4));
    p.calls = calls_of(&p);
    CHECK_HOST_ONLY(nib_mxfp4_to_nvfp4(mxfp4, NULL, &out[0]), "nib_mxfp4_to_nvfp4");
    CHECK(!out[0]);
    nib_tensor_destroy(mxfp4);
    close_places(&p);
}

/* ---- A device that fails, and one that has not everything ---- */

/* What a call has to work on: all of it is there before the call, and nothing of it is made by the call but `result`. */
struct scene {
    struct setting s;
    nib_device *other;
    nib_tensor *view;     /* of s.t, whose buffers it shares */
    nib_tensor *second;   /* like s.t, of other values */
    nib_tensor *rowwise;  /* like s.t, without the columnwise usage */
    nib_array out;        /* of the tensor's shape */
    float *noop;          /* 0 */
    nib_buffer *buffer;   /* of the rowwise codes' size */
    nib_fsdp_parts parts; /* of s.t */
    nib_tensor *result[2];
};

struct action {
    const char *name;
    nib_status (*run)(struct scene *scene);
    bool writes; /* bytes of tensors that are there: what they are after a failure is not said */
};

static nib_status do_quantize(struct scene *c) { return nib_quantize(&c->s.q, &c->s.x, NULL, &c->result[0]); }
static nib_status do_quantize_given(struct scene *c)
{
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax_seen = c->noop };
    return nib_quantize(&c->s.q, &c->s.x, &overrides, &c->result[0]);
}
static nib_status do_update(struct scene *c) { return nib_quantize_into(NULL, &c->s.x, NULL, c->noop, c->s.t); }
static nib_status do_update_rowwise(struct scene *c)
{
    nib_quantizer q = c->s.q;
    q.columnwise = 0;
    return nib_quantize_into(&q, &c->s.x, NULL, c->noop, c->s.t);
}
static nib_status do_update_anew(struct scene *c)
{
    nib_quantizer q = c->s.q;
    q.swizzled = !q.swizzled;
    const nib_status status = nib_quantize_into(&q, &c->s.x, NULL, c->noop, c->s.t);
    return status == NIB_ERR_MODE ? NIB_OK : status; /* a format without tiles */
}
static nib_status do_update_missing(struct scene *c)
{
    return nib_quantize_into(&c->s.q, &c->s.x, NULL, c->noop, c->rowwise);
}
static nib_status do_dequantize(struct scene *c) { return nib_dequantize(c->s.t, NIB_COLUMNWISE, &c->out); }
static nib_status do_dequantize_rows(struct scene *c)
{
    nib_array rows = c->out;
    rows.shape[0] = 5;
    return nib_dequantize_rows(c->s.t, NIB_ROWWISE, 3, 5, &rows);
}
static nib_status do_product(struct scene *c)
{
    const nib_operand operand = { c->s.t, NULL, NIB_ROWWISE };
    nib_array y = c->out;
    y.shape[1] = y.strides[0] = y.shape[0]; /* less than it has space for */
    return nib_gemm(&operand, &operand, NULL, &y);
}
static nib_status do_create(struct scene *c)
{
    return nib_tensor_create(&c->s.q, c->s.dtype, c->s.rank, c->s.shape, c->s.device, &c->result[0]);
}
static nib_status do_zero(struct scene *c) { return nib_tensor_zero(c->s.t); }
static nib_status do_clone(struct scene *c) { return nib_tensor_clone(c->s.t, &c->result[0]); }
static nib_status do_copy(struct scene *c) { return nib_tensor_copy(c->s.t, c->second); }
static nib_status do_to_host(struct scene *c) { return nib_tensor_to(c->s.t, NULL, &c->result[0]); }
static nib_status do_from_host(struct scene *c) { return nib_tensor_to(c->s.host, c->s.device, &c->result[0]); }
static nib_status do_to_other(struct scene *c) { return nib_tensor_to(c->s.t, c->other, &c->result[0]); }
static nib_status do_reshape(struct scene *c)
{
    const nib_status status = nib_tensor_reshape(c->rowwise, 2, (const int64_t[2]){ -1, 128 }, &c->result[0]);
    return status == NIB_ERR_SHAPE ? NIB_OK : status; /* of a kind whose rows cannot be cut anew */
}
static int64_t whole_blocks(const struct scene *c) { return c->s.kind == FLOAT8_BLOCK ? 64 : 32; }
static nib_status do_slice(struct scene *c) { return nib_tensor_slice(c->s.t, 0, whole_blocks(c), &c->result[0]); }
static nib_status do_split(struct scene *c)
{
    return nib_tensor_split(c->rowwise, (const int64_t[2]){ 64 - whole_blocks(c), whole_blocks(c) }, 2, c->result);
}
static nib_status do_equal(struct scene *c)
{
    int equal;
    return nib_tensor_equal(c->s.t, c->second, &equal);
}
static nib_status do_swizzle(struct scene *c)
{
    const nib_status status = c->s.q.swizzled ? nib_tensor_unswizzle(c->s.t) : nib_tensor_swizzle(c->s.t);
    return status == NIB_ERR_UNSUPPORTED && strstr(nib_last_error(), "no GEMM") ? NIB_OK : status;
}
static nib_status do_rebind(struct scene *c) { return nib_tensor_rebind_rowwise(c->s.t, c->buffer); }
static nib_status if_built(nib_status status) /* a columnwise usage that cannot be built is no failure here */
{
    return status == NIB_ERR_USAGE ? NIB_OK : status;
}
static nib_status do_build(struct scene *c) { return if_built(nib_tensor_update_usage(c->rowwise, 1, 1)); }
static nib_status do_build_alone(struct scene *c) { return if_built(nib_tensor_update_usage(c->rowwise, 0, 1)); }
static nib_status do_build_again(struct scene *c)
{
    TRY(nib_tensor_invalidate_columnwise(c->second));
    const nib_status status = if_built(nib_tensor_update_usage(c->second, 0, 1));
    if (status)
        c->second->columnwise_stale = false; /* as it was; that it is said to be stale is checked elsewhere */
    return status;
}
static nib_status do_drop(struct scene *c) { return nib_tensor_update_usage(c->s.t, 1, 0); }
static nib_status do_post(struct scene *c)
{
    nib_tensor *const list[1] = { c->rowwise };
    return if_built(nib_post_all_gather_processing(list, 1));
}
static nib_status do_extract(struct scene *c)
{
    nib_fsdp_parts parts = { .bytes = sizeof parts };
    return c->parts.data.data ? nib_fsdp_extract(c->rowwise, &parts) : NIB_OK;
}
static nib_status do_assign(struct scene *c)
{
    return c->parts.data.data ? nib_fsdp_assign(c->s.t, &c->parts, 64, &c->result[0]) : NIB_OK;
}
static nib_status do_assign_existing(struct scene *c)
{
    return c->parts.data.data ? nib_fsdp_assign(c->s.t, &c->parts, 64, &c->rowwise) : NIB_OK;
}
static nib_status do_read_file(struct scene *c)
{
    nib_file *file = NULL;
    TRY(nib_file_open(path_of("scene.safetensors"), &file));
    const nib_status status = nib_file_read_tensor(file, "w", c->s.device, &c->result[0]);
    nib_file_close(file);
    return status;
}
static nib_status do_write_file(struct scene *c) { return write_file(path_of("other.safetensors"), c->s.t); }
static nib_status do_upload(struct scene *c) { return nib_array_copy(&c->s.host_x, &c->out); }
static nib_status do_download(struct scene *c) { return nib_array_copy(&c->s.x, &c->s.host_x); }
static nib_status do_array_copy(struct scene *c) { return nib_array_copy(&c->s.x, &c->out); }
static nib_status do_buffer(struct scene *c)
{
    nib_buffer *buffer = NULL;
    TRY(nib_buffer_create(77, c->s.device, &buffer));
    nib_buffer_release(buffer);
    return NIB_OK;
}

static const struct action actions[] = {
    { "quantize", do_quantize, false },
    { "quantize with overrides", do_quantize_given, false },
    { "quantize_into", do_update, true },
    { "quantize_into, fewer usages", do_update_rowwise, true },
    { "quantize_into, another meaning", do_update_anew, false },
    { "quantize_into, more usages", do_update_missing, true },
    { "dequantize", do_dequantize, false },
    { "dequantize_rows", do_dequantize_rows, false },
    { "product", do_product, false },
    { "create", do_create, false },
    { "zero", do_zero, true },
    { "clone", do_clone, false },
    { "copy", do_copy, true },
    { "to the host", do_to_host, false },
    { "from the host", do_from_host, false },
    { "to another device", do_to_other, false },
    { "reshape", do_reshape, false },
    { "slice", do_slice, false },
    { "split", do_split, false },
    { "equal", do_equal, false },
    { "swizzle", do_swizzle, false },
    { "rebind_rowwise", do_rebind, false },
    { "update_usage, build", do_build, false },
    { "update_usage, build and drop", do_build_alone, false },
    { "update_usage, build again", do_build_again, true },
    { "update_usage, drop", do_drop, false },
    { "post_all_gather_processing", do_post, false },
    { "fsdp_extract", do_extract, false },
    { "fsdp_assign", do_assign, false },
    { "fsdp_assign in place", do_assign_existing, true },
    { "file_read_tensor", do_read_file, false },
    { "writer_write_tensor", do_write_file, false },
    { "array_copy from the host", do_upload, false },
    { "array_copy to the host", do_download, false },
    { "array_copy", do_array_copy, false },
    { "buffer_create", do_buffer, false },
};

static void open_scene(struct scene *c, enum kind kind)
{
    *c = (struct scene){ .s = setting_of(kind, NIB_BF16, 2, (const int64_t[2]){ 64, 64 }) };
    struct setting *const s = &c->s;
    open_setting(s);
    c->other = fake_create(1);
    const float zero = 0;
    c->noop = upload_floats(s, &zero, 1);
    c->out = fake_array(s->device, &s->host_x);
    nib_array x = fake_array(s->device, &s->host_x);
    nib_quantizer rowwise = s->q;
    rowwise.columnwise = 0;
    CHECK_OK(nib_quantize(&s->q, &x, NULL, &c->second));
    CHECK_OK(nib_quantize(&rowwise, &x, NULL, &c->rowwise));
    c->rowwise->q.columnwise = 1; /* wanted, for nib_post_all_gather_processing */
    fake_free(s->device, x.data);
    CHECK_OK(nib_tensor_view(s->t, s->rank, s->shape, &c->view));
    CHECK_OK(nib_buffer_create(nib_buffer_bytes(nib_tensor_buffer(s->t, NIB_ROW_DATA)), s->device, &c->buffer));
    CHECK_OK(write_file(path_of("scene.safetensors"), s->t));
    c->parts = (nib_fsdp_parts){ .bytes = sizeof c->parts };
    if (nib_fsdp_extract(s->t, &c->parts))
        c->parts.data.data = NULL; /* of a kind that cannot be gathered so */
}

static void close_scene(struct scene *c)
{
    nib_tensor_destroy(c->view);
    nib_tensor_destroy(c->second);
    nib_tensor_destroy(c->rowwise);
    nib_tensor_destroy(c->result[0]);
    nib_tensor_destroy(c->result[1]);
    nib_buffer_release(c->buffer);
    fake_free(c->s.device, c->out.data);
    fake_free(c->s.device, c->noop);
    nib_device_release(c->other);
    close_setting(&c->s);
}

/* What a tensor was: its options, its very buffers, and the bytes in them. */
struct snapshot {
    nib_tensor tensor;
    uint8_t *bytes[NIB_PART_COUNT];
};

static void take_snapshot(const nib_tensor *t, struct snapshot *out)
{
    memset(out, 0, sizeof *out);
    out->tensor = *t;
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        const size_t bytes = nib_buffer_bytes(t->parts[part]);
        out->bytes[part] = malloc(bytes + 1);
        if (t->parts[part])
            fake_download(t->device, out->bytes[part], nib_buffer_data(t->parts[part]), bytes);
    }
}

static void check_snapshot(const nib_tensor *t, struct snapshot *was, bool bytes_too, const char *name, long n)
{
    CHECK_THAT(nib_quantizer_equal(&t->q, &was->tensor.q) && t->device == was->tensor.device &&
                   t->columnwise_stale == was->tensor.columnwise_stale && t->dtype == was->tensor.dtype,
               "%s, operation %ld: the tensor is another", name, n);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        CHECK_THAT(t->parts[part] == was->tensor.parts[part], "%s, operation %ld: buffer %d is another", name, n, part);
        const size_t bytes = nib_buffer_bytes(was->tensor.parts[part]);
        if (t->parts[part] && t->parts[part] == was->tensor.parts[part] && bytes_too) {
            uint8_t *now = malloc(bytes + 1);
            fake_download(t->device, now, nib_buffer_data(t->parts[part]), bytes);
            CHECK_THAT(memcmp(now, was->bytes[part], bytes) == 0, "%s, operation %ld: part %d has other bytes", name, n,
                       part);
            free(now);
        }
        free(was->bytes[part]);
    }
}

/* Runs an action with its n-th operation failing; false once there is no such operation. */
static bool fails_at(const struct action *action, enum kind kind, long n)
{
    struct scene c;
    struct snapshot before[3];
    open_scene(&c, kind);
    const nib_tensor *const tensors[3] = { c.s.t, c.second, c.rowwise };
    for (int i = 0; i < 3; i++)
        take_snapshot(tensors[i], &before[i]);
    const long live = fake_live();
    fake_fail_at(c.s.device, n);
    const nib_status status = action->run(&c);
    fake_fail_at(c.s.device, 0);
    CHECK_THAT(!status || (status == NIB_ERR_DEVICE && strstr(nib_last_error(), "as it was told to")),
               "%s, operation %ld: %s: %s", action->name, n, nib_status_name(status), nib_last_error());
    if (status) {
        CHECK_THAT(!c.result[0] && !c.result[1], "%s, operation %ld: there is a result", action->name, n);
        CHECK_THAT(fake_live() == live, "%s, operation %ld: %ld things more", action->name, n, fake_live() - live);
    }
    for (int i = 0; i < 3; i++)
        if (status)
            check_snapshot(tensors[i], &before[i], !action->writes, action->name, n);
        else
            for (int part = 0; part < NIB_PART_COUNT; part++)
                free(before[i].bytes[part]);
    close_scene(&c);
    return status != NIB_OK;
}

static const enum kind failing_kinds[] = { LINES, SQUARE, SWIZZLED, FLOAT8, MXFP8, FLOAT8_BLOCK, MXFP4 };
enum { FAILING_KINDS = sizeof failing_kinds / sizeof *failing_kinds };

TEST(failing_operations)
{
    for (size_t a = 0; a < sizeof actions / sizeof *actions; a++)
        for (int k = 0; k < FAILING_KINDS; k++) {
            long n = 1;
            while (n < 100 && fails_at(&actions[a], failing_kinds[k], n))
                n++;
            CHECK(n < 100);
            if (test_failures)
                fprintf(stderr, "  in kind %d\n", (int)failing_kinds[k]);
        }
}

/* The operations that a device may lack. */
static const struct {
    const char *name;
    size_t offset;
} optional[] = {
#define OPTIONAL(name)                               \
    {                                                \
#name, offsetof(struct nib_device_ops, name) \
    }
    OPTIONAL(quantize), OPTIONAL(product),          OPTIONAL(dequantize),     OPTIONAL(is_set),
    OPTIONAL(fill),     OPTIONAL(build_columnwise), OPTIONAL(copy_rectangle), OPTIONAL(repack_scales),
    OPTIONAL(swizzle),  OPTIONAL(unswizzle),        OPTIONAL(equal),
#undef OPTIONAL
};

enum { OPTIONALS = sizeof optional / sizeof *optional };

static void lose(nib_device *device, int op)
{
    memset((char *)fake_ops(device) + optional[op].offset, 0, sizeof(void *));
}

/* Which of them an action needs shows when it runs. */
static void find_needed(const struct action *action, enum kind kind, bool needed[OPTIONALS])
{
    struct scene c;
    long before[OPTIONALS];
    open_scene(&c, kind);
    const atomic_long *const counts = fake_of(c.s.device)->by_operation;
    for (int op = 0; op < OPTIONALS; op++)
        before[op] = counts[optional[op].offset / sizeof(void *)];
    CHECK_OK(action->run(&c));
    for (int op = 0; op < OPTIONALS; op++)
        needed[op] = counts[optional[op].offset / sizeof(void *)] > before[op];
    close_scene(&c);
}

/* Without one that it needs it says so and does nothing. */
static void check_without(const struct action *action, enum kind kind, int op)
{
    struct scene c;
    char words[64];
    open_scene(&c, kind);
    lose(c.s.device, op);
    const long calls = fake_calls(c.s.device), live = fake_live();
    const nib_status status = action->run(&c);
    snprintf(words, sizeof words, "fake:0 has no %s", optional[op].name);
    CHECK_THAT(status == NIB_ERR_UNSUPPORTED && strstr(nib_last_error(), words), "%s without %s: %s: %s", action->name,
               optional[op].name, nib_status_name(status), nib_last_error());
    CHECK_THAT(fake_calls(c.s.device) == calls && fake_live() == live, "%s without %s: something was done",
               action->name, optional[op].name);
    close_scene(&c);
}

/* It does without all that it does not need. */
static void check_with(const struct action *action, enum kind kind, const bool needed[OPTIONALS])
{
    struct scene c;
    open_scene(&c, kind);
    for (int op = 0; op < OPTIONALS; op++)
        if (!needed[op])
            lose(c.s.device, op);
    CHECK_OK(action->run(&c));
    close_scene(&c);
}

TEST(missing_operations)
{
    int seen[OPTIONALS] = { 0 };
    for (size_t a = 0; a < sizeof actions / sizeof *actions; a++)
        for (int k = 0; k < FAILING_KINDS; k++) {
            bool needed[OPTIONALS];
            find_needed(&actions[a], failing_kinds[k], needed);
            check_with(&actions[a], failing_kinds[k], needed);
            for (int op = 0; op < OPTIONALS; op++)
                if (needed[op]) {
                    seen[op]++;
                    check_without(&actions[a], failing_kinds[k], op);
                }
        }
    for (int op = 0; op < OPTIONALS; op++)
        CHECK_THAT(seen[op] > 0, "no action needs %s", optional[op].name);
}

/* ---- Ranks with devices of their own ---- */

static int quantize_rank(const nib_comm *comm, void *context)
{
    const int failing = *(const int *)context;
    struct setting s = setting_of(ROW_SCALED, NIB_BF16, 2, (const int64_t[2]){ 48, 80 });
    s.host_x = make_array(s.dtype, s.rank, s.shape, CONTIGUOUS);
    memset(s.host_x.data, 0x3F, s.host_x.bytes);
    nib_device *const device = fake_create(comm->rank);
    nib_array x = fake_array(device, &s.host_x);
    nib_tensor *t = NULL;
    s.q.amax_comm = comm;
    fake_fail_at(device, comm->rank == 1 ? failing : 0);
    const nib_status status = nib_quantize(&s.q, &x, NULL, &t);
    const int faults = failing ? status != NIB_ERR_DEVICE || t : status || !t;
    nib_tensor_destroy(t);
    fake_free(device, x.data);
    nib_device_release(device);
    free(s.host_x.data);
    return faults;
}

/* Whichever operation fails on one rank, all hear of it. */
TEST(ranks)
{
    for (int failing = 0; failing <= 7; failing++) {
        CHECK_THAT(team_run(2, quantize_rank, &failing) == 0, "operation %d", failing);
        CHECK(fake_live() == 0);
    }
}

/* Threads that use devices at the same time. */
static int quantize_alone(const nib_comm *comm, void *context)
{
    (void)context;
    int faults = 0;
    nib_device *const device = fake_create(comm->rank % 2);
    for (int i = 0; i < 20; i++) {
        const int64_t shape[2] = { 32, 48 };
        nib_quantizer q;
        nib_array values = make_array(NIB_F32, 2, shape, CONTIGUOUS), x = fake_array(device, &values);
        nib_tensor *t = NULL, *back = NULL;
        nib_quantizer_init(&q);
        faults += nib_quantize(&q, &x, NULL, &t) || nib_tensor_to(t, NULL, &back);
        nib_tensor_destroy(t);
        nib_tensor_destroy(back);
        fake_free(device, x.data);
        free(values.data);
    }
    nib_device_release(device);
    return faults;
}

TEST(threads)
{
    CHECK(team_run(4, quantize_alone, NULL) == 0);
    CHECK(fake_live() == 0);
}

TEST_MAIN
