"""Which verification outcomes to prepare for (ALGORITHM 2)."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.acceptance import Outcome
from ssd.speculation.fan_out import fan_out_at


def forks(
    accepted: int, speculation: Sequence[int], candidates: Sequence[int], fan_out: Sequence[int]
) -> list[Outcome]:
    """The outcomes with exactly `accepted` draft tokens that are worth a chain: the F_k likeliest bonus tokens.

    `candidates` are ranked next tokens after the accepted ones. The token already in flight there is excluded: had it
    been right it would have been accepted. Nothing is excluded after the last one.
    """
    excluded = speculation[accepted] if accepted < len(speculation) else -1
    wanted = fan_out_at(accepted, len(speculation), fan_out)
    return [Outcome(accepted, token) for token in candidates if token != excluded][:wanted]
