#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# needs: numpy
"""The weighted sweep against its definition in NumPy (docs/numerics.md 9): every scale and every code.

    check_importance.py LIBNIB NIB
"""
import ctypes
import os
import sys

import numpy

SEED, CASES = 20261116, 60
OFFSETS = (0, -1, 1, -2, 2, -3, 3, 4, 5, 6, 7)
F32 = numpy.float32
E2M1 = numpy.array([0, .5, 1, 1.5, 2, 3, 4, 6], F32)


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    return F32(numpy.ldexp(8 + mantissa, exponent - 10) if exponent else numpy.ldexp(float(mantissa), -9))


E4M3 = numpy.array([e4m3(code) for code in range(0x7F)], F32)


def nearest_e4m3(value):
    """To nearest, ties to the even code; from 448 on 448."""
    distance = numpy.abs(E4M3.astype(numpy.float64) - float(value))
    best = numpy.flatnonzero(distance == distance.min())
    return int(best[best % 2 == 0][0] if len(best) > 1 else best[0])


def nearest_e2m1(y):
    """Codes of scaled values, ties to the even code, the sign kept."""
    distance = numpy.abs(E2M1.astype(numpy.float64)[:, None] - numpy.abs(y.astype(numpy.float64)))
    codes = distance.argmin(0)
    above = distance[numpy.minimum(codes + 1, 7), numpy.arange(len(y))]
    codes += (codes % 2 == 1) & (codes < 7) & (above == distance.min(0))
    return codes | numpy.signbit(y) << 3


def normalized(squares):
    total = 0.0
    for square in squares:
        total += float(square)
    h = numpy.empty_like(squares)
    for first in range(0, len(squares), 16):
        block = squares[first:first + 16]
        relative = (block.astype(numpy.float64) / (total / len(squares))).astype(F32)
        h[first:first + 16] = numpy.maximum(relative, F32(1e-6)) if block.any() else 1
    return h


def quantize_block(x, h, g):
    """(scale code, element codes) of up to 16 values under the multiplier g."""
    amax = F32(g * F32(2688))
    scale = F32(2688) / amax
    inverse = F32(1) / scale
    rtn = nearest_e4m3(numpy.abs(x).max(initial=0) * F32(scale * F32(1 / 6)))
    least = None
    for offset in OFFSETS:
        code = rtn + offset
        if not (0 if rtn == 0 else 1) <= code <= 0x7E:
            continue
        with numpy.errstate(divide="ignore"):
            factor = min(F32(1) / F32(E4M3[code] * inverse), numpy.finfo(F32).max)
        codes = nearest_e2m1(x * factor)
        q = E2M1[codes & 7] * numpy.where(codes & 8, F32(-1), F32(1))
        d = q * F32(E4M3[code] * g) - x
        e = numpy.zeros(16, F32)
        e[:len(x)] = (d * d) * h
        for distance in (8, 4, 2, 1):
            e[:distance] += e[distance:2 * distance]
        if least is None or e[0] < least:
            least, best = e[0], (code, codes)
    return best


def main():
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
    os.environ["NIB_LIBRARY"] = os.path.abspath(sys.argv[1])
    import nib

    random = numpy.random.default_rng(SEED)
    quantizer = nib.Quantizer(scale_rule="sweep", columnwise=False, tensor_scale_rule="exact")
    failed = changed = 0
    for case in range(CASES):
        rows, cols = int(random.integers(1, 4)), int(random.integers(1, 70))
        x = (random.normal(size=(rows, cols)) * numpy.exp2(random.integers(-3, 4, (rows, cols)))).astype(F32)
        squares = (random.chisquare(1, cols) * numpy.exp2(random.integers(-8, 9, cols))).astype(F32)
        if case % 3 == 0:
            squares[random.random(cols) < .5] = 0
        if case % 5 == 0:
            squares[16:32] = 0
        h = normalized(squares) if squares.any() else numpy.ones(cols, F32)
        same = h.tobytes() == nib.importance(squares).tobytes()
        t = quantizer.quantize(x, overrides={"importance": nib.importance(squares)})
        plain = quantizer.quantize(x)
        changed += plain.row_data.tobytes() != t.row_data.tobytes()
        g = t.row_tensor_scale[0]
        for row in range(rows):
            for first in range(0, cols, 16):
                code, codes = quantize_block(x[row, first:first + 16], h[first:first + 16], g)
                stored = t.row_data[row, first // 2:first // 2 + 8]
                got = numpy.stack([stored & 15, stored >> 4], 1).reshape(-1)[:len(codes)]
                same = same and t.row_scale[row, first // 16] == code and (got == codes).all()
        failed += not same
    failed += changed < CASES // 2  # otherwise nothing was seen
    print(f"{changed} of {CASES} differ from the plain sweep")
    print(f"{CASES - failed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
