/* SPDX-License-Identifier: Apache-2.0 */
/*
 * statistics.c - statistics of inputs: three forms of files, one table of where their values lie.
 */
#include "io/statistics.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/os.h"
#include "file/safetensors.h"
#include "io/checkpoint.h"
#include "io/gguf.h"

/* How sums become means. */
enum form { IMATRIX_GGUF, IMATRIX_LEGACY, NIB_STATS };

struct entry {
    char *name;
    char *input; /* NIB_STATS */
    int64_t values, slices;
    uint64_t at, counts_at; /* in the file */
    uint64_t amaxes_at;     /* NIB_STATS; 0: there are none */
    double calls;           /* IMATRIX_LEGACY */
    size_t same;            /* the first entry with the same values */
};

struct nib_statistics {
    char *path, hash[40];
    enum form form;
    int fd;
    uint64_t bytes;
    struct entry *entries;
    size_t n, capacity;
};

static nib_status no_memory(const char *path) { return nib_fail(NIB_ERR_MEMORY, "%s: no memory to read it", path); }

/* Takes the name over. */
static nib_status add(struct nib_statistics *s, struct entry entry)
{
    struct entry *grown = entry.name ? nib_grow(s->entries, &s->capacity, s->n + 1, sizeof *grown) : NULL;
    if (!grown) {
        nib_free(entry.name);
        nib_free(entry.input);
        return no_memory(s->path);
    }
    s->entries = grown;
    s->entries[s->n++] = entry;
    return NIB_OK;
}

/* The name of a weight without ".weight", of n bytes. */
static char *module_name(const char *name, size_t n)
{
    static const char suffix[] = ".weight";
    const size_t length = sizeof suffix - 1;
    return nib_alloc_text(name, n > length && !memcmp(name + n - length, suffix, length) ? n - length : n);
}

/* ---- imatrix in GGUF ---- */

static bool is_matrix(const struct nib_gguf_entry *e, int64_t *slices, int64_t *cols)
{
    *cols = e->rank ? e->shape[e->rank - 1] : 1;
    *slices = 1;
    for (int i = 0; i + 1 < e->rank; i++)
        if (!nib_mul(*slices, e->shape[i], slices))
            return false;
    return e->type == NIB_GGUF_F32;
}

static nib_status add_pair(struct nib_statistics *s, const nib_gguf *file, const struct nib_gguf_entry *sums,
                           uint64_t data)
{
    static const char suffix[] = ".in_sum2";
    char name[NIB_GGUF_MAX_NAME + 16];
    const size_t n = strlen(sums->name) - (sizeof suffix - 1);
    size_t index;
    struct nib_gguf_entry counts;
    int64_t slices, cols, of_counts, one;
    snprintf(name, sizeof name, "%.*s.counts", (int)n, sums->name);
    if (!nib_gguf_find(file, name, &index))
        return nib_fail(NIB_ERR_DATA, "%s: it has %s, and no %s", s->path, nib_quote(sums->name).text,
                        nib_quote(name).text);
    TRY(nib_gguf_entry(file, index, &counts));
    if (!is_matrix(sums, &slices, &cols) || !is_matrix(&counts, &of_counts, &one))
        return nib_fail(NIB_ERR_DATA, "%s: %s and its counts must be F32", s->path, nib_quote(sums->name).text);
    if (cols < 1 || slices < 1 || one != 1 || of_counts != slices)
        return nib_fail(NIB_ERR_DATA, "%s: %s is [%lld, %lld], and its counts are [%lld, %lld] instead of [%lld, 1]",
                        s->path, nib_quote(sums->name).text, (long long)slices, (long long)cols, (long long)of_counts,
                        (long long)one, (long long)slices);
    return add(s, (struct entry){ .name = module_name(sums->name, n),
                                  .values = slices * cols,
                                  .slices = slices,
                                  .at = data + sums->begin,
                                  .counts_at = data + counts.begin });
}

static bool ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n > m && !strcmp(text + n - m, end);
}

