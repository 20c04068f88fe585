# SPDX-License-Identifier: Apache-2.0
"""nib.torch on a GPU: the host's bytes, torch's stream, memory and generator, and nothing that comes to the host.

Every test runs on a GPU where there is one. Those that take `place` run on the host too, over cuda/shim, where tensors
in host memory are taken for those of a GPU; what needs CUDA's own streams and graphs is skipped there.
"""
import contextlib
import copy
import ctypes
import glob
import io
import os
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch")

import nib.torch as nt  # noqa: E402
from conftest import ROOT  # noqa: E402
from nib import _cuda, _library  # noqa: E402
from nib._library import Part  # noqa: E402
from nib.torch import _bridge, products  # noqa: E402
from nib.torch.nvfp4_tensor import NVFP4Quantizer  # noqa: E402
from nib.torch.packed import Matrix  # noqa: E402
from nib.torch.recipe import NVFP4BlockScaling  # noqa: E402


class Place:
    """Where the tensors of a test are, and the host beside it."""

    def __init__(self, device, patch=None):
        self.device, self._patch = device, patch

    def __call__(self, tensor):
        return tensor.to(self.device)

    def host(self, call, *arguments):
        """call(*arguments) on the host."""
        if self._patch is None:
            return call(*arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_bridge, "on_gpu", lambda t: False)
            patch.setattr(_bridge, "device_of", _DEVICE_OF)
            return call(*arguments)


_DEVICE_OF = _bridge.device_of


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """libnib_cuda over cuda/shim, linked with the libnib that this process has."""
    archives = sorted(glob.glob(os.path.join(ROOT, "build*/tests/libnib_cuda_shim.a")), key=os.path.getmtime)
    compiler = shutil.which("c++")
    if not archives or not compiler:
        pytest.skip("cuda/shim is not built here")
    out, library = str(tmp_path_factory.mktemp("shim") / "libnib_cuda.so"), os.path.realpath(_library.path)
    subprocess.run([compiler, "-shared", "-Wl,--whole-archive", archives[-1], "-Wl,--no-whole-archive", library,
                    "-pthread", "-o", out, f"-Wl,-rpath,{os.path.dirname(library)}"], check=True)
    return out


def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    try:
        _cuda.functions()
    except _library.DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def gpu():
    needs_gpu()
    return Place(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture(params=["shim", "cuda"])
def place(request, monkeypatch):
    if request.param == "cuda":
        return request.getfixturevalue("gpu")
    library = request.getfixturevalue("shim")
    monkeypatch.setenv("NIB_CUDA_LIBRARY", library)
    monkeypatch.setenv("NIB_CUBLASLT_LIBRARY", library)
    monkeypatch.setattr(_cuda, "_functions", None)
    monkeypatch.setattr(_cuda, "_devices", {})
    monkeypatch.setattr(_bridge, "on_gpu", lambda t: True)
    monkeypatch.setattr(_bridge, "device_of", lambda t: _cuda.device(0, 0))

    def draw(struct, _device, there):
        struct.seed, offset = 77, torch.randint(1 << 40, (1,))
        if there:
            return offset
        struct.offset = int(offset) * 4
        return None
    monkeypatch.setattr(_bridge, "_draw_on_gpu", draw)
    return Place(torch.device("cpu"), monkeypatch)


OPTIONS = [{}, {"with_rht": True}, {"with_2d_quantization": True}, {"row_scaled_nvfp4": True, "columnwise": False},
           {"nvfp4_use_4over6": True}, {"columnwise": False}, {"rowwise": False}]


def parts(tensor):
    return [None if part is None else part.cpu() for part in tensor._parts()]


def same(left, right):
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b))
               for a, b in zip(parts(left), parts(right)))


def sample(rows=48, cols=80, dtype=torch.bfloat16, seed=3):
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


# ---- Bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_bytes_are_the_hosts(place, options, dtype):
    quantizer = NVFP4Quantizer(**options)
    for rows, cols in ((48, 80), (128, 256), (16, 32)):
        x = sample(rows, cols, dtype)
        expected = place.host(quantizer.quantize, x)
        there = quantizer(place(x))
        assert same(there, expected)
        assert all(part is None or part.device == place.device for part in there._parts())
        for out in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(there.dequantize(dtype=out).cpu(), place.host(lambda: expected.dequantize(dtype=out)))


