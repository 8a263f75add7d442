"""What commands that run an engine share: signals, logs, a sign of life, the cause of a death, text as it comes."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from msgspec.structs import replace

from ssd.client import Client, Completion
from ssd.config import EngineConfig
from ssd.errors import EngineDeadError, UsageError
from ssd.ipc.messages import ChatMessage, Description, Metrics
from ssd.ipc.process import log_level
from ssd.launch_config import EngineOptions, resolve
from ssd.llm import cause, running
from ssd.params import SamplingParams
from ssd.supervisor import Engine


class Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds like Ctrl-C."""

    exit_code = 143


@contextmanager
def process_setup() -> Iterator[None]:
    """Logs to stderr and SIGTERM as an exception, for as long as a command runs."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    handler = logging.StreamHandler(sys.stderr)
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
    """A client of an engine that lives as long as the block. When the engine dies in it, its cause is raised. Unless
    `quiet`, a terminal sees it load."""
    with ExitStack() as stack:
        engine, client = stack.enter_context(running(config, nullcontext if quiet else loading))
        try:
            yield client
        except EngineDeadError as error:
            raise cause(engine, error) from None


def connect(
    address: str | None, keys: Path | None, engine: EngineOptions, quiet: bool = False
) -> AbstractContextManager[Client]:
    """A client of the running engine at `address`, with the keys in a folder if it wants some, or of one of its own."""
    if address is not None:
        return Client(address, keys=keys)
    if keys is not None:
        raise UsageError("--keys is for the running engine of --address")
    return session(resolve(engine), quiet)


def speculating(params: SamplingParams, served: Description, changes: dict[str, Any]) -> SamplingParams:
    """`params` for a running engine that speculates as `served`, but for the `changes` to that."""
    return replace(params, speculation=replace(served.speculation, **changes)) if changes else params


def summary(tokens: int, metrics: Metrics) -> str:
    """What `tokens` tokens took, in a line."""
    parts = [f"{tokens} tokens", f"{metrics.tokens_per_second:.1f} tok/s", metrics.mode]
    if metrics.mode != "ar":
        parts.append(f"acceptance length {metrics.mean_acceptance_length:.2f}")
    if metrics.mode == "ssd":
        parts.append(f"hit rate {metrics.hit_rate:.0%}")
    parts += [f"verify {metrics.verify_ms:.1f} ms", f"wait {metrics.draft_wait_ms:.1f} ms"]
    return ", ".join([*parts, f"overhead {metrics.round_overhead_ms:.2f} ms"])


def spinner(text: str) -> AbstractContextManager[Any]:
    """A sign of life on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def loading(engine: Engine) -> AbstractContextManager[Any]:
    """How far the weights are, on stderr, while the block lasts; on a terminal only."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table

    sign = Spinner("dots", style="status.spinner")

    def line() -> Table:
        row, read = Table.grid(padding=(0, 1)), engine.loading
        bar = (ProgressBar(read.total, read.done, width=30), f"{read.done / read.total:.0%}") if read.total else ()
        row.add_row(sign, f"loading {engine.config.target_name}", *bar)
        return row

    return Live(get_renderable=line, console=Console(stderr=True), refresh_per_second=10, transient=True)


def show(client: Client, prompt: str, params: SamplingParams, chat: bool) -> Completion:
    """Complete `prompt` with its text on stdout as it comes."""
    if chat:
        chunks = client.stream(params=params, messages=[ChatMessage("user", prompt)])
    else:
        chunks = client.stream(prompt, params)
    completion = None
    for chunk in chunks:
        click.echo(chunk.text, nl=False)
        completion = chunk.completion
    click.echo()
    assert completion is not None, "a stream ends with its completion, or raises"
    return completion
