"""`ssd plan`: predicts a pair's speed at every K, budget and batch, and tells if a draft pays."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import msgspec
from click.core import ParameterSource

from ssd.bench.outputs import COLOURS, check_plot, console, grid, save_plot
from ssd.bench.quantities import Duration, Rates, Real, Times, Wholes, time_text
from ssd.cli.options import engine_options
from ssd.config.emulation import ForwardTime
from ssd.config.params import DRAFTED, MAX_CHAINS, MAX_LOOKAHEAD
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.planning import profile as profiles
from ssd.planning.break_even import MAX_BATCH, BreakEven, Ranges, break_even, paying_batches
from ssd.planning.grid import Forecast, Grid, LinkForecast, Pair, forecast, forecast_remote
from ssd.planning.measured import (
    FIRST_GUESS,
    CoreSpeed,
    Gain,
    MeasuredPair,
    cores_that_help,
    is_measured,
    measured_here,
)
from ssd.planning.profile import FIGURES, PAPER, Misses, Points, Profile

_MOST_COLUMNS = 8
_SHOWN_RATES = 4  # acceptance rates that are printed for a pair on this machine
_TOLD = ("verify", "step", "acceptance", "misses")  # figures that are named if they were not measured
_MEASURING_S = 10.0  # longest wait for the measurements of an engine that is ready
_SHOWN = (1, 2, 4, 8, 16, 32, 64)  # sizes of a table of times that are printed
# Engine options that name the pair, and where and how it computes.
_PLACED = (
    *("target", "draft", "revision", "draft_revision"),
    *("dtype", "draft_dtype", "quantize", "draft_weights", "activations"),
    *("device", "draft_device", "target_cpus", "draft_cpus", "tensor_parallel_size"),
    *("deterministic", "attention", "kv_cache_dtype", "enforce_eager"),
)
_Table: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[str]], int]  # arguments of `ssd.bench.outputs.grid`


def _swept(text: str, values: Wholes, default: str, *names: str) -> Callable[..., Any]:
    return click.option(*names, type=values, default=default, show_default=True, help=text)


@click.command()
@click.option("--profile", "file", type=click.Path(path_type=Path), help="JSON of measured figures (docs/planning.md).")
@click.option("--paper", is_flag=True, help="Plan with the paper's Llama pair, on 4 + 1 H100.")
@click.option("--temperature", type=Real(0, 100), default=0.0, show_default=True, help="Of requests, on this machine.")
@click.option("--verify", type=Times(), help="A forward of the target, plus each token: 18.2ms+64us.")
@click.option("--step", type=Times(), help="A forward of the draft, plus each chain.")
@click.option("--overhead", "overhead_s", type=Duration(), help="Time of a round beside its forwards.")
@click.option(
    "--acceptance", type=Rates(most=1), help="Rate of every draft token, or rates by position; the last repeats."
)
@click.option("--misses", type=Rates(2), help="c,r: the miss rate is c F^-r at fan-out F.")
@click.option("--target-gpus", type=Real(min=0, min_open=True), help="GPUs of the target.")
@click.option("--draft-gpus", type=Real(min=0), help="GPUs of the draft; 0: it costs none.")
@_swept("K: draft tokens per round.", Wholes(1, MAX_LOOKAHEAD), "1-8", "-k", "--num-speculative-tokens", "lookaheads")
@_swept("B: outcomes prepared per sequence.", Wholes(2, MAX_CHAINS), "8,16,24,32", "--budget", "budgets")
@_swept("Sequences at the same time.", Wholes(1, MAX_BATCH), "1,2,4,8,16,32", "--batch", "batches")
@click.option(
    "--rtt", "rtts", type=Duration(), multiple=True, help="Also with the draft a round trip away: --rtt 20ms."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw tok/s over the batch: FILE.png, .svg or .pdf.")
@engine_options(without=set(EngineOptions.__struct_fields__) - set(_PLACED))
@click.pass_context
def plan(
    context: click.Context,
    engine: EngineOptions,
    file: Path | None,
    paper: bool,
    temperature: float,
    lookaheads: tuple[int, ...],
    budgets: tuple[int, ...],
    batches: tuple[int, ...],
    rtts: tuple[float, ...],
    as_json: bool,
    plot: Path | None,
    **figures: Any,
) -> None:
    """Predict tok/s of ar, sd and ssd on this machine, their best settings, and whether a draft pays.

    Figures are those that the engine has measured of the pair on this machine. A pair that was never started here is
    started once, to measure it. With --profile or --paper (Llama-3.1-70B on 4 H100, Llama-3.2-1B on a fifth) nothing is
    loaded or run, and every K and budget is printed. Options of figures win over all of these."""
    grid = Grid(lookaheads, budgets)
    try:
        grid.check()
    except ValueError as error:
        raise UsageError(f"--budget, -k: {error}") from None
    check_plot(plot)
    _check_base(context, paper, file)
    given, here = {name: value for name, value in figures.items() if value is not None}, None
    if paper:
        profile, sources = _with_options(PAPER, PAPER.name, given)
    elif file is not None:
        profile, sources = _with_options(profiles.read(file), f"profile {file.name}", given)
    else:
        here = _measured(engine, temperature)
        profile, sources = _with_options(here.profile, "this machine", given)
    pair = profile.pair()
    forecasts = tuple(forecast(pair, batch, grid) for batch in batches)
    break_evens = tuple(break_even(pair, found, grid) for found in forecasts)
    best = forecast(pair, 1, grid).best
    links = tuple(forecast_remote(pair, rtt, best.lookahead, best.fan_out) for rtt in rtts)
    paying = paying_batches(pair, grid)
    gains = None
    if here is not None:
        gains = tuple(_gain(found) if given else here.gain(found.batch) for found in forecasts)
    scaled = {} if here is None or given else here.on_more_cores()
    more_cores = {count: forecast(found, 1, grid) for count, found in scaled.items()}
    report = PlanReport(profile, pair, sources, grid, forecasts, break_evens, paying, here, gains, links, more_cores)
    if plot is not None:
        _draw(plot, pair, forecasts, profile.name)
        click.echo(f"wrote {plot}", err=True)
    if as_json:
        click.echo(json.dumps(_as_json(report), indent=1))
    else:
        _print(report)


def _check_base(context: click.Context, paper: bool, file: Path | None) -> None:
    if paper and file is not None:
        raise UsageError("give --paper or --profile, not both")
    for name in ("temperature", *_PLACED) if paper or file is not None else ():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            other = "--paper" if paper else "--profile"
            raise UsageError(f"--{name.replace('_', '-')} is of a pair on this machine: leave out {other}")


def _measured(engine: EngineOptions, temperature: float) -> MeasuredPair:
    """Return the measurements of a pair; start it once if there are none.

    Raises UsageError without a draft, and if the start measured nothing."""
    from ssd.launch.resolve import resolve

    config = resolve(engine)
    if config.draft is not None and not is_measured(config):
        from ssd.cli.session import loading, process_setup
        from ssd.llm import running

        click.echo(f"starting {config.target_name} and {config.draft_name} once, to measure them", err=True)
        with process_setup(), running(config, loading):
            deadline = time.monotonic() + _MEASURING_S
            while not is_measured(config, rough=True) and time.monotonic() < deadline:
                time.sleep(0.1)
    return measured_here(config, temperature)


def _gain(found: Forecast) -> Gain:
    (lookahead, sd), best = found.best_sd, found.best
    if best.speed < sd:
        return Gain(found.batch, "sd", lookahead, sd / found.ar)
    return Gain(found.batch, "ssd", best.lookahead, best.speed / found.ar)


def _with_options(base: Profile, name: str, given: dict[str, Any]) -> tuple[Profile, dict[str, str]]:
    """Return `base` with the figures that were `given`, and the source of each figure.

    Raises UsageError if a figure is out of bounds."""
    for figure in {"verify", "step"} & given.keys():
        given |= {figure: ForwardTime(*given[figure]), f"{figure}_alone": None}
    if "misses" in given:
        given["misses"] = Misses(*given["misses"])
    assumed = {figure: why for figure, why in base.assumed.items() if figure not in given}
    profile = base
    if given:
        profile = profiles.checked(base, name=f"{base.name}, with options", assumed=assumed, **given)
    sources = {figure: name for figure in FIGURES if getattr(profile, figure) is not None}
    sources |= {figure: f"{name}, not measured: {why}" for figure, why in assumed.items() if figure in sources}
    return profile, sources | {figure: "option" for figure in given if figure in sources}


def _print(report: PlanReport) -> None:
    output = console()
    for table in _tables(report):
        output.print(grid(*table))
    for line in (_sentences if report.here is None else _sentences_here)(report):
        output.print(f"- {line}", soft_wrap=True, highlight=False)


def _draw(file: Path, pair: Pair, forecasts: Sequence[Forecast], name: str) -> None:
    """Plot tok/s over the batch size, each mode at its best: of all devices together, and per device.

    matplotlib, an optional extra, is loaded only here. Raises UsageError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    together, apart = figure.subplots(1, 2)
    batches = [found.batch for found in forecasts]
    for mode in forecasts[0].speeds:
        colour = COLOURS[mode]
        together.plot(batches, [found.speeds[mode] for found in forecasts], "o-", color=colour, label=mode)
        apart.plot(batches, [found.per_gpu(pair)[mode] for found in forecasts], "o-", color=colour, label=mode)
    together.set_ylabel("predicted tok/s")
    both = pair.target_gpus + pair.draft_gpus
    apart.set_ylabel(f"predicted tok/s per GPU (ssd: of {both:g}; ar, sd: of {pair.target_gpus:g})")
    for axes in (together, apart):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_xlabel("batch")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(name)
    save_plot(figure, file)


