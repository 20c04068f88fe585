#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imatrix.py WORK: compares what llama-imatrix wrote with what nib.calibrate adds up, and what was quantized with it."""
import sys

import gguf
import numpy as np
from safetensors import safe_open


def mean_squares(path):
    """{weight: E[x^2]} of an imatrix."""
    tensors = {tensor.name: np.asarray(tensor.data, np.float64).reshape(-1) for tensor in gguf.GGUFReader(path).tensors}
    return {name.removesuffix(".in_sum2"): values / tensors[name.replace(".in_sum2", ".counts")]
            for name, values in tensors.items() if name.endswith(".in_sum2")}


def packed(directory):
    with safe_open(f"{directory}/model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.endswith("weight_packed")}


def main():
    work = sys.argv[1]
    theirs, ours = mean_squares(f"{work}/imatrix.gguf"), mean_squares(f"{work}/own.gguf")
    assert set(theirs) == set(ours), sorted(set(theirs) ^ set(ours))[:4]
    # llama.cpp multiplies Q4_1 with activations of 8 bits, and what that rounds adds up from layer to layer; the first has the same input.
    apart = {name: float(np.median(np.abs(theirs[name] / ours[name] - 1))) for name in ours}
    alike = {name: float(np.corrcoef(np.log(theirs[name]), np.log(ours[name]))[0, 1]) for name in ours}
    first, middle = apart["blk.0.attn_q.weight"], float(np.median(list(apart.values())))
    print(f"{len(ours)} weights: channels differ by {100 * first:.1f} % before the first, by {100 * middle:.1f} % in all (medians); correlation of "
          f"logarithms at least {min(alike.values()):.3f}")
    assert first < 0.005 and middle < 0.03 and min(alike.values()) > 0.95
    forms = [packed(f"{work}/from-{form}") for form in ("gguf", "dat")]
    without = packed(f"{work}/without")
    assert len(without) == 210
    assert all(bool((forms[0][name] == forms[1][name]).all()) for name in without), "the forms give other codes"
    changed = sum(bool((forms[0][name] != without[name]).any()) for name in without)
    print(f"both forms give the same codes; {changed} of {len(without)} weights have others than without")
    assert changed == len(without)


if __name__ == "__main__":
    main()
