/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_fold.c - scales of channels that a quantization moves out of its weights: from the columns of those that read a
 * norm into the norm, and from the columns of down into the rows of up. Columns with large inputs grow, so that they
 * lose less; the model stays what it was.
 */
#include "plan/plan.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#include "format/codec.h"
#include "model/folds.h"
#include "tensor/tensor.h"
#include "nib_reference.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the scales of the plan"); }

/* ---- Scales ---- */

/* E[x^2]^(a/2), about 1 in the middle; 1 where there is no input. */
static void scales_of(const float *squares, int64_t n, double exponent, bool pow2, float *out)
{
    double low = INFINITY, high = 0;
    for (int64_t k = 0; k < n; k++)
        if (squares[k] > 0) {
            low = fmin(low, (double)squares[k]);
            high = fmax(high, (double)squares[k]);
        }
    for (int64_t k = 0; k < n; k++) {
        /* sqrt(max s * min s) is what stands for 1: in logarithms of squares, their mean. */
        const double log_scale =
            squares[k] > 0 ? exponent / 2 * (log2((double)squares[k]) - (log2(low) + log2(high)) / 2) : 0;
        out[k] = (float)exp2(pow2 ? rint(log_scale) : log_scale);
    }
}

/* Rows of weights by which exponents are judged. */
struct samples {
    float *values, *scaled; /* [rows, cols] each */
    int64_t rows, cols;
};

static nib_status add_rows(const nib_plan *plan, size_t weight, int64_t rows, struct samples *samples)
{
    const struct nib_ck_weight *w = &plan->in->weights[weight];
    const int64_t n = nib_min(rows, w->rows);
    for (int64_t i = 0; i < n; i++)
        TRY(nib_ck_read_rows(plan->in, w, i * w->rows / n, 1, NIB_F32, samples->values + samples->rows++ * w->cols));
    return NIB_OK;
}

/* Sum of squared errors, weighed by the input, of what W s and s leave of W. */
static nib_status loss_of(const nib_plan *plan, const struct samples *samples, const float *squares,
                          const float *scales, float *importance, double *loss)
{
    const int64_t cols = samples->cols, shape[2] = { samples->rows, cols };
    float amax = 0;
    nib_array x;
    *loss = 0;
    for (int64_t i = 0; i < samples->rows * cols; i++) {
        samples->scaled[i] = samples->values[i] * scales[i % cols];
        amax = nib_fmax(amax, nib_abs(samples->scaled[i]));
    }
    if (!(amax > 0 && amax <= FLT_MAX))
        return NIB_OK; /* zeros, or what the scan will report */
    for (int64_t k = 0; k < cols; k++)
        importance[k] = nib_plan_folded_square(squares[k], scales[k]);
    TRY(nib_importance_normalize(importance, cols, importance));
    TRY(nib_array_init(&x, samples->scaled, NIB_F32, 2, shape));
    const nib_overrides overrides = {
        .bytes = sizeof overrides, .amax = { &amax, NULL }, .importance = importance, .importance_count = cols
    };
    TRY(nib_fake_quantize(&plan->q, &x, &overrides, NIB_ROWWISE, &x));
    for (int64_t i = 0; i < samples->rows * cols; i++) {
        const double d = (double)samples->scaled[i] / (double)scales[i % cols] - (double)samples->values[i];
        *loss += (double)squares[i % cols] * d * d;
    }
    return NIB_OK;
}

