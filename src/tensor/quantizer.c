/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantizer.c - nib_quantizer: defaults, and the one place that says which combination is rejected, and why.
 */
#include "tensor/quantize.h"

#include <float.h>

#include "format/codec.h"
#include "base/os.h"

static nib_quantizer defaults_of(const struct nib_format_facts *facts, nib_format format)
{
    return (nib_quantizer){ .bytes = sizeof(nib_quantizer),
                            .format = format,
                            .rowwise = 1,
                            .columnwise = 1,
                            .rht_sign_mask = NIB_RHT_SIGN_MASK,
                            .block_dims = { facts->default_rows, facts->block },
                            .e4m3_max = 448,
                            .pow2_scales = facts->float_scales && facts->block };
}

nib_status nib_quantizer_init_sized(nib_quantizer *q, size_t bytes, nib_format format)
{
    NIB_REQUIRE(q);
    const struct nib_format_facts *facts = nib_format_find(format);
    if (!facts)
        return nib_fail(NIB_ERR_ARG, "format %d is not one that this version knows", (int)format);
    const nib_quantizer defaults = defaults_of(facts, format);
    return nib_struct_init("quantizer", q, bytes, &defaults, sizeof defaults, NIB_QUANTIZER_OLDEST);
}

/* A quantizer of any version: what an older caller's struct does not have keeps its default. */
static nib_status read_quantizer(const nib_quantizer *in, nib_quantizer *out)
{
    if (!in)
        return nib_fail(NIB_ERR_ARG, "the quantizer is NULL");
    *out = defaults_of(nib_format_find(NIB_NVFP4), NIB_NVFP4);
    return nib_struct_read("quantizer", in, out, sizeof *out, NIB_QUANTIZER_OLDEST);
}

nib_status nib_quantizer_set_usage(nib_quantizer *q, int rowwise, int columnwise)
{
    NIB_REQUIRE(q);
    TRY(nib_struct_check("quantizer", q, sizeof *q, NIB_QUANTIZER_OLDEST));
    if (rowwise < -1 || rowwise > 1 || columnwise < -1 || columnwise > 1)
        return nib_fail(NIB_ERR_ARG, "a usage is 1, 0, or -1 to leave it, not %d and %d", rowwise, columnwise);
    if (rowwise >= 0)
        q->rowwise = (uint8_t)rowwise;
    if (columnwise >= 0)
        q->columnwise = (uint8_t)columnwise;
    return NIB_OK;
}

/* ---- What is rejected ---- */

/* Every enumerated option is below its count. */
static nib_status check_ranges(const nib_quantizer *q)
{
    const struct {
        const char *name;
        int value, count;
    } enums[] = {
        { "format", (int)q->format, nib_format_count() },
        { "dialect", (int)q->dialect, NIB_DIALECT_COUNT },
        { "scale_rule", (int)q->scale_rule, NIB_SCALE_RULE_COUNT },
        { "error_mode", (int)q->error_mode, NIB_ERROR_MODE_COUNT },
        { "tensor_scale_rule", (int)q->tensor_scale_rule, NIB_TENSOR_SCALE_RULE_COUNT },
        { "rounding", (int)q->rounding, NIB_ROUNDING_COUNT },
        { "mx_rule", (int)q->mx_rule, NIB_MX_RULE_COUNT },
    };
    for (size_t i = 0; i < sizeof enums / sizeof *enums; i++)
        if (enums[i].value < 0 || enums[i].value >= enums[i].count)
            return nib_fail(NIB_ERR_ARG, "%s %d is not one that this version knows", enums[i].name, enums[i].value);
    if (q->e4m3_max != 448 && q->e4m3_max != 256)
        return nib_fail(NIB_ERR_ARG, "e4m3_max is 448 or 256, not %d", (int)q->e4m3_max);
    if (q->origin[0] < 0 || q->origin[1] < 0)
        return nib_fail(NIB_ERR_ARG, "origin (%lld, %lld) is outside the whole", (long long)q->origin[0],
                        (long long)q->origin[1]);
    if (!(q->amax_epsilon >= 0 && q->amax_epsilon <= FLT_MAX))
        return nib_fail(NIB_ERR_ARG, "amax_epsilon must be 0 or positive and finite");
    const float floor = q->min_block_scale;
    if (!(floor >= 0) || nib_f32_from_e4m3(nib_e4m3_from_f32(floor)) != floor)
        return nib_fail(NIB_ERR_ARG, "min_block_scale must be 0 or a positive value that E4M3 has");
    return NIB_OK;
}

