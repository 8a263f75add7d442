"""Pairs that agree as often as stated: the arithmetic, and what the engine's own models say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ssd.config.emulation import StatedAgreement
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import check_pair
from ssd.plugins.emulation.agreement import decoys
from ssd.plugins.emulation.chains import VOCABULARY, logits, pair, write_pair
from ssd.speculation.noise import gumbels_of, keys_of

CPU = torch.device("cpu")
LLAMA, WIDE = StatedAgreement(0.888, 0.85, 7, 3), StatedAgreement(0.6, 0.45, 4, 1)


@pytest.mark.parametrize("asked", [LLAMA, WIDE])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_wrong_tokens_stand_above_the_right_one_as_often_as_stated(asked: StatedAgreement, temperature: float) -> None:
    """After every token once, greedily and with noise that both share: to the rounding of 1,024 tokens."""
    target, draft = (logits(states) for states in pair(asked))
    if temperature:
        noise = gumbels_of(keys_of([(5, position) for position in range(VOCABULARY)]), VOCABULARY)
        target, draft = (scores / temperature + noise for scores in (target, draft))
    right = target.argmax(-1, keepdim=True)
    above = (draft > draft.gather(1, right)).sum(-1)
    for number, share in enumerate(decoys(asked)):
        assert float((above > number).double().mean()) == pytest.approx(share, abs=2 / VOCABULARY)


def test_sampled_texts_visit_every_token_equally_often() -> None:
    law = torch.softmax(logits(pair(LLAMA)[0]).double(), dim=-1)
    assert torch.allclose(law.sum(0), torch.ones(VOCABULARY).double())
    assert law.max(-1).values.mean() == pytest.approx(1 - math.exp(-1), abs=1e-6)


def test_the_ratio_rule_accepts_as_often() -> None:
    p, q = (torch.softmax(logits(states).double(), dim=-1) for states in pair(WIDE))
    assert float(torch.minimum(p, q).sum(-1).mean()) == pytest.approx(WIDE.acceptance, abs=1 / VOCABULARY)


def test_the_engines_own_models_say_the_same(tmp_path: Path) -> None:
    written = write_pair(tmp_path / "pair", LLAMA)
    check_pair(inspect(written.target), inspect(written.draft))
    for directory, states in zip(written, pair(LLAMA), strict=True):
        model = registry.load(inspect(directory), torch.float32, CPU, 64)
        found = Runner(model, 4, 16).forward([Row(list(range(40)), 0, range(4), 40)])
        # Every token as if it stood alone, in whatever place: attention adds nothing.
        assert torch.allclose(found, logits(states)[:40], atol=1e-3)


def test_greedy_texts_go_through_the_whole_vocabulary() -> None:
    following = logits(pair(LLAMA)[0]).argmax(-1).tolist()
    seen, token = set[int](), 0
    while token not in seen:
        seen.add(token)
        token = following[token]
    assert len(seen) == VOCABULARY and token == 0


def test_every_token_is_a_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_pair(tmp_path / "pair", LLAMA).target)
    ids = [0, 17, VOCABULARY - 1]
    assert tokenizer.decode(ids) == f"t0 t17 t{VOCABULARY - 1}"
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
