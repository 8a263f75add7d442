"""Tensors that two processes of one machine share, each on one of two carriers.

`HostTensor`: a memory file that both have inherited, of the supervisor's, which outlives either of them. Any device can
be copied to and from it. `Exported` and `Imported`: memory of a GPU that the target allocates, and that a draft on the
same or another GPU reads and writes with its kernels, without the host (CUDA IPC). What was in it ends with the target.

Whoever writes says so by other means, a version word or a message, and only once `settle` has returned: until then a
device may still be at it, and no other process knows. A seqlock works across both: the words that say what is valid lie
in host memory.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Protocol

import torch
from torch import Tensor

from ssd.ipc import cuda
from ssd.ipc.messages import MARK_BYTES, ArenaHandle


class SharedTensor(Protocol):
    """`data` is uint8 [size]: the same bytes for both sides. After `close` nothing made of it may be touched."""

    data: Tensor

    def close(self) -> None: ...


class HostTensor:
    """`size` bytes of a memory file from `offset` on; the descriptor may be closed afterwards. Writing to one that is
    not `writable` ends the process."""

    def __init__(self, descriptor: int, size: int, offset: int = 0, writable: bool = True) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        memory = mmap.mmap(descriptor, offset + size, access=access)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be written
            self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=size)

    def close(self) -> None:
        """The memory is unmapped with the last tensor of it."""
        del self.data


class Exported:
    """`size` bytes, 0 at first, on a GPU of this process; `handle` is for the process that opens them as `name`. To be
    closed when nobody has them open any more; the end of this process closes them, too. Raises CudaError."""

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self._device = _number(device)
        # Besides what was asked for, a mark: who opens it sees that it is what was exported, and that it can be read.
        total = -(-(size + MARK_BYTES) // cuda.GRAIN) * cuda.GRAIN
        self._address = cuda.allocate(self._device, total)
        try:
            cuda.clear(self._device, self._address, total)
            mark = os.urandom(MARK_BYTES)
            cuda.write(self._device, self._address + size, mark)
            memory, gpu = cuda.export(self._device, self._address), cuda.uuid(self._device)
        except cuda.CudaError:
            self._free()
            raise
        self.handle = ArenaHandle(name, size, memory, gpu, mark)
        self.data = _tensor(self._address, size, device)

    def close(self) -> None:
        del self.data
        self._free()

    def _free(self) -> None:
        cuda.free(self._device, self._address)


class Imported:
    """What another process has exported, for kernels of `device`; close it before that process is told that it may free
    it. Raises CudaError where this device cannot reach it, or it is not what the handle says."""

    def __init__(self, handle: ArenaHandle, device: torch.device) -> None:
        self.handle = handle
        self._device = _number(device)
        cuda.check_reach(self._device, handle.gpu)
        self._address = cuda.open_exported(self._device, handle.memory)
        try:
            if cuda.read(self._device, self._address + handle.size, MARK_BYTES) != handle.mark:
                raise cuda.CudaError(f"the memory opened for {handle.name} is not what was exported")
        except cuda.CudaError:
            self._unmap()
            raise
        self.data = _tensor(self._address, handle.size, device)

    def close(self) -> None:
        del self.data
        self._unmap()

    def _unmap(self) -> None:
        cuda.close_exported(self._device, self._address)


def settle(tensor: Tensor) -> None:
    """Wait until all that this thread has asked of the tensor's device so far is done, and so can be seen from every
    process. Costs nothing on a CPU."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _number(device: torch.device) -> int:
    return device.index or 0


def _tensor(address: int, size: int, device: torch.device) -> Tensor:
    """uint8 [size], which does not own its memory."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
