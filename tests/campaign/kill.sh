#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A thousand runs that are killed and resumed: tests/campaign/kill.py, with PyTorch for nib.calibrate and with nib-mpi
# (stage mpi builds it) where they are. NIB_KILLS asks for another number.
set -eu
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
root=$(cd "$(dirname "$0")/../.." && pwd)
for python in "$BUILD/venv/bin/python" python3; do
    "$python" -c 'import torch, transformers' 2>/dev/null && break
done
export PYTHONPATH=$root/python NIB_LIBRARY=$BUILD/libnib.so
build=$BUILD
[ ! -x "$BUILD/mpi/nib-mpi" ] || build=$BUILD/mpi
exec "$python" "$root/tests/campaign/kill.py" "$NIB" "$build" "${NIB_KILLS:-1000}"
