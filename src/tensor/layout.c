/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.c - transposes and swizzles, both made of the kernels' transposes; usages built, cut, compared.
 *
 * A tile of swizzled scales is 128 lines of four blocks: 32 rows of four words, and word (i, j) is the four scales of
 * line i + 32 j. Lines i, i + 32, i + 64 and i + 96 are therefore a matrix of four rows of words whose transpose is row
 * i of every tile.
 */
#include "tensor/layout.h"

#include "kernels/kernels.h"
#include "nib_reference.h"

/* ---- Codes ---- */

enum { LINES = 128 }; /* of the result that one thread writes at a time */

struct transpose_job {
    nib_transpose_fn *transpose;
    const uint8_t *in;
    uint8_t *out;
    int64_t in_stride, out_stride, rows, cols;
    int bits;
};

static void transpose_lines(void *context, int64_t i)
{
    const struct transpose_job *job = context;
    const int64_t first = i * LINES;
    job->transpose(job->in + first * job->bits / 8, job->in_stride, job->rows, nib_min(LINES, job->cols - first),
                   job->out + first * job->out_stride, job->out_stride);
}

void nib_transpose_codes(const nib_device *host, bool packed, const uint8_t *in, int64_t in_stride, int64_t rows,
                         int64_t cols, uint8_t *out, int64_t out_stride)
{
    struct transpose_job job = { nib_kernels_best()->transpose[packed ? NIB_E2M1 : NIB_U8],
                                 in,
                                 out,
                                 in_stride,
                                 out_stride,
                                 rows,
                                 cols,
                                 packed ? 4 : 8 };
    nib_parallel(nib_ceil_div(cols, LINES), nib_thread_count(host, rows * cols), transpose_lines, &job);
}

/* ---- Scales ---- */

/* Sixteen tiles side by side pass through memory as lines of 64 scales. */
enum { TILE_LINES = 128, TILE_BLOCKS = 4, TILE_BYTES = TILE_LINES * TILE_BLOCKS, STRIP_BLOCKS = 64 };

struct swizzle_job {
    nib_transpose_fn *words, *bytes;
    const struct nib_usage_geometry *plain;
    uint8_t *lines, *tiles; /* one of them is only read */
};

/* The part of the scales that a strip has, and its first tile. */
struct strip {
    int64_t line, lines, block, blocks, tiles;
    uint8_t *scales, *tile;
};

static struct strip strip_at(const struct swizzle_job *job, int64_t i)
{
    const struct nib_usage_geometry *g = job->plain;
    const int64_t strips = nib_ceil_div(g->blocks, STRIP_BLOCKS), tiles = nib_ceil_div(g->blocks, TILE_BLOCKS);
    struct strip s = { .line = i / strips * TILE_LINES, .block = i % strips * STRIP_BLOCKS };
    s.lines = nib_min(TILE_LINES, g->lines - s.line);
    s.blocks = nib_min(STRIP_BLOCKS, g->blocks - s.block);
    s.tiles = nib_ceil_div(s.blocks, TILE_BLOCKS);
    s.scales = job->lines + nib_scale_index(g, s.line, s.block);
    s.tile = job->tiles + (s.line / TILE_LINES * tiles + s.block / TILE_BLOCKS) * TILE_BYTES;
    return s;
}

static void swizzle_strip(void *context, int64_t i)
{
    const struct swizzle_job *job = context;
    const struct strip s = strip_at(job, i);
    uint8_t lines[TILE_LINES][STRIP_BLOCKS];
    memset(lines, 0, sizeof lines);
    if (job->plain->scale_block == 1)
        for (int64_t l = 0; l < s.lines; l++)
            memcpy(lines[l], s.scales + l * job->plain->scale_line, (size_t)s.blocks);
    else
        job->bytes(s.scales, job->plain->scale_block, s.blocks, s.lines, lines[0], STRIP_BLOCKS);
    for (int64_t l = 0; l < TILE_LINES / 4; l++)
        job->words(lines[l], TILE_LINES / 4 * STRIP_BLOCKS, 4, s.tiles, s.tile + l * 16, TILE_BYTES);
}

static void unswizzle_strip(void *context, int64_t i)
{
    const struct swizzle_job *job = context;
    const struct strip s = strip_at(job, i);
    uint8_t words[TILE_LINES][STRIP_BLOCKS], lines[TILE_LINES][STRIP_BLOCKS];
    job->words(s.tile, TILE_BYTES, s.tiles, TILE_LINES, words[0], STRIP_BLOCKS);
    const bool by_line = job->plain->scale_block == 1;
    for (int64_t l = 0; l < s.lines; l++)
        memcpy(by_line ? s.scales + l * job->plain->scale_line : lines[l],
               words[l % (TILE_LINES / 4) * 4 + l / (TILE_LINES / 4)], (size_t)s.blocks);
    if (!by_line)
        job->bytes(lines[0], STRIP_BLOCKS, s.lines, s.blocks, s.scales, job->plain->scale_block);
}

