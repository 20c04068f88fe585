/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors_write.c - the writer of the safetensors container: its files appear complete or not at all.
 */
#include "file/safetensors.h"

#include <stdio.h>

#include "base/os.h"
#include "file/interval_set.h"

struct declared {
    uint64_t begin, bytes; /* begin counts from the start of the data, once the header is laid out */
    uint32_t dims, rank;
    nib_dtype dtype;
    struct nib_interval_set written;
};

struct nib_writer {
    int fd; /* -1 when the temporary file is gone or has become the final one */
    char *path, *temporary;
    bool writing; /* the header is laid out and written: no more declarations */
    bool broken;  /* the system rejected a write, so the file's bytes are unknown */
    struct nib_names names;
    struct declared *tensors; /* tensors[i] belongs to name i */
    size_t tensors_capacity;
    int64_t *dims;
    size_t dims_used, dims_capacity;
    struct nib_names keys; /* as in nib_file */
    uint64_t data_bytes, least_header, data_begin;
};

nib_status nib_writer_create(const char *path, nib_writer **out)
{
    NIB_REQUIRE(path);
    NIB_REQUIRE(out);
    nib_writer *writer = nib_alloc_zeroed(sizeof *writer);
    char *copy = writer ? nib_safetensors_copy_path(path) : NULL;
    nib_status status =
        copy ? nib_os_create_temporary(path, &writer->fd, &writer->temporary) : nib_safetensors_no_memory(path);
    if (status) {
        nib_free(copy);
        nib_free(writer);
        return status;
    }
    writer->path = copy;
    *out = writer;
    return NIB_OK;
}

const char *nib_writer_path(const nib_writer *writer) { return writer->path; }

const char *nib_writer_metadata_value(const nib_writer *writer, const char *key)
{
    uint32_t id;
    size_t place;
    return nib_names_find(&writer->keys, key, &id, &place) ? nib_safetensors_value(&writer->keys, id) : NULL;
}

static nib_status check_declaring(const nib_writer *writer)
{
    if (writer->fd < 0)
        return nib_fail(NIB_ERR_ARG, "%s: only destroy may follow a commit", writer->path);
    if (writer->writing)
        return nib_fail(NIB_ERR_ARG, "%s: everything must be declared before the first write", writer->path);
    return NIB_OK;
}

/* Declarations check a lower bound, which keeps 32-bit positions safe; the exact size comes with the header. */
static nib_status check_header(const char *path, uint64_t bytes)
{
    if (bytes > NIB_SAFETENSORS_MAX_HEADER)
        return nib_fail(NIB_ERR_ARG, "%s: its header would be longer than the %d bytes that the format allows", path,
                        NIB_SAFETENSORS_MAX_HEADER);
    return NIB_OK;
}

nib_status nib_writer_metadata(nib_writer *writer, const char *key, const char *value)
{
    NIB_REQUIRE(writer);
    NIB_REQUIRE(key);
    NIB_REQUIRE(value);
    TRY(check_declaring(writer));
    uint32_t id;
    size_t place;
    if (!nib_utf8_valid(key) || !nib_utf8_valid(value))
        return nib_fail(NIB_ERR_ARG, "%s: metadata key %s: the %s is not UTF-8", writer->path, nib_quote(key).text,
                        nib_utf8_valid(key) ? "value" : "key");
    if (nib_names_find(&writer->keys, key, &id, &place))
        return nib_fail(NIB_ERR_ARG, "%s: metadata key %s comes twice", writer->path, nib_quote(key).text);
    const uint64_t least = strlen(key) + strlen(value) + sizeof "\"\":\"\"";
    TRY(check_header(writer->path, writer->least_header + least));
    struct nib_text *text = &writer->keys.text;
    const size_t start = text->used;
    if (!nib_text_put(text, key, strlen(key) + 1) || !nib_text_put(text, value, strlen(value) + 1) ||
        !nib_names_add(&writer->keys, start)) {
        text->used = start;
        return nib_safetensors_no_memory(writer->path);
    }
    writer->least_header += least;
    return NIB_OK;
}

static nib_status check_name(const nib_writer *writer, const char *name)
{
    uint32_t id;
    size_t place;
    const char *fault = NULL;
    if (!*name)
        fault = "a tensor needs a name";
    else if (!strcmp(name, NIB_SAFETENSORS_METADATA))
        fault = "the format reserves this name";
    else if (!nib_utf8_valid(name))
        fault = "the name is not UTF-8";
    else if (nib_names_find(&writer->names, name, &id, &place))
        fault = "it is declared twice";
    return fault ? nib_fail(NIB_ERR_ARG, "%s: tensor %s: %s", writer->path, nib_quote(name).text, fault) : NIB_OK;
}

