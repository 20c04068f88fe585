# SPDX-License-Identifier: Apache-2.0
"""Products of quantized and plain matrices: the one place where layers multiply.

multiply(a, b) is A B^T over the usages that it is told: a rowwise usage is the [M, K] matrix, a columnwise one its
transpose, [K, M]. Two plain matrices are multiplied by PyTorch in their own dtype. Two operands of a custom quantizer
go to its qgemm. All else is nib_gemm, where the operands are: two NVFP4 operands have the bits of TransformerEngine's
reference, an NVFP4 operand and a plain one the product in block fixed point, others that of their values; on a GPU
NVFP4 is multiplied exactly, and added up as tensor cores do. What nib_gemm does not take is the product of the
dequantized values by PyTorch in FP32: a usage that is transformed with one that is not, other formats on a GPU,
operands in two places, and tensors without memory.
"""
import contextlib
import ctypes
import dataclasses
import enum
import math
from typing import Any, Optional

import torch

from .._library import Array, GemmOptions, Operand, Usage, lib
from . import _bridge
from .format_tensor import FormatStorage
from .hybrid_tensor import HybridQuantizedTensorStorage
from .nvfp4_tensor import NVFP4TensorStorage
from .quantized_tensor import QuantizedTensorStorage


@dataclasses.dataclass
class Job:
    """One product of nib_gemm: alpha A B^T, and a bias to each row, into `out`, with beta times what that holds."""
    a: Any
    b: Any
    a_columnwise: bool
    b_columnwise: bool
    out: torch.Tensor
    alpha: float = 1.0
    beta: float = 0.0
    bias: Optional[torch.Tensor] = None


def values_of(operand, columnwise, device=None):
    """A [M, K] matrix of FP32 values: those of one usage of a quantized operand, or a plain tensor's."""
    operand = unwrap(operand, columnwise)
    if not isinstance(operand, FormatStorage):
        return operand.detach().reshape(-1, operand.shape[-1]).float()
    if any(part is not None and _bridge.is_fake(part) for part in operand._parts()):
        return operand.dequantize(torch.float32).reshape(-1, operand.shape[-1])
    shape = tuple(operand.shape)
    out = torch.empty(math.prod(shape[:-1]), shape[-1], device=operand.device if _bridge.on_gpu(operand) else "cpu")
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


def multiply(a, b, *, a_columnwise=False, b_columnwise=False, bias=None, device=None, wide=False, dtype=None, out=None,
             accumulate=False):
    """A B^T, and a bias to each row: plain operands in their own dtype (but FP32 where `wide`), others in `dtype`, or
    FP32. A custom quantizer is asked for `dtype`, or that of its operand. Into `out` where there is one."""
    a, b = unwrap(a, a_columnwise), unwrap(b, b_columnwise)
    wide = wide or out is not None
    if takes(a, b, a_columnwise, b_columnwise) and (out is None or out.device == place_of(a)):
        y = out if out is not None else torch.empty(lines(a, a_columnwise), lines(b, b_columnwise),
                                                    dtype=dtype or torch.float32, device=place_of(a))
        run([Job(a, b, a_columnwise, b_columnwise, y, beta=1.0 if accumulate else 0.0, bias=bias)])
        return y if device is None or out is not None else y.to(device)
    if is_custom(a) and is_custom(b):
        y = _custom(a, b, a_columnwise, b_columnwise, bias, torch.float32 if wide else dtype or a.dtype)
    elif is_plain(a) and is_plain(b) and a.dtype == b.dtype and not wide:
        a, b = (m.reshape(-1, m.shape[-1]) for m in (a, b))
        a, b = a.t() if a_columnwise else a, b.t() if b_columnwise else b
        y = torch.nn.functional.linear(a, b, None if bias is None else bias.to(a.dtype))
    else:
        y = product_of_values(a, b, a_columnwise, b_columnwise, device)
        if bias is not None:
            y += bias.detach().float()
    if out is None:
        return y if dtype is None else y.to(dtype)
    return out.copy_(out.float() + y.view_as(out) if accumulate else y.view_as(out))


def product_of_values(a, b, a_columnwise, b_columnwise, device=None):
    """The product of the dequantized values by PyTorch, in FP32."""
    a, b = values_of(a, a_columnwise, device), values_of(b, b_columnwise, device)
    return (a.t() if a_columnwise else a) @ (b if b_columnwise else b.t())


def place_of(operand):
    """The device where nib_gemm computes with an operand."""
    return operand.device if _bridge.on_gpu(operand) else torch.device("cpu")


def takes(a, b, a_columnwise, b_columnwise):
    """Whether nib_gemm takes two operands: a tensor of the library among them, both transformed alike or neither, both
    in one place; on a GPU NVFP4 alone, or with plain values."""
    formats = [isinstance(operand, FormatStorage) for operand in (a, b)]
    if not any(formats) or not all(math.prod(operand.shape) for operand in (a, b)):
        return False
    for operand, of_format in zip((a, b), formats):
        parts = operand._parts() if of_format else [operand]
        if not of_format and (not is_plain(operand) or operand.dtype not in _bridge.FLOATS) \
                or any(part is not None and _bridge.is_fake(part) for part in parts) \
                or of_format and _bridge.on_gpu(operand) and not isinstance(operand, NVFP4TensorStorage):
            return False
    return place_of(a) == place_of(b) and _mask(a, a_columnwise) == _mask(b, b_columnwise)


def _mask(operand, columnwise):
    """The sign mask of a usage that is transformed; None of others."""
    if not columnwise or not isinstance(operand, NVFP4TensorStorage):
        return None
    quantizer = operand._get_quantizer()
    return quantizer.rht_matrix_random_sign_mask_t if quantizer.with_rht else None


def lines(operand, columnwise):
    """The lines of one usage of an operand: rows of a result, or its columns."""
    return operand.shape[-1] if columnwise else math.prod(operand.shape[:-1])


def run(jobs):
    """Products by nib_gemm, in one call. What `takes` allows; results lie where the operands do."""
    if not jobs:
        return
    with contextlib.ExitStack() as stack:
        kept = []

        def array(tensor):
            kept.append((tensor, _bridge.array(tensor)))
            return ctypes.pointer(kept[-1][1])

        def operand(x, columnwise):
            if isinstance(x, FormatStorage):
                return Operand(stack.enter_context(x._native()).handle, None,
                               Usage.COLUMNWISE if columnwise else Usage.ROWWISE)
            x = _bridge.placed(x.detach()).reshape(-1, x.shape[-1])
            return Operand(None, array(x.t() if columnwise else x), 0)

        def options(job):
            bias = None if job.bias is None else array(job.bias.detach().to(job.out.device))
            return GemmOptions(alpha=job.alpha, beta=job.beta, bias=bias)

        count = len(jobs)
        left, right = ((Operand * count)(*(operand(getattr(job, name), getattr(job, name + "_columnwise"))
                                           for job in jobs)) for name in "ab")
        told = [options(job) for job in jobs]
        results = [_bridge.array(job.out.view(lines(job.a, job.a_columnwise), -1)) for job in jobs]
        lib.nib_gemm_grouped(left, right, (ctypes.POINTER(GemmOptions) * count)(*map(ctypes.pointer, told)),
                             (Array * count)(*results), count)
    _bridge.changed([job.out for job in jobs])


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
