# SPDX-License-Identifier: Apache-2.0
"""The library's structs by ctypes, with arrays on another device than the host: the fake one of tests/fake_device.h,
whose memory nobody can touch but its own operations."""
import ctypes
import os
import shutil
import subprocess

import numpy as np
import pytest

from conftest import ROOT
from nib import _library
from nib._library import Array, DType, Part, lib, raw

SHIM = """
#define _GNU_SOURCE
#include "fake_device.h"

nib_device *shim_create(int ordinal) { return fake_create(ordinal); }
void *shim_upload(nib_device *device, const void *host, size_t bytes) { return fake_upload(device, host, bytes, 4); }
void shim_download(nib_device *device, void *host, void *data, size_t bytes)
{
    fake_download(device, host, data, bytes);
}
void shim_free(nib_device *device, void *data) { fake_free(device, data); }
long shim_live(void) { return fake_live(); }
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("there is no C compiler for a device of the tests")
    out = str(tmp_path_factory.mktemp("shim") / "shim.so")
    library = os.path.realpath(_library.path)
    command = [compiler, "-std=gnu11", "-shared", "-fPIC", "-pthread", "-x", "c", "-", "-x", "none", library, "-o", out,
               f"-Wl,-rpath,{os.path.dirname(library)}"]
    command += [f"-I{os.path.join(ROOT, folder)}" for folder in ("include", "src", "tests")]
    subprocess.run(command, input=SHIM, text=True, check=True)
    functions = ctypes.CDLL(out)
    functions.shim_create.restype = functions.shim_upload.restype = ctypes.c_void_p
    functions.shim_create.argtypes = [ctypes.c_int]
    functions.shim_upload.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    functions.shim_download.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    functions.shim_free.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    functions.shim_live.restype = ctypes.c_long
    return functions


@pytest.fixture
def device(shim):
    handle = shim.shim_create(2)
    yield handle
    lib.nib_device_release(handle)
    assert shim.shim_live() == 0


class Values:
    """A NumPy array of floats on the device, as a nib_array."""

    def __init__(self, shim, device, x):
        self.shim, self.device, self.x = shim, device, x
        self.memory = shim.shim_upload(device, x.ctypes.data, x.nbytes)
        self.array = Array()
        lib.nib_array_init(self.array, self.memory, DType.F32, x.ndim, _library.shape_array(x.shape))
        self.array.device = device

    def numpy(self):
        out = np.empty_like(self.x)
        self.shim.shim_download(self.device, out.ctypes.data, self.memory, out.nbytes)
        return out

    def free(self):
        self.shim.shim_free(self.device, self.memory)


def host_array(x):
    array = Array()
    lib.nib_array_init(array, x.ctypes.data, DType.F32, x.ndim, _library.shape_array(x.shape))
    return array


def quantize(array):
    tensor = ctypes.c_void_p()
    lib.nib_quantize(_library.new_quantizer(), array, None, tensor)
    return tensor


def parts(tensor):
    """The bytes of a host tensor."""
    buffers = [lib.nib_tensor_buffer(tensor, part) for part in Part]
    return [buffer and ctypes.string_at(lib.nib_buffer_data(buffer), lib.nib_buffer_bytes(buffer))
            for buffer in buffers]


def test_quantize_there_and_back(shim, device):
    x = np.random.default_rng(3).standard_normal((33, 50), np.float32)
    values, out = Values(shim, device, x), Values(shim, device, np.zeros_like(x))
    tensor, host, back = quantize(values.array), quantize(host_array(x)), ctypes.c_void_p()
    assert lib.nib_tensor_device(tensor) == device and lib.nib_device_name(device) == b"fake:2"
    lib.nib_tensor_to(tensor, None, back)
    assert not lib.nib_tensor_device(back) and parts(back) == parts(host)
    expected = np.empty_like(x)
    lib.nib_dequantize(host, 0, host_array(expected))
    lib.nib_dequantize(tensor, 0, out.array)
    assert (out.numpy() == expected).all()
    again = ctypes.c_void_p()
    lib.nib_tensor_to(host, device, again)
    equal = ctypes.c_int()
    lib.nib_tensor_equal(again, tensor, equal)
    assert equal.value == 1
    for each in (tensor, host, back, again):
        lib.nib_tensor_destroy(each)
    values.free()
    out.free()


def test_devices_do_not_mix(shim, device):
    x = np.ones((16, 16), np.float32)
    values = Values(shim, device, x)
    tensor = quantize(values.array)
    assert raw.nib_dequantize(tensor, 0, host_array(x)) != 0
    assert b"fake:2" in raw.nib_last_error()
    lib.nib_tensor_destroy(tensor)
    values.free()


def test_array_copy(shim, device):
    x = np.random.default_rng(4).standard_normal((5, 7), np.float32)
    values, out = Values(shim, device, np.zeros_like(x)), np.zeros_like(x)
    lib.nib_array_copy(host_array(x), values.array)
    lib.nib_array_copy(values.array, host_array(out))
    assert (out == x).all() and (values.numpy() == x).all()
    values.free()
