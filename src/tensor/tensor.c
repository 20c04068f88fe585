/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.c - a tensor's life: buffers, quantize into, dequantize from, usages, metadata.
 */
#include "tensor/tensor.h"

#include "format/codec.h"
#include "tensor/layout.h"
#include "base/os.h"

/* ---- Small questions ---- */

const char *nib_usage_name(nib_usage usage) { return usage == NIB_ROWWISE ? "rowwise" : "columnwise"; }

nib_buffer *nib_tensor_kind(const nib_tensor *t, nib_usage usage, int kind)
{
    const nib_part part = nib_part_of(nib_format_of(&t->q), usage, kind);
    return part < NIB_PART_COUNT ? t->parts[part] : NULL;
}

bool nib_tensor_has(const nib_tensor *t, nib_usage usage) { return nib_tensor_kind(t, usage, 0) != NULL; }

nib_status nib_tensor_pick(const nib_tensor *t, nib_usage wanted, nib_usage *out)
{
    if (wanted != NIB_ROWWISE && wanted != NIB_COLUMNWISE && wanted != NIB_EITHER)
        return nib_fail(NIB_ERR_ARG, "%d is not a usage of a tensor", (int)wanted);
    const nib_usage usage = wanted != NIB_EITHER             ? wanted
                            : nib_tensor_has(t, NIB_ROWWISE) ? NIB_ROWWISE
                                                             : NIB_COLUMNWISE;
    if (!nib_tensor_has(t, usage))
        return nib_fail(NIB_ERR_USAGE, wanted == NIB_EITHER ? "the tensor has no data" : "the tensor has no %s usage",
                        nib_usage_name(usage));
    if (usage == NIB_COLUMNWISE && t->columnwise_stale)
        return nib_fail(NIB_ERR_USAGE,
                        "the columnwise usage is not valid any more: nib_tensor_update_usage makes it anew");
    *out = usage;
    return NIB_OK;
}

struct nib_usage_memory nib_tensor_memory(const nib_tensor *t, nib_usage usage)
{
    return (struct nib_usage_memory){ nib_buffer_data(nib_tensor_kind(t, usage, 0)),
                                      nib_buffer_data(nib_tensor_kind(t, usage, 1)),
                                      nib_buffer_data(nib_tensor_kind(t, usage, 2)) };
}

static nib_usage usage_of_part(nib_part part) { return part % 2 ? NIB_COLUMNWISE : NIB_ROWWISE; }

size_t nib_part_bytes(const struct nib_geometry *geometry, nib_part part)
{
    const struct nib_usage_geometry *usage = &geometry->usage[usage_of_part(part)];
    const int64_t bytes[3] = { usage->data_bytes, usage->scales_bytes, usage->tensor_scales_bytes };
    return (size_t)bytes[part / 2];
}

struct nib_rules nib_tensor_rules(const nib_tensor *t) { return nib_rules_of(&t->q, t->dtype); }

bool nib_same_meaning(const nib_quantizer *a, const nib_quantizer *b)
{
    const struct nib_rules ra = nib_rules_of(a, NIB_F32), rb = nib_rules_of(b, NIB_F32);
    const bool transformed = a->rht || a->rht_rowwise;
    return a->format == b->format && ra.element == rb.element && ra.tensor_scale == rb.tensor_scale &&
           ra.full_scale == rb.full_scale && a->swizzled == b->swizzled && a->row_scaled == b->row_scaled &&
           a->block_dims[0] == b->block_dims[0] && a->rht == b->rht && a->rht_rowwise == b->rht_rowwise &&
           (!transformed || a->rht_sign_mask == b->rht_sign_mask);
}

/* ---- Life ---- */

/* A tensor without buffers, in memory that is there; untouched on failure. It borrows the device. */
static nib_status init_tensor(nib_tensor *t, const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                              nib_device *device)
{
    struct nib_geometry geometry;
    TRY(nib_check_input(q, dtype, rank, shape, &geometry));
    *t = (nib_tensor){ .q = *q, .dtype = dtype, .rank = rank, .geometry = geometry, .device = device };
    t->q.amax_comm = NULL; /* a communicator may be gone long before the tensor */
    if (rank)
        memcpy(t->shape, shape, (size_t)rank * sizeof *shape);
    return NIB_OK;
}

nib_status nib_tensor_new(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape, nib_device *device,
                          nib_tensor **out)
{
    nib_tensor trial;
    TRY(init_tensor(&trial, q, dtype, rank, shape, device));
    nib_tensor *t = nib_alloc(sizeof *t);
    if (!t)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a tensor");
    *t = trial;
    nib_device_retain(device);
    *out = t;
    return NIB_OK;
}

