/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor_ops.c - tensors from tensors: clone, copy, view, slice, compare, swizzle, save.
 */
#include "tensor.h"

/* A tensor like t, with t's buffers where `share`, otherwise with none. */
static nib_status like(const nib_tensor *t, int rank, const int64_t *shape, bool share, nib_tensor **out)
{
    TRY(nib_tensor_new(&t->q, t->dtype, rank, shape, out));
    for (int i = 0; share && i < NIB_PART_COUNT; i++)
        (*out)->parts[i] = nib_buffer_retain(t->parts[i]);
    return NIB_OK;
}

static void copy_parts(nib_tensor *dst, const nib_tensor *src)
{
    for (int i = 0; i < NIB_PART_COUNT; i++)
        if (dst->parts[i] && nib_buffer_data(dst->parts[i]) != nib_buffer_data(src->parts[i]))
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
    if (!nib_same_meaning(&dst->q, &src->q))
        return nib_fail(NIB_ERR_MISMATCH,
                        "the tensors differ in format, block shape, level, RHT, row scaling or swizzling");
    for (int copy = 0; copy < 2; copy++)
        if (nib_tensor_has(dst, (nib_copy)copy) && !nib_tensor_has(src, (nib_copy)copy))
            return nib_fail(NIB_ERR_USAGE, "the target's %s copy would go stale: the source has none",
                            nib_copy_name((nib_copy)copy));
    copy_parts(dst, src);
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
    const int64_t block = nib_formats[t->q.format].block;
    if (t->geometry.cols % block || cols % block)
        return nib_fail(NIB_ERR_SHAPE, "the last dim can only change between multiples of %lld, not from %lld to %lld",
                        (long long)block, (long long)t->geometry.cols, (long long)cols);
    if (t->q.block_dims[0] != 1 || t->q.row_scaled || t->q.swizzled)
        return nib_fail(NIB_ERR_SHAPE, "the last dim cannot change with %s",
                        t->q.swizzled     ? "swizzled scales"
                        : t->q.row_scaled ? "an amax per row"
                                          : "16x16 blocks");
    if (nib_tensor_has(t, NIB_COLUMNWISE))
        return nib_fail(NIB_ERR_USAGE,
                        "the last dim cannot change while there is a columnwise copy: its blocks run down columns");
    return NIB_OK;
}

/* The scales of `from`, row-major, into rows of another padded length. */
static void repack_scales(const nib_tensor *from, nib_tensor *to)
{
    const struct nib_copy_geometry *a = &from->geometry.copy[NIB_ROWWISE], *b = &to->geometry.copy[NIB_ROWWISE];
    const uint8_t *src = nib_buffer_data(from->parts[NIB_ROW_SCALE]);
    uint8_t *dst = nib_buffer_data(to->parts[NIB_ROW_SCALE]);
    for (int64_t i = 0; i < a->lines * a->blocks; i++)
        dst[i / b->blocks * b->scale_stride + i % b->blocks] = src[i / a->blocks * a->scale_stride + i % a->blocks];
}

