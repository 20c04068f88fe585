/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product.c - products on a GPU. A code times its block's scale is exact in BF16, so tensor cores of any GPU multiply
 * what codes stand for: up to 64 rows by a kernel that reads the codes in place, more by cuBLASLt, from memory of the
 * device that they are expanded into, or, where it has FP4 tensor cores, as they are.
 *
 * Sums round as tensor cores do: the bound is in docs/numerics.md 14. Tensor scales stay on the device.
 */
#include "blas.h"

#include <stdio.h>

enum { MOST_ROWS = 64, LONGEST = 1 << 30 }; /* that a kernel reads codes in place for */
enum { ROWS = 32, ROWS_OF_F32 = 16 };       /* at a time */
enum { WIDEST = 1 << 25 };                  /* distance of lines of which it adds up 64 in 32 bits */

/* How a product is computed, and the memory that it needs besides. */
struct plan {
    bool few, fp4, direct;
    bool copied;                                   /* plain values are, since their elements are not side by side */
    nib_dtype dtype;                               /* of what is multiplied */
    int64_t stride;                                /* of expanded lines */
    int64_t a, b, sums, scales_a, scales_b, bytes; /* offsets, and all of it */
};

struct run {
    struct nib_cuda_device *d;
    struct nib_cuda_factors *factors; /* on the GPU */
    char *memory;
    cudaError_t error;
};

/* ---- What is taken ---- */

static nib_status check_side(const nib_device *device, const struct nib_side *side)
{
    if (!side->q || side->q->format == NIB_NVFP4)
        return NIB_OK;
    return nib_fail(NIB_ERR_UNSUPPORTED, "%s multiplies nvfp4, not %s", device->name, nib_format_name(side->q->format));
}

static bool is_row_scaled(const struct nib_product *p)
{
    return nib_side_is_row_scaled(&p->a) || nib_side_is_row_scaled(&p->b);
}

/* Whether the library can write y itself: elements side by side along one axis, where a bias lies, too. */
static bool is_direct(const struct nib_product *p, nib_dtype dtype)
{
    const struct nib_product_output *const o = &p->out;
    const bool by_rows = o->col_stride == 1 && o->row_stride >= p->b.lines,
               by_columns = o->row_stride == 1 && o->col_stride >= p->a.lines;
    const bool bias = !o->bias || (o->bias_dtype == o->dtype && (by_rows ? o->bias_col == 1 && o->bias_row == 0
                                                                         : o->bias_row == 1 && o->bias_col == 0));
    return (by_rows || by_columns) && bias && !is_row_scaled(p) && (o->dtype == NIB_F32 || o->dtype == dtype);
}

static bool has_fp4_lines(const struct nib_side *side)
{
    return side->q && !side->geometry->element_stride && (uintptr_t)side->memory.codes % 16 == 0 &&
           side->geometry->line_stride % 16 == 0;
}

static int64_t reserve(struct plan *plan, int64_t bytes)
{
    const int64_t at = plan->bytes;
    plan->bytes += nib_round_up(bytes, 256);
    return at;
}

static int64_t swizzled_bytes(const struct nib_side *side)
{
    return nib_round_up(side->lines, 128) * nib_round_up(side->geometry->blocks, 4);
}

static struct plan plan_of(const struct nib_cuda_device *d, const struct nib_product *p)
{
    const struct nib_side *const a = &p->a;
    const bool quantized = a->q != NULL;
    struct plan plan = { .few = (a->lines <= MOST_ROWS && a->length <= LONGEST) || !p->b.lines || !a->length,
                         .dtype = !quantized                ? a->dtype
                                  : p->out.dtype == NIB_F16 ? NIB_F16
                                                            : NIB_BF16,
                         .stride = nib_round_up(a->length, NIB_BLOCK) };
    const int64_t bytes = nib_dtypes[plan.dtype].bits / 8;
    plan.copied = !quantized && (a->element_stride != 1 || a->line_stride < a->length);
    plan.fp4 = quantized && d->major >= 10 && a->length % 32 == 0 && has_fp4_lines(a) && has_fp4_lines(&p->b) &&
               (!plan.few || nib_cuda_blas_serves(d)); /* few rows do not need the library */
    plan.direct = is_direct(p, plan.dtype);
    if (quantized)
        plan.a = reserve(&plan, a->lines * plan.stride * bytes);
    if (plan.few && !plan.fp4)
        return plan;
    if (plan.copied)
        plan.a = reserve(&plan, a->lines * a->length * bytes);
    plan.b = reserve(&plan, p->b.lines * plan.stride * bytes);
    if (!plan.direct)
        plan.sums = reserve(&plan, a->lines * p->b.lines * (int64_t)sizeof(float));
    if (plan.fp4 && !a->geometry->swizzled)
        plan.scales_a = reserve(&plan, swizzled_bytes(a));
    if (plan.fp4 && !p->b.geometry->swizzled)
        plan.scales_b = reserve(&plan, swizzled_bytes(&p->b));
    return plan;
}

