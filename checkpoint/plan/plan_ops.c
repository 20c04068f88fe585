/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_ops.c - plans to quantize, to convert and to dequantize: options checked, and what becomes of each weight.
 */
#include "plan/plan.h"

#include "format/dialect.h"

#include <float.h>
#include <stdio.h>
#include <xxhash.h>

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

static nib_status finish(nib_plan *plan, nib_status status, nib_plan **out)
{
    if (!status)
        return nib_plan_build(plan, out);
    nib_plan_destroy(plan);
    return status;
}

/* ---- What is taken at all ---- */

/* A plan drops or rewrites what the input's configuration says of quantized tensors: there must be none that it does
 * not understand. */
static nib_status check_source(const nib_checkpoint *in)
{
    const char *method = json_string_value(json_object_get(in->quantization, "quant_method"));
    bool known = !method;
    for (int i = 0; i < NIB_CHECKPOINT_FORMAT_COUNT && !known; i++)
        known = nib_ck_formats[i].method && !strcmp(method, nib_ck_formats[i].method);
    if (!known)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s: it is quantized by the method %s, which nib does not read", in->path,
                        nib_quote(method).text);
    const struct nib_ck_layout *saved = &nib_ck_formats[NIB_CHECKPOINT_FORMAT_NIB].layouts[0];
    for (uint32_t i = 0; i < in->n_tensors; i++) {
        const struct nib_ck_tensor *t = &in->tensors[i];
        const bool float8 = t->dtype == NIB_E4M3 || t->dtype == NIB_E5M2 || t->dtype == NIB_E4M3FNUZ ||
                            t->dtype == NIB_E5M2FNUZ || t->dtype == NIB_E2M1;
        char buffer[512];
        if (nib_ck_ends_with(t->name, saved->suffixes[NIB_ROLE_DATA]) && t->weight == NIB_NONE)
            return nib_fail(NIB_ERR_UNSUPPORTED,
                            "%s was saved by the library, but is not a matrix of rowwise NVFP4 with one tensor scale "
                            "and unswizzled block scales",
                            nib_ck_place(in, i, buffer, sizeof buffer));
        if (float8 && t->weight == NIB_NONE)
            return nib_fail(NIB_ERR_UNSUPPORTED,
                            "%s is %s, and nib does not know how it is scaled: it reads NVFP4, MXFP4, and FP8 with "
                            "weight_scale_inv or weight_scale",
                            nib_ck_place(in, i, buffer, sizeof buffer), nib_dtype_name(t->dtype));
        if (nib_ck_ends_with(t->name, NIB_PRE_QUANT_SCALE))
            return nib_fail(NIB_ERR_UNSUPPORTED,
                            "%s: activations must be multiplied by it (AWQ), which other formats cannot express",
                            nib_ck_place(in, i, buffer, sizeof buffer));
    }
    return NIB_OK;
}

/* ---- Options of a quantization ---- */

/* The first version that is still served: 0.2. */
enum { OPTIONS_OLDEST = NIB_UP_TO(nib_quantize_options, n_plain) };

nib_status nib_quantize_options_init_sized(nib_quantize_options *options, size_t bytes)
{
    NIB_REQUIRE(options);
    const nib_quantize_options defaults = { .format = NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS,
                                            .scheme = NIB_SCHEME_NVFP4A16,
                                            .dialect = NIB_UNSET,
                                            .scale_rule = NIB_UNSET,
                                            .tensor_scale_rule = NIB_UNSET,
                                            .min_block_scale = NIB_UNSET,
                                            .fold_exponent = NIB_UNSET,
                                            .damp = NIB_UNSET };
    return nib_struct_init("nib_quantize_options", options, bytes, &defaults, sizeof defaults, OPTIONS_OLDEST);
}

const char *nib_scheme_name(nib_scheme scheme)
{
    static const char *const names[NIB_SCHEME_COUNT] = { "nvfp4a16", "nvfp4" };
    return (unsigned)scheme < NIB_SCHEME_COUNT ? names[scheme] : NULL;
}

const char *nib_activation_name(nib_activation activation)
{
    static const char *const names[NIB_ACTIVATION_COUNT] = { "one", "norm", "file", "statistics" };
    return (unsigned)activation < NIB_ACTIVATION_COUNT ? names[activation] : NULL;
}

