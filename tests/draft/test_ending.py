"""In `sd` with an open K a draft ends a speculation where another token does not pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.config.params import Speculation
from ssd.draft.chances import Calibration
from ssd.execution.runner import Runner
from ssd.ipc.board import TRUNK, Cached, Key
from ssd.ipc.messages import Outcomes, Verified
from ssd.ipc.trace_ring import Mark
from ssd.law import Law
from ssd.tuning.estimates import kind_of
from ssd.verifier.draft_session import DraftSession
from ssd.verifier.missed_rows import MissedRows
from ssd.verifier.misses import MissCosts
from tests.draft.audit import GREEDY, PROMPTS, World, plainly, world_in
from tests.draft.pair import Draft, Pair, ScriptedTarget, config, params
from tests.models import tiny

K = 7
WARM = Law(temperature=0.8, seed=77)
SD = Speculation("sd", K, (1,) * (K + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def world(folder: Path) -> World:
    return world_in(folder)


class Waiting(ScriptedTarget):
    """A target that waits for a trunk whose tokens should all be right with the probability `least`."""

    least = 0.0

    def wait(self, accepted: int, token: int) -> None:
        self._missed = Key(self.draft.epoch, self.request, self.round, len(self.tokens), accepted, token)
        self.tokens += [*self.in_flight[:accepted], token]
        self.round += 1
        self.draft.hear(Outcomes([Verified(self.request, self.round - 1, accepted, token, None, self.least)]))

    def trunk(self) -> tuple[list[int], bool]:
        """What is on the board: the tokens, and if they are all."""
        assert self._missed is not None
        found = self.draft.board.find(self.request, self._missed)
        assert found is not None and found.entry == TRUNK
        return found.ids, found.ended


def drafting(runner: Runner, law: Law, least: float) -> Waiting:
    found = Waiting(Draft(config(SD), runner), 1, list(PROMPTS[0]), law, SD)
    found.least = least
    return found


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_trunk_ends_with_the_first_token_below_the_asked_probability(world: World, law: Law) -> None:
    whole = drafting(world.draft, law, 0.0)
    whole.wait(0, 5)
    tokens, ended = whole.trunk()
    assert len(tokens) == K and not ended
    tree = whole.draft.engine.trees[1]
    reached, chances = 1.0, []
    for node in range(K):
        scores = torch.tensor(tree.guesses[node].scores)
        reached *= Calibration()(float(scores.softmax(0)[0]))
        chances.append(reached)
    for least in (0.9, 0.3, 0.05, 1e-9):
        short = drafting(world.draft, law, least)
        short.wait(0, 5)
        length = next((n for n, chance in enumerate(chances, 1) if chance < least), K)
        assert short.trunk() == (tokens[:length], chances[length - 1] < least)
    assert len({next((n for n, chance in enumerate(chances, 1) if chance < p), K) for p in (0.9, 0.3, 0.05)}) > 1


def test_an_ended_trunk_is_verified_as_it_is_and_the_next_one_begins_anew(world: World) -> None:
    target = drafting(world.draft, GREEDY, 1.0)
    target.wait(0, 5)
    tokens, ended = target.trunk()
    assert ended and len(tokens) == 1
    forwards = target.draft.forwards
    target.launch(K)
    assert target.draft.forwards == forwards, "nothing more is drafted while the target verifies"
    target.least = 0.0
    target.wait(1, 9)
    assert len(target.trunk()[0]) == K
    target.release()
    target.draft.assert_empty()


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
def test_our_kernels_end_where_the_engine_does(
    world: World, folder: Path, law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an outcome is known, a step drafts as many tokens as may pay, and ends by itself."""
    found = []
    for at_once in (False, True):
        target, lengths = drafting(tiny.runner(folder / "draft", torch.float32), law, 0.2), list[int]()
        drafter = target.draft.engine.drafter
        assert drafter.goes_on, "the kernels are not built"
        asked = list[int]()
        step = drafter._step
        assert step is not None

        def counted(*given: Any, _step: Any = step, _asked: list[int] = asked) -> Any:
            result = _step(*given)
            _asked.append(len(result[0].ids))
            return result

        monkeypatch.setattr(drafter, "_step", counted)
        monkeypatch.setattr(target.draft.engine._depths, "depths", lambda *_, n=at_once: K if n else 1)
        for round_ in range(12):
            target.wait(0, 5 + round_)
            lengths.append(len(target.trunk()[0]))
            target.launch(K)
        found.append(lengths)
        if at_once:
            assert asked[1:] == lengths[1:], "one step for each trunk but the first, and no token too many"
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_answers_are_those_of_plain_decoding_and_a_target_does_not_wait_for_more(
    world: World, temperature: float, sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests alone and in a batch, K open. No wait ends by its limit: a target that missed the end would wait for it.
    In the batch no end is asked for, as long as other rows run."""
    settings, reasons, ended = config(Speculation("sd", sampler=sampler)), set[Mark](), list[bool]()
    asked, find = list[int](), DraftSession.find

    def found(self: DraftSession, *given: Any) -> Cached | None:
        result = find(self, *given)
        ended.append(result is not None and result.ended)
        return result

    def least(costs: MissCosts, lookahead: int) -> float:
        asked.append(costs.batch)
        return 0.3

    monkeypatch.setattr(DraftSession, "find", found)
    monkeypatch.setattr(MissCosts, "least", least)
    monkeypatch.setattr(MissedRows, "note_reason", lambda self, request, reason, *figures: reasons.add(reason))
    accepted = 0
    for prompts in ([PROMPTS[0]], [PROMPTS[1]], PROMPTS):
        pair = Pair(settings, world.target, Draft(settings, world.draft))
        texts = pair.run(prompts, params(len(prompts), 40, temperature))
        if sampler == "coupled" or temperature == 0.0:
            assert texts.ids == plainly(world, prompts, temperature, 40).ids
        accepted += sum(metrics.accepted_tokens for metrics in texts.metrics)
        first, *later = pair.proposer.tuning.estimates.learners[kind_of(temperature)]._acceptance
        assert first.count
        if len(prompts) == 1:
            (metrics,) = texts.metrics
            assert 0 < metrics.drafted_tokens < K / 2 * metrics.rounds and any(ended)
        else:
            assert all(metrics.accepted_tokens for metrics in texts.metrics)
        assert any(mean.count for mean in later) == (len(prompts) > 1), "of these it is surer than usual if it may end"
    assert accepted and set(asked) == {1} and Mark.SILENT not in reasons
