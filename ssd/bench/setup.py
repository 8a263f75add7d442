"""The engine that a benchmark measures, and what its report says of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ssd.config.engine import EngineConfig
from ssd.config.params import Allocation
from ssd.launch.options import EngineOptions


class Setup:
    """The engine of a benchmark, as its options say; plugins' engines differ from the options.

    `words` name the differences, for titles. `has_draft`: there is a draft without an option."""

    words = ""
    has_draft = False
    allocation: Allocation = "joint"

    @contextmanager
    def configured(self, options: EngineOptions) -> Iterator[EngineConfig]:
        """Yield the configuration; delete files made for the engine after the block. Raises UsageError."""
        from ssd.launch.resolve import resolve

        yield resolve(options)

    def facts(self) -> dict[str, Any]:
        """Return the differences as JSON."""
        return {}

    def notes(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Return sentences that a reader of the figures must know."""
        return []


PLAIN = Setup()
