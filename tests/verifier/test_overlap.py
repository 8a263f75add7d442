"""Verifications launched before outcomes are known to the host: the same ids, and the same hits, as without."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import DRAFTED, Mode, SamplingParams, Speculation
from ssd.execution.adjustments import adjust
from ssd.execution.graph_shapes import LONGEST_ROW
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.ipc import sockets
from ssd.ipc.board import BoardReader, size_bytes
from ssd.ipc.messages import TARGET_TO_FRONTEND, Emission, Step, Submit
from ssd.ipc.process import HEARTBEAT_BYTES, Child, Start, memory_file
from ssd.ipc.public import Metrics, pack, unpack
from ssd.kernels.rounds import build, decide, note_outcomes
from ssd.speculation.sampling import Draws
from ssd.verifier.overlap import Ask, OverlappedVerification, overlapped
from ssd.verifier.overlap_choice import OverlapPolicy
from ssd.verifier.process import Target
from ssd.verifier.proposer import NextDraft, Proposer
from ssd.verifier.verification import PlainVerification
from tests.draft.pair import PAGE_SIZE, VOCABULARY, Draft, Pair, Texts, config, empty_board, params
from tests.models import tiny
from tests.verifier.scripted import Poisoned

pytestmark = pytest.mark.usefixtures("replayed")

PAGES, ROWS = 300, 4
PROMPTS = [tiny.token_ids(length, length) for length in (3, 18, 7, 41, 2)]


class World:
    """A target and a draft that agrees with it about every other time."""

    def __init__(self, folder: Path) -> None:
        target = tiny.llama(folder / "target", seed=3)
        self.plain = tiny.runner(target, torch.float64, pages=PAGES)
        self.draft = tiny.runner(tiny.noisy_copy(target, folder / "draft", noise=0.03), torch.float64, pages=PAGES)

    def static(
        self, pages: int = PAGES, deterministic: bool = False, longest: int = 9, kind: Any = StaticRunner
    ) -> Any:
        """A slot of its cache that is read before it is written makes a NaN."""
        made = kind(self.plain.model, pages, PAGE_SIZE, deterministic, most_rows=ROWS, longest=longest)
        made.cache.keys.fill_(torch.nan)
        made.cache.values.fill_(torch.nan)
        return made

    def truth(self, prompts: Sequence[list[int]], laws: Sequence[SamplingParams]) -> list[list[int]]:
        settings = config(Speculation("ar"), num_pages=PAGES)
        return Pair(settings, self.plain).run(prompts, laws).ids

    def alone(self, target: Runner, overlap: bool = True, **fields: Any) -> Pair:
        """An engine without a draft."""
        settings = config(Speculation("ar"), **{"max_num_seqs": ROWS, "num_pages": PAGES, "draft": None} | fields)
        return Pair(settings, target, overlap=overlap)

    def pair(self, speculation: Speculation, target: Runner, overlap: bool = True, **fields: Any) -> Pair:
        sizes = {"max_num_seqs": ROWS, "num_pages": PAGES, "draft_num_pages": PAGES}
        settings = config(speculation, **sizes | fields)
        return Pair(settings, target, Draft(settings, self.draft), overlap)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def counted(texts: Texts) -> list[tuple[int, ...]]:
    def of(m: Metrics) -> tuple[int, ...]:
        return m.rounds, m.drafted_tokens, m.accepted_tokens, m.hits, m.misses

    return [of(metrics) for metrics in texts.metrics]


def followed(pair: Pair) -> list[int]:
    """How many rows each verification had that was launched behind another one, as they are launched."""
    assert pair.overlapped is not None
    seen: list[int] = []
    device, launch_next = pair.overlapped._device, pair.overlapped._device.launch_next

    def noted(rows: Any, shape: Any) -> None:
        seen.append(len(rows))
        launch_next(rows, shape)

    device.launch_next = noted  # type: ignore[method-assign]
    return seen


def fetches(pair: Pair) -> list[int]:
    """The slots whose entries of the board are fetched, as they are."""
    assert pair.overlapped is not None
    seen: list[int] = []
    board, fetch = pair.overlapped._device._board, pair.overlapped._device._board.fetch

    def noted(slots: int) -> None:
        seen.append(slots)
        fetch(slots)

    board.fetch = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("lookahead", "fan_out", "temperature", "deterministic"),
    [(1, (2,), 0.0, False), (1, (2,), 0.8, True), (4, (3,), 0.8, False), (4, (3,), 0.0, True), (8, (1,), 0.8, True)],
    ids=str,
)
def test_ids_and_hits_are_those_of_the_host(
    world: World, lookahead: int, fan_out: tuple[int, ...], temperature: float, deterministic: bool
) -> None:
    """With what the one shape of a deterministic engine has room for."""
    speculation = Speculation("ssd", lookahead, fan_out, backup="none")
    count = min(ROWS, LONGEST_ROW // (lookahead + 1)) if deterministic else ROWS
    prompts, laws = PROMPTS[:count], params(count, 40, temperature)
    found = []
    for overlap in (False, True):
        pair = world.pair(speculation, world.static(deterministic=deterministic), overlap)
        seen = followed(pair) if overlap else []
        found.append(pair.run(prompts, laws))
        assert pair.draft is not None
        pair.draft.assert_empty()
    assert found[0].ids == found[1].ids == world.truth(prompts, laws)
    assert counted(found[0]) == counted(found[1])
    assert sum(m.hits for m in found[1].metrics) > 5 and sum(m.misses for m in found[1].metrics) > 0
    assert len(seen) > 5 and max(seen) == count


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.8, "repetition_penalty": 0.9, "frequency_penalty": -0.2, "logit_bias": {7: 2.0}},
    {"temperature": 0.7, "top_k": 20, "min_tokens": 25, "stop_token_ids": tuple(range(0, 131, 3))},
    {"temperature": 0.9, "allowed_token_ids": tuple(range(3, 131, 2)), "presence_penalty": 0.4},
]


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_adjusted_requests_are_overlapped(world: World, triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts what it has written, drafts and outcomes that the host has not seen; one asks for nothing."""
    if triton:
        for function in (adjust, build, decide, note_outcomes):
            monkeypatch.setattr(function, "serves", lambda _: True)
    tokens = 12 if triton else 40
    asked: list[dict[str, Any]] = [{}, *ADJUSTED[:3]] if triton else [*ADJUSTED]
    laws = [SamplingParams(seed=n, max_tokens=tokens, **kind) for n, kind in enumerate(asked)]
    found = []
    for overlap in (False, True):
        pair = world.pair(Speculation("ssd", 4, (3,), backup="none"), world.static(), overlap)
        seen = followed(pair) if overlap else []
        found.append(pair.run(PROMPTS[:4], laws))
    assert found[0].ids == found[1].ids == world.truth(PROMPTS[:4], laws)
    plain = [SamplingParams(seed=n, max_tokens=tokens, temperature=law.temperature) for n, law in enumerate(laws)]
    assert all(one != other for one, other in zip(found[1].ids[1:], world.truth(PROMPTS[:4], plain)[1:], strict=True))
    assert counted(found[0]) == counted(found[1])
    assert sum(metrics.accepted_tokens for metrics in found[1].metrics) > 0
    assert len(seen) > 5 and max(seen) == 4


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.7, "stop_token_ids": tuple(range(0, 131, 9))},
    {"stop_token_ids": tuple(range(0, 131, 17))},
    {"temperature": 0.8, "top_k": 7},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.8, "repetition_penalty": 0.8, "logit_bias": {5: 4.0, 9: -3.0}, "min_tokens": 9},
    {"allowed_token_ids": tuple(range(0, 131, 2)), "stop_token_ids": tuple(range(0, 131, 17))},
    {"min_tokens": 5, "allowed_token_ids": tuple(range(0, 131, 3)), "stop_token_ids": (0, 3)},
]
SPECULATIONS: list[dict[str, Any]] = [
    {"speculation": Speculation("ar")},
    {"speculation": Speculation("sd", 3, (3,), "jit")},
    {"speculation": Speculation("ssd", 2, (2,), backup="none")},
    {"speculation": Speculation("ssd", 0, (), "jit")},
]


