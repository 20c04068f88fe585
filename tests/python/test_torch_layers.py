# SPDX-License-Identifier: Apache-2.0
"""Layers against plain PyTorch that calls quantizers and products by hand; what recipes keep in layers."""
import io
import math
import pickle

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import torch.nn.functional as F  # noqa: E402

import nib.torch as nt  # noqa: E402
from nib.torch import quantization  # noqa: E402
from nib.torch.format_tensor import FormatStorage  # noqa: E402
from nib.torch.products import values_of  # noqa: E402
from nib.torch.utils import gemm_reference  # noqa: E402
from nib.torch.recipe import (CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling,  # noqa: E402
                              MXFP8BlockScaling, NVFP4BlockScaling)

NVFP4 = NVFP4BlockScaling(disable_stochastic_rounding=True)
RECIPES = [None, NVFP4, NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True), MXFP8BlockScaling(),
           Float8CurrentScaling(), Float8BlockScaling(), NVFP4BlockScaling(backward_override="dequantized"),
           MXFP8BlockScaling(backward_override="high_precision")]
NAMES = ["plain", "nvfp4", "nvfp4-no-rht", "mxfp8", "float8", "float8-block", "dequantized", "high-precision"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)


def noise(*shape, seed=0, dtype=torch.float32, std=1.0):
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def product(a, b, a_columnwise=False, b_columnwise=False):
    """What the library's reference makes of two operands; where there are plain ones, PyTorch."""
    if all(isinstance(t, FormatStorage) for t in (a, b)):
        return gemm_reference(a, b, a_columnwise=a_columnwise, b_columnwise=b_columnwise)
    a, b = values_of(a, a_columnwise), values_of(b, b_columnwise)
    return (a.t() if a_columnwise else a) @ (b if b_columnwise else b.t())


class ByHand(torch.autograd.Function):
    """A linear layer in a recipe, written out: three quantizers, three products."""

    @staticmethod
    def forward(ctx, x, w, b, recipe):
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        qx, qw = (recipe.make_quantizer(role)(t.detach().reshape(-1, t.shape[-1]))
                  for role, t in (("input", x), ("weight", w)))
        y = product(qx, qw)
        y = y if b is None else y + b.float()
        return y.to(x.dtype).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, g):
        (x, w), recipe = ctx.saved_tensors, ctx.recipe
        matrix, rows = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
        if recipe.backward_override is not None:
            if recipe.backward_override == "dequantized":
                rows, w = (recipe.make_quantizer(role)(t).dequantize() for role, t in (("input", rows), ("weight", w)))
            dx, dw = matrix @ w, matrix.t() @ rows
        else:
            qx, qw, qg = (recipe.make_quantizer(role)(t) for role, t in
                          (("input", rows), ("weight", w), ("grad_output", matrix)))
            dx, dw = product(qg, qw, b_columnwise=True), product(qg, qx, a_columnwise=True, b_columnwise=True)
        db = matrix.sum(0, dtype=torch.float32).to(w.dtype) if ctx.needs_input_grad[2] else None
        return dx.to(x.dtype).view(x.shape), dw.to(w.dtype), db, None


def hand_linear(x, w, b, recipe):
    return F.linear(x, w, b) if recipe is None else ByHand.apply(x, w, b, recipe)


def compare(layer, by_hand, recipe, *inputs):
    """Outputs and all gradients of a layer and of a function of the same parameters: equal bits."""
    parameters = dict(layer.named_parameters())
    copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    mine = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.clone().requires_grad_() for t in inputs]
    with nt.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(*mine)
    want = by_hand(copies, *theirs)
    g = noise(*y.shape, seed=99, dtype=y.dtype)
    y.backward(g)
    want.backward(g)

    def check(name, here, there):
        assert here is not None and here.dtype == there.dtype, name
        assert torch.equal(here, there), (name, (here - there).abs().max())

    check("output", y.detach(), want.detach())
    for i, (here, there) in enumerate(zip(mine, theirs)):
        check(f"gradient of input {i}", here.grad, there.grad)
    for name, p in parameters.items():
        check(name, p.grad, copies[name].grad)


def perturbed(layer):
    """Norms and biases that are not what they begin with."""
    with torch.no_grad():
        for i, (name, p) in enumerate(layer.named_parameters()):
            if p.dim() == 1:
                p.add_(noise(*p.shape, seed=i, dtype=p.dtype, std=0.2))
    return layer


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_linear(recipe, dtype):
    layer = perturbed(nt.Linear(128, 64, params_dtype=dtype))
    compare(layer, lambda p, x: hand_linear(x, p["weight"], p["bias"], recipe), recipe,
            noise(4, 32, 128, dtype=dtype))


def test_split_weights():
    torch.manual_seed(1)
    layer = perturbed(nt.Linear(64, 96, parameters_split={"query": 64, "key_": 32}))
    assert list(layer.state_dict()) == ["query_weight", "key_weight", "query_bias", "key_bias", "_extra_state"]
    compare(layer, lambda p, x: hand_linear(x, torch.cat([p["query_weight"], p["key_weight"]]),
                                            torch.cat([p["query_bias"], p["key_bias"]]), NVFP4), NVFP4, noise(32, 64))
    for wrong in ({"a": 10}, (), (1, 2)):
        with pytest.raises((ValueError, TypeError)):
            nt.Linear(64, 96, parameters_split=wrong)


