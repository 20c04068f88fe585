/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scan.c - the first pass over the data: a hash of every input file, and what each tensor scale depends on.
 *
 * A file is read once from start to end, by as many threads as there are for it. Plain weights that are contiguous are
 * looked at as they pass; others are read as weights as soon as their tensor has passed, while the system still holds it. What a file gave is noted in the
 * run's directory, so that a resumed run need not look again.
 */
#include "run/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#include "format/codec.h"
#include "io/gguf.h"
#include "nib_file.h"
#include "nib_shard.h"

/* A range of a file whose values count for one group; or, where they are not contiguous, a weight. */
struct region {
    uint32_t file, group, weight; /* weight: the first that it holds, in plan->weights */
    uint64_t begin, end;          /* in the file; of what is read as a weight, its tensor */
    bool as_weight;
    nib_dtype dtype;
    uint32_t largest; /* magnitude, as bits of the dtype: they order as the values do */
};

struct nib_scan {
    struct nib_run *run;
    struct region *regions; /* by file, then begin */
    size_t n_regions;
    size_t *first;  /* of each file */
    size_t counted; /* regions that count in the amax of their group */
    const struct region
        *bad; /* of those that hold what is not finite, the one of the first weight, and how many more */
    size_t others;

    /* Of a scan that goes along with the writing. */
    struct reader *reader;
    struct group {
        uint64_t end; /* its amax is known when the file has passed to here */
        size_t left;  /* regions that do not count yet */
    } * groups;
    _Atomic uint64_t passed;
};

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory to scan the weights"); }

/* Files of rank r are r, r + size, ... */
static size_t files_of_rank(const struct nib_run *run)
{
    const size_t ranks = run->job.comm ? (size_t)run->job.comm->size : 1,
                 rank = run->job.comm ? (size_t)run->job.comm->rank : 0, n = run->plan->in->n_files;
    return n > rank ? (n - rank + ranks - 1) / ranks : 0;
}

/* ---- Magnitudes ---- */

/* Bits without the sign order as magnitudes do, infinities and NaNs above all others. Fixed lanes, which compilers turn
 * into vectors. */
static uint32_t largest_16(const unsigned char *bytes, size_t n)
{
    enum { LANES = 64 };
    int16_t lanes[LANES] = { 0 }, x[LANES];
    for (; n >= LANES; n -= LANES, bytes += sizeof x) {
        memcpy(x, bytes, sizeof x);
        for (int i = 0; i < LANES; i++) {
            const int16_t magnitude = x[i] & 0x7FFF;
            lanes[i] = magnitude > lanes[i] ? magnitude : lanes[i];
        }
    }
    int16_t largest = 0;
    memset(x, 0, sizeof x);
    memcpy(x, bytes, n * sizeof *x);
    for (int i = 0; i < LANES; i++) {
        const int16_t magnitude = x[i] & 0x7FFF, both = magnitude > lanes[i] ? magnitude : lanes[i];
        largest = both > largest ? both : largest;
    }
    return (uint32_t)largest;
}

static uint32_t largest_32(const unsigned char *bytes, size_t n)
{
    enum { LANES = 32 };
    int32_t lanes[LANES] = { 0 }, x[LANES];
    for (; n >= LANES; n -= LANES, bytes += sizeof x) {
        memcpy(x, bytes, sizeof x);
        for (int i = 0; i < LANES; i++) {
            const int32_t magnitude = x[i] & 0x7FFFFFFF;
            lanes[i] = magnitude > lanes[i] ? magnitude : lanes[i];
        }
    }
    int32_t largest = 0;
    memset(x, 0, sizeof x);
    memcpy(x, bytes, n * sizeof *x);
    for (int i = 0; i < LANES; i++) {
        const int32_t magnitude = x[i] & 0x7FFFFFFF, both = magnitude > lanes[i] ? magnitude : lanes[i];
        largest = both > largest ? both : largest;
    }
    return (uint32_t)largest;
}

static size_t size_of(nib_dtype dtype) { return (size_t)nib_dtypes[dtype].bits / 8; }

