# SPDX-License-Identifier: Apache-2.0
"""Products on a GPU without FP4 units: BF16 values of the codes, multiplied by torch.

A code times its block scale has six bits, so that BF16 holds it exactly. What is left, the tensor scales, are factors
of the whole product (of its rows and columns, where they are row-scaled): it is what NVFP4 computes, but for the order
in which torch's kernels add up in FP32. A transformed usage is taken as it is: whoever calls sees to it that both are.
"""
import functools
import math

import torch

from .. import _library
from .._library import TensorScaleRule, Usage, lib
from . import _bridge
from .nvfp4_tensor import NVFP4TensorStorage
from .quantized_tensor import QuantizedTensorStorage

_ones = {}  # by device and stream


def _one_like(data):
    """A tensor scale of 1 beside some data. What a capture makes belongs to its graph, and is not kept."""
    place = _bridge.device_of(data)
    one = _ones.get(place)
    if one is None:
        one = torch.ones(1, dtype=torch.float32, device=data.device)
        if data.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _ones[place] = one
    return one


def _is_exact(operand):
    """Whether BF16 holds an operand without its tensor scale: NVFP4, or plain BF16."""
    if isinstance(operand, NVFP4TensorStorage):
        return not any(part is not None and _bridge.is_fake(part) for part in operand._parts())
    return isinstance(operand, torch.Tensor) and not isinstance(operand, QuantizedTensorStorage) \
        and operand.dtype == torch.bfloat16


def takes(a, b):
    """Whether a product is one of these: of NVFP4 on a GPU, with more of it or with plain BF16."""
    return any(isinstance(operand, NVFP4TensorStorage) and _bridge.on_gpu(operand) for operand in (a, b)) \
        and _is_exact(a) and _is_exact(b)


@functools.lru_cache(maxsize=None)
def _meaning(swizzled):
    """Codes, block scales, and a tensor scale that is a factor of these."""
    struct = _library.new_quantizer()
    struct.columnwise, struct.swizzled, struct.tensor_scale_rule = 0, swizzled, TensorScaleRule.EXACT
    return struct


def _lines(operand, columnwise):
    """(codes times block scales in BF16, of one line each; the amaxes that belong to the lines; what to divide them
    by). A plain matrix is its own, without any."""
    if not isinstance(operand, NVFP4TensorStorage):
        values = operand.detach().reshape(-1, operand.shape[-1])
        return values.t() if columnwise else values, None, 1.0
    parts = operand._parts()
    data, scale, amax = parts[columnwise::2]
    if data is None:
        raise _library.UsageError(f"a product needs the {'column' if columnwise else 'row'}wise usage of an operand, "
                                  "which is not there")
    rows, cols = math.prod(operand.shape[:-1]), operand.shape[-1]
    shape = (cols, rows) if columnwise else (rows, cols)
    values = torch.empty(shape, dtype=torch.bfloat16, device=data.device)
    if values.numel():
        usage = [data, None, scale, None, _one_like(data), None]
        with _bridge.Native(_meaning(bool(operand._with_gemm_swizzled_scales)), torch.bfloat16, shape, usage) as native:
            lib.nib_dequantize(native.handle, Usage.ROWWISE, _bridge.array(values))
    return values, amax, 6.0 * operand._nvfp4_e4m3_max


def _product(a, b):
    """A B^T of BF16 matrices, in FP32."""
    if a.device.type == "cuda" and "dtype" in torch.ops.aten.mm.overloads():  # PyTorch 2.8
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()


def multiply(a, b, a_columnwise, b_columnwise):
    """A B^T in FP32: BF16 products of codes times block scales, then times the tensor scales."""
    left, left_amax, left_full = _lines(a, int(a_columnwise))
    right, right_amax, right_full = _lines(b, int(b_columnwise))
    y = _product(left, right)
    if left_amax is None:
        alpha = right_amax.view(1, -1)
    else:
        alpha = left_amax.view(-1, 1) if right_amax is None else left_amax.view(-1, 1) * right_amax.view(1, -1)
    return y.mul_(alpha / (left_full * right_full))
