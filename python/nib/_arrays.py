# SPDX-License-Identifier: Apache-2.0
"""Foreign arrays as the library's nib_array, and the library's memory as NumPy arrays; never with a copy.

`borrow(x)` takes NumPy arrays, whatever has `__dlpack__` (host memory), and whatever has the buffer protocol. BF16 is
ml_dtypes.bfloat16 where that package is there, or uint16 with `dtype="bf16"`.
"""
import ctypes
import math

import numpy as np

from . import _library
from ._device import entered
from ._library import Array, DType, DtypeError, ShapeError, lib, raw

try:
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:  # BF16 is then seen as its bits
    _bfloat16 = None

BFLOAT16 = np.dtype(_bfloat16 if _bfloat16 is not None else np.uint16)

_FROM_NUMPY = {np.dtype(np.uint8): DType.U8, np.dtype(np.int16): DType.I16, np.dtype(np.int32): DType.I32,
               np.dtype(np.int64): DType.I64, np.dtype(np.float32): DType.F32, np.dtype(np.float16): DType.F16,
               np.dtype(np.bool_): DType.BOOL, np.dtype(np.int8): DType.I8, np.dtype(np.uint16): DType.U16,
               np.dtype(np.uint32): DType.U32, np.dtype(np.uint64): DType.U64, np.dtype(np.float64): DType.F64,
               np.dtype(np.complex64): DType.C64}
if _bfloat16 is not None:
    _FROM_NUMPY[BFLOAT16] = DType.BF16
_TO_NUMPY = {code: dtype for dtype, code in _FROM_NUMPY.items()}
_TO_NUMPY.update({DType.BF16: BFLOAT16, DType.E4M3: np.dtype(np.uint8), DType.E5M2: np.dtype(np.uint8),
                  DType.E8M0: np.dtype(np.uint8), DType.E2M1: np.dtype(np.uint8)})
_NAMES = {"f32": DType.F32, "float32": DType.F32, "f16": DType.F16, "float16": DType.F16, "bf16": DType.BF16,
          "bfloat16": DType.BF16, "e4m3": DType.E4M3, "e5m2": DType.E5M2, "e8m0": DType.E8M0,
          "e2m1": DType.E2M1}


def dtype_code(dtype):
    """A nib dtype from a nib.DType, a name or anything that NumPy calls a dtype."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtype.lower() in _NAMES:
        return _NAMES[dtype.lower()]
    try:
        return _FROM_NUMPY[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise DtypeError(f"{dtype!r} is no dtype of nib") from None


def numpy_dtype(code):
    """The NumPy dtype in which data of a nib dtype is handed out."""
    return _TO_NUMPY[DType(code)]


def fill(array, pointer, code, shape, strides, itemsize):
    """A nib_array over host memory, strides in bytes. Its extent is that of its elements."""
    if len(shape) > _library.MAX_RANK:
        raise ShapeError(f"an array of rank {len(shape)}: at most {_library.MAX_RANK} is possible")
    low = high = 0
    for size, stride in zip(shape, strides):
        if stride % itemsize:
            raise ShapeError(f"strides of {tuple(strides)} bytes are not whole elements of {itemsize} bytes")
        if size > 1:
            low += min(0, stride * (size - 1))
            high += max(0, stride * (size - 1))
    array.data = pointer + low
    array.bytes = high - low + itemsize if all(shape) else 0
    array.offset = -low
    array.dtype = code
    array.rank = len(shape)
    array.shape[:len(shape)] = shape
    array.strides[:len(shape)] = [stride // itemsize for stride in strides]
    array.device = entered.handle
    return array


def _borrow_numpy(x, code=None):
    if code is None:
        code = _FROM_NUMPY.get(x.dtype)
        if code is None:
            raise DtypeError(f"an array of {x.dtype} is nothing that nib takes")
    elif x.dtype.itemsize * 8 != raw.nib_dtype_bits(code):
        raise DtypeError(f"an array of {x.dtype} cannot hold {DType(code).name}")
    elif not x.dtype.isnative:
        raise DtypeError(f"an array of {x.dtype} has its bytes in the other order")
    return fill(Array(), x.__array_interface__["data"][0], code, x.shape, x.strides, x.dtype.itemsize)


class _Capsule:
    """The C API's functions on capsules."""
    _get = ctypes.pythonapi.PyCapsule_GetPointer
    _get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    _is = ctypes.pythonapi.PyCapsule_IsValid
    _is.restype, _is.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    _new = ctypes.pythonapi.PyCapsule_New
    _new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


