/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - a strict, streaming reader of JSON (RFC 8259), and the strings it fills.
 */
#include "file/json.h"

#include <stdio.h>

#include "base/os.h"

enum { CHUNK = 1 << 16, QUOTED_BYTES = 80 };

/* ---- Strings ---- */

bool nib_text_put(struct nib_text *text, const void *bytes, size_t count)
{
    if (count > SIZE_MAX - text->used)
        return false;
    char *grown = nib_grow(text->bytes, &text->capacity, text->used + count, 1);
    if (!grown)
        return false;
    text->bytes = grown;
    memcpy(grown + text->used, bytes, count);
    text->used += count;
    return true;
}

/* Only what JSON demands is escaped, in the shortest form, as the reference writer has it. */
static size_t escape(unsigned char byte, char out[8])
{
    static const char letters[32] = { ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r' };
    if (byte == '"' || byte == '\\')
        return (size_t)snprintf(out, 8, "\\%c", byte);
    if (byte >= 0x20) {
        out[0] = (char)byte;
        return 1;
    }
    return (size_t)(letters[byte] ? snprintf(out, 8, "\\%c", letters[byte]) : snprintf(out, 8, "\\u%04x", byte));
}

bool nib_text_put_json(struct nib_text *text, const char *string)
{
    const size_t before = text->used;
    bool fits = nib_text_put(text, "\"", 1);
    while (fits && *string) {
        char escaped[8];
        size_t plain = 0; /* names hold hardly anything else */
        while ((unsigned char)string[plain] >= 0x20 && string[plain] != '"' && string[plain] != '\\')
            plain++;
        fits = plain ? nib_text_put(text, string, plain)
                     : nib_text_put(text, escaped, escape((unsigned char)*string, escaped));
        string += plain ? plain : 1;
    }
    fits = fits && nib_text_put(text, "\"", 1);
    if (!fits)
        text->used = before;
    return fits;
}

/* By the first byte alone; 0 for one that begins no character. C0, C1 and F5..FF never occur in UTF-8. */
static size_t utf8_expected(unsigned char first)
{
    if (first < 0x80)
        return 1;
    if (first < 0xC2 || first > 0xF4)
        return 0;
    return first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

size_t nib_utf8_length(const unsigned char *bytes, size_t available)
{
    const size_t length = available ? utf8_expected(bytes[0]) : 0;
    if (length > available)
        return 0;
    uint32_t code = length > 1 ? bytes[0] & (0x7Fu >> length) : 0;
    for (size_t i = 1; i < length; i++) {
        if ((bytes[i] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (bytes[i] & 0x3F);
    }
    /* Overlong forms, surrogates, and beyond the last code point. */
    if ((length == 3 && (code < 0x800 || (code >= 0xD800 && code <= 0xDFFF))) ||
        (length == 4 && (code < 0x10000 || code > 0x10FFFF)))
        return 0;
    return length;
}

bool nib_utf8_valid(const char *string)
{
    const unsigned char *at = (const unsigned char *)string;
    /* The NUL at the end is no continuation byte, so that no sequence is looked at beyond it. */
    for (size_t length; *at; at += length)
        if (!(length = nib_utf8_length(at, 4)))
            return false;
    return true;
}

struct nib_quoted nib_quote(const char *name)
{
    struct nib_quoted quoted;
    const unsigned char *at = (const unsigned char *)name;
    size_t used = 0;
    quoted.text[used++] = '"';
    while (*at) {
        const size_t length = nib_utf8_length(at, 4);
        const bool control = *at < 0x20 || *at == 0x7F || (*at == 0xC2 && length == 2 && at[1] < 0xA0);
        const size_t passed = length ? length : 1, shown = length && !control ? length : 1;
        if (used + shown > 1 + QUOTED_BYTES) {
            memcpy(quoted.text + used, "...", 3);
            used += 3;
            break;
        }
        if (length && !control)
            memcpy(quoted.text + used, at, length);
        else
            quoted.text[used] = '?';
        used += shown;
        at += passed;
    }
    quoted.text[used++] = '"';
    quoted.text[used] = '\0';
    return quoted;
}

/* ---- Orders and names ---- */

/* Two sorted runs that lie side by side become one. */
static void merge(uint32_t *ids, uint32_t *spare, size_t left, size_t right, nib_order_after *after,
                  const void *context)
{
    if (!after(context, ids[left - 1], ids[left])) /* the usual case: the text was in order */
        return;
    memcpy(spare, ids, left * sizeof *ids);
    size_t a = 0, b = 0;
    while (a < left && b < right)
        if (after(context, spare[a], ids[left + b])) {
            ids[a + b] = ids[left + b];
            b++;
        } else {
            ids[a + b] = spare[a];
            a++;
        }
    memcpy(ids + a + b, spare + a, (left - a) * sizeof *ids);
}

bool nib_order_reserve(struct nib_order *order)
{
    if (order->n == UINT32_MAX)
        return false;
    size_t ids_capacity = order->capacity, spare_capacity = order->capacity;
    uint32_t *ids = nib_grow(order->ids, &ids_capacity, order->n + 1, sizeof *ids);
    if (!ids)
        return false;
    order->ids = ids;
    uint32_t *spare = nib_grow(order->spare, &spare_capacity, order->n + 1, sizeof *spare);
    if (!spare)
        return false;
    order->spare = spare;
    order->capacity = ids_capacity;
    return true;
}

void nib_order_append(struct nib_order *order, nib_order_after *after, const void *context)
{
    const size_t n = order->n++;
    order->ids[n] = (uint32_t)n;
    order->whole = false; /* parts of a sorted run are sorted runs */
    for (size_t run = 1; n & run; run <<= 1)
        merge(order->ids + (n + 1 - 2 * run), order->spare, run, run, after, context);
}

void nib_order_finish(struct nib_order *order, nib_order_after *after, const void *context)
{
    size_t tail = 0;
    for (size_t run = 1; run && run <= order->n; run <<= 1) {
        if (!(order->n & run))
            continue;
        if (tail)
            merge(order->ids + (order->n - tail - run), order->spare, run, tail, after, context);
        tail += run;
    }
    order->whole = true;
}

void nib_order_free(struct nib_order *order)
{
    nib_free(order->ids);
    nib_free(order->spare);
}

static bool name_after(const void *context, uint32_t a, uint32_t b)
{
    const struct nib_names *names = context;
    return strcmp(nib_names_get(names, a), nib_names_get(names, b)) > 0;
}

bool nib_names_add(struct nib_names *names, size_t start)
{
    uint32_t *starts = nib_grow(names->starts, &names->starts_capacity, names->order.n + 1, sizeof *starts);
    if (!starts)
        return false;
    names->starts = starts;
    if (start > UINT32_MAX || !nib_order_reserve(&names->order))
        return false;
    starts[names->order.n] = (uint32_t)start;
    nib_order_append(&names->order, name_after, names);
    return true;
}

void nib_names_finish(struct nib_names *names) { nib_order_finish(&names->order, name_after, names); }

const char *nib_names_get(const struct nib_names *names, uint32_t id) { return names->text.bytes + names->starts[id]; }

static bool find_in_run(const struct nib_names *names, size_t begin, size_t count, const char *name, size_t *place)
{
    for (size_t low = begin, high = begin + count; low < high;) {
        const size_t middle = low + (high - low) / 2;
        const int sign = strcmp(name, nib_names_get(names, names->order.ids[middle]));
        if (sign == 0) {
            *place = middle;
            return true;
        }
        if (sign < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return false;
}

bool nib_names_find(const struct nib_names *names, const char *name, uint32_t *id, size_t *place)
{
    const size_t n = names->order.n;
    bool found = names->order.whole && find_in_run(names, 0, n, name, place);
    size_t end = n; /* the shortest run is the last */
    for (size_t run = 1; !names->order.whole && !found && run && run <= n; run <<= 1)
        if (n & run) {
            end -= run;
            found = find_in_run(names, end, run, name, place);
        }
    if (found)
        *id = names->order.ids[*place];
    return found;
}

const char *nib_names_repeated(const struct nib_names *names)
{
    const uint32_t *ids = names->order.ids;
    for (size_t i = 1; i < names->order.n; i++)
        if (!strcmp(nib_names_get(names, ids[i - 1]), nib_names_get(names, ids[i])))
            return nib_names_get(names, ids[i]);
    return NULL;
}

void nib_names_free(struct nib_names *names)
{
    nib_free(names->text.bytes);
    nib_free(names->starts);
    nib_order_free(&names->order);
}

/* ---- Bytes ---- */

nib_status nib_json_open(struct nib_json *json, int fd, const char *path, uint64_t begin, uint64_t bytes)
{
    unsigned char *chunk = nib_alloc(CHUNK);
    if (!chunk)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory to read its header", path);
    *json = (struct nib_json){ .fd = fd, .path = path, .next = begin, .end = begin + bytes, .chunk = chunk };
    return NIB_OK;
}

void nib_json_close(struct nib_json *json) { nib_free(json->chunk); }

static nib_status fill(struct nib_json *json)
{
    const uint64_t left = json->end - json->next;
    const size_t wanted = left < CHUNK ? (size_t)left : CHUNK;
    TRY(nib_os_read_at(json->fd, json->path, json->next, json->chunk, wanted));
    json->next += wanted;
    json->at = 0;
    json->filled = wanted;
    return NIB_OK;
}

/* The next byte, whatever it is; -1 at the end. */
static inline nib_status look(struct nib_json *json, int *byte)
{
    if (json->at == json->filled && json->next < json->end)
        TRY(fill(json));
    *byte = json->at < json->filled ? json->chunk[json->at] : -1;
    return NIB_OK;
}

static unsigned long long position(const struct nib_json *json) { return json->next - json->filled + json->at; }

/* "expected X, found Y", with the byte that is next. */
static nib_status unexpected(const struct nib_json *json, const char *expected)
{
    char found[24] = "the end of the header";
    if (json->at < json->filled) {
        const unsigned char byte = json->chunk[json->at];
        snprintf(found, sizeof found, byte > 0x20 && byte < 0x7F ? "'%c'" : "byte 0x%02X", byte);
    }
    return nib_fail(NIB_ERR_DATA, "at byte %llu: expected %s, found %s", position(json), expected, found);
}

static nib_status wrong(const struct nib_json *json, const char *fact)
{
    return nib_fail(NIB_ERR_DATA, "at byte %llu: %s", position(json), fact);
}

nib_status nib_json_peek(struct nib_json *json, int *byte)
{
    for (;; json->at++) {
        TRY(look(json, byte));
        if (*byte != ' ' && *byte != '\t' && *byte != '\n' && *byte != '\r')
            return NIB_OK;
    }
}

nib_status nib_json_take(struct nib_json *json, char wanted)
{
    int byte;
    TRY(nib_json_peek(json, &byte));
    if (byte != wanted)
        return unexpected(json, (char[]){ '\'', wanted, '\'', '\0' });
    json->at++;
    return NIB_OK;
}

nib_status nib_json_more(struct nib_json *json, char close, bool first, bool *more)
{
    int byte;
    TRY(nib_json_peek(json, &byte));
    *more = byte != close;
    if (first && *more)
        return NIB_OK;
    if (*more && byte != ',')
        return unexpected(json, close == '}' ? "',' or '}'" : "',' or ']'");
    json->at++;
    return NIB_OK;
}

nib_status nib_json_end(struct nib_json *json)
{
    int byte;
    TRY(nib_json_peek(json, &byte));
    return byte < 0 ? NIB_OK : unexpected(json, "nothing more after the header's object");
}

/* ---- Strings of the text ---- */

static nib_status put(const struct nib_json *json, struct nib_text *text, const void *bytes, size_t count)
{
    if (text && !nib_text_put(text, bytes, count))
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for the strings of its header", json->path);
    return NIB_OK;
}

/* Four hexadecimal digits. */
static nib_status hex4(struct nib_json *json, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++, json->at++) {
        int byte;
        TRY(look(json, &byte));
        const int letter = byte | 0x20; /* lower case; the end of the text stays -1 */
        if (byte >= '0' && byte <= '9')
            *out = *out << 4 | (uint32_t)(byte - '0');
        else if (letter >= 'a' && letter <= 'f')
            *out = *out << 4 | (uint32_t)(letter - 'a' + 10);
        else
            return unexpected(json, "four hexadecimal digits after \\u");
    }
    return NIB_OK;
}

/* After \u. A code point above U+FFFF comes as two surrogates. */
static nib_status unicode_escape(struct nib_json *json, struct nib_text *text)
{
    uint32_t code, low;
    TRY(hex4(json, &code));
    if (code >= 0xD800 && code <= 0xDBFF) {
        for (const char *c = "\\u"; *c; c++, json->at++) {
            int byte;
            TRY(look(json, &byte));
            if (byte != *c)
                return unexpected(json, "the second half of a surrogate pair");
        }
        TRY(hex4(json, &low));
        if (low < 0xDC00 || low > 0xDFFF)
            return wrong(json, "a surrogate pair has no second half");
        code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00));
    } else if (code >= 0xDC00 && code <= 0xDFFF) {
        return wrong(json, "a surrogate pair has no first half");
    }
    if (code == 0 && text)
        return wrong(json, "the string holds a NUL");
    if (code < 0x80)
        return put(json, text, &(unsigned char){ (unsigned char)code }, 1);
    unsigned char bytes[4];
    const size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6)
        bytes[i] = (unsigned char)(0x80 | (code & 0x3F));
    bytes[0] = (unsigned char)((0xF00u >> length & 0xFF) | code); /* as many leading ones as bytes */
    return put(json, text, bytes, length);
}

/* After a backslash. */
static nib_status string_escape(struct nib_json *json, struct nib_text *text)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    int byte;
    TRY(look(json, &byte));
    const char *name = byte > 0 ? strchr(names, byte) : NULL;
    if (byte != 'u' && !name)
        return unexpected(json, "one of \" \\ / b f n r t u after a backslash");
    json->at++;
    return name ? put(json, text, &values[name - names], 1) : unicode_escape(json, text);
}

/* A character beyond ASCII; it may straddle two chunks. */
static nib_status wide_character(struct nib_json *json, struct nib_text *text)
{
    unsigned char bytes[4];
    size_t count = 0, expected = 1;
    while (count < expected) {
        int byte;
        TRY(look(json, &byte));
        if (byte < 0)
            break;
        bytes[count++] = (unsigned char)byte;
        expected = utf8_expected(bytes[0]);
        if (count >= expected && nib_utf8_length(bytes, count) != count)
            return wrong(json, "the string is not UTF-8");
        json->at++;
    }
    if (count < expected)
        return unexpected(json, "the rest of a UTF-8 character");
    return put(json, text, bytes, count);
}

/* How many of the next bytes are ASCII that stands for itself. */
static size_t plain_bytes(const struct nib_json *json)
{
    size_t end = json->at;
    while (end < json->filled && json->chunk[end] >= 0x20 && json->chunk[end] < 0x80 && json->chunk[end] != '"' &&
           json->chunk[end] != '\\')
        end++;
    return end - json->at;
}

nib_status nib_json_string(struct nib_json *json, struct nib_text *text)
{
    int byte;
    TRY(nib_json_peek(json, &byte));
    if (byte != '"')
        return unexpected(json, "a string");
    json->at++;
    for (;;) {
        TRY(look(json, &byte));
        if (byte < 0)
            return unexpected(json, "the end of a string");
        if (byte < 0x20)
            return wrong(json, "a control character in a string is not escaped");
        if (byte >= 0x80) {
            TRY(wide_character(json, text));
            continue;
        }
        const size_t plain = plain_bytes(json);
        if (plain) {
            TRY(put(json, text, json->chunk + json->at, plain));
            json->at += plain;
            continue;
        }
        json->at++; /* a quote or a backslash */
        if (byte == '"')
            return put(json, text, "", 1);
        TRY(string_escape(json, text));
    }
}

/* ---- Numbers, literals, values ---- */

static bool is_digit(int byte) { return byte >= '0' && byte <= '9'; }

nib_status nib_json_unsigned(struct nib_json *json, uint64_t *out)
{
    int byte;
    TRY(nib_json_peek(json, &byte));
    if (!is_digit(byte))
        return unexpected(json, "a whole number, 0 or more");
    const bool zero = byte == '0';
    uint64_t value = 0;
    while (is_digit(byte)) {
        if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(byte - '0'), &value))
            return wrong(json, "the number is larger than 64 bits hold");
        json->at++;
        TRY(look(json, &byte));
        if (zero && is_digit(byte))
            return wrong(json, "the number begins with a needless 0");
    }
    if (byte == '.' || byte == 'e' || byte == 'E')
        return wrong(json, "the number must be whole, without a fraction or an exponent");
    *out = value;
    return NIB_OK;
}