const char *nib_preset_name(nib_preset preset)
{
    static const char *const names[NIB_PRESET_COUNT] = { "default", "mlp-only", "experts-only" };
    return (unsigned)preset < NIB_PRESET_COUNT ? names[preset] : NULL;
}

const char *nib_reader_name(nib_reader reader)
{
    static const char *const names[NIB_READER_COUNT] = {
        "any", "vllm", "sglang", "trtllm", "transformers", "llama.cpp"
    };
    return (unsigned)reader < NIB_READER_COUNT ? names[reader] : NULL;
}

const char *nib_scale_rule_name(nib_scale_rule rule)
{
    static const char *const names[NIB_SCALE_RULE_COUNT] = { "rtn", "4over6", "sweep" };
    return (unsigned)rule < NIB_SCALE_RULE_COUNT ? names[rule] : NULL;
}

const char *nib_tensor_scale_rule_name(nib_tensor_scale_rule rule)
{
    static const char *const names[NIB_TENSOR_SCALE_RULE_COUNT] = { "dialect", "exact", "pow2" };
    return (unsigned)rule < NIB_TENSOR_SCALE_RULE_COUNT ? names[rule] : NULL;
}

static nib_status check_options(const nib_quantize_options *o)
{
    char names[128];
    if (!nib_checkpoint_format_written_by(o->format, NIB_ACTION_QUANTIZE))
        return nib_fail(NIB_ERR_ARG, "quantized checkpoints are written as %s",
                        nib_ck_written_names(NIB_ACTION_QUANTIZE, names, sizeof names));
    if ((unsigned)o->scheme >= NIB_SCHEME_COUNT || (unsigned)o->preset >= NIB_PRESET_COUNT ||
        (unsigned)o->activation >= NIB_ACTIVATION_COUNT || (unsigned)o->reader >= NIB_READER_COUNT)
        return nib_fail(NIB_ERR_ARG, "unknown scheme %d, preset %d, activation %d or reader %d", (int)o->scheme,
                        (int)o->preset, (int)o->activation, (int)o->reader);
    if (o->dialect < NIB_UNSET || o->dialect >= NIB_DIALECT_COUNT || o->scale_rule < NIB_UNSET ||
        o->scale_rule >= NIB_SCALE_RULE_COUNT)
        return nib_fail(NIB_ERR_ARG, "unknown dialect %d or scale rule %d", (int)o->dialect, (int)o->scale_rule);
    if (o->tensor_scale_rule != NIB_UNSET && o->tensor_scale_rule != NIB_TENSOR_SCALE_RULE_EXACT &&
        o->tensor_scale_rule != NIB_TENSOR_SCALE_RULE_POW2)
        return nib_fail(NIB_ERR_ARG, "the tensor scale of a checkpoint is exact or a power of two, not rule %d",
                        (int)o->tensor_scale_rule);
    if (o->activation != NIB_ACTIVATION_ONE && o->scheme != NIB_SCHEME_NVFP4)
        return nib_fail(NIB_ERR_MODE,
                        "scales of activations are for the scheme nvfp4: nvfp4a16 leaves activations alone");
    if ((o->activation == NIB_ACTIVATION_FILE) != (o->activation_file != NULL))
        return nib_fail(NIB_ERR_MODE, "an activations file goes with the choice \"file\", and only with it");
    if (o->activation == NIB_ACTIVATION_STATISTICS && !o->statistics)
        return nib_fail(NIB_ERR_MODE, "scales of activations from statistics need a file of them");
    if (o->fold && (!o->statistics || o->format == NIB_CHECKPOINT_FORMAT_GGUF))
        return nib_fail(NIB_ERR_MODE, !o->statistics
                                          ? "folding (--fold) needs a file of statistics (--imatrix)"
                                          : "a folded model is written as a directory, and nib convert makes "
                                            "a GGUF file of it");
    if ((o->fold > NIB_FOLD_SEARCH) || (!o->fold && o->fold_exponent > 0) || o->fold_exponent > 1)
        return nib_fail(NIB_ERR_ARG, "an exponent to fold by is from 0 to 1, and goes with folding");
    if (o->statistics_strict && !o->statistics)
        return nib_fail(NIB_ERR_MODE, "there is no file of statistics that could lack some");
    if (o->gptq &&
        (!o->statistics || (o->scale_rule != NIB_UNSET && o->scale_rule != NIB_SCALE_SWEEP) || o->dialect != NIB_UNSET))
        return nib_fail(NIB_ERR_MODE,
                        "GPTQ (--gptq) chooses codes under the scales of a sweep with statistics (--imatrix)");
    if (!o->gptq && (o->hessians || o->damp >= 0))
        return nib_fail(NIB_ERR_MODE, "Hessians and damping are for GPTQ (--gptq)");
    if (!(o->damp <= FLT_MAX) || (o->damp < 0 && o->damp != NIB_UNSET))
        return nib_fail(NIB_ERR_ARG, "the damping %g is negative or not finite", (double)o->damp);
    if (o->budget != 0 && !(o->budget >= 4.5f && o->budget <= 16))
        return nib_fail(NIB_ERR_ARG, "a budget is from 4.5 bits of a weight, which NVFP4 takes, to 16, not %g",
                        (double)o->budget);
    if ((o->budget > 0 && o->n_fp8 + o->n_plain) || (o->budget_plain && !(o->budget > 0)))
        return nib_fail(NIB_ERR_MODE, "a budget chooses what a list of FP8 or plain weights names: one of the two");
    if (o->budget > 0 && !o->budget_plain && o->format == NIB_CHECKPOINT_FORMAT_GGUF)
        return nib_fail(NIB_ERR_MODE, "GGUF has no FP8: let weights stay as they are (--budget-plain)");
    if ((o->n_ignore && !o->ignore) || (o->n_only && !o->only) || (o->n_fp8 && !o->fp8) || (o->n_plain && !o->plain))
        return nib_fail(NIB_ERR_ARG, "a list of patterns is NULL");
    return NIB_OK;
}

