/* SPDX-License-Identifier: Apache-2.0 */
/*
 * amax.c - the first pass over an array of the host: its amaxes, and the tensor scales that follow from them.
 */
#include <stdatomic.h>

#include "base/os.h"
#include "base/threads.h"
#include "format/codec.h"
#include "kernels/kernels_generic.h"
#include "tensor/matrix.h"
#include "tensor/quantize.h"

/* ---- Amaxes ---- */

struct amax_job {
    const struct matrix *m;
    const struct nib_coding *coding;
    nib_absmax_fn *absmax;
    nib_absmax_lines_fn *absmax_lines;
    float *per_line;        /* one per line, or NULL */
    _Atomic uint32_t whole; /* of all, as nib_raise_to keeps it */
};

void nib_raise_to(_Atomic uint32_t *whole, float value)
{
    uint32_t seen = atomic_load_explicit(whole, memory_order_relaxed);
    while (nib_bits(value) > seen && !atomic_compare_exchange_weak_explicit(whole, &seen, nib_bits(value),
                                                                            memory_order_relaxed, memory_order_relaxed))
        ;
}

/* A range of an array without gaps. */
static void amax_of_range(void *context, int64_t i)
{
    struct amax_job *job = context;
    const int64_t first = i * PANEL_RUN, n = nib_min(PANEL_RUN, job->m->rows * job->m->cols - first);
    nib_raise_to(&job->whole, job->absmax(job->m->first + first * job->m->bytes, n));
}

/* One panel of the data as it is. */
static void amax_of_panel(void *context, int64_t i)
{
    struct amax_job *job = context;
    struct panel_buffer buffer;
    const struct nib_panel panel = panel_at(job->m, i / job->m->column_panels, i % job->m->column_panels, &buffer);
    const int64_t row_bytes = panel.stride * job->m->bytes;
    float amax = 0;
    for (int64_t r = 0; r < panel.rows; r++)
        amax = nib_fmax(amax, job->absmax((const char *)panel.x + r * row_bytes, panel.cols));
    nib_raise_to(&job->whole, amax);
}

/* All panels that hold the i-th group of lines. */
static void amax_of_lines(void *context, int64_t i)
{
    struct amax_job *job = context;
    const bool rowwise = job->coding->usage == NIB_ROWWISE;
    const int64_t panels = rowwise ? job->m->column_panels : job->m->row_panels;
    float lines[PANEL_LINES] = { 0 };
    int64_t count = 0;
    for (int64_t j = 0; j < panels; j++) {
        struct panel_buffer buffer;
        const struct nib_panel panel = panel_at(job->m, rowwise ? i : j, rowwise ? j : i, &buffer);
        job->absmax_lines(&panel, job->coding, lines);
        count = rowwise ? panel.rows : panel.cols;
    }
    for (int64_t line = 0; line < count; line++) {
        if (job->per_line)
            job->per_line[i * (rowwise ? job->m->cut.rows : job->m->cut.cols) + line] = lines[line];
        nib_raise_to(&job->whole, lines[line]);
    }
}

/* The amax of a usage, or one per line of it, into out. */
static void find_amax(const nib_device *host, const nib_quantizer *q, const struct matrix *m,
                      const struct nib_coding *coding, float *out)
{
    struct amax_job job = { .m = m,
                            .coding = coding,
                            .absmax = nib_kernels_best()->absmax[m->dtype],
                            .absmax_lines = NIB_KERNEL(absmax_lines, q->format),
                            .per_line = q->row_scaled ? out : NULL };
    const int threads = nib_thread_count(host, m->rows * m->cols);
    const int64_t lines = coding->usage == NIB_ROWWISE ? m->rows : m->cols;
    if (q->row_scaled)
        memset(out, 0, (size_t)lines * sizeof *out); /* lines without elements */
    const bool gapless = is_direct(m) && (m->row_stride == m->cols || m->rows == 1);
    if (!q->row_scaled && !coding->rht && gapless)
        nib_parallel(nib_ceil_div(m->rows * m->cols, PANEL_RUN), threads, amax_of_range, &job);
    else if (!q->row_scaled && !coding->rht)
        nib_parallel(m->row_panels * m->column_panels, threads, amax_of_panel, &job);
    else
        nib_parallel(coding->usage == NIB_ROWWISE ? m->row_panels : m->column_panels, threads, amax_of_lines, &job);
    if (!q->row_scaled)
        *out = nib_float(job.whole);
}

