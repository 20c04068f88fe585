# SPDX-License-Identifier: Apache-2.0
"""What operations do to quantized tensors: one test per row of TransformerEngine's table, for the base class and for
NVFP4, with the right behavior where TransformerEngine's is a defect (docs/differences.md)."""
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

from nib.torch import (NVFP4Quantizer, NVFP4Tensor, QuantizedTensor, Quantizer)  # noqa: E402
from nib.torch.quantized_tensor import _quantized_tensor_passthrough_ops  # noqa: E402

FIELDS = [field.name for field in NVFP4Tensor.FIELDS]
aten = torch.ops.aten


class KeptQuantizer(Quantizer):
    """A format of this test's own: 'quantized' values are whole ones."""

    def quantize_impl(self, tensor):
        return Kept(tensor.shape, tensor.dtype, kept=tensor.detach().round(), quantizer=self)

    def update_quantized(self, src, dst, *, noop_flag=None):
        dst.kept.copy_(src.detach().round())
        return dst

    def make_empty(self, shape, *, dtype=torch.float32, device=None, requires_grad=False, pin_memory=False):
        return Kept(torch.Size(shape), dtype, kept=torch.zeros(shape, dtype=dtype), quantizer=self)

    def copy(self):
        return KeptQuantizer(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)


class Kept(QuantizedTensor):
    """The base class with the least that it needs."""

    def __new__(cls, shape, dtype, *, kept, quantizer=None, **kwargs):
        self = super().__new__(cls, shape, dtype, **kwargs)
        self.kept, self._quantizer = kept, quantizer
        return self

    def __init__(self, *args, **kwargs):
        pass

    def dequantize(self, *, dtype=None):
        return self.kept.to(dtype or self.dtype, copy=True)

    def quantize_(self, tensor, *, noop_flag=None):
        self.kept.copy_((tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor).round())
        return self

    def get_metadata(self):
        return {"kept": self.kept, "quantizer": self._quantizer, "fake_dtype": self.dtype}

    def get_usages(self):
        return {"rowwise": True, "columnwise": False}

    def get_data_tensors(self):
        return (self.kept,)

    def prepare_for_saving(self):
        kept, self.kept = self.kept, None
        return [kept], self

    def restore_from_saved(self, tensors):
        self.kept = tensors[0]
        return tensors[1:]


class ForeignQuantizer(KeptQuantizer):
    pass


@pytest.fixture
def x():
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16() * 3


@pytest.fixture
def base(x):
    return KeptQuantizer()(x.float()).detach()


@pytest.fixture
def nvfp4(x):
    return NVFP4Quantizer()(x).detach()


def buffers(t):
    return {name: getattr(t, name) for name in FIELDS}


def same_bytes(a, b):
    return all((p is None) == (q is None) and (p is None or torch.equal(p, q))
               for p, q in zip(buffers(a).values(), buffers(b).values()))


def is_plain(t):
    return type(t) is torch.Tensor


# ---- detach ----------------------------------------------------------------------------------------------


def test_detach(base, nvfp4):
    for t in (base, nvfp4):
        t.requires_grad_()
        for other in (t.detach(), aten.detach.default(t), torch.detach(t)):
            assert type(other) is type(t) and other is not t and not other.requires_grad
    assert all(p is q for p, q in zip(buffers(nvfp4).values(), buffers(nvfp4.detach()).values()))
    assert base.detach().kept is base.kept


# ---- copy_ -----------------------------------------------------------------------------------------------


def test_copy_base(base, x):
    other = KeptQuantizer()(torch.full_like(x.float(), 7.4)).detach()
    buffer = base.kept
    assert base.copy_(other) is base and base.kept is buffer and (base.kept == 7).all()  # buffer by buffer
    base.copy_(x.float())
    assert torch.equal(base.kept, x.float().round())  # from plain: quantizes
    foreign = ForeignQuantizer()(torch.full_like(x.float(), 2.6)).detach()
    base.copy_(foreign)
    assert (base.kept == 3).all()  # of another quantizer: quantizes
    plain = torch.empty(48, 64, dtype=torch.float64)
    plain.copy_(base)
    assert (plain == 3).all()  # to plain: dequantizes
    half = torch.empty(48, 64, dtype=torch.float16)
    half.copy_(base)
    assert half.dtype == torch.float16 and (half == 3).all()


def test_copy_nvfp4(nvfp4, x):
    source = NVFP4Quantizer()(x * 2)
    before = buffers(nvfp4)
    assert nvfp4.copy_(source) is nvfp4 and same_bytes(nvfp4, source)
    assert all(before[name] is getattr(nvfp4, name) for name in FIELDS)  # in place
    nvfp4.copy_(x)
    assert same_bytes(nvfp4, NVFP4Quantizer()(x))
    plain = torch.empty_like(x)
    plain.copy_(nvfp4)
    assert torch.equal(plain, nvfp4.dequantize())


