/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.cuh - the kernels, as classes of phases.
 *
 * A kernel works on tiles, one after the other. A phase is what every thread of a thread block does between two barriers,
 * as a function of the thread's index over the memory that they share and a state of its own: registers on a device, an
 * array on the host, which runs the same code thread by thread (shim.h). `begin` comes before the tiles; `gather` and
 * `finish` after them, where a thread block has a result of its own.
 *
 * Indices of tiles and of lines in a launch have 32 bits: a 64-bit division is a hundred instructions.
 */
#ifndef NIB_CUDA_KERNELS_CUH
#define NIB_CUDA_KERNELS_CUH

#include "block.cuh"

enum { THREADS = 256 };
enum barrier { BLOCK_BARRIER, WARP_BARRIER };

struct nothing {
};

/* What kernels have unless they say otherwise. A persistent one has as many thread blocks as there is room for, and each
 * has tiles one after the other. One that is not has a thread block for each tile, and nothing before or after it. */
struct kernel_defaults {
    enum { PHASES = 1, ENDS = 0, PERSISTENT = 1, SIZE = THREADS, BARRIER_AFTER_FIRST = BLOCK_BARRIER };
    typedef nothing shared;
    typedef nothing state;
    template <class Job, class Shared, class State>
    static DEV_MEMBER void begin(const Job &, Shared &, State &, int, bool)
    {
    }
};

DEV int clamp_to_block(int64_t n) { return n <= 0 ? 0 : n >= NIB_BLOCK ? NIB_BLOCK : (int)n; }

DEV uint64_t offset_of(const nib_cuda_quantization &job) { return job.offset_at ? *job.offset_at : job.offset; }

/* A no-op, known on the device alone. Values come out of codes whatever happens. */
DEV bool is_stopped(const nib_cuda_quantization &job) { return job.noop && *job.noop == 1.0f; }
DEV bool is_stopped(const nib_cuda_amax &job) { return job.noop && *job.noop == 1.0f; }
DEV bool is_stopped(const nib_cuda_dequantization &) { return false; }
DEV bool is_stopped(const nib_cuda_copy &) { return false; }
DEV bool is_stopped(const nib_cuda_few_rows &) { return false; }

/* ---- Tensor scales ---- */

/* The tensor scale of a usage that has one; the first thread of the launch copies it where it came from elsewhere. */
DEV float read_tensor_scale(const nib_cuda_usage &u, bool first)
{
    const float value = *u.source;
    if (first && u.source != u.tensor_scales && u.tensor_scales)
        *u.tensor_scales = value;
    return value;
}

/* Factors by scale. There are 128 scales, and an element's factor is a function of its block's scale: so many divisions in
 * a thread block, and none in a loop. */
struct factor_table {
    float factor[128];
};

DEV void fill_table(factor_table &table, const nib_scaler &scaler, const nib_rules &rules, int t)
{
    if (t < 128)
        table.factor[t] = nib_te_factor((nib_scale_bits)t, 0, &scaler, &rules);
}

/* ---- Rows of 1x16 blocks, or what their codes stand for ---- */

/* WHOLE: rows without gaps, of whole blocks that can be read and written in sixteens and eights, and scales without padding. Then a block's place in memory is its number. */
template <nib_dtype D, int ROUND, bool FAKE, bool WHOLE> struct quantize_rows : kernel_defaults {
    /* What is fastest on an H200: blocks of a thread at a time, and thread blocks that a processor must hold. */
    enum {
        UNITS = D == NIB_BF16 && ROUND == STOCHASTIC_8 && !FAKE ? 2 : 1,
        BLOCKS = FAKE                                     ? (D == NIB_BF16 && ROUND != STOCHASTIC_24 ? 5 : 4)
                 : D == NIB_BF16 && ROUND == NEAREST      ? 8
                 : D == NIB_BF16 && ROUND == STOCHASTIC_8 ? 6
                                                          : 5
    };
    typedef nib_cuda_quantization job;
    struct shared {
        factor_table table;
        float decode[FAKE ? 128 : 1];
    };
    struct state {
        nib_scaler scaler;
        uint64_t offset;
    };

    static uint32_t tiles(const job &j)
    {
        const int64_t blocks = j.line_count * j.usage[0].g.scale_shape[1];
        return (uint32_t)((blocks + THREADS * UNITS - 1) / (THREADS * UNITS));
    }
    static DEV_MEMBER void begin(const job &j, shared &s, state &st, int t, bool first)
    {
        st.scaler = scaler_of(read_tensor_scale(j.usage[0], first && t == 0), j.rules);
        st.offset = ROUND == NEAREST ? 0 : offset_of(j);
        fill_table(s.table, st.scaler, j.rules, t);
        if (FAKE && t < 128)
            s.decode[FAKE ? t : 0] = nib_nvfp4_decode_factor((nib_scale_bits)t, st.scaler.tensor_scale, &j.rules);
    }

    /* A block of the launch: its line and its place in the line, if they matter, and how many elements it has. */
    struct place {
        int64_t number; /* of all blocks */
        uint32_t line, block;
        int n;
    };
    static DEV_MEMBER place place_of_block(const job &j, uint32_t i, uint32_t length)
    {
        place p = { j.first_line * length + i, 0, 0, NIB_BLOCK };
        if (WHOLE && ROUND == NEAREST)
            return p;
        const uint32_t line = divide(i, j.by_line);
        p.block = i - line * length;
        p.line = (uint32_t)j.first_line + line;
        if (!WHOLE)
            p.n = (int64_t)p.line < j.usage[0].g.lines ? clamp_to_block(j.cols - (int64_t)p.block * NIB_BLOCK) : 0;
        return p;
    }
    static DEV_MEMBER int64_t element_of(const place &p, int64_t stride)
    {
        return WHOLE ? p.number * NIB_BLOCK : p.line * stride + (int64_t)p.block * NIB_BLOCK;
    }
    template <int P>
    static DEV_MEMBER void phase(const job &j, shared &s, state &st, uint32_t tile, uint32_t tiles, int t)
    {
        const uint32_t length = (uint32_t)j.usage[0].g.scale_shape[1], all = (uint32_t)j.line_count * length;
        const uint32_t first = (j.reverse ? tiles - 1 - tile : tile) * (THREADS * UNITS) + (uint32_t)t;
        values<D> v[UNITS];
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) { /* all loads before all work */
            const uint32_t i = first + (uint32_t)k * THREADS;
            if (i >= all)
                continue;
            const place p = place_of_block(j, i, length);
            load_line(v[k], (const char *)j.x + element_of(p, j.row_stride) * element_bytes<D>(), p.n,
                      WHOLE || j.aligned);
        }
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const uint32_t i = first + (uint32_t)k * THREADS;
            if (i < all)
                encode_block(j, s, st, v[k], place_of_block(j, i, length));
        }
    }
    static DEV_MEMBER void encode_block(const job &j, shared &s, const state &st, values<D> &v, const place &p)
    {
        const nib_cuda_usage &u = j.usage[0];
        const uint32_t scale = block_scale<ROUND>(absmax(v, s.table.factor), st.scaler, j.rounding, j.floor_code);
        if (!FAKE)
            u.scales[WHOLE ? p.number : scale_index(u.g, p.line, p.block)] = (uint8_t)(p.n ? scale : 0);
        if (!p.n)
            return;
        const float decode_factor = s.decode[FAKE ? scale & 127 : 0];
        if (FAKE && ROUND == NEAREST && is_finite(decode_factor) &&
            (D == NIB_BF16 || s.table.factor[scale & 127] > 0)) {
            float y[NIB_BLOCK];
            to_floats(v, y);
            round_values<D>(y, s.table.factor[scale & 127], decode_factor);
            store_line<D>((char *)j.out + element_of(p, j.out_stride) * element_bytes<D>(), y, p.n,
                          WHOLE || (p.n == NIB_BLOCK && j.out_aligned));
            return;
        }
        const uint2 codes =
            encode<ROUND, D == NIB_BF16>(j, v, s.table.factor[scale & 127], st.offset, u.origin_line + p.line,
                                         nib_random_column((int64_t)u.origin_block + p.block, false));
        if (!FAKE) {
            if (WHOLE)
                *(uint2 *)(u.codes + p.number * (NIB_BLOCK / 2)) = codes;
            else
                store_codes(u, p.line, p.block, codes, p.n);
            return;
        }
        char *const out = (char *)j.out + element_of(p, j.out_stride) * element_bytes<D>();
        float y[NIB_BLOCK];
        decode_block(codes, decode_factor, y);
        store_line<D>(out, y, p.n, (WHOLE || (p.n == NIB_BLOCK && j.out_aligned)) && is_finite(decode_factor));
    }
};

