/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inspect.c - nib inspect: what is in a checkpoint, of whatever checkpoint format.
 *
 * Weights are listed with their sizes and, where they are NVFP4, with what their scales and codes look like, which takes
 * a pass over the data. A weight that cannot be read is told of and does not keep the others from being listed.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "nib_checkpoint.h"
#include "progress.h"
#include "nib_reference.h"
#include "text.h"

struct inspection {
    bool json, tensors, quick, quiet;
    int32_t threads;
    const nib_checkpoint *checkpoint;
    nib_checkpoint_facts facts;
    json_t *weights, *list; /* with --json */
    uint64_t bytes[NIB_CHECKPOINT_FORMAT_COUNT], elements[NIB_CHECKPOINT_FORMAT_COUNT], stored;
    size_t counts[NIB_CHECKPOINT_FORMAT_COUNT], unreadable;
    bool incomplete;
    struct progress progress;
    nib_job job;
};

/* What the histograms of a weight say. */
struct summary {
    bool known;
    float least, most; /* block scales, of those that are neither 0 nor NaN */
    double zeros;      /* share of codes */
    double small;      /* share of blocks with a scale below 2^-6 */
};

static float scale_value(int code)
{
    const uint8_t byte = (uint8_t)code;
    float value = 0;
    (void)nib_decode(NIB_E4M3, &byte, 1, &value);
    return value;
}

static struct summary summarize(const nib_weight_stats *stats)
{
    struct summary s = { .known = stats->blocks > 0 && stats->elements > 0 };
    if (!s.known)
        return s;
    int least = 0, most = 0;
    int64_t small = 0;
    for (int i = 1; i < 0x7F; i++)
        if (stats->scales[i]) {
            least = least ? least : i;
            most = i;
        }
    for (int i = 0; i < 8; i++)
        small += stats->scales[i];
    s.least = scale_value(least);
    s.most = scale_value(most);
    s.zeros = (double)(stats->codes[0] + stats->codes[8]) / (double)stats->elements;
    s.small = (double)small / (double)stats->blocks;
    return s;
}

static bool is_coded(const nib_weight *w) { return w->tensor_scale_kind != NIB_TENSOR_SCALE_NONE; }

static void print_weight(struct inspection *in, const nib_weight *w, const struct summary *s)
{
    char size[16], shape[48], tensor_scale[24] = "", scales[48] = "", shares[48] = "";
    snprintf(shape, sizeof shape, "%" PRId64 "x%" PRId64, w->rows, w->cols);
    if (is_coded(w))
        snprintf(tensor_scale, sizeof tensor_scale, "%.6g", (double)w->tensor_scale);
    if (s->known) {
        snprintf(scales, sizeof scales, "%.4g..%g", (double)s->least, (double)s->most);
        snprintf(shares, sizeof shares, "%5.1f%% %6.2f%%", 100 * s->zeros, 100 * s->small);
    }
    progress_end(&in->progress);
    cli_print("%-18s %9s %6.2f %-18s %12s %-14s %14s  %s", shape, text_bytes(w->stored_bytes, size, sizeof size),
              text_bits(w->stored_bytes, (uint64_t)(w->rows * w->cols)), nib_checkpoint_format_name(w->format),
              tensor_scale, scales, shares, w->name);
}

static void add(struct inspection *in, json_t *list, json_t *object)
{
    if (!object || json_array_append_new(list, object) != 0)
        in->incomplete = true;
}

static void add_weight(struct inspection *in, const nib_weight *w, const struct summary *s,
                       const nib_weight_stats *stats)
{
    static const char *const kinds[NIB_TENSOR_SCALE_COUNT] = { "amax", "multiplier", "divisor", "none" };
    json_t *object = json_pack("{s:o, s:s, s:[II], s:I, s:o, s:o, s:o}", "name", text_json(w->name), "format",
                               nib_checkpoint_format_name(w->format), "shape", (json_int_t)w->rows, (json_int_t)w->cols,
                               "bytes", (json_int_t)w->stored_bytes, "bits_per_weight",
                               text_number(text_bits(w->stored_bytes, (uint64_t)(w->rows * w->cols))), "tensor",
                               text_json(w->tensor), "file", text_json(w->file));
    if (object && is_coded(w)) {
        json_object_set_new(object, "tensor_scale_kind", json_string(kinds[w->tensor_scale_kind]));
        json_object_set_new(object, "tensor_scale", text_number((double)w->tensor_scale));
        if (w->has_input_scale)
            json_object_set_new(object, "input_scale", text_number((double)w->input_scale));
    }
    if (object && s->known) {
        json_t *scales = json_array(), *codes = json_array();
        for (int i = 0; i < 256; i++)
            json_array_append_new(scales, json_integer(stats->scales[i]));
        for (int i = 0; i < 16; i++)
            json_array_append_new(codes, json_integer(stats->codes[i]));
        json_object_set_new(object, "amax", text_number(stats->amax));
        json_object_set_new(object, "least_scale", text_number((double)s->least));
        json_object_set_new(object, "largest_scale", text_number((double)s->most));
        json_object_set_new(object, "zero_codes", text_number(s->zeros));
        json_object_set_new(object, "small_scales", text_number(s->small));
        json_object_set_new(object, "scale_counts", scales);
        json_object_set_new(object, "code_counts", codes);
    }
    add(in, in->weights, object);
}

