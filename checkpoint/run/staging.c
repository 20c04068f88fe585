/* SPDX-License-Identifier: Apache-2.0 */
/*
 * staging.c - the directory of a run, from its lock to the final names.
 *
 *     OUT/.nib-partial/lock          held while a process works here
 *                      state.json    which plan this is
 *                      scan-*.json   what each input file gave
 *                      new/          finished files, each synced before it has its name
 *                      complete      all are there: from now on they get their final names
 *
 * A kill leaves this directory, and a resumed run looks at what is in it (left.c). After `complete` there is only one way,
 * forward: what is missing in new/ is in OUT already.
 */
#include "run/run.h"

#include "model/folds.h"
#include "nib_shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#define PARTIAL ".nib-partial"
#define FINISHED ".nib-finished" /* what the directory is called while it is being removed */

static nib_status no_memory(const char *path)
{
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory for names in it", path);
}

char *nib_staging_path(const char *directory, const char *name)
{
    const size_t bytes = strlen(directory) + strlen(name) + 2;
    char *path = nib_alloc(bytes);
    if (path)
        snprintf(path, bytes, "%s/%s", directory, name);
    return path;
}

nib_status nib_staging_write(const char *path, const void *bytes, size_t count)
{
    int fd;
    char *temporary;
    TRY(nib_os_create_temporary(path, &fd, &temporary));
    nib_status status = nib_os_write_at(fd, path, 0, bytes, count);
    if (status)
        nib_os_close(fd);
    else
        status = nib_os_complete(fd, temporary, path);
    if (status)
        nib_os_remove(temporary);
    nib_free(temporary);
    return status;
}

/* ---- The place of the output ---- */

/* Whether `inner` is `outer` or lies in it; both are real paths. */
static bool lies_in(const char *inner, const char *outer)
{
    const size_t n = strlen(outer);
    return !strncmp(inner, outer, n) && (inner[n] == '\0' || inner[n] == '/' || (n > 0 && outer[n - 1] == '/'));
}

/* No file that is read may be where a file of the output gets its name, or an old one is cleared away. */
static nib_status check_file_apart(const struct nib_run *run, const char *path, const char *target)
{
    char *file;
    TRY(nib_os_real_path(path, &file));
    const bool same = !strcmp(file, target);
    const bool touched = run->as_file ? same : lies_in(file, target) && !strchr(file + strlen(target) + !same, '/');
    nib_free(file);
    return touched ? nib_fail(NIB_ERR_MODE, "%s: the output would be %s %s, which is read: choose another place",
                              run->out, same ? "in the place of" : "around", path)
                   : NIB_OK;
}

/* The files that a checkpoint has may lie elsewhere than where it was opened: others of a split GGUF, or what links name. */
static nib_status check_files_apart(const struct nib_run *run, const nib_checkpoint *c, const char *target)
{
    for (size_t f = 0; f < c->n_files; f++)
        TRY(check_file_apart(run, c->files[f].path, target));
    return NIB_OK;
}

static nib_status check_statistics_apart(const struct nib_run *run, const char *target)
{
    const nib_plan *plan = run->plan;
    if (plan->statistics)
        TRY(check_file_apart(run, nib_statistics_path(plan->statistics), target));
    const size_t n = plan->hessians ? nib_hessians_count(plan->hessians) : 0;
    for (size_t i = 0; i < n; i++)
        TRY(check_file_apart(run, nib_hessians_at(plan->hessians, i).path, target));
    return NIB_OK;
}

/* The input must not be touched, nor must it lie where an old output is cleared away. */
static nib_status check_apart(const struct nib_run *run)
{
    const nib_checkpoint *in = run->plan->in;
    char *source = NULL, *target = NULL;
    nib_status status = nib_os_real_path(in->path, &source);
    if (!status)
        status = nib_os_real_path(run->out, &target);
    if (!status && (lies_in(target, source) || (lies_in(source, target) && !run->as_file)))
        status = nib_fail(NIB_ERR_MODE, "%s: the output would be %s the input %s: choose a place beside it", run->out,
                          !strcmp(source, target)   ? "in the place of"
                          : lies_in(target, source) ? "within"
                                                    : "around",
                          in->path);
    if (!status)
        status = check_files_apart(run, in, target);
    if (!status && run->plan->codes)
        status = check_files_apart(run, run->plan->codes, target);
    if (!status)
        status = check_statistics_apart(run, target);
    nib_free(source);
    nib_free(target);
    return status;
}

