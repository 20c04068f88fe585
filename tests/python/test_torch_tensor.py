# SPDX-License-Identifier: Apache-2.0
"""Tensors and quantizers: construction, usages, saving, autograd, pickling, modules, randomness."""
import copy
import io
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import nib  # noqa: E402
from nib.torch import (DType, Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer,  # noqa: E402
                       MXFP8Quantizer, NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage, QuantizedTensor,
                       prepare_for_saving, restore_from_func_ctx, restore_from_saved)

MAKERS = {
    "nvfp4": NVFP4Quantizer,
    "nvfp4_2d": lambda: NVFP4Quantizer(block_dims=(16, 16)),
    "nvfp4_rht": lambda: NVFP4Quantizer(with_rht=True),
    "nvfp4_row_scaled": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4_4over6": lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "nvfp4_rowwise": lambda: NVFP4Quantizer(columnwise=False),
    "float8_delayed": lambda: Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3),
    "float8_current": lambda: Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
    "float8_e5m2": lambda: Float8CurrentScalingQuantizer(torch.float8_e5m2, force_pow_2_scales=True),
    "mxfp8": MXFP8Quantizer,
    "mxfp8_2d": lambda: MXFP8Quantizer(DType.kFloat8E5M2, with_2d_quantization=True),
    "block_2d": lambda: Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True),
    "block_1d": lambda: Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
}
SAVED = {"nvfp4": 6, "float8": 3, "mxfp8": 4, "block": 4}


@pytest.fixture(params=list(MAKERS))
def make(request):
    maker = MAKERS[request.param]

    def made():
        return maker()
    made.saved = SAVED[request.param.split("_")[0]]
    made.name = request.param
    return made


@pytest.fixture
def x():
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(7)).bfloat16()


def fields(t):
    return [getattr(t, field.name) for field in t.FIELDS]


def same(a, b):
    return all((p is None) == (q is None) and (p is None or (p.shape == q.shape and torch.equal(p, q)))
               for p, q in zip(fields(a), fields(b)))


# ---- Quantizers ------------------------------------------------------------------------------------------


def test_all_four_ways_to_quantize(make, x):
    q = make()
    a = q(x)
    b = q.quantize(x, dtype=torch.float32)
    c = make().make_empty(x.shape, dtype=x.dtype)
    assert q.quantize(x, out=c) is c
    d = make().make_empty(x.shape, dtype=x.dtype)
    assert q.update_quantized(x, d) is d and d.quantize_(x) is d
    assert same(a, b) and same(a, c) and same(a, d)
    assert a.dtype == torch.bfloat16 and a.device.type == "cpu"
    assert all(same(a, t) for t in q.multi_quantize([x, x]))


def test_bytes_are_those_of_the_library(make, x):
    """The struct that a quantizer fills in, handed to the NumPy side of the package."""
    t = make()(x)
    q = nib.Quantizer()
    import ctypes
    ctypes.memmove(ctypes.byref(q.struct), ctypes.byref(make()._struct()), ctypes.sizeof(q.struct))
    overrides = {"scale": 8.0} if make.name == "float8_delayed" else None
    u = nib.quantize(x, q, overrides=overrides)
    for field in t.FIELDS:
        mine, theirs = getattr(t, field.name), u.part(field.part)
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.numpy().tobytes() == theirs.tobytes()


def test_a_tensor_keeps_a_copy(make, x):
    q = make()
    t = q(x)
    q.set_usage(rowwise=True, columnwise=False)
    assert t._quantizer is not q and t._quantizer.columnwise_usage != q.columnwise_usage or make.name == "nvfp4_rowwise"


def test_values_and_hashes(make):
    a, b = make(), make()
    if isinstance(a, Float8Quantizer):
        assert a != b and a == a.copy() and a.copy().scale is a.scale
        return
    assert a == b and hash(a) == hash(b) and a.copy() == a
    b.set_usage(rowwise=not b.rowwise_usage)
    assert a != b
    a.amax_reduction_group = object()
    with pytest.raises(TypeError, match="group"):
        hash(a)
    assert pickle.loads(pickle.dumps(a)).amax_reduction_group is None


def test_copies_keep_internal_and_layout(make):
    q = make()
    q.internal = q.optimize_for_gemm = True
    assert q.copy().internal and q.copy().optimize_for_gemm


