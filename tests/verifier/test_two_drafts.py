"""Two drafts of one target: one in its process for mode `sd`, one in its own process for `ssd`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.static import StaticRunner
from ssd.ipc.device_board import DeviceBoard
from ssd.verifier.engine import TargetEngine
from ssd.verifier.inline_draft import INLINE_MODES, InlineDraft, InlineRunner
from ssd.verifier.inline_proposer import InlineProposer
from ssd.verifier.overlap import DeviceScheduler, OverlappedVerification
from ssd.verifier.overlap_choice import OverlapPolicy
from ssd.verifier.proposer import BoardProposer
from ssd.verifier.sequence import Sequence
from ssd.verifier.verification import PlainVerification
from tests.draft.pair import Draft, Pair, config, params
from tests.verifier.test_inline_draft import Times, remembering
from tests.verifier.test_overlap import KINDS, PAGES, PROMPTS, ROWS, World, followed, requests, run_disturbed

__all__ = ["remembering"]

pytestmark = pytest.mark.usefixtures("replayed")


class Free(OverlapPolicy):
    """Overlap always pays."""

    pays = True


class TwoDrafts(Pair):
    """`inline` is the draft in the target's process. Rows in `auto` follow `chosen`, one mode or another by turns."""

    def __init__(self, world: World, target: StaticRunner, overlap: bool, memory: object = None, **fields: int) -> None:
        sizes = {"max_num_seqs": ROWS, "num_pages": PAGES, "draft_num_pages": PAGES} | fields
        self.config = config(Speculation("auto", 3, (2,), "jit"), **sizes)
        self.draft = Draft(self.config, world.draft)
        self.post, self._said_hello = self.deliver, False
        self.between_steps: Callable[[], None] = lambda: None
        self.inline = InlineDraft(self.config, InlineRunner(world.draft.model, self.config))
        device = DeviceScheduler(target, DeviceBoard(self.draft.board, target.model.device), self.inline)
        beside = self.beside = InlineProposer(self.inline, device, Times(), memory)  # type: ignore[arg-type]
        post, also = (lambda message: self.post(message)), {"memory": memory, "overlaps": overlap, "inline": beside}
        self.proposer = BoardProposer(self.draft.board, post, **also)  # type: ignore[arg-type]
        self.modes: dict[int, Mode] = {}
        self.proposer.plans.planned = self._planned  # type: ignore[method-assign]
        plain, policy = PlainVerification(target), Free(("ar", *INLINE_MODES))
        most = self.config.max_num_batched_tokens
        self.overlapped = OverlappedVerification(plain, device, self.proposer.asks, most, policy)
        self.engine = TargetEngine(self.config, self.overlapped if overlap else plain, self.proposer)
        self.proposer.session.join(self.draft.epoch)

    def _planned(self, sequence: Sequence) -> Speculation:
        mode = self.modes.get(sequence.request, "sd")
        return Speculation(mode, 3, (2,), "jit") if sequence.tuned else sequence.speculation


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_draft_serves_its_mode(world: World, overlap: bool, temperature: float) -> None:
    """And neither hears of the other's requests."""
    for mode in ("sd", "ssd"):
        own = TwoDrafts(world, world.static(), overlap)
        own.modes = dict.fromkeys(range(ROWS), mode)
        seen, laws = followed(own), params(ROWS, 40, temperature)
        found = own.run(PROMPTS[:ROWS], laws)
        assert found.ids == world.truth(PROMPTS[:ROWS], laws)
        assert all(metrics.accepted_tokens > 0 for metrics in found.metrics)
        assert (own.inline.steps > 0, own.draft.forwards > 0) == (mode == "sd", mode == "ssd")
        assert all((metrics.hits > 0) == (mode == "ssd") for metrics in found.metrics)
        assert (len(seen) > 5) == overlap


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_ids_stay_those_of_ar_as_rows_change_their_draft(world: World, seed: int, overlap: bool) -> None:
    """All at once, or each by itself, so that one batch has both; every draft brings tokens again after a change."""
    dice = Random(seed)
    own = TwoDrafts(world, world.static(), overlap)
    brought: dict[str, int] = {"sd": 0, "ssd": 0}
    steps, rounds = {"sd": 0, "ssd": 0}, 0

    def change() -> None:
        nonlocal rounds
        rounds += 1
        for mode, count in (("sd", own.inline.steps), ("ssd", own.draft.forwards)):
            brought[mode] += count > steps[mode]
            steps[mode] = count
        if rounds % 12 == 0:
            together = dice.choice(("sd", "ssd"))
            own.modes = {n: together if seed % 2 else dice.choice(("sd", "ssd", "ngram")) for n in range(ROWS)}

    own.between_steps = change
    laws = params(ROWS, 120, 0.8 * (seed > 1))
    found = own.run(PROMPTS[:ROWS], laws)
    assert found.ids == world.truth(PROMPTS[:ROWS], laws)
    assert min(brought.values()) > 5
    own.draft.assert_empty()
    own.inline._pool.check()
    assert own.inline._pool.live == 0 and not own.beside._missed and not own.beside._guessed


@pytest.mark.parametrize("seed", range(4))
def test_ids_are_those_of_ar_whatever_happens(world: World, seed: int, remembering: object) -> None:
    """Requests that come, end early, are aborted or lose their pages, as plans change; some ask for a mode."""
    dice = Random(seed)
    modes = [{"speculation": Speculation("ar")}, {"speculation": Speculation("ngram")}]
    modes += [{"speculation": Speculation(mode, 3, (2,), "jit")} for mode in ("sd", "ssd")]
    prompts, laws = requests(dice, [*KINDS, *modes])
    pages, of_draft = (dice.choice((30, 60, PAGES)) for _ in range(2))
    sizes = {"num_pages": pages, "draft_num_pages": of_draft, "max_model_len": 100}
    own = TwoDrafts(world, world.static(pages), True, remembering if seed % 2 else None, **sizes)
    planned = own._planned

    def changing(sequence: Sequence) -> Speculation:
        if sequence.request not in own.modes or dice.random() < 0.05:
            own.modes[sequence.request] = dice.choice(("sd", "ssd", "ngram"))
        return planned(sequence)

    own.proposer.plans.planned = changing  # type: ignore[method-assign]
    run_disturbed(own, dice, prompts, laws, world.truth(prompts, laws))
    assert own.inline.steps > 0 and own.draft.forwards > 0 and own.inline._pool.live == 0
    own.inline._pool.check()


def test_the_plan_knows_which_draft_is_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own, drafted = TwoDrafts(world, world.static(), True), list[tuple[Mode, ...]]()
    situate = own.proposer.tuning.situate
    monkeypatch.setattr(
        own.proposer.tuning,
        "situate",
        lambda kinds, modes, tokens: (drafted.append(modes), situate(kinds, modes, tokens)),
    )
    law = [SamplingParams(max_tokens=6)]
    own.run(PROMPTS[:1], law)
    assert {*drafted} == {("sd", "ssd")}
    drafted.clear()
    own.post = lambda message: True
    own.proposer.session.park()
    own.run(PROMPTS[:1], law)
    assert {*drafted} == {("sd",)}
    drafted.clear()
    own.inline.fail()
    own.run(PROMPTS[:1], law)
    assert {*drafted} == {()}
