/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_scalar.c - the reference for NVFP4: the formulas of format/rules.h, applied to panels. Every other kernel is compared
 * with this one.
 *
 * The unit of work is a tile: the elements that share one scale. It has one line of 16 elements, or 16 lines of 16. A
 * line runs along the axis that is quantized: rowwise, part of a row; columnwise, part of a column. Both usages
 * and both block shapes are therefore the same code.
 */
#include "kernels/kernels.h"
#include "kernels/kernels_generic.h"

enum { BLOCK = NIB_BLOCK };

struct tile {
    int lines, length; /* how many are inside the matrix */
    float absmax;
    float x[BLOCK][BLOCK];
};

struct tile_codes {
    uint8_t scale;
    uint8_t code[BLOCK][BLOCK];
};

/* ---- Largest magnitudes ---- */

/* `a > m` is false for a NaN, which is how NaNs are left out. */
#define DEFINE_ABSMAX(name, type, to_f32)               \
    static float name(const void *x, int64_t n)         \
    {                                                   \
        const type *values = x;                         \
        float m = 0;                                    \
        for (int64_t i = 0; i < n; i++) {               \
            const float a = nib_abs(to_f32(values[i])); \
            m = a > m ? a : m;                          \
        }                                               \
        return m;                                       \
    }

static float identity(float x) { return x; }

DEFINE_ABSMAX(absmax_f32, float, identity)
DEFINE_ABSMAX(absmax_bf16, uint16_t, nib_f32_from_bf16)
DEFINE_ABSMAX(absmax_f16, uint16_t, nib_f32_from_f16)

static float tile_absmax(const struct tile *tile)
{
    float m = 0;
    for (int line = 0; line < tile->lines; line++) {
        const float a = absmax_f32(tile->x[line], tile->length);
        m = a > m ? a : m;
    }
    return m;
}

/* ---- Tiles of a panel ---- */

/* The tile whose first element is `first` of line `line`, counted within the panel. */
static void load_tile(const struct nib_panel *panel, const struct nib_coding *coding, int64_t line, int64_t first,
                      struct tile *tile)
{
    tile->lines = (int)nib_min(coding->tile_lines, nib_panel_lines(panel, coding->usage) - line);
    tile->length = (int)nib_min(BLOCK, nib_panel_length(panel, coding->usage) - first);
    for (int l = 0; l < tile->lines; l++) {
        for (int i = 0; i < tile->length; i++)
            tile->x[l][i] = coding->usage == NIB_ROWWISE ? nib_panel_element(panel, line + l, first + i)
                                                         : nib_panel_element(panel, first + i, line + l);
        if (coding->rht)
            nib_rht_forward(tile->x[l], coding->sign_mask, panel->dtype);
    }
    tile->absmax = tile_absmax(tile);
}

static void absmax_lines(const struct nib_panel *panel, const struct nib_coding *coding, float *out)
{
    struct nib_coding single = *coding;
    single.tile_lines = 1;
    for (int64_t line = 0; line < nib_panel_lines(panel, coding->usage); line++)
        for (int64_t first = 0; first < nib_panel_length(panel, coding->usage); first += BLOCK) {
            struct tile tile;
            load_tile(panel, &single, line, first, &tile);
            out[line] = nib_fmax(out[line], tile.absmax);
        }
}

/* ---- Stochastic rounding ---- */

/* The random bits of one block of a line. */
static void random_block(const struct nib_coding *coding, int64_t line, uint32_t column, uint32_t out[BLOCK])
{
    nib_random_block(coding->rounding, coding->seed, coding->offset, (uint32_t)line, column, out);
}

/* The random bits of a tile. In the columnwise usage of square tiles, which has those of the rowwise one, a line is a
 * column of the matrix. */
static void random_tile(const struct nib_coding *coding, const struct tile *tile, int64_t line, int64_t block,
                        uint32_t out[BLOCK][BLOCK])
{
    const bool columnwise = coding->usage == NIB_COLUMNWISE;
    if (!columnwise || coding->tile_lines == 1) {
        for (int l = 0; l < tile->lines; l++)
            random_block(coding, coding->origin_line + line + l,
                         nib_random_column(coding->origin_block + block, columnwise), out[l]);
        return;
    }
    for (int i = 0; i < tile->length; i++) {
        uint32_t row[BLOCK];
        random_block(coding, (coding->origin_block + block) * BLOCK + i,
                     nib_random_column((coding->origin_line + line) / BLOCK, false), row);
        for (int l = 0; l < tile->lines; l++)
            out[l][i] = row[l];
    }
}

/* ---- From scale to codes ---- */

