/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_file.h - safetensors files: read and written, and quantized tensors in them.
 */
#ifndef NIB_FILE_H
#define NIB_FILE_H

#include "nib.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file opened for reading: its header is checked whole, its data is read on demand. */
typedef struct nib_file nib_file;

typedef struct nib_entry {
    const char *name; /* UTF-8, valid until the file is closed */
    nib_dtype dtype;
    int64_t rank; /* files may have any rank */
    const int64_t *shape;
    uint64_t begin, end; /* bytes, from the start of the data */
} nib_entry;

/* IO, DATA (the message has the path and the fact), MEMORY. */
NIB_API nib_status nib_file_open(const char *path, nib_file **out);
NIB_API void nib_file_close(nib_file *file);
NIB_API size_t nib_file_count(const nib_file *file);

/* Entries are in the order of their names. */
NIB_API nib_status nib_file_entry(const nib_file *file, size_t index, nib_entry *out);
/* ARG with the name in the message if there is none. */
NIB_API nib_status nib_file_find(const nib_file *file, const char *name, size_t *index);
/* A value of __metadata__, or NULL; or the pairs one by one, in the order of their keys. */
NIB_API const char *nib_file_metadata(const nib_file *file, const char *key);
NIB_API size_t nib_file_metadata_count(const nib_file *file);
NIB_API nib_status nib_file_metadata_entry(const nib_file *file, size_t index, const char **key, const char **value);
/* Read `bytes` of an entry from `offset` within it. IO if the file has shrunk since. */
NIB_API nib_status nib_file_read(const nib_file *file, size_t index, uint64_t offset, void *out, size_t bytes);

/* A file that is being written. Declare everything, then write data in any order, then commit. Until then the data is
 * under a temporary name in the same directory; commit checks that every byte was written, syncs and renames. */
typedef struct nib_writer nib_writer;

NIB_API nib_status nib_writer_create(const char *path, nib_writer **out);
/* ARG: empty name, not UTF-8, repeated, or "__metadata__". */
NIB_API nib_status nib_writer_metadata(nib_writer *writer, const char *key, const char *value);
NIB_API nib_status nib_writer_declare(nib_writer *writer, const char *name, nib_dtype dtype, int64_t rank,
                                      const int64_t *shape);
/* Write part of a declared tensor. The first write ends the declarations. */
NIB_API nib_status nib_writer_write(nib_writer *writer, const char *name, uint64_t offset, const void *data,
                                    size_t bytes);
NIB_API nib_status nib_writer_commit(nib_writer *writer); /* afterwards only destroy */
NIB_API void nib_writer_destroy(nib_writer *writer);      /* an uncommitted file is removed */

/* A whole tensor under `name`: its parts as NAME.row_data, NAME.col_scale, ..., scales as they lie in memory, and all
 * of its metadata. Declare it before any write; after a failed declaration only nib_writer_destroy may follow. Reading
 * gives a tensor equal to the one written, on the device asked for; files of version 0.1 are read too. Writing waits for
 * the tensor's device. */
NIB_API nib_status nib_writer_declare_tensor(nib_writer *writer, const char *name, const nib_tensor *t);
NIB_API nib_status nib_writer_write_tensor(nib_writer *writer, const char *name, const nib_tensor *t);
NIB_API nib_status nib_file_read_tensor(const nib_file *file, const char *name, nib_device *device, nib_tensor **out);

#ifdef __cplusplus
}
#endif

#endif /* NIB_FILE_H */
