/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structs that have grown: a made-up one of three versions, since none of the public ones has a history yet. tests/abi/
 * has those, with callers of 0.2 and of the future.
 */
#include "test.h"

#include "base/base.h"

/* The first version had a and b, the second c too; this one has d. */
struct grown {
    size_t bytes;
    int64_t a;
    uint8_t b;
    int64_t c;
    float d;
};

enum {
    FIRST = NIB_UP_TO(struct grown, b),
    SECOND = NIB_UP_TO(struct grown, c),
    THIRD = NIB_UP_TO(struct grown, d),
};

static const struct grown defaults = { .bytes = THIRD, .a = -1, .b = 1, .c = 3, .d = 4 };

/* A caller's struct of so many bytes and no more; all fields that fit are set. */
static void *caller(size_t bytes, size_t there)
{
    const struct grown all = { .bytes = bytes, .a = 10, .b = 20, .c = 30, .d = 40 };
    char *memory = test_guarded(there, true);
    memcpy(memory, &all, there < sizeof all ? there : sizeof all);
    return memory;
}

TEST(sizes_of_versions)
{
    CHECK(FIRST == 24 && SECOND == 32 && THIRD == 40 && THIRD == sizeof(struct grown));
}

TEST(older_callers_are_read_over_defaults)
{
    const size_t sizes[] = { FIRST, SECOND, THIRD };
    for (int i = 0; i < 3; i++) {
        struct grown out = defaults;
        CHECK_OK(nib_struct_check("it", caller(sizes[i], sizes[i]), sizeof out, FIRST));
        CHECK_OK(nib_struct_read("it", caller(sizes[i], sizes[i]), &out, sizeof out, FIRST));
        CHECK(out.bytes == sizeof out && out.a == 10 && out.b == 20);
        CHECK(out.c == (i < 1 ? 3 : 30));
        CHECK(out.d == (i < 2 ? 4.0f : 40.0f));
    }
}

TEST(versions_that_are_no_longer_served)
{
    struct grown out = defaults;
    CHECK_FAILS(nib_struct_read("it", caller(FIRST, 8), &out, sizeof out, SECOND), NIB_ERR_ARG,
                "it->bytes is 24, and no version had less than 32");
    CHECK_OK(nib_struct_read("it", caller(SECOND, SECOND), &out, sizeof out, SECOND));
}

TEST(sizes_that_no_version_has_are_rejected_unread)
{
    const size_t sizes[] = { 0, 1, 7, 8, FIRST - 1, 4097, SIZE_MAX / 2, SIZE_MAX, (size_t)0xA5A5A5A5A5A5A5A5u };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct grown out;
        void *in = caller(sizes[i], sizeof(size_t));
        memcpy(&out, &defaults, sizeof out); /* with its padding */
        CHECK_FAILS(nib_struct_read("it", in, &out, sizeof out, FIRST), NIB_ERR_ARG, "it->bytes is");
        CHECK_FAILS(nib_struct_check("it", in, sizeof out, FIRST), NIB_ERR_ARG, "it->bytes is");
        CHECK_FAILS(nib_struct_check_output("it", in, FIRST), NIB_ERR_ARG, "it->bytes is");
        CHECK_FAILS(nib_struct_init("it", test_guarded(0, true), sizes[i], &defaults, sizeof defaults, FIRST),
                    NIB_ERR_ARG, "it->bytes is");
        CHECK_BYTES(&out, &defaults, sizeof out);
    }
}

TEST(later_callers_may_set_nothing_that_is_unknown)
{
    for (size_t more = 1; more <= 4096 - THIRD; more += 59) {
        struct grown out = defaults;
        uint8_t *in = caller(THIRD + more, THIRD + more);
        CHECK_OK(nib_struct_read("it", in, &out, sizeof out, FIRST));
        CHECK(out.bytes == sizeof out && out.a == 10 && out.d == 40.0f);
        in[THIRD + test_below((int64_t)more)] = 0x80;
        memcpy(&out, &defaults, sizeof out); /* with its padding */
        CHECK_FAILS(nib_struct_read("it", in, &out, sizeof out, FIRST), NIB_ERR_UNSUPPORTED,
                    "it sets fields that version " NIB_VERSION " does not have");
        CHECK_BYTES(&out, &defaults, sizeof out);
        CHECK_OK(nib_struct_check_output("it", in, FIRST)); /* what is there before it is written does not matter */
    }
    CHECK_OK(nib_struct_check("it", caller(4096, 4096), sizeof defaults, FIRST));
}

TEST(only_the_callers_bytes_are_written)
{
    const size_t sizes[] = { FIRST, SECOND, THIRD, THIRD + 1, THIRD + 24, 4096 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int init = 0; init < 2; init++) {
            const size_t bytes = sizes[i], known = bytes < THIRD ? bytes : THIRD;
            uint8_t *out = test_guarded(bytes, true); /* writing on crashes */
            memset(out, 0xEE, bytes);
            if (init) {
                CHECK_OK(nib_struct_init("it", out, bytes, &defaults, sizeof defaults, FIRST));
            } else {
                memcpy(out, &bytes, sizeof bytes);
                nib_struct_write(out, &defaults, sizeof defaults);
            }
            CHECK_BYTES(out, &bytes, sizeof bytes);
            CHECK_BYTES(out + sizeof bytes, (const uint8_t *)&defaults + sizeof bytes, known - sizeof bytes);
            for (size_t at = known; at < bytes; at++)
                CHECK(out[at] == 0);
        }
}

TEST_MAIN
