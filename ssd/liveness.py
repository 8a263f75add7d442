"""Which processes are alive and yet of no use: those that were stopped, and those whose loop has stood still."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssd.ipc.pulse import Pulses

LOOK_S = 0.25
_LOAD_TIMEOUT_S = 600.0
# The target's requests and the frontend's clients wait for a stopped process; nobody waits for a draft.
_STOPPED_S = 1.0


@dataclass
class _Seen:
    pid: int
    ready: bool
    turns: int
    still: float = 0.0  # seconds since its counter has moved, and
    stopped: float = 0.0  # since a signal has stopped it meanwhile


class Liveness:
    """Tells by its counter whether a process goes on. `step_timeout`: seconds that one turn of a loop may take."""

    def __init__(self, pulses: Pulses, step_timeout: float) -> None:
        self._pulses, self._step_timeout = pulses, step_timeout
        self._seen: dict[str, _Seen] = {}
        self._looked = 0.0

    def stuck(self, processes: dict[str, tuple[int, bool]], now: float) -> dict[str, str]:
        """Of the `processes`, by role their pids and whether they are ready, those that must be taken for dead, and
        why. To be asked every LOOK_S seconds: what passes beyond that is not held against them, as this process was not
        running either."""
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._seen = {role: self._look(role, *process, passed) for role, process in processes.items()}
        reasons = {role: self._reason(seen) for role, seen in self._seen.items()}
        return {role: reason for role, reason in reasons.items() if reason is not None}

    def _look(self, role: str, pid: int, ready: bool, passed: float) -> _Seen:
        before, now = self._seen.get(role), _Seen(pid, ready, self._pulses.turns(role))
        if before is not None and (before.pid, before.ready, before.turns) == (now.pid, now.ready, now.turns):
            now.still = before.still + passed
            if role != "draft" and _is_stopped(pid):
                now.stopped = before.stopped + passed
        return now

    def _reason(self, seen: _Seen) -> str | None:
        if seen.ready and seen.still >= self._step_timeout:
            return f"no step in {self._step_timeout:g} s"
        if seen.still >= _LOAD_TIMEOUT_S:
            return f"not ready in {_LOAD_TIMEOUT_S:g} s"
        if seen.stopped >= _STOPPED_S:
            return f"stopped by a signal for {_STOPPED_S:g} s"
        return None


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; a debugger that holds it does not count."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] == "T"
