/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_api.c - sequences of calls on a few tensors, on the host and on a device whose memory only its operations reach,
 * with allocations that fail: after every call each tensor has the bytes, the facts and the shared buffers of its model in
 * plain arrays (plain.h), products have the bits of the reference, and a call is accepted exactly where its contract says
 * so. NIB_TEST_WRAP_ALLOC
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>

#include "nib_file.h"
#include "nib_shard.h"
#include "api.h"
#include "fuzz_directory.h"
#include "tensor/tensor.h"

/* Of an input. Of a GPU's kernels one call shows what there is to see, and takes long. */
enum { CALLS = PARTIAL ? 6 : 24 };

/* ---- Calls: from values ---- */

static void fill_model(struct model *m, const nib_overrides *overrides)
{
    for (int usage = 0; usage < 2; usage++)
        if (has(m, usage))
            plain_quantize(m, usage, given.plain, given.dtype, overrides);
}

static void call_quantize(struct draws *d)
{
    static struct given_overrides overrides;
    nib_device *device = draw_device(d);
    int64_t shape[3];
    const int rank = draw_shape(d, shape);
    const nib_quantizer q = draw_quantizer(d);
    draw_values(d, rank, shape, device);
    const nib_overrides *o = draw_overrides(d, &q, shape[rank - 1], !device, &overrides);
    const bool accepted = !nib_quantizer_check(&q, &given.array);
    nib_tensor *t = NULL;
    begin(d);
    const nib_status status = nib_quantize(&q, &given.array, o, &t);
    require(!status == (t != NULL), "a tensor or none");
    drop_values();
    if (!done(status, accepted, "nib_quantize"))
        return;
    struct model m = { .q = q, .dtype = given.dtype };
    set_shape(&m, rank, shape);
    for (int usage = 0; usage < 2; usage++)
        if (usage ? q.columnwise : q.rowwise)
            allocate_usage(&m, usage);
    fill_model(&m, o);
    keep(d, t, m, device);
}

/* The header's rule: what is written in place, what is new. */
static void update_model(struct slot *s, const nib_quantizer *q, const nib_overrides *o)
{
    struct model *m = &s->m;
    const bool dropping = (has(m, 0) && !q->rowwise) || (has(m, 1) && !q->columnwise);
    const bool in_place = nib_same_meaning(q, &m->q) && !(form_of(m)->shared && dropping);
    if (!in_place)
        drop_all(m);
    if (!q->rowwise)
        drop_usage(m, 0);
    if (!q->columnwise)
        drop_usage(m, 1);
    m->q = *q;
    m->stale = false;
    if (q->rowwise)
        allocate_usage(m, 0);
    if (q->columnwise)
        allocate_usage(m, 1);
    fill_model(m, o);
}

static void call_quantize_into(struct draws *d, struct slot *s)
{
    static struct given_overrides overrides;
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    nib_quantizer q = s->m.q;
    const bool own = draw(d, 2);
    if (!own && draw(d, 8) == 0)
        q = draw_quantizer(d);
    else if (!own)
        vary_quantizer(d, &q);
    int64_t shape[3];
    const int rank = now_and_then(d) ? draw_shape(d, shape) : 0;
    draw_values(d, rank ? rank : s->m.rank, rank ? shape : s->m.shape, s->device);
    const nib_overrides *o = own ? &nothing : draw_overrides(d, &q, s->m.cols, !s->device, &overrides);
    const int flag = s->device ? 0 : draw(d, 8);
    const float noop = flag == 1 ? 1.0f : 0.5f;
    bool accepted = !nib_quantizer_check(&q, &given.array) && given.array.rank == s->m.rank;
    for (int i = 0; accepted && i < s->m.rank; i++)
        accepted = given.array.shape[i] == s->m.shape[i];
    begin(d);
    const nib_status status = nib_quantize_into(own ? NULL : &q, &given.array, o, flag ? &noop : NULL, s->t);
    drop_values();
    if (done(status, accepted || flag == 1, "nib_quantize_into") && flag != 1)
        update_model(s, &q, o);
}

/* Values that were quantized, in the place of others or beside them, and nothing else changed there. */
static void call_fake_quantize(struct draws *d)
{
    static struct given_overrides overrides;
    static _Alignas(64) uint8_t values[4 * ELEMENTS], memory[16 * ELEMENTS], expected[16 * ELEMENTS];
    nib_device *device = draw_device(d);
    int64_t shape[3];
    const int rank = draw_shape(d, shape), usage = draw(d, 2);
    nib_quantizer q = draw_quantizer(d);
    q.rowwise = usage == NIB_ROWWISE;
    q.columnwise = usage == NIB_COLUMNWISE;
    draw_values(d, rank, shape, device);
    const nib_overrides *o = draw_overrides(d, &q, shape[rank - 1], !device, &overrides);
    const bool accepted = !nib_quantizer_check(&q, &given.array), in_place = draw(d, 2);
    nib_array out = given.array;
    nib_buffer *beside = NULL;
    if (!in_place) {
        require(!nib_array_init(&out, memory, given.dtype, rank, shape), "an array");
        draw_strides(d, &out);
        require(out.bytes <= sizeof memory, "space for values");
        if (device) {
            beside = upload(device, memory, out.bytes);
            out.data = nib_buffer_data(beside);
            out.device = device;
        }
    }
    uint8_t *got = in_place ? given.memory : memory;
    memcpy(expected, got, out.bytes);
    begin(d);
    const nib_status status = nib_fake_quantize(&q, &given.array, o, (nib_usage)usage, &out);
    if (device)
        download(in_place ? given.uploaded : beside, got);
    nib_buffer_release(beside);
    drop_values();
    if (done(status, accepted, "nib_fake_quantize")) {
        struct model m = { .q = q, .dtype = given.dtype };
        set_shape(&m, rank, shape);
        allocate_usage(&m, usage);
        fill_model(&m, o);
        plain_decode(&m, usage, given.dtype, values);
        move_elements(&out, expected, values, true);
        drop_all(&m);
    }
    require(!memcmp(got, expected, out.bytes), "values that were quantized");
}

