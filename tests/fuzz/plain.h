/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plain.h - a tensor as plain arrays: what fuzz_api.c compares tensors with.
 *
 * One array each for codes, scales and tensor scales of a usage, one entry per element, block or line, shared between
 * models as buffers are between tensors. Values come from the scalar kernels on a whole matrix; where they lie in memory
 * is written down here once more.
 */
#ifndef NIB_FUZZ_PLAIN_H
#define NIB_FUZZ_PLAIN_H

#include <stdbool.h>

#include "kernels/kernels.h"
#include "tensor/quantize.h"
#include "fuzz.h"

/* Where a fuzzer runs, sanitizers leave the model alone, which would cost more than the library: replays of the corpora
 * watch it as everything else. */
#if defined(__clang__) && !defined(NIB_FUZZ_MAIN)
#define BEGIN_PLAIN \
    _Pragma("clang attribute push(__attribute__((no_sanitize(\"address\", \"undefined\"))), apply_to = function)")
#define END_PLAIN _Pragma("clang attribute pop")
#else
#define BEGIN_PLAIN
#define END_PLAIN
#endif
BEGIN_PLAIN

enum { CODES, SCALES, TENSOR_SCALES, KINDS };
/* Of a tensor, and of a usage. Kernels without tails, which trust that there are none, take tiles of 128 x 128. */
#ifdef NIB_FUZZ_CUDA
enum { ELEMENTS = 128 * 128, MOST_LINES = ELEMENTS };
#else
enum { ELEMENTS = 4096, MOST_LINES = ELEMENTS };
#endif

struct plain {
    int users;
    size_t n;
    uint32_t value[]; /* codes, or bits */
};

struct model {
    nib_quantizer q;
    nib_dtype dtype;
    int rank;
    int64_t shape[NIB_MAX_RANK], rows, cols;
    struct plain
        *part[2][KINDS]; /* NULL: absent. Of Float8, whose usages share a tensor scale, it is the rowwise one */
    bool stale;
};

/* ---- Formats, as docs/format.md has them ---- */

enum layout { BY_LINE, BY_BLOCK, BY_TILE };
static const struct form {
    int block, scale_bytes;
    bool packed, tensor_scales, shared, transposed, swizzles;
    enum layout layout[2], square;
    int line_align, block_align;
} forms[NIB_FORMAT_COUNT] = {
    [NIB_NVFP4] = { 16, 1, true, true, false, true, true, { BY_LINE, BY_LINE }, BY_LINE, 128, 4 },
    [NIB_FLOAT8] = { 0, 4, false, true, true, true, false, { BY_LINE, BY_LINE }, BY_LINE, 1, 1 },
    [NIB_MXFP8] = { 32, 1, false, false, false, false, true, { BY_LINE, BY_BLOCK }, BY_LINE, 128, 4 },
    [NIB_FLOAT8_BLOCK] = { 128, 4, false, false, false, true, false, { BY_BLOCK, BY_BLOCK }, BY_TILE, 4, 1 },
    [NIB_MXFP4] = { 32, 1, true, false, false, true, true, { BY_LINE, BY_LINE }, BY_LINE, 128, 4 },
};

static inline const struct form *form_of(const struct model *m) { return &forms[m->q.format]; }
static inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t lines_of(const struct model *m, int usage) { return usage ? m->cols : m->rows; }
static inline int64_t length_of(const struct model *m, int usage) { return usage ? m->rows : m->cols; }
static inline int64_t blocks_of(const struct model *m, int usage)
{
    const int block = form_of(m)->block;
    return block ? (length_of(m, usage) + block - 1) / block : 0;
}
static inline bool square(const struct model *m) { return m->q.block_dims[0] > 1; }
static inline bool has(const struct model *m, int usage) { return m->part[usage][CODES] != NULL; }
static inline bool has_rht(const struct model *m, int usage) { return usage ? m->q.rht : m->q.rht_rowwise; }

static inline enum layout layout_of(const struct model *m, int usage)
{
    return square(m) && form_of(m)->square == BY_TILE ? BY_TILE : form_of(m)->layout[usage];
}

static inline size_t entries_of(const struct model *m, int usage, int kind)
{
    const int64_t n[KINDS] = { lines_of(m, usage) * length_of(m, usage), lines_of(m, usage) * blocks_of(m, usage),
                               m->q.row_scaled ? lines_of(m, usage) : 1 };
    return (size_t)n[kind];
}

/* Whether a usage has such an array of its own. */
static inline bool exists(const struct model *m, int usage, int kind)
{
    const struct form *f = form_of(m);
    return kind == CODES || (kind == SCALES ? f->block > 0 : f->tensor_scales && !(f->shared && usage));
}

