# SPDX-License-Identifier: Apache-2.0
"""What formats have in common, written once over the library.

A format is three classes: XQuantizer(FormatQuantizer), XTensorStorage(FormatStorage) and XTensor(FormatTensor,
XTensorStorage, QuantizedTensor). Its storage says in FIELDS which attribute is which buffer of a nib_tensor, and in
STATE what else its constructor takes; its quantizer fills in a nib_quantizer. That is all a format must bring; the rest
of its module is what is special about it.
"""
import contextlib
import copy
import ctypes
import math
import warnings
from collections import namedtuple

import torch

from .. import _library
from .._library import Usage, lib, raw, shape_array
from . import _bridge, _gpu, _ops
from .quantized_tensor import (QuantizedTensor, QuantizedTensorStorage, Quantizer, _CallFunc, _DequantizeFunc,
                               _resolve_shape, _stride_from_shape, aten, eager)

# attribute, keyword of the constructor, member of nib_part
Field = namedtuple("Field", "name keyword part")


_structs = {}  # of quantizers whose attributes say all


class FormatQuantizer(Quantizer):
    """A quantizer of one of the library's formats."""

    tensor_class = None  # XTensor; its storage class is tensor_class.storage_class
    value_fields = ()  # attributes that decide bytes: equality and hash go by them

    def _struct(self):
        """A nib_quantizer with this object's options, but for the random stream."""
        raise NotImplementedError

    def _new_struct(self, format):
        struct = _library.new_quantizer(format)
        struct.rowwise = bool(self.rowwise_usage)
        struct.columnwise = bool(self.columnwise_usage)
        struct.swizzled = bool(self.optimize_for_gemm)
        return struct

    def _overrides(self):
        """nib_overrides for a quantization, or None."""
        return None

    def _reduction(self, dst=None):
        """A context that gives the communicator to reduce amaxes over, or None. What can fail on one rank alone belongs
        within it, so that it fails on all."""
        if getattr(self, "with_amax_reduction", False):
            return _bridge.communicator(self.amax_reduction_group)
        return contextlib.nullcontext()

    def _known_struct(self):
        """What _struct() gives, remembered by the attributes that it comes of."""
        key = type(self), self._options()
        known = _structs.get(key)
        if known is None:
            known = _structs[key] = bytes(self._struct())
        return _library.Quantizer.from_buffer_copy(known)

    def _quantization(self, comm, tensor, amaxes=(None, None)):
        """(nib_quantizer, nib_overrides) with everything set that belongs to one quantization of a tensor."""
        struct = self._known_struct() if self._stays() else self._struct()
        amaxes = _bridge.fitting_amaxes(struct, tensor.shape, amaxes)
        drawn = _bridge.draw(struct, tensor) if struct.rounding else None
        if comm is not None and _bridge.on_gpu(tensor):
            amaxes = _bridge.reduced_amaxes(struct, tensor.detach(), comm)
        elif comm is not None:
            struct.amax_comm = ctypes.pointer(comm)
        return struct, _bridge.overrides_of(amaxes, drawn) or self._overrides()

    def quantize_impl(self, tensor):
        with self._reduction() as comm:
            if isinstance(tensor, QuantizedTensor):
                tensor = tensor.dequantize()
            _check_float(tensor)
            if _bridge.is_meta(tensor):
                return self.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if _bridge.is_fake(tensor):
                return self._wrap(tensor.shape, tensor.dtype, self._traced(tensor))
            struct, overrides = self._quantization(comm, tensor)
            parts = _bridge.quantize(struct, tensor.detach(), overrides)
        return self._wrap(tensor.shape, tensor.dtype, parts)

    def update_quantized(self, src, dst, *, noop_flag=None, amax=None):
        """Quantize into a tensor that exists. amax: instead of that of the data, one float32 tensor or one for each
        usage. On a GPU neither it nor the no-op flag comes to the host."""
        if not torch.compiler.is_compiling():
            prepared = getattr(dst, "_prepared", None)
            if prepared is not None and prepared.again(self, src, dst, amax,
                                                       None if noop_flag is None else _flag(noop_flag, src)):
                return dst
        return self._update_eagerly(src, dst, noop_flag, amax)

    @eager
    def _update_eagerly(self, src, dst, noop_flag, amax):
        skip = _is_set(noop_flag)  # on all ranks: nobody waits for a reduction
        with contextlib.nullcontext() if skip else self._reduction(dst) as comm:
            if not isinstance(dst, self.tensor_class.storage_class):
                raise ValueError(f"{type(self).__name__} can only update {self.tensor_class.storage_class.__name__}s, "
                                 f"not {type(dst).__name__}")
            if isinstance(src, QuantizedTensor):
                src = src.dequantize()
            _check_float(src)
            if _bridge.is_meta(src) or any(part is not None and _bridge.is_meta(part) for part in dst._parts()):
                return _update_meta(src, dst)
            if _bridge.is_fake(src):
                return self._update_traced(src, dst, noop_flag)
            if noop_flag is not None and (noop_flag.dtype != torch.float32 or noop_flag.numel() != 1):
                raise ValueError(f"a no-op flag is one float32, not {noop_flag.numel()} of {noop_flag.dtype}")
            if tuple(src.shape) != tuple(dst.shape):
                raise ValueError(f"a tensor of shape {tuple(src.shape)} does not fit into one of {tuple(dst.shape)}")
            if not skip:
                self._update(_bridge.placed(src.detach()), dst, comm, amax, noop_flag)
        return dst

    def _update(self, src, dst, comm, amax=None, noop_flag=None):
        struct, overrides = self._quantization(comm, src, _gpu.checked_amaxes(amax, src))
        ready = _bridge.on_gpu(src) and noop_flag is None
        with self._with_buffers(struct, dst, src.device) if ready else dst._native() as native:
            lib.nib_quantize_into(struct, _bridge.array(src), overrides, ctypes.cast(_flag(noop_flag, src), _FLOATS),
                                  native.handle)
            dst._assign(native.parts())
            dst._follow(self)
        _bridge.changed(dst._parts())
        if _bridge.on_gpu(src) and comm is None and self._stays():
            dst._prepared = _gpu.Update(self, src, dst, struct, amax)

    @staticmethod
    def _with_buffers(struct, dst, device):
        """The nib_tensor of dst with torch's memory for whatever an update would allocate: usages that are missing, or
        all of them, where the bytes come to mean something else."""
        parts, shape = dst._parts(), tuple(dst.shape)
        missing = [part for part in _library.Part if parts[part] is None]
        fresh = _bridge.empty_parts(struct, shape, device, missing)
        native = dst._native([new if old is None else old for old, new in zip(parts, fresh)])
        if raw.nib_tensor_set_quantizer(native.handle, struct) != _library.MismatchError.status:
            return native
        native.__exit__()
        return _bridge.Native(struct, dst._dtype, shape, _bridge.empty_parts(struct, shape, device))

    def _stays(self):
        """Whether the same attributes always mean the same nib_quantizer."""
        return False

    def _traced(self, tensor):
        if getattr(self, "with_amax_reduction", False):
            raise _library.UnsupportedError("a reduction of amaxes cannot be part of a compiled graph")
        if hasattr(self, "scale"):
            raise _library.UnsupportedError("delayed scaling, which keeps values outside, cannot be part of a graph")
        return _ops.traced_parts(tensor, self._struct())

    def _update_traced(self, src, dst, noop_flag):
        if noop_flag is not None:
            raise _library.UnsupportedError("an update with a no-op flag cannot be part of a compiled graph")
        parts = dst._shaped(self._traced(src), dst.shape)
        for field in dst.FIELDS:
            here, there = getattr(dst, field.name), parts[field.part]
            if here is None or there is None:
                setattr(dst, field.name, there)
            else:
                here.copy_(there)
        dst._follow(self)
        return dst

    def _wrap(self, shape, dtype, parts, requires_grad=False):
        """The result of a quantization: a tensor, or a bare storage where `internal`."""
        storage = self.tensor_class.storage_class
        parts = storage._shaped(parts, shape)
        buffers = {field.keyword: parts[field.part] for field in storage.FIELDS}
        state = {**self._state(), "quantizer": self}
        if self.internal:
            return storage(**buffers, **state, fake_dtype=dtype, shape=torch.Size(shape))
        return self.tensor_class(shape=torch.Size(shape), dtype=dtype, **buffers, **state, requires_grad=requires_grad)

    def _state(self):
        """What a constructor of this format takes besides buffers and quantizer."""
        return {}

    def make_empty(self, shape, *, dtype=torch.float32, device=None, requires_grad=False, pin_memory=False):
        """A tensor of this shape, its bytes zero."""
        if getattr(self, "custom", False):
            raise NotImplementedError(f"{type(self).__name__} is a custom quantizer: it has to make its own tensors")
        tensors = self.alloc_tensors(shape, device, pin_memory=pin_memory)
        parts = [None] * _library.PART_COUNT
        for field in self.tensor_class.storage_class.FIELDS:
            parts[field.part] = tensors.get(field.name)
        return self._wrap(shape, dtype, parts, requires_grad)

    # Descriptions without data, for torch.compile.

    def inner_tensor_specs(self, shape):
        """{attribute: (shape, dtype)} of the buffers that a tensor of this shape has."""
        found, specs = _bridge.part_specs(self._struct(), shape), {}
        for field in self.tensor_class.storage_class.FIELDS:
            spec = found[field.part]
            if spec is not None:
                if field.part == _library.Part.COL_DATA and self.tensor_class.storage_class.COLUMN_KEEPS_RANK:
                    spec = (torch.Size(self.get_columnwise_shape(shape)), spec[1])
                specs[field.name] = spec
        return specs

    def alloc_tensors(self, shape, device=None, *, pin_memory=False):
        return {name: torch.zeros(size, dtype=dtype, device=device, pin_memory=pin_memory)
                for name, (size, dtype) in self.inner_tensor_specs(shape).items()}

    def storage_metadata(self, dtype):
        return {**self._state(), "quantizer": self, "fake_dtype": dtype}

    def create_metadata(self, shape, dtype, requires_grad=False):
        return {**self.storage_metadata(dtype), "shape": torch.Size(shape), "dtype": dtype,
                "requires_grad": requires_grad}

    def get_scale_shape(self, shape, columnwise):
        """The shape of the scales, padding included."""
        rank, out = ctypes.c_int(), (ctypes.c_int64 * _library.MAX_RANK)()
        part = _library.Part.COL_SCALE if columnwise else _library.Part.ROW_SCALE
        lib.nib_part_shape(self._struct(), part, len(shape), shape_array(shape), rank, out)
        return tuple(out[:rank.value])

    def get_columnwise_shape(self, shape):
        """The transposed shape, last dim first."""
        shape = tuple(shape)
        return (shape[-1], *shape[:-1]) if shape else ()

    def is_quantizable(self, inp):
        shape = tuple(inp.shape)
        return bool(raw.nib_is_quantizable(self._struct(), len(shape), shape_array(shape)))

    def is_requantization_safe(self):
        return bool(raw.nib_is_requantization_safe(self._struct()))

    def copy(self):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def _options(self):
        return tuple(getattr(self, name) for name in
                     ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm", *self.value_fields))

    def _values(self):
        """What equality and hash go by."""
        return self._options()

    def __eq__(self, other):
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self):
        if getattr(self, "amax_reduction_group", None) is not None:
            raise TypeError(f"a {type(self).__name__} with a process group is no value: it cannot be hashed")
        return hash((type(self), self._values()))

    def __getstate__(self):
        state = dict(self.__dict__)
        if "amax_reduction_group" in state:  # a group means nothing in another process
            state["amax_reduction_group"] = None
        return state