static void call_amax(struct draws *d)
{
    static float wanted_amax[2][MOST_LINES], got[2][MOST_LINES];
    nib_device *device = draw_device(d);
    int64_t shape[3];
    const int rank = draw_shape(d, shape);
    nib_quantizer q = draw_quantizer(d);
    draw_values(d, rank, shape, device);
    struct model m = { .q = q, .dtype = given.dtype };
    set_shape(&m, rank, shape);
    nib_buffer *on_device[2] = { NULL, NULL };
    float *amax[2];
    for (int usage = 0; usage < 2; usage++) {
        amax[usage] = draw(d, 8) ? got[usage] : NULL;
        memset(got[usage], 0x5A, sizeof got[usage]);
        if (amax[usage] && device)
            on_device[usage] = upload(device, got[usage], sizeof got[usage]);
        if (on_device[usage])
            amax[usage] = nib_buffer_data(on_device[usage]);
    }
    q.rowwise = q.rowwise && amax[0];
    q.columnwise = q.columnwise && amax[1];
    const bool accepted = !nib_quantizer_check(&q, &given.array) && form_of(&m)->tensor_scales;
    begin(d);
    const nib_status status = nib_amax(&m.q, &given.array, amax);
    for (int usage = 0; usage < 2; usage++) {
        if (on_device[usage])
            download(on_device[usage], got[usage]);
        nib_buffer_release(on_device[usage]);
    }
    drop_values();
    const bool good = done(status, accepted, "nib_amax");
    for (int usage = 0; usage < 2; usage++) {
        const struct nib_panel panel = plain_panel(&m, given.plain, given.dtype);
        const struct nib_coding coding = nib_coding_of(&m.q, (nib_usage)usage, given.dtype);
        memset(wanted_amax[usage], 0x5A, sizeof wanted_amax[usage]);
        if (good && (usage ? q.columnwise : q.rowwise))
            memcpy(wanted_amax[usage], plain_amaxes(&m, &panel, &coding), 4 * entries_of(&m, usage, TENSOR_SCALES));
        require(!memcmp(got[usage], wanted_amax[usage], sizeof got[usage]), "amaxes");
    }
}

static void call_create(struct draws *d)
{
    nib_device *device = draw_device(d);
    int64_t shape[3];
    const int rank = draw_shape(d, shape);
    const nib_quantizer q = draw_quantizer(d);
    draw_values(d, rank, shape, NULL);
    nib_tensor *t = NULL;
    begin(d);
    const bool accepted = !nib_quantizer_check(&q, &given.array);
    if (!done(nib_tensor_create(&q, given.dtype, rank, shape, device, &t), accepted, "nib_tensor_create"))
        return;
    struct model m = { .q = q, .dtype = given.dtype };
    nib_metadata facts = { .bytes = sizeof facts };
    set_shape(&m, rank, shape);
    require(!nib_tensor_get_metadata(t, &facts), "facts");
    for (int usage = 0; usage < 2; usage++) {
        if (usage ? q.columnwise : q.rowwise)
            allocate_usage(&m, usage);
        for (size_t i = 0; has(&m, usage) && facts.tensor_scale != NIB_TENSOR_SCALE_AMAX &&
                           form_of(&m)->tensor_scales && i < entries_of(&m, usage, TENSOR_SCALES);
             i++)
            tensor_scales_of(&m, usage)[i] = bits_of(1);
    }
    keep(d, t, m, device);
}

/* ---- Calls: other shapes ---- */

/* Whether rows of another length can be cut from the same arrays; *copies: by a copy alone. */
static bool length_can_change(const struct model *m, const struct model *to, bool *copies)
{
    const int64_t block = form_of(m)->block ? form_of(m)->block : 1;
    int64_t a[2], b[2];
    scale_shape(m, 0, a);
    scale_shape(to, 0, b);
    *copies = has(m, 0) && form_of(m)->block &&
              (a[0] * a[1] != b[0] * b[1] || a[1] != blocks_of(m, 0) || b[1] != blocks_of(to, 0));
    return m->cols % block == 0 && to->cols % block == 0 && !m->q.row_scaled && !m->q.swizzled && !square(m) &&
           !(form_of(m)->block && layout_of(m, 0) != BY_LINE) && !has(m, 1);
}

static void call_view(struct draws *d, const struct slot *s)
{
    const bool may_copy = draw(d, 2);
    int64_t shape[3], resolved[3];
    int rank = draw_shape(d, shape), unknown = draw(d, 4);
    if (draw(d, 2)) { /* the same matrix, or one that a row or a column of it makes */
        const int64_t all[4][2] = { { s->m.rows, s->m.cols },
                                    { s->m.cols, s->m.rows },
                                    { 1, s->m.rows * s->m.cols },
                                    { s->m.rows * s->m.cols / 16, 16 } };
        rank = 2;
        memcpy(shape, all[draw(d, 4)], sizeof all[0]);
    }
    int64_t known = 1, elements = s->m.rows * s->m.cols;
    for (int i = 0; i < rank; i++)
        known *= i == unknown ? 1 : shape[i];
    memcpy(resolved, shape, sizeof shape);
    bool accepted = known == elements;
    if (unknown < rank) {
        shape[unknown] = -1;
        accepted = known > 0 && elements % known == 0;
        resolved[unknown] = accepted ? elements / known : 0;
    }
    struct model to = s->m;
    bool copies = false;
    set_shape(&to, rank, resolved);
    if (accepted && elements == 0)
        return; /* of no elements nearly every shape is a view */
    if (accepted && to.cols != s->m.cols)
        accepted = length_can_change(&s->m, &to, &copies) && (may_copy || !copies);
    nib_tensor *t = NULL;
    begin(d);
    const nib_status status =
        may_copy ? nib_tensor_reshape(s->t, rank, shape, &t) : nib_tensor_view(s->t, rank, shape, &t);
    if (!done(status, accepted, "nib_tensor_view"))
        return;
    to = model_like(&s->m, true);
    set_shape(&to, rank, resolved);
    if (copies)
        part_ways(&to, 0);
    keep(d, t, to, s->device);
}

