# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights of checkpoints, multiplied as they are: never as a dequantized copy.

    Packed     rows of codes with their scales while a model is loaded: a tensor that can be stacked, cut and transposed
               as loaders do with weights
    Matrix     an [N, K] matrix of them as nib_gemm takes it
    PackedLinear, PackedStack   what stands in a model for a linear layer, and for a parameter that is something else
"""
import ctypes
import math

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from .. import _library
from .._device import Host
from .._library import Array, GemmOptions, Operand, Part, Usage, lib, raw
from . import _bridge

_gemm = ctypes.CDLL(_library.path).nib_gemm  # without conversion of pointers: what is passed is prepared once
_gemm.argtypes = None
_hosts = {}
ACTIVATIONS = ("bf16", "nvfp4")


def _host():
    """The host with as many threads as PyTorch takes."""
    threads = torch.get_num_threads()
    if threads not in _hosts:
        _hosts[threads] = Host(threads)
    return _hosts[threads]


def _quantizer(row_scaled=False):
    q = _library.new_quantizer()
    q.columnwise = 0
    if row_scaled:
        q.row_scaled = 1
    else:
        q.tensor_scale_rule = _library.TensorScaleRule.EXACT
    return q


_WEIGHT, _BY_ROW = _quantizer(), _quantizer(row_scaled=True)

# ---- Matrices ------------------------------------------------------------------------------------------------


class _Call:
    """The structs of a call, to be filled in: activations [M, K], result [M, N], their operand and the options."""

    def __init__(self, code, k, n):
        self.x, self.y = Array(dtype=code, rank=2), Array(dtype=code, rank=2)
        self.x_shape, self.y_shape, self.y_strides = self.x.shape, self.y.shape, self.y.strides
        self.x_shape[1], self.y_shape[1] = k, n
        self.x.strides[:2], self.y_strides[:2] = (k, 1), (n, 1)
        self.bias, self.options = Array(rank=1), GemmOptions(alpha=1.0)
        self.bias_pointer = ctypes.pointer(self.bias)
        self.operand = Operand(None, ctypes.pointer(self.x), 0)
        self.x_ref, self.y_ref = ctypes.byref(self.operand), ctypes.byref(self.y)
        self.options_ref = ctypes.byref(self.options)


class _Run:
    """Rows of a matrix that share a tensor scale, and that of their activations (None: that of each token)."""

    def __init__(self, first, codes, scales, tensor_scale, input_scale):
        self.first, self.codes, self.scales = first, codes, scales
        self.tensor_scale, self.input_scale = tensor_scale, input_scale
        self.count, self.native = codes.shape[0], None
        if codes.is_cpu or _bridge.on_gpu(codes):
            rows, cols = codes.shape[0], 2 * codes.shape[1]
            self.scale = torch.tensor([tensor_scale], device=codes.device)
            self.overrides = None if input_scale is None else _scaled_by(torch.tensor([input_scale],
                                                                                      device=codes.device))
            self.native = _bridge.Native(_WEIGHT, torch.float32, (rows, cols),
                                         [codes, None, scales, None, self.scale, None])
            self.operand = Operand(self.native.handle, None, Usage.ROWWISE)
            self.ref = ctypes.byref(self.operand)

    def __del__(self):
        if self.native is not None:
            raw.nib_tensor_destroy(self.native.handle)


def _scaled_by(scale):
    """Overrides with a tensor scale, which they keep."""
    overrides = _library.Overrides()
    overrides.kept = scale
    overrides.tensor_scale[0] = scale.data_ptr()
    return overrides


def _padded(scales):
    """Scales [N, K/16] in whole tiles of 128 x 4, as tensors of the library have them."""
    rows, cols = -scales.shape[0] % 128, -scales.shape[1] % 4
    return F.pad(scales, (0, cols, 0, rows)) if rows or cols else scales.contiguous()


class Matrix:
    """An NVFP4 matrix [N, K], as a sequence of _Run. matrix(x) is x W^T in the dtype of x: on the host and on GPUs by
    nib_gemm, elsewhere as the product of the values, which are computed for it and dropped."""

    def __init__(self, runs, activations):
        self.runs, self.activations = runs, activations
        self.n, self.k = sum(run.count for run in runs), 2 * runs[0].codes.shape[1]
        self._calls = {}

    @staticmethod
    def of(codes, scales, tensor_scale, input_scale, activations):
        """From rows: codes [N, K/2], scales [N, K/16], tensor scale [N], and that of activations [N] (NaN: none)."""
        rows = torch.stack([tensor_scale, input_scale.nan_to_num(-1.0)])
        _, counts = torch.unique_consecutive(rows, dim=1, return_counts=True)
        runs, first = [], 0
        for count in counts.tolist():
            span = slice(first, first + count)
            given = float(input_scale[first])
            runs.append(_Run(first, codes[span].contiguous(), _padded(scales[span]), float(tensor_scale[first]),
                             None if math.isnan(given) else given))
            first += count
        return Matrix(runs, activations)

    @property
    def nbytes(self):
        """What the weight takes in memory."""
        return sum(run.codes.numel() + run.scales.numel() + 4 for run in self.runs)

    def moved(self, change):
        """The matrix with its buffers changed: moved to another device."""
        return Matrix([_Run(run.first, change(run.codes), change(run.scales), run.tensor_scale, run.input_scale)
                       for run in self.runs], self.activations)

    def dequantize(self, dtype=torch.float32):
        """The values [N, K] as nib_dequantize has them, in a dtype."""
        return torch.cat([self._values(run, torch.float32, run.tensor_scale) for run in self.runs]).to(dtype)

    @staticmethod
    def _values(run, dtype, tensor_scale=1.0):
        """Codes by block scales by a tensor scale, [N, K]; without the last BF16 has them exactly."""
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=dtype,
                             device=run.codes.device)
        codes = torch.stack([run.codes & 15, run.codes >> 4], -1).flatten(-2)
        scales = run.scales[:run.count, :codes.shape[1] // 16].view(torch.float8_e4m3fn).to(dtype)
        return table[codes.int()] * (scales * tensor_scale).repeat_interleave(16, 1)

    def __call__(self, x, bias=None):
        if torch.is_grad_enabled() and (x.requires_grad or bias is not None and bias.requires_grad):
            return _Product.apply(x, bias, self)
        return self.product(x, bias)

    def product(self, x, bias=None):
        if self.runs[0].native is None or _bridge.is_fake(x):
            return self._product_of_values(x, bias)
        if x.device != self.runs[0].codes.device:
            raise _library.DeviceError(f"activations on {x.device} by a weight on {self.runs[0].codes.device}")
        shape = x.shape
        if shape[-1] != self.k:
            raise ValueError(f"activations {list(shape)} by a weight [{self.n}, {self.k}]: inner sizes differ")
        if bias is not None and (bias.numel() != self.n or bias.device != x.device):
            raise ValueError(f"a bias {list(bias.shape)} on {bias.device} for {self.n} columns on {x.device}")
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty(*shape[:-1], self.n, dtype=x.dtype, device=x.device)
        m = x.numel() // self.k
        if not m:
            return y
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        calls = self._calls.get(x.dtype)
        if calls is None:
            calls = self._calls[x.dtype] = []
        try:
            call = calls.pop()
        except IndexError:
            call = _Call(_bridge.code_of(x.dtype), self.k, self.n)
        try:
            self._run(call, x, y, m, bias)
        finally:
            calls.append(call)
        return y

    def _run(self, call, x, y, m, bias):
        size, device = x.element_size(), _bridge.device_of(x) if _bridge.on_gpu(x) else _host()._handle
        call.x.device = call.y.device = device
        call.x.data, call.x.bytes, call.x_shape[0] = x.data_ptr(), m * self.k * size, m
        call.y_shape[0] = m
        call.options.bias = None
        if bias is not None:
            call.bias.dtype, call.bias.device = _bridge.code_of(bias.dtype), device
            call.bias.strides[0], call.options.bias = 1, call.bias_pointer
        start = y.data_ptr()
        for run in self.runs:
            call.y.data, call.y_shape[1] = start + run.first * size, run.count
            call.y.bytes = ((m - 1) * self.n + run.count) * size
            if bias is not None:
                step = bias.element_size()
                call.bias.data = bias.data_ptr() + run.first * step
                call.bias.shape[0], call.bias.bytes = run.count, run.count * step
            if self.activations == "bf16":
                status = _gemm(call.x_ref, run.ref, call.options_ref, call.y_ref)
            else:
                status = self._of_codes(call, run, x)
            if status:
                _library.fail(status)

    @staticmethod
    def _of_codes(call, run, x):
        """The product of quantized activations, by the checkpoint's scale for them or each token's own."""
        struct = _BY_ROW if run.overrides is None else _WEIGHT
        if _bridge.on_gpu(x):  # in torch's memory
            shape = tuple(call.x_shape[:2])
            with _bridge.Native(struct, x.dtype, shape, _bridge.empty_parts(struct, shape, x.device)) as native:
                lib.nib_quantize_into(struct, call.x, run.overrides, None, native.handle)
                return _gemm(ctypes.byref(Operand(native.handle, None, Usage.ROWWISE)), run.ref, call.options_ref,
                             call.y_ref)
        quantized = ctypes.c_void_p()
        lib.nib_quantize(struct, call.x, run.overrides, quantized)
        try:
            return _gemm(ctypes.byref(Operand(quantized, None, Usage.ROWWISE)), run.ref, call.options_ref, call.y_ref)
        finally:
            raw.nib_tensor_destroy(quantized)

    def _product_of_values(self, x, bias):
        if self.activations != "bf16":
            raise NotImplementedError(f"activations are quantized on the host and on GPUs, not on {x.device}: "
                                      'activations="bf16" runs there')
        parts = [F.linear(x, self._values(run, x.dtype)) * run.tensor_scale for run in self.runs]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if bias is None else y + bias


class _Product(torch.autograd.Function):
    """x W^T + b, with the gradient of x by the weight's values, and that of b: for what is trained around a weight."""

    @staticmethod
    def forward(ctx, x, bias, matrix):
        ctx.matrix = matrix
        return matrix.product(x, bias)

    @staticmethod
    def backward(ctx, grad):
        dx = grad @ ctx.matrix.dequantize(grad.dtype) if ctx.needs_input_grad[0] else None
        db = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return dx, db, None


