"""A draft in the target's process and stream: the ids of plain decoding, drafted behind a verification that runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams, Speculation
from ssd.errors import UsageError
from ssd.execution.adjustments import adjust
from ssd.execution.static import StaticRunner
from ssd.ipc.device_board import DeviceBoard
from ssd.kernels import library, suffixes
from ssd.kernels.gpu import Draws
from ssd.kernels.rounds import begin_draft, build, decide, go_on_drafting, note_outcomes
from ssd.models.checkpoint import LIST_FILE
from ssd.speculation.sampling import Drawing
from ssd.verifier import inline_draft, inline_proposer, overlap
from ssd.verifier.engine import TargetEngine
from ssd.verifier.inline_draft import INLINE_MODES, InlineDraft, InlineRunner
from ssd.verifier.inline_proposer import InlineProposer, RoundTimes
from ssd.verifier.loading import load_draft
from ssd.verifier.overlap import DeviceScheduler, OverlappedVerification
from ssd.verifier.overlap_choice import OverlapPolicy
from ssd.verifier.suffix_memory import SuffixMemory
from ssd.verifier.verification import PlainVerification
from tests.capture.replay import replay_captures
from tests.draft.pair import VOCABULARY, Pair, config, empty_board, params
from tests.models import tiny
from tests.verifier.test_overlap import (
    ADJUSTED,
    KINDS,
    PAGES,
    PROMPTS,
    ROWS,
    World,
    followed,
    requests,
    run_disturbed,
)

pytestmark = pytest.mark.usefixtures("replayed")


class Times(RoundTimes):
    """Verifications take equally long, whatever they verify, and K is 3 where it is open."""

    def __init__(self) -> None:
        pass

    def best(self, rows: int, acceptance: float) -> int:
        return 3

    def pricing(self, rows: int, acceptance: float, lookahead: int) -> Callable[[int], float]:
        return lambda more: 0.0


class Inline(Pair):
    """A target with a draft in its process. Its cache has NaN wherever nothing was written."""

    def __init__(
        self,
        configuration: EngineConfig,
        target: StaticRunner,
        draft: InlineRunner,
        overlap: bool = True,
        memory: SuffixMemory | None = None,
    ) -> None:
        self.config, self.draft, self._said_hello = configuration, None, False
        self.between_steps: Callable[[], None] = lambda: None
        self.inline = InlineDraft(configuration, draft)
        board = DeviceBoard(empty_board(configuration), target.model.device)
        device = DeviceScheduler(target, board, self.inline)
        self.inline_proposer = InlineProposer(self.inline, device, Times(), memory)
        plain, most = PlainVerification(target), configuration.max_num_batched_tokens
        asks, policy = self.inline_proposer.asks, OverlapPolicy(("ar", *INLINE_MODES))
        self.overlapped = OverlappedVerification(plain, device, asks, most, policy)
        verification = self.overlapped if overlap else plain
        self.engine = TargetEngine(configuration, verification, self.inline_proposer)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def pair(
    world: World, lookahead: int = 4, overlap: bool = True, memory: Any = None, kind: Any = InlineRunner, **fields: Any
) -> Inline:
    sizes = {"max_num_seqs": ROWS, "num_pages": PAGES, "draft_num_pages": PAGES}
    settings = config(Speculation("sd", lookahead), **sizes | fields)
    draft = kind(world.draft.model, settings)
    draft.cache.keys.fill_(torch.nan)
    draft.cache.values.fill_(torch.nan)
    return Inline(settings, world.static(settings.num_pages), draft, overlap, memory)


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> SuffixMemory:
    """A suffix memory, whose functions in C are there although a GPU runs none."""
    monkeypatch.undo()
    found = library.functions()
    assert found is not None
    replay_captures(monkeypatch)
    monkeypatch.setattr(suffixes, "call", lambda: found)
    return SuffixMemory(2**18)


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        for function in (adjust, begin_draft, build, decide, go_on_drafting, note_outcomes):
            monkeypatch.setattr(function, "serves", lambda _: True)
    return str(request.param)


@pytest.mark.parametrize("seed", range(6))
def test_kernels_write_what_torch_writes(seed: int) -> None:
    """Rows with any outcome, some of them not used, and samples that are no ids."""
    dice = Random(seed)
    layout = overlap._ROW
    rows = torch.zeros(dice.randint(1, 6), layout.high + 16, dtype=torch.int64)
    decided = torch.zeros(len(rows), 3 + layout.most, dtype=torch.int64)
    for row, outcome in zip(rows, decided, strict=True):
        verified = dice.randint(0, layout.most)
        row[layout.numbers + 2 :][:3] = torch.tensor((verified, dice.randint(0, layout.most), dice.randint(0, 30)))
        row[layout.ids :][:verified] = torch.randint(0, 60, (verified,))
        outcome[:2] = torch.tensor((dice.randint(0, verified), dice.choice((-1, 7, 45))))
    own = [(torch.zeros_like(decided), torch.zeros_like(decided)) for _ in range(2)]
    for function, (drafted, work) in zip((begin_draft.reference, begin_draft.kernel), own, strict=True):
        function(rows, decided, drafted, work, 40, layout)
    for _ in range(layout.most):
        (first, work), (second, other) = own
        assert torch.equal(first, second) and torch.equal(work[:, :4], other[:, :4])
        ends = (1 + work[:, 2]).cumsum(0)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends, ends[-1:]))
        samples = torch.tensor([dice.choice((-1, 3, 9, 70, 2**40)) for _ in range(2 * len(rows))])
        for function, (drafted, work) in zip((go_on_drafting.reference, go_on_drafting.kernel), own, strict=True):
            function(drafted, work, samples, starts, 60)
    assert (own[0][0][:, 3:] < 60).all()


@pytest.mark.parametrize(
    ("kernels", "lookahead", "temperature", "overlap"),
    [
        *(
            ("torch", *each)
            for each in [(1, 0.0, True), (2, 0.8, True), (4, 0.0, False), (4, 0.8, True), (8, 0.8, True)]
        ),
        ("triton", 1, 0.8, True),
        ("triton", 4, 0.8, True),
    ],
    indirect=["kernels"],
)
def test_ids_are_those_of_ar_and_drafts_those_of_a_process(
    world: World, kernels: str, lookahead: int, temperature: float, overlap: bool
) -> None:
    tokens = 12 if kernels == "triton" else 40
    laws = params(ROWS, tokens, temperature)
    own = pair(world, lookahead, overlap)
    found = own.run(PROMPTS[:ROWS], laws)
    apart = world.pair(Speculation("sd", lookahead, (1,)), world.plain, False).run(PROMPTS[:ROWS], laws)
    assert found.ids == world.truth(PROMPTS[:ROWS], laws)
    assert [m.acceptance_histogram for m in found.metrics] == [m.acceptance_histogram for m in apart.metrics]


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_all_kinds_in_one_batch(world: World, overlap: bool) -> None:
    """Adjusted, filtered, with log-probabilities, of other K, and plain ones; a prompt of many parts."""
    asked: list[dict[str, Any]] = [
        ADJUSTED[1],
        {"temperature": 0.8, "top_k": 7, "speculation": Speculation("sd", 2)},
        {"logprobs": 2, "speculation": Speculation("sd", 9)},
        {"speculation": Speculation("ar")},
        {"speculation": Speculation("sd", 3, sampler="rejection"), "temperature": 0.0},
        {},
    ]
    prompts = [*PROMPTS, tiny.token_ids(90, 9)]
    laws = [SamplingParams(seed=n, max_tokens=40, **kind) for n, kind in enumerate(asked)]
    found = pair(world, overlap=overlap, max_num_batched_tokens=32).run(prompts, laws)
    assert found.ids == world.truth(prompts, laws)
    accepted = [metrics.accepted_tokens for metrics in found.metrics]
    assert not accepted[3] and all(accepted[:3] + accepted[4:])


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_those_of_ar_whatever_happens(world: World, seed: int, remembering: SuffixMemory) -> None:
    """Requests that come, end early, are aborted or lose their pages, with few pages for target and draft; every other
    time beside a suffix memory."""
    dice = Random(seed)
    kinds = [*KINDS, {"speculation": Speculation("ar")}, {"speculation": Speculation("sd", 2)}]
    prompts, laws = requests(dice, kinds)
    pages, of_draft = (dice.choice((30, 60, PAGES)) for _ in range(2))
    memory = remembering if seed % 2 else None
    own = pair(world, memory=memory, num_pages=pages, draft_num_pages=of_draft, max_model_len=100)
    seen = followed(own)
    run_disturbed(own, dice, prompts, laws, world.truth(prompts, laws))
    assert len(seen) > 5 and own.inline._pool.live == 0
    own.inline._pool.check()


def test_where_k_is_open_it_is_that_of_the_fastest_round(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By made times: a verification of t tokens, and a forward of the draft. They price guesses, too."""
    own = pair(world, 0)
    runner, inline, times = own.overlapped._device._runner, own.inline, {"token": 0.0, "draft": 0.0}
    forwards = [*inline.forwards().values()]

    def seconds(work: Callable[[], None], device: torch.device) -> float:
        work()
        if work in forwards:
            return times["draft"]
        (shape,) = (shape for shape, step in runner.steps.items() if step.run == work)
        return 1.0 + times["token"] * shape.tokens

    monkeypatch.setattr(inline_proposer, "_seconds", seconds)

    def made(**changes: float) -> RoundTimes:
        times.update({"token": 0.0, "draft": 0.0} | changes)
        return RoundTimes(runner, inline)

    assert made().best(1, 0.9) == 8
    assert made(draft=0.5).best(1, 0.9) < 4
    assert made(draft=0.05).best(1, 0.2) < made(draft=0.05).best(1, 0.8)
    assert made(token=0.02).best(1, 0.8) > made(token=0.1).best(3, 0.8) >= 1
    price = made(token=0.1).pricing(1, 0.5, 1)
    assert price(0) == 0.0 < price(1) < price(7) == pytest.approx(7 * price(1))
    laws = params(2, 40, 0.8)
    found = own.run(PROMPTS[:2], laws)
    assert found.ids == world.truth(PROMPTS[:2], laws)
    assert all(len(metrics.acceptance_histogram) == 4 for metrics in found.metrics)
    assert own.inline_proposer.plan.startswith("sd, K 3: ") and pair(world, 4).inline_proposer.plan == ""