def test_noop(make, x):
    q = make()
    t = q(x).detach()
    before = [None if p is None else p.clone() for p in fields(t)]
    q.update_quantized(x * 2, t, noop_flag=torch.ones(1))
    assert all(a is None or torch.equal(a, b) for a, b in zip(before, fields(t)))
    t.update_usage(True, False) if make.name != "nvfp4_rowwise" else None
    q.update_quantized(x * 2, t, noop_flag=torch.ones(1))
    assert t.get_usages()["columnwise"] is False  # nothing is allocated either
    source = make()(x * 2)
    t.quantize_(source, noop_flag=torch.ones(1))  # not from a quantized tensor either
    assert torch.equal(t.get_data_tensors(True, False) if "nvfp4" not in make.name else t._rowwise_data,
                       before[0])
    q.update_quantized(x * 2, t, noop_flag=torch.full((1,), 0.5))
    assert same(t, make()(x * 2))
    for wrong in (torch.ones(2), torch.ones(1, dtype=torch.int32)):
        with pytest.raises(ValueError, match="no-op flag"):
            q.update_quantized(x, t, noop_flag=wrong)


def test_update_follows_the_usages_of_the_quantizer(make, x):
    q = make()
    t = q(x).detach()
    q.set_usage(rowwise=True, columnwise=False)
    q.update_quantized(x, t)
    assert t.get_usages() == {"rowwise": True, "columnwise": False}
    q.set_usage(rowwise=True, columnwise=True)
    q.update_quantized(x, t)
    assert t.get_usages() == {"rowwise": True, "columnwise": True}


def test_wrong_targets_and_sources(make, x):
    q = make()
    with pytest.raises(ValueError):
        q.update_quantized(x, torch.zeros_like(x))
    with pytest.raises(ValueError):
        q.update_quantized(x[:32], q(x))
    with pytest.raises(TypeError):
        q(torch.zeros(16, 16, dtype=torch.int32))
    with pytest.raises(TypeError):
        q(torch.zeros(16, 16, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(3, 32, 64), (2, 2, 16, 32), (17, 33), (5,), (0, 32)])
def test_any_shape(make, shape):
    x = torch.randn(shape).bfloat16()
    q = make()
    if q.get_usages() and getattr(q, "with_rht", False) and (len(shape) == 1 or shape[0] in (17,)):
        with pytest.raises(ValueError):
            q(x)
        return
    t = q(x)
    assert t.shape == shape and t.size() == torch.Size(shape) and t.dequantize().shape == shape
    assert t.numel() == x.numel()
    e = make().make_empty(shape, dtype=torch.bfloat16)
    e.copy_(x)
    assert same(e, t)
    q.internal = True
    s = q(x)
    assert s.shape == shape and s.size(-1) == shape[-1]
    assert torch.equal(s.dequantize(), t.dequantize())


def test_shapes_of_nvfp4(x):
    q = NVFP4Quantizer()
    t = q(x.view(4, 16, 128))
    assert t._rowwise_data.shape == (4, 16, 64) and t._rowwise_scale_inv.shape == (128, 8)
    assert t._columnwise_data.shape == (128, 32) and t._columnwise_scale_inv.shape == (128, 4)
    assert t._amax_rowwise.shape == (1,) and q.get_scale_shape((64, 128), False) == (128, 8)
    assert q.get_scale_shape((64, 128), True) == (128, 4) and q.get_columnwise_shape((4, 16, 128)) == (128, 4, 16)
    assert q.get_columnwise_shape(()) == () and NVFP4Quantizer.convert_shape_for_fp4((4, 32)) == (4, 16)
    row_scaled = NVFP4Quantizer(row_scaled_nvfp4=True)(x)
    assert row_scaled._amax_rowwise.shape == (64,) and row_scaled._amax_columnwise.shape == (128,)
    assert q.is_quantizable(x) and not q.is_quantizable(x[:, :5]) and not q.is_quantizable(x[0])
    assert not NVFP4Quantizer(row_scaled_nvfp4=True).is_quantizable(x)
    assert q.is_requantization_safe() and not NVFP4Quantizer(stochastic_rounding=True).is_requantization_safe()
    with pytest.raises(ValueError):
        NVFP4Quantizer(with_rht=True, with_2d_quantization=True)(x)
    with pytest.raises(RuntimeError):
        NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True)(x)


