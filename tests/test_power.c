/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_power.c - power cuts, and what comes after them: at every sync of every kind of output, files as a disk may have
 * them that had not yet written all, put back as they are; a run that goes on from there gives the bytes of one that was
 * not disturbed. (test_publish.c looks at names alone, at every step.)
 *
 * NIB_TEST_WRAP_FILES
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "test_outputs.h"
#include "test_trace.h"

enum { FILES = TRACE_STEPS + TRACE_ENTRIES };

struct content {
    char *bytes;
    size_t size;
};

/* What the disk has for certain, by the numbers of files. */
static struct {
    struct trace_tree names;
    struct content data[FILES];
    bool is_directory[FILES];
} disk;

/* Changes that are not yet on the disk, in their order: of a name, or of a file's data. */
static struct pending {
    const struct trace_step *name;
    const struct trace_change *data;
    bool kept;
} pending[TRACE_STEPS + TRACE_CHANGES];
static int n_pending;

/* ---- The disk ---- */

static void change(struct content *content, const struct trace_change *by)
{
    const size_t end = by->offset + by->bytes;
    if (end > content->size) {
        content->bytes = realloc(content->bytes, end);
        memset(content->bytes + content->size, 0, end - content->size);
    }
    if (end > content->size || by->exact)
        content->size = end;
    if (by->bytes)
        memcpy(content->bytes + by->offset, by->data, by->bytes);
}

/* Names in the root that are of an output: it, what it is made in, and temporary ones. */
static bool is_of(const char *name, const char *out) { return strstr(name, out) != NULL; }

/* The files that were there before the trace. */
static void load(const char *path, int dir, const char *out)
{
    for (int i = 0; i < trace_before.n; i++) {
        const struct trace_entry *const entry = &trace_before.entries[i];
        const char *const name = trace_names[entry->place.name];
        char inner[512];
        if (entry->place.dir != dir || (dir == 0 && !is_of(name, out)))
            continue;
        snprintf(inner, sizeof inner, "%s/%s", path, name);
        disk.is_directory[entry->file] = nib_os_is_directory(inner);
        if (disk.is_directory[entry->file])
            load(inner, entry->file, out);
        else
            disk.data[entry->file].bytes = get_file(inner, &disk.data[entry->file].size);
    }
}

static void start_disk(const char *out)
{
    for (int i = 0; i < FILES; i++)
        free(disk.data[i].bytes);
    memset(&disk, 0, sizeof disk);
    disk.names = trace_before;
    n_pending = 0;
    load(trace_root, 0, out);
}

/* A file's data is on disk with its own sync, a name with that of its directory: that of its new one for a rename. */
static void sync_disk(int file)
{
    int left = 0;
    for (int i = 0; i < n_pending; i++) {
        const struct pending p = pending[i];
        if (p.data && p.data->file == file)
            change(&disk.data[file], p.data);
        else if (p.name && (p.name->kind == TRACE_RENAME ? p.name->to.dir : p.name->place.dir) == file)
            trace_apply(&disk.names, p.name);
        else
            pending[left++] = p;
    }
    n_pending = left;
}

static void put_content(const char *path, int file)
{
    struct content now = { malloc(disk.data[file].size + 1), disk.data[file].size };
    if (now.size)
        memcpy(now.bytes, disk.data[file].bytes, now.size);
    for (int i = 0; i < n_pending; i++)
        if (pending[i].kept && pending[i].data && pending[i].data->file == file)
            change(&now, pending[i].data);
    put_file(path, now.bytes, now.size);
    free(now.bytes);
}

static void put_entries(const struct trace_tree *tree, const char *path, int dir, const char *out)
{
    for (int i = 0; i < tree->n; i++) {
        const struct trace_entry *const entry = &tree->entries[i];
        const char *const name = trace_names[entry->place.name];
        char inner[512];
        if (entry->place.dir != dir || (dir == 0 && !is_of(name, out)))
            continue;
        snprintf(inner, sizeof inner, "%s/%s", path, name);
        if (!disk.is_directory[entry->file]) {
            put_content(inner, entry->file);
            continue;
        }
        CHECK(mkdir(inner, 0777) == 0);
        put_entries(tree, inner, entry->file, out);
    }
}

/* The files of the output as the disk has them, with the changes that are kept, in place of what is there. */
static void put_disk(const char *out)
{
    struct trace_tree tree = disk.names;
    DIR *listing = opendir(directory);
    for (struct dirent *item; listing && (item = readdir(listing));) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", directory, item->d_name);
        if (is_of(item->d_name, out) && nib_os_is_directory(path))
            CHECK_OK(nib_os_remove_directory(path));
        else if (is_of(item->d_name, out))
            nib_os_remove(path);
    }
    if (listing)
        closedir(listing);
    for (int i = 0; i < n_pending; i++)
        if (pending[i].kept && pending[i].name)
            trace_apply(&tree, pending[i].name);
    put_entries(&tree, directory, 0, out);
}

