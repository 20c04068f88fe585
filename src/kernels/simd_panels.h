/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd_panels.h - panels of a matrix through the lanes of simd.h: rows, columns and square tiles, and the slots that
 * they fill. Included once by the file of each instruction set, after simd.h.
 */

/* ---- Groups of blocks ---- */

/* Where a group lies: lane b is line `line` + b (columns) or block `block` + b of line `line` (rows). */
struct place {
    int64_t line, block;
    bool lanes_are_lines;
    int n, length; /* blocks that are there, and elements in each */
};

SIMD struct codes encode_at(const struct lanes *x, VF factor, const struct nib_coding *coding, const struct place *at)
{
    if (coding->rounding == NIB_ROUND_NEAREST)
        return encode_nearest(x, factor, coding->dialect);
    const VI lane = vi_lane_indices();
    const VI line = vi_set1((int)(uint32_t)(coding->origin_line + at->line));
    const VI block = vi_set1((int)nib_random_column(coding->origin_block + at->block, coding->usage == NIB_COLUMNWISE));
    return encode_stochastic(x, factor, coding, at->lanes_are_lines ? vi_add(line, lane) : line,
                             at->lanes_are_lines ? block : vi_add(block, lane));
}

/* 1x16 blocks from their values to scales and codes. */
SIMD struct codes quantize_group(const struct lanes *x, const struct nib_coding *coding,
                                 const struct lane_scaler *scaler, const struct place *at, VI *scale)
{
    const VF absmax = absmax_of(x);
    struct scales s;
    if (coding->scale_rule == NIB_SCALE_4OVER6)
        s = choose_4over6(x, at->length, absmax, coding, scaler);
    else if (coding->scale_rule == NIB_SCALE_SWEEP)
        s = choose_sweep(x, absmax, coding, scaler, NULL);
    else
        s = rtn_scales(absmax, coding, scaler);
    *scale = s.code;
    return encode_at(x, s.factor, coding, at);
}

/* The bytes of `n` lanes, one after the other: 8 of codes and one of scale each. */
SIMD void group_bytes(const struct codes *codes, VI scale, uint8_t out_codes[GROUP_BYTES], uint8_t out_scales[VL])
{
    vi_store_pairs(out_codes, codes->word[0], codes->word[1]);
    vi_store_low_bytes(out_scales, scale);
}

/* ---- Rows ---- */

SIMD void store_row_group(const struct nib_target *target, int64_t line, int64_t block, int n, int length,
                          const uint8_t *codes, const uint8_t *scales)
{
    const struct nib_usage_geometry *g = target->geometry;
    memcpy(target->codes + line * g->line_stride + block * 8, codes, (size_t)((n - 1) * 8 + (length + 1) / 2));
    if (!g->swizzled) {
        memcpy((uint8_t *)target->scales + line * g->scale_line + block, scales, (size_t)n);
        return;
    }
    for (int b = 0; b < n; b++)
        ((uint8_t *)target->scales)[nib_scale_index(g, line, block + b)] = scales[b];
}

/* One row of 1x16 blocks, VL at a time; a last block that is not whole alone. */
SIMD void quantize_row(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target,
                       int64_t row, const struct lane_scaler *scaler, nib_dtype dtype)
{
    const int64_t whole = panel->cols / BLOCK;
    uint8_t codes[GROUP_BYTES], scales[VL];
    struct place at = { .line = panel->row + row, .n = VL, .length = BLOCK };
    for (int64_t b = 0; b * BLOCK < panel->cols; b += at.n) {
        struct lanes x;
        at.block = panel->col / BLOCK + b;
        at.n = (int)nib_min(VL, b < whole ? whole - b : 1);
        at.length = b < whole ? BLOCK : (int)(panel->cols % BLOCK);
        blocks_to_lanes(panel, coding, row, b, at.length, dtype, &x);
        VI scale;
        const struct codes group = quantize_group(&x, coding, scaler, &at, &scale);
        group_bytes(&group, scale, codes, scales);
        store_row_group(target, at.line, at.block, at.n, at.length, codes, scales);
    }
}

/* ---- Rows by a weighted sweep ---- */

/* Up to VL blocks from column `col` on, `length` elements of each, as lanes: 0 for what is not there. */
SIMD void importance_to_lanes(const float *importance, int64_t col, int n, int length, float out[BLOCK][VL])
{
    memset(out, 0, sizeof(float[BLOCK][VL]));
    for (int b = 0; b < n; b++)
        for (int i = 0; i < length; i++)
            out[i][b] = importance[col + b * BLOCK + i];
}

