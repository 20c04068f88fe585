/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd_generic.h - the formats of kernels_generic.c for any vector width: E2M1, E4M3 and E5M2 under a scale per block, or under
 * one per tensor. Included once by the file of each instruction set, after simd.h.
 *
 * Values go through in steps of 32, of which blocks are multiples. A row's amaxes are found first and its scales made
 * of them, since those of several blocks are one vector's work; then its values are coded. Columns have a lane each.
 *
 * The including file has, besides what simd.h wants,
 *     VB, vb_*                          bytes in pieces of 16, for simd_transpose.h, which is included before
 *     vf_largest(v)                     the largest lane
 *     vi_is_nan(v), vf_quiet(v)         a mask of NaNs; NaNs become the one NaN
 *     store_step_codes(p, code)         32 codes, a byte each
 *     store_step_nibbles(p, code)       32 codes in 16 bytes
 *     load_step_e2m1(p, v)              and back, as floats
 *     load_step_halves(p, v, e5m2)      32 bytes that are the upper half of an F16 (E5M2) or, shifted, F16s of 2^-8
 *     step_has_nan(v)                   whether one of 32 values may be a NaN
 *     step_has_byte(p, least)           whether one of 32 bytes without their first bits is at least so much
 *     store_step(p, dtype, v, exact, stream)   32 values in an output's dtype, around the caches where `stream`;
 *                                       `exact`: they need no rounding
 *     stores_are_seen()                 after such stores
 */

enum { STEP = 32, STEP_VECTORS = STEP / VL };

/* ---- Codes ---- */

/* The sum of a magnitude and a power of two that is `digits` binades above its own is rounded to the code's digits, and
 * has the digits in its last bits and the exponent in its first: one shift away from each other. Magnitudes below the
 * smallest normal value are treated as if they had its exponent. A NaN is 0x7F, whatever its sign; `clean`: there is
 * none. */
#define DEFINE_MINIFLOAT(name, smallest, digits, offset, largest)                                         \
    SIMD VI name(VF y, bool clean)                                                                        \
    {                                                                                                     \
        const VF a = vf_min(absolute(y), vf_set1(largest));                                               \
        const VF power = vf_max(vf_of(vi_and(vi_of(a), vi_set1(0x7F800000))), vf_set1(smallest));         \
        const VI sum = vi_of(vf_add(a, vf_mul(power, vf_set1((float)(1 << (digits))))));                  \
        const VI code = vi_and(vi_add(vi_add(sum, vi_srl(sum, digits)), vi_set1(offset)), vi_set1(0x7F)); \
        if (clean)                                                                                        \
            return vi_or(code, vi_and(vi_srl(vi_of(y), 24), vi_set1(0x80)));                              \
        const VI nan = vi_is_nan(y), sign = vi_and(vi_srl(vi_andnot(nan, vi_of(y)), 24), vi_set1(0x80));  \
        return vi_or(vi_or(code, vi_srl(nan, 25)), sign);                                                 \
    }
DEFINE_MINIFLOAT(signed_e4m3, 0x1p-6f, 20, -0x468, 448.0f)
DEFINE_MINIFLOAT(signed_e5m2, 0x1p-14f, 21, -0x218, 57344.0f)
#undef DEFINE_MINIFLOAT

SIMD VI signed_e2m1(VF y)
{
    const VF t = clamp_to_e2m1(y);
    return with_sign(e2m1_bits(absolute(t)), t);
}

/* Codes of 32 scaled values. */
SIMD void codes_of_step(const VF y[STEP_VECTORS], nib_dtype element, VI code[STEP_VECTORS])
{
    const bool clean = element == NIB_E2M1 || !step_has_nan(y); /* E2M1 has no NaN to make of one */
    UNROLL
    for (int i = 0; i < STEP_VECTORS; i++)
        if (element == NIB_E2M1)
            code[i] = signed_e2m1(y[i]);
        else if (clean)
            code[i] = element == NIB_E4M3 ? signed_e4m3(y[i], true) : signed_e5m2(y[i], true);
        else
            code[i] = element == NIB_E4M3 ? signed_e4m3(y[i], false) : signed_e5m2(y[i], false);
}

/* ---- Values in steps ---- */

