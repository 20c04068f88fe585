# SPDX-License-Identifier: Apache-2.0
"""What all quantized tensors have in common.

    Quantizer                 how to quantize; `quantize` makes a tensor, `update_quantized` fills one that exists
    QuantizedTensorStorage    the buffers of a quantized tensor, no torch.Tensor
    QuantizedTensor           the same as a torch.Tensor: operations dequantize, or work on the bytes where they can

Saving for autograd, the autograd functions and the dispatch of operations are here too. format_tensor.py has what the
library's formats share.
"""
import abc
import math
import sys
import warnings

import torch
from torch.utils._pytree import tree_map

from . import _bridge

aten = torch.ops.aten

# Operations that are handed the quantized tensors as they are.
_quantized_tensor_passthrough_ops = set()


def eager(function):
    """A function that torch.compile calls and does not trace: it ends in the library, which has nothing to trace. What
    torch has for this imports its compiler with the first call; that can wait until somebody else has imported it."""
    disable = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return function

    def untraced(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disabled = function.__dynamo_disable = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    function.__dynamo_disable = untraced
    return disable(function)


def is_dtensor(tensor):
    """Whether a tensor is a shard of FSDP2 and its like; without importing what makes them."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


# ---- Saving ----------------------------------------------------------------------------------------------


def prepare_for_saving(*tensors):
    """Take tensors, storages and None apart for ctx.save_for_backward: (flat list of tensors, list of objects).
    Tensors, quantized ones among them, stay whole; a storage leaves its buffers in the first list and itself, empty,
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
    """Quantize; the gradient passes straight through."""

    @staticmethod
    def forward(ctx, tensor, quantize):
        return quantize(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _DequantizeFunc(torch.autograd.Function):
    """Dequantize; the gradient passes straight through."""

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
    """The buffers of a quantized tensor and what they mean."""

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
        """Create, keep (True), drop (False) or leave (None) a usage."""
        raise self._lacks("update_usage")

    def get_usages(self):
        """{"rowwise": bool, "columnwise": bool}: which usages hold data."""
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
        """Quantize into this object, in place."""
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
    """How to quantize. `rowwise_usage` and `columnwise_usage` say which usages to make, `internal` whether results are
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

    @eager
    def quantize(self, tensor, *, out=None, dtype=None):
        """Quantize a tensor, into `out` where that is given. Its gradient passes straight through. `dtype` is accepted
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
        """Take note of a tensor without quantizing it; nothing to note by default."""

    def set_usage(self, *, rowwise=None, columnwise=None):
        """Which usages to make; None leaves as it is."""
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
        """Whether such a tensor can be gathered in quantized form."""
        return True


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """A quantized tensor that behaves as a torch.Tensor of its nominal dtype: where an operation cannot work on the
    bytes, its operands are dequantized; in-place operations quantize the result again."""

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
        """Copy the buffers of a tensor of the same kind that has the same usages; False where it is of another."""
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
            return tensor._quantizer.make_empty(size, dtype=kwargs.get("dtype") or tensor.dtype,
                                                device=kwargs.get("device") or tensor.device)
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
    """An operation on dequantized operands. Those that it writes to are quantized again."""
    def plain(value):
        return value.dequantize() if isinstance(value, QuantizedTensor) else value

    if not func._schema.is_mutable:
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))

    dequantized = {}  # one for each tensor, though it be there twice

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
                                device=kwargs.get("device") or tensor.device, pin_memory=bool(kwargs.get("pin_memory")))
