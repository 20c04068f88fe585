#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of calls on a GPU, without graphs: bench/cuda_python.py. Needs PyTorch, a GPU and libnib_cuda.

Microseconds that Python needs until a call has returned, beside torch's own `add_` of the same tensor. The work itself is
small enough not to hold up the next call. 1 is returned where an update with a given amax takes more than LIMIT times add_.
"""
import sys
import time

import torch

import nib.torch as nt

LIMIT = 1.3
CALLS, ROUNDS = 100, 150


def microseconds(call):
    """The fastest of many rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return best / CALLS * 1e6


def main():
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    amax = torch.full((1,), 5.0, device="cuda")
    flag = torch.zeros(1, device="cuda")
    rows, both = nt.NVFP4Quantizer(columnwise=False), nt.NVFP4Quantizer(with_rht=True)
    random = nt.NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
    # By names: looking a tensor up by its quantizer, whose hash is that of all its options, would count as an update.
    of_rows, of_both, of_random, y = rows(x), both(x), random(x), x.clone()
    calls = {"x.add_(1)": lambda: y.add_(1.0),
             "update with a given amax": lambda: rows.update_quantized(x, of_rows, amax=amax),
             "... and a no-op flag": lambda: rows.update_quantized(x, of_rows, amax=amax, noop_flag=flag),
             "update": lambda: rows.update_quantized(x, of_rows),
             "update of both usages, RHT": lambda: both.update_quantized(x, of_both),
             "update, stochastic rounding": lambda: random.update_quantized(x, of_random),
             "quantize": lambda: rows(x),
             "dequantize": lambda: of_rows.dequantize()}
    with torch.no_grad():
        for call in calls.values():
            for _ in range(3):
                call()
        found = {what: microseconds(call) for what, call in calls.items()}
    base = found["x.add_(1)"]
    for what, time_of in found.items():
        print(f"{what:32} {time_of:7.2f} us  {time_of / base:5.2f} times add_")
    ratio = found["update with a given amax"] / base
    print(f"an update with a given amax takes {ratio:.2f} times the host time of add_ (at most {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
