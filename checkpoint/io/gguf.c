/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf.c - the strict reader of the GGUF container, and the facts of its types.
 *
 * The header passes through a small window. Of a string or an array only its place is kept, so that a tokenizer of
 * hundreds of thousands of tokens costs nothing until somebody asks for it.
 */
#include "io/gguf.h"

#include "file/json.h"
#include "base/os.h"

enum { CHUNK = 1 << 16 };

/* ---- Types and kinds ---- */

static const struct nib_gguf_type_facts types[] = {
    [NIB_GGUF_F32] = { "F32", 1, 4 },
    [NIB_GGUF_F16] = { "F16", 1, 2 },
    [NIB_GGUF_Q4_0] = { "Q4_0", 32, 18 },
    [NIB_GGUF_Q4_1] = { "Q4_1", 32, 20 },
    [NIB_GGUF_Q5_0] = { "Q5_0", 32, 22 },
    [NIB_GGUF_Q5_1] = { "Q5_1", 32, 24 },
    [NIB_GGUF_Q8_0] = { "Q8_0", 32, 34 },
    [9] = { "Q8_1", 32, 40 },
    [NIB_GGUF_Q2_K] = { "Q2_K", 256, 84 },
    [NIB_GGUF_Q3_K] = { "Q3_K", 256, 110 },
    [NIB_GGUF_Q4_K] = { "Q4_K", 256, 144 },
    [NIB_GGUF_Q5_K] = { "Q5_K", 256, 176 },
    [NIB_GGUF_Q6_K] = { "Q6_K", 256, 210 },
    [15] = { "Q8_K", 256, 292 },
    [16] = { "IQ2_XXS", 256, 66 },
    [17] = { "IQ2_XS", 256, 74 },
    [18] = { "IQ3_XXS", 256, 98 },
    [19] = { "IQ1_S", 256, 50 },
    [NIB_GGUF_IQ4_NL] = { "IQ4_NL", 32, 18 },
    [21] = { "IQ3_S", 256, 110 },
    [22] = { "IQ2_S", 256, 82 },
    [NIB_GGUF_IQ4_XS] = { "IQ4_XS", 256, 136 },
    [NIB_GGUF_I8] = { "I8", 1, 1 },
    [NIB_GGUF_I16] = { "I16", 1, 2 },
    [NIB_GGUF_I32] = { "I32", 1, 4 },
    [NIB_GGUF_I64] = { "I64", 1, 8 },
    [NIB_GGUF_F64] = { "F64", 1, 8 },
    [29] = { "IQ1_M", 256, 56 },
    [NIB_GGUF_BF16] = { "BF16", 1, 2 },
    [34] = { "TQ1_0", 256, 54 },
    [35] = { "TQ2_0", 256, 66 },
    [NIB_GGUF_MXFP4] = { "MXFP4", NIB_GGUF_MXFP4_ELEMENTS, NIB_GGUF_MXFP4_BYTES },
    [NIB_GGUF_NVFP4] = { "NVFP4", NIB_GGUF_NVFP4_ELEMENTS, NIB_GGUF_NVFP4_BYTES },
    [41] = { "Q1_0", 128, 18 },
};

const struct nib_gguf_type_facts *nib_gguf_type_facts(uint32_t type)
{
    return type < sizeof types / sizeof *types && types[type].name ? &types[type] : NULL;
}

static const struct {
    nib_dtype dtype;
    uint32_t type;
} pairs[] = {
    { NIB_F32, NIB_GGUF_F32 }, { NIB_F16, NIB_GGUF_F16 }, { NIB_BF16, NIB_GGUF_BF16 }, { NIB_F64, NIB_GGUF_F64 },
    { NIB_I8, NIB_GGUF_I8 },   { NIB_I16, NIB_GGUF_I16 }, { NIB_I32, NIB_GGUF_I32 },   { NIB_I64, NIB_GGUF_I64 },
};

bool nib_gguf_type_of_dtype(nib_dtype dtype, uint32_t *type)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (pairs[i].dtype == dtype) {
            *type = pairs[i].type;
            return true;
        }
    return false;
}

bool nib_gguf_dtype_of_type(uint32_t type, nib_dtype *dtype)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (pairs[i].type == type) {
            *dtype = pairs[i].dtype;
            return true;
        }
    return false;
}

