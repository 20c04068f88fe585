/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_devices_failures.c - two devices in one call, what runs on the host alone, operations that fail or are absent, ranks
 * with devices of their own: what fails leaves things as they were.
 */
#define _GNU_SOURCE
#include "device_cases.h"
#include "team.h"

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
