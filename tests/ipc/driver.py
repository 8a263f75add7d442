"""CUDA's driver library as `ssd.ipc.cuda` calls it, with memory of the host in place of a GPU's."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ssd.ipc import cuda

OUT_OF_MEMORY = 2


class Driver:
    """`gpus` are the first bytes of the names of those that can be seen; the first one is used by exporters.
    `fails` says which functions fail, with which code. `allocated` and `opened` are what has not been given back."""

    def __init__(self, gpus: bytes = b"A", peers: bool = True) -> None:
        self.gpus, self.peers = gpus, peers
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []
        self.allocated: dict[int, Any] = {}
        self.opened = Counter[int]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(type(self), f"_{name}", None)
        if function is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return self.fails.get(name) or function(self, *arguments) or 0

        return call

    def _nothing(self, *_: Any) -> None:
        pass

    _cuInit = _cuCtxPushCurrent_v2 = _cuCtxPopCurrent_v2 = _cuCtxSynchronize = _cuDevicePrimaryCtxRetain = _nothing

    def _cuGetErrorName(self, code: int, name: Any) -> None:
        name._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY" if code == OUT_OF_MEMORY else None

    def _cuDeviceGet(self, device: Any, number: Any) -> None:
        device._obj.value = number.value

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self.gpus)

    def _cuDeviceGetUuid_v2(self, found: Any, device: Any) -> None:
        found[0] = self.gpus[device.value]

    def _cuDeviceCanAccessPeer(self, able: Any, *_: Any) -> None:
        able._obj.value = int(self.peers)

    def _cuMemAlloc_v2(self, address: Any, size: Any) -> None:
        memory = ctypes.create_string_buffer(b"\xee" * size.value, size.value)
        address._obj.value = ctypes.addressof(memory)
        self.allocated[address._obj.value] = memory

    def _cuMemFree_v2(self, address: Any) -> None:
        del self.allocated[address.value]

    def _cuMemsetD8_v2(self, address: Any, value: Any, size: Any) -> None:
        ctypes.memset(address.value, value.value, size.value)

    def _cuMemcpyDtoH_v2(self, to: Any, address: Any, size: Any) -> None:
        ctypes.memmove(to, address.value, size.value)

    def _cuMemcpyHtoD_v2(self, address: Any, content: Any, size: Any) -> None:
        ctypes.memmove(address.value, content, size.value)

    def _cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        handle._obj.bytes[:8] = address.value.to_bytes(8, "little")

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:
        address._obj.value = int.from_bytes(bytes(handle.bytes[:8]), "little")
        self.opened[address._obj.value] += 1

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        self.opened[address.value] -= 1
        self.opened += Counter()


def installed(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """One that this process takes for the library until the test ends."""
    stand_in = Driver()
    monkeypatch.setattr(cuda, "_library", lambda: stand_in)
    cuda._context.cache_clear()
    return stand_in
