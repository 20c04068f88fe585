/* SPDX-License-Identifier: Apache-2.0 */
/*
 * folds.c - the table of what reads which norm, after the modelling code of each family, and files of scales.
 */
#include "model/folds.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/os.h"
#include "file/safetensors.h"
#include "io/names.h"
#include "model/roles.h"

/* ---- Families ---- */

#define LLAMA                                         \
    {                                                 \
        "input_layernorm", "post_attention_layernorm" \
    }
#define FOUR                                           \
    {                                                  \
        "input_layernorm", "pre_feedforward_layernorm" \
    } /* two more stand behind attention and the rest */
#define PARALLEL                             \
    {                                        \
        "input_layernorm", "input_layernorm" \
    }

/* tests/check_fold.py computes with a model of each. */
static const struct nib_fold_family families[] = {
    { "llama", LLAMA, false, false },       { "mistral", LLAMA, false, false },
    { "ministral3", LLAMA, false, false },  { "qwen2", LLAMA, false, false },
    { "qwen3", LLAMA, false, false },       { "phi3", LLAMA, false, false },
    { "smollm3", LLAMA, false, false },     { "granite", LLAMA, false, false },
    { "seed_oss", LLAMA, false, false },    { "helium", LLAMA, false, false },
    { "ernie4_5", LLAMA, false, false },    { "glm", LLAMA, false, false },
    { "glm4", LLAMA, false, false },        { "stablelm", LLAMA, false, false },
    { "starcoder2", LLAMA, false, false },  { "gpt_neox", LLAMA, false, false },
    { "nemotron", LLAMA, true, false },     { "gemma", LLAMA, true, false },
    { "gemma2", FOUR, true, false },        { "gemma3", FOUR, true, false },
    { "gemma3_text", FOUR, true, false },   { "cohere", PARALLEL, false, false },
    { "cohere2", PARALLEL, false, false },  { "phi", PARALLEL, false, false },
    { "mixtral", LLAMA, false, false },     { "phimoe", LLAMA, false, false },
    { "olmoe", LLAMA, false, false },       { "qwen2_moe", LLAMA, false, false },
    { "qwen3_moe", LLAMA, false, false },   { "qwen3_next", LLAMA, true, false },
    { "deepseek_v2", LLAMA, false, false }, { "deepseek_v3", LLAMA, false, false },
    { "glm4_moe", LLAMA, false, false },    { "dots1", LLAMA, false, false },
    { "gpt_oss", LLAMA, false, true },
};

const struct nib_fold_family *nib_ck_fold_family(const nib_checkpoint *c)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (!strcmp(c->model_type, families[i].model_type))
            return &families[i];
    return NULL;
}

/* ---- Modules ---- */

#define ATTENTION NIB_READS_ATTENTION_NORM
#define FEED_FORWARD NIB_READS_FEED_FORWARD_NORM
#define OTHER NIB_READS_OTHER

/* Behind "layers.N.", without experts' numbers. What is not here is unknown. */
static const struct reader {
    const char *module;
    enum nib_fold_input reads;
} readers[] = {
    { "self_attn.q_proj", ATTENTION },
    { "self_attn.k_proj", ATTENTION },
    { "self_attn.v_proj", ATTENTION },
    { "self_attn.qkv_proj", ATTENTION },
    { "self_attn.q_a_proj", ATTENTION },
    { "self_attn.kv_a_proj_with_mqa", ATTENTION },
    { "attention.query_key_value", ATTENTION },
    { "linear_attn.in_proj_qkvz", ATTENTION },
    { "linear_attn.in_proj_ba", ATTENTION },
    { "self_attn.o_proj", OTHER },
    { "self_attn.dense", OTHER },
    { "self_attn.q_b_proj", OTHER },
    { "self_attn.kv_b_proj", OTHER },
    { "attention.dense", OTHER },
    { "linear_attn.conv1d", OTHER },
    { "linear_attn.out_proj", OTHER },
    { "mlp.gate_proj", FEED_FORWARD },
    { "mlp.up_proj", FEED_FORWARD },
    { "mlp.gate_up_proj", FEED_FORWARD },
    { "mlp.c_fc", FEED_FORWARD },
    { "mlp.fc1", FEED_FORWARD },
    { "mlp.dense_h_to_4h", FEED_FORWARD },
    { "mlp.gate", FEED_FORWARD },
    { "mlp.router", FEED_FORWARD },
    { "mlp.shared_expert_gate", FEED_FORWARD },
    { "mlp.shared_expert.gate_proj", FEED_FORWARD },
    { "mlp.shared_expert.up_proj", FEED_FORWARD },
    { "mlp.shared_experts.gate_proj", FEED_FORWARD },
    { "mlp.shared_experts.up_proj", FEED_FORWARD },
    { "mlp.experts.gate_proj", FEED_FORWARD },
    { "mlp.experts.up_proj", FEED_FORWARD },
    { "block_sparse_moe.gate", FEED_FORWARD },
    { "block_sparse_moe.experts.w1", FEED_FORWARD },
    { "block_sparse_moe.experts.w3", FEED_FORWARD },
    { "mlp.down_proj", OTHER },
    { "mlp.c_proj", OTHER },
    { "mlp.fc2", OTHER },
    { "mlp.dense_4h_to_h", OTHER },
    { "mlp.shared_expert.down_proj", OTHER },
    { "mlp.shared_experts.down_proj", OTHER },
    { "mlp.experts.down_proj", OTHER },
    { "block_sparse_moe.experts.w2", OTHER },
};

