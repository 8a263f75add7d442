"""How often a scripted draft is right, and what that asks of the guesses it ranks above the right one."""

from __future__ import annotations

from typing import NamedTuple

from ssd.errors import UsageError
from ssd.profile import PAPER
from ssd.speculation.fan_out import MOST, hit_chance
from ssd.speculation.theory import acceptance_for, expected_tokens

MOST_DECOYS = MOST + 1  # with so many, no fan-out holds the right token
_HALVINGS = 60


class Stated(NamedTuple):
    """A single draft token is accepted with probability `acceptance`, and where rounds verify `lookahead` of them and
    `fan_out` guesses are prepared for every accepted length, a share `hit_rate` of the rounds is prepared for."""

    acceptance: float
    hit_rate: float
    lookahead: int
    fan_out: int

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round of `sd`."""
        return expected_tokens(self.acceptance, self.lookahead)


def stated(acceptance_length: float, hit_rate: float | None, lookahead: int, fan_out: int) -> Stated:
    """Of tokens a round of `sd`; without a hit rate, that of the paper's Llama pair, as far as it can be. Raises
    UsageError for what cannot be."""
    if not 1 <= acceptance_length <= lookahead + 1:
        raise UsageError(
            f"an acceptance length of {acceptance_length:g} cannot be: with K = {lookahead} it is from 1 to "
            f"{lookahead + 1}"
        )
    acceptance = acceptance_for(acceptance_length, lookahead)
    if hit_rate is None:
        least, most = _hit_rates(acceptance, lookahead, fan_out)
        hit_rate = min(max(hit_chance(fan_out, (PAPER.misses.c, PAPER.misses.r)), least), most)
    asked = Stated(acceptance, hit_rate, lookahead, fan_out)
    decoys(asked)
    return asked


def decoys(asked: Stated) -> list[float]:
    """The chance that the draft ranks more than d wrong tokens above the right one, for d from 0 to `MOST_DECOYS` - 1.

    More than none are 1 - a; of these, more than F are c F^-r, as in the paper, with the c that gives the hit rate.
    Raises UsageError where there is none.
    """
    a, miss_rate = asked.acceptance, 1 - asked.hit_rate
    least, most = _hit_rates(a, asked.lookahead, asked.fan_out)
    if not (0 <= a <= 1 and least - 1e-9 <= asked.hit_rate <= most + 1e-9):
        raise UsageError(
            f"a hit rate of {asked.hit_rate:g} cannot be: with an acceptance of {a:.3g}, K = {asked.lookahead} and "
            f"fan-out {asked.fan_out} it is from {least:.3g} to {most:.3g}"
        )
    low, high = 0.0, float(MOST_DECOYS)
    for _ in range(_HALVINGS):
        c = (low + high) / 2
        if _misses(a, c, asked.lookahead, asked.fan_out) < miss_rate:
            low = c
        else:
            high = c
    return [(1 - a) * _beyond(c, d) for d in range(MOST_DECOYS)]


def _beyond(c: float, guesses: int) -> float:
    """Of wrong drafts: more than so many tokens stand above the right one, the drafted one among them."""
    return 1 - hit_chance(guesses, (c, PAPER.misses.r)) if guesses else 1.0


def _misses(a: float, c: float, lookahead: int, fan_out: int) -> float:
    """Of all rounds. After a rejection the drafted token is no guess any more; else it is the first one."""
    full = a**lookahead
    return (1 - full) * _beyond(c, fan_out) + full * (1 - a) * _beyond(c, fan_out - 1)


def _hit_rates(a: float, lookahead: int, fan_out: int) -> tuple[float, float]:
    """The least and the most that there can be: where the draft is right, it has guessed right."""
    return 1 - _misses(a, float(MOST_DECOYS), lookahead, fan_out), 1 - _misses(a, 0.0, lookahead, fan_out)
