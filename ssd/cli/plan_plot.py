"""The plot of `ssd plan`. matplotlib, an optional extra, is loaded only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ssd.cli.plots import COLOURS, save
from ssd.speculation.planning import Forecast, Pair


def draw(file: Path, pair: Pair, forecasts: Sequence[Forecast], name: str) -> None:
    """Tokens per second over the batch size, of each mode at its best: all devices together, and per device. Raises
    UsageError where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    together, apart = figure.subplots(1, 2)
    batches = [found.batch for found in forecasts]
    for mode, colour in COLOURS.items():
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
    save(figure, file)
