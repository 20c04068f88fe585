/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor_file.c - a tensor in a safetensors file.
 *
 * Its parts are entries of their own, NAME.row_data and so on. Everything else is one string of words `key=value` in the
 * file's metadata, under "nib:NAME". Every value is a decimal integer, or a name that nib.h knows; all keys are there, in
 * a fixed order. docs/format.md lists them.
 */
#include "tensor/tensor.h"

#include <inttypes.h>
#include <stdio.h>

#include "format/codec.h"
#include "file/safetensors.h"

static const char *const part_suffixes[NIB_PART_COUNT] = {
    [NIB_ROW_DATA] = "row_data",
    [NIB_COL_DATA] = "col_data",
    [NIB_ROW_SCALE] = "row_scale",
    [NIB_COL_SCALE] = "col_scale",
    [NIB_ROW_TENSOR_SCALE] = "row_tensor_scale",
    [NIB_COL_TENSOR_SCALE] = "col_tensor_scale",
};

/* The name of a part in a file of that version. */
static const char *part_suffix(int part, int64_t version)
{
    if (version == 1 && part / 2 == 2)
        return part == NIB_ROW_TENSOR_SCALE ? "row_level" : "col_level";
    return part_suffixes[part];
}

enum { NEWEST = 2 }; /* the version that is written; version 1 is read */

/* ---- Metadata as words ---- */

/* What is written, apart from the names and the shape. The order is the file's. */
enum word {
    VERSION,
    ROWWISE,
    COLUMNWISE,
    SWIZZLED,
    ROW_SCALED,
    RHT,
    RHT_ROWWISE,
    RHT_SIGN_MASK,
    BLOCK_ROWS,
    BLOCK_COLS,
    SCALE_RULE,
    ERROR_MODE,
    FAST_ERROR,
    NO_TENSOR_SCALE,
    E4M3_MAX,
    TENSOR_SCALE_RULE,
    MIN_BLOCK_SCALE,
    ROUNDING,
    SEED,
    OFFSET,
    ORIGIN_ROW,
    ORIGIN_COL,
    ELEMENT,
    POW2_SCALES,
    MX_RULE,
    AMAX_EPSILON,
    COLUMNWISE_VALID,
    WANTS_ROWWISE,
    WANTS_COLUMNWISE,
    WORD_COUNT
};

static const char *const word_names[WORD_COUNT] = {
    [VERSION] = "version",
    [ROWWISE] = "rowwise",
    [COLUMNWISE] = "columnwise",
    [SWIZZLED] = "swizzled",
    [ROW_SCALED] = "row_scaled",
    [RHT] = "rht",
    [RHT_ROWWISE] = "rht_rowwise",
    [RHT_SIGN_MASK] = "rht_sign_mask",
    [BLOCK_ROWS] = "block_rows",
    [BLOCK_COLS] = "block_cols",
    [SCALE_RULE] = "scale_rule",
    [ERROR_MODE] = "error_mode",
    [FAST_ERROR] = "fast_error",
    [NO_TENSOR_SCALE] = "no_tensor_scale",
    [E4M3_MAX] = "e4m3_max",
    [TENSOR_SCALE_RULE] = "tensor_scale_rule",
    [MIN_BLOCK_SCALE] = "min_block_scale", /* the bits of the float */
    [ROUNDING] = "rounding",
    [SEED] = "seed",
    [OFFSET] = "offset",
    [ORIGIN_ROW] = "origin_row",
    [ORIGIN_COL] = "origin_col",
    [ELEMENT] = "element",
    [POW2_SCALES] = "pow2_scales",
    [MX_RULE] = "mx_rule",
    [AMAX_EPSILON] = "amax_epsilon", /* the bits of the float */
    [COLUMNWISE_VALID] = "columnwise_valid",
    [WANTS_ROWWISE] = "wants_rowwise",
    [WANTS_COLUMNWISE] = "wants_columnwise",
};

/* The name of a word in a file of that version. Version 1 had one word more, `threads`, behind the origin. */
static const char *word_name(int word, int64_t version)
{
    if (version == 1 && word == NO_TENSOR_SCALE)
        return "single_level";
    return version == 1 && word == TENSOR_SCALE_RULE ? "tensor_scale" : word_names[word];
}