/* What a dialect fixes may be said again, but not otherwise. */
static nib_status check_fixed(const nib_quantize_options *o)
{
    const struct nib_dialect_facts *dialect = &nib_nvfp4_dialects[o->dialect];
    const char *option = NULL, *fixed = NULL;
    if (o->scale_rule != NIB_UNSET && o->scale_rule != NIB_SCALE_RTN)
        option = "the scale rule (--scale)", fixed = "rtn";
    else if (o->tensor_scale_rule == NIB_TENSOR_SCALE_RULE_POW2)
        option = "the tensor scale (--tensor-scale)", fixed = "an exact one";
    else if (o->min_block_scale >= 0 && o->min_block_scale != dialect->min_block_scale)
        option = "the smallest block scale (--min-block-scale)", fixed = "another one";
    return option ? nib_fail(NIB_ERR_MODE, "%s contradicts the dialect %s, which fixes %s: leave one of the two out",
                             option, dialect->name, fixed)
                  : NIB_OK;
}

static nib_status make_quantizer(const nib_quantize_options *o, nib_quantizer *q)
{
    nib_quantizer_init(q);
    q->columnwise = 0;
    if (o->dialect != NIB_UNSET) {
        TRY(check_fixed(o));
        q->dialect = (nib_dialect)o->dialect;
        if (q->dialect == NIB_DIALECT_TE)
            q->tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT;
        return nib_quantizer_check(q, NULL);
    }
    q->scale_rule = o->scale_rule == NIB_UNSET ? NIB_SCALE_SWEEP : (nib_scale_rule)o->scale_rule;
    q->tensor_scale_rule =
        o->tensor_scale_rule == NIB_UNSET ? NIB_TENSOR_SCALE_RULE_POW2 : (nib_tensor_scale_rule)o->tensor_scale_rule;
    q->min_block_scale = o->min_block_scale < 0 ? 0x1p-6f : o->min_block_scale;
    if (q->scale_rule == NIB_SCALE_4OVER6) {
        q->e4m3_max = 256;
        q->error_mode = NIB_ERROR_MSE;
    }
    return nib_quantizer_check(q, NULL);
}

/* Only a sweep chooses by errors that can be weighed; scales of activations go with every rule. */
static nib_status check_statistics(const nib_quantize_options *o, const nib_quantizer *q)
{
    if (!o->statistics || q->scale_rule == NIB_SCALE_SWEEP || (o->activation == NIB_ACTIVATION_STATISTICS && !o->fold))
        return NIB_OK;
    return nib_fail(NIB_ERR_MODE,
                    "statistics (--imatrix) weigh the errors of a sweep, and block scales are to be %s: leave --scale "
                    "and --dialect out, or use them for scales of activations (--activations statistics)",
                    nib_scale_rule_name(q->scale_rule));
}

