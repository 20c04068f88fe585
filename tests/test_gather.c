/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gather.c - gathers: codes of a parameter by elements and by bytes, tensors by rows, and FSDP's extract and
 * assign.
 */
#define _GNU_SOURCE
#include "team.h"

#include "shard_cases.h"

/* ---- By elements ---- */

struct ranges {
    int64_t start[4], length[4];
    bool bytes;
    nib_status status;
};

static int gather_ranges(const nib_comm *comm, void *context)
{
    const struct ranges *ranges = context;
    const uint64_t seed = 0;
    int faults = 0, equal = 0;
    nib_quantizer q;
    nib_tensor *t = NULL, *before = NULL;
    nib_quantizer_init(&q);
    q.block_dims[0] = 16;
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(4, 16), NULL, &t));
    uint8_t *codes = case_part(t, NIB_ROW_DATA);
    memset(codes, 0x10 * comm->rank + comm->rank, 32); /* every nibble says whose it is */
    CASE_OK(nib_tensor_clone(t, &before));
    const int64_t start = ranges->start[comm->rank], length = ranges->length[comm->rank];
    const nib_status status = ranges->bytes ? nib_all_gather_param_bytes(t, NIB_ROWWISE, start, length, NULL, comm)
                                            : nib_all_gather_param(t, NIB_ROWWISE, start, length, NULL, comm);
    CASE_CHECK(status == ranges->status, "%s: %s", nib_status_name(status), nib_last_error());
    if (status) {
        CASE_OK(nib_tensor_equal(t, before, &equal));
        CASE_CHECK(equal, "something has changed");
    }
    for (int i = 0; i < 64 && !status; i++) {
        int owner = 0;
        for (int r = 0; r < comm->size; r++)
            if (i >= ranges->start[r] && i < ranges->start[r] + ranges->length[r])
                owner = r;
        CASE_CHECK((codes[i / 2] >> 4 * (i % 2) & 15) == owner, "element %d is not of rank %d", i, owner);
    }
    nib_metadata m = { .bytes = sizeof m };
    CASE_OK(nib_tensor_get_metadata(t, &m));
    CASE_CHECK(m.columnwise_valid == (status != NIB_OK), "the columnwise usage is %d", m.columnwise_valid);
    nib_tensor_destroy(t), nib_tensor_destroy(before);
    return faults;
}

TEST(ranges_of_elements)
{
    struct ranges cases[] = {
        { { 0, 20, 30, 64 }, { 20, 10, 34, 0 }, false, NIB_OK },
        { { 0, 20, 30, 64 }, { 20, 10, 34, 0 }, true, NIB_OK },
        { { 41, 0, 13, 14 }, { 23, 13, 1, 27 }, false, NIB_OK }, /* out of order, odd borders, one element */
        { { 41, 0, 13, 14 }, { 23, 13, 1, 27 }, true, NIB_ERR_SHAPE },
        { { 0, 0, 0, 0 }, { 0, 0, 64, 0 }, false, NIB_OK },
        { { 0, 20, 31, 64 }, { 20, 10, 33, 0 }, false, NIB_ERR_SHAPE },  /* a gap */
        { { 0, 20, 30, 30 }, { 20, 10, 34, 34 }, false, NIB_ERR_SHAPE }, /* twice */
        { { 0, 20, 29, 64 }, { 20, 10, 35, 0 }, false, NIB_ERR_SHAPE },  /* overlapping */
        { { 0, 20, 30, 64 }, { 20, 10, 35, 0 }, false, NIB_ERR_SHAPE },  /* beyond the end */
        { { 0, 20, 30, -1 }, { 20, 10, 34, 0 }, false, NIB_ERR_SHAPE },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_THAT(team_run(4, gather_ranges, &cases[i]) == 0, "case %zu", i);
}

static int gather_badly(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0;
    nib_quantizer q;
    nib_tensor *t = NULL;
    (void)context;
    nib_quantizer_init(&q);
    q.rowwise = comm->rank != 1;
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(4, 16), NULL, &t));
    CASE_CHECK(nib_all_gather_param(t, NIB_ROWWISE, 0, 0, NULL, comm) == NIB_ERR_USAGE, "no rowwise usage");
    CASE_CHECK(nib_all_gather_param(t, NIB_COLUMNWISE, 0, 0, NULL, comm) == NIB_ERR_USAGE, "transposed");
    CASE_CHECK(nib_all_gather_param(comm->rank ? t : NULL, NIB_ROWWISE, 0, 0, NULL, comm) >= NIB_ERR_ARG, "NULL");
    CASE_CHECK(nib_all_gather_param(t, NIB_ROWWISE, 0, 0, NULL, NULL) == NIB_ERR_ARG, "no communicator");
    nib_comm amaxes_only = *comm; /* enough for a reduction */
    amaxes_only.allgather = NULL;
    CASE_CHECK(nib_all_gather_param(t, NIB_ROWWISE, 0, 0, NULL, &amaxes_only) == NIB_ERR_ARG, "no allgather");
    nib_tensor_destroy(t);
    return faults;
}

