"""`ssd` as this project does it (ALGORITHM 5): every depth is published at once, every row decides for itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import simpy

from simulation.cascade import draft_seconds
from simulation.devices import DraftDevices, Link, Meter, Process
from simulation.setup import Setup
from simulation.statistics import Draws, Source
from ssd.speculation.backup import depth_worth_waiting_for
from ssd.speculation.fan_out import fan_out_at
from ssd.speculation.theory import expected_tokens
from ssd.speculation.tuner import Line


class _Verdict(NamedTuple):
    """Of one row, to the draft: the tokens that the next verification tests, or, where it waits for them (`fresh`), how
    many it waits for."""

    depth: int
    fresh: bool


class _Published(NamedTuple):
    """Of one row, to the target: all chains for the outcomes of a verification have `depth` tokens; or the `fresh` one
    that is to be verified then."""

    row: int
    verification: int
    fresh: bool
    depth: int


@dataclass
class _Work:
    """What the draft has to do for one row: chains to make `goal` tokens long. After a `fresh` chain comes the tree."""

    index: int
    chains: int
    goal: int
    fresh: bool = False
    depth: int = 0


class Anytime:
    """Target and draft as two processes; the target reads a board and waits only where that pays."""

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
        """Commit a row, and look up how long the chain for its outcome is; 0 where there is none."""
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
        """Give the rows without a chain what the backup has: `wait` fresh tokens, or what costs no time."""
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
        """For how many fresh tokens the batch waits."""
        setup, devices = self._setup, self._setup.devices
        missed = depths.count(0)
        if missed == 0 or setup.backup == "cheap":
            return 0
        if setup.backup == "neural":
            return setup.lookahead
        rate = setup.statistics.plain.rate(setup.lookahead)
        cheap = setup.statistics.cheap.tokens(setup.cheap_depth)
        verify = Line(devices.verify.fixed + devices.overhead, devices.verify.each)
        step = draft_seconds(devices.levels, setup.lookahead, -(-missed // devices.drafts)) / setup.lookahead
        ready = [depth for depth in depths if depth]
        wait = depth_worth_waiting_for(ready, missed, setup.lookahead, rate, verify, step, cheap)
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
            tokens = yield from self._devices.step(sum(work.chains for _, work in active))
            self._publish([self._advanced(row, work, tokens) for row, work in active])

    def _advanced(self, row: int, work: _Work, tokens: int) -> _Published:
        work.depth = min(work.goal, work.depth + tokens)
        if work.fresh and work.depth == work.goal:  # the target takes it now: prepare for what may become of it
            self._work[row] = self._tree(work.index, work.goal)
        return _Published(row, work.index, work.fresh, work.depth)

    def _apply(self, index: int, verdicts: list[_Verdict]) -> None:
        """Drop the trees of the verification that has ended and begin those of the next, `index`."""
        for row, (depth, fresh) in enumerate(verdicts):
            self._work[row] = _Work(index, 1, depth, fresh=True) if fresh else self._tree(index, depth)

    def _tree(self, index: int, in_flight: int) -> _Work:
        """The chains for the outcomes of verification `index`, which tests `in_flight` tokens."""
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
