"""What a running engine publishes, and that it does nothing while nobody listens; with the mock engine."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.ipc import sockets
from ssd.ipc.messages import EndEvent, RoundEvent
from ssd.ipc.run_directory import run_directory
from ssd.ipc.running import running_engines
from ssd.ipc.trace_ring import Mark, State
from ssd.launch.supervisor import Engine
from ssd.monitor.messages import Snapshot
from tests.faults.engine import running_engine
from tests.mock import ROUND_VARIABLE
from tests.monitor.watcher import Watcher
from tests.scripted_engine import PATIENCE_S

pytestmark = pytest.mark.mock

Watch = Callable[[Engine], Watcher]
PARAMS = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)


@contextmanager
def quick_engine() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROUND_VARIABLE, "2")
        with running_engine(load_format="mock") as engine:
            yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with quick_engine() as engine:
        yield engine


@pytest.fixture
def fresh() -> Iterator[Engine]:
    """For who counts from the beginning, or kills."""
    with quick_engine() as engine:
        yield engine


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Watchers of an engine. All are closed, whatever a test finds: one that is not holds up another test's end."""
    with ExitStack() as watchers:
        yield lambda engine: watchers.enter_context(closing(Watcher(engine)))


def wait_until_nobody_watches(engine: Engine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while engine._supervisor.publisher.watched:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until(watcher: Watcher, enough: Callable[[list[Snapshot]], bool]) -> list[Snapshot]:
    """Snapshots until there are enough of them."""
    deadline, found = time.monotonic() + PATIENCE_S, list[Snapshot]()
    while not enough(found):
        assert time.monotonic() < deadline, found[-1:]
        snapshot = watcher.receive(0.1)
        if snapshot is not None:
            found.append(snapshot)
    return found


def records(snapshots: list[Snapshot], role: str = "target") -> list[list[int]]:
    """New records of a trace, as a watcher reads them."""
    found: list[list[int]] = []
    for snapshot in snapshots:
        for trace in snapshot.traces:
            if trace.role == role:
                found += np.frombuffer(trace.records, np.int64).reshape(-1, 4).tolist()
    return found


def states_of(snapshots: list[Snapshot]) -> list[int]:
    return [code for _, _, code, _ in records(snapshots)]


def rounds(snapshots: list[Snapshot]) -> list[RoundEvent]:
    return [round for snapshot in snapshots for report in snapshot.reports for round in report.rounds]


def ended(snapshots: list[Snapshot]) -> list[EndEvent]:
    return [end for snapshot in snapshots for report in snapshot.reports for end in report.ended]


def test_a_watcher_hears_of_every_round_and_every_end(engine: Engine, watch: Watch) -> None:
    watcher = watch(engine)
    seen = until(watcher, lambda found: any(snapshot.reports for snapshot in found))
    with Client(engine.address) as client:
        (completion,) = client.generate([[1, 2, 3]], PARAMS)
    seen += until(watcher, lambda found: bool(ended(found)))
    (end,), told = ended(seen), rounds(seen)
    assert (end.prompt_tokens, end.completion_tokens, end.reason) == (3, 40, "length")
    assert end.metrics == completion.metrics
    assert sum(round.tokens for round in told) == 40
    assert [round.first for round in told] == [True] + [False] * (len(told) - 1)
    assert sum(round.accepted for round in told) == completion.metrics.accepted_tokens
    assert sum(round.cache == "hit" for round in told) == completion.metrics.hits


def test_the_lane_says_what_the_target_did(fresh: Engine, watch: Watch) -> None:
    with Client(fresh.address) as client:
        (completion,) = client.generate([[1, 2, 3]], PARAMS)
    watcher = watch(fresh)
    # The answer is on its way before the target is idle again.
    seen = until(watcher, lambda found: states_of(found)[-1:] == [State.IDLE])
    states = states_of(seen)
    assert states.count(State.VERIFY) == completion.metrics.rounds + 1
    assert states.count(Mark.HIT) == completion.metrics.hits
    assert states[0] == State.LOADING and states[-1] == State.IDLE


def test_the_past_is_told_to_each_who_comes(engine: Engine, watch: Watch) -> None:
    first = watch(engine)
    until(first, lambda found: len(found) > 2)
    second = watch(engine)
    past = until(second, lambda found: any(snapshot.whole for snapshot in found))
    assert records(past)[0][0] == 0
    first.close()
    assert until(second, lambda found: len(found) > 5)


def test_processes_are_told_with_their_state(fresh: Engine, watch: Watch) -> None:
    watcher = watch(fresh)
    (seen, *_) = until(watcher, bool)
    found = {process.role: process for process in seen.processes}
    assert {role: process.pid for role, process in found.items()} == {"supervisor": os.getpid(), **fresh.pids}
    assert all(process.state == "up" and process.rss_bytes > 2**20 for process in found.values())
    killed = found["target"].pid
    os.kill(killed, signal.SIGKILL)

    def is_back(after: list[Snapshot]) -> bool:
        """The next one is up. Between two snapshots it may have been down unseen; the lane has it all the same."""
        seen = [process for process in after[-1].processes if process.role == "target"] if after else []
        return any(p.state == "up" and p.pid != killed for p in seen) and State.LOADING in states_of(after)

    told = states_of(until(watcher, is_back))
    assert told.index(State.DOWN) < told.index(State.LOADING)


def test_a_stopped_process_shows_no_sign_of_life(engine: Engine, watch: Watch) -> None:
    watcher = watch(engine)
    os.kill(engine.pids["frontend"], signal.SIGSTOP)
    try:
        until(watcher, lambda found: any(p.role == "frontend" and p.beat_age > 0.3 for s in found for p in s.processes))
    finally:
        os.kill(engine.pids["frontend"], signal.SIGCONT)


def test_nothing_is_read_or_told_while_nobody_watches(engine: Engine, watch: Watch) -> None:
    wait_until_nobody_watches(engine)
    watcher = watch(engine)
    until(watcher, lambda found: any(snapshot.reports for snapshot in found))
    assert engine._supervisor.publisher.watched
    watcher.close()
    wait_until_nobody_watches(engine)
    # The frontend's leave to report ends by itself; then someone comes, and it reports once more.
    again = watch(engine)
    until(again, lambda found: any(snapshot.reports for snapshot in found))


def test_an_engine_that_takes_no_connections_is_not_waited_for() -> None:
    with run_directory() as directory, ExitStack() as held:
        listening, *full = [held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        listening.bind(str(directory / sockets.TELEMETRY))
        listening.listen(0)
        with pytest.raises(BlockingIOError):
            for connection in full:
                connection.setblocking(False)
                connection.connect(str(directory / sockets.TELEMETRY))
        assert f"ipc://{directory}/{sockets.CLIENT}" not in [engine.address for engine in running_engines()]


def test_running_engines_are_found(fresh: Engine) -> None:
    def addresses() -> list[str]:
        return [engine.address for engine in running_engines()]

    assert fresh.address in addresses()
    fresh.stop(drain=0)
    assert fresh.address not in addresses()
