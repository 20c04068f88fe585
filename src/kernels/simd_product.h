/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd_product.h - panels of columns by packed rows: a template over an instruction set, whose lanes are columns.
 *
 * The file that includes it has the vectors of its lanes_*.h and defines
 *
 *   PRODUCT(name)         the name with the set's own ending: a file may include this twice
 *   PRODUCT_SIMD, _SLOT   as SIMD and SLOT
 *   PRODUCT_ROWS          rows that a micro-kernel takes at once: 8, or 4 where registers are few
 *   PRODUCT_VECTORS       vectors of columns that it takes at once
 *   PRODUCT_DOT           partial sums of products, with PRODUCT(dot_start)(correction), PRODUCT(dot_step)(dot, weights, x)
 *                         and PRODUCT(dot_end)(dot, correction), which gives a dword for every lane
 *   PRODUCT(weights)      the doubled value of the low nibble of every byte, as dot_step wants it
 *
 * A panel holds up to NIB_PANEL_COLUMNS columns and all of k: of each vector of columns, for each block, vectors of four
 * elements per lane, then a vector of scales. Rows are those of product_rows.c. Every lane adds its terms in the order of
 * k, as the reference does.
 */
#ifndef NIB_SIMD_PRODUCT_H
#define NIB_SIMD_PRODUCT_H

#include "kernels/product_rows.h"

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Blocks of VL words of codes; rows that are few, and what is packed of k for them at a time. */
enum { ROW_BLOCKS = VL / 2, FEW_ROWS = 16, FEW_ROWS_K = 512 };

/* Bytes of a block of a vector of columns. */
#define PANEL_RECORD(block) ((block)*VL + VL * 4)

/* What a micro-kernel works on: how long a product is, and how it is made of bytes. */
struct product_shape {
    int planes, block;
    bool powers; /* scales are powers of two, whose product may leave FP32's range */
};

#define SHAPE_NVFP4 ((struct product_shape){ 1, 16, false })
#define SHAPE_FIXED ((struct product_shape){ 2, 16, false })
#define SHAPE_MXFP4 ((struct product_shape){ 1, 32, true })

/* Blocks start..end-1 of k. While they are packed, what is read `ahead` lines later is brought nearer. */
struct k_part {
    int64_t start, end, ahead;
};

/* A tile of accumulators, and what all of them begin with. */
struct product_tile {
    _Alignas(64) float acc[NIB_GROUP_ROWS][NIB_PANEL_COLUMNS];
};
static const struct product_tile no_terms;

#endif

/* ---- Panels ---- */

/* E4M3 codes as floats: below 8 they are multiples of 2^-9, above it they are floats of another bias. */
PRODUCT_SIMD VF PRODUCT(scales_e4m3)(VI code)
{
    const VI magnitude = vi_and(code, vi_set1(0x7F)), sign = vi_sll(vi_and(code, vi_set1(0x80)), 24);
    const VI normal = vi_add(vi_sll(magnitude, 20), vi_set1(120 << 23));
    const VF units = vf_from(magnitude);
    const VI value = vi_select_less(units, vf_set1(8), vi_of(vf_mul(units, vf_set1(0x1p-9f))), normal);
    const VI nan = vi_and(vi_equal(magnitude, vi_set1(0x7F)), vi_set1(0x7FC00000));
    return vf_of(vi_or(vi_or(value, sign), nan));
}

PRODUCT_SIMD VF PRODUCT(scales_e8m0)(VI code)
{
    const VI ends = vi_or(vi_equal(code, vi_set1(0)), vi_equal(code, vi_set1(255)));
    return vf_of(vi_or(vi_sll(code, 23), vi_and(ends, vi_set1(0x00400000))));
}

/* The scales of four blocks, or of those that are left, of a vector of columns; columns that are not there have 0. */
PRODUCT_SIMD void PRODUCT(load_scales)(const struct nib_side *b, int64_t first, int64_t lines, int64_t block, VF out[4],
                                       const struct product_shape shape)
{
    int32_t words[VL] = { 0 };
    for (int64_t i = 0; i < lines; i++)
        words[i] = (int32_t)nib_four_scales(b, first + i, block);
    VI word = vi_load(words);
    UNROLL for (int i = 0; i < 4; i++)
    {
        const VI code = vi_and(word, vi_set1(255));
        out[i] = shape.powers ? PRODUCT(scales_e8m0)(code) : PRODUCT(scales_e4m3)(code);
        word = vi_srl(word, 8);
    }
}

