# SPDX-License-Identifier: Apache-2.0
"""The C library as ctypes sees it: the headers of libnib, and nothing else.

Enums are IntEnums (formats and dialects by the library's own names), structs are ctypes.Structures with the names of
the header's fields, functions are attributes of `lib` by their own names. A function that returns nib_status raises
an Error with the library's message instead (`lib.nib_quantize(...)`); `raw` has the same functions without that, for
calls that must be quick and look at the status themselves. Both release the GIL. tests/python/test_header.py compares
all of this with the headers.
"""
import ctypes
import enum
import itertools
import os
from ctypes import (CFUNCTYPE, POINTER as P, Structure, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64,
                    c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p)

# ---- Errors ----------------------------------------------------------------------------------------------


class Error(Exception):
    """What the library rejects, in its own message. `status` is its nib_status, None where Python found the fault.

    Every subclass is also the builtin exception that TransformerEngine raises in such a place.
    """
    status = None


class ArgumentError(Error, ValueError):
    """A value outside its documented range."""


class ShapeError(Error, ValueError):
    """Rank, dims, strides, or a cut that is not at a block border."""


class DtypeError(Error, TypeError, ValueError):
    """A dtype that the call does not take."""


class ModeError(Error, ValueError, RuntimeError):
    """Options that do not go together."""


class UsageError(Error, RuntimeError):
    """The usage (rowwise, columnwise) that is needed is not there."""


class NoDataError(UsageError, ValueError):
    """A tensor without any data, where data is needed."""


class MismatchError(Error, RuntimeError):
    """Two objects that must agree do not."""


class OutOfMemoryError(Error, MemoryError):
    """No memory."""


class CommError(Error, RuntimeError):
    """A communicator's function failed."""


class FileError(Error, OSError):
    """The operating system did not read or write."""


class DataError(Error, ValueError, RuntimeError):
    """A file that breaks its format."""


class UnsupportedError(Error, NotImplementedError):
    """Well formed, but not something that this build does."""


class CancelledError(Error, RuntimeError):
    """The caller's own function asked to stop."""


class DeviceError(Error, RuntimeError):
    """Things of two devices in one call, or a device that failed."""


# In the order of nib_status.
_ERRORS = [None, ArgumentError, ShapeError, DtypeError, ModeError, UsageError, MismatchError, OutOfMemoryError,
           CommError, FileError, DataError, UnsupportedError, CancelledError, DeviceError]
for _status, _class in enumerate(_ERRORS):
    if _class:
        _class.status = _status
OK = 0

# ---- Enums -----------------------------------------------------------------------------------------------


class DType(enum.IntEnum):
    """nib_dtype; the first eleven have TransformerEngine's codes."""
    U8 = 0
    I16 = 1
    I32 = 2
    I64 = 3
    F32 = 4
    F16 = 5
    BF16 = 6
    E4M3 = 7
    E5M2 = 8
    E8M0 = 9
    E2M1 = 10
    BOOL = 11
    I8 = 12
    U16 = 13
    U32 = 14
    U64 = 15
    F64 = 16
    C64 = 17
    E2M3 = 18
    E3M2 = 19
    E4M3FNUZ = 20
    E5M2FNUZ = 21


class ScaleRule(enum.IntEnum):
    RTN = 0
    FOUR_OVER_SIX = 1
    SWEEP = 2


class ErrorMode(enum.IntEnum):
    MAE = 0
    MSE = 1


class Rounding(enum.IntEnum):
    NEAREST = 0
    STOCHASTIC_8 = 1
    STOCHASTIC_24 = 2
    STOCHASTIC_UNBIASED = 3


class TensorScale(enum.IntEnum):
    """What the tensor scale of a tensor is kept as."""
    AMAX = 0
    MULTIPLIER = 1
    DIVISOR = 2
    NONE = 3


class TensorScaleRule(enum.IntEnum):
    DIALECT = 0
    EXACT = 1
    POW2 = 2


class MxRule(enum.IntEnum):
    CEIL = 0
    FLOOR = 1


class AmaxChoice(enum.IntEnum):
    MAX = 0
    MOST_RECENT = 1


class Usage(enum.IntEnum):
    ROWWISE = 0
    COLUMNWISE = 1
    EITHER = 2


