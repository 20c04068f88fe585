/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_files.c - quantized tensors in safetensors files: every kind written and read back, and files that somebody has
 * edited.
 */
#define _GNU_SOURCE
#include "test_directory.h"
#include "test_tensors.h"

/* ---- Tensors ---- */

static nib_status write_file(const char *path, const char *name, const nib_tensor *t)
{
    nib_writer *writer = NULL;
    nib_status status = nib_writer_create(path, &writer);
    if (!status)
        status = nib_writer_declare_tensor(writer, name, t);
    if (!status)
        status = nib_writer_write_tensor(writer, name, t);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    return status;
}

static nib_tensor *read_from(const char *path, const char *name)
{
    nib_file *file = NULL;
    nib_tensor *t = NULL;
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_read_tensor(file, name, NULL, &t));
    nib_file_close(file);
    return t;
}

/* Equal, and the same in what equality does not look at: every option, the thread count, the padding. */
static void check_same(const char *what, const nib_tensor *a, const nib_tensor *b)
{
    int equal = 0;
    if (!a || !b)
        return;
    CHECK_OK(nib_tensor_equal(a, b, &equal));
    CHECK_THAT(equal, "%s: not equal", what);
    const nib_metadata ma = metadata_of(a), mb = metadata_of(b);
    CHECK_THAT(nib_quantizer_equal(ma.quantizer, mb.quantizer), "%s: another quantizer", what);
    CHECK(ma.tensor_scale == mb.tensor_scale && ma.format == mb.format && ma.rowwise == mb.rowwise &&
          ma.columnwise == mb.columnwise);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        const nib_buffer *pa = nib_tensor_buffer(a, (nib_part)part), *pb = nib_tensor_buffer(b, (nib_part)part);
        CHECK(nib_buffer_bytes(pa) == nib_buffer_bytes(pb));
        if (pa && pb)
            CHECK_BYTES(nib_buffer_data(pa), nib_buffer_data(pb), nib_buffer_bytes(pa));
    }
}

static void check_round_trip(const char *what, const nib_tensor *t)
{
    const char *path = at("round.safetensors");
    CHECK_OK(write_file(path, "w", t));
    nib_tensor *back = read_from(path, "w");
    check_same(what, t, back);
    nib_tensor_destroy(back);
}

/* ---- Round trips ---- */

enum { KINDS = 19 };

static const char *kind(int i, nib_quantizer *q)
{
    static const char *const names[KINDS] = { "both",
                                              "rowwise",
                                              "columnwise",
                                              "none",
                                              "swizzled",
                                              "16x16",
                                              "square swizzled",
                                              "row-scaled",
                                              "rs swizzled",
                                              "rht",
                                              "rht mask",
                                              "rht both",
                                              "exact",
                                              "pow2",
                                              "gist",
                                              "torchao single",
                                              "modelopt",
                                              "compressed-tensors",
                                              "4over6" };
    *q = default_quantizer();
    q->rowwise = i != 2 && i != 3;
    q->columnwise = i != 1 && i != 3;
    q->swizzled = i == 4 || i == 6 || i == 8;
    q->block_dims[0] = i == 5 || i == 6 ? 16 : 1;
    q->row_scaled = i == 7 || i == 8;
    q->rht = i == 9 || i == 10 || i == 11;
    q->rht_rowwise = i == 11;
    q->rht_sign_mask = i == 10 ? 0x8001 : i == 11 ? 0 : NIB_RHT_SIGN_MASK;
    q->tensor_scale_rule = i == 12   ? NIB_TENSOR_SCALE_RULE_EXACT
                           : i == 13 ? NIB_TENSOR_SCALE_RULE_POW2
                                     : NIB_TENSOR_SCALE_RULE_DIALECT;
    q->dialect = i >= 14 && i < 18 ? (nib_dialect)(NIB_DIALECT_GIST + i - 14) : NIB_DIALECT_TE;
    q->no_tensor_scale = i == 15;
    if (i == 18)
        q->scale_rule = NIB_SCALE_4OVER6, q->e4m3_max = 256, q->error_mode = NIB_ERROR_MSE, q->fast_error = 1;
    return names[i];
}

