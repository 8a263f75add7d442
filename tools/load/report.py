"""A load's figures by the names of `vllm bench serve`, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from ssd.bench.outputs import grid
from tools.load.driver import Tally

_PERCENTILES = (50, 95, 99)
_COLUMNS = {
    "load": "load",
    "request_rate": "arrivals/s",
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "max_concurrent_requests": "open",
    "p50_ttft_ms": "first p50 ms",
    "p50_e2el_ms": "whole p50 ms",
    "p95_e2el_ms": "whole p95 ms",
    "p99_e2el_ms": "whole p99 ms",
    "refused": "refused",
    "unsent": "unsent",
    "failed": "errors",
    "request_goodput_over_peak": "of peak",
}


def figures(load: str, tally: Tally, peak: float | None = None) -> dict[str, Any]:
    """Return the figures of a load; `peak` is its throughput per second without overload."""
    throughput = tally.right / tally.seconds
    found: dict[str, Any] = {
        "load": load,
        "duration": tally.seconds,
        "request_rate": (tally.sent + tally.unsent) / tally.sending,
        "sent": tally.sent,
        "completed": tally.right + tally.right_later,
        "refused": tally.refused,
        "unsent": tally.unsent,
        "failed": sum(tally.errors.values()),
        "errors": {code: count for code, count in tally.errors.items() if count},
        "max_concurrent_requests": tally.most_open,
        "request_throughput": throughput,
        "output_throughput": tally.tokens / tally.seconds,
    }
    found |= _percentiles("ttft", tally.first_token_s)
    found |= _percentiles("e2el", tally.whole_s)
    if peak is not None:
        found |= {"request_goodput_over_peak": throughput / peak, **_percentiles("refusal", tally.refusal_s)}
    return found


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.percentile(seconds, _PERCENTILES) * 1e3 if seconds else [0.0] * len(_PERCENTILES)
    return {f"p{rank}_{name}_ms": float(value) for rank, value in zip(_PERCENTILES, values, strict=True)}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    return grid("", list(_COLUMNS.values()), [[_cell(row.get(key, "")) for key in _COLUMNS] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
