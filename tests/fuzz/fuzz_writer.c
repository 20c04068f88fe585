/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_writer.c - what nib writes it reads back: declarations, keys and writes as the input draws them, into a safetensors
 * or a GGUF file, against a model in plain arrays. Names that the format forbids are rejected, a file of which a byte was
 * never written does not appear, any other has exactly what was put into it, and nothing temporary stays. With
 * NIB_TEST_WRAP_ALLOC allocations fail: a declaration that did has not happened.
 */
#define _GNU_SOURCE
#include <stdbool.h>

#include "io/gguf.h"
#include "nib_checkpoint.h"
#include "nib_file.h"
#include "fuzz_directory.h"
#include "test_alloc.h"

enum { MOST = 12, NAME = 24, DATA = 4096, KEY_VALUE = 40 };

struct entry {
    char name[NAME];
    int kind; /* nib_dtype or GGML type */
    int rank;
    int64_t shape[6];
    size_t bytes, index;
    uint8_t data[DATA];
    bool written[DATA];
};
static struct entry entries[MOST];
static size_t n_entries;
static struct {
    char name[NAME], value[KEY_VALUE];
} keys[MOST];
static size_t n_keys;

/* ---- What is drawn ---- */

static bool is_text(const char *s)
{
    for (const unsigned char *p = (const unsigned char *)s; *p; p++) {
        const int more = *p < 0x80 ? 0 : *p >= 0xC2 && *p < 0xE0 ? 1 : -1; /* two bytes at most are drawn as text */
        if (more < 0 || (more && (*++p & 0xC0) != 0x80))
            return false;
    }
    return true;
}

/* Any bytes but NUL; only those of one and two bytes a character pass for UTF-8 here. */
static bool draw_text(struct draws *d, char *out, size_t space)
{
    const size_t n = (size_t)draw(d, (int)space - 1);
    for (size_t i = 0; i < n; i++) {
        const uint8_t byte = (uint8_t)draw_bytes(d, 1);
        out[i] = (char)(byte ? byte < 0xE0 ? byte : byte - 0x80 : 'a' + (int)i);
    }
    out[n] = 0;
    return is_text(out);
}

static bool is_entry(const char *name)
{
    for (size_t i = 0; i < n_entries; i++)
        if (!strcmp(entries[i].name, name))
            return true;
    return false;
}

static bool is_key(const char *name)
{
    for (size_t i = 0; i < n_keys; i++)
        if (!strcmp(keys[i].name, name))
            return true;
    return false;
}

static bool injected;

static void begin(struct draws *d)
{
    const int n = draw(d, 32);
    injected = n < 3;
    allocations_left = injected ? n : -1;
}

/* Whether the call did what it says; accepted: that it should. */
static bool done(nib_status status, bool accepted, const char *what)
{
    allocations_left = -1;
    if (status == NIB_ERR_MEMORY && injected)
        return false;
    require(!status == accepted && (accepted || *nib_last_error()), what);
    return accepted;
}

/* A shape of at most DATA bytes, and whether it is one of whole bytes (safetensors) or blocks (GGUF). */
static bool draw_entry(struct draws *d, struct entry *e, bool gguf)
{
    static const int types[] = { 0, 1, 2, 8, 12, 14, 30, 39, 24, 28 };
    static const int64_t dims[] = { 1, 2, 3, 4, 5, 8, 32, 64, 256, 0 };
    int64_t elements = 1;
    const int kind = gguf ? types[draw(d, 10)] : draw(d, NIB_DTYPE_COUNT);
    *e = (struct entry){ .kind = kind, .rank = draw(d, gguf ? 5 : 7) };
    for (int i = 0; i < e->rank; i++) {
        e->shape[i] = dims[draw(d, gguf ? 9 : 10)];
        elements *= e->shape[i];
        if (elements > 512) {
            elements /= e->shape[i];
            e->shape[i] = 1;
        }
    }
    if (!gguf) {
        e->bytes = (size_t)(elements * nib_dtype_bits((nib_dtype)e->kind) / 8);
        return elements * nib_dtype_bits((nib_dtype)e->kind) % 8 == 0;
    }
    const struct nib_gguf_type_facts *facts = nib_gguf_type_facts((uint32_t)e->kind);
    require(facts != NULL, "a type");
    e->bytes = (size_t)elements / facts->elements * facts->bytes;
    return (e->rank ? e->shape[e->rank - 1] : 1) % facts->elements == 0;
}

