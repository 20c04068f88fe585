/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slots.h - the slots of an x86 instruction set: which kernel supports what. Included last by the file of each.
 *
 * The including file defines decode_four_wide, decode_four_bf16, decode_four_known, make_bf16_values and scales_within.
 */

#include <math.h>

static bool supports_rows(const struct nib_coding *coding)
{
    return is_te_rtn(coding) && coding->usage == NIB_ROWWISE && !coding->rht;
}

/* The default of checkpoints: the sweep under a power of two. */
static bool supports_sweep(const struct nib_panel *panel, const struct nib_coding *coding)
{
    return SWEEPS && panel->dtype == NIB_BF16 && coding->scale_rule == NIB_SCALE_SWEEP && !coding->dialect->fixed &&
           coding->usage == NIB_ROWWISE && !coding->rht && coding->rules.pow2 &&
           coding->rules.tensor_scale == NIB_TENSOR_SCALE_MULTIPLIER;
}

static bool supports_columns(const struct nib_coding *coding)
{
    return is_te_rtn(coding) && coding->usage == NIB_COLUMNWISE && coding->rounding == NIB_ROUND_NEAREST;
}

SLOT void quantize_nvfp4(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    if (supports_rows(coding) || supports_sweep(panel, coding))
        quantize_rows(panel, coding, target);
    else if (supports_columns(coding))
        columns_kernel(coding, panel->dtype)(panel, coding, target, NULL);
    else
        quantize_other(panel, coding, target);
}

/* Rows of narrow panels are better coded all before the columns: strips go down them. */
SLOT void quantize_both_nvfp4(const struct nib_panel *panel, const struct nib_coding coding[2],
                              const struct nib_target target[2])
{
    if (supports_rows(&coding[0]) && supports_columns(&coding[1]) && panel->cols > COLUMN_LINES) {
        struct strip_job rows;
        begin_rows(&rows, panel, &coding[0], &target[0], panel->dtype);
        rows.below = true;
        columns_kernel(&coding[1], panel->dtype)(panel, &coding[1], &target[1], &rows);
        return;
    }
    quantize_nvfp4(panel, &coding[0], &target[0]);
    quantize_nvfp4(panel, &coding[1], &target[1]);
}

SLOT void absmax_lines(const struct nib_panel *panel, const struct nib_coding *coding, float *out)
{
    absmax_lines_lanes(panel, coding, out);
}

/* ---- Back ---- */

enum {
    CHUNK = 64,
    CODES = 128
}; /* blocks that are decoded one after the other, and scales that are no NaN, and one that is */

/* What a call knows. */
struct decode_job {
    const struct nib_coding *coding;
    nib_dtype dtype;
    float tensor_scale;
    VF multiplier, last; /* the tensor scale, and what comes after it */
    bool divides, stream;
};

SIMD bool tensor_scale_divides(const struct nib_rules *rules)
{
    return rules->tensor_scale != NIB_TENSOR_SCALE_AMAX && rules->tensor_scale != NIB_TENSOR_SCALE_MULTIPLIER;
}

SIMD VF factors_of(VF scales, const struct decode_job *job)
{
    return job->divides ? vf_div(scales, job->multiplier) : vf_mul(vf_mul(scales, job->multiplier), job->last);
}

/* The eight magnitudes of a block are 2^k or 1.5 * 2^k times its factor, so that only two values need rounding to BF16,
 * and the others follow by counting in the exponent - as long as that stays clear of its ends. The first is in the lower
 * half of what this gives, the second in the upper. */
static const float least_counted = 0x1p-110f, most_counted = 0x1p112f;

SIMD VI bf16_roundings(VF factor)
{
    const VI one = vi_of(round_to_bf16(factor)), more = vi_of(round_to_bf16(vf_mul(factor, vf_set1(1.5f))));
    return vi_or(vi_srl(one, 16), more);
}

/* How a chunk of blocks can be decoded. */
enum decode_way { BY_REFERENCE, BY_VALUES, BY_TABLES };

/* The factors of n blocks, a multiple of VL, or their roundings. Those that are not finite are left to the
 * reference; a tensor scale that is not finite has gone there before. */
