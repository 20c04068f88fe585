/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_write.c - the plan and the writer of the GGUF container: its files appear complete or not at all.
 */
#include "io/gguf.h"

#include "file/json.h"
#include "base/os.h"
#include "file/interval_set.h"

enum { VERSION = 3, HEAD_BYTES = 24, ALIGNMENT = NIB_GGUF_DEFAULT_ALIGNMENT };

struct declared {
    uint64_t begin, bytes;
    int64_t shape[NIB_GGUF_MAX_RANK];
    uint32_t type;
    int rank;
};

struct nib_gguf_plan {
    char *path;
    bool sealed;           /* a writer holds it */
    struct nib_names keys; /* to find repeated ones */
    struct nib_text pairs; /* keys and values as they will lie in the file */
    struct nib_names names;
    struct declared *tensors; /* tensors[i] belongs to name i */
    size_t tensors_capacity;
    uint64_t entry_bytes; /* of the tensors' part of the header */
    uint64_t data_bytes;  /* with every tensor padded */
};

static uint64_t padded(uint64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

nib_status nib_gguf_plan_create(const char *path, nib_gguf_plan **out)
{
    NIB_REQUIRE(path);
    NIB_REQUIRE(out);
    nib_gguf_plan *plan = nib_alloc_zeroed(sizeof *plan);
    char *own = plan ? nib_gguf_copy_path(path) : NULL;
    if (!own) {
        nib_free(plan);
        return nib_gguf_no_memory(path);
    }
    plan->path = own;
    *out = plan;
    return NIB_OK;
}

void nib_gguf_plan_destroy(nib_gguf_plan *plan)
{
    if (!plan)
        return;
    nib_names_free(&plan->keys);
    nib_names_free(&plan->names);
    nib_free(plan->pairs.bytes);
    nib_free(plan->tensors);
    nib_free(plan->path);
    nib_free(plan);
}

static uint64_t header_bytes(const nib_gguf_plan *plan) { return HEAD_BYTES + plan->pairs.used + plan->entry_bytes; }

static nib_status check_room(const nib_gguf_plan *plan, uint64_t more)
{
    if (plan->sealed)
        return nib_fail(NIB_ERR_ARG, "%s: everything must be declared before the writer is created", plan->path);
    if (more > NIB_GGUF_MAX_HEADER - header_bytes(plan))
        return nib_fail(NIB_ERR_ARG, "%s: its header would be longer than the %d bytes that nib allows", plan->path,
                        NIB_GGUF_MAX_HEADER);
    return NIB_OK;
}

/* ---- Keys ---- */

/* What stands before the bytes of a value: its kind, of an array the kind and count of its items, and the length of a
 * string. */
struct head {
    unsigned char bytes[16];
    size_t used;
};

static void head_put(struct head *head, const void *bytes, size_t count)
{
    memcpy(head->bytes + head->used, bytes, count);
    head->used += count;
}

static struct head make_head(enum nib_gguf_kind kind, enum nib_gguf_kind item, uint64_t count)
{
    const uint32_t kinds[2] = { kind, item };
    struct head head = { .used = 0 };
    head_put(&head, kinds, kind == NIB_GGUF_KIND_ARRAY ? sizeof kinds : sizeof *kinds);
    if (kind == NIB_GGUF_KIND_ARRAY || kind == NIB_GGUF_KIND_STRING)
        head_put(&head, &count, sizeof count);
    return head;
}

static nib_status check_key(const nib_gguf_plan *plan, const char *key)
{
    uint32_t id;
    size_t place;
    const char *fault = NULL;
    if (!*key)
        fault = "a key needs a name";
    else if (strlen(key) > NIB_GGUF_MAX_KEY)
        fault = "it is longer than the 65535 bytes that the format allows";
    else if (!nib_utf8_valid(key))
        fault = "the key is not UTF-8";
    else if (!strcmp(key, NIB_GGUF_ALIGNMENT))
        fault = "files are written with an alignment of 32, which needs no key";
    else if (nib_names_find(&plan->keys, key, &id, &place))
        fault = "it is given twice";
    return fault ? nib_fail(NIB_ERR_ARG, "%s: key %s: %s", plan->path, nib_quote(key).text, fault) : NIB_OK;
}

/* A key with `bytes` of value, which the caller fills in at *value. */
static nib_status put_pair(nib_gguf_plan *plan, const char *key, struct head head, uint64_t bytes, char **value)
{
    TRY(check_key(plan, key));
    const uint64_t length = strlen(key), whole = sizeof length + length + head.used + bytes;
    TRY(check_room(plan, bytes));
    TRY(check_room(plan, whole));
    const size_t start = plan->keys.text.used;
    char *grown = nib_grow(plan->pairs.bytes, &plan->pairs.capacity, plan->pairs.used + whole, 1);
    if (grown)
        plan->pairs.bytes = grown;
    if (!grown || !nib_text_put(&plan->keys.text, key, length + 1) || !nib_names_add(&plan->keys, start)) {
        plan->keys.text.used = start;
        return nib_gguf_no_memory(plan->path);
    }
    char *at = grown + plan->pairs.used;
    memcpy(at, &length, sizeof length);
    memcpy(at + sizeof length, key, length);
    memcpy(at + sizeof length + length, head.bytes, head.used);
    *value = at + sizeof length + length + head.used;
    plan->pairs.used += whole;
    return NIB_OK;
}

nib_status nib_gguf_put_string(nib_gguf_plan *plan, const char *key, const char *value)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(key);
    NIB_REQUIRE(value);
    if (!nib_utf8_valid(value))
        return nib_fail(NIB_ERR_ARG, "%s: key %s: the value is not UTF-8", plan->path, nib_quote(key).text);
    const size_t bytes = strlen(value);
    char *at;
    TRY(put_pair(plan, key, make_head(NIB_GGUF_KIND_STRING, NIB_GGUF_KIND_STRING, bytes), bytes, &at));
    memcpy(at, value, bytes);
    return NIB_OK;
}

