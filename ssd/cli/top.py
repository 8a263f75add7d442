"""`ssd top`: a running engine at a glance."""

from __future__ import annotations

import os
import re
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Protocol

import click
import msgspec
from rich.console import Console

from ssd.cli.full_screen import FullScreen
from ssd.cli.quantities import Real
from ssd.cli.session import process_setup
from ssd.errors import SsdError
from ssd.monitor.demo import Demo
from ssd.monitor.history import History
from ssd.monitor.messages import Snapshot
from ssd.monitor.statistics import Figures, figures
from ssd.monitor.subscriber import Subscriber
from ssd.monitor.view.pipeline import strips
from ssd.monitor.view.screen import PAGES, Look, line, screen

_TICK_S = 0.1
_FASTEST_S, _SLOWEST_S = 0.1, 60.0
_REST = 10  # times the processor's time for a picture
_FIRST_LOOK_S = 1.5  # rates need some time
_PATIENCE_S = 10.0
_HEIGHT, _WIDTH = 40, 120  # where there is no terminal


class Source(Protocol):
    """Where snapshots come from; `here` is whether there is an engine."""

    here: bool
    address: str

    def receive(self, timeout: float) -> Snapshot | None: ...
    def close(self) -> None: ...


@click.command()
@click.option("--address", help="The engine at this address. Default: the only one that runs here.")
@click.option("--interval", type=Real(_FASTEST_S, _SLOWEST_S), default=1.0, show_default=True, help="Seconds.")
@click.option("--window", type=Real(1, 300), default=60, show_default=True, help="Seconds of statistics.")
@click.option("--once", is_flag=True, help="One picture, and end.")
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON, an object a line.")
@click.option("--demo", is_flag=True, help="Scripted figures, without an engine.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), hidden=True, help="One picture into this file.")
def top(
    address: str | None, interval: float, window: float, once: bool, as_json: bool, demo: bool, svg: Path | None
) -> None:
    """Watch a running engine: processes, speed, latency, speculation, and what target and draft do all the time.

    Keys: q leave, h help, p pause, + and - faster and slower, 1 overview, 2 pipeline, 3 requests. Without a terminal, a
    line every interval.
    """
    with process_setup():
        source: Source = Demo() if demo else Subscriber(address)
        try:
            top = _Top(source, interval, window)
            if svg is not None:
                top.draw(svg)
            elif once or as_json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
                top.write(once, as_json)
            else:
                top.run()
        finally:
            source.close()


class _Top:
    def __init__(self, source: Source, interval: float, window: float) -> None:
        self._source, self._interval, self._window = source, interval, window
        self._history = History()
        self._page, self._help, self._paused = "1", False, False

    # -- without a terminal -----------------------------------------------------------------------------------------

    def write(self, once: bool, as_json: bool) -> None:
        """Lines on standard output, or one picture."""
        self._first()
        while True:
            found = self._figures()
            if as_json:
                click.echo(msgspec.json.encode(found).decode())
            elif once:
                self._picture(Console(width=None if sys.stdout.isatty() else _WIDTH), found)
            else:
                gone = "" if self._source.here else "the engine is gone; waiting. Last: "
                click.echo(f"{time.strftime('%H:%M:%S')} {gone}{line(found)}")
            if once:
                return
            self._hear(self._interval)

    def draw(self, file: Path) -> None:
        """One picture as SVG."""
        self._first()
        console = Console(record=True, width=_WIDTH, file=StringIO(), color_system="truecolor")
        self._picture(console, self._figures())
        # Without the fonts that it would have a reader's browser fetch.
        file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="ssd top"), flags=re.DOTALL))

    def _picture(self, console: Console, found: Figures) -> None:
        picture = screen(found, strips(self._history), Look(self._page), console.width, _HEIGHT)
        console.print(picture, height=_HEIGHT)

    def _first(self) -> None:
        """Wait for the engine's first words."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._history.last is None:
            self._hear(_TICK_S)
            if time.monotonic() > deadline:
                raise SsdError(f"nothing comes from the engine at {self._source.address}")
        self._hear(_FIRST_LOOK_S)

    def _hear(self, seconds: float) -> None:
        """Take in what comes in so many seconds."""
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
        """Until q."""
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
                    # A busy engine has much to tell, and should not lose a core to it.
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
