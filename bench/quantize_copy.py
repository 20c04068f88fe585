#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time `nib quantize` of a checkpoint beside a copy of it that is synced, in turns.

    quantize_copy.py NIB DIRECTORY [--rounds 11] [--cold] [--scale RULE]... [--imatrix FILE] [--check]

A copy is what nobody can do without: it reads all bytes and has them on the disk at the end. Both begin without their
output. --cold drops what the system holds of the input before each run (root only), as after a download that was too
large to stay in memory. --imatrix has runs by statistics of inputs too. Medians, least values, and the copy's median by
that of each run; --check exits 1 if a default run is slower than the copy, or one by statistics has less than 0.9 of its
speed.
"""
import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time


def drop_caches():
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("1\n")


def copy(source, out):
    """What cp and sync of its files do, without a process for each."""
    os.mkdir(out)
    names = [name for name in os.listdir(source) if os.path.isfile(os.path.join(source, name))]
    targets = [os.path.join(out, name) for name in names]
    subprocess.run(["cp", *[os.path.join(source, name) for name in names], out], check=True)
    subprocess.run(["sync", *targets], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("nib")
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--scale", action="append", default=[])
    parser.add_argument("--imatrix")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", default=None, help="a directory for outputs, on the disk of the input by default")
    options = parser.parse_args()
    base = options.out or os.path.dirname(os.path.abspath(options.directory))
    out = os.path.join(base, f"copy.py-{os.getpid()}")
    runs = {"cp and sync": None, "nib quantize": []}
    runs.update({f"nib quantize --scale {rule}": ["--scale", rule] for rule in options.scale})
    if options.imatrix:
        runs["nib quantize --imatrix"] = ["--imatrix", options.imatrix]
    times = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, words in runs.items():
            if options.cold:
                drop_caches()
            start = time.monotonic()
            if words is None:
                copy(options.directory, out)
            else:
                subprocess.run([options.nib, "quantize", "-q", *words, options.directory, out], check=True)
            times[name].append(time.monotonic() - start)
            shutil.rmtree(out)
    size = sum(entry.stat().st_size for entry in os.scandir(options.directory) if entry.is_file())
    base_time = statistics.median(times["cp and sync"])
    print(f"{size / 1e6:.0f} MB, {options.rounds} rounds, {'cold' if options.cold else 'warm'}, "
          f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:28} median {middle * 1e3:7.1f} ms, least {min(values) * 1e3:7.1f} ms, "
              f"a copy's time by it {base_time / middle:.2f}")
    plain, faults = statistics.median(times["nib quantize"]), []
    if plain > base_time:
        faults.append("slower than a copy")
    if options.imatrix and 0.9 * statistics.median(times["nib quantize --imatrix"]) > plain:
        faults.append("by statistics less than 0.9 of the speed without")
    if options.check and faults:
        print("; ".join(faults))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
