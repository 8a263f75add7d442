"""The target process: sockets around `TargetEngine`. Single-threaded; requests are read between steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
import zmq

from ssd import failpoints
from ssd.execution.runner import Runner
from ssd.ipc import sockets
from ssd.ipc.arenas import TargetArenas
from ssd.ipc.board import BoardReader
from ssd.ipc.messages import Abort, Emission, Hello, Load, Message, Step, Submit
from ssd.ipc.process import Child
from ssd.ipc.reception import IDLE_MS, arrived, welcome
from ssd.layers.ranks import SINGLE
from ssd.monitor.lanes import State
from ssd.target.ahead import launcher
from ssd.target.board_proposer import BoardProposer
from ssd.target.engine import TargetEngine
from ssd.target.features import FeatureExport
from ssd.target.loading import load
from ssd.target.proposer import NoProposer, Proposer
from ssd.target.ranks import Leader, follow, meet

log = logging.getLogger("ssd.target")


def main(child: Child) -> None:
    """Load, say ready, serve until the supervisor ends this process."""
    torch.set_grad_enabled(False)
    failpoints.arm_from_environment(child.config.failpoints)
    if child.start.rank:
        follow(child)
        return
    socket = sockets.router(child.context, child.address(sockets.ENGINE))
    parallel = child.config.tensor_parallel_size > 1
    ranks, tell = (meet(child), Leader(child).tell) if parallel else (SINGLE, None)
    loaded = load(child.config, ranks, tell, child.loading)
    Target(child, socket, loaded).serve()


def messages(step: Step) -> list[Step]:
    """A step as it is sent: in one message, unless several prompts have log-probabilities, which may half fill one."""
    scored = [emission for emission in step.emissions if emission.prompt_logprobs]
    if len(scored) < 2:
        return [step]
    others = [emission for emission in step.emissions if not emission.prompt_logprobs]
    return [Step([emission], step.load) for emission in scored] + ([Step(others, step.load)] if others else [])


class Target:
    """The loop over a `TargetEngine`; `socket` is what frontend and draft connect to."""

    def __init__(self, child: Child, socket: zmq.Socket[Any], loaded: tuple[Runner, frozenset[int]]) -> None:
        self._child, self._socket = child, socket
        self._frontend, self._draft = b"", b""
        self._draft_epoch = 0
        self._load, self._orphaned = Load(), False
        self._emissions: list[Emission] | None = None
        config, (runner, stops) = child.config, loaded
        self._arenas = TargetArenas(child.start, runner.model.device)
        self._board: BoardProposer | None = None
        ahead = None
        if config.draft is not None:
            reader = BoardReader(child.start.board_fd, config.max_num_seqs, runner.model.shape.vocab_size)
            self._board = BoardProposer(reader, self._to_draft, self._arenas.laws, child.lane, config.one_bus)
            ahead = launcher(config, runner, reader, self._board.asks)
        proposer: Proposer = NoProposer() if self._board is None else self._board
        arena = self._arenas.features
        features = FeatureExport(arena, config.features.layers) if arena and config.features else None
        self.engine = TargetEngine(config, runner, proposer, stops, child.lane, features, ahead)

    def serve(self) -> None:
        self._child.ready()
        while True:
            self.turn()

    def turn(self) -> None:
        """What has arrived, then a step; or a moment of waiting for work."""
        self._child.beat()
        if not self.engine.busy:
            self._child.lane.enter(State.IDLE)
            self._socket.poll(IDLE_MS)
        self._read()
        if self.engine.busy:
            self._child.lane.enter(State.OTHER)
        failpoints.reach("target.step")
        self._emissions = self.engine.step(self._deliver)
        if not self.engine.busy:
            self._deliver()
        if self._orphaned:
            self.engine.abort_all()
            self._orphaned = False

    def _deliver(self) -> None:
        """Tell the frontend of the step before, if that is not done. Once it has died nobody waits for its requests any
        more."""
        if self._emissions is None:
            return
        step, self._emissions = Step(self._emissions, self.engine.load()), None
        if step.emissions:
            sent = (sockets.deliver(self._socket, m, self._child.epoch, self._frontend) for m in messages(step))
            self._orphaned |= not all(sent)
        elif step.load != self._load:
            sockets.send(self._socket, step, self._child.epoch, self._frontend)  # figures may be lost
        self._load = step.load

    def _read(self) -> None:
        """Handle every message that is there; of requests only those of the frontend that said hello last."""
        for peer, epoch, message in arrived(self._socket):
            if isinstance(message, Hello):
                self._hello(peer, epoch, message)
            elif peer != self._frontend:
                log.warning("dropped a message of %r, which is not the frontend", peer)
            elif isinstance(message, Submit):
                failpoints.reach("target.submit")
                self.engine.submit(message)
            elif isinstance(message, Abort):
                self.engine.abort(message.request)

    def _hello(self, peer: bytes, epoch: int, hello: Hello) -> None:
        if not hello.imports and epoch >= self._draft_epoch:
            self._arenas.withdraw()
        if not welcome(self._socket, self._child, peer, hello, self._arenas.handles):
            return
        if hello.role == "frontend":
            if peer != self._frontend:
                self._deliver()
                self.engine.abort_all()
                self._orphaned = False
            self._frontend = peer
        elif self._board is not None and self._board.join(epoch):
            self._draft, self._draft_epoch = peer, epoch

    def _to_draft(self, message: Message) -> bool:
        return sockets.send(self._socket, message, self._draft_epoch, self._draft)
