#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Float8, MXFP8, blockwise Float8 and MXFP4 against other people's casts: nib must give every byte.

    check_formats.py LIBNIB NIB [FOLDER]     FOLDER keeps the files (tests/golden/README.md has their layout)

The scale rules are written down once more in NumPy, from their definitions and with other means than the library's
(frexp and float64 instead of bits). The casts are torch's, and every one is done again by ml_dtypes: the two must agree
before nib is asked. torchao's MX tensors are compared as they come.
"""
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
import zlib

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file

SEED = 20261115
FLT_MAX = np.finfo(np.float32).max
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LARGEST_INPUT = {name: np.float32(torch.finfo(dtype).max) for name, dtype in DTYPES.items()}
ELEMENTS = {  # largest value, its exponent, torch's type, ml_dtypes' type
    "e4m3": (448.0, 8, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "e5m2": (57344.0, 15, torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "e2m1": (6.0, 2, None, ml_dtypes.float4_e2m1fn),
}
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

warnings.filterwarnings("ignore")
np.seterr(all="ignore")


# ---- Data ------------------------------------------------------------------------------------------------


def normal(factor):
    return lambda shape, random: torch.randn(shape, generator=random) * factor


def heavy_tail(shape, random):
    return torch.randn(shape, generator=random) / (torch.rand(shape, generator=random) + 1e-3)


def wide(shape, random):
    """Every element of a size of its own."""
    return torch.randn(shape, generator=random) * 2.0 ** torch.randint(-40, 40, shape, generator=random)


def wide_half(shape, random):
    return torch.randn(shape, generator=random) * 2.0 ** torch.randint(-18, 10, shape, generator=random)


def sparse(shape, random):
    """Single numbers among zeros: most blocks hold nothing."""
    return torch.randn(shape, generator=random) * (torch.rand(shape, generator=random) < 0.01)


def signs_of_zero(shape, random):
    x = torch.randn(shape, generator=random)
    x[torch.rand(shape, generator=random) < 0.3] = -0.0
    x[torch.rand(shape, generator=random) < 0.2] = -1e-6
    return x


def ties(values, largest):
    """Midpoints between neighbouring codes, in blocks whose largest element is the largest code: a scale of one."""
    def make(shape, random):
        middles = torch.from_numpy(((values[1:] + values[:-1]) / 2).astype(np.float32))
        x = middles[torch.randint(0, len(middles), shape, generator=random)]
        x *= torch.randint(0, 2, shape, generator=random) * 2 - 1
        x[..., ::8] = largest
        return x
    return make


def code_values(element):
    """The values of the positive codes of a float8 type."""
    codes = np.arange(128, dtype=np.uint8).view(ELEMENTS[element][3]).astype(np.float32)
    return codes[np.isfinite(codes)]


def near_powers(shape, random):
    """Largest elements at, just below and just above the borders at which an MX scale changes."""
    ulp = 2.0**-23
    steps = torch.tensor([1, 1 - ulp, 1 + ulp, 1 - ulp / 2, 1.75, 1.75 * (1 + ulp), 1.5, 1.5 * (1 + 2 * ulp)])
    lines = torch.randint(0, len(steps), (*shape[:-1], 1), generator=random)
    powers = 2.0 ** torch.randint(-30, 30, (*shape[:-1], 1), generator=random)
    x = torch.rand(shape, generator=random)
    x[..., ::5] = 1
    return x * steps[lines] * powers


def lowest(shape, random):
    """From the smallest subnormal to a few normal numbers, by their bits."""
    bits = torch.randint(0, 1 << 25, shape, generator=random, dtype=torch.int32)
    bits >>= torch.randint(0, 24, shape, generator=random, dtype=torch.int32)
    return bits.view(torch.float32)


def overflow_border(shape, random):
    """Largest elements around those whose float8 scale just overflows, line by line."""
    lines = torch.randint(-8, 9, (*shape[:-1], 1), generator=random) * 2.0**-9 + 1
    largest = torch.tensor([448.0, 57344.0])[torch.randint(0, 2, lines.shape, generator=random)]
    x = torch.rand(shape, generator=random) * 2 - 1
    x[..., ::3] = 1
    return (x * lines) * (largest.double() / FLT_MAX).float()


def highest(shape, random):
    return (torch.rand(shape, generator=random) * 2 - 1) * FLT_MAX


KINDS = {
    "normal": normal(1.0), "weights": normal(0.02), "heavy_tail": heavy_tail, "wide": wide, "sparse": sparse,
    "signs_of_zero": signs_of_zero, "near_powers": near_powers,
    "e4m3_ties": ties(code_values("e4m3"), 448), "e5m2_ties": ties(code_values("e5m2"), 57344),
    "e2m1_ties": ties(E2M1_VALUES, 6),
    "zero": lambda shape, random: torch.zeros(shape), "constant": lambda shape, random: torch.full(shape, -0.7),
    "tiny": normal(1e-38), "tiniest": normal(1e-42), "subnormal": normal(1e-40), "lowest": lowest,
    "small": normal(1e-30), "overflow_border": overflow_border,
    "huge": normal(5e37), "highest": highest,
    "tiny_half": normal(1e-7), "small_half": normal(1e-3), "wide_half": wide_half, "huge_half": normal(1.2e4),
}
# Those that a dtype can hold, and that are not the same as another once rounded to it.
HALF = {"normal", "weights", "heavy_tail", "sparse", "signs_of_zero", "e4m3_ties", "e2m1_ties", "zero", "constant"}
HALF_ONLY = {"tiny_half", "small_half", "wide_half", "huge_half"}


def kinds_of(dtype):
    if dtype == "f16":
        return HALF | HALF_ONLY
    return set(KINDS) - HALF_ONLY


def inputs(shapes, dtypes=("f32", "bf16", "f16")):
    """(name, dtype, x). Every kind and dtype, each with one of the shapes in turn; all shapes for plain data."""
    turn = 0  # of the shapes
    for kind in KINDS:
        for dtype in dtypes:
            if kind not in kinds_of(dtype):
                continue
            turn += 1
            for shape in shapes if kind == "normal" else [shapes[turn % len(shapes)]]:
                name = f"{kind}.{dtype}.{'x'.join(map(str, shape))}"
                random = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
                x = KINDS[kind](shape, random).to(DTYPES[dtype]).contiguous()
                if not x.isfinite().all():  # rounded up past the end of its dtype
                    x = torch.where(x.isfinite(), x, torch.finfo(x.dtype).max)
                yield name, dtype, x


def with_specials(kind, shape, random):
    x = torch.randn(shape, generator=random)
    chosen = torch.rand(shape, generator=random) < 0.02
    x[chosen] = {"nan": float("nan"), "inf": float("inf")}[kind]
    x[0, :3] = torch.tensor([float("nan"), -float("inf"), float("inf")]) if kind == "inf" else -float("nan")
    if kind == "inf":
        x[shape[0] // 2:] *= 2.0**124  # so large that they are not zeros beside an infinity
    return x


# ---- Casts -----------------------------------------------------------------------------------------------


def cast(y, element):
    """Codes of FP32 numbers, one to a byte, by torch (E2M1: by a table) and by ml_dtypes."""
    largest, _, torch_type, other_type = ELEMENTS[element]
    nan = np.isnan(y)
    clamped = np.where(nan, 0, np.clip(y, np.float32(-largest), np.float32(largest))).astype(np.float32)
    if torch_type:
        codes = torch.from_numpy(clamped).to(torch_type).view(torch.uint8).numpy().copy()
    else:
        # Nearest by distance; of two at the same distance the one with an even code.
        distance = np.abs(np.abs(clamped.astype(np.float64))[..., None] - E2M1_VALUES)
        codes = np.argmin(distance + 1e-9 * (np.arange(8) % 2), -1).astype(np.uint8)
        codes |= np.signbit(clamped).astype(np.uint8) << 3
    again = clamped.astype(other_type).view(np.uint8)
    assert np.array_equal(codes, again), f"torch and ml_dtypes differ in {element}"
    codes[nan] = 0x7F if torch_type else 7  # one NaN, and E2M1 has none: hardware gives its largest
    return codes


def pack(codes):
    """Two to a byte, the even element low."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, ::2] | codes[:, 1::2] << 4


