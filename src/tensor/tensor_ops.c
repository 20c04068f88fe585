/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor_ops.c - tensors from tensors: clone, move, copy, view, slice, compare, swizzle, rebind.
 */
#include "tensor/layout.h"
#include "tensor/tensor.h"

/* A tensor like t on a device, with t's buffers where `share`, otherwise with none. */
static nib_status like_on(const nib_tensor *t, int rank, const int64_t *shape, bool share, nib_device *device,
                          nib_tensor **out)
{
    nib_quantizer q = t->q; /* asked for what is there, whatever was asked for once */
    q.rowwise = nib_tensor_has(t, NIB_ROWWISE);
    q.columnwise = nib_tensor_has(t, NIB_COLUMNWISE);
    TRY(nib_tensor_new(&q, t->dtype, rank, shape, device, out));
    (*out)->q.rowwise = t->q.rowwise;
    (*out)->q.columnwise = t->q.columnwise;
    for (int i = 0; share && i < NIB_PART_COUNT; i++)
        (*out)->parts[i] = nib_buffer_retain(t->parts[i]);
    (*out)->columnwise_stale = t->columnwise_stale;
    return NIB_OK;
}

static nib_status like(const nib_tensor *t, int rank, const int64_t *shape, bool share, nib_tensor **out)
{
    return like_on(t, rank, shape, share, t->device, out);
}

static nib_status copy_parts(nib_tensor *dst, const nib_tensor *src)
{
    for (int i = 0; i < NIB_PART_COUNT; i++)
        if (nib_buffer_bytes(dst->parts[i]) && nib_buffer_data(dst->parts[i]) != nib_buffer_data(src->parts[i]))
            TRY(nib_device_move(dst->device, nib_buffer_data(dst->parts[i]), src->device,
                                nib_buffer_data(src->parts[i]), nib_buffer_bytes(dst->parts[i])));
    return NIB_OK;
}

/* ---- Clone, copy, move ---- */

nib_status nib_tensor_to(const nib_tensor *t, nib_device *device, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    nib_tensor *clone;
    TRY(like_on(t, t->rank, t->shape, false, device, &clone));
    nib_status status = nib_tensor_allocate(clone, nib_tensor_has(t, NIB_ROWWISE), nib_tensor_has(t, NIB_COLUMNWISE));
    if (!status)
        status = copy_parts(clone, t);
    if (status)
        nib_tensor_destroy(clone);
    else
        *out = clone;
    return status;
}

nib_status nib_tensor_clone(const nib_tensor *t, nib_tensor **out)
{
    NIB_REQUIRE(t);
    return nib_tensor_to(t, t->device, out);
}

nib_status nib_tensor_copy(nib_tensor *dst, const nib_tensor *src)
{
    NIB_REQUIRE(dst);
    NIB_REQUIRE(src);
    if (dst->geometry.rows != src->geometry.rows || dst->geometry.cols != src->geometry.cols)
        return nib_fail(NIB_ERR_MISMATCH, "a %lld x %lld tensor does not fit one of %lld x %lld",
                        (long long)src->geometry.rows, (long long)src->geometry.cols, (long long)dst->geometry.rows,
                        (long long)dst->geometry.cols);
    if (dst->rank != src->rank || memcmp(dst->shape, src->shape, (size_t)dst->rank * sizeof *dst->shape))
        return nib_fail(NIB_ERR_MISMATCH, "the tensors have different shapes");
    if (!nib_same_meaning(&dst->q, &src->q))
        return nib_fail(NIB_ERR_MISMATCH,
                        "the tensors differ in format, block shape, tensor scale, RHT, row scaling or swizzling");
    for (int usage = 0; usage < 2; usage++)
        if (nib_tensor_has(dst, (nib_usage)usage) && !nib_tensor_has(src, (nib_usage)usage))
            return nib_fail(NIB_ERR_USAGE, "the target's %s usage would go stale: the source has none",
                            nib_usage_name((nib_usage)usage));
    TRY(nib_check_same_device("the target", dst->device, "the source", src->device));
    TRY(copy_parts(dst, src));
    dst->columnwise_stale = src->columnwise_stale && nib_tensor_has(dst, NIB_COLUMNWISE);
    return NIB_OK;
}

/* ---- View and reshape ---- */

