"""Say of every row of an engine whether its draft was given up meanwhile, and whether Triton compiled anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ssd.client import Client
from ssd.config.engine import EngineConfig
from ssd.launch.restarts import Restarts
from ssd.launch.supervisor import Engine
from ssd.llm import telling_cause
from tools.gpu_report.job import Job, Row

_BREAKER = re.compile(r"goes on without the draft: .+|the draft is of use again")
# The one place that knows how an engine tells of a kernel that is compiled, or loaded, once its process is ready.
LATE = re.compile(r"Triton (?:compiled|loaded) (\w+) after the start")


class Health:
    """Reads a step's log, where its engines write, from now on. An engine logs its breaker at most once a minute."""

    def __init__(self, job: Job) -> None:
        self._log = job.log
        self._at = self._log.stat().st_size if self._log.exists() else 0
        self._said: dict[str, str] = {}

    def judged(self, row: Row) -> Row:
        """Return the row with what the log said since the row before, which makes it wrong if it was a late compile.

        A row that takes the place of one of the same name has what was said of both."""
        said = self._said.get(row["name"], "")
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._at)
                said += file.read().decode(errors="replace")
                self._at = file.tell()
        self._said[row["name"]] = said
        late = LATE.findall(said)
        found = {"breaker": "; ".join(_BREAKER.findall(said)), "late_compiles": len(late)}
        return row | found | ({"ok": False, "compiled": " ".join(sorted(set(late)))} if late else {})


@contextmanager
def watched(
    job: Job, config: EngineConfig, restarts: Restarts | None = None
) -> Iterator[tuple[Engine, Client, Health]]:
    """Run an engine while the block lasts; its health counts from the moment at which it is ready."""
    engine = Engine(config, restarts)
    try:
        engine.start()
        with Client(engine.address) as client, telling_cause(engine):
            yield engine, client, Health(job)
    finally:
        engine.stop(drain=0.0)
