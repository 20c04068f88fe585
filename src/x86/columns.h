/* SPDX-License-Identifier: Apache-2.0 */
/*
 * columns.h - the columnwise copy by te's rule to nearest, transformed or not. Included once by the file of each x86
 * instruction set, after rows.h.
 *
 * Lanes are columns. Sixteen columns go through at once: they are a cache line of FP32, and sixteen rows of a wide
 * matrix may share few places of the first-level cache. Their numbers are copied on the way to the amaxes, and the
 * second pass reads the copy.
 *
 * As in rows.h amaxes are taken over bits, and columns that hold a NaN, or numbers that need a clamp, are left to the
 * lanes of simd.h.
 *
 * The including file defines column_codes, which gives eight bytes for each lane.
 */

enum { COLUMNS = 16, COLUMN_GROUPS = COLUMNS / VL };

struct column_tile {
    float x[COLUMN_GROUPS][BLOCK][VL] __attribute__((aligned(64)));
};

/* The signs of the transform; a quarter, too, where it comes first. */
struct column_signs {
    float x[BLOCK][VL] __attribute__((aligned(64)));
};

static void set_signs(struct column_signs *signs, const struct nib_coding *coding, nib_dtype dtype)
{
    for (int i = 0; i < BLOCK; i++)
        for (int lane = 0; lane < VL; lane++)
            signs->x[i][lane] = (dtype == NIB_F32 ? 1.0f : 0.25f) * (coding->sign_mask >> i & 1 ? -1.0f : 1.0f);
}

SIMD VI magnitude_bits(VF x) { return vi_and(vi_of(x), vi_set1(0x7FFFFFFF)); }

/* Numbers as they are. */
SIMD void copy_columns(const struct nib_panel *panel, int64_t row, int64_t col, nib_dtype dtype,
                       struct column_tile *tile, VI amax[COLUMN_GROUPS])
{
    const char *x = element_address(panel, row, col);
    const int64_t row_bytes = panel->stride * bytes_of(dtype), ahead = BLOCK * row_bytes;
    VI m[COLUMN_GROUPS][2];
    UNROLL
    for (int g = 0; g < COLUMN_GROUPS; g++)
        m[g][0] = m[g][1] = vi_set1(0);
    UNROLL
    for (int i = 0; i < BLOCK; i++, x += row_bytes) {
        _mm_prefetch(x + ahead, _MM_HINT_T0);
        UNROLL
        for (int g = 0; g < COLUMN_GROUPS; g++) {
            const VF v = load_numbers(x, g * VL, dtype);
            vf_store(tile->x[g][i], v);
            m[g][i % 2] = vi_max(magnitude_bits(v), m[g][i % 2]);
        }
    }
    UNROLL
    for (int g = 0; g < COLUMN_GROUPS; g++)
        amax[g] = vi_max(m[g][0], m[g][1]);
}

/* The butterflies of transform() at strides 1, 2 and 4 on eight rows. The signs are factors: products with them are
 * exact, so that a fused sum rounds as a plain one does. */
SIMD void transform_eight(const char *x, int64_t row_bytes, int64_t ahead, int g, nib_dtype dtype, float (*signs)[VL],
                          VF v[8])
{
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        if (g == 0) {
            _mm_prefetch(x + i * row_bytes + ahead, _MM_HINT_T0);
            _mm_prefetch(x + (i + 1) * row_bytes + ahead, _MM_HINT_T0);
        }
        const VF a = load_numbers(x + i * row_bytes, g * VL, dtype);
        const VF b = vf_mul(load_numbers(x + (i + 1) * row_bytes, g * VL, dtype), vf_load(signs[i + 1]));
        v[i] = vf_multiply_add(a, vf_load(signs[i]), b);
        v[i + 1] = vf_multiply_sub(a, vf_load(signs[i]), b);
    }
    UNROLL
    for (int stride = 2; stride < 8; stride *= 2)
        UNROLL
    for (int i = 0; i < 8; i++)
        if (!(i & stride)) {
            const VF a = v[i], b = v[i + stride];
            v[i] = vf_add(a, b);
            v[i + stride] = vf_sub(a, b);
        }
}

/* The whole transform, but for the quarter that FP32 takes last. */
SIMD VI transform_columns(const struct nib_panel *panel, int64_t row, int64_t col, int g, nib_dtype dtype,
                          struct column_signs *signs, float (*out)[VL])
{
    const char *const x = element_address(panel, row, col);
    const int64_t row_bytes = panel->stride * bytes_of(dtype), ahead = BLOCK * row_bytes;
    VF first[8], second[8];
    transform_eight(x, row_bytes, ahead, g, dtype, signs->x, first);
    UNROLL
    for (int i = 0; i < 8; i++) /* sixteen vectors and what they are summed in are more than some have registers */
        vf_store(out[i], first[i]);
    transform_eight(x + 8 * row_bytes, row_bytes, ahead, g, dtype, signs->x + 8, second);
    VI m[2] = { vi_set1(0), vi_set1(0) };
    UNROLL
    for (int i = 0; i < 8; i++) {
        const VF a = vf_load(out[i]), b = second[i];
        VF sum = vf_add(a, b), difference = vf_sub(a, b);
        if (dtype == NIB_BF16) {
            sum = round_to_bf16(sum);
            difference = round_to_bf16(difference);
        }
        vf_store(out[i], sum);
        vf_store(out[8 + i], difference);
        m[0] = vi_max(magnitude_bits(sum), m[0]);
        m[1] = vi_max(magnitude_bits(difference), m[1]);
    }
    return vi_max(m[0], m[1]);
}

