"""All layers in one call: the bits of the same kernels called one by one, for every family that has it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.execution.batch import Row
from ssd.execution.paged import PagedContext
from ssd.kernels import cpu
from ssd.kernels.decoder import Decoder
from ssd.layers.attention import Scores
from ssd.layers.norm import Residual, RMSNorm
from ssd.layers.rotary import Rotary
from ssd.models.families import llama
from ssd.models.families.llama import Attention, Layer, Llama
from ssd.models.families.mistral import Mistral
from ssd.models.families.qwen2 import Qwen2, Qwen2Attention
from tests.models import tiny

pytestmark = pytest.mark.skipif(not cpu.serve(torch.empty(0)), reason="no C compiler: there are no kernels")
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 8}),
]
# A prompt, then decoding beside a verification over pages in any order, then a prompt too long for the kernels.
BATCHES = [
    [Row(tiny.token_ids(9, 1), 0, [7, 3, 5], 2)],
    [Row(tiny.token_ids(1, 2), 9, [7, 3, 5]), Row(tiny.token_ids(6, 3), 0, [2, 9], 6, slot=1)],
    [Row(tiny.token_ids(1, 4), 10, [7, 3, 5]), Row(tiny.token_ids(40, 5), 0, range(20, 30), 40, slot=2)],
]


@pytest.mark.parametrize(
    ("kind", "config"), FAMILIES, ids=lambda value: value if isinstance(value, str) else str(value)
)
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_one_call_is_all_of_them(
    kind: str, config: dict[str, Any], int8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = cpu.multiply_floats(torch.empty(1, 1))  # on processors with AVX2
    directory, calls = tiny.model(kind, tmp_path, **config), 0
    plain = Decoder.__call__

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return plain(*arguments)

    monkeypatch.setattr(Decoder, "__call__", counted)
    runner = tiny.runner(directory, int8=int8)
    together = [runner.forward(rows) for rows in BATCHES]
    assert calls == (len(BATCHES) if ours else 0)
    monkeypatch.setattr(PagedContext, "views", lambda context: None)
    runner = tiny.runner(directory, int8=int8)
    for rows, logits in zip(BATCHES, together, strict=True):
        assert torch.equal(runner.forward(rows), logits)


def test_hidden_states_are_kept_between_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first layer, after layers within, and after the last."""
    if not cpu.multiply_floats(torch.empty(1, 1)):
        pytest.skip("no products on this processor: layers have many calls")
    directory = tiny.llama(tmp_path, num_hidden_layers=5)

    def kept(layers: set[int]) -> dict[int, torch.Tensor]:
        runner, tokens = tiny.runner(directory), tiny.token_ids(9, 1)
        context = runner.context([Row(tokens, 0, [7, 3, 5], 2)], layers)
        assert isinstance(context, PagedContext)
        runner.run(tokens, context, [8])
        return context.hidden

    every = [{0, 1, 3, 5}, {2, 4}, {5}, set[int]()]
    together = list(map(kept, every))
    monkeypatch.setattr(PagedContext, "views", lambda context: None)
    for layers, hidden in zip(every, together, strict=True):
        alone = kept(layers)
        assert hidden.keys() == alone.keys() == layers
        assert all(torch.equal(hidden[layer], alone[layer]) for layer in layers)


class Halved(Attention):
    def normalised(self, qk: torch.Tensor) -> torch.Tensor:
        return qk / 2


class Capped(Attention):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scores = Scores(0.1, softcap=0.5)


class Doubled(Qwen2Attention):
    def __call__(self, *arguments: Any) -> torch.Tensor:
        return super().__call__(*arguments) * 2


class Shifted(RMSNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1


class RaisedLayer(Layer):
    def __call__(self, x: Residual, *others: Any) -> None:
        super().__call__(x, *others)
        x.add(torch.ones(1))


class ShiftedLayer(Layer):
    def __init__(self, norm: RMSNorm, *parts: Any) -> None:
        super().__init__(Shifted(*(norm.kernel or ())), *parts)


class Neighbours(Rotary):
    """Pairs numbers 2 i and 2 i + 1 of a head."""

    def __call__(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return super().__call__(halves, table).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def stretched(model: Llama, positions: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    return repeat(model._rotary.at(2 * positions))


@pytest.mark.parametrize(
    ("kind", "part", "changed"),
    [
        ("llama", (Llama, "attention"), Halved),
        ("llama", (Llama, "attention"), Capped),
        ("qwen2", (Qwen2, "attention"), Doubled),
        ("llama", (Llama, "layer"), ShiftedLayer),
        ("llama", (Llama, "layer"), RaisedLayer),
        ("llama", (llama, "Rotary"), Neighbours),
        ("mistral", (Mistral, "tables"), stretched),
    ],
    ids=["normalised", "scores", "call", "norm", "layer", "rotation", "tables"],
)
def test_what_a_family_of_ones_own_changes_is_not_passed_over(
    kind: str, part: tuple[Any, str], changed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plugins derive from these classes, as docs/models.md says."""
    directory = tiny.model(kind, tmp_path)
    before = tiny.runner(directory).forward(BATCHES[0])
    monkeypatch.setattr(*part, changed)
    after = tiny.runner(directory).forward(BATCHES[0])
    assert not torch.allclose(after, before)
    monkeypatch.setattr(PagedContext, "views", lambda context: None)
    assert torch.equal(after, tiny.runner(directory).forward(BATCHES[0]))


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    if not cpu.multiply_floats(torch.empty(1, 1)):
        pytest.skip("no products on this processor: layers have many calls")
    runner = tiny.runner(tiny.llama(tmp_path))
    views, decoder = runner.context([Row([1, 2], 0, [0])]).views(), runner.model._decoder
    assert views is not None
    with pytest.raises(ValueError, match="2 contiguous tokens of 32 numbers"):
        decoder(torch.zeros(3, 32), views, 0, 2)
    with pytest.raises(TypeError, match="float32 on a CPU"):
        decoder(torch.zeros(2, 32, dtype=torch.float64), views, 0, 2)
    with pytest.raises(IndexError, match="positions beyond"):
        runner.forward([Row([1], runner.model.shape.max_position, range(100))])
    with pytest.raises(IndexError, match="in a table of"):
        runner.forward([Row([-1], 0, [0])])
