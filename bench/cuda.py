#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch.compile beside libnib_cuda: bench/cuda.py NIB [LIBNIB_CUDA]. Needs PyTorch and a GPU.

Prints microseconds of what torch.compile makes of NVFP4 with a given amax, with an amax that is looked for, and of fake
quantization, as replayed graphs, beside the figures of `nib bench --device cuda` for the same shapes.
"""
import json
import os
import subprocess
import sys

import torch


def quantize(x, amax):
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // 16, 16)
    scale = 2688.0 / amax
    s = (blocks.abs().amax(-1) * (scale * (1.0 / 6.0))).clamp(max=448.0).to(torch.float8_e4m3fn)
    y = blocks * (1.0 / (s.float() * (1.0 / scale))).unsqueeze(-1)
    m = y.abs()
    codes = ((m > 0.25).to(torch.uint8) + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5.0)) \
        | (torch.signbit(y).to(torch.uint8) << 3)
    pairs = codes.view(rows, cols // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), s.view(torch.uint8)


def quantize_whole(x, amax):
    return quantize(x, x.abs().max().float())


def fake(x, amax):
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // 16, 16)
    scale = 2688.0 / amax
    s = (blocks.abs().amax(-1) * (scale * (1.0 / 6.0))).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    y = blocks * (1.0 / (s * (1.0 / scale))).unsqueeze(-1)
    m = y.abs().clamp(max=6.0)
    step = torch.where(m < 2, 0.5, torch.where(m < 4, 1.0, 2.0))
    q = torch.copysign(torch.round(m / step) * step, y) * (s * amax * (1.0 / 2688.0)).unsqueeze(-1)
    return q.view(rows, cols).to(x.dtype)


def graph_microseconds(call, repeat=10, replays=15):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[replays // 2] * 1e3 / repeat


def event_microseconds(call, repeat=20, tries=5):
    times = []
    for _ in range(tries):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times) * 1e3 / repeat


def main():
    tool = sys.argv[1]
    env = dict(os.environ)
    if len(sys.argv) > 2:
        env["NIB_CUDA_LIBRARY"] = sys.argv[2]
    measured = json.loads(subprocess.run([tool, "bench", "--device", "cuda", "--json", "rows.bf16", "rows-whole.bf16", "fake.bf16"],
                                         env=env, stdout=subprocess.PIPE, check=True).stdout)
    ours = {(r["operation"], r["rows"], r["cols"]): r["seconds"] * 1e6 for r in measured["results"]}
    a = torch.empty(1 << 29, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    print(f"a copy of 1 GiB by torch moves {2 * 2 * a.numel() / graph_microseconds(lambda: b.copy_(a), 4) * 1e-3:.0f} GB/s as a graph, "
          f"{2 * 2 * a.numel() / event_microseconds(lambda: b.copy_(a)) * 1e-3:.0f} GB/s without; nib's {measured['copy_bytes_s'] * 1e-9:.0f} GB/s")
    del a, b
    print(f"{'operation':18} {'shape':12} {'torch.compile':>14} {'nib':>8} {'times':>6}")
    for rows, cols in ((8192, 8192), (4096, 14336)):
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        amax = torch.tensor(4.0, device="cuda")
        for name, function in (("rows.bf16", quantize), ("rows-whole.bf16", quantize_whole), ("fake.bf16", fake)):
            compiled = torch.compile(function)
            theirs = graph_microseconds(lambda: compiled(x, amax))
            mine = ours[name, rows, cols]
            print(f"{name:18} {rows}x{cols:<7} {theirs:11.1f} us {mine:5.1f} us {theirs / mine:6.2f}", flush=True)


if __name__ == "__main__":
    main()
