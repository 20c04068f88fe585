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
_increment_version = torch._C._increment_version
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
        self.array, self.overrides, self.struct = _bridge.array(src), Overrides(), struct
        self.native = _bridge.Native(struct, src.dtype, tuple(dst.shape), dst._parts())
        self.native.forget()
        self._point = _pointing(self.overrides, amax, src, struct)
        self.again = self._prepared(dict(quantizer.__dict__), src, dst)

    def __del__(self):
        native = self.__dict__.get("native")
        if native is not None:
            native.__exit__()

    def __reduce__(self):
        return _nothing, ()

    def _prepared(self, options, src, dst):
        """A function that does it if it is the same update, and otherwise is False and has done nothing. What it
        compares with is in its closure: looking all of that up in an object would take a third as long again."""
        array, overrides, struct, point = self.array, self.overrides, self.struct, self._point
        dtype, shape, stride, ordinal, contiguous = (src.dtype, src.shape, src.stride(), src.get_device(),
                                                     src.is_contiguous())
        here = [field.name for field in dst.FIELDS if getattr(dst, field.name) is not None]
        absent = [field.name for field in dst.FIELDS if field.name not in here]
        checks = [_unchanged(dst, names) for names in zip(*[iter(here)] * 3)]  # a usage: codes, scales, tensor scale
        first_parts, others = checks[0], checks[1:]
        versioned = not any(getattr(dst, name).is_inference() for name in here)
        state_of = operator.itemgetter("_dtype", "_quantizer", *(name for name, _keyword in dst.STATE), *absent)
        state = state_of(dst.__dict__)
        stream, random, handle = _stream(ordinal), bool(struct.rounding), self.native.handle.value
        first, second, third = (ctypes.addressof(one) for one in (struct, array, overrides))

        def again(quantizer, src, dst, amax, flag):
            nonlocal stream
            if src.dtype is not dtype or src.shape != shape or src.get_device() != ordinal or type(src) not in _PLAIN \
                    or not (src.is_contiguous() if contiguous else src.stride() == stride) or src.is_neg():
                return False
            now = dst.__dict__
            parts = first_parts(now)
            for parts_of in others:
                parts = parts and (more := parts_of(now)) and parts + more
            if not parts or state_of(now) != state or quantizer.__dict__ != options:
                return False
            point(amax, src)
            array.data = src.data_ptr()
            current = _stream(ordinal)
            if current != stream:
                array.device, stream = _bridge.device_of(src), current
            if random:
                drawn = _bridge.draw(struct, src, there=flag is not None)  # options follow no flag that nobody knows
                overrides.offset = None if drawn is None else drawn.data_ptr()
            status = _call(first, second, third, flag, handle)
            if status:
                _library.fail(status)
            if versioned:
                _increment_version(parts)
            else:
                _bridge.changed(parts)
            return True
        return again


def _unchanged(dst, names):
    """A function that gives three parts of a tensor's dict, or None where one is another by now, or elsewhere."""
    parts_of = operator.itemgetter(*names)
    parts = parts_of(dst.__dict__)
    (a_ref, b_ref, c_ref), (a_at, b_at, c_at) = (weakref.ref(p) for p in parts), (p.data_ptr() for p in parts)

    def unchanged(now):
        a, b, c = parts = parts_of(now)
        same = a is a_ref() and b is b_ref() and c is c_ref() \
            and a.data_ptr() == a_at and b.data_ptr() == b_at and c.data_ptr() == c_at
        return parts if same else None
    return unchanged


def _pointing(overrides, amax, src, struct):
    """A function that makes the overrides point to the caller's amax; it looks only at another one than the last."""
    amaxes, known, pointer = overrides.amax, None, None

    def point(amax, src):
        nonlocal known, pointer
        if amax is known and (amax is None or pointer is not None and amax.data_ptr() == pointer):
            return
        checked = _bridge.fitting_amaxes(struct, src.shape, checked_amaxes(amax, src))
        amaxes[0], amaxes[1] = (None if one is None else one.data_ptr() for one in checked)
        known, pointer = amax, amaxes[0] if type(amax) is torch.Tensor else None
    point(amax, src)
    return point


def _nothing():
    """What is left of an Update in a pickle, or in a copy of a tensor."""
