/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_left.c - what an interrupted run left, in any state: links lead nowhere, what is not finished is written anew, what
 * is not part of the output goes, and --force can always start over.
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "plan/plan.h"
#include "test_outputs.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

static const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 },
                             force = { .bytes = sizeof force, .force = 1 };

/* ---- A run that was stopped ---- */

/* Of an output: the directory of the run, what is in it, or what that is called while it is removed. */
static const char *left_at(enum kind kind, const char *name)
{
    static char path[256];
    const char *const out = outputs[kind].out;
    const bool finished = !strcmp(name, "finished");
    snprintf(path, sizeof path, "%s%s.nib-%s%s%s", at(out), strchr(out, '.') ? "" : "/",
             finished ? "finished" : "partial", *name && !finished ? "/" : "", finished ? "" : name);
    return path;
}

static void make_reference(enum kind kind)
{
    make_sources();
    clear(outputs[kind].out);
    clear("reference");
    CHECK_OK(make(kind, false, outputs[kind].out, NULL));
    CHECK(rename(at(outputs[kind].out), at("reference")) == 0);
    CHECK_OK(nib_os_remove_directory(at("outside")));
    CHECK(mkdir(at("outside"), 0777) == 0);
    put_text(at("outside/kept"), "precious");
}

static void check_outside(const char *what)
{
    size_t count;
    char *text = get_file(at("outside/kept"), &count);
    CHECK_THAT(entries(at("outside")) == 1 && text && !strcmp(text, "precious"), "%s: a link was followed", what);
    free(text);
}

/* The files with tensors among the finished ones; the others are copied before. */
static nib_status count_tensors(void *context, const char *name)
{
    *(int *)context += strstr(name, ".safetensors") || strstr(name, ".gguf");
    return NIB_OK;
}

/* As where no file may be larger: it is known which plan it was, and nothing is finished. */
static void stop(enum kind kind)
{
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0 && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 300, before.rlim_max }) == 0);
    clear(outputs[kind].out);
    nib_os_remove(left_at(kind, "finished"));
    const nib_status status = make(kind, false, outputs[kind].out, NULL);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    int finished = 0;
    CHECK_OK(nib_os_list(left_at(kind, "new"), count_tensors, &finished));
    CHECK(status == NIB_ERR_IO && exists(left_at(kind, "state.json")) && !finished);
}

static void check_whole(enum kind kind, const char *what)
{
    CHECK_THAT(same(at(outputs[kind].out), at("reference")), "%s, %s: other bytes", outputs[kind].what, what);
    CHECK_THAT(!nib_os_exists(left_at(kind, "")) && !nib_os_exists(left_at(kind, "finished")), "%s, %s: it is left",
               outputs[kind].what, what);
}

static void check_run(enum kind kind, const nib_run_options *options, const char *what)
{
    CHECK_THAT(!make(kind, false, outputs[kind].out, options), "%s, %s: %s", outputs[kind].what, what,
               nib_last_error());
    check_whole(kind, what);
}

/* ---- Things ---- */

enum thing { ZEROS, DIRECTORY, FIFO, LINK_TO_DIRECTORY, LINK_TO_FILE, LINK_TO_NOTHING, THINGS };
static const char *const thing_names[THINGS] = {
    "zeros", "a directory", "a FIFO", "a link to a directory", "a link to a file", "a link to nothing"
};

/* In the place of what is there. */
static void put_thing(const char *path, enum thing thing)
{
    static const char zeros[5000];
    static const char *const targets[THINGS] = {
        [LINK_TO_DIRECTORY] = "outside", [LINK_TO_FILE] = "outside/kept", [LINK_TO_NOTHING] = "outside/none"
    };
    if (unlink(path) < 0 && errno != ENOENT)
        CHECK_OK(nib_os_remove_directory(path));
    if (thing == ZEROS)
        put_file(path, zeros, sizeof zeros);
    else if (thing == DIRECTORY)
        CHECK(mkdir(path, 0777) == 0);
    else if (thing == FIFO)
        CHECK(mkfifo(path, 0666) == 0);
    else
        CHECK(symlink(at(targets[thing]), path) == 0);
}

static const enum kind two_kinds[] = { SHARDS, GGUF };

