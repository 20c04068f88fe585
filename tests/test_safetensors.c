/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_safetensors.c - the container: every rule of the reader, the writer's bytes, and what happens when the disk,
 * the memory or the caller fails.
 *
 * Built with NIB_TEST_WRAP_ALLOC and -Wl,--wrap=aligned_alloc,--wrap=realloc it also fails every allocation once.
 */
#define _GNU_SOURCE
#include "file/interval_set.h"
#include "test_alloc.h"
#include "test_directory.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* A file with this header and so many bytes 1, 2, 3, ... of data. */
static const char *make_sized(const char *header, size_t header_bytes, size_t data_bytes)
{
    const char *path = at("made.safetensors");
    char *bytes = malloc(8 + header_bytes + data_bytes);
    const uint64_t n = header_bytes;
    memcpy(bytes, &n, 8);
    memcpy(bytes + 8, header, header_bytes);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + header_bytes + i] = (char)(i + 1);
    put_file(path, bytes, 8 + header_bytes + data_bytes);
    free(bytes);
    return path;
}

static const char *make(const char *header, size_t data_bytes)
{
    return make_sized(header, strlen(header), data_bytes);
}

static nib_file *check_open(int line, const char *path)
{
    nib_file *file = NULL;
    const nib_status status = nib_file_open(path, &file);
    if (status)
        test_fail(__FILE__, line, "rejected: %s", nib_last_error());
    return file;
}

static void check_rejected(int line, const char *path, const char *words)
{
    nib_file *file = NULL;
    const nib_status status = nib_file_open(path, &file);
    if (status != NIB_ERR_DATA || file)
        test_fail(__FILE__, line, "%s instead of NIB_ERR_DATA", nib_status_name(status));
    else if (strncmp(nib_last_error(), path, strlen(path)) != 0)
        test_fail(__FILE__, line, "\"%s\" does not begin with the path", nib_last_error());
    else if (!strstr(nib_last_error(), words))
        test_fail(__FILE__, line, "\"%s\" does not say \"%s\"", nib_last_error(), words);
    nib_file_close(file);
}

#define ACCEPTED(header, data_bytes) nib_file_close(check_open(__LINE__, make(header, data_bytes)))
#define REJECTED(header, data_bytes, words) check_rejected(__LINE__, make(header, data_bytes), words)
#define OPEN(path) check_open(__LINE__, path)

/* An entry of one byte with other fields; and an entry whose dims or offsets are given. */
#define U8_1 "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]"
#define ENTRY(dtype, shape, offsets) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

/* ---- Reading: what is accepted ---- */

TEST(read_minimal)
{
    ACCEPTED("{}", 0);
    ACCEPTED("{\"a\":{" U8_1 "}}", 1);
    ACCEPTED("{\"__metadata__\":null}", 0);
    ACCEPTED("{\"__metadata__\":{}}", 0);
    ACCEPTED(" \t\r\n{ \"a\" : { \"dtype\" : \"U8\" , \"shape\" : [ 1 ] , \"data_offsets\" : [ 0 , 1 ] } } \t\r\n", 1);
    ACCEPTED("{\"\\u0061\":{\"\\u0064type\":\"U\\u0038\",\"shape\":[],\"data_offsets\":[0,1]}}", 1);
}

TEST(read_entries_and_data)
{
    nib_file *file =
        OPEN(make("{\"b/c\":" ENTRY("F32", "[1]", "[2,6]") ",\"a\":" ENTRY("I16", "[1,1]", "[0,2]") "}", 6));
    nib_entry entry;
    size_t index = 99;
    uint8_t data[6] = { 0 };
    CHECK(nib_file_count(file) == 2);
    if (!file)
        return;
    CHECK_OK(nib_file_entry(file, 0, &entry));
    CHECK(!strcmp(entry.name, "a") && entry.dtype == NIB_I16 && entry.rank == 2 && entry.begin == 0 && entry.end == 2);
    CHECK(entry.shape[0] == 1 && entry.shape[1] == 1);
    CHECK_OK(nib_file_find(file, "b/c", &index));
    CHECK(index == 1);
    CHECK_OK(nib_file_entry(file, 1, &entry));
    CHECK(!strcmp(entry.name, "b/c") && entry.dtype == NIB_F32 && entry.rank == 1 && entry.begin == 2 &&
          entry.end == 6);
    CHECK_OK(nib_file_read(file, 1, 1, data, 3));
    CHECK_BYTES(data, ((uint8_t[]){ 4, 5, 6, 0 }), 4);
    CHECK_OK(nib_file_read(file, 1, 4, NULL, 0));
    CHECK_FAILS(nib_file_read(file, 1, 1, data, 4), NIB_ERR_ARG,
                "tensor \"b/c\": 4 bytes from byte 1 are not within its 4 bytes");
    CHECK_FAILS(nib_file_read(file, 1, 5, data, 0), NIB_ERR_ARG, "not within");
    CHECK_FAILS(nib_file_read(file, 1, UINT64_MAX, data, 2), NIB_ERR_ARG, "not within");
    CHECK_FAILS(nib_file_read(file, 1, 1, data, SIZE_MAX), NIB_ERR_ARG, "not within");
    CHECK_FAILS(nib_file_read(file, 2, 0, data, 1), NIB_ERR_ARG, "there is no tensor 2 among its 2");
    CHECK_FAILS(nib_file_read(file, 0, 0, NULL, 1), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_file_entry(file, 2, &entry), NIB_ERR_ARG, "there is no tensor 2");
    index = 7;
    CHECK_FAILS(nib_file_find(file, "b", &index), NIB_ERR_ARG, "there is no tensor \"b\"");
    CHECK(index == 7);
    nib_file_close(file);
}

