/* SPDX-License-Identifier: Apache-2.0 */
/*
 * read.c - reading weights: the rows of any checkpoint format as values, and the codes and scales of NVFP4.
 */
#include "model/read.h"

#include <stdio.h>

#include "base/os.h"
#include "base/threads.h"
#include "file/json.h"
#include "format/codec.h"
#include "io/gguf.h"
#include "model/formats.h"
#include "nib_reference.h"

static bool has_float_dtype(const struct nib_ck_tensor *t) { return (NIB_FLOAT_BITS & NIB_DTYPE_BIT(t->dtype)) != 0; }

/* ---- Matrices within tensors ---- */

/* A weight's matrix in one of its tensors, in units of `size` bytes: N lines of `length`, or transposed. */
struct place {
    uint32_t tensor;
    size_t size;
    int64_t lines, length; /* of the whole matrix in the tensor */
    int64_t index;         /* of the matrix */
};

/* The lines of a weight's rows first..first+count-1 into out, one after the other. */
static nib_status read_straight(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                                int64_t first, int64_t count, void *out)
{
    const size_t line = (size_t)p->length * p->size;
    const uint64_t base = (uint64_t)nib_max(p->index, 0) * (uint64_t)p->lines * line;
    const uint64_t start = base + (uint64_t)(w->row_first + first * w->row_step) * line;
    if (w->row_step == 1)
        return nib_ck_read(c, p->tensor, start, out, (size_t)count * line);
    /* Every other line: read some with what lies between, and move them together. */
    enum { SPAN = 1 << 20 };
    const int64_t at_once = nib_max(1, (int64_t)(SPAN / (line * (size_t)w->row_step + 1)));
    char *buffer = nib_alloc((size_t)nib_min(at_once, count) * (size_t)w->row_step * line);
    if (!buffer)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t n = nib_min(at_once, count - done);
        status = nib_ck_read(c, p->tensor, start + (uint64_t)(done * w->row_step) * line, buffer,
                             (size_t)((n - 1) * w->row_step + 1) * line);
        for (int64_t i = 0; i < n && !status; i++)
            memcpy((char *)out + (size_t)(done + i) * line, buffer + (size_t)(i * w->row_step) * line, line);
    }
    nib_free(buffer);
    return status;
}

/* Transpose `rows` x `span` units of `size` bytes: out[r][k] from in[k][r * step]. Tiles, for the cache's sake. With a constant
 * size a unit is one load and one store. */
static inline void transpose_units(const char *in, int64_t depth, int64_t span, int64_t count, int64_t step,
                                   size_t size, char *out, int64_t out_line)
{
    enum { TILE = 32 };
    for (int64_t r0 = 0; r0 < count; r0 += TILE)
        for (int64_t r = r0; r < nib_min(r0 + TILE, count); r++)
            for (int64_t k = 0; k < depth; k++)
                memcpy(out + (size_t)(r * out_line + k) * size, in + (size_t)(k * span + r * step) * size, size);
}

static void transpose(const char *in, int64_t depth, int64_t span, int64_t count, int64_t step, size_t size, char *out,
                      int64_t out_line)
{
    if (size == 1)
        transpose_units(in, depth, span, count, step, 1, out, out_line);
    else if (size == 2)
        transpose_units(in, depth, span, count, step, 2, out, out_line);
    else
        transpose_units(in, depth, span, count, step, 4, out, out_line);
}

/* The same from [length, lines]: a band of `length` at a time is read, as much of each of its rows as is needed. */
static nib_status read_transposed(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                                  int64_t first, int64_t count, void *out)
{
    enum { BAND = 32, BUFFER_BYTES = 4 << 20 };
    if (count == 0)
        return NIB_OK;
    const int64_t from = w->row_first + first * w->row_step, span = (count - 1) * w->row_step + 1;
    const bool whole = 2 * span > p->lines; /* then one read per band, with what lies between, costs less */
    const int64_t stride = whole ? p->lines : span;
    const int64_t band = nib_max(1, nib_min(BAND, BUFFER_BYTES / nib_max(1, stride * (int64_t)p->size)));
    const uint64_t base = (uint64_t)nib_max(p->index, 0) * (uint64_t)p->lines * (uint64_t)p->length;
    char *buffer = nib_alloc((size_t)(band * stride) * p->size);
    if (!buffer)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    for (int64_t k = 0; k < p->length && !status; k += band) {
        const int64_t n = nib_min(band, p->length - k);
        if (whole)
            status = nib_ck_read(c, p->tensor, (base + (uint64_t)(k * p->lines)) * p->size, buffer,
                                 (size_t)(n * p->lines) * p->size);
        for (int64_t i = 0; i < n && !whole && !status; i++)
            status = nib_ck_read(c, p->tensor, (base + (uint64_t)((k + i) * p->lines + from)) * p->size,
                                 buffer + (size_t)(i * span) * p->size, (size_t)span * p->size);
        if (!status)
            transpose(buffer + (whole ? (size_t)from * p->size : 0), n, stride, count, w->row_step, p->size,
                      (char *)out + (size_t)k * p->size, p->length);
    }
    nib_free(buffer);
    return status;
}

