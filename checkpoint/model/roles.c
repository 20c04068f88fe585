/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roles.c - what a module is to its model, by its name: the table of roles, and by family where names collide. And what
 * readers call modules, and which they cannot take. Names are convention; each row was met in some family
 * (docs/families.md).
 */
#include "model/roles.h"

#include <stdio.h>
#include <string.h>

#include "io/names.h"

/* ---- Names in parts ---- */

enum { PARTS = 32 }; /* nobody's name has more */

struct parts {
    const char *name;
    const char *part[PARTS];
    size_t length[PARTS], n;
};

static void cut(const char *name, struct parts *out)
{
    *out = (struct parts){ .name = name };
    for (const char *part = name; part && out->n < PARTS; part = strchr(part, '.'), out->n++) {
        out->part[out->n] = part += *part == '.';
        out->length[out->n] = strcspn(part, ".");
    }
}

/* Where in a name a word must stand. */
enum place {
    ANY,      /* it is one of the parts between the dots */
    LAST,     /* it is the last part: the module's own name */
    HAS,      /* it is within a part */
    LAST_HAS, /* it is within the last part */
    BEGINS,   /* a part begins with it */
    FIRST,    /* it is the first part */
    WHOLE,    /* it is the whole name */
    TOP,      /* it is the last of two parts at most */
    END       /* the name ends with it, and a part begins there */
};

static bool is_within(const char *part, size_t length, const char *word)
{
    const size_t n = strlen(word);
    for (size_t i = 0; i + n <= length; i++)
        if (memcmp(part + i, word, n) == 0)
            return true;
    return false;
}

static bool is_part(const struct parts *p, size_t i, const char *word)
{
    return p->length[i] == strlen(word) && memcmp(p->part[i], word, p->length[i]) == 0;
}

/* The part that satisfies it, or p->n. */
static size_t stands(const struct parts *p, enum place place, const char *word)
{
    const size_t n = p->n, last = n - 1, bytes = strlen(word), length = strlen(p->name);
    switch (place) {
    case LAST:
        return is_part(p, last, word) ? last : n;
    case LAST_HAS:
        return is_within(p->part[last], p->length[last], word) ? last : n;
    case FIRST:
        return is_part(p, 0, word) ? 0 : n;
    case WHOLE:
        return strcmp(p->name, word) == 0 ? last : n;
    case TOP:
        return n <= 2 && is_part(p, last, word) ? last : n;
    case END:
        return nib_ck_ends_with(p->name, word) && (length == bytes || p->name[length - bytes - 1] == '.') ? last : n;
    default:
        break;
    }
    for (size_t i = 0; i < n; i++)
        if (place == ANY   ? is_part(p, i, word)
            : place == HAS ? is_within(p->part[i], p->length[i], word)
                           : p->length[i] >= bytes && memcmp(p->part[i], word, bytes) == 0)
            return i;
    return n;
}

/* A family is named by its model_type or, with a star behind it, by how that begins. */
static bool is_family(const nib_checkpoint *c, const char *family)
{
    const size_t n = strlen(family);
    if (n && family[n - 1] == '*')
        return strncmp(c->model_type, family, n - 1) == 0;
    return strcmp(c->model_type, family) == 0;
}

/* ---- Roles ---- */

static const struct role_facts {
    const char *reason; /* to keep it */
    bool linear;        /* loaders build a layer of it that could be packed */
    bool tower;         /* it belongs to a part of the model that stays as a whole */
} role_facts[NIB_MODULE_COUNT] = {
    [NIB_MODULE_ORDINARY] = { NULL, true, false },
    [NIB_MODULE_HEAD] = { "the output head", true, false },
    [NIB_MODULE_CLASSIFIER] = { "a classification head", true, false },
    [NIB_MODULE_EMBEDDING] = { "an embedding", false, false },
    [NIB_MODULE_ROUTER] = { "a router", true, false },
    [NIB_MODULE_NORM] = { "a norm", false, false },
    [NIB_MODULE_CONVOLUTION] = { "a convolution", false, false },
    [NIB_MODULE_GATE] = { "a gate of a linear attention", true, false },
    [NIB_MODULE_INDEXER] = { "a sparse attention's indexer", true, false },
    [NIB_MODULE_VISION] = { "part of a vision tower", true, true },
    [NIB_MODULE_PROJECTOR] = { "a projector of another modality", true, true },
    [NIB_MODULE_AUDIO] = { "part of an audio tower", true, true },
    [NIB_MODULE_PREDICTION] = { "part of multi-token prediction", true, false },
};

