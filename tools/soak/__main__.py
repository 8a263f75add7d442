"""Load on a real engine whose draft is killed again and again: is any answer lost, doubled or altered?

\b
    python -m tools.soak --minutes 30                 # (docs/reliability.md)
    python -m tools.soak --kills 10000                # draft deaths at random failpoints, tiny models
    python -m tools.soak --attacks --minutes 60       # attacks, and deaths of any process; --mock: without a model
    python -m tools.soak --starts 40                  # deaths of every process while an engine starts
    python -m tools.soak --growth --minutes 60        # memory of every process; --mode auto

The built-in pair in mode ssd answers chats of mixed lengths, half of them sampled, so many at a time: first undisturbed
in mode ar, whose answers are the reference, then undisturbed in ssd, then for --minutes while drafts are killed, some
clients cut their connection in the middle of a stream and some abort. Every answer is compared with the reference;
what a client has of an answer that it gave up must be its beginning.

lost: no end came within two minutes; doubled: two ends, or tokens twice; altered: anything else that is not as in ar.
itl is the time between tokens as the client sees it: since the chunk before, divided by the tokens of the chunk.

With --attacks, the attacks of tests/attacks run beside the load, one after the other in any order. Any process but the
supervisor is killed or stopped. Now and then all cores are busy. Now and then the disk of the run folder and the cache
is full: 64 MiB of memory, where root may mount them. Clients may be told to try again. hung: no end came within two
minutes; lost: none came at all; broken: an attacker was told of a bug (500).

With --growth, mixed load on the default engine, in rounds. Between them the private memory of every process is read.
The slope is that of the time after --warm-up. A process that grows by more than --most-growth MiB an hour fails it, and
a draft that takes more than --most-draft MiB over its start.

Exit status 1 when an answer is lost, hung, doubled, altered or an error, or an attacker is told of a bug.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console

from ssd.config.engine import EngineConfig
from ssd.config.params import Speculation
from ssd.errors import EngineDeadError, SsdError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.plugins.bench.environment import environment
from tools.soak.asking import Fates, pool, shuffled
from tools.soak.attacked import AttackedSoak
from tools.soak.disturbing import Kills, Memory, kill_drafts, watch_memory
from tools.soak.driver import Driver, Tally
from tools.soak.growth import GrowthSoak, growth_table
from tools.soak.processes import Host, descriptors, hosted, running, shared_memory
from tools.soak.report import attacks_tables, figures, memory_figures, phases_table, processes_table

_LONGEST_PROMPT = 256  # tokens, more than any here has
_KV_CACHE_BYTES = 128 * 2**20  # full before the first kill: memory that grows from then on is not that of new pages
_DRAFT_EVERY_S, _ANY_EVERY_S = 2.0, 15.0  # between two kills, on average
_WAIT = 300  # looks at whether the engine is idle, a tenth of a second apart


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(0), default=5.0, show_default=True, help="under kills")
@click.option("--undisturbed", type=click.FloatRange(0), default=1.0, show_default=True, help="minutes, in each mode")
@click.option("--kill-every", type=click.FloatRange(0.01), help="seconds, on average: 2, or 15 with --attacks")
@click.option("--disconnected", type=click.FloatRange(0, 0.5), default=0.05, show_default=True, help="part of requests")
@click.option("--aborted", type=click.FloatRange(0, 0.5), default=0.05, show_default=True, help="part of requests")
@click.option("--concurrency", type=click.IntRange(1), default=6, show_default=True, help="requests at a time")
@click.option("--max-num-seqs", type=click.IntRange(1), default=4, show_default=True, help="of the engine")
@click.option("--requests", "count", type=click.IntRange(1), default=32, show_default=True, help="different ones")
@click.option("--longest", type=click.IntRange(2), default=128, show_default=True, help="tokens of an answer")
@click.option("--deterministic", is_flag=True, help="of the engine")
@click.option("--seed", default=0, show_default=True)
@click.option("--kills", type=click.IntRange(1), help="number of deaths at failpoints; nothing else runs")
@click.option("--starts", type=click.IntRange(1), help="number of deaths of each process at starts; nothing else runs")
@click.option("--attacks", is_flag=True, help="attacks and deaths of any process instead of kills of the draft")
@click.option("--mock", is_flag=True, help="with --attacks: an engine without a model")
@click.option("--growth", is_flag=True, help="memory of every process instead of kills of the draft")
@click.option("--mode", type=click.Choice(["ssd", "auto"]), default="ssd", show_default=True, help="with --growth")
@click.option("--warm-up", type=click.FloatRange(0), default=10.0, show_default=True, help="minutes, with --growth")
@click.option("--most-growth", type=float, default=1.0, show_default=True, help="MiB an hour, with --growth")
@click.option("--most-draft", type=float, default=150.0, show_default=True, help="MiB, with --growth")
@click.option("--json", "out", type=click.Path(path_type=Path), help="write every figure here")
def main(
    minutes: float,
    undisturbed: float,
    kill_every: float | None,
    disconnected: float,
    aborted: float,
    concurrency: int,
    max_num_seqs: int,
    count: int,
    longest: int,
    deterministic: bool,
    seed: int,
    kills: int | None,
    starts: int | None,
    attacks: bool,
    mock: bool,
    growth: bool,
    mode: Literal["ssd", "auto"],
    warm_up: float,
    most_growth: float,
    most_draft: float,
    out: Path | None,
) -> None:
    console = Console(width=200)
    if kills or starts:
        from tools.soak.kills import kills as kill_at_failpoints
        from tools.soak.starts import starts as kill_at_starts

        report = kill_at_failpoints(kills, seed) if kills else kill_at_starts(starts or 1, seed)
        console.print(report)
        _end(report, [report], out)
        return
    if growth:
        config = resolve(EngineOptions(mode=mode, generation_config="none"), ServerOptions(port=0))
        report = GrowthSoak(config, 60 * warm_up, most_growth, most_draft, seed).run(concurrency, longest, 60 * minutes)
        console.print(growth_table(report["processes"], report["grown"]))
        _end(report, [report], out)
        if report["grown"]:
            raise click.ClickException(f"these grow: {', '.join(report['grown'])}")
        return
    options = EngineOptions(
        mode="ssd",
        max_num_seqs=max_num_seqs,
        max_model_len=_LONGEST_PROMPT + longest,
        deterministic=deterministic,
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
        load_format="mock" if mock else "auto",
        generation_config="none",  # over HTTP answers are those of the same parameters over ZeroMQ
    )
    if mock and not attacks:
        raise click.UsageError("--mock is for --attacks")
    fates, times = Fates(aborted, disconnected, seed), (60 * undisturbed, 60 * minutes)
    try:
        if attacks:
            report = AttackedSoak(options, fates, kill_every or _ANY_EVERY_S, seed).run(
                concurrency, count, longest, *times
            )
            for part in attacks_tables(report):
                console.print(part)
            _end(report, [*report["phases"], report["http"], report], out)
            if report["exit_status"]:
                raise click.ClickException(f"the engine has ended by itself:\n{report['said']}")
            return
        config = resolve(options, ServerOptions(port=0))
        soak = _Soak(config, fates, kill_every or _DRAFT_EVERY_S, seed)
        report = soak.run(concurrency, count, longest, *times)
    except SsdError as error:
        raise click.ClickException(str(error)) from None
    console.print(phases_table(report["phases"]))
    console.print(processes_table(report["files_before"], report["files_after"], report["memory"]))
    for key in ("kills", "restarted", "kv_cache_usage", "left_behind", "exit_status", "environment"):
        console.print(f"{key.replace('_', ' ')}:", report[key])
    _end(report, report["phases"], out)


def _end(report: dict[str, Any], rows: list[dict[str, Any]], out: Path | None) -> None:
    """Write the report. Fail if an answer was not what it must be."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1))
    kinds = ("lost", "hung", "duplicated", "altered", "failed", "broken")
    wrong = {kind: sum(row.get(kind, 0) for row in rows) for kind in kinds}
    if any(wrong.values()):
        raise click.ClickException(", ".join(f"{number} {kind}" for kind, number in wrong.items() if number))


