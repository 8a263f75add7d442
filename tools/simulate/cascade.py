"""How long a draft takes for its tokens: one model, or a cascade in which small drafts speculate for larger ones.

A level drafts for the next one as in ordinary speculative decoding: k tokens of the small draft, one forward of the
large one over k + 1 positions, accepted + 1 tokens; again, until the target's K tokens are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from ssd.errors import UsageError
from ssd.speculation.theory import LinearCost, speedup_sd
from tools.simulate.statistics import AcceptanceLaw


@dataclass(frozen=True)
class Level:
    """A draft model. `step`: seconds of a forward by the rows on one device.

    All but the last level draft `lookahead` tokens a round for the next level, which accepts them at the rate
    `by_next`. `by_target` is the target's acceptance of this level's own tokens; it is needed only to predict the level
    without those above it."""

    step: LinearCost
    lookahead: int = 0
    by_next: float = 0.0
    by_target: float = 0.0

    def __post_init__(self) -> None:
        if min(self.step) < 0 or self.step.fixed + self.step.each <= 0:
            raise UsageError(f"a draft step takes more than 0 seconds and neither part is negative, not {self.step}")
        if self.lookahead < 0 or not 0 <= self.by_next <= 1 or not 0 <= self.by_target <= 1:
            raise UsageError("a level needs a lookahead of at least 0 and acceptances from 0 to 1")


class Step(NamedTuple):
    """Tokens for every chain, in a time that is a line over the chains on a device."""

    tokens: int
    time: LinearCost


class Drafter(Protocol):
    """What a draft device runs: one model, or anything else that drafts."""

    def next(self) -> Step: ...


def drafter(levels: Sequence[Level], random: Random) -> Drafter:
    """Return the drafter of `levels`, smallest first. Raises UsageError if a level cannot draft for the next."""
    for level in levels[:-1]:
        if level.lookahead < 1:
            raise UsageError("every level of a cascade but the last needs a lookahead of at least 1")
    if len(levels) == 1:
        return _Model(levels[0].step)
    return _Cascade(drafter(levels[:-1], random), levels[-2], levels[-1].step, random)


class _Model:
    def __init__(self, step: LinearCost) -> None:
        self._step = Step(1, step)

    def next(self) -> Step:
        return self._step


class _Cascade:
    """A cascade. All chains of a device advance alike: their inner rounds are drawn once."""

    def __init__(self, inner: Drafter, small: Level, verify: LinearCost, random: Random) -> None:
        self._inner, self._lookahead, self._random = inner, small.lookahead, random
        self._law = AcceptanceLaw((small.by_next,))
        self._verify = LinearCost(verify.fixed, verify.each * (small.lookahead + 1))

    def next(self) -> Step:
        drafted, time = 0, self._verify
        while drafted < self._lookahead:
            step = self._inner.next()
            drafted += step.tokens
            time = LinearCost(time.fixed + step.time.fixed, time.each + step.time.each)
        return Step(self._law.accepted(self._random.random(), self._lookahead) + 1, time)


def rounds_to(tokens: int, law: AcceptanceLaw, lookahead: int) -> float:
    """Return the expected rounds of accepted + 1 tokens until there are `tokens`, by first-step analysis."""
    shares = law.shares(lookahead)
    needed = [0.0]
    for wanted in range(1, tokens + 1):
        needed.append(1 + sum(share * needed[max(0, wanted - k - 1)] for k, share in enumerate(shares)))
    return needed[tokens]


def draft_seconds(levels: Sequence[Level], tokens: int, chains: int = 1) -> float:
    """Return the expected seconds for `tokens` tokens of the last level, for so many chains on one device."""
    *smaller, last = levels
    if not smaller:
        return tokens * last.step.at(chains)
    small = smaller[-1]
    inner = draft_seconds(smaller, small.lookahead, chains) + last.step.at(chains * (small.lookahead + 1))
    # The time of an inner round does not depend on what it yields, so the means multiply.
    return rounds_to(tokens, AcceptanceLaw((small.by_next,)), small.lookahead) * inner


class Prediction(NamedTuple):
    """The levels `first`..`last` (from 0): seconds for K draft tokens, and tokens per second of `sd` with them."""

    first: int
    last: int
    draft_s: float
    tokens_per_second: float


def cascade_pays(
    levels: Sequence[Level], verify: LinearCost, lookahead: int, overhead: float = 0.0
) -> list[Prediction]:
    """Predict ordinary speculative decoding at batch 1 with every run of neighbouring `levels`.

    That is each prefix of the list and, to tell whether smaller levels pay, each suffix of a prefix. `lookahead` is the
    target's K."""
    if not levels or lookahead < 1:
        raise UsageError("a cascade needs a level and a lookahead of at least 1")
    found = []
    round_s = verify.at(lookahead + 1) + overhead
    for last in range(len(levels)):
        tokens = AcceptanceLaw((levels[last].by_target,)).tokens(lookahead)
        for first in range(last + 1):
            seconds = draft_seconds(levels[first : last + 1], lookahead)
            speed = speedup_sd(tokens, seconds / round_s) / round_s
            found.append(Prediction(first, last, seconds, speed))
    return found
