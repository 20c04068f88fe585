/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.c - drives the kernels over an array of any rank and strides.
 *
 * The array is seen as a matrix of M rows and K columns and cut into panels, whose size depends on the matrix and on what
 * is wanted of it, never on the threads that share the work. Where rows are contiguous a panel points into the array;
 * elsewhere it is copied to the worker's stack first. Panels are whole blocks on both axes, so no two write the same
 * byte, and neither how a matrix is cut nor which thread takes which panel shows in the result.
 */
#include "tensor/quantize.h"

#include <float.h>
#include <stdatomic.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "format/codec.h"
#include "kernels/kernels_generic.h"
#include "base/os.h"

/* Most lines of a panel in either direction while amaxes are found, and most elements of one that is copied. */
enum { PANEL_LINES = 256, PANEL_ELEMENTS = 128 * 128 };

/* A panel of which columns are wanted: it stays in the second-level cache and gives each a run of 16 blocks. */
enum { COLUMN_ROWS = 256, COLUMN_COLS = 128 };

/* Elements that follow one another and are worth the setup of a panel and the work of a thread. */
enum { PANEL_RUN = 65536 };

/* Rows and columns of a panel. */
struct cut {
    int64_t rows, cols;
};

/* ---- Threads ---- */

int nib_thread_count(const nib_quantizer *q, int64_t elements)
{
    int threads = 1;
#ifdef _OPENMP
    threads = q->threads ? (int)q->threads : omp_get_max_threads();
#else
    (void)q;
#endif
    if (!nib_threads_usable())
        return 1;
    return (int)nib_max(1, nib_min(threads, elements / NIB_ELEMENTS_PER_THREAD));
}

static void run_serially(int64_t n, void (*body)(void *context, int64_t i), void *context)
{
    const nib_fpenv saved = nib_fpenv_enter();
    for (int64_t i = 0; i < n; i++)
        body(context, i);
    nib_fpenv_leave(saved);
}

void nib_parallel(int64_t n, int threads, void (*body)(void *context, int64_t i), void *context)
{
#ifdef _OPENMP
    if (threads > 1 && n > 1) { /* otherwise not even a team of one: after a fork it could not be had */
#pragma omp parallel num_threads(threads)
        {
            const nib_fpenv saved = nib_fpenv_enter();
#pragma omp for schedule(static)
            for (int64_t i = 0; i < n; i++)
                body(context, i);
            nib_fpenv_leave(saved);
        }
        return;
    }
#else
    (void)threads; /* callers outside this file ask for as many as there are processors */
#endif
    run_serially(n, body, context);
}

/* ---- An array as a matrix ---- */

struct matrix {
    char *first; /* element (0, 0) */
    int bytes;   /* of an element */
    nib_dtype dtype;
    int64_t rows, cols;
    int64_t row_stride, col_stride; /* in elements; row_stride only when `even` */
    bool even;                      /* rows are equally far apart */
    const nib_array *array;
    struct cut cut;
    int64_t row_panels, column_panels;
};

static struct matrix matrix_of(const nib_array *array, int64_t rows, int64_t cols)
{
    struct matrix m = { .bytes = nib_dtypes[array->dtype].bits / 8,
                        .dtype = array->dtype,
                        .rows = rows,
                        .cols = cols,
                        .col_stride = array->rank ? array->strides[array->rank - 1] : 1,
                        .even = true,
                        .array = array };
    m.first = array->data ? (char *)array->data + array->offset : NULL;
    /* From the last leading dim outwards: each must step over the ones inside it exactly. Dims of 1 are never
     * stepped. */
    int64_t inner = 1, step;
    for (int i = array->rank - 2; i >= 0; i--) {
        if (array->shape[i] == 1)
            continue;
        if (inner == 1)
            m.row_stride = array->strides[i];
        else if (!nib_mul(m.row_stride, inner, &step) || array->strides[i] != step) /* too far: of an empty array */
            m.even = false;
        inner *= array->shape[i];
    }
    return m;
}

/* Whether a panel can point into the array. */
static bool is_direct(const struct matrix *m) { return m->even && m->col_stride == 1; }

