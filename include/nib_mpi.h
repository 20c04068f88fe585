/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_mpi.h - nib's communicator over MPI: libnib_mpi, any MPI-3. The rules of nib.h hold. Messages are those of the
 * shared libnib, which libnib_mpi is linked with.
 *
 * MPI is initialized and finalized by the caller. A communicator's calls come from one thread at a time: with several
 * threads, initialize MPI for as much (MPI_THREAD_SERIALIZED or more), and give each thread that runs collectives a
 * communicator of its own.
 *
 * A failure of MPI itself is not that of a rank that fails with a status. The call in which MPI reports it returns
 * NIB_ERR_COMM with MPI's message, and so does every later call over this communicator on this rank, at once and without
 * MPI. MPI need not report it on every rank: the others may wait for this one for ever, and no function of MPI-3 wakes
 * them. A program that gets NIB_ERR_COMM from a communicator over MPI should end by MPI_Abort, as nib-mpi does, not by
 * MPI_Finalize, which waits too.
 */
#ifndef NIB_MPI_H
#define NIB_MPI_H

#include <mpi.h>

#include "nib_shard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks of an intracommunicator. It is duplicated (collectively), so that nib's messages and the caller's cannot
 * meet, and on the duplicate MPI's errors are returned as NIB_ERR_COMM instead of ending the program; errors while it is
 * duplicated go to the error handler of `mpi`. MEMORY, and ARG for an out that is NULL, are the same on all ranks; ARG
 * also before MPI is initialized or after it is finalized, and for what is not an intracommunicator. */
NIB_API nib_status nib_comm_mpi_create(MPI_Comm mpi, nib_comm **out);

/* Before MPI_Finalize, on all ranks. Where MPI has failed, the duplicate is left as it is: to free it is a collective. */
NIB_API void nib_comm_mpi_destroy(nib_comm *comm);

#ifdef __cplusplus
}
#endif

#endif /* NIB_MPI_H */