static nib_status inspect_weight(struct inspection *in, size_t i)
{
    nib_weight w = { .bytes = sizeof w };
    nib_weight_stats stats = { .bytes = sizeof stats };
    nib_status status = nib_checkpoint_get_weight(in->checkpoint, i, &w);
    if (!status && is_coded(&w) && !in->quick)
        status = nib_checkpoint_measure(in->checkpoint, i, in->checkpoint, i, &in->job, &stats);
    if (status == NIB_ERR_DATA) {
        in->unreadable++;
        progress_end(&in->progress);
        cli_error("inspect: %s", nib_last_error());
        return NIB_OK;
    }
    if (status)
        return status;
    const struct summary s = summarize(&stats);
    in->counts[w.format]++;
    in->bytes[w.format] += w.stored_bytes;
    in->elements[w.format] += (uint64_t)(w.rows * w.cols);
    if (in->json)
        add_weight(in, &w, &s, &stats);
    else if (!in->tensors && !in->quiet)
        print_weight(in, &w, &s);
    return NIB_OK;
}

static nib_status inspect_tensor(struct inspection *in, size_t i)
{
    nib_checkpoint_tensor t = { .bytes = sizeof t };
    const nib_status status = nib_checkpoint_get_tensor(in->checkpoint, i, &t);
    if (status)
        return status;
    if (in->json) {
        json_t *shape = json_array();
        for (int64_t d = 0; d < t.rank; d++)
            json_array_append_new(shape, json_integer(t.shape[d]));
        add(in, in->list,
            json_pack("{s:o, s:s, s:o, s:I, s:o}", "name", text_json(t.name), "dtype", t.dtype, "shape", shape, "bytes",
                      (json_int_t)t.stored_bytes, "file", text_json(t.file)));
    } else if (in->tensors && !in->quiet) {
        char shape[128] = "", size[16];
        size_t used = 0;
        for (int64_t d = 0; d < t.rank && used < sizeof shape; d++)
            used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%" PRId64, d ? "x" : "", t.shape[d]);
        cli_print("%-18s %9s %-9s %-34s %s", t.rank ? shape : "scalar", text_bytes(t.stored_bytes, size, sizeof size),
                  t.dtype, t.file, t.name);
    }
    return NIB_OK;
}

static nib_status inspect_all(struct inspection *in)
{
    if (!in->json && !in->quiet && in->tensors)
        cli_print("%-18s %9s %-9s %-34s %s", "shape", "size", "dtype", "file", "tensor");
    else if (!in->json && !in->quiet)
        cli_print("%-18s %9s %6s %-18s %12s %-14s %14s  %s", "shape", "size", "bits", "format", "tensor scale",
                  "scales", "zeros   small", "weight");
    nib_status status = NIB_OK;
    for (size_t i = 0; !status && i < in->facts.weights; i++)
        status = inspect_weight(in, i);
    for (size_t i = 0; !status && i < in->facts.tensors; i++)
        status = inspect_tensor(in, i);
    progress_end(&in->progress);
    return status;
}

static void print_totals(const struct inspection *in)
{
    char size[16];
    uint64_t stored = 0;
    cli_print("%s: %s%s%s, %zu file%s, %zu tensors, %s", in->facts.path, nib_checkpoint_format_name(in->facts.format),
              *in->facts.model_type ? ", " : "", in->facts.model_type, in->facts.files, in->facts.files == 1 ? "" : "s",
              in->facts.tensors, text_bytes(in->facts.tensor_bytes, size, sizeof size));
    for (int p = 0; p < NIB_CHECKPOINT_FORMAT_COUNT; p++)
        if (in->counts[p]) {
            stored += in->bytes[p];
            cli_print("  %-18s %zu weights of %.4g million values, %s, %.2f bits a value",
                      nib_checkpoint_format_name((nib_checkpoint_format)p), in->counts[p],
                      (double)in->elements[p] * 1e-6, text_bytes(in->bytes[p], size, sizeof size),
                      text_bits(in->bytes[p], in->elements[p]));
        }
    cli_print("  %-18s %s", "everything else", text_bytes(in->facts.tensor_bytes - stored, size, sizeof size));
    cli_print("  %-18s %.4g million values, %.2f bits a value", "the whole model", (double)in->facts.elements * 1e-6,
              text_bits(in->facts.tensor_bytes, in->facts.elements));
    if (in->facts.provenance)
        cli_print("  made by            %.2000s", in->facts.provenance);
}