static nib_status read_gguf_entries(struct nib_statistics *s, const nib_gguf *file)
{
    char *type = NULL;
    bool found = false;
    TRY(nib_gguf_get_string(file, "general.type", &type, &found));
    const bool imatrix = found && !strcmp(type, "imatrix");
    nib_free(type);
    if (!imatrix)
        return nib_fail(NIB_ERR_DATA, "%s: it is a GGUF file, but no imatrix: general.type says otherwise", s->path);
    for (size_t i = 0; i < nib_gguf_count(file); i++) {
        struct nib_gguf_entry e;
        char other[NIB_GGUF_MAX_NAME + 16];
        size_t index;
        TRY(nib_gguf_entry(file, i, &e));
        if (ends_with(e.name, ".in_sum2")) {
            TRY(add_pair(s, file, &e, nib_gguf_facts(file).data_begin));
            continue;
        }
        if (!ends_with(e.name, ".counts"))
            continue; /* a later llama.cpp may write more */
        snprintf(other, sizeof other, "%.*s.in_sum2", (int)(strlen(e.name) - strlen(".counts")), e.name);
        if (!nib_gguf_find(file, other, &index))
            return nib_fail(NIB_ERR_DATA, "%s: it has %s, and no %s", s->path, nib_quote(e.name).text,
                            nib_quote(other).text);
    }
    return NIB_OK;
}

static nib_status read_gguf(struct nib_statistics *s)
{
    nib_gguf *file;
    s->form = IMATRIX_GGUF;
    TRY(nib_gguf_open(s->path, &file));
    const nib_status status = read_gguf_entries(s, file);
    nib_gguf_close(file);
    return status;
}

/* ---- imatrix of old ---- */

struct cursor {
    struct nib_statistics *s;
    uint64_t at;
};

/* Little-endian, as the machine is. */
static nib_status read_i32(struct cursor *c, const char *what, int64_t most, int64_t *out)
{
    int32_t value;
    if (c->s->bytes - c->at < sizeof value)
        return nib_fail(NIB_ERR_DATA, "%s: it ends before %s at byte %llu", c->s->path, what,
                        (unsigned long long)c->at);
    TRY(nib_os_read_at(c->s->fd, c->s->path, c->at, &value, sizeof value));
    if (value < 0 || value > most)
        return nib_fail(NIB_ERR_DATA, "%s: %s at byte %llu is %ld: no imatrix, nor statistics of nib", c->s->path, what,
                        (unsigned long long)c->at, (long)value);
    c->at += sizeof value;
    *out = value;
    return NIB_OK;
}

static nib_status read_legacy_entry(struct cursor *c)
{
    enum { LONGEST_NAME = 512 };
    struct nib_statistics *s = c->s;
    char name[LONGEST_NAME];
    int64_t length, calls, values;
    TRY(read_i32(c, "the length of a name", LONGEST_NAME, &length));
    if (length == 0 || s->bytes - c->at < (uint64_t)length)
        return nib_fail(NIB_ERR_DATA, "%s: a name of %lld bytes at byte %llu does not fit", s->path, (long long)length,
                        (unsigned long long)c->at);
    TRY(nib_os_read_at(s->fd, s->path, c->at, name, (size_t)length));
    if (memchr(name, 0, (size_t)length))
        return nib_fail(NIB_ERR_DATA, "%s: the name at byte %llu has a NUL in it", s->path, (unsigned long long)c->at);
    c->at += (uint64_t)length;
    TRY(read_i32(c, "a number of calls", INT32_MAX, &calls));
    TRY(read_i32(c, "a number of values", INT32_MAX, &values));
    struct entry entry = {
        .name = module_name(name, (size_t)length), .values = values, .at = c->at, .calls = (double)calls
    };
    const nib_status status =
        values < 1 || (s->bytes - c->at) / sizeof(float) < (uint64_t)values
            ? nib_fail(NIB_ERR_DATA, "%s: the %lld values of %s do not fit into the file", s->path, (long long)values,
                       entry.name ? nib_quote(entry.name).text : "a name")
            : NIB_OK;
    if (status) {
        nib_free(entry.name);
        return status;
    }
    c->at += (uint64_t)values * sizeof(float);
    return add(s, entry);
}