def test_tiles_strides_and_ranks(place):
    quantizer = NVFP4Quantizer(with_2d_quantization=True)
    quantizer.optimize_for_gemm = True
    x = sample(128, 256)
    assert same(quantizer(place(x)), place.host(quantizer.quantize, x))
    quantizer.optimize_for_gemm = False
    for view in (x.t(), x[::2, 16:112], x.view(4, 32, 256), x[:0]):
        there = quantizer(place(x.new_tensor(0) + view) if view.numel() == 0 else place(x).as_strided(
            view.shape, view.stride(), view.storage_offset()))
        assert same(there, place.host(quantizer.quantize, view))


def test_updates(place):
    quantizer = NVFP4Quantizer(with_rht=True)
    x, y = sample(seed=1), sample(seed=2)
    there = quantizer(place(x))
    before = [part.data_ptr() for part in there._parts()]
    for values in (y, x, y):
        quantizer.update_quantized(place(values), there)
        assert same(there, place.host(quantizer.quantize, values))
    assert [part.data_ptr() for part in there._parts()] == before


def test_amaxes_that_are_known(place):
    quantizer = NVFP4Quantizer()
    x, amax = sample(), torch.tensor([40.0])
    there, expected = quantizer(place(x)), place.host(quantizer.quantize, x)
    for value in (40.0, 3.0, 7.5):
        amax.fill_(value)
        quantizer.update_quantized(place(x), there, amax=place(amax))
        place.host(lambda: quantizer.update_quantized(x, expected, amax=amax))
        assert same(there, expected) and float(there._amax_rowwise) == value
    quantizer.update_quantized(place(x), there)  # again without
    assert same(there, place.host(quantizer.quantize, x))
    quantizer.update_quantized(place(x), there, amax=(place(amax), None))
    place.host(lambda: quantizer.update_quantized(x, expected, amax=(amax, None)))
    assert same(there, expected)
    with pytest.raises(ValueError, match="an amax is float32"):
        quantizer.update_quantized(place(x), there, amax=place(amax.double()))


def test_what_is_prepared_is_used_and_dropped(place):
    """The second update of a kind is prepared; whatever changes makes a new one."""
    quantizer = NVFP4Quantizer()
    x = place(sample())
    there = quantizer(x)
    quantizer.update_quantized(x, there)
    prepared = there._prepared
    quantizer.update_quantized(place(sample(seed=9)), there)
    assert there._prepared is prepared and same(there, place.host(quantizer.quantize, sample(seed=9)))
    quantizer.with_rht = quantizer.with_post_rht_amax = True
    quantizer.update_quantized(x, there)
    assert there._prepared is not prepared and same(there, place.host(quantizer.quantize, sample()))
    prepared = there._prepared
    there._rowwise_data = there._rowwise_data.clone()  # another buffer under the same name
    quantizer.update_quantized(x, there)
    assert there._prepared is not prepared and same(there, place.host(quantizer.quantize, sample()))
    quantizer.update_quantized(x.float(), there)
    assert same(there, place.host(quantizer.quantize, sample().float()))
    there.update_usage(columnwise_usage=False)
    assert there._prepared is not None and there._columnwise_data is None
    quantizer.update_quantized(x, there)
    assert same(there, place.host(quantizer.quantize, sample()))
    for other in (copy.deepcopy(there), there.clone()):
        assert getattr(other, "_prepared", None) is None and same(other, there)


def test_what_is_prepared_sees_other_signs(place):
    """A view of imaginary parts whose bit for the other signs is set has the strides of one without."""
    quantizer = NVFP4Quantizer()
    x = torch.complex(sample(dtype=torch.float32), sample(dtype=torch.float32, seed=9))
    there, z = quantizer(place(x.imag)), place(x)
    for _ in range(2):
        quantizer.update_quantized(z.imag, there)
    assert there._prepared is not None
    quantizer.update_quantized(z.conj().imag, there)
    assert same(there, place.host(quantizer.quantize, -x.imag))


def test_random_rounding(place):
    quantizer = NVFP4Quantizer(stochastic_rounding=True, with_2d_quantization=True)
    x = place(sample(128, 128))
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        drawn.append([quantizer(x), quantizer(x)])
    assert same(drawn[0][0], drawn[1][0]) and same(drawn[0][1], drawn[1][1]) and not same(*drawn[0])
    torch.manual_seed(11)
    for i in range(3):  # the third is prepared
        quantizer.update_quantized(x, drawn[1][0])
        assert i == 2 or same(drawn[1][0], drawn[0][i])
    for tensor in drawn[0]:
        assert torch.equal(tensor._columnwise_data, place(_transposed_codes(tensor._rowwise_data.cpu())))


