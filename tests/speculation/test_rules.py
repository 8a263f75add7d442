"""Acceptance rules: who chooses them, and that another one needs nothing but its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest
import torch

from ssd.config.params import Sampler, SamplingParams, Speculation
from ssd.law import Law
from ssd.speculation.acceptance import Outcome, coupled
from ssd.speculation.noise import Stream, stream_seed
from ssd.speculation.rules import RULES, AcceptanceRule, VerifiedRow, acceptance_rule
from tests.draft.audit import world_in
from tests.draft.pair import Draft, Pair, config
from tests.models import tiny


def test_every_sampler_has_a_rule() -> None:
    assert set(get_args(Sampler)) == RULES.keys()


@pytest.mark.parametrize("sampler", RULES)
def test_greedy_requests_emit_the_samples_of_the_target(sampler: str) -> None:
    greedy, warm = acceptance_rule(sampler, 0.0), acceptance_rule(sampler, 0.7)
    assert greedy.emits_samples and greedy.shares_noise and not greedy.needs_draft_probs
    assert warm is RULES[sampler]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_who_needs_draft_probabilities_shares_no_noise(rule: AcceptanceRule) -> None:
    """Tokens drawn with the target's noise depend on its samples: their distribution given these is another one."""
    assert not (rule.needs_draft_probs and (rule.shares_noise or rule.allows_copies))


def test_each_draw_of_the_ratio_rule_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test for each draft token, the residual at the one that is rejected, and the bonus token."""
    law, drawn = Law(1.0, seed=7), list[tuple[str, int, int]]()

    def test(seed: int, position: int) -> float:
        drawn.append(("test", seed, position))
        return 0.5

    def noise(seed: int, position: int) -> torch.Tensor:
        drawn.append(("residual", seed, position))
        return torch.zeros(3)

    monkeypatch.setattr("ssd.speculation.noise.uniform", test)
    rule, logits = RULES["rejection"], torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    q = torch.full((2, 3), 1 / 3)
    assert rule.outcome([0, 1], [0, 0, 2], VerifiedRow(logits, law, [4, 5, 6], q, noise)) == Outcome(1, 0)
    accept, residual = (stream_seed(7, stream) for stream in (Stream.ACCEPT, Stream.RESIDUAL))
    assert {("test", accept, 4), ("test", accept, 5)} <= set(drawn)
    assert {seed for kind, seed, _ in drawn if kind == "test"} == {accept}
    assert [draw for draw in drawn if draw[0] == "residual"] == [("residual", residual, 5)]
    assert rule.sampled_by(law) == law.with_seed(stream_seed(7, Stream.BONUS))


class Stingy(AcceptanceRule):
    """Accepts at most one draft token."""

    emits_samples = False

    def outcome(self, draft: Sequence[int], own: Sequence[int], row: VerifiedRow) -> Outcome:
        assert len(row.logits) == len(own) == len(row.positions) == len(draft) + 1 > 1
        return coupled(draft[:1], own)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_another_rule_needs_only_its_class(
    temperature: float,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_in(tmp_path_factory.mktemp("world"))
    monkeypatch.setitem(RULES, "rejection", Stingy())
    prompts = [tiny.token_ids(length, length) for length in (3, 9)]
    laws = [SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(2)]
    found = {}
    for mode, sampler in (("ar", "coupled"), ("ssd", "coupled"), ("ssd", "rejection")):
        settings = config(Speculation(mode, 3, (2,), sampler=sampler))  # type: ignore[arg-type]
        draft = None if mode == "ar" else Draft(settings, world.draft)
        found[mode, sampler] = Pair(settings, world.target, draft).run(prompts, laws)
    assert len({str(each.ids) for each in found.values()}) == 1
    longest = {
        name: max(len(metrics.acceptance_histogram) for metrics in each.metrics) - 1 for name, each in found.items()
    }
    assert longest["ssd", "coupled"] > 1
    assert longest["ssd", "rejection"] == (1 if temperature else longest["ssd", "coupled"])