static inline void set_shape(struct model *m, int rank, const int64_t *shape)
{
    m->rank = rank;
    m->rows = 1;
    m->cols = rank ? shape[rank - 1] : 1;
    memset(m->shape, 0, sizeof m->shape);
    for (int i = 0; i < rank; i++) {
        m->shape[i] = shape[i];
        m->rows *= i < rank - 1 ? shape[i] : 1;
    }
}

/* ---- Arrays and who uses them ---- */

static inline struct plain *plain_new(size_t n)
{
    struct plain *p = calloc(1, sizeof *p + n * sizeof *p->value);
    require(p != NULL, "memory");
    p->users = 1;
    p->n = n;
    return p;
}

static inline void plain_drop(struct plain **p)
{
    if (*p && --(*p)->users == 0)
        free(*p);
    *p = NULL;
}

static inline struct plain *plain_copy(const struct plain *p)
{
    struct plain *copy = plain_new(p->n);
    memcpy(copy->value, p->value, p->n * sizeof *p->value);
    return copy;
}

static inline void drop_usage(struct model *m, int usage)
{
    plain_drop(&m->part[usage][CODES]);
    plain_drop(&m->part[usage][SCALES]);
    if (!form_of(m)->shared)
        plain_drop(&m->part[usage][TENSOR_SCALES]);
    else if (!has(m, 0) && !has(m, 1))
        plain_drop(&m->part[0][TENSOR_SCALES]);
    m->stale = m->stale && !usage;
}

static inline void drop_all(struct model *m)
{
    drop_usage(m, 0);
    drop_usage(m, 1);
}

static inline void allocate_usage(struct model *m, int usage)
{
    for (int kind = 0; kind < KINDS; kind++) {
        struct plain **p = &m->part[kind == TENSOR_SCALES && form_of(m)->shared ? 0 : usage][kind];
        if (!*p && (exists(m, usage, kind) || p != &m->part[usage][kind]))
            *p = plain_new(entries_of(m, usage, kind));
    }
}

/* The same arrays, or copies of them. */
static inline struct model model_like(const struct model *m, bool share)
{
    struct model out = *m;
    for (int usage = 0; usage < 2; usage++)
        for (int kind = 0; kind < KINDS; kind++)
            if (m->part[usage][kind] && share)
                m->part[usage][kind]->users++;
            else if (m->part[usage][kind])
                out.part[usage][kind] = plain_copy(m->part[usage][kind]);
    return out;
}

/* Arrays that another model uses too become copies. */
static inline void part_ways(struct model *m, int usage)
{
    for (int kind = 0; kind < KINDS; kind++) {
        struct plain **p = &m->part[usage][kind];
        if (*p && (*p)->users > 1) {
            struct plain *copy = plain_copy(*p);
            plain_drop(p);
            *p = copy;
        }
    }
}

static inline uint32_t *tensor_scales_of(const struct model *m, int usage)
{
    const struct plain *p = m->part[form_of(m)->shared ? 0 : usage][TENSOR_SCALES];
    return p ? ((struct plain *)(uintptr_t)p)->value : NULL;
}

/* ---- Where everything lies in memory ---- */

static inline void scale_shape(const struct model *m, int usage, int64_t out[2])
{
    const struct form *f = form_of(m);
    const int64_t lines = lines_of(m, usage), blocks = blocks_of(m, usage);
    const enum layout layout = layout_of(m, usage);
    out[layout == BY_BLOCK] = layout == BY_TILE ? (lines + f->block - 1) / f->block : up(lines, f->line_align);
    out[layout != BY_BLOCK] = up(blocks, layout == BY_TILE ? f->line_align : f->block_align);
}

static inline size_t scale_entry(const struct model *m, enum layout layout, int64_t row, int64_t blocks, int64_t line,
                                 int64_t block)
{
    if (m->q.swizzled) { /* tiles of 128 lines by 4 blocks, 32 lines interleaved */
        const int64_t tile = line / 128 * ((blocks + 3) / 4) + block / 4, within = line % 128;
        return (size_t)(tile * 512 + within % 32 * 16 + within / 32 * 4 + block % 4);
    }
    return (size_t)(layout == BY_BLOCK ? block * row + line
                                       : (layout == BY_TILE ? line / form_of(m)->block : line) * row + block);
}

static inline void put_codes(const struct model *m, int usage, uint8_t *out)
{
    const int64_t lines = lines_of(m, usage), length = length_of(m, usage);
    const bool packed = form_of(m)->packed, across = usage && !form_of(m)->transposed;
    const uint32_t *values = m->part[usage][CODES]->value;
    for (int64_t line = 0; line < lines; line++, values += length)
        if (packed)
            for (int64_t i = 0; i < length; i++)
                out[line * ((length + 1) / 2) + i / 2] |= (uint8_t)(values[i] << (i % 2 ? 4 : 0));
        else
            for (int64_t i = 0; i < length; i++)
                out[across ? i * lines + line : line * length + i] = (uint8_t)values[i];
}

