"""Decides when to plan again, and what the rounds of an engine do in between."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ssd.config.params import AUTO_LOOKAHEAD, MAX_FAN_OUT, Mode, Speculation
from ssd.speculation.fan_out import optimal_fan_out
from ssd.tuning.learner import DraftTelemetry, Learner, Measurements
from ssd.tuning.tuner import ALIKE, ALIKE_ON_ONE_BUS, Choices, SpeculationPlan, best_plan

log = logging.getLogger("ssd.target")

# Rounds. A decision takes some two milliseconds: once much is known it changes little, unless the batch does.
_DECIDE_EVERY, _KNOWN, _DECIDE_SELDOM = 16, 64, 64
# Plain decoding is measured for so many rounds so often, the first time early: it decides whether a draft pays.
_PLAIN_ROUNDS, _FIRST_PLAIN, _PLAIN_EVERY = 4, 48, 1024
# A draft that does not pay is tried again for so many rounds so often.
_TRIAL_ROUNDS, _TRIAL_EVERY = 24, 256
# A draft this much faster than plain decoding pays clearly: then plain decoding is not measured.
_CLEAR = 1.3
# Kinds of requests whose plan is remembered.
_REMEMBERED = 8
_LONGEST_STEP_S = 60.0


class _PlanKey(NamedTuple):
    """What a request asked for, as far as its plan depends on it."""

    mode: Mode
    lookahead: int
    fan_out: tuple[int, ...]
    budget: int

    @classmethod
    def of(cls, asked: Speculation) -> _PlanKey:
        return cls(asked.mode, asked.num_speculative_tokens, asked.fan_out, asked.budget)


class DecodingRound(NamedTuple):
    """A verification of `batch` decoding rows and nothing else.

    It took `seconds` for `tokens` tokens, after the rows had `waited` seconds for the draft, and `brought` new tokens.
    `alone`: no draft worked beside it; `ahead`: the draft worked ahead of every row."""

    batch: int
    tokens: int
    seconds: float
    waited: float
    brought: int
    alone: bool
    ahead: bool


class Tuning:
    """Keeps the present plan for every kind of request. The proposer tells it of every round.

    `one_bus`: target and draft read the same memory."""

    def __init__(self, one_bus: bool = False) -> None:
        self._alike = ALIKE_ON_ONE_BUS if one_bus else ALIKE
        self.learner = Learner()
        self._plans: dict[_PlanKey, SpeculationPlan] = {}
        # The plan that the last rounds followed.
        self._followed: dict[_PlanKey, SpeculationPlan] = {}
        # The plan with many chains, once it was tried: a slope is seen through no less than two sizes.
        self._wide: dict[_PlanKey, SpeculationPlan] = {}
        # What somebody has asked for since the last decision.
        self._asked: set[_PlanKey] = set()
        self._rounds, self._batch, self._decided_for = 0, 1, 1
        # A detour measures plain decoding or tries the draft: its kind, the rounds left, when the next one is due.
        self._detour: Literal["", "plain", "trial"] = ""
        self._trials = self._left = 0
        self._next_plain, self._next_trial = _FIRST_PLAIN, _TRIAL_EVERY
        self._telemetry = DraftTelemetry(0, 0, 0.0, 0)

    def current(self, asked: Speculation) -> Speculation:
        """Returns what a request does now: `asked` with numbers in place of `auto`, or with mode `ar`."""
        if not asked.auto:
            return asked
        key = _PlanKey.of(asked)
        self._asked.add(key)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _lean(key)
            while len(self._plans) > _REMEMBERED:
                forgotten = next(iter(self._plans))
                del self._plans[forgotten]
                self._followed.pop(forgotten, None)
                self._wide.pop(forgotten, None)
        if plan.lookahead == 0 and self._detour == "trial":
            plan = _lean(key) if self._trials % 2 else self._wide[key]
        if plan.lookahead == 0 or (self._detour == "plain" and key.lookahead == 0):
            return replace(asked, mode="ar")
        self._followed[key] = plan
        return replace(asked, num_speculative_tokens=plan.lookahead, fan_out=plan.fan_out)

    def learn(self, round_: DecodingRound, draft: DraftTelemetry) -> None:
        """Note a round; `draft` has the draft's counters as they are now."""
        batch = round_.batch
        self.learner.round(batch, round_.tokens, round_.seconds, round_.alone)
        if round_.ahead:
            self.learner.brought(batch, round_.brought, round_.seconds + round_.waited)
        self._batch = batch
        before = self._telemetry
        steps, grown = draft.steps - before.steps, draft.grown - before.grown
        # The draft may write anything there: impossible figures are dropped.
        if steps > 0 and 0 <= grown <= steps * 2**16 and 0 < draft.step_seconds - before.step_seconds < _LONGEST_STEP_S:
            self.learner.steps(grown / steps, (draft.step_seconds - before.step_seconds) / steps)

    def end_round(self, draft: DraftTelemetry) -> None:
        """Count a round of any kind, and plan again when it is time."""
        self._telemetry = draft
        self._rounds += 1
        if self._left:
            self._left -= 1
            if self._left:
                return
            self._detour = ""
        elif self._rounds % self._pause:
            return
        measured = self.learner.measurements(self._batch)
        keys = [key for key in self._plans if key in self._asked]
        self._asked.clear()
        if measured is not None and keys:
            self._decide(measured, keys)
            self._begin_detour(measured, keys)

    @property
    def _pause(self) -> int:
        """Rounds between two decisions."""
        known = self._rounds > _KNOWN and self._batch == self._decided_for
        return _DECIDE_SELDOM if known else _DECIDE_EVERY

    def _decide(self, measured: Measurements, keys: Sequence[_PlanKey]) -> None:
        """Choose the plan of each kind of request."""
        self._decided_for = self._batch
        for key in keys:
            plan = self._plans[key]
            if key not in self._wide:
                chosen = self._wide[key] = _wide(key)
            else:
                # Many chains disturb a target beside them: their error says little of plans with few.
                present, followed = (
                    None if tried is self._wide[key] else tried for tried in (plan, self._followed.get(key))
                )
                chosen = best_plan(measured, self._batch, self._choices(key), present, followed)
            self._plans[key] = chosen
            if (chosen.lookahead, chosen.fan_out) != (plan.lookahead, plan.fan_out):
                if chosen.lookahead and key.mode == "ssd":
                    self.learner.forget_speeds()
                log.info("%s: K %d, fan-out %s, from %s", key.mode, chosen.lookahead, chosen.fan_out, measured)

    def _choices(self, key: _PlanKey) -> Choices:
        lookaheads = (key.lookahead,) if key.lookahead else tuple(range(AUTO_LOOKAHEAD + 1))
        return Choices(lookaheads, key.fan_out, key.budget, key.mode == "ssd", self._alike)

    def _begin_detour(self, measured: Measurements, keys: Sequence[_PlanKey]) -> None:
        """Start a trial of the draft or a measurement of plain decoding, if one is due."""
        free = [self._plans[key] for key in keys if key.lookahead == 0]
        if self._rounds >= self._next_trial and any(plan.lookahead == 0 for plan in free):
            self._detour, self._left, self._next_trial = "trial", _TRIAL_ROUNDS, self._rounds + _TRIAL_EVERY
            self._trials += 1
            self.learner.forget_speeds()
        elif self._rounds >= self._next_plain and any(plan.lookahead > 0 for plan in free):
            slowest = min(plan.speed for plan in free if plan.lookahead > 0)
            if slowest * measured.plain < _CLEAR * self._batch:
                self._detour, self._left, self._next_plain = "plain", _PLAIN_ROUNDS, self._rounds + _PLAIN_EVERY


def _lean(key: _PlanKey) -> SpeculationPlan:
    """The first plan: the fewest chains and tokens worth a try.

    More are expensive where the draft computes instead of waiting for memory, and many answers are short."""
    lookahead = key.lookahead or min(2, key.budget - 1)
    return SpeculationPlan(lookahead, key.fan_out or (1,) * (lookahead + 1), 0.0)


def _wide(key: _PlanKey) -> SpeculationPlan:
    """The second plan: the difference to the first shows what more chains and tokens take, and bring."""
    lookahead = key.lookahead or min(4, key.budget - 1)
    if key.fan_out:
        fan_out = key.fan_out
    else:
        fan_out = optimal_fan_out(0.5, 0.6, lookahead, max(lookahead + 1, min(key.budget, 3 * (lookahead + 1))))
        fan_out = tuple(min(count, MAX_FAN_OUT) for count in fan_out)
    return SpeculationPlan(lookahead, fan_out, 0.0)
