/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gguf.c - the GGUF container: every rule of the reader, the writer's bytes, the order of the nibbles, and what
 * happens when the disk, the memory or the caller fails.
 *
 * Built with NIB_TEST_WRAP_ALLOC and -Wl,--wrap=aligned_alloc,--wrap=realloc it also fails every allocation once.
 */
#define _GNU_SOURCE
#include "test_alloc.h"
#include "test_directory.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include "io/gguf.h"

/* ---- Files made by hand ---- */

static uint8_t made[1 << 18];
static size_t made_bytes;

static void raw(const void *bytes, size_t count)
{
    memcpy(made + made_bytes, bytes, count);
    made_bytes += count;
}

static void u8(int value) { raw(&(uint8_t){ (uint8_t)value }, 1); }
static void u16(int value) { raw(&(uint16_t){ (uint16_t)value }, 2); }
static void u32(uint32_t value) { raw(&value, 4); }
static void u64(uint64_t value) { raw(&value, 8); }
static void f32(float value) { raw(&value, 4); }
static void f64(double value) { raw(&value, 8); }
static void str(const char *text) { u64(strlen(text)), raw(text, strlen(text)); }

static void begin(uint32_t version, uint64_t tensors, uint64_t keys)
{
    made_bytes = 0;
    raw("GGUF", 4);
    u32(version), u64(tensors), u64(keys);
}

static void key(const char *name, uint32_t kind) { str(name), u32(kind); }

static void tensor(const char *name, uint32_t rank, const uint64_t *ne, uint32_t type, uint64_t offset)
{
    str(name), u32(rank);
    for (uint32_t i = 0; i < rank; i++)
        u64(ne[i]);
    u32(type), u64(offset);
}

#define NE(...) \
    sizeof((uint64_t[]){ __VA_ARGS__ }) / 8, (uint64_t[]) { __VA_ARGS__ }

/* Zeros up to a multiple of the alignment, then 1, 2, 3, ... */
static void data(size_t alignment, size_t count)
{
    while (made_bytes % alignment)
        u8(0);
    for (size_t i = 0; i < count; i++)
        u8((int)(i + 1));
}

static const char *save(void)
{
    const char *path = at("made.gguf");
    put_file(path, made, made_bytes);
    return path;
}

static nib_gguf *open_file(int line, const char *path)
{
    nib_gguf *file = NULL;
    if (nib_gguf_open(path, &file))
        test_fail(__FILE__, line, "not opened: %s", nib_last_error());
    return file;
}
#define OPEN(path) open_file(__LINE__, path)

static void check_rejected(int line, nib_status status, const char *words)
{
    const char *path = save();
    nib_gguf *file = NULL;
    const nib_status got = nib_gguf_open(path, &file);
    if (got != status || file)
        test_fail(__FILE__, line, "status %s", nib_status_name(got));
    else if (strncmp(nib_last_error(), path, strlen(path)) != 0 || !strstr(nib_last_error(), words))
        test_fail(__FILE__, line, "\"%s\" does not say \"%s\"", nib_last_error(), words);
    nib_gguf_close(file);
}
#define REJECTED(words) check_rejected(__LINE__, NIB_ERR_DATA, words)
#define UNSUPPORTED(words) check_rejected(__LINE__, NIB_ERR_UNSUPPORTED, words)
#define ACCEPTED() nib_gguf_close(OPEN(save()))

/* ---- Reading ---- */

TEST(types)
{
    CHECK(!nib_gguf_type_facts(4) && !nib_gguf_type_facts(31) && !nib_gguf_type_facts(36) &&
          !nib_gguf_type_facts(1000));
    const struct nib_gguf_type_facts *facts;
    static const struct {
        uint32_t type;
        const char *name;
        size_t elements, bytes;
    } blocks[] = { { 9, "Q8_1", 32, 40 },     { 15, "Q8_K", 256, 292 },   { 16, "IQ2_XXS", 256, 66 },
                   { 17, "IQ2_XS", 256, 74 }, { 18, "IQ3_XXS", 256, 98 }, { 19, "IQ1_S", 256, 50 },
                   { 21, "IQ3_S", 256, 110 }, { 22, "IQ2_S", 256, 82 },   { 29, "IQ1_M", 256, 56 },
                   { 34, "TQ1_0", 256, 54 },  { 35, "TQ2_0", 256, 66 },   { 39, "MXFP4", 32, 17 },
                   { 40, "NVFP4", 64, 36 },   { 41, "Q1_0", 128, 18 } };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        facts = nib_gguf_type_facts(blocks[i].type);
        CHECK_THAT(facts && !strcmp(facts->name, blocks[i].name) && facts->elements == blocks[i].elements &&
                       facts->bytes == blocks[i].bytes,
                   "%s", blocks[i].name);
    }
    for (int dtype = 0; dtype < NIB_DTYPE_COUNT; dtype++) {
        uint32_t type;
        nib_dtype back = NIB_U8;
        if (!nib_gguf_type_of_dtype((nib_dtype)dtype, &type))
            continue;
        facts = nib_gguf_type_facts(type);
        CHECK(facts && facts->elements == 1 && (int)facts->bytes * 8 == nib_dtype_bits((nib_dtype)dtype));
        CHECK(facts && !strcmp(facts->name, nib_dtype_name((nib_dtype)dtype)));
        CHECK(nib_gguf_dtype_of_type(type, &back) && (int)back == dtype);
    }
    uint32_t type;
    nib_dtype dtype;
    CHECK(!nib_gguf_type_of_dtype(NIB_U8, &type) && !nib_gguf_dtype_of_type(40, &dtype));
    CHECK(!strcmp(nib_gguf_kind_name(8), "string") && !nib_gguf_kind_name(13));
}

