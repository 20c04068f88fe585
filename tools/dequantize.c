/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dequantize.c - nib dequantize: a quantized checkpoint as plain values.
 */
#include "commands.h"
#include "run_plan.h"

static enum cli_exit run(const struct cli_command *self, int argc, char **argv)
{
    struct cli_word dtype = { .words = words_dtypes(), .value = NIB_DTYPE_COUNT };
    struct run_flags flags = { .threads = 0 };
    const struct cli_option options[] = {
        { 0, "dtype", CLI_WORD, &dtype, "D", "{}; default: as it was, or bf16", 0, 0 },
        RUN_OPTIONS(flags),
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 2) {
        cli_error("dequantize: takes an input and an output, not %d operands; see nib dequantize --help", argc - first);
        return CLI_FAILED;
    }
    nib_plan *plan = NULL;
    if (!run_confine(self, argv[first], argv[first + 1], false, &flags))
        return CLI_FAILED;
    nib_checkpoint *in = run_open(self, argv[first]);
    if (!in)
        return CLI_FAILED;
    const nib_checkpoint_format format =
        run_is_gguf(argv[first + 1]) ? NIB_CHECKPOINT_FORMAT_GGUF : NIB_CHECKPOINT_FORMAT_PLAIN;
    const enum cli_exit result = nib_plan_dequantize(in, format, (nib_dtype)dtype.value, &plan)
                                     ? run_failed(self)
                                     : run_plan(self, plan, argv[first + 1], &flags, "dequantized");
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return result;
}

const struct cli_command cli_dequantize = {
    "dequantize", "IN OUT", "turn a quantized checkpoint into plain values",
    "Write the checkpoint IN with every quantized weight (NVFP4 in any format, MXFP4, FP8, GGML's blocks) as plain "
    "values.\n"
    "OUT is a directory, or a GGUF file where its name ends in .gguf. What nib quantize cut or transposed comes back "
    "as it was:\n"
    "names, shapes and dtypes are those of its input.\n\n"
    "Examples:\n"
    "  nib dequantize Qwen3-8B-NVFP4 Qwen3-8B-restored\n"
    "  nib dequantize --dtype f32 model-NVFP4.safetensors restored.safetensors\n"
    "  nib dequantize model-Q4_K_M.gguf model-BF16.gguf\n",
    run
};
