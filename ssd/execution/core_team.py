"""The cores that this process computes on: its own, or also those of the other model while that rests."""

from __future__ import annotations

import torch

from ssd.config.engine import EngineConfig


class CoreTeam:
    """Switches the compute threads of this process between two numbers, in microseconds.

    `role` is "target" or "draft". OpenMP has bound thread i to core i of `EngineConfig.cpus_of`, whose own cores come
    first (`ssd.launch.children`). Kernels give the same bits with any number of threads. Without elastic cores there is
    one number, and nothing to switch."""

    def __init__(self, config: EngineConfig, role: str) -> None:
        own = config.target_cpus if role == "target" else config.draft_cpus
        self._own, self._all = len(own), len(config.cpus_of(role)) if config.elastic_cores else len(own)
        self._now = self._all

    def use(self, all_cores: bool) -> None:
        """Compute on all cores from the next kernel on, or on this process's own."""
        wanted = self._all if all_cores else self._own
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted
