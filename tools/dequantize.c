/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dequantize.c - nib dequantize: a quantized checkpoint as plain numbers.
 */
#include <string.h>

#include "commands.h"
#include "run_plan.h"

static bool find_dtype(const char *name, nib_dtype *dtype)
{
    static const struct {
        const char *name;
        nib_dtype dtype;
    } dtypes[] = { { "bf16", NIB_BF16 }, { "f16", NIB_F16 }, { "f32", NIB_F32 } };
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            *dtype = dtypes[i].dtype;
            return true;
        }
    return false;
}

static enum cli_exit run(const struct cli_command *self, int argc, char **argv)
{
    const char *name = "bf16";
    struct run_flags flags = { .threads = 0 };
    const struct cli_option options[] = {
        { 0, "dtype", CLI_TEXT, &name, "D", "bf16 (default), f16 or f32", 0, 0 },
        RUN_OPTIONS(flags),
        { 0 },
    };
    int first;
    nib_dtype dtype;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 2) {
        cli_error("dequantize: takes an input and an output, not %d operands; see nib dequantize --help", argc - first);
        return CLI_FAILED;
    }
    if (!find_dtype(name, &dtype)) {
        cli_error("dequantize: --dtype takes bf16, f16 or f32, not '%s'", name);
        return CLI_FAILED;
    }
    nib_plan *plan = NULL;
    nib_checkpoint *in = run_open(self, argv[first]);
    if (!in)
        return CLI_FAILED;
    const enum cli_exit result = nib_plan_dequantize(in, dtype, &plan)
                                     ? run_failed(self)
                                     : run_plan(self, plan, argv[first + 1], &flags, "dequantized");
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return result;
}

const struct cli_command cli_dequantize = {
    "dequantize", "IN OUT", "turn a quantized checkpoint into plain numbers",
    "Write the checkpoint IN with every quantized weight (NVFP4 in any format, MXFP4, FP8 blocks) as plain numbers.\n\n"
    "Examples:\n"
    "  nib dequantize Qwen3-8B-NVFP4 Qwen3-8B-restored\n"
    "  nib dequantize --dtype f32 model-NVFP4.safetensors restored.safetensors\n",
    run
};
