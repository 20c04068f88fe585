# SPDX-License-Identifier: Apache-2.0
"""What training code imports from TransformerEngine besides layers and tensors: small functions on shapes, dtypes,
process groups and lists of tensors."""
import contextlib
import functools
import math

import torch

from .quantization import current, recompute
from .quantized_tensor import QuantizedTensor

__version__ = "2.20.0"  # of TransformerEngine: whose behavior the aliases have

# ---- Shapes, dtypes, devices -----------------------------------------------------------------------------


def ensure_divisibility(numerator, denominator):
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator, denominator):
    """The quotient, where nothing is left over."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator, denominator):
    if denominator == 0:
        raise ValueError("denominator cannot be zero")
    return -(-numerator // denominator)


def requires_grad(*tensors):
    """Whether any of them, None among them or not, wants a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def cast_if_needed(tensor, dtype):
    if tensor is None or tensor.dtype == dtype:
        return tensor
    with torch.enable_grad():
        return tensor.to(dtype=dtype)


def clear_tensor_data(*tensors):
    """Let go of their memory, whoever else still has the tensors."""
    for tensor in tensors:
        if tensor is None or hasattr(tensor, "_do_not_clear"):
            continue
        if hasattr(tensor, "clear"):
            tensor.clear()
        else:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def needs_quantized_gemm(obj, rowwise=True):
    return type(obj) not in (torch.Tensor, torch.nn.Parameter)


def _fits(tensor):
    return math.prod(tensor.shape[:-1]) % 8 == 0 and tensor.shape[-1] % 16 == 0


def check_dim_for_fp8_exec(tensor):
    return tensor.dim() == 2 and _fits(tensor)


def assert_dim_for_fp8_exec(*tensors):
    for tensor in tensors:
        if not _fits(tensor):
            raise ValueError("FP8 needs rows in multiples of 8 and columns in multiples of 16, not "
                             f"{tuple(tensor.shape)}")


def canonicalize_device(device=None):
    """A device with its index; None is the default device."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def canonicalize_dtype(dtype=None):
    return torch.get_default_dtype() if dtype is None else dtype


def devices_match(device1, device2):
    return canonicalize_device(device1) == canonicalize_device(device2)


def torch_get_autocast_gpu_dtype():
    return torch.get_autocast_dtype("cuda")


gpu_autocast_ctx = functools.partial(torch.amp.autocast, device_type="cuda")


def is_bf16_compatible():
    return True


def scaled_init_method_normal(sigma, num_layers):
    """A normal distribution for layers whose outputs are added up over a model of so many layers."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma / math.sqrt(2.0 * num_layers))


def split_tensor_along_dim(tensor, dim, num_partitions, contiguous_split_chunks=False):
    chunks = torch.split(tensor, divide(tensor.size(dim), num_partitions), dim=dim)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


class SplitAlongDim:
    """By the name of an autograd function: SplitAlongDim.apply(x, dim, sizes) is torch.split."""

    @staticmethod
    def apply(mixed_x_layer, split_dim, split_size_or_sections, squeeze=False):
        parts = torch.split(mixed_x_layer, split_size_or_sections, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts


_SplitAlongDim = SplitAlongDim


def get_nvtx_range_context(msg):
    return contextlib.nullcontext()


def nvtx_range_push(msg):
    """Ranges for a profiler of kernels, which there is none of here."""


def nvtx_range_pop(msg=None):
    pass


def torch_version():
    """(major, minor, patch) of PyTorch."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3])


def get_all_tensor_types():
    """torch's tensors and all quantized ones."""
    def below(kind):
        for sub in kind.__subclasses__():
            yield sub
            yield from below(sub)
    return [torch.Tensor, torch.nn.Parameter, *dict.fromkeys(below(QuantizedTensor))]


# ---- Process groups --------------------------------------------------------------------------------------


def canonicalize_process_group(group=None):
    return torch.distributed.group.WORLD if group is None else group


def get_distributed_world_size(group=None):
    return torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1


def get_distributed_rank(group=None):
    if not torch.distributed.is_initialized():
        raise RuntimeError("get_distributed_rank needs torch.distributed.init_process_group")
    return torch.distributed.get_rank(group)


def set_tensor_model_parallel_attributes(tensor, is_parallel, dim, stride):
    for name, value in (("tensor_model_parallel", is_parallel), ("partition_dim", dim), ("partition_stride", stride)):
        if hasattr(tensor, name):
            raise RuntimeError(f"the tensor has {name} already")
        setattr(tensor, name, value)


def allreduce(inp, tp_group=None, async_op=False):
    """(the sum over a group, in place; what to wait for)."""
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    return inp, torch.distributed.all_reduce(inp, group=tp_group, async_op=async_op)


def reduce_scatter_along_first_dim(inp, tp_group=None, async_op=False, output=None):
    """(this rank's rows of the sum over a group, what to wait for)."""
    size = get_distributed_world_size(tp_group)
    if size == 1:
        return inp, None
    rows = divide(inp.shape[0], size)
    output = inp.new_empty(rows, *inp.shape[1:]) if output is None else output
    return output, torch.distributed.reduce_scatter_tensor(output, inp.contiguous(), group=tp_group, async_op=async_op)


def split_tensor_into_1d_equal_chunks(tensor, tp_group=None, new_buffer=False):
    count = tensor.numel() // get_distributed_world_size(tp_group)
    rank = get_distributed_rank(tp_group) if torch.distributed.is_initialized() else 0
    chunk = tensor.view(-1)[count * rank:count * (rank + 1)]
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor, tp_group=None):
    out = tensor.new_empty(tensor.numel() * get_distributed_world_size(tp_group))
    if get_distributed_world_size(tp_group) == 1:
        return out.copy_(tensor.view(-1))
    torch.distributed.all_gather_into_tensor(out, tensor.contiguous().view(-1), group=tp_group)
    return out


