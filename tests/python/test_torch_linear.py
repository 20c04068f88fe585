# SPDX-License-Identifier: Apache-2.0
"""Recipes, autocast and Linear: which tensor is quantized how, which usage meets which, and what that does to
gradients."""
import math
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import nib.torch  # noqa: E402
from nib.torch import module  # noqa: E402
from nib.torch.quantization import QuantizerRole  # noqa: E402
from nib.torch.recipe import (CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling,  # noqa: E402
                              Format, MXFP8BlockScaling, NVFP4BlockScaling)
from nib.torch.utils import gemm_reference  # noqa: E402


def relative(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- Recipes ---------------------------------------------------------------------------------------------


def options(quantizer):
    return {name: getattr(quantizer, name) for name in
            ("with_rht", "stochastic_rounding", "with_2d_quantization", "row_scaled_nvfp4", "nvfp4_use_4over6",
             "nvfp4_e4m3_max")}


def test_defaults():
    recipe = NVFP4BlockScaling()
    assert not (recipe.disable_rht or recipe.disable_stochastic_rounding or recipe.disable_2d_quantization)
    assert not (recipe.row_scaled_activation or recipe.fp8_dpa or recipe.fp8_mha)
    assert recipe.nvfp4_4over6 == "none"
    assert (recipe.nvfp4_4over6_e4m3_use_256, recipe.nvfp4_4over6_err_mode) == ("all", "MAE")
    assert (recipe.fp4_format, recipe.fp8_format, recipe.backward_override) == (Format.E2M1, Format.E4M3, None)
    assert recipe.nvfp4() and not recipe.mxfp8() and not recipe.delayed() and not recipe.custom()
    assert not recipe.float8_current_scaling() and not recipe.float8_block_scaling()
    assert not recipe.float8_per_tensor_scaling() and DelayedScaling().float8_per_tensor_scaling()
    plain = dict(with_rht=False, stochastic_rounding=False, with_2d_quantization=False, row_scaled_nvfp4=False,
                 nvfp4_use_4over6=False, nvfp4_e4m3_max=448)
    assert options(recipe.make_quantizer("input")) == {**plain, "with_rht": True}
    assert options(recipe.make_quantizer("anything else")) == {**plain, "with_rht": True}
    assert options(recipe.make_quantizer("weight")) == {**plain, "with_2d_quantization": True}
    assert options(recipe.make_quantizer("grad_output")) == {**plain, "with_rht": True, "stochastic_rounding": True}
    assert recipe.make_quantizer("input").with_post_rht_amax


def test_switches():
    bare = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    for role in ("input", "weight", "grad_output"):
        assert not any(options(bare.make_quantizer(role))[name] for name in
                       ("with_rht", "stochastic_rounding", "with_2d_quantization"))
    four = NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="activations",
                             nvfp4_4over6_err_mode="mse")
    assert four.make_quantizer("weight").nvfp4_use_4over6 and four.make_quantizer("weight").nvfp4_e4m3_max == 448
    assert four.make_quantizer("weight").nvfp4_4over6_err_mode == "MSE"
    assert not four.make_quantizer("input").nvfp4_use_4over6
    everything = NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all")
    assert [everything.make_quantizer(role).nvfp4_e4m3_max for role in ("input", "weight", "grad")] == [256, 256, 448]
    assert not everything.make_quantizer("grad_output").nvfp4_use_4over6  # gradients are always plain
    rows = NVFP4BlockScaling(row_scaled_activation=True)
    assert [rows.make_quantizer(role).row_scaled_nvfp4 for role in ("input", "weight", "grad")] == [True, False, False]
    for wrong in (dict(nvfp4_4over6="all"), dict(nvfp4_4over6="activations"), dict(nvfp4_4over6="some"),
                  dict(nvfp4_4over6_err_mode="MAX"), dict(backward_override="none"), dict(fp4_format=Format.E4M3),
                  dict(nvfp4_4over6_e4m3_use_256="no"), dict(fp8_format=Format.HYBRID)):
        with pytest.raises(ValueError):
            NVFP4BlockScaling(**wrong)


