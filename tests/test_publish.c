/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_publish.c - outputs and power cuts: whatever a power cut leaves after any step of any run, of one that goes on
 * after a kill too, a final name has a complete and synced file, an output that is not complete does not look as if it
 * were, and either the old output is there or the new one can be had.
 *
 * NIB_TEST_WRAP_FILES
 */
#define _GNU_SOURCE
#include "test_weights.h"
#include "test_trace.h"

#include "io/checkpoint.h"
#include "io/gguf.h"
#include "base/os.h"

#define INDEX "model.safetensors.index.json"

static bool ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

/* ---- What a power cut may leave ---- */

enum { MOST_FINALS = 16 };

struct publish {
    const char *what;
    bool as_file;
    int kill;         /* the step at which the first run ended; -1: none */
    int dir, partial; /* where the final names are, and the name of what is kept beside them */
    const char *name; /* of the output */
    int complete;     /* the file that says that all is there; -1: none */
    int n;
    struct trace_entry finals[MOST_FINALS];
};

static int name_of(const char *name) { return trace_name(name, strlen(name)); }

static int file_at(const struct trace_tree *tree, int dir, const char *name)
{
    return dir < 0 ? -1 : trace_find(tree, (struct trace_place){ dir, name_of(name) });
}

static bool is_configuration(const char *name)
{
    return !strcmp(name, INDEX) || !strcmp(name, "config.json") || !strcmp(name, "hf_quant_config.json");
}

#define RULE(condition, ...) \
    CHECK_THAT(condition, "%s, killed at %d: a cut after %s: %s", p->what, p->kill, trace_words(step), __VA_ARGS__)

/* Whether the new file of that name is where it belongs. A writer that was killed may have put one there before. */
static bool is_there(const struct publish *p, const struct trace_tree *tree, int i)
{
    const int file = trace_find(tree, p->finals[i].place);
    return p->complete < 0 ? file >= 0 : file == p->finals[i].file;
}

/* Whether it waits for its name. Of an earlier run only the names are known. */
static bool is_staged(const struct publish *p, const struct trace_tree *tree, int i, int staged, int complete)
{
    for (int j = 0; j < tree->n; j++)
        if (tree->entries[j].place.dir == staged &&
            (complete == p->complete ? tree->entries[j].file == p->finals[i].file
                                     : tree->entries[j].place.name == p->finals[i].place.name))
            return true;
    return complete != p->complete && trace_find(tree, p->finals[i].place) >= 0;
}

/* No name but a temporary one before the data is on disk. A lock has none. */
static void check_synced(const struct publish *p, const struct trace_tree *tree, int step)
{
    for (int i = 0; i < tree->n; i++) {
        const char *name = trace_names[tree->entries[i].place.name];
        if (trace_unsynced[tree->entries[i].file] && !strstr(name, ".tmp-") && strcmp(name, "lock") != 0)
            RULE(false, name);
    }
}

/* What names other files comes after them, and never stands beside files of another output. */
static void check_order(const struct publish *p, const struct trace_tree *tree, int step)
{
    bool shards = true, all = true, any = false, old = false;
    for (int i = 0; i < p->n; i++) {
        const char *name = trace_names[p->finals[i].place.name];
        const bool there = is_there(p, tree, i);
        all &= there || !strcmp(name, "config.json");
        shards &= there || !ends_with(name, ".safetensors");
        any |= there && trace_find(&trace_before, p->finals[i].place) != p->finals[i].file;
    }
    for (int i = 0; i < p->n; i++) {
        const char *name = trace_names[p->finals[i].place.name];
        RULE(shards || strcmp(name, INDEX) != 0 || !is_there(p, tree, i), "the index before the shards");
        RULE(all || strcmp(name, "config.json") != 0 || !is_there(p, tree, i), "the configuration before the rest");
    }
    for (int i = 0; i < trace_before.n; i++) {
        const struct trace_entry *entry = &trace_before.entries[i];
        old |= entry->place.dir == p->dir && is_configuration(trace_names[entry->place.name]) &&
               file_at(&trace_now, p->dir, trace_names[entry->place.name]) != entry->file &&
               trace_find(tree, entry->place) == entry->file;
    }
    RULE(!old || !any, "the old configuration beside new files");
}