def _transposed_codes(data):
    codes = torch.stack((data & 15, data >> 4), -1).reshape(data.shape[0], -1).t()
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()


# ---- What tensors do -------------------------------------------------------------------------------------


def test_tensors(place):
    quantizer = NVFP4Quantizer(with_2d_quantization=True, columnwise=False)
    x = sample(64, 96)
    there, expected = quantizer(place(x)), place.host(quantizer.quantize, x)
    there.update_usage(columnwise_usage=True)
    place.host(lambda: expected.update_usage(columnwise_usage=True))
    assert same(there, expected)
    assert torch.equal((there + 1).cpu(), place.host(lambda: expected + 1))
    assert same(there.view(2, 32, 96), place.host(expected.view, 2, 32, 96))
    moved = there.cpu()
    assert moved.device.type == "cpu" and same(moved, expected)
    other = torch.empty_like(there)
    assert other.device == place.device
    other.copy_(there)
    assert same(other, expected)
    other.zero_()
    assert not other.dequantize().any()
    buffer = io.BytesIO()
    torch.save(there, buffer)
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=True), expected)


def test_amax_and_swizzle(place):
    from nib.torch import tex
    x, found = sample(), torch.zeros(())
    there = place(found)
    tex.compute_amax(place(x), there)
    assert float(there) == float(x.abs().max())
    one = tex.nvfp4_quantize_with_amax(place(x), NVFP4Quantizer(columnwise=False), place(torch.tensor(9.0)))
    assert float(one._amax_rowwise) == 9.0


def test_no_op(place):
    random = NVFP4Quantizer(stochastic_rounding=True)
    x = place(sample())
    there = random(x)
    random.update_quantized(x, there)
    codes = []
    for value in (0.0, 0.0, 1.0):
        random.update_quantized(x, there, noop_flag=place(torch.tensor([value])))
        codes.append(there._rowwise_data.cpu().clone())
    assert not torch.equal(codes[0], codes[1]) and torch.equal(codes[1], codes[2])
    quantizer = NVFP4Quantizer()
    x, y = sample(seed=1), sample(seed=2)
    there = quantizer(place(x))
    for flag, values in ((1.0, x), (0.0, y), (1.0, y)):
        quantizer.update_quantized(place(y), there, noop_flag=place(torch.tensor([flag])))
        assert same(there, place.host(quantizer.quantize, values))


def test_amaxes_of_all_ranks(place, monkeypatch):
    """A reduction is torch's, between the amaxes and the codes: here one that finds more elsewhere."""
    import torch.distributed as dist
    quantizer = NVFP4Quantizer(with_rht=True, with_amax_reduction=True)
    x, reduced = sample(), []

    def all_reduce(amax, op, group):
        assert op == dist.ReduceOp.MAX and amax.device == place.device
        amax.mul_(2)
        reduced.append(float(amax))
    comm = _library.Comm(rank=0, size=2)
    comm.group = None
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(quantizer, "_reduction", lambda dst=None: contextlib.nullcontext(comm))
    there = quantizer(place(x))
    assert [float(there._amax_rowwise), float(there._amax_columnwise)] == reduced
    plain = NVFP4Quantizer(with_rht=True)
    expected = place.host(plain.quantize, x)
    assert reduced == [2 * float(expected._amax_rowwise), 2 * float(expected._amax_columnwise)]
    amaxes = [torch.tensor([value]) for value in reduced]
    place.host(lambda: plain.update_quantized(x, expected, amax=amaxes))
    assert same(there, expected)


def test_what_a_gpu_does_not_do_it_says(place):
    x = place(sample(64, 64))
    with pytest.raises(_library.UnsupportedError, match="quantizes nvfp4, not mxfp8"):
        nt.MXFP8Quantizer(nt.DType.kFloat8E4M3)(x)


def test_without_the_library(place, monkeypatch):
    monkeypatch.setenv("NIB_CUDA_LIBRARY", "/nowhere/libnib_cuda.so")
    monkeypatch.setattr(_cuda, "_functions", None)
    monkeypatch.setattr(_cuda, "_devices", {})
    with pytest.raises(_library.DeviceError, match="needs libnib_cuda: /nowhere.*NIB_CUDA_LIBRARY"):
        NVFP4Quantizer()(place(sample()))