static json_t *pattern_list(const char *const *patterns, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n && list; i++)
        if (json_array_append_new(list, json_string(patterns[i]))) {
            json_decref(list);
            return NULL;
        }
    return list;
}

/* Provenance is JSON, which has no other text. */
static nib_status check_text(const char *const *patterns, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!nib_utf8_valid(patterns[i]))
            return nib_fail(NIB_ERR_ARG, "the pattern %s is not UTF-8", nib_quote(patterns[i]).text);
    return NIB_OK;
}

static nib_status note_options(nib_plan *plan, const nib_quantize_options *o)
{
    char floor[32];
    TRY(check_text(o->ignore, o->n_ignore));
    TRY(check_text(o->only, o->n_only));
    TRY(check_text(o->fp8, o->n_fp8));
    TRY(check_text(o->plain, o->n_plain));
    /* A dialect other than te has a tensor scale of its own. */
    const nib_tensor_scale_rule rule = o->dialect == NIB_UNSET || o->dialect == NIB_DIALECT_TE
                                           ? plan->q.tensor_scale_rule
                                           : NIB_TENSOR_SCALE_RULE_DIALECT;
    snprintf(floor, sizeof floor, "%a", (double)plan->q.min_block_scale);
    json_t *noted = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:o, s:o}", "format",
                              nib_checkpoint_format_name(o->format), "scheme", nib_scheme_name(o->scheme), "dialect",
                              nib_dialect_name(plan->q.dialect), "scale", nib_scale_rule_name(plan->q.scale_rule),
                              "tensor_scale", nib_tensor_scale_rule_name(rule), "min_block_scale", floor, "activation",
                              nib_activation_name(o->activation), "preset", nib_preset_name(o->preset), "ignore",
                              pattern_list(o->ignore, o->n_ignore), "only", pattern_list(o->only, o->n_only));
    if (!noted)
        return no_memory();
    if ((o->n_fp8 && json_object_set_new(noted, "fp8", pattern_list(o->fp8, o->n_fp8))) ||
        (o->n_plain && json_object_set_new(noted, "plain", pattern_list(o->plain, o->n_plain))) ||
        (o->budget > 0 && json_object_set_new(noted, "budget", json_real((double)o->budget))) ||
        (o->budget_plain && json_object_set_new(noted, "budget_plain", json_true()))) {
        json_decref(noted);
        return no_memory();
    }
    json_decref(plan->options);
    plan->options = noted;
    return NIB_OK;
}

static nib_status start_fold(nib_plan *plan, const nib_quantize_options *o)
{
    const float exponent = o->fold_exponent < 0 ? 0.25f : o->fold_exponent;
    if (!o->fold)
        return NIB_OK;
    plan->fold = nib_plan_memory(plan, sizeof *plan->fold);
    if (!plan->fold)
        return no_memory();
    *plan->fold = (struct nib_plan_fold){ .exponent = exponent, .search = o->fold == NIB_FOLD_SEARCH };
    return NIB_OK;
}

static nib_status read_activations(nib_plan *plan, const nib_quantize_options *o)
{
    enum { LIMIT = 256 << 20 };
    if (o->activation != NIB_ACTIVATION_FILE)
        return NIB_OK;
    char *text;
    size_t bytes;
    TRY(nib_ck_read_text(o->activation_file, LIMIT, &text, &bytes));
    char hash[40];
    const XXH128_hash_t digest = XXH3_128bits(text, bytes);
    snprintf(hash, sizeof hash, "%016llx%016llx", (unsigned long long)digest.high64, (unsigned long long)digest.low64);
    const nib_status status = nib_ck_parse_json(o->activation_file, text, bytes, &plan->amaxes);
    nib_free(text);
    TRY(status);
    if (json_object_set_new(plan->options, "activation_xxh3", json_string(hash)))
        return no_memory();
    if (!json_is_object(plan->amaxes))
        return nib_fail(NIB_ERR_DATA, "%s: it is not a JSON object {\"module\": amax}", o->activation_file);
    return NIB_OK;
}

/* ---- What is quantized ---- */

struct chooser {
    nib_plan *plan;
    const nib_quantize_options *options;
    struct nib_patterns *ignore, *only;
};

