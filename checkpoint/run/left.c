/* SPDX-License-Identifier: Apache-2.0 */
/*
 * left.c - what an earlier run left, of which nothing is trusted: a file is finished where it has the size and the header
 * of the plan, whatever its name says.
 */
#include "run/run.h"

static nib_status no_memory(const char *path)
{
    return nib_fail(NIB_ERR_MEMORY, "%s: no memory to look at what is in it", path);
}

/* ---- A file ---- */

/* Whether a hash of the input follows. GGUF has them in a string of its own, safetensors in one of JSON. */
static bool ends_with_key(const char *text, size_t bytes)
{
    static const char *const keys[] = { "xxh3\":\"", "xxh3\\\":\\\"" };
    for (int k = 0; k < 2; k++) {
        const size_t n = strlen(keys[k]);
        if (bytes >= n && !memcmp(text + bytes - n, keys[k], n))
            return true;
    }
    return false;
}

/* Before the input is read its hashes are 0 in what is expected, and may be any; nothing else may differ. */
static bool same_header(const char *expected, const char *found, size_t bytes)
{
    static const char unknown[] = "00000000000000000000000000000000";
    enum { DIGITS = sizeof unknown - 1 };
    for (size_t i = 0; i < bytes; i++) {
        if (expected[i] != found[i])
            return false;
        if (ends_with_key(expected, i + 1) && bytes - i > DIGITS && !memcmp(expected + i + 1, unknown, DIGITS))
            i += DIGITS;
    }
    return true;
}

static nib_status compare_header(const nib_plan *plan, const struct nib_out_file *file, int fd, const char *path,
                                 const char *provenance, bool *same)
{
    struct nib_text header;
    TRY(nib_plan_header(plan, file, provenance, &header));
    char *found = nib_alloc(header.used);
    nib_status status = found ? nib_os_read_at(fd, path, 0, found, header.used) : no_memory(path);
    *same = !status && same_header(header.bytes, found, header.used);
    nib_free(found);
    nib_free(header.bytes);
    return status;
}

nib_status nib_left_is_done(const nib_plan *plan, const struct nib_out_file *file, const char *path,
                            const char *provenance, bool *done)
{
    int fd = -1;
    uint64_t bytes;
    nib_status status = NIB_OK;
    *done = false;
    if (nib_os_exists(path) && !nib_os_open_read(path, &fd, &bytes) && bytes == file->bytes)
        status = compare_header(plan, file, fd, path, provenance, done);
    nib_os_close(fd);
    return status;
}

static nib_status is_in_out(const struct nib_run *run, const struct nib_out_file *file, const char *provenance,
                            bool *done)
{
    if (run->as_file)
        return nib_left_is_done(run->plan, file, run->out, provenance, done);
    char *path = nib_staging_path(run->out, file->name);
    const nib_status status = path ? nib_left_is_done(run->plan, file, path, provenance, done) : no_memory(run->out);
    nib_free(path);
    return status;
}

/* What else a directory of this plan has, whatever is in it. */
static nib_status is_beside_in_out(const struct nib_run *run, const char *name, bool *there)
{
    char *path = nib_staging_path(run->out, name);
    *there = path && nib_os_exists(path);
    nib_free(path);
    return path ? NIB_OK : no_memory(run->out);
}

nib_status nib_left_all_in_out(const struct nib_run *run, bool *done)
{
    struct nib_text provenance;
    TRY(nib_plan_provenance(run->plan, NULL, &provenance));
    nib_status status = NIB_OK;
    *done = true;
    for (size_t i = 0; i < run->plan->n_files && *done && !status; i++)
        status = is_in_out(run, &run->plan->files[i], provenance.bytes, done);
    nib_free(provenance.bytes);
    for (int i = 0; i < NIB_RUN_BESIDE && !run->as_file && *done && !status; i++)
        if (nib_run_writes(run->plan, nib_run_beside[i]))
            status = is_beside_in_out(run, nib_run_beside[i], done);
    return status;
}

/* ---- All that a run writes ---- */

