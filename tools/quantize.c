/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.c - nib quantize: a model in high precision to NVFP4, as a server loads it.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "progress.h"
#include "report.h"
#include "run_plan.h"
#include "nib_shard.h"

/* ---- Where it is to be loaded ---- */

static struct words servers(void)
{
    struct words words = { .n = 0 };
    for (int i = NIB_READER_ANY + 1; i < NIB_READER_COUNT; i++)
        words_add(&words, nib_reader_name((nib_reader)i), i);
    return words;
}

struct arguments {
    struct cli_word format, scheme, server, dialect, scale_rule, tensor_scale_rule, activations, preset;
    const char *min_block_scale, *imatrix, *fold_exponent, *codes, *hessians, *damp, *budget;
    bool imatrix_strict, fold, fold_search, gptq;
    struct cli_list ignore, only, fp8, plain;
    uint64_t shard_bytes;
    bool keep_split, budget_plain;
    struct run_flags run;
};

static bool choose_pair(const struct cli_command *self, const struct arguments *a, nib_quantize_options *o)
{
    int32_t format = a->format.text ? a->format.value : NIB_UNSET,
            scheme = a->scheme.text ? a->scheme.value : NIB_UNSET;
    if (!a->server.text)
        return true;
    o->reader = (nib_reader)a->server.value;
    if (nib_reader_choose(o->reader, &format, &scheme)) {
        cli_error("%s: %s", self->name, nib_last_error());
        return false;
    }
    o->format = (nib_checkpoint_format)format;
    o->scheme = (nib_scheme)scheme;
    return true;
}

/* What a server cannot do with a weight although the format has it: such weights stay, or the whole is rejected. */
static bool fit_server(const struct cli_command *self, const struct arguments *a, const nib_checkpoint *in,
                       struct cli_list *ignore)
{
    const bool llama = a->server.text && a->server.value == NIB_READER_LLAMA_CPP &&
                       !(a->format.text && a->format.value == NIB_CHECKPOINT_FORMAT_GGUF);
    nib_weight w = { .bytes = sizeof w };
    if (!llama)
        return true;
    for (size_t i = 0; !nib_checkpoint_get_weight(in, i, &w); i++) {
        const char *const expert = strstr(w.name, ".experts."), *const last = strrchr(w.name, '.');
        if (expert && last && last[1] == 'w' && last[2] >= '1' && last[2] <= '3' && !last[3]) {
            cli_error("%s: llama.cpp's converter does not know NVFP4 experts called %s: only gate_proj, up_proj and "
                      "down_proj",
                      self->name, last + 1);
            return false;
        }
        if (w.cols % 64 == 0)
            continue;
        if (ignore->n == sizeof ignore->items / sizeof *ignore->items) {
            cli_error("%s: too many weights have a number of columns that is not a multiple of 64", self->name);
            return false;
        }
        ignore->items[ignore->n++] = w.name;
    }
    return true;
}

/* ---- Options ---- */

/* "2^-6" or a number. */
static bool read_scale(const char *text, float *out)
{
    char *end;
    double value;
    if (strncmp(text, "2^", 2) == 0) {
        const long power = strtol(text + 2, &end, 10); /* beyond a long: its least or its largest */
        value = ldexp(1, power < -64 ? -64 : power > 64 ? 64 : (int)power);
    } else {
        value = strtod(text, &end);
    }
    *out = (float)value;
    const bool vanished = value > 0 && *out == 0; /* 0 means none, which is not what was asked for */
    return end > text && end[-1] != '^' && !*end && value >= 0 && value <= 448 && !vanished;
}

static bool read_exponent(const char *text, float *out)
{
    char *end;
    *out = strtof(text, &end);
    return *text && !*end && *out >= 0 && *out <= 1;
}

static bool read_damping(const char *text, float *out)
{
    char *end;
    *out = strtof(text, &end);
    return *text && !*end && *out >= 0 && *out <= FLT_MAX;
}

static bool read_bits(const char *text, float *out)
{
    char *end;
    *out = strtof(text, &end);
    return *text && !*end && *out >= 4.5f && *out <= 16;
}

