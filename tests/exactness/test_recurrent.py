"""Families of today: the ids of every mode are those of `ar` and of transformers, whatever was rejected, cached,
preempted or lost."""

from __future__ import annotations

import random

import pytest

from ssd.config.params import Mode
from ssd.execution.meanwhile import Task
from ssd.verifier.scheduler import Scheduled
from ssd.verifier.verification import PlainVerification, VerifiedBatch
from tests.draft.pair import PAGE_SIZE, params
from tests.exactness.situations import FAMILIES, MODES, PROMPTS, World, cold, draft_killed, hits, preempted, warm


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), *FAMILIES[request.param])


@pytest.mark.parametrize("mode", MODES)
def test_ids_are_those_of_transformers(world: World, mode: Mode) -> None:
    found, expected = cold(world, mode)
    assert found == expected


@pytest.mark.parametrize("draft", ["right", "wrong"])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_right_and_wrong_drafts_change_no_id(world: World, mode: Mode, draft: str) -> None:
    """And a draft that is the same model is right: its chains have the keys and states of their texts."""
    texts = world.pair(mode, draft).run(PROMPTS, params(len(PROMPTS), 24))
    assert texts.ids == world.plainly(PROMPTS, params(len(PROMPTS), 24))
    accepted, drafted = sum(m.accepted_tokens for m in texts.metrics), sum(m.drafted_tokens for m in texts.metrics)
    assert accepted / drafted > 0.95 if draft == "right" else accepted < drafted
    assert mode == "sd" or draft == "wrong" or any(m.hits for m in texts.metrics)


@pytest.mark.parametrize("mode", MODES[1:])
def test_sampled_ids_are_those_of_plain_decoding(world: World, mode: Mode) -> None:
    laws = params(len(PROMPTS), 24, 0.8)
    assert world.pair(mode).run(PROMPTS, laws).ids == world.plainly(PROMPTS, laws)


@pytest.mark.parametrize("mode", MODES)
def test_preempted_sequences_begin_again(world: World, mode: Mode) -> None:
    found, expected = preempted(world, mode)
    assert found == expected


@pytest.mark.parametrize("mode", MODES)
def test_conversations_over_one_prefix(world: World, mode: Mode) -> None:
    found, expected = warm(world, mode)
    assert found == expected


@pytest.mark.parametrize("draft", ["right", "wrong"])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_hits_are_as_long_as_without_a_draft(world: World, mode: Mode, draft: str) -> None:
    """Of prompts that begin alike, always. After an answer, where layers have states, the last verification's tokens
    are in no saved state: the pages of at most K + 1 tokens are missing."""
    (alike, after), (plainly_alike, plainly_after) = hits(world, mode, draft), hits(world, "ar")
    assert alike == plainly_alike and min(alike[2:]) > 0 and min(after) > 0
    if world.target.state_slots is None:
        assert after == plainly_after
    lost = [plain - found for found, plain in zip(after, plainly_after, strict=True)]
    assert all(0 <= tokens <= -(-(4 + 1) // PAGE_SIZE) * PAGE_SIZE for tokens in lost)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_that_dies_takes_no_token_along(world: World, mode: Mode) -> None:
    found, expected = draft_killed(world, mode)
    assert found == expected


@pytest.mark.parametrize("budget", [11, 512])
def test_a_draft_token_that_is_not_a_number_leaves_no_trace(world: World, budget: int) -> None:
    """One row runs again without its draft tokens, from the same state; those beside it do not run twice."""
    pair, chance = world.pair("sd", "half", max_num_batched_tokens=budget), random.Random(1)
    verification, again = pair.engine._verification, 0
    assert isinstance(verification, PlainVerification)
    run = verification._run

    def spoils(batch: list[Scheduled], work: Task) -> VerifiedBatch:
        nonlocal again
        verified = run(batch, work)
        drafted = [own for part, own in zip(batch, verified.samples, strict=True) if part.drafted]
        if drafted and chance.random() < 0.4:
            chance.choice(drafted)[-1] = -1
            again += 1
        return verified

    verification._run = spoils  # type: ignore[method-assign]
    prompts = [*PROMPTS, [*PROMPTS[-1], 5, 6, 7]]
    laws = params(len(prompts), 24)
    for _ in range(2):
        assert pair.run(prompts, laws).ids == world.plainly(prompts, laws)
    assert again > 5
