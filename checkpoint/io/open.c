/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open.c - from a path to files, tensors and configuration.
 *
 * Everything that names another file is untrusted: the index may say anything. What would be read from a wrong place is
 * rejected; what is merely left over becomes a diagnostic.
 */
#include "io/names.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/gguf.h"
#include "io/hub.h"
#include "file/json.h"
#include "base/os.h"
#include "nib_file.h"

enum {
    CONFIG_LIMIT = 64 << 20,  /* bytes of config.json: vocabularies have been seen in them */
    INDEX_LIMIT = 512 << 20,  /* bytes of an index */
    OBJECT_LIMIT = 256 << 20, /* bytes of a tokenizer, and of what describes one */
    VALUES_LIMIT = 8 << 20, /* values of a JSON file: each takes up to 340 bytes of memory and as few as two of text */
    PROVENANCE_LIMIT = 4 << 20 /* bytes; more than nib ever writes */
};

/* ---- Strings and diagnostics ---- */

struct chunk {
    struct chunk *before;
    size_t used, capacity;
    char bytes[];
};

char *nib_ck_string(nib_checkpoint *c, const char *format, ...)
{
    enum { CHUNK = 1 << 16 };
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0)
        return NULL;
    const size_t bytes = (size_t)length + 1;
    struct chunk *chunk = c->strings;
    if (!chunk || chunk->capacity - chunk->used < bytes) {
        const size_t capacity = bytes > CHUNK ? bytes : CHUNK;
        chunk = nib_alloc(sizeof *chunk + capacity);
        if (!chunk)
            return NULL;
        *chunk = (struct chunk){ .before = c->strings, .capacity = capacity };
        c->strings = chunk;
    }
    char *string = chunk->bytes + chunk->used;
    chunk->used += bytes;
    va_start(arguments, format);
    vsnprintf(string, bytes, format, arguments);
    va_end(arguments);
    return string;
}

nib_status nib_ck_no_memory(const nib_checkpoint *c)
{
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory for what its files list", c->path);
}

nib_status nib_ck_diagnostic(nib_checkpoint *c, const char *id, const char *subject, const char *fact, bool blocks)
{
    struct nib_ck_diagnostic *diagnostics =
        nib_grow(c->diagnostics, &c->diagnostics_capacity, c->n_diagnostics + 1, sizeof *diagnostics);
    if (diagnostics)
        c->diagnostics = diagnostics;
    const char *kept = diagnostics ? nib_ck_string(c, "%s", subject) : NULL;
    if (!kept)
        return nib_ck_no_memory(c);
    const char *message = nib_ck_string(c, "%s", fact);
    if (!message)
        return nib_ck_no_memory(c);
    c->diagnostics[c->n_diagnostics++] = (struct nib_ck_diagnostic){ id, kept, message, blocks };
    return NIB_OK;
}

/* ---- Small files ---- */

nib_status nib_ck_read_text(const char *path, size_t limit, char **out, size_t *bytes)
{
    int fd;
    uint64_t size;
    TRY(nib_os_open_read(path, &fd, &size));
    nib_status status = NIB_OK;
    char *text = NULL;
    if (size > limit)
        status = nib_fail(NIB_ERR_DATA, "%s: it has %llu bytes, more than the limit of %zu", path,
                          (unsigned long long)size, limit);
    else if (!(text = nib_alloc((size_t)size + 1)))
        status = nib_fail(NIB_ERR_MEMORY, "%s: no memory for its %llu bytes", path, (unsigned long long)size);
    else
        status = nib_os_read_at(fd, path, 0, text, (size_t)size);
    nib_os_close(fd);
    if (status) {
        nib_free(text);
        return status;
    }
    text[size] = '\0';
    *out = text;
    *bytes = (size_t)size;
    return NIB_OK;
}

/* Every value but the first follows a comma or an opening bracket. */
static size_t count_values(const char *text, size_t bytes)
{
    size_t n = 1;
    bool in_string = false;
    for (size_t i = 0; i < bytes; i++) {
        if (in_string && text[i] == '\\')
            i++;
        else if (text[i] == '"')
            in_string = !in_string;
        else if (!in_string)
            n += text[i] == ',' || text[i] == '[' || text[i] == '{';
    }
    return n;
}

/* What jansson says where memory runs out depends on where it does: a good text is not to blame, whatever it says. */
static bool is_lack_of_memory(const json_error_t *error, const char *text, size_t bytes)
{
    const enum json_error_code code = json_error_code(error);
    if (code == json_error_out_of_memory || code == json_error_unknown)
        return true;
    if (code != json_error_invalid_syntax && code != json_error_premature_end_of_input &&
        code != json_error_end_of_input_expected)
        return false;
    const char *first = text;
    while (first < text + bytes && memchr(" \t\r\n", *first, 4))
        first++;
    return first < text + bytes && (*first == '{' || *first == '[') && nib_json_valid(text, bytes); /* no mere value */
}

