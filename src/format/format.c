/* SPDX-License-Identifier: Apache-2.0 */
/*
 * format.c - one row per format. No other file asks which format it has.
 */
#include "format/format.h"

#include "format/codec.h"

/* A program may build the library with formats of its own: NIB_EXTRA_FORMATS names a file that defines NIB_EXTRA_ROWS,
 * rows of this table, and the dialects that they point to. */
#ifdef NIB_EXTRA_FORMATS
#include NIB_EXTRA_FORMATS
#else
#define NIB_EXTRA_ROWS
#endif

#define SAVED_SIX                                                                                             \
    { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE, NIB_ROW_TENSOR_SCALE, NIB_COL_TENSOR_SCALE }, \
        .saved_count = 6
#define SAVED_FOUR { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_SCALE, NIB_COL_SCALE }, .saved_count = 4
#define SAVED_THREE { NIB_ROW_DATA, NIB_COL_DATA, NIB_ROW_TENSOR_SCALE }, .saved_count = 3

static const struct nib_format_facts formats[] = {
    [NIB_NVFP4] = { .name = "nvfp4",
                    .elements = { NIB_E2M1, NIB_E2M1 },
                    .scale_max = 448,
                    .scale = NIB_E4M3,
                    .block = 16,
                    .lines = true,
                    .square = true,
                    .default_rows = 1,
                    .tensor_scales = true,
                    .nvfp4_options = true,
                    .swizzles = true,
                    .transposed = true,
                    .align = { 128, 4 },
                    .min_rank = 1,
                    .exact_dot = true,
                    .saved = SAVED_SIX,
                    .dialects = nib_nvfp4_dialects },
    [NIB_FLOAT8] = { .name = "float8",
                     .elements = { NIB_E4M3, NIB_E5M2 },
                     .scale_max = 1,
                     .scale = NIB_F32,
                     .tensor_scales = true,
                     .shared_tensor_scale = true,
                     .float_scales = true,
                     .transposed = true,
                     .align = { 1, 1 },
                     .saved = SAVED_THREE,
                     .dialects = nib_float8_dialects },
    [NIB_MXFP8] = { .name = "mxfp8",
                    .elements = { NIB_E4M3, NIB_E5M2 },
                    .scale_max = 1,
                    .scale = NIB_E8M0,
                    .block = 32,
                    .lines = true,
                    .square = true,
                    .default_rows = 1,
                    .swizzles = true,
                    .layout = { NIB_SCALES_BY_LINE, NIB_SCALES_BY_BLOCK },
                    .align = { 128, 4 },
                    .min_rank = 1,
                    .saved = SAVED_FOUR,
                    .dialects = nib_mx_dialects },
    [NIB_FLOAT8_BLOCK] = { .name = "float8_block",
                           .elements = { NIB_E4M3, NIB_E5M2 },
                           .scale_max = 1,
                           .scale = NIB_F32,
                           .block = 128,
                           .lines = true,
                           .square = true,
                           .default_rows = 128,
                           .float_scales = true,
                           .transposed = true,
                           .layout = { NIB_SCALES_BY_BLOCK, NIB_SCALES_BY_BLOCK },
                           .square_layout = NIB_SCALES_BY_TILE,
                           .align = { 4, 1 },
                           .min_rank = 1,
                           .saved = SAVED_FOUR,
                           .dialects = nib_float8_block_dialects },
    [NIB_MXFP4] = { .name = "mxfp4",
                    .elements = { NIB_E2M1, NIB_E2M1 },
                    .scale_max = 1,
                    .scale = NIB_E8M0,
                    .block = 32,
                    .lines = true,
                    .default_rows = 1,
                    .swizzles = true,
                    .transposed = true,
                    .align = { 128, 4 },
                    .min_rank = 1,
                    .exact_dot = true,
                    .saved = SAVED_FOUR,
                    .dialects = nib_mx_dialects },
    NIB_EXTRA_ROWS
};

int nib_format_count(void) { return (int)(sizeof formats / sizeof *formats); }

const struct nib_format_facts *nib_format_find(nib_format format)
{
    return (int)format >= 0 && (int)format < nib_format_count() ? &formats[format] : NULL;
}

const char *nib_format_name(nib_format format)
{
    const struct nib_format_facts *facts = nib_format_find(format);
    return facts ? facts->name : NULL;
}

nib_status nib_format_from_name(const char *name, nib_format *out)
{
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    for (int i = 0; i < nib_format_count(); i++)
        if (strcmp(name, formats[i].name) == 0) {
            *out = (nib_format)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_ARG, "there is no format \"%s\"", name);
}

static float largest_element(nib_dtype element)
{
    static const float largest[NIB_DTYPE_COUNT] = { [NIB_E2M1] = 6, [NIB_E4M3] = 448, [NIB_E5M2] = 57344 };
    return largest[element];
}

struct nib_rules nib_rules_of(const nib_quantizer *q, nib_dtype input)
{
    const struct nib_format_facts *facts = nib_format_of(q);
    const bool decode = q->tensor_scale_rule != NIB_TENSOR_SCALE_RULE_DIALECT;
    const float scale_max = facts->nvfp4_options ? (float)q->e4m3_max : facts->scale_max;
    struct nib_rules rules = { .tensor_scale = decode ? NIB_TENSOR_SCALE_MULTIPLIER : nib_dialect_of(q)->tensor_scale,
                               .element = nib_element_of(q),
                               .pow2 = q->tensor_scale_rule == NIB_TENSOR_SCALE_RULE_POW2 || q->pow2_scales,
                               .no_tensor_scale = q->no_tensor_scale,
                               .mx_rule = q->mx_rule,
                               .amax_epsilon = q->amax_epsilon,
                               .input = input };
    rules.element_max = largest_element(rules.element);
    rules.full_scale = rules.element_max * scale_max;
    return rules;
}

