"""What every family must give, of models that transformers runs: the core's checks of its own families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.layers.ranks import Ranks
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.quantization import QUANTIZATION
from ssd.plugins.fallback import entry, paged
from tests.cli.test_models import described, run
from tests.draft.test_families import check_chains
from tests.exactness.test_embeddings import check_kind
from tests.models import test_families as families
from tests.models import test_unsound_weights as unsound
from tests.models import tiny
from tests.models.knobs import kinds
from tests.plugins.fallback.knobs import FALLBACK, GPT_OSS
from tools.distill.layouts import quantization_config


@pytest.fixture(scope="module", params=FALLBACK)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> families.Pair:
    return families.made(*FALLBACK[request.param], tmp_path_factory.mktemp("model"))


test_whole_prefill = families.test_whole_prefill
test_chunks_and_single_tokens_in_fragmented_pages = families.test_chunks_and_single_tokens_in_fragmented_pages
test_ragged_batch = families.test_ragged_batch
test_hidden_states_are_shown_to_a_plan_that_keeps_them = families.test_hidden_states_are_shown_to_a_plan_that_keeps_them


@pytest.mark.parametrize("family", kinds(FALLBACK))
def test_dummy_weights_are_the_same_wherever_they_are_made(tmp_path: Path, family: str) -> None:
    families.check_dummy_weights(tiny.model(family, tmp_path, **FALLBACK[family][1]))


@pytest.mark.parametrize("family", FALLBACK)
def test_chains_are_texts(family: str, tmp_path: Path) -> None:
    check_chains(*FALLBACK[family], tmp_path)


@pytest.mark.parametrize("kind", kinds(FALLBACK))
def test_embeddings_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Its code does not promise the bits of every batch."""
    check_kind(*FALLBACK[kind], tmp_path, promised=False)


@pytest.mark.parametrize(("name", "value", "dtype"), unsound.SPOILED)
def test_a_tensor_that_is_no_number_is_named(
    tmp_path: Path, name: str, value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "has_file", lambda checkpoint: False)
    good = tiny.llama(tmp_path / "good")
    unsound.check_named(unsound.spoiled(good, tmp_path / "bad", name, value), name, dtype)


def test_it_attends_with_sinks(tmp_path: Path) -> None:
    directory, text = tiny.model("gpt_oss", tmp_path, **GPT_OSS), tiny.token_ids(50, 0)
    model = paged.load(inspect(directory), torch.float32, tiny.CPU, tiny.MAX_POSITION, dummy=False)
    runner = Runner(model, 64, 4)
    logits = [runner.forward([Row(text[a:b], a, range(64), b - a)]) for a, b in ((0, 40), (40, 41), (41, 50))]
    assert (torch.cat(logits) - tiny.oracle_logits(tiny.oracle(directory), text)).abs().max() <= 1e-4


def test_it_is_not_split_over_ranks(tmp_path: Path) -> None:
    kind, knobs = FALLBACK["opt"]
    checkpoint = inspect(tiny.model(kind, tmp_path, **knobs))
    with pytest.raises(UsageError, match="'opt' runs through transformers, which is not split over ranks"):
        registry.load(checkpoint, torch.float32, tiny.CPU, 64, ranks=Ranks(0, 2))


def test_quantised_weights_need_a_file(tmp_path: Path) -> None:
    edited = {QUANTIZATION: quantization_config(8), "model_type": "gpt_neox"}
    with pytest.raises(UsageError, match="quantised weights need a family with a file of its own"):
        tiny.runner(tiny.edit(tiny.llama(tmp_path), **edited))


def test_a_model_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, knobs = FALLBACK["starcoder2"]
    directory = tiny.model(kind, tmp_path, **knobs)
    assert described(directory)["family"].startswith("fallback, if transformers 5")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in run().output.splitlines()]
    assert any(row[0].startswith("any other") and "fallback" in row[1] for row in rows if len(row) == 3)
    monkeypatch.setattr(entry, "installed_transformers", lambda: None)
    assert described(directory)["family"].startswith("not supported: `pip install")