nib_status nib_gguf_bytes(nib_status fault, uint32_t type, int rank, const int64_t *shape, uint64_t *bytes)
{
    const struct nib_gguf_type_facts *facts = nib_gguf_type_facts(type);
    if (!facts)
        return nib_fail(fault, "type %u is unknown, or no longer in use", (unsigned)type);
    const int64_t row = rank > 0 ? shape[rank - 1] : 1;
    if (row % facts->elements)
        return nib_fail(fault, "its rows have %lld elements, which are not whole blocks of %s: those have %u",
                        (long long)row, facts->name, (unsigned)facts->elements);
    /* A dim of 0 makes the product 0, but the others must still be sane. */
    int64_t elements = 1, size;
    bool empty = false;
    for (int i = 0; i < rank; i++) {
        if (!nib_mul(elements, shape[i] ? shape[i] : 1, &elements))
            return nib_fail(fault, "the product of its dims is larger than 63 bits hold");
        empty |= shape[i] == 0;
    }
    if (!nib_mul(nib_ceil_div(elements, facts->elements), facts->bytes, &size))
        return nib_fail(fault, "its size in bytes is larger than 63 bits hold");
    *bytes = empty ? 0 : (uint64_t)size;
    return NIB_OK;
}

static const struct {
    const char *name;
    uint8_t bytes;
    bool is_signed;
} kinds[NIB_GGUF_KIND_COUNT] = {
    [NIB_GGUF_KIND_U8] = { "u8", 1, false },         [NIB_GGUF_KIND_I8] = { "i8", 1, true },
    [NIB_GGUF_KIND_U16] = { "u16", 2, false },       [NIB_GGUF_KIND_I16] = { "i16", 2, true },
    [NIB_GGUF_KIND_U32] = { "u32", 4, false },       [NIB_GGUF_KIND_I32] = { "i32", 4, true },
    [NIB_GGUF_KIND_F32] = { "f32", 4, false },       [NIB_GGUF_KIND_BOOL] = { "bool", 1, false },
    [NIB_GGUF_KIND_STRING] = { "string", 0, false }, [NIB_GGUF_KIND_ARRAY] = { "array", 0, false },
    [NIB_GGUF_KIND_U64] = { "u64", 8, false },       [NIB_GGUF_KIND_I64] = { "i64", 8, true },
    [NIB_GGUF_KIND_F64] = { "f64", 8, false },
};

const char *nib_gguf_kind_name(uint32_t kind) { return kind < NIB_GGUF_KIND_COUNT ? kinds[kind].name : NULL; }

size_t nib_gguf_kind_bytes(enum nib_gguf_kind kind) { return kinds[kind].bytes; }

char *nib_gguf_copy_path(const char *path)
{
    const size_t bytes = strlen(path) + 1;
    char *copy = nib_alloc(bytes);
    return copy ? memcpy(copy, path, bytes) : NULL;
}

nib_status nib_gguf_no_memory(const char *path)
{
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its header", path);
}

/* ---- The file ---- */

struct entry {
    uint64_t begin, bytes;
    int64_t shape[NIB_GGUF_MAX_RANK];
    uint32_t type;
    int rank;
};

struct pair {
    uint64_t begin, bytes; /* of the value in the file, without the length of a string or the head of an array */
    uint64_t count;
    uint64_t bits; /* of a number: sign-extended, or a double */
    uint8_t kind, item;
};

struct nib_gguf {
    int fd;
    char *path;
    uint64_t file_bytes;
    struct nib_gguf_facts facts;
    struct nib_names names; /* entries[i] belongs to name i */
    struct entry *entries;
    size_t entries_capacity;
    struct nib_names keys; /* pairs[i] belongs to key i */
    struct pair *pairs;
    size_t pairs_capacity;
};

/* ---- The window ---- */

struct source {
    const struct nib_gguf *file;
    unsigned char *chunk;
    uint64_t next; /* in the file: the first byte that is not in the chunk */
    size_t at, filled;
    uint64_t kept; /* bytes of keys, names and entries so far */
};

static uint64_t position(const struct source *source) { return source->next - (source->filled - source->at); }

static uint64_t left(const struct source *source) { return source->file->file_bytes - position(source); }

/* There must be so many left. */
static nib_status copy(struct source *source, void *out, size_t bytes)
{
    for (char *to = out; bytes;) {
        if (source->at == source->filled) {
            const uint64_t rest = left(source);
            const size_t wanted = rest < CHUNK ? (size_t)rest : CHUNK;
            TRY(nib_os_read_at(source->file->fd, source->file->path, source->next, source->chunk, wanted));
            source->next += wanted;
            source->at = 0;
            source->filled = wanted;
        }
        const size_t here = source->filled - source->at, part = bytes < here ? bytes : here;
        memcpy(to, source->chunk + source->at, part);
        source->at += part;
        to += part;
        bytes -= part;
    }
    return NIB_OK;
}

