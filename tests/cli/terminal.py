"""A command on a terminal of its own, as a person sees and uses it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyte

PATIENCE_S = 20.0
WIDTH, HEIGHT = 80, 24
# The terminal must control the process, or Ctrl-C is but a character.
_CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """What `process` has written so far is `written`; `mark` is where the last thing that was waited for ended."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor = process, descriptor
        self.written, self.mark = b"", 0

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def resize(self, width: int, height: int) -> None:
        """As if a window were made larger or smaller."""
        _resize(self._descriptor, width, height)

    def settings(self) -> list[Any]:
        """How the terminal treats what is typed, as of termios."""
        return termios.tcgetattr(self._descriptor)

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern (of re) comes after `mark`, or fail with all that came."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.compile(pattern.encode(), re.DOTALL).search(self.written, self.mark)):
            assert self._read(deadline), f"no {pattern!r} in {self.written[self.mark :]!r}"
        self.mark = found.end()

    def read_more(self, seconds: float = PATIENCE_S) -> bool:
        """Take in what comes next; False if nothing does."""
        return self._read(time.monotonic() + seconds)

    def end(self, key: str = "") -> int:
        """The exit status, once the process has ended. `key` is pressed for that, again after a while: readline misses
        a signal that comes just before it begins to wait."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.type(key)
            while self._read(time.monotonic() + 1.0):
                pass
        while self._read(time.monotonic()):
            pass
        assert self.process.poll() is not None, f"it has not ended: {self.written[self.mark :]!r}"
        return self.process.returncode

    def screen(self, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
        """What is to be seen now."""
        screen = pyte.Screen(width, height)
        pyte.ByteStream(screen).feed(self.written)
        return list(screen.display)

    def lines(self) -> list[str]:
        """What has scrolled away and what is on the screen, without empty lines."""
        screen = pyte.HistoryScreen(WIDTH, HEIGHT, history=10_000)
        pyte.ByteStream(screen).feed(self.written)
        gone = ["".join(line[x].data for x in range(WIDTH)) for line in screen.history.top]
        return [line.rstrip() for line in [*gone, *screen.display] if line.strip()]

    def _read(self, deadline: float) -> bool:
        """Take in what comes next; False at the end, or when the time is up."""
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._descriptor, 65536) if ready else b""
        except OSError:  # the other end has been closed
            data = b""
        self.written += data
        return bool(data)


def _resize(descriptor: int, width: int, height: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """`python *arguments` on a new terminal."""
    ours, theirs = pty.openpty()
    # A size in the environment, as of a parallel pytest, would count more than the terminal's.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    _resize(theirs, WIDTH, HEIGHT)
    process = subprocess.Popen(
        [sys.executable, "-c", _CONTROLLED, sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**inherited, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
