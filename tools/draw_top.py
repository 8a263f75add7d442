"""Draws what `ssd top --demo` shows.

python -m tools.draw_top docs/figures/top.svg"""

from __future__ import annotations

import re
import sys
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.pipeline import strips
from ssd.plugins.monitor.recording import Recording
from ssd.plugins.monitor.screen import Look, screen
from ssd.plugins.monitor.statistics import figures

_SECONDS, _WIDTH, _HEIGHT = 1.5, 120, 40


def draw(file: Path) -> None:
    recording, history = Recording(), History()
    until = time.monotonic() + _SECONDS
    while (left := until - time.monotonic()) > 0:
        if (snapshot := recording.receive(left)) is not None:
            history.add(snapshot)
    console = Console(record=True, width=_WIDTH, file=StringIO(), color_system="truecolor")
    console.print(screen(figures(history, 60), strips(history), Look(), _WIDTH, _HEIGHT), height=_HEIGHT)
    # Drop the fonts that a reader's browser would fetch.
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="ssd top"), flags=re.DOTALL))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