def hand_norm(x, p, kind, zero_centered, prefix="layer_norm_"):
    w = p[prefix + "weight"] + 1 if zero_centered else p[prefix + "weight"]
    if kind == "RMSNorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w
    return F.layer_norm(x, (x.shape[-1],), w, p[prefix + "bias"])


@every_recipe
@pytest.mark.parametrize("kind, zero_centered", [("LayerNorm", False), ("RMSNorm", True)])
def test_layernorm_linear(recipe, kind, zero_centered):
    torch.manual_seed(2)
    layer = perturbed(nt.LayerNormLinear(128, 64, normalization=kind, zero_centered_gamma=zero_centered))
    assert list(layer.state_dict()) == [name for name in ("layer_norm_weight", "layer_norm_bias", "weight", "bias",
                                                          "_extra_state") if kind != "RMSNorm" or "norm_b" not in name]
    compare(layer, lambda p, x: hand_linear(hand_norm(x, p, kind, zero_centered), p["weight"], p["bias"], recipe),
            recipe, noise(2, 32, 128))


@every_recipe
def test_layernorm_mlp(recipe):
    torch.manual_seed(3)
    layer = perturbed(nt.LayerNormMLP(64, 128, activation="swiglu"))
    assert list(layer.state_dict()) == ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight",
                                        "fc2_bias", "_extra_state"]

    def by_hand(p, x):
        y = hand_linear(hand_norm(x, p, "LayerNorm", False), p["fc1_weight"], p["fc1_bias"], recipe)
        gate, up = y.chunk(2, dim=-1)
        return hand_linear(F.silu(gate) * up, p["fc2_weight"], p["fc2_bias"], recipe)

    compare(layer, by_hand, recipe, noise(64, 64))


@pytest.mark.parametrize("name", nt.module.norms.ACTIVATIONS)
def test_activations(name):
    x = noise(8, 32)
    a, b = x.chunk(2, dim=-1)
    want = {"gelu": lambda: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))),
            "geglu": lambda: 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a ** 3))) * b,
            "qgelu": lambda: x / (1 + torch.exp(-1.702 * x)), "qgeglu": lambda: a / (1 + torch.exp(-1.702 * a)) * b,
            "relu": lambda: x.clamp(min=0), "reglu": lambda: a.clamp(min=0) * b,
            "srelu": lambda: x.clamp(min=0) ** 2, "sreglu": lambda: a.clamp(min=0) ** 2 * b,
            "silu": lambda: x / (1 + torch.exp(-x)), "swiglu": lambda: a / (1 + torch.exp(-a)) * b,
            "glu": lambda: b / (1 + torch.exp(-a)),
            "clamped_swiglu": lambda: a / (1 + torch.exp(-1.702 * a)) * (b + 1)}[name]()
    assert torch.allclose(nt.module.norms.activate(name, x), want, atol=1e-6)
    layer = nt.LayerNormMLP(32, 64, activation=name)
    assert layer.fc1_weight.shape[0] == (128 if nt.module.norms.is_gated(name) else 64)
    with nt.autocast(recipe=MXFP8BlockScaling()):
        layer(noise(32, 32)).sum().backward()
    with pytest.raises(ValueError, match="activation"):
        nt.LayerNormMLP(32, 64, activation=name + "x")


@every_recipe
def test_grouped_linear(recipe):
    torch.manual_seed(4)
    layer, splits = perturbed(nt.GroupedLinear(3, 64, 128)), [32, 64, 96]
    assert list(layer.state_dict()) == ["weight0", "bias0", "weight1", "bias1", "weight2", "bias2", "_extra_state"]

    def by_hand(p, x):
        return torch.cat([hand_linear(part, p[f"weight{i}"], p[f"bias{i}"], recipe)
                          for i, part in enumerate(x.split(splits))])

    class Split(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.named_parameters = layer.named_parameters

        def forward(self, x):
            return layer(x, splits)

    compare(Split(), by_hand, recipe, noise(192, 64))
    with pytest.raises(AssertionError):
        layer(noise(192, 64), [96, 96])
    with pytest.raises(ValueError, match="rows"):
        layer(noise(192, 64), [96, 95, 0])


def test_padding():
    x, splits = noise(50, 32).requires_grad_(), [7, 0, 43]
    with nt.autocast(recipe=MXFP8BlockScaling()):
        padded, counts = nt.Fp8Padding(3)(x, splits)
        y = nt.GroupedLinear(3, 32, 64)(padded, counts)
        out = nt.Fp8Unpadding(3)(y, splits)
    assert counts == [32, 0, 64] and padded.shape == (96, 32) and not padded[7:32].any()
    assert torch.equal(padded[32:75], x[7:]) and torch.equal(nt.Fp8Unpadding(3, 32)(padded, splits), x)
    out.sum().backward()
    assert out.shape == (50, 64) and x.grad.shape == x.shape
    assert nt.Fp8Padding(2, 16)(x[:48], [16, 32])[1] == [16, 32]


def test_products_of_codes():
    """Products are of the codes: layers have the bits of the reference: of the same blocks in the same order."""
    for rht in (True, False):
        recipe = NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=not rht)
        layer, x, g = nt.Linear(48, 32, bias=False), noise(32, 48).requires_grad_(), noise(32, 32, seed=1)
        with nt.autocast(recipe=recipe):
            y = layer(x)
        y.backward(g)
        qx, qw, qg = (recipe.make_quantizer(role)(t.detach()) for role, t in
                      (("input", x), ("weight", layer.weight), ("grad_output", g)))
        assert torch.equal(y, gemm_reference(qx, qw))
        assert torch.equal(x.grad, gemm_reference(qg, qw, b_columnwise=True))
        assert torch.equal(layer.weight.grad, gemm_reference(qg, qx, a_columnwise=True, b_columnwise=True))
    layer = perturbed(nt.Linear(48, 32))
    with nt.autocast(recipe=recipe), torch.no_grad():
        assert torch.allclose(layer(x), values_of(qx, False) @ values_of(
            recipe.make_quantizer("weight")(layer.weight), False).t() + layer.bias, atol=1e-5)


