/* SPDX-License-Identifier: Apache-2.0 */
/*
 * columns.h - the columnwise usage by te's rule to nearest, with RHT or without. Included once by the file of each x86
 * instruction set, after rows.h.
 *
 * Lanes are columns. Sixteen rows of some columns, a band, go through in three phases, so that what one column waits for
 * (its values, the chain of its amax, a division) overlaps with the work on others: values are copied on the way to the
 * amaxes, amaxes become scales and factors, and the copies become codes. They are copied since sixteen rows of a wide
 * matrix may share few places of the first-level cache. A run of bands is gathered before it is written, block by block,
 * and transposed then. What is less than sixteen rows or a tile of columns is padded with zeros. Where the rowwise usage is
 * wanted too, the rows of a band are coded before its columns, which then find them in the cache.
 *
 * As in rows.h columns that hold a NaN, or values that need a clamp, are left to the lanes of simd.h.
 *
 * The including file defines column_amax_of and column_amax_bits, which show a NaN as one, column_bf16, column_larger_words,
 * largest_of_squares, column_codes, which gives eight bytes for each lane, transpose_codes and store_whole.
 */

enum { MOST_COLUMNS = VL < 16 ? 16 : 2 * VL };

/* Columns that go through at once, VL of them in a group. Those of BF16 are split into even and odd ones, which is a
 * shift and a mask. */
SIMD int columns_of(nib_dtype dtype) { return dtype == NIB_BF16 ? 2 * VL : 16; }
SIMD int column_groups(nib_dtype dtype) { return columns_of(dtype) / VL; }

/* The column of a lane, from the first of its group's tile on. */
SIMD int column_of_lane(int g, int lane, nib_dtype dtype) { return dtype == NIB_BF16 ? 2 * lane + g : g * VL + lane; }

/* The signs of RHT; a quarter, too, where it comes first. */
struct column_signs {
    float x[BLOCK][VL] __attribute__((aligned(64)));
};

/* Sixteen rows of some columns, on their way. */
struct column_stage {
    float values[COLUMN_LINES / VL][BLOCK][VL] __attribute__((aligned(64)));
    float factors[COLUMN_LINES] __attribute__((aligned(64)));
};

/* What has become of a run of such bands. The codes and scales of a band are in orders of their own (place_of_column,
 * lane_of_column). */
struct column_blocks {
    uint8_t codes[COLUMN_RUN][COLUMN_LINES][8] __attribute__((aligned(64)));
    uint8_t scales[COLUMN_RUN][COLUMN_LINES] __attribute__((aligned(64)));
};

/* So many of them side by side: bands that are wide are read from memory more bytes at a time. */
enum { COLUMN_PARTS = 4, WIDE_COLUMNS = COLUMN_PARTS * COLUMN_LINES };

/* Where values that are a band, or the columns from some on, lie: in the matrix, or padded with zeros. */
struct column_source {
    const char *x;
    int64_t row_bytes, ahead;
};

struct column_padding {
    char x[BLOCK][COLUMN_LINES * 4] __attribute__((aligned(64)));
};

/* What the bands of a panel have in common. */
struct column_job {
    const struct nib_panel *panel;
    const struct nib_coding *coding;
    const struct nib_target *target;
    struct strip_job *rows; /* of the rowwise usage, or NULL */
    struct lane_scaler scaler;
    struct column_signs signs;
};

SIMD void set_signs(struct column_signs *signs, const struct nib_coding *coding, nib_dtype dtype)
{
    const float one = dtype == NIB_F32 ? 1.0f : 0.25f;
    for (int i = 0; i < BLOCK; i++)
        vf_store(signs->x[i], vf_set1(coding->sign_mask >> i & 1 ? -one : one));
}

/* The codes and scales of a band are by tiles and groups. Within a group the codes of four columns come out as two pairs
 * in two vectors. */
