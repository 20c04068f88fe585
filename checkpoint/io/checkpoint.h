/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.h - an opened checkpoint as the files of this layer see it: files, tensors, weights, configuration.
 *
 *     open.c     files, index, configuration, the table of tensors
 *     weights.c  which tensors make which weight, by the table of checkpoint formats; reading weights
 *     names.c    what names mean: patterns, fused groups, what stays in high precision, stacks of experts
 *     measure.c  errors and histograms          check.c   findings
 *     plan.c     what becomes of every tensor   repair.c  the plan of a repair
 *     config.c   configuration files            run.c     plans carried out
 *     gguf.c     the GGUF container
 */
#ifndef NIB_CHECKPOINT_INTERNAL_H
#define NIB_CHECKPOINT_INTERNAL_H

#include <jansson.h>

#include "base/base.h"
#include "nib_checkpoint.h"
#include "nib_file.h"

struct nib_gguf;

#define NIB_NONE UINT32_MAX

struct nib_ck_file {
    char *name;            /* within the directory */
    char *path;            /* for opening and for messages */
    nib_file *safetensors; /* one of these two */
    struct nib_gguf *gguf;
    int64_t *shapes; /* of a GGUF file's tensors */
    uint64_t bytes;  /* its size when it was opened */
};

struct nib_ck_tensor {
    const char *name;
    uint32_t file;   /* index in files */
    uint32_t entry;  /* index in that file */
    nib_dtype dtype; /* NIB_DTYPE_COUNT: only a GGUF type */
    int ggml_type;   /* GGUF files; -1 otherwise */
    int64_t rank;
    const int64_t *shape; /* outermost first */
    uint64_t bytes;
    uint32_t weight; /* the first weight that it is part of, or NIB_NONE */
};

/* The tensors of a weight. Not every checkpoint format has all. */
enum nib_ck_role {
    NIB_ROLE_DATA = 0,     /* numbers or codes */
    NIB_ROLE_SCALE,        /* of blocks */
    NIB_ROLE_TENSOR_SCALE, /* per tensor (or per expert of a stack) */
    NIB_ROLE_INPUT,        /* of activations */
    NIB_ROLE_COUNT
};

struct nib_ck_weight {
    const char *name;
    nib_checkpoint_format format;
    nib_dtype dtype; /* as nib_weight.dtype */
    int64_t rows, cols;
    uint32_t tensor[NIB_ROLE_COUNT]; /* NIB_NONE for absent ones */
    /* Where the matrix lies in its tensors. Row r is row (row_first + r * row_step) of matrix `index`; in a transposed
     * tensor rows run down the columns: [E, K, N] instead of [E, N, K], and codes are then packed along K too. */
    int64_t index; /* in a stack of experts; -1: the tensor is the matrix */
    int64_t row_first, row_step;
    bool transposed;
    nib_tensor_scale tensor_scale; /* NVFP4: what the number per tensor means */
    int32_t e4m3_max;              /* NIB_TENSOR_SCALE_AMAX: what belongs to it; 0 for 448 */
};

/* Something that opening noticed and could live with: nib_checkpoint_check reports it, and a plan rejects what blocks. */
struct nib_ck_diagnostic {
    const char *id;      /* "stale-shard", "unindexed-tensor", "repeated-tensor", "open-orientation" */
    const char *subject; /* a file or a tensor */
    const char *fact;    /* a message without a period */
    bool blocks;         /* what it is about cannot be read as a weight */
};

struct nib_checkpoint {
    char *path;      /* as given */
    char *directory; /* that holds the files; "" for none needed (a single file) */
    bool is_directory;
    bool has_index; /* model.safetensors.index.json was there */
    char *index_name;
    json_t *config; /* config.json; NULL without */
    char *config_text;
    json_t *quantization;    /* borrowed from config: quantization_config, wherever it was; NULL without */
    json_t *hf_quant_config; /* hf_quant_config.json; NULL without */
    const char *model_type;
    const char *provenance; /* of the first file that has one */
    nib_checkpoint_format format;
    struct nib_ck_file *files;
    size_t n_files;
    struct nib_ck_tensor *tensors; /* in the order of names (bytes) */
    size_t n_tensors;
    struct nib_ck_weight *weights; /* in the order of names, numbers by value */
    size_t n_weights;
    struct nib_ck_diagnostic *diagnostics;
    size_t n_diagnostics, diagnostics_capacity;
    void *strings; /* names that no file has, and the texts of diagnostics */
};

/* ---- Tensors (open.c) ---- */

