"""Kills drafts at failpoints beside a target that must not notice: `kills(10_000, seed=0)`.

The target runs in this process, with its real engine, sockets and board. The drafts are real processes; each is killed
with SIGKILL, at a failpoint or from outside. This module plays the frontend: it keeps requests open and compares their
answers with those of a target without a draft."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams, Speculation
from ssd.ipc import board, sockets
from ssd.ipc.messages import TARGET_TO_FRONTEND, Emission, Hello, Step, Submit
from ssd.ipc.process import Child, Start, memory_file
from ssd.ipc.public import Message
from ssd.ipc.run_directory import run_directory
from ssd.verifier.engine import TargetEngine
from ssd.verifier.loading import load
from ssd.verifier.process import Target
from ssd.verifier.proposer import Proposer
from ssd.verifier.verification import PlainVerification
from tools.soak import tiny
from tools.soak.nursery import Birth, Nursery

OUTSIDE = "outside"
# Where a draft dies, and how likely each time it comes by: most of them are after some rounds of work.
POINTS = {
    "draft.load": 1.0,
    "draft.hello": 1.0,
    "draft.read": 0.1,
    "draft.rejoin": 1.0,
    "draft.prefill": 0.5,
    "draft.step": 0.1,
    "draft.mid_write": 0.03,
    "draft.after_payload": 0.03,
    "draft.after_commit": 0.03,
    OUTSIDE: 0.0,
}
_OPEN, _REQUESTS, _TOKENS = 4, 16, 40
# A draft that has not come by its failpoint after so many steps of the target is killed where it is.
_TURNS, _TURNS_OUTSIDE = 300, 40
_PATIENCE_S = 60.0
# A round of the target waits for so many steps of the draft, so long at most; where none follows, it just waits.
_STEPS, _PACE_S, _IDLE_S = 2, 0.02, 0.005


def kills(count: int, seed: int) -> dict[str, Any]:
    """Kill `count` drafts. Return what became of the requests meanwhile, and what is left behind."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    files, shared = _descriptors(), _shared_memory()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _engine(Path(folder)) as (target, frontend, nursery, start):
        pages = target.engine.pool.available
        report = _Run(target, frontend, nursery, start, random.Random(seed)).run(count)
        report["pages_left"] = pages - target.engine.pool.available
        del target
    gc.collect()
    report["descriptors_left"] = _settled(files)
    report["shared_memory_left"] = sorted(_shared_memory() - shared)
    return report | {"seconds": round(time.monotonic() - began, 1)}


class _Target(Target):
    """A target whose next message to the draft may be lost; it is told so."""

    loses = False

    def _to_draft(self, message: Message) -> bool:
        if self.loses:
            self.loses = False
            return False
        return super()._to_draft(message)


@contextmanager
def _engine(folder: Path) -> Iterator[tuple[_Target, _Frontend, Nursery, Start]]:
    """Yield everything but a draft."""
    target_folder, draft_folder = tiny.pair(folder)
    config = EngineConfig(
        target=str(target_folder),
        draft=str(draft_folder),
        speculation=Speculation("ssd", 4, (3,), "jit"),
        max_model_len=tiny.CONTEXT // 2,
        page_size=4,
        num_pages=200,
        draft_num_pages=400,
        vocab_size=tiny.VOCABULARY,
        deterministic=True,
        failpoints=True,
    )
    dead, alive = os.pipe()
    shared = memory_file("board", board.size_bytes(config.max_num_seqs))
    with run_directory() as directory:
        start = Start("target", 0, str(directory), config, (), dead, shared)
        nursery, child = Nursery((dead, shared)), Child(start)
        loaded = load(config)
        frontend = _Frontend(child, TargetEngine(config, PlainVerification(loaded[0]), Proposer()))
        try:
            yield (
                _Target(child, sockets.router(child.context, child.address(sockets.ENGINE)), loaded),
                frontend,
                nursery,
                start,
            )
        finally:
            os.close(alive)
            nursery.close()
            child.context.destroy(linger=0)
            for descriptor in (dead, shared):
                os.close(descriptor)


