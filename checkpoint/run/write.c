/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write.c - the second pass over the data.
 *
 * Threads take panels of rows, one after the other through all files, and write what they become to its place. Every
 * place is known beforehand, so that neither threads nor memory nor ranks show in the result.
 */
#include "run/panels.h"

#include "base/threads.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "format/codec.h"
#include "io/gguf.h"
#include "tensor/gptq.h"
#include "tensor/tensor.h"
#include "nib_reference.h"
#include "nib_shard.h"

enum { STRIP_BYTES = 1 << 20 }; /* of rows: what a core's second cache about holds */

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for a panel of weights"); }

/* ---- Work ---- */

/* An output file that is being written. */
struct writing {
    const struct nib_out_file *file;
    char *path, *temporary;
    int fd;
    size_t first_weight, weights; /* of plan->weights */
    size_t left;                  /* panels of work that are not done */
};

struct writer {
    struct nib_run *run;
    struct writing *files;
    struct nib_scan *scan; /* that goes along, or NULL */
    struct nib_run_panels panels;
    struct nib_factor factor;    /* of the stage at work */
    size_t next, end;            /* of its panels, that to be taken, and behind the last */
    struct nib_text *provenance; /* empty until the scan has come to its end */
};

/* Memory of one thread, reused from panel to panel. */
struct scratch {
    struct nib_run *run;
    void *values;
    size_t values_bytes;
    uint8_t *codes, *scales, *transposed;
    size_t codes_bytes, scales_bytes, transposed_bytes;
    float *importance; /* of the columns of weight `important` */
    size_t importance_bytes;
    uint32_t important;
};

/* `memory` is the address of a pointer of any type. */
static bool reserve(void *memory, size_t *bytes, size_t wanted)
{
    void *block;
    if (*bytes >= wanted)
        return true;
    memcpy(&block, memory, sizeof block);
    nib_free(block);
    block = nib_alloc(wanted);
    memcpy(memory, &block, sizeof block);
    *bytes = block ? wanted : 0;
    return block != NULL;
}

static void clear_scratch(struct scratch *scratch)
{
    nib_free(scratch->values);
    nib_free(scratch->codes);
    nib_free(scratch->scales);
    nib_free(scratch->transposed);
    nib_free(scratch->importance);
}

static size_t size_of(nib_dtype dtype) { return (size_t)nib_dtypes[dtype].bits / 8; }

/* ---- Laying down ---- */

static nib_status put(const struct writer *writer, uint32_t file, uint32_t tensor, uint64_t offset, const void *bytes,
                      size_t count)
{
    const struct writing *f = &writer->files[file];
    const struct nib_out_tensor *t = &writer->run->plan->tensors[tensor];
    TRY(nib_os_write_at(f->fd, f->path, f->file->data + t->offset + offset, bytes, count));
    nib_os_start_writing(f->fd, f->file->data + t->offset + offset, count);
    return NIB_OK;
}

/* Units k..k+n-1 of `count` lines, unit by unit. With a constant size each is one load and one store. */
static inline void transpose_units(const char *lines, int64_t count, int64_t length, int64_t k, int64_t n, size_t size,
                                   uint8_t *out)
{
    enum { TILE = 32 };
    for (int64_t r0 = 0; r0 < count; r0 += TILE)
        for (int64_t i = 0; i < n; i++)
            for (int64_t r = r0; r < nib_min(r0 + TILE, count); r++)
                memcpy(out + (size_t)(i * count + r) * size, lines + (size_t)(r * length + k + i) * size, size);
}

static void transpose(const char *lines, int64_t count, int64_t length, int64_t k, int64_t n, size_t size, uint8_t *out)
{
    if (size == 1)
        transpose_units(lines, count, length, k, n, 1, out);
    else if (size == 2)
        transpose_units(lines, count, length, k, n, 2, out);
    else
        transpose_units(lines, count, length, k, n, 4, out);
}

/* Lines [count, length] of units become part of columns: unit k of line r goes to [index, k, first + r] of a tensor
 * [experts, length, rows]. */
