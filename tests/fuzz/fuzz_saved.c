/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_saved.c - any bytes as a safetensors file of tensors that the library saved: rejected with a message, or every
 * tensor in it is, or can be read and decoded; and the file can be walked over and planned with as a checkpoint.
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "fuzz_directory.h"

static void decode(const nib_tensor *t)
{
    static float values[1 << 16];
    nib_metadata facts = { .bytes = sizeof facts };
    require(!nib_tensor_get_metadata(t, &facts), "facts of a tensor");
    int64_t elements = 1;
    for (int i = 0; i < facts.rank; i++)
        require(!__builtin_mul_overflow(elements, facts.shape[i], &elements), "the size of a tensor");
    if (elements > (int64_t)(sizeof values / sizeof *values))
        return;
    nib_array out;
    require(!nib_array_init(&out, values, NIB_F32, facts.rank, facts.shape), "an array");
    for (int copy = NIB_ROWWISE; copy <= NIB_EITHER; copy++) {
        const nib_status status = nib_dequantize(t, (nib_usage)copy, &out);
        require(status == NIB_OK || status == NIB_ERR_USAGE, "the status of decoding");
        require(!status || strlen(nib_last_error()) > 10, "the message of decoding");
    }
}

static void read_saved(const char *path)
{
    nib_file *file = NULL;
    if (nib_file_open(path, &file))
        return; /* what it says is fuzz_safetensors' concern */
    for (size_t i = 0; i < nib_file_metadata_count(file); i++) {
        const char *key, *value;
        nib_tensor *t = NULL;
        require(!nib_file_metadata_entry(file, i, &key, &value), "a pair");
        if (strncmp(key, "nib:", 4) != 0)
            continue;
        const nib_status status = nib_file_read_tensor(file, key + 4, NULL, &t);
        require(status == NIB_OK || status == NIB_ERR_DATA, "the status of a tensor");
        require(!status == (t != NULL), "a tensor or none");
        require(!status || strstr(nib_last_error(), path), "the message of a tensor");
        if (t)
            decode(t);
        nib_tensor_destroy(t);
    }
    nib_file_close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char *directory;
    static char path[128];
    if (!directory) {
        directory = make_directory();
        snprintf(path, sizeof path, "%s/model.safetensors", directory);
    }
    put_file(directory, "model.safetensors", bytes, count);
    read_saved(path);
    try_directory(directory);
    return 0;
}
