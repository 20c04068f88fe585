# SPDX-License-Identifier: Apache-2.0
"""MXFP8: E4M3 or E5M2 codes, one power-of-two scale per 32."""
import math

import torch

from .._library import Format, Part
from .constants import DType
from .format_tensor import (Field, FormatQuantizer, FormatStorage, FormatTensor, is_full_slice, is_same_strides,
                            new_zeros_handler, split_handler)
from .quantized_tensor import QuantizedTensor, _resolve_shape, aten


class MXFP8Quantizer(FormatQuantizer):
    value_fields = ("dtype", "with_2d_quantization")

    def __init__(self, fp8_dtype=DType.kFloat8E4M3, *, rowwise=True, columnwise=True, with_2d_quantization=False):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.cast(fp8_dtype)
        self.with_2d_quantization = with_2d_quantization

    def _struct(self):
        q = self._new_struct(Format.MXFP8)
        q.element = self.dtype
        if self.with_2d_quantization:
            q.block_dims[:] = (32, 32)
        return q

    def _state(self):
        return {"fp8_dtype": self.dtype, "with_gemm_swizzled_scales": bool(self.optimize_for_gemm)}

    def is_requantization_safe(self):
        return True

    def _get_compatible_recipe(self):
        from .recipe import MXFP8BlockScaling
        return MXFP8BlockScaling


class MXFP8TensorStorage(FormatStorage):
    """_rowwise_data and _columnwise_data, both uint8 of the logical shape; scales are E8M0 bytes, [roundup(M, 128),
    roundup(K/32, 4)] and [roundup(M/32, 4), roundup(K, 128)]."""

    FIELDS = (Field("_rowwise_data", "rowwise_data", Part.ROW_DATA),
              Field("_rowwise_scale_inv", "rowwise_scale_inv", Part.ROW_SCALE),
              Field("_columnwise_data", "columnwise_data", Part.COL_DATA),
              Field("_columnwise_scale_inv", "columnwise_scale_inv", Part.COL_SCALE))
    SAVED = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    STATE = (("_fp8_dtype", "fp8_dtype"), ("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales"))

    def __new__(cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
                with_gemm_swizzled_scales=False, *args, fake_dtype=None, **kwargs):
        buffers = dict(rowwise_data=rowwise_data, rowwise_scale_inv=rowwise_scale_inv, columnwise_data=columnwise_data,
                       columnwise_scale_inv=columnwise_scale_inv)
        state = dict(fp8_dtype=DType.cast(fp8_dtype), with_gemm_swizzled_scales=with_gemm_swizzled_scales)
        return cls._construct(buffers, state, quantizer, fake_dtype, args, kwargs)

    @classmethod
    def _shaped(cls, parts, shape):
        col = parts[Part.COL_DATA]
        if col is not None and tuple(col.shape) != tuple(shape):
            parts = list(parts)
            parts[Part.COL_DATA] = col.view(shape)
        return parts

    def _struct(self):
        struct = self._get_quantizer()._struct()
        struct.element = self._fp8_dtype
        struct.swizzled = bool(self._with_gemm_swizzled_scales)
        return struct

    def _build_default_quantizer(self):
        return MXFP8Quantizer(self._fp8_dtype, **self.get_usages())

    # -- FSDP2: scales go without the padding of their rows --

    def fsdp_buffer_fields(self):
        fields = []
        if self._rowwise_data is not None:
            fields += ["_rowwise_data", "_rowwise_scale_inv"]
        if self._columnwise_data is not None:
            fields += ["_columnwise_data", "_columnwise_scale_inv"]
        return tuple(fields)

    def fsdp_extract_buffers(self):
        if self._with_gemm_swizzled_scales:
            raise NotImplementedError("FSDP2 is only supported for MXFP8Tensors whose scales lie row by row")
        buffers, meta = super().fsdp_extract_buffers()
        rows = math.prod(self.size()[:-1])
        lines = {"_rowwise_scale_inv": rows, "_columnwise_scale_inv": -(-rows // 32)}
        return tuple(buffer[:lines[name]] if name in lines else buffer
                     for name, buffer in zip(meta["field_names"], buffers)), meta

    def fsdp_assign_gathered(self, gathered, meta):
        padded = {"_rowwise_scale_inv": 128, "_columnwise_scale_inv": 4}
        super().fsdp_assign_gathered([
            torch.nn.functional.pad(buffer, (0, 0, 0, -buffer.shape[0] % padded[name])) if name in padded else buffer
            for name, buffer in zip(meta["field_names"], gathered)] if len(gathered) == len(meta["field_names"])
            else gathered, meta)

    def _shape_of_bytes(self):
        data = self._rowwise_data if self._rowwise_data is not None else self._columnwise_data
        return None if data is None else data.shape


MXFP8TensorStorage.storage_class = MXFP8TensorStorage


def _view(tensor, func, args, kwargs):
    shape = _resolve_shape((args[1],), tensor.numel())
    if len(shape) < 2 or shape[-1] != tensor.shape[-1]:
        raise ValueError(f"MXFP8Tensor: a view has two dims or more and the same last one, but {tuple(tensor.shape)} "
                         f"would become {tuple(shape)}")
    return tensor.detach() if shape == tensor.shape else tensor.view(shape)


def _slice(tensor, func, args, kwargs):
    return type(tensor).make_like(tensor) if is_full_slice(tensor, args) else NotImplemented


def _as_strided(tensor, func, args, kwargs):
    return type(tensor).make_like(tensor) if is_same_strides(tensor, args) else NotImplemented


class MXFP8Tensor(FormatTensor, MXFP8TensorStorage, QuantizedTensor):
    BLOCK_ROWS, COLUMN_IS_SHAPED = 32, True

    HANDLERS = {aten.view.default: _view, aten.slice.Tensor: _slice, aten.as_strided.default: _as_strided,
                aten.split.Tensor: split_handler, aten.new_zeros.default: new_zeros_handler,
                aten.clone.default: lambda tensor, func, args, kwargs: tensor._clone()}

    def __new__(cls, *args, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype,
                quantizer, with_gemm_swizzled_scales=False, **kwargs):
        return MXFP8TensorStorage.__new__(cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv,
                                          fp8_dtype, quantizer, with_gemm_swizzled_scales, *args, **kwargs)


MXFP8Quantizer.tensor_class = MXFP8Tensor
torch.serialization.add_safe_globals([MXFP8Tensor, MXFP8Quantizer])
