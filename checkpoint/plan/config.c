/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - what stands beside the tensors: quantization_config as each loader wants it, the index, provenance.
 */
#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the configuration"); }

/* ---- JSON as text ---- */

static bool put_string(struct nib_text *text, const char *string) { return nib_text_put(text, string, strlen(string)); }

/* The fewest digits that read back as the same number, as Python writes them; the decimal point is a point in any
 * locale. */
static bool put_real(struct nib_text *text, double value)
{
    enum { FIXED_FROM = -4, FIXED_TO = 16 };
    char digits[48];
    int precision = 0;
    for (; precision < 17; precision++) {
        snprintf(digits, sizeof digits, "%.*e", precision, value);
        if (strtod(digits, NULL) == value)
            break;
    }
    const char *mark = strchr(digits, 'e');
    const int exponent = mark ? atoi(mark + 1) : 0;
    if (exponent >= FIXED_FROM && exponent < FIXED_TO)
        snprintf(digits, sizeof digits, "%.*f", precision > exponent ? precision - exponent : 1, value);
    for (char *p = digits; *p; p++)
        if ((*p < '0' || *p > '9') && *p != '-' && *p != '+' && *p != 'e')
            *p = '.';
    return put_string(text, digits);
}

static bool put_line(struct nib_text *text, int indent)
{
    bool fits = put_string(text, "\n");
    for (int i = 0; i < indent && fits; i++)
        fits = put_string(text, " ");
    return fits;
}

/* As deep as jansson's reader lets a text be. */
bool nib_put_json(struct nib_text *text, const json_t *value, int indent)
{
    enum { STEP = 2 };
    bool fits = true, first = true;
    switch (json_typeof(value)) {
    case JSON_OBJECT: {
        const char *key;
        json_t *item;
        fits = put_string(text, "{");
        json_object_foreach((json_t *)(uintptr_t)value, key, item)
        {
            fits = fits && (first || put_string(text, ",")) && put_line(text, indent + STEP) &&
                   nib_text_put_json(text, key) && put_string(text, ": ") && nib_put_json(text, item, indent + STEP);
            first = false;
        }
        return fits && (first || put_line(text, indent)) && put_string(text, "}");
    }
    case JSON_ARRAY: {
        fits = put_string(text, "[");
        for (size_t i = 0; i < json_array_size(value) && fits; i++)
            fits = (i == 0 || put_string(text, ",")) && put_line(text, indent + STEP) &&
                   nib_put_json(text, json_array_get(value, i), indent + STEP);
        return fits && (!json_array_size(value) || put_line(text, indent)) && put_string(text, "]");
    }
    case JSON_STRING: {
        const char *string = json_string_value(value);
        if (*string == '\x01' && nib_ck_is_python_number(string + 1, strlen(string + 1)))
            return put_string(text, string + 1);
        return nib_text_put_json(text, string);
    }
    case JSON_INTEGER: {
        char digits[24];
        snprintf(digits, sizeof digits, "%lld", (long long)json_integer_value(value));
        return put_string(text, digits);
    }
    case JSON_REAL:
        return put_real(text, json_real_value(value));
    case JSON_TRUE:
        return put_string(text, "true");
    case JSON_FALSE:
        return put_string(text, "false");
    case JSON_NULL:
        break;
    }
    return put_string(text, "null");
}

/* ---- Provenance ---- */

nib_status nib_plan_provenance(const nib_plan *plan, const struct nib_hash *hashes, struct nib_text *text)
{
    *text = (struct nib_text){ 0 };
    char *options = json_dumps(plan->options, JSON_COMPACT | JSON_SORT_KEYS);
    bool fits = options && put_string(text, "{\"tool\":\"nib\",\"version\":\"" NIB_VERSION "\",\"command\":") &&
                nib_text_put_json(text, plan->command) && put_string(text, ",\"options\":") &&
                put_string(text, options) && put_string(text, ",\"sources\":[");
    free(options);
    for (size_t i = 0; i < plan->in->n_files && fits; i++) {
        const char *name = strrchr(plan->in->files[i].name, '/'); /* a single file may be named by its path */
        char hash[48];
        snprintf(hash, sizeof hash, ",\"xxh3\":\"%016llx%016llx\"}", hashes ? (unsigned long long)hashes[i].high : 0,
                 hashes ? (unsigned long long)hashes[i].low : 0);
        fits = put_string(text, i ? ",{\"file\":" : "{\"file\":") &&
               nib_text_put_json(text, name ? name + 1 : plan->in->files[i].name) && put_string(text, hash);
    }
    const char *dtype = nib_dtype_name(plan->noted_dtype); /* NULL: there is none to note */
    char *restore = plan->restore ? json_dumps(plan->restore, JSON_COMPACT) : NULL;
    fits = fits && (restore || !plan->restore) && put_string(text, "]") &&
           (!restore || (put_string(text, ",\"restore\":") && put_string(text, restore))) &&
           (!dtype || (put_string(text, ",\"dtype\":\"") && put_string(text, dtype) && put_string(text, "\""))) &&
           put_string(text, "}") && nib_text_put(text, "", 1);
    free(restore);
    if (fits) {
        text->used--; /* the NUL behind it is not part of it */
        return NIB_OK;
    }
    nib_free(text->bytes);
    *text = (struct nib_text){ 0 };
    return no_memory();
}