def _check_float(tensor):
    if tensor.dtype not in _bridge.FLOATS:
        raise _library.DtypeError(f"{tensor.dtype} cannot be quantized: float32, float16 and bfloat16 can")


def _update_meta(src, dst):
    """Nothing is written where there is no memory; values do not come from, nor go to, where there is none."""
    if src.device != dst.device:
        raise _library.DeviceError(f"a tensor on {src.device} cannot update one on {dst.device}: on the meta device "
                                   "there are no values")
    if tuple(src.shape) != tuple(dst.shape):
        raise ValueError(f"a tensor of shape {tuple(src.shape)} does not fit into one of {tuple(dst.shape)}")
    return dst


def _is_set(noop_flag):
    """Whether a no-op flag is set; what is no flag is not, and one on a GPU is nobody's to know."""
    return isinstance(noop_flag, torch.Tensor) and noop_flag.dtype == torch.float32 and noop_flag.numel() == 1 \
        and not _bridge.is_fake(noop_flag) and not _bridge.on_gpu(noop_flag) and float(noop_flag) == 1.0


_FLOATS = ctypes.POINTER(ctypes.c_float)


def _flag(noop_flag, src):
    """The address of a no-op flag, where it is not for the host to look at; None of others."""
    if noop_flag is None or not _bridge.on_gpu(noop_flag):
        return None
    if noop_flag.device != src.device:
        raise _library.DeviceError(f"a no-op flag on {noop_flag.device} for a tensor on {src.device}")
    return noop_flag.data_ptr()


