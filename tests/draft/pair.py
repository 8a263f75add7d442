"""A target, a draft and a real board in one process: what the two processes do, in an order that a test decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ssd.config import EngineConfig
from ssd.draft.engine import DraftEngine
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.ipc.board import BoardReader, BoardWriter, Key, size_bytes
from ssd.ipc.device_board import DeviceBoard
from ssd.ipc.features import FeatureArena
from ssd.ipc.laws import LawArena
from ssd.ipc.layouts import feature_layout, law_layout
from ssd.ipc.messages import (
    TARGET_TO_DRAFT,
    Admit,
    Launch,
    Launched,
    Message,
    Metrics,
    Outcome,
    Outcomes,
    Rejoin,
    Release,
    Retune,
    Submit,
    pack,
    unpack,
)
from ssd.ipc.process import memory_file
from ssd.params import SamplingParams, Speculation
from ssd.speculation.ahead import Worth
from ssd.speculation.sampling import Law
from ssd.target.ahead import Ahead
from ssd.target.board_proposer import BoardProposer
from ssd.target.chain import Chain
from ssd.target.engine import TargetEngine
from ssd.target.features import FeatureExport
from ssd.target.proposer import NoProposer

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
    """What a run gave: the new ids of each prompt, their metrics, how often a sequence lost its pages."""

    ids: list[list[int]]
    metrics: list[Metrics]
    preemptions: int


class Draft:
    """The draft's process without the process; of several runners the smallest comes first. `steps` bounds the steps
    after each message (None: until it idles); `watch` is called after every step and every message."""

    def __init__(self, configuration: EngineConfig, *runners: Runner, steps: int | None = None) -> None:
        self.config, self.runners, self.steps = configuration, runners, steps
        self.watch: Callable[[DraftEngine], None] = lambda engine: None
        slots = configuration.max_num_seqs
        descriptor = memory_file("board", size_bytes(slots))
        self._writer = BoardWriter(descriptor, slots)
        self.board = BoardReader(descriptor, slots, configuration.vocab_size)
        os.close(descriptor)
        self.laws = self._law_arena()
        self.features, self.shown = self._feature_arenas()
        self.epoch = self.forwards = 0
        self.restart()

    def _law_arena(self) -> LawArena | None:
        """Both sides share one view here: what one writes the other reads."""
        numbers = self.config.max_num_seqs, self.config.speculation, self.config.vocab_size
        if self.config.speculation.sampler != "rejection":
            return None
        layout = law_layout(*numbers)
        descriptor = memory_file("laws", layout.size_bytes)
        arena = LawArena(descriptor, layout)
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
        arenas = self.laws, self.features
        self.engine = DraftEngine(self.config, self.runners, self._writer, self.epoch, vocab_size, *arenas)
        self.cells = cells_of(self.engine)

    def hear(self, message: Message) -> None:
        """One message, over the wire and back, then the work it brings."""
        _, heard = unpack(pack(message), TARGET_TO_DRAFT)
        assert isinstance(heard, Admit | Outcomes | Launched | Retune | Release)
        self.engine.handle(heard)
        self.watch(self.engine)
        self.work(self.steps)

    def work(self, steps: int | None = None) -> None:
        """So many steps, or until there is nothing to do."""
        while steps is None or steps > 0:
            if not self.engine.step():
                return
            self.forwards += 1
            self.watch(self.engine)
            steps = None if steps is None else steps - 1

    def assert_empty(self) -> None:
        """No sequence, no page and no place in the arena is left in use, and none is counted twice."""
        assert not self.engine.trees
        level, smaller = self.engine.level, self.engine.smaller
        while True:
            level.pool.check()
            assert level.pool.live == 0
            if smaller is None:
                break
            level, smaller = smaller.level, smaller.below
        assert cells_of(self.engine) == self.cells == list(range(len(self.cells)))


def cells_of(engine: DraftEngine) -> list[int]:
    """The free places of the arena, in order."""
    taken = []
    while (cell := engine.level.arena.take()) is not None:
        taken.append(cell)
    engine.level.arena.give_back(taken[::-1])
    return sorted(taken)


class ScriptedTarget:
    """One sequence of a target whose outcomes the test decides; it reads the board and tells the draft as a target
    does. `in_flight` is what it verifies now."""

    def __init__(
        self, draft: Draft, request: int, prompt: list[int], law: Law, speculation: Speculation, round_number: int = 0
    ) -> None:
        self.draft, self.request, self.speculation = draft, request, speculation
        self.tokens, self.round = list(prompt), round_number
        self.in_flight: list[int] = []
        self.hits = 0
        self._missed: Key | None = None
        draft.hear(Admit(request, request, round_number, prompt, *law, speculation))

    @property
    def waiting(self) -> bool:
        """Whether a backup is awaited: `launch` must follow."""
        return self._missed is not None

    def outcome(self, accepted: int, token: int, most: int, wait: bool = True, late: int = 0) -> bool:
        """The verification in flight ends so; the next one takes at most `most` tokens of what is cached for it.
        Returns whether there were any. If not, and `wait`, the row is left open for the backup. The draft still takes
        `late` steps before it hears of it."""
        key = Key(self.draft.epoch, self.request, self.round, len(self.tokens), accepted, token)
        sd = self.speculation.mode == "sd"
        found = [] if sd else self.draft.board.lookup(self.request, key, most) or []
        self.tokens += [*self.in_flight[:accepted], token]
        self.round += 1
        self.in_flight = found
        self.hits += bool(found)
        self._missed = key if wait and not found else None
        row = Outcome(self.request, self.round - 1, accepted, token, -1 if self.waiting else len(found))
        self.draft.work(late)
        self.draft.hear(Outcomes([row]))
        return bool(found)

    def launch(self, most: int) -> None:
        """Verify at most `most` tokens of what the backup has brought."""
        assert self._missed is not None
        self.in_flight = self.draft.board.lookup(self.request, self._missed, most) or []
        self._missed = None
        self.draft.hear(Launched([Launch(self.request, self.round, len(self.in_flight))]))

    def release(self) -> None:
        self.draft.hear(Release([self.request]))


class Always(Worth):
    """Nothing is waited for."""

    ahead = True


class Pair:
    """A target engine, and a draft that it talks to through `post`, which a test may replace: it is given a message
    and says whether the message went. `ahead`: verifications are launched before outcomes are known, as on a GPU,
    wherever that can be done."""

    def __init__(
        self, configuration: EngineConfig, target: Runner, draft: Draft | None = None, ahead: bool = False
    ) -> None:
        self.config, self.draft = configuration, draft
        self.post: Callable[[Message], bool] = self.deliver
        self.between_steps: Callable[[], None] = lambda: None
        self._said_hello = False
        if draft is None:
            self.engine = TargetEngine(configuration, target, NoProposer())
        else:
            self.proposer = BoardProposer(draft.board, lambda message: self.post(message), draft.laws)
            shown = configuration.features and draft.shown and FeatureExport(draft.shown, configuration.features.layers)
            self.ahead = self._ahead(target, draft) if ahead else None
            self.engine = TargetEngine(configuration, target, self.proposer, features=shown, ahead=self.ahead)
            self.proposer.join(draft.epoch)

    def _ahead(self, target: Runner, draft: Draft) -> Ahead:
        assert isinstance(target, StaticRunner)
        chain = Chain(target, DeviceBoard(draft.board, target.model.device))
        return Ahead(chain, self.proposer.asks, self.config.max_num_batched_tokens, Always())

    def deliver(self, message: Message) -> bool:
        assert self.draft is not None
        if isinstance(message, Rejoin):
            self.draft.restart()
            self._said_hello = True
        else:
            self.draft.hear(message)
        return True

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Texts:
        """All prompts as one batch, to their ends; afterwards the target holds no page and no sequence."""
        ids: list[list[int]] = [[] for _ in prompts]
        metrics: dict[int, Metrics] = {}
        preemptions = 0
        for request, (prompt, law) in enumerate(zip(prompts, params, strict=True)):
            self.engine.submit(Submit(request, prompt, law))
        while self.engine.busy:
            self.between_steps()
            if self._said_hello and self.draft is not None:
                self._said_hello = False
                self.proposer.join(self.draft.epoch)
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
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)


def params(count: int, tokens: int, temperature: float = 0.0, **fields: Any) -> list[SamplingParams]:
    """For `count` requests, each with a seed of its own."""
    return [
        SamplingParams(temperature=temperature, seed=100 + index, max_tokens=tokens, **fields) for index in range(count)
    ]
