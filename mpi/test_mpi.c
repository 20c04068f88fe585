/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mpi.c - the communicator over MPI, and sharded casts over it: mpirun -n N test_mpi. Rank 0 prints the closing
 * line.
 */
#define _GNU_SOURCE
#include <unistd.h>

#include "nib_mpi.h"
#include "shard_cases.h"
#include "nib_shard.h"

static const nib_comm *comm;

/* Whoever waits for a rank that never comes would wait for ever; an alarm ends the program. */
enum { HANG_SECONDS = 300 };

/* The reduction, the gather, and what becomes of it when one rank fails. */
static int collectives(void)
{
    const uint64_t seed = 0;
    int faults = 0;
    float values[3] = { (float)comm->rank, (float)-comm->rank, 7 };
    CASE_OK(comm->allreduce_max_f32(comm->context, values, 3));
    CASE_CHECK(values[0] == (float)(comm->size - 1) && values[1] == 0 && values[2] == 7, "a maximum is wrong");
    CASE_OK(comm->barrier(comm->context));
    size_t counts[CASE_RANKS];
    char mine[CASE_RANKS], all[CASE_RANKS * CASE_RANKS];
    size_t total = 0;
    for (int r = 0; r < comm->size; r++) /* rank r has r bytes: the first has none */
        total += counts[r] = (size_t)r;
    memset(mine, 'a' + comm->rank, sizeof mine);
    memset(all, '.', sizeof all);
    CASE_OK(comm->allgather(comm->context, mine, all, counts));
    for (int r = 0, at = 0; r < comm->size; r++)
        for (int i = 0; i < r; i++, at++)
            CASE_CHECK(all[at] == 'a' + r, "byte %d is %c", at, all[at]);
    CASE_CHECK(all[total] == '.', "a byte too many");
    CASE_CHECK(comm->agree(comm->context, NIB_OK, 5) == NIB_OK, "no agreement");
    const nib_status other = comm->size > 1 ? NIB_ERR_MISMATCH : NIB_OK;
    CASE_CHECK(comm->agree(comm->context, NIB_OK, (uint64_t)comm->rank) == other, "different keys agree");
    const nib_status last = comm->rank == comm->size - 1 ? NIB_ERR_MEMORY : NIB_OK;
    CASE_CHECK(comm->agree(comm->context, last, (uint64_t)comm->rank) == NIB_ERR_MEMORY, "a failure is not heard of");
    return faults;
}

/* More than a message holds, where that is little; every rank sends another amount, none of them even. */
static int long_messages(void)
{
    enum { EACH = 1501, FLOATS = 3001 };
    const uint64_t seed = 0;
    int faults = 0;
    static float values[FLOATS];
    for (int i = 0; i < FLOATS; i++)
        values[i] = (float)((i * 7 + comm->rank * 13) % 101 - 50);
    CASE_OK(comm->allreduce_max_f32(comm->context, values, FLOATS));
    for (int i = 0; i < FLOATS && !faults; i++) {
        float most = -51;
        for (int r = 0; r < comm->size; r++) {
            const float theirs = (float)((i * 7 + r * 13) % 101 - 50);
            most = theirs > most ? theirs : most;
        }
        CASE_CHECK(values[i] == most, "number %d is %g, not %g", i, (double)values[i], (double)most);
    }
    static uint8_t mine[CASE_RANKS * EACH], all[CASE_RANKS * CASE_RANKS * EACH];
    size_t counts[CASE_RANKS], total = 0;
    for (int r = 0; r < comm->size; r++)
        total += counts[r] = (size_t)(r * EACH);
    for (size_t i = 0; i < counts[comm->rank]; i++)
        mine[i] = (uint8_t)(i * 31 + (size_t)comm->rank);
    memset(all, 0xEE, sizeof all);
    CASE_OK(comm->allgather(comm->context, mine, all, counts));
    size_t at = 0;
    for (int r = 0; r < comm->size && !faults; r++)
        for (size_t i = 0; i < counts[r] && !faults; i++, at++)
            CASE_CHECK(all[at] == (uint8_t)(i * 31 + (size_t)r), "byte %zu of rank %d is %d", i, r, all[at]);
    CASE_CHECK(all[total] == 0xEE, "a byte too many");
    return faults;
}