/* Where a run of blocks is gathered before it is written: a piece of memory per line, a scale per line and block. */
struct column_stage {
    uint8_t codes[COLUMN_LINES][COLUMN_RUN * 8] __attribute__((aligned(64)));
    uint8_t scales[COLUMN_RUN][COLUMN_LINES] __attribute__((aligned(64)));
};

/* Up to sixteen columns by the lanes of simd.h, where the fast way does not do: as a matrix of its own. */
SLOT void stage_other(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target,
                      int64_t row, int64_t col, int64_t lines, int64_t line, int slot, struct column_stage *stage)
{
    uint8_t codes[COLUMNS * 8] = { 0 }, scales[COLUMNS];
    const struct nib_copy_geometry geometry = {
        .line_stride = 8, .scale_line = 1, .scale_block = 1, .lines_per_scale = 1
    };
    struct nib_panel part = *panel;
    struct nib_target local = *target;
    part.x = element_address(panel, row, col);
    part.row = part.col = 0;
    part.rows = nib_min(BLOCK, panel->rows - row);
    part.cols = lines;
    local.codes = codes;
    local.scales = scales;
    local.geometry = &geometry;
    if (target->level_per_line)
        local.levels += panel->col + col;
    quantize_other(&part, coding, &local);
    for (int64_t l = 0; l < lines; l++) {
        memcpy(stage->codes[line + l] + slot * 8, codes + l * 8, 8);
        stage->scales[slot][line + l] = scales[l];
    }
}

/* Sixteen whole rows of sixteen columns into the stage. False, and nothing done, where this is not the way. */
SIMD bool stage_columns(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target,
                        int64_t row, int64_t col, nib_dtype dtype, bool transform, bool square, uint8_t floor_code,
                        struct lane_scaler *scaler, struct column_signs *signs, int64_t line, int slot,
                        struct column_stage *stage)
{
    const bool quarter = transform && dtype == NIB_F32;
    struct column_tile tile;
    VI amax[COLUMN_GROUPS];
    VF factor[COLUMN_GROUPS];
    bool good = true;
    if (!transform)
        copy_columns(panel, row, col, dtype, &tile, amax);
    UNROLL
    for (int g = 0; g < COLUMN_GROUPS; g++)
        if (transform)
            amax[g] = transform_columns(panel, row, col, g, dtype, signs, tile.x[g]);
    if (square) {
        for (int g = 1; g < COLUMN_GROUPS; g++)
            amax[0] = vi_max(amax[0], amax[g]);
        const VI largest = vi_largest_everywhere(amax[0]);
        for (int g = 0; g < COLUMN_GROUPS; g++)
            amax[g] = largest;
    }
    UNROLL
    for (int g = 0; g < COLUMN_GROUPS; g++) {
        VF a = vf_of(amax[g]);
        if (quarter) { /* exact within these bounds, and what is so much smaller than the amax has no say */
            good &=
                vf_all_less(a, vf_set1(0x1p100f)) &&
                vf_all_less(vf_set1(0x1p-100f), vf_of(vi_select_less(vf_set1(0), a, vi_of(a), vi_of(vf_set1(1.0f)))));
            a = vf_mul(a, vf_set1(0.25f));
        }
        if (target->level_per_line)
            *scaler = lane_scaler_for(coding, target, panel->col + col + g * VL, VL);
        const struct scales s = te_scales_near(vf_mul(a, scaler->block), floor_code, scaler);
        good &= vf_all_less(vf_mul(a, s.factor), vf_set1(7.0f)); /* not so for a NaN */
        factor[g] = quarter ? vf_mul(s.factor, vf_set1(0.25f)) : s.factor;
        vi_store_low_bytes(stage->scales[slot] + line + g * VL, s.code);
    }
    if (!good)
        return false;
    UNROLL
    for (int g = 0; g < COLUMN_GROUPS; g++)
        column_codes(stage->codes[line + g * VL] + slot * 8, sizeof stage->codes[0], tile.x[g], factor[g]);
    return true;
}

