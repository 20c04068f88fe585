/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_rows.c - rows of a product as the panels of every instruction set want them (simd_product.h).
 *
 * Groups of eight rows. Of blocks of codes, for each block in the order of k: the doubled values of the eight rows, a byte
 * each (fixed point: two planes, the low and the high byte of 15 bits, each signed), then eight corrections, then eight
 * factors. Within 8 elements the even ones come first, as the nibbles of a word of codes do.
 */
#include "kernels/product_rows.h"

static const int8_t doubled[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

/* Where element k of a block goes. */
static int place_of(int k) { return k / 8 * 8 + k % 2 * 4 + k % 8 / 2; }

/* What weights that are stored 12 too large add to a dot product. */
static void finish_block(int8_t *record, int row, int planes, int block, int sum, float factor)
{
    int32_t *const corrections = (int32_t *)(void *)(record + planes * NIB_GROUP_ROWS * block);
    float *const factors = (float *)(void *)(corrections + NIB_GROUP_ROWS);
    corrections[row] = -NIB_WEIGHT_BIAS * sum;
    factors[row] = factor;
}

/* A block of codes of one row; n of them are there. */
static void pack_codes(const uint8_t *codes, int64_t n, int block, int row, float factor, int8_t *record)
{
    int8_t *const q = record + row * block;
    int sum = 0;
    memset(q, 0, (size_t)block);
    for (int i = 0; i < n / 2; i++) {
        const int low = doubled[codes[i] & 15], high = doubled[codes[i] >> 4], at = i / 4 * 8 + i % 4;
        q[at] = (int8_t)low;
        q[at + 4] = (int8_t)high;
        sum += low + high;
    }
    if (n % 2) {
        q[place_of((int)n - 1)] = doubled[codes[n / 2] & 15];
        sum += doubled[codes[n / 2] & 15];
    }
    finish_block(record, row, 1, block, sum, factor);
}

/* The factor of a row's block: a quarter of its scale, since both sides' codes are doubled. */
static float quarter_scale(const struct nib_side *side, int64_t line, int64_t block)
{
    const uint8_t code = *nib_side_scales(side, line, block);
    return 0.25f * (nib_format_of(side->q)->scale == NIB_E8M0 ? nib_f32_from_e8m0(code) : nib_f32_from_e4m3(code));
}

void nib_code_block(const struct nib_side *side, int64_t line, int64_t first, int32_t q[NIB_BLOCK], float *factor)
{
    const uint8_t *codes = side->memory.codes + line * side->geometry->line_stride + first / 2;
    const int64_t n = nib_min(NIB_BLOCK, side->length - first);
    for (int i = 0; i < NIB_BLOCK / 2 && n == NIB_BLOCK; i++) {
        q[2 * i] = doubled[codes[i] & 15];
        q[2 * i + 1] = doubled[codes[i] >> 4];
    }
    for (int i = 0; i < NIB_BLOCK && n < NIB_BLOCK; i++)
        q[i] = i < n ? doubled[codes[i / 2] >> 4 * (i % 2) & 15] : 0;
    *factor = 0.25f * nib_f32_from_e4m3(*nib_side_scales(side, line, first / NIB_BLOCK));
}

void nib_pack_block_rows(const struct nib_product *p, struct nib_row_range range, int64_t row, void *packed)
{
    const struct nib_side *a = &p->a;
    const int block = (int)nib_product_block(p->kind);
    const int64_t blocks = nib_ceil_div(a->length, block), end = nib_min(row + NIB_PACKED_ROWS, range.count);
    for (int64_t r = row; r < end; r++) {
        const int64_t line = range.first + r;
        const uint8_t *codes = a->memory.codes + line * a->geometry->line_stride;
        int8_t *record = (int8_t *)packed + r / NIB_GROUP_ROWS * blocks * nib_row_record(1, block);
        for (int64_t b = 0; b < blocks; b++, record += nib_row_record(1, block))
            pack_codes(codes + b * block / 2, nib_min(block, a->length - b * block), block, (int)(r % NIB_GROUP_ROWS),
                       quarter_scale(a, line, b), record);
    }
}

void nib_fixed_block(const struct nib_side *side, int64_t line, int64_t first, int32_t q[NIB_BLOCK], float *factor)
{
    const int64_t n = nib_min(NIB_BLOCK, side->length - first), step = side->element_stride;
    const int64_t at = (line - side->origin) * side->line_stride + first * step;
    float x[NIB_BLOCK] = { 0 };
    uint32_t largest = 0; /* magnitudes are in the order of their bits */
    if (n == NIB_BLOCK && step == 1 && side->dtype == NIB_F32)
        memcpy(x, (const float *)side->values + at, sizeof x);
    else
        for (int i = 0; i < n; i++)
            x[i] = nib_load_value(side->values, at + i * step, side->dtype);
    for (int i = 0; i < NIB_BLOCK; i++) {
        const uint32_t magnitude = nib_bits(x[i]) & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const bool finite = largest < 0x7F800000u;
    const int e = nib_fixed_exponent(finite ? nib_float(largest) : 0);
    for (int i = 0; i < NIB_BLOCK; i++)
        q[i] = finite ? nib_fixed_value(x[i], e) : 0;
    *factor = nib_fixed_factor(e, finite);
}

void nib_pack_fixed_rows(const struct nib_product *p, struct nib_row_range range, int64_t row, void *packed)
{
    enum { PLANE = NIB_GROUP_ROWS * NIB_BLOCK };
    const int64_t blocks = nib_ceil_div(p->a.length, NIB_BLOCK), end = nib_min(row + NIB_PACKED_ROWS, range.count);
    for (int64_t r = row; r < end; r++) {
        int8_t *record = (int8_t *)packed + r / NIB_GROUP_ROWS * blocks * nib_row_record(2, NIB_BLOCK);
        for (int64_t b = 0; b < blocks; b++, record += nib_row_record(2, NIB_BLOCK)) {
            int32_t q[NIB_BLOCK], sum = 0;
            float factor;
            int8_t *const low = record + r % NIB_GROUP_ROWS * NIB_BLOCK;
            nib_fixed_block(&p->a, range.first + r, b * NIB_BLOCK, q, &factor);
            for (int i = 0; i < NIB_BLOCK; i++) {
                const int high = nib_high_byte(q[i]);
                low[place_of(i)] = (int8_t)(q[i] - 256 * high);
                low[PLANE + place_of(i)] = (int8_t)high;
                sum += q[i];
            }
            finish_block(record, (int)(r % NIB_GROUP_ROWS), 2, NIB_BLOCK, sum, factor);
        }
    }
}

void nib_pack_value_rows(const struct nib_product *p, struct nib_row_range range, int64_t row, void *packed)
{
    const struct nib_side *a = &p->a;
    const int64_t end = nib_min(row + NIB_PACKED_ROWS, range.count);
    for (int64_t r = row; r < end; r++) {
        float *to = (float *)packed + r / NIB_GROUP_ROWS * NIB_GROUP_ROWS * a->length + r % NIB_GROUP_ROWS;
        const int64_t from = (range.first + r - a->origin) * a->line_stride;
        for (int64_t k = 0; k < a->length; k++)
            to[k * NIB_GROUP_ROWS] = nib_load_value(a->values, from + k * a->element_stride, a->dtype);
    }
}
