"""Proposals that take no time: speculators that look at one sequence's text, for rows that missed."""

from __future__ import annotations

import logging
from itertools import takewhile

from ssd.speculation.speculators import Speculator, load
from ssd.target.sequence import Sequence

log = logging.getLogger("ssd.target")

_WORTH = 4


class CheapProposals:
    """A speculator for each sequence whose backup is one; they learn its text when they are first asked. What is no id
    below `vocab_size` ends a proposal: a plugin is advice too."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_request: dict[int, tuple[Speculator | None, int]] = {}

    def propose(self, sequence: Sequence) -> list[int]:
        """Draft tokens for the next round; [] where the backup is of another kind or has no idea."""
        backup = sequence.speculation.backup
        try:
            if sequence.request not in self._by_request:
                maker = load(backup)
                self._by_request[sequence.request] = (None if maker is None else maker(), 0)
            speculator, known = self._by_request[sequence.request]
            if speculator is None:
                return []
            self._by_request[sequence.request] = speculator, len(sequence.tokens)
            speculator.extend(sequence.tokens[known:])
            most = _most(sequence)
            found = speculator.propose(most)[:most]
        except Exception:
            log.exception("the backup %s failed; request %d goes without it", backup, sequence.request)
            self._by_request[sequence.request] = None, 0
            return []
        return list(takewhile(lambda token: type(token) is int and 0 <= token < self._vocab_size, found))

    def forget(self, request: int) -> None:
        self._by_request.pop(request, None)


def _most(sequence: Sequence) -> int:
    """How many tokens: K, or, where K is chosen by what the draft has time for, so many as are worth verifying."""
    if sequence.asked.num_speculative_tokens:
        return sequence.lookahead
    return min(max(sequence.lookahead, _WORTH), sequence.room)
