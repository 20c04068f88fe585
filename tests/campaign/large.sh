#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# More than 2^31 elements: tests/campaign/large.c against the library in $BUILD. Needs 2 GB and some minutes.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
available=$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)
if [ "$available" -lt 2500 ]; then
    echo "needs 2500 MB of memory, there are $available"
    exit 77
fi
"${CC:-cc}" -std=gnu11 -O2 -Wall -Wextra -Wpedantic -Iinclude tests/campaign/large.c "$BUILD/libnib.so" \
    -Wl,-rpath,"$(realpath "$BUILD")" -o "$folder/large"
"$folder/large"
