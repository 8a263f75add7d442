"""What every round tells about speculation adds up to what a request's figures say at its end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ssd.ipc.messages import Emission, Submit
from ssd.params import Mode, Speculation
from tests.draft.audit import PROMPTS, World, world_in
from tests.draft.pair import Draft, Pair, config, params


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(Path(tmp_path_factory.mktemp("world")))


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_sum_of_the_rounds(world: World, mode: Mode, temperature: float) -> None:
    """A draft of a few steps a round: hits, misses of several kinds, late chains."""
    settings = config(Speculation(mode, 4, (2,)))
    pair = Pair(settings, world.target, Draft(settings, world.draft, steps=5))
    rounds: dict[int, list[Emission]] = {i: [] for i in range(len(PROMPTS))}
    for request, (prompt, law) in enumerate(zip(PROMPTS, params(len(PROMPTS), 30, temperature), strict=True)):
        pair.engine.submit(Submit(request, prompt, law))
    while pair.engine.busy:
        for emission in pair.engine.step():
            rounds[emission.request].append(emission)
        assert pair.engine.load().draft_state == "up"
    said: Counter[str] = Counter()
    for emissions in rounds.values():
        metrics = emissions[-1].metrics
        assert metrics is not None
        assert metrics.rounds == len(emissions) - 1 == sum(metrics.acceptance_histogram)
        assert metrics.drafted_tokens == sum(e.drafted for e in emissions)
        assert metrics.accepted_tokens == sum(e.accepted for e in emissions)
        assert metrics.accepted_tokens == sum(a * count for a, count in enumerate(metrics.acceptance_histogram))
        assert all(e.accepted <= e.drafted for e in emissions) and emissions[0].cache == ""
        cache = Counter(e.cache for e in emissions)
        assert metrics.hits == cache["hit"]
        assert metrics.misses == sum(cache.values()) - cache["hit"] - cache[""] - cache["first_round"]
        said += cache
    if mode == "sd":
        assert set(said) == {""}
    else:
        assert said["hit"] and said["token_not_covered"] and said["first_round"]
        assert "draft_down" not in said
    assert pair.engine.load().kv_cache_usage == 0