static nib_status parse(const char *path, const char *text, size_t bytes, size_t flags, json_t **out)
{
    json_error_t error = { .text = "" }; /* jansson leaves the code alone that it has none for */
    if (bytes > VALUES_LIMIT && count_values(text, bytes) > VALUES_LIMIT)
        return nib_fail(NIB_ERR_DATA, "%s: it has more values than the limit of %d", path, VALUES_LIMIT);
    json_t *value = json_loadb(text, bytes, JSON_REJECT_DUPLICATES | flags, &error);
    if (!value && is_lack_of_memory(&error, text, bytes))
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its JSON", path);
    if (!value)
        return nib_fail(NIB_ERR_DATA, "%s: line %d: %s", path, error.line, nib_quote(error.text).text);
    *out = value;
    return NIB_OK;
}

nib_status nib_ck_parse_json(const char *path, const char *text, size_t bytes, json_t **out)
{
    return parse(path, text, bytes, JSON_ALLOW_NUL, out);
}

json_t *nib_ck_copy_json(json_t *value)
{
    json_t *copy = json_deep_copy(value);
    if (copy && json_equal(copy, value))
        return copy;
    json_decref(copy);
    return NULL;
}

static char *join_path(const char *directory, const char *name)
{
    const size_t bytes = strlen(directory) + strlen(name) + 2;
    char *path = nib_alloc(bytes);
    if (path)
        snprintf(path, bytes, "%s/%s", directory, name);
    return path;
}

bool nib_ck_is_python_number(const char *token, size_t length)
{
    static const char *const words[] = { "Infinity", "-Infinity", "NaN" };
    enum { DIGITS = 18 }; /* that fit whatever they are */
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (length == strlen(words[i]) && memcmp(token, words[i], length) == 0)
            return true;
    const size_t sign = length > 0 && token[0] == '-';
    for (size_t i = sign; i < length; i++)
        if (token[i] < '0' || token[i] > '9')
            return false;
    return length - sign > DIGITS;
}

/* How many characters from here on are those of a number or a word; the text ends with a NUL. */
static size_t token_length(const char *text)
{
    size_t length = 0;
    for (char c; (c = text[length]); length++)
        if (!(c >= '0' && c <= '9') && !(c >= 'A' && c <= 'Z') && !(c >= 'a' && c <= 'z') && c != '+' && c != '-' &&
            c != '.')
            break;
    return length;
}

/* A configuration with these numbers as strings behind a mark: jansson rejects them, and nib_put_json takes the mark off. */
static bool mark_numbers(const char *text, size_t bytes, struct nib_text *out)
{
    size_t copied = 0;
    bool in_string = false, fits = true;
    for (size_t i = 0; i < bytes && fits;) {
        if (in_string && text[i] == '\\') { /* whatever follows is no end of the string */
            i += 2;
            continue;
        }
        in_string ^= text[i] == '"';
        const size_t length = in_string ? 0 : token_length(text + i);
        if (length > 0 && nib_ck_is_python_number(text + i, length)) {
            fits = nib_text_put(out, text + copied, i - copied) && nib_text_put(out, "\"\\u0001", 7) &&
                   nib_text_put(out, text + i, length) && nib_text_put(out, "\"", 1);
            copied = i + length;
        }
        i += length ? length : 1;
    }
    return fits && nib_text_put(out, text + copied, bytes - copied);
}

/* config.json is written by Python, whose numbers are more than JSON's. */
static nib_status parse_config(const nib_checkpoint *c, const char *path, const char *text, size_t bytes, json_t **out)
{
    struct nib_text marked = { 0 };
    const nib_status status = mark_numbers(text, bytes, &marked)
                                  ? nib_ck_parse_json(path, marked.bytes ? marked.bytes : "", marked.used, out)
                                  : nib_ck_no_memory(c);
    nib_free(marked.bytes);
    return status;
}

/* The JSON object of a file in the directory; *out stays NULL where there is no such file. Text is wanted of config.json
 * alone. */
static nib_status read_object(const nib_checkpoint *c, const char *name, size_t limit, json_t **out, char **text_out)
{
    char *path = join_path(c->directory, name), *text = NULL;
    size_t bytes;
    if (!path)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    if (!nib_os_is_absent(path)) {
        status = nib_ck_read_text(path, limit, &text, &bytes);
        if (!status)
            status = text_out ? parse_config(c, path, text, bytes, out) : nib_ck_parse_json(path, text, bytes, out);
        if (!status && !json_is_object(*out)) {
            json_decref(*out);
            *out = NULL;
            status = nib_fail(NIB_ERR_DATA, "%s: it is not a JSON object", path);
        }
    }
    if (!status && text_out)
        *text_out = text;
    else
        nib_free(text);
    nib_free(path);
    return status;
}

