#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Vectors made on the spot by ModelOpt, compressed-tensors and torchao: nib must give every byte.

    check_dialects.py LIBNIB NIB [FOLDER]     FOLDER keeps the files (tests/golden/README.md has their layout)
"""
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
import zlib

import torch
from safetensors.torch import save_file

SEED = 20261115
SHAPES = [(16, 16), (32, 48), (128, 64), (3, 80), (257, 272)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
E2M1_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])

warnings.filterwarnings("ignore")


# ---- Data ------------------------------------------------------------------------------------------------


def e4m3_values():
    return torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def element_ties(rows, cols, random):
    """Tensor scale 2^-10; in every block 6 times an E4M3 scale, and midpoints of E2M1 times it."""
    scales = e4m3_values()[torch.randint(0, 126, (rows, cols // 16, 1), generator=random)]
    ties = E2M1_TIES[torch.randint(0, 8, (rows, cols // 16, 16), generator=random)]
    ties[..., 0] = 6
    signs = torch.randint(0, 2, ties.shape, generator=random) * 2 - 1
    x = (signs * ties * scales).reshape(rows, cols) * 2.0**-10
    x[0, 0] = 2688 * 2.0**-10
    return x


def scale_ties(rows, cols, random):
    """Tensor scale 2^-10; block maxima 6 times a midpoint between two E4M3 scales."""
    values = torch.cat([torch.zeros(1), e4m3_values()])
    middles = ((values[1:] + values[:-1]) / 2)[torch.randint(0, 126, (rows, cols // 16, 1), generator=random)]
    x = torch.rand((rows, cols // 16, 16), generator=random) * 2 - 1
    x[..., 5] = -1
    x = (x * 6 * middles).reshape(rows, cols) * 2.0**-10
    x[0, 0] = 2688 * 2.0**-10
    return x


def sparse(rows, cols, random):
    x = torch.randn((rows, cols), generator=random)
    x *= torch.rand((rows, cols), generator=random) < 0.1
    x.view(rows, -1, 16)[torch.rand((rows, cols // 16), generator=random) < 0.4] = 0
    x[-1, -1] = 1
    return x


def signs_of_zero(rows, cols, random):
    """Exact -0, negatives that round to it, and a block of nothing but -0."""
    x = torch.randn((rows, cols), generator=random)
    x[torch.rand((rows, cols), generator=random) < 0.3] = -0.0
    x[torch.rand((rows, cols), generator=random) < 0.2] = -1e-6
    x[0, :16] = -0.0
    x[-1, -1] = 3
    return x


def outliers(rows, cols, random):
    x = torch.randn((rows, cols), generator=random)
    x[torch.rand((rows, cols), generator=random) < 0.01] *= 300
    return x


def heavy_tail(rows, cols, random):
    x = torch.randn((rows, cols), generator=random)
    return x / (torch.rand((rows, cols), generator=random) + 1e-3)


def wide(rows, cols, random):
    """Blocks from far too small for a scale to the largest."""
    x = torch.randn((rows, cols // 16, 16), generator=random)
    return (x * 2.0 ** torch.randint(-24, 5, (rows, cols // 16, 1), generator=random)).reshape(rows, cols)


def scaled(factor):
    return lambda rows, cols, random: torch.randn((rows, cols), generator=random) * factor


KINDS = {
    "gaussian": scaled(1.0), "weights": scaled(0.02), "heavy_tail": heavy_tail, "outliers": outliers, "wide": wide,
    "sparse": sparse, "signs_of_zero": signs_of_zero, "element_ties": element_ties, "scale_ties": scale_ties,
    "zero": lambda rows, cols, random: torch.zeros(rows, cols),
    "constant": lambda rows, cols, random: torch.full((rows, cols), 0.7),
    "tiny": scaled(1e-30), "subnormal": scaled(1e-39), "tiny_half": scaled(1e-6), "huge": scaled(5e37), "huge_half": scaled(1.2e4),
}
ONLY = {"tiny": ("f32", "bf16"), "subnormal": ("f32",), "tiny_half": ("f16",), "huge": ("f32", "bf16"), "huge_half": ("f16",)}


def inputs(dtypes):
    for kind, make in KINDS.items():
        for dtype in dtypes:
            if dtype not in ONLY.get(kind, dtypes):
                continue
            for rows, cols in SHAPES:
                name = f"{kind}.{dtype}.{rows}x{cols}"
                random = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
                yield name, make(rows, cols, random).to(DTYPES[dtype]).contiguous()


# ---- The packages: a function from x to the tensors and options of a case ----------------------------------


def modelopt():
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def make(x):
        if platform.machine() != "x86_64" and not x.any():
            return  # 0/0: the sign of the NaN in its scales is the processor's
        tensor, scale, decode = NVFP4QTensor.quantize(x.clone(), 16)
        yield "", {}, {"row_data": tensor._quantized_data, "row_scale": scale, "tensor_scale": decode}

    return "nvidia-modelopt", "NVFP4QTensor.quantize(w, 16)", DTYPES, make


def compressed_tensors():
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])

    def make(x):
        amax, block_amax = x.abs().amax(), x.unflatten(-1, (-1, 16)).abs().amax(-1)
        encode = generate_gparam(-amax, amax)
        scale, _ = calculate_qparams(-block_amax, block_amax, scheme.weights, encode)
        done = NVFP4PackedCompressor.compress({"weight": x, "weight_scale": scale, "weight_global_scale": encode}, scheme)
        yield "", {}, {"row_data": done["weight_packed"], "row_scale": done["weight_scale"],
                       "global_scale": done["weight_global_scale"]}

    return "compressed-tensors", "generate_gparam, calculate_qparams, NVFP4PackedCompressor.compress", DTYPES, make


def torchao():
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def make(x):
        decode = per_tensor_amax_to_scale(x.abs().amax())
        if decode > 0:  # otherwise 0/0, and codes of NaN that mean nothing
            scale, data = nvfp4_quantize(x, 16, decode)
            yield ".two", {"levels": 2}, {"row_data": data, "row_scale": scale, "tensor_scale": decode}
        scale, data = nvfp4_quantize(x, 16)
        yield ".one", {"levels": 1}, {"row_data": data, "row_scale": scale}

    return "torchao", "nvfp4_quantize", ("f32", "bf16"), make


DIALECTS = {"modelopt": modelopt, "compressed-tensors": compressed_tensors, "torchao": torchao}


def write(path, dialect):
    package, call, dtypes, make = DIALECTS[dialect]()
    cases, tensors = {}, {}
    for name, x in inputs(dtypes):
        for suffix, options, parts in make(x):
            cases[name + suffix] = {"op": "quantize", "format": "nvfp4", "dialect": dialect, "block": "1x16",
                                    "columnwise": False, "rht": False, "row_scaled": False, "four_over_six": "off",
                                    "e4m3_max": 448, "exact": True, **options}
            parts = {**parts, "x": x, "row_scale": parts["row_scale"].view(torch.uint8).reshape(x.shape[0], -1)}
            for part, tensor in parts.items():
                if part.endswith("_scale") and part != "row_scale":
                    tensor = tensor.float().reshape(1)
                tensors[f"{name}{suffix}/{part}"] = tensor.clone().contiguous()
    about = f"{package} {importlib.metadata.version(package)}: {call}"
    save_file(tensors, path, {"about": about, "seed": str(SEED), "cases": json.dumps(cases)})
    return about, len(cases)


def main():
    tool = sys.argv[2]
    passed = failed = skipped = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = sys.argv[3] if len(sys.argv) > 3 else temporary
        for dialect in DIALECTS:
            path = os.path.join(folder, f"{dialect}.safetensors")
            try:
                about, count = write(path, dialect)
            except ImportError as error:
                if os.environ.get("CI") == "true":
                    failed += 1
                else:
                    skipped += 1
                print(f"skipped {dialect}: {error}")
                continue
            done = subprocess.run([tool, "conform", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output = done.stdout.decode(errors="replace").strip()
            closing = re.search(r"^(\d+) passed, (\d+) failed", output.splitlines()[-1] if output else "")
            good, bad = (int(n) for n in closing.groups()) if closing else (0, 1)
            if good + bad != count or (done.returncode == 0) != (bad == 0):
                bad = max(bad, 1)
            passed, failed = passed + good, failed + bad
            print(f"{about}: {count} cases, {good} passed, {bad} failed")
            if bad:
                print(output)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