/* VL blocks of all rows, then the next: the importance of channels is the same in every row and is transposed once. */
SIMD void quantize_weighted_as(const struct nib_panel *panel, const struct nib_coding *coding,
                               const struct nib_target *target, nib_dtype dtype)
{
    const int64_t whole = panel->cols / BLOCK;
    float importance[BLOCK][VL] __attribute__((aligned(4 * VL)));
    uint8_t codes[GROUP_BYTES], scales[VL];
    struct lane_scaler scaler = lane_scaler_for(coding, target, panel->row, 1);
    struct place at = { .n = VL };
    for (int64_t b = 0; b * BLOCK < panel->cols; b += at.n) {
        at.block = panel->col / BLOCK + b;
        at.n = (int)nib_min(VL, b < whole ? whole - b : 1);
        at.length = b < whole ? BLOCK : (int)(panel->cols % BLOCK);
        importance_to_lanes(coding->importance, at.block * BLOCK, at.n, at.length, importance);
        for (int64_t row = 0; row < panel->rows; row++) {
            struct lanes x;
            at.line = panel->row + row;
            if (target->tensor_scale_per_line)
                scaler = lane_scaler_for(coding, target, at.line, 1);
            blocks_to_lanes(panel, coding, row, b, at.length, dtype, &x);
            const struct scales s = choose_sweep(&x, absmax_of(&x), coding, &scaler, (group_vectors)importance);
            const struct codes group = encode_at(&x, s.factor, coding, &at);
            group_bytes(&group, s.code, codes, scales);
            store_row_group(target, at.line, at.block, at.n, at.length, codes, scales);
        }
    }
}

/* A function of its own, so that it leaves the registers of the others alone. */
__attribute__((noinline)) SLOT void quantize_weighted(const struct nib_panel *panel, const struct nib_coding *coding,
                                                      const struct nib_target *target)
{
    if (panel->dtype == NIB_F32)
        quantize_weighted_as(panel, coding, target, NIB_F32);
    else if (panel->dtype == NIB_BF16)
        quantize_weighted_as(panel, coding, target, NIB_BF16);
    else
        quantize_weighted_as(panel, coding, target, NIB_F16);
}

/* ---- Columns ---- */

enum { COLUMN_RUN = 16, COLUMN_LINES = 128 }; /* blocks gathered before they are written, and columns */

struct column_run {
    uint8_t codes[COLUMN_LINES][COLUMN_RUN * 8];
    uint8_t scales[COLUMN_LINES][COLUMN_RUN];
};

/* Blocks first..first+n-1 of `lines` lines, gathered, to their places: one run of memory per line. */
SIMD void store_column_run(const struct nib_target *target, const struct column_run *run, int64_t line, int64_t lines,
                           int64_t first, int64_t n, int64_t last_length)
{
    const struct nib_usage_geometry *g = target->geometry;
    for (int64_t l = 0; l < lines; l++) {
        memcpy(target->codes + (line + l) * g->line_stride + first * 8, run->codes[l],
               (size_t)((n - 1) * 8 + (last_length + 1) / 2));
        if (!g->swizzled) {
            memcpy((uint8_t *)target->scales + (line + l) * g->scale_line + first, run->scales[l], (size_t)n);
            continue;
        }
        for (int64_t b = 0; b < n; b++)
            ((uint8_t *)target->scales)[nib_scale_index(g, line + l, first + b)] = run->scales[l][b];
    }
}

/* 16 rows (or the last few) of up to COLUMN_LINES columns, as block `slot` of the run. */
SIMD void quantize_column_band(const struct nib_panel *panel, const struct nib_coding *coding,
                               const struct nib_target *target, int64_t row, int64_t col, int64_t lines, int slot,
                               struct column_run *run, nib_dtype dtype)
{
    struct place at = { .block = (panel->row + row) / BLOCK,
                        .lanes_are_lines = true,
                        .length = (int)nib_min(BLOCK, panel->rows - row) };
    struct lane_scaler scaler = lane_scaler_for(coding, target, panel->col + col, 1);
    for (int64_t c = 0; c < lines; c += VL) {
        struct lanes x;
        at.line = panel->col + col + c;
        at.n = (int)nib_min(VL, lines - c);
        if (target->tensor_scale_per_line)
            scaler = lane_scaler_for(coding, target, at.line, at.n);
        columns_to_lanes(panel, coding, row, col + c, at.n, at.length, dtype, &x);
        VI scale;
        const struct codes group = quantize_group(&x, coding, &scaler, &at, &scale);
        uint8_t codes[GROUP_BYTES], scales[VL];
        group_bytes(&group, scale, codes, scales);
        for (int lane = 0; lane < at.n; lane++) {
            memcpy(run->codes[c + lane] + slot * 8, codes + lane * 8, 8);
            run->scales[c + lane][slot] = scales[lane];
        }
    }
}

