#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count instructions per element of the main operations; JSON on stdout.

    instructions.py COUNT                       the counts; COUNT is the program of bench/count.c
    instructions.py COUNT --compare FILE.json   the same, and exit 1 if one has grown by more than 2 %
    instructions.py COUNT --where ISA NAME      where the instructions of an operation are, in the disassembly

Unlike times, counts do not depend on what else the machine does. They do depend on the compiler: where it is not the
one of the file, nothing is compared. A count is that of a larger matrix less that of a smaller one, by the elements
that it has more, so that a call's own cost is not in it. valgrind's callgrind counts the scalar and the AVX2 kernels.
It has no AVX-512: there the processor stops after each instruction, on a machine that has them.
"""
import collections
import json
import os
import re
import subprocess
import sys
import tempfile

ROWS = ["quantize.f32", "quantize.bf16", "amax.f32", "amax.bf16", "whole.f32", "stochastic8.f32", "stochastic24.f32",
        "4over6.f32", "sweep.f32", "weighted.f32", "dequantize.f32", "dequantize.bf16"]
COLUMNS = ["columnwise.f32", "rht-columnwise.f32", "both-rht.f32"]
# Stops are slow, so matrices are small. Rows count the same whatever their number, from the 16 of a band of scales on;
# columns are cut into panels of 256 rows, and what a first or a lower one costs is not what the others do.
SHAPES = {"rows": ((16, 1024), (32, 1024)), "columns": ((256, 128), (512, 128))}
TOLERANCE = 1.02
SLACK = 0.005  # instructions per element: of operations that do next to nothing


class CannotCount(Exception):
    pass


def words(shapes, names):
    return [f"{rows}x{cols}" for rows, cols in shapes] + ["--", *names]


def run(command, isa):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={**os.environ, "NIB_MAX_ISA": isa, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise CannotCount(f"{' '.join(command[:3])}: exit {done.returncode}: {done.stderr.decode()[-300:].strip()}")
    return done.stdout.decode().splitlines()


def facts_of(program, isa):
    """What the program says of itself under an instruction set: its compiler, and the set that it took."""
    facts = dict(line.split(" ", 1) for line in run([program, "16x16", "--", "amax.f32"], isa)[:2])
    return facts["compiler"], facts["isa"]


def callgrind(command, isa):
    """(line, instructions) of each counted call, whose line begins with "call": valgrind writes a file after each."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "calls")
        lines = run(["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}", "--toggle-collect=counted_call",
                     "--dump-after=counted_call", *command], isa)
        for number, line in enumerate((line for line in lines if line.startswith("call ")), 1):
            with open(f"{out}.{number}", encoding="utf-8", errors="replace") as file:
                yield line, int(re.search(r"^totals: (\d+)", file.read(), re.M)[1])


def by_callgrind(program, shapes, names, isa):
    """(operation, instructions) of each counted call."""
    for line, total in callgrind([program, *words(shapes, names)], isa):
        yield line.split()[1], total


def stops_of(program, shapes, names, isa):
    """(operation, how often each address was passed) of each counted call; address 0 is what is not the program's."""
    calls = []
    for line in run([program, "--steps", *words(shapes, names)], isa):
        first, rest = line.split(" ", 1)
        if first == "call":
            calls.append((rest.split()[0], collections.Counter()))
        elif calls:
            calls[-1][1][int(first, 16)] += int(rest)
    return calls


def by_steps(program, shapes, names, isa):
    for name, stops in stops_of(program, shapes, names, isa):
        if len(stops) < 100:
            raise CannotCount("the processor does not stop after each instruction here")
        yield name, sum(stops.values()) - stops[0]  # which memcpy libc takes differs from machine to machine


def difference(shapes):
    (rows, cols), (more_rows, more_cols) = shapes
    return more_rows * more_cols - rows * cols


def counts_of(program, isa):
    """Instructions per element by operation."""
    counts = {}
    for names, shapes in ((ROWS, SHAPES["rows"]), (COLUMNS, SHAPES["columns"])):
        totals = collections.defaultdict(list)
        for name, total in (by_steps if isa == "avx512" else by_callgrind)(program, shapes, names, isa):
            totals[name].append(total)
        for name in names:
            counts[name] = round((totals[name][1] - totals[name][0]) / difference(shapes), 3)
    return counts


