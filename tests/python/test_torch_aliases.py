# SPDX-License-Identifier: Apache-2.0
"""The names of TransformerEngine and Megatron: the documents' examples with the imports that stand there, every module
and name, buffers as theirs, and what happens where the real packages are."""
import importlib
import math
import os
import random
import re
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import nib.torch  # noqa: E402

nib.torch.install_aliases()


@pytest.fixture
def input_tensor():
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


# ---- The examples, as they stand -------------------------------------------------------------------------


def test_storage_example(input_tensor):
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
    quantizer = NVFP4Quantizer()
    # NVFP4TensorStorage is used as a mixin base class
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

    # Access storage attributes through the tensor
    nvfp4_tensor = quantizer.quantize(input_tensor)
    row_data = nvfp4_tensor._rowwise_data # packed FP4 uint8
    row_scales = nvfp4_tensor._rowwise_scale_inv
    amax = nvfp4_tensor._amax_rowwise

    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import (
        NVFP4TensorStorage,
    )
    assert isinstance(nvfp4_tensor, NVFP4Tensor) and isinstance(nvfp4_tensor, NVFP4TensorStorage)
    assert (row_data.dtype, row_data.shape) == (torch.uint8, (64, 64))
    assert (row_scales.dtype, row_scales.shape) == (torch.uint8, (128, 8))
    assert (amax.dtype, amax.shape) == (torch.float32, (1,))


def test_nvfp4_tensor_example(input_tensor):
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
    import torch

    # Create NVFP4 quantizer with RHT for better accuracy
    quantizer = NVFP4Quantizer(
        fp8_dtype=torch.float8_e4m3fn,
        with_rht=True,
    )
    quantizer.set_usage(rowwise=True, columnwise=True)

    nvfp4_tensor = quantizer.quantize(input_tensor)
    output = nvfp4_tensor.dequantize(dtype=torch.bfloat16)

    assert output.dtype == torch.bfloat16 and (output - input_tensor).abs().max() < input_tensor.abs().max() / 6


def test_quantized_tensor_example(input_tensor):
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch import DType
    quantizer, regular_tensor = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu"), torch.randn(3)
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    # QuantizedTensor behaves like a regular PyTorch tensor
    fp8_tensor = quantizer.quantize(input_tensor)
    assert isinstance(fp8_tensor, QuantizedTensor)

    # Dequantize back to high precision
    output = fp8_tensor.dequantize(dtype=torch.float32)

    # Works with autograd save_for_backward
    from transformer_engine.pytorch.quantized_tensor import prepare_for_saving, restore_from_saved
    saved = prepare_for_saving(fp8_tensor, regular_tensor)
    restored = restore_from_saved(*saved)

    assert output.dtype == torch.float32 and restored[0] is fp8_tensor and restored[1] is regular_tensor
    from transformer_engine.pytorch.quantized_tensor import (  # noqa: F401
        QuantizedTensorStorage,
        Quantizer,
        QuantizedTensor,
        prepare_for_saving,
        restore_from_saved,
    )


def test_fp4_utils(input_tensor):
    import core.fp4_utils
    import megatron.core.fp4_utils
    from megatron.core.enums import Fp4Recipe
    for utils in (core.fp4_utils, megatron.core.fp4_utils):
        assert utils.HAVE_TE is False and utils.HAVE_TE_FP4_TENSOR_CLASS is False
        assert utils.is_nvfp4tensor(nib.torch.NVFP4Quantizer()(input_tensor)) and not utils.is_nvfp4tensor(input_tensor)
        assert utils.get_nvfp4_rowwise_packed_shape(torch.Size([4, 32])) == torch.Size([4, 16])
        assert utils.get_fp4_align_size(Fp4Recipe.nvfp4) == 128
        for name in ("modify_nvfp4_rowwise_storage", "quantize_nvfp4_param_shard", "dequantize_fp4_tensor"):
            assert callable(getattr(utils, name))


