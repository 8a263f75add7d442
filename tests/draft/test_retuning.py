"""K, fan-outs and even the mode change from round to round, and nobody can tell from the tokens."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from ssd.params import Mode, Speculation
from ssd.speculation.tuner import Plan
from ssd.target import tuning
from tests.draft.audit import Auditor, World, plainly, world_in
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny

PROMPTS = [tiny.token_ids(n, n) for n in (5, 150, 30)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("mode", "backup"), [("sd", "jit"), ("ssd", "jit"), ("ssd", "auto")])
def test_any_plan_after_any_other(
    world: World, mode: Mode, backup: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuner that throws dice, every round; the draft's cache is audited at every step."""
    dice = Random(f"{mode} {backup} {temperature}")
    plans = set()

    def thrown(*given: Any) -> Plan:
        lookahead = dice.choice((0, 0, 1, 2, 4, 8))
        plan = Plan(lookahead, tuple(dice.randint(1, 4) for _ in range(lookahead + 1)) if lookahead else (), 1.0)
        plans.add(plan.lookahead)
        return plan

    monkeypatch.setattr(tuning, "best_plan", thrown)
    monkeypatch.setattr(tuning, "_DECIDE_EVERY", 1)
    settings = config(Speculation(mode, 0, (), backup, budget=40))
    draft = Draft(settings, world.draft, steps=6)
    Auditor(world, draft, retuned=True)
    texts = Pair(settings, world.target, draft).run(PROMPTS, params(3, 30, temperature))
    assert texts.ids == plainly(world, PROMPTS, temperature, 30).ids
    assert len(plans) > 3
    assert all(m.mode == mode for m in texts.metrics) and sum(m.accepted_tokens for m in texts.metrics) > 0
    draft.assert_empty()


def test_the_real_tuner_on_a_real_draft(world: World) -> None:
    settings = config(Speculation("ssd", 0, ()))
    draft = Draft(settings, world.draft)
    texts = Pair(settings, world.target, draft).run(PROMPTS, params(3, 45))
    assert texts.ids == plainly(world, PROMPTS, 0.0, 45).ids
    draft.assert_empty()