/* A part that the other usage, which stays, uses too. */
static bool shared_with_other(const nib_tensor *t, nib_usage usage, nib_part part)
{
    const nib_usage other = usage == NIB_ROWWISE ? NIB_COLUMNWISE : NIB_ROWWISE;
    return nib_tensor_has(t, other) && nib_part_of(nib_format_of(&t->q), other, (int)part / 2) == part;
}

void nib_tensor_drop(nib_tensor *t, nib_usage usage)
{
    for (int kind = 0; kind < NIB_PART_KINDS; kind++) {
        const nib_part part = nib_part_of(nib_format_of(&t->q), usage, kind);
        if (part == NIB_PART_COUNT || shared_with_other(t, usage, part))
            continue;
        nib_buffer_release(t->parts[part]);
        t->parts[part] = NULL;
    }
    if (usage == NIB_COLUMNWISE)
        t->columnwise_stale = false;
}

static nib_status allocate_usage(nib_tensor *t, nib_usage usage)
{
    nib_status status = NIB_OK;
    for (int kind = 0; kind < NIB_PART_KINDS && !status; kind++) {
        const nib_part part = nib_part_of(nib_format_of(&t->q), usage, kind);
        if (part < NIB_PART_COUNT && !t->parts[part])
            status = nib_buffer_create(nib_part_bytes(&t->geometry, part), t->device, &t->parts[part]);
    }
    if (status)
        nib_tensor_drop(t, usage);
    return status;
}

nib_status nib_tensor_allocate(nib_tensor *t, bool rowwise, bool columnwise)
{
    const bool wanted[2] = { rowwise && !nib_tensor_has(t, NIB_ROWWISE),
                             columnwise && !nib_tensor_has(t, NIB_COLUMNWISE) };
    if (wanted[NIB_ROWWISE])
        TRY(allocate_usage(t, NIB_ROWWISE));
    const nib_status status = wanted[NIB_COLUMNWISE] ? allocate_usage(t, NIB_COLUMNWISE) : NIB_OK;
    if (status && wanted[NIB_ROWWISE])
        nib_tensor_drop(t, NIB_ROWWISE);
    return status;
}

void nib_tensor_clear(nib_tensor *t)
{
    if (!t)
        return;
    nib_tensor_drop(t, NIB_ROWWISE);
    nib_tensor_drop(t, NIB_COLUMNWISE);
}

void nib_tensor_destroy(nib_tensor *t)
{
    nib_tensor_clear(t);
    nib_device_release(t ? t->device : NULL);
    nib_free(t);
}

static nib_status check_zeroable(const nib_device *device, const nib_quantizer *q)
{
    return nib_format_of(q)->tensor_scales ? NIB_DEVICE_HAS(device, fill) : NIB_OK;
}

nib_status nib_tensor_zero(nib_tensor *t)
{
    NIB_REQUIRE(t);
    nib_device *const device = nib_device_of(t->device);
    const float tensor_scale = nib_tensor_rules(t).tensor_scale == NIB_TENSOR_SCALE_AMAX ? 0.0f : 1.0f;
    TRY(check_zeroable(device, &t->q));
    for (int usage = 0; usage < 2; usage++) {
        if (!nib_tensor_has(t, (nib_usage)usage))
            continue;
        const struct nib_usage_geometry *g = &t->geometry.usage[usage];
        const struct nib_usage_memory memory = nib_tensor_memory(t, (nib_usage)usage);
        TRY(device->ops->zero(device, memory.codes, (size_t)g->data_bytes));
        TRY(device->ops->zero(device, memory.scales, (size_t)g->scales_bytes));
        if (g->tensor_scales)
            TRY(device->ops->fill(device, memory.tensor_scales, g->tensor_scales, tensor_scale));
    }
    return NIB_OK;
}

nib_status nib_tensor_create(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                             nib_device *device, nib_tensor **out)
{
    NIB_REQUIRE(out);
    nib_quantizer loaded;
    nib_tensor *t;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(check_zeroable(nib_device_of(device), &loaded));
    TRY(nib_tensor_new(&loaded, dtype, rank, shape, device, &t));
    nib_status status = nib_tensor_allocate(t, loaded.rowwise, loaded.columnwise);
    if (!status)
        status = nib_tensor_zero(t);
    if (status)
        nib_tensor_destroy(t);
    else
        *out = t;
    return status;
}

