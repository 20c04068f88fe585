/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_config.c - configuration against tensors: what loaders will build against what there is to load.
 *
 * compressed-tensors matches whole names and re: patterns; ModelOpt globs, which vLLM besides takes for any part of a
 * name. Both are looked up as their loaders do it.
 */
#include "check/check.h"
#include "model/roles.h"

#include <stdio.h>
#include <stdlib.h>

static const json_t *get(const json_t *object, const char *key) { return object ? json_object_get(object, key) : NULL; }

static const char *get_text(const json_t *object, const char *key)
{
    const char *text = json_string_value(get(object, key));
    return text ? text : "";
}

static bool is(const char *a, const char *b) { return strcmp(a, b) == 0; }

/* ModelOpt's facts lie flat, or, in older files, in "quantization". */
static const json_t *flat(const json_t *config)
{
    const json_t *inner = get(config, "quantization");
    return inner ? inner : config;
}

static const json_t *hf_of(const nib_checkpoint *c) { return c->hf_quant_config ? flat(c->hf_quant_config) : NULL; }

/* What a ModelOpt loader goes by: config.json, or else hf_quant_config.json. */
static const json_t *modelopt_of(const nib_checkpoint *c) { return c->quantization ? flat(c->quantization) : hf_of(c); }

static const json_t *exclusions_of(const json_t *config)
{
    const json_t *list = get(config, "ignore");
    return list ? list : get(config, "exclude_modules");
}

static bool is_mixed(const json_t *config) { return is(get_text(config, "quant_algo"), "MIXED_PRECISION"); }

/* "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ" ... */
static bool is_nvfp4_algo(const char *algo) { return strstr(algo, "NVFP4") != NULL; }

/* The entry of a module in quantized_layers, or of a parent of it. */
static const json_t *listed(const json_t *layers, const char *module)
{
    char name[1024];
    const json_t *entry = get(layers, module);
    if (entry || strlen(module) >= sizeof name)
        return entry;
    strcpy(name, module);
    for (char *dot; !entry && (dot = strrchr(name, '.'));) {
        *dot = 0;
        entry = get(layers, name);
    }
    return entry;
}

/* Whether the configuration speaks of tensors of this checkpoint format: "modelopt_fp4" does too. */
static bool is_method(const nib_checkpoint *c, nib_checkpoint_format format)
{
    if (!c->quantization)
        return format == NIB_CHECKPOINT_FORMAT_MODELOPT && c->hf_quant_config;
    const char *wanted = nib_ck_formats[format].method;
    return strncmp(get_text(c->quantization, "quant_method"), wanted, strlen(wanted)) == 0;
}

bool nib_check_groups_want_inputs(const nib_checkpoint *c)
{
    const char *key;
    json_t *group;
    json_object_foreach(json_object_get(c->quantization, "config_groups"), key, group)
    {
        if (json_is_object(get(group, "input_activations")))
            return true;
    }
    return false;
}

bool nib_check_wants_input(const struct nib_checking *k, const char *module)
{
    const nib_checkpoint *c = k->c;
    const bool known = k->n_modules && is_method(c, k->format);
    if (known && k->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS)
        return k->groups_want_inputs;
    const json_t *modelopt = known ? modelopt_of(c) : NULL;
    const char *algo = get_text(modelopt, "quant_algo");
    if (is_mixed(modelopt))
        algo = get_text(listed(get(modelopt, "quantized_layers"), module), "quant_algo");
    return *algo ? is_nvfp4_algo(algo) && strncmp(algo, "W4A16", 5) != 0 : k->has_inputs;
}

/* ---- Lists of modules ---- */

struct exclusions {
    const char **entries;
    size_t n;
    struct nib_patterns *patterns; /* NULL: the list could not be understood, and that was said */
    struct nib_patterns *targets;  /* the only modules that are meant; NULL: all */
    struct nib_words *words;       /* the entries as vLLM reads ModelOpt's; NULL: of others */
};

static void free_exclusions(struct exclusions *e)
{
    nib_patterns_destroy(e->patterns);
    nib_patterns_destroy(e->targets);
    nib_words_destroy(e->words);
    nib_free(e->entries);
}

