"""What the receiver lets onto the board, and whom it lets draft. A stub stands for its process."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec.structs import replace as replace_fields

from ssd.config.engine import DraftLink, EngineConfig
from ssd.config.params import Speculation
from ssd.ipc import sockets
from ssd.ipc.board import BoardReader, Key, size_bytes
from ssd.ipc.messages import (
    PEER_TO_TARGET,
    Admit,
    Hello,
    Launch,
    Launched,
    Outcomes,
    Readers,
    Rejoin,
    Release,
    Verified,
)
from ssd.ipc.process import memory_file
from ssd.ipc.public import Message, pack, unpack
from ssd.law import Law
from ssd.plugins.remote.link import RECEIVER_TO_DRAFT, Beat, Entry, Joined, NotAccepted, Offer, Published, Terms
from ssd.plugins.remote.receiver.process import Receiver
from ssd.plugins.remote.receiver.relay import Relay
from ssd.plugins.remote.receiver.sessions import DRAFT_RATE, Sessions
from tests.attacks.zeromq import connected
from tests.boards import lookup
from tests.scripted_engine import PATIENCE_S

EPOCH, SLOTS, VOCABULARY = 7, 2, 50
CONFIG = EngineConfig(
    target="nowhere",
    link=DraftLink(bind="tcp://127.0.0.1:0"),
    speculation=Speculation("ssd", 4, (3,), "jit"),
    max_num_seqs=SLOTS,
    vocab_size=VOCABULARY,
    digest="d1",
)


@dataclass
class World:
    """A receiver whose loop the test turns, the target's end of its ipc socket, its board, and a draft's socket."""

    receiver: Receiver
    target: zmq.Socket[bytes]
    board: BoardReader
    draft: zmq.Socket[bytes]
    number: int = 0
    peer: bytes = b""

    def turn(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            assert time.monotonic() < deadline
            self.receiver.turn()

    def say(self, message: Message, number: int | None = None) -> None:
        self.draft.send_multipart(pack(message, self.number if number is None else number))

    def heard(self, kind: type[Any]) -> Any:
        """The next message of a kind that the draft hears."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline
            self.turn(lambda: bool(self.draft.poll(0)))
            number, message = unpack(self.draft.recv_multipart(), RECEIVER_TO_DRAFT)
            if isinstance(message, kind):
                return number, message

    def offer(self) -> None:
        self.say(Offer("draft", "", VOCABULARY))
        self.number, terms = self.heard(Terms)
        assert terms.max_num_seqs == SLOTS
        self.say(Joined())

    def another(self) -> World:
        """Another draft that joins the same receiver."""
        other = World(self.receiver, self.target, self.board, sockets.dealer(self.draft.context, self.receiver.address))
        other.offer()
        assert other.told() == Readers(None, [])
        other.peer = self.peer
        return other

    def told(self) -> Message:
        """What the target is told next."""
        self.turn(lambda: bool(self.target.poll(0)))
        received = sockets.receive(self.target, PEER_TO_TARGET)
        assert received is not None
        return received[2]

    def join(self) -> None:
        self.offer()
        self.turn(lambda: bool(self.target.poll(0)))
        received = sockets.receive(self.target, PEER_TO_TARGET)
        assert received is not None
        self.peer, epoch, hello = received
        assert (epoch, hello) == (EPOCH, Hello("draft"))

    def tell(self, message: Message) -> None:
        """The target tells its draft something, which arrives."""
        assert sockets.send(self.target, message, 1, self.peer)
        assert self.heard(type(message))[1] == message

    def lookup(
        self, request: int = 5, round: int = 3, token: int = 9, base: int = 20, slot: int = 1
    ) -> list[int] | None:
        """What the board has after all that the draft has said so far, for no accepted token."""
        self.say(Published(progress=1))
        before = self.board.telemetry().progress
        self.turn(lambda: self.board.telemetry().progress > before)
        return lookup(self.board, slot, Key(EPOCH, request, round, base, 0, token))


def admit(request: int = 5, slot: int = 1, round: int = 3) -> Admit:
    return Admit(request, slot, round, [1] * 20, Law(), Speculation("ssd", 4, (3,), "jit"))


def entry(**changes: Any) -> Entry:
    values = {"request": 5, "round": 3, "base": 20, "accepted": 0, "token": 9, "rank": 1, "fan_out": 2}
    return Entry(**values | {"ids": [1, 2]} | changes)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    context: zmq.Context[Any] = zmq.Context()
    descriptor = memory_file("board", size_bytes(SLOTS))
    target = sockets.router(context, f"ipc://{tmp_path}/engine.sock")
    child: Any = SimpleNamespace(
        config=CONFIG,
        epoch=EPOCH,
        start=SimpleNamespace(board_fd=descriptor),
        context=context,
        address=lambda name: f"ipc://{tmp_path}/{name}",
        beat=lambda: None,
    )
    receiver = Receiver(child)
    draft = sockets.dealer(context, receiver.address)
    yield World(receiver, target, BoardReader(descriptor, SLOTS, VOCABULARY), draft)
    os.close(descriptor)
    context.destroy(linger=0)


