/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_amx.h - NVFP4 by NVFP4 in tiles. A code times its scale is exact in BF16, and a tile of K = 16 adds one block's
 * exact sum to every accumulator with one rounding: the reference's own order.
 *
 * Rows are packed in tiles of 16 rows x 16 elements, columns in tiles of 8 pairs of elements x 16 columns; of every block
 * the two tiles of 32 columns lie side by side.
 */
#define AMX_TARGET target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,fma,f16c")
#define AMX_SIMD __attribute__((AMX_TARGET, always_inline)) static inline
#define AMX_SLOT __attribute__((AMX_TARGET)) static

enum { TILE_ROWS = 16, TILE_BYTES = TILE_ROWS * NIB_BLOCK * 2, TASK_PANELS = NIB_TILES_COLUMNS / NIB_PANEL_COLUMNS };

/* ---- Packing ---- */

/* A block of a row: its scale times every value that a code can have, in BF16 (exact: what is cut off is 0), then one of
 * them for each code. */
PRODUCT_SIMD void pack_block_amx(const uint8_t *codes, float scale, uint16_t *to)
{
    const VF values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m256i scaled = _mm512_cvtepi32_epi16(vi_srl(vi_of(vf_mul(values, vf_set1(scale))), 16));
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)codes));
    const __m256i nibbles = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12)); /* in the low four bits of words */
    _mm256_storeu_si256((void *)to, _mm256_permutexvar_epi16(nibbles, scaled));
}

/* The scales of sixteen blocks of a line, or of those that are left. */
PRODUCT_SIMD void line_scales_amx(const struct nib_side *side, int64_t line, int64_t block, float out[16])
{
    uint32_t words[4] = { 0 };
    for (int i = 0; i < 4 && block + 4 * i < side->geometry->blocks; i++)
        words[i] = nib_four_scales(side, line, block + 4 * i);
    vf_store(out, scales_e4m3_vnni(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)words))));
}

PRODUCT_SLOT void pack_tiles(const struct nib_product *p, struct nib_row_range range, int64_t row, void *packed)
{
    const struct nib_side *const a = &p->a;
    const int64_t blocks = nib_ceil_div(a->length, NIB_BLOCK), bytes = nib_ceil_div(a->length, 2);
    for (int64_t r = row; r < row + NIB_PACKED_ROWS; r++) {
        uint16_t *to = (uint16_t *)packed + r / TILE_ROWS * blocks * TILE_BYTES / 2 + r % TILE_ROWS * NIB_BLOCK;
        const int64_t line = range.first + r;
        const uint8_t *const codes = a->memory.codes + line * a->geometry->line_stride;
        float scales[16];
        for (int64_t b = 0; b < blocks; b++, to += TILE_BYTES / 2) {
            uint8_t last[NIB_BLOCK / 2] = { 0 };
            if (r >= range.count) {
                memset(to, 0, NIB_BLOCK * sizeof *to);
                continue;
            }
            if (b % 16 == 0)
                line_scales_amx(a, line, b, scales);
            if ((b + 1) * NIB_BLOCK <= a->length) {
                pack_block_amx(codes + b * NIB_BLOCK / 2, scales[b % 16], to);
                continue;
            }
            memcpy(last, codes + b * NIB_BLOCK / 2, (size_t)(bytes - b * NIB_BLOCK / 2));
            if (a->length % 2)
                last[a->length % NIB_BLOCK / 2] &= 15;
            pack_block_amx(last, scales[b % 16], to);
        }
    }
}

/* Eight elements of sixteen columns, a word of codes in each lane: four rows of pairs. */
PRODUCT_SIMD void pack_word_amx(VI word, VF scale, uint8_t *to)
{
    const VI values = _mm512_broadcast_i32x8(
        _mm256_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, (short)0x8000, (short)0xBF00,
                          (short)0xBF80, (short)0xBFC0, (short)0xC000, (short)0xC040, (short)0xC080, (short)0xC0C0));
    const VI shift = vi_set1(4 << 16), upper = vi_set1((int)0xFFFF0000u);
    const VI both = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 0, -1, 4, -1, 4, -1, 8, -1, 8, -1, 12, -1, 12, -1));
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        /* A byte in both halves of its lane, shifted to its upper nibble in the upper one. */
        const VI byte = _mm512_shuffle_epi8(word, _mm512_add_epi8(both, _mm512_set1_epi8((char)i)));
        const VI pair = _mm512_permutexvar_epi16(_mm512_srlv_epi16(byte, shift), values);
        const VF low = vf_mul(vf_of(vi_sll(pair, 16)), scale), high = vf_mul(vf_of(vi_and(pair, upper)), scale);
        _mm512_storeu_si512(to + i * 64, vi_merge(vi_srl(vi_of(low), 16), vi_of(high), upper));
    }
}