/* The first row that fits. Sources: what ModelOpt's and llm-compressor's recipes leave out, what servers build as
 * something else than a packed layer, and what the families of docs/families.md call theirs. */
static const struct role_rule {
    enum place place;
    const char *word;
    enum nib_ck_role_of_module role;
    const char *family; /* NULL: any */
} role_rules[] = {
    { FIRST, "encoder", NIB_MODULE_AUDIO, "granite_speech*" },
    { ANY, "lm_head", NIB_MODULE_HEAD, NULL },
    { LAST, "embed_out", NIB_MODULE_HEAD, NULL },
    { WHOLE, "output", NIB_MODULE_HEAD, NULL }, /* GGUF, consolidated files; RWKV's attention.output is none */
    { WHOLE, "head", NIB_MODULE_HEAD, NULL },   /* RWKV, DeepSeek-V4 */
    { WHOLE, "proj_out", NIB_MODULE_HEAD, NULL },
    { WHOLE, "output_projection", NIB_MODULE_HEAD, NULL },
    { WHOLE, "decoder", NIB_MODULE_HEAD, NULL },
    { END, "predictions.decoder", NIB_MODULE_HEAD, NULL },
    { LAST, "lm_loss", NIB_MODULE_HEAD, NULL },
    { LAST, "output_layer", NIB_MODULE_HEAD, NULL },
    { LAST, "generator_lm_head", NIB_MODULE_HEAD, NULL },
    { LAST, "vocab_projector", NIB_MODULE_HEAD, NULL },
    { LAST, "score", NIB_MODULE_CLASSIFIER, NULL },
    { LAST, "classifier", NIB_MODULE_CLASSIFIER, NULL },
    { LAST, "qa_outputs", NIB_MODULE_CLASSIFIER, NULL },
    { LAST, "embedding_projection", NIB_MODULE_PROJECTOR, NULL },
    { HAS, "embed", NIB_MODULE_EMBEDDING, NULL },
    { TOP, "shared", NIB_MODULE_EMBEDDING, NULL }, /* T5, BART */
    { LAST, "relative_attention_bias", NIB_MODULE_EMBEDDING, NULL },
    { LAST_HAS, "pos_emb", NIB_MODULE_EMBEDDING, NULL },
    { LAST, "wte", NIB_MODULE_EMBEDDING, NULL },
    { LAST, "wpe", NIB_MODULE_EMBEDDING, NULL },
    { LAST, "token_embd", NIB_MODULE_EMBEDDING, NULL },
    { ANY, "gate", NIB_MODULE_ROUTER, NULL }, /* "mlp.gate", and Hunyuan's "mlp.gate.wg" */
    { HAS, "router", NIB_MODULE_ROUTER, NULL },
    { LAST, "ffn_gate_inp", NIB_MODULE_ROUTER, NULL },
    { LAST, "shared_expert_gate", NIB_MODULE_ROUTER, NULL },
    { LAST_HAS, "norm", NIB_MODULE_NORM, NULL },
    { LAST, "conv1d", NIB_MODULE_CONVOLUTION, NULL },
    { LAST, "in_proj_a", NIB_MODULE_GATE, NULL },
    { LAST, "in_proj_b", NIB_MODULE_GATE, NULL },
    { LAST, "in_proj_ba", NIB_MODULE_GATE, NULL },
    { ANY, "indexer", NIB_MODULE_INDEXER, NULL },
    { BEGINS, "visual", NIB_MODULE_VISION, NULL },
    { BEGINS, "vision", NIB_MODULE_VISION, NULL },
    { BEGINS, "image_tower", NIB_MODULE_VISION, NULL },
    { BEGINS, "video_tower", NIB_MODULE_VISION, NULL },
    { BEGINS, "vit_", NIB_MODULE_VISION, NULL },
    { BEGINS, "multi_modal_projector", NIB_MODULE_PROJECTOR, NULL },
    { BEGINS, "mm_projector", NIB_MODULE_PROJECTOR, NULL },
    { ANY, "projector", NIB_MODULE_PROJECTOR, NULL },
    { ANY, "connector", NIB_MODULE_PROJECTOR, NULL },
    { ANY, "aligner", NIB_MODULE_PROJECTOR, NULL },
    { ANY, "qformer", NIB_MODULE_PROJECTOR, NULL },
    { ANY, "mlp_AR", NIB_MODULE_PROJECTOR, NULL }, /* PaddleOCR-VL */
    { BEGINS, "audio", NIB_MODULE_AUDIO, NULL },
    { ANY, "mtp", NIB_MODULE_PREDICTION, NULL },
    { BEGINS, "mtp_", NIB_MODULE_PREDICTION, NULL },
    { BEGINS, "nextn", NIB_MODULE_PREDICTION, NULL },
    { LAST, "eh_proj", NIB_MODULE_PREDICTION, NULL },
};