/* ---- quantization_config ---- */

static bool is_kept(const nib_plan *plan, size_t weight)
{
    const nib_action action = plan->rows[weight].action;
    return action == NIB_ACTION_DEQUANTIZE ||
           (action == NIB_ACTION_KEEP && !nib_ck_is_nvfp4(plan->in->weights[weight].format));
}

static bool add_name(json_t *list, size_t place, const char *name)
{
    return json_array_insert_new(list, place, json_string(name)) == 0;
}

/* A head that is tied has no tensor, but is a module: whatever its class calls it, and lm_head, which servers do. */
static bool add_heads(const nib_plan *plan, json_t *list)
{
    const char *const heads[] = { "lm_head", nib_ck_head_name(plan->in) };
    for (int i = 0; i < 2; i++) {
        size_t weight;
        if ((i == 0 || strcmp(heads[0], heads[1]) != 0) && nib_checkpoint_find_weight(plan->in, heads[i], &weight) &&
            !add_name(list, 0, heads[i]))
            return false;
    }
    return true;
}

enum { PART_BYTES = 1000 };

/* Parts of names that say which tower a module that stays belongs to: true where one that is quantized has it too, so that
 * a pattern for all of the tower would mean it. NULL without memory. */
static json_t *find_towers(const nib_plan *plan)
{
    json_t *towers = json_object();
    char part[PART_BYTES];
    for (size_t i = 0; i < plan->in->n_weights && towers; i++)
        if (is_kept(plan, i) && nib_ck_tower_part(plan->in, plan->in->weights[i].name, part, sizeof part) &&
            !json_object_get(towers, part) && json_object_set_new(towers, part, json_false())) {
            json_decref(towers);
            towers = NULL;
        }
    for (size_t i = 0; i < plan->in->n_weights && json_object_size(towers) > 0; i++)
        for (const char *at = plan->in->weights[i].name, *dot; !is_kept(plan, i) && (dot = strchr(at, '.'));
             at = dot + 1) {
            const size_t length = (size_t)(dot - at) < sizeof part ? (size_t)(dot - at) : 0;
            memcpy(part, at, length);
            part[length] = 0;
            if (json_object_get(towers, part))
                (void)json_object_set_new(towers, part, json_true()); /* in the place of the other: takes no memory */
        }
    return towers;
}

/* transformers looks modules up by its own names, which checkpoints need not have: those that differ are listed too, and
 * towers by patterns, since much is renamed within some. */
static bool add_readers_names(const nib_plan *plan, json_t *list)
{
    json_t *towers = find_towers(plan);
    char name[1024], part[PART_BYTES];
    bool fits = towers != NULL;
    for (size_t i = 0; i < plan->in->n_weights && fits; i++) {
        const char *weight = plan->in->weights[i].name;
        if (!is_kept(plan, i))
            continue;
        const json_t *tower =
            nib_ck_tower_part(plan->in, weight, part, sizeof part) ? json_object_get(towers, part) : NULL;
        if (json_is_false(tower)) { /* its first module */
            snprintf(name, sizeof name, "re:(.*\\.)?%s\\..*", part);
            fits = add_name(list, json_array_size(list), name) && !json_object_set_new(towers, part, json_null());
        } else if (!json_is_null(tower) && nib_ck_reader_name(plan->in, weight, name, sizeof name) &&
                   strcmp(name, "lm_head") != 0) {
            fits = add_name(list, json_array_size(list), name);
        }
    }
    json_decref(towers);
    return fits;
}

