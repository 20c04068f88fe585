/* SPDX-License-Identifier: Apache-2.0 */
/*
 * abi.h - what a struct with `bytes` goes through, whichever it is: the right size, a later caller's larger one, and
 * sizes that no version has. Every struct ends where its page ends, so that reading or writing on crashes.
 */
#ifndef NIB_TEST_ABI_H
#define NIB_TEST_ABI_H

#include "test.h"

enum { ADDED = 24, CANARY = 16, MOST = 4096 };

/* A struct of a caller; `call` gives it to the library, which reads or writes it. */
struct subject {
    const char *name;
    size_t bytes; /* sizeof */
    void (*fill)(void *structure);
    nib_status (*call)(void *structure);
    int (*check)(const void *structure); /* of one that is written: whether it was, up to its last field */
};

static inline void set_bytes(void *structure, size_t bytes) { memcpy(structure, &bytes, sizeof bytes); }

static inline size_t get_bytes(const void *structure)
{
    size_t bytes;
    memcpy(&bytes, structure, sizeof bytes);
    return bytes;
}

/* A filled struct with so many bytes of a later version behind it. */
static inline char *subject_struct(const struct subject *s, size_t added)
{
    char *structure = (char *)test_guarded(s->bytes + added, true);
    if (s->fill)
        s->fill(structure);
    set_bytes(structure, s->bytes + added);
    return structure;
}

/* Sizes that no version has: nothing behind `bytes` is there to be looked at. */
static inline void check_sizes(const struct subject *s)
{
    const size_t wrong[] = { 0, 1, 8, s->bytes - 1, MOST + 1, SIZE_MAX, (size_t)0xA5A5A5A5A5A5A5A5u };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        void *alone = test_guarded(sizeof(size_t), true);
        set_bytes(alone, wrong[i]);
        const nib_status status = s->call(alone);
        CHECK_THAT(status == NIB_ERR_ARG, "%s of %zu bytes: %s", s->name, wrong[i], nib_status_name(status));
        CHECK_THAT(status != NIB_ERR_ARG || strstr(nib_last_error(), "bytes is"), "%s of %zu bytes: \"%s\"", s->name,
                   wrong[i], nib_last_error());
        CHECK(get_bytes(alone) == wrong[i]);
    }
}

/* A struct that is read. */
static inline void check_input(const struct subject *s)
{
    const size_t more[] = { 0, ADDED, MOST - s->bytes };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        const nib_status status = s->call(subject_struct(s, more[i]));
        CHECK_THAT(!status, "%s with %zu bytes more, all 0: %s: %s", s->name, more[i], nib_status_name(status),
                   nib_last_error());
    }
    const size_t set[] = { 0, ADDED - 1 };
    for (size_t i = 0; i < sizeof set / sizeof *set; i++) {
        char *larger = subject_struct(s, ADDED);
        larger[s->bytes + set[i]] = 1;
        const nib_status status = s->call(larger);
        CHECK_THAT(status == NIB_ERR_UNSUPPORTED, "%s with byte %zu of a later version: %s", s->name, set[i],
                   nib_status_name(status));
    }
    check_sizes(s);
}

/* A struct that is written: what lies in it before does not matter. */
static inline void check_output(const struct subject *s)
{
    char *exact = subject_struct(s, 0);
    nib_status status = s->call(exact);
    CHECK_THAT(!status && s->check(exact) && get_bytes(exact) == s->bytes, "%s: %s", s->name, nib_status_name(status));

    char *larger = subject_struct(s, ADDED + CANARY);
    memset(larger, 0xEE, s->bytes + ADDED + CANARY);
    set_bytes(larger, s->bytes + ADDED);
    status = s->call(larger);
    CHECK_THAT(!status && s->check(larger) && get_bytes(larger) == s->bytes + ADDED, "%s, larger: %s", s->name,
               nib_status_name(status));
    for (size_t i = 0; i < ADDED + CANARY; i++)
        CHECK_THAT((uint8_t)larger[s->bytes + i] == (i < ADDED ? 0 : 0xEE), "%s: byte %zu behind it is %02x", s->name,
                   i, (uint8_t)larger[s->bytes + i]);
    check_sizes(s);
}

#endif
