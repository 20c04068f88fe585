/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h - rows by te's rule, to nearest or with random bytes: most data. Included once by the file of each x86
 * instruction set, after simd.h.
 *
 * Blocks lie side by side, so that no transposition is needed if a block's elements share a vector and only amaxes,
 * scales and factors have a lane per block. They go through in strips of up to 64 groups of eight blocks, which may
 * come from different rows; while the codes of some groups are made, the next ones get their scales.
 *
 * Amaxes are maxima of the bits of magnitudes, in whose order NaNs come above infinity and so stay visible. A strip
 * that has one is left to the lanes of simd.h, and what follows need not think of NaNs: a value's sign is then the sign
 * of its code.
 *
 * One group of BF16 through AVX2, to nearest (kernels_avx2.c). A vector is a block; a bar parts its 128-bit halves, and
 * 0..7 are the blocks of the group.
 *
 *   amax_16_of_eight   eight loads, signs cleared; words of block 0:
 *                         e0  e1  e2  e3  e4  e5  e6  e7 | e8  e9  e10 e11 e12 e13 e14 e15
 *   unpack 16 + max    of 0 and 1: word 0 is the larger of e0 and e4 of block 0, word 1 the same of block 1
 *                         0 1 0 1 0 1 0 1 | 0 1 0 1 0 1 0 1        and for 2 3, 4 5, 6 7: four vectors
 *   unpack 32 + max       0 1 2 3 0 1 2 3 | 0 1 2 3 0 1 2 3        and for 4 5 6 7: two vectors
 *   unpack 64 + max       0 1 2 3 4 5 6 7 | 0 1 2 3 4 5 6 7        one vector
 *   max of the halves     0 1 2 3 4 5 6 7                          eight words, the amaxes
 *   widen, shift by 16    0 1 2 3 | 4 5 6 7                        in eight lanes of FP32: BF16 is FP32's upper half
 *   scales_of          times scaler.block, to E4M3: eight bytes, the scales of the group; a table has their factors
 *
 *   code_four_blocks_bf16, a block (that of tests/test_known_answers.c: tensor amax 3, scale 0x79, factor 3.111):
 *   load               lane i has e2i below and e2i+1 above
 *                         0 -0, .1 -.2, .3 -.4, .5 -.6 | .7 -.8, .9 -1, 1.25 -1.5, 1.75 -2
 *   shift for even ones, mask for odd ones; both times the factor; e2m1_bits adds the value that rounds to E2M1's grid
 *                      and leaves the code in the lower word of the lane:
 *                         even  0   .31  .93  1.6  2.2  2.8  3.9  5.4    codes  0  1  2  3  4  5  6  7
 *                         odd   0   .62  1.2  1.9  2.49 3.1  4.7  6.2    codes  0  1  2  4  4  5  6  7
 *   blend, or signs    words: 0 8, 1 9, 2 A, 3 C | 4 C, 5 D, 6 E, 7 F
 *   madd by 1, 16      lanes: 80 91 A2 C3 | C4 D5 E6 F7, a byte each
 *   pack 32, pack 16   of blocks 0..3: each half has four bytes of every block, 0 1 2 3 | 0 1 2 3
 *   permute 32            0 0 1 1 | 2 2 3 3, which is 32 bytes as they are stored
 *
 * FP32 has two vectors to a block, F16 is widened as it is loaded, and AVX-512 has two blocks to a vector of words.
 *
 * The including file defines amax_bits, code_group and code_group_randomly, and what random_bytes_of works with. Where
 * SWEEPS is 1 rows of BF16 by the sweep go this way too (sweep_avx512.h).
 */

enum { GROUP = 8, GROUPS = 64, STRIP = GROUP * GROUPS, GROUP_LENGTH = GROUP * BLOCK };
enum { GATHERED = 64 }; /* blocks that are gathered at once */

struct sweep_weights;

/* Groups at equal distances: along a row, or one below the other. */
struct strip {
    int groups;
    const char *x;
    uint8_t *codes;
    int64_t x_step, codes_step;                 /* bytes from group to group */
    int64_t line, block, line_step, block_step; /* of the first block of a group in the usage */
    const struct sweep_weights *weights;        /* of AT_ONCE groups each; NULL: none counts more than another */
};

