# SPDX-License-Identifier: Apache-2.0
"""Every golden file through NumPy: the bytes that other people's code made."""
import numpy as np
import pytest

import nib
import vectors


def options_of(case):
    options = {"dialect": case["dialect"], "columnwise": case["columnwise"], "rht": case["rht"],
               "row_scaled": case["row_scaled"], "e4m3_max": case["e4m3_max"], "block_dims": case["block"]}
    if case["four_over_six"] != "off":
        options.update(scale_rule="4over6", error_mode=case["four_over_six"])
    if case.get("levels") == 1:
        options["no_tensor_scale"] = True
    return options


def tensor_scale_names():
    return {"global_scale": "row_tensor_scale", "tensor_scale": "row_tensor_scale", "row_amax": "row_tensor_scale",
            "col_amax": "col_tensor_scale"}


def ulps(a, b):
    return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max(initial=0)


def compare(case, tensors, part):
    """part(name): an array of ours, without padding."""
    names = {"row_data": "row_data", "row_scale": "row_scale", "col_data": "col_data", "col_scale": "col_scale",
             **tensor_scale_names()}
    seen = 0
    for name, (expected, _code) in tensors.items():
        if name in ("x", "y"):
            continue
        got = np.asarray(part(names[name])).view(expected.dtype)
        assert got.shape == expected.shape, name
        if name == "col_amax" and not case["exact"]:
            assert ulps(got, expected) <= 2
        else:
            assert got.tobytes() == expected.tobytes(), name
        seen += 1
    assert seen >= 2


def overrides_of(case, tensors):
    for name in ("global_scale", "tensor_scale"):
        if case.get(f"given_{name}"):
            return {"tensor_scale": tensors[name][0]}
    return None


@pytest.mark.parametrize("stem", vectors.QUANTIZE_FILES)
def test_quantize(stem):
    cases, arrays = vectors.load(stem)
    for name, case in cases.items():
        tensors = vectors.of_case(arrays, name)
        x, code = tensors["x"]
        t = nib.quantize(x, nib.Quantizer(**options_of(case)), dtype=code, overrides=overrides_of(case, tensors))
        compare(case, tensors, t.valid_part)
        if "y" in tensors:
            assert np.array_equal(t.dequantize("float32"), tensors["y"][0], equal_nan=True), name
        # The values, computed once more by NumPy from the golden bytes.
        if stem == "te_1d":
            data, scale, amax = (tensors[n][0] for n in ("row_data", "row_scale", "row_amax"))
            codes = np.stack([data & 15, data >> 4], -1).reshape(x.shape)
            factor = (nib.decode(scale, "e4m3").reshape(scale.shape) * amax) * (np.float32(1) / np.float32(2688))
            values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)
            values = np.concatenate([values, -values])[codes] * np.repeat(factor, 16, 1)
            assert t.dequantize("float32").tobytes() == values.tobytes()


def test_gemm():
    cases, arrays = vectors.load("te_gemm")
    for name in cases:
        tensors = vectors.of_case(arrays, name)
        a, b = (nib.quantize(tensors[n][0], dtype="bf16", columnwise=False) for n in "ab")
        assert nib.gemm(a, b).tobytes() == tensors["y"][0].tobytes()


def test_casts():
    _cases, arrays = vectors.load("casts")
    tensors = {name: array for name, (array, _code) in vectors.of_case(arrays, "casts").items()}
    for dtype in ("e4m3", "e5m2", "e8m0"):
        codes = np.arange(256, dtype=np.uint8)
        got, expected = nib.decode(codes, dtype), tensors[f"f32_of_{dtype}"]
        assert np.array_equal(got, expected, equal_nan=True)
    x = (tensors["bf16_bits"].astype(np.uint32) << 16).view(np.float32)
    x = np.where(np.isfinite(x), x, 0).astype(np.float32)
    assert np.array_equal(nib.encode(np.clip(x, -448, 448), "e4m3"), tensors["e4m3_of_bf16_clamped"])
    packed = nib.encode(np.clip(x, -6, 6), "e2m1")
    got = np.stack([packed & 15, packed >> 4], -1).reshape(-1)
    expected = tensors["e2m1_of_bf16_clamped"]
    assert np.array_equal(got & 7, expected & 7)
    nonzero = (expected & 7) != 0
    assert np.array_equal(got[nonzero], expected[nonzero])
