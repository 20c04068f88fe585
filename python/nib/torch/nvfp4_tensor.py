# SPDX-License-Identifier: Apache-2.0
"""NVFP4: NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage, and the matrices of its random Hadamard transform."""
import ctypes
import functools
import math
import os

import torch

from .. import _library
from .._library import ErrorMode, Format, Part, Rounding, ScaleRule, lib, raw
from . import _bridge
from .constants import DType
from .format_tensor import (Field, FormatQuantizer, FormatStorage, FormatTensor, is_full_slice, is_same_strides,
                            new_zeros_handler, record_stream_handler, rows_of, split_handler, view_handler)
from .quantized_tensor import QuantizedTensor, _DequantizeFunc, _resolve_shape, aten

# ---- The transform ---------------------------------------------------------------------------------------


def get_no_random_sign_vector(device=None):
    """No change of signs."""
    return torch.tensor([1], dtype=torch.float32, device=device)


def get_wgrad_sign_vector(device=None):
    """The signs of the transform's inputs: one for each of 16."""
    mask = _library.RHT_SIGN_MASK
    return torch.tensor([-1 if mask >> i & 1 else 1 for i in range(16)], dtype=torch.float32, device=device)


def get_sign_from_vector(vector):
    """The signs as a mask: bit i is set where element i is -1."""
    mask = 0
    for i, sign in enumerate(vector.tolist()):
        mask |= (sign == -1) << i
    return mask


def _check_device(device):
    """Devices are accepted in every form in which TransformerEngine gets them; memory is the host's."""
    if isinstance(device, torch.device) or isinstance(device, str):
        return torch.device(device)
    return torch.device("cpu")


@functools.lru_cache(maxsize=None)
def get_hadamard_matrix(hadamard_dimension, device=None):
    """H[i][j] = (-1)^popcount(i & j) / 4, float32."""
    assert hadamard_dimension == 16, "Only hadamard dimension 16 is supported."
    matrix = torch.empty(16, 16, dtype=torch.float32)
    raw.nib_hadamard_matrix(_floats(matrix))
    return matrix.to(_check_device(device))


def _floats(tensor):
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))


@functools.lru_cache(maxsize=None)
def get_rht_matrix(with_random_sign_mask, device=None):
    """diag(signs) H, bfloat16 (exact): y = x R."""
    matrix = torch.empty(16, 16, dtype=torch.bfloat16)
    raw.nib_rht_matrix(get_random_sign_mask_for_rht(with_random_sign_mask),
                       ctypes.cast(matrix.data_ptr(), ctypes.POINTER(ctypes.c_uint16)))
    return matrix.to(_check_device(device))


def get_random_sign_mask_for_rht(with_random_sign_mask, device=None):
    return _library.RHT_SIGN_MASK if with_random_sign_mask else 0


@functools.lru_cache(maxsize=None)
def _fp4_e2m1_vals(device, dtype):
    """The value of each of the 16 codes."""
    values = torch.empty(16, dtype=torch.float32)
    raw.nib_e2m1_values(_floats(values))
    return values.to(device=_check_device(device), dtype=dtype)


class _FromNVFP4Func(_DequantizeFunc):
    """Dequantize; the gradient passes straight through."""


# ---- Quantizer -------------------------------------------------------------------------------------------

_SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8, DType.kFloat8E4M3, DType.kByte)
_BLOCKS = {(1, 16): False, (16, 16): True}


