/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_operations.c - what is measured: the operations of `nib bench`, and one call of each. bench/count.c, which counts
 * their instructions, takes them from here too.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_cuda.h"
#include "nib_reference.h"
#include "nib_shard.h"

const struct bench_operation bench_operations[] = {
    { .name = "quantize.f32", .dtype = NIB_F32, .rowwise = 1, .main = true },
    { .name = "quantize.bf16", .dtype = NIB_BF16, .rowwise = 1, .main = true },
    { .name = "quantize.f16", .dtype = NIB_F16, .rowwise = 1 },
    { .name = "amax.f32", .dtype = NIB_F32, .what = BENCH_AMAX, .rowwise = 1 },
    { .name = "amax.bf16", .dtype = NIB_BF16, .what = BENCH_AMAX, .rowwise = 1 },
    { .name = "whole.f32", .dtype = NIB_F32, .what = BENCH_WHOLE, .rowwise = 1, .main = true },
    { .name = "whole.bf16", .dtype = NIB_BF16, .what = BENCH_WHOLE, .rowwise = 1 },
    { .name = "whole.f16", .dtype = NIB_F16, .what = BENCH_WHOLE, .rowwise = 1 },
    { .name = "columnwise.f32", .dtype = NIB_F32, .columnwise = 1, .main = true },
    { .name = "columnwise.bf16", .dtype = NIB_BF16, .columnwise = 1 },
    { .name = "rht-columnwise.f32", .dtype = NIB_F32, .columnwise = 1, .rht = 1 },
    { .name = "rht-columnwise.bf16", .dtype = NIB_BF16, .columnwise = 1, .rht = 1 },
    { .name = "both-rht.f32", .dtype = NIB_F32, .rowwise = 1, .columnwise = 1, .rht = 1, .main = true },
    { .name = "both-rht.bf16", .dtype = NIB_BF16, .rowwise = 1, .columnwise = 1, .rht = 1 },
    { .name = "square-both.f32", .dtype = NIB_F32, .rowwise = 1, .columnwise = 1, .square = 1 },
    { .name = "stochastic8.f32", .dtype = NIB_F32, .rowwise = 1, .rounding = NIB_ROUND_STOCHASTIC_8 },
    { .name = "stochastic24.f32", .dtype = NIB_F32, .rowwise = 1, .rounding = NIB_ROUND_STOCHASTIC_24 },
    { .name = "unbiased.f32", .dtype = NIB_F32, .rowwise = 1, .rounding = NIB_ROUND_STOCHASTIC_UNBIASED },
    { .name = "4over6.f32", .dtype = NIB_F32, .rowwise = 1, .rule = NIB_SCALE_4OVER6 },
    { .name = "sweep.f32", .dtype = NIB_F32, .rowwise = 1, .rule = NIB_SCALE_SWEEP },
    { .name = "weighted.f32", .dtype = NIB_F32, .rowwise = 1, .rule = NIB_SCALE_SWEEP, .weighted = true },
    { .name = "row-scaled.f32", .dtype = NIB_F32, .what = BENCH_WHOLE, .rowwise = 1, .row_scaled = 1 },
    { .name = "swizzled.f32", .dtype = NIB_F32, .rowwise = 1, .swizzled = 1 },
    { .name = "dequantize.f32", .dtype = NIB_F32, .what = BENCH_DEQUANTIZE, .rowwise = 1, .main = true },
    { .name = "dequantize.bf16", .dtype = NIB_BF16, .what = BENCH_DEQUANTIZE, .rowwise = 1, .main = true },
    { .name = "dequantize.f16", .dtype = NIB_F16, .what = BENCH_DEQUANTIZE, .rowwise = 1 },
    { .name = "dequantize-columnwise.f32", .dtype = NIB_F32, .what = BENCH_DEQUANTIZE, .columnwise = 1 },
    { .name = "dequantize-columnwise.bf16", .dtype = NIB_BF16, .what = BENCH_DEQUANTIZE, .columnwise = 1 },
    { .name = "float8.f32", .format = NIB_FLOAT8, .dtype = NIB_F32, .rowwise = 1 },
    { .name = "mxfp8.f32", .format = NIB_MXFP8, .dtype = NIB_F32, .rowwise = 1 },
    { .name = "mxfp4.f32", .format = NIB_MXFP4, .dtype = NIB_F32, .rowwise = 1 },
};
const int bench_operation_count = sizeof bench_operations / sizeof *bench_operations;

void *bench_allocate(int64_t bytes) { return aligned_alloc(4096, (size_t)(bytes + 8191) / 4096 * 4096); }

/* About normally distributed values: the sum of four uniform ones. A generator of its own, so that runs see the same data. */
static void fill_values(float *x, int64_t n)
{
    uint64_t state = 20261115;
    for (int64_t i = 0; i < n; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        int sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (int)(state >> 16 * k & 0xFFFF);
        x[i] = (float)(sum - 2 * 65536) * 0x1p-15f;
    }
}