nib_status nib_ck_read_object(const nib_checkpoint *c, const char *name, json_t **out)
{
    char *text = NULL;
    const nib_status status = read_object(c, name, OBJECT_LIMIT, out, &text);
    nib_free(text);
    return status;
}

int64_t nib_ck_config_int(const nib_checkpoint *c, const char *key, int64_t otherwise)
{
    const json_t *const places[] = { c->config, json_object_get(c->config, "text_config"),
                                     json_object_get(c->config, "language_config"),
                                     json_object_get(c->config, "llm_config") };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const json_t *value = json_object_get(places[i], key);
        if (json_is_integer(value))
            return json_integer_value(value);
    }
    return otherwise;
}

/* Where quantization_config may stand: loaders look in all of these. */
static json_t *find_quantization(const nib_checkpoint *c)
{
    json_t *const text_config = json_object_get(c->config, "text_config");
    json_t *const places[] = { json_object_get(c->config, "quantization_config"),
                               json_object_get(text_config, "quantization_config"),
                               json_object_get(c->config, "compression_config") };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (json_is_object(places[i]))
            return places[i];
    return NULL;
}

static bool is_composed(const nib_checkpoint *c)
{
    const char *key;
    json_t *value;
    json_object_foreach(c->config, key, value)
    {
        if (json_is_object(value) && nib_ck_ends_with(key, "_config") && strcmp(key, "quantization_config") != 0 &&
            strcmp(key, "compression_config") != 0)
            return true;
    }
    return false;
}

static nib_status read_configuration(nib_checkpoint *c)
{
    TRY(read_object(c, "config.json", CONFIG_LIMIT, &c->config, &c->config_text));
    TRY(read_object(c, "hf_quant_config.json", CONFIG_LIMIT, &c->hf_quant_config, NULL));
    c->quantization = find_quantization(c);
    c->composed = is_composed(c);
    const char *type = json_string_value(json_object_get(c->config, "model_type"));
    c->model_type = type ? type : "";
    return NIB_OK;
}

/* ---- Files ---- */

/* Add a file and read its header. */
static nib_status add_file(nib_checkpoint *c, const char *path, const char *name)
{
    struct nib_ck_file *files = nib_realloc(c->files, (c->n_files + 1) * sizeof *files);
    if (!files)
        return nib_ck_no_memory(c);
    c->files = files;
    struct nib_ck_file *file = &files[c->n_files];
    *file = (struct nib_ck_file){ .name = nib_ck_string(c, "%s", name), .path = nib_ck_string(c, "%s", path) };
    if (!file->name || !file->path)
        return nib_ck_no_memory(c);
    /* What a file begins with says more than its name: a safetensors header of that length is rejected anyway. */
    int fd;
    char magic[64] = { 0 };
    TRY(nib_os_open_read(path, &fd, &file->bytes));
    const size_t bytes = file->bytes < sizeof magic ? (size_t)file->bytes : sizeof magic;
    const nib_status status = nib_os_read_at(fd, path, 0, magic, bytes);
    nib_os_close(fd);
    TRY(status);
    if (nib_ck_is_lfs_pointer(magic, bytes))
        return nib_fail(NIB_ERR_DATA, "%s: it is a pointer of Git LFS, not the file itself: git lfs pull fetches it",
                        path);
    if (memcmp(magic, "GGUF", 4) == 0)
        TRY(nib_gguf_open(path, &file->gguf));
    else
        TRY(nib_file_open(path, &file->safetensors));
    c->n_files++;
    return NIB_OK;
}

/* ---- GGUF in several files ---- */

/* "model-00002-of-00005.gguf": what stands before the numbers, and the numbers. */
struct split_name {
    size_t prefix;
    long number, count;
};

static bool read_split_name(const char *name, struct split_name *out)
{
    static const char shape[] = "-#####-of-#####.gguf";
    const size_t length = strlen(name), n = sizeof shape - 1;
    if (length <= n)
        return false;
    const char *end = name + length - n;
    for (size_t i = 0; i < n; i++)
        if (shape[i] == '#' ? end[i] < '0' || end[i] > '9' : end[i] != shape[i])
            return false;
    *out = (struct split_name){ length - n, strtol(end + 1, NULL, 10), strtol(end + 10, NULL, 10) };
    return out->number >= 1 && out->number <= out->count;
}

