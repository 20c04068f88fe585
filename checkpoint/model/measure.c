/* SPDX-License-Identifier: Apache-2.0 */
/*
 * measure.c - what quantization did to a weight: errors, losses and histograms, in panels of rows and on threads.
 *
 * Sums are kept for each row, in double, and added in the order of rows, so that neither threads nor memory decide the
 * last digit. Within a row they are sums of blocks of 16, in float.
 */
#include "model/measure.h"

#include <math.h>
#include <stdatomic.h>

#include "format/codec.h"
#include "base/os.h"
#include "model/architectures.h"
#include "model/read.h"
#include "tensor/quantize.h"

/* Elements of a panel that is read row by row. Rows of a transposed tensor lie apart: many are read at once. */
enum { BLOCK = 16, PANEL_ELEMENTS = 1 << 18, DEFAULT_MEMORY = 512 << 20 };
/* Rows whose sums are kept at once. */
enum { BATCH_ROWS = 1 << 18 };
/* Of the first version that is still served: 0.2. */
enum { STATS_OLDEST = NIB_UP_TO(nib_weight_stats, worst_blocks) };

nib_status nib_ck_job(const char *what, const nib_job *overrides, nib_job *out)
{
    nib_job job;
    nib_job_init(&job);
    if (overrides)
        TRY(nib_struct_read(what, overrides, &job, sizeof job, NIB_JOB_OLDEST));
    if (job.threads < 0)
        return nib_fail(NIB_ERR_ARG, "%s: %d threads; 0 takes one for each processor", what, (int)job.threads);
    if (!job.threads)
        job.threads = nib_os_processors();
    if (!nib_threads_usable())
        job.threads = 1;
    if (!job.max_memory)
        job.max_memory = DEFAULT_MEMORY;
    *out = job;
    return NIB_OK;
}

nib_status nib_ck_report(const nib_job *job, const char *phase, const char *tensor, uint64_t done, uint64_t total)
{
    if (!job->progress)
        return NIB_OK;
    const nib_progress progress = { sizeof progress, phase, tensor, done, total, NULL };
    if (job->progress(job->context, &progress))
        return nib_fail(NIB_ERR_CANCELLED, "%s: stopped by the caller", phase);
    return NIB_OK;
}

double nib_stats_sqnr(const nib_weight_stats *stats)
{
    if (!stats || nib_struct_check("nib_weight_stats", stats, sizeof *stats, STATS_OLDEST))
        return NAN;
    if (stats->error_squares == 0)
        return INFINITY;
    return 10 * log10(stats->sum_squares / stats->error_squares);
}

/* ---- One block ---- */

typedef float lanes __attribute__((vector_size(16)));
typedef int32_t bits __attribute__((vector_size(16)));
enum { LANES = 4 };

