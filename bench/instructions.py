#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count instructions per element of a few operations with valgrind's callgrind; JSON on stdout.

    instructions.py TOOL

A run has a fixed part (starting, filling, the floor's loops), which two sizes with the same number of calls tell apart
from the operation: only instructions within the library's call count.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

OPERATIONS = {"quantize.f32": "nib_quantize_into", "quantize.bf16": "nib_quantize_into",
              "columnwise.f32": "nib_quantize_into", "rht-columnwise.f32": "nib_quantize_into",
              "stochastic8.f32": "nib_quantize_into", "sweep.f32": "nib_quantize_into",
              "dequantize.f32": "nib_dequantize", "dequantize.bf16": "nib_dequantize"}
ROWS, COLS = 128, 4096
ISA = "avx2"  # the widest that valgrind knows


def count(tool, operation, function):
    """Inclusive instructions of one call, over its elements."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "callgrind.out")
        subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", f"--toggle-collect={function}",
                        tool, "bench", "--quick", "--no-scalar", "--json", "--shape", f"{ROWS}x{COLS}", operation],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       env={**os.environ, "NIB_MAX_ISA": ISA, "OMP_NUM_THREADS": "1"})
        with open(out, encoding="utf-8", errors="replace") as file:
            text = file.read()
    total = int(re.search(r"^(?:summary|totals): (\d+)", text, re.M).group(1))
    calls = sum(int(n) for n in re.findall(rf"^cfn=\(\d+\) {function}\n(?:cfi=.*\n|cob=.*\n)?calls=(\d+)", text, re.M))
    return total, calls


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    counts = {}
    for operation, function in OPERATIONS.items():
        total, calls = count(sys.argv[1], operation, function)
        if calls:
            counts[operation] = total / calls / (ROWS * COLS)
    json.dump({"isa": ISA, "counts": counts}, sys.stdout)


if __name__ == "__main__":
    main()
