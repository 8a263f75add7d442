"""Outputs of commands: progress bars, tables, plots and files."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ssd.errors import SsdError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

COLOURS = {"ar": "tab:gray", "ngram": "tab:olive", "sd": "tab:blue", "ssd": "tab:orange", "auto": "tab:green"}
_PARTS = {"verify_ms": "tab:green", "wait_ms": "tab:red", "overhead_ms": "tab:purple"}
_LATENCIES = {"ttft": "first token", "tpot": "time per token", "itl": "between tokens", "e2el": "whole request"}
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_Item = TypeVar("_Item")
_Row = dict[str, Any]  # `ssd.bench.figures.Row`


def check_writable(flag: str, file: Path | None) -> None:
    """Raise UsageError if `file`, given with `flag`, cannot be written."""
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{flag} {file}: it is a folder")
    if not file.parent.is_dir():
        raise UsageError(f"{flag} {file}: {file.parent} is no folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{flag} {file}: this user may not write there")


def check_plot(file: Path | None) -> None:
    """Raise UsageError if --plot names a file that cannot be drawn, SsdError without matplotlib."""
    if file is None:
        return
    if file.suffix.lower() not in _PLOT_SUFFIXES:
        raise UsageError(f"--plot {file}: the name must end in {', '.join(_PLOT_SUFFIXES)}")
    check_writable("--plot", file)
    if importlib.util.find_spec("matplotlib") is None:
        raise SsdError("--plot needs matplotlib: pip install matplotlib")


def draw_rows(file: Path, rows: Sequence[_Row], title: str) -> None:
    """Draw speeds and the parts of a round, or latencies under load. Raises UsageError."""
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
    try:
        figure.savefig(file, format=file.suffix[1:].lower(), dpi=120)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None


def _speeds(axes: Axes, rows: Sequence[_Row]) -> None:
    speeds = [row["tok_s"] for row in rows]
    down, up = ([abs(row["tok_s"] - row["tok_s_quartiles"][side]) for row in rows] for side in (0, 1))
    axes.bar(range(len(rows)), speeds, yerr=[down, up], color=[_colour(row) for row in rows], capsize=3)
    _named(axes, rows, "tok/s")


def _over_batch(axes: Axes, rows: Sequence[_Row]) -> None:
    for name in dict.fromkeys(_name(row) for row in rows):
        points = [(row["batch_size"], row["tok_s"], row) for row in rows if _name(row) == name]
        sizes, speeds, members = zip(*points, strict=True)
        axes.plot(sizes, speeds, "o-", color=_colour(members[0]), label=name)
    axes.set_xticks(sorted({row["batch_size"] for row in rows}))
    axes.set_xlabel("batch")
    axes.set_ylabel("tok/s of the whole batch")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _parts(axes: Axes, rows: Sequence[_Row]) -> None:
    below = [0.0] * len(rows)
    for key, colour in _PARTS.items():
        times = [row[key] for row in rows]
        axes.bar(range(len(rows)), times, bottom=below, color=colour, label=key.removesuffix("_ms"))
        below = [under + time for under, time in zip(below, times, strict=True)]
    axes.legend()
    _named(axes, rows, "ms a round")


def _latency(axes: Axes, rows: Sequence[_Row], key: str, words: str) -> None:
    places = range(len(rows))
    axes.bar(places, [row.get(f"median_{key}_ms", 0.0) for row in rows], color=[_colour(row) for row in rows])
    axes.plot(places, [row.get(f"p99_{key}_ms", 0.0) for row in rows], "k_", markersize=12, label="99th percentile")
    axes.set_title(words)
    axes.legend(fontsize="small", loc="lower right")
    _named(axes, rows, "ms")


def _named(axes: Axes, rows: Sequence[_Row], unit: str) -> None:
    names = [_name(row) + (f", batch {row['batch_size']}" if "batch_size" in row else "") for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=30, ha="right", fontsize="small")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, axis="y")


def _name(row: _Row) -> str:
    return f"{row['mode']}, T {row['temperature']:g}"


def _colour(row: _Row) -> str:
    return COLOURS.get(row["mode"].split()[0], "tab:brown")


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """Return a table whose first `left` columns hold words, aligned left; the others hold numbers."""
    from rich.table import Table

    found = Table(title=title, title_justify="left", min_width=len(title))
    for index, column in enumerate(columns):
        found.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        found.add_row(*row)
    return found


def console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=120)


def watched(items: Sequence[_Item], description: str) -> Iterator[_Item]:
    with bar(len(items), description) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def bar(total: int, description: str) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr if that is a terminal; yield a function to call after each step."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
