/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_alloc.h - the library's allocations, counted and made to fail.
 *
 * A test that says NIB_TEST_WRAP_ALLOC is linked with -Wl,--wrap=aligned_alloc,--wrap=realloc, which leads here.
 */
#ifndef NIB_TEST_ALLOC_H
#define NIB_TEST_ALLOC_H

#ifdef NIB_TEST_WRAP_ALLOC

#include <stdatomic.h>
#include <stddef.h>

/* Of this thread: the allocation that finds 0 here fails; below 0 none does. */
__attribute__((unused)) static _Thread_local long allocations_left = -1;
/* Of all threads, so far. */
__attribute__((unused)) static atomic_long allocations;
__attribute__((unused)) static atomic_size_t largest_allocation; /* in bytes; a test sets it back */

void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);

static int test_allocation_fails(size_t bytes)
{
    size_t largest = largest_allocation;
    while (bytes > largest && !atomic_compare_exchange_weak(&largest_allocation, &largest, bytes))
        continue;
    allocations++;
    return allocations_left >= 0 && allocations_left-- == 0;
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return test_allocation_fails(bytes) ? NULL : __real_aligned_alloc(alignment, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    return test_allocation_fails(bytes) ? NULL : __real_realloc(memory, bytes);
}

#endif
#endif
