"""Markdown on a terminal while it is still being written.

rich's Live alone would draw the start of a tall text, and all of it anew for each piece."""

from __future__ import annotations

import re
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

_REFRESH_S = 0.05
# Without HTML: tags in a chat must stay visible, and rich would drop them.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class GrowingMarkdown:
    """An answer on a terminal, shown as it grows, for as long as the `with` block lasts.

    A finished block (a paragraph, a list, code) is printed once; only the end of the last block is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console, self._text = console, ""
        self._ended, self._shown = False, 0.0
        self._live = Live(self, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> GrowingMarkdown:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            self._ended = True
            self._live.stop()

    def add(self, text: str) -> None:
        """Show more of the answer, without control characters."""
        with _uninterrupted():
            self._text += _CONTROL.sub("", text)
            finished = ""
            if "\n" in text:
                finished, self._text = split(self._text)
            if finished:
                self._console.print(rendered(finished), "")
            elif time.monotonic() >= self._shown + _REFRESH_S:
                self._live.refresh()
            else:
                return
            self._shown = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the last block: its end while it grows, all of it once it has ended."""
        lines = console.render_lines(rendered(self._text), options, pad=False)
        if not self._ended:
            lines = lines[-max(1, options.size.height - 1) :]
        for line in lines:
            yield from line
            yield Segment.line()


@contextmanager
def unechoed() -> Iterator[None]:
    """Keep what is typed meanwhile for the next prompt, and out of the answer.

    A terminal that waits for whole lines would drop input beyond 4095 characters, and all of it at Ctrl-C."""
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] = silent[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: rich writes again what it was interrupted in."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def split(text: str) -> tuple[str, str]:
    """Return the blocks that more text cannot change, and the rest."""
    whole = text.rfind("\n") + 1
    starts = [token.map[0] for token in _PARSER.parse(text[:whole]) if token.level == 0 and token.map is not None]
    if len(starts) < 2:
        return "", text
    lines = text.split("\n")  # splitlines() would also split at other characters
    return "\n".join(lines[: starts[-1]]) + "\n", "\n".join(lines[starts[-1] :])


def rendered(text: str) -> Markdown:
    markdown = Markdown("")
    markdown.parsed = _PARSER.parse(text)
    return markdown