static nib_status take(struct source *source, const char *what, void *out, size_t bytes)
{
    if (bytes > left(source))
        return nib_fail(NIB_ERR_DATA, "the file ends within %s", what);
    return copy(source, out, bytes);
}

static nib_status skip(struct source *source, const char *what, uint64_t bytes)
{
    if (bytes > left(source))
        return nib_fail(NIB_ERR_DATA, "%s claims %llu bytes, but the file has only %llu more", what,
                        (unsigned long long)bytes, (unsigned long long)left(source));
    const uint64_t here = source->filled - source->at;
    if (bytes <= here) {
        source->at += (size_t)bytes;
    } else {
        source->next += bytes - here;
        source->at = source->filled = 0;
    }
    return NIB_OK;
}

/* Keys and entries stay in memory, and their texts are found by 32 bits. */
static nib_status keep(struct source *source, uint64_t bytes)
{
    source->kept += bytes;
    if (source->kept > NIB_GGUF_MAX_HEADER)
        return nib_fail(NIB_ERR_DATA, "its keys and tensor entries take more than the %d bytes that nib allows",
                        NIB_GGUF_MAX_HEADER);
    return NIB_OK;
}

/* A key or a tensor's name: put it at the end of the text. */
static nib_status take_name(struct source *source, const char *what, struct nib_text *text, uint64_t most)
{
    uint64_t bytes;
    TRY(take(source, what, &bytes, sizeof bytes));
    if (bytes == 0)
        return nib_fail(NIB_ERR_DATA, "%s is empty", what);
    if (bytes > most)
        return nib_fail(NIB_ERR_DATA, "%s has %llu bytes, more than the limit of %llu", what, (unsigned long long)bytes,
                        (unsigned long long)most);
    TRY(keep(source, sizeof bytes + bytes));
    char *grown = nib_grow(text->bytes, &text->capacity, text->used + bytes + 1, 1);
    if (!grown)
        return nib_gguf_no_memory(source->file->path);
    text->bytes = grown;
    char *name = grown + text->used;
    TRY(take(source, what, name, bytes));
    name[bytes] = '\0';
    if (strlen(name) < bytes)
        return nib_fail(NIB_ERR_DATA, "%s %s holds a NUL", what, nib_quote(name).text);
    if (!nib_utf8_valid(name))
        return nib_fail(NIB_ERR_DATA, "%s %s is not UTF-8", what, nib_quote(name).text);
    text->used += bytes + 1;
    return NIB_OK;
}

/* ---- Keys ---- */

static nib_status take_kind(struct source *source, const char *what, uint8_t *out)
{
    uint32_t kind;
    TRY(take(source, what, &kind, sizeof kind));
    if (kind >= NIB_GGUF_KIND_COUNT)
        return nib_fail(NIB_ERR_DATA, "%s %u is unknown", what, (unsigned)kind);
    *out = (uint8_t)kind;
    return NIB_OK;
}

static nib_status take_number(struct source *source, struct pair *pair)
{
    const size_t bytes = kinds[pair->kind].bytes;
    pair->begin = position(source);
    pair->bytes = bytes;
    TRY(take(source, "its value", &pair->bits, bytes));
    if (pair->kind == NIB_GGUF_KIND_F32) {
        float number;
        memcpy(&number, &pair->bits, sizeof number);
        const double wide = number;
        memcpy(&pair->bits, &wide, sizeof wide);
    } else if (pair->kind == NIB_GGUF_KIND_BOOL) {
        pair->bits = pair->bits != 0; /* readers take any other byte for true */
    } else if (kinds[pair->kind].is_signed) {
        const uint64_t sign = UINT64_C(1) << (8 * bytes - 1);
        pair->bits = (pair->bits ^ sign) - sign;
    }
    return NIB_OK;
}

/* Pass one string and tell where its bytes are. */
static nib_status pass_string(struct source *source, const char *what, uint64_t *begin, uint64_t *bytes)
{
    TRY(take(source, what, bytes, sizeof *bytes));
    if (*bytes > NIB_GGUF_MAX_STRING)
        return nib_fail(NIB_ERR_DATA, "%s has %llu bytes, more than the limit of %d", what, (unsigned long long)*bytes,
                        NIB_GGUF_MAX_STRING);
    *begin = position(source);
    return skip(source, what, *bytes);
}