# ---- Where they are ----


def disassembly(program):
    """Address to (function, instruction), in order."""
    lines = subprocess.run(["objdump", "-d", "--no-show-raw-insn", program], check=True, stdout=subprocess.PIPE).stdout
    function, found = "", {}
    for line in lines.decode(errors="replace").splitlines():
        heading = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        instruction = re.match(r" *([0-9a-f]+):\t(.*)", line)
        if heading:
            function = heading[1]
        elif instruction:
            found[int(instruction[1], 16)] = (function, re.sub(r"\s+", " ", instruction[2]).strip())
    return found


def pieces_of(code, stops):
    """Instructions that follow each other and are passed equally often: (function, times, their addresses)."""
    pieces = []
    before = None
    for address, (function, _) in code.items():
        times = stops.get(address, 0)
        if times and before == (function, times):
            pieces[-1][2].append(address)
        elif times:
            pieces.append((function, times, [address]))
        before = (function, times)
    return pieces


def show_where(program, isa, name):
    shapes = SHAPES["columns" if name in COLUMNS else "rows"]
    (_, few), (_, many) = stops_of(program, shapes, [name], isa)
    stops = {address: many[address] - few[address] for address in many | few if many[address] != few[address]}
    code, elements = disassembly(program), difference(shapes)
    unknown = sum(times for address, times in stops.items() if address not in code)
    pieces = pieces_of(code, stops)
    functions = collections.Counter()
    for function, times, addresses in pieces:
        functions[function] += times * len(addresses)
    print(f"{name}, {isa}: {sum(stops.values()) / elements:.3f} instructions per element, {unknown / elements:.3f} of them "
          "in other libraries")
    for function, total in functions.most_common():
        if total * 200 < sum(stops.values()):
            continue
        print(f"{total / elements:8.3f}  {function}")
        for owner, times, addresses in pieces:
            if owner == function and times * len(addresses) * 100 > sum(stops.values()):
                print(f"{times * len(addresses) / elements:12.3f}  {len(addresses)} instructions, each {times / elements:.4f} "
                      f"times per element: {addresses[0]:x} {code[addresses[0]][1]} ... {addresses[-1]:x} "
                      f"{code[addresses[-1]][1]}")
    return 0


# ---- Comparison ----


def compare(now, path):
    with open(path, encoding="utf-8") as file:
        recorded = json.load(file)
    for what in ("compiler", "shape"):
        if recorded[what] != now[what]:
            print(f"not compared: recorded with {recorded[what]}", file=sys.stderr)
            return 0
    grown = [f"{name}, {isa}: {counted:.3f} instructions per element, {recorded['counts'][isa][name]:.3f} recorded"
             for isa, counts in now["counts"].items() for name, counted in counts.items()
             if counted > recorded["counts"].get(isa, {}).get(name, float("inf")) * TOLERANCE + SLACK]
    print("\n".join(grown), file=sys.stderr)
    return 1 if grown else 0


def described(shapes):
    small, large = ("x".join(str(n) for n in shape) for shape in shapes)
    return f"{large} less {small}"


def main():
    arguments = sys.argv[2:]
    if not sys.argv[1:] or [*arguments[:1], len(arguments)] not in ([0], ["--compare", 2], ["--where", 3]):
        sys.exit(__doc__)
    program = os.path.abspath(sys.argv[1])
    if arguments[:1] == ["--where"]:
        return show_where(program, *arguments[1:])
    now = {"compiler": "", "shape": f"{described(SHAPES['rows'])}, columns {described(SHAPES['columns'])}", "counts": {}}
    for isa in ("scalar", "avx2", "avx512"):
        now["compiler"], taken = facts_of(program, isa)
        if taken != isa:
            continue
        try:
            now["counts"][isa] = counts_of(program, isa)
        except CannotCount as why:
            print(f"{isa} is not counted: {why}", file=sys.stderr)
    print(json.dumps(now, indent=1))
    return compare(now, arguments[1]) if arguments else 0


if __name__ == "__main__":
    sys.exit(main())