/* Behind the entries there may be a chunk's number and a data set's name, which nobody needs. */
static nib_status read_legacy(struct nib_statistics *s)
{
    enum { SMALLEST = 17 }; /* bytes of an entry: a name of one, and one value */
    struct cursor c = { .s = s };
    int64_t n;
    s->form = IMATRIX_LEGACY;
    TRY(read_i32(&c, "the number of entries", (int64_t)nib_min(INT32_MAX, (int64_t)(s->bytes / SMALLEST)), &n));
    for (int64_t i = 0; i < n; i++)
        TRY(read_legacy_entry(&c));
    return NIB_OK;
}

/* ---- nib's own ---- */

/* The largest magnitudes of the channels, which a file need not have. */
static nib_status find_amaxes(const struct nib_statistics *s, const nib_file *file, const char *input,
                              const nib_entry *sums, uint64_t *at)
{
    nib_entry amaxes;
    size_t index;
    char name[1024];
    *at = 0;
    snprintf(name, sizeof name, "%s.amaxk", input);
    if (nib_file_find(file, name, &index) || nib_file_entry(file, index, &amaxes))
        return NIB_OK;
    if (amaxes.dtype != NIB_F32 || amaxes.rank != 2 || amaxes.shape[0] != sums->shape[0] ||
        amaxes.shape[1] != sums->shape[1])
        return nib_fail(NIB_ERR_DATA, "%s: %s must be F32 of the shape of its sum2", s->path, nib_quote(name).text);
    *at = nib_file_data_begin(file) + amaxes.begin;
    return NIB_OK;
}

static nib_status add_input(struct nib_statistics *s, const nib_file *file, const char *module, const char *input)
{
    nib_entry sums, counts;
    size_t index;
    char name[1024];
    const uint64_t data = nib_file_data_begin(file);
    snprintf(name, sizeof name, "%s.sum2", input);
    if (nib_file_find(file, name, &index) || nib_file_entry(file, index, &sums))
        return nib_fail(NIB_ERR_DATA, "%s: `inputs` says that %s takes %s, and there is no %s", s->path,
                        nib_quote(module).text, nib_quote(input).text, nib_quote(name).text);
    snprintf(name, sizeof name, "%s.count", input);
    if (nib_file_find(file, name, &index) || nib_file_entry(file, index, &counts))
        return nib_fail(NIB_ERR_DATA, "%s: there is no %s", s->path, nib_quote(name).text);
    if (sums.dtype != NIB_F32 || sums.rank != 2 || counts.dtype != NIB_I64 || counts.rank != 1 ||
        sums.shape[0] != counts.shape[0] || sums.shape[0] < 1 || sums.shape[1] < 1)
        return nib_fail(NIB_ERR_DATA, "%s: %s.sum2 must be F32 [E, K], and %s.count I64 [E]", s->path,
                        nib_quote(input).text, nib_quote(input).text);
    uint64_t amaxes_at;
    TRY(find_amaxes(s, file, input, &sums, &amaxes_at));
    char *copy = nib_alloc_text(input, strlen(input));
    if (!copy)
        return no_memory(s->path);
    return add(s, (struct entry){ .name = nib_alloc_text(module, strlen(module)),
                                  .input = copy,
                                  .values = sums.shape[0] * sums.shape[1],
                                  .slices = sums.shape[0],
                                  .at = data + sums.begin,
                                  .counts_at = data + counts.begin,
                                  .amaxes_at = amaxes_at });
}

static nib_status read_inputs(struct nib_statistics *s, const nib_file *file)
{
    const char *format = nib_file_metadata(file, "format"), *inputs = nib_file_metadata(file, "inputs");
    if (!format || strcmp(format, "nib-stats-1") != 0 || !inputs)
        return nib_fail(NIB_ERR_DATA,
                        "%s: it is a safetensors file, but no statistics: its metadata lack \"format\": "
                        "\"nib-stats-1\" or \"inputs\"",
                        s->path);
    json_t *map;
    TRY(nib_ck_parse_json(s->path, inputs, strlen(inputs), &map));
    const char *module;
    json_t *input;
    nib_status status =
        json_is_object(map) ? NIB_OK : nib_fail(NIB_ERR_DATA, "%s: `inputs` is no JSON object", s->path);
    json_object_foreach(map, module, input)
    {
        if (status)
            break;
        status = json_is_string(input)
                     ? add_input(s, file, module, json_string_value(input))
                     : nib_fail(NIB_ERR_DATA, "%s: `inputs` has no name for %s", s->path, nib_quote(module).text);
    }
    json_decref(map);
    return status;
}

