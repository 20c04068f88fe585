# SPDX-License-Identifier: Apache-2.0
"""nib for NumPy: arrays in and out, tensors, options, errors."""
import array
import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import nib
from conftest import ROOT

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


@pytest.fixture
def x():
    return np.random.default_rng(1).standard_normal((48, 64), np.float32)


def same(a, b):
    return a.equals(b)


# ---- Arrays in -------------------------------------------------------------------------------------------


def test_version():
    assert nib.__version__.count(".") == 2 and nib.isa()


def test_quantize_and_back(x):
    t = nib.quantize(x)
    assert t.shape == (48, 64) and t.dtype == nib.DType.F32 and t.format == nib.Format.NVFP4
    assert t.tensor_scale == nib.TensorScale.AMAX and t.row_tensor_scale[0] == np.abs(x).max()
    assert t.row_data.shape == (48, 32) and t.col_data.shape == (64, 24)
    assert t.row_scale.shape == (128, 4) and t.col_scale.shape == (128, 4)
    y = t.dequantize()
    assert y.dtype == np.float32 and np.abs(y - x).max() < np.abs(x).max() / 6
    assert np.array_equal(np.asarray(t), y)
    assert nib.quantize(y, columnwise=False).row_data.tobytes() == t.row_data.tobytes()


def test_strides_are_taken_as_they_are(x):
    for view in (x.T, x[::2], x[:, ::-1], x[::-1, ::3], np.broadcast_to(x[:1], (16, 64)), x[:, 5:21]):
        assert same(nib.quantize(view), nib.quantize(np.ascontiguousarray(view)))


def test_read_only_and_contiguous_arrays_give_the_same(x):
    frozen = x.copy()
    frozen.flags.writeable = False
    assert same(nib.quantize(frozen), nib.quantize(x))


def test_descriptions_are_not_mixed_up(x):
    """Calls with arrays of one shape use one description: each must see its own data, and so must threads."""
    arrays = [x * (i + 1) for i in range(8)]
    expected = [float(np.abs(a).max()) for a in arrays]
    failures = []

    def work():
        for _ in range(300):
            for a, amax in zip(arrays, expected):
                if nib.quantize(a).row_tensor_scale[0] != amax:
                    failures.append(amax)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_half(x):
    h = x.astype(np.float16)
    t = nib.quantize(h)
    assert t.dtype == nib.DType.F16 and t.dequantize().dtype == np.float16


def test_bfloat16_as_bits(x):
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    t = nib.quantize(bits, dtype="bf16")
    assert t.dtype == nib.DType.BF16
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(t.row_data, nib.quantize(values).row_data)
    out = np.empty((48, 64), np.uint16)
    t.dequantize("bf16", out=out)
    assert np.array_equal(out, t.dequantize().view(np.uint16))


def test_bytes_in_the_other_order(x):
    """Also where a dtype says what they are: the library would read them in this machine's order."""
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    for swapped, dtype in ((x.astype(x.dtype.newbyteorder()), None), (x.astype(x.dtype.newbyteorder()), "float32"),
                           (bits.astype(bits.dtype.newbyteorder()), "bf16")):
        with pytest.raises(nib.DtypeError, match="an array of [<>]"):
            nib.quantize(swapped, dtype=dtype)
        with pytest.raises(nib.DtypeError, match="an array of [<>]"):
            nib.quantize(x).dequantize(dtype, out=swapped)
    assert np.array_equal(nib.decode(bits.astype(bits.dtype.newbyteorder()), "bf16"), nib.decode(bits, "bf16"))


@pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
def test_bfloat16_of_ml_dtypes(x):
    b = x.astype(ml_dtypes.bfloat16)
    t = nib.quantize(b)
    assert same(t, nib.quantize(b.view(np.uint16), dtype="bf16"))
    assert t.dequantize().dtype == ml_dtypes.bfloat16


def test_buffer_protocol(x):
    assert same(nib.quantize(memoryview(x)), nib.quantize(x))
    floats = array.array("f", range(32))
    t = nib.quantize(floats)
    assert t.shape == (32,)
    out = array.array("f", [0.0] * 32)
    t.dequantize(out=memoryview(out))
    assert np.array_equal(np.array(out), t.dequantize())


class Producer:
    """A DLPack producer of the old kind and of the new one."""

    def __init__(self, x, versioned):
        self.x = x
        if versioned:
            self.__class__ = VersionedProducer

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self):
        return self.x.__dlpack__()


