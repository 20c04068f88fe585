/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_comm.c - communicators: one rank alone, threads; and quantizations whose amax is reduced over them.
 */
#define _GNU_SOURCE
#include "team.h"

#include "shard_cases.h"

/* ---- The calls ---- */

static int collectives(const nib_comm *comm, void *context)
{
    enum { MOST = 16, NUMBERS = 100 };
    const uint64_t seed = 0;
    int faults = 0;
    (void)context;
    for (int round = 0; round < 50; round++) {
        float values[NUMBERS];
        const size_t n = (size_t)(round * 7 % NUMBERS);
        for (size_t i = 0; i < n; i++)
            values[i] = (float)(((int)i * 31 + comm->rank * 17 + round) % 23);
        CASE_OK(comm->allreduce_max_f32(comm->context, values, n));
        for (size_t i = 0; i < n; i++) {
            float most = 0;
            for (int r = 0; r < comm->size; r++) {
                const float other = (float)(((int)i * 31 + r * 17 + round) % 23);
                most = other > most ? other : most;
            }
            CASE_CHECK(values[i] == most, "number %zu is %g, not %g", i, (double)values[i], (double)most);
        }
        size_t counts[MOST], total = 0;
        char mine[MOST], all[MOST * MOST];
        for (int r = 0; r < comm->size; r++)
            total += counts[r] = (size_t)((r + round) % 5);
        memset(mine, 'a' + comm->rank, sizeof mine);
        memset(all, '.', sizeof all);
        CASE_OK(comm->allgather(comm->context, mine, all, counts));
        size_t at = 0;
        for (int r = 0; r < comm->size; r++)
            for (size_t i = 0; i < counts[r]; i++, at++)
                CASE_CHECK(all[at] == 'a' + r, "byte %zu is %c", at, all[at]);
        CASE_CHECK(all[total] == '.', "a byte too many");
        CASE_OK(comm->barrier(comm->context));
        CASE_CHECK(comm->agree(comm->context, NIB_OK, 3) == NIB_OK, "no agreement");
        const nib_status own = comm->rank == round % comm->size ? NIB_ERR_SHAPE : NIB_OK;
        CASE_CHECK(comm->agree(comm->context, own, (uint64_t)comm->rank) == NIB_ERR_SHAPE, "a failure is not heard of");
        CASE_CHECK(comm->agree(comm->context, NIB_OK, (uint64_t)(comm->rank == 0)) ==
                       (comm->size > 1 ? NIB_ERR_MISMATCH : NIB_OK),
                   "different keys agree");
    }
    return faults;
}

TEST(threads_reduce_gather_and_agree)
{
    for (int size = 1; size <= 9; size++)
        CHECK(team_run(size, collectives, NULL) == 0);
}

TEST(serial)
{
    const nib_comm *comm = nib_comm_serial();
    CHECK(comm->bytes == sizeof *comm && comm->rank == 0 && comm->size == 1);
    CHECK(collectives(comm, NULL) == 0);
}

/* Calls that do not match fail on every rank, and the next ones work. */
static int crossed(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0;
    float values[3] = { 0 };
    (void)context;
    const bool odd = comm->rank == comm->size - 1;
    CASE_CHECK(comm->allreduce_max_f32(comm->context, values, odd ? 3 : 2) == NIB_ERR_COMM, "lengths differ");
    CASE_CHECK((odd ? comm->barrier(comm->context) : comm->agree(comm->context, NIB_OK, 0)) == NIB_ERR_COMM,
               "calls differ");
    CASE_OK(comm->barrier(comm->context));
    return faults;
}

TEST(threads_notice_crossed_calls)
{
    for (int size = 2; size <= 5; size++)
        CHECK(team_run(size, crossed, NULL) == 0);
}

