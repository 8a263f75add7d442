"""Outputs of commands: progress bars, tables, plots and files. rich and matplotlib load only when used."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ssd.errors import SsdError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

COLOURS = {"ar": "tab:gray", "ngram": "tab:olive", "sd": "tab:blue", "ssd": "tab:orange", "auto": "tab:green"}
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_Item = TypeVar("_Item")


def check_writable(flag: str, file: Path | None) -> None:
    """Raise UsageError if `file`, given with `flag`, cannot be written.

    Commands call it before they start work."""
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{flag} {file}: it is a folder")
    if not file.parent.is_dir():
        raise UsageError(f"{flag} {file}: {file.parent} is no folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{flag} {file}: this user may not write there")


def check_plot(file: Path | None) -> None:
    """Raise UsageError if --plot names a file that cannot be drawn, SsdError if matplotlib is missing."""
    if file is None:
        return
    if file.suffix.lower() not in _PLOT_SUFFIXES:
        raise UsageError(f"--plot {file}: the name must end in {', '.join(_PLOT_SUFFIXES)}")
    check_writable("--plot", file)
    if importlib.util.find_spec("matplotlib") is None:
        raise SsdError("--plot needs matplotlib: pip install matplotlib")


def save_plot(figure: Figure, file: Path) -> None:
    """Write a plot in the format of the file's suffix; raise UsageError if that fails."""
    try:
        figure.savefig(file, format=file.suffix[1:].lower(), dpi=120)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """Return a table whose first `left` columns hold words, aligned left, and whose others hold numbers."""
    from rich.table import Table

    found = Table(title=title, title_justify="left", min_width=len(title))
    for index, column in enumerate(columns):
        found.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        found.add_row(*row)
    return found


def console() -> Console:
    """Return a console on stdout, 120 columns wide if stdout is not a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=120)


def watched(items: Sequence[_Item], description: str) -> Iterator[_Item]:
    """Yield the items and show a progress bar meanwhile."""
    with bar(len(items), description) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def bar(total: int, description: str) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr if that is a terminal; yield a function to call after each of `total` steps."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