/* A pattern that cannot be compiled, or takes too long to match, is a finding. */
static nib_status say_pattern(struct nib_checking *k, nib_status status)
{
    if (status != NIB_ERR_ARG)
        return status;
    return nib_check_found(k, NIB_FAULT_CONFIG_PATTERN, "config.json", "%s", nib_last_error());
}

/* Targets of compressed-tensors are classes ("Linear"), names or patterns. A class may mean any module. */
static nib_status read_targets(struct nib_checking *k, const json_t *config, struct nib_patterns **out)
{
    const char *key, *entries[64];
    json_t *group, *target;
    size_t n = 0, i;
    json_object_foreach(json_object_get(config, "config_groups"), key, group)
    {
        json_array_foreach(json_object_get(group, "targets"), i, target)
        {
            const char *text = json_string_value(target);
            const bool is_class = text && strncmp(text, "re:", 3) != 0 && !strchr(text, '.');
            if (!text || is_class || n == sizeof entries / sizeof *entries)
                return NIB_OK;
            entries[n++] = text;
        }
    }
    return n ? say_pattern(k, nib_patterns_create(entries, n, out)) : NIB_OK;
}

/* The list as patterns. Globs mean nothing to compressed-tensors: they are told of and left out. */
static nib_status read_exclusions(struct nib_checking *k, const json_t *list, bool modelopt, struct exclusions *out)
{
    struct exclusions e = { 0 };
    size_t i;
    const json_t *item;
    e.entries = nib_alloc((json_array_size(list) + 1) * sizeof *e.entries);
    if (!e.entries)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its configuration", k->c->path);
    nib_status status = NIB_OK;
    json_array_foreach(list, i, item)
    {
        const char *entry = json_string_value(item);
        if (status || !entry)
            continue;
        if (!modelopt && strncmp(entry, "re:", 3) != 0 && strpbrk(entry, "*?"))
            status = nib_check_found(k, NIB_FAULT_CONFIG_GLOB, "config.json", "ignore has the glob %s", entry);
        else
            e.entries[e.n++] = entry;
    }
    if (!status)
        status = say_pattern(k, nib_patterns_create(e.entries, e.n, &e.patterns));
    if (!status && modelopt)
        status = nib_words_create(e.entries, e.n, &e.words);
    if (status)
        free_exclusions(&e);
    else
        *out = e;
    return status;
}

/* Whether an entry of the list means this module, or a parent of it where it is one of a stack. */
static nib_status is_excluded(const struct exclusions *e, const char *module, bool with_parents, bool *out)
{
    uint32_t which = NIB_NONE;
    char name[1024];
    snprintf(name, sizeof name, "%s", module);
    TRY(nib_patterns_match(e->patterns, name, &which));
    for (char *dot; which == NIB_NONE && with_parents && (dot = strrchr(name, '.'));) {
        *dot = 0;
        TRY(nib_patterns_match(e->patterns, name, &which));
    }
    *out = which != NIB_NONE;
    return NIB_OK;
}

/* An entry that is a whole leading part of the name: it was meant for all below it. */
static bool is_parent(const char *entry, const char *name)
{
    const size_t length = strlen(entry);
    return strncmp(entry, name, length) == 0 && (name[length] == '.' || name[length] == 0);
}

/* What of a list stands in a name: an entry, and one that is a parent. */
struct hits {
    const struct exclusions *e;
    const char *name;
    bool any, parent;
};

static bool note_hit(void *context, size_t entry, size_t at)
{
    struct hits *hits = context;
    hits->any = true;
    hits->parent |= at == 0 && is_parent(hits->e->entries[entry], hits->name);
    return at == 0;
}

static struct hits hits_of(const struct exclusions *e, const char *name)
{
    struct hits hits = { .e = e, .name = name };
    if (e->words)
        nib_words_find(e->words, name, note_hit, &hits);
    return hits;
}

