# SPDX-License-Identifier: Apache-2.0
"""Torch tensors to the library and back. Nothing is computed here.

    array(t)              a nib_array over a torch tensor's memory, on the host or on a GPU and torch's current stream
    Native(...)           a nib_tensor over torch buffers, for the length of a `with`; `parts()` says afterwards what
                          its buffers are: the same torch tensors where the library wrote in place or shares them, new
                          ones (over the library's memory, by DLPack) where it made them
    quantize(...)         the parts of a new tensor, where the values are
    communicator(group)   a nib_comm over a torch.distributed group
    draw(q, device)       seed and offset of the random stream, from torch's default generator of the device
"""
import ctypes
import functools
import threading

import torch

from .. import _arrays, _cuda, _library
from .._device import entered
from .._library import Array, Part, lib, raw, shape_array
from .constants import DType, TE_DType

_ITEMSIZE = {DType.kByte: 1, DType.kInt16: 2, DType.kInt32: 4, DType.kInt64: 8, DType.kFloat32: 4, DType.kFloat16: 2,
             DType.kBFloat16: 2, DType.kFloat8E4M3: 1, DType.kFloat8E5M2: 1}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def code_of(dtype):
    """The library's dtype of a torch.dtype."""
    code = TE_DType.get(dtype)
    if code is None:
        raise _library.DtypeError(f"nib does not take {dtype}")
    return code


def is_fake(t):
    """Whether a tensor has a shape but no memory (torch.compile traces with such)."""
    return t.device.type == "meta" or isinstance(t, torch._subclasses.fake_tensor.FakeTensor) \
        or isinstance(t, torch._subclasses.functional_tensor.FunctionalTensor)


def is_meta(t):
    """Whether a tensor is one of the meta device: a shape, for good."""
    return t.device.type == "meta" and not isinstance(t, torch._subclasses.fake_tensor.FakeTensor)


def changed(parts):
    """The library has written into these tensors: autograd is to notice, where it has saved one."""
    torch.autograd.graph.increment_version([t for t in parts if t is not None and not t.is_inference()])


def on_gpu(t):
    """Whether a tensor, or the buffers of a quantized one, are where libnib_cuda computes."""
    return t.device.type == "cuda"


def host(t):
    """The tensor in host memory, with its own signs: views of imaginary parts may have a bit for the other ones."""
    return t.resolve_neg() if t.device.type == "cpu" else t.cpu().resolve_neg()


def placed(t):
    """The tensor where the library computes: where it is, if that is a GPU, or in host memory."""
    return t.resolve_neg() if on_gpu(t) else host(t)


def device_of(t):
    """The library's device of a tensor: a GPU with torch's current stream, or the host."""
    if not on_gpu(t):
        if t.device.type != "cpu":
            raise _library.UnsupportedError(f"nib computes in host memory and on GPUs, but the tensor is on {t.device}")
        return entered.handle
    ordinal = t.device.index
    return _cuda.device(ordinal, torch._C._cuda_getCurrentRawStream(ordinal), allocator(ordinal))


@functools.lru_cache(maxsize=None)
def allocator(ordinal):
    """torch's caching allocator of a GPU, for what the library needs in a call: in a capture it is the graph's pool."""
    return _cuda.Allocator(lambda size, stream: torch.cuda.caching_allocator_alloc(size, ordinal, stream),
                           torch.cuda.caching_allocator_delete)


def array(t, out=None):
    """A nib_array over a tensor, whose lifetime is the caller's business."""
    code = code_of(t.dtype)
    device, size = device_of(t), _ITEMSIZE[code]
    filled = _arrays.fill(Array() if out is None else out, t.data_ptr(), code, t.shape,
                          [s * size for s in t.stride()], size)
    filled.device = device
    return filled


def _from_part(handle, part):
    """A part of a nib_tensor as a torch tensor that keeps the library's buffer."""
    view = Array()
    lib.nib_tensor_part(handle, part, view)
    shape = tuple(view.shape[:view.rank])
    if not view.bytes or 0 in shape:
        return torch.empty(shape, dtype=torch.float32 if view.dtype == DType.kFloat32 else torch.uint8)
    return torch.utils.dlpack.from_dlpack(_arrays.dlpack_capsule(handle, part))


