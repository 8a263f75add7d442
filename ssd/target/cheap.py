"""Proposals that take no time: speculators that look at one sequence's text, for rows that missed."""

from __future__ import annotations

import logging
from itertools import takewhile

from ssd.target.sequence import Sequence
from ssd.target.speculators import Speculator, load

log = logging.getLogger("ssd.target")


class CheapProposals:
    """A speculator for each sequence whose backup is one; they learn its text when they are first asked. What is no id
    below `vocab_size` ends a proposal: a plugin is advice too."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_request: dict[int, tuple[Speculator, int]] = {}

    def propose(self, sequence: Sequence) -> list[int]:
        """Draft tokens for the next round; [] where the backup is of another kind or has no idea."""
        made = self._by_request.get(sequence.request)
        if made is None:
            maker = load(sequence.speculation.backup)
            if maker is None:
                return []
            made = maker(), 0
        speculator, known = made
        self._by_request[sequence.request] = speculator, len(sequence.tokens)
        try:
            speculator.extend(sequence.tokens[known:])
            found = speculator.propose(sequence.lookahead)[: sequence.lookahead]
        except Exception:
            log.exception("the backup %s failed; a round goes without it", sequence.speculation.backup)
            return []
        return list(takewhile(lambda token: type(token) is int and 0 <= token < self._vocab_size, found))

    def forget(self, request: int) -> None:
        self._by_request.pop(request, None)
