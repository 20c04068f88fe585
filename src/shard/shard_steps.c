/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_steps.c - the steps of a sharded cast: amaxes of a shard, scales from the amaxes of all, codes of a shard.
 *
 * Work goes by bands of rows as high as a block, so that no two threads touch the same amax; and rows share no byte of
 * codes. Bands of NVFP4 that a shard has whole go through the kernels of whole matrices, the others block by block.
 */
#include "shard/shard.h"

#include "format/codec.h"
#include "tensor/layout.h"
#include "base/os.h"

/* ---- The grid of amaxes ---- */

struct nib_grid nib_grid_of(const nib_tensor *t, nib_usage usage)
{
    struct nib_grid grid = {
        .coding = nib_coding_of(&t->q, usage, t->dtype), .geometry = &t->geometry.usage[usage], .rows = 1, .cols = 1
    };
    if (grid.coding.block) {
        grid.rows = nib_ceil_div(grid.geometry->lines, grid.coding.tile_lines);
        grid.cols = grid.geometry->blocks;
    }
    return grid;
}

/* The amax of element i of a line. */
static int64_t cell_of(const struct nib_grid *grid, int64_t line, int64_t i)
{
    return grid->coding.block ? line / grid->coding.tile_lines * grid->cols + i / grid->coding.block : 0;
}

int64_t nib_grid_cell(const nib_tensor *t, const struct nib_grid *grid, int64_t element)
{
    return cell_of(grid, element / t->geometry.cols, element % t->geometry.cols);
}

/* The scaler that follows from n amaxes, or from a scale instead: of a whole usage, or of a row that has a tensor scale
 * of its own. */
static struct nib_scaler scaler_of(const nib_tensor *t, const struct nib_grid *grid, const float *amaxes, int64_t n,
                                   const float *scale)
{
    float amax = 0;
    for (int64_t i = 0; i < n; i++)
        amax = nib_fmax(amax, amaxes[i]);
    struct nib_scaler scaler = { .tensor_scale = 1, .scale = 1 };
    if (scale) {
        scaler.scale = *scale;
        scaler.tensor_scale = 1.0f / *scale;
    } else if (grid->geometry->tensor_scales) {
        scaler.tensor_scale = nib_tensor_scale_from_amax(&t->q, &grid->coding, amax, &scaler.scale);
    }
    grid->coding.dialect->prepare(&scaler, &grid->coding.rules);
    return scaler;
}

static struct nib_scaler scaler_of_all(const nib_tensor *t, const struct nib_grid *grid, const float *amaxes,
                                       const float *scale)
{
    const nib_fpenv saved = nib_fpenv_enter();
    const struct nib_scaler scaler = scaler_of(t, grid, amaxes, grid->rows * grid->cols, scale);
    nib_fpenv_leave(saved);
    return scaler;
}

void nib_grid_tensor_scales(const nib_tensor *t, const struct nib_grid *grid, const float *amaxes, float *tensor_scales)
{
    const int64_t n = grid->geometry->tensor_scales, cells = grid->rows * grid->cols;
    const nib_fpenv saved = nib_fpenv_enter();
    for (int64_t i = 0; i < n; i++)
        tensor_scales[i] = t->q.row_scaled ? scaler_of(t, grid, amaxes + i * grid->cols, grid->cols, NULL).tensor_scale
                                           : scaler_of(t, grid, amaxes, cells, NULL).tensor_scale;
    nib_fpenv_leave(saved);
}

bool nib_scales_are_chosen(const nib_tensor *t) { return t->q.scale_rule != NIB_SCALE_RTN; }

struct nib_range nib_block_range(const nib_tensor *t, const struct nib_grid *grid, int64_t element)
{
    const int64_t rows = t->geometry.rows, cols = t->geometry.cols, row = element / cols, block = grid->coding.block;
    const bool rowwise = grid->coding.usage == NIB_ROWWISE;
    if (!block)
        return (struct nib_range){ 0, rows * cols };
    if (rowwise && grid->coding.tile_lines == 1) {
        const int64_t col = element % cols / block * block;
        return (struct nib_range){ row * cols + col, nib_min(block, cols - col) };
    }
    const int64_t band = rowwise ? grid->coding.tile_lines : block, first = row / band * band;
    return (struct nib_range){ first * cols, nib_min(band, rows - first) * cols };
}

