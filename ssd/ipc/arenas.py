"""Tensors that target and draft share, and the arenas made of them (draft_probs.py, features.py).

An arena is rows of numbers, and words that say what each row is. The words lie in a memory file, which both processes
inherit. The rows lie there too, or, if both run on GPUs, in memory that the target allocates and the draft opens (CUDA
IPC). The target frees that memory only when it ends, and the driver unmaps it when a draft ends. So a killed draft
leaks nothing, and a draft that outlives its target reads no freed memory."""

from __future__ import annotations

import logging
import mmap
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.ipc import cuda
from ssd.ipc.board import Words
from ssd.ipc.cuda import CudaError
from ssd.ipc.layouts import Layout, on_gpus
from ssd.ipc.messages import MARK_BYTES, ArenaHandle

log = logging.getLogger("ssd.ipc")


class HostTensor:
    """`size` bytes of a memory file from `offset` on; the descriptor may be closed afterwards.

    Writing to a tensor that is not `writable` kills the process (SIGSEGV)."""

    def __init__(self, descriptor: int, size: int, offset: int = 0, writable: bool = True) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        memory = mmap.mmap(descriptor, offset + size, access=access)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of memory that cannot be written
            self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=size)

    def close(self) -> None:
        del self.data


class Exported:
    """`size` zeroed bytes on a GPU, which another process opens by `handle` and closes first. Raises CudaError."""

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self._device = device.index or 0
        # A random mark follows the bytes. The importer reads it to check that it opened the right, readable memory.
        total = -(-(size + MARK_BYTES) // cuda.GRAIN) * cuda.GRAIN
        self._address = cuda.allocate(self._device, total)
        try:
            cuda.clear(self._device, self._address, total)
            mark = os.urandom(MARK_BYTES)
            cuda.write(self._device, self._address + size, mark)
            memory, gpu = cuda.export(self._device, self._address), cuda.uuid(self._device)
        except CudaError:
            cuda.free(self._device, self._address)
            raise
        self.handle = ArenaHandle(name, size, memory, gpu, mark)
        self.data = _tensor(self._address, size, device)

    def close(self) -> None:
        del self.data
        cuda.free(self._device, self._address)


class Imported:
    """Memory that another process has exported, to be closed before its exporter frees it.

    Raises CudaError if `device` cannot reach the memory, or if the memory is not what the handle describes."""

    def __init__(self, handle: ArenaHandle, device: torch.device) -> None:
        self.handle = handle
        self._device = device.index or 0
        cuda.check_reach(self._device, handle.gpu)
        self._address = cuda.open_exported(self._device, handle.memory)
        try:
            if cuda.read(self._device, self._address + handle.size, MARK_BYTES) != handle.mark:
                raise CudaError(f"the memory opened for {handle.name} is not what was exported")
        except CudaError:
            cuda.close_exported(self._device, self._address)
            raise
        self.data = _tensor(self._address, handle.size, device)

    def close(self) -> None:
        del self.data
        cuda.close_exported(self._device, self._address)


def settle(tensor: Tensor) -> None:
    """Wait until the tensor's device has finished this thread's work; call it before declaring a row valid."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _tensor(address: int, size: int, device: torch.device) -> Tensor:
    """Return a uint8 tensor [size] over the memory at `address`, which the tensor does not own."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class Arena:
    """One side's view of an arena: words in the memory file, rows where `place` says."""

    name: ClassVar[str]

    def __init__(self, descriptor: int, layout: Layout, writable: bool = True) -> None:
        self.layout = layout
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(descriptor, layout.word_bytes, access=access)
        self._words: Words = np.frombuffer(self._memory, np.int64)
        self._host = HostTensor(descriptor, layout.row_bytes, layout.word_bytes, writable)
        self._rows = self._shaped(self._host.data)

    def place(self, data: Tensor | None) -> None:
        """Keep the rows in `data`, uint8 [layout.row_bytes], or in the memory file (None); both sides must call it."""
        self._rows = self._shaped(self._host.data if data is None else data)

    def _shaped(self, data: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return data.view(dtype).view(self.layout.shape)


def leading(true: npt.NDArray[np.bool_]) -> int:
    return len(true) if true.all() else int(true.argmin())


class TargetArenas:
    def __init__(self, config: EngineConfig, arenas: Iterable[Arena | None], device: torch.device) -> None:
        self.arenas = {arena.name: arena for arena in arenas if arena is not None}
        self.handles: list[ArenaHandle] = []
        self._exported: list[Exported] = []
        if not on_gpus(config.device, config.draft_device):
            return
        try:
            for name, arena in self.arenas.items():
                self._exported.append(Exported(name, arena.layout.row_bytes, device))
                arena.place(self._exported[-1].data)
        except CudaError as error:
            log.warning("shares memory of the host with the draft, which costs copies: %s", error)
            self.withdraw()
            for exported in self._exported:
                exported.close()
        else:
            self.handles = [exported.handle for exported in self._exported]

    def withdraw(self) -> None:
        """Use host memory from now on; an older draft may still have the exported memory open, so keep it."""
        self.handles = []
        for arena in self.arenas.values():
            arena.place(None)


class DraftArenas:
    """The draft's arenas, on its `device`."""

    def __init__(self, arenas: Iterable[Arena | None], device: torch.device) -> None:
        self.arenas = {arena.name: arena for arena in arenas if arena is not None}
        self._device = device
        self._handles: Sequence[ArenaHandle] = []
        self._imported: list[Imported] = []

    def open(self, handles: Sequence[ArenaHandle]) -> bool:
        """Open the memory that `handles` describe, instead of any opened before; False: the rows lie in host memory."""
        if handles == self._handles:
            return True
        self.close()
        try:
            for handle in handles:
                imported = Imported(handle, self._device)
                self._imported.append(imported)
                self.arenas[handle.name].place(imported.data)
        except CudaError as error:
            log.warning("shares memory of the host with the target, which costs copies: %s", error)
            self.close()
            return False
        self._handles = handles
        return True

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.place(None)
        for imported in self._imported:
            imported.close()
        self._handles, self._imported = [], []