static nib_status digits(struct nib_json *json)
{
    int byte;
    TRY(look(json, &byte));
    if (!is_digit(byte))
        return unexpected(json, "a digit");
    while (is_digit(byte)) {
        json->at++;
        TRY(look(json, &byte));
    }
    return NIB_OK;
}

/* Any JSON number; the next byte is '-' or a digit. */
static nib_status skip_number(struct nib_json *json, int byte)
{
    if (byte == '-') {
        json->at++;
        TRY(look(json, &byte));
    }
    if (byte == '0')
        json->at++;
    else
        TRY(digits(json));
    TRY(look(json, &byte));
    if (byte == '.') {
        json->at++;
        TRY(digits(json));
        TRY(look(json, &byte));
    }
    if (byte != 'e' && byte != 'E')
        return NIB_OK;
    json->at++;
    TRY(look(json, &byte));
    if (byte == '+' || byte == '-')
        json->at++;
    return digits(json);
}

static nib_status literal(struct nib_json *json, const char *word)
{
    for (const char *c = word; *c; c++, json->at++) {
        int byte;
        TRY(look(json, &byte));
        if (byte != *c)
            return unexpected(json, word);
    }
    return NIB_OK;
}

nib_status nib_json_null(struct nib_json *json)
{
    int byte;
    TRY(nib_json_peek(json, &byte));
    return literal(json, "null");
}

