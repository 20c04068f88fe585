/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_fsdp.c - tensors whose rows a framework gathers by itself: what to gather, and what was gathered as a tensor.
 */
#include "nib_shard.h"
#include "tensor/tensor.h"

static nib_status check_fsdp(const nib_quantizer *q, const struct nib_geometry *geometry)
{
    const struct nib_usage_geometry *g = &geometry->usage[NIB_ROWWISE];
    const int64_t block = nib_format_of(q)->block;
    if (q->swizzled)
        return nib_fail(NIB_ERR_UNSUPPORTED, "swizzled scales do not lie row by row: unswizzle the tensor first");
    if (q->row_scaled)
        return nib_fail(NIB_ERR_UNSUPPORTED, "with one amax per row there is more than codes and scales to gather");
    if (block && (g->scale_block != 1 || g->lines_per_scale != 1))
        return nib_fail(NIB_ERR_UNSUPPORTED, "the scales of %s do not lie row by row here", nib_format_of(q)->name);
    if (q->columnwise && q->block_dims[0] == 1)
        return nib_fail(NIB_ERR_USAGE,
                        "a columnwise usage is wanted, and with 1x%lld blocks it cannot be built from what is gathered",
                        (long long)block);
    if (q->block_dims[0] > 1 && geometry->rows % block)
        return nib_fail(NIB_ERR_SHAPE, "%lld rows are not whole blocks of %lld", (long long)geometry->rows,
                        (long long)block);
    return NIB_OK;
}

nib_status nib_fsdp_extract(const nib_tensor *t, nib_fsdp_parts *out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("parts", out, NIB_UP_TO(nib_fsdp_parts, tensor_scale)));
    nib_quantizer q = t->q;
    q.columnwise = q.columnwise || nib_tensor_has(t, NIB_COLUMNWISE);
    if (!nib_tensor_has(t, NIB_ROWWISE))
        return nib_fail(NIB_ERR_USAGE, "the tensor has no rowwise usage");
    TRY(check_fsdp(&q, &t->geometry));
    const struct nib_usage_geometry *g = &t->geometry.usage[NIB_ROWWISE];
    const struct nib_usage_memory memory = nib_tensor_memory(t, NIB_ROWWISE);
    nib_fsdp_parts parts = { .tensor_scale = 1 };
    TRY(nib_array_init(&parts.data, memory.codes, NIB_U8, 2, (const int64_t[2]){ g->lines, g->line_stride }));
    if (memory.scales)
        TRY(nib_array_init(&parts.scales, memory.scales, nib_format_of(&q)->scale, 2,
                           (const int64_t[2]){ g->lines, g->scale_shape[1] }));
    parts.data.device = parts.scales.device = t->device;
    if (memory.tensor_scales)
        TRY(nib_device_move(NULL, &parts.tensor_scale, t->device, memory.tensor_scales, sizeof(float)));
    nib_struct_write(out, &parts, sizeof parts);
    return NIB_OK;
}

static nib_status check_gathered(const char *what, const nib_array *array, const nib_tensor *t, nib_dtype dtype,
                                 int64_t rows, int64_t cols)
{
    TRY(nib_check_array(what, array));
    TRY(nib_check_same_device(what, array->device, "the shard", t->device));
    if (array->dtype != dtype || array->rank != 2 || array->shape[0] != rows || array->shape[1] != cols ||
        (rows > 1 && array->strides[0] != cols) || (cols > 1 && array->strides[1] != 1))
        return nib_fail(NIB_ERR_SHAPE, "%s must be a contiguous %s [%lld, %lld]", what, nib_dtypes[dtype].name,
                        (long long)rows, (long long)cols);
    return NIB_OK;
}

/* The tensor to write, as yet without the memory that it lacks: the caller's, or a new one. */
static nib_status assign_target(const nib_tensor *shard, int64_t rows, nib_tensor *existing, nib_tensor **out)
{
    nib_quantizer q = shard->q;
    q.rowwise = 1;
    q.columnwise =
        q.columnwise || nib_tensor_has(shard, NIB_COLUMNWISE) || (existing && nib_tensor_has(existing, NIB_COLUMNWISE));
    int64_t shape[NIB_MAX_RANK], inner = 1;
    const int rank = shard->rank;
    if (rank < 2)
        return nib_fail(NIB_ERR_SHAPE, "a tensor of rank %d has no rows to gather", rank);
    memcpy(shape, shard->shape, sizeof shape);
    for (int i = 1; i < rank - 1; i++)
        inner *= shape[i]; /* the shard has as many rows and more: it fits */
    if (rows < 0 || (inner ? rows % inner : rows))
        return nib_fail(NIB_ERR_SHAPE, "%lld rows do not make up dims of %lld rows", (long long)rows, (long long)inner);
    shape[0] = inner ? rows / inner : shape[0];
    if (!existing) {
        TRY(nib_tensor_new(&q, shard->dtype, rank, shape, shard->device, out));
    } else if (existing->rank != rank || memcmp(existing->shape, shape, (size_t)rank * sizeof *shape) ||
               !nib_same_meaning(&existing->q, &q)) {
        return nib_fail(NIB_ERR_MISMATCH, "the tensor to assign to is of another shape or kind");
    } else {
        TRY(nib_check_same_device("the tensor to assign to", existing->device, "the shard", shard->device));
        *out = existing;
    }
    return check_fsdp(&q, &(*out)->geometry);
}