SIMD enum decode_way decode_factors(const uint8_t *scales, int n, const struct decode_job *job, float *factors)
{
    VI largest_scale = vi_set1(0); /* over bits, where a NaN shows */
    VF least = vf_set1(FLT_MAX), most = vf_set1(0);
    for (int b = 0; b < n; b += VL) {
        const VF s = vf_mul(vf_load_scaled_e4m3(scales + b), vf_set1(256.0f)), f = factors_of(s, job);
        largest_scale = vi_max(vi_of(s), largest_scale);
        least = vf_min(f, least);
        most = vf_max(absolute(f), most);
        vf_store(factors + b, f);
    }
    if (vi_any_greater(largest_scale, vi_of(vf_set1(448.0f))) || !vf_all_less(most, vf_set1(INFINITY)))
        return BY_REFERENCE;
    if (job->dtype != NIB_BF16 || !vf_all_less(vf_set1(least_counted), least) ||
        !vf_all_less(most, vf_set1(most_counted)))
        return BY_VALUES;
    for (int b = 0; b < n; b += VL)
        vf_store(factors + b, vf_of(bf16_roundings(vf_load(factors + b))));
    return BY_TABLES;
}

static const uint8_t in_order[CHUNK] = { 0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                         16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                         32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                         48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63 };

/* n blocks, a multiple of VL and at most CHUNK, whatever their scales are. */
SIMD void decode_few(char *y, const uint8_t *codes, const uint8_t *scales, int n, const struct decode_job *job)
{
    float factors[CHUNK] __attribute__((aligned(64)));
    const enum decode_way way = decode_factors(scales, n, job, factors);
    const int block_bytes = BLOCK * bytes_of(job->dtype);
    if (way == BY_REFERENCE)
        nib_kernels_scalar.decode[NIB_NVFP4](y, job->dtype, codes, scales, n * BLOCK, job->tensor_scale, job->coding,
                                             job->stream);
    for (int b = 0; b < n && way == BY_TABLES; b += 4)
        decode_four_bf16(y + b * block_bytes, codes + b * 8, factors + b, job->stream);
    for (int b = 0; b < n && way == BY_VALUES; b += 4)
        decode_four_wide(y + b * block_bytes, job->dtype, codes + b * 8, factors, in_order + b, job->stream);
}

/* Where there are many blocks it is worth while to make for every scale what its blocks need: nothing but loads is left
 * of it then, and stores do not wait. */
struct decode_tables {
    float factors[CODES] __attribute__((aligned(64)));
    uint16_t values[CODES][BLOCK] __attribute__((aligned(64))); /* in BF16, of every code of an element */
    uint8_t least;                                              /* scale that they are good for */
    bool are_finite;                                            /* all of the factors */
    bool has_values;
};

SIMD void make_tables(const struct decode_job *job, struct decode_tables *tables)
{
    float roundings[CODES] __attribute__((aligned(64)));
    for (int code = 0; code < CODES; code += VL) {
        const VF f = factors_of(f32_of_e4m3(vi_add(vi_lane_indices(), vi_set1(code))), job);
        vf_store(tables->factors + code, f);
        vf_store(roundings + code, vf_of(bf16_roundings(f)));
    }
    const float smallest = tables->factors[1], largest = tables->factors[126];
    tables->has_values = job->dtype == NIB_BF16 && smallest > least_counted && largest < most_counted;
    tables->least = tables->has_values;
    tables->are_finite = nib_abs(largest) <= FLT_MAX;
    if (tables->has_values)
        make_bf16_values(tables->values[0], roundings, CODES);
}

SIMD void decode_many(char *y, const uint8_t *codes, const uint8_t *scales, const struct decode_tables *tables,
                      const struct decode_job *job)
{
    enum { CODES_AHEAD = 4 * CHUNK }; /* codes and scales some way on arrive meanwhile */
    const int block_bytes = BLOCK * bytes_of(job->dtype);
    _mm_prefetch((const char *)scales + CODES_AHEAD, _MM_HINT_T0);
    if (tables->has_values && job->dtype == NIB_BF16) /* the compiler knows the dtype */
        for (int b = 0; b < CHUNK; b += 8) {
            _mm_prefetch((const char *)codes + (CODES_AHEAD + b) * 8, _MM_HINT_T0);
            decode_four_known(y + b * block_bytes, codes + b * 8, tables->values[0], scales + b, job->stream);
            decode_four_known(y + (b + 4) * block_bytes, codes + (b + 4) * 8, tables->values[0], scales + b + 4,
                              job->stream);
        }
    else
        for (int b = 0; b < CHUNK; b += 8) {
            _mm_prefetch((const char *)codes + (CODES_AHEAD + b) * 8, _MM_HINT_T0);
            decode_four_wide(y + b * block_bytes, job->dtype, codes + b * 8, tables->factors, scales + b, job->stream);
            decode_four_wide(y + (b + 4) * block_bytes, job->dtype, codes + (b + 4) * 8, tables->factors,
                             scales + b + 4, job->stream);
        }
}