static nib_status put_transposed(const struct writer *writer, struct scratch *scratch,
                                 const struct nib_run_panel *panel, uint32_t tensor, const void *lines, int64_t length,
                                 size_t size)
{
    enum { BAND = 64 };
    const struct nib_out_weight *w = &writer->run->plan->weights[panel->weight];
    const int64_t rows = w->source.rows, count = panel->count;
    if (!reserve(&scratch->transposed, &scratch->transposed_bytes, (size_t)(BAND * count) * size))
        return no_memory();
    for (int64_t k = 0; k < length; k += BAND) {
        const int64_t n = nib_min(BAND, length - k);
        transpose(lines, count, length, k, n, size, scratch->transposed);
        const uint64_t line = (uint64_t)(w->index * length + k) * (uint64_t)rows;
        if (count == rows) { /* whole lines lie side by side */
            TRY(put(writer, panel->file, tensor, line * size, scratch->transposed, (size_t)(n * count) * size));
            continue;
        }
        for (int64_t i = 0; i < n; i++)
            TRY(put(writer, panel->file, tensor, (line + (uint64_t)(i * rows + panel->first)) * size,
                    scratch->transposed + (size_t)(i * count) * size, (size_t)count * size));
    }
    return NIB_OK;
}

static nib_status put_lines(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel,
                            uint32_t tensor, const void *lines, int64_t length, size_t size)
{
    const struct nib_out_weight *w = &writer->run->plan->weights[panel->weight];
    if (w->laying == NIB_LAY_STACK)
        return put_transposed(writer, scratch, panel, tensor, lines, length, size);
    return put(writer, panel->file, tensor, (uint64_t)((w->index * w->source.rows + panel->first) * length) * size,
               lines, (size_t)(panel->count * length) * size);
}

static nib_status put_codes(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel,
                            const uint8_t *codes, const uint8_t *scales)
{
    const struct nib_out_weight *w = &writer->run->plan->weights[panel->weight];
    const int64_t cols = w->source.cols;
    if (w->laying == NIB_LAY_GGUF) {
        const size_t blocks = (size_t)(panel->count * (cols / NIB_GGUF_NVFP4_ELEMENTS));
        if (!reserve(&scratch->transposed, &scratch->transposed_bytes, blocks * NIB_GGUF_NVFP4_BYTES))
            return no_memory();
        (void)nib_gguf_nvfp4_join(codes, scales, blocks, scratch->transposed);
        return put_lines(writer, scratch, panel, w->out[NIB_ROLE_DATA], scratch->transposed,
                         cols / NIB_GGUF_NVFP4_ELEMENTS * NIB_GGUF_NVFP4_BYTES, 1);
    }
    TRY(put_lines(writer, scratch, panel, w->out[NIB_ROLE_DATA], codes, cols / 2, 1));
    return put_lines(writer, scratch, panel, w->out[NIB_ROLE_SCALE], scales, cols / 16, 1);
}

/* ---- What becomes of rows ---- */

static bool reserve_codes(struct scratch *scratch, int64_t rows, int64_t cols)
{
    return reserve(&scratch->codes, &scratch->codes_bytes, (size_t)(rows * nib_ceil_div(cols, 2))) &&
           reserve(&scratch->scales, &scratch->scales_bytes, (size_t)(rows * nib_ceil_div(cols, 16)));
}

/* What statistics of its input make of a weight's columns; NULL: all count alike. */
static nib_status find_importance(const nib_plan *plan, struct scratch *scratch, uint32_t weight, const float **out)
{
    const struct nib_out_weight *w = &plan->weights[weight];
    double tokens;
    *out = NULL;
    if (w->statistics.entry == NIB_NONE || plan->q.scale_rule != NIB_SCALE_SWEEP)
        return NIB_OK;
    if (scratch->important != weight) {
        scratch->important = NIB_NONE;
        if (!reserve(&scratch->importance, &scratch->importance_bytes, (size_t)w->source.cols * sizeof(float)))
            return no_memory();
        TRY(nib_plan_mean_squares(plan, &w->statistics, w->source.cols, scratch->importance, &tokens));
        for (int64_t k = 0; k < w->source.cols && w->source.columns; k++)
            scratch->importance[k] = nib_plan_folded_square(scratch->importance[k], w->source.columns[k]);
        TRY(nib_importance_normalize(scratch->importance, w->source.cols, scratch->importance));
        scratch->important = weight;
    }
    *out = scratch->importance;
    return NIB_OK;
}

/* Rows of a panel that are read and quantized at a time, so few that the core has them when it comes to the second. What
 * takes more than one read has a panel of memory of its own: all at once. */
static int64_t strip_rows(const nib_checkpoint *in, const struct nib_ck_weight *w, nib_dtype dtype, int64_t count)
{
    enum { BLOCK = 16 };
    if (nib_ck_read_overhead(in, w, 1, dtype))
        return count;
    const int64_t rows = STRIP_BYTES / (nib_max(w->cols, 1) * (int64_t)size_of(dtype)) / BLOCK * BLOCK;
    return nib_min(nib_max(rows, BLOCK), count);
}