/* ---- Steps ---- */

static struct nib_cuda_side_scale scale_of_side(const struct nib_side *side)
{
    return (struct nib_cuda_side_scale){ .values = side->q ? side->memory.tensor_scales : NULL,
                                         .per_line = nib_side_is_row_scaled(side),
                                         .rules = side->rules };
}

static struct nib_cuda_scaled_output output_of(const struct nib_product *p)
{
    return (struct nib_cuda_scaled_output){ p->out, { scale_of_side(&p->a), scale_of_side(&p->b) } };
}

/* What codes and scales stand for, exactly, as lines of values. */
static void expand(struct run *run, const struct plan *plan, const struct nib_side *side, int64_t to)
{
    struct nib_usage_memory memory = side->memory;
    memory.tensor_scales = &run->factors->one;
    struct nib_cuda_dequantization job = { .usage =
                                               nib_cuda_usage_of(side->geometry, &memory, memory.tensor_scales, false),
                                           .from = NIB_ROWWISE,
                                           .rules = side->rules,
                                           .rows = side->lines,
                                           .cols = side->length,
                                           .dtype = plan->dtype,
                                           .out = run->memory + to,
                                           .out_stride = plan->stride,
                                           .out_aligned = true };
    job.rules.tensor_scale = NIB_TENSOR_SCALE_MULTIPLIER;
    if (!run->error)
        run->error = nib_cuda_launch_dequantize(&run->d->queue, &job);
}

static void copy_values(struct run *run, const struct plan *plan, const struct nib_side *side)
{
    const struct nib_cuda_gather job = { .strided = (void *)(uintptr_t)side->values,
                                         .plain = run->memory + plan->a,
                                         .shape = { side->lines, side->length },
                                         .strides = { side->line_stride, side->element_stride },
                                         .rank = 2,
                                         .bytes = nib_dtypes[side->dtype].bits / 8 };
    if (!run->error)
        run->error = nib_cuda_launch_gather(&run->d->queue, &job, side->lines * side->length);
}

static void find_factors(struct run *run, const struct nib_product *p)
{
    const struct nib_cuda_product_factors job = { output_of(p), run->factors };
    if (!run->error)
        run->error = nib_cuda_launch_product_factors(&run->d->queue, &job);
}

static void store_sums(struct run *run, const struct nib_product *p, const float *sums)
{
    const struct nib_cuda_product_output job = { sums, p->b.lines, output_of(p) };
    if (!run->error)
        run->error = nib_cuda_launch_product_output(&run->d->queue, &job, p->a.lines * p->b.lines);
}

/* ---- Few rows ---- */

static bool is_whole(const struct nib_usage_geometry *g, const struct nib_usage_memory *memory,
                     const struct nib_cuda_few_rows *job)
{
    const int64_t bytes = nib_dtypes[job->dtype].bits / 8;
    return !g->element_stride && g->lines_per_scale == 1 && g->scale_block == 1 && g->length % 32 == 0 &&
           g->line_stride < WIDEST && g->scale_line < WIDEST &&
           ((uintptr_t)memory->codes | (uintptr_t)g->line_stride) % 16 == 0 &&
           ((uintptr_t)memory->scales | (uintptr_t)(g->swizzled ? 0 : g->scale_line)) % 2 == 0 &&
           job->element_stride == 1 && ((uintptr_t)job->x | (uintptr_t)(job->row_stride * bytes)) % 16 == 0;
}

/* What comes after n rows. */
static void skip_rows(struct nib_cuda_scaled_output *to, int64_t n)
{
    struct nib_product_output *const o = &to->out;
    o->y = (char *)o->y + n * o->row_stride * (nib_dtypes[o->dtype].bits / 8);
    if (o->bias)
        o->bias = (const char *)o->bias + n * o->bias_row * (nib_dtypes[o->bias_dtype].bits / 8);
    if (to->side[0].per_line)
        to->side[0].values += n;
}

