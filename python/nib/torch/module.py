# SPDX-License-Identifier: Apache-2.0
"""autocast, and a Linear that trains in the recipe of the autocast around it.

Per layer and step, input X, weight W and gradient G are quantized once each. Which usage serves which product:

    forward          Y  = X  W^T    rowwise X,     rowwise W
    input gradient   dX = G  W      rowwise G,     columnwise W
    weight gradient  dW = G^T X     columnwise G,  columnwise X

Products are those of the dequantized operands, in FP32; a transformed usage comes back untransformed, which changes
nothing, since both operands of dW go through the same orthogonal transform. nib.torch.utils.gemm_reference multiplies
the codes themselves.
"""
import contextlib
import math
import threading

import torch

from .._library import Usage, lib
from . import _bridge
from .format_tensor import FormatStorage
from .quantized_tensor import QuantizedTensor, prepare_for_saving, restore_from_func_ctx
from .recipe import NVFP4BlockScaling, Recipe

# ---- autocast --------------------------------------------------------------------------------------------


class _State(threading.local):
    recipe = None  # of the innermost autocast that is on
    init_recipe = None  # of the innermost quantized_model_init that is on


_state = _State()


def _set_during(name, value):
    @contextlib.contextmanager
    def during():
        before = getattr(_state, name)
        setattr(_state, name, value)
        try:
            yield
        finally:
            setattr(_state, name, before)
    return during()


def _checked(recipe):
    if recipe is None:
        return NVFP4BlockScaling()
    if not isinstance(recipe, Recipe):
        raise TypeError(f"a recipe is an instance of {Recipe.__module__}.Recipe, not {recipe!r}")
    return recipe


def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
    """Within `with autocast(recipe=...)` layers compute in that recipe (NVFP4BlockScaling unless given); within
    autocast(enabled=False) in high precision. calibrating, amax_reduction_group and _graph concern recipes that keep a
    history, and CUDA: they are accepted and change nothing."""
    return _set_during("recipe", _checked(recipe) if enabled else None)


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    """The older name of autocast."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    """Within it, layers are made with weights that are quantized tensors, and no others."""
    return _set_during("init_recipe", _checked(recipe) if enabled else None)


fp8_model_init = quantized_model_init


def get_recipe():
    """The recipe of the autocast around this line; None without one."""
    return _state.recipe


def is_fp8_enabled():
    """Whether an autocast is on."""
    return _state.recipe is not None


def get_default_recipe():
    return NVFP4BlockScaling()


# ---- Which recipes there are -----------------------------------------------------------------------------

# Everything is done in software: no device is asked.


def is_fp8_available(return_reason=False):
    return (True, "") if return_reason else True


def is_mxfp8_available(return_reason=False):
    return (True, "") if return_reason else True


def is_fp8_block_scaling_available(return_reason=False):
    return (True, "") if return_reason else True


def is_nvfp4_available(return_reason=False):
    return (True, "") if return_reason else True


def is_bf16_available(return_reason=False):
    return (True, "") if return_reason else True


# ---- Linear ----------------------------------------------------------------------------------------------


def values_of(operand, columnwise, device=None):
    """A [M, K] matrix of FP32 values: those of one usage of a quantized operand, or a plain tensor's."""
    if not isinstance(operand, FormatStorage):
        return operand.detach().reshape(-1, operand.shape[-1]).float()
    shape = tuple(operand.shape)
    out = torch.empty(math.prod(shape[:-1]), shape[-1])
    if out.numel():
        with operand._native() as native:
            lib.nib_dequantize(native.handle, Usage.COLUMNWISE if columnwise else Usage.ROWWISE,
                               _bridge.array(out.view(shape)))
    return out if device is None else out.to(device)


def _usages(recipe, role, tensor, rowwise, columnwise):
    """A bare storage with these usages of a matrix."""
    quantizer = recipe.make_quantizer(role, rowwise=rowwise, columnwise=columnwise)
    quantizer.internal = True
    return quantizer.quantize_impl(tensor)