static nib_status take_array(struct source *source, struct pair *pair)
{
    TRY(take_kind(source, "the kind of its items", &pair->item));
    if (pair->item == NIB_GGUF_KIND_ARRAY)
        return nib_fail(NIB_ERR_DATA, "it is an array of arrays, which no reader accepts");
    TRY(take(source, "its count", &pair->count, sizeof pair->count));
    if (pair->count > NIB_GGUF_MAX_ITEMS)
        return nib_fail(NIB_ERR_DATA, "its array has %llu items, more than the limit of %d",
                        (unsigned long long)pair->count, NIB_GGUF_MAX_ITEMS);
    pair->begin = position(source);
    if (pair->item != NIB_GGUF_KIND_STRING) {
        pair->bytes = pair->count * kinds[pair->item].bytes;
        return skip(source, "its array", pair->bytes);
    }
    for (uint64_t i = 0; i < pair->count; i++) {
        uint64_t begin, bytes;
        nib_status status = pass_string(source, "the string", &begin, &bytes);
        if (status == NIB_ERR_DATA)
            return nib_fail(status, "item %llu of %llu: %s", (unsigned long long)i, (unsigned long long)pair->count,
                            nib_last_error());
        TRY(status);
    }
    pair->bytes = position(source) - pair->begin;
    return NIB_OK;
}

static nib_status take_value(struct source *source, struct pair *pair)
{
    TRY(keep(source, sizeof(uint32_t) + 1));
    TRY(take_kind(source, "its kind", &pair->kind));
    pair->item = pair->kind;
    pair->count = 1;
    if (pair->kind == NIB_GGUF_KIND_ARRAY)
        return take_array(source, pair);
    if (pair->kind == NIB_GGUF_KIND_STRING)
        return pass_string(source, "its string", &pair->begin, &pair->bytes);
    return take_number(source, pair);
}

static nib_status take_alignment(struct nib_gguf *file, const struct pair *pair)
{
    if (pair->kind != NIB_GGUF_KIND_U32)
        return nib_fail(NIB_ERR_DATA, "it is %s, and must be u32", kinds[pair->kind].name);
    if (pair->bits == 0 || pair->bits & (pair->bits - 1))
        return nib_fail(NIB_ERR_DATA, "%llu is not a power of two", (unsigned long long)pair->bits);
    file->facts.alignment = (uint32_t)pair->bits;
    return NIB_OK;
}

static nib_status take_pair(struct nib_gguf *file, struct source *source)
{
    const size_t n = file->keys.order.n, start = file->keys.text.used;
    TRY(take_name(source, "the key", &file->keys.text, NIB_GGUF_MAX_KEY));
    struct pair *grown = nib_grow(file->pairs, &file->pairs_capacity, n + 1, sizeof *grown);
    if (!grown)
        return nib_gguf_no_memory(file->path);
    file->pairs = grown;
    struct pair *pair = &grown[n];
    *pair = (struct pair){ 0 };
    nib_status status = take_value(source, pair);
    const char *key = file->keys.text.bytes + start;
    if (!status && !strcmp(key, NIB_GGUF_ALIGNMENT))
        status = take_alignment(file, pair);
    if (status == NIB_ERR_DATA)
        return nib_fail(status, "key %s: %s", nib_quote(key).text, nib_last_error());
    TRY(status);
    return nib_names_add(&file->keys, start) ? NIB_OK : nib_gguf_no_memory(file->path);
}

static nib_status take_pairs(struct nib_gguf *file, struct source *source, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        TRY(take_pair(file, source));
    nib_names_finish(&file->keys);
    const char *repeated = nib_names_repeated(&file->keys);
    return repeated ? nib_fail(NIB_ERR_DATA, "key %s comes twice", nib_quote(repeated).text) : NIB_OK;
}

/* ---- Tensors ---- */

static nib_status take_shape(struct source *source, struct entry *entry)
{
    uint32_t rank;
    TRY(take(source, "its rank", &rank, sizeof rank));
    if (rank > NIB_GGUF_MAX_RANK)
        return nib_fail(NIB_ERR_DATA, "rank %u is more than %d", (unsigned)rank, NIB_GGUF_MAX_RANK);
    entry->rank = (int)rank;
    for (int i = entry->rank - 1; i >= 0; i--) {
        TRY(take(source, "its dims", &entry->shape[i], sizeof entry->shape[i]));
        if (entry->shape[i] < 0)
            return nib_fail(NIB_ERR_DATA, "dim %d is %lld", i, (long long)entry->shape[i]);
    }
    return NIB_OK;
}

/* Up to the next multiple of a power of two; false where there is none. */
static bool pad(uint64_t bytes, uint64_t alignment, uint64_t *out)
{
    return !__builtin_add_overflow(bytes, alignment - 1 - (bytes + alignment - 1) % alignment, out);
}