static nib_status read_as_they_lie(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                                   int64_t first, int64_t count, void *out)
{
    return w->transposed ? read_transposed(c, w, p, first, count, out) : read_straight(c, w, p, first, count, out);
}

/* Rows of heads whose halves alternate: those of each half lie side by side. */
static nib_status read_heads(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                             int64_t first, int64_t count, void *out)
{
    enum { SPAN = 1 << 20 };
    const size_t line = (size_t)p->length * p->size;
    const int64_t most = nib_max(1, (int64_t)(SPAN / (line + 1)));
    char *buffer = nib_alloc((size_t)nib_min(most, count) * line);
    if (!buffer)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    for (int64_t parity = 0; parity < 2; parity++)
        for (int64_t r = first + (first + parity) % 2, n; r < first + count && !status; r += 2 * n) {
            const int64_t head_end = nib_min(r - r % w->head_rows + w->head_rows, first + count);
            n = nib_min(most, (head_end - r + 1) / 2);
            status = read_as_they_lie(c, w, p, nib_ck_source_row(w, r), n, buffer);
            for (int64_t i = 0; i < n && !status; i++)
                memcpy((char *)out + (size_t)(r + 2 * i - first) * line, buffer + (size_t)i * line, line);
        }
    nib_free(buffer);
    return status;
}

static nib_status read_lines(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                             int64_t first, int64_t count, void *out)
{
    return w->head_rows && count > 0 ? read_heads(c, w, p, first, count, out)
                                     : read_as_they_lie(c, w, p, first, count, out);
}

/* ---- Tensor scales ---- */

/* Value `index` of a tensor of scales, in any float dtype. */
static nib_status read_value(const nib_checkpoint *c, uint32_t tensor, int64_t index, float *out)
{
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    char place[256];
    if (!has_float_dtype(t))
        return nib_fail(NIB_ERR_DATA, "%s: it is not F32, BF16 or F16", nib_ck_place(c, tensor, place, sizeof place));
    const size_t size = (size_t)nib_dtypes[t->dtype].bits / 8;
    const uint64_t count = t->bytes / size;
    if (count == 0 || (count > 1 && (index < 0 || (uint64_t)index >= count)))
        return nib_fail(NIB_ERR_DATA, "%s: it has %llu values where there should be one",
                        nib_ck_place(c, tensor, place, sizeof place), (unsigned long long)count);
    uint32_t bits = 0;
    TRY(nib_ck_read(c, tensor, count > 1 ? (uint64_t)index * size : 0, &bits, size));
    return nib_decode(t->dtype, &bits, 1, out);
}

nib_status nib_ck_read_tensor_scale(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_tensor_scale *kind,
                                    float *tensor_scale)
{
    *kind = w->tensor_scale;
    *tensor_scale = 1;
    if (!nib_ck_is_nvfp4(w->format))
        return NIB_OK;
    const uint32_t tensor = w->tensor[NIB_ROLE_TENSOR_SCALE];
    if (tensor != NIB_NONE)
        return read_value(c, tensor, w->index, tensor_scale);
    if (nib_ck_formats[w->format].tensor_scale_optional)
        return NIB_OK;
    return nib_fail(NIB_ERR_DATA, "%s: weight %s: its tensor scale is missing", c->path, nib_quote(w->name).text);
}

nib_status nib_ck_read_input(const nib_checkpoint *c, const struct nib_ck_weight *w, int *has_input, float *scale)
{
    *has_input = w->tensor[NIB_ROLE_INPUT] != NIB_NONE;
    *scale = 1;
    return *has_input ? read_value(c, w->tensor[NIB_ROLE_INPUT], w->index, scale) : NIB_OK;
}