/* All of the new output, or all that it takes to go on, or all of the old one. */
static void check_recovery(const struct publish *p, const struct trace_tree *tree, int step)
{
    const bool reached = p->dir == 0 || file_at(tree, 0, p->name) == p->dir;
    const int partial = reached ? trace_find(tree, (struct trace_place){ p->dir, p->partial }) : -1;
    const int staged = file_at(tree, partial, "new"), complete = file_at(tree, partial, "complete");
    bool all = reached, old = true;
    for (int i = 0; i < p->n; i++) {
        all &= is_there(p, tree, i);
        RULE(complete < 0 || is_there(p, tree, i) || is_staged(p, tree, i, staged, complete),
             "what is said to be complete lacks a file");
    }
    for (int i = 0; i < trace_before.n; i++) {
        const struct trace_entry *entry = &trace_before.entries[i];
        const bool ours = p->as_file ? !strcmp(trace_names[entry->place.name], p->name)
                                     : strncmp(trace_names[entry->place.name], ".nib-", 5) != 0;
        if (entry->place.dir == p->dir && ours)
            old &= reached && trace_find(tree, entry->place) == entry->file;
    }
    RULE(all || complete >= 0 || old, "neither the old output nor the new one");
    RULE(!all || partial < 0 || complete >= 0, "a complete output that looks stopped");
}

static void check_cut(void *context, const struct trace_tree *tree, int step)
{
    const struct publish *p = context;
    check_synced(p, tree, step);
    check_order(p, tree, step);
    check_recovery(p, tree, step);
}

/* The end of a trace: all states on the way, and nothing left to be synced. Returns how many files the output has. */
static int check_trace(const char *what, const char *name, int kill, int first)
{
    const int root_entry = file_at(&trace_now, 0, name);
    struct publish p = { .what = what, .kill = kill, .name = name, .complete = -1 };
    char partial[64];
    trace_on = false;
    CHECK_THAT(trace_compare(&trace_now), "%s: names were changed unseen", what);
    p.as_file = ends_with(name, ".safetensors") || ends_with(name, ".gguf");
    p.dir = p.as_file ? 0 : root_entry;
    snprintf(partial, sizeof partial, "%s.nib-partial", p.as_file ? name : "");
    p.partial = name_of(partial);
    for (int i = 0; i < trace_now.n && p.n < MOST_FINALS; i++)
        if (p.as_file ? trace_now.entries[i].file == root_entry : trace_now.entries[i].place.dir == p.dir)
            p.finals[p.n++] = trace_now.entries[i];
    CHECK_THAT(p.n > 0, "%s: there is no output", what);
    for (int i = 0; i < trace_n_steps; i++)
        if (trace_steps[i].kind == TRACE_RENAME && trace_steps[i].to.name == name_of("complete"))
            p.complete = trace_steps[i].file;
    const struct trace_tree disk = trace_cuts(first, check_cut, &p);
    int extra = 0;
    for (int i = 0; i < trace_now.n; i++)
        CHECK_THAT(trace_find(&disk, trace_now.entries[i].place) == trace_now.entries[i].file,
                   "%s, killed at %d: %s is not on disk in the end", what, kill,
                   trace_names[trace_now.entries[i].place.name]);
    for (int i = 0; i < disk.n; i++)
        extra += (disk.entries[i].place.dir == 0 || disk.entries[i].place.dir == p.dir) &&
                 trace_find(&trace_now, disk.entries[i].place) < 0;
    CHECK_THAT(extra == 0, "%s, killed at %d: %d names are not yet off the disk in the end", what, kill, extra);
    return p.n;
}

/* ---- Outputs ---- */

enum { ROWS = 32, COLS = 64 };

static nib_status write_plain(const char *path, const char *const *names, int n)
{
    static uint16_t data[ROWS * COLS];
    nib_writer *writer = NULL;
    nib_status status = nib_writer_create(path, &writer);
    for (int i = 0; i < ROWS * COLS; i++)
        data[i] = (uint16_t)(0x3F00 | (test_random() & 0x80FF));
    for (int i = 0; i < n && !status; i++)
        status = nib_writer_declare(writer, names[i], NIB_BF16, 2, (int64_t[]){ ROWS, COLS });
    for (int i = 0; i < n && !status; i++)
        status = nib_writer_write(writer, names[i], 0, data, sizeof data);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    return status;
}

static nib_status write_tensor(const char *path)
{
    static const float zeros[ROWS * COLS];
    nib_quantizer q;
    nib_array x;
    nib_tensor *t = NULL;
    nib_writer *writer = NULL;
    nib_quantizer_init(&q);
    nib_status status = nib_array_init(&x, (void *)(uintptr_t)zeros, NIB_F32, 2, (int64_t[]){ ROWS, COLS });
    if (!status)
        status = nib_quantize(&q, &x, NULL, &t);
    if (!status)
        status = nib_writer_create(path, &writer);
    if (!status)
        status = nib_writer_declare_tensor(writer, "w", t);
    if (!status)
        status = nib_writer_write_tensor(writer, "w", t);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    nib_tensor_destroy(t);
    return status;
}

