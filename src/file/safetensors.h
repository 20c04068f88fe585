/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.h - what the reader and the writer of the container share, and what other files may ask of them beyond
 * nib_file.h.
 *
 *     bytes 0..7      n, little-endian
 *     bytes 8..8+n    JSON: { "__metadata__": { key: value, ... },
 *                             name: { "dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end] }, ... }
 *     from 8+n        data, to the end of the file; offsets count from here
 */
#ifndef NIB_SAFETENSORS_H
#define NIB_SAFETENSORS_H

#include "file/json.h"
#include "nib_file.h"

#define NIB_SAFETENSORS_MAX_HEADER 100000000 /* bytes of JSON, by the format's own rule */
#define NIB_SAFETENSORS_METADATA "__metadata__"
enum { NIB_SAFETENSORS_LENGTH_BYTES = 8 };

/* For messages. */
const char *nib_file_path(const nib_file *file);
const char *nib_writer_path(const nib_writer *writer);

/* Where its data begins in the file. */
NIB_PRIVATE uint64_t nib_file_data_begin(const nib_file *file);

/* A value that the writer's metadata has, or NULL. */
const char *nib_writer_metadata_value(const nib_writer *writer, const char *key);

/* Bytes of a tensor, or the reason why it cannot have a size. Dims are multiplied from the left and may not overflow
 * on the way to a later 0, as in the reference. */
const char *nib_safetensors_bytes(nib_dtype dtype, const int64_t *shape, size_t rank, uint64_t *bytes);

/* The reference puts wide dtypes first, so that every tensor is aligned: descending ranks, then names. */
NIB_PRIVATE int nib_safetensors_rank(nib_dtype dtype);

/* What a header is made of, one after the other. */
struct nib_safetensors_entry {
    const char *name;
    nib_dtype dtype;
    int64_t rank;
    const int64_t *shape;
    uint64_t begin, bytes;
};
struct nib_safetensors_source {
    int (*metadata)(void *context, const char **key, const char **value); /* 1: a pair; 0: no more; -1: no memory */
    bool (*tensor)(void *context, struct nib_safetensors_entry *out);     /* false: no more */
    void *context;
};
/* The whole header, its length first, into an empty text. False without memory. */
NIB_PRIVATE bool nib_safetensors_put_header(const struct nib_safetensors_source *source, struct nib_text *text);

/* A path in memory of its own; NULL without memory. */
char *nib_safetensors_copy_path(const char *path);
nib_status nib_safetensors_no_memory(const char *path);

/* Pairs of metadata: each value lies behind its key. */
const char *nib_safetensors_value(const struct nib_names *keys, uint32_t id);

#endif
