/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_amx.h - NVFP4 by NVFP4 in tiles. A code times its scale is exact in BF16, and a tile of K = 16 adds one block's
 * exact sum to every accumulator with one rounding: the reference's own order.
 *
 * Rows are packed in tiles of 16 rows x 16 elements, columns in tiles of 8 pairs of elements x 16 columns; of every block
 * the two tiles of 32 columns lie side by side.
 *
 * Columns are multiplied by their scales in F16, of which the sign, the exponent and seven bits of the mantissa are those of
 * a BF16 that is 2^-112 of it; rows are packed 2^112 times as large. Neither is ever subnormal, which tiles would take for 0.
 */
#define AMX_TARGET target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,fma,f16c")
#define AMX_SIMD __attribute__((AMX_TARGET, always_inline)) static inline
#define AMX_SLOT __attribute__((AMX_TARGET)) static

#define UPPER_BYTES 0xAAAAAAAAAAAAAAAAu /* of words, as a mask */

enum { TILE_ROWS = 16, TILE_BYTES = TILE_ROWS * NIB_BLOCK * 2, TASK_PANELS = NIB_TILES_COLUMNS / NIB_PANEL_COLUMNS };

/* ---- Packing ---- */

#ifndef multiply_halves /* a test has its own, for processors without it */
/* By name, since clang 14 shows its function only to files that are compiled for AVX-512's F16 as a whole. */
AMX_SIMD VI multiply_halves(VI a, VI b)
{
    VI product;
    __asm__("vmulph %2, %1, %0" : "=v"(product) : "v"(a), "v"(b));
    return product;
}
#endif

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
    const VF scales = scales_e4m3_vnni(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)words)));
    vf_store(out, vf_mul(scales, vf_set1(0x1p112f)));
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

/* Eight elements of sixteen columns, a word of codes in each lane: four rows of pairs. The scales are 2^-8 of them, and so
 * the codes 2^8 times what they stand for, which in F16 is an upper byte alone. */
AMX_SIMD void pack_word_amx(VI word, VI scale, uint8_t *to)
{
    const VI values =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0x58, 0x5C, 0x5E, 0x60, 0x62, 0x64, 0x66, (char)0x80, (char)0xD8,
                                             (char)0xDC, (char)0xDE, (char)0xE0, (char)0xE2, (char)0xE4, (char)0xE6));
    const VI kept = _mm512_set1_epi16((short)0x8FFF), first = _mm512_set1_epi64(0x2400200004000000);
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        /* Of byte i of each lane a nibble in the upper byte of either half, and others above it: the permutation looks at
         * six bits, and the table is there four times. */
        const VI nibbles = _mm512_multishift_epi64_epi8(_mm512_add_epi8(first, _mm512_set1_epi8((char)(8 * i))), word);
        const VI pair = _mm512_maskz_permutexvar_epi8(UPPER_BYTES, nibbles, values);
        _mm512_storeu_si512(to + i * 64, vi_and(_mm512_srai_epi16(multiply_halves(pair, scale), 3), kept));
    }
}

/* The scale bytes of eight blocks of sixteen columns, or of what is there of both; else 0. */
AMX_SIMD void column_scales_amx(const struct nib_side *b, int64_t first, int64_t lines, int64_t block, VI out[2])
{
    const struct nib_usage_geometry *const g = b->geometry;
    if (lines == VL && !g->swizzled && block + 8 <= g->blocks) {
        load_scale_bytes_vnni(nib_side_scales(b, first, block), g->scale_line, out);
        return;
    }
    uint8_t copy[VL][8] = { { 0 } };
    for (int64_t line = 0; line < lines; line++)
        for (int64_t i = 0; i < 8 && block + i < g->blocks; i += 4) {
            const uint32_t four = nib_four_scales(b, first + line, block + i);
            memcpy(&copy[line][i], &four, sizeof four);
        }
    load_scale_bytes_vnni(copy[0], 8, out);
}

/* The scale of a block for both halves of each lane: 2^-8 of it in F16, whose exponent is E4M3's with one bit more. */
AMX_SIMD VI block_scale_amx(VI bytes, int block)
{
    const VI places = _mm512_setr_epi32(0x00000000, 0x01000100, 0x02000200, 0x03000300, 0x04000400, 0x05000500,
                                        0x06000600, 0x07000700, 0x08000800, 0x09000900, 0x0A000A00, 0x0B000B00,
                                        0x0C000C00, 0x0D000D00, 0x0E000E00, 0x0F000F00);
    const VI upper = _mm512_maskz_permutexvar_epi8(
        UPPER_BYTES, _mm512_add_epi8(places, _mm512_set1_epi8((char)(16 * block))), bytes);
    return vi_and(_mm512_srai_epi16(upper, 1), _mm512_set1_epi16((short)0xBFFF));
}