class Part(enum.IntEnum):
    ROW_DATA = 0
    COL_DATA = 1
    ROW_SCALE = 2
    COL_SCALE = 3
    ROW_TENSOR_SCALE = 4
    COL_TENSOR_SCALE = 5


MAX_RANK = 8
PART_COUNT = len(Part)
RHT_SIGN_MASK = 0xD7E8

# ---- Structs ---------------------------------------------------------------------------------------------


class Sized(Structure):
    """A struct of the headers that begins with its own size."""

    def __init__(self, **fields):
        super().__init__(ctypes.sizeof(self), **fields)


class ErrorText(Structure):
    _fields_ = [("status", c_int), ("text", c_char * 512)]


class Array(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_size_t), ("offset", c_size_t), ("dtype", c_int), ("rank", c_int32),
                ("shape", c_int64 * MAX_RANK), ("strides", c_int64 * MAX_RANK), ("device", c_void_p)]


ALLREDUCE_MAX = CFUNCTYPE(c_int, c_void_p, P(c_float), c_size_t)
AGREE = CFUNCTYPE(c_int, c_void_p, c_int, c_uint64)
ALLGATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, P(c_size_t))
BARRIER = CFUNCTYPE(c_int, c_void_p)


class Comm(Sized):
    _fields_ = [("bytes", c_size_t), ("context", c_void_p), ("rank", c_int), ("size", c_int),
                ("allreduce_max_f32", ALLREDUCE_MAX), ("agree", AGREE), ("allgather", ALLGATHER), ("barrier", BARRIER)]


class Quantizer(Structure):  # nib_quantizer_init_sized sets its size
    _fields_ = [("bytes", c_size_t), ("format", c_int), ("dialect", c_int), ("element", c_int), ("rowwise", c_uint8),
                ("columnwise", c_uint8), ("swizzled", c_uint8), ("row_scaled", c_uint8), ("rht", c_uint8),
                ("rht_rowwise", c_uint8), ("rht_sign_mask", c_uint16), ("block_dims", c_int32 * 2),
                ("scale_rule", c_int), ("error_mode", c_int), ("fast_error", c_uint8), ("no_tensor_scale", c_uint8),
                ("e4m3_max", c_int32), ("tensor_scale_rule", c_int), ("min_block_scale", c_float), ("rounding", c_int),
                ("seed", c_uint64), ("offset", c_uint64), ("origin", c_int64 * 2), ("amax_comm", P(Comm)),
                ("pow2_scales", c_uint8), ("mx_rule", c_int), ("amax_epsilon", c_float)]


class Overrides(Sized):
    _fields_ = [("bytes", c_size_t), ("amax", c_void_p * 2), ("tensor_scale", c_void_p * 2), ("scale", c_void_p),
                ("amax_seen", c_void_p), ("offset", c_void_p), ("importance", c_void_p), ("importance_count", c_int64)]


class Operand(Structure):
    _fields_ = [("tensor", c_void_p), ("array", P(Array)), ("usage", c_int)]


class GemmOptions(Sized):
    _fields_ = [("bytes", c_size_t), ("alpha", c_float), ("beta", c_float), ("bias", P(Array))]


class Metadata(Sized):
    _fields_ = [("bytes", c_size_t), ("format", c_int), ("dtype", c_int), ("element", c_int), ("rank", c_int32),
                ("shape", c_int64 * MAX_RANK), ("rows", c_int64), ("cols", c_int64), ("tensor_scale", c_int),
                ("rowwise", c_uint8), ("columnwise", c_uint8), ("columnwise_valid", c_uint8),
                ("quantizer", P(Quantizer))]


class Item(Structure):
    _fields_ = [("tensor", c_void_p), ("array", Array)]


class Saved(Structure):
    _fields_ = [("buffer", c_void_p), ("array", Array)]


class MasterOptions(Sized):
    _fields_ = [("bytes", c_size_t), ("manual_post_all_gather", c_uint8), ("row_shards", P(P(Array))),
                ("col_shards", P(P(Array))), ("scales", P(c_void_p)), ("amax_seen", P(c_void_p))]