def requests(dice: Random, kinds: Sequence[dict[str, Any]]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return twelve prompts and what is asked of each: half of them of the first kind."""
    prompts = [tiny.token_ids(dice.choice((1, 2, 6, 19, 40)), 50 + n) for n in range(12)]
    chosen = [kinds[0] if dice.random() < 0.5 else dice.choice(kinds) for _ in prompts]
    laws = [SamplingParams(seed=n, max_tokens=dice.choice((1, 2, 3, 20, 45)), **kind) for n, kind in enumerate(chosen)]
    return prompts, laws


def run_disturbed(
    pair: Pair, dice: Random, prompts: Sequence[list[int]], laws: Sequence[SamplingParams], expected: list[list[int]]
) -> None:
    """Run requests that arrive one by one and are aborted now and then; compare their ids with those expected."""
    told: dict[int, str] = {}
    ids: list[list[int]] = [[] for _ in prompts]
    arrivals = sorted((dice.randrange(60), request) for request in range(len(prompts)))
    aborted: set[int] = set()
    step = 0
    while arrivals or pair.engine.busy:
        while arrivals and arrivals[0][0] <= step:
            request = arrivals.pop(0)[1]
            pair.engine.submit(Submit(request, prompts[request], laws[request]))
        pair.between_steps()
        if dice.random() < 0.03 and pair.engine.scheduler.running:
            aborted.add(dice.choice(pair.engine.scheduler.running).request)
            for request in aborted:
                pair.engine.abort(request)
        for emission in pair.engine.step():
            assert emission.request not in told, "something was said after the end"
            ids[emission.request] += emission.token_ids
            if emission.finish_reason is not None:
                told[emission.request] = emission.finish_reason
        pair.engine.pool.check()
        step += 1
        assert step < 3000
    assert pair.engine.pool.live == 0
    for request, whole in enumerate(expected):
        assert ids[request] == whole[: len(ids[request])] and (request in aborted) != (request in told)
        assert request in aborted or ids[request] == whole


@pytest.mark.parametrize("seed", range(4))
def test_ids_are_those_of_ar_whatever_happens(world: World, seed: int) -> None:
    """Requests of all kinds that come, end early, are aborted or lose their pages, drafts that lag, start over or are
    gone, plans that change: with more requests than there are rows and few pages."""
    dice = Random(seed)
    prompts, laws = requests(dice, [*KINDS, *SPECULATIONS])
    pages = dice.choice((30, 60, PAGES))
    speculation = Speculation("ssd", 4, (3,), backup=dice.choice(("none", "jit", "auto")))
    pair = world.pair(speculation, world.static(pages), num_pages=pages, max_model_len=100)
    seen, draft = followed(pair), pair.draft
    assert draft is not None
    draft.steps = dice.choice((None, 2))
    pair.post = lambda message: dice.random() < 0.97 and pair.deliver(message)

    def restart() -> None:
        if dice.random() < 0.02:
            draft.restart()
            pair.proposer.session.join(draft.epoch)

    pair.between_steps = restart
    run_disturbed(pair, dice, prompts, laws, world.truth(prompts, laws))
    assert len(seen) > 5


@pytest.mark.parametrize("seed", range(3))
def test_what_a_draft_scribbles_changes_no_id(world: World, seed: int) -> None:
    dice = Random(seed)
    pair = world.pair(Speculation("ssd", 4, (3,), backup="none"), world.static())
    assert pair.draft is not None
    words = pair.draft.board.slots

    def scribble() -> None:
        for _ in range(300):
            slot, entry, word = (dice.randrange(size) for size in words.shape)
            words[slot, entry, word] += dice.choice((1, -1, 2**40))

    pair.between_steps = scribble
    laws = params(4, 40, 0.8)
    assert pair.run(PROMPTS[:4], laws).ids == world.truth(PROMPTS[:4], laws)
    assert pair.proposer.counters.rejected > 0


class Astray(StaticRunner):
    """Samples `wrong` where the logits are not numbers, as a broken kernel might."""

    wrong = -1

    def tokens(self, logits: Tensor, draws: Draws | None = None) -> Tensor:
        found = super().tokens(logits, draws)
        return found.masked_fill(found == -1, self.wrong)


@pytest.mark.parametrize(
    ("wrong", "overlap"), [(-1, True), (VOCABULARY, True), (2**40, True), (-1, False), (VOCABULARY, False)]
)
def test_samples_that_are_no_tokens_end_only_their_own_text(world: World, wrong: int, overlap: bool) -> None:
    """Drafted, they are computed again without; committed, they are its end. What was launched behind is dropped, and
    what the frontend reads says why."""
    laws = params(4, 40)
    texts = world.truth(PROMPTS[:4], laws)
    dropped = 0
    for poison in {texts[0][20], texts[1][9]}:
        plain, static = Runner(Poisoned(world.plain.model, poison), PAGES, PAGE_SIZE), world.static(kind=Astray)
        static.model, static.wrong = Poisoned(static.model, poison), wrong
        pair = world.pair(Speculation("ssd", 4, (3,), backup="none"), static, overlap)
        drops, errors = list[int](), set[str]()
        if pair.overlapped is not None:
            drop, own = pair.overlapped.drop, pair.overlapped
            own.drop = lambda d=drop, n=drops, a=own: (n.append(len(a._running)), d())[1]  # type: ignore
        step = pair.engine.step

        def told(step: Any = step, errors: set[str] = errors) -> list[Emission]:
            _, read = unpack(pack(Step(emissions := step())), TARGET_TO_FRONTEND)
            assert isinstance(read, Step) and read.emissions == emissions
            errors |= {emission.error for emission in emissions if emission.finish_reason == "error"}
            return emissions

        pair.engine.step = told  # type: ignore[method-assign]
        truth = Pair(config(Speculation("ar"), num_pages=PAGES), plain).run(PROMPTS[:4], laws)
        assert pair.run(PROMPTS[:4], laws).ids == truth.ids
        assert len(errors) == 1 and ("not numbers" if wrong == -1 else "not in the vocabulary") in errors.pop()
        dropped += sum(map(bool, drops))
    assert bool(dropped) == overlap


@pytest.mark.parametrize(
    "asked",
    [
        {"speculation": Speculation("sd", 3, (3,), "jit")},
        {"temperature": 0.8, "top_k": 7},
        {"temperature": 0.8, "speculation": Speculation("ssd", 4, (3,), "jit", sampler="rejection")},
        {"min_tokens": 3, "allowed_token_ids": tuple(range(0, 131, 2))},
        {"logprobs": 1},
    ],
    ids=str,
)
def test_who_needs_the_host_is_not_followed_and_who_comes_beside_is_not_either(
    world: World, asked: dict[str, Any]
) -> None:
    for prompts, expected in ((PROMPTS[:1], False), (PROMPTS[:2], True)):
        pair = world.pair(Speculation("ssd", 4, (3,), backup="none", sampler="rejection"), world.static())
        seen = followed(pair)
        coupled = Speculation("ssd", 4, (3,), backup="none")
        laws = [SamplingParams(seed=1, max_tokens=12, **asked), *params(1, 40, speculation=coupled)][: len(prompts)]
        pair.run(prompts, laws)
        assert bool(seen) == expected and set(seen) <= {1}


def test_a_new_request_waits_for_what_runs_and_no_longer(world: World) -> None:
    """And its first verification waits for its draft, even where its prompt is one token."""
    pair = world.pair(Speculation("ssd", 4, (3,), "jit"), world.static())
    assert pair.overlapped is not None
    first: dict[int, int] = {}
    rounds, launch_next = list[int](), pair.overlapped._device.launch_next

    def noted(rows: Any, shape: Any) -> None:
        rounds.extend(row.round_key[2] for row in rows)
        launch_next(rows, shape)

    pair.overlapped._device.launch_next = noted  # type: ignore[method-assign]
    prompts = [PROMPTS[1], PROMPTS[0], [7]]
    arrivals, laws = {0: 0, 4: 1, 9: 2}, params(3, 60)
    step = 0
    while pair.engine.busy or step <= max(arrivals):
        if step in arrivals:
            pair.engine.submit(Submit(arrivals[step], prompts[arrivals[step]], laws[arrivals[step]]))
        for emission in pair.engine.step():
            first.setdefault(emission.request, step)
        step += 1
    assert [first[request] - step for step, request in arrivals.items()] == [0, 1, 1]
    assert len(rounds) > 10 and 0 not in rounds


# -- without a draft --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_plain_decoding_overlaps_from_its_first_token(
    world: World, kernels: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, warm, filtered and adjusted requests of one batch."""
    if kernels == "triton":
        for function in (adjust, build, decide, note_outcomes):
            monkeypatch.setattr(function, "serves", lambda _: True)
    tokens = 10 if kernels == "triton" else 40
    asked: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 7}, ADJUSTED[1]]
    laws = [SamplingParams(seed=n, max_tokens=tokens, **kind) for n, kind in enumerate(asked)]
    pair = world.alone(world.static(deterministic=deterministic, longest=1))
    seen, fetched = followed(pair), fetches(pair)
    found = pair.run(PROMPTS[:4], laws)
    without = world.alone(world.static(deterministic=deterministic, longest=1), overlap=False)
    assert found.ids == without.run(PROMPTS[:4], laws).ids == world.truth(PROMPTS[:4], laws)
    # The prompt's token is read first; behind the last verification there is none.
    assert seen == [4] * (tokens - 2) and not fetched
    assert all(metrics.drafted_tokens == 0 for metrics in found.metrics)