SIMD void quantize_columns(const struct nib_panel *panel, const struct nib_coding *coding,
                           const struct nib_target *target, nib_dtype dtype)
{
    struct column_run run;
    for (int64_t col = 0; col < panel->cols; col += COLUMN_LINES) {
        const int64_t lines = nib_min(COLUMN_LINES, panel->cols - col);
        for (int64_t row = 0; row < panel->rows; row += COLUMN_RUN * BLOCK) {
            const int64_t rows = nib_min(COLUMN_RUN * BLOCK, panel->rows - row), n = nib_ceil_div(rows, BLOCK);
            for (int64_t band = 0; band < n; band++)
                quantize_column_band(panel, coding, target, row + band * BLOCK, col, lines, (int)band, &run, dtype);
            store_column_run(target, &run, panel->col + col, lines, (panel->row + row) / BLOCK, n,
                             (rows - 1) % BLOCK + 1);
        }
    }
}

/* ---- The slots ---- */

SIMD void quantize_as(const struct nib_panel *panel, const struct nib_coding *coding, const struct nib_target *target,
                      nib_dtype dtype)
{
    if (coding->usage == NIB_COLUMNWISE) {
        quantize_columns(panel, coding, target, dtype);
        return;
    }
    struct lane_scaler scaler = lane_scaler_for(coding, target, panel->row, 1);
    for (int64_t row = 0; row < panel->rows; row++) {
        if (target->tensor_scale_per_line)
            scaler = lane_scaler_for(coding, target, panel->row + row, 1);
        quantize_row(panel, coding, target, row, &scaler, dtype);
    }
}

/* 16 rows of VL tiles side by side. The tiles' scales come from all their rows; then each row is coded with them. */
SIMD void quantize_tile_rows(const struct nib_panel *panel, const struct nib_coding *coding,
                             const struct nib_target *target, int64_t row, int64_t first,
                             const struct lane_scaler *scaler, nib_dtype dtype)
{
    const int lines = (int)nib_min(BLOCK, panel->rows - row);
    const int64_t whole = panel->cols / BLOCK;
    struct place at = { .block = panel->col / BLOCK + first, .n = (int)nib_min(VL, first < whole ? whole - first : 1) };
    at.length = first < whole ? BLOCK : (int)(panel->cols % BLOCK);
    struct lanes x[BLOCK];
    VF absmax = vf_set1(0), error_four[BLOCK], error_six[BLOCK];
    for (int l = 0; l < lines; l++) {
        blocks_to_lanes(panel, coding, row + l, first, at.length, dtype, &x[l]);
        absmax = vf_max(absmax_of(&x[l]), absmax);
    }
    struct scales s = rtn_scales(absmax, coding, scaler);
    if (coding->scale_rule == NIB_SCALE_4OVER6) {
        struct scales four, six;
        four_and_six(absmax, coding, scaler, &four, &six);
        UNROLL
        for (int l = 0; l < BLOCK; l++) {
            error_four[l] = l < lines ? line_error(&x[l], at.length, &four, coding, scaler) : vf_set1(0);
            error_six[l] = l < lines ? line_error(&x[l], at.length, &six, coding, scaler) : vf_set1(0);
        }
        UNROLL
        for (int distance = BLOCK / 2; distance > 0; distance /= 2)
            UNROLL
        for (int l = 0; l < distance; l++) {
            error_four[l] = vf_add(error_four[l], error_four[l + distance]);
            error_six[l] = vf_add(error_six[l], error_six[l + distance]);
        }
        s = better(error_four[0], error_six[0], &four, &six);
    }
    for (int l = 0; l < lines; l++) {
        at.line = panel->row + row + l;
        const struct codes group = encode_at(&x[l], s.factor, coding, &at);
        uint8_t codes[GROUP_BYTES], scales[VL];
        group_bytes(&group, s.code, codes, scales);
        store_row_group(target, at.line, at.block, at.n, at.length, codes, scales);
    }
}