/* Whether buffers make up whole usages of the sizes that the geometry wants. */
static nib_status check_parts(const struct nib_format_facts *facts, const struct nib_geometry *geometry,
                              nib_buffer *const *parts)
{
    static const char *const names[3] = { "data", "scale", "tensor scale" };
    for (int usage = 0; usage < 2; usage++)
        for (int i = 0; i < NIB_PART_KINDS; i++) {
            const nib_part part = nib_part_of(facts, (nib_usage)usage, i);
            if (part == NIB_PART_COUNT) /* the format has no such part: whatever the caller put there is ignored */
                continue;
            const bool shared = nib_part_of(facts, NIB_ROWWISE, i) == nib_part_of(facts, NIB_COLUMNWISE, i);
            const bool data = parts[NIB_ROW_DATA + usage] || (shared && parts[NIB_COL_DATA - usage]);
            const size_t wanted = nib_part_bytes(geometry, part);
            if ((parts[part] != NULL) != data)
                return nib_fail(NIB_ERR_USAGE, "the %s usage has %s but no %s", nib_usage_name((nib_usage)usage),
                                parts[part] ? names[i] : "data", parts[part] ? "data" : names[i]);
            if (parts[part] && nib_buffer_bytes(parts[part]) != wanted)
                return nib_fail(NIB_ERR_SHAPE, "the %s %s buffer has %zu bytes instead of %zu",
                                nib_usage_name((nib_usage)usage), names[i], nib_buffer_bytes(parts[part]), wanted);
            if (parts[part] && i > 0 &&
                (uintptr_t)nib_buffer_data(parts[part]) %
                    (i == 1 ? (uintptr_t)geometry->usage[usage].scale_bytes : sizeof(float)))
                return nib_fail(NIB_ERR_ARG, "the %s %s buffer is not aligned to its values",
                                nib_usage_name((nib_usage)usage), names[i]);
        }
    return NIB_OK;
}

/* The one device of all buffers that the format has. */
static nib_status device_of_parts(const struct nib_format_facts *facts, nib_buffer *const *parts, nib_device **out)
{
    const nib_buffer *first = NULL;
    for (int i = 0; i < facts->saved_count; i++) {
        const nib_buffer *const buffer = parts[facts->saved[i]];
        if (buffer && first)
            TRY(nib_check_same_device("one buffer", nib_buffer_device(first), "another", nib_buffer_device(buffer)));
        if (buffer && !first)
            first = buffer;
    }
    *out = nib_buffer_device(first);
    return NIB_OK;
}

nib_status nib_tensor_from_buffers(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                                   nib_buffer *const *parts, size_t n_parts, nib_tensor **out)
{
    NIB_REQUIRE(parts);
    NIB_REQUIRE(out);
    nib_device *device = NULL;
    if (n_parts != NIB_PART_COUNT)
        return nib_fail(NIB_ERR_ARG, "a tensor has %d parts, not %zu", NIB_PART_COUNT, n_parts);
    nib_quantizer loaded;
    nib_tensor *t;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(device_of_parts(nib_format_of(&loaded), parts, &device));
    loaded.rowwise = parts[NIB_ROW_DATA] != NULL;
    loaded.columnwise = parts[NIB_COL_DATA] != NULL;
    TRY(nib_tensor_new(&loaded, dtype, rank, shape, device, &t));
    const nib_status status = check_parts(nib_format_of(&loaded), &t->geometry, parts);
    if (status) {
        nib_tensor_destroy(t);
        return status;
    }
    for (int i = 0; i < nib_format_of(&loaded)->saved_count; i++) {
        const nib_part part = nib_format_of(&loaded)->saved[i];
        t->parts[part] = nib_buffer_retain(parts[part]);
    }
    *out = t;
    return NIB_OK;
}

/* ---- Quantize ---- */

/* Whether the importance of channels goes with all the rest; its values are the device's. */
static nib_status check_importance(const nib_device *device, const nib_quantizer *q, const nib_overrides *overrides,
                                   const struct nib_geometry *geometry)
{
    if (!overrides->importance)
        return overrides->importance_count
                   ? nib_fail(NIB_ERR_ARG, "importance_count is %lld, and there is no importance",
                              (long long)overrides->importance_count)
                   : NIB_OK;
    const struct {
        bool rejected;
        const char *why;
    } rules[] = {
        { q->scale_rule != NIB_SCALE_SWEEP,
          "importance weighs the errors of a sweep: it goes with no other scale rule" },
        { q->columnwise || !q->rowwise, "importance is that of columns: it goes with the rowwise usage alone" },
        { q->rht_rowwise, "importance is that of columns, which the RHT mixes" },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].rejected)
            return nib_fail(NIB_ERR_MODE, "%s", rules[i].why);
    if (overrides->importance_count != geometry->cols)
        return nib_fail(NIB_ERR_SHAPE, "there are %lld columns, and importance has %lld values",
                        (long long)geometry->cols, (long long)overrides->importance_count);
    return nib_device_supports(device, device->ops->weighs, "quantization with importance");
}