static struct model slice_of(const struct model *m, int64_t first, int64_t count)
{
    struct model out = *m;
    const int64_t shape[2] = { count, m->cols }, block = form_of(m)->block ? form_of(m)->block : 1;
    set_shape(&out, 2, shape);
    out.q.origin[0] += square(m) || has(m, 1) ? first / block * block : first;
    memset(out.part, 0, sizeof out.part);
    for (int usage = 0; usage < 2; usage++) {
        if (!has(m, usage))
            continue;
        allocate_usage(&out, usage);
        const int64_t lines = lines_of(&out, usage), length = length_of(&out, usage), blocks = blocks_of(&out, usage);
        const int64_t line = usage ? 0 : first, at = usage ? first : 0;
        for (int64_t l = 0; l < lines; l++) {
            for (int64_t i = 0; i < length; i++)
                out.part[usage][CODES]->value[l * length + i] =
                    m->part[usage][CODES]->value[(line + l) * length_of(m, usage) + at + i];
            for (int64_t b = 0; b < blocks; b++)
                out.part[usage][SCALES]->value[l * blocks + b] =
                    m->part[usage][SCALES]->value[(line + l) * blocks_of(m, usage) + at / block + b];
        }
        for (size_t i = 0; form_of(m)->tensor_scales && i < entries_of(&out, usage, TENSOR_SCALES); i++)
            tensor_scales_of(&out, usage)[i] = tensor_scales_of(m, usage)[(m->q.row_scaled ? line : 0) + (int64_t)i];
    }
    return out;
}

static bool can_cut(const struct model *m, int64_t first, int64_t count)
{
    const int64_t block = form_of(m)->block ? form_of(m)->block : 1;
    if (first < 0 || count < 0 || first + count > m->rows)
        return false;
    return !(square(m) || has(m, 1)) || !count ||
           (first % block == 0 && ((first + count) % block == 0 || first + count == m->rows));
}

static int64_t draw_row(struct draws *d, int64_t rows)
{
    const int kind = draw(d, 4);
    return kind == 0 ? rows : kind == 1 ? 16 * draw(d, 9) : draw(d, (int)(rows < 200 ? rows + 2 : 200));
}

static void call_slice(struct draws *d, const struct slot *s)
{
    const int64_t first = draw_row(d, s->m.rows), end = draw_row(d, s->m.rows), count = end - first;
    nib_tensor *t = NULL;
    begin(d);
    if (done(nib_tensor_slice(s->t, first, count, &t), can_cut(&s->m, first, count), "nib_tensor_slice"))
        keep(d, t, slice_of(&s->m, first, count), s->device);
}

static void call_split(struct draws *d, const struct slot *s)
{
    const int64_t cut = draw_row(d, s->m.rows), counts[2] = { cut, s->m.rows - cut };
    const bool accepted = can_cut(&s->m, 0, cut) && can_cut(&s->m, cut, s->m.rows - cut);
    nib_tensor *t[2] = { NULL, NULL };
    begin(d);
    if (!done(nib_tensor_split(s->t, counts, 2, t), accepted, "nib_tensor_split"))
        return;
    const struct model m[2] = { slice_of(&s->m, 0, counts[0]), slice_of(&s->m, cut, counts[1]) };
    nib_device *device = s->device;
    keep(d, t[0], m[0], device);
    keep(d, t[1], m[1], device);
}

/* ---- Calls: usages ---- */

static void call_update_usage(struct draws *d, struct slot *s)
{
    struct model *m = &s->m;
    const int rowwise = draw(d, 3) - 1, columnwise = draw(d, 3) - 1;
    const bool row = rowwise < 0 ? has(m, 0) : rowwise, col = columnwise < 0 ? has(m, 1) : columnwise;
    const bool builds = col && (!has(m, 1) || m->stale);
    const bool buildable = has(m, 0) && m->q.block_dims[0] != 1 && !m->q.swizzled;
    begin(d);
    if (!done(nib_tensor_update_usage(s->t, rowwise, columnwise), (!row || has(m, 0)) && (!builds || buildable),
              "nib_tensor_update_usage"))
        return;
    const bool drops = (has(m, 0) && !row) || (has(m, 1) && !col);
    if (builds) {
        allocate_usage(m, 1);
        plain_build(m);
    }
    if (drops && form_of(m)->shared) {
        part_ways(m, 0);
        part_ways(m, 1);
    }
    if (!row)
        drop_usage(m, 0);
    if (!col)
        drop_usage(m, 1);
    m->q.rowwise = row;
    m->q.columnwise = col;
}

static void call_invalidate(struct slot *s)
{
    require(!nib_tensor_invalidate_columnwise(s->t), "invalidate");
    s->m.stale = has(&s->m, 0) && has(&s->m, 1);
}

static void call_set_quantizer(struct draws *d, struct slot *s)
{
    nib_quantizer q = s->m.q;
    nib_array like;
    static uint8_t nothing[4 * ELEMENTS];
    vary_quantizer(d, &q);
    require(!nib_array_init(&like, nothing, s->m.dtype, s->m.rank, s->m.shape), "an array");
    const bool accepted = !nib_quantizer_check(&q, &like) && nib_same_meaning(&q, &s->m.q);
    begin(d);
    if (done(nib_tensor_set_quantizer(s->t, &q), accepted, "nib_tensor_set_quantizer"))
        s->m.q = q;
}

/* ---- Calls: copies ---- */