nib_status nib_gguf_put_integer(nib_gguf_plan *plan, const char *key, enum nib_gguf_kind kind, int64_t value)
{
    static const struct {
        bool overrides;
        int64_t least, most;
    } ranges[NIB_GGUF_KIND_COUNT] = {
        [NIB_GGUF_KIND_U8] = { true, 0, UINT8_MAX },
        [NIB_GGUF_KIND_I8] = { true, INT8_MIN, INT8_MAX },
        [NIB_GGUF_KIND_U16] = { true, 0, UINT16_MAX },
        [NIB_GGUF_KIND_I16] = { true, INT16_MIN, INT16_MAX },
        [NIB_GGUF_KIND_U32] = { true, 0, UINT32_MAX },
        [NIB_GGUF_KIND_I32] = { true, INT32_MIN, INT32_MAX },
        [NIB_GGUF_KIND_BOOL] = { true, 0, 1 },
        [NIB_GGUF_KIND_U64] = { true, 0, INT64_MAX },
        [NIB_GGUF_KIND_I64] = { true, INT64_MIN, INT64_MAX },
    };
    NIB_REQUIRE(plan);
    NIB_REQUIRE(key);
    if ((unsigned)kind >= NIB_GGUF_KIND_COUNT || !ranges[kind].overrides)
        return nib_fail(NIB_ERR_ARG, "%s: key %s: kind %d is not an integer", plan->path, nib_quote(key).text,
                        (int)kind);
    if (value < ranges[kind].least || value > ranges[kind].most)
        return nib_fail(NIB_ERR_ARG, "%s: key %s: %lld is outside %s", plan->path, nib_quote(key).text,
                        (long long)value, nib_gguf_kind_name(kind));
    char *at;
    TRY(put_pair(plan, key, make_head(kind, kind, 1), nib_gguf_kind_bytes(kind), &at));
    memcpy(at, &value, nib_gguf_kind_bytes(kind)); /* little-endian: the low bytes come first */
    return NIB_OK;
}

nib_status nib_gguf_put_float(nib_gguf_plan *plan, const char *key, float value)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(key);
    char *at;
    TRY(put_pair(plan, key, make_head(NIB_GGUF_KIND_F32, NIB_GGUF_KIND_F32, 1), sizeof value, &at));
    memcpy(at, &value, sizeof value);
    return NIB_OK;
}