/* Overrides of any version, checked; what is not there is NULL. */
static nib_status load_overrides(nib_device *device, const nib_quantizer *q, const nib_overrides *in,
                                 const struct nib_geometry *geometry, nib_overrides *out)
{
    *out = (nib_overrides){ .bytes = sizeof *out };
    if (in)
        TRY(nib_struct_read("overrides", in, out, sizeof *out, NIB_UP_TO(nib_overrides, importance_count)));
    if (out->scale && !nib_dialect_of(q)->scale_of)
        return nib_fail(NIB_ERR_MODE, "%s has no scale to override", nib_format_of(q)->name);
    TRY(check_importance(device, q, out, geometry));
    return device->ops->check_quantization ? device->ops->check_quantization(device, q, out, geometry) : NIB_OK;
}

/* A quantization once everything is checked: where it runs, by which options, with what. */
struct quantization {
    nib_device *device; /* the array's: its threads or its stream */
    nib_quantizer q;
    nib_overrides overrides;
};

static nib_status quantize_parts(const struct quantization *with, const nib_array *x, const float *noop, nib_tensor *t)
{
    const struct nib_usage_memory memory[2] = { nib_tensor_memory(t, NIB_ROWWISE),
                                                nib_tensor_memory(t, NIB_COLUMNWISE) };
    return with->device->ops->quantize(with->device, &with->q, x, &with->overrides, noop, &t->geometry, memory);
}

/* All that can fail on one rank alone before a new tensor is quantized into. */
static nib_status prepare_new(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                              struct quantization *out, nib_tensor **t)
{
    TRY(nib_quantizer_load(q, &out->q));
    TRY(nib_check_array("x", x));
    out->device = nib_device_of(x->device);
    TRY(NIB_DEVICE_HAS(out->device, quantize));
    TRY(nib_tensor_new(&out->q, x->dtype, x->rank, x->shape, x->device, t));
    TRY(load_overrides(out->device, &out->q, overrides, &(*t)->geometry, &out->overrides));
    return nib_tensor_allocate(*t, out->q.rowwise, out->q.columnwise);
}

nib_status nib_quantize(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides, nib_tensor **out)
{
    struct quantization with;
    nib_tensor *t = NULL;
    nib_status status =
        out ? prepare_new(q, x, overrides, &with, &t) : nib_fail(NIB_ERR_ARG, "nib_quantize: out is NULL");
    if (status) /* the other ranks are waiting to hear of it */
        status = nib_agree(nib_amax_comm_of(q), status, 0);
    else
        status = quantize_parts(&with, x, NULL, t);
    if (status)
        nib_tensor_destroy(t);
    else
        *out = t;
    return status;
}

static nib_status check_same_shape(const nib_tensor *t, const nib_array *x)
{
    bool same = t->rank == x->rank;
    for (int i = 0; same && i < t->rank; i++)
        same = t->shape[i] == x->shape[i];
    return same ? NIB_OK : nib_fail(NIB_ERR_SHAPE, "the array's shape is not the tensor's");
}

/* Whether t becomes `updated` by more than the bytes of its buffers. */
static bool changes(const nib_tensor *t, const nib_tensor *updated)
{
    return memcmp(t->parts, updated->parts, sizeof t->parts) != 0 || t->columnwise_stale ||
           !nib_quantizer_equal(&t->q, &updated->q) || (updated->q.rowwise && !nib_tensor_has(t, NIB_ROWWISE)) ||
           (updated->q.columnwise && !nib_tensor_has(t, NIB_COLUMNWISE));
}

/* The buffers that are written in place. A view that shares them must go on decoding them rightly: once their meaning
 * changes they are new. */
static void share_parts(const nib_tensor *t, nib_tensor *updated)
{
    const nib_quantizer *q = &updated->q;
    const bool dropping =
        (nib_tensor_has(t, NIB_ROWWISE) && !q->rowwise) || (nib_tensor_has(t, NIB_COLUMNWISE) && !q->columnwise);
    /* A tensor scale for both usages must not change under a view that keeps the usage which is dropped here. */
    const bool in_place = nib_same_meaning(q, &t->q) && !(nib_format_of(q)->shared_tensor_scale && dropping);
    for (int usage = 0; usage < 2 && in_place; usage++)
        for (int kind = 0; kind < NIB_PART_KINDS && nib_wants(q, usage); kind++) {
            const nib_part part = nib_part_of(nib_format_of(q), (nib_usage)usage, kind);
            if (part < NIB_PART_COUNT && !updated->parts[part])
                updated->parts[part] = nib_buffer_retain(t->parts[part]);
        }
}

/* Work on a second tensor that shares the buffers it may write in place, so that a failure leaves the first alone.
 * `updated` is empty and is to be cleared in any case. A no-op that is on the device stops what runs there; it must be
 * known here, which takes waiting, only where the two tensors differ. */