/* What codes of BF16 to nearest stand for, of whole blocks without gaps. A thread has half a block, so that neighbors read
 * and write side by side; the maxima of halves meet in shared memory. */
struct round_halves : kernel_defaults {
    enum { PHASES = 2, BARRIER_AFTER_FIRST = WARP_BARRIER, UNITS = 4, BLOCKS = 6, HALF = NIB_BLOCK / 2 };
    typedef nib_cuda_quantization job;
    struct shared {
        factor_table table;
        float decode[128];
        uint16_t most[2][UNITS][THREADS]; /* by turns: a neighbor may still read those of the tile before */
    };
    struct state {
        nib_scaler scaler;
        uint32_t w[UNITS][HALF / 2];
        int turn;
    };

    static NIB_MEMBER int64_t halves(const job &j) { return j.line_count * j.usage[0].g.scale_shape[1] * 2; }
    static uint32_t tiles(const job &j) { return (uint32_t)((halves(j) + THREADS * UNITS - 1) / (THREADS * UNITS)); }
    static DEV_MEMBER void begin(const job &j, shared &s, state &st, int t, bool first)
    {
        st.scaler = scaler_of(read_tensor_scale(j.usage[0], first && t == 0), j.rules);
        st.turn = 0;
        fill_table(s.table, st.scaler, j.rules, t);
        if (t < 128)
            s.decode[t] = nib_nvfp4_decode_factor((nib_scale_bits)t, st.scaler.tensor_scale, &j.rules);
    }
    template <int P>
    static DEV_MEMBER void phase(const job &j, shared &s, state &st, uint32_t tile, uint32_t tiles, int t)
    {
        const int64_t before = j.first_line * j.usage[0].g.scale_shape[1] * 2, all = halves(j),
                      first = (int64_t)(j.reverse ? tiles - 1 - tile : tile) * (THREADS * UNITS) + t;
        if (P == 0)
            take(j, s, st, before, first, all, t);
        if (P == 1)
            store(j, s, st, before, first, all, t);
    }
    static DEV_MEMBER void take(const job &j, shared &s, state &st, int64_t before, int64_t first, int64_t all, int t)
    {
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const int64_t i = first + k * THREADS;
            const uint4 q = i < all ? ((const uint4 *)j.x)[before + i] : make_uint4(0, 0, 0, 0);
            st.w[k][0] = q.x, st.w[k][1] = q.y, st.w[k][2] = q.z, st.w[k][3] = q.w;
        }
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++)
            s.most[st.turn][k][t] = (uint16_t)absmax_pairs(st.w[k], s.table.factor);
    }
    static DEV_MEMBER void store(const job &j, shared &s, state &st, int64_t before, int64_t first, int64_t all, int t)
    {
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const int64_t i = first + k * THREADS;
            const uint32_t m = max((uint32_t)s.most[st.turn][k][t], (uint32_t)s.most[st.turn][k][t ^ 1]);
            const uint32_t scale = block_scale<NEAREST>(__uint_as_float(m << 16), st.scaler, j.rounding, j.floor_code);
            if (i < all)
                round_half(s, st.w[k], scale & 127, (char *)j.out + (before + i) * 16);
        }
        st.turn ^= 1;
    }
    static DEV_MEMBER void round_half(const shared &s, const uint32_t (&w)[HALF / 2], uint32_t scale, char *out)
    {
        const float factor = s.table.factor[scale], decode_factor = s.decode[scale];
        float y[HALF];
        if (is_finite(decode_factor)) {
            NIB_UNROLL
            for (int i = 0; i < HALF; i++)
                y[i] = i % 2 ? high_half(w[i / 2]) : low_half(w[i / 2]);
            round_values<NIB_BF16>(y, factor, decode_factor);
        } else {
            values<NIB_BF16> v = {};
            NIB_UNROLL
            for (int i = 0; i < HALF / 2; i++)
                v.w[i] = w[i];
            decode_some(encode_half<NEAREST>(v, 0, factor, nullptr), decode_factor, y);
        }
        store_line<NIB_BF16>(out, y, HALF, is_finite(decode_factor));
    }
};

/* ---- Tiles of 1x16 blocks for columns, and for rows on the way ---- */

/* Where a tile is, in tiles: found once, since it takes two divisions. */
struct tile_place {
    uint32_t down, across;
};

/* Tiles of four bands of rows follow one another, so that pieces of a column meet in the cache. */
DEV tile_place place_of_tile(uint32_t tile, int64_t rows, int64_t cols, int tile_rows, int tile_cols)
{
    enum { BANDS = 4 };
    const uint32_t down = (uint32_t)((rows + tile_rows - 1) / tile_rows),
                   across = (uint32_t)((cols + tile_cols - 1) / tile_cols);
    const uint32_t group = tile / (BANDS * across), rest = tile - group * BANDS * across;
    const uint32_t bands = min(down - group * BANDS, (uint32_t)BANDS), c = rest / bands;
    return { group * BANDS + rest - c * bands, c };
}

/* The scales of eight blocks of a line as two words: rows of scales and tiles of them keep four blocks together. Outside
 * the matrix they are 0. */
