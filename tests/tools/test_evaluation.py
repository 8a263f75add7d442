"""What the evaluation counts under the ratio rule, against an enumeration of everything that may happen."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from ssd.speculation.sampling import Law
from tools.distill.evaluation import Answer, Tally, _rejection
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
