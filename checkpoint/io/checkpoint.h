/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.h - an opened checkpoint: files, tensors, configuration (open.c). What its weights are is model/weights.h's.
 */
#ifndef NIB_CHECKPOINT_INTERNAL_H
#define NIB_CHECKPOINT_INTERNAL_H

#include <jansson.h>

#include "base/base.h"
#include "nib_checkpoint.h"
#include "nib_file.h"

struct nib_gguf;
struct nib_ck_weight;
struct nib_ck_fold;

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
    bool composed;          /* config.json has configurations of parts: text, vision, audio */
    char *architecture;     /* general.architecture of a GGUF file; NULL without */
    const char *provenance; /* of the first file that has one */
    json_t *notes;          /* the same, understood; NULL where there is none, or something else by its name */
    nib_checkpoint_format format;
    struct nib_ck_file *files;
    size_t n_files;
    struct nib_ck_tensor *tensors; /* in the order of names (bytes) */
    size_t n_tensors;
    struct nib_ck_weight *weights; /* in the order of names, numbers by value */
    size_t n_weights;
    struct nib_ck_fold *folds; /* of its weights; NULL: it was not folded */
    float *fold_scales;        /* that they point to */
    struct nib_ck_diagnostic *diagnostics;
    size_t n_diagnostics, diagnostics_capacity;
    void *strings; /* names that no file has, and the texts of diagnostics */
};

/* Files, index, configuration and the table of tensors of nib_checkpoint_open; weights are still to be found. */
nib_status nib_ck_open(const char *path, nib_checkpoint **out);

/* The JSON object of a file in the directory, with Python's numbers as in c->config; *out stays NULL where there is no
 * such file. */
nib_status nib_ck_read_object(const nib_checkpoint *c, const char *name, json_t **out);

/* A formatted string that lives as long as the checkpoint; NULL without memory. */
char *nib_ck_string(nib_checkpoint *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
nib_status nib_ck_diagnostic(nib_checkpoint *c, const char *id, const char *subject, const char *fact, bool blocks);
nib_status nib_ck_no_memory(const nib_checkpoint *c);

/* What a file calls a tensor's type: "BF16", "Q4_K". */
const char *nib_ck_dtype_name(const struct nib_ck_tensor *t);
/* The tensor of a name, or NIB_NONE. */
uint32_t nib_ck_find_tensor(const nib_checkpoint *c, const char *name);
/* Bytes of a tensor. */
nib_status nib_ck_read(const nib_checkpoint *c, uint32_t tensor, uint64_t offset, void *out, size_t bytes);
/* "PATH: tensor NAME" for messages; `buffer` has at least 256 bytes. */
const char *nib_ck_place(const nib_checkpoint *c, uint32_t tensor, char *buffer, size_t bytes);
/* A number of config.json, looked up in the root, then in text_config; `otherwise` without one. */
int64_t nib_ck_config_int(const nib_checkpoint *c, const char *key, int64_t otherwise);
/* The whole of a file in memory, NUL-terminated, at most `limit` bytes (DATA above); freed with nib_free. */
nib_status nib_ck_read_text(const char *path, size_t limit, char **out, size_t *bytes);
/* Whether a token is a number of Python's json that JSON or jansson has not: Infinity, -Infinity, NaN, or an integer of
 * more than 18 digits. In c->config they are strings behind a \x01. */
bool nib_ck_is_python_number(const char *token, size_t length);
/* All of it, or NULL: jansson's own copy lacks what it has no memory for. */
json_t *nib_ck_copy_json(json_t *value);
/* JSON with its path in the message; duplicate keys and trailing garbage are rejected. */
nib_status nib_ck_parse_json(const char *path, const char *text, size_t bytes, json_t **out);

#endif
