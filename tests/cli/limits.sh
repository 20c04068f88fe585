#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Memory and time follow the size of a file, not what it claims: tests/cli/limits.py; and the number of what is in it: counts.py.
# Threads that cannot be started are done without: OpenMP would end the process, with the status of an answer that is no.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
limit=48
nm "$NIB" 2>/dev/null | grep -qm1 __asan_init && limit=0 # a sanitizer has memory of its own
run 0 "${BUILD:?the folder of the build}/examples/make_checkpoint" "$work/model"
run 0 "$NIB" quantize -q "$work/model" "$work/threads"
for kilobytes in 12000 20000 60000; do # there may be no memory for more than threads
    [ $limit = 0 ] || (ulimit -v $kilobytes && OMP_NUM_THREADS=8 "$NIB" check -t 8 "$work/threads") >"$work/out" 2>"$work/err"
    status=$?
    [ $status = 0 ] || [ $status = 2 ] || fail "check in $kilobytes KB: exit $status"
done
# Nor of threads with stacks as large as OpenMP is told to make them.
for stack in OMP_STACKSIZE=1G "OMP_STACKSIZE= 1000 m" GOMP_STACKSIZE=1000000 OMP_STACKSIZE=999999T; do
    [ $limit = 0 ] || run 0 bash -c 'ulimit -v 3000000 && OMP_NUM_THREADS=8 exec env "$0" "$1" check -t 8 "$2"' "$stack" "$NIB" "$work/threads"
done
python3 tests/cli/limits.py "$NIB" "$work" $limit || failures=$((failures + 1))
python3 tests/cli/counts.py "$NIB" "$work" || failures=$((failures + 1))
[ $failures = 0 ]
