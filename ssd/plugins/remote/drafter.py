"""The process of `ssd draft`: the usual draft engine with a target elsewhere (docs/remote.md)."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.draft.process import load
from ssd.errors import EngineDeadError, SsdError, UsageError
from ssd.execution.runner import Runner
from ssd.ipc.connection import Connection
from ssd.ipc.curve import client_keys
from ssd.ipc.messages import Admit, Rejoin
from ssd.ipc.process import log_level
from ssd.ipc.public import Message, printable
from ssd.models.checkpoint import inspect
from ssd.models.vocabularies import Vocabulary, vocabulary_of
from ssd.plugins.remote import link
from ssd.plugins.remote.configuration import PAGE_SIZE
from ssd.plugins.remote.engine import LinkedDraftEngine
from ssd.plugins.remote.reconnection import Reconnection

log = logging.getLogger("ssd.draft")

_IDLE_S = 0.1
_ANSWER_S = 10.0  # to connect, shake hands and hear the terms


class LinkLost(Exception):
    """The connection is over, or could not be made; another one may work. The message says why."""


def main() -> NoReturn:
    """Draft for the engine that the document on an inherited descriptor names, until a signal comes."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        config = msgspec.json.decode(file.read(), type=EngineConfig)
    logging.basicConfig(stream=sys.stderr, level=log_level(), format="ssd draft: %(message)s")
    torch.set_grad_enabled(False)
    code = 130
    try:
        RemoteDrafter(config).serve()
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        pass
    sys.stderr.flush()
    os._exit(code)


class RemoteDrafter:
    """Drafts for an engine over one connection after the other; reloads the model only for other terms.

    `beat` is called in every turn. `settled` gets words for people about acceptance and each new failure. With `texts`
    this machine's tokenizer makes the prompts; else the draft takes over the engine's vocabulary if its own is
    refused."""

    def __init__(
        self,
        config: EngineConfig,
        beat: Callable[[], None] = lambda: None,
        settled: Callable[[str], None] | None = None,
        texts: bool = False,
    ) -> None:
        upstream = config.upstream
        assert upstream is not None and config.draft is not None
        self._config, self._beat, self._settled, self._texts = config, beat, settled, texts
        self._address = upstream.draft_connect
        self._keys = None if upstream.draft_keys is None else client_keys(Path(upstream.draft_keys))
        self._vocabulary: Vocabulary | None = vocabulary_of(Path(config.target))
        self._grammars = True
        vocab_size = inspect(Path(config.draft), weights=False).count("vocab_size")
        self._offer = link.Offer(config.draft_name, link.fingerprint(self._vocabulary), vocab_size)
        self._loaded: tuple[link.Offer, link.Terms, EngineConfig, list[Runner]] | None = None
        self._reconnection = Reconnection(self._settled or log.warning)

    def serve(self) -> NoReturn:
        """Draft over one connection after the other. Raises SsdError if another one would not help."""
        while True:
            self._beat()
            connection = Connection(self._address, self._keys, link.RECEIVER_TO_DRAFT, link.SILENT_MS)
            try:
                self._draft(connection)
            except link.NotOfAnEngine as error:
                pause_s = self._reconnection.lost(f"the engine at {self._address} says what none would: {error}")
            except LinkLost as lost:
                pause_s = self._reconnection.lost(str(lost))
            finally:
                connection.close()
            time.sleep(random.uniform(0.5, 1.0) * pause_s)

    def _draft(self, connection: Connection) -> NoReturn:
        """Offer, load, join and draft, until the connection is lost."""
        number, terms = self._terms(connection)
        config, runners = self._load(terms)
        _tell(connection, link.Joined(), number)
        words = f"drafting for {printable(terms.target)} at {self._address}"
        if self._settled is None:
            print(words, flush=True)
        else:
            self._settled(words)
        self._reconnection.served()
        LinkedDraft(connection, number, link.MessageCheck(terms), config, runners, self._beat, self._grammars).serve()

    def _terms(self, connection: Connection) -> tuple[int, link.Terms]:
        """Offer to draft and return the session's number and the engine's terms."""
        deadline, offered = time.monotonic() + _ANSWER_S, False
        while time.monotonic() < deadline:
            if not offered and connection.up:
                offered = connection.offer(self._offer)
            connection.wait(False, deadline)
            answer = connection.take_framed()
            if connection.refused:
                raise UsageError(connection.trouble)
            if answer is None:
                continue
            number, message = answer
            if isinstance(message, link.Terms):
                link.check_terms(message, self._vocabulary)
                return number, message
            if isinstance(message, link.TargetVocabulary):
                self._speak(message.tokens)
                offered = False
            _check_end(message)
        raise LinkLost(f"nobody answers at {self._address}{connection.trouble}")

    def _speak(self, vocabulary: Vocabulary) -> None:
        """Use the engine's vocabulary. Raises UsageError if this machine's tokenizer makes the prompts."""
        if self._texts:
            config = self._config
            name = config.draft_name if config.target == config.draft else config.target
            raise UsageError(
                f"{name} has another tokenizer than the engine's model, and texts become tokens here: give --target, "
                "a folder with that model's config.json and tokenizer.json"
            )
        self._vocabulary, self._grammars = vocabulary, False
        self._offer = replace(self._offer, vocabulary=link.fingerprint(vocabulary))

    def _load(self, terms: link.Terms) -> tuple[EngineConfig, list[Runner]]:
        known = self._offer, terms
        if self._loaded is None or self._loaded[:2] != known:
            config = configuration(self._config, terms)
            self._loaded = None  # frees its memory before the next model is loaded
            try:
                self._loaded = *known, config, load(config, vocabulary=self._vocabulary)
            except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if there is no memory
                size = f"{terms.max_num_seqs} sequences of {terms.max_model_len} tokens"
                raise UsageError(f"cannot draft for {printable(terms.target)}, {size}: {error}") from None
        return self._loaded[2:]