static void set_cut(struct matrix *m, int64_t rows, int64_t cols)
{
    m->cut = (struct cut){ rows, cols };
    m->row_panels = nib_ceil_div(m->rows, rows);
    m->column_panels = nib_ceil_div(m->cols, cols);
}

/* Panels are whole blocks. Where only rows are wanted they are whole rows as well, unless a row, or sixteen that share
 * their blocks, is longer than PANEL_RUN: what follows in memory is read in one go. What must be copied is smaller. */
static void cut_for_coding(struct matrix *m, const struct nib_coding *coding, bool columns)
{
    const int64_t lines = coding->tile_lines, most_cols = PANEL_RUN / lines;
    const int64_t rows = PANEL_RUN / nib_min(nib_max(m->cols, 1), most_cols) / lines * lines;
    if (coding->block > 32 || (!is_direct(m) && coding->block > 16))
        set_cut(m, 128, 128);
    else if (!is_direct(m))
        set_cut(m, 16, 256);
    else if (columns)
        set_cut(m, COLUMN_ROWS, COLUMN_COLS);
    else
        set_cut(m, nib_min(rows, PANEL_LINES), most_cols);
}

/* For codes, wider panels where columns of FP32 are wanted, since longer pieces of rows come faster from memory; BF16 and
 * FP16 gain nothing. Many threads should still have several each. */
static void widen_cut(struct matrix *m)
{
    enum { WIDE = 512, PANELS = 64 };
    const bool narrow = m->cut.rows == COLUMN_ROWS && m->cut.cols == COLUMN_COLS;
    if (narrow && m->bytes == 4 && m->row_panels * nib_ceil_div(m->cols, WIDE) >= PANELS)
        set_cut(m, COLUMN_ROWS, WIDE);
}

static char *element_at(const struct matrix *m, int64_t row, int64_t col)
{
    int64_t offset = row * m->row_stride;
    if (!m->even) {
        offset = 0;
        for (int i = m->array->rank - 2; i >= 0; i--) {
            offset += row % m->array->shape[i] * m->array->strides[i];
            row /= m->array->shape[i];
        }
    }
    return m->first + (offset + col * m->col_stride) * m->bytes;
}

/* Memory for a panel that cannot be pointed at. */
struct stage {
    _Alignas(64) char bytes[PANEL_ELEMENTS * sizeof(float)];
};

/* The panel in row `i` and column `j` of panels. */
static struct nib_panel panel_at(const struct matrix *m, int64_t i, int64_t j, struct stage *stage)
{
    const int64_t row = i * m->cut.rows, col = j * m->cut.cols;
    struct nib_panel panel = { .dtype = m->dtype,
                               .stride = m->row_stride,
                               .row = row,
                               .col = col,
                               .rows = nib_min(m->cut.rows, m->rows - row),
                               .cols = nib_min(m->cut.cols, m->cols - col) };
    if (is_direct(m)) {
        panel.x = element_at(m, row, col);
        return panel;
    }
    for (int64_t r = 0; r < panel.rows; r++) {
        const char *from = element_at(m, row + r, col);
        char *to = stage->bytes + r * m->cut.cols * m->bytes;
        for (int64_t c = 0; c < panel.cols; c++)
            memcpy(to + c * m->bytes, from + c * m->col_stride * m->bytes, (size_t)m->bytes);
    }
    panel.x = stage->bytes;
    panel.stride = m->cut.cols;
    return panel;
}

/* ---- Amaxes ---- */

struct amax_job {
    const struct matrix *m;
    const struct nib_coding *coding;
    nib_absmax_fn *absmax;
    nib_absmax_lines_fn *absmax_lines;
    float *per_line;        /* one per line, or NULL */
    _Atomic uint32_t whole; /* of all, in nib_raise_to's way */
};

void nib_raise_to(_Atomic uint32_t *whole, float value)
{
    uint32_t seen = atomic_load_explicit(whole, memory_order_relaxed);
    while (nib_bits(value) > seen && !atomic_compare_exchange_weak_explicit(whole, &seen, nib_bits(value),
                                                                            memory_order_relaxed, memory_order_relaxed))
        ;
}

