/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.c - values to codes and back on a GPU: what src/tensor/amax.c, encode.c and decode.c are on the host.
 *
 * Tensor scales never come to the host. They are found by a kernel that leaves them in the tensor, or are the caller's
 * and copied there by the kernel that makes the codes: one launch where the amax is given, two where it is looked for.
 */
#include "device.h"

#include "tensor/matrix.h"

/* What one call works with. */
struct call {
    struct nib_cuda_device *d;
    const nib_quantizer *q;
    const nib_overrides *overrides;
    const struct nib_geometry *geometry;
    const float *noop;
    struct nib_rules rules;
    struct nib_cuda_place *place; /* on the GPU */
    struct matrix x;              /* its rows are direct */
    float signs[NIB_BLOCK];
    struct nib_usage_memory memory[2];
    const float *source[2]; /* where kernels read the tensor scales of a usage */
    bool raw;               /* amaxes are wanted, not tensor scales */
    bool from_data;         /* the values have been read once by now */
    cudaError_t error;
};

static bool wants(const nib_quantizer *q, int usage) { return usage == NIB_ROWWISE ? q->rowwise : q->columnwise; }

static bool has_rht(const nib_quantizer *q, int usage) { return usage == NIB_ROWWISE ? q->rht_rowwise : q->rht; }

nib_status nib_cuda_check_quantization(nib_device *device, const nib_quantizer *q, const nib_overrides *overrides,
                                       const struct nib_geometry *geometry)
{
    (void)overrides;
    if (q->format != NIB_NVFP4)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s quantizes nvfp4, not %s", device->name, nib_format_name(q->format));
    if (q->dialect != NIB_DIALECT_TE)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s quantizes by the dialect te, not by %s", device->name,
                        nib_dialect_name(q->dialect));
    if (q->amax_comm)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s has no communicator that reduces amaxes", device->name);
    if (nib_max(geometry->rows, geometry->cols) >= INT64_C(1) << 34)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s takes matrices of fewer than 2^34 rows and columns", device->name);
    return NIB_OK;
}

/* ---- Places ---- */

/* The words that a call has while it runs: its own if it is captured. Who needs none does not ask, since asking takes as
 * long as all that is before a launch. NULL where c->error says why. */
static struct nib_cuda_place *place_of(struct call *c)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (c->place || c->error)
        return c->place;
    c->error = cudaStreamIsCapturing(c->d->queue.stream, &capture);
    if (!c->error && capture != cudaStreamCaptureStatusNone)
        c->error = nib_cuda_take_place(c->d, &c->place);
    else if (!c->error)
        c->place = c->d->place;
    return c->place;
}

/* ---- Arrays of any strides ---- */

static bool is_aligned(const void *data, int64_t stride_bytes, int to)
{
    return (uintptr_t)data % (uintptr_t)to == 0 && stride_bytes % to == 0;
}

/* The same values without gaps, in memory that is allocated on the stream. `to` has room for them if it is not NULL. */
static cudaError_t copy_strided(const struct nib_cuda_device *d, const nib_array *array, void *plain, bool scatter)
{
    struct nib_cuda_gather job = { .strided = (char *)array->data + array->offset,
                                   .plain = plain,
                                   .rank = array->rank,
                                   .bytes = nib_dtypes[array->dtype].bits / 8,
                                   .scatter = scatter };
    int64_t n = 1;
    for (int i = 0; i < array->rank; i++) {
        job.shape[i] = array->shape[i];
        job.strides[i] = array->strides[i];
        n *= array->shape[i];
    }
    return nib_cuda_launch_gather(&d->queue, &job, n);
}

/* A matrix whose rows kernels can follow: the array's own, or *temporary, to be freed on the stream. */
static cudaError_t open_matrix(const struct nib_cuda_device *d, const nib_array *array, int64_t rows, int64_t cols,
                               bool gather, struct matrix *m, void **temporary)
{
    *m = matrix_of(array, rows, cols);
    *temporary = NULL;
    if (is_direct(m) || rows == 0 || cols == 0) /* a row that does not exist has no neighbor to be far from */
        return cudaSuccess;
    cudaError_t error = nib_cuda_borrow(d, (size_t)(rows * cols * m->bytes), temporary);
    if (!error && gather)
        error = copy_strided(d, array, *temporary, false);
    m->first = *temporary;
    m->row_stride = cols;
    m->col_stride = 1;
    m->even = true;
    return error;
}

