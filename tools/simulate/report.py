"""The tables, and the sentences that explain a deviation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from ssd.cli.outputs import grid
from tools.simulate.calibration import Note
from tools.simulate.pearl import Rivals
from tools.simulate.run import Figures
from tools.simulate.tables import Cell, Drafts

if TYPE_CHECKING:  # it loads torch
    from tools.simulate.replay import Replayed

EXPLAINED = 0.05  # predicted cells that are further off get a sentence

_CAUSES = {
    ("temperature", "ssd uniform"): (
        "a miss costs K steps of the draft here, 14 ms; the paper's own table implies 20 ms (a line through sd/ssd "
        "against its miss rates), which weighs most where misses are many"
    ),
    ("temperature", "hits geometric"): (
        "one c and one r serve all accepted lengths; moving chains between them gains less so than in the paper"
    ),
    ("batch", "cheap"): (
        "the cost of a chain is derived from arithmetic alone; the tree of 128 chains fits into the verification here, "
        "while 1.5 ms more a round would give the paper's cell"
    ),
}


def inputs_table(notes: Iterable[Note]) -> Table:
    return grid("Inputs", ("input", "value", "source"), notes, left=3)


def cells_table(cells: Iterable[Cell]) -> Table:
    columns = ("table", "row", "column", "published", "simulated", "deviation", "use")
    rows = (
        (c.table, c.row, c.column, _number(c.published), _number(c.simulated), f"{c.deviation:+.1%}", c.use)
        for c in cells
    )
    return grid("Deviations", columns, rows, left=3)


def causes(cells: Iterable[Cell]) -> list[str]:
    """Return a line for every predicted cell that is off by more than `EXPLAINED`."""
    return [
        f"{c.table}, {c.row}, {c.column} {c.deviation:+.1%}: {_CAUSES.get((c.table, c.column), 'no cause known')}"
        for c in cells
        if c.use == "predicted" and abs(c.deviation) > EXPLAINED
    ]


def beyond(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells outside their bound, whatever they were used for."""
    return [cell for cell in cells if abs(cell.deviation) > cell.bound]


def drafts_table(found: Iterable[Drafts]) -> Table:
    columns = ("drafts", "F", "hit rate", "batch 1", "16: neural", "16: cheap", "16: anytime")
    rows = ((str(d.drafts), str(d.fan_out), f"{d.hit_rate:.3f}", *(f"{speed:.1f}" for speed in d[3:])) for d in found)
    return grid("1 to 8 draft devices, tok/s of one sequence: predicted, the paper's page has no cells", columns, rows)


def figures_table(title: str, figures: Figures) -> Table:
    rows = (
        (name.replace("_", " "), f"{value * 1e3:.3f} ms" if name.endswith("_s") else f"{value:.3f}")
        for name, value in asdict(figures).items()
    )
    return grid(title, ("figure", "value"), rows)


def pearl_table(acceptance: float, found: Sequence[Rivals]) -> Table:
    ratios = sorted({one.ratio for one in found})
    speeds = {(one.batch, one.ratio): one for one in found}
    rows = (
        (str(batch), *(_rivals(speeds[batch, ratio]) for ratio in ratios)) for batch in sorted({b for b, _ in speeds})
    )
    title = f"Acceptance {acceptance:g}: tree over pearl (tree, pearl, sd over ar), by verification over draft step"
    return grid(title, ("batch", *(f"{ratio:g}" for ratio in ratios)), rows)


def _rivals(one: Rivals) -> str:
    return f"{one.tree / one.pearl:.2f} ({one.tree:.2f} {one.pearl:.2f} {one.sd:.2f})"


def replay_table(found: Iterable[Replayed]) -> Table:
    columns = ("T", "chains", "allocation", "rounds", "hit rate", "tokens per round", "started")
    rows = (
        (f"{r.temperature:g}", str(r.budget), r.allocation, str(r.rounds), *(f"{figure:.2f}" for figure in r[4:]))
        for r in found
    )
    return grid("The built-in draft along the target's answers", columns, rows, left=3)


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