static nib_status bad_split(const struct nib_ck_file *file, const char *key, int64_t found, int64_t wanted)
{
    return nib_fail(NIB_ERR_DATA, "%s: %s is %lld, and by its name it should be %lld: the files do not belong together",
                    file->path, key, (long long)found, (long long)wanted);
}

/* That file i of the set says what its name says. */
static nib_status check_split(const nib_checkpoint *c, size_t i, long count)
{
    const struct nib_ck_file *file = &c->files[i];
    int64_t number = 0, of = 1;
    bool found;
    if (!file->gguf)
        return nib_fail(NIB_ERR_DATA, "%s: it is not a GGUF file", file->path);
    TRY(nib_gguf_get_integer(file->gguf, "split.count", &of, &found));
    TRY(nib_gguf_get_integer(file->gguf, "split.no", &number, &found));
    if (of != count)
        return bad_split(file, "split.count", of, count);
    return number == (int64_t)i ? NIB_OK : bad_split(file, "split.no", number, (int64_t)i);
}

static nib_status check_split_tensors(const nib_checkpoint *c)
{
    int64_t wanted = 0, there = 0;
    bool found;
    for (size_t i = 0; i < c->n_files; i++)
        there += (int64_t)nib_gguf_count(c->files[i].gguf);
    TRY(nib_gguf_get_integer(c->files[0].gguf, "split.tensors.count", &wanted, &found));
    if (found && wanted != there)
        return nib_fail(NIB_ERR_DATA, "%s: split.tensors.count is %lld, and its %zu files have %lld tensors",
                        c->files[0].path, (long long)wanted, c->n_files, (long long)there);
    return NIB_OK;
}

/* All files of the set that `path` is one of, in their order. */
static nib_status add_split(nib_checkpoint *c, const char *path, const struct split_name *split)
{
    const size_t bytes = strlen(path) + 1;
    char *each = nib_alloc(bytes);
    nib_status status = each ? NIB_OK : nib_ck_no_memory(c);
    for (long i = 0; i < split->count && !status; i++) {
        snprintf(each, bytes, "%.*s-%05ld-of-%05ld.gguf", (int)split->prefix, path, i + 1, split->count);
        const char *slash = strrchr(each, '/');
        if (nib_os_is_absent(each))
            status = nib_fail(NIB_ERR_DATA, "%s: it is one of %ld files, and %s is not there: download it", path,
                              split->count, nib_quote(slash ? slash + 1 : each).text);
        if (!status)
            status = add_file(c, each, slash ? slash + 1 : each);
        if (!status)
            status = check_split(c, (size_t)i, split->count);
    }
    nib_free(each);
    return status ? status : check_split_tensors(c);
}

/* A file that says to be one of several, under a name that does not say which, cannot be completed. */
static nib_status add_alone(nib_checkpoint *c, const char *path, const char *name)
{
    TRY(add_file(c, path, name));
    int64_t count = 1;
    bool found;
    const nib_gguf *file = c->files[c->n_files - 1].gguf;
    if (file)
        TRY(nib_gguf_get_integer(file, "split.count", &count, &found));
    if (count > 1)
        return nib_fail(NIB_ERR_DATA,
                        "%s: it is one of %lld files of a model: give them their names back, NAME-00001-of-%05lld.gguf "
                        "and so on",
                        path, (long long)count, (long long)count);
    return NIB_OK;
}

/* A file by itself, or all of the set that its name says it is one of. */
static nib_status add_file_or_split(nib_checkpoint *c, const char *path, const char *name)
{
    struct split_name split;
    if (read_split_name(path, &split) && split.count > 1)
        return add_split(c, path, &split);
    return add_alone(c, path, name);
}

static nib_status add_from_directory(nib_checkpoint *c, const char *name)
{
    char *path = join_path(c->directory, name);
    if (!path)
        return nib_ck_no_memory(c);
    const nib_status status = add_file_or_split(c, path, name);
    nib_free(path);
    return status;
}

/* What a directory holds that could be a checkpoint. */
struct listing {
    nib_checkpoint *c;
    struct nib_names safetensors, gguf, indexes;
    char pickled[128]; /* the first of them */
    bool failed;
};

