"""Tables for people, on a terminal or in a file. Imports rich: load it only to print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table whose first `left` columns are words and the others numbers."""
    table = Table(title=title, title_justify="left", min_width=len(title))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def console() -> Console:
    """To stdout; where that is no terminal, wide enough for a table."""
    return Console() if sys.stdout.isatty() else Console(width=120)
