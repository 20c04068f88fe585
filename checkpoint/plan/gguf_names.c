/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_names.c - general.name, general.basename and the like: the parts of names such as "Llama-3.1-8B-Instruct", by the
 * rules of llama.cpp's converter, and the size of the model.
 */
#include "plan/gguf_keys.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/gguf.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

enum { PARTS = 32, TEXT = 512 };

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
static bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
static bool is_letter(char c) { return is_upper(c) || is_lower(c); }
static char to_upper(char c) { return is_lower(c) ? (char)(c - 'a' + 'A') : c; }
static char to_lower(char c) { return is_upper(c) ? (char)(c - 'A' + 'a') : c; }

/* ---- Parts of a name ---- */

/* What a part of a name is; several at once. The first four are in the order of their patterns. */
enum { VERSION = 1, TYPE = 2, SIZE = 4, FINETUNE = 8, BASENAME = 16 };

static const char *const kinds[] = {
    "re:(?i)(v|iter)?\\d+([.]\\d+)*$",
    "re:(?i)(i?q\\d(_\\w)*|b?fp?(16|32))$",
    "re:(?i)(([A]|\\d+[x])?\\d+([._]\\d+)?[KMBT][\\d]?|small|mini|medium|large|x?xl)$",
    "re:(?i)(chat|instruct|vision|lora)$",
};

struct part {
    char text[TEXT];
    unsigned kind;
};

/* "7b1" is 7.1B, "0_5b" is 0.5B; what is far from the model's size is the length of a context. */
static void read_size(struct part *part, double parameters)
{
    size_t n = strlen(part->text);
    for (char *c = part->text; *c; c++)
        *c = *c == '_' ? '.' : *c;
    if (n >= 2 && is_digit(part->text[n - 1]) && n + 1 < sizeof part->text) {
        const char digit = part->text[n - 1], letter = part->text[n - 2];
        part->text[n - 2] = '.';
        part->text[n - 1] = digit;
        part->text[n++] = letter;
        part->text[n] = '\0';
    }
    char *last = &part->text[n - 1], *end;
    if (n > 1 && is_digit(last[-1]))
        *last = to_upper(*last);
    const char unit = *last;
    *last = '\0';
    double size = strtod(part->text, &end);
    const bool whole = end != part->text && !*end;
    *last = unit;
    const char *units = " KMBT", *place = strchr(units, unit);
    size *= pow(1000, place ? (double)(place - units) : -1);
    part->kind = SIZE;
    if (whole && fabs(size - parameters) > floor(7 * parameters / 8)) {
        part->kind = FINETUNE;
        *last = to_lower(*last);
    }
}

static nib_status annotate(struct part *parts, size_t n, double parameters)
{
    struct nib_patterns *patterns;
    TRY(nib_patterns_create(kinds, sizeof kinds / sizeof *kinds, &patterns));
    nib_status status = NIB_OK;
    for (size_t i = 0; i < n && !status; i++) {
        uint32_t which;
        status = nib_patterns_match(patterns, parts[i].text, &which);
        if (status || which == NIB_NONE || (which >= 2 && i == 0))
            continue;
        parts[i].kind = 1u << which;
        if (parts[i].kind == SIZE)
            read_size(&parts[i], parameters);
        for (char *c = parts[i].text; parts[i].kind == TYPE && *c; c++)
            *c = to_upper(*c);
    }
    nib_patterns_destroy(patterns);
    return status;
}

static bool has_digit(const char *text)
{
    while (*text && !is_digit(*text))
        text++;
    return *text;
}

/* What begins the name is its basename, but for a version at its end; words of size count where there is no number. */
static void find_basename(struct part *parts, size_t n)
{
    bool numbered = false, at_start = true;
    for (size_t i = 0; i < n; i++)
        numbered |= (parts[i].kind & SIZE) && has_digit(parts[i].text);
    for (size_t i = 0; i < n; i++)
        if (numbered && (parts[i].kind & SIZE) && !has_digit(parts[i].text))
            parts[i].kind &= ~(unsigned)SIZE;
    for (size_t i = 0; i < n; i++) {
        const bool word = parts[i].kind == 0 && is_letter(*parts[i].text);
        if (at_start && (word || (parts[i].kind & VERSION))) {
            parts[i].kind |= BASENAME;
            continue;
        }
        at_start = false;
        parts[i].kind |= parts[i].kind ? 0 : FINETUNE;
    }
    for (size_t i = n; i-- > 0 && (parts[i].kind & BASENAME) && parts[i].kind != BASENAME;)
        parts[i].kind &= ~(unsigned)BASENAME;
}

