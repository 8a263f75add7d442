"""The loops of target and draft, with a socket between them, on GPUs that are made of memory of the host."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from ssd.config.params import SamplingParams, Speculation
from ssd.draft.process import _Draft
from ssd.ipc import board, sockets
from ssd.ipc.board import BoardWriter
from ssd.ipc.layouts import draft_probs_layout
from ssd.ipc.messages import Hello, Ready, Submit
from ssd.ipc.process import HEARTBEAT_BYTES, Child, Start, memory_file
from ssd.ipc.public import Metrics
from ssd.verifier.process import Target
from tests.draft.audit import World
from tests.draft.pair import VOCABULARY, config
from tests.frontend_dealer import Frontend
from tests.ipc.driver import Driver, installed

RATIO = Speculation("ssd", 2, (2,), backup="none", sampler="rejection")  # in one process nobody can wait
CONFIG = config(RATIO, device="cuda:0", draft_device="cuda:0", max_num_seqs=2)


@dataclass
class Loops:
    target: Target
    draft: _Draft
    frontend: Frontend

    def ask(self, request: int, tokens: int = 24) -> Metrics:
        """Both by turns, until a request has ended."""
        params = SamplingParams(temperature=0.9, seed=request, max_tokens=tokens, ignore_eos=True, speculation=RATIO)
        self.frontend.send(Submit(request, [1, 2, request], params))
        while True:
            self.target.turn()
            self.draft._socket.poll(20)
            self.draft._board.tick()
            self.draft._read()
            for _ in range(3):
                self.draft._engine.step()
            while self.frontend.socket.poll(0):
                for emission in self.frontend.step().emissions:
                    if emission.metrics is not None and emission.finish_reason is not None:
                        return emission.metrics


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return installed(monkeypatch)


@pytest.fixture
def loops(world: World, driver: Driver) -> Iterator[Loops]:
    with ExitStack() as held:
        directory = tempfile.mkdtemp(prefix="ssd-test-", dir="/tmp")
        held.callback(shutil.rmtree, directory)
        sizes = {
            "board_fd": board.size_bytes(2),
            "draft_probs_fd": draft_probs_layout(2, RATIO, VOCABULARY).size_bytes,
            "heartbeat_fd": HEARTBEAT_BYTES,
        }
        shared = {name: memory_file(name, size) for name, size in sizes.items()}
        for descriptor in shared.values():
            held.callback(os.close, descriptor)
        children = [Child(Start(role, 1, directory, CONFIG, (), -1, **shared)) for role in ("target", "draft")]
        for child in children:
            held.callback(child.context.destroy, linger=0)
        address = children[0].address(sockets.ENGINE)
        router = sockets.router(children[0].context, address)
        target = Target(children[0], router, (world.target, frozenset()))
        dealer = sockets.dealer(children[1].context, address, b"draft-1")
        draft = _Draft(children[1], dealer, [world.draft], BoardWriter(shared["board_fd"], 2))
        frontend = Frontend(address)
        held.callback(frontend.context.destroy, linger=0)
        frontend.send(Hello("frontend"))
        while not frontend.socket.poll(0):
            target.turn()
        assert frontend.receive() == Ready()
        yield Loops(target, draft, frontend)


def drafted(loops: Loops) -> int:
    """Draft tokens that were verified, in a few requests: as long as messages are on their way there are none."""
    total = 0
    for request in range(40):
        total += loops.ask(request).drafted_tokens
        if total > 20:
            break
    return total


def joined(loops: Loops) -> None:
    """The draft says hello, and hears of requests from the next one on."""
    loops.draft._hello()
    loops.ask(100, 4)


def test_draft_probs_flow_through_memory_that_the_target_exports(loops: Loops, driver: Driver) -> None:
    joined(loops)
    assert drafted(loops) > 20
    assert sum(driver.opened.values()) == 1
    arena = loops.target._arenas.arenas["draft_probs"]
    assert arena is not None and arena._rows.any() and not arena._host.data.any()


def test_a_draft_that_cannot_open_it_is_of_use_all_the_same(loops: Loops, driver: Driver) -> None:
    driver.fails["cuIpcOpenMemHandle_v2"] = 101
    joined(loops)
    assert drafted(loops) > 20
    assert not driver.opened and loops.target._arenas.handles == []
    arena = loops.target._arenas.arenas["draft_probs"]
    assert arena is not None and arena._host.data.any()


def test_an_older_draft_takes_nothing_back(loops: Loops, driver: Driver) -> None:
    joined(loops)
    loops.target._draft_epoch = 2
    loops.draft._hello(imports=False)
    loops.ask(9)
    assert loops.target._arenas.handles