struct nib_cut nib_cut_of(const nib_tensor *t, const struct nib_grid *grid, struct nib_range range)
{
    const int64_t end = range.start + range.length;
    struct nib_cut cut = { range.start, range.start };
    if (range.length == 0)
        return cut;
    const struct nib_range first = nib_block_range(t, grid, range.start), last = nib_block_range(t, grid, end - 1);
    if (first.start < range.start || first.start + first.length > end)
        cut.whole = nib_min(end, first.start + first.length);
    cut.whole_end = last.start + last.length == end ? end : nib_max(cut.whole, last.start);
    return cut;
}

/* ---- Checks ---- */

bool nib_usage_is_cast(const nib_tensor *t, nib_usage usage)
{
    return usage == NIB_ROWWISE ||
           (nib_tensor_has(t, usage) && t->q.block_dims[0] == 1 && !nib_format_of(&t->q)->transposed);
}

nib_status nib_check_castable(const nib_tensor *t)
{
    const nib_quantizer *q = &t->q;
    const bool columnwise = q->columnwise || nib_tensor_has(t, NIB_COLUMNWISE);
    TRY(nib_check_host("a sharded cast", t->device));
    const struct {
        bool rejected;
        nib_status status;
        const char *why;
    } rules[] = {
        { !nib_tensor_has(t, NIB_ROWWISE), NIB_ERR_USAGE, "it has no rowwise usage to cast into" },
        { q->swizzled, NIB_ERR_MODE, "its scales are swizzled: unswizzle it first" },
        { q->rht_rowwise, NIB_ERR_MODE,
          "the RHT changes the amax of a block, which a rank that has only a part of it cannot know" },
        { columnwise && q->block_dims[0] == 1 && nib_format_of(q)->transposed, NIB_ERR_USAGE,
          "a columnwise usage is wanted, and with 1xB blocks it has scales of its own and cannot be built from the "
          "rowwise codes" },
        { q->columnwise && !nib_tensor_has(t, NIB_COLUMNWISE) && q->block_dims[0] == 1, NIB_ERR_USAGE,
          "a columnwise usage is wanted, and there is none to cast into" },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].rejected)
            return nib_fail(rules[i].status, "%s", rules[i].why);
    return NIB_OK;
}

nib_status nib_shard_init(const char *what, const nib_tensor *t, const nib_array *master, int64_t start,
                          struct nib_shard *out)
{
    const int64_t elements = t->geometry.rows * t->geometry.cols;
    *out = (struct nib_shard){ .t = t };
    if (!master) {
        if (start != -1)
            return nib_fail(NIB_ERR_ARG, "%s begins at element %lld but is NULL", what, (long long)start);
        return NIB_OK;
    }
    TRY(nib_check_array(what, master));
    TRY(nib_check_same_device(what, master->device, "the parameter", t->device));
    if (master->dtype != NIB_F32 && master->dtype != NIB_BF16)
        return nib_fail(NIB_ERR_DTYPE, "%s is F32 or BF16, not %s", what, nib_dtypes[master->dtype].name);
    if (master->rank != 1)
        return nib_fail(NIB_ERR_SHAPE, "%s has rank 1, not %d", what, (int)master->rank);
    const int64_t length = master->shape[0];
    if (length == 0)
        return NIB_OK;
    if (start < 0)
        return nib_fail(NIB_ERR_ARG, "%s has %lld elements but begins at %lld", what, (long long)length,
                        (long long)start);
    if (start > elements || length > elements - start)
        return nib_fail(NIB_ERR_SHAPE, "%s has %lld elements from %lld on, of a parameter of %lld", what,
                        (long long)length, (long long)start, (long long)elements);
    *out = (struct nib_shard){ t, master, start, length };
    return NIB_OK;
}