/* Of one or four bytes: a variable number would be a call of the sanitizer's memcpy. */
static inline void copy_scale(void *to, const void *from, int bytes)
{
    if (bytes == 1)
        *(uint8_t *)to = *(const uint8_t *)from;
    else
        memcpy(to, from, 4);
}

static inline void put_scales(const struct model *m, int usage, int64_t row, uint8_t *out)
{
    const int64_t lines = lines_of(m, usage), blocks = blocks_of(m, usage);
    const int bytes = form_of(m)->scale_bytes;
    const enum layout layout = layout_of(m, usage);
    const uint32_t *values = m->part[usage][SCALES]->value;
    for (int64_t line = 0; line < lines; line++, values += blocks)
        for (int64_t b = 0; b < blocks; b++)
            copy_scale(out + scale_entry(m, layout, row, blocks, line, b) * (size_t)bytes, &values[b], bytes);
}

/* The bytes of a part, padding zero; returns how many. */
static inline size_t part_bytes(const struct model *m, int usage, int kind, uint8_t *out, size_t space)
{
    const struct form *f = form_of(m);
    const int64_t lines = lines_of(m, usage), length = length_of(m, usage);
    int64_t shape[2];
    scale_shape(m, usage, shape);
    const int64_t sizes[KINDS] = { f->packed ? lines * ((length + 1) / 2) : lines * length,
                                   shape[0] * shape[1] * f->scale_bytes,
                                   (int64_t)entries_of(m, usage, TENSOR_SCALES) * 4 };
    const size_t bytes = (size_t)sizes[kind];
    require(bytes <= space, "a part that fits");
    if (kind == TENSOR_SCALES) {
        memcpy(out, m->part[usage][kind]->value, bytes);
        return bytes;
    }
    memset(out, 0, bytes);
    if (kind == CODES)
        put_codes(m, usage, out);
    else
        put_scales(m, usage, shape[1], out);
    return bytes;
}

/* ---- Values ---- */

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* One usage as lines side by side without padding, the form in which kernels get it here. */
static inline struct nib_usage_geometry plain_geometry(const struct model *m, int usage)
{
    const bool packed = form_of(m)->packed;
    const int64_t lines = lines_of(m, usage), length = length_of(m, usage), blocks = blocks_of(m, usage);
    return (struct nib_usage_geometry){ .lines = lines,
                                        .length = length,
                                        .line_stride = packed ? (length + 1) / 2 : length,
                                        .element_stride = packed ? 0 : 1,
                                        .blocks = blocks,
                                        .scale_shape = { lines, blocks },
                                        .valid_shape = { lines, blocks },
                                        .scale_line = blocks,
                                        .scale_block = 1,
                                        .lines_per_scale = 1,
                                        .scale_bytes = form_of(m)->scale_bytes };
}

static uint8_t plain_codes[2 * ELEMENTS], plain_scales[4 * 2 * ELEMENTS];
static float plain_tensor_scales[MOST_LINES];

#define SCALAR(operation, format)                                                \
    (nib_kernels_scalar.operation[format] ? nib_kernels_scalar.operation[format] \
                                          : nib_kernels_scalar.operation[NIB_GENERIC_FORMAT])

static inline struct nib_panel plain_panel(const struct model *m, const void *x, nib_dtype dtype)
{
    return (struct nib_panel){ x, dtype, m->cols, 0, 0, m->rows, m->cols };
}

/* The amaxes of a usage, as they come from the data: of its lines, or of all of them. */
static inline const float *plain_amaxes(const struct model *m, const struct nib_panel *panel,
                                        const struct nib_coding *coding)
{
    static float amaxes[MOST_LINES];
    const int64_t lines = lines_of(m, (int)coding->usage);
    float whole = 0;
    memset(amaxes, 0, sizeof amaxes);
    if (panel->rows && panel->cols)
        SCALAR(absmax_lines, m->q.format)(panel, coding, amaxes);
    for (int64_t i = 0; i < lines; i++)
        whole = amaxes[i] > whole ? amaxes[i] : whole;
    if (!m->q.row_scaled)
        amaxes[0] = whole;
    return amaxes;
}

/* The tensor scales of a usage from the data, or from the caller's amax; returns the multiplier, where there is one. */
static inline float plain_scale(const struct model *m, const struct nib_panel *panel, const struct nib_coding *coding,
                                const nib_overrides *overrides)
{
    const float *given = overrides->amax[coding->usage], *amaxes = given ? given : plain_amaxes(m, panel, coding);
    float scale = 1;
    for (size_t i = 0; i < entries_of(m, (int)coding->usage, TENSOR_SCALES); i++) {
        plain_tensor_scales[i] = nib_tensor_scale_from_amax(&m->q, coding, amaxes[i], &scale);
        if (overrides->scale) {
            scale = *overrides->scale;
            plain_tensor_scales[i] = 1 / scale;
        }
    }
    return scale;
}