def test_the_next_verification_is_launched_before_the_outcome_is_read(world: World) -> None:
    pair = world.alone(world.static(longest=1))
    assert pair.overlapped is not None
    calls, device = list[str](), pair.overlapped._device

    def noted(call: Any, *args: Any) -> Any:
        calls.append(call.__name__)
        return call(*args)

    for name in ("launch", "launch_next", "report", "samples"):
        setattr(device, name, partial(noted, getattr(device, name)))
    laws = params(1, 8)
    assert pair.run(PROMPTS[:1], laws).ids == world.truth(PROMPTS[:1], laws)
    assert calls == ["launch", *["launch_next", "report"] * 6, "samples"]


@pytest.mark.parametrize("seed", range(4))
def test_ids_without_a_draft_are_those_of_the_host_whatever_happens(world: World, seed: int) -> None:
    """Requests of all kinds that come, end early, are aborted or lose their pages."""
    dice = Random(seed)
    prompts, laws = requests(dice, KINDS)
    pages = dice.choice((30, 60, PAGES))
    pair = world.alone(world.static(pages, longest=1), num_pages=pages, max_model_len=100)
    seen = followed(pair)
    run_disturbed(pair, dice, prompts, laws, world.truth(prompts, laws))
    assert len(seen) > 5


def test_plain_requests_beside_a_draft_overlap_and_leave_the_policy_as_it_is(world: World) -> None:
    """No entry of the board is fetched for them."""
    pair = world.pair(Speculation("ssd", 4, (3,), "jit"), world.static())
    assert pair.overlapped is not None
    policy = pair.overlapped._policy = OverlapPolicy()
    seen, fetched = followed(pair), fetches(pair)
    laws = params(2, 30, 0.8, speculation=Speculation("ar"))
    assert pair.run(PROMPTS[:2], laws).ids == world.truth(PROMPTS[:2], laws)
    assert seen == [2] * 28 and not fetched
    assert not policy.pays and policy._between.count == policy._hits.count == 0


