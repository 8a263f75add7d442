"""Switches the cores that this process computes on: its own, or also the other model's while that rests."""

from __future__ import annotations

import torch


class CoreTeam:
    """Switches the compute threads of this process between `own` and `all` cores; a switch takes microseconds.

    Thread i of OpenMP, and of our kernels, is bound to core i of `EngineConfig.cpus_of`, whose own cores come first
    (`ssd.launch.children`). Kernels give the same bits with any number of threads."""

    def __init__(self, own: int, all: int) -> None:
        self.own = own
        self.all = self._limit = self._now = all
        self.alone = True
        """True while this process has all cores."""

    def use(self, all_cores: bool) -> None:
        """Compute on all cores, as far as `limit` lets, or only on this process's own, from the next kernel on."""
        self.alone = all_cores
        wanted = self._limit if all_cores else self.own
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted

    def limit(self, count: int) -> None:
        """Compute on `count` cores at most while this process has all."""
        self._limit = count
        self.use(self.alone)
