"""The ranks of a target over several processes: rank 0 says what is run next, the others run it and decide nothing.

One message a forward: the rows, and what is new of their page tables. No rank but 0 knows of requests, of a draft, or
of who was preempted; they see pages.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import zmq

from ssd import failpoints
from ssd.errors import SsdError
from ssd.execution.batch import Row
from ssd.execution.shards import ShardRunner
from ssd.ipc import sockets
from ssd.ipc.messages import BadFrame
from ssd.ipc.process import Child
from ssd.ipc.rank_steps import RANK_STEP, RankStep, RowStep
from ssd.layers.ranks import Ranks, join
from ssd.speculation.sampling import Law
from ssd.target.loading import device_of_rank, load

_IDLE_MS = 100


def meet(child: Child) -> Ranks:
    """Wait for the other ranks of this target."""
    start, config = child.start, child.config
    file = Path(start.run_directory) / f"ranks-{start.group}"
    return join(start.rank, config.tensor_parallel_size, device_of_rank(config.device, start.rank), file)


class PageTables:
    """The page table of every slot, as the other ranks know it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tables: dict[int, list[int]] = {}

    def news(self, row: Row) -> RowStep:
        """A row with what of its page table is new; from now on it is known."""
        pages = list(row.pages[: -(-row.stop // self._page_size)])
        known = self._tables.get(row.slot, [])
        both = min(len(known), len(pages))
        kept = both if pages[:both] == known[:both] else 0
        self._tables[row.slot] = pages
        return RowStep(row.slot, row.start, list(row.token_ids), row.outputs, kept, pages[kept:])

    def row(self, step: RowStep) -> Row:
        """What has become of it on the other side."""
        known = self._tables.get(step.slot, [])
        if step.kept > len(known):
            raise SsdError(f"rank 0 knows of {step.kept} pages of slot {step.slot} where there are {len(known)}")
        pages = self._tables[step.slot] = [*known[: step.kept], *step.pages]
        return Row(step.token_ids, step.start, pages, step.outputs, step.slot)


def step_of(rows: Items[Row], laws: Items[Law] | None, known: PageTables) -> RankStep:
    """What `run` has to be told, where the same is `known`."""
    wanted = None if laws is None else [(law.temperature, law.seed) for law in laws]
    return RankStep([known.news(row) for row in rows], wanted)


def run(step: RankStep, runner: ShardRunner, known: PageTables) -> None:
    """A step at a rank that only follows."""
    rows = [known.row(row) for row in step.rows]
    if step.laws is None:
        runner.forward(rows)
    else:
        runner.sample(rows, [Law(temperature, seed=seed) for temperature, seed in step.laws])


class Leader:
    """Rank 0's messages to the others."""

    def __init__(self, child: Child) -> None:
        self._epoch, self._known = child.epoch, PageTables(child.config.page_size)
        others = range(1, child.config.tensor_parallel_size)
        self._sockets = [sockets.dealer(child.context, _address(child, rank)) for rank in others]

    def tell(self, rows: Items[Row], laws: Items[Law] | None) -> None:
        """What is run next."""
        step = step_of(rows, laws, self._known)
        for socket in self._sockets:
            if not sockets.send(socket, step, self._epoch):
                raise SsdError("another rank of the target reads nothing")


def _address(child: Child, rank: int) -> str:
    return child.address(f"rank-{rank}.sock")


def follow(child: Child) -> None:
    """Load this rank's part, then run what rank 0 says until the supervisor ends this process."""
    socket = sockets.router(child.context, _address(child, child.start.rank))
    runner, _ = load(child.config, meet(child), progress=child.loading)
    assert isinstance(runner, ShardRunner)
    known = PageTables(child.config.page_size)
    child.ready()
    while True:
        child.beat()
        socket.poll(_IDLE_MS)
        while (step := _received(child, socket)) is not None:
            failpoints.reach("rank.step")
            run(step, runner, known)
            child.beat()


def _received(child: Child, socket: zmq.Socket[Any]) -> RankStep | None:
    """The next step that rank 0 of this group has sent."""
    try:
        received = sockets.receive(socket, RANK_STEP)
    except BadFrame as error:
        raise SsdError(f"from rank 0: {error}") from None
    if received is None:
        return None
    _, epoch, step = received
    if epoch != child.start.group:
        raise SsdError(f"a step of the target {epoch} has come to a rank of {child.start.group}")
    assert isinstance(step, RankStep)
    return step