static void run_strips(const nib_device *host, const struct nib_usage_geometry *plain, uint8_t *lines, uint8_t *tiles,
                       void (*body)(void *context, int64_t i))
{
    const struct nib_kernels *kernels = nib_kernels_best();
    struct swizzle_job job = { kernels->transpose[NIB_F32], kernels->transpose[NIB_U8], plain, lines, tiles };
    const int64_t strips = nib_ceil_div(plain->lines, TILE_LINES) * nib_ceil_div(plain->blocks, STRIP_BLOCKS);
    nib_parallel(strips, nib_thread_count(host, plain->lines * plain->blocks), body, &job);
}

void nib_swizzle(const nib_device *host, const struct nib_usage_geometry *plain, const uint8_t *from, uint8_t *tiles)
{
    run_strips(host, plain, (uint8_t *)(uintptr_t)from, tiles, swizzle_strip);
}

void nib_unswizzle(const nib_device *host, const struct nib_usage_geometry *plain, const uint8_t *tiles, uint8_t *to)
{
    run_strips(host, plain, to, (uint8_t *)(uintptr_t)tiles, unswizzle_strip);
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

/* ---- Usages ---- */

struct scale_job {
    const struct nib_geometry *geometry;
    const struct nib_usage_memory *row, *col;
    int64_t block;
};

/* The scales of line c of the columnwise usage of square blocks. */
static void transpose_scales(void *context, int64_t c)
{
    const struct scale_job *job = context;
    const struct nib_usage_geometry *row = &job->geometry->usage[NIB_ROWWISE],
                                    *col = &job->geometry->usage[NIB_COLUMNWISE];
    for (int64_t b = 0; b < col->blocks && c % col->lines_per_scale == 0; b++)
        nib_scale_store(col, job->col->scales, c, b,
                        nib_scale_load(row, job->row->scales, b * job->block, c / job->block));
}

void nib_build_columnwise(const nib_device *host, const nib_quantizer *q, const struct nib_geometry *geometry,
                          const struct nib_usage_memory *rowwise, const struct nib_usage_memory *columnwise)
{
    const struct nib_format_facts *facts = nib_format_of(q);
    const struct nib_usage_geometry *from = &geometry->usage[NIB_ROWWISE], *to = &geometry->usage[NIB_COLUMNWISE];
    struct scale_job job = { geometry, rowwise, columnwise, facts->block };
    if (facts->transposed)
        nib_transpose_codes(host, !from->element_stride, rowwise->codes, from->line_stride, from->lines, from->length,
                            columnwise->codes, to->line_stride);
    else if (from->data_bytes)
        memcpy(columnwise->codes, rowwise->codes, (size_t)from->data_bytes);
    if (columnwise->scales) { /* a buffer that was there before may have held anything */
        nib_zero_scale_padding(to, columnwise->scales);
        nib_parallel(to->lines, nib_thread_count(host, to->lines * to->blocks), transpose_scales, &job);
    }
    if (facts->tensor_scales && columnwise->tensor_scales != rowwise->tensor_scales)
        memcpy(columnwise->tensor_scales, rowwise->tensor_scales, (size_t)to->tensor_scales_bytes);
}

void nib_copy_rectangle(const nib_quantizer *q, const struct nib_usage_geometry *from,
                        const struct nib_usage_memory *source, int64_t line, int64_t first,
                        const struct nib_usage_geometry *to, const struct nib_usage_memory *target)
{
    const int64_t block = nib_max(nib_format_of(q)->block, 1);
    for (int64_t l = 0; l < to->lines; l++) {
        for (int64_t i = 0; i < to->length; i++)
            nib_code_store(to, target->codes, l, i, nib_code_load(from, source->codes, line + l, first + i));
        for (int64_t i = 0; i < to->blocks; i++)
            nib_scale_store(to, target->scales, l, i,
                            nib_scale_load(from, source->scales, line + l, first / block + i));
    }
    if (to->tensor_scales_bytes)
        memcpy(target->tensor_scales, source->tensor_scales + (q->row_scaled ? line : 0),
               (size_t)to->tensor_scales_bytes);
}

void nib_repack_scales(const struct nib_usage_geometry *from, const void *source, const struct nib_usage_geometry *to,
                       void *target)
{
    for (int64_t i = 0; i < from->lines * from->blocks; i++)
        nib_scale_store(to, target, i / to->blocks, i % to->blocks,
                        nib_scale_load(from, source, i / from->blocks, i % from->blocks));
}

bool nib_usages_equal(const struct nib_usage_geometry *g, const struct nib_usage_memory *a,
                      const struct nib_usage_memory *b)
{
    if ((g->data_bytes && memcmp(a->codes, b->codes, (size_t)g->data_bytes)) ||
        (g->tensor_scales_bytes && memcmp(a->tensor_scales, b->tensor_scales, (size_t)g->tensor_scales_bytes)))
        return false;
    for (int64_t line = 0; line < g->lines; line += g->lines_per_scale)
        for (int64_t block = 0; block < g->blocks; block++)
            if (nib_scale_load(g, a->scales, line, block) != nib_scale_load(g, b->scales, line, block))
                return false;
    return true;
}

/* ---- For users, over plain memory ---- */

/* A [rows, cols] matrix of single bytes whose rows are `stride` apart. */
static nib_status plain_scales(int64_t rows, int64_t cols, int64_t stride, struct nib_usage_geometry *out)
{
    int64_t bytes;
    if (rows < 0 || cols < 0 || stride < cols)
        return nib_fail(NIB_ERR_SHAPE, "scales of %lld x %lld with rows %lld bytes apart", (long long)rows,
                        (long long)cols, (long long)stride);
    if (rows > INT64_MAX / 2 || stride > INT64_MAX / 2 ||
        !nib_mul(nib_round_up(rows, 128), nib_round_up(stride, 4), &bytes))
        return nib_fail(NIB_ERR_SHAPE, "scales of %lld x %lld take too many bytes", (long long)rows, (long long)cols);
    *out = (struct nib_usage_geometry){
        .lines = rows, .blocks = cols, .scale_bytes = 1, .lines_per_scale = 1, .scale_line = stride, .scale_block = 1
    };
    return NIB_OK;
}

nib_status nib_swizzle_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t stride, uint8_t *out)
{
    NIB_REQUIRE(scales);
    NIB_REQUIRE(out);
    struct nib_usage_geometry plain;
    TRY(plain_scales(rows, cols, stride, &plain));
    nib_swizzle(NULL, &plain, scales, out);
    return NIB_OK;
}