static inline lanes load(const float *x)
{
    lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline lanes magnitude(lanes x) { return (lanes)((bits)x & 0x7FFFFFFF); }

static inline lanes larger(lanes a, lanes b)
{
    const bits pick = a > b;
    return (lanes)(((bits)a & pick) | ((bits)b & ~pick));
}

struct block_sums {
    float squares, errors, amax, worst;
    int32_t zeroed, clipped;
};

static float add_lanes(lanes v) { return (v[0] + v[2]) + (v[1] + v[3]); }

static float max_lanes(lanes v)
{
    float most = v[0];
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
}

/* Sixteen elements; what is not finite shows in the sums. */
static inline struct block_sums measure_block(const float *a, const float *b, float limit)
{
    const lanes zero = { 0 };
    lanes squares = zero, errors = zero, amax = zero, worst = zero;
    bits zeroed = { 0 }, clipped = { 0 };
    for (int i = 0; i < BLOCK; i += LANES) {
        const lanes x = load(a + i), y = load(b + i), d = y - x, m = magnitude(x);
        squares += x * x;
        errors += d * d;
        amax = larger(m, amax);
        worst = larger(magnitude(d), worst);
        zeroed -= (y == zero) & (x != zero);
        clipped -= m > limit;
    }
    return (struct block_sums){ add_lanes(squares),
                                add_lanes(errors),
                                max_lanes(amax),
                                max_lanes(worst),
                                zeroed[0] + zeroed[1] + zeroed[2] + zeroed[3],
                                clipped[0] + clipped[1] + clipped[2] + clipped[3] };
}

/* ---- Rows ---- */

struct row_sums {
    double squares, errors;
};

/* What one worker has found. */
struct tally {
    nib_weight_stats stats;
    int64_t pairs[4][256]; /* bytes of two codes; several, or equal bytes would wait for one another */
};

/* Infinite where one of the two is not finite, unless both are the same. */
static double error_of(float a, float b)
{
    if (isfinite(a) && isfinite(b))
        return fabs((double)b - (double)a);
    return a == b || (isnan(a) && isnan(b)) ? 0 : INFINITY;
}

/* The slow way, for ends of rows and for what is infinite or overflows: of an element of a that is not finite only the
 * error counts. */
static void measure_elements(const float *a, const float *b, int64_t n, float limit, int64_t row, int64_t col,
                             struct row_sums *sums, nib_weight_stats *stats)
{
    for (int64_t i = 0; i < n; i++) {
        const bool finite = isfinite(a[i]);
        const double x = finite ? a[i] : 0, error = error_of(a[i], b[i]);
        stats->nonfinite += !finite;
        sums->squares += x * x;
        sums->errors += error * error;
        stats->amax = fmax(stats->amax, fabs(x));
        stats->zeroed += b[i] == 0 && x != 0;
        stats->clipped += fabs(x) > limit;
        if (error > stats->max_error) {
            stats->max_error = error;
            stats->max_error_row = row;
            stats->max_error_col = col + i;
        }
    }
}

static void add_block(const struct block_sums *sums, const float *a, const float *b, int64_t row, int64_t col,
                      nib_weight_stats *stats)
{
    stats->amax = fmax(stats->amax, sums->amax);
    stats->zeroed += sums->zeroed;
    stats->clipped += sums->clipped;
    if (sums->worst <= stats->max_error)
        return;
    stats->max_error = sums->worst;
    stats->max_error_row = row;
    for (int i = BLOCK - 1; i >= 0; i--)
        if (fabsf(b[i] - a[i]) == sums->worst)
            stats->max_error_col = col + i;
}

/* Whether one place is worse than another: a total order, so that lists do not depend on who found what first. */
static bool is_worse(const nib_worst *a, const nib_worst *b)
{
    if (a->error_squares != b->error_squares)
        return a->error_squares > b->error_squares;
    return a->row != b->row ? a->row < b->row : a->col < b->col;
}

static void note_worst(nib_worst *list, const nib_worst *place)
{
    int i = NIB_WORST;
    if (place->error_squares == 0)
        return;
    while (i > 0 && is_worse(place, &list[i - 1]))
        i--;
    if (i == NIB_WORST)
        return;
    memmove(&list[i + 1], &list[i], (size_t)(NIB_WORST - 1 - i) * sizeof *list);
    list[i] = *place;
}

/* One row; scales is NULL where b has none of these blocks. limits[s]: the most that a block of scale byte s holds. */
static struct row_sums measure_row(const float *a, const float *b, int64_t cols, int64_t row, const uint8_t *scales,
                                   const float *limits, nib_weight_stats *stats)
{
    struct row_sums sums = { 0, 0 };
    for (int64_t col = 0; col < cols; col += BLOCK) {
        const int64_t n = nib_min(BLOCK, cols - col);
        const float limit = scales ? limits[scales[col / BLOCK]] : INFINITY;
        const struct row_sums before = sums;
        nib_worst place = { .row = row, .col = col };
        if (n == BLOCK) {
            const struct block_sums block = measure_block(a + col, b + col, limit);
            if (isfinite(block.squares) && isfinite(block.errors)) {
                sums.squares += block.squares;
                sums.errors += block.errors;
                place.sum_squares = block.squares;
                place.error_squares = block.errors;
                add_block(&block, a + col, b + col, row, col, stats);
            } else {
                measure_elements(a + col, b + col, n, limit, row, col, &sums, stats);
            }
        } else {
            measure_elements(a + col, b + col, n, limit, row, col, &sums, stats);
        }
        if (scales && (scales[col / BLOCK] & 0x7F) < 8)
            stats->underflowed += sums.squares > before.squares;
        if (place.error_squares == 0 && sums.errors > before.errors) { /* the slow way */
            place.sum_squares = sums.squares - before.squares;
            place.error_squares = isinf(sums.errors) ? INFINITY : sums.errors - before.errors;
        }
        if (place.error_squares >= stats->worst_blocks[NIB_WORST - 1].error_squares)
            note_worst(stats->worst_blocks, &place);
    }
    const nib_worst whole = { .row = row, .sum_squares = sums.squares, .error_squares = sums.errors };
    note_worst(stats->worst_rows, &whole);
    return sums;
}

static void count_codes(const uint8_t *codes, const uint8_t *scales, int64_t cols, struct tally *tally)
{
    int64_t i = 0;
    for (; i + 4 <= cols / 2; i += 4)
        for (int k = 0; k < 4; k++)
            tally->pairs[k][codes[i + k]]++;
    for (; i < cols / 2; i++)
        tally->pairs[0][codes[i]]++;
    if (cols % 2)
        tally->stats.codes[codes[i] & 15]++;
    for (int64_t block = 0; block < nib_ceil_div(cols, BLOCK); block++)
        tally->stats.scales[scales[block]]++;
}

/* ---- Weights ---- */

struct measuring {
    const nib_checkpoint *a, *b;
    const struct nib_ck_weight *weight_a, *weight_b;
    const nib_job *job;
    bool same; /* a is b: read once */
    bool coded;
    float tensor_scale;
    float limits[256];
    int64_t panel_rows;
    struct row_sums *rows; /* of the batch */
    int64_t begin, end;    /* its rows */
    atomic_llong next;     /* row that nobody has taken yet */
    atomic_int stop;
    atomic_flag busy; /* somebody is telling the progress */
    uint64_t done_before, total;
    atomic_ullong done;
    struct tally *tallies;
    nib_error *errors; /* of each worker */
};

/* How much a block with each scale byte can hold. */
static nib_status find_limits(struct measuring *m)
{
    nib_tensor_scale kind;
    float tensor_scale;
    TRY(nib_ck_read_tensor_scale(m->b, m->weight_b, &kind, &tensor_scale));
    m->tensor_scale = tensor_scale;
    const float full = 6 * (float)(m->weight_b->e4m3_max ? m->weight_b->e4m3_max : 448);
    for (int i = 0; i < 256; i++) {
        const float s = nib_f32_from_e4m3((uint8_t)i);
        const float factor = kind == NIB_TENSOR_SCALE_MULTIPLIER ? s * tensor_scale
                             : kind == NIB_TENSOR_SCALE_DIVISOR  ? s / tensor_scale
                             : kind == NIB_TENSOR_SCALE_AMAX     ? s * tensor_scale * (1 / full)
                                                                 : s;
        m->limits[i] = nib_abs(factor) * 6;
    }
    return NIB_OK;
}

static nib_status measure_panel(struct measuring *m, int64_t first, int64_t count, float *a, float *b, uint8_t *codes,
                                uint8_t *scales, struct tally *tally)
{
    const int64_t cols = m->weight_a->cols;
    if (!m->same)
        TRY(nib_ck_read_rows(m->a, m->weight_a, first, count, NIB_F32, a));
    if (m->coded) {
        TRY(nib_ck_read_codes(m->b, m->weight_b, first, count, codes, scales));
        TRY(nib_ck_decode(m->weight_b, m->tensor_scale, codes, scales, count, NIB_F32, b));
    } else {
        TRY(nib_ck_read_rows(m->b, m->weight_b, first, count, NIB_F32, b));
    }
    const int64_t code_bytes = nib_ceil_div(cols, 2), blocks = nib_ceil_div(cols, BLOCK);
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *row_scales = m->coded ? scales + i * blocks : NULL;
        m->rows[first - m->begin + i] = measure_row((m->same ? b : a) + i * cols, b + i * cols, cols, first + i,
                                                    row_scales, m->limits, &tally->stats);
        if (m->coded)
            count_codes(codes + i * code_bytes, row_scales, cols, tally);
    }
    return NIB_OK;
}

