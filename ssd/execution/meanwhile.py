"""Host work that is done while a device, or another process, computes."""

from __future__ import annotations

from collections.abc import Callable

Task = Callable[[], None]


def nothing() -> None:
    pass


class Once:
    """Runs its task on the first call only: several places call it, and each of them may be skipped."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self) -> None:
        task, self._task = self._task, nothing
        task()