/* The scales of some weights with one input: by the plan's exponent, or by the one of 0, 0.05, ... 1 that loses least. */
static nib_status choose_scales(const nib_plan *plan, const size_t *weights, size_t n, const float *squares,
                                int64_t cols, bool pow2, float *out)
{
    enum { ROWS = 256, STEPS = 20 };
    scales_of(squares, cols, (double)plan->fold->exponent, pow2, out);
    if (!plan->fold->search)
        return NIB_OK;
    const int64_t each = nib_max(1, ROWS / (int64_t)n);
    const size_t elements = (size_t)(each * (int64_t)n * cols);
    struct samples samples = { .cols = cols };
    samples.values = nib_alloc(elements * sizeof(float));
    samples.scaled = nib_alloc(elements * sizeof(float));
    float *scales = nib_alloc((size_t)cols * 2 * sizeof *scales);
    double least = INFINITY, loss;
    nib_status status = samples.values && samples.scaled && scales ? NIB_OK : no_memory();
    for (size_t i = 0; i < n && !status; i++)
        status = add_rows(plan, weights[i], each, &samples);
    for (int step = 0; step <= STEPS && !status; step++) {
        scales_of(squares, cols, (double)step / STEPS, pow2, scales);
        status = loss_of(plan, &samples, squares, scales, scales + cols, &loss);
        if (!status && loss < least) {
            least = loss;
            memcpy(out, scales, (size_t)cols * sizeof *out);
        }
    }
    nib_free(samples.values);
    nib_free(samples.scaled);
    nib_free(scales);
    return status;
}

/* ---- What becomes of tensors ---- */

static nib_status read_floats(const nib_plan *plan, uint32_t tensor, float *out)
{
    const struct nib_ck_tensor *t = &plan->in->tensors[tensor];
    void *raw = nib_alloc(t->bytes);
    nib_status status = raw ? nib_ck_read(plan->in, tensor, 0, raw, t->bytes) : no_memory();
    if (!status)
        status = nib_decode(t->dtype, raw, (size_t)t->shape[0], out);
    nib_free(raw);
    return status;
}

/* A tensor whose values are written anew, in its dtype. */
static nib_status replace(nib_plan *plan, uint32_t tensor, const float *values)
{
    const struct nib_ck_tensor *t = &plan->in->tensors[tensor];
    void *raw = nib_plan_memory(plan, t->bytes);
    if (!raw)
        return no_memory();
    TRY(nib_encode(t->dtype, values, (size_t)t->shape[0], raw));
    plan->fold->tensors[tensor] = raw;
    return NIB_OK;
}

static bool is_vector(const nib_plan *plan, uint32_t tensor, int64_t n)
{
    const struct nib_ck_tensor *t = &plan->in->tensors[tensor];
    const bool computes = t->dtype == NIB_F32 || t->dtype == NIB_BF16 || t->dtype == NIB_F16;
    return t->rank == 1 && t->shape[0] == n && computes;
}

/* values / scales, in the tensor's dtype. */
static nib_status divide_bias(nib_plan *plan, uint32_t tensor, const float *scales, float *scratch)
{
    TRY(read_floats(plan, tensor, scratch));
    for (int64_t k = 0; k < plan->in->tensors[tensor].shape[0]; k++)
        scratch[k] /= scales[k];
    return replace(plan, tensor, scratch);
}

/* The norm's weights divided by the scales and rounded to their dtype; the scales become what is left of them. */
static nib_status divide_norm(nib_plan *plan, uint32_t tensor, bool plus_one, float *scales, float *w)
{
    const struct nib_ck_tensor *t = &plan->in->tensors[tensor];
    const float shift = plus_one ? 1 : 0;
    TRY(read_floats(plan, tensor, w));
    for (int64_t k = 0; k < t->shape[0]; k++) {
        const float effective = w[k] + shift, wanted = effective / scales[k] - shift;
        uint32_t raw;
        float stored;
        TRY(nib_encode(t->dtype, &wanted, 1, &raw));
        TRY(nib_decode(t->dtype, &raw, 1, &stored));
        const float left = effective / (stored + shift);
        const bool good = left >= 0x1p-60f && left <= 0x1p60f; /* neither zero nor infinite nor a NaN */
        scales[k] = good ? left : 1;
        w[k] = good ? stored : w[k];
    }
    return replace(plan, tensor, w);
}

static nib_status add_scales(nib_plan *plan, const char *name, const float *values, int64_t n, uint32_t *index)
{
    struct nib_plan_fold *fold = plan->fold;
    struct nib_plan_scales *scales = nib_grow(fold->scales, &fold->capacity, fold->n + 1, sizeof *scales);
    if (!scales || !name)
        return no_memory();
    fold->scales = scales;
    scales[fold->n] = (struct nib_plan_scales){ name, values, n };
    *index = (uint32_t)fold->n++;
    return NIB_OK;
}

