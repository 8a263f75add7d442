"""Requests that wait until their grammars are compiled beside the loop."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

from ssd.config.engine import EngineConfig
from ssd.config.params import Structured
from ssd.errors import RequestError
from ssd.grammar.background import BackgroundCompiler, begun
from ssd.grammar.matcher import Grammar, GrammarCompiler
from ssd.verifier.sequence import Sequence

_PATIENCE_S = 0.005


class GrammarQueue:
    def __init__(self, config: EngineConfig, ends: Iterable[int]) -> None:
        known = Path(config.target), config.vocab_size, frozenset(ends)
        self._compiler = BackgroundCompiler(lambda: GrammarCompiler(*known))
        self.waiting: dict[Sequence, Future[Grammar]] = {}

    def prepare(self) -> None:
        self._compiler.prepare()

    def add(self, sequence: Sequence, asked: Structured) -> None:
        self.waiting[sequence] = self._compiler.compile(asked, (sequence.owner, sequence.params.cache_salt))

    def discard(self, request: int | None = None) -> None:
        for sequence in [s for s in self.waiting if request in (None, s.request)]:
            del self.waiting[sequence]

    def take(self, wait: bool) -> list[Sequence]:
        """Remove and return requests with a compiled grammar or a `failure`; `wait` a moment for one."""
        if wait:
            futures.wait(self.waiting.values(), _PATIENCE_S, futures.FIRST_COMPLETED)
        done = [sequence for sequence, future in self.waiting.items() if future.done()]
        for sequence in done:
            try:
                sequence.grammar = begun(self.waiting.pop(sequence))
            except RequestError as error:
                sequence.failure = str(error)
        return done
