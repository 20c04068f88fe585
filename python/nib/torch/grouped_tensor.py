# SPDX-License-Identifier: Apache-2.0
"""Groups of matrices of one format in shared buffers, as the experts of a mixture have them.

Buffers are flat: the members' codes lie one after the other without gaps, so do their scales, each with its own
padding, and their amaxes. A member is a tensor of its format over its place in them.
"""
import contextlib
import ctypes
import math

import torch
from torch.utils._pytree import tree_map

from .._library import Part, lib, shape_array
from . import _bridge
from .constants import DType, TE_DType_To_Torch
from .format_tensor import FormatQuantizer, _is_set
from .nvfp4_tensor import NVFP4Quantizer
from .quantized_tensor import QuantizedTensor, _stride_from_shape, aten

# attribute of the group: nib_part of the members
_BUFFERS = {"rowwise_data": Part.ROW_DATA, "columnwise_data": Part.COL_DATA, "scale_inv": Part.ROW_SCALE,
            "columnwise_scale_inv": Part.COL_SCALE, "amax": Part.ROW_TENSOR_SCALE,
            "columnwise_amax": Part.COL_TENSOR_SCALE}
# the same where one scale serves both usages of a member (Float8): it is in both places
_SHARED = {"rowwise_data": Part.ROW_DATA, "columnwise_data": Part.COL_DATA, "scale_inv": Part.ROW_TENSOR_SCALE,
           "columnwise_scale_inv": Part.ROW_TENSOR_SCALE}
_SAVED = (*_BUFFERS, "scale", "first_dims", "last_dims", "tensor_offsets")