static uint32_t largest_of(nib_dtype dtype, const void *values, size_t n)
{
    return dtype == NIB_F32 ? largest_32(values, n) : largest_16(values, n);
}

static uint32_t infinity_of(nib_dtype dtype)
{
    return dtype == NIB_F32 ? 0x7F800000u : dtype == NIB_BF16 ? 0x7F80u : 0x7C00u;
}

static float magnitude(nib_dtype dtype, uint32_t bits)
{
    return dtype == NIB_F32    ? nib_float(bits)
           : dtype == NIB_BF16 ? nib_f32_from_bf16((uint16_t)bits)
                               : nib_f32_from_f16((uint16_t)bits);
}

/* ---- Regions ---- */

static int by_place(const void *left, const void *right)
{
    const struct region *a = left, *b = right;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return a->weight < b->weight ? -1 : a->weight > b->weight;
}

/* Where a tensor's data begins in its file. */
static nib_status tensor_begin(const nib_checkpoint *in, uint32_t tensor, uint64_t *begin)
{
    const struct nib_ck_tensor *t = &in->tensors[tensor];
    const struct nib_ck_file *file = &in->files[t->file];
    if (file->gguf) {
        struct nib_gguf_entry entry;
        TRY(nib_gguf_entry(file->gguf, t->entry, &entry));
        *begin = nib_gguf_facts(file->gguf).data_begin + entry.begin;
    } else {
        nib_entry entry;
        TRY(nib_file_entry(file->safetensors, t->entry, &entry));
        *begin = nib_file_data_begin(file->safetensors) + entry.begin;
    }
    return NIB_OK;
}

/* One region for the weights i..*end-1: all that a matrix of plain values is, if they are of one group; else a single
 * weight. */
static nib_status add_region(struct nib_scan *s, size_t i, size_t *end)
{
    const nib_plan *plan = s->run->plan;
    const struct nib_out_weight *w = &plan->weights[i];
    const uint32_t tensor = w->source.tensor[NIB_ROLE_DATA];
    const struct nib_ck_tensor *t = &plan->in->tensors[tensor];
    struct region region = { .file = t->file, .group = w->group, .weight = (uint32_t)i, .dtype = t->dtype };
    const int64_t matrix_rows = nib_ck_matrix_rows(plan->in, &w->source);
    int64_t rows = w->source.rows;
    size_t next = i + 1;
    for (; next < plan->n_weights; next++) {
        const struct nib_out_weight *other = &plan->weights[next];
        if (other->action != NIB_ACTION_QUANTIZE || other->group != w->group ||
            other->source.tensor[NIB_ROLE_DATA] != tensor || other->source.index != w->source.index)
            break;
        rows += other->source.rows;
    }
    TRY(tensor_begin(plan->in, tensor, &region.begin));
    *end = next;
    const bool scaled = w->source.columns || w->source.divisors;
    if (w->source.format == NIB_CHECKPOINT_FORMAT_PLAIN && rows == matrix_rows && !scaled) {
        const uint64_t bytes = (uint64_t)matrix_rows * (uint64_t)w->source.cols * size_of(t->dtype);
        region.begin += (uint64_t)nib_max(w->source.index, 0) * bytes;
        region.end = region.begin + bytes;
    } else {
        region.as_weight = true;
        region.end = region.begin + t->bytes;
        region.dtype = nib_ck_exact_dtype(&w->source);
        *end = i + 1;
    }
    s->regions[s->n_regions++] = region;
    return NIB_OK;
}

static nib_status find_regions(struct nib_scan *s)
{
    const nib_plan *plan = s->run->plan;
    s->regions = nib_alloc((plan->n_weights + 1) * sizeof *s->regions);
    s->first = nib_alloc_zeroed((plan->in->n_files + 1) * sizeof *s->first);
    if (!s->regions || !s->first)
        return no_memory();
    for (size_t i = 0; i < plan->n_weights;) {
        if (plan->weights[i].action == NIB_ACTION_QUANTIZE)
            TRY(add_region(s, i, &i));
        else
            i++;
    }
    qsort(s->regions, s->n_regions, sizeof *s->regions, by_place);
    for (size_t i = 0; i < s->n_regions; i++)
        s->first[s->regions[i].file + 1]++;
    for (size_t f = 1; f <= plan->in->n_files; f++)
        s->first[f] += s->first[f - 1];
    return NIB_OK;
}

