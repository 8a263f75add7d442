"""When to look at what was learned, and what the rounds of an engine do meanwhile (ALGORITHM 5.3)."""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ssd.ipc.board import Telemetry
from ssd.params import AUTO_LOOKAHEAD, MAX_FAN_OUT, Mode, Speculation
from ssd.speculation.fan_out import optimal_fan_out
from ssd.speculation.learner import Learner
from ssd.speculation.tuner import Choices, Plan, Profile, best_plan

log = logging.getLogger("ssd.target")

_DECIDE_EVERY = 16  # rounds, of which what follows is a multiple
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
    """The present plan for every way that requests ask for; fed with what rounds show."""

    def __init__(self) -> None:
        self.learner = Learner()
        self._plans: dict[_Way, Plan] = {}
        # The plan that the rounds of each way have followed last.
        self._measured: dict[_Way, Plan] = {}
        # Ways whose rounds have been of two sizes: lines are seen through no less.
        self._explored: set[_Way] = set()
        self._rounds, self._batch = 0, 1
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
        plan = self._plans.get(way)
        if plan is None:
            plan = self._plans[way] = _first(way)
            while len(self._plans) > _REMEMBERED:
                forgotten = next(iter(self._plans))
                del self._plans[forgotten]
                self._measured.pop(forgotten, None)
                self._explored.discard(forgotten)
        if plan.lookahead == 0 and self._detour == "trial":
            plan = _lean(way) if self._trials % 2 else _first(way)
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
            self._detour = self._detour if self._left else ""
            return
        if self._rounds % _DECIDE_EVERY or not self._plans:
            return
        profile = self.learner.profile(self._batch)
        if profile is not None:
            self._decide(profile)
            self._begin_detour(profile)

    def _decide(self, profile: Profile) -> None:
        for way, plan in self._plans.items():
            if way not in self._explored:
                self._explored.add(way)
                chosen = _lean(way)
            else:
                chosen = best_plan(profile, self._batch, _choices(way), plan, self._measured.get(way))
            self._plans[way] = chosen
            if (chosen.lookahead, chosen.fan_out) != (plan.lookahead, plan.fan_out):
                if chosen.lookahead and way.mode == "ssd":
                    self.learner.forget_speeds()
                log.info("%s: K %d, fan-out %s, from %s", way.mode, chosen.lookahead, chosen.fan_out, profile)

    def _begin_detour(self, profile: Profile) -> None:
        free = [plan for way, plan in self._plans.items() if way.lookahead == 0]
        if self._rounds >= self._next_trial and any(plan.lookahead == 0 for plan in free):
            self._detour, self._left, self._next_trial = "trial", _TRIAL_ROUNDS, self._rounds + _TRIAL_EVERY
            self._trials += 1
            self.learner.forget_speeds()
        elif self._rounds >= self._next_plain and any(plan.lookahead > 0 for plan in free):
            slowest = min(plan.speed for plan in free if plan.lookahead > 0)
            if slowest * profile.plain < _CLEAR * self._batch:
                self._detour, self._left, self._next_plain = "plain", _PLAIN_ROUNDS, self._rounds + _PLAIN_EVERY


def _choices(way: _Way) -> Choices:
    lookaheads = (way.lookahead,) if way.lookahead else tuple(range(AUTO_LOOKAHEAD + 1))
    return Choices(lookaheads, way.fan_out, way.budget, way.mode == "ssd")


def _lean(way: _Way) -> Plan:
    """The fewest chains and tokens that are worth a try: what one more of them takes is learned from the difference to
    the first plan, and where the draft computes, instead of waiting for memory, that is much."""
    lookahead = way.lookahead or min(2, way.budget - 1)
    return Plan(lookahead, way.fan_out or (1,) * (lookahead + 1), 0.0)


def _first(way: _Way) -> Plan:
    """Before anything is known."""
    lookahead = way.lookahead or min(4, way.budget - 1)
    if way.fan_out:
        fan_out = way.fan_out
    else:
        fan_out = optimal_fan_out(0.5, 0.6, lookahead, max(lookahead + 1, min(way.budget, 3 * (lookahead + 1))))
        fan_out = tuple(min(count, MAX_FAN_OUT) for count in fan_out)
    return Plan(lookahead, fan_out, 0.0)