/* What a weight takes as plain values. */
static uint64_t nominal_bytes(const struct nib_ck_weight *w)
{
    return (uint64_t)(w->rows * w->cols) * (uint64_t)nib_dtypes[w->dtype].bits / 8;
}

/* Tell the caller, unless another worker is at it. */
static nib_status tell(struct measuring *m, int64_t rows)
{
    const uint64_t bytes = (uint64_t)rows * nominal_bytes(m->weight_a) / (uint64_t)nib_max(m->weight_a->rows, 1);
    const uint64_t done = atomic_fetch_add(&m->done, bytes) + m->done_before;
    if (!m->job->progress || atomic_flag_test_and_set(&m->busy))
        return NIB_OK;
    const nib_status status = nib_ck_report(m->job, "comparing", m->weight_a->name, done, m->total);
    atomic_flag_clear(&m->busy);
    return status;
}

static nib_status work(struct measuring *m, struct tally *tally)
{
    const int64_t cols = m->weight_a->cols, panel = m->panel_rows;
    float *a = nib_alloc(m->same ? 0 : (size_t)(panel * cols) * sizeof *a);
    float *b = nib_alloc((size_t)(panel * cols) * sizeof *b);
    uint8_t *codes = nib_alloc((size_t)(m->coded ? panel * nib_ceil_div(cols, 2) : 0));
    uint8_t *scales = nib_alloc((size_t)(m->coded ? panel * nib_ceil_div(cols, BLOCK) : 0));
    nib_status status = NIB_OK;
    if (!a || !b || !codes || !scales)
        status = nib_fail(NIB_ERR_MEMORY, "no memory for %lld rows of %s", (long long)panel, m->weight_a->name);
    while (!status && !atomic_load(&m->stop)) {
        const int64_t first = atomic_fetch_add(&m->next, panel);
        if (first >= m->end)
            break;
        const int64_t count = nib_min(panel, m->end - first);
        status = measure_panel(m, first, count, a, b, codes, scales, tally);
        if (!status)
            status = tell(m, count);
    }
    nib_free(a);
    nib_free(b);
    nib_free(codes);
    nib_free(scales);
    return status;
}

