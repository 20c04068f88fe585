# SPDX-License-Identifier: Apache-2.0
"""Reading of tests/golden: the cases of a file and their arrays, without any package but NumPy."""
import ctypes
import json
import os

import numpy as np

from conftest import ROOT
from nib import DType, _arrays
from nib._library import Entry, lib, raw

GOLDEN = os.path.join(ROOT, "tests/golden")
QUANTIZE_FILES = ("te_1d", "te_2d", "te_row_scaled", "te_4over6", "te_rht", "gist", "torchao", "modelopt",
                  "compressed_tensors")


def load(stem):
    """(cases, arrays): arrays by name, each with its nib dtype; BF16 as uint16."""
    file = ctypes.c_void_p()
    lib.nib_file_open(os.path.join(GOLDEN, stem + ".safetensors").encode(), file)
    cases = json.loads(raw.nib_file_metadata(file, b"cases"))
    arrays = {}
    for i in range(raw.nib_file_count(file)):
        entry = Entry()
        lib.nib_file_entry(file, i, entry)
        code = DType(entry.dtype)
        dtype = np.dtype(np.uint16) if code == DType.BF16 else _arrays.numpy_dtype(code)
        out = np.empty(tuple(entry.shape[:entry.rank]), dtype)
        lib.nib_file_read(file, i, 0, out.ctypes.data, out.nbytes)
        arrays[entry.name.decode()] = (out, code)
    raw.nib_file_close(file)
    return cases, arrays


def of_case(arrays, name):
    """{tensor: (array, dtype)} of a case."""
    return {key[len(name) + 1:]: value for key, value in arrays.items() if key.startswith(name + "/")}