/* Modules that stay in high precision, by their full names: a loader would make packed ones of them otherwise. */
static json_t *kept_modules(const nib_plan *plan)
{
    json_t *list = json_array();
    bool fits = list != NULL;
    for (size_t i = 0; i < plan->in->n_weights && fits; i++)
        if (is_kept(plan, i))
            fits = add_name(list, json_array_size(list), plan->in->weights[i].name);
    fits = fits && add_heads(plan, list);
    if (plan->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS)
        fits = fits && add_readers_names(plan, list);
    if (!fits) {
        json_decref(list);
        return NULL;
    }
    return list;
}

/* A cache of keys and values in FP8 is a matter between the scales that are copied and the server. */
static bool has_fp8_cache(const nib_checkpoint *in)
{
    const json_t *const quantization = json_object_get(in->hf_quant_config, "quantization");
    const json_t *const algorithms[] = { json_object_get(in->quantization, "kv_cache_quant_algo"),
                                         json_object_get(quantization, "kv_cache_quant_algo") };
    const json_t *bits = json_object_get(json_object_get(in->quantization, "kv_cache_scheme"), "num_bits");
    for (int i = 0; i < 2; i++)
        if (json_is_string(algorithms[i]) && !strcmp(json_string_value(algorithms[i]), "FP8"))
            return true;
    return json_is_integer(bits) && json_integer_value(bits) == 8;
}

static json_t *ct_cache(const nib_plan *plan)
{
    return has_fp8_cache(plan->in) ? json_pack("{s:i, s:s, s:s, s:b, s:b}", "num_bits", 8, "type", "float", "strategy",
                                               "tensor", "symmetric", 1, "dynamic", 0)
                                   : json_null();
}

static json_t *modelopt_cache(const nib_plan *plan)
{
    return has_fp8_cache(plan->in) ? json_string("FP8") : json_null();
}

static json_t *ct_arguments(bool dynamic)
{
    return json_pack("{s:i, s:s, s:b, s:s, s:i, s:o, s:n, s:n, s:s, s:{}}", "num_bits", 4, "type", "float", "symmetric",
                     1, "strategy", "tensor_group", "group_size", 16, "dynamic",
                     dynamic ? json_string("local") : json_false(), "actorder", "block_structure", "observer", "minmax",
                     "observer_kwargs");
}

/* ---- Beside NVFP4 ---- */

static bool is_fp8(const nib_plan *plan, size_t weight) { return plan->rows[weight].action == NIB_ACTION_FP8; }

static bool has_fp8(const nib_plan *plan)
{
    for (size_t i = 0; i < plan->in->n_weights; i++)
        if (is_fp8(plan, i))
            return true;
    return false;
}

/* Modules of FP8, by the checkpoint's names and, where they differ, by those that transformers gives them. */
static json_t *fp8_modules(const nib_plan *plan)
{
    json_t *list = json_array();
    char name[1024];
    for (size_t i = 0; i < plan->in->n_weights && list; i++) {
        const char *weight = plan->in->weights[i].name;
        if (is_fp8(plan, i) && (!add_name(list, json_array_size(list), weight) ||
                                (nib_ck_reader_name(plan->in, weight, name, sizeof name) &&
                                 !add_name(list, json_array_size(list), name)))) {
            json_decref(list);
            list = NULL;
        }
    }
    return list;
}

static json_t *ct_fp8_arguments(bool tokens)
{
    return json_pack("{s:i, s:s, s:b, s:s, s:n, s:b, s:n, s:n, s:o, s:{}}", "num_bits", 8, "type", "float", "symmetric",
                     1, "strategy", tokens ? "token" : "channel", "group_size", "dynamic", tokens, "actorder",
                     "block_structure", "observer", tokens ? json_null() : json_string("minmax"), "observer_kwargs");
}

/* Two groups, each with its format: names come before classes where loaders look a module up. */
static json_t *ct_mixed_config(const nib_plan *plan, json_t *ignore)
{
    const bool activations = plan->scheme == NIB_SCHEME_NVFP4;
    return json_pack("{s:s, s:s, s:s, s:n, s:o, s:o, s:{s:{s:[s], s:s, s:o, s:o, s:n}, s:{s:o, s:s, s:o, s:o, s:n}}}",
                     "quant_method", nib_ck_formats[plan->format].method, "format", "mixed-precision",
                     "quantization_status", "compressed", "global_compression_ratio", "kv_cache_scheme", ct_cache(plan),
                     "ignore", ignore, "config_groups", "group_0", "targets", "Linear", "format",
                     "nvfp4-pack-quantized", "weights", ct_arguments(false), "input_activations",
                     activations ? ct_arguments(true) : json_null(), "output_activations", "group_1", "targets",
                     fp8_modules(plan), "format", activations ? "float-quantized" : "naive-quantized", "weights",
                     ct_fp8_arguments(false), "input_activations", activations ? ct_fp8_arguments(true) : json_null(),
                     "output_activations");
}

