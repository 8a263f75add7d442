"""A runner whose forwards take as long as a device that is not here."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import Tensor

from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.models.interface import Model, Plan
from ssd.profile import Times

log = logging.getLogger("ssd.emulation")

# Sleeping is late by less than this; the rest is spent looking at the clock.
_AWAKE_S = 0.3e-3


class PacedRunner(Runner):
    """Computes, then waits until as many seconds have passed as `takes` says for the tokens of the batch."""

    def __init__(
        self, model: Model, num_pages: int, page_size: int, deterministic: bool, takes: Times, attention: str = "auto"
    ) -> None:
        super().__init__(model, num_pages, page_size, deterministic, attention)
        self.overlaps = True
        self._takes = takes.line

    def run(self, token_ids: Sequence[int], plan: Plan, wanted: Sequence[int], meanwhile: Task = nothing) -> Tensor:
        end = time.perf_counter() + self._takes.at(len(token_ids))
        logits = super().run(token_ids, plan, wanted, meanwhile)
        wait_until(end)
        return logits


def runner(
    model: Model, num_pages: int, page_size: int, deterministic: bool, takes: Times | None, attention: str = "auto"
) -> Runner:
    """A runner as fast as this machine, or one that takes its time."""
    if takes is None:
        return Runner(model, num_pages, page_size, deterministic, attention)
    log.warning("emulated: a forward takes %.4g ms, and %.4g more for each token", *(1e3 * s for s in takes.line))
    return PacedRunner(model, num_pages, page_size, deterministic, takes, attention)


def wait_until(end: float) -> None:
    """Return when `time.perf_counter()` is `end`, some microseconds late at most where a core is free."""
    left = end - time.perf_counter()
    if left > _AWAKE_S:
        time.sleep(left - _AWAKE_S)
    while time.perf_counter() < end:
        pass
