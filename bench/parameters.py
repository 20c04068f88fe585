#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Instructions per parameter of a sharded cast of few parameters and of many, counted by valgrind's callgrind.

    parameters.py PARAMETERS                    PARAMETERS is the program of bench/parameters.c

The parameters are equally small, so that what grows with their number is the plan of the cast: as it is sorted, by a
little. More than that (exit 1) is work over pairs of parameters.
"""
import collections
import os
import sys

from instructions import CannotCount, callgrind

SIZES = (10000, 100000)
MOST = 1.25  # times as many, for ten times the parameters


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    counts = collections.defaultdict(dict)
    try:
        for line, total in callgrind([os.path.abspath(sys.argv[1]), *map(str, SIZES)], "avx2"):
            _call, rule, n = line.split()
            counts[rule][int(n)] = total / int(n)
    except CannotCount as why:
        sys.exit(f"instructions are not counted: {why}")
    grown = False
    for rule, by_size in counts.items():
        few, many = (by_size[n] for n in SIZES)
        print(f"{rule}: {few:.0f} instructions per parameter of {SIZES[0]}, {many:.0f} of {SIZES[1]}")
        grown = grown or many > few * MOST
    return 1 if grown or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
