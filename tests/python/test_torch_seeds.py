# SPDX-License-Identifier: Apache-2.0
"""The usage examples of the documents that name this API, as they stand there: only imports and the making of inputs
are ours. Then every name of theirs, with its documented behavior and errors."""
import contextlib
import inspect
import io

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import nib.torch  # noqa: E402


@pytest.fixture
def input_tensor():
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


# ---- Storage ---------------------------------------------------------------------------------------------


def test_storage_example(input_tensor):
    quantizer = nib.torch.NVFP4Quantizer()
    # NVFP4TensorStorage is used as a mixin base class
    from nib.torch import NVFP4Tensor

    # Access storage attributes through the tensor
    nvfp4_tensor = quantizer.quantize(input_tensor)
    row_data = nvfp4_tensor._rowwise_data  # packed FP4 uint8
    row_scales = nvfp4_tensor._rowwise_scale_inv
    amax = nvfp4_tensor._amax_rowwise

    assert isinstance(nvfp4_tensor, NVFP4Tensor)
    assert row_data.dtype == torch.uint8 and row_data.shape == (64, 64)
    assert row_scales.dtype == torch.uint8 and row_scales.shape == (128, 8)
    assert amax.dtype == torch.float32 and amax.item() == input_tensor.abs().max().item()


def test_storage_names(input_tensor):
    from nib.torch import NVFP4TensorStorage, QuantizedTensorStorage, _fp4_e2m1_vals, _FromNVFP4Func
    values = _fp4_e2m1_vals(torch.device("cpu"), torch.float32)
    assert values.tolist() == [0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(values[8]) and _fp4_e2m1_vals(torch.device("cpu"), torch.bfloat16).dtype == torch.bfloat16
    assert issubclass(_FromNVFP4Func, torch.autograd.Function)
    quantizer = nib.torch.NVFP4Quantizer()
    quantizer.internal = True
    storage = quantizer.quantize(input_tensor)
    assert type(storage) is NVFP4TensorStorage and isinstance(storage, QuantizedTensorStorage)
    assert not isinstance(storage, torch.Tensor)
    values = _FromNVFP4Func.forward(None, storage, torch.bfloat16)
    assert torch.equal(values, storage.dequantize())
    assert _FromNVFP4Func.backward(None, "gradient") == ("gradient", None)

    metadata = storage.get_metadata()
    assert isinstance(metadata, dict) and len(metadata) == 13
    assert set(inspect.signature(NVFP4TensorStorage.__new__).parameters) - {"cls", "args", "kwargs"} == set(metadata)
    again = NVFP4TensorStorage(**metadata)
    assert torch.equal(again.dequantize(), storage.dequantize()) and again.shape == storage.shape
    assert metadata["quantizer"] is storage._quantizer and again._quantizer is not storage._quantizer

    saved, same = storage.prepare_for_saving()
    assert same is storage and len(saved) == 6
    assert [t.dtype for t in saved] == [torch.uint8] * 4 + [torch.float32] * 2
    assert saved[0].shape == (64, 64) and saved[1].shape == (128, 32)
    assert storage._rowwise_data is None and storage._amax_columnwise is None and storage.shape == (64, 128)
    assert storage.restore_from_saved([*saved, "rest"]) == ["rest"]
    assert storage._rowwise_data is saved[0] and storage._amax_rowwise is saved[4]
    with pytest.raises(IndexError):
        storage.restore_from_saved(saved[:5])
    alias = storage._rowwise_data
    storage.clear()
    assert storage._rowwise_data.numel() == 0 and alias.numel() == 0


# ---- NVFP4Tensor -----------------------------------------------------------------------------------------


def test_nvfp4_tensor_example(input_tensor):
    from nib.torch import NVFP4Quantizer
    import torch

    # Create NVFP4 quantizer with RHT for better accuracy
    quantizer = NVFP4Quantizer(
        fp8_dtype=torch.float8_e4m3fn,
        with_rht=True,
    )
    quantizer.set_usage(rowwise=True, columnwise=True)

    nvfp4_tensor = quantizer.quantize(input_tensor)
    output = nvfp4_tensor.dequantize(dtype=torch.bfloat16)

    assert output.dtype == torch.bfloat16 and output.shape == input_tensor.shape
    assert (output - input_tensor).abs().max() < input_tensor.abs().max() / 6
    assert nvfp4_tensor.get_usages() == {"rowwise": True, "columnwise": True}
    assert torch.equal(nvfp4_tensor.dequantize(torch.float32), nvfp4_tensor.dequantize(dtype=torch.float32))
    assert quantizer.with_post_rht_amax


def test_nvfp4_tensor_names():
    from nib.torch import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage, QuantizedTensor, Quantizer
    from nib.torch import get_hadamard_matrix, get_rht_matrix
    h = get_hadamard_matrix(16, 0)
    assert h.dtype == torch.float32 and torch.equal(h @ h, torch.eye(16))
    assert torch.equal(h, torch.tensor([[(-1) ** bin(i & j).count("1") / 4 for j in range(16)] for i in range(16)]))
    with pytest.raises(AssertionError):
        get_hadamard_matrix(32, 0)
    r = get_rht_matrix(True, 0)
    assert r.dtype == torch.bfloat16 and torch.equal(get_rht_matrix(False, 0).float(), h)
    signs = nib.torch.get_wgrad_sign_vector()
    assert signs.tolist() == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert torch.equal(r.float(), signs[:, None] * h)
    assert nib.torch.get_sign_from_vector(signs) == 0xD7E8 == nib.torch.get_random_sign_mask_for_rht(True)
    assert nib.torch.get_random_sign_mask_for_rht(False) == 0 and nib.torch.get_no_random_sign_vector().tolist() == [1]
    assert issubclass(NVFP4Quantizer, Quantizer)
    assert issubclass(NVFP4Tensor, NVFP4TensorStorage) and issubclass(NVFP4Tensor, QuantizedTensor)
    assert NVFP4Quantizer(torch.float8_e4m3fn, block_dims=(16, 16)).with_2d_quantization
    assert not NVFP4Quantizer(fp8_dtype=torch.uint8, block_dims=(1, 16)).with_2d_quantization
    for wrong in (dict(fp8_dtype=torch.float8_e5m2), dict(block_dims=(8, 8)), dict(nvfp4_e4m3_max=300),
                  dict(nvfp4_4over6_err_mode="MAX"), dict(block_dims=(1, 16), with_2d_quantization=True),
                  dict(fp4_dtype=nib.torch.DType.kFloat8E4M3)):
        with pytest.raises(ValueError):
            NVFP4Quantizer(**wrong)
    with pytest.raises(RuntimeError, match="Pre-RHT amax"):
        NVFP4Quantizer(with_rht=True, with_post_rht_amax=False)(torch.zeros(16, 16, dtype=torch.bfloat16))


# ---- QuantizedTensor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", [
    nib.torch.NVFP4Quantizer(), nib.torch.Float8CurrentScalingQuantizer(nib.torch.DType.kFloat8E4M3),
    nib.torch.Float8Quantizer(torch.ones(1), torch.zeros(1), nib.torch.DType.kFloat8E4M3),
    nib.torch.MXFP8Quantizer(nib.torch.DType.kFloat8E4M3),
    nib.torch.Float8BlockQuantizer(nib.torch.DType.kFloat8E4M3, rowwise=True, columnwise=True)])
