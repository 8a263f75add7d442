"""The report of `ssd bench`: one JSON document, tables, and sentences below them."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ssd.cli.outputs import console, grid
from ssd.errors import SsdError, UsageError
from ssd.plugins.bench.environment import environment, processors
from ssd.plugins.bench.figures import DISTURBED, Row, bounded, differing, is_noise
from ssd.plugins.bench.setup import Setup

if TYPE_CHECKING:
    from rich.table import Table

_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "chunk_gap": "chunk gap", "e2el": "E2E"}
# Title of a table ("" is the first) -> its columns: key of a row -> heading.
_TABLES = {
    "": {
        "runs_on": "runs on",
        "tok_s": "tok/s",
        "tok_s_quartiles": "quartiles",
        "over_ar": "over ar",
        "over_sd": "over sd",
        "over_best": "over best",
        "request_throughput": "requests/s",
        "output_throughput": "tok/s",
        "max_concurrent_requests": "most open",
        "failed": "failed",
        "perplexity": "perplexity",
        "equal_to_ar": "ids = ar",
    },
    "latencies in ms": {
        f"{figure}_{key}_ms": heading
        for key, title in _LATENCIES.items()
        for figure, heading in (("median", title), ("p99", "p99"))
    },
    "rounds": {
        "acceptance_length": "tokens",
        "on_hit": "on hit",
        "on_miss": "on miss",
        "hit_rate": "hits",
        "verify_ms": "verify ms",
        "tree_step_ms": "tree step ms",
        "wait_ms": "wait ms",
        "overhead_ms": "overhead ms",
        "measured_over_predicted": "of predicted",
    },
}


@dataclass
class BenchReport:
    """A benchmark's figures, its setup, and remarks for the reader (`notes`)."""

    benchmark: str
    engine: dict[str, Any]
    workload: dict[str, Any]
    hardware: str
    setup: Setup = field(default_factory=Setup)
    environment: dict[str, Any] = field(default_factory=environment)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def title_suffix(self) -> str:
        return f" ({self.setup.words})" if self.setup.words else ""

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            **self.setup.facts(),
            "command": shlex.join(["ssd", *sys.argv[1:]]),
            "environment": self.environment,
            "engine": self.engine,
            "workload": self.workload,
            "hardware": self.hardware,
            "notes": self.notes,
            "rows": self.rows,
        }


def publish(report: BenchReport, out: Path | None, about: str) -> None:
    """Print the report, then write it: it is printed even if the disk is full. Raises SsdError if ids differ."""
    output = console()
    for table in tables(report, about):
        output.print(table)
    for line in sentences(report):
        output.print(f"- {line}", soft_wrap=True, highlight=False)
    if out is not None:
        try:
            out.write_text(json.dumps(report.as_json(), indent=1) + "\n", "utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror}") from None
        click.echo(f"wrote {out}", err=True)
    if wrong := differing(report.rows):
        raise SsdError(f"{'; '.join(wrong)} (docs/exactness.md)")


def tables(report: BenchReport, about: str) -> list[Table]:
    """Return up to three tables for each temperature and batch size, without empty columns."""
    found = []
    for case, group in groupby(report.rows, _case):
        members = list(group)
        for title, columns in _TABLES.items():
            keys = [key for key in columns if any(row.get(key) is not None for row in members)]
            cells = [[row["mode"], *(_cell(row, key) for key in keys)] for row in members]
            if keys:
                of_pairs = "; over: median of pairs" if any(key.startswith("over_") for key in keys) else ""
                heading = f"{case}: {title or about}{of_pairs}{report.title_suffix}"
                found.append(grid(heading, ["mode", *(columns[key] for key in keys)], cells))
    return found


def sentences(report: BenchReport) -> list[str]:
    facts = report.engine
    pair = " and ".join(filter(None, (facts.get("target_name"), facts.get("draft_name"))))
    machine = report.environment
    versions = f"ssd {machine['ssd']} {machine['commit']}".strip()
    place = "on" if "device" in facts else "asked from"
    about = f"{pair} {place} {processors(machine)}; {versions}, torch {machine['torch']}, Python {machine['python']}."
    plans = [f"{row['mode']} at {_case(row)}, in the end: {row['plan']}." for row in report.rows if row.get("plan")]
    gains = [(row["over_ar"], row["acceptance_length"]) for row in report.rows if row.get("over_ar")]
    disturbed = [DISTURBED] if any(is_noise(*gain) for gain in gains) else []
    return [
        *filter(None, [report.hardware]),
        *plans,
        *disturbed,
        *report.notes,
        *report.setup.notes(report.rows),
        about,
    ]


def _case(row: Row) -> str:
    batch = f", batch {row['batch_size']}" if "batch_size" in row else ""
    return f"T = {row['temperature']:g}{batch}"


def _cell(row: Row, key: str) -> str:
    value = row.get(key)
    if value is None:
        return "-"
    if key == "over_ar":
        return bounded(value, row["acceptance_length"])
    if key == "equal_to_ar":
        return f"{value}/{row['answers']}"
    if key == "hit_rate":
        return f"{value:.0%}"
    if isinstance(value, list):
        return "-".join(f"{item:.1f}" for item in value)
    return f"{value:.{1 if abs(value) >= 100 else 2}f}" if isinstance(value, float) else str(value)
