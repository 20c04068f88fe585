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
/* What nobody will read again is not to drive anything out; what lies beside it is read next. Volatile: where it is
 * asked for, not where it is needed. */
DEV uint4 load_once(const uint4 *at)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
/* One of two scales that are side by side. */
DEV float scale_of_two(uint32_t two, int which)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const __half2 both(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3));
    return which ? __high2float(both) : __low2float(both);
#else
    const uint32_t scale = two >> 8 * which, magnitude = scale & 0x7F; /* shifted up that is 2^-120 of it */
    const float value = magnitude == 0x7F ? NAN : __fmul_rn(__uint_as_float(magnitude << 20), 0x1p120f);
    return __uint_as_float(__float_as_uint(value) | (scale & 0x80) << 24);
#endif
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
/* What another lane brings is not asked for. */
template <class K, class Find> DEV typename K::brought of_lane(uint32_t, int, int, Find find)
{
    typename K::brought theirs;
    find(theirs);
    return theirs;
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
DEV uint4 load_once(const uint4 *at) { return *at; }
DEV float scale_of_two(uint32_t two, int which) { return nib_f32_from_e4m3((uint8_t)(two >> 8 * which)); }
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
/* What a lane brings to a strip of a kernel's tile, found where nobody has asked for it in this launch. */
template <class K, class Find> static const typename K::brought &of_lane(uint32_t tile, int k, int lane, Find find)
{
    static thread_local struct {
        uint64_t launch;
        uint32_t tile, known; /* by lane */
        int k;
        typename K::brought lanes[32];
    } strip;
    if (strip.launch != shim_launches || strip.tile != tile || strip.k != k) {
        strip.launch = shim_launches;
        strip.tile = tile;
        strip.k = k;
        strip.known = 0;
    }
    if (!(strip.known >> lane & 1))
        find(strip.lanes[lane]);
    strip.known |= 1u << lane;
    return strip.lanes[lane];
}
/* Lanes are one after the other: what the others bring is found again. Lane 4 g + q has rows g and g + 8 of A and
 * column g of B, of both the k-pairs q and q + 4; of the product it has columns 2 q and 2 q + 1. */
template <bool F16, class Get> DEV void multiply(float (&acc)[4], int lane, const fragments &mine, Get get)
{
    const auto bring = [&](int other) { return other == lane ? mine : get(other); };
    for (int q = 0; q < 4; q++) {
        const fragments rows = bring(lane / 4 * 4 + q),
                        columns[2] = { bring(lane % 4 * 8 + q), bring(lane % 4 * 8 + 4 + q) };
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 4; k++)
                acc[i] += half_of_pair(rows.a[i / 2 + k / 2 * 2], k % 2, F16) *
                          half_of_pair(columns[i % 2].b[k / 2], k % 2, F16);
    }
}
#endif

/* ---- Few rows ---- */

/* A warp takes LT times 16 lines of codes, a strip of 128 elements at a time: a lane has 32 elements of line g and 32
 * of line g + 8 of each 16. Which element is which of the tensor core's k is the same for codes and values, and
 * otherwise of no matter; so a word of eight codes is taken as pairs (0, 4), (1, 5), (2, 6), (3, 7), which shifts and
 * masks find. The warps of a thread block divide k, and add up in shared memory.
 *
 * Instructions are the limit, and memory soon after: pointers walk, and only strips that are not whole are looked at.
 * The next strip is in flight while a lane works on one. The values of eight rows are loaded before a strip's products;
 * 16 rows take 3 % longer with a loop like that. A thread block has one tile: those that come as others end keep
 * processors busy. Rows that are not there are not read: loads that agree take the cache's time, too.
 *
 * D: of the values. F32 is the sum of three BF16, each of which is multiplied. MT: eights of rows. WHOLE: lines of
 * codes and rows of values can be read in sixteens of bytes, scales two at a time. */
