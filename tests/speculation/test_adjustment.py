"""Penalties, biases and minimum lengths against their definition, token by token."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd.execution.adjustments import NUMBERS, AdjustmentTable, adjust
from ssd.execution.batch import Row
from ssd.execution.kv_cache import KVCache
from ssd.execution.tables import BatchTensors
from ssd.models.interface import Shape
from ssd.speculation.adjustment import Adjustment, Text, Written, adjusted

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
    made = Written(prompt)
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


# -- batches on a device ----------------------------------------------------------------------------------------------

SLOTS, CPU = 3, torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjusted by torch's operations, or by a kernel of ours (Triton's interpreter)."""
    if request.param:
        monkeypatch.setattr(adjust, "serves", lambda _: True)


def wish_of(dice: Random) -> Adjustment:
    """All that a device adjusts."""
    allowed = torch.tensor(dice.sample(range(VOCAB + 3), 6)) if dice.random() < 0.3 else None
    return Adjustment(
        dice.choice((1.0, 1.3, 0.7)),
        dice.choice((0.0, 0.6, -1.5)),
        dice.choice((0.0, 0.3, -0.9)),
        {dice.randrange(VOCAB + 3): dice.uniform(-9, 9) for _ in range(dice.randint(0, 4))},
        0 if allowed is not None else dice.choice((0, 4, 9, 50)),
        frozenset(dice.sample(range(VOCAB + 3), 2)),
        allowed,
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_has_the_bits_of_each_row_by_itself(seed: int, dtype: torch.dtype) -> None:
    """Texts that grow by a few tokens or by many, or are others; drafts, and outcomes that the host has not seen."""
    dice, table = Random(seed), AdjustmentTable(SLOTS, VOCAB, CPU)
    cache, batch = KVCache(Shape(VOCAB, VOCAB, 1, 1, 1, 1, 99), 9, 4, dtype, CPU), BatchTensors(24, 5, 16, CPU)
    texts = [text_of(dice) for _ in range(SLOTS)]
    for _ in range(5):
        texts = [text_of(dice) if dice.random() < 0.15 else text for text in texts]
        for text in texts:
            assert isinstance(text.tokens, list)
            text.tokens.extend(tokens(dice, dice.choice((0, 1, 3, 40, 40))))
        asked = [text if dice.random() < 0.8 else None for text in texts]
        unseen = [tokens(dice, dice.choice((0, 0, 1, 6))) for _ in texts]
        firsts = [(ids or text.tokens)[-1] for ids, text in zip(unseen, texts, strict=True)]
        rows = [
            Row([first, *tokens(dice, dice.randint(0, 6))], 0, range(9), 1, slot) for slot, first in enumerate(firsts)
        ]
        table.tell(enumerate(asked))
        for slot, ids in enumerate(unseen):
            table.words[slot, NUMBERS:][: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        batch.fill(rows, range(SLOTS), cache, SLOTS)
        logits = torch.cat([random_logits(1, dice.randrange(2**32)) for _ in range(24)]).to(dtype)
        expected = list(logits.float().split([*map(size_of, rows), 24 - sum(map(size_of, rows))]))
        for slot, (row, text, ids) in enumerate(zip(rows, asked, unseen, strict=True)):
            if text is not None:
                told = written(list(text.tokens[: text.prompt]), [*text.tokens[text.prompt :], *ids])
                expected[slot] = adjusted(expected[slot], text.adjustment, told, row.token_ids[1:])
        assert torch.equal(table.adjust(logits, batch.fields), torch.cat(expected))


def text_of(dice: Random) -> Text:
    prompt = tokens(dice, dice.randint(1, 5))
    return Text(prompt, len(prompt), wish_of(dice))


def size_of(row: Row) -> int:
    return len(row.token_ids)


def tokens(dice: Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(count)]