def test_an_entry_of_the_running_verification_is_put_on_the_board(world: World) -> None:
    world.join()
    world.tell(admit())
    world.say(Published([entry()]))
    assert world.lookup() == [1, 2]
    place = world.board.find(1, Key(EPOCH, 5, 3, 20, 0, 9))
    assert place is not None and world.board.place(1, place.entry) == (1, 2)


@pytest.mark.parametrize(
    "lie", [{"ids": [1, VOCABULARY]}, {"token": VOCABULARY}, {"request": 6}, {"round": 2}, {"round": 4}]
)
def test_other_entries_are_dropped(world: World, lie: dict[str, Any]) -> None:
    world.join()
    world.tell(admit())
    world.say(Published([entry(**lie)]))
    shown = {"request": 5, "round": 3, "token": 9} | {name: value for name, value in lie.items() if name != "ids"}
    assert world.lookup(**shown) is None
    assert not world.board.slots.any()


def test_an_outcome_ends_a_round_and_a_late_entry_answers_the_next(world: World) -> None:
    world.join()
    world.tell(admit())
    world.say(Published([entry()]))
    assert world.lookup() == [1, 2]
    world.tell(Outcomes([Verified(5, 3, 0, 8, None)]))
    world.tell(Launched([Launch(5, 4, 0)]))
    assert world.lookup() is None  # cleared
    world.say(Published([entry(token=8, ids=[4, 5, 6])]))
    assert world.lookup(token=8) is None
    assert world.lookup(round=4, base=21, token=4) == [5, 6]
    world.tell(Release([5]))
    world.say(Published([entry(round=4, base=21, token=7)]))
    assert world.lookup(round=4, base=21, token=7) is None


def test_the_draft_is_told_which_tokens_are_verified(world: World) -> None:
    world.join()
    world.tell(admit())
    world.say(Published([entry()]))
    assert world.lookup() == [1, 2]
    assert sockets.send(world.target, Outcomes([Verified(5, 3, 0, 9, 2)]), 1, world.peer)
    assert world.heard(Outcomes)[1] == Outcomes([Verified(5, 3, 0, 9, None)])
    assert world.heard(Launched)[1] == Launched([Launch(5, 4, 2, [1, 2])])


def test_what_is_measured_of_the_link_is_on_the_board(world: World) -> None:
    assert world.board.link() is None
    world.join()
    world.tell(admit())
    _, beat = world.heard(Beat)
    world.say(Published([entry()], echo=beat.stamp))
    assert world.lookup() == [1, 2]
    world.tell(Outcomes([Verified(5, 3, 0, 8, None)]))
    world.say(Published([entry(token=8)]))
    assert world.lookup() is None
    for _ in range(2):  # one may have been on its way
        world.heard(Beat)
    found = world.board.link()
    assert found is not None and 0 < found.jitter < found.rtt < PATIENCE_S
    assert (found.entries, found.late, found.tokens) == (2, 1, 1) and found.bytes > 100


def test_impossible_times_and_counts_are_not_those_of_the_link_nor_of_steps(world: World) -> None:
    world.join()
    world.tell(admit())
    most = 2**40
    world.say(Published([entry()], echo=1, progress=most, steps=3, nanoseconds=most, grown=most))
    assert world.lookup() == [1, 2]
    for _ in range(2):  # one may have been on its way
        world.heard(Beat)
    assert world.board.link() is None, "nobody's clock has begun so long ago"
    told = world.board.telemetry()
    assert told.steps == 3 and told.step_seconds < PATIENCE_S and told.progress <= 2**17


def test_a_request_that_cannot_be_followed_is_dropped(world: World) -> None:
    world.join()
    world.tell(admit())
    assert sockets.send(world.target, Outcomes([Verified(5, 3, 0, 9, 2)]), 1, world.peer)  # nothing was on the board
    assert world.heard(Release)[1] == Release([5])
    assert world.lookup() is None


def test_frames_of_another_session_are_dropped_and_the_peer_is_told(world: World) -> None:
    world.join()
    world.tell(admit())
    world.say(Published([entry()]), world.number + 1)
    assert world.heard(NotAccepted)[1].again
    assert world.lookup() is None


def test_of_a_flood_no_more_is_looked_at_than_one_draft_may_send(world: World) -> None:
    world.join()
    world.tell(admit())
    began, sent = time.monotonic(), 3 * int(DRAFT_RATE)
    for _ in range(sent):
        while world.draft.poll(0, zmq.POLLOUT) == 0:
            world.receiver.turn()
        world.say(Published(progress=1))
    world.turn(lambda: world.receiver._counted["frames beyond the allowance"] > 0)
    assert world.board.telemetry().progress <= DRAFT_RATE * (1 + time.monotonic() - began)
    world.tell(Outcomes([Verified(5, 3, 0, 9, None)]))