/* A stretch of an array without gaps. */
static void amax_of_stretch(void *context, int64_t i)
{
    struct amax_job *job = context;
    const int64_t first = i * PANEL_RUN, n = nib_min(PANEL_RUN, job->m->rows * job->m->cols - first);
    nib_raise_to(&job->whole, job->absmax(job->m->first + first * job->m->bytes, n));
}

/* One panel of the data as it is. */
static void amax_of_panel(void *context, int64_t i)
{
    struct amax_job *job = context;
    struct stage stage;
    const struct nib_panel panel = panel_at(job->m, i / job->m->column_panels, i % job->m->column_panels, &stage);
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
        struct stage stage;
        const struct nib_panel panel = panel_at(job->m, rowwise ? i : j, rowwise ? j : i, &stage);
        job->absmax_lines(&panel, job->coding, lines);
        count = rowwise ? panel.rows : panel.cols;
    }
    for (int64_t line = 0; line < count; line++) {
        if (job->per_line)
            job->per_line[i * (rowwise ? job->m->cut.rows : job->m->cut.cols) + line] = lines[line];
        nib_raise_to(&job->whole, lines[line]);
    }
}

/* The amax of a copy, or one per line of it, into out. */
static void find_amax(const nib_quantizer *q, const struct matrix *m, const struct nib_coding *coding, float *out)
{
    struct amax_job job = { .m = m,
                            .coding = coding,
                            .absmax = nib_kernels_best()->absmax[m->dtype],
                            .absmax_lines = NIB_KERNEL(absmax_lines, q->format),
                            .per_line = q->row_scaled ? out : NULL };
    const int threads = nib_thread_count(q, m->rows * m->cols);
    const int64_t lines = coding->usage == NIB_ROWWISE ? m->rows : m->cols;
    if (q->row_scaled)
        memset(out, 0, (size_t)lines * sizeof *out); /* lines without elements */
    const bool gapless = is_direct(m) && (m->row_stride == m->cols || m->rows == 1);
    if (!q->row_scaled && !coding->rht && gapless)
        nib_parallel(nib_ceil_div(m->rows * m->cols, PANEL_RUN), threads, amax_of_stretch, &job);
    else if (!q->row_scaled && !coding->rht)
        nib_parallel(m->row_panels * m->column_panels, threads, amax_of_panel, &job);
    else
        nib_parallel(coding->usage == NIB_ROWWISE ? m->row_panels : m->column_panels, threads, amax_of_lines, &job);
    if (!q->row_scaled)
        *out = nib_float(job.whole);
}

/* ---- Levels ---- */

static bool wants(const nib_quantizer *q, int usage) { return usage == NIB_ROWWISE ? q->rowwise : q->columnwise; }

/* Where both usages hold the same data under one number. */
static bool usages_share(const nib_quantizer *q) { return !q->row_scaled && !q->rht && !q->rht_rowwise; }

/* The number of `copy` that the caller brought; one serves both usages where they share it. */
static const float *override_for(const float *const overrides[2], const nib_quantizer *q, int usage)
{
    return overrides[usage] ? overrides[usage] : usages_share(q) ? overrides[1 - usage] : NULL;
}

/* Whether the tensor scale of a copy comes from the data, so that its amax must be known. */
static bool needs_amax(const nib_quantizer *q, const nib_overrides *overrides, int usage)
{
    const bool finished = override_for(overrides->tensor_scale, q, usage) || overrides->scale;
    return wants(q, usage) && nib_format_of(q)->tensor_scales && (!finished || overrides->amax_seen);
}

/* Whether the amaxes of a copy take memory: those that the caller brought are used where they are, unless they are still
 * to be reduced. */
static bool keeps_amax(const nib_quantizer *q, const nib_overrides *overrides, int usage)
{
    return needs_amax(q, overrides, usage) && (q->amax_comm || !override_for(overrides->amax, q, usage));
}

/* The amaxes that are needed, side by side from `amax` on, which is what a reduction is made of; or, where in_place is
 * not NULL, those of each usage there. */
