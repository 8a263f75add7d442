"""The ranks of a target over several processes: rank 0 decides what is run next, the others run it.

There is one message a forward: the rows, and what is new in their page tables."""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from ssd.errors import SsdError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.ipc import meeting, sockets
from ssd.ipc.messages import RANK_STEP, RankStep, RowStep
from ssd.ipc.process import IDLE_MS, Child
from ssd.ipc.public import BadFrame
from ssd.kernels.gpu import watch_compiles
from ssd.law import Law
from ssd.layers.ranks import Ranks, connect
from ssd.system import failpoints
from ssd.verifier.loading import device_of_rank, load

if TYPE_CHECKING:
    from torch.distributed import Store


def meet(child: Child) -> Ranks:
    config, rank = child.config, child.start.rank
    address = {"address": meeting.own_address(child.start.meeting)} if child.start.meeting else {}
    return connect(rank, config.tensor_parallel_size, device_of_rank(config, rank), _store(child), **address)


def _store(child: Child) -> Store:
    from torch.distributed import FileStore, PrefixStore

    if child.start.meeting:  # the supervisor's store, for several machines
        return PrefixStore(f"ranks/{child.start.group}", meeting.connect(child.start.meeting))
    file = Path(child.start.run_directory) / f"ranks-{child.start.group}"
    return FileStore(str(file), child.config.tensor_parallel_size)


class PageTables:
    """The page table of every slot, as the other ranks know it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tables: dict[int, list[int]] = {}

    def news(self, row: Row) -> RowStep:
        """Return the message for a row, with what is new in its page table."""
        pages = list(row.pages[: -(-row.stop // self._page_size)])
        known = self._tables.get(row.slot, [])
        both = min(len(known), len(pages))
        kept = both if pages[:both] == known[:both] else 0
        self._tables[row.slot] = pages
        return RowStep(row.slot, row.start, list(row.token_ids), row.outputs, kept, pages[kept:])

    def row(self, step: RowStep) -> Row:
        """Return the row of a message at another rank. Raises SsdError if the tables do not agree."""
        known = self._tables.get(step.slot, [])
        if step.kept > len(known):
            raise SsdError(f"rank 0 knows of {step.kept} pages of slot {step.slot} where there are {len(known)}")
        pages = self._tables[step.slot] = [*known[: step.kept], *step.pages]
        return Row(step.token_ids, step.start, pages, step.outputs, step.slot)


def step_of(rows: Items[Row], laws: Items[Law] | None, known: PageTables) -> RankStep:
    """Return the message for a forward of `rows`, or for samples under `laws`."""
    return RankStep([known.news(row) for row in rows], None if laws is None else list(laws))


def run(step: RankStep, runner: Runner, known: PageTables) -> None:
    rows = [known.row(row) for row in step.rows]
    if step.laws is None:
        runner.forward(rows)
    else:
        runner.sample(rows, step.laws)


class Leader:
    def __init__(self, child: Child) -> None:
        self._epoch, self._known = child.epoch, PageTables(child.config.page_size)
        here, size = child.config.ranks, child.config.tensor_parallel_size
        addresses = [_address(child, rank) for rank in here[1:]]
        if size > len(here):
            store = _store(child)  # the others have written there before they met
            addresses += [store.get(f"address/{rank}").decode() for rank in range(len(here), size)]
        self._sockets = [sockets.dealer(child.context, address) for address in addresses]

    def tell(self, rows: Items[Row], laws: Items[Law] | None) -> None:
        """Send what is run next. Raises SsdError if a rank reads nothing."""
        step = step_of(rows, laws, self._known)
        for socket in self._sockets:
            if not sockets.send(socket, step, self._epoch):
                raise SsdError("another rank of the target reads nothing")


def _address(child: Child, rank: int) -> str:
    return child.address(f"rank-{rank}.sock")


def _listen(child: Child) -> zmq.Socket[Any]:
    rank = child.start.rank
    if not child.start.meeting:
        return sockets.router(child.context, _address(child, rank))
    socket = sockets.router(child.context, f"tcp://{meeting.own_address(child.start.meeting)}:*")
    _store(child).set(f"address/{rank}", socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return socket


def follow(child: Child) -> None:
    """Load this rank's part of the model, then run what rank 0 says."""
    socket = _listen(child)
    runner, _ = load(child.config, meet(child), progress=child.loading)
    known = PageTables(child.config.page_size)
    watch_compiles(runner.model.device)
    child.ready()
    while True:
        child.beat()
        socket.poll(IDLE_MS)
        while (step := _received(child, socket)) is not None:
            failpoints.reach("rank.step")
            run(step, runner, known)
            child.beat()


def _received(child: Child, socket: zmq.Socket[Any]) -> RankStep | None:
    """Return the next step that rank 0 has sent, or None. Raises SsdError for anything else."""
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