/* ---- NVFP4 ---- */

static nib_status bad_scales(const nib_checkpoint *c, const struct nib_ck_weight *w, const char *fact)
{
    return nib_fail(NIB_ERR_DATA, "%s: weight %s: %s", c->path, nib_quote(w->name).text, fact);
}

/* Scales must be E4M3, one per 16 of a row, in rows as the data has them. A saved tensor's are padded. */
static nib_status place_scales(const nib_checkpoint *c, const struct nib_ck_weight *w, struct place *p)
{
    const uint32_t id = w->tensor[NIB_ROLE_SCALE];
    const int64_t blocks = nib_ceil_div(w->cols, 16);
    if (id == NIB_NONE)
        return bad_scales(c, w, "its block scales are missing");
    const struct nib_ck_tensor *data = &c->tensors[w->tensor[NIB_ROLE_DATA]], *t = &c->tensors[id];
    const int64_t stacked = w->index >= 0;
    if (!(w->layout->scale & NIB_DTYPE_BIT(t->dtype)))
        return bad_scales(c, w, "its block scales are not F8_E4M3");
    if (t->rank != 2 + stacked || (stacked && t->shape[0] != data->shape[0]))
        return bad_scales(c, w, "its block scales do not have the shape of its data: they may be swizzled for a GEMM");
    const int64_t *shape = t->shape + stacked, *of_data = data->shape + stacked;
    const int64_t lines = w->transposed ? shape[1] : shape[0], length = w->transposed ? shape[0] : shape[1];
    const int64_t data_lines = w->transposed ? of_data[1] : of_data[0];
    const bool padded = w->layout->stacking == NIB_STACK_SAVED;
    if (padded ? lines < data_lines || length < blocks : lines != data_lines || length != blocks) {
        char fact[192];
        snprintf(fact, sizeof fact,
                 "its block scales are [%lld, %lld], and for blocks of 16 they should be [%lld, %lld]%s",
                 (long long)lines, (long long)length, (long long)data_lines, (long long)blocks,
                 length >= 4 * blocks ? ": they may be swizzled for a GEMM" : "");
        return bad_scales(c, w, fact);
    }
    *p = (struct place){ id, 1, lines, length, w->index };
    return NIB_OK;
}

nib_status nib_ck_linear_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                               uint8_t *codes, uint8_t *scales)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    const int64_t *shape = t->shape + (w->index >= 0);
    const struct place data = { w->tensor[NIB_ROLE_DATA], 1, w->transposed ? shape[1] : shape[0],
                                w->transposed ? shape[0] : shape[1], w->index };
    struct place place;
    TRY(place_scales(c, w, &place));
    if (data.length != nib_ceil_div(w->cols, 2))
        return bad_scales(c, w, "its codes do not have the shape that its metadata says");
    if (codes)
        TRY(read_lines(c, w, &data, first, count, codes));
    const int64_t blocks = nib_ceil_div(w->cols, 16);
    if (!scales || place.length == blocks)
        return scales ? read_lines(c, w, &place, first, count, scales) : NIB_OK;
    for (int64_t i = 0; i < count; i++) /* padded lines */
        TRY(nib_ck_read(c, place.tensor, (uint64_t)((first + i) * place.length), scales + i * blocks, (size_t)blocks));
    return NIB_OK;
}

/* Whole blocks of 64, regrouped. */
nib_status nib_ck_gguf_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales)
{
    const int64_t blocks = w->cols / NIB_GGUF_NVFP4_ELEMENTS;
    const int64_t at_once = nib_max(1, (1 << 20) / (blocks * NIB_GGUF_NVFP4_BYTES));
    const size_t line = (size_t)blocks * NIB_GGUF_NVFP4_BYTES, n = (size_t)nib_min(at_once, count);
    const struct place place = { w->tensor[NIB_ROLE_DATA], 1, w->rows, (int64_t)line, w->index };
    uint8_t *buffer = nib_alloc(n * (line + (size_t)blocks * (NIB_GGUF_NVFP4_CODES + NIB_GGUF_NVFP4_SCALES)));
    if (!buffer)
        return nib_ck_no_memory(c);
    uint8_t *const spare_codes = buffer + n * line, *const spare_scales =
                                                        spare_codes + n * (size_t)blocks * NIB_GGUF_NVFP4_CODES;
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        status = read_lines(c, w, &place, first + done, rows, buffer);
        if (!status)
            nib_gguf_nvfp4_split(buffer, (size_t)(rows * blocks),
                                 codes ? codes + done * blocks * NIB_GGUF_NVFP4_CODES : spare_codes,
                                 scales ? scales + done * blocks * NIB_GGUF_NVFP4_SCALES : spare_scales);
    }
    nib_free(buffer);
    return status;
}

