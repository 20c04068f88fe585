#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Find from which size on several threads pay: sh bench/threads.sh. Builds the library without its limit.
# The figure goes to NIB_ELEMENTS_PER_THREAD in src/tensor/quantize.h, with its reasons.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${CC:-cc}" -std=gnu11 -O2 -ffp-contract=off -fopenmp -DNIB_ELEMENTS_PER_THREAD=1 -Iinclude -Isrc bench/threads.c \
    src/*/*.c src/*/*/*.c -lm -pthread -o "$work/threads"
"$work/threads"
"$work/threads" 5000