def parts_of(handle, sources=()):
    """The parts of a nib_tensor as torch tensors, None where absent. Those that lie in the memory of a source (a torch
    tensor) are views of it."""
    by_pointer = {source.data_ptr(): source for source in sources if source is not None and source.numel()}
    found = []
    for part in Part:
        buffer = raw.nib_tensor_buffer(handle, part)
        if not buffer:
            found.append(None)
            continue
        source = by_pointer.get(raw.nib_buffer_data(buffer))
        if source is None:
            found.append(_from_part(handle, part))
            continue
        view = Array()
        lib.nib_tensor_part(handle, part, view)
        shape = tuple(view.shape[:view.rank])
        found.append(source if tuple(source.shape) == shape else source.view(shape))
    return found


def take(handle, sources=()):
    """The parts of a nib_tensor, which is destroyed."""
    try:
        return parts_of(handle, sources)
    finally:
        raw.nib_tensor_destroy(handle)


def borrowed_buffer(t):
    """A nib_buffer over a contiguous tensor, whose lifetime is the caller's business."""
    buffer = ctypes.c_void_p()
    lib.nib_buffer_borrow(t.data_ptr() or None, t.numel() * t.element_size(), device_of(t), None, None, buffer)
    return buffer


class Native:
    """A nib_tensor over torch buffers. `parts`: six tensors or None, in the order of nib_part. `place`: where they are
    for the library; what it writes to a copy goes back to the tensor it is of."""

    def __init__(self, struct, dtype, shape, parts, columnwise_valid=True, place=placed):
        self.handle = ctypes.c_void_p()
        self._own = list(parts)
        self._used = [None if p is None else place(p).contiguous() for p in parts]
        buffers = (ctypes.c_void_p * _library.PART_COUNT)()
        try:
            for i, part in enumerate(self._used):
                if part is not None:
                    buffers[i] = borrowed_buffer(part)
            lib.nib_tensor_from_buffers(struct, code_of(dtype), len(shape), shape_array(shape), buffers, len(buffers),
                                        self.handle)
        finally:
            for buffer in buffers:
                raw.nib_buffer_release(buffer)
        if not columnwise_valid:
            lib.nib_tensor_invalidate_columnwise(self.handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raw.nib_tensor_destroy(self.handle)

    def forget(self):
        """Hold the tensors no longer: whoever keeps this knows whether they are still there."""
        self._own = self._used = None

    def parts(self):
        """What the buffers are now: the caller's own tensors where the library kept them."""
        now = parts_of(self.handle, self._used)
        for i, (own, used) in enumerate(zip(self._own, self._used)):
            if now[i] is used and own is not used:
                if own is not None:
                    own.copy_(used)
                now[i] = own
        return now

    def shared(self, handle):
        """The parts of another nib_tensor that came of this one, which is destroyed."""
        return take(handle, self._used)


_specs = {}  # what part_specs has found
_DRAWN = slice(_library.Quantizer.seed.offset, _library.Quantizer.origin.offset)  # which decides no shape


def part_specs(struct, shape):
    """(shape, dtype) of each part that a quantization makes, None for the others."""
    data = bytes(struct)
    key = data[:_DRAWN.start], data[_DRAWN.stop:], tuple(shape)
    specs = _specs.get(key)
    if specs is None:
        specs = _find_specs(struct, shape)
        if len(_specs) >= 4096:
            _specs.clear()
        _specs[key] = specs
    return specs


def _find_specs(struct, shape):
    specs = []
    for part in Part:
        wanted = struct.columnwise if part % 2 else struct.rowwise
        if struct.format == _library.Format.FLOAT8 and part == Part.ROW_TENSOR_SCALE:
            wanted = True  # one for both usages
        rank, out = ctypes.c_int(), (ctypes.c_int64 * _library.MAX_RANK)()
        status = raw.nib_part_shape(struct, part, len(shape), shape_array(shape), rank, out) if wanted else None
        if not wanted or status == _library.UsageError.status:  # the format has no such part
            specs.append(None)
            continue
        if status:
            _library.fail(status)
        floats = Part.ROW_SCALE if struct.format == _library.Format.FLOAT8_BLOCK else Part.ROW_TENSOR_SCALE
        specs.append((torch.Size(out[:rank.value]), torch.float32 if part >= floats else torch.uint8))
    return specs


def empty_parts(struct, shape, device, wanted=tuple(Part)):
    """Buffers for the parts that a quantization makes, those that are wanted; the library writes every byte."""
    specs = part_specs(struct, shape)
    return [None if spec is None or part not in wanted else torch.empty(spec[0], dtype=spec[1], device=device)
            for part, spec in zip(Part, specs)]


def draw(struct, t, there=False):
    """Seed and offset of the random stream from torch's default generator of the tensor's device: torch.manual_seed
    repeats them. In a capture of a GPU's stream, or where it is to stay `there`, a tensor that holds the offset."""
    if on_gpu(t):
        return _draw_on_gpu(struct, t.device, there)
    seed, offset = torch.empty(2, dtype=torch.int64).random_().tolist()
    struct.seed = seed
    struct.offset = offset & ~3  # callers advance by whole blocks of random numbers
    return None


_OWN_SEED = 0x6E69625F66703421  # the random stream of nib is not that of torch's own kernels, which have the bare seed


def _draw_on_gpu(struct, device, there):
    """The generator of that GPU is advanced; in a capture it is the graph that draws, at each replay."""
    generator = torch.cuda.default_generators[device.index]
    struct.seed = (generator.initial_seed() ^ _OWN_SEED) & 0xFFFFFFFFFFFFFFFF
    with torch.cuda.device(device):
        there = there or torch.cuda.is_current_stream_capturing()
    if there:
        return torch.empty(1, dtype=torch.int64, device=device).random_()
    struct.offset = generator.get_offset()
    generator.set_offset(struct.offset + 4)  # what 16 elements take of it, at most
    return None


def fitting_amaxes(struct, shape, amaxes):
    """(rowwise, columnwise) amaxes of a caller's, as many as the library will read: one, or one for each line."""
    if amaxes[0] is None and amaxes[1] is None:
        return amaxes
    found, counts = [], _arrays.amax_counts(struct.row_scaled, shape)
    for amax, count, wanted in zip(amaxes, counts, (struct.rowwise, struct.columnwise)):
        amax = amax if wanted or not struct.row_scaled else None  # lines of a usage that is not made have none
        if amax is not None and amax.numel() != count:
            raise ValueError(f"an amax of a tensor {tuple(shape)} has {count} values here, not {amax.numel()}")
        found.append(amax)
    return found


def overrides_of(amaxes=(None, None), offset=None):
    """nib_overrides that keep the tensors they point to; None where there are none."""
    if offset is None and amaxes[0] is None and amaxes[1] is None:
        return None
    overrides = _library.Overrides()
    overrides.kept = (*amaxes, offset)
    for i, amax in enumerate(amaxes):
        overrides.amax[i] = None if amax is None else amax.data_ptr()
    overrides.offset = None if offset is None else offset.data_ptr()
    return overrides


def reduced_amaxes(struct, x, comm):
    """The amaxes of a tensor on a GPU over the ranks of a communicator, without any of them coming to the host."""
    import torch.distributed as dist
    shape, pointers = tuple(x.shape), (ctypes.POINTER(ctypes.c_float) * 2)()
    lines = _arrays.amax_counts(struct.row_scaled, shape)
    found = [torch.empty(n, dtype=torch.float32, device=x.device) if wanted else None
             for n, wanted in zip(lines, (struct.rowwise, struct.columnwise))]
    for i, amax in enumerate(found):
        if amax is not None:
            pointers[i] = ctypes.cast(amax.data_ptr(), ctypes.POINTER(ctypes.c_float))
    lib.nib_amax(struct, array(x), pointers)
    for amax in found:
        if amax is not None and comm.size > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=comm.group)
    return found