# ---- Computing activations again -------------------------------------------------------------------------


class activation_recompute_forward(contextlib.ContextDecorator):
    """Around a forward pass whose activations are not kept (activation_recompute) and around the pass that computes
    them again (recompute_phase): delayed scales are those of the first pass, and the same layer counts as first."""

    _firsts = []  # of the passes that are still to be repeated

    def __init__(self, activation_recompute=False, recompute_phase=False):
        self.activation_recompute, self.recompute_phase = activation_recompute, recompute_phase
        self._before = []

    def __enter__(self):
        self._before.append((recompute.enabled, recompute.phase))
        recompute.enabled, recompute.phase = self.activation_recompute, self.recompute_phase
        if self.activation_recompute and not self.recompute_phase:
            self._firsts.append(current().is_first_fp8_module)
        elif self.activation_recompute and self._firsts:
            current().is_first_fp8_module = self._firsts.pop(0)
        return self

    def __exit__(self, *error):
        recompute.enabled, recompute.phase = self._before.pop()


def get_activation_recompute_contexts():
    """(around the first pass, around its repetition)."""
    return activation_recompute_forward(True, False), activation_recompute_forward(True, True)


def use_reentrant_activation_recompute():
    return True


def graph_safe_rng_available():
    return False


def is_graph_safe_rng_state(state):
    return False


_rng_states = {}


def get_all_rng_states():
    """Generators that graphs would have to know of: none."""
    return _rng_states


def set_all_rng_states(states):
    global _rng_states
    _rng_states = states


def get_te_classes():
    from .attention import DotProductAttention, MultiheadAttention
    from .module import LayerNorm, RMSNorm
    from .module.base import TransformerEngineBaseModule
    from .transformer import TransformerLayer
    return (LayerNorm, RMSNorm, TransformerEngineBaseModule, DotProductAttention, MultiheadAttention, TransformerLayer)


def has_te_modules(network):
    """Whether a module has one of the layers in it; anything else may."""
    return not isinstance(network, torch.nn.Module) \
        or any(isinstance(module, get_te_classes()) for module in network.modules())


# ---- Offloading: activations stay where they are ---------------------------------------------------------


def get_cpu_offload_context(enabled=False, *args, **kwargs):
    """(a context, what to call on a layer's output), both of which do nothing."""
    if enabled:
        raise NotImplementedError("nib does not offload activations: get_cpu_offload_context(enabled=True)")
    return contextlib.nullcontext(), lambda output: output


def is_cpu_offload_enabled():
    return False


def mark_not_offload(*tensors):
    """For tensors that are to stay; all do."""


mark_activation_offload = start_offload = mark_not_offload


# ---- Lists of tensors ------------------------------------------------------------------------------------


class MultiTensorApply:
    """Call an operation on lists of tensors, without the places where the first list is empty."""

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        if any(len(tensors) != len(tensor_lists[0]) for tensors in tensor_lists):
            raise RuntimeError("lists of tensors have to be of one length")
        keep = [i for i, tensor in enumerate(tensor_lists[0]) if tensor.numel()]
        local = [[getattr(tensors[i], "_local_tensor", tensors[i]) for i in keep] for tensors in tensor_lists]
        return op(self.chunk_size, noop_flag_buffer, local, *args) if keep else None


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """(the norm over all tensors in FP32, that of each or nothing)."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32) for tensor in tensor_lists[0]]
    each = torch.stack(norms) if norms else torch.zeros(0)
    return torch.linalg.vector_norm(each).view(1), each if per_tensor else torch.empty(0)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    """The second list becomes the first one times a scale; the flag is set where a value is not finite."""
    for source, target in zip(*tensor_lists):
        with torch.no_grad():
            target.copy_(source.float() * scale)
        if not bool(source.isfinite().all()):
            noop_flag.fill_(1)


def multi_tensor_scale_tensor(chunk_size, noop_flag, tensor_lists, scale):
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale.float())