static size_t collect_amaxes(const nib_quantizer *q, const struct matrix *m, const nib_overrides *overrides,
                             const struct nib_geometry *geometry, const struct nib_coding coding[2], float *amax,
                             float *const *in_place, const float *found[2])
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
            find_amax(q, m, &coding[usage], place);
        found[usage] = place;
        n += count;
    }
    return n;
}

float nib_tensor_scale_from_amax(const nib_quantizer *q, const struct nib_coding *coding, float amax, float *encode)
{
    /* Unbiased rounding must not clip, so that the tensor scale, too, is 1/16 larger than the data. */
    if (q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED)
        amax = nib_fmin(amax * (17.0f / 16.0f), FLT_MAX);
    if (!coding->dialect->encode_of)
        return coding->dialect->tensor_scale_of(amax, &coding->rules);
    *encode = coding->dialect->encode_of(amax, &coding->rules);
    return 1.0f / *encode;
}

/* The tensor scale of one line of a copy: the caller's, or one that follows from the amax. */
static float tensor_scale_of(const nib_quantizer *q, const nib_overrides *overrides, const struct nib_coding *coding,
                             const float *found, int64_t i, float *encode)
{
    const float *tensor_scale = override_for(overrides->tensor_scale, q, (int)coding->usage);
    if (tensor_scale && !coding->dialect->encode_of)
        return tensor_scale[i];
    if (!coding->dialect->encode_of || (!tensor_scale && !overrides->scale))
        return nib_tensor_scale_from_amax(q, coding, found ? found[i] : 0, encode);
    *encode = overrides->scale ? *overrides->scale : 1.0f / tensor_scale[i];
    return overrides->scale ? 1.0f / *encode : tensor_scale[i];
}

/* The maximum over the ranks, once all of them have come so far. */
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
    const nib_comm *comm = q && q->bytes >= sizeof *q ? q->amax_comm : NULL;
    if (!comm || !nib_check_comm("amax_comm", comm, false))
        return comm;
    (void)nib_fail(before.status, "%s", before.text);
    return NULL;
}

static nib_status compute_tensor_scales(const nib_quantizer *q, const struct matrix *m, const nib_overrides *overrides,
                                        const struct nib_geometry *geometry, const struct nib_coding coding[2],
                                        const struct nib_usage_memory memory[2], float *encode)
{
    if (!nib_format_of(q)->tensor_scales)
        return NIB_OK;
    /* One tensor scale per copy needs no memory to speak of. Vectors of amaxes are found where the tensor scales will be; but if they
     * are reduced they need a place of their own, so that the tensor is untouched if that fails, and so that both can
     * be reduced in one call. */
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
    const size_t n = collect_amaxes(q, m, overrides, geometry, coding, amax, stays ? in_place : NULL, found);
    const nib_status status = reduce_amaxes(q->amax_comm, amax, n);
    for (int usage = 0; usage < 2 && !status; usage++)
        for (int64_t i = 0; wants(q, usage) && i < geometry->usage[usage].tensor_scales; i++) {
            if (overrides->amax_seen && found[usage]) /* before the tensor scale takes its place */
                *overrides->amax_seen = nib_fmax(*overrides->amax_seen, found[usage][i]);
            memory[usage].tensor_scales[i] = tensor_scale_of(q, overrides, &coding[usage], found[usage], i, encode);
        }
    if (amax != few)
        nib_free(amax);
    return status;
}

/* ---- Codes ---- */

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
    struct stage stage;
    const struct nib_panel panel = panel_at(job->m, i / job->m->column_panels, i % job->m->column_panels, &stage);
    if (job->quantize_both && job->q->rowwise && job->q->columnwise) {
        job->quantize_both(&panel, job->coding, job->target);
        return;
    }
    for (int usage = 0; usage < 2; usage++)
        if (wants(job->q, usage))
            job->quantize(&panel, &job->coding[usage], &job->target[usage]);
}

