"""Starts draft processes in milliseconds, by forking one that has imported everything.

As a program it reads a `Birth` a line, forks the draft, writes its pid, waits for its end, and writes its exit code.
One lives at a time. The program ends with its standard input, a draft with the death pipe of its start."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import NoReturn

import msgspec

from ssd.ipc.process import Start, run
from ssd.system import failpoints, interpreter


class Birth(msgspec.Struct, frozen=True):
    """A draft to start, and where it is to fail."""

    start: Start
    failpoints: str


class Nursery:
    """The parent's side. Drafts inherit `descriptors`."""

    def __init__(self, descriptors: tuple[int, ...]) -> None:
        self._process = subprocess.Popen(
            interpreter.command(__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            bufsize=0,
            env=interpreter.environment() | {"OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders, self._news = self._process.stdin, self._process.stdout

    def bear(self, birth: Birth) -> int:
        """Start a draft once the one before has ended. Returns its pid."""
        self._orders.write(msgspec.json.encode(birth) + b"\n")
        return self._line()

    def ended(self, wait: bool = False) -> int | None:
        """Return the draft's exit code as `subprocess` does; None while it lives, unless told to `wait`."""
        if not wait and not select.select([self._news], [], [], 0)[0]:
            return None
        return self._line()

    def close(self) -> None:
        """End the program. No draft may live."""
        self._orders.close()
        self._process.wait()
        self._news.close()

    def _line(self) -> int:
        """Read a line without buffering: `select` would not see what a buffer holds."""
        text = b""
        while not text.endswith(b"\n"):
            piece = self._news.read(1)
            assert piece, "the nursery has died"
            text += piece
        return int(text)


def _main() -> None:
    from ssd.draft.process import load

    ready = False
    for line in sys.stdin.buffer:
        birth = msgspec.json.decode(line, type=Birth)
        if not ready:
            load(birth.start.config)  # what is compiled at first use is then there for all
            ready = True
        pid = os.fork()
        if pid == 0:
            _live(birth)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _live(birth: Birth) -> NoReturn:
    """Run the draft, from the start that its supervisor would give it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.environ[failpoints.VARIABLE] = birth.failpoints
    payload = os.memfd_create("start")
    os.write(payload, msgspec.json.encode(birth.start))
    os.lseek(payload, 0, os.SEEK_SET)
    sys.argv = ["draft", "ssd.draft", str(payload)]
    run()
    raise AssertionError("run never returns")


if __name__ == "__main__":
    _main()