/* F16 has no place for what E4M3 calls a NaN: such blocks are filled with BF16's. */
__attribute__((noinline)) AMX_SLOT void put_nans_amx(const VI bytes[2], int64_t blocks, uint8_t *out)
{
    uint8_t scales[8][VL];
    memcpy(scales, bytes, sizeof scales);
    for (int64_t block = 0; block < blocks; block++)
        for (int line = 0; line < VL; line++)
            for (int pair = 0; (scales[block][line] & 0x7F) == 0x7F && pair < NIB_BLOCK / 2; pair++)
                memset(out + block * 2 * TILE_BYTES + pair * 64 + line * 4, 0xFF, 4);
}

/* Blocks from `start` on, up to eight of them, of sixteen columns, or of as many as are there, every other tile from `out`
 * on. What comes next of these lines is brought into the first-level cache, and as much from `next` on nearer: a little at a
 * time, since tiles wait for lines too. */
AMX_SIMD void pack_eight_blocks(const struct nib_side *b, int64_t first, int64_t lines, int64_t start, int64_t blocks,
                                const uint8_t *next, uint8_t *out)
{
    enum { EIGHT_BLOCKS = 8 * NIB_BLOCK / 2 }; /* bytes of a line */
    const int64_t stride = b->geometry->line_stride, at = start * NIB_BLOCK / 2;
    const uint8_t *const codes = b->memory.codes + first * stride + at;
    const VI nan = _mm512_set1_epi8(0x7F);
    VF word[VL];
    VI scales[2];
    column_scales_amx(b, first, lines, start, scales);
    load_words_vnni(codes, stride, lines, nib_ceil_div(b->length, 2) - at, word);
    UNROLL for (int i = 0; i < VL; i++) if (i / 2 < blocks)
    {
        __builtin_prefetch(codes + i * stride + EIGHT_BLOCKS, 0, 3);
        __builtin_prefetch(next + i * EIGHT_BLOCKS, 0, 2);
        pack_word_amx(vi_of(word[i]), block_scale_amx(scales[i / 8], i / 2 % 4),
                      out + i / 2 * 2 * TILE_BYTES + i % 2 * TILE_BYTES / 2);
    }
    if (_mm512_cmpeq_epi8_mask(vi_and(scales[0], nan), nan) | _mm512_cmpeq_epi8_mask(vi_and(scales[1], nan), nan))
        put_nans_amx(scales, blocks, out);
}

/* Any number of blocks. The lines behind these come next: one stream, as in panels of bytes. */
AMX_SIMD void pack_columns_amx(const struct nib_side *b, int64_t first, int64_t lines, int64_t start, int64_t blocks,
                               uint8_t *out)
{
    const int64_t stride = b->geometry->line_stride;
    const uint8_t *const next = b->memory.codes + (first + VL) * stride;
    for (int64_t block = 0; block < blocks; block += 8)
        pack_eight_blocks(b, first, lines, start + block, nib_min(8, blocks - block),
                          next + VL * (start + block) * NIB_BLOCK / 2, out + block * 2 * TILE_BYTES);
}

/* ---- Tiles ---- */

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Accumulators 0 and 1, rows 2, columns 3; a second sixteen of rows has 4, 5 and 6, and 7 are columns, too. With four
 * accumulators a tile is loaded less often, but two threads of a core then have no registers left to load the next ones
 * into: half the speed, measured, where tiles are the limit. */
