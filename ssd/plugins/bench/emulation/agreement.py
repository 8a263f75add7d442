"""The agreement of a synthetic draft with its target: as asked, or as the paper measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ssd.config.emulation import DeviceTimes, ForwardTime, StatedAgreement
from ssd.config.params import FanOutChoice
from ssd.errors import UsageError
from ssd.speculation.fan_out import MOST, hit_chance
from ssd.speculation.theory import LinearCost, expected_tokens

MOST_DECOYS = MOST + 1  # with this many, no fan-out holds the right token
_HALVINGS = 60
_MISSES = (0.23, 0.6)  # c and r of the paper's Llama pair


def stated_agreement(
    length: float | None, hit_rate: float | None, lookahead: int, fan_out: FanOutChoice
) -> StatedAgreement | None:
    """Return the agreement that the options state, or None. Raises UsageError if they say too little."""
    if length is None:
        if hit_rate is not None:
            raise UsageError("--synthetic-hit-rate needs --synthetic-acceptance-length")
        return None
    if not lookahead or isinstance(fan_out, str) or len(fan_out) != 1:
        raise UsageError("--synthetic-acceptance-length needs -k and -f, a number each, which it is stated for")
    return agreement_of(length, hit_rate, lookahead, fan_out[0])


def agreement_of(length: float, hit_rate: float | None, lookahead: int, fan_out: int) -> StatedAgreement:
    """Return the agreement at which a round of `sd` yields `length` tokens on average.

    The default hit rate is that of the paper's Llama pair, or the nearest possible. Raises UsageError."""
    if not 1 <= length <= lookahead + 1:
        raise UsageError(
            f"an acceptance length of {length:g} cannot be: with K = {lookahead} it is from 1 to {lookahead + 1}"
        )
    acceptance = _bisected(1.0, lambda a: expected_tokens(a, lookahead) < length)
    if hit_rate is None:
        least, most = _hit_rates(acceptance, lookahead, fan_out)
        hit_rate = min(max(hit_chance(fan_out, _MISSES), least), most)
    asked = StatedAgreement(acceptance, hit_rate, lookahead, fan_out)
    decoys(asked)
    return asked


def acceptance_length(asked: StatedAgreement) -> float:
    """Return the mean number of tokens of a round of `sd`."""
    return expected_tokens(asked.acceptance, asked.lookahead)


def decoys(asked: StatedAgreement) -> list[float]:
    """Return the probability that more than d wrong tokens outrank the right one, for d < `MOST_DECOYS`.

    With acceptance a, it is 1 - a for d = 0, then falls by the paper's law c F^-r, with the c that gives the hit rate.
    Raises UsageError if there is no such c."""
    a, miss_rate = asked.acceptance, 1 - asked.hit_rate
    least, most = _hit_rates(a, asked.lookahead, asked.fan_out)
    if not (0 <= a <= 1 and least - 1e-9 <= asked.hit_rate <= most + 1e-9):
        raise UsageError(
            f"a hit rate of {asked.hit_rate:g} cannot be: with an acceptance of {a:.3g}, K = {asked.lookahead} and "
            f"fan-out {asked.fan_out} it is from {least:.3g} to {most:.3g}"
        )
    c = _bisected(float(MOST_DECOYS), lambda c: _misses(a, c, asked.lookahead, asked.fan_out) < miss_rate)
    return [(1 - a) * _beyond(c, d) for d in range(MOST_DECOYS)]


def _bisected(high: float, is_below: Callable[[float], bool]) -> float:
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _beyond(c: float, guesses: int) -> float:
    """Return the share of wrong drafts with more than `guesses` tokens above the right one."""
    return 1 - hit_chance(guesses, (c, _MISSES[1])) if guesses else 1.0


def _misses(a: float, c: float, lookahead: int, fan_out: int) -> float:
    """Return the share of misses: after a rejection the drafted token is no guess, else it is the first."""
    full = a**lookahead
    return (1 - full) * _beyond(c, fan_out) + full * (1 - a) * _beyond(c, fan_out - 1)


