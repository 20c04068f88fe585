/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.c - a tensor's life: buffers, quantise into, dequantise from, usages, metadata.
 */
#include "tensor.h"

#include "os.h"

const nib_part nib_copy_parts[2][3] = {
    [NIB_ROWWISE] = { NIB_ROW_DATA, NIB_ROW_SCALE, NIB_ROW_LEVEL },
    [NIB_COLUMNWISE] = { NIB_COL_DATA, NIB_COL_SCALE, NIB_COL_LEVEL },
};

/* ---- Small questions ---- */

const char *nib_copy_name(nib_copy copy) { return copy == NIB_ROWWISE ? "rowwise" : "columnwise"; }

bool nib_tensor_has(const nib_tensor *t, nib_copy copy) { return t->parts[nib_copy_parts[copy][0]] != NULL; }

nib_status nib_tensor_pick(const nib_tensor *t, nib_copy wanted, nib_copy *out)
{
    if (wanted != NIB_ROWWISE && wanted != NIB_COLUMNWISE && wanted != NIB_EITHER)
        return nib_fail(NIB_ERR_ARG, "%d is not a copy of a tensor", (int)wanted);
    const nib_copy copy = wanted != NIB_EITHER ? wanted : nib_tensor_has(t, NIB_ROWWISE) ? NIB_ROWWISE : NIB_COLUMNWISE;
    if (!nib_tensor_has(t, copy))
        return nib_fail(NIB_ERR_USAGE, wanted == NIB_EITHER ? "the tensor has no data" : "the tensor has no %s copy",
                        nib_copy_name(copy));
    *out = copy;
    return NIB_OK;
}

struct nib_copy_memory nib_tensor_memory(const nib_tensor *t, nib_copy copy)
{
    const nib_part *part = nib_copy_parts[copy];
    return (struct nib_copy_memory){ nib_buffer_data(t->parts[part[0]]), nib_buffer_data(t->parts[part[1]]),
                                     nib_buffer_data(t->parts[part[2]]) };
}

static nib_copy copy_of_part(nib_part part) { return part % 2 ? NIB_COLUMNWISE : NIB_ROWWISE; }

size_t nib_part_bytes(const struct nib_geometry *geometry, nib_part part)
{
    const struct nib_copy_geometry *copy = &geometry->copy[copy_of_part(part)];
    const int64_t bytes[3] = { copy->code_bytes, copy->scale_bytes, copy->level_bytes };
    return (size_t)bytes[part / 2];
}

struct nib_rules nib_tensor_rules(const nib_tensor *t) { return nib_rules_of(&t->q, t->dtype); }

bool nib_same_meaning(const nib_quantizer *a, const nib_quantizer *b)
{
    const struct nib_rules ra = nib_rules_of(a, NIB_F32), rb = nib_rules_of(b, NIB_F32);
    const bool transformed = a->rht || a->rht_rowwise;
    return a->format == b->format && ra.level == rb.level && ra.full_scale == rb.full_scale &&
           a->swizzled == b->swizzled && a->row_scaled == b->row_scaled && a->block_dims[0] == b->block_dims[0] &&
           a->rht == b->rht && a->rht_rowwise == b->rht_rowwise &&
           (!transformed || a->rht_sign_mask == b->rht_sign_mask);
}

/* ---- Life ---- */

nib_status nib_tensor_new(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape, nib_tensor **out)
{
    struct nib_geometry geometry;
    TRY(nib_check_input(q, dtype, rank, shape, &geometry));
    nib_tensor *t = nib_alloc_zeroed(sizeof *t);
    if (!t)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a tensor");
    t->q = *q;
    t->q.amax_comm = NULL; /* a communicator may be gone long before the tensor */
    t->dtype = dtype;
    t->rank = rank;
    memcpy(t->shape, shape, (size_t)rank * sizeof *shape);
    t->geometry = geometry;
    *out = t;
    return NIB_OK;
}

void nib_tensor_drop(nib_tensor *t, nib_copy copy)
{
    for (int i = 0; i < 3; i++) {
        nib_buffer_release(t->parts[nib_copy_parts[copy][i]]);
        t->parts[nib_copy_parts[copy][i]] = NULL;
    }
}

