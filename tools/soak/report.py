"""The figures of a soak, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from ssd.cli.outputs import grid
from tools.soak.disturbing import Memory
from tools.soak.driver import Tally

_PERCENTILES = (50, 99)
_COLUMNS = {
    "phase": "",
    "seconds": "s",
    "finished": "finished",
    "aborted": "aborted",
    "disconnected": "gone",
    "lost": "lost",
    "duplicated": "doubled",
    "altered": "altered",
    "failed": "errors",
    "output_throughput": "tok/s",
    "acceptance_length": "tok/round",
    "p50_itl_ms": "itl p50 ms",
    "p99_itl_ms": "itl p99 ms",
    "p99_itl_over_ar": "over ar",
    "p99_chunk_gap_ms": "gap p99 ms",
    "p99_ttft_ms": "first p99 ms",
}


def figures(phase: str, tally: Tally, ar: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the figures of a run; `ar` are those of mode `ar`, to compare with."""
    found: dict[str, Any] = {
        "phase": phase,
        "seconds": tally.seconds,
        "finished": tally.finished,
        "aborted": tally.aborted,
        "disconnected": tally.disconnected,
        "lost": tally.lost,
        "duplicated": tally.duplicated,
        "altered": tally.altered,
        "failed": sum(tally.errors.values()),
        "errors": dict(tally.errors),
        "tokens": tally.tokens,
        "output_throughput": tally.tokens / tally.seconds,
        "acceptance_length": 1 + tally.accepted / max(1, tally.rounds),
        "hits": tally.hits,
    }
    found |= percentiles("itl", tally.token_gaps)
    found |= percentiles("chunk_gap", tally.chunk_gaps)
    found |= percentiles("ttft", tally.first_token)
    if ar is not None:
        found["p99_itl_over_ar"] = found["p99_itl_ms"] / ar["p99_itl_ms"] if ar["p99_itl_ms"] else 0.0
    return found


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in ms; 0 if there are no values."""
    values = np.percentile(seconds, _PERCENTILES) * 1e3 if seconds else [0.0] * len(_PERCENTILES)
    return {f"p{rank}_{name}_ms": float(value) for rank, value in zip(_PERCENTILES, values, strict=True)}


def slope(seconds: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope per hour of the least-squares line; 0 for fewer than two moments."""
    if len(seconds) < 2:
        return 0.0
    return float(np.polyfit((np.asarray(seconds) - seconds[0]) / 3600, values, 1)[0])


def memory_figures(memory: Mapping[str, Memory]) -> dict[str, dict[str, float]]:
    """Return MiB by role: at the start, at the end, and the slopes over the run and its second half."""
    found = {}
    for role, of in memory.items():
        half = len(of.seconds) // 2
        found[role] = {
            "start_mib": of.mib[0],
            "end_mib": of.mib[-1],
            "mib_per_hour": slope(of.seconds, of.mib),
            "mib_per_hour_second_half": slope(of.seconds[half:], of.mib[half:]),
        }
    return found


def phases_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return grid("", list(_COLUMNS.values()), [[cell(row.get(key, "")) for key in _COLUMNS] for row in rows])


def processes_table(before: Mapping[str, int], after: Mapping[str, int], memory: Mapping[str, Any]) -> Table:
    """Return a table of open files before and after, and of memory, by role."""
    columns = ["process", "files before", "after", "MiB before", "after", "MiB/h", "in the second half"]
    rows = []
    for role, of in memory.items():
        counts = [cell(found[role]) if role in found else "" for found in (before, after)]
        rows.append([role, *counts, *map(cell, of.values())])
    return grid("", columns, rows)


def attacks_tables(report: Mapping[str, Any]) -> list[Table | str]:
    """Return the tables of a soak under attack."""
    over_zeromq, over_http = report["phases"][-1], report["http"]
    kinds = ("finished", "aborted", "disconnected", "told", "lost", "hung", "duplicated", "altered", "errors")
    answers = [
        [door, *(cell(_total(of.get(kind, ""))) for kind in kinds)]
        for door, of in (("ZeroMQ", over_zeromq), ("HTTP", over_http))
    ]
    lives = [[role, *map(cell, of.values())] for role, of in report["lives"].items()]
    columns = ["process", "so many", "MiB first", "most", "last", "MiB/h", "files first", "most", "last"]
    counts = [
        [of, name, cell(count)]
        for of in ("attacks", "deaths", "spells")
        for name, count in (report[of]["kinds"] if of == "attacks" else report[of]).items()
    ]
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(report["attacks"]["codes"].items()))
    return [
        grid("", ["innocents over", *kinds], answers),
        grid("", columns, lives),
        grid("", ["", "", "so many"], counts),
        f"attackers were told: {codes}\n",
        f"innocents were told: {over_zeromq['told']}, over HTTP {dict(over_http['told'])}\n",
        f"left behind: {report['left_behind']}, exit status: {report['exit_status']}",
    ]


def _total(value: Any) -> Any:
    return sum(value.values()) if isinstance(value, Mapping) else value


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
