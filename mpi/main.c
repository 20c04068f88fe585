/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - nib-mpi: the tool on several ranks that see the same files. Commands that write a checkpoint divide the work;
 * the others are done by rank 0.
 */
#include <string.h>

#include "cli.h"
#include "nib_mpi.h"
#include "run_plan.h"
#include "nib_shard.h"

static bool is_shared(const char *command)
{
    static const char *const shared[] = { "quantize", "convert", "dequantize", "repair" };
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        if (strcmp(command, shared[i]) == 0)
            return true;
    return false;
}

static int run_shared(int argc, char **argv)
{
    nib_comm *comm = NULL;
    const nib_status status = nib_comm_mpi_create(MPI_COMM_WORLD, &comm);
    if (status) {
        cli_error("the ranks cannot talk to each other over MPI");
        if (status == NIB_ERR_COMM) /* MPI has failed, and nothing else ends the ranks that wait for this one */
            MPI_Abort(MPI_COMM_WORLD, CLI_FAILED);
        return CLI_FAILED;
    }
    run_comm = comm;
    cli_silent = comm->rank != 0;
    int result = cli_main(argc, argv);
    /* Ranks that wait for the first meeting of the run must hear of one that will not come. */
    if (!run_entered && comm->agree(comm->context, result == CLI_FINE ? NIB_OK : NIB_ERR_ARG, 0))
        result = CLI_FAILED;
    if (comm->barrier(comm->context)) /* the same */
        MPI_Abort(MPI_COMM_WORLD, CLI_FAILED);
    nib_comm_mpi_destroy(comm);
    return result;
}

int main(int argc, char **argv)
{
    int rank = 0;
    sandbox_waived = "the ranks of nib-mpi talk over the network";
    if (MPI_Init(&argc, &argv) != MPI_SUCCESS)
        return CLI_FAILED;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int result = CLI_FINE;
    if (argc > 1 && is_shared(argv[1]))
        result = run_shared(argc, argv);
    else if (rank == 0)
        result = cli_main(argc, argv);
    MPI_Finalize();
    return result;
}
