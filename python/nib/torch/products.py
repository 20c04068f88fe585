# SPDX-License-Identifier: Apache-2.0
"""Products of quantized and plain matrices: the one place where layers multiply.

multiply(a, b) is A B^T over the usages that it is told: a rowwise usage is the [M, K] matrix, a columnwise one its
transpose, [K, M]. Two plain matrices are multiplied by PyTorch in their own dtype. Two operands of a custom quantizer
go to its qgemm. All else is the product of the dequantized values in FP32; a transformed usage comes back
untransformed, which changes nothing, since both operands of a weight gradient go through the same orthogonal transform.
Where NIB_TORCH_GEMM=codes is in the environment when this is imported, two NVFP4 operands are multiplied by their codes
instead: nib_gemm, with the bits of TransformerEngine's reference.
"""
import ctypes
import dataclasses
import enum
import math
import os

import torch

from .._library import GemmOptions, Operand, Usage, lib
from . import _bridge
from .format_tensor import FormatStorage
from .hybrid_tensor import HybridQuantizedTensorStorage
from .nvfp4_tensor import NVFP4TensorStorage
from .quantized_tensor import QuantizedTensorStorage

by_codes = os.environ.get("NIB_TORCH_GEMM") == "codes"


def values_of(operand, columnwise, device=None):
    """A [M, K] matrix of FP32 values: those of one usage of a quantized operand, or a plain tensor's."""
    operand = unwrap(operand, columnwise)
    if not isinstance(operand, FormatStorage):
        return operand.detach().reshape(-1, operand.shape[-1]).float()
    if any(part is not None and _bridge.is_fake(part) for part in operand._parts()):
        return operand.dequantize(torch.float32).reshape(-1, operand.shape[-1])
    shape = tuple(operand.shape)
    out = torch.empty(math.prod(shape[:-1]), shape[-1])
    if out.numel():
        with operand._native() as native:
            lib.nib_dequantize(native.handle, Usage.COLUMNWISE if columnwise else Usage.ROWWISE,
                               _bridge.array(out.view(shape)))
    return out if device is None else out.to(device)


def unwrap(operand, columnwise):
    """What a product takes for one usage of an operand: a plain tensor, a storage of the library's formats, or one of a
    custom quantizer."""
    if isinstance(operand, HybridQuantizedTensorStorage):
        name = "columnwise" if columnwise else "rowwise"
        operand = getattr(operand, f"_{name}_storage")
        if operand is None:
            raise RuntimeError(f"a product needs the {name} usage of a hybrid tensor, which was not made or is dropped")
        return unwrap(operand, columnwise)
    if not isinstance(operand, QuantizedTensorStorage) or isinstance(operand, FormatStorage) or is_custom(operand):
        return operand
    return operand.dequantize()


def is_custom(x=None):
    """Whether a quantizer or a tensor brings its own products."""
    return bool(getattr(x, "custom", False))


def is_plain(operand):
    return isinstance(operand, torch.Tensor) and not isinstance(operand, QuantizedTensorStorage)


def multiply(a, b, *, a_columnwise=False, b_columnwise=False, bias=None, device=None, wide=False, dtype=None):
    """A B^T, and a bias to each row: in their own dtype for plain operands (but FP32 where `wide`), in FP32 for
    others. A custom quantizer is asked for `dtype`, or that of its operand."""
    a, b = unwrap(a, a_columnwise), unwrap(b, b_columnwise)
    if is_custom(a) and is_custom(b):
        return _custom(a, b, a_columnwise, b_columnwise, bias, torch.float32 if wide else dtype or a.dtype)
    if is_plain(a) and is_plain(b) and a.dtype == b.dtype and not wide:
        a, b = (m.reshape(-1, m.shape[-1]) for m in (a, b))
        a, b = a.t() if a_columnwise else a, b.t() if b_columnwise else b
        return torch.nn.functional.linear(a, b, None if bias is None else bias.to(a.dtype))
    if by_codes and _have_codes(a, b, a_columnwise, b_columnwise):
        return _of_codes(a, b, a_columnwise, b_columnwise, bias)
    a, b = values_of(a, a_columnwise, device), values_of(b, b_columnwise, device)
    y = (a.t() if a_columnwise else a) @ (b if b_columnwise else b.t())
    if bias is not None:
        y += bias.detach().float()
    return y


def _have_codes(a, b, a_columnwise, b_columnwise):
    """Whether nib_gemm multiplies two operands by their codes: NVFP4, and both transformed or neither."""
    if not (isinstance(a, NVFP4TensorStorage) and isinstance(b, NVFP4TensorStorage)):
        return False
    turned = [bool(columnwise and operand._get_quantizer().with_rht)
              for operand, columnwise in ((a, a_columnwise), (b, b_columnwise))]
    return turned[0] == turned[1] and all(math.prod(operand.shape) for operand in (a, b))


def _of_codes(a, b, a_columnwise, b_columnwise, bias):
    def lines(operand, columnwise):
        return operand.shape[-1] if columnwise else math.prod(operand.shape[:-1])

    y = torch.empty(lines(a, a_columnwise), lines(b, b_columnwise))
    options = GemmOptions(alpha=1.0)
    if bias is not None:
        bias = _bridge.host(bias.detach()).contiguous()
        kept = _bridge.array(bias)
        options.bias = ctypes.pointer(kept)
    with a._native() as left, b._native() as right:
        lib.nib_gemm(Operand(left.handle, None, int(a_columnwise)), Operand(right.handle, None, int(b_columnwise)),
                     options, _bridge.array(y))
    return y


# ---- Quantizers that bring their own products ---------------------------------------------------------------


@enum.unique
class GEMMType(enum.Enum):
    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclasses.dataclass(frozen=True)
class MMParams:
    """What a custom product is told besides its operands."""
    out_dtype: torch.dtype = None
    use_split_accumulator: bool = True


_KINDS = {(False, False): GEMMType.FPROP, (False, True): GEMMType.DGRAD, (True, True): GEMMType.WGRAD}


def _custom(a, b, a_columnwise, b_columnwise, bias, dtype):
    """qgemm of the first operand's quantizer: rowwise usages are (data, scale), columnwise ones (data_t, scale_t)."""
    def usage(operand, columnwise):
        found = (operand.data_t, operand.scale_t) if columnwise else (operand.data, operand.scale)
        if any(tensor is None for tensor in found):
            raise ValueError(f"a product needs the {'column' if columnwise else 'row'}wise data and scale of a custom "
                             "tensor, which are not there")
        return found

    quantizer = a._quantizer if a._quantizer is not None else b._quantizer
    if quantizer is None:
        raise ValueError("neither operand of a custom product has a quantizer")
    (qa, sa), (qb, sb) = usage(a, a_columnwise), usage(b, b_columnwise)
    kind = _KINDS[bool(a_columnwise), bool(b_columnwise)]
    y = quantizer.qgemm(qa, qb, MMParams(out_dtype=dtype), dtype, sa, sb, bias, gemm_type=kind, qresult_x=a,
                        qresult_w=b)
    return y.reshape(-1, y.shape[-1])
