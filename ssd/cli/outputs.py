"""Outputs of commands: tables and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ssd.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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
