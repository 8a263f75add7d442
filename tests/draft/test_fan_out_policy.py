"""Another choice of the outcomes to prepare for is another `ssd/speculation/forks.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ssd.config.params import Speculation
from ssd.speculation import forks as outcome
from ssd.speculation.acceptance import Outcome
from tests.draft.audit import World, plainly, world_in
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny

PROMPTS = [tiny.token_ids(30, 30), [5, 6, 7, 8] * 6]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_that_goes_by_probability(world: World, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate at least half as likely as the best: their numbers differ, the tokens do not."""
    numbers = set()

    def likely(
        accepted: int,
        speculation: Sequence[int],
        candidates: Sequence[int],
        chances: Sequence[float],
        *_: Sequence[int],
    ) -> list[Outcome]:
        assert len(chances) == len(candidates) and 0 < sum(chances) <= 1.001
        in_flight = speculation[accepted] if accepted < len(speculation) else -1
        pairs = list(zip(candidates, chances, strict=True))
        found = [token for token, chance in pairs if chance >= max(chances) / 2 and token != in_flight]
        numbers.add(len(found))
        return [Outcome(accepted, token) for token in found]

    monkeypatch.setattr(outcome, "NEEDS_PROBABILITIES", True)
    monkeypatch.setattr(outcome, "forks", likely)
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    texts = Pair(settings, world.target, Draft(settings, world.draft)).run(PROMPTS, params(2, 30, temperature))
    assert texts.ids == plainly(world, PROMPTS, temperature, 30).ids
    assert len(numbers) > 1 and sum(metrics.hits for metrics in texts.metrics) > 0