def quantize(struct, x, overrides=None):
    """Six parts of a new tensor. On a GPU they are torch's memory from the start."""
    x = placed(x)
    if not on_gpu(x):
        out = ctypes.c_void_p()
        lib.nib_quantize(struct, array(x), overrides, out)
        return take(out)
    parts = empty_parts(struct, tuple(x.shape), x.device)
    with Native(struct, x.dtype, tuple(x.shape), parts) as native:
        lib.nib_quantize_into(struct, array(x), overrides, None, native.handle)
    return parts


# ---- Communicators ---------------------------------------------------------------------------------------


class Communicator:
    """A nib_comm whose functions are collectives of a torch.distributed group. One that fails is an error on its own
    rank, raised from what was behind it. The library begins every call over ranks with an agreement: a `with` that
    raises before it came to that takes part in it all the same, so that the others' calls fail and do not wait."""

    def __init__(self, group):
        import torch.distributed as dist
        self._dist, self._group = dist, group
        self._device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"  # of what travels
        self._fault = threading.local()
        self._functions = (_library.ALLREDUCE_MAX(self._guard(self._allreduce_max)),
                           _library.AGREE(self._guard(self._agree)),
                           _library.ALLGATHER(self._guard(self._allgather)),
                           _library.BARRIER(self._guard(self._barrier)))
        self.struct = _library.Comm(context=None, rank=dist.get_rank(group), size=dist.get_world_size(group),
                                    allreduce_max_f32=self._functions[0], agree=self._functions[1],
                                    allgather=self._functions[2], barrier=self._functions[3])
        self.struct.group = group

    def _guard(self, function):
        def guarded(*arguments):
            self._fault.met = True
            try:
                return function(*arguments)
            except BaseException as error:  # must not cross the library
                self._fault.error = error
                return _library.CommError.status
        return guarded

    def __enter__(self):
        self._fault.error, self._fault.met = None, False
        return self.struct

    def __exit__(self, kind, error, _trace):
        if isinstance(error, Exception) and not self._fault.met and self.struct.size > 1:
            own = error.status if isinstance(error, _library.Error) else None
            self._functions[1](None, own or _library.ArgumentError.status, 0)
        behind = self._fault.error
        self._fault.error = None
        if error is not None and behind is not None:
            raise error from behind

    def _allreduce_max(self, _context, values, n):
        if n:
            t = torch.frombuffer((ctypes.c_float * n).from_address(ctypes.addressof(values.contents)),
                                 dtype=torch.float32)
            there = t.to(self._device)
            self._dist.all_reduce(there, op=self._dist.ReduceOp.MAX, group=self._group)
            if there is not t:
                t.copy_(there)
        return _library.OK

    def _agree(self, _context, status, key):
        mine = torch.tensor([status, key - (1 << 64) if key >> 63 else key], dtype=torch.int64,
                            device=self._device)
        everybody = [torch.empty_like(mine) for _ in range(self.struct.size)]
        self._dist.all_gather(everybody, mine, group=self._group)
        worst = max(int(pair[0]) for pair in everybody)
        if worst == _library.OK and any(int(pair[1]) != int(mine[1]) for pair in everybody):
            return _library.MismatchError.status
        return worst

    def _allgather(self, _context, mine, everything, counts):
        counts = counts[:self.struct.size]
        largest = max(counts)
        if not largest:
            return _library.OK
        own = torch.zeros(largest, dtype=torch.uint8)  # the collective wants equal lengths
        if counts[self.struct.rank]:
            ctypes.memmove(own.data_ptr(), mine, counts[self.struct.rank])
        own = own.to(self._device)
        everybody = [torch.empty_like(own) for _ in counts]
        self._dist.all_gather(everybody, own, group=self._group)
        at = everything
        for theirs, count in zip(everybody, counts):
            if count:
                ctypes.memmove(at, host(theirs).data_ptr(), count)
                at += count
        return _library.OK

    def _barrier(self, _context):
        self._dist.barrier(group=self._group)
        return _library.OK


def agree(comm, key):
    """Raise on all ranks where one has failed, or has another key."""
    status = comm.agree(None, _library.OK, key)
    if status:
        _library.fail(status, "another rank of the group has failed, or was called with something else")


class _Serial:
    """One rank alone, where torch.distributed is not in use."""

    def __enter__(self):
        return raw.nib_comm_serial().contents

    def __exit__(self, *_):
        return None


def communicator(group=None):
    """A context manager that gives the nib_comm of a group (None: the default group, or this process alone)."""
    import torch.distributed as dist
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise _library.CommError("torch.distributed is not initialized")
        return _Serial()
    return Communicator(group)
