#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nib's products and torch's in turns in one process: bench/products_torch.py [THREADS]. Needs PyTorch and the package nib.

GFLOP/s of a 4096x4096 weight by M rows from weights that no cache holds: NVFP4 by nib, BF16 and FP32 by torch (oneDNN,
OpenBLAS), whose weights need no unpacking. One thread by its processor time, several by the clock. NIB_MAX_ISA holds nib to an
instruction set, not torch. Returns 1 where a bar does not hold: at M = 512 by AMX 2.5 times torch's FP32 and 0.7 of its BF16.
"""
import os
import statistics
import subprocess
import sys
import time

N = K = 4096
ROWS = (1, 4, 16, 64, 512)
BARS = {"FP32": (2.5, 4.0), "BF16": (0.7, 1.2)}  # of W4A4 at M = 512 by AMX: the floor, and the goal
TURNS, SECONDS, PAUSE = 5, 0.1, 0.05  # threads that wait for more work are still busy for a while
CACHE = 512 << 20  # bytes that are more than one holds


def measure(threads):
    """Lines of a table, and whether the bars hold. The environment has the number of threads, which both go by."""
    import numpy as np
    import torch

    import nib

    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    quantizer = nib.Quantizer(columnwise=False)
    plain = np.random.default_rng(1).standard_normal((N, K), dtype=np.float32)

    def weights(make, nbytes):
        kept = [make() for _ in range(CACHE // nbytes + 1)]
        turn = iter(range(1 << 30))
        return lambda: kept[next(turn) % len(kept)]

    packed = weights(lambda: nib.quantize(plain, quantizer), N * K * 9 // 16)
    theirs = {name: weights(torch.from_numpy(plain).to(dtype).clone, N * K * dtype.itemsize)
              for name, dtype in (("BF16", torch.bfloat16), ("FP32", torch.float32))}

    def burst(call):
        times, begin = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < SECONDS:
            start = clock()
            call()
            times.append(clock() - start)
        return statistics.median(times)

    held = True
    for m in ROWS:
        x = np.random.default_rng(m).standard_normal((m, K), dtype=np.float32)
        codes, y = nib.quantize(x, quantizer), np.zeros((m, N), np.float32)
        rows = {name: torch.from_numpy(x).to(dtype) for name, dtype in (("BF16", torch.bfloat16), ("FP32", torch.float32))}
        calls = {"W4A4": lambda codes=codes, y=y: nib.gemm(codes, packed(), out=y, beta=0.0),
                 "W4A16": lambda x=x, y=y: nib.gemm(x, packed(), out=y, beta=0.0),
                 "BF16": lambda rows=rows: torch.nn.functional.linear(rows["BF16"], theirs["BF16"]()),
                 "FP32": lambda rows=rows: torch.nn.functional.linear(rows["FP32"], theirs["FP32"]())}
        times = {name: [] for name in calls}
        for turn in range(TURNS + 1):
            for name, call in calls.items():
                time.sleep(PAUSE)
                times[name].append(burst(call))
        speed = {name: 2e-9 * m * N * K / statistics.median(t[1:]) for name, t in times.items()}
        print(f"{threads:7} {m:4} " + " ".join(f"{speed[name]:7.0f}" for name in calls) +
              f" {speed['W4A4'] / speed['BF16']:10.2f} {speed['W4A16'] / speed['BF16']:10.2f} {speed['W4A4'] / speed['FP32']:10.2f}", flush=True)
        for name, (floor, goal) in BARS.items():
            if m == 512 and nib.isa() == "amx":
                ratio = speed["W4A4"] / speed[name]
                held &= ratio >= floor
                print(f"        M = 512: {ratio:.2f} times torch's {name} (at least {floor}, goal {goal})"
                      f"{'' if ratio >= floor else ': DOES NOT HOLD'}", flush=True)
    return held


def main():
    if os.environ.get("NIB_PRODUCTS_THREADS"):
        return int(not measure(int(os.environ["NIB_PRODUCTS_THREADS"])))
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0))
    import torch

    import nib
    print(f"nib by {nib.isa()}, torch {torch.__version__}; GFLOP/s")
    print(f"{'threads':>7} {'M':>4} {'W4A4':>7} {'W4A16':>7} {'BF16':>7} {'FP32':>7} {'W4A4/BF16':>10} {'W4A16/BF16':>10} {'W4A4/FP32':>10}", flush=True)
    failed = False
    for count in sorted({1, threads}):
        env = {**os.environ, "OMP_NUM_THREADS": str(count), "NIB_PRODUCTS_THREADS": str(count)}
        failed |= subprocess.run([sys.executable, __file__], env=env, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