TEST(read_empty)
{
    for (uint32_t version = 2; version <= 3; version++) {
        begin(version, 0, 0);
        nib_gguf *file = OPEN(save()); /* 24 bytes: the data would begin at 32, but there is none */
        struct nib_gguf_facts facts = nib_gguf_facts(file);
        CHECK(facts.version == version && facts.alignment == 32 && facts.data_begin == 32 && facts.trailing == 0);
        CHECK(nib_gguf_count(file) == 0 && nib_gguf_key_count(file) == 0);
        CHECK(!strcmp(nib_gguf_path(file), at("made.gguf")));
        struct nib_gguf_entry entry;
        struct nib_gguf_value value;
        uint8_t byte;
        CHECK_FAILS(nib_gguf_entry(file, 0, &entry), NIB_ERR_ARG, "there is no tensor 0 among its 0");
        CHECK_FAILS(nib_gguf_value(file, 0, &value), NIB_ERR_ARG, "there is no key 0 among its 0");
        CHECK_FAILS(nib_gguf_read(file, 0, 0, &byte, 1), NIB_ERR_ARG, "there is no tensor 0");
        CHECK_FAILS(nib_gguf_read_value(file, 0, 0, &byte, 1), NIB_ERR_ARG, "there is no key 0");
        nib_gguf_close(file);
    }
    nib_gguf *file = NULL;
    CHECK_FAILS(nib_gguf_open(NULL, &file), NIB_ERR_ARG, "path is NULL");
    CHECK_FAILS(nib_gguf_open("x", NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_gguf_open(at("absent"), &file), NIB_ERR_IO, "absent: cannot open");
    CHECK_FAILS(nib_gguf_open(directory, &file), NIB_ERR_IO, "not a regular file");
    CHECK(nib_gguf_count(NULL) == 0 && nib_gguf_key_count(NULL) == 0);
    nib_gguf_close(NULL);
}

TEST(read_tensors)
{
    begin(3, 5, 0);
    tensor("z", NE(3, 2), NIB_GGUF_F32, 0); /* 24 bytes, padded to 32 */
    tensor("blocks", NE(64, 2, 1, 2), NIB_GGUF_NVFP4, 32);
    tensor("a", 0, NULL, NIB_GGUF_BF16, 192);
    tensor("none", NE(5, 0), NIB_GGUF_I64, 224);
    tensor("\xC3\xA9", NE(7), NIB_GGUF_I8, 224);
    data(32, 224 + 7);
    nib_gguf *file = OPEN(save());
    static const struct nib_gguf_entry wanted[] = {
        { "z", NIB_GGUF_F32, 2, { 2, 3 }, 0, 24 },     { "blocks", NIB_GGUF_NVFP4, 4, { 2, 1, 2, 64 }, 32, 144 },
        { "a", NIB_GGUF_BF16, 0, { 0 }, 192, 2 },      { "none", NIB_GGUF_I64, 2, { 0, 5 }, 224, 0 },
        { "\xC3\xA9", NIB_GGUF_I8, 1, { 7 }, 224, 7 },
    };
    CHECK(nib_gguf_count(file) == 5);
    CHECK(nib_gguf_facts(file).trailing == 0);
    for (size_t i = 0; i < 5; i++) {
        struct nib_gguf_entry entry = { .name = "" };
        size_t index = 99;
        CHECK_OK(nib_gguf_entry(file, i, &entry));
        CHECK(!strcmp(entry.name, wanted[i].name) && entry.type == wanted[i].type && entry.rank == wanted[i].rank);
        CHECK_BYTES(entry.shape, wanted[i].shape, sizeof entry.shape);
        CHECK(entry.begin == wanted[i].begin && entry.bytes == wanted[i].bytes);
        CHECK(nib_gguf_find(file, wanted[i].name, &index) && index == i);
    }
    size_t index = 99;
    CHECK(!nib_gguf_find(file, "b", &index) && index == 99);
    uint8_t got[8] = { 0 };
    CHECK_OK(nib_gguf_read(file, 4, 1, got, 6));
    const uint8_t first = 224 + 2;
    for (int i = 0; i < 6; i++)
        CHECK(got[i] == (uint8_t)(first + i));
    CHECK(got[6] == 0);
    CHECK_OK(nib_gguf_read(file, 4, 7, NULL, 0));
    CHECK_OK(nib_gguf_read(file, 3, 0, NULL, 0));
    CHECK_FAILS(nib_gguf_read(file, 4, 7, got, 1), NIB_ERR_ARG, "1 bytes from byte 7 are not within its 7 bytes");
    CHECK_FAILS(nib_gguf_read(file, 4, 2, got, SIZE_MAX), NIB_ERR_ARG, "are not within its 7 bytes");
    CHECK_FAILS(nib_gguf_read(file, 4, UINT64_MAX, got, 2), NIB_ERR_ARG, "tensor \"\xC3\xA9\": 2 bytes from");
    CHECK_FAILS(nib_gguf_read(file, 4, 0, NULL, 1), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_gguf_read(NULL, 0, 0, got, 1), NIB_ERR_ARG, "file is NULL");
    nib_gguf_close(file);
    /* Padding behind the last tensor and more than that. */
    for (int more = 1; more <= 40; more++) {
        u8(0);
        file = OPEN(save());
        CHECK(nib_gguf_facts(file).trailing == (more > 25 ? (uint64_t)more - 25 : 0));
        nib_gguf_close(file);
    }
}

/* One key of each kind. */
static void make_keys(void)
{
    begin(3, 0, 17);
    key("u8", 0), u8(200);
    key("i8", 1), u8(-3);
    key("u16", 2), u16(65000);
    key("i16", 3), u16(-300);
    key("u32", 4), u32(4000000000u);
    key("i32", 5), u32((uint32_t)-70000);
    key("f32", 6), f32(0.1f);
    key("bool", 7), u8(1);
    key("string", 8), str("h\xC3\xA9llo");
    key("u64", 10), u64(UINT64_MAX);
    key("i64", 11), u64((uint64_t)INT64_MIN);
    key("f64", 12), f64(0.1);
    key("strings", 9), u32(8), u64(3), str("one"), str(""), str("three");
    key("numbers", 9), u32(4), u64(3), u32(1), u32(2), u32(3);
    key("nothing", 9), u32(8), u64(0);
    key("nul", 8), u64(3), raw("a\0b", 3);
    key("nuls", 9), u32(8), u64(2), str("x"), u64(3), raw("a\0b", 3);
}

TEST(read_keys)
{
    make_keys();
    nib_gguf *file = OPEN(save());
    struct nib_gguf_value value = { .key = NULL };
    CHECK(nib_gguf_key_count(file) == 17);
    CHECK_OK(nib_gguf_value(file, 12, &value));
    CHECK(!strcmp(value.key, "strings") && value.kind == NIB_GGUF_KIND_ARRAY && value.item == NIB_GGUF_KIND_STRING);
    CHECK(value.count == 3 && value.bytes == 3 * 8 + 8);
    CHECK_OK(nib_gguf_value(file, 8, &value));
    CHECK(value.kind == NIB_GGUF_KIND_STRING && value.item == NIB_GGUF_KIND_STRING && value.count == 1);
    CHECK(value.bytes == 6);
    CHECK_OK(nib_gguf_value(file, 9, &value));
    CHECK(value.number.u == UINT64_MAX && value.bytes == 8);
    size_t index;
    uint32_t values[3] = { 0 };
    CHECK(nib_gguf_find_key(file, "numbers", &index) && index == 13);
    CHECK_OK(nib_gguf_read_value(file, index, 4, values, 8));
    CHECK(values[0] == 2 && values[1] == 3 && values[2] == 0);
    CHECK_FAILS(nib_gguf_read_value(file, index, 4, values, 9), NIB_ERR_ARG,
                "key \"numbers\": 9 bytes from byte 4 are not within its 12 bytes");
    CHECK(!nib_gguf_find_key(file, "number", &index));

    static const struct {
        const char *key;
        int64_t value;
    } integers[] = { { "u8", 200 },         { "i8", -3 },      { "u16", 65000 },    { "i16", -300 },
                     { "u32", 4000000000 }, { "i32", -70000 }, { "i64", INT64_MIN } };
    bool found = false;
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        int64_t integer = 0;
        double number = 0;
        CHECK_OK(nib_gguf_get_integer(file, integers[i].key, &integer, &found));
        CHECK(found && integer == integers[i].value);
        CHECK_OK(nib_gguf_get_number(file, integers[i].key, &number, &found));
        CHECK(found && number == (double)integers[i].value);
    }
    int64_t integer = 5;
    double number = 5;
    bool truth = false;
    char *string = NULL;
    struct nib_gguf_strings strings = { 0 };
    CHECK_OK(nib_gguf_get_integer(file, "x", &integer, &found));
    CHECK(!found && integer == 5);
    CHECK_OK(nib_gguf_get_number(file, "x", &number, &found));
    CHECK(!found && number == 5);
    CHECK_OK(nib_gguf_get_bool(file, "x", &truth, &found));
    CHECK(!found && !truth);
    CHECK_OK(nib_gguf_get_string(file, "x", &string, &found));
    CHECK(!found && !string);
    CHECK_OK(nib_gguf_get_strings(file, "x", &strings, &found));
    CHECK(!found && !strings.text);
    CHECK_FAILS(nib_gguf_get_integer(file, "u64", &integer, &found), NIB_ERR_DATA,
                "key \"u64\": 18446744073709551615 is larger than 63 bits hold");
    CHECK_FAILS(nib_gguf_get_integer(file, "f32", &integer, &found), NIB_ERR_DATA,
                "key \"f32\" is f32, and must be an integer");
    CHECK_FAILS(nib_gguf_get_integer(file, "bool", &integer, &found), NIB_ERR_DATA, "is bool, and must be an integer");
    CHECK_FAILS(nib_gguf_get_integer(file, "numbers", &integer, &found), NIB_ERR_DATA,
                "is an array of u32, and must be an integer");
    CHECK_FAILS(nib_gguf_get_number(file, "string", &number, &found), NIB_ERR_DATA, "is string, and must be a number");
    CHECK_FAILS(nib_gguf_get_bool(file, "u8", &truth, &found), NIB_ERR_DATA, "is u8, and must be a bool");
    CHECK_FAILS(nib_gguf_get_string(file, "bool", &string, &found), NIB_ERR_DATA, "is bool, and must be a string");
    CHECK_FAILS(nib_gguf_get_strings(file, "string", &strings, &found), NIB_ERR_DATA,
                "is string, and must be an array of strings");
    CHECK_FAILS(nib_gguf_get_strings(file, "numbers", &strings, &found), NIB_ERR_DATA,
                "is an array of u32, and must be an array of strings");
    CHECK_FAILS(nib_gguf_get_string(file, "nul", &string, &found), NIB_ERR_DATA, "its string holds a NUL");
    CHECK_FAILS(nib_gguf_get_strings(file, "nuls", &strings, &found), NIB_ERR_DATA, "one of its strings holds a NUL");
    CHECK(integer == 5 && number == 5 && !truth && !string && !strings.text);

    CHECK_OK(nib_gguf_get_number(file, "f32", &number, &found));
    CHECK(found && number == (double)0.1f);
    CHECK_OK(nib_gguf_get_number(file, "f64", &number, &found));
    CHECK(number == 0.1);
    CHECK_OK(nib_gguf_get_number(file, "u64", &number, &found));
    CHECK(number == 0x1p64);
    CHECK_OK(nib_gguf_get_bool(file, "bool", &truth, &found));
    CHECK(truth);
    CHECK_OK(nib_gguf_get_string(file, "string", &string, &found));
    CHECK(found && string && !strcmp(string, "h\xC3\xA9llo"));
    nib_free(string);
    CHECK_OK(nib_gguf_get_strings(file, "strings", &strings, &found));
    CHECK(found && strings.count == 3 && !strcmp(strings.text + strings.starts[0], "one"));
    CHECK(!strcmp(strings.text + strings.starts[1], "") && !strcmp(strings.text + strings.starts[2], "three"));
    nib_gguf_strings_free(&strings);
    CHECK_OK(nib_gguf_get_strings(file, "nothing", &strings, &found));
    CHECK(found && strings.count == 0);
    nib_gguf_strings_free(&strings);
    nib_gguf_close(file);
}

