/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sweep_avx512.h - the sweep's scales of sixteen blocks of BF16 under a tensor scale that is a power of two, in integers.
 * Included once by kernels_avx512.c, after simd.h.
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
 */

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

SIMD VI both_words(VI low) { return vi_or(low, vi_sll(low, 16)); }

/* Words of BF16 as magnitudes in units of q; `largest` has the exponents of the amaxes. */
SIMD VI fixed_words(VI x, VI largest)
{
    const VI exponent = vi_and(_mm512_srli_epi16(x, 7), vw_set1(0xFF));
    const VI mantissa = vi_or(vi_and(_mm512_slli_epi16(x, 7), vw_set1(0x3F80)), vw_set1(0x4000));
    return _mm512_srlv_epi16(mantissa, _mm512_sub_epi16(largest, exponent));
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

SIMD VI fixed_error(const VI x[8], const struct fixed_scale *s, bool clamp)
{
    /* Twice the value of the code between two steps of a quarter. */
    const VI codes = _mm512_set_epi16(12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 8, 8, 8, 8, 8, 8, 6, 6, 6, 6, 4,
                                      4, 4, 3, 3, 2, 2, 1, 1, 0);
    VI error[2] = { vi_set1(0), vi_set1(0) };
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
    {
        VI idx = _mm512_srlv_epi16(_mm512_mulhi_epu16(x[i], s->magic), s->shift);
        if (clamp)
            idx = _mm512_min_epu16(idx, vw_set1(31));
        const VI back = _mm512_mullo_epi16(_mm512_permutexvar_epi16(idx, codes), s->half);
        const VI d = _mm512_sub_epi16(x[i], back);
        error[i % 2] = vi_add(error[i % 2], _mm512_madd_epi16(d, d));
    }
    return vi_add(error[0], error[1]);
}

/* Lanes for which the arithmetic above holds: an rtn scale that is neither limited nor near the floor, three candidates
 * below it that are normal, and squares that are in FP32. */
SIMD __mmask16 fixed_lanes(VI amax, VI rtn, const struct nib_coding *coding, const struct lane_scaler *scaler)
{
    const __mmask16 limited = _mm512_cmp_ps_mask(vf_mul(vf_of(amax), scaler->block), vf_set1(464.0f), _CMP_NLT_UQ);
    const __mmask16 low = _mm512_cmplt_epi32_mask(rtn, vi_set1((int)nib_max(coding->floor_code, 8) + 3));
    const __mmask16 small = _mm512_cmplt_epi32_mask(amax, vi_set1(80 << 23));
    const __mmask16 large = _mm512_cmpgt_epi32_mask(amax, vi_set1(180 << 23));
    return (__mmask16) ~(limited | low | small | large);
}

/* Candidates in the lanes of `open` whose errors in integers are at most `limit`, compared as the reference does. */
__attribute__((noinline)) SLOT VI settle(const char *x, const char *next, const struct lane_scaler *scaler, VI rtn,
                                         const VI errors[NIB_SWEEP_CANDIDATES], VI limit, __mmask16 open, VI best)
{
    float magnitudes[BLOCK][VL] __attribute__((aligned(4 * VL)));
    VF least = vf_set1(FLT_MAX);
    VI v[8];
    transpose_words(x, next, v);
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        vf_store(magnitudes[i],
                 absolute(vf_of(i % 2 ? vi_and(v[i / 2], vi_set1((int)0xFFFF0000u)) : vi_sll(v[i / 2], 16))));
    for (int k = 0; k < NIB_SWEEP_CANDIDATES; k++) {
        const __mmask16 close = _mm512_mask_cmple_epi32_mask(open, errors[k], limit);
        if (!close)
            continue;
        const struct scales s = te_scales_of(vi_add(rtn, vi_set1(nib_sweep_offset(k))), scaler);
        const VF error = squared_error_clamped((group_vectors)magnitudes, s.factor, vf_mul(s.value, scaler->g));
        const __mmask16 less = _mm512_mask_cmp_ps_mask(close, error, least, _CMP_LT_OQ);
        best = _mm512_mask_mov_epi32(best, less, s.code);
        least = _mm512_mask_mov_ps(least, less, error);
    }
    return best;
}

/* The scales of sixteen blocks of these amaxes, eight from x on and eight from `next` on; g = 2^exponent. False where
 * this is not for integers: nothing is said then. */
__attribute__((noinline)) SLOT bool sweep_fixed(const char *x, const char *next, VF amaxes,
                                                const struct nib_coding *coding, const struct lane_scaler *scaler,
                                                int exponent, VI *scales)
{
    const VI amax = _mm512_permutexvar_epi32(sweep_order(), vi_of(amaxes));
    const VI rtn = te_scales_near(vf_mul(vf_of(amax), scaler->block), coding->floor_code, scaler).code;
    const __mmask16 zeros = _mm512_testn_epi32_mask(amax, amax); /* nothing is better than rtn, which comes first */
    if ((fixed_lanes(amax, rtn, coding, scaler) | zeros) != 0xFFFF)
        return false;
    const VI largest = vi_srl(amax, 23), base = vi_sub(vi_set1(131 + exponent), largest);
    VI v[8], errors[NIB_SWEEP_CANDIDATES], best = rtn, least = vi_set1(INT32_MAX), second = least;
    transpose_words(x, next, v);
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) v[i] = fixed_words(v[i], both_words(largest));
    _Pragma("GCC unroll 11") for (int k = 0; k < NIB_SWEEP_CANDIDATES; k++)
    {
        const VI code = vi_add(rtn, vi_set1(nib_sweep_offset(k)));
        const struct fixed_scale s = fixed_scale_of(code, base);
        const VI error = fixed_error(v, &s, nib_sweep_offset(k) < 0);
        errors[k] = _mm512_mask_mov_epi32(vi_set1(INT32_MAX), _mm512_cmple_epi32_mask(code, vi_set1(0x7E)), error);
        best = _mm512_mask_mov_epi32(best, _mm512_cmplt_epi32_mask(errors[k], least), code);
        second = vi_min(second, vi_max(errors[k], least));
        least = vi_min(errors[k], least);
    }
    const VI limit = vi_add(least, vi_add(vi_srl(least, 19), vi_set1(2)));
    const __mmask16 open = (__mmask16)(_mm512_cmple_epi32_mask(second, limit) & ~zeros);
    if (open)
        best = settle(x, next, scaler, rtn, errors, limit, open, best);
    *scales = _mm512_permutexvar_epi32(sweep_place(), _mm512_mask_mov_epi32(best, zeros, rtn));
    return true;
}