class VersionedProducer(Producer):
    def __dlpack__(self, *, max_version=None, **_):
        return self.x.__dlpack__(max_version=max_version)


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_in(x, versioned):
    if versioned and tuple(map(int, np.__version__.split(".")[:2])) < (2, 1):
        pytest.skip("this NumPy has no versioned DLPack")
    assert same(nib.quantize(Producer(x, versioned)), nib.quantize(x))
    out = np.zeros_like(x)
    t = nib.quantize(x)
    t.dequantize(out=Producer(out, versioned))
    assert np.array_equal(out, t.dequantize())


def test_dlpack_out_shares_memory_and_keeps_it(x):
    t = nib.quantize(x)
    data = np.from_dlpack(t.dlpack("row_data"))
    assert data.ctypes.data == t.row_data.ctypes.data and data.dtype == np.uint8
    expected = data.copy()
    del t
    gc.collect()
    nib.quantize(x * 3)
    assert np.array_equal(data, expected)
    with pytest.raises(BufferError):
        nib.quantize(x).dlpack("row_data").__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        nib.quantize(x).dlpack("row_data").__dlpack__(copy=True)


def test_a_capsule_that_nobody_takes_frees_its_tensor(x):
    t = nib.quantize(x)
    for versioned in ((0, 8), (1, 0)):
        for _ in range(100):
            t.dlpack("row_data").__dlpack__(max_version=versioned)
    assert np.array_equal(np.from_dlpack(t.dlpack("row_data")), t.row_data)


def test_parts_share_memory(x):
    t = nib.quantize(x, columnwise=False)
    data = t.row_data
    assert t.row_data.ctypes.data == data.ctypes.data and t.col_data is None
    data[0, 0] ^= 0x0F
    again = t.row_data
    assert again[0, 0] == data[0, 0]
    del t
    gc.collect()
    assert data.sum() >= 0  # the memory outlives the tensor


# ---- Tensors ---------------------------------------------------------------------------------------------


def test_from_parts_without_a_copy(x):
    t = nib.quantize(x, columnwise=False)
    parts = {n: getattr(t, n).copy() for n in ("row_data", "row_scale", "row_tensor_scale")}
    u = nib.from_parts(t.quantizer, t.shape, **parts)
    assert same(t, u) and u.row_data.ctypes.data == parts["row_data"].ctypes.data
    del parts
    gc.collect()
    assert same(t, u)
    parts = {n: getattr(t, n) for n in ("row_data", "row_scale", "row_tensor_scale")}
    with pytest.raises(nib.UsageError):
        nib.from_parts(t.quantizer, t.shape, row_data=t.row_data)
    with pytest.raises(nib.ShapeError):
        nib.from_parts(t.quantizer, (48, 80), **parts)
    with pytest.raises(nib.ShapeError, match="contiguous"):
        nib.from_parts(t.quantizer, t.shape, **{**parts, "row_data": t.row_data.T})
    with pytest.raises(TypeError, match="no part"):
        nib.from_parts(t.quantizer, t.shape, data=t.row_data)
    u = None
    gc.collect()
    assert not nib._tensor._kept  # every borrowed array was given back


def test_update_in_place(x):
    t = nib.quantize(x)
    data = t.row_data
    t.quantize_(x * 2)
    assert same(t, nib.quantize(x * 2)) and t.row_data.ctypes.data == data.ctypes.data
    t.quantize_(x, noop=1.0)
    assert same(t, nib.quantize(x * 2))
    t.quantize_(x, noop=0.5)
    assert same(t, nib.quantize(x))
    t.zero_()
    assert not t.dequantize().any()
    t.copy_(nib.quantize(x))
    assert same(t, nib.quantize(x))


def test_usages(x):
    t = nib.quantize(x, block_dims=(16, 16))
    both = t.clone()
    t.update_usage(columnwise=False)
    assert t.get_usages() == {"rowwise": True, "columnwise": False}
    t.update_usage(columnwise=True)
    assert same(t, both)
    with pytest.raises(nib.UsageError):
        nib.quantize(x, columnwise=False).update_usage(columnwise=True)
    t.update_usage(False, False)
    with pytest.raises(RuntimeError):
        t.dequantize()