def test_quantized_tensor_example(input_tensor, quantizer):
    regular_tensor = torch.randn(3)
    from nib.torch import QuantizedTensor

    # QuantizedTensor behaves like a regular PyTorch tensor
    fp8_tensor = quantizer.quantize(input_tensor)
    assert isinstance(fp8_tensor, QuantizedTensor)

    # Dequantize back to high precision
    output = fp8_tensor.dequantize(dtype=torch.float32)

    # Works with autograd save_for_backward
    from nib.torch import prepare_for_saving, restore_from_saved
    saved = prepare_for_saving(fp8_tensor, regular_tensor)
    restored = restore_from_saved(*saved)

    assert output.dtype == torch.float32 and (output - input_tensor.float()).abs().max() < 1
    assert restored[0] is fp8_tensor and restored[1] is regular_tensor and len(restored) == 2


def test_quantized_tensor_names():
    from nib.torch import QuantizedTensor, QuantizedTensorStorage, Quantizer
    storage = QuantizedTensorStorage()
    for call in (storage.get_metadata, storage.prepare_for_saving, lambda: storage.restore_from_saved([]),
                 storage.clear, storage.update_usage, storage.get_usages, storage.size,
                 lambda: storage.copy_from_storage(storage), storage.fsdp_buffer_fields):
        with pytest.raises(NotImplementedError, match="QuantizedTensorStorage"):
            call()
    with pytest.raises(ValueError, match="no quantizer and no default"):
        storage.quantize_(torch.zeros(1))
    with pytest.raises(RuntimeError):
        storage.update_quantizer(nib.torch.NVFP4Quantizer())

    class Plain(Quantizer):
        pass

    quantizer = Plain()
    for call in (lambda: quantizer.quantize(torch.zeros(1)), lambda: quantizer.quantize_impl(torch.zeros(1)),
                 lambda: quantizer.update_quantized(None, None), lambda: quantizer.make_empty((1,)), quantizer.copy,
                 lambda: quantizer.onnx_quantize(None), lambda: quantizer.onnx_dequantize(None)):
        with pytest.raises(NotImplementedError, match="Plain"):
            call()
    assert quantizer.calibrate(torch.zeros(1)) is None and quantizer.is_quantizable(torch.zeros(1))
    assert not quantizer.supports_only_rowwise_all_gather() and not quantizer.is_requantization_safe()
    quantizer.set_usage(rowwise=False)
    assert quantizer.get_usages() == {"rowwise": False, "columnwise": True}
    with pytest.raises(TypeError):
        quantizer.set_usage(False, False)
    assert issubclass(QuantizedTensor, QuantizedTensorStorage) and issubclass(QuantizedTensor, torch.Tensor)
    bare = QuantizedTensor((2, 3), torch.float32)
    with pytest.raises(NotImplementedError):
        bare.dequantize()
    with pytest.raises(NotImplementedError):
        bare.quantize_(torch.zeros(2, 3))
    with pytest.raises(ValueError):
        QuantizedTensor((2, 3), torch.float32, fake_dtype=torch.float16)
    assert "QuantizedTensor" in repr(bare)
    for name in ("Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor"):
        assert issubclass(getattr(nib.torch, name), QuantizedTensor)


