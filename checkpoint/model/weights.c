/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.c - which tensors make which weight, and reading weights of every checkpoint format alike.
 *
 * A checkpoint format is a row of a table: the ends of its tensors' names, what the data must be, and two functions. A weight with
 * a companion missing or of a wrong shape is listed all the same, so that it can be reported; reading it is an error.
 */
#include "io/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>

#include "format/codec.h"
#include "io/gguf.h"
#include "file/json.h"
#include "base/os.h"
#include "base/threads.h"
#include "nib_file.h"
#include "nib_reference.h"

/* ---- The table of checkpoint formats ---- */

typedef nib_status read_codes_fn(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                                 uint8_t *codes, uint8_t *scales);
typedef nib_status read_rows_fn(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                                nib_dtype dtype, void *out);
static read_codes_fn linear_codes, gguf_codes;
static read_rows_fn plain_rows, nvfp4_rows, mxfp4_rows, fp8_rows;

static const struct format {
    const char *name;
    nib_tensor_scale tensor_scale; /* NVFP4: what the number per tensor means */
    read_codes_fn *read_codes;     /* NVFP4 alone */
    read_rows_fn *read_rows;
} formats[NIB_CHECKPOINT_FORMAT_COUNT] = {
    [NIB_CHECKPOINT_FORMAT_PLAIN] = { "plain", NIB_TENSOR_SCALE_NONE, NULL, plain_rows },
    [NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS] = { "compressed-tensors", NIB_TENSOR_SCALE_DIVISOR, linear_codes,
                                                   nvfp4_rows },
    [NIB_CHECKPOINT_FORMAT_MODELOPT] = { "modelopt", NIB_TENSOR_SCALE_MULTIPLIER, linear_codes, nvfp4_rows },
    [NIB_CHECKPOINT_FORMAT_TORCHAO] = { "torchao", NIB_TENSOR_SCALE_MULTIPLIER, linear_codes, nvfp4_rows },
    [NIB_CHECKPOINT_FORMAT_GGUF] = { "gguf", NIB_TENSOR_SCALE_MULTIPLIER, gguf_codes, nvfp4_rows },
    [NIB_CHECKPOINT_FORMAT_NIB] = { "nib", NIB_TENSOR_SCALE_AMAX, linear_codes, nvfp4_rows },
    [NIB_CHECKPOINT_FORMAT_MXFP4] = { "mxfp4", NIB_TENSOR_SCALE_NONE, NULL, mxfp4_rows },
    [NIB_CHECKPOINT_FORMAT_FP8_BLOCK] = { "fp8-block", NIB_TENSOR_SCALE_NONE, NULL, fp8_rows },
};

const char *nib_checkpoint_format_name(nib_checkpoint_format format)
{
    return (unsigned)format < NIB_CHECKPOINT_FORMAT_COUNT ? formats[format].name : NULL;
}

nib_status nib_checkpoint_format_from_name(const char *name, nib_checkpoint_format *out)
{
    NIB_REQUIRE(name);
    NIB_REQUIRE(out);
    for (int i = 0; i < NIB_CHECKPOINT_FORMAT_COUNT; i++)
        if (strcmp(name, formats[i].name) == 0) {
            *out = (nib_checkpoint_format)i;
            return NIB_OK;
        }
    return nib_fail(NIB_ERR_ARG, "there is no checkpoint format %s", nib_quote(name).text);
}

bool nib_ck_is_nvfp4(nib_checkpoint_format format) { return formats[format].read_codes != NULL; }