/* What the strips of a panel have in common. */
struct strip_job {
    const struct nib_panel *panel;
    const struct nib_coding *coding;
    const struct nib_target *target;
    struct lane_scaler scaler;
    int64_t row_bytes, ahead; /* from row to row, and to what is prefetched */
    bool below;               /* what comes next lies below, not beside */
    VI keys[2][10];           /* of the ten rounds of Philox */
    float factors[128];       /* of every scale under this tensor scale */
    bool fixed;               /* the tensor scale is 2^exponent */
    int exponent;
};

/* Groups whose amaxes fill a vector, and groups that go through together: so many that the constants of each step are
 * loaded once for all of them, and so few that the steps of different ones overlap. */
enum { AT_ONCE = VL / GROUP, BATCH = VL < 16 ? 4 : 8 };

#if SWEEPS
#include "kernels/x86/sweep_avx512.h"
#else
struct sweep_weights {
    int none;
};
SIMD void sweep_weights_of(const VF importance[BLOCK], struct sweep_weights *out) { (void)importance, (void)out; }
SIMD VI sweep_scales_of(const char *x, const char *next, VF amaxes, const struct strip_job *job,
                        const struct sweep_weights *weights)
{
    (void)x, (void)next, (void)amaxes, (void)job, (void)weights;
    return vi_set1(0);
}
#endif

SIMD int bytes_of(nib_dtype dtype) { return dtype == NIB_F32 ? 4 : 2; }

/* ---- Random bytes ---- */

static void round_keys(const struct nib_coding *coding, uint32_t keys[2][10])
{
    for (uint32_t round = 0; round < 10; round++) {
        keys[0][round] = (uint32_t)coding->seed + round * 0x9E3779B9u;
        keys[1][round] = (uint32_t)(coding->seed >> 32) + round * 0xBB67AE85u;
    }
}

/* The 16 random bytes of each of VL blocks of a line. Philox with its state in the lower halves of 64-bit lanes, where
 * products are: a state's upper half is of no account. In the first three rounds most of the state is the same for all
 * blocks of a line. */
SIMD void random_bytes_of(const struct strip_job *job, int64_t line, int64_t block, uint8_t *out)
{
    const struct nib_coding *coding = job->coding;
    const uint64_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u;
    uint32_t k[2][10];
    round_keys(coding, k);
    const uint64_t p0 = m0 * (uint32_t)coding->offset, p1 = m1 * (uint32_t)(coding->origin_line + line);
    const uint64_t q0 = m0 * (uint32_t)((uint32_t)(p1 >> 32) ^ (uint32_t)(coding->offset >> 32) ^ k[0][0]);
    const uint64_t r1 = m1 * (uint32_t)((uint32_t)(q0 >> 32) ^ (uint32_t)p0 ^ k[1][1]);
    const VI f0 = vi_set1((int)m0), f1 = vi_set1((int)m1);
    UNROLL
    for (int half = 0; half < 2; half++) {
        const VI column = vi_add(random_order(half), vi_set1((int)(uint32_t)(coding->origin_block + block)));
        VI c2 = vi_xor(column, vi_set1((int)((uint32_t)(p0 >> 32) ^ k[1][0])));
        const VI second = vi_multiply_even(c2, f1);
        VI c0 = vi_xor(vi_upper_halves(second), vi_set1((int)((uint32_t)p1 ^ k[0][1])));
        VI c3 = vi_multiply_even(c0, f0);
        c2 = vi_xor(vi_upper_halves(c3), vi_set1((int)((uint32_t)q0 ^ k[1][2])));
        c0 = vi_xor(second, vi_set1((int)((uint32_t)(r1 >> 32) ^ k[0][2])));
        VI c1 = vi_set1((int)(uint32_t)r1);
        UNROLL
        for (int round = 3; round < 10; round++) {
            const VI a = vi_multiply_even(c0, f0), b = vi_multiply_even(c2, f1);
            c0 = vi_xor3(vi_upper_halves(b), c1, job->keys[0][round]);
            c2 = vi_xor3(vi_upper_halves(a), c3, job->keys[1][round]);
            c1 = b;
            c3 = a;
        }
        store_random(out + half * VL * BLOCK / 2, vi_join_halves(c0, c1), vi_join_halves(c2, c3));
    }
}