TEST(refuse_head)
{
    made_bytes = 0;
    REJECTED("it has 0 bytes, and a GGUF file has at least 24");
    begin(3, 0, 0);
    made_bytes = 23;
    REJECTED("it has 23 bytes");
    begin(3, 0, 0);
    made[3] = 'f';
    REJECTED("it is not a GGUF file");
    begin(1, 0, 0);
    UNSUPPORTED("GGUF version 1 is not supported");
    begin(0, 0, 0);
    UNSUPPORTED("GGUF version 0 is not supported");
    begin(4, 0, 0);
    UNSUPPORTED("GGUF version 4 is not supported; versions 2 and 3 are");
    begin(0x03000000, 0, 0);
    UNSUPPORTED("the file is big-endian");
    begin(3, 0, 1);
    REJECTED("it claims 1 keys, but has only 0 bytes for them");
    begin(3, UINT64_MAX, 0);
    REJECTED("it claims 18446744073709551615 tensors, but has only 0 bytes");
    begin(3, 0, (uint64_t)INT64_MIN);
    u64(0);
    REJECTED("claims 9223372036854775808 keys");
}

TEST(refuse_keys)
{
    begin(3, 0, 1), key("", 0), u8(1), u64(0);
    REJECTED("the key is empty");
    begin(3, 0, 1), u64(UINT64_MAX), u64(0);
    REJECTED("the key has 18446744073709551615 bytes, more than the limit of 65535");
    begin(3, 0, 1), u64(7), raw("general", 7);
    REJECTED("the file ends within its kind");
    begin(3, 0, 1), u64(9), raw("general", 7);
    REJECTED("the file ends within the key");
    begin(3, 0, 1), u64(3), raw("a\0b", 3), u32(0), u8(1);
    REJECTED("the key \"a\" holds a NUL");
    begin(3, 0, 1), key("\xFFx", 0), u8(1);
    REJECTED("the key \"?x\" is not UTF-8");
    begin(3, 0, 1), key("k", 13), u64(1);
    REJECTED("key \"k\": its kind 13 is unknown");
    begin(3, 0, 1), key("k", UINT32_MAX), u64(1);
    REJECTED("key \"k\": its kind 4294967295 is unknown");
    begin(3, 0, 1), key("k", 12), u32(1);
    REJECTED("key \"k\": the file ends within its value");
    begin(3, 0, 1), key("k", 8), u64(1);
    REJECTED("key \"k\": its string claims 1 bytes, but the file has only 0 more");
    begin(3, 0, 1), key("k", 8), u64((1u << 30) + 1);
    REJECTED("key \"k\": its string has 1073741825 bytes, more than the limit of 1073741824");
    begin(3, 0, 1), key("k", 8), u64(1u << 30);
    REJECTED("key \"k\": its string claims 1073741824 bytes, but the file has only 0 more");
    begin(3, 0, 1), key("k", 9), u32(9), u64(0);
    REJECTED("key \"k\": it is an array of arrays");
    begin(3, 0, 1), key("k", 9), u32(14), u64(0);
    REJECTED("key \"k\": the kind of its items 14 is unknown");
    begin(3, 0, 1), key("k", 9), u32(0), u32(0);
    REJECTED("key \"k\": the file ends within its count");
    begin(3, 0, 1), key("k", 9), u32(0), u64((1u << 30) + 1);
    REJECTED("key \"k\": its array has 1073741825 items, more than the limit of 1073741824");
    begin(3, 0, 1), key("k", 9), u32(10), u64(1u << 30);
    REJECTED("key \"k\": its array claims 8589934592 bytes, but the file has only 0 more");
    begin(3, 0, 1), key("k", 9), u32(8), u64(3), str("abc"), u64(4), raw("abc", 3);
    REJECTED("key \"k\": item 1 of 3: the string claims 4 bytes, but the file has only 3 more");
    begin(3, 0, 1), key("k", 9), u32(8), u64(3), str("abc");
    REJECTED("key \"k\": item 1 of 3: the file ends within the string");
    begin(3, 0, 3), key("k", 0), u8(0), key("j", 0), u8(0), key("k", 1), u8(0);
    REJECTED("key \"k\" comes twice");
    begin(3, 0, 1), key("general.alignment", 5), u32(32);
    REJECTED("key \"general.alignment\": it is i32, and must be u32");
    begin(3, 0, 1), key("general.alignment", 4), u32(0);
    REJECTED("key \"general.alignment\": 0 is not a power of two");
    begin(3, 0, 1), key("general.alignment", 4), u32(48);
    REJECTED("key \"general.alignment\": 48 is not a power of two");
}