class _Linear(torch.autograd.Function):
    """Y = X W^T + b, and its gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, recipe, dtype, with_gradients):
        override = recipe.backward_override
        wants_input, wants_weight = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.recipe, ctx.device = recipe, x.device
        matrix = x.detach().reshape(-1, x.shape[-1]).to(dtype)
        quantized = override is None
        operand = _usages(recipe, "input", matrix, True, quantized and wants_weight)
        if isinstance(weight, FormatStorage):
            kernel = weight
            if quantized and wants_input:
                kernel.update_usage(rowwise_usage=True, columnwise_usage=True)
        else:
            kernel = _usages(recipe, "weight", weight.detach(), True, quantized and wants_input)
        y = values_of(operand, False, ctx.device) @ values_of(kernel, False, ctx.device).t()
        if bias is not None:
            y += bias.detach().float()
        y = y.to(dtype).view(*x.shape[:-1], weight.shape[0])
        if override == "high_precision":
            saved = (matrix if wants_weight else None, weight if wants_input else None)
        else:
            if quantized:  # the rowwise usages have done their work
                operand.update_usage(rowwise_usage=False)
                if kernel is not weight:
                    kernel.update_usage(rowwise_usage=False)
            saved = (operand if wants_weight else None, kernel if wants_input else None)
        tensors, ctx.tensor_objects = prepare_for_saving(*saved)
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    def backward(ctx, grad):
        operand, kernel = restore_from_func_ctx(ctx)
        columnwise = ctx.recipe.backward_override is None
        matrix = grad.reshape(-1, grad.shape[-1])
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        g = _usages(ctx.recipe, "grad_output", matrix, wants_input, wants_weight) \
            if columnwise and (wants_input or wants_weight) else matrix
        dx = dw = db = None
        if wants_input:
            dx = values_of(g, False, ctx.device) @ values_of(kernel, columnwise, ctx.device)
            dx = dx.to(ctx.input_dtype).view(ctx.input_shape)
        if wants_weight:
            dw = values_of(g, True, ctx.device).t() @ values_of(operand, columnwise, ctx.device)
            dw = dw.to(ctx.weight_dtype)
        if wants_bias:
            db = matrix.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None


# Arguments of TransformerEngine's layers that concern parallel or fused work, and what they are where there is none.
_ALONE = {"sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
          "get_rng_state_tracker": None, "rng_tracker_name": None, "parallel_mode": None, "parameters_split": None,
          "ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": False,
          "ub_bulk_wgrad": False, "ub_name": None, "delay_wgrad_compute": False, "symmetric_ar_type": None,
          "save_original_input": False, "fp8_output": False, "fp8_grad": False}
_WORDLESS = ("get_rng_state_tracker", "rng_tracker_name", "ub_name", "save_original_input")  # change no result


def _check_alone(where, options):
    for name, value in options.items():
        if name not in _ALONE:
            raise TypeError(f"{where} has no argument {name!r}")
        if value != _ALONE[name] and name not in _WORDLESS:
            raise NotImplementedError(f"{where} of nib works alone and fuses nothing: {name}={value!r} is not possible")


class Linear(torch.nn.Module):
    """y = x W^T + b. Within autocast() in its recipe, elsewhere as torch.nn.Linear.

    Activations have the dtype of torch.autocast where that is on, otherwise the parameters'. Weights made within
    quantized_model_init() are quantized tensors. Arguments of TransformerEngine's Linear that concern parallel or fused
    work are accepted with the values that they have where there is none.
    """

    def __init__(self, in_features, out_features, bias=True, *, params_dtype=None, device=None, init_method=None,
                 return_bias=False, name=None, **alone):
        super().__init__()
        _check_alone("Linear", alone)
        self.name = name
        self.in_features, self.out_features, self.return_bias = in_features, out_features, return_bias
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        device = None if device is None else torch.device(device)
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        if init_method is None:
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            init_method(weight)
        if _state.init_recipe is not None:
            weight = _state.init_recipe.make_quantizer("weight")(weight).detach()
        self.weight = torch.nn.Parameter(weight)
        if bias:
            bound = 1 / math.sqrt(in_features) if in_features else 0
            values = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = torch.nn.Parameter(values.uniform_(-bound, bound))
        else:
            self.register_parameter("bias", None)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, inp, is_first_microbatch=None, **alone):
        """is_first_microbatch is accepted: weights are quantized in every call."""
        _check_alone("Linear.forward", alone)
        kind = inp.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        bias = None if self.return_bias else self.bias
        recipe = _state.recipe
        if recipe is None:
            weight = self.weight.dequantize() if isinstance(self.weight, QuantizedTensor) else self.weight
            with torch.autocast(kind, enabled=False):
                y = torch.nn.functional.linear(inp.to(dtype), weight.to(dtype),
                                               None if bias is None else bias.to(dtype))
        else:
            with torch.autocast(kind, enabled=False):
                y = _Linear.apply(inp, self.weight, bias, recipe, dtype, torch.is_grad_enabled())
        return (y, self.bias) if self.return_bias else y
