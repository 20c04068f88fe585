# SPDX-License-Identifier: Apache-2.0
"""Float8 with one scale per tensor: Float8Quantizer (delayed scaling), Float8CurrentScalingQuantizer, Float8Tensor."""
import warnings

import torch

from .. import _library
from .._library import Format, Part
from . import _bridge
from .constants import DType
from .format_tensor import Field, FormatQuantizer, FormatStorage, FormatTensor
from .quantized_tensor import QuantizedTensor, _CallFunc, _resolve_shape, aten


class _Float8Quantizer(FormatQuantizer):
    """What both quantizers have in common."""

    def _struct(self):
        q = self._new_struct(Format.FLOAT8)
        q.swizzled = 0  # there are no block scales
        q.element = self.dtype
        return q

    def _state(self):
        return {"fp8_dtype": self.dtype}

    def supports_only_rowwise_all_gather(self):
        return True

    def is_quantizable(self, inp):
        return True

    def _wrap_data(self, data, scale_inv, fake_dtype, requires_grad, internal):
        if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            data = data.view(torch.uint8)
        if data.dtype != torch.uint8:
            raise ValueError(f"Float8 bytes are uint8, not {data.dtype}")
        keywords = dict(data=data, fp8_scale_inv=scale_inv, fp8_dtype=self.dtype, quantizer=self)
        if internal:
            return Float8TensorStorage(**keywords, fake_dtype=fake_dtype, shape=data.shape)
        return Float8Tensor(shape=data.shape, dtype=fake_dtype, requires_grad=requires_grad, **keywords)


class Float8Quantizer(_Float8Quantizer):
    """Delayed scaling: data times `scale`; `amax` is raised to what was seen. Both are tensors that others update, so a
    copy of a quantizer shares them, and two quantizers are equal only if they do."""

    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax
        self.dtype = DType.cast(fp8_dtype)

    value_fields = ("dtype",)

    def _values(self):
        return (*super()._values(), id(self.scale), id(self.amax))

    def _overrides(self):
        for name, value in (("scale", self.scale), ("amax", self.amax)):
            if value.dtype != torch.float32 or value.numel() != 1 or value.device.type != "cpu":
                raise ValueError(f"{name} of a Float8Quantizer is one float32 in host memory")
        return _library.Overrides(scale=self.scale.data_ptr(), amax_seen=self.amax.data_ptr())

    def calibrate(self, tensor):
        seen = torch.zeros(1)
        _bridge.quantize(self._struct(), tensor.detach(), _library.Overrides(amax_seen=seen.data_ptr()))
        self.amax.copy_(seen.view_as(self.amax))

    def create_tensor_from_data(self, data, fake_dtype=torch.float32, requires_grad=False, internal=False):
        """Bytes that exist, with the inverse of this scale."""
        return self._wrap_data(data, torch.reciprocal(self.scale).view(1), fake_dtype, requires_grad, internal)

    def is_requantization_safe(self):
        return False

    def _get_compatible_recipe(self):
        from .recipe import DelayedScaling
        return DelayedScaling


class Float8CurrentScalingQuantizer(_Float8Quantizer):
    """The scale from the tensor's own amax."""

    value_fields = ("dtype", "with_amax_reduction", "force_pow_2_scales", "amax_epsilon")

    def __init__(self, fp8_dtype, device=None, *, rowwise=True, columnwise=True, use_existing_amax=False,
                 with_amax_reduction=False, amax_reduction_group=None, force_pow_2_scales=False, amax_epsilon=0.0,
                 scale=None, amax=None):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn("use_existing_amax, scale and amax are accepted and not looked at", DeprecationWarning)
        self.dtype = DType.cast(fp8_dtype)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    def _struct(self):
        q = super()._struct()
        q.pow2_scales = bool(self.force_pow_2_scales)
        q.amax_epsilon = self.amax_epsilon
        return q

    def create_tensor_from_data(self, data, fake_dtype=torch.float32, requires_grad=False, internal=False):
        """Bytes that exist; their scale is yet to be written to the result."""
        return self._wrap_data(data, torch.ones(1), fake_dtype, requires_grad, internal)

    def is_requantization_safe(self):
        return True

    def _get_compatible_recipe(self):
        from .recipe import Float8CurrentScaling
        return Float8CurrentScaling