template <nib_dtype D, int MT, bool WHOLE, int LT, int WARPS, int RESIDENT> struct few_rows : kernel_defaults {
    enum {
        PHASES = 2,
        PERSISTENT = 0,
        SIZE = 32 * WARPS,
        LINES = 16 * LT,
        EACH = 32,            /* elements of a lane */
        STEP = 4 * EACH,      /* of a warp */
        ROUND = WARPS * STEP, /* of a thread block */
        F16 = D == NIB_F16,
        AT_ONCE = WHOLE && D != NIB_F32 && MT == 1, /* all values of a strip before its products */
        PARTS = D == NIB_F32 ? 3 : 1,
        BYTES = D == NIB_F32 ? 4 : 2,
        BLOCKS = RESIDENT
    };
    typedef nib_cuda_few_rows job;
    struct shared {
        float factor; /* of all sums, where they have the same */
        float sums[WARPS][LINES][8 * MT + 1];
    };
    struct strip { /* a lane's codes and scales: of two lines of every 16 */
        uint4 codes[LT][2];
        uint32_t scales[LT][2];
    };
    struct cursor { /* a lane's part of a strip in the first of its lines, and how far the eighth line after one is */
        const uint8_t *codes, *scales;
        uint32_t line_step, scale_step;
        int whole; /* strips that begin before this element are there for all lanes */
    };
    struct row { /* a lane's part of a strip in a row of values */
        const char *values;
        int reach; /* strips that begin before this element have one */
    };
    static uint32_t tiles(const job &j) { return (uint32_t)((j.weight.g.lines + LINES - 1) / LINES); }

    static DEV_MEMBER bool has_one_factor(const job &j) { return !j.to.side[0].per_line && !j.to.side[1].per_line; }

    /* ---- Strips ---- */

    static DEV_MEMBER int64_t line_of(uint32_t tile, int lane) { return (int64_t)tile * LINES + lane / 4; }

    static DEV_MEMBER cursor cursor_of(const job &j, uint32_t tile, int lane, int k)
    {
        const nib_usage_geometry &g = j.weight.g;
        const int64_t line = line_of(tile, lane);
        const int own = k + lane % 4 * EACH, block = own / NIB_BLOCK;
        if constexpr (!WHOLE)
            return {};
        return { j.weight.codes + line * g.line_stride + own / 2,
                 j.weight.scales + (g.swizzled ? nib_scale_index(&g, line, block) : line * g.scale_line + block),
                 8 * (uint32_t)g.line_stride,
                 g.swizzled ? 128 : 8 * (uint32_t)g.scale_line, /* a tile is part of 32 lines that are side by side */
                 line_of(tile + 1, 0) <= g.lines ? (int)g.length / STEP * STEP : 0 };
    }

    /* Swizzled, four blocks of 128 lines are 512 bytes. */
    static DEV_MEMBER void advance(const job &j, cursor &at)
    {
        at.codes += ROUND / 2;
        at.scales += j.weight.g.swizzled ? ROUND / (4 * NIB_BLOCK) * 512 : ROUND / NIB_BLOCK;
    }

    static DEV_MEMBER void load_anywhere(const nib_cuda_usage &u, int64_t line, int k, uint4 &codes, uint32_t &scales)
    {
        uint32_t word[EACH / 8] = {};
        for (int e = 0; e < EACH && k + e < u.g.length; e++)
            word[e / 8] |= (uint32_t)nib_code_load(&u.g, u.codes, line, k + e) << 4 * (e % 8);
        codes = make_uint4(word[0], word[1], word[2], word[3]);
        for (int b = 0; b < 2 && k / NIB_BLOCK + b < u.g.blocks; b++)
            scales |= (uint32_t)nib_scale_load(&u.g, u.scales, line, k / NIB_BLOCK + b) << 8 * b;
    }

    static DEV_MEMBER void load_line(const cursor &at, int i, strip &s)
    {
        s.codes[i / 2][i % 2] = load_once((const uint4 *)(at.codes + (uint32_t)i * at.line_step));
        s.scales[i / 2][i % 2] = *(const uint16_t *)(at.scales + (uint32_t)i * at.scale_step);
    }

    static DEV_MEMBER void load_whole_strip(const cursor &at, strip &s)
    {
        NIB_UNROLL
        for (int i = 0; i < 2 * LT; i++)
            load_line(at, i, s);
    }

    /* A lane's part of the strip at k; zeros where there is no such line or element. */
    static DEV_MEMBER void load_strip(const job &j, const cursor &at, uint32_t tile, int lane, int k, strip &s)
    {
        const nib_usage_geometry &g = j.weight.g;
        if (k < at.whole) {
            load_whole_strip(at, s);
            return;
        }
        const int own = k + lane % 4 * EACH;
        s = {};
        NIB_UNROLL
        for (int i = 0; i < 2 * LT; i++) {
            const int64_t line = line_of(tile, lane) + 8 * i;
            if (own >= (int)g.length || line >= g.lines)
                continue;
            if constexpr (WHOLE)
                load_line(at, i, s);
            else
                load_anywhere(j.weight, line, own, s.codes[i / 2][i % 2], s.scales[i / 2][i % 2]);
        }
    }

    static DEV_MEMBER uint32_t word_of(const uint4 &q, int i)
    {
        return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
    }

    /* Eight codes as pairs of what they stand for, but for a power of two. For BF16 a product has a nibble in two places at
     * once: its sign where that belongs, and the rest. */
    static DEV_MEMBER void decode_word(uint32_t codes, uint32_t scale, uint32_t (&pairs)[4])
    {
        NIB_UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t pair;
            if constexpr (F16) {
                const uint32_t sign = i < 3 ? codes << (12 - 4 * i) : codes;
                const uint32_t magnitude = i < 3 ? codes << (9 - 4 * i < 0 ? 0 : 9 - 4 * i) : codes >> 3;
                pair = (sign & 0x80008000u) | (magnitude & 0x0E000E00u);
            } else {
                const uint32_t two = i < 2 ? codes : codes >> 8;
                pair = (i % 2 ? (two & 0x00F000F0u) * 0x104u : (two & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
            }
            pairs[i] = scaled_pair(pair, scale, F16);
        }
    }

    /* Codes are shifted into the exponent and the mantissa of a 16-bit float: that is 2^-126 (BF16) or 2^-14 (F16) of what
     * they stand for, subnormal or not. A scale has all but 2^-8 of that, so that none overflows. */
    static DEV_MEMBER uint32_t scale_pair(uint32_t two, int which)
    {
        const float scale = __fmul_rn(scale_of_two(two, which), F16 ? 0x1p6f : 0x1p118f);
        return F16 ? f16_pair(scale, scale) : bf16_pair(scale, scale);
    }

    /* F32 as a sum of BF16: cut off, not rounded, so that nothing overflows and what is left is exact. */
    static DEV_MEMBER void split_values(float (&x)[8], uint32_t (&pairs)[PARTS][4])
    {
        NIB_UNROLL
        for (int n = 0; n < 4 * PARTS; n++) {
            const int i = n % 4;
            const uint32_t upper = __byte_perm(__float_as_uint(x[i]), __float_as_uint(x[i + 4]), 0x7632);
            pairs[n / 4][i] = F16 ? f16_pair(x[i], x[i + 4]) : upper;
            if (PARTS > 1) {
                x[i] = __fsub_rn(x[i], low_half(upper));
                x[i + 4] = __fsub_rn(x[i + 4], high_half(upper));
            }
        }
    }

    static DEV_MEMBER row row_of(const job &j, int lane, int eight, int k)
    {
        const int number = lane / 4 + 8 * eight, first = lane % 4 * EACH;
        return { (const char *)j.x + (number * j.row_stride + (first + k) * j.element_stride) * BYTES,
                 number < (int)j.rows ? (int)j.weight.g.length - first : 0 };
    }

    static DEV_MEMBER void advance(const job &j, row (&rows)[MT])
    {
        NIB_UNROLL
        for (int i = 0; i < MT; i++)
            rows[i].values += ROUND * BYTES * (WHOLE ? 1 : j.element_stride);
    }

    /* Eight values of a lane's part of the strip at k as pairs like those of codes. */
    static DEV_MEMBER void load_values(const job &j, const row &from, int k, int word, uint32_t (&pairs)[PARTS][4])
    {
        const uint4 *const quad = (const uint4 *)from.values;
        if constexpr (WHOLE && D != NIB_F32) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (k < from.reach)
                v = quad[word];
            pairs[0][0] = __byte_perm(v.x, v.z, 0x5410);
            pairs[0][1] = __byte_perm(v.x, v.z, 0x7632);
            pairs[0][2] = __byte_perm(v.y, v.w, 0x5410);
            pairs[0][3] = __byte_perm(v.y, v.w, 0x7632);
        } else {
            float x[8] = {};
            uint4 quads[2] = {};
            if (WHOLE && k < from.reach)
                quads[0] = quad[2 * word], quads[1] = quad[2 * word + 1];
            NIB_UNROLL
            for (int i = 0; i < 8; i++) {
                if constexpr (WHOLE)
                    x[i] = __uint_as_float(word_of(quads[i / 4], i % 4));
                else if (k + 8 * word + i < from.reach)
                    x[i] = nib_load_value(from.values, (8 * word + i) * j.element_stride, D);
            }
            split_values(x, pairs);
        }
    }

    /* All of a lane's part of a strip in a row of 16-bit values. */
    static DEV_MEMBER void load_at_once(const row &from, uint4 (&values)[EACH / 8])
    {
        NIB_UNROLL
        for (int word = 0; word < EACH / 8; word++)
            values[word] = ((const uint4 *)from.values)[word];
    }

    /* Both lines of a sixteen, eight elements each. A scale is decoded for two words. */
    static DEV_MEMBER void decode(const strip &from, int sixteen, int word, uint32_t (&scale)[2], uint32_t (&a)[2][4])
    {
        NIB_UNROLL
        for (int h = 0; h < 2; h++) {
            if (word % 2 == 0)
                scale[h] = scale_pair(from.scales[sixteen][h], word / 2);
            decode_word(word_of(from.codes[sixteen][h], word), scale[h], a[h]);
        }
    }

    static DEV_MEMBER fragments fragments_of(const uint32_t (&a)[2][4], const uint32_t (&b)[4], int i)
    {
        return { { a[0][i], a[1][i], a[0][i + 1], a[1][i + 1] }, { b[i], b[i + 1] } };
    }

    /* What another lane brings, which the host finds again: for all that ask within a strip, once. */
    struct brought {
        uint32_t a[LT][EACH / 8][2][4], b[MT][EACH / 8][PARTS][4];
    };
    static DEV_MEMBER void bring(const job &j, uint32_t tile, int lane, int k, brought &out)
    {
        strip theirs;
        load_strip(j, cursor_of(j, tile, lane, k), tile, lane, k, theirs);
        for (int l = 0; l < LT; l++) {
            uint32_t scale[2];
            for (int word = 0; word < EACH / 8; word++)
                decode(theirs, l, word, scale, out.a[l][word]);
        }
        for (int t = 0; t < MT; t++)
            for (int word = 0; word < EACH / 8; word++)
                load_values(j, row_of(j, lane, t, k), k, word, out.b[t][word]);
    }
    static DEV_MEMBER fragments fragments_of_lane(const job &j, uint32_t tile, int lane, int k, int sixteen, int eight,
                                                  int part, int word, int i)
    {
        const brought &theirs = of_lane<few_rows>(tile, k, lane, [&](brought &out) { bring(j, tile, lane, k, out); });
        return fragments_of(theirs.a[sixteen][word], theirs.b[eight][word][part], i);
    }

    /* A lane's part of the strip at k and the rows' values, by tensor cores. */
    static DEV_MEMBER void multiply_strip(const job &j, const strip &mine, const row (&rows)[MT], uint32_t tile,
                                          int lane, int k, float (&acc)[LT][MT][4])
    {
        uint32_t scale[LT][2];
        NIB_UNROLL
        for (int word = 0; word < EACH / 8; word++) {
            uint32_t b[MT][PARTS][4];
            NIB_UNROLL
            for (int t = 0; t < MT; t++)
                load_values(j, rows[t], k, word, b[t]);
            NIB_UNROLL
            for (int l = 0; l < LT; l++) {
                uint32_t a[2][4];
                decode(mine, l, word, scale[l], a);
                NIB_UNROLL
                for (int n = 0; n < MT * PARTS * 2; n++) {
                    const int t = n / (PARTS * 2), part = n / 2 % PARTS, i = n % 2 * 2;
                    multiply<F16>(acc[l][t], lane, fragments_of(a, b[t][part], i),
                                  [&](int other) { return fragments_of_lane(j, tile, other, k, l, t, part, word, i); });
                }
            }
        }
    }

    /* The same where a lane's values are in registers. */
    static DEV_MEMBER void multiply_at_once(const job &j, const strip &mine, const uint4 (&values)[EACH / 8],
                                            uint32_t tile, int lane, int k, float (&acc)[LT][MT][4])
    {
        const row rows[MT] = { { (const char *)values, k + 1 } };
        multiply_strip(j, mine, rows, tile, lane, k, acc);
    }

    /* From k on the strips that are whole and followed by a whole one: nothing is zeroed or looked at, and loads come
     * first. On an H200 28672x8192 takes 41.9 us at M = 1, and 46.7 without. Returns where the next strip begins. */
    static DEV_MEMBER int multiply_whole_strips(const job &j, cursor &at, row (&rows)[MT], uint32_t tile, int lane,
                                                int k, strip &next, float (&acc)[LT][MT][4])
    {
        uint4 values[EACH / 8] = {};
        for (; k < at.whole - ROUND; k += ROUND) {
            const strip current = next;
            advance(j, at);
            load_whole_strip(at, next);
            if (rows[0].reach > 0)
                load_at_once(rows[0], values);
            __syncwarp(); /* or ptxas moves loads down to what needs them: 42.5 us */
            multiply_at_once(j, current, values, tile, lane, k, acc);
            advance(j, rows);
        }
        return k;
    }

    static DEV_MEMBER void add_up(const job &j, shared &s, uint32_t tile, int t)
    {
        const int lane = t % 32, warp = t / 32, begin = warp * STEP;
        cursor at = cursor_of(j, tile, lane, begin);
        strip next;
        row rows[MT];
        float acc[LT][MT][4] = {};
        int k = begin;
        NIB_UNROLL
        for (int i = 0; i < MT; i++)
            rows[i] = row_of(j, lane, i, k);
        load_strip(j, at, tile, lane, k, next);
        if (t == 0 && has_one_factor(j)) /* while codes are on their way */
            s.factor = scale_of_product(j.to, 0, 0);
        if constexpr (AT_ONCE)
            k = multiply_whole_strips(j, at, rows, tile, lane, k, next, acc);
        for (; k < (int)j.weight.g.length; k += ROUND) {
            const strip current = next;
            advance(j, at);
            load_strip(j, at, tile, lane, k + ROUND, next);
            if constexpr (AT_ONCE) {
                uint4 values[EACH / 8] = {};
                if (k < rows[0].reach)
                    load_at_once(rows[0], values);
                multiply_at_once(j, current, values, tile, lane, k, acc);
            } else {
                multiply_strip(j, current, rows, tile, lane, k, acc);
            }
            advance(j, rows);
        }
        NIB_UNROLL
        for (int i = 0; i < 4 * MT * LT; i++)
            s.sums[warp][i / (4 * MT) * 16 + lane / 4 + i % 4 / 2 * 8][i / 4 % MT * 8 + lane % 4 * 2 + i % 2] =
                acc[i / (4 * MT)][i / 4 % MT][i % 4];
    }

    static DEV_MEMBER void store(const job &j, const shared &s, int64_t line0, int i)
    {
        const int line = i % LINES, row = i / LINES;
        float sum = 0;
        if (line0 + line >= j.weight.g.lines)
            return;
        NIB_UNROLL
        for (int w = 0; w < WARPS; w++)
            sum = __fadd_rn(sum, s.sums[w][line][row]);
        const float factor = has_one_factor(j) ? s.factor : scale_of_product(j.to, row, line0 + line);
        nib_output_store(&j.to.out, row, line0 + line, factor, sum * 0x1p8f);
    }

    template <int P> static DEV_MEMBER void phase(const job &j, shared &s, state &, uint32_t tile, uint32_t, int t)
    {
        if constexpr (P == 0)
            add_up(j, s, tile, t);
        for (int i = t; P == 1 && i < LINES * (int)j.rows; i += SIZE)
            store(j, s, (int64_t)tile * LINES, i);
    }
};