@dataclass(frozen=True)
class PlanReport:
    """All results of a plan.

    `sources`: the origin of each figure of the profile. `here`: measurements on this machine, and `gains`: a draft's
    gain there; None with --paper or --profile. At batch 1: `links`, forecasts with the draft on another machine, and
    `more_cores`, by number, on more cores than this machine has."""

    profile: Profile
    pair: Pair
    sources: Mapping[str, str]
    grid: Grid
    forecasts: tuple[Forecast, ...]
    break_evens: tuple[BreakEven, ...]
    paying_batches: Ranges
    here: MeasuredPair | None
    gains: tuple[Gain, ...] | None
    links: tuple[LinkForecast, ...]
    more_cores: Mapping[int, Forecast]


def _as_json(report: PlanReport) -> dict[str, Any]:
    """Return the report with speeds in tok/s of the whole batch."""
    return {
        "profile": msgspec.to_builtins(report.profile),
        "sources": dict(report.sources),
        "batches": [
            _batch_json(report.pair, found, even)
            for found, even in zip(report.forecasts, report.break_evens, strict=True)
        ],
        "paying_batches": report.paying_batches,
        "links": [found._asdict() for found in report.links],
        "cores": [] if report.here is None else [found._asdict() for found in report.here.by_cores()],
        "more_cores": [{"cores": count, **found.speeds} for count, found in report.more_cores.items()],
    }


