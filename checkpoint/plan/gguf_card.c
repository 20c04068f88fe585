/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_card.c - the front matter of a model card, README.md: what stands between its first line, "---", and the next such
 * line. Of YAML it takes what cards are made of: at the left margin keys, behind each a string, or strings in a list. What
 * is anything else (a mapping, a number, a date, a block of text) counts as if it were not there.
 */
#include "plan/gguf_keys.h"

#include <stdio.h>
#include <string.h>

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the model card"); }

enum { MOST_BYTES = 1 << 20 };

/* Words without quotes that YAML does not take for strings: null, booleans, integers, floats, dates. */
static const char *const no_strings[] = {
    "re:(~|null|Null|NULL|<<|=|)$",
    "re:(yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
    "re:[-+]?(0b[01_]+|0[0-7_]*|[1-9][0-9_]*(:[0-5]?[0-9])*|0x[0-9a-fA-F_]+)$",
    ("re:[-+]?([0-9][0-9_]*(:[0-5]?[0-9])*\\.[0-9_]*([eE][-+][0-9]+)?|\\.[0-9][0-9_]*([eE][-+][0-9]+)?|"
     "\\.(inf|Inf|INF))$"),
    "re:(\\.(nan|NaN|NAN)|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?)$",
};

struct card {
    struct nib_patterns *no_strings;
    char *next; /* the line to read; NULL at the end */
};

/* ---- Lines ---- */

/* The next line, ended by a 0, without spaces at its end; NULL after the last. */
static char *next_line(struct card *c)
{
    char *line = c->next;
    if (!line)
        return NULL;
    char *end = strchr(line, '\n');
    c->next = end ? end + 1 : NULL;
    size_t n = end ? (size_t)(end - line) : strlen(line);
    while (n && (line[n - 1] == ' ' || line[n - 1] == '\r'))
        n--;
    line[n] = '\0';
    return line;
}

static char *skip_spaces(char *text) { return text + strspn(text, " "); }

static bool is_nothing(const char *text) { return !*text || *text == '#'; }

/* The front matter of a text, as a string of its own; NULL where there is none, or no end of it. Tabs are spaces here. */
static char *front_matter(char *text)
{
    static const char *const fence[] = { "---\n", "---\r\n" };
    for (size_t i = 0; i < 2; i++) {
        if (strncmp(text, fence[i], strlen(fence[i])) != 0)
            continue;
        char *begin = text + strlen(fence[i]);
        for (char *line = begin; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
            if (strncmp(line, "---", 3) != 0 || !strchr("\r\n", line[3]))
                continue;
            *line = '\0';
            for (char *c = begin; *c; c++)
                *c = *c == '\t' ? ' ' : *c;
            return begin;
        }
    }
    return NULL;
}

/* ---- Strings ---- */

/* A string in quotes at `text`, made plain in place. What is behind it, or NULL where it is none. */
static char *unquote(char *text, char **string)
{
    const char quote = *text;
    char *out = *string = text + 1, *in = text + 1;
    for (; *in && (*in != quote || (quote == '\'' && in[1] == '\'')); in++) {
        if (*in == '\'' && quote == '\'')
            in++;
        if (*in == '\\' && quote == '"') {
            in++;
            if (*in != '"' && *in != '\\' && *in != '/')
                return NULL; /* other escapes are not for cards */
        }
        *out++ = *in;
    }
    char *behind = *in ? in + 1 : NULL;
    *out = '\0';
    return behind;
}

/* One value as a string: NULL where it is none, or not one that is known here. The text is changed. */
static json_t *read_string(const struct card *c, char *text)
{
    char *string = text;
    if (*text == '"' || *text == '\'') {
        char *behind = unquote(text, &string);
        return behind && is_nothing(skip_spaces(behind)) ? json_string(string) : NULL;
    }
    char *comment = strstr(text, " #");
    if (comment)
        *comment = '\0';
    for (size_t n = strlen(text); n && text[n - 1] == ' '; n--)
        text[n - 1] = '\0';
    uint32_t which = 0;
    if (strchr("[]{},&*!|>%@`#?", *text) || strstr(text, ": ") || (*text && text[strlen(text) - 1] == ':') ||
        !strncmp(text, "- ", 2) || nib_patterns_match(c->no_strings, text, &which) || which != NIB_NONE)
        return NULL;
    return json_string(text);
}

/* ---- Lists ---- */

