/* SPDX-License-Identifier: Apache-2.0 */
/*
 * format.c - one row per format. No other file asks which format it has.
 */
#include "format.h"

const struct nib_format_facts nib_formats[NIB_FORMAT_COUNT] = {
    [NIB_NVFP4] = { .name = "nvfp4",
                    .element = NIB_E2M1,
                    .scale = NIB_E4M3,
                    .block = 16,
                    .square = true,
                    .scale_lines = 128,
                    .scale_columns = 4,
                    .min_rank = 1 },
};

const char *nib_format_name(nib_format format)
{
    return (unsigned)format < NIB_FORMAT_COUNT ? nib_formats[format].name : NULL;
}

nib_status nib_format_from_name(const char *name, nib_format *out)
{
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    for (int i = 0; i < NIB_FORMAT_COUNT; i++)
        if (strcmp(name, nib_formats[i].name) == 0) {
            *out = (nib_format)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_ARG, "there is no format \"%s\"", name);
}

static bool copy_geometry(const struct nib_format_facts *facts, bool row_scaled, int64_t lines, int64_t length,
                          struct nib_copy_geometry *out)
{
    const int64_t per_byte = 8 / nib_dtypes[facts->element].bits;
    *out = (struct nib_copy_geometry){ .lines = lines,
                                       .length = length,
                                       .code_stride = nib_ceil_div(length, per_byte),
                                       .blocks = nib_ceil_div(length, facts->block),
                                       .levels = row_scaled ? lines : 1 };
    out->scale_stride = nib_round_up(out->blocks, facts->scale_columns);
    out->scale_lines = nib_round_up(lines, facts->scale_lines);
    return nib_mul(lines, out->code_stride, &out->code_bytes) &&
           nib_mul(out->scale_lines, out->scale_stride, &out->scale_bytes) &&
           nib_mul(out->levels, (int64_t)sizeof(float), &out->level_bytes);
}

nib_status nib_geometry_of(const nib_quantizer *q, int rank, const int64_t *shape, struct nib_geometry *out)
{
    const struct nib_format_facts *facts = &nib_formats[q->format];
    TRY(nib_check_shape("shape", rank, shape, NULL));
    if (rank < facts->min_rank)
        return nib_fail(NIB_ERR_SHAPE, "a %s tensor has at least rank %d, not %d", facts->name, facts->min_rank, rank);
    struct nib_geometry geometry = { .rows = 1, .cols = rank ? shape[rank - 1] : 1 };
    for (int i = 0; i < rank - 1; i++)
        geometry.rows *= shape[i]; /* nib_check_shape has seen the product */
    if (!copy_geometry(facts, q->row_scaled, geometry.rows, geometry.cols, &geometry.copy[NIB_ROWWISE]) ||
        !copy_geometry(facts, q->row_scaled, geometry.cols, geometry.rows, &geometry.copy[NIB_COLUMNWISE]))
        return nib_fail(NIB_ERR_SHAPE, "a tensor of %lld x %lld takes too many bytes", (long long)geometry.rows,
                        (long long)geometry.cols);
    *out = geometry;
    return NIB_OK;
}