static nib_status write_gguf(const char *path)
{
    nib_gguf_plan *plan = NULL;
    nib_gguf_writer *writer = NULL;
    nib_status status = nib_gguf_plan_create(path, &plan);
    if (!status)
        status = nib_gguf_declare(plan, "w", NIB_GGUF_F32, 1, (int64_t[]){ 3 });
    if (!status)
        status = nib_gguf_writer_create(plan, &writer);
    if (!status)
        status = nib_gguf_write(writer, 0, 0, (float[]){ 1, 2, 3 }, 12);
    if (!status)
        status = nib_gguf_commit(writer);
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    return status;
}

static void make_inputs(void)
{
    static const char *const names[] = { "model.layers.0.self_attn.q_proj.weight",
                                         "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight" };
    if (directory[0])
        return;
    CHECK(mkdir(at("in"), 0777) == 0);
    CHECK_OK(write_plain(at("in/model.safetensors"), names, 3));
    put_text(at("in/config.json"), "{\"model_type\": \"llama\", \"hidden_size\": 64, \"num_hidden_layers\": 1, "
                                   "\"num_attention_heads\": 2, \"vocab_size\": 32, \"intermediate_size\": 64}");
    put_text(at("in/tokenizer.json"), TINY_TOKENIZER);
}

enum kind { WRITER, TENSOR, GGUF_WRITER, FILE_TO_FILE, ONE_FILE, SHARDS, GGUF, CONVERT, REPAIR, DEQUANTIZE, KINDS };

static const struct output {
    const char *what, *in, *out;
} outputs[KINDS] = {
    [WRITER] = { "a writer", NULL, "w.safetensors" },
    [TENSOR] = { "a tensor", NULL, "t.safetensors" },
    [GGUF_WRITER] = { "a GGUF writer", NULL, "w.gguf" },
    [FILE_TO_FILE] = { "quantize a file", "in/model.safetensors", "q.safetensors" },
    [ONE_FILE] = { "quantize to one file", "in", "one" },
    [SHARDS] = { "quantize to shards", "in", "shards" },
    [GGUF] = { "quantize to GGUF", "in", "q.gguf" },
    [CONVERT] = { "convert", "source", "converted" },
    [REPAIR] = { "repair", "broken", "repaired" },
    [DEQUANTIZE] = { "dequantize", "source", "plain" },
};

static nib_status make_plan(enum kind kind, bool other, const nib_checkpoint *in, nib_plan **plan)
{
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.format = kind == GGUF ? NIB_CHECKPOINT_FORMAT_GGUF : NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS;
    options.shard_bytes = kind == SHARDS || (kind == ONE_FILE && other) ? 2000 : 0;
    options.scale_rule = other ? NIB_SCALE_RTN : NIB_UNSET;
    switch (kind) {
    case CONVERT:
        return nib_plan_convert(in, NIB_CHECKPOINT_FORMAT_MODELOPT, plan);
    case REPAIR:
        return nib_plan_repair(in, plan);
    case DEQUANTIZE:
        return nib_plan_dequantize(in, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_F32, plan);
    default:
        return nib_plan_quantize(in, &options, plan);
    }
}

/* The output, or another in its place. With one thread where a step is to fail, so that it is the same each time. */
static nib_status make(enum kind kind, bool other, const char *out, const nib_run_options *run)
{
    nib_checkpoint *in = NULL;
    nib_plan *plan = NULL;
    nib_job job;
    nib_job_init(&job);
    job.threads = trace_left < 0 && trace_failed < 0 ? 2 : 1;
    switch (kind) {
    case WRITER:
        return write_plain(at(out), (const char *const[]){ "w" }, 1);
    case TENSOR:
        return write_tensor(at(out));
    case GGUF_WRITER:
        return write_gguf(at(out));
    default:
        break;
    }
    nib_status status = nib_checkpoint_open(at(outputs[kind].in), &in);
    if (!status)
        status = make_plan(kind, other, in, &plan);
    if (!status)
        status = nib_plan_run(plan, at(out), run, &job);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return status;
}

static void clear(const char *out)
{
    char partial[64];
    snprintf(partial, sizeof partial, "%s.nib-partial", out);
    CHECK_OK(nib_os_remove_directory(at(partial)));
    if (nib_os_is_directory(at(out)))
        CHECK_OK(nib_os_remove_directory(at(out)));
    else
        nib_os_remove(at(out));
}