AMX_SIMD void configure_tiles(void)
{
    struct tile_config config = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = i % 4 == 2 ? NIB_BLOCK * 2 : 64;
        config.rows[i] = i % 4 == 3 ? NIB_BLOCK / 2 : TILE_ROWS;
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

/* ---- Few rows ---- */

/* Some blocks of one or two sixteens of rows, `apart` bytes from one to the other, by thirty-two columns. */
AMX_SIMD void multiply_blocks(const uint8_t *x, int64_t apart, const uint8_t *columns, int64_t blocks, const bool two)
{
    enum { AHEAD = 8 };
    for (int64_t b = 0; b < blocks; b++, x += TILE_BYTES, columns += 2 * TILE_BYTES) {
        _tile_loadd(2, x, NIB_BLOCK * 2);
        _tile_loadd(3, columns, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(7, columns + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 2, 7);
        if (two) {
            _tile_loadd(6, x + apart, NIB_BLOCK * 2);
            _tile_dpbf16ps(4, 6, 3);
            _tile_dpbf16ps(5, 6, 7);
        }
        UNROLL for (int i = 0; i < TILE_BYTES; i += 64)
        {
            _mm_prefetch((const char *)x + AHEAD * TILE_BYTES + i, _MM_HINT_T0);
            if (two)
                _mm_prefetch((const char *)x + apart + AHEAD * TILE_BYTES + i, _MM_HINT_T0);
        }
    }
}

/* What packing columns costs is not shared by many rows here: so eight blocks are multiplied while the next eight are
 * packed, which the processor does at the same time, and what is packed stays in the first-level cache. */
AMX_SIMD void multiply_panel_amx(const struct nib_product *p, struct nib_row_range range, const uint8_t *x,
                                 int64_t first, int64_t count, uint8_t *buffers, const bool two)
{
    enum { EIGHT = 8, STRIDE = NIB_PANEL_COLUMNS * 4 };
    const int64_t all = nib_ceil_div(p->a.length, NIB_BLOCK), apart = all * TILE_BYTES;
    const uint8_t *next = p->b.memory.codes + (first + NIB_PANEL_COLUMNS) * p->b.geometry->line_stride;
    struct product_tile tiles[4];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t block = 0; block < all + EIGHT; block += EIGHT) {
        uint8_t *const to = buffers + block / EIGHT % 2 * EIGHT * 2 * TILE_BYTES;
        const uint8_t *const from = buffers + (block / EIGHT + 1) % 2 * EIGHT * 2 * TILE_BYTES;
        for (int64_t half = 0; half < 2; half++) {
            const int64_t lines = nib_max(0, nib_min(VL, count - half * VL));
            const int64_t done = block - EIGHT + half * EIGHT / 2;
            if (block < all) {
                pack_eight_blocks(&p->b, first + (lines ? half * VL : 0), lines, block, nib_min(EIGHT, all - block),
                                  next, to + half * TILE_BYTES);
                next += EIGHT * NIB_BLOCK / 2 * VL;
            }
            if (block)
                multiply_blocks(x + done * TILE_BYTES, apart, from + half * EIGHT * TILE_BYTES,
                                nib_min(EIGHT / 2, all - done), two);
        }
    }
    _tile_stored(0, tiles[0].acc[0], STRIDE);
    _tile_stored(1, tiles[0].acc[0] + VL, STRIDE);
    _tile_stored(4, tiles[2].acc[0], STRIDE);
    _tile_stored(5, tiles[2].acc[0] + VL, STRIDE);
    store_panel(p, range.first, range.count, first, count, tiles);
}

AMX_SLOT void multiply_few_rows(const struct nib_product *p, struct nib_row_range range, const void *packed,
                                int64_t first, int64_t count, void *scratch)
{
    for (int64_t v = 0; v < count; v += NIB_PANEL_COLUMNS) {
        const int64_t columns = nib_min(NIB_PANEL_COLUMNS, count - v);
        if (range.count <= TILE_ROWS)
            multiply_panel_amx(p, range, packed, first + v, columns, scratch, false);
        else
            multiply_panel_amx(p, range, packed, first + v, columns, scratch, true);
    }
}

/* ---- The slot ---- */

AMX_SLOT void multiply_tiles(const struct nib_product *p, struct nib_row_range range, const void *packed, int64_t first,
                             int64_t count, void *scratch)
{
    const int64_t all = nib_ceil_div(p->a.length, NIB_BLOCK), most = NIB_TILES_K / NIB_BLOCK;
    uint8_t *const panels = scratch;
    struct product_tile *const kept = all > most ? (void *)(panels + NIB_TILES_COLUMNS * NIB_TILES_K * 2) : NULL;
    configure_tiles();
    if (range.count <= 2 * TILE_ROWS)
        multiply_few_rows(p, range, packed, first, count, scratch);
    else
        for (int64_t start = 0; start == 0 || start < all; start += most) { /* once if there is no k */
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
