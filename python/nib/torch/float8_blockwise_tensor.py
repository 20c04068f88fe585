# SPDX-License-Identifier: Apache-2.0
"""Blockwise Float8: E4M3 or E5M2 codes, one FP32 scale per 1x128 or 128x128."""
import torch

from .._library import Format, Part
from .constants import DType
from .format_tensor import (Field, FormatQuantizer, FormatStorage, FormatTensor, is_full_slice, is_same_strides,
                            record_stream_handler)
from .quantized_tensor import QuantizedTensor, _resolve_shape, aten


class Float8BlockQuantizer(FormatQuantizer):
    value_fields = ("dtype", "amax_epsilon", "force_pow_2_scales", "block_scaling_dim")
    block_len = 128

    def __init__(self, fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True,
                 block_scaling_dim=2):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim is 1 or 2, not {block_scaling_dim}")
        self.dtype = DType.cast(fp8_dtype)
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def _struct(self):
        q = self._new_struct(Format.FLOAT8_BLOCK)
        q.swizzled = 0  # no GEMM takes these scales in tiles
        q.element = self.dtype
        q.block_dims[:] = (128, 128) if self.block_scaling_dim == 2 else (1, 128)
        q.pow2_scales = bool(self.force_pow_2_scales)
        q.amax_epsilon = self.amax_epsilon
        return q

    def _state(self):
        return {"fp8_dtype": self.dtype, "is_2D_scaled": self.block_scaling_dim == 2}

    def is_requantization_safe(self):
        return True

    def _get_compatible_recipe(self):
        from .recipe import Float8BlockScaling
        return Float8BlockScaling


class Float8BlockwiseQTensorStorage(FormatStorage):
    """_rowwise_data uint8 of the logical shape, _columnwise_data transposed, [K, d0, ...]; scales float32: 128x128
    blocks [ceil(M/128), roundup(ceil(K/128), 4)], 1x128 blocks transposed, [ceil(K/128), roundup(M, 4)]; columnwise
    ones with M and K exchanged."""

    FIELDS = (Field("_rowwise_data", "rowwise_data", Part.ROW_DATA),
              Field("_rowwise_scale_inv", "rowwise_scale_inv", Part.ROW_SCALE),
              Field("_columnwise_data", "columnwise_data", Part.COL_DATA),
              Field("_columnwise_scale_inv", "columnwise_scale_inv", Part.COL_SCALE))
    SAVED = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    STATE = (("_fp8_dtype", "fp8_dtype"), ("_is_2D_scaled", "is_2D_scaled"))
    COLUMN_KEEPS_RANK = True

    def __new__(cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
                is_2D_scaled, *args, fake_dtype=None, **kwargs):
        buffers = dict(rowwise_data=rowwise_data, rowwise_scale_inv=rowwise_scale_inv, columnwise_data=columnwise_data,
                       columnwise_scale_inv=columnwise_scale_inv)
        state = dict(fp8_dtype=DType.cast(fp8_dtype), is_2D_scaled=is_2D_scaled)
        return cls._construct(buffers, state, quantizer, fake_dtype, args, kwargs)

    def _struct(self):
        struct = self._get_quantizer()._struct()
        struct.element = self._fp8_dtype
        struct.block_dims[:] = (128, 128) if self._is_2D_scaled else (1, 128)
        return struct

    def _build_default_quantizer(self):
        return Float8BlockQuantizer(self._fp8_dtype, block_scaling_dim=2 if self._is_2D_scaled else 1,
                                    **self.get_usages())

    def _shape_of_bytes(self):
        if self._rowwise_data is not None:
            return self._rowwise_data.shape
        if self._columnwise_data is not None:
            first, *leading = self._columnwise_data.shape
            return torch.Size((*leading, first))
        return None

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        there = self.get_usages()
        row = there["rowwise"] if rowwise_usage is None else rowwise_usage
        col = there["columnwise"] if columnwise_usage is None else columnwise_usage
        assert row or col, "Must retain some data either columnwise or rowwise"
        super().update_usage(row, col)


Float8BlockwiseQTensorStorage.storage_class = Float8BlockwiseQTensorStorage


def _view(tensor, func, args, kwargs):
    if _resolve_shape((args[1],), tensor.numel()) == tensor.shape:
        return tensor.detach()
    raise NotImplementedError("Float8BlockwiseQTensor does not support views of another shape")


def _slice(tensor, func, args, kwargs):
    return type(tensor).make_like(tensor) if is_full_slice(tensor, args) else NotImplemented


def _as_strided(tensor, func, args, kwargs):
    return type(tensor).make_like(tensor) if is_same_strides(tensor, args) else NotImplemented


class Float8BlockwiseQTensor(FormatTensor, Float8BlockwiseQTensorStorage, QuantizedTensor):
    HANDLERS = {aten.view.default: _view, aten.slice.Tensor: _slice, aten.as_strided.default: _as_strided,
                aten.record_stream.default: record_stream_handler}

    def __new__(cls, *args, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype,
                quantizer, is_2D_scaled, **kwargs):
        return Float8BlockwiseQTensorStorage.__new__(cls, rowwise_data, rowwise_scale_inv, columnwise_data,
                                                     columnwise_scale_inv, fp8_dtype, quantizer, is_2D_scaled, *args,
                                                     **kwargs)


Float8BlockQuantizer.tensor_class = Float8BlockwiseQTensor
torch.serialization.add_safe_globals([Float8BlockwiseQTensor, Float8BlockQuantizer])
