"""The draft process: a socket around `DraftEngine`. It answers the target only through the board."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from operator import eq
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import zmq

from ssd.config.engine import EngineConfig, WeightFormat
from ssd.config.params import DRAFT_REACH, MAX_LOOKAHEAD
from ssd.draft.drafter import cells
from ssd.draft.engine import DraftEngine
from ssd.draft.static_shapes import TreeRunner
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.core_team import CoreTeam
from ssd.execution.runner import Runner, device_of
from ssd.execution.states import StateRoom
from ssd.ipc import sockets
from ssd.ipc.arenas import DraftArenas
from ssd.ipc.board import BoardWriter
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.features import FeatureArena
from ssd.ipc.messages import TARGET_TO_DRAFT, Hello, Leave, Ready, Rejoin
from ssd.ipc.process import IDLE_MS, Child
from ssd.ipc.trace_ring import State
from ssd.kernels import build, cpu
from ssd.kernels.gpu import watch_compiles
from ssd.models import registry
from ssd.models.checkpoint import MAX_TOKENIZER, inspect, read_bounded
from ssd.models.draft_kinds import PLAIN, DraftKind, draft_kind, is_in_target, kind_named
from ssd.models.head import with_list
from ssd.models.interface import Model
from ssd.models.pairs import SHARED, borrowed, check_pair, translated
from ssd.models.vocabularies import Vocabulary
from ssd.models.weights import Progress, unseen
from ssd.speculation import sampling
from ssd.system import failpoints, registered
from ssd.tuning import draft_format

log = logging.getLogger("ssd.draft")

_WARM_UP_TOKENS = 16
# Timing of a weight format: tokens of the larger forward, and samples; fewer, but at least the third number, once the
# fourth number of seconds has passed.
_TIMED_TOKENS, _TIMED_FORWARDS, _LEAST_SAMPLES, _TIMED_S = 8, 8, 3, 0.5
# The text on which formats are compared.
_TEXT = (
    "A draft model proposes the next tokens, and a larger model checks all of them at once. The answer is the same as "
    "without the draft, but it arrives sooner: if four of five tokens are right, most steps of the larger are saved."
    """

def merge(first: list[int], second: list[int]) -> list[int]:
    # Both lists are sorted. Take the smaller of the two heads until one of them is empty.
    merged, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]
"""
)


def main(child: Child) -> None:
    """Load, join the target, and draft until this process is needed no more."""
    torch.set_grad_enabled(False)
    failpoints.arm_from_environment(child.config.failpoints)
    runners = load(child.config, child.loading)
    take_memory(runners)
    gc.freeze()  # garbage collection between two steps skips lasting objects
    board = BoardWriter(child.start.board_fd, child.config.max_num_seqs)
    socket = sockets.dealer(child.context, child.address(sockets.ENGINE), b"draft-%d" % child.epoch)
    _Draft(child, socket, runners, board).serve()


def load(config: EngineConfig, progress: Progress = unseen, vocabulary: Vocabulary | None = None) -> list[Runner]:
    """Load the draft models, smallest first, each with its own KV cache, and report to `progress`.

    `vocabulary`: the target's, if `config.target` may have another one."""
    assert config.draft is not None
    names = (*config.cascade, config.draft)

    first, last = list[int](), dict[WeightFormat, list[Runner]]()

    def loaded(weights: WeightFormat, progress: Progress) -> list[Runner]:
        if weights not in last:
            last.clear()  # before the next one takes memory
            last[weights] = [_load(config, each, weights, progress, vocabulary) for each in names]
        return last[weights]

    def tried(weights: WeightFormat) -> tuple[float, float]:
        runners = loaded(weights, unseen)
        found = _likeliest(config, runners[-1]) if vocabulary is None else []
        first.extend(() if first else found)
        unknown = float(weights.quantize != "light")
        return _seconds(config, runners), sum(map(eq, found, first)) / len(found) if found else unknown

    return loaded(draft_format.choose(config, str(build.library()), tried), progress)


