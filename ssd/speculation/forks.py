"""Chooses the verification outcomes to prepare."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.acceptance import Outcome
from ssd.speculation.fan_out import fan_out_at


def forks(
    accepted: int, speculation: Sequence[int], candidates: Sequence[int], fan_out: Sequence[int]
) -> list[Outcome]:
    """Return the outcomes to prepare with exactly `accepted` draft tokens: the F_k likeliest bonus tokens.

    `candidates`: the next tokens, likeliest first, without the one in flight: as the target's own it would be
    accepted."""
    excluded = speculation[accepted] if accepted < len(speculation) else -1
    wanted = fan_out_at(accepted, len(speculation), fan_out)
    return [Outcome(accepted, token) for token in candidates if token != excluded][:wanted]