/* A quantizer that decodes codes with a tensor scale of this kind (rowwise, 1x16, one thread). */
static void decoder_of(nib_tensor_scale kind, int32_t e4m3_max, nib_quantizer *q)
{
    nib_quantizer_init(q);
    q->columnwise = 0;
    if (kind == NIB_TENSOR_SCALE_DIVISOR)
        q->dialect = NIB_DIALECT_COMPRESSED_TENSORS;
    else if (kind != NIB_TENSOR_SCALE_AMAX)
        q->tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT;
    else if (e4m3_max == 256) {
        q->scale_rule = NIB_SCALE_4OVER6; /* the only rule that goes with it; decoding knows no other difference */
        q->e4m3_max = 256;
    }
}

nib_status nib_ck_decode(const struct nib_ck_weight *w, float tensor_scale, const uint8_t *codes, const uint8_t *scales,
                         int64_t rows, nib_dtype dtype, void *out)
{
    const int64_t shape[2] = { rows, w->cols }, blocks = nib_ceil_div(w->cols, 16);
    nib_quantizer q;
    nib_tensor *tensor = NULL;
    nib_array view, part;
    decoder_of(w->tensor_scale, w->e4m3_max, &q);
    TRY(nib_tensor_create(&q, dtype, 2, shape, NULL, &tensor));
    nib_status status = nib_tensor_part(tensor, NIB_ROW_DATA, &part);
    if (!status && rows)
        memcpy(part.data, codes, (size_t)(rows * nib_ceil_div(w->cols, 2)));
    if (!status)
        status = nib_tensor_part(tensor, NIB_ROW_SCALE, &part);
    for (int64_t i = 0; i < rows && !status; i++)
        memcpy((char *)part.data + i * part.shape[1], scales + i * blocks, (size_t)blocks);
    if (!status)
        status = nib_tensor_part(tensor, NIB_ROW_TENSOR_SCALE, &part);
    if (!status) {
        memcpy(part.data, &tensor_scale, sizeof tensor_scale);
        status = nib_array_init(&view, out, dtype, 2, shape);
        view.device = nib_serial_host();
    }
    if (!status)
        status = nib_dequantize(tensor, NIB_ROWWISE, &view);
    nib_tensor_destroy(tensor);
    return status;
}

/* Rows at a time, so that what is needed besides the output stays small. */
enum { PANEL_BYTES = 4 << 20 };
static int64_t panel_rows(int64_t bytes_per_row) { return nib_max(1, PANEL_BYTES / nib_max(1, bytes_per_row)); }

nib_status nib_ck_nvfp4_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             nib_dtype dtype, void *out)
{
    const int64_t code_bytes = nib_ceil_div(w->cols, 2), blocks = nib_ceil_div(w->cols, 16);
    const int64_t at_once = nib_min(panel_rows(code_bytes + blocks), count);
    const size_t line = (size_t)w->cols * (size_t)nib_dtypes[dtype].bits / 8;
    nib_tensor_scale kind;
    float tensor_scale;
    TRY(nib_ck_read_tensor_scale(c, w, &kind, &tensor_scale));
    uint8_t *codes = nib_alloc((size_t)(at_once * (code_bytes + blocks)));
    if (!codes)
        return nib_ck_no_memory(c);
    uint8_t *const scales = codes + at_once * code_bytes;
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        status = nib_ck_formats[w->format].read_codes(c, w, first + done, rows, codes, scales);
        if (!status)
            status = nib_ck_decode(w, tensor_scale, codes, scales, rows, dtype, (char *)out + (size_t)done * line);
    }
    nib_free(codes);
    return status;
}

/* ---- The other checkpoint formats ---- */

