# SPDX-License-Identifier: Apache-2.0
"""libnib_cuda, loaded when somebody asks for a GPU: its devices by ordinal and stream.

It is NIB_CUDA_LIBRARY where that is set, the one beside this file where a wheel has it, or what the system finds. It
must have the libnib of this process: a device that one libnib makes is nothing to another.
"""
import os
import threading
from ctypes import CFUNCTYPE, POINTER as P, Structure, c_char_p, c_int, c_size_t, c_void_p, sizeof

from . import _library
from ._library import STATUS, DeviceError, raw

ALLOCATE = CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_void_p)
RELEASE = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)


class Allocator(Structure):
    """nib_cuda_allocator of two functions: allocate(bytes, stream), an address, and release(address)."""
    _fields_ = [("bytes", c_size_t), ("context", c_void_p), ("allocate", ALLOCATE), ("release", RELEASE)]

    def __init__(self, allocate, release):
        def allocated(_context, size, stream):
            try:
                return allocate(size, stream or 0)
            except Exception:  # noqa: BLE001: out of memory, above all; it must not cross the library
                return None
        super().__init__(sizeof(Allocator), None, ALLOCATE(allocated),
                         RELEASE(lambda _context, memory, _stream: release(memory)))


FUNCTIONS = {
    "nib_cuda_count": (STATUS, [P(c_int)]),
    "nib_cuda_describe": (STATUS, [c_int, c_char_p, c_size_t]),
    "nib_cuda_create": (STATUS, [c_int, c_void_p, P(c_void_p)]),
    "nib_cuda_set_allocator": (STATUS, [c_void_p, P(Allocator)]),
    "nib_cuda_synchronize": (STATUS, [c_void_p]),
}

_lock = threading.Lock()
_functions = None
_devices = {}  # (ordinal, stream): handle, for good: a graph needs the device of its calls as long as it lives


def path():
    """Where the library is looked for."""
    chosen = os.environ.get("NIB_CUDA_LIBRARY")
    if chosen:
        return chosen
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libnib_cuda.so")
    version = raw.nib_version().decode().rsplit(".", 1)[0]
    return beside if os.path.exists(beside) else f"libnib_cuda.so.{version}"


def functions():
    """The functions of nib_cuda.h that Python calls; DeviceError where there is no such library."""
    global _functions
    if _functions is None:
        with _lock:
            _functions = _functions or _library.load_another(
                path(), FUNCTIONS, "nib_device_release", DeviceError, "a GPU needs libnib_cuda",
                "it is built with -DNIB_CUDA=ON; NIB_CUDA_LIBRARY can name it")
    return _functions


def device(ordinal, stream, allocator=None):
    """The device of a GPU and a cudaStream_t, as nib_array.device has it. allocator: of a device that is new, for good.
    """
    handle = _devices.get((ordinal, stream))
    if handle is None:
        calls, made = functions(), c_void_p()
        with _lock:
            handle = _devices.get((ordinal, stream))
            if handle is None:
                calls.nib_cuda_create(ordinal, stream or None, made)
                if allocator is not None:
                    calls.nib_cuda_set_allocator(made, allocator)
                handle = _devices[ordinal, stream] = made.value
    return handle