/* ---- Tensor scales ---- */

/* Whether both usages hold the same data under one tensor scale. */
static bool usages_share(const nib_quantizer *q) { return !q->row_scaled && !q->rht && !q->rht_rowwise; }

/* The caller's values for a usage, or NULL; where usages share a tensor scale, those of the other one serve too. */
static const float *override_for(const float *const overrides[2], const nib_quantizer *q, int usage)
{
    return overrides[usage] ? overrides[usage] : usages_share(q) ? overrides[1 - usage] : NULL;
}

/* Whether the tensor scale of a usage comes from the data, so that its amax must be known. */
static bool needs_amax(const nib_quantizer *q, const nib_overrides *overrides, int usage)
{
    const bool finished = override_for(overrides->tensor_scale, q, usage) || overrides->scale;
    return nib_wants(q, usage) && nib_format_of(q)->tensor_scales && (!finished || overrides->amax_seen);
}

/* Whether the amaxes of a usage need memory: the caller's are used where they are, unless they are still to be
 * reduced. */
static bool keeps_amax(const nib_quantizer *q, const nib_overrides *overrides, int usage)
{
    return needs_amax(q, overrides, usage) && (q->amax_comm || !override_for(overrides->amax, q, usage));
}

/* The amaxes that are needed, side by side from `amax` on, so that one reduction does for all; or, where in_place is not
 * NULL, those of each usage there. */
static size_t collect_amaxes(const nib_device *host, const nib_quantizer *q, const struct matrix *m,
                             const nib_overrides *overrides, const struct nib_geometry *geometry,
                             const struct nib_coding coding[2], float *amax, float *const *in_place,
                             const float *found[2])
{
    size_t n = 0;
    for (int usage = 0; usage < 2; usage++) {
        found[usage] = NULL;
        if (!needs_amax(q, overrides, usage) || !geometry->usage[usage].tensor_scales)
            continue;
        const size_t count = (size_t)geometry->usage[usage].tensor_scales;
        float *const place = in_place ? in_place[usage] : amax + n;
        const float *brought = override_for(overrides->amax, q, usage);
        if (!keeps_amax(q, overrides, usage)) {
            found[usage] = brought;
            continue;
        }
        const bool same = usage == 1 && found[0] && usages_share(q);
        if (brought || same)
            memmove(place, brought ? brought : found[0], count * sizeof *place);
        else
            find_amax(host, q, m, &coding[usage], place);
        found[usage] = place;
        n += count;
    }
    return n;
}

float nib_tensor_scale_from_amax(const nib_quantizer *q, const struct nib_coding *coding, float amax, float *scale)
{
    /* Unbiased rounding must not clip, so that the tensor scale, too, is 1/16 larger than the data. */
    if (q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED)
        amax = nib_unbiased_amax(amax);
    if (!coding->dialect->scale_of)
        return coding->dialect->tensor_scale_of(amax, &coding->rules);
    *scale = coding->dialect->scale_of(amax, &coding->rules);
    return 1.0f / *scale;
}

/* The tensor scale of one line of a usage: the caller's, or the one that follows from the amax. */
static float tensor_scale_of(const nib_quantizer *q, const nib_overrides *overrides, const struct nib_coding *coding,
                             const float *found, int64_t i, float *scale)
{
    const float *tensor_scale = override_for(overrides->tensor_scale, q, (int)coding->usage);
    if (tensor_scale && !coding->dialect->scale_of)
        return tensor_scale[i];
    if (!coding->dialect->scale_of || (!tensor_scale && !overrides->scale))
        return nib_tensor_scale_from_amax(q, coding, found ? found[i] : 0, scale);
    *scale = overrides->scale ? *overrides->scale : 1.0f / tensor_scale[i];
    return overrides->scale ? 1.0f / *scale : tensor_scale[i];
}