@pytest.mark.parametrize("variable, value, field, expected", [
    ("NVTE_NVFP4_DISABLE_RHT", "1", "disable_rht", True),
    ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1", "disable_stochastic_rounding", True),
    ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", "disable_2d_quantization", True),
    ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1", "row_scaled_activation", True),
    ("NVTE_NVFP4_4OVER6", "weights", "nvfp4_4over6", "weights"),
    ("NVTE_NVFP4_4OVER6_E4M3_USE_256", "none", "nvfp4_4over6_e4m3_use_256", "none"),
    ("NVTE_NVFP4_4OVER6_ERR_MODE", "MSE", "nvfp4_4over6_err_mode", "MSE"),
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", "backward_override", "dequantized"),
    ("NVTE_NVFP4_DISABLE_RHT", "0", "disable_rht", False)])
def test_environment(variable, value, field, expected):
    """Read when the module is imported. The module alone: importing PyTorch takes seconds."""
    path = os.path.join(os.path.dirname(nib.torch.__file__), "recipe.py")
    code = ("import importlib.util, sys\n"
            f"spec = importlib.util.spec_from_file_location('recipe', {path!r})\n"
            "module = importlib.util.module_from_spec(spec)\nsys.modules['recipe'] = module\n"
            "spec.loader.exec_module(module)\n"
            f"print(repr(module.NVFP4BlockScaling().{field}))\n")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, variable: value}, capture_output=True,
                          text=True)
    assert done.stdout.strip() == repr(expected), done.stderr


def test_autocast():
    assert module.get_recipe() is None
    outer = NVFP4BlockScaling(disable_rht=True)
    with nib.torch.autocast(enabled=True, calibrating=False, recipe=outer, amax_reduction_group=None):
        assert module.get_recipe() is outer
        with nib.torch.autocast(enabled=False):
            assert not module.is_fp8_enabled()
        with nib.torch.fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None):
            assert module.get_recipe() == NVFP4BlockScaling()
        assert module.get_recipe() is outer
    with pytest.raises(ZeroDivisionError):
        with nib.torch.autocast():
            1 / 0
    assert module.get_recipe() is None
    with pytest.raises(TypeError):
        nib.torch.autocast(recipe="nvfp4")


# ---- Linear ----------------------------------------------------------------------------------------------


def test_arguments_of_transformer_engine():
    layer = nib.torch.Linear(32, 16, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1,
                             get_rng_state_tracker=print, init_method=torch.nn.init.ones_, bias=False,
                             return_bias=False, params_dtype=torch.bfloat16, parallel_mode=None, device="cpu",
                             ub_name="qkv", name="first", save_original_input=True)
    assert layer.bias is None and layer.weight.eq(1).all() and layer.weight.dtype == torch.bfloat16
    with nib.torch.autocast():
        assert layer(noise(16, 32), is_first_microbatch=True, fp8_output=False).shape == (16, 16)
    assert nib.torch.Linear(32, 16, parallel_mode="column", sequence_parallel=True).weight.shape == (16, 32)
    for wrong in (dict(tp_size=2), dict(ub_overlap_ag=True), dict(symmetric_ar_type="multimem_all_reduce")):
        with pytest.raises(NotImplementedError, match=next(iter(wrong))):
            nib.torch.Linear(32, 16, **wrong)
    with nib.torch.autocast(), pytest.raises(TypeError, match="fp8_outputs"):
        layer(noise(16, 32), fp8_outputs=True)
    with pytest.raises(TypeError, match="biased"):
        nib.torch.Linear(32, 16, biased=True)


def test_without_autocast():
    torch.manual_seed(0)
    layer = nib.torch.Linear(32, 48)
    same = torch.nn.Linear(32, 48)
    assert list(layer.state_dict()) == ["weight", "bias", "_extra_state"]
    same.load_state_dict(layer.state_dict(), strict=False)
    layer.load_state_dict(same.state_dict())  # which has no extra state
    x = noise(5, 7, 32)
    assert torch.equal(layer(x), same(x)) and "in_features=32" in repr(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), same(x)) and layer(x).dtype == torch.bfloat16
    y, bias = nib.torch.Linear(32, 48, return_bias=True, params_dtype=torch.bfloat16)(x)
    assert y.dtype == torch.bfloat16 and bias.shape == (48,)
    assert nib.torch.Linear(32, 48, bias=False, init_method=torch.nn.init.zeros_).weight.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"disable_rht": True}, {"disable_2d_quantization": True},
                                     {"row_scaled_activation": True, "disable_rht": True}, {"nvfp4_4over6": "weights"}])