# ---- While a model is loaded ---------------------------------------------------------------------------------


class Packed(torch.Tensor):
    """Rows of an NVFP4 weight, [..., N, K], or [..., K, N] where `turned`. `rows` are four tensors over [..., N]: codes
    and scales as bytes, the tensor scale, and that of activations (NaN: none). All that is done to rows is done to each
    of the four; nothing is computed with the values."""

    @staticmethod
    def __new__(cls, rows, dtype, activations, turned=False):
        shape = [*rows[0].shape[:-1], 2 * rows[0].shape[-1]]
        if turned:
            shape[-2:] = reversed(shape[-2:])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows[0].device)
        made.rows, made.activations, made.turned = rows, activations, turned
        return made

    def _like(self, rows, turned=None, dtype=None):
        return Packed(rows, dtype or self.dtype, self.activations, self.turned if turned is None else turned)

    def _axis(self, dim):
        """Which dim of rows a dim of the weight is; K is none."""
        dim %= self.dim()
        last = self.dim() - 1
        if self.turned and dim >= last - 1:
            dim = 2 * last - 1 - dim
        if dim == last:
            raise NotImplementedError("a packed weight is not cut along the dim of its blocks")
        return dim

    def matrix(self):
        if self.dim() != 2:
            raise NotImplementedError(f"a packed weight {list(self.shape)} is no matrix")
        return Matrix.of(*self.rows, self.activations)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        handler = _HANDLERS.get(getattr(function, "__name__", None))
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a packed NVFP4 weight while a model is loaded: rows are stacked, cut "
                                  "and joined, and nothing is computed")