static nib_status quantize_rows(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    const nib_dtype dtype = plan->groups[w->group].dtype;
    const bool gptq = w->hessian != NIB_NONE && writer->factor.usable;
    const int64_t cols = w->source.cols,
                  at_once = gptq ? panel->count : strip_rows(plan->in, &w->source, dtype, panel->count);
    const float *amax = &writer->run->amaxes[w->group], one = 1;
    const bool unit = nib_run_is_unit(plan, &plan->groups[w->group], *amax);
    nib_overrides overrides = { .bytes = sizeof overrides,
                                .amax = { unit ? NULL : amax, NULL },
                                .tensor_scale = { unit ? &one : NULL, NULL } };
    float tensor_scale; /* the group's: write_tensor_scales has it */
    if (!reserve(&scratch->values, &scratch->values_bytes, (size_t)(at_once * cols) * size_of(dtype)) ||
        !reserve_codes(scratch, panel->count, cols))
        return no_memory();
    TRY(find_importance(plan, scratch, panel->weight, &overrides.importance));
    overrides.importance_count = overrides.importance ? cols : 0;
    for (int64_t row = 0; row < panel->count; row += at_once) {
        const int64_t shape[2] = { nib_min(at_once, panel->count - row), cols };
        nib_array x;
        TRY(nib_ck_read_rows(plan->in, &w->source, panel->first + row, shape[0], dtype, scratch->values));
        TRY(nib_array_init(&x, scratch->values, dtype, 2, shape));
        x.device = nib_serial_host();
        const struct nib_usage_memory memory = { scratch->codes + row * nib_ceil_div(cols, 2),
                                                 scratch->scales + row * nib_ceil_div(cols, 16), &tensor_scale };
        TRY(nib_quantize_lines(&plan->q, &x, &overrides, &memory));
        if (gptq)
            TRY(nib_gptq_lines(&plan->q, &x, &memory, writer->factor.order, writer->factor.u));
    }
    return put_codes(writer, scratch, panel, scratch->codes, scratch->scales);
}

