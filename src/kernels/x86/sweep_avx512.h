/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sweep_avx512.h - the sweep's scales of sixteen blocks of BF16 under a tensor scale that is a power of two, in integers,
 * plain or weighted by importance. Included by rows.h.
 *
 * Let q be 2^-7 of the last place of a block's amax. Its values are integers in units of q, below 2^15: but for those
 * that lie more than seven binades lower, which every candidate codes as 0, so that cutting them off takes the same from
 * all errors. A scale has four bits of mantissa, so that what codes stand for are integers too, and so are differences;
 * errors stay below 2^31. The FP32 arithmetic that decides (nib_sweep_error) has the same differences, without rounding,
 * and rounds five times from there: where the best candidate is better than all others by more than that, it wins there
 * as well. Between those that are closer, or equal, FP32 decides here too.
 *
 * A code is found by a table: idx = floor(4 x / f), f the value of code 1.0, has every border between two codes at one of
 * its steps. The division is a product with 16 bits and a shift, which is exact for dividends of 15 bits (Granlund and
 * Montgomery 1994). What lies on a border may get either code, here and there: its difference is the same but for the
 * sign.
 *
 * Weights h enter as w, roots of c h in units of 2^-15 with a factor c of the block's own: the error is the sum of
 * y y, y = 2 d w rounded to an integer. No |d| is above 0.3044 of the amax (a scale of 11 that is 11.5 rounded, tried as
 * 8), so that |2 d| < 19952; y is off by 1/2 for its own rounding and by 0.305 for that of w. Roots of sums of sixteen
 * squares are then off by less than 4 x 0.81: SWEEP_SLACK. c makes the squares of w add up to 10.5 at most, so that errors
 * stay below 2^32. What is nearer than twice the slack, and than FP32's six roundings, FP32 decides.
 */

#define SWEEP_SLACK 3.25f /* of the root of a weighted error */

/* Element 2i of sixteen blocks in the lower words of vector i, element 2i + 1 in the upper ones; blocks in the order of
 * sweep_order. */
SIMD void transpose_words(const char *x, const char *next, VI out[8])
{
    VI v[8], t[8];
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) v[k] =
        _mm512_loadu_si512(k < 4 ? x + 64 * k : next + 64 * (k - 4));
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) _Pragma("GCC unroll 2") for (int k = 0; k < 2; k++)
    {
        v[4 * i + 2 * k] = _mm512_unpacklo_epi64(t[4 * i + k], t[4 * i + k + 2]);
        v[4 * i + 2 * k + 1] = _mm512_unpackhi_epi64(t[4 * i + k], t[4 * i + k + 2]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        out[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        out[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xDD);
    }
}

/* The block of each lane, and the lane of each block. */
SIMD VI sweep_order(void) { return _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15); }
SIMD VI sweep_place(void) { return _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15); }

/* Element i of the blocks. */
SIMD VF element_of(const VI words[8], int i)
{
    return vf_of(i % 2 ? vi_and(words[i / 2], vi_set1((int)0xFFFF0000u)) : vi_sll(words[i / 2], 16));
}

SIMD VI both_words(VI low) { return vi_or(low, vi_sll(low, 16)); }

/* Words of BF16 as magnitudes in units of q; `largest` has the exponents of the amaxes. */
SIMD VI fixed_words(VI x, VI largest)
{
    const VI exponent = vi_and(_mm512_srli_epi16(x, 7), vw_set1(0xFF));
    const VI mantissa = vi_or(vi_and(_mm512_slli_epi16(x, 7), vw_set1(0x3F80)), vw_set1(0x4000));
    return _mm512_srlv_epi16(mantissa, _mm512_sub_epi16(largest, exponent));
}

/* The importance of sixteen blocks' elements: w as words as transpose_words has them, and as it is; blocks
 * in the order of sweep_order. */
struct sweep_weights {
    VI roots[8];
    float importance[BLOCK][VL] __attribute__((aligned(64)));
};

/* A block whose importance FP32 might lose beside its squares has roots of 0: all candidates are equal, and FP32
 * decides. */
