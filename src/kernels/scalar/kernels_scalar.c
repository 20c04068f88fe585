/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_scalar.c - the reference for NVFP4. What a byte must be is decided here; every other kernel is compared with
 * this one.
 *
 * The unit of work is a tile: the elements that share one scale. It has one line of 16 elements, or 16 lines of 16. A
 * line runs along the axis that is quantized: rowwise, a piece of a row; columnwise, a piece of a column. Both copies
 * and both block shapes are therefore the same code.
 */
#include <float.h>

#include "format/codec.h"
#include "kernels/kernels.h"
#include "kernels/kernels_generic.h"
#include "format/philox.h"

enum { BLOCK = 16 };

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

/* ---- The random Hadamard transform ---- */

static void butterflies(float x[16])
{
    for (int stride = 1; stride < 16; stride *= 2)
        for (int i = 0; i < 16; i++)
            if (!(i & stride)) {
                const float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
}

static void flip_signs(float x[16], uint16_t sign_mask)
{
    for (int i = 0; i < 16; i++)
        if (sign_mask >> i & 1)
            x[i] = -x[i];
}

/* A quarter of a BF16 or F16 number is exact in FP32, so that it is taken first and keeps the sums small; a quarter of
 * an FP32 number may be subnormal, so that it is taken last. BF16 results are rounded to BF16, because the amax and the
 * codes of a BF16 tensor are those of the BF16 tensor that the transform would have written. */
void nib_rht_forward(float x[16], uint16_t sign_mask, nib_dtype input)
{
    flip_signs(x, sign_mask);
    if (input != NIB_F32)
        for (int i = 0; i < 16; i++)
            x[i] *= 0.25f;
    butterflies(x);
    for (int i = 0; i < 16; i++) {
        if (input == NIB_F32)
            x[i] *= 0.25f;
        if (input == NIB_BF16)
            x[i] = nib_f32_from_bf16(nib_bf16_from_f32(x[i]));
    }
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

enum { RANDOM_BITS_8 = 8, RANDOM_BITS_24 = 24 };

static int random_bits(nib_rounding rounding)
{
    return rounding == NIB_ROUND_STOCHASTIC_8 ? RANDOM_BITS_8 : RANDOM_BITS_24;
}

/* The random numbers of one block of a copy. 8-bit: one Philox call, a byte each. 24-bit: four calls, a word each. */
static void random_block(const struct nib_coding *coding, uint32_t line, uint32_t block, uint32_t out[BLOCK])
{
    const uint32_t key[2] = { (uint32_t)coding->seed, (uint32_t)(coding->seed >> 32) };
    for (int quad = 0; quad < BLOCK / 4; quad++) {
        const bool bytes = coding->rounding == NIB_ROUND_STOCHASTIC_8;
        const uint64_t offset = coding->offset + (bytes ? 0 : (uint64_t)quad);
        uint32_t words[4];
        nib_philox_block((const uint32_t[4]){ (uint32_t)offset, (uint32_t)(offset >> 32), line, block }, key, words);
        for (int i = 0; i < 4; i++)
            out[4 * quad + i] = bytes ? words[quad] >> 8 * i & 255 : words[i] >> 8;
    }
}

/* The random numbers of a tile. A columnwise usage has numbers of its own, marked in the block's top bit; but with
 * square tiles it takes the rowwise ones, element by element, so that it stays the transpose. There a line is a column
 * of the matrix. */
static void random_tile(const struct nib_coding *coding, const struct tile *tile, int64_t line, int64_t block,
                        uint32_t out[BLOCK][BLOCK])
{
    const bool columnwise = coding->usage == NIB_COLUMNWISE;
    if (!columnwise || coding->tile_lines == 1) {
        for (int l = 0; l < tile->lines; l++)
            random_block(coding, (uint32_t)(coding->origin_line + line + l),
                         (uint32_t)(coding->origin_block + block) | (columnwise ? 0x80000000u : 0), out[l]);
        return;
    }
    for (int i = 0; i < tile->length; i++) {
        uint32_t row[BLOCK];
        random_block(coding, (uint32_t)((coding->origin_block + block) * BLOCK + i),
                     (uint32_t)((coding->origin_line + line) / BLOCK), row);
        for (int l = 0; l < tile->lines; l++)
            out[l][i] = row[l];
    }
}

/* Up with the probability that y's place between its two neighbors says, to 2^-bits; r is a number of that many
 * bits. */
static uint8_t e2m1_stochastic(float y, uint32_t r, int bits)
{
    const float m = nib_abs(y);
    if (nib_is_nan(y))
        return 7;
    const uint8_t sign = (uint8_t)(nib_bits(y) >> 31 << 3);
    if (m >= 6.0f)
        return sign | 7;
    const float step = m >= 4.0f ? 2.0f : m >= 2.0f ? 1.0f : 0.5f;
    const int steps = (int)(m / step);
    const int code = m >= 4.0f ? steps + 4 : m >= 2.0f ? steps + 2 : steps; /* of the neighbor below */
    const float frac = (m - (float)steps * step) / step;                    /* exact */
    const uint32_t one = 1u << bits;
    return sign | (uint8_t)(code + ((uint32_t)(frac * (float)one) + r >= one));
}

/* ---- From scale to codes ---- */

/* x is the number, y the scaled one. A NaN's sign is x's: that of one which arithmetic made depends on the
 * processor. */
static uint8_t e2m1_nearest(float x, float y, const struct nib_dialect_facts *dialect)
{
    if (dialect->drops_zero_sign && y == 0)
        return 0;
    if (dialect->keeps_nan_sign && nib_is_nan(y))
        return (uint8_t)(7 | nib_bits(x) >> 31 << 3);
    return nib_e2m1_from_f32(y);
}

/* One element under its block's factor; `random` is NULL for nearest. */
static uint8_t element_code(float x, float factor, const struct nib_coding *coding, const uint32_t *random)
{
    const float y = coding->dialect->divides ? x / factor : x * factor;
    return random ? e2m1_stochastic(y, *random, random_bits(coding->rounding)) : e2m1_nearest(x, y, coding->dialect);
}

/* Codes of the elements inside the matrix; those outside stay 0. `random` is NULL for nearest. */
static void encode_tile(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                        uint32_t (*random)[BLOCK], struct tile_codes *out)
{
    const float factor = coding->dialect->factor(out->scale, tile->absmax, scaler, &coding->rules);
    for (int l = 0; l < tile->lines; l++)
        for (int i = 0; i < tile->length; i++)
            out->code[l][i] = element_code(tile->x[l][i], factor, coding, random ? &random[l][i] : NULL);
}

/* ---- Scale rules ---- */

static uint8_t at_least(uint8_t code, uint8_t floor_code) { return code < floor_code ? floor_code : code; }

/* So large that no element of the block is clipped: a scale 1/16 larger than wanted survives rounding down to E4M3's 3
 * bits of mantissa; below the smallest normal, where the bits are fewer, it is rounded up instead. */
static uint8_t unclipped_scale(float block_amax, const struct nib_scaler *scaler)
{
    const float wanted = nib_fmin(block_amax * scaler->block, FLT_MAX) * (17.0f / 16.0f);
    if (!(wanted < 0x1p-6f))
        return nib_e4m3_from_f32(wanted);
    const float units = wanted * 0x1p9f;
    const uint8_t below = (uint8_t)units;
    return (uint8_t)(below + ((float)below < units));
}

static nib_scale_bits block_scale_nvfp4(float block_amax, const struct nib_scaler *scaler,
                                        const struct nib_coding *coding)
{
    const uint8_t scale = coding->rounding == NIB_ROUND_STOCHASTIC_UNBIASED
                              ? unclipped_scale(block_amax, scaler)
                              : (uint8_t)coding->dialect->block_scale(block_amax, scaler, &coding->rules);
    return at_least(scale, coding->floor_code);
}

static void quantize_rtn(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                         uint32_t (*random)[BLOCK], struct tile_codes *out)
{
    out->scale = (uint8_t)block_scale_nvfp4(tile->absmax, scaler, coding);
    encode_tile(tile, coding, scaler, random, out);
}

/* Four over six: the error of one candidate, elements in their order, then lines as a tree. */
static float candidate_error(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                             const struct tile_codes *candidate)
{
    const float s = nib_f32_from_e4m3(candidate->scale);
    float line_error[BLOCK] = { 0 };
    for (int l = 0; l < tile->lines; l++)
        for (int i = 0; i < tile->length; i++) {
            const float product = nib_f32_from_e2m1(candidate->code[l][i]) * s; /* exact */
            const float d = coding->fast_error ? product - tile->x[l][i] * scaler->encode
                                               : product * scaler->amax / coding->rules.full_scale - tile->x[l][i];
            line_error[l] += coding->error_mode == NIB_ERROR_MAE ? nib_abs(d) : d * d;
        }
    if (coding->tile_lines == 1)
        return line_error[0];
    for (int distance = BLOCK / 2; distance > 0; distance /= 2)
        for (int l = 0; l < distance; l++)
            line_error[l] += line_error[l + distance];
    return line_error[0];
}

static void quantize_4over6(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                            struct tile_codes *out)
{
    const float base = tile->absmax / 6.0f * scaler->encode; /* a division here, unlike the plain rule */
    struct tile_codes six = { .scale = at_least(nib_e4m3_from_f32(nib_fmin(base, 448.0f)), coding->floor_code) };
    struct tile_codes four = { .scale =
                                   at_least(nib_e4m3_from_f32(nib_fmin(base * 1.5f, 448.0f)), coding->floor_code) };
    encode_tile(tile, coding, scaler, NULL, &six);
    encode_tile(tile, coding, scaler, NULL, &four);
    const float error_four = candidate_error(tile, coding, scaler, &four);
    *out = error_four < candidate_error(tile, coding, scaler, &six) ? four : six; /* a tie is six */
}

/* Squared error of one line under a scale whose decoding factor is f, summed as a tree; missing elements count 0. */
static float squared_error(const struct tile *tile, const struct tile_codes *candidate, float f)
{
    float e[BLOCK] = { 0 };
    for (int i = 0; i < tile->length; i++) {
        const float d = nib_f32_from_e2m1(candidate->code[0][i]) * f - tile->x[0][i];
        e[i] = d * d;
    }
    for (int distance = BLOCK / 2; distance > 0; distance /= 2)
        for (int i = 0; i < distance; i++)
            e[i] += e[i + distance];
    return e[0];
}

static void quantize_sweep(const struct tile *tile, const struct nib_coding *coding, const struct nib_scaler *scaler,
                           struct tile_codes *out)
{
    const float g = nib_decode_scale(scaler->tensor_scale, &coding->rules);
    const int rtn =
        at_least((uint8_t)coding->dialect->block_scale(tile->absmax, scaler, &coding->rules), coding->floor_code);
    const int lowest = rtn == 0 ? 0 : coding->floor_code ? coding->floor_code : 1;
    float least = 0;
    for (int i = 0; i < NIB_SWEEP_CANDIDATES; i++) {
        const int code = rtn + nib_sweep_offsets[i];
        if (code < lowest || code > 0x7E)
            continue;
        struct tile_codes candidate = { .scale = (uint8_t)code };
        encode_tile(tile, coding, scaler, NULL, &candidate);
        const float error = squared_error(tile, &candidate, nib_f32_from_e4m3(candidate.scale) * g);
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
        quantize_sweep(tile, coding, scaler, out);
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
        random_block(coding, (uint32_t)(coding->origin_line + line),
                     (uint32_t)(coding->origin_block + block) | (coding->usage == NIB_COLUMNWISE ? 0x80000000u : 0),
                     random);
    for (int64_t i = 0; i < n; i++)
        codes[i] = element_code(x[i], factor, coding, stochastic ? &random[first + i] : NULL);
}

const struct nib_block_kernels nib_block_kernels_nvfp4 = { block_scale_nvfp4, encode_nvfp4 };

/* ---- Back ---- */

static void decode_nvfp4(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                         float tensor_scale, const struct nib_coding *coding, bool stream)
{
    (void)stream;
    for (int64_t i = 0; i < n; i++) {
        const float f = coding->dialect->decode(((const uint8_t *)scales)[i / BLOCK], tensor_scale, &coding->rules);
        nib_store_number((char *)y + i * (dtype == NIB_F32 ? 4 : 2), dtype,
                         nib_f32_from_e2m1(codes[i / 2] >> 4 * (i % 2) & 15) * f);
    }
}

/* The transform is orthogonal and its matrix symmetric but for the signs. */
static void inverse_rht(void *y, nib_dtype dtype, const float *x, int64_t n, uint16_t sign_mask)
{
    for (int64_t i = 0; i < n; i += 16) {
        float block[16];
        memcpy(block, x + i, sizeof block);
        butterflies(block);
        for (int k = 0; k < 16; k++)
            block[k] *= 0.25f;
        flip_signs(block, sign_mask);
        for (int k = 0; k < 16; k++)
            nib_store_number((char *)y + (i + k) * (dtype == NIB_F32 ? 4 : 2), dtype, block[k]);
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
};