static nib_status prepare_update(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                                 const float *noop, const nib_tensor *t, struct quantization *out, nib_tensor *updated,
                                 bool *stopped)
{
    TRY(nib_quantizer_load(q ? q : &t->q, &out->q));
    TRY(nib_check_array("x", x));
    TRY(check_same_shape(t, x));
    TRY(nib_check_same_device("x", x->device, "the tensor", t->device));
    out->device = nib_device_of(x->device);
    TRY(NIB_DEVICE_HAS(out->device, quantize));
    TRY(init_tensor(updated, &out->q, x->dtype, x->rank, x->shape, t->device));
    updated->dtype = t->dtype;
    share_parts(t, updated);
    if (noop && changes(t, updated)) {
        TRY(NIB_DEVICE_HAS(out->device, is_set));
        TRY(out->device->ops->is_set(out->device, noop, stopped));
        if (*stopped)
            return NIB_OK;
    }
    TRY(load_overrides(out->device, &out->q, overrides, &updated->geometry, &out->overrides));
    updated->device = x->device; /* new memory is zeroed in the order of what is written into it */
    const nib_status status = nib_tensor_allocate(updated, out->q.rowwise, out->q.columnwise);
    updated->device = t->device;
    return status;
}

nib_status nib_quantize_into(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                             const float *noop, nib_tensor *t)
{
    /* Before all checks, but not where the flag may be on another device, as x is. */
    if (noop && t && nib_device_is_host(t->device) && (!x || nib_device_is_host(x->device)) && *noop == 1.0f)
        return NIB_OK;
    struct quantization with;
    nib_tensor updated = { 0 };
    bool stopped = false;
    if (t)
        updated.q = t->q;
    nib_status status = t ? prepare_update(q, x, overrides, noop, t, &with, &updated, &stopped)
                          : nib_fail(NIB_ERR_ARG, "nib_quantize_into: t is NULL");
    if (status) /* the other ranks are waiting to hear of it */
        status = nib_agree(nib_amax_comm_of(q), status, 0);
    else if (!stopped)
        status = quantize_parts(&with, x, noop, &updated);
    if (!status && !stopped) {
        const nib_tensor old = *t;
        *t = updated;
        updated = old;
    }
    nib_tensor_clear(&updated);
    return status;
}

/* ---- Dequantize ---- */

static nib_status check_values_out(const nib_array *out)
{
    TRY(nib_check_output("out", out));
    if (out->dtype != NIB_F32 && out->dtype != NIB_BF16 && out->dtype != NIB_F16)
        return nib_fail(NIB_ERR_DTYPE, "dequantization gives F32, BF16 and F16, not %s", nib_dtypes[out->dtype].name);
    return NIB_OK;
}

static nib_status dequantize_rows(const nib_tensor *t, nib_usage from, int64_t first, int64_t count,
                                  const nib_array *out)
{
    nib_usage usage;
    if (from != NIB_ROWWISE && from != NIB_COLUMNWISE && from != NIB_EITHER)
        return nib_fail(NIB_ERR_ARG, "%d is not a usage of a tensor", (int)from);
    TRY(nib_check_same_device("out", out->device, "the tensor", t->device));
    if (count == 0 || t->geometry.cols == 0)
        return NIB_OK; /* whichever usage, there is nothing in it */
    TRY(nib_tensor_pick(t, from, &usage));
    nib_device *const device = nib_device_of(out->device);
    TRY(NIB_DEVICE_HAS(device, dequantize));
    const struct nib_usage_memory memory = nib_tensor_memory(t, usage);
    return device->ops->dequantize(device, &t->q, &t->geometry, usage, &memory, first, count, out);
}

nib_status nib_dequantize(const nib_tensor *t, nib_usage from, const nib_array *out)
{
    NIB_REQUIRE(t);
    TRY(check_values_out(out));
    TRY(check_same_shape(t, out));
    return dequantize_rows(t, from, 0, t->geometry.rows, out);
}

nib_status nib_dequantize_rows(const nib_tensor *t, nib_usage from, int64_t first, int64_t count, const nib_array *out)
{
    NIB_REQUIRE(t);
    TRY(check_values_out(out));
    if (first < 0 || count < 0 || first > t->geometry.rows || count > t->geometry.rows - first)
        return nib_fail(NIB_ERR_SHAPE, "%lld rows from row %lld on, of %lld", (long long)count, (long long)first,
                        (long long)t->geometry.rows);
    if (out->rank != 2 || out->shape[0] != count || out->shape[1] != t->geometry.cols)
        return nib_fail(NIB_ERR_SHAPE, "out must be [%lld, %lld]", (long long)count, (long long)t->geometry.cols);
    return dequantize_rows(t, from, first, count, out);
}

/* ---- Amaxes ---- */

