/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_scalar.c - the reference of products: each output as docs/numerics.md 14 defines it.
 */
#include "kernels/kernels.h"

static float code_at(const struct nib_side *side, int64_t line, int64_t k)
{
    return nib_f32_from_e2m1(nib_code_load(side->geometry, side->memory.codes, line, k));
}

static uint8_t scale_at(const struct nib_side *side, int64_t line, int64_t block)
{
    return (uint8_t)nib_scale_load(side->geometry, side->memory.scales, line, block);
}

static float value_at(const struct nib_side *side, int64_t line, int64_t k)
{
    return nib_load_value(side->values, (line - side->origin) * side->line_stride + k * side->element_stride,
                          side->dtype);
}

/* The exact dot product of a block of codes. */
static float dot_of(const struct nib_product *p, int64_t i, int64_t j, int64_t first, int64_t end)
{
    float dot = 0;
    for (int64_t k = first; k < end; k++)
        dot += code_at(&p->a, i, k) * code_at(&p->b, j, k);
    return dot;
}

/* The product of two scales, and its product with a dot product, are exact: only the sum rounds. */
static float add_nvfp4(const struct nib_product *p, int64_t i, int64_t j, int64_t block, float dot, float acc)
{
    return acc + nib_f32_from_e4m3(scale_at(&p->a, i, block)) * nib_f32_from_e4m3(scale_at(&p->b, j, block)) * dot;
}

/* The smaller scale first: that product is exact, or the whole overflows; so the term is rounded once. */
static float add_mxfp4(const struct nib_product *p, int64_t i, int64_t j, int64_t block, float dot, float acc)
{
    const uint8_t a = scale_at(&p->a, i, block), b = scale_at(&p->b, j, block);
    const float smaller = nib_f32_from_e8m0(a < b ? a : b), larger = nib_f32_from_e8m0(a < b ? b : a);
    return acc + (dot * smaller) * larger;
}

static float add_fixed(const struct nib_product *p, int64_t i, int64_t j, int64_t first, int64_t end, float acc)
{
    float amax = 0;
    bool finite = true;
    for (int64_t k = first; k < end; k++) {
        const float x = nib_abs(value_at(&p->a, i, k));
        finite = finite && x <= FLT_MAX;
        amax = nib_fmax(amax, x);
    }
    const int e = nib_fixed_exponent(finite ? amax : 0);
    int32_t dot = 0;
    for (int64_t k = first; k < end && finite; k++)
        dot += (int32_t)(2 * code_at(&p->b, j, k)) * nib_fixed_value(value_at(&p->a, i, k), e);
    const float scale = nib_f32_from_e4m3(scale_at(&p->b, j, first / nib_product_block(p->kind)));
    return nib_fma((float)dot, scale * nib_fixed_factor(e, finite), acc);
}

float nib_product_accumulate(const struct nib_product *p, int64_t i, int64_t j)
{
    const int64_t block = nib_product_block(p->kind);
    float acc = 0;
    for (int64_t k = 0; k < p->a.length && p->kind == NIB_PRODUCT_VALUES; k++)
        acc = nib_fma(value_at(&p->a, i, k), value_at(&p->b, j, k), acc);
    for (int64_t first = 0; first < p->a.length && p->kind != NIB_PRODUCT_VALUES; first += block) {
        const int64_t end = nib_min(first + block, p->a.length);
        if (p->kind == NIB_PRODUCT_NVFP4)
            acc = add_nvfp4(p, i, j, first / block, dot_of(p, i, j, first, end), acc);
        else if (p->kind == NIB_PRODUCT_MXFP4)
            acc = add_mxfp4(p, i, j, first / block, dot_of(p, i, j, first, end), acc);
        else
            acc = add_fixed(p, i, j, first, end, acc);
    }
    return acc;
}

void nib_multiply_scalar(const struct nib_product *p, struct nib_row_range range, const void *packed, int64_t first,
                         int64_t count, void *scratch)
{
    (void)packed, (void)scratch;
    for (int64_t i = range.first; i < range.first + range.count; i++)
        for (int64_t j = first; j < first + count; j++)
            nib_output_store(&p->out, i, j, nib_product_scale(p, i, j), nib_product_accumulate(p, i, j));
}