TEST(a_gather_that_one_rank_cannot_make) { CHECK(team_run(3, gather_badly, NULL) == 0); }

/* Ranks that gather other usages, by bytes or not. */
static int gather_crossed(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0;
    nib_quantizer q;
    nib_tensor *t = NULL;
    (void)context;
    CASE_OK(nib_quantizer_init_format(&q, NIB_MXFP8));
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(32, 32), NULL, &t));
    const int64_t start = comm->rank * 512;
    for (int usage = 0; usage < 2; usage++) {
        const nib_usage mine = (nib_usage)(comm->rank ? 1 - usage : usage);
        const nib_status status = comm->rank ? nib_all_gather_param(t, mine, start, 512, NULL, comm)
                                             : nib_all_gather_param_bytes(t, mine, start, 512, NULL, comm);
        CASE_CHECK(status == NIB_ERR_MISMATCH, "usage %d: %s", usage, nib_status_name(status));
    }
    nib_tensor_destroy(t);
    return faults;
}

TEST(gathers_that_are_not_the_same) { CHECK(team_run(2, gather_crossed, NULL) == 0); }

/* ---- Tensors by rows ---- */

struct stack {
    nib_quantizer q;
    nib_dtype dtype;
    int64_t rows[9], cols; /* of each rank */
    float *x;
    nib_tensor *whole;
    nib_status status;
};

static int gather_rows(const nib_comm *comm, void *context)
{
    const struct stack *stack = context;
    const uint64_t seed = 0;
    int faults = 0, equal = 0;
    int64_t first = 0;
    for (int r = 0; r < comm->rank; r++)
        first += stack->rows[r];
    const int64_t rows = stack->rows[comm->rank];
    void *values = malloc((size_t)(rows * stack->cols) * 4 + 4);
    nib_quantizer q = stack->q;
    nib_array x;
    nib_tensor *t = NULL, *all = NULL;
    (void)nib_encode(stack->dtype, stack->x + first * stack->cols, (size_t)(rows * stack->cols), values);
    CASE_OK(nib_array_init(&x, values, stack->dtype, 2, SHAPE(rows, stack->cols)));
    const bool reduced = stack->status != NIB_ERR_MISMATCH && nib_tensor_buffer(stack->whole, NIB_ROW_TENSOR_SCALE);
    q.amax_comm = reduced ? comm : NULL;
    q.origin[0] = first;
    /* Row-scaled: the rows' amaxes are a rank's own, those of columns are the stack's. */
    nib_overrides overrides = { .bytes = sizeof overrides };
    if (q.row_scaled) {
        q.amax_comm = NULL;
        overrides.amax[NIB_COLUMNWISE] = case_part(stack->whole, NIB_COL_TENSOR_SCALE);
    }
    CASE_OK(nib_quantize(&q, &x, &overrides, &t));
    const nib_status status = nib_all_gather_tensor(t, comm, &all);
    CASE_CHECK(status == stack->status, "%s: %s", nib_status_name(status), nib_last_error());
    if (!status) {
        CASE_OK(nib_tensor_equal(all, stack->whole, &equal));
        CASE_CHECK(equal, "%lld x %lld, format %d, block %d differs from the whole", (long long)rows,
                   (long long)stack->cols, (int)q.format, (int)q.block_dims[0]);
        for (int part = 0; part < NIB_PART_COUNT; part++) /* padding too */
            CASE_CHECK(case_same_part(all, stack->whole, (nib_part)part), "part %d differs", part);
    }
    nib_tensor_destroy(t), nib_tensor_destroy(all);
    free(values);
    return faults;
}

