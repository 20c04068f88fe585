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

/* The signs of the transform; a quarter, too, where it comes first. */
struct column_signs {
    float x[BLOCK][VL] __attribute__((aligned(64)));
};

/* Sixteen rows of a run's columns, on their way, and what has become of a run of such bands. The codes of a band are in
 * the order of column_place. */
struct column_stage {
    float numbers[COLUMN_LINES / VL][BLOCK][VL] __attribute__((aligned(64)));
    float factors[COLUMN_LINES] __attribute__((aligned(64)));
    uint8_t codes[COLUMN_RUN][COLUMN_LINES][8] __attribute__((aligned(64)));
    uint8_t scales[COLUMN_RUN][COLUMN_LINES] __attribute__((aligned(64)));
};

/* Where numbers that are a band, or the columns from some on, lie: in the matrix, or padded with zeros. */
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
    struct lane_scaler scaler;
    struct column_signs signs;
};

SIMD void set_signs(struct column_signs *signs, const struct nib_coding *coding, nib_dtype dtype)
{
    const float one = dtype == NIB_F32 ? 1.0f : 0.25f;
    for (int i = 0; i < BLOCK; i++)
        vf_store(signs->x[i], vf_set1(coding->sign_mask >> i & 1 ? -one : one));
}

/* Where the codes of column c of a band are: those of four columns come out as two pairs in two vectors. */
SIMD int64_t column_place(int64_t c) { return c / VL * VL + c % 4 / 2 * (VL / 2) + c % VL / 4 * 2 + c % 2; }
SIMD int64_t column_at(int64_t place)
{
    return place / VL * VL + place % (VL / 2) / 2 * 4 + place % VL / (VL / 2) * 2 + place % 2;
}

/* ---- Numbers and their amaxes ---- */

SIMD VI copy_columns(const struct column_source *from, int g, nib_dtype dtype, float (*out)[VL])
{
    struct column_amax amax;
    UNROLL
    for (int i = 0; i < BLOCK; i += 2) {
        const char *const x = from->x + i * from->row_bytes, *const next = x + from->row_bytes;
        if (g == 0) {
            _mm_prefetch(x + from->ahead, _MM_HINT_T0);
            _mm_prefetch(next + from->ahead, _MM_HINT_T0);
        }
        const VF a = load_numbers(x, g * VL, dtype), b = load_numbers(next, g * VL, dtype);
        vf_store(out[i], a);
        vf_store(out[i + 1], b);
        column_amax_of(&amax, i / 2, a, b);
    }
    return column_amax_bits(&amax);
}

/* The butterflies of transform() at strides 1, 2 and 4 on eight rows. The signs are factors: products with them are
 * exact, so that a fused sum rounds as a plain one does. */