SIMD int64_t column_at(int64_t lane, nib_dtype dtype)
{
    const int columns = columns_of(dtype), c = (int)(lane % columns);
    return lane - c + column_of_lane(c / VL, c % VL, dtype);
}
SIMD int lane_at(int place) { return place % (VL / 2) / 2 * 4 + place % VL / (VL / 2) * 2 + place % 2; }
SIMD int64_t lane_of_column(int64_t column, nib_dtype dtype)
{
    const int columns = columns_of(dtype), c = (int)(column % columns);
    return dtype == NIB_BF16 ? column - c + c % 2 * VL + c / 2 : column;
}
SIMD int64_t place_of_column(int64_t column, nib_dtype dtype)
{
    const int64_t lane = lane_of_column(column, dtype);
    return lane / VL * VL + lane % 4 / 2 * (VL / 2) + lane % VL / 4 * 2 + lane % 2;
}

/* ---- Values and their amaxes ---- */

/* What is sixteen rows below arrives meanwhile: in the second level, since sixteen rows may share few places of the
 * first. */
SIMD void prefetch_below(const struct column_source *from, const char *x)
{
    _mm_prefetch(x + from->ahead, _MM_HINT_T1);
}

SIMD VI even_columns(VI words) { return vi_sll(words, 16); }
SIMD VI odd_columns(VI words) { return vi_and(words, vi_set1((int)0xFFFF0000u)); }

SIMD VF column_values(const void *x, int g, nib_dtype dtype)
{
    if (dtype != NIB_BF16)
        return load_values(x, g * VL, dtype);
    return vf_of(g ? odd_columns(vi_load(x)) : even_columns(vi_load(x)));
}

SIMD VI copy_columns(const struct column_source *from, int g, nib_dtype dtype, float (*out)[VL])
{
    struct column_amax amax;
    UNROLL
    for (int i = 0; i < BLOCK; i += 2) {
        const char *const x = from->x + i * from->row_bytes, *const next = x + from->row_bytes;
        if (g == 0) {
            prefetch_below(from, x);
            prefetch_below(from, next);
        }
        const VF a = column_values(x, g, dtype), b = column_values(next, g, dtype);
        vf_store(out[i], a);
        vf_store(out[i + 1], b);
        column_amax_of(&amax, i / 2, a, b);
    }
    return column_amax_bits(&amax);
}

/* BF16 as it is, both groups at once; magnitudes order as integers, NaNs above infinity. */
SIMD void copy_words(const struct column_source *from, float (*out)[VL], VI amax[2])
{
    VI m[2];
    UNROLL
    for (int i = 0; i < BLOCK; i++) {
        const char *const x = from->x + i * from->row_bytes;
        const VI words = vi_load((const void *)x);
        prefetch_below(from, x);
        const VI a = vi_and(words, vi_set1(0x7FFF7FFF));
        vf_store(out[i], vf_of(words));
        m[i % 2] = i < 2 ? a : column_larger_words(m[i % 2], a);
    }
    const VI both = column_larger_words(m[0], m[1]);
    amax[0] = even_columns(both);
    amax[1] = odd_columns(both);
}

/* The butterflies of rht() at strides 1, 2 and 4 on eight rows. The signs are factors: products with them are
 * exact, so that a fused sum rounds as a sum alone does. */