def test_descriptions_agree_with_tensors(make, x):
    for shape in ((64, 128), (4, 32, 64)):
        q = make()
        t = q(x.reshape(-1)[:torch.Size(shape).numel()].view(shape))
        specs = q.inner_tensor_specs(shape)
        assert specs == {f.name: (getattr(t, f.name).shape, getattr(t, f.name).dtype) for f in t.FIELDS
                         if getattr(t, f.name) is not None}
        assert {n: (v.shape, v.dtype) for n, v in q.alloc_tensors(shape).items()} == specs
        metadata = q.create_metadata(shape, torch.bfloat16, True)
        assert metadata["requires_grad"] and metadata["shape"] == shape and metadata["quantizer"] is q


def test_swizzled(x):
    q = NVFP4Quantizer()
    q.optimize_for_gemm = True
    t, plain = q(x), NVFP4Quantizer()(x)
    assert t._with_gemm_swizzled_scales and not torch.equal(t._rowwise_scale_inv, plain._rowwise_scale_inv)
    assert torch.equal(t.dequantize(), plain.dequantize())
    with pytest.raises(NotImplementedError):
        t.fsdp_pre_all_gather(None, None, None, None, None)


# ---- Randomness ------------------------------------------------------------------------------------------


def test_stochastic_rounding_draws_from_torch(x):
    q = NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(11)
    a, b = q(x), q(x)
    torch.manual_seed(11)
    c = q(x)
    assert same(a, c) and not torch.equal(a._rowwise_data, b._rowwise_data)
    state = torch.get_rng_state()
    NVFP4Quantizer()(x)
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn that is not needed
    mean = sum(q(x).dequantize().float() for _ in range(50)) / 50
    nearest = NVFP4Quantizer()(x).dequantize().float()
    assert (mean - x.float()).abs().mean() < 0.5 * (nearest - x.float()).abs().mean()


# ---- Storages and saving ---------------------------------------------------------------------------------


def test_save_and_restore(make, x):
    q = make()
    q.internal = True
    s, t, plain = q(x), make()(x), torch.randn(2)
    values = s.dequantize()
    tensors, objects = prepare_for_saving(s, None, t, plain)
    assert len(tensors) == make.saved + 3 and objects[0] is s and objects[1:] == [None] * 3
    assert all(p is None for p in fields(s)) and s.shape == x.shape
    for arguments in ((objects, tensors), (tensors, objects)):
        restored, rest = restore_from_saved(*arguments, return_saved_tensors=True)
        assert restored[0] is s and restored[1] is None and restored[2] is t and restored[3] is plain and rest == []
        assert torch.equal(s.dequantize(), values)
    assert restore_from_saved(*prepare_for_saving(None, None)) == [None, None]
    assert restore_from_saved(*prepare_for_saving()) == []
    assert restore_from_saved([None], [None]) == [None]
    with pytest.raises(IndexError):
        restore_from_saved(objects, tensors[:make.saved - 1])


def test_restore_from_func_ctx(make, x):
    q = make()
    q.internal = True

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            tensors, ctx.tensor_objects = prepare_for_saving(q(a), a)
            ctx.save_for_backward(*tensors)
            return a * 1

        @staticmethod
        def backward(ctx, grad):
            storage, a = restore_from_func_ctx(ctx)
            with pytest.raises(AttributeError):
                restore_from_func_ctx(ctx)
            return grad * storage.dequantize()

    a = x.clone().requires_grad_()
    Function.apply(a).sum().backward()
    assert torch.equal(a.grad, make()(x).dequantize())


def test_storage_methods(make, x):
    q = make()
    q.internal = True
    s, other = q(x), q(x * 2)
    assert s.get_usages() == {"rowwise": True, "columnwise": make.name != "nvfp4_rowwise"}
    s.copy_from_storage(other)
    assert torch.equal(s.dequantize(), other.dequantize())
    with pytest.raises(TypeError):
        s.copy_from_storage(x)
    assert s.device.type == "cpu" and type(s).__name__ in repr(s)
    view = s.view(2, 32, 128)
    assert type(view) is type(s) and view.shape == (2, 32, 128)
    assert s.view(64, 128) is s and s.view(None) is s
    assert torch.equal(view.dequantize(), s.dequantize().view(2, 32, 128))
    with pytest.raises(RuntimeError):
        s.view(32, 256)
    assert s.quantize_(x) is s and torch.equal(s.dequantize(), make()(x).dequantize())
    with pytest.warns(UserWarning):
        s.update_quantizer(make())
    s.clear()
    assert all(d is None or d.numel() == 0 for d in s._parts()[:2])