/* ---- Weights that are read as such ---- */

/* The largest E8M0 code of a block with something in it; 256 for a NaN. */
static uint32_t largest_block_scale(const uint8_t *codes, const uint8_t *scales, int64_t blocks)
{
    uint32_t largest = 0;
    for (int64_t b = 0; b < blocks; b++) {
        uint64_t words[2];
        memcpy(words, codes + 16 * b, sizeof words);
        if ((words[0] | words[1]) & 0x7777777777777777u)
            largest = scales[b] == 255 ? 256 : (uint32_t)nib_max(largest, scales[b] + 1);
        if (largest == 256)
            break;
    }
    return largest; /* one more than the code, so that 0 is "nothing" */
}

static nib_status look_at_mxfp4(const struct nib_scan *s, struct region *region)
{
    const struct nib_run *run = s->run;
    const struct nib_ck_weight *w = &run->plan->weights[region->weight].source;
    const int64_t line = w->cols / 2, blocks = w->cols / 32;
    const int64_t rows = nib_max(1, (int64_t)(run->memory / 4) / nib_max(line + blocks, 1));
    uint8_t *codes = nib_alloc((size_t)(nib_min(rows, w->rows) * (line + blocks)));
    if (!codes)
        return no_memory();
    uint8_t *scales = codes + nib_min(rows, w->rows) * line;
    nib_status status = NIB_OK;
    for (int64_t row = 0; row < w->rows && !status; row += rows) {
        const int64_t n = nib_min(rows, w->rows - row);
        status = nib_ck_read_mxfp4(run->plan->in, w, row, n, codes, scales);
        if (!status)
            region->largest = (uint32_t)nib_max(region->largest, largest_block_scale(codes, scales, n * blocks));
    }
    nib_free(codes);
    return status;
}

static nib_status look_at_weight(const struct nib_scan *s, struct region *region)
{
    const struct nib_run *run = s->run;
    const nib_plan *plan = run->plan;
    const struct nib_ck_weight *w = &plan->weights[region->weight].source;
    if (plan->groups[region->group].mxfp4)
        return look_at_mxfp4(s, region);
    const int64_t rows = nib_ck_rows_for(plan->in, w, region->dtype, run->memory / 2);
    void *values = nib_alloc((size_t)(rows * w->cols) * size_of(region->dtype));
    if (!values)
        return no_memory();
    nib_status status = NIB_OK;
    for (int64_t row = 0; row < w->rows && !status; row += rows) {
        const int64_t n = nib_min(rows, w->rows - row);
        status = nib_ck_read_rows(plan->in, w, row, n, region->dtype, values);
        if (!status)
            region->largest =
                (uint32_t)nib_max(region->largest, largest_of(region->dtype, values, (size_t)(n * w->cols)));
    }
    nib_free(values);
    return status;
}

/* ---- A file from start to end ---- */

/* Threads take chunks in turn and look at them at the same time; the hash takes them in their order. */
struct reader {
    struct nib_scan *scan;
    size_t file;
    const char *path;
    int fd;
    uint64_t bytes;
    XXH3_state_t *hash;
    pthread_mutex_t mutex; /* of what follows, and of what regions have found */
    pthread_cond_t hashed;
    uint64_t taken, done; /* chunks */
    bool failed;
};

enum { CHUNK = 1 << 20, CARRY = 64 }; /* a core's second cache about holds a chunk */

/* Values of a region whose last byte is in the chunk that holds bytes at..at+count-1. */
static uint32_t largest_in_chunk(const struct region *region, const unsigned char *chunk, uint64_t at, size_t count)
{
    const uint64_t size = size_of(region->dtype), end = at + count;
    const uint64_t first = at > region->begin ? (at - region->begin) / size : 0;
    const uint64_t last = end >= region->end ? (region->end - region->begin) / size : (end - region->begin) / size;
    if (end <= region->begin || last <= first)
        return 0;
    const unsigned char *values = chunk + (ptrdiff_t)(region->begin + first * size) - (ptrdiff_t)at;
    return largest_of(region->dtype, values, (size_t)(last - first));
}