/* n values of one dtype as another; through F32, which holds all of them. */
static nib_status convert(nib_dtype from, const void *in, size_t n, nib_dtype to, void *out)
{
    enum { AT_ONCE = 1024 };
    float values[AT_ONCE];
    const size_t in_size = (size_t)nib_dtypes[from].bits / 8, out_size = (size_t)nib_dtypes[to].bits / 8;
    for (size_t i = 0; i < n; i += AT_ONCE) {
        const size_t count = n - i < AT_ONCE ? n - i : AT_ONCE;
        TRY(nib_decode(from, (const char *)in + i * in_size, count, values));
        TRY(nib_encode(to, values, count, (char *)out + i * out_size));
    }
    return NIB_OK;
}

nib_status nib_ck_plain_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             nib_dtype dtype, void *out)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    const int64_t *shape = t->shape + (w->index >= 0);
    const size_t size = (size_t)nib_dtypes[t->dtype].bits / 8;
    const struct place place = { w->tensor[NIB_ROLE_DATA], size, w->transposed ? shape[1] : shape[0],
                                 w->transposed ? shape[0] : shape[1], w->index };
    if (dtype == t->dtype)
        return read_lines(c, w, &place, first, count, out);
    const int64_t at_once = nib_min(panel_rows(w->cols * (int64_t)size), count);
    char *buffer = nib_alloc((size_t)(at_once * w->cols) * size);
    if (!buffer)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        status = read_lines(c, w, &place, first + done, rows, buffer);
        if (!status)
            status = convert(t->dtype, buffer, (size_t)(rows * w->cols), dtype,
                             (char *)out + (size_t)(done * w->cols) * (size_t)nib_dtypes[dtype].bits / 8);
    }
    nib_free(buffer);
    return status;
}

nib_status nib_ck_read_mxfp4(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    const int64_t blocks = nib_ceil_div(w->cols, 32), lines = t->rank == 4 ? t->shape[1] : w->rows;
    if (t->ggml_type < 0) {
        const uint32_t id = w->tensor[NIB_ROLE_SCALE];
        const struct nib_ck_tensor *s = id == NIB_NONE ? NULL : &c->tensors[id];
        if (!s || s->dtype != NIB_U8 || s->bytes != t->bytes / 16 || w->cols % 32)
            return bad_scales(c, w, "its E8M0 scales are missing, or not one byte per block of 32");
        const struct place data = { w->tensor[NIB_ROLE_DATA], 1, lines, w->cols / 2, w->index };
        const struct place scale = { id, 1, lines, blocks, w->index };
        TRY(read_lines(c, w, &data, first, count, codes));
        return read_lines(c, w, &scale, first, count, scales);
    }
    const size_t line = (size_t)blocks * NIB_GGUF_MXFP4_BYTES;
    const struct place data = { w->tensor[NIB_ROLE_DATA], 1, w->rows, (int64_t)line, w->index };
    uint8_t *buffer = nib_alloc((size_t)count * line);
    if (!buffer)
        return nib_ck_no_memory(c);
    const nib_status status = read_lines(c, w, &data, first, count, buffer);
    if (!status)
        nib_gguf_mxfp4_split(buffer, (size_t)(count * blocks), codes, scales);
    nib_free(buffer);
    return status;
}

nib_status nib_ck_mxfp4_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             nib_dtype dtype, void *out)
{
    const int64_t blocks = nib_ceil_div(w->cols, 32), at_once = nib_min(panel_rows(w->cols * 5), count);
    const size_t out_line = (size_t)w->cols * (size_t)nib_dtypes[dtype].bits / 8;
    float e2m1[16], *values = nib_alloc((size_t)w->cols * sizeof *values);
    uint8_t *codes = nib_alloc((size_t)(at_once * (16 * blocks + blocks)));
    nib_status status = values && codes ? NIB_OK : nib_ck_no_memory(c);
    nib_e2m1_values(e2m1);
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        uint8_t *const scales = codes + rows * 16 * blocks;
        status = nib_ck_read_mxfp4(c, w, first + done, rows, codes, scales);
        for (int64_t r = 0; r < rows && !status; r++) {
            for (int64_t k = 0; k < w->cols; k++) {
                const uint8_t byte = codes[r * 16 * blocks + k / 2];
                values[k] = e2m1[k % 2 ? byte >> 4 : byte & 15] * nib_f32_from_e8m0(scales[r * blocks + k / 32]);
            }
            status = nib_encode(dtype, values, (size_t)w->cols, (char *)out + (size_t)(done + r) * out_line);
        }
    }
    nib_free(values);
    nib_free(codes);
    return status;
}

