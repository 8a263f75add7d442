"""Files of plots. matplotlib, an optional extra, is loaded only to draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ssd.cli.outputs import check_writable
from ssd.errors import SsdError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {"ar": "tab:gray", "sd": "tab:blue", "ssd": "tab:orange"}


def check(file: Path) -> None:
    """Find out before any work whether `file` can be drawn. Raises UsageError for a bad name or folder, SsdError where
    matplotlib is missing."""
    if file.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot {file}: the name must end in {', '.join(_SUFFIXES)}")
    check_writable("--plot", file)
    if importlib.util.find_spec("matplotlib") is None:
        raise SsdError("--plot needs matplotlib: pip install 'ssd[plot]'")


def save(figure: Figure, file: Path) -> None:
    """Raises UsageError where the file cannot be written."""
    try:
        figure.savefig(file, format=file.suffix[1:].lower(), dpi=120)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None
