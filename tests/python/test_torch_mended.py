# SPDX-License-Identifier: Apache-2.0
"""Things that were wrong once: each test failed before its mend."""
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import nib.torch  # noqa: E402
from nib.torch import (DType, Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer,  # noqa: E402
                       NVFP4Quantizer, split_quantize)
from nib.torch.recipe import (Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling,  # noqa: E402
                              NVFP4BlockScaling)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_two_orders_of_arguments():
    """(fp4_dtype, rowwise, columnwise) and (fp8_dtype, block_dims, with_rht), by position."""
    tiles = NVFP4Quantizer(torch.float8_e4m3fn, (16, 16))
    assert tiles.with_2d_quantization and not tiles.with_rht and tiles.rowwise_usage and tiles.columnwise_usage
    rows = NVFP4Quantizer(torch.float8_e4m3fn, (1, 16), True)
    assert rows.with_rht and rows.with_post_rht_amax and not rows.with_2d_quantization and rows.columnwise_usage
    assert NVFP4Quantizer(torch.uint8, None, True).with_rht
    assert NVFP4Quantizer(DType.kFloat8E4M3, [16, 16]).with_2d_quantization
    both = NVFP4Quantizer(torch.float8_e4m3fn, (16, 16), True)
    assert both.with_2d_quantization and both.with_rht
    with pytest.raises(ValueError, match="16x16"):  # which do not go together: said when it is used
        both(noise(32, 32))
    theirs = NVFP4Quantizer(DType.kFloat4E2M1, False, True)
    assert not theirs.rowwise_usage and theirs.columnwise_usage and not theirs.with_rht
    assert not NVFP4Quantizer(DType.kFloat4E2M1, True, False).columnwise_usage
    with pytest.raises(TypeError, match="twice"):
        NVFP4Quantizer(torch.uint8, (1, 16), block_dims=(1, 16))
    with pytest.raises(ValueError, match="block_dims"):
        NVFP4Quantizer(torch.uint8, (8, 8))


@pytest.mark.parametrize("quantizer", [
    Float8CurrentScalingQuantizer(DType.kFloat8E4M3), MXFP8Quantizer(), NVFP4Quantizer(),
    Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)], ids=lambda q: type(q).__name__)
def test_data_of_another_shape(quantizer):
    """The shape follows what is assigned, and nothing of the old usages stays."""
    t, x = quantizer(noise(64, 32)), noise(128, 160, seed=1)
    t.data = x
    want = quantizer(x)
    assert t.shape == x.shape and t.numel() == x.numel() and torch.equal(t.dequantize(), want.dequantize())
    for name in want.FIELDS:
        assert torch.equal(getattr(t, name.name), getattr(want, name.name))
    rows = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)
    f = rows(noise(64, 32))
    rows.set_usage(columnwise=False)
    f._quantizer = rows.copy()
    f.data = x
    assert f._transpose is None and f._transpose_invalid and f.shape == x.shape


@pytest.mark.parametrize("shape, keywords, expected", [
    ((128, 256), dict(with_2d_quantization=True), True), ((128, 192), dict(with_2d_quantization=True), False),
    ((64, 128), dict(with_2d_quantization=True), False), ((64, 128), dict(with_rht=True), True),
    ((32, 128), dict(with_rht=True), False), ((128, 128), dict(), False)])
def test_empty_tensors_for_a_gemm(shape, keywords, expected):
    """An empty tensor has swizzled scales only where TransformerEngine's kernel writes them; what is quantized has."""
    quantizer = NVFP4Quantizer(**keywords)
    quantizer.optimize_for_gemm = True
    empty = quantizer.make_empty(shape)
    assert empty._with_gemm_swizzled_scales is expected
    full = quantizer(noise(*shape))
    assert full._with_gemm_swizzled_scales
    quantizer.update_quantized(noise(*shape), empty)
    assert empty._with_gemm_swizzled_scales and torch.equal(empty.dequantize(), full.dequantize())


def test_split_for_a_gemm():
    """Scales of a split are swizzled with the transform and members of 128 x 128, or not at all."""
    for rht, sections, expected in ((True, [128, 256], True), (True, [64, 320], False), (False, [128, 256], False)):
        quantizer = NVFP4Quantizer(with_rht=rht)
        quantizer.optimize_for_gemm = True
        x = noise(384, 128, dtype=torch.bfloat16)
        members = split_quantize(x, sections, [quantizer] * 2)
        plain = split_quantize(x, sections, [NVFP4Quantizer(with_rht=rht)] * 2)
        assert [m._with_gemm_swizzled_scales for m in members] == [expected] * 2
        for mine, theirs in zip(members, plain):
            assert torch.equal(mine.dequantize(), theirs.dequantize())
            assert torch.equal(mine._rowwise_scale_inv, theirs._rowwise_scale_inv) is not expected


# ---- Linear ----------------------------------------------------------------------------------------------

