"""Chooses a plan by its predicted and its measured speed, with Thompson sampling.

A plan's error is log(measured speed / predicted speed). The belief about it is a normal distribution. Every
window of rounds narrows it, time widens it (a Kalman filter). A choice draws an error from every belief, so it mostly
tries out plans whose error is uncertain (Thompson, 1933; Russo et al., arXiv 1707.02038)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from ssd.config.params import DRAFTED, Mode
from ssd.tuning.predictor import Setting, SpeculationPlan

# Standard deviations of the error: a mode's before any measurement, a plan's beyond its mode's, a window's from its
# time, and a window's from its tokens, which is divided by the root of their number.
_MODE_ERROR: dict[Mode, float] = {"ngram": 0.01, "sd": 0.05, "ssd": 0.07}
_PLAN_ERROR, _WINDOW_ERROR, _TOKEN_ERROR = 0.02, 0.03, 0.6
# Each window adds this variance to the beliefs about all plans, since speeds change.
_FORGETTING = 1e-5
# Candidates are the first plans of a ranking, without those expected to be slower than the best by this share.
_CANDIDATES, _HOPELESS = 6, 0.3
# Least gain, as a share, for a change of plan: after it the draft must read a text or prepare outcomes anew.
_STAY = 0.01
# Least gain, as a share, for the use of a draft: it takes power and memory, and must not slow a request down.
DRAFT_MARGIN = 0.02


class MemoryShare(NamedTuple):
    """Means of recent rounds: the `seconds` of those in which the suffix memory helped, the tokens of the others."""

    seconds: float
    other_tokens: float


NO_MEMORY = MemoryShare(0.0, 1.0)


class Belief:
    """The belief about an error: mean and variance of a normal distribution."""

    def __init__(self, variance: float) -> None:
        self.mean, self.variance, self._widest = 0.0, variance, variance

    def forget(self) -> None:
        self.variance = min(self._widest, self.variance + _FORGETTING)

    def drawn(self, dice: Random | None) -> float:
        """Draw a value of the error; without dice return the mean."""
        return self.mean if dice is None else dice.gauss(self.mean, math.sqrt(self.variance))


class Chooser:
    """Owns the beliefs about the plans for one batch size, and chooses among them.

    A plan's error is the sum of its mode's error and its own. `dice` None: choose the expected best plan."""

    def __init__(self, dice: Random | None = None) -> None:
        self._dice = dice
        self._modes = {mode: Belief(error**2) for mode, error in _MODE_ERROR.items()}
        self._plans: dict[Setting, Belief] = {}

    def recall(self, mode: str, error: float) -> None:
        """Take the error that an earlier process found for a mode as this mode's mean."""
        for known in _MODE_ERROR.keys() & {mode}:
            self._modes[known].mean = error

    def errors(self) -> list[tuple[Mode, float]]:
        return [(mode, belief.mean) for mode, belief in self._modes.items()]

    def expected(self, plan: SpeculationPlan) -> float:
        """Return the expected tokens per second of a plan."""
        return plan.speed * math.exp(self._modes[plan.mode].mean + self._plan(plan).mean)

    def candidates(self, plans: Sequence[SpeculationPlan], present: Setting | None) -> list[SpeculationPlan]:
        """Return the plans to choose from: the present one, the first few and the first of each mode.

        `plans` are fastest first. A plan expected to be far slower than the best is left out, unless it is the present
        one."""
        modes, found = set[Mode](), list[SpeculationPlan]()
        least = (1 - _HOPELESS) * max(map(self.expected, plans))
        for rank, plan in enumerate(plans):
            first = rank < _CANDIDATES or plan.mode not in modes
            if plan.setting == present or (first and self.expected(plan) >= least):
                found.append(plan)
            modes.add(plan.mode)
        return found

    def choose(
        self, plans: Sequence[SpeculationPlan], present: Setting | None, memory: MemoryShare = NO_MEMORY
    ) -> SpeculationPlan:
        """Return the plan to follow next. A plan's speed counts for the rounds without the suffix memory alone."""
        drawn = {mode: belief.drawn(self._dice) for mode, belief in self._modes.items()}

        def promise(plan: SpeculationPlan) -> float:
            error = drawn[plan.mode] + self._plan(plan).drawn(self._dice)
            margin = _STAY * (plan.setting == present) - DRAFT_MARGIN * (plan.mode in DRAFTED)
            return margin - math.log(memory.seconds + memory.other_tokens / plan.speed * math.exp(-error))

        return max(plans, key=promise)

    def note(self, plan: SpeculationPlan, speed: float, tokens: int) -> None:
        """Learn that rounds of a plan brought `tokens` tokens at `speed` tokens per second."""
        for belief in (*self._modes.values(), *self._plans.values()):
            belief.forget()
        mode, own = self._modes[plan.mode], self._plans.setdefault(plan.setting, Belief(_PLAN_ERROR**2))
        surprise = math.log(speed / plan.speed) - mode.mean - own.mean
        variance = mode.variance + own.variance + _WINDOW_ERROR**2 + _TOKEN_ERROR**2 / tokens
        for belief in (mode, own):
            weight = belief.variance / variance
            belief.mean += weight * surprise
            belief.variance *= 1 - weight

    def _plan(self, plan: SpeculationPlan) -> Belief:
        return self._plans.get(plan.setting) or Belief(_PLAN_ERROR**2)