static void run_stack(struct stack *stack, int size)
{
    int64_t rows = 0;
    for (int r = 0; r < size; r++)
        rows += stack->rows[r];
    const size_t n = (size_t)(rows * stack->cols);
    void *values = malloc(n * 4 + 4);
    nib_array x;
    stack->x = malloc(n * sizeof(float) + 4);
    for (size_t i = 0; i < n; i++)
        stack->x[i] = test_normal();
    CHECK_OK(nib_encode(stack->dtype, stack->x, n, values));
    CHECK_OK(nib_array_init(&x, values, stack->dtype, 2, SHAPE(rows, stack->cols)));
    nib_quantizer q = stack->q;
    CHECK_OK(nib_quantize(&q, &x, NULL, &stack->whole));
    CHECK_THAT(team_run(size, gather_rows, stack) == 0, "%d ranks", size);
    nib_tensor_destroy(stack->whole);
    free(stack->x), free(values);
}

TEST(rows_of_all_ranks)
{
    static const int64_t widths[] = { 16, 48, 80, 272, 17, 33 };
    for (int round = 0; round < 60; round++) {
        const int size = 1 + round % 9;
        struct stack stack = { .dtype = round % 3 ? NIB_BF16 : NIB_F32, .cols = widths[test_below(6)] };
        nib_quantizer_init(&stack.q);
        const int kind = (int)test_below(9);
        int64_t step = 16;
        if (kind == 0)
            stack.q.block_dims[0] = 16;
        if (kind == 1)
            stack.q.rht = 1;
        if (kind == 2)
            stack.q.row_scaled = 1;
        if (kind == 3)
            stack.q.swizzled = 1;
        if (kind == 4)
            stack.q.columnwise = 0, step = 1; /* rows end anywhere */
        static const nib_format formats[] = { NIB_FLOAT8, NIB_MXFP8, NIB_FLOAT8_BLOCK };
        static const int64_t steps[] = { 3, 32, 128 };
        if (kind >= 5 && kind <= 7) {
            CHECK_OK(nib_quantizer_init_format(&stack.q, formats[kind - 5]));
            step = steps[kind - 5];
        }
        if (kind == 7 && round % 2)
            stack.q.block_dims[0] = 1;
        if (kind == 8)
            stack.q.rounding = NIB_ROUND_STOCHASTIC_24, stack.q.seed = test_random();
        for (int r = 0; r < size; r++)
            stack.rows[r] = step * test_below(step > 100 ? 2 : 4);
        if (kind != 1) /* the last may be cut short */
            stack.rows[size - 1] += test_below(step);
        run_stack(&stack, size);
    }
}

/* Where a dim is 1, strides do not tell in which order codes lie. */
TEST(rows_of_one_column)
{
    static const nib_format formats[] = { NIB_NVFP4, NIB_FLOAT8, NIB_MXFP8, NIB_FLOAT8_BLOCK, NIB_MXFP4 };
    static const int64_t rows[][3] = { { 128, 128, 5 }, { 128, 0, 1 }, { 1, 0, 0 }, { 0, 0, 1 } };
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            for (int64_t cols = 1; cols <= 2; cols++) {
                struct stack stack = { .dtype = NIB_F32, .cols = cols };
                CHECK_OK(nib_quantizer_init_format(&stack.q, formats[f]));
                memcpy(stack.rows, rows[i], sizeof rows[i]);
                run_stack(&stack, 3);
            }
}