def test_products(dtype, changes):
    """Each product is that of the usages that the recipe names. Without stochastic rounding they can be made again."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True, **changes)
    torch.manual_seed(1)
    layer = nib.torch.Linear(64, 96, params_dtype=dtype)
    x, g = noise(2, 32, 64, seed=1, dtype=dtype).requires_grad_(), noise(2, 32, 96, seed=2, dtype=dtype)
    with nib.torch.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    assert y.dtype == dtype and x.grad.dtype == dtype and layer.weight.grad.dtype == dtype

    def usages(role, tensor):
        return recipe.make_quantizer(role)(tensor.detach().view(-1, tensor.shape[-1]))

    qx, qw, qg = usages("input", x), usages("weight", layer.weight), usages("grad_output", g)
    products = {
        "y": (y - layer.bias, module.values_of(qx, False) @ module.values_of(qw, False).t(),
              lambda: gemm_reference(qx, qw)),
        "dx": (x.grad, module.values_of(qg, False) @ module.values_of(qw, True),
               lambda: gemm_reference(qg, qw, b_columnwise=True)),
        "dw": (layer.weight.grad, module.values_of(qg, True).t() @ module.values_of(qx, True),
               lambda: gemm_reference(qg, qx, a_columnwise=True, b_columnwise=True)),
    }
    for name, (mine, values, reference) in products.items():
        mine, step = mine.detach().float().reshape(values.shape), torch.finfo(dtype).eps
        scale = values.abs().max()
        # The output's rounding, once more where the bias came off again.
        assert (mine - values).abs().max() <= 4 * step * (scale + 1), name
        # Against the product of the codes: FP32 sums of at most 96 terms, in another order and (dw) after another
        # transform, each error at most half a unit in the last place of a partial sum of magnitudes.
        magnitudes = {"y": lambda: module.values_of(qx, False).abs() @ module.values_of(qw, False).abs().t(),
                      "dx": lambda: module.values_of(qg, False).abs() @ module.values_of(qw, True).abs(),
                      "dw": lambda: 16 * module.values_of(qg, True).abs().max() * module.values_of(qx, True).abs().max()
                      * torch.full(values.shape, 64.0)}[name]()
        bound = (96 + 32) * 2.0 ** -24 * 2 * magnitudes
        assert ((values - reference()).abs() <= bound).all(), name
        if name != "y":  # there the bias came off again, rounded
            assert torch.equal(mine, reference().to(dtype).float()), name
    assert torch.allclose(layer.bias.grad.float(), g.float().sum((0, 1)).to(dtype).float())


def test_gradients_are_unbiased():
    """With stochastic rounding the mean of many gradients is that of the exact gradient and the quantized operand. The
    error of the mean of n draws falls with sqrt(n), down to what the 8-bit rule leaves: half of 1/256 of a step, and
    the maximum of a block whose E4M3 scale was rounded down, at most 1/16 too small in one element of 16."""
    torch.manual_seed(2)
    layer, x, g = nib.torch.Linear(64, 64, bias=False), noise(64, 64, seed=3), 1e-4 * noise(64, 64, seed=4)
    x.requires_grad_()
    recipe = NVFP4BlockScaling()
    qx = module.values_of(recipe.make_quantizer("input")(x.detach()), True)
    qw = module.values_of(recipe.make_quantizer("weight")(layer.weight.detach()), True)

    def mean(n, recipe):
        dx, dw = torch.zeros_like(x), torch.zeros_like(layer.weight)
        for _ in range(n):
            x.grad = layer.weight.grad = None
            with nib.torch.autocast(recipe=recipe):
                y = layer(x)
            y.backward(g)
            dx += x.grad / n
            dw += layer.weight.grad / n
        return relative(dx.detach(), g @ qw), relative(dw.detach(), g.t() @ qx)

    one, many = mean(1, recipe), mean(256, recipe)
    nearest = mean(1, NVFP4BlockScaling(disable_stochastic_rounding=True))
    for single, averaged, fixed in zip(one, many, nearest):
        assert 0.05 < single < 0.3  # one draw: about as far off as the format is coarse
        assert averaged < 1.2 * single / math.sqrt(256) + 0.008
        assert averaged < fixed / 4


def test_gradients_against_bf16():
    """A layer's gradients beside those of BF16: as far off as the format's errors are, which do not depend on the size
    of the gradient, and with the right direction."""
    torch.manual_seed(3)
    layer = nib.torch.Linear(256, 128, params_dtype=torch.bfloat16)
    plain = torch.nn.Linear(256, 128, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict(), strict=False)
    for size in (1.0, 1e-6):
        x, g = noise(512, 256, seed=5, dtype=torch.bfloat16), (size * noise(512, 128, seed=6)).bfloat16()
        results = []
        for this in (layer, plain):
            this.zero_grad()
            mine = x.clone().requires_grad_()
            with nib.torch.autocast():
                y = this(mine)
            y.backward(g)
            results.append((y, mine.grad, this.weight.grad, this.bias.grad))
        for name, quantized, exact, low, high in zip(("y", "dx", "dw", "db"), *results, (.1, .1, .1, 0),
                                                     (.2, .25, .25, 1e-2)):
            assert low <= relative(quantized.detach(), exact.detach()) <= high, name
            cosine = torch.nn.functional.cosine_similarity(quantized.float().flatten(), exact.float().flatten(), 0)
            assert cosine > 0.97, name


def test_transform_spreads_outliers():
    """Why wgrad's operands are transformed: a few large gradients in a block no longer hide the small ones."""
    x, g = noise(256, 64, seed=7), noise(256, 64, seed=8)
    g[::16] *= 30  # one token in 16
    errors = {}
    for rht in (True, False):
        layer = nib.torch.Linear(64, 64, bias=False)
        with nib.torch.autocast(recipe=NVFP4BlockScaling(disable_rht=not rht, disable_stochastic_rounding=True)):
            y = layer(x)
        y.backward(g)
        errors[rht] = relative(layer.weight.grad[:, :], g.t() @ x)
    assert errors[True] < errors[False] * 1.5  # it costs little where it does not help
    quantizer = {rht: NVFP4BlockScaling(disable_rht=not rht).make_quantizer("input") for rht in (True, False)}
    values = {rht: module.values_of(q(g), True) for rht, q in quantizer.items()}
    small = torch.ones(256, dtype=torch.bool)
    small[::16] = False
    assert relative(values[True], g) < 0.2 and relative(values[False][small], g[small]) > 0.3


