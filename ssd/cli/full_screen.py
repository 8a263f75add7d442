"""The terminal as a screen of its own, with single keys, given back as it was however the block ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.control import Control
from rich.screen import Screen

from ssd.cli.session import Terminated

_ENDS = (signal.SIGHUP, signal.SIGQUIT)  # SIGINT and SIGTERM raise anyway


class FullScreen:
    """Ctrl-Z gives the terminal back as well, until the process goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._stop = False

    def __enter__(self) -> FullScreen:
        self._before = {number: signal.signal(number, _terminate) for number in _ENDS}
        self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._asked_to_stop)
        self._take()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def show(self, renderable: RenderableType) -> None:
        self._console.print(Control.home(), Screen(renderable), sep="", end="")

    def keys(self) -> str:
        """What has been typed since the last call."""
        if self._stop:
            self._suspend()
        if self._keyboard < 0 or not select.select([self._keyboard], [], [], 0)[0]:
            return ""
        return os.read(self._keyboard, 1024).decode(errors="replace")

    def _take(self) -> None:
        if self._keyboard >= 0:
            self._settings: list[Any] = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSANOW)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _give_back(self) -> None:
        try:
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)
        finally:
            if self._keyboard >= 0:
                termios.tcsetattr(self._keyboard, termios.TCSANOW, self._settings)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop = True  # not in the middle of a picture

    def _suspend(self) -> None:
        self._stop = False
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
