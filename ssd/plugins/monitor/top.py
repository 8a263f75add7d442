"""`ssd top`: a running engine at a glance."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType
from typing import Any

import click
import msgspec
from rich.console import Console, RenderableType
from rich.control import Control
from rich.screen import Screen

from ssd.cli.option_types import Real
from ssd.cli.session import process_setup, terminate
from ssd.errors import SsdError
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.pipeline import strips
from ssd.plugins.monitor.recording import Recording
from ssd.plugins.monitor.screen import PAGES, Look, line, screen
from ssd.plugins.monitor.statistics import Figures, figures
from ssd.plugins.monitor.subscriber import Subscriber

_TICK_S = 0.1
_FASTEST_S, _SLOWEST_S = 0.1, 60.0
_REST = 10  # least time between pictures, as a multiple of the CPU time for one
_FIRST_LOOK_S = 1.5  # rates need some time
_PATIENCE_S = 10.0
_HEIGHT, _WIDTH = 40, 120  # where there is no terminal
_ENDS = (signal.SIGHUP, signal.SIGQUIT)  # SIGINT and SIGTERM raise anyway


@click.command()
@click.option("--address", help="The engine here at this address, URL or pid. Default: the only one.")
@click.option("--interval", type=Real(_FASTEST_S, _SLOWEST_S), default=1.0, show_default=True, help="Seconds.")
@click.option("--window", type=Real(1, 300), default=60, show_default=True, help="Seconds of statistics.")
@click.option("--once", is_flag=True, help="One picture, and end.")
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON, an object a line.")
@click.option("--demo", is_flag=True, help="Recorded figures, without an engine.")
def top(address: str | None, interval: float, window: float, once: bool, as_json: bool, demo: bool) -> None:
    """Watch a running engine: processes, speed, latency, speculation, and what target and draft do all the time.

    Keys: q leave, h help, p pause, + and - faster and slower, 1 overview, 2 pipeline, 3 requests. Without a terminal, a
    line every interval."""
    with process_setup():
        source = Recording() if demo else Subscriber(address)
        try:
            top = _Top(source, interval, window)
            if once or as_json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
                top.write(once, as_json)
            else:
                top.run()
        finally:
            source.close()


class _Top:
    def __init__(self, source: Recording | Subscriber, interval: float, window: float) -> None:
        self._source, self._interval, self._window = source, interval, window
        self._history = History()
        self._page, self._help, self._paused = "1", False, False

    # -- without a terminal -----------------------------------------------------------------------------------------

    def write(self, once: bool, as_json: bool) -> None:
        self._first()
        while True:
            found = self._figures()
            if as_json:
                click.echo(msgspec.json.encode(found).decode())
            elif once:
                console = Console(width=None if sys.stdout.isatty() else _WIDTH)
                picture = screen(found, strips(self._history), Look(self._page), console.width, _HEIGHT)
                console.print(picture, height=_HEIGHT)
            else:
                gone = "" if self._source.here else "the engine is gone; waiting. Last: "
                click.echo(f"{time.strftime('%H:%M:%S')} {gone}{line(found)}")
            if once:
                return
            self._hear(self._interval)

    def _first(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._history.last is None:
            self._hear(_TICK_S)
            if time.monotonic() > deadline:
                raise SsdError(f"nothing comes from the engine at {self._source.address}")
        self._hear(_FIRST_LOOK_S)

    def _hear(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            snapshot = self._source.receive(min(left, _TICK_S))
            if snapshot is not None:
                self._history.add(snapshot)

    def _figures(self) -> Figures:
        found = figures(self._history, self._window)
        return found if self._source.here else msgspec.structs.replace(found, state="gone")

    # -- on a terminal ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        console = Console()
        shown, due, size = None, 0.0, console.size
        with FullScreen(console) as full_screen:
            while "q" not in (keys := full_screen.keys()):
                self._obey(keys)
                if self._history.last is None:
                    full_screen.show(f"waiting for {self._source.address}")
                elif keys or size != console.size or time.monotonic() >= due:
                    began, busy, size = time.monotonic(), time.thread_time(), console.size
                    if shown is None or not self._paused:
                        shown = self._figures(), strips(self._history)
                    full_screen.show(screen(*shown, self._look(), *size))
                    # A picture of a busy engine takes longer to draw; this must not cost the engine a core.
                    due = began + max(self._interval, _REST * (time.thread_time() - busy))
                self._hear(_TICK_S)

    def _obey(self, keys: str) -> None:
        for key in keys:
            if key in PAGES:
                self._page, self._help = key, False
            elif key == "h":
                self._help = not self._help
            elif key == "p":
                self._paused = not self._paused
            elif key == "+":
                self._interval = max(_FASTEST_S, self._interval / 2)
            elif key == "-":
                self._interval = min(_SLOWEST_S, self._interval * 2)

    def _look(self) -> Look:
        notes = []
        if not self._source.here:
            notes.append("the engine is gone; waiting for one")
        if self._paused:
            notes.append("paused")
        return Look(self._page, self._help, ", ".join(notes))


class FullScreen:
    """Takes the whole terminal for pictures and single keys; restores it at the end and while suspended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._stop = False

    def __enter__(self) -> FullScreen:
        self._before = {number: signal.signal(number, terminate) for number in _ENDS}
        self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._asked_to_stop)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def show(self, renderable: RenderableType) -> None:
        self._console.print(Control.home(), Screen(renderable), sep="", end="")

    def keys(self) -> str:
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