/* Sixteen lines' scales of sixteen blocks: from block by block to line by line. */
SIMD void transpose_scales(const uint8_t *in, int64_t in_stride, uint8_t *out, int64_t out_stride)
{
    __m128i a[16], b[16];
    UNROLL
    for (int i = 0; i < 16; i++)
        a[i] = _mm_loadu_si128((const void *)(in + i * in_stride));
#define WEAVE(from, to, low, high)                  \
    UNROLL                                          \
    for (int i = 0; i < 8; i++) {                   \
        to[2 * i] = low(from[i], from[i + 8]);      \
        to[2 * i + 1] = high(from[i], from[i + 8]); \
    }
    /* Four times each row is woven with the one eight below. */
    WEAVE(a, b, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
    WEAVE(b, a, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
    WEAVE(a, b, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
    WEAVE(b, a, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
#undef WEAVE
    UNROLL
    for (int i = 0; i < 16; i++)
        _mm_storeu_si128((void *)(out + i * out_stride), a[i]);
}

/* Blocks first..first+n-1 of `lines` lines to their places. */
SIMD void store_stage(const struct nib_target *target, const struct column_stage *stage, int64_t line, int64_t lines,
                      int64_t first, int64_t n, int64_t last_length)
{
    const struct nib_copy_geometry *const g = target->geometry;
    uint8_t *const scales = target->scales;
    const bool whole = n == COLUMN_RUN && last_length == BLOCK;
    for (int64_t l = 0; l < lines; l++) {
        uint8_t *const codes = target->codes + (line + l) * g->line_stride + first * 8;
        if (whole)
            memcpy(codes, stage->codes[l], COLUMN_RUN * 8);
        else
            memcpy(codes, stage->codes[l], (size_t)((n - 1) * 8 + (last_length + 1) / 2));
    }
    for (int64_t l = 0; l < lines; l += 16) {
        uint8_t *const to = scales + (line + l) * g->scale_line + first, turned[16][COLUMN_RUN];
        if (whole && !g->swizzled && l + 16 <= lines) {
            transpose_scales(stage->scales[0] + l, COLUMN_LINES, to, g->scale_line);
            continue;
        }
        transpose_scales(stage->scales[0] + l, COLUMN_LINES, turned[0], COLUMN_RUN);
        for (int64_t k = 0; k < nib_min(16, lines - l); k++)
            if (g->swizzled)
                for (int64_t b = 0; b < n; b++)
                    scales[nib_scale_index(g, line + l + k, first + b)] = turned[k][b];
            else
                memcpy(to + k * g->scale_line, turned[k], (size_t)n);
    }
}

SIMD void quantize_columns_as(const struct nib_panel *panel, const struct nib_coding *coding,
                              const struct nib_target *target, nib_dtype dtype, bool transform, bool square,
                              uint8_t floor_code)
{
    struct column_stage stage;
    struct column_signs signs;
    struct lane_scaler scaler = lane_scaler_for(coding, target, panel->col, 1);
    if (transform)
        set_signs(&signs, coding, dtype);
    for (int64_t col = 0; col < panel->cols; col += COLUMN_LINES) {
        const int64_t lines = nib_min(COLUMN_LINES, panel->cols - col);
        for (int64_t row = 0; row < panel->rows; row += COLUMN_RUN * BLOCK) {
            const int64_t rows = nib_min(COLUMN_RUN * BLOCK, panel->rows - row), n = nib_ceil_div(rows, BLOCK);
            for (int64_t band = 0; band < n; band++)
                for (int64_t c = 0; c < lines; c += COLUMNS) {
                    const int64_t at = row + band * BLOCK;
                    if (c + COLUMNS > lines || at + BLOCK > panel->rows ||
                        !stage_columns(panel, coding, target, at, col + c, dtype, transform, square, floor_code,
                                       &scaler, &signs, c, (int)band, &stage))
                        stage_other(panel, coding, target, at, col + c, nib_min(COLUMNS, lines - c), c, (int)band,
                                    &stage);
                }
            store_stage(target, &stage, panel->col + col, lines, (panel->row + row) / BLOCK, n, (rows - 1) % BLOCK + 1);
        }
    }
}

#define DEFINE_COLUMNS(name, dtype, transform, square)                                                              \
    SLOT void name(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target) \
    {                                                                                                               \
        quantize_columns_as(panel, coding, target, dtype, transform, square, coding->floor_code);                   \
    }
#define DEFINE_COLUMNS_OF(name, dtype)                     \
    DEFINE_COLUMNS(columns_##name, dtype, false, false)    \
    DEFINE_COLUMNS(transformed_##name, dtype, true, false) \
    DEFINE_COLUMNS(tiles_##name, dtype, false, true)
DEFINE_COLUMNS_OF(f32, NIB_F32)
DEFINE_COLUMNS_OF(bf16, NIB_BF16)
DEFINE_COLUMNS_OF(f16, NIB_F16)
#undef DEFINE_COLUMNS_OF
#undef DEFINE_COLUMNS

static nib_quantize_fn *columns_kernel(const struct nib_coding *coding, nib_dtype dtype)
{
    static nib_quantize_fn *const kernels[3][3] = { { columns_f32, transformed_f32, tiles_f32 },
                                                    { columns_bf16, transformed_bf16, tiles_bf16 },
                                                    { columns_f16, transformed_f16, tiles_f16 } };
    return kernels[dtype == NIB_F32 ? 0 : dtype == NIB_BF16 ? 1 : 2][coding->tile_lines > 1 ? 2 : coding->transform];
}