# ---- Scale rules -----------------------------------------------------------------------------------------


def rule_s(amax, largest, pow2, epsilon, inf_value):
    """The multiplier that brings amax to the largest code, as float8 formats have it."""
    amax = np.where(amax < np.float32(epsilon), np.float32(epsilon), amax)
    scale = (np.float32(largest) / amax).astype(np.float32)
    scale = np.where(np.isinf(scale), inf_value, scale).astype(np.float32)
    if pow2:
        _, exponent = np.frexp(scale.astype(np.float64))
        scale = np.ldexp(0.5, exponent).astype(np.float32)
    return np.where((amax == 0) | np.isinf(amax) | np.isnan(amax), np.float32(1), scale)


def mx_scale(amax, element, rule):
    """The E8M0 code of a block."""
    largest, largest_exponent = ELEMENTS[element][:2]
    if rule == "ceil":
        v = (amax * np.float32(1 / np.float32(largest))).astype(np.float32).astype(np.float64)
        mantissa, exponent = np.frexp(v)
        power = np.where(mantissa == 0.5, exponent - 1, exponent)
        power = np.where(np.isinf(v), 127, power)
    else:
        v = amax.astype(np.float64)
        power = np.frexp(v)[1] - 1 - largest_exponent
        power = np.where(np.isinf(v), 128 - largest_exponent, power)
    return np.where(v == 0, 0, np.clip(power + 127, 0, 254)).astype(np.uint8)