/* NULL: nothing speaks against it. */
static nib_status reason_to_keep(const struct chooser *chooser, const struct nib_ck_weight *w, const char **reason)
{
    const nib_quantize_options *o = chooser->options;
    const int64_t multiple = nib_ck_formats[chooser->plan->format].columns;
    uint32_t which;
    bool named = false; /* by its full name: whoever does that means it */
    *reason = NULL;
    if (o->n_only) {
        TRY(nib_patterns_match(chooser->only, w->name, &which));
        if (which == NIB_NONE) {
            *reason = "it is not among those to quantize";
            return NIB_OK;
        }
        named = !strcmp(o->only[which], w->name);
    }
    TRY(nib_patterns_match(chooser->ignore, w->name, &which));
    if (which != NIB_NONE) {
        *reason = nib_plan_string(chooser->plan, "ignored by %s", o->ignore[which]);
        return *reason ? NIB_OK : no_memory();
    }
    bool unit = true;
    *reason = nib_plan_gguf_keep(chooser->plan, w);
    if (*reason)
        TRY(nib_plan_gguf_unit(chooser->plan, w, &unit));
    if (!unit)
        return NIB_OK;
    chooser->plan->rows[w - chooser->plan->in->weights].unit = *reason != NULL;
    *reason = nib_ck_preset_keep(o->preset, w->name);
    if (!*reason && !named)
        *reason = nib_ck_default_keep(chooser->plan->in, w->name);
    if (!*reason)
        *reason = nib_ck_reader_keep(chooser->plan->in, o->reader, o->format, w);
    if (!*reason && w->cols % multiple) {
        *reason = nib_plan_string(chooser->plan, "its %lld columns are not a multiple of %d", (long long)w->cols,
                                  (int)multiple);
        return *reason ? NIB_OK : no_memory();
    }
    return NIB_OK;
}

static nib_status choose(const struct chooser *chooser)
{
    nib_plan *plan = chooser->plan;
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        const struct nib_ck_weight *w = &plan->in->weights[i];
        struct nib_out_row *row = &plan->rows[i];
        const char *reason;
        if (nib_ck_is_nvfp4(w->format))
            return nib_fail(NIB_ERR_UNSUPPORTED,
                            "%s: weight %s is NVFP4 already: nib convert writes it in another format, nib dequantize "
                            "gives plain values",
                            plan->in->path, nib_quote(w->name).text);
        TRY(reason_to_keep(chooser, w, &reason));
        row->action = reason ? nib_plan_keep_action(plan, w) : NIB_ACTION_QUANTIZE;
        row->reason = reason ? reason : "";
    }
    return NIB_OK;
}

/* ---- What is no weight ---- */

static const char *other_reason(const nib_checkpoint *in, const struct nib_ck_tensor *t)
{
    char module[1024];
    snprintf(module, sizeof module, "%s", t->name);
    if (nib_ck_ends_with(module, ".weight"))
        module[strlen(module) - strlen(".weight")] = 0;
    const char *reason = nib_ck_default_keep(in, module);
    if (reason)
        return reason;
    if (!(NIB_FLOAT_BITS & NIB_DTYPE_BIT(t->dtype)))
        return "it has no values of BF16, F16 or F32";
    if (t->bytes == 0)
        return "it has no elements";
    if (nib_ck_ends_with(t->name, "bias"))
        return "a bias";
    return t->rank == 2 ? "it is not called a module's weight"
                        : "it has more than two dims and is no stack of experts that nib knows";
}

/* Whatever has two dims or more could have been a weight: it is told of. */
static nib_status list_others(nib_plan *plan)
{
    const nib_checkpoint *in = plan->in;
    plan->others = nib_alloc((in->n_tensors + 1) * sizeof *plan->others);
    if (!plan->others)
        return no_memory();
    for (uint32_t i = 0; i < in->n_tensors; i++)
        if (in->tensors[i].rank >= 2 && in->tensors[i].weight == NIB_NONE)
            plan->others[plan->n_others++] = (struct nib_out_other){ i, other_reason(in, &in->tensors[i]) };
    return NIB_OK;
}

