"""A target that is hostile, or not what it should be, and a volunteer's draft: it goes on, or ends with one line."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ssd.config.engine import EngineConfig, Upstream
from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.ipc.messages import Admit, Launch, Launched, Outcomes, Rehearse, Rejoin, Release, Retune, Verified
from ssd.ipc.public import Message, pack, unpack
from ssd.law import Law
from ssd.plugins.remote import reconnection
from ssd.plugins.remote.drafter import RemoteDrafter
from ssd.plugins.remote.link import (
    DRAFT_TO_RECEIVER,
    Beat,
    Joined,
    NotAccepted,
    Offer,
    Published,
    TargetVocabulary,
    Terms,
)
from tests.models import tiny
from tests.scripted_engine import PATIENCE_S

SIZE, LONGEST, SEQUENCES = 300, 256, 2
SPECULATION = Speculation("ssd", 3, (2,), "none")
TERMS = Terms("target", SIZE, SEQUENCES, LONGEST, SPECULATION)


class Target:
    """An engine's end of the link that says what a test wants, and a draft in a thread that connects to it."""

    def __init__(self, model: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.said: list[str] = []
        self.ended: BaseException | None = None
        upstream = Upstream(draft_connect=f"tcp://127.0.0.1:{port}")
        config = EngineConfig(target=str(model), draft=str(model), upstream=upstream, draft_num_pages=128)
        self._drafter = RemoteDrafter(config, settled=self.said.append)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._drafter.serve()
        except BaseException as error:
            self.ended = error

    def close(self) -> None:
        """Tell the draft that it is not wanted, which ends it."""
        self.hear(Offer)
        self.say(NotAccepted("go away"))
        self.end()
        assert isinstance(self.ended, UsageError), self.ended

    def end(self) -> None:
        """Wait until the draft has ended."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.say_bytes(pack(message, 7)[1])

    def say_bytes(self, body: bytes) -> None:
        self._socket.send_multipart([self.peer, pack(Beat(1), 7)[0], body])

    def hear(self, *kinds: type[Message]) -> Message:
        """The next message of one of these kinds; the draft must not have ended."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self.ended is None, self.ended
            assert time.monotonic() < deadline, "the draft says nothing"
            if not self._socket.poll(50):
                continue
            self.peer, *frames = self._socket.recv_multipart()
            _, message = unpack(frames, DRAFT_TO_RECEIVER)
            if isinstance(message, kinds):
                found: Message = message
                return found

    def join(self, terms: Terms = TERMS) -> None:
        self.hear(Offer)
        self.say(terms)
        self.hear(Joined)

    def is_left(self) -> bool:
        """True if the draft has left the session, False if it still drafts for a request."""
        self.say(Rejoin(), admit(request=99))
        while True:
            heard = self.hear(Offer, Published)
            if isinstance(heard, Offer):
                self.say(TERMS)
                self.hear(Joined)
                return True
            if isinstance(heard, Published) and any(entry.request == 99 for entry in heard.entries):
                return False


def admit(request: int = 1, token_ids: list[int] | None = None, **changes: Any) -> Admit:
    values: dict[str, Any] = {"law": Law(), "speculation": SPECULATION} | changes
    return Admit(request, 0, 0, [5, 6, 7] if token_ids is None else token_ids, **values)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconnection, "_FIRST_S", 0.02)
        patch.setattr(reconnection, "_LONGEST_S", 0.02)
        target = Target(tiny.tokenizer(tiny.llama(folder / "model", seed=3, vocab_size=SIZE)))
        yield target
        target.close()


def changed(message: Message, **fields: Any) -> bytes:
    """A message with fields that no one of its type has."""
    return msgspec.msgpack.encode(msgspec.to_builtins(message) | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 0},
        {"vocab_size": 2**31},
        {"vocab_size": SIZE // 3},
        {"vocab_size": -1},
        {"vocab_size": float("inf")},
        {"max_model_len": 2**31 - 1},
        {"max_model_len": 0},
        {"max_num_seqs": 10**6},
        {"speculation": {"num_speculative_tokens": 10**9}},
        {"speculation": {"fan_out": [1, 2]}},
        {"speculation": {"fan_out": [10**9]}},
        {"target": "x" * 10**6},
        {"target": None},
        {"more": [[[]]]},
    ],
    ids=str,
)
def test_terms_that_cannot_be_cost_the_connection_alone(target: Target, fields: dict[str, Any]) -> None:
    target.hear(Offer)
    target.say_bytes(changed(TERMS, **fields))
    target.join()
    assert not target.is_left()
    target.say(NotAccepted("again", again=True))


HOSTILE: list[Message | bytes] = [
    admit(token_ids=[SIZE]),
    admit(token_ids=[2**31 - 1]),
    admit(token_ids=[]),
    admit(token_ids=[1] * (LONGEST + 1)),
    admit(law=Law(float("nan"))),
    admit(law=Law(float("inf"))),
    admit(law=Law(1e18)),
    admit(law=Law(-1.0)),
    admit(law=Law(top_p=-1.0)),
    admit(law=Law(min_p=1e9)),
    changed(admit(), slot=-1),
    changed(admit(), request="1"),
    changed(admit(), token_ids={"a": 1}),
    changed(admit(), speculation=None),
    admit(speculation=Speculation("ssd", 3, (60,), "jit")),
    Retune([(1, Speculation("ssd", 3, (1, 2), "jit"))]),
    Outcomes([Verified(1, 0, 0, SIZE, 0)]),
    Launched([Launch(1, 0, 1, [SIZE])]),
    msgspec.msgpack.encode({"type": "Nothing"}),
    msgspec.msgpack.encode({"type": "\x1b[2J\x07"}),
    b"\x91" * 100_000,
    b"\xc1",
    b"",
]


