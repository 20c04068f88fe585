/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_untouched.h - for calls that fail: outputs that stay as they were, and nothing that leaks.
 */
#ifndef NIB_TEST_UNTOUCHED_H
#define NIB_TEST_UNTOUCHED_H

#include "test_tensors.h"

/* Tests ask for sizes that no machine has; a sanitizer must answer them as the system does. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

/* In a sanitized program: whether anything has leaked so far. */
int __lsan_do_recoverable_leak_check(void) __attribute__((weak));
#define CHECK_NO_LEAKS() CHECK(!__lsan_do_recoverable_leak_check || __lsan_do_recoverable_leak_check() == 0)

/* What outputs hold before a call that fails, and so afterwards. */
static char sentinel[1];
#define UNTOUCHED ((void *)sentinel)

/* A reduction that fails. */
static inline nib_status reject(void *context, float *values, size_t n)
{
    (void)context, (void)values, (void)n;
    return NIB_ERR_COMM;
}

#define NULLS(call, words) CHECK_FAILS(call, NIB_ERR_ARG, words " is NULL")

#endif