static nib_status check_reader(const nib_checkpoint *in, nib_reader reader)
{
    const char *what = nib_ck_reader_rejects(in, reader);
    return what ? nib_fail(
                      NIB_ERR_UNSUPPORTED,
                      "%s: %s cannot load it with NVFP4 weights, and would compute garbage without an error: it has "
                      "%s; leave --for out for vLLM",
                      in->path, nib_reader_name(reader), what)
                : NIB_OK;
}

/* README names transformers among the readers of compressed-tensors: what it cannot do is said. */
static void note_readers(nib_plan *plan, const nib_quantize_options *o)
{
    if (o->format != NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS || o->reader != NIB_READER_ANY)
        return;
    if (nib_ck_reader_rejects(plan->in, NIB_READER_TRANSFORMERS)) {
        plan->note =
            "vLLM loads this; transformers would load it without an error and compute garbage: it has no way to "
            "load this model with NVFP4 weights";
        return;
    }
    for (size_t i = 0; i < plan->in->n_weights; i++)
        if (plan->rows[i].action == NIB_ACTION_QUANTIZE &&
            nib_ck_reader_keep(plan->in, NIB_READER_TRANSFORMERS, o->format, &plan->in->weights[i])) {
            plan->note = "vLLM loads this; transformers would load it without an error and compute garbage, since it "
                         "drops the tensor scales of packed experts: for transformers use --for transformers, which "
                         "keeps experts as they are";
            return;
        }
}

nib_status nib_plan_quantize(const nib_checkpoint *in, const nib_quantize_options *options, nib_plan **out)
{
    NIB_REQUIRE(in);
    NIB_REQUIRE(out);
    nib_quantize_options known;
    nib_quantize_options_init(&known);
    if (options)
        TRY(nib_struct_read("nib_quantize_options", options, &known, sizeof known, OPTIONS_OLDEST));
    const nib_quantize_options *o = &known;
    TRY(check_options(o));
    TRY(check_source(in));
    TRY(check_reader(in, o->reader));
    nib_quantizer q;
    TRY(make_quantizer(o, &q));
    TRY(check_statistics(o, &q));
    nib_plan *plan;
    TRY(nib_plan_start(in, "quantize", o->format, o->format == NIB_CHECKPOINT_FORMAT_GGUF, &plan));
    plan->q = q;
    plan->scheme = o->scheme;
    plan->activation = o->activation;
    plan->shard_bytes = o->shard_bytes ? o->shard_bytes : NIB_SHARD_BYTES;
    plan->keep_split = o->keep_split;
    plan->statistics_strict = o->statistics_strict;
    plan->budget = o->budget;
    plan->budget_plain = o->budget_plain;
    struct chooser chooser = { .plan = plan, .options = o };
    nib_status status = nib_plan_place(plan);
    if (!status)
        status = note_options(plan, o);
    if (!status)
        status = read_activations(plan, o);
    if (!status && o->statistics)
        status = nib_plan_open_statistics(plan, o->statistics);
    if (!status)
        status = start_fold(plan, o);
    if (!status && o->gptq)
        status = nib_plan_open_hessians(plan, o->statistics, o->hessians, o->damp);
    if (!status && o->codes)
        status = nib_plan_open_codes(plan, o->codes);
    if (!status)
        status = nib_patterns_create(o->ignore, o->n_ignore, &chooser.ignore);
    if (!status)
        status = nib_patterns_create(o->only, o->n_only, &chooser.only);
    if (!status)
        status = nib_plan_check_patterns(in, "only", o->only, o->n_only, false);
    if (!status)
        status = nib_plan_check_patterns(in, "ignore", o->ignore, o->n_ignore, true);
    if (!status)
        status = choose(&chooser);
    if (!status)
        status = nib_plan_raise(plan, true, o->plain, o->n_plain);
    if (!status)
        status = nib_plan_raise(plan, false, o->fp8, o->n_fp8);
    if (!status)
        status = list_others(plan);
    if (!status)
        note_readers(plan, o);
    nib_patterns_destroy(chooser.ignore);
    nib_patterns_destroy(chooser.only);
    return finish(plan, status, out);
}

/* ---- Converting ---- */

static nib_status check_conversion(const nib_plan *plan, const struct nib_ck_weight *w)
{
    const int64_t multiple = nib_ck_formats[plan->format].columns;
    if (w->cols % multiple)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "%s: weight %s has %lld columns, and %s needs a multiple of %d: dequantize the checkpoint and "
                        "quantize it again",
                        plan->in->path, nib_quote(w->name).text, (long long)w->cols,
                        nib_checkpoint_format_name(plan->format), (int)multiple);
    return NIB_OK;
}

