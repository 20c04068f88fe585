/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A caller of version 0.2, compiled with its headers (0.2/): every struct with `bytes` through the calls that take it.
 * Each ends where its page ends, so that a later library which reads or writes as many bytes as it knows crashes.
 */
#include "test.h"

#include <unistd.h>

#define GUARDED(type) ((type *)test_guarded(sizeof(type), true))

enum { ROWS = 32, COLS = 64 };

static float values[ROWS * COLS], results[ROWS * COLS];

/* Values that NVFP4 keeps as they are: every block has a 6, and the rest is what a code can be. */
static nib_array exact_values(void)
{
    static const float codes[] = { 6, 4, 3, 2, 1.5f, 1, 0.5f, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6, 6 };
    nib_array x;
    for (int i = 0; i < ROWS * COLS; i++)
        values[i] = codes[(i + i / COLS) % 16];
    CHECK_OK(nib_array_init(&x, values, NIB_F32, 2, (const int64_t[]){ ROWS, COLS }));
    return x;
}

static void check_values(const nib_tensor *t)
{
    nib_array out;
    memset(results, 0xEE, sizeof results);
    CHECK_OK(nib_array_init(&out, results, NIB_F32, 2, (const int64_t[]){ ROWS, COLS }));
    CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &out));
    for (int i = 0; i < ROWS * COLS; i++)
        CHECK(results[i] == values[i]);
}

/* 16x16 blocks: their columnwise usage can be built from the rowwise one. */
static nib_quantizer *new_quantizer(void)
{
    nib_quantizer *q = GUARDED(nib_quantizer);
    nib_quantizer_init(q);
    CHECK(q->bytes == sizeof *q && q->amax_epsilon == 0);
    q->block_dims[0] = 16;
    return q;
}

static nib_tensor *new_tensor(const nib_quantizer *q)
{
    const nib_array x = exact_values();
    nib_tensor *t = NULL;
    CHECK_OK(nib_quantize(q, &x, NULL, &t));
    return t;
}

TEST(quantizer)
{
    nib_quantizer *q = new_quantizer(), *other = GUARDED(nib_quantizer);
    const nib_array x = exact_values();
    const int64_t shape[] = { ROWS, COLS };
    CHECK_OK(nib_quantizer_check(q, &x));
    *other = *q;
    CHECK(nib_quantizer_equal(q, other) && nib_quantizer_hash(q) == nib_quantizer_hash(other));
    other->amax_epsilon = 1;
    CHECK(!nib_quantizer_equal(q, other));
    CHECK(nib_is_quantizable(q, 2, shape) && nib_is_requantization_safe(q));
    CHECK_OK(nib_quantizer_init_format(other, NIB_MXFP8));
    CHECK_OK(nib_quantizer_set_usage(other, 1, 0));
    CHECK(other->bytes == sizeof *other && other->rowwise && !other->columnwise && other->block_dims[1] == 32);

    int rank;
    int64_t part[NIB_MAX_RANK];
    CHECK_OK(nib_part_shape(q, NIB_ROW_SCALE, 2, shape, &rank, part));
    CHECK(rank == 2 && part[0] == 128 && part[1] == 4);
    CHECK_OK(nib_part_valid_shape(q, NIB_ROW_SCALE, 2, shape, &rank, part));
    CHECK(rank == 2 && part[0] == ROWS && part[1] == COLS / 16);
}

TEST(tensors)
{
    nib_quantizer *q = new_quantizer();
    const nib_array x = exact_values();
    nib_tensor *t = new_tensor(q), *made = NULL, *over = NULL;
    int equal = 0;
    check_values(t);
    CHECK_OK(nib_tensor_create(q, NIB_F32, 2, x.shape, NULL, &made));
    CHECK_OK(nib_quantize_into(q, &x, NULL, NULL, made));
    CHECK_OK(nib_tensor_equal(t, made, &equal));
    CHECK(equal);
    nib_buffer *parts[NIB_PART_COUNT];
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = nib_tensor_buffer(t, (nib_part)part);
    CHECK_OK(nib_tensor_from_buffers(q, NIB_F32, 2, x.shape, parts, NIB_PART_COUNT, &over));
    CHECK_OK(nib_tensor_equal(t, over, &equal));
    CHECK(equal);
    CHECK_OK(nib_tensor_set_quantizer(t, q));
    nib_tensor_destroy(t);
    nib_tensor_destroy(made);
    nib_tensor_destroy(over);
}