DEV void store_scale_words(const nib_cuda_usage &u, int64_t line, int64_t block, uint2 scales)
{
    const uint32_t w[2] = { scales.x, scales.y };
    NIB_UNROLL
    for (int k = 0; k < 2; k++) {
        const int64_t first = block + 4 * k;
        if (line >= u.g.scale_shape[0] || first >= u.g.scale_shape[1])
            continue;
        const int valid = line >= u.g.lines ? 0 : (int)(u.g.blocks - first < 4 ? u.g.blocks - first : 4);
        const uint32_t word = valid >= 4 ? w[k] : valid <= 0 ? 0 : w[k] & ((1u << 8 * valid) - 1);
        *(uint32_t *)(u.scales + scale_index(u.g, line, first)) = word;
    }
}

/* The scale of one block; outside the matrix it is 0. */
DEV void store_scale(const nib_cuda_usage &u, int64_t line, int64_t block, uint32_t scale)
{
    if (line < u.g.scale_shape[0] && block < u.g.scale_shape[1])
        u.scales[scale_index(u.g, line, block)] = (uint8_t)(line < u.g.lines && block < u.g.blocks ? scale : 0);
}

enum { TILE_ROWS = 128, BANDS = TILE_ROWS / NIB_BLOCK, STAGE_PITCH = 72 }; /* bytes of a column's codes, padded */

/* Codes and scales of a tile's columns on their way to memory. */
template <int COLS> struct stage {
    __align__(16) uint8_t codes[COLS][STAGE_PITCH];
    __align__(16) uint8_t scales[COLS][BANDS];
};

template <bool WHOLE, int COLS>
DEV void store_stage(const nib_cuda_usage &u, const stage<COLS> &s, int64_t row, int64_t col, int t)
{
    for (int i = t; i < COLS * BANDS; i += THREADS) {
        const int64_t line = col + i / BANDS, block = row / NIB_BLOCK + i % BANDS;
        const uint2 codes = *(const uint2 *)&s.codes[i / BANDS][i % BANDS * 8];
        const int n = WHOLE ? NIB_BLOCK : line < u.g.lines ? clamp_to_block(u.g.length - block * NIB_BLOCK) : 0;
        if (WHOLE)
            *(uint2 *)(u.codes + line * u.g.line_stride + block * (NIB_BLOCK / 2)) = codes;
        else if (n)
            store_codes(u, line, block, codes, n);
    }
    for (int c = t; c < COLS; c += THREADS) {
        if (WHOLE)
            *(uint2 *)(u.scales + (col + c) * u.g.scale_line + row / NIB_BLOCK) = *(const uint2 *)s.scales[c];
        else
            store_scale_words(u, col + c, row / NIB_BLOCK, *(const uint2 *)s.scales[c]);
    }
}

/* WHOLE: of whole tiles, which can be read and written in sixteens and eights. */
template <nib_dtype D, bool RHT, int ROUND, bool WHOLE> struct quantize_tiles : kernel_defaults {
    enum {
        PHASES = 3,
        WORDS = 64,
        COLS = D == NIB_F32 ? 64 : 128,
        ROW_BLOCKS = COLS / NIB_BLOCK,
        UNITS = COLS / 32,
        BLOCKS = RHT || ROUND != NEAREST ? 3 : 4
    };
    typedef nib_cuda_quantization job;
    struct shared {
        __align__(16) uint32_t values[TILE_ROWS][WORDS];
        stage<COLS> out;
        factor_table table[2];
    };
    struct state {
        nib_scaler scaler[2];
        uint64_t offset;
        tile_place tile;
    };

    static uint32_t tiles(const job &j)
    {
        return (uint32_t)((j.rows + TILE_ROWS - 1) / TILE_ROWS * ((padded_cols(j) + COLS - 1) / COLS));
    }
    static NIB_MEMBER int64_t padded_cols(const job &j)
    {
        return (j.cols + 127) / 128 * 128;
    } /* scales of columns are */

    static DEV_MEMBER void begin(const job &j, shared &s, state &st, int t, bool first)
    {
        const float col = read_tensor_scale(j.usage[1], first && t == 0);
        const float row = j.wanted[0] ? read_tensor_scale(j.usage[0], first && t == 0) : col;
        st.scaler[0] = scaler_of(row, j.rules);
        st.scaler[1] = scaler_of(col, j.rules);
        st.offset = ROUND == NEAREST ? 0 : offset_of(j);
        if (t < 128) /* not by an index: the scalers are registers */
            fill_table(s.table[0], st.scaler[0], j.rules, t);
        else
            fill_table(s.table[1], st.scaler[1], j.rules, t - 128);
    }
    template <int P>
    static DEV_MEMBER void phase(const job &j, shared &s, state &st, uint32_t tile, uint32_t tiles, int t)
    {
        if (P == 0)
            st.tile = place_of_tile(j.reverse ? tiles - 1 - tile : tile, j.rows, padded_cols(j), TILE_ROWS, COLS);
        const int64_t row = (int64_t)st.tile.down * TILE_ROWS, col = (int64_t)st.tile.across * COLS;
        if (P == 0)
            take_rows(j, s, st, row, col, t);
        if (P == 1)
            take_columns(j, s, st, row, col, t);
        if (P == 2)
            store_stage<WHOLE>(j.usage[1], s.out, row, col, t);
    }
    static DEV_MEMBER void take_rows(const job &j, shared &s, const state &st, int64_t row, int64_t col, int t)
    {
        const int lane = t % 32, warp = t / 32, b = lane % ROW_BLOCKS;
        raw_block<D> raw[UNITS];
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const int64_t line = row + (UNITS * warp + k) * (32 / ROW_BLOCKS) + lane / ROW_BLOCKS,
                          first = col + b * NIB_BLOCK;
            const int n = WHOLE ? NIB_BLOCK : line < j.rows ? clamp_to_block(j.cols - first) : 0;
            load_raw(raw[k], (const char *)j.x + (line * j.row_stride + first) * element_bytes<D>(), n,
                     WHOLE || j.aligned);
        }
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const int r = (UNITS * warp + k) * (32 / ROW_BLOCKS) + lane / ROW_BLOCKS;
            keep_raw(raw[k], &s.values[r][b * (WORDS / ROW_BLOCKS)], lane);
            if (j.wanted[0])
                encode_row(j, s, st, raw[k], row + r, col / NIB_BLOCK + b);
        }
    }
    /* Lanes that would meet in a bank store their quads in another order. */
    static DEV_MEMBER void keep_raw(const raw_block<D> &raw, uint32_t *to, int lane)
    {
        uint4 *const at = (uint4 *)to;
        if constexpr (D == NIB_F32) {
            const int turn = lane / 2 % 4;
            NIB_UNROLL
            for (int i = 0; i < 4; i++) {
                const int from = (i + turn) % 4;
                at[from] = from == 0 ? raw.q[0] : from == 1 ? raw.q[1] : from == 2 ? raw.q[2] : raw.q[3];
            }
        } else {
            const bool swap = lane & 4;
            at[swap] = swap ? raw.q[1] : raw.q[0];
            at[!swap] = swap ? raw.q[0] : raw.q[1];
        }
    }
    static DEV_MEMBER void encode_row(const job &j, shared &s, const state &st, const raw_block<D> &raw, int64_t line,
                                      int64_t block)
    {
        const nib_cuda_usage &u = j.usage[0];
        const int n = WHOLE ? NIB_BLOCK : line < j.rows ? clamp_to_block(j.cols - block * NIB_BLOCK) : 0;
        values<D> v;
        unpack(v, raw);
        const uint32_t scale = block_scale<ROUND>(absmax(v, s.table[0].factor), st.scaler[0], j.rounding, j.floor_code);
        if (WHOLE)
            u.scales[line * u.g.scale_line + block] = (uint8_t)scale;
        else
            store_scale(u, line, block, scale);
        if (!n)
            return;
        const uint2 codes = encode<ROUND, D == NIB_BF16>(j, v, s.table[0].factor[scale & 127], st.offset,
                                                         u.origin_line + (uint32_t)line,
                                                         nib_random_column(u.origin_block + block, false));
        if (WHOLE)
            *(uint2 *)(u.codes + line * u.g.line_stride + block * (NIB_BLOCK / 2)) = codes;
        else
            store_codes(u, line, block, codes, n);
    }
    static DEV_MEMBER void take_columns(const job &j, shared &s, const state &st, int64_t row, int64_t col, int t)
    {
        constexpr int halves = COLS / WORDS;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
        for (int turn = 0; turn < 2; turn++) {
            const int word = t % WORDS, band = t / WORDS + turn * (THREADS / WORDS);
            uint32_t w[NIB_BLOCK];
            NIB_UNROLL
            for (int i = 0; i < NIB_BLOCK; i++)
                w[i] = s.values[band * NIB_BLOCK + i][word];
            NIB_UNROLL
            for (int half = 0; half < halves; half++) {
                values<D> v;
                take_column(j, w, half, v);
                encode_column(j, s, st, v, word * halves + half, band, row, col);
            }
        }
    }
    /* A column of words that hold one or two, transformed where it is to be. */
    static DEV_MEMBER void take_column(const job &j, const uint32_t (&w)[NIB_BLOCK], int half, values<D> &v)
    {
        float x[NIB_BLOCK];
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK; i++)
            x[i] = D == NIB_F32   ? __uint_as_float(w[i])
                   : D == NIB_F16 ? f32_of_f16((uint16_t)(w[i] >> 16 * half))
                   : half         ? high_half(w[i])
                                  : low_half(w[i]);
        if constexpr (RHT)
            rht_of(x, j.signs, v);
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK && !RHT; i++) {
            if constexpr (D == NIB_BF16)
                v.w[i / 2] = __byte_perm(w[i / 2 * 2], w[i / 2 * 2 + 1], half ? 0x7632 : 0x5410);
            else
                v.x[i] = x[i];
        }
    }
    static DEV_MEMBER void encode_column(const job &j, shared &s, const state &st, values<D> &v, int c, int band,
                                         int64_t row, int64_t col)
    {
        const nib_cuda_usage &u = j.usage[1];
        const uint32_t scale = block_scale<ROUND>(absmax(v, s.table[1].factor), st.scaler[1], j.rounding, j.floor_code);
        *(uint2 *)&s.out.codes[c][band * 8] = encode<ROUND, D == NIB_BF16>(
            j, v, s.table[1].factor[scale & 127], st.offset, u.origin_line + (uint32_t)(col + c),
            nib_random_column(u.origin_block + row / NIB_BLOCK + band, true));
        s.out.scales[c][band] = (uint8_t)scale;
    }
};