void nib_zero_scale_padding(const struct nib_usage_geometry *g, void *scales)
{
    const int64_t size = g->scale_bytes;
    if (g->swizzled) { /* the padding is scattered: all of it, since every scale is written again */
        memset(scales, 0, (size_t)g->scales_bytes);
        return;
    }
    char *const bytes = scales;
    const int64_t rows = g->valid_shape[0], length = g->scale_shape[1] * size, valid = g->valid_shape[1] * size;
    for (int64_t row = 0; row < rows && valid < length; row++) /* on the right */
        memset(bytes + row * length + valid, 0, (size_t)(length - valid));
    memset(bytes + rows * length, 0, (size_t)((g->scale_shape[0] - rows) * length)); /* below */
}

void nib_find_amaxes(const nib_quantizer *q, const nib_array *x, const struct nib_geometry *geometry, float *amax)
{
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    const struct nib_coding coding[2] = { nib_coding_of(q, NIB_ROWWISE, x->dtype),
                                          nib_coding_of(q, NIB_COLUMNWISE, x->dtype) };
    struct matrix m = matrix_of(x, geometry->rows, geometry->cols);
    cut_for_coding(&m, coding, q->columnwise);
    const float *found[2];
    const nib_fpenv saved = nib_fpenv_enter();
    (void)collect_amaxes(q, &m, &nothing, geometry, coding, amax, NULL, found);
    nib_fpenv_leave(saved);
}

nib_status nib_quantize_usages(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                               const struct nib_geometry *geometry, const struct nib_usage_memory memory[2])
{
    static const nib_overrides nothing = { .bytes = sizeof nothing };
    const struct nib_coding coding[2] = { nib_coding_of(q, NIB_ROWWISE, x->dtype),
                                          nib_coding_of(q, NIB_COLUMNWISE, x->dtype) };
    struct matrix m = matrix_of(x, geometry->rows, geometry->cols);
    cut_for_coding(&m, coding, q->columnwise);
    float encode = 1;
    const nib_fpenv saved = nib_fpenv_enter();
    const nib_status status =
        compute_tensor_scales(q, &m, overrides ? overrides : &nothing, geometry, coding, memory, &encode);
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
                                                 .encode = encode };
        if (wants(q, usage) && memory[usage].scales)
            nib_zero_scale_padding(&geometry->usage[usage], memory[usage].scales);
    }
    const int threads = nib_thread_count(q, m.rows * m.cols * cost_of(q));
    nib_parallel(m.row_panels * m.column_panels, threads, quantize_panel, &job);
    return NIB_OK;
}

/* ---- Back ---- */

/* Most elements of a line that are decoded at a time where that needs memory: a panel's, and a block that begins before
 * it. */
enum { DECODE_LINES = 256, DECODE_LENGTH = DECODE_LINES + NIB_MAX_BLOCK };

struct decode_job {
    const nib_quantizer *q;
    nib_decode_fn *decode;
    struct nib_coding coding;
    const struct nib_usage_geometry *geometry;
    const struct nib_usage_memory *memory;
    int64_t first; /* the matrix row that is row 0 of out */
    struct matrix out;
    bool stream;
};

/* Elements first..first+n-1 of a line, where `first` begins a block; n is at most DECODE_LENGTH where scales do not lie
 * side by side and are gathered for the kernel. `codes` are those of a line that does not lie side by side, otherwise
 * NULL. */
static void decode_line(const struct decode_job *job, int64_t line, int64_t first, int64_t n, const uint8_t *codes,
                        void *y, nib_dtype dtype)
{
    const struct nib_usage_geometry *g = job->geometry;
    const int64_t block = job->coding.block;
    uint8_t gathered[DECODE_LENGTH * sizeof(nib_scale_bits)];
    const void *scales = gathered;
    if (block && !g->swizzled && g->scale_block == 1)
        scales = (const char *)job->memory->scales + nib_scale_index(g, line, first / block) * g->scale_bytes;
    else
        for (int64_t b = 0; block && b < nib_ceil_div(n, block); b++) {
            const nib_scale_bits bits = nib_scale_load(g, job->memory->scales, line, first / block + b);
            memcpy(gathered + b * g->scale_bytes, &bits, (size_t)g->scale_bytes);
        }
    if (!codes)
        codes = job->memory->codes + line * g->line_stride + (g->element_stride ? first : first / 2);
    const float tensor_scale =
        job->memory->tensor_scales ? job->memory->tensor_scales[job->q->row_scaled ? line : 0] : 1;
    job->decode(y, dtype, codes, scales, n, tensor_scale, &job->coding, job->stream);
}