TEST(rows_that_do_not_fit)
{
    struct stack stack = { .dtype = NIB_BF16, .cols = 32, .rows = { 17, 16, 16 }, .status = NIB_ERR_SHAPE };
    nib_quantizer_init(&stack.q);
    run_stack(&stack, 3);
    /* Without a reduction every rank has an amax of its own. */
    stack.rows[0] = 16;
    stack.status = NIB_ERR_MISMATCH;
    run_stack(&stack, 3);
}

static int refuse_rows(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0;
    nib_quantizer q;
    nib_tensor *t = NULL, *all = NULL;
    (void)context;
    nib_quantizer_init(&q);
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 1, SHAPE(16), NULL, &t));
    CASE_CHECK(nib_all_gather_tensor(t, comm, &all) == NIB_ERR_SHAPE, "rank 1");
    nib_tensor_destroy(t);
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, comm->rank ? 16 : 32), NULL, &t));
    CASE_CHECK(nib_all_gather_tensor(t, comm, &all) == NIB_ERR_MISMATCH, "widths differ");
    nib_tensor_destroy(t);
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 16), NULL, &t));
    if (comm->rank == 1)
        CASE_OK(nib_tensor_invalidate_columnwise(t));
    CASE_CHECK(nib_all_gather_tensor(t, comm, &all) == NIB_ERR_USAGE, "a stale copy");
    CASE_CHECK(nib_all_gather_tensor(comm->rank ? t : NULL, comm, &all) != NIB_OK, "NULL");
    CASE_CHECK(nib_all_gather_tensor(t, NULL, &all) == NIB_ERR_ARG, "no communicator");
    CASE_CHECK(!all, "an output");
    nib_tensor_destroy(t);
    return faults;
}

TEST(tensors_that_cannot_be_gathered) { CHECK(team_run(2, refuse_rows, NULL) == 0); }

TEST(leading_dims)
{
    nib_quantizer q;
    nib_tensor *t = NULL, *all = NULL;
    nib_metadata m = { .bytes = sizeof m };
    nib_quantizer_init(&q);
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 3, SHAPE(2, 16, 16), NULL, &t));
    CHECK_OK(nib_all_gather_tensor(t, nib_comm_serial(), &all));
    CHECK_OK(nib_tensor_get_metadata(all, &m));
    CHECK(m.rank == 3 && m.shape[0] == 2 && m.shape[1] == 16 && m.rows == 32);
    nib_tensor_destroy(t), nib_tensor_destroy(all);
}

/* ---- FSDP ---- */