struct emptiness {
    bool partial, others;
};

static nib_status note_entry(void *context, const char *name)
{
    struct emptiness *e = context;
    if (!strcmp(name, PARTIAL))
        e->partial = true;
    else if (strcmp(name, FINISHED) != 0)
        e->others = true;
    return NIB_OK;
}

/* Whether a process is at work in what an earlier run left, as it seems. */
static nib_status is_at_work(const struct nib_run *run, bool *busy)
{
    char *path = nib_staging_path(run->partial, "lock");
    int fd = -1;
    *busy = false;
    nib_status status = path ? NIB_OK : no_memory(run->partial);
    if (!status && nib_os_is_own_file(path))
        status = nib_os_lock(path, &fd, busy);
    nib_os_close(fd);
    nib_free(path);
    return status;
}

static nib_status at_work(const struct nib_run *run)
{
    return nib_fail(NIB_ERR_MODE, "%s: another run is writing here: wait for it, or choose another output", run->out);
}

/* What is there already, against what was asked for. Without resume and force nothing may be. */
static nib_status check_place(const struct nib_run *run)
{
    struct emptiness e = { 0 };
    const bool exists = nib_os_exists(run->out), directory = nib_os_is_directory(run->out);
    if (run->as_file) {
        if (nib_os_is_special(run->out)) /* a rename would put a file in the place of a pipe that somebody reads */
            return nib_fail(NIB_ERR_MODE, "%s: it is not a regular file: choose another name", run->out);
        e.others = exists;
        e.partial = nib_os_exists(run->partial);
        if (directory)
            return nib_fail(NIB_ERR_MODE, "%s: it is a directory, and the output is one file: give it a name in there",
                            run->out);
    } else if (exists && !directory) {
        return nib_fail(NIB_ERR_MODE, "%s: it exists and is not a directory", run->out);
    } else if (exists) {
        TRY(nib_os_list(run->out, note_entry, &e));
    }
    if (run->options.force || (run->options.resume && (e.partial || !e.others)))
        return NIB_OK;
    bool busy = false;
    if (e.partial)
        TRY(is_at_work(run, &busy));
    if (busy)
        return at_work(run);
    if (e.partial)
        return nib_fail(NIB_ERR_MODE, "%s: a run was stopped here: --resume continues it, --force starts over",
                        run->out);
    if (e.others)
        return nib_fail(NIB_ERR_MODE, "%s: it exists%s: --force replaces it", run->out,
                        run->as_file ? "" : " and not empty");
    return NIB_OK;
}

/* What a run makes itself is never a link: one would lead to files that are not the run's. --force clears away what else
 * is in its place. It is looked at once: what another run makes between two looks, a lock above all, is not in the way. */
static nib_status clear_way(const struct nib_run *run, const char *path, enum nib_os_kind wanted, const char *kind)
{
    const enum nib_os_kind found = nib_os_kind_of(path);
    if (found == wanted || found == NIB_OS_NOTHING)
        return NIB_OK;
    return run->options.force
               ? nib_os_remove_any(path)
               : nib_fail(NIB_ERR_MODE, "%s: it is not %s that a run made: --force removes it", path, kind);
}

static nib_status clear_way_of_directory(const struct nib_run *run, const char *path)
{
    return clear_way(run, path, NIB_OS_DIRECTORY, "a directory");
}

/* ---- Which plan ---- */

static void hash_tensor(XXH3_state_t *hash, const struct nib_out_tensor *t)
{
    const int64_t facts[] = { (int64_t)t->dtype, t->ggml_type, (int64_t)t->producer, t->rank, (int64_t)t->offset };
    XXH3_128bits_update(hash, t->name, strlen(t->name) + 1);
    XXH3_128bits_update(hash, facts, sizeof facts);
    XXH3_128bits_update(hash, t->shape, (size_t)t->rank * sizeof *t->shape);
}

