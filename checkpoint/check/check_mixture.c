/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_mixture.c - FP8 beside NVFP4: weights of E4M3 with a scale for each row or one for all, and whether the
 * configuration says of each module which of the two it is.
 */
#include "check/check.h"

#include <float.h>
#include <stdio.h>

#include "nib_reference.h"

static const json_t *get(const json_t *object, const char *key) { return object ? json_object_get(object, key) : NULL; }

static const char *get_text(const json_t *object, const char *key)
{
    const char *text = json_string_value(get(object, key));
    return text ? text : "";
}

/* The tensor that is called like a module with this at its end. */
static uint32_t part_of(const nib_checkpoint *c, const char *module, const char *part)
{
    char name[1024];
    const int n = snprintf(name, sizeof name, "%s.%s", module, part);
    return n > 0 && (size_t)n < sizeof name ? nib_ck_find_tensor(c, name) : NIB_NONE;
}

static bool is_float(nib_dtype dtype) { return dtype == NIB_F32 || dtype == NIB_BF16 || dtype == NIB_F16; }

/* The module of a tensor that ends so; "": it does not. */
static const char *module_of(const char *tensor, const char *end, char *buffer, size_t bytes)
{
    const size_t length = strlen(tensor), rest = strlen(end);
    const bool ends = length > rest && length - rest < bytes && !strcmp(tensor + length - rest, end);
    snprintf(buffer, bytes, "%.*s", ends ? (int)(length - rest) : 0, tensor);
    return buffer;
}

/* Whether a module's weight is FP8, but not in blocks, which go with another configuration. */
static bool is_fp8(const nib_checkpoint *c, const char *module)
{
    const uint32_t weight = part_of(c, module, "weight");
    return weight != NIB_NONE && c->tensors[weight].dtype == NIB_E4M3 && c->tensors[weight].rank == 2 &&
           part_of(c, module, "weight_scale_inv") == NIB_NONE;
}

/* ---- Tensors ---- */

static nib_status check_values(struct nib_checking *k, const struct nib_ck_tensor *t, uint32_t tensor, int64_t n)
{
    void *raw = nib_alloc(t->bytes + 1);
    float *values = nib_alloc(((size_t)n + 1) * sizeof *values);
    nib_status status = raw && values ? nib_ck_read(k->c, tensor, 0, raw, t->bytes)
                                      : nib_fail(NIB_ERR_MEMORY, "no memory for %s", t->name);
    if (!status)
        status = nib_decode(t->dtype, raw, (size_t)n, values);
    for (int64_t i = 0; i < n && !status; i++)
        if (!(values[i] > 0 && values[i] <= FLT_MAX)) {
            status = nib_check_found(k, NIB_FAULT_FP8_SCALE_VALUE, t->name, "the scale of row %lld is %g", (long long)i,
                                     (double)values[i]);
            break;
        }
    nib_free(raw);
    nib_free(values);
    return status;
}

/* How many scales there are: one for each row, or one for all; 0: neither. */
static int64_t scale_count(const struct nib_ck_tensor *t, int64_t rows)
{
    int64_t n = 1;
    for (int64_t i = 0; i < t->rank; i++)
        n *= t->shape[i];
    const bool by_row = n == rows && t->rank >= 1 && t->shape[0] == rows;
    return by_row || (n == 1 && t->rank <= 2) ? n : 0;
}

static nib_status check_scale(struct nib_checking *k, const char *module, int64_t rows)
{
    const nib_checkpoint *c = k->c;
    const uint32_t scale = part_of(c, module, "weight_scale");
    if (scale == NIB_NONE)
        return nib_check_found(k, NIB_FAULT_FP8_SCALE_MISSING, module, "it is FP8 without a scale");
    const struct nib_ck_tensor *t = &c->tensors[scale];
    if (!is_float(t->dtype))
        return nib_check_found(k, NIB_FAULT_FP8_SCALE_DTYPE, t->name, "its scales are %s", nib_dtype_name(t->dtype));
    if (!scale_count(t, rows))
        return nib_check_found(k, NIB_FAULT_FP8_SCALE_SHAPE, t->name,
                               "its scales have %lld dims, %lld first, for %lld rows", (long long)t->rank,
                               (long long)(t->rank ? t->shape[0] : 1), (long long)rows);
    return check_values(k, t, scale, scale_count(t, rows));
}