/* ---- The two writers, as one ---- */

struct target {
    bool gguf;
    nib_writer *writer;
    nib_gguf_plan *plan;
    nib_gguf_writer *gguf_writer;
};

static void declare(struct draws *d, struct target *t)
{
    struct entry *e = &entries[n_entries];
    const bool whole = draw_entry(d, e, t->gguf), text = draw_text(d, e->name, sizeof e->name);
    const bool accepted =
        whole && text && *e->name && !is_entry(e->name) && (t->gguf || strcmp(e->name, "__metadata__"));
    begin(d);
    const nib_status status = t->gguf ? nib_gguf_declare(t->plan, e->name, (uint32_t)e->kind, e->rank, e->shape)
                                      : nib_writer_declare(t->writer, e->name, (nib_dtype)e->kind, e->rank, e->shape);
    if (!done(status, accepted, "a declaration"))
        return;
    e->index = n_entries++;
}

static void put_key(struct draws *d, struct target *t)
{
    char *name = keys[n_keys].name, *value = keys[n_keys].value;
    const bool text = draw_text(d, name, NAME), also = draw_text(d, value, KEY_VALUE);
    begin(d);
    const nib_status status =
        t->gguf ? nib_gguf_put_string(t->plan, name, value) : nib_writer_metadata(t->writer, name, value);
    allocations_left = -1;
    if (status == NIB_OK)
        require(text && (also || t->gguf) && !is_key(name) && (*name || !t->gguf), "a key that should be rejected");
    else
        require((status == NIB_ERR_MEMORY && injected) || !text || !also || is_key(name) || !*name, "a key");
    n_keys += status == NIB_OK;
}

static nib_status write_range(struct target *t, const struct entry *e, uint64_t offset, const void *data, size_t bytes)
{
    return t->gguf ? nib_gguf_write(t->gguf_writer, e->index, offset, data, bytes)
                   : nib_writer_write(t->writer, e->name, offset, data, bytes);
}

/* Some bytes of an entry, perhaps beyond its end, perhaps a second time. */
static void write_some(struct draws *d, struct target *t)
{
    static uint8_t data[2 * DATA];
    struct entry *e = &entries[draw(d, (int)n_entries)];
    const uint64_t offset = draw(d, 4) ? 0 : draw_bytes(d, 2) % (e->bytes + 2);
    const size_t bytes =
        draw(d, 2) ? e->bytes - (offset < e->bytes ? offset : e->bytes) : draw_bytes(d, 2) % (e->bytes + 2);
    const uint8_t fill = (uint8_t)draw_bytes(d, 1);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(fill + i * 31);
    const bool accepted = offset <= e->bytes && bytes <= e->bytes - offset;
    begin(d);
    if (!done(write_range(t, e, offset, data, bytes), accepted, "a write"))
        return;
    memcpy(e->data + offset, data, bytes);
    memset(e->written + offset, 1, bytes);
}

/* ---- Reading back ---- */

static const struct entry *find(const char *name)
{
    for (size_t i = 0; i < n_entries; i++)
        if (!strcmp(entries[i].name, name))
            return &entries[i];
    return NULL;
}

static void read_safetensors(const char *path)
{
    static uint8_t data[DATA];
    nib_file *file = NULL;
    require(!nib_file_open(path, &file) && nib_file_count(file) == n_entries, "opening what was written");
    for (size_t i = 0; i < n_entries; i++) {
        nib_entry got;
        require(!nib_file_entry(file, i, &got), "an entry");
        const struct entry *e = find(got.name);
        require(e && (int)got.dtype == e->kind && got.rank == e->rank && got.end - got.begin == e->bytes, "its facts");
        for (int k = 0; k < e->rank; k++)
            require(got.shape[k] == e->shape[k], "its shape");
        require(!nib_file_read(file, i, 0, data, e->bytes) && !memcmp(data, e->data, e->bytes), "its data");
    }
    require(nib_file_metadata_count(file) == n_keys, "the keys");
    for (size_t i = 0; i < n_keys; i++) {
        const char *value = nib_file_metadata(file, keys[i].name);
        require(value && !strcmp(value, keys[i].value), "a key");
    }
    nib_file_close(file);
}