static void words_of(const nib_tensor *t, int64_t words[WORD_COUNT])
{
    const nib_quantizer *q = &t->q;
    const int64_t values[WORD_COUNT] = {
        [VERSION] = NEWEST,
        [ROWWISE] = nib_tensor_has(t, NIB_ROWWISE),
        [COLUMNWISE] = nib_tensor_has(t, NIB_COLUMNWISE),
        [SWIZZLED] = q->swizzled,
        [ROW_SCALED] = q->row_scaled,
        [RHT] = q->rht,
        [RHT_ROWWISE] = q->rht_rowwise,
        [RHT_SIGN_MASK] = q->rht_sign_mask,
        [BLOCK_ROWS] = q->block_dims[0],
        [BLOCK_COLS] = q->block_dims[1],
        [SCALE_RULE] = (int64_t)q->scale_rule,
        [ERROR_MODE] = (int64_t)q->error_mode,
        [FAST_ERROR] = q->fast_error,
        [NO_TENSOR_SCALE] = q->no_tensor_scale,
        [E4M3_MAX] = q->e4m3_max,
        [TENSOR_SCALE_RULE] = (int64_t)q->tensor_scale_rule,
        [MIN_BLOCK_SCALE] = nib_bits(q->min_block_scale),
        [ROUNDING] = (int64_t)q->rounding,
        [SEED] = (int64_t)q->seed,
        [OFFSET] = (int64_t)q->offset,
        [ORIGIN_ROW] = q->origin[0],
        [ORIGIN_COL] = q->origin[1],
        [ELEMENT] = (int64_t)q->element,
        [POW2_SCALES] = q->pow2_scales,
        [MX_RULE] = (int64_t)q->mx_rule,
        [AMAX_EPSILON] = nib_bits(q->amax_epsilon),
        [COLUMNWISE_VALID] = !t->columnwise_stale,
        [WANTS_ROWWISE] = q->rowwise,
        [WANTS_COLUMNWISE] = q->columnwise,
    };
    memcpy(words, values, sizeof values);
}

/* Whether every word fits its field; what a field may hold is nib_quantizer_load's to say. */
static bool words_fit(const int64_t words[WORD_COUNT])
{
    static const enum word flags[] = { ROWWISE,     COLUMNWISE,       SWIZZLED,      ROW_SCALED,
                                       RHT,         RHT_ROWWISE,      FAST_ERROR,    NO_TENSOR_SCALE,
                                       POW2_SCALES, COLUMNWISE_VALID, WANTS_ROWWISE, WANTS_COLUMNWISE };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (words[flags[i]] != 0 && words[flags[i]] != 1)
            return false;
    return words[RHT_SIGN_MASK] >= 0 && words[RHT_SIGN_MASK] <= UINT16_MAX && words[MIN_BLOCK_SCALE] >= 0 &&
           words[MIN_BLOCK_SCALE] <= UINT32_MAX && words[AMAX_EPSILON] >= 0 && words[AMAX_EPSILON] <= UINT32_MAX;
}

/* Values that their fields cannot hold become ones that nib_quantizer_load rejects. */
static int32_t narrow(int64_t value) { return value >= 0 && value <= INT32_MAX ? (int32_t)value : -1; }

static void quantizer_from_words(const int64_t words[WORD_COUNT], nib_quantizer *q)
{
    q->rowwise = words[ROWWISE] != 0; /* for now: what is there */
    q->columnwise = words[COLUMNWISE] != 0;
    q->swizzled = words[SWIZZLED] != 0;
    q->row_scaled = words[ROW_SCALED] != 0;
    q->rht = words[RHT] != 0;
    q->rht_rowwise = words[RHT_ROWWISE] != 0;
    q->rht_sign_mask = (uint16_t)words[RHT_SIGN_MASK];
    q->block_dims[0] = narrow(words[BLOCK_ROWS]);
    q->block_dims[1] = narrow(words[BLOCK_COLS]);
    q->scale_rule = (nib_scale_rule)narrow(words[SCALE_RULE]);
    q->error_mode = (nib_error_mode)narrow(words[ERROR_MODE]);
    q->fast_error = words[FAST_ERROR] != 0;
    q->no_tensor_scale = words[NO_TENSOR_SCALE] != 0;
    q->e4m3_max = narrow(words[E4M3_MAX]);
    q->tensor_scale_rule = (nib_tensor_scale_rule)narrow(words[TENSOR_SCALE_RULE]);
    q->min_block_scale = nib_float((uint32_t)words[MIN_BLOCK_SCALE]);
    q->rounding = (nib_rounding)narrow(words[ROUNDING]);
    q->seed = (uint64_t)words[SEED];
    q->offset = (uint64_t)words[OFFSET];
    q->origin[0] = words[ORIGIN_ROW];
    q->origin[1] = words[ORIGIN_COL];
    q->element = (nib_dtype)narrow(words[ELEMENT]);
    q->pow2_scales = words[POW2_SCALES] != 0;
    q->mx_rule = (nib_mx_rule)narrow(words[MX_RULE]);
    q->amax_epsilon = nib_float((uint32_t)words[AMAX_EPSILON]);
}

