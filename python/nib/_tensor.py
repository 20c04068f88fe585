# SPDX-License-Identifier: Apache-2.0
"""Quantizer, Tensor and quantize() for NumPy arrays.

A Tensor owns a nib_tensor; its parts are NumPy arrays over the library's memory. The path from `quantize` to the
library is short on purpose: descriptions of arrays are kept by dtype, shape and strides and used again.
"""
import ctypes
import math
import weakref

import numpy as np

from . import _arrays, _library
from ._device import entered
from ._library import (Array, Dialect, DType, ErrorMode, Format, Metadata, MxRule, Part, Rounding, ScaleRule,
                       TensorScale, TensorScaleRule, Usage, lib, raw, shape_array)

_ENUM_FIELDS = {"format": Format, "dialect": Dialect, "element": DType, "scale_rule": ScaleRule,
                "error_mode": ErrorMode, "tensor_scale_rule": TensorScaleRule, "rounding": Rounding, "mx_rule": MxRule}
_FLAGS = {"rowwise", "columnwise", "swizzled", "row_scaled", "rht", "rht_rowwise", "fast_error", "no_tensor_scale",
          "pow2_scales"}
_VALUES = {"rht_sign_mask", "e4m3_max", "min_block_scale", "seed", "offset", "amax_epsilon"}
_PAIRS = {"block_dims", "origin"}
_WORDS = {"4over6": "FOUR_OVER_SIX"}


def _member(kind, value):
    """A member of an enum from itself, its value, or its name in any case with - for _."""
    if isinstance(value, str):
        word = _WORDS.get(value.lower(), value.upper().replace("-", "_"))
        if word not in kind.__members__:
            names = ", ".join(name.lower().replace("_", "-") for name in kind.__members__)
            raise _library.ArgumentError(f"{value!r} is none of {names}")
        return kind[word]
    return kind(value)


class Quantizer:
    """The options of a quantization: nib_quantizer, field by field.

        q = nib.Quantizer(block_dims=(16, 16), columnwise=False)
        q = nib.Quantizer("mxfp8", element="e5m2")

    Names and meanings are those of the header: format, dialect, element, rowwise, columnwise, swizzled, row_scaled,
    rht, rht_rowwise, rht_sign_mask, block_dims, scale_rule, error_mode, fast_error, no_tensor_scale, e4m3_max,
    tensor_scale_rule, min_block_scale, rounding, seed, offset, origin, pow2_scales, mx_rule, amax_epsilon. Enums go by
    name ("nvfp4", "4over6", "stochastic-8") or are members of nib's enums.
    """

    def __init__(self, format="nvfp4", **options):
        object.__setattr__(self, "struct", _library.new_quantizer(_member(Format, format)))
        object.__setattr__(self, "ref", ctypes.byref(self.struct))
        for name, value in options.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        if name in _ENUM_FIELDS:
            setattr(self.struct, name, _member(_ENUM_FIELDS[name], value))
        elif name in _FLAGS:
            setattr(self.struct, name, 1 if value else 0)
        elif name in _VALUES:
            before = getattr(self.struct, name)
            setattr(self.struct, name, value)
            if isinstance(before, int) and getattr(self.struct, name) != value:  # ctypes drops upper bits
                setattr(self.struct, name, before)
                raise _library.ArgumentError(f"{name}={value} does not fit")
        elif name in _PAIRS:
            if isinstance(value, str):  # "16x16"
                value = value.lower().split("x")
            first, second = (_library.fit(int(v), 32 if name == "block_dims" else 64) for v in value)
            getattr(self.struct, name)[:] = (first, second)
        else:
            raise TypeError(f"a quantizer has no option {name!r}")

    def __getattr__(self, name):
        if name in _ENUM_FIELDS:
            return _ENUM_FIELDS[name](getattr(self.struct, name))
        if name in _FLAGS:
            return bool(getattr(self.struct, name))
        if name in _VALUES:
            return getattr(self.struct, name)
        if name in _PAIRS:
            return tuple(getattr(self.struct, name))
        raise AttributeError(f"a quantizer has no option {name!r}")

    def __eq__(self, other):
        return isinstance(other, Quantizer) and bool(raw.nib_quantizer_equal(self.ref, other.ref))

    def __hash__(self):
        return raw.nib_quantizer_hash(self.ref) & 0x7FFFFFFFFFFFFFFF

    def __reduce__(self):
        return _quantizer_from_fields, (self._fields(),)

    def __repr__(self):
        default = Quantizer(self.format)
        changed = [f"{name}={value!r}" for name, value in self._fields().items()
                   if name != "format" and value != getattr(default, name)]
        return f"nib.Quantizer({', '.join([repr(self.format.name.lower())] + changed)})"

    def _fields(self):
        names = (*_ENUM_FIELDS, *sorted(_FLAGS), *sorted(_VALUES), *sorted(_PAIRS))
        return {name: getattr(self, name) for name in names}

    def copy(self, **changes):
        return Quantizer(**{**self._fields(), **changes})

    def check(self, x=None):
        """Raise what a quantization (of x) would raise for its options."""
        array = None if x is None else _arrays.borrow(x)[0]
        lib.nib_quantizer_check(self.ref, array)

    def quantize(self, x, *, dtype=None, overrides=None):
        return quantize(x, self, dtype=dtype, overrides=overrides)

    def part_shape(self, part, shape, padded=True):
        """The shape of a part of a tensor of this shape; padded=False: without the padding of scales."""
        rank, out = ctypes.c_int(), (ctypes.c_int64 * _library.MAX_RANK)()
        call = lib.nib_part_shape if padded else lib.nib_part_valid_shape
        call(self.ref, _member(Part, part), len(shape), shape_array(shape), rank, out)
        return tuple(out[:rank.value])