/* ---- Strips ---- */

/* Blocks from one that is coded to what is prefetched: beyond those whose amaxes are made, two batches on. */
enum { AHEAD = VL < 16 ? 128 : 176 };

/* What is known of a strip while it goes through. */
struct strip_state {
    uint8_t scales[STRIP + VL];
    float amaxes[BATCH * GROUP] __attribute__((aligned(64)));  /* of the batch after the next */
    float factors[BATCH * GROUP] __attribute__((aligned(64))); /* of random rounding: 2^23 times what they are */
    uint8_t random[(BATCH * GROUP + VL) * BLOCK] __attribute__((aligned(64)));
    bool fits; /* what the scales of the batch make of its values is less than 7 */
    bool good; /* there is no NaN, and no factor is too large */
};

SIMD int groups_of_batch(const struct strip *strip, int g) { return (int)nib_min(BATCH, strip->groups - g); }

/* The amaxes of the blocks of groups g.. over `lines` rows. */
SIMD void strip_amaxes(const struct strip *strip, const struct strip_job *job, int g, int lines, nib_dtype dtype,
                       struct strip_state *state)
{
    const char *x = strip->x + g * strip->x_step;
    const int n = groups_of_batch(strip, g);
    VI largest = vi_set1(0);
    for (int k = 0; k < n; k += AT_ONCE, x += AT_ONCE * strip->x_step) {
        const char *const next = k + AT_ONCE <= n ? x + (AT_ONCE - 1) * strip->x_step : x;
        VI bits = amax_bits(x, next, dtype);
        for (int l = 1; l < lines; l++)
            bits = vi_max(bits, amax_bits(x + l * job->row_bytes, next + l * job->row_bytes, dtype));
        largest = vi_max(largest, bits);
        vf_store(state->amaxes + k * GROUP, vf_of(bits));
    }
    state->good &= !vi_any_greater(largest, vi_set1(0x7F800000));
}

/* The scales of n blocks. True if no value that they scale comes to 7 or more: a scale is not limited, and so large
 * that rounding it down has not changed it by a seventh. (Blocks of zeros count as too small, which does no harm.) */
SIMD bool scales_of(const float *amaxes, int n, const struct strip_job *job, uint8_t *scales)
{
    const VF block = job->scaler.block;
    const VI floor_code = vi_set1(job->coding->floor_code);
    VF most = vf_set1(0), least = vf_set1(1);
    for (int b = 0; b < n; b += VL) {
        const VF wanted = vf_mul(vf_load(amaxes + b), block);
        VF ignored;
        most = vf_max(wanted, most);
        least = vf_min(wanted, least);
        vi_store_low_bytes(scales + b, vi_max(e4m3_of(wanted, &ignored), floor_code));
    }
    return vf_all_less(most, vf_set1(480.0f)) && vf_all_less(vf_set1(4 * 0x1p-9f), least);
}

/* Scales and factors for random rounding, whose factors are 2^23 times as large; a block of zeros has none. False where
 * one is too large for that. */
SIMD bool scales_and_factors_of(const float *amaxes, int n, const struct strip_job *job, uint8_t *scales,
                                float *factors)
{
    VF most = vf_set1(0);
    for (int b = 0; b < n; b += VL) {
        const VF amax = vf_load(amaxes + b);
        const struct scales s = rtn_scales(amax, job->coding, &job->scaler);
        const VF factor = vf_of(vi_select_less(vf_set1(0), amax, vi_of(s.factor), vi_set1(0)));
        most = vf_max(factor, most);
        vi_store_low_bytes(scales + b, s.code);
        vf_store(factors + b, vf_mul(factor, vf_set1(0x1p23f)));
    }
    return vf_all_less(most, vf_set1(0x1p100f));
}