static nib_status note_name(void *context, const char *name)
{
    static const char *const pickles[] = { ".bin", ".pt", ".pth", ".ckpt" };
    struct listing *listing = context;
    struct nib_names *list = nib_ck_ends_with(name, ".safetensors")              ? &listing->safetensors
                             : nib_ck_ends_with(name, ".safetensors.index.json") ? &listing->indexes
                             : nib_ck_ends_with(name, ".gguf")                   ? &listing->gguf
                                                                                 : NULL;
    if (list) {
        const size_t start = list->text.used;
        if (!nib_text_put(&list->text, name, strlen(name) + 1) || !nib_names_add(list, start))
            return nib_ck_no_memory(listing->c);
        return NIB_OK;
    }
    for (size_t i = 0; i < sizeof pickles / sizeof *pickles; i++)
        if (nib_ck_ends_with(name, pickles[i]) && (!*listing->pickled || strcmp(name, listing->pickled) < 0))
            snprintf(listing->pickled, sizeof listing->pickled, "%s", name);
    return NIB_OK;
}

static const char *name_at(const struct nib_names *names, size_t place)
{
    return nib_names_get(names, names->order.ids[place]);
}

/* ---- Index ---- */

/* A file name from an index: of this directory and of this format, or it is somebody's attempt to have another file read. */
static const char *fault_of_shard_name(const char *name)
{
    if (!*name)
        return "it is empty";
    if (strchr(name, '/') || strchr(name, '\\') || strcmp(name, "..") == 0)
        return "it leaves the directory";
    if (!nib_ck_ends_with(name, ".safetensors"))
        return "it is not a .safetensors file";
    return NULL;
}

static nib_status check_weight_map(const nib_checkpoint *c, json_t *map)
{
    const char *tensor;
    json_t *value;
    if (!json_is_object(map))
        return nib_fail(NIB_ERR_DATA, "%s/%s: it has no object \"weight_map\"", c->directory, c->index_name);
    json_object_foreach(map, tensor, value)
    {
        const char *file = json_string_value(value);
        const char *fault = !file                                       ? "it is not a string"
                            : strlen(file) != json_string_length(value) ? "it holds a NUL"
                                                                        : fault_of_shard_name(file);
        if (fault)
            return nib_fail(NIB_ERR_DATA, "%s/%s: tensor %s: its file %s: %s", c->directory, c->index_name,
                            nib_quote(tensor).text, nib_quote(file ? file : "").text, fault);
    }
    return NIB_OK;
}

/* Every file that the index names, once, in the order of names; each must be there. */
static nib_status open_indexed(nib_checkpoint *c, json_t *map, const struct listing *listing)
{
    struct nib_names wanted = { 0 };
    const char *tensor, *before = NULL;
    json_t *value;
    nib_status status = NIB_OK;
    json_object_foreach(map, tensor, value)
    {
        /* Runs of the same file are the rule: one look at the last name saves most of the set. */
        const char *file = json_string_value(value);
        const size_t start = wanted.text.used;
        uint32_t id;
        size_t place;
        if ((before && strcmp(before, file) == 0) || nib_names_find(&wanted, file, &id, &place))
            continue;
        before = file;
        if (!nib_text_put(&wanted.text, file, strlen(file) + 1) || !nib_names_add(&wanted, start)) {
            status = nib_ck_no_memory(c);
            break;
        }
    }
    nib_names_finish(&wanted);
    for (size_t i = 0; !status && i < wanted.order.n; i++) {
        const char *name = name_at(&wanted, i);
        uint32_t id;
        size_t place;
        if (!nib_names_find(&listing->safetensors, name, &id, &place))
            status = nib_fail(NIB_ERR_DATA,
                              "%s: %s names the file %s, which is not there: download it, or remove the index if it is "
                              "an old one",
                              c->directory, c->index_name, nib_quote(name).text);
        else
            status = add_from_directory(c, name);
    }
    for (size_t i = 0; !status && i < listing->safetensors.order.n; i++) {
        const char *name = name_at(&listing->safetensors, i);
        uint32_t id;
        size_t place;
        if (!nib_names_find(&wanted, name, &id, &place))
            status = nib_ck_diagnostic(c, "stale-shard", name, "the index does not name this file", false);
    }
    nib_names_free(&wanted);
    return status;
}

/* ---- Tensors ---- */

static int by_name(const void *a, const void *b)
{
    const struct nib_ck_tensor *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    return order ? order : (x->file > y->file) - (x->file < y->file);
}

static nib_status list_safetensors(nib_checkpoint *c, uint32_t f, struct nib_ck_tensor *out)
{
    const nib_file *file = c->files[f].safetensors;
    for (size_t i = 0; i < nib_file_count(file); i++) {
        nib_entry entry;
        TRY(nib_file_entry(file, i, &entry));
        out[i] = (struct nib_ck_tensor){ .name = entry.name,
                                         .file = f,
                                         .entry = (uint32_t)i,
                                         .dtype = entry.dtype,
                                         .ggml_type = -1,
                                         .rank = entry.rank,
                                         .shape = entry.shape,
                                         .bytes = entry.end - entry.begin,
                                         .weight = NIB_NONE };
    }
    return NIB_OK;
}