TEST(read_null_arguments)
{
    nib_file *file = NULL;
    nib_entry entry;
    size_t index;
    const char *text;
    CHECK_FAILS(nib_file_open(NULL, &file), NIB_ERR_ARG, "path is NULL");
    CHECK_FAILS(nib_file_open("x", NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_file_entry(NULL, 0, &entry), NIB_ERR_ARG, "file is NULL");
    CHECK_FAILS(nib_file_find(NULL, "a", &index), NIB_ERR_ARG, "file is NULL");
    CHECK_FAILS(nib_file_read(NULL, 0, 0, &entry, 1), NIB_ERR_ARG, "file is NULL");
    CHECK_FAILS(nib_file_metadata_entry(NULL, 0, &text, &text), NIB_ERR_ARG, "file is NULL");
    CHECK(nib_file_count(NULL) == 0 && nib_file_metadata_count(NULL) == 0 && !nib_file_metadata(NULL, "a"));
    nib_file_close(NULL);
}

TEST(read_metadata)
{
    nib_file *file =
        OPEN(make("{\"__metadata__\":{\"z\":\"last\",\"format\":\"pt\",\"\":\"\",\"\\u00e9\":\"\xC3\xA9\\n\"}}", 0));
    const char *key = NULL, *value = NULL;
    if (!file)
        return;
    CHECK(nib_file_metadata_count(file) == 4 && nib_file_count(file) == 0);
    CHECK(!strcmp(nib_file_metadata(file, "format"), "pt") && !strcmp(nib_file_metadata(file, ""), ""));
    CHECK(!nib_file_metadata(file, "forma") && !nib_file_metadata(file, "format2") && !nib_file_metadata(file, NULL));
    CHECK(!strcmp(nib_file_metadata(file, "\xC3\xA9"), "\xC3\xA9\n"));
    CHECK_OK(nib_file_metadata_entry(file, 2, &key, &value));
    CHECK(!strcmp(key, "z") && !strcmp(value, "last"));
    CHECK_FAILS(nib_file_metadata_entry(file, 4, &key, &value), NIB_ERR_ARG, "no pair 4 among the 4");
    nib_file_close(file);
    REJECTED("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__: at byte 29: expected a string, found '1'");
    REJECTED("{\"__metadata__\":{\"a\":null}}", 0, "expected a string, found 'n'");
    REJECTED("{\"__metadata__\":[]}", 0, "__metadata__: at byte 24: expected '{', found '['");
    REJECTED("{\"__metadata__\":nul}", 0, "expected null, found '}'");
    REJECTED("{\"__metadata__\":{\"a\":\"1\",\"b\":\"\",\"a\":\"2\"}}", 0, "__metadata__: the key \"a\" comes twice");
    REJECTED("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ comes twice");
    REJECTED("{\"__metadata__\":null,\"__metadata__\":null}", 0, "__metadata__ comes twice");
    REJECTED("{\"__metadata__\":{\"a\\u0000b\":\"\"}}", 0, "the string holds a NUL");
    REJECTED("{\"__metadata__\":{\"a\":\"\\u0000\"}}", 0, "the string holds a NUL");
}

TEST(read_names)
{
    nib_file *file = OPEN(
        make("{\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u20AC\\uD83d\\uDe00\\u00e9\\u007f\":" ENTRY("U8", "[]", "[0,1]") "}", 1));
    nib_entry entry = { 0 };
    CHECK_OK(nib_file_entry(file, 0, &entry));
    CHECK(entry.name && !strcmp(entry.name, "\"\\/\b\f\n\r\t\xE2\x82\xAC\xF0\x9F\x98\x80\xC3\xA9\x7F"));
    nib_file_close(file);
    static const char *const valid[] = { "a/../b",           " ",
                                         "\xC2\x80",         "\xDF\xBF",
                                         "\xE0\xA0\x80",     "\xED\x9F\xBF",
                                         "\xEE\x80\x80",     "\xEF\xBF\xBF",
                                         "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF",
                                         "__metadata_",      "\x7F" };
    static const char *const invalid[] = { "\x80",
                                           "\xBF",
                                           "\xC0\x80",
                                           "\xC1\xBF",
                                           "\xC3",
                                           "\xC3(",
                                           "\xE0\x9F\xBF",
                                           "\xED\xA0\x80",
                                           "\xED\xBF\xBF",
                                           "\xE2\x82",
                                           "\xF0\x8F\xBF\xBF",
                                           "\xF4\x90\x80\x80",
                                           "\xF5\x80\x80\x80",
                                           "\xFE",
                                           "\xFF",
                                           "\xF0\x9F\x98",
                                           "\xE2(\xA1",
                                           "\xF0\x28\x8C\xBC" };
    char header[200];
    for (size_t i = 0; i < sizeof valid / sizeof *valid; i++) {
        snprintf(header, sizeof header, "{\"%s\":{" U8_1 "}}", valid[i]);
        ACCEPTED(header, 1);
    }
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
        snprintf(header, sizeof header, "{\"%s\":{" U8_1 "}}", invalid[i]);
        REJECTED(header, 1, "the string is not UTF-8");
    }
    static const char nul[] = "{\"\xC3\0\":{" U8_1 "}}"; /* a NUL ends no header, and is no rest of a character */
    check_rejected(__LINE__, make_sized(nul, sizeof nul - 1, 1), "the string is not UTF-8");
    REJECTED("{\"\":{" U8_1 "}}", 1, "a tensor has an empty name");
    REJECTED("{\"a\\u0000\":{" U8_1 "}}", 1, "the string holds a NUL");
    REJECTED("{\"a\nb\":{" U8_1 "}}", 1, "at byte 11: a control character in a string is not escaped");
    REJECTED("{\"\\x\":{" U8_1 "}}", 1, "after a backslash, found 'x'");
    REJECTED("{\"\\uD800\":{" U8_1 "}}", 1, "expected the second half of a surrogate pair");
    REJECTED("{\"\\uD800x\":{" U8_1 "}}", 1, "expected the second half of a surrogate pair");
    REJECTED("{\"\\uD800\\n\":{" U8_1 "}}", 1, "expected the second half of a surrogate pair");
    REJECTED("{\"\\uD800\\uD800\":{" U8_1 "}}", 1, "has no second half");
    REJECTED("{\"\\uDC00\":{" U8_1 "}}", 1, "has no first half");
    REJECTED("{\"\\u12G4\":{" U8_1 "}}", 1, "four hexadecimal digits after \\u, found 'G'");
    REJECTED("{\"\\u12", 1, "four hexadecimal digits after \\u, found the end of the header");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0,1]") ",\"a\":" ENTRY("U8", "[1]", "[1,2]") "}", 2,
             "tensor \"a\" comes twice");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0,1]") ",\"\\u0061\":" ENTRY("U8", "[1]", "[1,2]") "}", 2,
             "tensor \"a\" comes twice");
}

TEST(read_entry_fields)
{
    REJECTED("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "tensor \"a\": it has no dtype");
    REJECTED("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "tensor \"a\": it has no shape");
    REJECTED("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "tensor \"a\": it has no data_offsets");
    REJECTED("{\"a\":{}}", 0, "it has no dtype");
    REJECTED("{\"a\":{" U8_1 ",\"dtype\":\"U8\"}}", 1, "tensor \"a\": its dtype comes twice");
    REJECTED("{\"a\":{" U8_1 ",\"shape\":[1]}}", 1, "its shape comes twice");
    REJECTED("{\"a\":{" U8_1 ",\"data_offsets\":[0,1]}}", 1, "its data_offsets comes twice");
    REJECTED("{\"a\":[\"U8\",[1],[0,1]]}", 1, "tensor \"a\": at byte 13: expected '{', found '['");
    REJECTED("{\"a\":null}", 0, "expected '{', found 'n'");
    REJECTED("{\"a\":" ENTRY("u8", "[1]", "[0,1]") "}", 1, "tensor \"a\": unknown dtype \"u8\"");
    REJECTED("{\"a\":" ENTRY("F4_E2M1", "[2]", "[0,1]") "}", 1, "unknown dtype \"F4_E2M1\"");
    REJECTED("{\"a\":" ENTRY("", "[1]", "[0,1]") "}", 1, "unknown dtype \"\"");
    REJECTED("{\"a\":" ENTRY("U8\\u0000", "[1]", "[0,1]") "}", 1, "NUL");
    REJECTED("{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "expected a string, found '8'");
    REJECTED("{\"a\":" ENTRY("U8", "1", "[0,1]") "}", 1, "expected '[', found '1'");
    REJECTED("{\"a\":" ENTRY("U8", "[1", "[0,1]") "}", 1, "expected a whole number");
    REJECTED("{\"a\":" ENTRY("U8", "[1 1]", "[0,1]") "}", 1, "expected ',' or ']', found '1'");
    REJECTED("{\"a\":" ENTRY("U8", "[1,]", "[0,1]") "}", 1, "expected a whole number, 0 or more, found ']'");
    REJECTED("{\"a\":" ENTRY("U8", "[,1]", "[0,1]") "}", 1, "expected a whole number, 0 or more, found ','");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0]") "}", 1, "expected ',', found ']'");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[]") "}", 1, "expected a whole number");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0,1,2]") "}", 1, "expected ']', found ','");
}

TEST(read_numbers)
{
    static const struct {
        const char *number, *words;
    } rejected[] = {
        { "-0", "expected a whole number, 0 or more, found '-'" },
        { "-1", "found '-'" },
        { "+1", "found '+'" },
        { "01", "begins with a needless 0" },
        { "00", "begins with a needless 0" },
        { "1.0", "must be whole" },
        { "1.", "must be whole" },
        { "1e0", "must be whole" },
        { "1E0", "must be whole" },
        { ".5", "found '.'" },
        { "\\\"1\\\"", "expected a whole number" },
        { "true", "found 't'" },
        { "0x1", "found 'x'" },
        { "18446744073709551616", "larger than 64 bits hold" },
        { "99999999999999999999999999", "larger than 64 bits hold" },
        { "18446744073709551615", "dim 18446744073709551615 is too large" },
        { "9223372036854775808", "dim 9223372036854775808 is too large" },
    };
    char header[200];
    for (size_t i = 0; i < sizeof rejected / sizeof *rejected; i++) {
        snprintf(header, sizeof header, "{\"a\":" ENTRY("U8", "[%s]", "[0,1]") "}", rejected[i].number);
        REJECTED(header, 1, rejected[i].words);
    }
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[-0,1]") "}", 1, "found '-'");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0,1.0]") "}", 1, "must be whole");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0,18446744073709551616]") "}", 1, "larger than 64 bits");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[18446744073709551614,18446744073709551615]") "}", 1, "leave a hole");
}