/* ---- 16x16 blocks: the columns' codes are those of the rows, transposed ---- */

/* Eight by eight nibbles. */
DEV void transpose_nibbles(uint32_t (&a)[8])
{
    NIB_UNROLL
    for (int i = 0; i < 4; i++) { /* quarters of 4x4 */
        const uint32_t low = a[i], high = a[i + 4];
        a[i] = __byte_perm(low, high, 0x5410), a[i + 4] = __byte_perm(low, high, 0x7632);
    }
    NIB_UNROLL
    for (int i = 0; i < 8; i++) /* of 2x2 */
        if (!(i & 2)) {
            const uint32_t low = a[i], high = a[i + 2];
            a[i] = __byte_perm(low, high, 0x6240), a[i + 2] = __byte_perm(low, high, 0x7351);
        }
    NIB_UNROLL
    for (int i = 0; i < 8; i += 2) { /* single ones */
        const uint32_t low = a[i], high = a[i + 1];
        a[i] = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4;
        a[i + 1] = (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
    }
}

template <nib_dtype D, int ROUND, bool WHOLE> struct quantize_squares : kernel_defaults {
    enum { PHASES = 4, BARRIER_AFTER_FIRST = WARP_BARRIER, COLS = 128, ROW_BLOCKS = 8, UNITS = 4, BLOCKS = 3 };
    typedef nib_cuda_quantization job;
    struct shared {
        __align__(16) uint8_t codes[TILE_ROWS][STAGE_PITCH];
        stage<COLS> out;
        __align__(8) uint8_t scales[ROW_BLOCKS][BANDS];
        uint32_t amax[BANDS][ROW_BLOCKS]; /* a warp's rows are one band */
        factor_table table;
    };
    struct state {
        nib_scaler scaler;
        uint64_t offset;
        tile_place tile;
        values<D> v[UNITS];
    };

    static uint32_t tiles(const job &j)
    {
        return (uint32_t)((j.rows + TILE_ROWS - 1) / TILE_ROWS * ((j.cols + COLS - 1) / COLS));
    }
    static DEV_MEMBER void begin(const job &j, shared &s, state &st, int t, bool first)
    {
        float scale = 0;
        NIB_UNROLL
        for (int usage = 0; usage < 2; usage++)
            if (j.wanted[usage])
                scale = read_tensor_scale(j.usage[usage], first && t == 0);
        st.scaler = scaler_of(scale, j.rules);
        st.offset = ROUND == NEAREST ? 0 : offset_of(j);
        fill_table(s.table, st.scaler, j.rules, t);
        if (t < BANDS * ROW_BLOCKS)
            s.amax[t / ROW_BLOCKS][t % ROW_BLOCKS] = 0;
    }
    template <int P>
    static DEV_MEMBER void phase(const job &j, shared &s, state &st, uint32_t tile, uint32_t tiles, int t)
    {
        if (P == 0)
            st.tile = place_of_tile(j.reverse ? tiles - 1 - tile : tile, j.rows, j.cols, TILE_ROWS, COLS);
        const int64_t row = (int64_t)st.tile.down * TILE_ROWS, col = (int64_t)st.tile.across * COLS;
        if (P == 0)
            take_rows(j, s, st, row, col, t);
        if (P == 1)
            encode_rows(j, s, st, row, col, t);
        if (P == 2)
            transpose(s, t);
        if (P == 3 && j.wanted[1])
            store_stage<WHOLE>(j.usage[1], s.out, row, col, t);
    }
    static DEV_MEMBER void take_rows(const job &j, shared &s, state &st, int64_t row, int64_t col, int t)
    {
        const int lane = t % 32, band = t / 32, b = lane % ROW_BLOCKS;
        float m = 0;
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const int64_t line = row + band * NIB_BLOCK + k * 4 + lane / ROW_BLOCKS, first = col + b * NIB_BLOCK;
            load_line(st.v[k], (const char *)j.x + (line * j.row_stride + first) * element_bytes<D>(),
                      WHOLE           ? NIB_BLOCK
                      : line < j.rows ? clamp_to_block(j.cols - first)
                                      : 0,
                      WHOLE || j.aligned);
        }
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++)
            m = larger(m, absmax(st.v[k], s.table.factor));
        atomicMax(&s.amax[band][b], __float_as_uint(m));
    }
    static DEV_MEMBER void encode_rows(const job &j, shared &s, state &st, int64_t row, int64_t col, int t)
    {
        const nib_cuda_usage &u = j.usage[0];
        const int lane = t % 32, band = t / 32, b = lane % ROW_BLOCKS;
        const uint32_t scale =
            block_scale<ROUND>(__uint_as_float(s.amax[band][b]), st.scaler, j.rounding, j.floor_code);
        const float factor = s.table.factor[scale & 127];
        const int64_t block = col / NIB_BLOCK + b;
        if (lane < ROW_BLOCKS)
            s.scales[b][band] = (uint8_t)scale;
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const int r = band * NIB_BLOCK + k * 4 + lane / ROW_BLOCKS;
            const int n = WHOLE ? NIB_BLOCK : row + r < j.rows ? clamp_to_block(j.cols - block * NIB_BLOCK) : 0;
            const uint2 codes =
                encode<ROUND, D == NIB_BF16>(j, st.v[k], factor, st.offset, u.origin_line + (uint32_t)(row + r),
                                             nib_random_column(u.origin_block + block, false));
            *(uint2 *)&s.codes[r][b * 8] = n ? codes : make_uint2(0, 0);
            if (!j.wanted[0])
                continue;
            if (WHOLE) {
                u.scales[(row + r) * u.g.scale_line + block] = (uint8_t)scale;
                *(uint2 *)(u.codes + (row + r) * u.g.line_stride + block * (NIB_BLOCK / 2)) = codes;
                continue;
            }
            store_scale(u, row + r, block, scale);
            if (n)
                store_codes(u, row + r, block, codes, n);
        }
    }
    static DEV_MEMBER void transpose(shared &s, int t)
    {
        const int c = t % 16, r = t / 16;
        uint32_t n[8];
        NIB_UNROLL
        for (int i = 0; i < 8; i++)
            n[i] = *(const uint32_t *)&s.codes[r * 8 + i][c * 4];
        transpose_nibbles(n);
        NIB_UNROLL
        for (int i = 0; i < 8; i++)
            *(uint32_t *)&s.out.codes[c * 8 + i][r * 4] = n[i];
        if (t < COLS)
            *(uint2 *)s.out.scales[t] = *(const uint2 *)s.scales[t / NIB_BLOCK];
        if (t < BANDS * ROW_BLOCKS)
            s.amax[t / ROW_BLOCKS][t % ROW_BLOCKS] = 0;
    }
};