# What fields were called in pickles of nib 0.1; None: it is gone.
_FORMER = {"threads": None, "single_level": "no_tensor_scale", "tensor_scale": "tensor_scale_rule"}


def _quantizer_from_fields(fields):
    fields = {_FORMER.get(name, name): value for name, value in fields.items()}
    fields.pop(None, None)
    return Quantizer(**fields)


_PART_NAMES = {"row_data": Part.ROW_DATA, "col_data": Part.COL_DATA, "row_scale": Part.ROW_SCALE,
               "col_scale": Part.COL_SCALE, "row_tensor_scale": Part.ROW_TENSOR_SCALE,
               "col_tensor_scale": Part.COL_TENSOR_SCALE}


class _Held:
    """A reference to a buffer of the library."""

    def __init__(self, buffer):
        lib.nib_buffer_retain(buffer)
        weakref.finalize(self, raw.nib_buffer_release, buffer).atexit = False  # arrays may be read until the very end


class Tensor:
    """A quantized tensor. quantize() makes one; so do from_parts() and the methods below.

    row_data, row_scale, row_tensor_scale and their col_ twins are NumPy arrays over its memory (None where absent):
    codes and scales as bytes, tensor scales in FP32. Writing to them changes the tensor.
    """
    __slots__ = ("_handle", "__weakref__")

    def __init__(self, handle):
        self._handle = handle

    def __del__(self, destroy=raw.nib_tensor_destroy):
        destroy(self._handle)

    # -- what it is --

    def metadata(self):
        """nib_metadata, a struct."""
        out = Metadata()
        lib.nib_tensor_get_metadata(self._handle, out)
        return out

    @property
    def shape(self):
        m = self.metadata()
        return tuple(m.shape[:m.rank])

    @property
    def dtype(self):
        """The nominal dtype: that of the data that was quantized."""
        return DType(self.metadata().dtype)

    @property
    def format(self):
        return Format(self.metadata().format)

    @property
    def tensor_scale(self):
        """What row_tensor_scale and col_tensor_scale are: amaxes, multipliers, divisors."""
        return TensorScale(self.metadata().tensor_scale)

    @property
    def device(self):
        """The name of the device: "host"."""
        return raw.nib_device_name(raw.nib_tensor_device(self._handle)).decode()

    @property
    def quantizer(self):
        """A copy of the tensor's quantizer."""
        q, own = Quantizer(), self.metadata().quantizer.contents
        ctypes.memmove(q.ref, ctypes.byref(own), ctypes.sizeof(q.struct))
        return q

    def part(self, part):
        """A part as a NumPy array over the tensor's memory, or None."""
        part = _PART_NAMES[part] if isinstance(part, str) else Part(part)
        buffer = raw.nib_tensor_buffer(self._handle, part)
        if not buffer:
            return None
        array = Array()
        lib.nib_tensor_part(self._handle, part, array)
        return _arrays.expose(array, _Held(buffer))

    def valid_part(self, part):
        """A part without the padding of its scales, as a view."""
        whole = self.part(part)
        if whole is None:
            return None
        part = _PART_NAMES[part] if isinstance(part, str) else Part(part)
        return whole[tuple(slice(n) for n in self.quantizer.part_shape(part, self.shape, padded=False))]

    def dlpack(self, part):
        """A part for np.from_dlpack, torch.from_dlpack and their like."""
        part = _PART_NAMES[part] if isinstance(part, str) else Part(part)
        return _arrays.DLPackExport(self._handle, part, self)

    def get_usages(self):
        row, col = ctypes.c_int(), ctypes.c_int()
        lib.nib_tensor_get_usages(self._handle, row, col)
        return {"rowwise": bool(row.value), "columnwise": bool(col.value)}

    def __repr__(self):
        m = self.metadata()
        usages = " and ".join(name for name, there in self.get_usages().items() if there) or "without data"
        return f"<nib.Tensor {list(m.shape[:m.rank])} {Format(m.format).name} of {DType(m.dtype).name}, {usages}>"

    def equals(self, other):
        """Same shape, dtype, meaning, usages and bytes."""
        out = ctypes.c_int()
        lib.nib_tensor_equal(self._handle, other._handle, out)
        return bool(out.value)

    # -- values --

    def dequantize(self, dtype=None, *, out=None, usage="either"):
        """The values: in the nominal dtype, in `dtype` (float32, bfloat16, float16), or written to `out`. usage: from
        which one, "rowwise" or "columnwise"."""
        if out is None:
            m = self.metadata()
            code = DType(m.dtype) if dtype is None else _arrays.dtype_code(dtype)
            out = np.empty(tuple(m.shape[:m.rank]), _arrays.numpy_dtype(code))
            array, keeper = _arrays.borrow(out, code)
        else:
            array, keeper = _arrays.borrow(out, dtype, writable=True)
        lib.nib_dequantize(self._handle, _member(Usage, usage), array)
        del keeper
        return out

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("the values of a quantized tensor are computed: there is no array without a copy")
        values = self.dequantize()
        return values if dtype is None else values.astype(dtype)

    def quantize_(self, x, quantizer=None, *, noop=None, dtype=None):
        """Quantize x into this tensor, in place; by its own quantizer where none is given. noop: a float; 1.0 exactly
        leaves everything as it is."""
        array, keeper = _arrays.borrow(x, dtype)
        flag = None if noop is None else ctypes.c_float(noop)
        lib.nib_quantize_into(None if quantizer is None else quantizer.struct, array, None, flag, self._handle)
        del keeper
        return self

    def zero_(self):
        lib.nib_tensor_zero(self._handle)
        return self

    def copy_(self, source):
        lib.nib_tensor_copy(self._handle, source._handle)
        return self

    # -- usages and forms --

    def update_usage(self, rowwise=None, columnwise=None):
        """True keeps or builds a usage, False drops it, None leaves it."""
        lib.nib_tensor_update_usage(self._handle, *(-1 if u is None else int(bool(u)) for u in (rowwise, columnwise)))
        return self

    def swizzle(self):
        lib.nib_tensor_swizzle(self._handle)
        return self

    def unswizzle(self):
        lib.nib_tensor_unswizzle(self._handle)
        return self

    def clear(self):
        lib.nib_tensor_clear(self._handle)

    def _new(self, call, *arguments):
        out = ctypes.c_void_p()
        call(self._handle, *arguments, out)
        return Tensor(out)

    def clone(self):
        return self._new(lib.nib_tensor_clone)

    def view(self, *shape):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._new(lib.nib_tensor_view, len(shape), shape_array(shape))

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._new(lib.nib_tensor_reshape, len(shape), shape_array(shape))

    def slice(self, first, count):
        """Rows of the [M, K] matrix as a tensor of its own."""
        return self._new(lib.nib_tensor_slice, _library.fit(first), _library.fit(count))

    def split(self, counts):
        out = (ctypes.c_void_p * max(1, len(counts)))()
        lib.nib_tensor_split(self._handle, shape_array(counts), len(counts), out)
        return [Tensor(ctypes.c_void_p(handle)) for handle in out[:len(counts)]]

    def __copy__(self):
        return self.clone()

    def __deepcopy__(self, memo):
        return self.clone()

    def __reduce__(self):
        m = self.metadata()
        return _tensor_from_parts, (self.quantizer, self.shape, int(m.dtype),
                                    [None if (p := self.part(part)) is None else p.copy() for part in Part])