class ByteRange(Structure):
    _fields_ = [("first", c_int64), ("count", c_int64), ("first_shared", c_int), ("last_shared", c_int)]


class FsdpParts(Sized):
    _fields_ = [("bytes", c_size_t), ("data", Array), ("scales", Array), ("tensor_scale", c_float)]


class InexactBlock(Structure):
    _fields_ = [("line", c_int64), ("block", c_int64)]


class ConversionReport(Sized):
    _fields_ = [("bytes", c_size_t), ("blocks", c_int64), ("inexact", c_int64), ("first", InexactBlock * 16)]


class Entry(Structure):
    _fields_ = [("name", c_char_p), ("dtype", c_int), ("rank", c_int64), ("shape", P(c_int64)), ("begin", c_uint64),
                ("end", c_uint64)]


# The headers' structs by name.
STRUCTS = {"nib_error": ErrorText, "nib_array": Array, "nib_comm": Comm, "nib_quantizer": Quantizer,
           "nib_overrides": Overrides, "nib_metadata": Metadata, "nib_item": Item, "nib_saved": Saved,
           "nib_master_options": MasterOptions, "nib_byte_range": ByteRange, "nib_fsdp_parts": FsdpParts,
           "nib_conversion_report": ConversionReport, "nib_entry": Entry, "nib_operand": Operand,
           "nib_gemm_options": GemmOptions}

# ---- Functions -------------------------------------------------------------------------------------------

STATUS = object()  # the result of a call that can fail


def fit(value, bits=64):
    """A value, if it fits into a signed integer of so many bits: ctypes would take its lower bits."""
    if not -1 << bits - 1 <= value < 1 << bits - 1:
        raise ArgumentError(f"{value} does not fit into a signed integer of {bits} bits")
    return value


