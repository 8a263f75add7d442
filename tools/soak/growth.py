"""Mixed load in rounds, and the memory of every process between them: does any of it grow?

A round has short chats, JSON by a schema, a prompt of 6,000 tokens and an answer of 3,000, greedy and sampled, over
HTTP. Every text is new. Memory is `Private_Dirty`: pages that a process alone holds and that no file backs. Resident
memory would count libraries too, and pages that a text worker still shares with its parent."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ssd.cli.outputs import grid
from ssd.config.engine import EngineConfig
from ssd.errors import SsdError
from ssd.plugins.bench.environment import environment
from tools.soak.over_http import post
from tools.soak.processes import Host, children, hosted
from tools.soak.report import cell, slope

_SHORT, _SCHEMAS = 24, 4  # requests of a round
_PROMPT_WORDS, _ANSWER_TOKENS = 5900, 3000
_EVERY_S = 1.0
_WORDS = ["sea", "bread", "railway", "prime", "moon", "key", "clay", "river", "winter", "stone", "lamp", "road"]
_PATIENCE_S = 600.0
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
}


@dataclass
class Growth:
    """MiB of a process: between rounds over time (monotonic seconds), and at `most` at any time."""

    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    most: float = 0.0


class GrowthSoak:
    """A soak on one engine. `allowed` is MiB an hour of any process after `warm_up` seconds, `draft` MiB in all."""

    def __init__(self, config: EngineConfig, warm_up: float, allowed: float, draft: float, seed: int) -> None:
        self._config, self._warm_up, self._allowed, self._draft = config, warm_up, allowed, draft
        self._dice = random.Random(seed)
        self._memory: dict[str, Growth] = {}
        self._failed = self._rounds = 0

    def run(self, concurrency: int, longest: int, seconds: float) -> dict[str, Any]:
        """Run rounds for `seconds` and return the report. Answers have up to `longest` tokens, one has 3,000."""
        with hosted(self._config) as host:
            began = time.monotonic()
            self._look(host, between=True)
            asyncio.run(self._load(host, concurrency, longest, began + seconds))
        rows = {name: self.figures(of, began + self._warm_up) for name, of in self._memory.items()}
        return {
            "environment": environment(),
            "rounds": self._rounds,
            "failed": self._failed,
            "processes": rows,
            "between_rounds": {
                name: [(round(at - began, 1), round(mib, 2)) for at, mib in zip(of.seconds, of.mib, strict=True)]
                for name, of in self._memory.items()
            },
            "grown": [name for name, row in rows.items() if self.grows(name, row)],
        }

    async def _load(self, host: Host, concurrency: int, longest: int, until: float) -> None:
        watching = asyncio.create_task(self._watch(host))
        while time.monotonic() < until:
            requests = self._requests(longest)
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._ask(host.url, requests))
            self._look(host, between=True)
            self._rounds += 1
            if watching.done():
                watching.result()
        watching.cancel()

    async def _ask(self, url: str, requests: list[dict[str, Any]]) -> None:
        """Send one of the `requests` after the other, until none is left."""
        while requests:
            status, _ = await asyncio.to_thread(post, url, json.dumps(requests.pop()).encode(), _PATIENCE_S)
            self._failed += status != 200

    async def _watch(self, host: Host) -> None:
        while True:
            self._look(host, between=False)
            await asyncio.sleep(_EVERY_S)

    def _look(self, host: Host, between: bool) -> None:
        for name, pid in named(host.processes()).items():
            with suppress(OSError):
                used = private_mib(pid)
                of = self._memory.setdefault(name, Growth())
                of.most = max(of.most, used)
                if between:
                    of.seconds.append(time.monotonic())
                    of.mib.append(used)

    def _requests(self, longest: int) -> list[dict[str, Any]]:
        dice = self._dice
        plain: list[tuple[int, dict[str, Any]]] = []
        plain += [(12, {"max_tokens": dice.randint(8, longest)}) for _ in range(_SHORT)]
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
        plain += [(12, {"max_tokens": longest, "response_format": form}) for _ in range(_SCHEMAS)]
        plain += [(_PROMPT_WORDS, {"max_tokens": 16}), (12, {"max_tokens": _ANSWER_TOKENS, "ignore_eos": True})]
        dice.shuffle(plain)
        requests = []
        for number, (words, more) in enumerate(plain):
            text = " ".join(dice.choices(_WORDS, k=words))
            said = [{"role": "user", "content": f"Write about {text}."}]
            law = {"temperature": float((number + self._rounds) % 2), "seed": dice.getrandbits(31)}
            requests.append({"model": self._config.server.names[0], "messages": said, **law, **more})
        return requests

    def figures(self, of: Growth, settled: float) -> dict[str, float]:
        """Return the figures of a process. The slope is 0 where it was seen less than twice after the warm-up."""
        first = next((place for place, now in enumerate(of.seconds) if now >= settled), len(of.seconds))
        return {
            "start_mib": of.mib[0] if of.mib else of.most,
            "last_mib": of.mib[-1] if of.mib else of.most,
            "most_mib": of.most,
            "mib_per_hour": slope(of.seconds[first:], of.mib[first:]),
        }

    def grows(self, name: str, row: Mapping[str, float]) -> bool:
        """Return whether a process with these figures takes more than is allowed."""
        over = name == "draft" and row["most_mib"] - row["start_mib"] > self._draft
        return over or row["mib_per_hour"] > self._allowed


def growth_table(rows: Mapping[str, Mapping[str, float]], grown: Sequence[str]) -> Table:
    """Return a row for each process."""
    columns = ["process", "MiB at the start", "at the end", "most", "MiB/h after the warm-up", "grows"]
    return grid("", columns, [[name, *map(cell, row.values()), "yes" * (name in grown)] for name, row in rows.items()])


def named(roles: Mapping[str, int]) -> dict[str, int]:
    """Return process ids by name: those of `roles`, the text server under the frontend, and its workers by id."""
    found = dict(roles)
    for server in children(roles["frontend"]) if "frontend" in roles else ():
        found["text server"] = server
        found |= {f"text worker {pid}": pid for pid in children(server)}
    return found


def private_mib(pid: int) -> float:
    """Return MiB of pages that the process alone holds and has written. Raises OSError if it is gone."""
    found = re.search(r"Private_Dirty: +([0-9]+)", Path(f"/proc/{pid}/smaps_rollup").read_text())
    if found is None:
        raise SsdError(f"/proc/{pid}/smaps_rollup does not tell private memory")
    return int(found[1]) / 1024