static void multiply_few(struct run *run, const struct plan *plan, const struct nib_product *p)
{
    const struct nib_side *const a = &p->a, *const b = &p->b;
    struct nib_cuda_few_rows job = { .weight =
                                         nib_cuda_usage_of(b->geometry, &b->memory, b->memory.tensor_scales, false),
                                     .x = a->values,
                                     .dtype = plan->dtype,
                                     .row_stride = a->line_stride,
                                     .element_stride = a->element_stride,
                                     .to = output_of(p) };
    if (a->q) {
        find_factors(run, p);
        expand(run, plan, a, plan->a);
        job.x = run->memory + plan->a;
        job.row_stride = plan->stride;
        job.element_stride = 1;
    }
    job.whole = is_whole(b->geometry, &b->memory, &job);
    job.many_lines = b->lines >= (int64_t)64 * run->d->queue.processors;
    const int64_t most = job.whole && job.dtype != NIB_F32 ? ROWS : ROWS_OF_F32;
    for (int64_t first = 0; first < a->lines && !run->error; first += most) {
        job.rows = nib_min(most, a->lines - first);
        run->error = nib_cuda_launch_few_rows(&run->d->queue, &job);
        job.x = (const char *)job.x + most * job.row_stride * (nib_dtypes[job.dtype].bits / 8);
        skip_rows(&job.to, most);
    }
}

/* ---- Many rows ---- */

/* What the library is to do with two sides, which y lies along as it does: to y, or to sums. */
static nib_status multiply_dense(struct run *run, const struct plan *plan, const struct nib_product *p,
                                 struct nib_cuda_blas_side a, struct nib_cuda_blas_side b, bool *done)
{
    const bool by_rows = !plan->direct || (p->out.col_stride == 1 && p->out.row_stride >= p->b.lines);
    float *const sums = (float *)(void *)(run->memory + plan->sums);
    const struct nib_cuda_blas_product job = {
        .major = by_rows ? b : a,
        .minor = by_rows ? a : b,
        .dtype = plan->dtype,
        .length = p->a.length,
        .alpha = plan->direct ? &run->factors->alpha : &run->factors->one,
        .beta = plan->direct ? &run->factors->beta : &run->factors->zero,
        .bias = plan->direct ? p->out.bias : NULL,
        .y = plan->direct ? p->out.y : sums,
        .y_dtype = plan->direct ? p->out.dtype : NIB_F32,
        .stride = !plan->direct ? p->b.lines
                  : by_rows     ? p->out.row_stride
                                : p->out.col_stride,
        .workspace = run->memory + plan->bytes,
    };
    TRY(nib_cuda_status(run->d, "a product", run->error));
    TRY(nib_cuda_blas_multiply(run->d, &job, done));
    if (*done && !plan->direct)
        store_sums(run, p, sums);
    return nib_cuda_status(run->d, "a product", run->error);
}

static struct nib_cuda_blas_side codes_of(struct run *run, const struct nib_side *side, int64_t scales)
{
    struct nib_cuda_blas_side out = { .data = side->memory.codes,
                                      .lines = side->lines,
                                      .stride = side->geometry->line_stride * 2,
                                      .scales = side->memory.scales };
    if (side->geometry->swizzled)
        return out;
    struct nib_cuda_layout job = { .from = *side->geometry, .to = *side->geometry };
    job.source.scales = side->memory.scales;
    job.target.scales = run->memory + scales;
    if (!run->error)
        run->error = nib_cuda_launch_layout(&run->d->queue, NIB_CUDA_SWIZZLE, &job, swizzled_bytes(side));
    out.scales = run->memory + scales;
    return out;
}

static struct nib_cuda_blas_side values_of(struct run *run, const struct plan *plan, const struct nib_side *side,
                                           int64_t to)
{
    if (side->q) {
        expand(run, plan, side, to);
        return (struct nib_cuda_blas_side){ .data = run->memory + to, .lines = side->lines, .stride = plan->stride };
    }
    if (plan->copied) {
        copy_values(run, plan, side);
        return (struct nib_cuda_blas_side){ .data = run->memory + to, .lines = side->lines, .stride = side->length };
    }
    return (struct nib_cuda_blas_side){ .data = side->values, .lines = side->lines, .stride = side->line_stride };
}