/* Everything that decides bytes but for the data itself. */
static nib_status take_fingerprint(struct nib_run *run)
{
    const nib_plan *plan = run->plan;
    XXH3_state_t *hash = XXH3_createState();
    struct nib_text text = { 0 };
    nib_status status = hash ? NIB_OK : no_memory(run->out);
    if (!status) {
        XXH3_128bits_reset(hash);
        status = nib_plan_provenance(plan, NULL, &text);
    }
    if (!status)
        XXH3_128bits_update(hash, text.bytes, text.used);
    nib_free(text.bytes);
    for (size_t i = 0; i < plan->n_files && !status; i++) {
        const struct nib_out_file *file = &plan->files[i];
        XXH3_128bits_update(hash, file->name, strlen(file->name) + 1);
        for (uint32_t j = 0; j < file->tensors; j++)
            hash_tensor(hash, &plan->tensors[file->first + j]);
    }
    const json_t *const configurations[] = { plan->config, plan->hf_quant };
    for (int i = 0; i < 2 && !status; i++) {
        text = (struct nib_text){ 0 };
        if (configurations[i] && !nib_put_json(&text, configurations[i], 0))
            status = no_memory(run->out);
        if (!status && text.used)
            XXH3_128bits_update(hash, text.bytes, text.used);
        nib_free(text.bytes);
    }
    if (!status) {
        const XXH128_hash_t digest = XXH3_128bits_digest(hash);
        snprintf(run->fingerprint, sizeof run->fingerprint, "%016llx%016llx", (unsigned long long)digest.high64,
                 (unsigned long long)digest.low64);
    }
    XXH3_freeState(hash);
    return status;
}

enum { STATE_BYTES = 128 };

static size_t put_state(const struct nib_run *run, char text[STATE_BYTES])
{
    return (size_t)snprintf(text, STATE_BYTES, "{\"version\":\"" NIB_VERSION "\",\"plan\":\"%s\"}\n", run->fingerprint);
}

static nib_status write_state(const struct nib_run *run)
{
    char text[STATE_BYTES], *path = nib_staging_path(run->partial, "state.json");
    const size_t bytes = put_state(run, text);
    const nib_status status = path ? nib_staging_write(path, text, bytes) : no_memory(run->partial);
    nib_free(path);
    return status;
}

/* Whether what is in the directory is of this plan: its state is what this run would write, byte for byte. No state yet:
 * an earlier run was stopped before it began. */
static nib_status read_state(const struct nib_run *run, bool *ours, bool *other)
{
    char expected[STATE_BYTES], found[STATE_BYTES], *path = nib_staging_path(run->partial, "state.json");
    const size_t count = put_state(run, expected);
    int fd = -1;
    uint64_t bytes = 0;
    nib_status status = path ? NIB_OK : no_memory(run->partial);
    const bool any = !status && nib_os_exists(path);
    *ours = false;
    if (any && nib_os_is_own_file(path))
        status = nib_os_open_read(path, &fd, &bytes);
    if (!status && bytes == count) {
        status = nib_os_read_at(fd, path, 0, found, count);
        *ours = !status && !memcmp(found, expected, count);
    }
    *other = any && !*ours;
    nib_os_close(fd);
    nib_free(path);
    return status;
}

/* ---- Opening ---- */

static nib_status take_lock(struct nib_run *run)
{
    char *path = nib_staging_path(run->partial, "lock");
    bool busy = false;
    nib_status status = path ? clear_way(run, path, NIB_OS_FILE, "a file") : no_memory(run->partial);
    if (!status)
        status = nib_os_lock(path, &run->lock, &busy);
    nib_free(path);
    TRY(status);
    return busy ? at_work(run) : NIB_OK;
}

/* All but the lock, which is held. */
static nib_status remove_old(void *context, const char *name)
{
    const struct nib_run *run = context;
    if (!strcmp(name, "lock"))
        return NIB_OK;
    char *path = nib_staging_path(run->partial, name);
    if (!path)
        return no_memory(run->partial);
    const nib_status status = nib_os_remove_any(path);
    nib_free(path);
    return status;
}

static nib_status remove_temporary(void *context, const char *name)
{
    if (!strstr(name, ".tmp-"))
        return NIB_OK;
    char *path = nib_staging_path(context, name);
    if (!path)
        return no_memory(context);
    nib_os_remove(path);
    nib_free(path);
    return NIB_OK;
}