static void run_worker(void *context, int64_t i)
{
    struct measuring *m = context;
    const nib_status status = work(m, &m->tallies[i]);
    if (!status)
        return;
    nib_get_error(&m->errors[i]); /* the message is this thread's */
    atomic_store(&m->stop, 1);
}

/* Add up what the workers have. The worst element is the first of the worst. */
static void merge(nib_weight_stats *out, const struct tally *tally)
{
    const nib_weight_stats *in = &tally->stats;
    const bool first = in->max_error == out->max_error &&
                       (in->max_error_row < out->max_error_row ||
                        (in->max_error_row == out->max_error_row && in->max_error_col < out->max_error_col));
    if (in->max_error > out->max_error || (first && in->max_error > 0)) {
        out->max_error = in->max_error;
        out->max_error_row = in->max_error_row;
        out->max_error_col = in->max_error_col;
    }
    out->amax = fmax(out->amax, in->amax);
    out->zeroed += in->zeroed;
    out->clipped += in->clipped;
    out->underflowed += in->underflowed;
    out->nonfinite += in->nonfinite;
    for (int i = 0; i < 16; i++)
        out->codes[i] += in->codes[i];
    for (int i = 0; i < NIB_WORST; i++) {
        note_worst(out->worst_rows, &in->worst_rows[i]);
        note_worst(out->worst_blocks, &in->worst_blocks[i]);
    }
    for (int i = 0; i < 256; i++) {
        out->scales[i] += in->scales[i];
        for (int k = 0; k < 4; k++) {
            out->codes[i & 15] += tally->pairs[k][i];
            out->codes[i >> 4] += tally->pairs[k][i];
        }
    }
}