/* ---- Any rule: a thread has one line of one block ---- */

/* Which line and block of a usage a thread has. Neighbors are side by side in memory: blocks of a row, or columns; the
 * sixteen lines of a square tile are in one thread block. */
struct line_place {
    int64_t line, block;
};
struct line_tiling {
    int lines, blocks; /* of a thread block */
};
NIB_INLINE line_tiling tiling_of(bool columns, bool square)
{
    return square ? line_tiling{ 16, 16 } : columns ? line_tiling{ 32, 8 } : line_tiling{ 8, 32 };
}
NIB_INLINE int64_t tiles_of(const nib_usage_geometry &g, bool columns, bool square)
{
    const line_tiling size = tiling_of(columns, square);
    return (g.scale_shape[0] + size.lines - 1) / size.lines * ((g.scale_shape[1] + size.blocks - 1) / size.blocks);
}
DEV line_place place_of(const nib_usage_geometry &g, bool columns, bool square, uint32_t tile, int t)
{
    const line_tiling size = tiling_of(columns, square);
    const uint32_t across = (uint32_t)((g.scale_shape[1] + size.blocks - 1) / size.blocks), down = tile / across;
    const int64_t line = (int64_t)down * size.lines, block = (int64_t)(tile - down * across) * size.blocks;
    return columns ? line_place{ line + t % size.lines, block + t / size.lines }
                   : line_place{ line + t / size.blocks, block + t % size.blocks };
}
/* The k-th line of the square tile that a thread has a line of. */
DEV int square_thread(bool columns, int t, int k) { return columns ? t / 16 * 16 + k : k * 16 + t % 16; }

/* A block of a usage from the matrix; n elements. */
template <nib_dtype D, class Job>
DEV void load_block(const Job &j, bool columns, const line_place &at, int n, values<D> &v)
{
    const int64_t first = at.block * NIB_BLOCK,
                  element = columns ? first * j.row_stride + at.line : at.line * j.row_stride + first;
    const char *const from = (const char *)j.x + element * element_bytes<D>();
    if (columns)
        load_strided(v, from, j.row_stride, n);
    else
        load_line(v, from, n, j.aligned);
}