static nib_status read_own(struct nib_statistics *s)
{
    nib_file *file;
    s->form = NIB_STATS;
    TRY(nib_file_open(s->path, &file));
    const nib_status status = read_inputs(s, file);
    nib_file_close(file);
    return status;
}

/* ---- All of it ---- */

enum { LEAST = 1 << 12, CHUNK = 1 << 18 }; /* floats that are looked at at once */

static nib_status hash_file(struct nib_statistics *s, char *buffer, size_t bytes)
{
    XXH3_state_t *state = XXH3_createState();
    nib_status status = state && XXH3_128bits_reset(state) == XXH_OK ? NIB_OK : no_memory(s->path);
    for (uint64_t at = 0; at < s->bytes && !status;) {
        const size_t n = s->bytes - at < bytes ? (size_t)(s->bytes - at) : bytes;
        status = nib_os_read_at(s->fd, s->path, at, buffer, n);
        if (!status)
            (void)XXH3_128bits_update(state, buffer, n);
        at += n;
    }
    if (!status) {
        const XXH128_hash_t digest = XXH3_128bits_digest(state);
        snprintf(s->hash, sizeof s->hash, "%016llx%016llx", (unsigned long long)digest.high64,
                 (unsigned long long)digest.low64);
    }
    XXH3_freeState(state);
    return status;
}

static nib_status check_floats(const struct nib_statistics *s, const struct entry *e, uint64_t at, int64_t n,
                               const char *what, float *buffer)
{
    for (int64_t i = 0; i < n; i += CHUNK) {
        const int64_t count = nib_min(CHUNK, n - i);
        TRY(nib_os_read_at(s->fd, s->path, at + (uint64_t)i * sizeof *buffer, buffer, (size_t)count * sizeof *buffer));
        for (int64_t k = 0; k < count; k++)
            if (!(buffer[k] >= 0 && buffer[k] <= FLT_MAX))
                return nib_fail(NIB_ERR_DATA, "%s: %s %lld of %s is %s", s->path, what, (long long)(i + k),
                                nib_quote(e->name).text,
                                buffer[k] != buffer[k] ? "a NaN"
                                : buffer[k] < 0        ? "negative"
                                                       : "infinite");
    }
    return NIB_OK;
}

/* Tokens, as floats: none, or at least one, so that no mean is larger than its sum. */
static nib_status check_tokens(const struct nib_statistics *s, const struct entry *e, float *buffer)
{
    TRY(check_floats(s, e, e->counts_at, e->slices, "count", buffer));
    for (int64_t i = 0; i < e->slices; i++) {
        TRY(nib_os_read_at(s->fd, s->path, e->counts_at + (uint64_t)i * sizeof *buffer, buffer, sizeof *buffer));
        if (*buffer > 0 && *buffer < 1)
            return nib_fail(NIB_ERR_DATA, "%s: count %lld of %s is %g: less than a token", s->path, (long long)i,
                            nib_quote(e->name).text, (double)*buffer);
    }
    return NIB_OK;
}

static nib_status check_counts(const struct nib_statistics *s, const struct entry *e)
{
    for (int64_t i = 0; i < e->slices; i++) {
        int64_t count;
        TRY(nib_os_read_at(s->fd, s->path, e->counts_at + (uint64_t)i * sizeof count, &count, sizeof count));
        if (count < 0)
            return nib_fail(NIB_ERR_DATA, "%s: count %lld of %s is negative", s->path, (long long)i,
                            nib_quote(e->name).text);
    }
    return NIB_OK;
}

/* An entry's place, to find those that share one: modules with the same input. */
struct place {
    uint64_t at;
    size_t entry;
};

