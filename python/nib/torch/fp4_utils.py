# SPDX-License-Identifier: Apache-2.0
"""Megatron's helpers for FP4 parameters (megatron.core.fp4_utils), on nib's tensors."""
import ctypes
import importlib.util
import sys

import torch

from .._library import lib, raw, shape_array
from . import utils
from .nvfp4_tensor import NVFP4Tensor


def _has_transformer_engine():
    module = sys.modules.get("transformer_engine")
    if module is not None:
        return not getattr(module, "__nib_alias__", False)
    try:
        return importlib.util.find_spec("transformer_engine") is not None
    except (ImportError, ValueError):
        return False


HAVE_TE = _has_transformer_engine()
HAVE_TE_FP4_TENSOR_CLASS = False  # TransformerEngine's class is not needed: nib's own serves
FP4_TENSOR_CLASS = NVFP4Tensor


def is_nvfp4tensor(tensor):
    """Whether a tensor is an NVFP4Tensor."""
    return isinstance(tensor, NVFP4Tensor)


def get_nvfp4_rowwise_packed_shape(shape):
    """The shape of packed codes: the last dim halved. Rank 0 stays; an odd last dim is an AssertionError."""
    shape = torch.Size(shape)
    if len(shape) == 0:
        return shape
    assert shape[-1] % 2 == 0, f"the last dim of an NVFP4 tensor must be even to be packed, not {shape[-1]}"
    out = (ctypes.c_int64 * len(shape))()
    lib.nib_get_nvfp4_rowwise_packed_shape(len(shape), shape_array(shape), out)
    return torch.Size(out[:])


def modify_nvfp4_rowwise_storage(fp4_tensor, new_rowwise_data):
    """Copy the rowwise codes into another uint8 buffer of exactly their size, and use that one from now on."""
    if not is_nvfp4tensor(fp4_tensor):
        raise ValueError("modify_nvfp4_rowwise_storage takes an NVFP4Tensor")
    if fp4_tensor._rowwise_data is None:
        raise RuntimeError("the NVFP4Tensor has no rowwise data")
    assert fp4_tensor._rowwise_data.dtype == torch.uint8 and new_rowwise_data.dtype == torch.uint8, \
        "rowwise codes are uint8"
    utils.rebind_rowwise(fp4_tensor, "_rowwise_data", new_rowwise_data)


def is_grouped_nvfp4tensor(tensor):
    """Whether a tensor is a GroupedTensor of NVFP4."""
    from .grouped_tensor import GroupedTensor
    from .nvfp4_tensor import NVFP4Quantizer
    return isinstance(tensor, GroupedTensor) and tensor.rowwise_data is not None \
        and tensor.rowwise_data.dtype == torch.uint8 and isinstance(tensor.quantizer, NVFP4Quantizer)


def modify_grouped_nvfp4_rowwise_storage(grouped_tensor, new_rowwise_data):
    """The same for the members of a group, which lie in one buffer."""
    if not is_grouped_nvfp4tensor(grouped_tensor):
        raise ValueError("modify_grouped_nvfp4_rowwise_storage takes a GroupedTensor of NVFP4")
    if grouped_tensor.rowwise_data is None:
        raise RuntimeError("the GroupedTensor has no rowwise data")
    assert new_rowwise_data.dtype == torch.uint8, "rowwise codes are uint8"
    if new_rowwise_data.numel() != grouped_tensor.rowwise_data.numel():
        raise ValueError(f"the group has {grouped_tensor.rowwise_data.numel()} bytes of codes, the new buffer "
                         f"{new_rowwise_data.numel()}")
    new_rowwise_data.view(-1).copy_(grouped_tensor.rowwise_data.view(-1))
    grouped_tensor.rowwise_data = new_rowwise_data
    grouped_tensor.quantized_tensors = grouped_tensor.split_into_quantized_tensors()


def quantize_nvfp4_param_shard(model_params, main_params, start_offsets, data_parallel_group,
                               fsdp_shard_model_params=None):
    """Cast this rank's shards of FP32 master weights into NVFP4 parameters; the codes are then gathered, and
    post_all_gather_processing builds columnwise usages."""
    utils._cast(model_params, main_params, start_offsets, data_parallel_group, fsdp_shard_model_params, manual=True,
                nvfp4=True)


def get_fp4_align_size(fp4_recipe=None):
    """What to pad the tokens of an expert to: 128 serves TMA (32), grouped kernels (64) and CUDA graphs (128)."""
    return raw.nib_get_fp4_align_size()


def dequantize_fp4_tensor(fp4_tensor):
    """The values, from either usage."""
    return fp4_tensor.dequantize()
