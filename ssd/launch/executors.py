"""The interface of `--executor`: places for a target's ranks beyond this machine."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Loss(NamedTuple):
    """The cause why the ranks cannot go on, and the ended rank's exit code or minus its signal."""

    cause: str
    code: int


class RemoteRanks(Protocol):
    """All ranks of a target but rank 0, on other machines.

    A name in the group `ssd.executors` is a function of configuration and ExitStack that returns this; the ExitStack
    releases all places. All children of the supervisor get the environment `variables`. All ranks meet in the store at
    `meeting`."""

    variables: dict[str, str]
    meeting: str

    def begin(self, group: int) -> None:
        """Start this group of ranks."""

    def loss(self) -> Loss | None:
        """Return why the running group cannot go on; None while it can."""

    def end(self) -> None:
        """End the running group, if there is one."""