nib_status nib_amax(const nib_quantizer *q, const nib_array *x, float *const amax[2])
{
    NIB_REQUIRE(amax);
    struct quantization with = { 0 };
    struct nib_geometry geometry;
    TRY(nib_quantizer_load(q, &with.q));
    TRY(nib_check_array("x", x));
    with.q.amax_comm = NULL;
    with.q.rowwise = with.q.rowwise && amax[NIB_ROWWISE];
    with.q.columnwise = with.q.columnwise && amax[NIB_COLUMNWISE];
    with.device = nib_device_of(x->device);
    if (!nib_format_of(&with.q)->tensor_scales)
        return nib_fail(NIB_ERR_MODE, "%s has no amax per tensor: every block has its own",
                        nib_format_of(&with.q)->name);
    TRY(NIB_DEVICE_HAS(with.device, find_amaxes));
    TRY(nib_check_input(&with.q, x->dtype, x->rank, x->shape, &geometry));
    TRY(load_overrides(with.device, &with.q, NULL, &geometry, &with.overrides));
    float *const wanted[2] = { with.q.rowwise ? amax[NIB_ROWWISE] : NULL,
                               with.q.columnwise ? amax[NIB_COLUMNWISE] : NULL };
    return with.device->ops->find_amaxes(with.device, &with.q, x, &geometry, wanted);
}

/* ---- Both at once ---- */

/* All that can fail on one rank alone. */
static nib_status prepare_fake(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                               nib_usage usage, const nib_array *out, struct quantization *with,
                               struct nib_geometry *geometry)
{
    TRY(nib_quantizer_load(q, &with->q));
    if (usage != NIB_ROWWISE && usage != NIB_COLUMNWISE)
        return nib_fail(NIB_ERR_ARG, "fake quantization is of the rowwise usage or of the columnwise one, not of %d",
                        (int)usage);
    with->q.rowwise = usage == NIB_ROWWISE;
    with->q.columnwise = usage == NIB_COLUMNWISE;
    TRY(nib_check_array("x", x));
    TRY(check_values_out(out));
    bool same = x->dtype == out->dtype && x->rank == out->rank;
    for (int i = 0; same && i < x->rank; i++)
        same = x->shape[i] == out->shape[i];
    if (!same)
        return nib_fail(NIB_ERR_MISMATCH, "nib_fake_quantize: the arrays differ in dtype or shape");
    TRY(nib_check_same_device("out", out->device, "x", x->device));
    with->device = nib_device_of(x->device);
    TRY(NIB_DEVICE_HAS(with->device, fake_quantize));
    TRY(nib_check_input(&with->q, x->dtype, x->rank, x->shape, geometry));
    return load_overrides(with->device, &with->q, overrides, geometry, &with->overrides);
}

nib_status nib_fake_quantize(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                             nib_usage usage, const nib_array *out)
{
    struct quantization with;
    struct nib_geometry geometry;
    const nib_status status = prepare_fake(q, x, overrides, usage, out, &with, &geometry);
    if (status) /* the other ranks are waiting to hear of it */
        return nib_agree(nib_amax_comm_of(q), status, 0);
    return with.device->ops->fake_quantize(with.device, &with.q, x, &with.overrides, &geometry, usage, out);
}

/* ---- Metadata and parts ---- */

nib_status nib_tensor_get_metadata(const nib_tensor *t, nib_metadata *out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("metadata", out, NIB_UP_TO(nib_metadata, quantizer)));
    nib_metadata metadata = { .format = t->q.format,
                              .dtype = t->dtype,
                              .element = nib_element_of(&t->q),
                              .rank = t->rank,
                              .rows = t->geometry.rows,
                              .cols = t->geometry.cols,
                              .tensor_scale = nib_tensor_rules(t).tensor_scale,
                              .rowwise = nib_tensor_has(t, NIB_ROWWISE),
                              .columnwise = nib_tensor_has(t, NIB_COLUMNWISE),
                              .columnwise_valid = nib_tensor_has(t, NIB_COLUMNWISE) && !t->columnwise_stale,
                              .quantizer = &t->q };
    memcpy(metadata.shape, t->shape, sizeof metadata.shape);
    nib_struct_write(out, &metadata, sizeof metadata);
    return NIB_OK;
}

nib_device *nib_tensor_device(const nib_tensor *t) { return t ? t->device : NULL; }

nib_buffer *nib_tensor_buffer(const nib_tensor *t, nib_part part)
{
    return t && (unsigned)part < NIB_PART_COUNT ? t->parts[part] : NULL;
}

