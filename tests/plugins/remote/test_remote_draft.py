"""A draft on another machine: the ids are those of `ar`, whatever the link or the draft does."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ssd.config.engine import EngineConfig, Upstream
from ssd.errors import UsageError
from ssd.ipc import keys
from ssd.ipc.curve import client_keys
from ssd.ipc.messages import Admit, Outcomes
from ssd.ipc.public import Message, pack, unpack
from ssd.plugins.remote.drafter import RemoteDrafter
from ssd.plugins.remote.link import LINK_VERSION, RECEIVER_TO_DRAFT, Beat, Entry, Joined, Offer, Published, Terms
from tests.models import tiny
from tests.plugins.remote.world import TIMES, World, kill
from tests.scripted_engine import PATIENCE_S


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("remote"))
    with world.running():
        yield world


@pytest.fixture(scope="module")
def expected(world: World) -> list[list[int]]:
    return world.ids("ar")[0]


def test_ids_are_those_of_ar_and_rounds_hit_at_any_distance_that_fits_a_verification(
    world: World, expected: list[list[int]]
) -> None:
    assert world.ids() == (expected, 0)  # nobody has connected yet
    sampled = world.ids("ar", 0.8)[0]
    with world.draft():
        for delay in (0.0, 0.01, 2 * TIMES.verify.fixed_s):  # the last one: some rounds are under way at once
            world.link.behaviour.delay = delay
            world.until_hits(expected)
            assert world.ids(temperature=0.8)[0] == sampled
        world.link.behaviour.delay = 10 * TIMES.verify.fixed_s  # everything is late
        assert world.ids()[0] == expected
        world.link.behaviour.delay = 0.0


@pytest.mark.thorough
def test_resets_stalls_and_deaths_change_nothing_and_the_draft_comes_back(
    world: World, expected: list[list[int]]
) -> None:
    receiver = world.engine.pids["draft"]
    with world.draft() as draft:
        faults: list[Callable[[], None]] = [
            world.link.reset,
            lambda: world.link.stall(0.4),
            lambda: world.link.stall(1.5),
            lambda: kill(world.engine.pids["draft"]),
        ]
        for fault in faults:
            world.until_hits(expected)
            timer = threading.Timer(0.2, fault)
            timer.start()
            assert world.ids()[0] == expected
            timer.join()
        world.until_hits(expected)
        assert world.engine.pids["draft"] != receiver
        threading.Timer(0.2, draft.kill).start()
        assert world.ids()[0] == expected


class Liar:
    """A draft with a good key that answers everything that it is told with lies, in a thread."""

    def __init__(self, world: World) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        client_keys(world.edge).apply(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(world.bind)
        self._random, self._number = random.Random(1), 0
        self._bases: dict[int, int] = {}
        self._first: list[bytes] | None = None
        self.told, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        offer_at = 0.0
        while not self._over.is_set():
            if time.monotonic() > offer_at:  # the engine may have closed the connection
                self._send(Offer("liar", "", 300))
                offer_at = time.monotonic() + 1.0
            if not self._socket.poll(20):
                continue
            number, message = unpack(self._socket.recv_multipart(), RECEIVER_TO_DRAFT)
            if isinstance(message, Terms):
                self._number = number
                self._send(Joined())
            elif isinstance(message, Beat):
                offer_at = time.monotonic() + 1.0
            elif isinstance(message, Admit):
                self._bases[message.request] = len(message.token_ids)
                self._lie(message.request, message.round)
            elif isinstance(message, Outcomes):
                for row in message.rows:
                    self._bases[row.request] += row.accepted + 1
                    self._lie(row.request, row.round + 1)

    def _lie(self, request: int, round_number: int) -> None:
        self.told += 1
        base = self._bases[request]
        tokens = self._random.sample(range(300), 60)

        def entries(ids: list[int], request: int = request, round_number: int = round_number) -> list[Entry]:
            return [Entry(request, round_number, base, 0, token, 1, 1, ids) for token in tokens]

        wrong = Published(entries([self._random.randrange(300)] * 3), progress=1)
        self._first = self._first or pack(wrong, self._number)
        for lie in (
            Published(entries([299, 300])),
            Published(entries([2**31 - 1])),
            Published(entries([1], request=request + 1)),
            Published(entries([1], round_number=round_number + 1)),
            Published(entries([1], round_number=max(0, round_number - 1))),
            Published(steps=2**40, nanoseconds=2**40, grown=2**40, echo=2**62),
            wrong,
        ):
            self._send(lie)
        self._socket.send_multipart(pack(wrong, self._number + 1))
        self._socket.send_multipart(self._first)
        self._socket.send_multipart([b"SSD", self._random.randbytes(100)])
        self._socket.send_multipart([self._random.randbytes(8), self._random.randbytes(1000)])
        self._socket.send_multipart([pack(wrong, self._number)[0], b"\xc1" * 50])
        if self.told == 8:
            for _ in range(3000):  # more than are read in a second
                self._socket.send_multipart(pack(wrong, self._number))
        if self.told == 16:
            self._socket.send_multipart([b"", b"x" * 2**20])

    def _send(self, message: Message) -> None:
        self._socket.send_multipart(pack(message, self._number))


def test_a_lying_draft_costs_its_own_speculation_only(world: World, expected: list[list[int]]) -> None:
    receiver = world.engine.pids["draft"]
    liar = Liar(world)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while liar.told < 20:
            assert world.ids()[0] == expected
            assert time.monotonic() < deadline
    finally:
        liar.close()
    assert world.engine.pids["draft"] == receiver
    with world.draft():
        world.until_hits(expected)


def test_two_drafts_share_the_requests_and_one_that_leaves_takes_none_along(
    world: World, expected: list[list[int]]
) -> None:
    with world.draft():
        with world.draft(keys=world.other):
            world.until_hits(expected)
            liar = Liar(world)  # in the place of the first: it has the same key
            deadline = time.monotonic() + PATIENCE_S
            while liar.told < 8:
                assert world.ids()[0] == expected
                assert time.monotonic() < deadline
            liar.close()
            world.until_hits(expected)
        world.until_hits(expected)


def refusal(world: World, model: Path | None = None, keys: Path | None = None) -> str:
    """Why the engine takes no draft like the world's but for these, or the draft does not take the engine."""
    upstream, name = Upstream(draft_connect=world.bind, draft_keys=str(keys or world.edge)), str(model or world.model)
    with pytest.raises(UsageError) as raised:
        RemoteDrafter(EngineConfig(target=name, draft=name, upstream=upstream, draft_num_pages=128)).serve()
    return str(raised.value)