TEST(read_sizes)
{
    REJECTED("{\"a.weight\":" ENTRY("F32", "[1]", "[0,5]") "}", 5,
             "tensor \"a.weight\": data_offsets [0, 5] are 5 bytes, but its dtype and shape take 4");
    REJECTED("{\"a\":" ENTRY("U8", "[0]", "[0,1]") "}", 1, "are 1 bytes, but its dtype and shape take 0");
    REJECTED("{\"a\":" ENTRY("U8", "[]", "[0,0]") "}", 0, "are 0 bytes, but its dtype and shape take 1");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[1,0]") "}", 1, "data_offsets [1, 0] end before they begin");
    REJECTED("{\"a\":" ENTRY("F4", "[3]", "[0,2]") "}", 2, "its elements do not fill whole bytes");
    REJECTED("{\"a\":" ENTRY("F6_E2M3", "[2]", "[0,2]") "}", 2, "its elements do not fill whole bytes");
    ACCEPTED("{\"a\":" ENTRY("F4", "[2,3]", "[0,3]") "}", 3);
    ACCEPTED("{\"a\":" ENTRY("F6_E3M2", "[4]", "[0,3]") "}", 3);
    REJECTED("{\"a\":" ENTRY("U8", "[4294967296,4294967296]", "[0,0]") "}", 0, "the product of its dims is larger");
    REJECTED("{\"a\":" ENTRY("U8", "[4294967296,4294967296,0]", "[0,0]") "}", 0, "the product of its dims is larger");
    REJECTED("{\"a\":" ENTRY("U64", "[4611686018427387904]", "[0,0]") "}", 0, "its size in bits is larger");
    REJECTED("{\"a\":" ENTRY("U64", "[576460752303423488]", "[0,0]") "}", 0, "its size in bits is larger");
    REJECTED("{\"a\":" ENTRY("U8", "[2305843009213693951]", "[0,2305843009213693951]") "}", 0,
             "its tensors take 2305843009213693951 bytes, but 0 bytes follow the header");
    ACCEPTED("{\"a\":" ENTRY("U8", "[0,4294967296,4294967296]", "[0,0]") "}", 0);
    ACCEPTED("{\"a\":" ENTRY("U8", "[9223372036854775807,0]", "[0,0]") "}", 0);
    ACCEPTED("{\"a\":" ENTRY("F64", "[1,1,1,1,1,1,1,1,1,1,1,1]", "[0,8]") "}", 8);
}

TEST(read_ranges)
{
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[1,2]") "}", 2,
             "tensor \"a\": data_offsets [1, 2] leave a hole: the data before them ends at byte 0");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0,1]") ",\"b\":" ENTRY("U8", "[1]", "[2,3]") "}", 3, "leave a hole");
    REJECTED("{\"a\":" ENTRY("U8", "[2]", "[0,2]") ",\"b\":" ENTRY("U8", "[2]", "[1,3]") "}", 3,
             "tensor \"b\": data_offsets [1, 3] overlap the tensor before them, which ends at byte 2");
    REJECTED("{\"a\":" ENTRY("U8", "[2]", "[0,2]") ",\"b\":" ENTRY("U8", "[2]", "[0,2]") "}", 2,
             "tensor \"b\": data_offsets [0, 2] overlap the tensor before them, which ends at byte 2");
    REJECTED("{\"a\":" ENTRY("U8", "[2]", "[0,2]") ",\"b\":" ENTRY("U8", "[0]", "[1,1]") "}", 2, "overlap");
    REJECTED("{\"a\":" ENTRY("U8", "[0]", "[3,3]") "}", 0, "leave a hole");
    REJECTED("{\"a\":" ENTRY("U8", "[1]", "[0,1]") "}", 2, "its tensors take 1 bytes, but 2 bytes follow the header");
    REJECTED("{\"a\":" ENTRY("U8", "[2]", "[0,2]") "}", 1, "its tensors take 2 bytes, but 1 bytes follow the header");
    REJECTED("{}", 1, "its tensors take 0 bytes, but 1 bytes follow the header");
    ACCEPTED("{\"c\":" ENTRY("U8", "[0]", "[2,2]") ",\"b\":" ENTRY("U8", "[1]", "[1,2]") ",\"d\":" ENTRY(
                 "U8", "[0]", "[0,0]") ",\"a\":" ENTRY("U8", "[1]", "[0,1]") ",\"e\":" ENTRY("U8", "[0]", "[1,1]") "}",
             2);
}

TEST(read_structure)
{
    REJECTED("", 0, "at byte 8: expected '{', found the end of the header");
    REJECTED("   ", 0, "expected '{', found the end of the header");
    REJECTED("[]", 0, "expected '{', found '['");
    REJECTED("null", 0, "expected '{', found 'n'");
    REJECTED("\xEF\xBB\xBF{}", 0, "expected '{', found byte 0xEF");
    REJECTED("{", 0, "expected a string, found the end of the header");
    REJECTED("{}}", 0, "expected nothing more after the header's object, found '}'");
    REJECTED("{} x", 0, "expected nothing more");
    REJECTED("{},", 0, "expected nothing more");
    REJECTED("{,}", 0, "expected a string, found ','");
    REJECTED("{a:1}", 0, "expected a string, found 'a'");
    REJECTED("{'a':1}", 0, "expected a string, found '''");
    REJECTED("{\"a\"{" U8_1 "}}", 1, "expected ':', found '{'");
    REJECTED("{\"a\":{" U8_1 "},}", 1, "expected a string, found '}'");
    REJECTED("{\"a\":{" U8_1 ",}}", 1, "expected a string, found '}'");
    REJECTED("{\"a\":{" U8_1 "}", 1, "expected ',' or '}', found the end of the header");
    REJECTED("{\"a\":{" U8_1 "} \"b\"}", 1, "expected ',' or '}', found '\"'");
    REJECTED("{\"a\":{\"dtype\" \"U8\"}}", 1, "expected ':', found '\"'");
    REJECTED("{\"a", 1, "expected the end of a string, found the end of the header");
    REJECTED("{/**/}", 0, "expected a string, found '/'");
    REJECTED("{\v}", 0, "expected a string, found byte 0x0B");
    check_rejected(__LINE__, make_sized("{}\0\0\0\0\0\0", 8, 0),
                   "nothing more after the header's object, found byte 0x00");
    check_rejected(__LINE__, make_sized("{\"a\0b\"", 6, 0), "a control character in a string is not escaped");
}