# name: (result, arguments). Opaque objects (devices, tensors, buffers, groups, files, writers) are c_void_p.
FUNCTIONS = {
    "nib_version": (c_char_p, []),
    "nib_isa": (c_char_p, []),
    "nib_status_name": (c_char_p, [c_int]),
    "nib_last_error": (c_char_p, []),
    "nib_get_error": (None, [P(ErrorText)]),
    "nib_set_error": (STATUS, [c_int, c_char_p]),
    "nib_host_create": (STATUS, [c_int, P(c_void_p)]),
    "nib_device_name": (c_char_p, [c_void_p]),
    "nib_device_retain": (c_void_p, [c_void_p]),
    "nib_device_release": (None, [c_void_p]),
    "nib_dtype_name": (c_char_p, [c_int]),
    "nib_dtype_bits": (c_int, [c_int]),
    "nib_array_init": (STATUS, [P(Array), c_void_p, c_int, c_int, P(c_int64)]),
    "nib_array_copy": (STATUS, [P(Array), P(Array)]),
    "nib_encode": (STATUS, [c_int, P(c_float), c_size_t, c_void_p]),
    "nib_decode": (STATUS, [c_int, c_void_p, c_size_t, P(c_float)]),
    "nib_buffer_create": (STATUS, [c_size_t, c_void_p, P(c_void_p)]),
    "nib_buffer_borrow": (STATUS, [c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, P(c_void_p)]),
    "nib_buffer_retain": (c_void_p, [c_void_p]),
    "nib_buffer_release": (None, [c_void_p]),
    "nib_buffer_data": (c_void_p, [c_void_p]),
    "nib_buffer_bytes": (c_size_t, [c_void_p]),
    "nib_buffer_device": (c_void_p, [c_void_p]),
    "nib_array_from_dlpack": (STATUS, [c_void_p, c_void_p, P(Array)]),
    "nib_array_from_dlpack_versioned": (STATUS, [c_void_p, c_void_p, P(Array)]),
    "nib_buffer_from_dlpack": (STATUS, [c_void_p, c_void_p, P(c_void_p)]),
    "nib_buffer_from_dlpack_versioned": (STATUS, [c_void_p, c_void_p, P(c_void_p)]),
    "nib_array_to_dlpack": (STATUS, [P(Array), c_void_p, P(c_void_p)]),
    "nib_array_to_dlpack_versioned": (STATUS, [P(Array), c_void_p, P(c_void_p)]),
    "nib_comm_serial": (P(Comm), []),
    "nib_comm_threads_create": (STATUS, [c_int, P(P(Comm))]),
    "nib_comm_threads_destroy": (None, [P(Comm)]),
    "nib_quantizer_init_sized": (STATUS, [P(Quantizer), c_size_t, c_int]),
    "nib_quantizer_set_usage": (STATUS, [P(Quantizer), c_int, c_int]),
    "nib_quantizer_check": (STATUS, [P(Quantizer), P(Array)]),
    "nib_quantizer_equal": (c_int, [P(Quantizer), P(Quantizer)]),
    "nib_quantizer_hash": (c_uint64, [P(Quantizer)]),
    "nib_is_quantizable": (c_int, [P(Quantizer), c_int, P(c_int64)]),
    "nib_is_requantization_safe": (c_int, [P(Quantizer)]),
    "nib_format_count": (c_int, []),
    "nib_format_name": (c_char_p, [c_int]),
    "nib_dialect_name": (c_char_p, [c_int]),
    "nib_format_from_name": (STATUS, [c_char_p, P(c_int)]),
    "nib_dialect_from_name": (STATUS, [c_char_p, P(c_int)]),
    "nib_quantize": (STATUS, [P(Quantizer), P(Array), P(Overrides), P(c_void_p)]),
    "nib_importance_normalize": (STATUS, [c_void_p, c_int64, c_void_p]),
    "nib_gptq_factorize": (STATUS, [c_void_p, c_int64, c_double, c_void_p, c_void_p, c_void_p, P(c_double)]),
    "nib_gptq": (STATUS, [P(Array), c_void_p, c_void_p, c_int64, c_void_p]),
    "nib_quantize_into": (STATUS, [P(Quantizer), P(Array), P(Overrides), P(c_float), c_void_p]),
    "nib_dequantize": (STATUS, [c_void_p, c_int, P(Array)]),
    "nib_amax": (STATUS, [P(Quantizer), P(Array), P(P(c_float))]),
    "nib_fake_quantize": (STATUS, [P(Quantizer), P(Array), P(Overrides), c_int, P(Array)]),
    "nib_dequantize_rows": (STATUS, [c_void_p, c_int, c_int64, c_int64, P(Array)]),
    "nib_tensor_create": (STATUS, [P(Quantizer), c_int, c_int, P(c_int64), c_void_p, P(c_void_p)]),
    "nib_tensor_from_buffers": (STATUS, [P(Quantizer), c_int, c_int, P(c_int64), P(c_void_p), c_size_t, P(c_void_p)]),
    "nib_tensor_destroy": (None, [c_void_p]),
    "nib_tensor_device": (c_void_p, [c_void_p]),
    "nib_tensor_to": (STATUS, [c_void_p, c_void_p, P(c_void_p)]),
    "nib_tensor_get_metadata": (STATUS, [c_void_p, P(Metadata)]),
    "nib_tensor_buffer": (c_void_p, [c_void_p, c_int]),
    "nib_tensor_part": (STATUS, [c_void_p, c_int, P(Array)]),
    "nib_tensor_to_dlpack": (STATUS, [c_void_p, c_int, P(c_void_p)]),
    "nib_tensor_to_dlpack_versioned": (STATUS, [c_void_p, c_int, P(c_void_p)]),
    "nib_tensor_get_usages": (STATUS, [c_void_p, P(c_int), P(c_int)]),
    "nib_tensor_update_usage": (STATUS, [c_void_p, c_int, c_int]),
    "nib_tensor_invalidate_columnwise": (STATUS, [c_void_p]),
    "nib_tensor_set_quantizer": (STATUS, [c_void_p, P(Quantizer)]),
    "nib_tensor_prepare_for_saving": (STATUS, [c_void_p, P(c_void_p), c_size_t, P(c_size_t)]),
    "nib_tensor_restore_from_saved": (STATUS, [c_void_p, P(c_void_p), c_size_t, P(c_size_t)]),
    "nib_saved_count": (STATUS, [P(Item), c_size_t, P(c_size_t)]),
    "nib_prepare_for_saving": (STATUS, [P(Item), c_size_t, P(Saved), c_size_t, P(c_size_t)]),
    "nib_restore_from_saved": (STATUS, [P(Item), c_size_t, P(Saved), c_size_t, P(c_size_t)]),
    "nib_tensor_clear": (None, [c_void_p]),
    "nib_tensor_clone": (STATUS, [c_void_p, P(c_void_p)]),
    "nib_tensor_copy": (STATUS, [c_void_p, c_void_p]),
    "nib_tensor_zero": (STATUS, [c_void_p]),
    "nib_tensor_view": (STATUS, [c_void_p, c_int, P(c_int64), P(c_void_p)]),
    "nib_tensor_reshape": (STATUS, [c_void_p, c_int, P(c_int64), P(c_void_p)]),
    "nib_tensor_slice": (STATUS, [c_void_p, c_int64, c_int64, P(c_void_p)]),
    "nib_tensor_split": (STATUS, [c_void_p, P(c_int64), c_size_t, P(c_void_p)]),
    "nib_tensor_equal": (STATUS, [c_void_p, c_void_p, P(c_int)]),
    "nib_tensor_swizzle": (STATUS, [c_void_p]),
    "nib_tensor_unswizzle": (STATUS, [c_void_p]),
    "nib_tensor_rebind_rowwise": (STATUS, [c_void_p, c_void_p]),
    "nib_part_shape": (STATUS, [P(Quantizer), c_int, c_int, P(c_int64), P(c_int), P(c_int64)]),
    "nib_part_valid_shape": (STATUS, [P(Quantizer), c_int, c_int, P(c_int64), P(c_int), P(c_int64)]),
    "nib_quantize_master_weights": (STATUS, [P(c_void_p), c_size_t, P(P(Array)), c_size_t, P(c_int64), c_size_t,
                                    P(Comm), P(MasterOptions)]),
    "nib_quantize_nvfp4_param_shard": (STATUS, [P(c_void_p), c_size_t, P(P(Array)), c_size_t, P(c_int64), c_size_t,
                                    P(Comm), P(P(Array))]),
    "nib_post_all_gather_processing": (STATUS, [P(c_void_p), c_size_t]),
    "nib_amax_grid": (STATUS, [c_void_p, c_int, P(c_int64), P(c_int64)]),
    "nib_partial_amax": (STATUS, [c_void_p, c_int, P(Array), c_int64, P(c_float)]),
    "nib_block_scales": (STATUS, [c_void_p, c_int, P(c_float)]),
    "nib_whole_blocks": (STATUS, [c_void_p, c_int, c_int64, c_int64, P(c_int64), P(c_int64)]),
    "nib_partial_scales": (STATUS, [c_void_p, c_int, P(Array), c_int64, P(c_float), P(c_uint8)]),
    "nib_chosen_scales": (STATUS, [c_void_p, c_int, P(c_float), P(c_uint8)]),
    "nib_partial_cast": (STATUS, [c_void_p, c_int, P(Array), c_int64, P(c_float), P(Array)]),
    "nib_transpose_packed": (STATUS, [P(c_uint8), c_int64, c_int64, P(c_uint8)]),
    "nib_transpose_scales": (STATUS, [P(c_uint8), c_int64, c_int64, c_int64, P(c_uint8), c_int64]),
    "nib_tensor_byte_range": (STATUS, [c_void_p, c_int, c_int64, c_int64, P(ByteRange)]),
    "nib_param_buffer_range": (STATUS, [c_int64, c_int64, c_int, c_int, P(c_int64), P(c_int64), P(c_int64),
                                    P(c_int64)]),
    "nib_all_gather_param": (STATUS, [c_void_p, c_int, c_int64, c_int64, P(Array), P(Comm)]),
    "nib_all_gather_param_bytes": (STATUS, [c_void_p, c_int, c_int64, c_int64, P(Array), P(Comm)]),
    "nib_all_gather_tensor": (STATUS, [c_void_p, P(Comm), P(c_void_p)]),
    "nib_fsdp_extract": (STATUS, [c_void_p, P(FsdpParts)]),
    "nib_fsdp_assign": (STATUS, [c_void_p, P(FsdpParts), c_int64, P(c_void_p)]),
    "nib_split_quantize": (STATUS, [P(Quantizer), P(Array), P(c_int64), c_size_t, P(c_void_p)]),
    "nib_group_amax": (STATUS, [P(Quantizer), P(Array), P(c_int64), c_size_t, P(P(c_float))]),
    "nib_group_create": (STATUS, [P(Quantizer), c_int, P(c_int64), c_size_t, c_int64, P(c_void_p)]),
    "nib_group_destroy": (None, [c_void_p]),
    "nib_group_count": (c_size_t, [c_void_p]),
    "nib_group_member": (STATUS, [c_void_p, c_size_t, P(c_void_p)]),
    "nib_group_buffer": (c_void_p, [c_void_p, c_int]),
    "nib_group_offset": (STATUS, [c_void_p, c_int, c_size_t, P(c_int64)]),
    "nib_group_quantize": (STATUS, [c_void_p, P(Array), P(Comm)]),
    "nib_get_fp4_align_size": (c_int, []),
    "nib_is_nvfp4tensor": (c_int, [c_void_p]),
    "nib_get_nvfp4_rowwise_packed_shape": (STATUS, [c_int, P(c_int64), P(c_int64)]),
    "nib_modify_nvfp4_rowwise_storage": (STATUS, [c_void_p, c_void_p]),
    "nib_dequantize_fp4_tensor": (STATUS, [c_void_p, P(Array)]),
    "nib_delayed_scaling_update": (STATUS, [c_int, c_int, c_int, P(c_float), c_size_t, P(c_float)]),
    "nib_mxfp4_to_nvfp4": (STATUS, [c_void_p, P(ConversionReport), P(c_void_p)]),
    "nib_hadamard_matrix": (None, [P(c_float)]),
    "nib_rht_matrix": (None, [c_uint16, P(c_uint16)]),
    "nib_e2m1_values": (None, [P(c_float)]),
    "nib_philox4x32": (None, [P(c_uint32), P(c_uint32), P(c_uint32)]),
    "nib_swizzle_scales": (STATUS, [P(c_uint8), c_int64, c_int64, c_int64, P(c_uint8)]),
    "nib_unswizzle_scales": (STATUS, [P(c_uint8), c_int64, c_int64, c_int64, P(c_uint8)]),
    "nib_gemm_options_init_sized": (STATUS, [P(GemmOptions), c_size_t]),
    "nib_gemm": (STATUS, [P(Operand), P(Operand), P(GemmOptions), P(Array)]),
    "nib_gemm_grouped": (STATUS, [P(Operand), P(Operand), P(P(GemmOptions)), P(Array), c_size_t]),
    "nib_gemm_reference": (STATUS, [P(Operand), P(Operand), P(GemmOptions), P(Array)]),
    "nib_file_open": (STATUS, [c_char_p, P(c_void_p)]),
    "nib_file_close": (None, [c_void_p]),
    "nib_file_count": (c_size_t, [c_void_p]),
    "nib_file_entry": (STATUS, [c_void_p, c_size_t, P(Entry)]),
    "nib_file_find": (STATUS, [c_void_p, c_char_p, P(c_size_t)]),
    "nib_file_metadata": (c_char_p, [c_void_p, c_char_p]),
    "nib_file_metadata_count": (c_size_t, [c_void_p]),
    "nib_file_metadata_entry": (STATUS, [c_void_p, c_size_t, P(c_char_p), P(c_char_p)]),
    "nib_file_read": (STATUS, [c_void_p, c_size_t, c_uint64, c_void_p, c_size_t]),
    "nib_writer_create": (STATUS, [c_char_p, P(c_void_p)]),
    "nib_writer_metadata": (STATUS, [c_void_p, c_char_p, c_char_p]),
    "nib_writer_declare": (STATUS, [c_void_p, c_char_p, c_int, c_int64, P(c_int64)]),
    "nib_writer_write": (STATUS, [c_void_p, c_char_p, c_uint64, c_void_p, c_size_t]),
    "nib_writer_commit": (STATUS, [c_void_p]),
    "nib_writer_destroy": (None, [c_void_p]),
    "nib_writer_declare_tensor": (STATUS, [c_void_p, c_char_p, c_void_p]),
    "nib_writer_write_tensor": (STATUS, [c_void_p, c_char_p, c_void_p]),
    "nib_file_read_tensor": (STATUS, [c_void_p, c_char_p, c_void_p, P(c_void_p)]),
}


