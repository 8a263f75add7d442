"""`ssd` as this engine does it: the draft publishes every depth at once, and every row decides for itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import simpy

from ssd.speculation.fan_out import fan_out_at
from ssd.speculation.theory import LinearCost, depth_worth_waiting_for, expected_tokens
from tools.simulate.devices import DraftDevices, Link, Meter, Process
from tools.simulate.setup import Setup
from tools.simulate.statistics import Draws, Source


class _Verdict(NamedTuple):
    """A message to the draft about one row: how many tokens the next verification tests.

    If `fresh`, the row waits for so many new tokens instead."""

    depth: int
    fresh: bool


class _Published(NamedTuple):
    """A message to the target about one row: every chain for a verification's outcomes has `depth` tokens.

    If `fresh`, it is about the one new chain that the next verification tests."""

    row: int
    verification: int
    fresh: bool
    depth: int


@dataclass
class _Work:
    """The draft's work for one row: grow its chains to `goal` tokens. After a `fresh` chain comes the tree."""

    index: int
    chains: int
    goal: int
    fresh: bool = False
    depth: int = 0


class Anytime:
    """Simulates target and draft as two processes; the target reads a board and waits only if that pays."""

    def __init__(self, env: simpy.Environment, setup: Setup, draft: DraftDevices, draws: Draws, meter: Meter) -> None:
        self._env, self._setup, self._devices, self._draws, self._meter = env, setup, draft, draws, meter
        self._verdicts = Link(env, setup.devices.delay)
        self._board: dict[int, _Published] = {}
        self._changed = env.event()
        self._work = [self._tree(0, 0) for _ in range(setup.batch)]
        env.process(self._target())
        env.process(self._draft())

    # The target

    def _target(self) -> Process:
        setup, devices = self._setup, self._setup.devices
        depths, sources = [0] * setup.batch, [Source.MISS] * setup.batch
        for index in count():
            self._meter.begin(index)
            verify = devices.verify.at(sum(depths) + setup.batch)
            yield self._env.timeout(verify + devices.overhead)
            self._meter.verified(verify)
            depths = [self._prepared(row, index, sources[row], depth) for row, depth in enumerate(depths)]
            sources = [Source.HIT if depth else Source.MISS for depth in depths]
            wait = self._wait(depths)
            yield from self._fill(index, wait, depths, sources)

    def _prepared(self, row: int, index: int, source: Source, in_flight: int) -> int:
        """Commit a row, and return the length of the chain for its outcome; 0 if there is none."""
        statistics = self._setup.statistics
        accepted = statistics.law(source).accepted(self._draws.acceptance(row, index), in_flight)
        self._meter.committed(source, accepted + 1)
        if self._draws.outcome(row, index) >= statistics.hit_chance(accepted, in_flight, self._setup.fan_out):
            return 0
        depth = self._on_board(row, index, fresh=False)
        if depth == 0:
            self._meter.was_late()
        return depth

    def _fill(self, index: int, wait: int, depths: list[int], sources: list[Source]) -> Process:
        """Give rows without a chain what the backup has: `wait` fresh tokens, or what costs no time."""
        empty = [row for row, depth in enumerate(depths) if depth == 0]
        if not wait and self._setup.cheap_depth:
            for row in empty:
                depths[row], sources[row] = self._setup.cheap_depth, Source.CHEAP
        verdicts = [_Verdict(depth or wait, depth == 0 and wait > 0) for depth in depths]
        self._verdicts.post((index + 1, verdicts))
        if wait:
            while any(self._on_board(row, index + 1, fresh=True) < wait for row in empty):
                yield self._changed
            for row in empty:
                depths[row] = wait

    def _wait(self, depths: list[int]) -> int:
        """Return for how many fresh tokens the batch waits."""
        setup, devices = self._setup, self._setup.devices
        missed = depths.count(0)
        if missed == 0 or setup.backup == "cheap":
            return 0
        if setup.backup == "neural":
            return setup.lookahead
        rate = setup.statistics.plain.rate(setup.lookahead)
        cheap = setup.statistics.cheap.tokens(setup.cheap_depth)
        verify = LinearCost(devices.verify.fixed + devices.overhead, devices.verify.each)
        step = devices.step.at(-(-missed // devices.drafts))
        ready = [depth for depth in depths if depth]
        wait = depth_worth_waiting_for(ready, missed, setup.lookahead, rate, verify, step, cheap).depth
        certain, verified = sum(expected_tokens(rate, depth) for depth in ready), setup.batch + sum(ready)
        later = verify.at(verified + missed * wait) + wait * step + 2 * devices.delay
        now = verify.at(verified + missed * (cheap - 1))
        pays = (certain + missed * expected_tokens(rate, wait)) / later > (certain + missed * cheap) / now
        return wait if pays else 0

    def _on_board(self, row: int, index: int, fresh: bool) -> int:
        entry = self._board.get(row)
        return entry.depth if entry and (entry.verification, entry.fresh) == (index, fresh) else 0

    # The draft

    def _draft(self) -> Process:
        while True:
            while len(self._verdicts):
                self._apply(*(yield self._verdicts.get()))
            active = [(row, work) for row, work in enumerate(self._work) if work.depth < work.goal]
            if not active:
                self._apply(*(yield self._verdicts.get()))
                continue
            yield from self._devices.forward(sum(work.chains for _, work in active))
            self._publish([self._advanced(row, work) for row, work in active])

    def _advanced(self, row: int, work: _Work) -> _Published:
        work.depth += 1
        if work.fresh and work.depth == work.goal:  # the target takes it now: prepare for what may become of it
            self._work[row] = self._tree(work.index, work.goal)
        return _Published(row, work.index, work.fresh, work.depth)

    def _apply(self, index: int, verdicts: list[_Verdict]) -> None:
        """Drop the trees of the verification that ended, and begin those of the next, number `index`."""
        for row, (depth, fresh) in enumerate(verdicts):
            self._work[row] = _Work(index, 1, depth, fresh=True) if fresh else self._tree(index, depth)

    def _tree(self, index: int, in_flight: int) -> _Work:
        """Return the chains for the outcomes of verification `index`, which tests `in_flight` tokens."""
        setup = self._setup
        chains = sum(fan_out_at(accepted, in_flight, setup.fan_out) for accepted in range(in_flight + 1))
        return _Work(index, chains, setup.lookahead)

    def _publish(self, entries: list[_Published]) -> None:
        if self._setup.devices.delay:
            self._env.process(self._carry(entries))
        else:
            self._arrive(entries)

    def _carry(self, entries: list[_Published]) -> Process:
        yield self._env.timeout(self._setup.devices.delay)
        self._arrive(entries)

    def _arrive(self, entries: list[_Published]) -> None:
        for entry in entries:
            self._board[entry.row] = entry
        changed, self._changed = self._changed, self._env.event()
        changed.succeed()