/* A NaN among the codes; more than one is said once. */
static nib_status check_codes(struct nib_checking *k, uint32_t tensor)
{
    enum { CHUNK = 1 << 20 };
    const struct nib_ck_tensor *t = &k->c->tensors[tensor];
    uint8_t *bytes = nib_alloc(t->bytes < CHUNK ? (size_t)t->bytes : CHUNK);
    nib_status status = bytes ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "no memory for %s", t->name);
    for (uint64_t at = 0; at < t->bytes && !status; at += CHUNK) {
        const size_t n = t->bytes - at < CHUNK ? (size_t)(t->bytes - at) : CHUNK;
        status = nib_ck_read(k->c, tensor, at, bytes, n);
        for (size_t i = 0; i < n && !status; i++)
            if ((bytes[i] & 0x7F) == 0x7F) {
                const long long value = (long long)(at + i), cols = (long long)t->shape[1];
                nib_free(bytes);
                return nib_check_found(k, NIB_FAULT_FP8_NAN, t->name, "the value at [%lld, %lld] is a NaN",
                                       value / cols, value % cols);
            }
    }
    nib_free(bytes);
    return status;
}

/* What servers fuse with it must be FP8 too. */
static nib_status check_fused(struct nib_checking *k, const char *module)
{
    const char *const dot = strrchr(module, '.'), *const last = dot ? dot + 1 : module;
    for (size_t set = 0; nib_ck_fused_sets[set][0]; set++) {
        bool member = false;
        for (size_t i = 0; nib_ck_fused_sets[set][i]; i++)
            member |= !strcmp(last, nib_ck_fused_sets[set][i]);
        for (size_t i = 0; member && nib_ck_fused_sets[set][i]; i++) {
            char other[1024];
            snprintf(other, sizeof other, "%.*s%s", (int)(last - module), module, nib_ck_fused_sets[set][i]);
            const bool there =
                part_of(k->c, other, "weight") != NIB_NONE || part_of(k->c, other, "weight_packed") != NIB_NONE;
            if (there && !is_fp8(k->c, other))
                return nib_check_found(k, NIB_FAULT_FUSED_PARTLY, module, "it is FP8, and %s is not", other);
        }
    }
    return NIB_OK;
}

/* Scales by row without an FP8 weight that they are of. */
static nib_status check_alone(struct nib_checking *k, const struct nib_ck_tensor *t, const char *module)
{
    const uint32_t weight = part_of(k->c, module, "weight");
    if (!is_float(t->dtype) || part_of(k->c, module, "weight_packed") != NIB_NONE)
        return NIB_OK; /* those of blocks are looked at elsewhere */
    if (weight == NIB_NONE)
        return nib_check_found(k, NIB_FAULT_CODES_MISSING, module, "it has scales, and no weight");
    if (is_float(k->c->tensors[weight].dtype))
        return nib_check_found(k, NIB_FAULT_STRAY, t->name, "the weight beside it is %s",
                               nib_dtype_name(k->c->tensors[weight].dtype));
    return NIB_OK;
}

/* ---- Configuration ---- */

struct said {
    const json_t *groups;         /* of compressed-tensors; NULL: ModelOpt */
    struct nib_patterns *targets; /* of them, but for classes; NULL: none that can be understood */
    const json_t **group_of;      /* each of these */
    const json_t *of_class;       /* the first group that names a class */
    const json_t *layers;         /* quantized_layers */
    const char *format;           /* of compressed-tensors, where a group has none of its own */
    bool mixed;                   /* ModelOpt has several algorithms */
    struct nib_patterns *ignored; /* NULL: nothing, or what cannot be understood */
};

static nib_status read_ignored(const json_t *list, struct nib_patterns **out)
{
    const size_t n = json_array_size(list);
    const char **entries = nib_alloc((n + 1) * sizeof *entries);
    size_t used = 0;
    if (!entries)
        return nib_fail(NIB_ERR_MEMORY, "no memory for the configuration");
    for (size_t i = 0; i < n; i++)
        if (json_is_string(json_array_get(list, i)))
            entries[used++] = json_string_value(json_array_get(list, i));
    const nib_status status = used ? nib_patterns_create(entries, used, out) : NIB_OK;
    nib_free(entries);
    return status == NIB_ERR_ARG ? NIB_OK : status; /* said already */
}

