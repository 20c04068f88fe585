#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the GPU's time of a training step goes: bench/cuda_training.py. Needs PyTorch, a GPU and libnib_cuda.

Steps of the model of examples/train_tiny.py, by torch's profiler: the time of nib's kernels that quantize and that
dequantize, of products, and of the rest. Beside it the sum of the same quantizations, each measured by itself as a graph
that is replayed. 1 is returned where quantizing takes more than LIMIT times that sum.
"""
import argparse
import os
import sys

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples"))
import train_tiny  # noqa: E402
from cuda import graph_microseconds  # noqa: E402
from nib.torch.format_tensor import FormatQuantizer  # noqa: E402
from nib.torch.recipe import NVFP4BlockScaling  # noqa: E402

LIMIT = 1.15
STEPS = 4
# what a kernel is, by what its name contains; the first that fits
KINDS = {"quantize": ("quantize_", "amax_"), "dequantize": ("decode_",),
         "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitK"), "attention": ("flash", "fmha", "attention"),
         "copies": ("Memcpy", "Memset")}


def kind_of(name):
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "the rest")


def record(calls):
    """Note what is quantized: (quantizer, shape, dtype)."""
    original = FormatQuantizer.quantize_impl

    def noted(self, tensor):
        calls.append((self.copy(), tuple(tensor.shape), tensor.dtype))
        return original(self, tensor)
    FormatQuantizer.quantize_impl = noted
    return original


def predicted(calls):
    """Microseconds of all of these, each measured once for its kind: replays of quantizing into a tensor."""
    known, total = {}, 0.0
    for quantizer, shape, dtype in calls:
        key = (quantizer, shape, dtype)
        if key not in known:
            x = torch.randn(shape, device="cuda").to(dtype)
            quantizer.internal = False
            tensor = quantizer(x)
            quantizer.update_quantized(x, tensor)
            random = quantizer.stochastic_rounding  # the drawing of an offset is torch's, and is not counted in the step
            draw = graph_microseconds(lambda: torch.empty(1, dtype=torch.int64, device="cuda").random_()) if random else 0
            known[key] = graph_microseconds(lambda: quantizer.update_quantized(x, tensor)) - draw
        total += known[key]
    return total, len(known)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 768), ("heads", 12), ("blocks", 9), ("context", 512), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variant", default="whole", choices=train_tiny.VARIANTS)
    options = parser.parse_args()
    which, changes, what = train_tiny.VARIANTS[options.variant]
    torch.manual_seed(0)
    model = train_tiny.Model(256, options.width, options.heads, options.blocks, options.context,
                             train_tiny.quantized_blocks(which, options.blocks), NVFP4BlockScaling(**changes)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    at = list(range(0, options.batch * options.context, options.context))

    def step():
        loss = train_tiny.loss_of(model, data, at, options.context, "cuda")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    for _ in range(3):
        step()
    calls = []
    original = record(calls)
    step()
    FormatQuantizer.quantize_impl = original
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    times = {}
    for event in trace.key_averages():
        kind = kind_of(event.key)
        times[kind] = times.get(kind, 0.0) + event.self_device_time_total / STEPS
    whole = sum(times.values())
    print(f"{what}: {sum(p.numel() for p in model.parameters())} parameters, {options.batch} x {options.context} tokens; "
          f"{whole / 1000:.2f} ms of the GPU a step")
    for kind, microseconds in sorted(times.items(), key=lambda item: -item[1]):
        print(f"  {kind:12} {microseconds / 1000:8.3f} ms  {100 * microseconds / whole:5.1f} %")
    if not calls:
        return 0
    alone, kinds = predicted(calls)
    ratio = times.get("quantize", 0.0) / alone
    print(f"{len(calls)} quantizations a step, of {kinds} kinds, take {alone / 1000:.3f} ms by themselves: "
          f"{ratio:.2f} times that in the step (at most {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