def test_forms(x):
    t = nib.quantize(x, columnwise=False)
    assert t.view(4, 12, 64).shape == (4, 12, 64) and t.reshape((-1, 64)).shape == (48, 64)
    assert np.array_equal(t.slice(16, 16).dequantize(), t.dequantize()[16:32])
    assert [p.shape for p in t.split([16, 0, 32])] == [(16, 64), (0, 64), (32, 64)]
    swizzled = t.clone().swizzle()
    assert not np.array_equal(swizzled.row_scale, t.row_scale) and same(swizzled.unswizzle(), t)
    assert same(copy.copy(t), t) and same(copy.deepcopy(t), t) and same(pickle.loads(pickle.dumps(t)), t)
    t.clear()
    assert t.row_data is None and "without data" in repr(t)


@pytest.mark.parametrize("shape", [(1,), (17,), (3, 5), (2, 3, 16), (0, 16), (5, 0)])
def test_odd_shapes(shape):
    x = np.random.default_rng(2).standard_normal(shape, np.float32)
    t = nib.quantize(x)
    assert t.shape == shape and t.dequantize().shape == shape
    assert pickle.loads(pickle.dumps(t)).equals(t)


@pytest.mark.parametrize("format", ["nvfp4", "float8", "mxfp8", "float8-block", "mxfp4"])
def test_formats(x, format):
    t = nib.quantize(x, format=format)
    assert t.format.name.lower().replace("_", "-") == format
    assert np.abs(t.dequantize() - x).max() < 0.6
    assert np.array_equal(t.dequantize(usage="rowwise").shape, t.dequantize(usage="columnwise").shape)


def test_overrides(x):
    t = nib.quantize(x, overrides={"amax": 10.0}, columnwise=False)
    assert t.row_tensor_scale[0] == 10
    u = nib.quantize(x, overrides={"amax": (10.0, 20.0)}, rht=True)
    assert (u.row_tensor_scale[0], u.col_tensor_scale[0]) == (10, 20)
    with pytest.raises(TypeError, match="amax, tensor_scale, scale and importance"):
        nib.quantize(x, overrides={"amx": 1})
    f = nib.quantize(x, format="float8", overrides={"scale": 2.0})
    assert f.row_tensor_scale[0] == 0.5
    rows, cols = np.arange(1, 1 + x.shape[0]), np.arange(1, 1 + x.shape[1])
    own = nib.quantize(x, row_scaled=True, overrides={"amax": (rows, cols)})
    assert np.array_equal(own.row_tensor_scale, rows) and np.array_equal(own.col_tensor_scale, cols)
    alone = nib.quantize(x, row_scaled=True, columnwise=False, overrides={"amax": rows})
    assert np.array_equal(alone.row_data, own.row_data)


def test_overrides_of_another_size(x):
    """The library would read what lies behind them."""
    for options, overrides, message in (
            ({"row_scaled": True}, {"amax": 1.0}, f"rowwise amax has 1 values instead of {x.shape[0]}"),
            ({"row_scaled": True, "rowwise": False}, {"tensor_scale": np.ones(x.shape[1] - 1)},
             "columnwise tensor_scale"),
            ({}, {"amax": []}, "amax has 0 values instead of 1"), ({}, {"amax": (1.0, [2.0, 3.0])}, "columnwise amax"),
            ({"format": "float8"}, {"scale": []}, "scale has 0 values instead of 1")):
        with pytest.raises(nib.ShapeError, match=message):
            nib.quantize(x, overrides=overrides, **options)
    with pytest.raises(nib.ArgumentError, match="a pair"):
        nib.quantize(x, overrides={"amax": (1.0,)})


def test_parts_are_there_until_the_end():
    """What runs at exit may read them, in whatever order: their memory was given back before."""
    code = ("import atexit\nimport numpy as np\nimport nib\natexit.register(lambda: print(int(a.sum()) == b))\n"
            "t = nib.quantize(np.random.default_rng(1).standard_normal((2048, 2048), np.float32))\n"
            "a, b = t.row_data, int(t.row_data.sum())\ndel t\n")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n")