/* The scales of eight blocks of sixteen columns, or of what is there of both. */
PRODUCT_SIMD void column_scales_amx(const struct nib_side *b, int64_t first, int64_t lines, int64_t block, VF out[8])
{
    const struct nib_usage_geometry *const g = b->geometry;
    const bool whole = lines == VL && !g->swizzled && block + 8 <= g->blocks;
    if (whole && row_scales_vnni(nib_side_scales(b, first, block), g->scale_line, out)) {
        UNROLL for (int i = 0; i < 8; i++) out[i] = vf_mul(out[i], vf_set1(256));
        return;
    }
    for (int64_t i = 0; i < 8 && block + i < g->blocks; i += 4)
        load_scales_vnni(b, first, lines, block + i, out + i, SHAPE_NVFP4);
}

/* Blocks from `start` on of sixteen columns, or of as many as are there, every other tile from `out` on. */
PRODUCT_SIMD void pack_columns_amx(const struct nib_side *b, int64_t first, int64_t lines, int64_t start,
                                   int64_t blocks, uint8_t *out)
{
    const int64_t stride = b->geometry->line_stride, bytes = nib_ceil_div(b->length, 2);
    const uint8_t *const codes = b->memory.codes + first * stride;
    for (int64_t block = 0; block < blocks; block += 8) {
        const int64_t at = (start + block) * NIB_BLOCK / 2;
        VF word[VL], scale[8];
        if (lines == VL) /* those behind these lines come next: one stream, as in panels of bytes */
            for (int64_t line = 0; line < VL; line++)
                __builtin_prefetch(codes + VL * stride + VL * at + line * 64, 0, 2);
        column_scales_amx(b, first, lines, start + block, scale);
        load_words_vnni(codes + at, stride, lines, bytes - at, word);
        UNROLL for (int i = 0; i < VL; i++) if (block + i / 2 < blocks) pack_word_amx(
            vi_of(word[i]), scale[i / 2], out + (block + i / 2) * 2 * TILE_BYTES + i % 2 * TILE_BYTES / 2);
    }
}

/* ---- Tiles ---- */

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Accumulators 0 and 1, rows 2, columns 3. With four accumulators a tile would be loaded less often, but two threads of a
 * core then have no registers left to load the next ones into: half the speed, measured. */
