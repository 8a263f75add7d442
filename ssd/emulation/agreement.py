"""The scripted draft for a wanted agreement: the number of wrong tokens that it ranks above the right one."""

from __future__ import annotations

from ssd.config.emulation import Agreement
from ssd.errors import UsageError
from ssd.planning.profile import PAPER
from ssd.speculation.fan_out import MOST, hit_chance
from ssd.speculation.theory import acceptance_for

MOST_DECOYS = MOST + 1  # with this many, no fan-out holds the right token
_HALVINGS = 60


def agreement_of(acceptance_length: float, hit_rate: float | None, lookahead: int, fan_out: int) -> Agreement:
    """Return the agreement at which a round of `sd` yields `acceptance_length` tokens on average.

    The default hit rate is that of the paper's Llama pair, or the nearest possible. Raises UsageError for an impossible
    agreement."""
    if not 1 <= acceptance_length <= lookahead + 1:
        raise UsageError(
            f"an acceptance length of {acceptance_length:g} cannot be: with K = {lookahead} it is from 1 to "
            f"{lookahead + 1}"
        )
    acceptance = acceptance_for(acceptance_length, lookahead)
    if hit_rate is None:
        least, most = _hit_rates(acceptance, lookahead, fan_out)
        hit_rate = min(max(hit_chance(fan_out, (PAPER.misses.c, PAPER.misses.r)), least), most)
    asked = Agreement(acceptance, hit_rate, lookahead, fan_out)
    decoys(asked)
    return asked


def decoys(asked: Agreement) -> list[float]:
    """Return the probability that more than d wrong tokens rank above the right one, for each d below `MOST_DECOYS`.

    For d = 0 it is 1 - a, with a the acceptance. For larger d it falls by the paper's law c F^-r, with the c that gives
    the hit rate. Raises UsageError if there is no such c."""
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
    """Return the share of wrong drafts with more than `guesses` tokens above the right one, with the drafted one."""
    return 1 - hit_chance(guesses, (c, PAPER.misses.r)) if guesses else 1.0


def _misses(a: float, c: float, lookahead: int, fan_out: int) -> float:
    """Return the share of rounds that miss.

    After a rejection the drafted token is not among the guesses; after full acceptance it is the first guess."""
    full = a**lookahead
    return (1 - full) * _beyond(c, fan_out) + full * (1 - a) * _beyond(c, fan_out - 1)


def _hit_rates(a: float, lookahead: int, fan_out: int) -> tuple[float, float]:
    """Return the lowest and highest possible hit rate."""
    return 1 - _misses(a, float(MOST_DECOYS), lookahead, fan_out), 1 - _misses(a, 0.0, lookahead, fan_out)