static nib_status set_paths(struct nib_run *run, const char *out)
{
    size_t length = strlen(out);
    while (length > 1 && out[length - 1] == '/')
        length--;
    if (length == 0)
        return nib_fail(NIB_ERR_ARG, "the output has no name");
    run->out = nib_alloc(length + 1);
    if (!run->out)
        return no_memory(out);
    memcpy(run->out, out, length);
    run->out[length] = '\0';
    const bool named = nib_ck_ends_with(run->out, ".gguf");
    run->as_file = run->plan->gguf || (run->plan->one_file && nib_ck_ends_with(run->out, ".safetensors"));
    if (run->plan->gguf && !named)
        return nib_fail(NIB_ERR_ARG, "%s: the output is one GGUF file: give it a name that ends in .gguf", run->out);
    if (named && !run->plan->gguf)
        return nib_fail(NIB_ERR_ARG,
                        "%s: the output has safetensors files, not a GGUF file: choose the format gguf, or "
                        "a name that does not end in .gguf",
                        run->out);
    const size_t bytes = length + sizeof "/" FINISHED;
    run->partial = nib_alloc(bytes);
    run->finished = nib_alloc(bytes);
    if (!run->partial || !run->finished)
        return no_memory(out);
    const char *slash = run->as_file ? "" : "/";
    snprintf(run->partial, bytes, "%s%s" PARTIAL, run->out, slash);
    snprintf(run->finished, bytes, "%s%s" FINISHED, run->out, slash);
    run->fresh = nib_staging_path(run->partial, "new");
    return run->fresh ? NIB_OK : no_memory(out);
}

static nib_status make_directories(struct nib_run *run)
{
    if (!run->as_file)
        TRY(nib_os_make_directory(run->out, &run->made_out));
    return nib_os_make_directory(run->partial, &run->made_partial);
}

static bool is_complete(const struct nib_run *run)
{
    char *path = nib_staging_path(run->partial, "complete");
    const bool complete = path && nib_os_exists(path);
    nib_free(path);
    return complete;
}

/* What all this was done in, which no longer looks like an unfinished run. A power cut must not bring back its name once
 * some of it is gone. The directory that holds it is the output, or the one that the output is in. */
static nib_status remove_finished(const struct nib_run *run)
{
    TRY(nib_os_sync_parent(run->finished));
    TRY(nib_os_remove_directory(run->finished));
    return nib_os_sync_parent(run->finished);
}

/* Start anew. Without its marker first: it would stand for files that are going. The new directory is made, and with it
 * its own synced, when it says whose it is. */
static nib_status clear_partial(struct nib_run *run)
{
    if (!run->made_partial) {
        TRY(remove_old(run, "complete"));
        TRY(nib_os_sync_directory(run->partial));
        TRY(nib_os_list(run->partial, remove_old, run));
    }
    TRY(write_state(run));
    return nib_os_make_directory(run->fresh, NULL);
}

/* The marker alone says nothing. Where something is missing, the run goes on, and the marker must not stand for it. */
static nib_status look_at_left(struct nib_run *run, enum nib_staging_left *left)
{
    bool whole = is_complete(run);
    if (whole) {
        TRY(nib_left_is_whole(run, &whole));
        if (!whole) {
            TRY(remove_old(run, "complete"));
            TRY(nib_os_sync_directory(run->partial));
        }
    }
    *left = whole ? NIB_STAGING_COMPLETE : NIB_STAGING_OPEN;
    return nib_left_sweep(run, whole);
}

static nib_status open_first(struct nib_run *run, enum nib_staging_left *left)
{
    bool ours = false, other = false, done = false;
    TRY(check_apart(run));
    TRY(clear_way_of_directory(run, run->partial));
    TRY(clear_way_of_directory(run, run->finished));
    if (run->options.resume && !nib_os_exists(run->partial)) /* it may have been stopped after its end */
        TRY(nib_left_all_in_out(run, &done));
    if (done) {
        *left = NIB_STAGING_DONE;
        return remove_finished(run);
    }
    TRY(check_place(run));
    TRY(make_directories(run));
    TRY(take_lock(run));
    TRY(nib_os_remove_directory(run->finished));
    if (run->options.resume)
        TRY(read_state(run, &ours, &other));
    if (other && !run->options.force)
        return nib_fail(NIB_ERR_MODE,
                        "%s: the run that was stopped here had other options or another input: --force starts over",
                        run->out);
    if (!ours)
        return clear_partial(run);
    TRY(nib_os_list(run->partial, remove_temporary, run->partial));
    TRY(clear_way_of_directory(run, run->fresh));
    TRY(nib_os_make_directory(run->fresh, NULL));
    return look_at_left(run, left);
}

