#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch's products beside those of `nib bench --gemm`, on the same processors in the same run: bench/products_torch.py NIB [THREADS].

GFLOP/s of a 4096x4096 weight by M rows: NVFP4 by nib, BF16 and FP32 by torch (oneDNN, OpenBLAS), whose weights need no unpacking.
One thread by its processor time, several by the clock. NIB_MAX_ISA holds nib to an instruction set, not torch. Returns 1 where a
bar does not hold: 2.5 times torch's FP32 and 0.7 of its BF16 at M = 512 on all threads, where there is AMX.
"""
import json
import os
import subprocess
import sys
import time

import torch

N = K = 4096
BARS = {"f32": (2.5, 4.0), "bf16": (0.7, 1.2)}  # of W4A4 at M = 512 by AMX: the floor, and the goal


def seconds(call, threads, least=0.3):
    """The median of many calls."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    call()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < least and len(times) < 200):
        start = clock()
        call()
        times.append(clock() - start)
    return sorted(times)[len(times) // 2]


def by_torch(dtype, m, threads):
    """GFLOP/s over weights that no cache holds."""
    torch.set_num_threads(threads)
    weights = [torch.randn(N, K).to(dtype) for _ in range(512 * 2 ** 20 // (N * K * dtype.itemsize))]
    x, turn = torch.randn(m, K).to(dtype), iter(range(1 << 30))
    return 2e-9 * m * N * K / seconds(lambda: torch.nn.functional.linear(x, weights[next(turn) % len(weights)]), threads)


def main():
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else len(os.sched_getaffinity(0))
    command = [sys.argv[1], "bench", "--gemm", "--json", "--shape", f"{N}x{K}", "--threads", str(threads)]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    found = {(r["product"], r["m"], r["threads"]): r["gflop_s"] for r in report["gemm"]}
    print(f"{report['machine']}, nib by {report['isa']}, torch {torch.__version__}; GFLOP/s")
    print(f"{'threads':>7} {'M':>4} {'W4A4':>7} {'W4A16':>7} {'BF16':>7} {'FP32':>7} {'W4A4/BF16':>10} {'W4A16/BF16':>10} {'W4A4/FP32':>10}")
    failed = False
    for count in sorted({key[2] for key in found}):
        for m in sorted({key[1] for key in found}):
            ours = [found[name, m, count] for name in ("W4A4", "W4A16")]
            theirs = {name: by_torch(dtype, m, count) for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32))}
            print(f"{count:7} {m:4} {ours[0]:7.0f} {ours[1]:7.0f} {theirs['bf16']:7.0f} {theirs['f32']:7.0f} "
                  f"{ours[0] / theirs['bf16']:10.2f} {ours[1] / theirs['bf16']:10.2f} {ours[0] / theirs['f32']:10.2f}", flush=True)
            for name, (floor, goal) in BARS.items():
                if m == 512 and report["isa"] == "amx" and count == threads:
                    ratio = ours[0] / theirs[name]
                    failed |= ratio < floor
                    print(f"        M = 512: {ratio:.2f} times torch's {name} (at least {floor}, goal {goal})"
                          f"{'' if ratio >= floor else ': DOES NOT HOLD'}")
    return int(failed)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
