/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_gguf.c - a GGUF file from safetensors: where tensors go, and in which form, as llama.cpp's converter has them.
 */
#include "plan/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/gguf.h"
#include "model/read.h"
#include "plan/gguf_keys.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

#define REMEDY "make a BF16 or F16 GGUF of it with llama.cpp's convert_hf_to_gguf.py, and quantize that"

/* Matrices that stay have the dtype of the first one that is 16 bits wide. */
static nib_dtype plain_dtype(const nib_plan *plan)
{
    const nib_checkpoint *in = plan->in;
    if (plan->dequantized_dtype != NIB_DTYPE_COUNT)
        return plan->dequantized_dtype;
    for (size_t i = 0; i < in->n_tensors; i++)
        if (in->tensors[i].rank >= 2 && (in->tensors[i].dtype == NIB_BF16 || in->tensors[i].dtype == NIB_F16))
            return in->tensors[i].dtype;
    return NIB_F16;
}

static nib_status reject_family(const nib_checkpoint *in)
{
    char names[128];
    if (!*in->model_type)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "%s: it has no config.json that names its model_type, without which there is no GGUF of it: %s",
                        in->path, REMEDY);
    return nib_fail(NIB_ERR_UNSUPPORTED, "%s: nib writes GGUF files of %s, and this is %s: %s", in->path,
                    nib_ck_architecture_names(names, sizeof names), nib_quote(in->model_type).text, REMEDY);
}

nib_status nib_plan_place(nib_plan *plan)
{
    const nib_checkpoint *in = plan->in;
    if (!plan->gguf || (in->n_files && in->files[0].gguf))
        return NIB_OK;
    plan->architecture = nib_ck_architecture(in);
    if (!plan->architecture)
        return reject_family(in);
    plan->plain_dtype = plain_dtype(plan);
    plan->places = nib_alloc_zeroed((in->n_weights + 1) * sizeof *plan->places);
    if (!plan->places)
        return no_memory();
    for (size_t i = 0; i < in->n_weights; i++) {
        const struct nib_ck_weight *w = &in->weights[i];
        if (!nib_ck_place_weight(in, plan->architecture, w->name, w->rows, &plan->places[i]))
            return nib_fail(NIB_ERR_UNSUPPORTED,
                            "%s: weight %s, with its %lld rows, has no place in a GGUF of %s as its config.json "
                            "describes it: %s",
                            in->path, nib_quote(w->name).text, (long long)w->rows, plan->architecture->gguf, REMEDY);
        if (!*plan->places[i].name)
            plan->rows[i].bytes_out = 0;
    }
    return NIB_OK;
}

const char *nib_plan_gguf_keep(const nib_plan *plan, const struct nib_ck_weight *w)
{
    const nib_checkpoint *in = plan->in;
    const char *architecture = plan->architecture ? plan->architecture->gguf : in->architecture;
    if (!plan->gguf || !architecture)
        return NULL;
    const char *name = plan->places ? plan->places[w - in->weights].name : w->name;
    if (!*name)
        return "llama.cpp has it in a file of its own";
    if (!nib_ck_ignores_scale(architecture, name))
        return NULL;
    return strcmp(architecture, nib_architectures[NIB_FAMILY_GPT_OSS].gguf)
               ? "llama.cpp does not multiply with the tensor scale of such a weight in this architecture"
               : "llama.cpp adds biases to it, which it does not do behind NVFP4";
}

/* Where scales are E4M3 of an amax / 6 alone, those of values of 0.02 are subnormal, and the sweep loses 0.8 dB; of 0.01 it
 * loses 1.8, which is what it gains over rtn, and below that more. Rows from all over the weight tell. */
nib_status nib_plan_gguf_unit(const nib_plan *plan, const struct nib_ck_weight *w, bool *unit)
{
    enum { ROWS = 16 };
    const double least = 0.01;
    const char *architecture = plan->architecture ? plan->architecture->gguf : plan->in->architecture;
    const char *name = plan->places ? plan->places[w - plan->in->weights].name : w->name;
    *unit = false;
    if (!architecture || !*name || !strcmp(architecture, nib_architectures[NIB_FAMILY_GPT_OSS].gguf) ||
        w->format == NIB_CHECKPOINT_FORMAT_MXFP4 || w->rows < 1 || w->cols < 1)
        return NIB_OK;
    float *values = nib_alloc((size_t)w->cols * sizeof *values);
    nib_status status = values ? NIB_OK : no_memory();
    double sum = 0, largest = 0;
    const int64_t n = nib_min(ROWS, w->rows);
    for (int64_t i = 0; i < n && !status; i++) {
        status = nib_ck_read_rows(plan->in, w, i * w->rows / n, 1, NIB_F32, values);
        for (int64_t k = 0; k < w->cols && !status; k++) {
            sum += (double)values[k] * (double)values[k];
            largest = fmax(largest, fabs((double)values[k]));
        }
    }
    nib_free(values);
    *unit = !status && sum >= least * least * (double)(n * w->cols) && largest < 1000;
    return status;
}

