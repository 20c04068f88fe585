/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_groups.c - the rows of one array as many tensors: each as quantized alone, in buffers of its own or in shared
 * ones.
 *
 * Built with NIB_TEST_WRAP_ALLOC, so that every allocation can be made to fail.
 */
#define _GNU_SOURCE
#include "team.h"

#include "shard_cases.h"
#include "test_alloc.h"

enum { MEMBERS = 5, MOST_ROWS = 160 };

struct group_case {
    nib_quantizer q;
    nib_dtype dtype;
    int64_t rows[MEMBERS], total, cols;
    void *values;
    nib_array x;
};

static void make_case(struct group_case *c, int kind)
{
    static const int64_t widths[] = { 16, 48, 80, 272, 33 };
    *c = (struct group_case){ .dtype = kind % 2 ? NIB_F32 : NIB_BF16, .cols = widths[test_below(5)] };
    CHECK_OK(nib_quantizer_init_format(&c->q, kind < 7 ? NIB_NVFP4 : (nib_format)(kind - 6)));
    if (kind == 1)
        c->q.block_dims[0] = 16;
    if (kind == 2)
        c->q.rht = 1;
    if (kind == 3)
        c->q.row_scaled = 1;
    if (kind == 4)
        c->q.swizzled = 1;
    if (kind == 5)
        c->q.rounding = NIB_ROUND_STOCHASTIC_8, c->q.seed = test_random(), c->q.origin[0] = 64;
    if (kind == 6)
        c->q.columnwise = 0;
    for (int i = 0; i < MEMBERS; i++) { /* none, few, or many rows */
        c->rows[i] = i == 2 ? 0 : test_below(4) ? test_below(40) : test_below(MOST_ROWS);
        if (kind == 2)
            c->rows[i] -= c->rows[i] % 16;
        c->total += c->rows[i];
    }
    const size_t n = (size_t)(c->total * c->cols);
    float *x = malloc(n * sizeof *x + 4);
    c->values = malloc(n * 4 + 4);
    for (size_t i = 0; i < n; i++)
        x[i] = test_normal();
    CHECK_OK(nib_encode(c->dtype, x, n, c->values));
    CHECK_OK(nib_array_init(&c->x, c->values, c->dtype, 2, SHAPE(c->total, c->cols)));
    free(x);
}

/* Member i, quantized alone. */
static nib_tensor *alone(const struct group_case *c, int i)
{
    nib_quantizer q = c->q;
    nib_tensor *t = NULL;
    nib_array rows;
    int64_t first = 0;
    for (int k = 0; k < i; k++)
        first += c->rows[k];
    q.origin[0] = q.origin[1] = 0;
    const size_t size = (size_t)nib_dtype_bits(c->dtype) / 8;
    CHECK_OK(nib_array_init(&rows, (char *)c->values + (size_t)(first * c->cols) * size, c->dtype, 2,
                            SHAPE(c->rows[i], c->cols)));
    CHECK_OK(nib_quantize(&q, &rows, NULL, &t));
    return t;
}

static void check_same(const nib_tensor *a, const nib_tensor *b)
{
    int equal = 0;
    CHECK_OK(nib_tensor_equal(a, b, &equal));
    CHECK(equal);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        CHECK_THAT(case_same_part(a, b, (nib_part)part), "part %d differs", part);
}

TEST(split_quantize)
{
    for (int round = 0; round < 66; round++) {
        struct group_case c;
        nib_tensor *t[MEMBERS] = { NULL };
        make_case(&c, round % 11);
        CHECK_OK(nib_split_quantize(&c.q, &c.x, c.rows, MEMBERS, t));
        for (int i = 0; i < MEMBERS; i++) {
            nib_tensor *one = alone(&c, i);
            check_same(t[i], one);
            nib_tensor_destroy(one), nib_tensor_destroy(t[i]);
        }
        free(c.values);
    }
}