TEST(every_kind)
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    for (int i = 0; i < KINDS; i++)
        for (int d = 0; d < 3; d++) {
            nib_quantizer q;
            const char *name = kind(i, &q);
            nib_tensor *t = some_of(&q, dtypes[d], DIMS(48, 80));
            check_round_trip(name, t);
            nib_tensor_destroy(t);
        }
}

TEST(every_number)
{
    static const uint64_t seeds[] = { 0, 1, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX };
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++)
        for (int rounding = 0; rounding < NIB_ROUNDING_COUNT; rounding++) {
            nib_quantizer q = default_quantizer();
            q.rounding = (nib_rounding)rounding;
            q.seed = seeds[i];
            q.offset = seeds[4 - i];
            q.origin[0] = 32 * (int64_t)i;
            q.origin[1] = INT64_C(1) << 20;
            q.min_block_scale = i == 2 ? 0x1p-9f : i == 3 ? 448 : 0;
            nib_tensor *t = some_of(&q, NIB_F32, DIMS(16, 32));
            check_round_trip("numbers", t);
            nib_tensor_destroy(t);
        }
    nib_quantizer q = default_quantizer();
    q.scale_rule = NIB_SCALE_SWEEP;
    q.origin[0] = q.origin[1] = INT64_MAX;
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(16, 32));
    check_round_trip("sweep", t);
    nib_tensor_destroy(t);
}

TEST(every_rank)
{
    static const int64_t shapes[][NIB_MAX_RANK + 1] = {
        { 1, 5 },
        { 1, 1 },
        { 2, 3, 33 },
        { 3, 2, 3, 17 },
        { 4, 2, 1, 3, 16 },
        { 5, 1, 2, 1, 2, 31 },
        { 6, 1, 1, 1, 1, 1, 1 },
        { 7, 2, 1, 2, 1, 2, 1, 16 },
        { 8, 2, 1, 2, 1, 2, 1, 2, 19 },
        { 1, 0 },
        { 2, 0, 16 },
        { 2, 16, 0 },
        { 3, 0, 0, 0 },
        { 8, 1, 1, 1, 0, 1, 1, 1, 48 },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int row_scaled = 0; row_scaled < 2; row_scaled++) {
            nib_quantizer q = default_quantizer();
            q.row_scaled = (uint8_t)row_scaled;
            nib_tensor *t = some_of(&q, NIB_BF16, (int)shapes[i][0], shapes[i] + 1);
            check_round_trip("ranks", t);
            nib_tensor_destroy(t);
        }
}

/* All metadata comes back, also the copies that the quantizer wants and the tensor does not have now. */
TEST(usages_that_differ_from_the_copies)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(16, 32));
    nib_tensor_clear(t);
    check_round_trip("cleared", t);
    nib_tensor_destroy(t);
    nib_quantizer row = default_quantizer();
    row.columnwise = 0;
    t = some_of(&row, NIB_F32, DIMS(16, 32));
    CHECK_OK(nib_tensor_set_quantizer(t, &q));
    check_round_trip("wants both", t);
    nib_tensor_destroy(t);
}

/* A tensor from a file is as good as any: an update by its own quantizer gives the same bytes as before. */
TEST(read_and_go_on)
{
    nib_quantizer q = default_quantizer();
    q.rounding = NIB_ROUND_STOCHASTIC_24;
    q.seed = UINT64_MAX - 5;
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(16, 32));
    CHECK_OK(write_file(at("on.safetensors"), "w", t));
    nib_tensor *back = read_from(at("on.safetensors"), "w");
    float x[16 * 32];
    for (int i = 0; i < 16 * 32; i++)
        x[i] = test_normal();
    nib_array array;
    CHECK_OK(nib_array_init(&array, x, NIB_F32, DIMS(16, 32)));
    CHECK_OK(nib_quantize_into(NULL, &array, NULL, NULL, t));
    CHECK_OK(nib_quantize_into(NULL, &array, NULL, NULL, back));
    check_same("updated", t, back);
    nib_tensor_destroy(t);
    nib_tensor_destroy(back);
}

