"""A progress bar on stderr, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

_Item = TypeVar("_Item")


def watched(items: Sequence[_Item], description: str) -> Iterator[_Item]:
    """The items, with a bar of how many have been dealt with."""
    with bar(len(items), description) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def bar(total: int, description: str) -> Iterator[Callable[[], None]]:
    """What to call for each of `total` steps."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
