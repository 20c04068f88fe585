/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli.c - options, help and messages of the tool. The help is made from the table of options, so that it cannot say
 * anything else than what is parsed.
 */
#define _POSIX_C_SOURCE 200809L

#include "cli.h"

#include <getopt.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

enum {
    LONG_BASE = 256, /* getopt_long returns this plus the option's number, whether it was short or long */
    HELP_COLUMN = 26
};

bool cli_silent;
bool cli_list_words;

static const struct cli_option help_option = { 'h', "help", CLI_FLAG, NULL, NULL, "show this text", 0, 0 };

static void put_line(FILE *stream, const char *prefix, const char *format, va_list arguments)
{
    char text[4096];
    const int length = vsnprintf(text, sizeof text, format, arguments);
    if (length < 0)
        return;
    text_disarm(text);
    fprintf(stream, "%s%s%s\n", prefix, text, (size_t)length < sizeof text ? "" : "...");
}

void cli_error(const char *format, ...)
{
    if (cli_silent)
        return;
    va_list arguments;
    va_start(arguments, format);
    put_line(stderr, "nib: ", format, arguments);
    va_end(arguments);
}

void cli_print(const char *format, ...)
{
    if (cli_silent)
        return;
    va_list arguments;
    va_start(arguments, format);
    put_line(stdout, "", format, arguments);
    va_end(arguments);
}

bool cli_confine(const struct cli_command *self, const struct sandbox_path *paths, size_t n)
{
    const bool good = sandbox_enter(paths, n);
    if (!good)
        cli_error("%s: no sandbox as NIB_SANDBOX wants it: %s", self->name, sandbox_state());
    return good;
}

static void show_option(const struct cli_option *option)
{
    char left[80];
    const char letter[] = { '-', option->letter, ',', ' ', 0 };
    snprintf(left, sizeof left, "  %s--%s%s%s", option->letter ? letter : "    ", option->name,
             option->argument ? " " : "", option->argument ? option->argument : "");
    const char *const place = option->kind == CLI_WORD ? strstr(option->help, "{}") : NULL;
    char list[256] = "";
    const int before = place ? (int)(place - option->help) : (int)strlen(option->help);
    if (place) {
        const struct cli_word *word = option->value;
        words_list(&word->words, word->value, list, sizeof list);
    }
    printf("%-*s%.*s%s%s\n", HELP_COLUMN, left, before, option->help, list, place ? place + 2 : "");
}

static void show_words(const struct cli_command *self, const struct cli_option *options)
{
    for (const struct cli_option *option = options; option->name; option++) {
        const struct cli_word *const word = option->kind == CLI_WORD ? option->value : NULL;
        if (!word)
            continue;
        printf("%s --%s", self->name, option->name);
        for (int i = 0; i < word->words.n; i++)
            printf(" %s", word->words.names[i]);
        putchar('\n');
    }
}

static void show_help(const struct cli_command *self, const struct cli_option *options)
{
    printf("usage: nib %s [OPTION]...%s%s\n\n%s\n", self->name, *self->operands ? " " : "", self->operands,
           self->about);
    for (const struct cli_option *option = options; option->name; option++)
        show_option(option);
    show_option(&help_option);
}

static bool take_number(const struct cli_option *option, const char *text)
{
    char *end;
    const long value = strtol(text, &end, 10); /* an overflow gives LONG_MAX, which is out of any range here */
    if (!*text || *end || value < option->low || value > option->high)
        return false;
    *(int32_t *)option->value = (int32_t)value;
    return true;
}

static bool take_word(const struct cli_command *self, const struct cli_option *option, const char *text)
{
    struct cli_word *word = option->value;
    char list[256];
    const int found = word->open && strpbrk(text, "/.") ? -1 : words_find(&word->words, text); /* a path is no word */
    word->text = found < 0 ? text : word->words.names[found];
    word->value = found < 0 ? word->other : word->words.values[found];
    if (found >= 0)
        return true;
    if (!word->open)
        cli_error("%s: --%s takes %s, not '%s'", self->name, option->name,
                  words_list(&word->words, INT32_MIN, list, sizeof list), text);
    return word->open;
}

static bool take_item(const struct cli_command *self, const struct cli_option *option, const char *text)
{
    struct cli_list *list = option->value;
    const size_t most = sizeof list->items / sizeof *list->items;
    if (list->n == most) {
        cli_error("%s: --%s may be given %zu times", self->name, option->name, most);
        return false;
    }
    if (!*text) { /* what a variable of a shell that was never set comes to */
        cli_error("%s: --%s takes a %s, not ''", self->name, option->name, option->argument);
        return false;
    }
    list->items[list->n++] = text;
    return true;
}

