/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd_product_row.h - few rows by columns whose codes are read where they lie, VL columns and VL words of each at a time:
 * the lanes of a vector are first words of a column, and after two sums of pairs they are columns.
 *
 * Goes after simd_product.h, and wants besides
 *
 *   vi_pair_sums(a, b)         a0+a1, a2+a3, b0+b1, b2+b3 in every quarter of 128 bits
 *   vi_even_words(a, b)        a0, a2, b0, b2 in every quarter; vi_odd_words the others
 *   vi_transpose_quarters(v)   of VL / 4 vectors: quarter i of vector j becomes quarter j of vector i
 *   PRODUCT(row_scales)        2^-8 of the scales of VL columns and VL / 2 blocks; false where one is negative or a NaN
 *
 * A packed row has, for VL words of k: of each plane the even elements and then the odd ones, a byte each; a correction for
 * each word; 2^8 of the factors of its blocks.
 */
#ifndef NIB_SIMD_PRODUCT_ROW_H
#define NIB_SIMD_PRODUCT_ROW_H

enum { ROW_WORDS_K = VL * 8 };
#define ROW_RECORD(planes) ((planes)*ROW_WORDS_K + VL * 8)

#endif

/* A block's values and their factor; the other planes hold what a byte does not. */
PRODUCT_SIMD void PRODUCT(pack_row_block)(const int32_t q[NIB_BLOCK], float factor, int block, int8_t *record,
                                          const int planes)
{
    int32_t *const corrections = (int32_t *)(void *)(record + planes * ROW_WORDS_K);
    float *const factors = (float *)(void *)(corrections + VL);
    int8_t *const even = record + block * 8, *const odd = even + VL * 4;
    int32_t sums[2] = { 0, 0 }; /* of the block's two words */
    factors[block] = 256 * factor;
    UNROLL for (int i = 0; i < NIB_BLOCK / 2; i++)
    {
        const int high[2] = { planes == 2 ? nib_high_byte(q[2 * i]) : 0,
                              planes == 2 ? nib_high_byte(q[2 * i + 1]) : 0 };
        even[i] = (int8_t)(q[2 * i] - 256 * high[0]);
        odd[i] = (int8_t)(q[2 * i + 1] - 256 * high[1]);
        if (planes == 2) {
            even[ROW_WORDS_K + i] = (int8_t)high[0];
            odd[ROW_WORDS_K + i] = (int8_t)high[1];
        }
        sums[i / 4] += q[2 * i] + q[2 * i + 1];
    }
    corrections[2 * block] = -NIB_WEIGHT_BIAS * sums[0];
    corrections[2 * block + 1] = -NIB_WEIGHT_BIAS * sums[1];
}

PRODUCT_SIMD void PRODUCT(pack_one_row)(const struct nib_side *a, int64_t line, int8_t *to, const int planes)
{
    const int64_t blocks = nib_ceil_div(a->length, NIB_BLOCK);
    for (int64_t b = 0; b < blocks; b++) {
        int32_t q[NIB_BLOCK];
        float factor;
        if (planes == 2)
            nib_fixed_block(a, line, b * NIB_BLOCK, q, &factor);
        else
            nib_code_block(a, line, b * NIB_BLOCK, q, &factor);
        PRODUCT(pack_row_block)
        (q, factor, (int)(b % ROW_BLOCKS), to + b / ROW_BLOCKS * ROW_RECORD(planes), planes);
    }
}

PRODUCT_SLOT void PRODUCT(pack_row)(const struct nib_product *p, struct nib_row_range range, int64_t row, void *packed)
{
    const int planes = p->kind == NIB_PRODUCT_FIXED ? 2 : 1;
    const int64_t blocks = nib_ceil_div(p->a.length, NIB_BLOCK), records = nib_ceil_div(blocks, ROW_BLOCKS);
    for (int64_t r = row; r < nib_min(row + NIB_PACKED_ROWS, range.count); r++) {
        int8_t *const to = (int8_t *)packed + r * records * ROW_RECORD(planes);
        memset(to, 0, (size_t)(records * ROW_RECORD(planes)));
        if (planes == 2)
            PRODUCT(pack_one_row)(&p->a, range.first + r, to, 2);
        else
            PRODUCT(pack_one_row)(&p->a, range.first + r, to, 1);
    }
}

