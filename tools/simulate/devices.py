"""Parts of both engines that take simulated time: links, draft devices, and a meter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from ssd.speculation.theory import LinearCost
from tools.simulate.statistics import Source

Process = Generator[simpy.Event, Any, None]


class Link:
    """One direction between target and draft: messages arrive in order, `delay` seconds after posting."""

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
        """Wait for the next message, and return it."""
        return self._arrived.get()

    def __len__(self) -> int:
        """Return how many messages have arrived unread."""
        return len(self._arrived.items)


class DraftDevices:
    """`count` equal devices that split the chains of each step, and wait for the one with most of them."""

    def __init__(self, env: simpy.Environment, step: LinearCost, count: int) -> None:
        self._env, self._step, self._count = env, step, count
        self.busy = 0.0

    def forward(self, rows: int) -> Process:
        """Spend a step's time on so many rows: the chains, each of which is a token longer then."""
        each, more = divmod(rows, self._count)
        seconds = [self._step.at(each + (device < more)) for device in range(min(rows, self._count))]
        if len(seconds) == 1:
            yield self._env.timeout(seconds[0])
        else:
            yield self._env.all_of([self._env.timeout(share) for share in seconds])
        self.busy += sum(seconds)

    def draft(self, chains: int, tokens: int) -> Process:
        """Draft `tokens` tokens for each chain."""
        for _ in range(tokens):
            yield from self.forward(chains)


@dataclass
class Meter:
    """Counts, batch-wide, what happens from the start of verification `first` to that of verification `last`."""

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
        """Note that a verification starts."""
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
        """Note that a row committed so many tokens."""
        if self._on:
            self.tokens[source] += tokens
            self.rows[source] += 1

    def was_late(self) -> None:
        """Note that an outcome was foreseen but its chain had no token yet."""
        if self._on:
            self.late += 1