static nib_status check_items(const nib_gguf_plan *plan, const char *key, size_t count)
{
    if (count > NIB_GGUF_MAX_ITEMS)
        return nib_fail(NIB_ERR_ARG, "%s: key %s: %zu items are more than the %d that readers accept", plan->path,
                        nib_quote(key).text, count, NIB_GGUF_MAX_ITEMS);
    return NIB_OK;
}

nib_status nib_gguf_put_strings(nib_gguf_plan *plan, const char *key, const char *const *strings, size_t count)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(key);
    if (count)
        NIB_REQUIRE(strings);
    TRY(check_items(plan, key, count));
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        NIB_REQUIRE(strings[i]);
        if (!nib_utf8_valid(strings[i]))
            return nib_fail(NIB_ERR_ARG, "%s: key %s: string %zu is not UTF-8", plan->path, nib_quote(key).text, i);
        bytes += sizeof(uint64_t) + strlen(strings[i]);
    }
    char *at;
    TRY(put_pair(plan, key, make_head(NIB_GGUF_KIND_ARRAY, NIB_GGUF_KIND_STRING, count), bytes, &at));
    for (size_t i = 0; i < count; i++) {
        const uint64_t length = strlen(strings[i]);
        memcpy(at, &length, sizeof length);
        memcpy(at + sizeof length, strings[i], length);
        at += sizeof length + length;
    }
    return NIB_OK;
}

nib_status nib_gguf_put_array(nib_gguf_plan *plan, const char *key, enum nib_gguf_kind item, const void *items,
                              size_t count)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(key);
    if (count)
        NIB_REQUIRE(items);
    if ((unsigned)item >= NIB_GGUF_KIND_COUNT || !nib_gguf_kind_bytes(item))
        return nib_fail(NIB_ERR_ARG, "%s: key %s: kind %d is not a number", plan->path, nib_quote(key).text, (int)item);
    TRY(check_items(plan, key, count));
    const uint64_t bytes = count * nib_gguf_kind_bytes(item);
    char *at;
    TRY(put_pair(plan, key, make_head(NIB_GGUF_KIND_ARRAY, item, count), bytes, &at));
    if (bytes)
        memcpy(at, items, bytes);
    return NIB_OK;
}

nib_status nib_gguf_put_copy(nib_gguf_plan *plan, const nib_gguf *file, size_t index)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(file);
    struct nib_gguf_value value;
    TRY(nib_gguf_value(file, index, &value));
    const bool string = value.kind == NIB_GGUF_KIND_STRING;
    const struct head head = make_head(value.kind, value.item, string ? value.bytes : value.count);
    TRY(check_key(plan, value.key));
    TRY(check_room(plan, value.bytes));
    /* Read first: what cannot be read must not leave a key without a value. */
    char *bytes = nib_alloc((size_t)value.bytes), *at;
    nib_status status =
        bytes ? nib_gguf_read_value(file, index, 0, bytes, (size_t)value.bytes) : nib_gguf_no_memory(plan->path);
    if (!status)
        status = put_pair(plan, value.key, head, value.bytes, &at);
    if (!status)
        memcpy(at, bytes, (size_t)value.bytes);
    nib_free(bytes);
    return status;
}

bool nib_gguf_plan_has_key(const nib_gguf_plan *plan, const char *key)
{
    uint32_t id;
    size_t place;
    return nib_names_find(&plan->keys, key, &id, &place);
}

nib_status nib_gguf_put_keys(nib_gguf_plan *plan, const nib_gguf_plan *from)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(from);
    TRY(check_room(plan, from->pairs.used));
    for (uint32_t i = 0; i < from->keys.order.n; i++) {
        const char *key = nib_names_get(&from->keys, i);
        const size_t start = plan->keys.text.used;
        TRY(check_key(plan, key));
        if (!nib_text_put(&plan->keys.text, key, strlen(key) + 1) || !nib_names_add(&plan->keys, start)) {
            plan->keys.text.used = start;
            return nib_gguf_no_memory(plan->path);
        }
    }
    return nib_text_put(&plan->pairs, from->pairs.bytes, from->pairs.used) ? NIB_OK : nib_gguf_no_memory(plan->path);
}

/* ---- Tensors ---- */