def test_copy_nvfp4_leaves_no_direction_stale(nvfp4, x):
    """TransformerEngine copies what both have; a usage that only the target has would stay as it was."""
    source = NVFP4Quantizer(columnwise=False)(x * 2)
    nvfp4.copy_(source)
    expected = NVFP4Quantizer()(source.dequantize())
    assert nvfp4.get_usages() == {"rowwise": True, "columnwise": True} and same_bytes(nvfp4, expected)
    target = NVFP4Quantizer(columnwise=False)(x).detach()
    both = NVFP4Quantizer()(x * 2)
    target.copy_(both)  # more than it has is fine
    assert torch.equal(target._rowwise_data, both._rowwise_data) and target._columnwise_data is None


def test_copy_nvfp4_looks_at_flags(nvfp4, x):
    """Bytes of another meaning are not copied as if they were the target's."""
    for source in (NVFP4Quantizer(row_scaled_nvfp4=True)(x), NVFP4Quantizer(block_dims=(16, 16))(x),
                   NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256)(x), NVFP4Quantizer(with_rht=True)(x)):
        target = nvfp4.clone().detach()
        target.copy_(source)
        assert same_bytes(target, NVFP4Quantizer()(source.dequantize()))
        assert target._row_scaled_nvfp4 is False and target._nvfp4_e4m3_max == 448
    quantizer = NVFP4Quantizer()
    quantizer.optimize_for_gemm = True
    target = nvfp4.clone().detach()
    target.copy_(quantizer(x))
    assert not target._with_gemm_swizzled_scales and torch.equal(target.dequantize(), nvfp4.dequantize())


# ---- _to_copy --------------------------------------------------------------------------------------------


def test_to_copy_base(base):
    other = base.to(device="cpu", copy=True)
    assert type(other) is Kept and other.kept is not base.kept and torch.equal(other.kept, base.kept)
    assert is_plain(base.to(torch.bfloat16)) and base.to(torch.bfloat16).dtype == torch.bfloat16


def test_to_copy_nvfp4(nvfp4):
    other = nvfp4.to(device="cpu", copy=True)
    assert type(other) is NVFP4Tensor and same_bytes(other, nvfp4)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(buffers(other).values(), buffers(nvfp4).values()))
    assert type(nvfp4.cpu()) is NVFP4Tensor
    wide = nvfp4.to(torch.float32)
    assert is_plain(wide) and torch.equal(wide, nvfp4.dequantize().float())
    assert is_plain(nvfp4.float()) and nvfp4.half().dtype == torch.float16 and nvfp4.bfloat16().dtype == torch.bfloat16


# ---- view ------------------------------------------------------------------------------------------------


def test_view_base(base):
    with pytest.raises(NotImplementedError, match="Kept"):
        base.view(24, 128)


def test_view_nvfp4(nvfp4):
    same = aten.view.default(nvfp4, [48, 64])
    assert type(same) is NVFP4Tensor and same._rowwise_data is nvfp4._rowwise_data
    for other in (aten.view.default(nvfp4, [4, -1, 64]), nvfp4.view(4, 12, 64), nvfp4.reshape((4, 12, 64))):
        assert type(other) is NVFP4Tensor and other.shape == (4, 12, 64)
        assert other._rowwise_data.data_ptr() == nvfp4._rowwise_data.data_ptr()
        assert other._rowwise_data.shape == (4, 12, 32) and other._columnwise_data.shape == (64, 24)
        assert torch.equal(other.dequantize(), nvfp4.dequantize().view(4, 12, 64))
    for shape in ((-1,), (24, 128)):
        with pytest.warns(UserWarning, match="last dim"):
            other = nvfp4.view(*shape)
        assert is_plain(other) and torch.equal(other, nvfp4.dequantize().view(*shape))
    with pytest.raises(RuntimeError):
        nvfp4.view(5, -1, 64)
    with pytest.raises(RuntimeError):
        nvfp4.view(-1, -1, 64)


# ---- new ones --------------------------------------------------------------------------------------------


def test_new_empty(base, nvfp4):
    for t in (base, nvfp4):
        other = t.new_empty((32, 64))
        assert type(other) is type(t) and other.shape == (32, 64) and other.dtype == t.dtype
    base._quantizer = nvfp4._quantizer = None
    for t in (base, nvfp4):
        with pytest.raises(RuntimeError, match="no quantizer"):
            t.new_empty((32, 64))