def take_memory(runners: Sequence[Runner]) -> None:
    """Write all caches in host memory once: the process has its full size before the first request."""
    for cache in (runner.cache for runner in runners if runner.model.device.type == "cpu"):
        cache.keys.zero_()
        cache.values.zero_()


def _seconds(config: EngineConfig, runners: Sequence[Runner]) -> float:
    """Return the least seconds of forwards of one and of `_TIMED_TOKENS` tokens, on the draft's own cores."""
    team = CoreTeam(*config.core_counts("draft")) if config.elastic_cores else None
    if team is not None:
        team.use(all_cores=False)
    least, began = math.inf, time.perf_counter()
    for sample in range(1, _TIMED_FORWARDS + 1):
        before = time.perf_counter()
        for runner in runners:
            _warm_up(config, runner, _TIMED_TOKENS)
        now = time.perf_counter()
        least = min(least, now - before)
        if now - began > _TIMED_S and sample >= _LEAST_SAMPLES:
            break
    if team is not None:
        team.use(all_cores=True)
    return least


def _likeliest(config: EngineConfig, runner: Runner) -> list[int]:
    """Return the likeliest tokens after each of `_TEXT`, as far as the cache has room.

    There are none if the draft has states or reads hidden ones, or if the target's tokenizer cannot be read."""
    model = runner.model
    if config.features is not None or model.shape.states:
        return []
    room = min(model.shape.max_position, runner.cache.pages * config.page_size)
    ids = _text_ids(config.target)[:room]
    if not ids or max(ids) >= model.shape.vocab_size:
        return []
    found = runner.forward([Row(ids, 0, range(runner.cache.pages), len(ids))]).argmax(-1)
    listed = getattr(getattr(model, "head", None), "ids", None)
    return (found if listed is None else listed[found]).tolist()


@lru_cache(1)  # all formats are compared on the same text
def _text_ids(target: str) -> list[int]:
    from tokenizers import Tokenizer

    file = inspect(Path(target), False).directory / "tokenizer.json"
    if not file.is_file():
        return []
    try:
        return Tokenizer.from_buffer(read_bounded(file, MAX_TOKENIZER)).encode(_TEXT).ids
    except Exception as error:  # the library raises bare Exception
        log.warning("formats of the draft are not compared: cannot read %s: %s", file, error)
        return []


def _warm_up(config: EngineConfig, runner: Runner, tokens: int) -> None:
    if config.features is None:
        runner.warm_up(tokens)
    else:
        resolve_name(kind_named(config.features.kind).warm_up)(runner, tokens)


def _load(
    config: EngineConfig, name: str, weights: WeightFormat, progress: Progress, vocabulary: Vocabulary | None
) -> Runner:
    failpoints.reach("draft.load")
    dummy = config.load_format == "dummy"
    if is_in_target(name):
        checkpoint = registry.own_draft(target := inspect(Path(config.target), not dummy), name)
    else:
        checkpoint = inspect(Path(name), not dummy)
        lends = bool(checkpoint.config.get(SHARED)) or draft_kind(checkpoint) is not PLAIN
        target = inspect(Path(config.target), lends and not dummy)
    if not dummy:
        checkpoint = with_list(borrowed(checkpoint, target))
    if vocabulary is None:
        checkpoint = check_pair(target, checkpoint)
    else:
        checkpoint = translated(checkpoint, config.vocab_size, vocabulary)
    if checkpoint.translation is not None:
        log.warning("%s and its target have other vocabularies: %s", name, checkpoint.translation.words)
    dtype, device = getattr(torch, weights.dtype), device_of(config.draft_device)
    # A path may be longer than the committed tokens by a trunk and a chain.
    longest = config.max_model_len + 2 * (MAX_LOOKAHEAD + 1)
    how: Any = {"int8": weights.quantize != "none", "light": weights.quantize == "light", "activations": "int8"}
    model = registry.load(checkpoint, dtype, device, longest, dummy=dummy, progress=progress, **how)
    if config.synthetic is not None:
        model = registered.emulation("model")(model, config.synthetic, "draft")
    if model.shape.no_rollback:
        raise UsageError(f"{name} cannot draft, as it cannot be rolled back: {model.shape.no_rollback}")
    if model.shape.states and config.cascade:
        raise UsageError(f"{name}: a draft whose layers have states cannot be in a cascade")
    runner = _runner(config, model, draft_kind(checkpoint), weights)
    try:
        sampling.warm_up(device)
        _warm_up(config, runner, _WARM_UP_TOKENS)
    except UsageError as error:
        raise UsageError(f"the draft {name}: {error}") from error
    return runner