def test_gptq(x):
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(200, 64)) @ rng.normal(size=(64, 64))
    hessian = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    wide = rng.normal(size=(150, 300))  # several tiles, and fewer tokens than columns
    large = (wide.T @ wide / len(wide)).astype(np.float32)
    order, u, _ = nib.gptq_factorize(large)
    inverse = np.linalg.inv(large[np.ix_(order, order)].astype(np.float64) + 0.1 * np.diag(large).mean() * np.eye(300))
    assert np.abs(u.astype(np.float64).T @ u - inverse).max() < 1e-5 * np.abs(inverse).max()
    order, u, damp = nib.gptq_factorize(hessian)
    assert damp == 0.1 and np.array_equal(order, np.argsort(-np.diag(hessian), kind="stable"))
    upper = np.triu(hessian.astype(np.float64))
    damped = (upper + np.triu(upper, 1).T)[np.ix_(order, order)] + 0.1 * np.diag(hessian).mean() * np.eye(64)
    wanted = np.linalg.cholesky(np.linalg.inv(damped)).T
    assert np.abs(u - wanted).max() < 1e-6 * np.abs(wanted).max()
    for same in (nib.gptq_factorize(hessian[np.triu_indices(64)]), nib.gptq_factorize(hessian.astype(np.float64))):
        assert np.array_equal(order, same[0]) and np.array_equal(u, same[1])

    weighed = {"importance": nib.importance(np.diag(hessian))}
    t = nib.quantize(x, columnwise=False, scale_rule="sweep", overrides=weighed)
    scales, before = t.row_scale.copy(), t.dequantize()
    nib.gptq(x, order, u, t)
    losses = [np.trace((y - x) @ hessian @ (y - x).T) for y in (before, t.dequantize())]
    assert losses[1] < 0.9 * losses[0] and np.array_equal(scales, t.row_scale)
    with pytest.raises(nib.ShapeError, match=r"not \[65\]"):
        nib.gptq_factorize(np.ones(65))
    with pytest.raises(nib.ShapeError, match=r"U is \[64, 63\]"):
        nib.gptq(x, order, u[:, 1:], t)
    with pytest.raises(nib.ArgumentError, match="NaN"):
        nib.gptq_factorize(hessian * np.nan)


def test_gemm_and_codes(x):
    a, b = nib.quantize(x), nib.quantize(x[:32])
    y = nib.gemm(a, b)
    assert y.shape == (48, 32)
    exact = a.dequantize("float32").astype(np.float64) @ b.dequantize("float32").astype(np.float64).T
    assert np.abs(y - exact).max() < 1e-4
    z = nib.gemm(a, b, out=y.copy())
    assert np.allclose(z, 2 * y)
    assert nib.gemm(a, a, a_usage="columnwise", b_usage="columnwise").shape == (64, 64)
    assert nib.encode([1.0, -6.0, 0.5], "e2m1").tolist() == [0xF2, 0x01]
    assert nib.decode(np.array([0xF2, 0x01], np.uint8), "e2m1", 3).tolist() == [1.0, -6.0, 0.5]
    with pytest.raises(nib.ArgumentError):
        nib.decode(np.array([1], np.uint8), "e2m1", 3)


def test_torch_is_asked_for():
    try:
        import torch  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install torch"):
            import nib.torch  # noqa: F401
    else:
        pytest.skip("PyTorch is installed")


# ---- Options and errors ----------------------------------------------------------------------------------


def test_quantizer_options():
    q = nib.Quantizer("nvfp4", block_dims="16x16", rounding="stochastic-24", scale_rule="rtn", rht_sign_mask=0,
                      tensor_scale_rule="pow2")
    assert q.block_dims == (16, 16) and q.rounding == nib.Rounding.STOCHASTIC_24
    assert q.tensor_scale_rule == nib.TensorScaleRule.POW2
    assert q == q.copy() and hash(q) == hash(q.copy()) and q != q.copy(rowwise=False)
    assert pickle.loads(pickle.dumps(q)) == q and "16, 16" in repr(q)
    assert q.part_shape("row_scale", (48, 80)) == (128, 8)
    assert q.part_shape("row_scale", (48, 80), padded=False) == (48, 5)
    q.check(np.zeros((16, 16), np.float32))
    with pytest.raises(nib.DtypeError):
        q.check(np.zeros((16, 16), np.int32))
    with pytest.raises(TypeError, match="no option"):
        nib.Quantizer(bloc_dims=(1, 16))
    with pytest.raises(TypeError, match="no option"):
        q.copy(threads=1)
    with pytest.raises(AttributeError):
        q.bloc_dims
    with pytest.raises(nib.ArgumentError, match="none of"):
        nib.Quantizer("nvfp5")
    with pytest.raises(TypeError, match="not both"):
        nib.quantize(np.zeros((16, 16), np.float32), q, rht=True)