/* What a run has made itself is a directory or a file: nothing else is taken for it, and --force clears it. */
TEST(only_what_a_run_makes_is_taken_for_it)
{
    static const struct {
        const char *name;
        enum thing own; /* what a run makes there */
    } places[] = { { "", DIRECTORY }, { "new", DIRECTORY }, { "finished", DIRECTORY }, { "lock", ZEROS } };
    for (size_t k = 0; k < 2; k++) {
        const enum kind kind = two_kinds[k];
        make_reference(kind);
        for (size_t i = 0; i < sizeof places / sizeof *places; i++)
            for (enum thing thing = 0; thing < THINGS; thing++) {
                char what[300];
                if (thing == places[i].own)
                    continue;
                stop(kind);
                put_thing(left_at(kind, places[i].name), thing);
                snprintf(what, sizeof what, "%s is %s", left_at(kind, places[i].name), thing_names[thing]);
                CHECK_THAT(make(kind, false, outputs[kind].out, &resume) == NIB_ERR_MODE &&
                               strstr(nib_last_error(), left_at(kind, places[i].name)) &&
                               strstr(nib_last_error(), "--force"),
                           "%s: %s", what, nib_last_error());
                check_outside(what);
                check_run(kind, &force, what);
                check_outside(what);
            }
    }
}

/* A state that is none is that of another run. */
TEST(a_state_that_cannot_be_read_is_of_another_run)
{
    for (size_t k = 0; k < 2; k++) {
        const enum kind kind = two_kinds[k];
        make_reference(kind);
        for (enum thing thing = 0; thing < THINGS; thing++) {
            stop(kind);
            put_thing(left_at(kind, "state.json"), thing);
            CHECK_FAILS(make(kind, false, outputs[kind].out, &resume), NIB_ERR_MODE, "had other options");
            check_run(kind, &force, thing_names[thing]);
            check_outside(thing_names[thing]);
        }
    }
}

TEST(links_beside_a_state_are_removed)
{
    make_reference(SHARDS);
    for (int i = 0; i < 2; i++) {
        stop(SHARDS);
        put_thing(left_at(SHARDS, "link"), LINK_TO_DIRECTORY);
        put_thing(left_at(SHARDS, "directory"), DIRECTORY);
        put_thing(left_at(SHARDS, "directory/link"), LINK_TO_DIRECTORY);
        check_run(SHARDS, i ? &force : &resume, "links in the directory of a run");
        check_outside("links in the directory of a run");
    }
}

static long json_left = -1;

static void *allocate_json(size_t bytes) { return json_left >= 0 && json_left-- == 0 ? NULL : malloc(bytes); }

/* Goes on from what `prepare` leaves, with each allocation of JSON failing. */
static void check_without_json(void (*prepare)(void), const char *what)
{
    make_reference(SHARDS);
    nib_checkpoint *in = NULL;
    nib_plan *plan = NULL;
    CHECK_OK(nib_checkpoint_open(at(outputs[SHARDS].in), &in));
    CHECK_OK(make_plan(SHARDS, false, in, &plan));
    for (long left = 0, failed = 1; failed; left++) {
        prepare();
        json_set_alloc_funcs(allocate_json, free);
        json_left = left;
        const nib_status status = nib_plan_run(plan, at(outputs[SHARDS].out), &resume, NULL);
        failed = json_left < 0;
        json_left = -1;
        json_set_alloc_funcs(malloc, free);
        CHECK_THAT(!status || status == NIB_ERR_MEMORY, "%s, allocation %ld: %s", what, left, nib_last_error());
        CHECK(failed || left > 10);
    }
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    check_whole(SHARDS, what);
}

static void stop_shards(void) { stop(SHARDS); }

/* What fails for want of memory is not another run. */
TEST(no_memory_makes_no_other_run) { check_without_json(stop_shards, "the last"); }

/* ---- Finished files ---- */

/* The name of the first file of tensors, in new/. */
static const char *data_of(enum kind kind)
{
    static char name[100];
    nib_checkpoint *in = NULL;
    nib_plan *plan = NULL;
    CHECK_OK(nib_checkpoint_open(at(outputs[kind].in), &in));
    CHECK_OK(make_plan(kind, false, in, &plan));
    snprintf(name, sizeof name, "new/%s", plan ? plan->files[0].name : "");
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return name;
}

/* The same under its final name, in the output or in the reference. */
static const char *final_of(enum kind kind, const char *out)
{
    static char path[256];
    const bool file = strchr(outputs[kind].out, '.');
    snprintf(path, sizeof path, "%s%s", at(out), file ? "" : data_of(kind) + strlen("new"));
    return path;
}

enum copy { WHOLE, JUNK, NO_HEADER, OTHER_HEADER, OTHER_HASH, SHORTER, LONGER, COPIES };
static const char *const copy_names[COPIES] = { "whole",      "junk",    "no header", "another header",
                                                "other hash", "shorter", "longer" };