SIMD void rht_eight(const struct column_source *from, int first, int g, nib_dtype dtype,
                    const struct column_signs *signs, VF v[8])
{
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        const char *const x = from->x + (first + i) * from->row_bytes, *const next = x + from->row_bytes;
        if (g == 0) {
            prefetch_below(from, x);
            prefetch_below(from, next);
        }
        const VF sign = vf_load(signs->x[first + i]), next_sign = vf_load(signs->x[first + i + 1]);
        const VF a = column_values(x, g, dtype), b = vf_mul(column_values(next, g, dtype), next_sign);
        v[i] = vf_multiply_add(a, sign, b);
        v[i + 1] = vf_multiply_sub(a, sign, b);
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

/* The whole RHT, but for the quarter, which comes last for FP32. */
SIMD VI rht_columns(const struct column_source *from, int g, nib_dtype dtype, const struct column_signs *signs,
                    float (*out)[VL])
{
    const bool through_memory = VL < 16; /* eight vectors and what eight others are summed in are too many registers */
    VF first[8], second[8];
    struct column_amax amax;
    rht_eight(from, 0, g, dtype, signs, first);
    UNROLL
    for (int i = 0; i < 8; i++)
        if (through_memory)
            vf_store(out[i], first[i]);
    rht_eight(from, 8, g, dtype, signs, second);
    UNROLL
    for (int i = 0; i < 8; i++) {
        const VF a = through_memory ? vf_load(out[i]) : first[i], b = second[i];
        VF sum = vf_add(a, b), difference = vf_sub(a, b);
        if (dtype == NIB_BF16) {
            sum = column_bf16(sum);
            difference = column_bf16(difference);
        }
        vf_store(out[i], sum);
        vf_store(out[8 + i], difference);
        column_amax_of(&amax, i, sum, difference);
    }
    return column_amax_bits(&amax);
}

/* ---- A band ---- */

SIMD struct lane_scaler column_scaler(const struct column_job *job, int64_t col, int g, nib_dtype dtype)
{
    const int64_t last = job->panel->cols - 1;
    float tensor_scales[VL];
    struct nib_target local = *job->target;
    local.tensor_scales = tensor_scales;
    for (int lane = 0; lane < VL; lane++)
        tensor_scales[lane] =
            job->target->tensor_scales[job->panel->col + nib_min(col + column_of_lane(g, lane, dtype), last)];
    return lane_scaler_for(job->coding, &local, 0, VL);
}

/* The values of as many columns as go at once, and their amaxes where the factors will be, into the stage. */
SIMD void stage_values(const struct column_job *job, const struct column_source *from, nib_dtype dtype, bool rht,
                       bool square, int64_t line, struct column_stage *stage)
{
    VI amax[MOST_COLUMNS / VL];
    if (dtype == NIB_BF16 && !rht)
        copy_words(from, stage->values[line / VL], amax);
    else
        UNROLL
    for (int g = 0; g < column_groups(dtype); g++) {
        float(*const out)[VL] = stage->values[line / VL + g];
        amax[g] = rht ? rht_columns(from, g, dtype, &job->signs, out) : copy_columns(from, g, dtype, out);
    }
    if (square)
        largest_of_squares(amax, dtype);
    UNROLL
    for (int g = 0; g < column_groups(dtype); g++)
        vf_store(stage->factors + line + g * VL, vf_of(amax[g]));
}

/* From amaxes to scales and factors. False where this is not the way. */
SIMD bool stage_scales(const struct column_job *job, int64_t col, int g, nib_dtype dtype, bool quarter,
                       uint8_t floor_code, int64_t line, uint8_t *scales, struct column_stage *stage)
{
    struct lane_scaler scaler = job->scaler;
    VF a = vf_load(stage->factors + line + g * VL);
    bool good = true;
    if (quarter) { /* exact within these bounds, and what is so much smaller than the amax has no say */
        const VF b = vf_of(vi_select_less(vf_set1(0), a, vi_of(a), vi_of(vf_set1(1.0f))));
        good = (int)vf_all_less(a, vf_set1(0x1p100f)) & (int)vf_all_less(vf_set1(0x1p-100f), b);
        a = vf_mul(a, vf_set1(0.25f));
    }
    if (job->target->tensor_scale_per_line)
        scaler = column_scaler(job, col, g, dtype);
    const struct scales s = te_scales_near(vf_mul(a, scaler.block), floor_code, &scaler);
    good &= vf_all_less(vf_mul(a, s.factor), vf_set1(7.0f)); /* not so for a NaN */
    vf_store(stage->factors + line + g * VL, quarter ? vf_mul(s.factor, vf_set1(0.25f)) : s.factor);
    vi_store_low_bytes(scales + line + g * VL, s.code);
    return good;
}

/* Columns by the lanes of simd.h, where the fast way does not do: as a matrix of its own. */
SLOT void stage_other(const struct column_job *job, int64_t row, int64_t col, int64_t lines, int64_t line, int slot,
                      struct column_blocks *blocks)
{
    const nib_dtype dtype = job->panel->dtype;
    uint8_t codes[MOST_COLUMNS * 8] = { 0 }, scales[MOST_COLUMNS];
    const struct nib_usage_geometry geometry = {
        .line_stride = 8, .scale_line = 1, .scale_block = 1, .lines_per_scale = 1
    };
    struct nib_panel part = part_of(job->panel, row, col, nib_min(BLOCK, job->panel->rows - row), lines);
    struct nib_target local = *job->target;
    part.row = part.col = 0;
    local.codes = codes;
    local.scales = scales;
    local.geometry = &geometry;
    if (local.tensor_scale_per_line)
        local.tensor_scales += job->panel->col + col;
    quantize_other(&part, job->coding, &local);
    for (int64_t l = 0; l < lines; l++) {
        memcpy(blocks->codes[slot][place_of_column(line + l, dtype)], codes + l * 8, 8);
        blocks->scales[slot][lane_of_column(line + l, dtype)] = scales[l];
    }
}

/* The values of up to sixteen rows and of columns with zeros beside and below. */
SIMD struct column_source pad_columns(const struct nib_panel *panel, int64_t row, int64_t col, int64_t lines,
                                      nib_dtype dtype, struct column_padding *padding)
{
    const int64_t rows = nib_min(BLOCK, panel->rows - row), tile_bytes = columns_of(dtype) * bytes_of(dtype);
    const size_t bytes = (size_t)(lines * bytes_of(dtype));
    const size_t padded = (size_t)(nib_ceil_div((int64_t)bytes, tile_bytes) * tile_bytes);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(padding->x[i], element_address(panel, row + i, col), bytes);
        memset(padding->x[i] + bytes, 0, padded - bytes);
    }
    for (int64_t i = rows; i < BLOCK; i++)
        memset(padding->x[i], 0, padded);
    return (struct column_source){ padding->x[0], sizeof padding->x[0], 0 };
}