/* Blocks and elements that the format does not have. */
static nib_status check_format(const nib_quantizer *q, const struct nib_format_facts *format)
{
    const bool none = !format->block && !q->block_dims[0] && !q->block_dims[1];
    const bool lines = format->lines && q->block_dims[0] == 1 && q->block_dims[1] == format->block;
    const bool square = format->square && q->block_dims[0] == format->block && q->block_dims[1] == format->block;
    if (!format->block && !none)
        return nib_fail(NIB_ERR_ARG, "%s has one scale for the whole tensor: its block_dims are {0, 0}", format->name);
    if (!none && !lines && !square)
        return nib_fail(NIB_ERR_ARG, "%s has blocks of 1x%d%s, not %dx%d", format->name, format->block,
                        format->square ? " and square ones" : "", (int)q->block_dims[0], (int)q->block_dims[1]);
    if (q->element && q->element != format->elements[0] && q->element != format->elements[1])
        return nib_fail(NIB_ERR_DTYPE, "an element of %s cannot be %s", format->name,
                        nib_dtype_valid(q->element) ? nib_dtypes[q->element].name : "of an unknown dtype");
    if (!format->dialects[q->dialect].factor)
        return nib_fail(NIB_ERR_MODE, "the dialect %s does not define %s", nib_dialect_name(q->dialect), format->name);
    return NIB_OK;
}

/* Pairs of options that do not go together. */
static nib_status check_combination(const nib_quantizer *q)
{
    const struct nib_format_facts *format = nib_format_of(q);
    const struct nib_dialect_facts *dialect = nib_dialect_of(q);
    const bool square = q->block_dims[0] > 1, rht = q->rht || q->rht_rowwise,
               stochastic = q->rounding != NIB_ROUND_NEAREST;
    const bool four_over_six = q->scale_rule == NIB_SCALE_4OVER6, sweep = q->scale_rule == NIB_SCALE_SWEEP;
    const bool may_lack_tensor_scale = format->nvfp4_options && q->dialect == NIB_DIALECT_TORCHAO;
    const struct {
        bool rejected;
        const char *why;
    } rules[] = {
        { rht && square, "the RHT mixes the 16 rows that share a scale, so it does not go with 16x16 blocks" },
        { four_over_six && rht,
          "four-over-six does not go with the RHT: its error would be that of transformed values" },
        { four_over_six && stochastic,
          "four-over-six compares two roundings to nearest, so it does not go with stochastic rounding" },
        { sweep && square, "the sweep chooses a scale for 16 elements, so it does not go with 16x16 blocks" },
        { sweep && stochastic, "the sweep compares roundings to nearest, so it does not go with stochastic rounding" },
        { q->row_scaled && square, "16x16 blocks span 16 rows, so they do not go with one amax per row" },
        { q->e4m3_max != 448 && !four_over_six,
          "e4m3_max 256 leaves room for four-over-six and has no use without it" },
        { q->no_tensor_scale && !may_lack_tensor_scale, "only the dialect torchao has a form without a tensor scale" },
        { q->swizzled && !format->swizzles, "no GEMM takes the scales of this format swizzled" },
        { (q->pow2_scales || q->amax_epsilon != 0) && !format->float_scales,
          "pow2_scales and amax_epsilon are for formats whose scales are computed in FP32" },
        { q->mx_rule != NIB_MX_CEIL && format->scale != NIB_E8M0, "mx_rule is for formats with E8M0 scales" },
        { q->amax_comm && !format->tensor_scales, "there is no amax per tensor to reduce: every block has its own" },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].rejected)
            return nib_fail(NIB_ERR_MODE, "%s", rules[i].why);
    const struct {
        bool wanted;
        const char *what;
    } te_only[] = {
        { square && format->nvfp4_options, "16x16 blocks" },
        { rht, "an RHT" },
        { stochastic, "stochastic rounding" },
        { four_over_six, "four-over-six" },
        { sweep, "a sweep" },
        { q->row_scaled, "an amax per row" },
        { q->tensor_scale_rule != NIB_TENSOR_SCALE_RULE_DIALECT, "another tensor scale" },
        { q->min_block_scale != 0, "another floor for block scales" },
    };
    for (size_t i = 0; i < sizeof te_only / sizeof *te_only; i++) {
        if (te_only[i].wanted && dialect->fixed)
            return nib_fail(NIB_ERR_MODE, "the dialect %s fixes every numeric rule and has no form with %s",
                            dialect->name, te_only[i].what);
        if (te_only[i].wanted && !format->nvfp4_options)
            return nib_fail(NIB_ERR_MODE, "%s has no form with %s", format->name, te_only[i].what);
    }
    return NIB_OK;
}

