"""A soak under attack: innocent clients on an engine whose neighbours are hostile and whose machine is failing."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ssd.config.engine import EngineConfig
from ssd.config.params import Speculation
from ssd.ipc import keys
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.plugins.bench.environment import environment
from tools.soak.asking import Fates, pool, shuffled
from tools.soak.attackers import Attacked, attack
from tools.soak.driver import DISCONNECTED, Driver, Tally
from tools.soak.over_http import Asked, ask_over_http
from tools.soak.processes import Host, hosted, running, shared_memory
from tools.soak.report import figures
from tools.soak.siege import Deaths, Life, Lives, fill_disk, keep_cores_busy, kill_any, small_disk, watch_lives

# What a client may be told while processes die and others flood the engine: each says that it may try again.
MAY_BE_TOLD = ("engine_restarted", "restarting", "loading", "overloaded", DISCONNECTED)
_FILES = 2048  # descriptors of each process
_NO_TMPFS = "none: a small file system cannot be mounted here"


class AttackedSoak:
    """A soak under attack on one engine. `options` are the engine's, `kill_every` is in seconds."""

    def __init__(self, options: EngineOptions, fates: Fates, kill_every: float, seed: int) -> None:
        self._options, self._fates, self._kill_every, self._seed = options, fates, kill_every, seed

    def run(self, concurrency: int, count: int, longest: int, undisturbed: float, seconds: float) -> dict[str, Any]:
        """Run the soak and return the report; times are in seconds."""
        names = shared_memory()
        requests = pool(count, longest, self._seed)
        with small_disk() as disk, tempfile.TemporaryDirectory() as folder:
            config = self._config(Path(folder) / "keys")
            with hosted(config, _places(disk), _FILES) as host:
                driver = Driver(host.address, shuffled(requests, self._seed), concurrency)
                self._report: dict[str, Any] = {"environment": environment(), "phases": []}
                asyncio.run(self._phases(host, config, driver, requests, (undisturbed, seconds), disk))
                pids = set(host.processes().values())
                self._report["exit_status"] = host.stop()
                self._report["said"] = host.said()
        left = {"processes": len(running(pids)), "shared_memory": sorted(shared_memory() - names)}
        return self._report | {"left_behind": left}

    def _config(self, folder: Path) -> EngineConfig:
        """Return a configuration with every entrance open, TCP with keys among them."""
        keys.new_server(folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        return resolve(self._options, ServerOptions(port=0, zmq_bind=address, zmq_keys=str(folder)))

    async def _phases(
        self,
        host: Host,
        config: EngineConfig,
        driver: Driver,
        requests: list[Any],
        times: tuple[float, float],
        disk: Path | None,
    ) -> None:
        undisturbed, seconds = times
        nobody = Fates(0, 0, self._seed)
        calm = await driver.run(undisturbed, Speculation("ar"), nobody, at_least=len(requests))
        attacked, deaths, spells, lives, asked = Attacked(), Deaths(), Counter[str](), Lives(), Asked()
        model = config.server.names[0]
        more = shuffled(requests, self._seed + 1)
        beside = [
            attack(_site(host, config), self._seed, attacked),
            kill_any(host, self._kill_every, self._seed, deaths),
            keep_cores_busy(self._seed, spells),
            watch_lives(host, lives),
            ask_over_http(host.url, model, more, driver.reference, asked),
        ]
        if disk is not None:
            beside.append(fill_disk(disk, self._seed, spells))
        tasks = [asyncio.create_task(one) for one in beside]
        try:
            tally = await driver.run(seconds, config.speculation, self._fates, expected=MAY_BE_TOLD)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if end is not None and not isinstance(end, asyncio.CancelledError):
                raise end  # nothing of its kind has happened from then on
        self._report |= {
            "phases": [figures("ar", calm), self._row("attacked", tally)],
            "http": _http(asked),
            "attacks": {"kinds": attacked.kinds, "names": attacked.names, "codes": attacked.codes},
            "broken": attacked.broken,
            "deaths": deaths.injected,
            "spells": spells if disk is not None else spells | {"full disk": _NO_TMPFS},
            "lives": {role: life_figures(of) for role, of in lives.items()},
        }

    def _row(self, phase: str, tally: Tally) -> dict[str, Any]:
        """Return a row of the table. `lost`: no end at all; `hung`: waited too long."""
        row = figures(phase, tally)
        return row | {"lost": tally.lost - tally.hung, "hung": tally.hung, "told": dict(tally.told)}


def _http(asked: Asked) -> dict[str, Any]:
    return {**vars(asked), "failed": sum(asked.errors.values())}


def _site(host: Host, config: EngineConfig) -> bytes:
    """Return where attackers find the engine: a `Site` of tests/attacks as JSON."""
    port = urlsplit(host.url).port
    assert port is not None
    site = {
        "port": port,
        "address": host.address,
        "model": config.server.names[0],
        "tcp": config.server.zmq_bind,
        "keys": config.server.zmq_keys,
    }
    return msgspec.json.encode(site)


def _places(disk: Path | None) -> dict[str, str]:
    """Return the environment that puts run folder and cache on the small disk."""
    return {} if disk is None else {"XDG_RUNTIME_DIR": str(disk), "SSD_CACHE": str(disk / "cache")}


def life_figures(lives: Mapping[int, Life]) -> dict[str, float]:
    """Return figures of all processes of a role.

    How many there were; MiB and open files at the beginning, at most, and at the end; how fast they grew once loaded.
    """
    each = [life for life in lives.values() if life.seconds]
    return {
        "processes": len(each),
        "first_mib": each[0].mib[0],
        "most_mib": max(max(life.mib) for life in each),
        "last_mib": each[-1].mib[-1],
        "mib_per_hour": common_slope([life.settled for life in each]),
        "first_files": each[0].files[0],
        "most_files": max(max(life.files) for life in each),
        "last_files": each[-1].files[-1],
    }


def common_slope(series: list[tuple[list[float], list[float]]]) -> float:
    """Return the common slope per hour of least-squares lines through (seconds, values), an intercept each."""
    above = below = 0.0
    for seconds, values in series:
        if len(seconds) > 1:
            middle, mean = sum(seconds) / len(seconds), sum(values) / len(values)
            above += sum((now - middle) * (value - mean) for now, value in zip(seconds, values, strict=True))
            below += sum((now - middle) ** 2 for now in seconds)
    return 3600 * above / below if below else 0.0
