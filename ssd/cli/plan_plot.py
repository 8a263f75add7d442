"""The plot of `ssd plan`. matplotlib, an optional extra, is loaded only to draw."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ssd.errors import SsdError, UsageError
from ssd.speculation.planning import Forecast, Pair

_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = {"ar": "tab:gray", "sd": "tab:blue", "ssd": "tab:orange"}


def check(file: Path) -> None:
    """Find out before any work whether `file` can be drawn. Raises UsageError for a bad name or folder, SsdError where
    matplotlib is missing."""
    if file.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot {file}: the name must end in {', '.join(_SUFFIXES)}")
    if not file.parent.is_dir():
        raise UsageError(f"--plot {file}: {file.parent} is no folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise SsdError("--plot needs matplotlib: pip install 'ssd[plot]'")


def draw(file: Path, pair: Pair, forecasts: Sequence[Forecast], name: str) -> None:
    """Tokens per second over the batch size, of each mode at its best: all devices together, and per device. Raises
    UsageError where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    together, apart = figure.subplots(1, 2)
    batches = [found.batch for found in forecasts]
    for mode, colour in _COLOURS.items():
        together.plot(batches, [found.speeds[mode] for found in forecasts], "o-", color=colour, label=mode)
        apart.plot(batches, [found.per_gpu(pair)[mode] for found in forecasts], "o-", color=colour, label=mode)
    together.set_ylabel("predicted tok/s")
    both = pair.target_gpus + pair.draft_gpus
    apart.set_ylabel(f"predicted tok/s per GPU (ssd: of {both:g}; ar, sd: of {pair.target_gpus:g})")
    for axes in (together, apart):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_xlabel("batch")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(name)
    try:
        figure.savefig(file, format=file.suffix[1:].lower(), dpi=120)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None