/* n values side by side; those behind the last are 0. */
SIMD void load_step(const void *x, int64_t n, nib_dtype dtype, VF v[STEP_VECTORS])
{
    char padded[STEP * 4];
    if (n < STEP) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, (size_t)n * (dtype == NIB_F32 ? 4 : 2));
        x = padded;
    }
    UNROLL
    for (int i = 0; i < STEP_VECTORS; i++)
        v[i] = load_values(x, i * VL, dtype);
}

/* The largest magnitude of n values side by side. */
SIMD float span_absmax(const char *x, int64_t n, nib_dtype dtype)
{
    const int size = dtype == NIB_F32 ? 4 : 2;
    VF m[STEP_VECTORS], v[STEP_VECTORS];
    UNROLL
    for (int i = 0; i < STEP_VECTORS; i++)
        m[i] = vf_set1(0);
    for (int64_t at = 0; at < n; at += STEP) {
        load_step(x + at * size, n - at, dtype, v);
        UNROLL
        for (int i = 0; i < STEP_VECTORS; i++)
            m[i] = vf_max(absolute(v[i]), m[i]); /* a NaN gives the second operand */
    }
    UNROLL
    for (int i = 1; i < STEP_VECTORS; i++)
        m[0] = vf_max(m[0], m[i]);
    return vf_largest(m[0]);
}

/* Codes of n values side by side under one factor, to bytes side by side. */
SIMD void encode_span(const char *x, int64_t n, nib_dtype dtype, float factor, nib_dtype element, uint8_t *out)
{
    const int size = dtype == NIB_F32 ? 4 : 2, packed = element == NIB_E2M1;
    const VF f = vf_set1(factor);
    for (int64_t at = 0; at < n; at += STEP) {
        VF v[STEP_VECTORS];
        VI code[STEP_VECTORS];
        load_step(x + at * size, n - at, dtype, v);
        UNROLL
        for (int i = 0; i < STEP_VECTORS; i++)
            v[i] = vf_mul(v[i], f);
        codes_of_step(v, element, code);
        uint8_t last[STEP], *const to = at + STEP <= n ? out + at / (1 + packed) : last;
        if (packed)
            store_step_nibbles(to, code);
        else
            store_step_codes(to, code);
        if (to == last)
            memcpy(out + at / (1 + packed), last, (size_t)((n - at + packed) / (1 + packed)));
    }
}

/* ---- Scales ---- */

enum { SCALES = 128 }; /* worked out at a time */

struct any_scales {
    float amax[SCALES], factor[SCALES];
    union {
        uint8_t bytes[SCALES];
        uint32_t words[SCALES]; /* where a scale is as wide */
    } bits;
};

/* mx_block_scale and mx_factor of dialect.c. */
SIMD void mx_scales(struct any_scales *s, int n, const struct nib_rules *rules)
{
    const VF inverse_rht = vf_set1(1.0f / rules->element_max);
    const VI largest = vi_set1((int)(nib_bits(rules->element_max) >> 23) - 127), half = vi_set1(0x400000);
    for (int b = 0; b < n; b += VL) {
        const VF amax = vf_load(s->amax + b);
        VI code;
        if (rules->mx_rule == NIB_MX_CEIL) {
            const VI wanted = vi_of(vf_mul(amax, inverse_rht));
            const VI up = vi_min(vi_srl(vi_add(wanted, vi_set1(0x7FFFFF)), 23), vi_set1(254));
            code = vi_andnot(vi_equal(vi_max(wanted, half), half), up); /* up to 2^-127 */
        } else {
            code = vi_max(vi_sub(vi_srl(vi_of(amax), 23), largest), vi_set1(0));
        }
        const VI inverted = vi_sll(vi_sub(vi_set1(254), code), 23);
        vf_store(s->factor + b, vf_of(vi_or(inverted, vi_and(vi_equal(code, vi_set1(254)), half))));
        vi_store_low_bytes(s->bits.bytes + b, code);
    }
}