nib_status nib_staging_open(struct nib_run *run, const char *out, enum nib_staging_left *left)
{
    const nib_comm *comm = run->job.comm;
    nib_status status = set_paths(run, out);
    if (!status)
        status = take_fingerprint(run);
    *left = NIB_STAGING_OPEN;
    if (!status && (!comm || comm->rank == 0))
        status = open_first(run, left);
    /* The key is the fingerprint: ranks that see other files must not go on. */
    status = nib_agree(comm, status, XXH3_64bits(run->fingerprint, sizeof run->fingerprint));
    float found = (float)*left;
    if (!status && comm && comm->allreduce_max_f32(comm->context, &found, 1))
        status = nib_fail(NIB_ERR_COMM, "%s: the ranks could not exchange what an earlier run left", run->out);
    *left = (enum nib_staging_left)found;
    return status;
}

void nib_staging_close(struct nib_run *run, nib_status status)
{
    const bool first = !run->job.comm || run->job.comm->rank == 0;
    if (first && run->lock >= 0) {
        if (status == NIB_ERR_CANCELLED && !run->options.resume && !is_complete(run)) {
            nib_error before;
            nib_get_error(&before);
            (void)nib_os_remove_directory(run->partial);
            (void)nib_fail(before.status, "%s", before.text);
        }
        nib_os_close(run->lock);
        run->lock = -1;
    }
    if (first && status && run->made_out)
        nib_os_remove_empty_directory(run->out); /* one with something in it stays */
    nib_free(run->out);
    nib_free(run->partial);
    nib_free(run->finished);
    nib_free(run->fresh);
}

/* ---- Files that go along ---- */

/* Weights in another form, and what is written anew. Everything else in the directory is part of the model. */
static bool goes_along(const char *name)
{
    static const char *const left_out[] = { ".safetensors", ".index.json", ".bin",  ".pt",        ".pth",     ".ckpt",
                                            ".gguf",        ".h5",         ".onnx", ".onnx_data", ".msgpack", ".npz",
                                            ".tflite",      ".tmp",        ".lock", ".incomplete" };
    if (name[0] == '.' || !strcmp(name, "config.json") || !strcmp(name, "hf_quant_config.json") ||
        !strcmp(name, "recipe.yaml")) /* of an earlier quantization */
        return false;
    for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++)
        if (nib_ck_ends_with(name, left_out[i]))
            return false;
    return true;
}

static nib_status copy_file(const char *from, const char *to)
{
    enum { CHUNK = 1 << 20 };
    int source, target;
    uint64_t bytes;
    char *temporary;
    TRY(nib_os_open_read(from, &source, &bytes));
    nib_status status = nib_os_create_temporary(to, &target, &temporary);
    if (status) {
        nib_os_close(source);
        return status;
    }
    char *chunk = nib_alloc(CHUNK);
    status = chunk ? NIB_OK : no_memory(to);
    for (uint64_t at = 0; at < bytes && !status; at += CHUNK) {
        const size_t count = bytes - at < CHUNK ? (size_t)(bytes - at) : CHUNK;
        status = nib_os_read_at(source, from, at, chunk, count);
        if (!status)
            status = nib_os_write_at(target, to, at, chunk, count);
    }
    nib_free(chunk);
    nib_os_close(source);
    if (status)
        nib_os_close(target);
    else
        status = nib_os_complete(target, temporary, to); /* mark_complete syncs the directory */
    if (status)
        nib_os_remove(temporary);
    nib_free(temporary);
    return status;
}

nib_status nib_staging_goes_along(const struct nib_run *run, const char *name, bool *goes)
{
    *goes = false;
    if (run->as_file || !run->plan->in->is_directory || !goes_along(name))
        return NIB_OK;
    char *path = nib_staging_path(run->plan->in->directory, name);
    *goes = path && nib_os_exists(path) && !nib_os_is_directory(path);
    nib_free(path);
    return path ? NIB_OK : no_memory(run->plan->in->directory);
}

static nib_status look_in_directory(void *any, const char *name)
{
    *(bool *)any |= goes_along(name);
    return NIB_OK;
}

/* Weights in another form often have a directory; what embeddings are pooled by (1_Pooling/config.json) has one too. */
static nib_status warn_of_directory(struct nib_run *run, const char *path, const char *name)
{
    char text[1024];
    bool any = false;
    if (*name == '.' || !nib_os_is_directory(path))
        return NIB_OK;
    if (!nib_os_list(path, look_in_directory, &any) && !any) /* one that cannot be looked into may have something */
        return NIB_OK;
    snprintf(text, sizeof text, "%.300s: directories stay behind: copy %s if what loads the model reads it",
             run->plan->in->path, nib_quote(name).text);
    return nib_run_warn(run, text);
}

