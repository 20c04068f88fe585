/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_beside.c - any bytes as a file that lies beside weights, by the first byte: amaxes of activations, scales of a
 * fold, what a run that was stopped left (its state, a note of its scan, its output), and tokens and templates in files
 * of their own. Rejected with a message, or the plan, the comparison or the run is one: a run that was resumed has the
 * bytes of one that was not, unless a note of the same file told it other amaxes.
 */
#define _GNU_SOURCE
#include <stdbool.h>

#include "base/os.h"
#include "nib_checkpoint.h"
#include "fuzz_directory.h"

enum { K = 16, MOST = 1 << 16 };
#define LAYER "model.layers.0."
static const struct put_tensor model[] = {
    { "model.embed_tokens.weight", NIB_BF16, 2, { 8, K }, 0x3c },
    { "model.norm.weight", NIB_F32, 1, { K }, 0x3f },
    { LAYER "input_layernorm.weight", NIB_F32, 1, { K }, 0x3f },
    { LAYER "self_attn.q_proj.weight", NIB_BF16, 2, { K, K }, 0x3c },
    { LAYER "self_attn.k_proj.weight", NIB_BF16, 2, { K, K }, 0x3b },
    { LAYER "mlp.down_proj.weight", NIB_BF16, 2, { K, K }, 0x3d },
};
static const char config[] =
    "{\"model_type\": \"llama\", \"hidden_size\": 16, \"intermediate_size\": 16, \"num_hidden_layers\": 1, "
    "\"num_attention_heads\": 1, \"num_key_value_heads\": 1, \"vocab_size\": 8, \"max_position_embeddings\": 64}";
static const char tokenizer[] =
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\"]}, "
    "\"pre_tokenizer\": {\"type\": \"ByteLevel\"}}";

static const char *place, *folded, *out; /* a plain model, the same quantized, and where runs are resumed */
static nib_checkpoint *plain;

struct bytes {
    char data[MOST];
    size_t count;
};
static struct bytes state, note, whole; /* of a run that was stopped, and the tensors of one that was not */

/* ---- Runs ---- */

static void get_file(const char *directory, const char *name, struct bytes *to)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "rb");
    require(file != NULL, name);
    to->count = fread(to->data, 1, sizeof to->data - 1, file);
    to->data[to->count] = 0;
    fclose(file);
}

static nib_status plan_with(const char *amaxes, nib_plan **plan)
{
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    if (amaxes) {
        options.scheme = NIB_SCHEME_NVFP4;
        options.activation = NIB_ACTIVATION_FILE;
        options.activation_file = amaxes;
    }
    return nib_plan_quantize(plain, &options, plan);
}

static int stop_writing(void *context, const nib_progress *progress)
{
    (void)context;
    return !strcmp(progress->phase, "quantizing");
}

static nib_status run(const nib_plan *plan, const char *to, bool force, bool stopped)
{
    const nib_run_options options = { .bytes = sizeof options, .resume = 1, .force = force };
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    job.progress = stopped ? stop_writing : NULL;
    return nib_plan_run(plan, to, &options, &job);
}

static void fill_directories(void)
{
    char partial[128];
    nib_plan *plan = NULL;
    place = make_directory();
    folded = make_directory();
    out = make_directory();
    put_tensors(place, "model.safetensors", model, sizeof model / sizeof *model);
    put_file(place, "config.json", config, strlen(config));
    put_file(place, "tokenizer.json", tokenizer, strlen(tokenizer));
    require(!nib_checkpoint_open(place, &plain) && !plan_with(NULL, &plan), "a good model");
    require(!run(plan, folded, true, false), "a run");
    require(run(plan, out, true, true) == NIB_ERR_CANCELLED, "a run that is stopped");
    nib_plan_destroy(plan);
    get_file(folded, "model.safetensors", &whole);
    snprintf(partial, sizeof partial, "%s/.nib-partial", out);
    get_file(partial, "state.json", &state);
    get_file(partial, "scan-00000.json", &note);
    require(strstr(note.data, "\"xxh3\"") != NULL, "a note");
}

/* ---- Files that plans and comparisons read ---- */

static void try_amaxes(const uint8_t *bytes, size_t count)
{
    char path[128];
    nib_plan *plan = NULL;
    snprintf(path, sizeof path, "%s/amaxes", out);
    put_file(out, "amaxes", bytes, count);
    const nib_status status = plan_with(path, &plan);
    walk_plan(status, plan);
    require(!status || strlen(nib_last_error()) > 10, "the message of a plan");
    unlink(path);
}