/* Scales and factors of n blocks from their amaxes. `mx`: by the rules of MX, otherwise by the dialect's functions. */
SIMD void any_scales_of(struct any_scales *s, int n, const struct nib_coding *coding, const struct nib_scaler *scaler,
                        bool mx)
{
    if (mx) {
        for (int b = n; b % VL; b++)
            s->amax[b] = 0;
        mx_scales(s, n, &coding->rules);
        return;
    }
    for (int b = 0; b < n; b++) {
        const nib_scale_bits bits = coding->dialect->block_scale(s->amax[b], scaler, &coding->rules);
        s->factor[b] = coding->dialect->factor(bits, s->amax[b], scaler, &coding->rules);
        if (coding->scale_bytes == 1)
            s->bits.bytes[b] = (uint8_t)bits;
        else
            s->bits.words[b] = bits;
    }
}

SIMD nib_scale_bits scale_bits(const struct any_scales *s, int b, int bytes)
{
    return bytes == 1 ? s->bits.bytes[b] : s->bits.words[b];
}

/* The scales of blocks first..first+n-1 of each of `lines` lines. */
SIMD void store_row_scales(const struct nib_target *target, const struct any_scales *s, int n, int64_t line,
                           int64_t lines, int64_t first)
{
    const struct nib_usage_geometry *g = target->geometry;
    if (g->lines_per_scale > 1) /* all of them have one scale in memory */
        lines = 1;
    for (int64_t l = line; l < line + lines; l++) {
        if (!g->swizzled && g->scale_block == 1 && g->scale_bytes == 1)
            memcpy((uint8_t *)target->scales + nib_scale_index(g, l, first), s->bits.bytes, (size_t)n);
        else
            for (int b = 0; b < n; b++)
                nib_scale_store(g, target->scales, l, first + b, scale_bits(s, b, g->scale_bytes));
    }
}

/* The scales of block `block` of n lines. */
SIMD void store_column_scales(const struct nib_target *target, const struct any_scales *s, int n, int64_t line,
                              int64_t block)
{
    const struct nib_usage_geometry *g = target->geometry;
    if (!g->swizzled && g->scale_line == 1 && g->lines_per_scale == 1) {
        memcpy((char *)target->scales + nib_scale_index(g, line, block) * g->scale_bytes, &s->bits,
               (size_t)(n * g->scale_bytes));
        return;
    }
    uint8_t *const bytes = (uint8_t *)target->scales;
    if (g->scale_bytes == 1 && !g->swizzled && g->lines_per_scale == 1) {
        uint8_t *to = bytes + line * g->scale_line + block * g->scale_block;
        for (int l = 0; l < n; l++, to += g->scale_line)
            *to = s->bits.bytes[l];
    } else if (g->scale_bytes == 1 && g->swizzled) {
        for (int l = 0; l < n; l++)
            bytes[nib_scale_index(g, line + l, block)] = s->bits.bytes[l];
    } else {
        for (int l = 0; l < n; l += (int)g->lines_per_scale)
            nib_scale_store(g, target->scales, line + l, block, scale_bits(s, l, g->scale_bytes));
    }
}

/* ---- Rows ---- */

/* The amaxes of n blocks of `lines` rows from column `first` on: VL at a time, whose largest lanes are found by a
 * transposition. */
SIMD void row_amaxes(const struct nib_panel *panel, int64_t row, int64_t lines, int64_t first, int n, int64_t block,
                     nib_dtype dtype, float *amax)
{
    const int size = dtype == NIB_F32 ? 4 : 2;
    int b = 0;
    for (; b + VL <= n && first + (b + VL) * block <= panel->cols; b += VL) {
        VF m[VL];
        UNROLL
        for (int k = 0; k < VL; k++)
            m[k] = vf_set1(0);
        for (int64_t l = 0; l < lines; l++) {
            const char *const x = element_address(panel, row + l, first + b * block);
            UNROLL
            for (int k = 0; k < VL; k++)
                for (int64_t i = 0; i < block; i += STEP) {
                    VF v[STEP_VECTORS];
                    load_step(x + (k * block + i) * size, STEP, dtype, v);
                    UNROLL
                    for (int part = 0; part < STEP_VECTORS; part++)
                        m[k] = vf_max(absolute(v[part]), m[k]); /* a NaN gives the second operand */
                }
        }
        vf_transpose(m);
        UNROLL
        for (int k = 1; k < VL; k++)
            m[0] = vf_max(m[0], m[k]);
        vf_store(amax + b, m[0]);
    }
    for (; b < n; b++) {
        const int64_t at = first + b * block;
        amax[b] = 0;
        for (int64_t l = 0; l < lines; l++) {
            const float m = span_absmax(element_address(panel, row + l, at), nib_min(block, panel->cols - at), dtype);
            amax[b] = m > amax[b] ? m : amax[b];
        }
    }
}

