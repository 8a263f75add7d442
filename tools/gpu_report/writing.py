"""Writes the report as JSON and markdown, anew after every part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tools.gpu_report.job import Row


class Part(msgspec.Struct):
    """A part and its state: "done", "stopped at its limit", or why it failed."""

    name: str
    about: str
    state: str = "not run"
    seconds: float = 0.0
    rows: list[Row] = []

    @property
    def wrong(self) -> list[str]:
        """Return what is wrong, not merely slow or not measured."""
        found = [f"{self.name}: {row['name']}" for row in self.rows if row.get("ok") is False]
        return found + ([f"{self.name}: {self.state}"] if self.state.startswith("failed") else [])


def write(out: Path, facts: dict[str, Any], parts: list[Part]) -> None:
    document = {**facts, "parts": msgspec.to_builtins(parts)}
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "report.md").write_text(markdown(facts, parts))


def markdown(facts: dict[str, Any], parts: list[Part]) -> str:
    """Return the report as markdown, with a table for every part."""
    lines = ["# GPU report", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    wrong = [each for part in parts for each in part.wrong]
    lines += ["Wrong: " + "; ".join(wrong) if wrong else "Nothing is wrong in what was run.", ""]
    for part in parts:
        lines += [f"## {part.name}", "", f"{part.about} **{part.state}**, {part.seconds:.0f} s.", ""]
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