def test_stochastic_rounding_follows_the_seed():
    layer, x, g = nib.torch.Linear(32, 32), noise(32, 32, seed=9), noise(32, 32, seed=10)

    def gradient(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        layer.zero_grad()
        with nib.torch.autocast():
            y = layer(x)
        y.backward(g)
        return layer.weight.grad.clone()

    one, two, again = gradient(5), gradient(), gradient(5)
    assert torch.equal(one, again) and not torch.equal(one, two)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override):
    layer, x, g = nib.torch.Linear(32, 48), noise(32, 32, seed=11).requires_grad_(), noise(32, 48, seed=12)
    recipe = NVFP4BlockScaling(backward_override=override)
    with nib.torch.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    a, w = x.detach(), layer.weight.detach()
    if override == "dequantized":
        a = recipe.make_quantizer("input")(a).dequantize()
        w = recipe.make_quantizer("weight")(w).dequantize()
    assert torch.allclose(x.grad, g @ w, atol=1e-5) and torch.allclose(layer.weight.grad, g.t() @ a, atol=1e-5)


def test_who_needs_no_gradient():
    layer, x = nib.torch.Linear(32, 32), noise(32, 32)
    with nib.torch.autocast(), torch.no_grad():
        assert layer(x).grad_fn is None
        assert layer(x[:5]).shape == (5, 32)  # no columnwise usage is wanted, so no whole blocks of rows are needed
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    with nib.torch.autocast():
        layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad.shape == x.shape and layer.bias.grad.shape == (32,)
    layer.weight.requires_grad_(True)
    with nib.torch.autocast():
        layer(x.detach()).sum().backward()
    assert layer.weight.grad.shape == (32, 32)
    with pytest.raises(nib.ShapeError), nib.torch.autocast():
        layer(x[:5])  # the transform takes 16 rows at a time