nib_status nib_check_code_place(const char *what, const nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                const nib_array *shard, struct nib_code_place *out)
{
    *out = (struct nib_code_place){ nib_tensor_memory(t, usage).codes, 0 };
    if (!shard)
        return NIB_OK;
    const nib_byte_range range = nib_bytes_of(&t->geometry, usage, start, length);
    TRY(nib_check_output(what, shard));
    TRY(nib_check_same_device(what, shard->device, "the tensor", t->device));
    if (shard->dtype != NIB_U8)
        return nib_fail(NIB_ERR_DTYPE, "%s is U8, not %s", what, nib_dtypes[shard->dtype].name);
    if (shard->rank != 1 || (range.count > 1 && shard->strides[0] != 1))
        return nib_fail(NIB_ERR_SHAPE, "%s is contiguous and has rank 1", what);
    if (shard->shape[0] != range.count)
        return nib_fail(NIB_ERR_SHAPE, "%s has %lld bytes and the codes of its elements take %lld", what,
                        (long long)shard->shape[0], (long long)range.count);
    *out = (struct nib_code_place){ shard->data ? (uint8_t *)shard->data + shard->offset : NULL, range.first };
    return NIB_OK;
}

/* ---- Elements and bytes ---- */

/* The byte of a code, from the first of the usage. */
static int64_t byte_of(const struct nib_usage_geometry *g, int64_t line, int64_t i)
{
    return line * g->line_stride + (g->element_stride ? i * g->element_stride : i / 2);
}

nib_byte_range nib_bytes_of(const struct nib_geometry *geometry, nib_usage usage, int64_t start, int64_t length)
{
    const struct nib_usage_geometry *g = &geometry->usage[usage];
    if (length == 0)
        return (nib_byte_range){ 0 };
    const int64_t cols = geometry->cols, row = start / cols, col = start % cols, last = start + length - 1;
    const int64_t end_row = last / cols, end_col = last % cols;
    const bool rowwise = usage == NIB_ROWWISE, packed = !g->element_stride;
    const int64_t first = rowwise ? byte_of(g, row, col) : byte_of(g, col, row);
    const int64_t end = rowwise ? byte_of(g, end_row, end_col) : byte_of(g, end_col, end_row);
    return (nib_byte_range){ .first = first,
                             .count = end - first + 1,
                             .first_shared = packed && col % 2 == 1,
                             .last_shared = packed && end_col % 2 == 0 && end_col != cols - 1 };
}

/* A packed code beside another's; a nibble behind the last code of a row stands for nothing and is 0. */
static void put_code(const struct nib_usage_geometry *g, struct nib_code_place place, int64_t line, int64_t i,
                     uint8_t code)
{
    uint8_t *byte = place.codes + (byte_of(g, line, i) - place.first);
    if (g->element_stride || (i % 2 == 0 && i == g->length - 1))
        *byte = code;
    else
        *byte = (uint8_t)(i % 2 ? (*byte & 0x0F) | code << 4 : (*byte & 0xF0) | code);
}

/* n codes side by side: whole bytes at once, nibbles at the ends beside those of others. */
static void put_codes(const struct nib_usage_geometry *g, struct nib_code_place place, int64_t line, int64_t i,
                      int64_t n, const uint8_t *codes)
{
    int64_t k = 0;
    if (!g->element_stride) {
        if (i % 2)
            put_code(g, place, line, i, codes[k++]);
        uint8_t *bytes = place.codes + (byte_of(g, line, i + k) - place.first);
        for (; k + 1 < n; k += 2)
            *bytes++ = (uint8_t)(codes[k] | codes[k + 1] << 4);
    }
    for (; k < n; k++)
        put_code(g, place, line, i + k, codes[k]);
}

/* n values of a shard from element `first` of the parameter on, as the master has them. */
static void load_values(const struct nib_shard *shard, int64_t first, int64_t n, float *x)
{
    const nib_array *master = shard->master;
    const int64_t step = master->strides[0], at = (first - shard->start) * step;
    const void *from = (const char *)master->data + master->offset; /* aligned, as nib_check_array saw */
    if (master->dtype == NIB_F32 && step == 1)
        memcpy(x, (const float *)from + at, (size_t)n * sizeof *x);
    else if (master->dtype == NIB_F32)
        for (int64_t i = 0; i < n; i++)
            x[i] = ((const float *)from)[at + i * step];
    else
        for (int64_t i = 0; i < n; i++)
            x[i] = nib_f32_from_bf16(((const uint16_t *)from)[at + i * step]);
}

/* To the parameter's nominal dtype. */
static void round_values(const struct nib_shard *shard, int64_t n, float *x)
{
    for (int64_t i = 0; shard->t->dtype == NIB_BF16 && shard->master->dtype != NIB_BF16 && i < n; i++)
        x[i] = nib_f32_from_bf16(nib_bf16_from_f32(x[i]));
    for (int64_t i = 0; shard->t->dtype == NIB_F16 && i < n; i++)
        x[i] = nib_f32_from_f16(nib_f16_from_f32(x[i]));
}