/* Blocks that hold their scales, a panel of rows at a time. */
nib_status nib_ck_ggml_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                            nib_dtype dtype, void *out)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    const struct nib_gguf_type_facts *facts = nib_gguf_type_facts((uint32_t)t->ggml_type);
    const int64_t blocks = w->cols / facts->elements, line = blocks * facts->bytes;
    const int64_t at_once = nib_min(panel_rows(w->cols * 5), count);
    const size_t out_line = (size_t)w->cols * (size_t)nib_dtypes[dtype].bits / 8;
    const struct place place = { w->tensor[NIB_ROLE_DATA], 1, w->rows, line, w->index };
    float *values = nib_alloc((size_t)w->cols * sizeof *values);
    uint8_t *raw = nib_alloc((size_t)(at_once * line));
    nib_status status = values && raw ? NIB_OK : nib_ck_no_memory(c);
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        status = read_lines(c, w, &place, first + done, rows, raw);
        for (int64_t r = 0; r < rows && !status; r++) {
            nib_gguf_decode((uint32_t)t->ggml_type, raw + r * line, (size_t)blocks, values);
            status = nib_encode(dtype, values, (size_t)w->cols, (char *)out + (size_t)(done + r) * out_line);
        }
    }
    nib_free(values);
    nib_free(raw);
    return status;
}

/* FP8 values have a factor per tensor, per row or per 128x128 block: the shape of their scales tells. */
struct factors {
    uint32_t tensor;
    nib_dtype dtype;
    int64_t rows, across; /* of the weight that share one; values in a line of the tensor */
    int64_t line;         /* that `values` holds */
    char *raw;
    float *values;
};

enum { FP8_BLOCK = 128 };

static nib_status open_factors(const nib_checkpoint *c, const struct nib_ck_weight *w, struct factors *f)
{
    const struct nib_ck_tensor *s = &c->tensors[w->tensor[NIB_ROLE_SCALE]];
    const int64_t down = nib_ceil_div(w->rows, FP8_BLOCK), across = nib_ceil_div(w->cols, FP8_BLOCK);
    if (!has_float_dtype(s))
        return bad_scales(c, w, "its scales are not F32, BF16 or F16");
    *f = (struct factors){ .tensor = w->tensor[NIB_ROLE_SCALE], .dtype = s->dtype, .across = 1, .line = -1 };
    if (s->bytes == (uint64_t)nib_dtypes[s->dtype].bits / 8)
        f->rows = w->rows;
    else if ((s->rank == 1 || (s->rank == 2 && s->shape[1] == 1)) && s->shape[0] == w->rows)
        f->rows = 1;
    else if (s->rank == 2 && s->shape[0] == down && s->shape[1] == across)
        f->rows = FP8_BLOCK, f->across = across;
    else
        return bad_scales(c, w, "its scales are neither one per tensor, nor one per row, nor one per 128x128 block");
    f->raw = nib_alloc((size_t)f->across * (sizeof(float) + (size_t)nib_dtypes[s->dtype].bits / 8));
    f->values = (float *)(void *)f->raw; /* raw values stand behind them */
    return f->raw ? NIB_OK : nib_ck_no_memory(c);
}

static nib_status scale_row(const nib_checkpoint *c, struct factors *f, int64_t row, float *values, int64_t cols)
{
    const size_t bytes = (size_t)f->across * (size_t)nib_dtypes[f->dtype].bits / 8;
    if (row / f->rows != f->line) {
        char *raw = f->raw + (size_t)f->across * sizeof(float);
        f->line = row / f->rows;
        TRY(nib_ck_read(c, f->tensor, (uint64_t)f->line * bytes, raw, bytes));
        TRY(nib_decode(f->dtype, raw, (size_t)f->across, f->values));
    }
    for (int64_t k = 0; k < cols; k++)
        values[k] *= f->values[f->across > 1 ? k / FP8_BLOCK : 0];
    return NIB_OK;
}