nib_status nib_plan_add_placed(nib_plan *plan, uint32_t tensor)
{
    const nib_checkpoint *in = plan->in;
    const struct nib_ck_tensor *t = &in->tensors[tensor];
    struct nib_gguf_place places[2];
    char buffer[512];
    const int64_t rows = t->rank ? t->shape[0] : 1, last = t->rank ? t->shape[t->rank - 1] : 1;
    const int n = nib_ck_place_tensor(in, plan->architecture, t->name, rows, places);
    const bool stack = n > 0 && strstr(places[0].name, "_exps") != NULL;
    if (n < 0 || (n > 0 && (t->rank != 1 + stack || last % n || !(NIB_FLOAT_BITS & NIB_DTYPE_BIT(t->dtype)))))
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s has no place in a GGUF of %s: %s",
                        nib_ck_place(in, tensor, buffer, sizeof buffer), plan->architecture->gguf, REMEDY);
    for (int i = 0; i < n; i++) {
        const struct nib_gguf_place *place = &places[i];
        const char *name = nib_plan_string(plan, "%s%s", place->name, place->part);
        const int64_t shape[2] = { rows, last / n };
        uint32_t index;
        if (!name)
            return no_memory();
        TRY(nib_plan_next(plan, t->file, t->bytes));
        TRY(nib_plan_add_tensor(plan, name, NIB_F32, 1 + stack, shape + !stack, NIB_PRODUCE_CAST, tensor, &index));
        struct nib_out_tensor *out = &plan->tensors[index];
        out->first = place->first;
        out->step = place->step;
        out->count = (int64_t)(out->bytes / sizeof(float));
        out->value = place->shift;
        out->head_rows = place->head_rows;
    }
    return NIB_OK;
}

/* ---- Factors of rotary frequencies ---- */

/* Llama 3's: low frequencies are stretched by a factor, high ones are not, and those between gradually. Computed as the
 * converter does, in FP32 but for the power, which is rounded once. */
static float stretch_of(const json_t *rope, int64_t i, int64_t dim)
{
    const double base = nib_json_number(rope, "rope_theta", 10000.0);
    const float factor = (float)nib_json_number(rope, "factor", 8.0);
    const float low = (float)nib_json_number(rope, "low_freq_factor", 1.0);
    const float high = (float)nib_json_number(rope, "high_freq_factor", 4.0);
    const double context = nib_json_number(rope, "original_max_position_embeddings", 8192);
    const float frequency = 1.0f / (float)pow(base, (double)((float)(2 * i) / (float)dim));
    const float length = (float)(2 * 3.14159265358979323846) / frequency;
    if ((double)length < context / (double)high)
        return 1;
    if ((double)length > context / (double)low)
        return factor;
    const float smooth = ((float)context / length - low) / (high - low);
    return 1.0f / ((1.0f - smooth) / factor + smooth);
}

nib_status nib_plan_add_extra(nib_plan *plan)
{
    enum { MOST = 1 << 16 };
    const json_t *rope = nib_plan_rope(plan, "full_attention");
    const char *type = json_string_value(json_object_get(rope, "rope_type"));
    if (strcmp(plan->architecture->gguf, "llama") != 0 || !type || strcmp(type, "llama3") != 0)
        return NIB_OK;
    const int64_t dim = nib_plan_head_dim(plan);
    if (dim < 2 || dim > MOST)
        return nib_fail(NIB_ERR_DATA, "%s: config.json: a head of %lld is none", plan->in->path, (long long)dim);
    const int64_t count = dim / 2;
    float *values = nib_plan_memory(plan, (size_t)count * sizeof *values);
    uint32_t index;
    if (!values)
        return no_memory();
    for (int64_t i = 0; i < count; i++)
        values[i] = stretch_of(rope, i, dim);
    TRY(nib_plan_add_tensor(plan, "rope_freqs.weight", NIB_F32, 1, &count, NIB_PRODUCE_BYTES, NIB_NONE, &index));
    plan->tensors[index].data = values;
    return NIB_OK;
}
