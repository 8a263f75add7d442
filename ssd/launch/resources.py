"""Resources that an engine's processes share: run directory, death pipe and shared memory."""

from __future__ import annotations

import os
from contextlib import ExitStack

from ssd.config.engine import Cpus, EngineConfig
from ssd.ipc import board, trace_ring
from ssd.ipc.layouts import draft_probs_layout, feature_layout
from ssd.ipc.process import HEARTBEAT_BYTES, Heartbeats, Start, memory_file
from ssd.ipc.run_directory import run_directory


class SharedResources:
    """Owns the shared resources and names them to each process. `held` releases them when it closes.

    Other machines run only ranks of the target, which need no board, probabilities, hidden states or trace rings."""

    def __init__(self, held: ExitStack, config: EngineConfig, only_ranks: bool = False) -> None:
        self._held, self._config, self.kernels = held, config, True
        self.directory = held.enter_context(run_directory())
        death_read, death_write = os.pipe()
        death_fd, self._death_pipe = self.hold(death_read), os.fdopen(death_write, "wb")
        held.callback(self._death_pipe.close)
        self.trace_fd = -1 if only_ranks else self._memory("trace", trace_ring.SIZE_BYTES)
        self._descriptors = {
            "death_fd": death_fd,
            "heartbeat_fd": self._memory("heartbeat", HEARTBEAT_BYTES),
            "trace_fd": self.trace_fd,
            "board_fd": -1 if only_ranks else self._memory("board", board.size_bytes(config.max_num_seqs)),
        }
        if config.draft is not None and config.speculation.rule().needs_draft_probs and not only_ranks:
            layout = draft_probs_layout(config.max_num_seqs, config.speculation, config.vocab_size)
            self._descriptors["draft_probs_fd"] = self._memory("draft-probs", layout.size_bytes)
        if config.features is not None and not only_ranks:
            self._descriptors["features_fd"] = self._memory("features", feature_layout(config).size_bytes)

    def hold(self, descriptor: int) -> int:
        self._held.callback(os.close, descriptor)
        return descriptor

    def _memory(self, name: str, size: int) -> int:
        return self.hold(memory_file(f"ssd-{name}", size))

    def heartbeats(self) -> Heartbeats:
        """Map the turn counters of all processes. The result keeps a descriptor open."""
        return Heartbeats(self._descriptors["heartbeat_fd"])

    def start(
        self, role: str, epoch: int, cpus: Cpus, rank: int, group: int, http_fd: int = -1, meeting: str = ""
    ) -> Start:
        return Start(
            role=role,
            epoch=epoch,
            run_directory=str(self.directory),
            config=self._config,
            cpus=cpus,
            http_fd=http_fd,
            kernels=self.kernels,
            rank=rank,
            group=group,
            meeting=meeting,
            **self._descriptors,
        )

    def close_death_pipe(self) -> None:
        """End every process that listens."""
        self._death_pipe.close()