/* How names of tensors end. The first row that fits a tensor takes it. */
static const struct layout {
    nib_checkpoint_format format;
    nib_dtype data; /* NIB_DTYPE_COUNT: by the GGUF type */
    int ggml_type;
    int rank;
    const char *ends[NIB_ROLE_COUNT];
} layouts[] = {
    { NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS,
      NIB_U8,
      -1,
      2,
      { ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale" } },
    { NIB_CHECKPOINT_FORMAT_MODELOPT,
      NIB_U8,
      -1,
      2,
      { ".weight", ".weight_scale", ".weight_scale_2", ".input_scale" } },
    { NIB_CHECKPOINT_FORMAT_TORCHAO,
      NIB_U8,
      -1,
      2,
      { "._weight_qdata", "._weight_scale", "._weight_per_tensor_scale", "._weight_act_per_tensor_scale" } },
    { NIB_CHECKPOINT_FORMAT_NIB, NIB_U8, -1, -1, { ".row_data", ".row_scale", ".row_level", NULL } },
    { NIB_CHECKPOINT_FORMAT_FP8_BLOCK, NIB_E4M3, -1, 2, { ".weight", ".weight_scale_inv", NULL, NULL } },
    { NIB_CHECKPOINT_FORMAT_MXFP4, NIB_U8, -1, 4, { "_blocks", "_scales", NULL, NULL } },
    { NIB_CHECKPOINT_FORMAT_GGUF, NIB_DTYPE_COUNT, NIB_GGUF_NVFP4, -1, { ".weight", NULL, ".scale", ".input_scale" } },
    { NIB_CHECKPOINT_FORMAT_MXFP4, NIB_DTYPE_COUNT, NIB_GGUF_MXFP4, -1, { ".weight", NULL, NULL, NULL } },
    { NIB_CHECKPOINT_FORMAT_PLAIN, NIB_BF16, -1, 2, { ".weight", NULL, NULL, NULL } },
    { NIB_CHECKPOINT_FORMAT_PLAIN, NIB_F16, -1, 2, { ".weight", NULL, NULL, NULL } },
    { NIB_CHECKPOINT_FORMAT_PLAIN, NIB_F32, -1, 2, { ".weight", NULL, NULL, NULL } },
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* A stack of experts in ModelOpt's form, whose name has no ".weight". */
static const char *const stack_ends[NIB_ROLE_COUNT] = { "", "_weight_scale", "_weight_scale_2", "_input_scale" };

/* ---- Finding weights ---- */

struct finder {
    nib_checkpoint *c;
    size_t capacity;
    nib_dtype nominal; /* of weights that are not plain */
};

static nib_status add_weight(struct finder *finder, const struct nib_ck_weight *weight)
{
    nib_checkpoint *c = finder->c;
    if (!weight->name || c->n_weights + 1 >= NIB_NONE)
        return nib_ck_no_memory(c);
    struct nib_ck_weight *weights = nib_grow(c->weights, &finder->capacity, c->n_weights + 1, sizeof *weights);
    if (!weights)
        return nib_ck_no_memory(c);
    c->weights = weights;
    weights[c->n_weights++] = *weight;
    return NIB_OK;
}

/* The tensor whose name is the first `bytes` of `name` and then `end`. */
static nib_status find_companion(nib_checkpoint *c, const char *name, size_t bytes, const char *end, uint32_t *out)
{
    *out = NIB_NONE;
    if (!end)
        return NIB_OK;
    char room[512], *full = room;
    const size_t needed = bytes + strlen(end) + 1;
    if (needed > sizeof room && !(full = nib_alloc(needed)))
        return nib_ck_no_memory(c);
    snprintf(full, needed, "%.*s%s", (int)bytes, name, end);
    *out = nib_ck_find_tensor(c, full);
    if (full != room)
        nib_free(full);
    return NIB_OK;
}

static nib_status find_companions(nib_checkpoint *c, uint32_t data, size_t bytes,
                                  const char *const ends[NIB_ROLE_COUNT], uint32_t tensor[NIB_ROLE_COUNT])
{
    tensor[NIB_ROLE_DATA] = data;
    for (int role = NIB_ROLE_DATA + 1; role < NIB_ROLE_COUNT; role++)
        TRY(find_companion(c, c->tensors[data].name, bytes, ends[role], &tensor[role]));
    return NIB_OK;
}

static bool has_float_dtype(const struct nib_ck_tensor *t)
{
    return t->dtype == NIB_F32 || t->dtype == NIB_BF16 || t->dtype == NIB_F16;
}

/* Only a tensor that has data makes weights: beside a dim of 0 the others can be anything, and a file of a hundred bytes
 * would have 10^11 experts without rows. With data the file bounds every dim and every product; none has 2^48 bytes. */
static bool has_data(const struct nib_ck_tensor *t) { return t->bytes > 0 && t->bytes <= (uint64_t)1 << 48; }

/* The weights of a stack: matrix e of the tensor, or every other row of it, is expert e's part. */
static nib_status add_stack(struct finder *finder, const struct nib_ck_stack *stack, const struct nib_ck_weight *common,
                            const char *tensor, int64_t experts, int64_t rows)
{
    const int parts = stack->parts[1] ? 2 : 1;
    if (rows % parts)
        return nib_ck_diagnostic(finder->c, "open-orientation", tensor, "its rows do not divide into gate and up",
                                 true);
    for (int64_t e = 0; e < experts; e++)
        for (int part = 0; part < parts; part++) {
            struct nib_ck_weight w = *common;
            w.name = nib_ck_string(finder->c, "%.*s%s.%lld.%s", (int)stack->prefix_bytes, tensor, stack->prefix,
                                   (long long)e, stack->parts[part]);
            w.rows = rows / parts;
            w.index = e;
            w.row_first = stack->interleaved ? part : part * w.rows;
            w.row_step = stack->interleaved ? parts : 1;
            TRY(add_weight(finder, &w));
        }
    return NIB_OK;
}

/* An orientation that config.json leaves open is no reason not to open the rest. */
static nib_status stack_of(struct finder *finder, const char *name, int64_t rank, const int64_t *shape, bool *is,
                           struct nib_ck_stack *out)
{
    nib_checkpoint *c = finder->c;
    const nib_status status = nib_ck_stack_of(c, name, rank, shape, is, out);
    if (status != NIB_ERR_DATA)
        return status;
    *is = false;
    return nib_ck_diagnostic(c, "open-orientation", name, nib_last_error(), true);
}

static nib_status try_plain_stack(struct finder *finder, uint32_t id, bool *taken)
{
    const struct nib_ck_tensor *t = &finder->c->tensors[id];
    struct nib_ck_stack stack;
    *taken = false;
    if (!has_float_dtype(t) || t->ggml_type >= 0)
        return NIB_OK;
    TRY(stack_of(finder, t->name, t->rank, t->shape, taken, &stack));
    if (!*taken)
        return NIB_OK;
    const struct nib_ck_weight common = { .format = NIB_CHECKPOINT_FORMAT_PLAIN,
                                          .tensor_scale = NIB_TENSOR_SCALE_NONE,
                                          .dtype = t->dtype,
                                          .cols = t->shape[stack.transposed ? 1 : 2],
                                          .tensor = { id, NIB_NONE, NIB_NONE, NIB_NONE },
                                          .transposed = stack.transposed };
    return add_stack(finder, &stack, &common, t->name, t->shape[0], t->shape[stack.transposed ? 2 : 1]);
}

/* [E, K/2, N] with scales [E, K/16, N], as ModelOpt writes some families; the other way round too. */
static nib_status try_packed_stack(struct finder *finder, uint32_t id, bool *taken)
{
    nib_checkpoint *c = finder->c;
    const struct nib_ck_tensor *t = &c->tensors[id];
    *taken = false;
    if (t->dtype != NIB_U8 || t->rank != 3 || t->ggml_type >= 0)
        return NIB_OK;
    struct nib_ck_weight common = { .format = NIB_CHECKPOINT_FORMAT_MODELOPT,
                                    .tensor_scale = formats[NIB_CHECKPOINT_FORMAT_MODELOPT].tensor_scale,
                                    .dtype = finder->nominal };
    TRY(find_companions(c, id, strlen(t->name), stack_ends, common.tensor));
    if (common.tensor[NIB_ROLE_SCALE] == NIB_NONE)
        return NIB_OK;
    const struct nib_ck_tensor *scale = &c->tensors[common.tensor[NIB_ROLE_SCALE]];
    const bool turned =
        scale->rank == 3 && scale->shape[1] == nib_ceil_div(t->shape[1], 8) && scale->shape[2] == t->shape[2];
    /* The logical shape decides nothing here but the names. */
    const int64_t logical[3] = { t->shape[0], turned ? 2 * t->shape[1] : t->shape[1],
                                 turned ? t->shape[2] : 2 * t->shape[2] };
    struct nib_ck_stack stack;
    TRY(stack_of(finder, t->name, 3, logical, taken, &stack));
    if (!*taken)
        return NIB_OK;
    common.transposed = turned;
    common.cols = logical[turned ? 1 : 2];
    return add_stack(finder, &stack, &common, t->name, t->shape[0], logical[turned ? 2 : 1]);
}

/* [E, N, K/32, 16] */
static nib_status add_blocks(struct finder *finder, const struct nib_ck_weight *common, uint32_t id, size_t bytes)
{
    nib_checkpoint *c = finder->c;
    const struct nib_ck_tensor *t = &c->tensors[id];
    struct nib_ck_stack stack;
    bool is;
    if (t->shape[3] != 16)
        return nib_ck_diagnostic(c, "open-orientation", t->name, "its last dim is not the 16 bytes of a block", true);
    const char *name = nib_ck_string(c, "%.*s", (int)bytes, t->name);
    if (!name)
        return nib_ck_no_memory(c);
    struct nib_ck_weight w = *common;
    w.cols = 32 * t->shape[2];
    /* Packed along K, so that it is never transposed; nib_ck_stack_of knows the parts. */
    const int64_t logical[3] = { t->shape[0], t->shape[1], w.cols };
    TRY(stack_of(finder, name, 3, logical, &is, &stack));
    return is ? add_stack(finder, &stack, &w, name, t->shape[0], t->shape[1]) : NIB_OK;
}

/* The value of a word of what nib_writer_write_tensor noted about a tensor, or -1. */
static int64_t saved_word(const char *words, const char *key)
{
    const size_t n = strlen(key);
    for (const char *word = words; word; word = strchr(word, ' ')) {
        word += *word == ' ';
        if (strncmp(word, key, n) == 0 && word[n] == '=')
            return strtoll(word + n + 1, NULL, 10);
    }
    return -1;
}

/* A tensor that the library saved: rowwise NVFP4 with one tensor scale can be a weight, anything else is only copied. */
static nib_status add_saved(struct finder *finder, struct nib_ck_weight *w, uint32_t id, size_t bytes)
{
    nib_checkpoint *c = finder->c;
    const struct nib_ck_tensor *t = &c->tensors[id];
    if (t->rank != 2)
        return NIB_OK; /* whatever the metadata says of it */
    char *key = nib_ck_string(c, "nib:%.*s", (int)bytes, t->name);
    if (!key)
        return nib_ck_no_memory(c);
    const char *words = nib_file_metadata(c->files[t->file].safetensors, key);
    if (!words || strncmp(words, "format=nvfp4 ", 13) != 0 || saved_word(words, "row_scaled") != 0 ||
        saved_word(words, "swizzled") != 0 || saved_word(words, "rht_rowwise") != 0 || saved_word(words, "rank") != 2)
        return NIB_OK;
    w->cols =
        saved_word(strstr(words, "dim="), "dim") < 0 ? 0 : saved_word(strstr(strstr(words, "dim=") + 4, "dim="), "dim");
    w->rows = t->shape[0];
    w->e4m3_max = (int32_t)saved_word(words, "e4m3_max");
    nib_dialect dialect = NIB_DIALECT_TE;
    const char *word = strstr(words, "dialect=");
    char name[32] = "";
    if (word)
        snprintf(name, sizeof name, "%.*s", (int)strcspn(word + 8, " "), word + 8);
    if (nib_dialect_from_name(name, &dialect))
        return NIB_OK;
    w->tensor_scale = dialect == NIB_DIALECT_TE && saved_word(words, "tensor_scale") == NIB_TENSOR_SCALE_RULE_DIALECT
                          ? NIB_TENSOR_SCALE_AMAX
                      : dialect == NIB_DIALECT_COMPRESSED_TENSORS || dialect == NIB_DIALECT_GIST
                          ? NIB_TENSOR_SCALE_DIVISOR
                          : NIB_TENSOR_SCALE_MULTIPLIER;
    if (w->cols < 1 || w->cols > 2 * t->shape[1] || saved_word(words, "single_level") != 0)
        return NIB_OK;
    w->name = key + 4;
    return add_weight(finder, w);
}

/* GGUF keeps experts as [E, N, K]; its names have no place for a number, so that they get one at the end. */
static nib_status add_gguf(struct finder *finder, struct nib_ck_weight *w, uint32_t id, size_t bytes)
{
    nib_checkpoint *c = finder->c;
    const struct nib_ck_tensor *t = &c->tensors[id];
    if (t->rank != 2 && t->rank != 3)
        return NIB_OK;
    w->rows = t->shape[t->rank - 2];
    w->cols = t->shape[t->rank - 1];
    if (t->rank == 2) {
        w->name = nib_ck_string(c, "%.*s", (int)bytes, t->name);
        return add_weight(finder, w);
    }
    for (w->index = 0; w->index < t->shape[0]; w->index++) {
        w->name = nib_ck_string(c, "%.*s.%lld", (int)bytes, t->name, (long long)w->index);
        TRY(add_weight(finder, w));
    }
    return NIB_OK;
}

/* U8 tensors that end in ".weight" are many things; only a companion, or the configuration, makes one a weight. */
static bool is_meant(const nib_checkpoint *c, const struct layout *layout, const struct nib_ck_weight *w)
{
    if (layout->format == NIB_CHECKPOINT_FORMAT_FP8_BLOCK)
        return w->tensor[NIB_ROLE_SCALE] != NIB_NONE;
    if (layout->format != NIB_CHECKPOINT_FORMAT_MODELOPT)
        return true;
    const char *method = json_string_value(json_object_get(c->quantization, "quant_method"));
    return w->tensor[NIB_ROLE_SCALE] != NIB_NONE || w->tensor[NIB_ROLE_TENSOR_SCALE] != NIB_NONE ||
           (method && strcmp(method, "modelopt") == 0);
}

static nib_status add_by_layout(struct finder *finder, const struct layout *layout, uint32_t id)
{
    nib_checkpoint *c = finder->c;
    const struct nib_ck_tensor *t = &c->tensors[id];
    const size_t bytes = strlen(t->name) - strlen(layout->ends[NIB_ROLE_DATA]);
    struct nib_ck_weight w = { .format = layout->format,
                               .tensor_scale = formats[layout->format].tensor_scale,
                               .dtype = layout->format == NIB_CHECKPOINT_FORMAT_PLAIN ? t->dtype : finder->nominal,
                               .index = -1,
                               .row_step = 1 };
    TRY(find_companions(c, id, bytes, layout->ends, w.tensor));
    if (!is_meant(c, layout, &w))
        return NIB_OK;
    if (layout->format == NIB_CHECKPOINT_FORMAT_NIB)
        return add_saved(finder, &w, id, bytes);
    if (t->ggml_type >= 0)
        return add_gguf(finder, &w, id, bytes);
    if (layout->rank == 4)
        return add_blocks(finder, &w, id, bytes);
    w.rows = t->shape[0];
    w.cols = layout->data == NIB_U8 ? 2 * t->shape[1] : t->shape[1];
    /* compressed-tensors' mxfp4-pack-quantized differs from its NVFP4 by the scales alone. */
    if (layout->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS && w.tensor[NIB_ROLE_SCALE] != NIB_NONE &&
        c->tensors[w.tensor[NIB_ROLE_SCALE]].dtype == NIB_U8) {
        w.format = NIB_CHECKPOINT_FORMAT_MXFP4;
        w.tensor_scale = NIB_TENSOR_SCALE_NONE;
    }
    w.name = nib_ck_string(c, "%.*s", (int)bytes, t->name);
    return add_weight(finder, &w);
}

static nib_status find_weight(struct finder *finder, uint32_t id)
{
    const struct nib_ck_tensor *t = &finder->c->tensors[id];
    bool taken = false;
    if (!has_data(t))
        return NIB_OK;
    TRY(try_plain_stack(finder, id, &taken));
    if (!taken)
        TRY(try_packed_stack(finder, id, &taken));
    for (int i = 0; !taken && i < LAYOUTS; i++) {
        const struct layout *layout = &layouts[i];
        const char *end = layout->ends[NIB_ROLE_DATA];
        if (layout->data != t->dtype || (layout->ggml_type >= 0 && layout->ggml_type != t->ggml_type) ||
            (layout->rank >= 0 && layout->rank != t->rank) || !nib_ck_ends_with(t->name, end) ||
            strlen(t->name) == strlen(end))
            continue;
        /* A row that does not want it after all leaves it to a later one. */
        const size_t before = finder->c->n_weights, diagnostics = finder->c->n_diagnostics;
        TRY(add_by_layout(finder, layout, id));
        taken = finder->c->n_weights > before || finder->c->n_diagnostics > diagnostics;
    }
    return NIB_OK;
}

/* "layers.10" comes after "layers.9". */
static int natural_order(const char *a, const char *b)
{
    while (*a && *b) {
        if (*a >= '0' && *a <= '9' && *b >= '0' && *b <= '9') {
            const size_t n = strspn(a, "0123456789"), m = strspn(b, "0123456789");
            const char *x = a + strspn(a, "0"), *y = b + strspn(b, "0");
            const size_t digits_x = (size_t)(a + n - x), digits_y = (size_t)(b + m - y);
            if (digits_x != digits_y)
                return digits_x < digits_y ? -1 : 1;
            const int order = digits_x ? memcmp(x, y, digits_x) : 0;
            if (order)
                return order;
            if (n != m)
                return n < m ? -1 : 1;
            a += n;
            b += m;
            continue;
        }
        if (*a != *b)
            return (unsigned char)*a < (unsigned char)*b ? -1 : 1;
        a++;
        b++;
    }
    return *a ? 1 : *b ? -1 : 0;
}

static int by_name(const void *a, const void *b)
{
    const struct nib_ck_weight *x = a, *y = b;
    const int order = natural_order(x->name, y->name);
    return order                                                 ? order
           : x->tensor[NIB_ROLE_DATA] < y->tensor[NIB_ROLE_DATA] ? -1
                                                                 : x->tensor[NIB_ROLE_DATA] > y->tensor[NIB_ROLE_DATA];
}

static nib_dtype nominal_dtype(const nib_checkpoint *c)
{
    static const struct {
        const char *name;
        nib_dtype dtype;
    } names[] = { { "float32", NIB_F32 }, { "float16", NIB_F16 } };
    const json_t *text_config = json_object_get(c->config, "text_config");
    const json_t *const values[] = { json_object_get(c->config, "dtype"), json_object_get(c->config, "torch_dtype"),
                                     json_object_get(text_config, "dtype"),
                                     json_object_get(text_config, "torch_dtype") };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        for (size_t j = 0; json_is_string(values[i]) && j < sizeof names / sizeof *names; j++)
            if (strcmp(json_string_value(values[i]), names[j].name) == 0)
                return names[j].dtype;
    return NIB_BF16;
}

static nib_status check_repeated(const nib_checkpoint *c)
{
    for (size_t i = 1; i < c->n_weights; i++)
        if (strcmp(c->weights[i - 1].name, c->weights[i].name) == 0)
            return nib_fail(NIB_ERR_DATA, "%s: the weight %s is there twice, in tensor %s and in tensor %s", c->path,
                            nib_quote(c->weights[i].name).text,
                            nib_quote(c->tensors[c->weights[i - 1].tensor[NIB_ROLE_DATA]].name).text,
                            nib_quote(c->tensors[c->weights[i].tensor[NIB_ROLE_DATA]].name).text);
    return NIB_OK;
}

/* The columnwise usage of a tensor that the library saved belongs to its weight: no other checkpoint format has a place for it. */
static nib_status claim_columnwise(nib_checkpoint *c, uint32_t weight)
{
    static const char *const ends[] = { "col_data", "col_scale", "col_level" };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const char *name = nib_ck_string(c, "%s.%s", c->weights[weight].name, ends[i]);
        if (!name)
            return nib_ck_no_memory(c);
        const uint32_t tensor = nib_ck_find_tensor(c, name);
        if (tensor != NIB_NONE)
            c->tensors[tensor].weight = weight;
    }
    return NIB_OK;
}

nib_status nib_ck_find_weights(nib_checkpoint *c)
{
    struct finder finder = { .c = c, .nominal = nominal_dtype(c) };
    for (uint32_t i = 0; i < c->n_tensors; i++)
        TRY(find_weight(&finder, i));
    if (c->n_weights)
        qsort(c->weights, c->n_weights, sizeof *c->weights, by_name);
    TRY(check_repeated(c));
    for (size_t i = c->n_weights; i-- > 0;)
        for (int role = 0; role < NIB_ROLE_COUNT; role++)
            if (c->weights[i].tensor[role] != NIB_NONE)
                c->tensors[c->weights[i].tensor[role]].weight = (uint32_t)i;
    for (size_t i = 0; i < c->n_weights; i++)
        if (c->weights[i].format == NIB_CHECKPOINT_FORMAT_NIB)
            TRY(claim_columnwise(c, (uint32_t)i));
    for (size_t i = 0; i < c->n_weights; i++)
        if (c->weights[i].format && (!c->format || c->weights[i].format < c->format))
            c->format = c->weights[i].format;
    return NIB_OK;
}

/* ---- Matrices within tensors ---- */

/* A weight's matrix in one of its tensors, in units of `size` bytes: N lines of `length`, or transposed. */
struct place {
    uint32_t tensor;
    size_t size;
    int64_t lines, length; /* of the whole matrix in the tensor */
    int64_t index;         /* of the matrix */
};

/* The lines of a weight's rows first..first+count-1 into out, one after the other. */
static nib_status read_straight(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                                int64_t first, int64_t count, void *out)
{
    const size_t line = (size_t)p->length * p->size;
    const uint64_t base = (uint64_t)nib_max(p->index, 0) * (uint64_t)p->lines * line;
    const uint64_t start = base + (uint64_t)(w->row_first + first * w->row_step) * line;
    if (w->row_step == 1)
        return nib_ck_read(c, p->tensor, start, out, (size_t)count * line);
    /* Every other line: read some with what lies between, and move them together. */
    enum { SPAN = 1 << 20 };
    const int64_t at_once = nib_max(1, (int64_t)(SPAN / (line * (size_t)w->row_step + 1)));
    char *room = nib_alloc((size_t)nib_min(at_once, count) * (size_t)w->row_step * line);
    if (!room)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t n = nib_min(at_once, count - done);
        status = nib_ck_read(c, p->tensor, start + (uint64_t)(done * w->row_step) * line, room,
                             (size_t)((n - 1) * w->row_step + 1) * line);
        for (int64_t i = 0; i < n && !status; i++)
            memcpy((char *)out + (size_t)(done + i) * line, room + (size_t)(i * w->row_step) * line, line);
    }
    nib_free(room);
    return status;
}

/* Turn `rows` x `span` units of `size` bytes: out[r][k] from in[k][r * step]. Tiles, for the cache's sake. With a constant
 * size a unit is one load and one store. */
static inline void turn_units(const char *in, int64_t depth, int64_t span, int64_t count, int64_t step, size_t size,
                              char *out, int64_t out_line)
{
    enum { TILE = 32 };
    for (int64_t r0 = 0; r0 < count; r0 += TILE)
        for (int64_t r = r0; r < nib_min(r0 + TILE, count); r++)
            for (int64_t k = 0; k < depth; k++)
                memcpy(out + (size_t)(r * out_line + k) * size, in + (size_t)(k * span + r * step) * size, size);
}

static void turn(const char *in, int64_t depth, int64_t span, int64_t count, int64_t step, size_t size, char *out,
                 int64_t out_line)
{
    if (size == 1)
        turn_units(in, depth, span, count, step, 1, out, out_line);
    else if (size == 2)
        turn_units(in, depth, span, count, step, 2, out, out_line);
    else
        turn_units(in, depth, span, count, step, 4, out, out_line);
}

/* The same from [length, lines]: a band of `length` at a time is read, as much of each of its rows as is needed. */
static nib_status read_turned(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                              int64_t first, int64_t count, void *out)
{
    enum { BAND = 32, ROOM = 4 << 20 };
    if (count == 0)
        return NIB_OK;
    const int64_t from = w->row_first + first * w->row_step, span = (count - 1) * w->row_step + 1;
    const bool whole = 2 * span > p->lines; /* then one read per band, with what lies between, costs less */
    const int64_t stride = whole ? p->lines : span;
    const int64_t band = nib_max(1, nib_min(BAND, ROOM / nib_max(1, stride * (int64_t)p->size)));
    const uint64_t base = (uint64_t)nib_max(p->index, 0) * (uint64_t)p->lines * (uint64_t)p->length;
    char *room = nib_alloc((size_t)(band * stride) * p->size);
    if (!room)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    for (int64_t k = 0; k < p->length && !status; k += band) {
        const int64_t n = nib_min(band, p->length - k);
        if (whole)
            status = nib_ck_read(c, p->tensor, (base + (uint64_t)(k * p->lines)) * p->size, room,
                                 (size_t)(n * p->lines) * p->size);
        for (int64_t i = 0; i < n && !whole && !status; i++)
            status = nib_ck_read(c, p->tensor, (base + (uint64_t)((k + i) * p->lines + from)) * p->size,
                                 room + (size_t)(i * span) * p->size, (size_t)span * p->size);
        if (!status)
            turn(room + (whole ? (size_t)from * p->size : 0), n, stride, count, w->row_step, p->size,
                 (char *)out + (size_t)k * p->size, p->length);
    }
    nib_free(room);
    return status;
}

static nib_status read_lines(const nib_checkpoint *c, const struct nib_ck_weight *w, const struct place *p,
                             int64_t first, int64_t count, void *out)
{
    return w->transposed ? read_turned(c, w, p, first, count, out) : read_straight(c, w, p, first, count, out);
}

/* ---- Levels ---- */

/* Number `index` of a tensor of scales, in any float dtype. */
static nib_status read_number(const nib_checkpoint *c, uint32_t tensor, int64_t index, float *out)
{
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    char place[256];
    if (!has_float_dtype(t))
        return nib_fail(NIB_ERR_DATA, "%s: it is not F32, BF16 or F16", nib_ck_place(c, tensor, place, sizeof place));
    const size_t size = (size_t)nib_dtypes[t->dtype].bits / 8;
    const uint64_t count = t->bytes / size;
    if (count == 0 || (count > 1 && (index < 0 || (uint64_t)index >= count)))
        return nib_fail(NIB_ERR_DATA, "%s: it has %llu numbers where there should be one",
                        nib_ck_place(c, tensor, place, sizeof place), (unsigned long long)count);
    uint32_t bits = 0;
    TRY(nib_ck_read(c, tensor, count > 1 ? (uint64_t)index * size : 0, &bits, size));
    return nib_decode(t->dtype, &bits, 1, out);
}

nib_status nib_ck_read_tensor_scale(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_tensor_scale *kind,
                                    float *tensor_scale)
{
    *kind = w->tensor_scale;
    *tensor_scale = 1;
    if (!nib_ck_is_nvfp4(w->format))
        return NIB_OK;
    const uint32_t tensor = w->tensor[NIB_ROLE_TENSOR_SCALE];
    if (tensor != NIB_NONE)
        return read_number(c, tensor, w->index, tensor_scale);
    if (w->format == NIB_CHECKPOINT_FORMAT_GGUF || w->format == NIB_CHECKPOINT_FORMAT_TORCHAO)
        return NIB_OK; /* optional there */
    return nib_fail(NIB_ERR_DATA, "%s: weight %s: its tensor scale is missing", c->path, nib_quote(w->name).text);
}

nib_status nib_ck_read_input(const nib_checkpoint *c, const struct nib_ck_weight *w, int *has_input, float *scale)
{
    *has_input = w->tensor[NIB_ROLE_INPUT] != NIB_NONE;
    *scale = 1;
    return *has_input ? read_number(c, w->tensor[NIB_ROLE_INPUT], w->index, scale) : NIB_OK;
}

/* ---- NVFP4 ---- */

static nib_status bad_scales(const nib_checkpoint *c, const struct nib_ck_weight *w, const char *fact)
{
    return nib_fail(NIB_ERR_DATA, "%s: weight %s: %s", c->path, nib_quote(w->name).text, fact);
}

/* Scales must be E4M3, one per 16 of a row, in rows as the data has them. A saved tensor's are padded. */
static nib_status place_scales(const nib_checkpoint *c, const struct nib_ck_weight *w, struct place *p)
{
    const uint32_t id = w->tensor[NIB_ROLE_SCALE];
    const int64_t blocks = nib_ceil_div(w->cols, 16);
    if (id == NIB_NONE)
        return bad_scales(c, w, "its block scales are missing");
    const struct nib_ck_tensor *data = &c->tensors[w->tensor[NIB_ROLE_DATA]], *t = &c->tensors[id];
    const int64_t stacked = w->index >= 0;
    if (t->dtype != NIB_E4M3 && !(w->format == NIB_CHECKPOINT_FORMAT_NIB && t->dtype == NIB_U8))
        return bad_scales(c, w, "its block scales are not F8_E4M3");
    if (t->rank != 2 + stacked || (stacked && t->shape[0] != data->shape[0]))
        return bad_scales(c, w, "its block scales have not the shape of its data: they may be swizzled for a GEMM");
    const int64_t *shape = t->shape + stacked, *of_data = data->shape + stacked;
    const int64_t lines = w->transposed ? shape[1] : shape[0], length = w->transposed ? shape[0] : shape[1];
    const int64_t data_lines = w->transposed ? of_data[1] : of_data[0];
    const bool padded = w->format == NIB_CHECKPOINT_FORMAT_NIB;
    if (padded ? lines < data_lines || length < blocks : lines != data_lines || length != blocks) {
        char fact[192];
        snprintf(fact, sizeof fact,
                 "its block scales are [%lld, %lld], and for blocks of 16 they should be [%lld, %lld]%s",
                 (long long)lines, (long long)length, (long long)data_lines, (long long)blocks,
                 length >= 4 * blocks ? ": they may be swizzled for a GEMM" : "");
        return bad_scales(c, w, fact);
    }
    *p = (struct place){ id, 1, lines, length, w->index };
    return NIB_OK;
}

static nib_status linear_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                               uint8_t *codes, uint8_t *scales)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    const int64_t *shape = t->shape + (w->index >= 0);
    const struct place data = { w->tensor[NIB_ROLE_DATA], 1, w->transposed ? shape[1] : shape[0],
                                w->transposed ? shape[0] : shape[1], w->index };
    struct place place;
    TRY(place_scales(c, w, &place));
    if (data.length != nib_ceil_div(w->cols, 2))
        return bad_scales(c, w, "its codes have not the shape that was noted for it");
    if (codes)
        TRY(read_lines(c, w, &data, first, count, codes));
    const int64_t blocks = nib_ceil_div(w->cols, 16);
    if (!scales || place.length == blocks)
        return scales ? read_lines(c, w, &place, first, count, scales) : NIB_OK;
    for (int64_t i = 0; i < count; i++) /* padded lines */
        TRY(nib_ck_read(c, place.tensor, (uint64_t)((first + i) * place.length), scales + i * blocks, (size_t)blocks));
    return NIB_OK;
}

