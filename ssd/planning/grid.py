"""Predicts the tokens per second of a pair that is not running, by K, budget and batch.

The formulas are those of `ssd.tuning.predictor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ssd.speculation.fan_out import hit_rate
from ssd.tuning.estimates import Measurements
from ssd.tuning.predictor import best_fan_out, predicted, predicted_plain, predicted_remote, predicted_sd


@dataclass(frozen=True)
class Pair(Measurements):
    """The measurements of a target and its draft, and the devices that they take.

    `sd` runs both models on the target's devices, `ssd` uses both kinds."""

    target_gpus: float = 1.0
    draft_gpus: float = 1.0


class Grid(NamedTuple):
    """The settings to compare: every K with every budget B that covers its K + 1 accepted lengths."""

    lookaheads: tuple[int, ...]
    budgets: tuple[int, ...]

    def check(self) -> None:
        """Raise ValueError for a K that no budget covers, or a budget that covers no K."""
        if not self.lookaheads or not self.budgets or min(self.lookaheads) < 1:
            raise ValueError("a plan needs a K of at least 1 and a budget")
        longest, least = max(self.lookaheads), min(self.budgets)
        if max(self.budgets) <= longest:
            raise ValueError(f"K = {longest} needs a budget of at least K + 1 = {longest + 1} chains")
        if least <= min(self.lookaheads):
            raise ValueError(f"a budget of {least} is below K + 1 = {min(self.lookaheads) + 1} for every K")


class Setting(NamedTuple):
    """One setting of `ssd`: K, F_0..F_K within the budget, tok/s of the whole batch, and the hit rate."""

    lookahead: int
    budget: int
    fan_out: tuple[int, ...]
    speed: float
    hits: float


@dataclass(frozen=True)
class Forecast:
    """Tokens per second of a whole batch: of `ar`, of `sd` as (K, speed), and of `ssd` in `settings`."""

    batch: int
    ar: float
    sd: tuple[tuple[int, float], ...]
    settings: tuple[Setting, ...]

    @cached_property
    def best_sd(self) -> tuple[int, float]:
        return max(self.sd, key=lambda entry: entry[1])

    @cached_property
    def best(self) -> Setting:
        """Return the fastest setting of `ssd`, and among equal ones that with the fewest chains."""
        return max(self.settings, key=lambda setting: (setting.speed, -sum(setting.fan_out)))

    @property
    def speeds(self) -> dict[str, float]:
        return {"ar": self.ar, "sd": self.best_sd[1], "ssd": self.best.speed}

    def per_gpu(self, pair: Pair) -> dict[str, float]:
        """Return `speeds` divided by the number of devices that each mode uses."""
        both = pair.target_gpus + pair.draft_gpus
        return {mode: speed / (both if mode == "ssd" else pair.target_gpus) for mode, speed in self.speeds.items()}


def forecast(pair: Pair, batch: int, grid: Grid) -> Forecast:
    """Return the speeds of every setting of the grid for `batch` sequences."""
    sd, settings = [], []
    for lookahead in grid.lookaheads:
        sd.append((lookahead, predicted_sd(pair, batch, lookahead)))
        for budget in grid.budgets:
            if budget > lookahead:
                fan_out = best_fan_out(pair, lookahead, budget)
                speed = predicted(pair, batch, lookahead, fan_out)
                hits = hit_rate(pair.rate(lookahead), fan_out, pair.misses)
                settings.append(Setting(lookahead, budget, fan_out, speed, hits))
    return Forecast(batch, predicted_plain(pair, batch), tuple(sd), tuple(settings))


class LinkForecast(NamedTuple):
    """A forecast of one sequence with the draft a round trip of `rtt` seconds away.

    `speed`: tok/s. `hits`: hit rate. `tokens`: tokens a round. `ahead`: tokens committed in a round trip."""

    rtt: float
    speed: float
    hits: float
    tokens: float
    ahead: int


def forecast_remote(pair: Pair, rtt: float, lookahead: int, fan_out: Sequence[int]) -> LinkForecast:
    """Return the forecast of one setting of `ssd` at batch 1 with the draft a round trip away."""
    found = predicted_remote(pair, rtt, lookahead, fan_out)
    return LinkForecast(rtt, *found, round(rtt * found.speed))