@pytest.mark.parametrize("message", HOSTILE, ids=lambda message: repr(message)[:60])
def test_a_message_that_no_engine_sends_costs_the_session_alone(target: Target, message: Message | bytes) -> None:
    target.join()
    target.say(admit())
    target.say_bytes(message if isinstance(message, bytes) else pack(message)[1])
    assert target.is_left()
    assert target.said[-1].isprintable() and len(target.said[-1]) < 400
    target.say(NotAccepted("again", again=True))


def test_too_many_requests_at_once_cost_the_session(target: Target) -> None:
    target.join()
    target.say(*(admit(request) for request in range(5 * SEQUENCES)))
    assert target.is_left()
    target.say(NotAccepted("again", again=True))


def test_requests_of_before_a_rejoin_do_not_count(target: Target) -> None:
    target.join()
    for first in range(0, 6 * SEQUENCES, SEQUENCES):
        target.say(Rejoin(), *(admit(request) for request in range(first, first + SEQUENCES)))
    assert not target.is_left()
    target.say(NotAccepted("again", again=True))


def test_what_an_engine_says_is_printed_without_control_characters(target: Target) -> None:
    target.join(msgspec.structs.replace(TERMS, target="\x1b]0;gone\x07\n" * 20))
    target.say(admit())
    target.hear(Published)  # it has told people by now
    assert target.said[-1].startswith("drafting for ") and target.said[-1].isprintable()
    target.say(NotAccepted("\x1b[2J\nerror: all is lost", again=True))
    target.hear(Offer)
    assert target.said[-1].isprintable() and "error: all is lost" in target.said[-1]
    target.say(NotAccepted("again", again=True))


@pytest.mark.parametrize("tokens", [{}, {"\x1b[2J": 0}], ids=str)
def test_a_vocabulary_that_is_of_no_use_ends_a_draft_with_a_line(tmp_path: Path, tokens: dict[str, int]) -> None:
    target = Target(tiny.tokenizer(tiny.llama(tmp_path / "model", seed=3, vocab_size=SIZE)))
    target.hear(Offer)
    target.say(TargetVocabulary(tokens))
    target.hear(Offer)
    target.say(TERMS)
    target.end()
    assert isinstance(target.ended, UsageError) and str(target.ended).isprintable()


class Dice:
    """Messages whose types are right and whose values are any."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def message(self) -> Message:
        makers = [self._admit, self._outcomes, self._launched, self._retune, self._release, self._rehearse]
        return self._dice.choice([*makers, self._admit, self._outcomes, self._launched, Rejoin])()

    def _count(self) -> int:
        return self._dice.choice((0, 0, 0, 1, 1, 2, 3, 7, 64, 2**31, 2**62))

    def _request(self) -> int:
        return self._dice.randint(0, 3)

    def _ids(self, most: int) -> list[int]:
        return [self._dice.randrange(SIZE) for _ in range(self._dice.randint(0, most))]

    def _speculation(self) -> Speculation:
        dice = self._dice
        fan_out: tuple[int, ...] = dice.choice(((), (1,), (3,), (1, 2, 3), (0, 0, 1), (0, 2, 0), (1,) * 17))
        modes: Any = ("auto", "ar", "ngram", "sd", "ssd")
        samplers: Any = ("coupled", "rejection")
        allocations: Any = ("joint", "theorem", "pearl")
        return Speculation(
            dice.choice(modes),
            dice.choice((0, 1, 2, 3, 16)),
            fan_out,
            dice.choice(("jit", "none", "ngram", "nobody")),
            dice.choice(samplers),
            dice.choice((0.0, 0.5, 1.0)),
            dice.choice((2, 32, 63)),
            dice.choice(allocations),
        )

    def _admit(self) -> Admit:
        dice = self._dice
        return Admit(
            self._request(),
            self._count(),
            self._count(),
            self._ids(LONGEST),
            Law(
                dice.choice((0.0, 1e-300, 0.7, 100.0)),
                dice.choice((0, 1, 2**31 - 1)),
                dice.choice((1e-300, 0.5, 1.0)),
                dice.choice((0.0, 0.5, 1.0)),
                dice.choice((0, 2**63 - 1)),
            ),
            self._speculation(),
        )

    def _outcomes(self) -> Outcomes:
        rows = range(self._dice.randint(1, 3))
        return Outcomes(
            [
                Verified(
                    self._request(),
                    self._count(),
                    self._count(),
                    self._dice.randrange(SIZE),
                    self._dice.choice((None, *range(65))),
                )
                for _ in rows
            ]
        )

    def _launched(self) -> Launched:
        return Launched([Launch(self._request(), self._count(), self._dice.randint(0, 64), self._ids(64))])

    def _retune(self) -> Retune:
        return Retune([(self._request(), self._speculation())])

    def _release(self) -> Release:
        return Release([self._request(), self._count()])

    def _rehearse(self) -> Rehearse:
        return Rehearse(self._dice.randint(0, 64), self._dice.random() < 0.5)


@pytest.mark.parametrize("seed", range(6))
def test_no_message_of_right_types_ends_a_draft(target: Target, seed: int) -> None:
    dice = Dice(seed)
    target.join()
    for _ in range(60):
        target.say(*(dice.message() for _ in range(dice._dice.randint(1, 5))))
        target.is_left()
    target.say(NotAccepted("again", again=True))