static bool set_options(const struct cli_command *self, const struct arguments *a, nib_quantize_options *o)
{
    if (a->min_block_scale && !read_scale(a->min_block_scale, &o->min_block_scale)) {
        cli_error("%s: --min-block-scale takes a number from 0 to 448, such as 2^-6, not '%s'", self->name,
                  a->min_block_scale);
        return false;
    }
    o->format = (nib_checkpoint_format)a->format.value;
    o->scheme = (nib_scheme)a->scheme.value;
    o->preset = (nib_preset)a->preset.value;
    o->dialect = a->dialect.text ? a->dialect.value : NIB_UNSET;
    o->scale_rule = a->scale_rule.text ? a->scale_rule.value : NIB_UNSET;
    o->tensor_scale_rule = a->tensor_scale_rule.text ? a->tensor_scale_rule.value : NIB_UNSET;
    o->shard_bytes = a->shard_bytes;
    o->keep_split = a->keep_split;
    if (!choose_pair(self, a, o))
        return false;
    if (a->fold_exponent && !read_exponent(a->fold_exponent, &o->fold_exponent)) {
        cli_error("%s: --fold-exponent takes a number from 0 to 1, not '%s'", self->name, a->fold_exponent);
        return false;
    }
    if (a->fold_exponent && a->fold_search) {
        cli_error("%s: --fold-search looks for the exponent that --fold-exponent says", self->name);
        return false;
    }
    o->fold = a->fold_search ? NIB_FOLD_SEARCH : a->fold || a->fold_exponent ? NIB_FOLD_FIXED : NIB_FOLD_NONE;
    if (a->damp && !read_damping(a->damp, &o->damp)) {
        cli_error("%s: --damp takes a number that is not negative, such as 0.1, not '%s'", self->name, a->damp);
        return false;
    }
    o->gptq = a->gptq;
    o->hessians = a->hessians;
    o->statistics = a->imatrix;
    o->codes = a->codes;
    o->budget_plain = a->budget_plain;
    if (a->budget && !read_bits(a->budget, &o->budget)) {
        cli_error("%s: --budget takes bits of a weight, from 4.5 to 16, not '%s'", self->name, a->budget);
        return false;
    }
    o->statistics_strict = a->imatrix_strict;
    o->activation = (nib_activation)a->activations.value;
    if (o->statistics && o->scheme == NIB_SCHEME_NVFP4 && !a->activations.text)
        o->activation = NIB_ACTIVATION_STATISTICS;
    if (o->activation == NIB_ACTIVATION_FILE)
        o->activation_file = a->activations.text;
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

/* How the weights to quantize are quantized already, "2 Q4_K, 1 Q6_K"; "" where they are not. */
static void list_source(const nib_checkpoint *in, const nib_plan *plan, char *list, size_t bytes)
{
    struct {
        const char *type;
        size_t weights;
    } types[16];
    size_t n = 0, used = 0;
    nib_weight w = { .bytes = sizeof w };
    nib_plan_row row = { .bytes = sizeof row };
    for (size_t i = 0; !nib_checkpoint_get_weight(in, i, &w); i++) {
        size_t t = 0;
        if (w.format == NIB_CHECKPOINT_FORMAT_PLAIN || nib_plan_get_row(plan, i, &row) ||
            row.action != NIB_ACTION_QUANTIZE)
            continue;
        const char *type =
            w.format == NIB_CHECKPOINT_FORMAT_GGML ? w.stored_dtype : nib_checkpoint_format_name(w.format);
        while (t < n && strcmp(types[t].type, type) != 0)
            t++;
        if (t == sizeof types / sizeof *types)
            continue;
        if (t == n) {
            types[n].type = type;
            types[n++].weights = 0;
        }
        types[t].weights++;
    }
    *list = '\0';
    for (size_t t = 0; t < n && used < bytes; t++)
        used += (size_t)snprintf(list + used, bytes - used, "%s%zu %s", t ? ", " : "", types[t].weights, types[t].type);
}

/* Errors add up, which only the one who has the original can avoid. */
static enum cli_exit carry_out(const struct cli_command *self, struct arguments *a, const nib_checkpoint *in,
                               const nib_plan *plan, const char *out)
{
    char list[512];
    list_source(in, plan, list, sizeof list);
    a->run.quantized_source = list;
    const enum cli_exit result = run_plan(self, plan, out, &a->run, "quantized");
    a->run.quantized_source = NULL;
    if (result == CLI_FINE && *list && !a->run.quiet && !a->run.json && !cli_silent)
        cli_print("  the source was already quantized (%s): the original would give a better result", list);
    return result;
}

static bool confine(const struct cli_command *self, const struct arguments *a, const nib_quantize_options *o,
                    const char *in, const char *out)
{
    char beside[4096] = ""; /* where Hessians are looked for by themselves */
    if (o->gptq && !o->hessians && o->statistics)
        snprintf(beside, sizeof beside, "%s.hessians", o->statistics);
    const struct sandbox_path paths[] = {
        { in, SANDBOX_CHECKPOINT },
        run_output(out, o->format == NIB_CHECKPOINT_FORMAT_GGUF, &a->run),
        { o->statistics, SANDBOX_FILE },
        { o->activation_file, SANDBOX_FILE },
        { o->codes, SANDBOX_CHECKPOINT },
        { *beside ? beside : o->hessians, SANDBOX_CHECKPOINT },
        { a->run.dry_run ? NULL : a->run.report, SANDBOX_OUTPUT_FILE },
    };
    return cli_confine(self, paths, sizeof paths / sizeof *paths);
}

static enum cli_exit quantize(const struct cli_command *self, struct arguments *a, const char *in_path, const char *out)
{
    nib_quantize_options options;
    nib_plan *plan = NULL;
    nib_quantize_options_init(&options);
    if (!a->format.text && run_is_gguf(out)) {
        a->format.text = nib_checkpoint_format_name(NIB_CHECKPOINT_FORMAT_GGUF);
        a->format.value = NIB_CHECKPOINT_FORMAT_GGUF;
    }
    if (!set_options(self, a, &options) || !confine(self, a, &options, in_path, out))
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
        options.fp8 = a->fp8.items;
        options.n_fp8 = a->fp8.n;
        options.plain = a->plain.items;
        options.n_plain = a->plain.n;
        result = nib_plan_quantize(in, &options, &plan) ? run_failed(self) : carry_out(self, a, in, plan, out);
        if (result == CLI_FINE && a->run.report && !a->run.dry_run)
            result = write_report(self, a, in, plan, out);
    }
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return result;
}

