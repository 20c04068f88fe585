/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor_ops.c - tensors from tensors: clone, copy, view, slice, compare, swizzle, save.
 */
#include "tensor/layout.h"
#include "tensor/tensor.h"

/* A tensor like t, with t's buffers where `share`, otherwise with none. */
static nib_status like(const nib_tensor *t, int rank, const int64_t *shape, bool share, nib_tensor **out)
{
    nib_quantizer q = t->q; /* asked for what is there, whatever was asked for once */
    q.rowwise = nib_tensor_has(t, NIB_ROWWISE);
    q.columnwise = nib_tensor_has(t, NIB_COLUMNWISE);
    TRY(nib_tensor_new(&q, t->dtype, rank, shape, out));
    (*out)->q.rowwise = t->q.rowwise;
    (*out)->q.columnwise = t->q.columnwise;
    for (int i = 0; share && i < NIB_PART_COUNT; i++)
        (*out)->parts[i] = nib_buffer_retain(t->parts[i]);
    (*out)->columnwise_stale = t->columnwise_stale;
    return NIB_OK;
}

static void copy_parts(nib_tensor *dst, const nib_tensor *src)
{
    for (int i = 0; i < NIB_PART_COUNT; i++)
        if (nib_buffer_bytes(dst->parts[i]) && nib_buffer_data(dst->parts[i]) != nib_buffer_data(src->parts[i]))
            memmove(nib_buffer_data(dst->parts[i]), nib_buffer_data(src->parts[i]), nib_buffer_bytes(dst->parts[i]));
}

/* ---- Clone and copy ---- */