@dataclass
class _Frontend:
    """Keeps requests open and checks their answers; `plain` is an engine without a draft, which is right."""

    child: Child
    plain: TargetEngine
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._socket = sockets.dealer(self.child.context, self.child.address(sockets.ENGINE), b"frontend-1")
        sockets.send(self._socket, Hello("frontend"))
        self._asked = [_request(index) for index in range(_REQUESTS)]
        self._expected = [self._plainly(*asked) for asked in self._asked]
        self.open: dict[int, list[int]] = {}

    def _plainly(self, prompt: list[int], params: SamplingParams) -> list[int]:
        self.plain.submit(Submit(0, prompt, params))
        ids: list[int] = []
        while self.plain.busy:
            for emission in self.plain.step():
                ids += emission.token_ids
        return ids

    def ask(self) -> None:
        """Open another request."""
        number = self.counts["requests"]
        self.counts["requests"] += 1
        self.open[number] = []
        prompt, params = self._asked[number % _REQUESTS]
        sockets.send(self._socket, Submit(number, prompt, params))

    def read(self) -> None:
        while (received := sockets.receive(self._socket, TARGET_TO_FRONTEND)) is not None:
            if isinstance(received[2], Step):
                for emission in received[2].emissions:
                    self._take(emission)

    def _take(self, emission: Emission) -> None:
        ids = self.open.get(emission.request)
        if ids is None:
            self.counts["duplicated"] += 1
            return
        ids += emission.token_ids
        if emission.finish_reason is None:
            return
        del self.open[emission.request]
        self.counts["tokens"] += len(ids)
        self.counts["failed"] += emission.finish_reason == "error"
        self.counts["altered"] += ids != self._expected[emission.request % _REQUESTS]
        if emission.metrics is not None:
            self.counts["accepted"] += emission.metrics.accepted_tokens
            self.counts["hits"] += emission.metrics.hits


def _request(index: int) -> tuple[list[int], SamplingParams]:
    """Return a request; lengths differ, and every other one is sampled."""
    dice = random.Random(index)
    prompt = [dice.randrange(tiny.VOCABULARY) for _ in range(dice.randint(2, 40))]
    temperature = 0.8 * (index % 2)
    return prompt, SamplingParams(temperature=temperature, seed=index, max_tokens=dice.randint(8, _TOKENS))


class _Run:
    """Runs drafts one after the other until enough have died."""

    def __init__(
        self, target: _Target, frontend: _Frontend, nursery: Nursery, start: Start, dice: random.Random
    ) -> None:
        self._target, self._frontend, self._nursery, self._start = target, frontend, nursery, start
        self._dice, self._points = dice, list[str]()
        self._deaths = Counter[str](dict.fromkeys(POINTS, 0))
        self._epoch = self._crashed = 0
        config = start.config
        self._board = board.BoardReader(start.board_fd, config.max_num_seqs, config.vocab_size)

    def run(self, count: int) -> dict[str, Any]:
        self._turn()
        while self._deaths.total() < count:
            self._live_and_die()
        deadline = time.monotonic() + _PATIENCE_S
        while self._frontend.open and time.monotonic() < deadline:
            self._turn(ask=False)
        counts = self._frontend.counts
        return {
            "kills": self._deaths.total(),
            "deaths": dict(self._deaths),
            "crashed": self._crashed,
            "lost": len(self._frontend.open),
            **{name: counts[name] for name in ("duplicated", "altered", "failed", "requests", "tokens")},
            **{name: counts[name] for name in ("accepted", "hits")},
        }

    def _turn(self, ask: bool = True) -> None:
        while ask and len(self._frontend.open) < _OPEN:
            self._frontend.ask()
        self._target.turn()
        self._frontend.read()
        self._give_time()

    def _give_time(self) -> None:
        """Wait a moment for a working draft: a target this small is faster than a draft on the same core."""
        state = self._target.engine.proposer.state
        if state in ("down", "open"):
            time.sleep(_IDLE_S)
            return
        steps, deadline = self._board.telemetry().steps, time.monotonic() + _PACE_S
        while time.monotonic() < deadline and self._board.telemetry().steps < steps + _STEPS:
            time.sleep(2e-4)

    def _live_and_die(self) -> None:
        """Run one draft until it dies. The next points are random, but all come equally often."""
        if not self._points:
            self._points = self._dice.sample(list(POINTS), len(POINTS))
        point = self._points.pop()
        armed = "" if point == OUTSIDE else f"{point}=kill@{POINTS[point]}"
        self._epoch += 1
        start = replace(self._start, role="draft", epoch=self._epoch)
        pid = self._nursery.bear(Birth(start, armed))
        end = self._dice.randrange(_TURNS_OUTSIDE) if point == OUTSIDE else _TURNS
        for turn in range(end):
            if point == "draft.rejoin" and turn > 0 and self._target.engine.proposer.state == "up":
                self._target.loses = True
            self._turn()
            if (code := self._nursery.ended()) is not None:
                break
        else:
            point = OUTSIDE
            os.kill(pid, signal.SIGKILL)
            code = self._nursery.ended(wait=True)
        if code == -signal.SIGKILL:
            self._deaths[point] += 1
        else:
            self._crashed += 1


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _settled(wanted: int) -> int:
    """Return how many descriptors too many are open; ZeroMQ's threads close theirs a moment later."""
    deadline = time.monotonic() + 5
    while (left := _descriptors() - wanted) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