static nib_status choose_conversions(nib_plan *plan)
{
    size_t converted = 0;
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        const struct nib_ck_weight *w = &plan->in->weights[i];
        if (!nib_ck_is_nvfp4(w->format)) {
            if (w->format != NIB_CHECKPOINT_FORMAT_PLAIN)
                return nib_fail(
                    NIB_ERR_UNSUPPORTED,
                    "%s: weight %s is %s, which nib convert cannot carry over: quantize the checkpoint instead",
                    plan->in->path, nib_quote(w->name).text, nib_checkpoint_format_name(w->format));
            continue;
        }
        const char *reason = nib_plan_gguf_keep(plan, w);
        if (reason) {
            plan->rows[i].action = NIB_ACTION_DEQUANTIZE;
            plan->rows[i].reason = reason;
            continue;
        }
        TRY(check_conversion(plan, w));
        plan->rows[i].action = NIB_ACTION_CONVERT;
        if (w->tensor[NIB_ROLE_INPUT] != NIB_NONE)
            plan->scheme = NIB_SCHEME_NVFP4;
        converted++;
    }
    return converted ? NIB_OK
                     : nib_fail(NIB_ERR_UNSUPPORTED, "%s: it has no NVFP4 weight to convert: nib quantize makes them",
                                plan->in->path);
}

nib_status nib_plan_convert(const nib_checkpoint *in, nib_checkpoint_format format, nib_plan **out)
{
    NIB_REQUIRE(in);
    NIB_REQUIRE(out);
    char names[128];
    if (!nib_checkpoint_format_written_by(format, NIB_ACTION_CONVERT))
        return nib_fail(NIB_ERR_ARG, "conversions are to %s",
                        nib_ck_written_names(NIB_ACTION_CONVERT, names, sizeof names));
    if (in->format == format)
        return nib_fail(NIB_ERR_MODE, "%s: it is %s already", in->path, nib_checkpoint_format_name(format));
    TRY(check_source(in));
    nib_plan *plan;
    TRY(nib_plan_start(in, "convert", format, format == NIB_CHECKPOINT_FORMAT_GGUF, &plan));
    nib_status status = nib_plan_place(plan);
    if (!status)
        status = choose_conversions(plan);
    if (!status && json_object_set_new(plan->options, "format", json_string(nib_checkpoint_format_name(format))))
        status = no_memory();
    return finish(plan, status, out);
}

/* ---- Dequantizing ---- */

nib_status nib_plan_dequantize(const nib_checkpoint *in, nib_checkpoint_format format, nib_dtype dtype, nib_plan **out)
{
    NIB_REQUIRE(in);
    NIB_REQUIRE(out);
    char names[128];
    if (!nib_checkpoint_format_written_by(format, NIB_ACTION_DEQUANTIZE))
        return nib_fail(NIB_ERR_ARG, "dequantized checkpoints are written as %s",
                        nib_ck_written_names(NIB_ACTION_DEQUANTIZE, names, sizeof names));
    if (dtype != NIB_F32 && dtype != NIB_BF16 && dtype != NIB_F16 && dtype != NIB_DTYPE_COUNT)
        return nib_fail(NIB_ERR_DTYPE, "plain weights are F32, BF16 or F16");
    TRY(check_source(in));
    nib_plan *plan;
    TRY(nib_plan_start(in, "dequantize", NIB_CHECKPOINT_FORMAT_PLAIN, format == NIB_CHECKPOINT_FORMAT_GGUF, &plan));
    plan->dequantized_dtype = dtype;
    nib_status status = nib_plan_place(plan);
    for (size_t i = 0; i < in->n_weights; i++) {
        if (in->weights[i].format == NIB_CHECKPOINT_FORMAT_PLAIN)
            plan->rows[i].reason = "it is plain already";
        else
            plan->rows[i].action = NIB_ACTION_DEQUANTIZE;
    }
    const char *name = dtype == NIB_DTYPE_COUNT ? "own" : nib_dtype_name(dtype);
    if (!status && json_object_set_new(plan->options, "dtype", json_string(name)))
        status = no_memory();
    return finish(plan, status, out);
}