static void call_to(struct draws *d, const struct slot *s)
{
    nib_device *device = draw(d, 2) ? NULL : remote;
    nib_tensor *t = NULL;
    begin(d);
    if (done(nib_tensor_to(s->t, device, &t), true, "nib_tensor_to"))
        keep(d, t, model_like(&s->m, false), device);
}

static void call_copy(struct draws *d, struct slot *to, const struct slot *from)
{
    bool accepted = to->device == from->device && to->m.rank == from->m.rank &&
                    !memcmp(to->m.shape, from->m.shape, sizeof to->m.shape) && nib_same_meaning(&to->m.q, &from->m.q);
    for (int usage = 0; usage < 2; usage++)
        accepted &= has(&from->m, usage) || !has(&to->m, usage);
    begin(d);
    if (!done(nib_tensor_copy(to->t, from->t), accepted, "nib_tensor_copy"))
        return;
    for (int usage = 0; usage < 2; usage++)
        for (int kind = 0; kind < KINDS; kind++)
            if (to->m.part[usage][kind])
                memmove(to->m.part[usage][kind]->value, from->m.part[usage][kind]->value,
                        to->m.part[usage][kind]->n * sizeof(uint32_t));
    to->m.stale = from->m.stale && has(&to->m, 1);
}

static void call_zero(struct slot *s)
{
    nib_metadata facts = { .bytes = sizeof facts };
    require(!nib_tensor_get_metadata(s->t, &facts) && !nib_tensor_zero(s->t), "zero");
    for (int usage = 0; usage < 2; usage++)
        for (int kind = 0; kind < KINDS; kind++)
            for (size_t i = 0; s->m.part[usage][kind] && i < s->m.part[usage][kind]->n; i++)
                s->m.part[usage][kind]->value[i] =
                    kind == TENSOR_SCALES && facts.tensor_scale != NIB_TENSOR_SCALE_AMAX ? bits_of(1) : 0;
}

static void call_from_buffers(struct draws *d, const struct slot *s)
{
    nib_buffer *parts[NIB_PART_COUNT];
    nib_tensor *t = NULL;
    for (int i = 0; i < NIB_PART_COUNT; i++)
        parts[i] = nib_tensor_buffer(s->t, (nib_part)i);
    nib_quantizer q = s->m.q;
    q.rowwise = has(&s->m, 0);
    q.columnwise = has(&s->m, 1);
    begin(d);
    if (!done(nib_tensor_from_buffers(&q, s->m.dtype, s->m.rank, s->m.shape, parts, NIB_PART_COUNT, &t), true,
              "nib_tensor_from_buffers"))
        return;
    struct model m = model_like(&s->m, true);
    m.q = q;
    m.stale = false;
    keep(d, t, m, has(&s->m, 0) || has(&s->m, 1) ? s->device : NULL);
}

static void call_save_and_restore(struct draws *d, struct slot *s)
{
    nib_buffer *saved[NIB_PART_COUNT];
    size_t n = 0, used = 0;
    begin(d);
    if (!done(nib_tensor_prepare_for_saving(s->t, saved, NIB_PART_COUNT, &n), true, "prepare"))
        return;
    int rowwise = -1, columnwise = -1;
    require(!nib_tensor_get_usages(s->t, &rowwise, &columnwise) && !rowwise && !columnwise, "without data");
    require(!nib_tensor_restore_from_saved(s->t, saved, n, &used) && used == n, "restore");
}

static void call_file(struct draws *d, const struct slot *s)
{
    static const char *directory;
    static char path[128];
    if (!directory) {
        directory = make_directory();
        snprintf(path, sizeof path, "%s/tensor", directory);
    }
    nib_device *device = draw(d, 2) ? NULL : remote;
    nib_writer *writer = NULL;
    nib_file *file = NULL;
    nib_tensor *t = NULL;
    begin(d);
    nib_status status = nib_writer_create(path, &writer);
    if (!status)
        status = nib_writer_declare_tensor(writer, "t", s->t);
    if (!status)
        status = nib_writer_write_tensor(writer, "t", s->t);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    if (!done(status, true, "saving to a file"))
        return;
    begin(d);
    status = nib_file_open(path, &file);
    if (!status)
        status = nib_file_read_tensor(file, "t", device, &t);
    nib_file_close(file);
    unlink(path);
    if (done(status, true, "reading it back"))
        keep(d, t, model_like(&s->m, false), device);
}

/* ---- Calls: layout ---- */

static void call_swizzle(struct draws *d, struct slot *s)
{
    const bool swizzled = draw(d, 2);
    struct model *m = &s->m;
    const bool changes = m->q.swizzled != swizzled;
    begin(d);
    if (!done(swizzled ? nib_tensor_swizzle(s->t) : nib_tensor_unswizzle(s->t), !changes || form_of(m)->swizzles,
              "nib_tensor_swizzle") ||
        !changes)
        return;
    part_ways(m, 0);
    part_ways(m, 1);
    m->q.swizzled = swizzled;
}

static void call_rebind(struct draws *d, struct slot *s)
{
    struct model *m = &s->m;
    nib_buffer *buffer = NULL;
    const size_t size = nib_buffer_bytes(nib_tensor_buffer(s->t, NIB_ROW_DATA)) + (now_and_then(d) ? 1 : 0);
    require(!nib_buffer_create(size, s->device, &buffer), "a buffer");
    const bool accepted = has(m, 0) && size == nib_buffer_bytes(nib_tensor_buffer(s->t, NIB_ROW_DATA));
    begin(d);
    const bool rebound = done(nib_tensor_rebind_rowwise(s->t, buffer), accepted, "nib_tensor_rebind_rowwise");
    nib_buffer_release(buffer);
    if (!rebound)
        return;
    struct plain *codes = plain_copy(m->part[0][CODES]);
    plain_drop(&m->part[0][CODES]);
    m->part[0][CODES] = codes;
    part_ways(m, 0);
    if (form_of(m)->shared)
        part_ways(m, 1);
}

/* ---- Calls: values again ---- */

