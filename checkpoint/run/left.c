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

nib_status nib_left_all_in_out(const struct nib_run *run, bool *done)
{
    struct nib_text provenance;
    TRY(nib_plan_provenance(run->plan, NULL, &provenance));
    nib_status status = NIB_OK;
    *done = true;
    for (size_t i = 0; i < run->plan->n_files && *done && !status; i++)
        status = is_in_out(run, &run->plan->files[i], provenance.bytes, done);
    nib_free(provenance.bytes);
    return status;
}

/* ---- The directory of finished files ---- */

struct sweep {
    const struct nib_run *run;
    struct nib_text provenance;
};

static const struct nib_out_file *find_file(const nib_plan *plan, const char *name)
{
    for (size_t i = 0; i < plan->n_files; i++)
        if (!strcmp(plan->files[i].name, name))
            return &plan->files[i];
    return NULL;
}

static nib_status keep_finished(void *context, const char *name)
{
    const struct sweep *sweep = context;
    const nib_plan *plan = sweep->run->plan;
    const struct nib_out_file *file = find_file(plan, name);
    char *path = nib_staging_path(sweep->run->fresh, name);
    nib_status status = path ? NIB_OK : no_memory(sweep->run->fresh);
    bool done = false;
    if (!status && file && nib_os_is_own_file(path))
        status = nib_left_is_done(plan, file, path, sweep->provenance.bytes, &done);
    if (!status && !done)
        status = nib_os_remove_any(path);
    nib_free(path);
    return status;
}

nib_status nib_left_sweep(const struct nib_run *run)
{
    struct sweep sweep = { .run = run };
    TRY(nib_plan_provenance(run->plan, NULL, &sweep.provenance));
    const nib_status status = nib_os_list(run->fresh, keep_finished, &sweep);
    nib_free(sweep.provenance.bytes);
    return status;
}