nib_status nib_quantizer_load(const nib_quantizer *in, nib_quantizer *out)
{
    nib_quantizer q;
    TRY(read_quantizer(in, &q));
    uint8_t *const flags[] = { &q.rowwise,     &q.columnwise, &q.swizzled,        &q.row_scaled, &q.rht,
                               &q.rht_rowwise, &q.fast_error, &q.no_tensor_scale, &q.pow2_scales };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        *flags[i] = *flags[i] != 0;
    const nib_fpenv saved = nib_fpenv_enter(); /* flushed to zero, a floor that E4M3 does not have would pass */
    const nib_status ranges = check_ranges(&q);
    nib_fpenv_leave(saved);
    TRY(ranges);
    if (q.min_block_scale == 0) /* a negative zero is no floor either */
        q.min_block_scale = 0;
    if (q.amax_epsilon == 0)
        q.amax_epsilon = 0;
    if (q.amax_comm)
        TRY(nib_check_comm("amax_comm", q.amax_comm, false));
    TRY(check_format(&q, nib_format_of(&q)));
    TRY(check_combination(&q));
    *out = q;
    return NIB_OK;
}

/* The random stream has 32 bits for lines and 31 for blocks, and blocks of the part must be blocks of the whole. With
 * square blocks both usages take the rowwise random numbers. */
static nib_status check_random_range(const nib_quantizer *q, const struct nib_geometry *geometry)
{
    const int64_t block = nib_format_of(q)->block;
    const bool square = q->block_dims[0] != 1;
    for (int usage = 0; usage < 2; usage++) {
        if (square ? usage == NIB_COLUMNWISE : !(usage == NIB_ROWWISE ? q->rowwise : q->columnwise))
            continue;
        const int64_t line0 = q->origin[usage == NIB_ROWWISE ? 0 : 1], first0 = q->origin[usage == NIB_ROWWISE ? 1 : 0];
        if (first0 % block || (square && line0 % block))
            return nib_fail(NIB_ERR_SHAPE, "origin (%lld, %lld) is not at a block border", (long long)q->origin[0],
                            (long long)q->origin[1]);
        int64_t lines, length;
        if (!nib_add(line0, geometry->usage[usage].lines, &lines) ||
            !nib_add(first0, geometry->usage[usage].length, &length) || lines > INT64_C(1) << 32 ||
            nib_ceil_div(length, block) > INT64_C(1) << 31)
            return nib_fail(NIB_ERR_SHAPE, "stochastic rounding numbers 2^32 %s and 2^31 blocks in each",
                            usage == NIB_ROWWISE ? "rows" : "columns");
    }
    return NIB_OK;
}

nib_status nib_check_input(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                           struct nib_geometry *out)
{
    if (dtype != NIB_F32 && dtype != NIB_BF16 && dtype != NIB_F16)
        return nib_fail(NIB_ERR_DTYPE, "quantization takes F32, BF16 and F16, not %s",
                        nib_dtype_valid(dtype) ? nib_dtypes[dtype].name : "an unknown dtype");
    struct nib_geometry geometry;
    TRY(nib_geometry_of(q, rank, shape, &geometry));
    const int64_t block = nib_format_of(q)->block;
    if (q->columnwise && q->rht && geometry.rows % block)
        return nib_fail(NIB_ERR_SHAPE, "the RHT takes columns in groups of %lld, and there are %lld rows",
                        (long long)block, (long long)geometry.rows);
    if (q->rowwise && q->rht_rowwise && geometry.cols % block)
        return nib_fail(NIB_ERR_SHAPE, "the RHT takes rows in groups of %lld, and there are %lld columns",
                        (long long)block, (long long)geometry.cols);
    if (q->rounding != NIB_ROUND_NEAREST)
        TRY(check_random_range(q, &geometry));
    *out = geometry;
    return NIB_OK;
}

nib_status nib_quantizer_check(const nib_quantizer *q, const nib_array *x)
{
    nib_quantizer loaded;
    TRY(nib_quantizer_load(q, &loaded));
    if (!x)
        return NIB_OK;
    struct nib_geometry geometry;
    return nib_check_input(&loaded, x->dtype, x->rank, x->shape, &geometry);
}

/* ---- The importance of channels ---- */