def _find():
    """NIB_LIBRARY where it is set; otherwise the library that lies beside this file, as the wheel has it."""
    chosen = os.environ.get("NIB_LIBRARY")
    return chosen if chosen else os.path.join(os.path.dirname(os.path.abspath(__file__)), "libnib.so")


class _Functions:
    """The functions as attributes."""

    def __init__(self, path, check):
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise ImportError(f"nib's library cannot be loaded: {error}. `pip install .` builds it; NIB_LIBRARY names "
                              "another one") from error
        try:
            bind(self._dll, FUNCTIONS, self, check)
        except AttributeError as error:
            raise ImportError(f"{path} is another version of nib's library: {error}") from None


def bind(library, functions, owner, check=True):
    """The functions of a library, by their table, as attributes of an owner."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int if result is STATUS else result
        if check and result is STATUS:
            function.errcheck = _check
        setattr(owner, name, function)


def fail(status, text=None):
    """Raise the exception of a status, with the message of this thread's last error."""
    error = _ERRORS[status] if 0 < status < len(_ERRORS) else Error
    raise error(text if text is not None else raw.nib_last_error().decode(errors="replace"))


def _check(status, _function, _arguments):
    if status:
        fail(status)
    return status


path = _find()
raw = _Functions(path, check=False)
lib = _Functions(path, check=True)


