/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conform_case.c - from the JSON of a case to a quantizer.
 *
 * The table `keys` is the whole vocabulary. A key that is not in it, or not for the case's op, is rejected rather than
 * passed over: a case that is checked without one of its options proves nothing. Names of formats and dialects are the
 * library's, which also judges what goes together.
 */
#include <float.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "conform.h"

enum {
    QUANTIZE = 1 << CONFORM_QUANTIZE,
    GEMM = 1 << CONFORM_GEMM,
    CASTS = 1 << CONFORM_CASTS,
    TENSORS = QUANTIZE | GEMM,
    ALL = TENSORS | CASTS
};

struct choice {
    const char *name; /* NULL ends a list */
    int32_t value;
};

static const struct choice ops[] = {
    { "quantize", CONFORM_QUANTIZE }, { "gemm", CONFORM_GEMM }, { "casts", CONFORM_CASTS }, { NULL, 0 }
};
static const struct choice four_over_six[] = {
    { "off", 0 }, { "mae", 1 + NIB_ERROR_MAE }, { "mse", 1 + NIB_ERROR_MSE }, { NULL, 0 }
};
static const struct choice scale_rules[] = { { "rtn", NIB_SCALE_RTN }, { "sweep", NIB_SCALE_SWEEP }, { NULL, 0 } };
static const struct choice tensor_scales[] = { { "dialect", NIB_TENSOR_SCALE_RULE_DIALECT },
                                               { "exact", NIB_TENSOR_SCALE_RULE_EXACT },
                                               { "pow2", NIB_TENSOR_SCALE_RULE_POW2 },
                                               { NULL, 0 } };
static const struct choice roundings[] = { { "nearest", NIB_ROUND_NEAREST },
                                           { "stochastic8", NIB_ROUND_STOCHASTIC_8 },
                                           { "stochastic24", NIB_ROUND_STOCHASTIC_24 },
                                           { "unbiased", NIB_ROUND_STOCHASTIC_UNBIASED },
                                           { NULL, 0 } };

static const struct choice elements[] = {
    { "e2m1", NIB_E2M1 }, { "e4m3", NIB_E4M3 }, { "e5m2", NIB_E5M2 }, { NULL, 0 }
};
static const struct choice mx_rules[] = { { "ceil", NIB_MX_CEIL }, { "floor", NIB_MX_FLOOR }, { NULL, 0 } };

struct key;
typedef bool take_fn(const struct key *key, const json_t *json, struct conform_case *out);
static take_fn take_bool, take_choice, take_integer, take_word, take_format, take_dialect, take_block, take_origin,
    take_float;

struct key {
    const char *name;
    unsigned ops, required; /* for which ops */
    take_fn *take;
    size_t at, bytes;             /* the field of struct conform_case, for the first four kinds */
    const struct choice *choices; /* take_choice */
    int64_t low, high;            /* take_integer */
    const char *supports;         /* for the message; choices list themselves */
};

#define WORD_RANGE "0 to 2^64-1, as a number or as a string of digits"
#define FIELD(f) offsetof(struct conform_case, f), sizeof((struct conform_case *)0)->f
#define BOOL(name, ops, f) name, ops, 0, take_bool, FIELD(f), NULL, 0, 0, "true or false"
#define CHOICE(name, ops, required, f, list) name, ops, required, take_choice, FIELD(f), list, 0, 0, NULL
#define INTEGER(name, ops, f, low, high, supports) name, ops, 0, take_integer, FIELD(f), NULL, low, high, supports
#define WORD(name, ops, f) name, ops, 0, take_word, FIELD(f), NULL, 0, 0, WORD_RANGE
#define FLOAT(name, ops, f) name, ops, 0, take_float, FIELD(f), NULL, 0, 0, "a number that a float holds exactly"
#define OTHER(name, ops, required, take, supports) name, ops, required, take, 0, 0, NULL, 0, 0, supports

