#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Products on a GPU beside cuBLAS's of BF16 in the same run: bench/cuda_products.py. Needs PyTorch, a GPU, libnib_cuda.

Microseconds of graphs that are replayed in alternation, medians, from weights that no cache holds. W4A16 is an NVFP4
weight by BF16 values, W4A4 by NVFP4. Returns 1 where a bar does not hold.
"""
import statistics
import sys

import torch

import nib.torch as nt
from nib.torch import products

SHAPES = (28672, 8192), (4096, 14336)
FEW, MANY = (1, 2, 4, 8, 16), (32, 64, 128, 512, 4096)
BARS = {1: 2.3, 2: 2.3, 4: 2.3, 16: 1.1}  # times cuBLAS, of W4A16 on the first shape
OVERHEAD = 0.13  # over cuBLAS at 4096 rows
REPLAYS = 16  # the first is not counted
CACHE = 200 << 20  # bytes that are more than it holds


def graph_of(call, weights, m):
    """A graph of calls over all weights, and how many there are in it."""
    repeat = max(1, (20 if m <= 64 else 4) // len(weights))
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights * repeat:
            call(weight)
    return graph, repeat * len(weights)


def replay(graph, calls):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def measure(n, k, m, plain, quantized):
    """{kind: microseconds} of M rows by weights that are plain, and the same quantized. In alternation: a GPU that has
    multiplied for a while runs slower than one that comes from rest."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    codes = nt.NVFP4Quantizer(columnwise=False)(x)
    graphs = {"cuBLAS": graph_of(lambda w: torch.matmul(x, w.t()), plain, m),
              "W4A16": graph_of(lambda w: products.multiply(x, w, dtype=torch.bfloat16), quantized, m),
              "W4A4": graph_of(lambda w: products.multiply(codes, w, dtype=torch.bfloat16), quantized, m)}
    times = [{kind: replay(*graph) for kind, graph in graphs.items()} for _ in range(REPLAYS)][1:]
    return {kind: statistics.median(time[kind] for time in times) for kind in graphs}


def weights_of(n, k):
    count = CACHE // (n * k * 9 // 16) + 1
    plain = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    quantizer = nt.NVFP4Quantizer(columnwise=False)
    return plain, [quantizer(w) for w in plain]


def check(n, k, m, times):
    """The bars of a line: (what, found, bar, whether it holds)."""
    faster, slower = times["cuBLAS"] / times["W4A16"], times["W4A16"] / times["cuBLAS"] - 1
    if m in BARS and (n, k) == SHAPES[0]:
        yield f"W4A16 {n}x{k}, M = {m}: times cuBLAS", faster, BARS[m], faster >= BARS[m]
    if m == MANY[-1]:
        yield f"W4A16 {n}x{k}, M = {m}: over cuBLAS", slower, OVERHEAD, slower <= OVERHEAD


def main():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'shape':12} {'M':>5} {'cuBLAS BF16':>12} {'W4A16':>10} {'times':>6} {'W4A4':>10} {'times':>6}")
    bars = []
    for n, k in SHAPES:
        plain, quantized = weights_of(n, k)
        for m in FEW + MANY:
            times = measure(n, k, m, plain, quantized)
            bars += check(n, k, m, times)
            base = times["cuBLAS"]
            print(f"{n}x{k:<6} {m:5} {base:9.1f} us {times['W4A16']:7.1f} us {base / times['W4A16']:6.2f} "
                  f"{times['W4A4']:7.1f} us {base / times['W4A4']:6.2f}", flush=True)
        del plain, quantized
    for what, found, bar, holds in bars:
        print(f"{what}: {found:.2f} (bar {bar}){'' if holds else ': DOES NOT HOLD'}")
    return 0 if all(bar[3] for bar in bars) else 1


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
