"""The mock's answers: pure integer functions of a request's prompt ids, seed and position.

A request's *key*: the first 8 bytes of BLAKE2b (digest size 8) over its seed as 8 bytes and each prompt id as 4 bytes,
all little-endian. Its n-th number: the SplitMix64 output for the state key + (n + 1) * 0x9E3779B97F4A7C15. Output token
p, from 0, is number 3 p modulo the vocabulary's size. Its round yields one token if p = 0, else 1 + ((number 3 p + 1)
modulo 5)."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ssd.config.params import SamplingParams
from ssd.ipc.public import FinishReason, TokenLogprob

LOOKAHEAD = 4  # draft tokens that a round pretends to have verified
_MASK = 2**64 - 1
_TOKEN, _ROUND, _LOGPROB, _USES = 0, 1, 2, 3


class MockRound(NamedTuple):
    """One round's tokens, `reason` for an end, and made-up figures; see `ssd.ipc.messages.Emission`."""

    token_ids: list[int]
    reason: FinishReason | None
    drafted: int
    accepted: int
    cache: str


class ScriptedAnswer:
    """The answer to one request, whose seed must be set. `ends` are end-of-sequence ids.

    It ends by stop tokens, `min_tokens`, `max_tokens` and `max_model_len`; other parameters change nothing."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        vocab_size: int,
        max_model_len: int,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        seed = params.seed
        assert seed is not None, "admission fills the seed in"
        words = struct.pack(f"<Q{len(prompt)}I", seed, *prompt)
        self._key = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
        self._prompt, self._vocab_size = prompt, vocab_size
        self._length = min(params.max_tokens, max_model_len - len(prompt))
        self._min_tokens = params.min_tokens
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)

    def token(self, position: int) -> int:
        return self._number(position, _TOKEN) % self._vocab_size

    def round(self, position: int) -> MockRound:
        """Return the round that begins with token `position`, cut at the end of the answer."""
        draw = self._number(position, _ROUND)
        drafted = LOOKAHEAD if position else 0
        accepted = draw % (drafted + 1)
        cache = _cache(position, draw)
        tokens: list[int] = []
        for place in range(position, position + accepted + 1):
            tokens.append(self.token(place))
            reason = self._reason(tokens[-1], place)
            if reason is not None:
                return MockRound(tokens, reason, drafted, accepted, cache)
        return MockRound(tokens, None, drafted, accepted, cache)

    def whole(self) -> tuple[list[int], FinishReason]:
        tokens: list[int] = []
        while True:
            tokens.append(self.token(len(tokens)))
            reason = self._reason(tokens[-1], len(tokens) - 1)
            if reason is not None:
                return tokens, reason

    def logprobs(self, position: int, count: int, top: int) -> list[TokenLogprob]:
        return [self._logprob(place, self.token(place), top) for place in range(position, position + count)]

    def prompt_logprobs(self, top: int) -> list[TokenLogprob]:
        return [self._logprob(-place, self._prompt[place], top) for place in range(1, len(self._prompt))]

    def _logprob(self, position: int, token: int, top: int) -> TokenLogprob:
        """Give `token` at least half of the mass, each id after it half of the rest."""
        chance = 0.5 + self._number(position, _LOGPROB) / 2**66
        likeliest = [(token, math.log(chance))]
        others = range(1, min(top, self._vocab_size))
        likeliest += [((token + rank) % self._vocab_size, math.log((1 - chance) / 2**rank)) for rank in others]
        return TokenLogprob(token, likeliest[0][1], likeliest[:top])

    def _reason(self, token: int, position: int) -> FinishReason | None:
        if token in self._stops and position + 1 >= self._min_tokens:
            return "stop"
        return "length" if position + 1 >= self._length else None

    def _number(self, position: int, use: int) -> int:
        """Return a 64-bit number: SplitMix64 (Steele, Lea, Flood 2014), seeded by the key."""
        z = (self._key + (_USES * position + use + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)


def _cache(position: int, draw: int) -> str:
    if position < 2:
        return "first_round" if position else ""
    return "hit" if draw >> 62 else "token_not_covered"