SIMD void quantize_rows_generic(const struct nib_panel *panel, const struct nib_coding *coding,
                                const struct nib_target *target, const struct nib_scaler *scaler, nib_dtype dtype,
                                nib_dtype element, bool mx)
{
    const int64_t block = mx ? STEP : coding->block ? coding->block : nib_max(panel->cols, 1);
    struct any_scales s;
    for (int64_t row = 0; row < panel->rows; row += coding->tile_lines)
        for (int64_t first = 0; first < panel->cols; first += SCALES * block) {
            const int64_t end = nib_min(panel->cols, first + SCALES * block);
            const int64_t lines = nib_min(coding->tile_lines, panel->rows - row);
            const int n = (int)nib_ceil_div(end - first, block);
            if (coding->block) {
                row_amaxes(panel, row, lines, first, n, block, dtype, s.amax);
                any_scales_of(&s, n, coding, scaler, mx);
                store_row_scales(target, &s, n, panel->row + row, lines, (panel->col + first) / block);
            } else {
                s.factor[0] = coding->dialect->factor(0, 0, scaler, &coding->rules);
            }
            for (int64_t l = 0; l < lines; l++) {
                uint8_t *const codes = target->codes + (panel->row + row + l) * target->geometry->line_stride;
                for (int b = 0; b < n; b++) {
                    const int64_t at = first + b * block;
                    encode_span(element_address(panel, row + l, at), nib_min(block, end - at), dtype, s.factor[b],
                                element, codes + (panel->col + at) / (element == NIB_E2M1 ? 2 : 1));
                }
            }
        }
}

/* ---- Columns ---- */

enum { ANY_COLUMNS = SCALES, ANY_BYTE_ROWS = 128 }; /* coded before they are written */

/* The amaxes of n columns from `col` on, of rows row..end-1; square tiles have one for all their columns. */
SIMD void column_amaxes(const struct nib_panel *panel, const struct nib_coding *coding, int64_t row, int64_t end,
                        int64_t col, int n, nib_dtype dtype, float *amax)
{
    for (int c = 0; c < n; c += STEP) {
        VF m[STEP_VECTORS], v[STEP_VECTORS];
        UNROLL
        for (int i = 0; i < STEP_VECTORS; i++)
            m[i] = vf_set1(0);
        for (int64_t r = row; r < end; r++) {
            load_step(element_address(panel, r, col + c), n - c, dtype, v);
            UNROLL
            for (int i = 0; i < STEP_VECTORS; i++)
                m[i] = vf_max(absolute(v[i]), m[i]);
        }
        UNROLL
        for (int i = 0; i < STEP_VECTORS; i++)
            vf_store(amax + c + i * VL, m[i]);
    }
    for (int tile = 0; coding->tile_lines > 1 && tile < n; tile += coding->tile_lines) {
        const int last = (int)nib_min(tile + coding->tile_lines, n);
        float largest = 0;
        for (int c = tile; c < last; c++)
            largest = amax[c] > largest ? amax[c] : largest;
        for (int c = tile; c < last; c++)
            amax[c] = largest;
    }
}

/* Codes of rows row..end-1 of up to STEP columns, each under its factor: a row to a line of bytes, or two rows where
 * two codes share a byte. */
