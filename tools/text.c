/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "nib.h"

const char *text_bytes(uint64_t bytes, char *buffer, size_t size)
{
    static const char *const units[] = { "B", "KB", "MB", "GB", "TB" };
    double value = (double)bytes;
    int unit = 0;
    while (value >= 999.5 && unit < 4) {
        value /= 1000;
        unit++;
    }
    snprintf(buffer, size, unit && value < 99.95 ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return buffer;
}

const char *text_db(double db, char *buffer, size_t size)
{
    if (isinf(db) && db > 0)
        snprintf(buffer, size, "same");
    else
        snprintf(buffer, size, "%.2f", db);
    return buffer;
}

/* Control characters are one byte, or two: C2 and 80 to 9F. One of these alone is one where characters are bytes. */
void text_disarm(char *text)
{
    int left = 0; /* bytes of a character that are still to come */
    for (unsigned char *p = (unsigned char *)text; *p; p++) {
        const bool inner = left > 0 && *p >= 0x80 && *p < 0xC0;
        left = inner ? left - 1 : *p > 0xF4 ? 0 : *p >= 0xF0 ? 3 : *p >= 0xE0 ? 2 : *p >= 0xC2 ? 1 : 0;
        const bool two = !inner && *p == 0xC2 && p[1] >= 0x80 && p[1] < 0xA0;
        if (*p < 0x20 || *p == 0x7F || (*p >= 0x80 && *p < 0xA0 && !inner) || two)
            *p = '?';
        left = two ? 0 : left; /* the second is alone now */
    }
}

size_t text_character(const char *text)
{
    const unsigned char *const p = (const unsigned char *)text, first = *p;
    if (first < 0x80)
        return first >= 0x20 && first != 0x7F;
    const size_t n = first < 0xC2 || first > 0xF4 ? 0 : first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    /* The second byte tells control characters, forms that are too long, halves of a pair, and what is beyond Unicode. */
    const unsigned char least = first == 0xC2 || first == 0xE0 ? 0xA0
                                : first == 0xF0                ? 0x90
                                                               : 0x80,
                        most = first == 0xED   ? 0x9F
                               : first == 0xF4 ? 0x8F
                                               : 0xBF;
    if (n == 0 || p[1] < least || p[1] > most)
        return 0;
    for (size_t i = 2; i < n; i++)
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    return n;
}

double text_bits(uint64_t bytes, uint64_t values) { return values ? 8 * (double)bytes / (double)values : 0; }

static atomic_bool lost_memory;

static void *allocate(size_t bytes)
{
    void *const memory = malloc(bytes);
    if (!memory)
        lost_memory = true;
    return memory;
}

void text_watch_memory(void) { json_set_alloc_funcs(allocate, free); }

bool text_lost_memory(void) { return lost_memory; }

json_t *text_report(const char *command, json_t *fields)
{
    enum { SCHEMA = 1 }; /* docs/json.md says when it changes */
    json_t *report = json_pack("{s:s, s:i, s:s}", "nib", nib_version(), "schema", (int)SCHEMA, "command", command);
    if (!fields || !report || json_object_update(report, fields)) {
        json_decref(report);
        report = NULL;
    }
    json_decref(fields);
    return report;
}

/* JSON with escapes for the control characters that jansson leaves as they are: DEL, and those of two bytes, which it
 * passes on together. */
static int put_json(const char *text, size_t bytes, void *file)
{
    size_t done = 0;
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)text[i], next = i + 1 < bytes ? (unsigned char)text[i + 1] : 0;
        const bool two = c == 0xC2 && next >= 0x80 && next < 0xA0;
        if (c != 0x7F && !two)
            continue;
        if (fwrite(text + done, 1, i - done, file) != i - done || fprintf(file, "\\u%04X", two ? next : c) < 0)
            return -1;
        i += two;
        done = i + 1;
    }
    return fwrite(text + done, 1, bytes - done, file) == bytes - done ? 0 : -1;
}

bool text_print(json_t *report)
{
    char *text = report && !lost_memory ? json_dumps(report, JSON_INDENT(2)) : NULL;
    const bool good = text && !lost_memory;
    if (good && put_json(text, strlen(text), stdout) == 0)
        putchar('\n');
    free(text);
    json_decref(report);
    return good;
}

bool text_dump(FILE *file, const json_t *value, size_t flags)
{
    return !lost_memory && json_dump_callback(value, put_json, file, flags) == 0 && fputc('\n', file) != EOF;
}

json_t *text_json(const char *text)
{
    json_t *json = json_string(text);
    if (json)
        return json;
    char *const copy = malloc(strlen(text) + 1);
    if (!copy)
        return NULL;
    strcpy(copy, text);
    for (char *p = copy; *p; p++)
        if ((unsigned char)*p > 0x7E)
            *p = '?';
    json = json_string(copy);
    free(copy);
    return json;
}

json_t *text_number(double number) { return isfinite(number) ? json_real(number) : json_null(); }