static nib_status check_declaration(const nib_writer *writer, const char *name, nib_dtype dtype, int64_t rank,
                                    const int64_t *shape, uint64_t *bytes)
{
    TRY(check_name(writer, name));
    const struct nib_quoted quoted = nib_quote(name);
    if (!nib_dtype_valid(dtype))
        return nib_fail(NIB_ERR_DTYPE, "%s: tensor %s: unknown dtype %d", writer->path, quoted.text, (int)dtype);
    if (rank < 0)
        return nib_fail(NIB_ERR_SHAPE, "%s: tensor %s: rank %lld is negative", writer->path, quoted.text,
                        (long long)rank);
    if (rank > 0 && !shape)
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: its shape is NULL", writer->path, quoted.text);
    TRY(check_header(writer->path, (uint64_t)rank)); /* before so many dims are looked at */
    for (int64_t i = 0; i < rank; i++)
        if (shape[i] < 0)
            return nib_fail(NIB_ERR_SHAPE, "%s: tensor %s: dim %lld is %lld", writer->path, quoted.text, (long long)i,
                            (long long)shape[i]);
    const char *fault = nib_safetensors_bytes(dtype, shape, (size_t)rank, bytes);
    if (!fault && *bytes > INT64_MAX - NIB_SAFETENSORS_MAX_HEADER - NIB_SAFETENSORS_LENGTH_BYTES - writer->data_bytes)
        fault = "the file would be larger than any can be";
    return fault ? nib_fail(NIB_ERR_SHAPE, "%s: tensor %s: %s", writer->path, quoted.text, fault) : NIB_OK;
}

nib_status nib_writer_declare(nib_writer *writer, const char *name, nib_dtype dtype, int64_t rank, const int64_t *shape)
{
    NIB_REQUIRE(writer);
    NIB_REQUIRE(name);
    TRY(check_declaring(writer));
    uint64_t bytes = 0;
    TRY(check_declaration(writer, name, dtype, rank, shape, &bytes));
    const size_t n = writer->names.order.n, dims = (size_t)rank;
    const uint64_t least =
        strlen(name) + 2 * dims + sizeof "\"\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,0]}";
    TRY(check_header(writer->path, writer->least_header + least));

    struct declared *tensors = nib_grow(writer->tensors, &writer->tensors_capacity, n + 1, sizeof *tensors);
    if (!tensors)
        return nib_safetensors_no_memory(writer->path);
    writer->tensors = tensors;
    int64_t *grown = nib_grow(writer->dims, &writer->dims_capacity, writer->dims_used + dims, sizeof *grown);
    if (!grown)
        return nib_safetensors_no_memory(writer->path);
    writer->dims = grown;
    struct nib_text *text = &writer->names.text;
    const size_t start = text->used;
    if (!nib_text_put(text, name, strlen(name) + 1) || !nib_names_add(&writer->names, start)) {
        text->used = start;
        return nib_safetensors_no_memory(writer->path);
    }
    tensors[n] = (struct declared){
        .bytes = bytes, .dims = (uint32_t)writer->dims_used, .rank = (uint32_t)rank, .dtype = dtype
    };
    if (dims)
        memcpy(grown + writer->dims_used, shape, dims * sizeof *shape);
    writer->dims_used += dims;
    writer->data_bytes += bytes;
    writer->least_header += least;
    return NIB_OK;
}

/* This is the reference's enum. */
int nib_safetensors_rank(nib_dtype dtype)
{
    static const uint8_t ranks[NIB_DTYPE_COUNT] = {
        [NIB_BOOL] = 0, [NIB_E2M1] = 1, [NIB_E2M3] = 2,  [NIB_E3M2] = 3,     [NIB_U8] = 4,        [NIB_I8] = 5,
        [NIB_E5M2] = 6, [NIB_E4M3] = 7, [NIB_E8M0] = 8,  [NIB_E4M3FNUZ] = 9, [NIB_E5M2FNUZ] = 10, [NIB_I16] = 11,
        [NIB_U16] = 12, [NIB_F16] = 13, [NIB_BF16] = 14, [NIB_I32] = 15,     [NIB_U32] = 16,      [NIB_F32] = 17,
        [NIB_C64] = 18, [NIB_F64] = 19, [NIB_I64] = 20,  [NIB_U64] = 21,
    };
    return ranks[dtype];
}