/* DeepSeek and GLM number the layers of multi-token prediction behind the model's own. */
static bool is_layer_beyond(const nib_checkpoint *c, const char *name)
{
    const int64_t layers = nib_ck_config_int(c, "num_hidden_layers", -1);
    const char *place = strstr(name, "layers.");
    if (layers < 0 || !place || (place != name && place[-1] != '.') || strchr("0123456789", place[7]) == NULL ||
        !place[7])
        return false;
    int64_t number = 0;
    for (const char *digit = place + 7; *digit >= '0' && *digit <= '9' && number < 1000000; digit++)
        number = number * 10 + (*digit - '0');
    return number >= layers;
}

/* The role, and the part of the name that says so. */
static enum nib_ck_role_of_module find_role(const nib_checkpoint *c, const struct parts *p, size_t *part)
{
    for (size_t i = 0; i < sizeof role_rules / sizeof *role_rules; i++) {
        const struct role_rule *rule = &role_rules[i];
        if (rule->family && !is_family(c, rule->family))
            continue;
        *part = stands(p, rule->place, rule->word);
        if (*part < p->n)
            return rule->role;
    }
    return is_layer_beyond(c, p->name) ? NIB_MODULE_PREDICTION : NIB_MODULE_ORDINARY;
}

enum nib_ck_role_of_module nib_ck_module_role(const nib_checkpoint *c, const char *module)
{
    struct parts p;
    size_t part;
    cut(module, &p);
    return find_role(c, &p, &part);
}

bool nib_ck_is_linear_role(enum nib_ck_role_of_module role) { return role_facts[role].linear; }

const char *nib_ck_default_keep(const nib_checkpoint *c, const char *weight)
{
    return role_facts[nib_ck_module_role(c, weight)].reason;
}

/* ---- Readers ---- */

/* Families of which transformers (5.22) puts together or takes apart tensors while it loads. Beside packed weights it
 * looks for packed parts only, without their tensor scales: plain ones stay uninitialized, packed ones come out wrong. */
static const struct merging {
    const char *family, *what;
} mergings[] = {
    { "nomic_bert", "its Wqkv, which transformers takes apart" },
    { "olmo_hybrid", "its convolutions, which transformers puts together" },
};

/* "experts.7.": one of a list; transformers keeps all in one tensor. */
static bool is_numbered_expert(const char *name)
{
    const char *place = strstr(name, "experts.");
    return place && (place == name || place[-1] == '.') && place[8] >= '0' && place[8] <= '9';
}

/* transformers builds a list of layers for Llama 4's experts where weights are packed. */
static bool has_expert_layers(const nib_checkpoint *c) { return is_family(c, "llama4*"); }