TEST(read_unknown_keys)
{
    static const char *const valid[] = {
        "0",
        "-0",
        "-1.5e+10",
        "1E-2",
        "0.0",
        "true",
        "false",
        "null",
        "\"\\u0000 \\uD83D\\uDE00\"",
        "[]",
        "{}",
        "[[],[{}]]",
        "{\"dtype\":\"x\",\"dtype\":[1, 2 ,3]}",
        " [ 1 , { \"a\" : [ ] , \"b\" : null } ] ",
        "1e999",
    };
    static const struct {
        const char *value, *words;
    } invalid[] = {
        { "", "expected a value, found ','" },
        { "01", "expected ',' or '}', found '1'" },
        { "-", "expected a digit, found ','" },
        { "+1", "expected a value, found '+'" },
        { "1.", "expected a digit" },
        { "1e", "expected a digit" },
        { "1e+", "expected a digit" },
        { ".1", "expected a value" },
        { "tru", "expected true, found ','" },
        { "nulL", "expected null, found 'L'" },
        { "falsey", "expected ',' or '}', found 'y'" },
        { "NaN", "expected a value, found 'N'" },
        { "Infinity", "expected a value, found 'I'" },
        { "[1,]", "expected a value, found ']'" },
        { "[1 2]", "expected ',' or ']', found '2'" },
        { "[,]", "expected a value, found ','" },
        { "{1:2}", "expected a string, found '1'" },
        { "{\"a\":}", "expected a value, found '}'" },
        { "{\"a\":1,}", "expected a string, found '}'" },
        { "{\"a\"}", "expected ':', found '}'" },
        { "[}", "expected a value, found '}'" },
        { "{]", "expected a string, found ']'" },
        { "[[1}]", "expected ',' or ']', found '}'" },
        { "\"\xC0\x80\"", "the string is not UTF-8" },
    };
    char header[1024];
    for (size_t i = 0; i < sizeof valid / sizeof *valid; i++) {
        snprintf(header, sizeof header, "{\"a\":{\"x\":%s," U8_1 ",\"\":%s}}", valid[i], valid[i]);
        ACCEPTED(header, 1);
    }
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
        snprintf(header, sizeof header, "{\"a\":{\"x\":%s," U8_1 "}}", invalid[i].value);
        REJECTED(header, 1, invalid[i].words);
    }
    for (int depth = 124; depth <= 126; depth++) {
        char nested[300] = { 0 };
        for (int i = 0; i < depth; i++)
            nested[i] = '[', nested[2 * depth - 1 - i] = ']';
        snprintf(header, sizeof header, "{\"a\":{" U8_1 ",\"x\":%s}}", nested);
        if (depth <= 125)
            ACCEPTED(header, 1);
        else
            REJECTED(header, 1, "tensor \"a\": at byte 189: values are nested too deep");
    }
}

TEST(read_length_field)
{
    const char *path = at("length.safetensors");
    static const uint64_t lengths[] = { 3, 100000000, 100000001, UINT64_MAX, UINT64_MAX - 7, (uint64_t)INT64_MAX };
    static const char *const words[] = { "its header claims 3 bytes, but the file has only 2 after its length",
                                         "claims 100000000 bytes, but the file has only 2",
                                         "its header claims 100000001 bytes, and 100000000 are the most there may be",
                                         "claims 18446744073709551615 bytes, and 100000000",
                                         "are the most",
                                         "are the most" };
    for (int i = 0; i < 6; i++) {
        char bytes[10];
        memcpy(bytes, &lengths[i], 8);
        memcpy(bytes + 8, "{}", 2);
        put_file(path, bytes, sizeof bytes);
        check_rejected(__LINE__, path, words[i]);
    }
    put_file(path, "", 0);
    check_rejected(__LINE__, path, "it has 0 bytes, and a safetensors file has at least 8");
}

/* Any prefix of a file is rejected, and so is any one byte more. */
TEST(read_truncated)
{
    const char *header =
        "{\"__metadata__\":{\"k\":\"v\"},\"a\":" ENTRY("U8", "[5]", "[0,5]") ",\"b\":" ENTRY("U8", "[3]", "[5,8]") "}";
    size_t count;
    char *bytes = get_file(make(header, 8), &count);
    const char *path = at("cut.safetensors");
    for (size_t cut = 0; cut < count; cut++) {
        put_file(path, bytes, cut);
        check_rejected(__LINE__, path, "");
        /* The same with a length field that fits what is left of the header. */
        if (cut < 8 || cut >= 8 + strlen(header))
            continue;
        const uint64_t n = cut - 8;
        char *shorter = malloc(cut);
        memcpy(shorter, bytes, cut);
        memcpy(shorter, &n, 8);
        put_file(path, shorter, cut);
        check_rejected(__LINE__, path, "at byte");
        free(shorter);
    }
    put_file(path, bytes, count + 1);
    check_rejected(__LINE__, path, "its tensors take 8 bytes, but 9 bytes follow the header");
    free(bytes);
}

/* Every byte changed to every value: never a crash, and a rejection has a message. */
TEST(read_changed)
{
    size_t count;
    char *bytes = get_file(
        make("{\"__metadata__\":{\"k\":\"\\u00e9\"},\"\xC3\xA9\":" ENTRY("U8", "[5]", "[0,5]") "}", 5), &count);
    const char *path = at("changed.safetensors");
    int accepted = 0;
    for (size_t i = 0; i + 5 < count; i++)
        for (int value = 0; value < 256; value += i < 8 ? 5 : 1) {
            const char kept = bytes[i];
            bytes[i] = (char)value;
            put_file(path, bytes, count);
            nib_file *file = NULL;
            const nib_status status = nib_file_open(path, &file);
            CHECK(status == NIB_OK || (status == NIB_ERR_DATA && strlen(nib_last_error()) > strlen(path) + 5));
            accepted += status == NIB_OK;
            nib_file_close(file);
            bytes[i] = kept;
        }
    CHECK(accepted > 100);
    free(bytes);
}

/* Strings and numbers that straddle the reader's window. */
TEST(read_across_chunks)
{
    const size_t window = 65536;
    char *header = malloc(window + 400);
    for (size_t pad = window - 120; pad < window + 8; pad++) {
        memset(header, ' ', pad);
        strcpy(header + pad, "{\"\\uD83D\\uDE00\xF0\x9F\x98\x80x\":{\"dtype\":\"F8_E8M0\",\"shape\":[10,1],"
                             "\"x\":[-1.5e+3,true,{\"a\":null}],\"data_offsets\":[0,10]}}");
        nib_file *file = OPEN(make(header, 10));
        nib_entry entry = { .name = "" };
        CHECK_OK(nib_file_entry(file, 0, &entry));
        CHECK(!strcmp(entry.name, "\xF0\x9F\x98\x80\xF0\x9F\x98\x80x") && entry.rank == 2 && entry.shape[0] == 10);
        CHECK(entry.dtype == NIB_E8M0);
        nib_file_close(file);
    }
    free(header);
}

TEST(read_long_name)
{
    char *header = malloc(300000);
    char *at_name = header + sprintf(header, "{\"");
    memset(at_name, 'n', 200000);
    strcpy(at_name + 200000, "\":" ENTRY("U8", "[2]", "[0,1]") "}");
    REJECTED(header, 1, "nnn...\": data_offsets [0, 1] are 1 bytes");
    CHECK(strlen(nib_last_error()) < 300);
    strcpy(at_name + 200000, "\":{" U8_1 "}}");
    nib_file *file = OPEN(make(header, 1));
    nib_entry entry = { .name = "" };
    CHECK_OK(nib_file_entry(file, 0, &entry));
    CHECK(strlen(entry.name) == 200000);
    nib_file_close(file);
    free(header);
    /* What a terminal would obey does not reach the message, and a cut falls between characters. */
    REJECTED("{\"a\\u001b[2J\\u009b\\u007f\\n\":{}}", 0, "tensor \"a?[2J???\": it has no dtype");
    REJECTED("{\"1\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2"
             "\x82\xAC\xE2\x82\xAC"
             "\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82"
             "\xAC\xE2\x82\xAC"
             "\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC\":{}}",
             0, "\xE2\x82\xAC...\": it has no");
    file = OPEN(make("{}", 0));
    size_t index;
    CHECK_FAILS(nib_file_find(file, "\xFFx\xC3", &index), NIB_ERR_ARG, "there is no tensor \"?x?\"");
    nib_file_close(file);
}

TEST(read_not_a_file)
{
    nib_file *file = NULL;
    CHECK_FAILS(nib_file_open(at("absent"), &file), NIB_ERR_IO, "absent: cannot open");
    CHECK_FAILS(nib_file_open(directory, &file), NIB_ERR_IO, "not a regular file");
    const char *fifo = at("fifo");
    CHECK(mkfifo(fifo, 0600) == 0);
    CHECK_FAILS(nib_file_open(fifo, &file), NIB_ERR_IO, "not a regular file");
    CHECK_FAILS(nib_file_open("/dev/null", &file), NIB_ERR_IO, "not a regular file");
    CHECK(!file);
    unlink(fifo);
}

