# SPDX-License-Identifier: Apache-2.0
"""Sharded master weights, gathers, and the exchange of raw buffers."""
import ctypes
import zlib
from contextlib import ExitStack

import torch

from .. import _library
from .._library import Array, P, Part, Usage, lib, raw
from . import _bridge
from .float8_blockwise_tensor import Float8BlockwiseQTensorStorage
from .float8_tensor import Float8Quantizer, Float8TensorStorage
from .format_tensor import FormatStorage
from .hybrid_tensor import HybridQuantizedTensorStorage
from .identity_tensor import IdentityTensorStorage
from .mxfp8_tensor import MXFP8TensorStorage
from .nvfp4_tensor import NVFP4TensorStorage
from .quantized_tensor import QuantizedTensor

# ---- Master weights --------------------------------------------------------------------------------------


def quantize_master_weights(model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights=None,
                            manual_post_all_gather_processing=False):
    """Cast shards of FP32 master weights into quantized model weights that all ranks of a group share.

    model_weights: all of them, in the same order on every rank. master_weights: this rank's shard of each, or None.
    start_offsets: the shard's first element in the flattened weight, or None. The result of all ranks together is that
    of quantizing the whole, whatever the cut. fsdp_shard_model_weights: where codes go instead of into the weights, one
    entry per weight: uint8, for MXFP8 a pair (rowwise, columnwise). manual_post_all_gather_processing: columnwise
    buffers stay where they are, until post_all_gather_processing; otherwise they are dropped. What is on a GPU goes
    through host memory, which takes waiting.
    """
    _cast(model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights,
          manual_post_all_gather_processing)


def _unmixed(weights, masters, starts, shards):
    """The lists with the halves of hybrid weights in their places, and without identity ones, whose shards are copied:
    that is all there is to do for them."""
    weights, masters, starts = list(weights), list(masters), list(starts)
    if not any(isinstance(weight, (HybridQuantizedTensorStorage, IdentityTensorStorage)) for weight in weights):
        return weights, masters, starts, shards
    if shards is not None:
        raise NotImplementedError("shards apart from hybrid and identity weights are not possible")
    found = [], [], []
    for weight, master, start in zip(weights, masters, starts, strict=True):
        halves = weight._halves() if isinstance(weight, HybridQuantizedTensorStorage) else [weight]
        for half in halves:
            if half is not weight and not isinstance(half, (Float8TensorStorage, IdentityTensorStorage)):
                raise NotImplementedError("quantize_master_weights takes weights of a HybridQuantizer whose halves "
                                          f"have one scale or none, not {type(half).__name__}")
            if not isinstance(half, IdentityTensorStorage):
                if isinstance(half, Float8TensorStorage) and half._data is None and half._transpose is not None:
                    half._data = half._transpose.movedim(0, -1).contiguous()  # in whose order shards are cast
                for column, value in zip(found, (half, master, start)):
                    column.append(value)
            elif master is not None and master.numel():
                with torch.no_grad():
                    half._hp_data.view(-1)[start:start + master.numel()].copy_(master.view(-1))
    return *found, None


def cast_master_weights_to_fp8(model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights=None,
                               manual_post_all_gather_processing=False):
    """The older name of quantize_master_weights."""
    quantize_master_weights(model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights,
                            manual_post_all_gather_processing)


def _bytes_of(shard):
    """Where codes go: uint8 memory of a tensor or of a Float8Tensor."""
    data = shard._data if isinstance(shard, Float8TensorStorage) else shard
    if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError("a shard of a quantized weight is a contiguous uint8 tensor")
    return data.view(-1)


class _Lists:
    """Lists of pointers for the library, and what they point to: in host memory, where casts of shards are made."""

    def __init__(self):
        self.kept, self._copies = [], []

    def _host(self, tensor):
        """The tensor, or a copy of one on a GPU, which write_back takes there again."""
        there = _bridge.host(tensor)
        if there is not tensor:
            self._copies.append((tensor, there))
        return there

    def write_back(self):
        for tensor, there in self._copies:
            tensor.copy_(there)

    def arrays(self, tensors):
        pointers = (P(Array) * max(1, len(tensors)))()
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                there = self._host(tensor)
                self.kept += [there, _bridge.array(there)]
                pointers[i] = ctypes.pointer(self.kept[-1])
        return pointers

    def pointers(self, tensors):
        self.kept += (there := [None if t is None else self._host(t) for t in tensors])
        return (ctypes.c_void_p * max(1, len(tensors)))(*(None if t is None else t.data_ptr() for t in there))