static nib_status allocate_copy(nib_tensor *t, nib_copy copy)
{
    nib_status status = NIB_OK;
    for (int i = 0; i < 3 && !status; i++) {
        const nib_part part = nib_copy_parts[copy][i];
        status = nib_buffer_create(nib_part_bytes(&t->geometry, part), &t->parts[part]);
    }
    if (status)
        nib_tensor_drop(t, copy);
    return status;
}

nib_status nib_tensor_allocate(nib_tensor *t, bool rowwise, bool columnwise)
{
    const bool wanted[2] = { rowwise && !nib_tensor_has(t, NIB_ROWWISE),
                             columnwise && !nib_tensor_has(t, NIB_COLUMNWISE) };
    if (wanted[NIB_ROWWISE])
        TRY(allocate_copy(t, NIB_ROWWISE));
    const nib_status status = wanted[NIB_COLUMNWISE] ? allocate_copy(t, NIB_COLUMNWISE) : NIB_OK;
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
    nib_free(t);
}

nib_status nib_tensor_zero(nib_tensor *t)
{
    NIB_REQUIRE(t);
    const float level = nib_tensor_rules(t).level == NIB_LEVEL_AMAX ? 0.0f : 1.0f;
    for (int copy = 0; copy < 2; copy++) {
        if (!nib_tensor_has(t, (nib_copy)copy))
            continue;
        const struct nib_copy_memory memory = nib_tensor_memory(t, (nib_copy)copy);
        memset(memory.codes, 0, (size_t)t->geometry.copy[copy].code_bytes);
        memset(memory.scales, 0, (size_t)t->geometry.copy[copy].scale_bytes);
        for (int64_t i = 0; i < t->geometry.copy[copy].levels; i++)
            memory.levels[i] = level;
    }
    return NIB_OK;
}

nib_status nib_tensor_create(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape, nib_tensor **out)
{
    NIB_REQUIRE(out);
    nib_quantizer loaded;
    nib_tensor *t;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(nib_tensor_new(&loaded, dtype, rank, shape, &t));
    nib_status status = nib_tensor_allocate(t, loaded.rowwise, loaded.columnwise);
    if (!status)
        status = nib_tensor_zero(t);
    if (status)
        nib_tensor_destroy(t);
    else
        *out = t;
    return status;
}

/* Whether buffers make up whole copies of the sizes that the geometry wants. */
static nib_status check_parts(const struct nib_geometry *geometry, nib_buffer *const *parts)
{
    static const char *const names[3] = { "data", "scale", "level" };
    for (int copy = 0; copy < 2; copy++)
        for (int i = 0; i < 3; i++) {
            const nib_part part = nib_copy_parts[copy][i];
            const size_t wanted = nib_part_bytes(geometry, part);
            if (!parts[part] != !parts[nib_copy_parts[copy][0]])
                return nib_fail(NIB_ERR_USAGE, "the %s copy has %s but no %s", nib_copy_name((nib_copy)copy),
                                parts[part] ? names[i] : "data", parts[part] ? "data" : names[i]);
            if (parts[part] && nib_buffer_bytes(parts[part]) != wanted)
                return nib_fail(NIB_ERR_SHAPE, "the %s %s buffer has %zu bytes instead of %zu",
                                nib_copy_name((nib_copy)copy), names[i], nib_buffer_bytes(parts[part]), wanted);
            if (parts[part] && i == 2 && (uintptr_t)nib_buffer_data(parts[part]) % sizeof(float))
                return nib_fail(NIB_ERR_ARG, "the %s level buffer is not aligned to floats",
                                nib_copy_name((nib_copy)copy));
        }
    return NIB_OK;
}