/* Replaces one -1 by what makes the elements fit. */
static nib_status resolve_shape(const nib_tensor *t, int rank, const int64_t *shape, int64_t *out)
{
    if (rank < 0 || rank > NIB_MAX_RANK)
        return nib_fail(NIB_ERR_SHAPE, "rank %d is not between 0 and %d", rank, NIB_MAX_RANK);
    if (rank > 0 && !shape)
        return nib_fail(NIB_ERR_ARG, "shape is NULL");
    const int64_t elements = t->geometry.rows * t->geometry.cols;
    int unknown = -1;
    for (int i = 0; i < rank; i++) {
        if (shape[i] == -1 && unknown >= 0)
            return nib_fail(NIB_ERR_SHAPE, "only one dim can be -1");
        if (shape[i] == -1)
            unknown = i;
        out[i] = shape[i] == -1 ? 1 : shape[i];
    }
    int64_t known;
    TRY(nib_check_shape("the new shape", rank, out, &known));
    if (unknown >= 0 && known > 0 && elements % known == 0)
        out[unknown] = elements / known;
    else if (known != elements || unknown >= 0)
        return nib_fail(NIB_ERR_SHAPE, "the new shape does not hold the tensor's %lld elements", (long long)elements);
    return NIB_OK;
}

/* Whether rows of another length can be cut from the same bytes. */
static nib_status check_new_length(const nib_tensor *t, int64_t cols)
{
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    const struct nib_usage_geometry *g = &t->geometry.usage[NIB_ROWWISE];
    const int64_t block = nib_max(facts->block, 1);
    if (t->geometry.cols % block || cols % block)
        return nib_fail(NIB_ERR_SHAPE, "the last dim can only change between multiples of %lld, not from %lld to %lld",
                        (long long)block, (long long)t->geometry.cols, (long long)cols);
    if (t->q.row_scaled || t->q.swizzled)
        return nib_fail(NIB_ERR_SHAPE, "the last dim cannot change with %s",
                        t->q.swizzled ? "swizzled scales" : "an amax per row");
    if (t->q.block_dims[0] > 1)
        return nib_fail(NIB_ERR_SHAPE, "the last dim cannot change with %dx%d blocks", (int)t->q.block_dims[0],
                        (int)t->q.block_dims[1]);
    if (facts->block && g->scale_block != 1)
        return nib_fail(NIB_ERR_SHAPE, "the last dim cannot change where scales lie block by block");
    if (nib_tensor_has(t, NIB_COLUMNWISE))
        return nib_fail(NIB_ERR_USAGE,
                        "the last dim cannot change while there is a columnwise usage: its lines run down columns");
    return NIB_OK;
}

/* A view whose scale padding differs becomes a tensor of its own: one that shared the codes and not the scales would be
 * spoiled by an update of either. */
static nib_status repack_into(const nib_tensor *t, nib_tensor *view)
{
    nib_buffer *own[NIB_PART_COUNT] = { NULL };
    nib_device *const device = nib_device_of(t->device);
    TRY(NIB_DEVICE_HAS(device, repack_scales));
    TRY(nib_buffer_create((size_t)view->geometry.usage[NIB_ROWWISE].scales_bytes, t->device, &own[NIB_ROW_SCALE]));
    TRY(nib_tensor_unshare(view, true, false, own));
    nib_tensor_place(view, own);
    return device->ops->repack_scales(device, &t->geometry.usage[NIB_ROWWISE], nib_buffer_data(t->parts[NIB_ROW_SCALE]),
                                      &view->geometry.usage[NIB_ROWWISE], nib_buffer_data(own[NIB_ROW_SCALE]));
}

/* Whether the buffers that a view shares are what its shape asks for; an empty tensor may otherwise change its rows at
 * will. */
static nib_status check_shared_parts(const nib_tensor *view)
{
    for (int i = 0; i < NIB_PART_COUNT; i++)
        if (view->parts[i] && nib_buffer_bytes(view->parts[i]) != nib_part_bytes(&view->geometry, (nib_part)i))
            return nib_fail(NIB_ERR_SHAPE, "the new shape does not go with the tensor's buffers");
    return NIB_OK;
}

static nib_status view_or_reshape(const nib_tensor *t, int rank, const int64_t *shape, bool may_copy, nib_tensor **out)
{
    int64_t resolved[NIB_MAX_RANK] = { 0 };
    nib_tensor *view;
    TRY(resolve_shape(t, rank, shape, resolved));
    TRY(like(t, rank, resolved, true, &view));
    nib_status status = NIB_OK;
    if (view->geometry.cols != t->geometry.cols) {
        const struct nib_usage_geometry *a = &t->geometry.usage[NIB_ROWWISE], *b = &view->geometry.usage[NIB_ROWWISE];
        const bool coincide =
            a->scales_bytes == b->scales_bytes && a->scale_line == a->blocks && b->scale_line == b->blocks;
        status = check_new_length(t, view->geometry.cols);
        if (!status && !coincide && !may_copy && view->parts[NIB_ROW_SCALE])
            status = nib_fail(NIB_ERR_SHAPE, "the scales of the new shape are padded differently and cannot be shared");
        if (!status && !coincide && view->parts[NIB_ROW_SCALE])
            status = repack_into(t, view);
    }
    if (!status)
        status = check_shared_parts(view);
    if (status)
        nib_tensor_destroy(view);
    else
        *out = view;
    return status;
}