def test_a_draft_with_another_vocabulary_speaks_the_targets(
    world: World, expected: list[list[int]], tmp_path: Path
) -> None:
    sampled = world.ids("ar", 0.8)[0]
    with world.draft(tiny.renumbered(world.target, tmp_path / "model")):
        world.until_hits(expected)
        assert world.ids(temperature=0.8)[0] == sampled


def test_a_draft_that_does_not_fit_is_told_why(world: World, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(world.model, model)
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"] |= {"vocab": {f"word {n}": n + 3 for n in range(40)}, "merges": []}
    file.write_text(json.dumps(tokenizer))
    said = refusal(world, model)
    assert "model does not fit the target: they share 7.0% of the smaller vocabulary (3 of 43 tokens)" in said
    assert "at least 25% are needed; the draft has no '!', for one" in said
    file.unlink()
    tiny.edit(model, vocab_size=301)
    assert "vocabularies of 300 (target) and 301 (draft) tokens" in refusal(world, model)
    stranger = tmp_path / "stranger"
    keys.new_server(stranger)
    folder = keys.new_client(stranger, "edge")
    shutil.copy(world.edge / "server.pub", folder)
    assert "does not accept this client's key" in refusal(world, keys=folder)


def test_another_version_of_the_link_is_refused_with_both_versions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LINK_VERSION + 1
    monkeypatch.setattr(Offer, "version", other)
    monkeypatch.setattr("ssd.plugins.remote.link.RECEIVER_TO_DRAFT", RECEIVER_TO_DRAFT._replace(version=other))
    said = refusal(world)
    assert f"version {LINK_VERSION} of the link" in said and f"the draft {other}" in said