/* Sixteen rows (or the last few) of up to COLUMN_LINES columns, as block `slot` of the run. Amaxes and
 * divisions take long: what waits for them comes when all columns have theirs. */
SIMD void stage_band(const struct column_job *job, int64_t row, int64_t col, int64_t lines, nib_dtype dtype, bool rht,
                     bool square, uint8_t floor_code, int slot, struct column_stage *stage,
                     struct column_blocks *blocks)
{
    const struct nib_panel *const panel = job->panel;
    const int64_t row_bytes = panel->stride * bytes_of(dtype), columns = columns_of(dtype);
    const int64_t whole = row + BLOCK <= panel->rows ? lines / columns * columns : 0;
    struct column_source from = { element_address(panel, row, col), row_bytes, job->rows ? 0 : BLOCK * row_bytes };
    struct column_padding padding;
    uint32_t bad = 0;
    for (int64_t c = 0; c < lines; c += columns) {
        if (c == whole)
            from = pad_columns(panel, row, col + c, lines - c, dtype, &padding);
        stage_values(job, &from, dtype, rht, square, c, stage);
        from.x += columns * bytes_of(dtype);
    }
    for (int64_t c = 0; c < lines; c += columns) {
        bool good = true;
        for (int g = 0; g < column_groups(dtype); g++)
            good &= stage_scales(job, col + c, g, dtype, rht && dtype == NIB_F32, floor_code, c, blocks->scales[slot],
                                 stage);
        bad |= (uint32_t)!good << c / columns;
    }
    if (dtype == NIB_BF16 && !rht)
        for (int64_t c = 0; c < lines; c += columns) {
            column_codes(blocks->codes[slot][c], stage->values[c / VL], true, 0, vf_load(stage->factors + c));
            column_codes(blocks->codes[slot][c + VL], stage->values[c / VL], true, 1, vf_load(stage->factors + c + VL));
        }
    else
        for (int64_t c = 0; c < nib_ceil_div(lines, columns) * columns; c += VL)
            column_codes(blocks->codes[slot][c], stage->values[c / VL], false, 0, vf_load(stage->factors + c));
    for (int64_t c = 0; bad; c += columns, bad >>= 1)
        if (bad & 1)
            stage_other(job, row, col + c, nib_min(columns, lines - c), c, slot, blocks);
}

/* ---- A run ---- */

/* Sixteen lanes' scales of sixteen blocks: from block by block to line by line, where `order` has the columns of lanes. */
SIMD void transpose_scales(const uint8_t *in, uint8_t *out, int64_t stride, nib_dtype order)
{
    __m128i a[16], b[16];
    UNROLL
    for (int i = 0; i < 16; i++)
        a[i] = _mm_loadu_si128((const void *)(in + i * COLUMN_LINES));
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
        _mm_storeu_si128((void *)(out + column_at(i, order) * stride), a[i]);
}