nib_status nib_unswizzle_scales(const uint8_t *tiles, int64_t rows, int64_t cols, int64_t stride, uint8_t *out)
{
    NIB_REQUIRE(tiles);
    NIB_REQUIRE(out);
    struct nib_usage_geometry plain;
    TRY(plain_scales(rows, cols, stride, &plain));
    memset(out, 0, (size_t)(rows * stride));
    nib_unswizzle(NULL, &plain, tiles, out);
    return NIB_OK;
}

nib_status nib_transpose_packed(const uint8_t *codes, int64_t rows, int64_t cols, uint8_t *out)
{
    NIB_REQUIRE(codes);
    NIB_REQUIRE(out);
    TRY(nib_check_shape("codes", 2, (const int64_t[2]){ rows, cols }, NULL));
    nib_transpose_codes(NULL, true, codes, nib_ceil_div(cols, 2), rows, cols, out, nib_ceil_div(rows, 2));
    return NIB_OK;
}

nib_status nib_transpose_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t in_stride, uint8_t *out,
                                int64_t out_stride)
{
    enum { BLOCK = 16 }; /* only NVFP4 repeats the scale of a tile on every line */
    NIB_REQUIRE(scales);
    NIB_REQUIRE(out);
    TRY(nib_check_shape("scales", 2, (const int64_t[2]){ rows, cols }, NULL));
    const int64_t row_blocks = nib_ceil_div(cols, BLOCK), col_blocks = nib_ceil_div(rows, BLOCK);
    if (in_stride < row_blocks || out_stride < col_blocks)
        return nib_fail(NIB_ERR_SHAPE, "lines of %lld and %lld scales do not fit strides of %lld and %lld",
                        (long long)row_blocks, (long long)col_blocks, (long long)in_stride, (long long)out_stride);
    for (int64_t c = 0; c < cols; c++) {
        memset(out + c * out_stride, 0, (size_t)out_stride);
        for (int64_t b = 0; b < col_blocks; b++)
            out[c * out_stride + b] = scales[b * BLOCK * in_stride + c / BLOCK];
    }
    return NIB_OK;
}