TEST(several_in_one_file)
{
    static const char *const names[] = { "w",    "w2", "model.layers.0.weight", "w.row_data", "\xC3\xA9 \"quoted\"\n",
                                         "nib:w" };
    enum { COUNT = sizeof names / sizeof *names };
    const char *path = at("several.safetensors");
    nib_tensor *t[COUNT];
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_metadata(writer, "format", "pt"));
    CHECK_OK(nib_writer_declare(writer, "bias", NIB_F32, DIMS(3)));
    for (int i = 0; i < COUNT; i++) {
        nib_quantizer q;
        kind(i * 3, &q);
        t[i] = some_of(&q, NIB_F32, DIMS(16, 32));
        if (strcmp(names[i], "w.row_data") != 0) { /* that one is a part of the first */
            CHECK_OK(nib_writer_declare_tensor(writer, names[i], t[i]));
            CHECK_FAILS(nib_writer_declare_tensor(writer, names[i], t[i]), NIB_ERR_ARG, "twice");
        }
    }
    CHECK_OK(nib_writer_declare(writer, "plain.row_data", NIB_U8, DIMS(2)));
    const float bias[3] = { 1, 2, 3 };
    for (int i = COUNT - 1; i >= 0; i--)
        if (strcmp(names[i], "w.row_data") != 0)
            CHECK_OK(nib_writer_write_tensor(writer, names[i], t[i]));
    CHECK_OK(nib_writer_write(writer, "bias", 0, bias, sizeof bias));
    CHECK(!exists(path));
    CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, "plain.row_data");
    CHECK(!exists(path));
    nib_writer_destroy(writer);
    CHECK(!exists(path));

    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_declare(writer, "bias", NIB_F32, DIMS(3)));
    for (int i = 0; i < COUNT; i++)
        if (i != 3)
            CHECK_OK(nib_writer_declare_tensor(writer, names[i], t[i]));
    CHECK_OK(nib_writer_write(writer, "bias", 0, bias, sizeof bias));
    CHECK_FAILS(nib_writer_declare_tensor(writer, "late", t[0]), NIB_ERR_ARG, "before the first write");
    CHECK_FAILS(nib_writer_write_tensor(writer, "undeclared", t[0]), NIB_ERR_ARG, "not declared");
    for (int i = 0; i < COUNT; i++)
        if (i != 3)
            CHECK_OK(nib_writer_write_tensor(writer, names[i], t[i]));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);

    nib_file *file = NULL;
    nib_tensor *const untouched = (nib_tensor *)&file, *out = untouched;
    CHECK_OK(nib_file_open(path, &file));
    for (int i = 0; i < COUNT; i++) {
        if (i == 3)
            continue;
        nib_tensor *back = NULL;
        CHECK_OK(nib_file_read_tensor(file, names[i], NULL, &back));
        check_same(names[i], t[i], back);
        nib_tensor_destroy(back);
    }
    CHECK_FAILS(nib_file_read_tensor(file, "bias", NULL, &out), NIB_ERR_ARG, "bias");
    CHECK_FAILS(nib_file_read_tensor(file, "w.row_data", NULL, &out), NIB_ERR_ARG, "w.row_data");
    CHECK_FAILS(nib_file_read_tensor(file, "", NULL, &out), NIB_ERR_ARG, "several.safetensors");
    CHECK(out == untouched);
    float read[3];
    size_t index = 0;
    CHECK_OK(nib_file_find(file, "bias", &index));
    CHECK_OK(nib_file_read(file, index, 0, read, sizeof read));
    CHECK_BYTES(read, bias, sizeof bias);
    nib_file_close(file);
    for (int i = 0; i < COUNT; i++)
        nib_tensor_destroy(t[i]);
}