/* Whole blocks of 64, regrouped. */
static nib_status gguf_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales)
{
    const int64_t blocks = w->cols / NIB_GGUF_NVFP4_ELEMENTS, at_once = nib_max(1, (1 << 20) / nib_max(1, blocks * 36));
    const size_t line = (size_t)blocks * NIB_GGUF_NVFP4_BYTES, n = (size_t)nib_min(at_once, count);
    const struct place place = { w->tensor[NIB_ROLE_DATA], 1, w->rows, (int64_t)line, w->index };
    uint8_t *room = nib_alloc(n * (line + (size_t)blocks * (NIB_GGUF_NVFP4_CODES + NIB_GGUF_NVFP4_SCALES)));
    if (!room)
        return nib_ck_no_memory(c);
    uint8_t *const spare_codes = room + n * line, *const spare_scales =
                                                      spare_codes + n * (size_t)blocks * NIB_GGUF_NVFP4_CODES;
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        status = read_lines(c, w, &place, first + done, rows, room);
        if (!status)
            nib_gguf_nvfp4_split(room, (size_t)(rows * blocks),
                                 codes ? codes + done * blocks * NIB_GGUF_NVFP4_CODES : spare_codes,
                                 scales ? scales + done * blocks * NIB_GGUF_NVFP4_SCALES : spare_scales);
    }
    nib_free(room);
    return status;
}

