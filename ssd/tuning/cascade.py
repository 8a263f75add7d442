"""Chooses how far a smaller draft guesses for a larger one, which verifies the guesses before it publishes them.

A cascade is speculative decoding of the draft itself (Chen et al., arXiv 2312.11462, "vertical cascade"). Its levels
share the noise of the sampler: a guess is accepted when it is the larger draft's own token. So the smaller draft
changes when a token is published, never which."""

from __future__ import annotations

from ssd.speculation.theory import LinearCost, expected_tokens


def drafting_speed(length: int, acceptance: float, forward: LinearCost, chains: int, token_s: float) -> float:
    """Tokens per second of each of `chains` chains, if a forward verifies `length` guesses of each.

    Each guess is accepted with probability `acceptance`. `forward` is the larger draft's time by rows of the batch,
    `token_s` the seconds that one more guess for all chains takes."""
    return expected_tokens(acceptance, length) / (forward.at(chains * (1 + length)) + length * token_s)


def best_length(acceptance: float, forward: LinearCost, chains: int, token_s: float, most: int) -> int:
    """Returns the length, 0 to `most`, with the highest `drafting_speed`; 0 if the smaller draft does not pay."""
    return max(range(most + 1), key=lambda length: drafting_speed(length, acceptance, forward, chains, token_s))