static bool can_read(const struct model *m, int usage) { return has(m, usage) && !(usage && m->stale); }

static void call_dequantize(struct draws *d, const struct slot *s)
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    static _Alignas(64) uint8_t values[4 * ELEMENTS], got[4 * ELEMENTS], memory[16 * ELEMENTS];
    const struct model *m = &s->m;
    const int from = draw(d, 3), usage = from != NIB_EITHER ? from : !has(m, 0);
    const bool by_rows = draw(d, 2);
    const int64_t first = by_rows ? draw_row(d, m->rows) : 0, count = by_rows ? draw_row(d, m->rows) : m->rows;
    const int64_t shape[2] = { count, m->cols };
    nib_array out;
    const nib_dtype dtype = dtypes[draw(d, 3)];
    if (count * m->cols > ELEMENTS)
        return;
    require(!nib_array_init(&out, memory, dtype, by_rows ? 2 : m->rank, by_rows ? shape : m->shape), "an array");
    draw_strides(d, &out);
    require(out.bytes <= sizeof memory, "space for values");
    const bool fits = !by_rows || (first >= 0 && count >= 0 && first + count <= m->rows);
    const bool accepted = fits && (count == 0 || m->cols == 0 || can_read(m, usage));
    nib_buffer *buffer = s->device ? upload(s->device, memory, out.bytes) : NULL;
    if (buffer) {
        out.data = nib_buffer_data(buffer);
        out.device = s->device;
    }
    begin(d);
    const nib_status status = by_rows ? nib_dequantize_rows(s->t, (nib_usage)from, first, count, &out)
                                      : nib_dequantize(s->t, (nib_usage)from, &out);
    if (buffer)
        download(buffer, memory);
    nib_buffer_release(buffer);
    if (!done(status, accepted, "nib_dequantize") || count == 0 || m->cols == 0)
        return;
    const size_t width = (size_t)nib_dtype_bits(dtype) / 8;
    plain_decode(m, usage, dtype, values);
    move_elements(&out, memory, got, false);
    require(!memcmp(got, values + (size_t)(first * m->cols) * width, (size_t)(count * m->cols) * width), "values");
}

static bool same_arrays(const struct model *a, const struct model *b)
{
    bool same = a->dtype == b->dtype && a->stale == b->stale && a->rank == b->rank &&
                !memcmp(a->shape, b->shape, sizeof a->shape) && nib_same_meaning(&a->q, &b->q);
    for (int usage = 0; usage < 2; usage++)
        for (int kind = 0; kind < KINDS && same; kind++) {
            const struct plain *p = a->part[usage][kind], *o = b->part[usage][kind];
            same = !p == !o && (!p || (p->n == o->n && !memcmp(p->value, o->value, p->n * sizeof *p->value)));
        }
    return same;
}

static void call_equal(const struct slot *a, const struct slot *b)
{
    int equal = -1;
    const nib_status status = nib_tensor_equal(a->t, b->t, &equal);
    require(a->device == b->device ? !status : status == NIB_ERR_DEVICE, "the status of a comparison");
    require(status || equal == same_arrays(&a->m, &b->m), "a comparison");
}

/* ---- Calls: shards ---- */

struct rank {
    nib_tensor *t;
    nib_array master;
    int64_t start, length;
    nib_comm *comm;
    nib_status status;
};

static void cast_rank(struct rank *r)
{
    const nib_array *masters[1] = { r->length ? &r->master : NULL };
    const int64_t starts[1] = { r->length ? r->start : -1 };
    r->status = nib_quantize_master_weights(&r->t, 1, masters, 1, starts, 1, r->comm, NULL);
    if (!r->status)
        r->status = nib_all_gather_param(r->t, NIB_ROWWISE, r->start, r->length, NULL, r->comm);
    if (!r->status && forms[r->t->q.format].block == 32 && r->t->q.columnwise && r->t->q.format == NIB_MXFP8)
        r->status = nib_all_gather_param(r->t, NIB_COLUMNWISE, r->start, r->length, NULL, r->comm);
    if (!r->status)
        r->status = nib_post_all_gather_processing(&r->t, 1);
}

enum { RANKS = 3 };

/* Threads that wait for the next call: to start some for each takes longer than the call. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct rank *ranks[RANKS]; /* what each is to do, or NULL */
    bool started;
} crew = { .mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };

static void *serve(void *context)
{
    struct rank **own = context;
    pthread_mutex_lock(&crew.mutex);
    for (;;) {
        while (!*own)
            pthread_cond_wait(&crew.changed, &crew.mutex);
        pthread_mutex_unlock(&crew.mutex);
        cast_rank(*own);
        pthread_mutex_lock(&crew.mutex);
        *own = NULL;
        pthread_cond_broadcast(&crew.changed);
    }
    return NULL;
}

static void run_ranks(struct rank *ranks, int n)
{
    for (int r = 1; r < RANKS && !crew.started; r++) {
        pthread_t thread;
        require(!pthread_create(&thread, NULL, serve, &crew.ranks[r]) && !pthread_detach(thread), "a thread");
    }
    crew.started = true;
    pthread_mutex_lock(&crew.mutex);
    for (int r = 1; r < n; r++)
        crew.ranks[r] = &ranks[r];
    pthread_cond_broadcast(&crew.changed);
    pthread_mutex_unlock(&crew.mutex);
    cast_rank(&ranks[0]);
    pthread_mutex_lock(&crew.mutex);
    for (int r = 1; r < n; r++)
        while (crew.ranks[r])
            pthread_cond_wait(&crew.changed, &crew.mutex);
    pthread_mutex_unlock(&crew.mutex);
}

/* Whether the header's list accepts such a parameter: a rowwise usage, and a columnwise one that can be built. */
static bool can_cast(const struct model *m)
{
    return has(m, 0) && m->q.rowwise && !m->q.rht_rowwise && !m->q.swizzled &&
           (m->q.format == NIB_MXFP8 || !(has(m, 1) || m->q.columnwise) || m->q.block_dims[0] != 1) &&
           m->rows * m->cols > 0;
}

