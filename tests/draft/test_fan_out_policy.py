"""Another choice of the outcomes to prepare for is another `ssd.speculation.fan_out.forks`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ssd.config.params import Speculation
from ssd.speculation import fan_out as outcome
from ssd.speculation.acceptance import Outcome
from tests.draft.audit import World, plainly, world_in
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny

PROMPTS = [tiny.token_ids(30, 30), [5, 6, 7, 8] * 6]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_another_policy_changes_no_token(world: World, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that prepares for every even id alone: their numbers differ, the tokens do not."""
    numbers = set()

    def even(
        accepted: int, speculation: Sequence[int], candidates: Sequence[int], fan_out: Sequence[int]
    ) -> list[Outcome]:
        in_flight = speculation[accepted] if accepted < len(speculation) else -1
        found = [token for token in candidates if token % 2 == 0 and token != in_flight]
        numbers.add(len(found))
        return [Outcome(accepted, token) for token in found]

    monkeypatch.setattr(outcome, "forks", even)
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    texts = Pair(settings, world.target, Draft(settings, world.draft)).run(PROMPTS, params(2, 30, temperature))
    assert texts.ids == plainly(world, PROMPTS, temperature, 30).ids
    assert len(numbers) > 1 and sum(metrics.hits for metrics in texts.metrics) > 0