for _name in _PART_NAMES:
    setattr(Tensor, _name, property(lambda self, name=_name: self.part(name)))


def _tensor_from_parts(quantizer, shape, dtype, parts):
    return from_parts(quantizer, shape, DType(dtype), **dict(zip(_PART_NAMES, parts)))


# ---- Quantize --------------------------------------------------------------------------------------------

# A second set of function objects, without conversion of pointers: what is passed is prepared once.
_fast = ctypes.CDLL(_library.path)
_quantize = _fast.nib_quantize
_quantize.argtypes = None  # references and None pass as they are

_described = {}  # (dtype, shape): what _describe gives, taken out while in use
_quantizers = {}  # options: their quantizer
_from_buffer = ctypes.c_char.from_buffer
_addressof = ctypes.addressof
_byref = ctypes.byref
_ndarray = np.ndarray
_default = Quantizer()


def _describe(x):
    """(nib_array, reference to it, result, reference to it) for contiguous arrays like x, their data still missing."""
    if len(_described) > 256:
        _described.clear()
    array, out = _arrays._borrow_numpy(x), ctypes.c_void_p()
    return array, _byref(array), out, _byref(out)


def _quantizer_of(options):
    if not options:
        return _default
    try:
        key = tuple(sorted(options.items()))
        known = _quantizers.get(key)
    except TypeError:  # a list among the options
        return Quantizer(**options)
    if known is None:
        if len(_quantizers) > 256:
            _quantizers.clear()
        known = _quantizers[key] = Quantizer(**options)
    return known