/* The scales that a sweep finds for the blocks of groups g.., whose amaxes are known. */
SIMD void swept_scales_of(const struct strip *strip, const struct strip_job *job, int g, const float *amaxes,
                          uint8_t *scales)
{
    const char *x = strip->x + g * strip->x_step;
    const int n = groups_of_batch(strip, g);
    for (int k = 0; k < n; k += AT_ONCE, x += AT_ONCE * strip->x_step, amaxes += VL, scales += VL) {
        const char *const next = k + AT_ONCE <= n ? x + (AT_ONCE - 1) * strip->x_step : x;
        const struct sweep_weights *const weights = strip->weights ? strip->weights + (g + k) / AT_ONCE : NULL;
        vi_store_low_bytes(scales, sweep_scales_of(x, next, vf_load(amaxes), job, weights));
    }
}

SIMD void store_group_scales(const struct nib_target *target, int64_t line, int64_t block, int n, const uint8_t *scales)
{
    const struct nib_usage_geometry *g = target->geometry;
    uint8_t *const out = target->scales;
    if (!g->swizzled && n == GROUP)
        memcpy(out + line * g->scale_line + block, scales, GROUP);
    else if (g->swizzled && n == GROUP && block % 4 == 0)
        for (int b = 0; b < GROUP; b += 4) /* four side by side stay so */
            memcpy(out + nib_scale_index(g, line, block + b), scales + b, 4);
    else
        for (int b = 0; b < n; b++)
            out[nib_scale_index(g, line, block + b)] = scales[b];
}

/* To the second level: the amaxes, which come next, fetch it from there well enough, and the first should not hold what
 * is not wanted yet. */
SIMD void prefetch_group(const char *x, nib_dtype dtype)
{
    UNROLL
    for (int line = 0; line < GROUP_LENGTH * bytes_of(dtype) / 64; line++)
        _mm_prefetch(x + line * 64, _MM_HINT_T1);
}

/* The codes of n groups in a row. Values further on arrive meanwhile. */
SIMD void row_codes(const char *x, uint8_t *codes, const struct strip *strip, const struct strip_job *job, int n,
                    nib_dtype dtype, bool clamp, const uint8_t *scales)
{
    const int64_t ahead = job->ahead, x_step = strip->x_step, codes_step = strip->codes_step;
    for (const uint8_t *end = scales + n * GROUP; scales < end; scales += GROUP) {
        prefetch_group(x + ahead, dtype);
        code_group(codes, x, dtype, job->factors, scales, clamp);
        x += x_step;
        codes += codes_step;
    }
}

SIMD void strip_codes(const struct strip *strip, const struct strip_job *job, int g, int lines, nib_dtype dtype,
                      const struct strip_state *state)
{
    const char *x = strip->x + g * strip->x_step;
    uint8_t *codes = strip->codes + g * strip->codes_step;
    for (int k = 0; strip->line_step && k < BATCH; k++) /* places in rows that may be far apart */
        _mm_prefetch((const char *)codes + (BLOCK + k) * strip->codes_step, _MM_HINT_T1);
    for (int l = 0; l < lines; l++, x += job->row_bytes, codes += job->target->geometry->line_stride)
        if (state->fits) /* what lies between 6 and 7 rounds to 6 */
            row_codes(x, codes, strip, job, groups_of_batch(strip, g), dtype, false, state->scales + g * GROUP);
        else
            row_codes(x, codes, strip, job, groups_of_batch(strip, g), dtype, true, state->scales + g * GROUP);
}

/* The same with random bytes. Magnitudes are counted in units of 2^-23 (stochastic_code), which the factors bring. */
SIMD void strip_codes_randomly(const struct strip *strip, const struct strip_job *job, int g, nib_dtype dtype,
                               const struct strip_state *state)
{
    const char *x = strip->x + g * strip->x_step;
    uint8_t *codes = strip->codes + g * strip->codes_step;
    for (int k = 0; k < groups_of_batch(strip, g); k++, x += strip->x_step, codes += strip->codes_step) {
        prefetch_group(x + job->ahead, dtype);
        code_group_randomly(codes, x, dtype, state->factors + k * GROUP, state->random + k * GROUP * BLOCK);
    }
}

