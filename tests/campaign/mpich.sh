#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# libnib_mpi over MPICH: any MPI-3 should do, and two are more than one.

command -v mpicc.mpich >/dev/null 2>&1 && command -v mpirun.mpich >/dev/null 2>&1 || {
    echo "there is no MPICH: apt-get install mpich libmpich-dev"
    exit 77
}
set -e
cmake -S . -B build/mpich -DNIB_MPI=ON -DNIB_WERROR=ON -DMPI_C_COMPILER=mpicc.mpich
cmake --build build/mpich --parallel --target test_mpi test_mpi_pieces
for n in 1 2 3 4 7; do
    OMP_NUM_THREADS=1 mpirun.mpich -n $n build/mpich/mpi/test_mpi
done
for n in 1 2 3; do # it waits busily, and more often
    OMP_NUM_THREADS=1 mpirun.mpich -n $n build/mpich/mpi/test_mpi_pieces
done
