# SPDX-License-Identifier: Apache-2.0
"""Linear, and the function behind all layers that multiply by a weight.

Per layer and step, input X, weight W and gradient G are quantized once each. Which usage serves which product:

    forward          Y  = X  W^T    rowwise X,     rowwise W
    input gradient   dX = G  W      rowwise G,     columnwise W
    weight gradient  dW = G^T X     columnwise G,  columnwise X
"""
import dataclasses
from typing import Any, Optional

import torch

from .. import quantization
from ..format_tensor import FormatStorage
from ..hybrid_tensor import HybridQuantizedTensorStorage
from ..identity_tensor import IdentityTensorStorage
from ..products import multiply
from ..quantization import FP8GlobalStateManager
from ..quantized_tensor import (QuantizedTensor, QuantizedTensorStorage, eager, prepare_for_saving,
                                restore_from_saved)
from .base import (TransformerEngineBaseModule, WeightGradStore, activation_dtype, check_alone, get_dummy_wgrad,
                   init_method_constant, without_autocast)
from .compiled import TracedLinear


def bare(storage):
    """A storage of its own over the same buffers, no torch.Tensor: to be saved, which takes it apart."""
    if isinstance(storage, HybridQuantizedTensorStorage):
        row, col = storage._each(bare)
        return HybridQuantizedTensorStorage(rowwise_storage=row, columnwise_storage=col, quantizer=storage._quantizer,
                                            fake_dtype=storage._dtype)
    if not isinstance(storage, torch.Tensor):
        other = object.__new__(type(storage))
        other.__dict__.update(vars(storage))
        return other
    if isinstance(storage, IdentityTensorStorage):
        return IdentityTensorStorage(**storage.get_metadata())
    if isinstance(storage, FormatStorage):
        other = storage.storage_class(**storage.get_metadata(), shape=storage.shape)
        if hasattr(storage, "_transpose_invalid"):
            other._transpose_invalid = storage._transpose_invalid
        return other
    return storage


@dataclasses.dataclass
class Product:
    """What a product of a layer is told besides its tensors. Quantizers are None where nothing is quantized."""
    dtype: torch.dtype
    input_quantizer: Any = None
    weight_quantizer: Any = None
    grad_output_quantizer: Any = None
    grad_input_quantizer: Any = None  # where the input gradient is to be quantized
    override: Optional[str] = None  # the recipe's backward_override
    with_gradients: bool = True
    workspace: Any = None  # the quantized weight of an earlier microbatch
    update_workspace: bool = True
    keep: Any = None  # a function that takes a new workspace; None: nothing is kept
    main_grad: Any = None  # of the weight, where its gradient is to be added to that
    accumulate: bool = True
    first: bool = False  # the first layer of an autocast: its backward pass is the last
    store: Any = None  # a WeightGradStore, where the weight gradient waits
    assign: Any = None  # what takes a gradient that has waited


def _quantized_weight(weight, product, wants_input):
    """The weight as the products take it."""
    quantizer, columnwise = product.weight_quantizer, product.override is None and wants_input
    if isinstance(weight, QuantizedTensorStorage):
        weight.update_usage(rowwise_usage=True, columnwise_usage=True if columnwise else None)
        return weight
    if quantizer is None:
        return weight.detach().to(product.dtype)
    kept = product.workspace
    if kept is not None and not (kept.get_usages()["rowwise"] and kept.get_usages()["columnwise"] >= columnwise):
        kept = None
    if kept is not None:
        if product.update_workspace:
            with torch.no_grad():
                quantizer.update_quantized(weight.detach(), kept)
        return kept
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    quantizer.internal = product.keep is None
    with torch.no_grad():
        made = quantizer.quantize(weight.detach())
    if product.keep is not None:
        product.keep(made)
    return made


def _restored(ctx):
    """What forward saved, again and again: into copies, so that a graph that is retained keeps its own."""
    objects = [None if saved is None else bare(saved) for saved in ctx.tensor_objects]
    return restore_from_saved(objects, ctx.saved_tensors)