nib_status nib_tensor_from_buffers(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                                   nib_buffer *const *parts, nib_tensor **out)
{
    NIB_REQUIRE(parts);
    NIB_REQUIRE(out);
    nib_quantizer loaded;
    nib_tensor *t;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(nib_tensor_new(&loaded, dtype, rank, shape, &t));
    const nib_status status = check_parts(&t->geometry, parts);
    if (status) {
        nib_tensor_destroy(t);
        return status;
    }
    for (int i = 0; i < NIB_PART_COUNT; i++)
        t->parts[i] = nib_buffer_retain(parts[i]);
    t->q.rowwise = parts[NIB_ROW_DATA] != NULL;
    t->q.columnwise = parts[NIB_COL_DATA] != NULL;
    *out = t;
    return NIB_OK;
}

/* ---- Quantise ---- */

static nib_status check_given(const nib_given *given)
{
    if (given && given->bytes < sizeof *given)
        return nib_fail(NIB_ERR_ARG, "given->bytes is %zu, not %zu", given->bytes, sizeof *given);
    return NIB_OK;
}

static nib_status quantize_parts(nib_tensor *t, const nib_quantizer *q, const nib_array *x, const nib_given *given)
{
    const struct nib_copy_memory memory[2] = { nib_tensor_memory(t, NIB_ROWWISE),
                                               nib_tensor_memory(t, NIB_COLUMNWISE) };
    return nib_quantize_copies(q, x, given, &t->geometry, memory);
}