TEST(read_shrunk)
{
    const char *path = make("{\"a\":" ENTRY("U8", "[8]", "[0,8]") "}", 8);
    nib_file *file = OPEN(path);
    struct stat facts;
    uint8_t data[8];
    CHECK(stat(path, &facts) == 0 && truncate(path, facts.st_size - 3) == 0);
    CHECK_OK(nib_file_read(file, 0, 0, data, 5));
    CHECK_FAILS(nib_file_read(file, 0, 0, data, 6), NIB_ERR_IO, "although it was longer when opened");
    CHECK_FAILS(nib_file_read(file, 0, 7, data, 1), NIB_ERR_IO, path);
    nib_file_close(file);
}

/* ---- Writing ---- */

#define DECLARE(writer, name, dtype, ...)                                                      \
    nib_writer_declare(writer, name, dtype, (int64_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / 8), \
                       (int64_t[]){ __VA_ARGS__ })

static void check_content(int line, const char *path, const char *header, const char *data, size_t data_bytes)
{
    size_t count;
    char *bytes = get_file(path, &count);
    uint64_t n = 0;
    if (!bytes)
        return;
    memcpy(&n, bytes, 8);
    if (n % 8 || count != 8 + n + data_bytes || n < strlen(header) || memcmp(bytes + 8, header, strlen(header)) != 0 ||
        memcmp(bytes + 8 + n, data, data_bytes) != 0)
        test_fail(__FILE__, line, "%zu bytes: %.*s", count, (int)n, bytes + 8);
    for (size_t i = 8 + strlen(header); i < 8 + n; i++)
        if (bytes[i] != ' ')
            test_fail(__FILE__, line, "padding 0x%02x", bytes[i]);
    if (n >= strlen(header) + 8)
        test_fail(__FILE__, line, "needless padding");
    free(bytes);
}

TEST(write_empty)
{
    const char *path = at("empty.safetensors");
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK(!exists(path));
    CHECK_OK(nib_writer_commit(writer));
    CHECK(exists(path));
    check_content(__LINE__, path, "{}", "", 0);
    CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, "only destroy may follow a commit");
    CHECK_FAILS(nib_writer_declare(writer, "a", NIB_U8, 0, NULL), NIB_ERR_ARG, "only destroy");
    CHECK_FAILS(nib_writer_metadata(writer, "a", "b"), NIB_ERR_ARG, "only destroy");
    CHECK_FAILS(nib_writer_write(writer, "a", 0, "", 0), NIB_ERR_ARG, "only destroy");
    nib_writer_destroy(writer);
    CHECK(exists(path));
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_metadata(writer, "k", "v"));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    check_content(__LINE__, path, "{\"__metadata__\":{\"k\":\"v\"}}", "", 0);
    nib_writer_destroy(NULL);
}

TEST(write_order_and_bytes)
{
    const char *path = at("order.safetensors");
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(DECLARE(writer, "b", NIB_U8, 3));
    CHECK_OK(DECLARE(writer, "z", NIB_F32, 1));
    CHECK_OK(nib_writer_metadata(writer, "q\"\\\x01\x7F\n", "\xC3\xA9/\b\f\r\t\x1F"));
    CHECK_OK(DECLARE(writer, "a", NIB_U8, 2, 1));
    CHECK_OK(nib_writer_metadata(writer, "format", "pt"));
    CHECK_OK(nib_writer_declare(writer, "s", NIB_BF16, 0, NULL));
    CHECK_OK(DECLARE(writer, "c", NIB_I64, 0, 7));
    CHECK_OK(nib_writer_write(writer, "b", 0, "bbb", 3));
    CHECK_OK(nib_writer_write(writer, "a", 0, "aa", 2));
    CHECK_OK(nib_writer_write(writer, "s", 0, "ss", 2));
    CHECK_OK(nib_writer_write(writer, "z", 0, "zzzz", 4));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    check_content(
        __LINE__, path,
        "{\"__metadata__\":{\"format\":\"pt\",\"q\\\"\\\\\\u0001\x7F\\n\":\"\xC3\xA9/\\b\\f\\r\\t\\u001f\"},"
        "\"c\":" ENTRY("I64", "[0,7]", "[0,0]") ",\"z\":" ENTRY("F32", "[1]", "[0,4]") ",\"s\":" ENTRY(
            "BF16", "[]", "[4,6]") ",\"a\":" ENTRY("U8", "[2,1]", "[6,8]") ",\"b\":" ENTRY("U8", "[3]", "[8,11]") "}",
        "zzzzssaabbb", 11);
    nib_file *file = OPEN(path);
    CHECK(file && !strcmp(nib_file_metadata(file, "q\"\\\x01\x7F\n"), "\xC3\xA9/\b\f\r\t\x1F"));
    nib_file_close(file);
}

/* The reference's order of dtypes, the widest first. */
TEST(write_dtype_order)
{
    static const nib_dtype order[NIB_DTYPE_COUNT] = { NIB_U64,      NIB_I64,  NIB_F64,  NIB_C64,  NIB_F32, NIB_U32,
                                                      NIB_I32,      NIB_BF16, NIB_F16,  NIB_U16,  NIB_I16, NIB_E5M2FNUZ,
                                                      NIB_E4M3FNUZ, NIB_E8M0, NIB_E4M3, NIB_E5M2, NIB_I8,  NIB_U8,
                                                      NIB_E3M2,     NIB_E2M3, NIB_E2M1, NIB_BOOL };
    const char *path = at("dtypes.safetensors");
    const uint8_t data[32] = { 0 };
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(path, &writer));
    for (int i = 0; i < NIB_DTYPE_COUNT; i++)
        CHECK_OK(DECLARE(writer, nib_dtype_name((nib_dtype)i), (nib_dtype)i, 4));
    for (int i = 0; i < NIB_DTYPE_COUNT; i++)
        CHECK_OK(
            nib_writer_write(writer, nib_dtype_name((nib_dtype)i), 0, data, (size_t)nib_dtype_bits((nib_dtype)i) / 2));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    nib_file *file = OPEN(path);
    uint64_t begin = 0;
    for (int i = 0; file && i < NIB_DTYPE_COUNT; i++) {
        size_t index = 0;
        nib_entry entry = { 0 };
        CHECK_OK(nib_file_find(file, nib_dtype_name(order[i]), &index));
        CHECK_OK(nib_file_entry(file, index, &entry));
        CHECK(entry.begin == begin && entry.dtype == order[i]);
        begin = entry.end;
    }
    nib_file_close(file);
}

