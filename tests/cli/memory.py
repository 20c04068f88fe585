#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""memory.py NIB DIRECTORY: commands over in and q of DIRECTORY in which, by its fail.so, one call of malloc fails: each in
turn, or so many of them. NIB_CAMPAIGN=1 takes all."""
import os
import subprocess
import sys

NIB, ROOT = sys.argv[1:]
MOST = 1 << 30 if os.environ.get("NIB_CAMPAIGN") == "1" else 120  # calls that fail, for a command
COMMANDS = ["inspect q", "inspect --json q", "check --json q", "check --json m", "compare --json in q",
            "compare -q --report out.json in q", "compare -q --report out.html in q", "conform --json vectors.safetensors",
            "quantize -q -n in none"]


def run(command, at):
    """Status, output and report; what is said of a failure; how many calls there were."""
    read, write = os.pipe()
    report = os.path.join(ROOT, "out." + ("json" if "json" in command.split("report")[-1] else "html"))
    done = subprocess.run([NIB, *command.split()], cwd=ROOT, pass_fds=[write], capture_output=True, check=False, timeout=60,
                          env={**os.environ, "LD_PRELOAD": ROOT + "/fail.so", "FAIL_AT": str(at), "FAIL_COUNT": str(write),
                               "OMP_NUM_THREADS": "1"})
    os.close(write)
    calls = os.read(read, 64)
    os.close(read)
    page = None
    if os.path.exists(report):
        with open(report, "rb") as file:
            page = file.read()
        os.remove(report)
    return (done.returncode, done.stdout, page), done.stderr, int(calls or 0)


def fault(command, wanted, usual, result, message):
    status, out, page = result
    if (result, message) == (wanted, usual) or b"libgomp: " in message or b"OMP: " in message:  # which end the process
        return None
    if status != 2:
        return f"is another result: {status}, {message}"
    if len(message.splitlines()) != 1:
        return f"says {message}"
    if command.startswith("conform") and b"out of memory" in out:  # a case that could not be checked
        return None
    return f"leaves a report {message}" if page is not None or (out and "--json" in command) else None


def main():
    faults = 0
    for command in COMMANDS:
        wanted, usual, calls = run(command, -1)
        if wanted[0] != 0 or not calls:
            sys.exit(f"FAILED: {command}: {wanted[0]}, {calls} calls, {usual}")
        step = max(1, calls / MOST)
        for i in range(min(calls, MOST)):
            wrong = fault(command, wanted, usual, *run(command, int(i * step))[:2])
            if wrong:
                print(f"FAILED: {command}: without call {int(i * step)} of {calls}: {wrong[:300]}")
                faults += 1
    print(f"{faults} faults")
    sys.exit(faults != 0)


main()