# ---- Blocks ----------------------------------------------------------------------------------------------


def block_amax(x, rows, cols):
    """Largest magnitude of every rows x cols block of a matrix; the last ones may be smaller. NaNs do not count."""
    magnitude = np.where(np.isnan(x), 0, np.abs(x))
    padded = np.pad(magnitude, ((0, -x.shape[0] % rows), (0, -x.shape[1] % cols)))
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols).max((1, 3), initial=0)


def spread(of_blocks, rows, cols, shape):
    """The number of every element's block."""
    return of_blocks.repeat(rows, 0)[:shape[0]].repeat(cols, 1)[:, :shape[1]]


def mx_copy(x, element, rule, square):
    """Codes and scales of the lines of a matrix; a scale per line, also where 32 lines share it."""
    rows = 32 if square else 1
    scale = mx_scale(block_amax(x, rows, 32), element, rule)
    factor = np.ldexp(1.0, 127 - scale.astype(np.int64)).astype(np.float32)
    codes = cast((x * spread(factor, rows, 32, x.shape)).astype(np.float32), element)
    return codes, scale.repeat(rows, 0)[:x.shape[0]]


def block_copy(x, element, pow2, epsilon, inf_value, square):
    rows = 128 if square else 1
    factor = rule_s(block_amax(x, rows, 128), ELEMENTS[element][0], pow2, epsilon, inf_value)
    codes = cast((x * spread(factor, rows, 128, x.shape)).astype(np.float32), element)
    return codes, (np.float32(1) / factor).astype(np.float32)


# ---- Cases -----------------------------------------------------------------------------------------------


def matrix(x):
    return x.float().reshape(-1, x.shape[-1]).numpy()


def float8_cases(element):
    largest = ELEMENTS[element][0]

    def case(x, scale, options, more):
        codes = cast((matrix(x) * scale).astype(np.float32), element)
        return {"format": "float8", "element": element, **options}, \
            {"x": x, "row_data": codes.reshape(x.shape), "col_data": codes.T, "tensor_scale": np.float32(1) / scale,
             **more}

    for name, _, x in inputs([(64, 96), (5, 7), (3, 4, 50), (17,), (300, 1)]):
        amax = np.abs(matrix(x)).max(initial=0)
        for suffix, pow2, epsilon in (("", False, 0.0), (".pow2", True, 0.0), (".eps", False, 0.5),
                                      (".pow2.eps", True, 2.0**-100)):
            scale = rule_s(amax, largest, pow2, epsilon, FLT_MAX).reshape(1)
            yield name + suffix, *case(x, scale, {"pow2_scales": pow2, "amax_epsilon": epsilon}, {})
    # Delayed scaling: any scale, so that some of the data may lie beyond the largest code.
    for name, _, x in inputs([(33, 40)]):
        for scale in (1.0, 0.37, 2.0**20, 3e-5):
            scale = np.float32([scale])
            yield f"{name}.given.{scale[0]:g}", *case(x, scale, {"given_scale": True}, {"scale": scale})
    for kind in ("nan", "inf"):
        x = with_specials(kind, (40, 50), torch.Generator().manual_seed(SEED))
        amax = block_amax(matrix(x), 40, 50)[0, 0]
        yield kind, *case(x, rule_s(amax, largest, False, 0, FLT_MAX).reshape(1), {}, {})