static void close_matrix(const struct nib_cuda_device *d, void *temporary)
{
    if (temporary)
        (void)nib_cuda_give_back(d, temporary);
}

/* ---- Tensor scales ---- */

/* Whether both usages hold the same data under one tensor scale. */
static bool usages_share(const nib_quantizer *q) { return !q->row_scaled && !q->rht && !q->rht_rowwise; }

/* The caller's values for a usage, or NULL; where usages share a tensor scale, those of the other one serve too. */
static const float *override_for(const float *const overrides[2], const nib_quantizer *q, int usage)
{
    return overrides[usage] ? overrides[usage] : usages_share(q) ? overrides[1 - usage] : NULL;
}

/* An amax is its own tensor scale. */
static bool is_kept(const struct call *c)
{
    return c->raw ||
           (c->rules.tensor_scale == NIB_TENSOR_SCALE_AMAX && c->q->rounding != NIB_ROUND_STOCHASTIC_UNBIASED);
}

static struct nib_cuda_amax amax_job(struct call *c, nib_usage usage, bool rht)
{
    struct nib_cuda_place *const place = place_of(c);
    struct nib_cuda_amax job = { .x = c->x.first,
                                 .rows = c->x.rows,
                                 .cols = c->x.cols,
                                 .row_stride = c->x.row_stride,
                                 .dtype = c->x.dtype,
                                 .aligned = is_aligned(c->x.first, c->x.row_stride * c->x.bytes, 16),
                                 .aligned_start = is_aligned(c->x.first, 0, 16),
                                 .usage = usage,
                                 .rht = rht,
                                 .rules = c->rules,
                                 .unbiased = c->q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED,
                                 .noop = c->noop,
                                 .raw = c->raw,
                                 .tickets = place ? place->tickets : NULL };
    memcpy(job.signs, c->signs, sizeof job.signs);
    return job;
}

static void launch_amax(struct call *c, const struct nib_cuda_amax *job)
{
    if (!c->error)
        c->error = nib_cuda_launch_amax(&c->d->queue, job);
    c->from_data = true;
}

/* Tensor scales of a usage from amaxes, in place or not; what has been seen is raised too. */
static void launch_finish(struct call *c, int usage, const float *from, float *to)
{
    const struct nib_cuda_finish job = { .from = from,
                                         .to = to,
                                         .n = c->geometry->usage[usage].tensor_scales,
                                         .rules = c->rules,
                                         .unbiased = c->q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED,
                                         .seen = c->overrides->amax_seen,
                                         .noop = c->noop };
    if (!c->error)
        c->error = nib_cuda_launch_finish(&c->d->queue, &job);
}

/* Whether the amax of a usage is looked for, and whether its tensor scale follows from it. */
static bool looks_for_amax(const struct call *c, int usage)
{
    const bool finished = override_for(c->overrides->tensor_scale, c->q, usage);
    return wants(c->q, usage) && !override_for(c->overrides->amax, c->q, usage) &&
           (!finished || c->overrides->amax_seen);
}

static float *scale_target(const struct call *c, int usage)
{
    const bool follows = looks_for_amax(c, usage) && !override_for(c->overrides->tensor_scale, c->q, usage);
    return follows ? c->memory[usage].tensor_scales : NULL;
}

/* One amax per usage: those of the values, and of the RHT of columns, in one pass; the RHT of rows in another. */
static void find_amaxes(struct call *c)
{
    const bool look[2] = { looks_for_amax(c, 0), looks_for_amax(c, 1) };
    if (!look[0] && !look[1])
        return;
    struct nib_cuda_amax job = amax_job(c, NIB_ROWWISE, false);
    for (int usage = 0; usage < 2; usage++) {
        const int which = usage == NIB_COLUMNWISE && has_rht(c->q, usage);
        if (!look[usage] || (usage == NIB_ROWWISE && has_rht(c->q, usage)))
            continue;
        job.wanted[which] = true;
        job.to[which][which ? 0 : usage] = scale_target(c, usage);
        job.seen[which] = c->overrides->amax_seen;
    }
    if (job.wanted[0] || job.wanted[1])
        launch_amax(c, &job);
    if (look[0] && has_rht(c->q, 0)) {
        struct nib_cuda_amax rows = amax_job(c, NIB_ROWWISE, true);
        rows.wanted[0] = true;
        rows.to[0][0] = scale_target(c, 0);
        rows.seen[0] = c->overrides->amax_seen;
        launch_amax(c, &rows);
    }
}

