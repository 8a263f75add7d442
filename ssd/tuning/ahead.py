"""Lengths of chains and trunk for a draft on another machine; `ahead` tokens are committed in one round trip."""

from __future__ import annotations

from ssd.config.params import MAX_LOOKAHEAD

ABSORBED = 4
"""A chain with this many computed tokens is worth appending to the trunk."""
MOST_IN_FLIGHT = 48
"""Upper bound on the trunk's length."""
_REACH = 2


def chain_length(lookahead: int, ahead: int) -> int:
    """Return the length of chains for K = `lookahead`; a longer round trip makes them longer."""
    return min(MAX_LOOKAHEAD, lookahead + ahead)


def trunk_length(verified: int, ahead: int) -> int:
    """Return the upper bound on the trunk while its first `verified` tokens are verified (`Launch.in_flight`)."""
    return min(MOST_IN_FLIGHT, verified + _REACH * ahead)