/* The parts of some kinds and not of another, with a dash between them; false where there are none. */
static bool join_parts(const struct part *parts, size_t n, unsigned kind, unsigned without, bool once, char *out)
{
    size_t used = 0;
    *out = '\0';
    for (size_t i = 0; i < n; i++) {
        bool known = false;
        for (size_t j = 0; j < i && once; j++)
            known |= (parts[j].kind & kind) && !strcmp(parts[i].text, parts[j].text);
        if (!(parts[i].kind & kind) || (parts[i].kind & without) || known)
            continue;
        const int length = snprintf(out + used, TEXT - used, "%s%s", used ? "-" : "", parts[i].text);
        used += length > 0 ? (size_t)length : 0;
        if (used >= TEXT)
            return false;
    }
    return used > 0;
}

/* ---- Names ---- */

/* What is known so far; "" is nothing yet. */
struct names {
    char name[TEXT], organization[TEXT], basename[TEXT], finetune[TEXT], version[TEXT], size[TEXT];
    bool named;
};

/* Words begin with a capital, but versions and numbers stay. */
static void put_title(const char *id, char *out)
{
    size_t used = 0;
    for (const char *word = id; *word;) {
        const size_t length = strcspn(word, "- \t");
        const size_t digits = 1 + strspn(word + 1, "0123456789.");
        bool lower = false, upper = false;
        for (size_t i = 0; i < length; i++) {
            lower |= is_lower(word[i]);
            upper |= is_upper(word[i]);
        }
        const bool number = is_digit(*word) || (*word == 'v' && length > 1 && is_digit(word[1]) && digits >= length);
        if (length && used && used + 1 < TEXT)
            out[used++] = ' ';
        for (size_t i = 0; i < length && used + 1 < TEXT; i++)
            out[used++] =
                lower && !upper && !number && (i == 0 || !is_letter(word[i - 1])) ? to_upper(word[i]) : word[i];
        word += length + (word[length] != '\0');
    }
    out[used] = '\0';
}

static void take(char *known, const char *found)
{
    if (!*known)
        snprintf(known, TEXT, "%s", found);
}

/* "org/Name-7B-Instruct" in its parts, for what is not known yet. */
static nib_status take_id(struct names *names, const char *id, double parameters)
{
    const char *slash = strchr(id, '/'), *full = slash ? slash + 1 : id;
    char text[TEXT], title[TEXT];
    const bool sentence = strchr(id, ' ') != NULL;
    if (sentence)
        full = id;
    if (strlen(id) >= TEXT)
        return NIB_OK;
    put_title(full, title);
    if (!names->named)
        snprintf(names->name, sizeof names->name, "%s", title);
    names->named = true;
    if (sentence)
        return NIB_OK;
    if (slash && *id != '.') {
        snprintf(text, sizeof text, "%.*s", (int)(slash - id), id);
        put_title(text, title);
        take(names->organization, title);
    }
    struct part *parts = nib_alloc_zeroed(PARTS * sizeof *parts);
    if (!parts)
        return no_memory();
    size_t n = 0;
    for (const char *word = full; *word && n < PARTS; word += strcspn(word, "-")) {
        word += strspn(word, "-");
        if (*word)
            snprintf(parts[n++].text, TEXT, "%.*s", (int)strcspn(word, "-"), word);
    }
    const nib_status status = annotate(parts, n, parameters);
    if (!status) {
        find_basename(parts, n);
        const bool size = join_parts(parts, n, SIZE, 0, true, text);
        take(names->size, text);
        const bool finetune = join_parts(parts, n, FINETUNE, 0, false, text);
        take(names->finetune, text);
        const bool version = join_parts(parts, n, VERSION, BASENAME, false, text);
        take(names->version, text);
        if ((size || finetune || version) && join_parts(parts, n, BASENAME, 0, false, text))
            take(names->basename, text);
    }
    nib_free(parts);
    return status;
}

/* ---- The size of a model ---- */

static void put_rounded(double count, char *out)
{
    const struct {
        double above, factor;
        char unit;
    } units[] = { { 1e12, 1e-12, 'T' }, { 1e9, 1e-9, 'B' }, { 1e6, 1e-6, 'M' }, { -1, 1e-3, 'K' } };
    size_t i = 0;
    while (count <= units[i].above)
        i++;
    char digits[64];
    const double scaled = count * units[i].factor;
    snprintf(digits, sizeof digits, "%.0f", nearbyint(scaled));
    const size_t leading = strspn(digits, "0"), length = strlen(digits) - leading;
    snprintf(out, TEXT, "%.*f%c", length < 2 ? (int)(2 - length) : 0, scaled, units[i].unit);
}