nib_status nib_tensor_clone(const nib_tensor *t, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    nib_tensor *clone;
    TRY(like(t, t->rank, t->shape, false, &clone));
    const nib_status status =
        nib_tensor_allocate(clone, nib_tensor_has(t, NIB_ROWWISE), nib_tensor_has(t, NIB_COLUMNWISE));
    if (status) {
        nib_tensor_destroy(clone);
        return status;
    }
    copy_parts(clone, t);
    *out = clone;
    return NIB_OK;
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
    copy_parts(dst, src);
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

/* The scales of `from`, row-major, into rows of another padded length. */
static void repack_scales(const nib_tensor *from, nib_tensor *to)
{
    const struct nib_usage_geometry *a = &from->geometry.usage[NIB_ROWWISE], *b = &to->geometry.usage[NIB_ROWWISE];
    const void *src = nib_buffer_data(from->parts[NIB_ROW_SCALE]);
    void *dst = nib_buffer_data(to->parts[NIB_ROW_SCALE]);
    for (int64_t i = 0; i < a->lines * a->blocks; i++)
        nib_scale_store(b, dst, i / b->blocks, i % b->blocks, nib_scale_load(a, src, i / a->blocks, i % a->blocks));
}

/* A view whose scale padding differs becomes a tensor of its own: one that shared the codes and not the scales would be
 * spoiled by an update of either. */
static nib_status repack_into(const nib_tensor *t, nib_tensor *view)
{
    nib_buffer *fresh = NULL;
    TRY(nib_tensor_unshare(view, NIB_ROWWISE));
    TRY(nib_buffer_create((size_t)view->geometry.usage[NIB_ROWWISE].scales_bytes, &fresh));
    nib_buffer_release(view->parts[NIB_ROW_SCALE]);
    view->parts[NIB_ROW_SCALE] = fresh;
    repack_scales(t, view);
    return NIB_OK;
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

/* A rectangle of one usage: lines from `line`, elements from `first` (a block's first), as many as dst has. */
static void copy_rectangle(const nib_tensor *src, nib_tensor *dst, nib_usage usage, int64_t line, int64_t first)
{
    const struct nib_usage_geometry *a = &src->geometry.usage[usage], *b = &dst->geometry.usage[usage];
    const struct nib_usage_memory from = nib_tensor_memory(src, usage), to = nib_tensor_memory(dst, usage);
    const int64_t block = nib_max(nib_format_of(&src->q)->block, 1);
    for (int64_t l = 0; l < b->lines; l++) {
        for (int64_t i = 0; i < b->length; i++)
            nib_code_store(b, to.codes, l, i, nib_code_load(a, from.codes, line + l, first + i));
        for (int64_t i = 0; i < b->blocks; i++)
            nib_scale_store(b, to.scales, l, i, nib_scale_load(a, from.scales, line + l, first / block + i));
    }
    if (b->tensor_scales_bytes)
        memcpy(to.tensor_scales, from.tensor_scales + (src->q.row_scaled ? line : 0), (size_t)b->tensor_scales_bytes);
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
    if (bordered && (first % block || ((first + count) % block && first + count != rows)))
        return nib_fail(NIB_ERR_SHAPE, "rows %lld to %lld are not at block borders, which are multiples of %lld",
                        (long long)first, (long long)(first + count), (long long)block);
    nib_tensor *slice;
    TRY(like(t, 2, (const int64_t[2]){ count, t->geometry.cols }, false, &slice));
    /* Stochastic rounding goes on with the numbers of its place in the whole. */
    nib_status status = nib_add(slice->q.origin[0], first, &slice->q.origin[0])
                            ? NIB_OK
                            : nib_fail(NIB_ERR_SHAPE, "the slice's origin is beyond any matrix");
    if (!status)
        status = nib_tensor_allocate(slice, nib_tensor_has(t, NIB_ROWWISE), nib_tensor_has(t, NIB_COLUMNWISE));
    if (status) {
        nib_tensor_destroy(slice);
        return status;
    }
    if (nib_tensor_has(t, NIB_ROWWISE))
        copy_rectangle(t, slice, NIB_ROWWISE, first, 0);
    if (nib_tensor_has(t, NIB_COLUMNWISE))
        copy_rectangle(t, slice, NIB_COLUMNWISE, 0, first);
    *out = slice;
    return NIB_OK;
}

nib_status nib_tensor_split(const nib_tensor *t, const int64_t *counts, size_t n, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(counts);
    NIB_REQUIRE(out);
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        if (counts[i] < 0 || !nib_add(sum, counts[i], &sum))
            return nib_fail(NIB_ERR_SHAPE, "the row count of piece %zu is %lld", i, (long long)counts[i]);
    if (sum != t->geometry.rows)
        return nib_fail(NIB_ERR_SHAPE, "the pieces have %lld rows and the tensor %lld", (long long)sum,
                        (long long)t->geometry.rows);
    nib_tensor **pieces = nib_alloc_zeroed(n * sizeof *pieces);
    if (!pieces)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %zu pieces", n);
    nib_status status = NIB_OK;
    int64_t first = 0;
    for (size_t i = 0; i < n && !status; first += counts[i++])
        status = nib_tensor_slice(t, first, counts[i], &pieces[i]);
    for (size_t i = 0; i < n; i++) {
        if (status)
            nib_tensor_destroy(pieces[i]);
        else
            out[i] = pieces[i];
    }
    nib_free(pieces);
    return status;
}

/* ---- Equality ---- */

static bool usages_equal(const nib_tensor *a, const nib_tensor *b, nib_usage usage)
{
    const struct nib_usage_geometry *g = &a->geometry.usage[usage];
    const struct nib_usage_memory ma = nib_tensor_memory(a, usage), mb = nib_tensor_memory(b, usage);
    if ((g->data_bytes && memcmp(ma.codes, mb.codes, (size_t)g->data_bytes)) ||
        (g->tensor_scales_bytes && memcmp(ma.tensor_scales, mb.tensor_scales, (size_t)g->tensor_scales_bytes)))
        return false;
    for (int64_t line = 0; line < g->lines; line += g->lines_per_scale)
        for (int64_t block = 0; block < g->blocks; block++)
            if (nib_scale_load(g, ma.scales, line, block) != nib_scale_load(g, mb.scales, line, block))
                return false;
    return true;
}

nib_status nib_tensor_equal(const nib_tensor *a, const nib_tensor *b, int *equal)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(equal);
    bool same = a->dtype == b->dtype && a->columnwise_stale == b->columnwise_stale && a->rank == b->rank &&
                nib_same_meaning(&a->q, &b->q) && memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
    for (int usage = 0; usage < 2 && same; usage++)
        same = nib_tensor_has(a, (nib_usage)usage) == nib_tensor_has(b, (nib_usage)usage) &&
               (!nib_tensor_has(a, (nib_usage)usage) || usages_equal(a, b, (nib_usage)usage));
    *equal = same;
    return NIB_OK;
}

/* ---- Swizzle ---- */

/* A [rows, cols] matrix of single bytes whose rows are `stride` apart. */
static nib_status plain_scales(int64_t rows, int64_t cols, int64_t stride, struct nib_usage_geometry *out)
{
    int64_t bytes;
    if (rows < 0 || cols < 0 || stride < cols)
        return nib_fail(NIB_ERR_SHAPE, "scales of %lld x %lld with rows %lld bytes apart", (long long)rows,
                        (long long)cols, (long long)stride);
    if (rows > INT64_MAX / 2 || stride > INT64_MAX / 2 ||
        !nib_mul(nib_round_up(rows, 128), nib_round_up(stride, 4), &bytes))
        return nib_fail(NIB_ERR_SHAPE, "scales of %lld x %lld take too many bytes", (long long)rows, (long long)cols);
    *out = (struct nib_usage_geometry){
        .lines = rows, .blocks = cols, .scale_bytes = 1, .lines_per_scale = 1, .scale_line = stride, .scale_block = 1
    };
    return NIB_OK;
}

static const nib_quantizer default_threads;

nib_status nib_swizzle_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t stride, uint8_t *out)
{
    NIB_REQUIRE(scales);
    NIB_REQUIRE(out);
    struct nib_usage_geometry plain;
    TRY(plain_scales(rows, cols, stride, &plain));
    nib_swizzle(&default_threads, &plain, scales, out);
    return NIB_OK;
}

