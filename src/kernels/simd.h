/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd.h - the NVFP4 kernels for any vector width, included once by the file of each instruction set.
 *
 * Lanes are blocks: vector i of a group holds element i of VL blocks, one block per lane. Everything that a block needs
 * - its amax, its scale, its codes, the errors of candidates - is then the same arithmetic in every lane, in the order
 * of the reference, and nothing is summed across lanes. Columns of the matrix already lie so; parts of rows are
 * transposed on the way in.
 *
 * The including file defines
 *     VL, VF, VI            lanes, and vectors of so many floats and 32-bit integers
 *     SUMS_APART            1 where sums have ports of their own, beside those of products: two are then cheaper than
 *                           one fused product
 *     SIMD, SLOT            the attributes of functions for this instruction set: that vanish in their callers, and
 *                           that stay
 *     vf_*, vi_*            operations; vf_min and vf_max give their second operand when the first is a NaN
 *     e2m1_bits(a)          for 0 <= a <= 6: the code of a rounded to nearest even, in the low three bits
 *     absmax_row(x, n, t)   largest magnitude of n values of dtype t
 * and then includes simd_panels.h, which gives it quantize_lanes and absmax_lines_lanes, the bodies of two slots.
 */
#include "format/codec.h"
#include "kernels/kernels_generic.h"
#include "format/philox.h"

#include <float.h>

enum { BLOCK = 16, GROUP_BYTES = VL * BLOCK / 2 };

/* Sixteen vectors stay in registers only if no loop over them is left. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* ---- Loading ---- */

SIMD VF load_values(const void *x, int64_t i, nib_dtype dtype)
{
    if (dtype == NIB_F32)
        return vf_load((const float *)x + i);
    return dtype == NIB_BF16 ? vf_load_bf16((const uint16_t *)x + i) : vf_load_f16((const uint16_t *)x + i);
}

SIMD const void *element_address(const struct nib_panel *panel, int64_t row, int64_t col)
{
    return (const char *)panel->x + (row * panel->stride + col) * (panel->dtype == NIB_F32 ? 4 : 2);
}

/* Element i of VL blocks is the vector at x + i * stride: in the matrix itself where columns of FP32 are wanted as they
 * are, in `own` elsewhere. Sixteen vectors do not fit into the registers beside what works on them; the first-level
 * cache holds them just as well. */
struct lanes {
    const float *x;
    int64_t stride;
    float own[BLOCK][VL] __attribute__((aligned(64)));
};

SIMD VF lane_vector(const struct lanes *lanes, int i) { return vf_load(lanes->x + i * lanes->stride); }

SIMD void own_lanes(struct lanes *lanes, const VF x[BLOCK])
{
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        vf_store(lanes->own[i], x[i]);
    lanes->x = lanes->own[0];
    lanes->stride = VL;
}

/* VL blocks that each lie side by side: transpose squares of VL x VL. */
SIMD void load_blocks(const void *const block[VL], nib_dtype dtype, VF x[BLOCK])
{
    UNROLL
    for (int part = 0; part < BLOCK; part += VL) {
        UNROLL
        for (int b = 0; b < VL; b++)
            x[part + b] = load_values(block[b], part, dtype);
        vf_transpose(x + part);
    }
}

/* VL columns from `col` on, 16 rows from `row` on. */
SIMD void load_columns(const struct nib_panel *panel, int64_t row, int64_t col, nib_dtype dtype, VF x[BLOCK])
{
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        x[i] = load_values(element_address(panel, row + i, col), 0, dtype);
}

/* Blocks that are not all there: elements outside are 0. n lines of `length` elements, through memory. */
SIMD void load_partial(const struct nib_panel *panel, nib_usage usage, int64_t line, int n, int64_t first, int length,
                       VF x[BLOCK])
{
    float values[BLOCK][VL];
    memset(values, 0, sizeof values);
    for (int b = 0; b < n; b++)
        for (int i = 0; i < length; i++)
            values[i][b] = usage == NIB_ROWWISE ? nib_panel_element(panel, line + b, first + i)
                                                : nib_panel_element(panel, first + i, line + b);
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        x[i] = vf_load(values[i]);
}