/* ---- Write ---- */

enum { TEXT_BYTES = 1536 }; /* eight dims and 30 integers of at most 20 digits, with their keys, take less than 1100 */

static void describe(const nib_tensor *t, char text[TEXT_BYTES])
{
    int64_t words[WORD_COUNT];
    words_of(t, words);
    int n = snprintf(text, TEXT_BYTES, "format=%s dialect=%s dtype=%s rank=%d", nib_format_of(&t->q)->name,
                     nib_dialect_name(t->q.dialect), nib_dtypes[t->dtype].name, t->rank);
    for (int i = 0; i < t->rank; i++)
        n += snprintf(text + n, TEXT_BYTES - (size_t)n, " dim=%" PRId64, t->shape[i]);
    for (int i = 0; i < WORD_COUNT; i++)
        n += snprintf(text + n, TEXT_BYTES - (size_t)n, " %s=%" PRId64, word_names[i], words[i]);
}

/* PREFIX + NAME + SUFFIX in memory of its own. */
static char *join(const char *prefix, const char *name, const char *suffix)
{
    const size_t bytes = strlen(prefix) + strlen(name) + strlen(suffix) + 1;
    char *joined = nib_alloc(bytes);
    if (joined)
        snprintf(joined, bytes, "%s%s%s", prefix, name, suffix);
    return joined;
}

static char *part_name(const char *name, int part, int64_t version)
{
    char suffix[24];
    snprintf(suffix, sizeof suffix, ".%s", part_suffix(part, version));
    return join("", name, suffix);
}

static nib_status no_memory(const char *name)
{
    return nib_fail(NIB_ERR_MEMORY, "no memory for the names of %s", name);
}

nib_status nib_writer_declare_tensor(nib_writer *writer, const char *name, const nib_tensor *t)
{
    NIB_REQUIRE(writer);
    NIB_REQUIRE(name);
    NIB_REQUIRE(t);
    char text[TEXT_BYTES], *key = join("nib:", name, "");
    if (!key)
        return no_memory(name);
    describe(t, text);
    nib_status status = nib_writer_metadata(writer, key, text);
    nib_free(key);
    for (int part = 0; part < NIB_PART_COUNT && !status; part++) {
        if (!t->parts[part])
            continue;
        nib_array array = { 0 };
        char *entry = part_name(name, (int)part, NEWEST);
        status = entry ? nib_tensor_part(t, (nib_part)part, &array) : no_memory(name);
        if (!status)
            status = nib_writer_declare(writer, entry, array.dtype, array.rank, array.shape);
        nib_free(entry);
    }
    return status;
}

enum { CHUNK = 1 << 20 }; /* bytes at a time between a file and a device that is not the host */

static nib_status write_buffer(nib_writer *writer, const char *entry, const nib_buffer *buffer)
{
    const size_t bytes = nib_buffer_bytes(buffer);
    const char *data = nib_buffer_data(buffer);
    nib_device *const device = nib_buffer_device(buffer);
    if (nib_device_is_host(device))
        return nib_writer_write(writer, entry, 0, data, bytes);
    char *chunk = nib_alloc(bytes < CHUNK ? bytes : CHUNK);
    nib_status status = chunk ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "no memory to write \"%s\"", entry);
    for (size_t done = 0; done < bytes && !status; done += CHUNK) {
        const size_t n = bytes - done < CHUNK ? bytes - done : CHUNK;
        status = nib_device_move(NULL, chunk, device, data + done, n);
        if (!status)
            status = nib_writer_write(writer, entry, done, chunk, n);
    }
    nib_free(chunk);
    return status;
}