def test_quantized_weights():
    with nib.torch.quantized_model_init(enabled=True, recipe=NVFP4BlockScaling()):
        layer = nib.torch.Linear(32, 48)
        with nib.torch.quantized_model_init(enabled=False):
            assert not isinstance(nib.torch.Linear(16, 16).weight, nib.torch.QuantizedTensor)
    assert isinstance(layer.weight, nib.torch.NVFP4Tensor) and isinstance(layer.weight, torch.nn.Parameter)
    x = noise(16, 32).requires_grad_()
    with nib.torch.autocast():
        y = layer(x)
    y.sum().backward()
    assert layer.weight.grad.shape == (48, 32)
    values = layer.weight.dequantize().detach()
    assert relative(x.grad, torch.ones(16, 48) @ values) < 0.3
    assert torch.allclose(layer(x.detach()), torch.nn.functional.linear(x.detach(), values, layer.bias), atol=1e-5)


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), Float8CurrentScaling(), Float8BlockScaling(),
                                    MXFP8BlockScaling(fp8_format=Format.HYBRID)])
def test_other_recipes(recipe):
    layer, x, g = nib.torch.Linear(128, 128), noise(128, 128, seed=13), noise(128, 128, seed=14)
    x.requires_grad_()
    with nib.torch.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    w = layer.weight.detach()
    assert 0.01 < relative((y - layer.bias).detach(), x.detach() @ w.t()) < 0.06
    assert 0.01 < relative(x.grad, g @ w) < 0.09 and 0.01 < relative(layer.weight.grad, g.t() @ x.detach()) < 0.09


def test_custom():
    made = []

    def factory(role):
        made.append(role)
        return nib.torch.NVFP4Quantizer()

    layer, x = nib.torch.Linear(32, 32, name="first"), noise(32, 32).requires_grad_()
    recipe = CustomRecipe(qfactory=factory)
    for _ in range(2):  # asked once
        with nib.torch.autocast(recipe=recipe):
            layer(x).sum().backward()
    assert made == [QuantizerRole("linear", "input", "first"), QuantizerRole("linear", "weight", "first"), None,
                    QuantizerRole("linear", "grad_output", "first"), None]
    with pytest.raises(ValueError):
        CustomRecipe()
    with pytest.raises(ValueError, match="slot 0"), nib.torch.autocast(recipe=CustomRecipe(qfactory=lambda role: None)):
        layer(x)


def test_saved_memory():
    """What waits for the backward pass is the columnwise usages, 4.5 bits an element, and nothing else."""
    layer, x = nib.torch.Linear(256, 256), noise(256, 256).requires_grad_()
    with nib.torch.autocast():
        y = layer(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert sum(t.numel() * t.element_size() for t in saved) <= 2 * (256 * 256 * 9 // 16 + 4)


# ---- The example -----------------------------------------------------------------------------------------


def test_example_trains(tmp_path):
    """A few steps of examples/train_tiny.py, small: losses fall alike in BF16 and in NVFP4, and are plotted."""
    from conftest import ROOT
    out = tmp_path / "out"
    command = [sys.executable, os.path.join(ROOT, "examples/train_tiny.py"), "--variants", "bf16,nvfp4,whole",
               "--seeds", "0", "--steps", "12", "--batch", "4", "--context", "64", "--width", "64", "--heads", "2",
               "--rate", "4e-3", "--threads", "1", "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(nib.__file__))}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    import json
    results = {run["variant"]: run for run in json.loads((out / "results.json").read_text())}
    assert set(results) == {"bf16", "nvfp4", "whole"}
    for run in results.values():
        assert run["training"][0] > 3.9 and run["loss"] < 3.3  # ln 62 is 4.13; the unigram entropy 3.01
        assert abs(run["loss"] / results["bf16"]["loss"] - 1) < 0.05
    assert results["nvfp4"]["training"][3] != results["bf16"]["training"][3]
    svg = (out / "losses.svg").read_text()
    assert svg.startswith("<svg") and svg.count("<path") > 6 and "| `nvfp4`" in done.stdout
    gap = 100 * (results["nvfp4"]["loss"] / results["bf16"]["loss"] - 1)
    assert f"nvfp4: {gap:+.2f} %" in (out / "gaps.svg").read_text() and "| `whole`" in done.stdout

    # A run that was stopped is shown as far as it came, and not compared.
    half = {**results["whole"], "done": 6, "training": results["whole"]["training"][:6],
            "held_out": [point for point in results["whole"]["held_out"] if point[0] <= 6]}
    assert len(half["held_out"]) == 6 and len(results["whole"]["held_out"]) == 12
    (out / "run-whole-0.json").write_text(json.dumps(half))
    done = subprocess.run([*command, "--report"], env=env, capture_output=True, text=True, check=True)
    assert "whole seed 0 stopped after step 6 of 12" in done.stdout and "| `whole`" not in done.stdout