/* `end` is where the padded tensors before this one end. */
static nib_status take_entry(struct nib_gguf *file, struct source *source, struct entry *entry, uint64_t *end)
{
    enum { FIXED = sizeof(uint32_t) + sizeof(uint32_t) + sizeof(uint64_t) }; /* rank, type, begin */
    TRY(keep(source, FIXED));
    TRY(take_shape(source, entry));
    TRY(keep(source, sizeof *entry->shape * (uint64_t)entry->rank));
    TRY(take(source, "its type", &entry->type, sizeof entry->type));
    TRY(take(source, "its offset", &entry->begin, sizeof entry->begin));
    TRY(nib_gguf_bytes(NIB_ERR_DATA, entry->type, entry->rank, entry->shape, &entry->bytes));
    if (entry->begin != *end)
        return nib_fail(NIB_ERR_DATA,
                        "its data begins at byte %llu, but the tensors before it, padded to %u, end at byte %llu",
                        (unsigned long long)entry->begin, (unsigned)file->facts.alignment, (unsigned long long)*end);
    uint64_t padded;
    if (!pad(entry->bytes, file->facts.alignment, &padded) || __builtin_add_overflow(*end, padded, end))
        return nib_fail(NIB_ERR_DATA, "its data would end beyond the largest possible file");
    return NIB_OK;
}

static nib_status take_tensor(struct nib_gguf *file, struct source *source, uint64_t *end)
{
    const size_t n = file->names.order.n, start = file->names.text.used;
    TRY(take_name(source, "the name of a tensor", &file->names.text, NIB_GGUF_MAX_NAME));
    struct entry *entries = nib_grow(file->entries, &file->entries_capacity, n + 1, sizeof *entries);
    if (!entries)
        return nib_gguf_no_memory(file->path);
    file->entries = entries;
    entries[n] = (struct entry){ 0 };
    nib_status status = take_entry(file, source, &entries[n], end);
    if (status == NIB_ERR_DATA)
        return nib_fail(status, "tensor %s: %s", nib_quote(file->names.text.bytes + start).text, nib_last_error());
    TRY(status);
    return nib_names_add(&file->names, start) ? NIB_OK : nib_gguf_no_memory(file->path);
}

/* Where the data begins is known only after the last entry. */
static nib_status check_end(struct nib_gguf *file, uint64_t header_bytes, uint64_t padded_end)
{
    if (!pad(header_bytes, file->facts.alignment, &file->facts.data_begin))
        return nib_fail(NIB_ERR_DATA, "its data would begin beyond the largest possible file");
    const uint64_t begin = file->facts.data_begin;
    for (size_t i = 0; i < file->names.order.n; i++) {
        const struct entry *entry = &file->entries[i];
        uint64_t end; /* begin + bytes does not overflow: with its padding it was added before */
        if (entry->bytes == 0 ||
            (!__builtin_add_overflow(begin, entry->begin + entry->bytes, &end) && end <= file->file_bytes))
            continue;
        return nib_fail(NIB_ERR_DATA,
                        "tensor %s: its %llu bytes from byte %llu of the data are not all there, as the file has only "
                        "%llu bytes: it is cut short: download it again",
                        nib_quote(nib_names_get(&file->names, (uint32_t)i)).text, (unsigned long long)entry->bytes,
                        (unsigned long long)entry->begin, (unsigned long long)file->file_bytes);
    }
    uint64_t whole;
    if (!__builtin_add_overflow(begin, padded_end, &whole) && whole < file->file_bytes)
        file->facts.trailing = file->file_bytes - whole;
    return NIB_OK;
}

static nib_status take_tensors(struct nib_gguf *file, struct source *source, uint64_t count)
{
    uint64_t end = 0;
    for (uint64_t i = 0; i < count; i++)
        TRY(take_tensor(file, source, &end));
    nib_names_finish(&file->names);
    const char *repeated = nib_names_repeated(&file->names);
    if (repeated)
        return nib_fail(NIB_ERR_DATA, "tensor %s comes twice", nib_quote(repeated).text);
    return check_end(file, position(source), end);
}

/* ---- The whole ---- */

static nib_status check_version(uint32_t version)
{
    const uint32_t turned = __builtin_bswap32(version);
    if (version == 2 || version == 3)
        return NIB_OK;
    if (version == 1)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "GGUF version 1 is not supported: convert it with a llama.cpp of its time");
    if (turned >= 1 && turned <= 3)
        return nib_fail(NIB_ERR_UNSUPPORTED, "the file is big-endian: convert it to little-endian first");
    return nib_fail(NIB_ERR_UNSUPPORTED, "GGUF version %u is not supported; versions 2 and 3 are", (unsigned)version);
}