TEST(grouped_buffers)
{
    for (int round = 0; round < 44; round++) {
        struct group_case c;
        nib_group *group = NULL;
        make_case(&c, round % 11);
        CHECK_OK(nib_group_create(&c.q, c.dtype, c.rows, MEMBERS, c.cols, &group));
        CHECK(nib_group_count(group) == MEMBERS && nib_group_count(NULL) == 0);
        nib_tensor *views[MEMBERS] = { NULL };
        for (int i = 0; i < MEMBERS; i++) /* taken before: a member is a view */
            CHECK_OK(nib_group_member(group, (size_t)i, &views[i]));
        CHECK_OK(nib_group_quantize(group, &c.x, NULL));
        int64_t rows = 0;
        for (int i = 0; i < MEMBERS; i++) {
            nib_tensor *one = alone(&c, i);
            check_same(views[i], one);
            nib_tensor_destroy(one);
            for (int part = 0; part < NIB_PART_COUNT; part++) {
                int64_t offset = -1;
                const nib_buffer *whole = nib_group_buffer(group, (nib_part)part);
                CHECK((whole != NULL) == (nib_tensor_buffer(views[i], (nib_part)part) != NULL));
                if (!whole)
                    continue;
                CHECK_OK(nib_group_offset(group, (nib_part)part, (size_t)i, &offset));
                CHECK((char *)nib_buffer_data(whole) + offset == case_part(views[i], (nib_part)part));
                CHECK(offset + (int64_t)nib_buffer_bytes(nib_tensor_buffer(views[i], (nib_part)part)) <=
                      (int64_t)nib_buffer_bytes(whole));
                if (part == NIB_ROW_DATA && c.q.format == NIB_NVFP4) /* whole 128 rows before it */
                    CHECK(offset == rows * ((c.cols + 1) / 2));
                if (part == NIB_ROW_TENSOR_SCALE && c.q.format == NIB_NVFP4 && !c.q.row_scaled)
                    CHECK(offset == i * (int64_t)sizeof(float));
            }
            rows += (c.rows[i] + 127) / 128 * 128;
        }
        nib_group_destroy(group);
        for (int i = 0; i < MEMBERS; i++) { /* members outlive the group */
            nib_tensor *one = alone(&c, i);
            check_same(views[i], one);
            nib_tensor_destroy(one), nib_tensor_destroy(views[i]);
        }
        free(c.values);
    }
}

/* Of the first n members as well: one is not looked at twice. */
TEST(group_amax)
{
    for (int kind = 0; kind < 3; kind++) {
        struct group_case c;
        float expected[2][MEMBERS], row[MEMBERS], col[MEMBERS], col_alone[MEMBERS];
        make_case(&c, kind);
        for (int i = 0; i < MEMBERS; i++) {
            nib_tensor *one = alone(&c, i);
            expected[0][i] = *(float *)case_part(one, NIB_ROW_TENSOR_SCALE);
            expected[1][i] = *(float *)case_part(one, NIB_COL_TENSOR_SCALE);
            nib_tensor_destroy(one);
        }
        nib_array x = c.x;
        x.shape[0] = 0;
        for (int n = 1; n <= MEMBERS; n++) {
            x.shape[0] += c.rows[n - 1];
            CHECK_OK(nib_group_amax(&c.q, &x, c.rows, (size_t)n, (float *const[2]){ row, col }));
            CHECK_OK(nib_group_amax(&c.q, &x, c.rows, (size_t)n, (float *const[2]){ NULL, col_alone }));
            for (int i = 0; i < n; i++)
                CHECK_THAT(row[i] == expected[0][i] && col[i] == expected[1][i] && col_alone[i] == col[i],
                           "kind %d, member %d of %d", kind, i, n);
        }
        CHECK_FAILS(nib_group_amax(&c.q, &c.x, c.rows, MEMBERS, NULL), NIB_ERR_ARG, "amax is NULL");
        free(c.values);
    }
}

/* ---- Amaxes over ranks ---- */