static nib_status say(nib_plan *plan, size_t weight, const char *text)
{
    plan->rows[weight].fold = text;
    return text ? NIB_OK : no_memory();
}

/* ---- Norms ---- */

/* The weights of a layer, and whatever in it may read anything. */
struct layer {
    nib_plan *plan;
    const struct nib_fold_family *family;
    size_t begin, end; /* weights of the input */
    const char *name;  /* begins with the layer's */
    size_t bytes;      /* so many bytes are the layer's */
    const char *unknown;
};

struct pair {
    const struct layer *layer;
    uint32_t norm, bias;
    size_t *readers; /* weights */
    size_t n;
    int64_t cols;
    bool pow2;
};

static uint32_t part_of(const struct layer *l, const char *module, const char *part)
{
    char name[1024];
    const int n = snprintf(name, sizeof name, "%.*s.%s.%s", (int)l->bytes, l->name, module, part);
    return n > 0 && (size_t)n < sizeof name ? nib_ck_find_tensor(l->plan->in, name) : NIB_NONE;
}

/* Why it cannot be folded; NULL: nothing speaks against it. Values of 16 bits that are multiplied, a router's for one,
 * stay exact only by powers of two, which a stored 1 + w is not. */
static const char *reason_against(struct pair *p)
{
    const struct layer *l = p->layer;
    nib_plan *plan = l->plan;
    size_t quantized = 0;
    if (l->unknown)
        return nib_plan_string(plan, "none: %s may read it too", l->unknown);
    if (p->norm == NIB_NONE || !is_vector(plan, p->norm, p->cols) ||
        (p->bias != NIB_NONE && !is_vector(plan, p->bias, p->cols)))
        return "none: its norm is not there";
    for (size_t i = 0; i < p->n; i++) {
        const struct nib_ck_weight *w = &plan->in->weights[p->readers[i]];
        if (w->cols != p->cols || (w->index < 0 && w->transposed))
            return "none: weights that read the norm do not fit it";
        if (nib_plan_is_scaled(plan, p->readers[i]) && w->format == NIB_CHECKPOINT_FORMAT_MXFP4)
            return "none: codes of MXFP4 are taken over";
        quantized += nib_plan_is_scaled(plan, p->readers[i]);
        p->pow2 |= !nib_plan_is_scaled(plan, p->readers[i]) && w->dtype != NIB_F32;
    }
    if (!quantized)
        return "none: nothing that reads the norm is quantized";
    p->pow2 |= p->bias != NIB_NONE && plan->in->tensors[p->bias].dtype != NIB_F32;
    if (p->pow2 && l->family->plus_one && plan->in->tensors[p->norm].dtype != NIB_F32)
        return "none: a norm of 1 + w in 16 bits and what stays beside it in 16 bits cannot both be exact";
    return NULL;
}

/* Mean squares of what a norm gives: of the first reader that all tokens reach, else of all experts. */
static nib_status squares_of(const struct pair *p, float *out, bool *found)
{
    const nib_plan *plan = p->layer->plan;
    *found = false;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < p->n; i++) {
            const struct nib_plan_input *input = &plan->rows[p->readers[i]].input;
            double tokens;
            if (!nib_plan_is_scaled(plan, p->readers[i]) || input->entry == NIB_NONE ||
                (input->slices > 1) != (pass > 0))
                continue;
            *found = true;
            if (pass == 0)
                return nib_plan_mean_squares(plan, input, p->cols, out, &tokens);
            memcpy(out, plan->digests[input->entry].pooled, (size_t)p->cols * sizeof *out);
            return NIB_OK;
        }
    return NIB_OK;
}