@pytest.mark.parametrize("name, value", [("seed", 1 << 64), ("seed", -1), ("offset", 1 << 65), ("e4m3_max", 1 << 32),
                                         ("rht_sign_mask", 1 << 16), ("block_dims", (1, 16 + (1 << 32))),
                                         ("origin", (1 << 64, 0))])
def test_a_value_that_does_not_fit_is_rejected(name, value):
    """ctypes keeps the lower bits of whatever it gets."""
    q = nib.Quantizer()
    before = getattr(q, name)
    with pytest.raises(nib.ArgumentError, match="does not fit"):
        setattr(q, name, value)
    assert getattr(q, name) == before
    q.seed = (1 << 64) - 1
    assert q.seed == (1 << 64) - 1


def test_pickles_of_before():
    """What nib 0.1 wrote: other names, and threads among the options."""
    fields = {**nib.Quantizer(dialect="torchao")._fields(), "threads": 3, "single_level": True, "tensor_scale": 0}
    del fields["no_tensor_scale"], fields["tensor_scale_rule"]
    assert nib._tensor._quantizer_from_fields(fields) == nib.Quantizer(dialect="torchao", no_tensor_scale=True)


def test_host(x):
    """The number of threads is that of the innermost Host, in this thread; a tensor remembers it; no byte does."""
    def of_new_tensors():
        return [nib._library.raw.nib_tensor_device(t._handle) for t in
                (nib.quantize(x), nib.quantize(x[::2]), nib.quantize(Producer(x, False)), nib.quantize(memoryview(x)))]

    expected = nib.quantize(x)
    one, two = nib.Host(threads=1), nib.Host(2)
    assert (one.name, one.threads, nib.Host().threads, expected.device) == ("host", 1, 0, "host")
    assert of_new_tensors() == [None] * 4
    elsewhere = []
    with one:
        assert of_new_tensors() == [one._handle] * 4
        with two, two:
            assert of_new_tensors() == [two._handle] * 4
            t = nib.quantize(x)
            thread = threading.Thread(target=lambda: elsewhere.append(of_new_tensors()))
            thread.start()
            thread.join()
        assert of_new_tensors() == [one._handle] * 4
        assert same(t, expected) and np.array_equal(t.dequantize(), expected.dequantize())
        assert same(nib.from_parts(t.quantizer, t.shape, **{n: t.part(n) for n in nib._tensor._PART_NAMES}), expected)
    assert of_new_tensors() == [None] * 4 and elsewhere == [[None] * 4]
    with pytest.raises(ZeroDivisionError), one:
        1 / 0
    assert of_new_tensors() == [None] * 4, "an exception leaves the Host too"
    del one, two
    gc.collect()
    assert t.device == "host" and same(t.quantize_(x), expected), "the tensor keeps its device"
    assert pickle.loads(pickle.dumps(nib.Host(3))).threads == 3


class OnAnotherDevice(Producer):
    """Its capsule says that the memory is that of CUDA device 0."""

    def __dlpack__(self):
        capsule = self.x.__dlpack__()
        nib._library.c_int32.from_address(nib._arrays._Capsule._get(capsule, b"dltensor") + 8).value = 2
        return capsule


ERRORS = [
    (nib.ArgumentError, ValueError, lambda x: nib.Host(-1)),
    (nib.ArgumentError, ValueError, lambda x: nib.Host(1 << 32)),
    (nib.ArgumentError, ValueError, lambda x: nib.quantize(x).slice((1 << 64) + 16, 16)),
    (nib.ArgumentError, ValueError, lambda x: nib.quantize(x).view((1 << 64) + 48, 64)),
    (nib.ArgumentError, ValueError, lambda x: nib.quantize(x).split([1 << 63, 48])),
    (nib.ArgumentError, ValueError, lambda x: nib.quantize(x).dequantize(usage="both")),
    (nib.DeviceError, RuntimeError, lambda x: nib.quantize(OnAnotherDevice(x, False))),
    (nib.ShapeError, ValueError, lambda x: nib.quantize(x).view(7, 7)),
    (nib.DtypeError, TypeError, lambda x: nib.quantize(x.astype(np.float64))),
    (nib.DtypeError, TypeError, lambda x: nib.quantize(["no array"])),
    (nib.DtypeError, TypeError, lambda x: nib.quantize(np.array(["text"]))),
    (nib.DtypeError, TypeError, lambda x: nib.quantize(x, dtype="bf16")),
    (nib.DtypeError, TypeError, lambda x: nib.quantize(x).dequantize("no dtype")),
    (nib.ModeError, ValueError, lambda x: nib.quantize(x, rht=True, block_dims=(16, 16))),
    (nib.ModeError, RuntimeError, lambda x: nib.quantize(x, rht=True, block_dims=(16, 16))),
    (nib.UsageError, RuntimeError, lambda x: nib.quantize(x, columnwise=False).dequantize(usage="columnwise")),
    (nib.MismatchError, RuntimeError, lambda x: nib.quantize(x).copy_(nib.quantize(x[:16]))),
    (nib.FileError, OSError, lambda x: nib._library.lib.nib_file_open(b"/no/such/file", nib._library.c_void_p())),
    (nib.ShapeError, ValueError, lambda x: nib.quantize(x.reshape((1,) * 9 + x.shape))),
    (nib.UnsupportedError, NotImplementedError,
     lambda x: nib.quantize(x, format="float8-block").swizzle()),
]


