/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_safetensors.c - any bytes as a safetensors file: rejected with a message, or every call on it works.
 */
#define _GNU_SOURCE
#include "nib_file.h"
#include "fuzz.h"

static void walk(const nib_file *file)
{
    const char *before = "";
    for (size_t i = 0; i < nib_file_count(file); i++) {
        nib_entry entry;
        size_t found;
        require(!nib_file_entry(file, i, &entry), "an entry");
        require(strcmp(before, entry.name) < 0, "the order of the names");
        require(!nib_file_find(file, entry.name, &found) && found == i, "finding a name");
        require(entry.rank >= 0 && nib_dtype_bits(entry.dtype) > 0, "rank and dtype");
        for (int64_t d = 0; d < entry.rank; d++)
            require(entry.shape[d] >= 0, "a dim");
        const size_t bytes = (size_t)(entry.end - entry.begin);
        uint8_t *data = malloc(bytes + 1);
        require(data != NULL, "memory");
        require(!nib_file_read(file, i, 0, data, bytes), "reading");
        require(nib_file_read(file, i, 0, data, bytes + 1) == NIB_ERR_ARG, "reading too much");
        free(data);
        before = entry.name;
    }
    for (size_t i = 0; i < nib_file_metadata_count(file); i++) {
        const char *key, *value;
        require(!nib_file_metadata_entry(file, i, &key, &value), "a pair");
        require(nib_file_metadata(file, key) == value, "finding a key");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    char path[64];
    const int fd = put_in_memory(bytes, count, path);
    nib_file *file = NULL;
    const nib_status status = nib_file_open(path, &file);
    require(status == NIB_OK || status == NIB_ERR_DATA, "the status");
    require(!status == (file != NULL), "the output");
    require(!status || strlen(nib_last_error()) > strlen(path) + 2, "the message");
    if (file)
        walk(file);
    nib_file_close(file);
    close(fd);
    return 0;
}