static int split_over_ranks(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0;
    const struct group_case *c = context;
    float values[64 * 16];
    nib_array x;
    nib_tensor *t[3] = { NULL }, *views[3] = { NULL };
    nib_group *group = NULL;
    nib_quantizer q = c->q;
    for (int i = 0; i < 64 * 16; i++)
        values[i] = (float)((i * 37 + comm->rank * 101) % 211) - 100;
    CASE_OK(nib_array_init(&x, values, NIB_F32, 2, SHAPE(64, 16)));
    const int64_t rows[3] = { 16, 0, 48 };
    q.amax_comm = comm;
    CASE_OK(nib_split_quantize(&q, &x, rows, 3, t));
    CASE_OK(nib_group_create(&q, NIB_F32, rows, 3, 16, &group));
    CASE_OK(nib_group_quantize(group, &x, comm));
    int64_t first = 0;
    for (int i = 0; i < 3; first += rows[i++]) {
        nib_array part;
        nib_tensor *one = NULL;
        int equal = 0;
        CASE_OK(nib_array_init(&part, values + first * 16, NIB_F32, 2, SHAPE(rows[i], 16)));
        CASE_OK(nib_quantize(&q, &part, NULL, &one)); /* reduces as well */
        CASE_OK(nib_tensor_equal(one, t[i], &equal));
        CASE_CHECK(equal, "member %d", i);
        CASE_OK(nib_group_member(group, (size_t)i, &views[i]));
        CASE_OK(nib_tensor_equal(one, views[i], &equal));
        CASE_CHECK(equal, "member %d of the group", i);
        nib_tensor_destroy(one), nib_tensor_destroy(t[i]), nib_tensor_destroy(views[i]);
    }
    nib_group_destroy(group);
    /* One rank has other rows: all fail. */
    nib_tensor *none[3] = { NULL };
    const int64_t wrong[3] = { 16, 0, comm->rank ? 48 : 47 };
    CASE_CHECK(nib_split_quantize(&q, &x, wrong, 3, none) == NIB_ERR_SHAPE && !none[0], "%s", nib_last_error());
    /* Rows with amaxes of their own must be as many everywhere. */
    const int64_t other[3] = { 32, 0, 32 };
    if (q.row_scaled) {
        const nib_status wanted = comm->size > 1 ? NIB_ERR_MISMATCH : NIB_OK;
        CASE_CHECK(nib_split_quantize(&q, &x, comm->rank ? rows : other, 3, none) == wanted, "%s", nib_last_error());
        for (int i = 0; i < 3; i++)
            nib_tensor_destroy(none[i]);
    }
    /* And so must members. */
    const nib_status fewer = comm->size > 1 ? NIB_ERR_MISMATCH : NIB_OK;
    CASE_CHECK(nib_split_quantize(&q, &x, comm->rank ? rows : SHAPE(64), comm->rank ? 3 : 1, none) == fewer, "%s",
               nib_last_error());
    for (int i = 0; i < 3; i++)
        nib_tensor_destroy(fewer || i ? NULL : none[i]);
    /* A rank without a place for the result does not leave the others waiting. */
    nib_tensor *nowhere = NULL;
    nib_tensor **const last = comm->rank == comm->size - 1 ? NULL : &nowhere;
    CASE_CHECK(nib_split_quantize(&q, &x, SHAPE(64), 1, last) == NIB_ERR_ARG, "%s", nib_last_error());
    CASE_CHECK(nib_quantize(&q, &x, NULL, last) == NIB_ERR_ARG, "%s", nib_last_error());
    CASE_CHECK(nib_quantize_into(&q, &x, NULL, NULL, NULL) == NIB_ERR_ARG, "%s", nib_last_error());
    CASE_CHECK(nib_group_quantize(NULL, &x, comm) == NIB_ERR_ARG, "%s", nib_last_error());
    CASE_CHECK(!nowhere, "something was made");
    return faults;
}

TEST(one_reduction_for_a_group)
{
    for (int kind = 0; kind < 6; kind++)
        for (int size = 1; size <= 4; size++) {
            struct group_case c = { 0 };
            CHECK_OK(nib_quantizer_init_format(&c.q, kind == 5 ? NIB_FLOAT8 : NIB_NVFP4));
            c.q.rht = kind == 1;
            if (kind == 2)
                c.q.block_dims[0] = 16;
            c.q.rowwise = kind != 3;
            c.q.row_scaled = kind == 4;
            CHECK(team_run(size, split_over_ranks, &c) == 0);
        }
}

#ifdef NIB_TEST_WRAP_ALLOC
/* Whichever allocation fails, members keep what they had. */
TEST(a_group_is_quantized_whole_or_not_at_all)
{
    for (int row_scaled = 0; row_scaled < 2; row_scaled++) {
        nib_quantizer q;
        nib_group *group = NULL;
        float values[40 * 16];
        nib_array x;
        nib_status status = NIB_ERR_MEMORY;
        nib_quantizer_init(&q);
        q.row_scaled = (uint8_t)row_scaled;
        for (int i = 0; i < 40 * 16; i++)
            values[i] = test_normal();
        CHECK_OK(nib_array_init(&x, values, NIB_F32, 2, SHAPE(40, 16)));
        CHECK_OK(nib_group_create(&q, NIB_F32, SHAPE(16, 0, 24), 3, 16, &group));
        for (long left = 0; status; left++) {
            CHECK(left < 100);
            allocations_left = left;
            status = nib_group_quantize(group, &x, nib_comm_serial());
            allocations_left = -1;
            CHECK(status == NIB_OK || status == NIB_ERR_MEMORY);
            for (int part = 0; part < NIB_PART_COUNT && status; part++) {
                const uint8_t *bytes = nib_buffer_data(nib_group_buffer(group, (nib_part)part));
                for (size_t i = 0; i < nib_buffer_bytes(nib_group_buffer(group, (nib_part)part)); i++)
                    CHECK(bytes[i] == 0);
            }
        }
        CHECK(*(float *)nib_buffer_data(nib_group_buffer(group, NIB_ROW_TENSOR_SCALE)) > 0);
        nib_group_destroy(group);
    }
}
#endif

