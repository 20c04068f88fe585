/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_folder.h - a folder for a test's files, made when it is first asked for and removed in the end. Wants _GNU_SOURCE.
 */
#ifndef NIB_TEST_FOLDER_H
#define NIB_TEST_FOLDER_H

#include <dirent.h>

#include "test.h"

static char folder[64];

static int count_files(bool remove_them)
{
    DIR *listing = opendir(folder);
    int count = 0;
    if (!listing)
        return -1;
    for (struct dirent *item; (item = readdir(listing));)
        if (strcmp(item->d_name, ".") != 0 && strcmp(item->d_name, "..") != 0) {
            count++;
            if (remove_them)
                unlinkat(dirfd(listing), item->d_name, 0);
        }
    closedir(listing);
    return count;
}

static void remove_folder(void)
{
    count_files(true);
    rmdir(folder);
}

static void make_folder(void)
{
    if (folder[0])
        return;
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.40s/nib-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(folder)) {
        fprintf(stderr, "no folder for the test's files\n");
        exit(2);
    }
    atexit(remove_folder);
}

#endif