# ---- fp4_utils -------------------------------------------------------------------------------------------


def test_fp4_utils(input_tensor):
    from nib.torch.fp4_utils import (HAVE_TE, HAVE_TE_FP4_TENSOR_CLASS, dequantize_fp4_tensor, get_fp4_align_size,
                                     get_nvfp4_rowwise_packed_shape, is_nvfp4tensor, modify_nvfp4_rowwise_storage)
    assert HAVE_TE is False and HAVE_TE_FP4_TENSOR_CLASS is False
    t = nib.torch.NVFP4Quantizer()(input_tensor)
    assert is_nvfp4tensor(t) and is_nvfp4tensor(torch.nn.Parameter(t.detach()))
    mxfp8 = nib.torch.MXFP8Quantizer()(input_tensor)
    assert not is_nvfp4tensor(input_tensor) and not is_nvfp4tensor(mxfp8) and not is_nvfp4tensor(None)

    assert get_nvfp4_rowwise_packed_shape(torch.Size([2, 3, 32])) == torch.Size([2, 3, 16])
    assert get_nvfp4_rowwise_packed_shape(torch.Size([])) == torch.Size([])
    with pytest.raises(AssertionError):
        get_nvfp4_rowwise_packed_shape(torch.Size([3, 5]))

    old, values = t._rowwise_data.clone(), t.dequantize()
    new = torch.zeros_like(old)
    assert modify_nvfp4_rowwise_storage(t, new) is None
    assert t._rowwise_data is new and torch.equal(new, old) and torch.equal(t.dequantize(), values)
    arena = torch.zeros(10000, dtype=torch.uint8)
    modify_nvfp4_rowwise_storage(t, arena[64:64 + old.numel()].view(old.shape))
    assert t._rowwise_data.data_ptr() == arena.data_ptr() + 64 and torch.equal(t.dequantize(), values)
    with pytest.raises(ValueError):
        modify_nvfp4_rowwise_storage(input_tensor, new)
    with pytest.raises(AssertionError):
        modify_nvfp4_rowwise_storage(t, new.float())
    with pytest.raises(ValueError):  # a copy_ would broadcast this
        modify_nvfp4_rowwise_storage(t, torch.zeros(1, 64, dtype=torch.uint8))
    with pytest.raises(ValueError):
        modify_nvfp4_rowwise_storage(t, torch.zeros(64, 128, dtype=torch.uint8)[:, ::2])
    columnwise = nib.torch.NVFP4Quantizer(rowwise=False)(input_tensor)
    with pytest.raises(RuntimeError):
        modify_nvfp4_rowwise_storage(columnwise, new)

    assert get_fp4_align_size("nvfp4") == 128
    assert torch.equal(dequantize_fp4_tensor(t), values)
    assert dequantize_fp4_tensor(columnwise).shape == input_tensor.shape


