"""Checks of the messages that an engine on another machine sends to a draft.

Types and bounds are those of the messages (`ssd.remote.link`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from ssd.config.params import Speculation
from ssd.errors import RequestError
from ssd.ipc.messages import Admit, Launched, Outcomes, Rejoin, Release, Retune
from ssd.models.vocabularies import Vocabulary
from ssd.remote.link import Terms

_MOST_REQUESTS = 4  # per sequence that the engine runs at once: a request may begin before an old one ends


class NotOfAnEngine(ValueError):
    """A message that no engine of ours sends. The text says why."""


def check_terms(terms: Terms, vocabulary: Vocabulary | None) -> None:
    """Raise `NotOfAnEngine` for terms that contradict themselves or the `vocabulary` that both sides speak."""
    _check_speculation(terms.speculation)
    if vocabulary and max(vocabulary.values()) >= terms.vocab_size:
        raise NotOfAnEngine(f"a vocabulary of {terms.vocab_size} tokens, fewer than its tokenizer has")


class MessageCheck:
    """Checks the messages of one session against its terms."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._requests: set[int] = set()

    def check(self, message: Any) -> None:
        """Raise `NotOfAnEngine` for a message that contradicts the terms."""
        if isinstance(message, Admit):
            self._admit(message)
        elif isinstance(message, Outcomes):
            self._check_ids(row.token for row in message.rows)
        elif isinstance(message, Launched):
            self._check_ids(chain.from_iterable(row.tokens for row in message.rows))
        elif isinstance(message, Retune):
            for _, speculation in message.rows:
                _check_speculation(speculation)
        elif isinstance(message, Release):
            self._requests.difference_update(message.requests)
        elif isinstance(message, Rejoin):
            self._requests.clear()

    def _admit(self, admit: Admit) -> None:
        terms = self._terms
        if not 0 < len(admit.token_ids) <= terms.max_model_len:
            raise NotOfAnEngine(f"a text of {len(admit.token_ids)} tokens, where 1 to {terms.max_model_len} may be")
        if not (0 <= admit.temperature <= 100 and 0 < admit.top_p <= 1 and 0 <= admit.min_p <= 1):
            raise NotOfAnEngine("a temperature, top_p or min_p that no request may have")
        self._check_ids(admit.token_ids)
        _check_speculation(admit.speculation)
        self._requests.add(admit.request)
        if len(self._requests) > _MOST_REQUESTS * terms.max_num_seqs:
            raise NotOfAnEngine(f"{len(self._requests)} requests at once, where it runs {terms.max_num_seqs}")

    def _check_ids(self, ids: Iterable[int]) -> None:
        if (largest := max(ids, default=0)) >= self._terms.vocab_size:
            raise NotOfAnEngine(f"the token {largest}, where ids are below {self._terms.vocab_size}")


def _check_speculation(speculation: Speculation) -> None:
    try:
        speculation.check()
    except RequestError as error:
        raise NotOfAnEngine(str(error)) from None