/* Who will not write it need not try. Nothing that is read may be in its place. */
static bool can_report(const struct arguments *a, const char *in, const char *out)
{
    const bool name_only = a->run.dry_run || (run_comm && run_comm->rank != 0);
    const char *const report = a->run.report;
    return !report || (report_can_write(report, in, out, name_only) &&
                       (!a->codes || report_can_write(report, a->codes, a->codes, true)) &&
                       report_spares(report, a->imatrix) && report_spares(report, a->activations.text));
}

static void set_defaults(struct arguments *a)
{
    *a = (struct arguments){
        .format = { .words = words_formats(NIB_ACTION_QUANTIZE), .value = NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS },
        .scheme = { .words = words_schemes(), .value = NIB_SCHEME_NVFP4A16 },
        .server = { .words = servers(), .value = NIB_UNSET },
        .dialect = { .words = words_dialects(), .value = NIB_UNSET },
        .scale_rule = { .words = words_scale_rules(), .value = NIB_SCALE_SWEEP },
        .tensor_scale_rule = { .words = words_tensor_scale_rules(), .value = NIB_TENSOR_SCALE_RULE_POW2 },
        .activations = { .value = NIB_ACTIVATION_ONE, .open = true, .other = NIB_ACTIVATION_FILE },
        .preset = { .words = words_presets(), .value = NIB_PRESET_DEFAULT },
    };
    for (int i = 0; i < NIB_ACTIVATION_COUNT; i++)
        if (i != NIB_ACTIVATION_FILE)
            words_add(&a->activations.words, nib_activation_name((nib_activation)i), i);
}

