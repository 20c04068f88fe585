# SPDX-License-Identifier: Apache-2.0
"""Layers within torch.compile: a quantized product and its gradients as one operator each, with fake kernels, so that a
graph has no break in a layer.

Quantizers travel as text in the graph. What a graph cannot carry, a layer computes outside of it: recipes that keep
something or ask a function, weights that are quantized or kept between microbatches, gradients that go elsewhere.
"""
import functools
import pickle
from typing import List, Optional

import torch
from torch import Tensor

from ..products import multiply


@functools.lru_cache(maxsize=256)
def _thaw(text):
    return pickle.loads(bytes.fromhex(text))


def _quantizer(text, **usage):
    """The quantizer of a text, with these usages."""
    quantizer = _thaw(text).copy()
    quantizer.set_usage(**usage)
    quantizer.internal = True
    return quantizer


def freeze(recipe):
    """The input, weight and grad_output quantizers of a recipe as text."""
    return " ".join(pickle.dumps(recipe.make_quantizer(role)).hex() for role in ("input", "weight", "grad_output"))


def _columnwise(quantizer, tensor):
    """(a storage of both usages, the buffers of the columnwise one)."""
    storage = quantizer.quantize_impl(tensor)
    if not quantizer.columnwise_usage:
        return storage, []
    return storage, [t.clone() if t is tensor else t for t in _buffers(storage, quantizer)]


def _names(quantizer, shape):
    """Names of the buffers of the columnwise usage, in the order in which they are saved, and their specs."""
    alone = quantizer.copy()
    alone.set_usage(rowwise=False, columnwise=True)
    specs = alone.inner_tensor_specs(shape)
    return [(name, specs[name]) for name in quantizer.tensor_class.storage_class.SAVED if name in specs]


def _buffers(storage, quantizer):
    return [getattr(storage, name) for name, _spec in _names(quantizer, tuple(storage.shape))]


def _rebuild(text, shape, dtype, buffers):
    """A storage of the columnwise usage over its buffers."""
    quantizer = _quantizer(text, rowwise=False, columnwise=True)
    parts = [None] * 6
    fields = {field.name: field.part for field in quantizer.tensor_class.storage_class.FIELDS}
    for (name, _spec), buffer in zip(_names(quantizer, shape), buffers):
        parts[fields[name]] = buffer
    return quantizer._wrap(shape, dtype, parts)


@torch.library.custom_op("nib::linear", mutates_args=())
def linear_forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], text: str, keep_x: bool,
                   keep_w: bool) -> List[Tensor]:
    """[x W^T + b, the columnwise usages that the gradients need]."""
    texts = text.split()
    with torch.no_grad():
        qx, kept_x = _columnwise(_quantizer(texts[0], rowwise=True, columnwise=keep_x), x)
        qw, kept_w = _columnwise(_quantizer(texts[1], rowwise=True, columnwise=keep_w), weight)
        y = multiply(qx, qw, bias=bias, device=x.device, dtype=x.dtype)
    return [y, *kept_x, *kept_w]


@linear_forward.register_fake
def _(x, weight, bias, text, keep_x, keep_w):
    texts = text.split()

    def specs(text, tensor):
        shape = tuple(int(n) for n in tensor.shape)
        return [torch.empty(size, dtype=dtype, device=x.device) for _, (size, dtype) in _names(_thaw(text), shape)]
    return [x.new_empty(x.shape[0], weight.shape[0]), *(specs(texts[0], x) if keep_x else []),
            *(specs(texts[1], weight) if keep_w else [])]


@torch.library.custom_op("nib::linear_backward", mutates_args=())
def linear_backward(grad: Tensor, buffers: List[Tensor], text: str, shapes: List[int], weight_like: Tensor,
                    keep_x: bool, keep_w: bool) -> List[Tensor]:
    """[dx, dw], those that are wanted; shapes are rows and columns of x and of the weight."""
    x_shape, w_shape, texts = tuple(shapes[:2]), tuple(shapes[2:]), text.split()
    with torch.no_grad():
        g = _quantizer(texts[2], rowwise=keep_w, columnwise=keep_x).quantize_impl(grad)
        at = len(_names(_thaw(texts[0]), x_shape)) if keep_x else 0
        results = []
        if keep_w:
            kernel = _rebuild(texts[1], w_shape, weight_like.dtype, buffers[at:])
            results.append(multiply(g, kernel, b_columnwise=True, device=grad.device, dtype=grad.dtype))
        if keep_x:
            operand = _rebuild(texts[0], x_shape, grad.dtype, buffers[:at])
            results.append(multiply(g, operand, a_columnwise=True, b_columnwise=True, device=grad.device,
                                    dtype=weight_like.dtype))
    return results


@linear_backward.register_fake
def _(grad, buffers, text, shapes, weight_like, keep_x, keep_w):
    return [*([grad.new_empty(shapes[0], shapes[1])] if keep_w else []),
            *([torch.empty(shapes[2], shapes[3], dtype=weight_like.dtype, device=grad.device)] if keep_x else [])]


class TracedLinear(torch.autograd.Function):
    """What _Linear is outside of a graph. keep_x: the weight wants a gradient; keep_w: the input does."""

    @staticmethod
    def forward(ctx, x, weight, bias, text, keep_x, keep_w):
        y, *buffers = torch.ops.nib.linear(x, weight, bias, text, keep_x, keep_w)
        ctx.save_for_backward(weight, *buffers)
        ctx.text, ctx.keep_x, ctx.keep_w = text, keep_x, keep_w
        ctx.shapes = [x.shape[0], x.shape[1], weight.shape[0], weight.shape[1]]
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, grad):
        weight, *buffers = ctx.saved_tensors
        results = torch.ops.nib.linear_backward(grad, buffers, ctx.text, ctx.shapes, weight, ctx.keep_x, ctx.keep_w) \
            if ctx.keep_x or ctx.keep_w else []
        dx = results[0] if ctx.keep_w else None
        dw = results[-1] if ctx.keep_x else None
        db = None if ctx.bias_dtype is None else grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None
