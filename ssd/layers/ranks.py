"""Tensor parallelism: the ranks of a model, their collectives, and layers that are split over them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssd.errors import SsdError
from ssd.layers.linear import Table

if TYPE_CHECKING:
    from torch.distributed import Store

# Longer than any operation: the supervisor finds a rank that hangs earlier, and ends all ranks.
_TIMEOUT = timedelta(minutes=10)
# Seconds that a rank which has lost another waits before it ends, so that the other's error is logged first.
_LAST_S = 1.0
_LOOPBACK = "127.0.0.1"


class Ranks:
    """This process is number `rank` of `size`.

    All ranks must call `sum`, `all` and `gather` in the same order, with tensors of the same shape and dtype. They
    raise `SsdError` if another rank is lost. `sum` and `all` may be part of a CUDA graph."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    def sum(self, x: Tensor) -> Tensor:
        """Add up all ranks' `x` in order.

        In a ring, a row's bits would depend on its place in the batch."""
        if self._group is None:
            return x
        total, *others = self.all(x).unbind()
        for part in others:
            total = total.add_(part)
        return total

    def all(self, x: Tensor) -> Tensor:
        """Return all ranks' `x` in order, [size, *x.shape]."""
        if self._group is None:
            return x[None]
        parts = x.new_empty(self.size, *x.shape)
        try:
            self._group._allgather_base(parts, x.contiguous()[None]).wait()
        except RuntimeError as error:
            raise _lost(error) from None
        return parts

    def gather(self, x: Tensor) -> list[Tensor]:
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
        return part_of(count, self.rank, self.size)


def part_of(count: int, rank: int, size: int) -> range:
    """Return the range of `count` items that belongs to `rank`; lengths differ by one at most."""
    return range(rank * count // size, (rank + 1) * count // size)


SINGLE = Ranks()


def connect(rank: int, size: int, device: torch.device, store: Store, address: str = _LOOPBACK) -> Ranks:
    """Meet the other ranks in `store`, of torch.distributed; they reach this process at `address`.

    Raises `SsdError`."""
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


class RowParallel:
    """A linear layer split by inputs: the ranks' products are summed, and only rank 0's adds the bias."""

    def __init__(self, partial: Callable[[Tensor], Tensor], ranks: Ranks) -> None:
        self._partial, self._ranks = partial, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._partial(x))


class ParallelEmbedding:
    """An embedding split by ids: this rank's `table` has the rows from id `first` on."""

    def __init__(self, table: Table, first: int, ranks: Ranks) -> None:
        self._table, self._first, self._ranks = table, first, ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        here = token_ids - self._first
        elsewhere = (here < 0) | (here >= len(self._table))
        found = self._table(here.masked_fill(elsewhere, 0))
        # Not multiplied by 0, which would keep a NaN.
        return self._ranks.sum(torch.where(elsewhere[:, None], torch.zeros_like(found), found))
