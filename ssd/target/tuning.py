"""When to look at what was learned, and what the rounds of an engine do meanwhile (ALGORITHM 5.3)."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from ssd.ipc.board import Telemetry
from ssd.params import AUTO_LOOKAHEAD, MAX_FAN_OUT, Speculation
from ssd.speculation.fan_out import optimal_fan_out
from ssd.speculation.learner import Learner
from ssd.speculation.tuner import Choices, Plan, best_plan

log = logging.getLogger("ssd.target")

_DECIDE_EVERY = 16  # rounds
# Plain decoding is measured for so many rounds so often, the first time early: it decides whether a draft pays.
_PLAIN_ROUNDS, _FIRST_PLAIN, _PLAIN_EVERY = 4, 48, 1024
# A draft that does not pay is tried again for so many rounds so often.
_TRIAL_ROUNDS, _TRIAL_EVERY = 24, 256
# What no one would do without a draft is not measured: it pays clearly.
_CLEAR = 1.3


class Tuning:
    """The present plan for every way that requests ask for; fed with what rounds show."""

    def __init__(self) -> None:
        self.learner = Learner()
        self._plans: dict[Speculation, Plan] = {}
        self._rounds, self._batch = 0, 1
        self._detour, self._next_detour = 0, _FIRST_PLAIN  # rounds left of a plain measurement or a trial; when next
        self._telemetry = Telemetry(0, 0, 0.0, 0)

    def current(self, asked: Speculation) -> Speculation:
        """How a request that asked so is speculated on now: numbers in place of `auto`, or mode `ar`."""
        if not asked.auto:
            return asked
        plan = self._plans.setdefault(asked, _first(asked))
        if self._detour and not asked.num_speculative_tokens:
            plan = Plan(0, (), 0.0) if plan.lookahead else _first(asked)
        if plan.lookahead == 0:
            return replace(asked, mode="ar")
        return replace(asked, num_speculative_tokens=plan.lookahead, fan_out=plan.fan_out)

    def round(self, batch: int, tokens: int, seconds: float, alone: bool) -> None:
        """A round of decoding rows only took so long; `alone`: no draft worked beside it."""
        self.learner.round(batch, tokens, seconds, alone)
        self._batch = batch
        self._rounds += 1
        if self._detour:
            self._detour -= 1
            return
        if self._rounds % _DECIDE_EVERY == 0:
            self._decide()
        if self._rounds >= self._next_detour:
            self._begin_detour()

    def steps(self, now: Telemetry) -> None:
        """The draft's counters as they are now."""
        before, self._telemetry = self._telemetry, now
        steps = now.steps - before.steps
        if steps > 0:  # a new draft counts on: the board is the same
            self.learner.steps((now.grown - before.grown) / steps, (now.step_seconds - before.step_seconds) / steps)

    def _decide(self) -> None:
        profile = self.learner.profile(self._batch)
        if profile is None:
            return
        for asked, plan in self._plans.items():
            chosen = self._plans[asked] = best_plan(profile, self._batch, _choices(asked), plan)
            if (chosen.lookahead, chosen.fan_out) != (plan.lookahead, plan.fan_out):
                log.info("%s: K %d, fan-out %s, from %s", asked.mode, chosen.lookahead, chosen.fan_out, profile)

    def _begin_detour(self) -> None:
        profile = self.learner.profile(self._batch)
        plain = [plan for plan in self._plans.values() if plan.lookahead == 0]
        self._next_detour = self._rounds + (_TRIAL_EVERY if plain else _PLAIN_EVERY)
        if profile is None or not self._plans:
            return
        slowest = min(plan.speed for plan in self._plans.values())
        if plain or slowest * profile.plain < _CLEAR * self._batch:
            self._detour = _TRIAL_ROUNDS if plain else _PLAIN_ROUNDS


def _choices(asked: Speculation) -> Choices:
    fixed = asked.num_speculative_tokens
    lookaheads = (fixed,) if fixed else tuple(range(AUTO_LOOKAHEAD + 1))
    return Choices(lookaheads, asked.fan_out, asked.budget, MAX_FAN_OUT, asked.mode == "ssd")


def _first(asked: Speculation) -> Plan:
    """Before anything is known."""
    lookahead = asked.num_speculative_tokens or min(4, asked.budget - 1)
    if asked.fan_out:
        fan_out = asked.fan_out * (lookahead + 1) if len(asked.fan_out) == 1 else asked.fan_out
    else:
        fan_out = optimal_fan_out(0.5, 0.6, lookahead, max(lookahead + 1, min(asked.budget, 3 * (lookahead + 1))))
        fan_out = tuple(min(count, MAX_FAN_OUT) for count in fan_out)
    return Plan(lookahead, fan_out, 0.0)