/* Bytes of "model.layers.3" in "model.layers.3.mlp.up_proj". */
static size_t bytes_of_layer(const char *name)
{
    static const char word[] = "layers.";
    const char *at = strstr(name, word);
    while (at && at != name && at[-1] != '.')
        at = strstr(at + 1, word);
    const size_t digits = at ? strspn(at + strlen(word), "0123456789") : 0;
    return digits && at[strlen(word) + digits] == '.' ? (size_t)(at - name) + strlen(word) + digits : 0;
}

enum nib_fold_input nib_ck_fold_reads(const nib_checkpoint *c, const char *module, size_t *layer_bytes)
{
    char name[256];
    const char *rest = module + (*layer_bytes = bytes_of_layer(module));
    if (!*layer_bytes || strlen(++rest) >= sizeof name)
        return NIB_READS_UNKNOWN;
    snprintf(name, sizeof name, "%s", rest);
    char *expert = strstr(name, ".experts.");
    if (expert) {
        expert += strlen(".experts.");
        const size_t digits = strspn(expert, "0123456789");
        if (digits && expert[digits] == '.')
            memmove(expert, expert + digits + 1, strlen(expert + digits));
    }
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
        if (!strcmp(name, readers[i].module))
            return readers[i].reads;
    return nib_ck_module_role(c, module) == NIB_MODULE_NORM ? NIB_READS_OTHER : NIB_READS_UNKNOWN;
}

bool nib_ck_fold_producer(const nib_checkpoint *c, const char *down, size_t *weight, bool *half)
{
    static const struct {
        const char *down, *gate, *up;
    } parts[] = { { ".down_proj", ".gate_proj", ".up_proj" },
                  { ".down_proj", ".gate_up_proj", ".gate_up_proj" },
                  { ".w2", ".w1", ".w3" } };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[1024];
        size_t gate;
        const int bytes = (int)(strlen(down) - strlen(parts[i].down));
        if (!nib_ck_ends_with(down, parts[i].down))
            continue;
        snprintf(name, sizeof name, "%.*s%s", bytes, down, parts[i].gate);
        if (nib_checkpoint_find_weight(c, name, &gate))
            continue;
        snprintf(name, sizeof name, "%.*s%s", bytes, down, parts[i].up);
        *half = !strcmp(parts[i].gate, parts[i].up);
        if (!nib_checkpoint_find_weight(c, name, weight))
            return true;
    }
    return false;
}

/* ---- Files of scales ---- */

static nib_status bad_file(const char *path, const char *name, const char *fact)
{
    return nib_fail(NIB_ERR_DATA, "%s: %s: %s", path, nib_quote(name).text, fact);
}

struct opening {
    nib_checkpoint *c;
    const nib_file *file;
    const char *path;
    size_t *first; /* value of each entry */
    size_t n;      /* values of all */
};

