"""Pairs that agree as often as stated: the arithmetic, and what the engine's own models say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd.emulation.chains import VOCABULARY, _coupled, pair, write_pair
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.models import registry
from ssd.models.checkpoint import check_pair, inspect
from ssd.speculation.noise import gumbel, gumbels

CPU = torch.device("cpu")


def test_the_chance_of_one_choice_under_shared_noise_is_exact() -> None:
    """Against two closed cases and a count of 4,000 draws (five standard deviations)."""
    laws = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.25, 0.25, 0.5]], dtype=torch.float64)
    assert _coupled(laws, laws).tolist() == pytest.approx([1.0, 1.0, 1.0])
    p, q = 0.7, 0.4  # of two tokens: both races are won by the first, or by the second
    two = torch.tensor([[p, 1 - p]]).double(), torch.tensor([[q, 1 - q]]).double()
    assert float(_coupled(*two)) == pytest.approx(1 / (1 + (1 - q) / q) + 1 / (1 + p / (1 - p)))
    first, second = laws[:1], laws[1:2]
    noise = torch.stack([gumbel(1, position, 3) for position in range(4000)])
    same = ((first.log() + noise).argmax(-1) == (second.log() + noise).argmax(-1)).double().mean()
    assert float(_coupled(first, second)) == pytest.approx(float(same), abs=5 * (0.25 / 4000) ** 0.5)


@pytest.mark.parametrize(("acceptance", "temperature"), [(0.888, 0.0), (0.6, 0.0), (0.771, 1.0)])
def test_a_pair_agrees_as_often_as_stated(tmp_path: Path, acceptance: float, temperature: float) -> None:
    written = write_pair(tmp_path / "pair", acceptance, temperature)
    assert written.acceptance == pytest.approx(acceptance, abs=2 / VOCABULARY)
    target, draft = inspect(written.target), inspect(written.draft)
    check_pair(target, draft)
    for directory, chain in zip(written[:2], pair(acceptance, temperature), strict=True):
        model = registry.load(inspect(directory), torch.float32, CPU, 64)
        logits = Runner(model, 4, 16).forward([Row(list(range(40)), 0, range(4), 40)])
        # Every token as if it stood alone, in whatever place: attention adds nothing.
        assert torch.allclose(logits, chain.logits[:40], atol=1e-4)


def test_texts_under_shared_noise_agree_as_often_as_stated() -> None:
    """3,000 tokens of one seed; five standard deviations."""
    target, draft = (chain.logits for chain in pair(0.771, 1.0))
    token, same, count = 0, 0, 3000
    for noise in gumbels([(5, position) for position in range(count)], VOCABULARY):
        guess, token = int((draft[token] + noise).argmax()), int((target[token] + noise).argmax())
        same += guess == token
    assert same / count == pytest.approx(0.771, abs=5 * (0.771 * 0.229 / count) ** 0.5)


def test_greedy_texts_go_through_the_whole_vocabulary() -> None:
    following = pair(1.0, 0.0)[0].logits.argmax(-1).tolist()
    seen, token = set[int](), 0
    while token not in seen:
        seen.add(token)
        token = following[token]
    assert len(seen) == VOCABULARY and token == 0


@pytest.mark.parametrize(("acceptance", "temperature"), [(1.01, 0.0), (0.0, 1.0)])
def test_a_rate_that_cannot_be_is_refused(acceptance: float, temperature: float) -> None:
    with pytest.raises(UsageError, match="no draft is accepted at a rate of"):
        pair(acceptance, temperature)


def test_every_token_is_a_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_pair(tmp_path / "pair", 1.0, 0.0).target)
    ids = [0, 17, VOCABULARY - 1]
    assert tokenizer.decode(ids) == f"t0 t17 t{VOCABULARY - 1}"
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
