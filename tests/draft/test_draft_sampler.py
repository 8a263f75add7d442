"""Guesses under the ratio rule: tokens are drawn from the reported draft probabilities, which are Saguaro's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

from ssd.config.params import Sampler, Speculation
from ssd.draft.drafter import DraftSampler, LogitRows
from ssd.draft.tree import Tree
from ssd.draft.vocabulary import DraftVocabulary
from ssd.execution.pages import PagePool, PageTable
from ssd.ipc.messages import Admit
from ssd.law import Law
from ssd.speculation.noise import NoiseCache, Stream, gumbel, stream_seed

LOGITS = torch.linspace(-2, 2, 12).sin().mul(2)
TEMPERATURE, COUNT = 0.8, 20_000


def tree(c: float, seed: int = 7, top_k: int = 0, sampler: Sampler = "rejection") -> Tree:
    speculation = Speculation("ssd", 2, (3, 2, 1), "jit", sampler=sampler, saguaro_c=c)
    admit = Admit(0, 0, 0, [1], Law(TEMPERATURE, top_k, seed=seed), speculation)
    return Tree(admit, 1, PageTable(PagePool(4, 4)))


def sampler() -> DraftSampler:
    """Of a draft that predicts all of 12 ids."""
    model: Any = SimpleNamespace(shape=SimpleNamespace(outputs=12), device=torch.device("cpu"))
    return DraftSampler(DraftVocabulary(model, 12, NoiseCache(12)))


def expected(c: float, fan_out: int) -> torch.Tensor:
    weights = (LOGITS.double() / TEMPERATURE).exp()
    weights[torch.topk(LOGITS, fan_out).indices] *= c
    return weights / weights.sum()


@pytest.mark.parametrize("c", [1.0, 0.3])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_what_is_drawn_follows_what_is_reported(c: float, node: int) -> None:
    place = LogitRows(tree(c), range(COUNT), [node] * COUNT)
    guesses = sampler()(LOGITS.expand(COUNT, -1), [place])
    law = expected(c, (3, 2, 1)[node])
    for guess in guesses[:5]:
        assert guess.draft_probs is not None
        assert torch.allclose(guess.draft_probs.double(), law, rtol=1e-5, atol=0)
    drawn = torch.bincount(torch.tensor([guess.token for guess in guesses]), minlength=12)
    assert stats.chisquare(drawn, law * COUNT, sum_check=False).pvalue > 1e-6


def test_what_is_drawn_is_independent_of_the_targets_draws() -> None:
    """With shared noise the ratio rule would be biased."""
    guesses = sampler()(LOGITS.expand(50, -1), [LogitRows(tree(0.3), range(50), [0] * 50)])
    own = stream_seed(7, Stream.DRAFT)
    expected = [
        int((guess.draft_probs.log() + gumbel(own, position, 12)).argmax()) for position, guess in enumerate(guesses)
    ]
    assert [guess.token for guess in guesses] == expected
    assert len({stream_seed(7, stream) for stream in Stream}) == len(Stream)


def test_candidates_are_the_likeliest_whatever_was_drawn() -> None:
    place = LogitRows(tree(0.3), range(50), [0] * 50)
    guesses = sampler()(LOGITS.expand(50, -1), [place])
    best = torch.argsort(LOGITS, descending=True).tolist()[:4]  # F_0 for full acceptance of nothing, and one excluded
    assert all(guess.candidates == best for guess in guesses)
    assert len({guess.token for guess in guesses}) > 3


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_what_filters_leave_out_is_no_candidate(rule: Sampler) -> None:
    place = LogitRows(tree(1.0, top_k=2, sampler=rule), range(50), [0] * 50)
    best = set(torch.argsort(LOGITS, descending=True).tolist()[:2])
    guesses = sampler()(LOGITS.expand(50, -1), [place])
    assert all(set(guess.candidates) == best and guess.token in best for guess in guesses)


def test_logits_that_are_no_numbers_give_a_law_that_is_none() -> None:
    place = LogitRows(tree(1.0), range(1), [0])
    (guess,) = sampler()(torch.full((1, 12), torch.nan), [place])
    assert 0 <= guess.token < 12 and guess.draft_probs is not None and bool(guess.draft_probs.isnan().all())
