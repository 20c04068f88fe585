/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_mpi.c - a nib_comm over MPI. Counts of MPI-3 are ints: what is longer goes in pieces.
 */
#include "nib_mpi.h"
#include "nib_shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of one message, and in all of a gather. A test makes it small. */
#ifndef NIB_MPI_MOST_BYTES
#define NIB_MPI_MOST_BYTES (1 << 30)
#endif
enum { MOST_BYTES = NIB_MPI_MOST_BYTES, MOST_FLOATS = MOST_BYTES / sizeof(float) };

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* What MPI says about an error of one of its functions. */
static nib_status status_of(const char *function, int error)
{
    if (error == MPI_SUCCESS)
        return NIB_OK;
    char reason[MPI_MAX_ERROR_STRING + 1] = "", text[sizeof reason + 64];
    int length = 0;
    if (MPI_Error_string(error, reason, &length) != MPI_SUCCESS)
        snprintf(reason, sizeof reason, "error %d", error);
    snprintf(text, sizeof text, "%s: %s", function, reason);
    return nib_set_error(NIB_ERR_COMM, text);
}

struct mpi_comm {
    nib_comm comm; /* first: what the caller has is a pointer to it */
    MPI_Comm mpi;
    nib_error failed; /* what MPI failed with, once it has */
    int lengths[];    /* of a gather, and where they go: room for two per rank, so that no gather can lack memory */
};

/* After an error MPI promises nothing of a communicator, and this rank may be a collective ahead of the others or behind:
 * another call could meet a call of theirs that means something else. So there is none. */
static nib_status check_usable(const struct mpi_comm *made)
{
    return made->failed.status ? nib_set_error(NIB_ERR_COMM, made->failed.text) : NIB_OK;
}

static nib_status remember(struct mpi_comm *made, nib_status status)
{
    if (status)
        nib_get_error(&made->failed);
    return status;
}

static nib_status allreduce_max_f32(void *context, float *values, size_t n)
{
    struct mpi_comm *made = context;
    nib_status status = check_usable(made);
    for (size_t at = 0; at < n && !status; at += MOST_FLOATS)
        status = remember(
            made, status_of("MPI_Allreduce", MPI_Allreduce(MPI_IN_PLACE, values + at, (int)smaller(n - at, MOST_FLOATS),
                                                           MPI_FLOAT, MPI_MAX, made->mpi)));
    return status;
}

/* The largest key and, by its complement, the smallest: equal where all are. The status is MPI's, *agreed the ranks'. */
static nib_status agree_over(MPI_Comm comm, nib_status status, uint64_t key, nib_status *agreed)
{
    uint64_t words[3] = { (uint64_t)status, key, ~key };
    const nib_status reduced =
        status_of("MPI_Allreduce", MPI_Allreduce(MPI_IN_PLACE, words, 3, MPI_UINT64_T, MPI_MAX, comm));
    *agreed = words[0] ? (nib_status)words[0] : words[1] == ~words[2] ? NIB_OK : NIB_ERR_MISMATCH;
    return reduced;
}

static nib_status agree(void *context, nib_status status, uint64_t key)
{
    struct mpi_comm *made = context;
    nib_status agreed, failed = check_usable(made);
    if (!failed)
        failed = remember(made, agree_over(made->mpi, status, key, &agreed));
    return failed ? failed : agreed;
}