# ---- Products --------------------------------------------------------------------------------------------


def _values(tensor, columnwise, length):
    """What a usage stands for, in FP64 from its bytes."""
    data, scale, amax = parts(tensor)[columnwise::2]
    grid = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((data & 15, data >> 4), -1).reshape(data.shape[0], -1)[:, :length]
    scales = scale.view(torch.float8_e4m3fn).double()[:codes.shape[0]].repeat_interleave(16, 1)[:, :length]
    return grid[(codes & 7).long()] * torch.where(codes & 8 > 0, -1.0, 1.0) * scales * amax.double().view(-1, 1) \
        / (6 * tensor._nvfp4_e4m3_max)


def _check_product(found, a, b, bits):
    """Within the bound of docs/numerics.md 14, and half a unit of `bits`."""
    exact, bound = a @ b.t(), a.norm(dim=1, keepdim=True) * b.norm(dim=1) * 2 ** -22 * (a.shape[1] + 64)
    assert ((found.cpu().double() - exact).abs() <= bound + exact.abs() * 2.0 ** -bits).all()


@pytest.mark.parametrize("options", OPTIONS[:5], ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("rows", [1, 16, 80])
def test_products_are_within_their_bound(place, options, rows):
    """Both usages, with more of NVFP4 and with plain values, on the device where they are."""
    weight, x = NVFP4Quantizer(**options)(place(sample(64, 80))), place(sample(rows, 80, seed=5))
    y = products.multiply(x, weight, dtype=torch.bfloat16)
    assert y.device == place.device
    _check_product(y, x.cpu().double(), _values(weight, 0, 80), 8)
    if rows % 16 == 0:
        for columnwise in (False, True)[:1 if "columnwise" in options else 2]:
            shape = (64, rows) if columnwise else (rows, 80)
            other = NVFP4Quantizer(**options)(place(sample(*shape, seed=6)))
            y = products.multiply(other, weight, a_columnwise=columnwise, b_columnwise=columnwise)
            length = 64 if columnwise else 80
            assert y.device == place.device and y.dtype == torch.float32
            _check_product(y, _values(other, int(columnwise), length), _values(weight, int(columnwise), length), 23)


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 70])
def test_weights_of_checkpoints(place, activations, rows):
    """A packed matrix, of two tensor scales and one scale of activations, beside the host's product of it."""
    given = torch.Generator().manual_seed(8)
    codes, scales = (torch.randint(low, high, (96, n), dtype=torch.uint8, generator=given)
                     for low, high, n in ((0, 256, 64), (40, 90, 8)))
    tensor_scale = torch.cat([torch.full((32,), 0.25), torch.full((64,), 0.5)])
    input_scale = torch.cat([torch.full((32,), 0.01), torch.full((64,), float("nan"))])
    x, bias = sample(rows, 128, seed=9), sample(1, 96, seed=10)[0]
    expected = place.host(lambda: Matrix.of(codes, scales, tensor_scale, input_scale, activations)(x, bias))
    there = Matrix.of(place(codes), place(scales), tensor_scale, input_scale, activations)
    found = there(place(x), place(bias))
    assert found.device == place.device and found.dtype == expected.dtype
    assert (found.cpu().double() - expected.double()).norm() / expected.double().norm() < 2 ** -8


def _steps(layer, x, gradient, recipe):
    x = x.detach().clone().requires_grad_()
    with nt.autocast(enabled=True, recipe=recipe):
        y = layer(x)
    y.backward(gradient)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("changes", [{}, {"disable_rht": True}, {"disable_2d_quantization": True}], ids=str)
def test_linear(place, changes):
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True, **changes)
    torch.manual_seed(0)
    layer = nt.Linear(64, 96, params_dtype=torch.bfloat16)
    x, gradient = sample(80, 64), sample(80, 96, seed=4)
    expected = place.host(_steps, copy.deepcopy(layer), x, gradient, recipe)
    found = _steps(layer.to(place.device), place(x), place(gradient), recipe)
    for one, other in zip(found, expected):
        assert one.device == place.device and one.dtype == other.dtype
        difference = (one.cpu().double() - other.double()).norm() / other.double().norm()
        assert difference < 2 ** -8  # of BF16, in which results are rounded