def _each(function):
    """What a function of rows does to all four."""
    def apply(t, *args, **kwargs):
        return t._like([function(part, *args, **kwargs) for part in t.rows])
    return apply


def _to(t, *args, **kwargs):
    device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if v is not None})
    return t._like([part.to(device) for part in t.rows] if device is not None else t.rows, dtype=dtype)


def _transpose(t, a, b):
    last = t.dim() - 1
    if {a % t.dim(), b % t.dim()} != {last, last - 1}:
        raise NotImplementedError("of a packed weight only the last two dims are transposed")
    return t._like(t.rows, turned=not t.turned)


def _cat(tensors, dim=0, axis=None):
    first, axis = tensors[0], axis if axis is not None else tensors[0]._axis(dim)
    if not all(isinstance(t, Packed) and t.turned == first.turned for t in tensors):
        raise NotImplementedError("a packed weight is joined with its like only: quantize all of them, or none")
    return first._like([torch.cat(parts, axis) for parts in zip(*(t.rows for t in tensors))])


def _stack(tensors, dim=0):
    if dim % (tensors[0].dim() + 1) > tensors[0].dim() - 2 or not all(isinstance(t, Packed) for t in tensors):
        raise NotImplementedError("packed weights are stacked as matrices, and with their like only")
    return tensors[0]._like([torch.stack(parts, dim) for parts in zip(*(t.rows for t in tensors))])