TEST(threads_create)
{
    nib_comm *comms[3] = { NULL };
    CHECK_FAILS(nib_comm_threads_create(0, comms), NIB_ERR_ARG, "at least one rank");
    CHECK_FAILS(nib_comm_threads_create(2, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK(!comms[0]);
    CHECK_OK(nib_comm_threads_create(3, comms));
    for (int r = 0; r < 3; r++)
        CHECK(comms[r]->rank == r && comms[r]->size == 3 && comms[r]->bytes == sizeof **comms);
    nib_comm_threads_destroy(comms[2]);
    nib_comm_threads_destroy(NULL);
}

/* ---- Quantize with the amax of all ranks ---- */

enum { ROWS = 32, COLS = 48 };

struct stack {
    nib_quantizer q;
    const float *x; /* [ranks * ROWS, COLS] */
    nib_dtype dtype;
    const float *row_amax, *col_amax; /* of the stack, where the tensor scale is one number or one per column */
};

static int quantize_part(const nib_comm *comm, void *context)
{
    const struct stack *stack = context;
    const uint64_t seed = 0;
    int faults = 0;
    nib_quantizer q = stack->q;
    nib_tensor *t = NULL, *overrides = NULL, *into = NULL;
    float inputs[ROWS * COLS];
    nib_array x;
    (void)nib_encode(stack->dtype, stack->x + comm->rank * ROWS * COLS, ROWS * COLS, inputs);
    CASE_OK(nib_array_init(&x, inputs, stack->dtype, 2, SHAPE(ROWS, COLS)));
    q.amax_comm = comm;
    CASE_OK(nib_quantize(&q, &x, NULL, &t));
    /* The same as alone with the amaxes of the stack. */
    q.amax_comm = NULL;
    const nib_overrides amaxes = { .bytes = sizeof amaxes, .amax = { stack->row_amax, stack->col_amax } };
    CASE_OK(nib_quantize(&q, &x, &amaxes, &overrides));
    int equal = 0;
    CASE_OK(nib_tensor_equal(t, overrides, &equal));
    CASE_CHECK(equal, "the reduced amax gives other bytes");
    CASE_OK(nib_tensor_create(&q, stack->dtype, 2, SHAPE(ROWS, COLS), NULL, &into));
    q.amax_comm = comm;
    CASE_OK(nib_quantize_into(&q, &x, NULL, NULL, into));
    CASE_OK(nib_tensor_equal(into, overrides, &equal));
    CASE_CHECK(equal, "the reduced amax gives other bytes in place");
    nib_tensor_destroy(t), nib_tensor_destroy(overrides), nib_tensor_destroy(into);
    return faults;
}

/* Amaxes of every rank's part alone, and their elementwise maximum. */
static void amaxes_of_parts(const struct stack *stack, int size, float *row, float *col)
{
    for (int r = 0; r < size; r++) {
        nib_quantizer q = stack->q;
        nib_tensor *t = NULL;
        float inputs[ROWS * COLS];
        nib_array x, tensor_scales[2];
        CHECK_OK(nib_encode(stack->dtype, stack->x + r * ROWS * COLS, ROWS * COLS, inputs));
        CHECK_OK(nib_array_init(&x, inputs, stack->dtype, 2, SHAPE(ROWS, COLS)));
        CHECK_OK(nib_quantize(&q, &x, NULL, &t));
        for (int usage = 0; usage < 2; usage++) {
            float *most = usage ? col : row;
            CHECK_OK(nib_tensor_part(t, usage ? NIB_COL_TENSOR_SCALE : NIB_ROW_TENSOR_SCALE, &tensor_scales[usage]));
            for (int64_t i = 0; i < tensor_scales[usage].shape[0]; i++) {
                const float amax = ((const float *)tensor_scales[usage].data)[i];
                most[i] = r == 0 || amax > most[i] ? amax : most[i];
            }
        }
        nib_tensor_destroy(t);
    }
}

TEST(amaxes_of_all_ranks)
{
    for (int size = 1; size <= 5; size++)
        for (int kind = 0; kind < 6; kind++) {
            float x[5 * ROWS * COLS], row[ROWS], col[COLS];
            struct stack stack = { .x = x, .dtype = kind % 2 ? NIB_F32 : NIB_BF16, .row_amax = row, .col_amax = col };
            nib_quantizer_init(&stack.q);
            stack.q.rht = kind == 2 || kind == 3;        /* columnwise: after the transform */
            stack.q.row_scaled = kind == 4 || kind == 5; /* elementwise over vectors */
            stack.q.rht_rowwise = kind == 5;
            for (int i = 0; i < size * ROWS * COLS; i++)
                x[i] = test_normal();
            amaxes_of_parts(&stack, size, row, col);
            CHECK(team_run(size, quantize_part, &stack) == 0);
        }
}

/* One rank brings something that cannot be quantized: all return its status. */
static int quantize_badly(const nib_comm *comm, void *context)
{
    const int kind = *(const int *)context;
    const uint64_t seed = (uint64_t)kind;
    int faults = 0;
    const bool here = comm->rank == comm->size - 1;
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.amax_comm = comm;
    float inputs[ROWS * COLS] = { 1 };
    nib_array x;
    nib_tensor *t = NULL, *into = NULL;
    CASE_OK(nib_array_init(&x, inputs, NIB_F32, 2, SHAPE(ROWS, COLS)));
    CASE_OK(nib_tensor_create(&q, NIB_F32, 2, SHAPE(ROWS, COLS), NULL, &into));
    nib_status wanted = NIB_ERR_SHAPE;
    if (here && kind == 0)
        x.shape[0] = -1;
    if (kind == 1) {
        wanted = NIB_ERR_DTYPE;
        if (here)
            x.dtype = NIB_I32;
    }
    if (kind == 2) {
        wanted = NIB_ERR_MODE;
        if (here)
            q.rht = 1, q.block_dims[0] = 16;
    }
    if (kind == 3) { /* vectors of different lengths */
        wanted = NIB_ERR_MISMATCH;
        q.row_scaled = 1;
        if (here)
            x.shape[0] = ROWS - 1;
    }
    nib_status status = nib_quantize(&q, &x, NULL, &t);
    CASE_CHECK(status == wanted && !t, "kind %d: %s: %s", kind, nib_status_name(status), nib_last_error());
    if (kind != 3) {
        status = nib_quantize_into(&q, &x, NULL, NULL, into);
        CASE_CHECK(status == wanted, "kind %d in place: %s: %s", kind, nib_status_name(status), nib_last_error());
    }
    nib_tensor_destroy(into);
    return faults;
}

TEST(one_rank_that_cannot_quantize_makes_all_fail)
{
    for (int size = 2; size <= 4; size++)
        for (int kind = 0; kind < 4; kind++)
            CHECK(team_run(size, quantize_badly, &kind) == 0);
}

/* ---- What a communicator says ---- */

struct wire {
    const char *says; /* NULL: nothing */
    nib_status status;
};

static nib_status cut_agree(void *context, nib_status status, uint64_t key)
{
    (void)status, (void)key;
    const struct wire *wire = context;
    return wire->says ? nib_set_error(wire->status, wire->says) : wire->status;
}

TEST(the_message_of_an_agreement_that_failed_stays)
{
    struct wire wire = { "MPI_Allreduce: the wire is cut", NIB_ERR_COMM };
    nib_comm comm = *nib_comm_serial();
    comm.context = &wire;
    comm.size = 2;
    comm.agree = cut_agree;
    for (int i = 0; i < 2; i++) /* the second time it says what was said before */
        CHECK_FAILS(nib_quantize_master_weights(NULL, 0, NULL, 0, NULL, 0, &comm, NULL), NIB_ERR_COMM,
                    "the agreement of 2 ranks: MPI_Allreduce: the wire is cut");
    /* This rank's own message is not lost. */
    CHECK_FAILS(nib_quantize_master_weights(NULL, 3, NULL, 2, NULL, 1, &comm, NULL), NIB_ERR_COMM,
                "there are 3 parameters, 2 masters and 1 starts; the agreement of 2 ranks: MPI_Allreduce: the wire");
    wire = (struct wire){ NULL, NIB_ERR_COMM };
    CHECK_FAILS(nib_quantize_master_weights(NULL, 0, NULL, 0, NULL, 0, &comm, NULL), NIB_ERR_COMM,
                "another of the 2 ranks failed with NIB_ERR_COMM");
    /* Where the statuses are the same, too. */
    wire = (struct wire){ "the wire is cut", NIB_ERR_ARG };
    CHECK_FAILS(nib_quantize_master_weights(NULL, 3, NULL, 2, NULL, 1, &comm, NULL), NIB_ERR_ARG,
                "there are 3 parameters, 2 masters and 1 starts; the agreement of 2 ranks: the wire is cut");
}

TEST_MAIN