/* An amax per line. */
static void find_line_amaxes(struct call *c, int usage)
{
    struct nib_cuda_amax job = amax_job(c, (nib_usage)usage, has_rht(c->q, usage));
    float *const lines = scale_target(c, usage);
    if (!lines) { /* nobody keeps them: only the largest is asked for */
        job.wanted[0] = true;
        job.seen[0] = c->overrides->amax_seen;
        launch_amax(c, &job);
        return;
    }
    const struct nib_cuda_finish clear = { .to = lines, .n = c->geometry->usage[usage].tensor_scales, .noop = c->noop };
    if (!c->error)
        c->error = nib_cuda_launch_clear(&c->d->queue, &clear);
    job.per_line = true;
    job.lines = lines;
    launch_amax(c, &job);
    if (!is_kept(c) || c->overrides->amax_seen)
        launch_finish(c, usage, lines, lines);
}

static void find_tensor_scales(struct call *c)
{
    if (!c->q->row_scaled)
        find_amaxes(c);
    for (int usage = 0; usage < 2; usage++) {
        if (!wants(c->q, usage))
            continue;
        const float *const amax = override_for(c->overrides->amax, c->q, usage), *const finished = override_for(
                                                                                     c->overrides->tensor_scale, c->q,
                                                                                     usage);
        float *const own = c->memory[usage].tensor_scales;
        c->source[usage] = own;
        if (c->q->row_scaled && looks_for_amax(c, usage))
            find_line_amaxes(c, usage);
        if (amax && c->overrides->amax_seen && finished)
            launch_finish(c, usage, amax, NULL);
        else if (amax && !finished && (c->overrides->amax_seen || !is_kept(c)))
            launch_finish(c, usage, amax, own);
        else if (amax && !finished)
            c->source[usage] = amax;
        if (finished)
            c->source[usage] = finished;
    }
}

/* ---- Codes ---- */

struct nib_cuda_usage nib_cuda_usage_of(const struct nib_usage_geometry *g, const struct nib_usage_memory *memory,
                                        const float *source, bool rht)
{
    return (struct nib_cuda_usage){ .codes = memory->codes,
                                    .scales = memory->scales,
                                    .tensor_scales = memory->tensor_scales,
                                    .source = source,
                                    .g = *g,
                                    .rht = rht,
                                    .wide = is_aligned(memory->codes, g->line_stride, 8),
                                    .words = is_aligned(memory->scales, 0, 4),
                                    .words8 = is_aligned(memory->scales, g->scale_line, 8) };
}

/* Whether the tensor scales of both usages come from the same place. */
static bool has_one_scale(const struct call *c)
{
    const nib_overrides *const o = c->overrides;
    return usages_share(c->q) && override_for(o->amax, c->q, 0) == override_for(o->amax, c->q, 1) &&
           override_for(o->tensor_scale, c->q, 0) == override_for(o->tensor_scale, c->q, 1);
}

static struct nib_cuda_quantization quantization_of(const struct call *c)
{
    const nib_quantizer *const q = c->q;
    struct nib_cuda_quantization job = { .x = c->x.first,
                                         .rows = c->x.rows,
                                         .cols = c->x.cols,
                                         .row_stride = c->x.row_stride,
                                         .dtype = c->x.dtype,
                                         .aligned = is_aligned(c->x.first, c->x.row_stride * c->x.bytes, 16),
                                         .square = q->block_dims[0] > 1,
                                         .one_scale = has_one_scale(c),
                                         .per_line = q->row_scaled,
                                         .reverse = c->from_data,
                                         .wanted = { q->rowwise, q->columnwise },
                                         .fast_error = q->fast_error,
                                         .floor_code = nib_e4m3_from_f32(q->min_block_scale),
                                         .rules = c->rules,
                                         .scale_rule = q->scale_rule,
                                         .error_mode = q->error_mode,
                                         .rounding = q->rounding,
                                         .sign_mask = q->rht_sign_mask,
                                         .seed = q->seed,
                                         .offset = q->offset,
                                         .offset_at = c->overrides->offset,
                                         .importance = c->overrides->importance,
                                         .noop = c->noop };
    memcpy(job.signs, c->signs, sizeof job.signs);
    for (uint32_t round = 0; round < 10; round++) { /* as nib_philox_block steps them */
        job.keys[2 * round] = (uint32_t)q->seed + round * 0x9E3779B9u;
        job.keys[2 * round + 1] = (uint32_t)(q->seed >> 32) + round * 0xBB67AE85u;
    }
    for (int usage = 0; usage < 2; usage++) {
        job.usage[usage] =
            nib_cuda_usage_of(&c->geometry->usage[usage], &c->memory[usage], c->source[usage], has_rht(q, usage));
        job.usage[usage].origin_line = (uint32_t)q->origin[usage];
        job.usage[usage].origin_block = (uint32_t)(q->origin[1 - usage] / NIB_BLOCK);
    }
    return job;
}