static enum cli_exit run(const struct cli_command *self, int argc, char **argv)
{
    static struct arguments a; /* its lists are large */
    set_defaults(&a);
    const struct cli_option options[] = {
        { 0, "format", CLI_WORD, &a.format, "F", "{}", 0, 0 },
        { 0, "scheme", CLI_WORD, &a.scheme, "S", "weights only, or activations too: {}", 0, 0 },
        { 0, "for", CLI_WORD, &a.server, "SERVER", "choose both for {}", 0, 0 },
        { 0, "scale", CLI_WORD, &a.scale_rule, "RULE", "block scales: {}", 0, 0 },
        { 0, "tensor-scale", CLI_WORD, &a.tensor_scale_rule, "RULE", "{}", 0, 0 },
        { 0, "min-block-scale", CLI_TEXT, &a.min_block_scale, "X", "smallest block scale (default 2^-6)", 0, 0 },
        { 0, "dialect", CLI_WORD, &a.dialect, "D", "the bytes of {}", 0, 0 },
        { 0, "activations", CLI_WORD, &a.activations, "A", "nvfp4: scales {}, or of a JSON file {module: amax}", 0, 0 },
        { 0, "imatrix", CLI_TEXT, &a.imatrix, "FILE", "weigh errors by statistics of inputs: imatrix, or nib's own", 0,
          0 },
        { 0, "imatrix-strict", CLI_FLAG, &a.imatrix_strict, NULL, "every weight must have statistics", 0, 0 },
        { 0, "fold", CLI_FLAG, &a.fold, NULL, "move scales of channels into norms, by the same statistics", 0, 0 },
        { 0, "fold-exponent", CLI_TEXT, &a.fold_exponent, "A", "the same by E[x^2]^(A/2) (default 0.25)", 0, 0 },
        { 0, "fold-search", CLI_FLAG, &a.fold_search, NULL, "the same by the exponents that lose least", 0, 0 },
        { 0, "codes", CLI_TEXT, &a.codes, "DIRECTORY", "take NVFP4 weights that are in it as they are", 0, 0 },
        { 0, "gptq", CLI_FLAG, &a.gptq, NULL, "choose codes so that errors of a row cancel, by Hessians of inputs", 0,
          0 },
        { 0, "hessians", CLI_TEXT, &a.hessians, "DIR", "where they are (default: FILE of --imatrix, and .hessians)", 0,
          0 },
        { 0, "damp", CLI_TEXT, &a.damp, "X", "their damping (default 0.1)", 0, 0 },
        { 0, "ignore", CLI_LIST, &a.ignore, "PATTERN", "leave modules as they are: name, glob or re:...", 0, 0 },
        { 0, "only", CLI_LIST, &a.only, "PATTERN", "quantize no others", 0, 0 },
        { 0, "fp8", CLI_LIST, &a.fp8, "PATTERN", "FP8 with a scale for each row instead", 0, 0 },
        { 0, "plain", CLI_LIST, &a.plain, "PATTERN", "as they are, but folded as the others", 0, 0 },
        { 0, "budget", CLI_TEXT, &a.budget, "BITS", "of a weight: FP8 in the last and first layers, as a guess", 0, 0 },
        { 0, "budget-plain", CLI_FLAG, &a.budget_plain, NULL, "the same with weights that stay as they are", 0, 0 },
        { 0, "preset", CLI_WORD, &a.preset, "P", "what to quantize: {}", 0, 0 },
        { 0, "shard-size", CLI_BYTES, &a.shard_bytes, "SIZE", "of an output file (default 5G)", 0, 0 },
        { 0, "keep-split", CLI_FLAG, &a.keep_split, NULL, "one output file per input file, under its name", 0, 0 },
        { 0, "report", CLI_TEXT, &a.run.report, "FILE", "also write FILE.html, a page to look at, or FILE.json", 0, 0 },
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
    if (!can_report(&a, argv[first], argv[first + 1]))
        return CLI_FAILED;
    return quantize(self, &a, argv[first], argv[first + 1]);
}

const struct cli_command cli_quantize = {
    "quantize", "IN OUT", "turn a checkpoint into NVFP4",
    "Quantize the checkpoint IN (a directory, a safetensors or a GGUF file; BF16, F16, F32, FP8, MXFP4 or GGML's "
    "blocks)\n"
    "to NVFP4 and write OUT: a directory that servers load, or a GGUF file where its name ends in .gguf. Embeddings,\n"
    "norms, routers, the output head and what --ignore names stay as they are. Nothing appears in OUT before all of "
    "it\n"
    "is complete.\n\n"
    "Examples:\n"
    "  nib quantize Qwen3-8B Qwen3-8B-NVFP4\n"
    "  nib quantize --for sglang --dry-run Qwen3-8B out\n"
    "  nib quantize --format modelopt --scheme nvfp4 --activations norm Llama-3.1-8B out\n"
    "  nib quantize --preset experts-only --ignore 're:.*layers\\.(0|1)\\..*' Mixtral-8x7B out\n"
    "  nib quantize --imatrix imatrix.gguf --fold Qwen3-8B out\n"
    "  nib quantize --imatrix qwen.stats --fold --gptq Qwen3-8B out\n"
    "  nib quantize --report q.html Qwen3-8B out\n"
    "  nib quantize Qwen3-8B-BF16.gguf Qwen3-8B-NVFP4.gguf\n"
    "  nib quantize --resume -t 8 --max-memory 4G DeepSeek-V3 out\n",
    run
};
