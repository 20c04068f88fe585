/* SPDX-License-Identifier: Apache-2.0 */
/*
 * encode.c - the second pass over an array of the host: panels of values to codes and block scales.
 */
#include "base/os.h"
#include "base/threads.h"
#include "format/codec.h"
#include "kernels/kernels_generic.h"
#include "tensor/layout.h"
#include "tensor/matrix.h"
#include "tensor/quantize.h"

struct nib_coding nib_coding_of(const nib_quantizer *q, nib_usage usage, nib_dtype input)
{
    const bool rowwise = usage == NIB_ROWWISE;
    const struct nib_format_facts *facts = nib_format_of(q);
    return (struct nib_coding){ .usage = usage,
                                .block = facts->block,
                                .tile_lines = q->block_dims[0] ? q->block_dims[0] : 1,
                                .scale_bytes = nib_dtypes[facts->scale].bits / 8,
                                .rht = nib_usage_has_rht(q, usage),
                                .sign_mask = q->rht_sign_mask,
                                .dialect = nib_dialect_of(q),
                                .rules = nib_rules_of(q, input),
                                .scale_rule = q->scale_rule,
                                .error_mode = q->error_mode,
                                .fast_error = q->fast_error,
                                .floor_code = nib_e4m3_from_f32(q->min_block_scale),
                                .rounding = q->rounding,
                                .seed = q->seed,
                                .offset = q->offset,
                                .origin_line = q->origin[rowwise ? 0 : 1],
                                .origin_block = facts->block ? q->origin[rowwise ? 1 : 0] / facts->block : 0 };
}

/* What an element costs in elements of rows to nearest, roughly and rather too little: more threads pay for slower
 * rules. */
static int64_t cost_of(const nib_quantizer *q)
{
    const int64_t rule = q->scale_rule == NIB_SCALE_SWEEP ? 8 : q->scale_rule == NIB_SCALE_4OVER6 ? 4 : 1;
    const int64_t rounding = q->rounding == NIB_ROUND_NEAREST ? 1 : 2;
    return rule * rounding * (q->columnwise ? 2 : 1);
}

struct code_job {
    const nib_quantizer *q;
    const struct matrix *m;
    nib_quantize_fn *quantize;
    nib_quantize_both_fn *quantize_both; /* or NULL */
    const struct nib_coding *coding;
    struct nib_target target[2];
};

static void quantize_panel(void *context, int64_t i)
{
    const struct code_job *job = context;
    struct panel_buffer buffer;
    const struct nib_panel panel = panel_at(job->m, i / job->m->column_panels, i % job->m->column_panels, &buffer);
    if (job->quantize_both && job->q->rowwise && job->q->columnwise) {
        job->quantize_both(&panel, job->coding, job->target);
        return;
    }
    for (int usage = 0; usage < 2; usage++)
        if (nib_wants(job->q, usage))
            job->quantize(&panel, &job->coding[usage], &job->target[usage]);
}

nib_status nib_quantize_usages(const nib_device *host, const nib_quantizer *q, const nib_array *x,
                               const nib_overrides *overrides, const struct nib_geometry *geometry,
                               const struct nib_usage_memory memory[2])
{
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    struct nib_coding coding[2] = { nib_coding_of(q, NIB_ROWWISE, x->dtype),
                                    nib_coding_of(q, NIB_COLUMNWISE, x->dtype) };
    coding[NIB_ROWWISE].importance = overrides ? overrides->importance : NULL;
    struct matrix m = matrix_of(x, geometry->rows, geometry->cols);
    cut_for_coding(&m, coding, q->columnwise);
    float scale = 1;
    const nib_fpenv saved = nib_fpenv_enter();
    const nib_status status =
        nib_compute_tensor_scales(host, q, &m, overrides ? overrides : &nothing, geometry, coding, memory, &scale);
    nib_fpenv_leave(saved);
    if (status)
        return status;

    if (q->columnwise)
        widen_cut(&m);
    struct code_job job = { .q = q,
                            .m = &m,
                            .quantize = NIB_KERNEL(quantize, q->format),
                            .quantize_both = NIB_KERNEL(quantize_both, q->format),
                            .coding = coding };
    for (int usage = 0; usage < 2; usage++) {
        job.target[usage] = (struct nib_target){ .codes = memory[usage].codes,
                                                 .scales = memory[usage].scales,
                                                 .geometry = &geometry->usage[usage],
                                                 .tensor_scales = memory[usage].tensor_scales,
                                                 .tensor_scale_per_line = q->row_scaled,
                                                 .scale = scale };
        if (nib_wants(q, usage) && memory[usage].scales)
            nib_zero_scale_padding(&geometry->usage[usage], memory[usage].scales);
    }
    const int threads = nib_thread_count(host, m.rows * m.cols * cost_of(q));
    nib_parallel(m.row_panels * m.column_panels, threads, quantize_panel, &job);
    return NIB_OK;
}

nib_status nib_lines_geometry(const nib_quantizer *q, const nib_array *x, nib_quantizer *lines,
                              struct nib_geometry *geometry)
{
    TRY(nib_quantizer_load(q, lines));
    lines->rowwise = 1;
    lines->columnwise = lines->swizzled = 0;
    TRY(nib_check_input(lines, x->dtype, x->rank, x->shape, geometry));
    struct nib_usage_geometry *g = &geometry->usage[NIB_ROWWISE];
    g->scale_shape[0] = g->valid_shape[0];
    g->scale_shape[1] = g->scale_line = g->valid_shape[1];
    g->scales_bytes = g->valid_shape[0] * g->valid_shape[1] * g->scale_bytes;
    return NIB_OK;
}

nib_status nib_quantize_lines(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                              const struct nib_usage_memory *memory)
{
    nib_quantizer lines;
    struct nib_geometry geometry;
    TRY(nib_lines_geometry(q, x, &lines, &geometry));
    const struct nib_usage_memory usages[2] = { [NIB_ROWWISE] = *memory };
    return nib_quantize_usages(nib_device_of(x->device), &lines, x, overrides, &geometry, usages);
}