TEST(refuse_tensors)
{
    begin(3, 1, 0), tensor("", NE(1), 0, 0), data(32, 4);
    REJECTED("the name of a tensor is empty");
    char name[65] = { 0 };
    memset(name, 'n', 64);
    begin(3, 1, 0), tensor(name, NE(1), 0, 0), data(32, 4);
    REJECTED("the name of a tensor has 64 bytes, more than the limit of 63");
    begin(3, 1, 0), tensor(name + 1, NE(1), 0, 0), data(32, 4);
    ACCEPTED();
    begin(3, 1, 0), tensor("\xC0\x80", NE(1), 0, 0), data(32, 4);
    REJECTED("the name of a tensor \"??\" is not UTF-8");
    begin(3, 1, 0), u64(1), u8(0), u32(0), u32(0), u64(0);
    REJECTED("the name of a tensor \"\" holds a NUL");
    begin(3, 1, 0), str("t"), u32(5), u64(0), u64(0);
    REJECTED("tensor \"t\": rank 5 is more than 4");
    begin(3, 1, 0), str("t"), u32(4), u64(0), u64(0);
    REJECTED("tensor \"t\": the file ends within its dims");
    begin(3, 1, 0), tensor("t", NE(1, UINT64_MAX, 3), 0, 0), data(32, 4);
    REJECTED("tensor \"t\": dim 1 is -1");
    begin(3, 1, 0), tensor("t", NE(1u << 31, 1u << 31, 2), NIB_GGUF_I8, 0), data(32, 4);
    REJECTED("tensor \"t\": the product of its dims is larger than 63 bits hold");
    begin(3, 1, 0), tensor("t", NE(1u << 31, 1u << 31, 2, 0), NIB_GGUF_I8, 0), data(32, 4);
    REJECTED("tensor \"t\": the product of its dims is larger than 63 bits hold");
    begin(3, 1, 0), tensor("t", NE(1u << 31, 1u << 31), NIB_GGUF_F32, 0), data(32, 4);
    REJECTED("tensor \"t\": its size in bytes is larger than 63 bits hold");
    begin(3, 1, 0), tensor("t", NE(1), 42, 0), data(32, 4);
    REJECTED("tensor \"t\": type 42 is unknown, or no longer in use");
    begin(3, 1, 0), tensor("t", NE(1), 4, 0), data(32, 4);
    REJECTED("tensor \"t\": type 4 is unknown, or no longer in use");
    begin(3, 1, 0), tensor("t", NE(48, 64), NIB_GGUF_NVFP4, 0), data(32, 4000);
    REJECTED("tensor \"t\": its rows have 48 elements, which are not whole blocks of NVFP4: those have 64");
    begin(3, 1, 0), tensor("t", 0, NULL, 8, 0), data(32, 4000);
    REJECTED("tensor \"t\": its rows have 1 elements, which are not whole blocks of Q8_0: those have 32");
    begin(3, 2, 0), tensor("t", NE(1), 0, 0), tensor("u", NE(1), 0, 4), data(32, 40);
    REJECTED("tensor \"u\": its data begins at byte 4, but the tensors before it, padded to 32, end at byte 32");
    begin(3, 2, 0), tensor("t", NE(1), 0, 0), tensor("u", NE(1), 0, 0), data(32, 40);
    REJECTED("tensor \"u\": its data begins at byte 0, but");
    begin(3, 2, 0), tensor("t", NE(1), 0, 32), tensor("u", NE(1), 0, 0), data(32, 40);
    REJECTED("tensor \"t\": its data begins at byte 32, but the tensors before it, padded to 32, end at byte 0");
    begin(3, 2, 0), tensor("t", NE(1), 0, 0), tensor("t", NE(1), 0, 32), data(32, 40);
    REJECTED("tensor \"t\" comes twice");
    begin(3, 2, 0), tensor("t", NE(1), 0, 0), tensor("u", NE(2), 0, 32), data(32, 39);
    REJECTED("tensor \"u\": its 8 bytes from byte 32 of the data are not all there");
    begin(3, 2, 0), tensor("t", NE(1), 0, 0), tensor("u", NE(2), 0, 32), data(32, 40);
    ACCEPTED();
    begin(3, 1, 0), tensor("t", NE(1), 0, 0);
    REJECTED("tensor \"t\": its 4 bytes from byte 0 of the data are not all there");
    begin(3, 1, 0), tensor("t", NE(INT64_MAX), NIB_GGUF_I8, 0), data(32, 64);
    REJECTED("its 9223372036854775807 bytes from byte 0 of the data are not all there");
    begin(3, 3, 0), tensor("t", NE(INT64_MAX), NIB_GGUF_I8, 0);
    tensor("u", NE(INT64_MAX), NIB_GGUF_I8, (uint64_t)INT64_MAX + 1);
    tensor("v", NE(INT64_MAX), NIB_GGUF_I8, 0), data(32, 64);
    REJECTED("tensor \"u\": its data would end beyond the largest possible file");
}

TEST(read_alignment)
{
    for (uint32_t bit = 0; bit < 32; bit++) {
        const uint32_t alignment = 1u << bit;
        begin(3, 2, 1), key("general.alignment", 4), u32(alignment);
        tensor("t", NE(3), NIB_GGUF_I8, 0);
        const uint64_t second = alignment < 3 ? 4 / alignment * alignment : alignment;
        tensor("u", NE(3), NIB_GGUF_I8, alignment == 1 ? 3 : second);
        if (alignment > 4096) { /* the data would begin far behind the end of the file */
            REJECTED("tensor \"t\": its 3 bytes from byte 0 of the data are not all there");
            continue;
        }
        data(alignment, 3 + alignment + 3);
        nib_gguf *file = OPEN(save());
        uint8_t got[3] = { 0 };
        CHECK(nib_gguf_facts(file).alignment == alignment);
        CHECK_OK(nib_gguf_read(file, 1, 0, got, 3));
        CHECK(got[0] == (uint8_t)((alignment == 1 ? 3 : second) + 1));
        nib_gguf_close(file);
    }
}

/* A file with everything in it. */
static void make_full(void)
{
    begin(3, 2, 4);
    key("general.architecture", 8), str("llama");
    key("general.alignment", 4), u32(64);
    key("tokens", 9), u32(8), u64(2), str("a"), str("bc");
    key("scores", 9), u32(6), u64(2), f32(1), f32(2);
    tensor("blk.0.weight", NE(64, 1), NIB_GGUF_NVFP4, 0);
    tensor("blk.0.scale", NE(1), NIB_GGUF_F32, 64);
    data(64, 64 + 4);
}

TEST(read_truncated)
{
    make_full();
    const size_t whole = made_bytes;
    ACCEPTED();
    for (size_t cut = 0; cut < whole; cut++) {
        made_bytes = cut;
        REJECTED("");
    }
}

/* Every byte of the header changed to every value: never a crash, and a rejection has a message. */
TEST(read_changed)
{
    make_full();
    const char *path = at("made.gguf");
    int accepted = 0;
    for (size_t i = 0; i + 68 < made_bytes; i++)
        for (int value = 0; value < 256; value += 7) {
            const uint8_t kept = made[i];
            made[i] = (uint8_t)value;
            save();
            nib_gguf *file = NULL;
            const nib_status status = nib_gguf_open(path, &file);
            CHECK(status == NIB_OK || ((status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED) &&
                                       strlen(nib_last_error()) > strlen(path) + 5));
            accepted += status == NIB_OK;
            nib_gguf_close(file);
            made[i] = kept;
        }
    CHECK(accepted > 50);
}

/* Everything straddles the reader's window once. */
TEST(read_across_chunks)
{
    static char filler[70000];
    const size_t window = 65536;
    for (size_t pad = window - 300; pad < window; pad++) {
        begin(3, 1, 4);
        memset(filler, 'f', sizeof filler);
        filler[pad] = '\0';
        key("filler", 8), str(filler);
        key("tokens", 9), u32(8), u64(2), str("token"), str("longer token");
        key("n", 5), u32((uint32_t)-5);
        key("b", 7), u8(1);
        tensor("a.name", NE(2, 3), NIB_GGUF_F16, 0);
        data(32, 12);
        nib_gguf *file = OPEN(save());
        int64_t n = 0;
        bool found;
        struct nib_gguf_strings strings = { 0 };
        struct nib_gguf_entry entry = { .name = "" };
        uint8_t first = 0;
        CHECK_OK(nib_gguf_get_integer(file, "n", &n, &found));
        CHECK_OK(nib_gguf_get_strings(file, "tokens", &strings, &found));
        CHECK(n == -5 && strings.count == 2 && !strcmp(strings.text + strings.starts[1], "longer token"));
        CHECK_OK(nib_gguf_entry(file, 0, &entry));
        CHECK(!strcmp(entry.name, "a.name") && entry.shape[0] == 3 && entry.shape[1] == 2 && entry.bytes == 12);
        CHECK_OK(nib_gguf_read(file, 0, 0, &first, 1));
        CHECK(first == 1);
        nib_gguf_strings_free(&strings);
        nib_gguf_close(file);
    }
}

TEST(read_shrunk)
{
    make_full();
    const char *path = save();
    nib_gguf *file = OPEN(path);
    uint8_t got[36];
    struct nib_gguf_strings strings = { 0 };
    bool found;
    CHECK(truncate(path, (off_t)made_bytes - 40) == 0);
    CHECK_OK(nib_gguf_read(file, 0, 0, got, 28));
    CHECK_FAILS(nib_gguf_read(file, 0, 0, got, 36), NIB_ERR_IO, "although it was longer when opened");
    /* Another length before a token than when the file was opened. */
    const uint8_t *token = memmem(made, made_bytes, "\2\0\0\0\0\0\0\0bc", 10);
    CHECK(token);
    made[token - made] = 3;
    save();
    CHECK_FAILS(nib_gguf_get_strings(file, "tokens", &strings, &found), NIB_ERR_IO,
                "it has changed since the file was opened");
    made[token - made] = 1;
    save();
    CHECK_FAILS(nib_gguf_get_strings(file, "tokens", &strings, &found), NIB_ERR_IO, "it has changed");
    CHECK(!strings.text);
    nib_gguf_close(file);
}