/* Blocks first..n-1 of whole tiles, copied one by one. */
SIMD void copy_codes(const struct column_blocks *blocks, int64_t lines, int64_t first, int64_t n, nib_dtype dtype,
                     uint8_t *out, int64_t stride)
{
    for (int64_t lane = 0; lane < lines; lane += VL) {
        uint8_t *const to = out + column_at(lane, dtype) * stride;
        for (int64_t b = first; b < n; b++)
            UNROLL
        for (int i = 0; i < VL; i++)
            memcpy(to + column_of_lane(0, lane_at(i), dtype) * stride + b * 8, blocks->codes[b][lane + i], 8);
    }
}

/* The codes of a run's n blocks, from block by block to line by line. */
SIMD void store_codes_of(const struct column_blocks *blocks, int64_t lines, int64_t n, int64_t last_bytes,
                         nib_dtype dtype, uint8_t *out, int64_t stride)
{
    enum { SQUARE = VL / 2 };
    const int64_t whole = last_bytes == 8 ? n : n - 1, in_squares = whole / SQUARE * SQUARE;
    const int64_t full = lines / columns_of(dtype) * columns_of(dtype);
    for (int64_t place = 0; place < (in_squares ? full : 0); place += SQUARE) {
        uint8_t *const to = out + column_at(place / VL * VL + lane_at((int)(place % VL)), dtype) * stride;
        for (int64_t b = 0; b < in_squares; b += SQUARE) {
            VI v[SQUARE];
            transpose_codes(blocks->codes[b][place], sizeof blocks->codes[0], v);
            UNROLL
            for (int i = 0; i < SQUARE; i++)
                store_whole(to + column_of_lane(0, lane_at(i), dtype) * stride + b * 8, v[i]);
        }
    }
    copy_codes(blocks, full, in_squares, whole, dtype, out, stride);
    for (int64_t l = whole < n ? 0 : full; l < lines; l++)
        for (int64_t b = l < full ? whole : 0; b < n; b++)
            memcpy(out + l * stride + b * 8, blocks->codes[b][place_of_column(l, dtype)],
                   b < whole ? 8 : (size_t)last_bytes);
}

SIMD void store_scales_of(const struct column_blocks *blocks, int64_t line, int64_t lines, int64_t first, int64_t n,
                          nib_dtype dtype, const struct nib_usage_geometry *g, uint8_t *scales)
{
    const int64_t whole = g->swizzled ? 0 : lines / columns_of(dtype) * columns_of(dtype);
    uint8_t *const to = scales + line * g->scale_line + first;
    for (int64_t l = 0; l < whole; l += 16) {
        uint8_t *const here = to + column_at(l, dtype) * g->scale_line;
        if (n == COLUMN_RUN)
            transpose_scales(blocks->scales[0] + l, here, g->scale_line, dtype);
        else
            for (int64_t b = 0; b < n; b++)
                UNROLL
        for (int k = 0; k < 16; k++)
            here[column_at(k, dtype) * g->scale_line + b] = blocks->scales[b][l + k];
    }
    for (int64_t l = whole; l < lines; l++)
        for (int64_t b = 0; b < n; b++) {
            const int64_t at =
                g->swizzled ? nib_scale_index(g, line + l, first + b) : (line + l) * g->scale_line + first + b;
            scales[at] = blocks->scales[b][lane_of_column(l, dtype)];
        }
}

/* The places of a run's codes and scales, on as many pages as it has lines: with every band those of some lines, so that
 * they have arrived when the run is stored. (Scales that are swizzled lie together.) */
SIMD void prefetch_places(const struct nib_target *target, int64_t line, int64_t first, int band)
{
    enum { LINES = COLUMN_LINES / COLUMN_RUN };
    const struct nib_usage_geometry *const g = target->geometry;
    const char *codes = (const char *)target->codes + (line + band * LINES) * g->line_stride + first * 8;
    const char *scales = (const char *)target->scales + (line + band * LINES) * g->scale_line + first;
    UNROLL
    for (int i = 0; i < LINES; i++) {
        _mm_prefetch(codes, _MM_HINT_T1);
        _mm_prefetch(codes + 64, _MM_HINT_T1);
        _mm_prefetch(scales, _MM_HINT_T1);
        codes += g->line_stride;
        scales += g->scale_line;
    }
}

