/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_publish.c - outputs and power cuts: whatever a power cut leaves after any step of any run, of one that goes on
 * after a kill too, a final name has a complete and synced file, an output that is not complete does not look as if it
 * were, and either the old output is there or the new one can be had.
 *
 * NIB_TEST_WRAP_FILES
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "test_outputs.h"
#include "test_trace.h"

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
        output_threads = 1;
        trace_dead = true;
        ended = make(kind, true, outputs[kind].out, NULL) != NIB_OK;
        CHECK(ended);
        trace_left = -1;
        output_threads = 2;
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
        output_threads = 1;
        trace_dead = kill;
        const nib_status status = make(kind, false, out, &force);
        trace_left = -1;
        output_threads = 2;
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