static nib_status fold_pair(struct pair *p, const char *norm, float *squares, float *scratch)
{
    const struct layer *l = p->layer;
    nib_plan *plan = l->plan;
    bool found = false;
    uint32_t index;
    const char *text = reason_against(p);
    if (!text)
        TRY(squares_of(p, squares, &found));
    if (!text && !found)
        text = "none: there are no statistics of its input";
    if (text) {
        for (size_t i = 0; i < p->n; i++)
            TRY(say(plan, p->readers[i], text));
        return NIB_OK;
    }
    size_t quantized = 0; /* they stand first */
    for (size_t i = 0; i < p->n; i++)
        if (nib_plan_is_scaled(plan, p->readers[i])) {
            const size_t other = p->readers[quantized];
            p->readers[quantized++] = p->readers[i];
            p->readers[i] = other;
        }
    float *scales = nib_plan_memory(plan, (size_t)p->cols * sizeof *scales);
    if (!scales)
        return no_memory();
    TRY(choose_scales(plan, p->readers, quantized, squares, p->cols, p->pow2, scales));
    TRY(divide_norm(plan, p->norm, l->family->plus_one, scales, scratch));
    if (p->bias != NIB_NONE)
        TRY(divide_bias(plan, p->bias, scales, scratch));
    TRY(add_scales(plan, nib_plan_string(plan, "%.*s.%s", (int)l->bytes, l->name, norm), scales, p->cols, &index));
    for (size_t i = 0; i < p->n; i++) {
        plan->fold->columns[p->readers[i]] = index;
        TRY(say(plan, p->readers[i], plan->fold->scales[index].name));
    }
    return NIB_OK;
}

static nib_status fold_norms(const struct layer *l, size_t *readers, float *squares, float *scratch)
{
    const char *const *norms = l->family->norms;
    const bool one = !strcmp(norms[0], norms[1]);
    for (int which = 0; which < (one ? 1 : 2); which++) {
        struct pair p = { .layer = l, .readers = readers };
        size_t bytes;
        for (size_t i = l->begin; i < l->end; i++) {
            const enum nib_fold_input reads = nib_ck_fold_reads(l->plan->in, l->plan->in->weights[i].name, &bytes);
            if ((int)reads == which || (one && reads <= NIB_READS_FEED_FORWARD_NORM))
                readers[p.n++] = i;
        }
        if (!p.n)
            continue;
        p.cols = l->plan->in->weights[readers[0]].cols;
        p.norm = part_of(l, norms[which], "weight");
        p.bias = part_of(l, norms[which], "bias");
        TRY(fold_pair(&p, norms[which], squares, scratch));
    }
    return NIB_OK;
}

/* ---- Up and down ---- */

/* Biases of a stack, [E, N], stay as they are. */
static bool has_stack_bias(const nib_plan *plan, const struct nib_ck_weight *w)
{
    char name[1024];
    if (w->index < 0)
        return false;
    snprintf(name, sizeof name, "%s_bias", plan->in->tensors[w->tensor[NIB_ROLE_DATA]].name);
    return nib_ck_find_tensor(plan->in, name) != NIB_NONE;
}

static nib_status fold_down(const struct layer *l, size_t down, float *squares, float *scratch)
{
    nib_plan *plan = l->plan;
    const struct nib_ck_weight *w = &plan->in->weights[down], *up;
    const struct nib_plan_input *input = &plan->rows[down].input;
    size_t producer;
    bool half;
    double tokens;
    char name[1024];
    if (!nib_plan_is_scaled(plan, down) || input->entry == NIB_NONE || l->family->no_up ||
        json_is_number(json_object_get(plan->in->config, "swiglu_limit")) ||
        !nib_ck_fold_producer(plan->in, w->name, &producer, &half))
        return NIB_OK;
    up = &plan->in->weights[producer];
    if (!nib_plan_is_scaled(plan, producer) || up->rows != (half ? 2 : 1) * w->cols || has_stack_bias(plan, up) ||
        up->format == NIB_CHECKPOINT_FORMAT_MXFP4 || w->format == NIB_CHECKPOINT_FORMAT_MXFP4)
        return say(plan, down, "none: what makes its input stays as it is");
    snprintf(name, sizeof name, "%s.bias", up->name);
    const uint32_t bias = nib_ck_find_tensor(plan->in, name);
    if (bias != NIB_NONE && !is_vector(plan, bias, up->rows))
        return say(plan, down, "none: a bias that does not fit");
    const bool pow2 = bias != NIB_NONE && plan->in->tensors[bias].dtype != NIB_F32;
    float *rows = nib_plan_memory(plan, (size_t)up->rows * sizeof *rows), *columns = rows + (up->rows - w->cols);
    if (!rows)
        return no_memory();
    for (int64_t r = 0; r < up->rows; r++)
        rows[r] = 1; /* of a gate */
    TRY(nib_plan_mean_squares(plan, input, w->cols, squares, &tokens));
    TRY(choose_scales(plan, &down, 1, squares, w->cols, pow2, columns));
    if (bias != NIB_NONE)
        TRY(divide_bias(plan, bias, rows, scratch));
    TRY(add_scales(plan, w->name, columns, w->cols, &plan->fold->columns[down]));
    plan->fold->rows[producer] = plan->fold->columns[down];
    if (half)
        TRY(add_scales(plan, up->name, rows, up->rows, &plan->fold->rows[producer]));
    return say(plan, down, up->name);
}