class NVFP4Quantizer(FormatQuantizer):
    """Options of NVFP4, by TransformerEngine's names.

    Besides those: fp8_dtype, the dtype of block scales (E4M3 is the only one), and block_dims, (1, 16) or (16, 16),
    which is with_2d_quantization by another name. with_rht alone means with_post_rht_amax too. By position both orders
    work: (fp4_dtype, rowwise, columnwise, ...) and (fp8_dtype, block_dims, with_rht). Types tell them apart: block_dims
    is a pair or None, rowwise a bool.
    """

    value_fields = ("dtype", "with_amax_reduction", "with_rht", "with_post_rht_amax", "with_2d_quantization",
                    "stochastic_rounding", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max",
                    "nvfp4_4over6_err_mode", "with_random_sign_mask")

    def __init__(self, fp4_dtype=DType.kFloat4E2M1, rowwise=True, columnwise=None, with_amax_reduction=False,
                 amax_reduction_group=None, with_rht=False, with_post_rht_amax=None, with_2d_quantization=None,
                 stochastic_rounding=False, row_scaled_nvfp4=False, nvfp4_use_4over6=False, nvfp4_e4m3_max=448,
                 nvfp4_4over6_err_mode="MAE", with_random_sign_mask=True, *, fp8_dtype=None, block_dims=None):
        if rowwise is None or isinstance(rowwise, (tuple, list)):  # (fp8_dtype, block_dims, with_rht)
            if block_dims is not None:
                raise TypeError("block_dims is there twice: by position and by name")
            block_dims, with_rht, rowwise, columnwise = rowwise, bool(columnwise) or with_rht, True, True
            if fp8_dtype is None and fp4_dtype in _SCALE_DTYPES:
                fp4_dtype, fp8_dtype = DType.kFloat4E2M1, fp4_dtype
        if fp4_dtype in _SCALE_DTYPES[:2] and fp8_dtype is None:  # fp8_dtype is the first argument there
            fp4_dtype, fp8_dtype = DType.kFloat4E2M1, fp4_dtype
        super().__init__(rowwise=rowwise, columnwise=True if columnwise is None else columnwise)
        self.dtype = DType.cast(fp4_dtype)
        if self.dtype != DType.kFloat4E2M1:
            raise ValueError(f"NVFP4 codes are E2M1, not {self.dtype.name}")
        if fp8_dtype is not None and fp8_dtype not in _SCALE_DTYPES:
            raise ValueError(f"block scales of NVFP4 are float8_e4m3fn, not {fp8_dtype}")
        if block_dims is not None:
            if tuple(block_dims) not in _BLOCKS:
                raise ValueError(f"block_dims is (1, 16) or (16, 16), not {tuple(block_dims)}")
            two_dimensional = _BLOCKS[tuple(block_dims)]
            if with_2d_quantization is not None and with_2d_quantization != two_dimensional:
                raise ValueError(f"with_2d_quantization={with_2d_quantization} contradicts block_dims={block_dims}")
            with_2d_quantization = two_dimensional
        if nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"nvfp4_e4m3_max is 448 or 256, not {nvfp4_e4m3_max}")
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_rht if with_post_rht_amax is None else with_post_rht_amax
        self.with_2d_quantization = bool(with_2d_quantization)
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode.upper()
        if self.nvfp4_4over6_err_mode not in ErrorMode.__members__:
            raise ValueError(f"nvfp4_4over6_err_mode is MAE or MSE, not {nvfp4_4over6_err_mode}")
        self.with_random_sign_mask = with_random_sign_mask

    @property
    def rht_matrix_random_sign_mask_t(self):
        return get_random_sign_mask_for_rht(self.with_random_sign_mask)

    @property
    def rht_matrix(self):
        return get_rht_matrix(self.with_random_sign_mask)

    def _struct(self):
        q = self._new_struct(Format.NVFP4)
        q.block_dims[:] = (16, 16) if self.with_2d_quantization else (1, 16)
        q.rht = bool(self.with_rht)
        q.rht_sign_mask = self.rht_matrix_random_sign_mask_t
        q.row_scaled = bool(self.row_scaled_nvfp4)
        if self.nvfp4_use_4over6:
            q.scale_rule = ScaleRule.FOUR_OVER_SIX
            q.error_mode = ErrorMode[self.nvfp4_4over6_err_mode]
            q.e4m3_max = self.nvfp4_e4m3_max
            q.fast_error = os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH") == "1"
        if self.stochastic_rounding:
            q.rounding = Rounding.STOCHASTIC_8
        if self.with_rht and not self.with_post_rht_amax:
            raise _library.ModeError("Pre-RHT amax is not supported yet: with_rht needs with_post_rht_amax")
        return q

    def _reduction(self, dst=None):
        group = getattr(dst, "amax_reduction_group", None)
        if group is not None:
            return _bridge.communicator(group)
        if getattr(dst, "_is_shard", False):
            raise RuntimeError("a shard of FSDP2 gets the amax of all ranks' values, and this one does not know its "
                               "ranks before the first forward pass: load a state_dict into the module, or run it once")
        return super()._reduction(dst)

    def _swizzles_itself(self, shape, rows_of=64):
        """Whether TransformerEngine's quantize kernel writes scales of such a matrix in the GEMM's tiles; where it does
        not, quantize rearranges them afterwards, so that only a tensor without values and a bulk split show it."""
        rows, cols = math.prod(shape[:-1]), shape[-1] if len(shape) else 1
        if self.with_rht:
            return rows % rows_of == 0 and cols % 128 == 0
        return self.with_2d_quantization and not self.row_scaled_nvfp4 and not self.nvfp4_use_4over6 \
            and rows % 128 == 0 and cols % 128 == 0

    def make_empty(self, shape, **keywords):
        if not self.optimize_for_gemm or self._swizzles_itself(tuple(shape)):
            return super().make_empty(shape, **keywords)
        plain = self.copy()
        plain.optimize_for_gemm = False
        out = plain.make_empty(shape, **keywords)
        out._quantizer.optimize_for_gemm = True
        return out

    def _stays(self):
        return not self.nvfp4_use_4over6  # which looks at the environment

    def _state(self):
        return {"fp4_dtype": self.dtype, "with_gemm_swizzled_scales": bool(self.optimize_for_gemm),
                "row_scaled_nvfp4": self.row_scaled_nvfp4, "nvfp4_use_4over6": self.nvfp4_use_4over6,
                "nvfp4_e4m3_max": self.nvfp4_e4m3_max}

    @staticmethod
    def convert_shape_for_fp4(shape):
        """The shape of packed codes: the last dim halved."""
        shape = list(shape)
        shape[-1] = shape[-1] // 2
        return tuple(shape)

    def _get_compatible_recipe(self):
        from .recipe import NVFP4BlockScaling
        return NVFP4BlockScaling


