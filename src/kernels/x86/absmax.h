/* SPDX-License-Identifier: Apache-2.0 */
/*
 * absmax.h - the largest magnitude of 16-bit floats. Included once by the file of each x86 instruction set.
 *
 * Magnitudes order as integers, and NaNs come above infinity. They are looked for only where something is too large, so
 * that most arrays cost no more than a load and a maximum. (Callers come with ranges that the cache holds.)
 *
 * The including file defines WORDS, the words of a vector; vw_load, vw_set1, vw_max and vw_any_above; and vw_up_to, which
 * gives 0 for words above a limit.
 */

/* n values, a multiple of 4 * WORDS. */
SIMD VI largest_words(const uint16_t *values, int64_t n, VI infinity, bool nans)
{
    const VI mask = vw_set1(0x7FFF);
    VI m[4] = { vi_set1(0), vi_set1(0), vi_set1(0), vi_set1(0) };
    for (int64_t i = 0; i < n; i += 4 * WORDS)
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)
        {
            const VI a = vi_and(vw_load(values + i + WORDS * k), mask);
            m[k] = vw_max(m[k], nans ? vw_up_to(a, infinity) : a);
        }
    return vw_max(vw_max(m[0], m[1]), vw_max(m[2], m[3]));
}

SIMD uint16_t absmax_16(const uint16_t *values, int64_t n, int infinity)
{
    const VI limit = vw_set1(infinity);
    const int64_t whole = n / (4 * WORDS) * (4 * WORDS);
    VI most = largest_words(values, whole, limit, false);
    if (vw_any_above(most, limit))
        most = largest_words(values, whole, limit, true);
    uint16_t lanes[WORDS], largest = 0;
    memcpy(lanes, &most, sizeof lanes);
    for (int k = 0; k < WORDS; k++)
        largest = lanes[k] > largest ? lanes[k] : largest;
    for (int64_t i = whole; i < n; i++) {
        const uint16_t a = values[i] & 0x7FFF;
        largest = a <= infinity && a > largest ? a : largest;
    }
    return largest;
}

SLOT float absmax_bf16(const void *x, int64_t n) { return nib_f32_from_bf16(absmax_16(x, n, 0x7F80)); }
SLOT float absmax_f16(const void *x, int64_t n) { return nib_f32_from_f16(absmax_16(x, n, 0x7C00)); }