/* Hostile sizes: what is rejected is rejected fast and without much memory; what is large and sound is taken. */
TEST(read_many)
{
    const size_t n = 200000, bytes = 24 + n * (8 + 6 + 4 + 8 + 4 + 8);
    const char *path = at("many.gguf");
    uint8_t *header = malloc(bytes);
    for (int repeated = 0; repeated < 2; repeated++) {
        begin(3, n, 0);
        memcpy(header, made, 24);
        uint8_t *to = header + 24;
        for (size_t i = 0; i < n; i++) {
            char name[8];
            /* A permutation; at last a name that was there already. */
            snprintf(name, sizeof name, "%06zu", repeated && i == n - 1 ? 77 : i * 77 % n);
            made_bytes = 0;
            tensor(name, NE(0), NIB_GGUF_I8, 0);
            memcpy(to, made, made_bytes);
            to += made_bytes;
        }
        CHECK((size_t)(to - header) == bytes);
        put_file(path, header, bytes);
        nib_gguf *file = NULL;
        if (repeated) {
            CHECK_FAILS(nib_gguf_open(path, &file), NIB_ERR_DATA, "tensor \"000077\" comes twice");
            continue;
        }
        size_t index = 0;
        CHECK_OK(nib_gguf_open(path, &file));
        CHECK(nib_gguf_count(file) == n && nib_gguf_find(file, "000077", &index) && index == 1);
        nib_gguf_close(file);
    }
    free(header);
}

/* Keys alone of more than 100 MB, in a file that takes no room on the disk: an array is passed over, keys are not. */
TEST(read_large_header)
{
    const char *path = at("large.gguf");
    begin(3, 0, 1), key("big", 9), u32(NIB_GGUF_KIND_U64), u64(1u << 30);
    save();
    CHECK(rename(at("made.gguf"), path) == 0 && truncate(path, (off_t)made_bytes + ((off_t)8 << 30)) == 0);
    const clock_t before = clock();
    nib_gguf *file = NULL;
    CHECK_OK(nib_gguf_open(path, &file));
    CHECK(clock() - before < CLOCKS_PER_SEC);
    uint64_t last = 1;
    CHECK_OK(nib_gguf_read_value(file, 0, ((uint64_t)8 << 30) - 8, &last, 8));
    CHECK(last == 0);
    nib_gguf_close(file);
    unlink(path);

    const size_t n = 1600, each = 8 + 65535 + 4 + 1;
    FILE *out = fopen(path, "wb");
    begin(3, 0, n);
    CHECK(out && fwrite(made, 1, 24, out) == 24);
    static uint8_t pair[8 + 65535 + 4 + 1];
    memcpy(pair, &(uint64_t){ 65535 }, 8);
    memset(pair + 8, 'k', 65535);
    for (size_t i = 0; out && i < n; i++) {
        memcpy(pair + 8, (char[]){ (char)('a' + i % 26), (char)('a' + i / 26 % 26), (char)('a' + i / 676) }, 3);
        CHECK(fwrite(pair, 1, each, out) == each);
    }
    CHECK(out && fclose(out) == 0);
    file = NULL;
    CHECK_FAILS(nib_gguf_open(path, &file), NIB_ERR_DATA,
                "its keys and tensor entries take more than the 100000000 bytes that nib allows");
    CHECK(!file);
    unlink(path);
}

/* ---- Writing ---- */

#define DECLARE(plan, name, type, ...) \
    nib_gguf_declare(plan, name, type, (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / 8), (int64_t[]){ __VA_ARGS__ })

static nib_gguf_plan *new_plan(const char *path)
{
    nib_gguf_plan *plan = NULL;
    CHECK_OK(nib_gguf_plan_create(path, &plan));
    return plan;
}

static void put_all(nib_gguf_plan *plan)
{
    static const char *const tokens[] = { "a", "", "\xE2\x82\xAC" };
    static const uint16_t values[] = { 1, 2, 65535 };
    CHECK_OK(nib_gguf_put_string(plan, "general.architecture", "llama"));
    CHECK_OK(nib_gguf_put_integer(plan, "u32", NIB_GGUF_KIND_U32, 4000000000));
    CHECK_OK(nib_gguf_put_integer(plan, "u64", NIB_GGUF_KIND_U64, INT64_MAX));
    CHECK_OK(nib_gguf_put_integer(plan, "i8", NIB_GGUF_KIND_I8, -128));
    CHECK_OK(nib_gguf_put_integer(plan, "bool", NIB_GGUF_KIND_BOOL, 1));
    CHECK_OK(nib_gguf_put_float(plan, "f32", 0.1f));
    CHECK_OK(nib_gguf_put_strings(plan, "tokens", tokens, 3));
    CHECK_OK(nib_gguf_put_strings(plan, "none", NULL, 0));
    CHECK_OK(nib_gguf_put_array(plan, "numbers", NIB_GGUF_KIND_U16, values, 3));
    CHECK_OK(nib_gguf_put_string(plan, "empty", ""));
    CHECK_OK(DECLARE(plan, "b", NIB_GGUF_NVFP4, 3, 64));
    CHECK_OK(DECLARE(plan, "a", NIB_GGUF_F32, 1));
    CHECK_OK(nib_gguf_declare(plan, "scalar", NIB_GGUF_BF16, 0, NULL));
    CHECK_OK(DECLARE(plan, "none", NIB_GGUF_F16, 2, 0));
}

/* The same by hand. */
static void make_all(void)
{
    begin(3, 4, 10);
    key("general.architecture", 8), str("llama");
    key("u32", 4), u32(4000000000u);
    key("u64", 10), u64(INT64_MAX);
    key("i8", 1), u8(-128);
    key("bool", 7), u8(1);
    key("f32", 6), f32(0.1f);
    key("tokens", 9), u32(8), u64(3), str("a"), str(""), str("\xE2\x82\xAC");
    key("none", 9), u32(8), u64(0);
    key("numbers", 9), u32(2), u64(3), u16(1), u16(2), u16(65535);
    key("empty", 8), str("");
    tensor("b", NE(64, 3), NIB_GGUF_NVFP4, 0);
    tensor("a", NE(1), NIB_GGUF_F32, 128);
    tensor("scalar", 0, NULL, NIB_GGUF_BF16, 160);
    tensor("none", NE(0, 2), NIB_GGUF_F16, 192);
    data(32, 108);
    data(32, 4);
    data(32, 2);
    data(32, 0);
}

static void counted(uint8_t *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (uint8_t)(i + 1);
}