nib_status nib_unswizzle_scales(const uint8_t *tiles, int64_t rows, int64_t cols, int64_t stride, uint8_t *out)
{
    NIB_REQUIRE(tiles);
    NIB_REQUIRE(out);
    struct nib_usage_geometry plain;
    TRY(plain_scales(rows, cols, stride, &plain));
    memset(out, 0, (size_t)(rows * stride));
    nib_unswizzle(&default_threads, &plain, tiles, out);
    return NIB_OK;
}

static nib_status set_swizzled(nib_tensor *t, bool swizzled)
{
    if (t->q.swizzled == swizzled)
        return NIB_OK;
    if (!nib_format_of(&t->q)->swizzles)
        return nib_fail(NIB_ERR_UNSUPPORTED, "no GEMM takes the scales of %s swizzled", nib_format_of(&t->q)->name);
    for (int usage = 0; usage < 2; usage++)
        TRY(nib_tensor_unshare(t, (nib_usage)usage));
    nib_buffer *fresh[2] = { NULL, NULL };
    struct nib_geometry after = t->geometry;
    for (int usage = 0; usage < 2; usage++) {
        after.usage[usage].swizzled = swizzled;
        const nib_buffer *old = nib_tensor_kind(t, (nib_usage)usage, 1);
        if (!old)
            continue;
        const nib_status status = nib_buffer_create((size_t)after.usage[usage].scales_bytes, &fresh[usage]);
        if (status) {
            nib_buffer_release(fresh[0]);
            return status;
        }
        if (swizzled)
            nib_swizzle(&t->q, &t->geometry.usage[usage], nib_buffer_data(old), nib_buffer_data(fresh[usage]));
        else
            nib_unswizzle(&t->q, &after.usage[usage], nib_buffer_data(old), nib_buffer_data(fresh[usage]));
    }
    for (int usage = 0; usage < 2; usage++)
        if (fresh[usage]) {
            const nib_part part = nib_part_of(nib_format_of(&t->q), (nib_usage)usage, 1);
            nib_buffer_release(t->parts[part]);
            t->parts[part] = fresh[usage];
        }
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
    nib_buffer *old = t->parts[NIB_ROW_DATA];
    if (!old)
        return nib_fail(NIB_ERR_USAGE, "the tensor has no rowwise usage");
    if (nib_buffer_bytes(buffer) != nib_buffer_bytes(old))
        return nib_fail(NIB_ERR_SHAPE, "the new buffer has %zu bytes and the rowwise codes take %zu",
                        nib_buffer_bytes(buffer), nib_buffer_bytes(old));
    if (buffer == old)
        return NIB_OK;
    TRY(nib_tensor_unshare(t, NIB_ROWWISE));
    if (nib_format_of(&t->q)->shared_tensor_scale)
        TRY(nib_tensor_unshare(t, NIB_COLUMNWISE));
    old = t->parts[NIB_ROW_DATA];
    if (nib_buffer_bytes(old))
        memmove(nib_buffer_data(buffer), nib_buffer_data(old), nib_buffer_bytes(old));
    t->parts[NIB_ROW_DATA] = nib_buffer_retain(buffer);
    nib_buffer_release(old);
    return NIB_OK;
}

/* ---- Save and restore ---- */

nib_status nib_tensor_prepare_for_saving(nib_tensor *t, nib_buffer **out, size_t *n)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    NIB_REQUIRE(n);
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    for (int i = 0; i < facts->saved_count; i++) {
        out[i] = t->parts[facts->saved[i]];
        t->parts[facts->saved[i]] = NULL;
    }
    *n = (size_t)facts->saved_count;
    return NIB_OK;
}