/* Dtype and shape of a part, padded or not. Codes in the logical order keep the logical leading dims. */
static nib_status part_shape(const nib_quantizer *q, const struct nib_geometry *geometry, nib_part part, int rank,
                             const int64_t *shape, bool padded, nib_dtype *dtype, int *out_rank, int64_t *out_shape)
{
    const struct nib_format_facts *facts = nib_format_of(q);
    const nib_usage side = usage_of_part(part);
    const struct nib_usage_geometry *usage = &geometry->usage[side];
    if ((unsigned)part >= NIB_PART_COUNT)
        return nib_fail(NIB_ERR_ARG, "%d is not a part of a tensor", (int)part);
    if (nib_part_of(facts, side, (int)part / 2) != part)
        return nib_fail(NIB_ERR_USAGE, "a %s tensor has no such part", facts->name);
    if (part == NIB_ROW_DATA || (part == NIB_COL_DATA && !facts->transposed)) {
        *dtype = NIB_U8;
        *out_rank = rank;
        if (rank)
            memcpy(out_shape, shape, (size_t)rank * sizeof *shape);
        if (rank && !usage->element_stride)
            out_shape[rank - 1] = usage->line_stride;
        return NIB_OK;
    }
    const int64_t *scales = padded ? usage->scale_shape : usage->valid_shape;
    const struct {
        nib_dtype dtype;
        int rank;
        int64_t shape[2];
    } kinds[NIB_PART_KINDS] = { { NIB_U8, 2, { usage->lines, usage->line_stride } },
                                { facts->scale, 2, { scales[0], scales[1] } },
                                { NIB_F32, 1, { usage->tensor_scales, 0 } } };
    *dtype = kinds[part / 2].dtype;
    *out_rank = kinds[part / 2].rank;
    memcpy(out_shape, kinds[part / 2].shape, (size_t)*out_rank * sizeof *out_shape);
    return NIB_OK;
}

static nib_status describe_part(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape, bool padded,
                                int *out_rank, int64_t *out_shape)
{
    nib_quantizer loaded;
    struct nib_geometry geometry;
    nib_dtype dtype;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(nib_geometry_of(&loaded, rank, shape, &geometry));
    return part_shape(&loaded, &geometry, part, rank, shape, padded, &dtype, out_rank, out_shape);
}

nib_status nib_part_shape(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape, int *out_rank,
                          int64_t *out_shape)
{
    NIB_REQUIRE(out_rank);
    NIB_REQUIRE(out_shape);
    return describe_part(q, part, rank, shape, true, out_rank, out_shape);
}

nib_status nib_part_valid_shape(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape, int *out_rank,
                                int64_t *out_shape)
{
    NIB_REQUIRE(out_rank);
    NIB_REQUIRE(out_shape);
    return describe_part(q, part, rank, shape, false, out_rank, out_shape);
}

nib_status nib_tensor_part(const nib_tensor *t, nib_part part, nib_array *out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    nib_dtype dtype = NIB_U8;
    int rank = 0;
    int64_t shape[NIB_MAX_RANK] = { 0 };
    TRY(part_shape(&t->q, &t->geometry, part, t->rank, t->shape, true, &dtype, &rank, shape));
    if (!t->parts[part])
        return nib_fail(NIB_ERR_USAGE, "the tensor has no %s usage", nib_usage_name(usage_of_part(part)));
    TRY(nib_array_init(out, nib_buffer_data(t->parts[part]), dtype, rank, shape));
    out->device = t->device;
    return NIB_OK;
}

/* ---- Usages ---- */

nib_status nib_tensor_get_usages(const nib_tensor *t, int *rowwise, int *columnwise)
{
    NIB_REQUIRE(t);
    if (rowwise)
        *rowwise = nib_tensor_has(t, NIB_ROWWISE);
    if (columnwise)
        *columnwise = nib_tensor_has(t, NIB_COLUMNWISE);
    return NIB_OK;
}

/* Whether a columnwise usage can be built, from the rowwise one. */
static nib_status check_buildable(const nib_tensor *t)
{
    if (!nib_tensor_has(t, NIB_ROWWISE))
        return nib_fail(NIB_ERR_USAGE,
                        "a columnwise usage is built from the rowwise one, which the tensor does not have");
    if (t->q.block_dims[0] == 1)
        return nib_fail(NIB_ERR_USAGE,
                        "with 1x%d blocks the columnwise usage has scales of its own and cannot be built from the "
                        "rowwise codes: quantize again",
                        nib_format_of(&t->q)->block);
    if (t->q.swizzled)
        return nib_fail(NIB_ERR_USAGE, "the columnwise usage is built from compact scales: unswizzle the tensor first");
    return NIB_DEVICE_HAS(nib_device_of(t->device), build_columnwise);
}

/* On failure a usage that was not there is not there, and one that was not valid is not. */
static nib_status build_columnwise(nib_tensor *t)
{
    const bool there = nib_tensor_has(t, NIB_COLUMNWISE);
    nib_device *const device = nib_device_of(t->device);
    TRY(check_buildable(t));
    TRY(nib_tensor_allocate(t, false, true));
    const struct nib_usage_memory row = nib_tensor_memory(t, NIB_ROWWISE), col = nib_tensor_memory(t, NIB_COLUMNWISE);
    const nib_status status = device->ops->build_columnwise(device, &t->q, &t->geometry, &row, &col);
    if (!status)
        t->columnwise_stale = false;
    else if (!there)
        nib_tensor_drop(t, NIB_COLUMNWISE);
    return status;
}

