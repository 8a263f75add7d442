"""The parts of both engines that take simulated time: links, draft devices, and the meter that watches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from simulation.cascade import Drafter
from simulation.statistics import Source
from ssd.speculation.tuner import Line

Process = Generator[simpy.Event, Any, None]


class Link:
    """One direction between target and draft: a message arrives `delay` seconds after it was posted, in order."""

    def __init__(self, env: simpy.Environment, delay: float) -> None:
        self._env, self._delay = env, delay
        self._arrived = simpy.Store(env)

    def post(self, message: Any) -> None:
        if self._delay:
            self._env.process(self._carry(message))
        else:
            self._arrived.put(message)

    def _carry(self, message: Any) -> Process:
        yield self._env.timeout(self._delay)
        self._arrived.put(message)

    def get(self) -> simpy.Event:
        """The next message, waited for."""
        return self._arrived.get()

    def __len__(self) -> int:
        """Messages that have arrived and were not read."""
        return len(self._arrived.items)


class DraftDevices:
    """`count` equal devices that split the chains of each step, and wait for the one with most of them."""

    def __init__(self, env: simpy.Environment, drafter: Drafter, count: int) -> None:
        self._env, self._drafter, self._count = env, drafter, count
        self.busy = 0.0

    def step(self, chains: int) -> Generator[simpy.Event, Any, int]:
        """Advance `chains` chains by the tokens that it returns."""
        step = self._drafter.next()
        yield from self.forward(step.time, chains)
        return step.tokens

    def forward(self, time: Line, rows: int) -> Process:
        """What takes `time` by its rows on one device, without new tokens."""
        each, more = divmod(rows, self._count)
        seconds = [time.at(each + (device < more)) for device in range(min(rows, self._count))]
        if len(seconds) == 1:
            yield self._env.timeout(seconds[0])
        else:
            yield self._env.all_of([self._env.timeout(share) for share in seconds])
        self.busy += sum(seconds)

    def draft(self, chains: int, tokens: int) -> Process:
        """`tokens` tokens for each chain."""
        drafted = 0
        while drafted < tokens:
            drafted += yield from self.step(chains)


@dataclass
class Meter:
    """Counts what happens from the start of verification `first` to the start of verification `last`, batch-wide."""

    env: simpy.Environment
    first: int
    last: int
    draft: DraftDevices
    tokens: Counter[Source] = field(default_factory=Counter)
    rows: Counter[Source] = field(default_factory=Counter)
    late: int = 0
    target_busy: float = 0.0
    draft_busy: float = 0.0
    seconds: float = 0.0
    _on: bool = False

    def __post_init__(self) -> None:
        self.done: simpy.Event = self.env.event()

    def begin(self, index: int) -> None:
        """A verification starts."""
        if index == self.first:
            self._on, self._began, self._draft_before = True, self.env.now, self.draft.busy
        elif index == self.last:
            self._on = False
            self.seconds = self.env.now - self._began
            self.draft_busy = self.draft.busy - self._draft_before
            self.done.succeed()

    def verified(self, seconds: float) -> None:
        if self._on:
            self.target_busy += seconds

    def committed(self, source: Source, tokens: int) -> None:
        """A row of the batch got so many tokens."""
        if self._on:
            self.tokens[source] += tokens
            self.rows[source] += 1

    def was_late(self) -> None:
        """An outcome was foreseen, but its chain had no token yet."""
        if self._on:
            self.late += 1