/* A formatted string that lives as long as the checkpoint; NULL without memory. */
char *nib_ck_string(nib_checkpoint *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
nib_status nib_ck_diagnostic(nib_checkpoint *c, const char *id, const char *subject, const char *fact, bool blocks);
nib_status nib_ck_no_memory(const nib_checkpoint *c);

/* The tensor of a name, or NIB_NONE. */
uint32_t nib_ck_find_tensor(const nib_checkpoint *c, const char *name);
/* Bytes of a tensor. */
nib_status nib_ck_read(const nib_checkpoint *c, uint32_t tensor, uint64_t offset, void *out, size_t bytes);
/* "PATH: tensor NAME" for messages; `room` is at least 256. */
const char *nib_ck_place(const nib_checkpoint *c, uint32_t tensor, char *room, size_t bytes);
/* A number of config.json, looked up in the root, then in text_config; `otherwise` without one. */
int64_t nib_ck_config_int(const nib_checkpoint *c, const char *key, int64_t otherwise);
/* The whole of a file in memory, NUL-terminated, at most `limit` bytes (DATA above); freed with nib_free. */
nib_status nib_ck_read_text(const char *path, size_t limit, char **out, size_t *bytes);
/* Whether a token is a number of Python's json that JSON or jansson has not: Infinity, -Infinity, NaN, or an integer of
 * more than 18 digits. In c->config they are strings behind a \x01. */
bool nib_ck_is_python_number(const char *token, size_t length);
/* JSON with its path in the message; duplicate keys and trailing garbage are rejected. */
nib_status nib_ck_parse_json(const char *path, const char *text, size_t bytes, json_t **out);

/* ---- Weights (weights.c) ---- */

nib_status nib_ck_find_weights(nib_checkpoint *c);  /* fills weights and each tensor's weight; called by open */
bool nib_ck_is_nvfp4(nib_checkpoint_format format); /* codes of 4 bits, E4M3 scales per 16, one number per tensor */
/* Rows of a weight as numbers; out is [count, cols], contiguous. Threads may call it at once. Memory: see below. */
nib_status nib_ck_read_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                            nib_dtype dtype, void *out);
/* Bytes that read_rows needs besides its output for `count` rows. */
size_t nib_ck_read_overhead(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t count, nib_dtype dtype);
/* The dtype in which read_rows loses nothing: its own for plain weights, F32 otherwise. */
nib_dtype nib_ck_exact_dtype(const struct nib_ck_weight *w);
nib_status nib_ck_read_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales);
/* The number per tensor, and that of activations (*has_input 0 without): finite or not, as the file has them. */
nib_status nib_ck_read_tensor_scale(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_tensor_scale *kind,
                                    float *tensor_scale);
nib_status nib_ck_read_input(const nib_checkpoint *c, const struct nib_ck_weight *w, int *has_input, float *scale);
/* A quantizer that decodes codes with a tensor scale of this kind (rowwise, 1x16, one thread). */
void nib_ck_decoder(nib_tensor_scale kind, int32_t e4m3_max, nib_quantizer *q);
/* Codes and scales, as read_codes gives them, to numbers. */
nib_status nib_ck_decode(const struct nib_ck_weight *w, float tensor_scale, const uint8_t *codes, const uint8_t *scales,
                         int64_t rows, nib_dtype dtype, void *out);
/* MXFP4: codes [count, K/2] in the same order, and E8M0 scales [count, K/32]. */
nib_status nib_ck_read_mxfp4(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales);
/* Rows whose data and scratch fit in `bytes`, at least 1, at most w->rows; a multiple of 16 where more than 16. */
int64_t nib_ck_rows_for(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_dtype dtype, uint64_t bytes);

/* ---- Long calls (measure.c) ---- */

/* What a caller gave, with its defaults filled in. */
nib_status nib_ck_job(const char *what, const nib_job *overrides, nib_job *out);
/* Tell the caller how far it is; CANCELLED where it wants no more. */
nib_status nib_ck_report(const nib_job *job, const char *phase, const char *tensor, uint64_t done, uint64_t total);

/* ---- Names (names.c) ---- */

static inline bool nib_ck_ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* Patterns of modules: exact, glob, re: (PCRE2, anchored at the start, with a match limit). */
struct nib_patterns;
nib_status nib_patterns_create(const char *const *patterns, size_t n, struct nib_patterns **out);
/* The first that matches, or NIB_NONE. A pattern that runs into its limit is an error. */
nib_status nib_patterns_match(const struct nib_patterns *patterns, const char *name, uint32_t *which);
void nib_patterns_destroy(struct nib_patterns *patterns);

/* The set of weights that a server fuses into one matrix and that must share a tensor scale: equal keys, equal sets.
 * Writes "PARENT{q_proj,k_proj,v_proj}" to room; false where a name is in no set. */
bool nib_ck_fused_key(const char *weight, char *room, size_t bytes);
/* The sets' member names, for messages; row i ends with NULL. */
extern const char *const nib_ck_fused_sets[][5];
/* Why a weight stays in high precision by default ("an embedding"), or NULL. */
const char *nib_ck_default_keep(const nib_checkpoint *c, const struct nib_ck_weight *w);
/* Whether a preset leaves a weight as it is, and why; NULL: it does not. */
const char *nib_ck_preset_keep(nib_preset preset, const char *weight);
/* Whether the module is of a router, a norm...: what a loader builds as something else than a packed linear layer. */
bool nib_ck_is_expert(const char *weight);

/* How a 3-D tensor of experts splits into matrices. Their names: the first prefix_bytes of the tensor's, prefix, the
 * expert's number, the part: "model.layers.0.mlp" ".experts" ".3" ".up_proj". */
struct nib_ck_stack {
    size_t prefix_bytes;
    const char *prefix;
    const char *parts[2]; /* "gate_proj", "up_proj"; or "down_proj", NULL */
    bool transposed;      /* [E, K, N] instead of [E, N, K] */
    bool interleaved;     /* rows of the two parts alternate (gpt-oss) */
};
/* *is false where the name is no stack of experts. DATA where config.json leaves the orientation open. */
nib_status nib_ck_stack_of(const nib_checkpoint *c, const char *tensor, int64_t rank, const int64_t *shape, bool *is,
                           struct nib_ck_stack *out);
/* Families whose ModelOpt readers want the stack whole, packed along dim 1 (Llama-4, gpt-oss). */
bool nib_ck_keeps_stacks(const nib_checkpoint *c);

#endif
