"""Turns candidates' scores into probabilities of the target's next token, calibrated by outcomes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ssd.speculation.ngram import LONGEST, SHORTEST, Copied
from ssd.tuning.estimates import Mean

# Points of a calibration, in log-odds of the prediction; `_place` needs them 1 apart.
_POINTS = range(-6, 6)
# Samples that an initial value counts as, and the smoothing.
_SAMPLES, _SMOOTHING = 16, 0.005
# Initial probability that the shortest repetition continues, and that of each token more: if the draft's best candidate
# differs, and if it agrees.
_COPIED, _LONGER = (0.3, 0.75), (0.1, 0.04)


class Node(NamedTuple):
    """The draft's knowledge of the token after a number of trunk tokens.

    `scores` of `candidates`, best first: logits at temperature 0, else over temperature, with the target's noise if the
    rule `shares_noise`. `in_flight` is the trunk token being verified there. `copied` is the token of prompt lookup."""

    candidates: Sequence[int]
    scores: Sequence[float]
    in_flight: int | None
    copied: Copied | None
    temperature: float
    shares_noise: bool

    @property
    def first(self) -> int | None:
        """Return the draft's best token; without shared noise the tested one."""
        return self.candidates[0] if self.shares_noise else self.in_flight


class Calibration:
    """Maps predicted probabilities to frequencies, linearly between twelve points in log-odds."""

    def __init__(self) -> None:
        self.rates = [_probability(point) for point in _POINTS]
        self._counts = [float(_SAMPLES)] * len(_POINTS)

    def __call__(self, predicted: float) -> float:
        if predicted <= _LEAST:
            return self.rates[0] * predicted / _LEAST
        index, share = _place(predicted)
        return self.rates[index] * (1 - share) + self.rates[index + 1] * share

    def note(self, predicted: float, true: bool) -> None:
        """Learn if a prediction came true; the two points beside it share the sample."""
        index, share = _place(predicted)
        for point, weight in ((index, 1 - share), (index + 1, share)):
            self._counts[point] += weight
            step = weight * max(_SMOOTHING, 1 / self._counts[point])
            self.rates[point] += step * (true - self.rates[point])


def _probability(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


_LEAST, _MOST = _probability(_POINTS[0]), _probability(_POINTS[-1])


def _place(predicted: float) -> tuple[int, float]:
    predicted = min(max(predicted, _LEAST), _MOST)
    above = math.log(predicted / (1 - predicted)) - _POINTS[0]
    index = min(len(_POINTS) - 2, max(0, int(above)))
    return index, above - index


class _Calibrations:
    """The calibrations of one way to sample: of the first token, of others, of repetitions."""

    def __init__(self) -> None:
        self.first, self.others = Calibration(), Calibration()
        self.copied = {
            (matching, agrees): Mean(_COPIED[agrees] + _LONGER[agrees] * (matching - SHORTEST), _SMOOTHING, _SAMPLES)
            for matching in range(SHORTEST, LONGEST + 1)
            for agrees in (False, True)
        }


class Chances:
    """Learns from all sequences of a draft: greedy ones, others with shared noise, and the rest apart."""

    def __init__(self) -> None:
        self._laws = defaultdict[tuple[bool, bool], _Calibrations](_Calibrations)

    def of(self, node: Node) -> dict[int, float]:
        """Return each token's probability to come next.

        The first token has its calibrated share of the softmax over the candidates, each other token its calibrated
        share of the rest."""
        law = self._law(node)
        share, others = _split(_shares(node), node.first)
        found = {} if node.first is None else {node.first: law.first(share)}
        rest = 1 - sum(found.values())
        for token, share in others.items():
            found[token] = rest * law.others(share)
        if node.copied is not None:
            _raise(found, node.copied.token, law.copied[_kind(node)].value)
        return found

    def outcomes(self, node: Node, reached: float, acceptance: float) -> tuple[dict[int, float], float]:
        """Return the probability of each bonus token at a node, and that of reaching the next node.

        `reached`: probability that all trunk tokens before are right. `acceptance`: of the token in flight, if no
        candidate."""
        likely = self.of(node)
        # A token in flight that the target proposed itself need not be a candidate.
        accepted = acceptance if node.in_flight is None else likely.pop(node.in_flight, acceptance)
        return {token: reached * chance for token, chance in likely.items() if chance > 0}, reached * accepted

    def learn(self, node: Node, token: int) -> None:
        law, first = self._law(node), node.first
        share, others = _split(_shares(node), first)
        if first is not None:
            law.first.note(share, first == token)
        if first != token:
            for candidate, share in others.items():
                if share > _LEAST:
                    law.others.note(share, candidate == token)
        if node.copied is not None:
            law.copied[_kind(node)].note(float(node.copied.token == token))

    def rates(self, temperature: float, shares_noise: bool) -> Sequence[float]:
        """Return how often first tokens are right, at log-odds from -6 to 5; later learning changes the list."""
        return self._laws[temperature > 0, shares_noise].first.rates

    def _law(self, node: Node) -> _Calibrations:
        return self._laws[node.temperature > 0, node.shares_noise]


def _shares(node: Node) -> dict[int, float]:
    best = node.scores[0]
    weights = [math.exp(score - best) for score in node.scores] if math.isfinite(best) else []
    total = sum(weights)
    return {token: weight / total for token, weight in zip(node.candidates, weights, strict=False)}


def _split(shares: dict[int, float], first: int | None) -> tuple[float, dict[int, float]]:
    share = 0.0 if first is None else shares.pop(first, 0.0)
    rest = max(1 - share, 1e-9)
    return share, {token: other / rest for token, other in shares.items()}


def _kind(node: Node) -> tuple[int, bool]:
    assert node.copied is not None
    return node.copied.matching, node.copied.token == node.candidates[0]


def _raise(chances: dict[int, float], token: int, chance: float) -> None:
    before = chances.get(token, 0.0)
    if chance > before:
        for other in chances:
            chances[other] *= (1 - chance) / (1 - before)
        chances[token] = chance
