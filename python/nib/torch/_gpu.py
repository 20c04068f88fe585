# SPDX-License-Identifier: Apache-2.0
"""Updates on a GPU with everything prepared: a launch takes a few microseconds, and so should what is before it."""
import ctypes
import operator
import weakref

import torch

from .. import _library
from .._library import Overrides
from . import _bridge

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5)(("nib_quantize_into", ctypes.CDLL(_library.path)))
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0)  # a PyTorch without CUDA has none


def checked_amaxes(amax, src):
    """(rowwise, columnwise): what a caller gives as one tensor, or as one for each usage."""
    amaxes = tuple(amax) if isinstance(amax, (tuple, list)) else (amax, amax)
    for one in amaxes:
        if one is not None and (one.dtype != torch.float32 or one.device != src.device or not one.is_contiguous()):
            raise ValueError(f"an amax is float32 on {src.device}, not {one.dtype} on {one.device}")
    return amaxes


class Update:
    """An update of one tensor by one quantizer from tensors of one kind. Where nothing has changed since the last one,
    the call is all that is left of it."""

    def __init__(self, quantizer, src, dst, struct, amax):
        self.options, self.struct, self.kept = dict(quantizer.__dict__), struct, dst._quantizer
        self.shape, self.stride, self.dtype, self.ordinal = src.shape, src.stride(), src.dtype, src.get_device()
        self.state_of = operator.itemgetter("_dtype", *(name for name, _keyword in dst.STATE))
        self.state = self.state_of(dst.__dict__)
        self.fields = [(field.name, weakref.ref(part), part.data_ptr(), not part.is_inference())
                       for field in dst.FIELDS for part in (getattr(dst, field.name),) if part is not None]
        self.absent = [field.name for field in dst.FIELDS if getattr(dst, field.name) is None]
        self.array, self.overrides = _bridge.array(src), Overrides()
        self.amaxes = self.overrides.amax  # an object once and for all
        self.native = _bridge.Native(struct, src.dtype, tuple(dst.shape), dst._parts())
        self.native.forget()
        self.stream, self.random = _stream(self.ordinal), bool(struct.rounding)
        self.arguments = [ctypes.addressof(one) for one in (struct, self.array, self.overrides)]
        self.handle = self.native.handle.value
        self._point(amax, checked_amaxes(amax, src))

    def __del__(self):
        native = self.__dict__.get("native")
        if native is not None:
            native.__exit__()

    def __reduce__(self):
        return _nothing, ()

    def _point(self, amax, amaxes):
        self.amax = amax
        self.pointers = [None if one is None else one.data_ptr() for one in amaxes]
        self.amaxes[0], self.amaxes[1] = self.pointers

    def again(self, quantizer, src, dst, amax, flag):
        """Do it, if it is the same update; otherwise False, and nothing is done."""
        if src.dtype is not self.dtype or src.shape != self.shape or src.stride() != self.stride \
                or src.get_device() != self.ordinal or type(src) not in _PLAIN:
            return False
        now, written = dst.__dict__, []
        for name, ref, pointer, versioned in self.fields:
            part = now[name]
            if part is not ref() or part.data_ptr() != pointer:
                return False
            if versioned:
                written.append(part)
        for name in self.absent:
            if now[name] is not None:
                return False
        if now["_quantizer"] is not self.kept or self.state_of(now) != self.state \
                or quantizer.__dict__ != self.options:
            return False
        if amax is not self.amax or (amax is not None and (type(amax) is not torch.Tensor
                                                           or amax.data_ptr() != self.pointers[0])):
            self._point(amax, checked_amaxes(amax, src))
        self._run(src, flag)
        torch.autograd.graph.increment_version(written)
        return True

    def _run(self, src, flag):
        self.array.data = src.data_ptr()
        stream = _stream(self.ordinal)
        if stream != self.stream:
            self.array.device, self.stream = _bridge.device_of(src), stream
        if self.random:
            drawn = _bridge.draw(self.struct, src, there=flag is not None)  # a flag nobody knows may not change options
            self.overrides.offset = None if drawn is None else drawn.data_ptr()
        status = _call(*self.arguments, flag, self.handle)
        if status:
            _library.fail(status)


def _nothing():
    """What is left of an Update in a pickle, or in a copy of a tensor."""
