/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.c - transposes and swizzles, both made of the kernels' transposes.
 *
 * A tile of swizzled scales is 128 lines of four blocks: 32 rows of four words, and word (i, j) is the four scales of
 * line i + 32 j. Lines i, i + 32, i + 64 and i + 96 are therefore a matrix of four rows of words whose transpose is row
 * i of every tile.
 */
#include "tensor/layout.h"

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

void nib_transpose_codes(const nib_quantizer *q, bool packed, const uint8_t *in, int64_t in_stride, int64_t rows,
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
    nib_parallel(nib_ceil_div(cols, LINES), nib_thread_count(q, rows * cols), transpose_lines, &job);
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

static void run_strips(const nib_quantizer *q, const struct nib_usage_geometry *plain, uint8_t *lines, uint8_t *tiles,
                       void (*body)(void *context, int64_t i))
{
    const struct nib_kernels *kernels = nib_kernels_best();
    struct swizzle_job job = { kernels->transpose[NIB_F32], kernels->transpose[NIB_U8], plain, lines, tiles };
    const int64_t strips = nib_ceil_div(plain->lines, TILE_LINES) * nib_ceil_div(plain->blocks, STRIP_BLOCKS);
    nib_parallel(strips, nib_thread_count(q, plain->lines * plain->blocks), body, &job);
}

void nib_swizzle(const nib_quantizer *q, const struct nib_usage_geometry *plain, const uint8_t *from, uint8_t *tiles)
{
    run_strips(q, plain, (uint8_t *)(uintptr_t)from, tiles, swizzle_strip);
}

void nib_unswizzle(const nib_quantizer *q, const struct nib_usage_geometry *plain, const uint8_t *tiles, uint8_t *to)
{
    run_strips(q, plain, to, (uint8_t *)(uintptr_t)tiles, unswizzle_strip);
}
