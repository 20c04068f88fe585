/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hessians.c - which file has the Hessian of which input, and reading it.
 */
#include "io/hessians.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

#include <xxhash.h>

#include "base/os.h"
#include "file/safetensors.h"
#include "format/codec.h"
#include "io/checkpoint.h"

struct entry {
    char *name;
    size_t file;
    int64_t cols, tokens;
    uint64_t at;
};

struct nib_hessians {
    char **paths;
    size_t n_paths, paths_capacity;
    struct entry *entries;
    size_t n, capacity;
    char *tokens_hash; /* what the statistics say of their tokens; NULL: nothing */
    char hash[40];
};

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the list of Hessians"); }

static int64_t values_of(int64_t cols) { return cols * (cols + 1) / 2; }

/* Columns of a triangle of so many values; 0: no triangle has that many. */
static int64_t columns_of(int64_t values)
{
    int64_t low = 0, high = INT32_MAX;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (values_of(middle) <= values)
            low = middle;
        else
            high = middle - 1;
    }
    return values_of(low) == values ? low : 0;
}

/* ---- Files ---- */

static nib_status read_tokens(const nib_file *file, const char *path, const char *name, int64_t *out)
{
    char count[1100];
    size_t index;
    nib_entry entry;
    *out = -1;
    snprintf(count, sizeof count, "%s_count", name);
    if (nib_file_find(file, count, &index))
        return NIB_OK;
    TRY(nib_file_entry(file, index, &entry));
    if (entry.dtype != NIB_I64 || entry.end - entry.begin != sizeof *out)
        return nib_fail(NIB_ERR_DATA, "%s: %s must be one I64", path, nib_quote(count).text);
    TRY(nib_file_read(file, index, 0, out, sizeof *out));
    return *out >= 0 ? NIB_OK : nib_fail(NIB_ERR_DATA, "%s: %s is negative", path, nib_quote(count).text);
}

static nib_status add_entry(struct nib_hessians *h, const nib_file *file, const nib_entry *e)
{
    static const char suffix[] = ".hessian";
    const char *path = h->paths[h->n_paths - 1];
    const size_t n = strlen(e->name), length = sizeof suffix - 1;
    if (n <= length || strcmp(e->name + n - length, suffix) != 0)
        return NIB_OK;
    const int64_t cols = e->dtype == NIB_F32 && e->rank == 1 ? columns_of(e->shape[0]) : 0;
    if (!cols)
        return nib_fail(NIB_ERR_DATA, "%s: %s must be F32 [K (K + 1) / 2]", path, nib_quote(e->name).text);
    struct entry entry = { .file = h->n_paths - 1, .cols = cols, .at = nib_file_data_begin(file) + e->begin };
    TRY(read_tokens(file, path, e->name, &entry.tokens));
    struct entry *grown = nib_grow(h->entries, &h->capacity, h->n + 1, sizeof *grown);
    if (!grown)
        return no_memory();
    h->entries = grown;
    entry.name = nib_alloc_text(e->name, n - length);
    if (!entry.name)
        return no_memory();
    h->entries[h->n++] = entry;
    return NIB_OK;
}

/* Takes the path over. */
static nib_status add_file(struct nib_hessians *h, char *path)
{
    char **grown = path ? nib_grow(h->paths, &h->paths_capacity, h->n_paths + 1, sizeof *grown) : NULL;
    if (!grown) {
        nib_free(path);
        return no_memory();
    }
    h->paths = grown;
    h->paths[h->n_paths++] = path;
    return NIB_OK;
}

static nib_status read_entries(struct nib_hessians *h, const nib_file *file)
{
    for (size_t i = 0; i < nib_file_count(file); i++) {
        nib_entry entry;
        TRY(nib_file_entry(file, i, &entry));
        TRY(add_entry(h, file, &entry));
    }
    return NIB_OK;
}

/* A layer's file must be of the tokens that the statistics are of, where both say which. */
static nib_status check_layer(const struct nib_hessians *h, const nib_file *file, const char *path)
{
    const char *format = nib_file_metadata(file, "format"), *tokens = nib_file_metadata(file, "tokens_sha256");
    if (!format || strcmp(format, "nib-stats-1") != 0)
        return nib_fail(NIB_ERR_DATA, "%s: its metadata lack \"format\": \"nib-stats-1\"", path);
    if (tokens && h->tokens_hash && strcmp(tokens, h->tokens_hash) != 0)
        return nib_fail(NIB_ERR_DATA, "%s: its Hessians are of other tokens than the statistics", path);
    return NIB_OK;
}

static nib_status read_layer(struct nib_hessians *h, char *path)
{
    nib_file *file;
    TRY(add_file(h, path));
    TRY(nib_file_open(path, &file));
    nib_status status = check_layer(h, file, path);
    if (!status)
        status = read_entries(h, file);
    nib_file_close(file);
    return status;
}

/* A file of another form has no Hessians; one that breaks its form was rejected when its statistics were read. */
static nib_status read_statistics(struct nib_hessians *h, const char *path)
{
    nib_file *file;
    char begin[9] = { 0 };
    uint64_t bytes;
    int fd;
    TRY(nib_os_open_read(path, &fd, &bytes));
    nib_status status = nib_os_read_at(fd, path, 0, begin, bytes < sizeof begin ? (size_t)bytes : sizeof begin);
    nib_os_close(fd);
    TRY(status);
    if (begin[8] != '{')
        return NIB_OK;
    TRY(add_file(h, nib_alloc_text(path, strlen(path))));
    TRY(nib_file_open(path, &file));
    const char *tokens = nib_file_metadata(file, "tokens_sha256");
    h->tokens_hash = tokens ? nib_alloc_text(tokens, strlen(tokens)) : NULL;
    status = tokens && !h->tokens_hash ? no_memory() : read_entries(h, file);
    nib_file_close(file);
    return status;
}

