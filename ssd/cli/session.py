"""Shared parts of commands that run an engine: signals, logs, progress, streamed text."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from msgspec.structs import replace

from ssd.client import Client, Completion
from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams
from ssd.errors import UsageError
from ssd.ipc.messages import Loading
from ssd.ipc.process import log_level
from ssd.ipc.public import ChatMessage, Description, Metrics, printable
from ssd.kernels import build
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.llm import running
from ssd.models.checkpoint import has_chat_template

_LAST_WORDS_S = 1.0  # longest wait for the last log lines of an engine that has ended


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, which unwinds like Ctrl-C."""

    exit_code = 143


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


class _Log:
    """Writes log lines of this process and its engine to stderr; they wait while an answer is shown."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[str] | None = None

    def write(self, text: str) -> None:
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(text)
                return
            with suppress(OSError, ValueError):
                sys.stderr.write(text)
                sys.stderr.flush()

    def flush(self) -> None:
        """Do nothing: every line is flushed."""

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._waiting = []
        try:
            yield
        finally:
            with self._lock:
                lines, self._waiting = self._waiting, None
                self.write("".join(lines))

    @contextmanager
    def engine(self) -> Iterator[int]:
        """Yield a descriptor, whose lines are written here until the block ends."""
        read, write = os.pipe()

        def copy() -> None:
            with open(read, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    self.write(line)

        copying = threading.Thread(target=copy, daemon=True)
        copying.start()
        try:
            yield write
        finally:
            os.close(write)
            copying.join(_LAST_WORDS_S)


LOG = _Log()


@contextmanager
def process_setup() -> Iterator[None]:
    """Log to stderr and raise SIGTERM as an exception, for as long as the block lasts."""
    handler = logging.StreamHandler(LOG)
    handler.setFormatter(logging.Formatter("ssd: %(message)s"))
    log = logging.getLogger("ssd")
    log.setLevel(log_level())
    log.addHandler(handler)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        log.removeHandler(handler)


@contextmanager
def session(config: EngineConfig, quiet: bool = False) -> Iterator[Client]:
    """Run an engine, and yield a client of it. Raises the cause if the engine dies."""
    with LOG.engine() as stderr, running(config, nullcontext if quiet else loading, stderr) as (_, client):
        yield client


def connect(
    address: str | None, keys: Path | None, engine: EngineOptions, quiet: bool = False, chat: bool = False
) -> AbstractContextManager[Client]:
    """Return a client of the running engine at `address`, or of a new engine.

    Raises UsageError, before anything loads, if a new engine's model has no format for a `chat`."""
    if address is not None:
        return Client(address, keys=keys)
    if keys is not None:
        raise UsageError("--keys is for the running engine of --address")
    config = resolve(engine)
    if chat and not has_chat_template(Path(config.target)):
        raise UsageError(no_chat(config.target_name))
    return session(config, quiet)


def no_chat(model: str) -> str:
    return f"{printable(model)} has no chat format; use ssd generate --raw"


def speculating(params: SamplingParams, served: Description, changes: dict[str, Any]) -> SamplingParams:
    return replace(params, speculation=replace(served.speculation, **changes)) if changes else params


def summary(tokens: int, metrics: Metrics, note: str = "") -> str:
    parts = [f"{tokens} tokens", f"{metrics.tokens_per_second:.1f} tok/s", metrics.mode]
    if metrics.rounds and metrics.mode != "ar":
        parts.append(f"acceptance length {metrics.mean_acceptance_length:.2f}")
    if metrics.hits + metrics.misses:
        parts.append(f"hit rate {metrics.hit_rate:.0%}")
    parts += [f"verify {metrics.verify_ms:.1f} ms", f"wait {metrics.draft_wait_ms:.1f} ms"]
    parts.append(f"overhead {metrics.round_overhead_ms:.2f} ms")
    return ", ".join(parts) + note + (f"\n{metrics.plan}" if metrics.plan else "")


def loading(engine: Engine) -> AbstractContextManager[Any]:
    return starting(f"loading {engine.config.target_name}", lambda: engine.loading)


def starting(text: str, read: Callable[[], Loading] = lambda: Loading(0, 0)) -> AbstractContextManager[Any]:
    """Show what is compiled, then `text` and how much is `read`, on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table

    sign = Spinner("dots", style="status.spinner")

    def line() -> Table:
        row, made, got = Table.grid(padding=(0, 1)), build.compilation, read()
        done, total = (made.done, made.total) if made.total else (got.done, got.total)
        bar = (ProgressBar(total, done, width=30), f"{done / total:.0%}") if total else ()
        row.add_row(sign, "compiling kernels, once" if made.total else text, *bar)
        return row

    return Live(get_renderable=line, console=Console(stderr=True), refresh_per_second=10, transient=True)


def show(client: Client, prompt: str, params: SamplingParams, chat: bool) -> Completion:
    completion = None
    with LOG.held():
        for chunk in client.stream([ChatMessage("user", prompt)] if chat else prompt, params):
            click.echo(chunk.text, nl=False)
            completion = chunk.completion
        click.echo()
    assert completion is not None, "a stream ends with its completion, or raises"
    return completion