PRODUCT_SIMD void PRODUCT(store_scales)(const VF *scales, int64_t n, VF factor, uint8_t *out,
                                        const struct product_shape shape)
{
    for (int64_t i = 0; i < n; i++)
        vf_store((float *)(void *)(out + i * PANEL_RECORD(shape.block) + shape.block * VL), vf_mul(scales[i], factor));
}

/* Those of rows that lie side by side and have no special ones go the way of single rows. */
PRODUCT_SIMD void PRODUCT(pack_scales)(const struct nib_side *b, int64_t first, int64_t lines, struct k_part part,
                                       uint8_t *out, const struct product_shape shape)
{
    const struct nib_usage_geometry *g = b->geometry;
    const bool fast = ROW_BLOCKS >= 4 && !shape.powers && lines == VL && !g->swizzled;
    VF scales[ROW_BLOCKS < 4 ? 4 : ROW_BLOCKS];
    for (int64_t block = part.start, n; block < part.end; block += n) {
        uint8_t *const to = out + (block - part.start) * PANEL_RECORD(shape.block);
        n = nib_min(fast ? ROW_BLOCKS : 4, part.end - block);
        if (fast && n == ROW_BLOCKS && PRODUCT(row_scales)(nib_side_scales(b, first, block), g->scale_line, scales)) {
            PRODUCT(store_scales)(scales, ROW_BLOCKS, vf_set1(256), to, shape);
            continue;
        }
        for (int64_t i = 0; i < n; i += 4) {
            PRODUCT(load_scales)(b, first, lines, block + i, scales, shape);
            PRODUCT(store_scales)(scales, nib_min(4, n - i), vf_set1(1), to + i * PANEL_RECORD(shape.block), shape);
        }
    }
}

/* VL words of codes of each of VL columns, as vectors of the same word of all columns. `bytes` are left in each line. */
PRODUCT_SIMD void PRODUCT(load_words)(const uint8_t *codes, int64_t stride, int64_t lines, int64_t bytes, VF word[VL])
{
    uint8_t copy[VL][VL * 4];
    if (lines < VL || bytes < VL * 4) {
        memset(copy, 0, sizeof copy);
        for (int64_t i = 0; i < lines; i++)
            memcpy(copy[i], codes + i * stride, (size_t)nib_min(bytes, VL * 4));
        codes = copy[0];
        stride = VL * 4;
    }
    UNROLL for (int i = 0; i < VL; i++) word[i] = vf_load((const float *)(const void *)(codes + i * stride));
    vf_transpose(word);
}

/* A word, of eight elements, becomes a vector of its even ones and one of its odd ones. */
PRODUCT_SIMD void PRODUCT(pack_codes)(const uint8_t *codes, int64_t stride, int64_t lines, int64_t bytes, int words,
                                      uint8_t *out, const struct product_shape shape)
{
    VF word[VL];
    PRODUCT(load_words)(codes, stride, lines, bytes, word);
    UNROLL for (int i = 0; i < VL; i++)
    {
        uint8_t *const to = out + i * 8 / shape.block * PANEL_RECORD(shape.block) + i * 8 % shape.block * VL;
        if (i < words) {
            vf_store((float *)(void *)to, vf_of(PRODUCT(weights)(vi_of(word[i]))));
            vf_store((float *)(void *)(to + VL * 4), vf_of(PRODUCT(weights)(vi_srl(vi_of(word[i]), 4))));
        }
    }
}

