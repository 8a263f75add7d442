"""Grammars of answers: a text worker compiles each before the target gets it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from functools import lru_cache

from ssd.config.engine import Limits
from ssd.config.params import Scope, Structured
from ssd.frontend.text_jobs import Broken, Compile, Compiled, TextWorker
from ssd.frontend.text_pool import TextPool

log = logging.getLogger("ssd.frontend")

_KEPT = 64
_WAITING = 64
_MADE = 4  # the grammar made of a client's tools may be this many times larger than one that it writes


@lru_cache(256)
def say_left_out(keywords: tuple[str, ...]) -> None:
    """Log once that answers need not obey these keywords of a schema."""
    log.warning("left out of a schema, since no grammar holds it: %s; with strict it is refused", ", ".join(keywords))


class GrammarChecker:
    """Has text workers compile grammars; keeps the last results, errors too, by scope. Lives in one event loop."""

    def __init__(self, texts: TextPool, limits: Limits) -> None:
        self._texts, self._most_bytes = texts, limits.max_grammar_bytes
        self._results: OrderedDict[tuple[Scope, Compile], asyncio.Future[Compiled | Broken]] = OrderedDict()

    def compile(self, asked: Structured, scope: Scope, free: str = "") -> asyncio.Future[Compiled | Broken]:
        """Return a future of the grammar, which others of the scope may share: do not cancel it."""
        most = self._most_bytes * (_MADE if asked.kind == "compiled" else 1)
        if (size := len(asked.source.encode())) > most:
            return _settled(Broken(f"structured output: it has {size} bytes; at most {most} are read"))
        job = Compile(asked, free)
        kept = scope, job
        if (known := self._results.get(kept)) is not None:
            self._results.move_to_end(kept)
            return known
        if sum(not result.done() for result in self._results.values()) >= _WAITING:
            return _settled(Broken(f"{_WAITING} grammars are being compiled already", "overloaded"))
        result = self._results[kept] = self._texts.do(TextWorker.GRAMMAR, job)
        result.add_done_callback(lambda done: self._settled(kept, done))
        return result

    def _settled(self, kept: tuple[Scope, Compile], done: asyncio.Future[Compiled | Broken]) -> None:
        reply = None if done.cancelled() else done.result()
        if reply is None or (isinstance(reply, Broken) and reply.code != "invalid_request"):
            self._results.pop(kept, None)
        elif isinstance(reply, Compiled) and reply.left_out:
            say_left_out(tuple(reply.left_out))
        for old in [old for old, result in self._results.items() if result.done()][:-_KEPT]:
            del self._results[old]


def _settled(reply: Broken) -> asyncio.Future[Compiled | Broken]:
    future: asyncio.Future[Compiled | Broken] = asyncio.get_running_loop().create_future()
    future.set_result(reply)
    return future
