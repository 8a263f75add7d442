"""A real engine whose draft is on another machine: the link is a TCP proxy in a thread, which tests may make worse."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from ssd.client import Client
from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.config.params import SamplingParams, Speculation
from ssd.ipc import keys
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from ssd.system.interpreter import child_command, environment
from tests.models import tiny
from tests.scripted_engine import PATIENCE_S
from tools.link import Behaviour, Link

# A verification that a round trip of 20 ms fits into: then there is something to hit.
TIMES = DeviceTimes(verify=ForwardTime(0.04), depth=ForwardTime(0.0))
PROMPTS = [tiny.token_ids(n, n) for n in (4, 9, 22, 13)]
SPECULATION = Speculation("ssd", 3, (3,), "none")
TOKENS = 16


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class LinkThread:
    """A `tools.link` proxy in front of `port`; `address` is where to connect."""

    def __init__(self, port: int) -> None:
        own = free_port()
        self.address, self.behaviour = f"tcp://127.0.0.1:{own}", Behaviour()
        self._link = Link(("127.0.0.1", own), ("127.0.0.1", port), self.behaviour)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._link.run())
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    def stall(self, seconds: float) -> None:
        self._loop.call_soon_threadsafe(self._link.stall, seconds)

    def reset(self) -> None:
        self._loop.call_soon_threadsafe(self._link.reset)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)


class World:
    """An engine with a link, the models' folders, and keys for the drafts `edge` and `other`, if it wants keys."""

    def __init__(self, folder: Path, secured: bool = True) -> None:
        self.target = tiny.tokenizer(tiny.llama(folder / "target", seed=3, vocab_size=300))
        self.model = tiny.noisy_copy(self.target, folder / "draft", noise=0.02)
        (self.model / "tokenizer.json").write_bytes((self.target / "tokenizer.json").read_bytes())
        self.keys = folder / "keys"
        keys.new_server(self.keys)
        self.edge, self.other = keys.new_client(self.keys, "edge"), keys.new_client(self.keys, "other")
        port = free_port()
        self.bind = f"tcp://127.0.0.1:{port}"
        options = EngineOptions(target=str(self.target), mode="ssd", max_num_seqs=4)
        self._secured = secured
        server = ServerOptions(http=False, draft_bind=self.bind, draft_keys=str(self.keys) if secured else None)
        self.config = replace(resolve(options, server), emulate=TIMES)
        self.link = LinkThread(port)

    @contextmanager
    def running(self) -> Iterator[None]:
        with Engine(self.config) as self.engine, Client(self.engine.address) as self.client:
            yield
        self.link.close()

    @contextmanager
    def draft(self, model: Path | None = None, keys: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """A draft that has joined."""
        with self.started(model, keys) as process:
            joined(process)
            yield process

    @contextmanager
    def started(self, model: Path | None = None, keys: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """A draft that may still load."""
        command = child_command("ssd.cli.main", "draft", "--connect", self.link.address)
        if self._secured:
            command += ["--keys", str(keys or self.edge)]
        process = subprocess.Popen(
            [*command, "--model", str(model or self.model)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment() | {"OMP_NUM_THREADS": "1"},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def ids(self, mode: str = "ssd", temperature: float = 0.0) -> tuple[list[list[int]], int]:
        """The ids of every prompt, and how many rounds hit the cache. No answer is known from the time before."""
        speculation = SPECULATION if mode == "ssd" else Speculation("ar")
        params = [
            SamplingParams(
                temperature=temperature,
                seed=index,
                max_tokens=TOKENS,
                ignore_eos=True,
                speculation=speculation,
                store=False,
            )
            for index in range(len(PROMPTS))
        ]
        found = self.client.generate(PROMPTS, params)
        return [completion.token_ids for completion in found], sum(completion.metrics.hits for completion in found)

    def until_hits(self, expected: list[list[int]]) -> None:
        """Ask until the draft is of use again; ids must be the `expected` ones all the time."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ids, hits = self.ids()
            assert ids == expected
            if hits:
                return
            assert time.monotonic() < deadline, "the draft does not come back"


def joined(process: subprocess.Popen[str]) -> None:
    """Wait until a draft says that an engine takes it."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    assert readable and process.stdout.readline().startswith("drafting for ")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