/* Pieces side by side, as a framework would gather them. */
static void fsdp_round(nib_quantizer q, int64_t rows, int64_t cols, int pieces)
{
    const int64_t n = rows * pieces * cols;
    float *x = malloc((size_t)n * sizeof *x), amax = 0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = test_normal();
        amax = x[i] > amax ? x[i] : -x[i] > amax ? -x[i] : amax;
    }
    nib_array all;
    nib_tensor *whole = NULL, *out = NULL, *shard = NULL;
    CHECK_OK(nib_array_init(&all, x, NIB_F32, 2, SHAPE(rows * pieces, cols)));
    CHECK_OK(nib_quantize(&q, &all, NULL, &whole));
    uint8_t *data = NULL, *scales = NULL;
    nib_fsdp_parts parts = { .bytes = sizeof parts };
    for (int i = 0; i < pieces; i++) {
        nib_tensor *t = NULL;
        nib_array piece;
        const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, &amax } };
        CHECK_OK(nib_array_init(&piece, x + i * rows * cols, NIB_F32, 2, SHAPE(rows, cols)));
        CHECK_OK(nib_quantize(&q, &piece, &overrides, &t));
        parts = (nib_fsdp_parts){ .bytes = sizeof parts };
        CHECK_OK(nib_fsdp_extract(t, &parts));
        CHECK(parts.data.shape[0] == rows && (!parts.scales.data || parts.scales.shape[0] == rows));
        if (!data)
            data = malloc(parts.data.bytes * (size_t)pieces + 2),
            scales = malloc(parts.scales.bytes * (size_t)pieces + 1);
        memcpy(data + parts.data.bytes * (size_t)i, parts.data.data, parts.data.bytes);
        if (parts.scales.data)
            memcpy(scales + parts.scales.bytes * (size_t)i, parts.scales.data, parts.scales.bytes);
        nib_tensor_destroy(shard);
        shard = t; /* the last one says what they mean */
    }
    CHECK_OK(nib_array_init(&parts.data, data, NIB_U8, 2, SHAPE(rows * pieces, parts.data.shape[1])));
    if (pieces % 2) { /* the first element need not be where the memory begins */
        memmove(data + 1, data, parts.data.bytes);
        parts.data.offset = 1;
        parts.data.bytes++;
    }
    if (parts.scales.data)
        CHECK_OK(
            nib_array_init(&parts.scales, scales, parts.scales.dtype, 2, SHAPE(rows * pieces, parts.scales.shape[1])));
    int equal = 0;
    CHECK_OK(nib_fsdp_assign(shard, &parts, rows * pieces, &out));
    CHECK_OK(nib_tensor_equal(out, whole, &equal));
    CHECK(equal);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        CHECK(case_same_part(out, whole, (nib_part)part));
    /* The next time in place. */
    const void *place = case_part(out, NIB_ROW_DATA), *column = case_part(out, NIB_COL_DATA);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        nib_buffer *buffer = nib_tensor_buffer(out, (nib_part)part);
        if (nib_buffer_bytes(buffer))
            memset(nib_buffer_data(buffer), 0x33, nib_buffer_bytes(buffer));
    }
    CHECK_OK(nib_fsdp_assign(shard, &parts, rows * pieces, &out));
    CHECK(place == case_part(out, NIB_ROW_DATA) && column == case_part(out, NIB_COL_DATA));
    for (int part = 0; part < NIB_PART_COUNT; part++)
        CHECK(case_same_part(out, whole, (nib_part)part));
    nib_tensor *was = out;
    CHECK_FAILS(nib_fsdp_assign(shard, &parts, rows * pieces - 1, &out), NIB_ERR_MISMATCH, "another shape");
    parts.data.shape[1]--;
    CHECK_FAILS(nib_fsdp_assign(shard, &parts, rows * pieces, &out), NIB_ERR_SHAPE, "data must be");
    CHECK(out == was);
    nib_tensor_destroy(out), nib_tensor_destroy(whole), nib_tensor_destroy(shard);
    free(x), free(data), free(scales);
}

TEST(fsdp)
{
    nib_quantizer q, square, float8, mxfp8;
    nib_quantizer_init(&q);
    square = q;
    square.block_dims[0] = 16;
    q.columnwise = 0;
    CHECK_OK(nib_quantizer_init_format(&float8, NIB_FLOAT8));
    CHECK_OK(nib_quantizer_init_format(&mxfp8, NIB_MXFP8));
    mxfp8.block_dims[0] = 32;
    for (int pieces = 1; pieces <= 4; pieces++) {
        fsdp_round(q, 5, 80, pieces);
        fsdp_round(square, 16, 80, pieces);
        fsdp_round(square, 48, 17, pieces);
        fsdp_round(float8, 6, 10, pieces);
        fsdp_round(mxfp8, 32, 48, pieces);
    }
}

/* Shards without rows too; and one column has no next one, to which a stride would lead. */
TEST(fsdp_of_next_to_nothing)
{
    for (int64_t rows = 0; rows <= 2; rows++) {
        float x[2] = { 1, -3 };
        nib_array all;
        nib_tensor *shard = NULL, *out = NULL;
        nib_quantizer q;
        nib_fsdp_parts parts = { .bytes = sizeof parts };
        int equal = 0;
        CHECK_OK(nib_quantizer_init_format(&q, NIB_FLOAT8));
        CHECK_OK(nib_array_init(&all, x, NIB_F32, 2, SHAPE(rows, 1)));
        CHECK_OK(nib_quantize(&q, &all, NULL, &shard));
        CHECK_OK(nib_fsdp_extract(shard, &parts));
        CHECK(parts.data.shape[0] == rows && parts.data.shape[1] == 1);
        parts.data.strides[1] = 7;
        CHECK_OK(nib_fsdp_assign(shard, &parts, rows, &out));
        CHECK_OK(nib_tensor_equal(out, shard, &equal));
        CHECK(equal);
        nib_tensor_destroy(shard), nib_tensor_destroy(out);
    }
}

