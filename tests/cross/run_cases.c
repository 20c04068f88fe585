/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run_cases.c - golden files on another machine than the one that built this: the cases that list_cases.c found there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conform.h"

#include "cases.h"

enum { CASES = sizeof cases / sizeof *cases };

static size_t failed;

static void fail(const char *path, const char *name, const char *why)
{
    failed++;
    printf("FAILED %s: %s: %s\n", path, name, why);
}

static void run_case(const struct listed_case *listed, struct conform_file *file)
{
    struct conform_case what;
    struct conform_result result = { .verdict = CONFORM_PASSED };
    memcpy(&what, listed->what, sizeof what);
    conform_run(&what, listed->name, file, &result);
    if (result.verdict == CONFORM_DIFFERENT)
        fail(listed->file, listed->name, result.tensor);
    else if (result.verdict == CONFORM_BAD)
        fail(listed->file, listed->name, result.message);
}

/* The cases of one file, which lie side by side, and whether they use all of it. Returns how many there are. */
static size_t run_file(const struct listed_case *first)
{
    struct conform_file file = { 0 };
    size_t n = 0;
    while (first + n < cases + CASES && strcmp(first[n].file, first->file) == 0)
        n++;
    if (nib_file_open(first->file, &file.file)) {
        fail(first->file, "opening it", nib_last_error());
        return n;
    }
    file.claimed = calloc(nib_file_count(file.file) + 1, 1);
    for (size_t i = 0; i < n && file.claimed; i++)
        run_case(&first[i], &file);
    for (size_t i = 0; i < nib_file_count(file.file) && file.claimed; i++)
        if (!file.claimed[i]) {
            fail(first->file, "its tensors", "no case uses one of them");
            break;
        }
    free(file.claimed);
    nib_file_close(file.file);
    return n;
}

int main(void)
{
    for (size_t i = 0; i < CASES;)
        i += run_file(&cases[i]);
    printf("%s\n%zu passed, %zu failed\n", nib_isa(), CASES - (failed < CASES ? failed : CASES), failed);
    return failed != 0;
}
