/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf.h - the GGUF container, versions 2 and 3, little-endian: a strict reader, a writer, and the order of the nibbles
 * in its NVFP4 and MXFP4 blocks.
 *
 *     "GGUF"  u32 version  u64 tensors  u64 keys
 *     keys:      string key, u32 kind, value; an array is u32 kind, u64 count, items; a string is u64 bytes, bytes
 *     tensors:   string name, u32 rank, u64 dims[rank], u32 type, u64 begin
 *     padding    to the next multiple of general.alignment, 32 where that key is missing
 *     data       each tensor padded to the alignment; `begin` counts from here
 *
 * On disk the dims are in the order of ggml, the fastest first. Here, as everywhere else in nib, a shape has the slowest
 * first: a weight of N rows and K columns is { N, K }.
 */
#ifndef NIB_GGUF_H
#define NIB_GGUF_H

#include "base/base.h"

enum {
    NIB_GGUF_MAX_RANK = 4,
    NIB_GGUF_MAX_NAME = 63,          /* bytes of a tensor's name: ggml keeps 64 with the NUL */
    NIB_GGUF_MAX_KEY = 65535,        /* bytes of a key, by the format's own rule */
    NIB_GGUF_MAX_STRING = 1 << 30,   /* bytes of a string, as in ggml */
    NIB_GGUF_MAX_ITEMS = 1 << 30,    /* of an array, as in ggml */
    NIB_GGUF_MAX_HEADER = 100000000, /* bytes of all keys and tensor entries, and of a header that is written */
    NIB_GGUF_DEFAULT_ALIGNMENT = 32, /* and what is written */
};

/* ---- Types of tensors ---- */

/* The ids that code asks for by name; the table knows the others. */
enum nib_gguf_type {
    NIB_GGUF_F32 = 0,
    NIB_GGUF_F16 = 1,
    NIB_GGUF_Q4_0 = 2,
    NIB_GGUF_Q4_1 = 3,
    NIB_GGUF_Q5_0 = 6,
    NIB_GGUF_Q5_1 = 7,
    NIB_GGUF_Q8_0 = 8,
    NIB_GGUF_Q2_K = 10,
    NIB_GGUF_Q3_K = 11,
    NIB_GGUF_Q4_K = 12,
    NIB_GGUF_Q5_K = 13,
    NIB_GGUF_Q6_K = 14,
    NIB_GGUF_IQ4_NL = 20,
    NIB_GGUF_IQ4_XS = 23,
    NIB_GGUF_I8 = 24,
    NIB_GGUF_I16 = 25,
    NIB_GGUF_I32 = 26,
    NIB_GGUF_I64 = 27,
    NIB_GGUF_F64 = 28,
    NIB_GGUF_BF16 = 30,
    NIB_GGUF_MXFP4 = 39,
    NIB_GGUF_NVFP4 = 40,
};

struct nib_gguf_type_facts {
    const char *name;
    uint32_t elements, bytes; /* of a block; 1 element where there are no blocks */
};
/* NULL for an id that ggml does not use, or no longer. */
const struct nib_gguf_type_facts *nib_gguf_type_facts(uint32_t type);
/* The type without blocks that holds the same bits as a dtype, and back; false where there is none. */
bool nib_gguf_type_of_dtype(nib_dtype dtype, uint32_t *type);
bool nib_gguf_dtype_of_type(uint32_t type, nib_dtype *dtype);

struct nib_gguf_entry {
    const char *name;
    uint32_t type;
    int rank; /* as it stands in the file: 0 is a scalar */
    int64_t shape[NIB_GGUF_MAX_RANK];
    uint64_t begin, bytes; /* begin counts from the start of the data */
};

/* Bytes of a tensor; `fault` is the status of an overflow, of rows that are not whole blocks and of an unknown type. The
 * message says nothing of the file nor of the tensor. */
nib_status nib_gguf_bytes(nib_status fault, uint32_t type, int rank, const int64_t *shape, uint64_t *bytes);