class FormatStorage(QuantizedTensorStorage):
    """A storage of one of the library's formats."""

    FIELDS = ()  # Fields in the order of the constructor
    SAVED = ()  # their names in the order in which they are saved
    STATE = ()  # (attribute, keyword) of everything else that the constructor takes, but for quantizer and fake_dtype
    COLUMN_KEEPS_RANK = False  # columnwise data is [K, d0, d1, ...] instead of [K, M]
    SHARED_TENSOR_SCALE = False  # one tensor scale serves both usages

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._INNER_TENSORS = {field.name: field.keyword for field in cls.FIELDS}

    @classmethod
    def _construct(cls, buffers, state, quantizer, fake_dtype, args, kwargs):
        """A new object: buffers and state by keyword, the rest of the arguments as constructors got them. Those of a
        bare storage may have a shape among them; the others mean nothing to it."""
        if issubclass(cls, torch.Tensor):
            if kwargs.get("device") is None:
                kwargs["device"] = next((b.device for b in buffers.values() if b is not None), None)
            self = QuantizedTensor.__new__(cls, *args, fake_dtype=fake_dtype, **kwargs)
        else:
            self = object.__new__(cls)
            shape = kwargs.get("shape", args[0] if args else None)
            self._dtype = fake_dtype if fake_dtype is not None else torch.float32
            self._shape = None if shape is None else torch.Size(shape)
        for field in self.FIELDS:
            setattr(self, field.name, buffers[field.keyword])
        for name, keyword in self.STATE:
            setattr(self, name, state[keyword])
        self._quantizer = quantizer.copy() if quantizer is not None else None
        return self

    def __init__(self, *args, **kwargs):
        """__new__ has done it all: a torch.Tensor is complete when it is made."""

    @classmethod
    def _shaped(cls, parts, shape):
        """Parts of the library's shapes with those of this format."""
        col = parts[_library.Part.COL_DATA]
        if not cls.COLUMN_KEEPS_RANK or col is None or col.dim() == len(shape) == 2:
            return parts
        parts = list(parts)
        parts[_library.Part.COL_DATA] = col.view((shape[-1], *shape[:-1]) if len(shape) else ())
        return parts

    # -- to and from the library --

    def _struct(self):
        """A nib_quantizer that says what the bytes are."""
        raise NotImplementedError

    def _parts(self):
        """The buffers in the order of nib_part. What is left of a usage without data does not count."""
        parts = [None] * _library.PART_COUNT
        for field in self.FIELDS:
            parts[field.part] = getattr(self, field.name)
        if not self.SHARED_TENSOR_SCALE:
            for part in range(2, _library.PART_COUNT):
                if parts[part % 2] is None:
                    parts[part] = None
        return parts

    def _native(self, parts=None, place=_bridge.placed):
        """The nib_tensor over the buffers, or over those and others, where `place` puts them."""
        struct = self._struct()
        if parts is None:
            parts = self._parts()
        else:
            struct.rowwise, struct.columnwise = (part is not None for part in parts[:2])
        return _bridge.Native(struct, self._dtype, tuple(self.shape), parts, place=place)

    def _assign(self, parts):
        parts = self._shaped(parts, self.shape)
        for field in self.FIELDS:
            setattr(self, field.name, parts[field.part])

    def _follow(self, quantizer):
        """After an update by another quantizer: mean what it means."""
        for keyword, value in quantizer._state().items():
            for name, other in self.STATE:
                if other == keyword:
                    setattr(self, name, value)
        if self._quantizer is None or self._quantizer != quantizer:
            self._quantizer = quantizer.copy()
            if hasattr(self._quantizer, "with_amax_reduction"):
                self._quantizer.with_amax_reduction = False
                self._quantizer.amax_reduction_group = None

    def _clone_state(self):
        state = {keyword: getattr(self, name) for name, keyword in self.STATE}
        return {**state, "quantizer": self._quantizer}

    def _like(self, parts, shape):
        """An object of this class over other buffers."""
        parts = self._shaped(parts, shape)
        buffers = {field.keyword: parts[field.part] for field in self.FIELDS}
        if isinstance(self, torch.Tensor):
            return type(self)(shape=shape, dtype=self.dtype, **buffers, **self._clone_state())
        return type(self)(**buffers, **self._clone_state(), fake_dtype=self._dtype, shape=shape)

    def _derive(self, call, *arguments):
        """A new nib_tensor made from this one: its parts and its shape."""
        with self._native() as native:
            out = ctypes.c_void_p()
            call(native.handle, *arguments, out)
            metadata = _library.Metadata()
            lib.nib_tensor_get_metadata(out, metadata)
            return native.shared(out), torch.Size(metadata.shape[:metadata.rank])

    def _change(self, call, *arguments):
        """A call that changes the tensor."""
        with self._native() as native:
            call(native.handle, *arguments)
            self._assign(native.parts())

    # -- what it is --

    def _shape_of_bytes(self):
        """The shape where only the buffers can tell; None without data."""
        raise NotImplementedError

    def size(self, dim=None):
        shape = getattr(self, "_shape", None)
        if shape is None:
            shape = self._shape_of_bytes()
        if shape is None:
            raise RuntimeError(f"{type(self).__name__} has no data, and no shape was recorded")
        return torch.Size(shape) if dim is None else torch.Size(shape)[dim]

    @property
    def device(self):
        for part in self._parts():
            if part is not None:
                return part.device
        raise RuntimeError(f"{type(self).__name__} has no data")

    def get_usages(self):
        data = [getattr(self, field.name) is not None for field in self.FIELDS if field.part < 2]
        return {"rowwise": data[0], "columnwise": data[1]}

    def get_metadata(self):
        buffers = {field.keyword: getattr(self, field.name) for field in self.FIELDS}
        return {**buffers, **self._clone_state(), "fake_dtype": self._dtype}

    def get_data_tensors(self, rowwise_data=True, columnwise_data=True):
        data = [getattr(self, field.name) for field in self.FIELDS if field.part < 2]
        if rowwise_data and columnwise_data:
            return tuple(data)
        if rowwise_data:
            return data[0]
        if columnwise_data:
            return data[1]
        raise ValueError("No data to get, both rowwise_data and columnwise_data are False")

    def __repr__(self):
        try:
            return f"{type(self).__name__}({self.dequantize()})"
        except Exception:  # a repr never raises
            return f"{type(self).__name__}(without data, dtype={self._dtype})"

    # -- saving --

    def prepare_for_saving(self):
        if not isinstance(self, torch.Tensor) and getattr(self, "_shape", None) is None:
            self._shape = self._shape_of_bytes()
        tensors = [getattr(self, name) for name in self.SAVED]
        for name in self.SAVED:
            setattr(self, name, None)
        return tensors, self

    def restore_from_saved(self, tensors):
        if len(tensors) < len(self.SAVED):
            raise IndexError(f"{type(self).__name__} has {len(self.SAVED)} buffers, but only {len(tensors)} are left")
        for name, tensor in zip(self.SAVED, tensors):
            setattr(self, name, tensor)
        return tensors[len(self.SAVED):]

    def clear(self):
        for field in self.FIELDS:
            part = getattr(self, field.name)
            if part is not None:
                part.data = torch.empty(0, dtype=part.dtype, device=part.device)

    def copy_from_storage(self, src):
        if not isinstance(src, self.storage_class):
            raise TypeError(f"copy_from_storage of {type(self).__name__} takes {self.storage_class.__name__}, "
                            f"not {type(src).__name__}")
        for name, keyword in self.STATE:
            if getattr(self, name) != getattr(src, name):
                raise RuntimeError(f"{keyword} differs: {getattr(self, name)} here, {getattr(src, name)} there")
        for field in self.FIELDS:
            here, there = getattr(self, field.name), getattr(src, field.name)
            if here is not None and there is not None:
                here.copy_(there)

    # -- values --

    def _empty_data(self):
        return any(part is not None and part.numel() == 0 for part in self._parts()[:2])

    def _dequantize(self, dtype):
        dtype = self._dtype if dtype is None else dtype
        if dtype not in _bridge.FLOATS:
            raise _library.DtypeError(f"values can be had in float32, float16 and bfloat16, not in {dtype}")
        data = [part for part in self._parts()[:2] if part is not None]
        if not data:
            raise _library.NoDataError(f"{type(self).__name__} has no data")
        if _bridge.is_fake(data[0]):
            return _ops.traced_values(self._parts(), self._struct(), self._dtype, self.shape, dtype)
        device = data[0].device
        out = torch.empty(tuple(self.shape), dtype=dtype, device=device if _bridge.on_gpu(data[0]) else "cpu")
        if out.numel():
            with self._native() as native:
                lib.nib_dequantize(native.handle, Usage.EITHER, _bridge.array(out))
        return out if out.device == device else out.to(device)

    def dequantize(self, dtype=None):
        """The values, in the nominal dtype or another."""
        return self._dequantize(dtype)

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        wanted = [-1 if usage is None else int(bool(usage)) for usage in (rowwise_usage, columnwise_usage)]
        there = self.get_usages()
        if all(want == -1 or bool(want) == has for want, has in zip(wanted, there.values())):
            return
        self._change(lib.nib_tensor_update_usage, *wanted)

    def _create_columnwise(self):
        """Build the columnwise usage from the rowwise one."""
        struct, parts = self._struct(), self._parts()
        if not _bridge.on_gpu(self):
            return self._change(lib.nib_tensor_update_usage, 1, 1)
        struct.columnwise = 1
        fresh = _bridge.empty_parts(struct, tuple(self.shape), self.device)
        parts[1::2] = fresh[1::2]
        with _bridge.Native(struct, self._dtype, tuple(self.shape), parts, columnwise_valid=False) as native:
            lib.nib_tensor_update_usage(native.handle, 1, 1)
            self._assign(native.parts())

    def view(self, *shape):
        shape = _storage_view_shape(self, shape)
        if shape is None:
            return self
        parts = self._parts()  # the last dim stays, so the matrix behind the shape does too: no byte moves
        row = parts[_library.Part.ROW_DATA]
        if row is not None:
            parts[_library.Part.ROW_DATA] = row.view((*shape[:-1], row.shape[-1]))
        return self._like(parts, shape)

    # -- torch.compile --

    def __tensor_flatten__(self):
        names = [field.name for field in self.FIELDS if getattr(self, field.name) is not None]
        context = {"cls": type(self), "is_tensor": isinstance(self, torch.Tensor),
                   "requires_grad": getattr(self, "requires_grad", False), "dtype": self._dtype,
                   "shape": tuple(self.shape), "nontensor_kwargs": self._clone_state()}
        return names, context

    @classmethod
    def __metadata_guard__(cls, one, other):
        """Whether a graph that was made for one context serves another."""
        def facts(context):
            state = dict(context["nontensor_kwargs"])
            quantizer = state.pop("quantizer")
            return {**context, "nontensor_kwargs": state}, quantizer and (type(quantizer), quantizer._options())
        return facts(one) == facts(other)

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size=None, outer_stride=None):
        cls = context["cls"]
        buffers = {field.keyword: inner_tensors.get(field.name) for field in cls.FIELDS}
        shape = tuple(context["shape"]) if outer_size is None else outer_size
        if not context["is_tensor"]:
            return cls(**buffers, **context["nontensor_kwargs"], fake_dtype=context["dtype"], shape=shape)
        device = next((t.device for t in inner_tensors.values()), None)
        return cls(shape=shape, dtype=context["dtype"], **buffers, **context["nontensor_kwargs"], device=device,
                   requires_grad=context["requires_grad"], stride=outer_stride)


