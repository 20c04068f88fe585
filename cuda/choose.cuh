/* SPDX-License-Identifier: Apache-2.0 */
/*
 * choose.cuh - which kernel does what, for values of a dtype. `Run` launches one (launch.cuh), or runs it on the host
 * (shim/launch.cpp): run.template operator()<Kernel>(job).
 */
#ifndef NIB_CUDA_CHOOSE_CUH
#define NIB_CUDA_CHOOSE_CUH

#include "kernels.cuh"

/* The most items of a launch: 32 bits, and space for the threads of the last tile. */
enum : int64_t { NIB_CUDA_MOST = INT64_C(1) << 31 };

static inline nib_cuda_divider divider_of(uint32_t divisor)
{
    uint32_t shift = 0;
    while ((UINT64_C(1) << shift) < divisor)
        shift++;
    return { (uint32_t)(((UINT64_C(1) << 32) * ((UINT64_C(1) << shift) - divisor)) / divisor + 1), shift, divisor };
}

/* Whether there are no tails: whole tiles of 128 rows and so many columns, whose codes and scales can be
 * written in eights. */
static inline bool is_whole(const nib_cuda_quantization &job, int64_t columns)
{
    bool whole = job.aligned && job.rows % 128 == 0 && job.cols % columns == 0;
    for (int usage = 0; usage < 2; usage++)
        if (job.wanted[usage])
            whole = whole &&
                    ((job.usage[usage].wide && job.usage[usage].words8 && !job.usage[usage].g.swizzled) || job.out);
    return whole;
}

template <nib_dtype D, int ROUND, class Run> static void choose_quantize(const nib_cuda_quantization &whole, Run &run)
{
    nib_cuda_quantization job = whole;
    const bool fake = job.out != nullptr, plain = job.scale_rule == NIB_SCALE_RTN && !job.per_line;
    const bool whole_tiles = D == NIB_BF16 && is_whole(job, 128);
    const bool words = (!job.wanted[0] || job.usage[0].words) && (!job.wanted[1] || job.usage[1].words);
    if (job.square && plain && !fake && words) {
        const bool at_once = job.one_scale || !job.wanted[0] || !job.wanted[1];
        for (int usage = 0; usage < 2; usage++) {
            job.wanted[1 - usage] = at_once && whole.wanted[1 - usage];
            job.wanted[usage] = whole.wanted[usage];
            if (usage == 1 && at_once)
                continue;
            if (whole_tiles)
                run.template operator()<quantize_squares<D, ROUND, D == NIB_BF16>>(job);
            else
                run.template operator()<quantize_squares<D, ROUND, false>>(job);
        }
        return;
    }
    const bool fast = plain && !job.square, rows = fast && job.wanted[0] && !job.usage[0].rht;
    const bool tiles = fast && job.wanted[1] && !fake && words;
    if (tiles) {
        job.wanted[0] = rows;
        if (job.usage[1].rht && whole_tiles)
            run.template operator()<quantize_tiles<D, true, ROUND, D == NIB_BF16>>(job);
        else if (job.usage[1].rht)
            run.template operator()<quantize_tiles<D, true, ROUND, false>>(job);
        else if (whole_tiles)
            run.template operator()<quantize_tiles<D, false, ROUND, D == NIB_BF16>>(job);
        else
            run.template operator()<quantize_tiles<D, false, ROUND, false>>(job);
    }
    if (rows && !tiles) {
        const int64_t all = job.usage[0].g.scale_shape[0], length = job.usage[0].g.scale_shape[1];
        const int64_t most = NIB_CUDA_MOST / (length ? length : 1);
        job.by_line = divider_of((uint32_t)(length ? length : 1));
        for (job.first_line = 0; job.first_line < all && length; job.first_line += job.line_count) {
            job.line_count = all - job.first_line < most ? all - job.first_line : most;
            const bool at_once = job.row_stride == job.cols && is_whole(job, 64);
            const bool beside = fake && at_once && job.out_aligned && job.out_stride == job.cols;
            if (beside && D == NIB_BF16 && ROUND == NEAREST)
                run.template operator()<round_halves>(job);
            else if (beside)
                run.template operator()<quantize_rows<D, ROUND, true, D != NIB_BF16 || ROUND != NEAREST>>(job);
            else if (fake)
                run.template operator()<quantize_rows<D, ROUND, true, false>>(job);
            else if (at_once)
                run.template operator()<quantize_rows<D, ROUND, false, true>>(job);
            else
                run.template operator()<quantize_rows<D, ROUND, false, false>>(job);
        }
    }
    for (int usage = 0; usage < 2; usage++) {
        if (!whole.wanted[usage] || (usage ? tiles : rows))
            continue;
        job.wanted[usage] = true;
        job.wanted[1 - usage] = false;
        if (fake)
            run.template operator()<quantize_lines<D, true>>(job);
        else
            run.template operator()<quantize_lines<D, false>>(job);
    }
}

template <nib_dtype D, class Run> static void choose(const nib_cuda_quantization &job, Run &run)
{
    if (job.rounding == NIB_ROUND_NEAREST)
        choose_quantize<D, NEAREST>(job, run);
    else if (job.rounding == NIB_ROUND_STOCHASTIC_8)
        choose_quantize<D, STOCHASTIC_8>(job, run);
    else
        choose_quantize<D, STOCHASTIC_24>(job, run);
}

template <nib_dtype D, class Run> static void choose(const nib_cuda_dequantization &whole, Run &run)
{
    nib_cuda_dequantization job = whole;
    const int64_t each = D == NIB_F32 ? 4 : 8, per_line = job.cols / each;
    const bool fast = job.from == NIB_ROWWISE && !job.usage.rht && !job.per_line && job.usage.wide && job.out_aligned &&
                      job.cols % NIB_BLOCK == 0 && per_line < NIB_CUDA_MOST;
    if (!fast) {
        run.template operator()<decode_lines<D>>(job);
        return;
    }
    const int64_t most = NIB_CUDA_MOST / per_line;
    job.by_line = divider_of((uint32_t)per_line);
    for (job.first_item = 0; job.first_item < job.rows; job.first_item += most) {
        const int64_t lines = job.rows - job.first_item < most ? job.rows - job.first_item : most;
        job.item_count = lines * per_line;
        run.template operator()<decode_rows<D>>(job);
    }
}

template <nib_dtype D, class Run> static void choose(const nib_cuda_amax &whole, Run &run)
{
    nib_cuda_amax job = whole;
    const bool flat = job.row_stride == job.cols || job.rows == 1;
    if (job.wanted[1]) {
        const int64_t words = amax_columns<D>::words(job);
        job.by_line = divider_of((uint32_t)(words ? words : 1));
        run.template operator()<amax_columns<D>>(job);
    } else if (flat && job.aligned_start && !job.rht && !job.per_line) {
        run.template operator()<amax_flat<D>>(job);
    } else {
        run.template operator()<amax_lines<D>>(job);
    }
}

#endif