void nib_ck_decoder(nib_tensor_scale kind, int32_t e4m3_max, nib_quantizer *q)
{
    nib_quantizer_init(q);
    q->columnwise = 0;
    if (kind == NIB_TENSOR_SCALE_DIVISOR)
        q->dialect = NIB_DIALECT_COMPRESSED_TENSORS;
    else if (kind != NIB_TENSOR_SCALE_AMAX)
        q->tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT;
    else if (e4m3_max == 256) {
        q->scale_rule = NIB_SCALE_4OVER6; /* the only rule that goes with it; decoding knows no other difference */
        q->e4m3_max = 256;
    }
}

nib_status nib_ck_decode(const struct nib_ck_weight *w, float tensor_scale, const uint8_t *codes, const uint8_t *scales,
                         int64_t rows, nib_dtype dtype, void *out)
{
    const int64_t shape[2] = { rows, w->cols }, blocks = nib_ceil_div(w->cols, 16);
    nib_quantizer q;
    nib_tensor *tensor = NULL;
    nib_array view, part;
    nib_ck_decoder(w->tensor_scale, w->e4m3_max, &q);
    TRY(nib_tensor_create(&q, dtype, 2, shape, NULL, &tensor));
    nib_status status = nib_tensor_part(tensor, NIB_ROW_DATA, &part);
    if (!status && rows)
        memcpy(part.data, codes, (size_t)(rows * nib_ceil_div(w->cols, 2)));
    if (!status)
        status = nib_tensor_part(tensor, NIB_ROW_SCALE, &part);
    for (int64_t i = 0; i < rows && !status; i++)
        memcpy((char *)part.data + i * part.shape[1], scales + i * blocks, (size_t)blocks);
    if (!status)
        status = nib_tensor_part(tensor, NIB_ROW_TENSOR_SCALE, &part);
    if (!status) {
        memcpy(part.data, &tensor_scale, sizeof tensor_scale);
        status = nib_array_init(&view, out, dtype, 2, shape);
        view.device = nib_serial_host();
    }
    if (!status)
        status = nib_dequantize(tensor, NIB_ROWWISE, &view);
    nib_tensor_destroy(tensor);
    return status;
}