class _Soak:
    """A soak on one engine."""

    def __init__(self, config: EngineConfig, fates: Fates, kill_every: float, seed: int) -> None:
        self._config, self._fates, self._kill_every, self._seed = config, fates, kill_every, seed
        self._report: dict[str, Any] = {"environment": environment(), "phases": []}

    def run(self, concurrency: int, count: int, longest: int, undisturbed: float, seconds: float) -> dict[str, Any]:
        """Run the soak and return the report; times are in seconds."""
        names = shared_memory()
        with hosted(self._config) as host:
            requests = shuffled(pool(count, longest, self._seed), self._seed)
            driver = Driver(host.address, requests, concurrency)
            try:
                asyncio.run(self._phases(host, driver, count, undisturbed, seconds))
            except EngineDeadError as error:
                raise SsdError(f"{error}\n{host.said()}") from None
            pids = set(host.processes().values())
            self._report["exit_status"] = host.stop()
        left = {"processes": len(running(pids)), "shared_memory": sorted(shared_memory() - names)}
        return self._report | {"left_behind": left}

    async def _phases(self, host: Host, driver: Driver, count: int, undisturbed: float, seconds: float) -> None:
        nobody, ar, ssd = Fates(0, 0, self._seed), Speculation("ar"), self._config.speculation
        reference = self._add("ar", await driver.run(undisturbed, ar, nobody, at_least=count))
        self._add("ssd", await driver.run(undisturbed, ssd, nobody), reference)
        pids, before, idle = host.processes(), _files(host), await _idle(host)
        kills, memory = Kills(), dict[str, Memory]()
        beside = [
            asyncio.create_task(kill_drafts(host, self._kill_every, self._seed, kills)),
            asyncio.create_task(watch_memory(host, memory)),
        ]
        try:
            tally = await driver.run(seconds, ssd, self._fates)
        finally:
            for task in beside:
                task.cancel()
            ends = await asyncio.gather(*beside, return_exceptions=True)
        for end in ends:
            if end is not None and not isinstance(end, asyncio.CancelledError):
                raise end  # nothing was killed, or read, from then on
        self._add("ssd, drafts killed", tally, reference)
        self._report |= {
            "kills": asdict(kills),
            "kv_cache_usage": {"before": idle, "after": await _idle(host)},
            "files_before": before,
            "files_after": _files(host),
            "memory": memory_figures(memory),
            "restarted": [role for role, pid in host.processes().items() if pid != pids[role] and role != "draft"],
        }

    def _add(self, phase: str, tally: Tally, ar: dict[str, Any] | None = None) -> dict[str, Any]:
        found = figures(phase, tally, ar)
        self._report["phases"].append(found)
        return found


def _files(host: Host) -> dict[str, int]:
    """Return the open files by role."""
    found = {}
    for role, pid in host.processes().items():
        with suppress(OSError):
            found[role] = descriptors(pid)
    return found


async def _idle(host: Host) -> float:
    """Return the used share of the KV cache once nothing runs or waits, or after half a minute."""
    for _ in range(_WAIT):
        gauges = await asyncio.to_thread(host.gauges)
        if not gauges["num_requests_running"] + gauges["num_requests_waiting"] + gauges["kv_cache_usage_perc"]:
            break
        await asyncio.sleep(0.1)
    return gauges["kv_cache_usage_perc"]


if __name__ == "__main__":
    main()
