/* SPDX-License-Identifier: Apache-2.0 */
/*
 * made_up.h - a format that nobody uses, to see that a row of the table is all that a format takes.
 *
 * madeup8: E4M3 codes in blocks of 8, each with an E5M2 scale: the smallest one with which no element of the block is
 * clipped. tests/cli/made_up.sh builds the library with it; src/format/format.c includes this file, and nothing else knows it.
 */
#ifndef MADE_UP_H
#define MADE_UP_H

#include "format/codec.h"
#include "format/dialect.h"

/* At least amax / 448, by one step of E5M2 where the nearest code lies below it. */
static nib_scale_bits made_up_block_scale(float block_amax, const struct nib_scaler *scaler,
                                          const struct nib_rules *rules)
{
    (void)scaler;
    const float wanted = block_amax / rules->element_max;
    const uint8_t code = nib_e5m2_from_f32(wanted);
    return code < 0x7B && nib_f32_from_e5m2(code) < wanted ? code + 1u : code;
}

/* Elements are divided by it. A block of zeros has the scale 0, and 1 does as well for them. */
static float made_up_factor(nib_scale_bits scale, float block_amax, const struct nib_scaler *scaler,
                            const struct nib_rules *rules)
{
    (void)block_amax, (void)scaler, (void)rules;
    return scale ? nib_f32_from_e5m2((uint8_t)scale) : 1.0f;
}

static float made_up_decode(nib_scale_bits scale, float tensor_scale, const struct nib_rules *rules)
{
    (void)tensor_scale, (void)rules;
    return nib_f32_from_e5m2((uint8_t)scale);
}

static void made_up_prepare(struct nib_scaler *scaler, const struct nib_rules *rules) { (void)scaler, (void)rules; }

static const struct nib_dialect_facts made_up_dialects[NIB_DIALECT_COUNT] = {
    [NIB_DIALECT_TE] = { .name = "te",
                         .tensor_scale = NIB_TENSOR_SCALE_NONE,
                         .elements = { .divides = true },
                         .prepare = made_up_prepare,
                         .block_scale = made_up_block_scale,
                         .factor = made_up_factor,
                         .decode_factor = made_up_decode },
};

#define NIB_EXTRA_ROWS                                                                 \
    { .name = "madeup8",                                                               \
      .elements = { NIB_E4M3, NIB_E4M3 },                                              \
      .scale_max = 1,                                                                  \
      .scale = NIB_E5M2,                                                               \
      .block = 8,                                                                      \
      .lines = true,                                                                   \
      .default_rows = 1,                                                               \
      .transposed = true,                                                              \
      .layout = { NIB_SCALES_BY_LINE, NIB_SCALES_BY_LINE },                            \
      .align = { 8, 2 },                                                               \
      .min_rank = 1,                                                                   \
      .saved = { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE },           \
      .saved_count = 4,                                                                \
      .dialects = made_up_dialects },

#endif
