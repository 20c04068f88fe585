/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_steps.c - the steps of a sharded cast: amaxes of a piece, scales from the amaxes of all, codes of a piece.
 *
 * Work goes by bands of rows as high as a block, so that no two threads touch the same amax; and rows share no byte of
 * codes. Bands of NVFP4 that a piece has whole go through the kernels of whole matrices, the others block by block.
 */
#include "shard.h"

#include "codec.h"
#include "layout.h"
#include "os.h"

/* ---- The grid of amaxes ---- */

struct nib_grid nib_grid_of(const nib_tensor *t, nib_copy copy)
{
    struct nib_grid grid = {
        .coding = nib_coding_of(&t->q, copy, t->dtype), .geometry = &t->geometry.copy[copy], .rows = 1, .cols = 1
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

/* What the amaxes of a whole copy, or a scale instead, come to. */
static struct nib_scaler scaler_of(const nib_tensor *t, const struct nib_grid *grid, const float *amaxes,
                                   const float *scale)
{
    float amax = 0;
    for (int64_t i = 0; i < grid->rows * grid->cols; i++)
        amax = nib_fmax(amax, amaxes[i]);
    struct nib_scaler scaler = { .level = 1, .encode = 1 };
    if (scale) {
        scaler.encode = *scale;
        scaler.level = 1.0f / *scale;
    } else if (grid->geometry->levels) {
        scaler.level = nib_level_from_amax(&t->q, &grid->coding, amax, &scaler.encode);
    }
    grid->coding.dialect->prepare(&scaler, &grid->coding.rules);
    return scaler;
}

/* ---- Checks ---- */

bool nib_copy_is_cast(const nib_tensor *t, nib_copy copy)
{
    return copy == NIB_ROWWISE ||
           (nib_tensor_has(t, copy) && t->q.block_dims[0] == 1 && !nib_format_of(&t->q)->transposed);
}

nib_status nib_check_castable(const nib_tensor *t)
{
    const nib_quantizer *q = &t->q;
    const bool columnwise = q->columnwise || nib_tensor_has(t, NIB_COLUMNWISE);
    const struct {
        bool refused;
        nib_status status;
        const char *why;
    } rules[] = {
        { !nib_tensor_has(t, NIB_ROWWISE), NIB_ERR_USAGE, "it has no rowwise copy to cast into" },
        { q->swizzled, NIB_ERR_MODE, "its scales are swizzled: unswizzle it first" },
        { q->row_scaled, NIB_ERR_MODE, "it has one amax per row, and a sharded cast reduces those of blocks" },
        { q->rht || q->rht_rowwise, NIB_ERR_MODE, "the RHT mixes elements that different ranks may own" },
        { q->scale_rule == NIB_SCALE_4OVER6, NIB_ERR_MODE,
          "four-over-six compares errors of whole blocks, which different ranks may own" },
        { q->scale_rule == NIB_SCALE_SWEEP, NIB_ERR_MODE,
          "the sweep compares errors of whole blocks, which different ranks may own" },
        { columnwise && q->block_dims[0] == 1 && nib_format_of(q)->transposed, NIB_ERR_USAGE,
          "a columnwise copy is wanted, and with 1xB blocks it has scales of its own and cannot be built from the "
          "rowwise codes" },
        { q->columnwise && !nib_tensor_has(t, NIB_COLUMNWISE) && q->block_dims[0] == 1, NIB_ERR_USAGE,
          "a columnwise copy is wanted, and there is none to cast into" },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].refused)
            return nib_fail(rules[i].status, "%s", rules[i].why);
    return NIB_OK;
}

nib_status nib_piece_init(const char *what, const nib_tensor *t, const nib_array *master, int64_t start,
                          struct nib_piece *out)
{
    const int64_t elements = t->geometry.rows * t->geometry.cols;
    *out = (struct nib_piece){ .t = t };
    if (!master) {
        if (start != -1)
            return nib_fail(NIB_ERR_ARG, "%s begins at element %lld but is NULL", what, (long long)start);
        return NIB_OK;
    }
    TRY(nib_check_array(what, master));
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
    *out = (struct nib_piece){ t, master, start, length };
    return NIB_OK;
}

nib_status nib_check_code_place(const char *what, const nib_tensor *t, nib_copy copy, int64_t start, int64_t length,
                                const nib_array *shard, struct nib_code_place *out)
{
    *out = (struct nib_code_place){ nib_tensor_memory(t, copy).codes, 0 };
    if (!shard)
        return NIB_OK;
    const nib_byte_range range = nib_bytes_of(&t->geometry, copy, start, length);
    TRY(nib_check_output(what, shard));
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

/* The byte of a code, from the first of the copy. */
static int64_t byte_of(const struct nib_copy_geometry *g, int64_t line, int64_t i)
{
    return line * g->line_stride + (g->element_stride ? i * g->element_stride : i / 2);
}

nib_byte_range nib_bytes_of(const struct nib_geometry *geometry, nib_copy copy, int64_t start, int64_t length)
{
    const struct nib_copy_geometry *g = &geometry->copy[copy];
    if (length == 0)
        return (nib_byte_range){ 0 };
    const int64_t cols = geometry->cols, row = start / cols, col = start % cols, last = start + length - 1;
    const int64_t end_row = last / cols, end_col = last % cols;
    const bool rowwise = copy == NIB_ROWWISE, packed = !g->element_stride;
    const int64_t first = rowwise ? byte_of(g, row, col) : byte_of(g, col, row);
    const int64_t end = rowwise ? byte_of(g, end_row, end_col) : byte_of(g, end_col, end_row);
    return (nib_byte_range){ .first = first,
                             .count = end - first + 1,
                             .first_shared = packed && col % 2 == 1,
                             .last_shared = packed && end_col % 2 == 0 && end_col != cols - 1 };
}

/* A packed code beside another's; behind the last of a row comes nobody's nibble, which is 0. */
static void put_code(const struct nib_copy_geometry *g, struct nib_code_place place, int64_t line, int64_t i,
                     uint8_t code)
{
    uint8_t *byte = place.codes + (byte_of(g, line, i) - place.first);
    if (g->element_stride || (i % 2 == 0 && i == g->length - 1))
        *byte = code;
    else
        *byte = (uint8_t)(i % 2 ? (*byte & 0x0F) | code << 4 : (*byte & 0xF0) | code);
}

/* n codes side by side: whole bytes at once, the ones at the ends beside others'. */
static void put_codes(const struct nib_copy_geometry *g, struct nib_code_place place, int64_t line, int64_t i,
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

/* n numbers of a piece from element `first` of the parameter on, as the master has them. */
static void load_numbers(const struct nib_piece *piece, int64_t first, int64_t n, float *x)
{
    const nib_array *master = piece->master;
    const int64_t step = master->strides[0], at = (first - piece->start) * step;
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
static void round_numbers(const struct nib_piece *piece, int64_t n, float *x)
{
    for (int64_t i = 0; piece->t->dtype == NIB_BF16 && piece->master->dtype != NIB_BF16 && i < n; i++)
        x[i] = nib_f32_from_bf16(nib_bf16_from_f32(x[i]));
    for (int64_t i = 0; piece->t->dtype == NIB_F16 && i < n; i++)
        x[i] = nib_f32_from_f16(nib_f16_from_f32(x[i]));
}

/* ---- Walking over a piece ---- */

/* Up to a block of elements side by side in a row: what the steps work on. */
struct span {
    int64_t row, col, n;
    float x[NIB_MAX_BLOCK];
};

struct walk {
    const struct nib_piece *piece;
    const struct nib_grid *grid;
    int64_t band; /* rows of one */
    float *amaxes;
    _Atomic uint32_t whole; /* Float8: the only amax */
    const struct nib_scaler *scaler;
    const void *scales;
    struct nib_code_place place;
    const struct nib_block_kernels *kernels;
    nib_quantize_fn *quantize; /* of whole panels; NULL where they are not NVFP4's */
};

/* Calls body for the spans of the i-th band that has elements of the piece. */
static void walk_band(struct walk *walk, int64_t i, void (*body)(struct walk *walk, struct span *span))
{
    const struct nib_piece *piece = walk->piece;
    const int64_t cols = piece->t->geometry.cols, end = piece->start + piece->length;
    const int64_t block = walk->grid->coding.block ? walk->grid->coding.block : NIB_MAX_BLOCK;
    const int64_t first = (piece->start / cols / walk->band + i) * walk->band;
    for (int64_t row = first; row < first + walk->band; row++) {
        const int64_t from = nib_max(piece->start, row * cols), to = nib_min(end, (row + 1) * cols);
        struct span span = { .row = row };
        for (int64_t at = from; at < to; at += span.n) {
            span.col = at - row * cols;
            span.n = nib_min(to - at, block - span.col % block);
            load_numbers(piece, at, span.n, span.x);
            body(walk, &span);
        }
    }
}

static void run_walk(struct walk *walk, void (*body)(void *context, int64_t i))
{
    const struct nib_piece *piece = walk->piece;
    if (piece->length == 0)
        return;
    const int64_t cols = piece->t->geometry.cols;
    walk->band = nib_max(walk->grid->coding.block, 16);
    const int64_t first = piece->start / cols / walk->band,
                  last = (piece->start + piece->length - 1) / cols / walk->band;
    nib_parallel(last - first + 1, nib_thread_count(&piece->t->q, piece->length), body, walk);
}

/* ---- Amaxes ---- */

/* Rounding keeps the order, so that the largest rounded number is the largest number rounded. */
static float span_absmax(const struct walk *walk, const float *x, int64_t n)
{
    float m = nib_kernels_best()->absmax[NIB_F32](x, n);
    round_numbers(walk->piece, 1, &m);
    return m;
}

static void amax_of_span(struct walk *walk, struct span *span)
{
    const struct nib_grid *grid = walk->grid;
    if (!grid->coding.block) {
        nib_raise_to(&walk->whole, span_absmax(walk, span->x, span->n));
    } else if (grid->coding.copy == NIB_ROWWISE) {
        float *amax = &walk->amaxes[cell_of(grid, span->row, span->col)];
        *amax = nib_fmax(*amax, span_absmax(walk, span->x, span->n));
    } else { /* every element is in a line of its own */
        for (int64_t i = 0; i < span->n; i++) {
            float *amax = &walk->amaxes[cell_of(grid, span->col + i, span->row)];
            *amax = nib_fmax(*amax, span_absmax(walk, &span->x[i], 1));
        }
    }
}

static void amax_of_band(void *context, int64_t i) { walk_band(context, i, amax_of_span); }

void nib_piece_amax(const struct nib_piece *piece, const struct nib_grid *grid, float *amaxes)
{
    struct walk walk = { .piece = piece, .grid = grid, .amaxes = amaxes };
    memset(amaxes, 0, (size_t)(grid->rows * grid->cols) * sizeof *amaxes);
    run_walk(&walk, amax_of_band);
    if (!grid->coding.block)
        *amaxes = nib_float(walk.whole);
}

/* ---- Scales ---- */

struct scale_job {
    const struct nib_grid *grid;
    const struct nib_scaler *scaler;
    const struct nib_block_kernels *kernels;
    const float *amaxes;
    void *scales;
};

/* One row of the grid, to all lines that it stands for. */
static void write_scale_row(void *context, int64_t row)
{
    const struct scale_job *job = context;
    const struct nib_copy_geometry *g = job->grid->geometry;
    const int64_t first = row * job->grid->coding.tile_lines;
    const int64_t end = nib_min(first + job->grid->coding.tile_lines, g->lines);
    for (int64_t block = 0; block < job->grid->cols; block++) {
        const float amax = job->amaxes[row * job->grid->cols + block];
        const nib_scale_bits scale = job->kernels->scale(amax, job->scaler, &job->grid->coding);
        for (int64_t line = first; line < end; line++)
            nib_scale_store(g, job->scales, line, block, scale);
    }
}

void nib_write_scales(nib_tensor *t, const struct nib_grid *grid, const float *amaxes, const float *scale)
{
    const struct nib_copy_memory memory = nib_tensor_memory(t, grid->coding.copy);
    const nib_fpenv saved = nib_fpenv_enter();
    const struct nib_scaler scaler = scaler_of(t, grid, amaxes, scale);
    nib_fpenv_leave(saved);
    if (memory.levels)
        *memory.levels = scaler.level;
    if (!memory.scales)
        return;
    nib_zero_scale_padding(grid->geometry, memory.scales);
    struct scale_job job = { grid, &scaler, nib_block_kernels_of(&t->q), amaxes, memory.scales };
    nib_parallel(grid->rows, nib_thread_count(&t->q, grid->rows * grid->cols), write_scale_row, &job);
}

/* ---- Codes ---- */

static void cast_run(const struct walk *walk, int64_t line, int64_t i, const float *x, int64_t n)
{
    const struct nib_grid *grid = walk->grid;
    const int64_t block = grid->coding.block, b = block ? i / block : 0;
    const nib_scale_bits scale = block ? nib_scale_load(grid->geometry, walk->scales, line, b) : 0;
    const float factor =
        grid->coding.dialect->factor(scale, walk->amaxes[cell_of(grid, line, i)], walk->scaler, &grid->coding.rules);
    uint8_t codes[NIB_MAX_BLOCK];
    walk->kernels->encode(x, n, factor, &grid->coding, line, b, block ? i % block : 0, codes);
    put_codes(grid->geometry, walk->place, line, i, n, codes);
}

static void cast_span(struct walk *walk, struct span *span)
{
    round_numbers(walk->piece, span->n, span->x);
    if (walk->grid->coding.copy == NIB_ROWWISE) {
        cast_run(walk, span->row, span->col, span->x, span->n);
        return;
    }
    for (int64_t i = 0; i < span->n; i++)
        cast_run(walk, span->col + i, span->row, &span->x[i], 1);
}

/* A panel of its own, whose codes and scales lie beside each other here. */
enum { PANEL_ROWS = 16, PANEL_COLS = 256 };

struct panel_stage {
    _Alignas(64) float x[PANEL_ROWS * PANEL_COLS];
    _Alignas(64) uint8_t codes[PANEL_ROWS * PANEL_COLS / 2];
    _Alignas(64) uint8_t scales[PANEL_ROWS * PANEL_COLS / 16];
};

/* Whole blocks by the kernel that quantises whole matrices, which is the fastest there is. It finds scales by itself: they
 * must be those of the reduction, or else somebody else had other numbers for these elements. False then. */
static bool cast_panel(const struct walk *walk, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    const struct nib_piece *piece = walk->piece;
    struct panel_stage stage;
    for (int64_t r = 0; r < rows; r++)
        load_numbers(piece, (row + r) * piece->t->geometry.cols + col, cols, stage.x + r * PANEL_COLS);
    for (int64_t r = 0; r < rows; r++)
        round_numbers(piece, cols, stage.x + r * PANEL_COLS);
    const struct nib_copy_geometry local = { .lines = rows,
                                             .length = cols,
                                             .line_stride = PANEL_COLS / 2,
                                             .blocks = nib_ceil_div(cols, 16),
                                             .scale_line = PANEL_COLS / 16,
                                             .scale_block = 1,
                                             .lines_per_scale = 1,
                                             .scale_bytes = 1,
                                             .levels = 1 };
    struct nib_coding coding = walk->grid->coding;
    coding.origin_line += row;
    coding.origin_block += col / 16;
    const struct nib_panel panel = { .x = stage.x, .dtype = NIB_F32, .stride = PANEL_COLS, .rows = rows, .cols = cols };
    const struct nib_target target = {
        .codes = stage.codes, .scales = stage.scales, .geometry = &local, .levels = &walk->scaler->level
    };
    walk->quantize(&panel, &coding, &target);
    const struct nib_copy_geometry *g = walk->grid->geometry;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < local.blocks; b++)
            if (nib_scale_load(&local, stage.scales, r, b) != nib_scale_load(g, walk->scales, row + r, col / 16 + b))
                return false;
    for (int64_t r = 0; r < rows; r++)
        memcpy(walk->place.codes + (byte_of(g, row + r, col) - walk->place.first), stage.codes + r * PANEL_COLS / 2,
               (size_t)nib_ceil_div(cols, 2));
    return true;
}

static void cast_band(void *context, int64_t i)
{
    struct walk *walk = context;
    const struct nib_piece *piece = walk->piece;
    const int64_t cols = piece->t->geometry.cols, row = (piece->start / cols / walk->band + i) * walk->band;
    const int64_t rows = nib_min(walk->band, piece->t->geometry.rows - row);
    bool done = walk->quantize && row * cols >= piece->start && (row + rows) * cols <= piece->start + piece->length;
    for (int64_t col = 0; col < cols && done; col += PANEL_COLS)
        done = cast_panel(walk, row, rows, col, nib_min(PANEL_COLS, cols - col));
    if (!done)
        walk_band(walk, i, cast_span);
}

void nib_piece_cast(const struct nib_piece *piece, const struct nib_grid *grid, const float *amaxes, const float *scale,
                    struct nib_code_place place)
{
    const nib_tensor *t = piece->t;
    const nib_fpenv saved = nib_fpenv_enter();
    const struct nib_scaler scaler = scaler_of(t, grid, amaxes, scale);
    nib_fpenv_leave(saved);
    struct walk walk = { .piece = piece,
                         .grid = grid,
                         .amaxes = (float *)(uintptr_t)amaxes, /* read only here */
                         .scaler = &scaler,
                         .scales = nib_tensor_memory(t, grid->coding.copy).scales,
                         .place = place,
                         .kernels = nib_block_kernels_of(&t->q),
                         .quantize = nib_format_of(&t->q)->nvfp4_options ? NIB_KERNEL(quantize, t->q.format) : NULL };
    run_walk(&walk, cast_band);
}

/* ---- The public steps ---- */

/* Whether a copy of t can be cast, by itself. */
static nib_status check_step(const nib_tensor *t, nib_copy copy)
{
    if (copy != NIB_ROWWISE && copy != NIB_COLUMNWISE)
        return nib_fail(NIB_ERR_ARG, "%d is not a copy of a tensor", (int)copy);
    TRY(nib_check_castable(t));
    if (!nib_copy_is_cast(t, copy))
        return nib_fail(NIB_ERR_USAGE, "a %s parameter is cast rowwise, and its columnwise copy built from that",
                        nib_format_of(&t->q)->name);
    return NIB_OK;
}

nib_status nib_amax_grid(const nib_tensor *t, nib_copy copy, int64_t *rows, int64_t *cols)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(rows);
    NIB_REQUIRE(cols);
    TRY(check_step(t, copy));
    const struct nib_grid grid = nib_grid_of(t, copy);
    *rows = grid.rows;
    *cols = grid.cols;
    return NIB_OK;
}

nib_status nib_partial_amax(const nib_tensor *t, nib_copy copy, const nib_array *master, int64_t start, float *amaxes)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    struct nib_piece piece;
    TRY(check_step(t, copy));
    TRY(nib_piece_init("the master", t, master, start, &piece));
    const struct nib_grid grid = nib_grid_of(t, copy);
    nib_piece_amax(&piece, &grid, amaxes);
    return NIB_OK;
}

static nib_status check_amaxes(const struct nib_grid *grid, const float *amaxes)
{
    for (int64_t i = 0; i < grid->rows * grid->cols; i++)
        if (!(amaxes[i] >= 0))
            return nib_fail(NIB_ERR_ARG, "amax %lld is negative or a NaN", (long long)i);
    return NIB_OK;
}

nib_status nib_block_scales(nib_tensor *t, nib_copy copy, const float *amaxes)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    TRY(check_step(t, copy));
    const struct nib_grid grid = nib_grid_of(t, copy);
    TRY(check_amaxes(&grid, amaxes));
    nib_write_scales(t, &grid, amaxes, NULL);
    return NIB_OK;
}

