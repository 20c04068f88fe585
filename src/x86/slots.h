/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slots.h - the slots of an x86 instruction set: who takes what. Included last by the file of each.
 *
 * The including file defines decode_four_wide and decode_four_bf16.
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

/* How a chunk of blocks can be decoded. */
enum decode_way { BY_REFERENCE, BY_VALUES, BY_TABLES };

/* The factors of n blocks, a multiple of VL. Those that are no ordinary numbers are left to the reference; a level that
 * is none has gone there before. The eight magnitudes of a block are 2^k or 1.5 * 2^k times its factor, so that only two
 * numbers need rounding to BF16, and the others follow by counting in the exponent - as long as that stays clear of its
 * ends. */
SIMD enum decode_way decode_factors(const uint8_t *scales, int n, float level, const struct nib_rules *rules,
                                    nib_dtype dtype, float *factors)
{
    const bool divides = rules->level != NIB_LEVEL_AMAX && rules->level != NIB_LEVEL_DECODE;
    const VF lv = vf_set1(level), last = vf_set1(rules->level == NIB_LEVEL_AMAX ? 1.0f / rules->full_scale : 1.0f);
    VI largest_scale = vi_set1(0); /* over bits, where a NaN shows */
    VF least = vf_set1(FLT_MAX), most = vf_set1(0);
    for (int b = 0; b < n; b += VL) {
        const VF s = vf_mul(vf_load_scaled_e4m3(scales + b), vf_set1(256.0f));
        const VF f = divides ? vf_div(s, lv) : vf_mul(vf_mul(s, lv), last);
        largest_scale = vi_max(vi_of(s), largest_scale);
        least = vf_min(f, least);
        most = vf_max(absolute(f), most);
        vf_store(factors + b, f);
    }
    if (vi_any_greater(largest_scale, vi_of(vf_set1(448.0f))) || !vf_all_less(most, vf_set1(INFINITY)))
        return BY_REFERENCE;
    if (dtype != NIB_BF16 || !vf_all_less(vf_set1(0x1p-110f), least) || !vf_all_less(most, vf_set1(0x1p112f)))
        return BY_VALUES;
    for (int b = 0; b < n; b += VL) {
        const VF f = vf_load(factors + b);
        const VI one = vi_of(round_to_bf16(f)), more = vi_of(round_to_bf16(vf_mul(f, vf_set1(1.5f))));
        vf_store(factors + b, vf_of(vi_or(vi_srl(one, 16), more)));
    }
    return BY_TABLES;
}

enum { CHUNK = 64 }; /* blocks whose factors are made at once */

/* n blocks, a multiple of VL and at most CHUNK. */
SIMD void decode_chunk(char *y, nib_dtype dtype, const uint8_t *codes, const uint8_t *scales, int n, float level,
                       const struct nib_coding *coding, bool stream)
{
    float factors[CHUNK] __attribute__((aligned(64)));
    const enum decode_way way = decode_factors(scales, n, level, &coding->rules, dtype, factors);
    const int four = 4 * BLOCK * bytes_of(dtype);
    if (way == BY_REFERENCE)
        nib_kernels_scalar.decode[NIB_NVFP4](y, dtype, codes, scales, n * BLOCK, level, coding, stream);
    else if (way == BY_TABLES)
        for (int b = 0; b < n; b += 4)
            decode_four_bf16(y + b / 4 * four, codes + b * 8, factors + b, stream);
    else
        for (int b = 0; b < n; b += 4)
            decode_four_wide(y + b / 4 * four, dtype, codes + b * 8, factors + b, stream);
}

/* Codes and scales of a chunk some way on arrive while this one is decoded. */
SIMD void prefetch_codes(const uint8_t *codes, const uint8_t *scales)
{
    enum { CODES_AHEAD = 4 * CHUNK };
    for (int line = 0; line < CHUNK * 8; line += 64)
        _mm_prefetch((const char *)codes + CODES_AHEAD * 8 + line, _MM_HINT_T0);
    _mm_prefetch((const char *)scales + CODES_AHEAD, _MM_HINT_T0);
}

SIMD void decode_as(char *y, nib_dtype dtype, const uint8_t *codes, const uint8_t *scales, int64_t n, float level,
                    const struct nib_coding *coding, bool stream)
{
    const int64_t size = bytes_of(dtype), whole = n / (VL * BLOCK) * VL;
    for (int64_t b = 0; b < whole; b += CHUNK) {
        prefetch_codes(codes + b * 8, scales + b);
        decode_chunk(y + b * BLOCK * size, dtype, codes + b * 8, scales + b, (int)nib_min(CHUNK, whole - b), level,
                     coding, stream);
    }
    const int64_t done = whole * BLOCK, left = n - done;
    if (left > 0) { /* less than VL blocks: among others that do no harm */
        char numbers[VL * BLOCK * 4] __attribute__((aligned(64)));
        uint8_t last_codes[VL * 8] = { 0 }, last_scales[VL];
        memset(last_scales, scales[whole], sizeof last_scales);
        memcpy(last_scales, scales + whole, (size_t)nib_ceil_div(left, BLOCK));
        memcpy(last_codes, codes + whole * 8, (size_t)(left + 1) / 2);
        decode_chunk(numbers, dtype, last_codes, last_scales, VL, level, coding, false);
        memcpy(y + done * size, numbers, (size_t)(left * size));
    }
    if (stream)
        _mm_sfence();
}

#define DEFINE_DECODE(name, dtype, stream)                                                       \
    SLOT void name(char *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float level, \
                   const struct nib_coding *coding)                                              \
    {                                                                                            \
        decode_as(y, dtype, codes, scales, n, level, coding, stream);                            \
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
    if (!(nib_abs(level) <= FLT_MAX) || level == 0) {
        nib_kernels_scalar.decode[NIB_NVFP4](y, dtype, codes, scales, n, level, coding, stream);
        return;
    }
    if (dtype == NIB_F32)
        (streams ? stream_f32 : decode_f32)(y, codes, scales, n, level, coding);
    else if (dtype == NIB_BF16)
        (streams ? stream_bf16 : decode_bf16)(y, codes, scales, n, level, coding);
    else
        (streams ? stream_f16 : decode_f16)(y, codes, scales, n, level, coding);
}
