# SPDX-License-Identifier: Apache-2.0
"""The functions of transformer_engine_torch that concern quantized tensors, by their names and arguments.

The steps of a sharded cast hand single values per block from one to the next, as they do there; codes and scales are
the library's. nib.torch.quantize_master_weights does all of them in two collectives, and gives the same bytes.
"""
import ctypes
import enum

import torch

from .. import _library
from .._library import Usage, lib
from . import _bridge
from .constants import DType, TE_DType_To_Torch
from .grouped_tensor import (bgrad_group_quantize, group_dequantize, group_quantize,  # noqa: F401
                             split_quantize, splits_to_offsets_multi)
from .products import Job, lines, place_of, product_of_values, run, takes, values_of
from .nvfp4_tensor import NVFP4Quantizer, NVFP4TensorStorage
from .quantization import fused_amax_and_scale_update_after_reduction  # noqa: F401
from .quantized_tensor import QuantizedTensorStorage

_FLT_MAX = torch.finfo(torch.float32).max
_FLT_MIN = torch.finfo(torch.float32).tiny

# ---- Quantize and back -----------------------------------------------------------------------------------


def quantize(tensor, quantizer, output=None, noop_flag=None):
    """A quantized tensor: a new one, or `output`."""
    if output is not None:
        return quantizer.update_quantized(tensor, output, noop_flag=noop_flag)
    with torch.no_grad():
        return quantizer.quantize(tensor)


def dequantize(input, otype):
    """The values in a DType: kFloat32, kFloat16 or kBFloat16."""
    return input.dequantize(dtype=TE_DType_To_Torch[DType.cast(otype)])


def multi_tensor_quantize(tensor_list, quantizer_list):
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


def create_empty_quantized_tensor(quantizer, shape, dtype=torch.float32, device=None, pin_memory=False):
    return quantizer.make_empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)


def nvfp4_quantize_with_amax(tensor, quantizer, rowwise_amax=None, columnwise_amax=None):
    """Quantize with amaxes that are known, one float32 each; None: found as usual."""
    with quantizer._reduction() as comm:
        tensor = _bridge.placed(tensor)
        given = [None if amax is None else amax.detach().to(tensor.device, torch.float32).reshape(-1).contiguous()
                 for amax in (rowwise_amax, columnwise_amax)]
        struct, overrides = quantizer._quantization(comm, tensor, given)
        parts = _bridge.quantize(struct, tensor.detach(), overrides)
    return quantizer._wrap(tensor.shape, tensor.dtype, parts)


def compute_amax(tensor, amax):
    """The largest magnitude of a tensor into `amax`."""
    struct = _library.new_quantizer()
    struct.columnwise = 0
    tensor = _bridge.placed(tensor.detach()).reshape(1, -1)
    found = torch.zeros(1, dtype=torch.float32, device=tensor.device)
    pointers = (ctypes.POINTER(ctypes.c_float) * 2)(ctypes.cast(found.data_ptr(), ctypes.POINTER(ctypes.c_float)))
    lib.nib_amax(struct, _bridge.array(tensor), pointers)
    amax.copy_(found.reshape(amax.shape))


# ---- Delayed scaling -------------------------------------------------------------------------------------


class FP8TensorMeta:
    """scale, scale_inv and amax_history of tensors, for whoever keeps them in one object."""

    def __init__(self):
        self.scale = self.scale_inv = self.amax_history = None


FP8FwdTensors = enum.IntEnum("FP8FwdTensors", [f"GEMM{i}_{what}" for i in (1, 2, 3)
                                               for what in ("INPUT", "WEIGHT", "OUTPUT")], start=0)
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", [f"GRAD_{what}{i}" for i in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
                             start=0)


# ---- Products --------------------------------------------------------------------------------------------