struct listing {
    struct nib_hessians *h;
    const char *directory;
};

static nib_status add_listed(void *context, const char *name)
{
    static const char prefix[] = "stats-of-layer-", suffix[] = ".safetensors";
    const struct listing *l = context;
    const size_t n = strlen(name), bytes = strlen(l->directory) + n + 2;
    if (n < sizeof prefix + sizeof suffix - 2 || strncmp(name, prefix, sizeof prefix - 1) != 0 ||
        strcmp(name + n - (sizeof suffix - 1), suffix) != 0)
        return NIB_OK;
    char *path = nib_alloc(bytes);
    if (!path)
        return no_memory();
    snprintf(path, bytes, "%s/%s", l->directory, name);
    return read_layer(l->h, path);
}

/* ---- All of it ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct entry *)a)->name, ((const struct entry *)b)->name);
}

enum { CHUNK = 1 << 18 }; /* values that are looked at at once */

/* Every value of an entry, into the hash or to `out`, or both. */
static nib_status read_values(const struct nib_hessians *h, const struct entry *e, XXH3_state_t *hash, float *buffer)
{
    const char *path = h->paths[e->file];
    const int64_t n = values_of(e->cols);
    uint64_t bytes;
    int fd;
    TRY(nib_os_open_read(path, &fd, &bytes));
    nib_status status = NIB_OK;
    for (int64_t i = 0; i < n && !status; i += CHUNK) {
        const int64_t count = nib_min(CHUNK, n - i);
        float *to = hash ? buffer : buffer + i;
        status = nib_os_read_at(fd, path, e->at + (uint64_t)i * sizeof *to, to, (size_t)count * sizeof *to);
        for (int64_t k = 0; k < count && hash && !status; k++)
            if (!(nib_abs(to[k]) <= FLT_MAX))
                status = nib_fail(NIB_ERR_DATA, "%s: value %lld of %s.hessian is %s", path, (long long)(i + k),
                                  nib_quote(e->name).text, nib_is_nan(to[k]) ? "a NaN" : "infinite");
        if (hash && !status)
            (void)XXH3_128bits_update(hash, to, (size_t)count * sizeof *to);
    }
    nib_os_close(fd);
    return status;
}

static nib_status check_values(struct nib_hessians *h)
{
    int64_t most = 1;
    for (size_t i = 0; i < h->n; i++)
        most = nib_max(most, nib_min(CHUNK, values_of(h->entries[i].cols)));
    float *buffer = nib_alloc((size_t)most * sizeof *buffer);
    XXH3_state_t *hash = XXH3_createState();
    nib_status status = buffer && hash && XXH3_128bits_reset(hash) == XXH_OK ? NIB_OK : no_memory();
    for (size_t i = 0; i < h->n && !status; i++) {
        const struct entry *e = &h->entries[i];
        if (i && !strcmp(e->name, h->entries[i - 1].name)) {
            status = nib_fail(NIB_ERR_DATA, "%s: the Hessian of %s is in %s too", h->paths[e->file],
                              nib_quote(e->name).text, h->paths[h->entries[i - 1].file]);
            break;
        }
        (void)XXH3_128bits_update(hash, e->name, strlen(e->name) + 1);
        (void)XXH3_128bits_update(hash, &e->tokens, sizeof e->tokens);
        status = read_values(h, e, hash, buffer);
    }
    if (!status) {
        const XXH128_hash_t digest = XXH3_128bits_digest(hash);
        snprintf(h->hash, sizeof h->hash, "%016llx%016llx", (unsigned long long)digest.high64,
                 (unsigned long long)digest.low64);
    }
    XXH3_freeState(hash);
    nib_free(buffer);
    return status;
}

nib_status nib_hessians_open(const char *statistics, const char *directory, struct nib_hessians **out)
{
    struct nib_hessians *h = nib_alloc_zeroed(sizeof *h);
    if (!h)
        return no_memory();
    nib_status status = read_statistics(h, statistics);
    if (!status && directory)
        status = nib_os_list(directory, add_listed, &(struct listing){ h, directory });
    if (!status && h->n)
        qsort(h->entries, h->n, sizeof *h->entries, by_name);
    if (!status)
        status = check_values(h);
    if (status) {
        nib_hessians_close(h);
        return status;
    }
    *out = h;
    return NIB_OK;
}

void nib_hessians_close(struct nib_hessians *h)
{
    if (!h)
        return;
    for (size_t i = 0; i < h->n; i++)
        nib_free(h->entries[i].name);
    for (size_t i = 0; i < h->n_paths; i++)
        nib_free(h->paths[i]);
    nib_free(h->entries);
    nib_free(h->paths);
    nib_free(h->tokens_hash);
    nib_free(h);
}

const char *nib_hessians_hash(const struct nib_hessians *h) { return h->hash; }
size_t nib_hessians_count(const struct nib_hessians *h) { return h->n; }

struct nib_hessian nib_hessians_at(const struct nib_hessians *h, size_t index)
{
    const struct entry *e = &h->entries[index];
    return (struct nib_hessian){ e->name, h->paths[e->file], e->cols, e->tokens };
}

bool nib_hessians_find(const struct nib_hessians *h, const char *name, size_t *index)
{
    struct entry key = { .name = (char *)(uintptr_t)name };
    const struct entry *found = h->n ? bsearch(&key, h->entries, h->n, sizeof key, by_name) : NULL;
    if (found)
        *index = (size_t)(found - h->entries);
    return found != NULL;
}

nib_status nib_hessians_read(const struct nib_hessians *h, size_t index, float *out)
{
    return read_values(h, &h->entries[index], NULL, out);
}