static void call_shards(struct draws *d, struct slot *s)
{
    struct model *m = &s->m;
    const int64_t elements = m->rows * m->cols;
    const int team = draw(d, 16), n = team < 13 ? 1 : 2 + team % (RANKS - 1); /* threads that wait take long */
    if (!can_cast(m) || s->device || m->q.columnwise != has(m, 1) || m->q.format == NIB_MXFP8)
        return;
    /* The master in the nominal dtype, so that rounding it to that changes nothing. */
    const uint64_t seed = draw_bytes(d, 2);
    const int kind = draw(d, 8);
    static float master[ELEMENTS];
    fill_values(seed, kind, master, elements);
    require(!nib_encode(m->dtype, master, (size_t)elements, given.plain) &&
                !nib_decode(m->dtype, given.plain, (size_t)elements, master),
            "master weights");
    nib_comm *comms[RANKS];
    struct rank ranks[RANKS];
    require(!nib_comm_threads_create(n, comms), "ranks");
    int64_t at = 0;
    for (int r = 0; r < n; r++) {
        const int64_t end = r == n - 1 ? elements : at + (int64_t)draw_bytes(d, 2) % (elements - at + 1);
        ranks[r] = (struct rank){ .start = at, .length = end - at, .comm = comms[r] };
        require(!nib_tensor_clone(s->t, &ranks[r].t), "a parameter");
        require(!nib_array_init(&ranks[r].master, master + at, NIB_F32, 1, (const int64_t[1]){ end - at }), "a shard");
        at = end;
    }
    run_ranks(ranks, n);
    nib_comm_threads_destroy(comms[0]);
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    struct model result = model_like(m, false);
    result.stale = false;
    plain_quantize(&result, 0, given.plain, m->dtype, &nothing);
    if (has(&result, 1))
        plain_build(&result);
    for (int r = 0; r < n; r++) {
        require(!ranks[r].status, "a sharded cast");
        check_slot(&(struct slot){ ranks[r].t, result, NULL });
    }
    for (int r = 1; r < n; r++)
        nib_tensor_destroy(ranks[r].t);
    keep(d, ranks[0].t, result, NULL);
}

/* ---- Calls: products ---- */

/* One side of a product: a usage of a tensor or plain values, where the call has it and, for the reference, on the host. */
struct side {
    const struct model *m; /* NULL: plain */
    int usage;
    int64_t lines, length;
    nib_operand operand, host;
    nib_tensor *copy;
    nib_array array;
};

static void use_tensor(struct draws *d, const struct slot *s, struct side *out)
{
    const int from = draw(d, 3), usage = from != NIB_EITHER ? from : !has(&s->m, 0);
    *out = (struct side){ &s->m, usage, lines_of(&s->m, usage), length_of(&s->m, usage), .copy = NULL };
    out->operand = (nib_operand){ s->t, NULL, (nib_usage)from };
    out->host = out->operand;
    if (s->device) {
        require(!nib_tensor_to(s->t, NULL, &out->copy), "the way to the host");
        out->host.tensor = out->copy;
    }
}

static void use_values(struct draws *d, int64_t length, nib_device *device, struct side *out)
{
    const int64_t shape[2] = { draw(d, 20), length };
    *out = (struct side){ .lines = shape[0], .length = length };
    draw_values(d, 2, shape, device);
    out->array = given.array;
    out->array.data = given.memory;
    out->array.device = NULL;
    out->operand.array = &given.array;
    out->host.array = &out->array;
}

static bool can_multiply(const struct side *a, const struct side *b)
{
    const struct model *m = a->m ? a->m : b->m;
    const int usage = a->m ? a->usage : b->usage;
    if ((a->m && !can_read(a->m, a->usage)) || (b->m && !can_read(b->m, b->usage)) || a->length != b->length)
        return false;
    if (!a->m || !b->m)
        return !has_rht(m, usage);
    if (!form_of(a->m)->packed || a->m->q.format != b->m->q.format)
        return true; /* decoded values */
    return has_rht(a->m, a->usage) == has_rht(b->m, b->usage) &&
           (!has_rht(a->m, a->usage) || a->m->q.rht_sign_mask == b->m->q.rht_sign_mask);
}

enum { TOGETHER = 2 }; /* products of a group */

/* What a product has besides its sides. */
struct product {
    nib_gemm_options options;
    nib_array bias, y;
    int n; /* times the same, all in one call */
    float biases[ELEMENTS];
    _Alignas(64) uint8_t before[16 * ELEMENTS], expected[16 * ELEMENTS], got[TOGETHER][16 * ELEMENTS];
};

static void draw_product(struct draws *d, int64_t lines, int64_t columns, struct product *p)
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    static const float factors[] = { 1, 0, -0.5f, 3e38f, __builtin_nanf("") };
    const uint64_t seed = draw_bytes(d, 1);
    const bool with_bias = draw(d, 2);
    nib_gemm_options_init(&p->options);
    p->options.alpha = factors[draw(d, 5)];
    p->options.beta = factors[draw(d, 2) ? 1 : draw(d, 5)];
    require(!nib_array_init(&p->y, p->expected, dtypes[draw(d, 3)], 2, (const int64_t[2]){ lines, columns }) &&
                !nib_array_init(&p->bias, p->biases, NIB_F32, 1, &columns),
            "arrays");
    draw_strides(d, &p->y);
    require(p->y.bytes <= sizeof p->before, "space for a product");
    for (int64_t i = 0; i < columns; i++)
        p->biases[i] = draw_value(seed, i, 3);
    for (size_t i = 0; i < p->y.bytes; i++)
        p->before[i] = (uint8_t)(seed + i * 37);
    memcpy(p->expected, p->before, p->y.bytes);
    p->n = draw(d, 4) ? 1 : TOGETHER;
    for (int i = 0; i < p->n; i++)
        memcpy(p->got[i], p->before, p->y.bytes);
    p->options.bias = with_bias ? &p->bias : NULL;
}