/* The regions that a chunk has something of; those before *next have passed. Experts of a stack end together: all that
 * end here, in order. */
static nib_status look_at_chunk(struct reader *r, const unsigned char *chunk, uint64_t at, size_t count, size_t *next,
                                const char **name)
{
    struct nib_scan *s = r->scan;
    while (*next < s->first[r->file + 1] && s->regions[*next].end <= at)
        ++*next;
    for (size_t i = *next; i < s->first[r->file + 1] && s->regions[i].begin < at + count; i++) {
        struct region *region = &s->regions[i];
        if (region->end <= at)
            continue;
        *name = s->run->plan->weights[region->weight].source.name;
        if (region->as_weight) {
            if (region->end <= at + count)
                TRY(look_at_weight(s, region));
            continue;
        }
        const uint32_t largest = largest_in_chunk(region, chunk, at, count);
        pthread_mutex_lock(&r->mutex);
        region->largest = largest > region->largest ? largest : region->largest;
        pthread_mutex_unlock(&r->mutex);
    }
    return NIB_OK;
}

static bool is_nonfinite(const struct nib_scan *s, const struct region *region)
{
    return s->run->plan->groups[region->group].mxfp4 ? region->largest == 256
                                                     : region->largest >= infinity_of(region->dtype);
}

static void count_region(struct nib_scan *s, const struct region *region)
{
    float *amax = &s->run->amaxes[region->group];
    float here = 0;
    if (is_nonfinite(s, region)) {
        s->others += s->bad != NULL;
        s->bad = !s->bad || region->weight < s->bad->weight ? region : s->bad;
    } else if (!s->run->plan->groups[region->group].mxfp4)
        here = magnitude(region->dtype, region->largest);
    else if (region->largest)
        here = nib_f32_from_e8m0((uint8_t)(region->largest - 1));
    *amax = here > *amax ? here : *amax;
}

/* What is known of groups now that the file has passed to here. Nothing more after what is not finite: this run will
 * fail, as soon as the rest has been looked at. */
static void settle_groups(struct nib_scan *s, uint64_t passed)
{
    while (s->counted < s->n_regions && s->regions[s->counted].end <= passed) {
        const struct region *region = &s->regions[s->counted++];
        count_region(s, region);
        if (--s->groups[region->group].left == 0)
            nib_run_find_tensor_scale(s->run, region->group);
    }
    if (!s->bad)
        atomic_store(&s->passed, passed);
}

/* False where another thread has failed: its chunk will never come. */
static bool hash_in_turn(struct reader *r, uint64_t index, const unsigned char *chunk, size_t count)
{
    pthread_mutex_lock(&r->mutex);
    while (r->done != index && !r->failed)
        pthread_cond_wait(&r->hashed, &r->mutex);
    const bool mine = !r->failed;
    pthread_mutex_unlock(&r->mutex);
    if (!mine)
        return false;
    XXH3_128bits_update(r->hash, chunk, count);
    pthread_mutex_lock(&r->mutex);
    r->done++;
    if (r->scan->reader)
        settle_groups(r->scan, index * CHUNK + count);
    pthread_cond_broadcast(&r->hashed);
    pthread_mutex_unlock(&r->mutex);
    return true;
}

/* Memory for any chunk of the file. */
static unsigned char *chunk_memory(const struct reader *r)
{
    return nib_alloc(CARRY + (r->bytes < CHUNK ? (size_t)r->bytes : CHUNK));
}

/* The next chunk; in front of it stand a few bytes of the one before. *any is false where there is none. */
static nib_status read_chunk(struct reader *r, unsigned char *memory, size_t *next, bool *any)
{
    pthread_mutex_lock(&r->mutex);
    const uint64_t index = r->taken, at = index * CHUNK, before = at ? CARRY : 0;
    *any = at < r->bytes && !r->failed;
    r->taken += *any;
    pthread_mutex_unlock(&r->mutex);
    if (!*any)
        return NIB_OK;
    const size_t count = r->bytes - at < CHUNK ? (size_t)(r->bytes - at) : CHUNK;
    const char *name = NULL;
    TRY(nib_os_read_at(r->fd, r->path, at - before, memory + CARRY - before, count + (size_t)before));
    TRY(look_at_chunk(r, memory + CARRY, at, count, next, &name));
    *any = hash_in_turn(r, index, memory + CARRY, count);
    return *any ? nib_run_progress(r->scan->run, name, r->scan->reader ? 0 : count) : NIB_OK;
}

