"""Places for the ranks of a target beyond this machine: the interface of what `--executor` names."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Loss(NamedTuple):
    """The reason why the ranks cannot go on: the cause, and the exit code of the ended rank, or minus the signal."""

    cause: str
    code: int


class RemoteRanks(Protocol):
    """All ranks of a target but rank 0, on other machines.

    In the group `ssd.executors` a name stands for a function of a configuration and an ExitStack that takes the places
    and returns this. The children of the supervisor, rank 0 among them, get the environment `variables`. All ranks meet
    in the store at `meeting`. The ExitStack releases everything when it closes."""

    variables: dict[str, str]
    meeting: str

    def begin(self, group: int) -> None:
        """Start this group of ranks."""

    def loss(self) -> Loss | None:
        """Return why the running group cannot go on; None while it can."""

    def end(self) -> None:
        """End the running group, if there is one."""