/* Codes of n elements of a line under their block's factor; `random` is NULL for nearest. */
static void encode_line(const float *x, int64_t n, float factor, const struct nib_coding *coding,
                        const uint32_t *random, uint8_t *codes)
{
    const struct nib_element_rule rule = coding->dialect->elements;
    for (int64_t i = 0; i < n; i++) {
        const float y = nib_scaled(x[i], factor, rule.divides);
        codes[i] = random ? nib_e2m1_stochastic(y, random[i], nib_random_bits(coding->rounding))
                          : nib_e2m1_nearest(x[i], y, &rule);
    }
}

/* Codes of the elements inside the matrix; those outside stay 0. `random` is NULL for nearest. */
static void encode_tile(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                        uint32_t (*random)[BLOCK], struct tile_codes *out)
{
    const float factor = coding->dialect->factor(out->scale, tile->absmax, scaler, &coding->rules);
    for (int l = 0; l < tile->lines; l++)
        encode_line(tile->x[l], tile->length, factor, coding, random ? random[l] : NULL, out->code[l]);
}

/* ---- Scale rules ---- */

static nib_scale_bits block_scale_nvfp4(float block_amax, const struct nib_scaler *scaler,
                                        const struct nib_coding *coding)
{
    const nib_scale_bits scale = coding->rounding == NIB_ROUND_STOCHASTIC_UNBIASED
                                     ? nib_te_unbiased_block_scale(block_amax, scaler)
                                     : coding->dialect->block_scale(block_amax, scaler, &coding->rules);
    return nib_at_least((uint8_t)scale, coding->floor_code);
}

static void quantize_rtn(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                         uint32_t (*random)[BLOCK], struct tile_codes *out)
{
    out->scale = (uint8_t)block_scale_nvfp4(tile->absmax, scaler, coding);
    encode_tile(tile, coding, scaler, random, out);
}

/* Four over six: the error of one candidate. */
static float candidate_error(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                             const struct tile_codes *candidate)
{
    float line_error[BLOCK] = { 0 };
    for (int l = 0; l < tile->lines; l++)
        line_error[l] = nib_4over6_error(tile->x[l], candidate->code[l], tile->length, candidate->scale, scaler,
                                         &coding->rules, coding->error_mode, coding->fast_error);
    return coding->tile_lines == 1 ? line_error[0] : nib_tree_sum(line_error);
}

static void quantize_4over6(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                            struct tile_codes *out)
{
    struct tile_codes six = { .scale = nib_4over6_scale(tile->absmax, false, scaler, coding->floor_code) };
    struct tile_codes four = { .scale = nib_4over6_scale(tile->absmax, true, scaler, coding->floor_code) };
    encode_tile(tile, coding, scaler, NULL, &six);
    encode_tile(tile, coding, scaler, NULL, &four);
    const float error_four = candidate_error(tile, coding, scaler, &four);
    *out = error_four < candidate_error(tile, coding, scaler, &six) ? four : six; /* a tie is six */
}

static void quantize_sweep(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                           int64_t block, struct tile_codes *out)
{
    const float *importance = coding->importance ? coding->importance + block * BLOCK : NULL;
    const float scale_inv = nib_scale_inv(scaler->tensor_scale, &coding->rules);
    const int rtn = (int)block_scale_nvfp4(tile->absmax, scaler, coding);
    float least = 0;
    for (int i = 0; i < NIB_SWEEP_CANDIDATES; i++) {
        const int code = rtn + nib_sweep_offset(i);
        if (!nib_sweep_allows(code, rtn, coding->floor_code))
            continue;
        struct tile_codes candidate = { .scale = (uint8_t)code };
        encode_tile(tile, coding, scaler, NULL, &candidate);
        const float error = nib_weighted_sweep_error(tile->x[0], candidate.code[0], tile->length, candidate.scale,
                                                     scale_inv, importance);
        if (i == 0 || error < least) {
            least = error;
            *out = candidate;
        }
    }
}

/* ---- A panel ---- */

static void store_tile(const struct nib_target *target, const struct tile *tile, const struct tile_codes *codes,
                       int64_t line, int64_t block)
{
    for (int l = 0; l < tile->lines; l++) {
        nib_scale_store(target->geometry, target->scales, line + l, block, codes->scale);
        uint8_t *bytes = target->codes + (line + l) * target->geometry->line_stride + block * (BLOCK / 2);
        for (int i = 0; i < tile->length; i += 2)
            bytes[i / 2] = (uint8_t)(codes->code[l][i] | codes->code[l][i + 1] << 4);
    }
}

static void quantize_tile(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                          int64_t line, int64_t block, struct tile_codes *out)
{
    uint32_t random[BLOCK][BLOCK];
    const bool stochastic = coding->rounding != NIB_ROUND_NEAREST;
    if (stochastic)
        random_tile(coding, tile, line, block, random);
    if (coding->scale_rule == NIB_SCALE_4OVER6)
        quantize_4over6(tile, coding, scaler, out);
    else if (coding->scale_rule == NIB_SCALE_SWEEP)
        quantize_sweep(tile, coding, scaler, block, out);
    else
        quantize_rtn(tile, coding, scaler, stochastic ? random : NULL, out);
}