/* ---- Values of keys ---- */

enum nib_gguf_kind {
    NIB_GGUF_KIND_U8,
    NIB_GGUF_KIND_I8,
    NIB_GGUF_KIND_U16,
    NIB_GGUF_KIND_I16,
    NIB_GGUF_KIND_U32,
    NIB_GGUF_KIND_I32,
    NIB_GGUF_KIND_F32,
    NIB_GGUF_KIND_BOOL,
    NIB_GGUF_KIND_STRING,
    NIB_GGUF_KIND_ARRAY,
    NIB_GGUF_KIND_U64,
    NIB_GGUF_KIND_I64,
    NIB_GGUF_KIND_F64,
    NIB_GGUF_KIND_COUNT
};
/* "u8", "string" and so on; NULL for an unknown one. */
const char *nib_gguf_kind_name(uint32_t kind);
/* Bytes of a number or a bool; 0 for strings and arrays. */
size_t nib_gguf_kind_bytes(enum nib_gguf_kind kind);

struct nib_gguf_value {
    const char *key;
    enum nib_gguf_kind kind;
    enum nib_gguf_kind item; /* of an array's items; otherwise the kind again */
    uint64_t count;          /* of an array's items; otherwise 1 */
    uint64_t bytes;          /* of a string without its length, of an array's items as they lie in the file */
    union {
        uint64_t u; /* unsigned and bool */
        int64_t i;
        double f; /* f32 too, which it holds exactly */
    } number;     /* of what is neither string nor array */
};

/* ---- The reader ---- */

typedef struct nib_gguf nib_gguf;

struct nib_gguf_facts {
    uint32_t version, alignment;
    uint64_t data_begin; /* in the file */
    uint64_t trailing;   /* bytes behind the last tensor and its padding: ggml does not mind, and neither do we */
};

/* Reads and checks everything but the data. It rejects what ggml rejects, and names or keys that are not UTF-8, are
 * empty, hold a NUL or (keys) are longer than the format allows. DATA: a file that breaks the format, is cut short or
 * is none. UNSUPPORTED: version 1, a later one, or big-endian. Memory grows with the keys and tensors; strings and
 * arrays stay in the file until they are asked for. */
nib_status nib_gguf_open(const char *path, nib_gguf **out);
void nib_gguf_close(nib_gguf *file);
const char *nib_gguf_path(const nib_gguf *file);
struct nib_gguf_facts nib_gguf_facts(const nib_gguf *file);

/* Tensors, in the order of the file. Names live as long as the file. */
size_t nib_gguf_count(const nib_gguf *file);
nib_status nib_gguf_entry(const nib_gguf *file, size_t index, struct nib_gguf_entry *out);
bool nib_gguf_find(const nib_gguf *file, const char *name, size_t *index);
/* All of it or an error: a file that has become shorter is IO. */
nib_status nib_gguf_read(const nib_gguf *file, size_t index, uint64_t offset, void *out, size_t bytes);

/* Keys, in the order of the file. */
size_t nib_gguf_key_count(const nib_gguf *file);
nib_status nib_gguf_value(const nib_gguf *file, size_t index, struct nib_gguf_value *out);
bool nib_gguf_find_key(const nib_gguf *file, const char *key, size_t *index);
/* From the value.bytes of a string or of an array as they lie in the file. */
nib_status nib_gguf_read_value(const nib_gguf *file, size_t index, uint64_t offset, void *out, size_t bytes);

/* By key. A missing key is no error: *found is false, and *out is left alone. A value of another kind is DATA. */
nib_status nib_gguf_get_integer(const nib_gguf *file, const char *key, int64_t *out, bool *found); /* any integer */
nib_status nib_gguf_get_number(const nib_gguf *file, const char *key, double *out, bool *found);   /* or float */
nib_status nib_gguf_get_bool(const nib_gguf *file, const char *key, bool *out, bool *found);
/* With a NUL behind it, freed with nib_free; one with a NUL in it is DATA. */
nib_status nib_gguf_get_string(const nib_gguf *file, const char *key, char **out, bool *found);

