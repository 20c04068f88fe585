/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_layout.c - headers of output files. Provenance has the same length whatever the hashes are, so that every offset is
 * known before a byte of data is read.
 */
#include "plan/plan.h"

#include <stdio.h>

#include "io/gguf.h"

/* ---- safetensors ---- */

/* A header as it is written, one item after the other. */
struct header {
    const nib_plan *plan;
    const struct nib_out_file *file;
    const char *provenance;
    size_t pair, weight;
    uint32_t other, tensor;
    char facts[512];
    struct nib_text key, names; /* what the pair before held, and torchao's list of all tensors so far */
};

static bool put_string(struct nib_text *text, const char *string) { return nib_text_put(text, string, strlen(string)); }

/* The name of a tensor as torchao's loader sees it, as a key and in the list. */
static bool put_name(struct header *h, const char *name, const char *suffix)
{
    h->key.used = 0;
    return put_string(&h->key, name) && nib_text_put(&h->key, suffix, strlen(suffix) + 1) &&
           put_string(&h->names, h->names.used ? ", " : "[") && nib_text_put_json(&h->names, h->key.bytes);
}

/* What torchao's loader wants to know: how a tensor that is spread over several is put together. */
static void describe_weight(struct header *h, const struct nib_out_weight *w)
{
    static const char *const dtypes[NIB_DTYPE_COUNT] = {
        [NIB_F32] = "float32", [NIB_F16] = "float16", [NIB_BF16] = "bfloat16"
    };
    snprintf(h->facts, sizeof h->facts,
             "{\"_type\": \"NVFP4Tensor\", \"_data\": {\"is_swizzled_scales\": false, \"use_triton_kernel\": false, "
             "\"act_quant_kwargs\": null, \"block_size\": 16, \"orig_dtype\": {\"_type\": \"torch.dtype\", "
             "\"_data\": \"%s\"}}, \"_tensor_data_names\": [\"per_tensor_scale\", %s\"qdata\", \"scale\"]}",
             dtypes[w->source.dtype], w->out[NIB_ROLE_INPUT] == NIB_NONE ? "" : "\"act_per_tensor_scale\", ");
}

/* Weights, then the tensors that are none, then the names of all. */
static int next_of_torchao(struct header *h, const char **key, const char **value)
{
    const nib_plan *plan = h->plan;
    const uint32_t first = h->file->first, end = first + h->file->tensors;
    while (h->weight < plan->n_weights) {
        const struct nib_out_weight *w = &plan->weights[h->weight++];
        if (w->action != NIB_ACTION_CONVERT || w->out[NIB_ROLE_DATA] < first || w->out[NIB_ROLE_DATA] >= end)
            continue;
        describe_weight(h, w);
        *value = h->facts;
        const bool fits = put_name(h, w->source.name, ".weight");
        *key = h->key.bytes;
        return fits ? 1 : -1;
    }
    while (h->other < h->file->tensors) {
        const struct nib_out_tensor *t = &plan->tensors[first + h->other++];
        if (t->producer == NIB_PRODUCE_WEIGHT)
            continue;
        *value = "{\"_type\": \"Tensor\"}";
        const bool fits = put_name(h, t->name, "");
        *key = h->key.bytes;
        return fits ? 1 : -1;
    }
    if (h->pair++ > 2)
        return 0;
    const bool fits = put_string(&h->names, h->names.used ? "]" : "[]") && nib_text_put(&h->names, "", 1);
    *key = "tensor_names";
    *value = h->names.bytes;
    return fits ? 1 : -1;
}

static int next_metadata(void *context, const char **key, const char **value)
{
    struct header *h = context;
    if (h->pair < 2) {
        *key = h->pair == 0 ? "format" : "nib";
        *value = h->pair == 0 ? "pt" : h->provenance;
        h->pair++;
        return 1;
    }
    return h->plan->format == NIB_CHECKPOINT_FORMAT_TORCHAO ? next_of_torchao(h, key, value) : 0;
}

static bool next_tensor(void *context, struct nib_safetensors_entry *out)
{
    struct header *h = context;
    if (h->tensor == h->file->tensors)
        return false;
    const struct nib_out_tensor *t = &h->plan->tensors[h->file->first + h->tensor++];
    *out = (struct nib_safetensors_entry){ t->name, t->dtype, t->rank, t->shape, t->offset, t->bytes };
    return true;
}

static bool put_safetensors(const nib_plan *plan, const struct nib_out_file *file, const char *provenance,
                            struct nib_text *text)
{
    struct header h = { .plan = plan, .file = file, .provenance = provenance };
    const struct nib_safetensors_source source = { next_metadata, next_tensor, &h };
    const bool fits = nib_safetensors_put_header(&source, text);
    nib_free(h.key.bytes);
    nib_free(h.names.bytes);
    return fits;
}

/* ---- GGUF ---- */

/* general.file_type: what most of the weights are, by llama.cpp's list. */
static int64_t file_type(const nib_plan *plan)
{
    enum { ALL_F32 = 0, MOSTLY_F16 = 1, MOSTLY_BF16 = 32, MOSTLY_NVFP4 = 39 };
    if (nib_ck_is_nvfp4(plan->format))
        return MOSTLY_NVFP4;
    const nib_dtype dtype = plan->dequantized_dtype != NIB_DTYPE_COUNT ? plan->dequantized_dtype : plan->plain_dtype;
    return dtype == NIB_F32 ? ALL_F32 : dtype == NIB_F16 ? MOSTLY_F16 : MOSTLY_BF16;
}