nib_part nib_part_of(const struct nib_format_facts *facts, nib_usage usage, int kind)
{
    if ((kind == 1 && !facts->block) || (kind == 2 && !facts->tensor_scales))
        return NIB_PART_COUNT;
    return (nib_part)(2 * kind + (usage == NIB_COLUMNWISE && !(kind == 2 && facts->shared_tensor_scale)));
}

/* ---- Sizes ---- */

/* The scale matrix of a usage whose lines and blocks are set. */
static void scale_geometry(const nib_quantizer *q, nib_usage usage, struct nib_usage_geometry *g)
{
    const struct nib_format_facts *facts = nib_format_of(q);
    const bool square = q->block_dims[0] > 1;
    const enum nib_scale_layout layout =
        square && facts->square_layout == NIB_SCALES_BY_TILE ? NIB_SCALES_BY_TILE : facts->layout[usage];
    g->lines_per_scale = layout == NIB_SCALES_BY_TILE ? facts->block : 1;
    g->valid_shape[0] = nib_ceil_div(g->lines, g->lines_per_scale);
    g->valid_shape[1] = g->blocks;
    g->scale_shape[0] = nib_round_up(g->valid_shape[0], facts->align[0]);
    g->scale_shape[1] = nib_round_up(g->valid_shape[1], facts->align[1]);
    if (layout == NIB_SCALES_BY_TILE) { /* one row per row of tiles, and only the rows' length is padded */
        g->scale_shape[0] = g->valid_shape[0];
        g->scale_shape[1] = nib_round_up(g->valid_shape[1], facts->align[0]);
    }
    g->scale_line = g->scale_shape[1];
    g->scale_block = 1;
    if (layout == NIB_SCALES_BY_BLOCK) {
        const int64_t valid[2] = { g->valid_shape[1], g->valid_shape[0] },
                      shape[2] = { g->scale_shape[1], g->scale_shape[0] };
        memcpy(g->valid_shape, valid, sizeof valid);
        memcpy(g->scale_shape, shape, sizeof shape);
        g->scale_line = 1;
        g->scale_block = g->scale_shape[1];
    }
}

static bool usage_geometry(const nib_quantizer *q, nib_usage usage, int64_t lines, int64_t length,
                           struct nib_usage_geometry *out)
{
    const struct nib_format_facts *facts = nib_format_of(q);
    const bool packed = nib_dtypes[nib_element_of(q)].bits == 4, transposed = usage == NIB_ROWWISE || facts->transposed;
    *out = (struct nib_usage_geometry){ .lines = lines,
                                        .length = length,
                                        .line_stride = !transposed ? 1
                                                       : packed    ? nib_ceil_div(length, 2)
                                                                   : length,
                                        .element_stride = packed       ? 0
                                                          : transposed ? 1
                                                                       : nib_max(lines, 1), /* 0 means packed */
                                        .by_element = usage == NIB_ROWWISE || !facts->transposed,
                                        .blocks = facts->block ? nib_ceil_div(length, facts->block) : 0,
                                        .scale_bytes = nib_dtypes[facts->scale].bits / 8,
                                        .swizzled = q->swizzled,
                                        .tensor_scales = !facts->tensor_scales ? 0
                                                         : q->row_scaled       ? lines
                                                                               : 1 };
    scale_geometry(q, usage, out);
    return nib_mul(lines, packed ? out->line_stride : length, &out->data_bytes) &&
           nib_mul(out->scale_shape[0], out->scale_shape[1], &out->scales_bytes) &&
           nib_mul(out->scales_bytes, out->scale_bytes, &out->scales_bytes) &&
           nib_mul(out->tensor_scales, (int64_t)sizeof(float), &out->tensor_scales_bytes);
}

nib_status nib_geometry_of(const nib_quantizer *q, int rank, const int64_t *shape, struct nib_geometry *out)
{
    const struct nib_format_facts *facts = nib_format_of(q);
    TRY(nib_check_shape("shape", rank, shape, NULL));
    if (rank < facts->min_rank)
        return nib_fail(NIB_ERR_SHAPE, "a %s tensor has at least rank %d, not %d", facts->name, facts->min_rank, rank);
    struct nib_geometry geometry = { .rows = 1, .cols = rank ? shape[rank - 1] : 1 };
    for (int i = 0; i < rank - 1; i++)
        geometry.rows *= shape[i]; /* nib_check_shape has seen the product */
    if (!usage_geometry(q, NIB_ROWWISE, geometry.rows, geometry.cols, &geometry.usage[NIB_ROWWISE]) ||
        !usage_geometry(q, NIB_COLUMNWISE, geometry.cols, geometry.rows, &geometry.usage[NIB_COLUMNWISE]))
        return nib_fail(NIB_ERR_SHAPE, "a tensor of %lld x %lld needs too many bytes", (long long)geometry.rows,
                        (long long)geometry.cols);
    *out = geometry;
    return NIB_OK;
}
