"""Chooses among plans by what they are predicted to bring and by what they brought: Thompson sampling.

A plan's error is the logarithm of its measured over its predicted speed. What is believed of it is a normal
distribution, which every window of rounds sharpens and time widens (a Kalman filter). Choosing by a draw from it tries
out what is in doubt and little else (Thompson, 1933; Russo et al., arXiv 1707.02038)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from ssd.config.params import DRAFTED, Mode
from ssd.tuning.predictor import Setting, SpeculationPlan

# Standard deviations of the error: of a mode's predictions before anything was measured, of a plan's beyond its mode's,
# of a window's time, and of a window's tokens, divided by the root of their number.
_MODE_ERROR: dict[Mode, float] = {"ngram": 0.01, "sd": 0.05, "ssd": 0.07}
_PLAN_ERROR, _WINDOW_ERROR, _TOKEN_ERROR = 0.02, 0.03, 0.6
# How much a window widens what is believed of all plans: what was true may change.
_FORGETTING = 1e-5
# Candidates are the first so many plans of a ranking, unless they are believed to be slower by this share.
_CANDIDATES, _HOPELESS = 6, 0.3
# A change of plan must promise this much: the draft has a text to read, or outcomes to prepare anew.
_STAY = 0.01
# Work of a draft must promise this much: it takes power and memory, and nobody may be slower than without it.
DRAFT_MARGIN = 0.02


class Belief:
    """What is believed of an error: its mean and variance."""

    def __init__(self, variance: float) -> None:
        self.mean, self.variance, self._widest = 0.0, variance, variance

    def forget(self) -> None:
        self.variance = min(self._widest, self.variance + _FORGETTING)

    def drawn(self, dice: Random | None) -> float:
        """A value that it may have; without dice the likeliest."""
        return self.mean if dice is None else dice.gauss(self.mean, math.sqrt(self.variance))


class Chooser:
    """What is believed of the plans for one size of batch. A plan errs as its mode does, and by a part of its own.

    `dice` None: no plan is tried out, the best is followed."""

    def __init__(self, dice: Random | None = None) -> None:
        self._dice = dice
        self._modes = {mode: Belief(error**2) for mode, error in _MODE_ERROR.items()}
        self._plans: dict[Setting, Belief] = {}

    def recall(self, mode: str, error: float) -> None:
        """Begin with the error that an earlier process found for a mode."""
        for known in _MODE_ERROR.keys() & {mode}:
            self._modes[known].mean = error

    def errors(self) -> list[tuple[Mode, float]]:
        """What is believed of each mode's error."""
        return [(mode, belief.mean) for mode, belief in self._modes.items()]

    def expected(self, plan: SpeculationPlan) -> float:
        """Returns the tokens per second that a plan is believed to bring."""
        return plan.speed * math.exp(self._modes[plan.mode].mean + self._plan(plan).mean)

    def candidates(self, plans: Sequence[SpeculationPlan], present: Setting | None) -> list[SpeculationPlan]:
        """Those of `plans`, fastest first, that are worth a closer look: the present one, and of the first few and the
        first of each mode those that are not hopeless."""
        modes, found = set[Mode](), list[SpeculationPlan]()
        least = (1 - _HOPELESS) * max(map(self.expected, plans))
        for rank, plan in enumerate(plans):
            first = rank < _CANDIDATES or plan.mode not in modes
            if plan.setting == present or (first and self.expected(plan) >= least):
                found.append(plan)
            modes.add(plan.mode)
        return found

    def choose(self, plans: Sequence[SpeculationPlan], present: Setting | None) -> SpeculationPlan:
        """Returns the plan to follow next."""
        drawn = {mode: belief.drawn(self._dice) for mode, belief in self._modes.items()}

        def promise(plan: SpeculationPlan) -> float:
            error = drawn[plan.mode] + self._plan(plan).drawn(self._dice)
            margin = _STAY * (plan.setting == present) - DRAFT_MARGIN * (plan.mode in DRAFTED)
            return math.log(plan.speed) + error + margin

        return max(plans, key=promise)

    def note(self, plan: SpeculationPlan, speed: float, tokens: int) -> None:
        """`tokens` tokens of rounds that followed a plan came at `speed` tokens per second."""
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
