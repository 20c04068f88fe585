/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slots.h - the slots of an x86 instruction set: who takes what. Included last by the file of each.
 *
 * The including file defines decode_blocks, which decodes VL of them.
 */

#include <math.h>

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

/* VL blocks at once; what is left, and factors that are no ordinary numbers, by the reference. */
SIMD void decode_as(char *y, nib_dtype dtype, const uint8_t *codes, const uint8_t *scales, int64_t n, float level,
                    const struct nib_coding *coding, bool stream)
{
    const int64_t size = bytes_of(dtype);
    nib_decode_fn *const reference = nib_kernels_scalar.decode[NIB_NVFP4];
    int64_t i = 0;
    for (; i + VL * BLOCK <= n; i += VL * BLOCK) {
        const VI scale = vi_load_bytes(scales + i / BLOCK);
        const VF s = f32_of_e4m3(scale), lv = vf_set1(level);
        const VF factor = coding->rules.level == NIB_LEVEL_AMAX
                              ? vf_mul(vf_mul(s, lv), vf_set1(1.0f / coding->rules.full_scale))
                          : coding->rules.level == NIB_LEVEL_DECODE ? vf_mul(s, lv)
                                                                    : vf_div(s, lv);
        /* The eight magnitudes of a block are 2^k or 1.5 * 2^k times its factor, so that only two numbers need rounding
         * to BF16, and the others follow by counting in the exponent - as long as that stays clear of its ends. */
        const VF size_of = absolute(factor);
        const bool ordinary = !vi_any_greater(scale, vi_set1(0x7E)) &&
                              (dtype == NIB_BF16 ? vf_all_less(size_of, vf_set1(0x1p112f)) &&
                                                       vf_all_less(vf_set1(0x1p-110f), factor)
                                                 : vf_all_less(size_of, vf_set1(INFINITY)));
        if (ordinary)
            decode_blocks(y + i * size, dtype, codes + i / 2, factor, stream);
        else
            reference(y + i * size, dtype, codes + i / 2, scales + i / BLOCK, VL * BLOCK, level, coding, stream);
    }
    if (i < n)
        reference(y + i * size, dtype, codes + i / 2, scales + i / BLOCK, n - i, level, coding, stream);
    if (stream)
        _mm_sfence();
}

#define DEFINE_DECODE(name, dtype, stream)                                                               \
    SLOT void name(char *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float level,         \
                   const struct nib_coding *coding)                                                      \
    {                                                                                                    \
        decode_as(y, dtype, codes, scales, n, level, coding, stream);                                    \
    }
DEFINE_DECODE(decode_f32, NIB_F32, false)
DEFINE_DECODE(stream_f32, NIB_F32, true)
DEFINE_DECODE(decode_bf16, NIB_BF16, false)
DEFINE_DECODE(stream_bf16, NIB_BF16, true)
DEFINE_DECODE(decode_f16, NIB_F16, false)
DEFINE_DECODE(stream_f16, NIB_F16, true)
#undef DEFINE_DECODE

/* Streaming stores want whole vectors at their places. */
SLOT void decode_nvfp4(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n, float level,
                       const struct nib_coding *coding, bool stream)
{
    const bool streams = stream && (uintptr_t)y % 64 == 0;
    if (dtype == NIB_F32)
        (streams ? stream_f32 : decode_f32)(y, codes, scales, n, level, coding);
    else if (dtype == NIB_BF16)
        (streams ? stream_bf16 : decode_bf16)(y, codes, scales, n, level, coding);
    else
        (streams ? stream_f16 : decode_f16)(y, codes, scales, n, level, coding);
}