/* The name that vLLM gives to the layer that a module becomes part of. */
static void fused_name(const char *module, char *buffer, size_t bytes)
{
    static const char *const parts[][2] = { { "q_proj", "qkv_proj" },
                                            { "k_proj", "qkv_proj" },
                                            { "v_proj", "qkv_proj" },
                                            { "gate_proj", "gate_up_proj" },
                                            { "up_proj", "gate_up_proj" } };
    const char *last = strrchr(module, '.');
    last = last ? last + 1 : module;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (is(last, parts[i][0])) {
            snprintf(buffer, bytes, "%.*s%s", (int)(last - module), module, parts[i][1]);
            return;
        }
    snprintf(buffer, bytes, "%s", module);
}

/* vLLM leaves these alone, whatever ModelOpt's configuration says. */
static bool is_tower(const char *name)
{
    return strstr(name, "vision_tower") || strstr(name, "vision_model") || strstr(name, "vit_large_projector");
}

static bool is_linear(const nib_checkpoint *c, const struct nib_ck_weight *w)
{
    if (w->index < 0 && w->transposed)
        return false; /* a Conv1D */
    return w->format == NIB_CHECKPOINT_FORMAT_PLAIN && nib_ck_is_linear_role(nib_ck_module_role(c, w->name));
}

/* Modules that are quantized and excluded, or neither. */
static nib_status check_exclusions(struct nib_checking *k, const struct exclusions *e)
{
    const nib_checkpoint *c = k->c;
    bool excluded;
    for (size_t i = 0; i < k->n_modules; i++) {
        const struct nib_check_module *m = &k->modules[i];
        TRY(is_excluded(e, m->name, false, &excluded));
        if (excluded || hits_of(e, m->name).parent)
            TRY(nib_check_found(k, NIB_FAULT_CONFIG_IGNORED, m->name,
                                "it is quantized, and the configuration excludes it"));
    }
    for (size_t i = 0; i < c->n_weights; i++) {
        const struct nib_ck_weight *w = &c->weights[i];
        uint32_t target = 0;
        if (!is_linear(c, w) || (e->words && is_tower(w->name)))
            continue;
        if (e->targets)
            TRY(nib_patterns_match(e->targets, w->name, &target));
        if (target == NIB_NONE)
            continue;
        TRY(is_excluded(e, w->name, w->index >= 0, &excluded));
        if (!excluded && !hits_of(e, w->name).any)
            TRY(nib_check_found(k, NIB_FAULT_CONFIG_NOT_IGNORED, w->name,
                                "it is not quantized, and the configuration does not exclude it"));
    }
    return NIB_OK;
}

/* The first module, from 1 on, whose name an entry is part of without meaning it. */
struct widths {
    const struct exclusions *e;
    size_t module, *first;
    const char *name;
    char fused[1024];
};

static bool note_width(void *context, size_t entry, size_t at)
{
    (void)at;
    struct widths *w = context;
    const char *text = w->e->entries[entry];
    if (!w->first[entry] && !is_parent(text, w->name) && !is_parent(text, w->fused))
        w->first[entry] = w->module;
    return true;
}

/* Entries that vLLM finds within names that they do not mean. */
static nib_status check_widths(struct nib_checking *k, const struct exclusions *e)
{
    struct widths w = { .e = e, .first = nib_alloc_zeroed((e->n + 1) * sizeof *w.first) };
    if (!w.first)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its configuration", k->c->path);
    for (w.module = 1; w.module <= k->n_modules; w.module++) {
        w.name = k->modules[w.module - 1].name;
        fused_name(w.name, w.fused, sizeof w.fused);
        nib_words_find(e->words, w.fused, note_width, &w);
        if (!is(w.fused, w.name))
            nib_words_find(e->words, w.name, note_width, &w);
    }
    nib_status status = NIB_OK;
    for (size_t j = 0; !status && j < e->n; j++) {
        if (!w.first[j])
            continue;
        w.name = k->modules[w.first[j] - 1].name;
        fused_name(w.name, w.fused, sizeof w.fused);
        status = nib_check_found(k, NIB_FAULT_CONFIG_TOO_WIDE, "config.json", "the excluded \"%s\" is also part of %s",
                                 e->entries[j], strstr(w.fused, e->entries[j]) ? w.fused : w.name);
    }
    nib_free(w.first);
    return status;
}