nib_status nib_ck_fp8_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                           nib_dtype dtype, void *out)
{
    struct factors factors = { .rows = 1 };
    TRY(open_factors(c, w, &factors));
    const size_t cols = (size_t)w->cols, out_line = cols * (size_t)nib_dtypes[dtype].bits / 8;
    const struct place place = { w->tensor[NIB_ROLE_DATA], 1, w->rows, w->cols, -1 };
    float *values = nib_alloc(cols * sizeof *values);
    uint8_t *codes = nib_alloc(cols);
    nib_status status = values && codes ? NIB_OK : nib_ck_no_memory(c);
    for (int64_t r = 0; r < count && !status; r++) {
        status = read_lines(c, w, &place, first + r, 1, codes);
        if (!status)
            status = nib_decode(NIB_E4M3, codes, cols, values);
        if (!status)
            status = scale_row(c, &factors, nib_ck_source_row(w, first + r), values, w->cols);
        if (!status)
            status = nib_encode(dtype, values, cols, (char *)out + (size_t)r * out_line);
    }
    nib_free(values);
    nib_free(codes);
    nib_free(factors.raw);
    return status;
}

/* ---- For the other files and for callers ---- */

nib_dtype nib_ck_exact_dtype(const struct nib_ck_weight *w)
{
    return w->format == NIB_CHECKPOINT_FORMAT_PLAIN && !w->columns && !w->divisors ? w->dtype : NIB_F32;
}

static void scale_rows(const struct nib_ck_weight *w, int64_t first, int64_t count, float *values)
{
    for (int64_t r = 0; r < count; r++) {
        float *row = values + r * w->cols;
        const float divisor = w->divisors ? w->divisors[first + r] : 1;
        for (int64_t k = 0; k < w->cols; k++)
            row[k] /= divisor;
        for (int64_t k = 0; k < w->cols && w->columns; k++)
            row[k] *= w->columns[k];
    }
}

/* Values that are scaled are computed in F32 and rounded once. */
static nib_status read_scaled(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                              nib_dtype dtype, void *out)
{
    nib_ck_rows_fn *const read = nib_ck_formats[w->format].read_rows;
    if (dtype == NIB_F32) {
        TRY(read(c, w, first, count, dtype, out));
        scale_rows(w, first, count, out);
        return NIB_OK;
    }
    const int64_t at_once = nib_min(count, panel_rows(w->cols));
    const size_t size = (size_t)w->cols * (size_t)nib_dtypes[dtype].bits / 8;
    float *values = nib_alloc((size_t)(at_once * w->cols) * sizeof *values);
    nib_status status = values ? NIB_OK : nib_ck_no_memory(c);
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t n = nib_min(at_once, count - done);
        status = read(c, w, first + done, n, NIB_F32, values);
        if (status)
            break;
        scale_rows(w, first + done, n, values);
        status = nib_encode(dtype, values, (size_t)(n * w->cols), (char *)out + (size_t)done * size);
    }
    nib_free(values);
    return status;
}

nib_status nib_ck_read_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                            nib_dtype dtype, void *out)
{
    const nib_fpenv saved = nib_fpenv_enter();
    const bool scaled = w->columns || w->divisors;
    const nib_status status = count < 1 || w->cols < 1 ? NIB_OK
                              : scaled                 ? read_scaled(c, w, first, count, dtype, out)
                                       : nib_ck_formats[w->format].read_rows(c, w, first, count, dtype, out);
    nib_fpenv_leave(saved);
    return status;
}

nib_status nib_ck_read_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales)
{
    return nib_ck_formats[w->format].read_codes(c, w, first, count, codes, scales);
}

size_t nib_ck_read_overhead(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t count, nib_dtype dtype)
{
    (void)c;
    const size_t values = (size_t)(nib_min(count, panel_rows(w->cols)) * w->cols) * 2;
    const size_t transposing = w->transposed ? (size_t)4 << 20 : w->row_step > 1 ? (size_t)1 << 20 : 0;
    return transposing +
           (nib_ck_exact_dtype(w) == dtype && w->format == NIB_CHECKPOINT_FORMAT_PLAIN && dtype == w->dtype
                ? 0
                : (size_t)PANEL_BYTES + values);
}

int64_t nib_ck_rows_for(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_dtype dtype, uint64_t bytes)
{
    const uint64_t fixed = nib_ck_read_overhead(c, w, 1, dtype);
    const uint64_t line = (uint64_t)w->cols * (uint64_t)nib_dtypes[dtype].bits / 8 + 1;
    int64_t rows = bytes > fixed ? (int64_t)((bytes - fixed) / line) : 1;
    rows = nib_max(1, nib_min(rows, w->rows));
    return rows > 16 && rows < w->rows ? rows / 16 * 16 : rows;
}

static nib_status check_weight(const nib_checkpoint *c, size_t index)
{
    if (index >= c->n_weights)
        return nib_fail(NIB_ERR_ARG, "%s: there is no weight %zu among its %zu", c->path, index, c->n_weights);
    return NIB_OK;
}

