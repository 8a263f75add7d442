"""Keep the findings of the steps, row by row, and write the report as markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tools.gpu_report.job import Row
from tools.gpu_report.programmes import Step

ROWS = "rows.jsonl"
_CHECKS = ("tests", "audit", "ids")


class Log:
    """Lines of JSON that are on the disk before `add` returns: a machine may be taken away at any time."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")

    def add(self, **row: Any) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class Part(msgspec.Struct):
    """The outcome of a step. `state`: "done", "stopped at its limit", or why it failed.

    `checks`: it looks for faults, so it must come to its end."""

    name: str
    prediction: str = ""
    checks: bool = False
    state: str = "not run"
    seconds: float = 0.0
    rows: list[Row] = []
    decision: str = ""

    @property
    def wrong(self) -> list[str]:
        """Return what is wrong, not merely slow or not measured."""
        found = [f"{self.name}: {row['name']}" for row in self.rows if row.get("ok") is False]
        broken = self.state.startswith("failed") or (self.checks and self.state.startswith("stopped"))
        return found + ([f"{self.name}: {self.state}"] if broken else [])


def parts_of(out: Path, plan: Sequence[Step]) -> list[Part]:
    """Read what was kept of the steps."""
    lines: list[Row] = [json.loads(line) for line in (out / ROWS).read_text().splitlines()]
    parts = []
    for step in plan:
        own = [{key: row[key] for key in row if key != "step"} for row in lines if row["step"] == step.title]
        part = Part(
            step.title,
            step.prediction,
            step.part in _CHECKS,
            decision=step.decision,
            rows=list({row["name"]: row for row in own if "name" in row}.values()),
        )
        for row in own:
            if "state" in row and "name" not in row:
                part.state, part.seconds = row["state"], row["seconds"]
        parts.append(part)
    return parts


def write(out: Path, facts: dict[str, Any], parts: list[Part]) -> None:
    (out / "report.md").write_text(markdown(facts, parts))


def markdown(facts: dict[str, Any], parts: list[Part]) -> str:
    """Return the report as markdown, with a table for every step."""
    lines = ["# GPU report", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    wrong = [each for part in parts for each in part.wrong]
    lines += ["Wrong: " + "; ".join(wrong) if wrong else "Nothing is wrong in what was run.", ""]
    for part in parts:
        told = [f"**{part.state}**, {part.seconds:.0f} s."]
        told += [
            f"*{what}*: {words}"
            for what, words in (("Predicted", part.prediction), ("Decision", part.decision))
            if words
        ]
        lines += [f"## {part.name}", "", "  \n".join(told), ""]
        keys = list(dict.fromkeys(key for row in part.rows for key in row))
        if keys:
            lines += [_line(keys), _line(["---"] * len(keys))]
            lines += [_line([_cell(row.get(key)) for key in keys]) for row in part.rows]
            lines.append("")
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