/* Rows at a time, so that what is needed besides the output stays small. */
enum { PANEL_BYTES = 4 << 20 };
static int64_t panel_rows(int64_t bytes_per_row) { return nib_max(1, PANEL_BYTES / nib_max(1, bytes_per_row)); }

static nib_status nvfp4_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             nib_dtype dtype, void *out)
{
    const int64_t code_bytes = nib_ceil_div(w->cols, 2), blocks = nib_ceil_div(w->cols, 16);
    const int64_t at_once = nib_min(panel_rows(code_bytes + blocks), count);
    const size_t line = (size_t)w->cols * (size_t)nib_dtypes[dtype].bits / 8;
    nib_tensor_scale kind;
    float tensor_scale;
    TRY(nib_ck_read_tensor_scale(c, w, &kind, &tensor_scale));
    uint8_t *codes = nib_alloc((size_t)(at_once * (code_bytes + blocks)));
    if (!codes)
        return nib_ck_no_memory(c);
    uint8_t *const scales = codes + at_once * code_bytes;
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        status = formats[w->format].read_codes(c, w, first + done, rows, codes, scales);
        if (!status)
            status = nib_ck_decode(w, tensor_scale, codes, scales, rows, dtype, (char *)out + (size_t)done * line);
    }
    nib_free(codes);
    return status;
}

