"""How likely each candidate is the target's next token: scores turned into probabilities by what came true before."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ssd.speculation.ngram import Copied
from ssd.tuning.learner import Mean

# Log-odds of the predictions of which a calibration learns how often they came true: 1 apart, for `_place`.
_POINTS = range(-6, 6)
# How many samples a first belief counts as, and how fast old samples fade.
_SAMPLES, _SMOOTHING = 16, 0.005
# What a repetition of so many tokens is worth at first: (the draft's best candidate is another token, is this one).
_COPIED = {2: (0.3, 0.75), 3: (0.4, 0.85), 4: (0.45, 0.85), 5: (0.55, 0.9), 6: (0.7, 0.9)}


class Node(NamedTuple):
    """What is known of the token after some trunk tokens.

    `candidates` are ranked by `scores`, best first: logits at temperature 0, else what `sampling.perturbed` makes of
    them, or under the ratio rule logits over temperature. `in_flight` is the trunk token there, if the target verifies
    one. `copied` is what followed the same words earlier in the text."""

    candidates: Sequence[int]
    scores: Sequence[float]
    in_flight: int | None
    copied: Copied | None
    temperature: float
    ratio_rule: bool

    @property
    def first(self) -> int | None:
        """The token that decides first: the draft's best, or under the ratio rule the one that is tested."""
        return self.in_flight if self.ratio_rule else self.candidates[0]


class Calibration:
    """Turns predicted probabilities into frequencies: straight lines between twelve points in log-odds.

    Predictions are believed at first. Below the lowest point frequencies fall in proportion."""

    def __init__(self) -> None:
        self._rates = [_probability(point) for point in _POINTS]
        self._counts = [float(_SAMPLES)] * len(_POINTS)

    def __call__(self, predicted: float) -> float:
        """How often such a prediction comes true."""
        if predicted <= _LEAST:
            return self._rates[0] * predicted / _LEAST
        index, share = _place(predicted)
        return self._rates[index] * (1 - share) + self._rates[index + 1] * share

    def note(self, predicted: float, true: bool) -> None:
        """Learn whether a prediction above the lowest point came true. The points beside it share the sample."""
        index, share = _place(predicted)
        for point, weight in ((index, 1 - share), (index + 1, share)):
            self._counts[point] += weight
            step = weight * max(_SMOOTHING, 1 / self._counts[point])
            self._rates[point] += step * (true - self._rates[point])


def _probability(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


_LEAST, _MOST = _probability(_POINTS[0]), _probability(_POINTS[-1])


def _place(predicted: float) -> tuple[int, float]:
    """The point at or below a prediction, not the last one, and the share of the way to the next point."""
    predicted = min(max(predicted, _LEAST), _MOST)
    above = math.log(predicted / (1 - predicted)) - _POINTS[0]
    index = min(len(_POINTS) - 2, max(0, int(above)))
    return index, above - index


class _Law:
    """What is learned of one way to sample: of the token that decides first, of the others, of repetitions."""

    def __init__(self) -> None:
        self.first, self.others = Calibration(), Calibration()
        self.copied = {
            (matching, agrees): Mean(rate, _SMOOTHING, _SAMPLES)
            for matching, rates in _COPIED.items()
            for agrees, rate in enumerate(rates)
        }


class Chances:
    """Learns from all sequences of a draft. Greedy, coupled and rejection sampling are learned apart."""

    def __init__(self) -> None:
        self._laws = defaultdict[tuple[bool, bool], _Law](_Law)

    def of(self, node: Node) -> dict[int, float]:
        """The chance of each token to come next: of the one in flight to be accepted, of others to be the bonus.

        The first token is right with its calibrated share of the softmax over the candidates; if it is wrong, each
        other one is right with its calibrated share of the rest."""
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
        """The chance of each bonus token there, where all trunk tokens before are right with the chance `reached`; and
        the chance that the one in flight is right as well, `acceptance` where it is no candidate."""
        likely = self.of(node)
        # A token of the target's own need not be a candidate.
        accepted = acceptance if node.in_flight is None else likely.pop(node.in_flight, acceptance)
        return {token: reached * chance for token, chance in likely.items() if chance > 0}, reached * accepted

    def learn(self, node: Node, token: int) -> None:
        """Note which token came after all."""
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

    def _law(self, node: Node) -> _Law:
        return self._laws[node.temperature > 0, node.ratio_rule]


def _shares(node: Node) -> dict[int, float]:
    """Softmax over the candidates' scores. Nothing for scores that are no numbers."""
    best = node.scores[0]
    weights = [math.exp(score - best) for score in node.scores] if math.isfinite(best) else []
    total = sum(weights)
    return {token: weight / total for token, weight in zip(node.candidates, weights, strict=False)}


def _split(shares: dict[int, float], first: int | None) -> tuple[float, dict[int, float]]:
    """The share of the first token, and those of the others once it is wrong."""
    share = 0.0 if first is None else shares.pop(first, 0.0)
    rest = max(1 - share, 1e-9)
    return share, {token: other / rest for token, other in shares.items()}


def _kind(node: Node) -> tuple[int, bool]:
    """What a repetition's chance depends on: how long it is, and whether the draft says the same."""
    assert node.copied is not None
    return node.copied.matching, node.copied.token == node.candidates[0]


def _raise(chances: dict[int, float], token: int, chance: float) -> None:
    """Give a token at least this chance, at the expense of all others."""
    before = chances.get(token, 0.0)
    if chance > before:
        for other in chances:
            chances[other] *= (1 - chance) / (1 - before)
        chances[token] = chance