# ---- Storage and tensor ----------------------------------------------------------------------------------


class NVFP4TensorStorage(FormatStorage):
    """Codes, block scales and amaxes of both usages.

    _rowwise_data uint8 [..., K/2], _rowwise_scale_inv uint8 (E4M3) [roundup(M, 128), roundup(K/16, 4)], _amax_rowwise
    float32 [1] ([M] where row-scaled); _columnwise_data [K, M/2] and so on with M and K exchanged.
    """

    FIELDS = (Field("_rowwise_data", "rowwise_data", Part.ROW_DATA),
              Field("_rowwise_scale_inv", "rowwise_scale_inv", Part.ROW_SCALE),
              Field("_columnwise_data", "columnwise_data", Part.COL_DATA),
              Field("_columnwise_scale_inv", "columnwise_scale_inv", Part.COL_SCALE),
              Field("_amax_rowwise", "amax_rowwise", Part.ROW_TENSOR_SCALE),
              Field("_amax_columnwise", "amax_columnwise", Part.COL_TENSOR_SCALE))
    SAVED = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise",
             "_amax_columnwise")
    STATE = (("_fp4_dtype", "fp4_dtype"), ("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales"),
             ("_row_scaled_nvfp4", "row_scaled_nvfp4"), ("_nvfp4_use_4over6", "nvfp4_use_4over6"),
             ("_nvfp4_e4m3_max", "nvfp4_e4m3_max"))

    def __new__(cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise,
                amax_columnwise, fp4_dtype, quantizer, with_gemm_swizzled_scales, *args, fake_dtype=None,
                row_scaled_nvfp4=False, nvfp4_use_4over6=False, nvfp4_e4m3_max=448, **kwargs):
        buffers = dict(rowwise_data=rowwise_data, rowwise_scale_inv=rowwise_scale_inv, columnwise_data=columnwise_data,
                       columnwise_scale_inv=columnwise_scale_inv, amax_rowwise=amax_rowwise,
                       amax_columnwise=amax_columnwise)
        state = dict(fp4_dtype=fp4_dtype, with_gemm_swizzled_scales=with_gemm_swizzled_scales,
                     row_scaled_nvfp4=row_scaled_nvfp4, nvfp4_use_4over6=nvfp4_use_4over6,
                     nvfp4_e4m3_max=nvfp4_e4m3_max if nvfp4_use_4over6 else 448)
        return cls._construct(buffers, state, quantizer, fake_dtype, args, kwargs)

    def _struct(self):
        struct = self._get_quantizer()._struct()
        struct.rowwise, struct.columnwise = self.get_usages().values()
        struct.swizzled = bool(self._with_gemm_swizzled_scales)
        struct.row_scaled = bool(self._row_scaled_nvfp4)
        struct.scale_rule = ScaleRule.FOUR_OVER_SIX if self._nvfp4_use_4over6 else ScaleRule.RTN
        struct.e4m3_max = self._nvfp4_e4m3_max
        return struct

    def _build_default_quantizer(self):
        return NVFP4Quantizer(row_scaled_nvfp4=self._row_scaled_nvfp4, nvfp4_use_4over6=self._nvfp4_use_4over6,
                              nvfp4_e4m3_max=self._nvfp4_e4m3_max, **self.get_usages())

    def _shape_of_bytes(self):
        if self._rowwise_data is not None:
            *leading, last = self._rowwise_data.shape
            return torch.Size((*leading, last * 2))
        if self._columnwise_data is not None:
            first, *leading, last = self._columnwise_data.shape
            return torch.Size((*leading, last * 2, first))
        return None

    def get_data_tensors(self, rowwise_data=True, columnwise_data=True):
        return self._rowwise_data, self._columnwise_data

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        there = self.get_usages()
        row = there["rowwise"] if rowwise_usage is None else rowwise_usage
        col = there["columnwise"] if columnwise_usage is None else columnwise_usage
        needed = {"rowwise": row, "columnwise": col and not (row and self._rowwise_data is not None)}
        usages = {"rowwise": (self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise),
                  "columnwise": (self._columnwise_data, self._columnwise_scale_inv, self._amax_columnwise)}
        for name, fields in usages.items():
            if needed[name] and any(field is None for field in fields):
                raise RuntimeError(f"Requested {name} usage, but NVFP4Tensor is missing {name} data, scales or amax")
        if row and col and self._columnwise_data is None:
            self._create_columnwise()
            return
        if not row:
            self._rowwise_data = self._rowwise_scale_inv = self._amax_rowwise = None
        if not col:
            self._columnwise_data = self._columnwise_scale_inv = self._amax_columnwise = None

    def _create_columnwise(self):
        if self._quantizer is None or not self._quantizer.with_2d_quantization:
            raise RuntimeError("Cannot create columnwise data from rowwise data without 2D quantization: blocks of "
                               "1x16 have other scales in each usage")
        super()._create_columnwise()


