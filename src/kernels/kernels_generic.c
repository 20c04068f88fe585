/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_generic.c - the reference for formats whose blocks need no more than an amax, a scale and a cast to nearest.
 *
 * What the element, the scale and the block are comes from the format's row; this file knows no format.
 */
#include "kernels/kernels_generic.h"

static const struct {
    uint8_t (*encode)(float x);
    float (*decode)(uint8_t code);
} codecs[NIB_DTYPE_COUNT] = {
    [NIB_E2M1] = { nib_e2m1_from_f32, nib_f32_from_e2m1 },
    [NIB_E4M3] = { nib_e4m3_from_f32, nib_f32_from_e4m3 },
    [NIB_E5M2] = { nib_e5m2_from_f32, nib_f32_from_e5m2 },
};

static float line_element(const struct nib_panel *panel, nib_usage usage, int64_t line, int64_t i)
{
    return usage == NIB_ROWWISE ? nib_panel_element(panel, line, i) : nib_panel_element(panel, i, line);
}

/* The elements that share a scale: lines and elements of a panel. */
struct tile {
    int64_t line, lines, first, length;
};

static float tile_absmax(const struct nib_panel *panel, nib_usage usage, const struct tile *tile)
{
    float m = 0;
    for (int64_t line = tile->line; line < tile->line + tile->lines; line++)
        for (int64_t i = tile->first; i < tile->first + tile->length; i++)
            m = nib_fmax(m, nib_abs(line_element(panel, usage, line, i))); /* NaNs do not count */
    return m;
}

static void quantize_tile(const struct nib_panel *panel, const struct nib_coding *coding,
                          const struct nib_target *target, const struct nib_scaler *scaler, const struct tile *tile)
{
    const bool rowwise = coding->usage == NIB_ROWWISE;
    const int64_t line0 = rowwise ? panel->row : panel->col, first0 = rowwise ? panel->col : panel->row;
    const struct nib_dialect_facts *dialect = coding->dialect;
    float absmax = 0;
    nib_scale_bits scale = 0;
    if (dialect->block_scale) {
        absmax = tile_absmax(panel, coding->usage, tile);
        scale = dialect->block_scale(absmax, scaler, &coding->rules);
    }
    const float factor = dialect->factor(scale, absmax, scaler, &coding->rules);
    for (int64_t line = tile->line; line < tile->line + tile->lines; line++) {
        if (dialect->block_scale)
            nib_scale_store(target->geometry, target->scales, line0 + line, (first0 + tile->first) / coding->block,
                            scale);
        for (int64_t i = tile->first; i < tile->first + tile->length; i++) {
            const float y = nib_scaled(line_element(panel, coding->usage, line, i), factor, dialect->elements.divides);
            nib_code_store(target->geometry, target->codes, line0 + line, first0 + i,
                           codecs[coding->rules.element].encode(y));
        }
    }
}

void nib_quantize_generic(const struct nib_panel *panel, const struct nib_coding *coding,
                          const struct nib_target *target)
{
    const int64_t lines = nib_panel_lines(panel, coding->usage), length = nib_panel_length(panel, coding->usage);
    const int64_t step = coding->block ? coding->block : length;
    struct nib_scaler scaler = { .tensor_scale = target->tensor_scales ? target->tensor_scales[0] : 1,
                                 .scale = target->scale };
    coding->dialect->prepare(&scaler, &coding->rules);
    for (int64_t line = 0; line < lines; line += coding->tile_lines)
        for (int64_t first = 0; first < length; first += step)
            quantize_tile(panel, coding, target, &scaler,
                          &(struct tile){ line, nib_min(coding->tile_lines, lines - line), first,
                                          nib_min(step, length - first) });
}

static nib_scale_bits block_scale(float block_amax, const struct nib_scaler *scaler, const struct nib_coding *coding)
{
    return coding->dialect->block_scale ? coding->dialect->block_scale(block_amax, scaler, &coding->rules) : 0;
}

static void encode(const float *x, int64_t n, float factor, const struct nib_coding *coding, int64_t line,
                   int64_t block, int64_t first, uint8_t *codes)
{
    (void)line, (void)block, (void)first; /* nothing here depends on the place */
    for (int64_t i = 0; i < n; i++)
        codes[i] = codecs[coding->rules.element].encode(nib_scaled(x[i], factor, coding->dialect->elements.divides));
}

const struct nib_block_kernels nib_block_kernels_generic = { block_scale, encode };

void nib_decode_generic(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                        float tensor_scale, const struct nib_coding *coding, bool stream)
{
    (void)stream;
    const nib_dtype element = coding->rules.element;
    const bool packed = nib_dtypes[element].bits == 4;
    for (int64_t i = 0; i < n; i++) {
        nib_scale_bits scale = 0;
        if (coding->block)
            memcpy(&scale, (const char *)scales + i / coding->block * coding->scale_bytes, (size_t)coding->scale_bytes);
        const uint8_t code = packed ? (uint8_t)(codes[i / 2] >> 4 * (i % 2) & 15) : codes[i];
        nib_store_value((char *)y + i * (dtype == NIB_F32 ? 4 : 2), dtype,
                        codecs[element].decode(code) *
                            coding->dialect->decode_factor(scale, tensor_scale, &coding->rules));
    }
}

/* ---- Transposes ---- */

void nib_transpose_nibbles(const uint8_t *in, int64_t in_stride, int64_t rows, int64_t cols, uint8_t *out,
                           int64_t out_stride)
{
    const struct nib_usage_geometry a = { .line_stride = in_stride }, b = { .line_stride = out_stride };
    for (int64_t c = 0; c < cols; c++)
        for (int64_t r = 0; r < rows; r++)
            nib_code_store(&b, out, c, r, nib_code_load(&a, in, r, c));
}

#define DEFINE_TRANSPOSE(name, width)                                                                             \
    void name(const uint8_t *in, int64_t in_stride, int64_t rows, int64_t cols, uint8_t *out, int64_t out_stride) \
    {                                                                                                             \
        for (int64_t c = 0; c < cols; c++)                                                                        \
            for (int64_t r = 0; r < rows; r++)                                                                    \
                memcpy(out + c * out_stride + r * (width), in + r * in_stride + c * (width), width);              \
    }
DEFINE_TRANSPOSE(nib_transpose_bytes, 1)
DEFINE_TRANSPOSE(nib_transpose_halves, 2)
DEFINE_TRANSPOSE(nib_transpose_words, 4)