/* The same, through the transform back where there is one: then n is at most DECODE_LENGTH. */
static void restore_line(const struct decode_job *job, int64_t line, int64_t first, int64_t n, const uint8_t *codes,
                         void *y)
{
    float transformed[DECODE_LENGTH];
    if (!job->coding.rht) {
        decode_line(job, line, first, n, codes, y, job->out.dtype);
        return;
    }
    decode_line(job, line, first, n, codes, transformed, NIB_F32);
    nib_kernels_best()->inverse_rht[job->out.dtype](y, transformed, n, job->coding.sign_mask);
}

/* Numbers of the output's dtype to their places, along a row or down a column. */
static void scatter_line(const struct matrix *out, int64_t row, int64_t col, int64_t n, bool down, const char *y)
{
    for (int64_t i = 0; i < n; i++)
        memcpy(element_at(out, row + (down ? i : 0), col + (down ? 0 : i)), y + i * out->bytes, (size_t)out->bytes);
}

static void decode_rows(const struct decode_job *job, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    const struct matrix *out = &job->out;
    char y[DECODE_LENGTH * sizeof(float)];
    for (int64_t r = row; r < row + rows; r++)
        if (out->col_stride == 1) {
            restore_line(job, job->first + r, col, cols, NULL, element_at(out, r, col));
        } else {
            restore_line(job, job->first + r, col, cols, NULL, y);
            scatter_line(out, r, col, cols, false, y);
        }
}

/* Lines of numbers, `stride` bytes apart, as columns of the output. Its rows may be so far apart that they share their
 * places in the cache: what goes to them passes through memory of its own and is written once. */
enum { COLUMNS_BYTES = 256 };

static void store_columns(const struct matrix *out, int64_t row, int64_t rows, int64_t col, int64_t lines,
                          const char *values, int64_t stride)
{
    enum { ROWS = 64 };
    nib_transpose_fn *const transpose = nib_kernels_best()->transpose[out->dtype == NIB_F32 ? NIB_F32 : NIB_BF16];
    _Alignas(64) uint8_t turned[ROWS * COLUMNS_BYTES];
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t n = nib_min(ROWS, rows - r);
        for (int64_t i = 0; i < n; i++) /* far apart, they arrive in time only if they are asked for */
            for (int64_t at = 0; at < lines * out->bytes; at += 64)
                __builtin_prefetch(element_at(out, row + r + i, col) + at, 1);
        transpose((const uint8_t *)values + r * out->bytes, stride, lines, n, turned, COLUMNS_BYTES);
        for (int64_t i = 0; i < n; i++)
            memcpy(element_at(out, row + r + i, col), turned + i * COLUMNS_BYTES, (size_t)(lines * out->bytes));
    }
}

/* Lines of the columnwise usage run down the output. As many as make a few cache lines of it are decoded side by side and
 * transposed. They are decoded in whole blocks, so that a panel that does not begin at a border takes a few elements
 * more than it needs. */
