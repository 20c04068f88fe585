/* SPDX-License-Identifier: Apache-2.0 */
/*
 * list_cases.c - the cases of golden files as a table in C: list_cases FILE... > cases.h
 *
 * A machine of another kind has no jansson to read them with. This runs here and understands them as `nib conform`
 * does; run_cases.c runs there, with the table compiled in. What a case asks for is a struct of plain numbers, laid out
 * alike on both machines.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conform.h"

static int reject(const char *path, const char *what)
{
    fprintf(stderr, "list_cases: %s: %s\n", path, what);
    return 1;
}

static void print_text(const char *text)
{
    putchar('"');
    for (; *text; text++)
        printf(*text == '"' || *text == '\\' || (unsigned char)*text < ' ' ? "\\%03o" : "%c", (unsigned char)*text);
    putchar('"');
}

static int list_file(const char *path)
{
    nib_file *file;
    if (nib_file_open(path, &file))
        return reject(path, nib_last_error());
    const char *const text = nib_file_metadata(file, "cases");
    json_t *const cases = text ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
    if (!json_is_object(cases))
        return reject(path, "its cases cannot be read");
    const char *name;
    json_t *json;
    json_object_foreach(cases, name, json)
    {
        struct conform_case what;
        struct conform_result result = { .verdict = CONFORM_PASSED };
        memset(&what, 0, sizeof what);
        if (!conform_parse(json, &what, &result))
            return reject(path, result.message);
        printf("    { ");
        print_text(path);
        printf(", ");
        print_text(name);
        printf(", { ");
        for (size_t i = 0; i < sizeof what; i++)
            printf("%u, ", ((const unsigned char *)&what)[i]);
        printf("} },\n");
    }
    json_decref(cases);
    nib_file_close(file);
    return 0;
}

int main(int argc, char **argv)
{
    printf("_Static_assert(sizeof(struct conform_case) == %zu, \"the two machines lay structs out alike\");\n"
           "static const struct listed_case {\n"
           "    const char *file, *name;\n"
           "    unsigned char what[sizeof(struct conform_case)];\n"
           "} cases[] = {\n",
           sizeof(struct conform_case));
    int failed = argc < 2;
    for (int i = 1; i < argc; i++)
        failed |= list_file(argv[i]);
    printf("};\n");
    return failed;
}