def _split(t, sizes, dim=0, **_):
    parts = zip(*(torch.split(part, sizes, t._axis(dim)) for part in t.rows))
    return tuple(t._like(list(rows)) for rows in parts)


def _chunk(t, chunks, dim=0):
    return _split(t, math.ceil(t.shape[dim] / chunks), dim)


def _getitem(t, index):
    if index is Ellipsis:
        return t
    if isinstance(index, torch.Tensor) and index.dim() == 0:
        index = int(index)
    if t.dim() < 3 or isinstance(index, tuple):
        raise NotImplementedError(f"a packed weight {list(t.shape)} has no part [{index}]")
    return t._like([part[index] for part in t.rows])


_HANDLERS = {
    "to": _to, "transpose": _transpose, "cat": _cat, "concat": _cat, "stack": _stack, "split": _split, "chunk": _chunk,
    "__getitem__": _getitem, "contiguous": lambda t, **_: t, "clone": lambda t, **_: t,
    "detach": lambda t: t._like(t.rows),
    "t": lambda t: _transpose(t, 0, 1), "unsqueeze": _each(lambda part, dim: part.unsqueeze(dim)),
    "requires_grad_": lambda t, requires_grad=True: t, "cpu": lambda t: _to(t, "cpu"),
    "is_floating_point": lambda t: False,
    "__repr__": lambda t, **_: f"Packed({list(t.shape)}, dtype={t.dtype}, device={t.device})",
}

# ---- In a model ----------------------------------------------------------------------------------------------


class _Values(torch.Tensor):
    """The weight of a PackedLinear as a tensor: its values are computed where somebody computes with them."""

    @staticmethod
    def __new__(cls, matrix, dtype):
        made = torch.Tensor._make_wrapper_subclass(cls, (matrix.n, matrix.k), dtype=dtype,
                                                   device=matrix.runs[0].codes.device)
        made.matrix = matrix
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear and isinstance(args[1], cls) and not isinstance(args[0], cls):
            return args[1].matrix(args[0], *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.matrix.dequantize(t.dtype), (args, kwargs or {}))
        return function(*args, **kwargs)


