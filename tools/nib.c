/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib.c - the command-line tool: a table of commands, and the two that are about the tool itself.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "commands.h"
#include "device.h"
#include "nib.h"
#include "text.h"

static enum cli_exit run_help(const struct cli_command *self, int argc, char **argv);
static enum cli_exit run_version(const struct cli_command *self, int argc, char **argv);

static const struct cli_command help_command = { "help", "[COMMAND]",
                                                 "say what the commands are, or what one of them does",
                                                 "List the commands, or show the help of one of them.\n", run_help };

static const struct cli_command version_command = { "version", "", "say which version this is",
                                                    "Print the version of the library.\n", run_version };

static const struct cli_command *const commands[] = {
    &cli_quantize,   &cli_convert, &cli_check, &cli_repair,      &cli_inspect,  &cli_compare,
    &cli_dequantize, &cli_conform, &cli_bench, &version_command, &help_command,
};

enum { COMMANDS = sizeof commands / sizeof *commands };

static const struct cli_command *find_command(const char *name)
{
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
    return NULL;
}

static void show_commands(FILE *stream)
{
    fprintf(stream, "usage: nib COMMAND [OPTION]... [OPERAND]...\n"
                    "       nib --help | --version\n\n"
                    "nib works on NVFP4 tensors. Its commands:\n\n");
    for (int i = 0; i < COMMANDS; i++)
        fprintf(stream, "  %-12s%s\n", commands[i]->name, commands[i]->summary);
    fprintf(stream, "\nnib COMMAND --help says more about one of them.\n"
                    "Exit status: 0 fine, 1 the answer is no, 2 it could not be done.\n");
}

static enum cli_exit unknown_command(const char *name)
{
    char list[256];
    size_t used = 0;
    list[0] = 0;
    for (int i = 0; i < COMMANDS && used < sizeof list; i++)
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", commands[i]->name);
    cli_error("there is no command '%s'; the commands are %s", name, list);
    return CLI_FAILED;
}

static enum cli_exit list_words(void)
{
    cli_list_words = true;
    for (int i = 0; i < COMMANDS; i++) {
        char name[32], *alone[] = { name, NULL };
        snprintf(name, sizeof name, "%s", commands[i]->name);
        (void)commands[i]->run(commands[i], 1, alone);
    }
    return CLI_FINE;
}

static enum cli_exit run_help(const struct cli_command *self, int argc, char **argv)
{
    bool words = false;
    const struct cli_option options[] = {
        { 0, "words", CLI_FLAG, &words, NULL, "the words that options take, a line for each option", 0, 0 }, { 0 }
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (words && first == argc)
        return list_words();
    if (argc - first > 1) {
        cli_error("help: takes one command, not %d", argc - first);
        return CLI_FAILED;
    }
    if (first == argc) {
        show_commands(stdout);
        return CLI_FINE;
    }
    const struct cli_command *const command = find_command(argv[first]);
    if (!command)
        return unknown_command(argv[first]);
    char flag[] = "--help", *again[] = { argv[first], flag, NULL };
    optind = 0; /* getopt starts anew */
    return command->run(command, 2, again);
}

/* The devices that calls can run on; why there is no GPU is worth a line too. */
static void print_devices(void)
{
    char text[1024];
    int count = 0;
    const struct cuda_calls *const calls = device_cuda(text, sizeof text);
    cli_print("device: host");
    if (!calls) {
        cli_print("no GPU: %s", text);
        return;
    }
    (void)calls->count(&count);
    for (int i = 0; i < count; i++)
        if (calls->describe(i, text, sizeof text) == NIB_OK)
            cli_print("device: cuda:%d, %s", i, text);
    if (count == 0)
        cli_print("no GPU: libnib_cuda finds none, or no driver");
}

static enum cli_exit run_version(const struct cli_command *self, int argc, char **argv)
{
    bool verbose = false;
    const struct cli_option options[] = {
        { 'v', "verbose", CLI_FLAG, &verbose, NULL,
          "also the instruction set in use, devices, the sandbox, and how the tool was built", 0, 0 },
        { 0 }
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (first < argc) {
        cli_error("version: takes no operand, such as '%s'", argv[first]);
        return CLI_FAILED;
    }
    cli_print("nib %s", nib_version());
    if (verbose) {
        cli_print("instruction set: %s", nib_isa());
        print_devices();
        cli_print("sandbox: %s", sandbox_state());
        cli_print("tool built for: nib %s", NIB_VERSION);
#if defined(__clang__)
        cli_print("tool built by: %s", __VERSION__);
#elif defined(__GNUC__)
        cli_print("tool built by: gcc %s", __VERSION__);
#endif
    }
    return CLI_FINE;
}

/* With stdout closed, the next file to be opened would become descriptor 1 and be printed into. Instead 0, 1 and 2 are
 * taken by something that rejects to be written. */
static void hold_standard_descriptors(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDONLY);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
}

/* A report that is not whole or did not arrive is not a success, whatever the command found. */
static enum cli_exit finish(enum cli_exit result)
{
    if (result != CLI_FAILED && text_lost_memory()) {
        cli_error("out of memory");
        result = CLI_FAILED;
    }
    errno = 0;
    const bool flushed = fflush(stdout) == 0;
    if (flushed && !ferror(stdout))
        return result;
    cli_error("cannot write standard output%s%s", errno ? ": " : "", errno ? strerror(errno) : "");
    return CLI_FAILED;
}

int cli_main(int argc, char **argv)
{
    hold_standard_descriptors();
    text_watch_memory();
    signal(SIGPIPE, SIG_IGN); /* a reader that went away is a write error like any other */
    signal(SIGXFSZ, SIG_IGN); /* and so is a file that may not grow */
    if (argc < 2) {
        show_commands(stderr);
        return CLI_FAILED;
    }
    const char *const word = argv[1];
    const char *name = word;
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
        name = help_command.name;
    else if (strcmp(word, "--version") == 0)
        name = version_command.name;
    const struct cli_command *const command = find_command(name);
    if (!command)
        return (int)unknown_command(word);
    const enum cli_exit result = command->run(command, argc - 1, argv + 1);
    sandbox_leave();
    return (int)finish(result);
}