static nib_status check_name(const nib_gguf_plan *plan, const char *name)
{
    uint32_t id;
    size_t place;
    const char *fault = NULL;
    if (!*name)
        fault = "a tensor needs a name";
    else if (!nib_utf8_valid(name))
        fault = "the name is not UTF-8";
    else if (nib_names_find(&plan->names, name, &id, &place))
        fault = "it is declared twice";
    if (fault)
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: %s", plan->path, nib_quote(name).text, fault);
    if (strlen(name) > NIB_GGUF_MAX_NAME)
        return nib_fail(NIB_ERR_ARG,
                        "%s: tensor %s: the name has %zu bytes, and GGUF allows at most %d: rename it, or write "
                        "safetensors",
                        plan->path, nib_quote(name).text, strlen(name), NIB_GGUF_MAX_NAME);
    return NIB_OK;
}

/* The message without the tensor. */
static nib_status check_tensor(const nib_gguf_plan *plan, uint32_t type, int rank, const int64_t *shape,
                               uint64_t *bytes)
{
    if (!nib_gguf_type_facts(type))
        return nib_fail(NIB_ERR_DTYPE, "type %u is unknown, or no longer in use", (unsigned)type);
    if (rank < 0 || rank > NIB_GGUF_MAX_RANK)
        return nib_fail(NIB_ERR_SHAPE, "rank %d is not between 0 and the %d that GGUF has", rank, NIB_GGUF_MAX_RANK);
    if (rank > 0 && !shape)
        return nib_fail(NIB_ERR_ARG, "its shape is NULL");
    for (int i = 0; i < rank; i++)
        if (shape[i] < 0)
            return nib_fail(NIB_ERR_SHAPE, "dim %d is %lld", i, (long long)shape[i]);
    TRY(nib_gguf_bytes(NIB_ERR_SHAPE, type, rank, shape, bytes));
    if (*bytes > (uint64_t)INT64_MAX - NIB_GGUF_MAX_HEADER - 2 * ALIGNMENT - plan->data_bytes)
        return nib_fail(NIB_ERR_SHAPE, "the file would be larger than any can be");
    return NIB_OK;
}

nib_status nib_gguf_declare(nib_gguf_plan *plan, const char *name, uint32_t type, int rank, const int64_t *shape)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(name);
    TRY(check_name(plan, name));
    struct declared tensor = { .begin = plan->data_bytes, .type = type, .rank = rank };
    nib_status status = check_tensor(plan, type, rank, shape, &tensor.bytes);
    if (status)
        return nib_fail(status, "%s: tensor %s: %s", plan->path, nib_quote(name).text, nib_last_error());
    const uint64_t more = 8 + strlen(name) + 4 + 8 * (uint64_t)rank + 4 + 8;
    TRY(check_room(plan, more));
    if (rank)
        memcpy(tensor.shape, shape, (size_t)rank * sizeof *shape);
    const size_t n = plan->names.order.n, start = plan->names.text.used;
    struct declared *tensors = nib_grow(plan->tensors, &plan->tensors_capacity, n + 1, sizeof *tensors);
    if (tensors)
        plan->tensors = tensors;
    if (!tensors || !nib_text_put(&plan->names.text, name, strlen(name) + 1) || !nib_names_add(&plan->names, start)) {
        plan->names.text.used = start;
        return nib_gguf_no_memory(plan->path);
    }
    tensors[n] = tensor;
    plan->entry_bytes += more;
    plan->data_bytes += padded(tensor.bytes);
    return NIB_OK;
}

struct nib_gguf_layout nib_gguf_plan_layout(const nib_gguf_plan *plan)
{
    const uint64_t begin = padded(header_bytes(plan));
    return (struct nib_gguf_layout){ .data_begin = begin, .file_bytes = begin + plan->data_bytes };
}

size_t nib_gguf_plan_count(const nib_gguf_plan *plan) { return plan ? plan->names.order.n : 0; }

static nib_status check_index(const nib_gguf_plan *plan, size_t index)
{
    if (index >= plan->names.order.n)
        return nib_fail(NIB_ERR_ARG, "%s: there is no tensor %zu among its %zu", plan->path, index,
                        plan->names.order.n);
    return NIB_OK;
}