static nib_status find_said(const nib_checkpoint *c, struct said *out)
{
    const json_t *config = c->quantization ? c->quantization : c->hf_quant_config;
    const json_t *inner = get(config, "quantization"), *flat = inner ? inner : config;
    const bool modelopt = !strncmp(get_text(config, "quant_method"), "modelopt", 8) || !c->quantization;
    const json_t *list = get(flat, "ignore") ? get(flat, "ignore") : get(flat, "exclude_modules");
    *out = (struct said){ .groups = modelopt ? NULL : get(flat, "config_groups"),
                          .layers = get(flat, "quantized_layers"),
                          .format = get_text(flat, "format"),
                          .mixed = !strcmp(get_text(flat, "quant_algo"), "MIXED_PRECISION") };
    return read_ignored(list, &out->ignored);
}

/* The targets of all groups that name modules, one behind the other. Those that cannot be compiled are left out. */
static nib_status read_groups(struct said *said)
{
    const char *key, **texts;
    json_t *group, *target, *const groups = (json_t *)(uintptr_t)said->groups;
    size_t i, n = 0, used = 0;
    json_object_foreach(groups, key, group) { n += json_array_size(json_object_get(group, "targets")); }
    texts = nib_alloc((n + 1) * sizeof *texts);
    said->group_of = nib_alloc((n + 1) * sizeof *said->group_of);
    nib_status status = texts && said->group_of ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "no memory for the configuration");
    json_object_foreach(groups, key, group)
    {
        json_array_foreach(json_object_get(group, "targets"), i, target)
        {
            const char *text = json_string_value(target);
            const bool is_class = text && strncmp(text, "re:", 3) != 0 && !strchr(text, '.');
            struct nib_patterns *alone = NULL;
            if (is_class && !said->of_class)
                said->of_class = group;
            if (status || !text || is_class)
                continue;
            status = nib_patterns_create(&text, 1, &alone);
            nib_patterns_destroy(alone);
            if (!status) {
                texts[used] = text;
                said->group_of[used++] = group;
            }
            status = status == NIB_ERR_ARG ? NIB_OK : status;
        }
    }
    if (!status && used)
        status = nib_patterns_create(texts, used, &said->targets);
    nib_free(texts);
    return status == NIB_ERR_ARG ? NIB_OK : status;
}

/* The group of compressed-tensors that a module is in: one that names it, before one that names its class. */
static nib_status find_group(const struct said *said, const char *module, const json_t **out)
{
    uint32_t which = NIB_NONE;
    const nib_status status = said->targets ? nib_patterns_match(said->targets, module, &which) : NIB_OK;
    *out = status || which == NIB_NONE ? said->of_class : said->group_of[which];
    return status == NIB_ERR_ARG ? NIB_OK : status;
}

/* What quantized_layers says of a module or of one around it. */
static const char *algorithm_of(const json_t *layers, const char *module)
{
    char name[1024];
    snprintf(name, sizeof name, "%s", module);
    for (char *dot; !get(layers, name) && (dot = strrchr(name, '.'));)
        *dot = 0;
    return get_text(get(layers, name), "quant_algo");
}

static bool is_fp8_algorithm(const char *algorithm)
{
    return !strncmp(algorithm, "FP8", 3) && strncmp(algorithm, "FP8_PB", 6) != 0; /* those have blocks */
}