def mx_case(x, form, element, rule, square):
    rows, scale = mx_copy(matrix(x), element, rule, square)
    cols, col_scale = mx_copy(matrix(x).T, element, rule, square)
    options = {"format": form, "element": element, "mx_rule": rule, "block": "32x32" if square else "1x32"}
    if form == "mxfp4":  # transposed and packed
        return options, {"x": x, "row_data": pack(rows).reshape(*x.shape[:-1], -1), "row_scale": scale,
                         "col_data": pack(cols), "col_scale": col_scale}
    return options, {"x": x, "row_data": rows.reshape(x.shape), "row_scale": scale,
                     "col_data": cols.T.reshape(x.shape), "col_scale": col_scale.T}


def mx_cases(form, element, square):
    shapes = [(64, 96), (128, 256), (2, 32, 320), (32, 32)] + [(37, 45), (1, 5), (3, 7, 33)]
    for rule in ("ceil", "floor"):
        for name, _, x in inputs(shapes):
            yield f"{name}.{rule}", *mx_case(x, form, element, rule, square)
        for kind in ("nan", "inf"):
            x = with_specials(kind, (64, 96), torch.Generator().manual_seed(SEED))
            yield f"{kind}.{rule}", *mx_case(x, form, element, rule, square)


def block_cases(element, square):
    def case(x, pow2, epsilon, inf_value):
        rows, scale = block_copy(matrix(x), element, pow2, epsilon, inf_value, square)
        cols, col_scale = block_copy(matrix(x).T, element, pow2, epsilon, inf_value, square)
        if not square:  # as the GEMM wants them: already transposed
            scale, col_scale = scale.T, col_scale.T
        else:
            assert np.array_equal(rows.T, cols) and np.array_equal(scale.T, col_scale)
        return {"format": "float8_block", "element": element, "block": "128x128" if square else "1x128",
                "pow2_scales": pow2, "amax_epsilon": epsilon}, \
            {"x": x, "row_data": rows.reshape(x.shape), "row_scale": scale, "col_data": cols, "col_scale": col_scale}

    for name, dtype, x in inputs([(200, 300), (1, 5), (129, 257), (128, 256), (2, 3, 130), (300,)]):
        for suffix, pow2, epsilon in (("", False, 0.0), (".pow2", True, 0.0), (".eps", False, 0.5)):
            yield name + suffix, *case(x, pow2, epsilon, LARGEST_INPUT[dtype])
    for kind in ("nan", "inf"):
        for pow2 in (False, True):
            x = with_specials(kind, (140, 150), torch.Generator().manual_seed(SEED))
            yield f"{kind}.pow2={pow2}", *case(x, pow2, 0, FLT_MAX)