class _Linear(torch.autograd.Function):
    """Y = X W^T + b, and its gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, product):
        quantized = product.override is None
        wants_input, wants_weight = (product.with_gradients and needed for needed in ctx.needs_input_grad[:2])
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.product, ctx.device, ctx.random = product, x.device, None
        if isinstance(x, QuantizedTensorStorage):
            x = x.dequantize(dtype=product.dtype)
        matrix = x.detach().reshape(-1, x.shape[-1]).to(product.dtype)
        operand = matrix
        if product.input_quantizer is not None:
            product.input_quantizer.set_usage(rowwise=True, columnwise=quantized and wants_weight)
            product.input_quantizer.internal = True
            operand = product.input_quantizer.quantize(matrix)
        kernel = _quantized_weight(weight, product, wants_input)
        y = multiply(operand, kernel, bias=bias, device=ctx.device, dtype=product.dtype)
        y = torch.ops.aten._unsafe_view(y, (*ctx.input_shape[:-1], weight.shape[0]))  # no view, to hooks
        if product.override == "high_precision":
            saved = [matrix, weight]
        else:
            saved = [operand, kernel]
        saved = [saved[0] if wants_weight else None, saved[1] if wants_input else None]
        for i, storage in enumerate(saved):
            if isinstance(storage, QuantizedTensorStorage):
                saved[i] = bare(storage)
                if quantized:  # the rowwise usages have done their work
                    saved[i].update_usage(rowwise_usage=False, columnwise_usage=True)
        tensors, ctx.tensor_objects = prepare_for_saving(*saved)
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    def backward(ctx, grad):
        product = ctx.product
        operand, kernel = _restored(ctx)
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if isinstance(grad, QuantizedTensorStorage):
            grad = grad.dequantize(dtype=product.dtype)
        matrix = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        g = matrix.to(product.dtype)
        if product.override is not None:
            operand, kernel = (saved.dequantize(dtype=product.dtype) if isinstance(saved, QuantizedTensorStorage)
                               else saved if saved is None else saved.to(product.dtype) for saved in (operand, kernel))
        elif product.grad_output_quantizer is not None and (wants_input or wants_weight):
            product.grad_output_quantizer.set_usage(rowwise=wants_input, columnwise=wants_weight)
            product.grad_output_quantizer.internal = True
            g = _same_draws(ctx, product.grad_output_quantizer, matrix)
        if wants_input:
            dx = multiply(g, kernel, b_columnwise=True, device=ctx.device, dtype=ctx.input_dtype).view(ctx.input_shape)
            if product.grad_input_quantizer is not None:
                product.grad_input_quantizer.internal = False
                dx = product.grad_input_quantizer(dx)
        if wants_weight:
            dw = _weight_gradient(ctx, product, g, operand)
        if wants_bias:
            db = matrix.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if product.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, dw, db, None


def _same_draws(ctx, quantizer, matrix):
    """The gradient quantized. A second pass over a graph that was retained draws the same random numbers."""
    if not getattr(quantizer, "stochastic_rounding", True):
        return quantizer.quantize(matrix)
    if ctx.random is None:
        ctx.random = torch.get_rng_state()
        return quantizer.quantize(matrix)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(ctx.random)
        return quantizer.quantize(matrix)


def _weight_gradient(ctx, product, g, operand):
    def compute():
        fused = product.main_grad
        with torch.no_grad():
            dw = multiply(g, operand, a_columnwise=True, b_columnwise=True, device=ctx.device, out=fused,
                          dtype=ctx.weight_dtype, accumulate=product.accumulate and fused is not None)
        return dw if fused is None else None

    if product.store is None:
        return compute() if product.main_grad is None else product.assign(compute())

    def later():
        product.assign(compute())

    product.store.put(later)
    return None


def linear(x, weight, bias, product):
    """Y = X W^T + b by a Product."""
    with without_autocast(x):
        if product.input_quantizer is None and product.main_grad is None and product.store is None \
                and product.grad_input_quantizer is None:
            weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            x = x.dequantize() if isinstance(x, QuantizedTensor) else x
            return torch.nn.functional.linear(x.to(product.dtype), weight.to(product.dtype),
                                              None if bias is None else bias.to(product.dtype))
        return _Linear.apply(x, weight, bias, product)


def traced_linear(x, weight, bias, recipe, dtype):
    """The same within a graph of torch.compile."""
    gradients = torch.is_grad_enabled()
    matrix = x.reshape(-1, x.shape[-1]).to(dtype)
    y = TracedLinear.apply(matrix, weight, bias, recipe.frozen(recipe.said()), gradients and weight.requires_grad,
                           gradients and x.requires_grad)
    return y.view(*x.shape[:-1], weight.shape[0])


class LinearLayer(TransformerEngineBaseModule):
    """A layer that multiplies by weights: how a Product of it comes to be."""

    def in_graph(self, recipe, weights, is_first_microbatch):
        """Whether torch.compile is tracing, and a graph can carry what this layer computes; without a recipe it can."""
        if not torch.compiler.is_compiling():
            return False
        if self.fuse_wgrad_accumulation or self.wgrad_store.delay_wgrad_compute() \
                or any(isinstance(weight, QuantizedTensorStorage) for weight in weights):
            return False
        return recipe is None or (recipe.in_graph() and is_first_microbatch is None)

    def multiply_in_graph(self, x, weight, bias, recipe, dtype):
        if recipe is None:
            return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return traced_linear(x, weight, bias, recipe, dtype)

    def is_first(self, needs_gradient):
        """Whether this is the first layer of an autocast in which a gradient is wanted."""
        if not (self.fp8 and needs_gradient):
            return False
        before = quantization.current().is_first_fp8_module
        first = FP8GlobalStateManager.is_first_fp8_module()
        if quantization.in_fp8_activation_recompute_phase():
            quantization.current().is_first_fp8_module = before
        return first

    def product(self, index, name, weight, dtype, is_first_microbatch, *, first=False, fp8_grad=False):
        """The Product of the index-th weight of this layer."""
        product = Product(dtype=dtype, with_gradients=torch.is_grad_enabled(), first=first)
        if self.fp8:
            forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
            product.input_quantizer, product.weight_quantizer = forward[3 * index], forward[3 * index + 1]
            product.grad_output_quantizer = backward[2 * index]
            product.grad_input_quantizer = backward[2 * index + 1] if fp8_grad else None
            product.override = self.fp8_meta["recipe"].backward_override
            self._use_workspace(product, name, is_first_microbatch)
        elif self.fp8_calibration:
            for slot, tensor in ((3 * index + 1, weight),):
                self.quantizers["scaling_fwd"][slot].calibrate(tensor.detach())
        if weight.requires_grad and product.with_gradients:
            self._use_main_grad(product, weight, is_first_microbatch)
        return product

    def _use_workspace(self, product, name, is_first_microbatch):
        skip = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() \
            if FP8GlobalStateManager.fp8_graph_capturing() else None
        if skip is not None:
            is_first_microbatch = not float(skip)
        if is_first_microbatch is None:
            return
        product.workspace = self._fp8_workspaces.get(name)
        product.update_workspace = bool(is_first_microbatch)

        def keep(workspace):
            self._fp8_workspaces[name] = workspace.detach() if isinstance(workspace, torch.Tensor) else workspace
        product.keep = keep

    def _use_main_grad(self, product, weight, is_first_microbatch):
        if self.wgrad_store.delay_wgrad_compute():
            product.store = self.wgrad_store
        if self.fuse_wgrad_accumulation:
            if not hasattr(weight, "main_grad"):
                raise RuntimeError("fuse_wgrad_accumulation adds to the main_grad of a weight, which has none")
            product.main_grad = weight.get_main_grad() if hasattr(weight, "get_main_grad") else weight.main_grad
            product.accumulate = not is_first_microbatch if is_first_microbatch is not None else True
            if getattr(weight, "overwrite_main_grad", False):
                product.accumulate = False

        def assign(gradient):
            """Where a gradient goes that does not go to autograd, and what autograd gets."""
            if not self.fuse_wgrad_accumulation:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
                return None
            if not hasattr(weight, "grad_added_to_main_grad"):
                return None
            weight.grad_added_to_main_grad = True
            return get_dummy_wgrad(weight.main_grad.shape, weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))
        product.assign = assign

    def calibrate(self, index, x):
        """Take note of an input without quantizing it."""
        if self.fp8_calibration and not self.fp8:
            self.quantizers["scaling_fwd"][3 * index].calibrate(x.detach())

    def quantize_output(self, index, y):
        """The output in the format of whoever takes it."""
        if not self.fp8:
            return y
        quantizer = self.quantizers["scaling_fwd"][3 * index + 2]
        quantizer.internal = False
        return quantizer(y)


def split_names(parameters_split, out_features):
    """{weight's name: (bias's name, rows)} of a weight that is one parameter or several."""
    if parameters_split is None:
        return {"weight": ("bias", out_features)}
    if not parameters_split:
        raise ValueError("Cannot split weight buffer into 0 parameters")
    if not isinstance(parameters_split, dict):
        if not all(isinstance(name, str) for name in parameters_split):
            raise TypeError("parameters_split has names, or names and sizes")
        parameters_split = dict.fromkeys(parameters_split, out_features // len(parameters_split))
    if sum(parameters_split.values()) != out_features:
        raise ValueError(f"parameters_split has {sum(parameters_split.values())} rows, the weight {out_features}")
    return {f"{name.rstrip('_')}_weight": (f"{name.rstrip('_')}_bias", rows)
            for name, rows in parameters_split.items()}


class Linear(LinearLayer):
    """y = x W^T + b. Within autocast() in its recipe, elsewhere as torch.nn.Linear.

    Activations have the dtype of torch.autocast where that is on, otherwise the parameters'. Weights made within
    quantized_model_init() are quantized tensors. Arguments of TransformerEngine's Linear that concern parallel or fused
    work are accepted with the values that they have where there is none. Beyond the third, arguments go by name.
    """

    def __init__(self, in_features, out_features, bias=True, *, fuse_wgrad_accumulation=False,
                 get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, return_bias=False,
                 params_dtype=None, parameters_split=None, device=None, delay_wgrad_compute=False, name=None, **alone):
        super().__init__(name)
        check_alone("Linear", alone)
        self.in_features, self.out_features, self.return_bias = in_features, out_features, return_bias
        self.use_bias, self.fuse_wgrad_accumulation = bias, fuse_wgrad_accumulation
        self.apply_bias = bias and not return_bias
        self.rng_tracker_name, self.parallel_mode = rng_tracker_name, alone.get("parallel_mode")
        self.save_original_input = alone.get("save_original_input", False)  # a wish about memory; bits are the same
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self._make_weights(out_features, in_features, parameters_split, bias, params_dtype, device, init_method,
                           get_rng_state_tracker)
        self.initialize(device)

    def _make_weights(self, rows, cols, parameters_split, bias, params_dtype, device, init_method, tracker):
        names = split_names(parameters_split, rows)
        if len(names) > 1 and self.primary_weights_in_fp8:
            raise RuntimeError("Splitting QuantizedTensor into multiple params is not supported")
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.weight_names, self.bias_names = list(names), [one for one, _rows in names.values()]
        for name, (_bias, count) in names.items():
            self.new_parameter(name, (count, cols), dtype, device, init_fn=init_method, get_rng_state_tracker=tracker,
                               fp8_meta_index=1)
        for name, count in names.values():
            if bias:
                self.new_parameter(name, (count,), dtype, device, init_fn=init_method_constant(0.0))
            else:
                self.register_parameter(name, None)

    def get_quantizer_roles(self, *, fwd, num_quantizers):
        return self.linear_roles([self.name], fwd, num_quantizers)

    def _whole(self, names):
        """The parameters of these names as one."""
        found = [getattr(self, name) for name in names]
        return found[0] if len(found) == 1 else torch.cat(found)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False, **alone):
        """is_first_microbatch: True quantizes the weight and keeps it, False takes what was kept, None does neither."""
        check_alone("Linear.forward", alone)
        weight, bias = self._whole(self.weight_names), self._whole(self.bias_names) if self.use_bias else None
        dtype = activation_dtype(inp, weight)
        if torch.compiler.is_compiling():
            recipe = quantization.get_recipe()
            if self.in_graph(recipe, [weight], is_first_microbatch) and not (fp8_output or fp8_grad):
                y = self.multiply_in_graph(inp, weight, bias if self.apply_bias else None, recipe, dtype)
                return (y, None if bias is None else bias.to(dtype)) if self.return_bias else y
        return self._forward(inp, weight, bias, dtype, is_first_microbatch, fp8_output, fp8_grad)

    @eager
    def _forward(self, inp, weight, bias, dtype, is_first_microbatch, fp8_output, fp8_grad):
        with self.prepare_forward(inp):
            self.calibrate(0, inp)
            needs = torch.is_grad_enabled() and (inp.requires_grad or weight.requires_grad)
            product = self.product(0, "weight", weight, dtype, is_first_microbatch, first=self.is_first(needs),
                                   fp8_grad=fp8_grad)
            y = linear(inp, weight, bias if self.apply_bias else None, product)
            if fp8_output:
                y = self.quantize_output(0, y)
        return (y, bias.to(dtype) if bias is not None else None) if self.return_bias else y

