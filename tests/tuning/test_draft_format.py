"""The format that a draft computes in is the one that took least time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ssd.config.engine import EngineConfig, WeightFormat
from ssd.draft import process
from ssd.draft.process import load
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.kernels import build
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import registry
from ssd.models.checkpoint import Checkpoint
from ssd.models.interface import Model
from ssd.models.vocabularies import Vocabulary, vocabulary_of
from ssd.tuning import draft_format
from tests.models import tiny

FORMATS = FLOAT32, INT8, LIGHT = WeightFormat(), WeightFormat(quantize="int8"), WeightFormat(quantize="light")
# Milliseconds of a draft's step on a Xeon with AMX, and on an EPYC with AVX-512 and VNNI.
XEON = {FLOAT32: 3.4, INT8: 1.7, LIGHT: 1.1}
EPYC = {FLOAT32: 5.6, INT8: 2.6, LIGHT: 2.7}
OLD = {FLOAT32: 5.0, INT8: 6.0, LIGHT: 5.5}


@pytest.fixture
def config(tmp_path: Path, own_cache: Path) -> EngineConfig:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", seed=3, vocab_size=300))
    draft = tiny.noisy_copy(target, tmp_path / "draft", noise=0.02)
    found = resolve(EngineOptions(target=str(target), draft=(str(draft),)))
    assert found.draft_formats == FORMATS
    return found


def chosen_here(config: EngineConfig) -> WeightFormat | None:
    return draft_format.chosen(config, str(build.library()))


class Machine:
    """A machine on which forwards take these times, with a draft that 4 bits change this much."""

    def __init__(self, milliseconds: dict[WeightFormat, float], agreement: float = 1.0) -> None:
        self.milliseconds, self.agreement, self.timed = milliseconds, agreement, 0

    def tried(self, weights: WeightFormat) -> tuple[float, float]:
        self.timed += 1
        return self.milliseconds[weights] / 1e3, self.agreement if weights == LIGHT else 1.0

    def start(self, config: EngineConfig) -> WeightFormat:
        return draft_format.choose(config, str(build.library()), self.tried)


@pytest.mark.parametrize(
    ("machine", "best"), [(XEON, LIGHT), (EPYC, INT8), (OLD, FLOAT32)], ids=["Xeon", "EPYC", "old"]
)
def test_the_fastest_is_taken_and_timed_until_two_starts_agree(
    machine: dict[WeightFormat, float], best: WeightFormat, config: EngineConfig
) -> None:
    here = Machine(machine)
    assert chosen_here(config) is None
    assert [here.start(config) for _ in range(4)] == [best] * 4
    assert here.timed == 2 * len(FORMATS)
    assert chosen_here(config) == best


def stored(config: EngineConfig, weights: WeightFormat) -> torch.dtype:
    (runner,) = load(msgspec.structs.replace(config, draft_formats=(weights,)))
    return runner.cache.keys.dtype


def test_only_a_light_draft_keeps_keys_and_values_in_8_bits(config: EngineConfig) -> None:
    assert [stored(config, one) for one in FORMATS] == [torch.float32, torch.float32, torch.int8]


def test_a_fast_format_that_drafts_otherwise_is_not_taken(config: EngineConfig) -> None:
    here = Machine(XEON, draft_format.LEAST_AGREEMENT - 0.01)
    assert [here.start(config) for _ in range(3)] == [INT8] * 3
    assert chosen_here(config) == INT8


def test_the_agreement_is_that_of_the_likeliest_tokens(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft whose 4 bits say something else of every token is found out."""
    build = registry.load

    def spoilt(*arguments: Any, light: bool, **more: Any) -> Model:
        model: Any = build(*arguments, light=light, **more)
        if light:
            own = model.logits
            model.logits = lambda hidden: -own(hidden)
        return model

    monkeypatch.setattr(registry, "load", spoilt)
    agreement = agreement_of(config, monkeypatch)
    assert agreement["float32"] == 1.0 and agreement["int8"] > 0.8 and agreement["light"] < 0.1


def agreement_of(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary | None = None
) -> dict[str, float]:
    found = dict[str, float]()

    def choose(
        config: EngineConfig, kernels: str, tried: Callable[[WeightFormat], tuple[float, float]]
    ) -> WeightFormat:
        found.update((str(one), tried(one)[1]) for one in config.draft_formats)
        return FLOAT32

    monkeypatch.setattr(draft_format, "choose", choose)
    load(config, vocabulary=vocabulary)
    return found