/* An array of strings, as one piece of memory that nib_gguf_strings_free frees. */
struct nib_gguf_strings {
    char *text; /* each with a NUL behind it */
    size_t count;
    size_t *starts;
};
nib_status nib_gguf_get_strings(const nib_gguf *file, const char *key, struct nib_gguf_strings *out, bool *found);
void nib_gguf_strings_free(struct nib_gguf_strings *strings);

/* ---- The plan of a file ----
 *
 * Keys and tensors stand in the file in the order in which they are given. Everything is laid out in memory: the place
 * of each tensor and the size of the file are known, and stay the same from run to run, before a byte is written. */

typedef struct nib_gguf_plan nib_gguf_plan;

nib_status nib_gguf_plan_create(const char *path, nib_gguf_plan **out); /* the path that the file will have */
void nib_gguf_plan_destroy(nib_gguf_plan *plan);

/* ARG for a key that is empty, too long, not UTF-8 or given twice, and for general.alignment: it is always 32. */
nib_status nib_gguf_put_string(nib_gguf_plan *plan, const char *key, const char *value);
/* Any kind of integer, and bool; ARG for a value that the kind does not hold. */
nib_status nib_gguf_put_integer(nib_gguf_plan *plan, const char *key, enum nib_gguf_kind kind, int64_t value);
nib_status nib_gguf_put_float(nib_gguf_plan *plan, const char *key, float value);
nib_status nib_gguf_put_strings(nib_gguf_plan *plan, const char *key, const char *const *strings, size_t count);
/* An array of numbers or bools, `items` as they lie in memory. */
nib_status nib_gguf_put_array(nib_gguf_plan *plan, const char *key, enum nib_gguf_kind item, const void *items,
                              size_t count);
/* A key of a file with its value, unchanged. */
nib_status nib_gguf_put_copy(nib_gguf_plan *plan, const nib_gguf *file, size_t index);

/* All keys of another plan. */
nib_status nib_gguf_put_keys(nib_gguf_plan *plan, const nib_gguf_plan *from);
bool nib_gguf_plan_has_key(const nib_gguf_plan *plan, const char *key);

/* A tensor, its shape with the slowest dim first. ARG for a name that is empty, given twice, not UTF-8 or longer than
 * NIB_GGUF_MAX_NAME; DTYPE for an unknown type; SHAPE for a rank over 4 or rows that are not whole blocks. */
nib_status nib_gguf_declare(nib_gguf_plan *plan, const char *name, uint32_t type, int rank, const int64_t *shape);

struct nib_gguf_layout {
    uint64_t data_begin; /* of the first tensor in the file, after the header and its padding */
    uint64_t file_bytes;
};
/* Of what was declared so far: a further key or tensor moves data_begin. */
struct nib_gguf_layout nib_gguf_plan_layout(const nib_gguf_plan *plan);
size_t nib_gguf_plan_count(const nib_gguf_plan *plan);
nib_status nib_gguf_plan_entry(const nib_gguf_plan *plan, size_t index, struct nib_gguf_entry *out);
bool nib_gguf_plan_find(const nib_gguf_plan *plan, const char *name, size_t *index);
/* The data_begin bytes before the first tensor, freed with nib_free; for a caller who writes the file himself. Then the
 * paddings must be zeros, the one at the end included. */
nib_status nib_gguf_plan_header(const nib_gguf_plan *plan, void **out, size_t *bytes);

/* ---- The writer ---- */

typedef struct nib_gguf_writer nib_gguf_writer;