def _batch_json(pair: Pair, found: Forecast, even: BreakEven) -> dict[str, Any]:
    lookahead, speed = found.best_sd
    return {
        "batch": found.batch,
        "ar": found.ar,
        "sd": [{"lookahead": k, "speed": value} for k, value in found.sd],
        "ssd": [setting._asdict() for setting in found.settings],
        "best": {"sd": {"lookahead": lookahead, "speed": speed}, "ssd": found.best._asdict()},
        "fastest": _fastest(found.speeds),
        "per_gpu": found.per_gpu(pair),
        "break_even": {key: value for key, value in even._asdict().items() if key != "batch"},
    }


def _tables(report: PlanReport) -> Iterator[_Table]:
    if report.here is None:
        yield _inputs(report)
        for found in report.forecasts:
            yield _speeds(found, report.grid)
    yield _best(report)
    if report.here is None:
        yield _break_even(report)
    if report.links:
        yield _links(report)


def _sentences_here(report: PlanReport) -> Iterator[str]:
    """Yield sentences about the figures of this machine, and last one that says if a draft pays."""
    assert report.here is not None and report.gains is not None
    rates = ", ".join(f"{rate:.2f}" for rate in report.pair.acceptance[:_SHOWN_RATES])
    yield f"{report.profile.name}; rates of acceptance by position: {rates}."
    told = {name: report.sources[name] for name in _TOLD if report.sources[name] != "this machine"}
    for source in dict.fromkeys(told.values()):
        yield f"{', '.join(_said(name) for name, of in told.items() if of == source)}: {source}."
    if speeds := report.here.by_cores():
        yield _by_cores(speeds)
    if report.more_cores:
        yield _on_more_cores(report.more_cores)
    if report.here.rough:
        yield "Other programs disturbed the measuring: these figures are rough. Try again on a quieter machine."
    else:
        yield f"Forwards were measured when this pair started here; delete {report.here.file} to measure again."
    if report.pair.draft_gpus:
        yield _per_gpu(report)
    yield _verdict(report.gains, is_guessed=report.sources["acceptance"].endswith(FIRST_GUESS))


