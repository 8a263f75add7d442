"""The sampler under the ratio rule, with drafts drawn as the draft process draws them: all random streams together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats

from ssd.config.params import SamplingParams, Speculation
from ssd.execution.batch import Row
from ssd.execution.pages import PagePool, PageTable
from ssd.speculation.noise import Stream, gumbel, stream_seed
from ssd.speculation.sampling import argmax
from ssd.verifier.scheduler import Scheduled
from ssd.verifier.sequence import Sequence
from ssd.verifier.verification import Sampler
from tests.exactness.plain import adjust_by
from tests.verifier.scripted import submit

VOCAB = 6
PROMPT = [1, 2, 3]
TARGET = torch.tensor([[0.9, -0.3, 1.4, 0.2, -1.0, 0.6], [0.1, 1.1, -0.7, 0.8, 0.3, -0.2]])


def emitted(sign: float, count: int, **params: Any) -> list[list[int]]:
    """Of `count` verifications of one draft token each, drawn from a law near the target's or opposite to it."""
    sampler, table = Sampler(VOCAB, torch.device("cpu")), PageTable(PagePool(4, 4))
    q = torch.softmax(sign * TARGET[0] + torch.linspace(0.4, -0.4, VOCAB), -1)
    asked = Speculation("ssd", 1, (2,), "jit", sampler="rejection")
    batch = []
    for seed in range(count):
        drafted = argmax((q.log() + gumbel(stream_seed(seed, Stream.DRAFT), len(PROMPT), VOCAB))[None])[0]
        sent = submit(seed, PROMPT, temperature=1.0, seed=seed, speculation=asked, **params)
        sequence = Sequence(sent, asked, 64, table, 0.0)
        sequence.draft_probs = q[None]
        batch.append(Scheduled(sequence, Row([PROMPT[-1], drafted], len(PROMPT) - 1, [0], outputs=2), 1))
    outcomes = sampler.samples(TARGET.repeat(count, 1), batch)[1]
    return [[*part.draft[:accepted], token] for part, (accepted, token) in zip(batch, outcomes, strict=True)]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["near", "opposite"])
def test_chi_square_of_what_is_emitted(sign: float) -> None:
    """The first token follows the target's law whatever the draft's is; so does the next one where it was accepted."""
    count = 12_000
    tokens = emitted(sign, count)
    first = torch.bincount(torch.tensor([row[0] for row in tokens]), minlength=VOCAB)
    second = torch.bincount(torch.tensor([row[1] for row in tokens if len(row) == 2]), minlength=VOCAB)
    for found, logits in ((first, TARGET[0]), (second, TARGET[1])):
        expected = torch.softmax(logits.double(), -1) * found.sum()
        assert stats.chisquare(found, expected, sum_check=False).pvalue > 1e-6
    assert 0.1 * count < second.sum() < 0.95 * count


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["near", "opposite"])
def test_chi_square_where_logits_are_adjusted(sign: float) -> None:
    """The draft knows nothing of it. The law of the second token depends on which one was accepted before it."""
    count = 6_000
    params: dict[str, Any] = {
        "repetition_penalty": 1.8,
        "presence_penalty": 1.2,
        "frequency_penalty": 0.7,
        "logit_bias": {0: 0.5, 2: -1.0, 4: 1.5},
    }
    tokens = emitted(sign, count, **params)
    adjust = adjust_by(SamplingParams(**params), len(PROMPT))

    def law(row: int, text: list[int]) -> torch.Tensor:
        return torch.softmax(adjust(TARGET[row : row + 1].double(), text)[0], -1)

    first = torch.bincount(torch.tensor([row[0] for row in tokens]), minlength=VOCAB)
    assert stats.chisquare(first, law(0, PROMPT) * count, sum_check=False).pvalue > 1e-6
    pairs = torch.zeros(VOCAB, VOCAB)
    for row in tokens:
        if len(row) == 2:
            pairs[row[0], row[1]] += 1
    expected = torch.stack([law(1, [*PROMPT, x]) * pairs[x].sum() for x in range(VOCAB)])
    assert stats.chisquare(pairs.flatten(), expected.flatten(), ddof=VOCAB - 1, sum_check=False).pvalue > 1e-6
    assert 0.1 * count < pairs.sum() < 0.95 * count