class LinkedDraft:
    """The draft's loop in one session. Without `grammars`, requests' grammars are ignored."""

    def __init__(
        self,
        connection: Connection,
        number: int,
        check: link.MessageCheck,
        config: EngineConfig,
        runners: list[Runner],
        beat: Callable[[], None] = lambda: None,
        grammars: bool = True,
    ) -> None:
        self._connection, self._number, self._beat, self._grammars = connection, number, beat, grammars
        self._check, self._config, self._runners = check, config, runners
        self._board = link.LinkBoard(self._send)
        self._engine = self._fresh()
        self._engine.prepare()
        self._stamp, self._stamped = 0, 0

    def _fresh(self) -> LinkedDraftEngine:
        return LinkedDraftEngine(self._config, self._runners, self._board, self._number, self._config.vocab_size)

    def serve(self) -> NoReturn:
        """Draft until the session is over, which raises `LinkLost`."""
        busy = False
        while True:
            self._beat()
            if not busy:
                self._connection.wait(False, time.monotonic() + _IDLE_S)
                self._board.tick()
            self._read()
            busy = self._engine.step()
            self._board.flush()

    def _send(self, published: link.Published) -> None:
        held = time.monotonic_ns() - self._stamped
        _tell(self._connection, replace(published, echo=self._stamp, held=held), self._number)

    def _read(self) -> None:
        while (framed := self._connection.take_framed()) is not None:
            _, message = framed
            self._check.check(message)
            if isinstance(message, link.Beat):
                self._stamp, self._stamped = message.stamp, time.monotonic_ns()
            elif isinstance(message, Rejoin):
                self._engine = self._fresh()
            elif isinstance(message, link.Terms | link.TargetVocabulary | link.NotAccepted | EngineDeadError):
                _check_end(message)
            elif isinstance(message, Admit) and not self._grammars:
                self._engine.handle(replace(message, structured=None))
            else:
                self._engine.handle(message)


def _tell(connection: Connection, message: Message, number: int) -> None:
    if not connection.offer(message, number):
        raise LinkLost("the engine went away, or does not read")


def _check_end(message: Any) -> None:
    """Raise LinkLost for a message that ends the session, UsageError if every session would end so."""
    if isinstance(message, EngineDeadError):
        raise LinkLost(str(message))
    if isinstance(message, link.NotAccepted):
        if message.again:
            raise LinkLost(f"the engine says: {printable(message.message)}")
        raise UsageError(f"the engine says: {printable(message.message)}")


def configuration(config: EngineConfig, terms: link.Terms) -> EngineConfig:
    pages = terms.max_num_seqs * (-(-terms.max_model_len // PAGE_SIZE) + 1)
    return replace(
        config,
        speculation=terms.speculation,
        max_model_len=terms.max_model_len,
        max_num_seqs=terms.max_num_seqs,
        num_pages=pages,
        draft_num_pages=min(pages, config.draft_num_pages),
        vocab_size=terms.vocab_size,
    )


if __name__ == "__main__":
    main()