/* Random bytes for the blocks of groups g.. */
SIMD void strip_random(const struct strip *strip, const struct strip_job *job, int g, uint8_t *random)
{
    const int together = strip->line_step ? 1 : AT_ONCE; /* groups whose bytes are made at once */
    for (int k = g; k < g + groups_of_batch(strip, g); k += together, random += together * GROUP * BLOCK)
        random_bytes_of(job, strip->line + k * strip->line_step, strip->block + k * strip->block_step, random);
}

/* What comes before the codes of groups g..: their scales, from amaxes that are known. */
SIMD void strip_scales(const struct strip *strip, const struct strip_job *job, int g, nib_dtype dtype, bool random,
                       struct strip_state *state)
{
    uint8_t *const scales = state->scales + g * GROUP;
    const int n = groups_of_batch(strip, g) * GROUP;
    if (SWEEPS && dtype == NIB_BF16 && job->coding->scale_rule == NIB_SCALE_SWEEP) {
        swept_scales_of(strip, job, g, state->amaxes, scales);
        state->fits = false;
        return;
    }
    if (!random) {
        state->fits = scales_of(state->amaxes, n, job, scales);
        return;
    }
    state->good &= scales_and_factors_of(state->amaxes, n, job, scales, state->factors);
    strip_random(strip, job, g, state->random);
}

/* One strip of `lines` rows that share their scales; the scales are left in `state`. While some groups get their codes,
 * the next ones get their scales and those after them their amaxes: none waits for another. False where the strip is not
 * for this: what was written is of no use. */
SIMD bool quantize_strip(const struct strip *strip, const struct strip_job *job, int lines, nib_dtype dtype,
                         bool random, struct strip_state *state)
{
    state->good = true;
    for (int g = -2 * BATCH; g < strip->groups; g += BATCH) {
        const int second = g + BATCH, third = g + 2 * BATCH;
        if (g >= 0 && random)
            strip_codes_randomly(strip, job, g, dtype, state);
        else if (g >= 0)
            strip_codes(strip, job, g, lines, dtype, state);
        if (second >= 0 && second < strip->groups)
            strip_scales(strip, job, second, dtype, random, state);
        if (third < strip->groups)
            strip_amaxes(strip, job, third, lines, dtype, state);
    }
    return state->good;
}

SLOT void quantize_other(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    quantize_lanes(panel, coding, target);
}

SIMD struct nib_panel part_of(const struct nib_panel *panel, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    struct nib_panel part = *panel;
    part.x = element_address(panel, row, col);
    part.row += row;
    part.col += col;
    part.rows = rows;
    part.cols = cols;
    return part;
}

/* Part of a panel by the other way. */
SIMD void quantize_part(const struct strip_job *job, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    const struct nib_panel part = part_of(job->panel, row, col, rows, cols);
    if (rows > 0 && cols > 0)
        quantize_other(&part, job->coding, job->target);
}

/* A strip of the panel, from (row, col) on, its scales stored. */
SIMD void quantize_panel_strip(const struct strip_job *job, int64_t row, int64_t col, int groups, bool down, int lines,
                               nib_dtype dtype, bool random, const struct sweep_weights *weights)
{
    struct strip_state state;
    const struct nib_usage_geometry *const g = job->target->geometry;
    const struct nib_panel *const panel = job->panel;
    const struct strip strip = { .groups = groups,
                                 .x = element_address(panel, row, col),
                                 .codes = job->target->codes + (panel->row + row) * g->line_stride +
                                          (panel->col + col) / BLOCK * 8,
                                 .x_step = down ? job->row_bytes : GROUP_LENGTH * bytes_of(dtype),
                                 .codes_step = down ? g->line_stride : GROUP * 8,
                                 .line = panel->row + row,
                                 .block = (panel->col + col) / BLOCK,
                                 .line_step = down,
                                 .block_step = down ? 0 : GROUP,
                                 .weights = weights };
    if (!quantize_strip(&strip, job, lines, dtype, random, &state)) {
        quantize_part(job, row, col, down ? groups : lines, down ? GROUP_LENGTH : groups * GROUP_LENGTH);
        return;
    }
    for (int l = 0; l < lines; l++)
        if (!g->swizzled && !down)
            memcpy((uint8_t *)job->target->scales + (strip.line + l) * g->scale_line + strip.block, state.scales,
                   (size_t)(groups * GROUP));
        else
            for (int k = 0; k < groups; k++)
                store_group_scales(job->target, strip.line + l + k * strip.line_step,
                                   strip.block + k * strip.block_step, GROUP, state.scales + k * GROUP);
}