void nib_shard_load(const struct nib_shard *shard, int64_t first, int64_t n, float *x)
{
    load_values(shard, first, n, x);
    round_values(shard, n, x);
}

/* ---- Walking over a shard ---- */

/* Up to a block of elements side by side in a row: what the steps work on. */
struct run {
    int64_t row, col, n;
    float x[NIB_MAX_BLOCK];
};

struct walk {
    const struct nib_shard *shard;
    const struct nib_grid *grid;
    int64_t band; /* rows of one */
    float *amaxes;
    _Atomic uint32_t whole; /* Float8: the only amax */
    const struct nib_scaler *scaler;
    const float *tensor_scales; /* one per row, where each has its own; NULL: the scaler's */
    const void *scales;
    struct nib_code_place place;
    const struct nib_block_kernels *kernels;
    nib_quantize_fn *quantize; /* of whole panels; NULL where they are not NVFP4's */
};

/* Calls body for the runs of the i-th band that has elements of the shard. */
static void walk_band(struct walk *walk, int64_t i, void (*body)(struct walk *walk, struct run *run))
{
    const struct nib_shard *shard = walk->shard;
    const int64_t cols = shard->t->geometry.cols, end = shard->start + shard->length;
    const int64_t block = walk->grid->coding.block ? walk->grid->coding.block : NIB_MAX_BLOCK;
    const int64_t first = (shard->start / cols / walk->band + i) * walk->band;
    for (int64_t row = first; row < first + walk->band; row++) {
        const int64_t from = nib_max(shard->start, row * cols), to = nib_min(end, (row + 1) * cols);
        struct run run = { .row = row };
        for (int64_t at = from; at < to; at += run.n) {
            run.col = at - row * cols;
            run.n = nib_min(to - at, block - run.col % block);
            load_values(shard, at, run.n, run.x);
            body(walk, &run);
        }
    }
}

static void run_walk(struct walk *walk, void (*body)(void *context, int64_t i))
{
    const struct nib_shard *shard = walk->shard;
    if (shard->length == 0)
        return;
    const int64_t cols = shard->t->geometry.cols;
    walk->band = nib_max(walk->grid->coding.block, 16);
    const int64_t first = shard->start / cols / walk->band,
                  last = (shard->start + shard->length - 1) / cols / walk->band;
    nib_parallel(last - first + 1, nib_thread_count(shard->t->device, shard->length), body, walk);
}

/* ---- Amaxes ---- */

/* Rounding keeps the order, so that the largest rounded value is the largest value rounded. */
static float run_absmax(const struct walk *walk, const float *x, int64_t n)
{
    float m = nib_kernels_best()->absmax[NIB_F32](x, n);
    round_values(walk->shard, 1, &m);
    return m;
}

static void amax_of_run(struct walk *walk, struct run *run)
{
    const struct nib_grid *grid = walk->grid;
    if (!grid->coding.block) {
        nib_raise_to(&walk->whole, run_absmax(walk, run->x, run->n));
    } else if (grid->coding.usage == NIB_ROWWISE) {
        float *amax = &walk->amaxes[cell_of(grid, run->row, run->col)];
        *amax = nib_fmax(*amax, run_absmax(walk, run->x, run->n));
    } else { /* every element is in a line of its own */
        for (int64_t i = 0; i < run->n; i++) {
            float *amax = &walk->amaxes[cell_of(grid, run->col + i, run->row)];
            *amax = nib_fmax(*amax, run_absmax(walk, &run->x[i], 1));
        }
    }
}

static void amax_of_band(void *context, int64_t i) { walk_band(context, i, amax_of_run); }

void nib_shard_amax(const struct nib_shard *shard, const struct nib_grid *grid, float none, float *amaxes)
{
    struct walk walk = { .shard = shard, .grid = grid, .amaxes = amaxes };
    for (int64_t i = 0; i < grid->rows * grid->cols; i++)
        amaxes[i] = none;
    run_walk(&walk, amax_of_band);
    if (!grid->coding.block && shard->length)
        *amaxes = nib_float(walk.whole);
}

/* ---- Scales ---- */