/* Digits and one of the usual letters: K, M, G, T are powers of 1000, Ki and so on of 1024. */
static bool take_bytes(const char *text, uint64_t *value)
{
    static const char letters[] = "KMGT";
    uint64_t number = 0;
    const char *p = text;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (number > (UINT64_MAX - 9) / 10)
            return false;
        number = number * 10 + (uint64_t)(*p - '0');
    }
    if (p == text)
        return false;
    const char *const letter = *p ? strchr(letters, *p) : NULL;
    const bool binary = letter && p[1] == 'i';
    if (letter)
        p += binary ? 2 : 1;
    if (*p == 'B')
        p++;
    for (const char *power = letters; letter && power <= letter; power++) {
        if (number > UINT64_MAX / 1024)
            return false;
        number *= binary ? 1024 : 1000;
    }
    *value = number;
    return !*p && number > 0;
}

static bool take(const struct cli_command *self, const struct cli_option *option, const char *text)
{
    switch (option->kind) {
    case CLI_FLAG:
        *(bool *)option->value = true;
        return true;
    case CLI_TEXT:
        *(const char **)option->value = text;
        return true;
    case CLI_LIST:
        return take_item(self, option, text);
    case CLI_WORD:
        return take_word(self, option, text);
    case CLI_BYTES:
        if (take_bytes(text, option->value))
            return true;
        cli_error("%s: --%s takes a size such as 512M or 5G, not '%s'", self->name, option->name, text);
        return false;
    case CLI_NUMBER:
        if (take_number(option, text))
            return true;
        cli_error("%s: --%s takes a number from %d to %d, not '%s'", self->name, option->name, (int)option->low,
                  (int)option->high, text);
    }
    return false;
}

/* getopt's forms of the table; the help option comes last of `count`. */
static void translate(const struct cli_option *options, int count, char *letters, struct option *names)
{
    *letters++ = ':'; /* tells a missing argument from an unknown option */
    for (int n = 0; n < count; n++) {
        const struct cli_option *const option = n == count - 1 ? &help_option : &options[n];
        names[n] =
            (struct option){ option->name, option->argument ? required_argument : no_argument, NULL, LONG_BASE + n };
        if (option->letter) {
            *letters++ = option->letter;
            if (option->argument)
                *letters++ = ':';
        }
    }
    *letters = 0;
    names[count] = (struct option){ 0 };
}

static int find_letter(const struct cli_option *options, int count, int letter)
{
    for (int i = 0; i < count - 1; i++)
        if (options[i].letter == letter)
            return i;
    return count - 1;
}

static enum cli_parsed parse(const struct cli_command *self, const struct cli_option *options, int count,
                             const char *letters, const struct option *names, int argc, char **argv, int *first)
{
    opterr = 0;
    for (int got; (got = getopt_long(argc, argv, letters, names, NULL)) != -1;) {
        if (got == ':' || got == '?') {
            /* A letter may stand in a cluster such as -vx, which optind is not behind before its end; for a long option
             * optopt is 0 or a LONG_BASE number. */
            const char letter[] = { '-', (char)optopt, 0 };
            const bool is_letter = optopt != 0 && optopt < LONG_BASE;
            cli_error("%s: %s '%s'; see nib %s --help", self->name,
                      got == ':' ? "an argument is missing after" : "cannot take option",
                      is_letter ? letter : argv[optind - 1], self->name);
            return CLI_USAGE;
        }
        const int number = got >= LONG_BASE ? got - LONG_BASE : find_letter(options, count, got);
        if (number == count - 1) {
            if (!cli_silent)
                show_help(self, options);
            return CLI_HELPED;
        }
        if (!take(self, &options[number], optarg))
            return CLI_USAGE;
    }
    *first = optind;
    return CLI_GO;
}

enum cli_parsed cli_parse(const struct cli_command *self, const struct cli_option *options, int argc, char **argv,
                          int *first)
{
    int count = 1; /* with the help option */
    while (options[count - 1].name)
        count++;
    if (cli_list_words) {
        show_words(self, options);
        return CLI_HELPED;
    }
    char *letters = malloc(2 * (size_t)count + 2);
    struct option *names = malloc(((size_t)count + 1) * sizeof *names);
    enum cli_parsed parsed = CLI_USAGE;
    if (letters && names) {
        translate(options, count, letters, names);
        parsed = parse(self, options, count, letters, names, argc, argv, first);
    } else {
        cli_error("%s: no memory for its options", self->name);
    }
    free(letters);
    free(names);
    return parsed;
}