def test_a_cache_smaller_than_the_text_is_not_left(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, forward = list[Row](), Runner.forward

    def noted(runner: Runner, asked: list[Row]) -> torch.Tensor:
        rows.extend(asked)
        return forward(runner, asked)

    monkeypatch.setattr(Runner, "forward", noted)
    small = msgspec.structs.replace(config, draft_num_pages=2)
    assert agreement_of(small, monkeypatch)["float32"] == 1.0
    assert max(len(row.token_ids) for row in rows) == 2 * config.page_size


@pytest.mark.parametrize("lacks", ["the target's tokenizer", "a tokenizer that can be read", "ids of a text"])
def test_a_light_draft_that_cannot_be_compared_does_not_agree(
    lacks: str, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(config.target) / "tokenizer.json"
    vocabulary = None
    if lacks == "the target's tokenizer":
        vocabulary = vocabulary_of(Path(config.target))
    elif lacks == "a tokenizer that can be read":
        for folder in (config.target, config.draft):  # of equal files none is read before
            (Path(str(folder)) / file.name).write_text("{")
    else:
        monkeypatch.setattr(process, "_TEXT", "")
    assert agreement_of(config, monkeypatch, vocabulary) == {"float32": 1.0, "int8": 1.0, "light": 0.0}


def test_a_busy_moment_decides_for_one_start_only(config: EngineConfig) -> None:
    assert Machine({**EPYC, INT8: 20.0, LIGHT: 20.0}).start(config) == FLOAT32
    quiet = Machine(EPYC)
    assert [quiet.start(config) for _ in range(3)] == [INT8] * 3
    assert quiet.timed == 2 * len(FORMATS)


def test_a_busy_moment_undoes_no_choice(config: EngineConfig) -> None:
    assert Machine(EPYC).start(config) == INT8
    assert Machine({**EPYC, INT8: 20.0, LIGHT: 20.0}).start(config) == INT8


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", '{"seconds": {"int8": 1.0}, "agreement": {"int8": 1.0}, "agreed": true}'),
        *('{"seconds": {"int8": -1}, "agreement": {}}', '{"seconds": {}, "agreement": {"int8": 2}}'),
    ],
)
def test_a_file_that_says_nothing_sound_is_replaced(content: str, config: EngineConfig, own_cache: Path) -> None:
    Machine(XEON).start(config)
    (file,) = (own_cache / "tables").glob("*.draft.json")
    file.write_text(content)
    here = Machine(OLD)
    assert here.start(config) == FLOAT32 and here.timed == len(FORMATS)


def test_nothing_is_timed_where_there_is_no_choice(tmp_path: Path, config: EngineConfig) -> None:
    here = Machine(XEON)
    for asked in ({"draft_dtype": "bfloat16"}, {"draft_weights": "int8"}, {"deterministic": True}):
        options: dict[str, Any] = {"target": config.target, "draft": (config.draft,), **asked}
        fixed = resolve(EngineOptions(**options))
        assert here.start(fixed) == chosen_here(fixed) == fixed.draft_formats[0]
    assert here.timed == 0


@pytest.mark.parametrize("slow", FORMATS, ids=str)
def test_a_draft_avoids_slow_formats(slow: WeightFormat, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One format is made slower by far more than a tiny draft's forwards take on a busy machine."""
    forward, build = Runner.forward, registry.load
    built, models = dict[int, WeightFormat](), list[Model]()

    def noted(
        checkpoint: Checkpoint, dtype: torch.dtype, *arguments: Any, light: bool, int8: bool, **more: Any
    ) -> Model:
        model = build(checkpoint, dtype, *arguments, int8=int8, light=light, **more)
        built[id(model)] = LIGHT if light else INT8 if int8 else FLOAT32
        models.append(model)  # so that no other one gets its id
        return model

    def slowed(runner: Runner, *arguments: Any, **more: Any) -> torch.Tensor:
        if built[id(runner.model)] == slow:
            time.sleep(0.3)
        return forward(runner, *arguments, **more)

    monkeypatch.setattr(registry, "load", noted)
    monkeypatch.setattr(Runner, "forward", slowed)
    (runner,) = load(config)
    assert {*built.values()} == {*FORMATS}
    chosen = built[id(runner.model)]
    assert chosen != slow and chosen == chosen_here(config)
    assert len(models) == len(FORMATS) + (chosen != FORMATS[-1]), "the format that was tried last is not loaded again"