/* n values of a dtype. A run of a million is repeated: long enough that no branch predictor learns it. */
static bool fill(void *x, nib_dtype dtype, int64_t n)
{
    enum { PIECE = 1 << 20 };
    const int64_t width = nib_dtype_bits(dtype) / 8, piece = n < PIECE ? n : PIECE;
    float *values = malloc((size_t)piece * sizeof *values);
    if (!values)
        return false;
    fill_values(values, piece);
    const bool good = nib_encode(dtype, values, (size_t)piece, x) == NIB_OK;
    for (int64_t i = piece; good && i < n; i += piece)
        memcpy((char *)x + i * width, x, (size_t)((n - i < piece ? n - i : piece) * width));
    free(values);
    return good;
}

void *bench_values(nib_dtype dtype, int64_t n)
{
    void *const values = bench_allocate(n * nib_dtype_bits(dtype) / 8);
    if (values && fill(values, dtype, n))
        return values;
    free(values);
    return NULL;
}

static nib_status quantizer_of(const struct bench_operation *operation, nib_quantizer *q)
{
    const nib_status status = nib_quantizer_init_format(q, operation->format);
    if (status)
        return status;
    q->rowwise = operation->rowwise;
    q->columnwise = operation->columnwise;
    q->rht = operation->rht;
    if (operation->square)
        q->block_dims[0] = q->block_dims[1];
    q->row_scaled = operation->row_scaled;
    q->swizzled = operation->swizzled;
    q->rounding = operation->rounding;
    q->scale_rule = operation->rule;
    return nib_quantizer_check(q, NULL);
}

/* The values that a caller knows beforehand: amaxes, or the scale of a Float8 tensor. */
static void give_amax(struct bench_call *call)
{
    static const float float8_scale = 112;
    call->amax[0] = 4;
    call->amax[1] = 8;
    call->overrides = (nib_overrides){ .bytes = sizeof call->overrides };
    if (call->operation->format == NIB_NVFP4)
        call->overrides.amax[0] = &call->amax[0], call->overrides.amax[1] = &call->amax[call->operation->rht];
    if (call->operation->format == NIB_FLOAT8)
        call->overrides.scale = &float8_scale;
}

/* Values of one sign and of all sizes within two powers of ten, as those of a calibration are. */
static nib_status give_importance(struct bench_call *call, int64_t cols)
{
    if (!call->operation->weighted)
        return NIB_OK;
    call->importance = malloc((size_t)cols * sizeof *call->importance);
    if (!call->importance)
        return NIB_ERR_MEMORY;
    fill_values(call->importance, cols);
    for (int64_t i = 0; i < cols; i++)
        call->importance[i] *= call->importance[i];
    call->overrides.importance = call->importance;
    call->overrides.importance_count = cols;
    return nib_importance_normalize(call->importance, cols, call->importance);
}

nib_status bench_call_run(struct bench_call *call)
{
    const struct bench_operation *const operation = call->operation;
    if (operation->what == BENCH_AMAX)
        return nib_group_amax(&call->q, &call->plain, &call->plain.shape[0], 1, (float *[2]){ call->amax, NULL });
    if (operation->what == BENCH_DEQUANTIZE)
        return nib_dequantize(call->tensor, operation->rowwise ? NIB_ROWWISE : NIB_COLUMNWISE, &call->plain);
    return nib_quantize_into(&call->q, &call->plain, operation->what == BENCH_WHOLE ? NULL : &call->overrides, NULL,
                             call->tensor);
}

static nib_status make_values(struct bench_call *call, int64_t rows, int64_t cols)
{
    const int64_t shape[2] = { rows, cols };
    call->values = bench_values(call->operation->dtype, rows * cols);
    return call->values ? nib_array_init(&call->plain, call->values, call->operation->dtype, 2, shape) : NIB_ERR_MEMORY;
}

nib_status bench_call_open(struct bench_call *call, int64_t rows, int64_t cols, int threads,
                           const struct bench_call *beside)
{
    nib_status status = NIB_OK;
    if (beside)
        call->plain = beside->plain;
    else
        status = make_values(call, rows, cols);
    give_amax(call);
    status = status ? status : give_importance(call, cols);
    status = status ? status : nib_host_create(threads, &call->host);
    call->plain.device = call->host;
    status = status ? status : quantizer_of(call->operation, &call->q);
    status = status ? status : nib_quantize(&call->q, &call->plain, NULL, &call->tensor);
    return status ? status : bench_call_run(call);
}

void bench_call_close(struct bench_call *call)
{
    nib_tensor_destroy(call->tensor);
    nib_device_release(call->host);
    free(call->importance);
    free(call->values);
}