/* Rows of a panel, and how many workers have memory for one. */
static int plan_panels(struct measuring *m)
{
    const int64_t rows = m->weight_a->rows, cols = m->weight_a->cols;
    const bool apart = m->weight_a->transposed || m->weight_b->transposed;
    /* Numbers of both, and codes and scales. */
    const uint64_t row_bytes = (uint64_t)cols * 9 + 1;
    const int64_t fit = (int64_t)(m->job->max_memory / 2 / row_bytes), usual = PANEL_ELEMENTS / nib_max(cols, 1);
    m->panel_rows = nib_max(1, nib_min(nib_min(apart ? fit : usual, fit), rows));
    const uint64_t bytes = (uint64_t)m->panel_rows * row_bytes +
                           nib_ck_read_overhead(m->a, m->weight_a, m->panel_rows, NIB_F32) +
                           nib_ck_read_overhead(m->b, m->weight_b, m->panel_rows, NIB_F32);
    const int64_t useful = nib_ceil_div(nib_max(rows, 1), m->panel_rows);
    return (int)nib_max(1, nib_min(nib_min(useful, m->job->threads), (int64_t)(m->job->max_memory / bytes)));
}

static nib_status run_workers(struct measuring *m, nib_weight_stats *out)
{
    const int64_t rows = m->weight_a->rows, cols = m->weight_a->cols;
    const int workers = plan_panels(m);
    m->rows = nib_alloc((size_t)nib_min(nib_max(rows, 1), BATCH_ROWS) * sizeof *m->rows);
    m->tallies = nib_alloc_zeroed((size_t)workers * sizeof *m->tallies);
    m->errors = nib_alloc_zeroed((size_t)workers * sizeof *m->errors);
    nib_status status = NIB_OK;
    if (!m->rows || !m->tallies || !m->errors)
        status = nib_fail(NIB_ERR_MEMORY, "no memory for the sums of %s", m->weight_a->name);
    nib_weight_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.bytes = sizeof stats;
    stats.elements = rows * cols;
    stats.blocks = m->coded ? rows * nib_ceil_div(cols, BLOCK) : 0;
    for (m->begin = 0; !status && m->begin < rows; m->begin = m->end) {
        m->end = nib_min(rows, m->begin + BATCH_ROWS);
        atomic_store(&m->next, m->begin);
        nib_parallel(workers, workers, run_worker, m);
        for (int i = 0; !status && i < workers; i++)
            if (m->errors[i].status)
                status = nib_fail(m->errors[i].status, "%s", m->errors[i].text);
        for (int64_t i = 0; !status && i < m->end - m->begin; i++) {
            stats.sum_squares += m->rows[i].squares;
            stats.error_squares += m->rows[i].errors;
        }
    }
    for (int i = 0; !status && i < workers; i++)
        merge(&stats, &m->tallies[i]);
    nib_free(m->rows);
    nib_free(m->tallies);
    nib_free(m->errors);
    if (!status)
        *out = stats;
    return status;
}