/* What is in new/ gets the name, whatever has it. */
static nib_status is_file_there(const struct nib_run *run, const struct nib_out_file *file, const char *provenance,
                                bool *there)
{
    char *path = nib_staging_path(run->fresh, file->name);
    nib_status status = path ? NIB_OK : no_memory(run->fresh);
    *there = false;
    if (!status && !nib_os_exists(path))
        status = is_in_out(run, file, provenance, there);
    else if (!status && nib_os_is_own_file(path))
        status = nib_left_is_done(run->plan, file, path, provenance, there);
    nib_free(path);
    return status;
}

static nib_status is_name_there(const struct nib_run *run, const char *name, bool *there)
{
    char *fresh = nib_staging_path(run->fresh, name), *out = nib_staging_path(run->out, name);
    const nib_status status = fresh && out ? NIB_OK : no_memory(run->fresh);
    *there = !status && (nib_os_exists(fresh) ? nib_os_is_own_file(fresh) : nib_os_exists(out));
    nib_free(fresh);
    nib_free(out);
    return status;
}

struct look {
    const struct nib_run *run;
    bool whole;
};

static nib_status look_for_other(void *context, const char *name)
{
    struct look *look = context;
    bool goes;
    TRY(nib_staging_goes_along(look->run, name, &goes));
    return goes && look->whole ? is_name_there(look->run, name, &look->whole) : NIB_OK;
}

static nib_status look_beside(struct look *look)
{
    const nib_plan *plan = look->run->plan;
    for (int i = 0; i < NIB_RUN_BESIDE && look->whole; i++)
        if (nib_run_writes(plan, nib_run_beside[i]))
            TRY(is_name_there(look->run, nib_run_beside[i], &look->whole));
    return look->whole && plan->in->is_directory ? nib_os_list(plan->in->directory, look_for_other, look) : NIB_OK;
}

nib_status nib_left_is_whole(const struct nib_run *run, bool *whole)
{
    struct look look = { run, true };
    struct nib_text provenance;
    TRY(nib_plan_provenance(run->plan, NULL, &provenance));
    nib_status status = NIB_OK;
    for (size_t i = 0; i < run->plan->n_files && look.whole && !status; i++)
        status = is_file_there(run, &run->plan->files[i], provenance.bytes, &look.whole);
    nib_free(provenance.bytes);
    if (!status && look.whole && !run->as_file)
        status = look_beside(&look);
    *whole = !status && look.whole;
    return status;
}

/* ---- The directory of finished files ---- */

struct sweep {
    const struct nib_run *run;
    bool whole;
    struct nib_text provenance;
};

/* Where all is there, it has been looked at. What stands beside the tensors is otherwise written again. */
static nib_status stays(const struct sweep *sweep, const char *name, const char *path, bool *stays)
{
    const struct nib_run *run = sweep->run;
    const struct nib_out_file *file = nib_run_file(run, name);
    *stays = sweep->whole && (file || (!run->as_file && nib_run_writes(run->plan, name)));
    if (*stays || !nib_os_is_own_file(path))
        return NIB_OK;
    if (sweep->whole)
        return nib_staging_goes_along(run, name, stays);
    return file ? nib_left_is_done(run->plan, file, path, sweep->provenance.bytes, stays) : NIB_OK;
}

static nib_status sweep_entry(void *context, const char *name)
{
    const struct sweep *sweep = context;
    char *path = nib_staging_path(sweep->run->fresh, name);
    bool keep = false;
    nib_status status = path ? stays(sweep, name, path, &keep) : no_memory(sweep->run->fresh);
    if (!status && !keep)
        status = nib_os_remove_any(path);
    nib_free(path);
    return status;
}

nib_status nib_left_sweep(const struct nib_run *run, bool whole)
{
    struct sweep sweep = { .run = run, .whole = whole };
    TRY(nib_plan_provenance(run->plan, NULL, &sweep.provenance));
    const nib_status status = nib_os_list(run->fresh, sweep_entry, &sweep);
    nib_free(sweep.provenance.bytes);
    return status;
}
