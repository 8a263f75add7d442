"""Finds processes that live but do not work: stopped by a signal, or with a loop that stands still."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ssd.ipc.process import Heartbeats

LOOK_S = 0.25
STEP_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 600.0
# After this time a process that a signal has stopped counts as dead. Clients of a stopped target or frontend wait, and
# lose nothing meanwhile. A stopped draft that has loaded is left alone, because nobody waits for it.
_STOPPED_S = 5.0


@dataclass
class _Watched:
    pid: int
    ready: bool
    turns: int
    still: float = 0.0  # seconds since its counter has moved
    stopped: float = 0.0  # seconds of these in which a signal has stopped it


class Stuck(NamedTuple):
    """The reason to treat a process as dead. `hangs`: no signal has stopped it; its successor may hang."""

    why: str
    hangs: bool


class Liveness:
    """Finds hanging processes by their turn counters. A turn may take STEP_TIMEOUT_S seconds."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._seen: dict[str, _Watched] = {}
        self._looked = 0.0

    def stuck(self, processes: dict[str, tuple[int, bool]], now: float) -> dict[str, Stuck]:
        """Return the roles of the processes to treat as dead, and why.

        `processes`: pid and readiness by role. Call it every LOOK_S seconds of `now`; a longer pause does not count,
        because this process did not run either."""
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._seen = {role: self._look(role, *process, passed) for role, process in processes.items()}
        reasons = {role: self._reason(role, seen) for role, seen in self._seen.items()}
        return {
            role: Stuck(reason, not self._seen[role].stopped) for role, reason in reasons.items() if reason is not None
        }

    def _look(self, role: str, pid: int, ready: bool, passed: float) -> _Watched:
        before, now = self._seen.get(role), _Watched(pid, ready, self._heartbeats.turns(role))
        if before is not None and (before.pid, before.ready, before.turns) == (now.pid, now.ready, now.turns):
            now.still = before.still + passed
            if _is_stopped(pid):
                now.stopped = before.stopped + passed
        return now

    def _reason(self, role: str, seen: _Watched) -> str | None:
        if seen.ready and seen.still >= STEP_TIMEOUT_S:
            return f"no step in {STEP_TIMEOUT_S:g} s"
        if seen.still >= _LOAD_TIMEOUT_S:
            return f"not ready in {_LOAD_TIMEOUT_S:g} s"
        if seen.stopped >= _STOPPED_S and not (role == "draft" and seen.ready):
            return f"stopped by a signal for {_STOPPED_S:g} s"
        return None


def _is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped a process. A debugger that holds it does not count."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] == "T"