/* All parameters, and the label that stands for them: "7.2B", "128x1.5B". */
static double count_parameters(const nib_plan *plan, char *label)
{
    double total = 0, shared = 0, experts = 0, counted = 0;
    size_t stacks = 0;
    for (size_t i = 0; i < plan->n_tensors; i++) {
        const struct nib_out_tensor *t = &plan->tensors[i];
        double size = 1;
        if (nib_ck_ends_with(t->name, "scale"))
            continue; /* part of a weight */
        for (int64_t d = 0; d < t->rank; d++)
            size *= (double)t->shape[d];
        total += size;
        if (t->rank == 3 && strstr(t->name, "_exps.")) {
            experts += floor(size / (double)t->shape[0]);
            counted += (double)t->shape[0];
            stacks++;
        } else {
            shared += size;
        }
    }
    char rounded[TEXT];
    put_rounded(stacks ? shared + experts : total, rounded);
    if (stacks)
        snprintf(label, TEXT, "%.0fx%.100s", floor(counted / (double)stacks), rounded);
    else
        snprintf(label, TEXT, "%s", rounded);
    return total;
}

/* ---- The model card ---- */

/* The first of these keys of the card that has a string; "" without one. */
static const char *card_string(const json_t *card, const char *const *keys)
{
    for (int i = 0; i < 3 && keys[i]; i++) {
        const json_t *value = json_object_get(card, keys[i]);
        if (value && !json_is_null(value))
            return json_is_string(value) ? json_string_value(value) : "";
    }
    return "";
}

/* What authors say themselves of what names would tell. */
static void take_card(struct names *names, const json_t *card)
{
    const struct {
        char *known;
        const char *keys[3];
    } rows[] = { { names->name, { "name", "model_name" } },
                 { names->organization, { "organization", "model_organization" } },
                 { names->basename, { "basename", "model_basename", "model_type" } },
                 { names->finetune, { "finetune", "model_finetune" } },
                 { names->version, { "version", "model_version" } },
                 { names->size, { "size_label", "model_size_label" } } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        take(rows[i].known, card_string(card, rows[i].keys));
    names->named = *names->name;
}

static nib_status put_known(struct nib_gguf_plan *out, const char *key, const char *value)
{
    return *value ? nib_gguf_put_string(out, key, value) : NIB_OK;
}

/* A license may be a list. */
static nib_status put_license(struct nib_gguf_plan *out, const json_t *card)
{
    const json_t *license = json_object_get(card, "license");
    char text[TEXT] = "";
    size_t used = 0;
    for (size_t i = 0; i < json_array_size(license) && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? "," : "",
                                 json_string_value(json_array_get(license, i)));
    TRY(put_known(out, "general.license", json_is_string(license) ? json_string_value(license) : text));
    TRY(put_known(out, "general.license.name", card_string(card, (const char *[3]){ "license_name" })));
    return put_known(out, "general.license.link", card_string(card, (const char *[3]){ "license_link" }));
}

/* "org/Name", or the address of one: general.base_model.0.name and the like. */
static nib_status put_source(struct nib_gguf_plan *out, const char *what, size_t index, const char *id,
                             double parameters)
{
    static const char hub[] = "huggingface.co/";
    const char *scheme = strstr(id, "://"), *place = scheme ? scheme + 3 : NULL, *slash = strchr(id, '/');
    const bool address = !strncmp(id, "http://", 7) || !strncmp(id, "https://", 8) || !strncmp(id, "ssh://", 6);
    char key[96], url[TEXT + 64] = "";
    struct names *names = nib_alloc_zeroed(sizeof *names);
    if (!names)
        return no_memory();
    nib_status status = NIB_OK;
    if (address) {
        snprintf(url, sizeof url, "%s", id);
        const char *path = !strncmp(place, hub, sizeof hub - 1) && *id == 'h' ? place + sizeof hub - 1 : "";
        const char *middle = strchr(path, '/');
        if (middle && middle > path && middle[1] && !strchr(middle + 1, '/'))
            status = take_id(names, path, parameters);
    } else {
        status = take_id(names, id, parameters);
        if (slash && *id != '.' && !strchr(id, ' '))
            snprintf(url, sizeof url, "https://%s%s", hub, id);
    }
    const struct {
        const char *name, *value;
    } rows[] = { { "name", names->name },
                 { "version", names->version },
                 { "organization", names->organization },
                 { "repo_url", url } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows && !status; i++) {
        snprintf(key, sizeof key, "general.%s.%zu.%s", what, index, rows[i].name);
        status = put_known(out, key, rows[i].value);
    }
    nib_free(names);
    return status;
}

/* Base models, or datasets: the first of three keys that is there. */
static nib_status put_sources(struct nib_gguf_plan *out, const json_t *card, const char *what,
                              const char *const keys[3], double parameters)
{
    enum { MOST = 4096 };
    const json_t *value = NULL;
    char key[64];
    for (int i = 0; i < 3 && !value; i++)
        value = json_object_get(card, keys[i]);
    const size_t n = json_is_string(value) ? 1 : json_array_size(value);
    if (!value || n > MOST)
        return NIB_OK;
    snprintf(key, sizeof key, "general.%s.count", what);
    TRY(nib_gguf_put_integer(out, key, NIB_GGUF_KIND_U32, (int64_t)n));
    for (size_t i = 0; i < n; i++)
        TRY(put_source(out, what, i, json_string_value(json_is_string(value) ? value : json_array_get(value, i)),
                       parameters));
    return NIB_OK;
}

/* The strings of two keys, one after the other. */
static nib_status put_words(struct nib_gguf_plan *out, const json_t *card, const char *key, const char *const keys[2])
{
    const char **words = NULL;
    size_t n = 0, capacity = 0;
    for (int k = 0; k < 2; k++) {
        const json_t *value = json_object_get(card, keys[k]);
        const size_t count = json_is_string(value) ? 1 : json_array_size(value);
        for (size_t i = 0; i < count; i++) {
            const char **grown = nib_grow(words, &capacity, n + 1, sizeof *words);
            if (!grown) {
                nib_free(words);
                return no_memory();
            }
            words = grown;
            words[n++] = json_string_value(json_is_string(value) ? value : json_array_get(value, i));
        }
    }
    const nib_status status = n ? nib_gguf_put_strings(out, key, words, n) : NIB_OK;
    nib_free(words);
    return status;
}

static nib_status put_card(struct nib_gguf_plan *out, const json_t *card, double parameters)
{
    static const struct {
        const char *key, *keys[3];
    } sources[] = { { "general.source.url", { "url", "model_url" } },
                    { "general.source.doi", { "doi", "model_doi" } },
                    { "general.source.uuid", { "uuid", "model_uuid" } },
                    { "general.source.repo_url", { "repo_url", "model_repo_url" } } };
    static const char *const bases[3] = { "base_model", "base_models", "base_model_sources" };
    static const char *const datasets[3] = { "datasets", "dataset", "dataset_sources" };
    TRY(put_license(out, card));
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++)
        TRY(put_known(out, sources[i].key, card_string(card, sources[i].keys)));
    TRY(put_sources(out, card, "base_model", bases, parameters));
    TRY(put_sources(out, card, "dataset", datasets, parameters));
    TRY(put_words(out, card, "general.tags", (const char *[2]){ "tags", "pipeline_tag" }));
    return put_words(out, card, "general.languages", (const char *[2]){ "languages", "language" });
}