SIMD void encode_columns(const struct nib_panel *panel, int64_t row, int64_t end, int64_t col, int n, nib_dtype dtype,
                         const float *factors, nib_dtype element, uint8_t *out, int64_t stride)
{
    VF f[STEP_VECTORS], v[STEP_VECTORS];
    UNROLL
    for (int i = 0; i < STEP_VECTORS; i++)
        f[i] = vf_load(factors + i * VL);
    for (int64_t r = row; r < end; out += stride) {
        VI code[STEP_VECTORS];
        load_step(element_address(panel, r++, col), n, dtype, v);
        UNROLL
        for (int i = 0; i < STEP_VECTORS; i++)
            v[i] = vf_mul(v[i], f[i]);
        codes_of_step(v, element, code);
        if (element == NIB_E2M1 && r < end) {
            load_step(element_address(panel, r++, col), n, dtype, v);
            UNROLL
            for (int i = 0; i < STEP_VECTORS; i++)
                code[i] = vi_or(code[i], vi_sll(signed_e2m1(vf_mul(v[i], f[i])), 4));
        }
        uint8_t last[STEP];
        store_step_codes(n < STEP ? last : out, code);
        if (n < STEP)
            memcpy(out, last, (size_t)n);
    }
}

/* Rows row..end-1, whole blocks, of n columns from `col` on, at most ANY_COLUMNS. Rows of the matrix, and lines of the
 * result, may be so far apart that they share their places in the cache: both pass through memory that lies side by
 * side, are read or written once, and many bytes at a time. */