def test_a_verification_is_launched_with_its_draft_before_the_last_outcome_is_read(world: World) -> None:
    own = pair(world)
    calls, device = list[str](), own.overlapped._device

    def noted(call: Any, *args: Any) -> Any:
        calls.append(call.__name__)
        return call(*args)

    for name in ("launch", "launch_next", "report", "draft"):
        setattr(device, name, partial(noted, getattr(device, name)))
    own.run(PROMPTS[:1], params(1, 30))
    assert calls[:2] == ["draft", "launch"] and len(calls) > 10
    assert {*calls[2::2]} == {"launch_next"} and {*calls[3::2]} == {"report"}


def test_a_round_of_the_device_takes_few_launches(world: World) -> None:
    """Whatever K is: the later forwards of a speculation are one graph."""
    counted = []
    for lookahead in (3, 8):
        own = pair(world, lookahead)
        loop, launches = own.inline._loops[1, Drawing.GREEDY], Counter[str]()

        def noted(name: str, call: Any, launches: Counter[str] = launches) -> Callable[[], None]:
            return lambda: (launches.update([name]), call())[1]  # type: ignore[func-returns-value]

        loop.first, loop.one, loop.rest = (noted(n, getattr(loop, n)) for n in ("first", "one", "rest"))
        metrics = own.run(PROMPTS[:1], params(1, 60)).metrics[0]
        counted.append(launches)
        assert launches["first"] == launches["rest"] >= metrics.rounds and not launches["one"]
    assert [*counted[0]] == [*counted[1]]


