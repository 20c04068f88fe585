/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product.cuh - products of a few rows of plain values by lines of NVFP4 codes, which are read in place and never
 * anywhere else; and what becomes of an accumulator.
 *
 * A code times its block's scale has at most 6 significant bits: exact in BF16 and in F16. So tensor cores multiply what
 * the codes stand for, and only their sums round.
 */
#ifndef NIB_CUDA_PRODUCT_CUH
#define NIB_CUDA_PRODUCT_CUH

#include "kernels.cuh"

/* ---- Outputs ---- */

DEV float scale_of_product(const nib_cuda_scaled_output &o, int64_t i, int64_t j)
{
    const nib_cuda_side_scale &a = o.side[0], &b = o.side[1];
    return nib_joint_scale(a.values ? &a.values[a.per_line ? i : 0] : NULL, &a.rules,
                           b.values ? &b.values[b.per_line ? j : 0] : NULL, &b.rules);
}

DEV void store_product(const nib_cuda_scaled_output &o, int64_t i, int64_t j, float acc)
{
    nib_output_store(&o.out, i, j, scale_of_product(o, i, j), acc);
}

/* Sums that another kernel left, or none: rows of y side by side. */
struct product_output_item {
    typedef nib_cuda_product_output job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        const int64_t row = i / j.columns;
        store_product(j.to, row, i - row * j.columns, j.sums ? j.sums[i] : 0.0f);
    }
};

/* The words that a library's product reads on the device. */
struct product_factors_item {
    typedef nib_cuda_product_factors job;
    static DEV_MEMBER void at(const job &j, int64_t)
    {
        j.to->one = 1.0f;
        j.to->zero = 0.0f;
        j.to->alpha = j.of.out.alpha * scale_of_product(j.of, 0, 0);
        j.to->beta = j.of.out.beta;
    }
};

/* ---- Tensor cores ---- */

/* What a lane has of A (16 rows by 16 of k) and of B (16 of k by 8 columns): pairs along k. */
struct fragments {
    uint32_t a[4], b[2];
};

#if defined(__CUDACC__)
DEV uint32_t thread_blocks() { return gridDim.x; }
/* What nobody will read again is not to drive anything out. */
DEV uint4 load_once(const uint4 *at)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at));
    return v;
}
DEV uint32_t scaled_pair(uint32_t pair, uint32_t scale, bool f16)
{
    uint32_t r;
    if (f16) {
        __half2 x, s;
        memcpy(&x, &pair, 4), memcpy(&s, &scale, 4);
        x = __hmul2(x, s);
        memcpy(&r, &x, 4);
    } else {
        __nv_bfloat162 x, s;
        memcpy(&x, &pair, 4), memcpy(&s, &scale, 4);
        x = __hmul2(x, s);
        memcpy(&r, &x, 4);
    }
    return r;
}
/* acc += A B, of which a lane has four elements. The other lanes' fragments are theirs to bring. */
template <bool F16, class Get> DEV void multiply(float (&acc)[4], int, const fragments &f, Get)
{
    if constexpr (F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]));
}
#else
DEV uint32_t thread_blocks() { return shim_thread_blocks; }
DEV uint4 load_once(const uint4 *at) { return *at; }
DEV float half_of_pair(uint32_t pair, int which, bool f16)
{
    const uint16_t half = (uint16_t)(pair >> 16 * which);
    return f16 ? nib_f32_from_f16(half) : nib_f32_from_bf16(half);
}
DEV uint32_t scaled_pair(uint32_t pair, uint32_t scale, bool f16)
{
    const float low = half_of_pair(pair, 0, f16) * half_of_pair(scale, 0, f16),
                high = half_of_pair(pair, 1, f16) * half_of_pair(scale, 1, f16);
    return f16 ? f16_pair(low, high) : bf16_pair(low, high);
}
/* Lanes are one after the other: what the others bring is found again. Lane 4 g + q has rows g and g + 8 of A and column g
 * of B, of both the k-pairs q and q + 4; of the product it has columns 2 q and 2 q + 1. */
template <bool F16, class Get> DEV void multiply(float (&acc)[4], int lane, const fragments &, Get get)
{
    for (int q = 0; q < 4; q++) {
        const fragments rows = get(lane / 4 * 4 + q), columns[2] = { get(lane % 4 * 8 + q), get(lane % 4 * 8 + 4 + q) };
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 4; k++)
                acc[i] += half_of_pair(rows.a[i / 2 + k / 2 * 2], k % 2, F16) *
                          half_of_pair(columns[i % 2].b[k / 2], k % 2, F16);
    }
}
#endif

/* ---- Few rows ---- */

