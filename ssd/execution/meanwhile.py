"""What a process does while it waits for a device, or for another process."""

from __future__ import annotations

from collections.abc import Callable

Task = Callable[[], None]


def nothing() -> None:
    pass


class Once:
    """Does its task the first time that it is called: several may have a moment for it, and none be sure of one."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self) -> None:
        task, self._task = self._task, nothing
        task()