static void decode_columns(const struct decode_job *job, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    const struct matrix *out = &job->out;
    const struct nib_usage_geometry *g = job->geometry;
    const struct nib_kernels *kernels = nib_kernels_best();
    const int64_t block = nib_max(job->coding.block, 1), start = (job->first + row) / block * block;
    const int64_t n = nib_min(nib_round_up(job->first + row + rows, block), g->length) - start;
    const int64_t stride = DECODE_LENGTH * out->bytes, skip = (job->first + row - start) * out->bytes;
    const int64_t width = COLUMNS_BYTES / out->bytes, per_byte = g->element_stride ? 1 : 2;
    enum { AHEAD = 8 };
    _Alignas(64) char values[COLUMNS_BYTES * DECODE_LENGTH];
    uint8_t codes[COLUMNS_BYTES / 2 * DECODE_LENGTH];
    for (int64_t c = col; c < col + cols; c += width) {
        const int64_t lines = nib_min(width, col + cols - c);
        const bool scattered = g->by_element; /* and so not by lines, which are columns */
        if (scattered)
            kernels->transpose[NIB_U8](job->memory->codes + start * g->element_stride + c, g->element_stride, n, lines,
                                       codes, DECODE_LENGTH);
        for (int64_t l = 0; l < lines; l++) {
            /* Those of a few lines ahead, which are far apart. (In a function of its own, gcc takes this for nothing.) */
            const int64_t next = nib_min(c + l + AHEAD, g->lines - 1);
            for (int64_t i = 0; i < n / per_byte && !scattered; i += 64)
                __builtin_prefetch(job->memory->codes + next * g->line_stride + start / per_byte + i);
            if (job->coding.block && g->scale_block == 1)
                __builtin_prefetch((const char *)job->memory->scales +
                                   nib_scale_index(g, next, start / job->coding.block) * g->scale_bytes);
            restore_line(job, c + l, start, n, scattered ? codes + l * DECODE_LENGTH : NULL, values + l * stride);
        }
        if (is_direct(out))
            store_columns(out, row, rows, c, lines, values + skip, stride);
        for (int64_t l = 0; l < lines && !is_direct(out); l++)
            scatter_line(out, row, c + l, rows, true, values + l * stride + skip);
    }
}

static void decode_panel(void *context, int64_t i)
{
    const struct decode_job *job = context;
    const struct matrix *out = &job->out;
    const int64_t row = i / out->column_panels * out->cut.rows, col = i % out->column_panels * out->cut.cols;
    const int64_t rows = nib_min(out->cut.rows, out->rows - row), cols = nib_min(out->cut.cols, out->cols - col);
    if (job->coding.usage == NIB_ROWWISE)
        decode_rows(job, row, rows, col, cols);
    else
        decode_columns(job, row, rows, col, cols);
}

/* Whether nothing lies between a row's end and the next one's beginning, here or there: what is decoded in long runs is
 * decoded faster. */
static bool rows_are_one_line(const struct decode_job *job)
{
    const struct nib_usage_geometry *g = job->geometry;
    const int64_t cols = job->out.cols, block = job->coding.block, per_byte = g->element_stride ? 1 : 2;
    const bool codes = g->line_stride * per_byte == cols;
    const bool scales = !block || (g->lines_per_scale == 1 && g->scale_line * block == cols);
    return codes && scales && !job->q->row_scaled && job->out.even && job->out.row_stride == cols;
}

static void join_rows(struct matrix *m)
{
    m->cols *= m->rows;
    m->rows = 1;
}

void nib_dequantize_usage(const nib_quantizer *q, const struct nib_geometry *geometry, nib_usage from,
                          const struct nib_usage_memory *memory, int64_t first, int64_t count, const nib_array *out)
{
    enum { STREAM_BYTES = 8 << 20 }; /* more than a core's share of the caches */
    struct decode_job job = { .q = q,
                              .decode = NIB_KERNEL(decode, q->format),
                              .coding = nib_coding_of(q, from, NIB_F32),
                              .geometry = &geometry->usage[from],
                              .memory = memory,
                              .first = first,
                              .out = matrix_of(out, count, geometry->cols) };
    const bool straight = from == NIB_ROWWISE && job.out.col_stride == 1 && !job.coding.rht;
    const bool side_by_side = !geometry->usage[from].swizzled && geometry->usage[from].scale_block == 1;
    job.stream = straight && count * geometry->cols * job.out.bytes >= STREAM_BYTES;
    if (straight && side_by_side && rows_are_one_line(&job))
        join_rows(&job.out);
    if (straight && side_by_side)
        set_cut(&job.out, nib_max(1, PANEL_RUN / nib_max(job.out.cols, 1)), PANEL_RUN);
    else if (from == NIB_ROWWISE)
        set_cut(&job.out, 16, DECODE_LINES);
    else
        set_cut(&job.out, DECODE_LINES, 128);
    nib_parallel(job.out.row_panels * job.out.column_panels, nib_thread_count(q, count * geometry->cols), decode_panel,
                 &job);
}