static json_t *compressed_tensors_config(const nib_plan *plan, json_t *ignore)
{
    const bool activations = plan->scheme == NIB_SCHEME_NVFP4;
    if (has_fp8(plan))
        return ct_mixed_config(plan, ignore);
    return json_pack("{s:s, s:s, s:s, s:n, s:o, s:o, s:{s:{s:[s], s:o, s:o, s:n}}}", "quant_method",
                     nib_ck_formats[plan->format].method, "format", "nvfp4-pack-quantized", "quantization_status",
                     "compressed", "global_compression_ratio", "kv_cache_scheme", ct_cache(plan), "ignore", ignore,
                     "config_groups", "group_0", "targets", "Linear", "weights", ct_arguments(false),
                     "input_activations", activations ? ct_arguments(true) : json_null(), "output_activations");
}

static json_t *producer(void) { return json_pack("{s:s, s:s}", "name", "modelopt", "version", "0.46.0"); }

#define MODELOPT_FP8 "FP8_PER_CHANNEL_PER_TOKEN"

/* Bytes of "mlp.experts" in "mlp.experts.3.up_proj"; 0: it is none. */
static size_t experts_bytes(const char *name)
{
    const char *const at = strstr(name, ".experts.");
    return at ? (size_t)(at - name) + strlen(".experts") : 0;
}

/* What a mixture lists for one weight after the other. */
struct listing {
    const nib_plan *plan;
    bool mixed;
    size_t end; /* behind the experts of the layer that was met last */
    bool whole; /* none of them stays */
    char name[1024];
};

/* The module of a weight, or that of all experts of its layer, where none of them stays. Weights come in their order. */
static const char *listed_name(struct listing *l, size_t weight)
{
    const struct nib_ck_weight *weights = l->plan->in->weights;
    const char *name = weights[weight].name;
    const size_t length = l->mixed ? experts_bytes(name) : 0;
    if (!length || length >= sizeof l->name)
        return name;
    if (weight >= l->end) {
        l->whole = true;
        for (l->end = weight; l->end < l->plan->in->n_weights && !strncmp(weights[l->end].name, name, length + 1);
             l->end++)
            l->whole &= nib_plan_is_quantized(l->plan, l->end);
        snprintf(l->name, sizeof l->name, "%.*s", (int)length, name);
    }
    return l->whole ? l->name : name;
}

/* Every quantized module with its algorithm: the form of weight-only checkpoints that all servers read. */
static json_t *quantized_layers(const nib_plan *plan)
{
    json_t *layers = json_object();
    struct listing listing = { .plan = plan, .mixed = has_fp8(plan) };
    for (size_t i = 0; i < plan->in->n_weights && layers; i++) {
        const nib_action action = plan->rows[i].action;
        const bool coded = action == NIB_ACTION_QUANTIZE || action == NIB_ACTION_CONVERT ||
                           action == NIB_ACTION_REPAIR ||
                           (action == NIB_ACTION_KEEP && nib_ck_is_nvfp4(plan->in->weights[i].format));
        const char *name = listed_name(&listing, i),
                   *algorithm = plan->scheme == NIB_SCHEME_NVFP4 ? "NVFP4" : "W4A16_NVFP4";
        json_t *said = coded             ? json_pack("{s:s, s:i}", "quant_algo", algorithm, "group_size", 16)
                       : is_fp8(plan, i) ? json_pack("{s:s}", "quant_algo", MODELOPT_FP8)
                                         : NULL;
        if ((coded || is_fp8(plan, i)) && json_object_set_new(layers, name, said)) {
            json_decref(layers);
            return NULL;
        }
    }
    return layers;
}

static json_t *modelopt_arguments(void)
{
    return json_pack("{s:b, s:i, s:s, s:i}", "dynamic", 0, "num_bits", 4, "type", "float", "group_size", 16);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(json_string_value(*(json_t *const *)a), json_string_value(*(json_t *const *)b));
}

