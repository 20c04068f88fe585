/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.cuh - codes and scales from place to place, an item a thread: src/tensor/layout.c for a device, for the usages
 * of every format. Items are what no two threads share: bytes of codes, single scales.
 */
#ifndef NIB_CUDA_LAYOUT_CUH
#define NIB_CUDA_LAYOUT_CUH

#include "block.cuh"

/* The byte of codes that begins with element `i` of a line, from elements of another line or another usage. */
template <class Code>
DEV void store_byte(const nib_usage_geometry &g, uint8_t *codes, int64_t line, int64_t i, Code code)
{
    uint8_t byte = code(i);
    if (g.element_stride) {
        codes[line * g.line_stride + i * g.element_stride] = byte;
        return;
    }
    if (i + 1 < g.length)
        byte = (uint8_t)(byte | code(i + 1) << 4);
    codes[line * g.line_stride + i / 2] = byte;
}

DEV int64_t bytes_of_line(const nib_usage_geometry &g) { return g.element_stride ? g.length : (g.length + 1) / 2; }
DEV int64_t first_in_byte(const nib_usage_geometry &g, int64_t byte) { return g.element_stride ? byte : 2 * byte; }

struct fill_item {
    typedef nib_cuda_fill job;
    static DEV_MEMBER void at(const job &j, int64_t i) { j.values[i] = j.value; }
};

/* Tensor scales from amaxes; one thread raises what has been seen, so that nothing is lost. */
struct finish_item {
    typedef nib_cuda_finish job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        if (j.noop && *j.noop == 1.0f)
            return;
        if (!j.seen) {
            j.to[i] = tensor_scale_from(j.from[i], j.unbiased, j.rules);
            return;
        }
        float seen = *j.seen;
        for (int64_t k = 0; k < j.n; k++) {
            seen = nib_fmax(seen, j.from[k]);
            if (j.to)
                j.to[k] = tensor_scale_from(j.from[k], j.unbiased, j.rules);
        }
        *j.seen = seen;
    }
};

/* Zero, unless there is nothing to be done. */
struct clear_item {
    typedef nib_cuda_finish job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        if (!(j.noop && *j.noop == 1.0f))
            j.to[i] = 0;
    }
};

struct gather_item {
    typedef nib_cuda_gather job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        int64_t rest = i, offset = 0;
        for (int d = j.rank - 1; d >= 0; d--) {
            const int64_t next = rest / j.shape[d];
            offset += (rest - next * j.shape[d]) * j.strides[d];
            rest = next;
        }
        char *const strided = (char *)j.strided + offset * j.bytes, *const plain = (char *)j.plain + i * j.bytes;
        const char *const from = j.scatter ? plain : strided;
        char *const to = j.scatter ? strided : plain;
        if (j.bytes == 4)
            *(uint32_t *)to = *(const uint32_t *)from;
        else
            *(uint16_t *)to = *(const uint16_t *)from;
    }
};

struct rectangle_codes {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        const int64_t length = bytes_of_line(j.to), line = i / length;
        store_byte(j.to, j.target.codes, line, first_in_byte(j.to, i - line * length),
                   [&](int64_t k) { return nib_code_load(&j.from, j.source.codes, j.line + line, j.first + k); });
    }
};

struct rectangle_scales {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        const int64_t line = i / j.to.blocks, block = i - line * j.to.blocks;
        nib_scale_store(&j.to, j.target.scales, line, block,
                        nib_scale_load(&j.from, j.source.scales, j.line + line, j.first / j.block + block));
    }
};

struct repack_item {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        nib_scale_store(&j.to, j.target.scales, i / j.to.blocks, i % j.to.blocks,
                        nib_scale_load(&j.from, j.source.scales, i / j.from.blocks, i % j.from.blocks));
    }
};

/* Bytes of tiles, padding included; `from` is the layout that they come from. */
struct swizzle_item {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        const int64_t tiles = (j.from.blocks + 3) / 4, tile = i / 512, in = i % 512;
        const int64_t line = tile / tiles * 128 + in / 16 + in % 16 / 4 * 32, block = tile % tiles * 4 + in % 4;
        ((uint8_t *)j.target.scales)[i] = line < j.from.lines && block < j.from.blocks
                                              ? (uint8_t)nib_scale_load(&j.from, j.source.scales, line, block)
                                              : 0;
    }
};

/* Scales of the layout `to`, whose geometry has all but that the source is in tiles. */
struct unswizzle_item {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        nib_usage_geometry tiles = j.to;
        tiles.swizzled = true;
        const int64_t line = i / j.to.blocks, block = i % j.to.blocks;
        nib_scale_store(&j.to, j.target.scales, line, block, nib_scale_load(&tiles, j.source.scales, line, block));
    }
};

struct transposed_codes {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        const int64_t length = bytes_of_line(j.to), line = i / length;
        store_byte(j.to, j.target.codes, line, first_in_byte(j.to, i - line * length),
                   [&](int64_t k) { return nib_code_load(&j.from, j.source.codes, k, line); });
    }
};

/* Scales of square blocks for the lines of the other usage, in a matrix whose padding was zeroed. */
struct transposed_scales {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        const int64_t line = i / j.to.blocks, block = i - line * j.to.blocks;
        if (line % j.to.lines_per_scale == 0)
            nib_scale_store(&j.to, j.target.scales, line, block,
                            nib_scale_load(&j.from, j.source.scales, block * j.block, line / j.block));
    }
};

struct equal_bytes {
    typedef nib_cuda_bytes job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        if (j.a[i] != j.b[i])
            *j.differs = 1;
    }
};

struct equal_scales {
    typedef nib_cuda_layout job;
    static DEV_MEMBER void at(const job &j, int64_t i)
    {
        const int64_t line = i / j.to.blocks * j.to.lines_per_scale, block = i % j.to.blocks;
        if (nib_scale_load(&j.to, j.source.scales, line, block) != nib_scale_load(&j.to, j.target.scales, line, block))
            *j.differs = 1;
    }
};

#endif