static bool print_json(const struct inspection *in)
{
    json_t *provenance = in->facts.provenance ? json_loads(in->facts.provenance, 0, NULL) : json_null();
    json_t *fields =
        json_pack("{s:o, s:s, s:o, s:I, s:I, s:I, s:I, s:o, s:I, s:o, s:O, s:O}", "path", text_json(in->facts.path),
                  "format", nib_checkpoint_format_name(in->facts.format), "model_type", text_json(in->facts.model_type),
                  "files", (json_int_t)in->facts.files, "tensor_bytes", (json_int_t)in->facts.tensor_bytes,
                  "weight_elements", (json_int_t)in->facts.weight_elements, "elements", (json_int_t)in->facts.elements,
                  "bits_per_weight", text_number(text_bits(in->facts.tensor_bytes, in->facts.elements)), "unreadable",
                  (json_int_t)in->unreadable, "provenance", provenance ? provenance : text_json(in->facts.provenance),
                  "weights", in->weights, "tensors", in->list);
    json_t *report = text_report("inspect", fields);
    if (in->incomplete) {
        json_decref(report);
        report = NULL;
    }
    const bool good = text_print(report);
    if (!good)
        cli_error("inspect: no memory for the report");
    return good;
}

static enum cli_exit inspect(struct inspection *in, const char *path)
{
    nib_checkpoint *checkpoint;
    if (nib_checkpoint_open(path, &checkpoint)) {
        cli_error("inspect: %s", nib_last_error());
        return CLI_FAILED;
    }
    in->checkpoint = checkpoint;
    in->facts.bytes = sizeof in->facts;
    in->weights = json_array();
    in->list = json_array();
    progress_begin(&in->progress, &in->job, in->threads, in->json || in->quiet);
    enum cli_exit result = CLI_FAILED;
    if (!in->weights || !in->list) {
        cli_error("inspect: no memory for the report");
    } else if (nib_checkpoint_get_facts(checkpoint, &in->facts) || inspect_all(in)) {
        cli_error("inspect: %s", nib_last_error());
    } else {
        result = in->unreadable ? CLI_NO : CLI_FINE;
        if (!in->json)
            print_totals(in);
        else if (!print_json(in))
            result = CLI_FAILED;
    }
    json_decref(in->weights);
    json_decref(in->list);
    nib_checkpoint_close(checkpoint);
    return result;
}

static enum cli_exit run_inspect(const struct cli_command *self, int argc, char **argv)
{
    struct inspection in = { 0 };
    const struct cli_option options[] = {
        { 0, "tensors", CLI_FLAG, &in.tensors, NULL, "list the tensors of the files instead of weights", 0, 0 },
        { 0, "quick", CLI_FLAG, &in.quick, NULL, "read headers only: no scales, no shares", 0, 0 },
        { 0, "json", CLI_FLAG, &in.json, NULL, "print a report in JSON, weights and tensors", 0, 0 },
        { 'q', "quiet", CLI_FLAG, &in.quiet, NULL, "print the totals only", 0, 0 },
        { 't', "threads", CLI_NUMBER, &in.threads, "N", "use N threads; 0: one for each processor", 0, 4096 },
        { 0 },
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, options, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    if (argc - first != 1) {
        cli_error("inspect: takes one directory or file, not %d", argc - first);
        return CLI_FAILED;
    }
    const struct sandbox_path path = { argv[first], SANDBOX_CHECKPOINT };
    if (!cli_confine(self, &path, 1))
        return CLI_FAILED;
    in.quick |= in.tensors && !in.json;
    return inspect(&in, argv[first]);
}

const struct cli_command cli_inspect = {
    "inspect", "PATH", "list what is in a checkpoint: weights, sizes, scales",
    "List the weights of a safetensors directory, a safetensors file or a GGUF file: shape,\n"
    "size, bits a value, checkpoint format; of NVFP4 weights the tensor scale, the\n"
    "least and the largest block scale, how many codes are zero and how many blocks have\n"
    "a scale below 2^-6. Totals come last.\n"
    "\n"
    "  nib inspect Qwen3-8B-NVFP4\n"
    "  nib inspect --tensors model.safetensors\n"
    "  nib inspect --json Qwen3-8B-NVFP4 | jq '.weights[] | select(.largest_scale < 224).name'\n",
    run_inspect
};
