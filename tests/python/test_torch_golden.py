# SPDX-License-Identifier: Apache-2.0
"""Every golden file through PyTorch: quantizers by TransformerEngine's names, the gist, and torch tensors by DLPack."""
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import nib  # noqa: E402
import vectors  # noqa: E402
from nib.torch import NVFP4Quantizer, NVFP4Tensor, gist  # noqa: E402
from nib.torch.utils import gemm_reference  # noqa: E402
from test_golden import compare, overrides_of, options_of  # noqa: E402

ATTRIBUTES = {"row_data": "_rowwise_data", "col_data": "_columnwise_data", "row_scale": "_rowwise_scale_inv",
              "col_scale": "_columnwise_scale_inv", "row_tensor_scale": "_amax_rowwise",
              "col_tensor_scale": "_amax_columnwise"}


def to_torch(x, code):
    t = torch.from_numpy(x.copy())
    return t.view(torch.bfloat16) if code == nib.DType.BF16 else t


def quantizer_of(case):
    return NVFP4Quantizer(columnwise=case["columnwise"], with_rht=case["rht"], row_scaled_nvfp4=case["row_scaled"],
                          block_dims=tuple(int(n) for n in case["block"].split("x")),
                          nvfp4_use_4over6=case["four_over_six"] != "off", nvfp4_e4m3_max=case["e4m3_max"],
                          nvfp4_4over6_err_mode="MSE" if case["four_over_six"] == "mse" else "MAE")


def valid(t, tensors):
    """A part of a torch tensor, cut to the shape of the golden one."""
    names = {"row_tensor_scale": "row_amax", "col_tensor_scale": "col_amax"}

    def part(name):
        whole = getattr(t, ATTRIBUTES[name])
        shape = tensors[names.get(name, name)][0].shape
        padding = whole.clone()
        padding[tuple(slice(n) for n in shape)] = 0
        assert not padding.any(), "padding is zero"
        return whole[tuple(slice(n) for n in shape)].contiguous().numpy()
    return part


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("stem", [s for s in vectors.QUANTIZE_FILES if s.startswith("te_")])
def test_transformer_engine(stem, internal):
    cases, arrays = vectors.load(stem)
    for name, case in cases.items():
        tensors = vectors.of_case(arrays, name)
        x = to_torch(*tensors["x"])
        quantizer = quantizer_of(case)
        quantizer.internal = internal
        t = quantizer(x)
        assert isinstance(t, NVFP4Tensor) != internal
        compare(case, tensors, valid(t, tensors))
        empty = quantizer.make_empty(x.shape, dtype=x.dtype)
        quantizer.update_quantized(x, empty)  # in place gives the same
        compare(case, tensors, valid(empty, tensors))


def test_gist():
    cases, arrays = vectors.load("gist")
    for name, case in cases.items():
        tensors = vectors.of_case(arrays, name)
        given = torch.from_numpy(tensors["global_scale"][0].copy()) if case.get("given_global_scale") else None
        xq, xs, scale = gist.quant_nvfp4_torch(to_torch(*tensors["x"]), given)
        got = {"row_data": xq.view(torch.uint8), "row_scale": xs.view(torch.uint8),
               "row_tensor_scale": scale.reshape(1)}
        compare(case, tensors, lambda part: got[part].numpy())


def test_gist_by_a_scale_that_is_a_view():
    """Its memory has the other sign."""
    x, scale = torch.randn(4, 32), torch.tensor(1 - 7j).conj().imag
    assert scale.is_neg()
    (codes, scales, _), (wanted, wanted_scales, _) = gist.quant_nvfp4_torch(x, scale), gist.quant_nvfp4_torch(x, 7.0)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), wanted_scales.view(torch.uint8))


@pytest.mark.parametrize("stem", vectors.QUANTIZE_FILES)
def test_torch_tensors_by_dlpack(stem):
    cases, arrays = vectors.load(stem)
    for name, case in cases.items():
        tensors = vectors.of_case(arrays, name)
        t = nib.quantize(to_torch(*tensors["x"]), nib.Quantizer(**options_of(case)),
                         overrides=overrides_of(case, tensors))
        compare(case, tensors, t.valid_part)
        out = torch.empty(t.shape, dtype=torch.float32)
        t.dequantize(out=out)
        assert np.array_equal(out.numpy(), t.dequantize("float32"), equal_nan=True)


def test_gemm():
    cases, arrays = vectors.load("te_gemm")
    for name in cases:
        tensors = vectors.of_case(arrays, name)
        a, b = (NVFP4Quantizer(columnwise=False)(to_torch(*tensors[n])) for n in "ab")
        assert gemm_reference(a, b).numpy().tobytes() == tensors["y"][0].tobytes()


def test_casts():
    """nib's casts are torch's, over the golden bits."""
    _cases, arrays = vectors.load("casts")
    bits = arrays["casts/bf16_bits"][0].astype(np.uint16)
    x = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()
    x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
    e4m3 = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3, arrays["casts/e4m3_of_bf16_clamped"][0])
    assert np.array_equal(nib.encode(x.clamp(-448, 448).numpy(), "e4m3"), e4m3)
    packed = gist.cvt_1xfp32_2xfp4(x.clamp(-6, 6)).view(torch.uint8).numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(-1)
    expected = arrays["casts/e2m1_of_bf16_clamped"][0]
    differ = codes != expected
    assert not (expected[differ] & 7).any(), "but for the sign of zero"