/* Keys that the output has anew, or no longer. */
static bool is_ours(const char *key)
{
    static const char *const ours[] = { "general.architecture",         "general.name",      "general.file_type",
                                        "general.quantization_version", "general.alignment", "nib.provenance" };
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (!strcmp(key, ours[i]))
            return true;
    return !strncmp(key, "split.", 6);
}

/* What the input says, but for what is no longer so; or what was made of the configuration and the tokenizer. */
static nib_status put_keys(const nib_plan *plan, const char *provenance, nib_gguf_plan *out)
{
    static const char *const names[] = { "general.architecture", "general.name" };
    enum { QUANTIZATION_VERSION = 2 };
    const nib_checkpoint *in = plan->in;
    const nib_gguf *source = in->n_files ? in->files[0].gguf : NULL;
    size_t index;
    if (plan->keys)
        TRY(nib_gguf_put_keys(out, plan->keys));
    for (int i = 0; i < 2 && !plan->keys; i++) {
        if (source && nib_gguf_find_key(source, names[i], &index))
            TRY(nib_gguf_put_copy(out, source, index));
        else
            TRY(nib_gguf_put_string(out, names[i], *in->model_type ? in->model_type : "unknown"));
    }
    TRY(nib_gguf_put_integer(out, "general.file_type", NIB_GGUF_KIND_U32, file_type(plan)));
    TRY(nib_gguf_put_integer(out, "general.quantization_version", NIB_GGUF_KIND_U32, QUANTIZATION_VERSION));
    for (size_t i = 0; source && i < nib_gguf_key_count(source); i++) {
        struct nib_gguf_value value;
        TRY(nib_gguf_value(source, i, &value));
        if (!is_ours(value.key))
            TRY(nib_gguf_put_copy(out, source, i));
    }
    return nib_gguf_put_string(out, "nib.provenance", provenance);
}

static nib_status declare(const nib_plan *plan, const struct nib_out_tensor *t, nib_gguf_plan *out)
{
    uint32_t type = (uint32_t)t->ggml_type;
    char buffer[512];
    if (t->ggml_type < 0 && !nib_gguf_type_of_dtype(t->dtype, &type))
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s is %s, which GGUF cannot hold",
                        t->producer == NIB_PRODUCE_COPY ? nib_ck_place(plan->in, t->source, buffer, sizeof buffer)
                                                        : t->name,
                        nib_dtypes[t->dtype].name);
    if (t->rank > NIB_GGUF_MAX_RANK)
        return nib_fail(NIB_ERR_UNSUPPORTED, "tensor %s has %lld dims, and GGUF allows %d", nib_quote(t->name).text,
                        (long long)t->rank, NIB_GGUF_MAX_RANK);
    return nib_gguf_declare(out, t->name, type, (int)t->rank, t->shape);
}

static nib_status put_gguf(const nib_plan *plan, const struct nib_out_file *file, const char *provenance,
                           struct nib_text *text)
{
    nib_gguf_plan *out;
    void *header = NULL;
    size_t bytes = 0;
    TRY(nib_gguf_plan_create(file->name, &out));
    nib_status status = put_keys(plan, provenance, out);
    for (uint32_t i = 0; i < file->tensors && !status; i++)
        status = declare(plan, &plan->tensors[file->first + i], out);
    if (!status)
        status = nib_gguf_plan_header(out, &header, &bytes);
    if (!status && !nib_text_put(text, header, bytes))
        status = nib_fail(NIB_ERR_MEMORY, "%s: no memory for its header", file->name);
    nib_free(header);
    nib_gguf_plan_destroy(out);
    return status;
}

nib_status nib_plan_header(const nib_plan *plan, const struct nib_out_file *file, const char *provenance,
                           struct nib_text *text)
{
    *text = (struct nib_text){ 0 };
    if (plan->gguf)
        return put_gguf(plan, file, provenance, text);
    if (put_safetensors(plan, file, provenance, text))
        return NIB_OK;
    nib_free(text->bytes);
    *text = (struct nib_text){ 0 };
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its header", file->name);
}

nib_status nib_plan_lay_out(nib_plan *plan, struct nib_out_file *file)
{
    struct nib_text provenance, header;
    uint64_t end = 0;
    const uint64_t align = plan->gguf ? NIB_GGUF_DEFAULT_ALIGNMENT : 1;
    for (uint32_t i = 0; i < file->tensors; i++) {
        struct nib_out_tensor *t = &plan->tensors[file->first + i];
        t->offset = end;
        if (t->bytes > (uint64_t)INT64_MAX / 2 - end)
            return nib_fail(NIB_ERR_SHAPE, "%s would be larger than any file can be", file->name);
        end += (t->bytes + align - 1) / align * align;
    }
    TRY(nib_plan_provenance(plan, NULL, &provenance));
    const nib_status status = nib_plan_header(plan, file, provenance.bytes, &header);
    nib_free(provenance.bytes);
    TRY(status);
    file->data = header.used;
    file->bytes = header.used + end;
    nib_free(header.bytes);
    if (file->data > NIB_SAFETENSORS_MAX_HEADER)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "%s: its header would be longer than the %d bytes that the format allows: write smaller files",
                        file->name, NIB_SAFETENSORS_MAX_HEADER);
    return NIB_OK;
}