# ---- Attention and TransformerLayer ----------------------------------------------------------------------


def hand_attention(q, k, v, hidden=None, bias=None, scale=None):
    """[b, h, s, d], written out; hidden is True where a key is not seen."""
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = scores if bias is None else scores + bias
    weights = (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1)
    return weights.nan_to_num(0.0) @ v


def attention_bounds(q, k, v, hidden, g):
    """How far FP32 may be from hand_attention of these float64 tensors: (output, dq, dk, dv). gamma(n) bounds the
    relative error of a sum of n products in any order. A score is off by gamma(d + 3) of its absolute sum and by a
    rounding where the maximum is taken off, exp by 20 ulps (the least exact that PyTorch has); both occur twice in a
    weight, in it and in the sum that divides it, and once more where a backward pass or a block computes it again."""
    u, (d, n) = 2.0 ** -24, (q.shape[-1], max(q.shape[-2], k.shape[-2]))

    def gamma(terms):
        return terms * u / (1 - terms * u)

    scale = 1 / math.sqrt(d)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    p = scores.softmax(-1).nan_to_num(0.0)
    largest = (q.abs() @ k.abs().transpose(-1, -2) * scale).max().item()
    e = 3 * (gamma(d + 3) * largest + 2 * largest * u + 40 * u) + gamma(n + 3)
    out, dp = p @ v, g @ v.transpose(-1, -2)
    e_out = (e + gamma(n)) * (p @ v.abs())
    total = (g * out).sum(-1, keepdim=True)
    e_total = gamma(d) * (g * out).abs().sum(-1, keepdim=True) + (g.abs() * e_out).sum(-1, keepdim=True)
    ds = p * (dp - total)
    e_ds = p * ((e + 3 * u) * (dp.abs() + total.abs()) + gamma(d) * (g.abs() @ v.abs().transpose(-1, -2)) + e_total)
    return (e_out, scale * (e_ds + gamma(n + 2) * ds.abs()) @ k.abs(),
            scale * (e_ds + gamma(n + 2) * ds.abs()).transpose(-1, -2) @ q.abs(),
            (e + gamma(n)) * (p.transpose(-1, -2) @ g.abs()))


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding", "padding_causal", "causal_bottom_right", "arbitrary"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention(form, mask, groups):
    b, sq, skv, h, d = 2, 8, 8 if "bottom" not in mask else 12, 4, 16
    q, k, v = (noise(b, heads, s, d, seed=i).requires_grad_()
               for i, (heads, s) in enumerate(((h, sq), (groups, skv), (groups, skv))))
    order = (2, 0, 1, 3) if form == "sbhd" else (0, 2, 1, 3)
    layer = nt.DotProductAttention(h, d, num_gqa_groups=groups, qkv_format=form, attn_mask_type=mask)
    hidden = torch.zeros(b, 1, sq, skv, dtype=torch.bool)
    given = None
    if "padding" in mask:
        lengths = torch.tensor([5, 8])
        given = (torch.arange(8) >= lengths[:, None])[:, None, None, :]
        hidden = hidden | given | given.transpose(-1, -2)
    if "causal" in mask:
        hidden = hidden | torch.ones(sq, skv, dtype=torch.bool).triu(1 + (skv - sq if "bottom" in mask else 0))
    if mask == "arbitrary":
        given = hidden = noise(b, 1, sq, skv, seed=7) > 1
    y = layer(*(t.permute(order) for t in (q, k, v)), attention_mask=given)
    assert y.shape == ((sq, b, h * d) if form == "sbhd" else (b, sq, h * d))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wide = [exact[0], *(t.repeat_interleave(h // groups, dim=1) for t in exact[1:])]
    want, g = hand_attention(*wide, hidden), noise(b, h, sq, d, seed=8)
    bounds = attention_bounds(*(t.detach() for t in wide), hidden, g.double())
    here = [y.detach().view(*(q.permute(order).shape)).permute([order.index(i) for i in range(4)]),
            *torch.autograd.grad(y, (q, k, v), g.permute(order).reshape(y.shape))]
    there = [want.detach(), *torch.autograd.grad(want, exact, g.double())]
    for mine, theirs, bound in zip(here, there, bounds):
        bound = bound.view(*theirs.shape[:2], -1, *theirs.shape[2:]).sum(2) * (1 + 2.0 ** -20)
        assert ((mine.double() - theirs).abs() <= bound).all() and bound.max() < 1e-3 * theirs.abs().max()
    if "padding" in mask:
        cu = torch.tensor([0, 5, 13], dtype=torch.int32)
        other = layer(*(t.permute(order) for t in (q, k, v)), cu_seqlens_q=cu, cu_seqlens_kv=cu)
        assert torch.equal(other, y)


def test_attention_options():
    q, k, v = (noise(2, 8, 4, 16, seed=i) for i in range(3))
    heads = [t.transpose(1, 2) for t in (q, k, v)]

    def check(want, **keywords):
        layer = nt.DotProductAttention(4, 16, qkv_format="bshd", attn_mask_type="no_mask", **keywords.pop("make", {}))
        assert torch.allclose(layer(q, k, v, **keywords), want.transpose(1, 2).reshape(2, 8, 64), atol=1e-5)

    bias = noise(1, 4, 8, 8, seed=4)
    check(hand_attention(*heads, bias=bias), core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    check(hand_attention(*heads, bias=bias / 4), core_attention_bias_type="pre_scale_bias", core_attention_bias=bias)
    distance = (torch.arange(8) - torch.arange(8)[:, None]).abs()
    slopes = torch.tensor([2.0 ** -2, 2.0 ** -4, 2.0 ** -6, 2.0 ** -8]).view(4, 1, 1)
    check(hand_attention(*heads, bias=-distance * slopes), core_attention_bias_type="alibi")
    check(hand_attention(*heads, hidden=distance > 2), window_size=(2, 2))
    check(hand_attention(*heads, scale=0.5), make=dict(softmax_scale=0.5))
    check(hand_attention(*heads), checkpoint_core_attention=True)
    layer = nt.DotProductAttention(4, 16, attention_dropout=0.5, qkv_format="bshd")
    torch.manual_seed(0)
    one = layer(q, k, v)
    torch.manual_seed(0)
    assert torch.equal(one, layer(q, k, v)) and not torch.equal(one, layer(q, k, v))
    assert torch.equal(layer.eval()(q, k, v), layer(q, k, v))
    for wrong in (dict(qkv_format="thd"), dict(inference_params=1), dict(fp8_output=True), dict(score_mod=print)):
        with pytest.raises(NotImplementedError):
            layer(q, k, v, **wrong)
    for wrong in (dict(softmax_type="learnable"), dict(cp_group=[1]), dict(tp_size=2), dict(return_max_logit=True)):
        with pytest.raises(NotImplementedError):
            nt.DotProductAttention(4, 16, **wrong)
    with pytest.raises(NotImplementedError, match="fp8_dpa"), nt.autocast(recipe=NVFP4BlockScaling(fp8_dpa=True)):
        layer(q, k, v)


def test_rotary():
    for interleaved in (False, True):
        angles = nt.RotaryPositionEmbedding(16, interleaved=interleaved)(8)
        x = noise(8, 2, 4, 32)
        y = nt.attention.apply_rotary_pos_emb(x, angles, "sbhd", interleaved=interleaved)
        frequencies = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        turn = torch.exp(1j * torch.arange(8)[:, None] * frequencies)[:, None, None, :]
        pairs = torch.complex(x[..., :16:2], x[..., 1:16:2]) if interleaved else torch.complex(x[..., :8], x[..., 8:16])
        pairs = pairs * turn
        want = torch.stack((pairs.real, pairs.imag), -1).flatten(-2) if interleaved else \
            torch.cat((pairs.real, pairs.imag), -1)
        assert torch.allclose(y[..., :16], want, atol=1e-5) and torch.equal(y[..., 16:], x[..., 16:])
        other = nt.attention.apply_rotary_pos_emb(x.transpose(0, 1), angles, "bshd", interleaved=interleaved)
        assert torch.equal(other.transpose(0, 1), y)


def hand_transformer(p, x, recipe):
    """One encoder layer, causal, [s, b, h], 4 heads of 16."""
    def weights(*names):
        return torch.cat([p[f"self_attention.layernorm_qkv.{name}"] for name in names])
    normed = hand_norm(x, p, "LayerNorm", False, "self_attention.layernorm_qkv.layer_norm_")
    mixed = hand_linear(normed, weights("query_weight", "key_weight", "value_weight"),
                        weights("query_bias", "key_bias", "value_bias"), recipe)
    q, k, v = (t.reshape(*x.shape[:2], 4, 16).permute(1, 2, 0, 3) for t in mixed.chunk(3, dim=-1))
    hidden = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden).permute(2, 0, 1, 3).reshape(x.shape)
    x = x + (hand_linear(context, p["self_attention.proj.weight"], None, recipe) + p["self_attention.proj.bias"])
    y = hand_linear(hand_norm(x, p, "LayerNorm", False, "layernorm_mlp.layer_norm_"), p["layernorm_mlp.fc1_weight"],
                    p["layernorm_mlp.fc1_bias"], recipe)
    y = F.gelu(y, approximate="tanh")
    return x + (hand_linear(y, p["layernorm_mlp.fc2_weight"], None, recipe) + p["layernorm_mlp.fc2_bias"])


@every_recipe
def test_transformer_layer(recipe):
    """Equal bits in every recipe: the attention is PyTorch's on both sides, and has a bound of its own above."""
    torch.manual_seed(5)
    layer = perturbed(nt.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0))
    compare(layer, lambda p, x: hand_transformer(p, x, recipe), recipe, noise(32, 2, 64))


@pytest.mark.parametrize("keywords", [
    dict(layer_type="decoder"), dict(output_layernorm=True), dict(parallel_attention_mlp=True),
    dict(apply_residual_connection_post_layernorm=True), dict(fuse_qkv_params=True, num_gqa_groups=2),
    dict(normalization="RMSNorm", bias=False, qk_norm_type="RMSNorm", attn_input_format="bshd", drop_path_rate=0.1)],
    ids=lambda keywords: next(iter(keywords)))
def test_transformer_variants(keywords):
    torch.manual_seed(6)
    layer, x = nt.TransformerLayer(64, 128, 4, **keywords), noise(32, 4, 64).requires_grad_()
    with nt.autocast(recipe=MXFP8BlockScaling()):
        y = layer(x, encoder_output=noise(32, 4, 64, seed=1), rotary_pos_emb=nt.RotaryPositionEmbedding(16)(32))
    y.sum().backward()
    assert y.shape == x.shape and x.grad.isfinite().all()
    assert all(p.grad is not None for p in layer.parameters())
    meta = nt.TransformerLayer(64, 128, 4, device="meta", **keywords)
    assert list(meta.state_dict()) == list(layer.state_dict()) and all(p.is_meta for p in meta.parameters())
    for module in meta.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    meta.load_state_dict(layer.state_dict())
    layer.eval(), meta.eval()
    arguments = dict(encoder_output=noise(32, 4, 64, seed=1))
    assert torch.equal(meta(x, **arguments), layer(x, **arguments))
    for wrong in (dict(layer_type="both"), dict(parallel_attention_mlp=True, output_layernorm=True),
                  dict(fuse_wgrad_accumulation=True)):
        with pytest.raises(ValueError):
            nt.TransformerLayer(64, 128, 4, **wrong)


# ---- What layers keep ------------------------------------------------------------------------------------


def test_delayed_scaling():
    """Scales follow the amaxes of earlier steps, by hand."""
    recipe = DelayedScaling(amax_history_len=3, margin=1)
    layer = nt.Linear(32, 32, bias=False)
    quantization.FP8GlobalStateManager.reset()
    amaxes, grads = [], []
    for step in range(5):
        x, g = noise(16, 32, seed=step) * 2 ** step, noise(16, 32, seed=10 + step) / 2 ** step
        x.requires_grad_()
        with nt.autocast(recipe=recipe):
            y = layer(x)
        scales = [torch.tensor(224.0) / max(amaxes[-3:]), torch.tensor(224.0) / layer.weight.detach().abs().max()] \
            if amaxes else [torch.tensor(1.0)] * 2
        qx, qw = (nt.Float8Quantizer(scale.view(1), torch.zeros(1), nt.DType.kFloat8E4M3)(t.detach())
                  for scale, t in zip(scales, (x, layer.weight)))
        assert torch.equal(y, product(qx, qw))
        amaxes.append(x.detach().abs().max())
        y.backward(g)
        scale = torch.tensor(28672.0) / max(grads[-3:]) if grads else torch.tensor(1.0)
        qg = nt.Float8Quantizer(scale.view(1), torch.zeros(1), nt.DType.kFloat8E5M2)(g)
        assert torch.equal(x.grad, product(qg, qw, b_columnwise=True))
        grads.append(g.abs().max())
    state = layer.state_dict()
    assert state["_extra_state"].numel() > 100
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = nt.Linear(32, 32, bias=False)
    other.load_state_dict(torch.load(file, weights_only=True))
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(other.fp8_meta[key].scale, layer.fp8_meta[key].scale)
        assert torch.equal(other.fp8_meta[key].amax_history, layer.fp8_meta[key].amax_history)
    with nt.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(other(x), layer(x))


def test_extra_state_runs_no_code():
    class Bad:
        def __reduce__(self):
            return print, ("executed",)
    layer = nt.Linear(16, 16)
    for payload in ({"scale_fwd": Bad()}, Bad()):
        with pytest.raises(pickle.UnpicklingError, match="print"):
            layer.set_extra_state(torch.frombuffer(bytearray(pickle.dumps(payload)), dtype=torch.uint8))
    layer.set_extra_state(torch.frombuffer(bytearray(pickle.dumps({"recipe": MXFP8BlockScaling()})), dtype=torch.uint8))


@pytest.mark.parametrize("change, message", [
    ({"amax_history_fwd": torch.zeros(1, 1).expand(1 << 50, 3), "recipe": None}, "amax_history_fwd is no tensor"),
    ({"amax_history_bwd": torch.zeros(1, 1).expand(1 << 50, 2)}, "amax_history_bwd is no tensor"),
    ({"recipe": DelayedScaling(amax_history_len=1 << 50)}, "not that of its histories"), ({"recipe": 7}, "not that of"),
    ({"scale_fwd": 5}, "scale_fwd is no tensor"), ({"extra_fp8_variables": {"scaling_fwd": 5}}, "more than that"),
    ({"extra_fp8_variables": {"num_gemms": 1 << 50}}, None)])
def test_extra_state_takes_no_more_memory_than_it_has(change, message):
    state = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 3), "scale_bwd": torch.ones(2),
             "amax_history_bwd": torch.zeros(4, 2), "recipe": DelayedScaling(amax_history_len=4)}
    layer = nt.Linear(32, 32)
    given = torch.frombuffer(bytearray(pickle.dumps({**state, **change})), dtype=torch.uint8)
    if message is None:
        layer.set_extra_state(given)
        assert layer.fp8_meta["num_gemms"] == 1 and layer.fp8_meta["scaling_fwd"].amax_history.shape == (4, 3)
        return
    with pytest.raises(RuntimeError, match=message):
        layer.set_extra_state(given)
    assert "scaling_fwd" not in layer.fp8_meta


