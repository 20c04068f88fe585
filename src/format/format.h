/* SPDX-License-Identifier: Apache-2.0 */
/*
 * format.h - the table of formats, and the sizes that follow from a row of it.
 */
#ifndef NIB_FORMAT_H
#define NIB_FORMAT_H

#include "format/dialect.h"

/* How the scales of a usage lie in memory, by its lines and the blocks in each. */
enum nib_scale_layout {
    NIB_SCALES_BY_LINE,  /* [lines, blocks] */
    NIB_SCALES_BY_BLOCK, /* [blocks, lines] */
    NIB_SCALES_BY_TILE,  /* [lines / block, blocks]: square blocks, each scale once */
};

struct nib_format_facts {
    const char *name;
    nib_dtype elements[2];    /* what a code may be: the default first, the other the same where there is no choice */
    float scale_max;          /* what the tensor scale brings the largest block scale to; 1 where there are not both */
    nib_dtype scale;          /* what a block's scale is */
    int block;                /* elements that share a scale, along the quantized axis; 0: there are no block scales */
    bool lines, square;       /* whether blocks may be 1 x block, and block x block */
    int default_rows;         /* which of them is the default: 1, or block */
    bool tensor_scales;       /* there is a scale per tensor (or per line) */
    bool shared_tensor_scale; /* one for both usages, in NIB_ROW_TENSOR_SCALE */
    bool nvfp4_options; /* RHT, stochastic rounding, scale rules, floors, tensor scales per line and their rules */
    bool float_scales;  /* pow2_scales and amax_epsilon mean something */
    bool swizzles;      /* scales may be swizzled */
    bool transposed;    /* the columnwise codes are [K, M]; otherwise [M, K] like the rowwise ones */
    enum nib_scale_layout layout[2];     /* by usage */
    enum nib_scale_layout square_layout; /* BY_TILE where square blocks have one of their own */
    int align[2]; /* the two dims of a scale matrix by line are padded to multiples of these (by block: exchanged) */
    int min_rank;
    bool exact_dot;                 /* blocks of codes multiply exactly, and products are made of them */
    nib_part saved[NIB_PART_COUNT]; /* what prepare_for_saving gives, in its order */
    int saved_count;
    const struct nib_dialect_facts *dialects; /* NIB_DIALECT_COUNT rows */
};

/* NULL where there is no such format. */
const struct nib_format_facts *nib_format_find(nib_format format);

/* For a format that is known to be there. */
static inline const struct nib_format_facts *nib_format_of(const nib_quantizer *q)
{
    return nib_format_find(q->format);
}

static inline const struct nib_dialect_facts *nib_dialect_of(const nib_quantizer *q)
{
    return &nib_format_of(q)->dialects[q->dialect];
}

static inline nib_dtype nib_element_of(const nib_quantizer *q)
{
    return q->element ? q->element : nib_format_of(q)->elements[0];
}

/* The rules that follow from a quantizer's options, for data of a dtype. */
NIB_PRIVATE struct nib_rules nib_rules_of(const nib_quantizer *q, nib_dtype input);

/* The largest block of any format, for scratch memory. */
enum { NIB_MAX_BLOCK = 128 };

/* One usage of a tensor seen as lines of codes: rowwise, line r is row r; columnwise, line c is column c. */
struct nib_usage_geometry {
    int64_t lines, length;           /* lines, and elements in each */
    int64_t line_stride;             /* bytes from line to line of codes */
    int64_t element_stride;          /* bytes from code to code within a line; 0: codes are packed side by side */
    bool by_element;                 /* codes lie as the elements do, [M, K]: where a dim is 1, no stride tells */
    int64_t blocks;                  /* scales per line */
    int64_t scale_shape[2];          /* padded */
    int64_t valid_shape[2];          /* the corner of it that holds scales of blocks */
    int64_t scale_line, scale_block; /* scales from line to line, and from block to block */
    int64_t lines_per_scale;         /* lines that a scale in memory stands for */
    int scale_bytes;                 /* of one scale */
    bool swizzled;
    int64_t tensor_scales;                                 /* how many: 0, 1, or one per line */
    int64_t data_bytes, scales_bytes, tensor_scales_bytes; /* of the three parts */
};

struct nib_geometry {
    int64_t rows, cols; /* M, K */
    struct nib_usage_geometry usage[2];
};

/* Where one usage of a tensor lies. codes NULL: it is absent. */
struct nib_usage_memory {
    uint8_t *codes;
    void *scales;
    float *tensor_scales;
};

/* Checks rank, dims and every product. q is loaded. */
nib_status nib_geometry_of(const nib_quantizer *q, int rank, const int64_t *shape, struct nib_geometry *out);

/* The part that holds a usage's data (kind 0), scales (1) or tensor scales (2); NIB_PART_COUNT where there is none. */
nib_part nib_part_of(const struct nib_format_facts *facts, nib_usage usage, int kind);

/* Where the scale of (line, block) is, counted in scales. Swizzled: 128 x 4 tiles of 512, in which 32 rows
 * interleave. */
NIB_INLINE int64_t nib_scale_index(const struct nib_usage_geometry *g, int64_t line, int64_t block)
{
    if (!g->swizzled)
        return line / g->lines_per_scale * g->scale_line + block * g->scale_block;
    const int64_t tiles = (g->blocks + 3) / 4;
    return (line / 128 * tiles + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4;
}

NIB_INLINE nib_scale_bits nib_scale_load(const struct nib_usage_geometry *g, const void *scales, int64_t line,
                                         int64_t block)
{
    nib_scale_bits bits = 0;
    memcpy(&bits, (const char *)scales + nib_scale_index(g, line, block) * g->scale_bytes, (size_t)g->scale_bytes);
    return bits;
}

NIB_INLINE void nib_scale_store(const struct nib_usage_geometry *g, void *scales, int64_t line, int64_t block,
                                nib_scale_bits bits)
{
    memcpy((char *)scales + nib_scale_index(g, line, block) * g->scale_bytes, &bits, (size_t)g->scale_bytes);
}

/* Codes one at a time. Storing packed codes needs them in order: the even one clears its byte. */
NIB_INLINE uint8_t nib_code_load(const struct nib_usage_geometry *g, const uint8_t *codes, int64_t line, int64_t i)
{
    if (g->element_stride)
        return codes[line * g->line_stride + i * g->element_stride];
    return codes[line * g->line_stride + i / 2] >> 4 * (i % 2) & 15;
}

NIB_INLINE void nib_code_store(const struct nib_usage_geometry *g, uint8_t *codes, int64_t line, int64_t i,
                               uint8_t code)
{
    uint8_t *byte = codes + line * g->line_stride + (g->element_stride ? i * g->element_stride : i / 2);
    *byte = (uint8_t)(g->element_stride || i % 2 == 0 ? code : *byte | code << 4);
}

#endif
