/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gptq.c - the codes of a weight, one column after the other, each making up for the errors of those before it:
 *
 *     q = value(code(w[j] * e)) * f,  r[j] = (w[j] - q) / u[j][j],  w[k] = w[k] - r[j] * u[j][k] for all k behind j
 *
 * with the factors e and f of the row's block. Every w[k] is one chain in the order of j, each operation rounded to FP32,
 * so that it does not matter when a part of the chain is computed: here the whole of it just before a column is rounded,
 * for PANEL columns, then for STEP, then for one. Rows know nothing of each other. They are worked on in groups, whose
 * columns lie one behind the other.
 */
#include <float.h>

#include "base/os.h"
#include "tensor/gptq.h"
#include "tensor/matrix.h"
#include "tensor/tensor.h"

enum { PANEL = 128, STEP = 16, MOST_ROWS = 128 };

struct job {
    nib_subtract_fn *subtract;
    nib_round_column_fn *round_column;
    struct nib_coding coding;
    const struct matrix *m;
    const struct nib_usage_geometry *geometry;
    struct nib_usage_memory memory;
    bool tensor_scale_per_line;
    const int32_t *order;
    const float *u;
    int64_t group, lanes; /* rows of a group; shares of the work, each with memory of its own */
    char *scratch;
    size_t lane_bytes;
};

/* The memory of a lane, for a group of rows: columns of [group] values each. */
struct lane {
    float *w;                        /* [cols]: in the order in which they are rounded; then what is left over them */
    float *factors, *decode_factors; /* [blocks] */
    float *u;                        /* [PANEL][PANEL], so that what is read again and again lies together */
    uint8_t *codes;                  /* [cols], in the matrix's order */
    int64_t first, rows;             /* of the matrix */
    bool finite[MOST_ROWS];
};

static size_t lane_bytes(int64_t group, int64_t cols, int64_t blocks)
{
    return (size_t)nib_round_up((cols + 2 * blocks) * group * (int64_t)sizeof(float) + PANEL * PANEL * 4 + cols * group,
                                64);
}

static struct lane lane_at(const struct job *job, int64_t index)
{
    const int64_t group = job->group, blocks = job->geometry->blocks;
    struct lane lane = { .w = (float *)(void *)(job->scratch + (size_t)index * job->lane_bytes) };
    lane.factors = lane.w + job->m->cols * group;
    lane.decode_factors = lane.factors + blocks * group;
    lane.u = lane.decode_factors + blocks * group;
    lane.codes = (uint8_t *)(lane.u + PANEL * PANEL);
    return lane;
}

static float value_at(const struct job *job, int64_t row, int64_t col)
{
    return nib_load_value(element_at(job->m, row, col), 0, job->m->dtype);
}

/* ---- A group of rows ---- */

/* The values in their order. A row that has one which is not finite is worked on as zeros, and left as it was. */
static void load_values(const struct job *job, struct lane *lane)
{
    for (int64_t r = 0; r < job->group; r++)
        lane->finite[r] = true;
    for (int64_t j = 0; j < job->m->cols; j++)
        for (int64_t r = 0; r < job->group; r++) {
            const float value = r < lane->rows ? value_at(job, lane->first + r, job->order[j]) : 0;
            lane->finite[r] &= nib_abs(value) <= FLT_MAX;
            lane->w[j * job->group + r] = value;
        }
    for (int64_t r = 0; r < lane->rows; r++)
        for (int64_t j = 0; j < job->m->cols && !lane->finite[r]; j++)
            lane->w[j * job->group + r] = 0;
}

/* A scale of 0 stands for zeros: under factors of 0 codes are 0, with the sign of the value. */
static void load_factors(const struct job *job, struct lane *lane)
{
    const struct nib_dialect_facts *dialect = job->coding.dialect;
    for (int64_t r = 0; r < job->group; r++) {
        const int64_t row = lane->first + nib_min(r, lane->rows - 1);
        struct nib_scaler scaler = { .tensor_scale = job->memory.tensor_scales[job->tensor_scale_per_line ? row : 0] };
        dialect->prepare(&scaler, &job->coding.rules);
        for (int64_t b = 0; b < job->geometry->blocks; b++) {
            const nib_scale_bits scale = nib_scale_load(job->geometry, job->memory.scales, row, b);
            const bool zero = (scale & 0x7F) == 0;
            lane->factors[b * job->group + r] = zero ? 0 : dialect->factor(scale, 0, &scaler, &job->coding.rules);
            lane->decode_factors[b * job->group + r] =
                zero ? 0 : dialect->decode_factor(scale, scaler.tensor_scale, &job->coding.rules);
        }
    }
}