static void try_scales(const uint8_t *bytes, size_t count)
{
    nib_checkpoint *c = NULL;
    put_file(folded, "nib-fold.scales", bytes, count);
    const nib_status status = nib_checkpoint_open(folded, &c);
    require(known(status) && !status == (c != NULL) && (c || *nib_last_error()), "scales of a fold");
    nib_checkpoint_facts facts = { .bytes = sizeof facts };
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    require(!c || !nib_checkpoint_get_facts(c, &facts), "facts");
    for (size_t i = 0; i < facts.weights; i++) {
        nib_weight w = { .bytes = sizeof w };
        nib_weight_stats stats = { .bytes = sizeof stats };
        size_t other = 0;
        require(!nib_checkpoint_get_weight(c, i, &w) && !nib_checkpoint_find_weight(plain, w.name, &other), "a weight");
        require(known(nib_checkpoint_measure(plain, other, c, i, &job, &stats)), "measuring");
    }
    if (c)
        require(known(nib_checkpoint_check(c, plain, &job, look_at_finding, NULL)), "a check");
    nib_checkpoint_close(c);
}

static void try_gguf(const char *name, const uint8_t *bytes, size_t count)
{
    char path[128];
    nib_plan *plan = NULL;
    put_file(place, name, bytes, count);
    const nib_status status = nib_plan_dequantize(plain, NIB_CHECKPOINT_FORMAT_GGUF, NIB_F32, &plan);
    walk_plan(status, plan);
    snprintf(path, sizeof path, "%s/%s", place, name);
    unlink(path);
}

/* ---- What a run left ---- */

enum left { STATE, NOTE, NOTE_OF_THE_SAME, OUTPUT };

/* The directory of a run that was stopped, with these bytes instead of one of its files. */
static void leave(const char *partial, enum left what, const uint8_t *bytes, size_t count)
{
    static char joined[2 * MOST];
    const size_t same = (size_t)(strstr(note.data, "\"xxh3\"") - note.data); /* all before says which file it is of */
    require(!nib_os_remove_directory(partial), "nothing left");
    if (what == OUTPUT) {
        put_file(out, "model.safetensors", bytes, count);
        return;
    }
    require(!nib_os_make_directory(partial, NULL), "a directory");
    put_file(partial, "state.json", what == STATE ? (const void *)bytes : state.data,
             what == STATE ? count : state.count);
    count = count < MOST ? count : MOST;
    memcpy(joined, note.data, same);
    memcpy(joined + same, bytes, count);
    if (what == NOTE)
        put_file(partial, "scan-00000.json", bytes, count);
    else if (what == NOTE_OF_THE_SAME)
        put_file(partial, "scan-00000.json", joined, same + count);
}

static void try_resume(enum left what, bool force, const uint8_t *bytes, size_t count)
{
    char partial[128], path[128];
    static struct bytes written;
    nib_plan *plan = NULL;
    snprintf(partial, sizeof partial, "%s/.nib-partial", out);
    snprintf(path, sizeof path, "%s/model.safetensors", out);
    unlink(path);
    leave(partial, what, bytes, count);
    require(!plan_with(NULL, &plan), "a plan");
    const nib_status status = run(plan, out, force, false);
    require(known(status) && (!status || strstr(nib_last_error(), "nib-fuzz")), "the status of a resumed run");
    if (!status && what != NOTE_OF_THE_SAME && what != OUTPUT) {
        get_file(out, "model.safetensors", &written);
        require(written.count == whole.count && !memcmp(written.data, whole.data, whole.count),
                "bytes of a resumed run");
    }
    nib_plan_destroy(plan);
    require(!nib_os_remove_directory(partial), "nothing left");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char *const names[] = { "added_tokens.json", "chat_template.json" };
    if (!place)
        fill_directories();
    if (count == 0)
        return 0;
    const int kind = bytes[0] % 8;
    if (kind == 0)
        try_amaxes(bytes + 1, count - 1);
    else if (kind == 1)
        try_scales(bytes + 1, count - 1);
    else if (kind < 4)
        try_gguf(names[kind - 2], bytes + 1, count - 1);
    else
        try_resume((enum left)(kind - 4), bytes[0] / 8 % 2, bytes + 1, count - 1);
    return 0;
}