def _storage_view_shape(storage, shape):
    """The shape of a view, None for the same one; RuntimeError where the last dim would change."""
    if not shape or shape == (None,):
        return None
    old = storage.size()
    new = _resolve_shape(shape, math.prod(old))
    if tuple(new) == tuple(old):
        return None
    if len(new) == 0 or len(old) == 0 or new[-1] != old[-1]:
        raise RuntimeError(f"{type(storage).__name__}: a view keeps the last dim, but {tuple(old)} would become "
                           f"{tuple(new)}")
    return new


class FormatTensor:
    """What makes a storage of a format a torch.Tensor: XTensor(FormatTensor, XTensorStorage, QuantizedTensor)."""

    BLOCK_ROWS = 0  # between how many rows a tensor can be cut into quantized ones; 0: nowhere
    TRANSIENT = ()  # attributes that mean something to this object alone: no copy and no pickle has them
    COLUMN_IS_SHAPED = False  # columnwise data has the shape of the tensor

    shape = QuantizedTensor.shape
    size = torch.Tensor.size
    device = property(lambda self: torch.Tensor.device.__get__(self))
    __repr__ = QuantizedTensor.__repr__
    _ViewFunc = _ReshapeFunc = _CallFunc

    @eager
    def dequantize(self, dtype=None):
        if torch.is_grad_enabled():
            return _DequantizeFunc.apply(self, dtype)
        return self._dequantize(dtype)

    def quantize_(self, tensor, *, noop_flag=None):
        return QuantizedTensorStorage.quantize_(self, tensor, noop_flag=noop_flag)

    def _copy_bytes(self, src):
        """Copy the bytes of a tensor that means the same and has every usage that this one has; otherwise False."""
        if not isinstance(src, self.storage_class) or tuple(src.shape) != tuple(self.shape):
            return False
        theirs = src.get_usages()
        if any(has and not theirs[name] for name, has in self.get_usages().items()):
            return False
        if any(part is not None and _bridge.is_fake(part) for part in (*self._parts(), *src._parts())):
            return self._copy_traced(src)
        parts = [None if part is None else part.to(self.device) for part in src._parts()]
        source = _bridge.Native(src._struct(), self._dtype, tuple(src.shape), parts)
        with self._native() as native, source as other:
            status = raw.nib_tensor_copy(native.handle, other.handle)
            if status in (_library.MismatchError.status, _library.UsageError.status):
                return False
            if status:
                _library.fail(status)
            self._assign(native.parts())
        _bridge.changed(self._parts())
        return True

    def _copy_traced(self, src):
        """The same within a graph: buffer by buffer, where both say the same about them."""
        if any(getattr(self, name) != getattr(src, name) for name, _keyword in self.STATE) \
                or bytes(self._struct()) != bytes(src._struct()):
            return False
        for field in self.FIELDS:
            here = getattr(self, field.name)
            if here is not None:
                here.copy_(getattr(src, field.name))
        return True

    def _clone(self):
        parts = [None if part is None else part.clone() for part in self._parts()]
        return self._like(parts, self.shape)

    @eager
    def clone(self, *, memory_format=torch.preserve_format):
        """A copy of every buffer, as a tensor of the same class; the gradient passes through."""
        return _CallFunc.apply(self, type(self)._clone)

    def _view(self, shape):
        return FormatStorage.view(self, shape)

    @eager
    def view(self, *shape):
        """Another shape over the same bytes. Where the last dim changes the bytes cannot tell the tale: a warning, and
        the values."""
        shape = _resolve_shape(shape, self.numel())
        if len(shape) == 0 or self.dim() == 0 or shape[-1] != self.shape[-1]:
            warnings.warn(f"{type(self).__name__}: a view that changes the last dim, from {tuple(self.shape)} to "
                          f"{tuple(shape)}, dequantizes")
            return self.dequantize().view(shape)
        return _CallFunc.apply(self, lambda tensor: tensor.detach() if shape == tensor.shape else tensor._view(shape))

    def reshape(self, *shape):
        return self.view(*shape)

    def contiguous(self, memory_format=torch.contiguous_format):
        """Itself: buffers are contiguous. ValueError where somebody attached one that is not."""
        for part in self._parts()[:2]:
            if part is not None:
                if part.is_contiguous(memory_format=memory_format):
                    return self
                raise ValueError(f"{type(self).__name__} does not support different memory formats")
        return self

    # -- data --

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, tensor):
        """A tensor of the same class: take over its buffers. Any other: quantize it into this one."""
        if isinstance(tensor, self.storage_class):
            self._look_like(tensor)
            for field in self.FIELDS:
                setattr(self, field.name, getattr(tensor, field.name))
            for name, _keyword in self.STATE:
                setattr(self, name, getattr(tensor, name))
            self._quantizer = tensor._quantizer.copy() if tensor._quantizer is not None else None
            return
        if self._quantizer is None:
            raise AssertionError("Can't quantize without a quantizer")
        self._quantizer.internal = False
        if tensor.shape != self.shape:  # new buffers: a transpose that was there is gone with the old ones
            fresh = self._quantizer.quantize_impl(tensor.detach())
            self._look_like(tensor)
            self._assign(fresh._parts())
            self._follow(self._quantizer)
        else:
            self._quantizer.update_quantized(tensor, self)
            self._look_like(tensor)
        if self.requires_grad != tensor.requires_grad:
            self.requires_grad_(requires_grad=tensor.requires_grad)

    def _look_like(self, tensor):
        """Take over shape and dtype, as PyTorch sees them."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            dummy = torch.Tensor._make_wrapper_subclass(
                type(self), tensor.shape, strides=_stride_from_shape(tensor.shape), dtype=tensor.dtype,
                layout=torch.strided, requires_grad=tensor.requires_grad, device=self.device)
            torch.Tensor.data.__set__(self, dummy)
            self._dtype = tensor.dtype

    # -- pickling --

    def __reduce_ex__(self, protocol):
        buffers = {field.keyword: getattr(self, field.name) for field in self.FIELDS}
        return self._reduced(_rebuild, (type(self), self.shape, self.dtype, buffers, self._clone_state()))

    def _reduced(self, function, arguments):
        attributes = self._attributes()
        return (function, arguments, attributes) if attributes else (function, arguments)

    def __setstate__(self, attributes):
        self.__dict__.update(attributes)

    def _attributes(self):
        """What others have attached to the object; nn.Parameter does."""
        known = {"_dtype", "_quantizer", "_prepared", *self.TRANSIENT, *(f.name for f in self.FIELDS),
                 *(name for name, _ in self.STATE)}
        return {name: value for name, value in self.__dict__.items() if name not in known}

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            other = self._clone()
        memo[id(self)] = other
        other.requires_grad_(self.requires_grad)
        if self.grad is not None:
            other.grad = copy.deepcopy(self.grad, memo)
        for name, value in self._attributes().items():
            setattr(other, name, copy.deepcopy(value, memo))
        return other

    # -- dispatch --

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if args and isinstance(args[0], FormatTensor):
            if func == aten.alias.default:  # tensor[:]
                return args[0].detach()
            handler = args[0].HANDLERS.get(func)
            if handler is not None:
                result = handler(args[0], func, args, kwargs)
                if result is not NotImplemented:
                    return result
        return QuantizedTensor.__torch_dispatch__.__func__(cls, func, types, args, kwargs)


def _rebuild(cls, shape, dtype, buffers, state):
    """Unpickle. Without gradient: who wants one asks for it."""
    return cls(shape=torch.Size(shape), dtype=dtype, **buffers, **state)


torch.serialization.add_safe_globals([_rebuild])


# ---- Modules ---------------------------------------------------------------------------------------------


def _cast_modules():
    """Module.float(), half() and bfloat16() change the nominal dtype of quantized parameters, and do not turn these
    into plain ones."""
    for name, dtype in (("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        def cast(tensor, name=name, dtype=dtype):
            if isinstance(tensor, QuantizedTensor):
                return tensor if tensor.dtype == dtype else type(tensor).make_like(tensor, dtype=dtype)
            return getattr(tensor, name)() if tensor.is_floating_point() else tensor

        def cast_module(self, cast=cast):
            return self._apply(cast)
        cast_module.__name__, cast_module.__doc__ = name, getattr(torch.nn.Module, name).__doc__
        setattr(torch.nn.Module, name, cast_module)


_cast_modules()

# ---- Handlers of dispatched operations ---------------------------------------------------------------------

# handler(tensor, func, args, kwargs): a result, or NotImplemented for what the base does. Formats put them together in
# their HANDLERS.


def view_handler(tensor, func, args, kwargs):
    shape = _resolve_shape((args[1],), tensor.numel())
    return tensor.detach() if shape == tensor.shape else tensor.view(shape)


def is_full_slice(tensor, args):
    """Whether slice.Tensor(self, dim=0, start=None, end=None, step=1) takes everything."""
    dim, start, end, step = [*args[1:], *(0, None, None, 1)[len(args) - 1:]]
    size = tensor.shape[dim]
    return (start is None or start == 0 or start <= -size) and (end is None or end >= size) and step == 1


def is_same_strides(tensor, args):
    """Whether as_strided(self, size, stride, storage_offset=None) changes nothing."""
    offset = args[3] if len(args) > 3 else None
    return tuple(args[1]) == tuple(tensor.shape) and tuple(args[2]) == tuple(tensor.stride()) and not offset


def _whole_blocks(tensor, rows):
    return tensor.BLOCK_ROWS and rows and rows % tensor.BLOCK_ROWS == 0


def split_handler(tensor, func, args, kwargs):
    """split(size, dim=0) between blocks of rows: tensors with bytes of their own."""
    size, dim = args[1], args[2] if len(args) > 2 else kwargs.get("dim", 0)
    inner = tensor.numel() // tensor.shape[0] // tensor.shape[-1] if tensor.numel() else 0
    if dim not in (0, -tensor.dim()) or tensor.dim() < 2 or not _whole_blocks(tensor, size * inner) \
            or tensor._with_gemm_swizzled_scales:
        return NotImplemented
    return [rows_of(tensor, first, min(size, tensor.shape[0] - first)) for first in range(0, tensor.shape[0], size)]


def rows_of(tensor, first, count):
    """tensor[first:first + count], cut between blocks, with bytes of its own."""
    inner = tensor.numel() // tensor.shape[0] // tensor.shape[-1]
    parts, _shape = tensor._derive(lib.nib_tensor_slice, first * inner, count * inner)
    shape = torch.Size((count, *tensor.shape[1:]))
    row, col = parts[_library.Part.ROW_DATA], parts[_library.Part.COL_DATA]
    parts[_library.Part.ROW_DATA] = None if row is None else row.view(*shape[:-1], row.shape[-1])
    if col is not None and tensor.COLUMN_IS_SHAPED:
        parts[_library.Part.COL_DATA] = col.view(shape)
    return tensor._like(parts, shape)


def new_zeros_handler(tensor, func, args, kwargs):
    """Quantized zeros where a matrix of whole blocks is asked for."""
    shape = torch.Size(args[1])
    rows = shape.numel() // shape[-1] if shape.numel() else 0
    if len(shape) < 2 or not _whole_blocks(tensor, rows) or shape[-1] % tensor.BLOCK_ROWS:
        return NotImplemented
    quantizer = tensor._get_quantizer().copy()
    quantizer.internal = False
    quantizer.set_usage(**tensor.get_usages())
    return quantizer.make_empty(shape, dtype=kwargs.get("dtype") or tensor.dtype,
                                device=kwargs.get("device") or tensor.device)


def record_stream_handler(tensor, func, args, kwargs):
    for part in tensor._parts():
        if part is not None and part.device.type != "cpu":  # host memory belongs to no stream
            func(part, args[1])