nib_status nib_quantize(const nib_quantizer *q, const nib_array *x, const nib_given *given, nib_tensor **out)
{
    NIB_REQUIRE(out);
    nib_quantizer loaded;
    nib_tensor *t;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(nib_check_array("x", x));
    TRY(check_given(given));
    TRY(nib_tensor_new(&loaded, x->dtype, x->rank, x->shape, &t));
    nib_status status = nib_tensor_allocate(t, loaded.rowwise, loaded.columnwise);
    if (!status)
        status = quantize_parts(t, &loaded, x, given);
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

nib_status nib_quantize_into(const nib_quantizer *q, const nib_array *x, const nib_given *given, const float *noop,
                             nib_tensor *t)
{
    NIB_REQUIRE(t);
    if (noop && *noop == 1.0f)
        return NIB_OK;
    nib_quantizer loaded;
    TRY(nib_quantizer_load(q ? q : &t->q, &loaded));
    TRY(nib_check_array("x", x));
    TRY(check_given(given));
    TRY(check_same_shape(t, x));

    /* Work on a second tensor that shares the buffers it may write in place, so that a failure leaves the first alone. A view
     * that shares them must go on decoding them rightly: once their meaning changes they are new. */
    nib_tensor *updated;
    TRY(nib_tensor_new(&loaded, x->dtype, x->rank, x->shape, &updated));
    updated->dtype = t->dtype;
    for (int i = 0; i < NIB_PART_COUNT; i++)
        if (nib_same_meaning(&loaded, &t->q) &&
            (copy_of_part((nib_part)i) == NIB_ROWWISE ? loaded.rowwise : loaded.columnwise))
            updated->parts[i] = nib_buffer_retain(t->parts[i]);
    nib_status status = nib_tensor_allocate(updated, loaded.rowwise, loaded.columnwise);
    if (!status)
        status = quantize_parts(updated, &loaded, x, given);
    if (!status) {
        const nib_tensor old = *t;
        *t = *updated;
        *updated = old;
    }
    nib_tensor_destroy(updated);
    return status;
}

/* ---- Dequantise ---- */

static nib_status check_output(const nib_array *out)
{
    TRY(nib_check_array("out", out));
    if (out->dtype != NIB_F32 && out->dtype != NIB_BF16 && out->dtype != NIB_F16)
        return nib_fail(NIB_ERR_DTYPE, "dequantisation gives F32, BF16 and F16, not %s", nib_dtypes[out->dtype].name);
    for (int i = 0; i < out->rank; i++)
        if (out->strides[i] == 0 && out->shape[i] > 1)
            return nib_fail(NIB_ERR_SHAPE, "out: stride 0 of dim %d would write %lld values to one place", i,
                            (long long)out->shape[i]);
    return NIB_OK;
}

static nib_status dequantize_rows(const nib_tensor *t, nib_copy from, int64_t first, int64_t count,
                                  const nib_array *out)
{
    if (count == 0 || t->geometry.cols == 0)
        return NIB_OK; /* whichever copy, there is nothing in it */
    nib_copy copy;
    TRY(nib_tensor_pick(t, from, &copy));
    const struct nib_copy_memory memory = nib_tensor_memory(t, copy);
    nib_dequantize_copy(&t->q, &t->geometry, copy, &memory, first, count, out);
    return NIB_OK;
}

nib_status nib_dequantize(const nib_tensor *t, nib_copy from, const nib_array *out)
{
    NIB_REQUIRE(t);
    TRY(check_output(out));
    TRY(check_same_shape(t, out));
    return dequantize_rows(t, from, 0, t->geometry.rows, out);
}

nib_status nib_dequantize_rows(const nib_tensor *t, nib_copy from, int64_t first, int64_t count, const nib_array *out)
{
    NIB_REQUIRE(t);
    TRY(check_output(out));
    if (first < 0 || count < 0 || first > t->geometry.rows || count > t->geometry.rows - first)
        return nib_fail(NIB_ERR_SHAPE, "rows %lld to %lld of %lld", (long long)first, (long long)(first + count),
                        (long long)t->geometry.rows);
    if (out->rank != 2 || out->shape[0] != count || out->shape[1] != t->geometry.cols)
        return nib_fail(NIB_ERR_SHAPE, "out must be [%lld, %lld]", (long long)count, (long long)t->geometry.cols);
    return dequantize_rows(t, from, first, count, out);
}

/* ---- Metadata and parts ---- */

nib_status nib_tensor_get_metadata(const nib_tensor *t, nib_metadata *out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    if (out->bytes < sizeof *out)
        return nib_fail(NIB_ERR_ARG, "the metadata's bytes are %zu, not %zu", out->bytes, sizeof *out);
    nib_metadata metadata = { .bytes = out->bytes,
                              .format = t->q.format,
                              .dtype = t->dtype,
                              .rank = t->rank,
                              .rows = t->geometry.rows,
                              .cols = t->geometry.cols,
                              .level = nib_tensor_rules(t).level,
                              .rowwise = nib_tensor_has(t, NIB_ROWWISE),
                              .columnwise = nib_tensor_has(t, NIB_COLUMNWISE),
                              .quantizer = t->q };
    memcpy(metadata.shape, t->shape, sizeof metadata.shape);
    *out = metadata;
    return NIB_OK;
}

nib_buffer *nib_tensor_buffer(const nib_tensor *t, nib_part part)
{
    return t && (unsigned)part < NIB_PART_COUNT ? t->parts[part] : NULL;
}

/* Shape of a part; the rowwise codes keep the logical leading dims. */
static nib_dtype part_shape(const nib_quantizer *q, const struct nib_geometry *geometry, nib_part part, int rank,
                            const int64_t *shape, int *out_rank, int64_t *out_shape)
{
    const struct nib_copy_geometry *copy = &geometry->copy[copy_of_part(part)];
    if (part == NIB_ROW_DATA) {
        *out_rank = rank;
        memcpy(out_shape, shape, (size_t)rank * sizeof *shape);
        out_shape[rank - 1] = copy->code_stride;
        return NIB_U8;
    }
    const struct {
        nib_dtype dtype;
        int rank;
        int64_t shape[2];
    } kinds[3] = { { NIB_U8, 2, { copy->lines, copy->code_stride } },
                   { nib_formats[q->format].scale, 2, { copy->scale_lines, copy->scale_stride } },
                   { NIB_F32, 1, { copy->levels, 0 } } };
    *out_rank = kinds[part / 2].rank;
    memcpy(out_shape, kinds[part / 2].shape, (size_t)*out_rank * sizeof *out_shape);
    return kinds[part / 2].dtype;
}

nib_status nib_part_shape(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape, int *out_rank,
                          int64_t *out_shape)
{
    NIB_REQUIRE(out_rank);
    NIB_REQUIRE(out_shape);
    if ((unsigned)part >= NIB_PART_COUNT)
        return nib_fail(NIB_ERR_ARG, "%d is not a part of a tensor", (int)part);
    nib_quantizer loaded;
    struct nib_geometry geometry;
    TRY(nib_quantizer_load(q, &loaded));
    TRY(nib_geometry_of(&loaded, rank, shape, &geometry));
    (void)part_shape(&loaded, &geometry, part, rank, shape, out_rank, out_shape);
    return NIB_OK;
}

nib_status nib_tensor_part(const nib_tensor *t, nib_part part, nib_array *out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    if ((unsigned)part >= NIB_PART_COUNT)
        return nib_fail(NIB_ERR_ARG, "%d is not a part of a tensor", (int)part);
    if (!t->parts[part])
        return nib_fail(NIB_ERR_USAGE, "the tensor has no %s copy", nib_copy_name(copy_of_part(part)));
    int rank;
    int64_t shape[NIB_MAX_RANK];
    const nib_dtype dtype = part_shape(&t->q, &t->geometry, part, t->rank, t->shape, &rank, shape);
    return nib_array_init(out, nib_buffer_data(t->parts[part]), dtype, rank, shape);
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

struct transpose_job {
    const struct nib_geometry *geometry;
    const struct nib_copy_memory *row, *col;
};

/* Line c of the columnwise copy: column c of the codes, and of the tile scales, of which one row in 16 is enough. */
static void transpose_line(void *context, int64_t c)
{
    const struct transpose_job *job = context;
    const struct nib_copy_geometry *row = &job->geometry->copy[NIB_ROWWISE],
                                   *col = &job->geometry->copy[NIB_COLUMNWISE];
    uint8_t *line = job->col->codes + c * col->code_stride;
    for (int64_t r = 0; r < row->lines; r++) {
        const uint8_t code = job->row->codes[r * row->code_stride + c / 2] >> 4 * (c % 2) & 15;
        line[r / 2] = (uint8_t)(r % 2 ? line[r / 2] | code << 4 : code);
    }
    for (int64_t b = 0; b < col->blocks; b++)
        job->col->scales[c * col->scale_stride + b] = job->row->scales[b * 16 * row->scale_stride + c / 16];
}

static nib_status build_columnwise(nib_tensor *t)
{
    if (!nib_tensor_has(t, NIB_ROWWISE))
        return nib_fail(NIB_ERR_USAGE,
                        "a columnwise copy is built from the rowwise one, which the tensor does not have");
    if (t->q.block_dims[0] == 1)
        return nib_fail(NIB_ERR_USAGE,
                        "with 1x16 blocks the columnwise copy has scales of its own and cannot be built from the "
                        "rowwise codes: quantise again");
    if (t->q.swizzled)
        return nib_fail(NIB_ERR_USAGE, "the columnwise copy is built from compact scales: unswizzle the tensor first");
    TRY(nib_tensor_allocate(t, false, true));
    const struct nib_copy_memory row = nib_tensor_memory(t, NIB_ROWWISE), col = nib_tensor_memory(t, NIB_COLUMNWISE);
    struct transpose_job job = { &t->geometry, &row, &col };
    nib_parallel(t->geometry.cols, nib_thread_count(&t->q, t->geometry.rows * t->geometry.cols), transpose_line, &job);
    memcpy(col.levels, row.levels, (size_t)t->geometry.copy[NIB_COLUMNWISE].level_bytes);
    return NIB_OK;
}

nib_status nib_tensor_update_usage(nib_tensor *t, int rowwise, int columnwise)
{
    NIB_REQUIRE(t);
    nib_quantizer wanted = t->q; /* -1 means what is there, not what was asked for once */
    wanted.rowwise = nib_tensor_has(t, NIB_ROWWISE);
    wanted.columnwise = nib_tensor_has(t, NIB_COLUMNWISE);
    TRY(nib_quantizer_set_usage(&wanted, rowwise, columnwise));
    if (wanted.rowwise && !nib_tensor_has(t, NIB_ROWWISE))
        return nib_fail(NIB_ERR_USAGE, "the tensor has no rowwise copy, and one cannot be built");
    if (wanted.columnwise && !nib_tensor_has(t, NIB_COLUMNWISE))
        TRY(build_columnwise(t));
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