TEST(groups_refuse)
{
    nib_quantizer q;
    float values[32 * 16] = { 0 };
    nib_array x, flat;
    nib_tensor *t[2] = { NULL };
    nib_group *group = NULL;
    float amax[2];
    int64_t offset;
    nib_quantizer_init(&q);
    CHECK_OK(nib_array_init(&x, values, NIB_F32, 2, SHAPE(32, 16)));
    CHECK_OK(nib_array_init(&flat, values, NIB_F32, 1, SHAPE(32)));
    CHECK_FAILS(nib_split_quantize(&q, &x, SHAPE(16, 15), 2, t), NIB_ERR_SHAPE, "31 rows and x has 32");
    CHECK_FAILS(nib_split_quantize(&q, &x, SHAPE(33, -1), 2, t), NIB_ERR_SHAPE, "member 1 is -1");
    CHECK_FAILS(nib_split_quantize(&q, &flat, SHAPE(32), 1, t), NIB_ERR_SHAPE, "rank 2");
    CHECK_FAILS(nib_split_quantize(&q, &x, NULL, 2, t), NIB_ERR_ARG, "counts is NULL");
    CHECK_FAILS(nib_split_quantize(&q, &x, SHAPE(16, 16), 2, NULL), NIB_ERR_ARG, "out is NULL");
    q.rht = 1;
    CHECK_FAILS(nib_split_quantize(&q, &x, SHAPE(17, 15), 2, t), NIB_ERR_SHAPE, "17 rows");
    CHECK_FAILS(nib_group_amax(&q, &x, SHAPE(17, 15), 2, (float *const[2]){ amax, NULL }), NIB_ERR_SHAPE, "17 rows");
    float three[3] = { -1, -1, -1 }; /* stay, although the first could be had */
    CHECK_FAILS(nib_group_amax(&q, &x, SHAPE(16, 8, 8), 3, (float *const[2]){ three, NULL }), NIB_ERR_SHAPE, "8 rows");
    CHECK(three[0] == -1 && three[1] == -1 && three[2] == -1);
    q.rht = 0;
    q.row_scaled = 1;
    CHECK_FAILS(nib_group_amax(&q, &x, SHAPE(16, 16), 2, (float *const[2]){ amax, NULL }), NIB_ERR_MODE, "one amax");
    CHECK(!t[0] && !t[1]);
    q.row_scaled = 0;
    CHECK_FAILS(nib_group_create(&q, NIB_F32, SHAPE(-1), 1, 16, &group), NIB_ERR_SHAPE, "-1 rows");
    CHECK_FAILS(nib_group_create(&q, NIB_U8, SHAPE(1), 1, 16, &group), NIB_ERR_DTYPE, "U8");
    CHECK_FAILS(nib_group_create(&q, NIB_F32, NULL, 1, 16, &group), NIB_ERR_ARG, "rows is NULL");
    CHECK_OK(nib_group_create(&q, NIB_BF16, SHAPE(16, 16), 2, 16, &group));
    CHECK_FAILS(nib_group_quantize(group, &x, NULL), NIB_ERR_MISMATCH, "BF16");
    CHECK_FAILS(nib_group_member(group, 2, &t[0]), NIB_ERR_ARG, "member 2 of 2");
    CHECK_FAILS(nib_group_offset(group, NIB_PART_COUNT, 0, &offset), NIB_ERR_ARG, "part");
    CHECK(nib_group_buffer(group, NIB_PART_COUNT) == NULL && nib_group_buffer(NULL, NIB_ROW_DATA) == NULL);
    nib_group_destroy(group);
    nib_group_destroy(NULL);
    CHECK_OK(nib_group_create(&q, NIB_F32, NULL, 0, 16, &group));
    nib_group_destroy(group);
    CHECK_OK(nib_quantizer_init_format(&q, NIB_MXFP8));
    CHECK_OK(nib_group_create(&q, NIB_F32, SHAPE(32), 1, 16, &group));
    CHECK_FAILS(nib_group_quantize(group, &x, nib_comm_serial()), NIB_ERR_MODE, "no amax per tensor");
    CHECK_OK(nib_group_quantize(group, &x, NULL));
    nib_group_destroy(group);
}

TEST_MAIN