def test_calibration():
    layer, x = nt.Linear(32, 32), noise(16, 32)
    with nt.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    history = layer.fp8_meta["scaling_fwd"].amax_history
    assert history[0, 0] == x.abs().max() and history[0, 1] == layer.weight.abs().max()


@pytest.mark.parametrize("make", [lambda: nt.Linear(64, 64), lambda: nt.LayerNormMLP(64, 64)])
def test_microbatches(make):
    """True quantizes the weight and keeps it, False takes what was kept, None does neither."""
    layer, x = make(), noise(32, 64)
    name = layer.weight_names[0]

    def run(first):
        with nt.autocast(recipe=NVFP4), torch.no_grad():
            return layer(x, is_first_microbatch=first)

    one = run(None)
    assert not layer._fp8_workspaces and torch.equal(run(True), one)
    assert isinstance(layer._fp8_workspaces[name], nt.NVFP4Tensor) and len(layer._fp8_workspaces) == layer._num_gemms
    with torch.no_grad():
        getattr(layer, name).mul_(2)
    kept = layer._fp8_workspaces[name]._rowwise_data.clone()
    assert torch.equal(run(False), one) and torch.equal(layer._fp8_workspaces[name]._rowwise_data, kept)
    assert not torch.equal(run(True), one) and torch.equal(run(False), run(None))
    with nt.autocast(recipe=NVFP4):  # gradients want the columnwise usage, which was not made
        y = layer(x.clone().requires_grad_(), is_first_microbatch=False)
    y.sum().backward()
    assert layer._fp8_workspaces[name]._columnwise_data is not None