NVFP4TensorStorage.storage_class = NVFP4TensorStorage


def _slice(tensor, func, args, kwargs):
    """Everything, or rows between blocks: what is copied into those as NVFP4 goes to the whole tensor."""
    if is_full_slice(tensor, args):
        return type(tensor).make_like(tensor)
    dim, start, end, step = [*args[1:], *(0, None, None, 1)[len(args) - 1:]]
    first, last, _step = slice(start, end).indices(tensor.shape[0])
    if tensor.dim() != 2 or dim not in (0, -2) or step != 1 or first % 16 or not first < last \
            or (last % 16 and last != tensor.shape[0]) or tensor._rowwise_data is None \
            or tensor._with_gemm_swizzled_scales:
        raise NotImplementedError("NVFP4Tensor does not support slices of a part but for rows between blocks of 16: "
                                  "dequantize")
    part = rows_of(tensor, first, last - first)
    part.update_usage(columnwise_usage=False)
    part._window = (tensor, first)
    return part


def _as_strided(tensor, func, args, kwargs):
    if tensor.dim() == 2 and is_same_strides(tensor, args):
        return type(tensor).make_like(tensor)
    raise NotImplementedError("NVFP4Tensor does not support as_strided to another shape: dequantize first")


def _zero_(tensor, func, args, kwargs):
    tensor._change(lib.nib_tensor_zero)
    _bridge.changed(tensor._parts())
    return tensor