/* ---- After a cut ---- */

static const nib_run_options resume = { .bytes = sizeof resume, .force = 1, .resume = 1 };

static void go_on(enum kind kind, int step, int choice)
{
    const char *const what = outputs[kind].what, *const out = outputs[kind].out;
    put_disk(out);
    const nib_status status = make(kind, false, out, &resume);
    CHECK_THAT(!status, "%s, a cut before %s, choice %d of %d changes: %s", what, trace_words(step), choice, n_pending,
               nib_last_error());
    CHECK_THAT(same(at(out), at("reference")), "%s, a cut before %s, choice %d of %d changes: other bytes", what,
               trace_words(step), choice, n_pending);
}

/* None, all, one alone, all but one; then subsets that are drawn, as many as are wanted. */
static bool keeps(int choice, int i)
{
    if (choice < 2)
        return choice;
    if (choice < 2 + 2 * n_pending)
        return choice % 2 ? i != choice / 2 - 1 : i == choice / 2 - 1;
    return test_below(2);
}

static void cut(enum kind kind, int step, int subsets)
{
    const int chosen = 2 + 2 * n_pending; /* of up to two changes these are all */
    for (int choice = n_pending ? 0 : 1; choice < chosen + (n_pending > 2 ? subsets : 0); choice++) {
        for (int i = 0; i < n_pending; i++)
            pending[i].kept = keeps(choice, i);
        go_on(kind, step, choice);
    }
}

/* A run: undisturbed, which makes the reference; or killed at a step and made again. Returns the step at which it was
 * killed, 0 where it should not be, and -1 where it has no such step. */
static int record(enum kind kind, bool over_another, int kill)
{
    const char *const out = outputs[kind].out;
    make_sources();
    clear(out);
    if (kill < 0)
        clear("reference");
    if (over_another)
        CHECK_OK(make(kind, true, out, NULL));
    output_threads = 1;
    trace_keeps_data = true;
    trace_start(directory);
    start_disk(out);
    trace_left = kill;
    trace_dead = kill >= 0;
    const nib_status status = make(kind, false, out, &resume);
    trace_left = -1;
    CHECK_THAT(!status == (trace_failed < 0), "%s, killed at %d: %s", outputs[kind].what, kill, nib_last_error());
    if (trace_failed >= 0)
        CHECK_OK(make(kind, false, out, &resume));
    trace_on = false;
    CHECK_THAT(trace_compare(&trace_now), "%s: names were changed unseen", outputs[kind].what);
    if (kill < 0)
        CHECK(rename(at(out), at("reference")) == 0);
    CHECK_THAT(kill < 0 || same(at(out), at("reference")), "%s, killed at %d: other bytes", outputs[kind].what, kill);
    return kill < 0 ? 0 : trace_failed;
}

/* All cuts from a step of the trace on. In the end all that was seen must be all that is there. */
static void cut_trace(enum kind kind, int first, int subsets)
{
    int at_change = 0;
    for (int i = 0; i < trace_n_steps; i++) {
        const struct trace_step *const step = &trace_steps[i];
        disk.is_directory[step->file] |= step->kind == TRACE_MKDIR;
        if (step->kind == TRACE_SYNC && i >= first)
            cut(kind, i, subsets);
        if (step->kind == TRACE_SYNC)
            sync_disk(step->file);
        else if (step->kind != TRACE_WRITE)
            pending[n_pending++] = (struct pending){ .name = step };
        for (; at_change < trace_n_changes && trace_changes[at_change].step == i; at_change++)
            pending[n_pending++] = (struct pending){ .data = &trace_changes[at_change] };
    }
    for (int i = 0; i < n_pending; i++)
        pending[i].kept = true;
    put_disk(outputs[kind].out);
    CHECK_THAT(same(at(outputs[kind].out), at("reference")), "%s: files were changed unseen", outputs[kind].what);
    output_threads = 2;
}

enum { SUBSETS = 2 };
static int many(void) { return getenv("NIB_CAMPAIGN") ? 1000 : SUBSETS; }

TEST(cuts_over_nothing)
{
    for (enum kind kind = 0; kind < KINDS; kind++)
        cut_trace(kind, record(kind, false, -1), many());
}

TEST(cuts_over_another_output)
{
    for (enum kind kind = 0; kind < KINDS; kind++)
        cut_trace(kind, record(kind, true, -1), many());
}

/* A run that goes on after a kill, and is cut as well. */
TEST(cuts_after_a_kill)
{
    const bool all = getenv("NIB_CAMPAIGN");
    for (enum kind kind = all ? FILE_TO_FILE : SHARDS; kind < (all ? KINDS : SHARDS + 1); kind++) {
        record(kind, false, -1);
        for (int kill = 1, first; (first = record(kind, kill % 2, kill)) >= 0; kill += all ? 1 : 13)
            cut_trace(kind, first, SUBSETS);
    }
}

TEST_MAIN