/* Before memory is grown for them, counts must be such as the file can hold. */
static nib_status check_count(const struct source *source, const char *what, uint64_t count, uint64_t least)
{
    if (count > left(source) / least)
        return nib_fail(NIB_ERR_DATA, "it claims %llu %s, but has only %llu bytes for them", (unsigned long long)count,
                        what, (unsigned long long)left(source));
    return NIB_OK;
}

/* DATA and UNSUPPORTED messages leave here without the path. */
static nib_status read_header(struct nib_gguf *file, struct source *source)
{
    struct {
        char magic[4];
        uint32_t version;
        uint64_t tensors, keys;
    } head;
    if (file->file_bytes < sizeof head)
        return nib_fail(NIB_ERR_DATA, "it has %llu bytes, and a GGUF file has at least %zu",
                        (unsigned long long)file->file_bytes, sizeof head);
    TRY(copy(source, &head, sizeof head));
    if (memcmp(head.magic, "GGUF", sizeof head.magic) != 0)
        return nib_fail(NIB_ERR_DATA, "it is not a GGUF file: it does not begin with the letters GGUF");
    TRY(check_version(head.version));
    file->facts = (struct nib_gguf_facts){ .version = head.version, .alignment = NIB_GGUF_DEFAULT_ALIGNMENT };
    TRY(check_count(source, "keys", head.keys, 8 + 1 + 4 + 1));
    TRY(check_count(source, "tensors", head.tensors, 8 + 1 + 4 + 4 + 8));
    TRY(take_pairs(file, source, head.keys));
    return take_tensors(file, source, head.tensors);
}

static nib_status read_file(struct nib_gguf *file)
{
    struct source source = { .file = file, .chunk = nib_alloc(CHUNK) };
    if (!source.chunk)
        return nib_gguf_no_memory(file->path);
    nib_status status = read_header(file, &source);
    nib_free(source.chunk);
    return status;
}

nib_status nib_gguf_open(const char *path, nib_gguf **out)
{
    NIB_REQUIRE(path);
    NIB_REQUIRE(out);
    int fd;
    uint64_t bytes;
    TRY(nib_os_open_read(path, &fd, &bytes));
    nib_gguf *file = nib_alloc_zeroed(sizeof *file);
    char *own = file ? nib_gguf_copy_path(path) : NULL;
    if (!own) {
        nib_os_close(fd);
        nib_free(file);
        return nib_gguf_no_memory(path);
    }
    file->fd = fd;
    file->path = own;
    file->file_bytes = bytes;
    nib_status status = read_file(file);
    if (status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED)
        nib_fail(status, "%s: %s", path, nib_last_error());
    if (status)
        nib_gguf_close(file);
    else
        *out = file;
    return status;
}

void nib_gguf_close(nib_gguf *file)
{
    if (!file)
        return;
    nib_os_close(file->fd);
    nib_names_free(&file->names);
    nib_names_free(&file->keys);
    nib_free(file->entries);
    nib_free(file->pairs);
    nib_free(file->path);
    nib_free(file);
}

const char *nib_gguf_path(const nib_gguf *file) { return file->path; }

struct nib_gguf_facts nib_gguf_facts(const nib_gguf *file) { return file->facts; }

/* ---- Asking for tensors ---- */

size_t nib_gguf_count(const nib_gguf *file) { return file ? file->names.order.n : 0; }

static nib_status check_index(const nib_gguf *file, const char *what, size_t index, size_t count)
{
    if (index >= count)
        return nib_fail(NIB_ERR_ARG, "%s: there is no %s %zu among its %zu", file->path, what, index, count);
    return NIB_OK;
}

nib_status nib_gguf_entry(const nib_gguf *file, size_t index, struct nib_gguf_entry *out)
{
    NIB_REQUIRE(file);
    NIB_REQUIRE(out);
    TRY(check_index(file, "tensor", index, file->names.order.n));
    const struct entry *entry = &file->entries[index];
    *out = (struct nib_gguf_entry){
        .name = nib_names_get(&file->names, (uint32_t)index),
        .type = entry->type,
        .rank = entry->rank,
        .begin = entry->begin,
        .bytes = entry->bytes,
    };
    memcpy(out->shape, entry->shape, sizeof out->shape);
    return NIB_OK;
}

static bool find(const struct nib_names *names, const char *name, size_t *index)
{
    uint32_t id;
    size_t place;
    if (!nib_names_find(names, name, &id, &place))
        return false;
    *index = id;
    return true;
}