TEST(write_all)
{
    const char *path = at("written.gguf");
    nib_gguf_plan *plan = new_plan(path);
    uint8_t block[108];
    counted(block, sizeof block);
    put_all(plan);
    make_all();
    const struct nib_gguf_layout layout = nib_gguf_plan_layout(plan);
    CHECK(layout.file_bytes == made_bytes && layout.data_begin + 192 == made_bytes);
    CHECK(nib_gguf_plan_count(plan) == 4);
    struct nib_gguf_entry entry = { .name = "" };
    size_t index = 9;
    CHECK_OK(nib_gguf_plan_entry(plan, 0, &entry));
    CHECK(!strcmp(entry.name, "b") && entry.rank == 2 && entry.shape[0] == 3 && entry.shape[1] == 64);
    CHECK(entry.begin == 0 && entry.bytes == 108 && entry.type == NIB_GGUF_NVFP4);
    CHECK_OK(nib_gguf_plan_entry(plan, 2, &entry));
    CHECK(entry.rank == 0 && entry.begin == 160 && entry.bytes == 2);
    CHECK(nib_gguf_plan_find(plan, "a", &index) && index == 1 && !nib_gguf_plan_find(plan, "x", &index));
    CHECK_FAILS(nib_gguf_plan_entry(plan, 4, &entry), NIB_ERR_ARG, "there is no tensor 4 among its 4");
    void *header = NULL;
    size_t header_bytes = 0;
    CHECK_OK(nib_gguf_plan_header(plan, &header, &header_bytes));
    CHECK(header_bytes == layout.data_begin);
    CHECK_BYTES((uint8_t *)header, made, header_bytes);
    nib_free(header);

    nib_gguf_writer *writer = NULL, *second = NULL;
    CHECK_OK(nib_gguf_writer_create(plan, &writer));
    CHECK_FAILS(nib_gguf_writer_create(plan, &second), NIB_ERR_ARG, "its plan has a writer already");
    CHECK_FAILS(nib_gguf_put_float(plan, "late", 1), NIB_ERR_ARG, "must be declared before the writer is created");
    CHECK_FAILS(DECLARE(plan, "late", NIB_GGUF_F32, 1), NIB_ERR_ARG, "must be declared before the writer is created");
    CHECK(!exists(path));
    /* Backwards, in pieces, some twice. */
    CHECK_OK(nib_gguf_write(writer, 2, 0, block, 2));
    CHECK_OK(nib_gguf_write(writer, 1, 1, block + 1, 3));
    CHECK_OK(nib_gguf_write(writer, 1, 0, block, 2));
    CHECK_OK(nib_gguf_write(writer, 0, 36, block + 36, 72));
    CHECK_OK(nib_gguf_write(writer, 0, 0, block, 37));
    CHECK_OK(nib_gguf_write(writer, 3, 0, NULL, 0));
    CHECK_FAILS(nib_gguf_write(writer, 4, 0, block, 1), NIB_ERR_ARG, "there is no tensor 4 among its 4");
    CHECK_FAILS(nib_gguf_write(writer, 0, 108, block, 1), NIB_ERR_ARG,
                "tensor \"b\": 1 bytes from byte 108 are not within its 108 bytes");
    CHECK_FAILS(nib_gguf_write(writer, 0, 1, block, SIZE_MAX), NIB_ERR_ARG, "are not within its 108 bytes");
    CHECK_FAILS(nib_gguf_write(writer, 0, 0, NULL, 1), NIB_ERR_ARG, "data is NULL");
    CHECK_FAILS(nib_gguf_write(NULL, 0, 0, block, 1), NIB_ERR_ARG, "writer is NULL");
    CHECK_OK(nib_gguf_commit(writer));
    CHECK_FAILS(nib_gguf_commit(writer), NIB_ERR_ARG, "only destroy may follow a commit");
    CHECK_FAILS(nib_gguf_write(writer, 0, 0, block, 1), NIB_ERR_ARG, "only destroy may follow a commit");
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    size_t count = 0;
    uint8_t *bytes = get_file(path, &count);
    CHECK(count == made_bytes);
    CHECK_BYTES(bytes, made, count < made_bytes ? count : made_bytes);
    free(bytes);

    /* Read, and every key copied into another file: the same bytes. */
    nib_gguf *file = OPEN(path);
    plan = new_plan(at("copied.gguf"));
    for (size_t i = 0; i < nib_gguf_key_count(file); i++)
        CHECK_OK(nib_gguf_put_copy(plan, file, i));
    for (size_t i = 0; i < nib_gguf_count(file); i++) {
        CHECK_OK(nib_gguf_entry(file, i, &entry));
        CHECK_OK(nib_gguf_declare(plan, entry.name, entry.type, entry.rank, entry.shape));
    }
    CHECK_FAILS(nib_gguf_put_copy(plan, file, 0), NIB_ERR_ARG, "key \"general.architecture\": it is given twice");
    CHECK_FAILS(nib_gguf_put_copy(plan, file, 10), NIB_ERR_ARG, "there is no key 10 among its 10");
    CHECK_OK(nib_gguf_plan_header(plan, &header, &header_bytes));
    CHECK_BYTES((uint8_t *)header, made, header_bytes);
    nib_free(header);
    nib_gguf_plan_destroy(plan);
    nib_gguf_close(file);
    CHECK(entries(directory) >= 1);
    empty_directory();
}

TEST(write_empty)
{
    const char *path = at("empty.gguf");
    nib_gguf_plan *plan = new_plan(path);
    nib_gguf_writer *writer = NULL;
    CHECK_OK(nib_gguf_writer_create(plan, &writer));
    CHECK_OK(nib_gguf_commit(writer));
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    nib_gguf *file = OPEN(path);
    CHECK(nib_gguf_count(file) == 0 && nib_gguf_key_count(file) == 0 && nib_gguf_facts(file).version == 3);
    nib_gguf_close(file);
    nib_gguf_plan_destroy(NULL);
    nib_gguf_writer_destroy(NULL);
    CHECK(nib_gguf_plan_count(NULL) == 0);
}

TEST(write_refusals)
{
    nib_gguf_plan *plan = NULL;
    CHECK_FAILS(nib_gguf_plan_create(NULL, &plan), NIB_ERR_ARG, "path is NULL");
    CHECK_FAILS(nib_gguf_plan_create("x", NULL), NIB_ERR_ARG, "out is NULL");
    plan = new_plan(at("refused.gguf"));
    static char long_key[65537];
    memset(long_key, 'k', 65536);
    const char *bad[1] = { "\xFF" };
    CHECK_FAILS(nib_gguf_put_string(plan, "", "x"), NIB_ERR_ARG, "a key needs a name");
    CHECK_FAILS(nib_gguf_put_string(plan, long_key, "x"), NIB_ERR_ARG, "it is longer than the 65535 bytes");
    CHECK_FAILS(nib_gguf_put_string(plan, "\x80", "x"), NIB_ERR_ARG, "the key is not UTF-8");
    CHECK_FAILS(nib_gguf_put_string(plan, "k", "\x80"), NIB_ERR_ARG, "key \"k\": the value is not UTF-8");
    CHECK_FAILS(nib_gguf_put_string(plan, "k", NULL), NIB_ERR_ARG, "value is NULL");
    CHECK_FAILS(nib_gguf_put_string(plan, NULL, "v"), NIB_ERR_ARG, "key is NULL");
    CHECK_FAILS(nib_gguf_put_string(NULL, "k", "v"), NIB_ERR_ARG, "plan is NULL");
    CHECK_FAILS(nib_gguf_put_strings(plan, "k", bad, 1), NIB_ERR_ARG, "key \"k\": string 0 is not UTF-8");
    CHECK_FAILS(nib_gguf_put_strings(plan, "k", NULL, 1), NIB_ERR_ARG, "strings is NULL");
    CHECK_FAILS(nib_gguf_put_strings(plan, "k", bad, SIZE_MAX), NIB_ERR_ARG, "are more than the 1073741824");
    CHECK_FAILS(nib_gguf_put_array(plan, "k", NIB_GGUF_KIND_U8, bad, SIZE_MAX), NIB_ERR_ARG, "are more than the");
    CHECK_FAILS(nib_gguf_put_array(plan, "k", NIB_GGUF_KIND_STRING, bad, 1), NIB_ERR_ARG, "kind 8 is not a number");
    CHECK_FAILS(nib_gguf_put_array(plan, "k", NIB_GGUF_KIND_COUNT, bad, 1), NIB_ERR_ARG, "kind 13 is not a number");
    CHECK_FAILS(nib_gguf_put_array(plan, "k", NIB_GGUF_KIND_U8, bad, 100000001), NIB_ERR_ARG,
                "its header would be longer than the 100000000 bytes that nib allows");
    static char most[100000000]; /* alone it fits, and nothing has room beside it */
    CHECK_FAILS(nib_gguf_put_array(plan, "k", NIB_GGUF_KIND_U8, most, sizeof most - 40), NIB_ERR_ARG,
                "would be longer");
    CHECK_FAILS(nib_gguf_put_integer(plan, "general.alignment", NIB_GGUF_KIND_U32, 32), NIB_ERR_ARG,
                "files are written with an alignment of 32");
    CHECK_FAILS(nib_gguf_put_integer(plan, "k", NIB_GGUF_KIND_F32, 1), NIB_ERR_ARG,
                "key \"k\": kind 6 is not an integer");
    CHECK_FAILS(nib_gguf_put_integer(plan, "k", NIB_GGUF_KIND_COUNT, 1), NIB_ERR_ARG, "kind 13 is not an integer");
    static const struct {
        enum nib_gguf_kind kind;
        int64_t value;
        const char *words;
    } outside[] = {
        { NIB_GGUF_KIND_U8, 256, "256 is outside u8" }, { NIB_GGUF_KIND_I8, -129, "-129 is outside i8" },
        { NIB_GGUF_KIND_U16, -1, "-1 is outside u16" }, { NIB_GGUF_KIND_I16, 32768, "32768 is outside i16" },
        { NIB_GGUF_KIND_U32, -1, "-1 is outside u32" }, { NIB_GGUF_KIND_I32, 1L << 31, "is outside i32" },
        { NIB_GGUF_KIND_U64, -1, "-1 is outside u64" }, { NIB_GGUF_KIND_BOOL, 2, "2 is outside bool" },
    };
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++)
        CHECK_FAILS(nib_gguf_put_integer(plan, "k", outside[i].kind, outside[i].value), NIB_ERR_ARG, outside[i].words);
    CHECK_OK(nib_gguf_put_float(plan, "k", 1));
    CHECK_FAILS(nib_gguf_put_float(plan, "k", 1), NIB_ERR_ARG, "key \"k\": it is given twice");

    char name[65] = { 0 };
    memset(name, 'n', 64);
    CHECK_FAILS(DECLARE(plan, name, NIB_GGUF_F32, 1), NIB_ERR_ARG, "the name has 64 bytes, and GGUF allows at most 63");
    CHECK_OK(DECLARE(plan, name + 1, NIB_GGUF_F32, 1));
    CHECK_FAILS(DECLARE(plan, name + 1, NIB_GGUF_F32, 1), NIB_ERR_ARG, "it is declared twice");
    CHECK_FAILS(DECLARE(plan, "", NIB_GGUF_F32, 1), NIB_ERR_ARG, "a tensor needs a name");
    CHECK_FAILS(DECLARE(plan, "\xC3", NIB_GGUF_F32, 1), NIB_ERR_ARG, "the name is not UTF-8");
    CHECK_FAILS(DECLARE(plan, "t", 5, 1), NIB_ERR_DTYPE, "tensor \"t\": type 5 is unknown, or no longer in use");
    CHECK_FAILS(DECLARE(plan, "t", NIB_GGUF_F32, 1, 1, 1, 1, 1), NIB_ERR_SHAPE, "rank 5 is not between 0 and the 4");
    CHECK_FAILS(nib_gguf_declare(plan, "t", NIB_GGUF_F32, -1, NULL), NIB_ERR_SHAPE, "rank -1 is not between");
    CHECK_FAILS(nib_gguf_declare(plan, "t", NIB_GGUF_F32, 1, NULL), NIB_ERR_ARG, "its shape is NULL");
    CHECK_FAILS(DECLARE(plan, "t", NIB_GGUF_F32, 1, -1), NIB_ERR_SHAPE, "tensor \"t\": dim 1 is -1");
    CHECK_FAILS(DECLARE(plan, "t", NIB_GGUF_NVFP4, 64, 48), NIB_ERR_SHAPE,
                "tensor \"t\": its rows have 48 elements, which are not whole blocks of NVFP4: those have 64");
    CHECK_FAILS(DECLARE(plan, "t", NIB_GGUF_I8, INT64_MAX, 2), NIB_ERR_SHAPE, "the product of its dims is larger");
    CHECK_FAILS(DECLARE(plan, "t", NIB_GGUF_I16, INT64_MAX), NIB_ERR_SHAPE, "its size in bytes is larger");
    CHECK_FAILS(DECLARE(plan, "t", NIB_GGUF_I8, INT64_MAX), NIB_ERR_SHAPE, "the file would be larger than any can be");
    CHECK(nib_gguf_plan_count(plan) == 1);
    nib_gguf_plan_destroy(plan);
}