/* Columns first..first+count-1, less what the columns before them left over. */
static void settle(const struct job *job, struct lane *lane, int64_t first, int64_t count)
{
    const int64_t group = job->group, cols = job->m->cols;
    for (int64_t p = 0; p < first; p += PANEL) {
        for (int64_t k = 0; k < PANEL; k++)
            memcpy(lane->u + k * PANEL, job->u + (p + k) * cols + first, (size_t)count * sizeof *lane->u);
        job->subtract(lane->w + first * group, group, lane->u, PANEL, lane->w + p * group, group, count, group, PANEL);
    }
}

static void round_panel(const struct job *job, struct lane *lane, int64_t first, int64_t count)
{
    const int64_t group = job->group, cols = job->m->cols;
    for (int64_t k = 0; k < count; k++) {
        const int64_t j = first + k, step = k / STEP * STEP, block = job->order[j] / NIB_BLOCK * group;
        const float *u = job->u + first * cols + first;
        float *w = lane->w + first * group;
        if (k == step)
            job->subtract(w + k * group, group, u + k, cols, w, group, nib_min(STEP, count - k), group, k);
        job->subtract(w + k * group, group, u + step * cols + k, cols, w + step * group, group, 1, group, k - step);
        job->round_column(w + k * group, lane->factors + block, lane->decode_factors + block, u[k * cols + k], group,
                          lane->codes + job->order[j] * group);
    }
}

/* A zero has the sign that the weight had. */
static void store_codes(const struct job *job, const struct lane *lane)
{
    for (int64_t c = 0; c < job->m->cols; c++)
        for (int64_t r = 0; r < lane->rows; r++) {
            const uint8_t code = lane->codes[c * job->group + r];
            if (!lane->finite[r])
                continue;
            nib_code_store(job->geometry, job->memory.codes, lane->first + r, c,
                           code < NIB_CODE_OF_ZERO ? code
                                                   : (uint8_t)(nib_bits(value_at(job, lane->first + r, c)) >> 31 << 3));
        }
}

static void work_on_groups(void *context, int64_t index)
{
    const struct job *job = context;
    struct lane lane = lane_at(job, index);
    for (lane.first = index * job->group; lane.first < job->m->rows; lane.first += job->lanes * job->group) {
        lane.rows = nib_min(job->group, job->m->rows - lane.first);
        load_values(job, &lane);
        load_factors(job, &lane);
        for (int64_t j = 0; j < job->m->cols; j += PANEL) {
            const int64_t count = nib_min(PANEL, job->m->cols - j);
            settle(job, &lane, j, count);
            round_panel(job, &lane, j, count);
        }
        store_codes(job, &lane);
    }
}

/* ---- A matrix ---- */

nib_status nib_gptq_usage(const nib_device *host, const struct nib_kernels *kernels, const nib_quantizer *q,
                          const nib_array *x, const struct nib_geometry *geometry,
                          const struct nib_usage_memory *memory, const int32_t *order, const float *u)
{
    const struct matrix m = matrix_of(x, geometry->rows, geometry->cols);
    const struct nib_kernels *use = kernels ? kernels : nib_kernels_best();
    struct job job = { .subtract = use->subtract[NIB_F32],
                       .round_column = use->round_column[NIB_NVFP4],
                       .coding = nib_coding_of(q, NIB_ROWWISE, x->dtype),
                       .m = &m,
                       .geometry = &geometry->usage[NIB_ROWWISE],
                       .memory = *memory,
                       .tensor_scale_per_line = q->row_scaled,
                       .order = order,
                       .u = u };
    if (m.rows == 0 || m.cols == 0)
        return NIB_OK;
    const int64_t cost = nib_min(m.cols / 8 + 1, INT32_MAX / (m.rows + 1) + 1); /* of an element, in elements */
    const int threads = nib_thread_count(host, m.rows * nib_min(m.cols, 1 << 20) * cost);
    job.group = nib_min(MOST_ROWS, nib_round_up(nib_ceil_div(m.rows, threads), NIB_SUBTRACT_STEP));
    job.lanes = nib_min(threads, nib_ceil_div(m.rows, job.group));
    job.lane_bytes = lane_bytes(job.group, m.cols, job.geometry->blocks);
    job.scratch = nib_alloc((size_t)job.lanes * job.lane_bytes);
    if (!job.scratch)
        return nib_fail(NIB_ERR_MEMORY, "no memory for GPTQ of %lld columns", (long long)m.cols);
    nib_parallel(job.lanes, threads, work_on_groups, &job);
    nib_free(job.scratch);
    return NIB_OK;
}