bool nib_gguf_find(const nib_gguf *file, const char *name, size_t *index) { return find(&file->names, name, index); }

/* From a part of the file that was seen to be there. */
static nib_status read_part(const nib_gguf *file, const char *what, const char *name, uint64_t begin, uint64_t size,
                            uint64_t offset, void *out, size_t bytes)
{
    if (offset > size || bytes > size - offset)
        return nib_fail(NIB_ERR_ARG, "%s: %s %s: %zu bytes from byte %llu are not within its %llu bytes", file->path,
                        what, nib_quote(name).text, bytes, (unsigned long long)offset, (unsigned long long)size);
    if (bytes == 0)
        return NIB_OK;
    NIB_REQUIRE(out);
    return nib_os_read_at(file->fd, file->path, begin + offset, out, bytes);
}

nib_status nib_gguf_read(const nib_gguf *file, size_t index, uint64_t offset, void *out, size_t bytes)
{
    NIB_REQUIRE(file);
    TRY(check_index(file, "tensor", index, file->names.order.n));
    const struct entry *entry = &file->entries[index];
    return read_part(file, "tensor", nib_names_get(&file->names, (uint32_t)index),
                     file->facts.data_begin + entry->begin, entry->bytes, offset, out, bytes);
}

/* ---- Asking for keys ---- */

size_t nib_gguf_key_count(const nib_gguf *file) { return file ? file->keys.order.n : 0; }

nib_status nib_gguf_value(const nib_gguf *file, size_t index, struct nib_gguf_value *out)
{
    NIB_REQUIRE(file);
    NIB_REQUIRE(out);
    TRY(check_index(file, "key", index, file->keys.order.n));
    const struct pair *pair = &file->pairs[index];
    *out = (struct nib_gguf_value){
        .key = nib_names_get(&file->keys, (uint32_t)index),
        .kind = (enum nib_gguf_kind)pair->kind,
        .item = (enum nib_gguf_kind)pair->item,
        .count = pair->count,
        .bytes = pair->bytes,
    };
    memcpy(&out->number, &pair->bits, sizeof pair->bits);
    return NIB_OK;
}

bool nib_gguf_find_key(const nib_gguf *file, const char *key, size_t *index) { return find(&file->keys, key, index); }

nib_status nib_gguf_read_value(const nib_gguf *file, size_t index, uint64_t offset, void *out, size_t bytes)
{
    NIB_REQUIRE(file);
    TRY(check_index(file, "key", index, file->keys.order.n));
    const struct pair *pair = &file->pairs[index];
    return read_part(file, "key", nib_names_get(&file->keys, (uint32_t)index), pair->begin, pair->bytes, offset, out,
                     bytes);
}

/* A value by its key: false where there is none. */
static bool value_of(const nib_gguf *file, const char *key, struct nib_gguf_value *out, size_t *index, bool *found)
{
    *found = find(&file->keys, key, index) && !nib_gguf_value(file, *index, out);
    return *found;
}

static nib_status wrong_kind(const nib_gguf *file, const struct nib_gguf_value *value, const char *wanted)
{
    const bool array = value->kind == NIB_GGUF_KIND_ARRAY;
    return nib_fail(NIB_ERR_DATA, "%s: key %s is %s%s, and must be %s", file->path, nib_quote(value->key).text,
                    array ? "an array of " : "", kinds[value->item].name, wanted);
}

nib_status nib_gguf_get_integer(const nib_gguf *file, const char *key, int64_t *out, bool *found)
{
    struct nib_gguf_value value;
    size_t index;
    if (!value_of(file, key, &value, &index, found))
        return NIB_OK;
    const bool floating = value.kind == NIB_GGUF_KIND_F32 || value.kind == NIB_GGUF_KIND_F64;
    if (!kinds[value.kind].bytes || floating || value.kind == NIB_GGUF_KIND_BOOL)
        return wrong_kind(file, &value, "an integer");
    if (value.kind == NIB_GGUF_KIND_U64 && value.number.u > INT64_MAX)
        return nib_fail(NIB_ERR_DATA, "%s: key %s: %llu is larger than 63 bits hold", file->path, nib_quote(key).text,
                        (unsigned long long)value.number.u);
    *out = value.number.i;
    return NIB_OK;
}

nib_status nib_gguf_get_number(const nib_gguf *file, const char *key, double *out, bool *found)
{
    struct nib_gguf_value value;
    size_t index;
    if (!value_of(file, key, &value, &index, found))
        return NIB_OK;
    if (!kinds[value.kind].bytes || value.kind == NIB_GGUF_KIND_BOOL)
        return wrong_kind(file, &value, "a number");
    const bool floating = value.kind == NIB_GGUF_KIND_F32 || value.kind == NIB_GGUF_KIND_F64;
    *out = floating ? value.number.f : kinds[value.kind].is_signed ? (double)value.number.i : (double)value.number.u;
    return NIB_OK;
}