@pytest.mark.parametrize("recipe", [None, NVFP4, MXFP8BlockScaling()])
def test_fused_weight_gradients(recipe):
    layer, x, g = nt.Linear(64, 64, fuse_wgrad_accumulation=True), noise(32, 64), noise(32, 64, seed=1)
    plain = nt.Linear(64, 64)
    plain.load_state_dict(layer.state_dict())

    def run(this, **keywords):
        with nt.autocast(enabled=recipe is not None, recipe=recipe):
            y = this(x, **keywords)
        y.backward(g)

    with pytest.raises(RuntimeError, match="main_grad"):
        run(layer)
    run(plain)
    layer.weight.main_grad = torch.full((64, 64), 1.0)
    run(layer)
    assert layer.weight.grad is None and torch.allclose(layer.weight.main_grad, 1 + plain.weight.grad, atol=1e-5)
    run(layer)
    assert torch.allclose(layer.weight.main_grad, 1 + 2 * plain.weight.grad, atol=1e-4)
    run(layer, is_first_microbatch=True)
    assert torch.allclose(layer.weight.main_grad, plain.weight.grad, atol=1e-5)
    layer.weight.grad_added_to_main_grad = False
    run(layer)
    assert layer.weight.grad_added_to_main_grad and layer.weight.grad.shape == (64, 64)