static nib_status allgather(void *context, const void *mine, void *all, const size_t *counts)
{
    struct mpi_comm *made = context;
    nib_status status = check_usable(made);
    if (status)
        return status;
    const int size = made->comm.size, rank = made->comm.rank;
    int *lengths = made->lengths, *places = lengths + size;
    size_t total = 0;
    for (int r = 0; r < size; total += counts[r++])
        if (total <= MOST_BYTES && counts[r] <= MOST_BYTES) {
            lengths[r] = (int)counts[r];
            places[r] = (int)total;
        }
    if (total <= MOST_BYTES)
        return remember(made, status_of("MPI_Allgatherv", MPI_Allgatherv(mine, lengths[rank], MPI_BYTE, all, lengths,
                                                                         places, MPI_BYTE, made->mpi)));
    /* From each rank to all others, in pieces that an int can count. */
    char *to = all;
    for (int r = 0; r < size && !status; to += counts[r++]) {
        if (r == rank && counts[r])
            memcpy(to, mine, counts[r]);
        for (size_t at = 0; at < counts[r] && !status; at += MOST_BYTES)
            status = remember(made, status_of("MPI_Bcast", MPI_Bcast(to + at, (int)smaller(counts[r] - at, MOST_BYTES),
                                                                     MPI_BYTE, r, made->mpi)));
    }
    return status;
}

static nib_status barrier(void *context)
{
    struct mpi_comm *made = context;
    const nib_status failed = check_usable(made);
    return failed ? failed : remember(made, status_of("MPI_Barrier", MPI_Barrier(made->mpi)));
}

/* What can be said of a communicator without talking over it. */
static nib_status check_mpi(MPI_Comm mpi)
{
    int initialized = 0, finalized = 0, inter = 0;
    if (MPI_Initialized(&initialized) != MPI_SUCCESS || !initialized)
        return nib_set_error(NIB_ERR_ARG, "MPI is not initialized: call MPI_Init first");
    if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized)
        return nib_set_error(NIB_ERR_ARG, "MPI is finalized");
    if (mpi == MPI_COMM_NULL)
        return nib_set_error(NIB_ERR_ARG, "the communicator is MPI_COMM_NULL");
    const nib_status status = status_of("MPI_Comm_test_inter", MPI_Comm_test_inter(mpi, &inter));
    if (!status && inter)
        return nib_set_error(NIB_ERR_ARG, "an intercommunicator has two groups of ranks: merge them first");
    return status;
}

nib_status nib_comm_mpi_create(MPI_Comm mpi, nib_comm **out)
{
    nib_status status = check_mpi(mpi);
    if (status)
        return status;
    int rank = 0, size = 0;
    MPI_Comm duplicate = MPI_COMM_NULL;
    status = status_of("MPI_Comm_dup", MPI_Comm_dup(mpi, &duplicate));
    if (status)
        return status;
    (void)MPI_Comm_set_errhandler(duplicate, MPI_ERRORS_RETURN);
    (void)MPI_Comm_rank(duplicate, &rank);
    (void)MPI_Comm_size(duplicate, &size);
    struct mpi_comm *made = calloc(1, sizeof *made + 2 * (size_t)size * sizeof *made->lengths);
    /* Whatever it lacks, the rank has the duplicate by now and can tell the others. */
    const nib_status own = !out    ? nib_set_error(NIB_ERR_ARG, "nib_comm_mpi_create: out is NULL")
                           : !made ? nib_set_error(NIB_ERR_MEMORY, "no memory for a communicator")
                                   : NIB_OK;
    nib_status agreed;
    status = agree_over(duplicate, own, 0, &agreed);
    if (status || agreed) {
        if (!status && agreed != own)
            (void)nib_set_error(agreed, "another rank could not create its communicator");
        if (!status) /* with the others, who know of it */
            (void)MPI_Comm_free(&duplicate);
        free(made);
        return status ? status : agreed;
    }
    made->mpi = duplicate;
    made->comm = (nib_comm){ .bytes = sizeof made->comm,
                             .context = made,
                             .rank = rank,
                             .size = size,
                             .allreduce_max_f32 = allreduce_max_f32,
                             .agree = agree,
                             .allgather = allgather,
                             .barrier = barrier };
    *out = &made->comm;
    return NIB_OK;
}

void nib_comm_mpi_destroy(nib_comm *comm)
{
    if (!comm)
        return;
    struct mpi_comm *made = (struct mpi_comm *)comm;
    if (!made->failed.status) /* it is a collective */
        (void)MPI_Comm_free(&made->mpi);
    free(made);
}