static int by_place(const void *left, const void *right)
{
    const struct place *a = left, *b = right;
    if (a->at != b->at)
        return a->at < b->at ? -1 : 1;
    return a->entry < b->entry ? -1 : a->entry > b->entry;
}

static nib_status find_same(struct nib_statistics *s)
{
    struct place *places = nib_alloc(s->n * sizeof *places);
    if (!places)
        return no_memory(s->path);
    for (size_t i = 0; i < s->n; i++)
        places[i] = (struct place){ s->entries[i].at, i };
    qsort(places, s->n, sizeof *places, by_place);
    for (size_t i = 0, first = 0; i < s->n; i++) {
        first = places[i].at == places[first].at ? first : i;
        s->entries[places[i].entry].same = places[first].entry;
    }
    nib_free(places);
    return NIB_OK;
}

static nib_status check_entry(const struct nib_statistics *s, const struct entry *e, float *buffer)
{
    TRY(check_floats(s, e, e->at, e->values, "value", buffer));
    if (s->form == IMATRIX_GGUF)
        TRY(check_tokens(s, e, buffer));
    if (s->form == NIB_STATS)
        TRY(check_counts(s, e));
    return e->amaxes_at ? check_floats(s, e, e->amaxes_at, e->values, "amax", buffer) : NIB_OK;
}

static nib_status check_values(struct nib_statistics *s)
{
    int64_t most = LEAST;
    for (size_t i = 0; i < s->n; i++)
        most = nib_max(most, nib_min(CHUNK, nib_max(s->entries[i].values, s->entries[i].slices)));
    float *buffer = nib_alloc((size_t)most * sizeof *buffer);
    nib_status status = buffer ? hash_file(s, (char *)buffer, (size_t)most * sizeof *buffer) : no_memory(s->path);
    for (size_t i = 0; i < s->n && !status; i++) {
        const struct entry *e = &s->entries[i];
        if (i && !strcmp(e->name, s->entries[i - 1].name))
            status = nib_fail(NIB_ERR_DATA, "%s: %s is there twice", s->path, nib_quote(e->name).text);
        else if (e->same == i)
            status = check_entry(s, e, buffer);
    }
    nib_free(buffer);
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct entry *)a)->name, ((const struct entry *)b)->name);
}

/* A safetensors file begins with the length of its header, whose first byte is a brace. */
static nib_status read_form(struct nib_statistics *s)
{
    char begin[9] = { 0 };
    TRY(nib_os_read_at(s->fd, s->path, 0, begin, s->bytes < sizeof begin ? (size_t)s->bytes : sizeof begin));
    if (!memcmp(begin, "GGUF", 4))
        return read_gguf(s);
    return begin[8] == '{' ? read_own(s) : read_legacy(s);
}

nib_status nib_statistics_open(const char *path, struct nib_statistics **out)
{
    struct nib_statistics *s = nib_alloc_zeroed(sizeof *s);
    if (!s)
        return no_memory(path);
    s->fd = -1;
    s->path = nib_alloc_text(path, strlen(path));
    nib_status status = s->path ? nib_os_open_read(path, &s->fd, &s->bytes) : no_memory(path);
    if (!status)
        status = read_form(s);
    if (!status && !s->n)
        status = nib_fail(NIB_ERR_DATA, "%s: there are no statistics in it", path);
    if (!status) {
        qsort(s->entries, s->n, sizeof *s->entries, by_name);
        status = find_same(s);
        if (!status)
            status = check_values(s);
    }
    if (status) {
        nib_statistics_close(s);
        return status;
    }
    *out = s;
    return NIB_OK;
}

void nib_statistics_close(struct nib_statistics *s)
{
    if (!s)
        return;
    if (s->fd >= 0)
        nib_os_close(s->fd);
    for (size_t i = 0; i < s->n; i++)
        nib_free(s->entries[i].name), nib_free(s->entries[i].input);
    nib_free(s->entries);
    nib_free(s->path);
    nib_free(s);
}