/* The rowwise usage of a part of the panel. */
SIMD void code_rows_of(const struct column_job *job, int64_t row, int64_t col, int64_t rows, int64_t cols,
                       nib_dtype dtype)
{
    const struct nib_panel part = part_of(job->panel, row, col, rows, cols);
    job->rows->panel = &part;
    code_rows(job->rows, dtype);
    job->rows->panel = job->panel;
}

/* A run: up to COLUMN_RUN bands of WIDE_COLUMNS. */
SIMD void quantize_run(const struct column_job *job, int64_t row, int64_t col, nib_dtype dtype, bool rht, bool square,
                       uint8_t floor_code)
{
    const struct nib_panel *const panel = job->panel;
    const struct nib_usage_geometry *const g = job->target->geometry;
    const int64_t end = nib_min(col + WIDE_COLUMNS, panel->cols), rows = nib_min(COLUMN_RUN * BLOCK, panel->rows - row);
    const int64_t n = nib_ceil_div(rows, BLOCK), first = (panel->row + row) / BLOCK;
    struct column_stage stage;
    struct column_blocks blocks[COLUMN_PARTS];
    for (int band = 0; band < n; band++) {
        const int64_t top = row + band * BLOCK;
        if (job->rows)
            code_rows_of(job, top, col, nib_min(BLOCK, panel->rows - top), end - col, dtype);
        for (int64_t c = col, part = 0; c < end; c += COLUMN_LINES, part++) {
            prefetch_places(job->target, panel->col + c, first, band);
            stage_band(job, top, c, nib_min(COLUMN_LINES, end - c), dtype, rht, square, floor_code, band, &stage,
                       &blocks[part]);
        }
    }
    for (int64_t c = col, part = 0; c < end; c += COLUMN_LINES, part++) {
        const int64_t lines = nib_min(COLUMN_LINES, end - c), line = panel->col + c;
        store_codes_of(&blocks[part], lines, n, ((rows - 1) % BLOCK + 2) / 2, dtype,
                       job->target->codes + line * g->line_stride + first * 8, g->line_stride);
        store_scales_of(&blocks[part], line, lines, first, n, dtype, g, job->target->scales);
    }
}

SIMD void quantize_columns_as(const struct nib_panel *panel, const struct nib_coding *coding,
                              const struct nib_target *target, struct strip_job *rows, nib_dtype dtype, bool rht,
                              bool square, uint8_t floor_code)
{
    struct column_job job = { .panel = panel,
                              .coding = coding,
                              .target = target,
                              .rows = rows,
                              .scaler = lane_scaler_for(coding, target, panel->col, 1) };
    if (rht)
        set_signs(&job.signs, coding, dtype);
    for (int64_t col = 0; col < panel->cols; col += WIDE_COLUMNS)
        for (int64_t row = 0; row < panel->rows; row += COLUMN_RUN * BLOCK)
            quantize_run(&job, row, col, dtype, rht, square, floor_code);
}

#define DEFINE_COLUMNS(name, dtype, rht, square)                                                                    \
    SLOT void name(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target, \
                   struct strip_job *rows)                                                                          \
    {                                                                                                               \
        quantize_columns_as(panel, coding, target, rows, dtype, rht, square, coding->floor_code);                   \
    }
#define DEFINE_COLUMNS_OF(name, dtype)                     \
    DEFINE_COLUMNS(columns_##name, dtype, false, false)    \
    DEFINE_COLUMNS(rht_columns_##name, dtype, true, false) \
    DEFINE_COLUMNS(tiles_##name, dtype, false, true)
DEFINE_COLUMNS_OF(f32, NIB_F32)
DEFINE_COLUMNS_OF(bf16, NIB_BF16)
DEFINE_COLUMNS_OF(f16, NIB_F16)
#undef DEFINE_COLUMNS_OF
#undef DEFINE_COLUMNS

typedef void columns_fn(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target,
                        struct strip_job *rows);

static columns_fn *columns_kernel(const struct nib_coding *coding, nib_dtype dtype)
{
    static columns_fn *const kernels[3][3] = { { columns_f32, rht_columns_f32, tiles_f32 },
                                               { columns_bf16, rht_columns_bf16, tiles_bf16 },
                                               { columns_f16, rht_columns_f16, tiles_f16 } };
    return kernels[dtype == NIB_F32 ? 0 : dtype == NIB_BF16 ? 1 : 2][coding->tile_lines > 1 ? 2 : coding->rht];
}
