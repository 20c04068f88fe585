#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Vectors of the made-up format (made_up.h), by plain Python: make_vectors.py FILE.

Codes are found in lists of all values that they can have, by exact fractions; only two divisions round, to FP32.
"""
import bisect
import json
import math
import random
import struct
import sys
from fractions import Fraction


def values(mantissa_bits, bias, count):
    """The values of the codes 0, 1, ..., count - 1."""
    out = []
    for code in range(count):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        unit = Fraction(2) ** ((exponent or 1) - bias - mantissa_bits)
        out.append((mantissa + (1 << mantissa_bits if exponent else 0)) * unit)
    return out


E4M3 = values(3, 7, 0x7F)
E5M2 = values(2, 15, 0x7C)


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def element(y):
    sign, magnitude = 0x80 if math.copysign(1, y) < 0 else 0, Fraction(abs(y))
    above = min(bisect.bisect_left(E4M3, magnitude), len(E4M3) - 1)
    below = max(above - 1, 0)
    up, down = E4M3[above] - magnitude, magnitude - E4M3[below]
    if up == down:
        return sign | (above if above % 2 == 0 else below)
    return sign | (above if up < down else below)


def lines(rows):
    """Codes and scales of each line."""
    codes, scales = [], []
    for row in rows:
        row_scales = []
        for i in range(0, len(row), 8):
            block = row[i:i + 8]
            # The quotient of two floats, rounded to 53 bits and then to 24, is as if rounded once.
            scale = min(bisect.bisect_left(E5M2, Fraction(f32(max(map(abs, block)) / 448))), len(E5M2) - 1)
            codes += [element(f32(x / float(E5M2[scale])) if scale else x) for x in block]
            row_scales.append(scale)
        scales.append(row_scales)
    return bytes(codes), bytes(sum(scales, []))


def main():
    generator = random.Random(20261115)
    kinds = {
        "normal": lambda: generator.gauss(0, 1),
        "wide": lambda: generator.gauss(0, 1) * 2.0 ** generator.randint(-30, 20),
        "tie": lambda: generator.choice([17, 19, 21, 448, -27, 29]) * 0.5,
        "zero": lambda: generator.choice([0.0, -0.0]),
        "large": lambda: generator.gauss(0, 1e7), "tiny": lambda: generator.gauss(0, 1e-6),
    }
    cases, tensors = {}, {}
    for kind, draw in kinds.items():
        for m, k in ((16, 24), (9, 13), (1, 1), (3, 300)):
            name = f"{kind}.{m}x{k}"
            rows = [[f32(draw()) for _ in range(k)] for _ in range(m)]
            columns = [list(column) for column in zip(*rows)]
            cases[name] = {"op": "quantize", "format": "madeup8", "dialect": "te", "columnwise": True, "block": "1x8"}
            tensors[f"{name}/x"] = "F32", [m, k], struct.pack(f"<{m * k}f", *sum(rows, []))
            for prefix, of, shape in (("row", rows, (m, k)), ("col", columns, (k, m))):
                codes, scales = lines(of)
                tensors[f"{name}/{prefix}_data"] = "U8", list(shape), codes
                tensors[f"{name}/{prefix}_scale"] = "F8_E5M2", [shape[0], -(-shape[1] // 8)], scales
    header, at = {"__metadata__": {"about": "plain Python", "cases": json.dumps(cases)}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(sys.argv[1], "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


if __name__ == "__main__":
    main()