nib_status nib_gptq_lines(const nib_quantizer *q, const nib_array *x, const struct nib_usage_memory *memory,
                          const int32_t *order, const float *u)
{
    nib_quantizer lines;
    struct nib_geometry geometry;
    TRY(nib_lines_geometry(q, x, &lines, &geometry));
    return nib_gptq_usage(nib_device_of(x->device), NULL, &lines, x, &geometry, memory, order, u);
}

/* ---- The call ---- */

static nib_status check_tensor(const nib_array *x, const nib_tensor *t)
{
    const nib_quantizer *q = &t->q;
    const struct {
        bool rejected;
        nib_status status;
        const char *why;
    } rules[] = {
        { q->format != NIB_NVFP4 || q->dialect != NIB_DIALECT_TE, NIB_ERR_MODE, "NVFP4 of the dialect te" },
        { q->block_dims[0] != 1, NIB_ERR_MODE, "blocks of 1x16" },
        { q->rht_rowwise, NIB_ERR_MODE, "values without an RHT" },
        { q->rounding != NIB_ROUND_NEAREST, NIB_ERR_MODE, "rounding to nearest" },
        { !nib_tensor_has(t, NIB_ROWWISE) || nib_tensor_has(t, NIB_COLUMNWISE), NIB_ERR_USAGE,
          "a tensor with the rowwise usage alone" },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].rejected)
            return nib_fail(rules[i].status, "GPTQ takes %s", rules[i].why);
    bool same = x->rank == t->rank;
    for (int i = 0; i < t->rank && same; i++)
        same = x->shape[i] == t->shape[i];
    return same ? NIB_OK : nib_fail(NIB_ERR_MISMATCH, "the array does not have the shape of the tensor");
}

/* Whether it is an order, and the diagonal can be divided by. */
static nib_status check_factor(const int32_t *order, const float *u, int64_t n)
{
    uint8_t *seen = nib_alloc_zeroed((size_t)n);
    if (!seen)
        return nib_fail(NIB_ERR_MEMORY, "no memory to check an order of %lld columns", (long long)n);
    nib_status status = NIB_OK;
    for (int64_t j = 0; j < n && !status; j++) {
        const float pivot = u[j * n + j];
        if (order[j] < 0 || order[j] >= n || seen[order[j]])
            status = nib_fail(NIB_ERR_ARG, "order[%lld] is %ld: each of the %lld columns must be there once",
                              (long long)j, (long)order[j], (long long)n);
        else if (!(pivot >= FLT_MIN && pivot <= FLT_MAX))
            status = nib_fail(NIB_ERR_ARG, "u[%lld][%lld] is %g: the diagonal must be positive and finite",
                              (long long)j, (long long)j, (double)pivot);
        else
            seen[order[j]] = 1;
    }
    nib_free(seen);
    return status;
}

nib_status nib_gptq(const nib_array *x, const int32_t *order, const float *u, int64_t n, nib_tensor *t)
{
    NIB_REQUIRE(x);
    NIB_REQUIRE(order);
    NIB_REQUIRE(u);
    NIB_REQUIRE(t);
    TRY(nib_check_array("x", x));
    TRY(nib_check_host("nib_gptq", x->device));
    TRY(nib_check_host("nib_gptq", t->device));
    TRY(check_tensor(x, t));
    TRY(nib_quantizer_check(&t->q, x));
    if (n != t->geometry.cols)
        return nib_fail(NIB_ERR_MISMATCH, "the factor has %lld columns, and the tensor %lld", (long long)n,
                        (long long)t->geometry.cols);
    TRY(check_factor(order, u, n));
    const struct nib_usage_memory memory = nib_tensor_memory(t, NIB_ROWWISE);
    return nib_gptq_usage(nib_device_of(x->device), NULL, &t->q, x, &t->geometry, &memory, order, u);
}