template <nib_dtype D, bool FAKE> struct quantize_lines : kernel_defaults {
    enum { PHASES = 3, BLOCKS = 2 };
    typedef nib_cuda_quantization job;
    struct shared {
        float amax[THREADS];
        float error[2][THREADS];
    };
    struct state {
        float scale_shared; /* of the tensor */
        uint64_t offset;
        values<D> v;
        line_place at;
        int n;
        nib_scaler scaler;
        uint2 codes[2];
        uint32_t scale[2];
    };

    static NIB_MEMBER bool columns(const job &j) { return j.wanted[1]; }
    static uint32_t tiles(const job &j) { return (uint32_t)tiles_of(j.usage[columns(j)].g, columns(j), j.square); }

    static DEV_MEMBER void begin(const job &j, shared &, state &st, int t, bool first)
    {
        st.offset = j.rounding == NIB_ROUND_NEAREST ? 0 : offset_of(j);
        st.scale_shared = j.per_line ? 0 : read_tensor_scale(j.usage[columns(j)], first && t == 0);
    }
    template <int P> static DEV_MEMBER void phase(const job &j, shared &s, state &st, uint32_t tile, uint32_t, int t)
    {
        if (P == 0)
            take(j, s, st, tile, t);
        if (P == 1)
            choose(j, s, st, t);
        if (P == 2)
            store(j, s, st, t);
    }
    static DEV_MEMBER void take(const job &j, shared &s, state &st, uint32_t tile, int t)
    {
        const nib_cuda_usage &u = j.usage[columns(j)];
        st.at = place_of(u.g, columns(j), j.square, tile, t);
        st.n = st.at.line < u.g.lines ? clamp_to_block(u.g.length - st.at.block * NIB_BLOCK) : 0;
        load_block<D>(j, columns(j), st.at, st.n, st.v);
        if (u.rht)
            rht(st.v, j.signs);
        float scale = st.scale_shared;
        if (j.per_line) {
            scale = st.n ? u.source[st.at.line] : 0;
            if (st.n && st.at.block == 0 && u.tensor_scales && u.source != u.tensor_scales)
                u.tensor_scales[st.at.line] = scale;
        }
        st.scaler = scaler_of(scale, j.rules);
        s.amax[t] = st.n ? absmax(st.v, nullptr) : 0;
    }
    static DEV_MEMBER uint2 codes_under(const job &j, const state &st, uint32_t scale)
    {
        const bool col = columns(j);
        const nib_cuda_usage &u = j.usage[col];
        const float factor = nib_te_factor(scale, 0, &st.scaler, &j.rules);
        const uint32_t line = u.origin_line + (uint32_t)st.at.line,
                       block = nib_random_column(u.origin_block + st.at.block, col);
        if (j.rounding == NIB_ROUND_NEAREST)
            return encode<NEAREST, false>(j, st.v, factor, st.offset, line, block);
        if (j.square && col)
            return transposed_codes(j, st, factor);
        return j.rounding == NIB_ROUND_STOCHASTIC_8
                   ? encode<STOCHASTIC_8, false>(j, st.v, factor, st.offset, line, block)
                   : encode<STOCHASTIC_24, false>(j, st.v, factor, st.offset, line, block);
    }
    /* A column of a square tile under the random bits of the rows: one element of every row's block. */
    static DEV_MEMBER uint2 transposed_codes(const job &j, const state &st, float factor)
    {
        const nib_cuda_usage &u = j.usage[0];
        const int bits = nib_random_bits(j.rounding), i = (int)(st.at.line % NIB_BLOCK);
        const uint32_t column = nib_random_column(u.origin_block + st.at.line / NIB_BLOCK, false);
        float x[NIB_BLOCK];
        uint32_t half[2] = { 0, 0 };
        to_floats(st.v, x);
        NIB_UNROLL
        for (int k = 0; k < NIB_BLOCK; k++) {
            const uint32_t line = u.origin_line + (uint32_t)(st.at.block * NIB_BLOCK + k);
            uint32_t words[4];
            random_words(j, st.offset + (bits == 24 ? (uint64_t)(i / 4) : 0), line, column, words);
            const int at = bits == 24 ? i % 4 : i / 4;
            const uint32_t word = at == 0 ? words[0] : at == 1 ? words[1] : at == 2 ? words[2] : words[3];
            const uint32_t r = bits == 24 ? word >> 8 : word >> 8 * (i % 4) & 255;
            half[k / 8] |= (uint32_t)nib_e2m1_stochastic(__fmul_rn(x[k], factor), r, bits) << 4 * (k % 8);
        }
        return make_uint2(half[0], half[1]);
    }
    static DEV_MEMBER void unpack_codes(uint2 codes, uint8_t (&out)[NIB_BLOCK])
    {
        NIB_UNROLL
        for (int i = 0; i < NIB_BLOCK; i++)
            out[i] = (uint8_t)((i < 8 ? codes.x : codes.y) >> 4 * (i % 8) & 15);
    }
    static DEV_MEMBER void choose(const job &j, shared &s, state &st, int t)
    {
        float amax = s.amax[t];
        if (j.square) {
            amax = 0;
            NIB_UNROLL
            for (int k = 0; k < NIB_BLOCK; k++)
                amax = larger(amax, s.amax[square_thread(columns(j), t, k)]);
        }
        if (j.scale_rule == NIB_SCALE_SWEEP) {
            sweep(j, st, amax);
        } else if (j.scale_rule == NIB_SCALE_4OVER6) {
            float x[NIB_BLOCK];
            uint8_t codes[NIB_BLOCK];
            to_floats(st.v, x);
            NIB_UNROLL
            for (int four = 0; four < 2; four++) {
                st.scale[four] = nib_4over6_scale(amax, four, &st.scaler, j.floor_code);
                st.codes[four] = codes_under(j, st, st.scale[four]);
                unpack_codes(st.codes[four], codes);
                s.error[four][t] = nib_4over6_error(x, codes, st.n, (uint8_t)st.scale[four], &st.scaler, &j.rules,
                                                    j.error_mode, j.fast_error);
            }
        } else {
            st.scale[0] = block_scale<STOCHASTIC_24>(amax, st.scaler, j.rounding, j.floor_code);
            st.codes[0] = codes_under(j, st, st.scale[0]);
        }
    }
    static DEV_MEMBER void sweep(const job &j, state &st, float amax)
    {
        const float scale_inv = nib_scale_inv(st.scaler.tensor_scale, &j.rules);
        const int rtn = (int)block_scale<NEAREST>(amax, st.scaler, j.rounding, j.floor_code);
        const float *const importance = j.importance ? j.importance + st.at.block * NIB_BLOCK : nullptr;
        float x[NIB_BLOCK], least = 0;
        to_floats(st.v, x);
        for (int i = 0; i < NIB_SWEEP_CANDIDATES; i++) {
            const int code = rtn + nib_sweep_offset(i);
            if (!nib_sweep_allows(code, rtn, j.floor_code))
                continue;
            uint8_t unpacked[NIB_BLOCK];
            const uint2 codes = codes_under(j, st, (uint32_t)code);
            unpack_codes(codes, unpacked);
            const float error = nib_weighted_sweep_error(x, unpacked, st.n, (uint8_t)code, scale_inv, importance);
            if (i == 0 || error < least) {
                least = error;
                st.codes[0] = codes;
                st.scale[0] = (uint32_t)code;
            }
        }
    }
    static DEV_MEMBER float error_of(const job &j, const shared &s, int four, int t)
    {
        if (!j.square)
            return s.error[four][t];
        float lines[NIB_BLOCK];
        NIB_UNROLL
        for (int k = 0; k < NIB_BLOCK; k++)
            lines[k] = s.error[four][square_thread(columns(j), t, k)];
        return nib_tree_sum(lines);
    }
    static DEV_MEMBER void store(const job &j, shared &s, const state &st, int t)
    {
        const nib_cuda_usage &u = j.usage[columns(j)];
        uint2 codes = st.codes[0];
        uint32_t scale = st.scale[0];
        if (j.scale_rule == NIB_SCALE_4OVER6 && error_of(j, s, 1, t) < error_of(j, s, 0, t)) /* a tie is six */
            codes = st.codes[1], scale = st.scale[1];
        if (!FAKE)
            store_scale(u, st.at.line, st.at.block, scale);
        if (!st.n)
            return;
        if (!FAKE) {
            store_codes(u, st.at.line, st.at.block, codes, st.n);
            return;
        }
        float y[NIB_BLOCK];
        decode_slowly(codes, nib_nvfp4_decode_factor(scale, st.scaler.tensor_scale, &j.rules), u.rht, j.sign_mask, y);
        const int64_t first = st.at.block * NIB_BLOCK;
        const int64_t element = columns(j) ? first * j.out_stride + st.at.line : st.at.line * j.out_stride + first;
        char *const out = (char *)j.out + element * element_bytes<D>();
        if (columns(j))
            store_strided<D>(out, j.out_stride, y, 0, st.n);
        else
            store_line<D>(out, y, st.n, false);
    }
};