def _new_zeros(tensor, func, args, kwargs):
    """FSDP2 makes the memory of a weight's shard in this way; one that cannot be NVFP4 must not become a plain one."""
    shape = tuple(args[1])
    layer = getattr(tensor, "layer", None)
    if layer is not None and len(shape) == 2 and shape[1] == tensor.shape[1] and 0 < shape[0] < tensor.shape[0] \
            and (shape[0] % 16 or tensor.shape[0] % shape[0]):
        raise ValueError(f"{layer}: {tensor.shape[0]} rows in shards of {shape[0]} are not whole blocks of 16 rows, "
                         "alike on all ranks: NVFP4 weights cannot be sharded so")
    out = new_zeros_handler(tensor, func, args, kwargs)
    if layer is not None and isinstance(out, NVFP4Tensor):
        out._is_shard = True
        if out._get_quantizer().with_2d_quantization:  # the columnwise usage is built after a gather
            out.update_usage(columnwise_usage=False)
    return out


class Flattened(QuantizedTensor):
    """The values of a shard in one dim, dequantized when somebody asks. FSDP2 keeps one of every shard and looks at
    none: plain values would be several times the shard."""

    def __new__(cls, tensor):
        self = super().__new__(cls, (tensor.numel(),), tensor.dtype, device=tensor.device)
        self._tensor, self._quantizer = tensor, None
        return self

    def dequantize(self, *, dtype=None):
        return self._tensor._dequantize(dtype).view(-1)

    def quantize_(self, tensor, *, noop_flag=None):
        self._tensor.quantize_(tensor.view(self._tensor.shape), noop_flag=noop_flag)
        return self

    def detach(self):
        return Flattened(self._tensor)


