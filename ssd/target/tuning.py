"""When to look at what was learned, and what the rounds of an engine do meanwhile (ALGORITHM 5.3)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ssd.ipc.board import Telemetry
from ssd.params import AUTO_LOOKAHEAD, MAX_FAN_OUT, Mode, Speculation
from ssd.speculation.fan_out import optimal_fan_out
from ssd.speculation.learner import Learner
from ssd.speculation.tuner import ALIKE, ALIKE_ON_ONE_BUS, Choices, Plan, Profile, best_plan

log = logging.getLogger("ssd.target")

# Rounds. A decision takes some two milliseconds: once much is known it changes little, unless the batch does.
_DECIDE_EVERY, _KNOWN, _DECIDE_SELDOM = 16, 64, 64
# Plain decoding is measured for so many rounds so often, the first time early: it decides whether a draft pays.
_PLAIN_ROUNDS, _FIRST_PLAIN, _PLAIN_EVERY = 4, 48, 1024
# A draft that does not pay is tried again for so many rounds so often.
_TRIAL_ROUNDS, _TRIAL_EVERY = 24, 256
# What no one would do without a draft is not measured: it pays clearly.
_CLEAR = 1.3
# Ways of asking that are remembered; of others the plan is forgotten.
_REMEMBERED = 8
_LONGEST_STEP_S = 60.0


class _Way(NamedTuple):
    """What of a request's wish the plan depends on."""

    mode: Mode
    lookahead: int
    fan_out: tuple[int, ...]
    budget: int

    @classmethod
    def of(cls, asked: Speculation) -> _Way:
        return cls(asked.mode, asked.num_speculative_tokens, asked.fan_out, asked.budget)


class Round(NamedTuple):
    """`batch` decoding rows and nothing else verified `tokens` tokens in `seconds`, after they had `waited` for the
    draft, and `brought` new ones; `alone`: no draft worked beside it, `ahead`: one did, ahead of every row."""

    batch: int
    tokens: int
    seconds: float
    waited: float
    brought: int
    alone: bool
    ahead: bool