nib_status nib_gguf_get_bool(const nib_gguf *file, const char *key, bool *out, bool *found)
{
    struct nib_gguf_value value;
    size_t index;
    if (!value_of(file, key, &value, &index, found))
        return NIB_OK;
    if (value.kind != NIB_GGUF_KIND_BOOL)
        return wrong_kind(file, &value, "a bool");
    *out = value.number.u != 0;
    return NIB_OK;
}

static nib_status no_memory_for(const nib_gguf *file, const struct nib_gguf_value *value)
{
    return nib_fail(NIB_ERR_MEMORY, "%s: key %s: no memory for its %llu bytes", file->path, nib_quote(value->key).text,
                    (unsigned long long)value->bytes);
}

nib_status nib_gguf_get_string(const nib_gguf *file, const char *key, char **out, bool *found)
{
    struct nib_gguf_value value;
    size_t index;
    if (!value_of(file, key, &value, &index, found))
        return NIB_OK;
    if (value.kind != NIB_GGUF_KIND_STRING)
        return wrong_kind(file, &value, "a string");
    char *text = nib_alloc((size_t)value.bytes + 1);
    if (!text)
        return no_memory_for(file, &value);
    text[value.bytes] = '\0';
    nib_status status = nib_gguf_read_value(file, index, 0, text, (size_t)value.bytes);
    if (!status && strlen(text) < value.bytes)
        status = nib_fail(NIB_ERR_DATA, "%s: key %s: its string holds a NUL", file->path, nib_quote(key).text);
    if (status)
        nib_free(text);
    else
        *out = text;
    return status;
}

/* Items as they lie in the file, a length before each string, become strings with a NUL behind: there is space where the
 * length was. False if a length leads beyond the end, which the file cannot do unless it has been changed since. */
static bool unpack(struct nib_gguf_strings *strings, uint64_t bytes, bool *has_nul)
{
    uint64_t from = 0;
    size_t to = 0;
    for (size_t i = 0; i < strings->count; i++) {
        uint64_t length;
        if (bytes - from < sizeof length)
            return false;
        memcpy(&length, strings->text + from, sizeof length);
        from += sizeof length;
        if (length > bytes - from)
            return false;
        memmove(strings->text + to, strings->text + from, (size_t)length);
        *has_nul |= memchr(strings->text + to, '\0', (size_t)length) != NULL;
        strings->starts[i] = to;
        from += length;
        to += (size_t)length;
        strings->text[to++] = '\0';
    }
    return from == bytes;
}

static nib_status read_strings(const nib_gguf *file, const struct nib_gguf_value *value, size_t index,
                               struct nib_gguf_strings *strings)
{
    TRY(nib_gguf_read_value(file, index, 0, strings->text, (size_t)value->bytes));
    bool has_nul = false;
    if (!unpack(strings, value->bytes, &has_nul))
        return nib_fail(NIB_ERR_IO, "%s: key %s: it has changed since the file was opened", file->path,
                        nib_quote(value->key).text);
    if (has_nul)
        return nib_fail(NIB_ERR_DATA, "%s: key %s: one of its strings holds a NUL", file->path,
                        nib_quote(value->key).text);
    return NIB_OK;
}

nib_status nib_gguf_get_strings(const nib_gguf *file, const char *key, struct nib_gguf_strings *out, bool *found)
{
    struct nib_gguf_value value;
    size_t index;
    if (!value_of(file, key, &value, &index, found))
        return NIB_OK;
    if (value.kind != NIB_GGUF_KIND_ARRAY || value.item != NIB_GGUF_KIND_STRING)
        return wrong_kind(file, &value, "an array of strings");
    struct nib_gguf_strings strings = { .count = (size_t)value.count };
    strings.text = nib_alloc((size_t)value.bytes);
    strings.starts = nib_alloc(strings.count * sizeof *strings.starts);
    nib_status status =
        strings.text && strings.starts ? read_strings(file, &value, index, &strings) : no_memory_for(file, &value);
    if (status)
        nib_gguf_strings_free(&strings);
    else
        *out = strings;
    return status;
}

void nib_gguf_strings_free(struct nib_gguf_strings *strings)
{
    nib_free(strings->text);
    nib_free(strings->starts);
    *strings = (struct nib_gguf_strings){ 0 };
}
