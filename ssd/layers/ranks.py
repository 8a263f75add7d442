"""The processes that hold one model in parts (tensor parallelism), and what they tell each other within a forward."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssd.errors import SsdError

if TYPE_CHECKING:
    from torch.distributed import Store

# Longer than anything takes: the supervisor sees earlier who hangs, and ends all.
_TIMEOUT = timedelta(minutes=10)
# A rank that has lost another waits for its own end: that of the other one, and its cause, is to be seen first.
_LAST_S = 1.0
_LOOPBACK = "127.0.0.1"


class Ranks:
    """This process is number `rank` of `size`. What needs all of them, all have to call in the same order, with tensors
    of the same shape and type; an `SsdError` where one is gone."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        """`group` is their process group of torch.distributed, whose stubs lack what is called here."""
        self.rank, self.size, self._group = rank, size, group

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, the same bits at each of them: added in the order of ranks, number by number, so
        that a row's result does not depend on where in a batch it lies, as it may in a ring."""
        if self._group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise _lost(error) from None
        total = parts[0]
        for part in parts[1:]:
            total = total.add_(part)
        return total

    def gather(self, x: Tensor) -> list[Tensor]:
        """All ranks' `x`, in their order, at rank 0; nothing at the others."""
        if self._group is None:
            return [x]
        from torch.distributed import GatherOptions

        options = GatherOptions()
        options.rootRank = 0
        parts = [] if self.rank else [torch.empty_like(x) for _ in range(self.size)]
        try:
            self._group.gather([] if self.rank else [parts], [x.contiguous()], options).wait()
        except RuntimeError as error:
            raise _lost(error) from None
        return parts

    def part(self, count: int) -> range:
        """Which of so many rows of a vocabulary are this rank's."""
        return part_of(count, self.rank, self.size)


def part_of(count: int, rank: int, size: int) -> range:
    """Which of `count` things are those of `rank`: as many as any other has, or one less."""
    return range(rank * count // size, (rank + 1) * count // size)


SINGLE = Ranks()


def connect(rank: int, size: int, device: torch.device, store: Store, address: str = _LOOPBACK) -> Ranks:
    """Meet the other ranks, which find each other in `store`, a store of torch.distributed. They reach this process at
    `address`, by default from this machine alone. Returns when all are there; an `SsdError` where one is lost."""
    try:
        return Ranks(rank, size, _group(rank, size, device, store, address))
    except RuntimeError as error:
        raise _lost(error) from None


def _group(rank: int, size: int, device: torch.device, store: Store, address: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    if device.type == "cpu":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(store, rank, size, options)
    from torch.distributed import ProcessGroupNCCL

    if address == _LOOPBACK:
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # otherwise NCCL's own choice, or the user's
    torch.cuda.set_device(device)
    return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())


def _lost(error: RuntimeError) -> SsdError:
    time.sleep(_LAST_S)
    first, *_ = str(error).splitlines() or [""]
    return SsdError(f"lost another rank of the target: {first}")
