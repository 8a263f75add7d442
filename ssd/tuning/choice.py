"""Chooses a plan by its predicted and its measured speed, with Thompson sampling.

A plan's error is log(measured speed / predicted speed): a part that its mode's plans share, a part in proportion to its
chains, and one of its own, each normally distributed. Measured windows narrow the beliefs, time widens them (a Kalman
filter). A choice draws an error from each (Thompson, 1933; Russo et al., arXiv 1707.02038)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from ssd.config.params import DRAFTED, Mode
from ssd.tuning.plan import Plan

# Standard deviations: of a mode's part of the error before any measurement; of a plan's own part; of a window's
# measured speed, by its seconds, and by its tokens if it had one token (with n tokens, divided by the root of n).
_MODE_ERROR: dict[Mode, float] = {"ngram": 0.01, "sd": 0.05, "ssd": 0.07}
_PLAN_ERROR, _WINDOW_ERROR, _TOKEN_ERROR = 0.02, 0.03, 0.6
# The error of `_CHAINS_UNIT` chains of a row, its mean and deviation before any measurement. A cost table knows the
# forwards, not what else a chain costs; and of plans that are nearly alike, the one with the fewest chains is best.
_CHAINS, _CHAINS_UNIT, _CHAINS_MEAN, _CHAINS_ERROR = "chains", 32, -0.02, 0.1
# Each window adds this variance to the beliefs about all plans, since speeds change.
_FORGETTING = 1e-5
# Candidates are the first plans by expectation, without those expected to be slower than the best by this share.
_CANDIDATES, _HOPELESS = 6, 0.3
# Least gain, as a share, for a change of plan: after it the draft must read a text or prepare outcomes anew.
_STAY = 0.01
# Least gain, as a share, for the use of a draft: it takes power and memory, and must not slow a request down.
DRAFT_MARGIN = 0.02


class MemoryShare(NamedTuple):
    """Means over recent rounds: `seconds` of rounds that the suffix memory helped, tokens of others."""

    seconds: float
    other_tokens: float


NO_MEMORY = MemoryShare(0.0, 1.0)


def margin(plan: Plan, present: Plan | None) -> float:
    """Return the advantage that a plan has in a choice, as a share of the speed."""
    return _STAY * (plan == present) - DRAFT_MARGIN * (plan.mode in DRAFTED)


class Belief:
    """The mean and variance of a normally distributed error."""

    def __init__(self, deviation: float, mean: float = 0.0) -> None:
        self.mean, self.variance, self._widest = mean, deviation**2, deviation**2

    def forget(self) -> None:
        self.variance = min(self._widest, self.variance + _FORGETTING)

    def drawn(self, dice: Random | None) -> float:
        """Draw an error; without dice return the mean."""
        return self.mean if dice is None else dice.gauss(self.mean, math.sqrt(self.variance))


class Chooser:
    """Owns the beliefs about the plans for one batch size.

    `dice` None: choose the expected best. A chooser `like` another one begins with its means."""

    def __init__(self, dice: Random | None = None, like: Chooser | None = None) -> None:
        self._dice = dice
        self._common: dict[str, Belief] = {mode: Belief(error) for mode, error in _MODE_ERROR.items()}
        self._common[_CHAINS] = Belief(_CHAINS_ERROR, _CHAINS_MEAN)
        self._plans: dict[Plan, Belief] = {}
        for name, error in like.errors() if like is not None else ():
            self.recall(name, error)

    def recall(self, name: str, error: float) -> None:
        if name in self._common:
            self._common[name].mean = error

    def errors(self) -> list[tuple[str, float]]:
        return [(name, belief.mean) for name, belief in self._common.items()]

    def expected(self, plan: Plan) -> float:
        return plan.speed * math.exp(sum(share * belief.mean for share, belief in self._parts(plan)))

    def candidates(self, plans: Sequence[Plan], present: Plan | None) -> list[Plan]:
        """Return the present plan, the first few by expected speed, and each mode's first, if not hopeless."""
        modes, found = set[Mode](), list[Plan]()
        speeds = {plan: self.expected(plan) for plan in plans}
        plans = sorted(plans, key=speeds.__getitem__, reverse=True)
        for rank, plan in enumerate(plans):
            first = rank < _CANDIDATES or plan.mode not in modes
            if plan == present or (first and speeds[plan] >= (1 - _HOPELESS) * speeds[plans[0]]):
                found.append(plan)
            modes.add(plan.mode)
        return found

    def choose(self, plans: Sequence[Plan], present: Plan | None, memory: MemoryShare = NO_MEMORY) -> Plan:
        """Return the plan to follow next; plans' speeds are those without the suffix memory."""
        drawn = {belief: belief.drawn(self._dice) for belief in self._common.values()}

        def promise(plan: Plan) -> float:
            parts = self._parts(plan)
            error = sum(share * (drawn[b] if b in drawn else b.drawn(self._dice)) for share, b in parts)
            seconds = memory.seconds + memory.other_tokens / plan.speed * math.exp(-error)
            return margin(plan, present) - math.log(seconds)

        return max(plans, key=promise)

    def note(self, plan: Plan, speed: float, tokens: int) -> None:
        """Learn that rounds of a plan brought `tokens` tokens, at `speed` a second."""
        self._plans.setdefault(plan, Belief(_PLAN_ERROR))
        for belief in (*self._common.values(), *self._plans.values()):
            belief.forget()
        parts = self._parts(plan)
        surprise = math.log(speed / self.expected(plan))
        variance = sum(share**2 * belief.variance for share, belief in parts)
        variance += _WINDOW_ERROR**2 + _TOKEN_ERROR**2 / tokens
        for share, belief in parts:
            weight = share * belief.variance / variance
            belief.mean += weight * surprise
            belief.variance *= 1 - share * weight

    def _parts(self, plan: Plan) -> list[tuple[float, Belief]]:
        own = self._plans.get(plan) or Belief(_PLAN_ERROR)
        chains = plan.chains / _CHAINS_UNIT if plan.mode == "ssd" else 0.0
        return [(1.0, self._common[plan.mode]), (1.0, own), (chains, self._common[_CHAINS])]
