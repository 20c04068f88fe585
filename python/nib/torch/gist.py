# SPDX-License-Identifier: Apache-2.0
"""NVFP4 as a widely copied PyTorch gist has it: a global encode scale, unpadded E4M3 scales, packed codes."""
import ctypes

import torch

from .. import _library
from .._library import Dialect, Part, lib
from . import _bridge

FP8_AMAX = 448.0
FP8_DTYPE = torch.float8_e4m3fn
FP4_AMAX = 6.0
FP4_DTYPE = getattr(torch, "float4_e2m1fn_x2", torch.uint8)

# Midpoints of the representable magnitudes and the code at or below each; ties go to the even code.
thresholds = [
    (5.0, 0b0110), (3.5, 0b0101), (2.5, 0b0100),
    (1.75, 0b0011), (1.25, 0b0010), (0.75, 0b0001), (0.25, 0b0000),
]


def cvt_1xfp32_2xfp4(x):
    """float32 [..., N], N a multiple of 8, to packed codes [..., N/2]: the even element in the low nibble."""
    assert x.dtype == torch.float32
    if x.dim() == 0 or x.shape[-1] % 8:
        raise _library.ShapeError(f"the last dim must be a multiple of 8, not {tuple(x.shape)[-1:]}")
    x = _bridge.host(x.detach()).contiguous()
    nan = torch.isnan(x)
    if nan.any():  # the largest code with the sign of the NaN, as thresholds that no comparison passes give it
        x = torch.where(nan, torch.copysign(torch.tensor(torch.inf), x), x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    lib.nib_encode(_library.DType.E2M1, ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float)), x.numel(),
                   out.data_ptr())
    return out.view(FP4_DTYPE)


def quant_nvfp4_torch(x, global_scale=None):
    """(codes [..., N/2], scales float8_e4m3fn [..., N/16], global encode scale); computed where it is None."""
    assert x.shape[-1] % 16 == 0
    struct = _library.new_quantizer()
    struct.dialect = Dialect.GIST
    struct.columnwise = 0
    overrides = tensor_scale = None
    if global_scale is not None:
        tensor_scale = _bridge.host(torch.as_tensor(global_scale, dtype=torch.float32).detach()).reshape(1)
        overrides = _library.Overrides()
        overrides.tensor_scale[0] = tensor_scale.data_ptr()
    source = _bridge.host(x.detach())
    if source.dtype not in _bridge.FLOATS:
        source = source.float()
    parts = _bridge.quantize(struct, source, overrides)
    rows, blocks = source.numel() // max(1, source.shape[-1]), source.shape[-1] // 16
    scales = parts[Part.ROW_SCALE][:rows, :blocks].reshape(*source.shape[:-1], blocks).view(FP8_DTYPE)
    if global_scale is None:
        global_scale = parts[Part.ROW_TENSOR_SCALE].reshape(())
    return parts[Part.ROW_DATA].view(FP4_DTYPE), scales, global_scale