def _cast(weights, masters, starts, group, shards, manual, nvfp4=False):
    with _bridge.communicator(group) as comm:  # first: what fails on one rank from here on fails on all
        if not nvfp4:
            weights, masters, starts, shards = _unmixed(weights, masters, starts, shards)
        _cast_over(comm, weights, masters, starts, shards, manual, nvfp4)


def _cast_over(comm, weights, masters, starts, shards, manual, nvfp4):
    weights, masters, starts = list(weights), list(masters), list(starts)
    for weight in weights:
        if not isinstance(weight, FormatStorage):
            raise ValueError(f"quantize_master_weights takes quantized weights, not {type(weight).__name__}")
    for weight in weights:
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()

    def plain(master):
        if master is None or not master.numel():
            return None
        master = _bridge.host(master.detach())
        return (master.float() if master.dtype == torch.float16 else master).reshape(-1)

    masters = [plain(master) for master in masters]
    starts = [-1 if start is None or (i < len(masters) and masters[i] is None) else int(start)
              for i, start in enumerate(starts)]
    lists = _Lists()
    row_shards = col_shards = None
    if shards is not None:
        pairs = [shard if isinstance(shard, (tuple, list)) else (shard, None) for shard in shards]
        pairs += [(None, None)] * (len(weights) - len(pairs))
        row_shards = lists.arrays([None if row is None else _bytes_of(row) for row, _ in pairs])
        col_shards = lists.arrays([None if col is None else _bytes_of(col) for _, col in pairs])
    delayed = [w._quantizer if isinstance(w._quantizer, Float8Quantizer) else None for w in weights]
    options = _library.MasterOptions(
        manual_post_all_gather=bool(manual), row_shards=row_shards, col_shards=col_shards,
        scales=lists.pointers([q and q.scale for q in delayed]),
        amax_seen=lists.pointers([q and q.amax for q in delayed]))
    with ExitStack() as stack:
        natives = [stack.enter_context(weight._native(place=_bridge.host)) for weight in weights]
        handles = (ctypes.c_void_p * max(1, len(natives)))(*(native.handle for native in natives))
        arguments = (handles, len(weights), lists.arrays(masters), len(masters),
                     _library.shape_array(starts), len(starts))
        if nvfp4:
            lib.nib_quantize_nvfp4_param_shard(*arguments, comm, row_shards)
        else:
            lib.nib_quantize_master_weights(*arguments, comm, options)
        lists.write_back()
        for weight, native in zip(weights, natives):
            weight._assign([part if part is None else part.to(weight.device) for part in native.parts()])
            _bridge.changed(weight._parts())
            if manual and isinstance(weight, Float8TensorStorage):
                weight._reset_caches()


def post_all_gather_processing(model_weights):
    """After the codes were gathered: build the columnwise usages that are wanted from the rowwise ones."""
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
    chosen = []
    for weight in weights:
        if isinstance(weight, HybridQuantizedTensorStorage):
            chosen += [half for half in weight._halves() if isinstance(half, FormatStorage)]
        elif isinstance(weight, IdentityTensorStorage):
            continue
        elif isinstance(weight, FormatStorage):
            chosen.append(weight)
        elif isinstance(weight, QuantizedTensor):
            raise ValueError(f"post_all_gather_processing for {type(weight).__name__} is not supported")
    if not chosen:
        return
    with ExitStack() as stack:
        natives = []
        for weight in chosen:
            struct = weight._struct()
            native = stack.enter_context(_bridge.Native(struct, weight._dtype, tuple(weight.shape), weight._parts(),
                                                        columnwise_valid=False))
            natives.append(native)
            if weight._quantizer is not None and weight._quantizer.columnwise_usage:
                struct.columnwise = 1
                lib.nib_tensor_set_quantizer(native.handle, struct)
        handles = (ctypes.c_void_p * len(natives))(*(native.handle for native in natives))
        lib.nib_post_all_gather_processing(handles, len(natives))
        for weight, native in zip(chosen, natives):
            weight._assign(native.parts())