/* ---- compressed-tensors ---- */

/* The first thing about a group's weights that is not NVFP4; NULL where there is none. */
static const char *group_fault(const json_t *group, char *buffer, size_t bytes)
{
    const json_t *weights = get(group, "weights");
    static const struct {
        const char *key, *wanted;
    } texts[] = { { "type", "float" }, { "strategy", "tensor_group" } };
    static const struct {
        const char *key;
        int wanted;
    } values[] = { { "num_bits", 4 }, { "group_size", 16 } };
    if (!json_is_object(weights))
        return "it has no weights";
    for (size_t i = 0; i < 2; i++)
        if (json_integer_value(get(weights, values[i].key)) != values[i].wanted) {
            snprintf(buffer, bytes, "weights.%s is %lld instead of %d", values[i].key,
                     (long long)json_integer_value(get(weights, values[i].key)), values[i].wanted);
            return buffer;
        }
    for (size_t i = 0; i < 2; i++)
        if (!is(get_text(weights, texts[i].key), texts[i].wanted)) {
            snprintf(buffer, bytes, "weights.%s is \"%s\" instead of \"%s\"", texts[i].key,
                     get_text(weights, texts[i].key), texts[i].wanted);
            return buffer;
        }
    if (json_is_false(get(weights, "symmetric")))
        return "weights.symmetric is false";
    const json_t *inputs = get(group, "input_activations");
    if (json_is_object(inputs) && json_integer_value(get(inputs, "num_bits")) == 4 &&
        !is(get_text(inputs, "dynamic"), "local"))
        return "input_activations.dynamic is not \"local\"";
    return NULL;
}

static nib_status check_groups_of_config(struct nib_checking *k, const json_t *config)
{
    static const char *const parts[] = { "weights", "input_activations" }, *const keys[] = { "scale_dtype",
                                                                                             "zp_dtype" };
    const char *name;
    json_t *group, *groups = json_object_get(config, "config_groups");
    char buffer[256], first_fault[384] = "";
    bool good = false, told = false;
    json_object_foreach(groups, name, group)
    {
        const char *this_fault = group_fault(group, buffer, sizeof buffer);
        good |= !this_fault;
        if (this_fault && !*first_fault)
            snprintf(first_fault, sizeof first_fault, "config_groups.%.80s: %s", name, this_fault);
        for (int i = 0; i < 4 && !told; i++)
            if (json_object_get(json_object_get(group, parts[i / 2]), keys[i % 2])) {
                told = true;
                TRY(nib_check_found(k, NIB_FAULT_CONFIG_DTYPE_KEYS, "config.json", "config_groups.%s.%s has the key %s",
                                    name, parts[i / 2], keys[i % 2]));
            }
    }
    if (!good)
        TRY(nib_check_found(k, NIB_FAULT_CONFIG_SCHEME, "config.json", "%s",
                            *first_fault ? first_fault : "it has no config_groups"));
    return NIB_OK;
}

static nib_status check_compressed_tensors(struct nib_checking *k)
{
    const json_t *config = k->c->quantization;
    const char *format = get_text(config, "format"), *status = get_text(config, "quantization_status"), *name;
    json_t *group;
    bool good = is(format, "nvfp4-pack-quantized") || is(format, "mixed-precision");
    if (!*format) {
        json_object_foreach(json_object_get(config, "config_groups"), name, group)
        {
            good |= is(get_text(group, "format"), "nvfp4-pack-quantized");
        }
    }
    if (!good)
        TRY(nib_check_found(k, NIB_FAULT_CONFIG_FORMAT, "config.json", "format is \"%s\" instead of \"%s\"", format,
                            "nvfp4-pack-quantized"));
    if (!is(status, "compressed"))
        TRY(nib_check_found(k, NIB_FAULT_CONFIG_STATUS, "config.json",
                            "quantization_status is \"%s\" instead of \"compressed\"", status));
    return check_groups_of_config(k, config);
}