/* Each text of a list once, in the order of bytes. The list itself is gone; NULL for NULL, and without memory. */
static json_t *sort_names(json_t *list)
{
    const size_t n = json_array_size(list);
    json_t **names = list ? nib_alloc((n + 1) * sizeof *names) : NULL, *sorted = names ? json_array() : NULL;
    for (size_t i = 0; i < n && sorted; i++)
        names[i] = json_array_get(list, i);
    if (sorted)
        qsort(names, n, sizeof(json_t *), by_text);
    for (size_t i = 0; i < n && sorted; i++)
        if ((i == 0 || by_text(&names[i - 1], &names[i]) != 0) && json_array_append(sorted, names[i])) {
            json_decref(sorted);
            sorted = NULL;
        }
    nib_free(names);
    json_decref(list);
    return sorted;
}

/* The modules of FP8 or of NVFP4, in the order of their names' bytes, as ModelOpt sorts them. */
static json_t *modelopt_targets(const nib_plan *plan, bool fp8)
{
    json_t *list = json_array();
    struct listing listing = { .plan = plan, .mixed = has_fp8(plan) };
    for (size_t i = 0; i < plan->in->n_weights && list; i++) {
        const char *name = listed_name(&listing, i);
        if (nib_plan_is_quantized(plan, i) && is_fp8(plan, i) == fp8 && !add_name(list, json_array_size(list), name)) {
            json_decref(list);
            list = NULL;
        }
    }
    return sort_names(list);
}

/* ModelOpt's form of a mixture: groups in the order in which they are met. */
static json_t *modelopt_mixed_config(const nib_plan *plan, json_t *ignore)
{
    json_t *fp8 = json_pack("{s:{s:b, s:i, s:s}, s:{s:b, s:i, s:s, s:s}, s:o}", "input_activations", "dynamic", 0,
                            "num_bits", 8, "type", "float", "weights", "dynamic", 0, "num_bits", 8, "type", "float",
                            "strategy", "channel", "targets", modelopt_targets(plan, true));
    json_t *nvfp4 = json_pack("{s:o*, s:o, s:o}", "input_activations",
                              plan->scheme == NIB_SCHEME_NVFP4 ? modelopt_arguments() : NULL, "weights",
                              modelopt_arguments(), "targets", modelopt_targets(plan, false));
    size_t first = 0;
    while (first < plan->in->n_weights && !nib_plan_is_quantized(plan, first))
        first++;
    const bool before = is_fp8(plan, first);
    return json_pack("{s:{s:o, s:o}, s:o, s:o, s:s, s:o*, s:o, s:s}", "config_groups", "group_0", before ? fp8 : nvfp4,
                     "group_1", before ? nvfp4 : fp8, "quantized_layers", quantized_layers(plan), "ignore", ignore,
                     "quant_algo", "MIXED_PRECISION", "kv_cache_quant_algo",
                     has_fp8_cache(plan->in) ? modelopt_cache(plan) : NULL, "producer", producer(), "quant_method",
                     nib_ck_formats[plan->format].method);
}

static json_t *modelopt_config(const nib_plan *plan, json_t *ignore)
{
    if (has_fp8(plan))
        return modelopt_mixed_config(plan, ignore);
    if (plan->scheme == NIB_SCHEME_NVFP4)
        return json_pack("{s:s, s:s, s:o, s:{s:{s:[s], s:o, s:o}}, s:o, s:o}", "quant_method",
                         nib_ck_formats[plan->format].method, "quant_algo", "NVFP4", "kv_cache_quant_algo",
                         modelopt_cache(plan), "config_groups", "group_0", "targets", "Linear", "weights",
                         modelopt_arguments(), "input_activations", modelopt_arguments(), "ignore", ignore, "producer",
                         producer());
    return json_pack("{s:s, s:s, s:o, s:o, s:o, s:o}", "quant_method", nib_ck_formats[plan->format].method,
                     "quant_algo", "MIXED_PRECISION", "kv_cache_quant_algo", modelopt_cache(plan), "ignore", ignore,
                     "producer", producer(), "quantized_layers", quantized_layers(plan));
}