/* Every dtype, ranks to 12, empty tensors and odd names go through a file; the order of the calls does not show. */
static void write_everything(const char *path, bool backwards)
{
    static const char *const names[] = { "plain",        "a/b.c",          "\xC3\xA9t\xC3\xA9", "\xF0\x9F\x98\x80",
                                         "\"quoted\"\\", "tab\tnew\nline", "\x01\x1F\x7F",      " " };
    nib_writer *writer = NULL;
    char name[64];
    CHECK_OK(nib_writer_create(path, &writer));
    for (int pass = 0; pass < 2; pass++)
        for (int step = 0; step < NIB_DTYPE_COUNT * 8; step++) {
            const int i = backwards ? NIB_DTYPE_COUNT * 8 - 1 - step : step;
            const int64_t shapes[4][12] = { { 4, 2 }, { 0, 3 }, { 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 2, 2 }, { 8 } };
            const int64_t ranks[4] = { 2, 2, 12, 1 };
            snprintf(name, sizeof name, "%s%d", names[i % 8], i / 8);
            if (pass == 0) {
                CHECK_OK(nib_writer_declare(writer, name, (nib_dtype)(i / 8), ranks[i % 4], shapes[i % 4]));
            } else {
                uint8_t data[64];
                memset(data, i, sizeof data);
                CHECK_OK(nib_writer_write(writer, name, 0, data,
                                          i % 4 == 1 ? 0 : (size_t)nib_dtype_bits((nib_dtype)(i / 8))));
            }
        }
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

TEST(write_read_everything)
{
    const char *path = at("all.safetensors"), *other = at("other.safetensors");
    write_everything(path, false);
    write_everything(other, true);
    size_t count, other_count;
    char *bytes = get_file(path, &count), *other_bytes = get_file(other, &other_count);
    CHECK(count == other_count);
    CHECK_BYTES(bytes, other_bytes, count);
    free(bytes);
    free(other_bytes);
    nib_file *file = OPEN(path);
    CHECK(nib_file_count(file) == NIB_DTYPE_COUNT * 8);
    int64_t ranks = 0;
    const char *before = "";
    for (size_t i = 0; i < nib_file_count(file); i++) {
        nib_entry entry;
        size_t found = 0;
        uint8_t data[64];
        CHECK_OK(nib_file_entry(file, i, &entry));
        CHECK(strcmp(before, entry.name) < 0 && entry.shape);
        before = entry.name;
        ranks += entry.rank;
        CHECK_OK(nib_file_find(file, entry.name, &found));
        CHECK(found == i);
        CHECK(entry.begin == entry.end || entry.end - entry.begin == (uint64_t)nib_dtype_bits(entry.dtype));
        CHECK_OK(nib_file_read(file, i, 0, data, entry.end - entry.begin));
        for (uint64_t j = 0; j < entry.end - entry.begin; j++)
            CHECK(data[j] == data[0] && data[j] / 8 == (int)entry.dtype);
    }
    CHECK(ranks == NIB_DTYPE_COUNT * 8 / 4 * (2 + 2 + 12 + 1));
    nib_file_close(file);
}

TEST(write_refused)
{
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(at("refused.safetensors"), &writer));
    CHECK_FAILS(DECLARE(writer, "", NIB_U8, 1), NIB_ERR_ARG, "a tensor needs a name");
    CHECK_FAILS(DECLARE(writer, "__metadata__", NIB_U8, 1), NIB_ERR_ARG, "the format reserves this name");
    CHECK_FAILS(DECLARE(writer, "\xC3", NIB_U8, 1), NIB_ERR_ARG, "tensor \"?\": the name is not UTF-8");
    CHECK_FAILS(DECLARE(writer, "\xED\xA0\x80", NIB_U8, 1), NIB_ERR_ARG, "the name is not UTF-8");
    CHECK_FAILS(DECLARE(writer, "a", NIB_DTYPE_COUNT, 1), NIB_ERR_DTYPE, "tensor \"a\": unknown dtype 22");
    CHECK_FAILS(DECLARE(writer, "a", NIB_U8, -1), NIB_ERR_SHAPE, "tensor \"a\": dim 0 is -1");
    CHECK_FAILS(nib_writer_declare(writer, "a", NIB_U8, -1, NULL), NIB_ERR_SHAPE, "rank -1 is negative");
    CHECK_FAILS(nib_writer_declare(writer, "a", NIB_U8, 1, NULL), NIB_ERR_ARG, "its shape is NULL");
    CHECK_FAILS(nib_writer_declare(writer, "a", NIB_U8, INT64_MAX, (int64_t[]){ 1 }), NIB_ERR_ARG,
                "header would be longer");
    CHECK_FAILS(DECLARE(writer, "a", NIB_U8, INT64_MAX, INT64_MAX), NIB_ERR_SHAPE, "the product of its dims");
    CHECK_FAILS(DECLARE(writer, "a", NIB_U64, INT64_MAX), NIB_ERR_SHAPE, "its size in bits");
    CHECK_FAILS(DECLARE(writer, "a", NIB_E2M1, 5), NIB_ERR_SHAPE, "do not fill whole bytes");
    CHECK_FAILS(DECLARE(writer, "a", NIB_E2M3, 6), NIB_ERR_SHAPE, "do not fill whole bytes");
    for (int i = 0; i < 4; i++) { /* together they would pass the end of any file */
        char name[] = { (char)('A' + i), 0 };
        const nib_status status = DECLARE(writer, name, NIB_U8, INT64_MAX / 4);
        CHECK(status == (i < 3 ? NIB_OK : NIB_ERR_SHAPE));
    }
    nib_writer_destroy(writer);
    writer = NULL;
    CHECK_OK(nib_writer_create(at("refused.safetensors"), &writer));
    CHECK_OK(DECLARE(writer, "a", NIB_E2M1, 4));
    CHECK_OK(DECLARE(writer, "b", NIB_U8, 1));
    CHECK_FAILS(DECLARE(writer, "a", NIB_U8, 1), NIB_ERR_ARG, "tensor \"a\": it is declared twice");
    CHECK_OK(nib_writer_metadata(writer, "k", "v"));
    CHECK_FAILS(nib_writer_metadata(writer, "k", "w"), NIB_ERR_ARG, "metadata key \"k\" comes twice");
    CHECK_FAILS(nib_writer_metadata(writer, "\xFF", "w"), NIB_ERR_ARG, "the key is not UTF-8");
    CHECK_FAILS(nib_writer_metadata(writer, "x", "\xFF"), NIB_ERR_ARG, "metadata key \"x\": the value is not UTF-8");
    CHECK_FAILS(nib_writer_metadata(NULL, "x", "y"), NIB_ERR_ARG, "writer is NULL");
    CHECK_FAILS(nib_writer_declare(NULL, "x", NIB_U8, 0, NULL), NIB_ERR_ARG, "writer is NULL");
    CHECK_FAILS(nib_writer_commit(NULL), NIB_ERR_ARG, "writer is NULL");
    CHECK_FAILS(nib_writer_write(writer, "c", 0, "x", 1), NIB_ERR_ARG, "tensor \"c\": it was not declared");
    CHECK_FAILS(nib_writer_write(writer, "a", 0, "abc", 3), NIB_ERR_ARG,
                "3 bytes from byte 0 are not within its 2 bytes");
    CHECK_FAILS(nib_writer_write(writer, "a", UINT64_MAX, "abc", 3), NIB_ERR_ARG, "not within");
    CHECK_FAILS(nib_writer_write(writer, "a", 0, NULL, 2), NIB_ERR_ARG, "data is NULL");
    CHECK_OK(DECLARE(writer, "late", NIB_U8, 0)); /* rejected writes end nothing */
    CHECK_OK(nib_writer_write(writer, "a", 0, "", 0));
    CHECK_FAILS(DECLARE(writer, "later", NIB_U8, 1), NIB_ERR_ARG, "everything must be declared before the first write");
    CHECK_FAILS(nib_writer_metadata(writer, "l", "v"), NIB_ERR_ARG, "everything must be declared");
    nib_writer_destroy(writer);
    CHECK(!exists(at("refused.safetensors")));
}

TEST(write_incomplete)
{
    static const struct {
        struct {
            unsigned offset, bytes;
        } writes[3];
        const char *words;
    } cases[] = {
        { { { 0, 0 } }, "tensor \"a\": bytes 0 to 10 of 10 were never written" },
        { { { 1, 9 } }, "bytes 0 to 1 of 10 were never written" },
        { { { 0, 9 } }, "bytes 9 to 10 of 10 were never written" },
        { { { 0, 3 }, { 5, 5 } }, "bytes 3 to 5 of 10 were never written" },
        { { { 5, 5 }, { 5, 5 } }, "bytes 0 to 5 of 10 were never written" }, /* written twice is not all written */
        { { { 6, 4 }, { 1, 1 }, { 2, 3 } }, "bytes 0 to 1 of 10 were never written" },
        { { { 0, 4 }, { 2, 4 }, { 7, 3 } }, "bytes 6 to 7 of 10 were never written" },
    };
    const char *path = at("incomplete.safetensors");
    put_file(path, "old", 3);
    const int files = entries(directory);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_writer *writer = NULL;
        CHECK_OK(nib_writer_create(path, &writer));
        CHECK_OK(DECLARE(writer, "a", NIB_U8, 10));
        for (int j = 0; j < 3; j++)
            CHECK_OK(nib_writer_write(writer, "a", cases[i].writes[j].offset, "0123456789", cases[i].writes[j].bytes));
        CHECK(entries(directory) == files + 1);
        CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, cases[i].words);
        CHECK(entries(directory) == files);
        nib_writer_destroy(writer);
    }
    size_t count;
    char *bytes = get_file(path, &count);
    CHECK(count == 3 && !memcmp(bytes, "old", 3));
    free(bytes);
}