static bool put_string(struct nib_text *text, const char *string) { return nib_text_put(text, string, strlen(string)); }

/* Hundreds of thousands of them make up a header: without the locale's detours. */
static bool put_number(struct nib_text *text, uint64_t number)
{
    char digits[20];
    size_t at = sizeof digits;
    do
        digits[--at] = (char)('0' + number % 10);
    while (number /= 10);
    return nib_text_put(text, digits + at, sizeof digits - at);
}

static bool put_tensor(struct nib_text *text, const struct nib_safetensors_entry *tensor)
{
    bool fits = nib_text_put_json(text, tensor->name) && put_string(text, ":{\"dtype\":\"") &&
                put_string(text, nib_dtypes[tensor->dtype].name) && put_string(text, "\",\"shape\":[");
    for (int64_t i = 0; fits && i < tensor->rank; i++)
        fits = (i == 0 || put_string(text, ",")) && put_number(text, (uint64_t)tensor->shape[i]);
    return fits && put_string(text, "],\"data_offsets\":[") && put_number(text, tensor->begin) &&
           put_string(text, ",") && put_number(text, tensor->begin + tensor->bytes) && put_string(text, "]}");
}

bool nib_safetensors_put_header(const struct nib_safetensors_source *source, struct nib_text *text)
{
    bool fits = nib_text_put(text, &(uint64_t){ 0 }, NIB_SAFETENSORS_LENGTH_BYTES) && put_string(text, "{");
    const char *key, *value;
    struct nib_safetensors_entry tensor;
    int pair = 0;
    size_t pairs = 0, entries = 0;
    while (fits && (pair = source->metadata(source->context, &key, &value)) > 0)
        fits = put_string(text, pairs++ ? "," : "\"" NIB_SAFETENSORS_METADATA "\":{") && nib_text_put_json(text, key) &&
               put_string(text, ":") && nib_text_put_json(text, value);
    fits = fits && pair == 0 && (pairs == 0 || put_string(text, "}"));
    while (fits && source->tensor(source->context, &tensor))
        fits = (pairs + entries++ == 0 || put_string(text, ",")) && put_tensor(text, &tensor);
    fits = fits && put_string(text, "}");
    while (fits && text->used % 8)
        fits = put_string(text, " ");
    const uint64_t bytes = text->used - NIB_SAFETENSORS_LENGTH_BYTES;
    if (fits)
        memcpy(text->bytes, &bytes, sizeof bytes);
    return fits;
}

/* A writer's declarations in the order of their bytes. Names are in order already, so that one pass per dtype gives the
 * reference's order. */
struct layout {
    nib_writer *writer;
    size_t pair, at;
    int rank;
    uint64_t end;
};

static int next_metadata(void *context, const char **key, const char **value)
{
    struct layout *layout = context;
    const struct nib_names *keys = &layout->writer->keys;
    if (layout->pair == keys->order.n)
        return 0;
    const uint32_t id = keys->order.ids[layout->pair++];
    *key = nib_names_get(keys, id);
    *value = nib_safetensors_value(keys, id);
    return 1;
}

/* Gives the tensor its place, too. */
static bool next_tensor(void *context, struct nib_safetensors_entry *out)
{
    struct layout *layout = context;
    nib_writer *writer = layout->writer;
    const struct nib_order *order = &writer->names.order;
    for (; layout->rank >= 0; layout->rank--, layout->at = 0)
        while (layout->at < order->n) {
            const uint32_t id = order->ids[layout->at++];
            struct declared *tensor = &writer->tensors[id];
            if (nib_safetensors_rank(tensor->dtype) != layout->rank)
                continue;
            tensor->begin = layout->end;
            layout->end += tensor->bytes;
            *out = (struct nib_safetensors_entry){ .name = nib_names_get(&writer->names, id),
                                                   .dtype = tensor->dtype,
                                                   .rank = tensor->rank,
                                                   .shape = tensor->rank ? writer->dims + tensor->dims : NULL,
                                                   .begin = tensor->begin,
                                                   .bytes = tensor->bytes };
            return true;
        }
    return false;
}

static nib_status write_bytes(nib_writer *writer, uint64_t offset, const void *data, size_t bytes)
{
    const nib_status status = nib_os_write_at(writer->fd, writer->path, offset, data, bytes);
    if (status)
        writer->broken = true;
    return status;
}

