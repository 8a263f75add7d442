"""What a target and a draft would do that are not running: tokens per second by K, budget and batch, and when a device
for the draft pays. Speeds are those of `tuner.py`, the paper's own those of `theory.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ssd.speculation.fan_out import MOST, hit_rate, optimal_fan_out
from ssd.speculation.theory import acceptance_rate, critical_batch, speedup_of_batch
from ssd.speculation.tuner import Line, Profile, predicted, predicted_sd


@dataclass(frozen=True)
class Pair:
    """A target and its draft. `verify`: seconds of a forward of the target by the tokens of the whole batch; `step`:
    of the draft by the chains of the whole batch; `overhead`: what a round with a draft takes beside its forwards.
    `acceptance[i]`: rate of the (i + 1)-th draft token where all before it were accepted, the last number serves
    beyond. `misses`: (c, r) of c F^-r. Devices: `sd` has its draft on the target's, `ssd` has both kinds."""

    verify: Line
    step: Line
    acceptance: tuple[float, ...]
    misses: tuple[float, float]
    overhead: float = 0.0
    target_gpus: float = 1.0
    draft_gpus: float = 1.0

    def profile(self, batch: int, lookahead: int) -> Profile:
        """As the tuner would have measured it with K = `lookahead`, before any row missed."""
        round_line = Line(self.verify.fixed + self.overhead, self.verify.each)
        rate = acceptance_rate(self.acceptance, lookahead)
        return Profile(round_line, self.step, self.verify.at(batch), self.acceptance, rate, self.misses)


class Grid(NamedTuple):
    """The settings to compare: every K with every budget B that covers its K + 1 accepted lengths. Each K needs such a
    budget (`check`)."""

    lookaheads: tuple[int, ...]
    budgets: tuple[int, ...]

    def check(self) -> None:
        """Raises ValueError for a K that no budget covers, and for a budget that covers no K."""
        if not self.lookaheads or not self.budgets or min(self.lookaheads) < 1:
            raise ValueError("a plan needs a K of at least 1 and a budget")
        longest, least = max(self.lookaheads), min(self.budgets)
        if max(self.budgets) <= longest:
            raise ValueError(f"K = {longest} needs a budget of at least K + 1 = {longest + 1} chains")
        if least <= min(self.lookaheads):
            raise ValueError(f"a budget of {least} is below K + 1 = {min(self.lookaheads) + 1} for every K")


class Setting(NamedTuple):
    """`ssd` with K and F_0..F_K of a budget: tokens per second of the whole batch, and the share of foreseen outcomes.
    A list may have fewer chains than its budget, where a length would have more candidates than the engine prepares."""

    lookahead: int
    budget: int
    fan_out: tuple[int, ...]
    speed: float
    hits: float


@dataclass(frozen=True)
class Forecast:
    """Tokens per second of a whole batch: `ar`; `sd` as (K, speed); `settings` of `ssd`."""

    batch: int
    ar: float
    sd: tuple[tuple[int, float], ...]
    settings: tuple[Setting, ...]

    @cached_property
    def best_sd(self) -> tuple[int, float]:
        return max(self.sd, key=lambda entry: entry[1])

    @cached_property
    def best(self) -> Setting:
        """The fastest setting of `ssd`; of equals the one with the fewest chains."""
        return max(self.settings, key=lambda setting: (setting.speed, -sum(setting.fan_out)))

    @property
    def speeds(self) -> dict[str, float]:
        """Of each mode at its best."""
        return {"ar": self.ar, "sd": self.best_sd[1], "ssd": self.best.speed}

    def per_gpu(self, pair: Pair) -> dict[str, float]:
        """`speeds` over the devices that the mode uses."""
        both = pair.target_gpus + pair.draft_gpus
        return {mode: speed / (both if mode == "ssd" else pair.target_gpus) for mode, speed in self.speeds.items()}


def forecast(pair: Pair, batch: int, grid: Grid) -> Forecast:
    """Every setting of the grid for `batch` sequences."""
    sd, settings = [], []
    for lookahead in grid.lookaheads:
        profile = pair.profile(batch, lookahead)
        sd.append((lookahead, predicted_sd(profile, batch, lookahead)))
        for budget in grid.budgets:
            if budget > lookahead:
                fan_out = optimal_fan_out(profile.rate, pair.misses[1], lookahead, budget)
                fan_out = tuple(min(count, MOST) for count in fan_out)
                speed, hits = (
                    predicted(profile, batch, lookahead, fan_out),
                    hit_rate(profile.rate, fan_out, pair.misses),
                )
                settings.append(Setting(lookahead, budget, fan_out, speed, hits))
    return Forecast(batch, batch / pair.verify.at(batch), tuple(sd), tuple(settings))


class Strict(NamedTuple):
    """The paper's engine, which finishes its tree and lets a batch wait for its missed rows: tokens per second of the
    whole batch with the neural backup (K fresh tokens) and the cheap one (none, no time)."""

    neural: float
    cheap: float


def strict(pair: Pair, batch: int, fan_out: Sequence[int]) -> Strict:
    """Corollary 16 for one setting, where drafts after a hit and after a miss are equally good."""
    p, tokens, round_s, neural = _parts(pair, batch, fan_out)
    lookahead = len(fan_out) - 1
    fill = lookahead * pair.step.at(batch * sum(fan_out)) / round_s

    def speed(on_miss: float, backup: float) -> float:
        return batch * speedup_of_batch(p, tokens, on_miss, fill, backup, batch) / round_s

    return Strict(speed(tokens, neural), speed(1.0, 0.0))


def neural_below(pair: Pair, fan_out: Sequence[int]) -> float:
    """Theorem 17's critical batch for one setting, with the times of a batch of one: there the neural backup is the
    better one below it, the cheap one above; infinite where the neural one always is."""
    p, tokens, _, neural = _parts(pair, 1, fan_out)
    return critical_batch(p, tokens, tokens, 1.0, neural)


def _parts(pair: Pair, batch: int, fan_out: Sequence[int]) -> tuple[float, float, float, float]:
    """Hit rate, tokens of a round, its seconds, and a neural backup for one row in units of these."""
    lookahead = len(fan_out) - 1
    profile = pair.profile(batch, lookahead)
    round_s = profile.verify.at(batch * (lookahead + 1))
    hits = hit_rate(profile.rate, fan_out, pair.misses)
    return hits, profile.tokens(lookahead), round_s, lookahead * pair.step.at(1) / round_s