/* Random pieces in random order against a map of the bytes written. */
TEST(write_pieces)
{
    enum { BYTES = 300 };
    const char *path = at("pieces.safetensors");
    for (int round = 0; round < 60; round++) {
        uint8_t data[BYTES], got[BYTES];
        bool written[BYTES] = { false };
        nib_writer *writer = NULL;
        for (int i = 0; i < BYTES; i++)
            data[i] = (uint8_t)test_random();
        CHECK_OK(nib_writer_create(path, &writer));
        CHECK_OK(DECLARE(writer, "x", NIB_F32, 3));
        CHECK_OK(DECLARE(writer, "a", NIB_U8, BYTES));
        CHECK_OK(nib_writer_write(writer, "x", 0, "abcdefghijkl", 12));
        for (int i = 0; i < 10 + round * 2; i++) {
            const int64_t begin = test_below(BYTES), bytes = test_below(nib_dtype_bits(NIB_U8) * 4);
            const int64_t cut = begin + bytes > BYTES ? BYTES - begin : bytes;
            CHECK_OK(nib_writer_write(writer, "a", (uint64_t)begin, data + begin, (size_t)cut));
            for (int64_t j = begin; j < begin + cut; j++)
                written[j] = true;
        }
        bool all = true;
        for (int i = 0; i < BYTES; i++)
            all = all && written[i];
        if (!all && round % 2) { /* fill the gaps from the end, byte by byte */
            for (int i = BYTES - 1; i >= 0; i--)
                if (!written[i])
                    CHECK_OK(nib_writer_write(writer, "a", (uint64_t)i, data + i, 1));
            all = true;
        }
        const nib_status status = nib_writer_commit(writer);
        CHECK(status == (all ? NIB_OK : NIB_ERR_ARG));
        nib_writer_destroy(writer);
        if (!all)
            continue;
        nib_file *file = OPEN(path);
        CHECK_OK(nib_file_read(file, 0, 0, got, BYTES));
        CHECK_BYTES(got, data, BYTES);
        nib_file_close(file);
    }
}

TEST(write_many)
{
    enum { COUNT = 30000 };
    const char *path = at("many.safetensors");
    nib_writer *writer = NULL;
    char name[64];
    CHECK_OK(nib_writer_create(path, &writer));
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < COUNT; i++) {
            const uint32_t number = i * 7919 % COUNT; /* every number once, in no order */
            snprintf(name, sizeof name, "model.layers.%u.mlp.weight", number);
            if (pass == 0)
                CHECK_OK(DECLARE(writer, name, number % 3 ? NIB_U8 : NIB_F32, number % 3 ? 4 : 1));
            else
                CHECK_OK(nib_writer_write(writer, name, 0, &number, 4));
        }
    CHECK_FAILS(nib_writer_write(writer, "model.layers.30000.mlp.weight", 0, name, 4), NIB_ERR_ARG, "not declared");
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    nib_file *file = OPEN(path);
    CHECK(nib_file_count(file) == COUNT);
    for (uint32_t i = 0; i < COUNT; i++) {
        size_t index = 0;
        uint32_t number = 0;
        snprintf(name, sizeof name, "model.layers.%u.mlp.weight", i);
        CHECK_OK(nib_file_find(file, name, &index));
        CHECK_OK(nib_file_read(file, index, 0, &number, 4));
        CHECK(number == i);
    }
    nib_file_close(file);
    unlink(path);
}

TEST(write_duplicates_found_at_once)
{
    nib_writer *writer = NULL;
    char name[16];
    CHECK_OK(nib_writer_create(at("twice.safetensors"), &writer));
    for (int i = 0; i < 300; i++) {
        snprintf(name, sizeof name, "t%d", i * 37 % 300);
        CHECK_OK(DECLARE(writer, name, NIB_U8, 0));
        for (int j = 0; j <= i; j += 1 + i / 20) {
            snprintf(name, sizeof name, "t%d", j * 37 % 300);
            CHECK_FAILS(DECLARE(writer, name, NIB_U8, 0), NIB_ERR_ARG, "it is declared twice");
        }
    }
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

TEST(write_header_too_long)
{
    nib_writer *writer = NULL;
    const size_t bytes = 60000000;
    char *text = malloc(bytes + 1);
    memset(text, 'x', bytes);
    text[bytes] = '\0';
    CHECK_OK(nib_writer_create(at("long.safetensors"), &writer));
    CHECK_OK(nib_writer_metadata(writer, "a", text));
    CHECK_FAILS(nib_writer_metadata(writer, "b", text), NIB_ERR_ARG,
                "its header would be longer than the 100000000 bytes that the format allows");
    CHECK_FAILS(nib_writer_declare(writer, text, NIB_U8, 0, NULL), NIB_ERR_ARG, "would be longer");
    nib_writer_destroy(writer);
    writer = NULL;
    memset(text, '\x01', 20000000); /* six bytes each once they are escaped */
    text[20000000] = '\0';
    CHECK_OK(nib_writer_create(at("long.safetensors"), &writer));
    CHECK_OK(nib_writer_metadata(writer, "a", text));
    CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, "would be longer");
    nib_writer_destroy(writer);
    CHECK(!exists(at("long.safetensors")));
    free(text);
}

TEST(write_where_it_cannot)
{
    nib_writer *writer = NULL;
    CHECK_FAILS(nib_writer_create(at("no/such/directory"), &writer), NIB_ERR_IO, "cannot create a temporary file");
    put_file(at("plain"), "", 0);
    CHECK_FAILS(nib_writer_create(at("plain/x"), &writer), NIB_ERR_IO, "cannot create a temporary file");
    CHECK_FAILS(nib_writer_create(NULL, &writer), NIB_ERR_ARG, "path is NULL");
    CHECK_FAILS(nib_writer_create("x", NULL), NIB_ERR_ARG, "out is NULL");
    CHECK(!writer);
    const char *occupied = at("occupied");
    CHECK(mkdir(occupied, 0755) == 0);
    const int files = entries(directory);
    CHECK_OK(nib_writer_create(occupied, &writer));
    CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_IO, "occupied: cannot rename");
    CHECK(entries(directory) == files);
    nib_writer_destroy(writer);
    writer = NULL;
    if (geteuid() != 0) { /* root may write anywhere */
        CHECK(chmod(occupied, 0555) == 0);
        CHECK_FAILS(nib_writer_create(at("occupied/x"), &writer), NIB_ERR_IO, "cannot create a temporary file");
        CHECK(!writer);
    }
    CHECK(rmdir(occupied) == 0);
}

/* A rejected write leaves bytes that nobody knows: such a file is never published. */
TEST(write_disk_full)
{
    const char *path = at("full.safetensors");
    const int files = entries(directory);
    const struct rlimit small = { 4096, RLIM_INFINITY };
    struct rlimit before;
    char data[8192] = { 0 };
    nib_writer *writer = NULL;
    getrlimit(RLIMIT_FSIZE, &before);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(DECLARE(writer, "a", NIB_U8, sizeof data));
    if (setrlimit(RLIMIT_FSIZE, &small)) {
        nib_writer_destroy(writer);
        SKIP("no limit on file sizes can be set");
    }
    CHECK_FAILS(nib_writer_write(writer, "a", 0, data, sizeof data), NIB_ERR_IO, "full.safetensors: cannot write");
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    CHECK_OK(nib_writer_write(writer, "a", 0, data, sizeof data));
    CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_IO, "not committed, because an earlier write failed");
    nib_writer_destroy(writer);
    CHECK(!exists(path) && entries(directory) == files);
}

/* ---- Memory ---- */