class PackedLinear(torch.nn.Linear):
    """A linear layer whose weight is a Matrix. Its bias is a parameter as ever."""

    def __init__(self, matrix, bias, dtype):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = matrix.k, matrix.n
        self.matrix, self.bias, self.dtype = matrix, bias, dtype

    def forward(self, x):
        return self.matrix(x, self.bias)

    @property
    def weight(self):
        """For code that asks a layer for its weight: mostly for its dtype or device."""
        return _Values(self.matrix, self.dtype)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.matrix = self.matrix.moved(fn)
        return self

    def __deepcopy__(self, memo):
        bias = None if self.bias is None else torch.nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return PackedLinear(self.matrix.moved(torch.clone), bias, self.dtype)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, NVFP4"


class PackedStack(torch.nn.Module):
    """A parameter of matrices [..., N, K] (or [..., K, N], `turned`) in a module of transformers: experts, mostly. It
    is indexed and multiplied as the parameter was."""

    def __init__(self, packed):
        super().__init__()
        self.shape, self.dtype, self.turned = packed.shape, packed.dtype, packed.turned
        self.matrices = [part.matrix() for part in (
            [packed[e] for e in range(len(packed))] if packed.dim() == 3 else [packed])]

    def __getitem__(self, index):
        return _Member(self.matrices[int(index)], self)

    def __len__(self):
        return self.shape[0]

    @property
    def ndim(self):
        return len(self.shape)

    def dim(self):
        return len(self.shape)

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self):
        return self.matrices[0].runs[0].codes.device

    @property
    def nbytes(self):
        return sum(matrix.nbytes for matrix in self.matrices)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.matrices = [matrix.moved(fn) for matrix in self.matrices]
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _multiply(function, args, kwargs or {})


class _Member:
    """One matrix of a PackedStack, for one product."""

    def __init__(self, matrix, stack):
        self.matrix, self.turned, self.dtype, self.device = matrix, stack.turned, stack.dtype, stack.device
        self.shape = stack.shape[-2:]

    def t(self):
        other = _Member.__new__(_Member)
        other.__dict__.update(self.__dict__, turned=not self.turned, shape=self.shape[::-1])
        return other

    T = property(t)

    def transpose(self, a, b):
        if {a % 2, b % 2} != {0, 1}:
            raise NotImplementedError("a matrix has two dims to transpose")
        return self.t()

    def __rmatmul__(self, x):
        return _multiply(torch.matmul, (x, self), {})

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _multiply(function, args, kwargs or {})


def _multiply(function, args, kwargs):
    """linear, matmul, addmm, bmm and baddbmm by a matrix or a stack of them."""
    name = getattr(function, "__name__", "")
    args = [*args, *kwargs.values()]
    bias = None
    if name == "linear":
        x, weight, bias = (args + [None])[:3]
    elif name in ("addmm", "baddbmm"):
        bias, x, weight = args
    elif name in ("matmul", "__matmul__", "mm", "bmm"):
        x, weight = args
    else:
        weight = None
    if not isinstance(weight, (_Member, PackedStack)) or (name != "linear") != weight.turned:
        raise NotImplementedError(f"{name}() by a packed NVFP4 weight: nib.torch knows linear, matmul, addmm, bmm and "
                                  "baddbmm along its blocks")
    if isinstance(weight, _Member):
        return weight.matrix(x, bias)
    if weight.dim() == 2:
        return weight.matrices[0](x, bias)
    y = torch.stack([matrix(x[e]) for e, matrix in enumerate(weight.matrices)])
    return y if bias is None else y + bias


def packed_bytes(model):
    """(bytes of the packed weights of a model, how many weights they are)."""
    matrices = [matrix for module in model.modules()
                for matrix in ([module.matrix] if isinstance(module, PackedLinear) else
                               module.matrices if isinstance(module, PackedStack) else [])]
    return sum(matrix.nbytes for matrix in matrices), sum(matrix.n * matrix.k for matrix in matrices)