def _hit_rates(a: float, lookahead: int, fan_out: int) -> tuple[float, float]:
    return 1 - _misses(a, float(MOST_DECOYS), lookahead, fan_out), 1 - _misses(a, 0.0, lookahead, fan_out)


def line(times: ForwardTime) -> LinearCost:
    return LinearCost(times.fixed_s, times.each_s)


class Preset(NamedTuple):
    """A pair of models as the paper ran it, with a draft token's `acceptance` rate by temperature."""

    name: str
    models: str
    times: DeviceTimes
    lookahead: int
    fan_out: int
    acceptance: Mapping[float, float]
    hit_rate: float

    def agreement(self, temperature: float) -> StatedAgreement:
        """Return the pair's agreement at a temperature. Raises UsageError if it is not known."""
        if temperature not in self.acceptance:
            known = ", ".join(f"{t:g}" for t in self.acceptance)
            raise UsageError(
                f"the preset {self.name} states no acceptance at temperature {temperature:g}, only at {known}"
            )
        return StatedAgreement(self.acceptance[temperature], self.hit_rate, self.lookahead, self.fan_out)


_LLAMA = Preset(
    "llama",
    "Llama-3.1-70B on 4 H100, Llama-3.2-1B on a fifth",
    DeviceTimes(verify=ForwardTime(14.5e-3, 64e-6), depth=ForwardTime(1.8e-3, 4.5e-6)),
    lookahead=7,
    fan_out=3,
    acceptance={0.0: 0.888, 1.0: 0.771},
    hit_rate=0.85,
)
_QWEN = Preset(
    "qwen",
    "Qwen3-32B, Qwen3-0.6B",
    DeviceTimes(verify=ForwardTime(11.2e-3, 30e-6), depth=ForwardTime(1.8e-3, 2.2e-6)),
    lookahead=4,
    fan_out=2,
    acceptance={0.0: 0.73, 1.0: 0.53},
    hit_rate=0.75,
)
_EAGLE3 = Preset(
    "eagle3",
    "Llama-3.1-8B, EAGLE-3 head",
    DeviceTimes(verify=ForwardTime(4.7e-3, 29e-6), depth=ForwardTime(0.5e-3, 1.8e-6)),
    lookahead=5,
    fan_out=3,
    acceptance={0.0: 0.75, 1.0: 0.65},
    hit_rate=0.84,
)
PRESETS = {preset.name: preset for preset in (_LLAMA, _QWEN, _EAGLE3)}
"""Presets by name. Two are from the public figures of arXiv 2603.03251 and a public re-run of the authors' code.

A token or chain more costs what the simulation (docs/simulation.md) found for 70B from the paper's batches, in
proportion to parameters and devices.
llama: from the re-run. A verification took 15.0 ms, and so did a token of `ar`. A depth took (19.4 - 15.0 - 2.9) /
(.12 x 7) ms: a round's time beyond verification and overhead, divided by the depths that misses waited for. `sd`, at
181.7 tok/s, confirms it: 1.75 ms. The tokens of a round, .88 x 5.68 + .12 x 4.01 with K = 7, give the acceptance at
T = 0. At T = 1 the paper's `sd` is .70 times as fast. The hit rate is the paper's at T = 0; with noise that target and
draft share it is equal at T = 1.
qwen: `ar` runs at 88.8 tok/s. The depth time of Llama's draft and the miss rate of a fan-out of 2 are assumed. `sd` at
136.8 tok/s with K = 4 and the re-run's overhead give the acceptance at T = 0. The acceptance at T = 1 is assumed to
fall as Llama's does. K and F are the authors' for this pair.
eagle3: times of an 8B target and of a draft with 3 % of its bytes on one H200 (docs/gpu.md), acceptance and K assumed,
the hit rate by the paper's law of misses."""
