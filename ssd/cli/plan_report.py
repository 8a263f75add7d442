"""What `ssd plan` prints: one JSON object, or tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ssd.cli.quantities import written
from ssd.profile import PAPER, Profile
from ssd.speculation.break_even import MAX_BATCH, BreakEven, Ranges
from ssd.speculation.planning import Forecast, Grid, Pair, neural_below, strict
from ssd.speculation.theory import acceptance_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_COLUMNS = 8


@dataclass(frozen=True)
class Report:
    """Everything that was worked out; `sources` says of each figure of the profile where it comes from."""

    profile: Profile
    pair: Pair
    sources: Mapping[str, str]
    grid: Grid
    forecasts: tuple[Forecast, ...]
    break_evens: tuple[BreakEven, ...]
    paying_batches: Ranges


def as_json(report: Report) -> dict[str, Any]:
    """Speeds in tok/s of the whole batch. `critical_batch` null: the neural backup is better in every batch."""
    return {
        "profile": msgspec.to_builtins(report.profile),
        "sources": dict(report.sources),
        "batches": [
            _batch_json(report.pair, found, even)
            for found, even in zip(report.forecasts, report.break_evens, strict=True)
        ],
        "paying_batches": report.paying_batches,
    }


def _batch_json(pair: Pair, found: Forecast, even: BreakEven) -> dict[str, Any]:
    lookahead, speed = found.best_sd
    critical = neural_below(pair, found.best.fan_out)
    return {
        "batch": found.batch,
        "ar": found.ar,
        "sd": [{"lookahead": k, "speed": value} for k, value in found.sd],
        "ssd": [setting._asdict() for setting in found.settings],
        "best": {"sd": {"lookahead": lookahead, "speed": speed}, "ssd": found.best._asdict()},
        "fastest": _fastest(found.speeds),
        "per_gpu": found.per_gpu(pair),
        "strict": strict(pair, found.batch, found.best.fan_out)._asdict(),
        "critical_batch": critical if math.isfinite(critical) else None,
        "break_even": {key: value for key, value in even._asdict().items() if key != "batch"},
    }


def tables(report: Report) -> Iterator[RenderableType]:
    """In the order in which they are read."""
    yield _inputs(report)
    for found in report.forecasts:
        yield _speeds(found, report.grid)
    yield _best(report)
    yield _break_even(report)
    yield _strict(report)


def sentences(report: Report) -> Iterator[str]:
    """What the tables come to."""
    pair = report.pair
    both = f"{pair.target_gpus:g} + {pair.draft_gpus:g} GPUs"
    sizes = " and ".join(f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in report.paying_batches)
    if not sizes:
        yield f"Per GPU, ssd on {both} is behind at every batch size up to {MAX_BATCH}: a draft GPU does not pay."
    else:
        last = report.paying_batches[-1][1]
        beyond = "" if last >= MAX_BATCH else f", and no longer from {last + 1:g} on"
        yield f"Per GPU, ssd on {both} is ahead of ar and sd on {pair.target_gpus:g} at batch {sizes}{beyond}."
    longest = max(report.grid.lookaheads)
    rate = acceptance_rate(pair.acceptance, longest)
    yield "=sd, =ar: the rate from which on ssd per GPU is not below theirs. Worth: GPUs that the draft may take."
    yield f"Acceptance rates are over K = {longest}, all positions changed alike; now {rate:.3f}."
    if any(found.best.lookahead == longest for found in report.forecasts):
        yield "The best K is the largest one asked for: a wider range, such as -k 1-16, may hold a better one."
    paper = [_said(figure) for figure, source in report.sources.items() if source == PAPER.name]
    if paper:
        yield f"{', '.join(paper)}: {PAPER.name}'s, not your machine's. Give a --profile or options."


def _inputs(report: Report) -> RenderableType:
    from ssd.cli.tables import grid

    pair = report.pair
    values = {
        "verify": written(pair.verify) + (" a token" if pair.verify.each else ""),
        "step": written(pair.step) + (" a chain" if pair.step.each else ""),
        "overhead_s": written(pair.overhead),
        "acceptance": ", ".join(f"{rate:.3g}" for rate in pair.acceptance),
        "misses": f"{pair.misses[0]:.3g} F^-{pair.misses[1]:.3g}",
        "target_gpus": f"{pair.target_gpus:g}",
        "draft_gpus": f"{pair.draft_gpus:g}",
    }
    rows = [(_said(name), value, report.sources[name]) for name, value in values.items()]
    return grid(f"Profile: {report.profile.name}", ("figure", "value", "from"), rows, left=3)


def _speeds(found: Forecast, asked: Grid) -> RenderableType:
    """K by B, tok/s."""
    from ssd.cli.tables import grid

    shown = asked.budgets if len(asked.budgets) <= _MOST_COLUMNS else ()
    speeds = {(setting.lookahead, setting.budget): setting.speed for setting in found.settings}
    rows = []
    for lookahead, sd in found.sd:
        best = max(speed for (k, _), speed in speeds.items() if k == lookahead)
        cells = [_number(speeds.get((lookahead, budget))) for budget in shown]
        ratios = (f"{sd / found.ar:.2f}", f"{best / found.ar:.2f}", f"{best / sd:.2f}")
        rows.append((str(lookahead), _number(sd), *cells, _number(best), *ratios))
    columns = ("K", "sd", *(f"ssd B={budget}" for budget in shown), "ssd, best", "sd/ar", "ssd/ar", "ssd/sd")
    return grid(f"Batch {found.batch}: predicted tok/s; ar {found.ar:.1f}", columns, rows, left=0)


def _best(report: Report) -> RenderableType:
    from ssd.cli.tables import grid

    rows = []
    for found in report.forecasts:
        best, (lookahead, speed) = found.best, found.best_sd
        fan_out = ",".join(map(str, best.fan_out))
        sd, ssd = f"{speed:.1f} (K {lookahead})", f"{best.speed:.1f} (K {best.lookahead}, B {best.budget})"
        rows.append((str(found.batch), f"{found.ar:.1f}", sd, ssd, fan_out, f"{best.hits:.1%}", _fastest(found.speeds)))
    columns = ("batch", "ar", "sd", "ssd", "fan-out of ssd", "hit rate", "fastest")
    return grid("Best settings, tok/s of the whole batch", columns, rows, left=0)


def _break_even(report: Report) -> RenderableType:
    from ssd.cli.tables import grid

    rows = []
    for found, even in zip(report.forecasts, report.break_evens, strict=True):
        per_gpu = [f"{speed:.1f}" for speed in found.per_gpu(report.pair).values()]
        thresholds = (even.acceptance_over_sd, even.acceptance_over_ar, even.hits_over_sd)
        pays = "yes" if even.pays else "no"
        rows.append((str(found.batch), *per_gpu, pays, f"{even.worth:.2f}", *map(_ranges, thresholds)))
    columns = ("batch", "ar", "sd", "ssd", "pays", "worth GPUs", "acceptance =sd", "acceptance =ar", "hit rate =sd")
    title = f"Break-even, tok/s per GPU: ar and sd on {report.pair.target_gpus:g}, ssd on "
    return grid(f"{title}{report.pair.target_gpus:g} + {report.pair.draft_gpus:g}", columns, rows, left=0)


def _strict(report: Report) -> RenderableType:
    from ssd.cli.tables import grid

    rows = []
    for found in report.forecasts:
        speeds = strict(report.pair, found.batch, found.best.fan_out)
        below = neural_below(report.pair, found.best.fan_out)
        better = "neural" if speeds.neural > speeds.cheap else "cheap"
        critical = f"{below:.2f}" if math.isfinite(below) else "every batch"
        rows.append((str(found.batch), f"{speeds.neural:.1f}", f"{speeds.cheap:.1f}", better, critical))
    columns = ("batch", "neural backup", "cheap backup", "better", "neural below (Theorem 17)")
    return grid("The paper's strict engine at the same setting (Corollary 16), tok/s", columns, rows, left=0)


def _ranges(ranges: Ranges) -> str:
    """ "0.35 up" where it holds from there to the top."""
    return ", ".join(f"{a:.3f} up" if b > 0.999 else f"{a:.3f}-{b:.3f}" for a, b in ranges) or "never"


def _said(figure: str) -> str:
    """A figure as its option is called."""
    return figure.removesuffix("_s").replace("_", "-")


def _number(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:.1f}"


def _fastest(speeds: Mapping[str, float]) -> str:
    return max(speeds, key=lambda mode: speeds[mode])
