"""Rounds whose verification is launched while the one before still runs (`ssd.target.chain`), as the host sees them.

A batch is followed where nothing but its own outcomes decides about the next one: all running sequences are in it and
decode, each by its own samples. What ends with its outcome has run for nothing: its keys and values lie behind what is
committed, and its pages are written by whoever has them next only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple

from ssd.config import EngineConfig
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.pages import OutOfPages
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.ipc.board import BoardReader, Cached
from ssd.ipc.device_board import DeviceBoard, page_locked
from ssd.speculation.ahead import Worth
from ssd.speculation.sampling import Law
from ssd.target.chain import MOST_IDS, Chain, Link
from ssd.target.proposer import Result
from ssd.target.scheduler import Scheduled, part_of
from ssd.target.sequence import Sequence
from ssd.target.verifier import unfiltered

Ask = Callable[[Sequence], tuple[int, int] | None]
"""For a verification in flight: the draft's epoch and how many tokens the next one may take from the board; None where
it must not be launched before the outcome is known."""


class _Running(NamedTuple):
    """A row of the verification that runs: its draft tokens, and where its tokens begin in the batch."""

    sequence: Sequence
    taken: Cached
    first: int


class Ahead:
    """Keeps at most one verification behind the one whose outcomes the engine waits for, none of more than
    `max_tokens` tokens."""

    def __init__(self, chain: Chain, ask: Ask, max_tokens: int, worth: Worth) -> None:
        self._chain, self._ask, self._max_tokens, self._worth = chain, ask, max_tokens, worth
        self._running: list[_Running] = []
        self.runs = False  # whether the last batch was launched ahead
        self.taken: list[Cached] = []

    def batch(self) -> list[Scheduled]:
        """What runs already, without the rows of requests that have ended; none where nothing runs."""
        self._running = [row for row in self._running if row.sequence.slot >= 0]
        return [part_of(row.sequence, row.taken.ids) for row in self._running]

    def sample(self, batch: Items[Scheduled], running: int, meanwhile: Task = nothing) -> list[int] | None:
        """The samples of all outputs of a batch, which is what `batch` gave or a new one; None for a new one that is
        not to be followed. Afterwards the next one runs if `taken` says, for every row, with which draft tokens.

        `running` sequences there are in all.
        """
        self.runs, self.taken = bool(self._running), []
        laws = unfiltered(batch)
        lengths = [len(part.row.token_ids) for part in batch]
        firsts = [row.first for row in self._running] or _starts(lengths)
        links = self._links(batch, laws, firsts) if laws and len(batch) == running and self._worth.ahead else []
        room = self._chain.room([1 + link.most for link in links]) if links else None
        if not self.runs and (room is None or not self._chain.launch([part.row for part in batch], laws or [])):
            return None
        if room is not None:
            self._chain.follow(links, room)
        self._running = []
        meanwhile()
        if room is None:
            tokens = self._chain.last()
        else:
            tokens, self.taken = self._chain.report(len(links))
            begins = _starts([1 + len(taken.ids) for taken in self.taken])
            self._running = [
                _Running(part.sequence, taken, first)
                for part, taken, first in zip(batch, self.taken, begins, strict=True)
            ]
        spans = [tokens[first : first + length] for first, length in zip(firsts, lengths, strict=True)]
        return [token for span in spans for token in span]

    def drop(self) -> None:
        """The verification that runs is of no use: it began with tokens that are not to be."""
        self._running, self.taken = [], []

    def learn(self, results: Items[Result | None], verify_s: float, between_s: float) -> None:
        """Note a round, its verification, and what lay before that."""
        decoded = [result for result in results if result is not None and result.round > 0]
        if len(decoded) < len(results):
            return
        for result in decoded:
            self._worth.row(result.cache == "hit", result.outcome.accepted + 1, self.runs)
        if not self.runs:
            self._worth.round(verify_s, between_s)

    def _links(self, batch: Items[Scheduled], laws: Items[Law], firsts: Items[int]) -> list[Link]:
        """The rows as the device is told of them; none where the host must see an outcome first."""
        links: list[Link] = []
        for part, law, first in zip(batch, laws, firsts, strict=True):
            sequence = part.sequence
            decodes = part.complete and len(part.row.token_ids) == part.sampled and sequence.round > 0
            asks = self._ask(sequence) if decodes and sequence.room > 0 else None
            if asks is None:
                return []
            epoch, most = asks
            key = epoch, sequence.request, sequence.round
            links.append(Link(part.row, law, first, key, min(most, MOST_IDS), sequence.room))
        if sum(1 + link.most for link in links) > self._max_tokens:
            return []
        try:
            for part, link in zip(batch, links, strict=True):
                part.sequence.table.grow(link.stop)
        except OutOfPages:
            return []
        return links


def _starts(lengths: Items[int]) -> list[int]:
    """Where rows of these lengths begin, one after the other."""
    return list(accumulate(lengths, initial=0))[:-1]


def launcher(config: EngineConfig, runner: Runner, board: BoardReader, ask: Ask) -> Ahead | None:
    """For a target on a GPU whose verifications have static shapes; None elsewhere, and for a draft that reads hidden
    states, which the next forward overwrites."""
    cuda = runner.model.device.type == "cuda"
    if not isinstance(runner, StaticRunner) or not cuda or config.features is not None or not page_locked(board):
        return None
    chain = Chain(runner, DeviceBoard(board, runner.model.device))
    return Ahead(chain, ask, config.max_num_batched_tokens, Worth())