TEST(metadata)
{
    nib_tensor *t = new_tensor(new_quantizer());
    nib_metadata *m = GUARDED(nib_metadata);
    m->bytes = sizeof *m;
    CHECK_OK(nib_tensor_get_metadata(t, m));
    CHECK(m->bytes == sizeof *m && m->format == NIB_NVFP4 && m->dtype == NIB_F32 && m->element == NIB_E2M1);
    CHECK(m->rank == 2 && m->shape[0] == ROWS && m->shape[1] == COLS && m->rows == ROWS && m->cols == COLS);
    CHECK(m->tensor_scale == NIB_TENSOR_SCALE_AMAX && m->rowwise && m->columnwise && m->columnwise_valid);
    CHECK(m->quantizer->bytes >= sizeof *m->quantizer && m->quantizer->block_dims[0] == 16);
    nib_tensor_destroy(t);
}

TEST(overrides)
{
    static const float amax = 6, scale = 2;
    float seen = 0;
    const nib_array x = exact_values();
    nib_overrides *overrides = GUARDED(nib_overrides);
    nib_tensor *t = NULL;
    overrides->bytes = sizeof *overrides;
    overrides->amax[0] = &amax;
    overrides->amax_seen = &seen;
    CHECK_OK(nib_quantize(new_quantizer(), &x, overrides, &t));
    check_values(t);
    CHECK(seen == 6);
    nib_tensor_destroy(t);

    nib_quantizer *q = GUARDED(nib_quantizer);
    CHECK_OK(nib_quantizer_init_format(q, NIB_FLOAT8));
    *overrides = (nib_overrides){ .bytes = sizeof *overrides, .scale = &scale };
    CHECK_OK(nib_quantize(q, &x, overrides, &t));
    CHECK(*(const float *)nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE)) == 0.5f);
    check_values(t);
    nib_tensor_destroy(t);

    float importance[COLS];
    for (int i = 0; i < COLS; i++)
        importance[i] = 2;
    CHECK_OK(nib_importance_normalize(importance, COLS, importance));
    nib_quantizer_init(q);
    q->columnwise = 0;
    q->scale_rule = NIB_SCALE_SWEEP;
    *overrides = (nib_overrides){ .bytes = sizeof *overrides, .importance = importance, .importance_count = COLS };
    CHECK_OK(nib_quantize(q, &x, overrides, &t));
    check_values(t);
    nib_tensor_destroy(t);
}

/* ---- Ranks ---- */

struct calls {
    int reductions, agreements, gathers;
};

/* Two ranks of which the other has what this one has, 12 where it reduces. */
static nib_status reduce(void *context, float *numbers, size_t n)
{
    for (size_t i = 0; i < n; i++)
        numbers[i] = numbers[i] > 12 ? numbers[i] : 12;
    ((struct calls *)context)->reductions++;
    return NIB_OK;
}

static nib_status agree(void *context, nib_status status, uint64_t key)
{
    (void)key;
    ((struct calls *)context)->agreements++;
    return status;
}

static nib_status gather(void *context, const void *mine, void *all, const size_t *counts)
{
    memcpy(all, mine, counts[0]);
    memcpy((char *)all + counts[0], mine, counts[1]);
    ((struct calls *)context)->gathers++;
    return NIB_OK;
}

static nib_status barrier(void *context)
{
    (void)context;
    return NIB_OK;
}

static nib_comm *new_comm(struct calls *calls)
{
    nib_comm *comm = GUARDED(nib_comm);
    *comm = (nib_comm){ sizeof *comm, calls, 0, 2, reduce, agree, gather, barrier };
    return comm;
}

TEST(communicators)
{
    struct calls calls = { 0, 0, 0 };
    nib_quantizer *q = new_quantizer();
    q->amax_comm = new_comm(&calls);
    nib_tensor *t = new_tensor(q), *both = NULL, *none = NULL;
    CHECK(calls.reductions == 1 && calls.agreements == 1);
    CHECK(*(const float *)nib_buffer_data(nib_tensor_buffer(t, NIB_ROW_TENSOR_SCALE)) == 12);
    check_values(t);
    CHECK_FAILS(nib_quantize(q, NULL, NULL, &none), NIB_ERR_ARG, "x is NULL");
    CHECK(calls.agreements == 2);
    CHECK_OK(nib_all_gather_tensor(t, q->amax_comm, &both));
    CHECK(calls.gathers > 0);
    nib_metadata m = { .bytes = sizeof m };
    CHECK_OK(nib_tensor_get_metadata(both, &m));
    CHECK(m.rows == 2 * ROWS);
    nib_tensor_destroy(t);
    nib_tensor_destroy(both);

    nib_comm *ranks[2];
    CHECK(nib_comm_serial()->size == 1);
    CHECK_OK(nib_comm_threads_create(2, ranks));
    CHECK(ranks[0]->bytes >= sizeof(nib_comm) && ranks[1]->rank == 1 && ranks[1]->size == 2 && ranks[1]->barrier);
    nib_comm_threads_destroy(ranks[0]);
}

