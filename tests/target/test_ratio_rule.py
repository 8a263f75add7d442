"""The verifier under the ratio rule, with drafts drawn as the draft process draws them: all random streams together."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from ssd.execution.batch import Row
from ssd.execution.pages import PagePool, PageTable
from ssd.params import Speculation
from ssd.speculation.noise import Stream, gumbel, stream_seed
from ssd.speculation.sampling import argmax
from ssd.target.scheduler import Scheduled
from ssd.target.sequence import Sequence
from ssd.target.verifier import Verifier
from tests.target.scripted import submit

VOCAB, COUNT, POSITION = 6, 12_000, 3
TARGET = torch.tensor([[0.9, -0.3, 1.4, 0.2, -1.0, 0.6], [0.1, 1.1, -0.7, 0.8, 0.3, -0.2]])


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["near", "opposite"])
def test_chi_square_of_what_is_emitted(sign: float) -> None:
    """The first token follows the target's law whatever the draft's is; so does the next one where it was accepted."""
    verifier, table = Verifier(VOCAB, torch.device("cpu")), PageTable(PagePool(4, 4))
    q = torch.softmax(sign * TARGET[0] + torch.linspace(0.4, -0.4, VOCAB), -1)
    asked = Speculation("ssd", 1, (2,), sampler="rejection")
    batch = []
    for seed in range(COUNT):
        drafted = argmax((q.log() + gumbel(stream_seed(seed, Stream.DRAFT), POSITION, VOCAB))[None])[0]
        sent = submit(seed, [1, 2, 3], temperature=1.0, seed=seed, speculation=asked)
        sequence = Sequence.from_submit(sent, asked, 64, table, 0.0)
        sequence.laws = q[None]
        batch.append(Scheduled(sequence, Row([3, drafted], POSITION - 1, [0], outputs=2), 1))
    emitted = verifier.samples(TARGET.repeat(COUNT, 1), batch)
    first = torch.bincount(torch.tensor([tokens[0] for tokens in emitted]), minlength=VOCAB)
    second = torch.bincount(torch.tensor([tokens[1] for tokens in emitted if len(tokens) == 2]), minlength=VOCAB)
    for found, logits in ((first, TARGET[0]), (second, TARGET[1])):
        expected = torch.softmax(logits.double(), -1) * found.sum()
        assert stats.chisquare(found, expected, sum_check=False).pvalue > 1e-6
    assert 0.1 * COUNT < second.sum() < 0.95 * COUNT
