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

nib_status nib_plan_put_names(const nib_plan *plan, struct nib_gguf_plan *out)
{
    struct names *names = nib_alloc_zeroed(sizeof *names);
    char label[TEXT];
    if (!names)
        return no_memory();
    const double parameters = count_parameters(plan, label);
    const char *id = json_string_value(json_object_get(plan->in->config, "_name_or_path"));
    const char *slash = strrchr(plan->in->path, '/'), *first = id ? strchr(id, '/') : NULL;
    nib_status status = NIB_OK;
    if (id && *id && (!first || !strchr(first + 1, '/'))) /* a name, and no path of somebody's machine */
        status = take_id(names, id, parameters);
    if (!status)
        status = take_id(names, slash ? slash + 1 : plan->in->path, parameters);
    take(names->size, label);
    const struct {
        const char *key, *value;
    } keys[] = { { "general.version", names->version },
                 { "general.organization", names->organization },
                 { "general.finetune", names->finetune },
                 { "general.basename", names->basename },
                 { "general.size_label", names->size } };
    if (!status)
        status = nib_gguf_put_string(out, "general.name", names->name);
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !status; i++)
        if (*keys[i].value)
            status = nib_gguf_put_string(out, keys[i].key, keys[i].value);
    nib_free(names);
    return status;
}