def test_delayed_weight_gradients():
    layer, plain = nt.Linear(64, 64, delay_wgrad_compute=True), nt.Linear(64, 64)
    plain.load_state_dict(layer.state_dict())
    hooks = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(1))
    for this in (layer, plain):
        with nt.autocast(recipe=NVFP4):
            y = this(noise(32, 64))
        y.sum().backward()
    assert layer.need_backward_dw() and layer.weight.grad is None
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, plain.weight.grad) and hooks == [1]
    with pytest.raises(RuntimeError, match="nothing"):
        layer.backward_dw()


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), MXFP8BlockScaling(), Float8BlockScaling()])
def test_preserved_values(recipe):
    for make in (lambda: nt.Linear(128, 128), lambda: nt.LayerNormMLP(128, 128), lambda: nt.GroupedLinear(2, 128, 128)):
        torch.manual_seed(7)
        plain = make()
        torch.manual_seed(7)
        with nt.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            layer = make()
        for name in layer.weight_names:
            weight = getattr(layer, name)
            assert isinstance(weight, nt.QuantizedTensor)
            assert torch.equal(weight.get_high_precision_init_val(), getattr(plain, name))
            assert torch.equal(weight.dequantize(), recipe.make_quantizer("weight")(getattr(plain, name)).dequantize())
            layer.to(torch.float32)
            assert getattr(layer, name).get_high_precision_init_val() is not None
            weight.clear_high_precision_init_val()
            assert weight.get_high_precision_init_val() is None
    with nt.quantized_model_init(recipe=recipe):
        assert not hasattr(nt.Linear(128, 128).weight, "get_high_precision_init_val")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [NVFP4, DelayedScaling(amax_history_len=2)], ids=["nvfp4", "delayed"])