nib_status nib_partial_cast(nib_tensor *t, nib_copy copy, const nib_array *master, int64_t start, const float *amaxes,
                            const nib_array *shard)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(amaxes);
    struct nib_piece piece;
    struct nib_code_place place;
    TRY(check_step(t, copy));
    TRY(nib_piece_init("the master", t, master, start, &piece));
    TRY(nib_check_code_place("the shard", t, copy, piece.start, piece.length, shard, &place));
    const struct nib_grid grid = nib_grid_of(t, copy);
    TRY(check_amaxes(&grid, amaxes));
    nib_piece_cast(&piece, &grid, amaxes, NULL, place);
    return NIB_OK;
}

nib_status nib_tensor_byte_range(const nib_tensor *t, nib_copy copy, int64_t start, int64_t length, nib_byte_range *out)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    const int64_t elements = t->geometry.rows * t->geometry.cols;
    if (copy != NIB_ROWWISE && (copy != NIB_COLUMNWISE || nib_format_of(&t->q)->transposed))
        return nib_fail(NIB_ERR_USAGE, "only codes in the order of the elements have ranges of bytes");
    if (start < 0 || length < 0 || start > elements || length > elements - start)
        return nib_fail(NIB_ERR_SHAPE, "%lld elements from %lld on, of %lld", (long long)length, (long long)start,
                        (long long)elements);
    *out = nib_bytes_of(&t->geometry, copy, start, length);
    return NIB_OK;
}

/* ---- Transposes ---- */

nib_status nib_transpose_packed(const uint8_t *codes, int64_t rows, int64_t cols, uint8_t *out)
{
    NIB_REQUIRE(codes);
    NIB_REQUIRE(out);
    TRY(nib_check_shape("codes", 2, (const int64_t[2]){ rows, cols }, NULL));
    static const nib_quantizer default_threads;
    nib_transpose_codes(&default_threads, true, codes, nib_ceil_div(cols, 2), rows, cols, out, nib_ceil_div(rows, 2));
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
