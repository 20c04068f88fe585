/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_devices.c - what a tensor can do, on a device whose memory the host cannot touch: the results are the host's, and
 * nothing above the seam follows a pointer.
 */
#define _GNU_SOURCE
#include "device_cases.h"

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

/* Importance lies on the device, and a device that cannot weigh says so. */
TEST(importance)
{
    struct setting s = setting_of(LINES, NIB_BF16, 2, shapes[0].shape);
    open_setting(&s);
    nib_quantizer q = s.q;
    q.columnwise = 0;
    q.scale_rule = NIB_SCALE_SWEEP;
    const int64_t cols = s.t->geometry.cols;
    float *const h = malloc((size_t)cols * sizeof *h);
    for (int64_t i = 0; i < cols; i++)
        h[i] = 0.5f + (float)test_uniform();
    float *const memory = upload_floats(&s, h, cols);
    const nib_overrides host = { .bytes = sizeof host, .importance = h, .importance_count = cols };
    const nib_overrides on_device = { .bytes = sizeof on_device, .importance = memory, .importance_count = cols };
    nib_tensor *a = NULL, *b = NULL;
    CHECK_BOTH(nib_quantize(&q, &s.host_x, &host, &a), nib_quantize(&q, &s.x, &on_device, &b));
    check_and_destroy(a, b, s.device);
    fake_ops(s.device)->weighs = false;
    CHECK_FAILS(nib_quantize(&q, &s.x, &on_device, &b), NIB_ERR_UNSUPPORTED, "importance");
    fake_free(s.device, memory);
    free(h);
    close_setting(&s);
}

/* Calls without a tensor run where their arrays are, and a device that fails, or has no such operation, says so. */
TEST(fake_quantization_and_amaxes)
{
    struct setting s = setting_of(LINES, NIB_BF16, 2, shapes[0].shape);
    open_setting(&s);
    nib_array host = s.x, out = s.x, expected;
    host.data = malloc(s.x.bytes);
    host.device = NULL;
    fake_download(s.device, host.data, s.x.data, s.x.bytes);
    expected = host;
    expected.data = malloc(host.bytes);
    memcpy(expected.data, host.data, host.bytes); /* where strides leave gaps */
    out.data = fake_upload(s.device, host.data, host.bytes, 2);
    CHECK_OK(nib_fake_quantize(&s.q, &host, NULL, NIB_COLUMNWISE, &expected));
    CHECK_FAILS(nib_fake_quantize(&s.q, &s.x, NULL, NIB_COLUMNWISE, &expected), NIB_ERR_DEVICE, "fake:");
    CHECK_OK(nib_fake_quantize(&s.q, &s.x, NULL, NIB_COLUMNWISE, &out));
    fake_download(s.device, host.data, out.data, out.bytes);
    CHECK_BYTES(host.data, expected.data, host.bytes);
    float wanted[2], got[2];
    float *const amaxes = upload_floats(&s, (float[2]){ 7, 7 }, 2);
    CHECK_OK(nib_amax(&s.q, &s.x, (float *const[2]){ amaxes, amaxes + 1 }));
    fake_download(s.device, host.data, s.x.data, s.x.bytes);
    CHECK_OK(nib_amax(&s.q, &host, (float *const[2]){ wanted, wanted + 1 }));
    fake_download(s.device, got, amaxes, sizeof got);
    CHECK_BYTES(wanted, got, sizeof got);
    fake_ops(s.device)->fake_quantize = NULL;
    fake_ops(s.device)->find_amaxes = NULL;
    CHECK_FAILS(nib_fake_quantize(&s.q, &s.x, NULL, NIB_ROWWISE, &out), NIB_ERR_UNSUPPORTED, "fake_quantize");
    CHECK_FAILS(nib_amax(&s.q, &s.x, (float *const[2]){ amaxes, NULL }), NIB_ERR_UNSUPPORTED, "find_amaxes");
    fake_free(s.device, out.data);
    fake_free(s.device, amaxes);
    free(host.data);
    free(expected.data);
    close_setting(&s);
}

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
    fake_ops(s.device)->check_quantization = NULL; /* a device need not look at them */
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

TEST_MAIN
