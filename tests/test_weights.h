/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_weights.h - small checkpoints: files of tensors with given data, and opening what must open. Wants _GNU_SOURCE.
 */
#ifndef NIB_TEST_WEIGHTS_H
#define NIB_TEST_WEIGHTS_H

#include "nib_checkpoint.h"
#include "test_directory.h"

/* A tensor to be written. */
struct item {
    const char *name;
    nib_dtype dtype;
    int rank;
    int64_t shape[4];
    const void *data;
};

static inline void put_tensors(const char *name, const struct item *items, size_t n)
{
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(at(name), &writer));
    CHECK_OK(nib_writer_metadata(writer, "format", "pt"));
    for (size_t i = 0; i < n; i++)
        CHECK_OK(nib_writer_declare(writer, items[i].name, items[i].dtype, items[i].rank, items[i].shape));
    for (size_t i = 0; i < n; i++) {
        const size_t count = (size_t)elements_in(items[i].rank, items[i].shape);
        const size_t bytes = count * (size_t)nib_dtype_bits(items[i].dtype) / 8;
        CHECK_OK(nib_writer_write(writer, items[i].name, 0, items[i].data, bytes));
    }
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

/* As little as a GGUF file needs: the other tokens of the vocabulary are filled up. */
#define TINY_TOKENIZER                                                                                   \
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\"]}, " \
    "\"pre_tokenizer\": {\"type\": \"ByteLevel\"}}"

static inline nib_checkpoint *open_good(const char *path)
{
    nib_checkpoint *c = NULL;
    CHECK_OK(nib_checkpoint_open(path, &c));
    return c;
}

#endif