static nib_status skip_scalar(struct nib_json *json, int byte)
{
    switch (byte) {
    case '"':
        return nib_json_string(json, NULL);
    case 't':
        return literal(json, "true");
    case 'f':
        return literal(json, "false");
    case 'n':
        return literal(json, "null");
    default:
        return byte == '-' || is_digit(byte) ? skip_number(json, byte) : unexpected(json, "a value");
    }
}

nib_status nib_json_skip(struct nib_json *json)
{
    char close[NIB_JSON_MAX_DEPTH]; /* the bracket that ends each open one: a stack of our own instead of recursion */
    int depth = 0;
    do {
        int byte;
        TRY(nib_json_peek(json, &byte));
        bool first = byte == '{' || byte == '[';
        if (first) {
            if (depth == NIB_JSON_MAX_DEPTH)
                return wrong(json, "values are nested too deep");
            close[depth++] = byte == '{' ? '}' : ']';
            json->at++;
        } else {
            TRY(skip_scalar(json, byte));
        }
        /* Leave every tensor scale that ends here; in one that goes on, stop before its next value. */
        for (bool more = false; depth > 0 && !more; first = false) {
            TRY(nib_json_more(json, close[depth - 1], first, &more));
            if (!more) {
                depth--;
            } else if (close[depth - 1] == '}') {
                TRY(nib_json_string(json, NULL));
                TRY(nib_json_take(json, ':'));
            }
        }
    } while (depth > 0);
    return NIB_OK;
}

bool nib_json_valid(const char *text, size_t bytes)
{
    /* All of it has been read: the chunk is not written. */
    struct nib_json json = { .fd = -1, .path = "", .chunk = (unsigned char *)(uintptr_t)text, .filled = bytes };
    return !nib_json_skip(&json) && !nib_json_end(&json);
}