def quantize(x, quantizer=None, *, dtype=None, overrides=None, **options):
    """Quantize an array (FP32, BF16 or FP16; NumPy, DLPack or buffer protocol; any strides) into a new Tensor.

        t = nib.quantize(x)                                            NVFP4, TransformerEngine's defaults
        t = nib.quantize(x, block_dims=(16, 16), columnwise=False)     options of nib.Quantizer
        t = nib.quantize(x, q)                                         a nib.Quantizer

    dtype: what the elements are where the array has no word for it (uint16 as "bf16"). overrides: amaxes, tensor scales
    or a scale instead of computed ones, a dict: {"amax": value or array, "tensor_scale": ..., "scale": ...}; amax and
    tensor_scale may be pairs (rowwise, columnwise); "importance" weighs the columns of a sweep (nib.importance).
    nib.Host sets the number of threads.
    """
    if quantizer is None:
        quantizer = _quantizer_of(options) if options else _default
    elif options:
        raise TypeError("either a quantizer or options, not both")
    if type(x) is _ndarray and dtype is None and overrides is None:
        try:
            address = _addressof(_from_buffer(x))
        except (TypeError, ValueError, BufferError):  # read-only, empty, not contiguous, or a dtype without a letter
            pass
        else:
            key = (x.dtype, x.shape)
            described = _described.pop(key, None) or _describe(x)
            array, array_ref, out, out_ref = described
            array.data = address
            array.device = entered.handle
            status = _quantize(quantizer.ref, array_ref, None, out_ref)
            handle = out.value
            _described[key] = described
            if status:
                _library.fail(status)
            return Tensor(handle)
    array, keeper = _arrays.borrow(x, dtype)
    struct, kept = _overrides(overrides, quantizer, tuple(array.shape[:array.rank]))
    out = ctypes.c_void_p()
    lib.nib_quantize(quantizer.struct, array, struct, out)
    del keeper, kept
    return Tensor(out)


