"""The ranks of a model as threads of one process, over gloo: what several processes do, within a test's reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore

from ssd.execution.batch import Row
from ssd.execution.shards import ShardRunner, StaticShardRunner, Tell
from ssd.ipc.messages import RANK_STEP, RankStep
from ssd.ipc.public import pack, unpack
from ssd.law import Law
from ssd.layers.ranks import Ranks, connect
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.verifier.ranks import PageTables, run, step_of
from tests.models import tiny

_T = TypeVar("_T")


def side_by_side(size: int, work: Callable[[Ranks], _T]) -> list[_T]:
    """What `work` returns at each of so many ranks, in their order; raises what the first of them has raised."""
    store = HashStore()

    def one(rank: int) -> _T:
        return work(connect(rank, size, tiny.CPU, store))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def part(
    directory: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    *,
    pages: int = 512,
    page_size: int = 4,
    tell: Tell | None = None,
    deterministic: bool = False,
    int8: bool = False,
    static: bool = False,
) -> ShardRunner | StaticShardRunner:
    """One rank's runner, as `tiny.runner` is a whole one; `static`: as on a GPU, and warm."""
    model = registry.load(inspect(directory), dtype, tiny.CPU, tiny.MAX_POSITION, int8=int8, ranks=ranks)
    sizes = pages, page_size, deterministic
    if not static:
        return ShardRunner(model, *sizes, ranks=ranks, tell=tell)
    runner = StaticShardRunner(model, *sizes, ranks=ranks, tell=tell, most_rows=8, longest=8)
    runner.warm_up(8)
    return runner


@contextmanager
def split_runner(
    directory: Path, size: int, dtype: torch.dtype = torch.float32, *, page_size: int = 4, **settings: Any
) -> Iterator[ShardRunner | StaticShardRunner]:
    """Rank 0 of several, each a `part` of these settings; the others follow in threads, over messages as they are
    sent."""
    store, known = HashStore(), PageTables(page_size)
    wires: list[SimpleQueue[list[bytes] | None]] = [SimpleQueue() for _ in range(1, size)]

    def tell(rows: Sequence[Row], laws: Sequence[Law] | None) -> None:
        frames = pack(step_of(rows, laws, known))
        for wire in wires:
            wire.put(frames)

    def own(rank: int, tell: Tell | None = None) -> ShardRunner | StaticShardRunner:
        ranks = connect(rank, size, tiny.CPU, store)
        return part(directory, ranks, dtype, page_size=page_size, tell=tell, **settings)

    def follow(rank: int) -> None:
        runner, tables = own(rank), PageTables(page_size)
        while (frames := wires[rank - 1].get()) is not None:
            _, step = unpack(frames, RANK_STEP)
            assert isinstance(step, RankStep)
            run(step, runner, tables)

    with ThreadPoolExecutor(size) as threads:
        following = [threads.submit(follow, rank) for rank in range(1, size)]
        try:
            yield own(0, tell)
        finally:
            for wire in wires:
                wire.put(None)
        for follower in following:
            follower.result()