/* The parts are entries that any reader can take: the names, dtypes, shapes and bytes that nib.h says. */
TEST(parts_are_entries)
{
    static const char *const names[NIB_PART_COUNT] = { "w.row_data",  "w.col_data",         "w.row_scale",
                                                       "w.col_scale", "w.row_tensor_scale", "w.col_tensor_scale" };
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(3, 5, 33));
    const char *path = at("parts.safetensors");
    CHECK_OK(write_file(path, "w", t));
    nib_file *file = NULL;
    CHECK_OK(nib_file_open(path, &file));
    CHECK(nib_file_count(file) == NIB_PART_COUNT && nib_file_metadata(file, "nib:w"));
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        size_t index = 99;
        nib_entry entry;
        nib_array view = { 0 };
        CHECK_OK(nib_file_find(file, names[part], &index));
        CHECK_OK(nib_file_entry(file, index, &entry));
        CHECK_OK(nib_tensor_part(t, (nib_part)part, &view));
        CHECK(entry.dtype == view.dtype && entry.rank == view.rank && entry.end - entry.begin == view.bytes);
        CHECK_BYTES(entry.shape, view.shape, (size_t)view.rank * sizeof *view.shape);
        uint8_t *bytes = malloc(view.bytes);
        CHECK_OK(nib_file_read(file, index, 0, bytes, view.bytes));
        CHECK_BYTES(bytes, view.data, view.bytes);
        free(bytes);
    }
    nib_file_close(file);
    nib_tensor_destroy(t);
}

/* ---- Writers that fail ---- */

TEST(nothing_appears_before_commit)
{
    const char *path = at("never.safetensors");
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(16, 32)), *half = NULL;
    const int files = entries(directory);
    CHECK_OK(nib_tensor_clone(t, &half));
    CHECK_OK(nib_tensor_update_usage(half, 1, 0));
    for (int step = 0; step < 5; step++) {
        nib_writer *writer = NULL;
        CHECK_OK(nib_writer_create(path, &writer));
        if (step > 0)
            CHECK_OK(nib_writer_declare_tensor(writer, "w", t));
        if (step == 2) {
            CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, "w.row_data"); /* declared and never written */
        } else if (step == 3) {                                                /* only one of its copies written */
            CHECK_FAILS(nib_writer_write_tensor(writer, "w", half), NIB_ERR_MISMATCH, "not as it was declared");
            for (int part = 0; part < NIB_PART_COUNT; part += 2) {
                static const char *const names[] = { "w.row_data", NULL, "w.row_scale", NULL, "w.row_tensor_scale" };
                nib_buffer *const buffer = nib_tensor_buffer(half, (nib_part)part);
                CHECK_OK(nib_writer_write(writer, names[part], 0, nib_buffer_data(buffer), nib_buffer_bytes(buffer)));
            }
            CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, "w.col_data");
        } else if (step == 4) { /* all written, and then nobody wants it */
            CHECK_OK(nib_writer_write_tensor(writer, "w", t));
        }
        CHECK(!exists(path));
        nib_writer_destroy(writer);
        CHECK(!exists(path) && entries(directory) == files);
    }
    /* A file that was there stays as it was until the commit, and after a failed one. */
    CHECK_OK(write_file(path, "w", t));
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_declare_tensor(writer, "other", t));
    CHECK_FAILS(nib_writer_commit(writer), NIB_ERR_ARG, "other.");
    nib_writer_destroy(writer);
    nib_tensor *back = read_from(path, "w");
    check_same("kept", t, back);
    nib_tensor_destroy(back);
    nib_tensor_destroy(half);
    nib_tensor_destroy(t);
}

/* A tensor whose names collide is rejected, and what is left of it keeps the file from being committed. */
TEST(declare_what_is_taken)
{
    static const char *const taken[] = { "w.row_data", "w.col_scale", "w.col_tensor_scale" };
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(16, 32));
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        const char *path = at("collision.safetensors");
        nib_writer *writer = NULL;
        CHECK_OK(nib_writer_create(path, &writer));
        CHECK_OK(nib_writer_declare(writer, taken[i], NIB_U8, DIMS(1)));
        CHECK_FAILS(nib_writer_declare_tensor(writer, "w", t), NIB_ERR_ARG, taken[i]);
        CHECK(nib_writer_write_tensor(writer, "w", t) != NIB_OK);
        CHECK(nib_writer_commit(writer) != NIB_OK);
        nib_writer_destroy(writer);
        CHECK(!exists(path));
    }
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(at("collision.safetensors"), &writer));
    CHECK_FAILS(nib_writer_declare_tensor(writer, "\xFF", t), NIB_ERR_ARG, "UTF-8");
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    nib_tensor_destroy(t);
}