/* ---- ModelOpt ---- */

static nib_status check_algo(struct nib_checking *k, const char *file, const json_t *config)
{
    const char *algo = get_text(config, "quant_algo"), *name;
    json_t *group;
    if (!is_mixed(config) && !is_nvfp4_algo(algo))
        return nib_check_found(k, NIB_FAULT_CONFIG_SCHEME, file, "quant_algo is \"%s\" instead of NVFP4", algo);
    const json_t *size = get(config, "group_size");
    json_object_foreach(json_object_get(config, "config_groups"), name, group)
    {
        if (!size)
            size = get(get(group, "weights"), "group_size");
    }
    if (size && json_integer_value(size) != 16)
        return nib_check_found(k, NIB_FAULT_CONFIG_SCHEME, file, "group_size is %lld instead of 16",
                               (long long)json_integer_value(size));
    return NIB_OK;
}

/* The texts of a list's entries as the keys of an object, whatever they are; NULL without memory. */
static json_t *texts_of(const json_t *list)
{
    json_t *texts = json_object();
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item)
    {
        char *text = texts ? json_dumps(item, JSON_ENCODE_ANY | JSON_SORT_KEYS) : NULL;
        if (texts && (!text || json_object_set(texts, text, item))) {
            json_decref(texts);
            texts = NULL;
        }
        free(text);
    }
    return texts;
}

/* An entry of one list that the other has not; NULL without. */
static const char *first_missing(json_t *from, const json_t *in)
{
    const char *text;
    json_t *item;
    json_object_foreach(from, text, item)
    {
        if (!json_object_get(in, text))
            return json_string_value(item) ? json_string_value(item) : "?";
    }
    return NULL;
}

static nib_status check_both_files(struct nib_checking *k, const json_t *config, const json_t *hf)
{
    static const char *const file = "hf_quant_config.json", *const both[] = { "group_size", "kv_cache_quant_algo",
                                                                              "quantized_layers" };
    if (!is(get_text(config, "quant_algo"), get_text(hf, "quant_algo")))
        return nib_check_found(k, NIB_FAULT_HF_DIFFERS, file, "its quant_algo is \"%s\", that of config.json \"%s\"",
                               get_text(hf, "quant_algo"), get_text(config, "quant_algo"));
    for (size_t i = 0; i < 3; i++)
        if (get(config, both[i]) && get(hf, both[i]) && !json_equal(get(config, both[i]), get(hf, both[i])))
            return nib_check_found(k, NIB_FAULT_HF_DIFFERS, file, "its %s is not that of config.json", both[i]);
    const json_t *ours = exclusions_of(config), *theirs = exclusions_of(hf);
    if (!ours || !theirs)
        return NIB_OK;
    json_t *texts = texts_of(ours), *their_texts = texts_of(theirs);
    const char *missing = first_missing(texts, their_texts), *more = first_missing(their_texts, texts);
    nib_status status = NIB_OK;
    if (!texts || !their_texts)
        status = nib_fail(NIB_ERR_MEMORY, "%s: no memory for its configuration", k->c->path);
    else if (missing || more)
        status = nib_check_found(k, NIB_FAULT_HF_DIFFERS, file, "only %s excludes %s", missing ? "config.json" : file,
                                 missing ? missing : more);
    json_decref(texts);
    json_decref(their_texts);
    return status;
}

static nib_status check_modelopt(struct nib_checking *k)
{
    static const char *const file = "hf_quant_config.json", *const keys[] = { "group_size", "kv_cache_quant_algo",
                                                                              "exclude_modules" };
    const json_t *config = k->c->quantization ? flat(k->c->quantization) : NULL, *hf = hf_of(k->c);
    TRY(check_algo(k, config ? "config.json" : file, config ? config : hf));
    if (!hf)
        return nib_check_found(k, NIB_FAULT_HF_MISSING, file, "it is not there");
    for (size_t i = 0; i < 3; i++)
        if (!is_mixed(hf) && !get(hf, keys[i]))
            TRY(nib_check_found(k, NIB_FAULT_HF_KEYS, file, "it has no %s", keys[i]));
    return config ? check_both_files(k, config, hf) : NIB_OK;
}