static nib_status view_or_reshape(const nib_tensor *t, int rank, const int64_t *shape, bool may_copy, nib_tensor **out)
{
    int64_t resolved[NIB_MAX_RANK] = { 0 };
    nib_tensor *view;
    TRY(resolve_shape(t, rank, shape, resolved));
    TRY(like(t, rank, resolved, true, &view));
    nib_status status = NIB_OK;
    if (view->geometry.cols != t->geometry.cols && nib_tensor_has(t, NIB_ROWWISE)) {
        const struct nib_copy_geometry *a = &t->geometry.copy[NIB_ROWWISE], *b = &view->geometry.copy[NIB_ROWWISE];
        const bool coincide =
            a->scale_bytes == b->scale_bytes && a->scale_stride == a->blocks && b->scale_stride == b->blocks;
        status = check_new_length(t, view->geometry.cols);
        if (!status && !coincide && !may_copy)
            status = nib_fail(NIB_ERR_SHAPE, "the scales of the new shape are padded differently and cannot be shared");
        if (!status && !coincide) {
            nib_buffer_release(view->parts[NIB_ROW_SCALE]);
            view->parts[NIB_ROW_SCALE] = NULL;
            status = nib_buffer_create((size_t)b->scale_bytes, &view->parts[NIB_ROW_SCALE]);
            if (!status)
                repack_scales(t, view);
        }
    } else if (view->geometry.cols != t->geometry.cols) {
        status = check_new_length(t, view->geometry.cols);
    }
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

/* A rectangle of one copy: lines from `line`, elements from `first` (even, and a block's first), as many as dst has. */
static void copy_rectangle(const nib_tensor *src, nib_tensor *dst, nib_copy copy, int64_t line, int64_t first)
{
    const struct nib_copy_geometry *a = &src->geometry.copy[copy], *b = &dst->geometry.copy[copy];
    const struct nib_copy_memory from = nib_tensor_memory(src, copy), to = nib_tensor_memory(dst, copy);
    const int64_t block = nib_formats[src->q.format].block;
    for (int64_t l = 0; l < b->lines; l++) {
        memcpy(to.codes + l * b->code_stride, from.codes + (line + l) * a->code_stride + first / 2,
               (size_t)b->code_stride);
        for (int64_t i = 0; i < b->blocks; i++)
            to.scales[nib_scale_offset(l, i, b->scale_stride, dst->q.swizzled)] =
                from.scales[nib_scale_offset(line + l, first / block + i, a->scale_stride, src->q.swizzled)];
    }
    memcpy(to.levels, from.levels + (src->q.row_scaled ? line : 0), (size_t)b->level_bytes);
}

nib_status nib_tensor_slice(const nib_tensor *t, int64_t first, int64_t count, nib_tensor **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    const int64_t rows = t->geometry.rows, block = nib_formats[t->q.format].block;
    if (first < 0 || count < 0 || first > rows || count > rows - first)
        return nib_fail(NIB_ERR_SHAPE, "rows %lld to %lld of %lld", (long long)first, (long long)(first + count),
                        (long long)rows);
    const bool bordered = t->q.block_dims[0] != 1 || nib_tensor_has(t, NIB_COLUMNWISE);
    if (bordered && (first % block || ((first + count) % block && first + count != rows)))
        return nib_fail(NIB_ERR_SHAPE, "rows %lld to %lld are not at block borders, which are multiples of %lld",
                        (long long)first, (long long)(first + count), (long long)block);
    nib_tensor *slice;
    TRY(like(t, 2, (const int64_t[2]){ count, t->geometry.cols }, false, &slice));
    slice->q.origin[0] += first; /* so that stochastic rounding goes on with the numbers of its place in the whole */
    const nib_status status =
        nib_tensor_allocate(slice, nib_tensor_has(t, NIB_ROWWISE), nib_tensor_has(t, NIB_COLUMNWISE));
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

static bool copies_equal(const nib_tensor *a, const nib_tensor *b, nib_copy copy)
{
    const struct nib_copy_geometry *g = &a->geometry.copy[copy];
    const struct nib_copy_memory ma = nib_tensor_memory(a, copy), mb = nib_tensor_memory(b, copy);
    if (memcmp(ma.codes, mb.codes, (size_t)g->code_bytes) || memcmp(ma.levels, mb.levels, (size_t)g->level_bytes))
        return false;
    for (int64_t line = 0; line < g->lines; line++)
        for (int64_t block = 0; block < g->blocks; block++) {
            const int64_t at = nib_scale_offset(line, block, g->scale_stride, a->q.swizzled);
            if (ma.scales[at] != mb.scales[at])
                return false;
        }
    return true;
}

nib_status nib_tensor_equal(const nib_tensor *a, const nib_tensor *b, int *equal)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(equal);
    bool same = a->dtype == b->dtype && a->rank == b->rank && nib_same_meaning(&a->q, &b->q) &&
                memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
    for (int copy = 0; copy < 2 && same; copy++)
        same = nib_tensor_has(a, (nib_copy)copy) == nib_tensor_has(b, (nib_copy)copy) &&
               (!nib_tensor_has(a, (nib_copy)copy) || copies_equal(a, b, (nib_copy)copy));
    *equal = same;
    return NIB_OK;
}

/* ---- Swizzle ---- */

/* Scales of a [rows, cols] matrix between the two layouts. The row-major side has `stride` bytes a row; the tiled side is padded to
 * (128, 4), with zeros. */
static nib_status reorder_scales(const uint8_t *in, int64_t rows, int64_t cols, int64_t stride, uint8_t *out,
                                 bool to_tiles)
{
    NIB_REQUIRE(in);
    NIB_REQUIRE(out);
    int64_t bytes;
    if (rows < 0 || cols < 0 || stride < cols)
        return nib_fail(NIB_ERR_SHAPE, "scales of %lld x %lld with rows %lld bytes apart", (long long)rows,
                        (long long)cols, (long long)stride);
    if (rows > INT64_MAX / 2 || cols > INT64_MAX / 2 ||
        !nib_mul(nib_round_up(rows, 128), nib_max(nib_round_up(cols, 4), stride), &bytes))
        return nib_fail(NIB_ERR_SHAPE, "scales of %lld x %lld take too many bytes", (long long)rows, (long long)cols);
    const int64_t tiled = nib_round_up(cols, 4);
    if (to_tiles)
        memset(out, 0, (size_t)(nib_round_up(rows, 128) * tiled));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < stride; c++) {
            const int64_t plain = r * stride + c;
            if (to_tiles && c < cols)
                out[nib_scale_offset(r, c, tiled, true)] = in[plain];
            else if (!to_tiles)
                out[plain] = c < cols ? in[nib_scale_offset(r, c, tiled, true)] : 0;
        }
    return NIB_OK;
}

nib_status nib_swizzle_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t stride, uint8_t *out)
{
    return reorder_scales(scales, rows, cols, stride, out, true);
}