def test_linear_of_plain_activations(place):
    """A quantized weight and activations that are not."""
    weight = NVFP4Quantizer(columnwise=False)(place(sample(32, 64)))
    x = place(sample(16, 64, seed=5))
    y = nt.products.multiply(x, weight)
    assert y.dtype == torch.float32
    exact = x.cpu().double() @ weight.dequantize(dtype=torch.float32).cpu().double().t()
    assert (y.cpu().double() - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("place", ["shim"], indirect=True)
def test_the_library_neither_waits_nor_allocates(place):
    """By the shim's own count: updates, dequantizing, a step of a layer, once they have been made before."""
    counters = [ctypes.c_long.in_dll(_cuda.functions(), name) for name in ("shim_waits", "shim_allocations")]
    quantizer = NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    recipe, layer = NVFP4BlockScaling(), nt.Linear(64, 64, params_dtype=torch.bfloat16)
    x, amax = sample(64, 64).requires_grad_(), torch.tensor([3.0])
    there = quantizer(x.detach())

    def step():
        quantizer.update_quantized(x.detach(), there)
        quantizer.update_quantized(x.detach(), there, amax=amax, noop_flag=amax)
        there.dequantize()
        with nt.autocast(enabled=True, recipe=recipe):
            y = layer(x)
        y.backward(y.detach())
    step()
    before = [counter.value for counter in counters]
    step()
    assert [counter.value for counter in counters] == before
    square = NVFP4Quantizer(with_2d_quantization=True, columnwise=False)(x.detach())
    square.update_usage(columnwise_usage=True)
    assert [counter.value for counter in counters] == before
    there.copy_(quantizer(x.detach()))
    assert [counter.value for counter in counters] == before


# ---- A GPU's own -----------------------------------------------------------------------------------------


def captured(call, stream=None):
    """A graph of a call, which has run before."""
    side = torch.cuda.Stream() if stream is None else stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    return graph


def test_graphs(gpu):
    quantizer = NVFP4Quantizer(with_rht=True)
    x, out = gpu(sample(256, 128)), gpu(torch.empty(256, 128, dtype=torch.bfloat16))
    there = quantizer(x)

    def step():
        quantizer.update_quantized(x, there)
        out.copy_(there.dequantize())
    graph = captured(step)
    for seed in (21, 22):
        values = sample(256, 128, seed=seed)
        x.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        expected = quantizer(values)
        assert same(there, expected) and torch.equal(out.cpu(), expected.dequantize())


def test_replays_draw_other_random_numbers(gpu):
    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    x = gpu(sample(128, 128))
    there = quantizer(x)
    graph = captured(lambda: quantizer.update_quantized(x, there))
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(there._rowwise_data.cpu())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert torch.equal(there._amax_rowwise.cpu(), x.float().abs().max().cpu().reshape(1))


def test_a_training_step_is_a_graph(gpu):
    """Linear forward and backward, without a wait: a capture rejects them."""
    recipe = NVFP4BlockScaling()
    torch.manual_seed(0)
    layer = nt.Linear(128, 256, params_dtype=torch.bfloat16, device=gpu.device)
    x, gradient = gpu(sample(64, 128)).requires_grad_(), gpu(sample(64, 256, seed=4))
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.bias.grad = torch.zeros_like(layer.bias)

    def step():
        with nt.autocast(enabled=True, recipe=recipe):
            y = layer(x)
        y.backward(gradient)
    graph = captured(step)
    layer.weight.grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    exact = gradient.float().t() @ x.detach().float()
    assert (layer.weight.grad.float() - exact).norm() < 0.25 * exact.norm()


def test_random_rounding_is_the_hosts_under_the_same_seed(gpu):
    quantizer = NVFP4Quantizer(stochastic_rounding=True, with_rht=True)
    x = sample(128, 256)
    torch.cuda.manual_seed(1234)
    there = [quantizer(gpu(x)) for _ in range(2)]
    for i, tensor in enumerate(there):
        struct = quantizer._struct()
        struct.seed, struct.offset = 1234 ^ _bridge._OWN_SEED, 4 * i
        expected = _bridge.quantize(struct, x)
        assert all(torch.equal(a, b) for a, b in zip(parts(tensor), expected))


def test_current_stream_and_other_devices_objects(gpu):
    """Work on a side stream is ordered with that stream alone."""
    quantizer, side = NVFP4Quantizer(), torch.cuda.Stream()
    x = sample(512, 512)
    there = gpu(torch.zeros(512, 512, dtype=torch.bfloat16))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the values come later than the calls
        there.copy_(x, non_blocking=True)
        tensor = quantizer(there)
        values = tensor.dequantize()
    side.synchronize()
    expected = quantizer(x)
    assert same(tensor, expected) and torch.equal(values.cpu(), expected.dequantize())


def test_masters_are_cast_through_the_host(gpu):
    """With the bytes of the whole, and codes stay where somebody has put them, or go to a shard."""
    quantizer, master = NVFP4Quantizer(with_2d_quantization=True), sample(96, 64).float()
    weight, buffer = quantizer(gpu(torch.zeros(96, 64))), gpu(torch.zeros(96 * 32 + 16, dtype=torch.uint8))
    nt.replace_raw_data(weight, buffer[16:].view(96, 32))
    nt.quantize_master_weights([weight], [gpu(master).view(-1)], [0], None, manual_post_all_gather_processing=True)
    nt.post_all_gather_processing([weight])
    expected = quantizer(master)
    for mine, theirs in zip(weight._parts(), expected._parts()):
        assert mine.is_cuda and torch.equal(mine.cpu(), theirs)
    assert weight._rowwise_data.data_ptr() == buffer.data_ptr() + 16
    shard = gpu(torch.zeros(96 * 32, dtype=torch.uint8))
    nt.quantize_master_weights([weight], [gpu(master).view(-1)], [0], None, [shard])
    assert torch.equal(shard.cpu(), expected._rowwise_data.view(-1))


def test_what_fsdp2_gathers(place):
    """Codes and scales to a tensor on the device, its amax without the host; the second time into the first's memory,
    of which autograd has saved what it needs."""
    weight = NVFP4Quantizer(with_2d_quantization=True)(place(sample(48, 64)))
    expected = parts(weight)
    gathered, metadata = weight.fsdp_pre_all_gather(None, weight.size(), weight.stride(), None, None)
    whole, buffers = weight.fsdp_post_all_gather(gathered, metadata, torch.bfloat16)
    for part in (*whole._parts(), *buffers):
        assert part.device == place.device
    versions = [whole._amax_rowwise._version, whole._amax_columnwise._version]
    for buffer in buffers:
        buffer.zero_()
    weight.fsdp_post_all_gather(gathered, metadata, torch.bfloat16, out=whole)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts(whole), expected))
    assert versions == [whole._amax_rowwise._version, whole._amax_columnwise._version]