def test_empty_like(base, nvfp4, x):
    assert type(torch.empty_like(base)) is Kept
    other = torch.empty_like(nvfp4)
    assert type(other) is NVFP4Tensor and other.shape == nvfp4.shape
    assert all(a.shape == b.shape and a.dtype == b.dtype
               for a, b in zip(buffers(other).values(), buffers(nvfp4).values()))
    rowwise = NVFP4Quantizer()(x).detach()
    rowwise.update_usage(True, False)
    assert torch.empty_like(rowwise).get_usages() == {"rowwise": True, "columnwise": False}  # the tensor's own usages


def test_empty_like_with_a_dtype(nvfp4):
    """dtype is the nominal one. TransformerEngine hands it on to the buffers, which are bytes."""
    other = torch.empty_like(nvfp4, dtype=torch.float32)
    assert other.dtype == torch.float32 and other._rowwise_data.dtype == torch.uint8
    assert other._amax_rowwise.dtype == torch.float32 and other.dequantize().dtype == torch.float32


def test_zero_base(base):
    assert base.zero_() is base and not base.kept.any()


def test_zero_nvfp4_changes_the_tensor(nvfp4):
    """TransformerEngine returns a new tensor and leaves this one as it is."""
    before = buffers(nvfp4)
    view = nvfp4.view(4, 12, 64)
    assert nvfp4.zero_() is nvfp4
    assert not nvfp4.dequantize().any() and not view.dequantize().any()
    assert all(before[name] is getattr(nvfp4, name) and not before[name].any() for name in FIELDS)


def test_new_zeros(base, nvfp4):
    for other in (base.new_zeros((32, 64)), nvfp4.new_zeros((31, 64)), nvfp4.new_zeros((32, 60)),
                  nvfp4.new_zeros((64,))):
        assert is_plain(other) and not other.any()
    zeros = nvfp4.new_zeros((32, 64))
    assert type(zeros) is NVFP4Tensor and zeros.shape == (32, 64) and not zeros.dequantize().any()
    assert zeros.get_usages() == nvfp4.get_usages()


# ---- parts -----------------------------------------------------------------------------------------------


def test_slice(base, nvfp4):
    assert is_plain(base[4:9]) and torch.equal(base[4:9], base.kept[4:9])
    assert is_plain(base[:])
    for whole in (nvfp4[:], nvfp4[0:48], nvfp4[:, 0:64], aten.slice.Tensor(nvfp4, 1, 0, 9223372036854775807)):
        assert type(whole) is NVFP4Tensor and whole._rowwise_data is nvfp4._rowwise_data
    for part in (lambda: nvfp4[0:17], lambda: nvfp4[8:], lambda: nvfp4[::2], lambda: nvfp4[:, :16],
                 lambda: nvfp4[16:16]):
        with pytest.raises(NotImplementedError):
            part()


def test_rows(nvfp4, x):
    """Rows between blocks are NVFP4, and NVFP4 rows can be copied into them; values cannot, nor what an operation on
    them would write."""
    values = nvfp4.dequantize()
    for rows in (slice(0, 16), slice(16, None), slice(-16, None)):
        part = nvfp4[rows]
        assert type(part) is NVFP4Tensor and torch.equal(part.dequantize(), values[rows])
        assert torch.equal(part.detach().dequantize(), values[rows])
    tiles = NVFP4Quantizer(block_dims=(16, 16))
    mine, theirs = tiles(x), tiles(2 * x)
    for first in (0, 32, 16):
        mine[first:first + 16].detach().copy_(theirs[first:first + 16])
    assert torch.equal(mine.dequantize(), theirs.dequantize()) and mine._columnwise_data is None
    mine.copy_(tiles(x)[0:48])  # a tensor without the columnwise usage
    mine.update_usage(columnwise_usage=True)
    assert torch.equal(mine._columnwise_data, tiles(x)._columnwise_data)
    both = tiles(3 * x)
    rowwise = tiles(x)
    rowwise.update_usage(columnwise_usage=False)
    both.copy_(rowwise)
    assert torch.equal(both._columnwise_data, tiles(x)._columnwise_data)
    for change in (lambda part: part.copy_(x[:16]), lambda part: part.mul_(2), lambda part: part.quantize_(x[:16])):
        with pytest.raises(NotImplementedError, match="the whole"):
            change(both[0:16])
    assert torch.equal(both.dequantize(), tiles(x).dequantize())


def test_select(base, nvfp4):
    assert is_plain(base[3]) and torch.equal(base[3], base.kept[3])
    assert is_plain(nvfp4[3]) and torch.equal(nvfp4[3], nvfp4.dequantize()[3])


