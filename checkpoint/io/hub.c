/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hub.c - what somebody meant by a path that is no checkpoint: the name of a model on the Hugging Face hub, a directory
 * of its cache, or a file whose contents Git LFS has not fetched. The message then says what to do. Nothing is
 * downloaded, and nothing of it decides whether a path opens.
 */
#include "io/hub.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/os.h"

enum { PATH_BYTES = 1024 };

/* ---- Snapshots of a model's cache: models--ORG--NAME/{blobs,refs,snapshots/COMMIT} ---- */

struct snapshots {
    size_t n;
    char first[256]; /* in the order of names */
};

static nib_status note_snapshot(void *context, const char *name)
{
    struct snapshots *found = context;
    if (*name == '.')
        return NIB_OK;
    if (found->n++ == 0 || strcmp(name, found->first) < 0)
        snprintf(found->first, sizeof found->first, "%s", name);
    return NIB_OK;
}

/* The snapshot that refs/main names, or the only one; how many there are. */
static size_t find_snapshot(const char *root, char *path, size_t bytes)
{
    char directory[PATH_BYTES], reference[PATH_BYTES], *commit = NULL;
    struct snapshots found = { .n = 0 };
    size_t length;
    snprintf(directory, sizeof directory, "%s/snapshots", root);
    *path = 0;
    if (!nib_os_is_directory(directory) || nib_os_list(directory, note_snapshot, &found) || found.n == 0)
        return 0;
    snprintf(reference, sizeof reference, "%s/refs/main", root);
    if (nib_os_exists(reference) && nib_ck_read_text(reference, 128, &commit, &length) == NIB_OK) {
        commit[strcspn(commit, "/\r\n")] = 0;
        if ((size_t)snprintf(path, bytes, "%s/%s", directory, commit) >= bytes || !*commit ||
            !nib_os_is_directory(path))
            *path = 0;
        nib_free(commit);
    }
    if (!*path && found.n == 1 && (size_t)snprintf(path, bytes, "%s/%s", directory, found.first) >= bytes)
        *path = 0;
    return found.n;
}

/* "models--org--name" as "org/name"; false where it is no such name. */
static bool name_of_cache(const char *path, char *out, size_t bytes)
{
    static const char prefix[] = "models--";
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t n = 0;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0)
        return false;
    for (name += sizeof prefix - 1; *name && n + 1 < bytes; name++) {
        const bool joint = name[0] == '-' && name[1] == '-';
        out[n++] = joint ? '/' : *name;
        name += joint;
    }
    out[n] = 0;
    return n > 0;
}

static nib_status note_model(void *context, const char *name)
{
    if (strncmp(name, "models--", 8) == 0)
        note_snapshot(context, name);
    return NIB_OK;
}

/* The path is a wrong one, and what it names need not be broken: IO, whatever was said before. */
static nib_status reject_cache(const char *path, const char *root)
{
    char snapshot[PATH_BYTES], name[PATH_BYTES];
    const size_t n = find_snapshot(root, snapshot, sizeof snapshot);
    const bool named = name_of_cache(root, name, sizeof name);
    if (*snapshot)
        return nib_fail(NIB_ERR_IO, "%s: it is a cache of the Hugging Face hub; the model is in %s", path, snapshot);
    if (n)
        return nib_fail(NIB_ERR_IO,
                        "%s: it is a cache of the Hugging Face hub, and the model is in one of the %zu directories "
                        "in %s/snapshots",
                        path, n, root);
    return nib_fail(NIB_ERR_IO,
                    "%s: it is a cache of the Hugging Face hub without a snapshot: hf download %s fetches it", path,
                    named ? name : "ORG/MODEL");
}

/* A directory that holds no checkpoint. */
static nib_status explain_directory(const char *path, nib_status status, const nib_error *before)
{
    char inner[PATH_BYTES], name[PATH_BYTES];
    const char *slash = strrchr(path, '/');
    struct snapshots models = { .n = 0 };
    if (name_of_cache(path, name, sizeof name))
        return reject_cache(path, path);
    if (slash && strcmp(slash, "/snapshots") == 0) {
        snprintf(inner, sizeof inner, "%.*s", (int)(slash - path), path);
        return reject_cache(path, inner);
    }
    if (nib_os_list(path, note_model, &models) || models.n == 0)
        return nib_set_error(status, before->text);
    return nib_fail(NIB_ERR_IO,
                    "%s: it is the cache of the Hugging Face hub, with %zu model%s: name the snapshot of one of "
                    "them, such as %s/%s/snapshots/...",
                    path, models.n, models.n == 1 ? "" : "s", path, models.first);
}

/* ---- Names of models ---- */

/* "org/name" as the hub takes it, without an address before it; NULL: it is none. */
static const char *hub_name(const char *path)
{
    static const char *const before[] = {
        "https://huggingface.co/", "http://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/", "hf://"
    };
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.";
    bool address = false;
    for (size_t i = 0; !address && i < sizeof before / sizeof *before; i++)
        if (strncmp(path, before[i], strlen(before[i])) == 0) {
            path += strlen(before[i]);
            address = true;
        }
    const size_t first = strspn(path, letters);
    if (*path == '.' || *path == '-' || first == 0 || path[first] != '/')
        return NULL;
    const size_t second = strspn(path + first + 1, letters);
    return second && path[first + 1] != '.' && !path[first + 1 + second] ? path : NULL;
}

/* Where the hub's own programs keep models. */
static bool cache_of(const char *name, char *root, size_t bytes)
{
    const char *cache = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"), *user = getenv("HOME");
    const char *slash = strchr(name, '/');
    const char *start = cache ? cache : home ? home : user;
    const char *below = cache ? "" : home ? "/hub" : "/.cache/huggingface/hub";
    if (!start || !*start)
        return false;
    const int length =
        snprintf(root, bytes, "%s%s/models--%.*s--%s", start, below, (int)(slash - name), name, slash + 1);
    return length > 0 && (size_t)length < bytes && nib_os_is_directory(root);
}

/* A path that is not there. */
static nib_status explain_missing(const char *path, nib_status status, const nib_error *before)
{
    const char *const name = hub_name(path);
    char root[PATH_BYTES], parent[PATH_BYTES], snapshot[PATH_BYTES];
    if (!name)
        return nib_set_error(status, before->text);
    snprintf(parent, sizeof parent, "%.*s", (int)strcspn(path, "/"), path);
    if (name == path && nib_os_is_directory(parent)) /* a slip in a path: its directory is there */
        return nib_set_error(status, before->text);
    if (cache_of(name, root, sizeof root) && find_snapshot(root, snapshot, sizeof snapshot) && *snapshot)
        return nib_fail(status,
                        "%s: there is no such directory; the model of this name is in the cache of the Hugging "
                        "Face hub, in %s",
                        path, snapshot);
    return nib_fail(status,
                    "%s: there is no such directory; a model of this name on the Hugging Face hub is fetched by: "
                    "hf download %s --local-dir %s",
                    path, name, strchr(name, '/') + 1);
}

nib_status nib_ck_explain(const char *path, nib_status status)
{
    nib_error before;
    if (status != NIB_ERR_IO && status != NIB_ERR_DATA)
        return status;
    nib_get_error(&before);
    if (nib_os_is_directory(path))
        return explain_directory(path, status, &before);
    return nib_os_exists(path) ? status : explain_missing(path, status, &before);
}

bool nib_ck_is_lfs_pointer(const char *start, size_t bytes)
{
    static const char magic[] = "version https://git-lfs.github.com/";
    return bytes >= sizeof magic - 1 && memcmp(start, magic, sizeof magic - 1) == 0;
}