def torchao_cases(form, element):
    """torchao's to_mx, with the blocks kept out (made zero) where it is meant to differ:

    - Blocks so small that their scale is the code 0. FLOOR divides such a block by 2^-126 and RCEIL multiplies it with
      1, while its scale says 2^-127; nib multiplies with 2^127, so that codes and scale belong together. Blocks of
      zeros are the same in both.
    - RCEIL, a largest element just past a power of two times the largest code (by less than 2^-10 of it): torchao
      divides by the largest code, TransformerEngine multiplies with its rounded inverse, and torchao takes ceil(log2())
      in FP32, which rounds such a logarithm to an integer once its own integer part is large.
    - NaN and Inf: torchao marks the whole block by its scale (255), nib the elements.
    - F16, which torchao does not take.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    largest, largest_exponent, torch_type, _ = ELEMENTS[element]
    torch_type = torch_type or torch.float4_e2m1fn_x2
    for rule, mode in (("ceil", ScaleCalculationMode.RCEIL), ("floor", ScaleCalculationMode.FLOOR)):
        for name, _, x in inputs([(64, 96), (128, 256), (2, 32, 320), (32, 32), (7, 64)], ("f32", "bf16")):
            amax = block_amax(matrix(x), 1, 32).astype(np.float64)
            mantissa, exponent = np.frexp(amax / largest)
            if rule == "ceil":
                keep = (exponent > -125) & ((mantissa == 0.5) | (mantissa > 0.5 + 2.0**-11))
            else:
                keep = np.frexp(amax)[1] - 1 - largest_exponent > -127
            kept = torch.from_numpy(spread(keep | (amax == 0), 1, 32, matrix(x).shape)).reshape(x.shape)
            x = torch.where(kept, x, 0.0).contiguous()
            scale, data = to_mx(x, torch_type, 32, mode)
            yield f"{name}.{rule}", {"format": form, "element": element, "mx_rule": rule, "columnwise": False}, \
                {"x": x, "row_data": data.view(torch.uint8),
                 "row_scale": scale.view(torch.uint8).reshape(-1, x.shape[-1] // 32)}


def files():
    """(file, what made it, its cases)"""
    for element in ("e4m3", "e5m2"):
        yield f"float8.{element}", "NumPy and torch", lambda e=element: float8_cases(e)
        for square in (False, True):
            dims = "32x32" if square else "1x32"
            yield f"mxfp8.{element}.{dims}", "NumPy and torch", lambda e=element, s=square: mx_cases("mxfp8", e, s)
            dims = "128x128" if square else "1x128"
            yield f"float8_block.{element}.{dims}", "NumPy and torch", lambda e=element, s=square: block_cases(e, s)
        yield f"torchao.mxfp8.{element}", "torchao", lambda e=element: torchao_cases("mxfp8", e)
    yield "mxfp4", "NumPy and ml_dtypes", lambda: mx_cases("mxfp4", "e2m1", False)
    yield "torchao.mxfp4", "torchao", lambda: torchao_cases("mxfp4", "e2m1")


def write(path, maker, make):
    cases, tensors = {}, {}
    for name, options, parts in make():
        assert name not in cases, name
        cases[name] = {"op": "quantize", "dialect": "te", "columnwise": True, **options}
        for part, tensor in parts.items():
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.from_numpy(np.ascontiguousarray(tensor))
            tensors[f"{name}/{part}"] = tensor.clone().contiguous()
    about = maker if maker != "torchao" else f"torchao {importlib.metadata.version('torchao')}: to_mx"
    save_file(tensors, path, {"about": about, "seed": str(SEED), "cases": json.dumps(cases)})
    return about, len(cases)


def main():
    tool = sys.argv[2]
    passed = failed = skipped = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = sys.argv[3] if len(sys.argv) > 3 else temporary
        for name, maker, make in files():
            path = os.path.join(folder, f"{name}.safetensors")
            try:
                about, count = write(path, maker, make)
            except ImportError as error:
                if os.environ.get("CI") == "true":
                    failed += 1
                else:
                    skipped += 1
                print(f"skipped {name}: {error}")
                continue
            done = subprocess.run([tool, "conform", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output = done.stdout.decode(errors="replace").strip()
            closing = re.search(r"^(\d+) passed, (\d+) failed", output.splitlines()[-1] if output else "")
            good, bad = (int(n) for n in closing.groups()) if closing else (0, 1)
            if good + bad != count or (done.returncode == 0) != (bad == 0):
                bad = max(bad, 1)
            passed, failed = passed + good, failed + bad
            print(f"{name} ({about}): {count} cases, {good} passed, {bad} failed")
            if bad:
                print(output)
            if folder == temporary:
                os.remove(path)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
