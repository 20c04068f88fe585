/* SPDX-License-Identifier: Apache-2.0 */
/*
 * convert.c - delayed scaling's update rule, and MXFP4 into NVFP4 without a change of value.
 */
#include "tensor/tensor.h"

#include <float.h>

#include "format/codec.h"
#include "base/os.h"

/* ---- Delayed scaling ---- */

static float chosen_amax(nib_amax_choice choice, const float *history, size_t n)
{
    float amax = history[0];
    for (size_t i = 1; i < n && choice == NIB_AMAX_MAX; i++)
        amax = nib_fmax(amax, history[i]);
    return amax;
}

nib_status nib_delayed_scaling_update(nib_dtype element, nib_amax_choice choice, int margin, float *history, size_t n,
                                      float *scale)
{
    NIB_REQUIRE(history);
    NIB_REQUIRE(scale);
    if (element != NIB_E4M3 && element != NIB_E5M2)
        return nib_fail(NIB_ERR_DTYPE, "delayed scaling is for E4M3 and E5M2");
    if (choice < 0 || choice >= NIB_AMAX_CHOICE_COUNT)
        return nib_fail(NIB_ERR_ARG, "%d is not a way to choose an amax", (int)choice);
    if (margin < -126 || margin > 126)
        return nib_fail(NIB_ERR_ARG, "margin %d is not between -126 and 126", margin);
    if (n == 0)
        return nib_fail(NIB_ERR_ARG, "the amax history has no entries");
    const nib_fpenv saved = nib_fpenv_enter();
    const float amax = chosen_amax(choice, history, n), current = history[0];
    const float largest = (element == NIB_E4M3 ? 448.0f : 57344.0f) * nib_float((uint32_t)(127 - margin) << 23);
    if (amax > 0 && amax <= FLT_MAX)
        *scale = nib_fmin(largest / amax, FLT_MAX);
    memmove(history, history + 1, (n - 1) * sizeof *history); /* the oldest, in history[1], goes in the end */
    history[n - 1] = current;
    history[0] = 0;
    nib_fpenv_leave(saved);
    return NIB_OK;
}

/* ---- MXFP4 to NVFP4 ---- */

enum { MX_BLOCK = 32, NV_BLOCK = 16 };

/* One NVFP4 block: 16 codes whose values are those of MXFP4 codes times `ratio`, the MXFP4 scale over the new tensor
 * scale. True if nothing is rounded. */
static bool recode(const uint8_t in[NV_BLOCK], float ratio, uint8_t scale, uint8_t out[NV_BLOCK])
{
    const float s = nib_f32_from_e4m3(scale);
    bool exact = true;
    for (int i = 0; i < NV_BLOCK; i++) {
        const float value = nib_f32_from_e2m1(in[i]) * ratio,
                    y = value / s; /* ratio is a power of two: value is exact */
        out[i] = nib_e2m1_from_f32(y);
        exact &= nib_f32_from_e2m1(out[i]) * s == value;
    }
    return exact;
}

/* The scale for 16 codes: the ratio itself where E4M3 has it, otherwise any that is exact, otherwise the nearest. */
static bool convert_block(const uint8_t in[NV_BLOCK], float ratio, uint8_t *scale, uint8_t out[NV_BLOCK])
{
    *scale = nib_e4m3_from_f32(ratio);
    if (nib_f32_from_e4m3(*scale) == ratio && *scale)
        return recode(in, ratio, *scale, out);
    for (int candidate = 1; candidate <= 0x7E; candidate++)
        if (recode(in, ratio, (uint8_t)candidate, out)) {
            *scale = (uint8_t)candidate;
            return true;
        }
    *scale = *scale ? *scale : 1;
    (void)recode(in, ratio, *scale, out);
    return false;
}

/* The tensor scale, a multiplier: a power of two that puts the largest scale of a block with a value in it at 2^8. At
 * least 2^-126, so that it is normal. */
static float decode_scale(int largest_e8m0) { return nib_float((uint32_t)nib_max(largest_e8m0 - 8, 1) << 23); }

float nib_mxfp4_decode_scale(float largest) { return largest > 0 ? decode_scale((int)(nib_bits(largest) >> 23)) : 1; }

void nib_mxfp4_to_nvfp4_blocks(const uint8_t *codes, const uint8_t *scales, int64_t blocks, float g, uint8_t *out_codes,
                               uint8_t *out_scales)
{
    for (int64_t half = 0; half < 2 * blocks; half++) {
        uint8_t in[NV_BLOCK], out[NV_BLOCK];
        const uint8_t *bytes = codes + half * NV_BLOCK / 2;
        for (int i = 0; i < NV_BLOCK; i++)
            in[i] = bytes[i / 2] >> 4 * (i % 2) & 15;
        (void)convert_block(in, nib_fmax(nib_f32_from_e8m0(scales[half / 2]) / g, 0x1p-40f), &out_scales[half], out);
        for (int i = 0; i < NV_BLOCK / 2; i++)
            out_codes[half * NV_BLOCK / 2 + i] = (uint8_t)(out[2 * i] | out[2 * i + 1] << 4);
    }
}