struct scale_job {
    const nib_tensor *t;
    const struct nib_grid *grid;
    const struct nib_scaler *scaler; /* NULL: each row has its own */
    const struct nib_block_kernels *kernels;
    const float *amaxes;
    const uint8_t *chosen; /* NULL: scales follow from the amaxes */
    struct nib_usage_memory memory;
};

/* One row of the grid, to all lines that it stands for. */
static void write_scale_row(void *context, int64_t row)
{
    const struct scale_job *job = context;
    const struct nib_grid *grid = job->grid;
    const struct nib_usage_geometry *g = grid->geometry;
    const int64_t first = row * grid->coding.tile_lines, cell = row * grid->cols;
    const int64_t end = nib_min(first + grid->coding.tile_lines, g->lines);
    struct nib_scaler own;
    if (!job->scaler) {
        own = scaler_of(job->t, grid, job->amaxes + cell, grid->cols, NULL);
        job->memory.tensor_scales[row] = own.tensor_scale;
    }
    const struct nib_scaler *scaler = job->scaler ? job->scaler : &own;
    for (int64_t block = 0; block < grid->cols; block++) {
        const nib_scale_bits scale = job->chosen
                                         ? job->chosen[cell + block]
                                         : job->kernels->scale(job->amaxes[cell + block], scaler, &grid->coding);
        for (int64_t line = first; line < end; line++)
            nib_scale_store(g, job->memory.scales, line, block, scale);
    }
}

void nib_write_scales(nib_tensor *t, const struct nib_grid *grid, const float *amaxes, const float *scale,
                      const uint8_t *chosen)
{
    const struct nib_usage_memory memory = nib_tensor_memory(t, grid->coding.usage);
    const struct nib_scaler scaler = scaler_of_all(t, grid, amaxes, scale);
    if (memory.tensor_scales && !t->q.row_scaled)
        *memory.tensor_scales = scaler.tensor_scale;
    if (!memory.scales)
        return;
    nib_zero_scale_padding(grid->geometry, memory.scales);
    struct scale_job job = { t,      grid,  t->q.row_scaled ? NULL : &scaler, nib_block_kernels_of(&t->q), amaxes,
                             chosen, memory };
    nib_parallel(grid->rows, nib_thread_count(t->device, grid->rows * grid->cols), write_scale_row, &job);
}

/* ---- Panels of whole blocks ---- */

/* A panel of its own, whose codes and scales lie beside each other here. */
enum { PANEL_ROWS = 16, PANEL_COLS = 256 };

struct panel_scratch {
    _Alignas(64) float x[PANEL_ROWS * PANEL_COLS];
    _Alignas(64) uint8_t codes[PANEL_ROWS * PANEL_COLS / 2];
    _Alignas(64) uint8_t scales[PANEL_ROWS * PANEL_COLS / 16];
};

/* By the kernel that quantizes whole matrices, which is the fastest and knows every rule. */
static void quantize_panel(const struct walk *walk, int64_t row, int64_t rows, int64_t col, int64_t cols,
                           struct panel_scratch *scratch)
{
    const struct nib_shard *shard = walk->shard;
    for (int64_t r = 0; r < rows; r++)
        load_values(shard, (row + r) * shard->t->geometry.cols + col, cols, scratch->x + r * PANEL_COLS);
    for (int64_t r = 0; r < rows; r++)
        round_values(shard, cols, scratch->x + r * PANEL_COLS);
    const struct nib_usage_geometry local = { .lines = rows,
                                              .length = cols,
                                              .line_stride = PANEL_COLS / 2,
                                              .blocks = nib_ceil_div(cols, 16),
                                              .scale_line = PANEL_COLS / 16,
                                              .scale_block = 1,
                                              .lines_per_scale = 1,
                                              .scale_bytes = 1,
                                              .tensor_scales = 1 };
    struct nib_coding coding = walk->grid->coding;
    coding.origin_line += row;
    coding.origin_block += col / 16;
    const struct nib_panel panel = {
        .x = scratch->x, .dtype = NIB_F32, .stride = PANEL_COLS, .rows = rows, .cols = cols
    };
    const struct nib_target target = { .codes = scratch->codes,
                                       .scales = scratch->scales,
                                       .geometry = &local,
                                       .tensor_scales = walk->tensor_scales ? walk->tensor_scales + row
                                                                            : &walk->scaler->tensor_scale,
                                       .tensor_scale_per_line = walk->tensor_scales != NULL };
    walk->quantize(&panel, &coding, &target);
}