PRODUCT_SIMD void PRODUCT(pack_columns)(const struct nib_side *b, int64_t first, int64_t lines, struct k_part part,
                                        uint8_t *out, const struct product_shape shape)
{
    enum { WORDS_K = VL * 8 };
    const int64_t stride = b->geometry->line_stride, bytes = nib_ceil_div(b->length, 2);
    const int64_t begin = part.start * shape.block, end = part.end * shape.block;
    const uint8_t *codes = b->memory.codes + first * stride;
    for (int64_t k = begin; k < end; k += WORDS_K) {
        if (lines == VL) /* those behind these lines come next, and lie behind them: one stream */
            for (int64_t at = 0; at < VL * VL * 4; at += 64)
                __builtin_prefetch(codes + part.ahead * stride + k / WORDS_K * VL * VL * 4 + at, 0, 2);
        PRODUCT(pack_codes)
        (codes + k / 2, stride, lines, bytes - k / 2, (int)(nib_min(WORDS_K, end - k) / 8),
         out + (k - begin) / shape.block * PANEL_RECORD(shape.block), shape);
    }
    PRODUCT(pack_scales)(b, first, lines, part, out, shape);
}

/* ---- Micro-kernels ---- */

/* One term for every lane. */
PRODUCT_SIMD VF PRODUCT(add_term)(VI dot, VF scale, VF factor, VF acc, const struct product_shape shape)
{
    if (!shape.powers)
        return vf_multiply_add(vf_from(dot), vf_mul(scale, factor), acc);
    const VI a = vi_of(scale), b = vi_of(factor); /* in the order of their bits, a NaN being the largest */
    return vf_add(acc, vf_mul(vf_mul(vf_from(dot), vf_of(vi_min(a, b))), vf_of(vi_max(a, b))));
}

/* The block of one row by vectors of columns. */
PRODUCT_SIMD void PRODUCT(multiply_block)(const uint8_t *x, int row, VI weights[PRODUCT_VECTORS][8],
                                          const VF scales[PRODUCT_VECTORS], VF *acc, const struct product_shape shape)
{
    const int plane = NIB_GROUP_ROWS * shape.block;
    const int32_t *const corrections = (const int32_t *)(const void *)(x + shape.planes * plane);
    const VF factor = vf_set1(((const float *)(const void *)(corrections + NIB_GROUP_ROWS))[row]);
    const VI correction = vi_set1(corrections[row]);
    PRODUCT_DOT low[PRODUCT_VECTORS], high[PRODUCT_VECTORS];
    UNROLL for (int v = 0; v < PRODUCT_VECTORS; v++)
    {
        low[v] = PRODUCT(dot_start)(correction);
        high[v] = PRODUCT(dot_start)(vi_set1(0));
    }
    UNROLL for (int j = 0; j < shape.block / 4; j++)
    {
        int32_t four[2] = { 0 };
        memcpy(&four[0], x + row * shape.block + 4 * j, 4);
        if (shape.planes == 2)
            memcpy(&four[1], x + plane + row * shape.block + 4 * j, 4);
        UNROLL for (int v = 0; v < PRODUCT_VECTORS; v++)
        {
            low[v] = PRODUCT(dot_step)(low[v], weights[v][j], vi_set1(four[0]));
            if (shape.planes == 2)
                high[v] = PRODUCT(dot_step)(high[v], weights[v][j], vi_set1(four[1]));
        }
    }
    UNROLL for (int v = 0; v < PRODUCT_VECTORS; v++)
    {
        VI dot = PRODUCT(dot_end)(low[v], correction);
        if (shape.planes == 2)
            dot = vi_add(dot, vi_sll(PRODUCT(dot_end)(high[v], vi_set1(0)), 8));
        acc[v] = PRODUCT(add_term)(dot, scales[v], factor, acc[v], shape);
    }
}

/* Some rows of a group by PRODUCT_VECTORS vectors of columns, `apart` bytes from one to the next: `to` is `from` and the
 * terms of these blocks. */
PRODUCT_SIMD void PRODUCT(multiply_tile)(const uint8_t *x, const uint8_t *panel, int64_t apart, int64_t blocks, int row,
                                         const int rows, const float *from, float *to, const struct product_shape shape)
{
    VF acc[PRODUCT_ROWS][PRODUCT_VECTORS];
    from += row * NIB_PANEL_COLUMNS;
    to += row * NIB_PANEL_COLUMNS;
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < PRODUCT_VECTORS; v++) acc[i][v] =
        vf_load(from + i * NIB_PANEL_COLUMNS + v * VL);
    for (int64_t block = 0; block < blocks; block++) {
        VI weights[PRODUCT_VECTORS][8];
        VF scales[PRODUCT_VECTORS];
        UNROLL for (int v = 0; v < PRODUCT_VECTORS; v++)
        {
            const uint8_t *const columns = panel + v * apart;
            UNROLL for (int j = 0; j < shape.block / 4; j++) weights[v][j] =
                vi_load((const int32_t *)(const void *)(columns + j * VL * 4));
            scales[v] = vf_load((const float *)(const void *)(columns + shape.block * VL));
        }
        UNROLL for (int i = 0; i < rows; i++) PRODUCT(multiply_block)(x, row + i, weights, scales, acc[i], shape);
        x += nib_row_record(shape.planes, shape.block);
        panel += PANEL_RECORD(shape.block);
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < PRODUCT_VECTORS; v++)
        vf_store(to + i * NIB_PANEL_COLUMNS + v * VL, acc[i][v]);
}

