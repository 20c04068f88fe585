/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h - rows to nearest and back, the way most data takes; included once by the file of each x86 instruction set,
 * after simd.h.
 *
 * Blocks lie side by side, so that no transposition is needed if a block's elements share a vector and only amaxes,
 * scales and factors have a lane per block. A strip of 64 blocks goes through in two phases, so that the divisions of
 * its factors overlap.
 *
 * The including file defines STRIP_STEP, strip_absmax, store_four_blocks; DECODE_STEP, decode_factors, takes_factor,
 * prepare_factors, decode_block.
 */

enum { STRIP = 64 };

/* n blocks, a multiple of 4 and at most STRIP, from x on. */
SIMD void quantize_strip(const void *x, nib_dtype dtype, int n, const struct nib_coding *coding,
                         const struct lane_scaler *scaler, uint8_t *codes, uint8_t *scales)
{
    float widened[STRIP * BLOCK] __attribute__((aligned(64))), factors[STRIP];
    uint8_t strip_scales[STRIP];
    const float *numbers = dtype == NIB_F32 ? x : widened;
    for (int b = 0; b < n; b += STRIP_STEP) {
        const VF absmax = b + STRIP_STEP <= n ? strip_absmax(x, b, n, true, dtype, widened)
                                              : strip_absmax(x, b, n, false, dtype, widened);
        const struct scales s = rtn_scales(absmax, coding, scaler);
        vi_store_low_bytes(strip_scales + b, s.code);
        vf_store(factors + b, s.factor);
    }
    memcpy(scales, strip_scales, (size_t)n);
    const int64_t ahead = (int64_t)n * BLOCK * (dtype == NIB_F32 ? 4 : 2);
    for (int b = 0; b < n; b += 4) { /* the next strip's numbers arrive while this one is coded */
        const char *const next = (const char *)x + ahead + (int64_t)b * BLOCK * (dtype == NIB_F32 ? 4 : 2);
        for (int line = 0; line < (dtype == NIB_F32 ? 256 : 128); line += 64)
            _mm_prefetch(next + line, _MM_HINT_T0);
        store_four_blocks(codes + b * 8, numbers + b * BLOCK, factors + b);
    }
}

SIMD void quantize_row_to_nearest(const struct nib_panel *panel, int64_t row, const struct nib_coding *coding,
                                  const struct nib_target *target, const struct lane_scaler *scaler, int64_t blocks,
                                  nib_dtype dtype)
{
    const int64_t line = panel->row + row, first = panel->col / BLOCK;
    uint8_t *codes = target->codes + line * target->geometry->line_stride + first * 8;
    uint8_t *scales = (uint8_t *)target->scales + line * target->geometry->scale_line + first;
    for (int64_t b = 0; b < blocks; b += STRIP)
        quantize_strip(element_address(panel, row, b * BLOCK), dtype, (int)nib_min(STRIP, blocks - b), coding, scaler,
                       codes + b * 8, scales + b);
}

SLOT void quantize_other(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    quantize_lanes(panel, coding, target);
}

/* Groups of four blocks by the fast way, what is left by the other. */
SIMD void quantize_rows_to_nearest(const struct nib_panel *panel, const struct nib_coding *coding,
                                   const struct nib_target *target, nib_dtype dtype)
{
    const int64_t blocks = panel->cols / BLOCK / 4 * 4;
    struct nib_panel rest = *panel;
    rest.x = element_address(panel, 0, blocks * BLOCK);
    rest.col += blocks * BLOCK;
    rest.cols -= blocks * BLOCK;
    struct lane_scaler scaler = lane_scaler_for(coding, target, panel->row, 1);
    for (int64_t row = 0; row < panel->rows; row++) {
        if (target->level_per_line)
            scaler = lane_scaler_for(coding, target, panel->row + row, 1);
        quantize_row_to_nearest(panel, row, coding, target, &scaler, blocks, dtype);
    }
    if (rest.cols)
        quantize_other(&rest, coding, target);
}

static bool is_plain_row(const struct nib_coding *coding, const struct nib_target *target)
{
    return coding->copy == NIB_ROWWISE && coding->tile_lines == 1 && !coding->transform && !coding->dialect->plain &&
           coding->scale_rule == NIB_SCALE_RTN && coding->rounding == NIB_ROUND_NEAREST && !target->geometry->swizzled;
}

SLOT void quantize_nvfp4(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    if (!is_plain_row(coding, target))
        quantize_other(panel, coding, target);
    else if (panel->dtype == NIB_F32)
        quantize_rows_to_nearest(panel, coding, target, NIB_F32);
    else if (panel->dtype == NIB_BF16)
        quantize_rows_to_nearest(panel, coding, target, NIB_BF16);
    else
        quantize_rows_to_nearest(panel, coding, target, NIB_F16);
}

SLOT void absmax_lines(const struct nib_panel *panel, const struct nib_coding *coding, float *out)
{
    absmax_lines_lanes(panel, coding, out);
}

/* Groups of DECODE_STEP blocks; what is left, and factors that are no ordinary numbers, by the reference. */
SIMD void decode_as(char *y, nib_dtype dtype, const uint8_t *codes, const uint8_t *scales, int64_t n, float level,
                    const struct nib_coding *coding, bool stream)
{
    const int size = dtype == NIB_F32 ? 4 : 2;
    nib_decode_fn *const reference = nib_kernels_scalar.decode[NIB_NVFP4];
    int64_t i = 0;
    for (; i + DECODE_STEP * BLOCK <= n; i += DECODE_STEP * BLOCK) {
        float factor[DECODE_STEP];
        bool ordinary = decode_factors(scales + i / BLOCK, level, &coding->rules, factor);
        for (int b = 0; b < DECODE_STEP; b++)
            ordinary &= takes_factor(dtype, factor[b]);
        if (!ordinary) {
            reference(y + i * size, dtype, codes + i / 2, scales + i / BLOCK, DECODE_STEP * BLOCK, level, coding,
                      stream);
            continue;
        }
        prepare_factors(factor, dtype);
        for (int b = 0; b < DECODE_STEP; b++)
            decode_block(y + (i + b * BLOCK) * size, dtype, codes + i / 2 + b * 8, factor[b], stream);
    }
    if (i < n)
        reference(y + i * size, dtype, codes + i / 2, scales + i / BLOCK, n - i, level, coding, stream);
    if (stream)
        _mm_sfence();
}

/* Streaming stores want whole vectors at their places. */
SLOT void decode_nvfp4(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n, float level,
                       const struct nib_coding *coding, bool stream)
{
    const bool streams = stream && (uintptr_t)y % 64 == 0;
    if (dtype == NIB_F32 && streams)
        decode_as(y, NIB_F32, codes, scales, n, level, coding, true);
    else if (dtype == NIB_F32)
        decode_as(y, NIB_F32, codes, scales, n, level, coding, false);
    else if (dtype == NIB_BF16)
        decode_as(y, NIB_BF16, codes, scales, n, level, coding, streams);
    else
        decode_as(y, NIB_F16, codes, scales, n, level, coding, streams);
}