/* ---- Scales that are chosen ---- */

struct choice_job {
    struct walk walk;
    uint8_t *scales;
    int64_t band, first_band, panels; /* rows of a band; the first one; panels in each */
    int64_t start, end;               /* of the elements in whole block ranges */
};

static void choose_in_panel(void *context, int64_t i)
{
    const struct choice_job *job = context;
    const struct nib_geometry *geometry = &job->walk.shard->t->geometry;
    const int64_t cols = geometry->cols, row = (job->first_band + i / job->panels) * job->band;
    /* With 1x16 blocks the first row and the last may not be whole; with square ones bands are. */
    const int64_t from = nib_max(job->start - row * cols, i % job->panels * PANEL_COLS);
    const int64_t to = nib_min(nib_min(job->end - row * cols, cols), (i % job->panels + 1) * PANEL_COLS);
    if (from >= to)
        return;
    struct panel_scratch scratch;
    quantize_panel(&job->walk, row, nib_min(job->band, geometry->rows - row), from, to - from, &scratch);
    memcpy(job->scales + cell_of(job->walk.grid, row, from), scratch.scales, (size_t)nib_ceil_div(to - from, 16));
}

void nib_shard_choose(const struct nib_shard *shard, const struct nib_grid *grid, const float *tensor_scales,
                      uint8_t *scales)
{
    const nib_tensor *t = shard->t;
    const struct nib_cut cut = nib_cut_of(t, grid, (struct nib_range){ shard->start, shard->length });
    if (cut.whole_end == cut.whole)
        return;
    const struct nib_scaler scaler = { .tensor_scale = *tensor_scales }; /* kernels prepare their own */
    const int64_t cols = t->geometry.cols, band = grid->coding.tile_lines;
    struct choice_job job = { .walk = { .shard = shard,
                                        .grid = grid,
                                        .scaler = &scaler,
                                        .tensor_scales = t->q.row_scaled ? tensor_scales : NULL,
                                        .quantize = NIB_KERNEL(quantize, t->q.format) },
                              .scales = scales,
                              .band = band,
                              .first_band = cut.whole / cols / band,
                              .panels = nib_ceil_div(cols, PANEL_COLS),
                              .start = cut.whole,
                              .end = cut.whole_end };
    const int64_t bands = (cut.whole_end - 1) / cols / band - job.first_band + 1;
    nib_parallel(bands * job.panels, nib_thread_count(t->device, cut.whole_end - cut.whole), choose_in_panel, &job);
}

/* ---- Codes ---- */

static void cast_values(const struct walk *walk, int64_t line, int64_t i, const float *x, int64_t n)
{
    const struct nib_grid *grid = walk->grid;
    const int64_t block = grid->coding.block, b = block ? i / block : 0;
    const nib_scale_bits scale = block ? nib_scale_load(grid->geometry, walk->scales, line, b) : 0;
    struct nib_scaler own;
    if (walk->tensor_scales) {
        own = (struct nib_scaler){ .tensor_scale = walk->tensor_scales[line], .scale = 1 };
        grid->coding.dialect->prepare(&own, &grid->coding.rules);
    }
    const float factor = grid->coding.dialect->factor(scale, walk->amaxes[cell_of(grid, line, i)],
                                                      walk->tensor_scales ? &own : walk->scaler, &grid->coding.rules);
    uint8_t codes[NIB_MAX_BLOCK];
    walk->kernels->encode(x, n, factor, &grid->coding, line, b, block ? i % block : 0, codes);
    put_codes(grid->geometry, walk->place, line, i, n, codes);
}

static void cast_run(struct walk *walk, struct run *run)
{
    round_values(walk->shard, run->n, run->x);
    if (walk->grid->coding.usage == NIB_ROWWISE) {
        cast_values(walk, run->row, run->col, run->x, run->n);
        return;
    }
    for (int64_t i = 0; i < run->n; i++)
        cast_values(walk, run->col + i, run->row, &run->x[i], 1);
}

/* The kernel computes scales by itself. Where they are not those of the tensor, another rank had other values for these
 * elements: then this returns false and writes nothing. */
