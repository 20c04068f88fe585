#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count instructions per element of the main operations; JSON on stdout.

    instructions.py TOOL                       the counts
    instructions.py TOOL --compare FILE.json   the same, and exit 1 if one has grown by more than 2 %

Unlike times, counts do not depend on what else the machine does. They do depend on the compiler: where it is not the
one of the file, nothing is compared. valgrind's callgrind counts the scalar and the AVX2 kernels. It has no AVX-512:
those are stepped through, one instruction after the other, on a machine that has them.
"""
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

OPERATIONS = ["quantize.f32", "quantize.bf16", "amax.f32", "whole.f32", "columnwise.f32", "rht-columnwise.f32",
              "both-rht.f32", "stochastic8.f32", "4over6.f32", "sweep.f32", "dequantize.f32", "dequantize.bf16"]
SHAPES = {"scalar": (16, 1024), "avx2": (256, 1024), "avx512": (256, 128)}  # steps are slow
TOLERANCE = 1.02
SLACK = 0.02  # instructions per element: what a call costs by itself shows in operations that do next to nothing


def function_of(operation):
    return {"amax": "nib_group_amax", "dequantize": "nib_dequantize"}.get(operation.split(".")[0], "nib_quantize_into")


def command(tool, operation, isa):
    rows, cols = SHAPES[isa]
    return [tool, "bench", "--quick", "--no-scalar", "--json", "--shape", f"{rows}x{cols}", operation]


def environment(isa):
    return {**os.environ, "NIB_MAX_ISA": isa, "OMP_NUM_THREADS": "1"}


def facts_of(tool, isa):
    """What the tool says of itself under an instruction set: its compiler, and the set that it took."""
    report = subprocess.run(command(tool, "amax.f32", isa), check=True, stdout=subprocess.PIPE, env=environment(isa))
    report = json.loads(report.stdout)
    return report["compiler"], report["isa"]


def by_callgrind(tool, operation, isa):
    """Instructions per element within the library's call."""
    function = function_of(operation)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "callgrind.out")
        subprocess.run(["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}",
                        f"--toggle-collect={function}", *command(tool, operation, isa)],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(isa))
        with open(out, encoding="utf-8", errors="replace") as file:
            text = file.read()
    total = int(re.search(r"^totals: (\d+)", text, re.M).group(1))
    # Calls from outside are not collected, but those that the function itself makes are: its first is made once.
    number = re.search(rf"fn=\((\d+)\) {function}$", text, re.M).group(1)  # later only the number is written
    block = re.search(rf"^fn=\({number}\)(?: .*)?\n(?:.*\n)*?calls=(\d+)", text, re.M)
    rows, cols = SHAPES[isa]
    return total / int(block.group(1)) / (rows * cols)


# ---- Single steps ----

PEEKTEXT, POKETEXT, PEEKUSER, POKEUSER, CONT, STEP, TRACEME, KILL = 1, 4, 3, 6, 7, 9, 0, 8
RSP, RIP = 19 * 8, 16 * 8  # places in struct user

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong]


def ptrace(request, child, address=0, data=0):
    ctypes.set_errno(0)
    result = libc.ptrace(request, child, address, data)
    if result == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), "ptrace")
    return result & 0xFFFFFFFFFFFFFFFF


def wait_for(child):
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGTRAP:
        raise OSError(0, f"the tool ended or stopped otherwise ({status})")


def address_of(tool, function, child):
    symbols = subprocess.run(["nm", tool], check=True, stdout=subprocess.PIPE).stdout.decode()
    offset = int(re.search(rf"^([0-9a-f]+) [Tt] {function}$", symbols, re.M).group(1), 16)
    with open(f"/proc/{child}/maps", encoding="utf-8") as file:
        first = file.readline()
    kind = subprocess.run(["readelf", "-h", tool], check=True, stdout=subprocess.PIPE).stdout.decode()
    return offset + (int(first.split("-")[0], 16) if "DYN" in kind else 0)


def by_steps(tool, operation, isa):
    """The same, by stepping through the second call: the first one makes the operation's memory."""
    child = os.fork()
    if child == 0:
        null = os.open("/dev/null", os.O_WRONLY)
        os.dup2(null, 1)
        libc.ptrace(TRACEME, 0, 0, 0)
        os.execve(tool, command(tool, operation, isa), environment(isa))
    try:
        wait_for(child)
        start = address_of(tool, function_of(operation), child)
        for _ in range(2):
            word = ptrace(PEEKTEXT, child, start)
            ptrace(POKETEXT, child, start, word & ~0xFF | 0xCC)
            ptrace(CONT, child)
            wait_for(child)
            ptrace(POKETEXT, child, start, word)
            ptrace(POKEUSER, child, RIP, start)
            ptrace(STEP, child)  # past the breakpoint's place
            wait_for(child)
        outer = ptrace(PEEKUSER, child, RSP)
        steps = 1
        # The call is over when the stack is above its place of return; what it pushed first may have moved it down.
        entry = max(outer, outer + 8)
        while ptrace(PEEKUSER, child, RSP) <= entry:
            ptrace(STEP, child)
            wait_for(child)
            steps += 1
    finally:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    rows, cols = SHAPES[isa]
    return steps / (rows * cols)


# ---- Comparison ----


def compare(now, path):
    with open(path, encoding="utf-8") as file:
        recorded = json.load(file)
    if recorded["compiler"] != now["compiler"]:
        print(f"not compared: recorded with {recorded['compiler']}", file=sys.stderr)
        return 0
    grown = [f"{name}, {isa}: {counted:.3f} instructions per element, {recorded['counts'][isa][name]:.3f} recorded"
             for isa, counts in now["counts"].items() for name, counted in counts.items()
             if counted > recorded["counts"].get(isa, {}).get(name, float("inf")) * TOLERANCE + SLACK]
    print("\n".join(grown), file=sys.stderr)
    return 1 if grown else 0


def main():
    if len(sys.argv) not in (2, 4) or (len(sys.argv) == 4 and sys.argv[2] != "--compare"):
        sys.exit(__doc__)
    tool = os.path.abspath(sys.argv[1])
    now = {"compiler": "", "shape": "x".join(str(n) for n in SHAPES["avx2"]), "counts": {}}
    for isa in SHAPES:
        now["compiler"], taken = facts_of(tool, isa)
        if taken != isa:
            continue
        count = by_steps if isa == "avx512" else by_callgrind
        try:
            now["counts"][isa] = {operation: round(count(tool, operation, isa), 3) for operation in OPERATIONS}
        except OSError as error:  # a place where nothing may be traced
            print(f"{isa} is not counted: {error}", file=sys.stderr)
    print(json.dumps(now, indent=1))
    return compare(now, sys.argv[3]) if len(sys.argv) == 4 else 0


if __name__ == "__main__":
    sys.exit(main())