static nib_status read_values(struct opening *o, size_t entries)
{
    size_t bytes = 0;
    for (size_t i = 0; i < entries; i++) {
        nib_entry e;
        TRY(nib_file_entry(o->file, i, &e));
        if (e.dtype != NIB_F32 || e.rank != 1)
            return bad_file(o->path, e.name, "scales are F32 of one dim");
        o->first[i] = bytes;
        bytes += (size_t)e.shape[0];
    }
    o->n = bytes;
    o->c->fold_scales = nib_alloc(2 * bytes * sizeof(float));
    if (!o->c->fold_scales)
        return nib_ck_no_memory(o->c);
    float *inverse = o->c->fold_scales + bytes;
    for (size_t i = 0; i < entries; i++) {
        nib_entry e;
        TRY(nib_file_entry(o->file, i, &e));
        float *values = o->c->fold_scales + o->first[i];
        TRY(nib_file_read(o->file, i, 0, values, (size_t)e.shape[0] * sizeof *values));
        for (int64_t k = 0; k < e.shape[0]; k++) {
            if (!(values[k] >= FLT_MIN && values[k] <= 1 / FLT_MIN))
                return bad_file(o->path, e.name, "a scale is not positive, or not finite");
            inverse[o->first[i] + (size_t)k] = 1 / values[k];
        }
    }
    return NIB_OK;
}

/* {"weight": "scales"}, of columns or of rows. Weights that are not there were perhaps left out since. */
static nib_status read_map(const struct opening *o, const char *key, bool rows)
{
    const char *text = nib_file_metadata(o->file, key), *name;
    json_t *map, *value;
    if (!text)
        return bad_file(o->path, key, "its metadata lack it");
    TRY(nib_ck_parse_json(o->path, text, strlen(text), &map));
    nib_status status = json_is_object(map) ? NIB_OK : bad_file(o->path, key, "it is no JSON object");
    json_object_foreach(map, name, value)
    {
        size_t index, weight;
        nib_entry e;
        if (status || nib_checkpoint_find_weight(o->c, name, &weight))
            continue;
        const struct nib_ck_weight *w = &o->c->weights[weight];
        if (!json_is_string(value) || nib_file_find(o->file, json_string_value(value), &index) ||
            nib_file_entry(o->file, index, &e) || e.shape[0] != (rows ? w->rows : w->cols)) {
            status = bad_file(o->path, name, "its scales are missing, or are as many as other weights have");
            continue;
        }
        const float *scales = o->c->fold_scales + o->first[index], *inverse = scales + o->n;
        struct nib_ck_fold *fold = &o->c->folds[weight];
        *(rows ? &fold->rows : &fold->columns) = scales;
        *(rows ? &fold->inverse_rows : &fold->inverse_columns) = inverse;
    }
    json_decref(map);
    return status;
}

static nib_status read_folds(struct opening *o)
{
    nib_file *file;
    TRY(nib_file_open(o->path, &file));
    const char *format = nib_file_metadata(file, "format");
    const size_t entries = nib_file_count(file);
    o->file = file;
    o->first = nib_alloc(entries * sizeof *o->first);
    o->c->folds = nib_alloc_zeroed(o->c->n_weights * sizeof *o->c->folds);
    nib_status status = o->first && o->c->folds ? NIB_OK : nib_ck_no_memory(o->c);
    if (!status && (!format || strcmp(format, "nib-fold-1") != 0))
        status = bad_file(o->path, "format", "it is not \"nib-fold-1\"");
    if (!status)
        status = read_values(o, entries);
    if (!status)
        status = read_map(o, "columns", false);
    if (!status)
        status = read_map(o, "rows", true);
    nib_free(o->first);
    nib_file_close(file);
    return status;
}

nib_status nib_ck_read_folds(nib_checkpoint *c)
{
    struct opening o = { .c = c };
    if (!c->is_directory)
        return NIB_OK;
    o.path = nib_ck_string(c, "%s/%s", c->directory, NIB_FOLD_FILE);
    if (!o.path)
        return nib_ck_no_memory(c);
    return nib_os_is_absent(o.path) ? NIB_OK : read_folds(&o);
}

static const struct nib_ck_fold *fold_of(const nib_checkpoint *c, const struct nib_ck_weight *w)
{
    size_t index;
    return c->folds && !nib_checkpoint_find_weight(c, w->name, &index) ? &c->folds[index] : NULL;
}

void nib_ck_fold_alike(const nib_checkpoint *a, struct nib_ck_weight *wa, const nib_checkpoint *b,
                       const struct nib_ck_weight *wb)
{
    const struct nib_ck_fold *own = fold_of(a, wa), *other = fold_of(b, wb);
    if (own && other)
        return; /* by the same scales, or there is no telling */
    if (other) {
        wa->columns = other->columns;
        wa->divisors = other->rows;
    } else if (own) {
        wa->columns = own->inverse_columns;
        wa->divisors = own->inverse_rows;
    }
}