static nib_status write_some(const char *path, int tensors)
{
    nib_writer *writer = NULL;
    char name[32];
    nib_status status = nib_writer_create(path, &writer);
    if (!status)
        status = nib_writer_metadata(writer, "key", "value");
    for (int i = 0; !status && i < tensors; i++) {
        snprintf(name, sizeof name, "tensor %d", i * 7 % tensors);
        status = DECLARE(writer, name, NIB_U8, 2, 2);
    }
    for (int i = 0; !status && i < tensors; i++) {
        snprintf(name, sizeof name, "tensor %d", i);
        status = nib_writer_write(writer, name, 0, "abcd", 4);
    }
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    return status;
}

/* What is passed over in a header is not kept: a megabyte of keys that nobody knows costs no memory. */
TEST(unknown_keys_take_no_memory)
{
#ifdef NIB_TEST_WRAP_ALLOC
    enum { KEYS = 1000, LENGTH = 1000 };
    const size_t most = KEYS * (LENGTH + 8) + 200;
    char *header = malloc(most);
    size_t used = (size_t)snprintf(header, most, "{\"a\":{" U8_1);
    for (int i = 0; i < KEYS; i++)
        used += (size_t)snprintf(header + used, most - used, ",\"%0*d\":0", LENGTH, i);
    used += (size_t)snprintf(header + used, most - used, "}}");
    const char *path = make_sized(header, used, 1);
    largest_allocation = 0;
    nib_file *file = OPEN(path);
    CHECK_THAT(nib_file_count(file) == 1 && largest_allocation < used / 2, "%zu bytes of memory",
               (size_t)largest_allocation);
    nib_file_close(file);
    free(header);
#else
    SKIP("built without the failing allocator");
#endif
}

TEST(allocations_fail)
{
#ifdef NIB_TEST_WRAP_ALLOC
    enum { TENSORS = 150 };
    const char *path = at("memory.safetensors");
    nib_status status = NIB_ERR_MEMORY;
    const int files = entries(directory);
    int failed = 0;
    for (; failed < 10000 && status; failed++) {
        unlink(path);
        allocations_left = failed;
        status = write_some(path, TENSORS);
        allocations_left = -1;
        CHECK(status == NIB_OK ||
              (status == NIB_ERR_MEMORY && strstr(nib_last_error(), "memory.safetensors: no memory")));
        CHECK(entries(directory) == files + exists(path)); /* never a temporary */
        if (exists(path))
            nib_file_close(OPEN(path)); /* and under the final name only a whole file */
    }
    CHECK(failed > TENSORS && !status);
    int opened = 0;
    for (status = NIB_ERR_MEMORY; opened < 1000 && status; opened++) {
        nib_file *file = NULL;
        allocations_left = opened;
        status = nib_file_open(path, &file);
        allocations_left = -1;
        CHECK(status == NIB_OK
                  ? nib_file_count(file) == TENSORS
                  : status == NIB_ERR_MEMORY && !file && strstr(nib_last_error(), "memory.safetensors: no memory"));
        nib_file_close(file);
    }
    CHECK(opened > 10 && !status);
    /* A declaration that failed for want of memory can be repeated. */
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(path, &writer));
    for (int i = 0; i < 300; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        for (int fail = 0; fail < 8; fail++) {
            allocations_left = fail;
            status = DECLARE(writer, name, NIB_U8, 1);
            allocations_left = -1;
            if (!status)
                break;
            CHECK(status == NIB_ERR_MEMORY);
        }
        CHECK(!status);
    }
    allocations_left = 0; /* laying out the header fails, and still more may be declared */
    CHECK_FAILS(nib_writer_write(writer, "7", 0, "x", 1), NIB_ERR_MEMORY, "no memory");
    allocations_left = -1;
    CHECK_OK(DECLARE(writer, "300", NIB_U8, 1));
    CHECK_OK(DECLARE(writer, "!", NIB_U8, 0)); /* the first in the order, although declared last */
    CHECK_FAILS(DECLARE(writer, "!", NIB_U8, 1), NIB_ERR_ARG, "declared twice");
    CHECK_FAILS(DECLARE(writer, "299", NIB_U8, 1), NIB_ERR_ARG, "declared twice");
    for (int i = 0; i <= 300; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        CHECK_OK(nib_writer_write(writer, name, 0, "x", 1));
    }
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
#else
    (void)write_some;
    SKIP("built without failing allocations");
#endif
}

/* The longest legal header, full of small entries in no order. */
static size_t write_large(const char *path)
{
    static char buffer[1 << 20];
    FILE *file = fopen(path, "wb");
    const uint64_t n = 100000000;
    uint64_t used = 1;
    size_t count = 0;
    if (!file)
        return 0;
    setvbuf(file, buffer, _IOFBF, sizeof buffer);
    fwrite(&n, 8, 1, file);
    fputc('{', file);
    while (used + 80 < n) {
        const uint32_t scrambled = (uint32_t)count * 2654435761u; /* odd, so that every number comes once */
        used += (uint64_t)fprintf(file, "%s\"%x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                                  count ? "," : "", scrambled);
        count++;
    }
    fputc('}', file);
    for (used++; used < n; used++)
        fputc(' ', file);
    return fclose(file) ? 0 : count;
}

TEST(large_header)
{
    const char *path = at("large.safetensors");
    const size_t count = write_large(path);
    CHECK(count > 1500000);
    const pid_t child = fork(); /* whose peak is its own */
    if (child == 0) {
        nib_file *file = NULL;
        const nib_status status = nib_file_open(path, &file);
        const bool good = !status && nib_file_count(file) == count;
        nib_file_close(file);
        _exit(good ? 0 : 1);
    }
    int result = -1;
    struct rusage usage = { 0 };
    CHECK(child > 0 && wait4(child, &result, 0, &usage) == child);
    CHECK(WIFEXITED(result) && WEXITSTATUS(result) == 0);
    CHECK_THAT(SANITIZED || usage.ru_maxrss < 400 * 1024, "%ld KiB at the peak", usage.ru_maxrss);
    CHECK_THAT(SANITIZED || usage.ru_utime.tv_sec < 30, "%ld s", (long)usage.ru_utime.tv_sec);
    if (getenv("NIB_TEST_VERBOSE"))
        printf("%zu entries: %ld KiB, %ld.%02ld s\n", count, usage.ru_maxrss, (long)usage.ru_utime.tv_sec,
               (long)usage.ru_utime.tv_usec / 10000);
    unlink(path);
}

/* In whatever order, against a byte for each place. */
TEST(intervals_in_any_order)
{
    enum { BYTES = 64 };
    for (int round = 0; round < 200 && !test_failures; round++) {
        struct nib_interval_set set = { 0 };
        bool there[BYTES + 1] = { false };
        struct nib_interval gap = { 0, 0 };
        size_t first = 0;
        for (int n = 0; nib_interval_set_gap(&set, BYTES, &gap); n++) {
            CHECK_THAT(n < 10000, "it is never full");
            const uint64_t begin = test_below(BYTES), end = begin + 1 + test_below(nib_min(4, BYTES - (int)begin));
            CHECK(nib_interval_set_reserve(&set));
            nib_interval_set_add(&set, begin, end);
            memset(there + begin, true, (size_t)(end - begin));
            size_t runs = 0;
            for (size_t i = 0; i < BYTES; i++)
                runs += there[i] && !there[i + 1];
            CHECK_THAT(set.n == runs, "%zu intervals, not %zu", set.n, runs);
            for (first = 0; there[first]; first++)
                ;
            for (size_t i = 0; i < set.n; i++)
                CHECK(there[set.list[i].begin] && !there[set.list[i].end] &&
                      (!set.list[i].begin || !there[set.list[i].begin - 1]));
            size_t last = first;
            while (last < BYTES && !there[last])
                last++;
            CHECK(nib_interval_set_gap(&set, BYTES, &gap) == (first < BYTES));
            CHECK(first == BYTES || (gap.begin == first && gap.end == last));
            if (test_failures)
                break;
        }
        nib_interval_set_free(&set);
    }
}

TEST_MAIN