static nib_status list_gguf(nib_checkpoint *c, uint32_t f, struct nib_ck_tensor *out)
{
    const nib_gguf *file = c->files[f].gguf;
    int64_t *shapes = nib_alloc(nib_gguf_count(file) * sizeof(int64_t[NIB_GGUF_MAX_RANK]));
    if (!shapes)
        return nib_ck_no_memory(c);
    c->files[f].shapes = shapes;
    for (size_t i = 0; i < nib_gguf_count(file); i++) {
        struct nib_gguf_entry entry;
        TRY(nib_gguf_entry(file, i, &entry));
        int64_t *shape = shapes + i * NIB_GGUF_MAX_RANK;
        memcpy(shape, entry.shape, sizeof entry.shape);
        nib_dtype dtype = NIB_DTYPE_COUNT;
        (void)nib_gguf_dtype_of_type(entry.type, &dtype);
        out[i] = (struct nib_ck_tensor){ .name = entry.name,
                                         .file = f,
                                         .entry = (uint32_t)i,
                                         .dtype = dtype,
                                         .ggml_type = (int)entry.type,
                                         .rank = entry.rank,
                                         .shape = shape,
                                         .bytes = entry.bytes,
                                         .weight = NIB_NONE };
    }
    return NIB_OK;
}

/* Two files with a tensor of one name: the index decides; without one nobody can. */
static nib_status drop_repeated(nib_checkpoint *c, const json_t *map)
{
    size_t kept = 0;
    for (size_t i = 0; i < c->n_tensors; i++) {
        const struct nib_ck_tensor *tensor = &c->tensors[i];
        const char *home = map ? json_string_value(json_object_get(map, tensor->name)) : NULL;
        const bool repeated = (i > 0 && strcmp(tensor->name, c->tensors[i - 1].name) == 0) ||
                              (i + 1 < c->n_tensors && strcmp(tensor->name, c->tensors[i + 1].name) == 0);
        if (repeated && !home)
            return nib_fail(
                NIB_ERR_DATA,
                "%s: tensor %s is in two files, %s among them, and no index says which one counts: keep one "
                "set of files",
                c->path, nib_quote(tensor->name).text, nib_quote(c->files[tensor->file].name).text);
        if (map && !home)
            TRY(nib_ck_diagnostic(c, "unindexed-tensor", tensor->name,
                                  "its file has it, but the index does not name it", false));
        if (home && strcmp(home, c->files[tensor->file].name) != 0) {
            TRY(nib_ck_diagnostic(c, "repeated-tensor", tensor->name,
                                  "a file that the index does not name for it has it too", false));
            continue;
        }
        c->tensors[kept++] = c->tensors[i];
    }
    c->n_tensors = kept;
    return NIB_OK;
}

/* Every name of the index must be in the file it is said to be in. */
static nib_status check_indexed(const nib_checkpoint *c, json_t *map)
{
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value) if (nib_ck_find_tensor(c, name) == NIB_NONE) return nib_fail(
        NIB_ERR_DATA, "%s: %s says that tensor %s is in %s, and it is not: the index or the file is an old one",
        c->directory, c->index_name, nib_quote(name).text, nib_quote(json_string_value(value)).text);
    return NIB_OK;
}

static nib_status list_tensors(nib_checkpoint *c, json_t *map)
{
    size_t n = 0;
    for (size_t f = 0; f < c->n_files; f++)
        n += c->files[f].gguf ? nib_gguf_count(c->files[f].gguf) : nib_file_count(c->files[f].safetensors);
    if (n >= NIB_NONE)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s: it has %zu tensors", c->path, n);
    c->tensors = nib_alloc((n + 1) * sizeof *c->tensors);
    if (!c->tensors)
        return nib_ck_no_memory(c);
    c->n_tensors = n;
    size_t at = 0;
    for (uint32_t f = 0; f < c->n_files; f++) {
        TRY(c->files[f].gguf ? list_gguf(c, f, c->tensors + at) : list_safetensors(c, f, c->tensors + at));
        at += c->files[f].gguf ? nib_gguf_count(c->files[f].gguf) : nib_file_count(c->files[f].safetensors);
    }
    qsort(c->tensors, n, sizeof *c->tensors, by_name);
    TRY(drop_repeated(c, map));
    return map ? check_indexed(c, map) : NIB_OK;
}

uint32_t nib_ck_find_tensor(const nib_checkpoint *c, const char *name)
{
    size_t first = 0, last = c->n_tensors;
    while (first < last) {
        const size_t middle = first + (last - first) / 2;
        const int order = strcmp(c->tensors[middle].name, name);
        if (order == 0)
            return (uint32_t)middle;
        if (order < 0)
            first = middle + 1;
        else
            last = middle;
    }
    return NIB_NONE;
}

