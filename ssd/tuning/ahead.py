"""How far a draft on another machine looks ahead, where `ahead` tokens are committed in a round trip."""

from __future__ import annotations

from ssd.config.params import MAX_LOOKAHEAD

ABSORBED = 4
"""Tokens of a chain that are worth making the trunk longer by."""
MOST_IN_FLIGHT = 48
"""Longest trunk that is asked for."""
_REACH = 2


def chain_length(lookahead: int, ahead: int) -> int:
    """Return how long chains are with K = `lookahead`: the longer, the longer they are on their way."""
    return min(MAX_LOOKAHEAD, lookahead + ahead)


def trunk_length(verified: int, ahead: int) -> int:
    """Return how long the trunk may become while its first `verified` tokens are verified (`Launch.in_flight`)."""
    return min(MOST_IN_FLIGHT, verified + _REACH * ahead)