/* A usage that is there, from a contiguous matrix. */
static inline void plain_quantize(struct model *m, int usage, const void *x, nib_dtype dtype,
                                  const nib_overrides *overrides)
{
    const struct nib_panel panel = plain_panel(m, x, dtype);
    const struct nib_usage_geometry g = plain_geometry(m, usage);
    struct nib_coding coding = nib_coding_of(&m->q, (nib_usage)usage, dtype);
    coding.offset = overrides->offset ? *overrides->offset : coding.offset;
    coding.importance = usage ? NULL : overrides->importance;
    const bool tensor_scales = form_of(m)->tensor_scales;
    const float scale = tensor_scales ? plain_scale(m, &panel, &coding, overrides) : 1;
    const struct nib_target target = { plain_codes,     plain_scales, &g, tensor_scales ? plain_tensor_scales : NULL,
                                       m->q.row_scaled, scale };
    if (m->rows && m->cols)
        SCALAR(quantize, m->q.format)(&panel, &coding, &target);
    for (int64_t line = 0; line < g.lines; line++) {
        for (int64_t i = 0; i < g.length; i++)
            m->part[usage][CODES]->value[line * g.length + i] = nib_code_load(&g, plain_codes, line, i);
        for (int64_t b = 0; b < g.blocks; b++)
            m->part[usage][SCALES]->value[line * g.blocks + b] = nib_scale_load(&g, plain_scales, line, b);
    }
    for (size_t i = 0; tensor_scales && i < entries_of(m, usage, TENSOR_SCALES); i++)
        tensor_scales_of(m, usage)[i] = bits_of(plain_tensor_scales[i]);
}

/* The columnwise usage of square blocks, from the rowwise one. */
static inline void plain_build(struct model *m)
{
    const int64_t rows = m->rows, cols = m->cols, block = form_of(m)->block;
    for (int64_t c = 0; c < cols; c++) {
        for (int64_t r = 0; r < rows; r++)
            m->part[1][CODES]->value[c * rows + r] = m->part[0][CODES]->value[r * cols + c];
        for (int64_t b = 0; b < blocks_of(m, 1); b++)
            m->part[1][SCALES]->value[c * blocks_of(m, 1) + b] =
                m->part[0][SCALES]->value[b * block * blocks_of(m, 0) + c / block];
    }
    if (m->part[1][TENSOR_SCALES])
        m->part[1][TENSOR_SCALES]->value[0] = m->part[0][TENSOR_SCALES]->value[0];
    m->stale = false;
}

/* All values of a usage as [M, K] of a dtype. */
static inline void plain_decode(const struct model *m, int usage, nib_dtype dtype, uint8_t *out)
{
    static _Alignas(8) uint8_t line_values[4 * MOST_LINES];
    static float transformed[MOST_LINES];
    const struct nib_usage_geometry g = plain_geometry(m, usage);
    const struct nib_coding coding = nib_coding_of(&m->q, (nib_usage)usage, m->dtype);
    const size_t width = dtype == NIB_F32 ? 4 : 2;
    for (int64_t line = 0; line < g.lines; line++) {
        for (int64_t i = 0; i < g.length; i++)
            nib_code_store(&g, plain_codes, 0, i, (uint8_t)m->part[usage][CODES]->value[line * g.length + i]);
        for (int64_t b = 0; b < g.blocks; b++)
            copy_scale(plain_scales + b * g.scale_bytes, &m->part[usage][SCALES]->value[line * g.blocks + b],
                       g.scale_bytes);
        const uint32_t *scales = tensor_scales_of(m, usage);
        const float scale = scales ? float_of(scales[m->q.row_scaled ? line : 0]) : 1;
        SCALAR(decode, m->q.format)
        (coding.rht ? (void *)transformed : line_values, coding.rht ? NIB_F32 : dtype, plain_codes, plain_scales,
         g.length, scale, &coding, false);
        if (coding.rht)
            nib_kernels_scalar.inverse_rht[dtype](line_values, transformed, g.length, m->q.rht_sign_mask);
        const int64_t first = usage ? line : line * m->cols, step = usage ? m->cols : 1;
        for (int64_t i = 0; i < g.length; i++)
            if (width == 4)
                memcpy(out + (first + i * step) * 4, line_values + i * 4, 4);
            else
                memcpy(out + (first + i * step) * 2, line_values + i * 2, 2);
    }
}

END_PLAIN

#endif