/* ---- Numbers of the other checkpoint formats ---- */

/* n numbers of one dtype as another; through F32, which holds all of them. */
static nib_status convert(nib_dtype from, const void *in, size_t n, nib_dtype to, void *out)
{
    enum { AT_ONCE = 1024 };
    float values[AT_ONCE];
    const size_t in_size = (size_t)nib_dtypes[from].bits / 8, out_size = (size_t)nib_dtypes[to].bits / 8;
    for (size_t i = 0; i < n; i += AT_ONCE) {
        const size_t count = n - i < AT_ONCE ? n - i : AT_ONCE;
        TRY(nib_decode(from, (const char *)in + i * in_size, count, values));
        TRY(nib_encode(to, values, count, (char *)out + i * out_size));
    }
    return NIB_OK;
}

static nib_status plain_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             nib_dtype dtype, void *out)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    const int64_t *shape = t->shape + (w->index >= 0);
    const size_t size = (size_t)nib_dtypes[t->dtype].bits / 8;
    const struct place place = { w->tensor[NIB_ROLE_DATA], size, w->transposed ? shape[1] : shape[0],
                                 w->transposed ? shape[0] : shape[1], w->index };
    if (dtype == t->dtype)
        return read_lines(c, w, &place, first, count, out);
    const int64_t at_once = nib_min(panel_rows(w->cols * (int64_t)size), count);
    char *room = nib_alloc((size_t)(at_once * w->cols) * size);
    if (!room)
        return nib_ck_no_memory(c);
    nib_status status = NIB_OK;
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        status = read_lines(c, w, &place, first + done, rows, room);
        if (!status)
            status = convert(t->dtype, room, (size_t)(rows * w->cols), dtype,
                             (char *)out + (size_t)(done * w->cols) * (size_t)nib_dtypes[dtype].bits / 8);
    }
    nib_free(room);
    return status;
}