def _runner(config: EngineConfig, model: Model, kind: DraftKind, weights: WeightFormat) -> Runner:
    cuda, states = model.device.type == "cuda", model.shape.states
    attention = config.attention if cuda else "auto"
    if cuda and config.emulate is None and kind.static and not states:
        return TreeRunner(model, config, attention, capture=not config.enforce_eager)
    room = StateRoom(config.max_num_seqs, DRAFT_REACH, cells(config), MAX_LOOKAHEAD + 1)
    sizes = config.draft_num_pages, config.page_size, config.deterministic, attention
    eight_bits = weights.quantize == "light" and kind is PLAIN and cpu.present(model.device)
    runs = Runner if config.emulate is None else partial(registered.emulation("runner"), config.emulate.depth)
    return runs(model, *sizes, cache_dtype="int8" if eight_bits else "auto", state_room=room)


class _Draft:
    """The process's loop: reads messages, runs a step, and tells the supervisor that it is alive."""

    def __init__(self, child: Child, socket: zmq.Socket[Any], runners: list[Runner], board: BoardWriter) -> None:
        self._child, self._socket, self._runners, self._board = child, socket, runners, board
        self._shared = DraftProbsArena.of(child.start), FeatureArena.of(child.start)
        self._arenas = DraftArenas(self._shared, runners[-1].model.device)
        self._team = CoreTeam(*child.config.core_counts("draft")) if child.config.elastic_cores else None
        self._engine, self._leaves = self._fresh(), False

    def _fresh(self) -> DraftEngine:
        child, config = self._child, self._child.config
        known = self._board, child.epoch, config.vocab_size
        return DraftEngine(config, self._runners, *known, *self._shared, child.trace, self._team)

    def serve(self) -> None:
        self._engine.prepare()
        self._hello()
        busy, trace = False, self._child.trace
        while not self._leaves:
            self._child.beat()
            # Messages are read between any two steps, so that a new outcome ends work on old ones at once.
            if not busy:
                trace.enter(State.WAIT_FOR_TARGET if self._engine.trees else State.IDLE)
                if self._socket.poll(IDLE_MS):
                    trace.enter(State.OTHER)
                self._board.tick()
            self._read()
            busy = self._engine.step()

    def _hello(self, imports: bool = True) -> None:
        failpoints.reach("draft.hello")
        sockets.send(self._socket, Hello("draft", imports), self._child.epoch)

    def _read(self) -> None:
        for _, _, message in sockets.drained(self._socket, TARGET_TO_DRAFT):
            failpoints.reach("draft.read")
            if isinstance(message, Ready):
                if self._arenas.open(message.arenas):
                    watch_compiles(self._runners[-1].model.device, self._board.note_compile)
                    self._child.ready()
                else:
                    self._hello(imports=False)
            elif isinstance(message, Rejoin):
                self._engine = self._fresh()
                failpoints.reach("draft.rejoin")
                self._hello()
            elif isinstance(message, Leave):
                self._leaves = True
            else:
                self._engine.handle(message)
