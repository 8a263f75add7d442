"""Whatever happens to the draft, in whatever order: the target's words are its own (contract C1).

A state machine over the real target engine, real draft engines and a real board in one process, with queues between
them that a supervisor and bad luck may touch: deaths, stops, a draft that was taken for dead beside its successor, slow
work, messages lost, doubled, overtaken and garbled, memory scribbled over.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from ssd.config.params import SamplingParams, Speculation
from ssd.draft.engine import DraftEngine
from ssd.execution.runner import Runner
from ssd.ipc.board import IDS, BoardReader, BoardWriter, Cached, Key, Prepared, size_bytes
from ssd.ipc.messages import (
    TARGET_TO_DRAFT,
    TARGET_TO_FRONTEND,
    Admit,
    Launched,
    Outcomes,
    Rejoin,
    Release,
    Retune,
    Step,
    Submit,
    Verified,
)
from ssd.ipc.process import memory_file
from ssd.ipc.public import Message, pack, unpack
from ssd.launch.restarts import Restarts
from ssd.verifier.board_proposer import BoardProposer
from ssd.verifier.engine import TargetEngine
from ssd.verifier.verification import PlainVerification
from tests.draft.audit import PROMPTS, World, world_in
from tests.draft.pair import PAGE_SIZE, VOCABULARY, Clock, Pair, config, use_clock

TOKENS = 30
SLOTS = 3
# Messages that a draft that does not read has room for; steps of the target in which every running request moves on.
QUEUE, PROGRESS = 12, 4
ASKED = [
    (prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, speculation=speculation))
    for seed, (prompt, temperature, speculation) in enumerate(
        [
            (PROMPTS[0], 0.0, Speculation("ssd", 4, (3,), "none")),
            (PROMPTS[1], 0.8, Speculation("ssd", 3, (2,), "none")),
            (PROMPTS[2], 0.0, Speculation("sd", 3, (3,), "jit")),
            (PROMPTS[3], 0.8, Speculation("ssd", 4, (2,), "auto")),
        ]
    )
]
SCRIBBLES = ("ids", "anything", "copies", "counters")
numbers = st.integers(0, 2**31 - 1)


class Draft:
    """A draft process: what it was sent, whether it runs, and all that it has ever shown for an outcome."""

    def __init__(self, epoch: int, world: World, descriptor: int) -> None:
        self.epoch, self.queue = epoch, list[Message]()
        self.alive = self.running = True
        self.hello = True
        self.shown: dict[Key, list[list[int]]] = {}
        self._world = world
        self._writer = BoardWriter(descriptor, SLOTS)
        self._publish = self._writer.publish
        self._writer.publish = self._noted  # type: ignore[method-assign]
        self._engine = self._fresh()

    def _fresh(self) -> DraftEngine:
        settings = config(Speculation("ssd", 4, (3,), "jit"), max_num_seqs=SLOTS, draft_num_pages=120)
        runner = Runner(self._world.draft.model, 120, PAGE_SIZE)
        return DraftEngine(settings, [runner], self._writer, self.epoch, VOCABULARY)

    def _noted(self, slot: int, prepared: Sequence[Prepared]) -> None:
        for entry in prepared:
            self.shown.setdefault(entry.key, []).append(list(entry.ids))
        self._publish(slot, prepared)

    def work(self, messages: int, steps: int) -> None:
        """Read so many messages and take so many steps, like the loop of its process; what breaks it ends it."""
        if not (self.alive and self.running):
            return
        try:
            for message in [self.queue.pop(0) for _ in range(min(messages, len(self.queue)))]:
                self._hear(message)
            while steps > 0 and self._engine.step():
                steps -= 1
        except Exception:
            self.alive = False

    def _hear(self, message: Message) -> None:
        if isinstance(message, Rejoin):
            self._engine, self.hello = self._fresh(), True
        else:
            assert isinstance(message, Admit | Outcomes | Launched | Retune | Release)
            self._engine.handle(message)


class AnyOrder(RuleBasedStateMachine):
    world: World
    expected: list[list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        use_clock(self.clock)
        self.descriptor = memory_file("board", size_bytes(SLOTS))
        self.reader = BoardReader(self.descriptor, SLOTS, VOCABULARY)
        self._find = self.reader.find
        self.reader.find = self._checked  # type: ignore[method-assign]
        self.proposer = BoardProposer(self.reader, self._post)
        settings = config(
            Speculation("ssd", 4, (3,), "jit"), max_num_seqs=SLOTS, num_pages=60, max_num_batched_tokens=24
        )
        runner = Runner(self.world.target.model, 60, PAGE_SIZE)
        self.engine = TargetEngine(settings, PlainVerification(runner), self.proposer)
        self.ids: dict[int, list[int]] = {}
        self.stuck: dict[int, int] = {}
        self.epoch = 0
        self.drafts: list[Draft] = []  # the last one is the supervisor's; others it takes for dead
        self.peer: Draft | None = None  # whom the target talks to
        self.restarts = Restarts(per_minute=1000)
        self._bear()

    def _bear(self) -> None:
        self.epoch += 1
        self.drafts.append(Draft(self.epoch, self.world, self.descriptor))

    def _post(self, message: Message) -> bool:
        """To the peer's socket: gone, full, or on its way."""
        if self.peer is None or not self.peer.alive or len(self.peer.queue) >= QUEUE:
            return False
        self.peer.queue.append(unpack(pack(message), TARGET_TO_DRAFT)[1])  # as it is now
        return True

    def _checked(self, slot: int, key: Key, most: int = 16) -> Cached | None:
        """What the target takes is what the draft it listens to has written, for this very outcome."""
        found = self._find(slot, key, most)
        if found is not None:
            assert self.peer is not None
            shown = self.peer.shown.get(key, [])
            assert any(chain[: len(found.ids)] == found.ids for chain in shown), (key, found.ids, shown)
        return found

    # -- what happens ------------------------------------------------------------------------------------------------

    @initialize(which=st.lists(st.integers(0, len(ASKED) - 1), min_size=1, max_size=3))
    def begin(self, which: list[int]) -> None:
        for one in which:
            self.ask(one)
        self.go_on(rounds=5, messages=9, steps=6)

    @rule(which=st.integers(0, len(ASKED) - 1))
    def ask(self, which: int) -> None:
        if len(self.ids) < 12:
            number = len(self.ids) * len(ASKED) + which
            self.ids[number] = []
            prompt, params = ASKED[which]
            self.engine.submit(Submit(number, prompt, params))
            self.stuck[number] = 0

    @rule(seed=numbers)
    def leave(self, seed: int) -> None:
        """A client of one of the open requests does."""
        if self.stuck:
            number = random.Random(seed).choice(list(self.stuck))
            del self.stuck[number]
            self.engine.abort(number)

    @rule(rounds=st.integers(1, 6), messages=st.sampled_from([9, 9, 2, 1, 0]), steps=st.sampled_from([6, 4, 2, 1, 0]))
    def go_on(self, rounds: int, messages: int, steps: int) -> None:
        """The target takes steps, the draft as much time as it is given."""
        for _ in range(rounds):
            self._say_hello()
            self._step()
            for draft in self.drafts:
                draft.work(messages, steps)

    def _say_hello(self) -> None:
        for draft in self.drafts:
            if draft.alive and draft.running and draft.hello:
                draft.hello = False
                if self.proposer.session.join(draft.epoch):
                    assert self.peer is None or draft.epoch >= self.peer.epoch, "the past is over"
                    self.peer = draft

    def _step(self) -> None:
        began = self.clock.now
        running = {s.request for s in self.engine.scheduler.running if s.pending == 1}
        step = Step(self.engine.step(), self.engine.load())
        assert unpack(pack(step), TARGET_TO_FRONTEND)[1] == step, "the frontend can read it"
        for emission in step.emissions:
            assert emission.request in self.stuck, "it has ended"
            ids = self.ids[emission.request]
            ids += emission.token_ids
            expected = self.expected[emission.request % len(ASKED)]
            assert ids == expected[: len(ids)], "not the target's own words"
            self.stuck[emission.request] = 0
            if emission.finish_reason is not None:
                assert ids == expected
                del self.stuck[emission.request]
        for request in running & set(self.stuck):
            self.stuck[request] += 1
            assert self.stuck[request] <= PROGRESS
        assert self.clock.now - began <= 0.25
        self.clock.now += 0.01

    @property
    def _young(self) -> Draft:
        return self.drafts[-1]

    @rule(fate=st.sampled_from(["kill", "kill and replace", "stop", "go on", "replace", "replace", "old hello"]))
    def process(self, fate: str) -> None:
        """What the supervisor or bad luck does to drafts. One that is replaced while it lives goes on beside its
        successor, and may even say hello again."""
        now = self.clock.now
        if fate.startswith("kill") and self._young.alive:
            self._young.alive = False
            self.restarts.died(now)
        if fate == "replace":
            self.restarts.replace(now)
        if fate.endswith("replace"):
            self.wait(5.0)
        self._young.running &= fate != "stop"
        if fate == "go on":
            for draft in self.drafts:
                draft.running = True
        self.drafts[0].hello |= fate == "old hello"

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        """The supervisor finds a draft that broke by itself, and starts another when it is time."""
        self.clock.now += seconds
        if not self._young.alive and self.restarts.due is None:
            self.restarts.died(self.clock.now)
        if self.restarts.taken(self.clock.now):
            self._bear()
            del self.drafts[:-3]

    @precondition(lambda self: self._young.queue)
    @rule(seed=numbers, how=st.sampled_from(["lose", "double", "overtake", "garble"]))
    def misdeliver(self, seed: int, how: str) -> None:
        """A message that is on its way. After another outcome than the true one, what the draft believes is wrong."""
        dice, queue = random.Random(seed), self._young.queue
        message = queue.pop(dice.randrange(len(queue)))
        if how == "garble" and isinstance(message, Outcomes):
            wrong = dice.randrange(4), dice.randrange(VOCABULARY), dice.choice((None, 0, 1, 2, 3))
            message = Outcomes([Verified(row.request, row.round, *wrong) for row in message.rows])
        for _ in range({"lose": 0, "double": 2}.get(how, 1)):
            queue.insert(dice.randrange(len(queue) + 1), message)

    @rule(seed=numbers, how=st.sampled_from(SCRIBBLES))
    def scribble(self, seed: int, how: str) -> None:
        """Over the board: ids that could be, any word, whole entries to where they do not belong, and its counters."""
        dice, slots = random.Random(seed), self.reader.slots
        if how == "counters":
            self.reader._header[dice.randrange(4)] = dice.choice((-1, 0, 1, -(2**63), 2**63 - 1))
            return
        for slot, entry in zip(*slots[:, :, 0].nonzero(), strict=True):
            if how == "ids":
                slots[slot, entry, IDS + dice.randrange(3)] = dice.randrange(VOCABULARY)
            elif how == "anything":
                slots[slot, entry, dice.randrange(IDS + 4)] = dice.choice((0, -1, 1, 2**62, dice.randrange(VOCABULARY)))
            else:
                slots[dice.randrange(SLOTS), dice.randrange(16)] = slots[slot, entry]

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def the_draft_is_told_of_what_runs(self) -> None:
        running = {sequence.request for sequence in self.engine.scheduler.running}
        assert set(self.proposer.session.tracked._tracked) <= running
        assert self.proposer.state in ("up", "down", "open", "half_open")

    def teardown(self) -> None:
        """Every request comes to its end, and gives its pages back."""
        for _ in range(50 + TOKENS * len(self.stuck)):
            if not self.engine.busy:
                break
            self._step()
        assert not self.stuck and not self.engine.busy
        self.engine.pool.check()
        assert self.engine.pool.live == 0
        os.close(self.descriptor)