def _by_cores(speeds: Sequence[CoreSpeed]) -> str:
    measured, predicted = (
        ", ".join(f"{found.speed:.0f} on {found.cores}" for found in speeds if found.measured is kind)
        for kind in (True, False)
    )
    said = f"ar at batch 1 by cores, tok/s: {measured} measured" + (f", {predicted} predicted" if predicted else "")
    last = cores_that_help(speeds)
    return said + (f"; beyond {last} a doubling brings under a tenth." if last else ".")


def _on_more_cores(found: Mapping[int, Forecast]) -> str:
    modes = "; ".join(f"{mode} " + ", ".join(f"{f.speeds[mode]:.0f}" for f in found.values()) for mode in DRAFTED)
    said = f"On {', '.join(map(str, found))} cores, predicted tok/s at batch 1: {modes}"
    first = next((count for count, one in found.items() if _fastest(one.speeds) == "ssd"), None)
    return f"{said}: ssd is the fastest from {first} on." if first else f"{said}: ssd is not the fastest."


def _verdict(gains: Sequence[Gain], is_guessed: bool) -> str:
    """Return a sentence that says if a draft pays on this machine, and its best gain.

    `is_guessed`: the acceptance was not measured."""
    paying = [gain for gain in gains if gain.pays]
    best = max(paying or gains, key=lambda gain: gain.ratio)
    found = f"{best.mode} (K {best.lookahead}) at batch {best.batch}: {best.ratio:.2f} times the best without it"
    if is_guessed:
        return (
            f"How often the models agree is not measured: run ssd bench latency first. By a guess, its best is {found}."
        )
    if not paying:
        return f"A draft does not pay here. Its best is {found}; --mode auto leaves it alone."
    batches = ", ".join(str(gain.batch) for gain in paying)
    return f"A draft pays here at batch {batches}. Its best is {found}; --mode auto uses it where it pays."


def _links(report: PlanReport) -> _Table:
    best, plain = forecast(report.pair, 1, report.grid).best, 1 / report.pair.alone_s(1)
    rows = []
    for found in report.links:
        figures = f"{found.speed:.1f}", f"{found.speed / plain:.2f}", f"{found.hits:.1%}", f"{found.tokens:.2f}"
        rows.append((time_text(found.rtt), *figures, str(found.ahead)))
    columns = ("round trip", "ssd", "ssd/ar", "hit rate", "tokens a round", "tokens ahead")
    return f"Draft on another machine, batch 1 (K {best.lookahead}, B {best.budget}): tok/s", columns, rows, 0


def _sentences(report: PlanReport) -> Iterator[str]:
    """Yield the sentences below the tables."""
    pair = report.pair
    yield _per_gpu(report)
    longest = max(report.grid.lookaheads)
    yield "=sd, =ar: the rate from which on ssd per GPU is not below theirs. Worth: GPUs that the draft may take."
    yield f"Acceptance rates are over K = {longest}, all positions changed alike; now {pair.rate(longest):.3f}."
    if any(found.best.lookahead == longest for found in report.forecasts):
        yield "The best K is the largest one asked for: a wider range, such as -k 1-16, may hold a better one."
    paper = [_said(figure) for figure, source in report.sources.items() if source == PAPER.name]
    if paper:
        yield f"{', '.join(paper)}: {PAPER.name}'s, not your machine's. Give a --profile or options."


def _per_gpu(report: PlanReport) -> str:
    pair = report.pair
    both = f"{pair.target_gpus:g} + {pair.draft_gpus:g} GPUs"
    sizes = " and ".join(f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in report.paying_batches)
    if not sizes:
        return f"Per GPU, ssd on {both} is behind at every batch size up to {MAX_BATCH}: a draft GPU does not pay."
    last = report.paying_batches[-1][1]
    beyond = "" if last >= MAX_BATCH else f", and no longer from {last + 1:g} on"
    return f"Per GPU, ssd on {both} is ahead of ar and sd on {pair.target_gpus:g} at batch {sizes}{beyond}."