static nib_status copy_buffer(const nib_buffer *from, nib_device *device, nib_buffer **out)
{
    nib_buffer *copy = NULL;
    TRY(nib_buffer_create(nib_buffer_bytes(from), device, &copy));
    const nib_status status =
        nib_device_move(device, nib_buffer_data(copy), device, nib_buffer_data(from), nib_buffer_bytes(from));
    if (status)
        nib_buffer_release(copy);
    else
        *out = copy;
    return status;
}

nib_status nib_tensor_unshare(const nib_tensor *t, bool rowwise, bool columnwise, nib_buffer *own[NIB_PART_COUNT])
{
    const bool wanted[2] = { rowwise, columnwise };
    nib_status status = NIB_OK;
    for (int usage = 0; usage < 2; usage++)
        for (int kind = 0; kind < NIB_PART_KINDS && wanted[usage] && !status; kind++) {
            const nib_part part = nib_part_of(nib_format_of(&t->q), (nib_usage)usage, kind);
            if (part < NIB_PART_COUNT && t->parts[part] && !own[part] && nib_buffer_is_shared(t->parts[part]))
                status = copy_buffer(t->parts[part], t->device, &own[part]);
        }
    for (int part = 0; part < NIB_PART_COUNT && status; part++) {
        nib_buffer_release(own[part]);
        own[part] = NULL;
    }
    return status;
}

void nib_tensor_place(nib_tensor *t, nib_buffer *const own[NIB_PART_COUNT])
{
    for (int part = 0; part < NIB_PART_COUNT; part++)
        if (own[part]) {
            nib_buffer_release(t->parts[part]);
            t->parts[part] = own[part];
        }
}

/* The usages that are wanted, where the others are still there. */
static nib_status make_usages(nib_tensor *t, const nib_quantizer *wanted)
{
    const bool had[2] = { nib_tensor_has(t, NIB_ROWWISE), nib_tensor_has(t, NIB_COLUMNWISE) };
    const bool stale = t->columnwise_stale, drops = (had[0] && !wanted->rowwise) || (had[1] && !wanted->columnwise);
    nib_buffer *own[NIB_PART_COUNT] = { NULL };
    if (wanted->columnwise && (!had[NIB_COLUMNWISE] || stale))
        TRY(build_columnwise(t));
    if (!drops || !nib_format_of(&t->q)->shared_tensor_scale)
        return NIB_OK;
    /* A view may keep what is dropped, and with it the tensor scale. */
    const nib_status status = nib_tensor_unshare(t, true, true, own);
    if (!status) {
        nib_tensor_place(t, own);
        return NIB_OK;
    }
    if (!had[NIB_COLUMNWISE])
        nib_tensor_drop(t, NIB_COLUMNWISE);
    t->columnwise_stale = stale;
    return status;
}

nib_status nib_tensor_update_usage(nib_tensor *t, int rowwise, int columnwise)
{
    NIB_REQUIRE(t);
    nib_quantizer wanted = t->q; /* -1 means what is there, not what was asked for once */
    wanted.rowwise = nib_tensor_has(t, NIB_ROWWISE);
    wanted.columnwise = nib_tensor_has(t, NIB_COLUMNWISE);
    TRY(nib_quantizer_set_usage(&wanted, rowwise, columnwise));
    if (wanted.rowwise && !nib_tensor_has(t, NIB_ROWWISE))
        return nib_fail(NIB_ERR_USAGE, "the tensor has no rowwise usage, and one cannot be built");
    TRY(make_usages(t, &wanted));
    if (!wanted.rowwise)
        nib_tensor_drop(t, NIB_ROWWISE);
    if (!wanted.columnwise)
        nib_tensor_drop(t, NIB_COLUMNWISE);
    t->q = wanted;
    return NIB_OK;
}

nib_status nib_tensor_set_quantizer(nib_tensor *t, const nib_quantizer *q)
{
    NIB_REQUIRE(t);
    nib_quantizer loaded;
    struct nib_geometry geometry;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(nib_check_input(&loaded, t->dtype, t->rank, t->shape, &geometry));
    if (!nib_same_meaning(&loaded, &t->q))
        return nib_fail(NIB_ERR_MISMATCH, "the new quantizer would give the tensor's bytes another meaning");
    loaded.amax_comm = NULL;
    t->q = loaded;
    return NIB_OK;
}

nib_status nib_tensor_invalidate_columnwise(nib_tensor *t)
{
    NIB_REQUIRE(t);
    t->columnwise_stale = nib_tensor_has(t, NIB_ROWWISE) && nib_tensor_has(t, NIB_COLUMNWISE);
    return NIB_OK;
}
