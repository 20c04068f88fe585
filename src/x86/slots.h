/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slots.h - the slots of an x86 instruction set: who takes what. Included last by the file of each.
 *
 * The including file defines DECODE_STEP, decode_factors, takes_factor, prepare_factors and decode_block.
 */

SLOT void quantize_nvfp4(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    if (is_plain(coding) && coding->copy == NIB_ROWWISE && !coding->transform)
        quantize_rows(panel, coding, target);
    else if (is_plain(coding) && coding->copy == NIB_COLUMNWISE && coding->rounding == NIB_ROUND_NEAREST)
        columns_kernel(coding, panel->dtype)(panel, coding, target);
    else
        quantize_other(panel, coding, target);
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