static void fail_reader(struct reader *r)
{
    pthread_mutex_lock(&r->mutex);
    r->failed = true;
    pthread_cond_broadcast(&r->hashed);
    pthread_mutex_unlock(&r->mutex);
}

static nib_status read_as_thread(void *context, size_t item)
{
    struct reader *r = context;
    unsigned char *memory = chunk_memory(r);
    nib_status status = memory ? NIB_OK : no_memory();
    size_t next = r->scan->first[r->file];
    bool any = true;
    (void)item;
    while (!status && any && !atomic_load(&r->scan->run->stop))
        status = read_chunk(r, memory, &next, &any);
    nib_free(memory);
    if (status)
        fail_reader(r);
    return status;
}

static void end_reader(struct reader *r)
{
    nib_os_close(r->fd);
    XXH3_freeState(r->hash);
    pthread_cond_destroy(&r->hashed);
    pthread_mutex_destroy(&r->mutex);
}

static nib_status start_reader(struct nib_scan *s, size_t f, struct reader *r)
{
    const struct nib_ck_file *file = &s->run->plan->in->files[f];
    *r = (struct reader){ .scan = s, .file = f, .path = file->path, .fd = -1 };
    if (pthread_mutex_init(&r->mutex, NULL))
        return no_memory();
    if (pthread_cond_init(&r->hashed, NULL)) {
        pthread_mutex_destroy(&r->mutex);
        return no_memory();
    }
    r->hash = XXH3_createState();
    nib_status status = r->hash ? nib_os_open_read(r->path, &r->fd, &r->bytes) : no_memory();
    if (!status && r->bytes != file->bytes)
        status = nib_fail(NIB_ERR_IO, "%s: it has %llu bytes, and had %llu when it was opened", r->path,
                          (unsigned long long)r->bytes, (unsigned long long)file->bytes);
    if (status)
        end_reader(r);
    else
        XXH3_128bits_reset(r->hash);
    return status;
}

static void note_hash(const struct reader *r)
{
    const XXH128_hash_t hash = XXH3_128bits_digest(r->hash);
    r->scan->run->hashes[r->file].high = hash.high64;
    r->scan->run->hashes[r->file].low = hash.low64;
}

/* With the threads that other files leave. */
static nib_status scan_file(struct nib_scan *s, size_t f)
{
    struct reader r;
    TRY(start_reader(s, f, &r));
    const size_t files = files_of_rank(s->run), chunks = (size_t)nib_ceil_div((int64_t)r.bytes, CHUNK);
    const size_t share = (size_t)s->run->threads / files, threads = share < chunks ? share : chunks;
    const nib_status status = nib_run_parallel(s->run, threads > 1 ? threads : 1, read_as_thread, &r);
    if (!status)
        note_hash(&r);
    end_reader(&r);
    return status;
}

/* ---- What a file gave, on disk ---- */

static char *note_path(const struct nib_run *run, size_t f)
{
    char name[48];
    snprintf(name, sizeof name, "scan-%05zu.json", f);
    return nib_staging_path(run->partial, name);
}

static json_t *make_note(const struct nib_scan *s, size_t f)
{
    const struct nib_run *run = s->run;
    const struct nib_os_identity *identity = &run->identities[f];
    char hash[40];
    snprintf(hash, sizeof hash, "%016llx%016llx", (unsigned long long)run->hashes[f].high,
             (unsigned long long)run->hashes[f].low);
    json_t *largest = json_array();
    for (size_t i = s->first[f]; i < s->first[f + 1] && largest; i++)
        if (json_array_append_new(largest, json_integer(s->regions[i].largest)))
            break;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:s, s:o}", "bytes", (json_int_t)identity->bytes, "device",
                     (json_int_t)identity->device, "inode", (json_int_t)identity->inode, "seconds",
                     (json_int_t)identity->seconds, "nanoseconds", (json_int_t)identity->nanoseconds, "xxh3", hash,
                     "largest", largest);
}