/* Whether the parts are such as make up the tensor, and the device has what it takes. */
static nib_status check_parts(const nib_fsdp_parts *parts, const nib_tensor *t, int64_t rows, bool columnwise)
{
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    const struct nib_usage_geometry *g = &t->geometry.usage[NIB_ROWWISE];
    const nib_device *const device = nib_device_of(t->device);
    TRY(check_gathered("data", &parts->data, t, NIB_U8, rows, g->line_stride));
    if (facts->block) {
        TRY(check_gathered("scales", &parts->scales, t, facts->scale, rows, g->scale_shape[1]));
        TRY(NIB_DEVICE_HAS(device, repack_scales));
    }
    if (facts->tensor_scales)
        TRY(NIB_DEVICE_HAS(device, fill));
    return columnwise ? NIB_DEVICE_HAS(device, build_columnwise) : NIB_OK;
}

static bool overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes)
{
    const uintptr_t first = (uintptr_t)a, second = (uintptr_t)b;
    return first < second + (uintptr_t)b_bytes && second < first + (uintptr_t)a_bytes;
}

/* A framework may have gathered into the tensor's own buffers: scales that are overwritten before they are read are
 * copied aside. *aside is NULL where none are. */
static nib_status save_scales(const nib_fsdp_parts *parts, const nib_tensor *t, nib_buffer **aside)
{
    const struct nib_usage_geometry *g = &t->geometry.usage[NIB_ROWWISE];
    const struct nib_usage_memory memory = nib_tensor_memory(t, NIB_ROWWISE);
    const int64_t bytes = g->lines * g->scale_shape[1] * g->scale_bytes;
    *aside = NULL;
    if (!memory.scales || !bytes)
        return NIB_OK;
    const void *const scales = nib_array_first(&parts->scales);
    if (!overlap(scales, bytes, memory.scales, g->scales_bytes) && !overlap(scales, bytes, memory.codes, g->data_bytes))
        return NIB_OK;
    TRY(nib_buffer_create((size_t)bytes, t->device, aside));
    return nib_device_move(t->device, nib_buffer_data(*aside), t->device, scales, (size_t)bytes);
}

static nib_status write_parts(const nib_fsdp_parts *parts, const nib_buffer *aside, nib_tensor *t)
{
    nib_device *const device = nib_device_of(t->device);
    const struct nib_usage_geometry *g = &t->geometry.usage[NIB_ROWWISE];
    const struct nib_usage_memory memory = nib_tensor_memory(t, NIB_ROWWISE);
    if (g->data_bytes)
        TRY(device->ops->copy(device, memory.codes, nib_array_first(&parts->data), (size_t)g->data_bytes));
    if (memory.scales) { /* the padding of shards may hold anything */
        struct nib_usage_geometry gathered = *g;
        gathered.scale_shape[0] = g->lines;
        TRY(device->ops->zero(device, memory.scales, (size_t)g->scales_bytes));
        if (g->lines && g->blocks)
            TRY(device->ops->repack_scales(
                device, &gathered, aside ? nib_buffer_data(aside) : nib_array_first(&parts->scales), g, memory.scales));
    }
    if (memory.tensor_scales)
        TRY(device->ops->fill(device, memory.tensor_scales, 1, parts->tensor_scale));
    return NIB_OK;
}

static nib_status write_gathered(const nib_fsdp_parts *parts, nib_tensor *t)
{
    nib_buffer *aside;
    nib_status status = save_scales(parts, t, &aside);
    if (!status)
        status = write_parts(parts, aside, t);
    nib_buffer_release(aside);
    return status;
}

/* Memory for the usages, and then their bytes. What was not there before is dropped again on failure. */
static nib_status assign(const nib_fsdp_parts *parts, bool columnwise, nib_tensor *t)
{
    const bool had[2] = { nib_tensor_has(t, NIB_ROWWISE), nib_tensor_has(t, NIB_COLUMNWISE) },
               stale = t->columnwise_stale;
    TRY(nib_tensor_allocate(t, true, columnwise));
    nib_status status = write_gathered(parts, t);
    t->columnwise_stale = columnwise;
    if (!status)
        status = nib_tensor_update_usage(t, 1, columnwise);
    for (int usage = 0; usage < 2 && status; usage++)
        if (!had[usage])
            nib_tensor_drop(t, (nib_usage)usage);
    if (status)
        t->columnwise_stale = stale;
    return status;
}

nib_status nib_fsdp_assign(const nib_tensor *shard, const nib_fsdp_parts *parts, int64_t rows, nib_tensor **out)
{
    NIB_REQUIRE(shard);
    NIB_REQUIRE(parts);
    NIB_REQUIRE(out);
    nib_fsdp_parts known = { .bytes = sizeof known };
    TRY(nib_struct_read("parts", parts, &known, sizeof known, NIB_UP_TO(nib_fsdp_parts, tensor_scale)));
    nib_tensor *t = NULL;
    nib_status status = assign_target(shard, rows, *out, &t);
    const bool columnwise =
        shard->q.columnwise || nib_tensor_has(shard, NIB_COLUMNWISE) || (t && nib_tensor_has(t, NIB_COLUMNWISE));
    if (!status)
        status = check_parts(&known, t, rows, columnwise);
    if (!status)
        status = assign(&known, columnwise, t);
    if (status && t != *out)
        nib_tensor_destroy(t);
    if (!status)
        *out = t;
    return status;
}