SIMD void decode_as(char *y, nib_dtype dtype, const uint8_t *codes, const uint8_t *scales, int64_t n,
                    float tensor_scale, const struct nib_coding *coding, bool stream)
{
    enum { MANY = 4 * CHUNK };
    const bool has_amax = coding->rules.tensor_scale == NIB_TENSOR_SCALE_AMAX;
    const struct decode_job job = { .coding = coding,
                                    .dtype = dtype,
                                    .tensor_scale = tensor_scale,
                                    .multiplier = vf_set1(tensor_scale),
                                    .last = vf_set1(has_amax ? 1.0f / coding->rules.full_scale : 1.0f),
                                    .divides = tensor_scale_divides(&coding->rules),
                                    .stream = stream };
    const int64_t block_bytes = BLOCK * bytes_of(dtype), whole = n / (VL * BLOCK) * VL;
    struct decode_tables tables;
    int64_t b = 0;
    if (whole >= MANY) {
        make_tables(&job, &tables);
        for (; tables.are_finite && b + CHUNK <= whole; b += CHUNK)
            if (scales_within(scales + b, tables.least))
                decode_many(y + b * block_bytes, codes + b * 8, scales + b, &tables, &job);
            else
                decode_few(y + b * block_bytes, codes + b * 8, scales + b, CHUNK, &job);
    }
    for (; b < whole; b += CHUNK)
        decode_few(y + b * block_bytes, codes + b * 8, scales + b, (int)nib_min(CHUNK, whole - b), &job);
    const int64_t left = n - whole * BLOCK;
    if (left > 0) { /* less than VL blocks: among others that do no harm */
        char values[VL * BLOCK * 4] __attribute__((aligned(64)));
        uint8_t last_codes[VL * 8] = { 0 }, last_scales[VL];
        struct decode_job last = job;
        last.stream = false;
        memset(last_scales, scales[whole], sizeof last_scales);
        memcpy(last_scales, scales + whole, (size_t)nib_ceil_div(left, BLOCK));
        memcpy(last_codes, codes + whole * 8, (size_t)(left + 1) / 2);
        decode_few(values, last_codes, last_scales, VL, &last);
        memcpy(y + whole * block_bytes, values, (size_t)(left * bytes_of(dtype)));
    }
    if (stream)
        _mm_sfence();
}

#define DEFINE_DECODE(name, dtype, stream)                                                              \
    SLOT void name(char *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float tensor_scale, \
                   const struct nib_coding *coding)                                                     \
    {                                                                                                   \
        decode_as(y, dtype, codes, scales, n, tensor_scale, coding, stream);                            \
    }
DEFINE_DECODE(decode_f32, NIB_F32, false)
DEFINE_DECODE(stream_f32, NIB_F32, true)
DEFINE_DECODE(decode_bf16, NIB_BF16, false)
DEFINE_DECODE(stream_bf16, NIB_BF16, true)
DEFINE_DECODE(decode_f16, NIB_F16, false)
DEFINE_DECODE(stream_f16, NIB_F16, true)
#undef DEFINE_DECODE

/* Streaming stores want whole vectors at their places. */
SLOT void decode_nvfp4(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                       float tensor_scale, const struct nib_coding *coding, bool stream)
{
    const bool streams = stream && (uintptr_t)y % 64 == 0;
    if (!(nib_abs(tensor_scale) <= FLT_MAX) || (tensor_scale == 0 && tensor_scale_divides(&coding->rules))) {
        nib_kernels_scalar.decode[NIB_NVFP4](y, dtype, codes, scales, n, tensor_scale, coding, stream);
        return;
    }
    if (dtype == NIB_F32)
        (streams ? stream_f32 : decode_f32)(y, codes, scales, n, tensor_scale, coding);
    else if (dtype == NIB_BF16)
        (streams ? stream_bf16 : decode_bf16)(y, codes, scales, n, tensor_scale, coding);
    else
        (streams ? stream_f16 : decode_f16)(y, codes, scales, n, tensor_scale, coding);
}