/* ---- All of them ---- */

static nib_status find_names(const nib_plan *plan, const json_t *card, double parameters, struct names *names)
{
    const char *id = json_string_value(json_object_get(plan->in->config, "_name_or_path"));
    const char *slash = strrchr(plan->in->path, '/'), *first = id ? strchr(id, '/') : NULL;
    take_card(names, card);
    if (id && *id && (!first || !strchr(first + 1, '/'))) /* a name, and no path of somebody's machine */
        TRY(take_id(names, id, parameters));
    return take_id(names, slash ? slash + 1 : plan->in->path, parameters);
}

nib_status nib_plan_put_names(const nib_plan *plan, struct nib_gguf_plan *out)
{
    struct names *names = nib_alloc_zeroed(sizeof *names);
    char label[TEXT];
    json_t *card = NULL;
    const double parameters = count_parameters(plan, label);
    nib_status status = names ? nib_plan_read_card(plan, &card) : no_memory();
    if (!status)
        status = find_names(plan, card, parameters, names);
    if (!status) {
        take(names->size, label);
        const struct {
            const char *key, *value;
        } keys[] = {
            { "general.author", card_string(card, (const char *[3]){ "author", "model_author", "model_creator" }) },
            { "general.version", names->version },
            { "general.organization", names->organization },
            { "general.finetune", names->finetune },
            { "general.basename", names->basename },
            { "general.description", card_string(card, (const char *[3]){ "description", "model_description" }) },
            { "general.size_label", names->size }
        };
        status = nib_gguf_put_string(out, "general.name", names->name);
        for (size_t i = 0; i < sizeof keys / sizeof *keys && !status; i++)
            status = put_known(out, keys[i].key, keys[i].value);
    }
    if (!status)
        status = put_card(out, card, parameters);
    json_decref(card);
    nib_free(names);
    return status;
}