@pytest.mark.parametrize("kind, builtin, call", ERRORS)
def test_errors(x, kind, builtin, call):
    assert issubclass(kind, nib.Error) and issubclass(kind, builtin)
    with pytest.raises(kind) as caught:
        call(x)
    assert isinstance(caught.value, builtin) and len(str(caught.value)) > 10


def test_every_status_has_its_exception():
    for status, kind in enumerate(nib._library._ERRORS):
        if kind is None:
            continue
        assert kind.status == status
        with pytest.raises(kind, match="because"):
            nib._library.fail(status, "because")
    with pytest.raises(nib.Error):
        nib._library.fail(99, "because")
    assert issubclass(nib.OutOfMemoryError, MemoryError) and issubclass(nib.DataError, ValueError)


def test_read_only_output_is_rejected(x):
    out = np.empty_like(x)
    out.flags.writeable = False
    outputs = [out, memoryview(out)]
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1):
        outputs.append(Producer(out, versioned=True))
    for output in outputs:
        with pytest.raises(nib.ArgumentError, match="read-only"):
            nib.quantize(x).dequantize(out=output)


def test_readme(capsys):
    """The examples of README.md run as printed."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.S | re.M)
    assert len(blocks) >= 2
    for block in blocks:
        if "torch" in block:
            pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")
        exec(compile(block, "README.md", "exec"), {})
    assert "(128, 32)" in capsys.readouterr().out


def test_the_gil_is_released():
    """Python runs on while the library computes: a thread counts in the meantime."""
    x = np.random.default_rng(3).standard_normal((4096, 4096), np.float32)
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    start = time.perf_counter()
    with nib.Host(threads=1):
        nib.quantize(x)
    took, during = time.perf_counter() - start, counted[0] - before
    done.set()
    thread.join()
    assert during >= 3, f"{during} steps of another thread in {took:.3f} s"


def test_codes_to_decode_may_be_a_list_bytes_or_an_array():
    want = [1.0, 448.0]
    for codes in ([0x38, 0x7E], bytes([0x38, 0x7E]), bytearray([0x38, 0x7E]), np.array([0x38, 0x7E], np.uint8)):
        assert nib.decode(codes, "e4m3").tolist() == want


@pytest.mark.parametrize("lines", [1, 3, 40])
def test_gemm_takes_plain_values_and_options(lines):
    rng = np.random.default_rng(lines)
    x = rng.standard_normal((lines, 70)).astype(np.float32)
    w = nib.quantize(rng.standard_normal((33, 70)).astype(np.float32))
    bias = rng.standard_normal(33).astype(np.float16)
    y = nib.gemm(x, w, bias=bias, alpha=0.5)
    assert y.dtype == np.float32
    assert np.array_equal(y, nib.gemm(x, w, bias=bias, alpha=0.5, reference=True))
    assert np.allclose(y, 0.5 * x @ w.dequantize().T + bias, atol=2e-2)
    for operands in ((x, w), (w, x), (nib.quantize(x), w), (x[:, ::-1], w)):
        half = nib.gemm(*operands, dtype=np.float16)
        assert half.dtype == np.float16
        assert np.array_equal(half, nib.gemm(*operands).astype(np.float16))
    out = y.copy()
    assert nib.gemm(x, w, beta=0.25, out=out) is out
    assert np.array_equal(out, nib.gemm(x, w) + np.float32(0.25) * y)
    with pytest.raises(nib.UnsupportedError, match="both operands are plain"):
        nib.gemm(x, x)