def test_flags_must_agree_to_copy(x):
    a, b = NVFP4Quantizer(), NVFP4Quantizer(row_scaled_nvfp4=True)
    a.internal = b.internal = True
    with pytest.raises(RuntimeError, match="row_scaled"):
        a(x).copy_from_storage(b(x))


def test_update_usage(make, x):
    t = make()(x).detach()
    whole = make()(x)
    if make.name != "nvfp4_rowwise":
        t.update_usage(rowwise_usage=True, columnwise_usage=False)
        assert t.get_usages() == {"rowwise": True, "columnwise": False}
    can_build = make.name in ("nvfp4_2d", "block_2d", "mxfp8_2d") or make.name.startswith("float8")
    if can_build:
        t.update_usage(columnwise_usage=True)
        assert same(t, whole)
    else:
        with pytest.raises(RuntimeError):
            t.update_usage(columnwise_usage=True)
    t = make()(x).detach()
    if make.name != "nvfp4_rowwise":
        t.update_usage(rowwise_usage=False)
        assert t.get_usages() == {"rowwise": False, "columnwise": True} and t.shape == x.shape
        assert t.dequantize().shape == x.shape  # from the columnwise usage
        with pytest.raises(RuntimeError):
            t.update_usage(rowwise_usage=True)
    if make.name.startswith("block"):
        with pytest.raises(AssertionError):
            t.update_usage(False, False)
    else:
        t.update_usage(False, False)
        assert t.shape == x.shape
        with pytest.raises(ValueError, match="no data"):
            t.dequantize()
        assert type(t).__name__ in repr(t)


def test_columnwise_only(x):
    t = NVFP4Quantizer(rowwise=False, with_rht=True)(x.view(4, 16, 128))
    assert t.shape == (4, 16, 128)
    assert (t.dequantize() - x.view(4, 16, 128)).abs().max() < 1


# ---- torch.Tensor ----------------------------------------------------------------------------------------


def test_subclasses_are_kept(make, x):
    class Derived(type(make()(x))):
        pass

    t = make()(x)
    d = Derived(shape=t.shape, dtype=t.dtype, **{k: v for k, v in t.get_metadata().items() if k != "fake_dtype"})
    assert type(d.detach()) is Derived and type(torch.nn.Parameter(d)) is Derived and type(d.clone()) is Derived
    d.quantize_(torch.zeros_like(x))
    assert not d.dequantize().any()


def test_autograd(make, x):
    leaf = x.clone().requires_grad_()
    t = make()(leaf)
    assert t.requires_grad and t.grad_fn is not None
    (t.dequantize() * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 3))
    with torch.no_grad():
        assert not make()(leaf).requires_grad
    for call in (lambda t: t.clone(), lambda t: t.view(2, 32, 128), lambda t: t.reshape(64, 128),
                 lambda t: t.contiguous(), lambda t: t.expand_as(t)):
        leaf.grad = None
        other = call(make()(leaf))
        assert isinstance(other, QuantizedTensor)
        (other.dequantize() * 2).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(x, 2))
    leaf.grad = None
    (make()(leaf) * 5).sum().backward()  # through an operation on values
    assert torch.equal(leaf.grad, torch.full_like(x, 5))


def test_parameters_and_training(make, x):
    linear = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
    linear.weight = torch.nn.Parameter(make()(x).detach())
    before = linear.weight.dequantize().detach().clone()
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    y = linear(torch.randn(8, 128, dtype=torch.bfloat16))
    y.square().sum().backward()
    assert type(linear.weight.grad) is torch.Tensor
    optimizer.step()
    assert isinstance(linear.weight, QuantizedTensor) and not torch.equal(linear.weight.dequantize(), before)
    assert isinstance(linear.weight.data, QuantizedTensor)


@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers(make, x, foreach):
    """A step on a quantized parameter is near that on its values: each operation in place quantizes again."""
    weight = torch.nn.Parameter(make()(x.float()).detach())
    twin = torch.nn.Parameter(weight.dequantize().detach())
    grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(8))
    for parameter in (weight, twin):
        parameter.grad = grad.clone()
        torch.optim.AdamW([parameter], lr=0.5, foreach=foreach).step()  # longer than a step of the codes
    before = make()(x.float()).dequantize()
    assert isinstance(weight, QuantizedTensor) and (weight.dequantize() - before).abs().mean() > 0.05
    moved = ((weight.dequantize() - before) * (twin - before)).sum() / (twin - before).square().sum()
    assert 0.8 < moved < 1.2