const char *nib_statistics_path(const struct nib_statistics *s) { return s->path; }
const char *nib_statistics_hash(const struct nib_statistics *s) { return s->hash; }
bool nib_statistics_of_gguf(const struct nib_statistics *s) { return s->form != NIB_STATS; }
bool nib_statistics_counts_tokens(const struct nib_statistics *s) { return s->form != IMATRIX_LEGACY; }
size_t nib_statistics_count(const struct nib_statistics *s) { return s->n; }

struct nib_statistic nib_statistics_at(const struct nib_statistics *s, size_t index)
{
    const struct entry *e = &s->entries[index];
    return (struct nib_statistic){ e->name, e->values, e->slices };
}

const char *nib_statistics_input(const struct nib_statistics *s, size_t index) { return s->entries[index].input; }

size_t nib_statistics_same(const struct nib_statistics *s, size_t index) { return s->entries[index].same; }

bool nib_statistics_find(const struct nib_statistics *s, const char *name, size_t *index)
{
    size_t first = 0, last = s->n;
    while (first < last) {
        const size_t middle = first + (last - first) / 2;
        const int order = strcmp(s->entries[middle].name, name);
        if (order == 0) {
            *index = middle;
            return true;
        }
        if (order < 0)
            first = middle + 1;
        else
            last = middle;
    }
    return false;
}

/* ---- Means ---- */

static nib_status tokens_of(const struct nib_statistics *s, const struct entry *e, int64_t slice, double *out)
{
    float single;
    int64_t integer;
    if (s->form == IMATRIX_LEGACY) {
        *out = e->calls;
        return NIB_OK;
    }
    if (s->form == IMATRIX_GGUF) {
        TRY(nib_os_read_at(s->fd, s->path, e->counts_at + (uint64_t)slice * sizeof single, &single, sizeof single));
        *out = (double)single;
        return NIB_OK;
    }
    TRY(nib_os_read_at(s->fd, s->path, e->counts_at + (uint64_t)slice * sizeof integer, &integer, sizeof integer));
    *out = (double)integer;
    return NIB_OK;
}

static bool all_ones(const float *values, int64_t n)
{
    while (n > 0 && values[n - 1] == 1)
        n--;
    return n == 0;
}

static nib_status check_slice(const struct nib_statistics *s, const struct entry *e, int64_t slices, int64_t slice,
                              int64_t cols)
{
    if (slices < 1 || slice < 0 || slice >= slices || cols < 1 || e->values / cols != slices || e->values % cols ||
        (e->slices && e->slices != slices))
        return nib_fail(NIB_ERR_DATA, "%s: %s has %lld values, not %lld of %lld inputs", s->path,
                        nib_quote(e->name).text, (long long)e->values, (long long)slices, (long long)cols);
    return NIB_OK;
}

nib_status nib_statistics_read_amaxes(const struct nib_statistics *s, size_t index, int64_t slices, int64_t slice,
                                      int64_t cols, float *out, bool *found)
{
    const struct entry *e = &s->entries[index];
    TRY(check_slice(s, e, slices, slice, cols));
    *found = e->amaxes_at != 0;
    return *found ? nib_os_read_at(s->fd, s->path, e->amaxes_at + (uint64_t)(slice * cols) * sizeof *out, out,
                                   (size_t)cols * sizeof *out)
                  : NIB_OK;
}

nib_status nib_statistics_read(const struct nib_statistics *s, size_t index, int64_t slices, int64_t slice,
                               int64_t cols, float *out, double *tokens)
{
    const struct entry *e = &s->entries[index];
    double count;
    TRY(check_slice(s, e, slices, slice, cols));
    TRY(tokens_of(s, e, slice, &count));
    *tokens = 0;
    if (count == 0 && s->form != IMATRIX_LEGACY)
        return NIB_OK;
    TRY(nib_os_read_at(s->fd, s->path, e->at + (uint64_t)(slice * cols) * sizeof *out, out,
                       (size_t)cols * sizeof *out));
    if (s->form == IMATRIX_LEGACY && all_ones(out, cols)) /* what it writes for an expert without tokens */
        return NIB_OK;
    const double divisor = count > 0 ? count : 1; /* a legacy file without calls has means */
    for (int64_t k = 0; k < cols; k++)
        out[k] = (float)((double)out[k] / divisor);
    *tokens = divisor;
    return NIB_OK;
}
