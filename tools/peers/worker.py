"""A contestant from outside: a process that sleeps while the others have their turns, and whose memory can be told."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from pathlib import Path
from typing import Any

from peers.memory import resident_mib
from peers.serving import Answer, Begin
from ssd import interpreter

_FAREWELL_S = 30.0


class PeerError(Exception):
    """What a contestant could not do, with its own words."""


class Worker:
    """A contestant that has loaded its models; `close` ends it. `peak_mib` is the most it held between its turns."""

    def __init__(self, begin: Begin) -> None:
        """Raises PeerError when it does not load."""
        self._name, self.peak_mib = begin.name, 0.0
        self._pipe, theirs = multiprocessing.Pipe()
        environment = interpreter.environment()
        path = os.pathsep.join([str(Path(__file__).parents[1]), environment["PYTHONPATH"]]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            interpreter.command("-m", "peers", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            env={**environment, "PYTHONPATH": path},
        )
        theirs.close()
        try:
            self._pipe.send(begin)
            self._receive()
        except BaseException:
            self.close()
            raise

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        """Raises PeerError when it cannot."""
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
        """What it says. Its memory is looked at before anybody's next turn, so that no turn pays for that."""
        try:
            said = self._pipe.recv()
        except EOFError:
            raise PeerError(f"{self._name} has ended") from None
        if isinstance(said, str):
            raise PeerError(f"{self._name}: {said}")
        self.peak_mib = max(self.peak_mib, resident_mib(self._process.pid))
        return said
