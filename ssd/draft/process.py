"""The draft process: a socket around `DraftEngine`. It only ever talks through the board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import zmq

from ssd import failpoints
from ssd.config import EngineConfig
from ssd.draft import head
from ssd.draft.engine import DraftEngine
from ssd.draft.static import TreeRunner
from ssd.emulation import pacing, synthetic
from ssd.errors import SsdError, UsageError
from ssd.execution.runner import Runner, device_of
from ssd.ipc import sockets
from ssd.ipc.arenas import DraftArenas
from ssd.ipc.board import BoardWriter
from ssd.ipc.messages import TARGET_TO_DRAFT, Hello, Ready, Refused, Rejoin
from ssd.ipc.process import Child
from ssd.models import registry
from ssd.models.checkpoint import borrowed, inspect
from ssd.models.heads import is_head
from ssd.models.weights import Progress, unseen
from ssd.monitor.lanes import State
from ssd.params import MAX_LOOKAHEAD

_IDLE_MS = 100


def main(child: Child) -> None:
    """Load, join the target, speculate until the supervisor ends this process."""
    torch.set_grad_enabled(False)
    failpoints.arm_from_environment(child.config.failpoints)
    runners = load(child.config, child.loading)
    board = BoardWriter(child.start.board_fd, child.config.max_num_seqs)
    socket = sockets.dealer(child.context, child.address(sockets.ENGINE), b"draft-%d" % child.epoch)
    _Draft(child, socket, runners, board).serve()


def load(config: EngineConfig, progress: Progress = unseen) -> list[Runner]:
    """The draft models, smallest first, each with a cache of its own (contract C1). `progress` hears how much of each
    one's weights has been read."""
    assert config.draft is not None
    return [_load(config, Path(directory), progress) for directory in (*config.cascade, config.draft)]


def _load(config: EngineConfig, directory: Path, progress: Progress) -> Runner:
    failpoints.reach("draft.load")
    dummy = config.load_format == "dummy"
    checkpoint = inspect(directory, not dummy)
    if not dummy:
        checkpoint = borrowed(checkpoint, inspect(Path(config.target)))
    dtype, device = getattr(torch, config.draft_dtype), device_of(config.draft_device)
    # A path runs ahead of the committed tokens by a line and a chain.
    longest = config.max_model_len + 2 * (MAX_LOOKAHEAD + 1)
    int8 = config.draft_quantize == "int8"
    model = registry.load(checkpoint, dtype, device, longest, dummy=dummy, int8=int8, advice=True, progress=progress)
    if config.synthetic is not None:
        model = synthetic.scripted(model, config.synthetic, "draft")
    takes = None if config.emulate is None else config.emulate.depth
    attention = config.attention if device.type == "cuda" else "auto"
    if device.type == "cuda" and takes is None and not is_head(checkpoint):
        runner: Runner = TreeRunner(model, config, attention, capture=not config.enforce_eager)
    else:
        runner = pacing.runner(model, config.draft_num_pages, config.page_size, config.deterministic, takes, attention)
    if is_head(checkpoint):
        head.warm_up(runner, _WARM_UP_TOKENS)
        return runner
    try:
        runner.warm_up(_WARM_UP_TOKENS)
    except UsageError as error:
        raise UsageError(f"the draft {directory}: {error}") from error
    return runner


_WARM_UP_TOKENS = 16


class _Draft:
    def __init__(self, child: Child, socket: zmq.Socket[Any], runners: list[Runner], board: BoardWriter) -> None:
        self._child, self._socket, self._runners, self._board = child, socket, runners, board
        self._arenas = DraftArenas(child.start, runners[-1].model.device)
        self._engine = self._fresh()

    def _fresh(self) -> DraftEngine:
        child, vocab_size = self._child, self._child.config.vocab_size
        arenas = self._arenas.laws, self._arenas.features
        return DraftEngine(child.config, self._runners, self._board, child.epoch, vocab_size, *arenas, child.lane)

    def serve(self) -> None:
        self._hello()
        busy, lane = False, self._child.lane
        while True:
            self._child.beat()
            # Between two depths a newer outcome may have arrived: dead work is dropped at once.
            if not busy:
                lane.enter(State.WAIT_FOR_TARGET if self._engine.trees else State.IDLE)
                if self._socket.poll(_IDLE_MS):
                    lane.enter(State.OTHER)
                self._board.tick()
            self._read()
            busy = self._engine.step()

    def _hello(self, imports: bool = True) -> None:
        failpoints.reach("draft.hello")
        config = self._child.config
        sockets.send(self._socket, Hello("draft", config.vocab_size, config.digest, imports), self._child.epoch)

    def _read(self) -> None:
        for _, _, message in sockets.drained(self._socket, TARGET_TO_DRAFT):
            failpoints.reach("draft.read")
            if isinstance(message, Ready):
                if self._arenas.open(message.arenas):
                    self._child.ready()
                else:
                    self._hello(imports=False)
            elif isinstance(message, Refused):
                raise SsdError(message.message)
            elif isinstance(message, Rejoin):
                self._engine = self._fresh()
                failpoints.reach("draft.rejoin")
                self._hello()
            else:
                self._engine.handle(message)