nib_status nib_gguf_plan_entry(const nib_gguf_plan *plan, size_t index, struct nib_gguf_entry *out)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(out);
    TRY(check_index(plan, index));
    const struct declared *tensor = &plan->tensors[index];
    *out = (struct nib_gguf_entry){
        .name = nib_names_get(&plan->names, (uint32_t)index),
        .type = tensor->type,
        .rank = tensor->rank,
        .begin = tensor->begin,
        .bytes = tensor->bytes,
    };
    memcpy(out->shape, tensor->shape, sizeof out->shape);
    return NIB_OK;
}

bool nib_gguf_plan_find(const nib_gguf_plan *plan, const char *name, size_t *index)
{
    uint32_t id;
    size_t place;
    if (!nib_names_find(&plan->names, name, &id, &place))
        return false;
    *index = id;
    return true;
}

/* ---- The header ---- */

static char *put(char *at, const void *bytes, size_t count)
{
    memcpy(at, bytes, count);
    return at + count;
}

static char *put_tensor(const nib_gguf_plan *plan, uint32_t id, char *at)
{
    const char *name = nib_names_get(&plan->names, id);
    const struct declared *tensor = &plan->tensors[id];
    const uint64_t length = strlen(name);
    const uint32_t rank = (uint32_t)tensor->rank;
    at = put(at, &length, sizeof length);
    at = put(at, name, length);
    at = put(at, &rank, sizeof rank);
    for (int i = tensor->rank - 1; i >= 0; i--)
        at = put(at, &tensor->shape[i], sizeof tensor->shape[i]);
    at = put(at, &tensor->type, sizeof tensor->type);
    return put(at, &tensor->begin, sizeof tensor->begin);
}

nib_status nib_gguf_plan_header(const nib_gguf_plan *plan, void **out, size_t *bytes)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(out);
    NIB_REQUIRE(bytes);
    const size_t whole = (size_t)nib_gguf_plan_layout(plan).data_begin;
    char *header = nib_alloc_zeroed(whole), *at = header;
    if (!header)
        return nib_gguf_no_memory(plan->path);
    const uint32_t version = VERSION;
    const uint64_t counts[2] = { plan->names.order.n, plan->keys.order.n };
    at = put(at, "GGUF", 4);
    at = put(at, &version, sizeof version);
    at = put(at, counts, sizeof counts);
    if (plan->pairs.used)
        at = put(at, plan->pairs.bytes, plan->pairs.used);
    for (uint32_t id = 0; id < counts[0]; id++)
        at = put_tensor(plan, id, at);
    *out = header;
    *bytes = whole;
    return NIB_OK;
}

/* ---- The writer ---- */

struct nib_gguf_writer {
    int fd; /* -1 when the temporary file is gone or has become the final one */
    char *temporary;
    bool broken; /* the system rejected a write, so the file's bytes are unknown */
    nib_gguf_plan *plan;
    uint64_t data_begin;
    struct nib_interval_set *written; /* of each tensor */
};

static nib_status write_bytes(nib_gguf_writer *writer, uint64_t offset, const void *data, size_t bytes)
{
    const nib_status status = nib_os_write_at(writer->fd, writer->plan->path, offset, data, bytes);
    if (status)
        writer->broken = true;
    return status;
}

static nib_status write_header(nib_gguf_writer *writer)
{
    void *header = NULL;
    size_t bytes = 0;
    TRY(nib_gguf_plan_header(writer->plan, &header, &bytes));
    nib_status status = write_bytes(writer, 0, header, bytes);
    nib_free(header);
    return status;
}

nib_status nib_gguf_writer_create(nib_gguf_plan *plan, nib_gguf_writer **out)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(out);
    if (plan->sealed)
        return nib_fail(NIB_ERR_ARG, "%s: its plan has a writer already", plan->path);
    nib_gguf_writer *writer = nib_alloc_zeroed(sizeof *writer);
    if (!writer)
        return nib_gguf_no_memory(plan->path);
    writer->fd = -1;
    writer->plan = plan;
    writer->data_begin = nib_gguf_plan_layout(plan).data_begin;
    writer->written = nib_alloc_zeroed(plan->names.order.n * sizeof *writer->written);
    nib_status status = writer->written ? nib_os_create_temporary(plan->path, &writer->fd, &writer->temporary)
                                        : nib_gguf_no_memory(plan->path);
    plan->sealed = true;
    if (!status)
        status = write_header(writer);
    if (status)
        nib_gguf_writer_destroy(writer);
    else
        *out = writer;
    return status;
}

