"""What can be stated of a draft: its arithmetic, and what the engine's own models of such a pair say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ssd.config.emulation import StatedAgreement
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import check_pair
from ssd.plugins.bench.emulation.agreement import MOST_DECOYS, acceptance_length, agreement_of, decoys
from ssd.plugins.bench.emulation.chains import VOCABULARY, logits, pair, write_pair
from ssd.speculation.noise import gumbels_of, keys_of


@pytest.mark.parametrize(
    "asked",
    [StatedAgreement(0.888, 0.85, 7, 3), StatedAgreement(0.6, 0.45, 7, 1), StatedAgreement(0.53, 0.3, 4, 16)],
    ids=str,
)
def test_the_guesses_hold_the_right_token_as_often_as_stated(asked: StatedAgreement) -> None:
    beyond = [*decoys(asked), decoys(asked)[-1]]  # more than d wrong ones stand above the right one
    assert beyond[0] == pytest.approx(1 - asked.acceptance) and sorted(beyond, reverse=True) == beyond
    refused = sum(
        asked.acceptance**k * beyond[asked.fan_out] for k in range(asked.lookahead)
    )  # k are accepted, and the one after them, which no guess repeats, is not
    full = asked.acceptance**asked.lookahead * beyond[asked.fan_out - 1]
    assert 1 - refused - full == pytest.approx(asked.hit_rate, abs=1e-6)


def test_misses_fall_with_the_fan_out_as_in_the_paper() -> None:
    beyond = decoys(StatedAgreement(0.7, 0.8, 4, 3))
    assert beyond[8] / beyond[2] == pytest.approx(4**-0.6)


def test_a_length_is_that_of_a_round_and_hits_are_the_papers_where_nothing_is_said() -> None:
    asked = agreement_of(3.0, None, 4, 3)
    assert acceptance_length(asked) == pytest.approx(3.0)
    assert asked.hit_rate == pytest.approx(1 - 0.23 * 3**-0.6)
    always = agreement_of(5.0, None, 4, 1)  # right, and a hit
    assert always == StatedAgreement(pytest.approx(1.0), pytest.approx(1.0), 4, 1)
    assert agreement_of(1.0, 0.0, 4, 1).acceptance == pytest.approx(0.0, abs=1e-9)
    assert min(decoys(agreement_of(1.0, 0.0, 4, 16))) == pytest.approx(1.0) and len(decoys(asked)) == MOST_DECOYS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((5.5, None, 4, 3), "an acceptance length of 5.5 cannot be: with K = 4 it is from 1 to 5"),
        ((0.5, None, 4, 3), "an acceptance length of 0.5"),
        ((4.5, 0.3, 4, 3), "a hit rate of 0.3 cannot be: .* K = 4 and fan-out 3 it is from 0.7"),
        ((2.0, 1.0, 4, 1), "a hit rate of 1 cannot be"),  # one guess, which is wrong where all were right but the last
    ],
)
def test_what_cannot_be_is_refused(given: tuple[float, float | None, int, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        agreement_of(*given)


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