/* Creates a temporary file beside the plan's path. The plan must outlive the writer, and takes no more declarations. */
nib_status nib_gguf_writer_create(nib_gguf_plan *plan, nib_gguf_writer **out);
/* Any part of a tensor in any order. One thread at a time. */
nib_status nib_gguf_write(nib_gguf_writer *writer, size_t index, uint64_t offset, const void *data, size_t bytes);
/* ARG when a byte was never written. Synced, then renamed to the path; afterwards only destroy. */
nib_status nib_gguf_commit(nib_gguf_writer *writer);
void nib_gguf_writer_destroy(nib_gguf_writer *writer); /* an uncommitted file is removed */

/* ---- Blocks ----
 *
 * safetensors: element 2j of a row in the low nibble of byte j, 2j+1 in the high one; the scales apart. GGUF: within a
 * sub-block of 16 (NVFP4) or a block of 32 (MXFP4) element j is a low nibble, and the one half a (sub-)block later the
 * high nibble beside it; the scales in front. Rows are whole blocks, so that a tensor of any rank is one run of blocks,
 * and any piece of it can be regrouped by itself. Source and destination must not overlap. */

enum {
    NIB_GGUF_NVFP4_ELEMENTS = 64,
    NIB_GGUF_NVFP4_BYTES = 36,
    NIB_GGUF_NVFP4_CODES = 32,
    NIB_GGUF_NVFP4_SCALES = 4,
    NIB_GGUF_MXFP4_ELEMENTS = 32,
    NIB_GGUF_MXFP4_BYTES = 17,
    NIB_GGUF_MXFP4_CODES = 16,
};

/* `blocks` of 32 bytes of codes and 4 of scales become 36 bytes each. Scale codes 0..0x7E, which is what any sound file
 * holds, and their element codes are kept. Of the others, values are kept as far as the format has them:
 *
 *     to GGUF     a negative scale becomes positive and the 16 signs are turned, for readers ignore the scale's sign;
 *                 NaN, 7F or FF, becomes 7F, which readers take for 0
 *     from GGUF   the sign of a scale is cleared, as readers ignore it; 7F and FF become 0
 *
 * The number of such scales is returned, so that the caller can tell. */
size_t nib_gguf_nvfp4_join(const void *codes, const void *scales, size_t blocks, void *out);
size_t nib_gguf_nvfp4_split(const void *in, size_t blocks, void *codes, void *scales);

/* `blocks` of 16 bytes of codes and one E8M0 scale. All bytes of the scales are kept. */
void nib_gguf_mxfp4_join(const void *codes, const void *scales, size_t blocks, void *out);
void nib_gguf_mxfp4_split(const void *in, size_t blocks, void *codes, void *scales);

/* GGML's own block types, those that nib_gguf_decode knows. */
#define NIB_GGUF_BIT(type) (UINT64_C(1) << (type))
#define NIB_GGUF_DECODED                                                                       \
    (NIB_GGUF_BIT(NIB_GGUF_Q4_0) | NIB_GGUF_BIT(NIB_GGUF_Q4_1) | NIB_GGUF_BIT(NIB_GGUF_Q5_0) | \
     NIB_GGUF_BIT(NIB_GGUF_Q5_1) | NIB_GGUF_BIT(NIB_GGUF_Q8_0) | NIB_GGUF_BIT(NIB_GGUF_Q2_K) | \
     NIB_GGUF_BIT(NIB_GGUF_Q3_K) | NIB_GGUF_BIT(NIB_GGUF_Q4_K) | NIB_GGUF_BIT(NIB_GGUF_Q5_K) | \
     NIB_GGUF_BIT(NIB_GGUF_Q6_K) | NIB_GGUF_BIT(NIB_GGUF_IQ4_NL) | NIB_GGUF_BIT(NIB_GGUF_IQ4_XS))

/* `blocks` of one of these types as values. (gguf_decode.c) */
void nib_gguf_decode(uint32_t type, const void *in, size_t blocks, float *out);

/* ---- Shared by the reader and the writer ---- */

#define NIB_GGUF_ALIGNMENT "general.alignment"

/* A path in memory of its own; NULL without memory. */
char *nib_gguf_copy_path(const char *path);
nib_status nib_gguf_no_memory(const char *path);

#endif