/* The maximum over the ranks, once all of them have succeeded so far. */
static nib_status reduce_amaxes(const nib_comm *comm, float *amax, size_t n)
{
    if (!comm)
        return NIB_OK;
    TRY(nib_agree(comm, NIB_OK, n));
    return nib_reduce(comm, "the reduction of amaxes", amax, n);
}

const nib_comm *nib_amax_comm_of(const nib_quantizer *q)
{
    nib_error before; /* the message is about something else */
    nib_get_error(&before);
    /* Of a struct that is rejected for fields of a later version this one can still be read, and the ranks told. */
    const nib_comm *comm = q && !nib_struct_check_output("quantizer", q, NIB_QUANTIZER_OLDEST) ? q->amax_comm : NULL;
    if (comm && nib_check_comm("amax_comm", comm, false))
        comm = NULL;
    (void)nib_fail(before.status, "%s", before.text);
    return comm;
}

nib_status nib_compute_tensor_scales(const nib_device *host, const nib_quantizer *q, const struct matrix *m,
                                     const nib_overrides *overrides, const struct nib_geometry *geometry,
                                     const struct nib_coding coding[2], const struct nib_usage_memory memory[2],
                                     float *scale)
{
    if (!nib_format_of(q)->tensor_scales)
        return NIB_OK;
    /* One tensor scale per usage needs hardly any memory. Vectors of amaxes are found where the tensor scales will be;
     * but if they are reduced they need memory of their own, so that the tensor is untouched if that fails, and so that
     * both can be reduced in one call. */
    enum { FEW = 2048 };
    float few[FEW], *amax = few;
    float *const in_place[2] = { memory[0].tensor_scales, memory[1].tensor_scales };
    const float *found[2];
    if (q->row_scaled && q->amax_comm) {
        const int64_t n = (q->rowwise ? geometry->usage[0].tensor_scales : 0) +
                          (q->columnwise ? geometry->usage[1].tensor_scales : 0);
        amax = n > FEW ? nib_alloc((size_t)n * sizeof *amax) : few;
        if (!amax)
            return nib_agree(q->amax_comm, nib_fail(NIB_ERR_MEMORY, "no memory for %lld amaxes", (long long)n), 0);
    }
    const bool stays = q->row_scaled && !q->amax_comm;
    const size_t n = collect_amaxes(host, q, m, overrides, geometry, coding, amax, stays ? in_place : NULL, found);
    const nib_status status = reduce_amaxes(q->amax_comm, amax, n);
    for (int usage = 0; usage < 2 && !status; usage++)
        for (int64_t i = 0; nib_wants(q, usage) && i < geometry->usage[usage].tensor_scales; i++) {
            if (overrides->amax_seen && found[usage]) /* before the tensor scale overwrites it */
                *overrides->amax_seen = nib_fmax(*overrides->amax_seen, found[usage][i]);
            memory[usage].tensor_scales[i] = tensor_scale_of(q, overrides, &coding[usage], found[usage], i, scale);
        }
    if (amax != few)
        nib_free(amax);
    return status;
}

/* ---- All amaxes of a tensor ---- */

void nib_find_amaxes(const nib_device *host, const nib_quantizer *q, const nib_array *x,
                     const struct nib_geometry *geometry, float *amax)
{
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    const struct nib_coding coding[2] = { nib_coding_of(q, NIB_ROWWISE, x->dtype),
                                          nib_coding_of(q, NIB_COLUMNWISE, x->dtype) };
    struct matrix m = matrix_of(x, geometry->rows, geometry->cols);
    cut_for_coding(&m, coding, q->columnwise);
    const float *found[2];
    const nib_fpenv saved = nib_fpenv_enter();
    (void)collect_amaxes(host, q, &m, &nothing, geometry, coding, amax, NULL, found);
    nib_fpenv_leave(saved);
}