# ---- Raw buffers -----------------------------------------------------------------------------------------

_RAW_FIELD = {Float8TensorStorage: "_data", Float8BlockwiseQTensorStorage: "_rowwise_data",
              NVFP4TensorStorage: "_rowwise_data"}


def replace_raw_data(tensor, new_raw_data):
    """Copy the rowwise codes into another buffer and use that one from now on."""
    if isinstance(tensor, IdentityTensorStorage):
        new_raw_data.copy_(tensor._hp_data)
        tensor._hp_data = new_raw_data
        return
    if isinstance(tensor, MXFP8TensorStorage):
        raise NotImplementedError("replace_raw_data for MXFP8Tensor is not supported")
    field = next((name for kind, name in _RAW_FIELD.items() if isinstance(tensor, kind)), None)
    if field is None:
        raise ValueError(f"replace_raw_data for {type(tensor).__name__} is not supported")
    old = getattr(tensor, field)
    if old is None:
        raise RuntimeError(f"{type(tensor).__name__} has no rowwise data")
    if old.dtype != new_raw_data.dtype:
        raise ValueError(f"the data types do not match: {old.dtype} and {new_raw_data.dtype}")
    rebind_rowwise(tensor, field, new_raw_data)


def rebind_rowwise(tensor, field, new):
    """nib_tensor_rebind_rowwise: exactly the same number of bytes."""
    if not new.is_contiguous():
        raise ValueError("a buffer for codes must be contiguous")
    with tensor._native() as native:
        buffer = _bridge.borrowed_buffer(new)
        try:
            lib.nib_tensor_rebind_rowwise(native.handle, buffer)
        finally:
            raw.nib_buffer_release(buffer)
    old = getattr(tensor, field)
    setattr(tensor, field, new if new.shape == old.shape else new.view(old.shape))


def clear_columnwise_cache(tensor):
    """Drop columnwise data and scales, or a Float8 transpose. An amax costs nothing and stays."""
    if isinstance(tensor, Float8TensorStorage):
        tensor.remove_caches()
    elif isinstance(tensor, FormatStorage):
        for field in tensor.FIELDS:
            if field.part in (Part.COL_DATA, Part.COL_SCALE):
                setattr(tensor, field.name, None)


# ---- Products --------------------------------------------------------------------------------------------


def gemm_reference(a, b, *, a_columnwise=False, b_columnwise=False, alpha=1.0, out=None):
    """alpha A B^T in FP32, added to `out` where there is one, with the bits of TransformerEngine's reference. A rowwise
    usage is the [M, K] matrix, a columnwise one [K, M]; inner sizes must agree, and both or none be transformed."""
    accumulate = out is not None
    with a._native() as left, b._native() as right:
        if out is None:
            def lines(tensor, columnwise):
                cols = tensor.shape[-1]
                return cols if columnwise else tensor.shape.numel() // cols if cols else 0
            out = torch.empty(lines(a, a_columnwise), lines(b, b_columnwise))
        lib.nib_gemm_reference(_library.Operand(left.handle, None, int(a_columnwise)),
                               _library.Operand(right.handle, None, int(b_columnwise)),
                               _library.GemmOptions(alpha=alpha, beta=1.0 if accumulate else 0.0), _bridge.array(out))
    return out


# ---- Gathers ---------------------------------------------------------------------------------------------


def set_quantizer_amax_reduction_group(quantizer, amax_reduction_group):
    """Reduce amaxes over a group from now on; None ends it."""
    quantizer.with_amax_reduction = amax_reduction_group is not None
    quantizer.amax_reduction_group = amax_reduction_group


