/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_layout.c - headers of output files. Provenance has the same length whatever the hashes are, so that every offset is
 * known before a byte of data is read.
 */
#include "plan/plan.h"

#include <stdio.h>

#include "io/gguf.h"

static bool put_string(struct nib_text *text, const char *string) { return nib_text_put(text, string, strlen(string)); }

/* Hundreds of thousands of them make up a header: without the locale's detours. */
static bool put_number(struct nib_text *text, uint64_t number)
{
    char digits[20];
    size_t at = sizeof digits;
    do
        digits[--at] = (char)('0' + number % 10);
    while (number /= 10);
    return nib_text_put(text, digits + at, sizeof digits - at);
}

static bool put_tensor(struct nib_text *text, const struct nib_out_tensor *t)
{
    bool fits = nib_text_put_json(text, t->name) && put_string(text, ":{\"dtype\":\"") &&
                put_string(text, nib_dtypes[t->dtype].name) && put_string(text, "\",\"shape\":[");
    for (int64_t i = 0; i < t->rank && fits; i++)
        fits = (i == 0 || put_string(text, ",")) && put_number(text, (uint64_t)t->shape[i]);
    return fits && put_string(text, "],\"data_offsets\":[") && put_number(text, t->offset) && put_string(text, ",") &&
           put_number(text, t->offset + t->bytes) && put_string(text, "]}");
}

/* What torchao's loader wants to know: how a tensor that is spread over several is put together, and the names of all. */
static bool put_torchao_weight(const struct nib_out_weight *w, struct nib_text *text)
{
    static const char *const dtypes[NIB_DTYPE_COUNT] = {
        [NIB_F32] = "float32", [NIB_F16] = "float16", [NIB_BF16] = "bfloat16"
    };
    char facts[512];
    struct nib_text name = { 0 };
    snprintf(facts, sizeof facts,
             "{\"_type\": \"NVFP4Tensor\", \"_data\": {\"is_swizzled_scales\": false, \"use_triton_kernel\": false, "
             "\"act_quant_kwargs\": null, \"block_size\": 16, \"orig_dtype\": {\"_type\": \"torch.dtype\", "
             "\"_data\": \"%s\"}}, \"_tensor_data_names\": [\"per_tensor_scale\", %s\"qdata\", \"scale\"]}",
             dtypes[w->source.dtype], w->out[NIB_ROLE_INPUT] == NIB_NONE ? "" : "\"act_per_tensor_scale\", ");
    const bool fits = put_string(&name, w->source.name) && nib_text_put(&name, ".weight", sizeof ".weight") &&
                      put_string(text, ",") && nib_text_put_json(text, name.bytes) && put_string(text, ":") &&
                      nib_text_put_json(text, facts);
    nib_free(name.bytes);
    return fits;
}

static bool put_name(struct nib_text *names, const char *name, const char *end)
{
    struct nib_text whole = { 0 };
    const bool fits = put_string(&whole, name) && nib_text_put(&whole, end, strlen(end) + 1) &&
                      put_string(names, names->used ? ", " : "[") && nib_text_put_json(names, whole.bytes);
    nib_free(whole.bytes);
    return fits;
}

static bool put_torchao(const nib_plan *plan, const struct nib_out_file *file, struct nib_text *text)
{
    struct nib_text names = { 0 };
    bool fits = true;
    if (plan->format != NIB_CHECKPOINT_FORMAT_TORCHAO)
        return true;
    for (size_t i = 0; i < plan->n_weights && fits; i++) {
        const struct nib_out_weight *w = &plan->weights[i];
        if (w->action == NIB_ACTION_CONVERT && w->out[NIB_ROLE_DATA] >= file->first &&
            w->out[NIB_ROLE_DATA] < file->first + file->tensors)
            fits = put_torchao_weight(w, text) && put_name(&names, w->source.name, ".weight");
    }
    for (uint32_t i = 0; i < file->tensors && fits; i++) {
        const struct nib_out_tensor *t = &plan->tensors[file->first + i];
        if (t->producer != NIB_PRODUCE_WEIGHT)
            fits = put_string(text, ",") && nib_text_put_json(text, t->name) && put_string(text, ":") &&
                   nib_text_put_json(text, "{\"_type\": \"Tensor\"}") && put_name(&names, t->name, "");
    }
    fits = fits && put_string(&names, names.used ? "]" : "[]") && nib_text_put(&names, "", 1) &&
           put_string(text, ",\"tensor_names\":") && nib_text_put_json(text, names.bytes);
    nib_free(names.bytes);
    return fits;
}

