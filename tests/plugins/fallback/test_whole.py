"""Models that cannot be rolled back: the engine serves them in plain decoding, with the ids of transformers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.plugins.fallback.whole import Whole
from tests.draft.pair import Pair, Texts, config, params
from tests.models import tiny
from tests.plugins.fallback.knobs import WHOLE

PROMPTS = [tiny.token_ids(length, seed=7 * length) for length in (1, 3, 5, 17, 40)]


class World:
    """A tiny checkpoint, and transformers' answers."""

    def __init__(self, folder: Path, family: str) -> None:
        kind, knobs = WHOLE[family]
        directory = tiny.model(kind, folder, seed=3, **knobs)
        self.target, self._oracle = tiny.runner(directory), tiny.oracle(directory)

    def run(self, prompts: list[list[int]], count: int = 20, **fields: int) -> Texts:
        return Pair(config(Speculation("ar"), **fields), self.target).run(prompts, params(len(prompts), count))

    def greedy(self, prompt: list[int], count: int = 20) -> list[int]:
        """transformers' answer, each token from a forward over the whole text."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(tiny.oracle_logits(self._oracle, text)[-1].argmax()))
        return text[len(prompt) :]


@pytest.fixture(scope="module", params=WHOLE)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), request.param)


@pytest.mark.parametrize("budget", [7, 2048])
def test_ids_are_those_of_transformers(world: World, budget: int) -> None:
    """In one batch, with prompts read at once, or in chunks beside sequences that decode."""
    texts = world.run(PROMPTS, max_num_batched_tokens=budget)
    assert texts.ids == [world.greedy(prompt) for prompt in PROMPTS]


def test_preempted_sequences_are_computed_again(world: World) -> None:
    prompts = [tiny.token_ids(17 + index, seed=index) for index in range(6)]
    texts = world.run(prompts, 24, max_model_len=60, num_pages=24)
    assert texts.preemptions > 0
    assert texts.ids == [world.greedy(prompt, 24) for prompt in prompts]


def test_no_prefix_is_shared(world: World) -> None:
    """A second turn and a twin begin from nothing, in slots that others have left."""
    pair, first = Pair(config(Speculation("ar")), world.target), PROMPTS[-1]
    (answer,) = pair.run([first], params(1, 20)).ids
    again = [[*first, *answer, 5], first, first]
    texts = pair.run(again, params(3, 20))
    assert texts.ids == [world.greedy(prompt) for prompt in again]
    assert not any(metrics.cached_tokens for metrics in texts.metrics)


def test_a_measured_row_leaves_nothing(world: World) -> None:
    assert isinstance(world.target.model, Whole)
    before = {slot: id(cache) for slot, cache in world.target.model._caches.items()}
    world.target.warm_up(5)
    assert {slot: id(cache) for slot, cache in world.target.model._caches.items()} == before
    assert world.run(PROMPTS).ids == [world.greedy(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "singly"), [("mamba", True), ("mamba2", False), ("bloom", False)])
def test_a_cache_that_takes_one_token_at_a_time_is_noticed(
    family: str, singly: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Mamba of transformers 5.24 forgets its state where it reads several tokens."""
    kind, knobs = WHOLE[family]
    model = tiny.runner(tiny.model(kind, tmp_path, **knobs), dtype).model
    assert isinstance(model, Whole) and model._singly == singly


ASKED = SamplingParams(max_tokens=20, ignore_eos=True)


def served(family: str, folder: Path) -> Path:
    kind, knobs = WHOLE[family]
    return tiny.tokenizer(tiny.model(kind, folder, **knobs | {"vocab_size": 300, "eos_token_id": 2}))


@pytest.mark.parametrize(("family", "cause"), [("mamba", "does not attend"), ("llama4_text", "'chunked_attention'")])
def test_through_all_processes(family: str, cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The log says once why nothing is speculated, though both the engine and a request may ask for it."""
    with LLM(str(served(family, tmp_path)), dtype="float32", max_model_len=100) as llm:
        lookup = msgspec.structs.replace(ASKED, speculation=Speculation("ngram", 3))
        answers = llm.generate(["abababababababab"] * 2, [ASKED, lookup])
    assert answers[0].token_ids == answers[1].token_ids and len(answers[0].token_ids) == 20
    assert not any(answer.metrics.drafted_tokens for answer in answers)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "served with `ar`" in line)
    assert cause in line


def test_it_neither_has_a_draft_nor_is_one(tmp_path: Path) -> None:
    whole = served("mamba", tmp_path / "whole")
    paged = tiny.tokenizer(tiny.llama(tmp_path / "paged", vocab_size=300))
    with pytest.raises(UsageError, match=r"use --mode ar, without --draft: .*does not attend"):
        LLM(str(whole), [str(paged)], dtype="float32", max_model_len=100)
    with pytest.raises(UsageError, match="which --deterministic needs"):
        LLM(str(whole), dtype="float32", max_model_len=100, deterministic=True)
    with pytest.raises(UsageError, match=r"cannot draft, as it cannot be rolled back: .*does not attend"):
        LLM(str(paged), [str(whole)], dtype="float32", max_model_len=100)