/* ---- Back ---- */

/* Rows, 16 bytes of values a thread. */
template <nib_dtype D> struct decode_rows : kernel_defaults {
    enum { UNITS = 4, BLOCKS = 6, EACH = D == NIB_F32 ? 4 : 8 };
    typedef nib_cuda_dequantization job;
    struct shared {
        float factor[256];
    };
    static uint32_t tiles(const job &j) { return (uint32_t)((j.item_count + THREADS * UNITS - 1) / (THREADS * UNITS)); }
    static DEV_MEMBER void begin(const job &j, shared &s, nothing &, int t, bool)
    {
        s.factor[t] = nib_nvfp4_decode_factor((nib_scale_bits)t, *j.usage.tensor_scales, &j.rules);
    }
    template <int P> static DEV_MEMBER void phase(const job &j, shared &s, nothing &, uint32_t tile, uint32_t, int t)
    {
        const uint32_t per_line = (uint32_t)(j.cols / EACH), all = (uint32_t)j.item_count;
        const uint32_t first = tile * (THREADS * UNITS) + (uint32_t)t;
        uint32_t codes[UNITS], scales[UNITS];
        int64_t to[UNITS];
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const uint32_t i = first + (uint32_t)k * THREADS;
            if (i >= all)
                continue;
            const uint32_t row = divide(i, j.by_line), at = i - row * per_line;
            const int64_t line = j.first + j.first_item + row;
            const uint8_t *const from = j.usage.codes + line * j.usage.g.line_stride + (int64_t)at * (EACH / 2);
            codes[k] = EACH == 8 ? *(const uint32_t *)from : *(const uint16_t *)from;
            scales[k] = j.usage.scales[scale_index(j.usage.g, line, at / (NIB_BLOCK / EACH))];
            to[k] = (j.first_item + row) * j.out_stride + (int64_t)at * EACH;
        }
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            if (first + (uint32_t)k * THREADS >= all)
                continue;
            const float factor = s.factor[scales[k]];
            float y[EACH];
            decode_some(codes[k], factor, y);
            store_line<D>((char *)j.out + to[k] * element_bytes<D>(), y, EACH, is_finite(factor));
        }
    }
};

/* Any usage: a thread has one block. */
template <nib_dtype D> struct decode_lines : kernel_defaults {
    enum { BLOCKS = 4 };
    typedef nib_cuda_dequantization job;
    static uint32_t tiles(const job &j) { return (uint32_t)tiles_of(j.usage.g, j.from == NIB_COLUMNWISE, false); }
    template <int P> static DEV_MEMBER void phase(const job &j, nothing &, nothing &, uint32_t tile, uint32_t, int t)
    {
        const nib_cuda_usage &u = j.usage;
        const bool columns = j.from == NIB_COLUMNWISE;
        const line_place at = place_of(u.g, columns, false, tile, t);
        const int64_t start = at.block * NIB_BLOCK, end = j.first + j.rows;
        if (at.line >= u.g.lines || at.block >= u.g.blocks ||
            (columns ? start + NIB_BLOCK <= j.first || start >= end : at.line < j.first || at.line >= end))
            return;
        const int n = clamp_to_block(u.g.length - start);
        const uint8_t scale = u.scales[scale_index(u.g, at.line, at.block)];
        float y[NIB_BLOCK];
        decode_slowly(load_codes(u, at.line, at.block, n),
                      nib_nvfp4_decode_factor(scale, u.tensor_scales[j.per_line ? at.line : 0], &j.rules), u.rht,
                      j.sign_mask, y);
        const int64_t element =
            columns ? (start - j.first) * j.out_stride + at.line : (at.line - j.first) * j.out_stride + start;
        char *const out = (char *)j.out + element * element_bytes<D>();
        if (columns)
            store_strided<D>(out, j.out_stride, y, (int)(j.first > start ? j.first - start : 0),
                             clamp_to_block((u.g.length < end ? u.g.length : end) - start));
        else
            store_line<D>(out, y, n, false);
    }
};

/* ---- Copies ---- */

struct copy_quads : kernel_defaults {
    enum { UNITS = 4, BLOCKS = 8 };
    typedef nib_cuda_copy job;
    static uint32_t tiles(const job &j) { return (uint32_t)((j.quads + THREADS * UNITS - 1) / (THREADS * UNITS)); }
    template <int P> static DEV_MEMBER void phase(const job &j, nothing &, nothing &, uint32_t tile, uint32_t, int t)
    {
        const int64_t first = (int64_t)tile * (THREADS * UNITS) + t;
        uint4 q[UNITS];
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++)
            if (first + k * THREADS < j.quads)
                q[k] = ((const uint4 *)j.from)[first + k * THREADS];
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++)
            if (first + k * THREADS < j.quads)
                ((uint4 *)j.to)[first + k * THREADS] = q[k];
    }
};

/* ---- Amaxes ---- */

struct amax_shared {
    uint32_t most[2];
};
struct amax_state {
    float most[2]; /* of the values, and of what the RHT makes of them */
};

/* nib_fmax into memory that another thread may be raising too. */
DEV void raise_to(float *at, float value)
{
    uint32_t seen = __float_as_uint(*at), before;
    do {
        before = seen;
        seen = atomicCAS((uint32_t *)at, before, __float_as_uint(nib_fmax(__uint_as_float(before), value)));
    } while (seen != before);
}

/* A thread block's maxima to everybody's; the last thread block has seen all, writes what follows from them and leaves the
 * tickets as they were: no launch for either. */
DEV void finish_amax(const nib_cuda_amax &j, int which, uint32_t bits, uint32_t blocks)
{
    atomicMax(&j.tickets[2 * which + 1], bits);
    __threadfence();
    if (atomicAdd(&j.tickets[2 * which], 1) != blocks - 1)
        return;
    const float amax = __uint_as_float(atomicExch(&j.tickets[2 * which + 1], 0));
    atomicExch(&j.tickets[2 * which], 0);
    const float value = j.raw ? amax : tensor_scale_from(amax, j.unbiased, j.rules);
    NIB_UNROLL
    for (int i = 0; i < 2; i++)
        if (j.to[which][i])
            *j.to[which][i] = value;
    if (j.seen[which])
        raise_to(j.seen[which], amax);
}

