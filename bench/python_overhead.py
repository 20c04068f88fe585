# SPDX-License-Identifier: Apache-2.0
"""What a call through Python costs: quantizing a 16x16 tensor by NumPy, in empty ctypes calls.

    python bench/python_overhead.py

The overhead is the time of nib.quantize and of the result's end, less what the library needs for the same two calls with
everything prepared. It must stay within LIMIT empty ctypes calls: 1 is returned otherwise. The last line states it.
"""
import ctypes
import sys
import timeit

import numpy as np

import nib
from nib import _arrays, _library

LIMIT = 20
CALLS, ROUNDS = 100, 2000  # rounds shorter than a time slice: some are undisturbed on a busy machine too


def nanoseconds(statement, names):
    """The fastest of many rounds: what the machine does besides only adds."""
    return min(timeit.repeat(statement, globals=names, number=CALLS, repeat=ROUNDS)) / CALLS * 1e9


def main():
    x = np.random.default_rng(1).standard_normal((16, 16), np.float32)
    q = nib.Quantizer()

    # The library alone, in a loop of its own calls: no Python between them but the calls.
    functions = ctypes.CDLL(_library.path)
    quantize, destroy = functions.nib_quantize, functions.nib_tensor_destroy
    quantize.argtypes, destroy.argtypes, destroy.restype = [ctypes.c_void_p] * 4, [ctypes.c_void_p], None
    array, out = _arrays.borrow(x)[0], ctypes.c_void_p()
    names = {"quantize": quantize, "destroy": destroy, "empty": _library.raw.nib_get_fp4_align_size, "nib": nib, "x": x,
             "q": q, "out": out, "a": q.ref, "b": ctypes.byref(array), "c": ctypes.byref(out)}

    empty = nanoseconds("empty()", names)
    library = nanoseconds("quantize(a, b, None, c); destroy(out)", names) - 2 * empty
    rows = {"an empty ctypes call": empty, "the library's own work": library}
    for statement in ("nib.quantize(x)", "nib.quantize(x, q)", "nib.quantize(x, columnwise=False)"):
        rows[statement] = nanoseconds(statement, names)
    for what, time in rows.items():
        print(f"{what:36} {time:8.0f} ns  {time / empty:6.1f} empty calls")
    whole = rows["nib.quantize(x)"]
    overhead = (whole - library) / empty
    print(f"overhead of nib.quantize on 16x16: {overhead:.1f} empty ctypes calls (at most {LIMIT}), "
          f"{whole / empty:.1f} with the library's work")
    return 0 if overhead <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