TEST(master_weights)
{
    struct calls calls = { 0, 0, 0 };
    nib_array master = exact_values();
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_create(new_quantizer(), NIB_F32, 2, master.shape, NULL, &t));
    master.rank = 1, master.shape[0] = ROWS * COLS, master.strides[0] = 1;
    const nib_array *masters[] = { &master };
    const int64_t starts[] = { 0 };
    nib_master_options *options = GUARDED(nib_master_options);
    options->bytes = sizeof *options;
    options->manual_post_all_gather = 1;
    nib_comm *comm = new_comm(&calls);
    CHECK_OK(nib_quantize_master_weights(&t, 1, masters, 1, starts, 1, comm, options));
    CHECK(calls.reductions == 1);
    nib_metadata m = { .bytes = sizeof m };
    CHECK_OK(nib_tensor_get_metadata(t, &m));
    CHECK(m.columnwise && !m.columnwise_valid);
    CHECK_OK(nib_quantize_master_weights(&t, 1, masters, 1, starts, 1, nib_comm_serial(), NULL));
    CHECK_OK(nib_post_all_gather_processing(&t, 1));
    check_values(t);
    nib_tensor_destroy(t);
}

TEST(fsdp)
{
    nib_tensor *t = new_tensor(new_quantizer()), *whole = NULL;
    nib_fsdp_parts *parts = GUARDED(nib_fsdp_parts);
    int equal = 0;
    parts->bytes = sizeof *parts;
    CHECK_OK(nib_fsdp_extract(t, parts));
    CHECK(parts->bytes == sizeof *parts && parts->data.shape[0] == ROWS && parts->tensor_scale == 6);
    CHECK_OK(nib_fsdp_assign(t, parts, ROWS, &whole));
    CHECK_OK(nib_tensor_equal(t, whole, &equal));
    CHECK(equal);
    nib_tensor_destroy(t);
    nib_tensor_destroy(whole);
}

TEST(groups)
{
    const nib_array x = exact_values();
    const int64_t counts[] = { 16, 16 };
    nib_quantizer *q = new_quantizer();
    nib_tensor *t[2] = { NULL, NULL }, *member = NULL;
    nib_group *group = NULL;
    struct calls calls = { 0, 0, 0 };
    int equal = 0;
    CHECK_OK(nib_split_quantize(q, &x, counts, 2, t));
    CHECK_OK(nib_group_create(q, NIB_F32, counts, 2, COLS, &group));
    CHECK_OK(nib_group_quantize(group, &x, NULL));
    CHECK_OK(nib_group_member(group, 1, &member));
    CHECK_OK(nib_tensor_equal(t[1], member, &equal));
    CHECK(equal);
    CHECK_OK(nib_group_quantize(group, &x, new_comm(&calls)));
    CHECK(calls.reductions == 1);
    float rowwise[2];
    CHECK_OK(nib_group_amax(q, &x, counts, 2, (float *const[]){ rowwise, NULL }));
    CHECK(rowwise[0] == 6 && rowwise[1] == 6);
    nib_tensor_destroy(t[0]);
    nib_tensor_destroy(t[1]);
    nib_tensor_destroy(member);
    nib_group_destroy(group);
}

TEST(conversion_report)
{
    nib_quantizer *q = GUARDED(nib_quantizer);
    CHECK_OK(nib_quantizer_init_format(q, NIB_MXFP4));
    nib_tensor *t = new_tensor(q), *converted = NULL;
    nib_conversion_report *report = GUARDED(nib_conversion_report);
    report->bytes = sizeof *report;
    CHECK_OK(nib_mxfp4_to_nvfp4(t, report, &converted));
    CHECK(report->bytes == sizeof *report && report->blocks == ROWS * COLS / 32 && report->inexact == 0);
    CHECK(report->first[15].line == 0 && report->first[15].block == 0);
    check_values(converted);
    nib_tensor_destroy(t);
    nib_tensor_destroy(converted);
}

TEST(files)
{
    char path[] = "/tmp/nib-abi-XXXXXX";
    const int fd = mkstemp(path);
    nib_tensor *t = new_tensor(new_quantizer()), *read = NULL;
    nib_writer *writer = NULL;
    nib_file *file = NULL;
    nib_entry entry;
    int equal = 0;
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_declare_tensor(writer, "t", t));
    CHECK_OK(nib_writer_write_tensor(writer, "t", t));
    CHECK_OK(nib_writer_commit(writer));
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_entry(file, 0, &entry));
    CHECK(entry.rank >= 1);
    CHECK_OK(nib_file_read_tensor(file, "t", NULL, &read));
    CHECK_OK(nib_tensor_equal(t, read, &equal));
    CHECK(equal);
    nib_file_close(file);
    nib_writer_destroy(writer);
    nib_tensor_destroy(t);
    nib_tensor_destroy(read);
    close(fd);
    unlink(path);
}

TEST_MAIN