def gather_along_first_dim(inp, process_group, async_op=False, quantizer=None, output_tensor=None,
                           external_coalescing=False):
    """(the ranks' tensors one below the other, None). With a quantizer the result is quantized, and what travels are
    codes and scales where the tensors allow it."""
    import torch.distributed as dist
    size = dist.get_world_size(process_group)
    if size == 1:
        if quantizer is not None and not isinstance(inp, FormatStorage):
            inp = quantizer(inp)
        return inp, None
    if quantizer is None and not isinstance(inp, FormatStorage):
        return _gather_plain(inp, process_group, size, output_tensor), None
    if not isinstance(inp, FormatStorage):
        with _bridge.communicator(process_group) as comm:
            quantizable = quantizer.is_quantizable(inp)
            _bridge.agree(comm, int(quantizable))
        if not quantizable:
            whole, _handle = gather_along_first_dim(inp, process_group)
            return quantizer(whole), None
    with _bridge.communicator(process_group) as comm:  # first: what fails on one rank from here on fails on all
        if not isinstance(inp, FormatStorage):
            inp = quantizer(inp)
        with inp._native() as native:
            out = ctypes.c_void_p()
            lib.nib_all_gather_tensor(native.handle, comm, out)
            metadata = _library.Metadata()
            lib.nib_tensor_get_metadata(out, metadata)
            parts = _bridge.take(out)
    result = inp._like(parts, torch.Size(metadata.shape[:metadata.rank]))
    if output_tensor is not None:
        output_tensor._assign(inp._shaped(parts, result.shape))
        return output_tensor, None
    return result, None


def _gather_plain(inp, process_group, size, output_tensor):
    """The ranks' plain tensors one below the other. On the CPU the ranks agree before that, so that a fault of one is
    an error of all. On a GPU it is torch's collective alone, which no host waits for: there the group's time-out ends
    it."""
    import torch.distributed as dist

    def target():
        if not isinstance(inp, torch.Tensor) or not inp.dim():
            raise ValueError(f"what is gathered along dim 0 is a tensor that has one, not {str(inp)[:80]}")
        shape = (inp.shape[0] * size, *inp.shape[1:])
        if output_tensor is None:
            return torch.empty(shape, dtype=inp.dtype, device=inp.device)
        if not isinstance(output_tensor, torch.Tensor) or not output_tensor.is_contiguous() or \
                (output_tensor.shape, output_tensor.dtype, output_tensor.device) != (shape, inp.dtype, inp.device):
            raise ValueError(f"the output is a contiguous {inp.dtype} tensor {shape} on {inp.device}")
        return output_tensor

    if isinstance(inp, torch.Tensor) and inp.is_cuda:
        out = target()
    else:
        with _bridge.communicator(process_group) as comm:
            out = target()
            _bridge.agree(comm, zlib.crc32(repr((inp.dtype, inp.shape)).encode()))
    dist.all_gather_into_tensor(out, inp.contiguous(), group=process_group)
    return out


def all_gather_param(weight, start, length, group=None, shard=None):
    """Gather the codes of a weight whose elements start..start+length-1 are this rank's: in it, or in `shard`."""
    with _bridge.communicator(group) as comm, weight._native() as native:
        lib.nib_all_gather_param(native.handle, Usage.ROWWISE, _library.fit(int(start)), _library.fit(int(length)),
                                 None if shard is None else _bridge.array(_bytes_of(shard)), comm)
        weight._assign(native.parts())
    return weight


# ---- Small things ----------------------------------------------------------------------------------------


def round_up_to_nearest_multiple(value, multiple):
    """The smallest multiple that is not less than a value."""
    if multiple == 0:
        raise ValueError("there are no multiples of 0 to round to")
    return -(-value // multiple) * multiple


def interleave_glu_tensor(tensor, interleave_size):
    """[gate, linear] along dim 0 as blocks of interleave_size rows of each in turn."""
    _check_glu(tensor, interleave_size)
    halves = tensor.view(2, -1, interleave_size, *tensor.shape[1:])
    return halves.transpose(0, 1).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor, interleave_size):
    """Blocks of interleave_size rows of gate and linear in turn as [gate, linear]."""
    _check_glu(tensor, interleave_size)
    blocks = tensor.view(-1, 2, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)


def _check_glu(tensor, interleave_size):
    if interleave_size <= 0 or not tensor.dim() or tensor.shape[0] % (2 * interleave_size):
        raise ValueError(f"{tuple(tensor.shape)} has no pairs of blocks of {interleave_size} rows")


def get_device_compute_capability():
    """That of the CUDA device; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_cudnn_version():
    """(0, 0, 0): nothing here asks cuDNN."""
    return 0, 0, 0


def is_non_tn_fp8_gemm_supported():
    """Whether products of Float8 take operands in any layout, so that no transposes are kept: not here."""
    return False
