/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.c - codes back to values, into an array of the host of any strides.
 */
#include "base/threads.h"
#include "kernels/kernels_generic.h"
#include "tensor/matrix.h"
#include "tensor/product.h"
#include "tensor/quantize.h"

/* The most elements of a line that are decoded at a time where that needs memory: those of a panel, and of a block that
 * begins before it. */
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
 * side by side and are gathered for the kernel. `codes` are the gathered codes of a line whose codes do not lie side by
 * side, otherwise NULL. */
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

/* The same, transformed back where there is an RHT: then n is at most DECODE_LENGTH. */
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

/* Values of the output's dtype to their places, along a row or down a column. */
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

/* Lines of values, `stride` bytes apart, as columns of the output. Its rows may be so far apart that they share their
 * places in the cache: what goes to them passes through a buffer and is written once. */
enum { COLUMNS_BYTES = 256 };

static void store_columns(const struct matrix *out, int64_t row, int64_t rows, int64_t col, int64_t lines,
                          const char *values, int64_t stride)
{
    enum { ROWS = 64 };
    nib_transpose_fn *const transpose = nib_kernels_best()->transpose[out->dtype == NIB_F32 ? NIB_F32 : NIB_BF16];
    _Alignas(64) uint8_t transposed[ROWS * COLUMNS_BYTES];
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t n = nib_min(ROWS, rows - r);
        for (int64_t i = 0; i < n; i++) /* far apart, they arrive in time only if they are asked for */
            for (int64_t at = 0; at < lines * out->bytes; at += 64)
                __builtin_prefetch(element_at(out, row + r + i, col) + at, 1);
        transpose((const uint8_t *)values + r * out->bytes, stride, lines, n, transposed, COLUMNS_BYTES);
        for (int64_t i = 0; i < n; i++)
            memcpy(element_at(out, row + r + i, col), transposed + i * COLUMNS_BYTES, (size_t)(lines * out->bytes));
    }
}

/* Lines of the columnwise usage run down the output. As many as make a few cache lines of it are decoded side by side and
 * transposed. They are decoded in whole blocks, so that for a panel that does not begin at a border a few elements more
 * are decoded than it needs. */
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
            /* Those of a few lines ahead, which are far apart. (In a function of its own, gcc removes this as dead.) */
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

/* Whether nothing lies between the end of a row and the beginning of the next, in the tensor and in the output: long runs
 * are decoded faster. */
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

void nib_dequantize_usage(const nib_device *host, const nib_quantizer *q, const struct nib_geometry *geometry,
                          nib_usage from, const struct nib_usage_memory *memory, int64_t first, int64_t count,
                          const nib_array *out)
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
    nib_parallel(job.out.row_panels * job.out.column_panels, nib_thread_count(host, count * geometry->cols),
                 decode_panel, &job);
}

void nib_decode_lines(const struct nib_side *side, int64_t first, int64_t count, float *out, int64_t stride)
{
    const struct nib_usage_geometry *g = side->geometry;
    const int64_t step = DECODE_LENGTH / NIB_MAX_BLOCK * NIB_MAX_BLOCK;
    const bool scattered = g->element_stride > 1;
    struct decode_job job = { .q = side->q,
                              .decode = NIB_KERNEL(decode, side->q->format),
                              .coding = nib_coding_of(side->q, side->usage, NIB_F32),
                              .geometry = g,
                              .memory = &side->memory,
                              .out = { .dtype = NIB_F32 } };
    uint8_t codes[DECODE_LENGTH];
    for (int64_t line = first; line < first + count; line++)
        for (int64_t at = 0; at < g->length; at += step) {
            const int64_t n = nib_min(step, g->length - at);
            for (int64_t i = 0; i < n && scattered; i++)
                codes[i] = nib_code_load(g, side->memory.codes, line, at + i);
            restore_line(&job, line, at, n, scattered ? codes : NULL, out + (line - first) * stride + at);
        }
}
