"""Layers with a state: the ids of every mode are those of `ar` and of transformers, whatever was rejected, cached,
preempted or lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.meanwhile import Task
from ssd.verifier.scheduler import Scheduled
from ssd.verifier.verification import PlainVerification, VerifiedBatch
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny
from tests.models.knobs import RECURRENT

MODES: tuple[Mode, ...] = ("ar", "ngram", "sd", "ssd")
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2")


class World:
    """A tiny checkpoint, drafts that are right, half right and wrong, and transformers' answers."""

    def __init__(self, folder: Path, family: str) -> None:
        kind, knobs = RECURRENT[family]
        directory = tiny.model(kind, folder / "target", seed=3, **knobs)
        wrong = tiny.model(kind, folder / "wrong", seed=4, **knobs)
        half = tiny.noisy_copy(directory, folder / "half", noise=0.004)
        self.target, self.plain = tiny.runner(directory), tiny.runner(directory)
        self.drafts = {name: tiny.runner(one) for name, one in (("right", directory), ("half", half), ("wrong", wrong))}
        self._oracle = tiny.oracle(directory)

    def pair(self, speculation: Speculation, draft: str = "half", **fields: Any) -> Pair:
        settings = config(speculation, **fields)
        return Pair(settings, self.target, None if speculation.mode == "ar" else Draft(settings, self.drafts[draft]))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """transformers' answer, each token from a forward over the whole text."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(tiny.oracle_logits(self._oracle, text)[-1].argmax()))
        return text[len(prompt) :]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), request.param)


PROMPTS = [tiny.token_ids(length, seed=7 * length) for length in (1, 3, 5, 17, 40)]


def plainly(world: World, prompts: Sequence[list[int]], laws: Sequence[SamplingParams]) -> list[list[int]]:
    """Plain decoding in an engine of its own, which has seen nothing before."""
    return Pair(config(Speculation("ar")), world.plain).run(prompts, laws).ids


@pytest.mark.parametrize("draft", ["right", "half", "wrong"])
@pytest.mark.parametrize("mode", MODES)
def test_ids_are_those_of_transformers(world: World, mode: Mode, draft: str) -> None:
    """And a draft that is the same model is right: the states of its chains are those of their texts."""
    texts = world.pair(Speculation(mode, 4, (3,), "jit"), draft).run(PROMPTS, params(len(PROMPTS), 24))
    assert texts.ids == [world.greedy(prompt, 24) for prompt in PROMPTS]
    accepted, drafted = sum(m.accepted_tokens for m in texts.metrics), sum(m.drafted_tokens for m in texts.metrics)
    if mode in ("sd", "ssd"):
        assert accepted / drafted > 0.95 if draft == "right" else accepted < drafted
        assert mode == "sd" or any(m.hits for m in texts.metrics)


@pytest.mark.parametrize("mode", MODES[1:])
def test_sampled_ids_are_those_of_plain_decoding(world: World, mode: Mode) -> None:
    laws = params(len(PROMPTS), 24, 0.8)
    assert world.pair(Speculation(mode, 4, (3,), "jit")).run(PROMPTS, laws).ids == plainly(world, PROMPTS, laws)


@pytest.mark.parametrize("mode", MODES)
def test_preempted_sequences_begin_from_a_state_that_was_saved(world: World, mode: Mode) -> None:
    """Pages for the half of them: the others are computed again, as far as no state of theirs was saved."""
    prompts = [tiny.token_ids(17 + index, seed=index) for index in range(6)]
    laws = params(6, 24)
    pair = world.pair(Speculation(mode, 4, (3,), "jit"), max_model_len=60, num_pages=24)
    texts = pair.run(prompts, laws)
    assert texts.preemptions > 0
    assert texts.ids == plainly(world, prompts, laws)


@pytest.mark.parametrize("mode", MODES)
def test_conversations_over_one_prefix(world: World, mode: Mode) -> None:
    """39 conversations of three turns, some of them at once; each turn's text begins with all that was said before."""
    shared, talks = tiny.token_ids(23, seed=1), 39
    warm = world.pair(Speculation(mode, 4, (3,), "jit"))
    texts = [[*shared, *tiny.token_ids(3 + talk % 5, seed=100 + talk)] for talk in range(talks)]
    found = 0
    for turn in range(3):
        for first in range(0, talks, 8):
            prompts, laws = texts[first : first + 8], params(len(texts[first : first + 8]), 7)
            answers = warm.run(prompts, laws)
            cold = plainly(world, prompts, laws)
            assert answers.ids == cold
            found += sum(metrics.cached_tokens > 0 for metrics in answers.metrics)
            for text, answer in zip(prompts, answers.ids, strict=True):
                text += [*answer, *tiny.token_ids(2, seed=turn)]
    assert found > 2 * talks, "most turns began from a saved state"


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_that_dies_takes_no_token_along(world: World, mode: Mode) -> None:
    pair = world.pair(Speculation(mode, 4, (3,), "jit"))
    steps = iter(range(10_000))

    def killed() -> None:
        if next(steps) % 7 == 6 and pair.draft is not None:
            pair.draft.restart()
            pair.proposer.join(pair.draft.epoch)

    pair.between_steps = killed
    laws = params(len(PROMPTS), 24)
    assert pair.run(PROMPTS, laws).ids == plainly(world, PROMPTS, laws)


def test_a_draft_token_that_is_not_a_number_leaves_no_trace(world: World) -> None:
    """A row that runs again without its draft tokens begins from the same state."""
    pair = world.pair(Speculation("sd", 4, (3,), "jit"), "right")
    verification, spoiled = pair.engine._verification, iter((False, True) * 1000)
    assert isinstance(verification, PlainVerification)
    run = verification._run

    def spoils(batch: list[Scheduled], work: Task) -> VerifiedBatch:
        verified = run(batch, work)
        if next(spoiled):
            for part, own in zip(batch, verified.samples, strict=True):
                own[-1] = -1 if part.drafted else own[-1]
        return verified

    verification._run = spoils  # type: ignore[method-assign]
    laws = params(len(PROMPTS), 24)
    assert pair.run(PROMPTS, laws).ids == plainly(world, PROMPTS, laws)