/* ---- RHT: the reference's butterflies, a lane each ---- */

SIMD VF round_to_bf16(VF x)
{
    const VI bits = vi_of(x), odd = vi_and(vi_srl(bits, 16), vi_set1(1));
    return vf_of(vi_and(vi_add(bits, vi_add(odd, vi_set1(0x7FFF))), vi_set1((int)0xFFFF0000u)));
}

SIMD void rht(VF x[BLOCK], uint16_t sign_mask, nib_dtype dtype)
{
    const VF quarter = vf_set1(0.25f);
    UNROLL
    for (int i = 0; i < BLOCK; i++) {
        x[i] = vf_of(vi_xor(vi_of(x[i]), vi_set1((int)((uint32_t)sign_mask >> i << 31))));
        if (dtype != NIB_F32)
            x[i] = vf_mul(x[i], quarter);
    }
#define BUTTERFLIES(stride)                         \
    UNROLL                                          \
    for (int i = 0; i < BLOCK; i++)                 \
        if (!(i & (stride))) {                      \
            const VF a = x[i], b = x[i + (stride)]; \
            x[i] = vf_add(a, b);                    \
            x[i + (stride)] = vf_sub(a, b);         \
        }
    BUTTERFLIES(1)
    BUTTERFLIES(2)
    BUTTERFLIES(4)
    BUTTERFLIES(8)
#undef BUTTERFLIES
    UNROLL
    for (int i = 0; i < BLOCK; i++) {
        if (dtype == NIB_F32)
            x[i] = vf_mul(x[i], quarter);
        if (dtype == NIB_BF16)
            x[i] = round_to_bf16(x[i]);
    }
}

/* Up to VL columns, after RHT where that is wanted. */
SIMD void columns_to_lanes(const struct nib_panel *panel, const struct nib_coding *coding, int64_t row, int64_t col,
                           int n, int length, nib_dtype dtype, struct lanes *lanes)
{
    VF x[BLOCK];
    const bool whole = n == VL && length == BLOCK;
    if (whole && dtype == NIB_F32 && !coding->rht) {
        lanes->x = element_address(panel, row, col);
        lanes->stride = panel->stride;
        return;
    }
    if (whole)
        load_columns(panel, row, col, dtype, x);
    else
        load_partial(panel, NIB_COLUMNWISE, col, n, row, length, x);
    if (coding->rht)
        rht(x, coding->sign_mask, dtype);
    own_lanes(lanes, x);
}

/* Up to VL blocks of a row from its block `first` on; where that is not whole, `length` elements of it alone. */
SIMD void blocks_to_lanes(const struct nib_panel *panel, const struct nib_coding *coding, int64_t row, int64_t first,
                          int length, nib_dtype dtype, struct lanes *lanes)
{
    VF x[BLOCK];
    if (length == BLOCK) {
        const int64_t last = panel->cols / BLOCK - 1;
        const void *pointers[VL];
        for (int lane = 0; lane < VL; lane++) /* lanes that have no block repeat the last one */
            pointers[lane] = element_address(panel, row, nib_min(first + lane, last) * BLOCK);
        load_blocks(pointers, dtype, x);
    } else {
        load_partial(panel, NIB_ROWWISE, row, 1, first * BLOCK, length, x);
    }
    if (coding->rht)
        rht(x, coding->sign_mask, dtype);
    own_lanes(lanes, x);
}

SIMD VF absolute(VF x) { return vf_of(vi_and(vi_of(x), vi_set1(0x7FFFFFFF))); }