nib_status nib_unswizzle_scales(const uint8_t *tiles, int64_t rows, int64_t cols, int64_t stride, uint8_t *out)
{
    return reorder_scales(tiles, rows, cols, stride, out, false);
}

static nib_status set_swizzled(nib_tensor *t, bool swizzled)
{
    if (t->q.swizzled == swizzled)
        return NIB_OK;
    nib_buffer *fresh[2] = { NULL, NULL };
    for (int copy = 0; copy < 2; copy++) {
        const struct nib_copy_geometry *g = &t->geometry.copy[copy];
        nib_buffer *old = t->parts[nib_copy_parts[copy][1]];
        if (!old)
            continue;
        nib_status status = nib_buffer_create((size_t)g->scale_bytes, &fresh[copy]); /* zero: the padding is done */
        if (!status)
            status = reorder_scales(nib_buffer_data(old), g->lines, g->blocks, g->scale_stride,
                                    nib_buffer_data(fresh[copy]), swizzled);
        if (status) {
            nib_buffer_release(fresh[0]);
            nib_buffer_release(fresh[1]);
            return status;
        }
    }
    for (int copy = 0; copy < 2; copy++)
        if (fresh[copy]) {
            nib_buffer_release(t->parts[nib_copy_parts[copy][1]]);
            t->parts[nib_copy_parts[copy][1]] = fresh[copy];
        }
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
        return nib_fail(NIB_ERR_USAGE, "the tensor has no rowwise copy");
    if (nib_buffer_bytes(buffer) != nib_buffer_bytes(old))
        return nib_fail(NIB_ERR_SHAPE, "the new buffer has %zu bytes and the rowwise codes take %zu",
                        nib_buffer_bytes(buffer), nib_buffer_bytes(old));
    if (nib_buffer_data(buffer) != nib_buffer_data(old))
        memmove(nib_buffer_data(buffer), nib_buffer_data(old), nib_buffer_bytes(old));
    t->parts[NIB_ROW_DATA] = nib_buffer_retain(buffer);
    nib_buffer_release(old);
    return NIB_OK;
}

/* ---- Save and restore ---- */

nib_status nib_tensor_prepare_for_saving(nib_tensor *t, nib_buffer **out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    memcpy(out, t->parts, sizeof t->parts);
    memset(t->parts, 0, sizeof t->parts);
    return NIB_OK;
}

/* What from_buffers checks, for buffers that are about to be moved in. */
static nib_status check_restorable(const nib_tensor *t, nib_buffer *const *saved)
{
    nib_tensor *trial;
    if (nib_tensor_has(t, NIB_ROWWISE) || nib_tensor_has(t, NIB_COLUMNWISE))
        return nib_fail(NIB_ERR_USAGE,
                        "the tensor still has data: only one that was prepared for saving or cleared is restored");
    TRY(nib_tensor_from_buffers(&t->q, t->dtype, t->rank, t->shape, saved, &trial));
    nib_tensor_destroy(trial);
    return NIB_OK;
}

nib_status nib_tensor_restore_from_saved(nib_tensor *t, nib_buffer *const *saved, size_t n, size_t *used)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(saved);
    if (n < NIB_PART_COUNT)
        return nib_fail(NIB_ERR_ARG, "a tensor is restored from %d buffers, and %zu are left", NIB_PART_COUNT, n);
    TRY(check_restorable(t, saved));
    memcpy(t->parts, saved, sizeof t->parts);
    if (used)
        *used = NIB_PART_COUNT;
    return NIB_OK;
}

nib_status nib_saved_count(const nib_item *items, size_t n, size_t *count)
{
    NIB_REQUIRE(items);
    NIB_REQUIRE(count);
    size_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += items[i].tensor ? NIB_PART_COUNT : 1;
    *count = sum;
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
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (!items[i].tensor) {
            saved[at++] = (nib_saved){ .array = items[i].array };
            items[i].array = (nib_array){ 0 };
            continue;
        }
        nib_buffer *parts[NIB_PART_COUNT];
        TRY(nib_tensor_prepare_for_saving(items[i].tensor, parts));
        for (int part = 0; part < NIB_PART_COUNT; part++)
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
    if (needed > count)
        return nib_fail(NIB_ERR_ARG, "the items take %zu entries and %zu were saved", needed, count);
    /* All is checked before anything moves: first pass looks, second pass acts. */
    for (int pass = 0; pass < 2; pass++) {
        size_t at = 0;
        for (size_t i = 0; i < n; i++) {
            if (!items[i].tensor) {
                if (pass)
                    items[i].array = saved[at].array;
                at++;
                continue;
            }
            nib_buffer *parts[NIB_PART_COUNT];
            for (int part = 0; part < NIB_PART_COUNT; part++)
                parts[part] = saved[at++].buffer;
            if (pass)
                memcpy(items[i].tensor->parts, parts, sizeof parts);
            else
                TRY(check_restorable(items[i].tensor, parts));
        }
    }
    if (used)
        *used = needed;
    return NIB_OK;
}
