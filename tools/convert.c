/* SPDX-License-Identifier: Apache-2.0 */
/*
 * convert.c - nib convert: an NVFP4 checkpoint in another format, codes and scales unchanged.
 */
#include "commands.h"
#include "run_plan.h"

static enum cli_exit convert(const struct cli_command *self, const struct cli_word *format, const char *in_path,
                             const char *out, const struct run_flags *flags)
{
    nib_plan *plan = NULL;
    char list[256];
    if (!format->text) {
        cli_error("convert: --format says what to write: %s", words_list(&format->words, NIB_UNSET, list, sizeof list));
        return CLI_FAILED;
    }
    if (!run_confine(self, in_path, out, format->value == NIB_CHECKPOINT_FORMAT_GGUF, flags))
        return CLI_FAILED;
    nib_checkpoint *in = run_open(self, in_path);
    if (!in)
        return CLI_FAILED;
    const enum cli_exit result = nib_plan_convert(in, (nib_checkpoint_format)format->value, &plan)
                                     ? run_failed(self)
                                     : run_plan(self, plan, out, flags, "converted");
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return result;
}

static enum cli_exit run(const struct cli_command *self, int argc, char **argv)
{
    struct cli_word format = { .words = words_formats(NIB_ACTION_CONVERT), .value = NIB_UNSET };
    struct run_flags flags = { .threads = 0 };
    const struct cli_option options[] = {
        { 0, "format", CLI_WORD, &format, "F", "{}", 0, 0 },
        RUN_OPTIONS(flags),
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 2) {
        cli_error("convert: takes an input and an output, not %d operands; see nib convert --help", argc - first);
        return CLI_FAILED;
    }
    if (!format.text && run_is_gguf(argv[first + 1])) {
        format.text = nib_checkpoint_format_name(NIB_CHECKPOINT_FORMAT_GGUF);
        format.value = NIB_CHECKPOINT_FORMAT_GGUF;
    }
    return convert(self, &format, argv[first], argv[first + 1], &flags);
}

const struct cli_command cli_convert = {
    "convert", "IN OUT", "write an NVFP4 checkpoint in another format",
    "Write the NVFP4 checkpoint IN (compressed-tensors, modelopt, torchao, GGUF or tensors that nib saved) in the "
    "format\n"
    "--format. Codes and block scales stay as they are; only names and the sense of the tensor scale change.\n\n"
    "Examples:\n"
    "  nib convert --format modelopt Qwen3-8B-NVFP4 Qwen3-8B-modelopt\n"
    "  nib convert --format gguf Qwen3-8B-NVFP4 qwen3-8b.gguf\n",
    run
};
