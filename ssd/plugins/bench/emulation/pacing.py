"""A runner whose forwards take as long as on an emulated device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ssd.config.emulation import ForwardTime
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Result, Runner
from ssd.models.interface import Model
from ssd.plugins.bench.emulation.agreement import line

log = logging.getLogger("ssd.plugins.bench.emulation")

# A sleep ends late by less than this; the rest of the time is spent polling the clock.
_AWAKE_S = 0.3e-3


class PacedRunner(Runner):
    """Computes, then waits until the forward has taken the time that `takes` gives for its tokens."""

    def __init__(self, takes: ForwardTime, model: Model, *runner: Any, **fields: Any) -> None:
        super().__init__(model, *runner, **fields)
        self.overlaps = True
        self._takes = line(takes)
        log.warning("emulated: a forward takes %.4g ms, and %.4g more for each token", *(1e3 * s for s in self._takes))

    def compute(self, tokens: int, forward: Callable[[], Result], meanwhile: Task = nothing) -> Result:
        end = time.perf_counter() + self._takes.at(tokens)
        result = super().compute(tokens, forward, meanwhile)
        wait_until(end)
        return result


def wait_until(end: float) -> None:
    """Wait until `time.perf_counter()` is `end`, at most some microseconds longer if a core is free."""
    left = end - time.perf_counter()
    if left > _AWAKE_S:
        time.sleep(left - _AWAKE_S)
    while time.perf_counter() < end:
        pass