def load_another(where, functions, shared, error, what, remedy):
    """Another of nib's libraries, with its functions bound. It must have the libnib of this process, as the address of
    the function `shared` tells: what one libnib makes is nothing to another."""
    try:
        library = ctypes.CDLL(where)
    except OSError as fault:
        raise error(f"{what}: {fault} ({remedy})") from fault
    try:
        bind(library, functions, library)
    except AttributeError:
        raise error(f"{where} is not nib's library of this version") from None
    own, theirs = (ctypes.cast(getattr(calls, shared), c_void_p).value for calls in (raw, library))
    if own != theirs:
        raise error(f"{where} brings a libnib of its own, and not the one at {path}")
    return library


# ---- Enums that the library itself has names for ---------------------------------------------------------


def _enum_of(kind, name_of):
    """An IntEnum of the names of the values 0, 1, ...: "compressed-tensors" is COMPRESSED_TENSORS."""
    names = itertools.takewhile(lambda name: name is not None, map(name_of, itertools.count()))
    return enum.IntEnum(kind, {name.decode().upper().replace("-", "_"): value for value, name in enumerate(names)},
                        module=__name__)


Format = _enum_of("Format", raw.nib_format_name)
Dialect = _enum_of("Dialect", raw.nib_dialect_name)

# The headers' enums by name: their constants are these with the prefix (and NIB_SCALE_4OVER6 for FOUR_OVER_SIX).
ENUMS = {"nib_dtype": (DType, "NIB_"), "nib_format": (Format, "NIB_"), "nib_dialect": (Dialect, "NIB_DIALECT_"),
         "nib_scale_rule": (ScaleRule, "NIB_SCALE_"), "nib_error_mode": (ErrorMode, "NIB_ERROR_"),
         "nib_rounding": (Rounding, "NIB_ROUND_"), "nib_tensor_scale": (TensorScale, "NIB_TENSOR_SCALE_"),
         "nib_tensor_scale_rule": (TensorScaleRule, "NIB_TENSOR_SCALE_RULE_"), "nib_mx_rule": (MxRule, "NIB_MX_"),
         "nib_amax_choice": (AmaxChoice, "NIB_AMAX_"), "nib_usage": (Usage, "NIB_"), "nib_part": (Part, "NIB_")}


def shape_array(shape):
    """A shape, or offsets, as the library takes them."""
    array = (c_int64 * len(shape))(*shape)
    if array[:] != list(shape):
        for value in shape:
            fit(value)
    return array


def new_quantizer(format=Format.NVFP4):
    """A quantizer struct with the defaults of a format."""
    q = Quantizer()
    lib.nib_quantizer_init_sized(q, ctypes.sizeof(q), format)
    return q