static bool put_safetensors(const nib_plan *plan, const struct nib_out_file *file, const char *provenance,
                            struct nib_text *text)
{
    bool fits = nib_text_put(text, &(uint64_t){ 0 }, NIB_SAFETENSORS_LENGTH_BYTES) &&
                put_string(text, "{\"__metadata__\":{\"format\":\"pt\",\"nib\":") &&
                nib_text_put_json(text, provenance) && put_torchao(plan, file, text) && put_string(text, "}");
    for (uint32_t i = 0; i < file->tensors && fits; i++)
        fits = put_string(text, ",") && put_tensor(text, &plan->tensors[file->first + i]);
    fits = fits && put_string(text, "}");
    while (fits && text->used % 8)
        fits = put_string(text, " ");
    const uint64_t bytes = text->used - NIB_SAFETENSORS_LENGTH_BYTES;
    if (fits)
        memcpy(text->bytes, &bytes, sizeof bytes);
    return fits;
}

/* ---- GGUF ---- */

/* What the input says, but for what is no longer so; or, of safetensors, the little that makes a container. */
static nib_status put_keys(const nib_plan *plan, const char *provenance, nib_gguf_plan *out)
{
    static const char *const ours[] = { "general.architecture",         "general.name",      "general.file_type",
                                        "general.quantization_version", "general.alignment", "nib.provenance" };
    enum { MOSTLY_NVFP4 = 39, QUANTIZATION_VERSION = 2, OURS = sizeof ours / sizeof *ours };
    const nib_checkpoint *in = plan->in;
    const nib_gguf *source = in->n_files == 1 ? in->files[0].gguf : NULL;
    size_t index;
    for (int i = 0; i < 2; i++) {
        if (source && nib_gguf_find_key(source, ours[i], &index))
            TRY(nib_gguf_put_copy(out, source, index));
        else
            TRY(nib_gguf_put_string(out, ours[i], *in->model_type ? in->model_type : "unknown"));
    }
    TRY(nib_gguf_put_integer(out, ours[2], NIB_GGUF_KIND_U32, MOSTLY_NVFP4));
    TRY(nib_gguf_put_integer(out, ours[3], NIB_GGUF_KIND_U32, QUANTIZATION_VERSION));
    for (size_t i = 0; source && i < nib_gguf_key_count(source); i++) {
        struct nib_gguf_value value;
        TRY(nib_gguf_value(source, i, &value));
        bool known = false;
        for (int j = 0; j < OURS; j++)
            known |= !strcmp(value.key, ours[j]);
        if (!known)
            TRY(nib_gguf_put_copy(out, source, i));
    }
    return nib_gguf_put_string(out, ours[5], provenance);
}

static nib_status declare(const nib_plan *plan, const struct nib_out_tensor *t, nib_gguf_plan *out)
{
    uint32_t type = (uint32_t)t->ggml_type;
    char room[512];
    if (t->ggml_type < 0 && !nib_gguf_type_of_dtype(t->dtype, &type))
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s is %s, which GGUF cannot hold",
                        t->producer == NIB_PRODUCE_COPY ? nib_ck_place(plan->in, t->source, room, sizeof room)
                                                        : t->name,
                        nib_dtypes[t->dtype].name);
    if (t->rank > NIB_GGUF_MAX_RANK)
        return nib_fail(NIB_ERR_UNSUPPORTED, "tensor %s has %lld dims, and GGUF takes %d", nib_quote(t->name).text,
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
    if (plan->format == NIB_CHECKPOINT_FORMAT_GGUF)
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
    const uint64_t align = plan->format == NIB_CHECKPOINT_FORMAT_GGUF ? NIB_GGUF_DEFAULT_ALIGNMENT : 1;
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
