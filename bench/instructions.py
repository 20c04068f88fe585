#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count instructions per element of the main operations with valgrind's callgrind; JSON on stdout.

    instructions.py TOOL                       the counts
    instructions.py TOOL --compare FILE.json   the same, and exit 1 if one has grown by more than 2 %

Unlike times, counts do not depend on what else the machine does. They do depend on the compiler: where it is not the one of
the file, nothing is compared. valgrind has no AVX-512, so that these are the kernels of AVX2.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

OPERATIONS = {"quantize.f32": "nib_quantize_into", "quantize.bf16": "nib_quantize_into",
              "whole.f32": "nib_quantize_into", "columnwise.f32": "nib_quantize_into",
              "rht-columnwise.f32": "nib_quantize_into", "both-rht.f32": "nib_quantize_into",
              "stochastic8.f32": "nib_quantize_into", "4over6.f32": "nib_quantize_into",
              "sweep.f32": "nib_quantize_into", "dequantize.f32": "nib_dequantize",
              "dequantize.bf16": "nib_dequantize"}
ROWS, COLS = 128, 4096
ISA = "avx2"
TOLERANCE = 1.02


def count(tool, operation, function):
    """Instructions per element within the library's call; and the compiler."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "callgrind.out")
        report = subprocess.run(["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}",
                                 f"--toggle-collect={function}", tool, "bench", "--quick", "--no-scalar", "--json",
                                 "--shape", f"{ROWS}x{COLS}", operation],
                                check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                env={**os.environ, "NIB_MAX_ISA": ISA, "OMP_NUM_THREADS": "1"}).stdout
        with open(out, encoding="utf-8", errors="replace") as file:
            text = file.read()
    total = int(re.search(r"^totals: (\d+)", text, re.M).group(1))
    # Calls from outside are not collected, but those that the function itself makes are: its first is made once.
    number = re.search(rf"fn=\((\d+)\) {function}$", text, re.M).group(1)  # later only the number is written
    block = re.search(rf"^fn=\({number}\)(?: .*)?\n(?:.*\n)*?calls=(\d+)", text, re.M)
    report = json.loads(report)
    return total / int(block.group(1)) / (ROWS * COLS), report["compiler"], report["isa"]


def compare(now, path):
    with open(path, encoding="utf-8") as file:
        recorded = json.load(file)
    if recorded["compiler"] != now["compiler"] or recorded["isa"] != now["isa"]:
        print(f"not compared: recorded with {recorded['compiler']}", file=sys.stderr)
        return 0
    grown = [f"{name}: {counted:.3f} instructions per element, {recorded['counts'][name]:.3f} recorded"
             for name, counted in now["counts"].items()
             if counted > recorded["counts"].get(name, float("inf")) * TOLERANCE]
    print("\n".join(grown), file=sys.stderr)
    return 1 if grown else 0


def main():
    if len(sys.argv) not in (2, 4) or (len(sys.argv) == 4 and sys.argv[2] != "--compare"):
        sys.exit(__doc__)
    counts, compiler, isa = {}, "", ""
    for operation, function in OPERATIONS.items():
        counted, compiler, isa = count(sys.argv[1], operation, function)
        counts[operation] = round(counted, 3)
    now = {"isa": isa, "compiler": compiler, "counts": counts}
    print(json.dumps(now, indent=1))
    return compare(now, sys.argv[3]) if len(sys.argv) == 4 else 0


if __name__ == "__main__":
    sys.exit(main())