nib_status nib_ck_read_mxfp4(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    const int64_t blocks = nib_ceil_div(w->cols, 32), lines = t->rank == 4 ? t->shape[1] : w->rows;
    if (t->ggml_type < 0) {
        const uint32_t id = w->tensor[NIB_ROLE_SCALE];
        const struct nib_ck_tensor *s = id == NIB_NONE ? NULL : &c->tensors[id];
        if (!s || s->dtype != NIB_U8 || s->bytes != t->bytes / 16 || w->cols % 32)
            return bad_scales(c, w, "its E8M0 scales are missing, or not one byte per block of 32");
        const struct place data = { w->tensor[NIB_ROLE_DATA], 1, lines, w->cols / 2, w->index };
        const struct place scale = { id, 1, lines, blocks, w->index };
        TRY(read_lines(c, w, &data, first, count, codes));
        return read_lines(c, w, &scale, first, count, scales);
    }
    const size_t line = (size_t)blocks * NIB_GGUF_MXFP4_BYTES;
    const struct place data = { w->tensor[NIB_ROLE_DATA], 1, w->rows, (int64_t)line, w->index };
    uint8_t *room = nib_alloc((size_t)count * line);
    if (!room)
        return nib_ck_no_memory(c);
    const nib_status status = read_lines(c, w, &data, first, count, room);
    if (!status)
        nib_gguf_mxfp4_split(room, (size_t)(count * blocks), codes, scales);
    nib_free(room);
    return status;
}

static nib_status mxfp4_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             nib_dtype dtype, void *out)
{
    const int64_t blocks = nib_ceil_div(w->cols, 32), at_once = nib_min(panel_rows(w->cols * 5), count);
    const size_t out_line = (size_t)w->cols * (size_t)nib_dtypes[dtype].bits / 8;
    float e2m1[16], *values = nib_alloc((size_t)w->cols * sizeof *values);
    uint8_t *codes = nib_alloc((size_t)(at_once * (16 * blocks + blocks)));
    nib_status status = values && codes ? NIB_OK : nib_ck_no_memory(c);
    nib_e2m1_values(e2m1);
    for (int64_t done = 0; done < count && !status; done += at_once) {
        const int64_t rows = nib_min(at_once, count - done);
        uint8_t *const scales = codes + rows * 16 * blocks;
        status = nib_ck_read_mxfp4(c, w, first + done, rows, codes, scales);
        for (int64_t r = 0; r < rows && !status; r++) {
            for (int64_t k = 0; k < w->cols; k++) {
                const uint8_t byte = codes[r * 16 * blocks + k / 2];
                values[k] = e2m1[k % 2 ? byte >> 4 : byte & 15] * nib_f32_from_e8m0(scales[r * blocks + k / 32]);
            }
            status = nib_encode(dtype, values, (size_t)w->cols, (char *)out + (size_t)(done + r) * out_line);
        }
    }
    nib_free(values);
    nib_free(codes);
    return status;
}

enum { FP8_BLOCK = 128 };

static nib_status fp8_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                           nib_dtype dtype, void *out)
{
    const uint32_t id = w->tensor[NIB_ROLE_SCALE];
    const struct nib_ck_tensor *s = &c->tensors[id];
    const int64_t across = nib_ceil_div(w->cols, FP8_BLOCK);
    if (!has_float_dtype(s) || s->rank != 2 || s->shape[0] != nib_ceil_div(w->rows, FP8_BLOCK) || s->shape[1] != across)
        return bad_scales(c, w, "its weight_scale_inv is not one float per 128x128 block");
    const size_t out_line = (size_t)w->cols * (size_t)nib_dtypes[dtype].bits / 8;
    const size_t scale_size = (size_t)nib_dtypes[s->dtype].bits / 8;
    const struct place place = { w->tensor[NIB_ROLE_DATA], 1, w->rows, w->cols, -1 };
    float *values = nib_alloc((size_t)w->cols * sizeof *values), *factors = nib_alloc((size_t)across * sizeof *factors);
    char *raw = nib_alloc((size_t)across * scale_size + (size_t)w->cols);
    nib_status status = values && factors && raw ? NIB_OK : nib_ck_no_memory(c);
    int64_t band = -1;
    for (int64_t r = 0; r < count && !status; r++) {
        if ((first + r) / FP8_BLOCK != band) {
            band = (first + r) / FP8_BLOCK;
            status = nib_ck_read(c, id, (uint64_t)(band * across) * scale_size, raw, (size_t)across * scale_size);
            if (!status)
                status = nib_decode(s->dtype, raw, (size_t)across, factors);
        }
        if (!status)
            status = read_lines(c, w, &place, first + r, 1, raw + (size_t)across * scale_size);
        if (!status)
            status = nib_decode(NIB_E4M3, raw + (size_t)across * scale_size, (size_t)w->cols, values);
        for (int64_t k = 0; k < w->cols && !status; k++)
            values[k] *= factors[k / FP8_BLOCK];
        if (!status)
            status = nib_encode(dtype, values, (size_t)w->cols, (char *)out + (size_t)r * out_line);
    }
    nib_free(values);
    nib_free(factors);
    nib_free(raw);
    return status;
}

/* ---- For the other files and for callers ---- */

