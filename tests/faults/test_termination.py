"""SIGTERM while an engine serves, drains or starts: open streams end, the exit status is right, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError
from tests.cli.launched import command, running
from tests.faults.engine import gone
from tests.scripted_engine import PATIENCE_S
from tools.soak.processes import roles

STREAMS = 6
# Sends itself Ctrl-C as the given module is looked for. It must itself import nothing that `ssd` imports.
INTERRUPTED = """
import _signal, os, sys
wanted, *sys.argv[1:] = sys.argv[1:]
class Finder:
    def find_spec(name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), _signal.SIGINT)
sys.meta_path.insert(0, Finder)
from ssd.cli.main import main
main()
"""
LONG = SamplingParams(seed=1, max_tokens=2000, ignore_eos=True)


def streams(address: str, ends: list[str]) -> list[threading.Thread]:
    """Threads that each read a long stream, all of which have begun; how each ended comes into `ends`."""
    begun = threading.Barrier(STREAMS + 1)

    def read(number: int) -> None:
        with Client(address) as client:
            chunks = client.stream([number + 1], LONG)
            next(chunks)
            begun.wait(PATIENCE_S)
            try:
                *_, last = chunks
                assert last.completion is not None
                ends.append(last.completion.finish_reason)
            except EngineDeadError:
                ends.append("dead")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(PATIENCE_S)
    return threads


@pytest.mark.parametrize("second", [False, True], ids=["one signal", "a second one, which does not wait"])
def test_what_a_drain_does_not_finish_ends_with_what_it_has(second: bool) -> None:
    """By an engine under load that drains for a second. After a second signal everyone is told, or sees the connection
    break."""
    with running("--no-http", "--shutdown-timeout", "1") as (process, said):
        ends: list[str] = []
        threads, pids = streams(said["ready"], ends), roles(process.pid)
        process.send_signal(signal.SIGTERM)
        if second:
            assert process.stderr is not None and process.stderr.readline() == "draining\n"
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == (143 if second else 0)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(ends) == STREAMS and (second or {*ends} == {"abort"})
        assert all(gone(pid) for pid in pids.values())
        assert second or not Path(said["ready"].removeprefix("ipc://")).parent.exists()


def test_a_command_whose_engine_dies_has_failed() -> None:
    with running("--no-http") as (process, _):
        while process.poll() is None:
            if (target := roles(process.pid).get("target")) is not None:
                os.kill(target, signal.SIGKILL)
            time.sleep(0.05)
        assert process.stderr is not None
        assert process.returncode == 1
        assert "error: the target process ended: killed by SIGKILL; it dies again and again" in process.stderr.read()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(number: signal.Signals, status: int) -> None:
    for wanted in (1, 2):
        with subprocess.Popen(command("--no-http"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            deadline = time.monotonic() + PATIENCE_S
            while len(pids := roles(process.pid)) < wanted:
                assert time.monotonic() < deadline
            process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == status
            assert b"Traceback" not in errors
            assert all(gone(pid) for pid in pids.values())


@pytest.mark.parametrize("module", ["typing", "enum", "click.core", "ssd.cli.launch", "ssd.launch.supervisor"])
def test_an_interrupt_of_an_import_ends_the_program_without_a_word(module: str) -> None:
    """An exception there would have a traceback, and Python drops it where a reference to a module's lock ends."""
    program = (sys.executable, "-S", "-c", INTERRUPTED)  # `site` may import `enum` and more before us
    command = [*program, module, "launch", "--no-http"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