static nib_status copy_other(void *context, const char *name)
{
    struct nib_run *run = context;
    bool goes;
    TRY(nib_staging_goes_along(run, name, &goes));
    char *from = nib_staging_path(run->plan->in->directory, name), *to = nib_staging_path(run->fresh, name);
    const nib_status status = !from || !to ? no_memory(run->fresh)
                              : goes       ? copy_file(from, to)
                                           : warn_of_directory(run, from, name);
    nib_free(from);
    nib_free(to);
    return status;
}

nib_status nib_staging_copy_others(struct nib_run *run)
{
    return nib_os_list(run->plan->in->directory, copy_other, run);
}

/* ---- Final names ---- */

static int publishing_rank(const struct nib_run *run, const char *name)
{
    if (nib_run_file(run, name))
        return 0;
    return nib_ck_ends_with(name, ".index.json") ? 1 : !strcmp(name, "config.json") ? 3 : 2;
}

struct publishing {
    const struct nib_run *run;
    int rank;
    bool moved;
};

static nib_status move_one(void *context, const char *name)
{
    struct publishing *p = context;
    if (publishing_rank(p->run, name) != p->rank)
        return NIB_OK;
    p->moved = true;
    char *from = nib_staging_path(p->run->fresh, name),
         *to = p->run->as_file ? NULL : nib_staging_path(p->run->out, name);
    const nib_status status =
        !from || (!to && !p->run->as_file) ? no_memory(p->run->out) : nib_os_rename(from, to ? to : p->run->out);
    nib_free(from);
    nib_free(to);
    return status;
}

/* Of an output that is being replaced: what a loader would take for part of the new one. */
static nib_status remove_stale(void *context, const char *name)
{
    const struct nib_run *run = context;
    const bool lists = nib_ck_ends_with(name, ".safetensors.index.json") || !strcmp(name, "config.json") ||
                       !strcmp(name, "hf_quant_config.json") || !strcmp(name, NIB_FOLD_FILE);
    if (!lists && !nib_ck_ends_with(name, ".safetensors"))
        return NIB_OK;
    char *fresh = nib_staging_path(run->fresh, name), *old = nib_staging_path(run->out, name);
    const bool ours = publishing_rank(run, name) == 0 || nib_run_writes(run->plan, name);
    nib_status status = fresh && old ? NIB_OK : no_memory(run->out);
    /* What is ours and no longer in new/ has been moved already; the old index and configuration go first of all, so
     * that nobody loads a mixture. */
    if (!status && (!ours || (lists && nib_os_exists(fresh))))
        status = nib_os_remove_file(old);
    nib_free(fresh);
    nib_free(old);
    return status;
}

/* From here on only forward: the marker is on disk before the first file of the old output goes. One that a killed run
 * has made was synced when new/ was, see nib_os_make_directory. */
static nib_status mark_complete(const struct nib_run *run)
{
    char *marker = nib_staging_path(run->partial, "complete");
    nib_status status = marker ? NIB_OK : no_memory(run->partial);
    if (!status && !nib_os_exists(marker)) {
        status = nib_os_sync_directory(run->fresh); /* with what a killed run has put there, too */
        if (!status)
            status = nib_staging_write(marker, "", 0);
        if (!status)
            status = nib_os_sync_directory(run->partial);
    }
    nib_free(marker);
    return status;
}

static nib_status publish(struct nib_run *run)
{
    TRY(mark_complete(run));
    if (!run->as_file && !run->made_out) {
        TRY(nib_os_list(run->out, remove_stale, run));
        TRY(nib_os_sync_directory(run->out));
    }
    /* An index must not outlast a power cut without its shards, nor the configuration without all the rest. What a run
     * that was stopped has moved may not be synced. */
    for (int rank = 0; rank <= 3; rank++) {
        struct publishing publishing = { run, rank, run->options.resume };
        TRY(nib_os_list(run->fresh, move_one, &publishing));
        if (publishing.moved)
            TRY(nib_os_sync_parent(run->partial));
    }
    /* In one step, so that a kill leaves no directory that looks like an unfinished run. */
    TRY(nib_os_rename(run->partial, run->finished));
    return remove_finished(run);
}

nib_status nib_staging_publish(struct nib_run *run)
{
    const bool first = !run->job.comm || run->job.comm->rank == 0;
    return nib_agree(run->job.comm, first ? publish(run) : NIB_OK, 0);
}