def generic_gemm(A, transA, B, transB, D=None, quantizer=None, output_dtype=None, bias=None, bias_type=None, gelu=False,
                 gelu_in=None, grad=False, workspace=None, workspace_size=0, accumulate=False,
                 use_split_accumulator=False, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False,
                 alpha=1.0, beta=None):
    """op(B) op(A): B A^T for (transA, transB) = (True, False), B A for (False, False), B^T A for (False, True), B^T A^T
    for both. A quantized operand gives its rowwise usage where it is multiplied along its last dim, its columnwise one
    otherwise.

    Returns (result, gradient of the bias, input of the GELU, extra output). A product with a quantized operand is
    nib_gemm's: NVFP4 with NVFP4 has the bits of TransformerEngine's reference. Plain operands are multiplied in FP32.
    Where `accumulate`, beta (1) times D is added. In a backward pass (grad) a bias stands for its gradient, the sum of
    B's rows.
    """
    if comm_overlap is not None or bulk_overlap:
        raise NotImplementedError("nib has no overlap of products with communication")
    if gelu and grad:
        raise NotImplementedError("nib does not fuse the gradient of the GELU: multiply by it afterwards")
    if not accumulate and beta not in (None, 0.0):
        raise ValueError(f"beta {beta} has nothing to be applied to: nothing is accumulated")
    if accumulate and not _is_plain(D):
        raise ValueError("a result to add to is needed: D, a plain tensor")
    beta = 0.0 if not accumulate else 1.0 if beta is None else float(beta)
    dtype = torch.float32 if output_dtype is None else TE_DType_To_Torch[DType.cast(output_dtype)]
    shape = _gemm_shape(A, transA, B, transB)
    if _is_plain(D):
        if tuple(D.shape) != shape:
            raise ValueError(f"GEMM output has invalid dims (expected {list(shape)}, got {list(D.shape)})")
        if output_dtype is not None and D.dtype != dtype:
            raise ValueError(f"GEMM output has invalid dtype (expected {dtype}, found {D.dtype})")
        dtype = D.dtype
    bias_grad = gelu_input = None
    with_bias = bias is not None and bias.numel()
    if with_bias and grad:
        bias_grad = sum_of_rows(B, transB, bias.dtype)
    y = _gemm(A, transA, B, transB, shape, dtype, None if gelu or quantizer is not None else D, alpha, beta,
              bias if with_bias and not grad else None, wide=gelu)
    if gelu:
        gelu_input = y.to(dtype)
        y = torch.nn.functional.gelu(y, approximate="tanh").to(dtype)
    if quantizer is not None:
        y = quantize(y, quantizer, D)
    elif _is_plain(D) and y is not D:
        y = D.copy_(y)
    return y, bias_grad, gelu_input, extra_output


def sum_of_rows(B, transB, dtype):
    """The gradient of a bias: the sum of B's rows."""
    return values_of(B, bool(transB)).sum(0).to(dtype)


def _is_plain(D):
    return isinstance(D, torch.Tensor) and not isinstance(D, QuantizedTensorStorage)


def _gemm_shape(A, transA, B, transB):
    """The shape of op(B) op(A): the leading dims of B, where it is not transposed, stay."""
    rows = (B.shape[-1],) if transB else tuple(B.shape[:-1])
    return *rows, lines(A, not transA)


def _gemm(A, transA, B, transB, shape, dtype, D, alpha, beta, bias, wide):
    """op(B) op(A) by alpha, with bias and beta D, in a dtype, or FP32 where `wide`: in D, where that can be."""
    operands = B, A, bool(transB), not transA
    if not takes(*operands):
        y = product_of_values(*operands).view(shape)
        y = y if alpha == 1.0 else y * alpha
        y = y if bias is None else y + bias.detach().float()
        y = y + beta * D.float() if beta else y
        return y if wide else y.to(dtype)
    place = place_of(B)
    direct = D is not None and D.device == place and D.is_contiguous()
    y = D if direct else torch.empty(shape, dtype=torch.float32 if wide else dtype, device=place)
    if beta and not direct:
        y.copy_(D)
    run([Job(*operands, y, alpha, beta, bias)])
    return y


def swizzle_scales_for_gemm_(tensor):
    """The scales of a tensor into the tiles of the GEMM, in place. A second call changes nothing."""
    if not tensor._with_gemm_swizzled_scales:
        tensor._change(lib.nib_tensor_swizzle)
        tensor._with_gemm_swizzled_scales = True


# ---- The steps of a sharded cast --------------------------------------------------------------------------


def _check_block(block_len):
    if block_len != 16:
        raise ValueError(f"blocks of NVFP4 have 16x16 elements, not {block_len}x{block_len}")


def _floats(tensor):
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("block amaxes and scales are contiguous float32 in host memory")
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))


def _bytes(tensor):
    if tensor.element_size() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("codes and scales are contiguous bytes in host memory")
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))