nib_status nib_writer_write_tensor(nib_writer *writer, const char *name, const nib_tensor *t)
{
    NIB_REQUIRE(writer);
    NIB_REQUIRE(name);
    NIB_REQUIRE(t);
    char text[TEXT_BYTES], *key = join("nib:", name, "");
    if (!key)
        return no_memory(name);
    const char *declared = nib_writer_metadata_value(writer, key);
    nib_free(key);
    describe(t, text);
    if (!declared)
        return nib_fail(NIB_ERR_ARG, "%s: tensor \"%s\" was not declared", nib_writer_path(writer), name);
    if (strcmp(declared, text))
        return nib_fail(NIB_ERR_MISMATCH, "%s: tensor \"%s\" is not as it was declared", nib_writer_path(writer), name);
    nib_status status = NIB_OK;
    for (int part = 0; part < NIB_PART_COUNT && !status; part++) {
        if (!t->parts[part])
            continue;
        char *entry = part_name(name, (int)part, NEWEST);
        status = entry ? write_buffer(writer, entry, t->parts[part]) : no_memory(name);
        nib_free(entry);
    }
    return status;
}

/* ---- Read ---- */

/* The value of `key=` at *cursor, up to the next space or the end; *cursor moves past it. */
static bool take_word(const char **cursor, const char *key, char *value, size_t capacity)
{
    const size_t key_bytes = strlen(key);
    if (strncmp(*cursor, key, key_bytes) || (*cursor)[key_bytes] != '=')
        return false;
    const char *start = *cursor + key_bytes + 1;
    const size_t bytes = strcspn(start, " ");
    if (bytes == 0 || bytes >= capacity)
        return false;
    memcpy(value, start, bytes);
    value[bytes] = '\0';
    *cursor = start + bytes + (start[bytes] == ' ');
    return true;
}

static bool take_number(const char **cursor, const char *key, int64_t *out)
{
    char value[24];
    if (!take_word(cursor, key, value, sizeof value))
        return false;
    const bool negative = value[0] == '-';
    uint64_t magnitude = 0;
    const char *digit = value + negative;
    if (!*digit)
        return false;
    for (; *digit; digit++)
        if (*digit < '0' || *digit > '9' || __builtin_mul_overflow(magnitude, 10u, &magnitude) ||
            __builtin_add_overflow(magnitude, (uint64_t)(*digit - '0'), &magnitude))
            return false;
    if (magnitude > (uint64_t)INT64_MAX + negative)
        return false;
    *out = (int64_t)(negative ? 0 - magnitude : magnitude);
    return true;
}

struct description {
    nib_quantizer q;
    nib_dtype dtype;
    int64_t version, rank, shape[NIB_MAX_RANK];
    bool columnwise_stale, wants[2];
};

static bool take_dtype(const char **cursor, nib_dtype *out)
{
    char value[24];
    if (!take_word(cursor, "dtype", value, sizeof value))
        return false;
    for (int i = 0; i < NIB_DTYPE_COUNT; i++)
        if (strcmp(value, nib_dtypes[i].name) == 0) {
            *out = (nib_dtype)i;
            return true;
        }
    return false;
}

static bool parse_description(const char *text, struct description *out)
{
    char value[64];
    int64_t words[WORD_COUNT];
    nib_quantizer_init(&out->q);
    if (!take_word(&text, "format", value, sizeof value) || nib_format_from_name(value, &out->q.format) ||
        !take_word(&text, "dialect", value, sizeof value) || nib_dialect_from_name(value, &out->q.dialect) ||
        !take_dtype(&text, &out->dtype) || !take_number(&text, "rank", &out->rank) || out->rank < 0 ||
        out->rank > NIB_MAX_RANK)
        return false;
    for (int64_t i = 0; i < out->rank; i++)
        if (!take_number(&text, "dim", &out->shape[i]))
            return false;
    int64_t threads;
    for (int i = 0; i < WORD_COUNT; i++)
        if (!take_number(&text, word_name(i, i > VERSION ? words[VERSION] : NEWEST), &words[i]) ||
            (i == ORIGIN_COL && words[VERSION] == 1 && !take_number(&text, "threads", &threads)))
            return false;
    quantizer_from_words(words, &out->q);
    out->columnwise_stale = !words[COLUMNWISE_VALID];
    out->wants[NIB_ROWWISE] = words[WANTS_ROWWISE];
    out->wants[NIB_COLUMNWISE] = words[WANTS_COLUMNWISE];
    out->version = words[VERSION];
    return words_fit(words) && *text == '\0' && out->version >= 1 && out->version <= NEWEST;
}

