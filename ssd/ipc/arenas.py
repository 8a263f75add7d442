"""The arenas beside the board as a process has them, and where their rows lie.

Where target and draft both run on GPUs, the target exports memory of its own for them and its `Ready` tells the draft,
which opens it. Where either fails, a line in the log says why, and the rows are in the memory file of the supervisor's,
as they are on CPUs. The target holds what it has exported to its own end, the driver what a draft has opened to that
draft's: a draft that is killed gives back all, and one that outlives its target reads no freed memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ssd.ipc.arena import Arena
from ssd.ipc.cuda import CudaError
from ssd.ipc.features import FeatureArena
from ssd.ipc.laws import LawArena
from ssd.ipc.layouts import law_layout, on_gpus
from ssd.ipc.messages import ArenaHandle
from ssd.ipc.process import Start
from ssd.ipc.shared import Exported, Imported

log = logging.getLogger("ssd.ipc")


class _Arenas:
    """`laws` where the sampler looks at them, `features` where the draft is a head that reads them; each else None."""

    def __init__(self, start: Start, writes_features: bool) -> None:
        config = start.config
        self.laws: LawArena | None = None
        if start.laws_fd >= 0:
            layout = law_layout(config.max_num_seqs, config.speculation, config.vocab_size)
            self.laws = LawArena(start.laws_fd, layout)
        self.features: FeatureArena | None = None
        if start.features_fd >= 0:
            self.features = FeatureArena(start.features_fd, config, writes_features)
        named: dict[str, Arena | None] = {"laws": self.laws, "features": self.features}
        self._named = {name: arena for name, arena in named.items() if arena is not None}


class TargetArenas(_Arenas):
    """The target's. `handles` are for its draft."""

    def __init__(self, start: Start, device: torch.device) -> None:
        super().__init__(start, writes_features=True)
        self.handles: list[ArenaHandle] = []
        self._exported: list[Exported] = []
        if not on_gpus(start.config.device, start.config.draft_device):
            return
        try:
            for name, arena in self._named.items():
                self._exported.append(Exported(name, arena.layout.row_bytes, device))
                arena.place(self._exported[-1].data)
        except CudaError as error:
            log.warning("shares memory of the host with the draft, which costs copies: %s", error)
            self.withdraw()
            for exported in self._exported:
                exported.close()
        else:
            self.handles = [exported.handle for exported in self._exported]

    def withdraw(self) -> None:
        """Use memory of the host from now on: the draft cannot open what was exported. Some older draft may have it
        open still, so that it is not freed."""
        self.handles = []
        for arena in self._named.values():
            arena.place(None)


class DraftArenas(_Arenas):
    """The draft's, on its `device`."""

    def __init__(self, start: Start, device: torch.device) -> None:
        super().__init__(start, writes_features=False)
        self._device = device
        self._handles: Sequence[ArenaHandle] = []
        self._imported: list[Imported] = []

    def open(self, handles: Sequence[ArenaHandle]) -> bool:
        """Use what the target exports, and end the use of all that it no longer does. False: that cannot be, and
        memory of the host is used."""
        if handles == self._handles:
            return True
        self.close()
        try:
            for handle in handles:
                imported = Imported(handle, self._device)
                self._imported.append(imported)
                self._named[handle.name].place(imported.data)
        except CudaError as error:
            log.warning("shares memory of the host with the target, which costs copies: %s", error)
            self.close()
            return False
        self._handles = handles
        return True

    def close(self) -> None:
        """Open nothing of the target's any more."""
        for arena in self._named.values():
            arena.place(None)
        for imported in self._imported:
            imported.close()
        self._handles, self._imported = [], []
