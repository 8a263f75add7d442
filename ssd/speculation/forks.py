"""Chooses the verification outcomes to prepare for. This file is the fan-out policy."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.acceptance import Outcome
from ssd.speculation.fan_out import fan_out_at

NEEDS_PROBABILITIES = False
"""Whether `forks` reads probabilities. The draft only computes them then: they take a pass over the logits."""


def forks(
    accepted: int,
    speculation: Sequence[int],
    candidates: Sequence[int],
    probabilities: Sequence[float],
    fan_out: Sequence[int],
) -> list[Outcome]:
    """Returns the outcomes with exactly `accepted` draft tokens that are worth a chain: the F_k likeliest bonus tokens.

    `candidates` are the next tokens after the accepted ones, likeliest first. The token in flight there is excluded:
    had it been right, it would have been accepted. `probabilities` of the candidates are the draft's at temperature 1.
    """
    excluded = speculation[accepted] if accepted < len(speculation) else -1
    wanted = fan_out_at(accepted, len(speculation), fan_out)
    return [Outcome(accepted, token) for token in candidates if token != excluded][:wanted]