SIMD void transform_eight(const struct column_source *from, int first, int g, nib_dtype dtype,
                          const struct column_signs *signs, VF v[8])
{
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        const char *const x = from->x + (first + i) * from->row_bytes, *const next = x + from->row_bytes;
        if (g == 0) {
            _mm_prefetch(x + from->ahead, _MM_HINT_T0);
            _mm_prefetch(next + from->ahead, _MM_HINT_T0);
        }
        const VF sign = vf_load(signs->x[first + i]), next_sign = vf_load(signs->x[first + i + 1]);
        const VF a = load_numbers(x, g * VL, dtype), b = vf_mul(load_numbers(next, g * VL, dtype), next_sign);
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

/* The whole transform, but for the quarter that FP32 takes last. */
SIMD VI transform_columns(const struct column_source *from, int g, nib_dtype dtype, const struct column_signs *signs,
                          float (*out)[VL])
{
    const bool through_memory = VL < 16; /* eight vectors and what eight others are summed in are too many registers */
    VF first[8], second[8];
    struct column_amax amax;
    transform_eight(from, 0, g, dtype, signs, first);
    UNROLL
    for (int i = 0; i < 8; i++)
        if (through_memory)
            vf_store(out[i], first[i]);
    transform_eight(from, 8, g, dtype, signs, second);
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

/* The numbers of sixteen columns from `line` on, their scales and factors into the stage. False where this is not the
 * way. */
SIMD bool stage_numbers(const struct column_job *job, const struct column_source *from, int64_t col, nib_dtype dtype,
                        bool transform, bool square, uint8_t floor_code, int64_t line, int slot,
                        struct column_stage *stage)
{
    const bool quarter = transform && dtype == NIB_F32;
    VI amax[COLUMN_GROUPS];
    bool good = true;
    UNROLL
    for (int g = 0; g < COLUMN_GROUPS; g++) {
        float(*const out)[VL] = stage->numbers[line / VL + g];
        amax[g] = transform ? transform_columns(from, g, dtype, &job->signs, out) : copy_columns(from, g, dtype, out);
    }
    if (square) {
        for (int g = 1; g < COLUMN_GROUPS; g++)
            amax[0] = vi_max(amax[0], amax[g]);
        const VI largest = vi_largest_everywhere(amax[0]);
        for (int g = 0; g < COLUMN_GROUPS; g++)
            amax[g] = largest;
    }
    UNROLL
    for (int g = 0; g < COLUMN_GROUPS; g++) {
        struct lane_scaler scaler = job->scaler;
        VF a = vf_of(amax[g]);
        if (quarter) { /* exact within these bounds, and what is so much smaller than the amax has no say */
            good &=
                vf_all_less(a, vf_set1(0x1p100f)) &&
                vf_all_less(vf_set1(0x1p-100f), vf_of(vi_select_less(vf_set1(0), a, vi_of(a), vi_of(vf_set1(1.0f)))));
            a = vf_mul(a, vf_set1(0.25f));
        }
        if (job->target->level_per_line) {
            const int64_t at = col + g * VL, left = job->panel->cols - at;
            scaler = lane_scaler_for(job->coding, job->target, job->panel->col + (left > 0 ? at : col),
                                     left > 0 ? (int)nib_min(VL, left) : 1);
        }
        const struct scales s = te_scales_near(vf_mul(a, scaler.block), floor_code, &scaler);
        good &= vf_all_less(vf_mul(a, s.factor), vf_set1(7.0f)); /* not so for a NaN */
        vf_store(stage->factors + line + g * VL, quarter ? vf_mul(s.factor, vf_set1(0.25f)) : s.factor);
        vi_store_low_bytes(stage->scales[slot] + line + g * VL, s.code);
    }
    return good;
}

/* Up to sixteen columns by the lanes of simd.h, where the fast way does not do: as a matrix of its own. */
SLOT void stage_other(const struct column_job *job, int64_t row, int64_t col, int64_t lines, int64_t line, int slot,
                      struct column_stage *stage)
{
    uint8_t codes[COLUMNS * 8] = { 0 }, scales[COLUMNS];
    const struct nib_copy_geometry geometry = {
        .line_stride = 8, .scale_line = 1, .scale_block = 1, .lines_per_scale = 1
    };
    struct nib_panel part = *job->panel;
    struct nib_target local = *job->target;
    part.x = element_address(job->panel, row, col);
    part.row = part.col = 0;
    part.rows = nib_min(BLOCK, job->panel->rows - row);
    part.cols = lines;
    local.codes = codes;
    local.scales = scales;
    local.geometry = &geometry;
    if (local.level_per_line)
        local.levels += job->panel->col + col;
    quantize_other(&part, job->coding, &local);
    for (int64_t l = 0; l < lines; l++) {
        memcpy(stage->codes[slot][column_place(line + l)], codes + l * 8, 8);
        stage->scales[slot][line + l] = scales[l];
    }
}

/* Numbers of up to sixteen rows and columns with zeros beside and below. */
SIMD struct column_source pad_columns(const struct nib_panel *panel, int64_t row, int64_t col, int64_t lines,
                                      nib_dtype dtype, struct column_padding *padding)
{
    const int64_t rows = nib_min(BLOCK, panel->rows - row);
    const size_t bytes = (size_t)(lines * bytes_of(dtype)), padded = (size_t)(nib_ceil_div(lines, COLUMNS) * COLUMNS * bytes_of(dtype));
    for (int64_t i = 0; i < rows; i++) {
        memcpy(padding->x[i], element_address(panel, row + i, col), bytes);
        memset(padding->x[i] + bytes, 0, padded - bytes);
    }
    for (int64_t i = rows; i < BLOCK; i++)
        memset(padding->x[i], 0, padded);
    return (struct column_source){ padding->x[0], sizeof padding->x[0], 0 };
}

/* Sixteen rows (or the last few) of up to COLUMN_LINES columns, as block `slot` of the run. Divisions take long: all
 * columns get their factors before the first needs them. */
SIMD void stage_band(const struct column_job *job, int64_t row, int64_t col, int64_t lines, nib_dtype dtype,
                     bool transform, bool square, uint8_t floor_code, int slot, struct column_stage *stage)
{
    const struct nib_panel *const panel = job->panel;
    const int64_t row_bytes = panel->stride * bytes_of(dtype);
    const int64_t whole = row + BLOCK <= panel->rows ? lines / COLUMNS * COLUMNS : 0;
    struct column_source from = { element_address(panel, row, col), row_bytes, BLOCK * row_bytes };
    struct column_padding padding;
    uint32_t bad = 0;
    for (int64_t c = 0; c < lines; c += COLUMNS) {
        if (c == whole)
            from = pad_columns(panel, row, col + c, lines - c, dtype, &padding);
        if (!stage_numbers(job, &from, col + c, dtype, transform, square, floor_code, c, slot, stage))
            bad |= 1u << c / COLUMNS;
        from.x += COLUMNS * bytes_of(dtype);
    }
    for (int64_t c = 0; c < lines; c += VL)
        column_codes(stage->codes[slot][c], stage->numbers[c / VL], vf_load(stage->factors + c));
    for (int64_t c = 0; bad; c += COLUMNS, bad >>= 1)
        if (bad & 1)
            stage_other(job, row, col + c, nib_min(COLUMNS, lines - c), c, slot, stage);
}

/* ---- A run ---- */

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

/* Blocks 0..n-1 of a run's lines, from block by block to line by line. */
SIMD void store_codes_of(const struct column_stage *stage, int64_t lines, int64_t n, int64_t last_length, uint8_t *out,
                         int64_t stride)
{
    enum { TURNED = VL / 2 };
    const int64_t whole = last_length == BLOCK ? n : n - 1, turned = whole / TURNED * TURNED, full = lines / VL * VL;
    for (int64_t place = 0; place < full; place += TURNED) {
        uint8_t *const to = out + column_at(place) * stride;
        for (int64_t b = 0; b < turned; b += TURNED) {
            VI v[TURNED];
            turn_codes(stage->codes[b][place], sizeof stage->codes[0], v);
            UNROLL
            for (int i = 0; i < TURNED; i++)
                store_whole(to + column_at(i) * stride + b * 8, v[i]);
        }
    }
    for (int64_t l = turned ? full : 0; l < lines; l++)
        for (int64_t b = 0; b < whole; b++)
            memcpy(out + l * stride + b * 8, stage->codes[b][column_place(l)], 8);
    for (int64_t l = 0; l < full && turned; l++)
        for (int64_t b = turned; b < whole; b++)
            memcpy(out + l * stride + b * 8, stage->codes[b][column_place(l)], 8);
    for (int64_t l = 0; l < lines && whole < n; l++)
        memcpy(out + l * stride + whole * 8, stage->codes[whole][column_place(l)], (size_t)(last_length + 1) / 2);
}

SIMD void store_scales_of(const struct column_stage *stage, int64_t line, int64_t lines, int64_t first, int64_t n,
                          const struct nib_copy_geometry *g, uint8_t *scales)
{
    for (int64_t l = 0; l < lines; l += 16) {
        uint8_t *const to = scales + (line + l) * g->scale_line + first, turned[16][COLUMN_RUN];
        if (n == COLUMN_RUN && !g->swizzled && l + 16 <= lines) {
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
    const struct nib_copy_geometry *const g = target->geometry;
    struct column_stage stage;
    struct column_job job = {
        .panel = panel, .coding = coding, .target = target, .scaler = lane_scaler_for(coding, target, panel->col, 1)
    };
    if (transform)
        set_signs(&job.signs, coding, dtype);
    for (int64_t col = 0; col < panel->cols; col += COLUMN_LINES) {
        const int64_t lines = nib_min(COLUMN_LINES, panel->cols - col), line = panel->col + col;
        for (int64_t row = 0; row < panel->rows; row += COLUMN_RUN * BLOCK) {
            const int64_t rows = nib_min(COLUMN_RUN * BLOCK, panel->rows - row), n = nib_ceil_div(rows, BLOCK);
            const int64_t first = (panel->row + row) / BLOCK;
            for (int band = 0; band < n; band++)
                stage_band(&job, row + band * BLOCK, col, lines, dtype, transform, square, floor_code, band, &stage);
            store_codes_of(&stage, lines, n, (rows - 1) % BLOCK + 1, target->codes + line * g->line_stride + first * 8,
                           g->line_stride);
            store_scales_of(&stage, line, lines, first, n, g, target->scales);
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