TEST(write_incomplete)
{
    const char *path = at("incomplete.gguf");
    empty_directory();
    uint8_t bytes[8] = { 0 };
    for (int round = 0; round < 4; round++) {
        nib_gguf_plan *plan = new_plan(path);
        nib_gguf_writer *writer = NULL;
        CHECK_OK(DECLARE(plan, "a", NIB_GGUF_F32, 2));
        CHECK_OK(nib_gguf_writer_create(plan, &writer));
        CHECK(entries(directory) == 1);
        if (round == 1)
            CHECK_OK(nib_gguf_write(writer, 0, 1, bytes, 7));
        for (uint64_t offset = 0; round == 2 && offset < 8; offset += 5)
            CHECK_OK(nib_gguf_write(writer, 0, offset, bytes, 3));
        if (round == 0)
            CHECK_FAILS(nib_gguf_commit(writer), NIB_ERR_ARG, "tensor \"a\": bytes 0 to 8 of 8 were never written");
        if (round == 1)
            CHECK_FAILS(nib_gguf_commit(writer), NIB_ERR_ARG, "tensor \"a\": bytes 0 to 1 of 8 were never written");
        if (round == 2)
            CHECK_FAILS(nib_gguf_commit(writer), NIB_ERR_ARG, "tensor \"a\": bytes 3 to 5 of 8 were never written");
        nib_gguf_writer_destroy(writer);
        CHECK(entries(directory) == 0);
        /* The plan is free again. */
        CHECK_OK(nib_gguf_put_float(plan, "x", 1));
        nib_gguf_plan_destroy(plan);
    }
}

TEST(write_disk_errors)
{
    uint8_t bytes[4096] = { 0 };
    nib_gguf_plan *plan = new_plan("/nowhere/at/all.gguf");
    nib_gguf_writer *writer = NULL;
    CHECK_FAILS(nib_gguf_writer_create(plan, &writer), NIB_ERR_IO, "/nowhere/at/all.gguf: cannot create");
    CHECK(!writer);
    nib_gguf_plan_destroy(plan);

    /* A file may not grow beyond a limit: as a full disk. */
    empty_directory();
    struct rlimit kept, limit;
    CHECK(getrlimit(RLIMIT_FSIZE, &kept) == 0);
    signal(SIGXFSZ, SIG_IGN);
    for (rlim_t most = 16; most <= 2048; most += 2032) {
        plan = new_plan(at("full.gguf"));
        CHECK_OK(DECLARE(plan, "a", NIB_GGUF_I8, 4096));
        limit = kept;
        limit.rlim_cur = most;
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        writer = NULL;
        if (most == 16) {
            CHECK_FAILS(nib_gguf_writer_create(plan, &writer), NIB_ERR_IO, "full.gguf: cannot write");
        } else {
            CHECK_OK(nib_gguf_writer_create(plan, &writer));
            CHECK_FAILS(nib_gguf_write(writer, 0, 0, bytes, 4096), NIB_ERR_IO, "full.gguf: cannot write");
            CHECK_FAILS(nib_gguf_commit(writer), NIB_ERR_IO, "not committed, because an earlier write failed");
        }
        setrlimit(RLIMIT_FSIZE, &kept);
        nib_gguf_writer_destroy(writer);
        nib_gguf_plan_destroy(plan);
        CHECK(entries(directory) == 0);
    }
    signal(SIGXFSZ, SIG_DFL);

    /* Something is in the way of the rename. */
    const char *path = at("folder.gguf");
    plan = new_plan(path);
    CHECK_OK(nib_gguf_writer_create(plan, &writer));
    CHECK(mkdir(path, 0700) == 0);
    CHECK_FAILS(nib_gguf_commit(writer), NIB_ERR_IO, "cannot rename the finished file to this name");
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    CHECK(entries(directory) == 1 && rmdir(path) == 0);
}

#ifdef NIB_TEST_WRAP_ALLOC

/* Everything once; the first failure ends it. */
static nib_status do_all(const char *from, const char *to)
{
    nib_gguf *file = NULL;
    nib_gguf_plan *plan = NULL;
    nib_gguf_writer *writer = NULL;
    char *string = NULL;
    struct nib_gguf_strings strings = { 0 };
    bool found;
    uint8_t bytes[36] = { 0 };
    nib_status status = nib_gguf_open(from, &file);
    if (!status)
        status = nib_gguf_get_string(file, "general.architecture", &string, &found);
    if (!status)
        status = nib_gguf_get_strings(file, "tokens", &strings, &found);
    if (!status)
        status = nib_gguf_plan_create(to, &plan);
    for (size_t i = 2; !status && i < 4; i++)
        status = nib_gguf_put_copy(plan, file, i);
    if (!status)
        status = nib_gguf_put_string(plan, "a", "b");
    if (!status)
        status = nib_gguf_declare(plan, "t", NIB_GGUF_NVFP4, 1, (int64_t[]){ 64 });
    if (!status)
        status = nib_gguf_writer_create(plan, &writer);
    if (!status)
        status = nib_gguf_write(writer, 0, 0, bytes, 36);
    if (!status)
        status = nib_gguf_commit(writer);
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    nib_gguf_strings_free(&strings);
    nib_free(string);
    nib_gguf_close(file);
    return status;
}

