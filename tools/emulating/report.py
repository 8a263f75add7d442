"""The table of tools/emulate.py, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from emulating.cases import Case
from emulating.figures import Figures
from ssd.cli.tables import grid

CASES = ("paper", "misses", "slow draft")


def table(rows: Sequence[tuple[Case, int, Figures]]) -> Table:
    columns = ("preset", "case", "T", "batch", "beyond ms: ar", "sd", "ssd", "depth", "hit rate", "on hit", "on miss")
    columns += ("tok/s: ar", "sd", "ssd", "ssd/Thm 7", "ssd/sd", "simulated", "measured/sim.", "Cor. 9", "ids = ar")
    return grid("Emulated: medians of the turns", columns, [_cells(*row) for row in rows], left=2)


def _cells(case: Case, batch: int, found: Figures) -> list[str]:
    modes = found.modes.values()
    numbers = [f"{mode.beyond_ms:.2f}" for mode in modes]
    numbers += [f"{found.depth_beyond_ms:.2f}", f"{found.hit_rate:.3f}", f"{found.on_hit:.2f}", f"{found.on_miss:.2f}"]
    numbers += [f"{mode.tok_s:.1f}" for mode in modes]
    numbers += [f"{found.modes['ssd'].predicted_ratio:.3f}", f"{found.gain:.3f}", f"{found.simulated:.3f}"]
    numbers += [f"{found.gain / found.simulated:.3f}", f"{found.ceiling:.3f}", f"{found.equal}/{found.texts}"]
    return [case.preset, case.name, f"{case.temperature:g}", str(batch), *numbers]


def plain(case: Case, batch: int, found: Figures) -> dict[str, Any]:
    """A row for JSON."""
    rest = found._asdict()
    rest["modes"] = {mode: figures._asdict() for mode, figures in found.modes.items()}
    return {
        "preset": case.preset,
        "case": case.name,
        **case.emulation.facts(),
        "temperature": case.temperature,
        "batch": batch,
        **rest,
    }