/* ---- What is less than a group ---- */

/* Blocks first..first+n-1 of rows row..row+rows-1, at most GATHERED in all and n less than a group, side by side. */
SIMD void quantize_gathered(const struct strip_job *job, int64_t row, int64_t rows, int64_t first, int n,
                            nib_dtype dtype, const struct sweep_weights *weights)
{
    char x[GATHERED * BLOCK * 4] __attribute__((aligned(64)));
    uint8_t codes[GATHERED * 8];
    struct strip_state state;
    const int block_bytes = BLOCK * bytes_of(dtype), blocks = (int)rows * n;
    const struct strip strip = { .groups = (int)nib_ceil_div(blocks, GROUP),
                                 .x = x,
                                 .codes = codes,
                                 .x_step = GROUP * block_bytes,
                                 .codes_step = GROUP * 8,
                                 .weights = weights };
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < n; b++)
            memcpy(x + (r * n + b) * block_bytes, element_address(job->panel, row + r, (first + b) * BLOCK),
                   (size_t)block_bytes);
    memset(x + blocks * block_bytes, 0, (size_t)((strip.groups * GROUP - blocks) * block_bytes));
    if (!quantize_strip(&strip, job, 1, dtype, false, &state)) {
        quantize_part(job, row, first * BLOCK, rows, n * BLOCK);
        return;
    }
    for (int r = 0; r < rows; r++) {
        const int64_t line = job->panel->row + row + r, block = job->panel->col / BLOCK + first;
        memcpy(job->target->codes + line * job->target->geometry->line_stride + block * 8, codes + r * n * 8,
               (size_t)n * 8);
        store_group_scales(job->target, line, block, n, state.scales + r * n);
    }
}

/* ---- Panels ---- */

SIMD void set_row_scaler(struct strip_job *job, int64_t row)
{
    job->scaler = lane_scaler_for(job->coding, job->target, job->panel->row + row, 1);
    for (int code = 0; code < 128; code += VL)
        vf_store(job->factors + code, te_scales_of(vi_add(vi_lane_indices(), vi_set1(code)), &job->scaler).factor);
    const struct nib_scaler *const one = &job->scaler.one;
    const uint32_t bits = nib_bits(one->tensor_scale);
    job->fixed = (bits & 0x807FFFFFu) == 0 && one->scale_inv == one->tensor_scale;
    job->exponent = (int)(bits >> 23) - 127;
}

/* Whole blocks from `first` on, which are less than a group. */
SIMD void quantize_left_blocks(struct strip_job *job, int64_t first, nib_dtype dtype,
                               const struct sweep_weights *weights)
{
    const struct nib_panel *const panel = job->panel;
    const bool per_line = job->target->tensor_scale_per_line;
    const int left = (int)(panel->cols / BLOCK - first);
    const int64_t at_once = per_line || left == 0 ? 1 : GATHERED / left;
    job->ahead = 0;
    for (int64_t row = 0; left > 0 && row < panel->rows; row += at_once) {
        if (per_line)
            set_row_scaler(job, row);
        quantize_gathered(job, row, nib_min(at_once, panel->rows - row), first, left, dtype, weights);
    }
}

/* The weights of `groups` groups, whose block i is block first + i % period of a row. Where the last AT_ONCE groups are
 * not all there, one stands for the others too, as its values do. */
