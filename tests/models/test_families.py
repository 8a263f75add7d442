"""Every knob of a family, in every way a batch may be cut, against transformers' own forward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.models import tiny
from tests.models.knobs import FAMILIES, kinds

TOLERANCE = 1e-4
PAGES = 64  # of 4 tokens: MAX_POSITION


@dataclass(frozen=True)
class Pair:
    """One checkpoint twice: in our engine, and transformers' logits for a text."""

    runner: Runner
    text: list[int]
    expected: Tensor
    others: list[tuple[list[int], Tensor]]
    states: list[Tensor]
    """[tokens, width] that go into each layer"""

    def check(self, logits: Tensor, expected: Tensor | None = None) -> None:
        expected = self.expected if expected is None else expected
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= TOLERANCE


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(*FAMILIES[request.param], tmp_path_factory.mktemp("model"))


def made(kind: str, knobs: dict[str, Any], folder: Path) -> Pair:
    directory = tiny.model(kind, folder, **knobs)
    oracle = tiny.oracle(directory)
    texts = [tiny.token_ids(count, seed) for seed, count in enumerate((90, 1, 7, 33))]
    expected = [tiny.oracle_logits(oracle, text) for text in texts]
    runner = tiny.runner(directory, pages=4 * PAGES)
    return Pair(
        runner, texts[0], expected[0], list(zip(texts[1:], expected[1:], strict=True)), states_of(oracle, texts[0])
    )


@torch.inference_mode()
def states_of(oracle: Any, text: list[int]) -> list[Tensor]:
    """All but the last that transformers tells: that has passed the model's norm."""
    found = oracle(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    return [states[0] for states in found[:-1]]


def in_chunks(pair: Pair, pages: list[int], sizes: list[int]) -> Tensor:
    """The text in one row per forward, of the sizes given in turn."""
    logits: list[Tensor] = []
    start = 0
    while start < len(pair.text):
        chunk = pair.text[start : start + sizes[len(logits) % len(sizes)]]
        logits.append(pair.runner.forward([Row(chunk, start, pages, outputs=len(chunk))]))
        start += len(chunk)
    return torch.cat(logits)


def test_whole_prefill(pair: Pair) -> None:
    pair.check(in_chunks(pair, list(range(PAGES)), [len(pair.text)]))


def test_chunks_and_single_tokens_in_fragmented_pages(pair: Pair) -> None:
    scattered = [(37 * index + 5) % (4 * PAGES) for index in range(PAGES)]
    pair.check(in_chunks(pair, scattered, [16, 1, 1, 5, 23]))


def test_ragged_batch(pair: Pair) -> None:
    """Prefill, a prefill chunk, decode and a verification of other sequences in one forward, in scattered pages: the
    wanted outputs of each come back."""
    pages = [list(range(index, 4 * PAGES, 4)) for index in range(4)]
    known = [40, 0, 6, 28]
    texts = [(pair.text, pair.expected), *pair.others]
    before = [Row(ids[:n], 0, table, outputs=0) for (ids, _), n, table in zip(texts, known, pages, strict=True) if n]
    assert pair.runner.forward(before).shape == (0, pair.expected.shape[1])
    wanted = [3, 1, 1, 5]
    rows = [
        Row(ids[n:], n, table, outputs) for (ids, _), n, table, outputs in zip(texts, known, pages, wanted, strict=True)
    ]
    expected = torch.cat([logits[-outputs:] for (_, logits), outputs in zip(texts, wanted, strict=True)])
    pair.check(pair.runner.forward(rows), expected)


def test_hidden_states_are_shown_to_a_plan_that_keeps_them(pair: Pair) -> None:
    """By every family, those without a file among them: it can be the target of an EAGLE-3 head."""
    count = len(pair.states)
    hidden: list[dict[int, Tensor]] = []
    for start, stop in ((0, 50), (50, 90)):
        rows = [Row(pair.text[start:stop], start, range(PAGES), outputs=0)]
        context = pair.runner.context(rows, range(count + 1))
        pair.runner.forward(rows, context)
        hidden.append(context.hidden)
    assert all(sorted(part) == list(range(count + 1)) for part in hidden)
    for layers, expected in enumerate(pair.states):
        found = torch.cat([part[layers] for part in hidden])
        assert (found - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("knobs", ["llama theta", "llama linear rope", "llama llama3 rope"])
def test_old_configs_keep_theta_beside_the_scaling(tmp_path: Path, knobs: str) -> None:
    """As checkpoints of before transformers 5 have it: `rope_theta`, `rope_scaling`, the kind perhaps as `type`."""
    directory = tiny.llama(tmp_path, **FAMILIES[knobs][1])
    rows = [Row(tiny.token_ids(90, 0), 0, range(PAGES), outputs=90)]
    new = tiny.runner(directory).forward(rows)
    scaling = dict(FAMILIES[knobs][1]["rope_parameters"])
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    old: dict[str, Any] = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": None}
    if kind != "default":
        old["rope_scaling"] = scaling | ({"type": kind} if kind == "linear" else {"rope_type": kind})
    assert torch.equal(tiny.runner(tiny.edit(directory, **old)).forward(rows), new)


def test_old_configs_describe_layers_by_a_rule(tmp_path: Path) -> None:
    """Without the kind of each layer."""
    check_old(*FAMILIES["qwen2 window above a layer"], {"layer_types": None, "max_window_layers": 1}, tmp_path)


def check_old(kind: str, knobs: dict[str, Any], old: dict[str, Any], folder: Path) -> None:
    directory = tiny.model(kind, folder, **knobs)
    rows = [Row(tiny.token_ids(90, 0), 0, range(PAGES), outputs=90)]
    new = tiny.runner(directory).forward(rows)
    assert torch.equal(tiny.runner(tiny.edit(directory, **old)).forward(rows), new)


# -- dummy weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", kinds(FAMILIES))
def test_dummy_weights_are_the_same_wherever_they_are_made(tmp_path: Path, family: str) -> None:
    check_dummy_weights(tiny.model(family, tmp_path, **FAMILIES[family][1]))


def check_dummy_weights(directory: Path) -> None:
    """`--load-format dummy` reads no tensor, and every process makes the same model."""
    (directory / "model.safetensors").unlink()
    checkpoint = inspect(directory, weights=False)
    rows = [Row(tiny.token_ids(9, 0), 0, range(4), outputs=9)]
    one, two = (
        Runner(registry.load(checkpoint, torch.float32, tiny.CPU, 64, dummy=True), 4, 4).forward(rows) for _ in range(2)
    )
    assert torch.equal(one, two) and one.isfinite().all() and one.std() > 0
