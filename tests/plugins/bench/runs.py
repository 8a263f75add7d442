"""Runs that nobody has run, with figures that can be worked out by hand."""

from __future__ import annotations

from typing import Any

from ssd.client import Completion
from ssd.ipc.public import Metrics, Usage
from ssd.plugins.bench.runs import BenchTurn


def completion(ids: list[int], **figures: Any) -> Completion:
    metrics = Metrics(**{"rounds": 10, "verify_ms": 20.0, "tokens_per_second": 50.0} | figures)
    return Completion("", ids, [1, 2], "length", Usage(2, len(ids)), metrics)


def turns(*speeds: float, ids: list[int] | None = None, **figures: Any) -> list[BenchTurn]:
    """One request each, at these speeds."""
    return [BenchTurn([completion(ids or [1], tokens_per_second=speed, **figures)], speed) for speed in speeds]