const char *nib_ck_reader_rejects(const nib_checkpoint *c, nib_reader reader)
{
    if (reader != NIB_READER_TRANSFORMERS)
        return NULL;
    for (size_t i = 0; i < sizeof mergings / sizeof *mergings; i++)
        if (is_family(c, mergings[i].family))
            return mergings[i].what;
    for (size_t i = 0; i < c->n_weights; i++)
        if (c->weights[i].index < 0 && is_numbered_expert(c->weights[i].name) && !has_expert_layers(c))
            return "experts that are stored one by one, which transformers puts together";
    return NULL;
}

const char *nib_ck_reader_keep(const nib_checkpoint *c, nib_reader reader, nib_checkpoint_format format,
                               const struct nib_ck_weight *w)
{
    if (w->index < 0 && w->transposed &&
        (reader != NIB_READER_VLLM || !is_family(c, "gpt2") || format != NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS))
        return "it is stored as [inputs, outputs], which only vLLM takes packed, and only that of gpt2 (--for vllm)";
    if (reader == NIB_READER_TRANSFORMERS && (w->index >= 0 || nib_ck_is_expert(w->name)) && !has_expert_layers(c))
        return "transformers drops the tensor scale of packed experts";
    return NULL;
}

/* What loads where, as of the loaders of August 2026. The first pair of a reader is what it gets unless it is asked for
 * another. */
static const struct pair {
    nib_reader reader;
    nib_checkpoint_format format;
    nib_scheme scheme;
    const char *rejection; /* NULL: it loads */
} pairs[] = {
    { NIB_READER_VLLM, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16, NULL },
    { NIB_READER_VLLM, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_VLLM, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16, NULL },
    { NIB_READER_VLLM, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_SGLANG, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16, NULL },
    { NIB_READER_SGLANG, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_SGLANG, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_SGLANG, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16,
      "it loads weight-only NVFP4 as modelopt, not as compressed-tensors" },
    { NIB_READER_TRTLLM, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_TRTLLM, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_TRTLLM, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16,
      "it runs weight-only NVFP4 on few GPUs (sm120, sm121): take the scheme nvfp4, or leave --for out" },
    { NIB_READER_TRTLLM, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16,
      "it runs weight-only NVFP4 on few GPUs (sm120, sm121): take the scheme nvfp4, or leave --for out" },
    { NIB_READER_TRANSFORMERS, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16, NULL },
    { NIB_READER_TRANSFORMERS, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_LLAMA_CPP, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16, NULL },
    { NIB_READER_LLAMA_CPP, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_LLAMA_CPP, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16, NULL },
    { NIB_READER_LLAMA_CPP, NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { NIB_READER_LLAMA_CPP, NIB_CHECKPOINT_FORMAT_GGUF, NIB_SCHEME_NVFP4A16, NULL },
    { NIB_READER_LLAMA_CPP, NIB_CHECKPOINT_FORMAT_GGUF, NIB_SCHEME_NVFP4, NULL },
};

nib_status nib_reader_choose(nib_reader reader, int32_t *format, int32_t *scheme)
{
    NIB_REQUIRE(format);
    NIB_REQUIRE(scheme);
    const char *name = nib_reader_name(reader), *rejection = NULL;
    if (!name || reader == NIB_READER_ANY)
        return nib_fail(NIB_ERR_ARG, "reader %d is no reader that anything is chosen for", (int)reader);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const struct pair *pair = &pairs[i];
        if (pair->reader != reader || (*format != NIB_UNSET && *format != (int32_t)pair->format) ||
            (*scheme != NIB_UNSET && *scheme != (int32_t)pair->scheme))
            continue;
        if (!pair->rejection) {
            *format = (int32_t)pair->format;
            *scheme = (int32_t)pair->scheme;
            return NIB_OK;
        }
        rejection = pair->rejection;
    }
    if (rejection)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s cannot load that: %s", name, rejection);
    const char *what = nib_checkpoint_format_name((nib_checkpoint_format)*format);
    return nib_fail(NIB_ERR_UNSUPPORTED, "%s does not load %s", name, what ? what : "that");
}