/* The dot products of the words of one column. */
PRODUCT_SIMD VI PRODUCT(row_dot)(VI codes, const uint8_t *x, const int planes)
{
    const VI even = PRODUCT(weights)(codes), odd = PRODUCT(weights)(vi_srl(codes, 4));
    const VI correction = vi_load((const int32_t *)(const void *)(x + planes * ROW_WORDS_K));
    VI dot = vi_set1(0);
    UNROLL for (int i = 0; i < planes; i++)
    {
        const int32_t *const q = (const int32_t *)(const void *)(x + i * ROW_WORDS_K);
        const VI start = i ? vi_set1(0) : correction;
        PRODUCT_DOT sum = PRODUCT(dot_step)(PRODUCT(dot_start)(start), even, vi_load(q));
        sum = PRODUCT(dot_step)(sum, odd, vi_load(q + VL));
        dot = i ? vi_add(dot, vi_sll(PRODUCT(dot_end)(sum, start), 8)) : PRODUCT(dot_end)(sum, start);
    }
    return dot;
}

/* Any scales, of fewer blocks too. Far from the loop, whose registers it would take. */
__attribute__((noinline)) PRODUCT_SLOT void PRODUCT(any_row_scales)(const uint8_t *scales, int64_t stride, int blocks,
                                                                    float *out)
{
    for (int b = 0; b < blocks; b++) {
        int32_t codes[VL];
        for (int i = 0; i < VL; i++)
            codes[i] = scales[i * stride + b];
        vf_store(out + b * VL, vf_mul(PRODUCT(scales_e4m3)(vi_load(codes)), vf_set1(0x1p-8f)));
    }
}

/* What is left of a column's codes where that is less than VL words. */
PRODUCT_SIMD VI PRODUCT(last_words)(const uint8_t *codes, int64_t bytes)
{
    int32_t words[VL] = { 0 };
    memcpy(words, codes, (size_t)bytes);
    return vi_load(words);
}

/* A part of VL columns: VL words of each, or what is left. */
struct PRODUCT(row_part) {
    const uint8_t *codes, *scales, *next;
    int64_t stride, scale_stride;
    int64_t bytes, blocks; /* left in each column */
    const uint8_t *x;      /* of the packed row */
};

/* One part. Columns so far apart are no stream that a processor would see; those behind them, taken together, are one, of
 * which a part is at `next`. */
PRODUCT_SIMD VF PRODUCT(row_step)(const struct PRODUCT(row_part) * p, VF acc, const int planes, const bool whole)
{
    const float *const factors = (const float *)(const void *)(p->x + planes * ROW_WORDS_K + VL * 4);
    const int blocks = whole ? ROW_BLOCKS : (int)nib_min(p->blocks, ROW_BLOCKS);
    VI even[VL / 4], odd[VL / 4];
    VF scale[ROW_BLOCKS];
    UNROLL for (int g = 0; g < VL / 4; g++)
    {
        VI dot[4];
        UNROLL for (int i = 0; i < VL / 4; i++) __builtin_prefetch(p->next + (g * VL / 4 + i) * 64, 0, 2);
        UNROLL for (int i = 0; i < 4; i++)
        {
            const uint8_t *const from = p->codes + (g * 4 + i) * p->stride;
            dot[i] = PRODUCT(row_dot)(whole ? vi_load((const int32_t *)(const void *)from)
                                            : PRODUCT(last_words)(from, nib_min(p->bytes, VL * 4)),
                                      p->x, planes);
        }
        const VI first = vi_pair_sums(dot[0], dot[1]), second = vi_pair_sums(dot[2], dot[3]);
        even[g] = vi_even_words(first, second);
        odd[g] = vi_odd_words(first, second);
    }
    vi_transpose_quarters(even);
    vi_transpose_quarters(odd);
    if (!whole || !PRODUCT(row_scales)(p->scales, p->scale_stride, scale)) {
        _Alignas(64) float any[ROW_BLOCKS * VL] = { 0 };
        PRODUCT(any_row_scales)(p->scales, p->scale_stride, blocks, any);
        UNROLL for (int b = 0; b < ROW_BLOCKS; b++) scale[b] = vf_load(any + b * VL);
    }
    UNROLL for (int b = 0; b < ROW_BLOCKS; b++) /* without a block the factor is 0, and the sum as it was */
        acc = vf_multiply_add(vf_from(b % 2 ? odd[b / 2] : even[b / 2]), vf_mul(scale[b], vf_set1(factors[b])), acc);
    return acc;
}