nib_status nib_tensor_view(const nib_tensor *t, int rank, const int64_t *shape, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    return view_or_reshape(t, rank, shape, false, out);
}

nib_status nib_tensor_reshape(const nib_tensor *t, int rank, const int64_t *shape, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    return view_or_reshape(t, rank, shape, true, out);
}

/* ---- Slice and split ---- */

/* One usage of the rows from `first` on: some lines of the rowwise one, a part of every line of the columnwise one. */
static nib_status copy_rows(const nib_tensor *t, nib_tensor *slice, nib_usage usage, int64_t first)
{
    nib_device *const device = nib_device_of(t->device);
    const bool rowwise = usage == NIB_ROWWISE;
    const struct nib_usage_memory source = nib_tensor_memory(t, usage), target = nib_tensor_memory(slice, usage);
    return device->ops->copy_rectangle(device, &t->q, &t->geometry.usage[usage], &source, rowwise ? first : 0,
                                       rowwise ? 0 : first, &slice->geometry.usage[usage], &target);
}

nib_status nib_tensor_slice(const nib_tensor *t, int64_t first, int64_t count, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    const int64_t rows = t->geometry.rows, block = nib_max(nib_format_of(&t->q)->block, 1);
    if (first < 0 || count < 0 || first > rows || count > rows - first)
        return nib_fail(NIB_ERR_SHAPE, "%lld rows from row %lld on, of %lld", (long long)count, (long long)first,
                        (long long)rows);
    const bool bordered = t->q.block_dims[0] > 1 || nib_tensor_has(t, NIB_COLUMNWISE);
    if (bordered && count && (first % block || (count % block && first + count != rows)))
        return nib_fail(NIB_ERR_SHAPE, "rows %lld to %lld are not at block borders, which are multiples of %lld",
                        (long long)first, (long long)(first + count), (long long)block);
    TRY(NIB_DEVICE_HAS(nib_device_of(t->device), copy_rectangle));
    nib_tensor *slice;
    TRY(like(t, 2, (const int64_t[2]){ count, t->geometry.cols }, false, &slice));
    /* Stochastic rounding goes on with the random numbers of its place in the whole: a border, also where an empty slice
     * is at none. */
    nib_status status = nib_add(slice->q.origin[0], bordered ? first / block * block : first, &slice->q.origin[0])
                            ? NIB_OK
                            : nib_fail(NIB_ERR_SHAPE, "the slice's origin is beyond any matrix");
    if (!status)
        status = nib_tensor_allocate(slice, nib_tensor_has(t, NIB_ROWWISE), nib_tensor_has(t, NIB_COLUMNWISE));
    for (int usage = 0; usage < 2 && !status; usage++)
        if (nib_tensor_has(t, (nib_usage)usage))
            status = copy_rows(t, slice, (nib_usage)usage, first);
    if (status)
        nib_tensor_destroy(slice);
    else
        *out = slice;
    return status;
}

nib_status nib_tensor_split(const nib_tensor *t, const int64_t *counts, size_t n, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(counts);
    NIB_REQUIRE(out);
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        if (counts[i] < 0 || !nib_add(sum, counts[i], &sum))
            return nib_fail(NIB_ERR_SHAPE, "the row count of slice %zu is %lld", i, (long long)counts[i]);
    if (sum != t->geometry.rows)
        return nib_fail(NIB_ERR_SHAPE, "the slices have %lld rows and the tensor %lld", (long long)sum,
                        (long long)t->geometry.rows);
    nib_tensor **slices = nib_alloc_zeroed(n * sizeof *slices);
    if (!slices)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %zu slices", n);
    nib_status status = NIB_OK;
    int64_t first = 0;
    for (size_t i = 0; i < n && !status; first += counts[i++])
        status = nib_tensor_slice(t, first, counts[i], &slices[i]);
    for (size_t i = 0; i < n; i++) {
        if (status)
            nib_tensor_destroy(slices[i]);
        else
            out[i] = slices[i];
    }
    nib_free(slices);
    return status;
}

/* ---- Equality ---- */