def test_checkpoint(reentrant, recipe):
    """Computed again: the same outputs, gradients and, where scaling is delayed, histories."""
    results = []
    for again in (False, True):
        torch.manual_seed(8)
        quantization.FP8GlobalStateManager.reset()
        model = torch.nn.Sequential(nt.LayerNormLinear(64, 64), nt.LayerNormMLP(64, 64))
        for step in range(3):
            x = noise(32, 64, seed=step).requires_grad_()
            model.zero_grad()
            with nt.autocast(recipe=recipe):
                y = nt.checkpoint(model, x, use_reentrant=reentrant) if again else model(x)
            y.backward(noise(32, 64, seed=20 + step))
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        if recipe.delayed():
            results[-1] += [getattr(layer.fp8_meta[key], what) for layer in model for key in
                            ("scaling_fwd", "scaling_bwd") for what in ("scale", "amax_history")]
    for here, there in zip(*results):
        assert torch.equal(here, there)
    layer = nt.LayerNormMLP(64, 64, checkpoint=True)
    same = nt.LayerNormMLP(64, 64)
    same.load_state_dict(layer.state_dict())
    with nt.autocast(recipe=NVFP4):
        assert torch.equal(layer(x), same(x))


# ---- FusedAdam -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [dict(), dict(weight_decay=0.1), dict(weight_decay=0.1, adam_w_mode=False)])
def test_adam(keywords):
    mode = keywords.pop("adam_w_mode", True)
    other = (torch.optim.AdamW if mode else torch.optim.Adam)
    a, b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    b.load_state_dict(a.state_dict())
    mine = nt.FusedAdam(a.parameters(), lr=0.01, adam_w_mode=mode, **keywords)
    theirs = other(b.parameters(), lr=0.01, **{"weight_decay": 0.0, **keywords})
    for step in range(5):
        for model, optimizer in ((a, mine), (b, theirs)):
            optimizer.zero_grad()
            model(noise(4, 8, seed=step)).square().sum().backward()
            optimizer.step()
        if step == 2:
            fresh = nt.FusedAdam(a.parameters(), lr=0.01, adam_w_mode=mode, **keywords)
            fresh.load_state_dict(mine.state_dict())
            mine = fresh
    for here, there in zip(a.parameters(), b.parameters()):
        assert torch.allclose(here, there, atol=1e-6)