static nib_status write_note(const struct nib_scan *s, size_t f)
{
    json_t *note = make_note(s, f);
    char *path = note_path(s->run, f), *text = note ? json_dumps(note, JSON_COMPACT) : NULL;
    nib_status status = path && text ? nib_staging_write(path, text, strlen(text)) : no_memory();
    if (!status)
        status = nib_os_sync_directory(s->run->partial); /* before a file that has the hash */
    free(text);
    nib_free(path);
    json_decref(note);
    return status;
}

static bool same_integer(const json_t *note, const char *key, int64_t value)
{
    const json_t *noted = json_object_get(note, key);
    return json_is_integer(noted) && json_integer_value(noted) == value;
}

/* Take over what an earlier run found, if the file is the same. A note of a file that has changed counts all the same,
 * once: its hash says whether the data has. */
static bool take_note(struct nib_scan *s, size_t f, const json_t *note, struct nib_hash *hash, bool *same)
{
    const struct nib_os_identity *identity = &s->run->identities[f];
    const json_t *largest = json_object_get(note, "largest");
    const char *text = json_string_value(json_object_get(note, "xxh3"));
    unsigned long long high, low;
    if (!text || strlen(text) != 32 || sscanf(text, "%16llx%16llx", &high, &low) != 2 ||
        json_array_size(largest) != s->first[f + 1] - s->first[f])
        return false;
    hash->high = high;
    hash->low = low;
    *same = same_integer(note, "bytes", (int64_t)identity->bytes) &&
            same_integer(note, "device", (int64_t)identity->device) &&
            same_integer(note, "inode", (int64_t)identity->inode) && same_integer(note, "seconds", identity->seconds) &&
            same_integer(note, "nanoseconds", identity->nanoseconds);
    for (size_t i = 0; i < json_array_size(largest) && *same; i++) {
        const json_t *number = json_array_get(largest, i);
        if (!json_is_integer(number) || json_integer_value(number) < 0 || json_integer_value(number) > INT32_MAX)
            return false;
        s->regions[s->first[f] + i].largest = (uint32_t)json_integer_value(number);
    }
    return true;
}

static nib_status scan_or_recall(void *context, size_t item)
{
    struct nib_scan *s = context;
    struct nib_run *run = s->run;
    const int ranks = run->job.comm ? run->job.comm->size : 1, rank = run->job.comm ? run->job.comm->rank : 0;
    const size_t f = item * (size_t)ranks + (size_t)rank;
    char *path = note_path(run, f), *text = NULL;
    size_t bytes;
    bool noted = false, same = false;
    struct nib_hash before;
    if (!path)
        return no_memory();
    if (run->options.resume && nib_os_is_own_file(path) && !nib_ck_read_text(path, 64 << 20, &text, &bytes)) {
        json_t *note = json_loadb(text, bytes, 0, NULL);
        noted = note && take_note(s, f, note, &before, &same);
        json_decref(note);
    }
    nib_free(text);
    nib_free(path);
    if (noted && same) {
        run->hashes[f] = before;
        return nib_run_progress(run, NULL, run->plan->in->files[f].bytes);
    }
    for (size_t i = s->first[f]; i < s->first[f + 1]; i++)
        s->regions[i].largest = 0;
    TRY(scan_file(s, f));
    if (noted && memcmp(&before, &run->hashes[f], sizeof before) != 0)
        return nib_fail(NIB_ERR_MODE,
                        "%s: it has changed since the run that was stopped: --force starts over instead of resuming",
                        run->plan->in->files[f].path);
    return write_note(s, f);
}

/* ---- What it comes to ---- */