def test_a_draft_that_starts_over_is_announced_again(world: World) -> None:
    world.join()
    world.tell(admit())
    world.tell(Rejoin())
    world.turn(lambda: bool(world.target.poll(0)))
    received = sockets.receive(world.target, PEER_TO_TARGET)
    assert received is not None and isinstance(received[2], Hello)
    world.say(Published([entry()]))
    assert world.lookup() is None


def test_the_target_loses_a_draft_that_is_gone_and_gets_the_next(world: World) -> None:
    world.join()
    first, number = world.peer, world.number
    world.draft.close(linger=0)
    deadline = time.monotonic() + PATIENCE_S
    while sockets.send(world.target, admit(), 1, first):
        assert time.monotonic() < deadline
        world.receiver.turn()
    world.draft = sockets.dealer(world.draft.context, world.receiver.address)
    world.join()
    assert world.number != number and world.peer != first


def test_two_drafts_have_a_request_each_and_no_word_in_the_other(world: World) -> None:
    world.join()
    other = world.another()
    world.tell(admit(5, slot=1))
    other.tell(admit(6, slot=0))
    for liar in (world, other):
        liar.say(Published([entry(request=5, ids=[1, 2]), entry(request=6, ids=[7])]))
    assert (world.lookup(request=5), other.lookup(request=6, slot=0)) == ([1, 2], [7])
    both = Outcomes([Verified(6, 3, 0, 8, None), Verified(5, 3, 0, 8, None)])
    assert sockets.send(world.target, both, 1, world.peer)
    assert world.heard(Outcomes)[1] == Outcomes([Verified(5, 3, 0, 8, None)])
    assert other.heard(Outcomes)[1] == Outcomes([Verified(6, 3, 0, 8, None)])
    other.draft.close(linger=0)
    assert world.told() == Readers(None, [6])  # it has no draft any more
    assert world.heard(Beat)
    world.tell(admit(6, slot=0))  # and gets the one that is left


def test_a_draft_that_is_for_its_own_client_hears_of_no_other(world: World) -> None:
    world.join()
    (session,) = world.receiver._sessions
    sessions = Sessions(own=True)
    sessions.add(replace(session, client="ann"))
    own, others = replace_fields(admit(), owner="ann"), replace_fields(admit(6), owner="bob")
    assert [message for _, message in sessions.routed(own)] == [admit()]
    assert sessions.routed(others) == []


def test_a_draft_of_no_use_is_left_alone_where_there_is_another(world: World) -> None:
    world.join()
    other = world.another()
    world.tell(admit())
    for index in range(25):  # 24 times two tokens that are wrong
        world.say(Published([entry(round=3 + index, base=20 + index)]))
        assert world.lookup(round=3 + index, base=20 + index) == [1, 2]
        assert sockets.send(world.target, Outcomes([Verified(5, 3 + index, 0, 9, 2)]), 1, world.peer)
        assert world.heard(Launched)
    assert world.heard(NotAccepted)[1] == NotAccepted("its tokens are not accepted", again=True)
    assert world.told() == Readers(None, [5])
    other.tell(admit())


def test_a_draft_may_be_gone_in_the_middle_of_what_it_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.join()
    world.tell(admit())
    world.say(Published([entry()]))
    assert world.lookup() == [1, 2]
    monkeypatch.setattr(world.receiver, "_send", lambda *_: "gone")
    assert sockets.send(world.target, Outcomes([Verified(5, 3, 0, 9, 2)]), 1, world.peer)  # becomes two messages
    deadline = time.monotonic() + PATIENCE_S
    while sockets.send(world.target, Release([5]), 1, world.peer):
        assert time.monotonic() < deadline
        world.receiver.turn()


def test_it_shows_that_it_is_there(world: World) -> None:
    world.join()
    stamps = [world.heard(Beat)[1].stamp for _ in range(2)]
    assert stamps[0] < stamps[1]


def test_silent_connections_are_closed_before_a_draft_that_is_older(world: World) -> None:
    world.join()
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(world.receiver.address)) for _ in range(140)]
        open_ = select.poll()
        for client in silent:
            open_.register(client, select.POLLRDHUP)
        world.turn(lambda: len(open_.poll(0)) >= 20)
        assert silent[-1].fileno() not in dict(open_.poll(0))
        world.tell(Rejoin())


def test_a_connection_that_is_cut_waits_for_no_peer_that_does_not_read(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "inner"))
        listening.listen()
        relay = Relay("tcp://127.0.0.1:0", f"ipc://{tmp_path}/inner")
        with connected(relay.address):
            inner, _ = listening.accept()
            with inner:
                inner.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    while True:
                        inner.send(bytes(2**16))
                relay.cut(inner.getpeername())
                inner.settimeout(PATIENCE_S)
                assert inner.recv(1) == b""
                inner.sendall(bytes(2**24))