class Tuning:
    """The present plan for every way that requests ask for; fed with what rounds show. `one_bus`: target and draft
    read the same memory."""

    def __init__(self, one_bus: bool = False) -> None:
        self._alike = ALIKE_ON_ONE_BUS if one_bus else ALIKE
        self.learner = Learner()
        self._plans: dict[_Way, Plan] = {}
        # The plan that the rounds of each way have followed last.
        self._measured: dict[_Way, Plan] = {}
        # The plan with many chains of each way that has tried it: lines are seen through no less than two sizes.
        self._wide: dict[_Way, Plan] = {}
        # Ways that somebody has asked for since the last decision.
        self._asked: set[_Way] = set()
        self._rounds, self._batch, self._decided_for = 0, 1, 1
        # A detour is a measurement of plain decoding or a trial of the draft: its kind, rounds left, when the next is.
        self._detour: Literal["", "plain", "trial"] = ""
        self._trials = self._left = 0
        self._next_plain, self._next_trial = _FIRST_PLAIN, _TRIAL_EVERY
        self._telemetry = Telemetry(0, 0, 0.0, 0)

    def current(self, asked: Speculation) -> Speculation:
        """How a request that asked so is speculated on now: numbers in place of `auto`, or mode `ar`."""
        if not asked.auto:
            return asked
        way = _Way.of(asked)
        self._asked.add(way)
        plan = self._plans.get(way)
        if plan is None:
            plan = self._plans[way] = _lean(way)
            while len(self._plans) > _REMEMBERED:
                forgotten = next(iter(self._plans))
                del self._plans[forgotten]
                self._measured.pop(forgotten, None)
                self._wide.pop(forgotten, None)
        if plan.lookahead == 0 and self._detour == "trial":
            plan = _lean(way) if self._trials % 2 else self._wide[way]
        if plan.lookahead == 0 or (self._detour == "plain" and way.lookahead == 0):
            return replace(asked, mode="ar")
        self._measured[way] = plan
        return replace(asked, num_speculative_tokens=plan.lookahead, fan_out=plan.fan_out)

    def learn(self, round_: Round, draft: Telemetry) -> None:
        """`draft` are the draft's counters as they are now."""
        batch = round_.batch
        self.learner.round(batch, round_.tokens, round_.seconds, round_.alone)
        if round_.ahead:
            self.learner.brought(batch, round_.brought, round_.seconds + round_.waited)
        self._batch = batch
        before = self._telemetry
        steps, grown = draft.steps - before.steps, draft.grown - before.grown
        # The draft writes them: what cannot be is not believed (contract C1).
        if steps > 0 and 0 <= grown <= steps * 2**16 and 0 < draft.step_seconds - before.step_seconds < _LONGEST_STEP_S:
            self.learner.steps(grown / steps, (draft.step_seconds - before.step_seconds) / steps)

    def end_round(self, draft: Telemetry) -> None:
        """Once a round, whatever it did."""
        self._telemetry = draft
        self._rounds += 1
        if self._left:
            self._left -= 1
            if self._left:
                return
            self._detour = ""
        elif self._rounds % self._pause:
            return
        profile = self.learner.profile(self._batch)
        ways = [way for way in self._plans if way in self._asked]
        self._asked.clear()
        if profile is not None and ways:
            self._decide(profile, ways)
            self._begin_detour(profile, ways)

    @property
    def _pause(self) -> int:
        known = self._rounds > _KNOWN and self._batch == self._decided_for
        return _DECIDE_SELDOM if known else _DECIDE_EVERY

    def _decide(self, profile: Profile, ways: Sequence[_Way]) -> None:
        self._decided_for = self._batch
        for way in ways:
            plan = self._plans[way]
            if way not in self._wide:
                chosen = self._wide[way] = _wide(way)
            else:
                # How far off predictions are for many chains, which disturb a target beside them, says little of few.
                present, measured = (
                    None if tried is self._wide[way] else tried for tried in (plan, self._measured.get(way))
                )
                chosen = best_plan(profile, self._batch, self._choices(way), present, measured)
            self._plans[way] = chosen
            if (chosen.lookahead, chosen.fan_out) != (plan.lookahead, plan.fan_out):
                if chosen.lookahead and way.mode == "ssd":
                    self.learner.forget_speeds()
                log.info("%s: K %d, fan-out %s, from %s", way.mode, chosen.lookahead, chosen.fan_out, profile)

    def _choices(self, way: _Way) -> Choices:
        lookaheads = (way.lookahead,) if way.lookahead else tuple(range(AUTO_LOOKAHEAD + 1))
        return Choices(lookaheads, way.fan_out, way.budget, way.mode == "ssd", self._alike)

    def _begin_detour(self, profile: Profile, ways: Sequence[_Way]) -> None:
        free = [self._plans[way] for way in ways if way.lookahead == 0]
        if self._rounds >= self._next_trial and any(plan.lookahead == 0 for plan in free):
            self._detour, self._left, self._next_trial = "trial", _TRIAL_ROUNDS, self._rounds + _TRIAL_EVERY
            self._trials += 1
            self.learner.forget_speeds()
        elif self._rounds >= self._next_plain and any(plan.lookahead > 0 for plan in free):
            slowest = min(plan.speed for plan in free if plan.lookahead > 0)
            if slowest * profile.plain < _CLEAR * self._batch:
                self._detour, self._left, self._next_plain = "plain", _PLAIN_ROUNDS, self._rounds + _PLAIN_EVERY


def _lean(way: _Way) -> Plan:
    """Before anything is known: the fewest chains and tokens that are worth a try. Where the draft computes, instead of
    waiting for memory, more are dear, and many answers are short."""
    lookahead = way.lookahead or min(2, way.budget - 1)
    return Plan(lookahead, way.fan_out or (1,) * (lookahead + 1), 0.0)


def _wide(way: _Way) -> Plan:
    """After that: what more chains and tokens take, and bring, is learned from the difference."""
    lookahead = way.lookahead or min(4, way.budget - 1)
    if way.fan_out:
        fan_out = way.fan_out
    else:
        fan_out = optimal_fan_out(0.5, 0.6, lookahead, max(lookahead + 1, min(way.budget, 3 * (lookahead + 1))))
        fan_out = tuple(min(count, MAX_FAN_OUT) for count in fan_out)
    return Plan(lookahead, fan_out, 0.0)