/* What makes the largest magnitude of a row 448; in BF16 rounded up, so that nothing is clipped. */
static float fp8_scale(float amax, nib_dtype dtype)
{
    float scale = amax > 0 ? nib_fmax(amax / 448.0f, FLT_MIN) : 1;
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = dtype == NIB_BF16 ? (bits + 0xFFFF) & 0xFFFF0000 : bits;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

static nib_status scale_fp8_row(const nib_plan *plan, const struct nib_out_weight *w, int64_t r, float *row,
                                nib_dtype dtype, float *scale)
{
    float amax = 0;
    for (int64_t k = 0; k < w->source.cols; k++) {
        if (!(nib_abs(row[k]) <= FLT_MAX))
            return nib_fail(NIB_ERR_DATA, "%s: weight %s is not finite at [%lld, %lld]", plan->in->path,
                            nib_quote(w->source.name).text, (long long)r, (long long)k);
        amax = nib_fmax(amax, nib_abs(row[k]));
    }
    *scale = fp8_scale(amax, dtype);
    for (int64_t k = 0; k < w->source.cols; k++)
        row[k] /= *scale;
    return NIB_OK;
}

static nib_status fp8_rows(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    const nib_dtype dtype = plan->tensors[w->out[NIB_ROLE_SCALE]].dtype;
    const int64_t cols = w->source.cols;
    const size_t elements = (size_t)(panel->count * cols), lines = (size_t)panel->count;
    if (!reserve(&scratch->values, &scratch->values_bytes, elements * sizeof(float)) ||
        !reserve(&scratch->codes, &scratch->codes_bytes, elements) ||
        !reserve(&scratch->scales, &scratch->scales_bytes, 2 * lines * sizeof(float)))
        return no_memory();
    float *values = scratch->values, *scales = (float *)(void *)scratch->scales;
    TRY(nib_ck_read_rows(plan->in, &w->source, panel->first, panel->count, NIB_F32, values));
    for (int64_t r = 0; r < panel->count; r++)
        TRY(scale_fp8_row(plan, w, panel->first + r, values + r * cols, dtype, &scales[r]));
    TRY(nib_encode(NIB_E4M3, values, elements, scratch->codes));
    TRY(nib_encode(dtype, scales, lines, scales + lines));
    TRY(put_lines(writer, scratch, panel, w->out[NIB_ROLE_DATA], scratch->codes, cols, 1));
    return put_lines(writer, scratch, panel, w->out[NIB_ROLE_SCALE], scales + lines, 1, size_of(dtype));
}

static nib_status convert_mxfp4(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    const int64_t cols = w->source.cols, count = panel->count;
    const size_t code_bytes = (size_t)(count * (cols / 2)), scale_bytes = (size_t)(count * (cols / 32));
    if (!reserve_codes(scratch, count, cols) ||
        !reserve(&scratch->values, &scratch->values_bytes, code_bytes + scale_bytes))
        return no_memory();
    uint8_t *codes = scratch->values, *scales = codes + code_bytes;
    TRY(nib_ck_read_mxfp4(plan->in, &w->source, panel->first, count, codes, scales));
    nib_mxfp4_to_nvfp4_blocks(codes, scales, count * (cols / 32), writer->run->amaxes[w->group], scratch->codes,
                              scratch->scales);
    return put_codes(writer, scratch, panel, scratch->codes, scratch->scales);
}

static nib_status keep_codes(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    if (!reserve_codes(scratch, panel->count, w->source.cols))
        return no_memory();
    TRY(nib_ck_read_codes(w->codes ? plan->codes : plan->in, w->codes ? w->codes : &w->source, panel->first,
                          panel->count, scratch->codes, scratch->scales));
    const size_t scales = (size_t)(panel->count * (w->source.cols / 16));
    for (size_t i = 0; w->scale_map && i < scales; i++)
        scratch->scales[i] = w->scale_map[scratch->scales[i]];
    return put_codes(writer, scratch, panel, scratch->codes, scratch->scales);
}

/* Rows of a matrix that is put together of two weights, one behind the other or in turns. */
static nib_status read_both(const nib_plan *plan, const struct nib_out_weight *w, int64_t first, int64_t count,
                            struct scratch *scratch, char *out)
{
    const int64_t cols = w->source.cols, half = w->source.rows / 2;
    const size_t line = (size_t)cols * size_of(w->dtype);
    struct nib_ck_weight parts[2] = { w->source, *w->second };
    parts[0].rows = half;
    if (!w->interleaved) {
        const int64_t before = nib_max(0, nib_min(count, half - first));
        TRY(nib_ck_read_rows(plan->in, &parts[0], first, before, w->dtype, out));
        return nib_ck_read_rows(plan->in, &parts[1], first + before - half, count - before, w->dtype,
                                out + (size_t)before * line);
    }
    if (!reserve(&scratch->transposed, &scratch->transposed_bytes, (size_t)(count / 2 + 1) * line))
        return no_memory();
    for (int64_t part = 0; part < 2; part++) {
        const int64_t from = (first + 1 - part) / 2, n = (first + count + 1 - part) / 2 - from;
        TRY(nib_ck_read_rows(plan->in, &parts[part], from, n, w->dtype, scratch->transposed));
        for (int64_t i = 0; i < n; i++)
            memcpy(out + (size_t)(2 * (from + i) + part - first) * line, scratch->transposed + (size_t)i * line, line);
    }
    return NIB_OK;
}

static nib_status write_values(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    const size_t size = size_of(w->dtype);
    if (!reserve(&scratch->values, &scratch->values_bytes, (size_t)(panel->count * w->source.cols) * size))
        return no_memory();
    if (w->second)
        TRY(read_both(plan, w, panel->first, panel->count, scratch, scratch->values));
    else
        TRY(nib_ck_read_rows(plan->in, &w->source, panel->first, panel->count, w->dtype, scratch->values));
    return put_lines(writer, scratch, panel, w->out[NIB_ROLE_DATA], scratch->values, w->source.cols, size);
}

/* ---- Tensor scales ---- */

/* sqrt(K) * max |gamma|: no output of an RMSNorm is larger. */
static nib_status norm_bound(const struct nib_run *run, const struct nib_out_weight *w, float *amax)
{
    const nib_checkpoint *in = run->plan->in;
    const struct nib_ck_tensor *t = &in->tensors[w->norm];
    const size_t n = (size_t)t->shape[0];
    void *raw = nib_alloc(t->bytes);
    float *gamma = nib_alloc(n * sizeof *gamma), largest = 0;
    nib_status status = raw && gamma ? nib_ck_read(in, w->norm, 0, raw, t->bytes) : no_memory();
    if (!status)
        status = nib_decode(t->dtype, raw, n, gamma);
    for (size_t i = 0; i < n && !status; i++)
        largest = nib_fmax(largest, nib_fmax(nib_abs(gamma[i]), w->norm_plus_one ? nib_abs(gamma[i] + 1) : 0));
    nib_free(raw);
    nib_free(gamma);
    *amax = (float)sqrt((double)w->source.cols) * largest;
    return status;
}

static nib_status find_values(const struct nib_run *run, const struct nib_out_weight *w, float *tensor_scale,
                              float *input)
{
    const nib_plan *plan = run->plan;
    const nib_tensor_scale sense = nib_ck_formats[plan->format].tensor_scale;
    *tensor_scale = w->action == NIB_ACTION_QUANTIZE ? run->tensor_scales[w->group] : w->tensor_scale;
    *input = w->input;
    nib_tensor_scale kind;
    if (w->codes) {
        TRY(nib_ck_read_tensor_scale(plan->codes, w->codes, &kind, tensor_scale));
        *tensor_scale = nib_run_translate(*tensor_scale, kind, sense, w->codes->e4m3_max);
    }
    if (w->as_in_source) {
        int has_input;
        TRY(nib_ck_read_tensor_scale(plan->in, &w->source, &kind, tensor_scale));
        TRY(nib_ck_read_input(plan->in, &w->source, &has_input, input));
        *tensor_scale = nib_run_translate(*tensor_scale, kind, sense, w->source.e4m3_max);
        *input =
            nib_run_translate(*input, kind == NIB_TENSOR_SCALE_DIVISOR ? kind : NIB_TENSOR_SCALE_MULTIPLIER, sense, 0);
    }
    if (w->norm != NIB_NONE && w->out[NIB_ROLE_INPUT] != NIB_NONE) {
        float amax;
        TRY(norm_bound(run, w, &amax));
        if (amax > 0 && amax <= 0x1p100f) /* a norm of zeros, or of what is not finite, says nothing */
            *input = nib_plan_input_scale(plan, amax);
    }
    return NIB_OK;
}

static nib_status write_tensor_scales(const struct writer *writer, const struct nib_run_panel *panel)
{
    const struct nib_out_weight *w = &writer->run->plan->weights[panel->weight];
    const uint64_t place = (uint64_t)w->index * sizeof(float);
    float tensor_scale, input;
    if (w->out[NIB_ROLE_TENSOR_SCALE] == NIB_NONE && w->out[NIB_ROLE_INPUT] == NIB_NONE)
        return NIB_OK;
    TRY(find_values(writer->run, w, &tensor_scale, &input));
    if (w->out[NIB_ROLE_TENSOR_SCALE] != NIB_NONE)
        TRY(put(writer, panel->file, w->out[NIB_ROLE_TENSOR_SCALE], place, &tensor_scale, sizeof tensor_scale));
    if (w->out[NIB_ROLE_INPUT] != NIB_NONE)
        TRY(put(writer, panel->file, w->out[NIB_ROLE_INPUT], place, &input, sizeof input));
    return NIB_OK;
}

/* MXFP4 that goes from safetensors to GGUF: the same codes and scales, regrouped. */
static nib_status keep_mxfp4(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    const int64_t blocks = w->source.cols / NIB_GGUF_MXFP4_ELEMENTS;
    const size_t n = (size_t)(panel->count * blocks);
    if (!reserve(&scratch->codes, &scratch->codes_bytes, n * NIB_GGUF_MXFP4_CODES) ||
        !reserve(&scratch->scales, &scratch->scales_bytes, n) ||
        !reserve(&scratch->transposed, &scratch->transposed_bytes, n * NIB_GGUF_MXFP4_BYTES))
        return no_memory();
    TRY(nib_ck_read_mxfp4(plan->in, &w->source, panel->first, panel->count, scratch->codes, scratch->scales));
    nib_gguf_mxfp4_join(scratch->codes, scratch->scales, n, scratch->transposed);
    return put_lines(writer, scratch, panel, w->out[NIB_ROLE_DATA], scratch->transposed, blocks * NIB_GGUF_MXFP4_BYTES,
                     1);
}

/* ---- Tensors that are copied ---- */

/* The biases of a stack that is put together again: [experts, parts * rows]. */
static nib_status join_biases(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_tensor *t = &plan->tensors[panel->tensor];
    const struct nib_restored *stack = t->restored;
    const size_t size = size_of(t->dtype);
    const int64_t rows = t->shape[1] / stack->parts;
    if (!reserve(&scratch->values, &scratch->values_bytes, (size_t)t->bytes) ||
        !reserve(&scratch->codes, &scratch->codes_bytes, (size_t)rows * size))
        return no_memory();
    for (int64_t i = 0; i < stack->experts * stack->parts; i++) {
        const int64_t part = i % stack->parts, step = stack->interleaved ? 2 : 1;
        char *out =
            (char *)scratch->values + (size_t)((i - part) * rows + (stack->interleaved ? part : part * rows)) * size;
        TRY(nib_ck_read(plan->in, stack->biases[i], 0, scratch->codes, (size_t)rows * size));
        for (int64_t r = 0; r < rows; r++)
            memcpy(out + (size_t)(r * step) * size, scratch->codes + (size_t)r * size, size);
    }
    return put(writer, panel->file, panel->tensor, 0, scratch->values, (size_t)t->bytes);
}

/* Values first..first+count-1 of a tensor that becomes F32; a panel is some of them. */
static nib_status cast_panel(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_tensor *t = &plan->tensors[panel->tensor];
    const struct nib_ck_tensor *source = &plan->in->tensors[t->source];
    const int64_t begin = panel->first / (int64_t)sizeof(float), count = panel->count / (int64_t)sizeof(float);
    const int64_t head = nib_max(t->head_rows, 1);
    const int64_t low = begin / head * head, high = nib_min(nib_ceil_div(begin + count, head) * head, t->count);
    const size_t size = size_of(source->dtype), span = (size_t)((high - low - 1) * t->step + 1);
    const struct nib_ck_weight order = { .head_rows = t->head_rows };
    if (!reserve(&scratch->codes, &scratch->codes_bytes, span * (size + sizeof(float))) ||
        !reserve(&scratch->values, &scratch->values_bytes, (size_t)panel->count))
        return no_memory();
    float *out = scratch->values, *wide = (float *)(void *)scratch->codes;
    uint8_t *raw = scratch->codes + span * sizeof(float);
    TRY(nib_ck_read(plan->in, t->source, (uint64_t)(t->first + low * t->step) * size, raw, span * size));
    TRY(nib_decode(source->dtype, raw, span, wide));
    for (int64_t i = 0; i < count; i++)
        out[i] = wide[(nib_ck_source_row(&order, begin + i) - low) * t->step];
    for (int64_t i = 0; i < count && t->value != 0; i++)
        out[i] += t->value;
    if (t->value != 0 && source->dtype == NIB_F16) { /* who computes in F16 rounds the sum to it */
        TRY(nib_encode(NIB_F16, out, (size_t)count, raw));
        TRY(nib_decode(NIB_F16, raw, (size_t)count, out));
    }
    return put(writer, panel->file, panel->tensor, (uint64_t)panel->first, out, (size_t)panel->count);
}

static nib_status copy_panel(const struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_tensor *t = &plan->tensors[panel->tensor];
    if (t->producer == NIB_PRODUCE_VALUE)
        return put(writer, panel->file, panel->tensor, 0, &t->value, sizeof t->value);
    if (t->producer == NIB_PRODUCE_JOINED)
        return join_biases(writer, scratch, panel);
    if (t->producer == NIB_PRODUCE_BYTES)
        return put(writer, panel->file, panel->tensor, 0, t->data, (size_t)t->bytes);
    if (t->producer == NIB_PRODUCE_CAST)
        return cast_panel(writer, scratch, panel);
    if (!reserve(&scratch->values, &scratch->values_bytes, (size_t)panel->count))
        return no_memory();
    if (t->producer == NIB_PRODUCE_COPY) {
        TRY(nib_ck_read(plan->in, t->source, (uint64_t)panel->first, scratch->values, (size_t)panel->count));
        return put(writer, panel->file, panel->tensor, (uint64_t)panel->first, scratch->values, (size_t)panel->count);
    }
    /* Every step-th element of a small tensor: read what they span, move them together. */
    const size_t size = size_of(t->dtype), span = (size_t)((t->count - 1) * t->step + 1) * size;
    if (t->count == 0)
        return NIB_OK;
    if (!reserve(&scratch->codes, &scratch->codes_bytes, span))
        return no_memory();
    TRY(nib_ck_read(plan->in, t->source, (uint64_t)t->first * size, scratch->codes, span));
    for (int64_t i = 0; i < t->count; i++)
        memcpy((char *)scratch->values + (size_t)i * size, scratch->codes + (size_t)(i * t->step) * size, size);
    return put(writer, panel->file, panel->tensor, 0, scratch->values, (size_t)t->count * size);
}

/* ---- Files ---- */

static nib_status open_file(struct writing *f)
{
    TRY(nib_os_create_temporary(f->path, &f->fd, &f->temporary));
    return nib_os_allocate(f->fd, f->path, f->file->bytes);
}

/* The header last: it has hashes of the whole input. */
static nib_status write_header(const struct writer *writer, const struct writing *f)
{
    struct nib_text header;
    TRY(nib_plan_header(writer->run->plan, f->file, writer->provenance->bytes, &header));
    const nib_status status = header.used == f->file->data
                                  ? nib_os_write_at(f->fd, f->path, 0, header.bytes, header.used)
                                  : nib_fail(NIB_ERR_DATA, "%s: its header is not what was planned", f->path);
    nib_free(header.bytes);
    return status;
}

static nib_status close_file(const struct writer *writer, struct writing *f)
{
    TRY(write_header(writer, f));
    const int fd = f->fd;
    f->fd = -1;
    const nib_status status = nib_os_publish(fd, f->temporary, f->path);
    if (status)
        nib_os_remove(f->temporary);
    nib_free(f->temporary);
    f->temporary = NULL;
    return status;
}

/* ---- Panels ---- */

static nib_status write_panel(struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    if (panel->weight == NIB_NONE)
        return copy_panel(writer, scratch, panel);
    const nib_plan *plan = writer->run->plan;
    const struct nib_out_weight *w = &plan->weights[panel->weight];
    if (panel->first == 0)
        TRY(write_tensor_scales(writer, panel));
    switch (w->action) {
    case NIB_ACTION_QUANTIZE:
        return w->codes                       ? keep_codes(writer, scratch, panel)
               : plan->groups[w->group].mxfp4 ? convert_mxfp4(writer, scratch, panel)
                                              : quantize_rows(writer, scratch, panel);
    case NIB_ACTION_FP8:
        return fp8_rows(writer, scratch, panel);
    case NIB_ACTION_CONVERT:
    case NIB_ACTION_REPAIR:
        return keep_codes(writer, scratch, panel);
    default:
        if (w->laying == NIB_LAY_MXFP4)
            return keep_mxfp4(writer, scratch, panel);
        return write_values(writer, scratch, panel);
    }
}

/* Panels of a stage one after the other, through all files; NULL where there is none, or the scan has not come to it. */
static nib_status take_panel(struct writer *writer, const struct nib_run_panel **panel)
{
    struct nib_run *run = writer->run;
    nib_status status = NIB_OK;
    pthread_mutex_lock(&run->mutex);
    *panel = writer->next < writer->end ? &writer->panels.list[writer->next] : NULL;
    if (*panel && writer->scan && (*panel)->after > nib_scan_passed(writer->scan))
        *panel = NULL;
    writer->next += *panel != NULL;
    if (*panel && writer->files[(*panel)->file].fd < 0) /* its first */
        status = open_file(&writer->files[(*panel)->file]);
    pthread_mutex_unlock(&run->mutex);
    return status;
}

static nib_status finish_panel(struct writer *writer, struct scratch *scratch, const struct nib_run_panel *panel)
{
    struct nib_run *run = writer->run;
    struct writing *f = &writer->files[panel->file];
    TRY(write_panel(writer, scratch, panel));
    pthread_mutex_lock(&run->mutex);
    const bool last = --f->left == 0;
    pthread_mutex_unlock(&run->mutex);
    if (last && !writer->scan)
        TRY(close_file(writer, f));
    const char *name = panel->weight == NIB_NONE ? run->plan->tensors[panel->tensor].name
                                                 : run->plan->weights[panel->weight].source.name;
    return nib_run_progress(run, name, nib_run_panel_bytes(run->plan, panel));
}

static nib_status write_panels(void *context, size_t item)
{
    struct writer *writer = context;
    struct scratch scratch = { .run = writer->run, .important = NIB_NONE };
    struct nib_scan_hand hand = { 0 };
    bool reads = writer->scan != NULL;
    nib_status status = NIB_OK;
    (void)item;
    while (!status && !atomic_load(&writer->run->stop)) {
        const struct nib_run_panel *panel;
        status = take_panel(writer, &panel);
        if (!status && panel)
            status = finish_panel(writer, &scratch, panel);
        else if (!status && reads)
            status = nib_scan_read(writer->scan, &hand, &reads);
        else
            break;
    }
    if (status && writer->scan)
        nib_scan_give_up(writer->scan);
    clear_scratch(&scratch);
    nib_free(hand.memory);
    return status;
}

/* Whether an earlier run has written it, from this input: hashes are known, unless a scan goes along, which is not resumed. */
static nib_status find_finished(const struct writer *writer, const struct writing *f, bool *finished)
{
    *finished = false;
    return writer->scan ? NIB_OK
                        : nib_left_is_done(writer->run->plan, f->file, f->path, writer->provenance->bytes, finished);
}

/* Which weights go to which file: both are in the same order. */
static nib_status start_writer(struct writer *writer)
{
    struct nib_run *run = writer->run;
    const nib_plan *plan = run->plan;
    const size_t ranks = run->job.comm ? (size_t)run->job.comm->size : 1,
                 rank = run->job.comm ? (size_t)run->job.comm->rank : 0;
    size_t weight = 0;
    writer->files = nib_alloc_zeroed((plan->n_files + 1) * sizeof *writer->files);
    if (!writer->files)
        return no_memory();
    for (size_t i = 0; i < plan->n_files; i++)
        writer->files[i].fd = -1;
    for (size_t i = 0; i < plan->n_files; i++) {
        struct writing *f = &writer->files[i];
        f->file = &plan->files[i];
        f->first_weight = weight;
        while (weight < plan->n_weights && plan->weights[weight].out[NIB_ROLE_DATA] < f->file->first + f->file->tensors)
            weight++;
        f->weights = weight - f->first_weight;
        f->path = nib_staging_path(run->fresh, f->file->name);
        if (!f->path)
            return no_memory();
        if (i % ranks != rank)
            continue;
        bool finished;
        TRY(find_finished(writer, f, &finished));
        if (finished)
            continue;
        const size_t before = writer->panels.n;
        TRY(nib_run_panels_cut(&writer->panels, run, (uint32_t)i, f->first_weight, f->weights));
        f->left = writer->panels.n - before;
        if (f->left == 0) { /* nothing but a header */
            TRY(open_file(f));
            if (!writer->scan)
                TRY(close_file(writer, f));
        }
    }
    return nib_run_panels_sort(&writer->panels);
}

static void end_writer(struct writer *writer)
{
    for (size_t i = 0; writer->files && i < writer->run->plan->n_files; i++) {
        struct writing *f = &writer->files[i];
        nib_os_close(f->fd);
        if (f->temporary)
            nib_os_remove(f->temporary);
        nib_free(f->temporary);
        nib_free(f->path);
    }
    nib_free(writer->files);
    nib_run_panels_free(&writer->panels);
}

static const char *phase_of(const nib_plan *plan)
{
    static const struct {
        const char *command, *phase;
    } phases[] = { { "quantize", "quantizing" },
                   { "convert", "converting" },
                   { "dequantize", "dequantizing" },
                   { "repair", "repairing" } };
    for (size_t i = 0; i < sizeof phases / sizeof *phases; i++)
        if (!strcmp(plan->command, phases[i].command))
            return phases[i].phase;
    return "writing";
}

static nib_status write_stage(struct writer *writer, const struct nib_run_stage *stage)
{
    writer->next = stage->begin;
    writer->end = stage->end;
    if (stage->hessian != NIB_NONE)
        TRY(nib_run_factorize(writer->run, stage->hessian, stage->columns, &writer->factor));
    const nib_status status = nib_run_parallel(writer->run, (size_t)writer->run->threads, write_panels, writer);
    nib_run_free_factor(&writer->factor);
    return status;
}

/* A scan that went along has come to its end: now there is a header. */
static nib_status finish_scan(struct writer *writer)
{
    const struct nib_run *run = writer->run;
    TRY(nib_scan_finish(writer->scan));
    TRY(nib_plan_provenance(run->plan, run->hashes, writer->provenance));
    for (size_t i = 0; i < run->plan->n_files; i++)
        TRY(close_file(writer, &writer->files[i]));
    return NIB_OK;
}

nib_status nib_run_write(struct nib_run *run, struct nib_scan *scan, struct nib_text *provenance)
{
    struct writer writer = { .run = run, .scan = scan, .provenance = provenance };
    nib_status status = start_writer(&writer);
    uint64_t total = 0;
    for (size_t i = 0; i < writer.panels.n && !status; i++)
        total += nib_run_panel_bytes(run->plan, &writer.panels.list[i]);
    if (scan && !status)
        status = nib_run_panels_follow(&writer.panels, run->plan, scan);
    nib_run_begin_phase(run, phase_of(run->plan), total);
    for (size_t i = 0; i < writer.panels.n_stages && !status; i++)
        status = write_stage(&writer, &writer.panels.stages[i]);
    if (!status && scan)
        status = finish_scan(&writer);
    end_writer(&writer);
    return nib_agree(run->job.comm, status, run->plan->n_files);
}
