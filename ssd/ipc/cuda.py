"""GPU memory that another process can open (CUDA IPC), by direct calls of the driver.

Torch's own sharing never forgets a killed reader, and exports whole blocks of its allocator, other tensors included.
`device` is N of cuda:N. Every function raises CudaError."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ssd.errors import SsdError
from ssd.ipc.messages import HANDLE_BYTES, UUID_BYTES

# Smaller allocations may share a block with others, and an export shows the whole block.
GRAIN = 2 * 2**20
_LAZY_PEER_ACCESS = 1
_LIBRARY = "libcuda.so.1"

_Address, _Device, _Context = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p


class CudaError(SsdError):
    """The driver is missing, or a call of it failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


def allocate(device: int, size: int) -> int:
    address = _Address()
    with _current(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def clear(device: int, address: int, size: int) -> None:
    with _current(device):
        _call("cuMemsetD8_v2", _Address(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
        _call("cuCtxSynchronize")


def free(device: int, address: int) -> None:
    """Free an allocation that no process has open."""
    with _current(device):
        _call("cuMemFree_v2", _Address(address))


def export(device: int, address: int) -> bytes:
    handle = _Handle()
    with _current(device):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), _Address(address))
    return bytes(handle.bytes)


def open_exported(device: int, handle: bytes) -> int:
    address = _Address()
    with _current(device):
        given = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def close_exported(device: int, address: int) -> None:
    with _current(device):
        _call("cuCtxSynchronize")
        _call("cuIpcCloseMemHandle", _Address(address))


def read(device: int, address: int, count: int) -> bytes:
    found = ctypes.create_string_buffer(count)
    with _current(device):
        _call("cuMemcpyDtoH_v2", found, _Address(address), ctypes.c_size_t(count))
    return found.raw


def write(device: int, address: int, content: bytes) -> None:
    with _current(device):
        _call("cuMemcpyHtoD_v2", _Address(address), content, ctypes.c_size_t(len(content)))
        _call("cuCtxSynchronize")


def uuid(device: int) -> bytes:
    """Return a device's UUID, which is the same in every process, unlike its number."""
    found = (ctypes.c_ubyte * UUID_BYTES)()
    _call("cuDeviceGetUuid_v2", found, _device(device))
    return bytes(found)


def check_reach(device: int, other: bytes) -> None:
    """Raise CudaError if kernels of `device` cannot read the memory of the device with uuid `other`."""
    if uuid(device) == other:
        return
    count = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(count))
    peers = [number for number in range(count.value) if uuid(number) == other]
    if not peers:
        raise CudaError("the other GPU is hidden from this process (CUDA_VISIBLE_DEVICES, a container)")
    able = ctypes.c_int()
    _call("cuDeviceCanAccessPeer", ctypes.byref(able), _device(device), _device(peers[0]))
    if not able.value:
        raise CudaError(f"cuda:{device} has no access to the memory of cuda:{peers[0]}")


@contextmanager
def _current(device: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(_Context()))


@cache
def _context(device: int) -> ctypes.c_void_p:
    # Held until the process ends, as torch holds it.
    found = _Context()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(found), _device(device))
    return found


def _device(number: int) -> ctypes.c_int:
    found = _Device()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(number))
    return found


def _call(name: str, *arguments: Any) -> None:
    try:
        code = getattr(_library(), name)(*arguments)
    except AttributeError:
        raise CudaError(f"{_LIBRARY} has no {name}: the driver is too old") from None
    if code:
        raise CudaError(f"{name}: {_error_name(code)}")


def _error_name(code: int) -> str:
    found = ctypes.c_char_p()
    _library().cuGetErrorName(code, ctypes.byref(found))
    return (found.value or b"").decode() or f"error {code}"


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from None
