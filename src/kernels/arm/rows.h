/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h - NVFP4 rows to nearest, which most data is, for NEON; after simd_panels.h and simd_generic.h.
 *
 * Blocks lie side by side, so that no transposition is needed if a block's elements share vectors and only amaxes,
 * scales and factors have a lane per block. A strip of 64 blocks goes through in two phases, so that the divisions of
 * its factors overlap.
 */

enum { STRIP = 64 };

/* n blocks, a multiple of VL and at most STRIP, from x on. */
SIMD void quantize_strip(const char *x, nib_dtype dtype, int n, const struct nib_coding *coding,
                         const struct lane_scaler *scaler, uint8_t *codes, uint8_t *scales)
{
    const int size = dtype == NIB_F32 ? 4 : 2;
    float factors[STRIP];
    for (int b = 0; b < n; b += VL) {
        VF m[VL];
        UNROLL
        for (int k = 0; k < VL; k++) {
            m[k] = vf_set1(0);
            UNROLL
            for (int i = 0; i < BLOCK; i += VL) /* NaNs give way */
                m[k] = vf_max(absolute(load_values(x, (b + k) * BLOCK + i, dtype)), m[k]);
        }
        const VF absmax = vpmaxq_f32(vpmaxq_f32(m[0], m[1]), vpmaxq_f32(m[2], m[3]));
        const struct scales s = rtn_scales(absmax, coding, scaler);
        vi_store_low_bytes(scales + b, s.code);
        vf_store(factors + b, s.factor);
    }
    for (int b = 0; b < n; b += STEP / BLOCK) {
        VI code[STEP_VECTORS];
        UNROLL
        for (int i = 0; i < STEP_VECTORS; i++)
            code[i] =
                signed_e2m1(vmulq_n_f32(load_values(x + b * BLOCK * size, i * VL, dtype), factors[b + i * VL / BLOCK]));
        store_step_nibbles(codes + b * BLOCK / 2, code);
    }
}

/* A function, so that its code is there once. */
static void quantize_other(const struct nib_panel *panel, const struct nib_coding *coding,
                           const struct nib_target *target)
{
    quantize_lanes(panel, coding, target);
}

/* Groups of VL blocks by the fast way, what is left by the other. */
SIMD void quantize_rows_to_nearest(const struct nib_panel *panel, const struct nib_coding *coding,
                                   const struct nib_target *target, nib_dtype dtype)
{
    const struct nib_usage_geometry *g = target->geometry;
    const int64_t blocks = panel->cols / BLOCK / VL * VL, first = panel->col / BLOCK;
    struct nib_panel rest = *panel;
    rest.x = element_address(panel, 0, blocks * BLOCK);
    rest.col += blocks * BLOCK;
    rest.cols -= blocks * BLOCK;
    struct lane_scaler scaler = lane_scaler_for(coding, target, panel->row, 1);
    for (int64_t row = 0; row < panel->rows; row++) {
        const int64_t line = panel->row + row;
        if (target->tensor_scale_per_line)
            scaler = lane_scaler_for(coding, target, line, 1);
        for (int64_t b = 0; b < blocks; b += STRIP)
            quantize_strip(element_address(panel, row, b * BLOCK), dtype, (int)nib_min(STRIP, blocks - b), coding,
                           &scaler, target->codes + line * g->line_stride + (first + b) * (BLOCK / 2),
                           (uint8_t *)target->scales + line * g->scale_line + first + b);
    }
    if (rest.cols)
        quantize_other(&rest, coding, target);
}

static void quantize_nvfp4(const struct nib_panel *panel, const struct nib_coding *coding,
                           const struct nib_target *target)
{
    const bool supported = coding->usage == NIB_ROWWISE && coding->tile_lines == 1 && !coding->rht &&
                           !coding->dialect->fixed && coding->scale_rule == NIB_SCALE_RTN &&
                           coding->rounding == NIB_ROUND_NEAREST && !target->geometry->swizzled;
    if (!supported)
        quantize_other(panel, coding, target);
    else if (panel->dtype == NIB_F32)
        quantize_rows_to_nearest(panel, coding, target, NIB_F32);
    else if (panel->dtype == NIB_BF16)
        quantize_rows_to_nearest(panel, coding, target, NIB_BF16);
    else
        quantize_rows_to_nearest(panel, coding, target, NIB_F16);
}