static nib_status multiply_many(struct run *run, const struct plan *plan, const struct nib_product *p, bool fp4,
                                bool *done)
{
    struct nib_cuda_blas_side a, b;
    find_factors(run, p);
    a = fp4 ? codes_of(run, &p->a, plan->scales_a) : values_of(run, plan, &p->a, plan->a);
    b = fp4 ? codes_of(run, &p->b, plan->scales_b) : values_of(run, plan, &p->b, plan->b);
    return multiply_dense(run, plan, p, a, b, done);
}

static nib_status multiply(struct run *run, const struct nib_product *p)
{
    const struct plan plan = plan_of(run->d, p);
    bool done = false;
    if (!p->a.lines || !p->b.lines)
        return NIB_OK;
    if (!p->a.length) {
        store_sums(run, p, NULL);
        return nib_cuda_status(run->d, "a product", run->error);
    }
    if (plan.fp4) /* NOT RUN YET: no GPU that has FP4 tensor cores was at hand */
        TRY(multiply_many(run, &plan, p, true, &done));
    if (!done && plan.few) {
        multiply_few(run, &plan, p);
        return nib_cuda_status(run->d, "a product", run->error);
    }
    if (!done)
        TRY(multiply_many(run, &plan, p, false, &done));
    if (done)
        return NIB_OK;
    return nib_fail(NIB_ERR_UNSUPPORTED, "%s: cuBLASLt has no product of %lld by %lld by %lld", run->d->base.name,
                    (long long)p->a.lines, (long long)p->b.lines, (long long)p->a.length);
}

/* ---- Calls ---- */

static cudaError_t grow(struct nib_cuda_device *d, size_t bytes)
{
    void *memory = NULL;
    if (bytes <= d->memory_bytes)
        return cudaSuccess;
    const cudaError_t error = cudaMallocAsync(&memory, bytes, d->queue.stream);
    if (error)
        return error;
    if (d->memory)
        (void)cudaFreeAsync(d->memory, d->queue.stream);
    d->memory = memory;
    d->memory_bytes = bytes;
    return cudaSuccess;
}

/* Memory and words for all of it: the device's, an allocator's, or a graph's own. */
static cudaError_t prepare(struct run *run, size_t bytes, void **own)
{
    struct nib_cuda_device *const d = run->d;
    struct nib_cuda_place *place = d->place;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(d->queue.stream, &capture);
    const bool captured = capture != cudaStreamCaptureStatusNone;
    if (!error && captured)
        error = nib_cuda_take_place(d, &place);
    if (!error && (captured || d->allocator.allocate)) {
        if (bytes)
            error = nib_cuda_borrow(d, bytes, own);
        run->memory = *own;
    } else if (!error) {
        error = grow(d, bytes);
        run->memory = d->memory;
    }
    run->factors = &place->factors;
    return error;
}

static nib_status multiply_all(struct nib_cuda_device *d, const struct nib_product *products, size_t n, size_t bytes)
{
    struct run run = { .d = d };
    void *own = NULL;
    char what[64];
    snprintf(what, sizeof what, "a product that needs %zu bytes", bytes);
    nib_status status = nib_cuda_status(d, what, prepare(&run, bytes, &own));
    for (size_t i = 0; i < n && !status; i++)
        status = multiply(&run, &products[i]);
    if (own) {
        const nib_status freed = nib_cuda_status(d, "freeing memory", nib_cuda_give_back(d, own));
        status = status ? status : freed;
    }
    return status;
}

nib_status nib_cuda_product(nib_device *device, const struct nib_product *products, size_t n)
{
    struct nib_cuda_device *const d = nib_cuda_device_of(device);
    size_t bytes = 0;
    int before;
    for (size_t i = 0; i < n; i++) {
        TRY(check_side(device, &products[i].a));
        TRY(check_side(device, &products[i].b));
        const struct plan plan = plan_of(d, &products[i]);
        const bool library = !plan.few || plan.fp4;
        bytes = (size_t)nib_max((int64_t)bytes, plan.bytes + (library ? NIB_CUDA_BLAS_BYTES : 0));
    }
    nib_status status = nib_cuda_status(d, "a product", nib_cuda_enter(d->queue.ordinal, &before));
    if (!status) {
        pthread_mutex_lock(&d->turn);
        status = multiply_all(d, products, n, bytes);
        pthread_mutex_unlock(&d->turn);
    }
    nib_cuda_leave(before);
    return status;
}

void nib_cuda_product_close(struct nib_cuda_device *d)
{
    if (d->memory) /* not on the stream, which may be gone */
        (void)cudaFree(d->memory);
    d->memory = NULL;
}