/* What is fastest on an H200. Few lines leave processors idle unless more warps divide k; many are best left to thread
 * blocks of few warps, of which more are at work while one begins or ends. A row more costs time of the cache: from the
 * sixth on a warp takes two sixteens of lines. Rows of F32 are three of BF16, and their registers do for one. */
template <nib_dtype D, int MT, class Run> static void choose_whole(const nib_cuda_few_rows &job, Run &run)
{
    if constexpr (D == NIB_F32)
        run.template operator()<few_rows<D, MT, true, 1, 8, 2>>(job);
    else if (!job.many_lines)
        run.template operator()<few_rows<D, MT, true, MT == 4 ? 2 : 1, MT == 1 ? 16 : 8, MT == 4 ? 1 : 2>>(job);
    else if (MT > 1 || job.rows > 5)
        run.template operator()<few_rows<D, MT, true, 2, 4, MT == 4 ? 2 : 4>>(job);
    else if constexpr (MT == 1)
        run.template operator()<few_rows<D, MT, true, 1, 4, 8>>(job);
}

template <nib_dtype D, class Run> static void choose(const nib_cuda_few_rows &job, Run &run)
{
    if (!job.whole)
        run.template operator()<few_rows<D, 2, false, 1, 8, 2>>(job);
    else if (job.rows <= 8)
        choose_whole<D, 1>(job, run);
    else if (D == NIB_F32 || job.rows <= 16)
        choose_whole<D, 2>(job, run);
    else if constexpr (D != NIB_F32)
        choose_whole<D, 4>(job, run);
}

#endif