_FLAGS_OFFSET, _READ_ONLY = 24, 1  # in DLPack's versioned struct


def _borrow_dlpack(x, writable):
    """A capsule that is looked at and not taken over: the producer's deleter runs when it goes."""
    if getattr(x, "is_neg", bool)():  # PyTorch's view of memory that has the other signs, of which DLPack says nothing
        if writable:
            raise _library.ArgumentError("the array is a view with the other signs, which cannot be written")
        x = x.resolve_neg()
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = x.__dlpack__()
    array = Array()
    if _Capsule._is(capsule, b"dltensor_versioned"):
        managed = _Capsule._get(capsule, b"dltensor_versioned")
        lib.nib_array_from_dlpack_versioned(managed, entered.handle, array)
        if writable and ctypes.c_uint64.from_address(managed + _FLAGS_OFFSET).value & _READ_ONLY:
            raise _library.ArgumentError("the array is read-only")
    else:
        lib.nib_array_from_dlpack(_Capsule._get(capsule, b"dltensor"), entered.handle, array)
    return array, capsule


def amax_counts(row_scaled, shape):
    """How many amaxes, or tensor scales, the library reads for the rowwise and for the columnwise usage."""
    return (math.prod(shape[:-1]), shape[-1] if len(shape) else 1) if row_scaled else (1, 1)


def borrow(x, dtype=None, writable=False):
    """(nib_array, keeper): a view of x, valid as long as the keeper lives. dtype: what its bytes are, where x has no
    word for it."""
    code = None if dtype is None else dtype_code(dtype)
    if not isinstance(x, np.ndarray):
        if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
            array, keeper = _borrow_dlpack(x, writable)
            if code is not None:
                if raw.nib_dtype_bits(code) != raw.nib_dtype_bits(array.dtype):
                    raise DtypeError(f"{DType(array.dtype).name} elements cannot hold {DType(code).name}")
                array.dtype = code
            return array, keeper
        try:
            x = np.asarray(memoryview(x))
        except (TypeError, ValueError):
            raise DtypeError(f"{type(x).__name__} is no array: nib takes NumPy arrays, DLPack and buffers") from None
    if writable and not x.flags.writeable:
        raise _library.ArgumentError("the array is read-only")
    return _borrow_numpy(x, code), x


class _Exposed:
    """Memory of the library for NumPy; `owner` lives as long as any array over it."""

    def __init__(self, pointer, shape, dtype, owner):
        self.owner = owner
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (pointer, False)}


def expose(array, owner):
    """A NumPy array over a C-contiguous nib_array."""
    shape = tuple(array.shape[:array.rank])
    dtype = numpy_dtype(array.dtype)
    if not array.data or 0 in shape:
        return np.empty(shape, dtype)
    plain = np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype
    return np.asarray(_Exposed(array.data + array.offset, shape, plain, owner)).view(dtype)


class DLPackExport:
    """What np.from_dlpack, torch.from_dlpack and their like take: one part of a tensor, without a copy."""

    def __init__(self, handle, part, owner):
        self._handle, self._part, self._owner = handle, part, owner

    def __dlpack_device__(self):
        return (1, 0)  # host memory

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device is not None and tuple(dl_device) != (1, 0):
            raise BufferError("nib's tensors are in host memory")
        if copy:
            raise BufferError("nib exports its own memory, not a copy")
        return dlpack_capsule(self._handle, self._part, max_version is not None and max_version[0] >= 1)


_plain_name = ctypes.create_string_buffer(b"dltensor")
_versioned_name = ctypes.create_string_buffer(b"dltensor_versioned")


def dlpack_capsule(handle, part, versioned=False):
    """A DLPack capsule of a tensor's part; it keeps the buffer."""
    managed = ctypes.c_void_p()
    if versioned:
        lib.nib_tensor_to_dlpack_versioned(handle, part, managed)
    else:
        lib.nib_tensor_to_dlpack(handle, part, managed)
    return _Capsule._new(managed, _versioned_name if versioned else _plain_name, _destructor)


def _destroy_capsule(capsule):
    """Runs when a capsule goes: one that nobody took over still owns its tensor. The offsets are those of the
    deleters in DLPack's structs."""
    for name, offset in ((b"dltensor", 56), (b"dltensor_versioned", 16)):
        if _IS_RAW(capsule, name):
            managed = _GET_RAW(capsule, name)
            deleter = ctypes.c_void_p.from_address(managed + offset).value
            if deleter:
                ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(managed)


_IS_RAW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_GET_RAW = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy_capsule)
_destructor = ctypes.cast(_DESTRUCTOR, ctypes.c_void_p)