def megatron_buffer(numels, size):
    """The layouts that Megatron's buffer makes of NVFP4 parameters in one bucket: each begins at a multiple of 64, and
    a bucket ends at one of lcm(ranks, 128)."""
    def layout(numels):
        index, at = {}, 0
        for i, numel in enumerate(numels):
            at = -(-at // 64) * 64
            index[i] = (at, at + numel, 0)
            at += numel
        step = math.lcm(size, 128)
        return index, [(0, -(-at // step) * step)]
    index, buckets = layout(numels)
    packed_index, packed_buckets = layout([numel // 2 for numel in numels])
    return types.SimpleNamespace(has_nvfp4_params=True, data_parallel_world_size=size, param_index_map=index,
                                 bucket_indices=buckets, nvfp4_packed_param_index_map=packed_index,
                                 nvfp4_packed_bucket_indices=packed_buckets)


def gathered_wrongly(buffer):
    """The same by doing it: which bytes do not come from the one rank that cast them."""
    size, (_, elements), (_, packed) = (buffer.data_parallel_world_size, buffer.bucket_indices[0],
                                        buffer.nvfp4_packed_bucket_indices[0])
    cast = [set() for _ in range(packed)]
    for i, (start, end, _bucket) in buffer.param_index_map.items():
        for element in range(start, end):
            byte = buffer.nvfp4_packed_param_index_map[i][0] + (element - start) // 2
            cast[byte].add(element // (elements // size))
    return sum(1 for byte, ranks in enumerate(cast) if ranks and ranks != {byte // (packed // size)})


def test_check_buffers():
    """Bytes that ranks cast and others gather are found: as many as Megatron's own code would get wrong."""
    check_buffers = nib.torch.megatron.check_buffers
    with pytest.raises(ValueError, match="11904 elements but 6144 packed bytes over 3 ranks: 192 bytes"):
        check_buffers([megatron_buffer([11776], 3)])
    generator, found = random.Random(1), []
    for _ in range(60):
        size = generator.choice((1, 2, 3, 4, 5, 6, 8, 12))
        buffer = megatron_buffer([256 * generator.randint(1, 24) for _ in range(generator.randint(1, 4))], size)
        wrong = gathered_wrongly(buffer)
        found.append(bool(wrong))
        if wrong:
            with pytest.raises(ValueError, match=f" {wrong} bytes that a rank casts"):
                check_buffers(types.SimpleNamespace(buffers=[buffer]))
        else:
            check_buffers(types.SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[]))
    assert any(found) and not all(found)
    check_buffers([types.SimpleNamespace(has_nvfp4_params=False)])
    alone = megatron_buffer([11776], 3)
    alone.ddp_config = types.SimpleNamespace(use_distributed_optimizer=False)
    check_buffers([alone])


def test_fp4_recipe_and_context():
    from megatron.core.enums import Fp4Recipe
    from megatron.core.fp4_utils import get_fp4_context, get_fp4_recipe
    config = types.SimpleNamespace(fp4="e2m1", fp4_recipe=Fp4Recipe.nvfp4, fp8_dot_product_attention=True,
                                   first_last_layers_bf16=True, num_layers_at_start_in_bf16=1,
                                   num_layers_at_end_in_bf16=2, num_layers=6, fp4_param=False)
    assert get_fp4_recipe(config).nvfp4() and get_fp4_recipe(config).fp8_dpa
    on = []
    for layer in range(6):
        with get_fp4_context(config, layer):
            on.append(nib.torch.module.is_fp8_enabled())
    assert on == [False, True, True, True, False, False] and not nib.torch.module.is_fp8_enabled()
    with get_fp4_context(config, 1, is_init=True):
        assert type(nib.torch.Linear(16, 16).weight.data) is torch.Tensor
    config.fp4_param = True
    with get_fp4_context(config, 1, is_init=True):
        weight = nib.torch.Linear(16, 16).weight
    assert isinstance(weight, nib.torch.NVFP4Tensor)
    values = weight.get_high_precision_init_val()  # masters begin with them
    assert torch.equal(weight._get_quantizer().copy()(values)._rowwise_data, weight._rowwise_data)
    assert not torch.equal(weight.dequantize(), values)
    with torch.no_grad(), get_fp4_context(config, 1, is_init=True):
        assert not hasattr(nib.torch.Linear(16, 16).weight, "get_high_precision_init_val")
    config.fp4 = None
    with get_fp4_context(config, 1):
        assert not nib.torch.module.is_fp8_enabled()
    config.fp4_recipe = "mxfp4"
    with pytest.raises(ValueError, match="no FP4 recipe"):
        get_fp4_recipe(config)


# ---- Modules and names -----------------------------------------------------------------------------------

NAMES = {
    "transformer_engine.pytorch": [
        "NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage", "Float8Quantizer", "Float8CurrentScalingQuantizer",
        "Float8Tensor", "Float8TensorStorage", "MXFP8Quantizer", "MXFP8Tensor", "MXFP8TensorStorage",
        "Float8BlockQuantizer", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage", "QuantizedTensor",
        "QuantizedTensorStorage", "Quantizer", "DType", "is_fp8_available", "is_mxfp8_available",
        "is_fp8_block_scaling_available", "is_nvfp4_available", "autocast", "Linear", "quantized_tensor", "tensor"],
    "transformer_engine.pytorch.quantized_tensor": ["restore_from_func_ctx"],
    "transformer_engine.pytorch.tensor.nvfp4_tensor": [
        "get_hadamard_matrix", "get_rht_matrix", "get_wgrad_sign_vector", "get_no_random_sign_vector",
        "get_sign_from_vector", "get_random_sign_mask_for_rht"],
    "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage": ["_FromNVFP4Func", "_fp4_e2m1_vals"],
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage": ["Float8TensorStorage"],
    "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage": ["MXFP8TensorStorage"],
    "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage": ["Float8BlockwiseQTensorStorage"],
    "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage": ["GroupedTensorStorage"],
    "transformer_engine.pytorch.tensor.grouped_tensor": ["GroupedTensor"],
    "transformer_engine.pytorch.tensor.float8_tensor": ["Float8Tensor"],
    "transformer_engine.pytorch.tensor.mxfp8_tensor": ["MXFP8Tensor"],
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": ["Float8BlockwiseQTensor"],
    "transformer_engine.pytorch.tensor.utils": [
        "quantize_master_weights", "cast_master_weights_to_fp8", "post_all_gather_processing", "replace_raw_data",
        "clear_columnwise_cache"],
    "transformer_engine.pytorch.constants": ["TE_DType", "NVFP4_BLOCK_SCALING_SIZE"],
    "transformer_engine.pytorch.utils": ["round_up_to_nearest_multiple", "is_non_tn_fp8_gemm_supported"],
    "transformer_engine.common.recipe": [
        "Format", "Recipe", "NVFP4BlockScaling", "MXFP8BlockScaling", "Float8BlockScaling", "Float8CurrentScaling",
        "DelayedScaling", "CustomRecipe", "QParams", "MMParams"],
    "transformer_engine_torch": [
        "DType", "quantize", "dequantize", "split_quantize", "group_quantize", "generic_gemm",
        "swizzle_scales_for_gemm_", "nvfp4_2d_compute_partial_amax", "nvfp4_2d_partial_cast",
        "nvfp4_multi_tensor_2d_partial_cast", "nvfp4_fused_scale", "nvfp4_data_transpose", "nvfp4_2d_scale_transpose"],
    "megatron.core.fp4_utils": ["quantize_nvfp4_param_shard", "is_grouped_nvfp4tensor"],
    "core.fp4_utils": ["dequantize_fp4_tensor"],
    "megatron.core.enums": ["Fp4Recipe"],
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    module = importlib.import_module(name)
    assert module.__nib_alias__ and module.__name__ == name and module.__spec__.name == name
    assert importlib.util.find_spec(name) is not None
    for wanted in NAMES[name]:
        assert getattr(module, wanted) is not None, wanted


def test_dtype():
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import NVFP4_BLOCK_SCALING_SIZE, TE_DType
    names = ["kByte", "kInt16", "kInt32", "kInt64", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2",
             "kFloat8E8M0", "kFloat4E2M1"]
    assert [tex.DType[name].value for name in names] == list(range(11))
    assert TE_DType[torch.bfloat16] == tex.DType.kBFloat16 and NVFP4_BLOCK_SCALING_SIZE == 16


def test_available():
    import transformer_engine.pytorch as te
    for call in (te.is_fp8_available, te.is_mxfp8_available, te.is_fp8_block_scaling_available, te.is_nvfp4_available):
        assert call() is True and call(return_reason=True) == (True, "")


def test_utils():
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported, round_up_to_nearest_multiple
    assert [round_up_to_nearest_multiple(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    with pytest.raises(ValueError):
        round_up_to_nearest_multiple(1, 0)
    assert is_non_tn_fp8_gemm_supported() is False


def test_modules_can_be_added(tmp_path):
    import transformer_engine.pytorch
    assert isinstance(transformer_engine.pytorch.__path__, list)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine.pytorch.added_by_a_test")
    (tmp_path / "added_by_a_test.py").write_text("from .tensor.nvfp4_tensor import NVFP4Quantizer\n")
    transformer_engine.pytorch.__path__.append(str(tmp_path))
    try:
        importlib.invalidate_caches()
        added = importlib.import_module("transformer_engine.pytorch.added_by_a_test")
        assert added.NVFP4Quantizer is nib.torch.NVFP4Quantizer
    finally:
        transformer_engine.pytorch.__path__.remove(str(tmp_path))


def run_python(code, path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.path.dirname(os.path.dirname(nib.__file__))])}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_without_the_call(tmp_path):
    code = ("import nib.torch\n"
            "try:\n    import transformer_engine\n    print('there')\n"
            "except ModuleNotFoundError:\n    print('absent')\n")
    assert run_python(code, tmp_path) == ["absent"]


def test_real_packages_stay(tmp_path):
    """A package that is really there is left alone, whole: nothing is put into it, nor taken for it."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("mine = 'real'\n")
    (tmp_path / "megatron").mkdir()  # without __init__.py: a namespace in which others have parts
    code = ("import nib.torch\n"
            "given = nib.torch.install_aliases()\n"
            "import transformer_engine\nprint(transformer_engine.mine, 'transformer_engine' in given)\n"
            "try:\n    import transformer_engine.pytorch\n    print('there')\n"
            "except ModuleNotFoundError:\n    print('absent')\n"
            "import transformer_engine_torch, megatron.core.fp4_utils\n"
            "print(transformer_engine_torch.__nib_alias__, megatron.core.fp4_utils.HAVE_TE)\n")
    assert run_python(code, tmp_path) == ["real", "False", "absent", "True", "True"]


# ---- Keyword arguments and buffers of TransformerEngine -----------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 16), (128, 64), (48, 80), (2, 64, 32), (4, 8, 16, 48)])
def test_buffers(shape):
    import transformer_engine.pytorch as te
    quantizer = te.NVFP4Quantizer(fp4_dtype=te.DType.kFloat4E2M1, rowwise=True, columnwise=True,
                                  with_amax_reduction=False, amax_reduction_group=None, with_rht=False,
                                  with_post_rht_amax=False, with_2d_quantization=False, stochastic_rounding=False,
                                  row_scaled_nvfp4=False, nvfp4_use_4over6=False, nvfp4_e4m3_max=448,
                                  nvfp4_4over6_err_mode="MAE", with_random_sign_mask=True)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    t = quantizer(x)
    rows, cols = x.numel() // shape[-1], shape[-1]

    def padded(n, to):
        return -(-n // to) * to

    expected = {"_rowwise_data": (torch.uint8, (*shape[:-1], cols // 2)),
                "_rowwise_scale_inv": (torch.uint8, (padded(rows, 128), padded(cols // 16, 4))),
                "_columnwise_data": (torch.uint8, (cols, rows // 2)),
                "_columnwise_scale_inv": (torch.uint8, (padded(cols, 128), padded(rows // 16, 4))),
                "_amax_rowwise": (torch.float32, (1,)), "_amax_columnwise": (torch.float32, (1,))}
    for name, (dtype, size) in expected.items():
        buffer = getattr(t, name)
        assert (buffer.dtype, tuple(buffer.shape)) == (dtype, size), name
        assert buffer.is_contiguous()
    assert not t._rowwise_scale_inv[rows:].any() and not t._rowwise_scale_inv[:, cols // 16:].any()
    assert not t._columnwise_scale_inv[cols:].any() and not t._columnwise_scale_inv[:, rows // 16:].any()
    assert tuple(t.shape) == shape and t.dtype == torch.bfloat16 and t._fp4_dtype == te.DType.kFloat4E2M1
    again = te.NVFP4Tensor(shape=t.shape, dtype=t.dtype, rowwise_data=t._rowwise_data,
                           rowwise_scale_inv=t._rowwise_scale_inv, columnwise_data=t._columnwise_data,
                           columnwise_scale_inv=t._columnwise_scale_inv, amax_rowwise=t._amax_rowwise,
                           amax_columnwise=t._amax_columnwise, fp4_dtype=te.DType.kFloat4E2M1, quantizer=quantizer,
                           with_gemm_swizzled_scales=False, requires_grad=False)
    assert torch.equal(again.dequantize(dtype=torch.float32), t.dequantize(dtype=torch.float32))


def test_functions():
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    quantizer = te.NVFP4Quantizer()
    t = tex.quantize(x, quantizer)
    assert torch.equal(t._rowwise_data, quantizer(x)._rowwise_data)
    assert torch.equal(tex.dequantize(t, te.DType.kFloat32), t.dequantize(dtype=torch.float32))
    other = tex.create_empty_quantized_tensor(quantizer, [64, 32], torch.bfloat16, "cpu", False)
    assert tex.quantize(x, quantizer, other, torch.ones(1)) is other and not other._rowwise_data.any()  # a no-op
    assert tex.quantize(x, quantizer, output=other, noop_flag=None) is other
    assert torch.equal(other._columnwise_data, t._columnwise_data)
    amax = torch.zeros(1)
    tex.compute_amax(x, amax)
    assert amax.item() == x.abs().max().item()
    several = tex.multi_tensor_quantize([x, 2 * x], [quantizer, quantizer])
    assert torch.equal(several[0]._rowwise_data, several[1]._rowwise_data)
    parts = tex.split_quantize(x, [16, 48], [quantizer, quantizer])
    assert torch.equal(parts[1]._rowwise_data, quantizer(x[16:])._rowwise_data)
    group = tex.group_quantize(x, te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), 2,
                               first_dims=torch.tensor([16, 48]))
    assert group.num_tensors == 2
    wide = tex.nvfp4_quantize_with_amax(x, quantizer, torch.tensor([8.0]), torch.tensor([16.0]))
    assert (wide._amax_rowwise.item(), wide._amax_columnwise.item()) == (8, 16)
    swizzled = quantizer(x)
    tex.swizzle_scales_for_gemm_(swizzled)
    tex.swizzle_scales_for_gemm_(swizzled)
    quantizer.optimize_for_gemm = True
    assert swizzled._with_gemm_swizzled_scales
    assert torch.equal(swizzled._rowwise_scale_inv.view(-1), quantizer(x)._rowwise_scale_inv.view(-1))
    assert torch.equal(swizzled.dequantize(), t.dequantize())


def test_generic_gemm():
    """The three products of a layer, in TransformerEngine's order of arguments."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    draw = torch.Generator().manual_seed(3)
    x, w, g = (torch.randn(*s, generator=draw).bfloat16() for s in ((48, 64), (32, 64), (48, 32)))
    q = te.NVFP4Quantizer(with_2d_quantization=True)
    values = {"x": q(x).dequantize(dtype=torch.float32), "w": q(w).dequantize(dtype=torch.float32),
              "g": q(g).dequantize(dtype=torch.float32)}
    rest = (None, 0, False, False)
    for a, ta, b, tb, expected in ((w, True, x, False, values["x"] @ values["w"].t()),
                                   (w, False, g, False, values["g"] @ values["w"]),
                                   (x, False, g, True, values["g"].t() @ values["x"])):
        y, bias_grad, gelu_in, extra = tex.generic_gemm(q(a), ta, q(b), tb, None, None, te.DType.kFloat32, None,
                                                        te.DType.kBFloat16, False, None, False, *rest)
        assert bias_grad is None and gelu_in is None and extra is None
        # Sums of exact products: both round each of at most 64 additions, and the last factors once or twice.
        bound = 70 * 2 ** -24 * (expected.abs().max() + values["x"].abs().max() * 64)
        assert (y - expected).abs().max() <= bound
        plain = tex.generic_gemm(q(a).dequantize(), ta, q(b).dequantize(), tb)[0]
        assert (plain - expected).abs().max() <= expected.abs().max() / 50
    bias = torch.randn(32)
    y0 = tex.generic_gemm(q(w), True, q(x), False, alpha=0.5)[0]
    y = tex.generic_gemm(q(w), True, q(x), False, bias=bias, alpha=0.5)[0]
    assert torch.equal(y, y0 + bias)
    out = torch.ones(48, 32)
    assert tex.generic_gemm(q(w), True, q(x), False, out, alpha=0.5, accumulate=True)[0] is out
    assert torch.equal(out, y0 + 1)
    tex.generic_gemm(q(w), True, q(x), False, out, alpha=0.5, accumulate=True, beta=0.25, bias=bias)
    assert torch.equal(out, (y0 + bias) + 0.25 * (y0 + 1))
    half = torch.ones(48, 64, dtype=torch.bfloat16)[:, ::2]
    tex.generic_gemm(q(w), True, q(x), False, half, accumulate=True)
    assert torch.equal(half, (2 * y0 + 1).bfloat16())
    y, _, pre, _ = tex.generic_gemm(q(w), True, q(x), False, alpha=0.5, gelu=True)
    assert torch.equal(pre, y0) and torch.equal(y, torch.nn.functional.gelu(y0, approximate="tanh"))
    grads = tex.generic_gemm(q(x), False, q(g), True, bias=bias, grad=True)
    assert torch.allclose(grads[1], values["g"].sum(0), rtol=1e-6)
    assert isinstance(tex.generic_gemm(q(w), True, q(x), False, quantizer=q)[0], te.NVFP4Tensor)
    assert tex.generic_gemm(q(w), True, q(x.view(3, 16, 64)), False)[0].shape == (3, 16, 32)
    for wrong, error in ((dict(comm_overlap=1), NotImplementedError), (dict(gelu=True, grad=True), NotImplementedError),
                         (dict(beta=0.5), ValueError), (dict(accumulate=True), ValueError),
                         (dict(D=torch.ones(32, 48)), ValueError),
                         (dict(D=torch.ones(48, 32), output_dtype=te.DType.kBFloat16), ValueError)):
        with pytest.raises(error):
            tex.generic_gemm(q(w), True, q(x), False, **wrong)
    turned = tex.generic_gemm(q(w.t().contiguous()), False, q(x), False)[0]
    both = tex.generic_gemm(q(w), True, q(x.t().contiguous()), True)[0]  # TT: the codes of other blocks
    assert both.shape == turned.shape == (48, 32) and torch.allclose(both, turned, atol=8.0)
    plain = tex.generic_gemm(w, True, x.t().contiguous(), True)[0]
    assert torch.allclose(plain, x.float() @ w.float().t(), atol=1e-4)


def test_gemm_of_groups():
    """Groups as operands and results, each also as a list, with the bits of single products."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm_for_grouped_tensor as grouped
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
    draw, counts = torch.Generator().manual_seed(6), (16, 0, 48)
    q = te.NVFP4Quantizer(with_2d_quantization=True)

    def group(shapes, quantizer=q):
        made = GroupedTensor.make_grouped_tensor_with_shapes(3, shapes, quantizer, dtype=torch.bfloat16)
        made.quantize([torch.randn(shape, generator=draw).bfloat16() for shape in shapes])
        return made
    rows, weights, grads = group([(n, 64) for n in counts]), group([(32, 64)] * 3), group([(n, 32) for n in counts])
    bias = torch.randn(3, 32, generator=draw)
    for layout, a, b, shapes in (("TN", weights, rows, [(n, 32) for n in counts]),
                                 ("NN", weights, grads, [(n, 64) for n in counts]),
                                 ("NT", rows, grads, [(32, 64)] * 3)):
        out = GroupedTensor.make_grouped_tensor_with_shapes(3, shapes, None, dtype=torch.float32)
        lists = [m.split_into_quantized_tensors() for m in (a, b)]
        single = [torch.zeros(shape) if not (left.numel() and right.numel()) else
                  general_gemm(left, right, torch.float32, layout=layout)[0]
                  for left, right, shape in zip(*lists, shapes)]
        assert grouped(a, b, out, layout=layout) is out
        assert all(torch.equal(m, y) for m, y in zip(out.split_into_quantized_tensors(), single))
        grouped(lists[0], b, out, layout=layout, alpha=torch.tensor([2.0, 1.0, 0.5]), beta=torch.tensor([1.0]))
        for m, y, factor in zip(out.split_into_quantized_tensors(), single, (2.0, 1.0, 0.5)):
            assert torch.equal(m, y * factor + y)
        apart = [torch.ones(shape) for shape in shapes]
        grouped(a, b, apart, layout=layout, accumulate=True)
        assert all(torch.equal(m, y + 1) for m, y in zip(apart, single))
    out = GroupedTensor.make_grouped_tensor_with_shapes(3, [(n, 32) for n in counts], None, dtype=torch.float32)
    grouped(weights, rows, out)
    plain = [m.clone() for m in out.split_into_quantized_tensors()]
    grouped(weights, rows, out, bias=bias)
    assert all(torch.equal(m, y + b) for m, y, b in zip(out.split_into_quantized_tensors(), plain, bias))
    scale = torch.rand(64, generator=draw)
    grouped(weights, rows, out, bias=bias, bias_scale=scale)
    for m, y, b, s in zip(out.split_into_quantized_tensors(), plain, bias, torch.split(scale, counts)):
        assert torch.equal(m, y + s.unsqueeze(1) * b)
    values = group([(n, 64) for n in counts], None)  # plain activations
    grouped(weights, values, out)
    for m, w, x in zip(*(g.split_into_quantized_tensors() for g in (out, weights, values))):
        assert not x.numel() or torch.equal(m, general_gemm(w, x, torch.float32)[0])
    for error, match, changes in ((NotImplementedError, "grad", {"grad": True}),
                                  (ValueError, "requires bias", {"bias_scale": scale}),
                                  (AssertionError, "TT", {"layout": "TT"}),
                                  (ValueError, "2 factors", {"alpha": torch.ones(2)}),
                                  (ValueError, "64 rows", {"bias": bias, "bias_scale": scale[:5]})):
        with pytest.raises(error, match=match):
            grouped(weights, rows, out, **changes)
    with pytest.raises(ValueError, match="discrete"):
        grouped([weights], rows, [out])
    with pytest.raises(ValueError, match="Bias is not supported"):
        grouped(rows, grads, apart, layout="NT", bias=bias)
    with pytest.raises(ValueError, match="groups of"):
        grouped(weights, rows, apart[:2])


def test_general_gemm():
    """The wrappers: three layouts, and groups in one call, with the bits of single products."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
    q = te.NVFP4Quantizer(with_2d_quantization=True)
    draw = torch.Generator().manual_seed(4)
    rows, weights, grads = ([q(torch.randn(n, k, generator=draw).bfloat16()) for n in counts]
                            for counts, k in (((16, 48), 64), ((32, 32), 64), ((16, 48), 32)))
    bias = [torch.randn(32, generator=draw) for _ in weights]
    for layout, left, right in (("TN", weights, rows), ("NN", weights, grads), ("NT", rows, grads)):
        single = [tex.generic_gemm(a, layout[0] == "T", b, layout[1] == "T")[0] for a, b in zip(left, right)]
        for a, b, y in zip(left, right, single):
            half = general_gemm(a, b, torch.bfloat16, layout=layout)[0]
            assert half.dtype == torch.bfloat16 and torch.equal(half, y.bfloat16())
            added = general_gemm(a, b, out=torch.ones_like(y), accumulate=True, beta=0.5, layout=layout)[0]
            assert torch.equal(added, y + 0.5)
        out = [torch.empty_like(y) for y in single]
        general_grouped_gemm(left, right, out, [None, None], torch.float32, layout=layout)
        assert all(torch.equal(a, b) for a, b in zip(out, single))
        general_grouped_gemm(left, right, out, [None, None], torch.float32, layout=layout, accumulate=True)
        assert all(torch.equal(a, b + b) for a, b in zip(out, single))
        _, found, _ = general_grouped_gemm(left, right, out, [None, None], torch.float32, layout=layout, grad=True,
                                           use_bias=True, bias=bias)
        assert all(torch.equal(a, b.dequantize(dtype=torch.float32).sum(0)) for a, b in zip(found, right))
        for wrong in (general_gemm, lambda a, b, layout: general_grouped_gemm([a], [b], out, [None], None, layout)):
            with pytest.raises(AssertionError, match="GEMM layout TT not supported"):
                wrong(left[0], right[0], layout="TT")
    whole = torch.empty(64, 32, dtype=torch.bfloat16)
    general_grouped_gemm(weights, rows, [whole], [None, None], torch.bfloat16, m_splits=[16, 48], single_output=True,
                         bias=bias, use_bias=True)
    wanted = [general_gemm(w, x, torch.bfloat16, bias=b)[0] for w, x, b in zip(weights, rows, bias)]
    assert torch.equal(whole, torch.cat(wanted))
    row_scaled = nib.torch.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)
    scaled = [row_scaled(x.dequantize()) for x in rows]
    found = general_grouped_gemm(weights, scaled, [whole], [None, None], torch.bfloat16, m_splits=[16, 48],
                                 single_output=True)[0]  # the tensor and not a list, as TransformerEngine has it here
    assert torch.equal(found, torch.cat([general_gemm(w, x, torch.bfloat16)[0] for w, x in zip(weights, scaled)]))
    empty = [torch.empty(0, 32), torch.empty(48, 32)]  # an expert that nobody chose
    general_grouped_gemm(weights, [torch.empty(0, 64), rows[1]], empty, [None, None], torch.float32)
    assert torch.equal(empty[1], general_gemm(weights[1], rows[1], torch.float32)[0])
    with pytest.raises(ValueError, match="as many"):
        general_grouped_gemm(weights, rows, out[:1], [None, None], torch.float32)
    turned = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)(rows[1].dequantize())
    mixed = general_gemm(turned, grads[1], torch.float32, layout="NT")[0]  # one usage is transformed, the other not
    assert torch.allclose(mixed, grads[1].dequantize(dtype=torch.float32).t() @ rows[1].dequantize(dtype=torch.float32),
                          atol=0.2 * float(mixed.abs().max()))
    plain = general_gemm(weights[0], rows[0].dequantize(dtype=torch.float32), torch.float32)[0]  # block fixed point
    exact = general_gemm(weights[0], rows[0], torch.float32)[0]
    assert 0 < (plain - exact).abs().max() <= 2 ** -10 * exact.abs().max()


@pytest.mark.parametrize("shape", [(32, 64), (48, 80), (16, 16), (40, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_a_sharded_cast(shape, dtype):
    """The steps one by one, over shards cut anywhere, give the bytes of a quantization of the whole."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    h, w = shape
    th, tw = (h + 15) // 16, (w + 15) // 16
    master = torch.randn(h * w, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = te.NVFP4Quantizer(with_2d_quantization=True)(master.float().view(h, w))
    cuts = [0, 1, 2, 77, h * w // 2 - 1, h * w]
    cuts = sorted(cut for cut in cuts if cut <= h * w)
    shards = [(a, master[a:b]) for a, b in zip(cuts, cuts[1:])]
    blocks, amax = torch.zeros(th, tw), torch.zeros(1)
    for start, shard in shards:
        mine, top = torch.full((th, tw), -1.0), torch.zeros(1)
        tex.nvfp4_multi_tensor_compute_partial_amax([shard, None], [mine, None], [top, None], [h, h], [w, w],
                                                    [start, None], 16)
        blocks, amax = torch.maximum(blocks, mine), torch.maximum(amax, top)
    assert amax.item() == whole._amax_rowwise.item()
    scale, global_scale = torch.zeros(th, tw), torch.zeros(1)
    target, target_amax = torch.full_like(whole._rowwise_scale_inv, 7), torch.zeros(1)
    tex.nvfp4_compute_global_scale(amax, global_scale)
    tex.nvfp4_multi_tensor_fused_scale([blocks], [amax], [scale], [target], [target_amax], [th], [tw],
                                       [target.shape[0]], 16)
    if h % 16 == 0:
        assert torch.equal(target, whole._rowwise_scale_inv)
    assert torch.equal(target[:h], whole._rowwise_scale_inv[:h]) and target_amax.item() == amax.item()
    data = torch.full((h * w // 2,), 0xFF, dtype=torch.uint8)
    for start, shard in reversed(shards):
        end = start + shard.numel()
        tex.nvfp4_multi_tensor_2d_partial_cast([shard], [data[start // 2:(end + 1) // 2]], [scale], [global_scale], [h],
                                               [w], [start], 16)
    assert torch.equal(data.view(h, w // 2), whole._rowwise_data)
    if h % 16 == 0 and w % 16 == 0:
        data_t, scales_t = torch.zeros_like(whole._columnwise_data), torch.full_like(whole._columnwise_scale_inv, 9)
        tex.nvfp4_2d_multi_tensor_transpose([data.view(h, -1)], [data_t], [target], [scales_t], [h], [w])
        assert torch.equal(data_t, whole._columnwise_data) and torch.equal(scales_t, whole._columnwise_scale_inv)
        assert torch.equal(tex.nvfp4_data_transpose(data_t), whole._rowwise_data)


def test_step_errors():
    import transformer_engine_torch as tex
    with pytest.raises(ValueError, match="16x16"):
        tex.nvfp4_2d_compute_partial_amax(torch.zeros(4), torch.zeros(1, 1), 16, 16, 0, 32)
    scales, one, room = torch.ones(1, 1), torch.ones(1), torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not a shard"):
        tex.nvfp4_2d_partial_cast(torch.zeros(4), room, scales, one, 16, 16, 254, 16)
    with pytest.raises(ValueError, match="room"):
        tex.nvfp4_2d_partial_cast(torch.zeros(4), room[:1], scales, one, 16, 16, 0, 16)
    with pytest.raises(ValueError, match="pairs"):
        tex.nvfp4_data_transpose(torch.zeros(3, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="room"):
        tex.nvfp4_data_transpose(torch.zeros(4, 8, dtype=torch.uint8), out=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        tex.nvfp4_2d_scale_transpose(torch.zeros(16, 4, dtype=torch.uint8), torch.zeros(16, 4, dtype=torch.uint8), 1, 2)
    with pytest.raises(ValueError, match="float32"):
        tex.nvfp4_2d_compute_partial_amax(torch.zeros(4), torch.zeros(1, 1, dtype=torch.float64), 16, 16, 0, 16)
    with pytest.raises(ValueError, match="bytes"):
        tex.nvfp4_2d_scale_transpose(torch.zeros(16, 4), torch.zeros(16, 4, dtype=torch.uint8), 1, 1)
    with pytest.raises(ValueError, match="not in 16"):
        tex.nvfp4_2d_scale_transpose(torch.zeros(16, 4, dtype=torch.uint8), torch.zeros(16, 4, dtype=torch.uint8), 2, 1)
    for room in (torch.zeros(2, 1), torch.zeros(0)):  # the library would write beyond it
        with pytest.raises(ValueError, match="2 x 20 has 2 tiles"):
            tex.nvfp4_2d_compute_partial_amax(torch.zeros(4), room[:1], 2, 20, 0, 16)


def test_amaxes_that_do_not_fit():
    """The library would read what lies behind them."""
    import transformer_engine_torch as tex
    x, rows = torch.randn(32, 16), torch.arange(1.0, 33.0)
    plain = nib.torch.NVFP4Quantizer()
    by_row = nib.torch.NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True)
    assert torch.equal(tex.nvfp4_quantize_with_amax(x, by_row, rows)._amax_rowwise, rows)
    t = by_row(x)
    by_row.update_quantized(x, t, amax=rows)
    assert torch.equal(t._amax_rowwise, rows)
    for quantizer, amax in ((plain, torch.ones(0)), (plain, torch.ones(2)), (by_row, torch.ones(1))):
        with pytest.raises(ValueError, match="values here"):
            tex.nvfp4_quantize_with_amax(x, quantizer, amax)
        with pytest.raises(ValueError, match="values here"):
            quantizer.update_quantized(x, quantizer(x), amax=amax)


def test_expanded_scales_keep_their_stride():
    import transformer_engine_torch as tex
    scale, out = torch.tensor([[1.0, 2.0], [4.0, 1000.0], [0.0, 0.5]]), torch.full((128, 4), 9, dtype=torch.uint8)
    tex.nvfp4_expand_scale_to_fp8(scale, out, 3, 2, 128, 16)
    values = out.view(torch.float8_e4m3fn).float()
    assert torch.equal(values[:48, :2], scale.clamp(max=448).repeat_interleave(16, 0))
    assert not out[48:].any() and not out[:, 2:].any()


# ---- Names that are not served ---------------------------------------------------------------------------


def test_unsupported_names():
    """Each imports under its module, and raises one message when it is made."""
    from conftest import ROOT
    from nib.torch import unsupported
    nib.torch.install_aliases()
    table = open(os.path.join(ROOT, "docs/python.md")).read()
    table = table[table.index("## Names of TransformerEngine"):table.index("## tex")]
    for module, names in unsupported.NAMES.items():
        where = importlib.import_module("transformer_engine.pytorch" + (f".{module}" if module else ""))
        for name in names:
            with pytest.raises(NotImplementedError, match=f"TransformerEngine's {name}:"):
                getattr(where, name)(1, two=2)
            assert re.search(rf"\b{name}\b", table), name
    with pytest.raises(AttributeError):
        unsupported.never_heard_of


def test_names_before_modules():
    """Where a module and a function of it have one name, the package has the function."""
    nib.torch.install_aliases()
    import transformer_engine
    import transformer_engine.pytorch as te
    assert te.torch_version()[0] >= 2 and transformer_engine.__version__.startswith("2.")
    with pytest.raises(NotImplementedError):
        te.newton_schulz(1)
    from transformer_engine.pytorch.permutation import moe_permute
    assert te.moe_permute is moe_permute and te.ops.Linear is te.ops.linear.Linear


def test_helpers():
    nib.torch.install_aliases()
    from transformer_engine.pytorch import distributed, optimizers, quantization, tensor, utils
    assert utils.divide(6, 3) == 2 and utils.ceil_div(7, 3) == 3
    with pytest.raises(ValueError, match="7 is not divisible by 3"):
        utils.divide(7, 3)
    x = torch.arange(24.0).view(2, 12).requires_grad_()
    assert utils.requires_grad(None, x) and not utils.requires_grad(None, x.detach())
    assert utils.cast_if_needed(x, torch.float32) is x and utils.cast_if_needed(x, torch.bfloat16).requires_grad
    parts = utils.SplitAlongDim.apply(x, 1, [4, 8])
    assert [tuple(part.shape) for part in parts] == [(2, 4), (2, 8)]
    assert torch.equal(torch.cat(utils.split_tensor_along_dim(x, 1, 3, True), 1), x)
    assert utils.check_dim_for_fp8_exec(torch.ones(8, 16)) and not utils.check_dim_for_fp8_exec(torch.ones(8, 15))
    with pytest.raises(ValueError, match="multiples"):
        utils.assert_dim_for_fp8_exec(torch.ones(7, 16))
    t = nib.torch.NVFP4Quantizer()(torch.ones(16, 16))
    assert utils.needs_quantized_gemm(t) and not utils.needs_quantized_gemm(x)
    assert type(t) in tensor.get_all_tensor_types()
    plain = torch.ones(3)
    utils.clear_tensor_data(plain, None, t)
    assert plain.numel() == 0 and t._rowwise_data.numel() == 0
    assert quantization.check_nvfp4_support() == (True, "") and utils.devices_match("cpu", torch.device("cpu"))
    assert distributed.get_distributed_world_size() == 1 and distributed.allreduce(plain) == (plain, None)
    assert torch.equal(distributed.gather_split_1d_tensor(distributed.split_tensor_into_1d_equal_chunks(x.detach())),
                       x.detach().view(-1))
    assert distributed.has_te_modules(torch.nn.Sequential(nib.torch.Linear(16, 16)))
    assert not distributed.has_te_modules(torch.nn.Linear(16, 16))

    lists = [[torch.full((3,), 2.0), torch.zeros(0), torch.tensor([3.0])],
             [torch.zeros(3), torch.zeros(0), torch.zeros(1)]]
    flag = torch.zeros(1, dtype=torch.int32)
    optimizers.multi_tensor_applier(optimizers.multi_tensor_scale, flag, lists, 0.5)
    assert lists[1][0].tolist() == [1, 1, 1] and lists[1][2].item() == 1.5 and not flag.item()
    norm, each = optimizers.multi_tensor_applier(optimizers.multi_tensor_l2norm, flag, lists[:1], True)
    assert norm.item() == pytest.approx(21 ** 0.5) and each.tolist() == pytest.approx([12 ** 0.5, 3.0])
    lists[0][0][1] = float("inf")
    optimizers.multi_tensor_applier(optimizers.multi_tensor_scale, flag, lists, 1.0)
    assert flag.item() == 1
    with pytest.raises(RuntimeError, match="one length"):
        optimizers.multi_tensor_applier(optimizers.multi_tensor_scale, flag, [lists[0], []], 1.0)


def test_recompute_by_hand():
    """Megatron's way of computing activations again: delayed scales are those of the first pass."""
    nib.torch.install_aliases()
    from transformer_engine.pytorch.distributed import activation_recompute_forward, in_fp8_activation_recompute_phase
    from nib.torch.recipe import DelayedScaling
    nib.torch.quantization.FP8GlobalStateManager.reset()
    layer = nib.torch.Linear(32, 32)
    for step in range(3):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * 3 ** step
        with nib.torch.autocast(recipe=DelayedScaling()):
            with activation_recompute_forward(activation_recompute=True, recompute_phase=False):
                first = layer(x)
        with nib.torch.autocast(recipe=DelayedScaling()):
            with activation_recompute_forward(activation_recompute=True, recompute_phase=True):
                assert in_fp8_activation_recompute_phase()
                again = layer(x)
        assert not in_fp8_activation_recompute_phase() and torch.equal(first, again)
        again.sum().backward()


def test_names_of_layers():
    """Served names of TransformerEngine's package are nib's own objects, wherever they are imported from."""
    nib.torch.install_aliases()
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb  # noqa: F401
    from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
    from transformer_engine.pytorch.optimizers import FusedAdam
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState  # noqa: F401
    from transformer_engine.pytorch.tensor.utils import is_custom
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import nvfp4_factory
    assert te.LayerNormMLP is LayerNormMLP is nib.torch.LayerNormMLP and FusedAdam is nib.torch.FusedAdam
    assert te.TransformerLayer is nib.torch.TransformerLayer and te.checkpoint is nib.torch.checkpoint
    assert not is_custom(None) and not is_custom(te.NVFP4Quantizer())
    assert nvfp4_factory(te.QuantizerRole("linear", "weight")).with_2d_quantization


def test_glu_layout():
    from nib.torch.utils import deinterleave_glu_tensor, interleave_glu_tensor
    x = torch.arange(16)
    assert interleave_glu_tensor(x, 2).tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    w = torch.randn(16, 3)
    assert torch.equal(deinterleave_glu_tensor(interleave_glu_tensor(w, 4), 4), w)
    with pytest.raises(ValueError):
        interleave_glu_tensor(w, 3)


def test_extra_state_policy(monkeypatch):
    import pickle
    from nib.torch import extra_state, recipe
    for kind in (recipe.MXFP8BlockScaling, recipe.NVFP4BlockScaling):
        payload = pickle.dumps({"recipe": kind(), "extra_fp8_variables": {}})
        assert not extra_state.should_load_extra_state_pickle(payload, "test")
        assert extra_state.is_stateless_recipe(kind())
    assert not extra_state.should_load_extra_state_pickle(pickle.dumps({}), "test")
    for payload in (pickle.dumps({"recipe": recipe.DelayedScaling()}), b"not a pickle", pickle.dumps(print)):
        with pytest.raises(RuntimeError, match=extra_state.UNSAFE_PICKLE_EXTRA_STATE_ENV):
            extra_state.should_load_extra_state_pickle(payload, "test")
    monkeypatch.setenv(extra_state.UNSAFE_PICKLE_EXTRA_STATE_ENV, "1")
    assert extra_state.should_load_extra_state_pickle(b"not a pickle", "test")