/* Of weights by index; `done` of `total` bytes are behind us. */
static nib_status measure(const nib_checkpoint *a, size_t a_index, const nib_checkpoint *b, size_t b_index,
                          const nib_job *job, uint64_t done, uint64_t total, nib_weight_stats *out)
{
    struct nib_ck_weight own_a, own_b;
    size_t found;
    if (!nib_ck_counterpart(a, a_index, b, &found, &own_a, &own_b) || found != b_index) {
        own_a = a->weights[a_index];
        own_b = b->weights[b_index];
    }
    const struct nib_ck_weight *wa = &own_a, *wb = &own_b;
    if (wa->rows != wb->rows || wa->cols != wb->cols)
        return nib_fail(NIB_ERR_MISMATCH, "%s is [%lld, %lld] in %s and [%lld, %lld] in %s", wa->name,
                        (long long)wa->rows, (long long)wa->cols, a->path, (long long)wb->rows, (long long)wb->cols,
                        b->path);
    struct measuring m = {
        .a = a, .b = b, .weight_a = wa, .weight_b = wb, .job = job, .same = a == b && a_index == b_index
    };
    m.done_before = done;
    m.total = total;
    m.coded = nib_ck_is_nvfp4(wb->format);
    atomic_flag_clear(&m.busy);
    const nib_fpenv saved = nib_fpenv_enter();
    nib_status status = m.coded ? find_limits(&m) : NIB_OK;
    if (!status)
        status = run_workers(&m, out);
    nib_fpenv_leave(saved);
    return status;
}

nib_status nib_checkpoint_measure(const nib_checkpoint *a, size_t a_index, const nib_checkpoint *b, size_t b_index,
                                  const nib_job *job, nib_weight_stats *out)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("nib_checkpoint_measure: out", out, STATS_OLDEST));
    if (a_index >= a->n_weights || b_index >= b->n_weights)
        return nib_fail(NIB_ERR_ARG, "nib_checkpoint_measure: weights %zu and %zu; there are %zu and %zu", a_index,
                        b_index, a->n_weights, b->n_weights);
    nib_job own;
    nib_weight_stats stats;
    TRY(nib_ck_job("nib_checkpoint_measure: job", job, &own));
    TRY(measure(a, a_index, b, b_index, &own, 0, nominal_bytes(&a->weights[a_index]), &stats));
    nib_struct_write(out, &stats, sizeof stats);
    return NIB_OK;
}

nib_status nib_checkpoint_compare(const nib_checkpoint *a, const nib_checkpoint *b, const nib_job *job,
                                  int (*each)(void *context, const nib_compared *compared), void *context,
                                  size_t *only_a, size_t *only_b)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(each);
    nib_job own;
    TRY(nib_ck_job("nib_checkpoint_compare: job", job, &own));
    uint64_t done = 0, total = 0;
    size_t common = 0, index;
    for (size_t i = 0; i < a->n_weights; i++)
        total += nominal_bytes(&a->weights[i]);
    for (size_t i = 0; i < a->n_weights; i++) {
        const struct nib_ck_weight *w = &a->weights[i];
        struct nib_ck_weight own_a, own_b;
        if (nib_ck_counterpart(a, i, b, &index, &own_a, &own_b) && w->rows == b->weights[index].rows &&
            w->cols == b->weights[index].cols) {
            nib_weight_stats stats = { .bytes = sizeof stats };
            nib_compared compared = { .bytes = sizeof compared,
                                      .name = w->name,
                                      .rows = w->rows,
                                      .cols = w->cols,
                                      .format_a = w->format,
                                      .format_b = b->weights[index].format,
                                      .stats = &stats };
            TRY(measure(a, i, b, index, &own, done, total, &stats));
            if (each(context, &compared))
                return nib_fail(NIB_ERR_CANCELLED, "comparing: stopped by the caller");
            common++;
        }
        done += nominal_bytes(w);
    }
    if (only_a)
        *only_a = a->n_weights - common;
    if (only_b)
        *only_b = b->n_weights - common;
    return NIB_OK;
}