/* What cannot become a communicator says why, on all ranks. */
static int rejections(void)
{
    const uint64_t seed = 0;
    int faults = 0;
    nib_comm *made = NULL;
    CASE_CHECK(nib_comm_mpi_create(MPI_COMM_NULL, &made) == NIB_ERR_ARG && strstr(nib_last_error(), "MPI_COMM_NULL"),
               "%s", nib_last_error());
    const bool last = comm->rank == comm->size - 1;
    CASE_CHECK(nib_comm_mpi_create(MPI_COMM_WORLD, last ? NULL : &made) == NIB_ERR_ARG && !made, "it was made");
    CASE_CHECK(strstr(nib_last_error(), last ? "out is NULL" : "another rank"), "%s", nib_last_error());
    if (comm->size == 1)
        return faults;
    MPI_Comm half = MPI_COMM_NULL, both = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, comm->rank % 2, comm->rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - comm->rank % 2, 0, &both);
    CASE_CHECK(nib_comm_mpi_create(both, &made) == NIB_ERR_ARG && strstr(nib_last_error(), "intercommunicator"), "%s",
               nib_last_error());
    MPI_Comm_free(&both);
    MPI_Comm_free(&half);
    return faults;
}

static int random_cases(void)
{
    const int cases = getenv("NIB_CAMPAIGN") ? 5000 : 150;
    int faults = 0;
    for (int i = 0; i < cases; i++) {
        alarm(HANG_SECONDS); /* for each: thousands of them take longer where ranks share processors */
        faults += case_run(comm, 1000 * (uint64_t)comm->size + (uint64_t)i);
    }
    return faults;
}

/* The last rank gets a master that is too long: all return that, and no parameter has changed. */
static int one_rank_fails(void)
{
    const uint64_t seed = 0;
    int faults = 0;
    nib_quantizer q;
    nib_tensor *t = NULL, *before = NULL;
    nib_array master;
    static float values[1024];
    nib_quantizer_init(&q);
    q.block_dims[0] = 16;
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, (const int64_t[2]){ 32, 16 }, NULL, &t));
    CASE_OK(nib_tensor_clone(t, &before));
    for (int i = 0; i < 1024; i++)
        values[i] = (float)i;
    CASE_OK(nib_array_init(&master, values, NIB_F32, 1, (const int64_t[1]){ comm->rank == comm->size - 1 ? 600 : 1 }));
    const nib_array *list = &master;
    const int64_t start = comm->rank;
    CASE_CHECK(nib_quantize_master_weights(&t, 1, &list, 1, &start, 1, comm, NULL) == NIB_ERR_SHAPE, "%s",
               nib_last_error());
    int equal = 0;
    CASE_OK(nib_tensor_equal(t, before, &equal));
    CASE_CHECK(equal, "the parameter has changed");
    nib_tensor_destroy(t);
    nib_tensor_destroy(before);
    return faults;
}

/* What libnib allocates comes from here, so that one rank can be made to run out of it. */
static long allocations_left = -1;

void *aligned_alloc(size_t alignment, size_t bytes)
{
    void *memory = NULL;
    if (allocations_left >= 0 && allocations_left-- == 0)
        return NULL;
    return posix_memalign(&memory, alignment, bytes) ? NULL : memory;
}

/* Each allocation of the last rank fails in its turn, until none does: all return that, and nothing has changed. */
static int one_rank_lacks_memory(void)
{
    const uint64_t seed = 0;
    int faults = 0, went_through = 0, left = 0;
    static float values[32 * 48];
    const int64_t share = 32 * 48 / comm->size, start = share * comm->rank;
    const int64_t length = comm->rank == comm->size - 1 ? 32 * 48 - start : share;
    nib_quantizer q;
    nib_tensor *t = NULL, *before = NULL;
    nib_array master;
    nib_quantizer_init(&q);
    q.block_dims[0] = 16;
    q.scale_rule = NIB_SCALE_4OVER6;
    for (int i = 0; i < 32 * 48; i++)
        values[i] = (float)(i * 7 % 13 - 6);
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, (const int64_t[2]){ 32, 48 }, NULL, &t));
    CASE_OK(nib_tensor_clone(t, &before));
    CASE_OK(nib_array_init(&master, values + start, NIB_F32, 1, &length));
    const nib_array *list = &master;
    for (; !went_through && !faults && left < 100; left++) {
        if (comm->rank == comm->size - 1)
            allocations_left = left;
        const nib_status status = nib_quantize_master_weights(&t, 1, &list, 1, &start, 1, comm, NULL);
        went_through = allocations_left >= 0; /* some were left over */
        allocations_left = -1;
        MPI_Bcast(&went_through, 1, MPI_INT, comm->size - 1, MPI_COMM_WORLD);
        CASE_CHECK(status == (went_through ? NIB_OK : NIB_ERR_MEMORY), "allocation %d: %s: %s", left,
                   nib_status_name(status), nib_last_error());
        int equal = 0;
        CASE_OK(nib_tensor_equal(t, before, &equal));
        CASE_CHECK(equal != went_through, "allocation %d: the parameter has %schanged", left, equal ? "not " : "");
        MPI_Allreduce(MPI_IN_PLACE, &faults, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    }
    CASE_CHECK(left > 8 && left < 100, "%d allocations", left);
    nib_tensor_destroy(t);
    nib_tensor_destroy(before);
    return faults;
}

