"""Guesses from what requests said before: tokens that followed the end of a text in other texts.

The method is that of SuffixDecoding (Oliaro et al., arXiv 2411.04975), with links in a ring instead of suffix trees."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Items

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_LOOKAHEAD
from ssd.errors import UsageError
from ssd.kernels import library
from ssd.kernels.suffixes import LONGEST, Continuation, StoredText, SuffixStore
from ssd.speculation.theory import tokens_worth_verifying
from ssd.tuning.estimates import KINDS, Mean, note_guesses
from ssd.verifier.misses import GuessedTokens
from ssd.verifier.sequence import Sequence

log = logging.getLogger("ssd.target")

# Matches are told apart by their length, from each of these on, and by how far the places agree on the next token.
_LENGTHS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
_CLASS = [max(0, sum(length >= least for least in _LENGTHS) - 1) for length in range(LONGEST + 1)]
_ONCE, _ALL, _MOST, _FEW = range(4)
# Initial chances that a token is right, by length and agreement; each counts as `_SAMPLES` tokens. Each hotter kind of
# sampling law multiplies them by `_WARM`.
_FIRST = (
    (0.45, 0.5, 0.35, 0.2),
    (0.5, 0.65, 0.35, 0.2),
    (0.6, 0.75, 0.35, 0.3),
    (0.7, 0.85, 0.5, 0.3),
    (0.8, 0.88, 0.5, 0.3),
    (0.85, 0.93, 0.5, 0.3),
    (0.9, 0.94, 0.5, 0.3),
    (0.93, 0.96, 0.5, 0.3),
    (0.96, 0.98, 0.6, 0.4),
)
_WARM, _SAMPLES, _SMOOTHING = 0.7, 10, 0.02
# Tokens of a prompt that are added in one round, in 2 ms or so: all rows wait for that.
_AT_ONCE = 8192


def agreement(votes: int, places: int) -> int:
    """Return the class of a token that `votes` of the `places` have next."""
    if votes == places:
        return _ONCE if places == 1 else _ALL
    return _MOST if 2 * votes > places else _FEW


class _Remembered:
    """A sequence's text in the store, and the guess after it, with the chance of each token."""

    def __init__(self, text: StoredText) -> None:
        self.text = text
        self.guess: Items[int] = ()
        self.chances: Items[Mean] = ()

    def extend(self, tokens: Items[int]) -> bool:
        """Add new tokens, learn how far the guess was right; return True if all are added."""
        if not len(self.text):
            self.text.begin(tokens)
        new = tokens[len(self.text) : len(self.text) + _AT_ONCE]
        note_guesses(self.chances, self.guess, new)
        self.guess = ()
        self.text.extend(new)
        return len(self.text) == len(tokens)


class SuffixMemory:
    """Keeps texts of this engine's requests, the newest in at most `size` bytes. The proposer calls it.

    A text finds only texts of the same client's key and `cache_salt`. A request with `store` false is neither kept nor
    helped."""

    def __init__(self, size: int) -> None:
        self._store, self._secret = SuffixStore(size), secrets.token_bytes(16)
        self._rows: dict[int, _Remembered] = {}
        self._chances = [
            [[Mean(_WARM**kind * chance, _SMOOTHING, _SAMPLES) for chance in of_length] for of_length in _FIRST]
            for kind in range(KINDS)
        ]

    @classmethod
    def of(cls, config: EngineConfig) -> SuffixMemory | None:
        """Return the configured memory; None if it is off or lacks compiled kernels. Raises UsageError without room."""
        if not config.suffix_memory:
            return None
        if library.functions() is None:
            log.warning("there is no suffix memory: it needs compiled kernels")
            return None
        try:
            return cls(config.suffix_memory)
        except OSError as error:
            raise UsageError(f"no room for --suffix-memory {config.suffix_memory}: {error}") from None

    def guess(self, row: Sequence, pricing: Callable[[], Callable[[int], float]]) -> GuessedTokens | None:
        """Add a sequence's new tokens, and guess the next ones; None if none are worth their price."""
        if not row.params.store:
            return None
        remembered = self._remembered(row)
        whole = remembered.extend(row.tokens)
        most = min(row.asked.num_speculative_tokens or MAX_LOOKAHEAD, row.acceptable)
        found = remembered.text.find(most) if whole and most else None
        if found is None:
            return None
        chances = self._chances_of(row.kind, found)
        remembered.guess, remembered.chances = found.tokens, chances
        count, accepted, gain = tokens_worth_verifying((chance.value for chance in chances), len(chances), pricing())
        return GuessedTokens(found.tokens[:count], accepted, gain) if count else None

    def release(self, rows: Items[Sequence]) -> None:
        """Store the rest of the texts of sequences, and forget the sequences."""
        for row in rows:
            if row.params.store and (row.round > 0 or row.request in self._rows):
                remembered = self._remembered(row)
                while not remembered.extend(row.tokens):
                    pass
                del self._rows[row.request]

    def _remembered(self, row: Sequence) -> _Remembered:
        known = self._rows.get(row.request)
        if known is None:
            scope = repr((row.owner, row.params.cache_salt))
            digest = hashlib.blake2b(scope.encode(), key=self._secret, digest_size=8).digest()
            known = self._rows[row.request] = _Remembered(self._store.text(int.from_bytes(digest)))
        return known

    def _chances_of(self, kind: int, found: Continuation) -> list[Mean]:
        table, votes = self._chances[kind], found.votes
        return [
            table[_CLASS[min(found.matching + depth, LONGEST)]][agreement(votes[2 * depth], votes[2 * depth + 1])]
            for depth in range(len(found.tokens))
        ]