/* An index of one file, which a repair keeps. */
static void put_index(const char *path)
{
    nib_checkpoint *c = NULL;
    char text[4096];
    CHECK_OK(nib_checkpoint_open(path, &c));
    size_t used = (size_t)snprintf(text, sizeof text, "{\"weight_map\": {");
    for (size_t i = 0; c && i < c->n_tensors; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s\"%s\": \"model.safetensors\"", i ? ", " : "",
                                 c->tensors[i].name);
    snprintf(text + used, sizeof text - used, "}}");
    nib_checkpoint_close(c);
    put_text(at("broken/" INDEX), text);
}

/* What the later ones start from. */
static void make_sources(void)
{
    make_inputs();
    if (nib_os_exists(at("broken")))
        return;
    CHECK_OK(make(SHARDS, false, "source", NULL));
    CHECK_OK(make(ONE_FILE, false, "broken", NULL));
    put_index(at("broken"));
    put_text(at("broken/config.json"), "{\"model_type\": \"llama\"}");
}

/* ---- Tests ---- */

static const nib_run_options force = { .bytes = sizeof force, .force = 1 },
                             resume = { .bytes = sizeof resume, .force = 1, .resume = 1 };

/* What is there before: nothing, another output, or another run that was killed while its files got their names. */
enum before { NOTHING, OLD, STOPPED };

/* Killed after the first of these names, which is the same step each time. */
static void stop_among_names(enum kind kind)
{
    static int steps;
    for (bool found = false, ended = true; !found && ended; steps += !found) {
        clear(outputs[kind].out);
        trace_start(directory);
        trace_left = steps;
        trace_dead = true;
        ended = make(kind, true, outputs[kind].out, NULL) != NIB_OK;
        CHECK(ended);
        trace_left = -1;
        trace_on = false;
        const int partial = file_at(&trace_now, file_at(&trace_now, 0, outputs[kind].out), ".nib-partial");
        found = file_at(&trace_now, partial, "complete") >= 0 &&
                trace_steps[trace_n_steps - 1].place.dir == file_at(&trace_now, partial, "new");
    }
}

static void start(enum kind kind, enum before before)
{
    make_sources();
    clear(outputs[kind].out);
    if (before == OLD)
        CHECK_OK(make(kind, true, outputs[kind].out, NULL));
    if (before == STOPPED)
        stop_among_names(kind);
    trace_start(directory);
}

static int run_whole(enum kind kind, enum before before)
{
    start(kind, before);
    CHECK_OK(make(kind, false, outputs[kind].out, &force));
    return check_trace(outputs[kind].what, outputs[kind].out, -1, 0);
}

TEST(every_cut_of_every_output)
{
    for (enum kind kind = 0; kind < KINDS; kind++) {
        run_whole(kind, NOTHING);
        run_whole(kind, OLD);
    }
}

TEST(a_complete_output_is_left_as_it_is)
{
    const nib_run_options only_resume = { .bytes = sizeof only_resume, .resume = 1 };
    for (enum kind kind = FILE_TO_FILE; kind < KINDS; kind++) {
        run_whole(kind, NOTHING);
        trace_start(directory);
        CHECK_OK(make(kind, false, outputs[kind].out, &only_resume));
        trace_on = false;
        for (int i = 0; i < trace_n_steps; i++)
            CHECK_THAT(trace_steps[i].kind == TRACE_SYNC, "%s: %s", outputs[kind].what, trace_words(i));
    }
}

/* Ended at every step, by a kill or a fault, and made again. */
static void run_twice(enum kind kind, enum before before, bool kill)
{
    const char *what = outputs[kind].what, *out = outputs[kind].out;
    const int files = run_whole(kind, before);
    for (int k = 0, ended = true; ended; k++) {
        start(kind, before);
        trace_left = k;
        trace_dead = kill;
        const nib_status status = make(kind, false, out, &force);
        trace_left = -1;
        ended = trace_failed >= 0;
        CHECK_THAT(!ended == !status, "%s: step %d fails: %s", what, k, nib_status_name(status));
        if (ended) {
            CHECK_OK(make(kind, false, out, &resume));
            CHECK_THAT(check_trace(what, out, k, trace_failed) == files, "%s: other files, killed at %d", what, k);
        }
        trace_on = false;
    }
}

TEST(every_cut_after_a_kill)
{
    run_twice(WRITER, OLD, true);
    run_twice(FILE_TO_FILE, NOTHING, true);
    run_twice(SHARDS, NOTHING, true);
    run_twice(SHARDS, OLD, true);
    run_twice(SHARDS, STOPPED, true);
    run_twice(REPAIR, NOTHING, true);
}

TEST(every_cut_after_a_fault)
{
    run_twice(GGUF_WRITER, OLD, false);
    run_twice(GGUF, OLD, false);
    run_twice(ONE_FILE, OLD, false);
    run_twice(SHARDS, STOPPED, false);
}

TEST_MAIN
