"""Writes the model card from what the other stages left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FAN_OUTS = (1, 2, 5)
_COLUMNS = (
    "| prompts | T | rule | accepted of those tried | at each position | tokens per round "
    "| hit rate at fan-out {fan_outs} | rounds |"
)


def card(name: str, recipe: Mapping[str, Any], training: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> str:
    """Return markdown: what the draft is, how it was made, and what it is worth."""
    lines = [f"# {name}: a draft for {recipe['target']}", ""]
    lines += ["Made with `tools/distill`. Recipe:", ""]
    lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in recipe.items()]
    lines += ["", "| epoch | loss | held-out agreement |", "|---|---|---|"]
    lines += [f"| {e['epoch']} | {e['loss']:.3f} | {_series(e['held_out_agreement'], 3)} |" for e in training]
    lines += ["", f"Along the target's own answers, K = {report['k']}:", "", *table(report)]
    lines += ["", f"A tree step took {report['tree_step_ms']:.1f} ms, a verification {report['verify_ms']:.1f} ms.", ""]
    if "step_ms" in report:
        steps = " and ".join(f"{ms:.2f} ms for {_rows(rows)}" for rows, ms in report["step_ms"].items())
        lines += [f"A forward of the draft alone takes {steps} ({report['measured_on']}).", ""]
    return "\n".join(lines)


def table(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a markdown table of the report's rows."""
    columns = _COLUMNS.format(fan_outs=" / ".join(map(str, _FAN_OUTS)))
    return [columns, "|---" * (columns.count("|") - 1) + "|", *map(_row, report["rows"])]


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _row(row: Mapping[str, Any]) -> str:
    positions = _series(row["by_position"], 2)
    hits = " / ".join(f"{value:.3f}" for value in (row["hit_rate"][fan_out] for fan_out in _FAN_OUTS))
    figures = f"{row['acceptance']:.3f} | {positions} | {row['tokens_per_round']:.2f} | {hits} | {row['rounds']}"
    return f"| {row['prompts']} | {row['temperature']} | {row['rule']} | {figures} |"


def _series(values: Sequence[float], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)
