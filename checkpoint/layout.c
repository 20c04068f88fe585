/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.c - headers of output files. Provenance has the same length whatever the hashes are, so that every offset is
 * known before a byte of data is read.
 */
#include "plan.h"

#include <stdio.h>

static bool put_string(struct nib_text *text, const char *string) { return nib_text_put(text, string, strlen(string)); }

static bool put_number(struct nib_text *text, uint64_t number)
{
    char digits[24];
    return nib_text_put(text, digits, (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)number));
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

static bool put_safetensors(const nib_plan *plan, const struct nib_out_file *file, const char *provenance,
                            struct nib_text *text)
{
    bool fits = nib_text_put(text, &(uint64_t){ 0 }, NIB_SAFETENSORS_LENGTH_BYTES) &&
                put_string(text, "{\"__metadata__\":{\"format\":\"pt\",\"nib\":") &&
                nib_text_put_json(text, provenance) && nib_plan_put_metadata(plan, file, text) && put_string(text, "}");
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

nib_status nib_plan_header(const nib_plan *plan, const struct nib_out_file *file, const char *provenance,
                           struct nib_text *text)
{
    *text = (struct nib_text){ 0 };
    if (plan->packing == NIB_PACKING_GGUF)
        return nib_plan_gguf_header(plan, file, provenance, text);
    if (put_safetensors(plan, file, provenance, text))
        return NIB_OK;
    nib_free(text->bytes);
    *text = (struct nib_text){ 0 };
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its header", file->name);
}

nib_status nib_plan_lay_out(nib_plan *plan, struct nib_out_file *file)
{
    const uint64_t(*no_hashes)[2] = NULL;
    struct nib_text provenance, header;
    uint64_t end = 0;
    const uint64_t align = plan->packing == NIB_PACKING_GGUF ? NIB_GGUF_ALIGN : 1;
    for (uint32_t i = 0; i < file->tensors; i++) {
        struct nib_out_tensor *t = &plan->tensors[file->first + i];
        t->offset = end;
        if (t->bytes > (uint64_t)INT64_MAX / 2 - end)
            return nib_fail(NIB_ERR_SHAPE, "%s would be larger than any file can be", file->name);
        end += (t->bytes + align - 1) / align * align;
    }
    TRY(nib_plan_provenance(plan, no_hashes, &provenance));
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
