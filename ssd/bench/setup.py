"""The engine that a benchmark measures, and what its report says of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ssd.config.engine import EngineConfig
from ssd.config.params import Allocation
from ssd.launch.options import EngineOptions

if TYPE_CHECKING:
    from ssd.bench.figures import Row


class Setup:
    """The engine of a benchmark, as its options say. Plugins have others (`ssd.system.registered.BENCH_SETUPS`)."""

    @property
    def words(self) -> str:
        """Return the differences from the engine of the options in words, for titles."""
        return ""

    @property
    def has_draft(self) -> bool:
        """Return True if there is a draft whatever the options say."""
        return False

    @property
    def allocation(self) -> Allocation:
        return "joint"

    @contextmanager
    def configured(self, options: EngineOptions) -> Iterator[EngineConfig]:
        """Yield the engine's configuration; delete files that were made for the engine after the block.

        Raises UsageError."""
        from ssd.launch.resolve import resolve

        yield resolve(options)

    def facts(self) -> dict[str, Any]:
        """Return the differences as JSON."""
        return {}

    def notes(self, rows: Sequence[Row]) -> list[str]:
        """Return sentences that a reader of the figures must know."""
        return []


PLAIN = Setup()
