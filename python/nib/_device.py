# SPDX-License-Identifier: Apache-2.0
"""Where calls run: nib.Host, the host with a number of threads."""
import ctypes
import threading
import weakref

from ._library import fit, lib, raw


class _Entered(threading.local):
    hosts = ()
    handle = None  # of the last of them, as nib_array.device has it


entered = _Entered()


class Host:
    """The host with so many threads; 0: OpenMP's default, as without any Host.

        with nib.Host(threads=1):
            t = nib.quantize(x)

    Within the `with`, calls of this Python thread take that many; they nest, and the innermost counts. A tensor
    remembers the Host under which it was made, for calls that get no array (update_usage and its like). Bytes do not
    depend on it.
    """

    def __init__(self, threads=0):
        handle = ctypes.c_void_p()
        lib.nib_host_create(fit(threads, 32), handle)
        self._handle, self._threads = handle.value, threads
        weakref.finalize(self, raw.nib_device_release, self._handle).atexit = False  # others may use it until the end

    @property
    def name(self):
        return raw.nib_device_name(self._handle).decode()

    @property
    def threads(self):
        return self._threads

    def __enter__(self):
        entered.hosts += (self,)
        entered.handle = self._handle
        return self

    def __exit__(self, *_):
        entered.hosts = entered.hosts[:-1]
        entered.handle = entered.hosts[-1]._handle if entered.hosts else None

    def __repr__(self):
        return f"nib.Host(threads={self._threads})"

    def __reduce__(self):
        return Host, (self._threads,)