def test_a_text_of_another_request_is_not_read_again(world: World) -> None:
    own = pair(world)
    read, forward = list[int](), own.inline.runner.forward
    own.inline.runner.forward = lambda rows, *more: (  # type: ignore[method-assign]
        read.extend(len(row.token_ids) for row in rows),
        forward(rows, *more),
    )[1]
    prompt = tiny.token_ids(62, 5)  # 15 pages of 4, and 2
    first = own.run([prompt], params(1, 20)).ids
    assert sum(read) == 62
    read.clear()
    assert own.run([prompt], params(1, 20)).ids == first
    assert sum(read) == 2
    read.clear()
    own.run([prompt], [SamplingParams(max_tokens=20, cache_salt="another")])
    assert sum(read) == 62


def test_what_the_memory_knows_better_is_verified_instead(world: World, remembering: SuffixMemory) -> None:
    own = pair(world, 2, memory=remembering)
    laws = params(1, 60)
    texts = [own.run(PROMPTS[:1], laws) for _ in range(3)]
    assert all(text.ids == world.truth(PROMPTS[:1], laws) for text in texts)
    by_source = [text.metrics[0].accepted_by_source for text in texts]
    assert "memory" not in by_source[0] and by_source[2]["memory"] > 0


class Wrong(InlineRunner):
    """Samples ids that are no tokens."""

    found = -1

    def tokens(self, logits: Tensor, draws: Draws | None = None) -> Tensor:
        return torch.full_like(super().tokens(logits, draws), self.found)