static void put_copy(enum kind kind, enum copy copy)
{
    size_t count;
    char *bytes = get_file(final_of(kind, "reference"), &count);
    CHECK(bytes != NULL);
    bytes = realloc(bytes, count + 1);
    char *hash = memmem(bytes, count, "xxh3", 4);
    CHECK(hash != NULL);
    hash +=
        strcspn(hash, ":") + 3; /* in a safetensors header there is a backslash, and one digit is as good as another */
    if (copy == NO_HEADER)
        memset(bytes, 0, 100);
    if (copy == OTHER_HEADER)
        hash[-9] ^= 1;
    if (copy == OTHER_HASH)
        hash[2] = hash[2] == '0' ? '1' : '0';
    put_file(left_at(kind, data_of(kind)), bytes, copy == JUNK ? 4 : count - (copy == SHORTER) + (copy == LONGER));
    free(bytes);
}

/* A file that is kept is as old as it was. */
static void check_copy(enum kind kind, enum copy copy)
{
    static const struct timespec old[2] = { { .tv_sec = 1000 }, { .tv_sec = 1000 } };
    struct stat facts = { 0 };
    stop(kind);
    put_copy(kind, copy);
    CHECK(utimensat(AT_FDCWD, left_at(kind, data_of(kind)), old, 0) == 0);
    check_run(kind, &resume, copy_names[copy]);
    CHECK(stat(final_of(kind, outputs[kind].out), &facts) == 0);
    CHECK_THAT((facts.st_mtim.tv_sec == 1000) == (copy == WHOLE), "%s: %s", outputs[kind].what, copy_names[copy]);
}

TEST(a_file_is_finished_by_its_size_and_header)
{
    for (size_t k = 0; k < 2; k++) {
        const enum kind kind = two_kinds[k];
        make_reference(kind);
        for (enum copy copy = 0; copy < COPIES; copy++)
            check_copy(kind, copy);
        for (enum thing thing = 0; thing < THINGS; thing++) {
            stop(kind);
            put_thing(left_at(kind, data_of(kind)), thing);
            check_run(kind, &resume, thing_names[thing]);
            check_outside(thing_names[thing]);
        }
        stop(kind);
        CHECK(symlink(final_of(kind, "reference"), left_at(kind, data_of(kind))) == 0);
        check_run(kind, &resume, "a link to a whole file");
        CHECK(nib_os_is_own_file(final_of(kind, outputs[kind].out)));
    }
}

TEST(finished_files_of_every_kind_are_kept)
{
    for (enum kind kind = FILE_TO_FILE; kind < KINDS; kind++) {
        make_reference(kind);
        check_copy(kind, WHOLE);
        check_copy(kind, NO_HEADER);
    }
}

/* ---- The marker ---- */

/* Files of the reference, all of them or those (not) of tensors, where a run keeps them or under their final names. */
static void put_files(enum kind kind, bool tensors, bool others, bool in_out)
{
    static const struct timespec old[2] = { { .tv_sec = 1000 }, { .tv_sec = 1000 } };
    DIR *listing = opendir(at("reference"));
    for (struct dirent *item; listing && (item = readdir(listing));) {
        char from[512], to[512];
        size_t count;
        if (item->d_name[0] == '.' ||
            !(strstr(item->d_name, ".safetensors") && !strstr(item->d_name, ".json") ? tensors : others))
            continue;
        snprintf(from, sizeof from, "%s/%s", at("reference"), item->d_name);
        snprintf(to, sizeof to, "%s/%s", in_out ? at(outputs[kind].out) : left_at(kind, "new"), item->d_name);
        char *bytes = get_file(from, &count);
        put_file(to, bytes, count);
        CHECK(utimensat(AT_FDCWD, to, old, 0) == 0);
        free(bytes);
    }
    if (listing)
        closedir(listing);
}

static bool is_old(const char *name)
{
    struct stat facts = { 0 };
    char path[512];
    snprintf(path, sizeof path, "%s/%s", at(outputs[SHARDS].out), name);
    CHECK_THAT(stat(path, &facts) == 0, "there is no %s", path);
    return facts.st_mtim.tv_sec == 1000;
}

static void put_strangers(enum kind kind)
{
    static const char *const names[THINGS] = { "new/evil.py",  "new/directory", "new/model.tmp-1-2",
                                               "new/evil.txt", "new/README.md", "new/config.json.tmp-3-4" };
    for (enum thing thing = 0; thing < THINGS; thing++)
        put_thing(left_at(kind, names[thing]), thing);
}