/* ---- Names that readers use ---- */

static const struct head_name {
    const char *family, *head;
} head_names[] = {
    { "whisper", "proj_out" },
    { "moonshine*", "proj_out" },
    { "bert", "cls.predictions.decoder" },
    { "deberta*", "cls.predictions.decoder" },
    { "nomic_bert", "cls.predictions.decoder" },
    { "roformer", "cls.predictions.decoder" },
    { "blip", "text_decoder.cls.predictions.decoder" },
    { "roberta*", "lm_head.decoder" },
    { "xlm-roberta*", "lm_head.decoder" },
    { "camembert", "lm_head.decoder" },
    { "mpnet", "lm_head.decoder" },
    { "esm", "lm_head.decoder" },
    { "t5gemma*", "lm_head.out_proj" },
    { "electra", "generator_lm_head" },
    { "convbert", "generator_lm_head" },
    { "albert", "predictions.decoder" },
    { "distilbert", "vocab_projector" },
    { "modernbert", "decoder" },
    { "xlnet", "lm_loss" },
    { "biogpt", "output_projection" },
    { "instructblip*", "language_model.lm_head" },
    { "blip-2", "language_model.lm_head" },
    { "rwkv", "head" },
};

const char *nib_ck_head_name(const nib_checkpoint *c)
{
    for (size_t i = 0; i < sizeof head_names / sizeof *head_names; i++)
        if (is_family(c, head_names[i].family))
            return head_names[i].head;
    return "lm_head";
}

/* What transformers calls parts of a name otherwise than the checkpoints that it writes. */
static const struct renaming {
    const char *family; /* "": a model that is composed of several */
    const char *from, *to;
    bool at_start;
} renamings[] = {
    { "phimoe", ".block_sparse_moe.gate", ".mlp.router", false },
    { "deepseek_v4*", ".attn.wo_a", ".self_attn.o_a_proj", false },
    { "paddleocr_vl", "mlp_AR.", "model.projector.", true },
    { "", "language_model.model.", "model.language_model.", true },
    { "", "language_model.lm_head", "lm_head", true },
    { "", "", "model.", true },
};

bool nib_ck_reader_name(const nib_checkpoint *c, const char *module, char *buffer, size_t bytes)
{
    const bool composed = c->composed && strncmp(module, "model.", 6) != 0 && strcmp(module, "lm_head") != 0;
    for (size_t i = 0; i < sizeof renamings / sizeof *renamings; i++) {
        const struct renaming *r = &renamings[i];
        if (*r->family ? !is_family(c, r->family) : !composed)
            continue;
        const char *at =
            r->at_start ? (strncmp(module, r->from, strlen(r->from)) == 0 ? module : NULL) : strstr(module, r->from);
        if (!at)
            continue;
        const int n = snprintf(buffer, bytes, "%.*s%s%s", (int)(at - module), module, r->to, at + strlen(r->from));
        return n > 0 && (size_t)n < bytes;
    }
    return false;
}

/* Whether a row of the family's own renames it: then it need not stay within its tower. */
static bool is_renamed(const nib_checkpoint *c, const char *module)
{
    for (size_t i = 0; i < sizeof renamings / sizeof *renamings; i++)
        if (*renamings[i].family && is_family(c, renamings[i].family) && strstr(module, renamings[i].from))
            return true;
    return false;
}

bool nib_ck_tower_part(const nib_checkpoint *c, const char *module, char *buffer, size_t bytes)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_";
    struct parts p;
    size_t part;
    cut(module, &p);
    if (!role_facts[find_role(c, &p, &part)].tower || is_renamed(c, module) || part + 1 >= p.n ||
        strspn(p.part[part], plain) != p.length[part] || p.length[part] >= bytes)
        return false;
    snprintf(buffer, bytes, "%.*s", (int)p.length[part], p.part[part]);
    return true;
}