static bool cast_panel(const struct walk *walk, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    struct panel_scratch scratch;
    quantize_panel(walk, row, rows, col, cols, &scratch);
    const struct nib_usage_geometry *g = walk->grid->geometry;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < nib_ceil_div(cols, 16); b++)
            if (scratch.scales[r * (PANEL_COLS / 16) + b] != nib_scale_load(g, walk->scales, row + r, col / 16 + b))
                return false;
    for (int64_t r = 0; r < rows; r++)
        memcpy(walk->place.codes + (byte_of(g, row + r, col) - walk->place.first), scratch.codes + r * PANEL_COLS / 2,
               (size_t)nib_ceil_div(cols, 2));
    return true;
}

static void cast_band(void *context, int64_t i)
{
    struct walk *walk = context;
    const struct nib_shard *shard = walk->shard;
    const int64_t cols = shard->t->geometry.cols, row = (shard->start / cols / walk->band + i) * walk->band;
    const int64_t rows = nib_min(walk->band, shard->t->geometry.rows - row);
    bool done = walk->quantize && row * cols >= shard->start && (row + rows) * cols <= shard->start + shard->length;
    for (int64_t col = 0; col < cols && done; col += PANEL_COLS)
        done = cast_panel(walk, row, rows, col, nib_min(PANEL_COLS, cols - col));
    if (!done)
        walk_band(walk, i, cast_run);
}

void nib_shard_cast(const struct nib_shard *shard, const struct nib_grid *grid, const float *amaxes, const float *scale,
                    struct nib_code_place place)
{
    const nib_tensor *t = shard->t;
    const struct nib_usage_memory memory = nib_tensor_memory(t, grid->coding.usage);
    const struct nib_scaler scaler = scaler_of_all(t, grid, amaxes, scale);
    struct walk walk = { .shard = shard,
                         .grid = grid,
                         .amaxes = (float *)(uintptr_t)amaxes, /* read only here */
                         .scaler = &scaler,
                         .tensor_scales = t->q.row_scaled ? memory.tensor_scales : NULL,
                         .scales = memory.scales,
                         .place = place,
                         .kernels = nib_block_kernels_of(&t->q),
                         .quantize = nib_format_of(&t->q)->nvfp4_options ? NIB_KERNEL(quantize, t->q.format) : NULL };
    run_walk(&walk, cast_band);
}

/* ---- The public steps ---- */

static nib_status check_range(const nib_tensor *t, int64_t start, int64_t length)
{
    const int64_t elements = t->geometry.rows * t->geometry.cols;
    if (start < 0 || length < 0 || start > elements || length > elements - start)
        return nib_fail(NIB_ERR_SHAPE, "%lld elements from %lld on, of %lld", (long long)length, (long long)start,
                        (long long)elements);
    return NIB_OK;
}

/* Whether a usage of t can be cast by itself. */
static nib_status check_step(const nib_tensor *t, nib_usage usage)
{
    if (usage != NIB_ROWWISE && usage != NIB_COLUMNWISE)
        return nib_fail(NIB_ERR_ARG, "%d is not a usage of a tensor", (int)usage);
    TRY(nib_check_castable(t));
    if (!nib_usage_is_cast(t, usage))
        return nib_fail(NIB_ERR_USAGE, "a %s parameter is cast rowwise, and its columnwise usage built from that",
                        nib_format_of(&t->q)->name);
    return NIB_OK;
}

nib_status nib_amax_grid(const nib_tensor *t, nib_usage usage, int64_t *rows, int64_t *cols)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(rows);
    NIB_REQUIRE(cols);
    TRY(check_step(t, usage));
    const struct nib_grid grid = nib_grid_of(t, usage);
    *rows = grid.rows;
    *cols = grid.cols;
    return NIB_OK;
}

nib_status nib_partial_amax(const nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start, float *amaxes)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    struct nib_shard shard;
    TRY(check_step(t, usage));
    TRY(nib_shard_init("the master", t, master, start, &shard));
    const struct nib_grid grid = nib_grid_of(t, usage);
    nib_shard_amax(&shard, &grid, 0, amaxes);
    return NIB_OK;
}

static nib_status check_amaxes(const struct nib_grid *grid, const float *amaxes)
{
    for (int64_t i = 0; i < grid->rows * grid->cols; i++)
        if (!(amaxes[i] >= 0))
            return nib_fail(NIB_ERR_ARG, "amax %lld is negative or a NaN", (long long)i);
    return NIB_OK;
}

