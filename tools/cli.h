/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli.h - what every command of the tool shares: its row in the table of commands, options, messages, exit codes.
 *
 * A command is one `struct cli_command` in its own file and one line in the table of nib.c. Data goes to stdout, words
 * to stderr, and main notices when stdout could not be written; a command only returns its exit code.
 */
#ifndef NIB_CLI_H
#define NIB_CLI_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "sandbox.h"
#include "words.h"

#if defined(__GNUC__)
#define CLI_FORMAT(at, first) __attribute__((format(printf, at, first)))
#else
#define CLI_FORMAT(at, first)
#endif

enum cli_exit {
    CLI_FINE = 0,  /* done, and the answer is yes */
    CLI_NO = 1,    /* done, and the answer is no: a mismatch, a finding */
    CLI_FAILED = 2 /* it could not be done: usage, a file, the disk */
};

struct cli_command {
    const char *name;
    const char *operands; /* as the usage line shows them; "" for none */
    const char *summary;  /* one line, for the list of commands */
    const char *about;    /* what --help says above the options; lines end in \n */
    enum cli_exit (*run)(const struct cli_command *self, int argc, char **argv); /* argv[0] is the command's name */
};

enum cli_kind {
    CLI_FLAG,  /* *(bool *)value becomes true */
    CLI_TEXT,  /* *(const char **)value */
    CLI_LIST,  /* *(struct cli_list *)value: may be given again and again */
    CLI_BYTES, /* *(uint64_t *)value: a size such as 512M or 5G */
    CLI_WORD,  /* *(struct cli_word *)value; {} in the help stands for its words */
    CLI_NUMBER /* *(int32_t *)value, from low to high */
};

/* One of some words. */
struct cli_word {
    struct words words;
    int32_t value;    /* what the word stands for; before that, the default, which the help marks */
    const char *text; /* the word itself, however it was spelled; NULL where none was given */
    bool open;        /* anything else is taken too, as text, and its value is `other` */
    int32_t other;
};

/* What an option was given, in order. */
struct cli_list {
    const char *items[4096];
    size_t n;
};

struct cli_option {
    char letter;      /* 0 for none */
    const char *name; /* without the dashes; a row with NULL ends the table */
    enum cli_kind kind;
    void *value;
    const char *argument; /* how the help names it; NULL for a flag */
    const char *help;
    int32_t low, high; /* CLI_NUMBER */
};

enum cli_parsed {
    CLI_GO,     /* operands are argv[*first] and on */
    CLI_HELPED, /* --help was asked for and printed */
    CLI_USAGE   /* a message is on stderr */
};

/* Read the options of a command; every command also has -h, --help. Options and operands may be mixed. */
enum cli_parsed cli_parse(const struct cli_command *self, const struct cli_option *options, int argc, char **argv,
                          int *first);

/* From here on a command reads and writes what these name and nothing else, where the system can see to that; sandbox.h.
 * False after a message. */
bool cli_confine(const struct cli_command *self, const struct sandbox_path *paths, size_t n);

/* The whole tool: a command is found and run. Returns the exit code. */
int cli_main(int argc, char **argv);

/* Of several processes that do the same together, one speaks. */
extern bool cli_silent;

/* Instead of running, commands list the words of their options: COMMAND --OPTION WORD... */
extern bool cli_list_words;

/* A line `nib: ...` on stderr. Names in it may come from hostile files: control characters are replaced. */
void cli_error(const char *format, ...) CLI_FORMAT(1, 2);

/* A line on stdout, made harmless in the same way. */
void cli_print(const char *format, ...) CLI_FORMAT(1, 2);

#endif