static json_t *modelopt_hf_quant(const nib_plan *plan, json_t *exclude)
{
    if (plan->scheme == NIB_SCHEME_NVFP4 && !has_fp8(plan))
        return json_pack("{s:o, s:{s:s, s:o, s:i, s:o}}", "producer", producer(), "quantization", "quant_algo", "NVFP4",
                         "kv_cache_quant_algo", modelopt_cache(plan), "group_size", 16, "exclude_modules", exclude);
    return json_pack("{s:o, s:{s:s, s:o, s:i, s:o, s:o}}", "producer", producer(), "quantization", "quant_algo",
                     "MIXED_PRECISION", "kv_cache_quant_algo", modelopt_cache(plan), "group_size", 16,
                     "exclude_modules", exclude, "quantized_layers", quantized_layers(plan));
}

/* What a source says of its own quantization, wherever loaders look for it, is no longer true. */
static void drop_stale(json_t *config)
{
    static const char *const keys[] = { "quantization_config", "compression_config" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        json_object_del(config, keys[i]);
        json_object_del(json_object_get(config, "text_config"), keys[i]);
    }
    json_object_del(config, "nib");
}

/* Torchao says it in the files, GGUF too, and plain values need nothing. */
static const struct {
    json_t *(*config)(const nib_plan *plan, json_t *ignore);   /* quantization_config of config.json */
    json_t *(*hf_quant)(const nib_plan *plan, json_t *ignore); /* hf_quant_config.json; NULL: none */
} configurations[NIB_CHECKPOINT_FORMAT_COUNT] = {
    [NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS] = { compressed_tensors_config, NULL },
    [NIB_CHECKPOINT_FORMAT_MODELOPT] = { modelopt_config, modelopt_hf_quant },
};

nib_status nib_plan_configure(nib_plan *plan)
{
    if (plan->config || plan->gguf)
        return NIB_OK;
    plan->config = plan->in->config ? nib_ck_copy_json(plan->in->config) : json_object();
    if (!plan->config)
        return no_memory();
    drop_stale(plan->config);
    if (!configurations[plan->format].config)
        return NIB_OK;
    json_t *quantization = configurations[plan->format].config(plan, kept_modules(plan));
    if (!quantization || json_object_set_new(plan->config, "quantization_config", quantization))
        return no_memory();
    if (configurations[plan->format].hf_quant) {
        plan->hf_quant = configurations[plan->format].hf_quant(plan, kept_modules(plan));
        return plan->hf_quant ? NIB_OK : no_memory();
    }
    return NIB_OK;
}

/* ---- Index ---- */

static int by_name(const void *left, const void *right)
{
    const struct nib_out_tensor *a = *(const struct nib_out_tensor *const *)left,
                                *b = *(const struct nib_out_tensor *const *)right;
    return strcmp(a->name, b->name);
}

static bool put_index(const nib_plan *plan, const struct nib_out_tensor *const *sorted, struct nib_text *text)
{
    uint64_t total = 0;
    char digits[24];
    for (size_t i = 0; i < plan->n_tensors; i++)
        total += plan->tensors[i].bytes;
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)total);
    bool fits = put_string(text, "{\n  \"metadata\": {\n    \"total_size\": ") && put_string(text, digits) &&
                put_string(text, "\n  },\n  \"weight_map\": {");
    for (size_t i = 0; i < plan->n_tensors && fits; i++) {
        const uint32_t at = (uint32_t)(sorted[i] - plan->tensors);
        size_t file = 0, count = plan->n_files; /* the last that begins at or before it */
        while (count > 1) {
            const size_t half = count / 2;
            if (plan->files[file + half].first <= at) {
                file += half;
                count -= half;
            } else {
                count = half;
            }
        }
        fits = put_string(text, i ? ",\n    " : "\n    ") && nib_text_put_json(text, sorted[i]->name) &&
               put_string(text, ": ") && nib_text_put_json(text, plan->files[file].name);
    }
    return fits && put_string(text, "\n  }\n}\n");
}

nib_status nib_plan_index(const nib_plan *plan, struct nib_text *text)
{
    *text = (struct nib_text){ 0 };
    const struct nib_out_tensor **sorted = nib_alloc(plan->n_tensors * sizeof *sorted);
    bool fits = sorted != NULL;
    for (size_t i = 0; i < plan->n_tensors && fits; i++)
        sorted[i] = &plan->tensors[i];
    if (fits) {
        qsort(sorted, plan->n_tensors, sizeof *sorted, by_name);
        fits = put_index(plan, sorted, text);
    }
    nib_free(sorted);
    if (fits)
        return NIB_OK;
    nib_free(text->bytes);
    *text = (struct nib_text){ 0 };
    return no_memory();
}