/* What was declared is what may be written. */
TEST(write_what_was_declared)
{
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(16, 32)), *larger = some_of(&q, NIB_F32, DIMS(160, 320));
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(at("declared.safetensors"), &writer));
    CHECK_OK(nib_writer_declare_tensor(writer, "w", t));
    CHECK_FAILS(nib_writer_write_tensor(writer, "w", larger), NIB_ERR_MISMATCH, "not as it was declared");
    CHECK_OK(nib_writer_write_tensor(writer, "w", t));
    CHECK_OK(nib_writer_commit(writer));
    CHECK_FAILS(nib_writer_write_tensor(writer, "w", t), NIB_ERR_ARG, "only destroy");
    CHECK_FAILS(nib_writer_declare_tensor(writer, "v", t), NIB_ERR_ARG, "only destroy");
    nib_writer_destroy(writer);
    nib_tensor_destroy(larger);
    nib_tensor_destroy(t);
}

/* ---- Edited files ---- */

/* Write a copy of a file with one piece of its header replaced by another text. */
static const char *edited(const char *from, const char *piece, const char *by)
{
    const char *path = at("edited.safetensors");
    size_t count = 0;
    char *bytes = get_file(from, &count), *header = NULL;
    uint64_t n = 0;
    memcpy(&n, bytes, 8);
    header = malloc(n + strlen(by) + 1);
    memcpy(header, bytes + 8, n);
    header[n] = '\0';
    char *place = strstr(header, piece);
    CHECK_THAT(place, "no \"%s\" in the header", piece);
    if (place) {
        memmove(place + strlen(by), place + strlen(piece), strlen(place + strlen(piece)) + 1);
        memcpy(place, by, strlen(by));
    }
    const uint64_t length = strlen(header);
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(&length, 8, 1, file) == 1 && fwrite(header, 1, length, file) == length &&
          fwrite(bytes + 8 + n, 1, count - 8 - n, file) == count - 8 - n);
    CHECK(file && fclose(file) == 0);
    free(header);
    free(bytes);
    return path;
}

/* Such a file is still a safetensors file, and its tensor is rejected with path and name. */
static void check_rejected(int line, const char *path, const char *what)
{
    nib_file *file = NULL;
    nib_tensor *const untouched = (nib_tensor *)&file, *out = untouched;
    nib_status status = nib_file_open(path, &file);
    if (status) {
        test_fail(__FILE__, line, "%s: not opened: %s", what, nib_last_error());
        return;
    }
    status = nib_file_read_tensor(file, "the.name", NULL, &out);
    if (status != NIB_ERR_DATA)
        test_fail(__FILE__, line, "%s: %s, not NIB_ERR_DATA", what, nib_status_name(status));
    else if (!strstr(nib_last_error(), path) || !strstr(nib_last_error(), "the.name"))
        test_fail(__FILE__, line, "%s: \"%s\" lacks the path or the name", what, nib_last_error());
    if (status && out != untouched)
        test_fail(__FILE__, line, "%s: the output was touched", what);
    if (!status)
        nib_tensor_destroy(out);
    nib_file_close(file);
}

static const char *make_good(void)
{
    const char *path = at("good.safetensors");
    const nib_quantizer q = default_quantizer();
    nib_tensor *t = some_of(&q, NIB_F32, DIMS(48, 80));
    CHECK_OK(write_file(path, "the.name", t));
    nib_tensor_destroy(t);
    return path;
}

