"""Proposals that take no time: speculators that look at one sequence's text, for rows that missed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import takewhile

from ssd.params import AUTO_LOOKAHEAD
from ssd.speculation.learner import Mean
from ssd.speculation.speculators import MOST_EVIDENCE, Speculator, load
from ssd.target.sequence import Sequence

log = logging.getLogger("ssd.target")

# The chance of a proposal's first token, and of each other one given those before it, before they are known: generous,
# for what is never verified is never known. And how fast old rounds fade, and as how many the guess counts.
_FIRST, _NEXT, _SMOOTHING, _SAMPLES = 0.7, 0.95, 0.02, 10


@dataclass
class _Guesser:
    """One sequence's speculator, None where its backup is of another kind or has failed, and how many tokens it has."""

    speculator: Speculator | None
    known: int = 0

    @property
    def evidence(self) -> int:
        return min(max(0, int(getattr(self.speculator, "evidence", 0))), MOST_EVIDENCE)


class CheapProposals:
    """A speculator for each sequence whose backup is one; they learn its text when they are first asked. What is no id
    below `vocab_size` ends a proposal: a plugin is advice too."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._guessers: dict[int, _Guesser] = {}
        self._chances = [
            [Mean(_NEXT if depth else _FIRST, _SMOOTHING, _SAMPLES) for depth in range(AUTO_LOOKAHEAD)]
            for _ in range(MOST_EVIDENCE + 1)
        ]

    def note(self, request: int, drafted: int, accepted: int) -> None:
        """So many tokens of a request's last proposal were verified, and the first `accepted` were right."""
        chances = self._chances[self._guessers[request].evidence]
        for index in range(min(drafted, accepted + 1, AUTO_LOOKAHEAD)):
            chances[index].note(float(index < accepted))

    def propose(self, sequence: Sequence, price: float) -> list[int]:
        """Draft tokens for the next round; [] where the backup is of another kind or has no idea. `price` is what
        verifying one takes, in tokens that the batch would make in that time."""
        backup = sequence.speculation.backup
        try:
            if sequence.request not in self._guessers:
                maker = load(backup)
                self._guessers[sequence.request] = _Guesser(None if maker is None else maker())
            guesser = self._guessers[sequence.request]
            if guesser.speculator is None:
                return []
            known, guesser.known = guesser.known, len(sequence.tokens)
            guesser.speculator.extend(sequence.tokens[known:])
            longest = min(sequence.asked.num_speculative_tokens or AUTO_LOOKAHEAD, sequence.room)
            found = guesser.speculator.propose(longest)[:longest]
            if not sequence.asked.num_speculative_tokens:
                found = found[: self._worth(guesser.evidence, price)]
        except Exception:
            log.exception("the backup %s failed; request %d goes without it", backup, sequence.request)
            self._guessers[sequence.request] = _Guesser(None)
            return []
        return list(takewhile(lambda token: type(token) is int and 0 <= token < self._vocab_size, found))

    def forget(self, request: int) -> None:
        self._guessers.pop(request, None)

    def _worth(self, evidence: int, price: float) -> int:
        """How many tokens are worth their price where K is chosen by what the draft has time for. One always is:
        without any the chances would not be known."""
        chances = self._chances[evidence]
        reached = chances[0].value
        for depth in range(1, AUTO_LOOKAHEAD):
            reached *= chances[depth].value
            if reached < price:
                return depth
        return AUTO_LOOKAHEAD