RECIPES = [NVFP4BlockScaling(), MXFP8BlockScaling(), Float8CurrentScaling(), Float8BlockScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_who_needs_no_gradient(recipe):
    """An input, or a weight, that wants none: the other's is what it is when both do."""
    layer, x, g = nib.torch.Linear(128, 256), noise(128, 128), noise(128, 256, seed=1)

    def gradients(of_input, of_weight):
        layer.zero_grad()
        layer.weight.requires_grad_(of_weight)
        mine = x.clone().requires_grad_(of_input)
        torch.manual_seed(3)
        with nib.torch.autocast(recipe=recipe):
            y = layer(mine)
        y.backward(g)
        return mine.grad, layer.weight.grad

    dx, dw = gradients(True, True)
    assert gradients(False, True)[0] is None and torch.equal(gradients(False, True)[1], dw)
    assert gradients(True, False)[1] is None and torch.equal(gradients(True, False)[0], dx)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("quantized", [False, True])
def test_second_backward(recipe, quantized):
    """A graph that is retained gives the same gradients again, stochastic rounding included."""
    with nib.torch.quantized_model_init(enabled=quantized, recipe=recipe):
        layer = nib.torch.Linear(128, 128)
    x, g = noise(128, 128).requires_grad_(), noise(128, 128, seed=1)
    with nib.torch.autocast(recipe=recipe):
        y = layer(x)
    found = []
    for _ in range(3):
        x.grad = layer.weight.grad = None
        y.backward(g, retain_graph=True)
        found.append((x.grad, layer.weight.grad))
    for dx, dw in found[1:]:
        assert torch.equal(dx, found[0][0]) and torch.equal(dw, found[0][1])
    with nib.torch.autocast(recipe=recipe):
        other = layer(x)
    x.grad = None
    other.backward(g)
    if recipe.nvfp4():  # another graph draws other numbers
        assert not torch.equal(x.grad, found[0][0])


@pytest.mark.parametrize("change", [
    lambda weight: weight.quantize_(noise(*weight.shape, seed=9)), lambda weight: weight.mul_(2),
    lambda weight: weight.copy_(noise(*weight.shape, seed=9)),
    lambda weight: weight.copy_(weight._quantizer(noise(*weight.shape, seed=9))),
    lambda weight: nib.torch.quantize_master_weights([weight], [noise(weight.numel(), seed=9)], [0], None,
                                                     manual_post_all_gather_processing=True)])
@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_weight_that_changes(recipe, change):
    """Between forward and backward: an error, as for plain weights, and no wrong gradient."""
    with nib.torch.quantized_model_init(recipe=recipe):
        layer = nib.torch.Linear(128, 128)
    x = noise(128, 128).requires_grad_()
    with nib.torch.autocast(recipe=recipe):
        y = layer(x)
    with torch.no_grad():
        change(layer.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_meta():
    """A meta tensor stays one: nothing is quantized that has no values."""
    for quantizer in (NVFP4Quantizer(), MXFP8Quantizer(), Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
                      Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True),
                      nib.torch.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)):
        t = quantizer(torch.empty(32, 64, device="meta", dtype=torch.bfloat16))
        parts = [part for part in t._parts() if part is not None]
        assert t.device.type == "meta" and t.dtype == torch.bfloat16 and len(parts) >= 3
        assert all(part.device.type == "meta" for part in parts)
        real = quantizer(noise(32, 64))
        assert [None if p is None else p.shape for p in t._parts()] == \
            [None if p is None else p.shape for p in real._parts()]
        assert t.dequantize().device.type == "meta" and t.dequantize().shape == (32, 64)
        assert t.detach().device.type == "meta" and t.view(32, 64).device.type == "meta"
        assert torch.empty_like(t, device="cpu").device.type == "cpu"
        for source, target in ((noise(32, 64), t), (torch.empty(32, 64, device="meta"), real)):
            with pytest.raises(nib.DeviceError, match="meta"):
                quantizer.update_quantized(source, target)
        assert quantizer.make_empty((32, 64), device="meta").device.type == "meta"


def test_deferred_init():
    """On the meta device, then reset_parameters, or to_empty and reset_parameters: the layer that is made at once."""
    for recipe in (None, NVFP4BlockScaling(), MXFP8BlockScaling()):
        def make(device):
            with nib.torch.quantized_model_init(enabled=recipe is not None, recipe=recipe,
                                                preserve_high_precision_init_val=True):
                return nib.torch.Linear(64, 96, device=device, params_dtype=torch.bfloat16)
        torch.manual_seed(5)
        want = make("cpu")
        for ways in (lambda layer: None, lambda layer: layer.to_empty(device="cpu")):
            layer = make("meta")
            assert all(p.device.type == "meta" for p in layer.parameters())
            ways(layer)
            torch.manual_seed(5)
            layer.reset_parameters()
            assert type(layer.weight) is type(want.weight) and layer.weight.device.type == "cpu"
            assert torch.equal(layer.weight.dequantize() if recipe else layer.weight,
                               want.weight.dequantize() if recipe else want.weight)
            assert not layer.bias.any() and layer.weight.requires_grad
            if recipe:
                assert torch.equal(layer.weight.get_high_precision_init_val(), want.weight._high_precision_init_val)
            with nib.torch.autocast(recipe=recipe):
                assert layer(noise(16, 64)).shape == (16, 96)
        with nib.torch.autocast(recipe=recipe), torch.no_grad():
            assert make("meta")(torch.empty(16, 64, device="meta")).device.type == "meta"


def test_views_with_other_signs():
    """The imaginary part of a conjugate is a view of memory that has the other signs."""
    x = torch.view_as_complex(noise(32, 32, 2)).conj().imag
    assert x.is_neg() and x.detach().is_neg()
    for quantizer in (NVFP4Quantizer(), Float8CurrentScalingQuantizer(DType.kFloat8E4M3)):
        want, t = quantizer(x.resolve_neg()), quantizer(x)
        assert torch.equal(t.dequantize(), want.dequantize())
        quantizer.update_quantized(x, t)
        assert torch.equal(t.dequantize(), want.dequantize())
    plain = nib.quantize(x.resolve_neg())
    assert (nib.quantize(x).dequantize() == plain.dequantize()).all()
    with pytest.raises(nib.ArgumentError, match="other signs"):
        plain.dequantize(out=x)