static const struct key keys[] = {
    { CHOICE("op", ALL, ALL, op, ops) },
    { OTHER("format", TENSORS, TENSORS, take_format, "a format of this version") },
    { OTHER("dialect", TENSORS, TENSORS, take_dialect, "a dialect of this version") },
    { OTHER("block", TENSORS, 0, take_block, "rows x columns, such as \"1x16\"") },
    { BOOL("exact", ALL, exact) },
    { BOOL("rowwise", QUANTIZE, quantizer.rowwise) },
    { BOOL("columnwise", QUANTIZE, quantizer.columnwise) },
    { BOOL("row_scaled", TENSORS, quantizer.row_scaled) },
    { BOOL("rht", QUANTIZE, quantizer.rht) },
    { BOOL("rht_rowwise", QUANTIZE, quantizer.rht_rowwise) },
    { INTEGER("rht_sign_mask", QUANTIZE, quantizer.rht_sign_mask, 0, UINT16_MAX, "an integer from 0 to 65535") },
    { CHOICE("four_over_six", TENSORS, 0, four_over_six, four_over_six) },
    { BOOL("fast_error", TENSORS, quantizer.fast_error) },
    { INTEGER("e4m3_max", TENSORS, quantizer.e4m3_max, 0, INT32_MAX, "an integer such as 448") },
    { INTEGER("levels", TENSORS, tensor_scales, 1, 2, "1 or 2") },
    { CHOICE("tensor_scale", TENSORS, 0, quantizer.tensor_scale_rule, tensor_scales) },
    { CHOICE("scale_rule", TENSORS, 0, quantizer.scale_rule, scale_rules) },
    { FLOAT("min_block_scale", TENSORS, quantizer.min_block_scale) },
    { CHOICE("element", TENSORS, 0, quantizer.element, elements) },
    { BOOL("pow2_scales", TENSORS, quantizer.pow2_scales) },
    { CHOICE("mx_rule", TENSORS, 0, quantizer.mx_rule, mx_rules) },
    { FLOAT("amax_epsilon", TENSORS, quantizer.amax_epsilon) },
    { CHOICE("rounding", QUANTIZE, 0, quantizer.rounding, roundings) },
    { WORD("seed", QUANTIZE, quantizer.seed) },
    { WORD("offset", QUANTIZE, quantizer.offset) },
    { OTHER("origin", QUANTIZE, 0, take_origin, "[row, column]") },
    { BOOL("given_amax", QUANTIZE, given_amax) },
    { BOOL("given_tensor_scale", QUANTIZE, given_tensor_scale) },
    { BOOL("given_global_scale", QUANTIZE, given_global_scale) },
    { BOOL("given_scale", QUANTIZE, given_scale) },
};

enum { KEYS = sizeof keys / sizeof *keys };

/* Enums, flags and numbers of every width go through here; the table knows the width. */
static void store(const struct key *key, struct conform_case *out, uint64_t value)
{
    const uint8_t byte = (uint8_t)value;
    const uint16_t half = (uint16_t)value;
    const uint32_t word = (uint32_t)value;
    const void *const source = key->bytes == 1   ? (const void *)&byte
                               : key->bytes == 2 ? (const void *)&half
                               : key->bytes == 4 ? (const void *)&word
                                                 : (const void *)&value;
    memcpy((char *)out + key->at, source, key->bytes);
}

static bool take_bool(const struct key *key, const json_t *json, struct conform_case *out)
{
    store(key, out, json_is_true(json));
    return json_is_boolean(json);
}

static bool take_choice(const struct key *key, const json_t *json, struct conform_case *out)
{
    const char *const text = json_string_value(json);
    for (const struct choice *choice = key->choices; text && choice->name; choice++)
        if (strcmp(text, choice->name) == 0) {
            store(key, out, (uint64_t)choice->value);
            return true;
        }
    return false;
}

static bool take_integer(const struct key *key, const json_t *json, struct conform_case *out)
{
    const json_int_t value = json_integer_value(json);
    store(key, out, (uint64_t)value);
    return json_is_integer(json) && value >= key->low && value <= key->high;
}

