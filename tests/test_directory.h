/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_folder.h - a directory for a test's files, made when it is first asked for and removed in the end. Wants _GNU_SOURCE.
 */
#ifndef NIB_TEST_DIRECTORY_H
#define NIB_TEST_DIRECTORY_H

#include <dirent.h>

#include "test.h"

static char directory[64];

static int count_files(bool remove_them)
{
    DIR *listing = opendir(directory);
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

static void remove_directory(void)
{
    count_files(true);
    rmdir(directory);
}

static void make_directory(void)
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

#endif