static void quantize_nvfp4(const struct nib_panel *panel, const struct nib_coding *coding,
                           const struct nib_target *target)
{
    const bool rowwise = coding->usage == NIB_ROWWISE;
    const int64_t first_line = rowwise ? panel->row : panel->col;
    const int64_t first_block = (rowwise ? panel->col : panel->row) / BLOCK;
    for (int64_t line = 0; line < nib_panel_lines(panel, coding->usage); line += coding->tile_lines) {
        struct nib_scaler scaler = { .tensor_scale =
                                         target->tensor_scales[target->tensor_scale_per_line ? first_line + line : 0] };
        coding->dialect->prepare(&scaler, &coding->rules);
        for (int64_t first = 0; first < nib_panel_length(panel, coding->usage); first += BLOCK) {
            struct tile tile;
            struct tile_codes codes = { 0 };
            load_tile(panel, coding, line, first, &tile);
            quantize_tile(&tile, coding, &scaler, first_line + line, first_block + first / BLOCK, &codes);
            store_tile(target, &tile, &codes, first_line + line, first_block + first / BLOCK);
        }
    }
}

/* ---- A part of a block ---- */

static void encode_nvfp4(const float *x, int64_t n, float factor, const struct nib_coding *coding, int64_t line,
                         int64_t block, int64_t first, uint8_t *codes)
{
    const bool stochastic = coding->rounding != NIB_ROUND_NEAREST;
    uint32_t random[BLOCK] = { 0 };
    if (stochastic)
        random_block(coding, coding->origin_line + line,
                     nib_random_column(coding->origin_block + block, coding->usage == NIB_COLUMNWISE), random);
    encode_line(x, n, factor, coding, stochastic ? random + first : NULL, codes);
}

const struct nib_block_kernels nib_block_kernels_nvfp4 = { block_scale_nvfp4, encode_nvfp4 };

/* ---- Back ---- */

static void decode_nvfp4(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                         float tensor_scale, const struct nib_coding *coding, bool stream)
{
    (void)stream;
    for (int64_t i = 0; i < n; i++) {
        const float f =
            coding->dialect->decode_factor(((const uint8_t *)scales)[i / BLOCK], tensor_scale, &coding->rules);
        nib_store_value((char *)y + i * (dtype == NIB_F32 ? 4 : 2), dtype,
                        nib_f32_from_e2m1(codes[i / 2] >> 4 * (i % 2) & 15) * f);
    }
}

static void inverse_rht(void *y, nib_dtype dtype, const float *x, int64_t n, uint16_t sign_mask)
{
    for (int64_t i = 0; i < n; i += BLOCK) {
        float block[BLOCK];
        memcpy(block, x + i, sizeof block);
        nib_rht_inverse(block, sign_mask);
        for (int k = 0; k < BLOCK; k++)
            nib_store_value((char *)y + (i + k) * (dtype == NIB_F32 ? 4 : 2), dtype, block[k]);
    }
}

static void inverse_rht_f32(void *y, const float *x, int64_t n, uint16_t mask) { inverse_rht(y, NIB_F32, x, n, mask); }
static void inverse_rht_bf16(void *y, const float *x, int64_t n, uint16_t mask)
{
    inverse_rht(y, NIB_BF16, x, n, mask);
}
static void inverse_rht_f16(void *y, const float *x, int64_t n, uint16_t mask) { inverse_rht(y, NIB_F16, x, n, mask); }

const struct nib_kernels nib_kernels_scalar = {
    .absmax = { [NIB_F32] = absmax_f32, [NIB_BF16] = absmax_bf16, [NIB_F16] = absmax_f16 },
    .absmax_lines = { [NIB_GENERIC_FORMAT] = absmax_lines },
    .quantize = { [NIB_NVFP4] = quantize_nvfp4, [NIB_GENERIC_FORMAT] = nib_quantize_generic },
    .decode = { [NIB_NVFP4] = decode_nvfp4, [NIB_GENERIC_FORMAT] = nib_decode_generic },
    .inverse_rht = { [NIB_F32] = inverse_rht_f32, [NIB_BF16] = inverse_rht_bf16, [NIB_F16] = inverse_rht_f16 },
    .transpose = { [NIB_E2M1] = nib_transpose_nibbles,
                   [NIB_U8] = nib_transpose_bytes,
                   [NIB_BF16] = nib_transpose_halves,
                   [NIB_F32] = nib_transpose_words },
    .multiply = { [NIB_PRODUCT_NVFP4] = nib_multiply_scalar,
                  [NIB_PRODUCT_MXFP4] = nib_multiply_scalar,
                  [NIB_PRODUCT_FIXED] = nib_multiply_scalar,
                  [NIB_PRODUCT_VALUES] = nib_multiply_scalar },
};
