"""Host work that is done while a device, or another process, computes."""

from __future__ import annotations

from collections.abc import Callable

Task = Callable[[], None]


def nothing() -> None:
    pass


class Once:
    """Runs its tasks on the first call only: several places call it, and any may be skipped."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = [*tasks]

    def __call__(self) -> None:
        while self._tasks:
            self._tasks.pop(0)()