class Float8TensorStorage(FormatStorage):
    """_data uint8 of the logical shape, _transpose [K, d0, ...] or None, _scale_inv float32 [1] for both.
    _transpose_invalid: the bytes of _data have changed since _transpose was made."""

    FIELDS = (Field("_data", "data", Part.ROW_DATA), Field("_transpose", "data_transpose", Part.COL_DATA),
              Field("_scale_inv", "fp8_scale_inv", Part.ROW_TENSOR_SCALE))
    SAVED = ("_data", "_transpose", "_scale_inv")
    STATE = (("_fp8_dtype", "fp8_dtype"),)
    COLUMN_KEEPS_RANK = SHARED_TENSOR_SCALE = True

    def __new__(cls, *args, data=None, fp8_scale_inv, fp8_dtype, fake_dtype=None, data_transpose=None, quantizer=None,
                **kwargs):
        buffers = dict(data=data, data_transpose=data_transpose, fp8_scale_inv=fp8_scale_inv)
        self = cls._construct(buffers, dict(fp8_dtype=DType.cast(fp8_dtype)), quantizer, fake_dtype, args, kwargs)
        self._transpose_invalid = data_transpose is None
        return self

    def _struct(self):
        if self._quantizer is not None:
            struct = self._quantizer._struct()
        else:
            struct = _library.new_quantizer(Format.FLOAT8)
        struct.element = self._fp8_dtype
        return struct

    def _native(self, parts=None, place=_bridge.placed):
        return _bridge.Native(self._struct(), self._dtype, tuple(self.shape), self._parts() if parts is None else parts,
                              not self._transpose_invalid, place)

    def _assign(self, parts):
        super()._assign(parts)
        self._transpose_invalid = self._transpose is None

    def _shape_of_bytes(self):
        if self._data is not None:
            return self._data.shape
        if self._transpose is not None:
            first, *leading = self._transpose.shape
            return torch.Size((*leading, first))
        return None

    def get_usages(self):
        return {"rowwise": self._data is not None,
                "columnwise": self._transpose is not None and not self._transpose_invalid}

    def get_data_tensors(self, rowwise_data=True, columnwise_data=True):
        if rowwise_data and columnwise_data:
            return self._data, self._transpose
        return self._data if rowwise_data else self._transpose

    def clear(self):
        """Free the codes. The scale may be shared with other tensors: it stays."""
        for part in (self._data, self._transpose):
            if part is not None:
                part.data = torch.empty(0, dtype=part.dtype)
        self._transpose_invalid = True

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        there = self.get_usages()
        row = there["rowwise"] if rowwise_usage is None else rowwise_usage
        col = there["columnwise"] if columnwise_usage is None else columnwise_usage
        if row and self._data is None:
            raise RuntimeError("Requested rowwise usage, but Float8Tensor is missing its data, which cannot be made of "
                               "the transpose")
        if col and not there["columnwise"]:
            self._create_transpose()
        if not row:
            self._data = None
        if not col:
            self._transpose, self._transpose_invalid = None, True

    # -- FSDP2: one scale, which does not travel; a transpose goes as what it is the transpose of --

    def fsdp_buffer_fields(self):
        return ("_data",) if self._data is not None else ("_transpose",)

    def fsdp_extract_buffers(self):
        buffers, meta = super().fsdp_extract_buffers()
        if meta["field_names"] == ("_transpose",):
            if self._transpose is None or self._transpose_invalid:
                raise RuntimeError("FSDP2 gathers codes, and there are none that are valid")
            buffers = (self._transpose.movedim(0, -1).contiguous(),)
        return buffers, meta

    def fsdp_assign_gathered(self, gathered, meta):
        if meta["field_names"] == ("_transpose",) and len(gathered) == 1:
            self._data, self._transpose_invalid = None, False
            gathered = (gathered[0].movedim(-1, 0).contiguous(),)
        super().fsdp_assign_gathered(gathered, meta)
        if self._data is not None:
            self._transpose_invalid = True

    def _create_transpose(self):
        self._create_columnwise()

    def _reset_caches(self):
        """The data has changed: the transpose is no longer one, unless it is all there is."""
        if self._data is not None:
            self._transpose_invalid = True

    def remove_caches(self):
        self._transpose, self._transpose_invalid = None, True


Float8TensorStorage.storage_class = Float8TensorStorage


def _with_data(tensor, data):
    """The same scale over other codes."""
    return type(tensor)(shape=data.shape, dtype=tensor.dtype, data=data, fp8_scale_inv=tensor._scale_inv,
                        fp8_dtype=tensor._fp8_dtype, quantizer=tensor._quantizer)


def _on_data(tensor, func, args, kwargs):
    """One scale for all: a part of the codes is a part of the tensor."""
    if tensor._data is None:
        return NotImplemented
    result = func(tensor._data, *args[1:], **kwargs)
    if isinstance(result, (list, tuple)):
        return [_with_data(tensor, data) for data in result]
    return _with_data(tensor, result)


def _new_zeros(tensor, func, args, kwargs):
    data = torch.zeros(args[1], dtype=torch.uint8, device=kwargs.get("device") or tensor.device)
    other = _with_data(tensor, data)
    other._scale_inv = tensor._scale_inv.clone()
    return other


def _view(tensor, func, args, kwargs):
    return tensor._view(_resolve_shape((args[1],), tensor.numel()))


class Float8Tensor(FormatTensor, Float8TensorStorage, QuantizedTensor):
    HANDLERS = {aten.view.default: _view, aten.slice.Tensor: _on_data, aten.select.int: _on_data,
                aten.split.Tensor: _on_data, aten.as_strided.default: _on_data, aten.new_zeros.default: _new_zeros,
                aten.clone.default: lambda tensor, func, args, kwargs: tensor._clone()}

    def _view(self, shape):
        if shape == self.shape:
            return self.detach()
        transpose = self._transpose
        if transpose is not None and tuple(transpose.shape) != ((shape[-1], *shape[:-1]) if len(shape) else ()):
            transpose = None
        return type(self)(shape=shape, dtype=self.dtype, data=None if self._data is None else self._data.view(shape),
                          fp8_scale_inv=self._scale_inv, fp8_dtype=self._fp8_dtype, data_transpose=transpose,
                          quantizer=self._quantizer)

    def view(self, *shape):
        return _CallFunc.apply(self, lambda tensor: tensor._view(_resolve_shape(shape, tensor.numel())))


Float8Quantizer.tensor_class = Float8CurrentScalingQuantizer.tensor_class = Float8Tensor
torch.serialization.add_safe_globals([Float8Tensor, Float8Quantizer, Float8CurrentScalingQuantizer])