/* The words of the description of the file that make_good writes. */
static int words_of(const char *path, char words[40][64])
{
    nib_file *file = NULL;
    int n = 0;
    CHECK_OK(nib_file_open(path, &file));
    const char *text = nib_file_metadata(file, "nib:the.name");
    CHECK(text);
    for (; text && *text && n < 40; n++) {
        const size_t bytes = strcspn(text, " ");
        snprintf(words[n], sizeof words[n], "%.*s", (int)bytes, text);
        text += bytes + (text[bytes] == ' ');
    }
    nib_file_close(file);
    return n;
}

TEST(every_word_is_needed)
{
    const char *good = make_good();
    char words[40][64];
    const int n = words_of(good, words);
    CHECK(n == 4 + 2 + 29);
    for (int i = 0; i < n; i++) {
        char piece[80], by[200], key[64];
        const bool last = i == n - 1;
        snprintf(key, sizeof key, "%.*s", (int)strcspn(words[i], "="), words[i]);
        snprintf(piece, sizeof piece, last ? " %.60s\"" : "%.60s ", words[i]);
        check_rejected(__LINE__, edited(good, piece, last ? "\"" : ""), key); /* missing */
        snprintf(by, sizeof by, last ? " %.60s %.60s\"" : "%.60s %.60s ", words[i], words[i]);
        check_rejected(__LINE__, edited(good, piece, by), key); /* twice */
        static const char *const values[] = { "",
                                              "x",
                                              "1x",
                                              "0x1",
                                              "1.0",
                                              "+1",
                                              "-",
                                              "--1",
                                              "1e3",
                                              "99999999999999999999",
                                              "-9223372036854775809",
                                              "18446744073709551616",
                                              "123456789012345678901234",
                                              "=1",
                                              "\\u0000",
                                              "\\u00b9",
                                              "\\t1",
                                              "1,1" };
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            snprintf(by, sizeof by, last ? " %s=%s\"" : "%s=%s ", key, values[v]);
            if (strcmp(values[v], "\\u0000") != 0) /* no string of the file may have a NUL */
                check_rejected(__LINE__, edited(good, piece, by), by);
        }
        snprintf(by, sizeof by, last ? " x%.60s\"" : "x%.60s ", words[i]);
        check_rejected(__LINE__, edited(good, piece, by), by); /* another key */
        snprintf(by, sizeof by, last ? " %s %s\"" : "%s %s ", key, strchr(words[i], '=') + 1);
        check_rejected(__LINE__, edited(good, piece, by), by); /* no equals sign */
        snprintf(by, sizeof by, last ? "  %.60s\"" : " %.60s ", words[i]);
        check_rejected(__LINE__, edited(good, piece, by), by); /* a space too many */
        if (i > 0) { /* another order; two dims may differ, but not in their keys */
            snprintf(piece, sizeof piece, "%.38s %.38s", words[i - 1], words[i]);
            snprintf(by, sizeof by, "%.38s %.38s", words[i], words[i - 1]);
            if (strncmp(words[i], "dim", 3) != 0 || strncmp(words[i - 1], "dim", 3) != 0)
                check_rejected(__LINE__, edited(good, piece, by), by);
        }
    }
    check_rejected(__LINE__, edited(good, "format=nvfp4", ""), "start");
    check_rejected(__LINE__, edited(good, "element=0", "element=0 more=1"), "end");
    CHECK(strstr(nib_last_error(), "is not what this version writes"));
    check_rejected(__LINE__, edited(good, "format=nvfp4", "format=nvfp5"), "format");
    CHECK(strstr(nib_last_error(), "is not what this version writes"));
    check_rejected(__LINE__, edited(good, "dim=48", "din=48"), "dim");
    CHECK(strstr(nib_last_error(), "is not what this version writes"));
}

