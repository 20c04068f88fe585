/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.c - the strict reader of the safetensors container.
 *
 * It accepts what the reference reader accepts, except for what the format forbids and the reference does not notice
 * (repeated names, entries in array form) and what a C string cannot hold (NUL). The tensors must cover the data exactly.
 */
#include "file/safetensors.h"

#include "base/os.h"

const char *nib_safetensors_bytes(nib_dtype dtype, const int64_t *shape, size_t rank, uint64_t *bytes)
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

char *nib_safetensors_copy_path(const char *path)
{
    const size_t bytes = strlen(path) + 1;
    char *copy = nib_alloc(bytes);
    return copy ? memcpy(copy, path, bytes) : NULL;
}

nib_status nib_safetensors_no_memory(const char *path)
{
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its header", path);
}

const char *nib_safetensors_value(const struct nib_names *keys, uint32_t id)
{
    const char *key = nib_names_get(keys, id);
    return key + strlen(key) + 1;
}

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
            return nib_safetensors_no_memory(file->path);
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
    const char *fault = nib_safetensors_bytes(entry->dtype, shape_of(file, entry), entry->rank, &bytes);
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
        return nib_safetensors_no_memory(file->path);
    file->entries = entries;
    entries[n] = (struct entry){ 0 };
    nib_status status = read_entry(file, json, &entries[n]);
    if (status == NIB_ERR_DATA)
        return nib_fail(status, "tensor %s: %s", nib_quote(file->names.text.bytes + name).text, nib_last_error());
    TRY(status);
    return nib_names_add(&file->names, name) ? NIB_OK : nib_safetensors_no_memory(file->path);
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
            return nib_safetensors_no_memory(file->path);
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
        if (strcmp(text->bytes + name, NIB_SAFETENSORS_METADATA) != 0) {
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
            status = nib_safetensors_no_memory(file->path);
    if (!status) {
        nib_order_finish(&order, range_after, file->entries);
        status = check_chain(file, order.ids);
    }
    nib_order_free(&order);
    return status;
}

/* DATA messages leave here without the path. */
static nib_status read_file(struct nib_file *file, uint64_t file_bytes)
{
    uint64_t header_bytes;
    if (file_bytes < NIB_SAFETENSORS_LENGTH_BYTES)
        return nib_fail(NIB_ERR_DATA, "it has %llu bytes, and a safetensors file has at least 8",
                        (unsigned long long)file_bytes);
    TRY(nib_os_read_at(file->fd, file->path, 0, &header_bytes, sizeof header_bytes));
    if (header_bytes > NIB_SAFETENSORS_MAX_HEADER)
        return nib_fail(NIB_ERR_DATA, "its header claims %llu bytes, and %d are the most there may be",
                        (unsigned long long)header_bytes, NIB_SAFETENSORS_MAX_HEADER);
    if (header_bytes > file_bytes - NIB_SAFETENSORS_LENGTH_BYTES)
        return nib_fail(NIB_ERR_DATA, "its header claims %llu bytes, but the file has only %llu after its length",
                        (unsigned long long)header_bytes,
                        (unsigned long long)(file_bytes - NIB_SAFETENSORS_LENGTH_BYTES));
    file->header_bytes = header_bytes;
    file->data_bytes = file_bytes - NIB_SAFETENSORS_LENGTH_BYTES - header_bytes;
    struct nib_json json;
    TRY(nib_json_open(&json, file->fd, file->path, NIB_SAFETENSORS_LENGTH_BYTES, header_bytes));
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
    char *copy = file ? nib_safetensors_copy_path(path) : NULL;
    if (!copy) {
        nib_os_close(fd);
        nib_free(file);
        return nib_safetensors_no_memory(path);
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

const char *nib_file_metadata(const nib_file *file, const char *key)
{
    uint32_t id;
    size_t place;
    return file && key && nib_names_find(&file->keys, key, &id, &place) ? nib_safetensors_value(&file->keys, id) : NULL;
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
    *value = nib_safetensors_value(&file->keys, id);
    return NIB_OK;
}

uint64_t nib_file_data_begin(const nib_file *file) { return NIB_SAFETENSORS_LENGTH_BYTES + file->header_bytes; }

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
    return nib_os_read_at(file->fd, file->path,
                          NIB_SAFETENSORS_LENGTH_BYTES + file->header_bytes + entry->begin + offset, out, bytes);
}
