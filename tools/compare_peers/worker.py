"""A contestant from outside: a process that sleeps during the turns of the others."""

from __future__ import annotations

import multiprocessing
import subprocess
from typing import Any

from tools.compare_peers.contestants import Answer, Begin
from tools.compare_peers.memory import resident_mib
from tools.processes import command, environment

_FAREWELL_S = 30.0


class PeerError(Exception):
    """What a contestant could not do, in its own words."""


class Worker:
    """A contestant that has loaded its models; `close` ends it. `peak_mib` is the most it held between turns."""

    def __init__(self, begin: Begin) -> None:
        """Start it. Raises PeerError if it does not load."""
        self._name, self.peak_mib = begin.name, 0.0
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            command("tools.compare_peers.serving", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            env=environment(),
        )
        theirs.close()
        try:
            self._pipe.send(begin)
            self._receive()
        except BaseException:
            self.close()
            raise

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        """Return its answer. Raises PeerError if it fails."""
        self._pipe.send((prompt, tokens))
        answer: Answer = self._receive()
        return answer

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> Any:
        """Return what it says. Its memory is read before anybody's next turn, so that no turn pays for that."""
        try:
            said = self._pipe.recv()
        except EOFError:
            raise PeerError(f"{self._name} has ended") from None
        if isinstance(said, str):
            raise PeerError(f"{self._name}: {said}")
        self.peak_mib = max(self.peak_mib, resident_mib(self._process.pid))
        return said