nib_status nib_block_scales(nib_tensor *t, nib_usage usage, const float *amaxes)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    TRY(check_step(t, usage));
    const struct nib_grid grid = nib_grid_of(t, usage);
    TRY(check_amaxes(&grid, amaxes));
    if (nib_scales_are_chosen(t))
        return nib_fail(NIB_ERR_MODE,
                        "the scale of a block takes more than its amax here: nib_partial_scales chooses it, "
                        "nib_chosen_scales writes it");
    nib_write_scales(t, &grid, amaxes, NULL, NULL);
    return NIB_OK;
}

static nib_status check_chosen(const nib_tensor *t, nib_usage usage)
{
    TRY(check_step(t, usage));
    return nib_scales_are_chosen(t)
               ? NIB_OK
               : nib_fail(NIB_ERR_MODE, "scales follow from the amaxes here: nib_block_scales writes them");
}

nib_status nib_whole_blocks(const nib_tensor *t, nib_usage usage, int64_t start, int64_t length, int64_t *first,
                            int64_t *count)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(first);
    NIB_REQUIRE(count);
    TRY(check_step(t, usage));
    TRY(check_range(t, start, length));
    const struct nib_grid grid = nib_grid_of(t, usage);
    struct nib_range around = { start, 0 };
    if (length) {
        const struct nib_range last = nib_block_range(t, &grid, start + length - 1);
        around.start = nib_block_range(t, &grid, start).start;
        around.length = last.start + last.length - around.start;
    }
    *first = around.start;
    *count = around.length;
    return NIB_OK;
}

nib_status nib_partial_scales(const nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start,
                              const float *amaxes, uint8_t *scales)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    NIB_REQUIRE(scales);
    struct nib_shard shard;
    TRY(check_chosen(t, usage));
    TRY(nib_shard_init("the master", t, master, start, &shard));
    const struct nib_grid grid = nib_grid_of(t, usage);
    TRY(check_amaxes(&grid, amaxes));
    float *tensor_scales = nib_alloc((size_t)grid.geometry->tensor_scales_bytes);
    if (!tensor_scales)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %lld tensor scales", (long long)grid.geometry->tensor_scales);
    nib_grid_tensor_scales(t, &grid, amaxes, tensor_scales);
    memset(scales, 0, (size_t)(grid.rows * grid.cols));
    nib_shard_choose(&shard, &grid, tensor_scales, scales);
    nib_free(tensor_scales);
    return NIB_OK;
}

nib_status nib_chosen_scales(nib_tensor *t, nib_usage usage, const float *amaxes, const uint8_t *scales)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    NIB_REQUIRE(scales);
    TRY(check_chosen(t, usage));
    const struct nib_grid grid = nib_grid_of(t, usage);
    TRY(check_amaxes(&grid, amaxes));
    for (int64_t i = 0; i < grid.rows * grid.cols; i++)
        if (scales[i] > 0x7E)
            return nib_fail(NIB_ERR_ARG, "scale %lld is %02X, which is negative or a NaN", (long long)i, scales[i]);
    nib_write_scales(t, &grid, amaxes, NULL, scales);
    return NIB_OK;
}

nib_status nib_partial_cast(nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start, const float *amaxes,
                            const nib_array *shard)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    struct nib_shard own;
    struct nib_code_place place;
    TRY(check_step(t, usage));
    TRY(nib_shard_init("the master", t, master, start, &own));
    TRY(nib_check_code_place("the shard", t, usage, own.start, own.length, shard, &place));
    const struct nib_grid grid = nib_grid_of(t, usage);
    TRY(check_amaxes(&grid, amaxes));
    nib_shard_cast(&own, &grid, amaxes, NULL, place);
    return NIB_OK;
}

nib_status nib_tensor_byte_range(const nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                 nib_byte_range *out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    if (usage != NIB_ROWWISE && (usage != NIB_COLUMNWISE || nib_format_of(&t->q)->transposed))
        return nib_fail(NIB_ERR_USAGE, "only codes in the order of the elements have ranges of bytes");
    TRY(check_range(t, start, length));
    *out = nib_bytes_of(&t->geometry, usage, start, length);
    return NIB_OK;
}