# ---- The gist --------------------------------------------------------------------------------------------


def gist_cvt(x, thresholds, dtype):
    """The document's own arithmetic."""
    bits = x.view(torch.int32)
    sign_bit = (bits >> 31) & 0x1
    x_abs = x.abs()
    other_bits = torch.full_like(x_abs, 0b0111, dtype=torch.int)
    for i, (m, code) in enumerate(thresholds):
        mask = x_abs <= m if i % 2 == 0 else x_abs < m
        other_bits = torch.where(mask, code, other_bits)
    e2m1 = (sign_bit << 3) | other_bits
    e2m1x2 = sum((e2m1[..., i::8] << 4 * i) for i in range(8))
    return e2m1x2.to(torch.int32).view(dtype)


def gist_quant(x, global_scale, names):
    x_blocks_f32 = x.unflatten(-1, (-1, 16)).float()
    if global_scale is None:
        global_scale = names.FP4_AMAX * names.FP8_AMAX / x_blocks_f32.abs().amax()
    s_decb = x_blocks_f32.abs().amax(dim=-1) / names.FP4_AMAX
    xs = (s_decb * global_scale).clamp(-names.FP8_AMAX, names.FP8_AMAX).to(names.FP8_DTYPE)
    s_encb = (global_scale / xs.float().clip(1e-12)).unsqueeze(-1)
    xq = gist_cvt(x_blocks_f32 * s_encb, names.thresholds, names.FP4_DTYPE).reshape(*x.shape[:-1], -1)
    return xq, xs, global_scale


def test_gist_example():
    from nib.torch.gist import quant_nvfp4_torch
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        shape = (512, 128)
        x = torch.randn(shape, dtype=torch.bfloat16) * 0.01
        xq, xs, global_scale = quant_nvfp4_torch(x)
        print(">> Quantized tensor:")
        print(xq)
        print(xq.shape)
        print(">> Blockwise scales")
        print(xs)
        print(xs.shape)
        print(">> Global scale:")
        print(global_scale)
    assert "torch.Size([512, 64])" in printed.getvalue() and "torch.Size([512, 8])" in printed.getvalue()


def test_gist_names():
    from nib.torch import gist
    assert (gist.FP8_AMAX, gist.FP4_AMAX, gist.FP8_DTYPE) == (448.0, 6.0, torch.float8_e4m3fn)
    assert gist.FP4_DTYPE == getattr(torch, "float4_e2m1fn_x2", torch.uint8)
    assert gist.thresholds == [(5.0, 6), (3.5, 5), (2.5, 4), (1.75, 3), (1.25, 2), (0.75, 1), (0.25, 0)]


def bytes_of(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("shape", [(16,), (3, 32), (2, 5, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gist_bytes(shape, dtype):
    from nib.torch import gist
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    for given in (None, torch.tensor(100.0), torch.tensor(0.37)):
        mine, theirs = gist.quant_nvfp4_torch(x, given), gist_quant(x, given, gist)
        assert mine[0].dtype == theirs[0].dtype and mine[0].shape == theirs[0].shape
        assert mine[1].dtype == theirs[1].dtype and mine[1].shape == theirs[1].shape
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(mine, theirs))
        assert given is None or mine[2] is given
    with pytest.raises(AssertionError):
        gist.quant_nvfp4_torch(torch.zeros(4, 17))


def test_gist_cvt():
    from nib.torch import gist
    x = torch.randn(64, 3, 16, generator=torch.Generator().manual_seed(6)) * 3
    nan = torch.tensor(float("nan"))
    x[0, 0, :8] = torch.tensor([.25, .75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    x[0, 1, :8] = torch.tensor([float("inf"), -float("inf"), 0, -0.0, -1e-30, 1e-30, 1e30, -1e30])
    x[0, 2, :2] = torch.stack([nan.copysign(torch.tensor(1.)), nan.copysign(torch.tensor(-1.))])
    mine, theirs = gist.cvt_1xfp32_2xfp4(x), gist_cvt(x, gist.thresholds, gist.FP4_DTYPE)
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(bytes_of(mine), bytes_of(theirs))
    with pytest.raises(AssertionError):
        gist.cvt_1xfp32_2xfp4(x.bfloat16())
    with pytest.raises(ValueError):
        gist.cvt_1xfp32_2xfp4(torch.zeros(3, 7))