nib_status nib_ck_read(const nib_checkpoint *c, uint32_t tensor, uint64_t offset, void *out, size_t bytes)
{
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    const struct nib_ck_file *file = &c->files[t->file];
    return file->gguf ? nib_gguf_read(file->gguf, t->entry, offset, out, bytes)
                      : nib_file_read(file->safetensors, t->entry, offset, out, bytes);
}

const char *nib_ck_place(const nib_checkpoint *c, uint32_t tensor, char *buffer, size_t bytes)
{
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    snprintf(buffer, bytes, "%s: tensor %s", c->files[t->file].path, nib_quote(t->name).text);
    return buffer;
}

/* ---- Opening ---- */

/* One index counts: the usual one, or the only one. */
static nib_status choose_index(nib_checkpoint *c, const struct listing *listing)
{
    static const char usual[] = "model.safetensors.index.json";
    const struct nib_names *indexes = &listing->indexes;
    uint32_t id;
    size_t place;
    if (indexes->order.n == 0)
        return NIB_OK;
    const char *name = nib_names_find(indexes, usual, &id, &place) ? usual
                       : indexes->order.n == 1                     ? name_at(indexes, 0)
                                                                   : NULL;
    if (!name)
        return nib_fail(NIB_ERR_DATA, "%s: it has %zu indexes, %s and %s among them: keep one", c->path,
                        indexes->order.n, nib_quote(name_at(indexes, 0)).text, nib_quote(name_at(indexes, 1)).text);
    c->index_name = nib_ck_string(c, "%s", name);
    return c->index_name ? NIB_OK : nib_ck_no_memory(c);
}

/* Whether names are those of one GGUF in several files, and no other's. */
static bool is_one_set(const struct nib_names *names)
{
    struct split_name first, split;
    for (size_t i = 0; i < names->order.n; i++) {
        if (!read_split_name(name_at(names, i), &split))
            return false;
        if (i == 0)
            first = split;
        else if (split.count != first.count || split.prefix != first.prefix ||
                 strncmp(name_at(names, i), name_at(names, 0), first.prefix) != 0)
            return false;
    }
    return names->order.n > 0;
}

static nib_status open_unindexed(nib_checkpoint *c, const struct listing *listing)
{
    const struct nib_names *files = &listing->safetensors;
    uint32_t id;
    size_t place;
    if (files->order.n > 0) {
        /* model.safetensors is the whole model; beside it lies at most another form of the same. */
        const bool whole = nib_names_find(files, "model.safetensors", &id, &place);
        for (size_t i = 0; i < files->order.n; i++) {
            const char *name = name_at(files, i);
            if (whole && strcmp(name, "model.safetensors") != 0)
                TRY(nib_ck_diagnostic(c, "stale-shard", name, "it lies beside model.safetensors, and no index names it",
                                      false));
            else
                TRY(add_from_directory(c, name));
        }
        return NIB_OK;
    }
    if (listing->gguf.order.n == 1 || is_one_set(&listing->gguf))
        return add_from_directory(c, name_at(&listing->gguf, 0));
    if (listing->gguf.order.n > 1)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s: it has %zu GGUF files: name one of them", c->path,
                        listing->gguf.order.n);
    if (*listing->pickled)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "%s: its weights are pickled (%s), which can run any code when loaded: convert them to "
                        "safetensors first, for example with transformers' save_pretrained on a machine that holds "
                        "nothing of value",
                        c->path, nib_quote(listing->pickled).text);
    return nib_fail(NIB_ERR_DATA, "%s: there is no .safetensors and no .gguf file in this directory", c->path);
}

static nib_status open_directory(nib_checkpoint *c)
{
    struct listing listing = { .c = c };
    json_t *index = NULL, *map = NULL;
    nib_status status = nib_os_list(c->directory, note_name, &listing);
    nib_names_finish(&listing.safetensors);
    nib_names_finish(&listing.gguf);
    nib_names_finish(&listing.indexes);
    if (!status)
        status = read_configuration(c);
    if (!status)
        status = choose_index(c, &listing);
    if (!status && c->index_name) {
        c->has_index = true;
        status = read_object(c, c->index_name, INDEX_LIMIT, &index, NULL);
        map = json_object_get(index, "weight_map");
        if (!status)
            status = check_weight_map(c, map);
        if (!status)
            status = open_indexed(c, map, &listing);
    } else if (!status) {
        status = open_unindexed(c, &listing);
    }
    nib_names_free(&listing.safetensors);
    nib_names_free(&listing.gguf);
    nib_names_free(&listing.indexes);
    if (!status)
        status = list_tensors(c, map);
    json_decref(index);
    return status;
}