nib_dtype nib_ck_exact_dtype(const struct nib_ck_weight *w)
{
    return w->format == NIB_CHECKPOINT_FORMAT_PLAIN ? w->dtype : NIB_F32;
}

nib_status nib_ck_read_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                            nib_dtype dtype, void *out)
{
    const nib_fpenv saved = nib_fpenv_enter();
    const nib_status status =
        count > 0 && w->cols > 0 ? formats[w->format].read_rows(c, w, first, count, dtype, out) : NIB_OK;
    nib_fpenv_leave(saved);
    return status;
}

nib_status nib_ck_read_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales)
{
    return formats[w->format].read_codes(c, w, first, count, codes, scales);
}

size_t nib_ck_read_overhead(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t count, nib_dtype dtype)
{
    (void)c;
    const size_t values = (size_t)(nib_min(count, panel_rows(w->cols)) * w->cols) * 2;
    const size_t turned = w->transposed ? (size_t)4 << 20 : w->row_step > 1 ? (size_t)1 << 20 : 0;
    return turned + (w->format == NIB_CHECKPOINT_FORMAT_PLAIN && dtype == w->dtype ? 0 : (size_t)PANEL_BYTES + values);
}

int64_t nib_ck_rows_for(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_dtype dtype, uint64_t bytes)
{
    const uint64_t fixed = nib_ck_read_overhead(c, w, 1, dtype);
    const uint64_t line = (uint64_t)w->cols * (uint64_t)nib_dtypes[dtype].bits / 8 + 1;
    int64_t rows = bytes > fixed ? (int64_t)((bytes - fixed) / line) : 1;
    rows = nib_max(1, nib_min(rows, w->rows));
    return rows > 16 && rows < w->rows ? rows / 16 * 16 : rows;
}

static nib_status check_weight(const nib_checkpoint *c, size_t index)
{
    if (index >= c->n_weights)
        return nib_fail(NIB_ERR_ARG, "%s: there is no weight %zu among its %zu", c->path, index, c->n_weights);
    return NIB_OK;
}

/* A weight's part of a tensor's bytes: of a stack, that of its rows. */
static uint64_t share_of(const nib_checkpoint *c, const struct nib_ck_weight *w, int role)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[role]];
    if (w->index < 0 || t->rank < 1 || t->shape[0] < 1)
        return t->bytes;
    const uint64_t of_matrix = t->bytes / (uint64_t)t->shape[0];
    const int64_t lines = t->rank < 3 ? w->rows : t->shape[w->transposed ? 2 : 1];
    return lines > w->rows ? of_matrix / (uint64_t)lines * (uint64_t)w->rows : of_matrix;
}

nib_status nib_checkpoint_get_weight(const nib_checkpoint *c, size_t index, nib_weight *out)
{
    NIB_REQUIRE(c);
    NIB_REQUIRE(out);
    TRY(nib_check_struct("nib_weight", out, sizeof *out));
    TRY(check_weight(c, index));
    const struct nib_ck_weight *w = &c->weights[index];
    const struct nib_ck_tensor *data = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    nib_weight found = { .bytes = out->bytes,
                         .name = w->name,
                         .format = w->format,
                         .dtype = w->dtype,
                         .rows = w->rows,
                         .cols = w->cols,
                         .tensor = data->name,
                         .file = c->files[data->file].name,
                         .tensor_scale_kind = w->tensor_scale,
                         .tensor_scale = 1,
                         .input_scale = 1 };
    for (int role = 0; role < NIB_ROLE_COUNT; role++)
        found.stored_bytes += w->tensor[role] == NIB_NONE ? 0 : share_of(c, w, role);
    if (nib_ck_is_nvfp4(w->format)) {
        TRY(nib_ck_read_tensor_scale(c, w, &found.tensor_scale_kind, &found.tensor_scale));
        TRY(nib_ck_read_input(c, w, &found.has_input_scale, &found.input_scale));
    }
    *out = found;
    return NIB_OK;
}

nib_status nib_checkpoint_find_weight(const nib_checkpoint *c, const char *name, size_t *index)
{
    NIB_REQUIRE(c);
    NIB_REQUIRE(name);
    NIB_REQUIRE(index);
    size_t first = 0, last = c->n_weights;
    while (first < last) {
        const size_t middle = first + (last - first) / 2;
        const int order = natural_order(c->weights[middle].name, name);
        if (order == 0) {
            *index = middle;
            return NIB_OK;
        }
        if (order < 0)
            first = middle + 1;
        else
            last = middle;
    }
    return nib_fail(NIB_ERR_ARG, "%s: there is no weight %s", c->path, nib_quote(name).text);
}

static nib_status check_rows(const nib_checkpoint *c, size_t weight, int64_t first, int64_t count)
{
    TRY(check_weight(c, weight));
    const struct nib_ck_weight *w = &c->weights[weight];
    if (first < 0 || count < 0 || first > w->rows || count > w->rows - first)
        return nib_fail(NIB_ERR_ARG, "%s: weight %s: rows %lld to %lld are not within its %lld", c->path,
                        nib_quote(w->name).text, (long long)first, (long long)first + count, (long long)w->rows);
    return NIB_OK;
}

nib_status nib_checkpoint_read_rows(const nib_checkpoint *c, size_t weight, int64_t first, int64_t count,
                                    const nib_array *out)
{
    NIB_REQUIRE(c);
    NIB_REQUIRE(out);
    TRY(check_rows(c, weight, first, count));
    TRY(nib_check_output("out", out));
    const struct nib_ck_weight *w = &c->weights[weight];
    if (out->dtype != NIB_F32 && out->dtype != NIB_BF16 && out->dtype != NIB_F16)
        return nib_fail(NIB_ERR_DTYPE, "out is neither F32, BF16 nor F16");
    if (out->rank != 2 || out->shape[0] != count || out->shape[1] != w->cols ||
        (count > 0 && w->cols > 0 && (out->strides[1] != 1 || out->strides[0] != w->cols)))
        return nib_fail(NIB_ERR_SHAPE, "out is not a contiguous [%lld, %lld]", (long long)count, (long long)w->cols);
    return nib_ck_read_rows(c, w, first, count, out->dtype, (char *)out->data + out->offset);
}

nib_status nib_checkpoint_read_codes(const nib_checkpoint *c, size_t weight, int64_t first, int64_t count,
                                     uint8_t *codes, uint8_t *scales)
{
    NIB_REQUIRE(c);
    TRY(check_rows(c, weight, first, count));
    const struct nib_ck_weight *w = &c->weights[weight];
    if (!nib_ck_is_nvfp4(w->format))
        return nib_fail(NIB_ERR_MODE, "%s: weight %s is %s and has no NVFP4 codes", c->path, nib_quote(w->name).text,
                        formats[w->format].name);
    return count > 0 && w->cols > 0 ? nib_ck_read_codes(c, w, first, count, codes, scales) : NIB_OK;
}