/* One item of a list in brackets, and what is behind it; NULL where it is no string. */
static json_t *read_item(const struct card *c, char *text, char **behind)
{
    char *string = text;
    const bool quoted = *text == '"' || *text == '\'';
    *behind = quoted ? unquote(text, &string) : text + strcspn(text, ",]");
    if (!*behind)
        return NULL;
    *behind = skip_spaces(*behind);
    const char mark = **behind;
    if (mark && mark != ',' && mark != ']')
        return NULL;
    **behind = '\0';
    json_t *item = quoted ? json_string(string) : read_string(c, string);
    **behind = mark;
    return item;
}

/* [a, "b"] on a line or over several; NULL where it holds more than strings. The lines up to its end are read. */
static json_t *read_flow(struct card *c, char *text)
{
    json_t *list = json_array();
    bool good = list != NULL;
    for (char *at = text + 1; good;) {
        at = skip_spaces(at);
        if (*at == ']' && is_nothing(skip_spaces(at + 1)))
            return list;
        if (is_nothing(at)) {
            at = next_line(c);
            good = at != NULL;
            continue;
        }
        char *behind = NULL;
        json_t *item = read_item(c, at, &behind);
        good = item && !json_array_append_new(list, item);
        at = good && *behind == ',' ? behind + 1 : behind;
    }
    json_decref(list);
    return NULL;
}

/* "- a" on every line that is not empty, up to the next key. */
static json_t *read_list(struct card *c, char *first)
{
    json_t *list = json_array();
    bool good = list != NULL;
    for (char *line = first;; line = next_line(c)) {
        char *text = skip_spaces(line);
        if (!is_nothing(text)) {
            char *item = skip_spaces(text + 1);
            const bool is_item = text[0] == '-' && text[1] == ' ';
            json_t *string = !is_item ? NULL : !strcmp(item, "no") ? json_string("no") : read_string(c, item);
            good = good && string && !json_array_append(list, string);
            json_decref(string);
        }
        if (!c->next || (*c->next != ' ' && *c->next != '-' && *c->next != '\n' && *c->next != '\r' && *c->next != '#'))
            break;
    }
    if (good)
        return list;
    json_decref(list);
    return NULL;
}

/* ---- The card ---- */

/* Whether the line to come belongs to the value before it. */
static bool goes_on(const struct card *c) { return c->next && (*c->next == ' ' || *c->next == '-'); }

/* What stands behind a key; NULL where it is not known here. All its lines are read. */
static json_t *read_value(struct card *c, char *text)
{
    json_t *value = NULL;
    if (is_nothing(text)) {
        while (c->next && (*c->next == '\n' || *c->next == '\r' || *c->next == '#'))
            (void)next_line(c);
        if (!goes_on(c))
            return json_null();
        char *line = next_line(c);
        if (*skip_spaces(line) == '-')
            return read_list(c, line);
    } else if (*text == '[') {
        value = read_flow(c, text);
    } else if (!goes_on(c)) { /* text over several lines is for people */
        value = read_string(c, text);
    }
    while (goes_on(c)) {
        (void)next_line(c);
        json_decref(value);
        value = NULL;
    }
    return value;
}

static nib_status read_keys(struct card *c, json_t *out)
{
    for (char *line; (line = next_line(c));) {
        const size_t n = strspn(line, "abcdefghijklmnopqrstuvwxyz_");
        if (n == 0 || line[n] != ':' || (line[n + 1] != ' ' && line[n + 1] != '\0'))
            continue;
        json_t *value = read_value(c, skip_spaces(line + n + 1));
        line[n] = '\0';
        if (!value)
            (void)json_object_del(out, line); /* the last of a name counts */
        else if (json_object_set_new(out, line, value))
            return no_memory();
    }
    return NIB_OK;
}

nib_status nib_plan_read_card(const nib_plan *plan, json_t **out)
{
    static const char file[] = "README.md";
    const size_t room = strlen(plan->in->directory) + sizeof file + 1;
    char *path = nib_alloc(room), *text = NULL;
    struct card card = { 0 };
    size_t bytes;
    *out = json_object();
    nib_status status = path && *out ? NIB_OK : no_memory();
    if (path)
        snprintf(path, room, "%s/%s", plan->in->directory, file);
    const nib_status read = status ? status : nib_ck_read_text(path, MOST_BYTES, &text, &bytes);
    status = read == NIB_ERR_MEMORY ? read : status; /* no file, or one that is too large, is none */
    if (!read && strlen(text) == bytes)
        card.next = front_matter(text);
    if (!status && card.next)
        status = nib_patterns_create(no_strings, sizeof no_strings / sizeof *no_strings, &card.no_strings);
    if (!status && card.next)
        status = read_keys(&card, *out);
    nib_patterns_destroy(card.no_strings);
    nib_free(text);
    nib_free(path);
    if (status) {
        json_decref(*out);
        *out = NULL;
    }
    return status;
}