def _inputs(report: PlanReport) -> _Table:
    pair = report.pair
    profile = report.profile
    values = {
        "verify": _times_text(profile.verify, "token"),
        "verify_alone": _times_text(profile.verify_alone, "token"),
        "step": _times_text(profile.step, "chain"),
        "step_alone": _times_text(profile.step_alone, "chain"),
        "overhead_s": time_text(pair.overhead),
        "acceptance": ", ".join(f"{rate:.3g}" for rate in pair.acceptance),
        "misses": f"{pair.misses[0]:.3g} F^-{pair.misses[1]:.3g}",
        "target_gpus": f"{pair.target_gpus:g}",
        "draft_gpus": f"{pair.draft_gpus:g}",
    }
    rows = [(_said(name), values[name], source) for name, source in report.sources.items()]
    return f"Profile: {report.profile.name}", ("figure", "value", "from"), rows, 3


def _times_text(times: ForwardTime | Points | None, unit: str) -> str:
    if isinstance(times, ForwardTime):
        return time_text(times.line) + (f" a {unit}" if times.each_s else "")
    return ", ".join(f"{time_text(seconds)} for {size}" for size, seconds in times or () if size in _SHOWN)


def _speeds(found: Forecast, asked: Grid) -> _Table:
    """Return tok/s by K (rows) and B (columns)."""
    shown = asked.budgets if len(asked.budgets) <= _MOST_COLUMNS else ()
    speeds = {(setting.lookahead, setting.budget): setting.speed for setting in found.settings}
    rows = []
    for lookahead, sd in found.sd:
        best = max(speed for (k, _), speed in speeds.items() if k == lookahead)
        cells = [_number(speeds.get((lookahead, budget))) for budget in shown]
        ratios = (f"{sd / found.ar:.2f}", f"{best / found.ar:.2f}", f"{best / sd:.2f}")
        rows.append((str(lookahead), _number(sd), *cells, _number(best), *ratios))
    columns = ("K", "sd", *(f"ssd B={budget}" for budget in shown), "ssd, best", "sd/ar", "ssd/ar", "ssd/sd")
    return f"Batch {found.batch}: predicted tok/s; ar {found.ar:.1f}", columns, rows, 0


def _best(report: PlanReport) -> _Table:
    rows = []
    for found in report.forecasts:
        best, (lookahead, speed) = found.best, found.best_sd
        fan_out = ",".join(map(str, best.fan_out))
        sd, ssd = f"{speed:.1f} (K {lookahead})", f"{best.speed:.1f} (K {best.lookahead}, B {best.budget})"
        rows.append((str(found.batch), f"{found.ar:.1f}", sd, ssd, fan_out, f"{best.hits:.1%}", _fastest(found.speeds)))
    columns = ("batch", "ar", "sd", "ssd", "fan-out of ssd", "hit rate", "fastest")
    return "Best settings, tok/s of the whole batch", columns, rows, 0


def _break_even(report: PlanReport) -> _Table:
    rows = []
    for found, even in zip(report.forecasts, report.break_evens, strict=True):
        per_gpu = [f"{speed:.1f}" for speed in found.per_gpu(report.pair).values()]
        thresholds = (even.acceptance_over_sd, even.acceptance_over_ar, even.hits_over_sd)
        pays = "yes" if even.pays else "no"
        rows.append((str(found.batch), *per_gpu, pays, f"{even.worth:.2f}", *map(_ranges, thresholds)))
    columns = ("batch", "ar", "sd", "ssd", "pays", "worth GPUs", "acceptance =sd", "acceptance =ar", "hit rate =sd")
    title = f"Break-even, tok/s per GPU: ar and sd on {report.pair.target_gpus:g}, ssd on "
    return f"{title}{report.pair.target_gpus:g} + {report.pair.draft_gpus:g}", columns, rows, 0


def _ranges(ranges: Ranges) -> str:
    return ", ".join(f"{a:.3f} up" if b > 0.999 else f"{a:.3f}-{b:.3f}" for a, b in ranges) or "never"


def _said(figure: str) -> str:
    return figure.removesuffix("_s").replace("_", "-")


def _number(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:.1f}"


def _fastest(speeds: Mapping[str, float]) -> str:
    return max(speeds, key=lambda mode: speeds[mode])