/* A weight's part of a tensor's bytes: of a stack, that of its rows. */
static uint64_t share_of(const nib_checkpoint *c, const struct nib_ck_weight *w, int role)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[role]];
    if (w->index < 0 || t->rank < 1 || t->shape[0] < 1)
        return t->bytes;
    const uint64_t of_matrix = t->bytes / (uint64_t)t->shape[0];
    const int64_t lines = t->rank < 3 ? w->rows : t->shape[w->transposed ? 2 : 1];
    return lines > w->rows ? of_matrix / (uint64_t)lines * (uint64_t)w->rows : of_matrix;
}

nib_status nib_checkpoint_get_weight(const nib_checkpoint *c, size_t index, nib_weight *out)
{
    NIB_REQUIRE(c);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("nib_weight", out, NIB_UP_TO(nib_weight, stored_dtype)));
    TRY(check_weight(c, index));
    const struct nib_ck_weight *w = &c->weights[index];
    const struct nib_ck_tensor *data = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    nib_weight found = { .name = w->name,
                         .format = w->format,
                         .dtype = w->dtype,
                         .rows = w->rows,
                         .cols = w->cols,
                         .tensor = data->name,
                         .file = c->files[data->file].name,
                         .tensor_scale_kind = w->tensor_scale,
                         .tensor_scale = 1,
                         .input_scale = 1,
                         .stored_dtype = nib_ck_dtype_name(data) };
    for (int role = 0; role < NIB_ROLE_COUNT; role++)
        found.stored_bytes += w->tensor[role] == NIB_NONE ? 0 : share_of(c, w, role);
    if (nib_ck_is_nvfp4(w->format)) {
        TRY(nib_ck_read_tensor_scale(c, w, &found.tensor_scale_kind, &found.tensor_scale));
        TRY(nib_ck_read_input(c, w, &found.has_input_scale, &found.input_scale));
    }
    nib_struct_write(out, &found, sizeof found);
    return NIB_OK;
}

static nib_status check_rows(const nib_checkpoint *c, size_t weight, int64_t first, int64_t count)
{
    TRY(check_weight(c, weight));
    const struct nib_ck_weight *w = &c->weights[weight];
    if (first < 0 || count < 0 || first > w->rows || count > w->rows - first)
        return nib_fail(NIB_ERR_ARG, "%s: weight %s: rows %lld to %lld are not within its %lld", c->path,
                        nib_quote(w->name).text, (long long)first, (long long)first + count, (long long)w->rows);
    return NIB_OK;
}

nib_status nib_checkpoint_read_rows(const nib_checkpoint *c, size_t weight, int64_t first, int64_t count,
                                    const nib_array *out)
{
    NIB_REQUIRE(c);
    NIB_REQUIRE(out);
    TRY(check_rows(c, weight, first, count));
    TRY(nib_check_output("out", out));
    const struct nib_ck_weight *w = &c->weights[weight];
    if (out->dtype != NIB_F32 && out->dtype != NIB_BF16 && out->dtype != NIB_F16)
        return nib_fail(NIB_ERR_DTYPE, "out is neither F32, BF16 nor F16");
    if (out->rank != 2 || out->shape[0] != count || out->shape[1] != w->cols ||
        (count > 0 && w->cols > 0 && (out->strides[1] != 1 || out->strides[0] != w->cols)))
        return nib_fail(NIB_ERR_SHAPE, "out is not a contiguous [%lld, %lld]", (long long)count, (long long)w->cols);
    return nib_ck_read_rows(c, w, first, count, out->dtype, (char *)out->data + out->offset);
}

nib_status nib_checkpoint_read_codes(const nib_checkpoint *c, size_t weight, int64_t first, int64_t count,
                                     uint8_t *codes, uint8_t *scales)
{
    NIB_REQUIRE(c);
    TRY(check_rows(c, weight, first, count));
    const struct nib_ck_weight *w = &c->weights[weight];
    if (!nib_ck_is_nvfp4(w->format))
        return nib_fail(NIB_ERR_MODE, "%s: weight %s is %s and has no NVFP4 codes", c->path, nib_quote(w->name).text,
                        nib_ck_formats[w->format].name);
    return count > 0 && w->cols > 0 ? nib_ck_read_codes(c, w, first, count, codes, scales) : NIB_OK;
}