struct amax_kernel : kernel_defaults {
    enum { ENDS = 1 };
    typedef nib_cuda_amax job;
    typedef amax_shared shared;
    typedef amax_state state;
    static DEV_MEMBER void begin(const job &, shared &s, state &st, int t, bool)
    {
        if (t < 2)
            s.most[t] = 0;
        st.most[0] = st.most[1] = 0;
    }
    static DEV_MEMBER void gather(const job &j, shared &s, state &st, int t)
    {
        NIB_UNROLL
        for (int i = 0; i < 2; i++) {
            const uint32_t m = max_of_warp(__float_as_uint(st.most[i]));
            if (j.wanted[i] && speaks_for_warp(t))
                atomicMax(&s.most[i], m);
        }
    }
    static DEV_MEMBER void finish(const job &j, shared &s, int t, uint32_t blocks)
    {
        if (t < 2 && j.wanted[t]) /* BF16's RHT is rounded, which keeps the order: once is enough */
            finish_amax(j, t,
                        t && j.dtype == NIB_BF16 ? (uint32_t)nib_bf16_from_f32(__uint_as_float(s.most[t])) << 16
                                                 : s.most[t],
                        blocks);
    }
};

/* Values without gaps, 16 bytes at a time. */
template <nib_dtype D> struct amax_flat : amax_kernel {
    enum { UNITS = 4, BLOCKS = 8, EACH = D == NIB_F32 ? 4 : 8 };
    static int64_t quads(const job &j) { return j.rows * j.cols / EACH; }
    static uint32_t tiles(const job &j) { return (uint32_t)((quads(j) + THREADS * UNITS - 1) / (THREADS * UNITS)) + 1; }
    template <int P>
    static DEV_MEMBER void phase(const job &j, shared &, state &st, uint32_t tile, uint32_t tiles, int t)
    {
        const int64_t all = j.rows * j.cols, quads = all / EACH, first = (int64_t)tile * (THREADS * UNITS) + t;
        if (tile == tiles - 1) { /* the elements after the last quad */
            if (t < (int)(all - quads * EACH))
                st.most[0] = larger(st.most[0], nib_abs(nib_load_value(j.x, quads * EACH + t, D)));
            return;
        }
        uint4 q[UNITS];
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++)
            q[k] = first + k * THREADS < quads ? ((const uint4 *)j.x)[first + k * THREADS] : make_uint4(0, 0, 0, 0);
        uint32_t pair = 0;
        NIB_UNROLL
        for (int k = 0; k < UNITS; k++) {
            const uint32_t w[4] = { q[k].x, q[k].y, q[k].z, q[k].w };
            NIB_UNROLL
            for (int i = 0; i < 4; i++) {
                if (D == NIB_BF16)
                    pair = max_numbers(pair, w[i]);
                else if (D == NIB_F32)
                    st.most[0] = larger(st.most[0], fabsf(__uint_as_float(w[i])));
                else
                    st.most[0] = larger(larger(st.most[0], fabsf(f32_of_f16((uint16_t)w[i]))),
                                        fabsf(f32_of_f16((uint16_t)(w[i] >> 16))));
            }
        }
        if (D == NIB_BF16)
            st.most[0] = larger(st.most[0], __uint_as_float(max(pair & 0xFFFFu, pair >> 16) << 16));
    }
};

/* The values and the RHT of their columns: a thread has sixteen rows of a column, or of two that lie in one word. */
template <nib_dtype D> struct amax_columns : amax_kernel {
    enum { BLOCKS = D == NIB_BF16 ? 5 : 4, EACH = D == NIB_F32 ? 1 : 2 };
    static NIB_MEMBER int64_t words(const job &j) { return (j.cols + EACH - 1) / EACH; }
    static uint32_t tiles(const job &j)
    {
        return (uint32_t)((words(j) * (j.rows / NIB_BLOCK) + THREADS - 1) / THREADS);
    }
    template <int P> static DEV_MEMBER void phase(const job &j, shared &, state &st, uint32_t tile, uint32_t, int t)
    {
        const uint32_t per_line = (uint32_t)words(j);
        const uint32_t i = tile * THREADS + (uint32_t)t, band = divide(i, j.by_line), word = i - band * per_line;
        if (i >= per_line * (uint32_t)(j.rows / NIB_BLOCK))
            return;
        const int64_t first = (int64_t)band * NIB_BLOCK * j.row_stride + (int64_t)word * EACH;
        const int columns = (int)word * EACH + 1 < j.cols ? EACH : 1;
        const char *const at = (const char *)j.x + first * element_bytes<D>();
        const bool whole = j.aligned && columns == EACH;
        uint32_t w[NIB_BLOCK];
        NIB_UNROLL
        for (int r = 0; r < NIB_BLOCK; r++) {
            const char *const from = at + r * j.row_stride * element_bytes<D>();
            if (D == NIB_F32 || whole) {
                w[r] = *(const uint32_t *)from;
            } else {
                w[r] = *(const uint16_t *)from;
                if (columns == EACH)
                    w[r] |= (uint32_t)((const uint16_t *)from)[1] << 16;
            }
        }
        NIB_UNROLL
        for (int half = 0; half < EACH; half++) {
            float x[NIB_BLOCK];
            NIB_UNROLL
            for (int r = 0; r < NIB_BLOCK; r++) {
                x[r] = D == NIB_F32   ? __uint_as_float(w[r])
                       : D == NIB_F16 ? f32_of_f16((uint16_t)(w[r] >> 16 * half))
                       : half         ? high_half(w[r])
                                      : low_half(w[r]);
                st.most[0] = larger(st.most[0], fabsf(x[r]));
            }
            rht_sums<D>(x, j.signs);
            NIB_UNROLL
            for (int r = 0; r < NIB_BLOCK; r++)
                st.most[1] = larger(st.most[1], fabsf(x[r]));
        }
    }
};

/* Any strides of rows, lines of their own, the RHT along rows. The maximum is most[0], of either. */
template <nib_dtype D> struct amax_lines : amax_kernel {
    enum { BLOCKS = 4 };
    static uint32_t tiles(const job &j) { return (uint32_t)tiles_of(geometry(j), columns(j), false); }
    static NIB_MEMBER bool columns(const job &j) { return j.usage == NIB_COLUMNWISE; }
    /* Lines and blocks without any padding. */
    static NIB_MEMBER nib_usage_geometry geometry(const job &j)
    {
        nib_usage_geometry g = {};
        g.lines = g.scale_shape[0] = columns(j) ? j.cols : j.rows;
        g.length = columns(j) ? j.rows : j.cols;
        g.blocks = g.scale_shape[1] = (g.length + NIB_BLOCK - 1) / NIB_BLOCK;
        return g;
    }
    template <int P> static DEV_MEMBER void phase(const job &j, shared &, state &st, uint32_t tile, uint32_t, int t)
    {
        const nib_usage_geometry g = geometry(j);
        const line_place at = place_of(g, columns(j), false, tile, t);
        if (at.line >= g.lines || at.block >= g.blocks)
            return;
        values<D> v;
        load_block<D>(j, columns(j), at, clamp_to_block(g.length - at.block * NIB_BLOCK), v);
        if (j.rht)
            rht(v, j.signs);
        const float m = absmax(v, nullptr);
        if (j.per_line)
            atomicMax((uint32_t *)&j.lines[at.line], __float_as_uint(m));
        else
            st.most[0] = larger(st.most[0], m);
    }
};

#endif
