# SPDX-License-Identifier: Apache-2.0
"""What all quantised tensors have in common.

    Quantizer                 how to quantise; `quantize` makes a tensor, `update_quantized` fills one that exists
    QuantizedTensorStorage    the buffers of a quantised tensor, no torch.Tensor
    QuantizedTensor           the same as a torch.Tensor: operations dequantise, or work on the bytes where they can

A format is three classes on top of these: XQuantizer, XTensorStorage and XTensor. All of it that does not depend on the
format is here, written once over the library: FormatQuantizer, FormatStorage and FormatTensor. A format's storage says
in FIELDS which attribute is which buffer of a nib_tensor and in STATE what else its constructor takes; its quantizer
fills in a nib_quantizer. That is all a format must bring; the rest of its module is what is special about it.
"""
import abc
import copy
import ctypes
import math
import warnings
from collections import namedtuple

import torch
from torch.utils._pytree import tree_map

from .. import _library
from .._library import Copy, lib, raw, shape_array
from . import _bridge, _ops

aten = torch.ops.aten

# Operations that are handed the quantised tensors as they are.
_quantized_tensor_passthrough_ops = set()

# attribute, keyword of the constructor, number in nib_part
Field = namedtuple("Field", "name keyword part")


# ---- Saving ----------------------------------------------------------------------------------------------


def prepare_for_saving(*tensors):
    """Take tensors, storages and None apart for ctx.save_for_backward: (flat list of tensors, list of objects).
    Tensors, quantised ones among them, stay whole; a storage leaves its buffers in the first list and itself, empty,
    in the second."""
    tensor_list, tensor_objects_list = [], []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            tensor_list.append(tensor)
            tensor_objects_list.append(None)
        else:
            buffers, storage = tensor.prepare_for_saving()
            tensor_list.extend(buffers)
            tensor_objects_list.append(storage)
    return tensor_list, tensor_objects_list


def restore_from_saved(tensors, saved_tensors, return_saved_tensors=False):
    """Put together what prepare_for_saving took apart. Takes (objects, flat list), as TransformerEngine does, and (flat
    list, objects), the order in which prepare_for_saving returns them: only the flat list holds tensors, only the other
    one storages."""
    tensors, saved_tensors = list(tensors), list(saved_tensors)

    def holds(items, kind):
        return any(isinstance(item, kind) for item in items)

    def has_storage(items):
        return any(item is not None and not isinstance(item, torch.Tensor) for item in items)

    if has_storage(saved_tensors) or (holds(tensors, torch.Tensor) and not holds(saved_tensors, torch.Tensor)
                                      and not has_storage(tensors)):
        tensors, saved_tensors = saved_tensors, tensors
    restored = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            restored.append(saved_tensors[0])
            saved_tensors = saved_tensors[1:]
        else:
            saved_tensors = tensor.restore_from_saved(saved_tensors)
            restored.append(tensor)
    return (restored, saved_tensors) if return_saved_tensors else restored


def restore_from_func_ctx(ctx, return_saved_tensors=False):
    """restore_from_saved for an autograd function that kept ctx.tensor_objects; works once, to free memory."""
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("ctx must have .tensor_objects to restore saved tensors, and they can be restored once")
    restored = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors=return_saved_tensors)
    ctx.tensor_objects = None
    return restored


# ---- Autograd --------------------------------------------------------------------------------------------