/* Tensor scales that only the kernel for codes would have copied. */
static void copy_given_scales(struct call *c)
{
    for (int usage = 0; usage < 2; usage++) {
        const size_t bytes = (size_t)c->geometry->usage[usage].tensor_scales_bytes;
        if (!wants(c->q, usage) || c->source[usage] == c->memory[usage].tensor_scales || !bytes)
            continue;
        struct nib_cuda_finish job = { .from = c->source[usage],
                                       .to = c->memory[usage].tensor_scales,
                                       .n = c->geometry->usage[usage].tensor_scales,
                                       .noop = c->noop };
        job.rules.tensor_scale = NIB_TENSOR_SCALE_AMAX; /* as they are */
        if (!c->error && job.to)
            c->error = nib_cuda_launch_finish(&c->d->queue, &job);
    }
}

static void begin_call(struct call *c, const nib_array *x)
{
    c->rules = nib_rules_of(c->q, x->dtype);
    const float one = x->dtype == NIB_F32 ? 1.0f : 0.25f; /* where the quarter comes first */
    for (int i = 0; i < NIB_BLOCK; i++)
        c->signs[i] = c->q->rht_sign_mask >> i & 1 ? -one : one;
}

static nib_status quantize_values(struct call *c, const nib_array *x)
{
    void *temporary = NULL;
    begin_call(c, x);
    c->error = open_matrix(c->d, x, c->geometry->rows, c->geometry->cols, true, &c->x, &temporary);
    find_tensor_scales(c);
    if (c->x.rows == 0 || c->x.cols == 0)
        copy_given_scales(c);
    else if (!c->error) {
        const struct nib_cuda_quantization job = quantization_of(c);
        c->error = nib_cuda_launch_quantize(&c->d->queue, &job);
    }
    close_matrix(c->d, temporary);
    return nib_cuda_status(c->d, "quantizing", c->error);
}

nib_status nib_cuda_quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                             const nib_overrides *overrides, const float *noop, const struct nib_geometry *geometry,
                             const struct nib_usage_memory *memory)
{
    struct call c = { .d = nib_cuda_device_of(device),
                      .q = q,
                      .overrides = overrides,
                      .geometry = geometry,
                      .noop = noop,
                      .memory = { memory[0], memory[1] } };
    int before;
    nib_status status = nib_cuda_status(c.d, "quantizing", nib_cuda_enter(c.d->queue.ordinal, &before));
    if (!status)
        status = quantize_values(&c, x);
    nib_cuda_leave(before);
    return status;
}

/* ---- Amaxes alone ---- */

static nib_status amaxes_of(struct call *c, const nib_array *x)
{
    void *temporary = NULL;
    begin_call(c, x);
    c->error = open_matrix(c->d, x, c->geometry->rows, c->geometry->cols, true, &c->x, &temporary);
    find_tensor_scales(c);
    close_matrix(c->d, temporary);
    return nib_cuda_status(c->d, "looking for amaxes", c->error);
}

nib_status nib_cuda_find_amaxes(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                const struct nib_geometry *geometry, float *const amax[2])
{
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    struct call c = { .d = nib_cuda_device_of(device),
                      .q = q,
                      .overrides = &nothing,
                      .geometry = geometry,
                      .memory = { { .tensor_scales = amax[0] }, { .tensor_scales = amax[1] } },
                      .raw = true };
    int before;
    nib_status status = nib_cuda_status(c.d, "looking for amaxes", nib_cuda_enter(c.d->queue.ordinal, &before));
    if (!status)
        status = amaxes_of(&c, x);
    nib_cuda_leave(before);
    return status;
}

/* ---- Both at once ---- */

