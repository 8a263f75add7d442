"""Draws measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ssd.bench.figures import Row
from ssd.bench.outputs import COLOURS, save_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = {"verify_ms": "tab:green", "wait_ms": "tab:red", "overhead_ms": "tab:purple"}
_LATENCIES = {"ttft": "first token", "tpot": "time per token", "itl": "between tokens", "e2el": "whole request"}


def draw(file: Path, rows: Sequence[Row], title: str) -> None:
    """Draw speeds and the parts of a round, or latencies under load, into `file`.

    Raises UsageError if `file` cannot be written."""
    from matplotlib.figure import Figure

    loads = "duration" in rows[0]
    figure = Figure(figsize=(14 if loads else 11, 4.5), layout="constrained")
    if loads:
        for axes, (key, words) in zip(figure.subplots(1, len(_LATENCIES)), _LATENCIES.items(), strict=True):
            _latency(axes, rows, key, words)
    else:
        left, right = figure.subplots(1, 2)
        if len({row.get("batch_size") for row in rows}) > 1:
            _over_batch(left, rows)
        else:
            _speeds(left, rows)
        _parts(right, rows)
    figure.suptitle(title)
    save_plot(figure, file)


def _speeds(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw medians as bars and quartiles as whiskers."""
    speeds = [row["tok_s"] for row in rows]
    down, up = ([abs(row["tok_s"] - row["tok_s_quartiles"][side]) for row in rows] for side in (0, 1))
    axes.bar(range(len(rows)), speeds, yerr=[down, up], color=[_colour(row) for row in rows], capsize=3)
    _named(axes, rows, "tok/s")


def _over_batch(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a line for each setting."""
    for name in dict.fromkeys(_name(row) for row in rows):
        points = [(row["batch_size"], row["tok_s"], row) for row in rows if _name(row) == name]
        sizes, speeds, members = zip(*points, strict=True)
        axes.plot(sizes, speeds, "o-", color=_colour(members[0]), label=name)
    axes.set_xticks(sorted({row["batch_size"] for row in rows}))
    axes.set_xlabel("batch")
    axes.set_ylabel("tok/s of the whole batch")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _parts(axes: Axes, rows: Sequence[Row]) -> None:
    below = [0.0] * len(rows)
    for key, colour in _PARTS.items():
        times = [row[key] for row in rows]
        axes.bar(range(len(rows)), times, bottom=below, color=colour, label=key.removesuffix("_ms"))
        below = [under + time for under, time in zip(below, times, strict=True)]
    axes.legend()
    _named(axes, rows, "ms a round")


def _latency(axes: Axes, rows: Sequence[Row], key: str, words: str) -> None:
    """Draw the median as a bar and the 99th percentile as a mark."""
    places = range(len(rows))
    axes.bar(places, [row.get(f"median_{key}_ms", 0.0) for row in rows], color=[_colour(row) for row in rows])
    axes.plot(places, [row.get(f"p99_{key}_ms", 0.0) for row in rows], "k_", markersize=12, label="99th percentile")
    axes.set_title(words)
    axes.legend(fontsize="small", loc="lower right")
    _named(axes, rows, "ms")


def _named(axes: Axes, rows: Sequence[Row], unit: str) -> None:
    names = [_name(row) + (f", batch {row['batch_size']}" if "batch_size" in row else "") for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=30, ha="right", fontsize="small")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, axis="y")


def _name(row: Row) -> str:
    return f"{row['mode']}, T {row['temperature']:g}"


def _colour(row: Row) -> str:
    return COLOURS.get(row["mode"].split()[0], "tab:brown")
