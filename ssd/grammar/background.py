"""Compiles grammars in a thread, for a loop that must not wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

from ssd.config.params import Scope, Structured
from ssd.errors import RequestError, SsdError, refused_grammar
from ssd.grammar.matcher import Grammar, GrammarCompiler, GrammarState
from ssd.grammar.source import serialized

_KEPT = 32  # compiled grammars


class BackgroundCompiler:
    """Compiles grammars in one thread, made on first use, and keeps the last results, for each scope."""

    def __init__(self, compiler: Callable[[], GrammarCompiler]) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._made = lru_cache(1)(compiler)
        self._results: OrderedDict[tuple[Scope, Structured], Future[Grammar]] = OrderedDict()

    def prepare(self) -> None:
        """Load the tokenizer in the calling thread: loading it later would stop every thread for a while."""
        with suppress(SsdError):  # a grammar's compilation raises it again
            self._made().load()

    def compile(self, asked: Structured, scope: Scope) -> Future[Grammar]:
        """Return a future of the grammar, or of an error. Others of the scope may share it: do not cancel it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammars")
        kept = scope, asked
        if kept not in self._results:
            self._results[kept] = self._thread.submit(lambda: self._made().compile(serialized(asked)))
        self._results.move_to_end(kept)
        if len(self._results) > _KEPT:
            self._results.popitem(last=False)
        return self._results[kept]


def begun(compiled: Future[Grammar]) -> GrammarState:
    """Return a new answer's state in a compiled grammar. Raises RequestError for any failure."""
    try:
        return compiled.result().begin()
    except RequestError:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise refused_grammar(f"the grammar cannot be compiled: {error}") from None