def test_split(base, nvfp4):
    for t in (base, nvfp4):
        for chunks in (t.chunk(3), t.split(16), torch.split(t, 16)):
            assert len(chunks) == 3 and all(is_plain(p) is (t is base) for p in chunks)
            assert torch.equal(torch.cat([p.dequantize() if t is nvfp4 else p for p in chunks]), t.dequantize())
    assert [tuple(p.shape) for p in nvfp4.split(32)] == [(32, 64), (16, 64)]
    assert all(is_plain(p) for p in (*nvfp4.split(20), *nvfp4.split(16, dim=1)))


def test_as_strided(base, nvfp4, x):
    assert is_plain(base.as_strided((48, 64), (64, 1)))
    assert type(nvfp4.as_strided((48, 64), (64, 1))) is NVFP4Tensor
    assert type(nvfp4.as_strided((48, 64), (64, 1), 0)) is NVFP4Tensor
    for arguments in (((24, 64), (64, 1)), ((48, 64), (64, 1), 64), ((64, 48), (1, 64))):
        with pytest.raises(NotImplementedError):
            nvfp4.as_strided(*arguments)
    deep = NVFP4Quantizer()(x.view(3, 16, 64))
    with pytest.raises(NotImplementedError):
        deep.as_strided((3, 16, 64), (1024, 64, 1))


def test_clone(base, nvfp4):
    assert is_plain(torch.clone(base)) and is_plain(torch.clone(nvfp4))  # the operation: values
    other = nvfp4.clone()  # the method: the tensor
    assert type(other) is NVFP4Tensor and same_bytes(other, nvfp4)


def test_clone_shares_nothing(nvfp4):
    """TransformerEngine shares scales and amaxes with the original."""
    values = nvfp4.dequantize()
    other = nvfp4.clone()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(buffers(other).values(), buffers(nvfp4).values()))
    other.zero_()
    assert torch.equal(nvfp4.dequantize(), values)


def test_record_stream(nvfp4):
    assert NVFP4Tensor.__torch_dispatch__(aten.record_stream.default, (NVFP4Tensor,), (nvfp4, None)) is None


def test_numel(base, nvfp4):
    for t in (base, nvfp4):
        assert t.numel() == 48 * 64
        assert type(t).__torch_dispatch__(aten.numel.default, (type(t),), (t,)) == 48 * 64


def test_is_pinned(base, nvfp4):
    for t in (base, nvfp4):
        assert t.is_pinned() is False
    nvfp4.prepare_for_saving()
    assert nvfp4.is_pinned() is False


def test_passthrough(base):
    """Operations that others have registered get the tensors as they are."""
    seen = []

    @torch.library.custom_op("nib_test::look", mutates_args=())
    def look(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1)

    op = torch.ops.nib_test.look.default
    original = QuantizedTensor.__torch_dispatch__
    op(base)  # values, and it works
    _quantized_tensor_passthrough_ops.add(op)
    try:
        class Recorder:
            _schema = op._schema

            def __call__(self, *args, **kwargs):
                seen.append(type(args[0]))

            def __hash__(self):
                return hash(op)

            def __eq__(self, other):
                return other is op
        original(Recorder(), (Kept,), (base,))
    finally:
        _quantized_tensor_passthrough_ops.discard(op)
    assert seen == [Kept]


CHANGES = [lambda t: t.add_(1), lambda t: t.mul_(2), lambda t: t.sub_(t), lambda t: t.clamp_(0, 1),
           lambda t: t.__iadd__(1), lambda t: t.copy_(t.dequantize() * 3), lambda t: t.fill_(2),
           lambda t: (torch._foreach_add_([t], 1), t)[1], lambda t: torch.add(t, 1, out=t)]


@pytest.mark.parametrize("change", CHANGES)
def test_in_place(base, nvfp4, change):
    """Dequantize, run, quantize back into the same object."""
    for t in (base, nvfp4):
        values = change(t.dequantize())
        expected = t._quantizer(values)
        result = change(t)
        assert result is t
        assert torch.equal(t.dequantize(), expected.dequantize())


def test_anything_else_works_on_values(base, nvfp4):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in (base, nvfp4):
            values = t.dequantize()
            for call in (lambda a: a + 1, lambda a: a @ a.t(), torch.sin, torch.sum, lambda a: a.t(), torch.abs,
                         lambda a: torch.cat([a, a]), lambda a: a == a, lambda a: a[a > 0], torch.ones_like,
                         lambda a: torch.nn.functional.linear(a, a), lambda a: a.unsqueeze(0), lambda a: -a,
                         lambda a: torch.where(a > 0, a, torch.zeros((), dtype=a.dtype))):
                result = call(t)
                assert is_plain(result) and torch.equal(result, call(values))