@pytest.mark.parametrize("mode", ["ngram", "sd"])
def test_requests_whose_drafts_the_host_brings_do_not_overlap(world: World, mode: Mode) -> None:
    speculation = Speculation(mode, 3, (3,), "jit") if mode == "sd" else Speculation(mode, 4, (3,), "jit")
    pair = world.pair(speculation, world.static())
    seen, laws = followed(pair), params(1, 20)
    prompts = [PROMPTS[0] * 6]
    assert pair.run(prompts, laws).ids == world.truth(prompts, laws) and not seen


# -- where engines overlap --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "environment", "lockable", "overlaps", "locked"),
    [
        ({"draft": None}, {}, False, True, False),
        ({}, {}, True, True, True),
        ({}, {}, False, False, True),
        ({"draft": None}, {"SSD_OVERLAP": "0"}, True, False, False),
        ({}, {"SSD_OVERLAP": "0"}, True, False, False),
        ({"draft": None, "tensor_parallel_size": 2}, {}, True, False, False),
    ],
    ids=str,
)
def test_engines_on_a_gpu_overlap_with_and_without_a_draft(
    fields: dict[str, Any],
    environment: dict[str, str],
    lockable: bool,
    overlaps: bool,
    locked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The board's memory is locked where a draft may write to it, and must be then."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked: list[BoardReader] = []
    monkeypatch.setattr("ssd.verifier.overlap.page_locked", lambda board: (asked.append(board), lockable)[1])
    monkeypatch.setattr("ssd.verifier.overlap.DeviceBoard", lambda *_: None)
    monkeypatch.setattr("ssd.verifier.overlap.DeviceScheduler", lambda *_: None)
    settings = config(Speculation("ar"), **fields)
    runner: Any = object.__new__(StaticRunner)
    runner.model = SimpleNamespace(device=torch.device("cuda"))
    plain: Any = SimpleNamespace(runner=runner)
    made = overlapped(plain, settings, empty_board(settings), Proposer().asks)
    assert isinstance(made, OverlappedVerification) == overlaps and (made is plain) != overlaps
    assert bool(asked) == locked


@pytest.mark.parametrize("mode", ["ar", "ngram"])
def test_the_target_process_without_a_draft_asks_for_overlap(
    world: World, mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks: list[Ask] = []

    def noted(plain: PlainVerification, config: Any, board: BoardReader, ask: Ask, inline: None) -> PlainVerification:
        asks.append(ask)
        return plain

    monkeypatch.setattr("ssd.verifier.process.overlapped", noted)
    with started(world, config(Speculation(mode, 4, (3,), "jit"), draft=None), tmp_path) as target:
        target.engine.submit(Submit(0, PROMPTS[0], SamplingParams(seed=1)))
        target.engine.step()
        (sequence,) = target.engine.scheduler.running
        assert asks[0](sequence) == (NextDraft() if mode == "ar" else None)


def test_a_process_serves_all_modes_where_the_draft_in_the_targets_cannot_be_loaded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd.verifier.process.inline", lambda *_: None)
    settings = config(Speculation("auto"), inline_draft=True, inline_num_pages=PAGES)
    with started(world, settings, tmp_path) as target:
        assert target._board is not None and target._board.session.modes == DRAFTED
        assert target._experience is not None and target._experience.tuning.estimates.ends


@contextmanager
def started(world: World, settings: EngineConfig, folder: Path) -> Iterator[Target]:
    """A target's process in this process."""
    sizes = {"board_fd": size_bytes(settings.max_num_seqs), "heartbeat_fd": HEARTBEAT_BYTES}
    with ExitStack() as held:
        shared = {name: memory_file(name, size) for name, size in sizes.items()}
        for descriptor in shared.values():
            held.callback(os.close, descriptor)
        child = Child(Start("target", 1, str(folder), settings, (), -1, **shared))
        held.callback(child.context.destroy, linger=0)
        socket = sockets.router(child.context, child.address(sockets.ENGINE))
        yield Target(child, socket, (world.plain, frozenset()))