/* The call, on the device that y is to be on; what it left in each y is in p->got. */
static nib_status multiply(struct draws *d, const struct side *a, const struct side *b, struct product *p,
                           nib_device *device)
{
    nib_array y[TOGETHER], bias = p->bias;
    nib_gemm_options options = p->options;
    nib_buffer *outputs[TOGETHER] = { NULL };
    nib_buffer *biases = device ? upload(device, p->biases, bias.bytes) : NULL;
    for (int i = 0; i < p->n; i++) {
        outputs[i] = device ? upload(device, p->got[i], p->y.bytes) : NULL;
        y[i] = p->y;
        y[i].data = device ? nib_buffer_data(outputs[i]) : p->got[i];
        y[i].device = device;
    }
    bias.data = device ? nib_buffer_data(biases) : p->biases;
    bias.device = device;
    options.bias = options.bias ? &bias : NULL;
    const nib_operand left[TOGETHER] = { a->operand, a->operand }, right[TOGETHER] = { b->operand, b->operand };
    const nib_gemm_options *const all[TOGETHER] = { &options, &options };
    begin(d);
    const nib_status status =
        p->n > 1 ? nib_gemm_grouped(left, right, all, y, TOGETHER) : nib_gemm(left, right, &options, y);
    for (int i = 0; i < p->n; i++) {
        if (device)
            download(outputs[i], p->got[i]);
        nib_buffer_release(outputs[i]);
    }
    nib_buffer_release(biases);
    return status;
}

/* What a side stands for, line by line. */
static void read_side(const struct side *s, double *out)
{
    static float values[ELEMENTS];
    const int64_t n = s->lines * s->length;
    nib_array array;
    if (!s->m) {
        require(!nib_decode(given.dtype, given.plain, (size_t)n, values), "plain values");
    } else {
        require(!nib_array_init(&array, values, NIB_F32, s->m->rank, s->m->shape) &&
                    !nib_dequantize(s->host.tensor, (nib_usage)s->usage, &array),
                "values of a tensor");
    }
    for (int64_t i = 0; i < n; i++)
        out[i] = s->m && s->usage ? values[i % s->length * s->lines + i / s->length] : values[i];
}

static double y_at(const struct product *p, const uint8_t *y, int64_t i, int64_t j)
{
    const int64_t width = nib_dtype_bits(p->y.dtype) / 8;
    float x;
    require(!nib_decode(p->y.dtype, y + p->y.offset + (i * p->y.strides[0] + j * p->y.strides[1]) * width, 1, &x), "y");
    return x;
}

/* A GPU's product within the bound of docs/numerics.md 14, as cuda/test_cuda_products.c has it, where nothing comes near
 * an overflow. What is subnormal may be lost. */
static void check_bound(const struct side *a, const struct side *b, const struct product *p)
{
    static double left[ELEMENTS], right[ELEMENTS];
    const double alpha = (double)p->options.alpha, beta = (double)p->options.beta, large = 0x1p100;
    const double last = p->y.dtype == NIB_F32 ? 0x1p-24 : p->y.dtype == NIB_F16 ? 0x1p-11 : 0x1p-8;
    const bool twice = p->y.dtype != NIB_F32 && (p->options.bias || beta != 0);
    read_side(a, left);
    read_side(b, right);
    for (int64_t i = 0; i < a->lines; i++)
        for (int64_t j = 0; j < b->lines; j++) {
            const double *const x = left + i * a->length, *const y = right + j * b->length;
            double sum = 0, xx = 0, yy = 0;
            for (int64_t k = 0; k < a->length; k++) {
                sum += x[k] * y[k];
                xx += x[k] * x[k];
                yy += y[k] * y[k];
            }
            const double bias = p->options.bias ? (double)p->biases[j] : 0,
                         old = beta != 0 ? beta * y_at(p, p->before, i, j) : 0, rest = fabs(bias) + fabs(old),
                         exact = alpha * sum + bias + old, got = y_at(p, p->got[0], i, j),
                         terms = (double)(a->length + 64), norms = sqrt(xx) + sqrt(yy),
                         bound = 0x1p-22 * (terms * fabs(alpha) * sqrt(xx * yy) + rest) +
                                 last * (fabs(exact) + (twice ? fabs(exact) + rest : 0)) +
                                 (p->y.dtype == NIB_F16 ? 0x1p-23 : 0) + 0x1p-110 * terms * (1 + norms);
            const bool small = fabs(alpha) <= 1 && norms < large && sqrt(xx * yy) < large && rest < large &&
                               isfinite(y_at(p, p->expected, i, j)) &&
                               (p->y.dtype != NIB_F16 || fabs(exact) + bound < 65504);
            require(!small || fabs(got - exact) <= bound, "a product within its bound");
        }
}

static void call_product(struct draws *d, const struct slot *s, const struct slot *other)
{
    static struct product p;
    struct side sides[2];
    const bool plain = !other->t || draw(d, 3) == 0, swapped = draw(d, 2);
    use_tensor(d, s, &sides[0]);
    if (plain && sides[0].length * 20 <= MANY)
        use_values(d, sides[0].length, s->device, &sides[1]);
    else
        use_tensor(d, plain ? s : other, &sides[1]);
    const struct side *a = &sides[swapped], *b = &sides[!swapped];
    const bool together = sides[1].m != &other->m || s->device == other->device;
    if (a->lines * b->lines <= MANY && a->lines * b->lines * a->length <= 64 * MANY) {
        draw_product(d, a->lines, b->lines, &p);
        const nib_status defined = nib_gemm_reference(&a->host, &b->host, &p.options, &p.y);
        require(!defined == can_multiply(a, b), "the reference of a product");
        const bool good = done(multiply(d, a, b, &p, s->device), !defined && together, "nib_gemm");
        for (int i = 0; i < p.n; i++) {
            if (!good || !s->device || !PARTIAL)
                require(!memcmp(p.got[i], good ? p.expected : p.before, p.y.bytes), good ? "a product" : "no product");
            require(!memcmp(p.got[i], p.got[0], p.y.bytes), "the same product");
        }
        if (good && s->device && PARTIAL)
            check_bound(a, b, &p);
    }
    if (sides[1].operand.array)
        drop_values();
    nib_tensor_destroy(sides[0].copy);
    nib_tensor_destroy(sides[1].copy);
}

