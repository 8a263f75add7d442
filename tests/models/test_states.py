"""Families whose layers have states, in every way their text may be cut, against transformers' own forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.interface import Model
from tests.models import tiny
from tests.models.knobs import RECURRENT
from tests.models.states import StatesContext, forward

TEXT = tiny.token_ids(90, 0)
OTHER = tiny.token_ids(33, 3)
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=RECURRENT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tensor, Tensor]:
    """A model of ours, and transformers' logits for both texts."""
    kind, knobs = RECURRENT[request.param]
    directory = tiny.model(kind, tmp_path_factory.mktemp("model"), **knobs)
    oracle = tiny.oracle(directory)
    model = registry.load(inspect(directory), torch.float32, tiny.CPU, tiny.MAX_POSITION)
    return model, tiny.oracle_logits(oracle, TEXT), tiny.oracle_logits(oracle, OTHER)


def near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= TOLERANCE)


def test_whole_text(pair: tuple[Model, Tensor, Tensor]) -> None:
    model, expected, _ = pair
    assert near(forward(model, StatesContext(model, 1), (0, 0, TEXT)), expected)


@pytest.mark.parametrize("sizes", [[1], [40, 1, 7, 1, 1, 40], [2, 3, 5, 31]])
def test_chunks_and_single_tokens(pair: tuple[Model, Tensor, Tensor], sizes: list[int]) -> None:
    model, expected, _ = pair
    context, logits, start = StatesContext(model, 1), [], 0
    while start < len(TEXT):
        chunk = TEXT[start : start + sizes[len(logits) % len(sizes)]]
        logits.append(forward(model, context, (0, start, chunk)))
        start += len(chunk)
    assert near(torch.cat(logits), expected)


def test_rejected_tokens_leave_no_trace(pair: tuple[Model, Tensor, Tensor]) -> None:
    model, expected, other = pair
    context, wrong = StatesContext(model, 2), [token + 1 for token in TEXT if token < 130]
    found = [forward(model, context, (0, 0, TEXT[:20]), (1, 0, OTHER[:9]))]
    for start in range(20, 30):
        logits = forward(model, context, (0, start, [TEXT[start], *wrong[:4]]), (1, start - 11, [OTHER[start - 11]]))
        found += [logits[:1], logits[-1:]]
    assert near(torch.cat((found[0][:20], *found[1::2])), expected[:30])
    assert near(torch.cat((found[0][20:], *found[2::2])), other[:19])


def test_hidden_states_are_shown_after_every_layer(pair: tuple[Model, Tensor, Tensor]) -> None:
    model, _, _ = pair
    context = StatesContext(model, 1)
    forward(model, context, (0, 0, TEXT[:5]))
    assert sorted(context.hidden) == list(range(len(context.hidden))) and len(context.hidden) > model.shape.layers
