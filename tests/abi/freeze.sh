#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copies the public headers to tests/abi/MAJOR.MINOR/, where they stay as they are once that version is released: callers
# compiled with them are served by every later library of the same soname. tests/hygiene.py compares the two until then.

set -e
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^#define NIB_VERSION "\([0-9]*\.[0-9]*\)\.0"$/\1/p' include/nib.h)
if [ -z "$version" ]; then
    echo "freeze.sh: NIB_VERSION is not MAJOR.MINOR.0: its headers are frozen already" >&2
    exit 1
fi
mkdir -p "tests/abi/$version"
for header in include/*.h; do
    [ "$header" = include/nib_mpi.h ] || cp "$header" "tests/abi/$version/" # it has no struct, and needs an MPI
done
