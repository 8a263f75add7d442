"""Switches the cores that this process computes on."""

from __future__ import annotations

import torch


class CoreTeam:
    """Switches this process between its `own` and `all` cores; takes microseconds.

    Thread i of OpenMP and of our kernels is bound to core i of `EngineConfig.cpus_of`. Kernels give the same bits with
    any number of threads."""

    def __init__(self, own: int, all: int) -> None:
        self.own = own
        self.all = self._limit = self._now = all
        self.alone = True
        """True while this process has all cores."""

    def use(self, all_cores: bool) -> None:
        """Compute on all cores, up to `limit`, or only on the own ones, from the next kernel on."""
        self.alone = all_cores
        wanted = self._limit if all_cores else self.own
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted

    def limit(self, count: int) -> None:
        """Compute on `count` cores at most while this process has all."""
        self._limit = count
        self.use(self.alone)