static void read_gguf(const char *path)
{
    static uint8_t data[DATA];
    nib_gguf *file = NULL;
    require(!nib_gguf_open(path, &file) && nib_gguf_count(file) == n_entries, "opening what was written");
    for (size_t i = 0; i < n_entries; i++) {
        const struct entry *e = &entries[i];
        struct nib_gguf_entry got;
        require(!nib_gguf_entry(file, i, &got) && !strcmp(got.name, e->name), "an entry");
        require(got.type == (uint32_t)e->kind && got.rank == e->rank && got.bytes == e->bytes, "its facts");
        for (int k = 0; k < e->rank; k++)
            require(got.shape[k] == e->shape[k], "its shape");
        require(!nib_gguf_read(file, i, 0, data, e->bytes) && !memcmp(data, e->data, e->bytes), "its data");
    }
    for (size_t i = 0; i < n_keys; i++) {
        char *value = NULL;
        bool there = false;
        require(!nib_gguf_get_string(file, keys[i].name, &value, &there) && there && !strcmp(value, keys[i].value),
                "a key");
        nib_free(value);
    }
    nib_gguf_close(file);
}

static void require_empty(const char *directory)
{
    DIR *listing = opendir(directory);
    require(listing != NULL, "the directory");
    for (struct dirent *item; (item = readdir(listing));)
        require(!strcmp(item->d_name, ".") || !strcmp(item->d_name, ".."), item->d_name);
    closedir(listing);
}

/* ---- A file ---- */

static nib_status finish(struct draws *d, struct target *t)
{
    bool whole = true;
    for (size_t i = 0; i < n_entries; i++)
        for (size_t b = 0; b < entries[i].bytes; b++)
            whole &= entries[i].written[b];
    begin(d);
    const nib_status status = t->gguf ? nib_gguf_commit(t->gguf_writer) : nib_writer_commit(t->writer);
    return done(status, whole, "a commit") ? NIB_OK : NIB_ERR_ARG;
}

static bool start(struct draws *d, struct target *t, const char *path)
{
    begin(d);
    return done(t->gguf ? nib_gguf_plan_create(path, &t->plan) : nib_writer_create(path, &t->writer), true, "a writer");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char *directory;
    static char path[128];
    struct draws d = { bytes, count };
    if (!directory) {
        directory = make_directory();
        snprintf(path, sizeof path, "%s/file", directory);
    }
    n_entries = n_keys = 0;
    struct target t = { .gguf = draw(&d, 2) };
    bool good = start(&d, &t, path);
    for (int n = draw(&d, MOST); good && n > 0; n--)
        draw(&d, 4) ? declare(&d, &t) : put_key(&d, &t);
    if (good && t.gguf) {
        begin(&d);
        good = done(nib_gguf_writer_create(t.plan, &t.gguf_writer), true, "a GGUF writer");
    }
    for (int n = draw(&d, 3 * MOST); good && n > 0 && n_entries; n--)
        write_some(&d, &t);
    for (size_t i = 0; good && i < n_entries && !draw(&d, 2); i++) { /* what is missing, most often */
        require(!write_range(&t, &entries[i], 0, entries[i].data, entries[i].bytes), "the rest");
        memset(entries[i].written, 1, sizeof entries[i].written);
    }
    good = good && !finish(&d, &t);
    nib_writer_destroy(t.writer);
    nib_gguf_writer_destroy(t.gguf_writer);
    nib_gguf_plan_destroy(t.plan);
    if (good) {
        t.gguf ? read_gguf(path) : read_safetensors(path);
        unlink(path);
    }
    require_empty(directory);
    return 0;
}