static nib_status check_squares(const float *squares, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!(squares[i] >= 0 && squares[i] <= FLT_MAX))
            return nib_fail(NIB_ERR_ARG, "mean square %lld is %s", (long long)i,
                            nib_is_nan(squares[i]) ? "a NaN"
                            : squares[i] < 0       ? "negative"
                                                   : "infinite");
    return NIB_OK;
}

nib_status nib_importance_normalize(const float *squares, int64_t n, float *out)
{
    NIB_REQUIRE(squares);
    NIB_REQUIRE(out);
    if (n < 1)
        return nib_fail(NIB_ERR_SHAPE, "a weight has at least one input channel, not %lld", (long long)n);
    const nib_fpenv saved = nib_fpenv_enter();
    const nib_status status = check_squares(squares, n);
    const double mean = status ? 0 : nib_importance_mean(squares, n);
    for (int64_t i = 0; !status && i < n; i += NIB_BLOCK) /* in place too: a block is read before it is written */
        nib_importance_block(squares + i, (int)nib_min(NIB_BLOCK, n - i), mean, out + i);
    nib_fpenv_leave(saved);
    return status;
}

/* ---- Comparison ---- */

/* The fields that decide bytes, in one row each, so that equality and hash cannot drift apart. */
enum { KEY_WORDS = 27 };

static void quantizer_key(const nib_quantizer *q, uint64_t key[KEY_WORDS])
{
    const uint64_t words[KEY_WORDS] = { (uint64_t)q->format,
                                        (uint64_t)q->dialect,
                                        q->rowwise != 0,
                                        q->columnwise != 0,
                                        q->swizzled != 0,
                                        q->row_scaled != 0,
                                        q->rht != 0,
                                        q->rht_rowwise != 0,
                                        q->rht_sign_mask,
                                        (uint64_t)q->block_dims[0],
                                        (uint64_t)q->block_dims[1],
                                        (uint64_t)q->scale_rule,
                                        (uint64_t)q->error_mode,
                                        q->fast_error != 0,
                                        q->no_tensor_scale != 0,
                                        (uint64_t)q->e4m3_max,
                                        (uint64_t)q->tensor_scale_rule,
                                        q->min_block_scale == 0 ? 0 : nib_bits(q->min_block_scale), /* -0 is 0 */
                                        (uint64_t)q->rounding,
                                        q->seed,
                                        q->offset,
                                        (uint64_t)q->origin[0],
                                        (uint64_t)q->origin[1],
                                        nib_format_find(q->format) ? (uint64_t)nib_element_of(q) : 0,
                                        q->pow2_scales != 0,
                                        (uint64_t)q->mx_rule,
                                        q->amax_epsilon == 0 ? 0 : nib_bits(q->amax_epsilon) };
    memcpy(key, words, sizeof words);
}

int nib_quantizer_equal(const nib_quantizer *a, const nib_quantizer *b)
{
    if (!a || !b)
        return a == b;
    nib_quantizer read_a, read_b;
    if (read_quantizer(a, &read_a) || read_quantizer(b, &read_b))
        return 0;
    uint64_t key_a[KEY_WORDS], key_b[KEY_WORDS];
    quantizer_key(&read_a, key_a);
    quantizer_key(&read_b, key_b);
    return memcmp(key_a, key_b, sizeof key_a) == 0;
}

uint64_t nib_quantizer_hash(const nib_quantizer *q)
{
    uint64_t key[KEY_WORDS] = { 0 }, hash = 0xCBF29CE484222325u; /* FNV-1a, a word at a time */
    nib_quantizer read;
    if (q && !read_quantizer(q, &read))
        quantizer_key(&read, key);
    for (int i = 0; i < KEY_WORDS; i++) {
        hash = (hash ^ key[i]) * 0x100000001B3u;
        hash ^= hash >> 32;
    }
    return hash;
}

int nib_is_quantizable(const nib_quantizer *q, int rank, const int64_t *shape)
{
    nib_quantizer loaded;
    struct nib_geometry geometry;
    if (nib_quantizer_load(q, &loaded) || nib_geometry_of(&loaded, rank, shape, &geometry))
        return 0;
    const int64_t block = nib_format_of(&loaded)->block;
    if (!block)
        return 1;
    return rank >= 2 && !loaded.row_scaled && geometry.rows % block == 0 && geometry.cols % block == 0;
}

int nib_is_requantization_safe(const nib_quantizer *q)
{
    nib_quantizer read;
    return q && !read_quantizer(q, &read) && read.rounding == NIB_ROUND_NEAREST;
}