class NVFP4Tensor(FormatTensor, NVFP4TensorStorage, QuantizedTensor):
    """A tensor of NVFP4 codes with the behavior of its nominal dtype."""

    BLOCK_ROWS = 16
    TRANSIENT = ("amax_reduction_group", "_window", "_is_shard")
    amax_reduction_group = None  # FSDP2 sets it on parameters: a shard has the amax of the whole
    _window = None  # (tensor, first row) of the tensor whose rows these are
    _is_shard = False  # FSDP2 has it

    HANDLERS = {aten.view.default: view_handler, aten.slice.Tensor: _slice, aten.as_strided.default: _as_strided,
                aten.split.Tensor: split_handler, aten.new_zeros.default: _new_zeros, aten.zero_.default: _zero_,
                aten.record_stream.default: record_stream_handler}

    def __new__(cls, *args, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise,
                amax_columnwise, fp4_dtype=DType.kFloat4E2M1, quantizer, with_gemm_swizzled_scales, **kwargs):
        return NVFP4TensorStorage.__new__(cls, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv,
                                          amax_rowwise, amax_columnwise, fp4_dtype, quantizer,
                                          with_gemm_swizzled_scales, *args, **kwargs)

    @classmethod
    def make_like(cls, tensor, **changes):
        """A new object over the same buffers, which is as much a shard or a part of another as the old one."""
        other = super().make_like(tensor, **changes)
        for name in cls.TRANSIENT:
            if getattr(tensor, name, None) is not None:
                setattr(other, name, getattr(tensor, name))
        return other

    def view(self, *shape):
        if self._is_shard and _resolve_shape(shape, self.numel()) == (self.numel(),) and not self.requires_grad:
            return Flattened(self)
        return super().view(*shape)

    # -- rows of another --

    def _copy_bytes(self, src):
        if isinstance(src, NVFP4TensorStorage) and src._columnwise_data is None and src._rowwise_data is not None \
                and self._columnwise_data is not None and self._get_quantizer().with_2d_quantization:
            return self._copy_rowwise(src)
        if not super()._copy_bytes(src):
            return False
        if self._window is None:
            return True
        (whole, first), count = self._window, self.shape[0]
        whole._rowwise_data[first:first + count].copy_(self._rowwise_data)
        whole._rowwise_scale_inv[first:first + count].copy_(self._rowwise_scale_inv[:count])
        whole._amax_rowwise.copy_(self._amax_rowwise)
        whole.update_usage(columnwise_usage=False)  # of 16x16 blocks it comes back where it is wanted
        return True

    def _copy_rowwise(self, src):
        """From a tensor without a columnwise usage: it is built of the rowwise one."""
        columnwise = self._columnwise_data, self._columnwise_scale_inv, self._amax_columnwise
        self.update_usage(columnwise_usage=False)
        done = self._copy_bytes(src)
        if done:
            self.update_usage(rowwise_usage=True, columnwise_usage=True)
        else:
            self._columnwise_data, self._columnwise_scale_inv, self._amax_columnwise = columnwise
        return done

    def quantize_(self, tensor, *, noop_flag=None):
        if self._window is not None:
            raise NotImplementedError("rows of an NVFP4Tensor have the tensor scale of the whole: they take NVFP4 "
                                      "rows, values cannot be quantized into them")
        return super().quantize_(tensor, noop_flag=noop_flag)

    # -- FSDP2: the framework gathers --

    def fsdp_pre_all_gather(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        """(what to gather: rowwise codes, and scales without padding rows; what to know afterwards). Amaxes are not
        gathered: they must be equal on all ranks, so the group is kept for later updates."""
        if self._with_gemm_swizzled_scales:
            raise NotImplementedError("FSDP2 with GEMM-swizzled scales is not supported: they do not lie row by row")
        if mesh is not None:
            self.amax_reduction_group = mesh.get_group()
        rows = self.numel() // self.shape[-1]
        assert rows % 16 == 0, f"FSDP2 needs shards of whole blocks of 16 rows, not of {rows}"
        assert self._rowwise_data is not None, "FSDP2 gathers rowwise data, and there is none"
        quantizer = self._get_quantizer()
        if quantizer.columnwise_usage:
            assert quantizer.with_2d_quantization, "columnwise data can be built after a gather only of 16x16 blocks"
            self.update_usage(columnwise_usage=False)
        gathered = (self._rowwise_data, self._rowwise_scale_inv[:rows])
        metadata = (self._fp4_dtype, quantizer.columnwise_usage, self._amax_rowwise, self._amax_columnwise,
                    self._row_scaled_nvfp4, self._nvfp4_use_4over6, self._nvfp4_e4m3_max, self.shape[-1])
        return gathered, metadata

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """(the whole tensor, the buffers it was made of)."""
        if len(all_gather_outputs) == 1:  # one rank alone, of which FSDP2 passes the first buffer on: the rest is here
            all_gather_outputs = (*all_gather_outputs, self._rowwise_scale_inv[:self.numel() // self.shape[-1]])
        data, scales = (_bridge.placed(t).contiguous() for t in all_gather_outputs)
        columnwise, amax, cols = metadata[1], metadata[2], metadata[7]
        rows = data.numel() // data.shape[-1]
        quantizer = self._get_quantizer().copy()
        quantizer.set_usage(rowwise=True, columnwise=columnwise)
        quantizer.internal = False
        struct = self._struct()
        struct.rowwise, struct.columnwise = 1, bool(columnwise)
        if out is None:
            out = quantizer.make_empty((rows, cols), dtype=param_dtype, device=data.device)
        else:
            out._quantizer = quantizer
        there = _bridge.on_gpu(amax)  # for it to stay there: it decides no code, and nobody waits
        gathered = _library.FsdpParts(data=_bridge.array(data.view(rows, -1)), scales=_bridge.array(scales),
                                      tensor_scale=1.0 if there else float(amax))
        gathered.scales.dtype = DType.kFloat8E4M3
        parts = self._parts()
        parts[1::2] = [None] * 3  # the columnwise usage is built of what was gathered
        with out._native() as native, _bridge.Native(struct, self._dtype, (self.numel() // cols, cols), parts) as shard:
            lib.nib_tensor_set_quantizer(shard.handle, struct)
            lib.nib_fsdp_assign(shard.handle, gathered, rows, ctypes.c_void_p(native.handle.value))
            out._assign(native.parts())
        for copied in (out._amax_rowwise, out._amax_columnwise) if there else ():
            if copied is not None:
                copied.data.copy_(amax)  # what autograd has saved of the gather before is the same value
        for name, value in zip(("_fp4_dtype", "_row_scaled_nvfp4", "_nvfp4_use_4over6", "_nvfp4_e4m3_max"),
                               (metadata[0], *metadata[4:7])):
            setattr(out, name, value)
        buffers = (out._rowwise_data, out._rowwise_scale_inv, out._columnwise_data, out._columnwise_scale_inv)
        return out, tuple(buffer for buffer in buffers if buffer is not None)  # whose memory goes until the next gather

    # -- pickling --

    def __reduce_ex__(self, protocol):
        return self._reduced(_make_nvfp4_tensor_in_reduce_ex, (
            self.shape, self._rowwise_data, self._rowwise_scale_inv, self._columnwise_data, self._columnwise_scale_inv,
            self._amax_rowwise, self._amax_columnwise, self._fp4_dtype, self.dtype, self._quantizer,
            self._with_gemm_swizzled_scales, self._row_scaled_nvfp4, self._nvfp4_use_4over6, self._nvfp4_e4m3_max))

    @classmethod
    def _make_in_reduce_ex(cls, *args):
        """Pickles of before name this."""
        return _make_nvfp4_tensor_in_reduce_ex(*args)


NVFP4Tensor.storage_class = NVFP4TensorStorage
NVFP4Quantizer.tensor_class = NVFP4Tensor


def _make_nvfp4_tensor_in_reduce_ex(shape, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv,
                                    amax_rowwise, amax_columnwise, fp4_dtype, dtype, quantizer,
                                    with_gemm_swizzled_scales=False, row_scaled_nvfp4=False, nvfp4_use_4over6=False,
                                    nvfp4_e4m3_max=448):
    return NVFP4Tensor(shape=torch.Size(shape), dtype=dtype, rowwise_data=rowwise_data,
                       rowwise_scale_inv=rowwise_scale_inv, columnwise_data=columnwise_data,
                       columnwise_scale_inv=columnwise_scale_inv, amax_rowwise=amax_rowwise,
                       amax_columnwise=amax_columnwise, fp4_dtype=fp4_dtype, quantizer=quantizer,
                       with_gemm_swizzled_scales=with_gemm_swizzled_scales, row_scaled_nvfp4=row_scaled_nvfp4,
                       nvfp4_use_4over6=nvfp4_use_4over6, nvfp4_e4m3_max=nvfp4_e4m3_max)


torch.serialization.add_safe_globals([_make_nvfp4_tensor_in_reduce_ex, NVFP4Tensor, NVFP4Quantizer, DType])