SIMD void quantize_tiles(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target, nib_dtype dtype)
{
    const struct lane_scaler scaler = lane_scaler_for(coding, target, 0, 1);
    const int64_t whole = panel->cols / BLOCK;
    for (int64_t row = 0; row < panel->rows; row += BLOCK)
        for (int64_t b = 0; b * BLOCK < panel->cols; b += b < whole ? nib_min(VL, whole - b) : 1)
            quantize_tile_rows(panel, coding, target, row, b, &scaler, dtype);
}

/* One 16x16 tile of the columnwise usage: lanes are lines of the same tile, so that its amax and its errors go across
 * them. */
enum { TILE_GROUPS = BLOCK / VL };

SIMD struct scales tile_4over6(const struct lanes x[TILE_GROUPS], int length, VF absmax,
                               const struct nib_coding *coding, const struct lane_scaler *scaler)
{
    struct scales four, six;
    float error_four[BLOCK], error_six[BLOCK];
    four_and_six(absmax, coding, scaler, &four, &six);
    for (int g = 0; g < TILE_GROUPS; g++) { /* lines outside the matrix are zeros and err by nothing */
        vf_store(error_four + g * VL, line_error(&x[g], length, &four, coding, scaler));
        vf_store(error_six + g * VL, line_error(&x[g], length, &six, coding, scaler));
    }
    UNROLL
    for (int distance = BLOCK / 2; distance > 0; distance /= 2)
        UNROLL
    for (int l = 0; l < distance; l++) {
        error_four[l] += error_four[l + distance];
        error_six[l] += error_six[l + distance];
    }
    return error_four[0] < error_six[0] ? four : six;
}

SIMD void quantize_tile_columns(const struct nib_panel *panel, const struct nib_coding *coding,
                                const struct nib_target *target, int64_t row, int64_t col,
                                const struct lane_scaler *scaler, nib_dtype dtype)
{
    const struct nib_usage_geometry *geometry = target->geometry;
    const int lines = (int)nib_min(BLOCK, panel->cols - col), length = (int)nib_min(BLOCK, panel->rows - row);
    const int64_t block = (panel->row + row) / BLOCK;
    struct lanes x[TILE_GROUPS];
    float amax[VL], largest = 0;
    for (int g = 0; g < TILE_GROUPS; g++) {
        const int n = (int)nib_min(VL, nib_max(lines - g * VL, 0));
        columns_to_lanes(panel, coding, row, col + g * VL, n, length, dtype, &x[g]);
        vf_store(amax, absmax_of(&x[g]));
        for (int lane = 0; lane < VL; lane++)
            largest = amax[lane] > largest ? amax[lane] : largest;
    }
    const VF absmax = vf_set1(largest);
    const struct scales s = coding->scale_rule == NIB_SCALE_4OVER6 ? tile_4over6(x, length, absmax, coding, scaler)
                                                                   : rtn_scales(absmax, coding, scaler);
    for (int g = 0; g < TILE_GROUPS; g++) {
        const struct codes group = encode_nearest(&x[g], s.factor, coding->dialect);
        uint8_t codes[GROUP_BYTES], scales[VL];
        group_bytes(&group, s.code, codes, scales);
        for (int lane = 0; lane < VL && g * VL + lane < lines; lane++) {
            const int64_t line = panel->col + col + g * VL + lane;
            memcpy(target->codes + line * geometry->line_stride + block * 8, codes + lane * 8,
                   (size_t)(length + 1) / 2);
            ((uint8_t *)target->scales)[nib_scale_index(geometry, line, block)] = scales[lane];
        }
    }
}

SIMD void quantize_column_tiles(const struct nib_panel *panel, const struct nib_coding *coding,
                                const struct nib_target *target, nib_dtype dtype)
{
    const struct lane_scaler scaler = lane_scaler_for(coding, target, 0, 1);
    for (int64_t row = 0; row < panel->rows; row += BLOCK)
        for (int64_t col = 0; col < panel->cols; col += BLOCK)
            quantize_tile_columns(panel, coding, target, row, col, &scaler, dtype);
}

/* What is done here; the rest is the reference's. The columnwise usage of square tiles needs random bits
 * across its lanes, and a last block of another dialect may have a factor that makes something of nothing. */