AMX_SIMD void configure_tiles(void)
{
    struct tile_config config = { .palette = 1 };
    for (int i = 0; i < 4; i++) {
        config.bytes[i] = i == 2 ? NIB_BLOCK * 2 : 64;
        config.rows[i] = i < 3 ? TILE_ROWS : NIB_BLOCK / 2;
    }
    /* gcc 12 believes that the instruction reads eight bytes, and drops the rest of the struct. */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* Some blocks of k of the columns of a task. A panel is NIB_PANEL_COLUMNS of them. */
struct tiles_part {
    int64_t start, blocks;
    int64_t first, count;
    const uint8_t *panels;
};

/* Sixteen rows by thirty-two columns, added to what `acc` has where k goes on. Of the rows that come next each panel of
 * a task brings its part nearer. */
AMX_SLOT void multiply_two_tiles(const uint8_t *x, const uint8_t *columns, const uint8_t *next, int64_t blocks,
                                 bool goes_on, float *acc)
{
    enum { AHEAD = 4, STRIDE = NIB_PANEL_COLUMNS * 4, NEXT = TILE_BYTES / TASK_PANELS };
    if (goes_on) {
        _tile_loadd(0, acc, STRIDE);
        _tile_loadd(1, acc + 16, STRIDE);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (int64_t b = 0; b < blocks; b++, x += TILE_BYTES, columns += 2 * TILE_BYTES, next += NEXT) {
        _tile_loadd(2, x, NIB_BLOCK * 2);
        _tile_loadd(3, columns, 64);
        _tile_dpbf16ps(0, 2, 3);
        UNROLL for (int i = 0; i < TILE_BYTES; i += 64)
            _mm_prefetch((const char *)x + AHEAD * TILE_BYTES + i, _MM_HINT_T0);
        _tile_loadd(3, columns + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 2, 3);
        UNROLL for (int i = 0; i < 2 * TILE_BYTES; i += 64)
            _mm_prefetch((const char *)columns + AHEAD * 2 * TILE_BYTES + i, _MM_HINT_T0);
        UNROLL for (int i = 0; i < NEXT; i += 64) _mm_prefetch((const char *)next + i, _MM_HINT_T1);
    }
    _tile_stored(0, acc, STRIDE);
    _tile_stored(1, acc + 16, STRIDE);
}

AMX_SLOT void pack_panels(const struct nib_side *b, const struct tiles_part *part, uint8_t *panels)
{
    for (int64_t v = 0; v < nib_round_up(part->count, NIB_PANEL_COLUMNS); v += VL) {
        const int64_t lines = nib_max(0, nib_min(VL, part->count - v));
        uint8_t *const to = panels + (v / NIB_PANEL_COLUMNS * 2 * part->blocks + v / VL % 2) * TILE_BYTES;
        pack_columns_amx(b, part->first + (lines ? v : 0), lines, part->start, part->blocks, to);
    }
}

/* The outputs of sixteen rows of a panel, or of those that are there. */
static void store_panel(const struct nib_product *p, int64_t row, int64_t rows, int64_t first, int64_t count,
                        const struct product_tile *tiles)
{
    _Alignas(64) float factor[NIB_PANEL_COLUMNS] = { 0 }, bias[NIB_PANEL_COLUMNS] = { 0 };
    load_factors_vnni(p, row, first, count, factor, bias);
    for (int64_t i = 0; i < rows; i += NIB_GROUP_ROWS)
        store_tile_vnni(p, row + i, (int)nib_min(NIB_GROUP_ROWS, rows - i), first, count, &tiles[i / NIB_GROUP_ROWS],
                        factor, bias);
}

/* All rows by a part of k. Rows are the outer loop: columns come from the second-level cache in any case, and rows that are
 * there too serve all of them. Each task begins at other rows, so that threads do not all ask for the same new pages of y
 * at once. */
AMX_SLOT void multiply_part(const struct nib_product *p, struct nib_row_range range, const uint8_t *packed,
                            const struct tiles_part *part, struct product_tile *kept)
{
    enum { TILES = TILE_ROWS / NIB_GROUP_ROWS };
    const int64_t all = nib_ceil_div(p->a.length, NIB_BLOCK), sixteens = nib_ceil_div(range.count, TILE_ROWS);
    const int64_t turn = part->first / part->count;
    struct product_tile own[TILES];
    for (int64_t i = 0; i < sixteens; i++) {
        const int64_t at = (i + turn) % sixteens, rows = nib_min(TILE_ROWS, range.count - at * TILE_ROWS);
        const uint8_t *const x = packed + (at * all + part->start) * TILE_BYTES;
        const uint8_t *const next = packed + ((at + 1) % sixteens * all + part->start) * TILE_BYTES;
        for (int64_t v = 0; v * NIB_PANEL_COLUMNS < part->count; v++) {
            struct product_tile *const tiles = kept ? kept + (at * TASK_PANELS + v) * TILES : own;
            multiply_two_tiles(x, part->panels + v * 2 * part->blocks * TILE_BYTES,
                               next + v * part->blocks * TILE_BYTES / TASK_PANELS, part->blocks, part->start != 0,
                               tiles[0].acc[0]);
            if (part->start + part->blocks == all)
                store_panel(p, range.first + at * TILE_ROWS, rows, part->first + v * NIB_PANEL_COLUMNS,
                            nib_min(NIB_PANEL_COLUMNS, part->count - v * NIB_PANEL_COLUMNS), tiles);
        }
    }
}

AMX_SLOT void multiply_tiles(const struct nib_product *p, struct nib_row_range range, const void *packed, int64_t first,
                             int64_t count, void *scratch)
{
    const int64_t all = nib_ceil_div(p->a.length, NIB_BLOCK), most = NIB_TILES_K / NIB_BLOCK;
    uint8_t *const panels = scratch;
    struct product_tile *const kept = all > most ? (void *)(panels + NIB_TILES_COLUMNS * NIB_TILES_K * 2) : NULL;
    configure_tiles();
    for (int64_t start = 0; start < all; start += most) {
        const struct tiles_part part = { start, nib_min(most, all - start), first, count, panels };
        pack_panels(&p->b, &part, panels);
        multiply_part(p, range, packed, &part, kept);
    }
    _tile_release();
}

const struct nib_kernels nib_products_amx = {
    .pack_rows = { [NIB_PRODUCT_TILES] = pack_tiles },
    .multiply = { [NIB_PRODUCT_TILES] = multiply_tiles },
};
