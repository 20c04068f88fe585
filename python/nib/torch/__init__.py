# SPDX-License-Identifier: Apache-2.0
"""nib for PyTorch: the quantisers, tensors and helpers of TransformerEngine by their own names, on CPU tensors.

    quantized_tensor.py          the base classes, and all that formats have in common
    nvfp4_tensor.py              NVFP4
    constants.py                 DType and block sizes
    _bridge.py                   torch tensors to the library and back
"""
try:
    import torch as _torch
except ImportError as _error:
    raise ImportError("nib.torch needs PyTorch: pip install torch") from _error

from .constants import DType, NVFP4_BLOCK_SCALING_SIZE, TE_DType
from .nvfp4_tensor import (NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage, _fp4_e2m1_vals, _FromNVFP4Func,
                           get_hadamard_matrix, get_rht_matrix)
from .quantized_tensor import (QuantizedTensor, QuantizedTensorStorage, Quantizer, prepare_for_saving,
                               restore_from_func_ctx, restore_from_saved)