TEST(values_out_of_range)
{
    static const char *const edits[][2] = {
        { "format=nvfp4", "format=mxfp8" },
        { "format=nvfp4", "format=NVFP4" },
        { "dialect=te ", "dialect=tee " },
        { "dialect=te ", "dialect=01234567890123456789012345678901234567890123456789012345678901234567890 " },
        { "dtype=F32", "dtype=F33" },
        { "dtype=F32", "dtype=U8" }, /* a dtype, but none that is quantized */
        { "dtype=F32", "dtype=F4" },
        { "rank=2", "rank=0" },
        { "dtype=F32", "dtype=F31" },
        { "rank=2", "rank=1" },
        { "rank=2", "rank=3" },
        { "rank=2", "rank=9" },
        { "rank=2", "rank=-1" },
        { "rank=2", "rank=4294967298" }, /* 2 in 32 bits */
        { "rank=2 dim=48 dim=80", "rank=0" },
        { "rank=2 dim=48 dim=80", "rank=9 dim=1 dim=1 dim=1 dim=1 dim=1 dim=1 dim=1 dim=48 dim=80" },
        { "dim=48", "dim=-48" },
        { "dim=48", "dim=49" },
        { "dim=48", "dim=47" }, /* fewer bytes of codes, as many of scales */
        { "dim=80", "dim=79" }, /* as many bytes of each, but not as many columns */
        { "dim=48 dim=80", "dim=80 dim=48" },
        { "dim=48", "dim=9223372036854775807" },
        { "dim=48 dim=80", "dim=4611686018427387904 dim=4611686018427387904" },
        { "dim=48 dim=80", "dim=0 dim=80" },
        { "version=2", "version=0" },
        { "version=2", "version=3" },
        { "version=2", "version=4294967297" },
        { "rowwise=1", "rowwise=2" },
        { "rowwise=1", "rowwise=-1" },
        { " columnwise=1", " columnwise=256" },
        { "swizzled=0", "swizzled=2" },
        { "swizzled=0", "swizzled=-1" },
        { "row_scaled=0", "row_scaled=2" },
        { "row_scaled=0", "row_scaled=1" }, /* the tensor scales are too few */
        { " rht=0", " rht=2" },
        { "rht_rowwise=0", "rht_rowwise=2" },
        { "rht_sign_mask=55272", "rht_sign_mask=65536" },
        { "rht_sign_mask=55272", "rht_sign_mask=-1" },
        { "block_rows=1", "block_rows=0" },
        { "block_rows=1", "block_rows=2" },
        { "block_rows=1", "block_rows=-1" },
        { "block_rows=1", "block_rows=4294967297" },
        { "block_cols=16", "block_cols=32" },
        { "block_cols=16", "block_cols=1" },
        { "scale_rule=0", "scale_rule=3" },
        { "scale_rule=0", "scale_rule=-1" },
        { "scale_rule=0", "scale_rule=4294967296" },
        { "error_mode=0", "error_mode=2" },
        { "fast_error=0", "fast_error=2" },
        { "no_tensor_scale=0", "no_tensor_scale=2" },
        { "no_tensor_scale=0", "no_tensor_scale=1" }, /* te has no such form */
        { "e4m3_max=448", "e4m3_max=449" },
        { "e4m3_max=448", "e4m3_max=256" }, /* not without four-over-six */
        { "e4m3_max=448", "e4m3_max=0" },
        { "tensor_scale_rule=0", "tensor_scale_rule=3" },
        { "min_block_scale=0", "min_block_scale=4294967296" },
        { "min_block_scale=0", "min_block_scale=-1" },
        { "min_block_scale=0", "min_block_scale=1" },          /* a subnormal float */
        { "min_block_scale=0", "min_block_scale=2143289344" }, /* a NaN */
        { "min_block_scale=0", "min_block_scale=1050253722" }, /* 0.3 */
        { "rounding=0", "rounding=4" },
        { "rounding=0", "rounding=-1" },
        { "origin_row=0", "origin_row=-1" },
        { "origin_col=0", "origin_col=-1" },
    };
    const char *good = make_good();
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++)
        check_rejected(__LINE__, edited(good, edits[i][0], edits[i][1]), edits[i][1]);
    /* Combinations that no quantizer may have. */
    static const char *const both[][4] = {
        { "block_rows=1", "block_rows=16", " rht=0", " rht=1" },
        { "block_rows=1", "block_rows=16", "scale_rule=0", "scale_rule=2" },
        { "scale_rule=0", "scale_rule=1", "rounding=0", "rounding=1" },
        { "dialect=te", "dialect=gist", "rounding=0", "rounding=1" },
        { "origin_row=0", "origin_row=1", "rounding=0", "rounding=1" },
    };
    for (size_t i = 0; i < sizeof both / sizeof *both; i++) {
        char once[256];
        snprintf(once, sizeof once, "%s", at("once.safetensors"));
        CHECK(rename(edited(good, both[i][0], both[i][1]), once) == 0);
        check_rejected(__LINE__, edited(once, both[i][2], both[i][3]), both[i][3]);
    }
}