/* End the declarations: lay out the file and write its header. */
static nib_status begin_writing(nib_writer *writer)
{
    if (writer->writing)
        return NIB_OK;
    struct nib_text text = { 0 };
    nib_names_finish(&writer->names);
    nib_names_finish(&writer->keys);
    struct layout layout = { .writer = writer, .rank = NIB_DTYPE_COUNT - 1 };
    const struct nib_safetensors_source source = { next_metadata, next_tensor, &layout };
    nib_status status = nib_safetensors_put_header(&source, &text)
                            ? check_header(writer->path, text.used - NIB_SAFETENSORS_LENGTH_BYTES)
                            : nib_safetensors_no_memory(writer->path);
    if (!status)
        status = write_bytes(writer, 0, text.bytes, text.used);
    if (!status) {
        writer->data_begin = text.used;
        writer->writing = true;
    }
    nib_free(text.bytes);
    return status;
}

nib_status nib_writer_write(nib_writer *writer, const char *name, uint64_t offset, const void *data, size_t bytes)
{
    NIB_REQUIRE(writer);
    NIB_REQUIRE(name);
    if (writer->fd < 0)
        return nib_fail(NIB_ERR_ARG, "%s: only destroy may follow a commit", writer->path);
    uint32_t id;
    size_t place;
    if (!nib_names_find(&writer->names, name, &id, &place))
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: it was not declared", writer->path, nib_quote(name).text);
    struct declared *tensor = &writer->tensors[id];
    if (offset > tensor->bytes || bytes > tensor->bytes - offset)
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: %zu bytes from byte %llu are not within its %llu bytes",
                        writer->path, nib_quote(name).text, bytes, (unsigned long long)offset,
                        (unsigned long long)tensor->bytes);
    if (bytes)
        NIB_REQUIRE(data);
    TRY(begin_writing(writer));
    if (bytes == 0)
        return NIB_OK;
    /* Memory first: what is on disk must not fail to be noted. */
    if (!nib_interval_set_reserve(&tensor->written))
        return nib_safetensors_no_memory(writer->path);
    TRY(write_bytes(writer, writer->data_begin + tensor->begin + offset, data, bytes));
    nib_interval_set_add(&tensor->written, offset, offset + bytes);
    return NIB_OK;
}

static nib_status check_complete(const nib_writer *writer)
{
    if (writer->broken)
        return nib_fail(NIB_ERR_IO, "%s: not committed, because an earlier write failed", writer->path);
    for (size_t i = 0; i < writer->names.order.n; i++) {
        const struct declared *tensor = &writer->tensors[i];
        struct nib_interval gap;
        if (!nib_interval_set_gap(&tensor->written, tensor->bytes, &gap))
            continue;
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: bytes %llu to %llu of %llu were never written", writer->path,
                        nib_quote(nib_names_get(&writer->names, (uint32_t)i)).text, (unsigned long long)gap.begin,
                        (unsigned long long)gap.end, (unsigned long long)tensor->bytes);
    }
    return NIB_OK;
}

/* Take back what is on disk; nothing happens after a commit. */
static void abandon(nib_writer *writer)
{
    if (writer->fd < 0)
        return;
    nib_os_close(writer->fd);
    writer->fd = -1;
    nib_os_remove(writer->temporary);
}

nib_status nib_writer_commit(nib_writer *writer)
{
    NIB_REQUIRE(writer);
    if (writer->fd < 0)
        return nib_fail(NIB_ERR_ARG, "%s: only destroy may follow a commit", writer->path);
    nib_status status = begin_writing(writer);
    if (!status)
        status = check_complete(writer);
    if (status) {
        abandon(writer);
        return status;
    }
    const int fd = writer->fd;
    writer->fd = -1; /* closed by publish, whatever comes of it */
    status = nib_os_publish(fd, writer->temporary, writer->path);
    if (status)
        nib_os_remove(writer->temporary);
    return status;
}

void nib_writer_destroy(nib_writer *writer)
{
    if (!writer)
        return;
    abandon(writer);
    for (size_t i = 0; i < writer->names.order.n; i++)
        nib_interval_set_free(&writer->tensors[i].written);
    nib_free(writer->tensors);
    nib_free(writer->dims);
    nib_names_free(&writer->names);
    nib_names_free(&writer->keys);
    nib_free(writer->path);
    nib_free(writer->temporary);
    nib_free(writer);
}
