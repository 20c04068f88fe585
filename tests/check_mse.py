#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# needs: numpy safetensors
"""Mean square errors of the scale rules on 4 M weights: the default must beat round-to-nearest under the same scale.

    check_mse.py LIBNIB NIB
"""
import json
import os
import subprocess
import sys
import tempfile

import numpy
from safetensors.numpy import load_file, save_file

SEED, ROWS, COLS = 20261115, 2048, 2048
LOWER = {"gaussian": 0.25, "laplace": 0.19}  # than rtn by this share at least
RULES = {"rtn": ["--scale", "rtn", "--tensor-scale", "pow2"], "4over6": ["--scale", "4over6", "--tensor-scale", "pow2"],
         "sweep": ["--scale", "sweep", "--tensor-scale", "pow2"], "default": []}


def errors(tool, folder, weights):
    """Relative mean square error of every rule."""
    source = os.path.join(folder, "in")
    os.makedirs(source)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({name: weights}, os.path.join(source, "model.safetensors"), {"format": "pt"})
    with open(os.path.join(source, "config.json"), "w", encoding="utf-8") as file:
        json.dump({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": ROWS, "intermediate_size": COLS}, file)
    out, scales = {}, {}
    for rule, options in RULES.items():
        quantized, back = os.path.join(folder, rule), os.path.join(folder, rule + "-back")
        subprocess.run([tool, "quantize", source, quantized, "-q", *options], check=True)
        subprocess.run([tool, "dequantize", quantized, back, "-q", "--dtype", "f32"], check=True)
        decoded = load_file(os.path.join(back, "model.safetensors"))[name].astype(numpy.float64)
        with open(os.path.join(quantized, "model.safetensors"), "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            begin, end = header["model.layers.0.mlp.down_proj.weight_global_scale"]["data_offsets"]
            file.seek(begin, os.SEEK_CUR)
            scales[rule] = file.read(end - begin)
        out[rule] = ((decoded - weights) ** 2).sum() / (weights.astype(numpy.float64) ** 2).sum()
    return out, scales


def main():
    tool = os.path.abspath(sys.argv[2])
    random = numpy.random.default_rng(SEED)
    passed = failed = 0
    for kind, lower in LOWER.items():
        draw = {"gaussian": random.normal, "laplace": random.laplace}[kind]
        weights = draw(0, 0.02, (ROWS, COLS)).astype(numpy.float32)
        weights = (weights.view(numpy.uint32) & 0xFFFF0000).view(numpy.float32)  # numbers that BF16 has
        with tempfile.TemporaryDirectory() as folder:
            found, scales = errors(tool, folder, weights)
        gain = {rule: 1 - error / found["rtn"] for rule, error in found.items()}
        figures = [f"{rule} {error:.6f} ({-100 * gain[rule]:+.1f} %)" for rule, error in found.items()]
        print(f"{kind}: {', '.join(figures)}")
        for what, holds in ((f"the default errs {100 * lower:.0f} % less", gain["default"] >= lower),
                            ("the default is sweep with a power of two", found["default"] == found["sweep"]),
                            ("both have the same tensor scale", scales["rtn"] == scales["sweep"]),
                            ("4over6 is between them", 0 < gain["4over6"] < gain["sweep"])):
            if not holds:
                print(f"FAILED {kind}: {what}")
            passed, failed = passed + holds, failed + (not holds)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
