# SPDX-License-Identifier: Apache-2.0
"""nib: NVFP4 tensors on any CPU.

    import numpy as np, nib
    t = nib.quantize(np.random.randn(128, 64).astype(np.float32))
    t.row_data, t.row_scale, t.row_tensor_scale       # NumPy arrays over the library's memory
    y = t.dequantize()

NumPy is enough for this; `nib.torch` has the quantizers, tensors and helpers of TransformerEngine for PyTorch.
"""
from . import _library
from ._checkpoint import dequantize_checkpoint, quantize_checkpoint
from ._device import Host
from ._library import (AmaxChoice, ArgumentError, CancelledError, CommError, DataError, DeviceError, Dialect, DType,
                       DtypeError, Error, ErrorMode, FileError, Format, MismatchError, ModeError, MxRule, NoDataError,
                       OutOfMemoryError, Part, Rounding, ScaleRule, ShapeError, TensorScale, TensorScaleRule,
                       UnsupportedError, Usage, UsageError)
from ._tensor import Quantizer, Tensor, decode, encode, from_parts, gemm, gptq, gptq_factorize, importance, quantize

__version__ = _library.raw.nib_version().decode()


def isa():
    """The instruction set whose kernels run: "scalar", or a faster one."""
    return _library.raw.nib_isa().decode()
