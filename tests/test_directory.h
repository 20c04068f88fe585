/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_directory.h - a directory for a test's files, made when it is first asked for and removed in the end; and whole
 * files, written and read. Wants _GNU_SOURCE.
 */
#ifndef NIB_TEST_DIRECTORY_H
#define NIB_TEST_DIRECTORY_H

#include <dirent.h>
#include <ftw.h>
#include <pthread.h>

#include "test.h"

static char directory[64];

/* The entries of a directory; -1 where there is none. */
static inline int entries(const char *path)
{
    int n = 0;
    DIR *listing = opendir(path);
    if (!listing)
        return -1;
    for (struct dirent *item; (item = readdir(listing));)
        n += strcmp(item->d_name, ".") != 0 && strcmp(item->d_name, "..") != 0;
    closedir(listing);
    return n;
}

/* All but the directory itself. */
static inline int remove_entry(const char *path, const struct stat *facts, int type, struct FTW *walk)
{
    (void)facts, (void)type;
    return walk->level ? remove(path) : 0;
}

static inline void remove_directory(void)
{
    nftw(directory, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    rmdir(directory);
}

static inline void make_directory(void)
{
    if (directory[0])
        return;
    const char *tmp = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%.40s/nib-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(directory)) {
        fprintf(stderr, "no directory for the test's files\n");
        exit(2);
    }
    atexit(remove_directory);
}

static inline void empty_directory(void)
{
    make_directory();
    nftw(directory, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* The path of a name in the directory: the same pointer for the same name, also for ranks, which are threads. An
 * absolute path stays what it is. */
static inline const char *at(const char *name)
{
    enum { MOST = 128 };
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static char *paths[MOST];
    char path[256];
    int i = 0;
    if (name[0] == '/')
        return name;
    pthread_mutex_lock(&mutex);
    make_directory();
    snprintf(path, sizeof path, "%s/%s", directory, name);
    while (i < MOST && paths[i] && strcmp(paths[i], path) != 0)
        i++;
    if (i == MOST || (!paths[i] && !(paths[i] = strdup(path)))) {
        fprintf(stderr, "no path for %s\n", name);
        exit(2);
    }
    pthread_mutex_unlock(&mutex);
    return paths[i];
}

static inline bool exists(const char *path) { return access(path, F_OK) == 0; }

static inline void put_file(const char *name, const void *bytes, size_t count)
{
    FILE *file = fopen(at(name), "wb");
    CHECK(file && fwrite(bytes, 1, count, file) == count);
    CHECK(file && fclose(file) == 0);
}

static inline void put_text(const char *name, const char *text) { put_file(name, text, strlen(text)); }

/* The bytes of a file and a 0 behind them; NULL where there is none. */
static inline void *get_file(const char *name, size_t *count)
{
    FILE *file = fopen(at(name), "rb");
    *count = 0;
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    *count = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*count + 1);
    CHECK(fread(bytes, 1, *count, file) == *count);
    bytes[*count] = '\0';
    fclose(file);
    return bytes;
}

#endif
