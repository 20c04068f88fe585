/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_mpi.h - nib's communicator over MPI: libnib_mpi, any MPI-3. The rules of nib.h hold. Sentences are those of the
 * shared libnib, which libnib_mpi is linked with.
 *
 * MPI is initialized and finalised by the caller. A communicator's calls come from one thread at a time: with several
 * threads, initialize MPI for as much (MPI_THREAD_SERIALIZED or more), and give each thread that runs collectives a
 * communicator of its own.
 */
#ifndef NIB_MPI_H
#define NIB_MPI_H

#include <mpi.h>

#include "nib.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks of an intracommunicator. It is duplicated (collectively), so that nib's messages and the caller's cannot
 * meet, and on the duplicate MPI's errors are returned as NIB_ERR_COMM instead of ending the program. COMM, MEMORY, the
 * same on all ranks; ARG before MPI is initialized or after it is finalised, and for what is no intracommunicator. */
NIB_API nib_status nib_comm_mpi_create(MPI_Comm mpi, nib_comm **out);

/* Before MPI_Finalize, on all ranks. */
NIB_API void nib_comm_mpi_destroy(nib_comm *comm);

#ifdef __cplusplus
}
#endif

#endif /* NIB_MPI_H */