def test_pickle_and_copies(make, x):
    t = make()(x).detach()
    t.note = {"kept": 1}
    for other in (copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert other.note == {"kept": 1}
        assert type(other) is type(t) and same(other, t) and other.shape == t.shape and other.dtype == t.dtype
        assert all(a is None or a.data_ptr() != b.data_ptr() for a, b in zip(fields(other), fields(t)))
    parameter = torch.nn.Parameter(t)
    parameter.grad = torch.ones_like(x)
    twin = copy.deepcopy(parameter)
    assert twin.requires_grad and torch.equal(twin.grad, parameter.grad) and twin.grad is not parameter.grad
    memo = {}
    assert copy.deepcopy([t, t], memo)[0] is copy.deepcopy([t, t], memo)[1]
    file = io.BytesIO()
    torch.save({"weight": t}, file)
    for weights_only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)["weight"]
        assert type(loaded) is type(t) and same(loaded, t) and loaded._quantizer is not None
        assert isinstance(make(), Float8Quantizer) or loaded._quantizer == t._quantizer
        loaded.quantize_(x * 2)


def test_a_saved_module_keeps_its_parameters(make, x):
    module = torch.nn.Linear(128, 64, bias=False)
    module.weight = torch.nn.Parameter(make()(x).detach())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded.weight, torch.nn.Parameter) and same(loaded.weight, module.weight)


def test_casts_of_modules(make, x):
    """A module's half() changes what parameters count as, and dequantizes none."""
    module = torch.nn.Linear(128, 64)
    module.weight = torch.nn.Parameter(make()(x).detach())
    kind, data = type(module.weight), [None if p is None else p.clone() for p in fields(module.weight)]
    for cast, dtype in ((module.half, torch.float16), (module.float, torch.float32), (module.bfloat16, torch.bfloat16)):
        assert cast() is module
        assert type(module.weight) is kind and module.weight.dtype == dtype and module.bias.dtype == dtype
        assert module.weight.dequantize().dtype == dtype and isinstance(module.weight, torch.nn.Parameter)
        assert all(a is None or torch.equal(a, b) for a, b in zip(data, fields(module.weight)))


def test_pickles_of_before(x):
    t = NVFP4Quantizer()(x)
    old = NVFP4Tensor._make_in_reduce_ex(t.shape, t._rowwise_data, t._rowwise_scale_inv, t._columnwise_data,
                                         t._columnwise_scale_inv, t._amax_rowwise, t._amax_columnwise, t._fp4_dtype,
                                         t.dtype, t._quantizer, False)
    assert same(old, t)


def test_state_dict(make, x):
    module = torch.nn.Linear(128, 64, bias=False)
    module.weight = torch.nn.Parameter(make()(x).detach())
    state = module.state_dict()
    assert isinstance(state["weight"], QuantizedTensor)
    other = torch.nn.Linear(128, 64, bias=False)
    other.weight = torch.nn.Parameter(make()(torch.zeros_like(x)).detach())
    other.load_state_dict(state)
    assert same(other.weight, module.weight)
    other.load_state_dict({"weight": x * 2})  # a plain checkpoint is quantized
    assert same(other.weight, make()(x * 2))


def test_data(make, x):
    t, other = make()(x).detach(), make()((x * 2)[:32]).detach()
    t.data = other
    assert t.shape == (32, 128) and all(a is b for a, b in zip(fields(t), fields(other)))
    assert t._quantizer is not other._quantizer
    t.data = (x * 3)[:32]
    assert same(t, make()((x * 3)[:32]))
    t.data = x[:32].float()  # Module.to(dtype) comes this way
    assert t.dtype == torch.float32 and t.dequantize().dtype == torch.float32
    t.data = x[:32]
    t._quantizer = None
    with pytest.raises(AssertionError):
        t.data = x[:32]


def test_nominal_dtype(make, x):
    t = make()(x)
    other = t.to_dtype(torch.float32)
    assert other.dtype == torch.float32 and other.dequantize().dtype == torch.float32
    assert other.FIELDS and fields(other)[0] is fields(t)[0]
    with pytest.raises(TypeError):
        t.dequantize(dtype=torch.int32)