@pytest.mark.parametrize(("kernels", "found"), [("torch", -1), ("torch", 131), ("triton", 2**40)], indirect=["kernels"])
def test_bad_ids_cost_proposals_alone(world: World, kernels: str, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "found", found)
    laws = params(2, 12, 0.8)
    own = pair(world, kind=Wrong)
    texts = own.run(PROMPTS[:2], laws)
    assert texts.ids == world.truth(PROMPTS[:2], laws)
    assert all(metrics.drafted_tokens > 0 for metrics in texts.metrics)


@pytest.mark.parametrize("where", ["read", "behind"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_draft_that_fails_is_left_alone_for_a_while(
    world: World,
    where: str,
    after: int,
    remembering: SuffixMemory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target goes on, and so does the memory. The pause doubles."""
    now = [0.0]
    monkeypatch.setattr(inline_draft.time, "monotonic", lambda: now[0])
    own, calls, broken = pair(world, memory=remembering), count(), [True]
    loop = own.inline._loops[2, Drawing.GREEDY]
    place, name = (own.inline, "read") if where == "read" else (loop, "first")
    call = getattr(place, name)

    def failing(*args: Any) -> Any:
        if next(calls) >= after and broken[0]:
            raise RuntimeError("planted")
        return call(*args)

    setattr(place, name, failing)

    def accepted(prompts: list[list[int]], store: bool = True) -> Counter[str]:
        laws = params(2, 40, store=store)
        found = own.run(prompts, laws)
        assert found.ids == world.truth(prompts, laws)
        assert own.engine.pool.live == 0 and own.inline._pool.live == 0
        return sum((Counter(metrics.accepted_by_source) for metrics in found.metrics), Counter[str]())

    for pause in (1.0, 2.0):
        for _ in range(3):
            accepted(PROMPTS[:2], store=False)
        assert own.inline_proposer.state == "down" and f"without it for {pause:.0f} s" in caplog.text
        caplog.clear()
        assert accepted(PROMPTS[:2])["draft"] == 0 < accepted(PROMPTS[:2])["memory"]
        now[0] += pause
    broken[0] = False
    assert own.inline_proposer.state == "up"
    assert accepted(PROMPTS[2:4], store=False)["draft"] > 0


def test_an_engine_that_has_no_room_for_its_draft_goes_on_without(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(Speculation("sd", 4), max_num_seqs=ROWS, num_pages=PAGES, draft_num_pages=PAGES)
    plain, board = PlainVerification(world.static()), empty_board(settings)

    def loaded(error: Exception | None) -> Any:
        def load(configuration: EngineConfig) -> InlineRunner:
            if error is not None:
                raise error
            return InlineRunner(world.draft.model, configuration)

        monkeypatch.setattr(inline_proposer, "load_draft", load)
        return inline_proposer.inline(settings, plain, board, None)

    assert loaded(torch.OutOfMemoryError("planted")) is None and "planted" in caplog.text
    with pytest.raises(UsageError, match=r"^the draft draft: it does not fit"):
        loaded(UsageError("it does not fit"))
    proposer = loaded(None)
    verification = overlap.overlapped(plain, settings, board, proposer.asks, proposer.device)
    assert isinstance(proposer, InlineProposer) and isinstance(verification, OverlappedVerification)
    monkeypatch.setenv("SSD_OVERLAP", "0")
    assert overlap.overlapped(plain, settings, board, proposer.asks, proposer.device) is plain
    prepare = InlineDraft.prepare
    monkeypatch.setattr(InlineDraft, "prepare", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("planted")))
    assert loaded(None) is None
    monkeypatch.setattr(InlineDraft, "prepare", prepare)


def test_ids_that_the_draft_does_not_know_are_read_as_another_one(world: World, kernels: str, tmp_path: Path) -> None:
    """In a prompt, sampled, and drafted by the memory."""
    fewer = tiny.llama(tmp_path / "fewer", vocab_size=40)
    settings = config(Speculation("sd", 4), max_num_seqs=ROWS, num_pages=PAGES, draft_num_pages=PAGES)
    own = Inline(settings, world.static(), InlineRunner(tiny.runner(fewer, torch.float64).model, settings))
    laws = params(2, 12 if kernels == "triton" else 40, 0.9)
    prompts = [[1, 130, 99, 39, 40], [41]]
    found = own.run(prompts, laws)
    assert found.ids == world.truth(prompts, laws) and max(map(max, found.ids)) >= 40
    assert own.inline_proposer.state == "up" and sum(metrics.accepted_tokens for metrics in found.metrics) > 0


@pytest.mark.parametrize("short", ["pages", "context"])
def test_a_text_without_room_costs_others_neither_overlap_nor_drafts(
    world: World, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, laws = [PROMPTS[0], tiny.token_ids(150, 5)], params(2, 40)
    own = pair(world, draft_num_pages=30 if short == "pages" else PAGES)
    if short == "context":
        shape = own.inline.runner.model.shape
        limited = SimpleNamespace(**{name: getattr(shape, name) for name in shape.__dataclass_fields__})
        monkeypatch.setattr(own.inline.runner.model, "shape", limited)
        limited.max_position = 100
    seen = followed(own)
    found = own.run(prompts, laws)
    assert found.ids == world.truth(prompts, laws)
    accepted = [metrics.accepted_tokens for metrics in found.metrics]
    assert accepted[0] > 10 and accepted[1] == 0 and len(seen) > 25


def test_the_largest_k_is_one_graph_too(world: World) -> None:
    own = pair(world, 16, max_num_seqs=2)
    loop, launches = own.inline._loops[1, Drawing.GREEDY], Counter[str]()
    one, rest = loop.one, loop.rest
    loop.one = lambda: (launches.update(["one"]), one())[1]  # type: ignore[func-returns-value]
    loop.rest = lambda: (launches.update(["rest"]), rest())[1]  # type: ignore[func-returns-value]
    laws = params(1, 60)
    assert own.run(PROMPTS[:1], laws).ids == world.truth(PROMPTS[:1], laws)
    assert launches["rest"] > 3 > launches["one"]


def test_a_draft_with_a_list_predicts_its_ids_alone(world: World, tmp_path: Path) -> None:
    """As the built-in draft has one."""
    ids = sorted(Random(4).sample(range(VOCABULARY), 60))
    target = tiny.llama(tmp_path / "target", seed=3)
    draft = tiny.noisy_copy(target, tmp_path / "draft", noise=0.03)
    save_file({"ids": torch.tensor(ids)}, draft / LIST_FILE)
    settings = config(Speculation("sd", 4), max_num_seqs=ROWS, num_pages=PAGES, draft_num_pages=PAGES, draft=str(draft))
    settings = structs.replace(settings, target=str(target))
    own = Inline(settings, world.static(), load_draft(settings))
    drafts, draft_of = list[list[int]](), own.overlapped._device.draft
    own.overlapped._device.draft = lambda *given: drafts.extend(found := draft_of(*given)) or found  # type: ignore
    laws = params(2, 40, 0.8)
    found = own.run(PROMPTS[:2], laws)
    assert found.ids == world.truth(PROMPTS[:2], laws)
    assert all(metrics.accepted_tokens > 0 for metrics in found.metrics)
    assert drafts and {token for tokens in drafts for token in tokens} <= {*ids}