TEST(no_memory)
{
    empty_directory();
    make_full();
    const char *from = save(), *to = at("out.gguf");
    CHECK_OK(do_all(from, to));
    long fails = 0;
    for (; fails < 1000; fails++) {
        unlink(to);
        allocations_left = fails;
        const nib_status status = do_all(from, to);
        const bool all_given = allocations_left >= 0;
        allocations_left = -1;
        if (all_given) {
            CHECK(status == NIB_OK);
            break;
        }
        CHECK_THAT(status == NIB_ERR_MEMORY && strstr(nib_last_error(), "no memory"), "allocation %ld: %s", fails,
                   status ? nib_last_error() : "no error");
        CHECK(!exists(to) && entries(directory) == 1);
    }
    CHECK(fails > 15 && fails < 1000);
}

#endif

/* ---- Blocks ---- */

static int code_at(const uint8_t *codes, size_t i) { return codes[i / 2] >> (i % 2 * 4) & 0xF; }

/* Element i of a run of GGUF blocks, as their definition has it. */
static int nvfp4_at(const uint8_t *blocks, size_t i, int *scale)
{
    const uint8_t *block = blocks + i / 64 * 36;
    const size_t sub = i % 64 / 16, j = i % 16;
    *scale = block[sub];
    return block[4 + 8 * sub + j % 8] >> (j < 8 ? 0 : 4) & 0xF;
}

static int mxfp4_at(const uint8_t *blocks, size_t i, int *scale)
{
    const uint8_t *block = blocks + i / 32 * 17;
    *scale = block[0];
    return block[1 + i % 16] >> (i % 32 < 16 ? 0 : 4) & 0xF;
}

/* Hashes of what gguf's Python package makes of these blocks, by tests/check_gguf.py. */
TEST(values_of_blocks)
{
    enum { BLOCKS = 16 };
    static const struct {
        uint32_t type;
        int halves[2]; /* where F16 scales are: finite ones */
        uint64_t hash;
    } known[] = {
        { NIB_GGUF_Q4_0, { 0, 0 }, 0xCDFAF23B0C8BF325 },     { NIB_GGUF_Q4_1, { 0, 2 }, 0x0113D4F5C8A29725 },
        { NIB_GGUF_Q5_0, { 0, 0 }, 0xDF43FDF0982B1725 },     { NIB_GGUF_Q5_1, { 0, 2 }, 0xE3E666D1B336F725 },
        { NIB_GGUF_Q8_0, { 0, 0 }, 0xA003126B086264E5 },     { NIB_GGUF_Q2_K, { 80, 82 }, 0x3E748C7542813325 },
        { NIB_GGUF_Q3_K, { 108, 108 }, 0xD345C6003D5D9B25 }, { NIB_GGUF_Q4_K, { 0, 2 }, 0xDA1094267AB4584D },
        { NIB_GGUF_Q5_K, { 0, 2 }, 0x114A21A34E69DFF9 },     { NIB_GGUF_Q6_K, { 208, 208 }, 0x053233D5EC28CFC7 },
        { NIB_GGUF_IQ4_NL, { 0, 0 }, 0x2471F5DAEC07DA25 },   { NIB_GGUF_IQ4_XS, { 0, 0 }, 0xE6389D4ECBECF4F3 },
    };
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        const struct nib_gguf_type_facts *facts = nib_gguf_type_facts(known[k].type);
        uint8_t *blocks = test_guarded(BLOCKS * facts->bytes, 1);
        float *values = test_guarded(BLOCKS * facts->elements * sizeof *values, 1);
        for (uint64_t i = 0; i < BLOCKS * facts->bytes; i++)
            blocks[i] = (uint8_t)(i * i * 40503 >> 7);
        for (int b = 0; b < BLOCKS; b++)
            for (int half = 0; half < 2; half++) {
                const int at = known[k].halves[half], bits = 0x2401 + b * 77 + at * 3;
                blocks[(size_t)b * facts->bytes + (size_t)at] = (uint8_t)bits;
                blocks[(size_t)b * facts->bytes + (size_t)at + 1] = (uint8_t)(bits >> 8);
            }
        nib_gguf_decode(known[k].type, blocks, BLOCKS, values);
        uint64_t hash = 0xCBF29CE484222325;
        for (size_t i = 0; i < BLOCKS * facts->elements; i++) {
            uint32_t bits;
            memcpy(&bits, &values[i], sizeof bits);
            hash = (hash ^ bits) * 0x100000001B3;
        }
        CHECK_THAT(hash == known[k].hash, "%s: 0x%016llX", facts->name, (unsigned long long)hash);
    }
}

TEST(blocks)
{
    enum { BLOCKS = 53 };
    for (int at_end = 0; at_end < 2; at_end++) {
        uint8_t *codes = test_guarded(BLOCKS * 32, at_end), *scales = test_guarded(BLOCKS * 4, at_end);
        uint8_t *blocks = test_guarded(BLOCKS * 36, at_end), *more = test_guarded(BLOCKS * 17, at_end);
        uint8_t *codes_back = test_guarded(BLOCKS * 32, at_end), *scales_back = test_guarded(BLOCKS * 4, at_end);
        for (int i = 0; i < BLOCKS * 32; i++)
            codes[i] = (uint8_t)test_random();
        for (int i = 0; i < BLOCKS * 4; i++)
            scales[i] = (uint8_t)(i < 0x7F ? i : test_below(0x7F));
        CHECK(nib_gguf_nvfp4_join(codes, scales, BLOCKS, blocks) == 0);
        for (size_t i = 0; i < BLOCKS * 64; i++) {
            int scale;
            const int code = nvfp4_at(blocks, i, &scale);
            CHECK(code == code_at(codes, i) && scale == scales[i / 16]);
        }
        CHECK(nib_gguf_nvfp4_split(blocks, BLOCKS, codes_back, scales_back) == 0);
        CHECK_BYTES(codes_back, codes, BLOCKS * 32);
        CHECK_BYTES(scales_back, scales, BLOCKS * 4);

        for (int i = 0; i < BLOCKS; i++)
            scales[i] = (uint8_t)(255 - i);
        nib_gguf_mxfp4_join(codes, scales, BLOCKS, more);
        for (size_t i = 0; i < BLOCKS * 32; i++) {
            int scale;
            const int code = mxfp4_at(more, i, &scale);
            CHECK(code == code_at(codes, i) && scale == scales[i / 32]);
        }
        memset(codes_back, 0, BLOCKS * 16);
        nib_gguf_mxfp4_split(more, BLOCKS, codes_back, scales_back);
        CHECK_BYTES(codes_back, codes, BLOCKS * 16);
        CHECK_BYTES(scales_back, scales, BLOCKS);
    }
    CHECK(nib_gguf_nvfp4_join(NULL, NULL, 0, NULL) == 0 && nib_gguf_nvfp4_split(NULL, 0, NULL, NULL) == 0);
}

/* All 256 scale bytes, at each of the four places. */
TEST(blocks_odd_scales)
{
    for (int byte = 0; byte < 256; byte++)
        for (int place = 0; place < 4; place++) {
            uint8_t codes[32], scales[4] = { 0x38, 0x7E, 0x01, 0x40 }, block[36], codes_back[32], scales_back[4];
            for (int i = 0; i < 32; i++)
                codes[i] = (uint8_t)test_random();
            scales[place] = (uint8_t)byte;
            const size_t odd = byte >= 0x7F;
            CHECK(nib_gguf_nvfp4_join(codes, scales, 1, block) == odd);
            for (size_t i = 0; i < 64; i++) {
                const bool here = (int)i / 16 == place;
                int scale, code = nvfp4_at(block, i, &scale);
                if (here && byte >= 0x80 && byte != 0xFF)
                    code ^= 8;
                CHECK(code == code_at(codes, i));
                CHECK(scale == (here ? byte & 0x7F : scales[i / 16]));
            }
            /* The way back, from a file that somebody else has written. */
            CHECK(nib_gguf_nvfp4_join(codes, (uint8_t[4]){ 1, 2, 3, 4 }, 1, block) == 0);
            block[place] = (uint8_t)byte;
            CHECK(nib_gguf_nvfp4_split(block, 1, codes_back, scales_back) == odd);
            CHECK_BYTES(codes_back, codes, 32);
            for (int i = 0; i < 4; i++)
                CHECK(scales_back[i] == (i != place ? i + 1 : (byte & 0x7F) == 0x7F ? 0 : byte & 0x7F));
        }
}

TEST_MAIN