static nib_status check_open(const nib_gguf_writer *writer)
{
    if (writer->fd < 0)
        return nib_fail(NIB_ERR_ARG, "%s: only destroy may follow a commit", writer->plan->path);
    return NIB_OK;
}

nib_status nib_gguf_write(nib_gguf_writer *writer, size_t index, uint64_t offset, const void *data, size_t bytes)
{
    NIB_REQUIRE(writer);
    TRY(check_open(writer));
    TRY(check_index(writer->plan, index));
    const struct declared *tensor = &writer->plan->tensors[index];
    if (offset > tensor->bytes || bytes > tensor->bytes - offset)
        return nib_fail(NIB_ERR_ARG, "%s: tensor %s: %zu bytes from byte %llu are not within its %llu bytes",
                        writer->plan->path, nib_quote(nib_names_get(&writer->plan->names, (uint32_t)index)).text, bytes,
                        (unsigned long long)offset, (unsigned long long)tensor->bytes);
    if (bytes == 0)
        return NIB_OK;
    NIB_REQUIRE(data);
    /* Room first: what is on disk must not fail to be noted. */
    if (!nib_interval_set_reserve(&writer->written[index]))
        return nib_gguf_no_memory(writer->plan->path);
    TRY(write_bytes(writer, writer->data_begin + tensor->begin + offset, data, bytes));
    nib_interval_set_add(&writer->written[index], offset, offset + bytes);
    return NIB_OK;
}

static nib_status check_complete(const nib_gguf_writer *writer)
{
    const nib_gguf_plan *plan = writer->plan;
    if (writer->broken)
        return nib_fail(NIB_ERR_IO, "%s: not committed, because an earlier write failed", plan->path);
    for (size_t i = 0; i < plan->names.order.n; i++) {
        struct nib_interval gap;
        if (nib_interval_set_gap(&writer->written[i], plan->tensors[i].bytes, &gap))
            return nib_fail(NIB_ERR_ARG, "%s: tensor %s: bytes %llu to %llu of %llu were never written", plan->path,
                            nib_quote(nib_names_get(&plan->names, (uint32_t)i)).text, (unsigned long long)gap.begin,
                            (unsigned long long)gap.end, (unsigned long long)plan->tensors[i].bytes);
    }
    return NIB_OK;
}

/* Between two tensors nobody has written, and a new file reads as zeros there; but it must also reach its end. */
static nib_status write_last_padding(nib_gguf_writer *writer)
{
    const nib_gguf_plan *plan = writer->plan;
    static const char zeros[ALIGNMENT];
    for (size_t i = plan->names.order.n; i-- > 0;) {
        const struct declared *tensor = &plan->tensors[i];
        if (tensor->bytes)
            return write_bytes(writer, writer->data_begin + tensor->begin + tensor->bytes, zeros,
                               (size_t)(padded(tensor->bytes) - tensor->bytes));
    }
    return NIB_OK;
}

/* Take back what is on disk; nothing happens after a commit. */
static void abandon(nib_gguf_writer *writer)
{
    if (writer->fd < 0)
        return;
    nib_os_close(writer->fd);
    writer->fd = -1;
    nib_os_remove(writer->temporary);
}

nib_status nib_gguf_commit(nib_gguf_writer *writer)
{
    NIB_REQUIRE(writer);
    TRY(check_open(writer));
    nib_status status = check_complete(writer);
    if (!status)
        status = write_last_padding(writer);
    if (status) {
        abandon(writer);
        return status;
    }
    const int fd = writer->fd;
    writer->fd = -1; /* closed by publish, whatever comes of it */
    status = nib_os_publish(fd, writer->temporary, writer->plan->path);
    if (status)
        nib_os_remove(writer->temporary);
    return status;
}

void nib_gguf_writer_destroy(nib_gguf_writer *writer)
{
    if (!writer)
        return;
    abandon(writer);
    for (size_t i = 0; writer->written && i < writer->plan->names.order.n; i++)
        nib_interval_set_free(&writer->written[i]);
    nib_free(writer->written);
    nib_free(writer->temporary);
    writer->plan->sealed = false;
    nib_free(writer);
}