class _QuantizeFunc(torch.autograd.Function):
    """Quantise; the gradient passes straight through."""

    @staticmethod
    def forward(ctx, tensor, quantize):
        return quantize(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _DequantizeFunc(torch.autograd.Function):
    """Dequantise; the gradient passes straight through."""

    @staticmethod
    def forward(ctx, tensor_storage, dtype):
        return tensor_storage._dequantize(dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _IdentityFunc(torch.autograd.Function):
    """The same tensor as a new object, with some constructor arguments replaced."""

    @staticmethod
    def forward(ctx, tensor, init_kwargs=None):
        ctx.input_dtype = tensor.dtype
        if init_kwargs is None:
            return tensor.detach()
        metadata = {**tensor.get_metadata(), **init_kwargs}
        metadata["fake_dtype"] = metadata.get("dtype", tensor.dtype)
        return type(tensor)(tensor.shape, metadata.pop("dtype", tensor.dtype), **metadata)

    @staticmethod
    def backward(ctx, grad):
        return (grad.to(ctx.input_dtype) if grad.dtype != ctx.input_dtype else grad), None


class _CallFunc(torch.autograd.Function):
    """A change of form that keeps the values: the gradient gets the form of the input."""

    @staticmethod
    def forward(ctx, tensor, call):
        ctx.shape = tensor.shape
        return call(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad.reshape(ctx.shape), None


def _stride_from_shape(shape):
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _resolve_shape(shape, numel):
    """A shape with at most one -1, resolved; RuntimeErrors as PyTorch has them."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    shape = [int(size) for size in shape]
    unknown = [i for i, size in enumerate(shape) if size == -1]
    if len(unknown) > 1:
        raise RuntimeError("only one dimension can be inferred")
    if any(size < -1 for size in shape):
        raise RuntimeError(f"invalid shape dimension in {shape}")
    if unknown:
        known = math.prod(size for size in shape if size != -1)
        if known == 0 or numel % known:
            raise RuntimeError(f"shape '{shape}' is invalid for input of size {numel}")
        shape[unknown[0]] = numel // known
    elif math.prod(shape) != numel:
        raise RuntimeError(f"shape '{shape}' is invalid for input of size {numel}")
    return torch.Size(shape)


# ---- Base classes ----------------------------------------------------------------------------------------


class QuantizedTensorStorage:
    """The buffers of a quantised tensor and what they mean."""

    _dtype: torch.dtype = torch.float32
    _quantizer = None

    def _lacks(self, function):
        return NotImplementedError(f"{type(self).__name__} class does not implement {function}")

    @property
    def shape(self):
        return torch.Size(self.size())

    def size(self, dim=None):
        raise self._lacks("size")

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        """Create, keep (True), drop (False) or leave (None) a copy."""
        raise self._lacks("update_usage")

    def get_usages(self):
        """{"rowwise": bool, "columnwise": bool}: which copies hold data."""
        raise self._lacks("get_usages")

    def get_metadata(self):
        """The keyword arguments that would construct this object again."""
        raise self._lacks("get_metadata")

    def prepare_for_saving(self):
        """Move the buffers out: (list of tensors or None, self)."""
        raise self._lacks("prepare_for_saving")

    def restore_from_saved(self, tensors):
        """Move the buffers in from the front of the list; returns the rest of it."""
        raise self._lacks("restore_from_saved")

    def clear(self):
        """Free the buffers."""
        raise self._lacks("clear")

    def copy_from_storage(self, src):
        """Copy buffer for buffer from a storage of the same class."""
        raise self._lacks("copy_from_storage")

    def _build_default_quantizer(self):
        raise ValueError(f"{type(self).__name__} has no quantizer and no default: attach one, or quantize with it")

    def _get_quantizer(self):
        return self._quantizer if self._quantizer is not None else self._build_default_quantizer()

    def quantize_(self, tensor, *, noop_flag=None):
        """Quantise into this object, in place."""
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def update_quantizer(self, quantizer):
        """Replace the quantizer."""
        if self._quantizer is None:
            raise RuntimeError("To be able to update the quantizer, an initial quantizer must be set")
        if self._quantizer is not quantizer:
            warnings.warn("Quantizer is being updated, this may affect model behavior")
            self._quantizer = quantizer

    # What FSDP gathers.

    def fsdp_buffer_fields(self):
        """The attributes to gather, in order."""
        raise self._lacks("fsdp_buffer_fields")

    def fsdp_extract_buffers(self):
        names = tuple(self.fsdp_buffer_fields())
        return tuple(getattr(self, name) for name in names), {"field_names": names}

    def fsdp_assign_gathered(self, gathered, meta):
        names = meta["field_names"]
        if len(gathered) != len(names):
            raise RuntimeError(f"{len(gathered)} gathered buffers for the {len(names)} fields {names}")
        for name, value in zip(names, gathered):
            setattr(self, name, value)


class Quantizer(abc.ABC):
    """How to quantise. `rowwise_usage` and `columnwise_usage` say which copies to make, `internal` whether results are
    bare storages, `optimize_for_gemm` whether scales are in the GEMM's tiles. Plain attributes, all may be changed; a
    tensor keeps a copy."""

    def __init__(self, *, rowwise=True, columnwise=True):
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def __repr__(self):
        return f"{type(self).__name__}(rowwise_usage={self.rowwise_usage}, columnwise_usage={self.columnwise_usage}, " \
               f"internal={self.internal})"

    def _lacks(self, function):
        return NotImplementedError(f"{type(self).__name__} class does not implement {function}")

    def quantize(self, tensor, *, out=None, dtype=None):
        """Quantise a tensor, into `out` where that is given. Its gradient passes straight through. `dtype` is accepted
        and not looked at: the nominal dtype is the tensor's."""
        if out is not None:
            return self.update_quantized(tensor, out)
        if not self.internal and torch.is_grad_enabled():
            result = _QuantizeFunc.apply(tensor, self.quantize_impl)
        else:
            result = self.quantize_impl(tensor)
        kept = getattr(result, "_quantizer", None)
        if getattr(kept, "with_amax_reduction", False):  # a process group never stays with a tensor
            kept.with_amax_reduction = False
            kept.amax_reduction_group = None
        return result

    def __call__(self, tensor):
        return self.quantize(tensor)

    def quantize_impl(self, tensor):
        raise self._lacks("quantize_impl")

    def update_quantized(self, src, dst, *, noop_flag=None):
        raise self._lacks("update_quantized")

    def multi_quantize(self, list_of_tensors):
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def make_empty(self, shape, *, dtype=torch.float32, device=None, requires_grad=False, pin_memory=False):
        raise self._lacks("make_empty")

    def calibrate(self, tensor):
        """Take note of a tensor without quantising it; nothing to note by default."""

    def set_usage(self, *, rowwise=None, columnwise=None):
        """Which copies to make; None leaves as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self):
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self):
        raise self._lacks("copy")

    def onnx_quantize(self, tensor):
        raise self._lacks("onnx_quantize")

    def onnx_dequantize(self, tensor):
        raise self._lacks("onnx_dequantize")

    def _get_compatible_recipe(self):
        raise self._lacks("_get_compatible_recipe")

    def supports_only_rowwise_all_gather(self):
        return False

    def is_requantization_safe(self):
        return False

    def is_quantizable(self, inp):
        """Whether such a tensor can be gathered in quantised form."""
        return True


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """A quantised tensor that behaves as a torch.Tensor of its nominal dtype: where an operation cannot work on the
    bytes, its operands are dequantised; in-place operations quantise the result again."""

    def __new__(cls, shape, dtype, *, fake_dtype=None, requires_grad=False, device=None, stride=None, storage_offset=0):
        if fake_dtype is not None and fake_dtype != dtype:
            raise ValueError(f"fake_dtype ({fake_dtype}) must be dtype ({dtype})")
        instance = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=_stride_from_shape(shape) if stride is None else stride, storage_offset=storage_offset,
            dtype=dtype, layout=torch.strided, requires_grad=requires_grad,
            device=torch.device("cpu") if device is None else device)
        instance._dtype = dtype
        return instance

    __torch_function__ = torch._C._disabled_torch_function_impl

    shape = property(lambda self: torch.Tensor.shape.__get__(self))
    size = torch.Tensor.size

    @property
    def dtype(self):
        return self._dtype

    @dtype.setter
    def dtype(self, value):
        self._dtype = value

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self._dtype = value.dtype

    def dequantize(self, *, dtype=None):
        raise self._lacks("dequantize")

    def quantize_(self, tensor, *, noop_flag=None):
        raise self._lacks("quantize_")

    def _copy_bytes(self, src):
        """Copy the buffers of a tensor of the same kind that has the same copies; False where it is of another."""
        kinds = [type(tensor._quantizer) for tensor in (self, src)]
        if None in (self._quantizer, src._quantizer) or kinds[0] is not kinds[1] or src.shape != self.shape \
                or src.get_usages() != self.get_usages():
            return False
        mine, _ = self.prepare_for_saving()
        theirs, _ = src.prepare_for_saving() if src is not self else (mine, self)
        try:
            for here, there in zip(mine, theirs):
                if here is not None and there is not None:
                    here.copy_(there)
        finally:
            self.restore_from_saved(mine)
            if src is not self:
                src.restore_from_saved(theirs)
        return True

    def float(self):
        return self.dequantize(dtype=torch.float32)

    def half(self):
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self):
        return self.dequantize(dtype=torch.bfloat16)

    def cpu(self, memory_format=torch.preserve_format):
        return self.to(device=torch.device("cpu"), memory_format=memory_format)

    def untyped_storage(self):
        """Empty: the bytes are in the buffers."""
        return torch.UntypedStorage(0, device=self.device)

    def expand_as(self, other):
        if other is self:  # DDP asks for a node of the graph in this way
            return _IdentityFunc.apply(self)
        return super().expand_as(other)

    def detach(self):
        return type(self).make_like(self)

    def to_dtype(self, dtype):
        """The same data under another nominal dtype."""
        return type(self).make_like(self, dtype=dtype)

    @classmethod
    def make_like(cls, tensor, *, shape=None, dtype=None, requires_grad=False, data=None):
        """A new object over the same buffers."""
        shape = tensor.shape if shape is None else shape
        dtype = tensor.dtype if dtype is None else dtype
        kwargs = {**tensor.get_metadata(), "fake_dtype": dtype}
        if data is not None:
            kwargs["data"] = data
        return cls(shape=shape, dtype=dtype, requires_grad=requires_grad, **kwargs)

    def __repr__(self, *, tensor_contents=None):
        try:
            return f"{type(self).__name__}(data={self.dequantize()})"
        except Exception:  # a repr never raises
            return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = {} if kwargs is None else kwargs

        if func == aten.detach.default:
            return args[0].detach()
        if func == aten.copy_.default:
            return _copy_(*args[:2])
        if func == aten._to_copy.default and isinstance(args[0], QuantizedTensor):
            moved = _to_copy(args[0], kwargs)
            if moved is not None:
                return moved
        if func == aten.view.default and isinstance(args[0], QuantizedTensor):
            raise NotImplementedError(f"{type(args[0]).__name__} class does not support tensor views")
        if func == aten.new_empty.default and isinstance(args[0], QuantizedTensor):
            tensor, size = args[0], args[1]
            if tensor._quantizer is None:
                raise RuntimeError(f"{type(tensor).__name__} has no quantizer: cannot make an empty one like it")
            return tensor._quantizer.make_empty(size, dtype=kwargs.get("dtype") or tensor.dtype)
        if func == aten.empty_like.default and isinstance(args[0], QuantizedTensor):
            return _empty_like(args[0], kwargs)
        if func == aten.numel.default:
            return math.prod(args[0].size())
        if func == aten.is_pinned.default:
            for part in args[0].get_data_tensors():
                if part is not None:
                    return func(part)
            return False
        if func in _quantized_tensor_passthrough_ops:
            return func(*args, **kwargs)
        return _on_values(func, args, kwargs)


def _on_values(func, args, kwargs):
    """An operation on dequantised operands. Those that it writes to are quantised again."""
    def plain(value):
        return value.dequantize() if isinstance(value, QuantizedTensor) else value

    if not func._schema.is_mutable:
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))

    dequantized = {}  # one for each tensor, though it be given twice

    def plain_once(value):
        if not isinstance(value, QuantizedTensor):
            return value
        if id(value) not in dequantized:
            dequantized[id(value)] = value.dequantize()
        return dequantized[id(value)]

    result = func(*tree_map(plain_once, args), **tree_map(plain_once, kwargs))
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, QuantizedTensor) and not any(tensor is other for other in written):
                tensor.quantize_(dequantized[id(tensor)])
                written.append(tensor)
    back = {id(dequantized[id(tensor)]): tensor for tensor in written}
    return tree_map(lambda value: back.get(id(value), value) if isinstance(value, torch.Tensor) else value, result)


def _copy_(dst, src):
    if isinstance(dst, QuantizedTensor):
        if not (isinstance(src, QuantizedTensor) and dst._copy_bytes(src)):
            dst.quantize_(src)
        return dst
    dst.copy_(src.dequantize(dtype=dst.dtype if dst.dtype in _bridge.FLOATS else torch.float32))
    return dst


def _to_copy(tensor, kwargs):
    """A copy on another device, as the same class; None where the dtype changes."""
    if kwargs.get("dtype") not in (None, tensor.dtype):
        return None
    device = kwargs.get("device") or tensor.device
    metadata = {}
    for name, value in tensor.get_metadata().items():
        if isinstance(value, torch.Tensor):
            value = value.to(device=device, non_blocking=bool(kwargs.get("non_blocking")), copy=True)
        metadata[name] = value
    metadata["fake_dtype"] = tensor.dtype
    return type(tensor)(shape=tensor.shape, dtype=tensor.dtype, device=device, **metadata)


def _empty_like(tensor, kwargs):
    quantizer = tensor._get_quantizer().copy()
    quantizer.internal = False
    usages = tensor.get_usages()
    quantizer.set_usage(**usages)
    return quantizer.make_empty(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype,
                                device=kwargs.get("device"), pin_memory=bool(kwargs.get("pin_memory")))


# ---- What formats have in common -------------------------------------------------------------------------


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

    def _numbers(self, tensor):
        """nib_given for a quantisation, or None."""
        return None

    def _reduction(self, dst=None):
        """The communicator to reduce amaxes over, or None."""
        if getattr(self, "with_amax_reduction", False):
            return _bridge.communicator(self.amax_reduction_group)
        return None

    def _call(self, tensor, dst, call):
        """call(struct, given) with everything set that belongs to one quantisation."""
        struct = self._struct()
        if struct.rounding:
            _bridge.draw(struct)
        given = self._numbers(tensor)
        communicator = self._reduction(dst)
        if communicator is None:
            return call(struct, given)
        with communicator as comm:
            struct.amax_comm = ctypes.pointer(comm)
            return call(struct, given)

    def quantize_impl(self, tensor):
        if isinstance(tensor, QuantizedTensor):
            tensor = tensor.dequantize()
        _check_float(tensor)
        if _bridge.is_fake(tensor):
            return self._wrap(tensor.shape, tensor.dtype, self._traced(tensor))
        source = tensor.detach()
        parts = self._call(source, None, lambda struct, given: _bridge.quantize(struct, source, given))
        return self._wrap(tensor.shape, tensor.dtype, parts)

    def update_quantized(self, src, dst, *, noop_flag=None):
        if not isinstance(dst, self.tensor_class.storage_class):
            raise ValueError(f"{type(self).__name__} can only update {self.tensor_class.storage_class.__name__}s, "
                             f"not {type(dst).__name__}")
        if isinstance(src, QuantizedTensor):
            src = src.dequantize()
        _check_float(src)
        if _bridge.is_fake(src):
            return self._update_traced(src, dst, noop_flag)
        src = _bridge.host(src.detach())
        noop = None
        if noop_flag is not None:
            if noop_flag.dtype != torch.float32 or noop_flag.numel() != 1:
                raise ValueError(f"a no-op flag is one float32, not {noop_flag.numel()} of {noop_flag.dtype}")
            noop = ctypes.c_float(float(noop_flag))
        if tuple(src.shape) != tuple(dst.shape):
            raise ValueError(f"a tensor of shape {tuple(src.shape)} does not fit into one of {tuple(dst.shape)}")
        with dst._native() as native:
            self._call(src, dst, lambda struct, given: lib.nib_quantize_into(
                struct, _bridge.array(src), given, noop, native.handle))
            if noop is None or noop.value != 1.0:
                dst._assign(native.parts())
                dst._follow(self)
        return dst

    def _traced(self, tensor):
        if self._reduction() is not None:
            raise _library.UnsupportedError("a reduction of amaxes cannot be part of a compiled graph")
        return _ops.traced_parts(tensor, self._struct(), getattr(self, "scale", None))

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
        """The result of a quantisation: a tensor, or a bare storage where `internal`."""
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
        other = copy.copy(self)
        other.__dict__ = dict(self.__dict__)
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
        raise _library.DtypeError(f"{tensor.dtype} cannot be quantised: float32, float16 and bfloat16 can")


class FormatStorage(QuantizedTensorStorage):
    """A storage of one of the library's formats."""

    FIELDS = ()  # Fields in the order of the constructor
    SAVED = ()  # their names in the order in which they are saved
    STATE = ()  # (attribute, keyword) of everything else that the constructor takes, but for quantizer and fake_dtype
    COLUMN_KEEPS_RANK = False  # columnwise data is [K, d0, d1, ...] instead of [K, M]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._INNER_TENSORS = {field.name: field.keyword for field in cls.FIELDS}

    @classmethod
    def _construct(cls, buffers, state, quantizer, fake_dtype, args, kwargs):
        """A new object: buffers and state by keyword, the rest of the arguments as constructors got them. Those of a
        bare storage may have a shape among them; the others mean nothing to it."""
        if issubclass(cls, torch.Tensor):
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
        if not cls.COLUMN_KEEPS_RANK or col is None or len(shape) == 2:
            return parts
        parts = list(parts)
        parts[_library.Part.COL_DATA] = col.view((shape[-1], *shape[:-1]) if len(shape) else ())
        return parts

    # -- to and from the library --

    def _struct(self):
        """A nib_quantizer that says what the bytes are."""
        raise NotImplementedError

    def _parts(self):
        parts = [None] * _library.PART_COUNT
        for field in self.FIELDS:
            parts[field.part] = getattr(self, field.name)
        return parts

    def _native(self):
        return _bridge.Native(self._struct(), self._dtype, tuple(self.shape), self._parts())

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
        out = torch.empty(tuple(self.shape), dtype=dtype)
        if not out.numel():
            return out
        with self._native() as native:
            lib.nib_dequantize(native.handle, Copy.EITHER, _bridge.array(out))
        return out if data[0].device.type == "cpu" else out.to(data[0].device)

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
        """Build the columnwise copy from the rowwise one."""
        self._change(lib.nib_tensor_update_usage, 1, 1)

    def view(self, *shape):
        shape = _storage_view_shape(self, shape)
        if shape is None:
            return self
        parts, shape = self._derive(lib.nib_tensor_view, len(shape), shape_array(shape))
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

    shape = QuantizedTensor.shape
    size = torch.Tensor.size
    device = property(lambda self: torch.Tensor.device.__get__(self))
    __repr__ = QuantizedTensor.__repr__
    _ViewFunc = _ReshapeFunc = _CallFunc

    def dequantize(self, dtype=None):
        if torch.is_grad_enabled():
            return _DequantizeFunc.apply(self, dtype)
        return self._dequantize(dtype)

    def quantize_(self, tensor, *, noop_flag=None):
        return QuantizedTensorStorage.quantize_(self, tensor, noop_flag=noop_flag)

    def _copy_bytes(self, src):
        """Copy the bytes of a tensor that means the same and has every copy that this one has; otherwise False."""
        if not isinstance(src, self.storage_class) or tuple(src.shape) != tuple(self.shape):
            return False
        theirs = src.get_usages()
        if any(has and not theirs[name] for name, has in self.get_usages().items()):
            return False
        source = _bridge.Native(src._struct(), self._dtype, tuple(src.shape), src._parts())
        with self._native() as native, source as other:
            status = raw.nib_tensor_copy(native.handle, other.handle)
            if status in (_library.MismatchError.status, _library.UsageError.status):
                return False
            if status:
                _library.fail(status)
            self._assign(native.parts())
        return True

    def _clone(self):
        parts = [None if part is None else part.clone() for part in self._parts()]
        return self._like(parts, self.shape)

    def clone(self, *, memory_format=torch.preserve_format):
        """A copy of every buffer, as a tensor of the same class; the gradient passes through."""
        return _CallFunc.apply(self, type(self)._clone)

    def _view(self, shape):
        return FormatStorage.view(self, shape)

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
        """A tensor of the same class: take over its buffers. Any other: quantise it into this one."""
        if isinstance(tensor, self.storage_class):
            if tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
                dummy = torch.Tensor._make_wrapper_subclass(
                    type(self), tensor.shape, strides=_stride_from_shape(tensor.shape), dtype=tensor.dtype,
                    layout=torch.strided, requires_grad=tensor.requires_grad, device=tensor.device)
                torch.Tensor.data.__set__(self, dummy)
                self._dtype = tensor.dtype
            for field in self.FIELDS:
                setattr(self, field.name, getattr(tensor, field.name))
            for name, _keyword in self.STATE:
                setattr(self, name, getattr(tensor, name))
            self._quantizer = tensor._quantizer.copy() if tensor._quantizer is not None else None
            return
        if self._quantizer is None:
            raise AssertionError("Can't quantize without a quantizer")
        self._quantizer.internal = False
        self._quantizer.update_quantized(tensor, self)
        if self.requires_grad != tensor.requires_grad:
            self.requires_grad_(requires_grad=tensor.requires_grad)

    # -- pickling --

    def __reduce_ex__(self, protocol):
        buffers = {field.keyword: getattr(self, field.name) for field in self.FIELDS}
        return _rebuild, (type(self), self.shape, self.dtype, buffers, self._clone_state(), self._attributes())

    def _attributes(self):
        """What others have attached to the object."""
        known = {"_dtype", "_quantizer", *(f.name for f in self.FIELDS), *(name for name, _ in self.STATE)}
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


def _rebuild(cls, shape, dtype, buffers, state, attributes):
    """Unpickle. Without gradient: who wants one asks for it."""
    tensor = cls(shape=torch.Size(shape), dtype=dtype, **buffers, **state)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


torch.serialization.add_safe_globals([_rebuild])


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


def record_stream_handler(tensor, func, args, kwargs):
    for part in tensor._parts():
        if part is not None and part.device.type != "cpu":  # host memory belongs to no stream
            func(part, args[1])
