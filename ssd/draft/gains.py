"""What more draft tokens gain: chains where there is no room or no time for all, and guesses of a smaller draft.

A cascade is speculative decoding of the draft itself (Chen et al., arXiv 2312.11462, "vertical cascade"). Its levels
share the noise of the sampler: a guess is accepted when it is the larger draft's own token. So the smaller draft
changes when a token is published, never which."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.theory import LinearCost, expected_tokens


def outcome_probability(
    accepted: int, in_flight: int, rank: int, acceptance: float, misses: tuple[float, float]
) -> float:
    """How likely it is that `accepted` of `in_flight` draft tokens are right and the `rank`-th candidate comes next.

    Ranks begin at 1. Tokens are accepted independently with probability `acceptance` (arXiv 2603.03251, Section 4). The
    first F candidates miss the bonus token with probability c F^-r, `misses` = (c, r)."""
    c, r = misses
    reached = acceptance**accepted * (1 - acceptance if accepted < in_flight else 1.0)
    missed_before = 1.0 if rank == 1 else min(1.0, c * (rank - 1) ** -r)
    return reached * max(0.0, missed_before - min(1.0, c * rank**-r))


def gain(probability: float, depth: int, acceptance: float) -> float:
    """Expected tokens from the next token of a chain that has `depth`: its outcome comes true and all are accepted."""
    return probability * acceptance ** (depth + 1)


def worth_growing(gains: Sequence[float], step: LinearCost) -> int:
    """Returns how many chains the next tree step should grow, to bring the most expected tokens per second.

    `gains` fall; the first chains are grown. `step` is the time by chains. All chains grow where one costs nothing."""
    best, most, total = 0, 0.0, 0.0
    for count, more in enumerate(gains, 1):
        total += more
        rate = total / max(1e-9, step.at(count))
        if rate >= most:
            best, most = count, rate
    return best


def drafting_speed(length: int, acceptance: float, forward: LinearCost, chains: int, token_s: float) -> float:
    """Tokens per second of each of `chains` chains, if a forward verifies `length` guesses of each.

    Each guess is accepted with probability `acceptance`. `forward` is the larger draft's time by rows of the batch,
    `token_s` the seconds that one more guess for all chains takes."""
    return expected_tokens(acceptance, length) / (forward.at(chains * (1 + length)) + length * token_s)


def best_length(acceptance: float, forward: LinearCost, chains: int, token_s: float, most: int) -> int:
    """Returns the length, 0 to `most`, with the highest `drafting_speed`; 0 if the smaller draft does not pay."""
    return max(range(most + 1), key=lambda length: drafting_speed(length, acceptance, forward, chains, token_s))
