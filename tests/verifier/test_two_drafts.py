"""Two drafts of one target: one in its process for mode `sd`, one in its own process for `ssd`."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from random import Random
from types import SimpleNamespace

import pytest

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.graph_shapes import GraphShape
from ssd.execution.static import StaticRunner
from ssd.ipc.device_board import DeviceBoard
from ssd.tuning.estimates import DecodingRound
from ssd.tuning.plan import Plan
from ssd.verifier.board_proposer import BoardProposer
from ssd.verifier.engine import TargetEngine
from ssd.verifier.inline_draft import INLINE_MODES, InlineDraft, InlineRunner
from ssd.verifier.inline_proposer import InlineProposer
from ssd.verifier.overlap import DeviceScheduler, FollowedRow, OverlappedVerification
from ssd.verifier.overlap_choice import OverlapPolicy
from ssd.verifier.sequence import Sequence
from ssd.verifier.suffix_memory import SuffixMemory
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

    def __init__(
        self, world: World, target: StaticRunner, overlap: bool, memory: SuffixMemory | None = None, **fields: int
    ) -> None:
        sizes = {"max_num_seqs": ROWS, "num_pages": PAGES, "draft_num_pages": PAGES, "inline_num_pages": PAGES} | fields
        self.config = config(Speculation("auto", 3, (2,), "jit"), **sizes)
        self.draft = Draft(self.config, world.draft)
        self.post, self._said_hello = self.deliver, False
        self.between_steps: Callable[[], None] = lambda: None
        self.inline = InlineDraft(self.config, InlineRunner(world.draft.model, self.config))
        device = DeviceScheduler(target, DeviceBoard(self.draft.board, target.model.device), self.inline)
        beside = self.beside = InlineProposer(self.inline, device, Times(), memory)
        post, also = (lambda message: self.post(message)), {"memory": memory, "overlaps": overlap, "inline": beside}
        self.proposer = BoardProposer(self.draft.board, post, **also)  # type: ignore[arg-type]
        self.modes: dict[int, Mode] = {}
        self.lookahead = 3
        self.proposer.plans.planned = self._planned  # type: ignore[method-assign]
        plain, policy = PlainVerification(target), Free(("ar", *INLINE_MODES))
        most = self.config.max_num_batched_tokens
        self.overlapped = OverlappedVerification(plain, device, self.proposer.asks, most, policy)
        self.engine = TargetEngine(self.config, self.overlapped if overlap else plain, self.proposer)
        self.proposer.session.join(self.draft.epoch)

    def _planned(self, sequence: Sequence, _: object) -> Speculation:
        mode = self.modes.get(sequence.request, "sd")
        return Speculation(mode, self.lookahead, (2,), "jit") if sequence.tuned else sequence.speculation


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("overlap", "temperature"), [(False, 0.0), (True, 0.0), (True, 0.8)])
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
@pytest.mark.parametrize("seed", [0, 3])
def test_ids_stay_those_of_ar_as_rows_change_their_draft(world: World, seed: int, overlap: bool) -> None:
    """All at once, or each by itself, so that one batch has both; every draft brings tokens again after a change."""
    dice = Random(seed)
    own = TwoDrafts(world, world.static(), overlap)
    brought: dict[str, int] = {"sd": 0, "ssd": 0}
    steps, rounds = {"sd": 0, "ssd": 0}, 0

    def change() -> None:
        nonlocal rounds
        rounds += 1
        for mode, done in (("sd", own.inline.steps), ("ssd", own.draft.forwards)):
            brought[mode] += done > steps[mode]
            steps[mode] = done
        if rounds % 5 == 0:
            own.lookahead = dice.randint(1, 5)
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


@pytest.mark.parametrize("seed", range(3))
def test_ids_are_those_of_ar_whatever_happens(world: World, seed: int, remembering: SuffixMemory) -> None:
    """Requests that come, end early, are aborted or lose their pages, as plans change; some ask for a mode."""
    dice = Random(seed)
    modes = [{"speculation": Speculation("ar")}, {"speculation": Speculation("ngram")}]
    modes += [{"speculation": Speculation(mode, 3, (2,), "jit")} for mode in ("sd", "ssd")]
    prompts, laws = requests(dice, [*KINDS, *modes])
    pages, of_draft = (dice.choice((30, 60, PAGES)) for _ in range(2))
    sizes = {"num_pages": pages, "draft_num_pages": of_draft, "inline_num_pages": of_draft, "max_model_len": 100}
    own = TwoDrafts(world, world.static(pages), True, remembering if seed % 2 else None, **sizes)
    planned = own._planned

    every: tuple[Mode, ...] = ("sd", "ssd", "ngram")
    own.modes = {n: every[n % 3] for n in range(len(prompts))}

    def changing(sequence: Sequence, _: object) -> Speculation:
        own.lookahead = dice.randint(1, 5) if dice.random() < 0.1 else own.lookahead
        if dice.random() < 0.05:
            own.modes[sequence.request] = dice.choice(every)
        return planned(sequence, _)

    own.proposer.plans.planned = changing  # type: ignore[method-assign]
    run_disturbed(own, dice, prompts, laws, world.truth(prompts, laws))
    assert own.inline.steps > 0 and own.draft.forwards > 0 and own.inline._pool.live == 0
    own.inline._pool.check()


def test_a_row_is_drafted_by_the_draft_of_its_mode_alone(world: World) -> None:
    """Beside a row whose text has no room in the other draft: that one drafts for nobody then."""
    own = TwoDrafts(world, world.static(), True)
    own.modes, device = {0: "sd", 1: "ssd"}, own.overlapped._device
    makes_room, launch_next = own.inline.makes_room, device.launch_next
    asked, launched = count(), list[tuple[bool, list[tuple[bool, int]]]]()

    def no_room(request: Sequence, stop: int) -> bool:
        """Now and then behind a running verification."""
        return not (request.proposal and next(asked) % 3 == 2) and makes_room(request, stop)

    def noted(rows: list[FollowedRow], shape: GraphShape) -> None:
        launch_next(rows, shape)
        launched.append((device._inline, [(row.inline, row.most) for row in rows]))

    own.inline.makes_room, device.launch_next = no_room, noted  # type: ignore[method-assign,assignment]
    laws = [SamplingParams(max_tokens=tokens) for tokens in (80, 40)]
    assert own.run(PROMPTS[:2], laws).ids == world.truth(PROMPTS[:2], laws)
    assert all(place == inline for inline, rows in launched for place, most in rows if most)
    assert {(len(rows), inline) for inline, rows in launched if any(most for _, most in rows)} == {
        (2, False),
        (1, True),
    }


def test_a_text_is_given_back_by_the_draft_that_does_not_serve_its_mode(world: World) -> None:
    own, held = TwoDrafts(world, world.static(), True), list[tuple[bool, bool]]()

    def change() -> None:
        held.append((0 in own.inline._texts, 0 in own.proposer.session.tracked))
        own.modes[0] = "ssd" if len(held) // 12 % 2 else "sd"

    own.between_steps = change
    assert own.run(PROMPTS[:1], params(1, 120)).ids == world.truth(PROMPTS[:1], params(1, 120))
    assert (True, True) not in held
    inline, apart = (True, False), (False, True)
    assert inline in held[:12] and apart in held[12:24] and inline in held[24:36] and apart not in held[:12]


def test_there_are_pages_for_all_that_a_running_verification_may_add(world: World) -> None:
    """Whatever K is in the next one."""
    own, short = TwoDrafts(world, world.static(), True), list[int]()
    makes_room = own.inline.makes_room

    def checked(request: Sequence, stop: int) -> bool:
        running = [row for row in own.overlapped._running if row.sequence is request]
        if running:
            short.append(stop - len(request.tokens) - len(running[0].drafts.ids) - 1 - own.lookahead)
        return makes_room(request, stop)

    def change() -> None:
        own.lookahead = 3 + own.lookahead % 2

    own.inline.makes_room, own.between_steps = checked, change  # type: ignore[method-assign,assignment]
    assert own.run(PROMPTS[:1], params(1, 60)).ids == world.truth(PROMPTS[:1], params(1, 60))
    assert len(short) > 5 and {*short[:-6]} == {0}


class Told:
    """What the tuner of a pair is told."""

    def __init__(self, own: TwoDrafts) -> None:
        self.rounds, self.outcomes = list[DecodingRound](), list[tuple[int, int]]()
        tuning, (greedy, *_) = own.proposer.tuning, own.proposer.tuning.estimates.learners
        note, outcome = tuning.note, greedy.outcome
        tuning.note = lambda round_, draft: (self.rounds.append(round_), note(round_, draft))[1]  # type: ignore
        greedy.outcome = lambda *seen: (self.outcomes.append(seen), outcome(*seen))[1]  # type: ignore

    @property
    def decoding(self) -> list[DecodingRound]:
        return [round_ for round_ in self.rounds if round_ is not None]


def test_the_tuner_learns_what_the_draft_in_the_targets_process_brings(world: World) -> None:
    """But not how long its rounds' forwards take, which nobody can tell apart; K is the tuner's, up to its end."""
    own = TwoDrafts(world, world.static(), True)
    told = Told(own)
    metrics = own.run(PROMPTS[:1], params(1, 60)).metrics[0]
    assert told.decoding and all(round_.busy and round_.plan == Plan("sd", 3, 2) for round_ in told.decoding[:-3])
    accepted = sum(accepted for _, accepted in told.outcomes)
    assert metrics.accepted_tokens - 6 <= accepted <= metrics.accepted_tokens
    assert not own.proposer.tuning.estimates.ends


def test_times_beside_a_row_that_is_drafted_for_are_no_plain_verifications(world: World) -> None:
    own = TwoDrafts(world, world.static(), True)
    told, plain = Told(own), SamplingParams(max_tokens=40, speculation=Speculation("ar"))
    own.run(PROMPTS[:2], [SamplingParams(max_tokens=40), plain])
    beside = [round_.busy for round_ in told.decoding if round_.batch == 2]
    assert len(beside) > 10 and all(beside)


def test_without_a_usable_draft_a_round_says_nothing_of_its_plan(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own = TwoDrafts(world, world.static(), True)
    told = Told(own)
    own.inline.fail()
    monkeypatch.setattr(own.inline, "_again", math.inf)
    own.run(PROMPTS[:1], params(1, 40))
    assert len(told.decoding) > 20 and not any(round_.plan for round_ in told.decoding)


def test_guesses_of_the_memory_are_not_the_drafts_acceptance(world: World, remembering: SuffixMemory) -> None:
    own = TwoDrafts(world, world.static(), True, remembering)
    told, by_draft, from_memory = Told(own), 0, 0
    for _ in range(3):
        accepted = own.run(PROMPTS[:1], params(1, 60)).metrics[0].accepted_by_source
        by_draft, from_memory = by_draft + accepted.get("draft", 0), from_memory + accepted.get("memory", 0)
    assert from_memory > 10 and 0 < sum(accepted for _, accepted in told.outcomes) <= by_draft


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
    planned: list[Mode] = []
    monkeypatch.setattr(own.proposer.tuning, "plan", lambda asked, drafted: (planned.append(drafted), Plan("ssd"))[1])
    sequence = SimpleNamespace(speculation=Speculation("sd", 3), tuned=True, asked=Speculation())
    assert own.proposer.plans.wants_draft([sequence]) and planned == [("ssd",)]  # type: ignore[list-item]
    monkeypatch.setattr(own.inline, "_again", 0.0)
    assert own.proposer.plans.wants_draft([sequence]) and planned[1:] == [("sd", "ssd")]  # type: ignore[list-item]