/* vf_max gives its second operand for a NaN, which is how NaNs are left out. */
SIMD VF absmax_of(const struct lanes *lanes)
{
    VF m[4] = { vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0) }; /* four, so that none waits for another */
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        m[i % 4] = vf_max(absolute(lane_vector(lanes, i)), m[i % 4]);
    return vf_max(vf_max(m[0], m[1]), vf_max(m[2], m[3]));
}

/* ---- Scales ---- */

/* E4M3 of 0 <= v, to nearest even, saturating: the code and its value. Adding 2^20 times the power of two at or below v
 * (or the smallest normal one) leaves a unit of the last place that is one of E4M3's steps, so that the sum rounds v and
 * has the steps in its lowest bits, the exponent above. */
SIMD VI e4m3_of(VF v, VF *value)
{
    const VF limited = vf_min(v, vf_set1(448.0f));
    const VF power = vf_max(vf_of(vi_and(vi_of(limited), vi_set1(0x7F800000))), vf_set1(0x1p-6f));
    const VF sum = vf_multiply_add(power, vf_set1(0x1p20f), limited); /* the products are exact */
    *value = vf_multiply_add(power, vf_set1(-0x1p20f), sum);
    const VI bits = vi_of(sum);
    return vi_and(vi_sub(vi_add(bits, vi_srl(bits, 20)), vi_set1(0x468)), vi_set1(0xFF));
}

SIMD VF f32_of_e4m3(VI code)
{
    const VF normal = vf_of(vi_add(vi_sll(code, 20), vi_set1(120 << 23)));
    const VF subnormal = vf_mul(vf_from(code), vf_set1(0x1p-9f));
    return vf_of(vi_select_less(vf_from(code), vf_set1(8.0f), vi_of(subnormal), vi_of(normal)));
}

/* What a tensor scale comes to (struct nib_scaler), in every lane: the same in all, or, where columns have tensor scales
 * of their own, each lane's. */
struct lane_scaler {
    VF amax, scale, scale_inv, block;
    VF g;                  /* the tensor scale as a multiplier */
    bool ordinary;         /* quotients with amaxes come out of products (quotient) */
    struct nib_scaler one; /* of the first lane, for dialects that have one tensor scale per tensor */
};

SIMD struct lane_scaler lane_scaler_for(const struct nib_coding *coding, const struct nib_target *target, int64_t line,
                                        int n)
{
    float values[5][VL];
    struct lane_scaler out = { .ordinary = true };
    const bool each = target->tensor_scale_per_line && n > 1;
    for (int b = 0; b < (each ? VL : 1); b++) {
        struct nib_scaler scaler = {
            .tensor_scale = target->tensor_scales[target->tensor_scale_per_line ? line + (b < n ? b : 0) : 0]
        };
        coding->dialect->prepare(&scaler, &coding->rules);
        out.ordinary &= scaler.amax > 0x1p-80f && scaler.amax < 0x1p100f;
        values[0][b] = scaler.amax;
        values[1][b] = scaler.scale;
        values[2][b] = scaler.scale_inv;
        values[3][b] = scaler.block;
        values[4][b] = coding->scale_rule == NIB_SCALE_SWEEP ? nib_scale_inv(scaler.tensor_scale, &coding->rules) : 0;
        if (b == 0)
            out.one = scaler;
    }
    out.amax = each ? vf_load(values[0]) : vf_set1(values[0][0]);
    out.scale = each ? vf_load(values[1]) : vf_set1(values[1][0]);
    out.scale_inv = each ? vf_load(values[2]) : vf_set1(values[2][0]);
    out.block = each ? vf_load(values[3]) : vf_set1(values[3][0]);
    out.g = each ? vf_load(values[4]) : vf_set1(values[4][0]);
    return out;
}

struct scales {
    VI code;
    VF value, factor; /* the code's value, and what elements are multiplied with */
};