/* ---- All of it ---- */

static nib_status fold_layer(struct layer *l, size_t *readers, float *squares, float *scratch)
{
    nib_plan *plan = l->plan;
    const nib_checkpoint *in = plan->in;
    size_t bytes;
    l->unknown = NULL;
    for (size_t i = l->begin; i < l->end && !l->unknown; i++)
        if (nib_ck_fold_reads(in, in->weights[i].name, &bytes) == NIB_READS_UNKNOWN)
            l->unknown = in->weights[i].name;
    for (size_t i = 0; i < plan->n_others && !l->unknown; i++) {
        const char *name = in->tensors[plan->others[i].tensor].name;
        char module[1024];
        if (strncmp(name, l->name, l->bytes + 1) != 0 || nib_ck_ends_with(name, "bias"))
            continue;
        snprintf(module, sizeof module, "%s", name);
        if (nib_ck_ends_with(module, ".weight"))
            module[strlen(module) - strlen(".weight")] = 0;
        if (nib_ck_fold_reads(in, module, &bytes) == NIB_READS_UNKNOWN)
            l->unknown = name;
    }
    TRY(fold_norms(l, readers, squares, scratch));
    for (size_t i = l->begin; i < l->end; i++)
        TRY(fold_down(l, i, squares, scratch));
    return NIB_OK;
}

static nib_status fold_layers(nib_plan *plan, const struct nib_fold_family *family)
{
    const nib_checkpoint *in = plan->in;
    int64_t widest = 1;
    for (size_t i = 0; i < in->n_weights; i++)
        widest = nib_max(widest, nib_max(in->weights[i].cols, in->weights[i].rows));
    size_t *readers = nib_alloc((in->n_weights + 1) * sizeof *readers);
    float *scratch = nib_alloc((size_t)widest * 2 * sizeof *scratch);
    nib_status status = readers && scratch ? NIB_OK : no_memory();
    for (size_t i = 0; i < in->n_weights && !status;) {
        struct layer l = { .plan = plan, .family = family, .begin = i, .end = i + 1, .name = in->weights[i].name };
        (void)nib_ck_fold_reads(in, l.name, &l.bytes);
        while (l.bytes && l.end < in->n_weights && !strncmp(in->weights[l.end].name, l.name, l.bytes + 1))
            l.end++;
        i = l.end;
        if (l.bytes)
            status = fold_layer(&l, readers, scratch, scratch + widest);
    }
    nib_free(readers);
    nib_free(scratch);
    return status;
}

static nib_status note_fold(nib_plan *plan)
{
    const struct nib_plan_fold *fold = plan->fold;
    char hash[24];
    XXH64_hash_t digest = 0;
    for (size_t i = 0; i < fold->n; i++)
        digest = XXH3_64bits_withSeed(fold->scales[i].values, (size_t)fold->scales[i].n * sizeof(float), digest);
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)digest);
    if (json_object_set_new(plan->options, "fold",
                            fold->search ? json_string("search") : json_real((double)fold->exponent)) ||
        json_object_set_new(plan->options, "fold_scales", json_integer((json_int_t)fold->n)) ||
        json_object_set_new(plan->options, "fold_xxh3", json_string(hash)))
        return no_memory();
    return NIB_OK;
}