TEST(parts_that_do_not_fit)
{
    static const char *const edits[][2] = {
        { "\"the.name.row_data\"", "\"the.nome.row_data\"" }, /* missing */
        { "\"the.name.col_data\"", "\"the.nome.col_data\"" },
        { "\"the.name.row_scale\"", "\"the.nome.row_scale\"" },
        { "\"the.name.col_scale\"", "\"the.nome.col_scale\"" },
        { "\"the.name.row_tensor_scale\"", "\"the.nome.row_tensor_scale\"" },
        { "\"the.name.col_tensor_scale\"", "\"the.nome.col_tensor_scale\"" },
        { "\"the.name.row_data\":{\"dtype\":\"U8\"", "\"the.name.row_data\":{\"dtype\":\"I8\"" }, /* another dtype */
        { "\"the.name.col_data\":{\"dtype\":\"U8\"", "\"the.name.col_data\":{\"dtype\":\"BOOL\"" },
        { "\"the.name.row_scale\":{\"dtype\":\"F8_E4M3\"", "\"the.name.row_scale\":{\"dtype\":\"F8_E5M2\"" },
        { "\"the.name.col_scale\":{\"dtype\":\"F8_E4M3\"", "\"the.name.col_scale\":{\"dtype\":\"U8\"" },
        { "\"the.name.row_tensor_scale\":{\"dtype\":\"F32\"", "\"the.name.row_tensor_scale\":{\"dtype\":\"I32\"" },
        { "\"the.name.col_tensor_scale\":{\"dtype\":\"F32\"", "\"the.name.col_tensor_scale\":{\"dtype\":\"U32\"" },
        { "\"shape\":[48,40]", "\"shape\":[40,48]" }, /* another shape of the same size */
        { "\"shape\":[48,40]", "\"shape\":[1920]" },
        { "\"shape\":[48,40]", "\"shape\":[1,48,40]" },
        { "\"shape\":[80,24]", "\"shape\":[24,80]" },
        { "\"shape\":[128,8]", "\"shape\":[8,128]" },
        { "\"shape\":[128,4]", "\"shape\":[512]" },
        { "\"shape\":[1]", "\"shape\":[]" },
        { "\"shape\":[1]", "\"shape\":[1,1]" },
    };
    const char *good = make_good();
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++)
        check_rejected(__LINE__, edited(good, edits[i][0], edits[i][1]), edits[i][1]);
}

/* A copy that the description does not name is not looked for. */
TEST(fewer_copies_than_parts)
{
    const char *good = make_good();
    nib_tensor *all = read_from(good, "the.name"),
               *row = read_from(edited(good, " columnwise=1", " columnwise=0"), "the.name");
    CHECK_OK(nib_tensor_update_usage(all, 1, 0));
    CHECK_OK(nib_tensor_update_usage(row, 1, 0)); /* what is wanted is said apart */
    check_same("rowwise", all, row);
    nib_tensor_destroy(all);
    nib_tensor_destroy(row);
}

/* The data of a file that shrinks after it was opened. */
TEST(shrunk_after_opening)
{
    char good[256];
    snprintf(good, sizeof good, "%s", make_good());
    nib_file *file = NULL;
    nib_tensor *const untouched = (nib_tensor *)&file, *out = untouched;
    CHECK_OK(nib_file_open(good, &file));
    CHECK(truncate(good, 2000) == 0);
    CHECK_FAILS(nib_file_read_tensor(file, "the.name", NULL, &out), NIB_ERR_IO, good);
    CHECK(out == untouched);
    nib_file_close(file);
}

TEST_MAIN