def _overrides(overrides, quantizer, shape):
    """nib_overrides of a dict, and what must live as long. The library gets no sizes: they are checked here."""
    if not overrides:
        return None, None
    struct, kept = _library.Overrides(), []
    counts = _arrays.amax_counts(quantizer.row_scaled, shape)

    def floats(value, name=None, count=None):
        if value is None:
            return None
        kept.append(np.ascontiguousarray(value, np.float32).reshape(-1))
        if count is not None and kept[-1].size != count:
            raise _library.ShapeError(f"{name} has {kept[-1].size} values instead of {count}")
        return kept[-1].ctypes.data

    for name, value in overrides.items():
        if name in ("amax", "tensor_scale"):
            pair = value if isinstance(value, tuple) else (value, value)
            if len(pair) != 2:
                raise _library.ArgumentError(f"{name} is one value or a pair (rowwise, columnwise), not {len(pair)}")
            for usage, wanted in enumerate((quantizer.rowwise, quantizer.columnwise)):
                if wanted or not quantizer.row_scaled:  # the lines of a usage that is not made have no values
                    getattr(struct, name)[usage] = floats(pair[usage], f"the {Usage(usage).name.lower()} {name}",
                                                          counts[usage])
        elif name == "scale":
            struct.scale = floats(value, name, 1)
        elif name == "importance":
            struct.importance = floats(value)
            struct.importance_count = 0 if value is None else kept[-1].size
        else:
            raise TypeError(f"{name!r} cannot be overridden: amax, tensor_scale, scale and importance can")
    return struct, kept


def importance(mean_squares):
    """The importance of input channels from their mean squares E[x^2], one each: what overrides={"importance": ...}
    takes with scale_rule="sweep" and columnwise=False. Relative to their mean, at least 1e-6, and 1 in blocks without
    data."""
    squares = np.ascontiguousarray(mean_squares, np.float32).reshape(-1)
    out = np.empty_like(squares)
    lib.nib_importance_normalize(squares.ctypes.data, squares.size, out.ctypes.data)
    return out


