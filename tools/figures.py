"""Draw the figures of docs/algorithm.md, from measurements kept beside them and from the simulator.

python tools/figures.py            # needs matplotlib
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import matplotlib
from simulation.cascade import Level
from simulation.run import simulate
from simulation.setup import Devices, Setup
from simulation.statistics import AcceptanceLaw, Statistics

from ssd.profile import PAPER

matplotlib.use("svg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
_COLOURS = {"verify": "#4477aa", "draft": "#ee9944", "tree": "#eebb77", "wait": "#dddddd"}
_PAIR = PAPER.pair()
_LLAMA = Devices(_PAIR.verify, (Level(_PAIR.step),), overhead=_PAIR.overhead)
_STATISTICS = Statistics.alike(AcceptanceLaw(_PAIR.acceptance), _PAIR.misses)


@click.command(help=__doc__)
def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "ssd", "font.size": 9})  # the same bytes every time
    for name, figure in {"rounds": rounds(), "hits": hits(), "batch": batch()}.items():
        path = FOLDER / f"{name}.svg"
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        click.echo(path)


def rounds() -> Any:
    """Two lanes for each mode: what target and draft do over two rounds of K = 3."""
    verify, step = 6.0, 1.5
    figure, axes = plt.subplots(3, 1, figsize=(7, 3.6), sharex=True)
    for axis, mode in zip(axes, ("ar", "sd", "ssd"), strict=True):
        now = 0.0
        for _ in range(4):
            if mode == "sd":
                _bars(axis, 0, now, [step] * 3, "draft")
                _bars(axis, 1, now, [3 * step], "wait")
                now += 3 * step
            if mode == "ssd":
                _bars(axis, 0, now, [step] * 4, "tree")
            _bars(axis, 1, now, [verify], "verify")
            now += verify
            tokens = {"ar": "1", "sd": "k + 1", "ssd": "k + 1"}[mode]
            axis.annotate(f"+{tokens}", (now, 1.45), ha="center", fontsize=7)
        axis.set_yticks([0, 1], ["draft", "target"])
        axis.set_ylim(-0.5, 1.8)
        axis.set_title(mode, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(0, 25)
    axes[-1].set_xticks([])
    axes[-1].set_xlabel("time")
    return figure


def _bars(axis: Any, lane: int, start: float, lengths: list[float], kind: str) -> None:
    for length in lengths:
        axis.barh(lane, length, left=start, height=0.7, color=_COLOURS[kind], edgecolor="white")
        start += length


def hits() -> Any:
    """Hit rate and speed over temperature, as measured (`tools/sweep.py samplers`)."""
    rows = json.loads((FOLDER / "samplers.json").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(7, 3))
    lines: dict[str, list[Any]] = {}
    for row in rows:
        sampler, _, spread = row["name"].partition(" Theorem 12")
        if spread:
            lines.setdefault(sampler, []).append(row)
    greedy = lines["coupled"][0]  # at T = 0 the rules are the same
    for axis, field, label in zip(axes, ("hit_rate", "over_ar"), ("hit rate", "tok/s over ar"), strict=True):
        for sampler, found in lines.items():
            mine = found if found[0] is greedy else [greedy, *found]
            axis.plot([r["temperature"] for r in mine], [r[field] for r in mine], marker="o", label=sampler)
        axis.set_xlabel("temperature")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=6)
    return figure


def batch() -> Any:
    """Speed of one sequence over the batch, the paper's Llama pair, simulated: waiting for the slowest row or not."""
    sizes = [1, 2, 4, 8, 16, 32]
    figure, axis = plt.subplots(figsize=(5, 3))
    for label, mode, engine, backup in (
        ("ssd, rows decide alone", "ssd", "anytime", "auto"),
        ("ssd, batch waits, cheap backup", "ssd", "reference", "cheap"),
        ("ssd, batch waits, neural backup", "ssd", "reference", "neural"),
        ("sd", "sd", "reference", "neural"),
        ("ar", "ar", "reference", "neural"),
    ):
        setups = [Setup(_LLAMA, _STATISTICS, mode, engine, 7, (3,), size, backup) for size in sizes]
        axis.plot(sizes, [simulate(setup).tokens_per_second for setup in setups], marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, map(str, sizes))
    axis.set_xlabel("batch")
    axis.set_ylabel("tok/s of a sequence")
    axis.set_ylim(0, 420)  # room for the legend
    axis.legend(fontsize=7, loc="upper right")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
