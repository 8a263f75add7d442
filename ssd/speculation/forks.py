"""Chooses the verification outcomes to prepare. This file is the fan-out policy."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.acceptance import Outcome
from ssd.speculation.fan_out import fan_out_at


def forks(
    accepted: int, speculation: Sequence[int], candidates: Sequence[int], fan_out: Sequence[int]
) -> list[Outcome]:
    """Return the outcomes to prepare with exactly `accepted` draft tokens: the F_k likeliest bonus tokens.

    `candidates` are the next tokens after the accepted ones, likeliest first. The token in flight there is excluded: as
    the target's own token it would be accepted."""
    excluded = speculation[accepted] if accepted < len(speculation) else -1
    wanted = fan_out_at(accepted, len(speculation), fan_out)
    return [Outcome(accepted, token) for token in candidates if token != excluded][:wanted]