SIMD void quantize_column_block(const struct nib_panel *panel, const struct nib_coding *coding,
                                const struct nib_target *target, const struct nib_scaler *scaler, int64_t row,
                                int64_t end, int64_t col, int n, nib_dtype dtype, nib_dtype element, bool mx)
{
    const struct nib_usage_geometry *g = target->geometry;
    const bool packed = element == NIB_E2M1, straight = g->by_element; /* codes lie as the values do */
    const int64_t height = coding->block ? coding->block : nib_min(end - row, ANY_BYTE_ROWS);
    uint8_t stage[ANY_BYTE_ROWS][ANY_COLUMNS] __attribute__((aligned(64)));
    const int64_t first = (panel->row + row) / (packed ? 2 : 1), bytes = nib_ceil_div(end - row, packed ? 2 : 1);
    uint8_t *const codes = target->codes + (panel->col + col) * g->line_stride + first;
    uint8_t transposed[ANY_COLUMNS][ANY_BYTE_ROWS] __attribute__((aligned(64)));
    char values[ANY_COLUMNS * ANY_BYTE_ROWS * 4] __attribute__((aligned(64)));
    const struct nib_panel near = { .x = values, .dtype = panel->dtype, .stride = ANY_COLUMNS };
    const int size = dtype == NIB_F32 ? 4 : 2;
    struct any_scales s;
    const float whole = coding->block ? 0 : coding->dialect->factor(0, 0, scaler, &coding->rules);
    for (int c = 0; c < SCALES; c++)
        s.factor[c] = whole;
    for (int64_t r = row; r < end; r += height) {
        const int64_t last = nib_min(r + height, end);
        for (int64_t i = r; i < last; i++)
            memcpy(values + (i - r) * ANY_COLUMNS * size, element_address(panel, i, col), (size_t)(n * size));
        if (coding->block) {
            column_amaxes(&near, coding, 0, last - r, 0, n, dtype, s.amax);
            any_scales_of(&s, n, coding, scaler, mx);
            store_column_scales(target, &s, n, panel->col + col, (panel->row + r) / coding->block);
        }
        for (int c = 0; c < n; c += STEP)
            encode_columns(&near, 0, last - r, c, n - c, dtype, s.factor + c, element,
                           straight ? target->codes + (panel->row + r) * g->element_stride + panel->col + col + c
                                    : &stage[(r - row) / (packed ? 2 : 1)][c],
                           straight ? g->element_stride : ANY_COLUMNS);
    }
    if (straight)
        return;
    for (int64_t l = 0; l < n; l++) /* far apart, they arrive in time only if they are asked for */
        for (int64_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(codes + l * g->line_stride + i, 1);
    transpose_8(stage[0], ANY_COLUMNS, bytes, n, transposed[0], ANY_BYTE_ROWS);
    for (int64_t l = 0; l < n; l++)
        memcpy(codes + l * g->line_stride, transposed[l], (size_t)bytes);
}

SIMD void quantize_columns_generic(const struct nib_panel *panel, const struct nib_coding *coding,
                                   const struct nib_target *target, const struct nib_scaler *scaler, nib_dtype dtype,
                                   nib_dtype element, bool mx)
{
    const int64_t height = element == NIB_E2M1 ? 2 * ANY_BYTE_ROWS : ANY_BYTE_ROWS;
    for (int64_t row = 0; row < panel->rows; row += height)
        for (int64_t col = 0; col < panel->cols; col += ANY_COLUMNS)
            quantize_column_block(panel, coding, target, scaler, row, nib_min(row + height, panel->rows), col,
                                  (int)nib_min(ANY_COLUMNS, panel->cols - col), dtype, element, mx);
}

/* ---- The slots ---- */

/* Compiled once per dtype and element, so that nothing is decided in the loops. */
SIMD void quantize_generic_as(const struct nib_panel *panel, const struct nib_coding *coding,
                              const struct nib_target *target, const struct nib_scaler *scaler, nib_dtype dtype,
                              nib_dtype element, bool mx)
{
    if (coding->usage == NIB_ROWWISE)
        quantize_rows_generic(panel, coding, target, scaler, dtype, element, mx);
    else
        quantize_columns_generic(panel, coding, target, scaler, dtype, element, mx);
}

SIMD void quantize_generic_dtype(const struct nib_panel *panel, const struct nib_coding *coding,
                                 const struct nib_target *target, const struct nib_scaler *scaler, nib_dtype element,
                                 bool mx)
{
    if (panel->dtype == NIB_F32)
        quantize_generic_as(panel, coding, target, scaler, NIB_F32, element, mx);
    else if (panel->dtype == NIB_BF16)
        quantize_generic_as(panel, coding, target, scaler, NIB_BF16, element, mx);
    else
        quantize_generic_as(panel, coding, target, scaler, NIB_F16, element, mx);
}

static struct nib_scaler any_scaler(const struct nib_coding *coding, const struct nib_target *target)
{
    struct nib_scaler scaler = { .tensor_scale = target->tensor_scales ? target->tensor_scales[0] : 1,
                                 .scale = target->scale };
    coding->dialect->prepare(&scaler, &coding->rules);
    return scaler;
}

SLOT void quantize_float8(const struct nib_panel *panel, const struct nib_coding *coding,
                          const struct nib_target *target)
{
    const struct nib_scaler scaler = any_scaler(coding, target);
    if (coding->rules.element == NIB_E4M3)
        quantize_generic_dtype(panel, coding, target, &scaler, NIB_E4M3, false);
    else
        quantize_generic_dtype(panel, coding, target, &scaler, NIB_E5M2, false);
}

SLOT void quantize_mxfp8(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    const struct nib_scaler scaler = any_scaler(coding, target);
    if (coding->rules.element == NIB_E4M3)
        quantize_generic_dtype(panel, coding, target, &scaler, NIB_E4M3, true);
    else
        quantize_generic_dtype(panel, coding, target, &scaler, NIB_E5M2, true);
}

SLOT void quantize_mxfp4(const struct nib_panel *panel, const struct nib_coding *coding,
                         const struct nib_target *target)
{
    const struct nib_scaler scaler = any_scaler(coding, target);
    quantize_generic_dtype(panel, coding, target, &scaler, NIB_E2M1, true);
}

/* ---- Back ---- */

/* `clean`: no code is special and the factor is finite, so that no value is a NaN; `exact`: and each is a BF16. */
SIMD void decode_step(char *out, nib_dtype dtype, const uint8_t *codes, VF factor, nib_dtype element, bool clean,
                      bool exact, bool stream)
{
    VF v[STEP_VECTORS];
    if (element == NIB_E2M1)
        load_step_e2m1(codes, v);
    else
        load_step_halves(codes, v, element == NIB_E5M2);
    UNROLL
    for (int i = 0; i < STEP_VECTORS; i++) {
        if (element == NIB_E4M3)
            v[i] = vf_mul(v[i], vf_set1(256.0f));
        if (element == NIB_E4M3 && !clean) /* 480 would be the value of the code that is a NaN */
            v[i] = vf_of(vi_or(vi_of(v[i]), vi_equal(vi_of(absolute(v[i])), vi_of(vf_set1(480.0f)))));
        v[i] = vf_mul(v[i], factor);
        if (!clean)
            v[i] = vf_quiet(v[i]);
    }
    store_step(out, dtype, v, exact, stream);
}

/* A power of two keeps the few digits of a code, as long as the result is not subnormal. */
enum { EXACT_SCALE = 32 };

SIMD void decode_generic_as(char *y, nib_dtype dtype, const uint8_t *codes, const char *scales, int64_t n,
                            float tensor_scale, const struct nib_coding *coding, nib_dtype element, bool mx,
                            bool stream)
{
    const int size = dtype == NIB_F32 ? 4 : 2, per_byte = element == NIB_E2M1 ? 2 : 1;
    const int64_t block = coding->block ? coding->block : n;
    for (int64_t first = 0; first < n; first += block) {
        nib_scale_bits bits = 0;
        if (coding->block)
            memcpy(&bits, scales + first / block * coding->scale_bytes, mx ? 1 : (size_t)coding->scale_bytes);
        const float factor =
            mx ? nib_f32_from_e8m0((uint8_t)bits) : coding->dialect->decode_factor(bits, tensor_scale, &coding->rules);
        const bool finite = nib_abs(factor) <= FLT_MAX, exact = mx && dtype == NIB_BF16 && bits >= EXACT_SCALE;
        const VF f = vf_set1(factor);
        const int64_t end = nib_min(first + block, n);
        int64_t i = first;
        for (; i + STEP <= end; i += STEP) {
            const uint8_t *const step = codes + i / per_byte;
            const bool clean =
                finite && (element == NIB_E2M1 || !step_has_byte(step, element == NIB_E4M3 ? 0x7F : 0x7C));
            if (clean && exact)
                decode_step(y + i * size, dtype, step, f, element, true, true, stream);
            else if (clean)
                decode_step(y + i * size, dtype, step, f, element, true, false, stream);
            else
                decode_step(y + i * size, dtype, step, f, element, false, false, stream);
        }
        if (i < end) {
            uint8_t last[STEP] = { 0 };
            char values[STEP * 4];
            memcpy(last, codes + i / per_byte, (size_t)nib_ceil_div(end - i, per_byte));
            decode_step(values, dtype, last, f, element, false, false, false);
            memcpy(y + i * size, values, (size_t)((end - i) * size));
        }
    }
    if (stream)
        stores_are_seen();
}

SIMD void decode_generic_dtype(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                               float tensor_scale, const struct nib_coding *coding, nib_dtype element, bool mx,
                               bool stream)
{
    const bool streams = stream && (uintptr_t)y % 64 == 0; /* such stores want whole vectors at their places */
    if (dtype == NIB_F32 && streams)
        decode_generic_as(y, NIB_F32, codes, scales, n, tensor_scale, coding, element, mx, true);
    else if (dtype == NIB_F32)
        decode_generic_as(y, NIB_F32, codes, scales, n, tensor_scale, coding, element, mx, false);
    else if (dtype == NIB_BF16)
        decode_generic_as(y, NIB_BF16, codes, scales, n, tensor_scale, coding, element, mx, streams);
    else
        decode_generic_as(y, NIB_F16, codes, scales, n, tensor_scale, coding, element, mx, streams);
}

SLOT void decode_float8(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                        float tensor_scale, const struct nib_coding *coding, bool stream)
{
    if (coding->rules.element == NIB_E4M3)
        decode_generic_dtype(y, dtype, codes, scales, n, tensor_scale, coding, NIB_E4M3, false, stream);
    else
        decode_generic_dtype(y, dtype, codes, scales, n, tensor_scale, coding, NIB_E5M2, false, stream);
}

SLOT void decode_mxfp8(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                       float tensor_scale, const struct nib_coding *coding, bool stream)
{
    if (coding->rules.element == NIB_E4M3)
        decode_generic_dtype(y, dtype, codes, scales, n, tensor_scale, coding, NIB_E4M3, true, stream);
    else
        decode_generic_dtype(y, dtype, codes, scales, n, tensor_scale, coding, NIB_E5M2, true, stream);
}

SLOT void decode_mxfp4(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                       float tensor_scale, const struct nib_coding *coding, bool stream)
{
    decode_generic_dtype(y, dtype, codes, scales, n, tensor_scale, coding, NIB_E2M1, true, stream);
}

/* ---- RHT, back ---- */

SIMD void butterflies_lanes(VF v[BLOCK])
{
#define BUTTERFLIES(stride)                         \
    UNROLL                                          \
    for (int i = 0; i < BLOCK; i++)                 \
        if (!(i & (stride))) {                      \
            const VF a = v[i], b = v[i + (stride)]; \
            v[i] = vf_add(a, b);                    \
            v[i + (stride)] = vf_sub(a, b);         \
        }
    BUTTERFLIES(1)
    BUTTERFLIES(2)
    BUTTERFLIES(4)
    BUTTERFLIES(8)
#undef BUTTERFLIES
}

/* VL blocks, a lane each, as in simd.h; then two blocks are a step. */
SIMD void inverse_rht_blocks(char *y, nib_dtype dtype, const float *x, uint16_t sign_mask)
{
    enum { PARTS = BLOCK / VL };
    const void *block[VL];
    VF v[BLOCK];
    for (int b = 0; b < VL; b++)
        block[b] = x + b * BLOCK;
    load_blocks(block, NIB_F32, v);
    butterflies_lanes(v);
    UNROLL
    for (int i = 0; i < BLOCK; i++) {
        const VI sign = vi_set1((int)((uint32_t)sign_mask >> i << 31));
        v[i] = vf_quiet(vf_of(vi_xor(vi_of(vf_mul(v[i], vf_set1(0.25f))), sign)));
    }
    UNROLL
    for (int part = 0; part < PARTS; part++)
        vf_transpose(v + part * VL);
    UNROLL
    for (int b = 0; b < VL; b += 2) {
        VF step[STEP_VECTORS];
        UNROLL
        for (int k = 0; k < STEP_VECTORS; k++)
            step[k] = v[k % PARTS * VL + b + k / PARTS];
        store_step(y + b * BLOCK * (dtype == NIB_F32 ? 4 : 2), dtype, step, false, false);
    }
}

/* Groups of VL blocks, and a last one whose other blocks are zeros. */
SIMD void inverse_rht_as(char *y, nib_dtype dtype, const float *x, int64_t n, uint16_t sign_mask)
{
    const int size = dtype == NIB_F32 ? 4 : 2;
    int64_t i = 0;
    for (; i + VL * BLOCK <= n; i += VL * BLOCK)
        inverse_rht_blocks(y + i * size, dtype, x + i, sign_mask);
    if (i == n)
        return;
    float last[VL * BLOCK] = { 0 };
    char values[VL * BLOCK * 4];
    memcpy(last, x + i, (size_t)(n - i) * sizeof *x);
    inverse_rht_blocks(values, dtype, last, sign_mask);
    memcpy(y + i * size, values, (size_t)((n - i) * size));
}

SLOT void inverse_rht_f32(void *y, const float *x, int64_t n, uint16_t mask) { inverse_rht_as(y, NIB_F32, x, n, mask); }
SLOT void inverse_rht_bf16(void *y, const float *x, int64_t n, uint16_t mask)
{
    inverse_rht_as(y, NIB_BF16, x, n, mask);
}
SLOT void inverse_rht_f16(void *y, const float *x, int64_t n, uint16_t mask) { inverse_rht_as(y, NIB_F16, x, n, mask); }

#define NIB_INVERSE_RHT_ALL [NIB_F32] = inverse_rht_f32, [NIB_BF16] = inverse_rht_bf16, [NIB_F16] = inverse_rht_f16

/* Blockwise Float8 shares Float8's: its blocks of 128 leave time for the dialect's functions. */
#define NIB_QUANTIZE_GENERIC                                                                            \
    [NIB_FLOAT8] = quantize_float8, [NIB_FLOAT8_BLOCK] = quantize_float8, [NIB_MXFP8] = quantize_mxfp8, \
    [NIB_MXFP4] = quantize_mxfp4
#define NIB_DECODE_GENERIC                                                                        \
    [NIB_FLOAT8] = decode_float8, [NIB_FLOAT8_BLOCK] = decode_float8, [NIB_MXFP8] = decode_mxfp8, \
    [NIB_MXFP4] = decode_mxfp4