static float decode_scale_for(const struct nib_usage_geometry *g, const struct nib_usage_memory *memory)
{
    int largest = -1;
    for (int64_t line = 0; line < g->lines; line++)
        for (int64_t block = 0; block < g->blocks; block++) {
            const int e8m0 = (int)nib_scale_load(g, memory->scales, line, block);
            bool empty = true;
            for (int64_t i = block * MX_BLOCK; i < nib_min((block + 1) * MX_BLOCK, g->length) && empty; i++)
                empty = (nib_code_load(g, memory->codes, line, i) & 7) == 0;
            if (!empty && e8m0 < 255 && e8m0 > largest)
                largest = e8m0;
        }
    return largest < 0 ? 1 : decode_scale(largest); /* 1: there are only zeros */
}

static bool convert_line(const struct nib_usage_geometry *from, const struct nib_usage_memory *in, nib_tensor *t,
                         int64_t line, int64_t block, float g)
{
    const struct nib_usage_geometry *to = &t->geometry.usage[NIB_ROWWISE];
    const struct nib_usage_memory out = nib_tensor_memory(t, NIB_ROWWISE);
    const uint8_t e8m0 = (uint8_t)nib_scale_load(from, in->scales, line, block);
    bool exact = e8m0 != 255;
    for (int half = 0; half < MX_BLOCK / NV_BLOCK; half++) {
        const int64_t first = block * MX_BLOCK + half * NV_BLOCK, n = nib_min(NV_BLOCK, from->length - first);
        uint8_t codes[NV_BLOCK] = { 0 }, converted[NV_BLOCK], scale;
        if (n <= 0)
            break;
        for (int64_t i = 0; i < n; i++)
            codes[i] = nib_code_load(from, in->codes, line, first + i);
        /* Never 0: a block so far below the largest has no exact counterpart unless it is empty, and recode must see
         * that. */
        const float ratio = nib_fmax(nib_f32_from_e8m0(e8m0 == 255 ? 0 : e8m0) / g, 0x1p-40f);
        exact &= convert_block(codes, ratio, &scale, converted);
        nib_scale_store(to, out.scales, line, first / NV_BLOCK, e8m0 == 255 ? 0x7F : scale); /* a NaN stays one */
        for (int64_t i = 0; i < n; i++)
            nib_code_store(to, out.codes, line, first + i, converted[i]);
    }
    return exact;
}

static void convert_tensor(const nib_tensor *mxfp4, nib_tensor *t, nib_conversion_report *report)
{
    const struct nib_usage_geometry *from = &mxfp4->geometry.usage[NIB_ROWWISE];
    const struct nib_usage_memory in = nib_tensor_memory(mxfp4, NIB_ROWWISE);
    const nib_fpenv saved = nib_fpenv_enter();
    const float g = decode_scale_for(from, &in);
    *nib_tensor_memory(t, NIB_ROWWISE).tensor_scales = g;
    for (int64_t line = 0; line < from->lines; line++)
        for (int64_t block = 0; block < from->blocks; block++, report->blocks++) {
            if (convert_line(from, &in, t, line, block, g))
                continue;
            if (report->inexact < (int64_t)(sizeof report->first / sizeof *report->first)) {
                report->first[report->inexact].line = line;
                report->first[report->inexact].block = block;
            }
            report->inexact++;
        }
    nib_fpenv_leave(saved);
}

nib_status nib_mxfp4_to_nvfp4(const nib_tensor *mxfp4, nib_conversion_report *report, nib_tensor **out)
{
    NIB_REQUIRE(mxfp4);
    NIB_REQUIRE(out);
    nib_conversion_report found = { .bytes = sizeof found };
    if (report)
        TRY(nib_struct_check_output("report", report, NIB_UP_TO(nib_conversion_report, first)));
    TRY(nib_check_host("nib_mxfp4_to_nvfp4", mxfp4->device));
    if (mxfp4->q.format != NIB_MXFP4)
        return nib_fail(NIB_ERR_MISMATCH, "the tensor is %s, not mxfp4", nib_format_of(&mxfp4->q)->name);
    if (!nib_tensor_has(mxfp4, NIB_ROWWISE))
        return nib_fail(NIB_ERR_USAGE, "the conversion takes the rowwise usage, which the tensor does not have");
    nib_quantizer q;
    nib_tensor *t = NULL;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    TRY(nib_tensor_create(&q, mxfp4->dtype, mxfp4->rank, mxfp4->shape, mxfp4->device, &t));
    convert_tensor(mxfp4, t, &found);
    if (found.inexact && !report) {
        nib_tensor_destroy(t);
        return nib_fail(NIB_ERR_MISMATCH,
                        "%lld of %lld blocks have no exact counterpart, the first in line %lld, block %lld",
                        (long long)found.inexact, (long long)found.blocks, (long long)found.first[0].line,
                        (long long)found.first[0].block);
    }
    if (report)
        nib_struct_write(report, &found, sizeof found);
    *out = t;
    return NIB_OK;
}