static nib_status open_file(nib_checkpoint *c)
{
    const char *slash = strrchr(c->path, '/');
    TRY(add_file_or_split(c, c->path, slash ? slash + 1 : c->path));
    TRY(read_configuration(c)); /* of its directory: experts cannot be told apart without */
    return list_tensors(c, NULL);
}

static nib_status set_paths(nib_checkpoint *c, const char *path)
{
    size_t length = strlen(path);
    c->is_directory = nib_os_is_directory(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    c->path = nib_ck_string(c, "%.*s", (int)length, path);
    if (!c->path)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its name", path);
    const char *slash = strrchr(c->path, '/');
    const int parent = slash == c->path ? 1 : slash ? (int)(slash - c->path) : 0;
    c->directory = c->is_directory ? c->path
                   : parent        ? nib_ck_string(c, "%.*s", parent, c->path)
                                   : nib_ck_string(c, ".");
    return c->directory ? NIB_OK : nib_ck_no_memory(c);
}

/* Who else calls something "nib" may write there what they like. What goes on to outputs has no NUL within strings. */
static nib_status find_provenance(nib_checkpoint *c)
{
    for (size_t f = 0; f < c->n_files && !c->provenance; f++)
        if (c->files[f].safetensors)
            c->provenance = nib_file_metadata(c->files[f].safetensors, "nib");
    if (c->provenance && strlen(c->provenance) > PROVENANCE_LIMIT)
        c->provenance = NULL;
    if (!c->provenance)
        return NIB_OK;
    const nib_status status = parse(c->path, c->provenance, strlen(c->provenance), 0, &c->notes);
    if (!json_is_object(c->notes)) {
        json_decref(c->notes);
        c->notes = NULL;
        c->provenance = NULL;
    }
    return status == NIB_ERR_DATA ? NIB_OK : status;
}

nib_status nib_ck_open(const char *path, nib_checkpoint **out)
{
    nib_checkpoint *c = nib_alloc_zeroed(sizeof *c);
    if (!c)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory to open it", path);
    nib_status status = set_paths(c, path);
    if (!status)
        status = c->is_directory ? open_directory(c) : open_file(c);
    if (!status)
        status = find_provenance(c);
    if (status) {
        status = nib_ck_explain(c->path ? c->path : path, status);
        nib_checkpoint_close(c);
        return status;
    }
    bool found;
    if (c->n_files && c->files[0].gguf) /* one of another kind is the check's affair */
        (void)nib_gguf_get_string(c->files[0].gguf, "general.architecture", &c->architecture, &found);
    *out = c;
    return NIB_OK;
}

void nib_checkpoint_close(nib_checkpoint *c)
{
    if (!c)
        return;
    for (size_t f = 0; f < c->n_files; f++) {
        nib_file_close(c->files[f].safetensors);
        nib_gguf_close(c->files[f].gguf);
        nib_free(c->files[f].shapes);
    }
    json_decref(c->config);
    json_decref(c->hf_quant_config);
    json_decref(c->notes);
    nib_free(c->config_text);
    nib_free(c->architecture);
    nib_free(c->files);
    nib_free(c->tensors);
    nib_free(c->weights);
    nib_free(c->folds);
    nib_free(c->fold_scales);
    nib_free(c->diagnostics);
    for (struct chunk *chunk = c->strings, *before; chunk; chunk = before) {
        before = chunk->before;
        nib_free(chunk);
    }
    nib_free(c);
}

/* ---- What callers may ask ---- */

const char *nib_ck_dtype_name(const struct nib_ck_tensor *t)
{
    return t->ggml_type < 0 ? nib_dtypes[t->dtype].name : nib_gguf_type_facts((uint32_t)t->ggml_type)->name;
}

nib_status nib_checkpoint_get_tensor(const nib_checkpoint *c, size_t index, nib_checkpoint_tensor *out)
{
    NIB_REQUIRE(c);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("nib_checkpoint_tensor", out, NIB_UP_TO(nib_checkpoint_tensor, stored_bytes)));
    if (index >= c->n_tensors)
        return nib_fail(NIB_ERR_ARG, "%s: there is no tensor %zu among its %zu", c->path, index, c->n_tensors);
    const struct nib_ck_tensor *t = &c->tensors[index];
    const nib_checkpoint_tensor found = { .name = t->name,
                                          .file = c->files[t->file].name,
                                          .dtype = nib_ck_dtype_name(t),
                                          .rank = t->rank,
                                          .shape = t->shape,
                                          .stored_bytes = t->bytes };
    nib_struct_write(out, &found, sizeof found);
    return NIB_OK;
}
