"""The target process: sockets around `TargetEngine`. Single-threaded; reads requests between steps."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import zmq

from ssd.execution.core_team import CoreTeam
from ssd.execution.runner import Runner
from ssd.ipc import sockets
from ssd.ipc.arenas import TargetArenas
from ssd.ipc.board import BoardReader
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.features import FeatureArena
from ssd.ipc.messages import PEER_TO_TARGET, Abort, Emission, Hello, Load, Readers, Step, Submit
from ssd.ipc.process import IDLE_MS, Child
from ssd.ipc.public import Message
from ssd.ipc.trace_ring import State
from ssd.kernels.gpu import watch_compiles
from ssd.layers.ranks import SINGLE
from ssd.system import failpoints
from ssd.tuning.costs import CostTable
from ssd.verifier.board_proposer import BoardProposer
from ssd.verifier.core_choice import CoreChoice
from ssd.verifier.engine import TargetEngine
from ssd.verifier.inline_proposer import inline
from ssd.verifier.loading import load
from ssd.verifier.overlap import overlapped
from ssd.verifier.proposer import Proposer
from ssd.verifier.ranks import Leader, follow, meet
from ssd.verifier.rehearsal import Experience, PairRehearsal, TargetRehearsal
from ssd.verifier.suffix_memory import SuffixMemory
from ssd.verifier.verification import FeatureExport, PlainVerification

log = logging.getLogger("ssd.target")

# Seconds that a loaded target waits for its draft, which loads beside it, before it says that it is ready. A draft that
# comes later is measured while there is no request.
_DRAFT_LOADS_S = 60.0
_CALL_AGAIN_S = 0.25  # seconds until the supervisor is asked for a draft again: the last one may just be ending
_VECTORS = 16  # embeddings in a message: at most a quarter of it


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
    """Cut a step into messages, if several prompts have log-probabilities, or many embeddings.

    The log-probabilities of one prompt may fill half a message."""
    scored = [[emission] for emission in step.emissions if emission.prompt_logprobs]
    vectors = [emission for emission in step.emissions if emission.embedding]
    if len(scored) < 2 and len(vectors) <= _VECTORS:
        return [step]
    others = [emission for emission in step.emissions if not emission.prompt_logprobs and not emission.embedding]
    starts = range(0, len(vectors), _VECTORS)
    parts = [*scored, *(vectors[start : start + _VECTORS] for start in starts), others]
    return [Step(part, step.load) for part in parts if part]


class Target:
    """The loop over a `TargetEngine`. Frontend and draft connect to `socket`."""

    def __init__(self, child: Child, socket: zmq.Socket[Any], loaded: tuple[Runner, frozenset[int]]) -> None:
        self._child, self._socket = child, socket
        self._frontend, self._draft = b"", b""
        self._draft_epoch = 0
        self._load, self._orphaned = Load(), False
        self._emissions: list[Emission] | None = None
        config, (runner, stops) = child.config, loaded
        self._device = runner.model.device
        draft_probs, hidden = DraftProbsArena.of(child.start), FeatureArena.of(child.start, writable=True)
        self._arenas = TargetArenas(config, (draft_probs, hidden), runner.model.device)
        features = FeatureExport(hidden, config.features.layers) if hidden and config.features else None
        plain = PlainVerification(runner, child.trace, features)
        proposer: Proposer = Proposer()
        self._board: BoardProposer | None = None
        on_cpu = runner.model.device.type == "cpu" and config.emulate is None and config.tensor_parallel_size == 1
        own, every = config.core_counts("target")
        self._team = CoreTeam(own, every) if on_cpu and every > 1 else None
        self._experience: Experience | None = None
        self._used_at = self._call_at = 0.0  # when the draft was last used, and may be called next
        reader = BoardReader(child.start.board_fd, config.max_num_seqs, runner.model.shape.vocab_size)
        speculates = (config.has_draft or config.speculation.mode != "ar") and not runner.model.shape.no_rollback
        memory = SuffixMemory.of(config) if speculates else None
        draft = inline(config, plain, reader, memory) if config.inline_draft else None
        if draft is not None and not config.drafts_apart:
            proposer = draft
        elif speculates:
            self._experience = Experience(config)
            tuning, remote = self._experience.tuning, config.link is not None
            if draft is not None:
                tuning.estimates.costs.inline = CostTable(draft.times.drafting)
            elastic = self._team if config.elastic_cores else None
            shared = reader, self._to_draft, draft_probs, child.trace
            proposer = self._board = BoardProposer(*shared, tuning, elastic, remote, memory, runner.overlaps, draft)
        verification = overlapped(plain, config, reader, proposer.asks, draft.device if draft else None)
        learns = None if self._experience is None else self._experience.tuning
        cores = None if self._team is None else CoreChoice(self._team, learns)
        self.engine = TargetEngine(config, verification, proposer, stops, cores, runner.state_slots)
        self._rehearsal = TargetRehearsal(config, runner, self.engine.pool)

    def serve(self) -> None:
        if self._experience is not None:
            self._await_draft(self._experience)
            self._prepare(self._experience)
            self._experience.tuning.prepare(self._child.config.speculation)
        self.engine.prepare()
        watch_compiles(self._device, self.engine.note_compile)
        self._child.ready()
        self._used_at = time.monotonic()
        while True:
            self.turn()

    def _await_draft(self, experience: Experience) -> None:
        config = self._child.config
        deadline = time.monotonic() + (_DRAFT_LOADS_S if config.draft is not None and config.drafts_apart else 0.0)
        while experience.wanting and not self._draft and time.monotonic() < deadline:
            self._child.beat()
            self._socket.poll(IDLE_MS)
            self._read()

    def _prepare(self, experience: Experience) -> None:
        """Measure missing costs while there is no request; save what was learned."""
        joined, costs = bool(self._draft), experience.tuning.estimates.costs
        begins = joined or (costs.inline is not None and not costs.tables["verify"].known)
        if experience.wanting and begins and self._board is not None:
            tell, board = self._to_draft if joined else None, self._board.session.board
            for _ in PairRehearsal(self._rehearsal, tell, board, self._team).fill(costs):
                self._child.beat()
                self._read()
                if self.engine.busy:
                    return
            if joined:
                experience.measured()
        experience.save()

    def turn(self) -> None:
        """Read what has arrived and take a step; without work, wait a moment."""
        self._child.beat()
        if not self.engine.busy:
            self._child.trace.enter(State.IDLE)
            if self._experience is not None:
                self._prepare(self._experience)
            self._socket.poll(IDLE_MS)
        self._read()
        if self._board is not None and self._child.config.parks_draft:
            self._park_or_call(self._board)
        if self.engine.busy:
            self._child.trace.enter(State.OTHER)
        failpoints.reach("target.step")
        self._emissions = self.engine.step(self._deliver)
        if not self.engine.busy:
            self._deliver()
        if self._orphaned:
            self.engine.abort_all()
            self._orphaned = False

    def _park_or_call(self, board: BoardProposer) -> None:
        now, is_measured = time.monotonic(), self._experience is None or not self._experience.wanting
        if board.plans.wants_draft(self.engine.scheduler.running):
            self._used_at = now
            if board.state == "parked" and now >= self._call_at:
                self._child.want_draft()
                self._call_at = now + _CALL_AGAIN_S
        elif is_measured and now >= self._used_at + self._child.config.idle_draft_s:
            board.session.park()

    def _deliver(self) -> None:
        """Send the last step to the frontend; if that has died, `turn` aborts its requests."""
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
        """Handle all messages; only the frontend that said hello last may ask for anything."""
        for peer, epoch, message in sockets.drained(self._socket, PEER_TO_TARGET):
            if isinstance(message, Hello):
                self._hello(peer, epoch, message)
            elif isinstance(message, Readers):
                if peer == self._draft and self._board is not None:
                    self._board.session.change(message.reads, message.lost)
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
        self._child.answer_hello(self._socket, peer, hello, self._arenas.handles)
        if hello.role == "frontend":
            if peer != self._frontend:
                self._deliver()
                self.engine.abort_all()
                self._orphaned = False
            self._frontend = peer
        elif self._board is not None and self._board.session.join(epoch, hello.reads):
            self._draft, self._draft_epoch = peer, epoch

    def _to_draft(self, message: Message) -> bool:
        return sockets.send(self._socket, message, self._draft_epoch, self._draft)
