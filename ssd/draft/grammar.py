"""The draft's copy of a sequence's grammar; without it guesses are not restricted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from ssd.errors import RequestError
from ssd.grammar.background import begun
from ssd.grammar.matcher import Grammar, GrammarState

log = logging.getLogger("ssd.draft")


class DraftGrammar:
    """The grammar of a sequence's tokens after its prompt; it applies once it is `compiled`."""

    def __init__(self, compiled: Future[Grammar], prompt_length: int) -> None:
        self._compiled: Future[Grammar] | None = compiled
        self._prompt_length = prompt_length
        self._state: GrammarState | None = None

    def possible(self, tokens: Sequence[int], drafts: Sequence[Sequence[int] | None]) -> Tensor | None:
        """Return the tokens possible after `tokens` and each draft: bool [n, V] on the CPU, or None.

        A row of which nothing is known is all True. None: no row is known."""
        state = self._ready()
        if state is None:
            return None
        output = tokens[self._prompt_length :]
        try:
            found = [None if draft is None else state.bits(output, draft) for draft in drafts]
        except RequestError as error:
            self._lose(error)
            return None
        known = [bits for bits in found if bits is not None]
        if not known:
            return None
        free = np.full_like(known[0], -1)
        return torch.from_numpy(state.unpacked(np.stack([free if bits is None else bits for bits in found])))

    def allows(self, tokens: Sequence[int], draft: Sequence[int], token: int) -> bool:
        """Return True unless `token` is known to be impossible after `tokens` and `draft`."""
        row = self.possible(tokens, [draft])
        return row is None or (token < row.shape[1] and bool(row[0, token]))

    def _ready(self) -> GrammarState | None:
        if self._compiled is not None and self._compiled.done():
            try:
                self._state = begun(self._compiled)
            except RequestError as error:
                self._lose(error)
            self._compiled = None
        return self._state

    def _lose(self, error: RequestError) -> None:
        log.warning("a draft goes on without its grammar: %s", error)
        self._state = None