def test_adam_over_quantized_weights():
    """With masters a quantized model trains as its values allow; without them the optimizer says no."""
    torch.manual_seed(9)
    x, target = noise(128, 64), noise(128, 32, seed=1)
    with nt.quantized_model_init(recipe=NVFP4, preserve_high_precision_init_val=True):
        layer = nt.Linear(64, 32)
    begin = layer.weight.get_high_precision_init_val().clone()
    optimizer = nt.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True, exp_avg_dtype=torch.float16,
                             exp_avg_sq_dtype=torch.bfloat16)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        with nt.autocast(recipe=NVFP4):
            loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not step:
            master = optimizer.get_unscaled_state(layer.weight, "master_param")
            assert (master - begin).abs().max() <= 1.0001e-2 and layer.weight.get_high_precision_init_val() is None
    master = optimizer.get_unscaled_state(layer.weight, "master_param")
    assert losses[-1] < 0.75 * losses[0]
    assert torch.equal(layer.weight.dequantize(), NVFP4.make_quantizer("weight")(master).dequantize())
    for wrong in (dict(amsgrad=True), dict(exp_avg_dtype=torch.float64),
                  dict(master_weights=True, master_weight_dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError):
            nt.FusedAdam(layer.parameters(), **wrong)
    bare = nt.FusedAdam(layer.parameters())
    with pytest.raises(RuntimeError, match="master_weights"):
        bare.step()


# ---- Mixed recipes ---------------------------------------------------------------------------------------


def test_recipes_of_functions():
    """Functions that do what a recipe does give its bits."""
    from nib.torch import custom_recipes
    pairs = {"mxfp8_factory": MXFP8BlockScaling(), "current_scaling_factory": Float8CurrentScaling(),
             "float8_block_scaling_factory": Float8BlockScaling(), "delayed_scaling_factory": DelayedScaling(),
             "nvfp4_factory": NVFP4BlockScaling(), "high_precision_factory": None,
             "mxfp8_fwd_high_precision_bwd_factory": MXFP8BlockScaling(backward_override="dequantized")}
    for name, recipe in pairs.items():
        results = []
        for this in (recipe, CustomRecipe(qfactory=getattr(custom_recipes, name))):
            torch.manual_seed(10)
            quantization.FP8GlobalStateManager.reset()
            layer, x = nt.LayerNormLinear(128, 128), noise(128, 128).requires_grad_()
            for _ in range(2):
                x.grad = None
                layer.zero_grad()
                torch.manual_seed(11)
                with nt.autocast(enabled=this is not None, recipe=this):
                    y = layer(x)
                y.backward(noise(128, 128, seed=1))
            results.append((y.detach(), x.grad, layer.weight.grad, layer.layer_norm_weight.grad))
        for here, there in zip(*results):
            assert torch.equal(here, there) or name == "high_precision_factory" and torch.allclose(here, there), name
    for name in ("high_precision_fwd_mxfp8_bwd_factory", "mxfp8_fwd_nvfp4_bwd_factory", "nvfp4_1d_weight_factory",
                 "nvfp4_row_scaled_fwd_mxfp8_bwd_factory", "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
                 "nvfp4_linear_fp8_dpa_factory"):
        layer, x = nt.GroupedLinear(2, 64, 64), noise(64, 64).requires_grad_()
        with nt.autocast(recipe=CustomRecipe(qfactory=getattr(custom_recipes, name))):
            layer(x, [32, 32]).sum().backward()
        assert x.grad.isfinite().all() and layer.weight0.grad.isfinite().all(), name


def test_custom_products():
    """A quantizer that brings its own storage and product is asked for it, three times."""
    calls = []

    class Storage(nt.QuantizedTensorStorage):
        custom = True

        def __init__(self, data, quantizer):
            self.data, self.data_t = data, data.t()
            self.scale = self.scale_t = torch.ones(1)
            self._quantizer, self.dtype, self.original_shape = quantizer, data.dtype, data.shape

        def prepare_for_saving(self):
            tensors, self.data, self.data_t = [self.data, self.data_t], None, None
            return tensors, self

        def restore_from_saved(self, tensors):
            self.data, self.data_t = tensors[:2]
            return tensors[2:]

        def update_usage(self, rowwise_usage=None, columnwise_usage=None):
            pass

    class Doubling(nt.Quantizer):
        custom = True

        def quantize(self, tensor, **_):
            return Storage(2 * tensor.detach(), self)

        def qgemm(self, a, b, params, dtype, sa, sb, bias=None, gemm_type=None, **_):
            calls.append(gemm_type.value)
            y = (a @ b.t() / 4).to(dtype)
            return y if bias is None else y + bias

    layer, x = nt.Linear(8, 16), noise(4, 8).requires_grad_()
    with nt.autocast(recipe=CustomRecipe(qfactory=lambda role: Doubling())):
        y = layer(x)
    y.sum().backward()
    assert calls == ["fprop", "dgrad", "wgrad"] and torch.allclose(y, F.linear(x, layer.weight, layer.bias))
    assert torch.allclose(layer.weight.grad, torch.ones(4, 16).t() @ x)


def test_masters_of_mixed_weights():
    """Identity weights take a shard as it is; hybrid ones of Float8 and Identity take it in both halves."""
    from nib.torch.utils import quantize_master_weights, replace_raw_data
    master = noise(16, 32)
    plain = nt.IdentityQuantizer()(torch.zeros(16, 32, dtype=torch.bfloat16))
    quantize_master_weights([plain], [master.view(-1)[256:]], [256], None)
    nt.post_all_gather_processing([plain])
    assert not plain.dequantize()[:8].any() and torch.equal(plain.dequantize()[8:], master[8:].bfloat16())
    memory = torch.empty(16, 32, dtype=torch.bfloat16)
    replace_raw_data(plain, memory)
    assert plain._hp_data is memory and torch.equal(memory[8:], master[8:].bfloat16())
    float8 = nt.Float8CurrentScalingQuantizer(nt.DType.kFloat8E4M3)
    both = nt.HybridQuantizer(rowwise_quantizer=float8, columnwise_quantizer=nt.IdentityQuantizer())
    mixed = both(torch.zeros(16, 32))
    quantize_master_weights([mixed], [master.view(-1)], [0], None)
    want = nt.Float8CurrentScalingQuantizer(nt.DType.kFloat8E4M3)(master)
    assert torch.equal(mixed.rowwise_sub_storage.dequantize(), want.dequantize())
    assert torch.equal(mixed.columnwise_sub_storage.dequantize(), master)
    turned = nt.HybridQuantizer(rowwise_quantizer=nt.IdentityQuantizer(), columnwise_quantizer=float8.copy())
    mixed = turned(torch.ones(16, 32))  # whose codes are there as the transpose alone
    assert mixed.columnwise_sub_storage._data is None
    quantize_master_weights([mixed], [master.view(-1)], [0], None)
    nt.post_all_gather_processing([mixed])
    assert torch.equal(mixed.columnwise_sub_storage.dequantize(), want.dequantize())
    assert torch.equal(mixed.columnwise_sub_storage._transpose, want._data.t())
    blocks = nt.HybridQuantizer(rowwise_quantizer=nt.NVFP4Quantizer(), columnwise_quantizer=nt.IdentityQuantizer())
    with pytest.raises(NotImplementedError, match="HybridQuantizer"):
        quantize_master_weights([blocks(master)], [master.view(-1)], [0], None)


def test_groups_are_quantized_alike():
    made = iter([nt.IdentityQuantizer(), nt.IdentityQuantizer(), nt.IdentityQuantizer()] +
                [nt.MXFP8Quantizer() for _ in range(9)])
    layer = nt.GroupedLinear(2, 32, 32)
    with pytest.raises(ValueError, match="mix Identity"), \
            nt.autocast(recipe=CustomRecipe(qfactory=lambda role: next(made))):
        layer(noise(64, 32), [32, 32])