SIMD struct scales te_scales_from(VI code, VF value, const struct lane_scaler *scaler)
{
    const VF factor = vf_div(vf_set1(1.0f), vf_mul(value, scaler->scale_inv));
    return (struct scales){ code, value, vf_min(factor, vf_set1(FLT_MAX)) };
}

SIMD struct scales te_scales_of(VI code, const struct lane_scaler *scaler)
{
    return te_scales_from(code, f32_of_e4m3(code), scaler);
}

SIMD VI at_least_code(VI code, uint8_t floor_code) { return vi_max(code, vi_set1(floor_code)); }

/* te's scales for what they should be, at least the floor. */
SIMD struct scales te_scales_near(VF wanted, uint8_t floor_code, const struct lane_scaler *scaler)
{
    VF value;
    const VI code = e4m3_of(wanted, &value);
    return floor_code ? te_scales_of(at_least_code(code, floor_code), scaler) : te_scales_from(code, value, scaler);
}

/* Rounded up below the smallest normal, so that nothing is clipped (nib_te_unbiased_block_scale). */
SIMD VI unclipped_code(VF absmax, const struct lane_scaler *scaler)
{
    const VF limited = vf_min(vf_mul(absmax, scaler->block), vf_set1(FLT_MAX));
    const VF wanted = vf_mul(limited, vf_set1(17.0f / 16.0f)), units = vf_mul(wanted, vf_set1(512.0f));
    const VI below = vi_truncate(vf_min(units, vf_set1(16.0f)));
    const VI up = vi_select_less(vf_from(below), units, vi_set1(1), vi_set1(0));
    VF ignored;
    return vi_select_less(wanted, vf_set1(0x1p-6f), vi_add(below, up), e4m3_of(wanted, &ignored));
}

/* The rtn rule, for every dialect: te's in vectors, the others' a lane at a time through their functions. */
SIMD struct scales rtn_scales(VF absmax, const struct nib_coding *coding, const struct lane_scaler *scaler)
{
    if (!coding->dialect->fixed && coding->rounding == NIB_ROUND_STOCHASTIC_UNBIASED)
        return te_scales_of(at_least_code(unclipped_code(absmax, scaler), coding->floor_code), scaler);
    if (!coding->dialect->fixed)
        return te_scales_near(vf_mul(absmax, scaler->block), coding->floor_code, scaler);
    float amax[VL], factor[VL];
    int32_t code[VL];
    vf_store(amax, absmax);
    UNROLL
    for (int b = 0; b < VL; b++) {
        code[b] = (int32_t)coding->dialect->block_scale(amax[b], &scaler->one, &coding->rules);
        factor[b] = coding->dialect->factor((nib_scale_bits)code[b], amax[b], &scaler->one, &coding->rules);
    }
    return (struct scales){ vi_load(code), vf_set1(0), vf_load(factor) };
}

/* ---- Codes ---- */

/* Eight codes of four bits in each lane's two words: elements 0..7 and 8..15. */
struct codes {
    VI word[2];
};

/* Within +-6; a NaN becomes +6, whatever its sign. */
SIMD VF clamp_to_e2m1(VF y) { return vf_max(vf_min(y, vf_set1(6.0f)), vf_set1(-6.0f)); }

SIMD VI with_sign(VI magnitude, VF y)
{
    return vi_or(vi_and(magnitude, vi_set1(7)), vi_and(vi_srl(vi_of(y), 28), vi_set1(8)));
}

/* te's rule. Nothing is decided within the loop. */
SIMD struct codes encode_te(const struct lanes *x, VF factor)
{
    struct codes out = { { vi_set1(0), vi_set1(0) } };
    UNROLL
    for (int i = BLOCK - 1; i >= 0; i--) {
        const VF y = clamp_to_e2m1(vf_mul(lane_vector(x, i), factor));
        out.word[i / 8] = vi_or(vi_sll(out.word[i / 8], 4), with_sign(e2m1_bits(absolute(y)), y));
    }
    return out;
}