/* Whether what was saved can go back in, checked as from_buffers checks it. */
static nib_status check_saved(const nib_tensor *t, nib_buffer *const *saved)
{
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_tensor *trial;
    if (nib_tensor_has(t, NIB_ROWWISE) || nib_tensor_has(t, NIB_COLUMNWISE))
        return nib_fail(NIB_ERR_USAGE,
                        "the tensor still has data: only one that was prepared for saving or cleared is restored");
    for (int i = 0; i < facts->saved_count; i++)
        parts[facts->saved[i]] = saved[i];
    TRY(nib_tensor_from_buffers(&t->q, t->dtype, t->rank, t->shape, parts, &trial));
    nib_tensor_destroy(trial);
    return NIB_OK;
}

static void place_saved(nib_tensor *t, nib_buffer *const *saved)
{
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    for (int i = 0; i < facts->saved_count; i++)
        t->parts[facts->saved[i]] = saved[i];
}

nib_status nib_tensor_restore_from_saved(nib_tensor *t, nib_buffer *const *saved, size_t n, size_t *used)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(saved);
    const size_t wanted = (size_t)nib_format_of(&t->q)->saved_count;
    if (n < wanted)
        return nib_fail(NIB_ERR_ARG, "a tensor is restored from %zu buffers, and %zu are left", wanted, n);
    TRY(check_saved(t, saved));
    place_saved(t, saved);
    if (used)
        *used = wanted;
    return NIB_OK;
}

/* How many entries one item takes. */
static size_t item_entries(const nib_item *item)
{
    return item->tensor ? (size_t)nib_format_of(&item->tensor->q)->saved_count : 1;
}

nib_status nib_saved_count(const nib_item *items, size_t n, size_t *count)
{
    NIB_REQUIRE(items);
    NIB_REQUIRE(count);
    size_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += item_entries(&items[i]);
    *count = sum;
    return NIB_OK;
}

/* A tensor gives its buffers away once. */
static nib_status check_distinct(const nib_item *items, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            if (items[i].tensor && items[i].tensor == items[j].tensor)
                return nib_fail(NIB_ERR_ARG, "items %zu and %zu are the same tensor", j, i);
    return NIB_OK;
}

nib_status nib_prepare_for_saving(nib_item *items, size_t n, nib_saved *saved, size_t capacity, size_t *count)
{
    NIB_REQUIRE(saved);
    NIB_REQUIRE(count);
    size_t needed = 0;
    TRY(nib_saved_count(items, n, &needed));
    if (needed > capacity)
        return nib_fail(NIB_ERR_ARG, "the items take %zu entries and there is room for %zu", needed, capacity);
    TRY(check_distinct(items, n));
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (!items[i].tensor) {
            saved[at++] = (nib_saved){ .array = items[i].array };
            items[i].array = (nib_array){ 0 };
            continue;
        }
        nib_buffer *parts[NIB_PART_COUNT];
        size_t taken = 0;
        TRY(nib_tensor_prepare_for_saving(items[i].tensor, parts, &taken));
        for (size_t part = 0; part < taken; part++)
            saved[at++] = (nib_saved){ .buffer = parts[part] };
    }
    *count = at;
    return NIB_OK;
}

nib_status nib_restore_from_saved(nib_item *items, size_t n, const nib_saved *saved, size_t count, size_t *used)
{
    NIB_REQUIRE(saved);
    size_t needed = 0;
    TRY(nib_saved_count(items, n, &needed));
    TRY(check_distinct(items, n));
    if (needed > count)
        return nib_fail(NIB_ERR_ARG, "the items take %zu entries and %zu were saved", needed, count);
    /* All is checked before anything moves: first pass looks, second pass acts. */
    for (int pass = 0; pass < 2; pass++) {
        size_t at = 0;
        for (size_t i = 0; i < n; at += item_entries(&items[i++])) {
            for (size_t k = 0; k < item_entries(&items[i]); k++)
                if (items[i].tensor ? saved[at + k].array.data != NULL : saved[at + k].buffer != NULL)
                    return nib_fail(NIB_ERR_ARG, "saved entry %zu is %s, and item %zu is not", at + k,
                                    items[i].tensor ? "a plain array" : "a part of a tensor", i);
            if (!items[i].tensor) {
                if (pass)
                    items[i].array = saved[at].array;
                continue;
            }
            nib_buffer *buffers[NIB_PART_COUNT] = { NULL };
            for (size_t k = 0; k < item_entries(&items[i]); k++)
                buffers[k] = saved[at + k].buffer;
            if (pass)
                place_saved(items[i].tensor, buffers);
            else
                TRY(check_saved(items[i].tensor, buffers));
        }
    }
    if (used)
        *used = needed;
    return NIB_OK;
}
