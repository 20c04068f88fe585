# SPDX-License-Identifier: Apache-2.0
"""Quantize and dequantize as torch operators, for torch.compile: a graph records them and runs them with real memory.
Where there is memory already, the library is called directly."""
from typing import List, Optional

import torch
from torch import Tensor

from .. import _library
from .._library import Usage, lib
from . import _bridge
from .constants import DType, TE_DType_To_Torch


def encode(struct):
    """A nib_quantizer as text, which operators can take."""
    if struct.amax_comm:
        raise _library.UnsupportedError("a reduction of amaxes cannot be part of a compiled graph")
    return bytes(struct).hex()


def _decode(text):
    return _library.Quantizer.from_buffer_copy(bytes.fromhex(text))


@torch.library.custom_op("nib::dequantize", mutates_args=())
def dequantize(parts: List[Optional[Tensor]], struct: str, nominal: int, shape: List[int], dtype: int) -> Tensor:
    device = next(part.device for part in parts if part is not None)
    out = torch.empty(shape, dtype=TE_DType_To_Torch[DType(dtype)], device=device)
    if out.numel():
        with _bridge.Native(_decode(struct), TE_DType_To_Torch[DType(nominal)], shape, parts) as native:
            lib.nib_dequantize(native.handle, Usage.EITHER, _bridge.array(out))
    return out


@dequantize.register_fake
def _(parts, struct, nominal, shape, dtype):
    device = next(part.device for part in parts if part is not None)
    return torch.empty(shape, dtype=TE_DType_To_Torch[DType(dtype)], device=device)


@torch.library.custom_op("nib::quantize", mutates_args=())
def quantize(x: Tensor, struct: str) -> List[Tensor]:
    """The parts that there are, in the order of nib_part. Random numbers are drawn when it runs."""
    q = _decode(struct)
    overrides = _bridge.overrides_of(offset=_bridge.draw(q, x)) if q.rounding else None
    return [part for part in _bridge.quantize(q, x, overrides) if part is not None]


@quantize.register_fake
def _(x, struct):
    return [torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in
            filter(None, _bridge.part_specs(_decode(struct), tuple(int(n) for n in x.shape)))]


def traced_parts(x, struct):
    """Six parts of a tensor that is being traced."""
    found = iter(torch.ops.nib.quantize(x, encode(struct)))
    specs = _bridge.part_specs(struct, tuple(int(n) for n in x.shape))
    return [None if spec is None else next(found) for spec in specs]


def traced_values(parts, struct, nominal, shape, dtype):
    return torch.ops.nib.dequantize(parts, encode(struct), int(_bridge.code_of(nominal)), list(shape),
                                    int(_bridge.code_of(dtype)))
