/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.c - the safetensors container: a strict reader and a writer whose files appear complete or not at all.
 *
 *     bytes 0..7      n, little-endian
 *     bytes 8..8+n    JSON: { "__metadata__": { key: value, ... },
 *                             name: { "dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end] }, ... }
 *     from 8+n        data, to the end of the file; offsets count from here
 *
 * The reader takes what the reference reader takes, less what the format forbids without its noticing (repeated
 * names, entries in array form) and what a C string cannot hold (NUL). The tensors must cover the data exactly.
 */
#include "safetensors.h"

#include <stdio.h>

#include "json.h"
#include "os.h"

static const char metadata_name[] = "__metadata__";

/* Bytes of a tensor, or the reason why there is no such number. Dims are multiplied from the left and may not
 * overflow on the way to a later 0, as in the reference. */
static const char *count_bytes(nib_dtype dtype, const int64_t *shape, size_t rank, uint64_t *bytes)
{
    uint64_t bits = 1;
    for (size_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(bits, (uint64_t)shape[i], &bits))
            return "the product of its dims is larger than 64 bits hold";
    if (__builtin_mul_overflow(bits, (uint64_t)nib_dtypes[dtype].bits, &bits))
        return "its size in bits is larger than 64 bits hold";
    if (bits % 8)
        return "its elements do not fill whole bytes";
    *bytes = bits / 8;
    return NULL;
}

static char *copy_path(const char *path)
{
    const size_t bytes = strlen(path) + 1;
    char *copy = nib_alloc(bytes);
    return copy ? memcpy(copy, path, bytes) : NULL;
}

/* ---- Reading ---- */

struct entry {
    uint64_t begin, end;
    uint32_t dims, rank; /* the first in file->dims, and how many */
    nib_dtype dtype;
};

struct nib_file {
    int fd;
    char *path;
    uint64_t header_bytes, data_bytes;
    struct nib_names names; /* entries[i] belongs to name i */
    struct entry *entries;
    size_t entries_capacity;
    int64_t *dims;
    size_t dims_used, dims_capacity;
    struct nib_names keys; /* of __metadata__; each value lies behind its key */
};

enum { LENGTH_BYTES = 8 };

static nib_status no_memory(const char *path) { return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its header", path); }

static nib_status read_dtype(struct nib_file *file, struct nib_json *json, struct entry *entry)
{
    struct nib_text *scratch = &file->names.text;
    const size_t start = scratch->used;
    TRY(nib_json_string(json, scratch));
    const char *name = scratch->bytes + start;
    scratch->used = start;
    for (int i = 0; i < NIB_DTYPE_COUNT; i++)
        if (!strcmp(name, nib_dtypes[i].name)) {
            entry->dtype = (nib_dtype)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_DATA, "unknown dtype %s", nib_quote(name).text);
}

static nib_status read_shape(struct nib_file *file, struct nib_json *json, struct entry *entry)
{
    entry->dims = (uint32_t)file->dims_used; /* a dim takes two bytes of the header, which has 10^8 */
    TRY(nib_json_take(json, '['));
    for (bool first = true, more;; first = false) {
        TRY(nib_json_more(json, ']', first, &more));
        if (!more)
            break;
        uint64_t dim;
        TRY(nib_json_unsigned(json, &dim));
        if (dim > INT64_MAX)
            return nib_fail(NIB_ERR_DATA, "dim %llu is too large", (unsigned long long)dim);
        int64_t *dims = nib_grow(file->dims, &file->dims_capacity, file->dims_used + 1, sizeof *dims);
        if (!dims)
            return no_memory(file->path);
        file->dims = dims;
        dims[file->dims_used++] = (int64_t)dim;
    }
    entry->rank = (uint32_t)file->dims_used - entry->dims;
    return NIB_OK;
}

static nib_status read_offsets(struct nib_file *file, struct nib_json *json, struct entry *entry)
{
    (void)file;
    TRY(nib_json_take(json, '['));
    TRY(nib_json_unsigned(json, &entry->begin));
    TRY(nib_json_take(json, ','));
    TRY(nib_json_unsigned(json, &entry->end));
    return nib_json_take(json, ']');
}

static const struct field {
    const char *name;
    nib_status (*read)(struct nib_file *file, struct nib_json *json, struct entry *entry);
} fields[] = { { "dtype", read_dtype }, { "shape", read_shape }, { "data_offsets", read_offsets } };
enum { FIELDS = sizeof fields / sizeof *fields };

/* One `key: value` of an entry. Keys that we do not know are passed over, as in the reference. */
static nib_status read_field(struct nib_file *file, struct nib_json *json, struct entry *entry, bool seen[FIELDS])
{
    struct nib_text *scratch = &file->names.text;
    const size_t start = scratch->used;
    TRY(nib_json_string(json, scratch));
    scratch->used = start;
    int field = 0;
    while (field < FIELDS && strcmp(scratch->bytes + start, fields[field].name) != 0)
        field++;
    TRY(nib_json_take(json, ':'));
    if (field == FIELDS)
        return nib_json_skip(json);
    if (seen[field])
        return nib_fail(NIB_ERR_DATA, "its %s comes twice", fields[field].name);
    seen[field] = true;
    return fields[field].read(file, json, entry);
}

static const int64_t *shape_of(const struct nib_file *file, const struct entry *entry)
{
    static const int64_t none[1]; /* never NULL, so that copying no dims from it is defined */
    return file->dims ? file->dims + entry->dims : none;
}

static nib_status read_entry(struct nib_file *file, struct nib_json *json, struct entry *entry)
{
    bool seen[FIELDS] = { false };
    TRY(nib_json_take(json, '{'));
    for (bool first = true, more;; first = false) {
        TRY(nib_json_more(json, '}', first, &more));
        if (!more)
            break;
        TRY(read_field(file, json, entry, seen));
    }
    for (int i = 0; i < FIELDS; i++)
        if (!seen[i])
            return nib_fail(NIB_ERR_DATA, "it has no %s", fields[i].name);

    const unsigned long long begin = entry->begin, end = entry->end;
    if (begin > end)
        return nib_fail(NIB_ERR_DATA, "data_offsets [%llu, %llu] end before they begin", begin, end);
    uint64_t bytes;
    const char *fault = count_bytes(entry->dtype, shape_of(file, entry), entry->rank, &bytes);
    if (fault)
        return nib_fail(NIB_ERR_DATA, "%s", fault);
    if (bytes != end - begin)
        return nib_fail(NIB_ERR_DATA, "data_offsets [%llu, %llu] are %llu bytes, but its dtype and shape take %llu",
                        begin, end, end - begin, (unsigned long long)bytes);
    return NIB_OK;
}

/* After the name, which is the last string of the text, and its colon. */
static nib_status read_tensor(struct nib_file *file, struct nib_json *json, size_t name)
{
    if (!file->names.text.bytes[name])
        return nib_fail(NIB_ERR_DATA, "a tensor has an empty name");
    const size_t n = file->names.order.n;
    struct entry *entries = nib_grow(file->entries, &file->entries_capacity, n + 1, sizeof *entries);
    if (!entries)
        return no_memory(file->path);
    file->entries = entries;
    entries[n] = (struct entry){ 0 };
    nib_status status = read_entry(file, json, &entries[n]);
    if (status == NIB_ERR_DATA)
        return nib_fail(status, "tensor %s: %s", nib_quote(file->names.text.bytes + name).text, nib_last_error());
    TRY(status);
    return nib_names_add(&file->names, name) ? NIB_OK : no_memory(file->path);
}

static nib_status read_pairs(struct nib_file *file, struct nib_json *json)
{
    int byte;
    TRY(nib_json_peek(json, &byte));
    if (byte == 'n')
        return nib_json_null(json);
    TRY(nib_json_take(json, '{'));
    for (bool first = true, more;; first = false) {
        TRY(nib_json_more(json, '}', first, &more));
        if (!more)
            break;
        const size_t key = file->keys.text.used;
        TRY(nib_json_string(json, &file->keys.text));
        TRY(nib_json_take(json, ':'));
        TRY(nib_json_string(json, &file->keys.text));
        if (!nib_names_add(&file->keys, key))
            return no_memory(file->path);
    }
    nib_names_finish(&file->keys);
    const char *repeated = nib_names_repeated(&file->keys);
    return repeated ? nib_fail(NIB_ERR_DATA, "the key %s comes twice", nib_quote(repeated).text) : NIB_OK;
}

static nib_status read_metadata(struct nib_file *file, struct nib_json *json)
{
    nib_status status = read_pairs(file, json);
    return status == NIB_ERR_DATA ? nib_fail(status, "__metadata__: %s", nib_last_error()) : status;
}

static nib_status read_object(struct nib_file *file, struct nib_json *json)
{
    struct nib_text *text = &file->names.text;
    bool have_metadata = false;
    TRY(nib_json_take(json, '{'));
    for (bool first = true, more;; first = false) {
        TRY(nib_json_more(json, '}', first, &more));
        if (!more)
            break;
        const size_t name = text->used;
        TRY(nib_json_string(json, text));
        TRY(nib_json_take(json, ':'));
        if (strcmp(text->bytes + name, metadata_name) != 0) {
            TRY(read_tensor(file, json, name));
            continue;
        }
        text->used = name;
        if (have_metadata)
            return nib_fail(NIB_ERR_DATA, "__metadata__ comes twice");
        have_metadata = true;
        TRY(read_metadata(file, json));
    }
    TRY(nib_json_end(json));
    nib_names_finish(&file->names);
    const char *repeated = nib_names_repeated(&file->names);
    return repeated ? nib_fail(NIB_ERR_DATA, "tensor %s comes twice", nib_quote(repeated).text) : NIB_OK;
}

static bool range_after(const void *context, uint32_t a, uint32_t b)
{
    const struct entry *entries = context;
    return entries[a].begin != entries[b].begin ? entries[a].begin > entries[b].begin : entries[a].end > entries[b].end;
}

/* In the order of the data each tensor must begin where the one before it ends, the last at the end of the file. */
static nib_status check_chain(const struct nib_file *file, const uint32_t *ids)
{
    uint64_t end = 0;
    for (size_t i = 0; i < file->names.order.n; i++) {
        const struct entry *entry = &file->entries[ids[i]];
        if (entry->begin != end)
            return nib_fail(NIB_ERR_DATA, "tensor %s: data_offsets [%llu, %llu] %s byte %llu",
                            nib_quote(nib_names_get(&file->names, ids[i])).text, (unsigned long long)entry->begin,
                            (unsigned long long)entry->end,
                            entry->begin > end ? "leave a hole: the data before them ends at"
                                               : "overlap the tensor before them, which ends at",
                            (unsigned long long)end);
        end = entry->end;
    }
    if (end != file->data_bytes)
        return nib_fail(NIB_ERR_DATA, "its tensors take %llu bytes, but %llu bytes follow the header",
                        (unsigned long long)end, (unsigned long long)file->data_bytes);
    return NIB_OK;
}

static nib_status check_ranges(const struct nib_file *file)
{
    struct nib_order order = { 0 };
    nib_status status = NIB_OK;
    while (!status && order.n < file->names.order.n)
        if (nib_order_reserve(&order))
            nib_order_append(&order, range_after, file->entries);
        else
            status = no_memory(file->path);
    if (!status) {
        nib_order_finish(&order, range_after, file->entries);
        status = check_chain(file, order.ids);
    }
    nib_order_free(&order);
    return status;
}

/* DATA sentences leave here without the path. */
static nib_status read_file(struct nib_file *file, uint64_t file_bytes)
{
    uint64_t header_bytes;
    if (file_bytes < LENGTH_BYTES)
        return nib_fail(NIB_ERR_DATA, "it has %llu bytes, and a safetensors file has at least 8",
                        (unsigned long long)file_bytes);
    TRY(nib_os_read_at(file->fd, file->path, 0, &header_bytes, sizeof header_bytes));
    if (header_bytes > NIB_SAFETENSORS_MAX_HEADER)
        return nib_fail(NIB_ERR_DATA, "its header claims %llu bytes, and %d are the most there may be",
                        (unsigned long long)header_bytes, NIB_SAFETENSORS_MAX_HEADER);
    if (header_bytes > file_bytes - LENGTH_BYTES)
        return nib_fail(NIB_ERR_DATA, "its header claims %llu bytes, but the file has only %llu after its length",
                        (unsigned long long)header_bytes, (unsigned long long)(file_bytes - LENGTH_BYTES));
    file->header_bytes = header_bytes;
    file->data_bytes = file_bytes - LENGTH_BYTES - header_bytes;
    struct nib_json json;
    TRY(nib_json_open(&json, file->fd, file->path, LENGTH_BYTES, header_bytes));
    nib_status status = read_object(file, &json);
    nib_json_close(&json);
    return status ? status : check_ranges(file);
}

nib_status nib_file_open(const char *path, nib_file **out)
{
    NIB_REQUIRE(path);
    NIB_REQUIRE(out);
    int fd;
    uint64_t bytes;
    TRY(nib_os_open_read(path, &fd, &bytes));
    nib_file *file = nib_alloc_zeroed(sizeof *file);
    char *copy = file ? copy_path(path) : NULL;
    if (!copy) {
        nib_os_close(fd);
        nib_free(file);
        return no_memory(path);
    }
    file->fd = fd;
    file->path = copy;
    nib_status status = read_file(file, bytes);
    if (status == NIB_ERR_DATA)
        nib_fail(status, "%s: %s", path, nib_last_error());
    if (status)
        nib_file_close(file);
    else
        *out = file;
    return status;
}

void nib_file_close(nib_file *file)
{
    if (!file)
        return;
    nib_os_close(file->fd);
    nib_names_free(&file->names);
    nib_names_free(&file->keys);
    nib_free(file->entries);
    nib_free(file->dims);
    nib_free(file->path);
    nib_free(file);
}

const char *nib_file_path(const nib_file *file) { return file->path; }

size_t nib_file_count(const nib_file *file) { return file ? file->names.order.n : 0; }

static nib_status check_index(const nib_file *file, size_t index)
{
    if (index >= file->names.order.n)
        return nib_fail(NIB_ERR_ARG, "%s: there is no tensor %zu among its %zu", file->path, index,
                        file->names.order.n);
    return NIB_OK;
}

nib_status nib_file_entry(const nib_file *file, size_t index, nib_entry *out)
{
    NIB_REQUIRE(file);
    NIB_REQUIRE(out);
    TRY(check_index(file, index));
    const uint32_t id = file->names.order.ids[index];
    const struct entry *entry = &file->entries[id];
    *out = (nib_entry){
        .name = nib_names_get(&file->names, id),
        .dtype = entry->dtype,
        .rank = entry->rank,
        .shape = shape_of(file, entry),
        .begin = entry->begin,
        .end = entry->end,
    };
    return NIB_OK;
}

nib_status nib_file_find(const nib_file *file, const char *name, size_t *index)
{
    NIB_REQUIRE(file);
    NIB_REQUIRE(name);
    NIB_REQUIRE(index);
    uint32_t id;
    size_t place;
    if (!nib_names_find(&file->names, name, &id, &place))
        return nib_fail(NIB_ERR_ARG, "%s: there is no tensor %s", file->path, nib_quote(name).text);
    *index = place;
    return NIB_OK;
}

static const char *value_of(const struct nib_names *keys, uint32_t id)
{
    const char *key = nib_names_get(keys, id);
    return key + strlen(key) + 1;
}

const char *nib_file_metadata(const nib_file *file, const char *key)
{
    uint32_t id;
    size_t place;
    return file && key && nib_names_find(&file->keys, key, &id, &place) ? value_of(&file->keys, id) : NULL;
}

size_t nib_file_metadata_count(const nib_file *file) { return file ? file->keys.order.n : 0; }

nib_status nib_file_metadata_entry(const nib_file *file, size_t index, const char **key, const char **value)
{
    NIB_REQUIRE(file);
    NIB_REQUIRE(key);
    NIB_REQUIRE(value);
    if (index >= file->keys.order.n)
        return nib_fail(NIB_ERR_ARG, "%s: there is no pair %zu among the %zu of its metadata", file->path, index,
                        file->keys.order.n);
    const uint32_t id = file->keys.order.ids[index];
    *key = nib_names_get(&file->keys, id);
    *value = value_of(&file->keys, id);
    return NIB_OK;
}

nib_status nib_file_read(const nib_file *file, size_t index, uint64_t offset, void *out, size_t bytes)
{
    NIB_REQUIRE(file);
    TRY(check_index(file, index));
    const uint32_t id = file->names.order.ids[index];
    const struct entry *entry = &file->entries[id];
    const uint64_t size = entry->end - entry->begin;
    if (offset > size || bytes > size - offset)
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: %zu bytes from byte %llu are not within its %llu bytes",
                        file->path, nib_quote(nib_names_get(&file->names, id)).text, bytes, (unsigned long long)offset,
                        (unsigned long long)size);
    if (bytes == 0)
        return NIB_OK;
    NIB_REQUIRE(out);
    return nib_os_read_at(file->fd, file->path, LENGTH_BYTES + file->header_bytes + entry->begin + offset, out, bytes);
}

/* ---- Writing ---- */

struct span {
    uint64_t begin, end;
};

struct declared {
    uint64_t begin, bytes; /* begin counts from the start of the data, once the header is laid out */
    uint32_t dims, rank;
    nib_dtype dtype;
    struct span *written; /* sorted, and neither overlapping nor touching: one whole span when complete */
    size_t spans, spans_capacity;
};

struct nib_writer {
    int fd; /* -1 when the temporary file is gone or has become the final one */
    char *path, *temporary;
    bool writing; /* the header is laid out and written: no more declarations */
    bool broken;  /* the system refused a write, so the file's bytes are unknown */
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
    char *copy = writer ? copy_path(path) : NULL;
    nib_status status = copy ? nib_os_create_temporary(path, &writer->fd, &writer->temporary) : no_memory(path);
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

static nib_status check_declaring(const nib_writer *writer)
{
    if (writer->fd < 0)
        return nib_fail(NIB_ERR_ARG, "%s: only destroy may follow a commit", writer->path);
    if (writer->writing)
        return nib_fail(NIB_ERR_ARG, "%s: everything must be declared before the first write", writer->path);
    return NIB_OK;
}

/* Declarations check a lower bound, which keeps 32-bit positions safe; the exact number comes with the header. */
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
        return no_memory(writer->path);
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
    else if (!strcmp(name, metadata_name))
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
    const char *fault = count_bytes(dtype, shape, (size_t)rank, bytes);
    if (!fault && *bytes > INT64_MAX - NIB_SAFETENSORS_MAX_HEADER - LENGTH_BYTES - writer->data_bytes)
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
        return no_memory(writer->path);
    writer->tensors = tensors;
    int64_t *grown = nib_grow(writer->dims, &writer->dims_capacity, writer->dims_used + dims, sizeof *grown);
    if (!grown)
        return no_memory(writer->path);
    writer->dims = grown;
    struct nib_text *text = &writer->names.text;
    const size_t start = text->used;
    if (!nib_text_put(text, name, strlen(name) + 1) || !nib_names_add(&writer->names, start)) {
        text->used = start;
        return no_memory(writer->path);
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

/* The reference puts wide dtypes first, so that every tensor is aligned; this is its enum. */
static int dtype_rank(nib_dtype dtype)
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

static bool put_number(struct nib_text *text, uint64_t number)
{
    char digits[24];
    return nib_text_put(text, digits, (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)number));
}

static bool put_metadata(const nib_writer *writer, struct nib_text *text)
{
    const struct nib_order *order = &writer->keys.order;
    if (order->n == 0)
        return true;
    bool fits = put_string(text, "\"__metadata__\":{");
    for (size_t i = 0; fits && i < order->n; i++)
        fits = (i == 0 || put_string(text, ",")) &&
               nib_text_put_json(text, nib_names_get(&writer->keys, order->ids[i])) && put_string(text, ":") &&
               nib_text_put_json(text, value_of(&writer->keys, order->ids[i]));
    return fits && put_string(text, writer->names.order.n ? "}," : "}");
}

static bool put_tensor(const nib_writer *writer, uint32_t id, struct nib_text *text)
{
    const struct declared *tensor = &writer->tensors[id];
    bool fits = nib_text_put_json(text, nib_names_get(&writer->names, id)) && put_string(text, ":{\"dtype\":\"") &&
                put_string(text, nib_dtypes[tensor->dtype].name) && put_string(text, "\",\"shape\":[");
    for (uint32_t i = 0; fits && i < tensor->rank; i++)
        fits = (i == 0 || put_string(text, ",")) && put_number(text, (uint64_t)writer->dims[tensor->dims + i]);
    return fits && put_string(text, "],\"data_offsets\":[") && put_number(text, tensor->begin) &&
           put_string(text, ",") && put_number(text, tensor->begin + tensor->bytes) && put_string(text, "]}");
}

/* Give every tensor its place and put the whole header, its length first, into `text`. Names are in order already, so
 * that one pass per dtype gives the reference's order. */
static bool lay_out(nib_writer *writer, struct nib_text *text)
{
    const struct nib_order *order = &writer->names.order;
    bool fits =
        nib_text_put(text, &(uint64_t){ 0 }, LENGTH_BYTES) && put_string(text, "{") && put_metadata(writer, text);
    uint64_t begin = 0;
    size_t placed = 0;
    for (int rank = NIB_DTYPE_COUNT - 1; rank >= 0; rank--)
        for (size_t i = 0; fits && i < order->n; i++) {
            struct declared *tensor = &writer->tensors[order->ids[i]];
            if (dtype_rank(tensor->dtype) != rank)
                continue;
            tensor->begin = begin;
            begin += tensor->bytes;
            fits = (placed++ == 0 || put_string(text, ",")) && put_tensor(writer, order->ids[i], text);
        }
    fits = fits && put_string(text, "}");
    while (fits && text->used % 8)
        fits = put_string(text, " ");
    return fits;
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
    nib_status status = NIB_OK;
    nib_names_finish(&writer->names);
    nib_names_finish(&writer->keys);
    if (!lay_out(writer, &text)) {
        status = no_memory(writer->path);
    } else {
        const uint64_t header_bytes = text.used - LENGTH_BYTES;
        memcpy(text.bytes, &header_bytes, LENGTH_BYTES);
        status = check_header(writer->path, header_bytes);
    }
    if (!status)
        status = write_bytes(writer, 0, text.bytes, text.used);
    if (!status) {
        writer->data_begin = text.used;
        writer->writing = true;
    }
    nib_free(text.bytes);
    return status;
}

/* Note that a tensor's bytes begin..end-1 are written: one span takes the place of all that it touches. There must be
 * room for one more. */
static void note_written(struct declared *tensor, uint64_t begin, uint64_t end)
{
    size_t first = 0, last = tensor->spans;
    while (first < last) { /* the first span that does not end before `begin` */
        const size_t middle = first + (last - first) / 2;
        if (tensor->written[middle].end < begin)
            first = middle + 1;
        else
            last = middle;
    }
    for (last = first; last < tensor->spans && tensor->written[last].begin <= end; last++) {
        if (tensor->written[last].begin < begin)
            begin = tensor->written[last].begin;
        if (tensor->written[last].end > end)
            end = tensor->written[last].end;
    }
    memmove(tensor->written + first + 1, tensor->written + last, (tensor->spans - last) * sizeof *tensor->written);
    tensor->written[first] = (struct span){ begin, end };
    tensor->spans = tensor->spans - (last - first) + 1;
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
    /* Room first: what is on disk must not fail to be noted. */
    struct span *written = nib_grow(tensor->written, &tensor->spans_capacity, tensor->spans + 1, sizeof *written);
    if (!written)
        return no_memory(writer->path);
    tensor->written = written;
    TRY(write_bytes(writer, writer->data_begin + tensor->begin + offset, data, bytes));
    note_written(tensor, offset, offset + bytes);
    return NIB_OK;
}

static nib_status check_complete(const nib_writer *writer)
{
    if (writer->broken)
        return nib_fail(NIB_ERR_IO, "%s: not committed, because an earlier write failed", writer->path);
    for (size_t i = 0; i < writer->names.order.n; i++) {
        const struct declared *tensor = &writer->tensors[i];
        const struct span *span = tensor->written;
        if (tensor->bytes == 0 || (tensor->spans && span->begin == 0 && span->end == tensor->bytes))
            continue;
        const bool late = !tensor->spans || span->begin > 0; /* the gap is before the first span */
        const uint64_t begin = late ? 0 : span->end;
        const uint64_t end =
            late ? (tensor->spans ? span->begin : tensor->bytes) : (tensor->spans > 1 ? span[1].begin : tensor->bytes);
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: bytes %llu to %llu of %llu were never written", writer->path,
                        nib_quote(nib_names_get(&writer->names, (uint32_t)i)).text, (unsigned long long)begin,
                        (unsigned long long)end, (unsigned long long)tensor->bytes);
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
        nib_free(writer->tensors[i].written);
    nib_free(writer->tensors);
    nib_free(writer->dims);
    nib_names_free(&writer->names);
    nib_names_free(&writer->keys);
    nib_free(writer->path);
    nib_free(writer->temporary);
    nib_free(writer);
}