/* Whether the configuration says of a module that it is FP8, or that it is NVFP4. */
static nib_status check_said(struct nib_checking *k, const struct said *said, const char *module, bool fp8)
{
    const char *const is = fp8 ? "FP8" : "NVFP4";
    uint32_t ignored = NIB_NONE;
    const nib_status matched = said->ignored ? nib_patterns_match(said->ignored, module, &ignored) : NIB_OK;
    if (matched && matched != NIB_ERR_ARG) /* patterns that cannot be matched were said */
        return matched;
    if (ignored != NIB_NONE && (fp8 || said->mixed))
        return nib_check_found(k, NIB_FAULT_CONFIG_MIXTURE, module, "it is %s, and the configuration excludes it", is);
    if (!said->groups) {
        const char *algorithm = algorithm_of(said->layers, module);
        if (!fp8 || (said->mixed && (is_fp8_algorithm(algorithm) || strstr(algorithm, "NVFP4"))))
            return NIB_OK; /* whatever is or is not NVFP4 is checked by check_config.c */
        return nib_check_found(k, NIB_FAULT_CONFIG_MIXTURE, module, "it is FP8, and quantized_layers %s%s",
                               *algorithm ? "says " : "does not list it", algorithm);
    }
    const json_t *group;
    TRY(find_group(said, module, &group));
    const json_t *weights = get(group, "weights");
    const json_int_t bits = json_integer_value(get(weights, "num_bits"));
    if (group && bits != (fp8 ? 8 : 4))
        return nib_check_found(k, NIB_FAULT_CONFIG_MIXTURE, module, "it is %s, and its group says %lld bits", is,
                               (long long)bits);
    const char *own = get_text(group, "format"), *format = *own ? own : said->format;
    if (group && strcmp(format, fp8 ? "float-quantized" : "nvfp4-pack-quantized") != 0 &&
        (!fp8 || strcmp(format, "naive-quantized") != 0))
        return nib_check_found(k, NIB_FAULT_CONFIG_MIXTURE, module, "it is %s, and its group is \"%s\"", is, format);
    const char *strategy = get_text(weights, "strategy");
    const uint32_t scale = part_of(k->c, module, "weight_scale");
    if (!fp8 || !group || scale == NIB_NONE || (strcmp(strategy, "tensor") != 0 && strcmp(strategy, "channel") != 0))
        return NIB_OK;
    const int64_t rows = k->c->tensors[part_of(k->c, module, "weight")].shape[0],
                  n = scale_count(&k->c->tensors[scale], rows);
    const bool by_row = n > 1;
    if (n && rows > 1 && by_row == !strcmp(strategy, "tensor"))
        return nib_check_found(k, NIB_FAULT_CONFIG_MIXTURE, module, "its scales are by %s, and its group says \"%s\"",
                               by_row ? "row" : "tensor", strategy);
    return NIB_OK;
}

/* What is listed as FP8, and is not. */
static nib_status check_listed(struct nib_checking *k, const struct said *said)
{
    const char *name;
    json_t *layer;
    json_object_foreach((json_t *)(uintptr_t)said->layers, name, layer)
    {
        const uint32_t weight = part_of(k->c, name, "weight");
        if (said->mixed && is_fp8_algorithm(get_text(layer, "quant_algo")) && weight != NIB_NONE &&
            is_float(k->c->tensors[weight].dtype))
            TRY(nib_check_found(k, NIB_FAULT_CONFIG_MIXTURE, name, "quantized_layers lists it as FP8, and it is %s",
                                nib_dtype_name(k->c->tensors[weight].dtype)));
    }
    return NIB_OK;
}

/* ---- All of it ---- */

static nib_status check_tensor(struct nib_checking *k, uint32_t tensor, const struct said *said, bool configured)
{
    const nib_checkpoint *c = k->c;
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    char module[1024];
    if (*module_of(t->name, ".weight_scale", module, sizeof module) && !is_fp8(c, module))
        return check_alone(k, t, module);
    if (!*module_of(t->name, ".weight", module, sizeof module) || !is_fp8(c, module))
        return NIB_OK;
    TRY(check_scale(k, module, t->shape[0]));
    TRY(check_codes(k, tensor));
    TRY(check_fused(k, module));
    return configured ? check_said(k, said, module, true) : NIB_OK;
}

nib_status nib_check_mixture(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    struct said said = { 0 };
    bool mixture = false;
    char module[1024];
    for (uint32_t i = 0; i < c->n_tensors && k->n_modules && !mixture; i++)
        mixture =
            (*module_of(c->tensors[i].name, ".weight", module, sizeof module) && is_fp8(c, module)) ||
            (*module_of(c->tensors[i].name, ".weight_scale", module, sizeof module) && is_float(c->tensors[i].dtype));
    if (!mixture || (c->n_files && c->files[0].gguf))
        return NIB_OK;
    const bool configured = c->is_directory && (c->quantization || c->hf_quant_config);
    nib_status status = configured ? find_said(c, &said) : NIB_OK;
    if (!status && said.groups)
        status = read_groups(&said);
    for (uint32_t i = 0; i < c->n_tensors && !status; i++)
        status = check_tensor(k, i, &said, configured);
    for (size_t i = 0; i < k->n_modules && configured && !status; i++)
        status = check_said(k, &said, k->modules[i].name, false);
    if (!status && configured)
        status = check_listed(k, &said);
    nib_patterns_destroy(said.ignored);
    nib_patterns_destroy(said.targets);
    nib_free(said.group_of);
    return status;
}
