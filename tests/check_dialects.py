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

from make_vectors import write as write_file

SEED = 20261115
SHAPES = [(16, 16), (32, 48), (128, 64), (3, 80), (257, 272), (5, 41)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
FILE_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
GIVEN = {".coarse": 1.7, ".fine": 0.01}  # times the tensor scale that the package computes: other blocks are clipped or lost
E2M1_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])

warnings.filterwarnings("ignore")


# ---- Data ------------------------------------------------------------------------------------------------


def normal(rows, cols, random):
    """Nearly: sums of twelve uniform values, which are exact. torch.randn depends on the processor's vectors."""
    return (torch.rand((12, rows, cols), generator=random).double().sum(0) - 6).float()


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
    x = normal(rows, cols, random)
    x *= torch.rand((rows, cols), generator=random) < 0.1
    x.view(rows, -1, 16)[torch.rand((rows, cols // 16), generator=random) < 0.4] = 0
    x[-1, -1] = 1
    return x


def signs_of_zero(rows, cols, random):
    """Exact -0, negatives that round to it, and a block of nothing but -0."""
    x = normal(rows, cols, random)
    x[torch.rand((rows, cols), generator=random) < 0.3] = -0.0
    x[torch.rand((rows, cols), generator=random) < 0.2] = -1e-6
    x[0, :16] = -0.0
    x[-1, -1] = 3
    return x


def outliers(rows, cols, random):
    x = normal(rows, cols, random)
    x[torch.rand((rows, cols), generator=random) < 0.01] *= 300
    return x


def heavy_tail(rows, cols, random):
    x = normal(rows, cols, random)
    return x / (torch.rand((rows, cols), generator=random) + 1e-3)


def wide(rows, cols, random):
    """Blocks from far too small for a scale to the largest."""
    x = normal(rows, cols, random).view(rows, -1, 16)
    return (x * 2.0 ** torch.randint(-24, 5, (rows, cols // 16, 1), generator=random)).reshape(rows, cols)


def infinite(rows, cols, random):
    x = normal(rows, cols, random)
    x[0, 3], x[-1, 5] = torch.inf, -torch.inf
    return x


def nearly(ties):
    """Another tensor scale, with 24 bits: the order of operations decides on which side of a tie a value falls."""
    return lambda rows, cols, random: ties(rows, cols, random) * (1 + torch.rand(1, generator=random))


def scaled(factor):
    return lambda rows, cols, random: normal(rows, cols, random) * factor


KINDS = {
    "gaussian": scaled(1.0), "weights": scaled(0.02), "heavy_tail": heavy_tail, "outliers": outliers, "wide": wide,
    "sparse": sparse, "signs_of_zero": signs_of_zero, "element_ties": element_ties, "scale_ties": scale_ties,
    "near_element_ties": nearly(element_ties), "near_scale_ties": nearly(scale_ties),
    "zero": lambda rows, cols, random: torch.zeros(rows, cols),
    "constant": lambda rows, cols, random: torch.full((rows, cols), 0.7),
    "tiny": scaled(1e-30), "subnormal": scaled(1e-39), "tiny_half": scaled(1e-6), "huge": scaled(5e37), "huge_half": scaled(1.2e4),
}
NOT_WEIGHTS = {"negative_zero": lambda rows, cols, random: torch.full((rows, cols), -0.0), "infinite": infinite}
ONLY = {"near_element_ties": ("f32",), "near_scale_ties": ("f32",),
        "tiny": ("f32", "bf16"), "subnormal": ("f32", "bf16"), "tiny_half": ("f16",),
        "huge": ("f32", "bf16"), "huge_half": ("f16",)}


def inputs(dtypes, shapes):
    for kind, make in {**KINDS, **NOT_WEIGHTS}.items():
        for dtype in dtypes:
            if dtype not in ONLY.get(kind, dtypes):
                continue
            for rows, cols in shapes:
                name = f"{kind}.{dtype}.{rows}x{cols}"
                random = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
                x = make(rows, -(-cols // 16) * 16, random)[:, :cols]
                yield name, x.to(DTYPES[dtype]).contiguous()


# ---- The packages: a function from x to the tensors and options of a case. factor: give a tensor scale ------


def given(scale, factor):
    scale = scale * factor
    return scale if 0 < scale < torch.inf else torch.full_like(scale, 2.0**-10)


def modelopt():
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def make(x, factor):
        if platform.machine() != "x86_64" and not (factor or x.any()):
            return  # 0/0: the sign of the NaN in its scales is the processor's
        cols = x.shape[1]
        decode = given(NVFP4QTensor.get_weights_scaling_factor_2(x), factor) if factor else None
        tensor, scale, decode = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=decode)
        data = tensor._quantized_data
        parts = {"row_data": data[:, :-(-cols // 2)], "row_scale": scale, "tensor_scale": decode}
        if cols % 16 == 0:  # it cannot dequantize what it padded
            parts["y"] = tensor.dequantize(torch.float32, scale=scale, double_scale=decode, block_sizes={-1: 16})
        elif data[:, cols // 2 + cols % 2:].any() or (cols % 2 and (data[:, cols // 2] >> 4).any()):
            return  # padding with codes of NaN; nib's is 0
        yield "", {"given_tensor_scale": bool(factor)}, parts

    return "nvidia-modelopt", "NVFP4QTensor.quantize, .dequantize", DTYPES, make


def compressed_tensors():
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])

    def make(x, factor):
        if x.shape[1] % 16 or (not factor and x.isinf().any()):
            return  # it takes whole blocks; Inf in a tensor scale of its own gives 0, and NaN is cast to int8
        amax, block_amax = x.abs().amax(), x.unflatten(-1, (-1, 16)).abs().amax(-1)
        encode = generate_gparam(-amax, amax)
        encode = given(encode, factor) if factor else encode
        scale, _ = calculate_qparams(-block_amax, block_amax, scheme.weights, encode)
        done = NVFP4PackedCompressor.compress({"weight": x, "weight_scale": scale, "weight_global_scale": encode}, scheme)
        # As decompress does, but that it makes BF16 of everything on the way.
        codes = unpack_fp4_from_uint8(done["weight_packed"], *x.shape, dtype=torch.float32)
        y = dequantize(codes, done["weight_scale"].float(), args=scheme.weights, global_scale=encode, dtype=torch.float32)
        yield "", {"given_global_scale": bool(factor)}, {
            "row_data": done["weight_packed"], "row_scale": done["weight_scale"],
            "global_scale": done["weight_global_scale"], "y": y}

    call = "generate_gparam, calculate_qparams, NVFP4PackedCompressor.compress, dequantize"
    return "compressed-tensors", call, DTYPES, make


def torchao():
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def make(x, factor):
        decode = per_tensor_amax_to_scale(x.abs().amax())
        decode = given(decode, factor) if factor else decode
        if x.shape[1] % 16 or x.isinf().any():
            return
        if decode > 0 and (decode.reciprocal().isfinite() or x.all()):  # otherwise 0/0 or 0*Inf: codes of NaN mean nothing
            scale, data = nvfp4_quantize(x, 16, decode)
            yield ".two", {"levels": 2, "given_tensor_scale": bool(factor)}, {
                "row_data": data, "row_scale": scale, "tensor_scale": decode}
        if not factor:
            scale, data = nvfp4_quantize(x, 16)
            yield ".one", {"levels": 1}, {"row_data": data, "row_scale": scale}

    return "torchao", "nvfp4_quantize", ("f32", "bf16"), make


DIALECTS = {"modelopt": modelopt, "compressed-tensors": compressed_tensors, "torchao": torchao}


def file_part(x, part, tensor):
    if part == "row_scale":
        tensor = tensor.view(torch.uint8).reshape(x.shape[0], -1)
    elif part.endswith("_scale"):
        tensor = tensor.float().reshape(1)
    return FILE_DTYPES[tensor.dtype], list(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def write(path, dialect, shapes, given_shapes):
    package, call, dtypes, make = DIALECTS[dialect]()
    cases, tensors = {}, {}
    for name, x in inputs(dtypes, shapes):
        for how, factor in ({"": None, **GIVEN} if x.shape in given_shapes else {"": None}).items():
            for suffix, options, parts in make(x, factor):
                case = name + how + suffix
                cases[case] = {"op": "quantize", "format": "nvfp4", "dialect": dialect, "block": "1x16",
                               "columnwise": False, "rht": False, "row_scaled": False, "four_over_six": "off",
                               "e4m3_max": 448, "exact": True, **options}
                for part, tensor in {"x": x, **parts}.items():
                    tensors[f"{case}/{part}"] = file_part(x, part, tensor)
    about = f"{package} {importlib.metadata.version(package)}, torch {torch.__version__.partition('+')[0]}: {call}"
    metadata = {"about": about, "seed": str(SEED), "cases": json.dumps(cases)}
    aligned = sorted(tensors.items(), key=lambda item: ("F32", "BF16", "F16", "U8").index(item[1][0]))
    write_file(path, metadata, dict(aligned), None)
    return about, len(cases)


def main():
    tool = sys.argv[2]
    passed = failed = skipped = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = sys.argv[3] if len(sys.argv) > 3 else temporary
        for dialect in DIALECTS:
            path = os.path.join(folder, f"{dialect}.safetensors")
            try:
                about, count = write(path, dialect, SHAPES, SHAPES[:4])
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
