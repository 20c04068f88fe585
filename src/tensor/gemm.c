/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - the product of two quantized tensors, in an order that is fixed.
 *
 * Twice an E2M1 value is an integer of at most 12, so that the dot product of a block is exact, and so are the product
 * of two E4M3 scales and its product with the dot product. Only the additions across blocks round, and the factor that
 * comes last.
 */
#include "nib_reference.h"
#include "tensor/tensor.h"

#include "format/codec.h"
#include "base/os.h"

struct operand {
    const nib_quantizer *q;
    const struct nib_usage_geometry *geometry;
    struct nib_usage_memory memory;
    nib_usage usage;
    struct nib_rules rules;
};

struct gemm_job {
    struct operand a, b;
    float alpha;
    bool accumulate;
    const nib_array *y;
};

static nib_status operand_of(const nib_tensor *t, nib_usage wanted, struct operand *out)
{
    TRY(nib_tensor_pick(t, wanted, &out->usage));
    out->q = &t->q;
    out->geometry = &t->geometry.usage[out->usage];
    out->memory = nib_tensor_memory(t, out->usage);
    out->rules = nib_tensor_rules(t);
    return NIB_OK;
}

static float operand_tensor_scale(const struct operand *o, int64_t line)
{
    return o->memory.tensor_scales[o->q->row_scaled ? line : 0];
}

/* Two amaxes: their product, and one division. Otherwise the product of two multipliers. */
static float combined_scale(const struct operand *a, int64_t i, const struct operand *b, int64_t j)
{
    const float la = operand_tensor_scale(a, i), lb = operand_tensor_scale(b, j);
    if (a->rules.tensor_scale == NIB_TENSOR_SCALE_AMAX && b->rules.tensor_scale == NIB_TENSOR_SCALE_AMAX)
        return la * lb / (a->rules.full_scale * b->rules.full_scale);
    return nib_scale_inv(la, &a->rules) * nib_scale_inv(lb, &b->rules);
}

static float code_at(const struct operand *o, int64_t line, int64_t k)
{
    return nib_f32_from_e2m1(nib_code_load(o->geometry, o->memory.codes, line, k));
}

static float scale_at(const struct operand *o, int64_t line, int64_t block)
{
    return nib_f32_from_e4m3((uint8_t)nib_scale_load(o->geometry, o->memory.scales, line, block));
}

static void gemm_row(void *context, int64_t i)
{
    const struct gemm_job *job = context;
    const int64_t block = nib_format_of(job->a.q)->block, length = job->a.geometry->length;
    for (int64_t j = 0; j < job->b.geometry->lines; j++) {
        float acc = 0;
        for (int64_t k0 = 0; k0 < length; k0 += block) {
            float dot = 0;
            for (int64_t k = k0; k < nib_min(k0 + block, length); k++)
                dot += code_at(&job->a, i, k) * code_at(&job->b, j, k);
            acc += scale_at(&job->a, i, k0 / block) * scale_at(&job->b, j, k0 / block) * dot;
        }
        float *y = (float *)((char *)job->y->data + job->y->offset) + i * job->y->strides[0] + j * job->y->strides[1];
        const float product = job->alpha * combined_scale(&job->a, i, &job->b, j) * acc;
        *y = nib_quiet(job->accumulate ? product + *y : product);
    }
}

static nib_status check_operands(const struct gemm_job *job)
{
    const struct operand *a = &job->a, *b = &job->b;
    const nib_array *y = job->y;
    if (a->q->format != b->q->format)
        return nib_fail(NIB_ERR_MISMATCH, "the operands have different formats");
    if (!nib_format_of(a->q)->exact_dot)
        return nib_fail(NIB_ERR_UNSUPPORTED, "there is no reference GEMM for %s", nib_format_of(a->q)->name);
    if (a->geometry->length != b->geometry->length)
        return nib_fail(NIB_ERR_MISMATCH, "the inner sizes are %lld and %lld", (long long)a->geometry->length,
                        (long long)b->geometry->length);
    const bool ta = nib_usage_has_rht(a->q, a->usage), tb = nib_usage_has_rht(b->q, b->usage);
    if (ta != tb || (ta && a->q->rht_sign_mask != b->q->rht_sign_mask))
        return nib_fail(NIB_ERR_MISMATCH,
                        "one operand is transformed along the inner axis and the other is not, or differently");
    TRY(nib_check_output("y", y));
    if (y->dtype != NIB_F32)
        return nib_fail(NIB_ERR_DTYPE, "y must be F32, not %s", nib_dtypes[y->dtype].name);
    if (y->rank != 2 || y->shape[0] != a->geometry->lines || y->shape[1] != b->geometry->lines)
        return nib_fail(NIB_ERR_SHAPE, "y must be [%lld, %lld]", (long long)a->geometry->lines,
                        (long long)b->geometry->lines);
    return NIB_OK;
}

nib_status nib_gemm_reference(const nib_tensor *a, nib_usage a_usage, const nib_tensor *b, nib_usage b_usage,
                              float alpha, int accumulate, const nib_array *y)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    TRY(nib_check_same_device("b", b->device, "a", a->device));
    if (y)
        TRY(nib_check_same_device("y", y->device, "a", a->device));
    TRY(nib_check_host("nib_gemm_reference", a->device));
    struct gemm_job job = { .alpha = alpha, .accumulate = accumulate != 0, .y = y };
    TRY(operand_of(a, a_usage, &job.a));
    TRY(operand_of(b, b_usage, &job.b));
    TRY(check_operands(&job));
    int64_t work = job.a.geometry->lines;
    if (!nib_mul(work, job.b.geometry->lines, &work) || !nib_mul(work, nib_max(1, job.a.geometry->length), &work))
        work = INT64_MAX; /* more than enough for every thread */
    nib_parallel(job.a.geometry->lines, nib_thread_count(y->device, work), gemm_row, &job);
    return NIB_OK;
}