/* ---- Calls: groups ---- */

enum { MEMBERS = 4 };

static struct model member_model(const nib_quantizer *q, int64_t first, int64_t count, int64_t cols)
{
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    struct model m = { .q = *q, .dtype = given.dtype };
    const int64_t shape[2] = { count, cols };
    const uint8_t *values = given.plain + (size_t)(first * cols) * (size_t)nib_dtype_bits(given.dtype) / 8;
    set_shape(&m, 2, shape);
    for (int usage = 0; usage < 2; usage++)
        if (usage ? q->columnwise : q->rowwise) {
            allocate_usage(&m, usage);
            plain_quantize(&m, usage, values, given.dtype, &nothing);
        }
    return m;
}

/* Members in shared buffers, which outlive the group. */
static nib_status quantize_group(struct draws *d, const nib_quantizer *q, const int64_t *counts, size_t n, int64_t cols,
                                 nib_tensor **out)
{
    nib_group *group = NULL;
    begin(d);
    nib_status status = nib_group_create(q, given.dtype, counts, n, cols, &group);
    if (!status)
        status = nib_group_quantize(group, &given.array, NULL);
    for (size_t i = 0; i < n && !status; i++)
        status = nib_group_member(group, i, &out[i]);
    nib_group_destroy(group);
    for (size_t i = 0; i < n && status; i++) {
        nib_tensor_destroy(out[i]);
        out[i] = NULL;
    }
    return status;
}

static void call_group(struct draws *d)
{
    static const int64_t rows[] = { 0, 1, 3, 16, 17, 32, 48, 64, 130 }, widths[] = { 1, 15, 16, 32, 48, 64 };
    int64_t counts[MEMBERS], sum = 0;
    nib_tensor *members[MEMBERS] = { NULL };
    const size_t n = 1 + (size_t)draw(d, MEMBERS);
    const int64_t cols = widths[draw(d, 6)];
    for (size_t i = 0; i < n; i++) {
        counts[i] = rows[draw(d, 9)];
        counts[i] = (sum + counts[i]) * cols > MANY ? 0 : counts[i];
        sum += counts[i];
    }
    nib_quantizer q = draw_quantizer(d);
    const bool split = draw(d, 2);
    draw_values(d, 2, (const int64_t[2]){ sum, cols }, NULL);
    nib_quantizer alone = q;
    alone.origin[0] = alone.origin[1] = 0; /* each is a whole of its own */
    bool accepted = true;
    for (size_t i = 0; i < n; i++) {
        nib_array like;
        require(!nib_array_init(&like, given.memory, given.dtype, 2, (const int64_t[2]){ counts[i], cols }), "rows");
        accepted &= !nib_quantizer_check(&alone, &like);
    }
    if (split)
        begin(d);
    const nib_status status = split ? nib_split_quantize(&q, &given.array, counts, n, members)
                                    : quantize_group(d, &q, counts, n, cols, members);
    if (!done(status, accepted, split ? "nib_split_quantize" : "a group"))
        return;
    int64_t first = 0;
    for (size_t i = 0; i < n; first += counts[i++])
        keep(d, members[i], member_model(&alone, first, counts[i], cols), NULL);
}

/* ---- Sequences ---- */

static void call_on(struct draws *d, struct slot *s, int what)
{
    switch (what) {
    case 0:
        call_quantize_into(d, s);
        break;
    case 1:
        call_view(d, s);
        break;
    case 2:
        call_slice(d, s);
        break;
    case 3:
        call_split(d, s);
        break;
    case 4:
        call_update_usage(d, s);
        break;
    case 5:
        call_invalidate(s);
        break;
    case 6:
        call_set_quantizer(d, s);
        break;
    case 7:
        call_to(d, s);
        break;
    case 8:
        call_zero(s);
        break;
    case 9:
        call_from_buffers(d, s);
        break;
    case 10:
        call_save_and_restore(d, s);
        break;
    case 11:
        call_file(d, s);
        break;
    case 12:
        call_swizzle(d, s);
        break;
    case 13:
        call_rebind(d, s);
        break;
    case 14:
        call_dequantize(d, s);
        break;
    case 15:
        call_shards(d, s);
        break;
    case 16:
        nib_tensor_clear(s->t);
        drop_all(&s->m);
        break;
    default:
        free_slot(s);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    struct draws d = { bytes, count };
    remote = remote_create(&d);
    for (int i = 0; i < CALLS && d.left; i++) {
        const int what = draw(&d, 32);
        struct slot *s = &slots[draw(&d, SLOTS)], *other = &slots[draw(&d, SLOTS)];
        if (what < 2 || (what < 28 && !s->t))
            what ? call_quantize(&d) : call_create(&d);
        else if (what < 20)
            call_on(&d, s, what - 2);
        else if (what >= 28)
            what < 31 ? call_fake_quantize(&d) : call_amax(&d);
        else if (what >= 26)
            call_group(&d);
        else if (what >= 24)
            call_product(&d, s, other);
        else if (other->t)
            what < 22 ? call_copy(&d, s, other) : call_equal(s, other);
        check_all();
    }
    for (int i = 0; i < SLOTS; i++)
        free_slot(&slots[i]);
    nib_device_release(remote);
    require(remote_live() == 0, "nothing left on the device");
    return 0;
}