nib_status nib_tensor_equal(const nib_tensor *a, const nib_tensor *b, int *equal)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(equal);
    TRY(nib_check_same_device("one tensor", a->device, "the other", b->device));
    nib_device *const device = nib_device_of(a->device);
    TRY(NIB_DEVICE_HAS(device, equal));
    bool same = a->dtype == b->dtype && a->columnwise_stale == b->columnwise_stale && a->rank == b->rank &&
                nib_same_meaning(&a->q, &b->q) && memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
    for (int usage = 0; usage < 2 && same; usage++) {
        same = nib_tensor_has(a, (nib_usage)usage) == nib_tensor_has(b, (nib_usage)usage);
        if (!same || !nib_tensor_has(a, (nib_usage)usage))
            continue;
        const struct nib_usage_memory of_a = nib_tensor_memory(a, (nib_usage)usage),
                                      of_b = nib_tensor_memory(b, (nib_usage)usage);
        TRY(device->ops->equal(device, &a->geometry.usage[usage], &of_a, &of_b, &same));
    }
    *equal = same;
    return NIB_OK;
}

/* ---- Swizzle ---- */

/* The scales of both usages in the other layout, in buffers of their own; NULL for those that are not there. */
static nib_status swizzle_scales(const nib_tensor *t, const struct nib_geometry *after, nib_buffer *own[NIB_PART_COUNT])
{
    nib_device *const device = nib_device_of(t->device);
    for (int usage = 0; usage < 2; usage++) {
        const nib_buffer *old = nib_tensor_kind(t, (nib_usage)usage, 1);
        const struct nib_usage_geometry *to = &after->usage[usage];
        nib_buffer **const fresh = &own[nib_part_of(nib_format_of(&t->q), (nib_usage)usage, 1)];
        if (!old)
            continue;
        TRY(nib_buffer_create((size_t)to->scales_bytes, t->device, fresh));
        if (to->swizzled)
            TRY(device->ops->swizzle(device, &t->geometry.usage[usage], nib_buffer_data(old), nib_buffer_data(*fresh)));
        else
            TRY(device->ops->unswizzle(device, to, nib_buffer_data(old), nib_buffer_data(*fresh)));
    }
    return NIB_OK;
}

static nib_status set_swizzled(nib_tensor *t, bool swizzled)
{
    if (t->q.swizzled == swizzled)
        return NIB_OK;
    if (!nib_format_of(&t->q)->swizzles)
        return nib_fail(NIB_ERR_UNSUPPORTED, "no GEMM takes the scales of %s swizzled", nib_format_of(&t->q)->name);
    nib_device *const device = nib_device_of(t->device);
    TRY(swizzled ? NIB_DEVICE_HAS(device, swizzle) : NIB_DEVICE_HAS(device, unswizzle));
    nib_buffer *own[NIB_PART_COUNT] = { NULL };
    struct nib_geometry after = t->geometry;
    after.usage[NIB_ROWWISE].swizzled = after.usage[NIB_COLUMNWISE].swizzled = swizzled;
    const nib_status status = swizzle_scales(t, &after, own);
    for (int part = 0; part < NIB_PART_COUNT && status; part++)
        nib_buffer_release(own[part]);
    TRY(status);
    TRY(nib_tensor_unshare(t, true, true, own));
    nib_tensor_place(t, own);
    t->geometry = after;
    t->q.swizzled = swizzled;
    return NIB_OK;
}

nib_status nib_tensor_swizzle(nib_tensor *t)
{
    NIB_REQUIRE(t);
    return set_swizzled(t, true);
}

nib_status nib_tensor_unswizzle(nib_tensor *t)
{
    NIB_REQUIRE(t);
    return set_swizzled(t, false);
}

/* ---- Another home for the rowwise codes ---- */

nib_status nib_tensor_rebind_rowwise(nib_tensor *t, nib_buffer *buffer)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(buffer);
    const nib_buffer *old = t->parts[NIB_ROW_DATA];
    if (!old)
        return nib_fail(NIB_ERR_USAGE, "the tensor has no rowwise usage");
    if (nib_buffer_bytes(buffer) != nib_buffer_bytes(old))
        return nib_fail(NIB_ERR_SHAPE, "the new buffer has %zu bytes and the rowwise codes take %zu",
                        nib_buffer_bytes(buffer), nib_buffer_bytes(old));
    TRY(nib_check_same_device("the buffer", nib_buffer_device(buffer), "the tensor", t->device));
    if (buffer == old)
        return NIB_OK;
    nib_buffer *own[NIB_PART_COUNT] = { [NIB_ROW_DATA] = nib_buffer_retain(buffer) };
    TRY(nib_tensor_unshare(t, true, nib_format_of(&t->q)->shared_tensor_scale, own));
    const nib_status status =
        nib_device_move(t->device, nib_buffer_data(buffer), t->device, nib_buffer_data(old), nib_buffer_bytes(old));
    for (int part = 0; part < NIB_PART_COUNT && status; part++)
        nib_buffer_release(own[part]);
    TRY(status);
    nib_tensor_place(t, own);
    return NIB_OK;
}