SIMD void make_weights(const struct strip_job *job, int64_t first, int64_t period, int groups,
                       struct sweep_weights *out)
{
    const float *const importance = job->coding->importance + job->panel->col + first * BLOCK;
    for (int g = 0; g < groups; g += AT_ONCE, out++) {
        const void *blocks[VL];
        VF values[BLOCK];
        for (int b = 0; b < VL; b++)
            blocks[b] = importance + (g * GROUP + (g + AT_ONCE <= groups ? b : b % GROUP)) % period * BLOCK;
        load_blocks(blocks, NIB_F32, values);
        sweep_weights_of(values, out);
    }
}

/* By a weighted sweep: some columns of all rows, then the next, since their weights are the same in every row. */
SIMD void quantize_weighted_blocks(struct strip_job *job, nib_dtype dtype)
{
    struct sweep_weights weights[GROUPS / AT_ONCE];
    const struct nib_panel *const panel = job->panel;
    const bool per_line = job->target->tensor_scale_per_line;
    const int64_t blocks = panel->cols / BLOCK, in_row = blocks / GROUP, left = blocks % GROUP;
    for (int64_t g = 0; g < in_row; g += GROUPS) {
        const int groups = (int)nib_min(GROUPS, in_row - g);
        make_weights(job, g * GROUP, groups * GROUP, groups, weights);
        job->ahead = in_row > GROUPS ? job->row_bytes : AHEAD * BLOCK * bytes_of(dtype);
        for (int64_t row = 0; row < panel->rows; row++) {
            if (per_line)
                set_row_scaler(job, row);
            quantize_panel_strip(job, row, g * GROUP_LENGTH, groups, false, 1, dtype, false, weights);
        }
    }
    if (left > 0)
        make_weights(job, in_row * GROUP, left, GATHERED / GROUP, weights);
    quantize_left_blocks(job, in_row * GROUP, dtype, weights);
    quantize_part(job, 0, blocks * BLOCK, panel->rows, panel->cols - blocks * BLOCK);
}

SIMD void quantize_row_blocks(struct strip_job *job, nib_dtype dtype, bool random)
{
    const struct nib_panel *const panel = job->panel;
    const bool per_line = job->target->tensor_scale_per_line;
    const int64_t in_row = panel->cols / GROUP_LENGTH, length = in_row * GROUP_LENGTH;
    const bool down = in_row == 1 && !per_line; /* one group a row: strips go down the rows */
    job->ahead = job->below ? BLOCK * job->row_bytes
                 : down     ? AHEAD / GROUP * job->row_bytes
                            : AHEAD * BLOCK * bytes_of(dtype);
    for (int64_t row = 0; row < panel->rows && length > 0; row += down ? GROUPS : 1) {
        if (per_line)
            set_row_scaler(job, row);
        for (int64_t g = 0; g < in_row; g += GROUPS)
            quantize_panel_strip(job, row, g * GROUP_LENGTH,
                                 (int)nib_min(GROUPS, down ? panel->rows - row : in_row - g), down, 1, dtype, random,
                                 NULL);
    }
    if (!random)
        quantize_left_blocks(job, in_row * GROUP, dtype, NULL);
    const int64_t done = random ? length : panel->cols / BLOCK * BLOCK;
    quantize_part(job, 0, done, panel->rows, panel->cols - done);
}

/* Square tiles: sixteen rows share the scales of a strip. */
SIMD void quantize_row_tiles(struct strip_job *job, nib_dtype dtype)
{
    enum { WIDTH = 2 }; /* groups at once: the first-level cache holds sixteen rows of them */
    const struct nib_panel *const panel = job->panel;
    const int64_t length = panel->cols / GROUP_LENGTH * GROUP_LENGTH;
    job->ahead = job->below ? BLOCK * job->row_bytes : WIDTH * GROUP_LENGTH * bytes_of(dtype);
    for (int64_t row = 0; row < panel->rows; row += BLOCK)
        for (int64_t col = 0; col < length; col += WIDTH * GROUP_LENGTH)
            quantize_panel_strip(job, row, col, (int)nib_min(WIDTH, (length - col) / GROUP_LENGTH), false,
                                 (int)nib_min(BLOCK, panel->rows - row), dtype, false, NULL);
    quantize_part(job, 0, length, panel->rows, panel->cols - length);
}