def test_copies_between_devices(gpu):
    quantizer = NVFP4Quantizer(with_2d_quantization=True)
    here, there = quantizer(sample()), quantizer(gpu(sample(seed=4)))
    assert there.new_zeros((32, 80)).device == there.device == gpu.device
    there.copy_(here)
    assert same(here, there) and there._rowwise_data.is_cuda
    here.zero_()
    here.copy_(there)
    assert same(here, there) and not here._rowwise_data.is_cuda


def test_fsdp2_on_one_gpu(gpu, tmp_path):
    """What the layer gives without it, its shard NVFP4 on the GPU; and a step of training."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    with nt.quantized_model_init(recipe=NVFP4BlockScaling()):
        layer = nt.Linear(64, 96, bias=False, params_dtype=torch.bfloat16, device=gpu.device)
    x = gpu(sample(32, 64))
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with nt.autocast(enabled=True, recipe=NVFP4BlockScaling()):
            expected = layer(x)
            fully_shard(layer)
            y = layer(x)
        assert torch.equal(y, expected)
        y.float().square().mean().backward()
        shard = layer.weight.to_local()
        assert isinstance(shard, nt.NVFP4Tensor) and shard.device == gpu.device
        before = shard.dequantize()
        nt.FusedAdam(layer.parameters(), lr=0.1, master_weights=True).step()
        assert not torch.equal(layer.weight.to_local().dequantize(), before)
    finally:
        dist.destroy_process_group()


def test_memory_is_torchs(gpu):
    quantizer = NVFP4Quantizer(with_2d_quantization=True)
    x = gpu(sample(1024, 1024))
    there = quantizer(x)
    quantizer.update_quantized(x, there)
    before = torch.cuda.memory_allocated()
    others = [quantizer(x) for _ in range(4)]
    grown = torch.cuda.memory_allocated() - before
    assert grown >= 4 * sum(part.numel() * part.element_size() for part in there._parts())
    segments = [(s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot()]
    for tensor in (there, *others):
        for part in tensor._parts():
            assert any(first <= part.data_ptr() < last for first, last in segments)


@pytest.mark.parametrize("rows", [4, 48, 96])
def test_products_in_graphs(gpu, rows):
    """Values that come later, by plain and by quantized activations, with memory of torch's."""
    weight, quantizer = NVFP4Quantizer(columnwise=False)(gpu(sample(256, 128))), NVFP4Quantizer(columnwise=False)
    x, there = gpu(sample(rows, 128)), quantizer(gpu(sample(rows, 128)))
    plain, quantized = (gpu(torch.empty(rows, 256)) for _ in range(2))

    def step():
        quantizer.update_quantized(x, there)
        plain.copy_(products.multiply(x, weight))
        quantized.copy_(products.multiply(there, weight))
    graph = captured(step)
    for seed in (31, 32):
        x.copy_(sample(rows, 128, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        _check_product(plain, x.cpu().double(), _values(weight, 0, 128), 23)
        _check_product(quantized, _values(there, 0, 128), _values(weight, 0, 128), 23)


def test_memory_of_products_is_torchs(gpu):
    weight, x = NVFP4Quantizer(columnwise=False)(gpu(sample(4096, 4096))), gpu(sample(96, 4096))
    products.multiply(x, weight)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    products.multiply(x, weight)
    assert torch.cuda.max_memory_allocated() - before >= 2 * 4096 * 4096  # its values in BF16
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 2 << 20  # given back


def test_nothing_comes_to_the_host(gpu):
    """By torch's own account of waits, and by the profiler's of copies."""
    quantizer = NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    recipe = NVFP4BlockScaling()
    layer = nt.Linear(128, 128, params_dtype=torch.bfloat16, device=gpu.device)
    x = gpu(sample(128, 128)).requires_grad_()
    amax = gpu(torch.tensor([3.0]))
    there = quantizer(x.detach())

    def step():
        quantizer.update_quantized(x.detach(), there)
        quantizer.update_quantized(x.detach(), there, amax=amax, noop_flag=amax)
        there.dequantize()
        with nt.autocast(enabled=True, recipe=recipe):
            y = layer(x)
        y.backward(y.detach())
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    from torch.profiler import ProfilerActivity, profile

    def names(*calls):
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            for call in calls:
                call()
            torch.cuda.synchronize()
        return [event.name for event in trace.events()]

    def item():
        x.detach().sum().item()  # a copy that must be seen
    without, beside = names(item), names(step, item)
    if not any("run_kernel" in name for name in beside):
        pytest.skip("the profiler sees no kernels here")
    copies = [sum("DtoH" in name for name in found) for found in (without, beside)]
    assert copies[0] > 0 and copies[1] == copies[0], [name for name in beside if "DtoH" in name]


def test_compiled(gpu):
    quantizer = NVFP4Quantizer(columnwise=False)
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    layer = nt.Linear(128, 64, params_dtype=torch.bfloat16, device=gpu.device)
    x = gpu(sample(64, 128))

    def call(x):
        with nt.autocast(enabled=True, recipe=recipe):
            return layer(x * 2)
    expected = call(x)
    found = torch.compile(call)(x)
    assert (found.float() - expected.float()).abs().max() <= 2 ** -7 * expected.float().abs().max()
    values = torch.compile(lambda x: quantizer(x).dequantize())(x)
    assert torch.equal(values, quantizer(x).dequantize())


def test_two_gpus(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    quantizer = NVFP4Quantizer()
    x = sample()
    there = quantizer(x.to("cuda:1"))
    assert same(there, quantizer(x)) and torch.cuda.current_device() == gpu.device.index
    with pytest.raises(_library.DeviceError):
        quantizer.update_quantized(x.to("cuda:0"), there)


def test_functions_are_those_of_the_header():
    header = open(os.path.join(ROOT, "include/nib_cuda.h"), encoding="utf-8").read()
    for name, (_result, arguments) in _cuda.FUNCTIONS.items():
        declared = header.split(f" {name}(")[1].split(");")[0]
        assert len(arguments) == declared.count(",") + 1
        assert [isinstance(a, type(ctypes.POINTER(ctypes.c_int))) or a in (ctypes.c_void_p, ctypes.c_char_p)
                for a in arguments] == ["*" in part for part in declared.split(",")], name
    assert len(Part) == 6
