"""Penalties, biases and minimum lengths against their definition, token by token."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd.speculation.adjustment import Adjustment, Written, adjusted

VOCAB = 12
ids = st.lists(st.integers(0, VOCAB - 1), max_size=9)
adjustments = st.builds(
    Adjustment,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6, -1.5]),
    frequency=st.sampled_from([0.0, 0.3, -0.9]),
    bias=st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-100, 100, width=32), max_size=4),
    min_tokens=st.integers(0, 8),
    ends=st.frozensets(st.integers(0, VOCAB + 3), max_size=3),
    allowed=st.none() | st.sets(st.integers(0, VOCAB + 3), min_size=1).map(lambda ids: torch.tensor(list(ids))),
)


def random_logits(rows: int, seed: int) -> Tensor:
    """Some of them -inf."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.masked_fill(logits < -5, -torch.inf)


def written(prompt: list[int], output: list[int]) -> Written:
    made = Written(prompt, VOCAB)
    made.extend(output)
    return made


def definition(logits: list[float], adjustment: Adjustment, prompt: list[int], output: list[int]) -> list[float]:
    """One row, after `output`, in double precision."""
    counts, row = Counter(output), []
    allowed = set(range(VOCAB) if adjustment.allowed is None else adjustment.allowed.tolist())
    others = [token for token in allowed - {*adjustment.ends} if token < VOCAB and logits[token] > -math.inf]
    may_go_on = adjustment.allowed is None or others
    for token, logit in enumerate(logits):
        value = logit + adjustment.bias.get(token, 0.0)
        if len(output) < adjustment.min_tokens and may_go_on and token in adjustment.ends:
            value = -math.inf
        if token not in allowed:
            value = -math.inf
        if token in {*prompt, *output}:
            value = value / adjustment.repetition if value > 0 else value * adjustment.repetition
        row.append(value - adjustment.frequency * counts[token] - adjustment.presence * (counts[token] > 0))
    return row


@settings(max_examples=400)
@given(adjustments, ids, ids, ids, st.integers(0, 2**32))
def test_rows_are_what_the_definition_says(
    adjustment: Adjustment, prompt: list[int], output: list[int], draft: list[int], seed: int
) -> None:
    logits = random_logits(len(draft) + 1, seed)
    before = logits.clone()
    rows = adjusted(logits, adjustment, written(prompt, output), draft)
    expected = [
        definition(row, adjustment, prompt, output + draft[:index]) for index, row in enumerate(logits.tolist())
    ]
    assert torch.allclose(rows.double(), torch.tensor(expected).double(), atol=1e-4)
    assert torch.equal(logits, before), "the caller's logits were written to"


@settings(max_examples=400)
@given(adjustments, ids, ids, ids, st.integers(0, 2**32))
def test_a_draft_token_counts_as_a_committed_one_to_the_last_bit(
    adjustment: Adjustment, prompt: list[int], output: list[int], draft: list[int], seed: int
) -> None:
    """Plain decoding commits one token after the other; a verification has them in one tensor."""
    logits = random_logits(len(draft) + 1, seed)
    text = written(prompt, output)
    rows = adjusted(logits, adjustment, text, draft)
    assert text.length == len(output) and text.counts.sum() == len(output), "speculation changed what is committed"
    for index, token in enumerate([*draft, 0]):
        alone = adjusted(logits[index : index + 1], adjustment, text)
        assert torch.equal(rows[index], alone[0])
        text.extend([token])


def test_what_is_neutral_changes_nothing() -> None:
    logits = random_logits(3, 0).double()
    assert torch.equal(adjusted(logits, Adjustment(), written([1, 2], [3]), [4, 5]), logits.float())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_what_it_is(value: float) -> None:
    everything = Adjustment(1.3, 0.5, 0.5, {0: 1.0}, 0)
    rows = adjusted(torch.full((2, VOCAB), value), everything, written([0, 1], [0, 2]), [3])
    assert torch.equal(rows.nan_to_num(7.0), torch.full((2, VOCAB), value).nan_to_num(7.0))


def test_before_the_minimum_there_is_no_end() -> None:
    """Two of three tokens are there: the third must not end the text, the fourth may."""
    rows = adjusted(torch.zeros(3, VOCAB), Adjustment(min_tokens=3, ends=(4, 5)), written([4], [1, 1]), [2, 3])
    assert rows.isinf().nonzero().tolist() == [[0, 4], [0, 5]]


def test_before_the_minimum_the_text_may_end_if_nothing_else_is_allowed() -> None:
    ends_only = Adjustment(min_tokens=3, ends=(4, 5), allowed=torch.tensor([5, 4, 5]))
    assert (adjusted(torch.zeros(2, VOCAB), ends_only, written([1], []), [5]) == 0).nonzero().tolist() == [
        [0, 4],
        [0, 5],
        [1, 4],
        [1, 5],
    ]
