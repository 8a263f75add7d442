"""Computes the gain of more draft tokens: of chains, and of a smaller draft's guesses.

A cascade is speculative decoding of the draft itself (Chen et al., arXiv 2312.11462, "vertical cascade"). Its drafts
share the noise of the sampler: a guess is accepted if it is the larger draft's own token. So the smaller draft changes
when a token is published, never which."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.theory import LinearCost, expected_tokens


def outcome_probability(
    accepted: int, in_flight: int, rank: int, acceptance: float, misses: tuple[float, float]
) -> float:
    """Return the probability of `accepted` right draft tokens of `in_flight`, then the `rank`-th candidate.

    Ranks begin at 1. Tokens are accepted independently with probability `acceptance` (arXiv 2603.03251, Section 4). The
    first F candidates miss the bonus token with probability c F^-r, `misses` = (c, r)."""
    c, r = misses
    reached = acceptance**accepted * (1 - acceptance if accepted < in_flight else 1.0)
    missed_before = 1.0 if rank == 1 else min(1.0, c * (rank - 1) ** -r)
    return reached * max(0.0, missed_before - min(1.0, c * rank**-r))


def gain(probability: float, depth: int, acceptance: float) -> float:
    """Return the expected tokens from the next token of a chain with `depth` draft tokens.

    It counts if the chain's outcome occurs, with `probability`, and all `depth` + 1 tokens are accepted."""
    return probability * acceptance ** (depth + 1)


def worth_growing(gains: Sequence[float], step: LinearCost) -> int:
    """Return how many chains the next tree step should grow for the most expected tokens per second.

    `gains` are in falling order; the first chains are grown. `step` is the seconds of a step by its chains. If a chain
    costs nothing, all chains grow."""
    best, most, total = 0, 0.0, 0.0
    for count, more in enumerate(gains, 1):
        total += more
        rate = total / max(1e-9, step.at(count))
        if rate >= most:
            best, most = count, rate
    return best


def drafting_speed(length: int, acceptance: float, forward: LinearCost, chains: int, token_s: float) -> float:
    """Return the tokens per second of each of `chains` chains, if a forward verifies `length` guesses of each.

    A guess is accepted with probability `acceptance`. `forward` is the larger draft's time by rows of the batch,
    `token_s` the seconds of one more guess for all chains."""
    return expected_tokens(acceptance, length) / (forward.at(chains * (1 + length)) + length * token_s)


def best_length(acceptance: float, forward: LinearCost, chains: int, token_s: float, most: int) -> int:
    """Return the length, 0 to `most`, with the highest `drafting_speed`; 0 if the smaller draft does not pay."""
    return max(range(most + 1), key=lambda length: drafting_speed(length, acceptance, forward, chains, token_s))
