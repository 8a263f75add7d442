"""A target, a draft and a real board in one process; the test decides the order of their work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams, Speculation
from ssd.draft.engine import DraftEngine
from ssd.execution.core_team import CoreTeam
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.ipc.board import BoardReader, BoardWriter, Key, size_bytes
from ssd.ipc.device_board import DeviceBoard
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.features import FeatureArena
from ssd.ipc.layouts import draft_probs_layout, feature_layout
from ssd.ipc.messages import (
    TARGET_TO_DRAFT,
    Admit,
    Launch,
    Launched,
    LinkLoad,
    Outcomes,
    Rejoin,
    Release,
    Retune,
    Submit,
    Verified,
)
from ssd.ipc.process import memory_file
from ssd.ipc.public import Message, Metrics, pack, unpack
from ssd.ipc.trace_ring import NO_TRACE, TraceRing
from ssd.law import Law
from ssd.verifier import board_proposer, draft_session, missed_rows, round_evidence
from ssd.verifier.board_proposer import BoardProposer
from ssd.verifier.engine import TargetEngine
from ssd.verifier.overlap import Ask, DeviceScheduler, OverlappedVerification
from ssd.verifier.overlap_choice import OverlapPolicy
from ssd.verifier.proposer import Proposer
from ssd.verifier.suffix_memory import SuffixMemory
from ssd.verifier.verification import FeatureExport, PlainVerification
from tests.boards import lookup

PAGE_SIZE = 4
VOCABULARY = 131


def config(speculation: Speculation, **fields: Any) -> EngineConfig:
    """A small engine; `fields` override."""
    defaults: dict[str, Any] = {
        "target": "target",
        "draft": "draft",
        "max_model_len": 200,
        "max_num_seqs": 8,
        "page_size": PAGE_SIZE,
        "num_pages": 400,
        "draft_num_pages": 400,
        "vocab_size": VOCABULARY,
    }
    return EngineConfig(speculation=speculation, **defaults | fields)


@dataclass(frozen=True)
class Texts:
    """The result of a run: the new ids of each prompt, their metrics, and how often a sequence lost its pages."""

    ids: list[list[int]]
    metrics: list[Metrics]
    preemptions: int


class Draft:
    """A draft's process in this process. `runners`: smallest first. After each message it takes `steps` steps (None:
    until it idles). `watch` is called after every step and every message."""

    def __init__(self, configuration: EngineConfig, *runners: Runner, steps: int | None = None) -> None:
        self.config, self.runners, self.steps = configuration, runners, steps
        self.watch: Callable[[DraftEngine], None] = lambda engine: None
        slots = configuration.max_num_seqs
        descriptor = memory_file("board", size_bytes(slots))
        self._writer = BoardWriter(descriptor, slots)
        self.board = BoardReader(descriptor, slots, configuration.vocab_size)
        os.close(descriptor)
        self.draft_probs = self._draft_probs_arena()
        self.features, self.shown = self._feature_arenas()
        self.epoch = self.forwards = 0
        self.restart()

    def _draft_probs_arena(self) -> DraftProbsArena | None:
        """Both sides share one view here: what one writes the other reads."""
        numbers = self.config.max_num_seqs, self.config.speculation, self.config.vocab_size
        if self.config.speculation.sampler != "rejection":
            return None
        layout = draft_probs_layout(*numbers)
        descriptor = memory_file("draft-probs", layout.size_bytes)
        arena = DraftProbsArena(descriptor, layout)
        os.close(descriptor)
        return arena

    def _feature_arenas(self) -> tuple[FeatureArena | None, FeatureArena | None]:
        """The draft's view and the target's."""
        if self.config.features is None:
            return None, None
        descriptor = memory_file("features", feature_layout(self.config).size_bytes)
        arenas = FeatureArena(descriptor, self.config), FeatureArena(descriptor, self.config, writable=True)
        os.close(descriptor)
        return arenas

    def restart(self) -> None:
        """A new draft, of a new epoch, that knows nothing."""
        self.epoch += 1
        vocab_size = self.config.vocab_size
        arenas = self.draft_probs, self.features
        self.engine = DraftEngine(self.config, self.runners, self._writer, self.epoch, vocab_size, *arenas)
        self.cells = cells_of(self.engine)

    def show_link(self, load: LinkLoad) -> None:
        """Say that the draft is on another machine."""
        self._writer.show_link(load)

    def hear(self, message: Message) -> None:
        """Pass one message, packed and unpacked, then do the work that it brings."""
        _, heard = unpack(pack(message), TARGET_TO_DRAFT)
        assert isinstance(heard, Admit | Outcomes | Launched | Retune | Release)
        self.engine.handle(heard)
        self.watch(self.engine)
        self.work(self.steps)

    def work(self, steps: int | None = None) -> None:
        """Take `steps` steps, or all until there is nothing to do."""
        while steps is None or steps > 0:
            if not self.engine.step():
                return
            self.forwards += 1
            self.watch(self.engine)
            steps = None if steps is None else steps - 1

    def assert_empty(self) -> None:
        """No sequence, no page and no cell is left in use, and none is counted twice."""
        assert not self.engine.trees
        for drafter in (self.engine.drafter, *(smaller.drafter for smaller in self.engine.smaller)):
            drafter.pool.check()
            assert drafter.pool.live == 0
        assert cells_of(self.engine) == self.cells == list(range(len(self.cells)))


def cells_of(engine: DraftEngine) -> list[int]:
    """The free cells, in order."""
    taken = []
    while (cell := engine.drafter.chain_cache.take()) is not None:
        taken.append(cell)
    engine.drafter.chain_cache.give_back(taken[::-1])
    return sorted(taken)


class ScriptedTarget:
    """One sequence of a target whose outcomes the test decides. It reads the board and tells the draft as a target
    does. `in_flight` is what it verifies now. `tells`: it says which tokens these are, as to a draft on another
    machine."""

    def __init__(
        self,
        draft: Draft,
        request: int,
        prompt: list[int],
        law: Law,
        speculation: Speculation,
        round_number: int = 0,
        tells: bool = False,
    ) -> None:
        self.draft, self.request, self.speculation, self._tells = draft, request, speculation, tells
        self.tokens, self.round = list(prompt), round_number
        self.in_flight: list[int] = []
        self.hits = 0
        self._missed: Key | None = None
        draft.hear(Admit(request, request, round_number, prompt, law, speculation))

    @property
    def waiting(self) -> bool:
        """True if a backup is awaited: `launch` must follow."""
        return self._missed is not None

    def outcome(self, accepted: int, token: int, most: int, wait: bool = True, late: int = 0) -> bool:
        """End the verification in flight; the next one takes at most `most` cached tokens. Returns True if there were
        any. If not, and `wait`, the row stays open for the backup. The draft takes `late` steps before it hears of
        it."""
        key = Key(self.draft.epoch, self.request, self.round, len(self.tokens), accepted, token)
        sd = self.speculation.mode == "sd"
        found = [] if sd else lookup(self.draft.board, self.request, key, most) or []
        self.tokens += [*self.in_flight[:accepted], token]
        self.round += 1
        self.in_flight = found
        self.hits += bool(found)
        self._missed = key if wait and not found else None
        tells = self._tells and bool(found)
        row = Verified(self.request, self.round - 1, accepted, token, None if self.waiting or tells else len(found))
        self.draft.work(late)
        steps, self.draft.steps = self.draft.steps, 0 if tells else self.draft.steps  # it reads both at once
        self.draft.hear(Outcomes([row]))
        self.draft.steps = steps
        if tells:
            self.draft.hear(Launched([Launch(self.request, self.round, len(found), found)]))
        return bool(found)

    def launch(self, most: int) -> None:
        """Verify at most `most` tokens of the backup."""
        assert self._missed is not None
        self.in_flight = lookup(self.draft.board, self.request, self._missed, most) or []
        self._missed = None
        self.draft.hear(Launched([Launch(self.request, self.round, len(self.in_flight))]))

    def release(self) -> None:
        self.draft.hear(Release([self.request]))


def empty_board(settings: EngineConfig) -> BoardReader:
    """Return the board of an engine without a draft."""
    descriptor = memory_file("board", size_bytes(settings.max_num_seqs))
    reader = BoardReader(descriptor, settings.max_num_seqs, settings.vocab_size)
    os.close(descriptor)
    return reader


class Always(OverlapPolicy):
    """Overlap always pays."""

    pays = True


class Pair:
    """A target engine and a draft. It talks to the draft through `post`, which a test may replace: `post` gets a
    message and returns whether it was sent. `overlap`: verifications are launched before outcomes are known, as on a
    GPU. `elastic`: both models share cores, so that the draft hears of a request with its first outcome. `stops` are
    the model's end-of-sequence ids. `memory`: the suffix memory, if there is one. `trace`: what is done is recorded."""

    def __init__(
        self,
        configuration: EngineConfig,
        target: Runner,
        draft: Draft | None = None,
        overlap: bool = False,
        elastic: bool = False,
        stops: frozenset[int] = frozenset(),
        memory: SuffixMemory | None = None,
        trace: TraceRing = NO_TRACE,
    ) -> None:
        self.config, self.draft = configuration, draft
        self.post: Callable[[Message], bool] = self.deliver
        self.between_steps: Callable[[], None] = lambda: None
        self._said_hello = False
        self.overlapped: OverlappedVerification | None = None
        slots = target.state_slots
        if draft is None:
            plain, alone = PlainVerification(target), Proposer()
            self.overlapped = self._overlapped(plain, empty_board(configuration), alone.asks) if overlap else None
            self.engine = TargetEngine(configuration, self.overlapped or plain, alone, stops, None, slots)
        else:
            team = CoreTeam(1, 1) if elastic else None
            post, also = (lambda message: self.post(message)), {"memory": memory, "overlaps": target.overlaps}
            self.proposer = BoardProposer(draft.board, post, draft.draft_probs, trace, team=team, **also)
            shown = configuration.features and draft.shown and FeatureExport(draft.shown, configuration.features.layers)
            plain = PlainVerification(target, features=shown)
            self.overlapped = self._overlapped(plain, draft.board, self.proposer.asks) if overlap else None
            self.engine = TargetEngine(configuration, self.overlapped or plain, self.proposer, stops, None, slots)
            self.proposer.session.join(draft.epoch)

    def _overlapped(self, plain: PlainVerification, board: BoardReader, ask: Ask) -> OverlappedVerification:
        assert isinstance(plain.runner, StaticRunner)
        device = DeviceScheduler(plain.runner, DeviceBoard(board, plain.runner.model.device))
        policy = OverlapPolicy() if self.draft is None else Always()
        return OverlappedVerification(plain, device, ask, self.config.max_num_batched_tokens, policy)

    def deliver(self, message: Message) -> bool:
        assert self.draft is not None
        if isinstance(message, Rejoin):
            self.draft.restart()
            self._said_hello = True
        else:
            self.draft.hear(message)
        return True

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Texts:
        """Run all prompts as one batch to their ends; afterwards the target must hold no page and no sequence."""
        ids: list[list[int]] = [[] for _ in prompts]
        metrics: dict[int, Metrics] = {}
        preemptions = 0
        for request, (prompt, law) in enumerate(zip(prompts, params, strict=True)):
            self.engine.submit(Submit(request, prompt, law))
        while self.engine.busy:
            self.between_steps()
            if self._said_hello and self.draft is not None:
                self._said_hello = False
                self.proposer.session.join(self.draft.epoch)
            waiting = {sequence.request for sequence in self.engine.scheduler.waiting}
            for emission in self.engine.step():
                ids[emission.request] += emission.token_ids
                if emission.metrics is not None:
                    metrics[emission.request] = emission.metrics
            preemptions += len({sequence.request for sequence in self.engine.scheduler.waiting} - waiting)
        self.engine.pool.check()
        assert self.engine.pool.live == 0
        return Texts(ids, [metrics[request] for request in range(len(prompts))], preemptions)


class Clock:
    """A clock that only moves while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)


def use_clock(clock: Any) -> None:
    """The target takes the draft's times by this clock, or by the module `time` again."""
    for module in (missed_rows, board_proposer, round_evidence, draft_session):
        module.time = clock


def params(count: int, tokens: int, temperature: float = 0.0, **fields: Any) -> list[SamplingParams]:
    """Parameters of `count` requests, each with its own seed."""
    return [
        SamplingParams(temperature=temperature, seed=100 + index, max_tokens=tokens, **fields) for index in range(count)
    ]