/* Whether each row begins where the one above ends: values, codes and scales. They are then one long row. */
SIMD bool rows_follow(const struct nib_panel *panel, const struct nib_target *target)
{
    const struct nib_usage_geometry *const g = target->geometry;
    const int64_t cols = panel->cols;
    return cols % GROUP_LENGTH == 0 && panel->stride == cols && !target->tensor_scale_per_line && !g->swizzled &&
           g->line_stride * 2 == cols && g->scale_line * BLOCK == cols;
}

/* All that the rows of a panel, or of parts of it, have in common. */
SIMD void begin_rows(struct strip_job *job, const struct nib_panel *panel, const struct nib_coding *coding,
                     const struct nib_target *target, nib_dtype dtype)
{
    *job = (struct strip_job){ .panel = panel, .coding = coding, .target = target };
    job->row_bytes = panel->stride * bytes_of(dtype);
    set_row_scaler(job, 0);
    if (coding->rounding == NIB_ROUND_NEAREST)
        return;
    uint32_t keys[2][10];
    round_keys(coding, keys);
    for (int round = 0; round < 10; round++) {
        job->keys[0][round] = vi_set1((int)keys[0][round]);
        job->keys[1][round] = vi_set1((int)keys[1][round]);
    }
}

SIMD void code_rows_as(struct strip_job *job, nib_dtype dtype)
{
    if (SWEEPS && dtype == NIB_BF16 && job->coding->importance)
        quantize_weighted_blocks(job, dtype);
    else if (job->coding->tile_lines > 1)
        quantize_row_tiles(job, dtype);
    else if (job->coding->rounding == NIB_ROUND_NEAREST)
        quantize_row_blocks(job, dtype, false);
    else
        quantize_row_blocks(job, dtype, true);
}

/* A panel. Its job is known to the compiler only where it is made. */
SIMD void quantize_rows_as(const struct nib_panel *panel, const struct nib_coding *coding,
                           const struct nib_target *target, nib_dtype dtype)
{
    struct nib_panel row = *panel;
    struct strip_job job;
    if (coding->tile_lines == 1 && coding->rounding == NIB_ROUND_NEAREST && !coding->importance &&
        rows_follow(panel, target)) {
        row.rows = 1;
        row.cols = row.stride = panel->rows * panel->cols;
    }
    begin_rows(&job, &row, coding, target, dtype);
    code_rows_as(&job, dtype);
}

#define DEFINE_ROWS(name, dtype)                                                                   \
    SLOT void quantize_rows_##name(const struct nib_panel *panel, const struct nib_coding *coding, \
                                   const struct nib_target *target)                                \
    {                                                                                              \
        quantize_rows_as(panel, coding, target, dtype);                                            \
    }                                                                                              \
    SLOT void code_rows_##name(struct strip_job *job) { code_rows_as(job, dtype); }
DEFINE_ROWS(f32, NIB_F32)
DEFINE_ROWS(bf16, NIB_BF16)
DEFINE_ROWS(f16, NIB_F16)
#undef DEFINE_ROWS

SIMD void quantize_rows(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target)
{
    if (panel->dtype == NIB_F32)
        quantize_rows_f32(panel, coding, target);
    else if (panel->dtype == NIB_BF16)
        quantize_rows_bf16(panel, coding, target);
    else
        quantize_rows_f16(panel, coding, target);
}

/* A part of a panel, for a job that has begun. */
SIMD void code_rows(struct strip_job *job, nib_dtype dtype)
{
    if (dtype == NIB_F32)
        code_rows_f32(job);
    else if (dtype == NIB_BF16)
        code_rows_bf16(job);
    else
        code_rows_f16(job);
}

/* te's rtn rule, with or without random bytes; those of square tiles are left to the other way. */
static bool is_te_rtn(const struct nib_coding *coding)
{
    const bool nearest = coding->rounding == NIB_ROUND_NEAREST;
    return !coding->dialect->fixed && coding->scale_rule == NIB_SCALE_RTN &&
           (nearest || (coding->rounding == NIB_ROUND_STOCHASTIC_8 && coding->tile_lines == 1));
}