def gptq_factorize(hessian, damp=0.1):
    """Order and U for gptq() from the Hessian of a weight's input, the mean of x x^T: [K, K], of which the upper
    triangle is read, or that triangle's rows one behind the other, as files of nib.calibrate have it. Returns (order,
    U, damp), the last being what was needed to make it positive definite. nib.Host sets the number of threads."""
    h = np.asarray(hessian)
    packed = h.ndim == 1
    n = (math.isqrt(8 * h.size + 1) - 1) // 2 if packed else len(h)
    if (n * (n + 1) // 2 != h.size) if packed else h.shape != (n, n):
        raise _library.ShapeError(f"a Hessian is [K, K] or has K (K + 1) / 2 values, not {list(h.shape)}")
    h = np.ascontiguousarray(h if packed else h[np.triu_indices(n)], np.float32)
    order, u, used = np.empty(n, np.int32), np.empty((n, n), np.float32), ctypes.c_double()
    lib.nib_gptq_factorize(h.ctypes.data, n, damp, entered.handle, order.ctypes.data, u.ctypes.data, used)
    return order, u, used.value


def gptq(x, order, u, tensor, dtype=None):
    """Choose the codes of `tensor`, which is `x` quantized, anew by GPTQ, with order and U of gptq_factorize(), in
    place. Scales stay: those of a sweep with importance, in a tensor with the rowwise usage alone, are what to begin
    with."""
    array, keeper = _arrays.borrow(x, dtype)
    order, u = np.ascontiguousarray(order, np.int32), np.ascontiguousarray(u, np.float32)
    if u.shape != (order.size, order.size):
        raise _library.ShapeError(f"U is {list(u.shape)}, and the order has {order.size} columns")
    lib.nib_gptq(array, order.ctypes.data, u.ctypes.data, order.size, tensor._handle)
    del keeper


def from_parts(quantizer, shape, dtype="float32", **parts):
    """A Tensor over arrays that the caller has, without a copy: row_data=, row_scale=, row_tensor_scale= and their
    col_ twins, of the shapes that quantizer.part_shape gives."""
    buffers = (ctypes.c_void_p * _library.PART_COUNT)()
    out = ctypes.c_void_p()
    try:
        for name, value in parts.items():
            if name not in _PART_NAMES:
                raise TypeError(f"a tensor has no part {name!r}")
            if value is not None:
                buffers[_PART_NAMES[name]] = _borrowed_buffer(value)
        lib.nib_tensor_from_buffers(quantizer.struct, _arrays.dtype_code(dtype), len(shape), shape_array(shape),
                                    buffers, len(buffers), out)
    finally:
        for buffer in buffers:
            raw.nib_buffer_release(buffer)
    return Tensor(out)


# ---- Values ----------------------------------------------------------------------------------------------


def encode(x, dtype):
    """FP32 values as codes of a dtype (e2m1, e4m3, e5m2, e8m0, bf16, f16): a flat array. E2M1 codes are packed."""
    code = _arrays.dtype_code(dtype)
    x = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty((x.size + 1) // 2, np.uint8) if code == DType.E2M1 else np.empty(x.size, _arrays.numpy_dtype(code))
    lib.nib_encode(code, x.ctypes.data_as(_library.P(ctypes.c_float)), x.size, out.ctypes.data)
    return out


def decode(codes, dtype, n=None):
    """The FP32 values of codes: bytes, an array of them in any dtype, or a list of codes of 8 bits or fewer. n: how
    many, where the last byte of packed codes has only one."""
    code = _arrays.dtype_code(dtype)
    if isinstance(codes, (bytes, bytearray, memoryview)):
        codes = np.frombuffer(codes, np.uint8)
    elif not hasattr(codes, "dtype"):  # NumPy would make 64-bit integers of a list
        codes = np.asarray(codes, np.uint8)
    codes = np.ascontiguousarray(codes).reshape(-1)
    if not codes.dtype.isnative:
        codes = codes.astype(codes.dtype.newbyteorder("="))
    most = codes.nbytes * 8 // raw.nib_dtype_bits(code)
    n = most if n is None else n
    if not 0 <= n <= most:
        raise _library.ArgumentError(f"{codes.nbytes} bytes hold at most {most} values, not {n}")
    out = np.empty(n, np.float32)
    lib.nib_decode(code, codes.ctypes.data, n, out.ctypes.data_as(_library.P(ctypes.c_float)))
    return out


def gemm(a, b, *, a_usage="rowwise", b_usage="rowwise", alpha=1.0, beta=None, bias=None, dtype=np.float32, out=None,
         reference=False):
    """alpha A B^T + bias + beta * out, of two tensors, or of a tensor and an array [lines, K]. Rowwise is [M, K],
    columnwise [K, M]. Without `out` the result is new and of `dtype`; with it beta is 1 unless it is given.
    `reference` computes the same bits as they are defined, slowly."""
    kept, operands, lines = [], [], []

    def array_of(x, writable=False):
        array, keeper = _arrays.borrow(x, writable=writable)
        kept.append((array, keeper))
        return ctypes.pointer(array)

    for x, name in ((a, a_usage), (b, b_usage)):
        if isinstance(x, Tensor):
            usage, metadata = _member(Usage, name), x.metadata()
            operands.append(_library.Operand(x._handle, None, usage))
            lines.append(metadata.cols if usage == Usage.COLUMNWISE else metadata.rows)
        else:
            x = np.asarray(x)
            operands.append(_library.Operand(None, array_of(x), 0))
            lines.append(x.shape[0] if x.ndim else 0)
    if beta is None:
        beta = 0.0 if out is None else 1.0
    if out is None:
        out = np.zeros(lines, dtype)
    options = _library.GemmOptions(alpha=alpha, beta=beta, bias=None if bias is None else array_of(np.asarray(bias)))
    call = lib.nib_gemm_reference if reference else lib.nib_gemm
    call(operands[0], operands[1], options, array_of(out, writable=True))
    return out


_kept = {}  # arrays behind borrowed buffers, by a key that the release function gets
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_kept.__delitem__)
_release = ctypes.cast(_RELEASE, ctypes.c_void_p)
_keys = iter(range(1, 1 << 62))


def _borrowed_buffer(x):
    array, keeper = _arrays.borrow(x, writable=True)
    strides, expected = list(array.strides[:array.rank]), 1
    for size, stride in zip(reversed(array.shape[:array.rank]), reversed(strides)):
        if size > 1 and stride != expected and array.bytes:
            raise _library.ShapeError("a part must be C-contiguous")
        expected *= size
    key = next(_keys)
    _kept[key] = keeper
    buffer = ctypes.c_void_p()
    try:
        lib.nib_buffer_borrow(array.data, array.bytes, array.device, _release, key, buffer)
    except _library.Error:
        del _kept[key]
        raise
    return buffer.value