SIMD struct codes encode_nearest(const struct lanes *x, VF factor, const struct nib_dialect_facts *dialect)
{
    struct codes out = { { vi_set1(0), vi_set1(0) } };
    if (!dialect->fixed)
        return encode_te(x, factor);
    for (int i = BLOCK - 1; i >= 0; i--) {
        VF y = clamp_to_e2m1(dialect->elements.divides ? vf_div(lane_vector(x, i), factor)
                                                       : vf_mul(lane_vector(x, i), factor));
        if (dialect->elements.drops_zero_sign)
            y = vf_add(y, vf_set1(0)); /* -0 + 0 is +0, and nothing else changes */
        out.word[i / 8] = vi_or(vi_sll(out.word[i / 8], 4), with_sign(e2m1_bits(absolute(y)), y));
    }
    return out;
}

/* ---- Stochastic rounding ---- */

/* One Philox4x32-10 call per lane. */
SIMD void philox(uint64_t offset, VI line, VI block, uint64_t seed, VI out[4])
{
    VI c0 = vi_set1((int)(uint32_t)offset), c1 = vi_set1((int)(uint32_t)(offset >> 32)), c2 = line, c3 = block;
    VI k0 = vi_set1((int)(uint32_t)seed), k1 = vi_set1((int)(uint32_t)(seed >> 32));
    for (int round = 0; round < 10; round++) {
        VI high0, low0, high1, low1;
        vi_multiply_wide(c0, 0xD2511F53u, &high0, &low0);
        vi_multiply_wide(c2, 0xCD9E8D57u, &high1, &low1);
        c0 = vi_xor(vi_xor(high1, c1), k0);
        c2 = vi_xor(vi_xor(high0, c3), k1);
        c1 = low1;
        c3 = low0;
        k0 = vi_add(k0, vi_set1((int)0x9E3779B9u));
        k1 = vi_add(k1, vi_set1((int)0xBB67AE85u));
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* The random bits of each element, for the blocks of lanes (line, block): a byte, or the upper 24 bits of a word. */
SIMD void random_bytes(const struct nib_coding *coding, VI line, VI block, VI random[BLOCK])
{
    VI words[4];
    philox(coding->offset, line, block, coding->seed, words);
    UNROLL
    for (int quad = 0; quad < 4; quad++) { /* shifts want constants */
        random[4 * quad] = vi_and(words[quad], vi_set1(255));
        random[4 * quad + 1] = vi_and(vi_srl(words[quad], 8), vi_set1(255));
        random[4 * quad + 2] = vi_and(vi_srl(words[quad], 16), vi_set1(255));
        random[4 * quad + 3] = vi_srl(words[quad], 24);
    }
}

SIMD void random_words(const struct nib_coding *coding, VI line, VI block, VI random[BLOCK])
{
    for (int quad = 0; quad < 4; quad++) {
        VI words[4];
        philox(coding->offset + (uint64_t)quad, line, block, coding->seed, words);
        UNROLL
        for (int i = 0; i < 4; i++)
            random[4 * quad + i] = vi_srl(words[i], 8);
    }
}

/* The reference's rule in one sum: p is the power of two at or below max(|y|, 1), so that |y| counts in steps of p / 2.
 * floor(|y| / step * 2^bits) has the steps above and the fraction's bits below; adding the random bits carries into the
 * steps exactly where the reference rounds up. The first code of the range is 2 log2 p less than its steps. */
SIMD VI stochastic_bits(VF a, VI random, bool bytes)
{
    const uint32_t bits = bytes ? 8 : 24;
    const VI p = vi_and(vi_of(vf_max(a, vf_set1(1.0f))), vi_set1(0x7F800000));
    const VF scale = vf_of(vi_sub(vi_set1((int)((255u + bits) << 23)), p)); /* 2^bits * 2 / p */
    const VI sum = vi_add(vi_truncate(vf_mul(a, scale)), random);           /* exact, and below 2^28 */
    return vi_add(bytes ? vi_srl(sum, 8) : vi_srl(sum, 24), vi_sub(vi_srl(p, 22), vi_set1(254)));
}

/* The same for bytes, with less: the factor has 2^23 in it, so that `units` counts 2^-23 and below 2 is also what the
 * bits of |y| are above those of 0.5; above 2 only the bits are in E2M1's steps. In either a step is 2^22. */
SIMD VI stochastic_code(VF a, VF factor, VI random)
{
    const VF y = vf_min(vf_mul(a, factor), vf_set1(6.0f * 0x1p23f));
    const VI units = vi_truncate(y), bits = vi_max(vi_of(y), vi_set1((127 + 23) << 23));
    const VI steps = vi_min(units, vi_sub(bits, vi_set1((126 + 23) << 23)));
    return vi_srl(vi_add(steps, vi_sll(random, 14)), 22);
}

SIMD struct codes encode_random(const struct lanes *x, VF factor, const VI random[BLOCK], bool bytes)
{
    struct codes out = { { vi_set1(0), vi_set1(0) } };
    UNROLL
    for (int i = BLOCK - 1; i >= 0; i--) {
        const VF y = clamp_to_e2m1(vf_mul(lane_vector(x, i), factor));
        out.word[i / 8] =
            vi_or(vi_sll(out.word[i / 8], 4), with_sign(stochastic_bits(absolute(y), random[i], bytes), y));
    }
    return out;
}

/* The random bits of lanes (line, block), and the codes that they make. */
SIMD struct codes encode_stochastic(const struct lanes *x, VF factor, const struct nib_coding *coding, VI line,
                                    VI block)
{
    VI random[BLOCK];
    if (coding->rounding == NIB_ROUND_STOCHASTIC_8) {
        random_bytes(coding, line, block, random);
        return encode_random(x, factor, random, true);
    }
    random_words(coding, line, block, random);
    return encode_random(x, factor, random, false);
}

/* ---- Four over six, and the sweep ---- */

/* The value of a magnitude rounded to E2M1: adding and taking away p * 2^22 leaves half steps of p, the power of two at or
 * below it; the products are exact. What lies between 6 and 7 needs no clamp. */
SIMD VF rounded_magnitude(VF a, bool clamp)
{
    const VF t = clamp ? vf_min(a, vf_set1(6.0f)) : a;
    const VI p = vi_and(vi_of(vf_max(t, vf_set1(1.0f))), vi_set1(0x7F800000));
    if (SUMS_APART) {
        const VF big = vf_of(vi_add(p, vi_set1(22 << 23)));
        return vf_sub(vf_add(t, big), big);
    }
    return vf_multiply_add(vf_of(p), vf_set1(-0x1p22f), vf_multiply_add(vf_of(p), vf_set1(0x1p22f), t));
}

/* What a sum of errors needs beside the candidate. */
struct error_terms {
    VF amax, scale, full_scale, inverse, minus_inverse; /* of the full scale */
};

/* a / full_scale, rounded as a division rounds it: a product with the rounded inverse is a unit off at most, a fused
 * product shows exactly by how much, and correcting by that rounds the same quotient (Markstein 1990). Nothing may
 * underflow or overflow on the way. */
SIMD VF quotient(VF a, const struct error_terms *terms)
{
    const VF near = vf_mul(a, terms->inverse), excess = vf_multiply_sub(near, terms->full_scale, a);
    return vf_multiply_add(excess, terms->minus_inverse, near);
}

/* The error of one magnitude: a sign would only change that of d. */
SIMD VF element_error(VF a, const struct scales *s, const struct error_terms *terms, bool fast, bool absolutes,
                      bool divides)
{
    const VF product = vf_mul(rounded_magnitude(vf_mul(a, s->factor), true), s->value);
    const VF back = vf_mul(product, terms->amax);
    const VF d = fast      ? vf_sub(product, vf_mul(a, terms->scale))
                 : divides ? vf_sub(vf_div(back, terms->full_scale), a)
                           : vf_sub(quotient(back, terms), a);
    return absolutes ? absolute(d) : vf_mul(d, d);
}

SIMD VF line_error_as(const struct lanes *x, int length, const struct scales *s, const struct error_terms *terms,
                      bool fast, bool absolutes, bool divides)
{
    VF error = vf_set1(0);
    for (int i = 0; i < length; i++)
        error = vf_add(error, element_error(absolute(lane_vector(x, i)), s, terms, fast, absolutes, divides));
    return error;
}

SIMD VF line_error(const struct lanes *x, int length, const struct scales *s, const struct nib_coding *coding,
                   const struct lane_scaler *scaler)
{
    const float full = coding->rules.full_scale;
    const struct error_terms terms = { scaler->amax, scaler->scale, vf_set1(full), vf_set1(1.0f / full),
                                       vf_set1(-1.0f / full) };
    const bool absolutes = coding->error_mode == NIB_ERROR_MAE;
    if (coding->fast_error)
        return absolutes ? line_error_as(x, length, s, &terms, true, true, false)
                         : line_error_as(x, length, s, &terms, true, false, false);
    if (!scaler->ordinary)
        return absolutes ? line_error_as(x, length, s, &terms, false, true, true)
                         : line_error_as(x, length, s, &terms, false, false, true);
    return absolutes ? line_error_as(x, length, s, &terms, false, true, false)
                     : line_error_as(x, length, s, &terms, false, false, false);
}

SIMD void four_and_six(VF absmax, const struct nib_coding *coding, const struct lane_scaler *scaler,
                       struct scales *four, struct scales *six)
{
    const VF base = vf_mul(vf_div(absmax, vf_set1(6.0f)), scaler->scale);
    *six = te_scales_near(base, coding->floor_code, scaler);
    *four = te_scales_near(vf_mul(base, vf_set1(1.5f)), coding->floor_code, scaler);
}

/* Lanes of `a` where e_a < e_b, else of `b`. */
SIMD struct scales better(VF error_a, VF error_b, const struct scales *a, const struct scales *b)
{
    return (struct scales){ vi_select_less(error_a, error_b, a->code, b->code),
                            vf_of(vi_select_less(error_a, error_b, vi_of(a->value), vi_of(b->value))),
                            vf_of(vi_select_less(error_a, error_b, vi_of(a->factor), vi_of(b->factor))) };
}

SIMD struct scales choose_4over6(const struct lanes *x, int length, VF absmax, const struct nib_coding *coding,
                                 const struct lane_scaler *scaler)
{
    struct scales four, six;
    four_and_six(absmax, coding, scaler, &four, &six);
    return better(line_error(x, length, &four, coding, scaler), line_error(x, length, &six, coding, scaler), &four,
                  &six);
}

/* The vectors of a group of blocks: element i of each is in the i-th. */
typedef const float (*group_vectors)[VL];

/* Of element i of every block; importance is NULL for a plain sweep. */
SIMD VF squared_difference(group_vectors magnitudes, group_vectors importance, int i, VF factor, VF f, bool clamp)
{
    const VF a = vf_load(magnitudes[i]);
    const VF d = vf_sub(vf_mul(rounded_magnitude(vf_mul(a, factor), clamp), f), a), square = vf_mul(d, d);
    return importance ? vf_mul(square, vf_load(importance[i])) : square;
}

/* Magnitudes do for errors: a sign would change that of d. Elements outside the block are zeros, whose code is 0 and
 * whose error is 0 as well. Sums are made as soon as they can be, so that few are kept. */
SIMD VF squared_error_lanes(group_vectors magnitudes, group_vectors importance, VF factor, VF f, bool clamp)
{
    VF fours[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        VF twos[2];
        UNROLL
        for (int k = 0; k < 2; k++)
            twos[k] = vf_add(squared_difference(magnitudes, importance, i + 4 * k, factor, f, clamp),
                             squared_difference(magnitudes, importance, i + 4 * k + 8, factor, f, clamp));
        fours[i] = vf_add(twos[0], twos[1]);
    }
    return vf_add(vf_add(fours[0], fours[2]), vf_add(fours[1], fours[3]));
}

/* Functions of their own, or else what they have in common is joined, with all differences in memory between. */
__attribute__((noinline)) SLOT VF squared_error(group_vectors magnitudes, VF factor, VF f)
{
    return squared_error_lanes(magnitudes, NULL, factor, f, false);
}

__attribute__((noinline)) SLOT VF squared_error_clamped(group_vectors magnitudes, VF factor, VF f)
{
    return squared_error_lanes(magnitudes, NULL, factor, f, true);
}

/* That there is importance is said, or else every element would ask. */
__attribute__((noinline, nonnull)) SLOT VF weighted_error(group_vectors magnitudes, group_vectors importance, VF factor,
                                                          VF f)
{
    return squared_error_lanes(magnitudes, importance, factor, f, false);
}

__attribute__((noinline, nonnull)) SLOT VF weighted_error_clamped(group_vectors magnitudes, group_vectors importance,
                                                                  VF factor, VF f)
{
    return squared_error_lanes(magnitudes, importance, factor, f, true);
}

SIMD VF candidate_error(group_vectors magnitudes, group_vectors importance, VF factor, VF f, bool clamp)
{
    if (importance)
        return clamp ? weighted_error_clamped(magnitudes, importance, factor, f)
                     : weighted_error(magnitudes, importance, factor, f);
    return clamp ? squared_error_clamped(magnitudes, factor, f) : squared_error(magnitudes, factor, f);
}

/* A candidate beyond the ends of the range counts as the end, which came before it: it cannot be better. */
SIMD struct scales choose_sweep(const struct lanes *x, VF absmax, const struct nib_coding *coding,
                                const struct lane_scaler *scaler, group_vectors importance)
{
    const VI rtn = rtn_scales(absmax, coding, scaler).code;
    const VI floor = vi_set1(coding->floor_code ? coding->floor_code : 1);
    const VI lowest = vi_select_less(vf_from(rtn), vf_set1(0.5f), vi_set1(0), floor);
    float magnitudes[BLOCK][VL] __attribute__((aligned(4 * VL)));
    struct scales candidates[NIB_SWEEP_CANDIDATES]; /* all of them beforehand, so that no error waits for a division */
    UNROLL
    for (int i = 0; i < BLOCK; i++)
        vf_store(magnitudes[i], absolute(lane_vector(x, i)));
    for (int k = 0; k < NIB_SWEEP_CANDIDATES; k++) {
        const VI wanted = vi_add(rtn, vi_set1(nib_sweep_offset(k)));
        candidates[k] = te_scales_of(vi_max(vi_min(wanted, vi_set1(0x7E)), lowest), scaler);
    }
    /* Larger scales than a fitting one fit as well. */
    const bool fits = vf_all_less(vf_mul(absmax, candidates[0].factor), vf_set1(7.0f));
    VI best = rtn;
    VF least = vf_set1(0);
    for (int k = 0; k < NIB_SWEEP_CANDIDATES; k++) {
        const VF factor = candidates[k].factor, f = vf_mul(candidates[k].value, scaler->g);
        const bool clamp = !(fits && nib_sweep_offset(k) >= 0);
        const VF error = candidate_error((group_vectors)magnitudes, importance, factor, f, clamp);
        best = k == 0 ? best : vi_select_less(error, least, candidates[k].code, best);
        least = k == 0 ? error : vf_of(vi_select_less(error, least, vi_of(error), vi_of(least)));
    }
    return te_scales_of(best, scaler);
}