__attribute__((noinline)) PRODUCT_SLOT VF PRODUCT(last_row_step)(const struct PRODUCT(row_part) * p, VF acc, int planes)
{
    return planes == 2 ? PRODUCT(row_step)(p, acc, 2, false) : PRODUCT(row_step)(p, acc, 1, false);
}

/* One packed row by VL columns from `line` on. */
PRODUCT_SIMD VF PRODUCT(row_columns)(const struct nib_side *b, int64_t line, const uint8_t *x, const int planes)
{
    const int64_t stride = b->geometry->line_stride, scale_stride = b->geometry->scale_line;
    struct PRODUCT(row_part) p = { .codes = b->memory.codes + line * stride,
                                   .scales = (const uint8_t *)b->memory.scales + line * scale_stride,
                                   .stride = stride,
                                   .scale_stride = scale_stride,
                                   .bytes = nib_ceil_div(b->length, 2),
                                   .blocks = b->geometry->blocks,
                                   .x = x };
    VF acc = vf_set1(0);
    const uint8_t *next_scales = p.scales + VL * scale_stride;
    p.next = p.codes + VL * stride;
    for (; p.bytes > 0; p.bytes -= VL * 4, p.blocks -= ROW_BLOCKS) {
        for (int64_t at = 0; at < VL * ROW_BLOCKS; at += 64)
            __builtin_prefetch(next_scales + at, 0, 2);
        if (p.bytes >= VL * 4) /* then all blocks are there */
            acc = PRODUCT(row_step)(&p, acc, planes, true);
        else
            acc = PRODUCT(last_row_step)(&p, acc, planes);
        p.codes += VL * 4;
        p.scales += ROW_BLOCKS;
        p.next += VL * VL * 4;
        p.x += ROW_RECORD(planes);
        next_scales += VL * ROW_BLOCKS;
    }
    return acc;
}

/* b has at least VL columns: the last ones are computed from VL before the end. */
PRODUCT_SIMD void PRODUCT(multiply_row)(const struct nib_product *p, struct nib_row_range range, const void *packed,
                                        int64_t first, int64_t count, const int planes)
{
    const int64_t records = nib_ceil_div(nib_ceil_div(p->b.length, NIB_BLOCK), ROW_BLOCKS);
    _Alignas(64) float factor[NIB_PANEL_COLUMNS] = { 0 }, bias[NIB_PANEL_COLUMNS] = { 0 };
    struct product_tile tile;
    for (int64_t j = first; j < first + count; j += VL) {
        const int64_t line = nib_min(j, p->b.lines - VL), n = nib_min(VL, first + count - j);
        PRODUCT(load_factors)(p, range.first, j, n, factor, bias);
        for (int64_t r = 0; r < range.count; r++) {
            const uint8_t *const x = (const uint8_t *)packed + r * records * ROW_RECORD(planes);
            float *const acc = tile.acc[r];
            vf_store(acc, PRODUCT(row_columns)(&p->b, line, x, planes));
            memmove(acc, acc + (j - line), (size_t)n * sizeof *acc);
        }
        PRODUCT(store_tile)(p, range.first, (int)range.count, j, n, &tile, factor, bias);
    }
}

PRODUCT_SLOT void PRODUCT(multiply_row_nvfp4)(const struct nib_product *p, struct nib_row_range range,
                                              const void *packed, int64_t first, int64_t count, void *scratch)
{
    (void)scratch;
    PRODUCT(multiply_row)(p, range, packed, first, count, 1);
}

PRODUCT_SLOT void PRODUCT(multiply_row_fixed)(const struct nib_product *p, struct nib_row_range range,
                                              const void *packed, int64_t first, int64_t count, void *scratch)
{
    (void)scratch;
    PRODUCT(multiply_row)(p, range, packed, first, count, 2);
}
