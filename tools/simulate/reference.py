"""The paper's engines: plain decoding, ordinary speculative decoding, and `ssd` as strict ping-pong.

In the reference `ssd` the draft finishes its whole tree before it reads the outcome. One missed row makes the whole
batch wait for its backup. A batch is padded to K + 1 tokens a row."""

from __future__ import annotations

from itertools import count

import simpy

from ssd.speculation.fan_out import fan_out_at
from tools.simulate.devices import DraftDevices, Link, Meter, Process
from tools.simulate.setup import Setup
from tools.simulate.statistics import Draws, Source


def plain(env: simpy.Environment, setup: Setup, meter: Meter) -> None:
    """Simulate mode `ar`: the target alone."""
    env.process(_plain(env, setup, meter))


def _plain(env: simpy.Environment, setup: Setup, meter: Meter) -> Process:
    seconds = setup.devices.verify.at(setup.batch)
    for index in count():
        meter.begin(index)
        yield env.timeout(seconds)
        meter.verified(seconds)
        for _ in range(setup.batch):
            meter.committed(Source.PLAIN, 1)


class PingPong:
    """Simulates modes `sd` and `ssd`: target and draft as two processes that answer each other."""

    def __init__(self, env: simpy.Environment, setup: Setup, draft: DraftDevices, draws: Draws, meter: Meter) -> None:
        self._env, self._setup, self._devices, self._draws, self._meter = env, setup, draft, draws, meter
        self._outcomes = Link(env, setup.devices.delay)  # accepted lengths of the rows
        self._speculations = Link(env, setup.devices.delay)  # where those of the rows come from
        env.process(self._target())
        env.process(self._draft())

    def _target(self) -> Process:
        setup, devices = self._setup, self._setup.devices
        verify = devices.verify.at(setup.batch * (setup.lookahead + 1))
        for index in count():
            sources = yield self._speculations.get()
            self._meter.begin(index)
            yield self._env.timeout(verify + devices.overhead)
            self._meter.verified(verify)
            self._outcomes.post([self._accepted(row, index, source) for row, source in enumerate(sources)])

    def _accepted(self, row: int, index: int, source: Source) -> int:
        law = self._setup.statistics.law(source)
        accepted = law.accepted(self._draws.acceptance(row, index), self._setup.lookahead)
        self._meter.committed(source, accepted + 1)
        return accepted

    def _draft(self) -> Process:
        setup = self._setup
        foresees = setup.mode == "ssd"
        yield from self._devices.draft(setup.batch, setup.lookahead)
        sources = [Source.MISS if foresees else Source.PLAIN] * setup.batch
        self._speculations.post(sources)
        for index in count():
            if foresees:
                yield from self._tree()
            accepted = yield self._outcomes.get()
            tested = [self._in_flight(source) for source in sources]
            sources = [self._source(row, index, accepted[row], tested[row]) for row in range(setup.batch)]
            fresh = sum(source in (Source.MISS, Source.PLAIN) for source in sources)
            if fresh:
                yield from self._devices.draft(fresh, setup.lookahead)
            self._speculations.post(sources)

    def _tree(self) -> Process:
        setup, k = self._setup, self._setup.lookahead
        for _ in range(setup.devices.rebuild):
            yield from self._devices.forward(setup.batch * (k + 1))
        chains = sum(fan_out_at(accepted, k, setup.fan_out) for accepted in range(k + 1))
        yield from self._devices.draft(setup.batch * chains, k)

    def _in_flight(self, source: Source) -> int:
        """Return how many draft tokens a row has in its verification, padding aside."""
        return self._setup.cheap_depth if source is Source.CHEAP else self._setup.lookahead

    def _source(self, row: int, index: int, accepted: int, in_flight: int) -> Source:
        setup = self._setup
        if setup.mode == "sd":
            return Source.PLAIN
        chance = setup.statistics.hit_chance(accepted, in_flight, setup.fan_out)
        if self._draws.outcome(row, index) < chance:
            return Source.HIT
        return Source.CHEAP if setup.backup == "cheap" else Source.MISS