/* JSON readers, this one among them, stop at 2^63 - 1: larger numbers come as strings of digits. */
static bool take_word(const struct key *key, const json_t *json, struct conform_case *out)
{
    uint64_t value = 0;
    if (json_is_integer(json)) {
        value = (uint64_t)json_integer_value(json);
        store(key, out, value);
        return json_integer_value(json) >= 0;
    }
    const char *const text = json_string_value(json);
    if (!text || !*text)
        return false;
    for (const char *p = text; *p; p++) {
        const uint64_t digit = (uint64_t)(*p - '0');
        if (*p < '0' || *p > '9' || value > (UINT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    store(key, out, value);
    return true;
}

/* A format brings its defaults along; what else the case says comes after it in the table. */
static bool take_format(const struct key *key, const json_t *json, struct conform_case *out)
{
    (void)key;
    const char *const text = json_string_value(json);
    nib_format format;
    if (!text || nib_format_from_name(text, &format) || nib_quantizer_init_format(&out->quantizer, format))
        return false;
    out->quantizer.columnwise = 0;
    return true;
}

static bool take_dialect(const struct key *key, const json_t *json, struct conform_case *out)
{
    (void)key;
    const char *const text = json_string_value(json);
    return text && nib_dialect_from_name(text, &out->quantizer.dialect) == NIB_OK;
}

/* One to four digits, no sign and no blank; which blocks there are is the library's to say. */
static const char *take_digits(const char *text, int32_t *out)
{
    int digits = 0;
    for (*out = 0; *text >= '0' && *text <= '9' && digits < 4; text++, digits++)
        *out = *out * 10 + (*text - '0');
    return digits ? text : NULL;
}

static bool take_block(const struct key *key, const json_t *json, struct conform_case *out)
{
    (void)key;
    const char *text = json_string_value(json);
    if (text)
        text = take_digits(text, &out->quantizer.block_dims[0]);
    if (text && *text == 'x')
        text = take_digits(text + 1, &out->quantizer.block_dims[1]);
    else
        text = NULL;
    return text && !*text;
}

static bool take_origin(const struct key *key, const json_t *json, struct conform_case *out)
{
    (void)key;
    for (size_t i = 0; i < 2; i++) {
        const json_t *const item = json_array_get(json, i);
        if (!json_is_integer(item))
            return false;
        out->quantizer.origin[i] = json_integer_value(item);
    }
    return json_array_size(json) == 2;
}

/* A number that only becomes legal by rounding is another number than the file's. */
static bool take_float(const struct key *key, const json_t *json, struct conform_case *out)
{
    const double value = json_number_value(json);
    if (!json_is_number(json) || !(value >= -FLT_MAX && value <= FLT_MAX))
        return false;
    const float narrowed = (float)value;
    memcpy((char *)out + key->at, &narrowed, sizeof narrowed);
    return (double)narrowed == value;
}

static const struct key *find_key(const char *name)
{
    for (int i = 0; i < KEYS; i++)
        if (strcmp(keys[i].name, name) == 0)
            return &keys[i];
    return NULL;
}

static bool reject(const struct key *key, const json_t *json, struct conform_result *result)
{
    char supports[160] = "";
    for (const struct choice *choice = key->choices; choice && choice->name; choice++) {
        const size_t used = strlen(supports);
        snprintf(supports + used, sizeof supports - used, "%s\"%s\"", used ? " or " : "", choice->name);
    }
    char *const text = json_dumps(json, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15));
    conform_bad(result, "its \"%s\" is %.80s, not %s", key->name, text ? text : "something",
                key->supports ? key->supports : supports);
    free(text);
    return false;
}

/* What two keys say about one field. */
static bool combine(struct conform_case *out, struct conform_result *result)
{
    nib_quantizer *const q = &out->quantizer;
    if (out->four_over_six && q->scale_rule != NIB_SCALE_RTN)
        return conform_bad(result, "its \"four_over_six\" and its \"scale_rule\" contradict each other");
    if (out->four_over_six) {
        q->scale_rule = NIB_SCALE_4OVER6;
        q->error_mode = (nib_error_mode)(out->four_over_six - 1);
    }
    q->no_tensor_scale = out->tensor_scales == 1;
    return true;
}

bool conform_parse(json_t *json, struct conform_case *out, struct conform_result *result)
{
    if (!json_is_object(json))
        return conform_bad(result, "it is not a JSON object");
    *out = (struct conform_case){ .exact = 1, .tensor_scales = 2 };
    nib_quantizer_init(&out->quantizer);
    out->quantizer.columnwise = 0;

    /* In the order of the table, for op comes first and decides which others there may be. */
    for (const struct key *key = keys; key < keys + KEYS; key++) {
        const json_t *const value = json_object_get(json, key->name);
        const unsigned op = key == keys ? ALL : 1u << out->op;
        if (!value && (key->required & op))
            return conform_bad(result, "it has no \"%s\"", key->name);
        if (value && !(key->ops & op))
            return conform_bad(result, "a case of op \"%s\" has no \"%s\"", ops[out->op].name, key->name);
        if (value && !key->take(key, value, out))
            return reject(key, value, result);
    }
    const char *name;
    json_t *value;
    json_object_foreach(json, name,
                        value) if (!find_key(name)) return conform_bad(result, "its key \"%.80s\" is not known", name);
    return combine(out, result);
}
