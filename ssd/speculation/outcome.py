"""Which verification outcomes to prepare for (ALGORITHM 2)."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.acceptance import Outcome


def fan_out_at(accepted: int, in_flight: int, fan_out: Sequence[int]) -> int:
    """F_k for k = `accepted` of `in_flight` speculated tokens.

    One number serves every k. Of a list F_0..F_K the last one belongs to full acceptance, also when fewer than K
    tokens are in flight, or more: K may have become smaller meanwhile.
    """
    if len(fan_out) == 1:
        return fan_out[0]
    return fan_out[-1] if accepted == in_flight else fan_out[min(accepted, len(fan_out) - 1)]


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
