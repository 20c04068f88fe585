/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.c - nib quantize: a model in high precision to NVFP4, as a server loads it.
 */
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "progress.h"
#include "report.h"
#include "run_plan.h"
#include "nib_shard.h"

/* ---- Where it is to be loaded ---- */

/* What loads where, as of the loaders of August 2026. The first pair of a server is what --for chooses. */
static const struct pair {
    const char *server;
    nib_checkpoint_format format;
    nib_scheme scheme;
    const char *rejection; /* NULL: it loads */
} pairs[] = {
    { "vllm", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16, NULL },
    { "vllm", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { "vllm", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16, NULL },
    { "vllm", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { "sglang", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16, NULL },
    { "sglang", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { "sglang", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { "sglang", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16,
      "it loads weight-only NVFP4 as modelopt, not as compressed-tensors" },
    { "trtllm", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { "trtllm", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { "trtllm", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16,
      "it runs weight-only NVFP4 on few GPUs (sm120, sm121): take the scheme nvfp4, or leave --for out" },
    { "trtllm", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16,
      "it runs weight-only NVFP4 on few GPUs (sm120, sm121): take the scheme nvfp4, or leave --for out" },
    { "transformers", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16, NULL },
    { "transformers", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { "llama.cpp", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4A16, NULL },
    { "llama.cpp", NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, NIB_SCHEME_NVFP4, NULL },
    { "llama.cpp", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4A16, NULL },
    { "llama.cpp", NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NULL },
    { "llama.cpp", NIB_CHECKPOINT_FORMAT_GGUF, NIB_SCHEME_NVFP4A16,
      "a GGUF file from here has neither its names nor a tokenizer: write compressed-tensors and let "
      "convert_hf_to_gguf.py make the GGUF" },
    { "llama.cpp", NIB_CHECKPOINT_FORMAT_GGUF, NIB_SCHEME_NVFP4,
      "a GGUF file from here has neither its names nor a tokenizer: write compressed-tensors and let "
      "convert_hf_to_gguf.py make the GGUF" },
};
enum { PAIRS = sizeof pairs / sizeof *pairs };

static const char *const schemes[NIB_SCHEME_COUNT] = { "nvfp4a16", "nvfp4" };

struct arguments {
    const char *format, *scheme, *server, *dialect, *scale, *tensor_scale_rule, *min_block_scale, *activations, *preset;
    struct cli_list ignore, only;
    uint64_t shard_bytes;
    bool keep_split;
    struct run_flags run;
};

static bool fits(const struct pair *pair, const struct arguments *a, const nib_quantize_options *o)
{
    return (!a->format || pair->format == o->format) && (!a->scheme || pair->scheme == o->scheme);
}

static bool choose_pair(const struct cli_command *self, const struct arguments *a, nib_quantize_options *o)
{
    bool known = false;
    const char *rejection = NULL;
    if (!a->server)
        return true;
    for (int i = 0; i < PAIRS; i++) {
        const struct pair *pair = &pairs[i];
        if (strcmp(pair->server, a->server) != 0)
            continue;
        known = true;
        if (!fits(pair, a, o))
            continue;
        if (!pair->rejection) {
            o->format = pair->format;
            o->scheme = pair->scheme;
            return true;
        }
        rejection = pair->rejection;
    }
    if (!known)
        cli_error("%s: --for takes vllm, sglang, trtllm, transformers or llama.cpp, not '%s'", self->name, a->server);
    else if (rejection)
        cli_error("%s: %s cannot load that: %s", self->name, a->server, rejection);
    else
        cli_error("%s: %s does not load %s %s", self->name, a->server, nib_checkpoint_format_name(o->format),
                  schemes[o->scheme]);
    return false;
}

static bool names_experts(const struct cli_list *patterns)
{
    for (size_t i = 0; i < patterns->n; i++)
        if (strstr(patterns->items[i], "experts"))
            return true;
    return false;
}

/* What a server cannot do with a weight although the format has it: such weights stay, or the whole is rejected. */
static bool fit_server(const struct cli_command *self, const struct arguments *a, const nib_checkpoint *in,
                       struct cli_list *ignore)
{
    const bool transformers = a->server && !strcmp(a->server, "transformers");
    const bool llama = a->server && !strcmp(a->server, "llama.cpp");
    nib_weight w = { .bytes = sizeof w };
    if (!transformers && !llama)
        return true;
    for (size_t i = 0; !nib_checkpoint_get_weight(in, i, &w); i++) {
        const char *const expert = strstr(w.name, ".experts."), *const last = strrchr(w.name, '.');
        if (expert && transformers && !names_experts(&a->ignore)) {
            cli_error("%s: transformers drops the tensor scale of NVFP4 experts such as %s and computes garbage: "
                      "use another server, or keep them with --ignore 're:.*\\.experts\\..*'",
                      self->name, w.name);
            return false;
        }
        if (expert && llama && last && last[1] == 'w' && last[2] >= '1' && last[2] <= '3' && !last[3]) {
            cli_error("%s: llama.cpp's converter does not know NVFP4 experts called %s: only gate_proj, up_proj and "
                      "down_proj",
                      self->name, last + 1);
            return false;
        }
        if (!llama || w.cols % 64 == 0)
            continue;
        if (ignore->n == sizeof ignore->items / sizeof *ignore->items) {
            cli_error("%s: too many weights have a number of columns that is no multiple of 64", self->name);
            return false;
        }
        ignore->items[ignore->n++] = w.name;
    }
    return true;
}

/* ---- Options ---- */

static bool find_word(const struct cli_command *self, const char *option, const char *word, const char *const *words,
                      int n, int *out)
{
    char list[256] = "";
    size_t used = 0;
    if (!word)
        return true;
    for (int i = 0; i < n; i++) {
        if (strcmp(word, words[i]) == 0) {
            *out = i;
            return true;
        }
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", words[i]);
    }
    cli_error("%s: --%s takes %s, not '%s'", self->name, option, list, word);
    return false;
}

/* "2^-6" or a number. */
static bool read_scale(const char *text, float *out)
{
    char *end;
    double value;
    if (strncmp(text, "2^", 2) == 0) {
        const long power = strtol(text + 2, &end, 10);
        value = 1;
        for (long i = 0; i < labs(power) && i < 64; i++)
            value *= power < 0 ? 0.5 : 2;
    } else {
        value = strtod(text, &end);
    }
    *out = (float)value;
    return *text && !*end && value >= 0 && value <= 448;
}

static bool set_options(const struct cli_command *self, const struct arguments *a, nib_quantize_options *o)
{
    static const char *const rules[] = { "rtn", "4over6", "sweep" }, *const tensor_scales[] = { "exact", "pow2" };
    static const char *const presets[] = { "default", "mlp-only", "experts-only" };
    nib_dialect dialect;
    int rule = NIB_UNSET, scale = NIB_UNSET, scheme = (int)o->scheme, preset = 0;
    if (a->format && nib_checkpoint_format_from_name(a->format, &o->format)) {
        cli_error("%s: --format takes compressed-tensors, modelopt or gguf, not '%s'", self->name, a->format);
        return false;
    }
    if (a->dialect) {
        if (nib_dialect_from_name(a->dialect, &dialect)) {
            cli_error("%s: --dialect: %s", self->name, nib_last_error());
            return false;
        }
        o->dialect = (int32_t)dialect;
    }
    if (!find_word(self, "scheme", a->scheme, schemes, 2, &scheme) ||
        !find_word(self, "scale", a->scale, rules, 3, &rule) ||
        !find_word(self, "tensor-scale", a->tensor_scale_rule, tensor_scales, 2, &scale) ||
        !find_word(self, "preset", a->preset, presets, 3, &preset))
        return false;
    if (a->min_block_scale && !read_scale(a->min_block_scale, &o->min_block_scale)) {
        cli_error("%s: --min-block-scale takes a number from 0 to 448, such as 2^-6, not '%s'", self->name,
                  a->min_block_scale);
        return false;
    }
    o->scheme = (nib_scheme)scheme;
    o->scale_rule = rule;
    o->tensor_scale_rule = scale == NIB_UNSET ? NIB_UNSET
                           : scale            ? NIB_TENSOR_SCALE_RULE_POW2
                                              : NIB_TENSOR_SCALE_RULE_EXACT;
    o->preset = (nib_preset)preset;
    o->shard_bytes = a->shard_bytes;
    o->keep_split = a->keep_split;
    if (!choose_pair(self, a, o))
        return false;
    if (a->activations && strcmp(a->activations, "one") != 0) {
        const bool norm = strcmp(a->activations, "norm") == 0;
        o->activation = norm ? NIB_ACTIVATION_NORM : NIB_ACTIVATION_FILE;
        o->activation_file = norm ? NULL : a->activations;
    }
    return true;
}

/* What it did to the weights; by one rank, which sees all of the output. */
static enum cli_exit write_report(const struct cli_command *self, const struct arguments *a, const nib_checkpoint *in,
                                  const nib_plan *plan, const char *path)
{
    struct progress progress;
    nib_job job;
    if (run_comm && run_comm->rank != 0)
        return CLI_FINE;
    nib_checkpoint *out = run_open(self, path);
    if (!out)
        return CLI_FAILED;
    progress_begin(&progress, &job, a->run.threads, a->run.quiet);
    job.max_memory = a->run.max_memory;
    const bool good = report_make(a->run.report, in, out, plan, &job);
    progress_end(&progress);
    nib_checkpoint_close(out);
    return good ? CLI_FINE : CLI_FAILED;
}

static enum cli_exit quantize(const struct cli_command *self, struct arguments *a, const char *in_path, const char *out)
{
    nib_quantize_options options;
    nib_plan *plan = NULL;
    nib_quantize_options_init(&options);
    if (!set_options(self, a, &options))
        return CLI_FAILED;
    nib_checkpoint *in = run_open(self, in_path);
    if (!in)
        return CLI_FAILED;
    enum cli_exit result = CLI_FAILED;
    if (fit_server(self, a, in, &a->ignore)) {
        options.ignore = a->ignore.items;
        options.n_ignore = a->ignore.n;
        options.only = a->only.items;
        options.n_only = a->only.n;
        result =
            nib_plan_quantize(in, &options, &plan) ? run_failed(self) : run_plan(self, plan, out, &a->run, "quantized");
        if (result == CLI_FINE && a->run.report && !a->run.dry_run)
            result = write_report(self, a, in, plan, out);
    }
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return result;
}

static enum cli_exit run(const struct cli_command *self, int argc, char **argv)
{
    static struct arguments a; /* its lists are large */
    a = (struct arguments){ .format = NULL };
    const struct cli_option options[] = {
        { 0, "format", CLI_TEXT, &a.format, "F", "compressed-tensors (default), modelopt or gguf", 0, 0 },
        { 0, "scheme", CLI_TEXT, &a.scheme, "S", "nvfp4a16 (weights only, default) or nvfp4", 0, 0 },
        { 0, "for", CLI_TEXT, &a.server, "SERVER", "choose both for vllm, sglang, trtllm, transformers or llama.cpp", 0,
          0 },
        { 0, "scale", CLI_TEXT, &a.scale, "RULE", "block scales: rtn, 4over6 or sweep (default)", 0, 0 },
        { 0, "tensor-scale", CLI_TEXT, &a.tensor_scale_rule, "RULE", "exact or pow2 (default)", 0, 0 },
        { 0, "min-block-scale", CLI_TEXT, &a.min_block_scale, "X", "smallest block scale (default 2^-6)", 0, 0 },
        { 0, "dialect", CLI_TEXT, &a.dialect, "D", "the bytes of modelopt, compressed-tensors, torchao, gist or te", 0,
          0 },
        { 0, "activations", CLI_TEXT, &a.activations, "A",
          "nvfp4: scales one (default), norm, or a JSON file {module: amax}", 0, 0 },
        { 0, "ignore", CLI_LIST, &a.ignore, "PATTERN", "leave modules as they are: name, glob or re:...", 0, 0 },
        { 0, "only", CLI_LIST, &a.only, "PATTERN", "quantize no others", 0, 0 },
        { 0, "preset", CLI_TEXT, &a.preset, "P", "mlp-only or experts-only", 0, 0 },
        { 0, "shard-size", CLI_BYTES, &a.shard_bytes, "SIZE", "of an output file (default 5G)", 0, 0 },
        { 0, "keep-split", CLI_FLAG, &a.keep_split, NULL, "one output file per input file, under its name", 0, 0 },
        { 0, "report", CLI_TEXT, &a.run.report, "FILE", "also write FILE.html, a page with charts, or FILE.json", 0,
          0 },
        RUN_OPTIONS(a.run),
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 2) {
        cli_error("quantize: takes an input and an output, not %d operands; see nib quantize --help", argc - first);
        return CLI_FAILED;
    }
    if (a.run.report && !report_can_write(a.run.report))
        return CLI_FAILED;
    return quantize(self, &a, argv[first], argv[first + 1]);
}

const struct cli_command cli_quantize = {
    "quantize", "IN OUT", "turn a checkpoint into NVFP4",
    "Quantize the checkpoint IN (a directory, a safetensors or a GGUF file; BF16, F16, F32, FP8 blocks or MXFP4) to "
    "NVFP4\n"
    "and write OUT: a directory that servers load, or a GGUF file. Embeddings, norms, routers, the output head and "
    "what\n"
    "--ignore names stay as they are. Nothing appears in OUT before all of it is complete.\n\n"
    "Examples:\n"
    "  nib quantize Qwen3-8B Qwen3-8B-NVFP4\n"
    "  nib quantize --for sglang --dry-run Qwen3-8B out\n"
    "  nib quantize --format modelopt --scheme nvfp4 --activations norm Llama-3.1-8B out\n"
    "  nib quantize --preset experts-only --ignore 're:.*layers\\.(0|1)\\..*' Mixtral-8x7B out\n"
    "  nib quantize --report q.html Qwen3-8B out\n"
    "  nib quantize --resume -t 8 --max-memory 4G DeepSeek-V3 out\n",
    run
};