/* A warp takes LT times 16 lines of codes, 128 elements at a time: a lane has 32 elements of line g and 32 of line g + 8
 * of each 16. Which element is which of the tensor core's k is the same for codes and values, and otherwise of no matter; so
 * a word of eight codes is taken as pairs (0, 4), (1, 5), (2, 6), (3, 7), which a shift and a mask find. The warps of a
 * thread block divide k, and add up in shared memory.
 *
 * Memory is the limit, so a lane's next AHEAD strips of codes are in flight while it works on one; at the end of a tile
 * these are those of the next. More lines to a warp read the values less often, which many rows of them need.
 *
 * D: of the values. F32 is the sum of three BF16, each of which is multiplied. MT: eights of rows. WHOLE: lines of codes and
 * rows of values can be read in sixteens of bytes, scales two at a time. */
template <nib_dtype D, int MT, bool WHOLE, int LT, int AHEAD, int RESIDENT> struct few_rows : kernel_defaults {
    enum {
        PHASES = 3, /* the last one is empty: sums are read by then, and may be written again */
        WARPS = THREADS / 32,
        LINES = 16 * LT,
        EACH = 32,            /* elements of a lane */
        STEP = 4 * EACH,      /* of a warp */
        ROUND = WARPS * STEP, /* of a thread block */
        F16 = D == NIB_F16,
        PARTS = D == NIB_F32 ? 3 : 1,
        BLOCKS = RESIDENT
    };
    typedef nib_cuda_few_rows job;
    struct shared {
        uint32_t scale[256]; /* pairs */
        float sums[WARPS][LINES][8 * MT + 1];
    };
    struct strip { /* a lane's codes and scales: of two lines of every 16 */
        uint4 codes[LT][2];
        uint32_t scales[LT][2];
    };
    struct places { /* of a lane's lines in a tile: offsets from its first */
        const uint8_t *codes, *scales;
        int line[2 * LT];
        uint32_t code[2 * LT], scale[2 * LT];
    };
    struct state {
        strip next[AHEAD];
        uint32_t tile; /* that these are of */
    };
    static uint32_t tiles(const job &j) { return (uint32_t)((j.weight.g.lines + LINES - 1) / LINES); }

    /* Codes are shifted into the exponent and the mantissa of a 16-bit float: that is 2^-126 (BF16) or 2^-14 (F16) of what
     * they stand for, subnormal or not. A scale has all but 2^-8 of that, so that none overflows. */
    static DEV_MEMBER void begin(const job &, shared &s, state &mine, int t, bool)
    {
        const float scale = nib_f32_from_e4m3((uint8_t)t) * (F16 ? 0x1p6f : 0x1p118f);
        s.scale[t] = F16 ? f16_pair(scale, scale) : bf16_pair(scale, scale);
        mine.tile = UINT32_MAX;
    }

    /* Where a lane's lines are. Beyond the last one it is read once more, and what comes of it dropped. */
    static DEV_MEMBER places places_of(const job &j, uint32_t tile, int lane)
    {
        const nib_cuda_usage &u = j.weight;
        const int64_t first = (int64_t)tile * LINES, left = u.g.lines - 1 - first;
        const int last = left < LINES ? (int)left : LINES - 1;
        places at = { u.codes, u.scales, {}, {}, {} };
        if constexpr (WHOLE) {
            at.codes += first * u.g.line_stride;
            at.scales += u.g.swizzled ? nib_scale_index(&u.g, first, 0) : first * u.g.scale_line;
        }
        NIB_UNROLL
        for (int i = 0; i < 2 * LT; i++) {
            const int wanted = lane / 4 + 8 * i, line = wanted < last ? wanted : last;
            at.line[i] = line;
            at.code[i] = (uint32_t)line * (uint32_t)u.g.line_stride;
            at.scale[i] = u.g.swizzled
                              ? (uint32_t)(line % 32 * 16 + line / 32 * 4) /* from the first, a multiple of 16 */
                              : (uint32_t)line * (uint32_t)u.g.scale_line;
        }
        return at;
    }

    /* Elements k.. of these. */
    static DEV_MEMBER strip load_strip(const job &j, const places &at, uint32_t tile, int k)
    {
        const nib_cuda_usage &u = j.weight;
        const int block = k / NIB_BLOCK, swizzled = block / 4 * 512 + block % 4;
        strip s = {};
        if (k >= (int)u.g.length)
            return s;
        NIB_UNROLL
        for (int i = 0; i < 2 * LT; i++) {
            if constexpr (WHOLE) {
                s.codes[i / 2][i % 2] = load_once((const uint4 *)(at.codes + (at.code[i] + (uint32_t)k / 2)));
                s.scales[i / 2][i % 2] =
                    *(const uint16_t *)(at.scales + (at.scale[i] + (uint32_t)(u.g.swizzled ? swizzled : block)));
            } else {
                const int64_t line = (int64_t)tile * LINES + at.line[i];
                uint32_t word[EACH / 8] = {};
                for (int e = 0; e < EACH && k + e < u.g.length; e++)
                    word[e / 8] |= (uint32_t)nib_code_load(&u.g, u.codes, line, k + e) << 4 * (e % 8);
                s.codes[i / 2][i % 2] = make_uint4(word[0], word[1], word[2], word[3]);
                for (int b = 0; b < 2 && block + b < u.g.blocks; b++)
                    s.scales[i / 2][i % 2] |= (uint32_t)nib_scale_load(&u.g, u.scales, line, block + b) << 8 * b;
            }
        }
        return s;
    }

    static DEV_MEMBER uint32_t word_of(const uint4 &q, int i)
    {
        return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
    }

    /* Eight codes as pairs of what they stand for, but for a power of two. */
    static DEV_MEMBER void decode_word(uint32_t codes, uint32_t scale, uint32_t (&pairs)[4])
    {
        NIB_UNROLL
        for (int i = 0; i < 4; i++) {
            const uint32_t sign = i < 3 ? codes << (12 - 4 * i) : codes;
            const int up = (F16 ? 9 : 6) - 4 * i;
            const uint32_t magnitude = up >= 0 ? codes << (up >= 0 ? up : 0) : codes >> (up < 0 ? -up : 0);
            pairs[i] = scaled_pair((sign & 0x80008000u) | (magnitude & (F16 ? 0x0E000E00u : 0x01C001C0u)), scale, F16);
        }
    }

    /* Both lines of a sixteen, eight elements each. */
    static DEV_MEMBER void decode(const shared &s, const strip &from, int sixteen, int word, uint32_t (&a)[2][4])
    {
        NIB_UNROLL
        for (int h = 0; h < 2; h++)
            decode_word(word_of(from.codes[sixteen][h], word), s.scale[from.scales[sixteen][h] >> word / 2 * 8 & 255],
                        a[h]);
    }

    static DEV_MEMBER float value_of(const job &j, int64_t row, int64_t k)
    {
        return k < j.weight.g.length ? nib_load_value(j.x, row * j.row_stride + k * j.element_stride, D) : 0.0f;
    }

    /* Values k..k + 7 of a row as pairs like those of codes. */
    static DEV_MEMBER void load_values(const job &j, int row, int k, uint32_t (&pairs)[PARTS][4])
    {
        float x[8];
        if (row >= j.rows || k >= j.weight.g.length) {
            NIB_UNROLL
            for (int i = 0; i < 4 * PARTS; i++)
                pairs[i / 4][i % 4] = 0;
            return;
        }
        if constexpr (WHOLE && D != NIB_F32) {
            const uint4 v = *(const uint4 *)((const uint16_t *)j.x + row * j.row_stride + k);
            pairs[0][0] = __byte_perm(v.x, v.z, 0x5410);
            pairs[0][1] = __byte_perm(v.x, v.z, 0x7632);
            pairs[0][2] = __byte_perm(v.y, v.w, 0x5410);
            pairs[0][3] = __byte_perm(v.y, v.w, 0x7632);
            return;
        }
        if constexpr (WHOLE) {
            const uint4 *const at = (const uint4 *)((const float *)j.x + row * j.row_stride + k);
            const uint4 low = at[0], high = at[1];
            NIB_UNROLL
            for (int i = 0; i < 8; i++)
                x[i] = __uint_as_float(word_of(i < 4 ? low : high, i % 4));
        } else {
            NIB_UNROLL
            for (int i = 0; i < 8; i++)
                x[i] = value_of(j, row, k + i);
        }
        NIB_UNROLL
        for (int part = 0; part < PARTS; part++) {
            NIB_UNROLL
            for (int i = 0; i < 4; i++) {
                const uint32_t upper = __byte_perm(__float_as_uint(x[i]), __float_as_uint(x[i + 4]), 0x7632);
                pairs[part][i] = F16 ? f16_pair(x[i], x[i + 4]) : upper;
                if (PARTS > 1) { /* cut off, not rounded: nothing overflows, and what is left is exact */
                    x[i] = __fsub_rn(x[i], low_half(upper));
                    x[i + 4] = __fsub_rn(x[i + 4], high_half(upper));
                }
            }
        }
    }

    static DEV_MEMBER fragments fragments_of(const uint32_t (&a)[2][4], const uint32_t (&b)[4], int i)
    {
        return { { a[0][i], a[1][i], a[0][i + 1], a[1][i + 1] }, { b[i], b[i + 1] } };
    }

    /* A lane's strip and the rows' values, by tensor cores. */
    static DEV_MEMBER void multiply_strip(const job &j, const shared &s, const strip &mine, uint32_t tile, int lane,
                                          int k0, float (&acc)[LT][MT][4])
    {
        NIB_UNROLL
        for (int word = 0; word < EACH / 8; word++) {
            uint32_t b[MT][PARTS][4];
            NIB_UNROLL
            for (int t = 0; t < MT; t++)
                load_values(j, lane / 4 + 8 * t, k0 + lane % 4 * EACH + 8 * word, b[t]);
            NIB_UNROLL
            for (int n = 0; n < LT * MT * PARTS * 2; n++) {
                const int sixteen = n / (MT * PARTS * 2), t = n / (PARTS * 2) % MT, part = n / 2 % PARTS, i = n % 2 * 2;
                uint32_t a[2][4];
                decode(s, mine, sixteen, word, a);
                multiply<F16>(acc[sixteen][t], lane, fragments_of(a, b[t][part], i), [&](int l) {
                    uint32_t theirs[2][4], values[PARTS][4];
                    decode(s, load_strip(j, places_of(j, tile, l), tile, k0 + l % 4 * EACH), sixteen, word, theirs);
                    load_values(j, l / 4 + 8 * t, k0 + l % 4 * EACH + 8 * word, values);
                    return fragments_of(theirs, values[part], i);
                });
            }
        }
    }

    static DEV_MEMBER void load_first(const job &j, state &mine, uint32_t tile, int t)
    {
        const places at = places_of(j, tile, t % 32);
        mine.tile = tile;
        NIB_UNROLL
        for (int d = 0; d < AHEAD; d++)
            mine.next[d] = load_strip(j, at, tile, t / 32 * STEP + d * ROUND + t % 4 * EACH);
    }

    static DEV_MEMBER void add_up(const job &j, shared &s, state &mine, uint32_t tile, uint32_t tiles, int t)
    {
        const int lane = t % 32, warp = t / 32, length = (int)j.weight.g.length;
        const places at = places_of(j, tile, lane);
        float acc[LT][MT][4] = {};
        if (mine.tile != tile)
            load_first(j, mine, tile, t);
        for (int k = warp * STEP; k < length; k += AHEAD * ROUND) {
            NIB_UNROLL
            for (int d = 0; d < AHEAD; d++) {
                const strip current = mine.next[d];
                mine.next[d] = load_strip(j, at, tile, k + (d + AHEAD) * ROUND + lane % 4 * EACH);
                if (d == 0 || k + d * ROUND < length)
                    multiply_strip(j, s, current, tile, lane, k + d * ROUND, acc);
            }
        }
        if (tiles - tile > thread_blocks())
            load_first(j, mine, tile + thread_blocks(), t);
        NIB_UNROLL
        for (int i = 0; i < 4 * MT * LT; i++)
            s.sums[warp][i / (4 * MT) * 16 + lane / 4 + i % 4 / 2 * 8][i / 4 % MT * 8 + lane % 4 * 2 + i % 2] =
                acc[i / (4 * MT)][i / 4 % MT][i % 4];
    }

    template <int P>
    static DEV_MEMBER void phase(const job &j, shared &s, state &mine, uint32_t tile, uint32_t tiles, int t)
    {
        const int64_t line0 = (int64_t)tile * LINES;
        if constexpr (P == 0)
            add_up(j, s, mine, tile, tiles, t);
        for (int i = t; P == 1 && i < LINES * 8 * MT; i += THREADS) {
            const int line = i % LINES, row = i / LINES;
            if (row >= j.rows || line0 + line >= j.weight.g.lines)
                continue;
            float sum = 0;
            NIB_UNROLL
            for (int w = 0; w < WARPS; w++)
                sum = __fadd_rn(sum, s.sums[w][line][row]);
            store_product(j.to, row, line0 + line, sum * 0x1p8f);
        }
    }
};

template <nib_dtype D, class Run> static void choose(const nib_cuda_few_rows &job, Run &run)
{
    if (job.rows <= 8 && job.whole)
        run.template operator()<few_rows<D, 1, true, 1, 1, D == NIB_F32 ? 2 : 3>>(job);
    else if (job.rows <= 8)
        run.template operator()<few_rows<D, 1, false, 1, 1, 2>>(job);
    else if (job.whole)
        run.template operator()<few_rows<D, 2, true, D == NIB_F32 ? 1 : 2, 1, 2>>(job);
    else
        run.template operator()<few_rows<D, 2, false, 1, 1, 2>>(job);
}

#endif
