"""Families of today: the ids of every mode are those of `ar` and of transformers, whatever was rejected, cached,
preempted or lost."""

from __future__ import annotations

import pytest

from ssd.config.params import Mode
from ssd.execution.meanwhile import Task
from ssd.verifier.scheduler import Scheduled
from ssd.verifier.verification import PlainVerification, VerifiedBatch
from tests.draft.pair import params
from tests.exactness.situations import FAMILIES, MODES, PROMPTS, World, cold, draft_killed, preempted, warm


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), request.param)


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


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_that_dies_takes_no_token_along(world: World, mode: Mode) -> None:
    found, expected = draft_killed(world, mode)
    assert found == expected


def test_a_draft_token_that_is_not_a_number_leaves_no_trace(world: World) -> None:
    """A row that runs again without its draft tokens begins from the same state."""
    pair = world.pair("sd", "right")
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
    assert pair.run(PROMPTS, laws).ids == world.plainly(PROMPTS, laws)