/* A framework gathers where the result is to be. */
TEST(fsdp_into_its_own_buffers)
{
    static const nib_format formats[] = { NIB_NVFP4, NIB_MXFP8, NIB_FLOAT8 };
    float x[64 * 80];
    nib_array all;
    for (int i = 0; i < 64 * 80; i++)
        x[i] = (float)(i % 97) - 40;
    CHECK_OK(nib_array_init(&all, x, NIB_F32, 2, SHAPE(64, 80)));
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        nib_quantizer q;
        nib_tensor *t = NULL, *before = NULL;
        nib_fsdp_parts parts = { .bytes = sizeof parts };
        int equal = 0;
        CHECK_OK(nib_quantizer_init_format(&q, formats[i]));
        q.block_dims[0] = q.block_dims[1]; /* square: columns are built */
        CHECK_OK(nib_quantize(&q, &all, NULL, &t));
        CHECK_OK(nib_tensor_clone(t, &before));
        CHECK_OK(nib_fsdp_extract(t, &parts));
        CHECK_OK(nib_fsdp_assign(before, &parts, 64, &t));
        CHECK_OK(nib_tensor_equal(t, before, &equal));
        CHECK_THAT(equal, "%s: the tensor has changed", nib_format_name(formats[i]));
        /* Scales where the codes are to be. */
        nib_fsdp_parts own = parts;
        CHECK_OK(nib_fsdp_extract(before, &parts));
        if (parts.scales.data) {
            memcpy(own.data.data, parts.scales.data, parts.scales.bytes);
            parts.scales.data = own.data.data;
            CHECK_OK(nib_fsdp_assign(before, &parts, 64, &t));
            CHECK_OK(nib_tensor_equal(t, before, &equal));
            CHECK_THAT(equal, "%s: scales among codes", nib_format_name(formats[i]));
        }
        nib_tensor_destroy(t), nib_tensor_destroy(before);
    }
}

TEST(fsdp_refuses)
{
    nib_fsdp_parts parts = { .bytes = sizeof parts };
    const struct {
        int kind;
        nib_status status;
        const char *words;
    } cases[] = {
        { 0, NIB_ERR_UNSUPPORTED, "swizzled" },   { 1, NIB_ERR_UNSUPPORTED, "amax per row" },
        { 2, NIB_ERR_USAGE, "cannot be built" },  { 3, NIB_ERR_SHAPE, "not whole blocks" },
        { 4, NIB_ERR_USAGE, "no rowwise usage" }, { 5, NIB_ERR_UNSUPPORTED, "row by row" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_quantizer q;
        nib_tensor *t = NULL;
        CHECK_OK(nib_quantizer_init_format(&q, cases[i].kind == 5 ? NIB_FLOAT8_BLOCK : NIB_NVFP4));
        q.columnwise = cases[i].kind == 2 || cases[i].kind == 4;
        q.swizzled = cases[i].kind == 0;
        q.row_scaled = cases[i].kind == 1;
        q.rowwise = cases[i].kind != 4;
        if (cases[i].kind == 3)
            q.block_dims[0] = 16;
        CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(24, 32), NULL, &t));
        CHECK_FAILS(nib_fsdp_extract(t, &parts), cases[i].status, cases[i].words);
        nib_tensor_destroy(t);
    }
    parts.bytes = 8;
    nib_tensor *t = NULL;
    nib_quantizer q;
    nib_quantizer_init(&q);
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 16), NULL, &t));
    CHECK_FAILS(nib_fsdp_extract(t, &parts), NIB_ERR_ARG, "bytes is 8");
    CHECK_FAILS(nib_fsdp_assign(t, NULL, 1, &t), NIB_ERR_ARG, "parts is NULL");
    nib_tensor_destroy(t);
}

TEST_MAIN