static nib_status read_buffer(const nib_file *file, size_t index, nib_buffer *buffer)
{
    const size_t bytes = nib_buffer_bytes(buffer);
    char *data = nib_buffer_data(buffer);
    nib_device *const device = nib_buffer_device(buffer);
    if (nib_device_is_host(device))
        return nib_file_read(file, index, 0, data, bytes);
    char *chunk = nib_alloc(bytes < CHUNK ? bytes : CHUNK);
    nib_status status = chunk ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "%s: no memory to read it", nib_file_path(file));
    for (size_t done = 0; done < bytes && !status; done += CHUNK) {
        const size_t n = bytes - done < CHUNK ? bytes - done : CHUNK;
        status = nib_file_read(file, index, done, chunk, n);
        if (!status)
            status = nib_device_move(device, data + done, NULL, chunk, n);
    }
    nib_free(chunk);
    return status;
}

/* A part of the expected dtype and shape as a buffer. */
static nib_status read_part(const nib_file *file, const char *entry_name, nib_dtype dtype, int rank,
                            const int64_t *shape, nib_device *device, nib_buffer **out)
{
    size_t index = 0;
    nib_entry entry;
    if (nib_file_find(file, entry_name, &index) || nib_file_entry(file, index, &entry))
        return nib_fail(NIB_ERR_DATA, "%s: there is no tensor \"%s\"", nib_file_path(file), entry_name);
    if (entry.dtype != dtype || entry.rank != rank || memcmp(entry.shape, shape, (size_t)rank * sizeof *shape))
        return nib_fail(NIB_ERR_DATA, "%s: tensor \"%s\" does not have the dtype and shape that its metadata asks for",
                        nib_file_path(file), entry_name);
    nib_buffer *buffer = NULL;
    TRY(nib_buffer_create((size_t)(entry.end - entry.begin), device, &buffer));
    const nib_status status = read_buffer(file, index, buffer);
    if (status)
        nib_buffer_release(buffer);
    else
        *out = buffer;
    return status;
}

static nib_status read_parts(const nib_file *file, const char *name, int64_t version, const nib_tensor *like,
                             nib_buffer **parts)
{
    const struct nib_format_facts *facts = nib_format_of(&like->q);
    for (int i = 0; i < facts->saved_count; i++) {
        const nib_part part = facts->saved[i];
        const bool shared = part / 2 == 2 && facts->shared_tensor_scale;
        if (!(part % 2 ? like->q.columnwise : like->q.rowwise) && !(shared && like->q.columnwise))
            continue;
        int rank = 0;
        int64_t shape[NIB_MAX_RANK] = { 0 };
        TRY(nib_part_shape(&like->q, part, like->rank, like->shape, &rank, shape));
        const nib_dtype dtype = part / 2 == 0 ? NIB_U8 : part / 2 == 1 ? facts->scale : NIB_F32;
        char *entry = part_name(name, (int)part, version);
        const nib_status status =
            entry ? read_part(file, entry, dtype, rank, shape, like->device, &parts[part]) : no_memory(name);
        nib_free(entry);
        TRY(status);
    }
    return NIB_OK;
}

nib_status nib_file_read_tensor(const nib_file *file, const char *name, nib_device *device, nib_tensor **out)
{
    NIB_REQUIRE(file);
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    char *key = join("nib:", name, "");
    if (!key)
        return no_memory(name);
    const char *text = nib_file_metadata(file, key);
    nib_free(key);
    if (!text)
        return nib_fail(NIB_ERR_ARG, "%s: no quantized tensor \"%s\" was written by nib", nib_file_path(file), name);
    struct description description = { 0 };
    if (!parse_description(text, &description))
        return nib_fail(NIB_ERR_DATA, "%s: the metadata of tensor \"%s\" is not what this version writes",
                        nib_file_path(file), name);
    nib_quantizer loaded;
    nib_tensor *t = NULL;
    nib_status status = nib_quantizer_load(&description.q, &loaded);
    if (!status)
        status = nib_tensor_new(&loaded, description.dtype, (int)description.rank, description.shape, device, &t);
    if (status == NIB_ERR_MEMORY)
        return status;
    if (status) {
        nib_error cause;
        nib_get_error(&cause);
        return nib_fail(NIB_ERR_DATA, "%s: the metadata of tensor \"%s\": %.300s", nib_file_path(file), name,
                        cause.text);
    }
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    status = read_parts(file, name, description.version, t, parts);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        if (status)
            nib_buffer_release(parts[part]);
        else
            t->parts[part] = parts[part];
    }
    t->columnwise_stale = description.columnwise_stale && nib_tensor_has(t, NIB_COLUMNWISE);
    t->q.rowwise = description.wants[NIB_ROWWISE];
    t->q.columnwise = description.wants[NIB_COLUMNWISE];
    if (status)
        nib_tensor_destroy(t);
    else
        *out = t;
    return status;
}
