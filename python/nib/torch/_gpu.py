# SPDX-License-Identifier: Apache-2.0
"""Updates on a GPU with everything prepared: a launch takes a few microseconds, and so should what is before it."""
import ctypes
import weakref

from .. import _library
from .._library import Overrides, raw
from . import _bridge

class Update:
    """An update of one tensor by one quantizer from tensors of one kind, with everything prepared that stays. Where
    nothing has changed since, the call is all that is left of the next one."""

    def __init__(self, quantizer, src, dst, struct, amaxes):
        self.options, self.struct = dict(quantizer.__dict__), struct
        self.shape, self.stride, self.dtype, self.device = src.shape, src.stride(), src.dtype, src.device
        self.state = {name: getattr(dst, name) for name, _keyword in dst.STATE}
        self.kept = dst._quantizer
        self.fields = [(field.name, weakref.ref(part)) for field in dst.FIELDS  # buffers are not held by this
                       for part in (getattr(dst, field.name),) if part is not None]
        self.absent = [field.name for field in dst.FIELDS if getattr(dst, field.name) is None]
        self.pointers = [ref().data_ptr() for _name, ref in self.fields]
        self.given = [amax is not None for amax in amaxes]
        self.array, self.overrides = _bridge.array(src), Overrides()
        self.native = _bridge.Native(struct, src.dtype, tuple(dst.shape), dst._parts())
        self.native.forget()
        self.arguments = ctypes.byref(struct), ctypes.byref(self.array), ctypes.byref(self.overrides)

    def __del__(self):
        native = self.__dict__.get("native")
        if native is not None:
            native.__exit__()

    def __reduce__(self):
        return _nothing, ()

    def serves(self, quantizer, src, dst, amaxes):
        """Whether this is the same update again."""
        if src.dtype is not self.dtype or src.shape != self.shape or src.stride() != self.stride \
                or src.device != self.device or [amax is not None for amax in amaxes] != self.given:
            return False
        now = dst.__dict__
        for (name, ref), pointer in zip(self.fields, self.pointers):
            part = now[name]
            if part is None or part is not ref() or part.data_ptr() != pointer:
                return False
        for name in self.absent:
            if now[name] is not None:
                return False
        for name, value in self.state.items():
            if now[name] != value:
                return False
        return now["_quantizer"] is self.kept and quantizer.__dict__ == self.options

    def run(self, src, dst, amaxes, noop_flag):
        array, overrides = self.array, self.overrides
        array.data = src.data_ptr()
        array.device = _bridge.device_of(src)
        for i, amax in enumerate(amaxes):
            if amax is not None:
                overrides.amax[i] = amax.data_ptr()
        drawn = _bridge.draw(self.struct, src) if self.struct.rounding else None
        overrides.offset = None if drawn is None else drawn.data_ptr()
        status = raw.nib_quantize_into(*self.arguments, noop_flag, self.native.handle)
        if status:
            _library.fail(status)
        _bridge.changed([dst.__dict__[name] for name, _ref in self.fields])


def _nothing():
    """What is left of an Update in a pickle, or in a copy of a tensor."""