/* The first quantized module whose name, with an end behind it, is not below this one. */
static size_t lower_bound(const struct nib_checking *k, const char *name, size_t length, const char *end)
{
    size_t low = 0, high = k->n_modules;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const char *const module = k->modules[middle].name;
        const int order = strncmp(module, name, length);
        if (order < 0 || (order == 0 && strcmp(module + length, end) < 0))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The quantized module of this name, or the first below it; NULL without. Siblings like "m-2" are between the two. */
static const struct nib_check_module *find_module(const struct nib_checking *k, const char *name)
{
    const size_t length = strlen(name);
    size_t i = lower_bound(k, name, length, "");
    if (i < k->n_modules && strcmp(k->modules[i].name, name) != 0)
        i = lower_bound(k, name, length, ".");
    return i < k->n_modules && is_parent(name, k->modules[i].name) ? &k->modules[i] : NULL;
}

/* "experts" of "experts.gate_up_proj" (one part) or of "experts.3.up_proj" (two). */
static const char *without_parts(const char *name, int parts, char *buffer, size_t bytes)
{
    snprintf(buffer, bytes, "%s", name);
    for (char *dot; parts > 0 && (dot = strrchr(buffer, '.')); parts--)
        *dot = 0;
    return buffer;
}

/* Names that quantized_layers lists as NVFP4, in their order. */
struct listed_names {
    const char **each;
    size_t n;
};

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static nib_status read_listed(const nib_checkpoint *c, const json_t *layers, struct listed_names *out)
{
    const char *key;
    json_t *layer;
    *out = (struct listed_names){ .each = nib_alloc((json_object_size(layers) + 1) * sizeof *out->each) };
    if (!out->each)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its configuration", c->path);
    json_object_foreach((json_t *)(uintptr_t)layers, key, layer)
    {
        if (is_nvfp4_algo(get_text(layer, "quant_algo")))
            out->each[out->n++] = key;
    }
    qsort(out->each, out->n, sizeof *out->each, compare_names);
    return NIB_OK;
}

/* Whether one of the names begins so. */
static bool any_begins(const struct listed_names *names, const char *text)
{
    size_t low = 0, high = names->n;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (strcmp(names->each[middle], text) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < names->n && strncmp(names->each[low], text, strlen(text)) == 0;
}

/* Experts of a stack may be listed one by one: loaders look for anything below their module. */
static bool is_listed(const json_t *layers, const struct listed_names *names, const struct nib_check_module *m)
{
    char buffer[1024];
    if (is_nvfp4_algo(get_text(listed(layers, m->name), "quant_algo")))
        return true;
    if (!nib_check_is_stack(m))
        return false;
    without_parts(m->name, 1, buffer, sizeof buffer - 1);
    if (is_nvfp4_algo(get_text(get(layers, buffer), "quant_algo")))
        return true;
    return any_begins(names, strcat(buffer, "."));
}

static bool is_quantized(const struct nib_checking *k, const char *name)
{
    char buffer[1024];
    if (find_module(k, name))
        return true;
    const struct nib_check_module *m = find_module(k, without_parts(name, 2, buffer, sizeof buffer));
    return m && nib_check_is_stack(m);
}

static nib_status check_layers(struct nib_checking *k, const json_t *layers)
{
    const char *name;
    json_t *layer;
    struct listed_names names;
    TRY(read_listed(k->c, layers, &names));
    nib_status status = NIB_OK;
    for (size_t i = 0; i < k->n_modules && !status; i++)
        if (!is_listed(layers, &names, &k->modules[i]))
            status = nib_check_found(k, NIB_FAULT_CONFIG_UNLISTED, k->modules[i].name,
                                     "it is quantized, and quantized_layers does not list it as NVFP4");
    nib_free(names.each);
    TRY(status);
    json_object_foreach((json_t *)(uintptr_t)layers, name, layer)
    {
        if (is_nvfp4_algo(get_text(layer, "quant_algo")) && !is_quantized(k, name))
            TRY(nib_check_found(k, NIB_FAULT_CONFIG_LISTED, name,
                                "quantized_layers lists it, and it is not quantized"));
    }
    return NIB_OK;
}

/* ---- Modules that are better not quantized ---- */

static bool is_tied(const nib_checkpoint *c)
{
    return json_is_true(get(c->config, "tie_word_embeddings")) ||
           json_is_true(get(get(c->config, "text_config"), "tie_word_embeddings"));
}

static nib_status check_special_modules(struct nib_checking *k)
{
    for (size_t i = 0; i < k->n_modules; i++) {
        const char *name = k->modules[i].name;
        switch (nib_ck_module_role(k->c, name)) {
        case NIB_MODULE_HEAD:
            TRY(nib_check_found(k, is_tied(k->c) ? NIB_FAULT_HEAD_TIED : NIB_FAULT_HEAD_QUANTIZED, name,
                                "the head is quantized"));
            break;
        case NIB_MODULE_ROUTER:
            TRY(nib_check_found(k, NIB_FAULT_ROUTER_QUANTIZED, name, "a router is quantized"));
            break;
        case NIB_MODULE_EMBEDDING:
            TRY(nib_check_found(k, NIB_FAULT_EMBEDDING_QUANTIZED, name, "an embedding is quantized"));
            break;
        default:
            break;
        }
    }
    return NIB_OK;
}

/* A head that is tied has no tensor, but loaders build it. */
static nib_status check_tied_head(struct nib_checking *k, const struct exclusions *e)
{
    const char *const head = nib_ck_head_name(k->c);
    bool excluded;
    size_t weight;
    if (!is_tied(k->c) || nib_checkpoint_find_weight(k->c, head, &weight) == NIB_OK ||
        nib_checkpoint_find_weight(k->c, "lm_head", &weight) == NIB_OK)
        return NIB_OK;
    TRY(is_excluded(e, head, false, &excluded));
    if (excluded)
        return NIB_OK;
    return nib_check_found(k, NIB_FAULT_HEAD_NOT_IGNORED, "config.json", "ignore lacks the head, which is tied");
}

/* ---- All of it ---- */

static nib_status check_lists(struct nib_checking *k, bool modelopt, const json_t *config)
{
    if (modelopt && is_mixed(config))
        return check_layers(k, get(config, "quantized_layers"));
    struct exclusions e;
    TRY(read_exclusions(k, exclusions_of(config), modelopt, &e));
    nib_status status = modelopt ? NIB_OK : read_targets(k, config, &e.targets);
    if (!status && e.patterns) {
        status = check_exclusions(k, &e);
        if (!status && modelopt)
            status = check_widths(k, &e);
        if (!status && !modelopt)
            status = check_tied_head(k, &e);
        status = say_pattern(k, status);
    }
    free_exclusions(&e);
    return status;
}

nib_status nib_check_config(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    TRY(check_special_modules(k));
    if (!c->is_directory || !k->n_modules)
        return NIB_OK;
    if (!c->config && !c->hf_quant_config)
        return nib_check_found(k, NIB_FAULT_CONFIG_ABSENT, "config.json", "it is not there");
    if (!c->quantization && !c->hf_quant_config)
        return nib_check_found(k, NIB_FAULT_CONFIG_MISSING, "config.json", "it has no quantization_config");
    const nib_checkpoint_format format = k->format;
    if (!is_method(c, format))
        return nib_check_found(k, NIB_FAULT_CONFIG_METHOD, "config.json",
                               "quant_method is \"%s\", and the tensors are those of %s",
                               get_text(c->quantization, "quant_method"), nib_ck_formats[format].method);
    if (format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS) {
        TRY(check_compressed_tensors(k));
        return check_lists(k, false, c->quantization);
    }
    if (format != NIB_CHECKPOINT_FORMAT_MODELOPT)
        return NIB_OK;
    TRY(check_modelopt(k));
    return check_lists(k, true, modelopt_of(c));
}
