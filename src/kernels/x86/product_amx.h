/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_amx.h - NVFP4 by NVFP4 in tiles. A code times its scale is exact in BF16, and a tile of K = 16 adds one block's
 * exact sum to every accumulator with one rounding: the reference's own order.
 *
 * Rows are packed in tiles of 16 rows x 16 elements, columns in tiles of 8 pairs of elements x 16 columns.
 */
#define AMX_TARGET target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,fma,f16c")
#define AMX_SIMD __attribute__((AMX_TARGET, always_inline)) static inline
#define AMX_SLOT __attribute__((AMX_TARGET)) static

enum { TILE_ROWS = 16, TILE_BYTES = TILE_ROWS * NIB_BLOCK * 2, AMX_ROWS = 2 * TILE_ROWS };

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
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        /* A byte in both halves of its lane, shifted to its upper nibble in the upper one. */
        const VI byte = vi_and(vi_srl(word, 8u * (unsigned)i), vi_set1(255));
        const VI both = vi_or(byte, vi_sll(byte, 16));
        const VI pair = _mm512_permutexvar_epi16(_mm512_srlv_epi16(both, shift), values);
        const VF low = vf_mul(vf_of(vi_sll(pair, 16)), scale), high = vf_mul(vf_of(vi_and(pair, upper)), scale);
        _mm512_storeu_si512(to + i * 64, vi_or(vi_srl(vi_of(low), 16), vi_and(vi_of(high), upper)));
    }
}

/* Sixteen columns, or as many as are there. */
PRODUCT_SIMD void pack_columns_amx(const struct nib_side *b, int64_t first, int64_t lines, uint8_t *out)
{
    const int64_t stride = b->geometry->line_stride, bytes = nib_ceil_div(b->length, 2), blocks = b->geometry->blocks;
    const uint8_t *const codes = b->memory.codes + first * stride;
    for (int64_t k = 0; k < b->length; k += 128) {
        VF word[VL], scale[8];
        if (lines == VL) /* those behind these lines come next: one stream, as in panels of bytes */
            for (int64_t at = 0; at < VL * VL * 4; at += 64)
                __builtin_prefetch(codes + VL * stride + k / 128 * VL * VL * 4 + at, 0, 2);
        load_words_vnni(codes + k / 2, stride, lines, bytes - k / 2, word);
        for (int64_t i = 0; i < 8 && k / NIB_BLOCK + i < blocks; i += 4)
            load_scales_vnni(b, first, lines, k / NIB_BLOCK + i, scale + i, SHAPE_NVFP4);
        UNROLL for (int i = 0; i < VL; i++) if (k / NIB_BLOCK + i / 2 < blocks) pack_word_amx(
            vi_of(word[i]), scale[i / 2], out + (k / NIB_BLOCK + i / 2) * TILE_BYTES + i % 2 * TILE_BYTES / 2);
    }
}

/* ---- Tiles ---- */

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Accumulators 0 to 3, rows 4 and 5, columns 6 and 7. */
AMX_SIMD void configure_tiles(void)
{
    struct tile_config config = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = i == 4 || i == 5 ? NIB_BLOCK * 2 : 64;
        config.rows[i] = i < 6 ? TILE_ROWS : NIB_BLOCK / 2;
    }
    /* gcc 12 believes that the instruction reads eight bytes, and drops the rest of the struct. */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

AMX_SIMD void prefetch_tile(const uint8_t *tile)
{
    enum { TILES_AHEAD = 4 };
    UNROLL for (int i = 0; i < TILE_BYTES; i += 64)
        _mm_prefetch((const char *)tile + TILES_AHEAD * TILE_BYTES + i, _MM_HINT_T0);
}

/* Thirty-two rows by thirty-two columns; `apart` bytes are from sixteen to the next sixteen, of both. */
AMX_SLOT void multiply_two_tiles(const uint8_t *x, const uint8_t *columns, int64_t apart, int64_t blocks, float *out)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t b = 0; b < blocks; b++, x += TILE_BYTES, columns += TILE_BYTES) {
        _tile_loadd(4, x, NIB_BLOCK * 2);
        _tile_loadd(6, columns, 64);
        prefetch_tile(x);
        prefetch_tile(columns);
        _tile_loadd(7, columns + apart, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + apart, NIB_BLOCK * 2);
        prefetch_tile(x + apart);
        prefetch_tile(columns + apart);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, NIB_PANEL_COLUMNS * 4);
    _tile_stored(1, out + 16, NIB_PANEL_COLUMNS * 4);
    _tile_stored(2, out + TILE_ROWS * NIB_PANEL_COLUMNS, NIB_PANEL_COLUMNS * 4);
    _tile_stored(3, out + TILE_ROWS * NIB_PANEL_COLUMNS + 16, NIB_PANEL_COLUMNS * 4);
}

AMX_SLOT void multiply_tiles(const struct nib_product *p, struct nib_row_range range, const void *packed, int64_t first,
                             int64_t count, void *scratch)
{
    const int64_t blocks = nib_ceil_div(p->a.length, NIB_BLOCK), apart = blocks * TILE_BYTES;
    _Alignas(64) float factor[NIB_PANEL_COLUMNS] = { 0 }, bias[NIB_PANEL_COLUMNS] = { 0 };
    struct product_tile tiles[AMX_ROWS / NIB_GROUP_ROWS];
    uint8_t *const columns = scratch;
    for (int v = 0; v < 2; v++) {
        const int64_t lines = nib_max(0, nib_min(VL, count - v * VL));
        pack_columns_amx(&p->b, first + (lines ? v * VL : 0), lines, columns + v * apart);
    }
    load_factors_vnni(p, range.first, first, count, factor, bias);
    configure_tiles();
    for (int64_t row = 0; row < range.count; row += AMX_ROWS) {
        multiply_two_tiles((const uint8_t *)packed + row / TILE_ROWS * apart, columns, apart, blocks, tiles[0].acc[0]);
        for (int64_t i = 0; i < AMX_ROWS && row + i < range.count; i += NIB_GROUP_ROWS)
            store_tile_vnni(p, range.first + row + i, (int)nib_min(NIB_GROUP_ROWS, range.count - row - i), first, count,
                            &tiles[i / NIB_GROUP_ROWS], factor, bias);
    }
    _tile_release();
}

const struct nib_kernels nib_products_amx = {
    .pack_rows = { [NIB_PRODUCT_TILES] = pack_tiles },
    .multiply = { [NIB_PRODUCT_TILES] = multiply_tiles },
};