static nib_status fake_values(struct call *c, nib_usage usage, const nib_array *x, const nib_array *out)
{
    const struct nib_usage_geometry *const g = &c->geometry->usage[usage];
    const bool in_place = out->data == x->data && out->offset == x->offset;
    struct matrix y;
    void *from = NULL, *to = NULL, *lines = NULL;
    begin_call(c, x);
    c->error = open_matrix(c->d, x, c->geometry->rows, c->geometry->cols, true, &c->x, &from);
    if (!c->error)
        c->error = open_matrix(c->d, out, c->geometry->rows, c->geometry->cols, false, &y, &to);
    if (!c->error && c->q->row_scaled && g->tensor_scales)
        c->error = nib_cuda_borrow(c->d, (size_t)g->tensor_scales_bytes, &lines);
    pthread_mutex_lock(&c->d->turn); /* the place has the tensor scale until the launch that reads it */
    if (!c->error) {
        struct nib_cuda_place *const place = lines ? NULL : place_of(c);
        c->memory[usage].tensor_scales = place ? &place->tensor_scale : lines;
        find_tensor_scales(c);
    }
    if (!c->error && c->x.rows && c->x.cols) {
        struct nib_cuda_quantization job = quantization_of(c);
        job.usage[usage].tensor_scales = NULL;
        job.out = y.first;
        job.out_stride = y.row_stride;
        job.out_aligned = is_aligned(y.first, y.row_stride * y.bytes, 16);
        job.reverse = job.reverse && !in_place;
        c->error = nib_cuda_launch_quantize(&c->d->queue, &job);
    }
    pthread_mutex_unlock(&c->d->turn);
    if (!c->error && to)
        c->error = copy_strided(c->d, out, to, true);
    close_matrix(c->d, from);
    close_matrix(c->d, to);
    close_matrix(c->d, lines);
    return nib_cuda_status(c->d, "fake quantization", c->error);
}

nib_status nib_cuda_fake_quantize(nib_device *device, const nib_quantizer *q, const nib_array *x,
                                  const nib_overrides *overrides, const struct nib_geometry *geometry, nib_usage usage,
                                  const nib_array *out)
{
    struct call c = { .d = nib_cuda_device_of(device), .q = q, .overrides = overrides, .geometry = geometry };
    int before;
    nib_status status = nib_cuda_status(c.d, "fake quantization", nib_cuda_enter(c.d->queue.ordinal, &before));
    if (!status)
        status = fake_values(&c, usage, x, out);
    nib_cuda_leave(before);
    return status;
}

/* ---- Back ---- */

static nib_status decode_values(struct nib_cuda_device *d, const nib_quantizer *q, const struct nib_geometry *geometry,
                                nib_usage from, const struct nib_usage_memory *memory, int64_t first, int64_t count,
                                const nib_array *out)
{
    struct matrix y;
    void *temporary = NULL;
    cudaError_t error = open_matrix(d, out, count, geometry->cols, false, &y, &temporary);
    const struct nib_cuda_dequantization job = {
        .usage = nib_cuda_usage_of(&geometry->usage[from], memory, memory->tensor_scales, has_rht(q, from)),
        .from = from,
        .rules = nib_rules_of(q, out->dtype),
        .per_line = q->row_scaled,
        .sign_mask = q->rht_sign_mask,
        .first = first,
        .rows = count,
        .cols = geometry->cols,
        .dtype = out->dtype,
        .out = y.first,
        .out_stride = y.row_stride,
        .out_aligned = is_aligned(y.first, y.row_stride * y.bytes, 16),
    };
    if (!error)
        error = nib_cuda_launch_dequantize(&d->queue, &job);
    if (!error && temporary)
        error = copy_strided(d, out, temporary, true);
    close_matrix(d, temporary);
    return nib_cuda_status(d, "dequantizing", error);
}

nib_status nib_cuda_dequantize(nib_device *device, const nib_quantizer *q, const struct nib_geometry *geometry,
                               nib_usage from, const struct nib_usage_memory *memory, int64_t first, int64_t count,
                               const nib_array *out)
{
    struct nib_cuda_device *const d = nib_cuda_device_of(device);
    int before;
    if (q->format != NIB_NVFP4)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s dequantizes nvfp4, not %s", device->name, nib_format_name(q->format));
    nib_status status = nib_cuda_status(d, "dequantizing", nib_cuda_enter(d->queue.ordinal, &before));
    if (!status)
        status = decode_values(d, q, geometry, from, memory, first, count, out);
    nib_cuda_leave(before);
    return status;
}
