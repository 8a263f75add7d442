"""What the evaluation counts, against an enumeration of everything that may happen or against rounds by hand."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from ssd.law import Law
from ssd.speculation.noise import NoiseCache
from tools.distill.evaluation import Answer, Tally, _coupled, _rejection, agreement
from tools.distill.shards import Conversation

VOCAB = 7


def enumerated(p: Tensor, q: Tensor, fan_out: int) -> float:
    """P(the bonus token was prepared for | the draft's token was rejected)."""
    rejected, hit = 0.0, 0.0
    residual = (p - q).clamp_min(0) / (p - q).clamp_min(0).sum()
    for token in range(VOCAB):
        weight = float(q[token]) * max(0.0, 1 - float(p[token]) / float(q[token]))
        rejected += weight
        prepared = [t for t in torch.argsort(q, descending=True).tolist() if t != token][:fan_out]
        hit += weight * float(residual[prepared].sum())
    return hit / rejected


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_hits_after_a_rejection(case: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(case)
    target, draft = (torch.randn(3, VOCAB, generator=generator) * 2 for _ in range(2))
    p, q = (torch.softmax(logits[1] / temperature, -1) for logits in (target, draft))
    overlap = float(torch.minimum(p, q).sum())
    seed = next(seed for seed in range(100) if Random(seed).random() >= overlap)  # the one draft token is rejected
    tally = Tally(tried=[0], accepted=[0], hits=dict.fromkeys((1, 2, 3), 0.0))
    _rejection(tally, Answer(Conversation([0, 1, 2, 3], 1), Law(temperature, seed=seed)), [draft], target, 1)
    assert (tally.rounds, tally.accepted) == (1, [0])
    for fan_out, hits in tally.hits.items():
        assert hits == pytest.approx(enumerated(p, q, fan_out), abs=1e-5)


def test_hits_after_full_acceptance() -> None:
    """Nothing is excluded then: the mass of the draft's best tokens under the target's distribution."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(3, VOCAB, generator=generator)
    draft = target.clone()
    draft[2] = torch.randn(VOCAB, generator=generator)
    tally = Tally(tried=[0], accepted=[0], hits=dict.fromkeys((1, 3), 0.0))
    _rejection(tally, Answer(Conversation([0, 1, 2, 3], 1), Law(1.0, seed=0)), [draft], target, 1)
    assert (tally.rounds, tally.accepted) == (1, [1])
    p = torch.softmax(target[2], -1)
    for fan_out, hits in tally.hits.items():
        assert hits == pytest.approx(float(p[torch.topk(draft[2], fan_out).indices].sum()), abs=1e-5)


def test_rates_by_position_and_rank() -> None:
    """Greedy, K = 2. The answer 1 2 3 4 5 is given after one token; the draft's order at each place is by hand."""
    orders = [[0], [2, 3], [6, 3], [5, 6, 4], [5]]  # its best tokens in the place of 1, 2, 3, 4, 5
    logits = torch.zeros(5, VOCAB)
    for row, order in zip(logits, orders, strict=True):
        for rank, token in enumerate(order):
            row[token] = 10.0 - rank
    tally = Tally(tried=[0, 0], accepted=[0, 0], hits=dict.fromkeys((1, 2, 3), 0.0))
    _coupled(tally, Answer(Conversation([0, 1, 2, 3, 4, 5], 1), Law(0.0)), [logits], NoiseCache(VOCAB), 2)
    # 2 is accepted, 3 is not: after the wrong 6 it is the first candidate.
    assert (tally.rounds, tally.tried, tally.accepted) == (1, [1, 1], [1, 0])
    assert tally.hits == {1: 1.0, 2: 1.0, 3: 1.0}
    other = Tally(3, 6, [3, 1], [1, 1], {1: 0.0, 2: 1.0, 3: 1.0})
    found = agreement([tally, other])
    assert found.acceptance == ((0.5, 4), (0.5, 2))
    assert found.hits == ((0.25, 4), (0.3333, 3), (0.0, 2))


def test_what_was_never_tried_has_no_rate() -> None:
    found = agreement([Tally(2, 2, [2, 0], [0, 0], {1: 2.0, 2: 2.0})])
    assert (found.acceptance, found.hits) == (((0.0, 2),), ((1.0, 2),))