SIMD void sweep_weights_of(const VF importance[BLOCK], struct sweep_weights *out)
{
    VF h[BLOCK], most = vf_set1(0), least = vf_set1(FLT_MAX), sum = vf_set1(0);
    _Pragma("GCC unroll 16") for (int i = 0; i < BLOCK; i++)
    {
        h[i] = _mm512_permutexvar_ps(sweep_order(), importance[i]);
        vf_store(out->importance[i], h[i]);
        most = vf_max(h[i], most);
        least = vf_min(h[i], least);
        sum = vf_add(sum, h[i]);
    }
    const __mmask16 good = _mm512_cmp_ps_mask(least, vf_set1(0x1p-20f), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(sum, vf_set1(0x1p40f), _CMP_LE_OQ);
    const VF whole = vf_max(most, vf_mul(sum, vf_set1(1 / 10.5f)));
    const VF factor = _mm512_maskz_div_ps(good, vf_set1(32767.0f * 32767.0f), whole);
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
    {
        const VI even = _mm512_cvtps_epi32(_mm512_sqrt_ps(vf_mul(h[2 * i], factor)));
        const VI odd = _mm512_cvtps_epi32(_mm512_sqrt_ps(vf_mul(h[2 * i + 1], factor)));
        out->roots[i] = vi_or(even, vi_sll(odd, 16));
    }
}

/* What a candidate needs, twice in every lane. */
struct fixed_scale {
    VI magic, shift, half; /* of the division by f / 4; f / 2 */
};

/* f = (8 + m) 2^k for a code of exponent e and mantissa m, where k = e + base. */
SIMD struct fixed_scale fixed_scale_of(VI code, VI base)
{
    const VI magics =
        _mm512_setr_epi32(0x8000, 58255, 52429, 47663, 43691, 40330, 37450, 34953, 0, 0, 0, 0, 0, 0, 0, 0);
    const VI mantissa = vi_and(code, vi_set1(7)), k = vi_add(vi_srl(code, 3), base);
    const VI magic = _mm512_permutexvar_epi32(mantissa, magics);
    const VI shift = _mm512_mask_add_epi32(k, _mm512_test_epi32_mask(mantissa, mantissa), k, vi_set1(1));
    const VI half = _mm512_sllv_epi32(vi_add(mantissa, vi_set1(8)), vi_sub(k, vi_set1(1)));
    return (struct fixed_scale){ both_words(magic), both_words(shift), both_words(half) };
}

/* The error in unsigned integers. Weighted ones are of twice the differences. */
SIMD VI fixed_error(const VI x[8], const VI twice[8], const VI *roots, const struct fixed_scale *s, bool clamp)
{
    /* Twice the value of the code between two steps of a quarter. */
    const VI codes = _mm512_set_epi16(12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 8, 8, 8, 8, 8, 8, 6, 6, 6, 6, 4,
                                      4, 4, 3, 3, 2, 2, 1, 1, 0);
    const VI half = roots ? vi_add(s->half, s->half) : s->half;
    VI error[2] = { vi_set1(0), vi_set1(0) };
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
    {
        VI idx = _mm512_srlv_epi16(_mm512_mulhi_epu16(x[i], s->magic), s->shift);
        if (clamp)
            idx = _mm512_min_epu16(idx, vw_set1(31));
        const VI back = _mm512_mullo_epi16(_mm512_permutexvar_epi16(idx, codes), half);
        VI d = _mm512_sub_epi16(back, roots ? twice[i] : x[i]);
        if (roots)
            d = _mm512_mulhrs_epi16(d, roots[i]);
        error[i % 2] = vi_add(error[i % 2], _mm512_madd_epi16(d, d));
    }
    return vi_add(error[0], error[1]);
}

/* Errors up to which a candidate may be the best for FP32, where `least` is the least in integers. */
SIMD VI fixed_limit(VI least, bool weighted)
{
    if (!weighted)
        return vi_add(least, vi_add(vi_srl(least, 19), vi_set1(2)));
    const float slack = 2 * SWEEP_SLACK;
    const VF error = vf_mul(_mm512_cvtepu32_ps(least), vf_set1(1 + 0x1p-19f));
    const VF limit = vf_add(vf_add(error, vf_mul(_mm512_sqrt_ps(error), vf_set1(2 * slack))), vf_set1(slack * slack));
    return _mm512_min_epu32(_mm512_cvttps_epu32(limit), vi_set1(-2)); /* -1 is none */
}

/* Lanes for which the arithmetic above holds: an rtn scale that is neither limited nor near the floor, three candidates
 * below it that are normal, and squares that are in FP32, times an importance from 2^-20 to 2^40. */
SIMD __mmask16 fixed_lanes(VI amax, VI rtn, const struct nib_coding *coding, const struct lane_scaler *scaler)
{
    const __mmask16 limited = _mm512_cmp_ps_mask(vf_mul(vf_of(amax), scaler->block), vf_set1(464.0f), _CMP_NLT_UQ);
    const __mmask16 low = _mm512_cmplt_epi32_mask(rtn, vi_set1((int)nib_max(coding->floor_code, 8) + 3));
    const __mmask16 small = _mm512_cmplt_epi32_mask(amax, vi_set1(90 << 23));
    const __mmask16 large = _mm512_cmpgt_epi32_mask(amax, vi_set1(165 << 23));
    return (__mmask16) ~(limited | low | small | large);
}

/* The next candidate of each lane that is still to be compared; those that have one leave `close`. */
SIMD __mmask16 next_candidates(__mmask16 close[NIB_SWEEP_CANDIDATES], VI rtn, VI *codes)
{
    __mmask16 found = 0;
    for (int k = 0; k < NIB_SWEEP_CANDIDATES; k++) {
        const __mmask16 now = (__mmask16)(close[k] & ~found);
        *codes = _mm512_mask_add_epi32(*codes, now, rtn, vi_set1(nib_sweep_offset(k)));
        close[k] ^= now;
        found |= now;
    }
    return found;
}

/* Candidates in the lanes of `open` whose errors in integers are at most `limit`, compared as the reference does. */
__attribute__((noinline)) SLOT VI settle(const char *x, const char *next, const struct lane_scaler *scaler, VI rtn,
                                         const VI errors[NIB_SWEEP_CANDIDATES], VI limit, __mmask16 open,
                                         const struct sweep_weights *weights)
{
    float magnitudes[BLOCK][VL] __attribute__((aligned(4 * VL)));
    const group_vectors importance = weights ? (group_vectors)weights->importance : NULL;
    __mmask16 close[NIB_SWEEP_CANDIDATES], now;
    VF least = vf_set1(FLT_MAX);
    VI v[8], best = rtn, codes = rtn;
    transpose_words(x, next, v);
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        vf_store(magnitudes[i], absolute(element_of(v, i)));
    for (int k = 0; k < NIB_SWEEP_CANDIDATES; k++)
        close[k] = _mm512_mask_cmple_epu32_mask(open, errors[k], limit);
    while ((now = next_candidates(close, rtn, &codes))) {
        const struct scales s = te_scales_of(codes, scaler);
        const VF f = vf_mul(s.value, scaler->g);
        const VF error = candidate_error((group_vectors)magnitudes, importance, s.factor, f, true);
        const __mmask16 less = _mm512_mask_cmp_ps_mask(now, error, least, _CMP_LT_OQ);
        best = _mm512_mask_mov_epi32(best, less, codes);
        least = _mm512_mask_mov_ps(least, less, error);
    }
    return best;
}

/* The scales of sixteen blocks of these amaxes, eight from x on and eight from `next` on; g = 2^exponent. False where
 * this is not for integers: nothing is said then. */
SIMD bool sweep_fixed_as(const char *x, const char *next, VF amaxes, const struct strip_job *job,
                         const struct sweep_weights *weights, VI *scales)
{
    const struct lane_scaler *const scaler = &job->scaler;
    const VI amax = _mm512_permutexvar_epi32(sweep_order(), vi_of(amaxes));
    const VI rtn = te_scales_near(vf_mul(vf_of(amax), scaler->block), job->coding->floor_code, scaler).code;
    const __mmask16 zeros = _mm512_testn_epi32_mask(amax, amax); /* nothing is better than rtn, which comes first */
    if ((fixed_lanes(amax, rtn, job->coding, scaler) | zeros) != 0xFFFF)
        return false;
    const VI largest = vi_srl(amax, 23), base = vi_sub(vi_set1(131 + job->exponent), largest), none = vi_set1(-1);
    VI v[8], twice[8], errors[NIB_SWEEP_CANDIDATES], best = rtn, least = none, second = none;
    transpose_words(x, next, v);
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
    {
        v[i] = fixed_words(v[i], both_words(largest));
        twice[i] = vi_set1(0);
        if (weights)
            twice[i] = _mm512_add_epi16(v[i], v[i]);
    }
    _Pragma("GCC unroll 11") for (int k = 0; k < NIB_SWEEP_CANDIDATES; k++)
    {
        const VI code = vi_add(rtn, vi_set1(nib_sweep_offset(k)));
        const struct fixed_scale s = fixed_scale_of(code, base);
        const VI error = fixed_error(v, twice, weights ? weights->roots : NULL, &s, nib_sweep_offset(k) < 0);
        errors[k] = _mm512_mask_mov_epi32(none, _mm512_cmple_epi32_mask(code, vi_set1(0x7E)), error);
        best = _mm512_mask_mov_epi32(best, _mm512_cmplt_epu32_mask(errors[k], least), code);
        second = _mm512_min_epu32(second, _mm512_max_epu32(errors[k], least));
        least = _mm512_min_epu32(errors[k], least);
    }
    const VI limit = fixed_limit(least, weights);
    const __mmask16 open = (__mmask16)(_mm512_cmple_epu32_mask(second, limit) & ~zeros);
    if (open)
        best = _mm512_mask_mov_epi32(best, open, settle(x, next, scaler, rtn, errors, limit, open, weights));
    *scales = _mm512_permutexvar_epi32(sweep_place(), _mm512_mask_mov_epi32(best, zeros, rtn));
    return true;
}

/* Functions of their own for either kind, with registers of their own. */
__attribute__((noinline)) SLOT bool sweep_fixed_plain(const char *x, const char *next, VF amaxes,
                                                      const struct strip_job *job, VI *scales)
{
    return sweep_fixed_as(x, next, amaxes, job, NULL, scales);
}

__attribute__((noinline)) SLOT bool sweep_fixed_weighted(const char *x, const char *next, VF amaxes,
                                                         const struct strip_job *job,
                                                         const struct sweep_weights *weights, VI *scales)
{
    return sweep_fixed_as(x, next, amaxes, job, weights, scales);
}

/* The same by the lanes of simd.h, which can always tell. */
__attribute__((noinline)) SLOT VI sweep_lanes(const char *x, const char *next, const struct strip_job *job,
                                              const struct sweep_weights *weights)
{
    VI v[8];
    VF values[BLOCK];
    struct lanes lanes;
    transpose_words(x, next, v);
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        values[i] = element_of(v, i);
    own_lanes(&lanes, values);
    const group_vectors importance = weights ? (group_vectors)weights->importance : NULL;
    const VI codes = choose_sweep(&lanes, absmax_of(&lanes), job->coding, &job->scaler, importance).code;
    return _mm512_permutexvar_epi32(sweep_place(), codes);
}

SIMD VI sweep_scales_of(const char *x, const char *next, VF amaxes, const struct strip_job *job,
                        const struct sweep_weights *weights)
{
    VI codes;
    const bool known = job->fixed && (weights ? sweep_fixed_weighted(x, next, amaxes, job, weights, &codes)
                                              : sweep_fixed_plain(x, next, amaxes, job, &codes));
    return known ? codes : sweep_lanes(x, next, job, weights);
}
