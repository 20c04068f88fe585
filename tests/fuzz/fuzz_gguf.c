/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_gguf.c - any bytes as a GGUF file: rejected with a message, or every call on it works, and its keys and tensors
 * can be planned anew and are then read back.
 */
#define _GNU_SOURCE
#include "io/gguf.h"
#include "fuzz.h"

static void walk_tensors(const nib_gguf *file)
{
    uint64_t end = 0;
    for (size_t i = 0; i < nib_gguf_count(file); i++) {
        struct nib_gguf_entry entry;
        size_t found;
        require(!nib_gguf_entry(file, i, &entry), "an entry");
        require(nib_gguf_find(file, entry.name, &found) && found == i, "finding a name");
        const struct nib_gguf_type_facts *facts = nib_gguf_type_facts(entry.type);
        require(facts && entry.rank >= 0 && entry.rank <= NIB_GGUF_MAX_RANK, "rank and type");
        uint64_t elements = 1;
        for (int d = 0; d < entry.rank; d++)
            elements *= (uint64_t)entry.shape[d];
        require(elements / facts->elements * facts->bytes == entry.bytes, "the size");
        require(entry.begin >= end, "the order of the data");
        end = entry.begin + entry.bytes;
        uint8_t *data = malloc((size_t)entry.bytes + 1);
        require(data != NULL, "memory");
        require(!nib_gguf_read(file, i, 0, data, (size_t)entry.bytes), "reading");
        require(nib_gguf_read(file, i, 0, data, (size_t)entry.bytes + 1) == NIB_ERR_ARG, "reading too much");
        float *values = malloc(facts->elements * sizeof *values);
        require(values != NULL, "memory");
        for (uint64_t at = 0; NIB_GGUF_DECODED >> entry.type & 1 && at < entry.bytes; at += facts->bytes)
            nib_gguf_decode(entry.type, data + at, 1, values);
        free(values);
        free(data);
    }
}

static void walk_keys(const nib_gguf *file)
{
    for (size_t i = 0; i < nib_gguf_key_count(file); i++) {
        struct nib_gguf_value value;
        size_t found;
        bool there;
        int64_t integer;
        double number;
        bool truth;
        char *string = NULL;
        struct nib_gguf_strings strings = { 0 };
        require(!nib_gguf_value(file, i, &value), "a key");
        require(nib_gguf_find_key(file, value.key, &found) && found == i, "finding a key");
        int fits = !nib_gguf_get_integer(file, value.key, &integer, &there) && there;
        fits += !nib_gguf_get_bool(file, value.key, &truth, &there) && there;
        fits += !nib_gguf_get_string(file, value.key, &string, &there) && there;
        fits += !nib_gguf_get_strings(file, value.key, &strings, &there) && there;
        require(fits <= 1, "the kind of a value");
        require(fits == 0 || value.item == NIB_GGUF_KIND_BOOL || value.item == NIB_GGUF_KIND_STRING ||
                    (!nib_gguf_get_number(file, value.key, &number, &there) && number == (double)integer),
                "a number");
        if (strings.text) {
            uint64_t bytes = 0;
            for (size_t s = 0; s < strings.count; s++)
                bytes += 8 + strlen(strings.text + strings.starts[s]);
            require(bytes == value.bytes, "the strings");
        }
        nib_free(string);
        nib_gguf_strings_free(&strings);
    }
}

/* The same keys and tensors in a new file, which has no data but is as long as it should be. */
static void plan_again(const nib_gguf *file)
{
    nib_gguf_plan *plan = NULL;
    require(!nib_gguf_plan_create("again", &plan), "a plan");
    for (size_t i = 0; i < nib_gguf_key_count(file); i++) {
        struct nib_gguf_value value;
        require(!nib_gguf_value(file, i, &value), "a key");
        if (strcmp(value.key, NIB_GGUF_ALIGNMENT) != 0)
            require(!nib_gguf_put_copy(plan, file, i), "copying a key");
    }
    for (size_t i = 0; i < nib_gguf_count(file); i++) {
        struct nib_gguf_entry entry;
        require(!nib_gguf_entry(file, i, &entry), "an entry");
        require(!nib_gguf_declare(plan, entry.name, entry.type, entry.rank, entry.shape), "declaring a tensor");
    }
    void *header = NULL;
    size_t bytes = 0;
    char path[64];
    require(!nib_gguf_plan_header(plan, &header, &bytes), "a header");
    const int fd = memfd_create("again", MFD_CLOEXEC);
    require(fd >= 0 && write(fd, header, bytes) == (ssize_t)bytes, "a second file in memory");
    require(ftruncate(fd, (off_t)nib_gguf_plan_layout(plan).file_bytes) == 0, "its length");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    nib_gguf *again = NULL;
    require(!nib_gguf_open(path, &again), "opening it");
    require(nib_gguf_facts(again).trailing == 0 && nib_gguf_facts(again).data_begin == bytes, "its layout");
    require(nib_gguf_count(again) == nib_gguf_count(file), "its tensors");
    nib_gguf_close(again);
    close(fd);
    nib_free(header);
    nib_gguf_plan_destroy(plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    char path[64];
    const int fd = put_in_memory(bytes, count, path);
    nib_gguf *file = NULL;
    const nib_status status = nib_gguf_open(path, &file);
    require(status == NIB_OK || status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED, "the status");
    require(!status == (file != NULL), "the output");
    require(!status || strlen(nib_last_error()) > strlen(path) + 2, "the message");
    if (file) {
        walk_tensors(file);
        walk_keys(file);
        plan_again(file);
    }
    nib_gguf_close(file);
    close(fd);
    return 0;
}
