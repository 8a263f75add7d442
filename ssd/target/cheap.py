"""Proposals that take no time: speculators that look at one sequence's text, for rows that missed."""

from __future__ import annotations

import logging
from itertools import takewhile

from ssd.params import AUTO_LOOKAHEAD
from ssd.speculation.learner import Mean
from ssd.speculation.speculators import Speculator, load
from ssd.target.sequence import Sequence

log = logging.getLogger("ssd.target")

# The chance of each token of a proposal, given those before it: the first guess, and how fast old rounds fade.
_CHANCE, _SMOOTHING, _SAMPLES = 0.6, 0.02, 10


class CheapProposals:
    """A speculator for each sequence whose backup is one; they learn its text when they are first asked. What is no id
    below `vocab_size` ends a proposal: a plugin is advice too."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_request: dict[int, tuple[Speculator | None, int]] = {}
        self._chances = [Mean(_CHANCE, _SMOOTHING, _SAMPLES) for _ in range(AUTO_LOOKAHEAD)]

    def note(self, drafted: int, accepted: int) -> None:
        """So many tokens of a proposal were verified, and the first `accepted` were right."""
        for index in range(min(drafted, accepted + 1, AUTO_LOOKAHEAD)):
            self._chances[index].note(float(index < accepted))

    def propose(self, sequence: Sequence, price: float) -> list[int]:
        """Draft tokens for the next round; [] where the backup is of another kind or has no idea. `price` is what
        verifying one takes, in tokens that the batch would make in that time."""
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
            most = self._most(sequence, price)
            found = speculator.propose(most)[:most]
        except Exception:
            log.exception("the backup %s failed; request %d goes without it", backup, sequence.request)
            self._by_request[sequence.request] = None, 0
            return []
        return list(takewhile(lambda token: type(token) is int and 0 <= token < self._vocab_size, found))

    def forget(self, request: int) -> None:
        self._by_request.pop(request, None)

    def _most(self, sequence: Sequence, price: float) -> int:
        """How many tokens: K, or, where K is chosen by what the draft has time for, so many as are worth their price.
        One always is: without any the chances would not be known."""
        if sequence.asked.num_speculative_tokens:
            return sequence.lookahead
        most = min(AUTO_LOOKAHEAD, sequence.room)
        reached = self._chances[0].value
        for depth in range(1, most):
            reached *= self._chances[depth].value
            if reached < price:
                return depth
        return most
