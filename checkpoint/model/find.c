/* SPDX-License-Identifier: Apache-2.0 */
/*
 * find.c - which tensors make which weight, by the table of checkpoint formats.
 *
 * A weight with a companion missing or of a wrong shape is listed all the same, so that it can be reported; reading it is
 * an error.
 */
#include "model/weights.h"

#include <stdio.h>
#include <stdlib.h>

#include "file/json.h"
#include "io/names.h"
#include "model/folds.h"
#include "model/formats.h"
#include "format/dialect.h"
#include "nib_file.h"

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
    char buffer[512], *full = buffer;
    const size_t needed = bytes + strlen(end) + 1;
    if (needed > sizeof buffer && !(full = nib_alloc(needed)))
        return nib_ck_no_memory(c);
    snprintf(full, needed, "%.*s%s", (int)bytes, name, end);
    *out = nib_ck_find_tensor(c, full);
    if (full != buffer)
        nib_free(full);
    return NIB_OK;
}

static nib_status find_companions(nib_checkpoint *c, size_t bytes, struct nib_ck_weight *w)
{
    for (int role = NIB_ROLE_DATA + 1; role < NIB_ROLE_COUNT; role++)
        TRY(find_companion(c, c->tensors[w->tensor[NIB_ROLE_DATA]].name, bytes, w->layout->suffixes[role],
                           &w->tensor[role]));
    return NIB_OK;
}

/* Only a tensor that has data makes weights: beside a dim of 0 the others can be anything, and a file of a hundred bytes
 * would have 10^11 experts without rows. With data the file bounds every dim and every product; none has 2^48 bytes. */
static bool has_data(const struct nib_ck_tensor *t) { return t->bytes > 0 && t->bytes <= (uint64_t)1 << 48; }

/* The weights of a stack: matrix e of the tensor, or every other row of it, is expert e's part. */
static nib_status add_stack(struct finder *finder, const struct nib_ck_stack *stack, const struct nib_ck_weight *common,
                            const char *tensor, int64_t experts, int64_t rows)
{
    enum { FEW = 16 << 10, BYTES_PER_BYTE = 64 };
    const int parts = stack->parts[1] ? 2 : 1;
    const struct nib_ck_tensor *data = &finder->c->tensors[common->tensor[NIB_ROLE_DATA]];
    if (rows % parts)
        return nib_ck_diagnostic(finder->c, "open-orientation", tensor, "its rows do not divide into gate and up",
                                 true);
    /* Each expert has the whole name: a long one before many that have hardly any data would take any memory. */
    if ((uint64_t)experts > (FEW + BYTES_PER_BYTE * data->bytes) / ((uint64_t)parts * (stack->prefix_bytes + 1)))
        return nib_ck_diagnostic(finder->c, "open-orientation", tensor,
                                 "its experts have too little data for names as long as this", true);
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
    if (!nib_ck_stack_of(c, name, rank, shape, is, out))
        return NIB_OK;
    *is = false;
    return nib_ck_diagnostic(c, "open-orientation", name, nib_last_error(), true);
}

/* [E, N, K] or [E, K, N] of values; or [E, K/2, N] of codes with scales [E, K/16, N], as ModelOpt writes some families,
 * and the other way round too. */