TEST(a_marker_alone_completes_nothing)
{
    for (enum kind kind = FILE_TO_FILE; kind < KINDS; kind++) {
        make_reference(kind);
        stop(kind);
        put_text(left_at(kind, "complete"), "");
        check_run(kind, &resume, "a marker alone");
    }
    make_reference(SHARDS);
    for (enum thing thing = 0; thing < THINGS; thing++) {
        stop(SHARDS);
        put_thing(left_at(SHARDS, "complete"), thing);
        check_run(SHARDS, &resume, thing_names[thing]);
        check_outside(thing_names[thing]);
    }
}

/* What lacks a file, or has another thing in its place, is finished; what is finished keeps its files. */
TEST(a_marker_completes_what_is_there)
{
    static const struct {
        const char *what;
        bool tensors, moved_tensors, others, moved_others;
        const char *missing; /* or none */
        int thing;           /* in its place, or THINGS */
        bool whole;
    } cases[] = { { "all", true, false, true, false, NULL, THINGS, true },
                  { "tensors moved", false, true, true, false, NULL, THINGS, true },
                  { "all moved", false, true, false, true, NULL, THINGS, true },
                  { "tensors alone", true, false, false, false, NULL, THINGS, false },
                  { "moved tensors alone", false, true, false, false, NULL, THINGS, false },
                  { "no configuration", true, false, true, false, "new/config.json", THINGS, false },
                  { "no index", true, false, true, false, "new/" INDEX, THINGS, false },
                  { "no tokenizer", true, false, true, false, "new/tokenizer.json", THINGS, false },
                  { "a linked configuration", true, false, true, false, "new/config.json", LINK_TO_FILE, false },
                  { "junk", true, true, true, false, "tensors", ZEROS, false } };
    make_reference(SHARDS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int strangers = 0; strangers < 2; strangers++) {
            stop(SHARDS);
            if (cases[i].tensors)
                put_files(SHARDS, true, false, false);
            if (cases[i].moved_tensors)
                put_files(SHARDS, true, false, true);
            if (cases[i].others)
                put_files(SHARDS, false, true, false);
            if (cases[i].moved_others)
                put_files(SHARDS, false, true, true);
            const char *missing = cases[i].missing;
            if (missing && cases[i].thing < THINGS)
                put_thing(left_at(SHARDS, strcmp(missing, "tensors") ? missing : data_of(SHARDS)), cases[i].thing);
            else if (missing)
                CHECK(unlink(left_at(SHARDS, missing)) == 0);
            if (strangers)
                put_strangers(SHARDS);
            put_text(left_at(SHARDS, "complete"), "");
            check_run(SHARDS, &resume, cases[i].what);
            check_outside(cases[i].what);
            CHECK_THAT(is_old("config.json") == cases[i].whole, "%s", cases[i].what);
        }
}

/* With nothing left of a run, an output is complete only with what makes its files one model. */
TEST(an_output_that_lacks_its_configuration_is_not_complete)
{
    static const char *const names[] = { "config.json", "model.safetensors.index.json" };
    char path[64];
    make_reference(SHARDS);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        clear(outputs[SHARDS].out);
        check_run(SHARDS, NULL, "anew");
        check_run(SHARDS, &resume, "complete");
        snprintf(path, sizeof path, "%s/%s", outputs[SHARDS].out, names[i]);
        CHECK(unlink(at(path)) == 0);
        CHECK_FAILS(make(SHARDS, false, outputs[SHARDS].out, &resume), NIB_ERR_MODE, "--force replaces it");
        check_run(SHARDS, &force, names[i]);
    }
}

static void leave_marker(void)
{
    stop(SHARDS);
    put_files(SHARDS, true, true, false);
    put_text(left_at(SHARDS, "complete"), "");
}

static void finish_shards(void) { check_run(SHARDS, &force, "a run before"); }

/* Nor is an output taken for whole without it. */
TEST(no_memory_to_look_at_what_is_whole)
{
    check_without_json(leave_marker, "with a marker");
    check_without_json(finish_shards, "finished");
}

TEST(strangers_get_no_names)
{
    for (size_t k = 0; k < 2; k++)
        for (int complete = 0; complete < 2; complete++) {
            const enum kind kind = two_kinds[k];
            make_reference(kind);
            stop(kind);
            put_copy(kind, WHOLE);
            put_strangers(kind);
            if (complete)
                put_text(left_at(kind, "complete"), "");
            check_run(kind, &resume, "strangers");
            check_outside("strangers");
        }
}

TEST_MAIN
