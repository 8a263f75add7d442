"""Load on an engine whose tokens are known: throughput, latency, errors (docs/performance.md).

\b
    python -m tools.load                                   # a mock engine of its own, over ZeroMQ, all loads
    python -m tools.load short --max-num-seqs 128 --round-ms 100 --overload 10   # then ten times what it can do
    ssd launch --load-format mock --max-num-seqs 1024      # and, beside it:
    python -m tools.load --url http://127.0.0.1:8000       # the same over HTTP

Loads: `short` requests, 256 at a time, 4 tokens each; `streams`, 256 of 128 tokens; `open`, 1,024 streams of 128
tokens. Every id and every text is compared with what the mock's oracle says for its prompt and seed. With --overload a
load is followed by arrivals at so many times the rate that it reached, and by how much of that rate was left; give the
engine a round time and fewer places than the load has, so that it is not the cores that are short.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from ssd.bench.environment import environment
from ssd.client import Client
from ssd.config.engine import EngineConfig
from ssd.errors import SsdError
from ssd.frontend.tokenization import Tokenizer
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.plugins.mock.process import ROUND_VARIABLE
from tools.load.checking import Checker, Transport
from tools.load.driver import Driver
from tools.load.http import Http
from tools.load.report import figures, table
from tools.load.zeromq import ZeroMQ

_PROMPT_TOKENS = 8
_MOST_CONNECTIONS = 8192


class Load(NamedTuple):
    concurrency: int
    tokens: int


_LOADS = {"short": Load(256, 4), "streams": Load(256, 128), "open": Load(1024, 128)}


@click.command(help=__doc__)
@click.argument("loads", nargs=-1, type=click.Choice(list(_LOADS)))
@click.option("--address", help="use the running engine at this address")
@click.option("--url", help="use the running engine at this address, over HTTP")
@click.option("--target", default="smollm2", show_default=True, help="the engine's, for its tokenizer")
@click.option("--seconds", default=5.0, show_default=True, help="of each load")
@click.option("--connections", type=click.IntRange(1, 1024), default=16, show_default=True, help="over ZeroMQ")
@click.option("--stream/--no-stream", default=True, show_default=True, help="how HTTP answers")
@click.option("--round-ms", type=click.FloatRange(0), default=0.0, help="of an engine of its own; 0: as fast as it can")
@click.option("--max-num-seqs", type=click.IntRange(1, 1024), default=1024, show_default=True, help="of one of its own")
@click.option("--overload", type=click.FloatRange(1), help="how many times the rate reached")
@click.option("--json", "out", type=click.Path(path_type=Path), help="write every figure here")
def main(
    loads: tuple[str, ...],
    address: str | None,
    url: str | None,
    target: str,
    seconds: float,
    connections: int,
    stream: bool,
    round_ms: float,
    max_num_seqs: int,
    overload: float | None,
    out: Path | None,
) -> None:
    most = min(_MOST_CONNECTIONS, _raise_file_limit() // 2)
    try:
        config = resolve(EngineOptions(target=target, load_format="mock", max_num_seqs=max_num_seqs))
        checker = Checker(Tokenizer(Path(config.target)), config.vocab_size, config.max_model_len)
        with _engine(config, address, url, round_ms) as own:
            transport: Transport = Http(url, config.target_name, most, stream) if url else ZeroMQ(own, connections)
            rows = _measure(transport, checker, loads or tuple(_LOADS), seconds, overload)
            transport.close()
    except SsdError as error:
        raise click.ClickException(str(error)) from None
    Console(width=160).print(table(rows))
    if out is not None:
        out.write_text(json.dumps({"environment": environment(), "loads": rows}, indent=1))
    for row in rows:
        if row["errors"] or not row["completed"]:
            raise click.ClickException(f"{row['load']}: {row['completed']} right answers; {row['errors']}")


def _measure(
    transport: Transport, checker: Checker, loads: Sequence[str], seconds: float, overload: float | None
) -> list[dict[str, Any]]:
    """Return the figures of each load, and of `overload` times its rate."""
    rows = []
    for name in loads:
        driver = Driver(transport, checker, _PROMPT_TOKENS, _LOADS[name].tokens)
        rows.append(figures(name, driver.keep_open(_LOADS[name].concurrency, seconds)))
        peak = rows[-1]["request_throughput"]
        if overload and peak:
            rows.append(figures(f"{name} x {overload:g}", driver.arrive(overload * peak, seconds), peak))
    return rows


@contextmanager
def _engine(config: EngineConfig, address: str | None, url: str | None, round_ms: float) -> Iterator[str]:
    """Yield the address of the engine: one of its own unless an address is given."""
    if url or address:
        if address:
            Client(address).close()  # there is one, or this says so
        yield address or ""
        return
    os.environ[ROUND_VARIABLE] = str(round_ms)
    with Engine(config) as engine:
        yield engine.address


def _raise_file_limit() -> int:
    """Allow this process as many open files as the system does. Returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


if __name__ == "__main__":
    main()