/* MPI's functions as the library calls them: one of them can be made to fail, once, and calls are counted. */
static int calls, failing_call = -1;

static bool call_fails(void) { return calls++ == failing_call; }

int MPI_Allreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm over)
{
    return call_fails() ? MPI_ERR_OTHER : PMPI_Allreduce(from, to, count, type, op, over);
}

int MPI_Allgatherv(const void *from, int count, MPI_Datatype type, void *to, const int *counts, const int *places,
                   MPI_Datatype to_type, MPI_Comm over)
{
    return call_fails() ? MPI_ERR_OTHER : PMPI_Allgatherv(from, count, type, to, counts, places, to_type, over);
}

int MPI_Barrier(MPI_Comm over) { return call_fails() ? MPI_ERR_OTHER : PMPI_Barrier(over); }

static nib_status call_number(const nib_comm *over, int i)
{
    float value = 1;
    char mine = 1, all[CASE_RANKS];
    size_t counts[CASE_RANKS];
    for (int r = 0; r < over->size; r++)
        counts[r] = 1;
    return i == 0   ? over->agree(over->context, NIB_OK, 0)
           : i == 1 ? over->allreduce_max_f32(over->context, &value, 1)
           : i == 2 ? over->allgather(over->context, &mine, all, counts)
                    : over->barrier(over->context);
}

/* On the last rank MPI fails: that call says so, and the later ones, which the others would never answer. They keep what
 * they have, since to free it takes all ranks. */
static int mpi_fails(void)
{
    const uint64_t seed = 0;
    int faults = 0;
    for (int first = 0; first < 4; first++) {
        nib_comm *made = NULL;
        CASE_OK(nib_comm_mpi_create(MPI_COMM_WORLD, &made));
        const int before = calls;
        failing_call = before;
        for (int i = 0; i < 5 && comm->rank == comm->size - 1; i++) {
            CASE_CHECK(call_number(made, (first + i) % 4) == NIB_ERR_COMM, "call %d after %d", i, first);
            CASE_CHECK(strstr(nib_last_error(), first == 2   ? "MPI_Allgatherv: "
                                                : first == 3 ? "MPI_Barrier: "
                                                             : "MPI_Allreduce: "),
                       "%s", nib_last_error());
            CASE_CHECK(calls == before + 1, "%d calls of MPI", calls - before);
        }
        failing_call = -1;
        if (comm->rank == comm->size - 1)
            nib_comm_mpi_destroy(made);
    }
    return faults;
}

int main(int argc, char **argv)
{
    static int (*const tests[])(void) = { collectives,    long_messages,         rejections, random_cases,
                                          one_rank_fails, one_rank_lacks_memory, mpi_fails };
    nib_comm *created = NULL, *before = NULL;
    int passed = 0, failed = 0;
    alarm(HANG_SECONDS);
    failed += nib_comm_mpi_create(MPI_COMM_WORLD, &before) != NIB_ERR_ARG || !strstr(nib_last_error(), "MPI_Init");
    if (MPI_Init(&argc, &argv) || nib_comm_mpi_create(MPI_COMM_WORLD, &created))
        return 2;
    comm = created;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        alarm(HANG_SECONDS);
        int faults = tests[i](), all = 0;
        MPI_Allreduce(&faults, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        *(all ? &failed : &passed) += 1;
    }
    nib_comm_mpi_destroy(created);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Finalize();
    failed += nib_comm_mpi_create(MPI_COMM_WORLD, &before) != NIB_ERR_ARG || !strstr(nib_last_error(), "finalized");
    if (rank == 0)
        printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