/* Functions of their own, so that each has the registers to itself. */
#define MICRO_KERNEL(name, rows, shape)                                                                              \
    __attribute__((noinline)) PRODUCT_SLOT void PRODUCT(name)(const uint8_t *x, const uint8_t *panel, int64_t apart, \
                                                              int64_t blocks, int row, const float *from, float *to) \
    {                                                                                                                \
        PRODUCT(multiply_tile)(x, panel, apart, blocks, row, rows, from, to, shape);                                 \
    }
#define MICRO_KERNELS(name, shape)                \
    MICRO_KERNEL(name##_all, PRODUCT_ROWS, shape) \
    MICRO_KERNEL(name##_four, 4, shape)           \
    MICRO_KERNEL(name##_two, 2, shape)            \
    MICRO_KERNEL(name##_one, 1, shape)

MICRO_KERNELS(nvfp4, SHAPE_NVFP4)
MICRO_KERNELS(fixed, SHAPE_FIXED)
MICRO_KERNELS(mxfp4, SHAPE_MXFP4)

typedef void PRODUCT(micro_fn)(const uint8_t *x, const uint8_t *panel, int64_t apart, int64_t blocks, int row,
                               const float *from, float *to);

/* ---- Outputs ---- */

/* The factor of each column for a row, alpha in it; and the bias. They are the same for all rows but where tensor scales
 * or the bias go by row. */
static void PRODUCT(load_factors)(const struct nib_product *p, int64_t i, int64_t first, int64_t count, float *factor,
                                  float *bias)
{
    const bool by_column = nib_side_is_row_scaled(&p->b);
    for (int64_t j = 0; j < count; j++) {
        factor[j] = j && !by_column ? factor[0] : p->out.alpha * nib_product_scale(p, i, first + j);
        bias[j] = p->out.bias ? nib_output_bias(&p->out, i, first + j) : 0;
    }
}

PRODUCT_SIMD VF PRODUCT(quiet)(VF x)
{
    const VI bits = vi_and(vi_of(x), vi_set1(0x7FFFFFFF));
    const VI nan = vi_equal(vi_max(bits, vi_set1(0x7F800001)), bits);
    return vf_of(vi_or(vi_andnot(nan, vi_of(x)), vi_and(nan, vi_set1(0x7FC00000))));
}

/* VL outputs that lie side by side: what is there, and what replaces it. */
PRODUCT_SIMD VF PRODUCT(load_outputs)(const void *y, nib_dtype dtype)
{
    return dtype == NIB_F32 ? vf_load(y) : dtype == NIB_BF16 ? vf_load_bf16(y) : vf_load_f16(y);
}

PRODUCT_SIMD void PRODUCT(store_outputs)(void *y, nib_dtype dtype, VF value)
{
    const VI bits = vi_of(value); /* the one NaN does not overflow by what rounds it to BF16 */
    if (dtype == NIB_F32)
        vf_store(y, value);
    else if (dtype == NIB_F16)
        vf_store_f16(y, value);
    else
        vi_store_halves(y, vi_srl(vi_add(vi_add(bits, vi_set1(0x7FFF)), vi_and(vi_srl(bits, 16), vi_set1(1))), 16));
}

/* A row of accumulators to its outputs; those that make no vector, or lie apart, one by one. */
PRODUCT_SIMD void PRODUCT(store_row)(const struct nib_product_output *out, int64_t i, int64_t first, int64_t count,
                                     const float *acc, const float *factor, const float *bias)
{
    const nib_dtype dtype = out->dtype;
    const int bytes = dtype == NIB_F32 ? 4 : 2;
    char *const to = nib_output_at(out, i, first);
    for (int64_t j = 0; j < count; j += VL) {
        const bool together = out->col_stride == 1 && count - j >= VL;
        char *const at = to + j * out->col_stride * bytes;
        VF value = vf_mul(vf_load(factor + j), vf_load(acc + j));
        if (out->bias)
            value = vf_add(value, vf_load(bias + j));
        if (together) {
            if (out->beta != 0)
                value = vf_add(value, vf_mul(vf_set1(out->beta), PRODUCT(load_outputs)(at, dtype)));
            PRODUCT(store_outputs)(at, dtype, PRODUCT(quiet)(value));
            continue;
        }
        float y[VL];
        vf_store(y, value);
        for (int64_t k = 0; k < nib_min(VL, count - j); k++) {
            char *const one = at + k * out->col_stride * bytes;
            nib_store_value(one, dtype, out->beta != 0 ? y[k] + out->beta * nib_load_value(one, 0, dtype) : y[k]);
        }
    }
}

/* The outputs of the rows of a tile. */
PRODUCT_SLOT void PRODUCT(store_tile)(const struct nib_product *p, int64_t row, int rows, int64_t first, int64_t count,
                                      const struct product_tile *tile, float *factor, float *bias)
{
    const bool by_row = nib_side_is_row_scaled(&p->a) || p->out.bias_row;
    for (int i = 0; i < rows; i++) {
        if (by_row)
            PRODUCT(load_factors)(p, row + i, first, count, factor, bias);
        PRODUCT(store_row)(&p->out, row + i, first, count, tile->acc[i], factor, bias);
    }
}

/* ---- Slots ---- */

/* What a kind of product has of its own: how a part of the columns of a panel is packed, from `panel` on, `apart` bytes from
 * one vector of columns to the next; and what multiplies PRODUCT_ROWS rows by it, four, two and one. */
typedef void PRODUCT(pack_fn)(const struct nib_side *b, int64_t first, int64_t count, struct k_part part, int64_t apart,
                              uint8_t *panel);
struct PRODUCT(panel_kernel) {
    PRODUCT(pack_fn) * pack;
    PRODUCT(micro_fn) * micro[4];
    int64_t rows_record, panel_record;
    int block;
};

/* The rows of a group by the columns of a panel: the tile `to` is `from` and their terms. */
PRODUCT_SLOT void PRODUCT(multiply_group)(const struct PRODUCT(panel_kernel) * kernel, const uint8_t *group,
                                          int64_t rows, int64_t count, const uint8_t *panel, int64_t apart,
                                          int64_t blocks, const struct product_tile *from, struct product_tile *to)
{
    static const int steps[4] = { PRODUCT_ROWS, 4, 2, 1 };
    for (int i = 0, step = 0; i < rows; i += steps[step]) {
        while (steps[step] > rows - i)
            step++;
        for (int64_t v = 0; v * VL < count; v += PRODUCT_VECTORS)
            kernel->micro[step](group, panel + v * apart, apart, blocks, i, from->acc[0] + v * VL, to->acc[0] + v * VL);
    }
}

/* Few rows by a panel: k is cut, so that what is packed stays in the first-level cache and is multiplied while the processor
 * packs what comes next. */
PRODUCT_SLOT void PRODUCT(multiply_few_rows)(const struct PRODUCT(panel_kernel) * kernel, const struct nib_product *p,
                                             struct nib_row_range range, const uint8_t *x, int64_t first, int64_t count,
                                             uint8_t *panel)
{
    const int64_t blocks = nib_ceil_div(p->a.length, kernel->block), step = FEW_ROWS_K / kernel->block;
    const int64_t apart = step * kernel->panel_record;
    _Alignas(64) float factor[NIB_PANEL_COLUMNS] = { 0 }, bias[NIB_PANEL_COLUMNS] = { 0 };
    struct product_tile tiles[FEW_ROWS / NIB_GROUP_ROWS];
    for (int64_t start = 0; start == 0 || start < blocks; start += step) { /* lines of no length have outputs too */
        const struct k_part part = { start, nib_min(start + step, blocks), NIB_PANEL_COLUMNS };
        kernel->pack(&p->b, first, count, part, apart, panel);
        for (int64_t g = 0; g * NIB_GROUP_ROWS < range.count; g++) {
            const uint8_t *const group = x + (g * blocks + start) * kernel->rows_record;
            const int64_t rows = nib_min(NIB_GROUP_ROWS, range.count - g * NIB_GROUP_ROWS), n = part.end - start;
            const struct product_tile *const from = start ? &tiles[g] : &no_terms;
            PRODUCT(multiply_group)(kernel, group, rows, count, panel, apart, n, from, &tiles[g]);
        }
    }
    PRODUCT(load_factors)(p, range.first, first, count, factor, bias);
    for (int64_t row = 0; row < range.count; row += NIB_GROUP_ROWS) {
        const int rows = (int)nib_min(NIB_GROUP_ROWS, range.count - row);
        PRODUCT(store_tile)(p, range.first + row, rows, first, count, &tiles[row / NIB_GROUP_ROWS], factor, bias);
    }
}

/* Many rows by a panel, which is packed once for all of them. Each panel begins at other rows, so that threads do not all
 * ask for the same new pages of y at once. */
PRODUCT_SLOT void PRODUCT(multiply_many_rows)(const struct PRODUCT(panel_kernel) * kernel, const struct nib_product *p,
                                              struct nib_row_range range, const uint8_t *x, int64_t first,
                                              int64_t count, uint8_t *panel)
{
    const int64_t blocks = nib_ceil_div(p->a.length, kernel->block), apart = blocks * kernel->panel_record;
    const int64_t groups = nib_ceil_div(range.count, NIB_GROUP_ROWS), turn = first / NIB_PANEL_COLUMNS * 5;
    _Alignas(64) float factor[NIB_PANEL_COLUMNS] = { 0 }, bias[NIB_PANEL_COLUMNS] = { 0 };
    kernel->pack(&p->b, first, count, (struct k_part){ 0, blocks, VL }, apart, panel);
    PRODUCT(load_factors)(p, range.first, first, count, factor, bias);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (g + turn) % groups, row = at * NIB_GROUP_ROWS;
        const int64_t rows = nib_min(NIB_GROUP_ROWS, range.count - row);
        struct product_tile tile;
        PRODUCT(multiply_group)
        (kernel, x + at * blocks * kernel->rows_record, rows, count, panel, apart, blocks, &no_terms, &tile);
        PRODUCT(store_tile)(p, range.first + row, (int)rows, first, count, &tile, factor, bias);
    }
}

/* Packs a part of the columns, and what is missing to whole vectors. */
PRODUCT_SIMD void PRODUCT(pack_panel)(const struct nib_side *b, int64_t first, int64_t count, struct k_part part,
                                      int64_t apart, uint8_t *panel, const struct product_shape shape)
{
    for (int64_t v = 0; v * VL < nib_round_up(count, PRODUCT_VECTORS * VL); v++) {
        const int64_t lines = nib_max(0, nib_min(VL, count - v * VL));
        PRODUCT(pack_columns)(b, first + (lines ? v * VL : 0), lines, part, panel + v * apart, shape);
    }
}

#define PRODUCT_KERNEL(name, shape)                                                                                    \
    PRODUCT_SLOT void PRODUCT(pack_##name)(const struct nib_side *b, int64_t first, int64_t count, struct k_part part, \
                                           int64_t apart, uint8_t *panel)                                              \
    {                                                                                                                  \
        PRODUCT(pack_panel)(b, first, count, part, apart, panel, shape);                                               \
    }                                                                                                                  \
    PRODUCT_SLOT void PRODUCT(multiply_##name)(const struct nib_product *p, struct nib_row_range range,                \
                                               const void *packed, int64_t first, int64_t count, void *scratch)        \
    {                                                                                                                  \
        const struct PRODUCT(panel_kernel)                                                                             \
            kernel = { PRODUCT(pack_##name),                                                                           \
                       { PRODUCT(name##_all), PRODUCT(name##_four), PRODUCT(name##_two), PRODUCT(name##_one) },        \
                       nib_row_record((shape).planes, (shape).block),                                                  \
                       PANEL_RECORD((shape).block),                                                                    \
                       (shape).block };                                                                                \
        if (range.count <= FEW_ROWS)                                                                                   \
            PRODUCT(multiply_few_rows)(&kernel, p, range, packed, first, count, scratch);                              \
        else                                                                                                           \
            PRODUCT(multiply_many_rows)(&kernel, p, range, packed, first, count, scratch);                             \
    }

PRODUCT_KERNEL(nvfp4, SHAPE_NVFP4)
PRODUCT_KERNEL(fixed, SHAPE_FIXED)
PRODUCT_KERNEL(mxfp4, SHAPE_MXFP4)

/* ---- Values ---- */

/* A group of rows by a vector of columns, value by value. */
PRODUCT_SIMD void PRODUCT(multiply_values_tile)(const float *x, const float *columns, int64_t length, float *out)
{
    VF acc[NIB_GROUP_ROWS];
    UNROLL for (int i = 0; i < NIB_GROUP_ROWS; i++) acc[i] = vf_set1(0);
    for (int64_t k = 0; k < length; k++) {
        const VF column = vf_load(columns + k * NIB_PANEL_COLUMNS);
        UNROLL for (int i = 0; i < NIB_GROUP_ROWS; i++) acc[i] =
            vf_multiply_add(vf_set1(x[k * NIB_GROUP_ROWS + i]), column, acc[i]);
    }
    UNROLL for (int i = 0; i < NIB_GROUP_ROWS; i++) vf_store(out + i * NIB_PANEL_COLUMNS, acc[i]);
}

PRODUCT_SLOT void PRODUCT(multiply_values)(const struct nib_product *p, struct nib_row_range range, const void *packed,
                                           int64_t first, int64_t count, void *scratch)
{
    _Alignas(64) float factor[NIB_PANEL_COLUMNS] = { 0 }, bias[NIB_PANEL_COLUMNS] = { 0 };
    const struct nib_side *const b = &p->b;
    float *const columns = scratch;
    struct product_tile tile;
    for (int64_t j = 0; j < NIB_PANEL_COLUMNS; j++)
        for (int64_t k = 0; k < b->length; k++)
            columns[k * NIB_PANEL_COLUMNS + j] =
                j < count ? nib_load_value(b->values, (first + j - b->origin) * b->line_stride + k * b->element_stride,
                                           b->dtype)
                          : 0;
    PRODUCT(load_factors)(p, range.first, first, count, factor, bias);
    for (int64_t row = 0; row < range.count; row += NIB_GROUP_ROWS) {
        const float *const x = (const float *)packed + row * b->length;
        for (int64_t v = 0; v < count; v += VL)
            PRODUCT(multiply_values_tile)(x, columns + v, b->length, tile.acc[0] + v);
        PRODUCT(store_tile)
        (p, range.first + row, (int)nib_min(NIB_GROUP_ROWS, range.count - row), first, count, &tile, factor, bias);
    }
}

/* ---- The table ---- */

#ifndef PRODUCT_SLOTS
#define PRODUCT_SLOTS                                                                                                \
    .pack_rows = { [NIB_PRODUCT_NVFP4] = nib_pack_block_rows,   [NIB_PRODUCT_MXFP4] = nib_pack_block_rows,           \
                   [NIB_PRODUCT_FIXED] = nib_pack_fixed_rows,   [NIB_PRODUCT_VALUES] = nib_pack_value_rows,          \
                   [NIB_PRODUCT_ROW_NVFP4] = PRODUCT(pack_row), [NIB_PRODUCT_ROW_FIXED] = PRODUCT(pack_row) },       \
    .multiply = {                                                                                                    \
        [NIB_PRODUCT_NVFP4] = PRODUCT(multiply_nvfp4),         [NIB_PRODUCT_MXFP4] = PRODUCT(multiply_mxfp4),        \
        [NIB_PRODUCT_FIXED] = PRODUCT(multiply_fixed),         [NIB_PRODUCT_VALUES] = PRODUCT(multiply_values),      \
        [NIB_PRODUCT_ROW_NVFP4] = PRODUCT(multiply_row_nvfp4), [NIB_PRODUCT_ROW_FIXED] = PRODUCT(multiply_row_fixed) \
    }
#endif

#include "kernels/simd_product_row.h"