static bool supports(const struct nib_panel *panel, const struct nib_coding *coding)
{
    const bool tail = (coding->usage == NIB_ROWWISE ? panel->cols : panel->rows) % BLOCK;
    if (coding->dialect->elements.keeps_nan_sign || (tail && coding->dialect->fixed))
        return false;
    return !(coding->tile_lines > 1 && coding->usage == NIB_COLUMNWISE && coding->rounding != NIB_ROUND_NEAREST);
}

SIMD void quantize_generic_shape(const struct nib_panel *panel, const struct nib_coding *coding,
                                 const struct nib_target *target, nib_dtype dtype)
{
    if (coding->tile_lines > 1 && coding->usage == NIB_ROWWISE)
        quantize_tiles(panel, coding, target, dtype);
    else if (coding->tile_lines > 1)
        quantize_column_tiles(panel, coding, target, dtype);
    else
        quantize_as(panel, coding, target, dtype);
}

/* Compiled once per dtype, so that loads are decided once. */
SIMD void quantize_lanes(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    if (!supports(panel, coding))
        nib_kernels_scalar.quantize[NIB_NVFP4](panel, coding, target);
    else if (coding->importance)
        quantize_weighted(panel, coding, target);
    else if (panel->dtype == NIB_F32)
        quantize_generic_shape(panel, coding, target, NIB_F32);
    else if (panel->dtype == NIB_BF16)
        quantize_generic_shape(panel, coding, target, NIB_BF16);
    else
        quantize_generic_shape(panel, coding, target, NIB_F16);
}

/* ---- Largest magnitudes per line ---- */

SIMD void absmax_columns(const struct nib_panel *panel, const struct nib_coding *coding, float *out, nib_dtype dtype)
{
    for (int64_t row = 0; row < panel->rows; row += BLOCK)
        for (int64_t col = 0; col < panel->cols; col += VL) {
            const int n = (int)nib_min(VL, panel->cols - col), length = (int)nib_min(BLOCK, panel->rows - row);
            struct lanes x;
            float amax[VL];
            columns_to_lanes(panel, coding, row, col, n, length, dtype, &x);
            vf_store(amax, absmax_of(&x));
            for (int lane = 0; lane < n; lane++)
                out[col + lane] = amax[lane] > out[col + lane] ? amax[lane] : out[col + lane];
        }
}

/* Rows after RHT, which are whole blocks. */
SIMD void absmax_rht_rows(const struct nib_panel *panel, const struct nib_coding *coding, float *out, nib_dtype dtype)
{
    for (int64_t row = 0; row < panel->rows; row++) {
        VF absmax = vf_set1(0);
        for (int64_t b = 0; b < panel->cols / BLOCK; b += VL) { /* lanes without a block have the last one again */
            struct lanes x;
            blocks_to_lanes(panel, coding, row, b, BLOCK, dtype, &x);
            absmax = vf_max(absmax_of(&x), absmax);
        }
        float amax[VL];
        vf_store(amax, absmax);
        for (int lane = 0; lane < VL; lane++)
            out[row] = amax[lane] > out[row] ? amax[lane] : out[row];
    }
}

SIMD void absmax_lines_lanes(const struct nib_panel *panel, const struct nib_coding *coding, float *out)
{
    if (coding->usage == NIB_COLUMNWISE && panel->dtype == NIB_F32)
        absmax_columns(panel, coding, out, NIB_F32);
    else if (coding->usage == NIB_COLUMNWISE && panel->dtype == NIB_BF16)
        absmax_columns(panel, coding, out, NIB_BF16);
    else if (coding->usage == NIB_COLUMNWISE)
        absmax_columns(panel, coding, out, NIB_F16);
    else if (coding->rht && panel->cols % BLOCK)
        nib_kernels_scalar.absmax_lines[NIB_GENERIC_FORMAT](panel, coding, out);
    else if (coding->rht && panel->dtype == NIB_F32)
        absmax_rht_rows(panel, coding, out, NIB_F32);
    else if (coding->rht && panel->dtype == NIB_BF16)
        absmax_rht_rows(panel, coding, out, NIB_BF16);
    else if (coding->rht)
        absmax_rht_rows(panel, coding, out, NIB_F16);
    else
        for (int64_t row = 0; row < panel->rows; row++)
            out[row] = nib_fmax(out[row], absmax_row(element_address(panel, row, 0), panel->cols, panel->dtype));
}
