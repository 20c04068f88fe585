# SPDX-License-Identifier: Apache-2.0
"""Layers within torch.compile: whole graphs, and the bits of the layer outside of one."""
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import nib.torch as nt  # noqa: E402
from nib.torch.module import compiled  # noqa: E402
from nib.torch.quantization import FP8GlobalStateManager, current, get_recipe  # noqa: E402
from nib.torch.recipe import (CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling,  # noqa: E402
                              MXFP8BlockScaling, NVFP4BlockScaling)

NVFP4 = NVFP4BlockScaling(disable_stochastic_rounding=True)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(function, layer, x, compile=None):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = (torch.compile(function, **compile) if compile else function)(x)
    y.backward(noise(*y.shape, seed=9))
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("recipe", [None, NVFP4, MXFP8BlockScaling(), Float8CurrentScaling(), Float8BlockScaling()],
                         ids=["plain", "nvfp4", "mxfp8", "float8", "float8-block"])
def test_linear(recipe):
    """One graph, the autocast within it: the same output and gradients."""
    torch._dynamo.reset()
    layer = nt.Linear(128, 64)

    def run(x):
        with nt.autocast(enabled=recipe is not None, recipe=recipe):
            return layer(x).relu()
    x = noise(2, 16, 128)
    assert equal(results(run, layer, x, dict(backend="aot_eager", fullgraph=True)), results(run, layer, x))


@pytest.mark.parametrize("make", [lambda: nt.LayerNormLinear(64, 64), lambda: nt.LayerNormMLP(64, 64, bias=False),
                                  lambda: nt.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)],
                         ids=["layernorm-linear", "layernorm-mlp", "transformer"])
def test_other_layers(make):
    torch._dynamo.reset()
    layer = make()

    def run(x):
        with nt.autocast(recipe=NVFP4):
            return layer(x)
    x = noise(16, 2, 64)
    assert equal(results(run, layer, x, dict(backend="aot_eager", fullgraph=True)), results(run, layer, x))


def test_graph_follows_the_recipe():
    """Another recipe, or a recipe that now says something else, is another graph; bits are those of the layer."""
    torch._dynamo.reset()
    layer, x, counter = nt.Linear(64, 64), noise(32, 64), torch._dynamo.testing.CompileCounter()
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)

    def run(x, recipe):
        with nt.autocast(recipe=recipe):
            return layer(x)
    fast = torch.compile(run, backend=counter, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(fast(x, recipe), run(x, recipe))
        assert counter.frame_count == 1
        recipe.disable_2d_quantization = True
        recipe.__post_init__()
        assert torch.equal(fast(x, recipe), run(x, recipe)) and counter.frame_count == 2
        assert torch.equal(fast(x, MXFP8BlockScaling()), run(x, MXFP8BlockScaling())) and counter.frame_count == 3


def test_autocast_around_the_graph():
    """What is on when a compiled layer is called counts, and going in and out of it is noticed."""
    torch._dynamo.reset()
    layer, x = nt.Linear(64, 64), noise(32, 64)
    fast = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        for recipe in (NVFP4, None, MXFP8BlockScaling(), None, NVFP4):
            with nt.autocast(enabled=recipe is not None, recipe=recipe):
                assert torch.equal(fast(x), layer(x))


def test_stochastic_rounding():
    """Drawn when the graph runs, not when it is made."""
    torch._dynamo.reset()
    layer, x = nt.Linear(64, 64), noise(32, 64)

    def run(x):
        with nt.autocast():
            return layer(x)
    fast = dict(backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    one, two = results(run, layer, x, fast), results(run, layer, x, fast)
    torch.manual_seed(1)
    assert equal(results(run, layer, x, fast), one) and not torch.equal(one[1], two[1])

    def made_within(x):
        with nt.autocast(recipe=NVFP4BlockScaling()):
            return layer(x)
    with pytest.raises(Exception, match="recipes outside"):
        torch.compile(made_within, **fast)(x)


def test_what_stays_outside():
    """What a graph cannot carry is computed between two: quantized weights, kept weights, functions. Delayed scaling,
    whose histories are updated where the autocast ends, says no."""
    torch._dynamo.reset()
    x = noise(32, 64)
    with nt.quantized_model_init(recipe=NVFP4):
        quantized = nt.Linear(64, 64)
    custom = CustomRecipe(qfactory=lambda role: nt.MXFP8Quantizer())
    for layer, recipe, keywords in ((quantized, NVFP4, {}), (nt.Linear(64, 64), NVFP4, dict(is_first_microbatch=True)),
                                    (nt.Linear(64, 64), custom, {})):
        def run(x):
            with nt.autocast(recipe=recipe):
                return layer(x, **keywords) * 2
        assert equal(results(run, layer, x, dict(backend="eager")), results(run, layer, x))

    def delayed(x):
        with nt.autocast(recipe=DelayedScaling()):
            return quantized(x)
    with pytest.raises(Exception, match="DelayedScaling"):
        torch.compile(delayed, backend="eager", fullgraph=True)(x)


def test_beside_delayed_scaling():
    """Where a layer has histories, a function whose graph breaks within an autocast leaves it all the same, and what is
    due then, scales from the histories, is done before they are used again."""
    with nt.quantized_model_init(recipe=NVFP4):
        quantized = nt.Linear(64, 64)

    def other(x):
        with nt.autocast(recipe=NVFP4):
            return quantized(x) * 2

    def outputs(function):
        torch._dynamo.reset()
        FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        layer, found = nt.Linear(64, 64), []
        for step in range(3):
            with nt.autocast(recipe=DelayedScaling()):
                found.append(layer(noise(32, 64, seed=step) * 4 ** step).detach())
            found.append(function(noise(32, 64, seed=9)).detach())
            assert current().autocast_depth == 0 and get_recipe() is None
        FP8GlobalStateManager.reset()
        return found
    assert equal(outputs(torch.compile(other, backend="eager")), outputs(other))


@pytest.mark.parametrize("recipe", [NVFP4, Float8CurrentScaling()], ids=["nvfp4", "float8"])
def test_operators(recipe):
    """The fake kernels describe what the operators give."""
    x, w, g = noise(32, 64), noise(48, 64, seed=1), noise(32, 48, seed=2)
    text = recipe.frozen()
    for keep in ((True, True), (True, False), (False, True), (False, False)):
        torch.library.opcheck(torch.ops.nib.linear.default, (x, w, None, text, *keep),
                              test_utils=("test_schema", "test_faketensor"))
    buffers = compiled.linear_forward(x, w, None, text, True, True)[1:]
    torch.library.opcheck(torch.ops.nib.linear_backward.default, (g, buffers, text, [32, 64, 48, 64], w, True, True),
                          test_utils=("test_schema", "test_faketensor"))
