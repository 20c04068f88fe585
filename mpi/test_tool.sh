#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nib-mpi on one to three ranks writes what nib alone writes, and fails as one.
set -u
NIB=${NIB:?the path of the tool}
BUILD=${BUILD:?the build directory}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
    echo "FAILED: $1"
    failures=$((failures + 1))
}

"$BUILD/examples/make_checkpoint" --family demo --layers 2 --shards 3 "$work/in" || exit 1
"$NIB" quantize -q --shard-size 300K "$work/in" "$work/alone" || exit 1
"$NIB" dequantize -q "$work/alone" "$work/plain" || exit 1
for n in 1 2 3; do
    rm -rf "$work/out" "$work/plain$n"
    mpirun -n $n "$BUILD/nib-mpi" quantize --shard-size 300K "$work/in" "$work/out" >"$work/log" 2>&1 || fail "on $n ranks: $(cat "$work/log")"
    [ "$(grep -c quantized "$work/log")" = 1 ] || fail "on $n ranks there are other summaries than one: $(cat "$work/log")"
    diff -r "$work/alone" "$work/out" || fail "other bytes on $n ranks"
    mpirun -n $n "$BUILD/nib-mpi" dequantize -q "$work/out" "$work/plain$n" || fail "dequantizing on $n ranks"
    diff -r "$work/plain" "$work/plain$n" || fail "other numbers on $n ranks"
    if mpirun -n $n "$BUILD/nib-mpi" quantize "$work/in" "$work/out" >"$work/log" 2>&1; then fail "an output that exists is written over"; fi
    grep -q -- "--force replaces it" "$work/log" || fail "no word of --force: $(cat "$work/log")"
    if timeout 60 mpirun -n $n "$BUILD/nib-mpi" quantize "$work/nothing" "$work/x" >"$work/log" 2>&1; then fail "there is no input"; fi
done
# What is only looked at is no failure, and leaves nothing.
mpirun -n 2 "$BUILD/nib-mpi" quantize --dry-run "$work/in" "$work/dry" >"$work/log" 2>&1 || fail "a dry run: $(cat "$work/log")"
[ ! -e "$work/dry" ] || fail "a dry run wrote something"
# A rank that does not come to the first meeting, as it cannot read its input: the other hears of it.
timeout 60 mpirun -n 1 "$BUILD/nib-mpi" quantize "$work/in" "$work/half" : -n 1 "$BUILD/nib-mpi" quantize "$work/nothing" "$work/half" >"$work/log" 2>&1
result=$?
case $result in 0 | 124) fail "one rank has no input, and the tool ended with $result: $(cat "$work/log")" ;; esac
[ ! -e "$work/half" ] || fail "one rank has no input, and there is an output"
# Where MPI fails on one rank, the others wait for it; the tool ends all of them.
cat >"$work/failing.c" <<'END'
#include <mpi.h>
int MPI_Allreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    static int calls;
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank == 1 && ++calls == 3 ? MPI_ERR_OTHER : PMPI_Allreduce(from, to, count, type, op, comm);
}
END
mpicc -shared -fPIC -o "$work/failing.so" "$work/failing.c" || fail "mpicc"
timeout 60 mpirun -n 2 env LD_PRELOAD="$work/failing.so" "$BUILD/nib-mpi" quantize "$work/in" "$work/y" >"$work/log" 2>&1
result=$?
case $result in 0 | 124) fail "MPI failed on one rank, and the tool ended with $result: $(cat "$work/log")" ;; esac
[ "$(mpirun -n 2 "$BUILD/nib-mpi" version | wc -l)" = 1 ] || fail "both ranks say the version"
[ "$failures" = 0 ] || exit 1
echo "all fine"