class GroupedTensorStorage:
    """num_tensors matrices. Without a quantizer rowwise_data holds them in high precision.

    first_dims and last_dims are int64 vectors, None where all are equal; tensor_offsets the int64 element offsets (one
    more than there are members); offsets and tensor_shapes the same for the host. logical_shape is that of the members
    one below the other, or side by side where the first dims agree.
    """

    def __new__(cls, shape, dtype, *, num_tensors, shapes, quantizer=None, requires_grad=False, device=None, **buffers):
        if issubclass(cls, torch.Tensor):
            outer = (num_tensors, *shapes[0]) if shapes and len(set(shapes)) == 1 else tuple(shape)
            self = torch.Tensor._make_wrapper_subclass(cls, outer, strides=_stride_from_shape(outer), dtype=dtype,
                                                       layout=torch.strided, requires_grad=requires_grad,
                                                       device=torch.device("cpu") if device is None else device)
        else:
            self = object.__new__(cls)
        self.fake_dtype = dtype
        self.num_tensors = num_tensors
        self.logical_shape = tuple(shape)
        self.tensor_shapes = [tuple(s) for s in shapes]
        self.quantizer = quantizer.copy() if quantizer is not None else None
        self.scale = buffers.get("scale")
        for name in _BUFFERS:
            setattr(self, name, buffers.get(name))
        self.offsets = [0]
        for s in self.tensor_shapes:
            self.offsets.append(self.offsets[-1] + math.prod(s))
        firsts, lasts = zip(*self.tensor_shapes) if self.tensor_shapes else ((), ())
        same_first, same_last = len(set(firsts)) <= 1, len(set(lasts)) <= 1
        self.first_dims = None if same_first else torch.tensor(firsts, dtype=torch.int64)
        self.last_dims = None if same_last else torch.tensor(lasts, dtype=torch.int64)
        self.tensor_offsets = None if same_first and same_last else torch.tensor(self.offsets, dtype=torch.int64)
        self.scale_inv_offsets = self._part_offsets(Part.ROW_SCALE)
        self.columnwise_scale_inv_offsets = self._part_offsets(Part.COL_SCALE)
        self.quantized_tensors = None
        return self

    def __init__(self, *args, **kwargs):
        """__new__ has done it all."""

    # -- construction --

    @classmethod
    def make_grouped_tensor_with_shapes(cls, num_tensors, shapes, quantizer=None, device=None, dtype=torch.float32):
        """An empty group of these matrices."""
        shapes = [tuple(s) for s in shapes]
        if len(shapes) != num_tensors:
            raise ValueError(f"{num_tensors} tensors, but {len(shapes)} shapes")
        firsts, lasts = {s[0] for s in shapes}, {s[1] for s in shapes}
        if len(lasts) <= 1:
            logical = (sum(s[0] for s in shapes), next(iter(lasts), 0))
        elif len(firsts) == 1:
            logical = (next(iter(firsts)), sum(s[1] for s in shapes))
        else:
            logical = (1, sum(math.prod(s) for s in shapes))
        buffers = {}
        if quantizer is None:
            buffers["rowwise_data"] = torch.zeros(sum(math.prod(s) for s in shapes), dtype=dtype)
        else:
            for name, part in _places(quantizer).items():
                specs = [_spec(quantizer, part, s) for s in shapes]
                if specs and specs[0] is not None:
                    buffers[name] = torch.zeros(sum(math.prod(size) for size, _ in specs), dtype=specs[0][1])
            if _is_shared(quantizer):
                _share(buffers, quantizer, num_tensors)
        return cls(logical, dtype, num_tensors=num_tensors, shapes=shapes, quantizer=quantizer, **buffers)

    @classmethod
    def make_grouped_tensor(cls, num_tensors, first_dims=None, last_dims=None, logical_first_dim=0, logical_last_dim=0,
                            quantizer=None, device=None, dtype=torch.float32):
        """The same from vectors of dims (None: all equal) and the logical shape."""
        def dims(vector, logical, varying_other):
            if vector is not None:
                return [int(v) for v in vector]
            return [logical] * num_tensors if varying_other is not None else [logical // num_tensors] * num_tensors

        if first_dims is None and last_dims is None:
            shapes = [(logical_first_dim // num_tensors, logical_last_dim)] * num_tensors
        else:
            shapes = list(zip(dims(first_dims, logical_first_dim, last_dims),
                              dims(last_dims, logical_last_dim, first_dims)))
        return cls.make_grouped_tensor_with_shapes(num_tensors, shapes, quantizer, device, dtype)

    @classmethod
    def make_grouped_tensor_from_rowwise_data(cls, num_tensors, tensor_shape, rowwise_data, dtype=None):
        """High-precision matrices of one shape over a buffer that exists."""
        data = rowwise_data.reshape(-1)
        shapes = [tuple(tensor_shape)] * num_tensors
        if data.numel() != num_tensors * math.prod(tensor_shape):
            raise ValueError(f"{data.numel()} elements are not {num_tensors} of {tuple(tensor_shape)}")
        logical = (num_tensors * tensor_shape[0], tensor_shape[1])
        return cls(logical, dtype or rowwise_data.dtype, num_tensors=num_tensors, shapes=shapes, rowwise_data=data)

    def copy(self):
        """Another object over the same buffers."""
        return _rebuild_group(type(self), *self._facts())

    def _facts(self):
        buffers = {name: getattr(self, name) for name in (*_BUFFERS, "scale")}
        return self.logical_shape, self.fake_dtype, self.num_tensors, self.tensor_shapes, self.quantizer, buffers

    def clone(self):
        """A copy of every buffer."""
        *facts, buffers = self._facts()
        return _rebuild_group(type(self), *facts, {n: None if b is None else b.clone() for n, b in buffers.items()})

    @staticmethod
    def make_tensor_offsets(first_dims, logical_last_dim):
        """Element offsets of matrices with these rows."""
        offsets = [0]
        for rows in first_dims.tolist():
            offsets.append(offsets[-1] + rows * logical_last_dim)
        return torch.tensor(offsets, dtype=torch.int64)

    # -- what it is --

    def has_data(self):
        return self.rowwise_data is not None

    def has_columnwise_data(self):
        return self.columnwise_data is not None

    def all_same_first_dim(self):
        return self.first_dims is None

    def all_same_last_dim(self):
        return self.last_dims is None

    def all_same_shape(self):
        return self.first_dims is None and self.last_dims is None

    def varying_both_dims(self):
        return self.first_dims is not None and self.last_dims is not None

    def get_common_first_dim(self):
        if not self.all_same_first_dim():
            raise RuntimeError("the first dims of the group differ")
        return self.tensor_shapes[0][0]

    def get_common_last_dim(self):
        if not self.all_same_last_dim():
            raise RuntimeError("the last dims of the group differ")
        return self.tensor_shapes[0][1]

    def _part_offsets(self, part):
        if self.quantizer is None:
            return None
        offsets = [0]
        for shape in self.tensor_shapes:
            spec = _spec(self.quantizer, part, shape)
            if spec is None:
                return None
            offsets.append(offsets[-1] + math.prod(spec[0]))
        return offsets

    # -- members --

    def split_into_quantized_tensors(self):
        """The members: views, nothing is copied."""
        if self.quantizer is None:
            return [self.rowwise_data[begin:end].view(shape) for begin, end, shape in
                    zip(self.offsets, self.offsets[1:], self.tensor_shapes)]
        quantizer = self.quantizer.copy()
        quantizer.internal = False
        members, at = [], dict.fromkeys(_BUFFERS, 0)
        for shape in self.tensor_shapes:
            parts = [None] * len(Part)
            for name, part in _places(quantizer).items():
                buffer, spec = getattr(self, name), _spec(quantizer, part, shape)
                if buffer is not None and spec is not None:
                    n = math.prod(spec[0])
                    parts[part] = buffer[at[name]:at[name] + n].view(spec[0])
                    at[name] += n
            members.append(quantizer._wrap(shape, self.fake_dtype, parts))
        return members

    def _members(self):
        if self.quantized_tensors is None:
            self.quantized_tensors = self.split_into_quantized_tensors()
        return self.quantized_tensors

    def quantize(self, tensors, noop_flag=None):
        """Quantize matrices into the members; returns these."""
        members = self.split_into_quantized_tensors()
        if len(tensors) != len(members):
            raise ValueError(f"{len(tensors)} tensors for a group of {len(members)}")
        for tensor, member in zip(tensors, members):
            if self.quantizer is None:
                member.copy_(tensor)
            elif math.prod(tensor.shape):
                self.quantizer.update_quantized(tensor, member, noop_flag=noop_flag)
        if _is_shared(self.quantizer) and not _is_set(noop_flag):
            self._note_amaxes(tensors, members)
        self.quantized_tensors = members
        return members

    def _note_amaxes(self, tensors, members):
        """amax and scale of each member of Float8. The scale of none is 1."""
        for i, (tensor, member) in enumerate(zip(tensors, members)):
            if not math.prod(tensor.shape):
                self.amax[i], self.scale[i] = 0.0, 1.0
                member._scale_inv.fill_(1.0)
                continue
            self.amax[i] = tensor.detach().abs().max().float()
            self.scale[i] = self.quantizer.scale.item() if hasattr(self.quantizer, "scale") else \
                torch.reciprocal(member._scale_inv)[0]

    def dequantize(self, dtype=None):
        """The members' values, one below the other in dim 0 of a new one where shapes agree; a list otherwise."""
        values = [m.dequantize(dtype=dtype or self.fake_dtype) if isinstance(m, QuantizedTensor)
                  else m.to(dtype or self.fake_dtype) for m in self._members()]
        return torch.stack(values) if self.all_same_shape() else values

    # -- saving --

    def prepare_for_saving(self):
        tensors = [getattr(self, name) for name in _SAVED]
        for name in _SAVED:
            setattr(self, name, None)
        self.quantized_tensors = None
        return tensors, self

    def restore_from_saved(self, tensors):
        for name, tensor in zip(_SAVED, tensors):
            setattr(self, name, tensor)
        return tensors[len(_SAVED):]

    def clear(self):
        """No members, no data."""
        for name in _SAVED:
            setattr(self, name, None)
        self.quantized_tensors = None
        self.num_tensors = 0
        self.tensor_shapes, self.offsets = [], [0]
        self.scale_inv_offsets = self.columnwise_scale_inv_offsets = None
        self.logical_shape = (0, 0)

    def __repr__(self):
        kind = "high precision" if self.quantizer is None else type(self.quantizer).__name__
        return f"{type(self).__name__}({self.num_tensors} of {self.tensor_shapes}, {kind}, dtype={self.fake_dtype})"


def _rebuild_group(cls, logical_shape, dtype, num_tensors, shapes, quantizer, buffers):
    return cls(logical_shape, dtype, num_tensors=num_tensors, shapes=shapes, quantizer=quantizer, **buffers)


def _is_shared(quantizer):
    return isinstance(quantizer, FormatQuantizer) and quantizer.tensor_class.storage_class.SHARED_TENSOR_SCALE


def _places(quantizer):
    """{attribute of the group: nib_part} for members of a quantizer."""
    if not _is_shared(quantizer):
        return _BUFFERS
    return {name: part for name, part in _SHARED.items()
            if name != ("scale_inv" if not quantizer.rowwise_usage else "columnwise_scale_inv")}


def _share(buffers, quantizer, num_tensors):
    """What a group of Float8 has besides: one scale_inv under both names, amaxes and scales."""
    if quantizer.rowwise_usage and quantizer.columnwise_usage:
        buffers["columnwise_scale_inv"] = buffers["scale_inv"]
    buffers["amax"], buffers["scale"] = torch.zeros(num_tensors), torch.ones(num_tensors)


def _spec(quantizer, part, shape):
    """(shape, dtype) of a part of a member, None where it has none."""
    storage = quantizer.tensor_class.storage_class
    field = next((f for f in storage.FIELDS if f.part == part), None)
    return None if field is None else quantizer.inner_tensor_specs(shape).get(field.name)


_BANNED = {aten.as_strided.default, aten.transpose.int, aten.t.default, aten.permute.default, aten.slice.Tensor,
           aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unsqueeze.default,
           aten.squeeze.default, aten.squeeze.dim, aten.unbind.int, aten.cat.default, aten.stack.default,
           aten.index_select.default, aten.narrow.default, aten.chunk.default, aten.reshape.default,
           aten._unsafe_view.default, aten._reshape_alias.default}


class GroupedTensor(GroupedTensorStorage, torch.Tensor):
    """A group as a torch.Tensor: [n, M, N] where all members have one shape, its logical shape otherwise."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents=None):
        return GroupedTensorStorage.__repr__(self)

    def _copy_buffers(self, src):
        """Copy the bytes of a group of the same kind; False where it is of another."""
        if not isinstance(src, GroupedTensor) or src.tensor_shapes != self.tensor_shapes \
                or src.quantizer != self.quantizer:
            return False
        for name in _BUFFERS:
            here, there = getattr(self, name), getattr(src, name)
            if here is not None:
                here.copy_(there)
        return True

    def detach(self):
        return self.copy()

    def __reduce_ex__(self, protocol):
        return _rebuild_group, (type(self), *self._facts())

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self.clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                memo[id(self)]._is_param = True
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        first = args[0] if args else None
        if isinstance(first, GroupedTensor):
            if func in (aten.detach.default, aten.alias.default):
                return first.copy()
            if func == aten.copy_.default and first._copy_buffers(args[1]):
                return first
            if func == aten.expand.default:
                if tuple(args[1]) in (tuple(first.shape), (-1,) * first.dim()):
                    return first.copy()
                raise RuntimeError("a GroupedTensor cannot be expanded to another shape")
            if func == aten.expand_as.default and tuple(args[1].shape) == tuple(first.shape):
                return first.copy()
            if func == aten.view.default:
                if tuple(args[1]) in ((-1,), (first.numel(),)) and first.rowwise_data is not None:
                    return first.rowwise_data.view(-1)
                raise RuntimeError("a GroupedTensor can be viewed only as its flat rowwise buffer: view(-1)")
        if func in _BANNED:
            raise RuntimeError(f"{func} is not supported on a GroupedTensor: split it into its members")
        return _on_members(func, args, kwargs)


def _on_members(func, args, kwargs):
    """An operation on the stacked values of the members; those that it writes to are quantized again."""
    stacked = {}

    def plain(value):
        if not isinstance(value, GroupedTensor):
            return value
        if not value.all_same_shape():
            raise RuntimeError(f"{func} needs a GroupedTensor whose members have one shape")
        if id(value) not in stacked:
            stacked[id(value)] = (value, value.dequantize())
        return stacked[id(value)][1]

    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if not func._schema.is_mutable:
        return result
    back = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
        for group in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(group, GroupedTensor):
                values = stacked[id(group)][1]
                group.quantize(list(values.unbind(0)))
                back[id(values)] = group
    return tree_map(lambda value: back.get(id(value), value) if isinstance(value, torch.Tensor) else value, result)


torch.serialization.add_safe_globals([_rebuild_group, GroupedTensor])

# ---- Quantize groups -------------------------------------------------------------------------------------


def _reduction(quantizer):
    """FormatQuantizer._reduction of any quantizer, or of none."""
    return quantizer._reduction() if isinstance(quantizer, FormatQuantizer) else contextlib.nullcontext()


def split_quantize(tensor, split_sections, quantizer_list, disable_bulk_allocation=False):
    """Quantize rows of a tensor as tensors of their own: section i with quantizer i. Where all quantizers say the same,
    in one call, with one reduction of amaxes."""
    first = quantizer_list[0] if quantizer_list else None
    with _reduction(first) as comm:
        sections = [int(n) for n in split_sections]
        if len(sections) != len(quantizer_list):
            raise ValueError(f"{len(sections)} sections, but {len(quantizer_list)} quantizers")
        if sum(sections) != tensor.shape[0]:
            raise ValueError(f"the sections have {sum(sections)} rows, the tensor {tensor.shape[0]}")
        if not sections:
            return []
        source = _bridge.placed(tensor.detach())
        together = source.dim() == 2 and not _bridge.on_gpu(source) and isinstance(first, FormatQuantizer) \
            and first._overrides() is None and all(q == first for q in quantizer_list) \
            and len({getattr(q, "amax_reduction_group", None) for q in quantizer_list}) == 1
        if together:
            out = (ctypes.c_void_p * len(sections))()
            struct, _none = first._quantization(comm, source)
            if isinstance(first, NVFP4Quantizer) and struct.swizzled:  # all or none, as the bulk kernel has it
                struct.swizzled = first.with_rht and all(first._swizzles_itself((n, source.shape[1]), 128)
                                                         for n in sections)
            lib.nib_split_quantize(struct, _bridge.array(source), shape_array(sections), len(sections), out)
    if not together:
        return [q(part) for q, part in zip(quantizer_list, torch.split(source, sections))]
    results = []
    for quantizer, rows, handle in zip(quantizer_list, sections, list(out)):
        results.append(quantizer._wrap((rows, source.shape[1]), tensor.dtype, _bridge.take(ctypes.c_void_p(handle))))
    for result in results:
        if hasattr(result, "_with_gemm_swizzled_scales"):
            result._with_gemm_swizzled_scales = bool(struct.swizzled)
        if getattr(result._quantizer, "with_amax_reduction", False):
            result._quantizer.with_amax_reduction = False
            result._quantizer.amax_reduction_group = None
    return results


def _member_shapes(tensor, num_tensors, first_dims, last_dims):
    """Shapes of a group's members, which lie one after the other in a tensor's memory."""
    rows, cols = tensor.shape[0], tensor.shape[-1]
    if first_dims is None and last_dims is None:
        if rows % num_tensors:
            raise ValueError(f"{rows} rows cannot be shared by {num_tensors} members")
        return [(rows // num_tensors, cols)] * num_tensors
    counts = [[fixed] * num_tensors if dims is None else [int(n) for n in dims]
              for dims, fixed in ((first_dims, rows), (last_dims, cols))]
    if any(len(count) != num_tensors for count in counts):
        raise ValueError(f"first_dims and last_dims have one entry for each of {num_tensors} members")
    return list(zip(*counts))


def _members_of(tensor, shapes):
    """The members of a plain tensor; it may be longer than they are."""
    sizes = [math.prod(shape) for shape in shapes]
    if sum(sizes) > tensor.numel():
        raise ValueError(f"the members have {sum(sizes)} elements, the tensor {tensor.numel()}")
    flat, at, members = tensor.reshape(-1), 0, []
    for shape, size in zip(shapes, sizes):
        members.append(flat[at:at + size].view(shape))
        at += size
    return members


def group_quantize(tensor, quantizer, num_tensors, first_dims=None, last_dims=None, tensor_offsets=None, noop_flag=None,
                   output=None):
    """Quantize a tensor as a GroupedTensor. Its members lie one after the other in memory: first_dims[i] by
    last_dims[i] elements each, all of the tensor's rows or columns where one of them is absent, equal shares of the
    rows where both are. What is behind the last is not looked at."""
    with _reduction(quantizer):
        shapes = _member_shapes(tensor, num_tensors, first_dims, last_dims)
        members = _members_of(tensor, shapes)
        if output is None:
            output = GroupedTensor.make_grouped_tensor_with_shapes(num_tensors, shapes, quantizer, dtype=tensor.dtype)
            output.logical_shape = tuple(tensor.shape)
            _keep_dims(output, first_dims, last_dims, tensor_offsets)
    output.quantize(members, noop_flag=noop_flag)
    return output


def _keep_dims(group, first_dims, last_dims, tensor_offsets):
    """The caller's own vectors, also where all members are alike."""
    def vector(dims):
        return dims.to(torch.int64) if isinstance(dims, torch.Tensor) else torch.tensor(list(dims), dtype=torch.int64)

    if first_dims is not None:
        group.first_dims = vector(first_dims)
    if last_dims is not None:
        group.last_dims = vector(last_dims)
    if tensor_offsets is not None:
        group.tensor_offsets = tensor_offsets
    elif first_dims is not None or last_dims is not None:
        group.tensor_offsets = torch.tensor(group.offsets, dtype=torch.int64)


def bgrad_group_quantize(tensor, quantizer, num_tensors, first_dims=None, last_dims=None, tensor_offsets=None):
    """(group_quantize, the sums of each member's rows [num_tensors, columns])."""
    if last_dims is not None:
        raise ValueError("gradients of biases need members of equal last dims")
    shapes = _member_shapes(tensor, num_tensors, first_dims, None)
    sums = torch.stack([member.sum(0, dtype=torch.float32) for member in _members_of(tensor, shapes)])
    group = group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets=tensor_offsets)
    return group, sums.to(tensor.dtype)


def splits_to_offsets_multi(split_sizes, device=None, *, strides, include_leading_zero, dtypes, bulk_allocate=False):
    """(split sizes as int64, for each stride the running sums of the sizes times it, with or without a 0 first)."""
    sizes = split_sizes.to(device=device, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    offsets = torch.cat((ends.new_zeros(1), ends))
    return sizes, [(offsets if zero else ends).mul(stride).to(dtype)
                   for stride, zero, dtype in zip(strides, include_leading_zero, dtypes, strict=True)]


def group_dequantize(grouped, dtype=None):
    """A GroupedTensor of the members' values, in a torch.dtype or a DType."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = TE_DType_To_Torch[DType.cast(dtype)]
    dtype = dtype or grouped.fake_dtype
    values = [member.dequantize(dtype=dtype) if math.prod(member.shape) else torch.empty(member.shape, dtype=dtype)
              for member in grouped._members()]
    out = GroupedTensor.make_grouped_tensor_with_shapes(grouped.num_tensors, grouped.tensor_shapes, dtype=dtype)
    out.logical_shape = grouped.logical_shape
    out.first_dims, out.last_dims, out.tensor_offsets = grouped.first_dims, grouped.last_dims, grouped.tensor_offsets
    out.quantize(values)
    return out