@pytest.fixture(autouse=True)
def real_time() -> Iterator[None]:
    """Afterwards."""
    yield
    use_clock(time)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> type[AnyOrder]:
    world = world_in(tmp_path_factory.mktemp("world"))
    expected = [
        Pair(config(Speculation("ar")), world.target).run([prompt], [replace(params, speculation=None)]).ids[0]
        for prompt, params in ASKED
    ]
    return type("Machine", (AnyOrder,), {"world": world, "expected": expected})


def test_whatever_happens_in_whatever_order(machine: type[AnyOrder]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=20, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize(
    "fault",
    [
        lambda machine, turn: machine.process("replace"),
        lambda machine, turn: machine.process("kill and replace"),
        lambda machine, turn: machine.process(("replace", "old hello")[turn % 2]),
        *(lambda machine, turn, how=how: machine.scribble(seed=turn, how=how) for how in SCRIBBLES),
        lambda machine, turn: machine.leave(seed=turn) or machine.ask(turn % len(ASKED)),
        *(
            lambda machine, turn, how=how: machine._young.queue and machine.misdeliver(seed=turn, how=how)
            for how in ("lose", "double", "overtake", "garble")
        ),
    ],
    ids=["replace", "kill", "old hello", *SCRIBBLES, "leave", "lose", "double", "overtake", "garble"],
)
def test_the_same_again_and_again(machine: type[AnyOrder], fault: Callable[[AnyOrder, int], Any]) -> None:
    """Every fault often enough to matter, while the draft is of use."""
    for which in ([0, 1, 3], [1, 2, 0]):
        one = machine()
        one.begin(which)
        for turn in range(12):
            fault(one, turn)
            one.go_on(rounds=1 + turn % 2, messages=9 if turn % 3 else 1, steps=4)
            one.the_draft_is_told_of_what_runs()
        one.teardown()