nib_status nib_plan_fold(nib_plan *plan, const uint32_t *group)
{
    const nib_checkpoint *in = plan->in;
    struct nib_plan_fold *fold = plan->fold;
    if (!fold)
        return NIB_OK;
    const struct nib_fold_family *family = nib_ck_fold_family(in);
    if (!family)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "%s: nib does not know what reads the norms of a model of the type %s: leave --fold out",
                        in->path, nib_quote(in->model_type).text);
    if (in->folds)
        return nib_fail(NIB_ERR_MODE, "%s: it was folded already (%s)", in->path, NIB_FOLD_FILE);
    fold->columns = nib_plan_memory(plan, (in->n_weights + 1) * sizeof *fold->columns);
    fold->rows = nib_plan_memory(plan, (in->n_weights + 1) * sizeof *fold->rows);
    fold->tensors = nib_plan_memory(plan, (in->n_tensors + 1) * sizeof *fold->tensors);
    if (!fold->columns || !fold->rows || !fold->tensors)
        return no_memory();
    for (size_t i = 0; i < in->n_weights; i++)
        fold->columns[i] = fold->rows[i] = NIB_NONE;
    for (size_t i = 0; i < in->n_tensors; i++)
        fold->tensors[i] = NULL;
    TRY(fold_layers(plan, family));
    if (!fold->n)
        return nib_fail(NIB_ERR_MODE, "%s: there is nothing in it that could be folded: leave --fold out", in->path);
    for (size_t i = 0; i < in->n_weights; i++)
        if (group[i] != NIB_NONE && (fold->columns[i] != NIB_NONE || fold->rows[i] != NIB_NONE))
            plan->groups[group[i]].dtype = NIB_F32;
    return note_fold(plan);
}

const float *nib_plan_columns(const nib_plan *plan, uint32_t weight)
{
    return plan->fold && plan->fold->columns[weight] != NIB_NONE
               ? plan->fold->scales[plan->fold->columns[weight]].values
               : NULL;
}

const float *nib_plan_divisors(const nib_plan *plan, uint32_t weight)
{
    return plan->fold && plan->fold->rows[weight] != NIB_NONE ? plan->fold->scales[plan->fold->rows[weight]].values
                                                              : NULL;
}

/* ---- The file of scales ---- */

static char *map_of(const nib_plan *plan, const uint32_t *which)
{
    json_t *map = json_object();
    bool fits = map != NULL;
    for (size_t i = 0; i < plan->in->n_weights && fits; i++)
        if (which[i] != NIB_NONE)
            fits = !json_object_set_new(map, plan->in->weights[i].name, json_string(plan->fold->scales[which[i]].name));
    char *text = fits ? json_dumps(map, JSON_COMPACT) : NULL;
    json_decref(map);
    return text;
}

static nib_status write_scales(const nib_plan *plan, nib_writer *writer)
{
    char *columns = map_of(plan, plan->fold->columns), *rows = map_of(plan, plan->fold->rows);
    nib_status status = columns && rows ? nib_writer_metadata(writer, "format", "nib-fold-1") : no_memory();
    if (!status)
        status = nib_writer_metadata(writer, "columns", columns);
    if (!status)
        status = nib_writer_metadata(writer, "rows", rows);
    free(columns);
    free(rows);
    for (size_t i = 0; i < plan->fold->n && !status; i++)
        status = nib_writer_declare(writer, plan->fold->scales[i].name, NIB_F32, 1, &plan->fold->scales[i].n);
    for (size_t i = 0; i < plan->fold->n && !status; i++)
        status = nib_writer_write(writer, plan->fold->scales[i].name, 0, plan->fold->scales[i].values,
                                  (size_t)plan->fold->scales[i].n * sizeof(float));
    return status ? status : nib_writer_commit(writer);
}

nib_status nib_plan_write_fold(const nib_plan *plan, const char *path)
{
    nib_writer *writer;
    TRY(nib_writer_create(path, &writer));
    const nib_status status = write_scales(plan, writer);
    nib_writer_destroy(writer);
    return status;
}