def test_contiguous(x):
    t = NVFP4Quantizer()(x).detach()
    assert t.contiguous() is t
    t._rowwise_data = t._rowwise_data.t().contiguous().t()
    with pytest.raises(ValueError):
        t.contiguous()
    values = NVFP4Quantizer()(x).dequantize()
    assert torch.equal(t.dequantize(), values)  # buffers that others attached are read all the same
    t.quantize_(x * 2)
    assert torch.equal(t.dequantize(), NVFP4Quantizer()(x * 2).dequantize())


def test_flatten(make, x):
    for internal in (False, True):
        q = make()
        q.internal = internal
        t = q(x)
        names, context = t.__tensor_flatten__()
        assert names == [f.name for f in t.FIELDS if getattr(t, f.name) is not None]
        inner = {name: getattr(t, name) for name in names}
        other = type(t).__tensor_unflatten__(inner, context, t.shape, None)
        assert type(other) is type(t) and same(other, t) and other.shape == t.shape and other._dtype == t._dtype


def test_compile(make, x):
    """Tensors go into a compiled function, are viewed, changed and made in it."""
    torch.compiler.reset()
    w = make()(x).detach()

    def f(a, w):
        return torch.nn.functional.linear(a, w).relu()

    a = torch.randn(8, 128, dtype=torch.bfloat16)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a, w), f(a, w))
    w.quantize_(x * 2)  # the graph has kept no values
    assert torch.equal(compiled(a, w), f(a, w))

    def change(w, a):
        w.add_(a)
        return w.view(2, 32, 128).sum(), w.detach()

    mine, theirs = w.clone().detach(), w.clone().detach()
    results = torch.compile(change, backend="aot_eager")(mine, x), change(theirs, x)
    assert torch.equal(results[0][0], results[1][0]) and same(mine, theirs) and same(results[0][1], theirs)

    q = make()
    compiled = torch.compile(lambda a: q(a * 2).dequantize() + 1, backend="aot_eager")
    for factor in (1, 3):
        assert torch.equal(compiled(x * factor), make()(x * factor * 2).dequantize() + 1)


def test_operators(make, x):
    """What a graph runs: the operators give the same bytes, and their fake results have the same shapes."""
    from nib.torch import _bridge, _ops
    t = make()(x)
    if make.name == "float8_delayed":
        pytest.skip("delayed scaling cannot be part of a graph")
    struct = make()._struct()
    parts = _ops.traced_parts(x, struct)
    assert all((a is None) == (b is None) and (a is None or torch.equal(a.view(-1), b.view(-1)))
               for a, b in zip(parts, t._parts()))
    assert torch.equal(_ops.traced_values(parts, struct, torch.bfloat16, x.shape, torch.bfloat16), t.dequantize())
    torch.library.opcheck(torch.ops.nib.quantize, (x, _ops.encode(struct)))
    torch.library.opcheck(torch.ops.nib.dequantize, (parts, _ops.encode(struct), 6, list(x.shape), 6))
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        traced = make()(mode.from_tensor(x))
        assert all(a.shape == b.shape for a, b in zip(traced._parts(), t._parts()) if b is not None)
        assert traced.dequantize().shape == x.shape and _bridge.is_fake(traced.dequantize())


def test_other_threads(make, x):
    from concurrent.futures import ThreadPoolExecutor
    expected = make()(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(same(t, expected) for t in pool.map(lambda _: make()(x), range(32)))


def test_host(make, x):
    """Arrays and buffers that go to the library are those of the Host around the call; bytes are the same."""
    from nib.torch import _bridge
    expected = make()(x)
    with nib.Host(threads=1) as host:
        t = make()(x).detach()
        assert same(t, expected) and torch.equal(t.dequantize(), expected.dequantize())
        assert _bridge.array(x).device == host._handle
        with t._native() as native:
            assert nib._library.raw.nib_tensor_device(native.handle) == host._handle
    assert _bridge.array(x).device is None


def test_grad_mode_and_internal(x):
    q = NVFP4Quantizer()
    q.internal = True
    leaf = x.clone().requires_grad_()
    s = q(leaf)
    assert type(s) is NVFP4TensorStorage and not s.dequantize().requires_grad


def test_shape_survives_without_data(make, x):
    t = make()(x).detach()
    t.prepare_for_saving()
    assert t.shape == x.shape and t.size(0) == 64 and t.size(-1) == 128


def test_no_warnings(make, x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t = make()(x)
        copy.deepcopy(t.detach())
        t.dequantize()
        t.view(2, 32, 128)