static nib_status add_experts(struct finder *finder, struct nib_ck_weight *w, uint32_t id)
{
    nib_checkpoint *c = finder->c;
    const struct nib_ck_tensor *t = &c->tensors[id];
    const uint32_t scales = w->tensor[NIB_ROLE_SCALE];
    struct nib_ck_stack stack;
    bool is;
    if (scales == NIB_NONE) {
        TRY(stack_of(finder, t->name, t->rank, t->shape, &is, &stack));
        w->transposed = is && stack.transposed;
        w->cols = t->shape[w->transposed ? 1 : 2];
        return is ? add_stack(finder, &stack, w, t->name, t->shape[0], t->shape[w->transposed ? 2 : 1]) : NIB_OK;
    }
    const struct nib_ck_tensor *scale = &c->tensors[scales];
    w->transposed =
        scale->rank == 3 && scale->shape[1] == nib_ceil_div(t->shape[1], 8) && scale->shape[2] == t->shape[2];
    /* The logical shape decides nothing here but the names. */
    const int64_t logical[3] = { t->shape[0], w->transposed ? 2 * t->shape[1] : t->shape[1],
                                 w->transposed ? t->shape[2] : 2 * t->shape[2] };
    TRY(stack_of(finder, t->name, 3, logical, &is, &stack));
    w->cols = logical[w->transposed ? 1 : 2];
    return is ? add_stack(finder, &stack, w, t->name, t->shape[0], logical[w->transposed ? 2 : 1]) : NIB_OK;
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
    const bool first = saved_word(words, "version") == 1; /* nib 0.1, which had other words */
    if (first)
        TRY(find_companion(c, t->name, bytes, ".row_level", &w->tensor[NIB_ROLE_TENSOR_SCALE]));
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
    const int64_t rule = saved_word(words, first ? "tensor_scale" : "tensor_scale_rule");
    w->tensor_scale =
        rule == NIB_TENSOR_SCALE_RULE_DIALECT ? nib_nvfp4_dialects[dialect].tensor_scale : NIB_TENSOR_SCALE_MULTIPLIER;
    if (w->cols < 1 || w->cols > 2 * t->shape[1] || saved_word(words, first ? "single_level" : "no_tensor_scale") != 0)
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
    if (t->rank == 3 && w->format == NIB_CHECKPOINT_FORMAT_PLAIN && !nib_ck_ends_with(t->name, "_exps.weight"))
        return NIB_OK; /* a convolution, for one */
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
static bool is_meant(const nib_checkpoint *c, const struct nib_ck_weight *w)
{
    const uint32_t scale = w->tensor[NIB_ROLE_SCALE];
    const char *wanted = nib_ck_formats[w->format].method, *method;
    switch (w->layout->evidence) {
    case NIB_BY_NAME:
        return true;
    case NIB_BY_SCALE:
        return scale != NIB_NONE;
    case NIB_BY_SCALE_DTYPE:
        return scale != NIB_NONE && (w->layout->scale & NIB_DTYPE_BIT(c->tensors[scale].dtype));
    case NIB_BY_METHOD:
        break;
    }
    method = json_string_value(json_object_get(c->quantization, "quant_method"));
    return scale != NIB_NONE || w->tensor[NIB_ROLE_TENSOR_SCALE] != NIB_NONE || (method && strcmp(method, wanted) == 0);
}

static nib_status add_matrix(struct finder *finder, struct nib_ck_weight *w, uint32_t id, size_t bytes)
{
    const struct nib_ck_tensor *t = &finder->c->tensors[id];
    w->rows = t->shape[0];
    w->cols = t->dtype == NIB_U8 ? 2 * t->shape[1] : t->shape[1];
    w->name = nib_ck_string(finder->c, "%.*s", (int)bytes, t->name);
    if (w->name && w->format == NIB_CHECKPOINT_FORMAT_PLAIN && t->ggml_type < 0 &&
        nib_ck_is_conv1d(finder->c, w->name)) {
        w->transposed = true;
        w->rows = t->shape[1];
        w->cols = t->shape[0];
    }
    return add_weight(finder, w);
}

static nib_status add_by_layout(struct finder *finder, nib_checkpoint_format format, const struct nib_ck_layout *layout,
                                uint32_t id)
{
    nib_checkpoint *c = finder->c;
    const struct nib_ck_tensor *t = &c->tensors[id];
    const size_t bytes = strlen(t->name) - strlen(layout->suffixes[NIB_ROLE_DATA]);
    struct nib_ck_weight w = { .format = format,
                               .layout = layout,
                               .tensor_scale = nib_ck_formats[format].tensor_scale,
                               .dtype = format == NIB_CHECKPOINT_FORMAT_PLAIN ? t->dtype : finder->nominal,
                               .tensor = { [NIB_ROLE_DATA] = id },
                               .index = -1,
                               .row_step = 1 };
    TRY(find_companions(c, bytes, &w));
    if (!is_meant(c, &w))
        return NIB_OK;
    switch (layout->stacking) {
    case NIB_STACK_NONE:
        return add_matrix(finder, &w, id, bytes);
    case NIB_STACK_EXPERTS:
        return add_experts(finder, &w, id);
    case NIB_STACK_BLOCKS:
        return add_blocks(finder, &w, id, bytes);
    case NIB_STACK_GGUF:
        return add_gguf(finder, &w, id, bytes);
    case NIB_STACK_SAVED:
        return add_saved(finder, &w, id, bytes);
    case NIB_STACK_OTHER:
        break;
    }
    return NIB_OK;
}

/* Whether a tensor could be the data of a layout. */
static bool fits(const struct nib_ck_layout *layout, const struct nib_ck_tensor *t)
{
    static const int64_t ranks[] = { [NIB_STACK_NONE] = 2,  [NIB_STACK_EXPERTS] = 3, [NIB_STACK_BLOCKS] = 4,
                                     [NIB_STACK_GGUF] = -1, [NIB_STACK_SAVED] = -1,  [NIB_STACK_OTHER] = -1 };
    const int64_t rank = ranks[layout->stacking];
    const char *suffix = layout->suffixes[NIB_ROLE_DATA];
    return suffix && (layout->data & NIB_DTYPE_BIT(t->dtype)) && (rank < 0 || rank == t->rank) &&
           (!layout->ggml_types || (t->ggml_type >= 0 && layout->ggml_types >> t->ggml_type & 1)) &&
           !(layout->stacking == NIB_STACK_EXPERTS && t->ggml_type >= 0) && nib_ck_ends_with(t->name, suffix) &&
           strlen(t->name) > strlen(suffix);
}

/* Layouts that ask for more than a name go first: what they do not want is left to the others. */
static nib_status find_weight(struct finder *finder, uint32_t id)
{
    const nib_checkpoint *c = finder->c;
    if (!has_data(&c->tensors[id]))
        return NIB_OK;
    const size_t before = c->n_weights, diagnostics = c->n_diagnostics;
    for (int by_name = 0; by_name < 2; by_name++)
        for (int format = 0; format < NIB_CHECKPOINT_FORMAT_COUNT; format++)
            for (int i = 0; i < NIB_CK_LAYOUTS; i++) {
                const struct nib_ck_layout *layout = &nib_ck_formats[format].layouts[i];
                if ((layout->evidence == NIB_BY_NAME) != by_name || !fits(layout, &c->tensors[id]))
                    continue;
                TRY(add_by_layout(finder, (nib_checkpoint_format)format, layout, id));
                if (c->n_weights > before || c->n_diagnostics > diagnostics)
                    return NIB_OK;
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

nib_dtype nib_ck_config_dtype(const nib_checkpoint *c)
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

nib_dtype nib_ck_nominal_dtype(const nib_checkpoint *c)
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_F16, NIB_BF16 };
    const char *noted = json_string_value(json_object_get(c->notes, "dtype"));
    for (size_t i = 0; noted && i < sizeof dtypes / sizeof *dtypes; i++)
        if (!strcmp(noted, nib_dtype_name(dtypes[i])))
            return dtypes[i];
    return nib_ck_config_dtype(c);
}

static nib_status check_repeated(const nib_checkpoint *c)
{
    for (size_t i = 1; i < c->n_weights; i++)
        if (strcmp(c->weights[i - 1].name, c->weights[i].name) == 0)
            return nib_fail(NIB_ERR_DATA, "%s: weight %s appears twice, in tensor %s and in tensor %s", c->path,
                            nib_quote(c->weights[i].name).text,
                            nib_quote(c->tensors[c->weights[i - 1].tensor[NIB_ROLE_DATA]].name).text,
                            nib_quote(c->tensors[c->weights[i].tensor[NIB_ROLE_DATA]].name).text);
    return NIB_OK;
}

/* The columnwise usage of a tensor that the library saved belongs to its weight: no other format has a place for it. */
static nib_status claim_other_usages(nib_checkpoint *c, uint32_t weight)
{
    const struct nib_ck_format *format = &nib_ck_formats[c->weights[weight].format];
    for (int i = 0; i < NIB_CK_LAYOUTS; i++)
        for (int role = 0; format->layouts[i].stacking == NIB_STACK_OTHER && role < NIB_ROLE_COUNT; role++) {
            const char *name = c->weights[weight].name;
            uint32_t tensor;
            TRY(find_companion(c, name, strlen(name), format->layouts[i].suffixes[role], &tensor));
            if (tensor != NIB_NONE)
                c->tensors[tensor].weight = weight;
        }
    return NIB_OK;
}

static nib_status find_weights(nib_checkpoint *c)
{
    struct finder finder = { .c = c, .nominal = nib_ck_nominal_dtype(c) };
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
        TRY(claim_other_usages(c, (uint32_t)i));
    for (size_t i = 0; i < c->n_weights; i++)
        if (c->weights[i].format && (!c->format || c->weights[i].format < c->format))
            c->format = c->weights[i].format;
    return NIB_OK;
}

/* ---- For callers ---- */

nib_status nib_checkpoint_open(const char *path, nib_checkpoint **out)
{
    NIB_REQUIRE(path);
    NIB_REQUIRE(out);
    nib_checkpoint *c;
    TRY(nib_ck_open(path, &c));
    nib_status status = find_weights(c);
    if (!status)
        status = nib_ck_read_folds(c);
    if (status)
        nib_checkpoint_close(c);
    else
        *out = c;
    return status;
}

uint64_t nib_ck_elements(const nib_checkpoint *c)
{
    uint64_t elements = 0;
    for (size_t i = 0; i < c->n_weights; i++)
        elements += (uint64_t)(c->weights[i].rows * c->weights[i].cols);
    for (size_t i = 0; i < c->n_tensors; i++) {
        const struct nib_ck_tensor *t = &c->tensors[i];
        uint64_t own = t->weight == NIB_NONE; /* shapes were checked when the file was opened: no product overflows */
        for (int64_t d = 0; d < t->rank; d++)
            own *= (uint64_t)t->shape[d];
        elements += own;
    }
    return elements;
}

nib_status nib_checkpoint_get_facts(const nib_checkpoint *c, nib_checkpoint_facts *out)
{
    NIB_REQUIRE(c);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("nib_checkpoint_facts", out, NIB_UP_TO(nib_checkpoint_facts, elements)));
    nib_checkpoint_facts facts = { .path = c->path,
                                   .format = c->format,
                                   .model_type = c->model_type,
                                   .config = c->config_text,
                                   .files = c->n_files,
                                   .tensors = c->n_tensors,
                                   .weights = c->n_weights,
                                   .provenance = c->provenance };
    for (size_t i = 0; i < c->n_tensors; i++)
        facts.tensor_bytes += c->tensors[i].bytes;
    for (size_t i = 0; i < c->n_weights; i++)
        facts.weight_elements += (uint64_t)(c->weights[i].rows * c->weights[i].cols);
    facts.elements = nib_ck_elements(c);
    nib_struct_write(out, &facts, sizeof facts);
    return NIB_OK;
}

int64_t nib_ck_matrix_rows(const nib_checkpoint *c, const struct nib_ck_weight *w)
{
    const struct nib_ck_tensor *t = &c->tensors[w->tensor[NIB_ROLE_DATA]];
    return w->index < 0 ? w->rows : t->shape[w->transposed ? 2 : 1];
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