/* The place of the first value of a weight that is not finite, for the message. */
static nib_status report_nonfinite(const struct nib_scan *s, const struct region *region, size_t others)
{
    const struct nib_run *run = s->run;
    const nib_plan *plan = run->plan;
    char more[80] = "", what[80] = "a NaN or an infinity";
    if (others)
        snprintf(more, sizeof more, "; %zu more weights have some", others);
    /* The region may hold two parts of an expert: the weight that it is in is looked for. */
    for (size_t i = region->weight; i < plan->n_weights; i++) {
        const struct nib_ck_weight *w = &plan->weights[i].source;
        if (w->tensor[NIB_ROLE_DATA] != plan->weights[region->weight].source.tensor[NIB_ROLE_DATA])
            break;
        const int64_t rows = nib_ck_rows_for(plan->in, w, NIB_F32, run->memory / 2);
        float *values = nib_alloc((size_t)(rows * w->cols) * sizeof *values);
        if (!values)
            return no_memory();
        for (int64_t row = 0; row < w->rows; row += rows) {
            const int64_t n = nib_min(rows, w->rows - row);
            const nib_status status = nib_ck_read_rows(plan->in, w, row, n, NIB_F32, values);
            for (int64_t j = 0; j < n * w->cols && !status; j++) {
                if ((nib_bits(values[j]) & 0x7F800000u) != 0x7F800000u)
                    continue;
                snprintf(what, sizeof what, "%s", nib_is_nan(values[j]) ? "a NaN" : "an infinity");
                nib_free(values);
                return nib_fail(
                    NIB_ERR_DATA,
                    "%s: weight %s: element [%lld, %lld] is %s, which NVFP4 cannot hold: mend the model, or "
                    "leave the weight out with --ignore%s",
                    plan->in->path, nib_quote(w->name).text, (long long)(row + j / w->cols), (long long)(j % w->cols),
                    what, more);
            }
            if (status) {
                nib_free(values);
                return status;
            }
        }
        nib_free(values);
    }
    return nib_fail(NIB_ERR_DATA, "%s: weight %s: it holds %s%s", plan->in->path,
                    nib_quote(plan->weights[region->weight].source.name).text, what, more);
}

static nib_status combine(struct nib_scan *s)
{
    while (s->counted < s->n_regions)
        count_region(s, &s->regions[s->counted++]);
    return s->bad ? report_nonfinite(s, s->bad, s->others) : NIB_OK;
}

/* Files of rank r are r, r + size, ...: their hashes come side by side. */
static nib_status share_hashes(struct nib_run *run)
{
    const nib_comm *comm = run->job.comm;
    const size_t n = run->plan->in->n_files, size = (size_t)comm->size, one = sizeof *run->hashes;
    size_t *counts = nib_alloc(size * sizeof *counts), mine = 0, at = 0;
    struct nib_hash *all = nib_alloc((n + 1) * one), *own = nib_alloc((n + 1) * one);
    nib_status status = counts && all && own ? NIB_OK : no_memory();
    status = nib_agree(comm, status, n);
    if (!status) {
        for (size_t r = 0; r < size; r++)
            counts[r] = (n > r ? (n - r + size - 1) / size : 0) * one;
        for (size_t f = (size_t)comm->rank; f < n; f += size)
            own[mine++] = run->hashes[f];
        if (comm->allgather(comm->context, own, all, counts))
            status = nib_fail(NIB_ERR_COMM, "gathering the hashes of the input failed");
        for (size_t r = 0; r < size && !status; r++)
            for (size_t f = r; f < n; f += size)
                run->hashes[f] = all[at++];
    }
    nib_free(counts);
    nib_free(all);
    nib_free(own);
    return status;
}

static nib_status share(struct nib_run *run)
{
    const nib_comm *comm = run->job.comm;
    if (!comm)
        return NIB_OK;
    TRY(share_hashes(run));
    if (run->plan->n_groups && comm->allreduce_max_f32(comm->context, run->amaxes, run->plan->n_groups))
        return nib_fail(NIB_ERR_COMM, "the reduction of amaxes over %d ranks failed", comm->size);
    return NIB_OK;
}