def nvfp4_2d_compute_partial_amax(tensor, amax, h, w, start_offset, block_len=16):
    """The amax of each 16x16 tile of an h x w weight, of which `tensor` is the shard from start_offset on; 0 for tiles
    of which it has nothing."""
    _check_block(block_len)
    tiles = ((h + 15) // 16) * ((w + 15) // 16)
    if amax.numel() != tiles:
        raise ValueError(f"a weight of {h} x {w} has {tiles} tiles, but there is room for {amax.numel()} amaxes")
    quantizer = NVFP4Quantizer(columnwise=False, with_2d_quantization=True)
    shard = _bridge.host(tensor.detach()).reshape(-1)
    with quantizer.make_empty((h, w))._native() as native:
        lib.nib_partial_amax(native.handle, Usage.ROWWISE, _bridge.array(shard), _library.fit(int(start_offset)),
                             _floats(amax))


def nvfp4_multi_tensor_compute_partial_amax(master_weight_list, partial_amax_list, global_amax_list, h_list, w_list,
                                            start_offset_list, block_len=16):
    """The same for many weights, and the amax of each whole shard. A weight of which there is no shard is None."""
    for master, partial, whole, h, w, start in zip(master_weight_list, partial_amax_list, global_amax_list, h_list,
                                                   w_list, start_offset_list, strict=True):
        if master is not None and master.numel():
            nvfp4_2d_compute_partial_amax(master, partial, h, w, start, block_len)
            compute_amax(master, whole)


def nvfp4_compute_global_scale(global_amax, global_scale):
    """2688 / amax, at most the largest float; 1 for an amax of 0."""
    amax = global_amax.float()
    scale = (2688.0 / amax.clamp(min=_FLT_MIN)).clamp(max=_FLT_MAX)
    global_scale.copy_(torch.where(amax > 0, scale, torch.ones_like(scale)))


def nvfp4_compute_per_block_scale(block_amax, scale, global_amax):
    """Scales of blocks before they become E4M3: amax (2688 / global amax / 6)."""
    whole = torch.empty_like(global_amax)
    nvfp4_compute_global_scale(global_amax, whole)
    scale.copy_((block_amax * (whole * (1.0 / torch.tensor(6.0)))).clamp(max=_FLT_MAX))


def _e4m3(values):
    """Codes of float32 values."""
    values = values.contiguous()
    codes = torch.empty(values.shape, dtype=torch.uint8)
    lib.nib_encode(_library.DType.E4M3, _floats(values), values.numel(), codes.data_ptr())
    return codes


def _e4m3_values(codes):
    values = torch.empty(codes.shape)
    lib.nib_decode(_library.DType.E4M3, codes.data_ptr(), codes.numel(), _floats(values))
    return values


def nvfp4_expand_scale_to_fp8(input, output, tile_rows, tile_cols, rows_padded, block_len=16):
    """Scales of tiles as E4M3, on each of the tile's 16 rows of `output`; its padding is zero."""
    _check_block(block_len)
    target = output.view(torch.uint8)
    target.zero_()
    rows = min(tile_rows * 16, rows_padded, target.shape[0])
    codes = _e4m3(input.reshape(tile_rows, tile_cols)).repeat_interleave(16, 0)
    target[:rows, :tile_cols] = codes[:rows]


def nvfp4_fused_scale(block_amax, global_amax, per_block_scale, target_scale, target_amax, tile_rows, tile_cols,
                      rows_padded, block_len=16):
    """From amaxes: the scales of blocks as values, as E4M3 in the weight, and the weight's amax."""
    nvfp4_compute_per_block_scale(block_amax, per_block_scale, global_amax)
    nvfp4_expand_scale_to_fp8(per_block_scale, target_scale, tile_rows, tile_cols, rows_padded, block_len)
    target_amax.copy_(global_amax.reshape(target_amax.shape))


def nvfp4_multi_tensor_fused_scale(block_amax_list, global_amax_list, per_block_scale_list, target_scale_list,
                                   target_amax_list, tile_rows_list, tile_cols_list, rows_padded_list, block_len=16):
    for arguments in zip(block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list,
                         tile_rows_list, tile_cols_list, rows_padded_list, strict=True):
        nvfp4_fused_scale(*arguments, block_len)


def nvfp4_2d_partial_cast(inp, out, scale, global_scale, h, w, start_offset, block_len=16):
    """The codes of a shard of an h x w weight into `out`, whose first byte holds the shard's first element. Only
    nibbles of the shard are written; an odd start is right, too."""
    _check_block(block_len)
    shard = _bridge.host(inp.detach()).reshape(-1).float()
    start, n = int(start_offset), shard.numel()
    if start < 0 or start + n > h * w:
        raise ValueError(f"{n} elements from {start} on are not a shard of {h} x {w}")
    first, last = start % 2, (start + n) % 2
    bytes_needed = (first + n + last) // 2
    target = out.view(-1)[:bytes_needed]
    if target.numel() != bytes_needed:
        raise ValueError(f"the shard has codes in {bytes_needed} bytes, but there is room for {target.numel()}")
    if not n:
        return
    encode = float(global_scale) if float(global_scale) > 0 else 1.0
    decode = _e4m3_values(_e4m3(scale.reshape(-1))) * (1.0 / torch.tensor(encode))
    factor = torch.where(decode > 0, (1.0 / decode).clamp(max=_FLT_MAX), torch.full_like(decode, _FLT_MAX))
    at = torch.arange(start, start + n)
    tile = at // w // 16 * ((w + 15) // 16) + at % w // 16
    scaled = torch.zeros(first + n + last)
    scaled[first:first + n] = shard * factor[tile]
    codes = torch.empty(bytes_needed, dtype=torch.uint8)
    lib.nib_encode(_library.DType.E2M1, _floats(scaled), scaled.numel(), codes.data_ptr())
    before = target.clone()
    target.copy_(codes)
    if first:  # the other nibble of the byte belongs to somebody else
        target[0] = (before[0] & 0x0F) | (codes[0] & 0xF0)
    if last:
        target[-1] = (before[-1] & 0xF0) | (codes[-1] & 0x0F)


def nvfp4_multi_tensor_2d_partial_cast(inp_list, out_list, scale_list, global_scale_list, h_list, w_list,
                                       start_offset_list, block_len=16):
    for arguments in zip(inp_list, out_list, scale_list, global_scale_list, h_list, w_list, start_offset_list,
                         strict=True):
        nvfp4_2d_partial_cast(*arguments, block_len)


def nvfp4_data_transpose(input, *, out=None):
    """Codes [M, K/2] of a matrix as those of its transpose, [K, M/2]."""
    rows, cols = input.shape[0], 2 * input.shape[1]
    if rows % 2:
        raise ValueError(f"{rows} rows cannot be packed in pairs")
    if out is None:
        out = torch.empty(cols, rows // 2, dtype=torch.uint8)
    elif out.numel() != cols * rows // 2:
        raise ValueError(f"the transpose has {cols * rows // 2} bytes, but there is room for {out.numel()}")
    lib.nib_transpose_packed(_bytes(input.contiguous()), rows, cols, _bytes(out))
    return out


def nvfp4_2d_scale_transpose(input, output, M_tiles, K_tiles):
    """Scales of 16x16 blocks, each on the 16 rows of its block, as those of the transpose; the padding is zero."""
    if output.shape[0] < 16 * K_tiles:
        raise ValueError(f"{16 * K_tiles} rows of scales do not fit {output.shape[0]}")
    if input.shape[0] < 16 * M_tiles:
        raise ValueError(f"{16 * M_tiles} rows of scales are not in {input.shape[0]}")
    lib.nib_transpose_scales(_bytes(input), 16 * M_tiles, 16 * K_tiles, input.stride(0), _bytes(output),
                             output.stride(0))
    output.view(torch.uint8)[16 * K_tiles:].zero_()


def nvfp4_2d_multi_tensor_transpose(rowwise_data_list, columnwise_data_list, rowwise_scale_inv_list,
                                    columnwise_scale_inv_list, M_list, K_list):
    for data, data_t, scales, scales_t, rows, cols in zip(rowwise_data_list, columnwise_data_list,
                                                          rowwise_scale_inv_list, columnwise_scale_inv_list, M_list,
                                                          K_list, strict=True):
        nvfp4_data_transpose(data.view(rows, -1), out=data_t)
        nvfp4_2d_scale_transpose(scales, scales_t, (rows + 15) // 16, (cols + 15) // 16)