nib_status nib_run_check_sources(const struct nib_run *run)
{
    for (size_t f = 0; f < run->plan->in->n_files; f++) {
        struct nib_os_identity now;
        TRY(nib_os_identity(run->plan->in->files[f].path, &now));
        if (memcmp(&now, &run->identities[f], sizeof now) != 0)
            return nib_fail(NIB_ERR_IO, "%s: it was changed while it was being read: start again with --force",
                            run->plan->in->files[f].path);
    }
    return NIB_OK;
}

nib_status nib_run_scan(struct nib_run *run)
{
    const nib_checkpoint *in = run->plan->in;
    const size_t ranks = run->job.comm ? (size_t)run->job.comm->size : 1,
                 rank = run->job.comm ? (size_t)run->job.comm->rank : 0;
    struct nib_scan s = { .run = run };
    uint64_t total = 0;
    for (size_t f = rank; f < in->n_files; f += ranks)
        total += in->files[f].bytes;
    nib_run_begin_phase(run, "reading", total);
    nib_status status = find_regions(&s);
    if (!status)
        status = nib_run_parallel(run, files_of_rank(run), scan_or_recall, &s);
    if (!status)
        status = combine(&s);
    status = nib_agree(run->job.comm, status, in->n_files);
    if (!status)
        status = share(run);
    nib_free(s.regions);
    nib_free(s.first);
    return status;
}

/* ---- Along with the writing ---- */

/* With several files the first would have to wait for the hashes of all, which are in its header: one that is finished
 * early is what a resumed run has. GPTQ has an order of its own. */
bool nib_scan_goes_along(const struct nib_run *run)
{
    return !run->job.comm && !run->plan->hessians && !run->options.resume && run->plan->in->n_files == 1 &&
           run->plan->n_files == 1;
}

nib_status nib_scan_open(struct nib_run *run, struct nib_scan **out)
{
    struct nib_scan *s = nib_alloc_zeroed(sizeof *s);
    *out = s;
    if (!s)
        return no_memory();
    s->run = run;
    s->groups = nib_alloc_zeroed((run->plan->n_groups + 1) * sizeof *s->groups);
    TRY(s->groups ? find_regions(s) : no_memory());
    uint64_t end = 0; /* of a stack that is read as weights all regions count at its end */
    for (size_t i = 0; i < s->n_regions; i++) {
        struct group *group = &s->groups[s->regions[i].group];
        end = s->regions[i].end > end ? s->regions[i].end : end;
        group->end = end;
        group->left++;
    }
    struct reader *reader = nib_alloc(sizeof *reader);
    const nib_status status = reader ? start_reader(s, 0, reader) : no_memory();
    if (status)
        nib_free(reader);
    else
        s->reader = reader;
    return status;
}

nib_status nib_scan_end_of(const struct nib_scan *s, uint32_t group, uint32_t tensor, uint64_t *end)
{
    if (group != NIB_NONE) {
        *end = s->groups[group].end;
        return NIB_OK;
    }
    TRY(tensor_begin(s->run->plan->in, tensor, end));
    *end += s->run->plan->in->tensors[tensor].bytes;
    return NIB_OK;
}

uint64_t nib_scan_passed(const struct nib_scan *s) { return atomic_load(&s->passed); }

nib_status nib_scan_read(struct nib_scan *s, struct nib_scan_hand *hand, bool *any)
{
    struct reader *r = s->reader;
    if (!hand->memory)
        hand->memory = chunk_memory(r);
    TRY(hand->memory ? read_chunk(r, hand->memory, &hand->next, any) : no_memory());
    pthread_mutex_lock(&r->mutex);
    while (!*any && r->done < r->taken && !r->failed)
        pthread_cond_wait(&r->hashed, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
    return NIB_OK;
}

void nib_scan_give_up(struct nib_scan *s) { fail_reader(s->reader); }

nib_status nib_scan_finish(struct nib_scan *s)
{
    TRY(combine(s));
    note_hash(s->reader);
    return write_note(s, 0);
}

void nib_scan_close(struct nib_scan *s)
{
    if (s && s->reader)
        end_reader(s->reader);
    if (s) {
        nib_free(s->reader);
        nib_free(s->groups);
        nib_free(s->regions);
        nib_free(s->first);
    }
    nib_free(s);
}
